"""Attention of one hop on NVIDIA GPUs, by cuDNN's flash attention, where a probe on the device finds it right.

cuDNN knows neither positions nor segments, only "every query sees every key", "a query sees the keys up to its own index" and a bias that
takes memory of T S. So a hop is cut into tiles, what a tile's positions and segments amount to is found at run time, and each pair of tiles
is skipped, or computed by the one of the three that it is; the bias is no larger than a tile. Halves of a shard are whole tiles, so that
unpacked rows in contiguous or zigzag order need no bias. Tiles are merged in float32 by their log-sum-exp.

JAX's public function rounds the log-sum-exp to 16 bits and drops its gradient silently, so this calls what lies under it, which is private:
`PRIMITIVES`, nothing else, knows of it. Their results have 16 bits for each pair of tiles; sums over tiles and hops are float32.

What was not run here: cuDNN itself, for want of a GPU. Tests run everything else with stand-ins for the two primitives, and lower the
real ones for CUDA. On a GPU `problem` runs both directions against XLA before the first use, and a jax whose private names moved, a refusal of
cuDNN and a wrong number all count as a problem. Deliberately absent: a soft cap and 32-bit operands, which cuDNN does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import functools
import inspect
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from models.kernels import xla
from models.kernels.xla import NEGATIVE, Kernel, varying, visible
from models.ring_attention import merge

# Tokens of a tile at most: large beside the merges' traffic, while its bias takes 32 MiB a row.
TILE = 4096
# Tiles are a multiple of this: cuDNN's backward was seen to give NaN for lengths that are an odd multiple of 64 (jax issue 32242).
_UNIT = 128
DTYPES = ('bfloat16', 'float16')
# Of the probe. Rounding to 16 bits costs results 0.3 %; it would cost a log-sum-exp more than its tolerance, which is absolute, in nats.
_TOLERANCE = 0.02
_LSE_TOLERANCE = 0.002


class Primitives(NamedTuple):
  """What cuDNN computes, with 16-bit operands and results but for lse.

  Attributes:
    forward: (q_BTNH, k_BSKH, v_BSKH, bias_B1TS or None, is_causal, scale) -> (out_BTNH, lse_BNT float32).
    backward: (q_BTNH, k_BSKH, v_BSKH, bias_B1TS or None, is_causal, scale, lse_BNT, out_BTNH, dout_BTNH) -> (dq_BTNH, dk_BSKH, dv_BSKH).
  """
  forward: Callable
  backward: Callable


def _cudnn():
  # Imported when used: the module's name is private, and only the probe may find out that it moved.
  from jax._src.cudnn import fused_attention_stablehlo
  return fused_attention_stablehlo


def _cudnn_forward(q_BTNH, k_BSKH, v_BSKH, bias_B1TS, is_causal, scale):
  cudnn = _cudnn()
  mask_type = cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK
  return cudnn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, bias_B1TS, scale=scale, mask_type=mask_type, return_residual=True)


def _cudnn_backward(q_BTNH, k_BSKH, v_BSKH, bias_B1TS, is_causal, scale, lse_BNT, out_BTNH, dout_BTNH):
  cudnn = _cudnn()
  unused = jnp.zeros(0, q_BTNH.dtype)
  options = {
      'scale': scale, 'seed': 42, 'dropout_rate': 0.0, 'variadic_args': (bias_B1TS is not None, False), 'sliding_window_length': None,
      'mask_type': cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK, 'layout': cudnn.AttentionLayout.BTNH.value}
  if 'score_mod' in inspect.signature(cudnn.dot_product_attention).parameters:  # Since jax 0.12.
    options['score_mod'] = None
  bias = unused if bias_B1TS is None else bias_B1TS
  return cudnn._dot_product_attention_bwd_p_wrapper.bind(
      q_BTNH, k_BSKH, v_BSKH, bias, *[unused] * 6, lse_BNT, out_BTNH, dout_BTNH, **options)


PRIMITIVES = Primitives(_cudnn_forward, _cudnn_backward)


def kernel(primitives: Primitives, tile: int = TILE) -> Kernel:
  """Return the pair of functions that compute a hop with these primitives."""
  return Kernel(functools.partial(_forward, primitives, tile), functools.partial(_backward, primitives, tile))


def _forward(primitives, tile, q_BTKGH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, *, scale,
             window, cap):
  """Return (out_BTKGH, lse_BKGT); see `xla.Forward`."""
  tiles = _Tiles(tile, [_heads(q_BTKGH)], [k_BSKH, v_BSKH], (query_positions_BT, query_segments_BT), (key_positions_BS, key_segments_BS),
                 window, cap)
  q_BTNH = tiles.queries[0]

  def see(carry, q, k, v, mask_BTS, is_causal):
    out, lse_BNT = primitives.forward(q, k, v, _bias(mask_BTS, q.dtype), is_causal, scale)
    lse_BTN = lse_BNT.swapaxes(1, 2)
    if mask_BTS is not None:
      # A query that sees nothing gets an average of everything there, and in float16 a log-sum-exp above that of nothing.
      sees = jnp.any(mask_BTS, axis=2)[..., None]
      out, lse_BTN = jnp.where(sees[..., None], out, 0), jnp.where(sees, lse_BTN, NEGATIVE)
    return merge(*carry, out.astype(jnp.float32), lse_BTN)

  start = (jnp.zeros(q_BTNH.shape, jnp.float32), jnp.full(q_BTNH.shape[:3], NEGATIVE, jnp.float32))
  out_BTNH, lse_BTN = tiles.fold(see, start, (0, 0))
  num_rows, length, num_kv, group, _ = q_BTKGH.shape
  lse_BKGT = lse_BTN[:, :length].reshape(num_rows, length, num_kv, group).transpose(0, 2, 3, 1)
  return out_BTNH[:, :length].reshape(q_BTKGH.shape), lse_BKGT


def _backward(primitives, tile, q_BTKGH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS,
              dout_BTKGH, lse_BKGT, delta_BKGT, sums, *, scale, window, cap):
  """Return `sums` with this hop's (dq_BTKGH, dk_BSKH, dv_BSKH) added; see `xla.Backward`."""
  lse_BTN, delta_BTN = (_heads(x.transpose(0, 3, 1, 2)[..., None])[..., 0] for x in (lse_BKGT, delta_BKGT))
  # Nothing is seen where lse is NEGATIVE; the bias makes the weights 0 as long as lse is not far below it.
  lse_BTN = jnp.where(lse_BTN > NEGATIVE / 2, lse_BTN, 0)
  dout_BTNH = _heads(dout_BTKGH).astype(q_BTKGH.dtype)
  queries = [_heads(q_BTKGH), lse_BTN, _output_for(dout_BTNH, delta_BTN), dout_BTNH]
  tiles = _Tiles(tile, queries, [k_BSKH, v_BSKH], (query_positions_BT, query_segments_BT), (key_positions_BS, key_segments_BS), window, cap)

  def pull(carry, q, lse_BTN, out, dout, k, v, mask_BTS, is_causal):
    gradients = primitives.backward(q, k, v, _bias(mask_BTS, q.dtype), is_causal, scale, lse_BTN.swapaxes(1, 2), out, dout)
    return tuple(total + x.astype(jnp.float32) for total, x in zip(carry, gradients, strict=True))

  start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (tiles.queries[0], *tiles.keys[:2]))
  gradients = tiles.fold(pull, start, (0, 1, 1))
  return tuple(total + x[:, :total.shape[1]].reshape(total.shape) for total, x in zip(sums, gradients, strict=True))


def _heads(x_BTKGH):
  return x_BTKGH.reshape(*x_BTKGH.shape[:2], -1, x_BTKGH.shape[-1])


def _output_for(dout_BTNH, delta_BTN):
  """Return some out_BTNH of which the sum over H of dout times out is delta: cuDNN asks for the output, but only to compute that sum.

  It is the multiple of dout that does, never longer than the real output; all its terms have one sign, so rounding it hardly moves the sum.
  """
  largest = jnp.max(jnp.abs(dout_BTNH), axis=-1, keepdims=True).astype(jnp.float32)
  safe = jnp.where(largest > 0, largest, 1)
  direction = dout_BTNH.astype(jnp.float32) / safe
  length = jnp.sum(jnp.square(direction), axis=-1, keepdims=True)
  return (direction * (delta_BTN[..., None] / safe / jnp.maximum(length, 1))).astype(dout_BTNH.dtype)


def _bias(mask_BTS, dtype):
  # Not the least number of the dtype: a score is added to it.
  return None if mask_BTS is None else jnp.where(mask_BTS[:, None], 0, 0.7 * jnp.finfo(dtype).min).astype(dtype)


class _Tiles:
  """The arrays of a hop, padded to whole tiles of queries and keys; arrays have tokens second."""

  def __init__(self, tile, queries, keys, query_where, key_where, window, cap):
    """Take `where` as (positions, segments)."""
    if cap is not None:
      raise ValueError(f'cuDNN attention has no soft cap, but cap={cap} is asked for; use the blockwise kernel.')
    if str(queries[0].dtype) not in DTYPES:
      raise TypeError(f'cuDNN attention takes operands of {DTYPES}, got {queries[0].dtype}; use the blockwise kernel.')
    self.window = window
    self.query_size, self.key_size = (_tile_size(where[0].shape[1], tile) for where in (query_where, key_where))
    self.queries = [_pad(x, self.query_size) for x in (*queries, *query_where)]
    self.keys = [_pad(x, self.key_size) for x in (*keys, *key_where)]

  def fold(self, step, carry, sides):
    """Fold step(carry, *queries, *keys, mask_BTS or None, is_causal) over all pairs of tiles that see something.

    Args:
      carry: arrays of which a step gets and returns the part of its tile.
      sides: of each, 0 if it lies along queries, 1 along keys.
    """
    sizes, num_keys = (self.query_size, self.key_size), self.keys[0].shape[1] // self.key_size
    num_pairs = self.queries[0].shape[1] // self.query_size * num_keys

    def pair(state):
      index, carry = state
      places = index // num_keys, index % num_keys
      *queries, query_positions, query_segments = (_part(x, places[0], sizes[0]) for x in self.queries)
      *keys, key_positions, key_segments = (_part(x, places[1], sizes[1]) for x in self.keys)
      mask_BTS = visible(query_positions[:, :, None], key_positions[:, None], query_segments[:, :, None], key_segments[:, None], self.window)

      def computed(mask, is_causal):
        return lambda part: step(part, *queries, *keys, mask, is_causal)

      ways = [lambda part: part, computed(mask_BTS, False), computed(None, False), computed(None, True)]
      part = tuple(_part(x, places[side], sizes[side]) for x, side in zip(carry, sides, strict=True))
      part = lax.switch(_way(mask_BTS), ways, part)
      return index + 1, tuple(lax.dynamic_update_slice_in_dim(x, new, places[side] * sizes[side], 1)
                              for x, new, side in zip(carry, part, sides, strict=True))

    # Not a loop of known length: jax.checkpoint would take the masks, which depend on positions alone, out of it and keep all of them.
    return lax.while_loop(lambda state: state[0] < num_pairs, pair, (0, jax.tree.map(lambda x: varying(x, self.queries[0]), carry)))[1]


def _tile_size(length, tile):
  """Return the size of an even number of tiles, so that each half of a shard is a whole number of them."""
  num_tiles = 2 * -(-length // (2 * tile)) if length > _UNIT else 1
  return -(-length // (num_tiles * _UNIT)) * _UNIT


def _pad(x, size):
  return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))


def _part(x, index, size):
  return lax.dynamic_slice_in_dim(x, index * size, size, 1)


def _way(mask_BTS):
  """Return what a pair of tiles is: 0 nothing is visible, 1 a mask of its own, 2 all is visible, 3 the keys up to a query's own index."""
  way = jnp.where(jnp.any(mask_BTS), jnp.where(jnp.all(mask_BTS), 2, 1), 0)
  if mask_BTS.shape[1] != mask_BTS.shape[2]:
    return way  # The probe did not see what causal means here.
  return jnp.where(jnp.all(mask_BTS == jnp.tril(jnp.ones(mask_BTS.shape[1:], bool))[None]), 3, way)


KERNEL = kernel(PRIMITIVES)


def problem(head_dim: int, num_kv: int, group: int, dtype: str, primitives: Primitives = PRIMITIVES) -> str | None:
  """Return why these primitives cannot compute hops of such heads on the default device, or None if they can.

  Both directions run over two hops of a row that has every kind of tile, and are compared to XLA's in float32.
  """
  compare = functools.partial(_compare, head_dim, num_kv, group, dtype, kernel(primitives, tile=_UNIT))
  try:
    # In a thread of its own there is neither a trace nor a mesh of the caller's.
    with ThreadPoolExecutor(1) as thread:
      return thread.submit(compare).result()
  except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
    return f'{type(error).__name__}: {(str(error).splitlines() or ["no message"])[0]}'


def _compare(head_dim, num_kv, group, dtype, tested):
  rng = np.random.default_rng(0)
  length = 4 * _UNIT
  q, dout = (jnp.asarray(rng.standard_normal((1, length, num_kv, group, head_dim)), dtype) for _ in range(2))
  k, v = (jnp.asarray(rng.standard_normal((1, length, num_kv, head_dim)), dtype) for _ in range(2))
  positions = np.arange(length, dtype=np.int32)[None]
  # One document up to within the last tile, another one, and padding.
  segments = np.where(positions < length - 60, 1, np.where(positions < length - 20, 2, 0)).astype(np.int32)
  exact = _in_hops(xla.KERNEL, 1, *(x.astype(jnp.float32) for x in (q, k, v, dout)), positions, segments)
  got = _in_hops(tested, 2, q, k, v, dout, positions, segments)
  is_token = segments[0] > 0
  off = float(jnp.max(jnp.abs(got[1] - exact[1])[..., is_token]))
  if not off <= _LSE_TOLERANCE:
    return f'the log-sum-exp is off by {off:.2g}, at most {_LSE_TOLERANCE} is allowed'
  for name, ours, theirs in zip(('out', 'dq', 'dk', 'dv'), (got[0], *got[2:]), (exact[0], *exact[2:]), strict=True):
    off = float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))
    if not off <= _TOLERANCE:
      return f'{name} is off by {off:.2g} of its length, at most {_TOLERANCE} is allowed'
  return None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _in_hops(kernel, num_hops, q, k, v, dout, positions, segments):
  """Return (out_BTKGH, lse_BKGT, dq_BTKGH, dk_BSKH, dv_BSKH) of keys that come in several hops."""
  hops = list(zip(*(jnp.split(x, num_hops, axis=1) for x in (k, v, positions, segments)), strict=True))
  calls = [(q, k, v, positions, key_positions, segments, key_segments) for k, v, key_positions, key_segments in hops]
  options = {'scale': q.shape[-1]**-0.5, 'window': None, 'cap': None}
  out, lse_BTKG = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], NEGATIVE, jnp.float32)
  for call in calls:
    hop_out, hop_lse = kernel.forward(*call, **options)
    out, lse_BTKG = merge(out, lse_BTKG, hop_out, jnp.moveaxis(hop_lse, 3, 1))
  lse_BKGT, delta_BKGT = jnp.moveaxis(lse_BTKG, 1, 3), jnp.einsum('BTKGH,BTKGH->BKGT', out, dout.astype(jnp.float32))
  dq, dks, dvs = jnp.zeros(q.shape, jnp.float32), [], []
  for call in calls:
    zeros = jnp.zeros(call[1].shape, jnp.float32)
    dq, dk, dv = kernel.backward(*call, dout, lse_BKGT, delta_BKGT, (dq, zeros, zeros), **options)
    dks, dvs = [*dks, dk], [*dvs, dv]
  return out, lse_BKGT, dq, jnp.concatenate(dks, axis=1), jnp.concatenate(dvs, axis=1)
