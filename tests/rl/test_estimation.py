"""From rewards to tokens, by hand: which token gets what under each estimator, and that nothing else is read."""

import numpy as np
import pytest

from envs.core import Outcome
from rl import estimation, rewards
from rl.critic import CriticConfig, Expectation
from rl.rl_config import AdvantageConfig, ProcessConfig, RewardKLConfig
from tests.rl.test_batching import trajectory
from tests.rl.test_rewards import config_of, group

GAE = AdvantageConfig('gae', center='none', scale='none', discount=0.5, trace=0.5)
PLUS = AdvantageConfig('reinforce_pp', center='none', scale='none')
# A prompt, a reply of two tokens, a tool's result, and a reply of one.
MASK = np.array([False, True, True, False, True])


def sample(reward=1.0, mask=MASK, **changes):
  return trajectory(list(mask), reward=reward, **changes)


def estimate(config, groups, **given):
  found = estimation.estimate(config, groups, rewards.pay(config, groups), **given)
  for one, member in zip(found, estimation.used(groups, rewards.pay(config, groups)), strict=True):
    for array_T in (one.advantages_T, one.values_T, one.returns_T):
      assert array_T is None or (array_T.dtype == np.float32 and not array_T[~member.loss_mask_T].any())
  return found


def test_a_group_has_one_advantage_for_all_tokens_of_a_sample():
  config = config_of(advantage=AdvantageConfig(scale='none'))
  found = estimate(config, [group(sample(1.0), sample(0.0)), group(sample(None, outcome=Outcome.ENV_ERROR), sample(1.0))])
  np.testing.assert_allclose([one.advantages_T[MASK] for one in found], [[0.5] * 3, [-0.5] * 3, [0] * 3])


def test_in_a_group_the_kl_term_is_that_of_the_whole_sample():
  config = config_of(advantage=AdvantageConfig(center='leave_one_out', scale='none'))
  differences = [np.array([1e9, 0.5, 0.5, np.nan, 1], np.float32), np.array([np.nan, 0, 0, 1e9, 0], np.float32)]
  found = estimate(config, [group(sample(1.0), sample(1.0))], kl_coef=0.1, differences=differences)
  # 1 - 0.1 x 2 nats against 1.
  np.testing.assert_allclose([one.advantages_T[1] for one in found], [-0.2, 0.2], rtol=1e-6)
  np.testing.assert_allclose(estimation.sample_kl([sample(), sample()], differences), [2, 0])


def test_reinforce_pp_sums_what_comes_and_skips_what_tools_say():
  differences = [np.array([1e9, 1, 2, np.nan, 3], np.float32)]
  found, = estimate(config_of(advantage=PLUS), [group(sample(1.0))], kl_coef=0.1, differences=differences)
  # The token rewards are -0.1, -0.2 and -0.3 + 1.
  np.testing.assert_allclose(found.advantages_T, [0, 0.4, 0.5, 0, 0.7], atol=1e-6)
  assert found.others == {}
  centered = AdvantageConfig('reinforce_pp', scale='none')
  found = estimate(config_of(advantage=centered), [group(sample(1.0), sample(0.0))])
  np.testing.assert_allclose([one.advantages_T[MASK] for one in found], [[0.5] * 3, [-0.5] * 3])


def test_whitening_is_over_the_tokens_of_the_whole_batch():
  short = np.array([False, True])
  whitened = AdvantageConfig('reinforce_pp', center='none', scale='none', whiten=True, epsilon=0.0)
  groups = [group(sample(1.0), sample(0.0, short)), group(sample(0.0, short), sample(1.0, short))]
  found = estimate(config_of(advantage=whitened), groups)
  values = np.array([1, 1, 1, 0, 0, 1], np.float64)
  wanted = (values - values.mean()) / values.std(ddof=1)
  np.testing.assert_allclose(np.concatenate([found[0].advantages_T[MASK], *(one.advantages_T[1:] for one in found[1:])]), wanted, rtol=1e-6)
  # One token, or none that differs, has nothing to be compared with.
  for members in ([sample(1.0, short)], [sample(1.0, short), sample(1.0, short)], []):
    assert not any(one.advantages_T.any() for one in estimate(config_of(advantage=whitened), [group(*members)]))


def expectation(after=0.0):
  return Expectation(np.array([1e9, 0.2, 0.4, np.nan, 0.6], np.float32), after)


def test_gae_by_hand():
  found, = estimate(config_of(advantage=GAE), [group(sample(1.0))], expectations=[expectation(after=1e9)])
  # Errors: 0.5 x 0.4 - 0.2 = 0, 0.5 x 0.6 - 0.4 = -0.1, 1 - 0.6 = 0.4; each passes a quarter of itself back.
  np.testing.assert_allclose(found.advantages_T, [0, 0, 0, 0, 0.4], atol=1e-7)
  np.testing.assert_allclose(found.returns_T, [0, 0.2, 0.4, 0, 1.0], atol=1e-7)
  np.testing.assert_allclose(found.values_T, [0, 0.2, 0.4, 0, 0.6], atol=1e-7)
  assert set(found.others) == {'values', 'returns'}


def test_the_returns_of_a_critic_may_have_their_own_trace_and_are_not_whitened():
  whitened = AdvantageConfig('gae', center='none', scale='none', discount=0.5, trace=0.5, whiten=True)
  config = config_of(advantage=whitened, critic=CriticConfig(trace=1.0))
  found, = estimate(config, [group(sample(1.0))], expectations=[expectation()])
  np.testing.assert_allclose(found.returns_T[MASK], [0.25, 0.5, 1.0], atol=1e-7)
  np.testing.assert_allclose(found.advantages_T[MASK], np.array([-1, -1, 2]) / np.sqrt(3), rtol=1e-5)


@pytest.mark.parametrize('outcome, overlong, wanted', [
    (Outcome.LENGTH, 'bootstrap', 0.5 * 0.8), (Outcome.LENGTH, 'grade', 1.0), (Outcome.OK, 'bootstrap', 1.0)])
def test_the_critic_stands_in_for_the_rest_of_a_sample_that_was_cut(outcome, overlong, wanted):
  config = config_of(advantage=GAE, overlong=overlong)
  found, = estimate(config, [group(sample(1.0, outcome=outcome, truncated=True))], expectations=[expectation(after=0.8)])
  assert found.returns_T[-1] == pytest.approx(wanted)


def test_every_turn_gets_its_own_credit_and_a_failure_with_good_steps_learns():
  groups = [group(sample(0.0, parts={'steps': 1.0}, turn_scores=(1.0, 0.0)), sample(0.0, parts={'steps': 1.0}, turn_scores=(0.0, 1.0)))]
  config = config_of(process=ProcessConfig(0.2, credit='turn'), advantage=AdvantageConfig(scale='none'))
  found = estimate(config, groups)
  np.testing.assert_allclose(found[0].advantages_T, [0, 0.1, 0.1, 0, -0.1], rtol=1e-6)
  np.testing.assert_allclose(found[1].advantages_T, [0, -0.1, -0.1, 0, 0.1], rtol=1e-6)
  config = config_of(process=ProcessConfig(0.2, credit='turn'), advantage=PLUS)
  found = estimate(config, groups)
  np.testing.assert_allclose(found[0].advantages_T, [0, 0.1, 0.1, 0, 0], rtol=1e-6)
  np.testing.assert_allclose(found[1].advantages_T, [0, 0.1, 0.1, 0, 0.1], rtol=1e-6)
  config = config_of(process=ProcessConfig(0.2, credit='episode'), advantage=AdvantageConfig(scale='none'))
  assert not any(one.advantages_T.any() for one in estimate(config, groups))


def test_differences_stand_at_their_own_tokens():
  member = sample()
  member.behavior_logprobs_T[MASK] = [-1, -2, -3]
  # What predicts token t stands at t - 1; the last place predicts nothing, and the places of a tool's result are not read.
  difference_T, = estimation.differences([member], [np.array([-0.5, -0.25, np.nan, -1, 1e9], np.float32)])
  np.testing.assert_array_equal(difference_T, np.array([0, -0.5, -1.75, 0, -2], np.float32))


@pytest.mark.parametrize('kl, factor', [(10, 1.02), (6, 1.02), (5.5, 1.01), (5, 1.0), (4.5, 0.99), (0, 0.98)])
def test_the_coefficient_follows_its_target(kl, factor):
  assert estimation.next_coef(RewardKLConfig(0.3, target=5.0), 0.4, kl) == pytest.approx(0.4 * factor)
  assert estimation.next_coef(RewardKLConfig(0.3), 0.3, kl) == 0.3


def test_summaries_are_over_sampled_tokens():
  members = [sample(), sample(mask=[False, True, False])]
  found = [estimation.Estimate(*np.array([[9, 1, 2, 9, 3], [9, 0, 1, 9, 2], [9, 0, 1, 9, 4]], np.float32)),
           estimation.Estimate(*np.array([[9, 6, 9], [9, 5, 9], [9, 5, 9]], np.float32))]
  values = estimation.summarize(members, found)
  assert (values['critic/advantages/mean'], values['critic/advantages/min'], values['critic/advantages/max']) == (3, 1, 6)
  assert (values['critic/values/mean'], values['critic/returns/mean']) == (2, 2.5)
  assert values['critic/vf_explained_var'] == pytest.approx(1 - np.var([0, 0, 2, 0]) / np.var([0, 1, 4, 5]))
  assert estimation.summarize([], []) == {}
  assert 'critic/vf_explained_var' not in estimation.summarize(members[1:], found[1:])
