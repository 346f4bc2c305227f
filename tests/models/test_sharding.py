"""Meshes, layouts, and the linear map every weight goes through."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from models import params as params_lib
from models import sharding
from models.config import ModelConfig
from models.params import ParamSpec
from models.sharding import Layout, LoraArray
from tests import tiny


def test_layout_refuses_one_mesh_axis_twice_on_an_array():
  with pytest.raises(ValueError, match="layout.rules put one mesh axis twice on an array with axes .*'heads', 'mlp'"):
    sharding.TRAIN.spec('heads', 'mlp')
  assert sharding.TRAIN.spec('batch', 'length', None) == P(('data', 'fsdp'), ('seq', 'ulysses'), None)


@pytest.mark.parametrize('fields, message', [
    ({'compute_dtype': 'int8'}, "layout.compute_dtype='int8' is unknown"),
    ({'rules': (('batch', ('pipe',)),)}, "names an unknown mesh axis; use some of"),
])
def test_bad_layouts(fields, message):
  with pytest.raises(ValueError, match=message):
    Layout(**fields)


@pytest.mark.parametrize('sizes, message', [
    ({'fsdp': 3}, 'does not match the 8 devices'),
    ({'fsdp': -1, 'data': -1}, 'at most one may be -1'),
    ({'fsdp': 0}, 'is not a mesh'),
    ({'fsdp': -1, 'tensor': 3}, 'does not match the 8 devices'),
])
def test_bad_meshes(sizes, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(**sizes)


def test_computing_without_a_mesh_is_an_error():
  with pytest.raises(RuntimeError, match='No mesh with axes'):
    sharding.current_mesh()


def test_parameters_that_do_not_divide_are_named():
  mesh = sharding.make_mesh(tensor=8)
  with pytest.raises(ValueError, match=r"parameter blocks/q \(6, 4\): axis 'heads'=4 does not divide"):
    params_lib.spec_shardings({'blocks': {'q': ParamSpec((6, 4), ('embed', 'heads'), 'zeros')}}, mesh, sharding.TRAIN)


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-6), ('bfloat16', 2e-2)])
def test_linear_map_and_its_gradient(dtype, tolerance):
  rng = np.random.default_rng(0)
  x, weight, out = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 8), (8, 2, 4), (2, 3, 2, 4)))
  layout = Layout(compute_dtype=dtype)
  mesh = sharding.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    placed = jax.device_put(weight, jax.NamedSharding(mesh, layout.spec('embed', 'heads', None)))
    inputs = jax.device_put(x, jax.NamedSharding(mesh, layout.spec('batch', 'length', None)))

    @jax.jit
    def loss(x, weight):
      y = sharding.einsum('BTD,DNH->BTNH', x, weight, layout, 'batch', 'length', 'act_heads', None)
      return jnp.sum(y.astype(jnp.float32) * jax.device_put(out, jax.typeof(y).sharding))

    value, (dx, dweight) = jax.value_and_grad(loss, argnums=(0, 1))(inputs, placed)
  assert dweight.sharding == placed.sharding and dweight.dtype == placed.dtype
  scale = np.abs(weight).max()
  assert float(value) == pytest.approx(np.einsum('btd,dnh,btnh->', x, weight, out), abs=40 * tolerance)
  np.testing.assert_allclose(dx, np.einsum('btnh,dnh->btd', out, weight), atol=8 * tolerance * scale)
  np.testing.assert_allclose(dweight, np.einsum('btd,btnh->dnh', x, out), atol=8 * tolerance * scale)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_rows_and_their_gradient(dtype):
  rng = np.random.default_rng(2)
  table = jnp.asarray(rng.standard_normal((6, 4)), dtype)
  ids, out = np.array([[3, 3, 0], [5, 3, 1]], np.int32), rng.standard_normal((2, 3, 4)).astype(np.float32)
  mesh = sharding.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    placed = jax.device_put(table, jax.NamedSharding(mesh, sharding.TRAIN.spec('vocab', 'embed')))
    place = sharding.TRAIN.spec('batch', 'length', None)
    weight = jax.device_put(out, jax.NamedSharding(mesh, place))

    @jax.jit
    def loss(table):
      rows = sharding.take_rows(table, jax.reshard(jnp.asarray(ids), sharding.TRAIN.spec('batch', 'length')), place)
      return jnp.sum(rows.astype(jnp.float32) * weight), rows

    (_, rows), gradient = jax.value_and_grad(loss, has_aux=True)(placed)
  np.testing.assert_array_equal(np.asarray(rows), np.asarray(table)[ids])
  expected = np.zeros((6, 4), np.float32)
  np.add.at(expected, ids, out)
  assert gradient.dtype == table.dtype and gradient.sharding == placed.sharding
  np.testing.assert_allclose(np.asarray(gradient, np.float32), expected, rtol=1e-6 if dtype == 'float32' else 1e-2, atol=1e-6)


def test_lora_adds_its_scaled_update_and_trains_only_the_adapter():
  rng = np.random.default_rng(1)
  x, base, a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 2, 8), (8, 6), (8, 3), (3, 6)))
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    run = jax.jit(lambda weight: sharding.einsum('BTD,DF->BTF', x, weight, sharding.TRAIN, 'batch', 'length', 'act_mlp'))
    np.testing.assert_allclose(run(LoraArray(base, a, b, 0.5)), x @ (base + 0.5 * a @ b), rtol=2e-5, atol=1e-5)
    grads = jax.grad(lambda weight: jnp.sum(run(weight)))(LoraArray(base, a, b, 0.5))
  assert not np.any(grads.base) and np.any(grads.a) and np.any(grads.b)


@pytest.mark.parametrize('fields, message', [
    ({'num_kv_heads': 3}, 'model.num_kv_heads=3 does not divide model.num_heads=4'),
    ({'head_dim': 15}, 'model.head_dim=15 must be even'),
    ({'activation': 'relu'}, "model.activation='relu' is unknown"),
    ({'window': None}, 'model.window=None must be at least 1'),
    ({'layer_pattern': ()}, 'must be a non-empty tuple'),
    ({'num_layers': 0}, 'model.num_layers=0 must be at least 1'),
])
def test_model_config_checks_itself(fields, message):
  with pytest.raises(ValueError, match=message):
    tiny.config(**fields)
  assert isinstance(tiny.config(), ModelConfig)
