"""The key-value cache of a layer: which position each place holds, and attention that reads and writes it.

A layer's cache is a pair of arrays [B, K, S, H], one row per sequence, in the order in which attention reads them. The place of position p
is p mod S: S is the longest sequence for a global layer and the window for a local one, where a new token replaces one that has left the
window. What a place holds follows from the sequence's length alone, so a row is reused without being cleared, and no mask is stored.

Where the layout splits 'cache' over N devices, tokens of global layers are dealt to them in turn: device i holds positions i, N + i, 2N + i,
..., and to it they are tokens 0, 1, 2, ... of a sequence of its own. So devices hold equal shares of every sequence, short prompts included,
and the chunks of a prompt are dealt alike, so that who computes a token's key and value also keeps them. Queries visit all devices, and what
each finds is merged by its log-sum-exp. Local layers are whole on each device: a window is short, and then nothing is sent.

Deliberately absent: pages (they would deal less evenly), and quantized keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import math

import jax
import jax.numpy as jnp

from models import attention, ring_attention, sharding
from models.config import ModelConfig
from models.layers import softcap
from models.ring_attention import Ring
from models.sharding import Layout

LayerCache = tuple[jax.Array, jax.Array]
Cache = tuple[LayerCache, ...]

_NEGATIVE = -1e30


def dtype(layout: Layout) -> jnp.dtype:
  """Return what keys and values are kept in: the compute dtype, but float32 on CPU, where to update bfloat16 is to convert all of it."""
  return jnp.dtype(jnp.float32) if jax.default_backend() == 'cpu' else layout.dtype


def axes(layout: Layout) -> tuple[str, ...]:
  """Return the mesh axes that split the cache of global layers."""
  return dict(layout.rules).get('cache', ())


def num_shards(layout: Layout, mesh) -> int:
  """Return over how many devices of the mesh a row's cache is split."""
  return math.prod(mesh.shape[axis] for axis in axes(layout))


def size(config: ModelConfig, layer: int, max_length: int) -> int:
  """Return S, how many tokens a layer keeps of sequences of up to `max_length`."""
  return min(config.layer_window(config.layer_kind(layer)) or max_length, max_length)


def empty(config: ModelConfig, layout: Layout, num_rows: int, max_length: int) -> Cache:
  """Return a cache of no tokens for each layer; call inside jit, under a mesh. The share of each device is rounded up to whole tokens."""
  shards = num_shards(layout, sharding.current_mesh())

  def zeros(layer):
    unit = shards if config.layer_kind(layer) == 'global' else 1
    num_places = -(-size(config, layer, max_length) // unit) * unit
    shape = (num_rows, config.num_kv_heads, num_places, config.head_dim)
    return jnp.zeros(shape, dtype(layout), out_sharding=_spec(layout, config.layer_kind(layer)))

  return tuple((zeros(layer), zeros(layer)) for layer in range(config.num_layers))


def held_positions(length_B: jax.Array, num_places: int) -> jax.Array:
  """Return the position that each place holds after `length` tokens, positions_BS; negative where it holds none."""
  last_B1 = length_B[:, None] - 1
  return last_B1 - (last_B1 - jnp.arange(num_places)[None]) % num_places


def attend_token(length_B: jax.Array, config: ModelConfig, layout: Layout) -> Callable:
  """Return attend(q_B1NH, k_B1KH, v_B1KH, kind, cache, sinks_N) -> (out_B1NH, cache) for one new token after `length_B` cached ones."""

  def local(q_BTNH, k_BTKH, v_BTKH, cache, length_B, sinks_N, *, split, cap):
    own_length_B, is_own_B = _share(length_B, split), _share(length_B + 1, split) > _share(length_B, split)
    num_places = cache[0].shape[2]
    place_B = jnp.where(is_own_B, own_length_B % num_places, num_places)
    cache = tuple(_put(old, new, place_B) for old, new in zip(cache, (k_BTKH, v_BTKH), strict=True))
    k_BKSH, v_BKSH = (_own_heads(x, 1, q_BTNH, config) for x in cache)
    q_BKGH = q_BTNH.reshape(q_BTNH.shape[0], k_BKSH.shape[1], -1, config.head_dim).astype(k_BKSH.dtype)
    scores_BKGS = softcap(_dot('BKGH,BKSH->BKGS', q_BKGH, k_BKSH) * config.score_scale, cap)
    is_held_BS = held_positions(_share(length_B + 1, split), num_places) >= 0
    scores_BKGS = jnp.where(is_held_BS[:, None, None], scores_BKGS, _NEGATIVE)
    out_BKGH = _dot('BKGS,BKSH->BKGH', jax.nn.softmax(scores_BKGS, axis=-1).astype(v_BKSH.dtype), v_BKSH)
    out_BNH = _merged(out_BKGH, jax.nn.logsumexp(scores_BKGS, axis=-1), sinks_N, split)
    return out_BNH[:, None].astype(q_BTNH.dtype), cache

  def attend(q_BTNH, k_BTKH, v_BTKH, kind, cache, sinks_N=None):
    # A local layer's cache is no longer than its window, so no mask tells the kinds apart.
    run = functools.partial(local, split=_split(layout, kind), cap=config.attention_softcap)
    return _shard(run, layout, kind)(q_BTNH, k_BTKH, v_BTKH, cache, length_B, sinks_N)

  return attend


def deal(x_BT: jax.Array, num_shards: int) -> jax.Array:
  """Put the tokens of a chunk in the order in which consecutive equal parts of it belong to the devices."""
  return jnp.swapaxes(x_BT.reshape(x_BT.shape[0], -1, num_shards), 1, 2).reshape(x_BT.shape)


def attend_chunk(start: jax.Array, length_B: jax.Array, is_first: bool, config: ModelConfig, layout: Layout) -> Callable:
  """Return attend(q_BTNH, k_BTKH, v_BTKH, kind, cache, sinks_N) -> (out_BTNH, cache) for tokens from `start` on of sequences of `length_B`.

  `start` is the same in every row, and what comes before it is cached; with `is_first` it is 0, and a cache that is whole is not read.
  Tokens at or beyond a row's length are padding. A layout that splits 'cache' splits 'length' over the same axes; the chunk is then in the
  order of `deal`, and its size and `start` are multiples of the number of devices.
  """
  split = axes(layout)

  def whole(q_BTNH, k_BTKH, v_BTKH, cache, length_B, sinks_N, start, *, window):
    """Attend with one's own queries to the whole chunk and a whole cache, and write the chunk there."""
    positions_BT, segments_BT = _chunk(start, length_B, k_BTKH.shape[1])
    own_BT = [_own_part(x, split) for x in (positions_BT, segments_BT)]
    k_BTKH, v_BTKH = (_undeal(x, split) for x in (k_BTKH, v_BTKH))
    keys, values, key_positions, key_segments = k_BTKH, v_BTKH, positions_BT, segments_BT
    if not is_first:
      held_BS = held_positions(jnp.minimum(length_B, start), cache[0].shape[2])
      keys, values = (jnp.concatenate([jnp.swapaxes(old, 1, 2).astype(new.dtype), new], axis=1)
                      for old, new in zip(cache, (k_BTKH, v_BTKH), strict=True))
      key_positions = jnp.concatenate([held_BS, positions_BT], axis=1)
      key_segments = jnp.concatenate([(held_BS >= 0).astype(jnp.int32), segments_BT], axis=1)
    keys, values = (_own_heads(x, 2, q_BTNH, config) for x in (keys, values))
    arguments = (q_BTNH, keys, values, own_BT[0], key_positions, own_BT[1], key_segments)
    options = {'scale': config.score_scale, 'window': window, 'cap': config.attention_softcap}
    sinks_BTN = None if sinks_N is None else jnp.broadcast_to(sinks_N[None, None], q_BTNH.shape[:3])
    kernel = attention.hop_kernel(layout, config, keys.shape[1])
    if kernel is None:
      out_BTNH = attention.attend_dense(*arguments, **options, sinks_BTN=sinks_BTN)
    else:
      out_BTNH = ring_attention.attend(*arguments, sinks_BTN, Ring(**options, kernel=kernel))
    return out_BTNH, tuple(_write(old, jnp.swapaxes(new, 1, 2), start, length_B) for old, new in zip(cache, (k_BTKH, v_BTKH), strict=True))

  def dealt(q_BTNH, k_BTKH, v_BTKH, cache, length_B, sinks_N, start):
    """Keep one's own part of the chunk, attend with all of the chunk's queries to what is kept here, and merge what the devices found."""
    shards, index = jax.lax.axis_size(split), jax.lax.axis_index(split)
    own_start, own_length_B = start // shards, _share(length_B, split)
    cache = tuple(_write(old, jnp.swapaxes(new, 1, 2), own_start, own_length_B) for old, new in zip(cache, (k_BTKH, v_BTKH), strict=True))
    held_BS = held_positions(jnp.minimum(own_length_B, own_start + k_BTKH.shape[1]), cache[0].shape[2])
    keys, values = (_own_heads(jnp.swapaxes(x, 1, 2).astype(q_BTNH.dtype), 2, q_BTNH, config) for x in cache)
    all_BTNH = jax.lax.all_gather(q_BTNH, split, axis=1, tiled=True)
    all_BTKGH = all_BTNH.reshape(*all_BTNH.shape[:2], keys.shape[2], -1, config.head_dim)
    positions_BT, segments_BT = (deal(x, shards) for x in _chunk(start, length_B, all_BTNH.shape[1]))
    kernel = attention.hop_kernel(layout, config, keys.shape[1], is_split=True)
    out_BTKGH, lse_BKGT = kernel.forward(
        all_BTKGH, keys, values, positions_BT, held_BS * shards + index, segments_BT, (held_BS >= 0).astype(jnp.int32),
        scale=config.score_scale, window=None, cap=config.attention_softcap)
    out_BTNH = _merged(out_BTKGH, jnp.moveaxis(lse_BKGT, 3, 1), sinks_N, split)
    size = q_BTNH.shape[1]
    return jax.lax.dynamic_slice_in_dim(out_BTNH, index * size, size, axis=1).astype(q_BTNH.dtype), cache

  def attend(q_BTNH, k_BTKH, v_BTKH, kind, cache, sinks_N=None):
    if _split(layout, kind):
      return _shard(dealt, layout, kind, jax.P())(q_BTNH, k_BTKH, v_BTKH, cache, length_B, sinks_N, start)
    k_BTKH, v_BTKH = (sharding.constrain(x, layout, 'batch', None, 'kv_heads', None) for x in (k_BTKH, v_BTKH))
    run = functools.partial(whole, window=config.layer_window(kind))
    return _shard(run, layout, kind, jax.P(), kv_length=None)(q_BTNH, k_BTKH, v_BTKH, cache, length_B, sinks_N, start)

  return attend


def _split(layout: Layout, kind: str) -> tuple[str, ...]:
  """Return the mesh axes over which tokens of this kind of layer are dealt."""
  return axes(layout) if kind == 'global' else ()


def _spec(layout: Layout, kind: str) -> jax.P:
  return layout.spec('batch', 'kv_heads', 'cache' if kind == 'global' else None, None)


def _share(length_B, split):
  """Return how many of the first `length` tokens this device has been dealt."""
  if not split:
    return length_B
  return (length_B + jax.lax.axis_size(split) - 1 - jax.lax.axis_index(split)) // jax.lax.axis_size(split)


def _merged(out, lse, sinks_N, split):
  """Return attention over what all devices of `split` hold, out[..., N, H], of what each found: out[..., K, G, H], lse[..., K, G]."""
  if split:
    out, lse = ring_attention.merge_across(out, lse, split)
  out, lse = out.reshape(*lse.shape[:-2], -1, out.shape[-1]), lse.reshape(*lse.shape[:-2], -1)
  if sinks_N is None:
    return out
  # A sink is a key of its own that is on no device, so it joins after the merge: it takes its share and adds no value.
  return out * jax.nn.sigmoid(lse - jnp.expand_dims(sinks_N, tuple(range(lse.ndim - 1))))[..., None]


def _chunk(start, length_B, num_tokens):
  """Return the positions and segments of a chunk, positions_BT and segments_BT; segment 0 is padding."""
  positions_BT = jnp.broadcast_to(start + jnp.arange(num_tokens)[None], (length_B.shape[0], num_tokens))
  return positions_BT, (positions_BT < length_B[:, None]).astype(jnp.int32)


def _own_part(x_BT, split):
  """Return the tokens of a chunk that this device has been dealt."""
  if not split:
    return x_BT
  return jax.lax.dynamic_index_in_dim(x_BT.reshape(x_BT.shape[0], -1, jax.lax.axis_size(split)), jax.lax.axis_index(split), 2, keepdims=False)


def _undeal(x_BTKH, split):
  """Put the tokens of a chunk, dealt over `split` and gathered, in the order of their positions."""
  if not split:
    return x_BTKH
  return jnp.swapaxes(x_BTKH.reshape(x_BTKH.shape[0], jax.lax.axis_size(split), -1, *x_BTKH.shape[2:]), 1, 2).reshape(x_BTKH.shape)


def _put(old_BKSH, new_BTKH, place_B):
  """Write each row's one new token in its place, or nowhere if that is beyond the last."""
  num_rows = old_BKSH.shape[0]
  # One update more than there are rows, which is dropped: XLA turns a scatter of a single update into a copy of the whole cache.
  new_BKH = jnp.pad(new_BTKH[:, 0].astype(old_BKSH.dtype), ((0, 1), (0, 0), (0, 0)))
  return old_BKSH.at[jnp.arange(num_rows + 1), :, jnp.pad(place_B, (0, 1))].set(new_BKH, mode='drop')


def _write(old_BKSH, new_BKTH, start, length_B):
  """Put the tokens from `start` on in their places; of those that share a place, the last."""
  held_BS = held_positions(jnp.minimum(length_B, start + new_BKTH.shape[2]), old_BKSH.shape[2])
  index_BS = (held_BS - start)[:, None, :, None]
  taken_BKSH = jnp.take_along_axis(new_BKTH, jnp.maximum(index_BS, 0), axis=2)
  return jnp.where(index_BS >= 0, taken_BKSH.astype(old_BKSH.dtype), old_BKSH)


def _shard(local: Callable, layout: Layout, kind: str, *more_specs, kv_length: str | None = 'length') -> Callable:
  """Run `local` on each device's own rows, heads and part of the cache."""
  heads = layout.spec('batch', 'length', 'act_heads', None)
  kv_heads = layout.spec('batch', kv_length, 'kv_heads', None)
  cached = _spec(layout, kind)
  return jax.shard_map(local, in_specs=(heads, kv_heads, kv_heads, (cached, cached), layout.spec('batch'), layout.spec('act_heads'), *more_specs),
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
