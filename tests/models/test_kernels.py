"""Kernels of accelerators against attention written from the definition: TPUs' in interpret mode, cuDNN's with stand-ins for its primitives."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from models import ring_attention, token_order
from models.kernels import choice, cudnn, splash_tpu, xla
from tests import tiny

ROWS, QUERIES, KEYS, KV, GROUP, HEAD = 2, 40, 56, 2, 2, 8
BLOCK = 16  # Divides neither length.
TPU = xla.Kernel(functools.partial(splash_tpu.forward, block=BLOCK, interpret=True),
                 functools.partial(splash_tpu.backward, block=BLOCK, interpret=True))
VARIANTS = [(None, None), (9, 3.0)]


def by_definition(q, k, v, query_positions, key_positions, query_segments, key_segments, dout=None, lse=None, delta=None, *, scale,
                  window, cap):
  """One hop in float64: (out, lse) without dout, the three gradients with it."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  scores = np.einsum('btkgh,bskh->bkgts', q, k) * scale
  slope = 1
  if cap is not None:
    scores = cap * np.tanh(scores / cap)
    slope = 1 - (scores / cap)**2
  distance = query_positions[:, :, None] - key_positions[:, None]
  seen = (query_segments[:, :, None] == key_segments[:, None]) & (query_segments > 0)[:, :, None] & (distance >= 0)
  if window is not None:
    seen &= distance < window
  seen = np.broadcast_to(seen[:, None, None], scores.shape)
  if dout is None:
    high = np.max(scores, axis=-1, where=seen, initial=-1e9, keepdims=True)
    weights = np.exp(scores - high, where=seen, out=np.zeros_like(scores))
    total = np.sum(weights, axis=-1, keepdims=True)
    out = np.einsum('bkgts,bskh->btkgh', weights / np.maximum(total, 1e-300), v)
    return out, np.where(total > 0, high + np.log(np.maximum(total, 1e-300)), xla.NEGATIVE)[..., 0]
  weights = np.exp(scores - lse[..., None], where=seen, out=np.zeros_like(scores))
  dscores = weights * (np.einsum('btkgh,bskh->bkgts', dout, v) - delta[..., None]) * slope * scale
  return (np.einsum('bkgts,bskh->btkgh', dscores, k), np.einsum('bkgts,btkgh->bskh', dscores, q),
          np.einsum('bkgts,btkgh->bskh', weights, dout))


def packed(length, *rows):
  """Positions and segments of rows given as the lengths of their documents; 0 starts padding to the end."""
  positions, segments = np.zeros((2, len(rows), length), np.int32)
  for row, lengths in enumerate(rows):
    start = 0
    for segment, tokens in enumerate(lengths, start=1):
      positions[row, start:start + tokens], segments[row, start:start + tokens] = np.arange(tokens), segment
      start += tokens
  return positions, segments


def plain(length, start=0):
  return np.tile(np.arange(start, start + length, dtype=np.int32), (ROWS, 1)), np.ones((ROWS, length), np.int32)


def in_order(where, order):
  return tuple(x[:, order] for x in where)


SHUFFLE = np.random.default_rng(5).permutation(KEYS)
# (positions, segments) of queries and of keys.
CASES = {
    'later keys partly': (plain(QUERIES, 20), plain(KEYS)),
    'earlier keys whole': (plain(QUERIES, 100), plain(KEYS)),
    'packed': (packed(QUERIES, (5, 20, 15), (30, 10)), packed(KEYS, (5, 20, 15), (30, 26))),
    'padding': (packed(QUERIES, (33,), (1, 20)), packed(KEYS, (50,), (1, 20))),
    'any order': (in_order(plain(QUERIES, 8), SHUFFLE[SHUFFLE < QUERIES]), in_order(plain(KEYS), SHUFFLE)),
    'nothing': (plain(QUERIES), plain(KEYS, 500)),
    'a row of padding': (packed(QUERIES, (40,), ()), packed(KEYS, (56,), ())),
}


def operands(dtype=np.float32, queries=QUERIES, keys=KEYS, rows=ROWS):
  rng = np.random.default_rng(0)
  shapes = ((rows, queries, KV, GROUP, HEAD), (rows, keys, KV, HEAD), (rows, keys, KV, HEAD), (rows, queries, KV, GROUP, HEAD))
  q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
  # Of more keys than these: the log-sum-exp and delta that backward gets are those of the whole ring.
  lse = rng.uniform(3, 5, (rows, KV, GROUP, queries)).astype(np.float32)
  return q, k, v, dout, lse, rng.standard_normal(lse.shape).astype(np.float32)


def zeros(q, k, v):
  return tuple(np.zeros(x.shape, np.float32) for x in (q, k, v))


@functools.cache
def compiled(kernel, window, cap):
  options = {'scale': 0.35, 'window': window, 'cap': cap}
  return jax.jit(functools.partial(kernel.forward, **options)), jax.jit(functools.partial(kernel.backward, **options))


def check_case(kernel, case, window, cap, tolerance, dtype=np.float32, **sizes):
  (query_positions, query_segments), (key_positions, key_segments) = case
  q, k, v, dout, lse, delta = operands(dtype, **sizes)
  where, options = (query_positions, key_positions, query_segments, key_segments), {'scale': 0.35, 'window': window, 'cap': cap}
  forward, backward = compiled(kernel, window, cap)
  out, hop_lse = forward(q, k, v, *where)
  exact_out, exact_lse = by_definition(q, k, v, *where, **options)
  assert out.dtype == hop_lse.dtype == jnp.float32
  sees = exact_lse > xla.NEGATIVE
  np.testing.assert_array_equal(np.asarray(hop_lse)[~sees], np.float32(xla.NEGATIVE))
  np.testing.assert_array_equal(np.moveaxis(out, 1, 3)[~sees], 0)
  np.testing.assert_allclose(np.asarray(hop_lse)[sees], exact_lse[sees], atol=tolerance, rtol=tolerance)
  np.testing.assert_allclose(out, exact_out, atol=tolerance)
  lse = np.where(sees, lse, xla.NEGATIVE).astype(np.float32)
  sums = tuple(np.full(x.shape, 2, np.float32) for x in (q, k, v))
  exact = by_definition(q, k, v, *where, np.asarray(dout, np.float64), lse, delta, **options)
  for total, expected in zip(backward(q, k, v, *where, dout, lse, delta, sums), exact, strict=True):
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total - 2, expected, atol=tolerance * max(1, np.abs(expected).max()))
    np.testing.assert_array_equal(np.asarray(total)[expected == 0], 2)


@pytest.mark.parametrize('window, cap', VARIANTS)
@pytest.mark.parametrize('case', CASES)
def test_tpu_kernel_is_attention(case, window, cap):
  check_case(TPU, CASES[case], window, cap, 3e-6)


def test_tpu_kernel_keeps_16_bit_operands_and_sums_in_float32():
  # Rounding the weights and the scores' gradient, which are operands too, costs 2^-9 each.
  check_case(TPU, CASES['packed'], None, None, 8e-3, jnp.bfloat16)


def test_tpu_kernel_survives_scores_of_any_size():
  q, k, v, *_ = operands()
  (query_positions, query_segments), (key_positions, key_segments) = CASES['later keys partly']
  out, lse = compiled(TPU, None, None)[0](q * 1e4, k, v, query_positions, key_positions, query_segments, key_segments)
  exact = by_definition(q * 1e4, k, v, query_positions, key_positions, query_segments, key_segments, scale=0.35, window=None, cap=None)[1]
  assert np.isfinite(out).all() and np.abs(exact).max() > 1e4
  np.testing.assert_allclose(lse, exact, rtol=1e-6)


def test_tpu_blocks_that_nobody_sees_are_not_computed():
  q, k, v, *_ = operands()
  k[:, 32:], v[:, 32:] = np.nan, np.nan  # The last two blocks, later than every query but for a block's own reach.
  q_where, k_where = plain(QUERIES, -8), plain(KEYS)
  out, _ = compiled(TPU, None, None)[0](q, k, v, q_where[0], k_where[0], q_where[1], k_where[1])
  assert np.isfinite(out).all()


def hop(queries, keys, window=None):
  (query_positions, query_segments), (key_positions, key_segments) = queries, keys
  q, k, *_ = operands(queries=query_positions.shape[1], keys=key_positions.shape[1], rows=query_positions.shape[0])
  return splash_tpu._Hop.of(q, k, query_positions, key_positions, query_segments, key_segments, window, BLOCK)


@pytest.mark.parametrize('window, first, last, steps', [
    (None, [0, 0, 0, 0], [0, 1, 2, 3], 4),
    (16, [0, 0, 1, 2], [0, 1, 2, 3], 2),  # 15 back: the block before, but for its first token.
    (18, [0, 0, 0, 1], [0, 1, 2, 3], 3),
    (1, [0, 1, 2, 3], [0, 1, 2, 3], 1),
])
def test_tpu_walks_go_from_the_first_to_the_last_block_that_may_be_seen(window, first, last, steps):
  one = tuple(x[:1] for x in plain(64))
  cut = hop(one, one, window)
  np.testing.assert_array_equal(cut.query_tables[splash_tpu._FIRST:], [first, last])
  assert int(splash_tpu._Grid.along(cut, 'queries').shape[-1]) == int(splash_tpu._Grid.along(cut, 'keys').shape[-1]) == steps
  # What a block of keys is seen by mirrors it.
  np.testing.assert_array_equal(cut.key_tables[splash_tpu._FIRST:], 3 - np.array([last, first])[:, ::-1])


def test_tpu_a_hop_without_anything_visible_takes_one_step():
  one = tuple(x[:1] for x in plain(64))
  cut = hop(one, (one[0] + 64, one[1]))
  assert int(splash_tpu._Grid.along(cut, 'queries').shape[-1]) == 1


@pytest.mark.parametrize('queries, keys, window, whole', [
    (plain(16, 15), plain(16), None, True),
    (plain(16, 14), plain(16), None, False),  # The first query does not see the last key.
    (plain(16, 16), plain(16), 32, True),
    (plain(16, 16), plain(16), 31, False),  # Nor the last the first.
    (packed(16, (8, 8), (16,)), packed(16, (8, 8), (16,)), None, False),
    (plain(16, 20), packed(16, (15,), (15,)), None, False),
    (packed(16, (15,), (15,)), packed(16, (1,), (1,)), None, False),
])
def test_tpu_blocks_seen_whole(queries, keys, window, whole):
  cut = hop(queries, keys, window)
  assert bool(splash_tpu._whole(cut.query_tables[:, 0], cut.key_tables[:, 0], window)) == whole


def test_tpu_kernel_lowers_for_a_tpu_inside_shard_map():
  """Mosaic accepts it without a TPU, and its results vary over the mesh axes that its arguments vary over."""
  mesh = AbstractMesh((2,), ('seq',), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice('TPU v5', 1, 'tpu'))
  where = [jax.ShapeDtypeStruct((1, 300), np.int32)] * 4
  q, k = (jax.ShapeDtypeStruct((1, 300, *heads, 80), jnp.bfloat16) for heads in ((1, 2), (1,)))
  row = jax.ShapeDtypeStruct((1, 1, 2, 300), np.float32)
  sums = tuple(jax.ShapeDtypeStruct(x.shape, np.float32) for x in (q, k, k))
  options = {'scale': 1.0, 'window': 100, 'cap': 50.0}
  length, rows = P(None, 'seq'), P(None, None, None, 'seq')
  with jax.sharding.use_abstract_mesh(mesh):
    for function, in_specs, out_specs, arguments, kernels in (
        (splash_tpu.forward, (length,) * 7, (length, rows), (q, k, k, *where), 1),
        (splash_tpu.backward, (*(length,) * 8, rows, rows, length), length, (q, k, k, *where, q, row, row, sums), 2)):
      varying = []

      def local(*arguments):
        results = function(*arguments, **options)
        varying.extend(jax.typeof(x).manual_axis_type.varying for x in results)
        return results

      call = jax.jit(jax.shard_map(local, in_specs=in_specs, out_specs=out_specs))
      text = call.trace(*arguments).lower(lowering_platforms=('tpu',)).as_text()
      assert text.count('@tpu_custom_call') == kernels
      assert set(varying) == {frozenset({'seq'})}


def test_tpu_kernel_in_a_ring():
  """Four devices in zigzag order, packed and padded, give what one device gives."""
  size, length = 4, 64
  order = token_order.places('zigzag', length, size)
  rng = np.random.default_rng(1)
  q, k, v = (rng.standard_normal((1, length, heads, HEAD)).astype(np.float32) for heads in (2, 1, 1))
  where = packed(length, (37, 20))
  ring = ring_attention.Ring(axes=('seq',), size=size, routes=ring_attention.routes('zigzag', None, length // size, size), scale=0.35,
                             kernel=xla.Kernel(*(functools.partial(x, block=8, interpret=True) for x in splash_tpu.KERNEL)))

  def loss(attend, q, k, v, positions, segments):
    out = attend(q, k, v, positions, segments)
    return jnp.sum(jnp.sin(out)), out

  def local(ring, q, k, v, positions, segments):
    return ring_attention.attend(q, k, v, positions, positions, segments, segments, None, ring)

  # The interpreter's own loop does not say over which axes its counters vary; lowering above has the check on.
  mesh = jax.make_mesh((size,), ('seq',), axis_types=(AxisType.Explicit,), devices=jax.devices()[:size])
  split = jax.NamedSharding(mesh, P(None, 'seq'))
  around = jax.shard_map(functools.partial(local, ring), mesh=mesh, in_specs=P(None, 'seq'), out_specs=P(None, 'seq'), check_vma=False)
  run = lambda attend: jax.jit(jax.value_and_grad(functools.partial(loss, attend), argnums=(0, 1, 2), has_aux=True))
  with jax.set_mesh(mesh):
    (_, out), gradients = run(around)(*(jax.device_put(x[:, order], split) for x in (q, k, v, *where)))
  (_, expected_out), expected = run(functools.partial(local, ring_attention.Ring(scale=0.35)))(q, k, v, *where)
  for x, y in zip((out, *gradients), (expected_out, *expected), strict=True):
    np.testing.assert_allclose(x, np.asarray(y)[:, order], atol=3e-6)


# Stand-ins for cuDNN's primitives, from what they are documented to compute.


def _standin_scores(q, k, bias, is_causal, scale):
  scores = jnp.einsum('btnh,bsnh->bnts', q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2), preferred_element_type=jnp.float32) * scale
  if bias is not None:
    scores += bias.astype(jnp.float32)
  return jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -2e38) if is_causal else scores


def _standin_forward(q, k, v, bias, is_causal, scale):
  scores = _standin_scores(q, k, bias, is_causal, scale)
  out = jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(scores), jnp.repeat(v, q.shape[2] // v.shape[2], axis=2).astype(jnp.float32))
  return out.astype(q.dtype), jax.nn.logsumexp(scores, axis=-1)


def _standin_backward(q, k, v, bias, is_causal, scale, lse, out, dout):
  weights = jnp.exp(_standin_scores(q, k, bias, is_causal, scale) - lse[..., None])
  q32, k32, v32, out, dout = (x.astype(jnp.float32) for x in (q, k, v, out, dout))
  k32, v32 = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k32, v32))
  delta = jnp.einsum('btnh,btnh->bnt', dout, out)
  dscores = weights * (jnp.einsum('btnh,bsnh->bnts', dout, v32) - delta[..., None]) * scale
  dk, dv = (x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3]).sum(3)
            for x in (jnp.einsum('bnts,btnh->bsnh', dscores, q32), jnp.einsum('bnts,btnh->bsnh', weights, dout)))
  return tuple(x.astype(q.dtype) for x in (jnp.einsum('bnts,bsnh->btnh', dscores, k32), dk, dv))


STANDIN = cudnn.Primitives(_standin_forward, _standin_backward)
TILED = cudnn.kernel(STANDIN, tile=128)
LONG = {'queries': 200, 'keys': 300}
LONG_CASES = {
    'later keys partly': (plain(200, 120), plain(300)),
    'some whole and some out of the window': (plain(200, 400), plain(300)),
    'packed and padded': (packed(200, (90, 70), (150, 50)), packed(300, (90, 200), (150,))),
    'nothing': (plain(200), plain(300, 500)),
    'a row of padding': (packed(200, (200,), ()), packed(300, (300,), ())),
}


@pytest.mark.parametrize('case', LONG_CASES)
def test_cudnn_tiles_are_attention(case):
  check_case(TILED, LONG_CASES[case], 450, None, 2e-3, np.float16, **LONG)


def test_cudnn_ways_of_a_tile():
  below = np.tril(np.ones((4, 4), bool))
  ways = [cudnn._way(np.stack([first, second])) for first, second in (
      (~below & False, ~below & False), (below, below), (below | True, below | True), (below, below | True), (below & False, below | True))]
  assert [int(way) for way in ways] == [0, 3, 2, 1, 1]
  assert int(cudnn._way(np.tril(np.ones((1, 4, 6), bool)))) == 1  # What cuDNN means by causal there is not probed.


@pytest.mark.parametrize('order', ['contiguous', 'zigzag'])
def test_cudnn_needs_no_bias_for_rows_that_are_not_packed(order):
  length, size = 4096, 4
  positions = token_order.places(order, length, size).reshape(size, -1)
  half = cudnn._tile_size(positions.shape[1], cudnn.TILE)
  assert half == positions.shape[1] // 2
  ways = {int(cudnn._way((keys <= queries[:, None])[None])) for queries in positions.reshape(-1, half) for keys in positions.reshape(-1, half)}
  assert ways == {0, 2, 3}


@pytest.mark.parametrize('length, size', [(1, 128), (128, 128), (129, 128), (8192, 4096), (8200, 2176), (131072, 4096)])
def test_cudnn_tiles_split_each_half(length, size):
  assert cudnn._tile_size(length, 4096) == size


@pytest.mark.parametrize('size', [1.0, 1e-18])
def test_cudnn_gets_an_output_that_gives_delta(size):
  rng = np.random.default_rng(0)
  out, dout = (rng.standard_normal((1, 5, 2, 16)).astype(np.float32) for _ in range(2))
  dout *= size
  dout[0, 0] = 0
  delta = np.einsum('btnh,btnh->btn', dout, out)
  found = np.asarray(cudnn._output_for(jnp.asarray(dout), jnp.asarray(delta)))
  np.testing.assert_allclose(np.einsum('btnh,btnh->btn', dout, found), delta, rtol=1e-5)
  np.testing.assert_array_equal(found[0, 0], 0)
  assert (np.linalg.norm(found, axis=-1) <= np.linalg.norm(out, axis=-1) * 1.00001).all()


def test_cudnn_refuses_what_it_does_not_have():
  q, k, v, *_ = operands(jnp.bfloat16)
  (query_positions, query_segments), (key_positions, key_segments) = CASES['packed']
  where = (query_positions, key_positions, query_segments, key_segments)
  with pytest.raises(ValueError, match='no soft cap, but cap=5.0'):
    TILED.forward(q, k, v, *where, scale=1.0, window=None, cap=5.0)
  with pytest.raises(TypeError, match=r"operands of \('bfloat16', 'float16'\), got float32"):
    TILED.forward(q.astype(np.float32), k, v, *where, scale=1.0, window=None, cap=None)


def test_cudnn_primitives_lower_for_cuda(monkeypatch):
  """The private names and their arguments are those of this jax, and each direction has a call with a bias, a whole and a causal one."""
  monkeypatch.setattr(cudnn._cudnn(), 'check_cudnn_version', lambda: 91000)
  q, k, v, dout, lse, delta = operands(jnp.bfloat16)
  (query_positions, query_segments), (key_positions, key_segments) = CASES['packed']
  arguments = [q, k, v, query_positions, key_positions, query_segments, key_segments]
  for function, more, suffix in ((cudnn.KERNEL.forward, [], ''), (cudnn.KERNEL.backward, [dout, lse, delta, zeros(q, k, v)], 'Backward')):
    call = jax.jit(functools.partial(function, scale=1.0, window=None, cap=None))
    text = call.trace(*arguments, *more).lower(lowering_platforms=('cuda',)).as_text()
    assert sorted(re.findall(r'__cudnn\$\w+', text)) == [f'__cudnn$fmhaScaleBiasSoftmax{suffix}', *[f'__cudnn$fmhaSoftmax{suffix}'] * 2]
    assert sorted(re.findall(r'mask_type\\22: \\22(\w+)', text)) == ['CAUSAL', 'NO_MASK', 'NO_MASK']


def _inner(jaxpr):
  """The jaxprs in the equations of a jaxpr."""
  for equation in jaxpr.eqns:
    for x in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
      if hasattr(x, 'eqns') or hasattr(x, 'jaxpr'):
        yield x if hasattr(x, 'eqns') else x.jaxpr


def _largest(jaxpr):
  """The elements of the largest array that a jaxpr computes."""
  own = [x.aval.size for equation in jaxpr.eqns for x in equation.outvars if hasattr(x.aval, 'size')]
  return max([*own, *map(_largest, _inner(jaxpr))], default=0)


@pytest.mark.parametrize('kernel', [TILED, TPU], ids=['cudnn', 'tpu'])
def test_masks_are_not_kept_for_a_rematerialized_layer(kernel):
  """They depend on positions alone, so jax.checkpoint may take them out of a loop of known length and stack them: T S again."""
  length = 512
  ring = ring_attention.Ring(kernel=kernel)
  (positions, segments), q = packed(length, (300, 200)), jnp.ones((1, length, 1, 8), jnp.bfloat16)

  def loss(q):
    layer = jax.checkpoint(lambda q, _: (ring_attention.attend(q, q, q, positions, positions, segments, segments, None, ring), None))
    return jnp.sum(jax.lax.scan(layer, q, None, length=2)[0].astype(jnp.float32))

  assert 0 < _largest(jax.make_jaxpr(jax.grad(loss))(q).jaxpr) < length * length


# The probe.


def test_probe_passes_right_primitives_within_a_trace():
  """Also where a caller traces under a mesh: it computes for real."""
  found = []

  def traced(x):
    found.append(cudnn.problem(HEAD, 1, 2, 'bfloat16', STANDIN))
    return x

  with jax.set_mesh(jax.make_mesh((2,), ('seq',), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])):
    jax.eval_shape(traced, 0.0)
  assert found == [None]


@pytest.mark.parametrize('wrong, message', [
    (lambda out, lse, dq, dk, dv: (out, lse, 0 * dq, dk, dv), 'dq is off by 1 of its length, at most 0.02 is allowed'),
    (lambda out, lse, dq, dk, dv: (out, lse, dq, dk, dv * np.nan), 'dv is off by nan of its length'),
    (lambda out, lse, dq, dk, dv: (out * 1.1, lse, dq, dk, dv), 'out is off by 0.1 of its length'),
    (lambda out, lse, dq, dk, dv: (out, lse * np.nan, dq, dk, dv), 'the log-sum-exp is off by nan'),
    (lambda out, lse, dq, dk, dv: (out, lse.astype(jnp.bfloat16), dq, dk, dv), 'the log-sum-exp is off by 0.0077, at most 0.002 is allowed'),
], ids=['no dq', 'NaN dv', 'out', 'NaN lse', '16-bit lse'])
def test_probe_finds_wrong_numbers(wrong, message, monkeypatch):
  rng = np.random.default_rng(0)
  results = [jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in ((1, 512, 1, 2, 8), (1, 1, 2, 512), (1, 512, 1, 2, 8),
                                                                                      (1, 512, 1, 8), (1, 512, 1, 8))]
  monkeypatch.setattr(cudnn, '_in_hops', lambda kernel, *arguments: tuple(results) if kernel is xla.KERNEL else wrong(*results))
  assert message in cudnn.problem(HEAD, 1, 2, 'bfloat16', STANDIN)


@pytest.mark.parametrize('error', [AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError])
def test_probe_reports_a_refusal(error):
  def refuses(*arguments):
    raise error('head dim must be <= 128\nand more')

  assert cudnn.problem(HEAD, 1, 2, 'bfloat16', STANDIN._replace(forward=refuses)) == f'{error.__name__}: head dim must be <= 128'


# The choice.


@pytest.fixture
def fresh():
  choice.choose_inner.cache_clear()
  yield
  choice.choose_inner.cache_clear()


@pytest.mark.parametrize('platform, changes, dtype, asked, name, reason', [
    ('cpu', {}, 'float32', 'auto', 'blockwise', 'there is no kernel for cpu'),
    ('tpu', {'attention_softcap': 50.0}, 'float32', 'auto', 'pallas_tpu', 'the kernel for TPUs'),
    ('tpu', {}, 'bfloat16', 'blockwise', 'blockwise', 'asked for'),
    ('gpu', {'attention_softcap': 50.0}, 'bfloat16', 'auto', 'blockwise', 'cuDNN has no soft cap, and model.attention_softcap=50.0'),
    ('gpu', {}, 'float32', 'auto', 'blockwise', "cuDNN takes bfloat16 or float16, and layout.compute_dtype='float32'"),
    ('gpu', {}, 'bfloat16', 'auto', 'blockwise', 'cuDNN failed its probe: it is 2 off'),
])
def test_choice(platform, changes, dtype, asked, name, reason, fresh, monkeypatch):
  monkeypatch.setattr(cudnn, 'problem', lambda *heads: 'it is 2 off')
  chosen = choice.choose_inner(platform, tiny.config(**changes), dtype, asked)
  kernels = {'blockwise': xla.KERNEL, 'pallas_tpu': splash_tpu.KERNEL}
  assert (chosen.name, chosen.kernel, chosen.reason) == (name, kernels[name], reason)


def test_choice_of_cudnn_probes_once_and_says_so_once(fresh, monkeypatch, caplog):
  probed = []
  monkeypatch.setattr(cudnn, 'problem', lambda *heads: probed.append(heads))
  with caplog.at_level(logging.INFO):
    chosen = [choice.choose_inner('gpu', tiny.config(), 'bfloat16') for _ in range(2)]
  assert [x.kernel for x in chosen] == [cudnn.KERNEL] * 2
  assert probed == [(16, 2, 2, 'bfloat16')]
  assert [(x.levelname, x.getMessage()) for x in caplog.records] == [
      ('INFO', 'Attention runs as cudnn: cuDNN agrees with XLA in both directions on this device.')]


def test_choice_warns_of_a_fallback(fresh, monkeypatch, caplog):
  monkeypatch.setattr(cudnn, 'problem', lambda *heads: 'it is 2 off')
  with caplog.at_level(logging.INFO):
    choice.choose_inner('gpu', tiny.config(), 'bfloat16')
  assert [(x.levelname, x.getMessage()) for x in caplog.records] == [
      ('WARNING', 'Attention runs as blockwise: cuDNN failed its probe: it is 2 off.')]


@pytest.mark.parametrize('platform, asked, message', [
    ('gpu', 'cudnn', "layout.attention='cudnn' cannot compute this model here: cuDNN failed its probe: it is 2 off; use 'auto' or 'blockwise'"),
    ('cpu', 'pallas_tpu', 'it needs a TPU, and the devices are cpu'),
    ('cpu', 'flash', "layout.attention='flash' is no kernel of a ring; use 'auto' or one of"),
])
def test_choice_refuses_what_was_asked_for_but_cannot_be(platform, asked, message, fresh, monkeypatch):
  monkeypatch.setattr(cudnn, 'problem', lambda *heads: 'it is 2 off')
  with pytest.raises(ValueError, match=re.escape(message)):
    choice.choose_inner(platform, tiny.config(), 'bfloat16', asked)
