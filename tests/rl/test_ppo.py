"""The algorithms of the online loop, end to end: each learns a toy task, with a critic, stale samples and a KL term in the reward too."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs import grpo, ppo
from models import sharding
from rl import checkpoint, train_rl
from rl import config as config_lib
from rl import learner as learner_lib
from rl.critic import CriticConfig
from rl.losses import PolicyLossConfig
from rl.optimizer import OptimizerConfig
from rl.proxy_reward import RewardModelConfig
from rl.rl_config import AdvantageConfig, EvalConfig, ProcessConfig, RewardConfig, RewardKLConfig, RLConfig
from rl.rollout.replay import ReplayQueue
from rl.run import LoraConfig
from tests.rl.test_replay import check_same
from tests.rl.test_train_rl import ROLLOUT, make_config, model, one_device, read, steps_of  # noqa: F401

GAE = AdvantageConfig('gae', center='none', scale='none', whiten=True)
CRITIC = CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-2, schedule='constant'))


def of_preset(name, **changes):
  """Return the algorithm of a preset as fields of a config, with changes that this task needs."""
  preset = ppo.get_config() if name == 'ppo' else grpo.get_config(f'variant={name}')
  preset.model.path = '/model'
  preset.update_from_flattened_dict(changes)
  config = config_lib.build(RLConfig, preset)
  return {field: getattr(config, field) for field in ('advantage', 'critic', 'reward_kl', 'loss', 'aggregation', 'minibatches')}


ALGORITHMS = {
    'ppo': {**of_preset('ppo', **{'critic.optimizer.learning_rate': 1e-2, 'critic.warmup_steps': 0}), 'groups': 64, 'group_size': 1,
            'rollout': dataclasses.replace(ROLLOUT, min_group_size=1)},
    'reinforce_pp': of_preset('reinforce_pp'),
    'rloo': of_preset('rloo'),
    'cispo': of_preset('cispo', minibatches=2),
    'gspo': of_preset('gspo', minibatches=2),
    'decoupled': {**of_preset('decoupled'), 'rollout': dataclasses.replace(ROLLOUT, staleness=2)},
}


@pytest.mark.parametrize('name', ALGORITHMS)
def test_an_algorithm_learns(model, tmp_path, name):  # noqa: F811
  results = train_rl.run(make_config(model, **{
      'num_steps': 40, 'eval': EvalConfig(every_steps=40, problems=100, temperature=1.0), 'checkpoint_every_steps': 1000,
      **ALGORITHMS[name]}), tmp_path)
  first = next(line for line in read(tmp_path, 'metrics.jsonl') if 'heldout/pass@1' in line)
  assert first['heldout/pass@1'] < 0.3 and results['heldout/pass@1'] > 0.85
  records = steps_of(tmp_path)
  assert all(np.isfinite(value) for record in records.values() for value in record.values() if value is not None)


def letters(trajectories):
  """A reward that likes late letters, and cannot tell of some."""
  last = np.array([one.tokens_T[-1] for one in trajectories], np.float32)
  return np.where(last % 16 == 0, np.nan, last / 256)


def nothing(trajectories):
  return np.full(len(trajectories), np.nan)


class Counting:
  """A monitor of drift that asks for something at given steps."""

  def __init__(self, asked, config, state=None):
    self.asked, self.seen = asked, list(state or [])

  def observe(self, step, proxy_N, truth_N, problem_N):
    assert proxy_N.shape == truth_N.shape == problem_N.shape and np.isfinite(proxy_N).all() and set(truth_N) <= {0.0, 1.0}
    self.seen.append([step, float(proxy_N.sum()), len(set(problem_N.tolist()))])
    return SimpleNamespace(reason='as asked', action=self.asked[step]) if step in self.asked else None

  def metrics(self):
    return {'counting/seen': len(self.seen)}

  def to_json(self):
    return self.seen


EVERYTHING = {
    'num_steps': 6, 'advantage': AdvantageConfig('gae', center='none', scale='none', trace=0.9, whiten=True),
    'critic': dataclasses.replace(CRITIC, warmup_steps=2, trace=1.0), 'minibatches': 2, 'reward': RewardConfig(1.0, 0.5),
    'reward_model': RewardModelConfig(paths=('tests/rl/test_ppo:letters',)),
    'reward_kl': RewardKLConfig(0.05, target=0.02), 'rollout': dataclasses.replace(ROLLOUT, staleness=2), 'checkpoint_every_steps': 1000}


@pytest.fixture(scope='module')
def interrupted(model, tmp_path_factory):  # noqa: F811
  """A run with a critic, a queue, an adapted KL term, a proxy and a monitor; and another that an alarm stops at step 4 and that goes on."""
  found = []
  with pytest.MonkeyPatch.context() as patch:
    make_mesh = sharding.make_mesh
    patch.setattr(sharding, 'make_mesh', lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1]))
    config = make_config(model, **EVERYTHING)
    for asked in ({3: 'warn'}, {2: 'snapshot', 4: 'stop'}):
      workdir = tmp_path_factory.mktemp('everything')
      patch.setattr(train_rl.drift, 'Monitor', functools.partial(Counting, asked))
      train_rl.run(config, workdir)
      steps = checkpoint.committed_steps(workdir / 'checkpoints'), checkpoint.committed_steps(workdir / train_rl.SNAPSHOTS)
      if steps[0] != [6]:
        train_rl.run(config, workdir)
      found.append((workdir, steps))
    abstract = learner_lib.abstract_state(train_rl.initial_state(*train_rl.set_up(config)))
  return found, [(checkpoint.read_state(workdir / 'checkpoints', abstract), checkpoint.read_host(workdir / 'checkpoints'))
                 for workdir, _ in found]


def test_alarms_warn_keep_a_snapshot_or_stop(interrupted):
  (_, warned), (workdir, stopped) = interrupted[0]
  assert warned == ([6], []) and stopped == ([4], [2])
  assert checkpoint.read_host(workdir / train_rl.SNAPSHOTS).progress['step'] == 2


def test_critic_queue_and_controllers_resume_bit_for_bit(interrupted):
  ((whole, _), (parted, _)), ((wanted, wanted_host), (state, host)) = interrupted
  jax.tree.map(np.testing.assert_array_equal, state, wanted)
  assert int(state.critic.step) == 12 and int(state.step) == 8  # In two of six steps only the critic learned.
  waiting, wanted_waiting = (ReplayQueue(one.progress['queue']) for one in (host, wanted_host))
  assert len(waiting) == 2
  for _ in range(2):
    check_same(*(without_times(queue.take()) for queue in (waiting, wanted_waiting)))
  for key in ('step', 'ledger', 'curriculum', 'kl_coef', 'drift'):
    assert host.progress[key] == wanted_host.progress[key], key
  assert steps_of(whole) == steps_of(parted) and len(steps_of(whole)) == 4
  assert [step for step, *_ in host.progress['drift']] == [1, 2, 3, 4, 5, 6]


def without_times(batch):
  def plain(group):
    return dataclasses.replace(group, trajectories=tuple(dataclasses.replace(one, timing_s={}) for one in group.trajectories))
  return dataclasses.replace(batch, groups=tuple(map(plain, batch.groups)), dropped=tuple((plain(one), why) for one, why in batch.dropped))


def test_what_a_run_with_everything_reports(interrupted):
  workdir = interrupted[0][0][0]
  records = {record['step']: record for record in read(workdir, 'metrics.jsonl') if 'critic/loss' in record}
  assert [record['off_policy/max'] for record in records.values()] == [0, 1, 2, 2, 2, 2]
  assert 'train/loss' not in records[2] and 'train/loss' in records[3]
  coefficients = [record['objective/kl_coef'] for record in records.values()]
  assert coefficients[0] == 0.05 and abs(records[1]['objective/kl']) < 1e-4  # The reference is the policy before the first step.
  assert coefficients[1] == pytest.approx(0.05 * 0.98) and all(one != other for one, other in zip(coefficients, coefficients[1:]))
  for step, record in records.items():
    lines = [line for line in read(workdir, 'trajectories.jsonl') if line['step'] == step and line['kind'] == 'train']
    assert record['proxy/unscored'] > 0 and record['proxy/max'] > 0.2 and record['critic/grad_norm'] > 0
    assert record['critic/score/mean'] == pytest.approx(np.mean([line['reward'] for line in lines]))
    assert {line['versions'][0] for line in lines} == {max(step - 3, 0)}
    assert record['ledger/queued'] == 128 and record['ledger/issued'] == 64 * (step + 2)
    assert record['ledger/issued'] == record['ledger/trained'] + record['ledger/queued'] + record['ledger/dropped/nan_reward']
    assert record['critic/returns/max'] > record['critic/returns/min'] and record['critic/vf_explained_var'] <= 1
  assert records[6]['ledger/dropped/nan_reward'] > 0 and records[1]['critic/values/max'] == 0 != records[4]['critic/values/max']
  assert records[4]['counting/seen'] == 4


def test_a_kl_term_in_the_reward_holds_the_policy_back(model, tmp_path):  # noqa: F811
  moved = {}
  for coef in (1e-6, 1.0):
    config = make_config(model, num_steps=12, advantage=ALGORITHMS['reinforce_pp']['advantage'], reward_kl=RewardKLConfig(coef))
    train_rl.run(config, tmp_path / str(coef))
    moved[coef] = steps_of(tmp_path / str(coef))[12]['objective/kl']
  assert moved[1e-6] > 2 * moved[1.0], moved


def test_adapters_have_a_critic_of_adapters(model, tmp_path):  # noqa: F811
  config = make_config(model, num_steps=3, lora=LoraConfig(rank=4), **ALGORITHMS['ppo'] | {'minibatches': 1})
  train_rl.run(config, tmp_path)
  record = steps_of(tmp_path)[3]
  assert record['critic/values/max'] != 0 and record['critic/grad_norm'] > 0 and record['train/grad_norm'] > 0


def test_a_batch_without_any_sample_is_counted_and_moves_nothing(model, tmp_path):  # noqa: F811
  config = make_config(model, num_steps=2, reward=RewardConfig(0.0, 1.0), checkpoint_every_steps=1,
                       reward_model=RewardModelConfig(paths=('tests/rl/test_ppo:nothing',)))
  train_rl.run(config, tmp_path)
  records = [record for record in read(tmp_path, 'metrics.jsonl') if 'ledger/issued' in record]
  assert [record['train/empty_batches'] for record in records] == [1, 1] and records[1]['ledger/dropped/nan_reward'] == 128
  assert records[1]['weight_sync/version'] == 2 and not any('train/loss' in record for record in records)
  abstract = learner_lib.abstract_state(train_rl.initial_state(*train_rl.set_up(config)))
  state = checkpoint.read_state(tmp_path / 'checkpoints', abstract)
  jax.tree.map(np.testing.assert_array_equal, state.trainable, train_rl.set_up(config)[1])


@pytest.mark.parametrize('changes, message', [
    ({'overlong': 'bootstrap'}, "overlong='bootstrap' asks a critic, and advantage.estimator='group' has none"),
    ({'reward_kl': RewardKLConfig(0.1), 'loss': PolicyLossConfig(kl_coef=0.1)}, 'both hold the policy close to the reference'),
    ({'reward_kl': RewardKLConfig(0.1), 'advantage': AdvantageConfig(scale='mean')}, "scale='mean' divides by mean rewards"),
    ({'advantage': GAE, 'critic': CriticConfig(warmup_steps=3)}, 'critic.warmup_steps=3 leaves the policy nothing of num_steps=3'),
])
def test_contradictions_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    make_config('/model', **changes)


@pytest.mark.parametrize('make, message', [
    (lambda: AdvantageConfig('gae'), "estimator='gae' has the critic as its baseline, and center='mean', scale='std' compare groups"),
    (lambda: AdvantageConfig('reinforce_pp', center='none'), "scaled by whitening over the batch, not by scale='std'"),
    (lambda: AdvantageConfig(trace=0.9), "discount=1.0 and trace=0.9 are read by estimator='gae' alone"),
    (lambda: AdvantageConfig('gae', 'none', 'none', discount=1.1), 'discount=1.1 and trace=1.0 must be between 0 and 1'),
    (lambda: RewardConfig(0.0, 0.0), 'verifier_weight=0.0 and source_weight=0.0 must not be negative, and one of them must be positive'),
    (lambda: ProcessConfig(0.95), 'weight=0.95 must be from 0 to below 1 - cap, cap=0.1'),
    (lambda: RewardKLConfig(-1), 'reward_kl.coef=-1 must not be negative'),
    (lambda: RewardKLConfig(0.0, target=6.0), 'a coefficient of 0 would stay 0'),
])
def test_bad_settings(make, message):
  with pytest.raises(ValueError, match=message):
    make()

