"""The online loop: it learns, accounts for every sample, survives what fails, and resumes bit for bit."""

from collections import Counter
import dataclasses
import json
import os
from pathlib import Path
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from configs import grpo
from envs.core import EnvironmentFailure, Reason, Verdict
from envs.tool_env import ToolEnv
from models import hf_weights, sharding
from rl import checkpoint, objective, policy, rewards, train, train_rl
from rl import config as config_lib
from rl import learner as learner_lib
from rl.curriculum import DomainConfig
from rl.data.tasks import TaskConfig
from rl.losses import PolicyLossConfig
from rl.optimizer import OptimizerConfig
from rl.rl_config import EvalConfig, RLConfig
from rl.rollout.worker import RolloutConfig
from rl.run import LayoutConfig, LoraConfig, MeshConfig, ModelSource
from tests import tiny_model, toys

ROOT = Path(__file__).resolve().parents[2]
ROLLOUT = RolloutConfig(max_new_tokens=1, max_length=24, slots=64, steps_per_launch=1, prefill_chunk=32)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny_model.write_model(tmp_path_factory.mktemp('rl') / 'model')


def make_config(model, **changes):
  return RLConfig(**({
      'model': ModelSource(str(model)), 'domains': {'tests/toys:one_token': DomainConfig()}, 'num_steps': 3, 'aggregation': 'token_mean',
      'groups': 8, 'group_size': 8, 'rows': 8, 'length': 24, 'rollout': ROLLOUT, 'layout': LayoutConfig(compute_dtype='float32'),
      'mesh': MeshConfig(data=1, fsdp=1), 'optimizer': OptimizerConfig(learning_rate=4e-3, schedule='constant')} | changes))


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  make_mesh = sharding.make_mesh
  monkeypatch.setattr(sharding, 'make_mesh', lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1]))


def read(workdir, name):
  return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


def steps_of(workdir):
  skipped = ('speed/', 'timing_s/', 'time_s', 'rollout/tokens_per_s')
  return {record['step']: {key: value for key, value in record.items() if not key.startswith(skipped)}
          for record in read(workdir, 'metrics.jsonl') if 'train/loss' in record}


def samples_of(workdir, *fields):
  return {(line['group'], line['sample']): tuple(line[field] for field in fields)
          for line in read(workdir, 'trajectories.jsonl') if line['kind'] == 'train' and line['reward'] is not None}


@pytest.fixture(scope='module')
def learned(model, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('rl') / 'learned'
  make_mesh = sharding.make_mesh
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'make_mesh', lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1]))
    results = train_rl.run(make_config(model, num_steps=45, eval=EvalConfig(every_steps=15, problems=100, temperature=1.0)), workdir)
  return workdir, results


def test_a_one_token_task_is_learned(learned):
  workdir, results = learned
  first = next(line for line in read(workdir, 'metrics.jsonl') if 'heldout/pass@1' in line)
  assert first['step'] == 0 and first['heldout/pass@1'] < 0.2
  assert results['heldout/pass@1'] > 0.9


def test_the_first_update_of_a_batch_is_on_policy(learned):
  for record in steps_of(learned[0]).values():
    assert abs(record['policy/ppo_kl']) <= 1e-6 and record['policy/pg_clipfrac'] == 0
    assert abs(record['policy/probs_ratio_max'] - 1) <= 1e-4 and abs(record['policy/probs_ratio_min'] - 1) <= 1e-4
    # Sampler and trainer are one model: their log-probabilities agree.
    assert record['mismatch/logprob_abs_diff'] < 1e-5
    assert abs(record['mismatch/importance_max'] - 1) <= 1e-4


def test_what_a_run_writes(learned):
  workdir, _ = learned
  record = steps_of(workdir)[10]
  lines = [line for line in read(workdir, 'trajectories.jsonl') if line['step'] == 10 and line['kind'] == 'train']
  assert len(lines) == 64
  assert record['critic/score/mean'] == pytest.approx(np.mean([line['reward'] for line in lines]))
  groups = Counter(line['group'] for line in lines)
  by_group = {group: [line['reward'] for line in lines if line['group'] == group] for group in groups}
  assert record['frac_reward_zero_std'] == pytest.approx(np.mean([len(set(rewards)) == 1 for rewards in by_group.values()]))
  assert record['solve_none'] == pytest.approx(np.mean([max(rewards) == 0 for rewards in by_group.values()]))
  for line in lines:
    rewards = np.array(by_group[line['group']])
    wanted = (line['reward'] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if rewards.std() else 0
    assert line['advantage'] == pytest.approx(wanted, abs=1e-5)
    assert line['versions'] == [9] and line['num_sampled'] == 1
  assert record['ledger/issued'] == record['ledger/trained'] == 640
  timing = next(line for line in read(workdir, 'metrics.jsonl') if line['step'] == 10 and 'timing_s/total' in line)
  phases = [value for key, value in timing.items() if key.startswith('timing_s/') and key != 'timing_s/total']
  assert sum(phases) == pytest.approx(timing['timing_s/total'], rel=1e-6)


def test_low_precision_mismatch_is_reported_and_small(model, tmp_path):
  train_rl.run(make_config(model, num_steps=1, layout=LayoutConfig(compute_dtype='bfloat16')), tmp_path / 'run')
  record = steps_of(tmp_path / 'run')[1]
  assert 0 < record['mismatch/logprob_abs_diff'] < 0.03
  assert abs(record['policy/ppo_kl']) <= 1e-6


def test_a_task_of_several_turns_is_learned(model, tmp_path):
  """A few demonstrations show the form of a call; the rest is found by trying."""
  rows = tmp_path / 'rows.jsonl'
  domain = toys.look_and_say()
  rows.write_text(''.join(
      json.dumps({'messages': [{'role': message['role'], 'content': message['content']} for message in domain.demonstration('train', 1, index)]})
      + '\n' for index in range(200)))
  supervised = train.TrainConfig(
      model=ModelSource(str(model)),
      data=train.DataConfig({'train': TaskConfig(paths=(str(rows),), schema='chat', heldout_fraction=0.0)}, rows=8, length=96),
      num_steps=60, mesh=MeshConfig(data=1, fsdp=1), layout=LayoutConfig(compute_dtype='float32', scan=False),
      optimizer=OptimizerConfig(learning_rate=1e-2, schedule='linear'), checkpoint_every_steps=1000)
  train.run(supervised, tmp_path / 'supervised')
  mesh = sharding.make_mesh()
  taught = policy.load(tmp_path / 'supervised', mesh, sharding.TRAIN, 'float32')
  hf_weights.export(tmp_path / 'taught', taught.config, taught.params, dtype='float32', tokenizer=taught.tokenizer)
  rollout = RolloutConfig(max_new_tokens=64, max_length=96, slots=64, steps_per_launch=8, prefill_chunk=32, describe_tools=False)
  results = train_rl.run(make_config(
      tmp_path / 'taught', domains={'tests/toys:look_and_say': DomainConfig()}, num_steps=45, length=96, rollout=rollout,
      optimizer=OptimizerConfig(learning_rate=5e-3, schedule='constant'), eval=EvalConfig(every_steps=45, problems=64, temperature=1.0)),
      tmp_path / 'run')
  first = next(line for line in read(tmp_path / 'run', 'metrics.jsonl') if 'heldout/pass@1' in line)
  assert first['heldout/pass@1'] < 0.8 < results['heldout/pass@1']
  last = [line for line in read(tmp_path / 'run', 'trajectories.jsonl') if line['step'] == 45 and line['kind'] == 'eval' and line['reward'] == 1]
  assert all(line['num_tool_calls'] == 1 and line['num_turns'] == 2 for line in last)


class Faulty(ToolEnv):
  """Fails at the first attempt of some samples, in every way; `always` fails at every attempt of some problems."""
  count = 0
  lock = threading.Lock()
  always = ()

  def reset(self, *, seed=None, options=None):
    index = int(options['problem'].id.rsplit('/', 1)[1])
    with self.lock:
      Faulty.count += 1
      number = Faulty.count
    self.fault = {0: 'reset', 7: 'hang', 14: 'verifier', 21: 'bug', 28: 'sandbox'}.get(number % 35)
    if index in self.always:
      self.fault = 'verifier'
    if self.fault == 'reset':
      raise RuntimeError('this environment cannot be reset')
    if self.fault == 'sandbox':
      raise EnvironmentFailure('bwrap does not start')
    if self.fault == 'verifier':
      self.domain = dataclasses.replace(self.domain, verifier=BrokenVerifier())
    return super().reset(seed=seed, options=options)

  def step(self, action):
    if self.fault == 'hang':
      time.sleep(60)
    if self.fault == 'bug':
      raise KeyError('a bug')
    return super().step(action)


class BrokenVerifier:
  id, version = 'broken', 1

  def verify(self, problem, reply):
    return Verdict(None, Reason.VERIFIER_ERROR, detail='its worker was killed')


def test_faults_are_accounted_for_and_move_no_baseline(model, tmp_path):
  rollout = dataclasses.replace(ROLLOUT, env_timeout_s=1.0)
  config = make_config(model, num_steps=3, rollout=rollout)
  train_rl.run(config, tmp_path / 'clean')
  train_rl.run(config, tmp_path / 'faulty', Faulty)
  record = steps_of(tmp_path / 'faulty')[3]
  assert record['ledger/dropped/env_error'] > 10 and record['ledger/dropped/verifier_error'] > 3
  assert record['ledger/issued'] == record['ledger/trained'] + record['ledger/dropped/env_error'] + record['ledger/dropped/verifier_error']
  # Every sample was issued again, so the run is the one without faults.
  fields = ('problem_id', 'reward', 'advantage', 'num_sampled', 'mean_logprob')
  assert samples_of(tmp_path / 'faulty', *fields) == samples_of(tmp_path / 'clean', *fields)


def test_faults_that_last_leave_their_group(model, tmp_path):
  always = type('Always', (Faulty,), {'always': (2, 3)})
  config = make_config(model, num_steps=2, rollout=dataclasses.replace(ROLLOUT, env_timeout_s=1.0, max_attempts=2))
  train_rl.run(config, tmp_path / 'run', always)
  lines = [line for line in read(tmp_path / 'run', 'trajectories.jsonl') if line['kind'] == 'train']
  failed = [line for line in lines if line['problem_id'].endswith(('/2', '/3'))]
  assert {line['reward'] for line in failed} == {None} and {line['outcome'] for line in failed} == {'verifier_error'}
  assert {line['dropped'] for line in failed} == {'group_too_small'}
  by_group = {}
  for line in lines:
    if line['reward'] is not None:
      by_group.setdefault(line['group'], []).append((line['reward'], line['advantage']))
  for group in by_group.values():
    rewards, advantages = np.array(group).T
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if rewards.std() else np.zeros(len(rewards))
    np.testing.assert_allclose(advantages, wanted, atol=1e-5)
  record = steps_of(tmp_path / 'run')[2]
  dropped = sum(value for key, value in record.items() if key.startswith('ledger/dropped/'))
  assert record['ledger/issued'] == record['ledger/trained'] + dropped


def test_environments_that_all_fail_end_the_run_with_their_reason(model, tmp_path):
  always = type('Always', (Faulty,), {'always': range(1000)})
  with pytest.raises(RuntimeError, match='None of 8 groups came through, because the environments fail and not the policy: .*x '):
    train_rl.run(make_config(model, rollout=dataclasses.replace(ROLLOUT, env_timeout_s=1.0)), tmp_path / 'run', always)


PROGRAM = """
import sys
from tests import conftest
import jax
from models import sharding
make_mesh = sharding.make_mesh
sharding.make_mesh = lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1])
from rl import train_rl
from tests.rl.test_train_rl import make_config
train_rl.run(make_config(sys.argv[1], num_steps=14, checkpoint_every_steps=3, max_rounds=2), sys.argv[2])
"""


def program(model, workdir):
  return {'args': [sys.executable, '-c', PROGRAM, str(model), str(workdir)], 'cwd': ROOT, 'env': os.environ | {'PYTHONPATH': str(ROOT)}}


def run_to_the_end(model, workdir):
  done = subprocess.run(**program(model, workdir), capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr


def final_state(model, workdir):
  abstract = learner_lib.abstract_state(train_rl.initial_state(*train_rl.set_up(make_config(model))))
  return checkpoint.read_state(workdir / 'checkpoints', abstract), checkpoint.read_host(workdir / 'checkpoints')


def test_kill_9_at_a_random_step_changes_nothing(model, tmp_path):
  whole = tmp_path / 'whole'
  run_to_the_end(model, whole)
  workdir = tmp_path / 'killed'
  for num_lines in sorted(np.random.default_rng(0).integers(2, 13, 2)):
    process = subprocess.Popen(**program(model, workdir), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 200
    while process.poll() is None and time.time() < deadline:
      path = workdir / 'metrics.jsonl'
      if path.exists() and len(path.read_text().splitlines()) >= num_lines:
        break
      time.sleep(0.002)
    process.kill()
    process.wait()
  run_to_the_end(model, workdir)
  state, host = final_state(model, workdir)
  wanted, wanted_host = final_state(model, whole)
  jax.tree.map(np.testing.assert_array_equal, state, wanted)
  assert host.progress == wanted_host.progress
  trained = [Counter(line['problem_id'] for line in read(path, 'trajectories.jsonl')) for path in (workdir, whole)]
  assert trained[0] == trained[1] and len(trained[0]) > 50
  assert steps_of(workdir) == steps_of(whole)


def test_a_finished_run_is_not_run_again_and_another_is_refused(learned, model):
  workdir, _ = learned
  config = make_config(model, num_steps=45, eval=EvalConfig(every_steps=15, problems=100, temperature=1.0))
  before = (workdir / 'trajectories.jsonl').read_bytes()
  assert train_rl.run(config, workdir) == {}
  with pytest.raises(ValueError, match='holds a run that differs: groups: 8 there, 4 now'):
    train_rl.run(dataclasses.replace(config, groups=4), workdir)
  assert (workdir / 'trajectories.jsonl').read_bytes() == before


# Those that differ in what the loop has to do; gspo, cispo and rloo learn in test_ppo, and that all are built is seen in test_objective.
@pytest.mark.parametrize('variant', ['grpo', 'dr_grpo', 'dapo', 'reinforce_pp_baseline', 'opo', 'naive', 'deepseek_v32'])
def test_variants_are_settings(model, tmp_path, variant):
  config = grpo.get_config(f'variant={variant}')
  config.model.path = str(model)
  config.domains = {'tests/toys:one_token': {}}
  config.update_from_flattened_dict({
      'num_steps': 2, 'groups': 8, 'group_size': 8, 'rows': 4, 'length': 24, 'eval.every_steps': 0, 'layout.compute_dtype': 'float32',
      'layout.remat': 'none', 'optimizer.learning_rate': 1e-3, 'mesh.fsdp': 1, 'overlong_buffer': 1, 'minibatches': 2, 'loss.kl_coef': 0.01,
      'rollout.max_new_tokens': 1, 'rollout.max_length': 24, 'rollout.slots': 64, 'rollout.steps_per_launch': 1})
  built = config_lib.build(RLConfig, config)
  train_rl.run(built, tmp_path / 'run')
  records = steps_of(tmp_path / 'run')
  assert records[2]['train/grad_norm'] > 0 and np.isfinite(records[2]['train/loss'])
  assert (tmp_path / 'run/objective.txt').read_text() == objective.describe(built)
  # The reference is the policy before the first step.
  assert abs(records[1]['policy/reference_kl_k1']) < 0.05 and records[2]['policy/reference_kl_k2'] > 0
  if variant == 'dapo':
    lines = read(tmp_path / 'run', 'trajectories.jsonl')
    assert {line['dropped'] for line in lines} == {'', 'no_signal'}
    assert records[1]['critic/rewards/max'] < records[1]['critic/score/max']  # One token of at most one is the end of the buffer.


def test_adapters_are_trained_against_their_base(model, tmp_path):
  config = make_config(model, num_steps=2, lora=LoraConfig(rank=4), loss=PolicyLossConfig(kl_coef=0.1), optimizer=OptimizerConfig(
      learning_rate=1e-2, schedule='constant'), layout=LayoutConfig(compute_dtype='float32', scan=False))
  train_rl.run(config, tmp_path / 'run')
  records = steps_of(tmp_path / 'run')
  assert abs(records[1]['policy/reference_kl_k2']) < 1e-9 < records[2]['policy/reference_kl_k2']
  tuned = policy.load(tmp_path / 'run', sharding.make_mesh(), sharding.TRAIN, 'float32')
  assert tuned.chat_template == 'plain'


def paid(config, groups):
  found = rewards.pay(config, groups)
  return found.paid_QU, found.is_used_QU


def test_overlong_samples():
  from rl.types import Group
  from tests.rl.test_worker import collect, make_worker

  domain = toys.one_token()
  worker, *_ = make_worker(domain, lambda id, text: 'a' * (1 + 2 * id[1]), max_new_tokens=4)
  groups = collect(worker, domain, 1, 3)
  assert [one.outcome for one in groups[0].trajectories] == ['ok', 'ok', 'length']
  config = make_config('/model', group_size=3, rollout=dataclasses.replace(ROLLOUT, max_new_tokens=4), overlong_buffer=2)
  earned, used = paid(config, groups)
  assert earned.tolist() == [[1.0, 0.0, 0.0]] and used.tolist() == [[True] * 3]
  earned, used = paid(dataclasses.replace(config, overlong='mask'), groups)
  assert used.tolist() == [[True, True, False]]
  # Replies of 2, 4 and 4 tokens, their ends included; the buffer is tokens 3 and 4.
  earned, _ = paid(dataclasses.replace(config, overlong='penalty'), groups)
  assert earned.tolist() == [[1.0, -1.0, -1.0]]
  assert isinstance(groups[0], Group)


@pytest.mark.parametrize('changes, message', [
    ({'num_steps': 0}, 'num_steps=0 must be at least 1'),
    ({'length': 16}, 'rollout.max_length=24 does not fit into rows of length=16'),
    ({'overlong': 'penalty'}, 'overlong_buffer=32 is beyond rollout.max_new_tokens=1'),
    ({'minibatches': 9}, 'minibatches=9 cannot share groups=8'),
    ({'group_size': 1}, "group_size=1 leaves nothing to compare with advantage.center='mean'"),
    ({'rollout': dataclasses.replace(ROLLOUT, min_group_size=9)}, 'rollout.min_group_size=9 is more than group_size=8'),
])
def test_bad_settings(changes, message):
  with pytest.raises(ValueError, match=message.replace('(', r'\(')):
    make_config('/model', **changes)


def test_a_mesh_trains_as_one_device_does(model, tmp_path, monkeypatch):
  train_rl.run(make_config(model, num_steps=1), tmp_path / 'one')
  monkeypatch.undo()
  make_mesh = sharding.make_mesh
  monkeypatch.setattr(sharding, 'make_mesh', lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:4]))
  train_rl.run(make_config(model, num_steps=1, mesh=MeshConfig(data=2, fsdp=2)), tmp_path / 'four')
  fields = ('problem_id', 'reward', 'advantage')
  assert samples_of(tmp_path / 'four', *fields) == samples_of(tmp_path / 'one', *fields)
  one, four = steps_of(tmp_path / 'one')[1], steps_of(tmp_path / 'four')[1]
  assert four['train/grad_norm'] == pytest.approx(one['train/grad_norm'], rel=1e-4)
  assert four['mismatch/logprob_abs_diff'] < 1e-5


def test_prompts_longer_than_a_device_holds_are_sampled_and_learned_from(model, tmp_path, monkeypatch):
  """320 tokens over 8 devices, in the cache, in prefill and in the learner; the same run as on one device."""
  rollout = dataclasses.replace(ROLLOUT, max_length=320, slots=16, prefill_chunk=64)
  changes = {'domains': {'tests/toys:after_a_long_text': DomainConfig()}, 'num_steps': 2, 'groups': 2, 'group_size': 8, 'rows': 4,
             'length': 320, 'rollout': rollout}
  train_rl.run(make_config(model, **changes), tmp_path / 'one')
  monkeypatch.undo()
  train_rl.run(make_config(model, mesh=MeshConfig(fsdp=1, seq=4, ulysses=2), **changes), tmp_path / 'eight')
  fields = ('problem_id', 'reward', 'advantage')
  samples = samples_of(tmp_path / 'one', *fields)
  assert samples_of(tmp_path / 'eight', *fields) == samples
  assert len({reward for _, reward, _ in samples.values()}) > 1
  for one, eight in zip(steps_of(tmp_path / 'one').values(), steps_of(tmp_path / 'eight').values(), strict=True):
    assert one['train/grad_norm'] > 0
    assert eight['train/grad_norm'] == pytest.approx(one['train/grad_norm'], rel=1e-4)
    assert eight['mismatch/logprob_abs_diff'] < 1e-5
