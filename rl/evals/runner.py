"""Evaluate a policy on problems of environments: the same worker, engine, prompts and verifiers as training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from envs.core import Problem
from models.sampling import Sampling
from rl.evals import stats
from rl.rollout.worker import Assignment, Worker
from rl.types import Group, Trajectory


@dataclass(frozen=True)
class Result:
  """One sample of each problem.

  Attributes:
    trajectories: in the order of the problems, those that could not be graded included.
  """
  trajectories: tuple[Trajectory, ...]

  @classmethod
  def of(cls, groups: Iterable[Group]) -> Result:
    """Return the result of groups of one sample, in any order."""
    return cls(tuple(sorted((trajectory for group in groups for trajectory in group.trajectories), key=lambda one: one.group)))

  @property
  def num_graded(self) -> int:
    """Return how many problems were graded; the others failed for no fault of the policy."""
    return sum(trajectory.is_valid for trajectory in self.trajectories)

  @property
  def num_passed(self) -> int:
    """Return how many problems were solved in full."""
    return sum(trajectory.reward == 1 for trajectory in self.trajectories)

  @property
  def pass_rate(self) -> stats.Estimate:
    """Return pass@1 with its 95 % interval.

    Raises:
      RuntimeError: nothing was graded.
    """
    if not self.num_graded:
      raise RuntimeError(f'None of {len(self.trajectories)} problems could be graded: {self.trajectories[0].reason}')
    return stats.proportion(self.num_passed, self.num_graded)

  def metrics(self) -> dict[str, float]:
    """Return pass@1, over all and by domain and level, with the number of problems."""
    values = {'heldout/pass@1': self.pass_rate.value, 'heldout/pass@1_low': self.pass_rate.low, 'heldout/pass@1_high': self.pass_rate.high,
              'heldout/graded': self.num_graded, 'heldout/not_graded': len(self.trajectories) - self.num_graded}
    places: dict[str, list[bool]] = {}
    for trajectory in self.trajectories:
      if trajectory.is_valid:
        for place in (trajectory.domain, f'{trajectory.domain}/{trajectory.level}'):
          places.setdefault(place, []).append(trajectory.reward == 1)
    return values | {f'heldout/pass@1/{place}': sum(passed) / len(passed) for place, passed in places.items()}


def evaluate(worker: Worker, problems: Sequence[Problem], sampling: Sampling) -> Result:
  """Let the policy try each problem once; raises as `Worker.collect`."""
  return Result.of(worker.collect([Assignment(number, problem) for number, problem in enumerate(problems)], 1, sampling))
