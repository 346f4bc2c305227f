"""Rewards of groups into advantages: how much better a sample did than its siblings. Numpy, on the host.

Rows are problems (Q), columns their samples (U). A sample that is invalid, because the infrastructure failed and not the policy, has no
reward: it gets advantage 0 and moves neither the mean nor the standard deviation of the others. Where there is nothing to compare, the
advantage is exactly 0 and not a rounding error divided by one.

`gae` is of one trajectory, with a critic: there advantages differ from token to token.

Deliberately absent: rewards of turns.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

Center = Literal['mean', 'leave_one_out', 'none']
Scale = Literal['std', 'batch_std', 'none']


def group_relative(rewards_QU: np.ndarray, valid_QU: np.ndarray, *, center: Center, scale: Scale, epsilon: float) -> np.ndarray:
  """Return advantages_QU, float32, 0 at invalid places: (reward - baseline) / scale.

  `center`: the baseline is the group's 'mean' (GRPO, arXiv:2402.03300 sec. 4.1.2), the mean of the sample's siblings ('leave_one_out':
  RLOO, arXiv:2402.14740), or 'none'. `scale`: divide by 'std', the group's standard deviation + epsilon (GRPO), by 'batch_std', that of all
  rewards of the batch + epsilon (arXiv:2508.08221), or by 'none' (Dr. GRPO, arXiv:2503.20783). Standard deviations have the divisor n - 1.

  A group with a baseline that has fewer than two valid samples, or only equal rewards, has advantages 0; so has everything whose standard
  deviation is 0.

  Raises:
    ValueError: shapes that differ, a valid reward that is not finite, an unknown center or scale, epsilon negative.
  """
  for name, value, allowed in (('center', center, get_args(Center)), ('scale', scale, get_args(Scale))):
    if value not in allowed:
      raise ValueError(f'{name}={value!r} is unknown; use one of {", ".join(allowed)}.')
  if not epsilon >= 0:
    raise ValueError(f'epsilon={epsilon} must not be negative.')
  signal_Q1 = has_signal(rewards_QU, valid_QU)[:, None]
  rewards_QU = np.where(valid_QU, rewards_QU, 0).astype(np.float64)
  count_Q1 = valid_QU.sum(1, keepdims=True)
  mean_Q1 = rewards_QU.sum(1, keepdims=True) / np.maximum(count_Q1, 1)
  if center == 'none':
    advantages_QU = rewards_QU
  else:
    # reward - mean of the siblings = n / (n - 1) (reward - mean of all).
    factor_Q1 = count_Q1 / np.maximum(count_Q1 - 1, 1) if center == 'leave_one_out' else 1.0
    advantages_QU = np.where(signal_Q1, factor_Q1 * (rewards_QU - mean_Q1), 0)
  if scale == 'std':
    squares_Q1 = np.where(valid_QU, (rewards_QU - mean_Q1)**2, 0).sum(1, keepdims=True)
    std_Q1 = np.sqrt(squares_Q1 / np.maximum(count_Q1 - 1, 1))
    advantages_QU = np.where(signal_Q1, advantages_QU / np.where(signal_Q1, std_Q1 + epsilon, 1), 0)
  elif scale == 'batch_std':
    rewards = rewards_QU[valid_QU]
    has_spread = rewards.size > 1 and rewards.min() < rewards.max()
    advantages_QU = advantages_QU / (rewards.std(ddof=1) + epsilon) if has_spread else np.zeros_like(advantages_QU)
  return np.where(valid_QU, advantages_QU, 0).astype(np.float32)


def has_signal(rewards_QU: np.ndarray, valid_QU: np.ndarray) -> np.ndarray:
  """Return has_signal_Q, bool: whether a group has two valid samples with different rewards. One without teaches nothing.

  Raises:
    ValueError: shapes that differ, or a valid reward that is not finite.
  """
  if rewards_QU.ndim != 2 or rewards_QU.shape != valid_QU.shape or valid_QU.dtype != np.bool_:
    raise ValueError(f'rewards_QU{rewards_QU.shape} and valid_QU {valid_QU.dtype}{valid_QU.shape} must be [problems, samples] both, '
                     'the second bool.')
  wrong = np.argwhere(valid_QU & ~np.isfinite(rewards_QU))
  if wrong.size:
    problem, sample = wrong[0]
    raise ValueError(f'The reward of problem {problem}, sample {sample} is {rewards_QU[problem, sample]}; a valid sample has a finite one.')
  lowest_Q = np.where(valid_QU, rewards_QU, np.inf).min(1, initial=np.inf)
  highest_Q = np.where(valid_QU, rewards_QU, -np.inf).max(1, initial=-np.inf)
  return lowest_Q < highest_Q


def soft_overlong_penalty(length: int, max_length: int, buffer: int) -> float:
  """Return what a reply of `length` tokens loses for being long (DAPO, arXiv:2503.14476 eq. 13).

  0 up to max_length - buffer tokens, -1 beyond max_length, a straight line between; to be added to the reward.

  Raises:
    ValueError: a buffer outside 1 to max_length, or a negative length.
  """
  if not 1 <= buffer <= max_length or length < 0:
    raise ValueError(f'length={length}, max_length={max_length}, buffer={buffer}: the buffer must be from 1 to max_length, the length at '
                     'least 0.')
  return float(np.clip((max_length - buffer - length) / buffer, -1, 0))


def gae(rewards_T: np.ndarray, values_T: np.ndarray, mask_T: np.ndarray, *, discount: float, trace: float,
        bootstrap_value: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
  """Return (advantages_T, returns_T) of a trajectory, float32, 0 where the mask is false: generalized advantage estimation.

  delta_t = r_t + discount V_t' - V_t, A_t = delta_t + discount trace A_t', returns = A + V (arXiv:1506.02438 eq. 11 and 16), where t' is the
  next token that the policy sampled: what tools and templates put between is no step of it and is never read.

  Args:
    rewards_T, values_T: of each sampled token: what it earned, and what the critic expected before it was sampled.
    mask_T: bool, true where the policy sampled the token.
    discount, trace: gamma and lambda; trace=1 are the returns less the values, trace=0 one-step errors.
    bootstrap_value: what the critic expects after the last token, where the episode was cut off; 0 where it ended.

  Raises:
    ValueError: shapes that differ, a factor outside 0 to 1, or a sampled token with a reward or a value that is not finite.
  """
  _check_trajectory(mask_T, rewards_T=rewards_T, values_T=values_T)
  for name, factor in (('discount', discount), ('trace', trace)):
    if not 0 <= factor <= 1:
      raise ValueError(f'{name}={factor} must be between 0 and 1.')
  if not np.isfinite(bootstrap_value):
    raise ValueError(f'bootstrap_value={bootstrap_value} must be finite.')
  rewards, values = (array[mask_T].astype(np.float64) for array in (rewards_T, values_T))
  deltas = rewards + discount * np.append(values[1:], bootstrap_value)[:values.size] - values
  # A plain loop over floats: a million tokens take a tenth of a second.
  found, advantage = [], 0.0
  for delta in reversed(deltas.tolist()):
    advantage = delta + discount * trace * advantage
    found.append(advantage)
  advantages = np.array(found[::-1])
  advantages_T, returns_T = np.zeros(mask_T.shape, np.float32), np.zeros(mask_T.shape, np.float32)
  advantages_T[mask_T], returns_T[mask_T] = advantages, advantages + values
  return advantages_T, returns_T


def explained_variance(values_T: np.ndarray, returns_T: np.ndarray, mask_T: np.ndarray) -> float | None:
  """Return 1 - Var(returns - values) / Var(returns) over the mask: 1 for a perfect critic, 0 for one that knows only the mean.

  None where the returns do not vary, so that there is nothing to explain. Raises as `gae`.
  """
  _check_trajectory(mask_T, values_T=values_T, returns_T=returns_T)
  values, returns = (array[mask_T].astype(np.float64) for array in (values_T, returns_T))
  if not returns.size or returns.min() == returns.max():
    return None
  return float(1 - np.var(returns - values) / np.var(returns))


def _check_trajectory(mask_T: np.ndarray, **arrays: np.ndarray) -> None:
  if mask_T.ndim != 1 or mask_T.dtype != np.bool_:
    raise ValueError(f'mask_T must be one-dimensional and bool, got {mask_T.dtype}{mask_T.shape}.')
  for name, array in arrays.items():
    if array.shape != mask_T.shape:
      raise ValueError(f'{name}{array.shape} and mask_T{mask_T.shape} must have the same shape.')
    wrong = np.flatnonzero(mask_T & ~np.isfinite(array))
    if wrong.size:
      raise ValueError(f'{name}[{wrong[0]}] is {array[wrong[0]]}, and the policy sampled that token; it must be finite.')
