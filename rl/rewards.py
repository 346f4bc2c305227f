"""What the samples of a batch earn: the verifier's score, parts of the work, the length limit, and other sources such as a reward model.

A sample that earns nothing that can be known (it has no valid outcome, or a source says NaN) is left out and counted by its cause; it is
never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from envs.core import Outcome
from rl import advantages
from rl.rl_config import RLConfig
from rl.types import Group, Trajectory

# Trajectories to float32 scores [N]; NaN where it cannot tell.
Source: TypeAlias = Callable[[Sequence[Trajectory]], np.ndarray]


@dataclass(frozen=True)
class Rewards:
  """What `pay` returns: arrays of [problems, samples], 0 at places that are not used.

  Attributes:
    paid_QU: what a sample earns, before any KL term and without what its turns earn.
    gold_QU: the verifier's score.
    source_QU: the mean score of the other sources, None without any.
    is_used_QU: whether a sample is trained on.
    dropped: cause -> valid samples that are not used.
  """
  paid_QU: np.ndarray
  gold_QU: np.ndarray
  source_QU: np.ndarray | None
  is_used_QU: np.ndarray
  dropped: Counter = field(default_factory=Counter)


def pay(config: RLConfig, groups: Sequence[Group], sources: Sequence[Source] = ()) -> Rewards:
  """Return what the samples of the groups earn.

  Raises:
    ValueError: a source that does not give one number for each trajectory, or parts of the work outside 0 to 1 where they are paid.
  """
  places = [(row, column, trajectory) for row, group in enumerate(groups) for column, trajectory in enumerate(group.trajectories)
            if trajectory.is_valid]
  shape = (len(groups), config.group_size)
  paid_QU, gold_QU, source_QU, is_used_QU = np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape, np.bool_)
  scores = _mean_of(sources, [trajectory for *_, trajectory in places])
  dropped: Counter = Counter()
  for (row, column, trajectory), score in zip(places, scores, strict=True):
    if trajectory.outcome == Outcome.LENGTH and config.overlong == 'mask':
      dropped['overlong'] += 1
    elif not np.isfinite(score):
      dropped['nan_reward'] += 1
    else:
      verified = config.reward.verifier_weight * _of_verifier(config, trajectory)
      paid_QU[row, column] = verified + config.reward.source_weight * score + _overlong_penalty(config, trajectory)
      gold_QU[row, column], source_QU[row, column], is_used_QU[row, column] = trajectory.reward, score, True
  return Rewards(paid_QU, gold_QU, source_QU if sources else None, is_used_QU, dropped)


def pay_turns(config: RLConfig, trajectory: Trajectory) -> np.ndarray:
  """Return what each of the policy's messages earns for the parts of the work it added, in all what `advantages.pay_process` allows."""
  total = sum(trajectory.turn_scores)
  if total <= 0:
    return np.zeros(len(trajectory.turn_scores))
  outcome_share = (1 - config.process.weight) * trajectory.reward
  process = _with_parts(config, trajectory) - outcome_share
  return config.reward.verifier_weight * process * np.array(trajectory.turn_scores) / total


def is_paid_by_turns(config: RLConfig) -> bool:
  """Whether turns earn something of their own."""
  return config.process.weight > 0 and config.process.credit == 'turn'


def _of_verifier(config: RLConfig, trajectory: Trajectory) -> float:
  if trajectory.outcome == Outcome.LENGTH and config.overlong == 'bootstrap':
    return 0.0  # What the critic expects of the rest takes its place.
  if not is_paid_by_turns(config):
    return _with_parts(config, trajectory) if config.process.weight else trajectory.reward
  if config.advantage.estimator == 'group' or not trajectory.parts:
    return trajectory.reward
  return (1 - config.process.weight) * trajectory.reward


def _with_parts(config: RLConfig, trajectory: Trajectory) -> float:
  return advantages.pay_process(trajectory.reward, trajectory.parts, weight=config.process.weight, cap=config.process.cap)


def _mean_of(sources: Sequence[Source], trajectories: Sequence[Trajectory]) -> np.ndarray:
  total = np.zeros(len(trajectories))
  for source in sources if trajectories else ():
    scores = np.asarray(source(trajectories))
    if scores.shape != total.shape:
      raise ValueError(f'The reward source {source!r} gave an array {scores.shape} for {len(trajectories)} trajectories; it must give one '
                       'number for each.')
    total += scores / len(sources)
  return total


def _overlong_penalty(config: RLConfig, trajectory: Trajectory) -> float:
  if config.overlong != 'penalty':
    return 0.0
  return advantages.soft_overlong_penalty(_reply_length(trajectory), config.rollout.max_new_tokens, config.overlong_buffer)


def _reply_length(trajectory: Trajectory) -> int:
  """Return the tokens of the policy's last reply."""
  ends = np.flatnonzero(trajectory.loss_mask_T)
  starts = np.flatnonzero(~trajectory.loss_mask_T[:ends[-1]]) if ends.size else ends
  return int(ends[-1] - starts[-1]) if ends.size and starts.size else int(ends.size)
