"""The attention of one hop of a ring, in XLA: blocks of queries against blocks of keys (FlashAttention-2, arXiv:2307.08691 alg. 1 and 2).

It runs everywhere, memory is linear in length, and every other kernel is measured against it. A `Kernel` computes what a device's queries see
of one shard of keys; `ring_attention` merges the shards and never differentiates through a kernel.

A query sees a key of its own segment that is not later, and under a window not further back than it. That is read from positions and
segments, which are data: of two blocks, their ranges say at run time whether anything is visible, and pairs without are not visited. What is
masked gets a large negative score, never an infinite one, so a query that sees nothing gets exactly 0.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import jax
from jax import lax
import jax.numpy as jnp

from models.layers import softcap
from models.slices import dynamic_slice

# Queries and keys of a block at most; the scores of one head of a pair of blocks then stay in the cache of a core.
BLOCK = 256
# Log-sum-exp of nothing. Its half is a floor of running maxima, so that exp(NEGATIVE - maximum) is 0 even where nothing was seen yet.
NEGATIVE = -1e30


class Forward(Protocol):
  """What queries see of some keys."""

  def __call__(self, q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, query_positions_BT: jax.Array, key_positions_BS: jax.Array,
               query_segments_BT: jax.Array, key_segments_BS: jax.Array, *, scale: float, window: int | None,
               cap: float | None) -> tuple[jax.Array, jax.Array]:
    """Return (out_BTKGH normalized over these keys, lse_BKGT), float32; 0 and `NEGATIVE` where nothing is seen."""


class Backward(Protocol):
  """The gradients of one `Forward` among several whose results were merged."""

  def __call__(self, q_BTKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, query_positions_BT: jax.Array, key_positions_BS: jax.Array,
               query_segments_BT: jax.Array, key_segments_BS: jax.Array, dout_BTKGH: jax.Array, lse_BKGT: jax.Array, delta_BKGT: jax.Array,
               sums: tuple[jax.Array, jax.Array, jax.Array], *, scale: float, window: int | None,
               cap: float | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `sums`, which are (dq_BTKGH, dk_BSKH, dv_BSKH) in float32, with these keys' share added.

    On an accelerator only that addition should need `sums`: they arrive over the network meanwhile.

    Args:
      dout_BTKGH: cotangent of the merged output.
      lse_BKGT: log-sum-exp over all keys, not only these.
      delta_BKGT: sum over H of dout times the merged output.
    """


class Kernel(NamedTuple):
  forward: Forward
  backward: Backward


def visible(query_positions, key_positions, query_segments, key_segments, window: int | None) -> jax.Array:
  """Return the mask of which key each query sees; the arguments broadcast against each other (queries before keys)."""
  seen = (query_segments == key_segments) & (query_segments > 0) & (key_positions <= query_positions)
  return seen if window is None else seen & (query_positions - key_positions < window)


def possible_blocks(query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, window: int | None) -> jax.Array:
  """Return for each pair of blocks, [query blocks, key blocks], whether it is visited: a row may have something visible in it."""
  return _possible([x[:, :, None] for x in _ranges(query_positions_BT, query_segments_BT)],
                   [x[:, None] for x in _ranges(key_positions_BS, key_segments_BS)], window)


def _block_size(length: int) -> int:
  """Return the tokens of a block: at most BLOCK, such that there is little padding."""
  num_blocks = -(-length // BLOCK)
  return -(-length // (8 * num_blocks)) * 8


def _pad(x, size):
  extra = -x.shape[1] % size
  return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2)) if extra else x


def _ranges(positions_BT, segments_BT):
  """Return the least and greatest position and segment of each block, [B, blocks] each; a block of padding alone has none (least > greatest)."""
  size = _block_size(positions_BT.shape[1])
  positions, segments = (_pad(x, size).reshape(x.shape[0], -1, size) for x in (positions_BT, segments_BT))
  is_token = segments > 0
  top = jnp.iinfo(jnp.int32).max
  return [reduce(jnp.where(is_token, x, nothing), axis=-1)
          for x in (positions, segments) for reduce, nothing in ((jnp.min, top), (jnp.max, -1))]


def _possible(query_ranges, key_ranges, window):
  """Return whether queries may see some of the keys in any row; the arguments are `_ranges` and broadcast against each other."""
  low_q, high_q, first_q, last_q = query_ranges
  low_k, high_k, first_k, last_k = key_ranges
  possible = (high_q >= low_k) & (last_q >= first_k) & (last_k >= first_q)
  if window is not None:
    possible &= low_q - high_k < window
  return jnp.any(possible, axis=0)


def _for_each(possible, body, carry):
  """Fold body(index, carry) over the indices at which `possible` is true."""
  indices = jnp.arange(possible.shape[0])

  def after(index):
    return jnp.min(jnp.where(possible & (indices > index), indices, possible.shape[0]))

  # A loop whose length is data: jax.checkpoint cannot hoist what depends only on positions (masks!) out of it and keep it for every step.
  return lax.while_loop(lambda state: state[0] < possible.shape[0], lambda state: (after(state[0]), body(*state)), (after(-1), carry))[1]


def varying(x: jax.Array, like: jax.Array) -> jax.Array:
  """Mark `x` as varying over the mesh axes that `like` varies over, as loop carries inside shard_map must be."""
  missing = tuple(varies_less(x, like))
  return lax.pcast(x, missing, to='varying') if missing else x


def varies_less(x: jax.Array, like: jax.Array) -> frozenset[str]:
  """Return the mesh axes over which `like` varies and `x` does not."""
  return jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying


def _dot(expression, a, b):
  return jnp.einsum(expression, a, b, preferred_element_type=jnp.float32)


def _flat(x_BTKGH):
  # With one head a group, XLA would copy between layouts of the five dimensions that are the same in memory.
  return x_BTKGH.reshape(*x_BTKGH.shape[:2], -1, x_BTKGH.shape[-1])


class _Tile(NamedTuple):
  """The rows and heads that are computed at once: all, or one head of one row."""
  row: jax.Array | int
  head: jax.Array | int
  kv_head: jax.Array | int
  num_rows: int
  num_kv_heads: int
  group: int


class _Blocks:
  """Where the blocks of one call lie."""

  def __init__(self, q_BTKGH, k_BSKH, query_where, key_where, window, by_head):
    """`where` is (positions, segments); `by_head` computes the heads of rows one by one."""
    self.shape, self.window, self.by_head = q_BTKGH.shape, window, by_head
    self.query_size, self.key_size = _block_size(q_BTKGH.shape[1]), _block_size(k_BSKH.shape[1])
    self.query_ranges, self.key_ranges = _ranges(*query_where), _ranges(*key_where)
    self.query_where, self.key_where = ([_pad(x, size) for x in where]
                                        for where, size in ((query_where, self.query_size), (key_where, self.key_size)))
    self.num_query_blocks, self.num_key_blocks = self.query_ranges[0].shape[1], self.key_ranges[0].shape[1]

  def over_tiles(self, body, carry):
    """Fold body(tile, carry) over all rows and heads."""
    num_rows, _, num_kv, group, _ = self.shape
    if not self.by_head:
      return body(_Tile(0, 0, 0, num_rows, num_kv, group), carry)

    def one(index, carry):
      row, head = index // (num_kv * group), index % (num_kv * group)
      return body(_Tile(row, head, head // group, 1, 1, 1), carry)

    return lax.fori_loop(0, num_rows * num_kv * group, one, carry)

  def query(self, x_BTN, tile, index):
    """Return a block of an array [B, T, N, ...] as [B, I, K, G, ...]."""
    block = self._take(x_BTN, (tile.row, index * self.query_size, tile.head),
                       (tile.num_rows, self.query_size, tile.num_kv_heads * tile.group))
    return block.reshape(*block.shape[:2], tile.num_kv_heads, tile.group, *block.shape[3:])

  def put_query(self, x_BTN, block, tile, index):
    flat = block.reshape(*block.shape[:2], -1, *block.shape[4:])
    return lax.dynamic_update_slice(x_BTN, flat, (tile.row, index * self.query_size, tile.head, *[0] * (x_BTN.ndim - 3)))

  def key(self, x_BSKH, tile, index):
    """Return a block [B, J, K, H]."""
    return self._take(x_BSKH, (tile.row, index * self.key_size, tile.kv_head), (tile.num_rows, self.key_size, tile.num_kv_heads))

  def put_key(self, x_BSKH, block, tile, index):
    return lax.dynamic_update_slice(x_BSKH, block, (tile.row, index * self.key_size, tile.kv_head, 0))

  def _take(self, x, starts, sizes):
    rest = x.ndim - len(starts)
    return dynamic_slice(x, (*starts, *[0] * rest), (*sizes, *x.shape[x.ndim - rest:]))

  def possible(self, tile, *, query=None, key=None):
    """Return which blocks of keys may be visible to a block of queries, or which blocks of queries may see a block of keys."""
    def ranges(ends, index):
      rows = [lax.dynamic_slice_in_dim(x, tile.row, tile.num_rows, 0) for x in ends]
      return rows if index is None else [lax.dynamic_slice_in_dim(x, index, 1, 1) for x in rows]

    return _possible(ranges(self.query_ranges, query), ranges(self.key_ranges, key), self.window)

  def mask(self, tile, query, key):
    """Return which key each query of a pair of blocks sees, [B, 1, 1, I, J]."""
    query_positions, query_segments = (self._take(x, (tile.row, query * self.query_size), (tile.num_rows, self.query_size))
                                       for x in self.query_where)
    key_positions, key_segments = (self._take(x, (tile.row, key * self.key_size), (tile.num_rows, self.key_size)) for x in self.key_where)
    return visible(query_positions[:, :, None], key_positions[:, None], query_segments[:, :, None], key_segments[:, None],
                   self.window)[:, None, None]


def _forward(q_BTKGH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, *, scale, window, cap, by_head):
  length, head_dim = q_BTKGH.shape[1], q_BTKGH.shape[-1]
  blocks = _Blocks(q_BTKGH, k_BSKH, (query_positions_BT, query_segments_BT), (key_positions_BS, key_segments_BS), window, by_head)
  q_BTNH = _pad(_flat(q_BTKGH), blocks.query_size)
  k_BSKH, v_BSKH = (_pad(x, blocks.key_size) for x in (k_BSKH, v_BSKH))

  def query_block(i, results, tile):
    q_block = blocks.query(q_BTNH, tile, i)

    def attend(j, carry):
      out, total, high = carry
      scores = softcap(_dot('BIKGH,BJKH->BKGIJ', q_block, blocks.key(k_BSKH, tile, j)) * scale, cap)
      scores = jnp.where(blocks.mask(tile, i, j), scores, NEGATIVE)
      new_high = jnp.maximum(high, jnp.max(scores, axis=-1))
      weights = jnp.exp(scores - new_high[..., None])
      fade = jnp.exp(high - new_high)
      out = out * fade[..., None] + _dot('BKGIJ,BJKH->BKGIH', weights.astype(v_BSKH.dtype), blocks.key(v_BSKH, tile, j))
      return out, total * fade + jnp.sum(weights, axis=-1), new_high

    shape = (tile.num_rows, tile.num_kv_heads, tile.group, blocks.query_size)
    start = (jnp.zeros((*shape, head_dim), jnp.float32), jnp.zeros(shape, jnp.float32), jnp.full(shape, NEGATIVE / 2, jnp.float32))
    out, total, high = _for_each(blocks.possible(tile, query=i), attend, jax.tree.map(lambda x: varying(x, q_BTKGH), start))
    out = out / jnp.maximum(total, 1e-30)[..., None]
    lse = jnp.where(total > 0, high + jnp.log(jnp.maximum(total, 1e-30)), NEGATIVE)
    return tuple(blocks.put_query(x, jnp.moveaxis(block, 3, 1), tile, i) for x, block in zip(results, (out, lse), strict=True))

  def tile_of_queries(tile, results):
    return lax.fori_loop(0, blocks.num_query_blocks, functools.partial(query_block, tile=tile), results)

  start = [varying(jnp.zeros(shape, jnp.float32), q_BTKGH) for shape in (q_BTNH.shape, q_BTNH.shape[:3])]
  out_BTNH, lse_BTN = blocks.over_tiles(tile_of_queries, tuple(start))
  return out_BTNH[:, :length].reshape(q_BTKGH.shape), jnp.moveaxis(lse_BTN[:, :length].reshape(q_BTKGH.shape[:-1]), 1, 3)


def _backward(q_BTKGH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, dout_BTKGH, lse_BKGT,
              delta_BKGT, sums, *, scale, window, cap, by_head):
  blocks = _Blocks(q_BTKGH, k_BSKH, (query_positions_BT, query_segments_BT), (key_positions_BS, key_segments_BS), window, by_head)
  length, num_keys = q_BTKGH.shape[1], k_BSKH.shape[1]
  q_BTNH, dout_BTNH, lse_BTN, delta_BTN, dq_BTNH = (_pad(x, blocks.query_size) for x in (
      _flat(q_BTKGH), _flat(dout_BTKGH), *(jnp.moveaxis(x, 3, 1).reshape(*x.shape[:1], length, -1) for x in (lse_BKGT, delta_BKGT)),
      _flat(sums[0])))
  k_BSKH, v_BSKH, dk_BSKH, dv_BSKH = (_pad(x, blocks.key_size) for x in (k_BSKH, v_BSKH, *sums[1:]))

  def key_block(j, sums, tile):
    k_block, v_block = blocks.key(k_BSKH, tile, j), blocks.key(v_BSKH, tile, j)

    def accumulate(i, carry):
      dq, dk, dv = carry
      q_block, dout_block, lse, delta, dq_block = (blocks.query(x, tile, i) for x in (q_BTNH, dout_BTNH, lse_BTN, delta_BTN, dq))
      lse, delta = (jnp.moveaxis(x, 1, 3)[..., None] for x in (lse, delta))
      scores = softcap(_dot('BIKGH,BJKH->BKGIJ', q_block, k_block) * scale, cap)
      weights = jnp.exp(jnp.where(blocks.mask(tile, i, j), scores - lse, NEGATIVE))
      dscores = weights * (_dot('BIKGH,BJKH->BKGIJ', dout_block, v_block) - delta) * scale
      if cap is not None:
        dscores *= 1 - jnp.square(scores / cap)
      # The scores' gradient stays float32: rounded to bfloat16 it would make up half of the error of dq and dk.
      dq = blocks.put_query(dq, dq_block + _dot('BKGIJ,BJKH->BIKGH', dscores, k_block), tile, i)
      return dq, dk + _dot('BKGIJ,BIKGH->BJKH', dscores, q_block), dv + _dot('BKGIJ,BIKGH->BJKH', weights.astype(dout_block.dtype), dout_block)

    dq, dk, dv = sums
    dq, dk_block, dv_block = _for_each(blocks.possible(tile, key=j), accumulate, (dq, blocks.key(dk, tile, j), blocks.key(dv, tile, j)))
    return dq, blocks.put_key(dk, dk_block, tile, j), blocks.put_key(dv, dv_block, tile, j)

  def tile_of_keys(tile, sums):
    return lax.fori_loop(0, blocks.num_key_blocks, functools.partial(key_block, tile=tile), sums)

  # Added to in place; a second set of sums would be most of what a device holds.
  dq_BTNH, dk_BSKH, dv_BSKH = blocks.over_tiles(tile_of_keys, (dq_BTNH, dk_BSKH, dv_BSKH))
  return dq_BTNH[:, :length].reshape(q_BTKGH.shape), dk_BSKH[:, :num_keys], dv_BSKH[:, :num_keys]


def _per_platform(function, *arrays, **options):
  # A core has a cache of its own, for the scores of one head of one row (1.5 times as fast on CPU); an accelerator wants much at once.
  return lax.platform_dependent(*arrays, cpu=functools.partial(function, **options, by_head=True),
                                default=functools.partial(function, **options, by_head=False))


KERNEL = Kernel(functools.partial(_per_platform, _forward), functools.partial(_per_platform, _backward))
