"""Frozen weights in few bits: int8 with a scale for every output, and nf4 with one for every block of 64 (QLoRA, arXiv:2305.14314).

A `QuantArray` is a leaf of a parameter tree in the place of a frozen weight, alone or as the base of a LoraArray. Its arrays keep the
weight's axes in their order, so it is stacked, scanned and split as the weight is. `sharding.einsum` brings its bits together and multiplies
them out where a layer uses them, so that one layer's weights at a time exist in the compute dtype; a gradient goes through to the
activations only.

Bytes per weight: 1 + 4 / inputs for int8, 0.5 + 4 / 64 for nf4, 2 for bfloat16.

Deliberately absent: scales that are quantized themselves, quantized activations and caches, calibration on data, and training such weights.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import itertools
import math
import statistics

from flax import struct
import jax
import jax.numpy as jnp

KINDS = ('int8', 'nf4')
# Of the parameters that stay as they are beside quantized ones.
PLAIN_DTYPE = 'bfloat16'
BLOCK = 64
_INT8_MAX = 127


@struct.dataclass
class QuantArray:
  """A weight as values times scales.

  Attributes:
    values: int8, the weight's shape; or uint8 with the block axis as two, [..., blocks, block / 2, ...], each byte two numbers of nf4's code
      book, that of the block's first half in the low bits.
    scale: float32, [1 for every input axis, outputs] or [..., blocks, 1, ...].
    block_axis: where the values of a block lie in `values`, counted from the end as stacked layers come and go; None if there are no blocks.
  """
  values: jax.Array
  scale: jax.Array
  block_axis: int | None = struct.field(pytree_node=False, default=None)


@functools.cache
def nf4_code() -> tuple[float, ...]:
  """Return the 16 values of 4-bit NormalFloat, ascending (arXiv:2305.14314 sec. 3 and app. E).

  Quantiles of a normal distribution, 8 above zero and 7 below, scaled to end at 1 and -1, and zero itself.
  """
  normal = statistics.NormalDist()
  tail = 1 - (1 / 32 + 1 / 30) / 2
  above = [normal.inv_cdf(0.5 + (tail - 0.5) * i / 8) for i in range(1, 9)]
  below = [-normal.inv_cdf(0.5 + (tail - 0.5) * i / 7) for i in range(7, 0, -1)]
  return tuple(value / above[-1] for value in (*below, 0.0, *above))


def plain_dtype(dtype: str) -> str:
  """Return the dtype of what is not quantized where parameters are stored as `dtype`, a float dtype or one of `KINDS`."""
  return PLAIN_DTYPE if dtype in KINDS else dtype


@functools.partial(jax.jit, static_argnames=('kind', 'inputs', 'block_axis'))
def quantize(weight: jax.Array, kind: str, *, inputs: tuple[int, ...], block_axis: int) -> QuantArray:
  """Return the weight rounded to the nearest values of its kind; call under the mesh that it lies on.

  Args:
    weight: float.
    kind: one of `KINDS`.
    inputs: the axes that a matmul contracts, which share a scale in int8.
    block_axis: the axis, counted from the end, along which nf4 has its blocks, of 64 or the largest divisor of it that divides the axis.

  Raises:
    ValueError: an unknown kind, an odd axis, of which nf4 cannot put two values in a byte, or one whose blocks do not divide over the mesh.
  """
  if kind not in KINDS:
    raise ValueError(f'weights cannot be quantized to {kind!r}; use one of {KINDS}.')
  weight = weight.astype(jnp.float32)
  if kind == 'int8':
    scale = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True) / _INT8_MAX
    return QuantArray(jnp.round(weight / _divisor(scale)).astype(jnp.int8), scale)
  size = weight.shape[block_axis]
  block = math.gcd(size, BLOCK)
  if block % 2:
    raise ValueError(f'nf4 puts two values in a byte, and axis {block_axis} of a weight {weight.shape} is odd; use int8.')
  part = jax.typeof(weight).sharding.shard_shape(weight.shape)[block_axis]
  if part % block:
    raise ValueError(f'nf4 has blocks of {block} along axis {block_axis} of a weight {weight.shape}, and the mesh splits it in parts of {part}; '
                     'use int8, or split it in fewer parts.')
  blocks = weight.reshape(*weight.shape[:block_axis], size // block, block, *weight.shape[weight.ndim + block_axis + 1:])
  scale = jnp.max(jnp.abs(blocks), axis=block_axis, keepdims=True)
  ratio = blocks / _divisor(scale)
  code = nf4_code()
  index = sum((ratio > (low + high) / 2).astype(jnp.uint8) for low, high in itertools.pairwise(code))
  first, second = jnp.split(index, 2, axis=block_axis)
  return QuantArray(first | second << 4, scale, block_axis)


def _divisor(scale: jax.Array) -> jax.Array:
  return jnp.where(scale == 0, 1, scale)


@functools.partial(jax.jit, static_argnames='dtype')
def dequantize(weight: QuantArray, dtype: str | jnp.dtype) -> jax.Array:
  """Return the weight as an array."""
  values, scale, axis = weight.values, weight.scale, weight.block_axis
  if axis is None:
    return (values.astype(jnp.float32) * scale).astype(dtype)
  blocks = _look_up(jnp.concatenate([values & 15, values >> 4], axis=axis), nf4_code()) * scale
  return blocks.reshape(*blocks.shape[:axis - 1], -1, *blocks.shape[blocks.ndim + axis + 1:]).astype(dtype)


def _look_up(index: jax.Array, table: Sequence[float]) -> jax.Array:
  """Return table[index], choosing between halves bit by bit; a gather would cost far more for so small a table."""
  values = [jnp.float32(value) for value in table]
  for bit in range(len(table).bit_length() - 1):
    is_odd = (index >> bit) & 1 == 1
    values = [jnp.where(is_odd, odd, even) for even, odd in zip(values[::2], values[1::2])]
  return values[0]
