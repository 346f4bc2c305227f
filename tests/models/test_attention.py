"""Attention against a loop written from the definition, dense against blockwise, and what the mask may not let through. Rings: test_ring_*."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention, ring_attention, sharding
from models.kernels import xla
from models.ring_attention import Ring
from models.sharding import Layout
from tests import tiny

ROWS, LENGTH = 2, 300  # More than one block, and no multiple of it.


def rows(length=LENGTH):
  """Packed rows with padding at either end: (positions, segments)."""
  segments = np.zeros((ROWS, length), np.int32)
  positions = np.zeros((ROWS, length), np.int32)
  for row, bounds in enumerate([(0, 5, 170, length - 9), (7, 60, 61, length)]):
    for segment, (start, end) in enumerate(zip(bounds, bounds[1:]), start=1):
      segments[row, start:end] = segment
      positions[row, start:end] = np.arange(end - start)

  return positions, segments


def by_definition(q, k, v, positions, segments, *, scale, window, cap):
  """Attention in float64, one query at a time."""
  out = np.zeros(q.shape, np.float64)
  group = q.shape[2] // k.shape[2]
  for b, t, n in np.ndindex(*q.shape[:3]):
    seen = (segments[b] == segments[b, t]) & (segments[b, t] > 0) & (positions[b] <= positions[b, t])
    if window is not None:
      seen &= positions[b, t] - positions[b] < window
    if seen.any():
      scores = k[b, seen, n // group].astype(np.float64) @ q[b, t, n] * scale
      scores = scores if cap is None else cap * np.tanh(scores / cap)
      weights = np.exp(scores - scores.max())
      out[b, t, n] = weights / weights.sum() @ v[b, seen, n // group]
  return out


@pytest.fixture(scope='module')
def inputs():
  rng = np.random.default_rng(0)
  q = rng.standard_normal((ROWS, LENGTH, 4, 8)).astype(np.float32)
  k, v = (rng.standard_normal((ROWS, LENGTH, 2, 8)).astype(np.float32) for _ in range(2))
  return (q, k, v, *rows())


CASES = [(None, None), (40, None), (None, 3.0), (40, 3.0)]


@functools.cache
def compiled(kernel, window, cap):
  def run(q, k, v, positions, segments):
    where = (positions, positions, segments, segments)
    if kernel == 'dense':
      return attention.attend_dense(q, k, v, *where, scale=0.4, window=window, cap=cap)
    return ring_attention.attend(q, k, v, *where, None, Ring(scale=0.4, window=window, cap=cap))

  def loss(q, k, v, positions, segments):
    out = run(q, k, v, positions, segments)
    return jnp.sum(jnp.sin(out)), out

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize('window, cap', CASES)
def test_kernels_follow_the_definition(inputs, window, cap):
  expected = by_definition(*inputs, scale=0.4, window=window, cap=cap)
  results = {kernel: compiled(kernel, window, cap)(*inputs) for kernel in ('dense', 'blockwise')}
  for (_, out), _ in results.values():
    np.testing.assert_allclose(out, expected, atol=2e-6)
  for dense, blockwise in zip(results['dense'][1], results['blockwise'][1]):
    np.testing.assert_allclose(blockwise, dense, atol=1e-6 * np.abs(dense).max())


@pytest.mark.parametrize('kernel', ['dense', 'blockwise'])
def test_padding_gives_zero_and_no_nan_even_for_a_row_of_nothing(inputs, kernel):
  q, k, v, positions, segments = inputs
  segments = segments.copy()
  segments[0] = 0
  (_, out), grads = compiled(kernel, None, None)(q, k, v, positions, segments)
  assert not np.any(out[0]) and not np.any(np.asarray(out)[segments == 0])
  for grad in grads:
    assert np.all(np.isfinite(grad)) and not np.any(grad[0])


@pytest.mark.parametrize('kernel', ['dense', 'blockwise'])
def test_documents_of_a_row_do_not_see_each_other(inputs, kernel):
  q, k, v, positions, segments = inputs
  other = segments[0] == 1
  k2, v2 = k.copy(), v.copy()
  k2[0, other] += 3
  v2[0, other] -= 5
  (_, out), _ = compiled(kernel, None, None)(q, k, v, positions, segments)
  (_, changed), _ = compiled(kernel, None, None)(q, k2, v2, positions, segments)
  np.testing.assert_array_equal(np.asarray(out)[0, ~other], np.asarray(changed)[0, ~other])
  assert np.any(np.asarray(out)[0, other] != np.asarray(changed)[0, other])


def test_order_along_the_row_is_irrelevant(inputs):
  q, k, v, positions, segments = inputs
  order = np.random.default_rng(1).permutation(LENGTH)
  (_, out), _ = compiled('blockwise', 40, None)(q, k, v, positions, segments)
  (_, moved), _ = compiled('blockwise', 40, None)(*(x[:, order] for x in inputs))
  np.testing.assert_allclose(np.asarray(out)[:, order], moved, atol=2e-6)


def test_blockwise_memory_is_linear_in_length():
  def temporaries(length):
    shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    where = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q, k, v, positions, segments):
      return jnp.sum(ring_attention.attend(q, k, v, positions, positions, segments, segments, None, Ring()))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, where, where).compile().memory_analysis().temp_size_in_bytes

  assert temporaries(16_384) < 2.3 * temporaries(8_192)


@pytest.mark.parametrize('kernel, platform, cap, message', [
    ('cudnn', 'cpu', None, "layout.attention='cudnn' does not run on cpu"),
    ('cudnn', 'gpu', 50.0, "layout.attention='cudnn' has no soft cap but model.attention_softcap=50.0"),
    ('pallas_tpu', 'gpu', None, "layout.attention='pallas_tpu' does not run on gpu"),
    ('flash', 'cpu', None, "layout.attention='flash' is unknown; use 'auto' or one of ('dense', 'blockwise', 'pallas_tpu', 'cudnn')"),
])
def test_a_kernel_that_cannot_is_refused_with_the_table(kernel, platform, cap, message):
  with pytest.raises(ValueError) as error:
    attention.check(Layout(attention=kernel), tiny.config(attention_softcap=cap), platform)
  assert message in str(error.value) and 'packing' in str(error.value)


def test_short_rows_are_dense_unless_they_are_split():
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    kernels = [attention.hop_kernel(Layout(attention=name), tiny.config(), length, is_split=is_split)
               for name, length, is_split in (('auto', 255, False), ('auto', 256, False), ('auto', 8, True), ('blockwise', 8, False),
                                              ('dense', 4096, False))]
  assert kernels == [None, xla.KERNEL, xla.KERNEL, xla.KERNEL, None]


@pytest.mark.parametrize('kernel, axes', [
    *[(kernel, axes) for kernel in ('dense', 'blockwise') for axes in ({'tensor': 2}, {'tensor': 4}, {'data': 2, 'fsdp': 2})],
    ('blockwise', {'seq': 2}), ('auto', {'seq': 2, 'ulysses': 2})])
def test_any_mesh_gives_the_same(inputs, kernel, axes):
  q, k, v, positions, segments = inputs
  rows = 2 * axes.get('data', 1)
  arrays = [np.concatenate([x] * (rows // ROWS)) for x in inputs]
  config = tiny.config(head_dim=8, query_scale=0.4, layer_pattern=('global',))

  def run(**sizes):
    count = int(np.prod(list(sizes.values()) or [1]))
    mesh = sharding.make_mesh(devices=jax.devices()[:count], **sizes)
    layout = dataclasses.replace(sharding.TRAIN, attention=kernel)
    if config.num_kv_heads % mesh.shape['tensor']:
      layout = dataclasses.replace(layout, rules=tuple((name, () if name == 'kv_heads' else to) for name, to in layout.rules))
    with jax.set_mesh(mesh):
      specs = [layout.spec('batch', 'length', heads, None) for heads in ('act_heads', 'kv_heads', 'kv_heads')]
      placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, [*specs, *[layout.spec('batch', 'length')] * 2])]
      attend = jax.jit(lambda q, k, v, p, s: attention.resolve(layout, config, p, s)(q, k, v, 'global')[0])
      return np.asarray(attend(*placed))

  np.testing.assert_allclose(run(**axes), run(), atol=2e-6)
