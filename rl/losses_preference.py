"""Losses that learn from preferences between texts, from the texts' logprobs: arrays in, arrays out, never a model.

A row holds whole pairs: each chosen text (odd segment) is followed by its rejected one (even segment). A text's log-ratio is the sum, or the
mean, over its learned tokens of log policy - log reference, subtracted token by token before the sum: two sums over a long text would each
be rounded far more coarsely than their difference matters.

How much a text counts is what its `loss_weight_BT` sum up to; packed with `sequence_mean` that is its weight over the number of texts of the
whole step, so micro-batches and devices only add up. A token counts where its weight is not 0; whatever else a place holds adds exactly
nothing.

With w the chosen and l the rejected text, r their log-ratios (of mean logprobs where a kind has no reference), s = sigmoid:

| kind | loss of a pair | source |
|---|---|---|
| dpo | -(1 - e) log s(beta (r_w - r_l) - margin) - e log s(margin - beta (r_w - r_l)) | arXiv:2305.18290 eq. 7; e: cDPO (Mitchell 2023) |
| ipo | (r_w - r_l - 1 / (2 beta))^2 | arXiv:2310.12036 eq. 17 |
| simpo | as dpo, r = mean log policy | arXiv:2405.14734 eq. 6 |
| orpo | -beta log s(logit_w - logit_l), logit = log p - log(1 - p), log p = mean log policy | arXiv:2403.07691 eq. 7 |
| kto | for single texts: weight (1 - s(+-beta (r - z))), + for a desirable one | arXiv:2402.01306 sec. 4.1 |

KTO's reference point z is one number for the whole step, an estimate of KL(policy | reference) from texts that answer other prompts; it is
computed before the step (`reference_point`), so that a step does not depend on how it is split.

Deliberately absent: rewards from a scalar head (`losses_reward`), and samples drawn while training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
from jax import lax
import jax.numpy as jnp

from rl import segments
from rl.metrics import Mean, Metric
from rl.segments import Segments
from rl.types import Batch

Kind = Literal['dpo', 'ipo', 'kto', 'simpo', 'orpo']
# Their rewards are mean logprobs of the policy alone.
_REFERENCE_FREE = ('simpo', 'orpo')
_LOGISTIC = ('dpo', 'simpo')


@dataclass(frozen=True)
class PreferenceLossConfig:
  """Settings of `preference_loss`.

  Attributes:
    kind: see the table of the module.
    beta: how strongly a log-ratio counts; 'ipo': 1 / (2 beta) is the difference aimed at; 'orpo': weight of the odds ratio (its lambda).
    reduce: a text's log-ratio is the 'sum' or the 'mean' over its tokens; 'simpo' and 'orpo' are defined by the mean.
    label_smoothing: 'dpo', 'simpo': share of the pairs that are taken to be labeled the wrong way round (conservative DPO).
    margin: 'dpo', 'simpo': what beta times the difference must exceed (SimPO's gamma).
    nll_coef: of the chosen text's negative log-likelihood per token; ORPO has 1.
    desirable_weight, undesirable_weight: 'kto': of the two kinds of texts (lambda_D and lambda_U).
  """
  kind: Kind = 'dpo'
  beta: float = 0.1
  reduce: Literal['sum', 'mean'] = 'sum'
  label_smoothing: float = 0.0
  margin: float = 0.0
  nll_coef: float = 0.0
  desirable_weight: float = 1.0
  undesirable_weight: float = 1.0

  def __post_init__(self):
    for name, value, allowed in (('kind', self.kind, get_args(Kind)), ('reduce', self.reduce, ('sum', 'mean'))):
      if value not in allowed:
        raise ValueError(f'{name}={value!r} is unknown; use one of {", ".join(allowed)}.')
    if not self.beta > 0:
      raise ValueError(f'beta={self.beta} must be positive.')
    if self.kind in _REFERENCE_FREE and self.reduce != 'mean':
      raise ValueError(f"reduce={self.reduce!r} with kind={self.kind!r}, which is defined by mean logprobs; use reduce='mean'.")
    if not 0 <= self.label_smoothing < 0.5:
      raise ValueError(f'label_smoothing={self.label_smoothing} must be at least 0 and below 0.5; at 0.5 labels say nothing.')
    if self.kind not in _LOGISTIC and (self.label_smoothing or self.margin):
      raise ValueError(f'label_smoothing={self.label_smoothing} and margin={self.margin} with kind={self.kind!r}: only '
                       f'{" and ".join(_LOGISTIC)} have them; set both to 0.')
    if not (self.nll_coef >= 0 and self.margin >= 0):
      raise ValueError(f'nll_coef={self.nll_coef} and margin={self.margin} must not be negative.')
    if self.kind == 'kto' and self.nll_coef:
      raise ValueError(f"nll_coef={self.nll_coef} with kind='kto', whose texts have no chosen side; set it to 0.")
    if not (self.desirable_weight >= 0 and self.undesirable_weight >= 0 and self.desirable_weight + self.undesirable_weight > 0):
      raise ValueError(f'desirable_weight={self.desirable_weight} and undesirable_weight={self.undesirable_weight} must not be negative, '
                       'and not both 0.')
    if self.kind != 'kto' and (self.desirable_weight, self.undesirable_weight) != (1, 1):
      raise ValueError(f"desirable_weight={self.desirable_weight} and undesirable_weight={self.undesirable_weight} with kind={self.kind!r}: "
                       "only 'kto' has them; leave both at 1.")

  @property
  def has_reference(self) -> bool:
    """Whether the loss compares with a reference policy."""
    return self.kind not in _REFERENCE_FREE

  @property
  def is_paired(self) -> bool:
    """Whether the loss compares the two texts of a pair."""
    return self.kind != 'kto'


def preference_loss(logprobs_BT: jax.Array, batch: Batch, config: PreferenceLossConfig, max_segments: int) -> tuple[jax.Array, dict[str, Metric]]:
  """Return (loss, metrics): a sum over texts, weighted by what their loss weights sum up to; metrics average over pairs or texts.

  Args:
    logprobs_BT: of the batch's targets under the policy; the only input with a gradient.
    batch: with `reference_logprobs_BT` where the kind has a reference; 'kto' also needs `preferences`, whose first says by its sign whether
      a text is desirable, and `reference_point`.
    max_segments: most texts of a row; a row with more makes the loss NaN.

  Raises:
    ValueError: the batch lacks what the kind needs, or max_segments is odd where texts are pairs.
  """
  _check(batch, config, max_segments)
  mask_BT = batch.loss_weight_BT != 0
  texts = Segments(batch, max_segments)
  weight_BM = texts.sum(batch.loss_weight_BT, mask_BT)
  logprobs_BT = jnp.where(mask_BT, logprobs_BT, 0).astype(jnp.float32)
  mean_BM = texts.mean(logprobs_BT, mask_BT)
  if config.has_reference:
    reduce = {'sum': texts.sum, 'mean': texts.mean}[config.reduce]
    ratio_BM = reduce(logprobs_BT - jnp.where(mask_BT, batch.reference_logprobs_BT, 0), mask_BT)
  else:
    ratio_BM = mean_BM
  if config.is_paired:
    loss, metrics = _paired(ratio_BM, mean_BM, weight_BM, config)
  else:
    loss, metrics = _single(ratio_BM, texts.mean(batch.preferences[0], mask_BT), weight_BM, batch.reference_point, config)
  return jnp.where(texts.is_over, jnp.nan, loss), metrics


def reference_point(logprobs: list[jax.Array], batches: list[Batch], num_texts: int) -> jax.Array:
  """Return KTO's reference point in nats: the mean over texts of log policy - log reference, at least 0 (arXiv:2402.01306 sec. 4.1).

  Args:
    logprobs: logprobs_BT of each batch's targets under the policy.
    batches: replies to other prompts than theirs, with `reference_logprobs_BT`: all of the step's.
    num_texts: texts in them.
  """
  total = sum(jnp.sum(jnp.where(batch.loss_weight_BT != 0, logprobs_BT - batch.reference_logprobs_BT, 0))
              for logprobs_BT, batch in zip(logprobs, batches, strict=True))
  return lax.stop_gradient(jnp.maximum(total / num_texts, 0))


def _paired(ratio_BM, mean_BM, weight_BM, config: PreferenceLossConfig):
  weight_BP = sum(segments.pairs(weight_BM))
  is_pair_BP = weight_BP != 0
  chosen_BP, rejected_BP = segments.pairs(config.beta * ratio_BM)
  mean_chosen_BP, mean_rejected_BP = segments.pairs(mean_BM)
  difference_BP = chosen_BP - rejected_BP
  if config.kind == 'ipo':
    loss_BP = (difference_BP / config.beta - 1 / (2 * config.beta))**2
  elif config.kind == 'orpo':
    loss_BP = -config.beta * jax.nn.log_sigmoid(_logit(mean_chosen_BP, is_pair_BP) - _logit(mean_rejected_BP, is_pair_BP))
  else:
    excess_BP = difference_BP - config.margin
    loss_BP = -(1 - config.label_smoothing) * jax.nn.log_sigmoid(excess_BP) - config.label_smoothing * jax.nn.log_sigmoid(-excess_BP)
  loss_BP = loss_BP - config.nll_coef * mean_chosen_BP
  over = is_pair_BP.astype(jnp.float32)
  return jnp.sum(jnp.where(is_pair_BP, loss_BP, 0) * weight_BP), {
      'preference/accuracy': Mean.of(share_right(difference_BP), over),
      'preference/margin': Mean.of(difference_BP, over),
      'preference/reward_chosen': Mean.of(chosen_BP, over),
      'preference/reward_rejected': Mean.of(rejected_BP, over),
      'preference/logprob_chosen_nats': Mean.of(mean_chosen_BP, over),
      'preference/logprob_rejected_nats': Mean.of(mean_rejected_BP, over),
  }


def _logit(logprob_BP, is_pair_BP):
  """Return log p - log(1 - p); where there is no pair, of any p below 1, which keeps 0 x inf out of the gradient."""
  logprob_BP = jnp.where(is_pair_BP, logprob_BP, -1)
  return logprob_BP - jnp.log(-jnp.expm1(logprob_BP))


def _single(ratio_BM, label_BM, weight_BM, point, config: PreferenceLossConfig):
  sign_BM = jnp.sign(label_BM)
  kind_weight_BM = jnp.where(sign_BM > 0, config.desirable_weight, config.undesirable_weight)
  excess_BM = sign_BM * config.beta * (ratio_BM - lax.stop_gradient(point))
  loss_BM = kind_weight_BM * jax.nn.sigmoid(-excess_BM)
  desirable_BM, undesirable_BM = ((weight_BM != 0) & (side_BM > 0) for side_BM in (sign_BM, -sign_BM))
  rewards_BM = config.beta * ratio_BM
  return jnp.sum(loss_BM * weight_BM), {
      'preference/accuracy': Mean.of(share_right(excess_BM), weight_BM != 0),
      'preference/reward_chosen': Mean.of(rewards_BM, desirable_BM),
      'preference/reward_rejected': Mean.of(rewards_BM, undesirable_BM),
      'preference/reference_point_nats': Mean.of(point[None], jnp.ones((1,))),
  }


def share_right(difference: jax.Array) -> jax.Array:
  """Return 1 where the difference has the right sign, 1/2 where it is 0: a model that cannot tell is right half of the time."""
  return (1 + jnp.sign(difference)) / 2


def _check(batch: Batch, config: PreferenceLossConfig, max_segments: int) -> None:
  if config.is_paired and max_segments % 2:
    raise ValueError(f'max_segments={max_segments} with kind={config.kind!r}: a row holds whole pairs, so use an even number.')
  if config.has_reference and batch.reference_logprobs_BT is None:
    raise ValueError(f'kind={config.kind!r} compares with a reference, and batch.reference_logprobs_BT is None; score the texts with the '
                     f"reference first, or use one of {', '.join(_REFERENCE_FREE)}.")
  if not config.is_paired and (batch.preferences is None or batch.reference_point is None):
    raise ValueError("kind='kto' needs batch.preferences (its sign: desirable or not) and batch.reference_point (see `reference_point`); "
                     f'got {batch.preferences!r} and {batch.reference_point!r}.')
