"""Attention of one hop on TPUs, in Pallas: memory linear in length, masks from data, blocks that nobody sees neither fetched nor computed.

The scheme is FlashAttention-2's (arXiv:2307.08691 alg. 1 and 2) on a sparse grid, as splash attention has it. Of each pair of blocks one side
is fixed and the other moves: forward and dq fix queries, dk and dv fix keys. Tables of each block's range of positions and segments lie in
scalar memory; a fixed block walks from the first to the last block it may see, the longest walk bounds the grid at run time, and a block that
is seen whole skips the mask. Positions and segments are inputs, so any order of tokens and any packing is data, and nothing has size T S.

The fixed side lies along sublanes, the moving one along lanes, with scores transposed where keys are fixed, so that no matrix is transposed.
Heads stay where the model has them: a block is a slab of one head's lanes. Operands keep their dtype, sums and softmax are float32.

Mosaic compiles it ahead of time for v4, v5e, v5p, v6e and v7, and interpret mode checks its numbers on CPU; no chip has run it here.
Deliberately absent: autodiff (the ring has a backward of its own), sinks (the ring's merge adds them), dropout.

In the kernels I is a block of queries and J a block of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from models.kernels.xla import NEGATIVE, Kernel, visible

# Tokens of a block at most; with 1024, float32 operands of head size 256 exceed the memory that a kernel has by default.
BLOCK = 512
LANES = 128
# A masked score lies so far below the log-sum-exp of nothing that its weight is 0 even where nothing was seen yet.
_MASKED = 2 * NEGATIVE
# Rows of a table of blocks: ranges over its tokens (padding has segment 0), whether all are tokens, and the blocks it may see.
_LOW, _HIGH, _SEGMENT_LOW, _SEGMENT_HIGH, _FULL, _FIRST, _LAST = range(7)
_FAR = 2**30


def forward(q_BTKGH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, *, scale: float,
            window: int | None, cap: float | None, block: int = BLOCK, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """Return (out_BTKGH, lse_BKGT); see `xla.Forward`.

  Args:
    block: tokens of a block; a multiple of `LANES` on a TPU.
    interpret: run the kernel's operations in XLA, for tests.
  """
  hop = _Hop.of(q_BTKGH, k_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, window, block)
  q, k, v = hop.flat(q_BTKGH, hop.block_q), hop.flat(k_BSKH, hop.block_k), hop.flat(v_BSKH, hop.block_k)
  num_rows, num_queries, num_kv, group, _ = q_BTKGH.shape
  out, lse = _call(
      functools.partial(_forward_kernel, scale=scale, cap=cap), 'forward', hop, 'queries', num_dots=2, interpret=interpret,
      inputs=[('query', q), ('key', k), ('key', v)],
      outputs=[('query', q.shape), ('lse', (num_rows, num_kv * group, 1, q.shape[1]))],
      scratch=[(hop.block_q, 1), (hop.block_q, 1), (hop.block_q, hop.head)])
  return hop.unflat(out, q_BTKGH.shape), lse[..., :num_queries].reshape(num_rows, num_kv, group, num_queries)


def backward(q_BTKGH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, dout_BTKGH, lse_BKGT,
             delta_BKGT, sums, *, scale: float, window: int | None, cap: float | None, block: int = BLOCK,
             interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return `sums` with this hop's (dq_BTKGH, dk_BSKH, dv_BSKH) added; see `xla.Backward` and `forward`."""
  hop = _Hop.of(q_BTKGH, k_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, window, block)
  q, k, v = hop.flat(q_BTKGH, hop.block_q), hop.flat(k_BSKH, hop.block_k), hop.flat(v_BSKH, hop.block_k)
  dout = hop.flat(dout_BTKGH.astype(q.dtype), hop.block_q)
  num_rows, num_queries = q_BTKGH.shape[:2]
  stats = _pad(jnp.stack([x.reshape(num_rows, -1, num_queries) for x in (lse_BKGT, delta_BKGT)], axis=2), 3, hop.block_q)
  inputs = [('query', q), ('key', k), ('key', v), ('query', dout), ('stats', stats)]
  dq, = _call(
      functools.partial(_query_gradient_kernel, scale=scale, cap=cap), 'dq', hop, 'queries', num_dots=3, interpret=interpret,
      inputs=inputs, outputs=[('query', q.shape)], scratch=[(hop.block_q, hop.head), (hop.block_q, 2)])
  dk, dv = _call(
      functools.partial(_key_gradient_kernel, scale=scale, cap=cap), 'dkv', hop, 'keys', num_dots=4, interpret=interpret,
      inputs=inputs, outputs=[('key', k.shape), ('key', v.shape)], scratch=[(hop.block_k, hop.head), (hop.block_k, hop.head)])
  # Not in the kernels, which then need not wait for sums that are still on their way.
  return tuple(total + hop.unflat(x, total.shape) for total, x in zip(sums, (dq, dk, dv), strict=True))


KERNEL = Kernel(forward, backward)


def _pad(x, axis, multiple):
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % multiple)
  return jnp.pad(x, widths)


class _Hop(NamedTuple):
  """One hop cut into blocks: the sizes of its grid, and what says who sees whom.

  Attributes:
    query_marks, key_marks: [B, 2, padded length]: positions and segments.
    query_tables, key_tables: [7, B times blocks]: the rows named above, for scalar memory.
    head: the head size padded to whole lanes.
  """
  query_marks: jax.Array
  key_marks: jax.Array
  query_tables: jax.Array
  key_tables: jax.Array
  block_q: int
  block_k: int
  num_kv: int
  group: int
  head: int
  window: int | None

  @classmethod
  def of(cls, q_BTKGH, k_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, window, block) -> _Hop:
    _, num_queries, num_kv, group, head = q_BTKGH.shape
    block_q, block_k = (min(block, length + -length % LANES) for length in (num_queries, k_BSKH.shape[1]))
    query_marks = _pad(jnp.stack([query_positions_BT, query_segments_BT], axis=1), 2, block_q)
    key_marks = _pad(jnp.stack([key_positions_BS, key_segments_BS], axis=1), 2, block_k)
    query_ranges, key_ranges = _ranges(query_marks, block_q), _ranges(key_marks, block_k)
    possible_BIJ = _possible(query_ranges[..., :, None], key_ranges[..., None, :], window)
    query_tables, key_tables = (
        jnp.concatenate([ranges, _walks(possible)]).reshape(7, -1)
        for ranges, possible in ((query_ranges, possible_BIJ), (key_ranges, possible_BIJ.swapaxes(1, 2))))
    return cls(query_marks, key_marks, query_tables, key_tables, block_q, block_k, num_kv, group, head + -head % LANES, window)

  def flat(self, x, block):
    """Return x [B, length, ..., H] as [B, padded length, heads times padded H]."""
    x = _pad(_pad(x, 1, block), x.ndim - 1, LANES)
    return x.reshape(*x.shape[:2], -1)

  def unflat(self, x, shape):
    return x[:, :shape[1]].reshape(*shape[:-1], self.head)[..., :shape[-1]]

  @property
  def num_blocks(self) -> tuple[int, int]:
    return self.query_marks.shape[2] // self.block_q, self.key_marks.shape[2] // self.block_k


def _ranges(marks_B2T, block):
  """Return the first five rows of the table, [5, B, blocks]."""
  positions, segments = (marks_B2T[:, row].reshape(marks_B2T.shape[0], -1, block) for row in (0, 1))
  is_token = segments > 0
  bounds = [reduce(jnp.where(is_token, x, nothing), axis=-1)
            for x in (positions, segments) for reduce, nothing in ((jnp.min, _FAR), (jnp.max, -_FAR))]
  return jnp.stack([*bounds, jnp.all(is_token, axis=-1).astype(jnp.int32)])


def _possible(query, key, window):
  """Whether two blocks may have a pair of tokens that is visible, from their rows of the tables."""
  possible = (query[_SEGMENT_HIGH] >= key[_SEGMENT_LOW]) & (key[_SEGMENT_HIGH] >= query[_SEGMENT_LOW]) & (query[_HIGH] >= key[_LOW])
  return possible if window is None else possible & (query[_LOW] - key[_HIGH] < window)


def _whole(query, key, window):
  """Whether every query of a block sees every key of the other."""
  one_segment = ((query[_SEGMENT_LOW] == query[_SEGMENT_HIGH]) & (query[_SEGMENT_LOW] == key[_SEGMENT_LOW]) &
                 (query[_SEGMENT_LOW] == key[_SEGMENT_HIGH]))
  whole = (query[_FULL] > 0) & (key[_FULL] > 0) & one_segment & (query[_LOW] >= key[_HIGH])
  return whole if window is None else whole & (query[_HIGH] - key[_LOW] < window)


def _walks(possible):
  """Return the last two rows of the table, [2, B, fixed blocks]: the first and the last moving block that each may see."""
  index = jax.lax.broadcasted_iota(jnp.int32, possible.shape, 2)
  return jnp.stack([jnp.min(jnp.where(possible, index, possible.shape[2] - 1), axis=2), jnp.max(jnp.where(possible, index, 0), axis=2)])


class _Grid(NamedTuple):
  """The steps of a kernel: for every fixed block of every head, its walk along the moving ones.

  Attributes:
    shape: rows, query heads, blocks of queries, steps; or rows, kv heads, blocks of keys, query heads of each, steps.
  """
  hop: _Hop
  fixed: str
  shape: tuple

  @classmethod
  def along(cls, hop: _Hop, fixed: str) -> _Grid:
    tables = hop.query_tables if fixed == 'queries' else hop.key_tables
    num_rows, num_steps = hop.query_marks.shape[0], jnp.maximum(jnp.max(tables[_LAST] - tables[_FIRST]) + 1, 1)
    if fixed == 'queries':
      return cls(hop, fixed, (num_rows, hop.num_kv * hop.group, hop.num_blocks[0], num_steps))
    return cls(hop, fixed, (num_rows, hop.num_kv, hop.num_blocks[1], hop.group, num_steps))

  def walk(self, place, query_tables, key_tables):
    """Return the moving block of this step and whether the walk is still on; when it is over it stays, so that nothing more is fetched."""
    tables = query_tables if self.fixed == 'queries' else key_tables
    entry = place[0] * self.shape[2] + place[2]
    block, last = tables[_FIRST, entry] + place[-1], tables[_LAST, entry]
    return jnp.minimum(block, last), block <= last

  def at(self, place, query_tables, key_tables):
    """Return row, query head, kv head, block of queries, block of keys of a step."""
    moving, _ = self.walk(place, query_tables, key_tables)
    if self.fixed == 'queries':
      return place[0], place[1], place[1] // self.hop.group, place[2], moving
    return place[0], place[1] * self.hop.group + place[3], place[1], moving, place[2]

  def specs(self) -> dict[str, pl.BlockSpec]:
    """Return how each kind of array is cut."""
    hop = self.hop

    def spec(shape, pick):
      return pl.BlockSpec(shape, lambda *args: pick(*self.at(args[:-2], *args[-2:])))

    return {
        'query': spec((None, hop.block_q, hop.head), lambda row, head, kv, i, j: (row, i, head)),
        'key': spec((None, hop.block_k, hop.head), lambda row, head, kv, i, j: (row, j, kv)),
        'stats': spec((None, None, 2, hop.block_q), lambda row, head, kv, i, j: (row, head, 0, i)),
        'lse': spec((None, None, 1, hop.block_q), lambda row, head, kv, i, j: (row, head, 0, i)),
        'query_marks': spec((None, 2, hop.block_q), lambda row, head, kv, i, j: (row, 0, i)),
        'key_marks': spec((None, 2, hop.block_k), lambda row, head, kv, i, j: (row, 0, j)),
    }

  def run(self, kernel, query_tables, key_tables, query_marks, key_marks, *references):
    """Call kernel(start, visit, finish, *references); each of the three is a decorator of what to do at such a step.

    What `visit` decorates takes the mask of the two blocks, the fixed one first, or None where all is seen.
    """
    place = [pl.program_id(axis) for axis in range(len(self.shape))]
    row, _, _, i, j = self.at(place, query_tables, key_tables)
    query, key = ([table[field, row * size + block] for field in range(5)]
                  for table, size, block in ((query_tables, self.hop.num_blocks[0], i), (key_tables, self.hop.num_blocks[1], j)))
    possible = self.walk(place, query_tables, key_tables)[1] & _possible(query, key, self.hop.window)
    whole = possible & _whole(query, key, self.hop.window)
    is_first, is_last = place[-1] == 0, place[-1] == pl.num_programs(len(self.shape) - 1) - 1
    if self.fixed == 'keys':
      is_first, is_last = is_first & (place[3] == 0), is_last & (place[3] == self.hop.group - 1)

    def visit(attend):
      pl.when(whole)(lambda: attend(None))
      pl.when(possible & jnp.logical_not(whole))(lambda: attend(self.mask(query_marks[...], key_marks[...])))

    kernel(pl.when(is_first), visit, pl.when(is_last), *references)

  def mask(self, query_marks_2I, key_marks_2J):
    if self.fixed == 'queries':
      query_marks, key_marks = query_marks_2I.T, key_marks_2J
      return visible(query_marks[:, :1], key_marks[:1], query_marks[:, 1:], key_marks[1:], self.hop.window)
    query_marks, key_marks = query_marks_2I, key_marks_2J.T
    return visible(query_marks[:1], key_marks[:, :1], query_marks[1:], key_marks[:, 1:], self.hop.window)


def _call(kernel: Callable, name: str, hop: _Hop, fixed: str, *, inputs: Sequence[tuple[str, jax.Array]],
          outputs: Sequence[tuple[str, tuple[int, ...]]], scratch: Sequence[tuple[int, ...]], num_dots: int,
          interpret: bool) -> list[jax.Array]:
  """Run a kernel on a grid; inputs and outputs come with their kind, one of `_Grid.specs`.

  Args:
    num_dots: matrix products of a pair of blocks, for XLA's scheduler.
  """
  grid = _Grid.along(hop, fixed)
  specs = grid.specs()
  # Inside shard_map the type of an array says over which mesh axes it varies: a result over those of any input.
  varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in (hop.query_marks, hop.key_marks, *(x for _, x in inputs))))
  num_pairs = hop.query_marks.shape[0] * hop.num_kv * hop.group * hop.query_marks.shape[2] * hop.key_marks.shape[2]
  return pl.pallas_call(
      functools.partial(grid.run, kernel),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2, grid=grid.shape, in_specs=[specs[kind] for kind in ('query_marks', 'key_marks', *(kind for kind, _ in inputs))],
          out_specs=[specs[kind] for kind, _ in outputs], scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch]),
      out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=jax.sharding.ManualAxisType(varying=varying))
                 for _, shape in outputs],
      compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel',) * 3 + ('arbitrary',) * (len(grid.shape) - 3)),
      cost_estimate=pl.CostEstimate(flops=2 * num_dots * num_pairs * hop.head, transcendentals=num_pairs,
                                    bytes_accessed=sum(x.size * x.dtype.itemsize for _, x in inputs)),
      interpret=interpret, name=f'attention_{name}',
  )(hop.query_tables, hop.key_tables, hop.query_marks, hop.key_marks, *(x for _, x in inputs))


def _dot(a, b, contracted):
  """Multiply with a float32 result over one axis of each; float32 operands are not rounded to 16 bits."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  return jax.lax.dot_general(a, b, (((contracted[0],), (contracted[1],)), ((), ())), precision=exact, preferred_element_type=jnp.float32)


def _scores(a_IH, b_JH, scale, cap):
  scores_IJ = _dot(a_IH, b_JH, (1, 1)) * scale
  return scores_IJ if cap is None else cap * jnp.tanh(scores_IJ / cap)


def _forward_kernel(start, visit, finish, q_IH, k_JH, v_JH, out_IH, lse_1I, total_I1, high_I1, sum_IH, *, scale, cap):
  @start
  def clear():
    total_I1[...], sum_IH[...] = jnp.zeros_like(total_I1), jnp.zeros_like(sum_IH)
    high_I1[...] = jnp.full_like(high_I1, NEGATIVE)

  @visit
  def attend(mask_IJ):
    scores_IJ = _scores(q_IH[...], k_JH[...], scale, cap)
    if mask_IJ is not None:
      scores_IJ = jnp.where(mask_IJ, scores_IJ, _MASKED)
    high = jnp.maximum(high_I1[...], jnp.max(scores_IJ, axis=1, keepdims=True))
    weights_IJ, fade_I1 = jnp.exp(scores_IJ - high), jnp.exp(high_I1[...] - high)
    total_I1[...] = total_I1[...] * fade_I1 + jnp.sum(weights_IJ, axis=1, keepdims=True)
    sum_IH[...] = sum_IH[...] * fade_I1 + _dot(weights_IJ.astype(v_JH.dtype), v_JH[...], (1, 0))
    high_I1[...] = high

  @finish
  def write():
    seen_I1 = total_I1[...] > 0
    total = jnp.where(seen_I1, total_I1[...], 1)
    out_IH[...] = sum_IH[...] / total
    lse_1I[...] = jnp.where(seen_I1, high_I1[...] + jnp.log(total), NEGATIVE).T


def _weights(scores, mask, lse, cap):
  """Return the weights and d scores / d uncapped scores."""
  slope = 1 if cap is None else 1 - jnp.square(scores / cap)
  return jnp.exp((scores if mask is None else jnp.where(mask, scores, _MASKED)) - lse), slope


def _query_gradient_kernel(start, visit, finish, q_IH, k_JH, v_JH, dout_IH, stats_2I, dq_IH, sum_IH, stats_I2, *, scale, cap):
  @start
  def clear():
    sum_IH[...], stats_I2[...] = jnp.zeros_like(sum_IH), stats_2I[...].T

  @visit
  def attend(mask_IJ):
    weights_IJ, slope = _weights(_scores(q_IH[...], k_JH[...], scale, cap), mask_IJ, stats_I2[:, :1], cap)
    dscores_IJ = weights_IJ * (_dot(dout_IH[...], v_JH[...], (1, 1)) - stats_I2[:, 1:]) * slope
    sum_IH[...] += _dot(dscores_IJ.astype(k_JH.dtype), k_JH[...], (1, 0))

  @finish
  def write():
    dq_IH[...] = sum_IH[...] * scale


def _key_gradient_kernel(start, visit, finish, q_IH, k_JH, v_JH, dout_IH, stats_2I, dk_JH, dv_JH, dk_sum_JH, dv_sum_JH, *, scale, cap):
  @start
  def clear():
    dk_sum_JH[...], dv_sum_JH[...] = jnp.zeros_like(dk_sum_JH), jnp.zeros_like(dv_sum_JH)

  @visit
  def attend(mask_JI):
    weights_JI, slope = _weights(_scores(k_JH[...], q_IH[...], scale, cap), mask_JI, stats_2I[:1], cap)
    dscores_JI = weights_JI * (_dot(v_JH[...], dout_IH[...], (1, 1)) - stats_2I[1:]) * slope
    dk_sum_JH[...] += _dot(dscores_JI.astype(q_IH.dtype), q_IH[...], (1, 0))
    dv_sum_JH[...] += _dot(weights_JI.astype(dout_IH.dtype), dout_IH[...], (1, 0))

  @finish
  def write():
    dk_JH[...], dv_JH[...] = dk_sum_JH[...] * scale, dv_sum_JH[...]
