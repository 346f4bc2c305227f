"""The training program as its users meet it: learns, survives kill -9 in every stage bit for bit, stops on SIGTERM, says no in one message."""

import json
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from launch import stages
from models import hf_weights, sharding
from models.sharding import Layout
from rl import checkpoint, policy
from tests import checkpoints, tiny_model

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 40


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  root = tmp_path_factory.mktemp('train')
  tiny_model.write_model(root / 'model')
  tiny_model.write_model(root / 'teacher', mlp_dim=64)
  tiny_model.write_data(root / 'data.jsonl')
  rows = [{'prompt': f'{number}?', 'chosen': 'abc' + 'd' * (number % 4), 'rejected': 'xyz'} for number in range(64)]
  (root / 'pairs.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return root


def command(files, workdir, *more):
  return [sys.executable, '-m', 'launch.train', '--config=configs/sft.py', f'--config.model.path={files}/model',
          f"--config.data.tasks.train.paths=('{files}/data.jsonl',)", f'--workdir={workdir}', f'--config.num_steps={NUM_STEPS}',
          '--config.checkpoint_every_steps=5', '--config.eval_every_steps=20', '--config.data.rows=4', '--config.data.length=192',
          '--config.data.micro_batches=2', '--config.optimizer.learning_rate=3e-3', '--config.optimizer.warmup_steps=2',
          '--config.mesh.data=2', '--config.cpu_devices=2', *more]


# Small runs of the other stages, 20 steps each; distillation into adapters, from the teacher's words, which are kept.
PAIRS = ['--config.data.length=32', '--config.data.rows=4', '--config.data.micro_batches=1', '--config.data.max_segments=4']
STAGES = {
    'preference': ('configs/dpo.py', ["--config.data.paths=('{files}/pairs.jsonl',)", *PAIRS]),
    'reward': ('configs/reward_model.py', ["--config.data.paths=('{files}/pairs.jsonl',)", *PAIRS]),
    'distillation': ('configs/distill.py', [
        '--config.teacher.path={files}/teacher', "--config.data.tasks.train.paths=('{files}/data.jsonl',)", '--config.loss.top_k=4',
        '--config.lora.rank=4', '--config.data.rows=4', '--config.data.length=192', '--config.data.micro_batches=1']),
    'rl': ('configs/grpo.py', [
        "--config.domains={{'tests/toys:one_token': {{}}}}", '--config.groups=4', '--config.group_size=4', '--config.rows=4',
        '--config.length=24', '--config.rollout.max_new_tokens=1', '--config.rollout.max_length=24', '--config.rollout.slots=16',
        '--config.rollout.steps_per_launch=1', '--config.eval.every_steps=0']),
}
STAGE_STEPS = 20


def stage_command(stage, files, workdir, *more):
  """Return the command of a small run of a stage; other than `command`'s it has no evaluation."""
  if stage == 'supervised':
    return command(files, workdir)
  config, settings = STAGES[stage]
  evaluation = [] if stage == 'rl' else ['--config.eval_every_steps=0']
  return [sys.executable, '-m', 'launch.train', f'--config={config}', f'--config.model.path={files}/model', f'--workdir={workdir}',
          f'--config.num_steps={STAGE_STEPS}', '--config.checkpoint_every_steps=3', '--config.layout.remat=none',
          '--config.optimizer.warmup_steps=2', '--config.optimizer.learning_rate=1e-3', *evaluation,
          *(setting.format(files=files) for setting in settings), *more]


def run(arguments, **environment):
  return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment)


def start(arguments, **environment):
  return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | environment)


def finish(process):
  """Wait for a process and return what it logged."""
  _, log = process.communicate(timeout=500)
  assert process.returncode == 0, log
  return log


def metrics(workdir):
  path = workdir / 'metrics.jsonl'
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope='module')
def finished(files):
  """A run that nothing interrupted."""
  done = run(command(files, files / 'whole'))
  assert done.returncode == 0, done.stderr
  return files / 'whole', done.stderr


def steps_of(workdir):
  """Return everything that was measured of each step but times."""
  skipped = ('speed/', 'timing_s/', 'time_s', 'rollout/tokens_per_s')
  return {record['step']: {key: value for key, value in record.items() if not key.startswith(skipped)}
          for record in metrics(workdir) if 'train/grad_norm' in record}


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


# Preference and RL are killed in tests/rl too, and reward models are trained by the loop of preferences.
@pytest.mark.parametrize('stage', [pytest.param(stage, marks=[pytest.mark.slow] * (stage in ('preference', 'reward', 'rl')))
                                   for stage in stages.STAGES])
def test_kill_9_at_a_random_step_changes_nothing(files, finished, stage):
  is_first = stage == 'supervised'
  workdir, whole = files / f'{stage}_killed', finished[0] if is_first else files / f'{stage}_whole'
  uninterrupted = None if is_first else start(stage_command(stage, files, whole))
  num_steps, num_kills = (NUM_STEPS, 2) if is_first else (STAGE_STEPS, 1)
  kill_after = sorted(np.random.default_rng(list(stages.STAGES).index(stage)).integers(3, num_steps // 2, num_kills).tolist())
  for num_lines in kill_after:
    process = start(stage_command(stage, files, workdir))
    deadline = time.time() + 400
    while len(metrics_lines(workdir)) < num_lines and process.poll() is None and time.time() < deadline:
      time.sleep(0.002)
    process.kill()
    process.communicate()
  killed_at = (checkpoint.committed_steps(workdir / 'checkpoints') or [0])[-1]
  assert len(metrics_lines(workdir)) >= kill_after[-1] and killed_at < num_steps
  finish(start(stage_command(stage, files, workdir)))
  if uninterrupted is not None:
    finish(uninterrupted)
  checkpoints.check_equal(workdir, whole, num_steps)
  assert checkpoint.read_host(workdir / 'checkpoints') == checkpoint.read_host(whole / 'checkpoints')
  # The same data in the same order: every step's loss and position, before and after the kill.
  assert steps_of(workdir) == steps_of(whole) and len(steps_of(whole)) == num_steps


def in_two_processes(arguments):
  """Run a program as two processes that compute together; return (returncode, log) of each."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  processes = [start(arguments, JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES='2', JAX_PROCESS_ID=str(index)) for index in range(2)]
  try:
    logs = [process.communicate(timeout=500)[1] for process in processes]
  finally:
    for process in processes:
      process.kill()  # One that waits for another that failed would do so for minutes.
  return [(process.returncode, log) for process, log in zip(processes, logs, strict=True)]


@pytest.mark.parametrize('stage', ['supervised', *(pytest.param(stage, marks=pytest.mark.slow)
                                                   for stage in ('preference', 'reward', 'distillation'))])
def test_two_processes_compute_what_one_does(files, finished, stage):
  """Each has one of the devices that one process has two of; both write one checkpoint, and one of them the metrics."""
  workdir = files / f'{stage}_two_processes'
  if stage == 'supervised':
    whole, num_steps, arguments = finished[0], NUM_STEPS, command(files, workdir, '--config.cpu_devices=1')
  else:
    whole, num_steps = files / f'{stage}_two_devices', STAGE_STEPS
    finish(start(stage_command(stage, files, whole, '--config.mesh.data=2', '--config.cpu_devices=2')))
    arguments = stage_command(stage, files, workdir, '--config.mesh.data=2')
  for returncode, log in in_two_processes(arguments):
    assert returncode == 0, log
    assert 'mesh {\'data\': 2' in log
  checkpoints.check_equal(workdir, whole, num_steps)
  assert steps_of(workdir) == steps_of(whole) and len(steps_of(whole)) == num_steps


def test_what_processes_cannot_do_together_is_refused(files):
  for returncode, log in in_two_processes(stage_command('rl', files, files / 'rl_two_processes')):
    assert returncode != 0 and 'Traceback' not in log
    assert 'rl.train_rl runs in one process, and there are 2; start it on one host' in log, log
  done = run(command(files, files / 'one_of_many'), JAX_COORDINATOR_ADDRESS='127.0.0.1:1', JAX_NUM_PROCESSES='two')
  assert done.returncode != 0 and "JAX_NUM_PROCESSES='two' must be a whole number" in done.stderr and 'Traceback' not in done.stderr
  assert not (files / 'rl_two_processes').exists() and not (files / 'one_of_many').exists()


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
  np.testing.assert_array_equal(tuned.params['embedding'], checkpoints.newest_arrays(workdir)[1]['trainable']['embedding'])
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
    (['--config.data.tasks.train.heldout_fraction=0'], "Split 'heldout' of train is empty, so there is nothing to draw; change heldout_fraction, "
     'set eval_every_steps=0 or leave the task out'),
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
