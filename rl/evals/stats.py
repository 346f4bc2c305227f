"""Intervals for what an evaluation measures; plain numpy and the standard library.

Deliberately absent: significance stars. Report the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

Z_95 = 1.959963984540054
# The 97.5 % quantiles of Student's t with 1 to 10 degrees of freedom.
_T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


class Estimate(NamedTuple):
  """A value with its 95 % interval."""
  value: float
  low: float
  high: float

  def __str__(self) -> str:
    return f'{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]'


def proportion(successes: float, trials: int) -> Estimate:
  """Estimate a success rate with Wilson's score interval (JASA 22, 1927), which is right near 0 and 1 too.

  With trials that succeed in part, by at most 1 each, the interval is wider than need be.

  Raises:
    ValueError: no trials, or more successes than trials.
  """
  if not 0 <= successes <= trials or trials == 0:
    raise ValueError(f'successes={successes} of trials={trials} is not a proportion; trials must be positive and at least successes.')
  rate, square = successes / trials, Z_95**2
  center = (rate + square / (2 * trials)) / (1 + square / trials)
  half = Z_95 * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials**2)) / (1 + square / trials)
  return Estimate(rate, max(center - half, 0.0), min(center + half, 1.0))


class Rate(NamedTuple):
  """Pass@1: problems solved, of those graded."""
  solved: int
  graded: int

  @property
  def estimate(self) -> Estimate:
    """Return the rate with its interval; ValueError if nothing was graded."""
    return proportion(self.solved, self.graded)


def paired_difference(gained: int, lost: int, pairs: int) -> Estimate:
  """Estimate the difference of two success rates over the same trials, with the adjusted interval of Bonett and Price (JEBS 37(4), 2012).

  Pairs that agree say nothing of a difference, so the interval is narrower than that of two independent samples.

  Args:
    gained: trials with success only the second time.
    lost: trials with success only the first time.
    pairs: all trials.

  Raises:
    ValueError: no pairs, or more that changed than there are.
  """
  if pairs < 1 or min(gained, lost) < 0 or gained + lost > pairs:
    raise ValueError(f'gained={gained} and lost={lost} of pairs={pairs}: pairs must be positive and at least as many as those that changed.')
  up, down = (gained + 1) / (pairs + 2), (lost + 1) / (pairs + 2)
  half = Z_95 * math.sqrt((up + down - (up - down) ** 2) / (pairs + 2))
  return Estimate((gained - lost) / pairs, max(up - down - half, -1.0), min(up - down + half, 1.0))


def ratio_of_sums(totals: Sequence[float], weights: Sequence[float]) -> Estimate:
  """Estimate sum(totals) / sum(weights) over independent clusters, such as nats over tokens of documents.

  Tokens of one document are not independent, so the variance is that of the documents' residuals (linearized ratio estimator, Cochran,
  Sampling Techniques, eq. 6.13).

  Raises:
    ValueError: no cluster, or lengths that differ.
  """
  total, weight = np.asarray(totals, np.float64), np.asarray(weights, np.float64)
  if total.shape != weight.shape or total.ndim != 1 or weight.sum() <= 0:
    raise ValueError(f'totals of shape {total.shape} and weights of shape {weight.shape} must be equally many, with a positive sum of weights.')
  value = total.sum() / weight.sum()
  count = len(total)
  if count == 1:
    return Estimate(float(value), -math.inf, math.inf)
  residuals = total - value * weight
  error = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / weight.sum()
  return Estimate(float(value), float(value - Z_95 * error), float(value + Z_95 * error))


def mean(values: Sequence[float]) -> Estimate:
  """Estimate the mean of a few independent runs with Student's interval, which is as wide as so few allow; endless for one.

  Raises:
    ValueError: no values.
  """
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or not array.size:
    raise ValueError(f'values of shape {array.shape} have no mean to estimate; give a list of at least one.')
  center, freedom = float(array.mean()), array.size - 1
  if not freedom:
    return Estimate(center, -math.inf, math.inf)
  half = _quantile_of_t(freedom) * float(array.std(ddof=1)) / math.sqrt(array.size)
  return Estimate(center, center - half, center + half)


def _quantile_of_t(freedom: int) -> float:
  if freedom <= len(_T_95):
    return _T_95[freedom - 1]
  # Abramowitz and Stegun 26.7.5, right to 1e-4 from here on.
  z = Z_95
  return (z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2) +
          (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3))
