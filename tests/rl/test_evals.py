"""Statistics by hand, and final answers in text."""

import math

import numpy as np
import pytest

from rl.evals import answers, stats


def test_wilson_by_hand():
  # 8 of 10: center (0.8 + 3.8415/20) / 1.38415 = 0.71674, half 1.96 sqrt(0.016 + 3.8415/400) / 1.38415 = 0.22655.
  estimate = stats.proportion(8, 10)
  assert estimate.value == 0.8
  assert estimate.low == pytest.approx(0.49016, abs=1e-5) and estimate.high == pytest.approx(0.94331, abs=1e-5)
  assert stats.proportion(0, 20).low == 0 and 0.1 < stats.proportion(0, 20).high < 0.2
  assert stats.proportion(20, 20).high == 1


@pytest.mark.parametrize('successes, trials', [(1, 0), (3, 2), (-1, 5)])
def test_no_proportion(successes, trials):
  with pytest.raises(ValueError, match=f'successes={successes} of trials={trials} is not a proportion'):
    stats.proportion(successes, trials)


def test_paired_difference_by_hand_and_coverage():
  # 3 gained and 1 lost of 9: 4/11 and 2/11; half 1.96 sqrt((6/11 - 4/121) / 11) = 0.42301 around 2/11.
  estimate = stats.paired_difference(3, 1, 9)
  assert estimate == pytest.approx((2 / 9, 2 / 11 - 0.42301, 2 / 11 + 0.42301), abs=1e-5)
  assert stats.paired_difference(1, 3, 9) == pytest.approx((-2 / 9, -2 / 11 - 0.42301, 0.42301 - 2 / 11), abs=1e-5)
  assert stats.paired_difference(0, 50, 50).low == -1 and stats.paired_difference(50, 0, 50).high == 1
  # Rates of 0.5 and 0.3 over problems that share their difficulty: two independent intervals would be far too wide.
  rng = np.random.default_rng(0)
  found = []
  for _ in range(1000):
    difficulty = rng.random(60)
    first, second = difficulty < 0.3, difficulty < 0.5
    found.append(stats.paired_difference(int((second & ~first).sum()), int((first & ~second).sum()), 60))
  assert 0.92 < np.mean([one.low <= 0.2 <= one.high for one in found]) < 0.99


@pytest.mark.parametrize('gained, lost, pairs', [(0, 0, 0), (3, 2, 4), (-1, 0, 4)])
def test_no_paired_difference(gained, lost, pairs):
  with pytest.raises(ValueError, match=f'gained={gained} and lost={lost} of pairs={pairs}: pairs must be positive'):
    stats.paired_difference(gained, lost, pairs)


def test_ratio_of_sums_by_hand_and_coverage():
  estimate = stats.ratio_of_sums([2.0, 6.0], [2.0, 2.0])
  # Value 2; residuals -2 and 2; error sqrt(2/1 * 8) / 4 = 1.
  assert estimate.value == 2 and estimate.high == pytest.approx(2 + stats.Z_95)
  assert stats.ratio_of_sums([1.0], [2.0]) == (0.5, -math.inf, math.inf)
  # The interval covers the truth in about 95 % of 400 samples; 90 % is 4.6 standard deviations away.
  rng = np.random.default_rng(0)
  covered = 0
  for _ in range(400):
    sizes = rng.integers(1, 60, 80)
    level = rng.normal(1.0, 0.5, 80)  # Tokens of a document share its level: a naive per-token error would be far too small.
    found = stats.ratio_of_sums(sizes * level, sizes)
    covered += found.low <= 1.0 <= found.high
  assert covered > 360


def test_final_answers():
  mark = answers.NUMBER_AFTER_MARK
  assert answers.final_answer('so 3. #### 12\nno, #### 1,250', mark) == '1,250'
  assert answers.final_answer('it is 12', mark) is None
  assert answers.is_equal('1,250.0', '1250') and answers.is_equal('-0.50', '-.5')
  assert not answers.is_equal('12', '13') and not answers.is_equal(None, '12')
  assert answers.is_equal('Paris', 'Paris') and not answers.is_equal('paris', 'Rome')
