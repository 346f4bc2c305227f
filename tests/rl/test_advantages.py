"""Advantages by hand: four rewards, invalid samples, groups without signal, overlong replies; tokens whitened, turns, process rewards."""

import numpy as np
import pytest

from rl import advantages

REWARDS = np.array([[1.0, 0.0, 0.0, 3.0]])
ALL = np.ones((1, 4), bool)


def group_relative(rewards, valid, center='mean', scale='none', epsilon=0.0, lengths=None):
  return advantages.group_relative(np.array(rewards, float), np.array(valid, bool), center=center, scale=scale, epsilon=epsilon,
                                   lengths_QU=None if lengths is None else np.array(lengths))


def test_four_rewards_by_hand():
  # Mean 1; squares 0 + 1 + 1 + 4 = 6, so std = sqrt(6 / 3) = sqrt(2). Siblings' means: 1, 4/3, 4/3, 1/3.
  np.testing.assert_allclose(group_relative(REWARDS, ALL), [[0, -1, -1, 2]])
  np.testing.assert_allclose(group_relative(REWARDS, ALL, scale='std'), np.array([[0, -1, -1, 2]]) / np.sqrt(2), rtol=1e-6)
  np.testing.assert_allclose(group_relative(REWARDS, ALL, scale='std', epsilon=0.5), np.array([[0, -1, -1, 2]]) / (np.sqrt(2) + 0.5), rtol=1e-6)
  np.testing.assert_allclose(group_relative(REWARDS, ALL, 'leave_one_out'), [[0, -4 / 3, -4 / 3, 8 / 3]], rtol=1e-6)
  np.testing.assert_allclose(group_relative(REWARDS, ALL, 'none'), REWARDS)
  assert group_relative(REWARDS, ALL).dtype == np.float32


def test_maxrl_divides_by_the_mean():
  # Mean 1: (0, -1, -1, 2). One of four solved: mean 1/4, so 3 for who solved it and -1 for the others.
  np.testing.assert_allclose(group_relative(REWARDS, ALL, scale='mean'), [[0, -1, -1, 2]])
  np.testing.assert_allclose(group_relative([[1, 0, 0, 0], [0, 0, 0, 0]], np.ones((2, 4)), scale='mean'), [[3, -1, -1, -1], [0, 0, 0, 0]])
  got = group_relative([[1, 0, 0, -9]], [[1, 1, 1, 0]], scale='mean', epsilon=0.1)
  np.testing.assert_allclose(got, np.array([[2, -1, -1, 0]]) / 3 / (1 / 3 + 0.1), rtol=1e-6)


def test_opo_weighs_the_baseline_by_length():
  # (1 x 10 + 0 x 20 + 0 x 30 + 3 x 40) / 100 = 1.3; without the last sample 10 / 60.
  lengths = [[10, 20, 30, 40]]
  np.testing.assert_allclose(group_relative(REWARDS, ALL, 'length_weighted', lengths=lengths), [[-0.3, -1.3, -1.3, 1.7]], rtol=1e-6)
  got = group_relative([[1, 0, 0, np.nan]], [[1, 1, 1, 0]], 'length_weighted', lengths=lengths)
  np.testing.assert_allclose(got, [[5 / 6, -1 / 6, -1 / 6, 0]], rtol=1e-6)
  assert not group_relative(REWARDS * 0, ALL, 'length_weighted', lengths=np.zeros((1, 4))).any()


def test_reward_of_tokens_with_the_penalty_of_kl():
  mask = np.array([0, 1, 1, 0, 1, 0], bool)
  got = advantages.kl_in_reward(2.0, np.array([9e9, 0.5, -1.0, np.nan, 2.0, np.inf]), mask, 0.1)
  np.testing.assert_allclose(got, [0, -0.05, 0.1, 0, 2 - 0.2, 0], rtol=1e-6)
  assert got.sum() == pytest.approx(2 - 0.1 * (0.5 - 1 + 2)) and got.dtype == np.float32
  assert not advantages.kl_in_reward(2.0, np.zeros(3), np.zeros(3, bool), 0.1).any()


def test_returns_to_go_by_hand():
  mask = np.array([0, 1, 1, 0, 1, 0], bool)
  np.testing.assert_allclose(advantages.returns_to_go(np.array([1e9, 0.5, -1.0, np.nan, 2.0, 1e9]), mask), [0, 1.5, 1, 0, 2, 0])


def test_whitening_is_over_all_sampled_tokens_of_the_batch():
  # Tokens 1, 3, 3, 5: mean 3, squares 4 + 0 + 0 + 4 = 8, std = sqrt(8 / 3).
  masks = [np.array([1, 0, 1], bool), np.array([1, 1], bool), np.array([0], bool)]
  got = advantages.whiten([np.array([1, np.nan, 3]), np.array([3.0, 5]), np.array([1e9])], masks)
  for found, wanted in zip(got, ([-2, 0, 0], [0, 2], [0])):
    np.testing.assert_allclose(found, np.array(wanted) / np.sqrt(8 / 3), rtol=1e-6)
    assert found.dtype == np.float32
  rng = np.random.default_rng(0)
  masks = [rng.random(size) < 0.6 for size in (5, 40, 17)]
  made = np.concatenate([white[mask] for white, mask in zip(advantages.whiten([rng.normal(7, 3, mask.size) for mask in masks], masks), masks)])
  assert made.mean() == pytest.approx(0, abs=1e-6) and made.std(ddof=1) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize('tokens', [[], [4.0], [0.1, 0.1, 0.1]])
def test_tokens_that_do_not_differ_are_exactly_zero(tokens):
  got, = advantages.whiten([np.array([*tokens, 9.0])], [np.array([True] * len(tokens) + [False])], epsilon=0.0)
  assert got.shape == (len(tokens) + 1,) and not got.any()
  assert advantages.whiten([], []) == []


def test_turns_are_runs_of_sampled_tokens():
  assert advantages.turn_numbers(np.array([0, 1, 1, 0, 1, 0, 0, 1, 1], bool)).tolist() == [-1, 0, 0, -1, 1, -1, -1, 2, 2]
  assert advantages.turn_numbers(np.array([1, 1], bool)).tolist() == [0, 0]
  assert advantages.turn_numbers(np.array([0, 0], bool)).tolist() == [-1, -1] and not advantages.turn_numbers(np.zeros(0, bool)).size


TURN_MASKS = [np.array(mask, bool) for mask in ([0, 1, 1, 0, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0])]
TURN_SCORES = [(1.0, 0.0), (0.0, 0.5), (0.5,), ()]


def turn_advantages(outcomes=(0, 0, 0, 0), scores=TURN_SCORES, masks=TURN_MASKS, **changes):
  settings = {'weight': 1.0, 'center': 'mean', 'scale': 'none', 'epsilon': 0.0, 'discount': 0.0} | changes
  return [found.tolist() for found in advantages.turn_advantages(np.array(outcomes, float), scores, masks, **settings)]


def test_each_turn_has_its_own_credit_at_its_own_tokens():
  # First turns 1, 0, 0.5: mean 0.5. Second turns 0 and 0.5: mean 0.25. The last sample has no scores of its turns.
  assert turn_advantages() == [[0, 0.5, 0.5, 0, -0.25], [-0.5, 0, 0.25, 0.25, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
  # All failed alike, so outcomes say nothing, and still good steps are told from bad ones.
  assert turn_advantages([-1, -1, 2, 0.5], weight=2.0) == [
      [0, 0, 0, 0, -1.5], [-2, 0, -0.5, -0.5, 0], [0, 2, 0, 0, 0], [0.5, 0, 0.5, 0, 0]]
  assert turn_advantages([-1, -1, 2, 0.5], weight=0.0) == [[0, -1, -1, 0, -1], [-1, 0, -1, -1, 0], [0, 2, 0, 0, 0], [0.5, 0, 0.5, 0, 0]]


def test_turns_may_be_worth_what_follows_them():
  # Returns with discount 1: (1, 0), (0.5, 0.5), (0.5): first turns less 2/3, second less 1/4. Discount 0.5: (1, 0), (0.25, 0.5), (0.5).
  got = turn_advantages(discount=1.0)
  np.testing.assert_allclose([got[0][1], got[1][0], got[2][1], got[0][4], got[1][2]], [1 / 3, -1 / 6, -1 / 6, -0.25, 0.25], rtol=1e-6)
  got = turn_advantages(discount=0.5)
  np.testing.assert_allclose([got[0][1], got[1][0], got[2][1]], np.array([1, 0.25, 0.5]) - 1.75 / 3, rtol=1e-6)
  # Scaled: first turns have the standard deviation 0.5, second ones 0.5 / sqrt(2).
  got = turn_advantages(scale='std')
  np.testing.assert_allclose([got[0][1], got[1][0], got[0][4], got[1][2]], [1, -1, -0.5**0.5, 0.5**0.5], rtol=1e-6)


def test_a_turn_that_nobody_else_reached_says_nothing():
  assert turn_advantages(scores=[(1.0, 1.0), (), (), ()]) == [[0] * 5] * 4
  assert turn_advantages((), [], []) == []
  assert turn_advantages([1.0], [()], [np.zeros(2, bool)]) == [[0, 0]]


def test_process_is_paid_under_the_rule():
  parts = {'plan': 1.0, 'search': 0.5}
  # A success earns (1 - w) + w x 0.75; a failure w x 0.75, but at most 0.1 of it.
  assert advantages.pay_process(1.0, parts, weight=0.2) == pytest.approx(0.8 + 0.15)
  assert advantages.pay_process(0.0, parts, weight=0.2) == 0.1
  assert advantages.pay_process(0.0, parts, weight=0.08) == pytest.approx(0.06)
  assert advantages.pay_process(0.5, parts, weight=0.2) == pytest.approx(0.4 + 0.15)
  assert advantages.pay_process(0.0, parts, weight=0.2, cap=0.0) == 0 == advantages.pay_process(0.0, {}, weight=0.2)
  assert advantages.pay_process(1.0, {}, weight=0.2) == 1 == advantages.pay_process(1.0, parts, weight=0.0)
  # No failure earns as much as a success.
  assert advantages.pay_process(0.0, {'plan': 1.0}, weight=0.89) < advantages.pay_process(1.0, {'plan': 0.0}, weight=0.89)


def test_batch_std_is_that_of_all_valid_rewards():
  # Rewards 0, 2, 4, 4 (the 9 is invalid): mean 2.5, squares 6.25 + 0.25 + 2.25 + 2.25 = 11, std = sqrt(11 / 3); group means 1 and 4.
  got = group_relative([[0, 2, 9], [4, 4, 9]], [[1, 1, 0], [1, 1, 0]], scale='batch_std')
  np.testing.assert_allclose(got, np.array([[-1, 1, 0], [0, 0, 0]]) / np.sqrt(11 / 3), rtol=1e-6)
  assert not group_relative([[2, 2], [2, 2]], np.ones((2, 2)), 'none', 'batch_std').any()


@pytest.mark.parametrize('center', ['mean', 'leave_one_out'])
@pytest.mark.parametrize('scale', ['std', 'none'])
@pytest.mark.parametrize('placeholder', [0.0, -7.0, np.nan, np.inf])
def test_an_invalid_sample_leaves_its_siblings_unmoved(center, scale, placeholder):
  alone = group_relative([[1, 0, 0]], np.ones((1, 3)), center, scale, 1e-6)
  beside = group_relative([[1, placeholder, 0, 0]], [[1, 0, 1, 1]], center, scale, 1e-6)
  np.testing.assert_array_equal(beside[:, [0, 2, 3]], alone)
  assert beside[0, 1] == 0


@pytest.mark.parametrize('center', ['mean', 'leave_one_out'])
@pytest.mark.parametrize('scale', ['std', 'batch_std', 'none'])
def test_groups_without_signal_are_exactly_zero(center, scale):
  # Three times 0.1 has a mean that is not 0.1 in floating point, and epsilon = 0 would divide the difference by its own size.
  rewards = [[0.1, 0.1, 0.1], [1, 0, 0], [5, 0, 0], [0, 1, 0]]
  valid = [[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]]
  got = group_relative(rewards, valid, center, scale)
  assert np.isfinite(got).all() and not got[:3].any() and got[3].any()
  np.testing.assert_array_equal(advantages.has_signal(np.array(rewards), np.array(valid, bool)), [False, False, False, True])


def test_advantages_are_relative_whatever_the_rewards():
  rng = np.random.default_rng(0)
  rewards, valid = rng.normal(size=(50, 8)), rng.random((50, 8)) < 0.7
  for center in ('mean', 'leave_one_out'):
    got = group_relative(rewards, valid, center, 'std', 1e-6)
    np.testing.assert_allclose(got.sum(1), 0, atol=1e-5)
    np.testing.assert_allclose(group_relative(3 * rewards + 5, valid, center, 'std'), group_relative(rewards, valid, center, 'std'), rtol=1e-4,
                               atol=1e-6)
  ones = group_relative(rewards, valid, scale='std')[valid.sum(1) > 1]
  np.testing.assert_allclose((ones**2).sum(1), valid[valid.sum(1) > 1].sum(1) - 1, rtol=1e-5)


def test_soft_overlong_penalty_by_hand():
  # DAPO's own numbers: 20480 tokens, of them 4096 buffer.
  penalties = {16_384: 0.0, 16_385: -1 / 4096, 18_432: -0.5, 20_480: -1.0, 30_000: -1.0, 0: 0.0}
  for length, penalty in penalties.items():
    assert advantages.soft_overlong_penalty(length, 20_480, 4096) == penalty


@pytest.mark.parametrize('call, message', [
    (lambda: group_relative([[1, np.nan]], [[1, 1]]), r'problem 0, sample 1 is nan; a valid sample has a finite one'),
    (lambda: group_relative([1, 2], [1, 1]), r'rewards_QU\(2,\) and valid_QU bool\(2,\) must be \[problems, samples\]'),
    (lambda: group_relative([[1, 2]], [[1, 1]], 'median'), r"center='median' is unknown; use one of mean, leave_one_out, length_weighted, none"),
    (lambda: group_relative([[1, 2]], [[1, 1]], scale='batch'), r"scale='batch' is unknown; use one of std, batch_std, mean, none"),
    (lambda: group_relative([[1, -2]], [[1, 1]], scale='mean'), r'there is a reward of -2.0; rewards must be at least 0'),
    (lambda: group_relative([[1, 2]], [[1, 1]], 'length_weighted'), r'needs lengths_QU\(1, 2\), the tokens sampled .* got None'),
    (lambda: advantages.pay_process(np.nan, {}, weight=0.1), r'outcome=nan must be a number from 0 to 1'),
    (lambda: advantages.pay_process(1, {'plan': 3}, weight=0.1), r"parts\['plan'\]=3 must be a number from 0 to 1"),
    (lambda: advantages.pay_process(1, {}, weight=0.9), r'weight=0.9 must be from 0 to below 1 - cap'),
    (lambda: advantages.kl_in_reward(np.nan, np.zeros(1), np.ones(1, bool), 0.1), r'reward=nan must be finite'),
    (lambda: advantages.kl_in_reward(1, np.full(1, np.nan), np.ones(1, bool), 0.1), r'difference_T\[0\] is nan, and the policy sampled'),
    (lambda: advantages.whiten([np.full(2, np.nan)], [np.ones(2, bool)]), r'advantages_T\[0\] is nan, and the policy sampled that token'),
    (lambda: turn_advantages(scores=[(1.0,), (0.0, 0.5), (0.5,), ()]), r'Sample 0 has 1 scores for 2 turns; give one for each, or none'),
    (lambda: turn_advantages(scores=[(1.0, np.nan), (0.0, 0.5), (0.5,), ()]), r'sample 0 is nan; a valid sample has a finite one'),
    (lambda: turn_advantages([0, 0, 0]), r'are of 3, 4 and 4 samples; they must be the same'),
    (lambda: turn_advantages([0, 0, np.inf, 0]), r'must be finite, weight=1.0 at least 0'),
    (lambda: turn_advantages(discount=1.5), r'discount=1.5 between 0 and 1'),
    (lambda: group_relative([[1, 2]], [[1, 1]], epsilon=-1), r'epsilon=-1 must not be negative'),
    (lambda: advantages.has_signal(np.ones((1, 2)), np.ones((1, 2))), r'valid_QU float64\(1, 2\) must be .* the second bool'),
    (lambda: advantages.soft_overlong_penalty(1, 10, 11), r'max_length=10, buffer=11: the buffer must be from 1 to max_length'),
])
def test_refuses(call, message):
  with pytest.raises(ValueError, match=message):
    call()
