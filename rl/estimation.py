"""From what samples earn to what their tokens are trained on: advantages and, with a critic, returns. Numpy, on the host.

`estimate` chooses among the functions of `advantages` by the run's settings. It never reads what tools and templates put between the
policy's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from envs.core import Outcome
from rl import advantages
from rl import rewards as rewards_lib
from rl.critic import Expectation
from rl.rewards import Rewards
from rl.rl_config import RewardKLConfig, RLConfig
from rl.rollout import collection
from rl.types import Group, Trajectory

_MAX_ERROR = 0.2  # Of the KL controller, relative to the target.


class Estimate(NamedTuple):
  """Of one sample: advantages_T, float32, and with a critic what it expected and should have expected; 0 where nothing was sampled."""
  advantages_T: np.ndarray
  values_T: np.ndarray | None = None
  returns_T: np.ndarray | None = None

  @property
  def others(self) -> Mapping[str, np.ndarray]:
    """Return what a document says of its tokens beside the advantages."""
    return {} if self.values_T is None else {'values': self.values_T, 'returns': self.returns_T}


def used(groups: Sequence[Group], rewards: Rewards) -> list[Trajectory]:
  """Return the samples that are trained on, in the order of everything that `estimate` takes and gives."""
  return [groups[row].trajectories[column] for row, column in np.argwhere(rewards.is_used_QU)]


def estimate(config: RLConfig, groups: Sequence[Group], rewards: Rewards, *, kl_coef: float = 0.0,
             differences: Sequence[np.ndarray] | None = None, expectations: Sequence[Expectation] | None = None) -> list[Estimate]:
  """Return an estimate of each used sample.

  Args:
    kl_coef: of the KL term in the reward.
    differences: of each used sample, difference_T = log policy - log reference in nats; None without a KL term.
    expectations: of each used sample, the critic's; read by estimator='gae' alone.

  Raises:
    ValueError: a reward, a difference or a value of a sampled token that is not finite, and what `advantages` refuses.
  """
  trajectories = used(groups, rewards)
  if differences is None:
    differences, kl_coef = [np.zeros(trajectory.tokens_T.shape, np.float32) for trajectory in trajectories], 0.0
  if config.advantage.estimator == 'group':
    found = _of_groups(config, groups, rewards, trajectories, kl_coef, differences)
  else:
    outcomes = _relative(config, rewards.paid_QU, rewards.is_used_QU, groups)[rewards.is_used_QU]
    earned = [_token_rewards(config, trajectory, float(outcome), difference_T, kl_coef)
              for trajectory, outcome, difference_T in zip(trajectories, outcomes, differences, strict=True)]
    if config.advantage.estimator == 'gae':
      found = [_with_critic(config, *one) for one in zip(trajectories, earned, expectations, strict=True)]
    else:
      found = [Estimate(advantages.returns_to_go(rewards_T, trajectory.loss_mask_T))
               for trajectory, rewards_T in zip(trajectories, earned, strict=True)]
  if not config.advantage.whiten:
    return found
  white = advantages.whiten([one.advantages_T for one in found], [trajectory.loss_mask_T for trajectory in trajectories],
                            epsilon=config.advantage.epsilon)
  return [one._replace(advantages_T=advantages_T) for one, advantages_T in zip(found, white, strict=True)]


def next_coef(config: RewardKLConfig, coef: float, kl_nats: float) -> float:
  """Return the coefficient of the next batch, after one whose samples were on average `kl_nats` from the reference.

  The proportional controller of arXiv:1909.08593 sec. 2.2; without a target the coefficient stays.
  """
  if config.target is None:
    return coef
  return coef * (1 + config.gain * float(np.clip(kl_nats / config.target - 1, -_MAX_ERROR, _MAX_ERROR)))


def differences(trajectories: Sequence[Trajectory], reference_logprobs: Sequence[np.ndarray]) -> list[np.ndarray]:
  """Return difference_T of each sample, log policy - log reference in nats, 0 where nothing was sampled; the policy is the one that sampled.

  `reference_logprobs` stand at the places that predict, as `batching.at_places` gives them.
  """
  found = []
  for trajectory, at_place_T in zip(trajectories, reference_logprobs, strict=True):
    is_predicted_T = trajectory.loss_mask_T & (np.arange(len(at_place_T)) > 0)
    found.append(np.where(is_predicted_T, trajectory.behavior_logprobs_T - np.roll(at_place_T, 1), np.float32(0)))
  return found


def sample_kl(trajectories: Sequence[Trajectory], differences: Sequence[np.ndarray]) -> np.ndarray:
  """Return for each sample the sum of its tokens' k1 in nats, float64."""
  return np.array([difference_T[trajectory.loss_mask_T].sum(dtype=np.float64)
                   for trajectory, difference_T in zip(trajectories, differences, strict=True)])


def summarize(trajectories: Sequence[Trajectory], estimates: Sequence[Estimate]) -> dict[str, float]:
  """Return mean, least and largest of the advantages, values and returns over all sampled tokens, and the explained variance."""
  values, joined = {}, {}
  for name in ('advantages', 'values', 'returns'):
    parts = [getattr(one, f'{name}_T') for one in estimates]
    if not parts or parts[0] is None:
      continue
    joined[name] = np.concatenate([part[trajectory.loss_mask_T] for part, trajectory in zip(parts, trajectories, strict=True)])
    values |= collection.spread(f'critic/{name}', joined[name].astype(np.float64))
  if 'values' in joined:
    explained = advantages.explained_variance(joined['values'], joined['returns'], np.ones(joined['values'].shape, np.bool_))
    values |= {} if explained is None else {'critic/vf_explained_var': explained}
  return values


def _relative(config: RLConfig, paid_QU: np.ndarray, is_used_QU: np.ndarray, groups: Sequence[Group]) -> np.ndarray:
  lengths_QU = np.zeros(paid_QU.shape)
  for row, column in np.argwhere(is_used_QU):
    lengths_QU[row, column] = groups[row].trajectories[column].loss_mask_T.sum()
  settings = config.advantage
  return advantages.group_relative(paid_QU, is_used_QU, center=settings.center, scale=settings.scale, epsilon=settings.epsilon,
                                   lengths_QU=lengths_QU)


def _of_groups(config: RLConfig, groups, rewards: Rewards, trajectories, kl_coef: float, differences) -> list[Estimate]:
  paid_QU = rewards.paid_QU.copy()
  paid_QU[rewards.is_used_QU] -= kl_coef * sample_kl(trajectories, differences)
  advantages_QU = _relative(config, paid_QU, rewards.is_used_QU, groups)
  if not rewards_lib.is_paid_by_turns(config):
    return [Estimate(np.where(trajectory.loss_mask_T, advantage, np.float32(0)))
            for trajectory, advantage in zip(trajectories, advantages_QU[rewards.is_used_QU], strict=True)]
  found = []
  for group, advantages_U, is_used_U in zip(groups, advantages_QU, rewards.is_used_QU, strict=True):
    members = [trajectory for trajectory, is_used in zip(group.trajectories, is_used_U) if is_used]
    found += advantages.turn_advantages(
        advantages_U[is_used_U], [trajectory.turn_scores for trajectory in members], [trajectory.loss_mask_T for trajectory in members],
        weight=config.process.weight, center=config.advantage.center, scale=config.advantage.scale, epsilon=config.advantage.epsilon)
  return [Estimate(advantages_T) for advantages_T in found]


def _token_rewards(config: RLConfig, trajectory: Trajectory, outcome: float, difference_T: np.ndarray, kl_coef: float) -> np.ndarray:
  """Return rewards_T: the KL term everywhere, what a turn earns at its own last token, the outcome at the last token of all."""
  mask_T = trajectory.loss_mask_T
  rewards_T = advantages.kl_in_reward(outcome, difference_T, mask_T, kl_coef)
  if rewards_lib.is_paid_by_turns(config) and trajectory.turn_scores:
    ends = np.flatnonzero(mask_T & ~np.append(mask_T[1:], False))
    rewards_T[ends] += rewards_lib.pay_turns(config, trajectory).astype(np.float32)
  return rewards_T


def _with_critic(config: RLConfig, trajectory: Trajectory, rewards_T: np.ndarray, expectation: Expectation) -> Estimate:
  mask_T = trajectory.loss_mask_T
  is_cut = trajectory.outcome == Outcome.LENGTH and config.overlong == 'bootstrap'
  values_T = np.where(mask_T, expectation.values_T, 0).astype(np.float32)

  def gae(trace):
    return advantages.gae(rewards_T, values_T, mask_T, discount=config.advantage.discount, trace=trace,
                          bootstrap_value=expectation.after if is_cut else 0.0)

  advantages_T, returns_T = gae(config.advantage.trace)
  if config.critic.trace is not None:
    _, returns_T = gae(config.critic.trace)
  return Estimate(advantages_T, values_T, returns_T)
