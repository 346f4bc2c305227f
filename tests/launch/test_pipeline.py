"""A pipeline as its users meet it: stages feed each other, kill -9 anywhere changes nothing, and other settings are refused."""

import fcntl
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rl import checkpoint, lineage
from tests import tiny_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    '--config=configs/pipeline.py:size=tiny', "--config.stages=('sft', 'preference')", '--config.evaluate=False',
    "--config.mixture.components={'general': {'rate': 1.0, 'domains': {'tests/toys:one_token': {}}, 'count': 64}}",
    "--config.domains={'tests/toys:one_token': {}}", '--config.pairs.problems=16', '--config.rlvr.eval.problems=8', '--config.rlvr.length=64',
    '--config.rlvr.rollout.max_length=64', '--config.rlvr.rollout.max_new_tokens=1', '--config.sft.num_steps=30', '--config.sft.data.length=64',
    '--config.sft.checkpoint_every_steps=5', '--config.sft.eval_every_steps=0', '--config.preference.num_steps=10',
    '--config.preference.data.length=128', '--config.preference.checkpoint_every_steps=3', '--config.preference.eval_every_steps=0']


def command(model, workdir, *more, settings=SMALL):
  return [sys.executable, '-m', 'launch.pipeline', *settings, f'--config.model.path={model}', f'--workdir={workdir}', *more]


def run(*arguments, **settings):
  return subprocess.run(command(*arguments, **settings), cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny_model.write_model(tmp_path_factory.mktemp('pipeline') / 'model')


@pytest.fixture(scope='module')
def finished(model):
  """A pipeline that nothing interrupted."""
  done = run(model, model.parent / 'whole')
  assert done.returncode == 0, done.stderr
  return model.parent / 'whole', done


def weights(workdir, stage):
  return (workdir / 'models' / stage / 'model.safetensors').read_bytes()


def record(workdir, name):
  path = workdir / 'records' / f'{name}.json'
  return lineage.read_json(path) if path.exists() else {}


def test_each_stage_feeds_the_next_and_it_is_written_down(model, finished):
  workdir, done = finished
  value = lineage.read_json(workdir / 'lineage.json')
  base, sft, preference = value['stages']
  assert (base['stage'], sft['parent'], preference['parent']) == ('base', 'base', 'sft')
  assert sft['parent_model'] == {'path': str(model), 'fingerprint': lineage.fingerprint(model)}
  assert preference['parent_model'] == sft['model'] == {
      'path': f'{workdir}/models/sft', 'fingerprint': lineage.fingerprint(workdir / 'models' / 'sft')}
  mixture, pairs = sft['data'][0], preference['data'][0]
  assert mixture['files'] == [lineage.describe_file(workdir / 'data' / 'mixture' / 'general_toy_one_token_1.jsonl')]
  assert mixture['files'][0]['rows'] == mixture['report']['general_toy_one_token_1']['rows'] == 64
  assert pairs['files'] == [lineage.describe_file(workdir / 'data' / 'pairs_sft.jsonl')]
  assert pairs['report']['pairs'] == pairs['files'][0]['rows'] and sum(pairs['report']['problems'].values()) == 16
  assert preference['parent_checkpoint'] == sft['checkpoint'] and sft['parent_checkpoint'] is None
  assert preference['config']['model']['path'] == f'{workdir}/models/sft'
  assert preference['config_difference']['checkpoint_every_steps'] == {'default': 100, 'value': 3}
  assert sft['revision'] == value['stages'][2]['revision'] and sft['checkpoint'].startswith('step 30: ') and sft['attempts'] == 1
  assert sft['start_s'] < sft['end_s'] <= preference['end_s']
  assert 'stage       from  steps' in done.stdout and f'The policy is in {workdir}/models/preference.' in done.stdout
  assert weights(workdir, 'sft') != weights(workdir, 'preference')


def test_the_report_shows_the_table(finished):
  workdir, done = finished
  shown = subprocess.run([sys.executable, '-m', 'launch.report', f'--workdir={workdir}'], cwd=ROOT, capture_output=True, text=True, check=False)
  assert shown.returncode == 0, shown.stderr
  assert shown.stdout == done.stdout[done.stdout.index('stage  '):]


def start(model, workdir):
  return subprocess.Popen(command(model, workdir), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
  deadline = time.time() + 300
  while not condition() and process.poll() is None and time.time() < deadline:
    time.sleep(0.002)
  assert process.poll() is None, process.stderr.read()


def num_lines(path):
  return len(path.read_text().splitlines()) if path.exists() else 0


def child_of(process):
  return int(Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()[0])


def is_alive(pid):
  status = Path(f'/proc/{pid}/stat')
  return status.exists() and status.read_text().rpartition(')')[2].split()[0] != 'Z'


def test_kill_9_within_and_between_stages_changes_nothing(model, finished):
  workdir = model.parent / 'killed'
  rng = np.random.default_rng(0)
  metrics = {stage: workdir / stage / 'metrics.jsonl' for stage in ('sft', 'preference')}

  # The pipeline, within a stage: its run ends with it.
  process = start(model, workdir)
  kill_after = int(rng.integers(6, 20))
  wait_for(lambda: num_lines(metrics['sft']) >= kill_after, process)
  child = child_of(process)
  process.kill()
  process.communicate()
  deadline = time.time() + 10
  while is_alive(child) and time.time() < deadline:
    time.sleep(0.01)
  # It did not go on to its own end, at step 30.
  assert not is_alive(child) and num_lines(metrics['sft']) < 30 and 'end_s' not in record(workdir, 'sft.train')

  # The pipeline, between two processes.
  process = start(model, workdir)
  wait_for(lambda: 'end_s' in record(workdir, 'sft.train'), process)
  process.kill()
  process.communicate()
  assert record(workdir, 'sft.train')['attempts'] == 2 and not (workdir / 'models' / 'sft').exists()

  # The run alone: the pipeline says so.
  process = start(model, workdir)
  wait_for(lambda: num_lines(metrics['preference']) >= 4, process)
  os.kill(child_of(process), signal.SIGKILL)
  _, log = process.communicate(timeout=60)
  assert process.returncode == 1 and 'preference/train ended with status -9' in log and 'Traceback' not in log

  # After an export and before its record, as if a kill had fallen there.
  (workdir / 'records' / 'sft.export.json').write_text(json.dumps(
      {key: value for key, value in record(workdir, 'sft.export').items() if key not in ('end_s', 'output', 'last_attempt_s')}))
  (workdir / 'models' / '.sft.1.partial').mkdir()

  done = run(model, workdir)
  assert done.returncode == 0, done.stderr
  assert 'data/mixture: done before.' in done.stderr and 'sft/train: done before.' in done.stderr
  assert record(workdir, 'data.pairs_sft')['attempts'] == 1 and record(workdir, 'preference.train')['attempts'] == 2
  assert sorted(path.name for path in (workdir / 'models').iterdir()) == ['preference', 'sft']
  for stage in ('sft', 'preference'):
    assert weights(workdir, stage) == weights(finished[0], stage)
  assert (workdir / 'data' / 'pairs_sft.jsonl').read_bytes() == (finished[0] / 'data' / 'pairs_sft.jsonl').read_bytes()


def test_sigterm_reaches_the_run_which_saves(model):
  workdir = model.parent / 'stopped'
  process = start(model, workdir)
  wait_for(lambda: num_lines(workdir / 'sft' / 'metrics.jsonl') >= 7, process)
  process.send_signal(signal.SIGTERM)
  _, log = process.communicate(timeout=120)
  assert process.returncode == 1 and 'stopped by a signal during sft/train; run the same command again' in log, log
  stopped = checkpoint.committed_steps(workdir / 'sft' / 'checkpoints')[-1]
  assert 7 <= stopped < 30 and f'Stopped by a signal after step {stopped}' in log and 'end_s' not in record(workdir, 'sft.train')


def test_a_directory_in_use_is_left_alone(model, finished):
  workdir, _ = finished
  with (workdir / '.lock').open() as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    done = run(model, workdir, '--until=base')
  assert done.returncode == 1 and f'{workdir} is in use by another launch.pipeline' in done.stderr and 'Traceback' not in done.stderr


def test_other_settings_and_other_files_are_refused_and_nothing_is_lost(model, finished):
  workdir, _ = finished
  before = {path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()}
  done = run(model, workdir, '--config.sft.num_steps=31')
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert f'{workdir}/sft was made, or begun, otherwise' in done.stderr
  assert "'--config.num_steps=30' then; '--config.num_steps=31' now" in done.stderr
  config = Path(model) / 'config.json'
  text = config.read_text()
  config.write_text(text + ' ')
  done = run(model, workdir)
  config.write_text(text)
  assert done.returncode == 1 and f'{model}: ' in done.stderr and 'was made, or begun, otherwise' in done.stderr
  assert {path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()} == before


def test_a_dry_run_prints_commands_and_makes_nothing(model, tmp_path):
  done = run(model, tmp_path / 'p', '--dry_run', '--until=sft')
  assert done.returncode == 0 and not (tmp_path / 'p').exists(), done.stderr
  lines = done.stdout.splitlines()
  assert [line for line in lines if line.startswith('# ') and '->' in line] == [
      f'# data/mixture -> {tmp_path}/p/data/mixture', f'# sft/train -> {tmp_path}/p/sft', f'# sft/export -> {tmp_path}/p/models/sft']
  assert lines[-1] == f'python -m launch.convert --source={tmp_path}/p/sft --target={tmp_path}/p/models/sft --dtype=float32 --overwrite'


@pytest.mark.slow
def test_all_stages_on_their_own_domains(tmp_path):
  model = tiny_model.write_model(tmp_path / 'model', max_length=2048)
  done = run(model, tmp_path / 'p', settings=['--config=configs/pipeline.py:size=tiny'])
  assert done.returncode == 0, done.stderr
  stages = {entry['stage']: entry for entry in lineage.read_json(tmp_path / 'p' / 'lineage.json')['stages']}
  assert list(stages) == ['base', 'sft', 'reward', 'preference', 'rlvr', 'student']
  assert stages['sft']['key_metric']['last'][1] < stages['sft']['key_metric']['first'][1]
  assert stages['reward']['key_metric']['name'] == 'heldout/accuracy' and stages['reward']['parent'] == 'sft' and 'model' not in stages['reward']
  assert stages['rlvr']['parent_model'] == stages['preference']['model']
  assert stages['student']['parent'] == 'rlvr' and stages['student']['inputs'][f'{tmp_path}/p/models/rlvr'] == (
      stages['rlvr']['model']['fingerprint'])
  assert stages['student']['key_metric']['last'][1] > stages['student']['key_metric']['first'][1]
  assert all(stages[name]['heldout']['graded'] == 16 for name in ('base', 'sft', 'preference', 'rlvr', 'student'))
