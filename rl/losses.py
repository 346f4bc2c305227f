"""Policy-gradient losses for each token, from logprobs: arrays in, arrays out, never a model.

One function covers the GRPO family: PPO's clip with a bound on each side, GSPO's ratio of whole sequences, CISPO, plain REINFORCE, the
truncated importance weight between sampler and trainer, a KL term and an entropy bonus are settings of it. How token losses become one
number is not decided here but in `Batch.loss_weight_BT`.

A token counts where its loss weight is not 0. Everything else is replaced before any arithmetic, so a masked place adds exactly nothing to
a loss, a gradient or a metric, whatever it holds. Everything is float32.

Deliberately absent: k1 as a loss (refused, with the reason), critics, and clamps on log-ratios that a paper does not have: a step that is not
finite is skipped and counted by the learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from rl.metrics import Max, Mean, Metric, Min, Sum
from rl.types import Batch

Kind = Literal['clip', 'cispo', 'reinforce']
Ratio = Literal['token', 'sequence']
KL_ESTIMATORS = ('k2', 'k3')


@dataclass(frozen=True)
class PolicyLossConfig:
  """Settings of `policy_loss_BT`.

  Attributes:
    kind: 'clip' is PPO's (arXiv:1707.06347 eq. 7), 'cispo' clips the weight of a token and keeps its gradient (arXiv:2506.13585 eq. 4),
      'reinforce' has no ratio.
    clip_low, clip_high: the ratio is bounded to [1 - clip_low, 1 + clip_high]; clip_low=1 is no lower bound.
    dual_clip: 'clip' only: where the advantage is negative, the ratio counts at most this much (arXiv:1912.09729 eq. 5); None is no bound.
    ratio: of each 'token', or of the 'sequence': the geometric mean over a document's sampled tokens (GSPO, arXiv:2507.18071 eq. 7).
    max_segments: 'sequence' only: most documents of a row, which the packer must be told; a token of a later one makes the loss NaN.
    importance_cap: a token's policy term is multiplied by min(old / behavior, this), without gradient (truncated importance sampling, which
      corrects what sampler and trainer compute differently); None does not correct.
    kl_coef: of the KL divergence from the reference policy, in nats per token.
    kl_estimator: with d = log policy - log reference, 'k2' is d^2 / 2, whose gradient is that of KL(policy | reference); 'k3', GRPO's,
      is exp(-d) - 1 + d, whose gradient is that of KL(reference | policy).
    entropy_coef: of the entropy bonus, in nats per token.
  """
  kind: Kind = 'clip'
  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float | None = None
  ratio: Ratio = 'token'
  max_segments: int = 32
  importance_cap: float | None = 2.0
  kl_coef: float = 0.0
  kl_estimator: str = 'k2'
  entropy_coef: float = 0.0

  def __post_init__(self):
    for name, value, allowed in (('kind', self.kind, get_args(Kind)), ('ratio', self.ratio, get_args(Ratio))):
      if value not in allowed:
        raise ValueError(f'{name}={value!r} is unknown; use one of {", ".join(allowed)}.')
    if self.kl_estimator == 'k1':
      raise ValueError("kl_estimator='k1' is no loss: its gradient is the score function, whose mean on the policy's own samples is 0, so it "
                       "pulls nowhere; use 'k2' ('k1' belongs into the reward).")
    if self.kl_estimator not in KL_ESTIMATORS:
      raise ValueError(f'kl_estimator={self.kl_estimator!r} is unknown; use one of {", ".join(KL_ESTIMATORS)}.')
    if not (0 < self.clip_low <= 1 and self.clip_high > 0):
      raise ValueError(f'clip_low={self.clip_low} must be above 0 and at most 1, clip_high={self.clip_high} above 0.')
    if self.dual_clip is not None and not (self.kind == 'clip' and self.dual_clip > 1 + self.clip_high):
      raise ValueError(f"dual_clip={self.dual_clip} with kind={self.kind!r}: it needs kind='clip' and must be above 1 + clip_high.")
    if self.ratio == 'sequence' and self.kind != 'clip':
      raise ValueError(f"ratio='sequence' with kind={self.kind!r} is not defined; use kind='clip' or ratio='token'.")
    if self.max_segments < 1:
      raise ValueError(f'max_segments={self.max_segments} must be at least 1.')
    if self.importance_cap is not None and not self.importance_cap > 0:
      raise ValueError(f'importance_cap={self.importance_cap} must be positive, or None for no correction.')
    if not (self.kl_coef >= 0 and self.entropy_coef >= 0):
      raise ValueError(f'kl_coef={self.kl_coef} and entropy_coef={self.entropy_coef} must not be negative.')


@struct.dataclass
class EffectiveShare(Mean):
  """The mean of weights, kept with their squares: the share of the samples that as many equal weights would need, (sum w)^2 / (n sum w^2)."""

  squares: jax.Array

  def merge(self, other: EffectiveShare) -> EffectiveShare:
    return EffectiveShare(self.total + other.total, self.weight + other.weight, self.squares + other.squares)

  def value(self) -> float | None:
    return float(self.total)**2 / (float(self.weight) * float(self.squares)) if self.squares != 0 else None


def policy_loss_BT(logprobs_BT: jax.Array, batch: Batch, config: PolicyLossConfig,
                   entropy_BT: jax.Array | None = None) -> tuple[jax.Array, dict[str, Metric]]:
  """Return (loss_BT, metrics): the loss of each token, to be summed with `loss_weight_BT`, and averages over the tokens that count.

  Where the batch has no old logprobs, old is the policy itself without gradient. That is exact, without a second forward pass, for the
  first and only update of a batch: every ratio is 1, and the gradient is that of the policy gradient.

  Args:
    logprobs_BT: of the targets under the current policy, nats.
    batch: needs `advantages_BT`; `behavior_logprobs_BT` where there is an importance_cap; `reference_logprobs_BT` where kl_coef is not 0.
    entropy_BT: of the policy's whole distributions, nats; must carry its gradient if entropy_coef is not 0.

  Raises:
    ValueError: an array that the settings need is None.
  """
  _check_inputs(batch, config, entropy_BT)
  mask_BT = batch.loss_weight_BT != 0

  def sampled(values_BT):
    return jnp.where(mask_BT, values_BT, 0).astype(jnp.float32)

  logprobs_BT, advantages_BT = sampled(logprobs_BT), sampled(batch.advantages_BT)
  old_BT = lax.stop_gradient(logprobs_BT) if batch.old_logprobs_BT is None else sampled(batch.old_logprobs_BT)
  over = _Over(mask_BT)
  loss_BT, metrics = _surrogate(logprobs_BT, old_BT, advantages_BT, batch.segment_ids_BT, over, config)
  if batch.behavior_logprobs_BT is not None:
    weight_BT, mismatch = _importance(old_BT, sampled(batch.behavior_logprobs_BT), over, config)
    loss_BT, metrics = weight_BT * loss_BT, metrics | mismatch
  metrics['policy/pg_loss'] = Sum(jnp.sum(sampled(loss_BT) * batch.loss_weight_BT))
  if batch.reference_logprobs_BT is not None:
    difference_BT = logprobs_BT - sampled(batch.reference_logprobs_BT)
    metrics |= {f'policy/reference_kl_{name}': over(kl_estimate(difference_BT, name)) for name in ('k1', *KL_ESTIMATORS)}
    if config.kl_coef:
      loss_BT = loss_BT + config.kl_coef * kl_estimate(difference_BT, config.kl_estimator)
  if entropy_BT is not None:
    metrics['policy/entropy'] = over(entropy_BT)
    if config.entropy_coef:
      loss_BT = loss_BT - config.entropy_coef * sampled(entropy_BT)
  return sampled(loss_BT), metrics


def kl_estimate(difference: jax.Array, estimator: str) -> jax.Array:
  """Return an estimate of KL(policy | other) in nats from d = log policy - log other of what the policy sampled.

  'k1' is d, 'k2' d^2 / 2, 'k3' exp(-d) - 1 + d (Schulman, "Approximating KL Divergence", 2020). As values k1 and k3 are unbiased.
  """
  return {'k1': lambda d: d, 'k2': lambda d: d * d / 2, 'k3': lambda d: jnp.expm1(-d) + d}[estimator](difference)


class _Over:
  """Makes metrics over the places of a mask; called, it averages."""

  def __init__(self, mask_BT):
    self.mask_BT = mask_BT

  def __call__(self, values_BT) -> Mean:
    return Mean.of(values_BT, self.mask_BT)

  def max(self, values_BT) -> Max:
    """Of values that are not negative."""
    return Max(jnp.max(jnp.where(self.mask_BT, values_BT, 0)))

  def min(self, values_BT) -> Min:
    return Min(jnp.min(jnp.where(self.mask_BT, values_BT, jnp.inf)))


def _surrogate(logprobs_BT, old_BT, advantages_BT, segment_ids_BT, over: _Over, config: PolicyLossConfig):
  """Return the policy term of each token, to be minimized, and the metrics of the ratio."""
  log_ratio_BT = logprobs_BT - old_BT
  metrics = {'policy/ppo_kl': over(-log_ratio_BT)}
  if config.kind == 'reinforce':
    return -advantages_BT * logprobs_BT, metrics
  if config.ratio == 'sequence':
    log_ratio_BT = _segment_mean(log_ratio_BT, over.mask_BT, segment_ids_BT, config.max_segments)
  ratio_BT = lax.stop_gradient(jnp.exp(log_ratio_BT))
  lowest, highest = 1 - config.clip_low, 1 + config.clip_high
  is_low_BT, is_high_BT = ratio_BT < lowest, ratio_BT > highest
  if config.kind == 'cispo':
    loss_BT = -jnp.clip(ratio_BT, lowest, highest) * advantages_BT * logprobs_BT
  else:
    # The bound replaces the ratio only where it lowers the objective. Selected, not min(): at ratio = bound a min has two gradients.
    is_low_BT, is_high_BT = is_low_BT & (advantages_BT < 0), is_high_BT & (advantages_BT > 0)
    bound_BT = jnp.where(is_low_BT, lowest, highest)
    is_bounded_BT = is_low_BT | is_high_BT
    if config.dual_clip is not None:
      is_lower_BT = (advantages_BT < 0) & (ratio_BT > config.dual_clip)
      bound_BT, is_bounded_BT = jnp.where(is_lower_BT, config.dual_clip, bound_BT), is_bounded_BT | is_lower_BT
      metrics['policy/pg_clipfrac_lower'] = over(is_lower_BT)
    # Exponentiated only where it counts: elsewhere exp may overflow, and 0 x inf would be its gradient.
    loss_BT = -advantages_BT * jnp.where(is_bounded_BT, bound_BT, jnp.exp(jnp.where(is_bounded_BT, 0, log_ratio_BT)))
  return loss_BT, metrics | {
      'policy/pg_clipfrac': over(is_low_BT | is_high_BT),
      'policy/pg_clipfrac_low': over(is_low_BT),
      'policy/pg_clipfrac_high': over(is_high_BT),
      'policy/probs_ratio': over(ratio_BT),
      'policy/probs_ratio_min': over.min(ratio_BT),
      'policy/probs_ratio_max': over.max(ratio_BT),
  }


def _importance(old_BT, behavior_BT, over: _Over, config: PolicyLossConfig):
  """Return each token's truncated importance weight, and how far apart sampler and trainer are."""
  log_weight_BT = old_BT - behavior_BT
  weight_BT = jnp.exp(log_weight_BT)
  in_sum_BT = jnp.where(over.mask_BT, weight_BT, 0)
  mean = over(weight_BT)
  metrics = {
      'mismatch/logprob_abs_diff': over(jnp.abs(log_weight_BT)),
      'mismatch/logprob_abs_diff_max': over.max(jnp.abs(log_weight_BT)),
      'mismatch/token_mult_prob_error': over(jnp.exp(jnp.abs(log_weight_BT))),
      'mismatch/kl': over(-log_weight_BT),
      'mismatch/k3_kl': over(kl_estimate(-log_weight_BT, 'k3')),
      'mismatch/importance_mean': mean,
      'mismatch/importance_max': over.max(weight_BT),
      'mismatch/chi2': over(weight_BT * weight_BT - 1),
      'mismatch/ess': EffectiveShare(mean.total, mean.weight, jnp.sum(in_sum_BT * in_sum_BT)),
  }
  if config.importance_cap is None:
    return jnp.ones_like(weight_BT), metrics
  return (lax.stop_gradient(jnp.minimum(weight_BT, config.importance_cap)),
          metrics | {'mismatch/capped_fraction': over(weight_BT > config.importance_cap)})


def _segment_mean(values_BT, mask_BT, segment_ids_BT, max_segments: int):
  """Return at each place of the mask the mean of its segment's values, in packed rows that may be split over devices."""
  place_BT = jax.typeof(values_BT).sharding
  place_BM = jax.NamedSharding(place_BT.mesh, P(place_BT.spec[0], None))
  numbers_M = jnp.arange(1, max_segments + 1)
  is_in_BTM = ((segment_ids_BT[..., None] == numbers_M[None, None]) & mask_BT[..., None]).astype(jnp.float32)

  def contract(expression, a, b, place):
    return jnp.einsum(expression, a, b, precision=lax.Precision.HIGHEST, out_sharding=place)

  total_BM = contract('BT,BTM->BM', values_BT, is_in_BTM, place_BM)
  mean_BM = total_BM / jnp.maximum(is_in_BTM.sum(1), 1)
  return jnp.where(segment_ids_BT > max_segments, jnp.nan, contract('BM,BTM->BT', mean_BM, is_in_BTM, place_BT))


def _check_inputs(batch: Batch, config: PolicyLossConfig, entropy_BT) -> None:
  if batch.advantages_BT is None:
    raise ValueError('batch.advantages_BT is None, and a policy loss needs it; make the documents with batching.documents.')
  if config.importance_cap is not None and batch.behavior_logprobs_BT is None:
    raise ValueError(f'importance_cap={config.importance_cap} weighs by old / behavior, and batch.behavior_logprobs_BT is None; pack the '
                     'logprobs that the sampler recorded, or set importance_cap=None.')
  if config.kl_coef and batch.reference_logprobs_BT is None:
    raise ValueError(f'kl_coef={config.kl_coef} holds the policy close to a reference, and batch.reference_logprobs_BT is None; score the '
                     'batch with the reference first, or set kl_coef=0.')
  if config.entropy_coef and entropy_BT is None:
    raise ValueError(f'entropy_coef={config.entropy_coef} needs entropy_BT, which is None; compute it, or set entropy_coef=0.')
