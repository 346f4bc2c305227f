"""A student of some of a teacher's layers: the same function as running only these, in the files others use too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hf_weights, lora, sharding, student, transformer
from models import params as params_lib
from tests import tiny

CONFIG = tiny.config(num_layers=6, layer_pattern=('local', 'local', 'global'))


@pytest.fixture(scope='module')
def teacher():
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  return mesh, params_lib.init(transformer.declare(CONFIG), 0, mesh, sharding.TRAIN)


@pytest.mark.parametrize(('layers', 'pattern'), [
    ((0, 2, 4, 5), ('local', 'global')), ((2, 5), ('global',)), ((0, 1, 3), ('local',)), ((0, 1, 2, 3), ('local', 'local', 'global')),
    (tuple(range(6)), ('local', 'local', 'global'))])
def test_chosen_layers_keep_their_kind(teacher, layers, pattern):
  mesh, params = teacher
  sliced, config = student.slice_layers(params, CONFIG, layers)
  assert config.num_layers == len(layers) and config.layer_pattern == pattern
  assert [config.layer_kind(index) for index in range(len(layers))] == [CONFIG.layer_kind(layer) for layer in layers]
  for (name, leaf), whole in zip(params_lib.named_leaves(sliced['blocks']), jax.tree.leaves(params['blocks']), strict=True):
    np.testing.assert_array_equal(leaf, np.asarray(whole)[list(layers)], err_msg=name)
  assert all(sliced[name] is params[name] for name in ('embedding', 'norm'))


def test_a_student_computes_what_the_other_layers_leave_alone(teacher):
  """Layers whose outputs are 0 change nothing: the teacher with the others so is the student."""
  mesh, params = teacher
  layers = (0, 2, 4, 5)
  # The output norms multiply by 1 + scale.
  dead = np.isin(np.arange(6), layers, invert=True)[:, None]
  blocks = {part: {**own, 'post_norm': jnp.where(dead, -1.0, own['post_norm'])} for part, own in params['blocks'].items()}
  tokens = np.random.default_rng(0).integers(0, 96, (2, 20)).astype(np.int32)
  positions, segments = np.tile(np.arange(20, dtype=np.int32), (2, 1)), np.ones((2, 20), np.int32)
  sliced, config = student.slice_layers(params, CONFIG, layers)
  with jax.set_mesh(mesh):
    wanted = transformer.forward({**params, 'blocks': blocks}, tokens, positions, segments, CONFIG, sharding.TRAIN)[0]
    got = transformer.forward(sliced, tokens, positions, segments, config, sharding.TRAIN)[0]
  np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_student_is_a_model_on_disk(teacher, tmp_path):
  mesh, params = teacher
  sliced, config = student.slice_layers(params, CONFIG, (0, 2, 4, 5))
  hf_weights.export(tmp_path / 'student', config, sliced, dtype='float32')
  got_config, got = hf_weights.load(tmp_path / 'student', mesh, sharding.TRAIN)
  assert got_config == config
  jax.tree.map(np.testing.assert_array_equal, got, sliced)


@pytest.mark.parametrize('layers', [(), (0, 0), (3, 1), (-1, 2), (4, 6)])
def test_layers_that_are_no_slice_are_refused(teacher, layers):
  with pytest.raises(ValueError, match='must be increasing numbers of layers from 0 to 5, at least one'):
    student.slice_layers(teacher[1], CONFIG, layers)


def test_adapters_are_to_be_merged_first(teacher):
  mesh, params = teacher
  tree = lora.attach(params, transformer.declare(CONFIG), rank=2, alpha=4, targets=('q',), rank_stabilized=False, seed=0, mesh=mesh,
                     layout=sharding.TRAIN)
  with pytest.raises(ValueError, match='blocks/attention/q has adapters beside it.*merge them first'):
    student.slice_layers(tree, CONFIG, (0,))
