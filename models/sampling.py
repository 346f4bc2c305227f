"""Draw the next token of each row: temperature, top-k, top-p, min-p and greedy, with two log-probabilities of what was drawn.

Settings are arrays with one value per row, so one compiled step serves a batch of unlike requests. Filters apply in this order: logits are
divided by the temperature; top-k keeps the k likeliest tokens; top-p keeps the smallest set of likeliest tokens among those whose share of
their mass reaches top_p (arXiv:1904.09751); min-p keeps tokens at least min_p times as likely as the likeliest (arXiv:2407.01082). Each
filter is a threshold on the probability, so tokens of equal probability are kept or dropped together: top-k may keep more than k of them.
Greedy takes the lowest id of equals.

Thresholds are found by bisection on the bits of the log-probabilities: exact, without sorting the vocabulary, and only if some row asks.
The likeliest tokens alone are searched where they decide. A token is drawn by inverting the distribution function twice: a block of tokens,
then a token in it, each with a uniform number of its own. The Gumbel trick would need a random number for every token of the vocabulary,
and one inversion alone would resolve rare tokens poorly.

Deliberately absent: repetition penalties and allowed-token masks.
"""

from __future__ import annotations

from collections.abc import Sequence
import math

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from models import prng
from models.sharding import Layout

_BLOCK = 512
_NUM_LIKELIEST = 1024
_LOWEST_TEMPERATURE = 1e-4
_FARTHEST = np.iinfo(np.int32).max


@struct.dataclass
class Sampling:
  """How tokens are drawn: for one request as plain numbers, for a batch as arrays of one value per row.

  Attributes:
    temperature: divides the logits; 0 is greedy.
    top_k: how many of the likeliest tokens are kept; 0 keeps all.
    top_p: mass of the likeliest tokens kept; 1 keeps all.
    min_p: lowest probability kept, as a fraction of the highest; 0 keeps all.
  """

  temperature: float | jax.Array = 1.0
  top_k: int | jax.Array = 0
  top_p: float | jax.Array = 1.0
  min_p: float | jax.Array = 0.0


@struct.dataclass
class Sample:
  """Drawn tokens.

  Attributes:
    tokens_B: int32 ids.
    raw_logprobs_B: of the token under the model's distribution: every token, temperature 1; nats.
    processed_logprobs_B: of the token under the distribution it was drawn from; 0 for greedy, which is a point mass; nats.
  """

  tokens_B: jax.Array
  raw_logprobs_B: jax.Array
  processed_logprobs_B: jax.Array


def check(sampling: Sampling) -> None:
  """Raise ValueError unless the settings of one request make sense."""
  temperature, top_k, top_p, min_p = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
  if not (temperature == 0 or _LOWEST_TEMPERATURE <= temperature < math.inf):
    raise ValueError(f'sampling.temperature={temperature} must be 0 (greedy) or a finite number of at least {_LOWEST_TEMPERATURE}.')
  if top_k < 0 or top_k != int(top_k):
    raise ValueError(f'sampling.top_k={top_k} must be a whole number, at least 1, or 0 to keep all tokens.')
  if not 0 < top_p <= 1:
    raise ValueError(f'sampling.top_p={top_p} must be above 0 and at most 1; 1 keeps all tokens.')
  if not 0 <= min_p <= 1:
    raise ValueError(f'sampling.min_p={min_p} must be between 0 and 1; 0 keeps all tokens.')


def stack(settings: Sequence[Sampling]) -> Sampling:
  """Return the settings of several requests as numpy arrays of one value per row."""
  return Sampling(
      temperature=np.array([one.temperature for one in settings], np.float32), top_k=np.array([one.top_k for one in settings], np.int32),
      top_p=np.array([one.top_p for one in settings], np.float32), min_p=np.array([one.min_p for one in settings], np.float32))


def sample(logits_BV: jax.Array, sampling: Sampling, seed_B: jax.Array, position_B: jax.Array, layout: Layout) -> Sample:
  """Draw one token per row from float32 logits that are whole over the vocabulary.

  `seed_B` is the uint32 seed of each row's request and `position_B` the index of the new token in its sequence. A row's random numbers
  depend on these two alone: not on the row, the batch or the steps taken so far.
  """
  whole, row = layout.spec('batch', None), layout.spec('batch')
  placed = jax.reshard((logits_BV, sampling, seed_B, position_B), (whole, jax.tree.map(lambda _: row, sampling), row, row))
  return jax.shard_map(_sample_rows, in_specs=(whole, row, row, row), out_specs=row)(*placed)


def _sample_rows(logits_BV, sampling: Sampling, seed_B, position_B) -> Sample:
  is_greedy_B = sampling.temperature == 0
  raw_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
  inverse_B1 = (1 / jnp.where(is_greedy_B, 1, sampling.temperature))[:, None]
  scaled_BV = raw_BV * inverse_B1
  lowest_B1 = jnp.maximum(_lowest_kept(scaled_BV, sampling), jnp.log(sampling.min_p))[:, None]

  def weigh(raw_BI):
    return jnp.where(raw_BI * inverse_B1 >= lowest_B1, jnp.exp(raw_BI * inverse_B1), 0)

  uniform_B2 = jax.vmap(lambda seed, position: jax.random.uniform(prng.stream_key(seed, 'sample', position), (2,)))(seed_B, position_B)
  drawn_B, total_B = _draw(raw_BV, weigh, uniform_B2)
  tokens_B = jnp.where(is_greedy_B, _first(raw_BV == 0), drawn_B)
  raw_B = jnp.take_along_axis(raw_BV, tokens_B[:, None], axis=-1)[:, 0]
  processed_B = raw_B * inverse_B1[:, 0] - jnp.log(total_B)
  return Sample(tokens_B, raw_B - jnp.log(jnp.sum(jnp.exp(raw_BV), axis=-1)), jnp.where(is_greedy_B, 0, processed_B))


def _first(is_true_BV) -> jax.Array:
  """Return the index of the first true value of each row, or the row's length if there is none."""
  size = is_true_BV.shape[-1]
  return jnp.min(jnp.where(is_true_BV, jnp.arange(size)[None], size), axis=-1)


def _lowest_kept(scaled_BV, sampling: Sampling) -> jax.Array:
  """Return the lowest value of each row that top-k and top-p keep, given values of which each row's highest is 0."""
  has_top_k_B, has_top_p_B = sampling.top_k > 0, sampling.top_p < 1
  top_k_B = jnp.minimum(sampling.top_k, scaled_BV.shape[-1])

  def search(values_BC, total_B):
    # Distances below the highest value are not negative, and such floats are ordered as their bits are.
    bits_BC = jax.lax.bitcast_convert_type(jnp.abs(values_BC), jnp.int32)
    limit_B = _least(lambda limit_B: jnp.sum(bits_BC <= limit_B[:, None], axis=-1) >= top_k_B, top_k_B)
    limit_B = jnp.where(has_top_k_B, limit_B, _FARTHEST)
    weights_BC = jnp.where(bits_BC <= limit_B[:, None], jnp.exp(values_BC), 0)
    wanted_B = sampling.top_p * jnp.where(has_top_k_B, jnp.sum(weights_BC, axis=-1), total_B)
    nearer_B = _least(lambda limit_B: jnp.sum(jnp.where(bits_BC <= limit_B[:, None], weights_BC, 0), axis=-1) >= wanted_B, top_k_B)
    limit_B = jnp.where(has_top_p_B, jnp.minimum(nearer_B, limit_B), limit_B)
    return jnp.where(limit_B == _FARTHEST, -jnp.inf, -jax.lax.bitcast_convert_type(limit_B, jnp.float32))

  def narrow(_):
    total_B = jnp.sum(jnp.exp(scaled_BV), axis=-1)
    if scaled_BV.shape[-1] <= _NUM_LIKELIEST:
      return search(scaled_BV, total_B)
    likeliest_BC = jax.lax.top_k(scaled_BV, _NUM_LIKELIEST)[0]
    mass_B = jnp.sum(jnp.exp(likeliest_BC), axis=-1)
    suffices_B = jnp.where(has_top_k_B, top_k_B <= _NUM_LIKELIEST, ~has_top_p_B | (mass_B >= sampling.top_p * total_B))
    return jax.lax.cond(jnp.all(suffices_B), lambda: search(likeliest_BC, total_B), lambda: search(scaled_BV, total_B))

  return jax.lax.cond(jnp.any(has_top_k_B | has_top_p_B), narrow, lambda like_B: jnp.full_like(like_B, -jnp.inf), sampling.top_p)


def _least(is_enough, like_B) -> jax.Array:
  """Return the least int32 limit of each row that is enough, deciding its bits from the highest; every limit above it is enough too."""

  def decide(step, limit_B):
    lower_B = limit_B - jax.lax.shift_left(jnp.int32(1), 30 - step)
    return jnp.where(is_enough(lower_B), lower_B, limit_B)

  return jax.lax.fori_loop(0, 31, decide, jnp.full_like(like_B, _FARTHEST))


def _draw(raw_BV, weigh, uniform_B2) -> tuple[jax.Array, jax.Array]:
  """Draw an index of each row in proportion to `weigh(raw_BV)`; returns (index_B, sum of weights_B)."""
  missing = -raw_BV.shape[-1] % _BLOCK
  raw_BV = jnp.pad(raw_BV, ((0, 0), (0, missing)), constant_values=-jnp.inf)
  num_rows = raw_BV.shape[0]
  block_B, total_B = _invert(jnp.sum(weigh(raw_BV).reshape(num_rows, -1, _BLOCK), axis=-1), uniform_B2[:, 0])
  raw_BI = jnp.take_along_axis(raw_BV.reshape(num_rows, -1, _BLOCK), block_B[:, None, None], axis=1)[:, 0]
  return block_B * _BLOCK + _invert(weigh(raw_BI), uniform_B2[:, 1])[0], total_B


def _invert(weights_BI, uniform_B) -> tuple[jax.Array, jax.Array]:
  """Return (the index at which the running sum of weights passes the fraction `uniform` of the total, the total)."""
  sums_BI = jnp.cumsum(weights_BI, axis=-1)
  total_B = sums_BI[:, -1]
  # Rounding may leave no sum above the last fraction, or one at a weight of 0; only indices with weight may be drawn.
  first_B = _first((weights_BI > 0) & (sums_BI > (uniform_B * total_B)[:, None]))
  last_B = jnp.max(jnp.where(weights_BI > 0, jnp.arange(weights_BI.shape[-1])[None], 0), axis=-1)
  return jnp.minimum(first_B, last_B), total_B
