"""The samples of one step: collected until there are enough of use, and summed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.core import Outcome
from models.sampling import Sampling
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
      elif config.max_rounds > 1 and not _differ(config, valid):
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


def _differ(config: RLConfig, valid: Sequence[Trajectory]) -> bool:
  """Return whether samples differ in what the verifier scores and, where that is paid, in what they added on the way."""
  told = {(one.reward, tuple(one.parts.values()), one.turn_scores) if config.process.weight else one.reward for one in valid}
  return len(told) > 1


def summarize(collected: Collected, version: int) -> dict[str, float]:
  """Return what is to be known of a step's samples, those of dropped groups too; `version` is of the weights that are trained now."""
  groups = [*collected.groups, *(group for group, _ in collected.dropped)]
  all_samples = [trajectory for group in groups for trajectory in group.trajectories]
  valid = [trajectory for trajectory in all_samples if trajectory.is_valid]
  values: dict[str, float] = {}
  values |= spread('critic/score', [trajectory.reward for trajectory in valid])
  values |= spread('response_length', [int(trajectory.loss_mask_T.sum()) for trajectory in valid])
  values |= spread('prompt_length', [int(np.argmax(trajectory.loss_mask_T)) for trajectory in valid])
  values |= spread('num_turns', [trajectory.num_turns for trajectory in valid])
  values |= spread('tool_call_counts', [trajectory.num_tool_calls for trajectory in valid])
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
  values['groups_of_one'] = sum(len(rewards) == 1 for rewards in of_groups)
  for name in {name: None for trajectory in valid for name in trajectory.parts}:
    values |= spread(f'reward/parts/{name}', [trajectory.parts[name] for trajectory in valid if name in trajectory.parts])
  ages = [version - trajectory.versions_T[trajectory.loss_mask_T] for group in collected.groups for trajectory in group.trajectories
          if trajectory.is_valid]
  ages = np.concatenate([*ages, np.zeros(0, np.int32)])
  if ages.size:
    values |= {'off_policy/mean': float(ages.mean()), 'off_policy/max': float(ages.max())}
  outcomes = Counter(trajectory.outcome for trajectory in all_samples)
  values |= {f'env/outcome/{outcome}': outcomes[outcome] / len(all_samples) for outcome in Outcome}
  values['response_length/clip_ratio'] = outcomes[Outcome.LENGTH] / len(all_samples)
  for name in {trajectory.domain: None for trajectory in valid}:
    values[f'critic/score/{name}'] = float(np.mean([trajectory.reward for trajectory in valid if trajectory.domain == name]))
  return values


def spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
  """Return mean, least and largest of some numbers as metrics; {} of none."""
  if not len(numbers):
    return {}
  return {f'{name}/mean': float(np.mean(numbers)), f'{name}/min': float(np.min(numbers)), f'{name}/max': float(np.max(numbers))}
