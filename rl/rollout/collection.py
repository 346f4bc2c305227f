"""The samples of one step: collected until there are enough of use, rewarded, and summed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.core import Outcome
from models.sampling import Sampling
from rl import advantages
from rl.curriculum import Curriculum
from rl.rl_config import RLConfig
from rl.rollout.ledger import Ledger
from rl.rollout.worker import Assignment, Worker
from rl.types import Group, Trajectory


@dataclass(frozen=True)
class Collected:
  """What one step collected.

  Attributes:
    groups: those to train on, in the order of their ordinals.
    dropped: groups that are not, with the cause.
  """
  groups: tuple[Group, ...]
  dropped: tuple[tuple[Group, str], ...]

  @property
  def num_queued(self) -> int:
    """Return how many valid samples wait to be trained on."""
    return sum(trajectory.is_valid for group in self.groups for trajectory in group.trajectories)


def collect(config: RLConfig, curriculum: Curriculum, worker: Worker, ledger: Ledger) -> Collected:
  """Sample groups for one step, in rounds until there are `config.groups` of use.

  Raises:
    RuntimeError: no group came through, because of failures that are not the policy's.
  """
  good: list[tuple[int, Group]] = []
  dropped: list[tuple[Group, str]] = []
  for _ in range(config.max_rounds):
    assignments = [Assignment(*curriculum.draw()) for _ in range(config.groups - len(good))]
    if not assignments:
      break
    for group in worker.collect(assignments, config.group_size, Sampling()):
      valid = [trajectory for trajectory in group.trajectories if trajectory.is_valid]
      if len(valid) < config.rollout.min_group_size:
        dropped.append((group, 'group_too_small'))
      elif config.max_rounds > 1 and len({trajectory.reward for trajectory in valid}) == 1:
        dropped.append((group, 'no_signal'))
      else:
        good.append((group.trajectories[0].group, group))
  for group, cause in dropped:
    ledger.dropped[cause] += sum(trajectory.is_valid for trajectory in group.trajectories)
  if not good and all(cause == 'group_too_small' for _, cause in dropped):
    reasons = Counter(trajectory.reason for group, _ in dropped for trajectory in group.trajectories if not trajectory.is_valid)
    shown = '; '.join(f'{count}x {reason}' for reason, count in reasons.most_common(3))
    raise RuntimeError(f'None of {len(dropped)} groups came through, because the environments fail and not the policy: {shown}.')
  return Collected(tuple(group for _, group in sorted(good, key=lambda pair: pair[0])), tuple(dropped))


def rewards_of(config: RLConfig, groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
  """Return (rewards_QU, is_used_QU) after the treatment of overlong samples; unused places hold 0."""
  rewards_QU, is_used_QU = np.zeros((len(groups), config.group_size)), np.zeros((len(groups), config.group_size), np.bool_)
  for row, group in enumerate(groups):
    for column, trajectory in enumerate(group.trajectories):
      is_cut = trajectory.outcome == Outcome.LENGTH
      if not trajectory.is_valid or (is_cut and config.overlong == 'mask'):
        continue
      penalty = 0.0
      if config.overlong == 'penalty':
        penalty = advantages.soft_overlong_penalty(_reply_length(trajectory), config.rollout.max_new_tokens, config.overlong_buffer)
      rewards_QU[row, column], is_used_QU[row, column] = trajectory.reward + penalty, True
  return rewards_QU, is_used_QU


def _reply_length(trajectory: Trajectory) -> int:
  """Return the tokens of the policy's last reply."""
  ends = np.flatnonzero(trajectory.loss_mask_T)
  starts = np.flatnonzero(~trajectory.loss_mask_T[:ends[-1]]) if ends.size else ends
  return int(ends[-1] - starts[-1]) if ends.size and starts.size else int(ends.size)


def summarize(collected: Collected, rewards_QU: np.ndarray, is_used_QU: np.ndarray,
                    advantages_QU: np.ndarray) -> dict[str, float]:
  """Return what is to be known of a step's samples; 'all' are the valid ones, those of dropped groups too."""
  groups = [*collected.groups, *(group for group, _ in collected.dropped)]
  all_samples = [trajectory for group in groups for trajectory in group.trajectories]
  valid = [trajectory for trajectory in all_samples if trajectory.is_valid]
  values: dict[str, float] = {}

  def spread(name: str, numbers: Sequence[float]) -> None:
    if len(numbers):
      values.update({f'{name}/mean': float(np.mean(numbers)), f'{name}/min': float(np.min(numbers)), f'{name}/max': float(np.max(numbers))})

  spread('critic/score', [trajectory.reward for trajectory in valid])
  spread('critic/rewards', rewards_QU[is_used_QU])
  spread('critic/advantages', advantages_QU[is_used_QU])
  spread('response_length', [int(trajectory.loss_mask_T.sum()) for trajectory in valid])
  spread('prompt_length', [int(np.argmax(trajectory.loss_mask_T)) for trajectory in valid])
  spread('num_turns', [trajectory.num_turns for trajectory in valid])
  spread('tool_call_counts', [trajectory.num_tool_calls for trajectory in valid])
  num_calls = sum(trajectory.num_tool_calls for trajectory in valid)
  if num_calls:
    values['tool_error_rate'] = sum(trajectory.num_tool_errors for trajectory in valid) / num_calls
  for name, passed in (('correct', True), ('incorrect', False)):
    lengths = [int(trajectory.loss_mask_T.sum()) for trajectory in valid if (trajectory.reward == 1) == passed]
    if lengths:
      values[f'{name}_seq_len/mean'] = float(np.mean(lengths))
  of_groups = [[trajectory.reward for trajectory in group.trajectories if trajectory.is_valid] for group in groups]
  of_groups = [rewards for rewards in of_groups if rewards]
  values['frac_reward_zero_std'] = float(np.mean([len(set(rewards)) == 1 for rewards in of_groups])) if of_groups else 1.0
  values['solve_none'] = float(np.mean([max(rewards) == 0 for rewards in of_groups])) if of_groups else 0.0
  values['solve_all'] = float(np.mean([min(rewards) == 1 for rewards in of_groups])) if of_groups else 0.0
  outcomes = Counter(trajectory.outcome for trajectory in all_samples)
  values |= {f'env/outcome/{outcome}': outcomes[outcome] / len(all_samples) for outcome in Outcome}
  values['response_length/clip_ratio'] = outcomes[Outcome.LENGTH] / len(all_samples)
  for name in {trajectory.domain: None for trajectory in valid}:
    values[f'critic/score/{name}'] = float(np.mean([trajectory.reward for trajectory in valid if trajectory.domain == name]))
  return values
