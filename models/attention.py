"""Attention from positions and segment ids: a dense reference, a blockwise form with memory linear in length, and the choice between kernels.

A query sees a key of its own segment that is not later, and under a window not further back than it; nothing depends on an array index, so
packing and any order of tokens along a row are data, not code paths. Every kernel runs inside `shard_map`: each device has its own rows and
heads, and keys and values are whole along the length. Rows that see nothing (padding) give exactly 0, never NaN.

Deliberately absent: ring attention over a split length, and attention against a cache (`decode`).
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.layers import softcap
from models.sharding import Layout

# What each kernel can do where; `resolve` checks it once, before tracing. cuDNN's flash attention has no soft cap.
KERNELS = {
    'dense': {'platforms': ('cpu', 'gpu', 'tpu'), 'softcap': True, 'memory': 'O(T^2)'},
    'blockwise': {'platforms': ('cpu', 'gpu', 'tpu'), 'softcap': True, 'memory': 'O(T)'},
    'cudnn': {'platforms': ('gpu',), 'softcap': False, 'memory': 'O(T^2) bits'},
}
BLOCK = 256
_NEGATIVE = -1e30


def support_table() -> str:
  """Return the table of kernels, platforms and features as text."""
  rows = [f'{"kernel":<10} {"cpu":<4} {"gpu":<4} {"tpu":<4} {"softcap":<8} {"window":<7} {"packing":<8} memory']
  for name, kernel in KERNELS.items():
    marks = ['yes' if platform in kernel['platforms'] else '-' for platform in ('cpu', 'gpu', 'tpu')]
    rows.append(f'{name:<10} {marks[0]:<4} {marks[1]:<4} {marks[2]:<4} {"yes" if kernel["softcap"] else "-":<8} {"yes":<7} {"yes":<8} '
                f'{kernel["memory"]}')
  return '\n'.join(rows)


def check(layout: Layout, config: ModelConfig, platform: str) -> None:
  """Raise ValueError unless the layout's kernel can compute this model on this platform."""
  name = layout.attention
  if name == 'auto':
    return
  if name not in KERNELS:
    raise ValueError(f"layout.attention={name!r} is unknown; use 'auto' or one of {tuple(KERNELS)}.\n{support_table()}")
  if platform not in KERNELS[name]['platforms']:
    raise ValueError(f'layout.attention={name!r} does not run on {platform}; choose another kernel:\n{support_table()}')
  if config.attention_softcap is not None and not KERNELS[name]['softcap']:
    raise ValueError(f'layout.attention={name!r} has no soft cap but model.attention_softcap={config.attention_softcap}; '
                     f'choose another kernel:\n{support_table()}')


def choose(layout: Layout, length: int) -> str:
  """Return the kernel used for rows of `length` tokens: blockwise from one block on (a LoRA step is 15 % faster with it, measured)."""
  if layout.attention != 'auto':
    return layout.attention
  return 'dense' if length < BLOCK else 'blockwise'


def visible(query_positions, key_positions, query_segments, key_segments, window: int | None) -> jax.Array:
  """Return the mask of which key each query sees; the arguments broadcast against each other (queries before keys)."""
  seen = (query_segments == key_segments) & (query_segments > 0) & (key_positions <= query_positions)
  return seen if window is None else seen & (query_positions - key_positions < window)


def attend_dense(q_BTNH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, *,
                 scale: float, window: int | None = None, cap: float | None = None) -> jax.Array:
  """Return out_BTNH by the full score matrix: the reference, O(T S) memory; scores and softmax in float32."""
  num_kv = k_BSKH.shape[2]
  q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], num_kv, -1, q_BTNH.shape[-1])
  scores_BKGTS = softcap(_dot('BTKGH,BSKH->BKGTS', q_BTKGH, k_BSKH) * scale, cap)
  mask_BTS = visible(query_positions_BT[:, :, None], key_positions_BS[:, None], query_segments_BT[:, :, None], key_segments_BS[:, None], window)
  mask_BKGTS = mask_BTS[:, None, None]
  scores_BKGTS = jnp.where(mask_BKGTS, scores_BKGTS, _NEGATIVE)
  weights_BKGTS = jnp.where(mask_BKGTS, jnp.exp(scores_BKGTS - jnp.max(scores_BKGTS, axis=-1, keepdims=True)), 0)
  weights_BKGTS = weights_BKGTS / jnp.maximum(jnp.sum(weights_BKGTS, axis=-1, keepdims=True), 1e-30)
  out_BTKGH = _dot('BKGTS,BSKH->BTKGH', weights_BKGTS.astype(v_BSKH.dtype), v_BSKH)
  return out_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype)


def _dot(expression, a, b):
  return jnp.einsum(expression, a, b, preferred_element_type=jnp.float32)


# Blockwise attention (FlashAttention-2, arXiv:2307.08691 alg. 1 and 2) in XLA. Heads come first, so that a block is one slice; blocks that
# no query of a key block can see are skipped by their ranges of positions and segments, at run time, since those are data.


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def attend_blockwise(q_BTNH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS,
                     scale: float, window: int | None = None, cap: float | None = None) -> jax.Array:
  """Return out_BTNH in O(T) memory, equal to `attend_dense`; the backward pass recomputes scores from the saved log-sum-exp."""
  return _blockwise_forward(q_BTNH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS,
                            scale, window, cap)[0]


def _pad_to_blocks(x, value=0):
  extra = -x.shape[1] % BLOCK
  return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2), constant_values=value)


def _blocks(x, index):
  return jax.lax.dynamic_slice_in_dim(x, index * BLOCK, BLOCK, axis=1)


def _possible(query_positions, key_positions, query_segments, key_segments, window):
  """Whether any pair of these two blocks may be visible, from ranges alone (padding has segment 0)."""
  live = jnp.where(key_segments > 0, key_segments, jnp.iinfo(jnp.int32).max)
  overlap = (jnp.max(query_segments) >= jnp.min(live)) & (jnp.max(key_segments) >= jnp.min(
      jnp.where(query_segments > 0, query_segments, jnp.iinfo(jnp.int32).max)))
  causal = jnp.max(query_positions) >= jnp.min(key_positions)
  near = True if window is None else jnp.min(query_positions) - jnp.max(key_positions) < window
  return overlap & causal & near


def _block_scores(q_BIKGH, k_BJKH, mask_arguments, scale, window, cap):
  """Return masked scores [B,K,G,I,J] and the mask [B,1,1,I,J]."""
  query_positions, key_positions, query_segments, key_segments = mask_arguments
  scores = softcap(_dot('BIKGH,BJKH->BKGIJ', q_BIKGH, k_BJKH) * scale, cap)
  mask = visible(query_positions[:, :, None], key_positions[:, None], query_segments[:, :, None], key_segments[:, None], window)[:, None, None]
  return jnp.where(mask, scores, _NEGATIVE), mask


def _prepare(q_BTNH, k_BSKH, v_BSKH, query_positions, key_positions, query_segments, key_segments):
  grouped = q_BTNH.reshape(*q_BTNH.shape[:2], k_BSKH.shape[2], -1, q_BTNH.shape[-1])
  return [_pad_to_blocks(x) for x in (grouped, k_BSKH, v_BSKH, query_positions, key_positions, query_segments, key_segments)]


def _varying(x, like):
  """Mark a constant as varying over the same mesh axes as `like`, as loop carries inside shard_map must be."""
  missing = tuple(jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying)
  return jax.lax.pcast(x, missing, to='varying') if missing else x


def _blockwise_forward(q_BTNH, k_BSKH, v_BSKH, *rest):
  *positions, scale, window, cap = rest
  q, k, v, query_positions, key_positions, query_segments, key_segments = _prepare(q_BTNH, k_BSKH, v_BSKH, *positions)
  num_rows, num_queries, num_kv, group, head_dim = q.shape

  def query_block(index):
    q_block, pos, seg = (_blocks(x, index) for x in (q, query_positions, query_segments))

    def step(j, carry):
      k_block, v_block, key_pos, key_seg = (_blocks(x, j) for x in (k, v, key_positions, key_segments))

      def attend(carry):
        out, total, high = carry
        scores, mask = _block_scores(q_block, k_block, (pos, key_pos, seg, key_seg), scale, window, cap)
        new_high = jnp.maximum(high, jnp.max(scores, axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new_high[..., None]), 0)
        fade = jnp.exp(high - new_high)
        out = out * fade[..., None] + _dot('BKGIJ,BJKH->BKGIH', weights.astype(v.dtype), v_block)
        return out, total * fade + jnp.sum(weights, axis=-1), new_high

      return jax.lax.cond(_possible(pos, key_pos, seg, key_seg, window), attend, lambda carry: carry, carry)

    shape = (num_rows, num_kv, group, BLOCK)
    start = (jnp.zeros((*shape, head_dim), jnp.float32), jnp.zeros(shape, jnp.float32), jnp.full(shape, _NEGATIVE, jnp.float32))
    out, total, high = jax.lax.fori_loop(0, k.shape[1] // BLOCK, step, jax.tree.map(lambda x: _varying(x, q_block), start))
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return jnp.moveaxis(out, 3, 1).astype(q.dtype), high + jnp.log(jnp.maximum(total, 1e-30))

  out, lse = jax.lax.map(query_block, jnp.arange(num_queries // BLOCK))
  out = jnp.moveaxis(out, 0, 1).reshape(num_rows, num_queries, -1, head_dim)[:, :q_BTNH.shape[1]].reshape(q_BTNH.shape)
  return out, (q_BTNH, k_BSKH, v_BSKH, *positions, out, jnp.moveaxis(lse, 0, 3).reshape(num_rows, num_kv, group, num_queries))


def _blockwise_backward(scale, window, cap, saved, dout_BTNH):
  q_BTNH, k_BSKH, v_BSKH, *positions, out_BTNH, lse_BKGT = saved
  q, k, v, query_positions, key_positions, query_segments, key_segments = _prepare(q_BTNH, k_BSKH, v_BSKH, *positions)
  dout = _pad_to_blocks(dout_BTNH.reshape(*dout_BTNH.shape[:2], k.shape[2], -1, q.shape[-1]))
  out = _pad_to_blocks(out_BTNH.reshape(*out_BTNH.shape[:2], k.shape[2], -1, q.shape[-1]))
  delta_BKGT = jnp.einsum('BTKGH,BTKGH->BKGT', dout, out, preferred_element_type=jnp.float32)

  def key_block(dq, j):
    k_block, v_block, key_pos, key_seg = (_blocks(x, j) for x in (k, v, key_positions, key_segments))

    def step(i, carry):
      q_block, dout_block, pos, seg = (_blocks(x, i) for x in (q, dout, query_positions, query_segments))
      lse, delta = (jax.lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, axis=3) for x in (lse_BKGT, delta_BKGT))

      def accumulate(carry):
        dq, dk, dv = carry
        scores, mask = _block_scores(q_block, k_block, (pos, key_pos, seg, key_seg), scale, window, cap)
        weights = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0)
        dweights = _dot('BIKGH,BJKH->BKGIJ', dout_block, v_block)
        dscores = weights * (dweights - delta[..., None]) * scale
        if cap is not None:
          dscores = jnp.where(mask, dscores * (1 - jnp.square(scores / cap)), 0)
        low = dscores.astype(q.dtype)
        dq_block = _blocks(dq, i) + _dot('BKGIJ,BJKH->BIKGH', low, k_block)
        dq = jax.lax.dynamic_update_slice_in_dim(dq, dq_block, i * BLOCK, axis=1)
        return (dq, dk + _dot('BKGIJ,BIKGH->BJKH', low, q_block),
                dv + _dot('BKGIJ,BIKGH->BJKH', weights.astype(q.dtype), dout_block))

      return jax.lax.cond(_possible(pos, key_pos, seg, key_seg, window), accumulate, lambda carry: carry, carry)

    zeros = _varying(jnp.zeros(k_block.shape, jnp.float32), q)
    dq, dk, dv = jax.lax.fori_loop(0, q.shape[1] // BLOCK, step, (dq, zeros, zeros))
    return dq, (dk, dv)

  dq, (dk, dv) = jax.lax.scan(key_block, _varying(jnp.zeros(q.shape, jnp.float32), q), jnp.arange(k.shape[1] // BLOCK))
  dk, dv = (jnp.moveaxis(x, 0, 1).reshape(k.shape)[:, :k_BSKH.shape[1]].astype(k.dtype) for x in (dk, dv))
  dq = dq[:, :q_BTNH.shape[1]].reshape(q_BTNH.shape).astype(q.dtype)
  return dq, dk, dv, None, None, None, None


attend_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _attend_cudnn(q, k, v, query_positions, key_positions, query_segments, key_segments, *, scale, window, cap):
  """Use cuDNN's flash attention, with the visibility as a mask: fast, but the mask itself takes T^2 bits a row."""
  del cap  # `check` refuses a model that has one.
  mask = visible(query_positions[:, :, None], key_positions[:, None], query_segments[:, :, None], key_segments[:, None], window)
  out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=scale, implementation='cudnn')
  # A query that sees nothing gets an average of everything there; here it gets 0.
  return jnp.where(jnp.any(mask, axis=-1)[..., None, None], out, 0)


def resolve(layout: Layout, config: ModelConfig, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> Callable:
  """Return attend(q_BTNH, k_BTKH, v_BTKH, kind, cache) -> (out_BTNH, cache) for whole rows; `kind` is 'global' or 'local'."""
  kernel = choose(layout, positions_BT.shape[1])
  run = {'dense': attend_dense, 'cudnn': _attend_cudnn}.get(kernel)
  q_spec = layout.spec('batch', 'length', 'act_heads', None)
  kv_spec = layout.spec('batch', None, 'kv_heads', None)
  row_spec, whole_spec = layout.spec('batch', 'length'), layout.spec('batch', None)
  heads_split = bool(dict(layout.rules).get('act_heads')) and not dict(layout.rules).get('kv_heads')

  def attend(q_BTNH, k_BTKH, v_BTKH, kind, cache=None):
    options = {'scale': config.score_scale, 'window': config.layer_window(kind), 'cap': config.attention_softcap}

    @functools.partial(jax.shard_map, in_specs=(q_spec, kv_spec, kv_spec, row_spec, whole_spec, row_spec, whole_spec), out_specs=q_spec)
    def local(q, k, v, *positions):
      if heads_split and q.shape[2] != config.num_heads:
        # kv heads are whole here because they do not divide over `tensor`; take the one that each of this shard's query heads reads.
        heads = jax.lax.axis_index('tensor') * q.shape[2] + jnp.arange(q.shape[2])
        k, v = (x[:, :, heads // (config.num_heads // config.num_kv_heads)] for x in (k, v))
      k, v = _varying(k, q), _varying(v, q)
      if run is None:
        return attend_blockwise(q, k, v, *positions, *options.values())
      return run(q, k, v, *positions, **options)

    whole = [jax.reshard(x, whole_spec) for x in (positions_BT, segment_ids_BT)]
    k_BTKH, v_BTKH = (jax.reshard(x, kv_spec) for x in (k_BTKH, v_BTKH))
    return local(q_BTNH, k_BTKH, v_BTKH, positions_BT, whole[0], segment_ids_BT, whole[1]), cache

  return attend
