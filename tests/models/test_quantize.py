"""Quantized frozen weights: values by hand, gradients through them, meshes, and the model that they leave."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decode, hf_weights, layers, lora, quantize, sharding, transformer
from models import params as params_lib
from models.quantize import QuantArray
from models.sharding import Layout, LoraArray
from tests import tiny

CONFIG = tiny.config(embed_dim=64, mlp_dim=128, head_dim=32, layer_pattern=('global',))
# As published (arXiv:2305.14314 app. E).
PUBLISHED = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
             -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
             0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


def mesh_of(count=1, **sizes):
  return sharding.make_mesh(devices=jax.devices()[:count], **sizes)


@functools.cache
def compiled(layout=sharding.TRAIN):
  def run(tree, tokens, positions, segments):
    hidden, _ = transformer.forward(tree, tokens, positions, segments, CONFIG, layout)
    return transformer.logits(tree, hidden, CONFIG, layout)

  return jax.jit(run)


@functools.cache
def weights():
  return params_lib.init(transformer.declare(CONFIG), 0, mesh_of(), sharding.TRAIN)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  path = tmp_path_factory.mktemp('model') / 'source'
  hf_weights.export(path, CONFIG, weights(), dtype='float32')
  return path


def plain(tree, dtype='float32'):
  """Return the tree with what its quantized weights stand for in their places."""
  return jax.tree.map(lambda leaf: quantize.dequantize(leaf, dtype) if params_lib.is_quantized(leaf) else leaf, tree,
                      is_leaf=params_lib.is_quantized)


def quantized(kind, mesh, layout=sharding.TRAIN):
  """Return the float32 model with the blocks' matrices quantized."""
  tree = params_lib.init(transformer.declare(CONFIG), 0, mesh, layout)
  with jax.set_mesh(mesh):
    return params_lib.map_named(lambda name, spec, leaf: params_lib.stored(leaf, name, spec, kind), transformer.declare(CONFIG), tree,
                                is_leaf=lambda leaf: isinstance(leaf, params_lib.ParamSpec))


def arrays(mesh, layout=sharding.TRAIN):
  tokens = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (4, 16)).astype(np.int32)
  parts = (tokens, np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape), np.ones_like(tokens))
  with jax.set_mesh(mesh):
    return [jax.reshard(jnp.asarray(part), layout.spec('batch', 'length')) for part in parts]


def logits(tree, mesh):
  with jax.set_mesh(mesh):
    return np.asarray(compiled()(tree, *arrays(mesh)))


# Values.


def test_the_code_book_is_the_published_one():
  np.testing.assert_allclose(quantize.nf4_code(), PUBLISHED, atol=2e-7)


def test_int8_by_hand():
  weight = jnp.array([[2.54, -0.5, 0.0], [-1.0, 0.25, 0.0]])
  with jax.set_mesh(mesh_of()):
    made = quantize.quantize(weight, 'int8', inputs=(0,), block_axis=-1)
    np.testing.assert_array_equal(made.values, [[127, -127, 0], [-50, 64, 0]])
    np.testing.assert_allclose(made.scale, [[0.02, 0.5 / 127, 0]], rtol=1e-6)
    np.testing.assert_allclose(quantize.dequantize(made, 'float32'), [[2.54, -0.5, 0], [-1.0, 64 * 0.5 / 127, 0]], rtol=1e-6)


def test_nf4_by_hand():
  # One column of 4: blocks of 4 along the first axis; 2 is 1.0, -2 is -1.0, 0.5 / 2 is nearest to 0.2461, and 0.1 / 2 to 0.0796.
  weight = jnp.array([[2.0], [-2.0], [0.5], [0.1]])
  with jax.set_mesh(mesh_of()):
    made = quantize.quantize(weight, 'nf4', inputs=(0,), block_axis=-2)
    assert made.values.shape == (1, 2, 1) and made.values.dtype == jnp.uint8
    np.testing.assert_array_equal(made.values[0, :, 0], [15 | 10 << 4, 0 | 8 << 4])
    np.testing.assert_allclose(quantize.dequantize(made, 'float32')[:, 0], np.multiply(2, [1, -1, PUBLISHED[10], PUBLISHED[8]]), rtol=1e-6)


@pytest.mark.parametrize('shape, axis, blocks', [((3, 128), -1, 2), ((192, 5), -2, 3), ((2, 3, 80), -1, 5), ((2, 96, 4), -2, 3)])
def test_nf4_is_the_nearest_of_its_block(shape, axis, blocks):
  weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  weight.flat[0] = 0
  with jax.set_mesh(mesh_of()):
    made = quantize.quantize(jnp.asarray(weight), 'nf4', inputs=(0,), block_axis=axis)
    got = np.asarray(quantize.dequantize(made, 'float32'))
  rows = np.moveaxis(weight.astype(np.float64), axis, -1).reshape(-1, blocks, shape[axis] // blocks)
  top = np.abs(rows).max(-1, keepdims=True)
  choices = top[..., None] * np.array(PUBLISHED)
  nearest = np.take_along_axis(choices, np.abs(rows[..., None] - choices).argmin(-1)[..., None], -1)[..., 0]
  np.testing.assert_allclose(np.moveaxis(got, axis, -1).reshape(rows.shape), nearest, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('kind', quantize.KINDS)
def test_zeros_stay_zeros(kind):
  with jax.set_mesh(mesh_of()):
    made = quantize.quantize(jnp.zeros((4, 8)), kind, inputs=(0,), block_axis=-1)
    np.testing.assert_array_equal(made.values, {'int8': 0, 'nf4': 7 | 7 << 4}[kind])
    np.testing.assert_array_equal(quantize.dequantize(made, 'bfloat16'), np.zeros((4, 8)))


def test_bad_input():
  with jax.set_mesh(mesh_of()):
    with pytest.raises(ValueError, match=r"quantized to 'int3'; use one of \('int8', 'nf4'\)"):
      quantize.quantize(jnp.zeros((4, 8)), 'int3', inputs=(0,), block_axis=-1)
    with pytest.raises(ValueError, match=r'two values in a byte, and axis -1 of a weight \(4, 5\) is odd; use int8'):
      quantize.quantize(jnp.zeros((4, 5)), 'nf4', inputs=(0,), block_axis=-1)
  mesh = mesh_of(2, tensor=2)
  with jax.set_mesh(mesh):
    split = jax.reshard(jnp.zeros((4, 64)), jax.sharding.PartitionSpec(None, 'tensor'))
    with pytest.raises(ValueError, match=r'blocks of 64 along axis -1 of a weight \(4, 64\), and the mesh splits it in parts of 32; use int8'):
      quantize.quantize(split, 'nf4', inputs=(0,), block_axis=-1)


# In a model.


@pytest.mark.parametrize('kind', quantize.KINDS)
def test_loading_quantizes_the_blocks_and_memory_is_as_declared(kind, files):
  mesh = mesh_of()
  _, tree = hf_weights.load(files, mesh, sharding.TRAIN, kind)
  declared = params_lib.abstract(transformer.declare(CONFIG), mesh, sharding.TRAIN, kind)
  assert jax.tree.structure(declared) == jax.tree.structure(tree)
  for (name, wanted), got in zip(params_lib.named_leaves(declared), jax.tree.leaves(tree), strict=True):
    assert (got.shape, got.dtype, got.sharding) == (wanted.shape, wanted.dtype, wanted.sharding), name
  matrices = [leaf for leaf in jax.tree.leaves(tree, is_leaf=params_lib.is_quantized) if params_lib.is_quantized(leaf)]
  assert len(matrices) == 7 and tree['embedding'].dtype == jnp.bfloat16
  count = sum(params_lib.count(plain({'w': leaf})) for leaf in matrices)
  stored_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(matrices))
  # A scale for 64 inputs or more, and one for 32 or 64 values of a block.
  assert stored_bytes / count < {'int8': 1.07, 'nf4': 0.6}[kind]


@pytest.mark.parametrize('kind', quantize.KINDS)
def test_meshes_compute_the_same(kind):
  mesh = mesh_of(4, fsdp=2, tensor=2)
  got = logits(quantized(kind, mesh), mesh)
  one = quantized(kind, mesh_of())
  np.testing.assert_allclose(got, logits(plain(one), mesh_of()), atol=1e-4)


def test_bits_travel_and_not_what_they_stand_for():
  mesh = mesh_of(2, fsdp=2)
  weight = quantized('int8', mesh)['blocks']['mlp']['up']
  with jax.set_mesh(mesh):
    x_BTD = jax.reshard(jnp.ones((2, 8, CONFIG.embed_dim)), Layout().spec('batch', 'length', None))
    one_layer = jax.tree.map(lambda leaf: leaf[0], weight)
    run = jax.jit(lambda x_BTD, weight: sharding.einsum('BTD,DF->BTF', x_BTD, weight, Layout(), 'batch', 'length', 'act_mlp'))
    program = run.lower(x_BTD, one_layer).compile().as_text()
  gathers = [line for line in program.splitlines() if ' all-gather(' in line]
  assert len(gathers) == 1 and 's8[64,128]' in gathers[0]


@pytest.mark.parametrize('adapted, changes', [
    (('q', 'o', 'gate', 'down'), {}), (('q', 'o', 'gate', 'down'), {'mlp_chunk': 8, 'remat': 'full'}), ((), {'mlp_chunk': 8})], ids=str)
def test_gradients_go_through_to_adapters_and_activations(adapted, changes):
  """Over a quantized base, everything has the gradient that it has beside the weights it stands for."""
  mesh, layout = mesh_of(), dataclasses.replace(sharding.TRAIN, **changes)
  tree = quantized('nf4', mesh)
  if adapted:
    tree = lora.attach(tree, transformer.declare(CONFIG), rank=2, alpha=4.0, targets=adapted, rank_stabilized=True, seed=1, mesh=mesh,
                       layout=layout)
    tree = params_lib.map_named(lambda name, leaf: leaf + 0.1 if name.endswith('/b') else leaf, tree)
  parts = arrays(mesh)

  def is_trained(name):
    return lora.is_trainable(name) or name == 'embedding'

  def loss(trainable, frozen):
    params = params_lib.combine(trainable, frozen)
    hidden, _ = transformer.forward(params, *parts, CONFIG, layout)
    return jnp.sum(jnp.sin(3 * hidden))

  with jax.set_mesh(mesh):
    got = jax.jit(jax.grad(loss))(*params_lib.split(tree, is_trained))
    wanted = jax.jit(jax.grad(loss))(*params_lib.split(plain(tree), is_trained))
  got, wanted = dict(params_lib.named_leaves(got)), dict(params_lib.named_leaves(wanted))
  assert got.keys() == wanted.keys() and len(got) == 1 + 2 * len(adapted)
  for name in got:
    assert np.abs(wanted[name]).max() > 1e-3, name
    np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=2e-4 * np.abs(wanted[name]).max(), err_msg=name)


def test_no_layer_is_kept_in_the_compute_dtype():
  """What backward keeps of a quantized layer is its bits: residuals hold no matrix of floats."""
  mesh, layout = mesh_of(), Layout(scan=False)
  x = jnp.ones((2, 8, CONFIG.embed_dim))
  own = params_lib.unstack(quantized('int8', mesh)['blocks'])[0]['mlp']
  with jax.set_mesh(mesh):
    _, pull = jax.vjp(lambda x: layers.mlp(x, own, CONFIG, layout), x)
  kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape in ((64, 128), (128, 64))]
  assert len(kept) == 3 and all(leaf.dtype == jnp.int8 for leaf in kept)


@pytest.mark.parametrize('kind', quantize.KINDS)
def test_the_sampler_and_merging_have_the_same_policy(kind):
  mesh = mesh_of()
  tree = lora.attach(quantized(kind, mesh), transformer.declare(CONFIG), rank=2, alpha=4.0, targets=('q', 'up'), rank_stabilized=True, seed=1,
                     mesh=mesh, layout=sharding.TRAIN)
  tree = params_lib.map_named(lambda name, leaf: leaf + 0.1 if name.endswith('/b') else leaf, tree)
  wanted = logits(tree, mesh)
  assert not np.allclose(wanted, logits(weights(), mesh), atol=0.1)
  np.testing.assert_allclose(logits(decode.decode_params(tree, CONFIG, sharding.TRAIN, mesh), mesh), wanted, atol=1e-4)
  with jax.set_mesh(mesh):
    merged = lora.merge(tree, 'float32')
    rounded = lora.merge(tree)
  np.testing.assert_allclose(logits(merged, mesh), wanted, atol=1e-4)
  assert rounded['blocks']['mlp']['up'].dtype == rounded['blocks']['mlp']['down'].dtype == jnp.bfloat16
  leaves = jax.tree.leaves(merged, is_leaf=lambda leaf: isinstance(leaf, QuantArray | LoraArray))
  assert all(isinstance(leaf, jax.Array) for leaf in leaves)


@pytest.mark.parametrize('kind, bound', [('int8', 0.01), ('nf4', 0.12)])
def test_the_error_of_a_layer_is_that_of_rounding(kind, bound):
  """The relative error of a product with normal weights: near 1/127 x max / sqrt(12) for int8, about a tenth for nf4."""
  rng = np.random.default_rng(0)
  weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((256, 128), (32, 256)))
  with jax.set_mesh(mesh_of()):
    got = x @ quantize.dequantize(quantize.quantize(jnp.asarray(weight), kind, inputs=(0,), block_axis=-1), 'float32')
  wanted = x @ weight
  error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
  assert bound / 3 < error < bound
