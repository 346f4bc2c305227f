"""Rewards into advantages: how much better a sample, a turn or a token did than was to be expected. Numpy, on the host.

Of groups, rows are problems (Q), columns their samples (U). A sample that is invalid, because the infrastructure failed and not the policy,
has no reward: it gets advantage 0 and moves neither the mean nor the standard deviation of the others. Where there is nothing to compare,
the advantage is exactly 0 and not a rounding error divided by one.

Of one trajectory, advantages differ from token to token: `gae` with a critic, `returns_to_go` without, `turn_advantages` by turns. What tools
and templates put between the policy's tokens is never read.

Deliberately absent: the choice between them, which is the loop's, and baselines that are learned over the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

Center = Literal['mean', 'leave_one_out', 'length_weighted', 'none']
Scale = Literal['std', 'batch_std', 'mean', 'none']


def group_relative(rewards_QU: np.ndarray, valid_QU: np.ndarray, *, center: Center, scale: Scale, epsilon: float,
                   lengths_QU: np.ndarray | None = None) -> np.ndarray:
  """Return advantages_QU, float32, 0 at invalid places: (reward - baseline) / scale.

  `center`: the baseline is the group's 'mean' (GRPO, arXiv:2402.03300 sec. 4.1.2), the mean of the sample's siblings ('leave_one_out':
  RLOO, arXiv:2402.14740), the mean with samples weighted by their sampled tokens ('length_weighted': OPO, arXiv:2505.23585), or 'none'.
  `scale`: divide by 'std', the group's standard deviation + epsilon (GRPO), by 'batch_std', that of all rewards of the batch + epsilon
  (arXiv:2508.08221), by 'mean', the group's mean reward + epsilon (MaxRL, arXiv:2602.02710), or by 'none' (Dr. GRPO, arXiv:2503.20783).
  Standard deviations have the divisor n - 1.

  A group with a baseline that has fewer than two valid samples, or only equal rewards, has advantages 0; so has everything whose standard
  deviation or mean is 0.

  Args:
    lengths_QU: tokens that the policy sampled; read by 'length_weighted' alone.

  Raises:
    ValueError: shapes that differ, a valid reward that is not finite, or below 0 where the mean divides; 'length_weighted' without lengths;
      an unknown center or scale, epsilon negative.
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
    baseline_Q1 = _length_weighted_mean(rewards_QU, valid_QU, lengths_QU) if center == 'length_weighted' else mean_Q1
    # reward - mean of the siblings = n / (n - 1) (reward - mean of all).
    factor_Q1 = count_Q1 / np.maximum(count_Q1 - 1, 1) if center == 'leave_one_out' else 1.0
    advantages_QU = np.where(signal_Q1, factor_Q1 * (rewards_QU - baseline_Q1), 0)
  if scale == 'std':
    squares_Q1 = np.where(valid_QU, (rewards_QU - mean_Q1)**2, 0).sum(1, keepdims=True)
    std_Q1 = np.sqrt(squares_Q1 / np.maximum(count_Q1 - 1, 1))
    advantages_QU = np.where(signal_Q1, advantages_QU / np.where(signal_Q1, std_Q1 + epsilon, 1), 0)
  elif scale == 'mean':
    if rewards_QU.min(initial=0) < 0:
      raise ValueError(f"scale='mean' divides by the mean reward of a group, and there is a reward of {rewards_QU.min()}; rewards must be at "
                       "least 0, or use scale='std'.")
    advantages_QU = np.where(mean_Q1 > 0, advantages_QU / np.where(mean_Q1 > 0, mean_Q1 + epsilon, 1), 0)
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


def _length_weighted_mean(rewards_QU: np.ndarray, valid_QU: np.ndarray, lengths_QU: np.ndarray | None) -> np.ndarray:
  if lengths_QU is None or lengths_QU.shape != rewards_QU.shape:
    raise ValueError(f"center='length_weighted' needs lengths_QU{rewards_QU.shape}, the tokens sampled for each reward, and got "
                     f'{None if lengths_QU is None else lengths_QU.shape}.')
  lengths_QU = np.where(valid_QU, lengths_QU, 0)
  return (rewards_QU * lengths_QU).sum(1, keepdims=True) / np.maximum(lengths_QU.sum(1, keepdims=True), 1)


def pay_process(outcome: float, parts: Mapping[str, float], *, weight: float, cap: float = 0.1) -> float:
  """Return the reward of an episode: (1 - weight) outcome + weight mean(parts), where parts of a failed one earn at most `cap` in total.

  Parts of the work are paid in full only to who reaches the goal, so that no policy lives on partial credit; what little the others earn
  tells failures apart. Without parts the outcome alone counts.

  Raises:
    ValueError: an outcome or a part outside 0 to 1, or a weight or a cap that would pay a failure as much as a success.
  """
  for name, value in (('outcome', outcome), *((f'parts[{name!r}]', value) for name, value in parts.items())):
    if not 0 <= value <= 1:
      raise ValueError(f'{name}={value} must be a number from 0 to 1.')
  if not (cap >= 0 and 0 <= weight < 1 - cap):
    raise ValueError(f'weight={weight} must be from 0 to below 1 - cap, cap={cap} at least 0; a success without parts earns 1 - weight.')
  if not parts:
    return float(outcome)
  process = weight * float(np.mean(list(parts.values())))
  return (1 - weight) * outcome + (process if outcome > 0 else min(process, cap))


def kl_in_reward(reward: float, difference_T: np.ndarray, mask_T: np.ndarray, coef: float) -> np.ndarray:
  """Return rewards_T, float32: what each sampled token earned, -coef k1, and at the last one the reward of the episode too.

  k1 is log policy - log reference of what was sampled. In a reward it is unbiased for KL(policy | reference), value and gradient (Ziegler
  et al., arXiv:1909.08593 eq. 2). Summed over the tokens it is the reward less the penalty of the whole reply, as RLOO has it.

  Args:
    difference_T: log policy - log reference, nats.
    mask_T: bool, true where the policy sampled the token.

  Raises:
    ValueError: shapes that differ, a sampled token's difference or a reward that is not finite, a negative coef.
  """
  _check_trajectory(mask_T, difference_T=difference_T)
  if not (np.isfinite(reward) and coef >= 0):
    raise ValueError(f'reward={reward} must be finite, coef={coef} at least 0.')
  rewards_T = np.where(mask_T, -coef * np.where(mask_T, difference_T, 0), 0).astype(np.float32)
  if mask_T.any():
    rewards_T[np.flatnonzero(mask_T)[-1]] += reward
  return rewards_T


def returns_to_go(rewards_T: np.ndarray, mask_T: np.ndarray) -> np.ndarray:
  """Return returns_T, float32: what a sampled token and those after it earned, 0 elsewhere; REINFORCE++ before whitening.

  A_t = sum of the rewards from t on (arXiv:2501.03262), which is `gae` without a critic and without discount. Raises as `gae`.
  """
  return gae(rewards_T, np.zeros(mask_T.shape), mask_T, discount=1, trace=1)[0]


def whiten(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray], *, epsilon: float = 1e-8) -> list[np.ndarray]:
  """Return advantages_T of each trajectory, float32, as (advantage - mean) / (std + epsilon) over all sampled tokens of the batch.

  They are 0 elsewhere, and everywhere if the sampled tokens do not differ. The last step of REINFORCE++ (arXiv:2501.03262), over the global
  batch and never over a part of it; the standard deviation has the divisor n - 1.

  Raises:
    ValueError: an advantage of a sampled token that is not finite, or shapes that differ.
  """
  for advantages_T, mask_T in zip(advantages, masks, strict=True):
    _check_trajectory(mask_T, advantages_T=advantages_T)
  sampled = [advantages_T[mask_T].astype(np.float64) for advantages_T, mask_T in zip(advantages, masks)]
  values = np.concatenate([*sampled, np.zeros(0)])
  differs = values.size > 1 and values.min() < values.max()
  mean, std = (values.mean(), values.std(ddof=1) + epsilon) if differs else (0.0, 1.0)
  made = [np.zeros(mask_T.shape, np.float32) for mask_T in masks]
  for white_T, values, mask_T in zip(made, sampled, masks):
    white_T[mask_T] = (values - mean) / std if differs else 0
  return made


def turn_numbers(mask_T: np.ndarray) -> np.ndarray:
  """Return turns_T, int32: the number of each sampled token's turn, from 0, and -1 elsewhere. A turn is a run of sampled tokens."""
  starts_T = mask_T & ~np.append(False, mask_T[:-1])
  return np.where(mask_T, np.cumsum(starts_T) - 1, -1).astype(np.int32)


def turn_advantages(outcomes_U: np.ndarray, scores: Sequence[Sequence[float]], masks: Sequence[np.ndarray], *, weight: float, center: Center,
                    scale: Scale, epsilon: float, discount: float = 0.0) -> list[np.ndarray]:
  """Return advantages_T, float32, of each sample of one group: that of its outcome, and at a turn's own tokens weight x that of the turn.

  A turn is compared with the turns of the same number in the group's other samples, by `group_relative` (MT-GRPO, arXiv:2505.11821);
  so a good step of a failed trajectory is encouraged and a bad one of a good trajectory is not. With discount d a turn is worth its own
  score and d times what comes after it; d=1 are the returns of GRPO with process supervision (arXiv:2402.03300 sec. 4.1.3). A turn that only
  one sample reached has nothing to be compared with: 0.

  Args:
    outcomes_U: the advantage of each sample as a whole.
    scores: of each sample's turns, in order; () for a sample that is not compared (invalid, or without scores of its turns).
    masks: of each sample, bool, true where the policy sampled the token; their runs are the turns.

  Raises:
    ValueError: another number of samples or of turns, a score or an outcome that is not finite, a weight or discount out of range.
  """
  if not (len(outcomes_U) == len(scores) == len(masks)):
    raise ValueError(f'outcomes_U, scores and masks are of {len(outcomes_U)}, {len(scores)} and {len(masks)} samples; they must be the same.')
  if not (np.isfinite(outcomes_U).all() and weight >= 0 and 0 <= discount <= 1):
    raise ValueError(f'outcomes_U={outcomes_U} must be finite, weight={weight} at least 0, discount={discount} between 0 and 1.')
  turns = [turn_numbers(mask_T) for mask_T in masks]
  for sample, (scores_S, turns_T) in enumerate(zip(scores, turns)):
    if len(scores_S) not in (0, turns_T.max(initial=-1) + 1):
      raise ValueError(f'Sample {sample} has {len(scores_S)} scores for {turns_T.max(initial=-1) + 1} turns; give one for each, or none.')
  # Rows are the numbers of turns here; what a sample did not reach is invalid there.
  num_turns = max((len(scores_S) for scores_S in scores), default=0)
  returns_SU, is_reached_SU = np.zeros((num_turns, len(scores))), np.zeros((num_turns, len(scores)), np.bool_)
  for sample, scores_S in enumerate(scores):
    worth = 0.0
    for turn in reversed(range(len(scores_S))):
      worth = scores_S[turn] + discount * worth
      returns_SU[turn, sample], is_reached_SU[turn, sample] = worth, True
  of_turns_SU = weight * group_relative(returns_SU, is_reached_SU, center=center, scale=scale, epsilon=epsilon)
  made = []
  for sample, turns_T in enumerate(turns):
    credit_T = of_turns_SU[turns_T, sample] if len(scores[sample]) else 0.0
    made.append(np.where(turns_T >= 0, outcomes_U[sample] + credit_T, 0).astype(np.float32))
  return made


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
