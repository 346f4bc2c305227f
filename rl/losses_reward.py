"""Losses of scalar heads: the Bradley-Terry loss of a reward model, and the squared error of a critic. Arrays in, arrays out.

A reward model scores a text at its last token, whatever the order in which tokens lie; pairs share a row as in `losses_preference`. It may
have several heads, one for each dimension of quality: every pair says by `Batch.preferences` which of its texts is the better one in each
dimension and by how much (0: it does not say).

A text or a token counts by its loss weight; whatever else a place holds adds exactly nothing. Everything is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rl import segments
from rl.losses_preference import share_right
from rl.metrics import Mean, Metric
from rl.segments import Segments
from rl.types import Batch


@dataclass(frozen=True)
class RewardLossConfig:
  """Settings of `reward_loss`.

  Attributes:
    margin_scale: the better text's score must lead by this much for each unit of preference (arXiv:2307.09288 sec. 3.2.2); 0 is no margin.
    center_coef: of (chosen + rejected)^2, which keeps scores around 0 (arXiv:2312.09244 eq. 2).
  """
  margin_scale: float = 0.0
  center_coef: float = 0.0

  def __post_init__(self):
    if not (self.margin_scale >= 0 and self.center_coef >= 0):
      raise ValueError(f'margin_scale={self.margin_scale} and center_coef={self.center_coef} must not be negative.')


@dataclass(frozen=True)
class ValueLossConfig:
  """Settings of `value_loss_BT`.

  Attributes:
    clip: how far from the old value a new one may lead the loss (PPO2's value clipping); None does not clip.
  """
  clip: float | None = 0.2

  def __post_init__(self):
    if self.clip is not None and not self.clip > 0:
      raise ValueError(f'clip={self.clip} must be positive, or None for no clipping.')


def reward_loss(scores: Sequence[jax.Array], batch: Batch, config: RewardLossConfig, dimensions: dict[str, float],
                max_segments: int) -> tuple[jax.Array, dict[str, Metric]]:
  """Return (loss, metrics) of -log sigmoid(better - worse - margin) (Bradley-Terry, arXiv:2203.02155 eq. 1), a weighted sum over pairs.

  Args:
    scores: scores_BT of each dimension.
    batch: `preferences` says by how much a pair's chosen text is better in each dimension; negative: the rejected one is.
    dimensions: name -> weight of each dimension, in the order of the scores; the loss is their weighted mean.
    max_segments: most texts of a row, even; a row with more makes the loss NaN.

  Raises:
    ValueError: scores, preferences and dimensions that differ in number, weights not positive, or an odd max_segments.
  """
  num_preferences = None if batch.preferences is None else len(batch.preferences)
  if not len(scores) == num_preferences == len(dimensions):
    raise ValueError(f'{len(scores)} scores and {num_preferences} preferences for the {len(dimensions)} dimensions '
                     f'{", ".join(dimensions)}; there must be one of each.')
  if not all(weight > 0 for weight in dimensions.values()):
    raise ValueError(f'dimensions={dimensions} must all have a positive weight; leave out one that does not count.')
  if max_segments % 2:
    raise ValueError(f'max_segments={max_segments}: a row holds whole pairs, so use an even number.')
  texts = Segments(batch, max_segments)
  mask_BT = batch.loss_weight_BT != 0
  weight_BP = sum(segments.pairs(texts.sum(batch.loss_weight_BT, mask_BT)))
  loss, metrics, right = 0.0, {}, []
  for (name, share), scores_BT, preference_BT in zip(dimensions.items(), scores, batch.preferences, strict=True):
    chosen_BP, rejected_BP = segments.pairs(texts.last(scores_BT))
    preference_BP, _ = segments.pairs(texts.mean(preference_BT, mask_BT))
    counts_BP = ((weight_BP != 0) & (preference_BP != 0)).astype(jnp.float32)
    lead_BP = jnp.sign(preference_BP) * (chosen_BP - rejected_BP)
    loss_BP = -jax.nn.log_sigmoid(lead_BP - config.margin_scale * jnp.abs(preference_BP)) + config.center_coef * (chosen_BP + rejected_BP)**2
    loss += share / sum(dimensions.values()) * jnp.sum(loss_BP * counts_BP * weight_BP)
    right.append(Mean.of(share_right(lead_BP), counts_BP))
    metrics |= {
        f'reward_model/accuracy_{name}': right[-1],
        f'reward_model/lead_{name}': Mean.of(lead_BP, counts_BP),
        f'reward_model/score_{name}': Mean.of((chosen_BP + rejected_BP) / 2, counts_BP),
    }
  over_all = Mean(sum(mean.total for mean in right), sum(mean.weight for mean in right))
  return jnp.where(texts.is_over, jnp.nan, loss), {'reward_model/accuracy': over_all, **metrics}


def value_loss_BT(values_BT: jax.Array, batch: Batch, config: ValueLossConfig) -> tuple[jax.Array, dict[str, Metric]]:
  """Return (loss_BT, metrics): half of the squared error of each token's value, to be summed with `loss_weight_BT`.

  With clipping, the larger of the errors of the value and of the value moved at most `clip` from the old one (arXiv:1707.06347, as in the
  code that came with it). A value stands at the place that predicts its token, like the token's weight.

  Args:
    values_BT: of the critic; the only input with a gradient.
    batch: with `returns_BT`, and with `values_BT`, those of the critic before this batch, where the loss clips.

  Raises:
    ValueError: the batch lacks one of them.
  """
  if batch.returns_BT is None or (config.clip is not None and batch.values_BT is None):
    raise ValueError(f'A value loss with clip={config.clip} needs batch.returns_BT and, to clip, batch.values_BT; pack documents that have '
                     "'returns' and 'values' (see advantages.gae).")
  mask_BT = batch.loss_weight_BT != 0
  values_BT, returns_BT = (jnp.where(mask_BT, x, 0).astype(jnp.float32) for x in (values_BT, batch.returns_BT))
  error_BT = (values_BT - returns_BT)**2
  is_clipped_BT = jnp.zeros_like(mask_BT)
  if config.clip is not None:
    old_BT = jnp.where(mask_BT, batch.values_BT, 0)
    clipped_BT = (old_BT + jnp.clip(values_BT - old_BT, -config.clip, config.clip) - returns_BT)**2
    is_clipped_BT = clipped_BT > error_BT
    error_BT = jnp.where(is_clipped_BT, clipped_BT, error_BT)
  return error_BT / 2, {
      'value/clip_fraction': Mean.of(is_clipped_BT, mask_BT),
      'value/mean': Mean.of(values_BT, mask_BT),
      'value/return_mean': Mean.of(returns_BT, mask_BT),
      'value/squared_error': Mean.of((values_BT - returns_BT)**2, mask_BT),
  }
