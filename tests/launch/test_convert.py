"""The conversion program, run as a program: what it writes, and how it says no."""

import os
from pathlib import Path
import subprocess
import sys

import jax
import numpy as np
import pytest

from models import hf_weights, sharding, transformer
from models import params as params_lib
from models import tokenizer as tokenizer_lib
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


def test_mistakes_are_one_line_and_leave_nothing(source, tmp_path):
  (tmp_path / 'source' / 'tokenizer_config.json').unlink()
  (tmp_path / 'source' / 'tokenizer.json').unlink()
  done = run(f'--source={tmp_path}/source', f'--target={tmp_path}/target')
  assert done.returncode == 1
  assert f'launch.convert: no tokenizer at {tmp_path}/source' in done.stderr
  assert 'Traceback' not in done.stderr
  assert [path.name for path in tmp_path.iterdir()] == ['source']
