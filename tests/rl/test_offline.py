"""The loop of offline runs: what a checkpoint says is done has been written."""

import json

import jax
import pytest

from models import sharding
from rl import checkpoint, train
from rl.data.tasks import TaskConfig
from rl.optimizer import OptimizerConfig
from rl.run import LayoutConfig, ModelSource
from tests import tiny_model


@pytest.fixture
def config(tmp_path):
  root = tmp_path
  task = TaskConfig(paths=(str(tiny_model.write_data(root / 'data.jsonl')),), schema='qa', heldout_fraction=0.1)
  return train.TrainConfig(
      model=ModelSource(str(tiny_model.write_model(root / 'model'))), data=train.DataConfig({'train': task}, rows=4, length=192), num_steps=4,
      layout=LayoutConfig(compute_dtype='float32', scan=False), optimizer=OptimizerConfig(learning_rate=1e-3), checkpoint_every_steps=1,
      eval_every_steps=2, eval_documents=8)


def written(workdir):
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [{key: value for key, value in line.items() if not key.startswith(('speed/', 'time_s'))} for line in lines]


def test_a_run_that_ends_in_an_evaluation_evaluates_that_step_again(config, tmp_path, monkeypatch):
  make_mesh = sharding.make_mesh
  monkeypatch.setattr(sharding, 'make_mesh', lambda **sizes: make_mesh(**sizes | {'devices': jax.devices()[:1]}))
  train.run(config, tmp_path / 'whole')
  assert [line['step'] for line in written(tmp_path / 'whole') if 'heldout/loss_nats' in line] == [2, 4]
  evaluate, calls = train.SupervisedStage.evaluate, []

  def interrupted(stage, trainable):
    calls.append(1)
    if len(calls) == 2:
      raise RuntimeError('it ended here')
    return evaluate(stage, trainable)

  with monkeypatch.context() as patch, pytest.raises(RuntimeError, match='it ended here'):
    patch.setattr(train.SupervisedStage, 'evaluate', interrupted)
    train.run(config, tmp_path / 'killed')
  assert checkpoint.committed_steps(tmp_path / 'killed' / 'checkpoints')[-1] == 3
  train.run(config, tmp_path / 'killed')
  assert written(tmp_path / 'killed') == written(tmp_path / 'whole')
