"""Policy-gradient losses for each token, from logprobs: arrays in, arrays out, never a model.

One function covers the GRPO family: PPO's clip with a bound on each side, GSPO's ratio of whole sequences, DPPO, CISPO, plain REINFORCE,
the importance correction between sampler and trainer, a KL term and an entropy bonus are settings of it. How token losses become one number
is not decided here but in `Batch.loss_weight_BT`; `objective.describe` writes the whole as a formula.

A token counts where its loss weight is not 0. Everything else is replaced before any arithmetic, so a masked place adds exactly nothing to
a loss, a gradient or a metric, whatever it holds. Everything is float32.

Deliberately absent: k1 as a loss (refused, with the reason), critics, and clamps on log-ratios that a paper does not have: a step that is not
finite is skipped and counted by the learner.
"""

from __future__ import annotations

from dataclasses import dataclass
import functools
from typing import Literal, get_args

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from rl.metrics import Max, Mean, Metric, Min, Sum
from rl.types import Batch

Kind = Literal['clip', 'dppo', 'cispo', 'reinforce']
Ratio = Literal['token', 'sequence']
ImportanceLevel = Literal['token', 'sequence', 'geometric']
ImportanceMode = Literal['truncate', 'mask', 'filter']
KL_ESTIMATORS = ('k2', 'k3', 'k3_corrected')


@dataclass(frozen=True)
class PolicyLossConfig:
  """Settings of `policy_loss_BT`.

  Attributes:
    kind: 'clip' is PPO's (arXiv:1707.06347 eq. 7), 'cispo' clips the weight of a token and keeps its gradient (arXiv:2506.13585 eq. 4),
      'dppo' leaves the ratio as it is and drops a token whose probability has already moved too far where its advantage pushes it
      (arXiv:2602.04879, binary total variation), 'reinforce' has no ratio.
    clip_low, clip_high: the ratio is bounded to [1 - clip_low, 1 + clip_high]; clip_low=1 is no lower bound. 'dppo': the probability may
      fall by clip_low and rise by clip_high.
    dual_clip: 'clip' only: where the advantage is negative, the ratio counts at most this much (arXiv:1912.09729 eq. 5); None is no bound.
    ratio: of each 'token', or of the 'sequence': the geometric mean over a document's sampled tokens (GSPO, arXiv:2507.18071 eq. 7).
    decoupled: the ratio is policy / old, and the policy that sampled only weighs (decoupled PPO, arXiv:2110.00641; AReaL,
      arXiv:2505.24298). False: policy / behavior, so samples of older weights are clipped for their age; it has no importance weight.
    max_segments: of settings that look at whole documents (`segment_limit`): most documents of a row, which the packer must be told; a token
      of a later one makes the loss NaN.
    importance_cap: a policy term is multiplied, without gradient, by the weight w = old / behavior bounded to [importance_low, this], which
      corrects what sampler and trainer compute differently; None does not correct.
    importance_low: lower bound of w; None is 0.
    importance_level: w is the ratio of the 'token', its product over the document's sampled tokens ('sequence'), or the geometric mean over
      them ('geometric').
    importance_mode: outside the bounds 'truncate' takes the bound, 'mask' 0; 'filter' is 0 there and 1 inside, no weight but a choice.
      'token' and 'truncate' are truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
      Training", 2025), 'mask' is masked importance sampling, with both bounds at the token IcePop (Ring-1T, arXiv:2510.18855), and
      'geometric' with 'filter' the geometric mask.
    opsm_nats: drops the tokens of negative advantage in documents whose mean of log behavior - log policy is above this (off-policy
      sequence masking, DeepSeek-V3.2, arXiv:2512.02556 eq. 9); None drops none.
    kl_coef: of the KL divergence from the reference policy, in nats per token.
    kl_estimator: with d = log policy - log reference, 'k2' is d^2 / 2, whose gradient is that of KL(policy | reference); 'k3', GRPO's,
      is exp(-d) - 1 + d, whose gradient is that of KL(reference | policy); 'k3_corrected' multiplies it by the ratio of the token, with
      gradient, and its gradient is that of KL(policy | reference) also where old is not the policy (DeepSeek-V3.2).
    entropy_coef: of the entropy bonus, in nats per token.
  """
  kind: Kind = 'clip'
  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float | None = None
  ratio: Ratio = 'token'
  decoupled: bool = True
  max_segments: int = 32
  importance_cap: float | None = 2.0
  importance_low: float | None = None
  importance_level: ImportanceLevel = 'token'
  importance_mode: ImportanceMode = 'truncate'
  opsm_nats: float | None = None
  kl_coef: float = 0.0
  kl_estimator: str = 'k2'
  entropy_coef: float = 0.0

  def __post_init__(self):
    for name, kinds in (('kind', Kind), ('ratio', Ratio), ('importance_level', ImportanceLevel), ('importance_mode', ImportanceMode)):
      value, allowed = getattr(self, name), get_args(kinds)
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
    if self.importance_low is not None and (self.importance_cap is None or not 0 <= self.importance_low < self.importance_cap):
      raise ValueError(f'importance_low={self.importance_low} must be from 0 to below importance_cap={self.importance_cap}; without a cap '
                       'there is no importance weight.')
    if self.importance_cap is None and (self.importance_level, self.importance_mode) != ('token', 'truncate'):
      raise ValueError(f'importance_level={self.importance_level!r} and importance_mode={self.importance_mode!r} say how importance_cap is '
                       "used, and it is None; set it, or leave them at 'token' and 'truncate'.")
    if not self.decoupled and self.importance_cap is not None:
      raise ValueError(f'decoupled=False with importance_cap={self.importance_cap} would correct twice for the policy that sampled: the '
                       'ratio is policy / behavior already; set importance_cap=None.')
    if self.opsm_nats is not None and not self.opsm_nats >= 0:
      raise ValueError(f'opsm_nats={self.opsm_nats} must not be negative, or None to drop nothing.')
    if not (self.kl_coef >= 0 and self.entropy_coef >= 0):
      raise ValueError(f'kl_coef={self.kl_coef} and entropy_coef={self.entropy_coef} must not be negative.')

  @property
  def segment_limit(self) -> int | None:
    """Return how many documents a row may hold, None where nothing looks at whole documents."""
    looks = self.ratio == 'sequence' or self.importance_level != 'token' or self.opsm_nats is not None
    return self.max_segments if looks else None


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
  first and only update of a batch: every ratio is 1, and the gradient is that of the policy gradient. If not decoupled, old logprobs are
  needed by nothing, and only measure how far trainer and sampler are apart.

  Args:
    logprobs_BT: of the targets under the current policy, nats.
    batch: needs `advantages_BT`; `behavior_logprobs_BT` where there is an importance_cap or opsm_nats, and if not decoupled;
      `reference_logprobs_BT` where kl_coef is not 0.
    entropy_BT: of the policy's whole distributions, nats; must carry its gradient if entropy_coef is not 0.

  Raises:
    ValueError: an array that the settings need is None.
  """
  _check_inputs(batch, config, entropy_BT)
  mask_BT = batch.loss_weight_BT != 0

  def sampled(values_BT):
    return jnp.where(mask_BT, values_BT, 0).astype(jnp.float32)

  logprobs_BT, advantages_BT = sampled(logprobs_BT), sampled(batch.advantages_BT)
  trainer_BT = lax.stop_gradient(logprobs_BT) if batch.old_logprobs_BT is None else sampled(batch.old_logprobs_BT)
  behavior_BT = None if batch.behavior_logprobs_BT is None else sampled(batch.behavior_logprobs_BT)
  old_BT = trainer_BT if config.decoupled else behavior_BT
  over, documents = _Over(mask_BT), functools.partial(_over_documents, mask_BT, batch.segment_ids_BT, config.max_segments)
  loss_BT, metrics = _surrogate(logprobs_BT, old_BT, advantages_BT, documents, over, config)
  if behavior_BT is not None:
    weight_BT, mismatch = _importance(trainer_BT, behavior_BT, documents, over, config)
    loss_BT, metrics = weight_BT * loss_BT, metrics | mismatch
  if config.opsm_nats is not None:
    _, drift_BT = documents(behavior_BT - lax.stop_gradient(logprobs_BT))
    is_dropped_BT = (advantages_BT < 0) & (drift_BT > config.opsm_nats)
    loss_BT, metrics['mismatch/opsm_fraction'] = jnp.where(is_dropped_BT, 0, loss_BT), over(is_dropped_BT)
  if config.segment_limit is not None:
    # Multiplied, so that the gradient is as loud as the loss.
    loss_BT = loss_BT * jnp.where(batch.segment_ids_BT > config.max_segments, jnp.nan, 1)
  metrics['policy/pg_loss'] = Sum(jnp.sum(sampled(loss_BT) * batch.loss_weight_BT))
  if batch.reference_logprobs_BT is not None:
    difference_BT = logprobs_BT - sampled(batch.reference_logprobs_BT)
    metrics |= {f'policy/reference_kl_{name}': over(kl_estimate(difference_BT, name)) for name in ('k1', 'k2', 'k3')}
    if config.kl_coef:
      kl_BT = kl_estimate(difference_BT, config.kl_estimator.removesuffix('_corrected'))
      if config.kl_estimator == 'k3_corrected':
        kl_BT = jnp.exp(logprobs_BT - old_BT) * kl_BT
      loss_BT = loss_BT + config.kl_coef * kl_BT
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


def _surrogate(logprobs_BT, old_BT, advantages_BT, documents, over: _Over, config: PolicyLossConfig):
  """Return the policy term of each token, to be minimized, and the metrics of the ratio."""
  log_ratio_BT = logprobs_BT - old_BT
  metrics = {'policy/ppo_kl': over(-log_ratio_BT)}
  if config.kind == 'reinforce':
    return -advantages_BT * logprobs_BT, metrics
  if config.ratio == 'sequence':
    _, log_ratio_BT = documents(log_ratio_BT)
  ratio_BT = lax.stop_gradient(jnp.exp(log_ratio_BT))
  lowest, highest = 1 - config.clip_low, 1 + config.clip_high
  is_low_BT, is_high_BT = ratio_BT < lowest, ratio_BT > highest
  if config.kind == 'dppo':
    moved_BT = lax.stop_gradient(jnp.exp(logprobs_BT) - jnp.exp(old_BT))
    lowest = highest = 0.0  # A dropped token has no loss either.
    is_low_BT, is_high_BT = moved_BT < -config.clip_low, moved_BT > config.clip_high
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


def _importance(trainer_BT, behavior_BT, documents, over: _Over, config: PolicyLossConfig):
  """Return each token's importance weight within its bounds, and how far apart sampler and trainer are at each token."""
  log_weight_BT = trainer_BT - behavior_BT
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
  low, cap = config.importance_low or 0.0, config.importance_cap
  if config.importance_level != 'token':
    weight_BT = jnp.exp(documents(log_weight_BT)[config.importance_level == 'geometric'])
  is_outside_BT = (weight_BT < low) | (weight_BT > cap)
  if config.importance_mode == 'truncate':
    weight_BT, name = jnp.clip(weight_BT, low, cap), 'capped'
  else:
    weight_BT, name = jnp.where(is_outside_BT, 0, weight_BT if config.importance_mode == 'mask' else 1), 'masked'
  return lax.stop_gradient(weight_BT), metrics | {f'mismatch/{name}_fraction': over(is_outside_BT)}


def _over_documents(mask_BT, segment_ids_BT, max_segments: int, values_BT):
  """Return (sums_BT, means_BT): at each place of the mask those of its document, in packed rows that may be split over devices."""
  place_BT = jax.typeof(values_BT).sharding
  place_BM = jax.NamedSharding(place_BT.mesh, P(place_BT.spec[0], None))
  numbers_M = jnp.arange(1, max_segments + 1)
  is_in_BTM = ((segment_ids_BT[..., None] == numbers_M[None, None]) & mask_BT[..., None]).astype(jnp.float32)

  def contract(expression, a, b, place):
    return jnp.einsum(expression, a, b, precision=lax.Precision.HIGHEST, out_sharding=place)

  total_BM = contract('BT,BTM->BM', values_BT, is_in_BTM, place_BM)
  mean_BM = total_BM / jnp.maximum(is_in_BTM.sum(1), 1)
  return tuple(contract('BM,BTM->BT', of_BM, is_in_BTM, place_BT) for of_BM in (total_BM, mean_BM))


def _check_inputs(batch: Batch, config: PolicyLossConfig, entropy_BT) -> None:
  if batch.advantages_BT is None:
    raise ValueError('batch.advantages_BT is None, and a policy loss needs it; make the documents with batching.documents.')
  needs_behavior = not config.decoupled or config.importance_cap is not None or config.opsm_nats is not None
  if needs_behavior and batch.behavior_logprobs_BT is None:
    raise ValueError(f'decoupled={config.decoupled}, importance_cap={config.importance_cap} and opsm_nats={config.opsm_nats} need the '
                     'policy that sampled, and batch.behavior_logprobs_BT is None; pack the logprobs that the sampler recorded, or set '
                     'decoupled=True and the others to None.')
  if config.kl_coef and batch.reference_logprobs_BT is None:
    raise ValueError(f'kl_coef={config.kl_coef} holds the policy close to a reference, and batch.reference_logprobs_BT is None; score the '
                     'batch with the reference first, or set kl_coef=0.')
  if config.entropy_coef and entropy_BT is None:
    raise ValueError(f'entropy_coef={config.entropy_coef} needs entropy_BT, which is None; compute it, or set entropy_coef=0.')
