"""Drift and reward hacking: an alarm when what is optimized (a proxy) and the truth part. Plain numpy; a run's state is a few numbers.

While a policy learns, some of its samples are scored by the proxy and also by the truth: a verifier, or people who label a share of them. Two
tests look at the samples of the last few steps, the window:

| test | rings where |
|---|---|
| 'agreement' | the proxy ranks the samples of a problem worse than it did at first, by `fall`, or worse than chance |
| 'score' | the truth is below its best window by the share `drop`, while the proxy is no lower than it was then |

Either must be more than chance explains, by intervals of 95 %. The first is the early one: the proxy's gradient moves the truth by their
covariance among samples of the same problem (Price's equation), so a policy that begins to exploit the proxy shows as samples that the proxy
ranks wrongly, before the truth has fallen. Agreement is the share of pairs of samples of one problem, of different truth, that the proxy
orders as the truth does (equal proxies: a half); 1/2 is chance, and twice it less 1 is a rank correlation (Goodman and Kruskal's gamma). It
is a mean over problems, with Wilson's interval for as many trials, which holds however samples of a problem depend on each other.

A policy whose samples of each problem are all alike gives no pairs; then only the second test can speak.

Deliberately absent: what the action does (the loop's), and repair: nothing here changes a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from dataclasses import dataclass
import math
from typing import Any, Literal

import numpy as np

from rl.evals import stats
from rl.evals.stats import Estimate

Action = Literal['warn', 'snapshot', 'stop']


@dataclass(frozen=True)
class DriftConfig:
  """When to raise an alarm, and what it asks for.

  Attributes:
    window: observations (steps) that are looked at together.
    fall: of the agreement, from that of the first window; agreement is between 0 and 1.
    drop: of the truth, as a share of its best window.
    min_problems: with fewer problems that say something in the window, agreement is not tested.
    action: what the loop is to do: 'warn' in the log, 'snapshot' a checkpoint that is kept, or 'stop'.
  """
  window: int = 5
  fall: float = 0.1
  drop: float = 0.05
  min_problems: int = 10
  action: Action = 'warn'

  def __post_init__(self):
    if self.window < 1 or self.min_problems < 1:
      raise ValueError(f'window={self.window} and min_problems={self.min_problems} must be at least 1.')
    if not (0 < self.fall < 1 and 0 < self.drop < 1):
      raise ValueError(f'fall={self.fall} and drop={self.drop} are shares and must lie between 0 and 1.')


@dataclass(frozen=True)
class Alarm:
  """Proxy and truth have parted: which test says so since which step, why in words, and what is to be done."""
  step: int
  test: Literal['agreement', 'score']
  reason: str
  action: Action


@dataclass(frozen=True)
class _Sums:
  """Sums over problems, which add up over steps: of their means, of what their pairs say, and how many there are."""
  problems: int = 0
  truth: float = 0.0
  truth_squared: float = 0.0
  proxy: float = 0.0
  agreeing: float = 0.0
  comparing: int = 0

  def __add__(self, other: _Sums) -> _Sums:
    return _Sums(*(mine + its for mine, its in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

  @property
  def agreement(self) -> Estimate:
    """Return the mean share of pairs that the proxy orders as the truth does, a half and anything without a pair."""
    return stats.proportion(min(self.agreeing, self.comparing), self.comparing) if self.comparing else Estimate(0.5, 0.0, 1.0)

  @property
  def truth_mean(self) -> Estimate:
    """Return the mean of the truth; anything for fewer than two problems."""
    mean = self.truth / max(self.problems, 1)
    if self.problems < 2:
      return Estimate(mean, -math.inf, math.inf)
    variance = max(self.truth_squared - self.problems * mean**2, 0.0) / (self.problems - 1)
    half = stats.Z_95 * math.sqrt(variance / self.problems)
    return Estimate(mean, mean - half, mean + half)

  @property
  def proxy_mean(self) -> float:
    return self.proxy / max(self.problems, 1)


class Monitor:
  """Watches a run; its state is `to_json()`."""

  def __init__(self, config: DriftConfig, state: Mapping[str, Any] | None = None):
    """Start fresh, or from the `to_json()` of another."""
    state = state or {}
    self._config = config
    self._recent = [_Sums(*sums) for sums in state.get('recent', [])]
    self._first = _Sums(*state.get('first', []))
    self._num_first = int(state.get('num_first', 0))
    self._best = _Sums(*state['best']) if 'best' in state else None
    self._best_step = int(state.get('best_step', 0))
    self._ringing: list[str] = list(state.get('ringing', []))
    self._num_alarms = int(state.get('num_alarms', 0))
    self._num_left_out = 0

  def observe(self, step: int, proxy_N: Sequence[float], truth_N: Sequence[float], problem_N: Sequence[int] | None = None) -> Alarm | None:
    """Take the samples of a step; return an alarm when a test that was quiet begins to ring.

    Args:
      step: of the run.
      proxy_N, truth_N: of each sample; one of which either is not finite is left out.
      problem_N: which problem each is a sample of; None takes neighbors for two samples of one.

    Raises:
      ValueError: lengths that differ.
    """
    proxy_N, truth_N = np.asarray(proxy_N, np.float64), np.asarray(truth_N, np.float64)
    problem_N = np.arange(truth_N.size) // 2 if problem_N is None else np.asarray(problem_N)
    if not (proxy_N.ndim == 1 and proxy_N.shape == truth_N.shape == problem_N.shape):
      raise ValueError(f'proxy {proxy_N.shape}, truth {truth_N.shape} and problems {problem_N.shape} must be one number for each sample.')
    is_known_N = np.isfinite(proxy_N) & np.isfinite(truth_N)
    self._num_left_out = int(np.count_nonzero(~is_known_N))
    sums = _summed(proxy_N[is_known_N], truth_N[is_known_N], problem_N[is_known_N])
    if not sums.problems:
      return None
    self._recent = [*self._recent, sums][-self._config.window:]
    if sums.comparing and not self._has_first:
      self._first, self._num_first = self._first + sums, self._num_first + 1
    return self._alarm(step)

  def metrics(self) -> dict[str, float]:
    """Return what the last window says; 'drift/alarm' is 1 while a test rings. Without any sample yet, only the counts."""
    values = {'drift/left_out': float(self._num_left_out), 'drift/alarms': float(self._num_alarms), 'drift/alarm': float(bool(self._ringing))}
    window = sum(self._recent, _Sums())
    if window.problems:
      values |= {'drift/proxy': window.proxy_mean, 'drift/truth': window.truth_mean.value}
    if window.comparing:
      values |= {'drift/agreement': window.agreement.value, 'drift/agreement_low': window.agreement.low,
                 'drift/agreement_high': window.agreement.high}
    return values

  def to_json(self) -> dict[str, Any]:
    """Return the state as JSON values."""
    best = {} if self._best is None else {'best': list(dataclasses.astuple(self._best)), 'best_step': self._best_step}
    return {'recent': [list(dataclasses.astuple(sums)) for sums in self._recent], 'first': list(dataclasses.astuple(self._first)),
            'num_first': self._num_first, **best, 'ringing': list(self._ringing), 'num_alarms': self._num_alarms}

  @property
  def _has_first(self) -> bool:
    return self._num_first >= self._config.window and self._first.comparing >= self._config.min_problems

  def _alarm(self, step: int) -> Alarm | None:
    window = sum(self._recent, _Sums())
    found = {'agreement': self._agreement_falls(window), 'score': self._truth_falls(window)}
    if len(self._recent) == self._config.window and (self._best is None or window.truth_mean.value > self._best.truth_mean.value):
      self._best, self._best_step = window, step
    new = [test for test, reason in found.items() if reason and test not in self._ringing]
    self._ringing = [test for test, reason in found.items() if reason]
    if not new:
      return None
    self._num_alarms += 1
    return Alarm(step, new[0], ' Also: '.join(found[test] for test in new), self._config.action)

  def _agreement_falls(self, window: _Sums) -> str:
    """Say how agreement has fallen; '' if not. The interval of the difference is Newcombe's (1998, method 10)."""
    config, first, now = self._config, self._first.agreement, window.agreement
    if window.comparing < config.min_problems:
      return ''
    fall = first.value - now.value
    by_chance = math.hypot(first.value - first.low, now.high - now.value)
    if now.high < 0.5:
      before = 'which is worse than chance'
    elif self._has_first and fall >= config.fall and fall > by_chance:
      before = f'after {first.value:.0%} in the first ones'
    else:
      return ''
    return (f'The proxy ranks two samples of a problem as the truth does in {now.value:.0%} of cases over the last {len(self._recent)} steps '
            f'(95 % interval {now.low:.0%} to {now.high:.0%}), {before}.')

  def _truth_falls(self, window: _Sums) -> str:
    """Say how the truth has fallen from its best while the proxy has not; '' if not."""
    if self._best is None or len(self._recent) < self._config.window:
      return ''
    best, now = self._best.truth_mean, window.truth_mean
    fall = best.value - now.value
    by_chance = math.hypot(best.value - best.low, now.high - now.value)
    if fall <= self._config.drop * abs(best.value) or not fall > by_chance or window.proxy_mean < self._best.proxy_mean:
      return ''
    return (f'The truth fell from {best.value:.4g} at step {self._best_step} to {now.value:.4g} over the last {len(self._recent)} steps, while '
            f'the proxy went from {self._best.proxy_mean:.4g} to {window.proxy_mean:.4g}.')


def _summed(proxy_N: np.ndarray, truth_N: np.ndarray, problem_N: np.ndarray) -> _Sums:
  """Return the sums over the problems of one step."""
  total = _Sums()
  for problem in np.unique(problem_N):
    proxy_U, truth_U = proxy_N[problem_N == problem], truth_N[problem_N == problem]
    truth = float(truth_U.mean())
    total += _Sums(1, truth, truth**2, float(proxy_U.mean()), *_agreement(proxy_U, truth_U))
  return total


def _agreement(proxy_U: np.ndarray, truth_U: np.ndarray) -> tuple[float, int]:
  """Return (share of the pairs of different truth that the proxy orders alike, 1), or (0, 0) without such a pair."""
  order_UU = np.sign(truth_U[:, None] - truth_U[None])
  differs_UU = order_UU != 0
  if not differs_UU.any():
    return 0.0, 0
  # Each pair stands there twice, with both signs.
  same_UU = np.sign(proxy_U[:, None] - proxy_U[None]) * order_UU
  return float(np.mean((same_UU[differs_UU] + 1) / 2)), 1
