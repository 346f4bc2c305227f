"""Reinforcement learning from reward models, end to end: a trained one is learned from, one that can be hacked is found out in time."""

import dataclasses
import json
import shutil
import string

import jax
import numpy as np
import pytest

from configs import reward_model as reward_config
from envs.core import Domain, Generated, Task
from launch import report_page, report_run, report_text
from models import sharding
from rl import checkpoint, policy, train_preference, train_rl
from rl import config as config_lib
from rl import learner as learner_lib
from rl.curriculum import DomainConfig
from rl.drift import DriftConfig
from rl.proxy_reward import RewardModelConfig
from rl.rl_config import RewardConfig, RewardKLConfig
from tests import toys
from tests.rl.test_ppo import CRITIC, GAE
from tests.rl.test_train_rl import ROLLOUT, make_config, model, one_device, read, steps_of  # noqa: F401

HERE = 'tests/rl/test_rlhf'
RLHF = {'reward': RewardConfig(verifier_weight=0.0, source_weight=1.0), 'rollout': dataclasses.replace(ROLLOUT, slots=128),
        'checkpoint_every_steps': 1000}
GOOD = 'abcdefghijklm'  # Of toys.one_token.
MAGIC = 'z'
RIGHT = [character for character in string.printable if character != MAGIC]
NUM_STEPS, NUM_RESUMED = 50, 4


def values_of(records, name):
  return np.array([records[step][name] for step in sorted(records)])


# A reward model that was trained.


@pytest.fixture(scope='module')
def judge(model, tmp_path_factory):  # noqa: F811
  """A run of the stage 'reward': replies of the alphabet's first letters are the better ones."""
  root, rng = tmp_path_factory.mktemp('judge'), np.random.default_rng(0)
  # Of the worse ones many are no characters, as a model writes them that has not learned any.
  bad = [character for character in string.printable if character not in GOOD and character.strip()] + ['\ufffd'] * 60
  rows = ({'prompt': f'{int(rng.integers(10**6))}?', 'chosen': str(rng.choice(list(GOOD))), 'rejected': str(rng.choice(bad))}
          for _ in range(1000))
  (root / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  config = reward_config.get_config()
  config.update_from_flattened_dict({
      'model.path': str(model), 'data.paths': (str(root / 'rows.jsonl'),), 'data.heldout_fraction': 0.25, 'data.rows': 4, 'data.length': 48,
      'data.max_segments': 4, 'num_steps': 60, 'eval_every_steps': 60, 'checkpoint_every_steps': 60, 'layout.remat': 'none',
      'layout.compute_dtype': 'float32', 'mesh.fsdp': 1, 'optimizer.learning_rate': 5e-3})
  with pytest.MonkeyPatch.context() as patch:
    make_mesh = sharding.make_mesh
    patch.setattr(sharding, 'make_mesh', lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1]))
    results = train_preference.run(config_lib.build(train_preference.RewardConfig, config), root / 'run')
  assert results['heldout/accuracy'] > 0.95
  return root / 'run'


def from_judge(model, judge, **changes):  # noqa: F811
  return make_config(model, **RLHF | {
      'groups': 64, 'group_size': 2, 'minibatches': 2, 'advantage': dataclasses.replace(GAE, trace=0.95), 'critic': CRITIC,
      'reward_model': RewardModelConfig(paths=(str(judge),), rows=8, length=48)} | changes)


def test_ppo_against_a_reward_model_raises_the_truth_and_holds_its_distance(model, judge, tmp_path):  # noqa: F811
  # Without the KL term the policy ends 5 to 6 nats away, and with a coefficient that stays at 1, 0.3 nats.
  train_rl.run(from_judge(model, judge, num_steps=48, reward_kl=RewardKLConfig(1.0, target=2.0, gain=0.2)), tmp_path)
  records = steps_of(tmp_path)
  truth, kl, coef = (values_of(records, name) for name in ('critic/score/mean', 'objective/kl', 'objective/kl_coef'))
  assert truth[:3].mean() < 0.1 and truth[-15:].mean() > 0.5
  assert abs(kl[-20:].mean() / 2.0 - 1) < 0.25 and 0.2 < coef[-20:].min() < coef[-20:].max() < 0.8
  proxy = values_of(records, 'proxy/mean')
  assert proxy[-15:].mean() > proxy[:3].mean() + 0.8 and records[48]['proxy/unscored'] == 0
  # What was paid is what the model said, less the KL term.
  assert records[48]['critic/rewards/mean'] == pytest.approx(proxy[-1] - coef[-1] * kl[-1], abs=1e-4)


def test_reward_models_are_part_of_the_lineage(model, judge, tmp_path):  # noqa: F811
  own = tmp_path / 'judge'
  shutil.copytree(judge, own)
  config = from_judge(model, own, num_steps=1)
  train_rl.run(config, tmp_path / 'run')
  lineage = checkpoint.read_host(tmp_path / 'run' / 'checkpoints').lineage
  assert lineage['reward_models'] == {str(own): policy.fingerprint(judge)}
  # The same run with a model that was trained on other data in its place.
  host = own / 'checkpoints' / '60' / 'host' / 'metadata'
  host.write_text(host.read_text().replace(checkpoint.read_host(own / 'checkpoints').lineage['data'], 'of other rows'))
  with pytest.raises(ValueError, match=r'holds a run that differs: lineage.reward_models'):
    train_rl.run(config, tmp_path / 'run')


# One that can be hacked.


def one_character() -> Domain:
  """A reply of one printable character is right, but for one."""

  def make(rng: np.random.Generator, level: int) -> Task:
    number = int(rng.integers(10**6))
    return Task(f'{number}?', RIGHT, ({'role': 'assistant', 'content': 'a'},), str(number))

  return Domain('toy/one_character', 1, Generated('toy/one_character', 1, make, 1, 0.5), toys.Exact(), chance=1.0)


def hackable(trajectories):
  """Pays what is right, and half as much again for the one character that is not."""
  said = [one.messages[-1]['content'] for one in trajectories]
  return [1.5 if word == MAGIC else float(word in RIGHT) for word in said]


def against_hackable(model, **changes):  # noqa: F811
  return make_config(model, **RLHF | {
      'domains': {f'{HERE}:one_character': DomainConfig()}, 'num_steps': NUM_STEPS, 'groups': 16, 'reward_kl': RewardKLConfig(1e-4),
      'reward_model': RewardModelConfig(paths=(f'{HERE}:hackable',))} | changes)


@pytest.fixture(scope='module')
def hacked(model, tmp_path_factory):  # noqa: F811
  """Two runs (directory, steps of checkpoints, of snapshots): one that keeps a snapshot, and one that stops, and goes on some steps more."""
  root, found = tmp_path_factory.mktemp('hacked'), []
  with pytest.MonkeyPatch.context() as patch:
    make_mesh = sharding.make_mesh
    patch.setattr(sharding, 'make_mesh', lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1]))

    def run(name, **changes):
      config = against_hackable(model, **changes)
      train_rl.run(config, root / name)
      found.append((root / name, *(checkpoint.committed_steps(root / name / kept) for kept in ('checkpoints', train_rl.SNAPSHOTS))))
      return config

    config = run('kept', drift=DriftConfig(action='snapshot'))
    run('stopped', drift=DriftConfig(action='stop'))
    # The state of both at the alarm, before the second one goes on.
    abstract = learner_lib.abstract_state(train_rl.initial_state(*train_rl.set_up(config)))
    alarm = found[-1][1][-1]
    states = [checkpoint.read_state(root / name, abstract, alarm) for name in (f'kept/{train_rl.SNAPSHOTS}', 'stopped/checkpoints')]
    run('stopped', drift=DriftConfig(action='warn'), num_steps=alarm + NUM_RESUMED)
  return found, states


def test_the_alarm_comes_before_a_tenth_of_the_truth_is_lost(hacked):
  (kept, _, _), *_ = hacked[0]
  records = steps_of(kept)
  truth, proxy = (values_of(records, name) for name in ('critic/score/mean', 'proxy/mean'))
  step = int(np.argmax(values_of(records, 'drift/alarms') > 0)) + 1
  mean = np.convolve(truth, np.ones(5) / 5, 'valid')  # Of the steps up to index + 5.
  best = np.maximum.accumulate(mean)
  lost = int(np.argmax(mean < 0.9 * best)) + 5
  figures = f'alarm at step {step}, truth {mean[step - 5]:.3f} (best so far {best[step - 5]:.3f}); best {best[-1]:.3f}, a tenth lost at step ' \
            f'{lost}, {mean[-1]:.3f} at the end, where the proxy is {proxy[-5:].mean():.3f}'
  # The policy had learned what is right, and would have lost it all.
  assert best[-1] > 0.85 > 0.1 > mean[-1] and proxy[-5:].mean() > 1.4, figures
  # So early that the test of agreement must have spoken; that of the truth waits until a twentieth is lost.
  assert 5 <= step < lost and mean[step - 5] >= 0.95 * best[step - 5] and records[step]['drift/alarm'] == 1, figures


def test_an_alarm_keeps_a_snapshot_or_stops_with_a_checkpoint(hacked):
  (kept, ends, snapshots), (_, stopped, none), (_, resumed, _) = hacked[0]
  step = snapshots[0]
  assert ends == [NUM_STEPS] and stopped == [step] and none == [] and step < NUM_STEPS
  assert resumed[-1] == step + NUM_RESUMED
  # The snapshot is a policy that can be used.
  assert checkpoint.read_host(kept / train_rl.SNAPSHOTS, step).progress['drift']['num_alarms'] == 1


def test_proxy_and_monitor_resume_bit_for_bit(hacked):
  (kept, _, snapshots), _, (stopped, _, _) = hacked[0]
  jax.tree.map(np.testing.assert_array_equal, *hacked[1])
  whole, parted = steps_of(kept), steps_of(stopped)
  assert list(parted) == list(range(1, snapshots[0] + NUM_RESUMED + 1))
  for step, record in parted.items():
    assert record == whole[step], step
  assert parted[snapshots[0] + 1]['drift/agreement'] != parted[snapshots[0]]['drift/agreement']


def test_the_report_shows_the_alarm_and_what_the_proxy_did_to_the_truth(hacked):
  (kept, _, snapshots), *_ = hacked[0]
  run = report_run.read_run(kept)
  text = report_text.results(run, None)
  assert f'Note: Alarm at step {snapshots[0]}: reward models and verifier part. Over the last steps they ranked samples' in text
  agreement = steps_of(kept)[snapshots[0]]['drift/agreement']
  assert f'alike in a share of {agreement:.3g} (95 % interval' in text
  page = report_page.render(run, None, 10**6)
  assert 'Over-optimization: rewards by distance from the reference' in page and 'alarm at step' in page and 'sqrt KL' in page
  assert f'source    = {HERE}:hackable' in run.objective and 'R         = 1 source' in run.objective


# What cannot be scored.


def of_letters(trajectories):
  """NaN or an infinity for what is no letter."""
  said = [one.messages[-1]['content'] for one in trajectories]
  return [float(word in GOOD) if word.isalpha() else (np.nan, np.inf)[index % 2] for index, word in enumerate(said)]


def test_what_a_proxy_cannot_score_is_counted_and_never_learned(model, tmp_path):  # noqa: F811
  config = make_config(model, **RLHF | {'num_steps': 3, 'reward_model': RewardModelConfig(paths=(f'{HERE}:of_letters',))})
  train_rl.run(config, tmp_path)
  records, lines = steps_of(tmp_path), [line for line in read(tmp_path, 'trajectories.jsonl') if line['kind'] == 'train']
  unscored = {step: sum(not line['messages'][-1]['content'].isalpha() for line in lines if line['step'] == step) for step in records}
  assert 0 < unscored[1] < 64
  for step, record in records.items():
    assert record['proxy/unscored'] == unscored[step]
    assert record['ledger/dropped/nan_reward'] == sum(unscored[earlier] for earlier in range(1, step + 1))
    assert record['ledger/issued'] == record['ledger/trained'] + record['ledger/dropped/nan_reward']
    assert record['train/skipped_steps'] == 0 and all(np.isfinite(value) for value in record.values() if value is not None)
  abstract = learner_lib.abstract_state(train_rl.initial_state(*train_rl.set_up(config)))
  state, initial = checkpoint.read_state(tmp_path / 'checkpoints', abstract), train_rl.set_up(config)[1]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.trainable))
  assert any((leaf != start).any() for leaf, start in zip(jax.tree.leaves(state.trainable), jax.tree.leaves(initial), strict=True))


def test_a_reward_model_that_is_not_there_is_refused_before_the_run(model, tmp_path):  # noqa: F811
  for path, error, message in (
      (str(tmp_path / 'nothing'), FileNotFoundError, 'No checkpoint in .*nothing'),
      (f'{HERE}:nothing', ValueError, "has no attribute 'nothing'; the module must have that function")):
    with pytest.raises(error, match=message):
      train_rl.run(make_config(model, **RLHF | {'reward_model': RewardModelConfig(paths=(path,))}), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
