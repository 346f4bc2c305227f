"""The conversion program, run as a program: what it writes, and how it says no."""

import json
import os
from pathlib import Path
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from launch import convert
from models import adapter_files, hf_weights, lora, sharding, transformer
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from rl import config as config_lib
from rl import policy
from rl import run as run_lib
from rl.checkpoint import CheckpointStore
from rl.run import LoraConfig, ModelSource
from rl.types import HostState, TrainState
from tests import tiny

ROOT = Path(__file__).parent.parent.parent


def run(*arguments):
  return subprocess.run([sys.executable, '-m', 'launch.convert', *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
                        env=os.environ | {'PYTHONPATH': str(ROOT)})


@pytest.fixture
def source(tmp_path):
  config = tiny.config(vocab_size=300)
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  params = params_lib.init(transformer.declare(config), 0, mesh, sharding.TRAIN)
  hf_weights.export(tmp_path / 'source', config, params, dtype='float32', tokenizer=tokenizer_lib.load('byte'))
  return config, params, mesh


def test_directory_to_directory(source, tmp_path):
  config, params, mesh = source
  done = run(f'--source={tmp_path}/source', f'--target={tmp_path}/target')
  assert done.returncode == 0, done.stderr
  summary = f'{tmp_path}/source -> {tmp_path}/target: gemma3, {params_lib.count(params):,} parameters in bfloat16, 261 token ids'
  assert done.stderr.count(summary) == 1 and not done.stdout
  got_config, got = hf_weights.load(tmp_path / 'target', mesh, sharding.TRAIN, 'bfloat16')
  assert got_config == config
  jax.tree.map(lambda ours, wanted: np.testing.assert_array_equal(ours, wanted.astype('bfloat16')), got, params)
  assert tokenizer_lib.load(tmp_path / 'target').encode('one') == tokenizer_lib.load('byte').encode('one')


def test_some_layers_make_a_student(source, tmp_path):
  config, params, mesh = source
  done = run(f'--source={tmp_path}/source', f'--target={tmp_path}/target', '--layers=1')
  assert done.returncode == 0, done.stderr
  got_config, got = hf_weights.load(tmp_path / 'target', mesh, sharding.TRAIN, 'bfloat16')
  assert got_config.num_layers == 1 and got_config.layer_kind(0) == config.layer_kind(1)
  np.testing.assert_array_equal(got['blocks']['mlp']['up'], params['blocks']['mlp']['up'][1:].astype('bfloat16'))
  done = run(f'--source={tmp_path}/source', f'--target={tmp_path}/other', '--layers=0,2')
  assert done.returncode == 1 and 'layers=(0, 2) must be increasing numbers of layers from 0 to 1' in done.stderr


def write_run(directory, source, settings, frozen_dtype='bfloat16'):
  """Write a run's checkpoint of step 5 whose adapters change something, and return its trainable parameters."""
  model = ModelSource(str(source), frozen_dtype=frozen_dtype)
  config = config_lib.to_json({'stage': 'rl', 'seed': 3, 'model': model, 'lora': settings})
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  _, trainable, frozen = run_lib.load_trainable(model, settings, 3, mesh, sharding.TRAIN)
  trainable = params_lib.map_named(lambda name, leaf: leaf + 0.05 if name.endswith('/b') else leaf, trainable)
  with CheckpointStore(directory / 'checkpoints', every_steps=1, keep=1) as store:
    store.save(5, TrainState(jnp.int32(5), trainable, {}), HostState(0, 3, config))
  return trainable, frozen


@pytest.mark.parametrize('frozen_dtype', ['float32', 'int8'])
def test_adapters_of_a_run(frozen_dtype, source, tmp_path):
  _, _, mesh = source
  trainable, frozen = write_run(tmp_path / 'run', tmp_path / 'source', LoraConfig(rank=4, alpha=8.0, targets=('q', 'up')), frozen_dtype)
  said = convert.convert(str(tmp_path / 'run'), str(tmp_path / 'adapter'), adapter=True)
  count = params_lib.count(trainable)
  assert f'gemma3, adapters of rank 4 for {tmp_path}/source, {count:,} parameters in float32, 261 token ids' in said
  table = json.loads((tmp_path / 'adapter' / adapter_files.CONFIG_FILE).read_text())
  assert (table['r'], table['lora_alpha'], table['use_rslora'], table['base_model_name_or_path']) == (4, 8, True, f'{tmp_path}/source')
  tensors = load_file(tmp_path / 'adapter' / adapter_files.WEIGHTS_FILE)
  assert sum(tensor.size for tensor in tensors.values()) == count
  np.testing.assert_array_equal(tensors['base_model.model.model.layers.1.mlp.up_proj.lora_B.weight'],
                                np.asarray(trainable['blocks']['mlp']['up'].b[1]).T)
  # The whole model of the run is the base as it was trained on, with the same adapters added.
  _, merged = policy.load_params(tmp_path / 'run', mesh, sharding.TRAIN, 'float32')
  with jax.set_mesh(mesh):
    wanted = lora.merge(params_lib.combine(trainable, frozen), 'float32')
  jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, atol=1e-6), merged, wanted)


def test_what_has_no_adapters(source, tmp_path):
  write_run(tmp_path / 'full', tmp_path / 'source', LoraConfig())
  with pytest.raises(ValueError, match=r'full is a run that trained every parameter \(lora.rank=0\) and has no adapters; export its whole'):
    convert.convert(str(tmp_path / 'full'), str(tmp_path / 'adapter'), adapter=True)
  done = run('--adapter', f'--source={tmp_path}/source', f'--target={tmp_path}/adapter')
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert f'{tmp_path}/source is no run directory (checkpoints is missing), so it has no adapters' in done.stderr
  assert not (tmp_path / 'adapter').exists()


def test_mistakes_are_one_line_and_leave_nothing(source, tmp_path):
  (tmp_path / 'source' / 'tokenizer_config.json').unlink()
  (tmp_path / 'source' / 'tokenizer.json').unlink()
  done = run(f'--source={tmp_path}/source', f'--target={tmp_path}/target')
  assert done.returncode == 1
  assert f'launch.convert: no tokenizer at {tmp_path}/source' in done.stderr
  assert 'Traceback' not in done.stderr
  assert [path.name for path in tmp_path.iterdir()] == ['source']
