"""Ring attention against the definition in float64, its schedule, its program and what it keeps. Faults of others are in test_ring_faults."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from models import params as params_lib
from models import ring_attention, sharding, token_order, transformer
from models.kernels import xla
from tests import tiny
from tests.models import rings
from tests.models.rings import Case


@functools.cache
def long_row():
  inputs = rings.draw(4096, head_dim=64)
  return inputs, rings.by_definition(Case(), inputs)


@pytest.mark.parametrize('seq, order', [(1, 'contiguous'), (8, 'zigzag'), (8, 'striped'), (4, 'contiguous')])
def test_a_row_of_4096_tokens_equals_float64(seq, order):
  inputs, expected = long_row()
  rings.assert_near(rings.run(Case(seq=seq, order=order), inputs), expected)


EVERYTHING = {'rows': 2, 'heads': 4, 'kv_heads': 2, 'documents': [(100, 200, 7), (1, 40, 250)]}


@functools.cache
def packed(window=None, cap=None, sinks=False):
  inputs = rings.draw(320, sinks=sinks, **EVERYTHING)
  return inputs, rings.by_definition(Case(window=window, cap=cap, sinks=sinks), inputs)


@pytest.mark.parametrize('case', [
    Case(seq=2, order='zigzag'), Case(seq=4, order='zigzag'), Case(seq=8, order='contiguous'),
    Case(seq=8, order='zigzag', window=50, cap=3.0, sinks=True), Case(seq=8, order='contiguous', window=50, sinks=True),
    Case(seq=2, ulysses=2, order='zigzag', sinks=True), Case(ulysses=4, window=50), Case(seq=2, ulysses=2, tensor=2, order='zigzag'),
    Case(seq=2, tensor=4, order='zigzag', cap=3.0, sinks=True)], ids=str)
def test_packed_rows_of_grouped_heads_equal_float64(case):
  """Packing with padding, a window, a cap, sinks; a ring, heads for tokens, both, and kv heads split, whole or repeated."""
  inputs, expected = packed(case.window, case.cap, case.sinks)
  rings.assert_near(rings.run(case, inputs), expected, out=2e-6, dq=4e-6, dkv=1e-5)


def test_sinks_in_whole_rows_equal_float64():
  inputs, expected = packed(None, 3.0, True)
  for kernel in ('dense', 'blockwise'):
    rings.assert_near(rings.run(Case(cap=3.0, sinks=True, kernel=kernel), inputs), expected, out=2e-6, dq=4e-6, dkv=1e-5)


def test_a_ring_over_two_mesh_axes_equals_one_device():
  rules = tuple((name, {'length': ('fsdp', 'seq'), 'batch': ('data',)}.get(name, axes)) for name, axes in sharding.TRAIN.rules)
  layout = dataclasses.replace(sharding.TRAIN, rules=rules, order='zigzag')
  inputs, expected = packed()
  config = rings.config_of(Case(), inputs)
  mesh = sharding.make_mesh(fsdp=2, seq=2, devices=jax.devices()[:4])
  place_T = token_order.places('zigzag', 320, 4)
  with jax.set_mesh(mesh):
    put = lambda x, *axes: jax.device_put(x[:, place_T], jax.NamedSharding(mesh, layout.spec('batch', 'length', *axes)))
    arguments = [put(x, 'act_heads', None) for x in inputs[:3]] + [put(x) for x in inputs[4:6]]
    attend = jax.jit(lambda q, k, v, *where: rings.attention.resolve(layout, config, *where)(q, k, v, 'global')[0])
    out = np.asarray(attend(*arguments))
  np.testing.assert_allclose(out, expected.out[:, place_T], atol=2e-6)


def test_the_number_of_devices_changes_nothing_and_a_repetition_not_a_bit():
  inputs, _ = packed()
  results = [rings.run(Case(seq=seq, order='zigzag' if seq > 1 else 'contiguous', kernel='blockwise'), inputs) for seq in (1, 2, 4)]
  for name in ('out', 'dq', 'dk', 'dv'):
    one, *others = (getattr(result, name) for result in results)
    for other in others:
      assert np.linalg.norm(one - other) <= 2e-6 * np.linalg.norm(one), name
  again = rings.run(Case(seq=4, order='zigzag', kernel='blockwise'), inputs)
  jax.tree.map(np.testing.assert_array_equal, again, results[-1])


def test_bfloat16_gradients_have_their_operands_type():
  inputs = rings.draw(64)
  results = rings.run(Case(seq=2, order='zigzag', dtype='bfloat16'), inputs)
  assert {x.dtype for x in results[:4]} == {jnp.dtype(jnp.bfloat16)}


# Which hops there are.


@pytest.mark.parametrize('order, window, num_tokens, num_shards, expected', [
    ('zigzag', 5, 7, 1, ()), ('zigzag', None, 8, 4, ((1, 3),)), ('striped', 5, 512, 4, ((1, 3),)),
    # One token alone; 8 tokens reach 7 back into the shard before; 9 reach 8; 10 reach 9, two shards before; 17 to 25 need three hops.
    ('contiguous', 1, 8, 8, ()), ('contiguous', 8, 8, 8, ((1, 1),)), ('contiguous', 9, 8, 8, ((1, 1),)), ('contiguous', 10, 8, 8, ((1, 2),)),
    ('contiguous', 25, 8, 8, ((1, 3),)), ('contiguous', 1000, 8, 8, ((1, 7),)), ('contiguous', 57, 8, 8, ((1, 7),)),
    # Pieces of 4 tokens: 5 tokens reach one piece back, 6 two, 14 four and thus everywhere on a ring of 8.
    ('zigzag', 1, 8, 8, ()), ('zigzag', 5, 8, 8, ((1, 1), (-1, 1))), ('zigzag', 6, 8, 8, ((1, 2), (-1, 2))), ('zigzag', 14, 8, 8, ((1, 7),)),
    ('zigzag', 5, 8, 2, ((1, 1),)), ('zigzag', 5, 8, 3, ((1, 2),))])
def test_hops_by_hand(order, window, num_tokens, num_shards, expected):
  assert ring_attention.routes(order, window, num_tokens, num_shards) == expected


@pytest.mark.parametrize('order', ['contiguous', 'zigzag'])
@pytest.mark.parametrize('num_shards', [2, 5, 8])
@pytest.mark.parametrize('window', [1, 2, 5, 9, 12, 17, 30, 200])
def test_hops_bring_every_key_that_a_window_sees(order, num_shards, window):
  num_tokens = 8
  position = token_order.places(order, num_shards * num_tokens, num_shards).reshape(num_shards, num_tokens)
  legs = ring_attention.routes(order, window, num_tokens, num_shards)
  met = {0, *(step * hop % num_shards for step, hops in legs for hop in range(1, hops + 1))}
  assert len(met) == 1 + sum(hops for _, hops in legs)  # No device is met twice.
  for device, other in np.ndindex(num_shards, num_shards):
    distance = position[device][:, None] - position[other][None]
    if np.any((distance >= 0) & (distance < window)):
      assert (device - other) % num_shards in met


def test_zigzag_needs_two_pieces_of_a_shard():
  with pytest.raises(ValueError, match="layout.order 'zigzag' gives each of 4 devices two pieces, and 7 tokens of a shard cannot be halved"):
    ring_attention.routes('zigzag', 5, 7, 4)


def visits(order, num_shards, num_blocks):
  """Return how many pairs of blocks each device visits in each hop of a causal row, [devices, hops]."""
  length = num_shards * num_blocks * xla.BLOCK
  positions = token_order.places(order, length, num_shards).astype(np.int32)[None]
  ones = np.ones_like(positions)
  possible = np.asarray(jax.jit(xla.possible_blocks, static_argnums=4)(positions, positions, ones, ones, None))
  pairs = possible.reshape(num_shards, num_blocks, num_shards, num_blocks).sum((1, 3))
  return np.stack([[pairs[device, (device - hop) % num_shards] for hop in range(num_shards)] for device in range(num_shards)])


@pytest.mark.parametrize('num_shards, least_gain', [(8, 1.85), (64, 1.97)])
def test_zigzag_gives_every_device_the_same_work_in_every_hop(num_shards, least_gain):
  zigzag, contiguous = (visits(order, num_shards, 8) for order in ('zigzag', 'contiguous'))
  blocks = num_shards * 8
  assert zigzag.sum() == contiguous.sum() == blocks * (blocks + 1) // 2
  ideal = blocks**2 / 2 / num_shards
  makespan = zigzag.max(axis=0).sum()
  assert makespan / ideal == pytest.approx(1 + 1 / blocks) and makespan <= 1.02 * ideal
  assert contiguous.max(axis=0).sum() / makespan >= least_gain


def test_striped_is_fair_for_documents_shorter_than_a_row():
  striped, zigzag = (visits(order, 8, 8) for order in ('striped', 'zigzag'))
  assert striped.max(axis=0).sum() <= 1.15 * zigzag.max(axis=0).sum()


# What the program is.


LENGTH = 4096


@functools.cache
def traced(seq, remat='none', layers=1):
  """Return the gradient of a small model's forward pass on a ring, traced."""
  config = tiny.config(num_layers=layers, layer_pattern=('global',))
  mesh = sharding.make_mesh(seq=seq, devices=jax.devices()[:seq])
  layout = dataclasses.replace(sharding.TRAIN, order='zigzag', remat=remat)
  tree = params_lib.abstract(transformer.declare(config), mesh, layout)
  rows = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32, sharding=jax.NamedSharding(mesh, layout.spec('batch', 'length')))
  with jax.set_mesh(mesh):
    return jax.jit(jax.grad(lambda tree, *rows: jnp.sum(transformer.forward(tree, *rows, config, layout)[0]**2))).trace(tree, rows, rows, rows)


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      yield from equations(inner)


def test_a_kept_result_is_not_computed_again():
  """Forward sends keys, values and where they lie at two places of the program, the first hop and the loop's. Backward does too, and sends two
  gradients in the loop, before the last visit and home. All is there twice: one after the other on CPU, together elsewhere.
  """
  count = {remat: sum(equation.primitive.name == 'ppermute' for equation in equations(traced(4, remat).jaxpr.jaxpr))
           for remat in ('none', 'full', 'attention', 'attention,attention_lse')}
  assert count == {'none': 36, 'full': 48, 'attention': 48, 'attention,attention_lse': 36}


def test_the_program_does_not_grow_with_the_ring():
  sizes = [sum(1 for _ in equations(traced(seq).jaxpr.jaxpr)) for seq in (4, 8)]
  assert sizes[1] == pytest.approx(sizes[0], rel=0.01) and sizes[0] > 100


@pytest.mark.parametrize('remat', ['full', 'attention,attention_lse'])
def test_no_mask_is_kept_for_backward_and_nothing_is_quadratic(remat):
  """What depends on positions alone must not be computed up front and kept for all hops: at 1M tokens that once took 512 GiB a chip."""
  sizes = [variable.aval.size for equation in equations(traced(4, remat, layers=3).jaxpr.jaxpr) for variable in equation.outvars]
  assert max(sizes) <= 3 * LENGTH * 64  # Queries of three layers, stacked; a mask of a hop alone has 1024 x 1024.


def test_kernels_trace_for_every_platform():
  """On an accelerator the same function computes all heads at once."""
  inputs = rings.draw(64, heads=2)
  function, mesh, arguments, _ = rings.place(Case(seq=2, order='zigzag'), inputs)
  with jax.set_mesh(mesh):
    texts = [function.trace(*arguments).lower(lowering_platforms=(platform,)).as_text() for platform in ('cpu', 'tpu')]
  assert '1x32x2x8' in texts[1] and texts[0] != texts[1]
