"""In which order the tokens of a row lie where its length is split over devices.

Causal attention over contiguous pieces is unfair: the device with the first piece sees one piece, that with the last sees them all. Under
'zigzag' device i of N holds pieces i and 2N-1-i of 2N, so all see the same number of keys (arXiv:2404.10830 calls it so; ring-flash-attention).
Under 'striped' blocks are dealt in turn (arXiv:2311.09431), which is fair also within packed documents shorter than a row. 'contiguous' lets
a window reach only its neighbors.

The order is applied once, to the integers of a batch on the host. Positions, segments and targets are data of a place, so nothing else in
the product knows of it; attention reads the positions.
"""

from __future__ import annotations

import math

import numpy as np

from models.config import ModelConfig

ORDERS = ('contiguous', 'zigzag', 'striped')
# Tokens of a stripe.
STRIPE = 256
# What the tokens of a shard are a multiple of.
_SHARD_UNITS = {'contiguous': 1, 'zigzag': 2, 'striped': STRIPE}


def resolve(order: str, config: ModelConfig, num_shards: int) -> str:
  """Return the order for a model on a ring of `num_shards`: what was asked, or for 'auto' the best.

  Raises:
    ValueError: an unknown order, or one that contradicts the model.
  """
  if order not in ('auto', *ORDERS):
    raise ValueError(f"layout.order={order!r} is unknown; use 'auto' or one of {', '.join(ORDERS)}.")
  kinds = {config.layer_kind(layer) for layer in range(config.num_layers)}
  if order == 'striped' and num_shards > 1 and 'local' in kinds:
    raise ValueError(f"layout.order='striped' deals neighbors to different devices, so a layer with model.window={config.window} would need "
                     "the keys of all of them; use 'zigzag' or 'contiguous'.")
  if order != 'auto':
    return order
  return 'contiguous' if num_shards == 1 or kinds == {'local'} else 'zigzag'


def padded_length(order: str, length: int, num_shards: int, num_splits: int = 1) -> int:
  """Return the least length from `length` on that splits over the shards in this order, and each shard in `num_splits` more parts."""
  unit = num_shards * math.lcm(_SHARD_UNITS[order] if num_shards > 1 else 1, num_splits)
  return -(-length // unit) * unit


def places(order: str, length: int, num_shards: int) -> np.ndarray:
  """Return order_T: which token of a row lies at each place; shard i holds the i-th of `num_shards` equal parts.

  Args:
    length: one of `padded_length`.
  """
  return tokens_at(order, length, num_shards, np.arange(length))


def tokens_at(order: str, length: int, num_shards: int, places_I: np.ndarray) -> np.ndarray:
  """Return which token of a row lies at each of some places; arguments as of `places`."""
  if num_shards == 1 or order == 'contiguous':
    return places_I
  shard_I, place_I = np.divmod(places_I, length // num_shards)
  if order == 'zigzag':
    piece = length // num_shards // 2
    return np.where(place_I < piece, shard_I * piece + place_I, (2 * num_shards - 2 - shard_I) * piece + place_I)
  stripe_I, place_I = np.divmod(place_I, STRIPE)
  return (stripe_I * num_shards + shard_I) * STRIPE + place_I
