"""Rewards from several sources: how they are combined by hand, functions of one's own, and what has no reward."""

import dataclasses

import numpy as np
import pytest

from envs.core import Outcome
from models import sharding
from rl import proxy_reward
from rl.proxy_reward import ProxyReward, RewardModelConfig
from rl.types import Trajectory

HERE = 'tests/rl/test_proxy_reward'


def samples(*replies):
  tokens_T = np.arange(3, dtype=np.int32)
  mask_T = tokens_T == 2
  one = Trajectory(
      tokens_T=tokens_T, loss_mask_T=mask_T, behavior_logprobs_T=np.where(mask_T, -1, np.nan).astype(np.float32),
      versions_T=np.where(mask_T, 0, -1).astype(np.int32), reward=0.0, outcome=Outcome.OK, problem_id='p', domain='d', level=1, group=0, sample=0,
      terminated=True, truncated=False, num_turns=1)
  return [dataclasses.replace(one, messages=({'role': 'user', 'content': '?'}, {'role': 'assistant', 'content': reply})) for reply in replies]


def by_length(trajectories):
  return [len(one.messages[-1]['content']) for one in trajectories]


def by_magic_word(trajectories):
  return np.array([2.0 if 'please' in one.messages[-1]['content'] else 0.0 for one in trajectories])


def of_words_only(trajectories):
  return [np.nan if one.messages[-1]['content'].isdigit() else 1.0 for one in trajectories]


def all_at_once(trajectories):
  return [1.0]


def in_words(trajectories):
  return ['good'] * len(trajectories)


NOT_CALLED = 5


def load(*names, **changes):
  config = RewardModelConfig(paths=tuple(f'{HERE}:{name}' for name in names), **changes)
  return ProxyReward.load(config, sharding.make_mesh(fsdp=-1), sharding.TRAIN, 'float32')


def test_ways_to_combine_by_hand():
  scores_KN = np.array([[1.0, 4.0, np.nan], [3.0, -2.0, 1.0]])
  np.testing.assert_array_equal(proxy_reward.combine(scores_KN, 'mean'), [2, 1, np.nan])
  np.testing.assert_array_equal(proxy_reward.combine(scores_KN, 'min'), [1, -2, np.nan])
  # Standard deviations 1 and 3.
  np.testing.assert_array_equal(proxy_reward.combine(scores_KN, 'mean_minus_std', 0.5), [1.5, -0.5, np.nan])
  np.testing.assert_array_equal(proxy_reward.combine(scores_KN[:1], 'mean_minus_std'), scores_KN[0])
  with pytest.raises(ValueError, match="combine='max' is unknown; use 'mean', 'min' or 'mean_minus_std'"):
    proxy_reward.combine(scores_KN, 'max')


def test_functions_of_ones_own_and_their_disagreement():
  texts = samples('please', 'no', 'yes, please')
  np.testing.assert_array_equal(load('by_length').score(texts), np.float32([6, 2, 11]))
  judged = load('by_length', 'by_magic_word', combine='min').judge(texts)
  np.testing.assert_array_equal(judged.rewards_N, np.float32([2, 0, 2]))
  # Half of |6 - 2|, |2 - 0| and |11 - 2|.
  assert judged.metrics['proxy/disagreement'] == pytest.approx((2 + 1 + 4.5) / 3)
  assert judged.metrics == judged.metrics | {'proxy/mean': pytest.approx(4 / 3), 'proxy/min': 0, 'proxy/max': 2, 'proxy/unscored': 0}
  clipped = load('by_length', clip=5).judge(texts)
  np.testing.assert_array_equal(clipped.rewards_N, np.float32([5, 2, 5]))
  # What is reported is before clipping, so that a proxy that runs away shows.
  assert clipped.metrics['proxy/clipped_fraction'] == pytest.approx(2 / 3) and clipped.metrics['proxy/max'] == 11


def test_what_has_no_reward_is_said_and_never_0():
  judged = load('of_words_only', 'by_length').judge(samples('12', 'abc'))
  np.testing.assert_array_equal(judged.rewards_N, np.float32([np.nan, 2]))
  assert judged.metrics['proxy/unscored'] == 1 and judged.metrics['proxy/mean'] == 2
  none = ProxyReward(RewardModelConfig(), {'one': lambda trajectories: [np.inf] * len(trajectories)}).judge(samples('a', 'b'))
  assert np.isnan(none.rewards_N).all() and none.metrics == {'proxy/unscored': 2}
  empty = load('by_length').judge([])
  assert empty.rewards_N.shape == (0,) and empty.metrics == {'proxy/unscored': 0}


@pytest.mark.parametrize('names, message', [
    ((), r'reward_model.paths=\(\) names no reward model'),
    (('by_length', 'by_length'), f'reward_model.paths names {HERE}:by_length more than once'),
    (('nothing',), f"'{HERE}:nothing': module 'tests.rl.test_proxy_reward' has no attribute 'nothing'"),
    (('NOT_CALLED',), f"'{HERE}:NOT_CALLED' is of type int; it must be a function"),
])
def test_sources_that_are_none_are_refused(names, message):
  with pytest.raises(ValueError, match=message):
    load(*names)


def test_a_function_is_identified_by_what_its_module_says(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  path, found = tmp_path / 'a_reward_of_ours.py', []
  for body in ('1.0', '1.0', '2.0'):
    path.write_text(f'def pay(trajectories):\n  return [{body}] * len(trajectories)\n')
    found.append(proxy_reward.fingerprints(RewardModelConfig(paths=('a_reward_of_ours:pay',))))
  assert found[0] == found[1] == {'a_reward_of_ours:pay': found[0]['a_reward_of_ours:pay']} != found[2]


def test_what_is_not_there_is_said(tmp_path):
  with pytest.raises(FileNotFoundError, match=str(tmp_path / 'nowhere')):
    ProxyReward.load(RewardModelConfig(paths=(str(tmp_path / 'nowhere'),)), sharding.make_mesh(fsdp=-1), sharding.TRAIN, 'float32')
  with pytest.raises(ValueError, match="'no/such:thing': No module named 'no'; the module must be importable"):
    ProxyReward.load(RewardModelConfig(paths=('no/such:thing',)), sharding.make_mesh(fsdp=-1), sharding.TRAIN, 'float32')


@pytest.mark.parametrize('name, message', [
    ('all_at_once', r"all_at_once' returned \(1,\) for 2 samples; return one number for each"),
    ('in_words', "in_words' gave no numbers for 2 samples: could not convert string to float"),
])
def test_what_is_no_reward_is_refused(name, message):
  with pytest.raises(ValueError, match=message):
    load(name).score(samples('a', 'b'))


@pytest.mark.parametrize('changes, message', [
    ({'std_coef': -1.0}, 'std_coef=-1.0 and clip=0.0 must be finite and not negative'),
    ({'clip': float('nan')}, 'clip=nan must be finite'),
    ({'rows': 0}, 'rows=0 must be at least 1'),
])
def test_settings_that_mean_nothing_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    RewardModelConfig(**changes)
  with pytest.raises(TypeError, match=r"paths='runs/rm' must be a tuple of strings, not one string; write \('runs/rm',\)"):
    RewardModelConfig(paths='runs/rm')
