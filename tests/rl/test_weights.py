"""Publishing: the sampler gets the policy that is trained, and a fault on the way is noticed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import lora, quantize, sharding, transformer
from models import params as params_lib
from rl.rollout import weights
from rl.rollout.weights import Publisher
from tests import tiny

CONFIG = tiny.config()
PROBE = np.arange(1, 30)


def make(mesh, seed=0, rank=0):
  specs = transformer.declare(CONFIG)
  params = params_lib.init(specs, seed, mesh, sharding.TRAIN)
  if rank:
    params = lora.attach(params, specs, rank=rank, alpha=4.0, targets=lora.TARGETS, rank_stabilized=True, seed=1, mesh=mesh,
                         layout=sharding.TRAIN)
  return params


def make_publisher(mesh, dtype='float32', bound=1e-4):
  return Publisher(CONFIG, dataclasses.replace(sharding.ROLLOUT, compute_dtype=dtype), mesh, sharding.TRAIN, PROBE, max_probe_diff_nats=bound)


@pytest.mark.parametrize('sizes', [{}, {'data': 2, 'fsdp': 2}, {'fsdp': 2, 'tensor': 2}, {'seq': 2}])
def test_meshes_publish_the_same_policy(sizes):
  mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:int(np.prod(list(sizes.values()) or [1]))])
  published = make_publisher(mesh).publish(make(mesh), 4)
  assert published.version == 4
  assert published.probe_diff_nats < 1e-5
  one = sharding.make_mesh(devices=jax.devices()[:1])
  assert published.checksum == make_publisher(one).publish(make(one), 0).checksum


def test_weights_that_do_not_arrive_are_noticed():
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  publisher, params = make_publisher(mesh), make(mesh)
  first = publisher.publish(params, 0)
  with pytest.raises(RuntimeError, match='as version 1 are bit for bit those of version 0, though the policy was updated'):
    publisher.publish(params, 1)
  assert publisher.publish(params, 1, has_changed=False).checksum == first.checksum
  one_bit = params_lib.map_named(lambda name, leaf: leaf.at[0].add(1e-3) if name == 'norm' else leaf, params)
  assert publisher.publish(one_bit, 2).checksum != first.checksum


def test_another_policy_is_noticed(monkeypatch):
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  params, other, prepare = make(mesh), make(mesh, seed=1), weights.decode.decode_params
  monkeypatch.setattr(weights.decode, 'decode_params', lambda params, *rest: prepare(other, *rest))
  with pytest.raises(RuntimeError, match='Version 3: trained and published parameters differ by .* the sampler would be another policy'):
    make_publisher(mesh).publish(params, 3)


def test_two_leaves_that_are_swapped_change_the_checksum():
  a, b = jnp.arange(6.0), jnp.arange(6.0) + 1
  assert int(weights._checksum({'x': a, 'y': b})) != int(weights._checksum({'x': b, 'y': a}))


@pytest.mark.parametrize('kind', quantize.KINDS)
def test_a_quantized_base_is_published_as_it_trains(kind):
  mesh = sharding.make_mesh(devices=jax.devices()[:2], fsdp=2)
  tree, specs = make(mesh), transformer.declare(CONFIG)
  with jax.set_mesh(mesh):
    tree = params_lib.map_named(lambda name, spec, leaf: params_lib.stored(leaf, name, spec, kind), specs, tree,
                                is_leaf=lambda leaf: isinstance(leaf, params_lib.ParamSpec))
  params = lora.attach(tree, specs, rank=4, alpha=4.0, targets=('q', 'down'), rank_stabilized=True, seed=1, mesh=mesh, layout=sharding.TRAIN)
  publisher = make_publisher(mesh)
  before = publisher.publish(params, 0)
  moved = publisher.publish(params_lib.map_named(lambda name, leaf: leaf + 1e-3 if name.endswith('/b') else leaf, params), 1)
  assert moved.probe_diff_nats < 1e-5 and moved.checksum != before.checksum
  assert not any(params_lib.is_quantized(leaf) for leaf in jax.tree.leaves(moved.params, is_leaf=params_lib.is_quantized))


def test_small_updates_of_adapters_are_not_rounded_away():
  """Merged into bfloat16 weights they would be: the sampler would stand still while the policy moves."""
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  publisher = make_publisher(mesh, 'bfloat16', bound=0.05)
  params = make(mesh, rank=4)
  params = params_lib.map_named(lambda name, leaf: leaf if lora.is_trainable(name) else leaf.astype(jnp.bfloat16), params)
  before = publisher.publish(params, 0)
  rng = np.random.default_rng(0)
  moved = params_lib.map_named(
      lambda name, leaf: leaf + jnp.asarray(1e-4 * rng.choice([-1, 1], leaf.shape), jnp.float32) if name.endswith('/b') else leaf, params)
  after = publisher.publish(moved, 1)
  changed = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), before.params, after.params)
  assert sum(jax.tree.leaves(changed)) == len(lora.TARGETS) * CONFIG.num_layers
