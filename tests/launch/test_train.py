"""The training program as its users meet it: learns, survives kill -9 bit for bit, stops on SIGTERM, and says no in one message."""

import json
from pathlib import Path
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from models import hf_weights, sharding
from models.sharding import Layout
from rl import checkpoint, policy, train
from rl import config as config_lib
from rl import learner as learner_lib
from tests import tiny_model

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 40


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  root = tmp_path_factory.mktemp('train')
  tiny_model.write_model(root / 'model')
  tiny_model.write_data(root / 'data.jsonl')
  return root


def command(files, workdir, *more):
  return [sys.executable, '-m', 'launch.train', '--config=configs/sft.py', f'--config.model.path={files}/model',
          f"--config.data.tasks.train.paths=('{files}/data.jsonl',)", f'--workdir={workdir}', f'--config.num_steps={NUM_STEPS}',
          '--config.checkpoint_every_steps=5', '--config.eval_every_steps=20', '--config.data.rows=4', '--config.data.length=192',
          '--config.data.micro_batches=2', '--config.optimizer.learning_rate=3e-3', '--config.optimizer.warmup_steps=2',
          '--config.mesh.data=2', '--config.cpu_devices=2', *more]


def run(arguments):
  return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def metrics(workdir):
  path = workdir / 'metrics.jsonl'
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def state(files, workdir):
  """Return the arrays of the newest checkpoint, restored onto the 8 devices of this process, and its host state."""
  host = checkpoint.read_host(workdir / 'checkpoints')
  config = config_lib.build(train.TrainConfig, {**host.config, 'mesh': {'data': 1, 'fsdp': 8, 'seq': 1, 'tensor': 1},
                                                'data': {**host.config['data'], 'rows': 8}})
  setup, trainable = train.set_up(config)
  abstract = learner_lib.abstract_state(setup.learner.init(trainable))
  return jax.tree.map(np.asarray, checkpoint.read_state(workdir / 'checkpoints', abstract)), host


@pytest.fixture(scope='module')
def finished(files):
  """A run that nothing interrupted."""
  done = run(command(files, files / 'whole'))
  assert done.returncode == 0, done.stderr
  return files / 'whole', done.stderr


def steps_of(workdir):
  return {record['step']: {key: value for key, value in record.items() if not key.startswith(('speed/', 'time_s'))}
          for record in metrics(workdir) if 'train/loss_nats' in record}


def test_a_run_learns_and_reports(finished):
  workdir, log = finished
  records = steps_of(workdir)
  assert list(records) == list(range(1, NUM_STEPS + 1))
  assert records[NUM_STEPS]['train/loss_nats'] < records[1]['train/loss_nats'] - 1
  heldout = [record['heldout/loss_nats'] for record in metrics(workdir) if 'heldout/loss_nats' in record]
  assert len(heldout) == 2 and heldout[1] < heldout[0]
  assert f'step {NUM_STEPS}/{NUM_STEPS}  loss ' in log and 'token/s' in log and '% of peak' in log and 'left' in log
  assert json.loads((workdir / 'config_difference.json').read_text())['data.micro_batches'] == {'default': 1, 'value': 2}
  assert list((workdir / 'tensorboard').iterdir())


@pytest.mark.parametrize('seed', [0, 1])
def test_kill_9_at_a_random_step_changes_nothing(files, finished, seed):
  whole, _ = finished
  workdir = files / f'killed{seed}'
  kill_after = np.random.default_rng(seed).integers(3, 30, 2)
  for num_lines in sorted(kill_after):
    process = subprocess.Popen(command(files, workdir), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 200
    while len(metrics_lines(workdir)) < num_lines and process.poll() is None and time.time() < deadline:
      time.sleep(0.002)
    process.kill()
    process.wait()
  assert metrics_lines(workdir), 'nothing was written before the kill'
  assert len(checkpoint.committed_steps(workdir / 'checkpoints')) == 0 or checkpoint.committed_steps(workdir / 'checkpoints')[-1] < NUM_STEPS
  done = run(command(files, workdir))
  assert done.returncode == 0, done.stderr
  resumed, resumed_host = state(files, workdir)
  uninterrupted, host = state(files, whole)
  assert int(resumed.step) == NUM_STEPS
  jax.tree.map(np.testing.assert_array_equal, resumed, uninterrupted)
  assert resumed_host.documents == host.documents
  # The same documents in the same order: every step's loss and position, before and after the kill.
  assert steps_of(workdir) == steps_of(whole)


def metrics_lines(workdir):
  path = workdir / 'metrics.jsonl'
  return path.read_text().splitlines() if path.exists() else []


def test_sigterm_saves_and_the_next_start_goes_on(files, finished):
  workdir = files / 'stopped'
  process = subprocess.Popen(command(files, workdir), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
  while len(metrics_lines(workdir)) < 7 and process.poll() is None:
    time.sleep(0.002)
  process.send_signal(signal.SIGTERM)
  _, log = process.communicate(timeout=200)
  assert process.returncode == 0, log
  stopped = checkpoint.committed_steps(workdir / 'checkpoints')[-1]
  assert 7 <= stopped < NUM_STEPS and f'Stopped by a signal after step {stopped}' in log
  assert run(command(files, workdir)).returncode == 0
  assert steps_of(workdir) == steps_of(finished[0])


def test_the_trained_model_loads_like_any_other(files, finished):
  workdir, _ = finished
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  tuned = policy.load(workdir, mesh, Layout(), 'float32')
  before = hf_weights.load(files / 'model', mesh, Layout())[1]
  assert tuned.chat_template == 'plain'
  assert np.any(np.asarray(tuned.params['embedding']) != np.asarray(before['embedding']))
  np.testing.assert_array_equal(tuned.params['embedding'], state(files, workdir)[0].trainable['embedding'])
  early = checkpoint.committed_steps(workdir / 'checkpoints')[0]
  assert np.any(policy.load(workdir, mesh, Layout(), 'float32', early).params['embedding'] != tuned.params['embedding'])
  with pytest.raises(ValueError, match=f'step=3 was asked of {files}/model, which has no checkpoints directory'):
    policy.load(files / 'model', mesh, Layout(), 'float32', 3)


def test_lora_runs_and_loads_merged(files):
  workdir = files / 'lora'
  done = run(command(files, workdir, '--config.lora.rank=4', '--config.num_steps=6', '--config.layout.scan=False'))
  assert done.returncode == 0, done.stderr
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  tuned = policy.load(workdir, mesh, Layout(), 'float32').params
  before = hf_weights.load(files / 'model', mesh, Layout(), 'bfloat16')[1]
  np.testing.assert_array_equal(tuned['embedding'], before['embedding'].astype('float32'))
  assert np.any(tuned['blocks']['mlp']['up'] != before['blocks']['mlp']['up'].astype('float32'))


BAD = [
    (['--config.data.rowz=3'], 'launch: --config.data.rowz=3 does not fit the config'),
    (['--config.data.rows=3'], 'rows=3 of a batch do not divide over the 2 shards'),
    (['--config.mesh.data=3'], 'mesh data=3 x fsdp=-1 x seq=1 x ulysses=1 x tensor=1 does not match the 2 devices'),
    (['--config.model.path=/nowhere/model'], '/nowhere/model'),
    (['--config.model.chat_template=alpaca'], "chat_template='alpaca' is unknown; use one of plain"),
    (['--config.layout.attention=cudnn'], "layout.attention='cudnn' does not run on cpu"),
    (['--config.layout.remat=everything'], "layout.remat='everything' names unknown intermediates"),
    (['--config.optimizer.warmup_steps=99'], 'optimizer.warmup_steps=99 leaves nothing of num_steps=40'),
    (['--config.lora.rank=-1'], 'config.lora: rank=-1 must be 0 (train everything) or positive'),
    (["--config.data.tasks.train.paths=('/nowhere/*.jsonl',)"], '/nowhere/*.jsonl'),
    (['--config.data.tasks.train.schema=chat'], 'messages'),
]


@pytest.mark.parametrize('arguments, message', BAD, ids=[arguments[0].split('.', 1)[1] for arguments, _ in BAD])
def test_mistakes_are_one_message_before_any_step(files, arguments, message):
  workdir = files / 'bad'
  done = run(command(files, workdir, *arguments))
  assert done.returncode != 0
  assert message in done.stderr and 'Traceback' not in done.stderr, done.stderr[-2000:]
  assert not workdir.exists()


def test_a_bad_row_is_named(files, tmp_path):
  lines = (files / 'data.jsonl').read_text().splitlines()
  lines[41] = '{"question": 5, "answer": "x"}'
  (tmp_path / 'bad.jsonl').write_text('\n'.join(lines) + '\n')
  done = run(command(files, tmp_path / 'run', f"--config.data.tasks.train.paths=('{tmp_path}/bad.jsonl',)"))
  assert done.returncode != 0 and 'bad.jsonl:42' in done.stderr.replace(', row ', ':').replace(' row ', ':'), done.stderr[-1500:]


@pytest.mark.parametrize('arguments, message', [
    (['--config.optimizer.learning_rate=1e-5'], 'optimizer.learning_rate: 0.003 there, 1e-05 now'),
    (['--config.seed=1'], 'seed: 0 there, 1 now'),
])
def test_another_run_is_not_continued_and_nothing_is_lost(files, finished, arguments, message):
  workdir, _ = finished
  before = {path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()}
  done = run(command(files, workdir, *arguments))
  assert done.returncode != 0 and message in done.stderr and 'holds a run that differs' in done.stderr, done.stderr[-1500:]
  assert {path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()} == before
