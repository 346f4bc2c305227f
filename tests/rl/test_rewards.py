"""What samples earn: verifier, reward models, parts of the work; what nobody can score is left out and counted."""

import dataclasses

import numpy as np
import pytest

from envs.core import Outcome
from rl import rewards
from rl.proxy_reward import ProxyReward, RewardModelConfig
from rl.rl_config import AdvantageConfig, ProcessConfig, RewardConfig
from rl.types import Group
from tests.rl.test_batching import trajectory
from tests.rl.test_train_rl import ROLLOUT, make_config

NONE = AdvantageConfig('reinforce_pp', center='none', scale='none')


def group(*members, problem_id='sums/train/1/0'):
  return Group(problem_id, tuple(members))


def sample(reward=1.0, **changes):
  return trajectory([False, True, True, False, True], reward=reward, **changes)


def config_of(**changes):
  return make_config('/model', group_size=2, groups=2, **changes)


def test_the_verifier_alone():
  groups = [group(sample(1.0), sample(0.25)), group(sample(None, outcome=Outcome.ENV_ERROR), sample(0.0))]
  found = rewards.pay(config_of(), groups)
  assert found.paid_QU.tolist() == found.gold_QU.tolist() == [[1.0, 0.25], [0.0, 0.0]]
  assert found.is_used_QU.tolist() == [[True, True], [False, True]]
  assert found.source_QU is None and not found.dropped


def of_models(*functions):
  return ProxyReward(RewardModelConfig(), dict(enumerate(functions)))


def paying(**weights):
  return config_of(reward=RewardConfig(**weights), reward_model=RewardModelConfig(paths=('some/module:function',)))


def test_reward_models_are_weighed_beside_the_truth():
  groups = [group(sample(1.0), sample(0.0)), group(sample(None, outcome=Outcome.ENV_ERROR), sample(1.0))]
  seen = []

  def long(trajectories):
    seen.append(list(trajectories))
    return np.array([2, 4, 6], np.float32)

  config = paying(verifier_weight=0.5, source_weight=2.0)
  found = rewards.pay(config, groups, of_models(long, lambda trajectories: np.zeros(3)))
  assert seen == [[groups[0].trajectories[0], groups[0].trajectories[1], groups[1].trajectories[1]]]
  assert found.source_QU.tolist() == [[1.0, 2.0], [0.0, 3.0]]
  assert found.paid_QU.tolist() == [[2.5, 4.0], [0.0, 6.5]]
  assert found.gold_QU.tolist() == [[1.0, 0.0], [0.0, 1.0]]
  assert found.metrics['proxy/mean'] == 2 and found.metrics['proxy/disagreement'] == 2
  # By a reward model alone, and by the verifier alone.
  assert rewards.pay(paying(verifier_weight=0.0, source_weight=1.0), groups, of_models(long)).paid_QU.tolist() == [[2.0, 4.0], [0.0, 6.0]]
  assert rewards.pay(config_of(), groups, of_models(long)).paid_QU.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_a_score_that_is_not_a_number_leaves_its_sample_out_and_is_counted():
  groups = [group(sample(1.0), sample(0.0)), group(sample(1.0), sample(1.0))]
  proxy = of_models(lambda trajectories: np.array([np.nan, 1.0, np.inf, 3.0]))
  found = rewards.pay(paying(verifier_weight=1.0, source_weight=1.0), groups, proxy)
  assert found.is_used_QU.tolist() == [[False, True], [False, True]]
  assert found.paid_QU.tolist() == [[0.0, 1.0], [0.0, 4.0]] and np.isfinite(found.source_QU).all()
  assert found.dropped == {'nan_reward': 2} and found.metrics['proxy/unscored'] == 2
  # Where it is only watched, what it cannot tell changes nothing.
  watched = rewards.pay(config_of(), groups, proxy)
  assert watched.is_used_QU.all() and not watched.dropped and watched.paid_QU.tolist() == [[1.0, 0.0], [1.0, 1.0]]
  np.testing.assert_array_equal(watched.source_QU, [[np.nan, 1.0], [np.nan, 3.0]])


def test_without_any_sample_no_reward_model_is_asked():
  found = rewards.pay(config_of(), [], of_models(lambda trajectories: 1 / 0))
  assert found.paid_QU.shape == (0, 2) and not found.is_used_QU.any()


@pytest.mark.parametrize('changes, message', [
    ({'reward': RewardConfig(1.0, 1.0)}, r'reward.source_weight=1.0 pays what reward models say, and reward_model.paths=\(\) names none'),
    ({'reward': RewardConfig(0.0, 1.0), 'max_rounds': 2}, 'max_rounds=2 replaces groups that the verifier scores equally'),
    ({'reward': RewardConfig(1.0, 0.5), 'advantage': AdvantageConfig(scale='mean')}, r'\(reward.source_weight=0.5\) can be negative'),
])
def test_settings_that_reward_models_contradict(changes, message):
  with pytest.raises(ValueError, match=message):
    config_of(**({'reward_model': RewardModelConfig(paths=('a/b:c',))} if 'names none' not in message else {}) | changes)


def test_overlong_samples_by_setting():
  cut = sample(0.5, outcome=Outcome.LENGTH)
  found = rewards.pay(config_of(overlong='mask'), [group(cut, sample())])
  assert found.is_used_QU.tolist() == [[False, True]] and found.dropped == {'overlong': 1}
  critic = AdvantageConfig('gae', center='none', scale='none')
  found = rewards.pay(config_of(overlong='bootstrap', advantage=critic), [group(cut, sample())])
  assert found.paid_QU.tolist() == [[0.0, 1.0]] and found.gold_QU.tolist() == [[0.5, 1.0]]
  # The last reply has one token, the buffer is the last two of four.
  rollout = dataclasses.replace(ROLLOUT, max_new_tokens=4)
  found = rewards.pay(config_of(overlong='penalty', overlong_buffer=3, rollout=rollout), [group(cut, sample())])
  assert found.paid_QU.tolist() == [[0.5, 1.0]]
  found = rewards.pay(config_of(overlong='penalty', overlong_buffer=4, rollout=rollout), [group(cut, sample())])
  assert found.paid_QU.tolist() == [[0.25, 0.75]]


PARTS = {'steps': 0.5, 'format': 1.0}  # 3/4 of the work


def test_parts_are_paid_in_full_only_to_who_succeeds():
  groups = [group(sample(1.0, parts=PARTS), sample(0.0, parts=PARTS))]
  paid = {credit: rewards.pay(config_of(process=ProcessConfig(0.4, credit=credit), advantage=NONE), groups).paid_QU.tolist()
          for credit in ('episode', 'turn')}
  assert paid['episode'] == [[pytest.approx(0.6 + 0.3), pytest.approx(0.1)]]
  # Paid by turns: here only what the outcome pays.
  assert paid['turn'] == [[pytest.approx(0.6), 0.0]]
  of_group = config_of(process=ProcessConfig(0.4, credit='turn'))
  assert rewards.pay(of_group, groups).paid_QU.tolist() == [[1.0, 0.0]]
  assert rewards.pay(config_of(), groups).paid_QU.tolist() == [[1.0, 0.0]]


def test_turns_share_what_the_rule_allows():
  config = config_of(process=ProcessConfig(0.4, credit='turn'), advantage=NONE)
  whole = sample(1.0, parts=PARTS, turn_scores=(0.25, 0.5))
  np.testing.assert_allclose(rewards.pay_turns(config, whole), [0.1, 0.2])
  np.testing.assert_allclose(rewards.pay_turns(config, dataclasses.replace(whole, reward=0.0)), [0.1 / 3, 0.2 / 3])
  np.testing.assert_array_equal(rewards.pay_turns(config, sample(0.0, parts={'steps': 0.0}, turn_scores=(0.0, 0.0))), [0, 0])
  assert rewards.pay_turns(config, sample(0.0)).size == 0
