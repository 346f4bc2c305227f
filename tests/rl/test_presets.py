"""Every preset, with what the study of presets changes of it: two steps of the online loop, as small as has something to learn from."""

import functools

import jax
import numpy as np
import pytest

from configs import grpo
from configs.sweeps import presets
from rl import checkpoint, train_rl
from rl import config as config_lib
from rl import learner as learner_lib
from rl.rl_config import RLConfig
from tests import tiny_model
from tests.rl.test_train_rl import one_device, steps_of  # noqa: F401

# Trained until they have learned, in test_train_rl and test_ppo.
TRAINED = ('grpo', 'reinforce_pp', 'rloo', 'cispo', 'gspo', 'decoupled', 'ppo')
SMALL = {'num_steps': 2, 'eval.every_steps': 0}


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny_model.write_model(tmp_path_factory.mktemp('presets') / 'model', num_layers=1, layer_pattern=('global',), window=None,
                                local_rope=None)


@pytest.fixture(scope='module', autouse=True)
def shared_programs():
  """Presets with the same loss share its programs: everything else that these depend on is the same in all."""
  build, made = learner_lib.build, {}

  def build_once(*arguments, loss, **options):
    if loss not in made:
      made[loss] = build(*arguments, loss=loss, **options)
    return made[loss]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(learner_lib, 'policy_loss', functools.cache(learner_lib.policy_loss))
    patch.setattr(learner_lib, 'build', build_once)
    yield


def test_the_study_is_of_every_preset():
  names = {name for name, _ in presets.get_config().settings}
  assert names >= {*grpo.PRESETS, 'ppo'} > set(TRAINED)
  assert {name for shown in presets.PANELS.values() for name in shown} == {*grpo.PRESETS, 'ppo'}


@pytest.mark.parametrize('name', [name for name in grpo.PRESETS if name not in TRAINED])
def test_a_preset_trains(model, tmp_path, name):
  study = presets.get_config()
  study.base.update_from_flattened_dict({**dict(dict(study.settings)[name]), **SMALL, 'model.path': str(model)})
  config = config_lib.build(RLConfig, study.base)
  train_rl.run(config, tmp_path)
  records = steps_of(tmp_path)
  assert list(records) == [1, 2]
  for record in records.values():
    assert record['train/skipped_steps'] == 0
    assert all(np.isfinite(value) for value in record.values() if value is not None)
  assert (tmp_path / 'objective.txt').read_text().startswith('maximize ')
  setup, trainable = train_rl.set_up(config)
  before = jax.tree.map(np.asarray, trainable)
  after = checkpoint.read_state(tmp_path / 'checkpoints', learner_lib.abstract_state(train_rl.initial_state(setup, trainable)))
  assert int(after.step) == config.num_updates
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after.trainable), strict=True):
    assert np.any(old != new)
