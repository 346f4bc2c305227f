"""Attention over whole rows: which kernel computes it, and how rows, lengths and heads lie on the mesh while it does.

A query sees a key of its own segment that is not later, and under a window not further back than it; nothing depends on an array index, so
packing and any order of tokens along a row are data, not code paths. Every kernel runs inside `shard_map`: each device has its own rows, heads
and tokens. Where the length is split, it is `ring_attention`'s. Rows that see nothing (padding) give exactly 0, never NaN.

Deliberately absent: attention against a cache (`kv_cache`).
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import math

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh

from models import ring_attention, sharding
from models.config import ModelConfig
from models.kernels import choice, xla
from models.kernels.xla import BLOCK, Kernel, visible
from models.layers import softcap
from models.ring_attention import Ring
from models.sharding import Layout

# What each kernel can do where; `check` reads it once, before tracing. All but 'dense' compute hops of a ring (`kernels.choice` has them).
KERNELS = {
    'dense': {'platforms': ('cpu', 'gpu', 'tpu'), 'softcap': True, 'split': False, 'memory': 'O(T^2)'},
    'blockwise': {'platforms': ('cpu', 'gpu', 'tpu'), 'softcap': True, 'split': True, 'memory': 'O(T)'},
    'pallas_tpu': {'platforms': ('tpu',), 'softcap': True, 'split': True, 'memory': 'O(T)'},
    'cudnn': {'platforms': ('gpu',), 'softcap': False, 'split': True, 'memory': 'O(T)'},
}


def support_table() -> str:
  """Return the table of kernels, platforms and features as text."""
  rows = [f'{"kernel":<11} {"cpu":<4} {"gpu":<4} {"tpu":<4} {"softcap":<8} {"split length":<13} {"window, packing, sinks":<23} memory']
  for name, kernel in KERNELS.items():
    has = ['yes' if value else '-' for value in (*(platform in kernel['platforms'] for platform in ('cpu', 'gpu', 'tpu')),
                                                 kernel['softcap'], kernel['split'])]
    rows.append(f'{name:<11} {has[0]:<4} {has[1]:<4} {has[2]:<4} {has[3]:<8} {has[4]:<13} {"yes":<23} {kernel["memory"]}')
  return '\n'.join(rows)


def check(layout: Layout, config: ModelConfig, platform: str, mesh: Mesh | None = None) -> None:
  """Raise ValueError unless the layout's kernel can compute this model on this platform, and on the mesh if one is given."""
  name = layout.attention
  if name not in ('auto', *KERNELS):
    raise ValueError(f"layout.attention={name!r} is unknown; use 'auto' or one of {tuple(KERNELS)}.\n{support_table()}")
  if name != 'auto':
    if platform not in KERNELS[name]['platforms']:
      raise ValueError(f'layout.attention={name!r} does not run on {platform}; choose another kernel:\n{support_table()}')
    if config.attention_softcap is not None and not KERNELS[name]['softcap']:
      raise ValueError(f'layout.attention={name!r} has no soft cap but model.attention_softcap={config.attention_softcap}; '
                       f'choose another kernel:\n{support_table()}')
  if name != 'dense':
    choice.choose_inner(platform, config, layout.compute_dtype, name)
  if mesh is not None:
    _check_mesh(layout, config, mesh)


def _check_mesh(layout: Layout, config: ModelConfig, mesh) -> None:
  num_shards = math.prod(mesh.shape[axis] for axis in layout.length_axes)
  if num_shards > 1 and layout.attention == 'dense':
    raise ValueError(f"layout.attention='dense' needs whole rows, but the mesh splits their length in {num_shards} over "
                     f"{layout.length_axes}; use 'auto' or a kernel for a split length:\n{support_table()}")
  degree = _ulysses_degree(layout, mesh)
  heads, kv_heads = _local_heads(layout, config, mesh)
  for name, count, fits in (('num_heads', heads, heads % degree == 0),
                            ('num_kv_heads', kv_heads, kv_heads % degree == 0 or degree % kv_heads == 0)):
    if not fits:
      raise ValueError(
          f'mesh.ulysses={degree} exchanges tokens for heads, and the {count} heads that a device has of model.{name}='
          f'{getattr(config, name)} cannot be dealt to {degree}; use mesh.ulysses={math.gcd(count, degree)} and a longer ring (mesh.seq).')


def _ulysses_degree(layout: Layout, mesh) -> int:
  return mesh.shape['ulysses'] if 'ulysses' in layout.length_axes else 1


def _local_heads(layout: Layout, config: ModelConfig, mesh) -> tuple[int, int]:
  """Return the query and key-value heads of a device; where kv heads are whole, it takes one for each of its query heads."""
  rules = dict(layout.rules)
  heads = config.num_heads // math.prod(mesh.shape[axis] for axis in rules.get('act_heads', ()))
  kv_shards = math.prod(mesh.shape[axis] for axis in rules.get('kv_heads', ()))
  return heads, heads if heads != config.num_heads and kv_shards == 1 else config.num_kv_heads // kv_shards


def hop_kernel(layout: Layout, config: ModelConfig, length: int, *, is_split: bool = False) -> Kernel | None:
  """Return what computes the hops for rows of `length` tokens, or None where `attend_dense` does it; the choice is logged once.

  Short rows are dense: from one block on the other kernels are faster (a LoRA step by 15 %, measured).

  Args:
    is_split: the length is split over devices, so that 'auto' is never dense.
  """
  if layout.attention == 'dense' or (layout.attention == 'auto' and length < BLOCK and not is_split):
    return None
  platform = sharding.current_mesh().abstract_device.platform
  return choice.choose_inner(platform, config, layout.compute_dtype, layout.attention).kernel


def attend_dense(q_BTNH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, *,
                 scale: float, window: int | None = None, cap: float | None = None, sinks_BTN: jax.Array | None = None) -> jax.Array:
  """Return out_BTNH by the full score matrix: the reference, O(T S) memory; scores and softmax in float32."""
  num_kv = k_BSKH.shape[2]
  q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], num_kv, -1, q_BTNH.shape[-1])
  scores_BKGTS = softcap(_dot('BTKGH,BSKH->BKGTS', q_BTKGH, k_BSKH) * scale, cap)
  mask_BTS = visible(query_positions_BT[:, :, None], key_positions_BS[:, None], query_segments_BT[:, :, None], key_segments_BS[:, None], window)
  mask_BKGTS = mask_BTS[:, None, None]
  scores_BKGTS = jnp.where(mask_BKGTS, scores_BKGTS, xla.NEGATIVE)
  high_BKGT1 = jnp.max(scores_BKGTS, axis=-1, keepdims=True)
  if sinks_BTN is not None:
    sinks_BKGT1 = jnp.moveaxis(sinks_BTN, 1, 2).reshape(high_BKGT1.shape)
    high_BKGT1 = jnp.maximum(high_BKGT1, sinks_BKGT1)
  weights_BKGTS = jnp.where(mask_BKGTS, jnp.exp(scores_BKGTS - high_BKGT1), 0)
  total_BKGT1 = jnp.sum(weights_BKGTS, axis=-1, keepdims=True)
  if sinks_BTN is not None:
    total_BKGT1 = total_BKGT1 + jnp.exp(sinks_BKGT1 - high_BKGT1)
  weights_BKGTS = weights_BKGTS / jnp.maximum(total_BKGT1, 1e-30)
  out_BTKGH = _dot('BKGTS,BSKH->BTKGH', weights_BKGTS.astype(v_BSKH.dtype), v_BSKH)
  return out_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype)


def _dot(expression, a, b):
  return jnp.einsum(expression, a, b, preferred_element_type=jnp.float32)


def resolve(layout: Layout, config: ModelConfig, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> Callable:
  """Return attend(q_BTNH, k_BTKH, v_BTKH, kind, cache, sinks_N) -> (out_BTNH, cache) for whole rows; `kind` is 'global' or 'local'.

  The result has the name 'attention' for rematerialization; a kernel for hops has 'attention_lse' too, and is not run again where both are
  kept.

  Raises:
    ValueError: the mesh splits rows or heads as this cannot be computed.
  """
  mesh = sharding.current_mesh()
  _check_mesh(layout, config, mesh)
  ring_size = math.prod(mesh.shape[axis] for axis in layout.ring_axes)
  ulysses = _ulysses_degree(layout, mesh)
  kernel = hop_kernel(layout, config, positions_BT.shape[1], is_split=ring_size * ulysses > 1)
  heads, _ = _local_heads(layout, config, mesh)
  takes_own_heads = heads != config.num_heads and not dict(layout.rules).get('kv_heads')

  def on_device(q, k, v, positions, segments, sinks, *, window):
    where = (positions, positions, segments, segments)
    options = {'scale': config.score_scale, 'window': window, 'cap': config.attention_softcap}
    if kernel is None:
      return checkpoint_name(attend_dense(q, k, v, *where, **options, sinks_BTN=sinks), 'attention')
    routes = ring_attention.routes(layout.order, window, positions.shape[1], ring_size)
    return ring_attention.attend(q, k, v, *where, sinks, Ring(layout.ring_axes, ring_size, routes, kernel=kernel, **options))

  def attend(q_BTNH, k_BTKH, v_BTKH, kind, cache=None, sinks_N=None):
    q_spec, kv_spec = (layout.spec('batch', 'length', name, None) for name in ('act_heads', 'kv_heads'))
    row_spec, sinks_spec = layout.spec('batch', 'length'), layout.spec('batch', 'length', 'act_heads')
    # A sink for each token: inside shard_map its gradient is then no sum over devices, which would be one more collective at any time.
    sinks_BTN = None if sinks_N is None else jnp.broadcast_to(sinks_N[None, None], q_BTNH.shape[:3], out_sharding=sinks_spec)

    @functools.partial(jax.shard_map, in_specs=(q_spec, kv_spec, kv_spec, row_spec, row_spec, sinks_spec), out_specs=q_spec)
    def local(q, k, v, *rest):
      if takes_own_heads:
        # kv heads are whole here because they do not divide over `tensor`; take the one that each of this shard's query heads reads.
        own = jax.lax.axis_index('tensor') * q.shape[2] + jnp.arange(q.shape[2])
        k, v = xla.varying(jnp.stack([k, v]), q)[:, :, :, own // (config.num_heads // config.num_kv_heads)]
      run = functools.partial(on_device, window=config.layer_window(kind))
      return run(q, k, v, *rest) if ulysses == 1 else ring_attention.over_heads(run, q, k, v, *rest, 'ulysses')

    return local(q_BTNH, k_BTKH, v_BTKH, positions_BT, segment_ids_BT, sinks_BTN), cache

  return attend
