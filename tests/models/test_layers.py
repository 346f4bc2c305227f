"""The MLP over chunks of a device's tokens, and layers whose inputs wait in the host's memory: equal to the plain form, with less memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import heads, layers, lora, sharding, transformer
from models import params as params_lib
from models.sharding import Layout
from tests import tiny

CONFIG = tiny.config()
# name -> mesh axes; every way in which tokens, F and stored weights are split.
MESHES = {'one': {}, 'data fsdp tensor': {'data': 2, 'fsdp': 2, 'tensor': 2}, 'fsdp seq ulysses': {'fsdp': 2, 'seq': 2, 'ulysses': 2}}


@functools.cache
def setting(name, is_lora):
  axes = MESHES[name]
  mesh = sharding.make_mesh(**axes, devices=jax.devices()[:int(np.prod(list(axes.values())))])
  specs = transformer.declare(CONFIG)
  tree = params_lib.init(specs, 0, mesh, Layout())
  if is_lora:
    tree = lora.attach(tree, specs, rank=4, alpha=8, targets=('gate', 'up', 'down'), rank_stabilized=False, seed=0, mesh=mesh, layout=Layout())
    tree = jax.tree.map(lambda leaf: leaf + 0.02, tree)  # An adapter that starts at 0 would hide half of the gradients.
  return mesh, tree


@functools.cache
def outcome(name, is_lora, mlp_chunk):
  """Return (output, gradients of x and of the weights, compiled program) for 4 rows of 24 tokens."""
  mesh, tree = setting(name, is_lora)
  layout = Layout(mlp_chunk=mlp_chunk)
  rng = np.random.default_rng(0)
  with jax.set_mesh(mesh):
    place = jax.NamedSharding(mesh, layout.spec('batch', 'length', None))
    x_BTD, pull_BTD = (jax.device_put(rng.standard_normal((4, 24, CONFIG.embed_dim)).astype(np.float32), place) for _ in range(2))
    own = jax.tree.map(lambda leaf: leaf[0], tree['blocks']['mlp'])

    def both(x_BTD, own):
      out_BTD, pull = jax.vjp(lambda x_BTD, own: layers.mlp(x_BTD, own, CONFIG, layout), x_BTD, own)
      return out_BTD, pull(pull_BTD)

    compiled = jax.jit(both).lower(x_BTD, own).compile()
    return *compiled(x_BTD, own), compiled.as_text()


@pytest.mark.parametrize('mlp_chunk', [5, 11])  # A device has 96, 24 or 12 tokens.
@pytest.mark.parametrize('is_lora', [False, True])
@pytest.mark.parametrize('name', MESHES)
def test_chunks_give_the_whole(name, is_lora, mlp_chunk):
  wanted, (wanted_dx, wanted_dweights), _ = outcome(name, is_lora, None)
  found, (dx, dweights), _ = outcome(name, is_lora, mlp_chunk)
  assert found.sharding == wanted.sharding and dx.sharding == wanted_dx.sharding
  np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
  np.testing.assert_allclose(dx, wanted_dx, rtol=0, atol=1e-5)
  for (path, leaf), other in zip(params_lib.named_leaves(dweights), jax.tree.leaves(wanted_dweights), strict=True):
    assert leaf.sharding == other.sharding and leaf.dtype == other.dtype
    scale = max(float(jnp.max(jnp.abs(other))), 1e-6)
    np.testing.assert_allclose(leaf, other, rtol=0, atol=2e-6 * scale, err_msg=path)


@pytest.mark.parametrize('name, gathers', [('data fsdp tensor', 3), ('fsdp seq ulysses', 3), ('one', 0)])
def test_tokens_are_never_gathered_and_weights_once(name, gathers):
  """An all-gather in a chunk's loop would bring all tokens, or the weights as often as there are chunks (openxla/xla PR#20808)."""
  *_, text = outcome(name, False, 5)
  computations = text.split('\n\n')
  inside_loops = [part for part in computations if 'ENTRY' not in part]
  assert not any(word in part for part in inside_loops for word in ('all-gather(', 'all-gather-start(', 'reduce-scatter(', 'all-to-all('))
  entry, = (part for part in computations if 'ENTRY' in part)
  assert entry.count(' all-gather(') == gathers and entry.count(' reduce-scatter(') == gathers


def temporary_bytes(function, *arguments):
  return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_a_chunk_and_the_stream():
  """16,384 tokens a device: an array of F is 64 MiB, one of D is 1 MiB."""
  config = dataclasses.replace(CONFIG, embed_dim=16, mlp_dim=1024)
  mesh = sharding.make_mesh(seq=8)
  specs = {name: transformer.declare(config)['blocks']['mlp'][name] for name in ('gate', 'up', 'down')}
  with jax.set_mesh(mesh):
    x_BTD = jax.ShapeDtypeStruct((1, 8 * 16_384, 16), jnp.float32, sharding=jax.NamedSharding(mesh, Layout().spec('batch', 'length', None)))
    own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=jax.NamedSharding(
        mesh, jax.P(*leaf.sharding.spec[1:]))), params_lib.abstract(specs, mesh, Layout()))

    def gradient(layout, x_BTD, own):
      return jax.grad(lambda x_BTD, own: jnp.sum(layers.mlp(x_BTD, own, config, layout)**2), argnums=(0, 1))(x_BTD, own)

    used = {chunk: temporary_bytes(functools.partial(gradient, Layout(mlp_chunk=chunk)), x_BTD, own) for chunk in (None, 512)}
  assert used[None] > 3 * 2**26 and used[512] < 2**24


def test_logprobs_of_a_long_shard_take_memory_linear_in_its_tokens():
  """Logits of 32,768 local tokens and 4,096 words would be 512 MiB; what is added for each token is a few rows of D."""
  mesh = sharding.make_mesh(seq=8)
  layout, embed = Layout(), 64
  used = {}
  with jax.set_mesh(mesh):
    for local in (16_384, 32_768):
      def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, layout.spec(*axes)))

      tokens = (1, 8 * local)
      used[local] = temporary_bytes(
          jax.grad(lambda hidden, head, targets, weight: heads.weighted_nll(hidden, head, targets, weight)[0], argnums=(0, 1)),
          array((*tokens, embed), jnp.float32, 'batch', 'length', None), array((4096, embed), jnp.float32, 'vocab', 'embed'),
          array(tokens, jnp.int32, 'batch', 'length'), array(tokens, jnp.float32, 'batch', 'length'))
  assert used[32_768] - used[16_384] <= 16_384 * embed * 4 * 3
  assert used[32_768] < 2**26


# inputs of layers in the host's memory


@functools.cache
def gradients(remat):
  mesh, tree = setting('one', False)
  layout = Layout(remat=remat)
  rng = np.random.default_rng(1)
  with jax.set_mesh(mesh):
    place = jax.NamedSharding(mesh, layout.spec('batch', 'length'))
    tokens_BT = jax.device_put(rng.integers(0, 96, (2, 16), dtype=np.int32), place)
    positions_BT = jax.device_put(np.tile(np.arange(16, dtype=np.int32), (2, 1)), place)

    def loss(tree):
      return jnp.sum(transformer.forward(tree, tokens_BT, positions_BT, jnp.ones_like(positions_BT), CONFIG, layout)[0]**2)

    return jax.jit(jax.grad(loss))(tree), str(jax.make_jaxpr(jax.grad(loss))(tree))


@pytest.mark.parametrize('remat', ['offload', 'offload,attention'])
def test_offload_computes_the_same_and_moves_the_inputs(remat):
  (wanted, plain), (found, moved) = gradients('full'), gradients(remat)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)
  # What lies in host memory has <host> in its type.
  assert '<host>' not in plain and '<host>' in moved


def test_a_backend_without_host_memory_is_refused_before_tracing(monkeypatch):
  class Device:
    def addressable_memories(self):
      return [type('Memory', (), {'kind': 'device'})()]

  transformer.check(CONFIG, Layout(remat='offload'))
  monkeypatch.setattr(jax, 'local_devices', lambda: [Device()])
  transformer.check(CONFIG, Layout(remat='full'))
  with pytest.raises(ValueError, match=r"remat='offload' keeps the inputs of the layers in pinned_host memory, and cpu here has only device"):
    transformer.check(CONFIG, Layout(remat='offload'))


@pytest.mark.parametrize('call, message', [
    (lambda: Layout(mlp_chunk=0), 'layout.mlp_chunk=0 must be at least 1 token, or None'),
    (lambda: transformer.check(CONFIG, Layout(mlp_chunk=8, remat='query,up')), "remat='query,up' keeps the wide .*mlp_chunk=8 is there so"),
    (lambda: transformer.check(CONFIG, Layout(remat='offload,full')), r"'offload' may be one of them"),
    (lambda: transformer.check(CONFIG, Layout(remat='none,query')), r"unknown intermediates \['none'\]"),
])
def test_contradictions_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
