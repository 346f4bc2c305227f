"""Advantages by hand: four rewards, invalid samples, groups without signal, overlong replies."""

import numpy as np
import pytest

from rl import advantages

REWARDS = np.array([[1.0, 0.0, 0.0, 3.0]])
ALL = np.ones((1, 4), bool)


def group_relative(rewards, valid, center='mean', scale='none', epsilon=0.0):
  return advantages.group_relative(np.array(rewards, float), np.array(valid, bool), center=center, scale=scale, epsilon=epsilon)


def test_four_rewards_by_hand():
  # Mean 1; squares 0 + 1 + 1 + 4 = 6, so std = sqrt(6 / 3) = sqrt(2). Siblings' means: 1, 4/3, 4/3, 1/3.
  np.testing.assert_allclose(group_relative(REWARDS, ALL), [[0, -1, -1, 2]])
  np.testing.assert_allclose(group_relative(REWARDS, ALL, scale='std'), np.array([[0, -1, -1, 2]]) / np.sqrt(2), rtol=1e-6)
  np.testing.assert_allclose(group_relative(REWARDS, ALL, scale='std', epsilon=0.5), np.array([[0, -1, -1, 2]]) / (np.sqrt(2) + 0.5), rtol=1e-6)
  np.testing.assert_allclose(group_relative(REWARDS, ALL, 'leave_one_out'), [[0, -4 / 3, -4 / 3, 8 / 3]], rtol=1e-6)
  np.testing.assert_allclose(group_relative(REWARDS, ALL, 'none'), REWARDS)
  assert group_relative(REWARDS, ALL).dtype == np.float32


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
    (lambda: group_relative([[1, 2]], [[1, 1]], 'median'), r"center='median' is unknown; use one of mean, leave_one_out, none"),
    (lambda: group_relative([[1, 2]], [[1, 1]], scale='batch'), r"scale='batch' is unknown; use one of std, batch_std, none"),
    (lambda: group_relative([[1, 2]], [[1, 1]], epsilon=-1), r'epsilon=-1 must not be negative'),
    (lambda: advantages.has_signal(np.ones((1, 2)), np.ones((1, 2))), r'valid_QU float64\(1, 2\) must be .* the second bool'),
    (lambda: advantages.soft_overlong_penalty(1, 10, 11), r'max_length=10, buffer=11: the buffer must be from 1 to max_length'),
])
def test_refuses(call, message):
  with pytest.raises(ValueError, match=message):
    call()
