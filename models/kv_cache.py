"""The key-value cache of a layer: which position each place holds, and attention that reads and writes it.

A layer's cache is a pair of arrays [B, K, S, H], one row per sequence, in the order in which attention reads them. The place of position p
is p mod S: S is the longest sequence for a global layer and the window for a local one, where a new token replaces one that has left the
window. What a place holds follows from the sequence's length alone, so a row is reused without being cleared, and no mask is stored.

Deliberately absent: pages, and quantized keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from models import attention
from models.config import ModelConfig
from models.layers import softcap
from models.sharding import Layout

LayerCache = tuple[jax.Array, jax.Array]
Cache = tuple[LayerCache, ...]

_NEGATIVE = -1e30


def dtype(layout: Layout) -> jnp.dtype:
  """Return what keys and values are kept in: the compute dtype, but float32 on CPU, where to update bfloat16 is to convert all of it."""
  return jnp.dtype(jnp.float32) if jax.default_backend() == 'cpu' else layout.dtype


def size(config: ModelConfig, layer: int, max_length: int) -> int:
  """Return S, how many tokens a layer keeps of sequences of up to `max_length`."""
  return min(config.layer_window(config.layer_kind(layer)) or max_length, max_length)


def empty(config: ModelConfig, layout: Layout, num_rows: int, max_length: int) -> Cache:
  """Return a cache of no tokens for each layer; call inside jit, under a mesh."""
  spec = layout.spec('batch', 'kv_heads', None, None)

  def zeros(layer):
    shape = (num_rows, config.num_kv_heads, size(config, layer, max_length), config.head_dim)
    return jnp.zeros(shape, dtype(layout), out_sharding=spec)

  return tuple((zeros(layer), zeros(layer)) for layer in range(config.num_layers))


def held_positions(length_B: jax.Array, num_places: int) -> jax.Array:
  """Return the position that each place holds after `length` tokens, positions_BS; negative where it holds none."""
  last_B1 = length_B[:, None] - 1
  return last_B1 - (last_B1 - jnp.arange(num_places)[None]) % num_places


def attend_token(length_B: jax.Array, config: ModelConfig, layout: Layout) -> Callable:
  """Return attend(q_B1NH, k_B1KH, v_B1KH, kind, cache) -> (out_B1NH, cache) for one new token after `length_B` cached ones."""

  def local(q_BTNH, k_BTKH, v_BTKH, cache, length_B, *, cap):
    cache = tuple(_put(old, new, length_B) for old, new in zip(cache, (k_BTKH, v_BTKH), strict=True))
    k_BKSH, v_BKSH = (_own_heads(x, 1, q_BTNH, config) for x in cache)
    q_BKGH = q_BTNH.reshape(q_BTNH.shape[0], k_BKSH.shape[1], -1, config.head_dim).astype(k_BKSH.dtype)
    scores_BKGS = softcap(_dot('BKGH,BKSH->BKGS', q_BKGH, k_BKSH) * config.score_scale, cap)
    is_held_BS = held_positions(length_B + 1, k_BKSH.shape[2]) >= 0
    weights_BKGS = jax.nn.softmax(jnp.where(is_held_BS[:, None, None], scores_BKGS, _NEGATIVE), axis=-1)
    out_BKGH = _dot('BKGS,BKSH->BKGH', weights_BKGS.astype(v_BKSH.dtype), v_BKSH)
    return out_BKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype), cache

  def attend(q_BTNH, k_BTKH, v_BTKH, kind, cache):
    del kind  # A local layer's cache is no longer than its window.
    return _shard(functools.partial(local, cap=config.attention_softcap), layout)(q_BTNH, k_BTKH, v_BTKH, cache, length_B)

  return attend


def attend_chunk(start: jax.Array, length_B: jax.Array, is_first: bool, config: ModelConfig, layout: Layout) -> Callable:
  """Return attend(q_BTNH, k_BTKH, v_BTKH, kind, cache) -> (out_BTNH, cache) for the tokens from `start` on of sequences of `length_B`.

  `start` is the same in every row, and what comes before it is cached; with `is_first` it is 0, and the cache is not read. Tokens at or
  beyond a row's length are padding.
  """

  def local(q_BTNH, k_BTKH, v_BTKH, cache, length_B, start, *, window):
    num_rows, num_tokens = q_BTNH.shape[:2]
    positions_BT = jnp.broadcast_to(start + jnp.arange(num_tokens)[None], (num_rows, num_tokens))
    segments_BT = (positions_BT < length_B[:, None]).astype(jnp.int32)
    keys, values, key_positions, key_segments = k_BTKH, v_BTKH, positions_BT, segments_BT
    if not is_first:
      held_BS = held_positions(jnp.minimum(length_B, start), cache[0].shape[2])
      keys, values = (jnp.concatenate([jnp.swapaxes(old, 1, 2).astype(new.dtype), new], axis=1)
                      for old, new in zip(cache, (k_BTKH, v_BTKH), strict=True))
      key_positions = jnp.concatenate([held_BS, positions_BT], axis=1)
      key_segments = jnp.concatenate([(held_BS >= 0).astype(jnp.int32), segments_BT], axis=1)
    keys, values = (_own_heads(x, 2, q_BTNH, config) for x in (keys, values))
    arguments = (q_BTNH, keys, values, positions_BT, key_positions, segments_BT, key_segments)
    if attention.choose(layout, keys.shape[1]) == 'blockwise':
      out_BTNH = attention.attend_blockwise(*arguments, config.score_scale, window, config.attention_softcap)
    else:
      out_BTNH = attention.attend_dense(*arguments, scale=config.score_scale, window=window, cap=config.attention_softcap)
    return out_BTNH, tuple(_write(old, jnp.swapaxes(new, 1, 2), start, length_B) for old, new in zip(cache, (k_BTKH, v_BTKH), strict=True))

  def attend(q_BTNH, k_BTKH, v_BTKH, kind, cache):
    run = functools.partial(local, window=config.layer_window(kind))
    return _shard(run, layout, jax.P())(q_BTNH, k_BTKH, v_BTKH, cache, length_B, start)

  return attend


def _put(old_BKSH, new_BTKH, length_B):
  """Write each row's one new token in its place."""
  num_rows, _, num_places, _ = old_BKSH.shape
  # One update more than there are rows, which is dropped: XLA turns a scatter of a single update into a copy of the whole cache.
  new_BKH = jnp.pad(new_BTKH[:, 0].astype(old_BKSH.dtype), ((0, 1), (0, 0), (0, 0)))
  return old_BKSH.at[jnp.arange(num_rows + 1), :, jnp.pad(length_B % num_places, (0, 1))].set(new_BKH, mode='drop')


def _write(old_BKSH, new_BKTH, start, length_B):
  """Put the tokens from `start` on in their places; of those that share a place, the last."""
  held_BS = held_positions(jnp.minimum(length_B, start + new_BKTH.shape[2]), old_BKSH.shape[2])
  index_BS = (held_BS - start)[:, None, :, None]
  taken_BKSH = jnp.take_along_axis(new_BKTH, jnp.maximum(index_BS, 0), axis=2)
  return jnp.where(index_BS >= 0, taken_BKSH.astype(old_BKSH.dtype), old_BKSH)


def _shard(local: Callable, layout: Layout, *more_specs) -> Callable:
  """Run `local` on each device's own rows and heads."""
  heads = layout.spec('batch', 'length', 'act_heads', None)
  kv_heads = layout.spec('batch', 'length', 'kv_heads', None)
  cached = layout.spec('batch', 'kv_heads', None, None)
  return jax.shard_map(local, in_specs=(heads, kv_heads, kv_heads, (cached, cached), layout.spec('batch'), *more_specs),
                       out_specs=(heads, (cached, cached)))


def _own_heads(x, axis: int, q_BTNH, config: ModelConfig):
  """Return the kv heads read by this device's query heads, where kv heads are whole because they do not divide over `tensor`."""
  num_heads = q_BTNH.shape[2]
  if num_heads == config.num_heads or x.shape[axis] != config.num_kv_heads:
    return x
  heads = jax.lax.axis_index('tensor') * num_heads + jnp.arange(num_heads)
  return jnp.take(x, heads // (config.num_heads // config.num_kv_heads), axis=axis)


def _dot(expression, a, b):
  return jnp.einsum(expression, a, b, preferred_element_type=jnp.float32)
