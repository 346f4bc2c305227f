"""Slices in loops: the values of lax's, and no copy of the whole array in a compiled program."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from models import slices

ROWS, WIDTH = 4096, 128


def table(dtype):
  return jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, WIDTH)), dtype)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_values_are_those_of_the_array(dtype):
  x = table(dtype)
  np.testing.assert_array_equal(jax.jit(lambda x, i: slices.dynamic_slice(x, (i, 3), (2, 5)))(x, 7), x[7:9, 3:8])
  index = jnp.array([5, 0, ROWS - 1, 5])
  np.testing.assert_array_equal(jax.jit(slices.take_rows)(x, index), x[index])
  np.testing.assert_array_equal(slices.from_bits(slices.as_bits(x), dtype), x)


def total_by_blocks(x):
  return lax.fori_loop(0, ROWS // 8, lambda i, total: total + slices.dynamic_slice(x, (i * 8, 0), (8, WIDTH)).sum(0), jnp.zeros(WIDTH, x.dtype))


def rows_in_chunks(x):
  return lax.fori_loop(0, 8, lambda i, total: total + slices.take_rows(x, jnp.arange(16) * i).sum(0), jnp.zeros(WIDTH, x.dtype))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('program', [total_by_blocks, rows_in_chunks])
def test_no_copy_of_the_whole(program, dtype):
  memory = jax.jit(program).lower(table(dtype)).compile().memory_analysis()
  assert memory.temp_size_in_bytes < table(dtype).nbytes / 10
