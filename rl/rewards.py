"""What the samples of a batch earn: the verifier's score, parts of the work, the length limit, and what reward models say.

A sample that earns nothing that can be known (it has no valid outcome, or a reward model that pays says NaN) is left out and counted by its
cause; it is never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from envs.core import Outcome
from rl import advantages
from rl.proxy_reward import Judged, ProxyReward
from rl.rl_config import RLConfig
from rl.types import Group, Trajectory


@dataclass(frozen=True)
class Rewards:
  """What `pay` returns: arrays of [problems, samples], 0 at places that are not used.

  Attributes:
    paid_QU: what a sample earns, before any KL term and without what its turns earn.
    gold_QU: the verifier's score.
    source_QU: what the reward models say, NaN where they cannot tell; None without any.
    is_used_QU: whether a sample is trained on.
    dropped: cause -> valid samples that are not used.
    metrics: of the reward models, over all valid samples.
  """
  paid_QU: np.ndarray
  gold_QU: np.ndarray
  source_QU: np.ndarray | None
  is_used_QU: np.ndarray
  dropped: Counter = field(default_factory=Counter)
  metrics: Mapping[str, float] = field(default_factory=dict)


def pay(config: RLConfig, groups: Sequence[Group], proxy: ProxyReward | None = None) -> Rewards:
  """Return what the samples of the groups earn.

  Raises:
    ValueError: what `proxy.judge` refuses, or parts of the work outside 0 to 1 where they are paid.
  """
  places = [(row, column, trajectory) for row, group in enumerate(groups) for column, trajectory in enumerate(group.trajectories)
            if trajectory.is_valid]
  shape = (len(groups), config.group_size)
  paid_QU, gold_QU, source_QU, is_used_QU = np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape, np.bool_)
  judged = proxy.judge([trajectory for *_, trajectory in places]) if proxy and places else Judged(np.zeros(len(places), np.float32), {})
  source_weight = config.reward.source_weight
  dropped: Counter = Counter()
  for (row, column, trajectory), score in zip(places, judged.rewards_N, strict=True):
    if trajectory.outcome == Outcome.LENGTH and config.overlong == 'mask':
      dropped['overlong'] += 1
    elif source_weight and not np.isfinite(score):
      dropped['nan_reward'] += 1
    else:
      verified = config.reward.verifier_weight * _of_verifier(config, trajectory)
      sourced = source_weight * score if source_weight else 0.0  # A model that is only watched may be unable to tell.
      paid_QU[row, column] = verified + sourced + _overlong_penalty(config, trajectory)
      gold_QU[row, column], source_QU[row, column], is_used_QU[row, column] = trajectory.reward, score, True
  return Rewards(paid_QU, gold_QU, source_QU if proxy else None, is_used_QU, dropped, judged.metrics)


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


def _overlong_penalty(config: RLConfig, trajectory: Trajectory) -> float:
  if config.overlong != 'penalty':
    return 0.0
  return advantages.soft_overlong_penalty(_reply_length(trajectory), config.rollout.max_new_tokens, config.overlong_buffer)


def _reply_length(trajectory: Trajectory) -> int:
  """Return the tokens of the policy's last reply."""
  ends = np.flatnonzero(trajectory.loss_mask_T)
  starts = np.flatnonzero(~trajectory.loss_mask_T[:ends[-1]]) if ends.size else ends
  return int(ends[-1] - starts[-1]) if ends.size and starts.size else int(ends.size)
