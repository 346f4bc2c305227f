"""Parts of arrays, read in a loop without a copy of the whole.

XLA's CPU backend slices 16-bit floats by converting the whole array to float32, or, if they are passed as integers, copies the integers. It
then lifts that out of the loop and keeps it as long as anything needs a part: for queries, keys, values and the embedding that was a fifth of
the memory of a training step. Tied to the index of the slice, the conversion stays in the loop and is done for the slice alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp


def as_bits(x: jax.Array) -> jax.Array:
  """Return 16-bit floats as integers, which XLA's CPU backend moves as they are; others unchanged."""
  return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: jax.Array, dtype) -> jax.Array:
  """Undo `as_bits`."""
  return lax.bitcast_convert_type(x, dtype) if jnp.dtype(dtype).itemsize == 2 else x


def dynamic_slice(x: jax.Array, starts: Sequence[jax.Array | int], sizes: Sequence[int]) -> jax.Array:
  """Return `lax.dynamic_slice(x, starts, sizes)`."""
  if x.dtype.itemsize != 2:
    return lax.dynamic_slice(x, starts, sizes)
  x, starts = lax.optimization_barrier((x, tuple(starts)))
  return from_bits(lax.dynamic_slice(as_bits(x), starts, sizes), x.dtype)


def take_rows(table_VD: jax.Array, index_T: jax.Array) -> jax.Array:
  """Return table_VD[index_T], for indices that are in the table."""
  if table_VD.dtype.itemsize != 2:
    return table_VD[index_T]

  def one_by_one(table_VD, index_T):
    return lax.map(lambda index: dynamic_slice(table_VD, (index, 0), (1, table_VD.shape[1]))[0], index_T)

  return lax.platform_dependent(table_VD, index_T, cpu=one_by_one, default=lambda table_VD, index_T: table_VD[index_T])
