"""The forward pass: what may change its results and what may not. Values against `transformers` are in test_families."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import lora, sharding, token_order, transformer
from models import params as params_lib
from models.sharding import Layout
from tests import tiny

CONFIG = tiny.config(num_layers=3)  # A repeat of (local, global) and a layer left over.


@functools.cache
def mesh():
  return sharding.make_mesh(devices=jax.devices()[:1])


@functools.cache
def params():
  return params_lib.init(transformer.declare(CONFIG), 0, mesh(), sharding.TRAIN)


@functools.cache
def compiled(layout=sharding.TRAIN):
  return jax.jit(lambda tree, *rows: transformer.forward(tree, *rows, CONFIG, layout)[0])


def hidden(tokens, positions, segments, layout=sharding.TRAIN, tree=None):
  with jax.set_mesh(mesh()):
    return np.asarray(compiled(layout)(tree or params(), *(jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments))))


def row(*documents, length, gap=0):
  """Lay documents into one row, `gap` padding tokens before each; padding holds a real token id and a nonsense position."""
  tokens, positions, segments = np.full(length, 7), np.full(length, 3), np.zeros(length)
  start = 0
  for number, document in enumerate(documents, start=1):
    start += gap
    place = slice(start, start + len(document))
    tokens[place], positions[place], segments[place] = document, np.arange(len(document)), number
    start = place.stop
  return tokens[None], positions[None], segments[None]


DOCUMENTS = [np.random.default_rng(seed).integers(0, 96, size) for seed, size in enumerate((20, 11))]


def test_changing_a_token_moves_only_its_own_document_and_its_future():
  first, second = DOCUMENTS
  before = hidden(*row(first, second, length=40))
  changed = first.copy()
  changed[10] = (changed[10] + 1) % 96
  after = hidden(*row(changed, second, length=40))
  np.testing.assert_array_equal(before[0, :10], after[0, :10])
  np.testing.assert_array_equal(before[0, 20:31], after[0, 20:31])
  assert np.all(np.any(before[0, 10:20] != after[0, 10:20], axis=-1))


@pytest.mark.parametrize('length, gap', [(31, 0), (48, 0), (48, 4)])
def test_padding_and_packing_are_irrelevant(length, gap):
  first, second = DOCUMENTS
  packed = hidden(*row(first, second, length=length, gap=gap))
  for start, document in ((gap, first), (2 * gap + 20, second)):
    alone = hidden(*row(document, length=len(document)))
    np.testing.assert_allclose(packed[0, start:start + len(document)], alone[0], atol=2e-5)


@pytest.mark.parametrize('layout', [
      Layout(scan=False), Layout(remat='full'), Layout(remat='gate,up,attention'), Layout(attention='blockwise')],
                         ids=['unrolled', 'remat', 'remat-names', 'blockwise'])
def test_layouts_compute_the_same(layout):
  place = row(*DOCUMENTS, length=40)

  def loss(tree, layout):
    with jax.set_mesh(mesh()):
      rows = [jnp.asarray(x, jnp.int32) for x in place]
      return jax.jit(jax.value_and_grad(lambda tree: jnp.sum(jnp.sin(transformer.forward(tree, *rows, CONFIG, layout)[0][:, :31]))))(tree)

  value, grads = loss(params(), layout)
  expected, expected_grads = loss(params(), sharding.TRAIN)
  assert float(value) == pytest.approx(float(expected), abs=1e-4)
  for (name, grad), want in zip(params_lib.named_leaves(grads), jax.tree.leaves(expected_grads)):
    np.testing.assert_allclose(grad, want, atol=2e-6 * np.abs(want).max(), err_msg=name)


def test_unstacked_layers_compute_the_same():
  tree = {**params(), 'blocks': params_lib.unstack(params()['blocks'])}
  place = row(*DOCUMENTS, length=40)
  np.testing.assert_allclose(hidden(*place, tree=tree)[:, :31], hidden(*place)[:, :31], atol=2e-5)


def test_bfloat16_compute_stays_near_float32():
  place = row(*DOCUMENTS, length=40)
  low = hidden(*place, layout=Layout(compute_dtype='bfloat16'))
  high = hidden(*place)
  assert low.dtype == jnp.bfloat16
  assert np.mean(np.abs(low[:, :31].astype(np.float32) - high[:, :31])) < 0.03


def test_remat_full_keeps_less():
  config = dataclasses.replace(CONFIG, num_layers=4, post_norms=False, qk_norm=False)

  def temporaries(layout):
    tree = params_lib.abstract(transformer.declare(config), mesh(), layout)
    rows = jax.ShapeDtypeStruct((4, 128), jnp.int32, sharding=jax.NamedSharding(mesh(), layout.spec('batch', 'length')))
    with jax.set_mesh(mesh()):
      grad = jax.jit(jax.grad(lambda tree, *rows: jnp.sum(transformer.forward(tree, *rows, config, layout)[0] ** 2)))
      return grad.lower(tree, rows, rows, rows).compile().memory_analysis().temp_size_in_bytes

  assert temporaries(Layout(remat='full')) < 0.7 * temporaries(Layout())


def test_what_a_layer_keeps_for_the_backward_pass_of_adapters():
  """Bytes for each token and layer, unrolled, in bfloat16 but for what norms keep in float32.

  Gate, up and their product; queries, keys, values, what attention gives; inputs of the projections: 1,600 numbers of 2 bytes. The stream
  before two norms, queries and keys before theirs: 288 of 4. Anything made in advance for all layers comes on top.
  """
  def temporaries(num_layers):
    config = tiny.config(num_layers=num_layers, embed_dim=64, mlp_dim=256, num_kv_heads=1, head_dim=32, max_length=512, window=64)
    layout, specs = Layout(scan=False, compute_dtype='bfloat16'), transformer.declare(config)
    tree = lora.beside(params_lib.abstract(specs, mesh(), layout, 'bfloat16'),
                       params_lib.abstract(lora.declare(specs, 4, lora.TARGETS), mesh(), layout), 1.0)
    rows = jax.ShapeDtypeStruct((1, 512), jnp.int32, sharding=jax.NamedSharding(mesh(), layout.spec('batch', 'length')))

    def loss(trainable, frozen, *rows):
      return jnp.sum(transformer.forward(params_lib.combine(trainable, frozen), *rows, config, layout)[0].astype(jnp.float32)**2)

    with jax.set_mesh(mesh()):
      grad = jax.jit(jax.grad(loss))
      return grad.lower(*params_lib.split(tree, lora.is_trainable), rows, rows, rows).compile().memory_analysis().temp_size_in_bytes

  assert (temporaries(4) - temporaries(2)) / (2 * 512) < 2 * 1600 + 4 * 288 + 350


@pytest.mark.parametrize('sizes', [{'seq': 2}, {'seq': 2, 'ulysses': 2}], ids=str)
def test_a_split_length_gives_the_same_loss_and_gradients(sizes):
  """A local and a global layer with sinks, the result of attention kept, against whole rows on one device."""
  config = tiny.config(attention_sinks=True)

  def loss(layout, mesh):
    tree = params_lib.init(transformer.declare(config), 0, mesh, layout)
    tree['blocks']['attention']['sinks'] += 0.5
    order_T = token_order.places(layout.order, 64, math.prod(mesh.shape[axis] for axis in layout.ring_axes))
    place = jax.NamedSharding(mesh, layout.spec('batch', 'length'))
    tokens, positions, segments = (jax.device_put(np.asarray(x, np.int32)[:, order_T], place) for x in row(*DOCUMENTS, length=64))

    def total(tree):
      hidden_BTD, _ = transformer.forward(tree, tokens, positions, segments, config, layout)
      return jnp.sum(jnp.sin(hidden_BTD) * (segments > 0)[..., None])

    with jax.set_mesh(mesh):
      return jax.device_get(jax.jit(jax.value_and_grad(total))(tree))

  value, grads = loss(Layout(order='zigzag', remat='attention,attention_lse'), sharding.make_mesh(
      devices=jax.devices()[:math.prod(sizes.values())], **sizes))
  expected, expected_grads = loss(sharding.TRAIN, mesh())
  assert float(value) == pytest.approx(float(expected), rel=2e-6)
  for (name, grad), want in zip(params_lib.named_leaves(grads), jax.tree.leaves(expected_grads), strict=True):
    assert np.linalg.norm(grad - want) <= 2e-6 * np.linalg.norm(want), name
  assert np.all(grads['blocks']['attention']['sinks'] != 0)


def test_sinks_are_declared_where_the_model_has_them():
  own = transformer.declare(tiny.config(attention_sinks=True))['blocks']['attention']
  assert own['sinks'].shape == (2, 4) and own['sinks'].init == 'zeros'
  assert 'sinks' not in transformer.declare(CONFIG)['blocks']['attention']


def test_a_mesh_that_attention_cannot_use():
  with pytest.raises(ValueError, match='mesh.ulysses=8 exchanges tokens for heads'):
    transformer.check(CONFIG, sharding.TRAIN, sharding.make_mesh(ulysses=8))


def test_unknown_remat_name():
  with pytest.raises(ValueError, match="layout.remat='gate,ups' names unknown intermediates \\['ups'\\]"):
    transformer.check(CONFIG, Layout(remat='gate,ups'))


def test_initial_values_do_not_depend_on_the_mesh_or_on_other_parameters():
  other = sharding.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
  split = params_lib.init(transformer.declare(CONFIG), 0, other, sharding.TRAIN)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), split, params())
  fewer = params_lib.init({'embedding': transformer.declare(CONFIG)['embedding']}, 0, mesh(), sharding.TRAIN)
  np.testing.assert_array_equal(fewer['embedding'], params()['embedding'])


def test_flops_by_hand():
  config = tiny.config(num_layers=1, layer_pattern=('global',))
  # Weights: embedding 96*32, q 32*64, k and v 32*32, o 64*32, MLP 3*32*48, norms; attention scores and values over half of 10 tokens.
  matrices = 96 * 32 + 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48
  norms = 5 * 32 + 2 * 16
  assert transformer.num_flops_per_token(config, 10) == 6 * (matrices + norms) + 3 * 4 * 5 * 64
  assert transformer.num_forward_flops_per_token(config, 10) == 2 * (matrices + norms) + 4 * 5 * 64
