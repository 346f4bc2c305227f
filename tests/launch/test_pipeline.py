"""A pipeline as its users meet it: stages feed each other, kill -9 anywhere changes nothing, and other settings are refused."""

import fcntl
import json
import os
from pathlib import Path
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import pytest

from launch import convert
from rl import checkpoint, lineage
from tests import tiny_model

ROOT = Path(__file__).resolve().parents[2]
_SETTINGS = {
    'mixture': ("components={'general': {'rate': 1.0, 'domains': {'tests/toys:echo': {}}, 'count': 64}}", 'heldout_fraction=0.1'),
    'pairs': ('problems=16',),
    'rlvr': ('eval.problems=8', 'length=64', 'rollout.max_length=64', 'rollout.max_new_tokens=1', 'num_steps=3'),
    'sft': ('data.length=64', 'num_steps=30', 'checkpoint_every_steps=5', 'eval_every_steps=10'),
    'reward': ('data.length=128', 'num_steps=6', 'checkpoint_every_steps=2', 'eval_every_steps=2'),
    'preference': ('data.length=128', 'num_steps=6', 'checkpoint_every_steps=2', 'eval_every_steps=2'),
    'student': ('data.length=64', 'num_steps=6', 'checkpoint_every_steps=2', 'eval_every_steps=2'),
}
SMALL = ['--config=configs/pipeline.py:size=tiny', "--config.domains={'tests/toys:echo': {}}",
         *(f'--config.{part}.{setting}' for part, settings in _SETTINGS.items() for setting in settings)]


class Kill(NamedTuple):
  """Where a process is killed: before a call of a function; see `killing/sitecustomize.py`."""
  function: str
  call: int = 1
  when: str = ''
  victim: str = 'self'


def command(model, workdir, *more, settings=SMALL):
  return [sys.executable, '-m', 'launch.pipeline', *settings, f'--config.model.path={model}', f'--workdir={workdir}', *more]


def execute(words, kill=None):
  """Run a program, to be killed or not, and return what it said."""
  environment = dict(os.environ)
  if kill:
    environment |= {'KILL_AT': json.dumps(kill._asdict()), 'PYTHONPATH': str(ROOT / 'tests' / 'launch' / 'killing')}
  done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1200)
  assert 'outlived its parent' not in done.stderr
  return done


def run(*arguments, kill=None, **settings):
  return execute(command(*arguments, **settings), kill)


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


def without_times(value):
  """Return JSON values without times, attempts, the code's revision, and the digests of checkpoints, in whose files times stand."""
  if isinstance(value, dict):
    left_out = r'(start|end|time)_s|(work|last_attempt)(_cpu)?_s|attempts|revision|timing_s.*|speed/.*|rollout/tokens_per_s'
    return {key: without_times(inner) for key, inner in value.items() if not re.fullmatch(left_out, key)}
  if isinstance(value, list):
    return [without_times(inner) for inner in value]
  return re.sub('^(step [0-9]+): .*', r'\1', value) if isinstance(value, str) else value


def of_run(directory):
  """Return what a run wrote of its steps, and the scores of a reward model's."""
  lines = [without_times(json.loads(line)) for name in ('metrics.jsonl', 'trajectories.jsonl') if (directory / name).exists()
           for line in (directory / name).read_text().splitlines()]
  return lines, {path.name: path.read_text() for path in (*directory.glob('*.json'), *directory.glob('*.svg'))}


def outcome(workdir):
  """Return what a pipeline made: files bit for bit, and what has times in it without them."""
  files = {path.relative_to(workdir): path.read_bytes() for place in ('models', 'data') for path in sorted((workdir / place).rglob('*'))
           if path.is_file()}
  texts = {path.name: without_times(json.loads(path.read_text().replace(str(workdir), 'P')))
           for path in (workdir / 'lineage.json', *sorted((workdir / 'evaluations').iterdir()))}
  runs = {stage: of_run(workdir / stage) for stage in ('sft', 'reward', 'preference', 'rlvr', 'student')}
  return files, texts, {stage: (lines, {name: text.replace(str(workdir), 'P') for name, text in made.items()})
                        for stage, (lines, made) in runs.items()}


@pytest.fixture
def kept(finished):
  """The finished pipeline, and what it made; what a test does to it is undone."""
  workdir, _ = finished
  copy = workdir.with_name('copy')
  shutil.copytree(workdir, copy)
  yield workdir, outcome(workdir)
  shutil.rmtree(workdir)
  copy.rename(workdir)


def test_each_stage_feeds_the_next_and_it_is_written_down(model, finished):
  workdir, done = finished
  value = lineage.read_json(workdir / 'lineage.json')
  base, sft, reward, preference, rlvr, student = value['stages']
  assert [entry['parent'] for entry in (sft, reward, preference, rlvr, student)] == ['base', 'sft', 'sft', 'preference', 'rlvr']
  assert base['stage'] == 'base' and 'model' not in reward and all(
      entry['heldout']['graded'] == 8 for entry in (base, sft, preference, rlvr, student))
  assert sft['parent_model'] == {'path': str(model), 'fingerprint': lineage.fingerprint(model)}
  for entry, parent in ((reward, sft), (preference, sft), (rlvr, preference)):
    assert entry['parent_model'] == parent['model'] == {
        'path': f'{workdir}/models/{parent["stage"]}', 'fingerprint': lineage.fingerprint(workdir / 'models' / parent['stage'])}
  assert student['inputs'][f'{workdir}/models/rlvr'] == rlvr['model']['fingerprint']
  mixture, pairs = sft['data'][0], preference['data'][0]
  assert mixture['files'] == [lineage.describe_file(workdir / 'data' / 'mixture' / 'general_toy_echo_1.jsonl')]
  assert mixture['files'][0]['rows'] == mixture['report']['general_toy_echo_1']['rows'] == 64
  assert pairs['files'] == [lineage.describe_file(workdir / 'data' / 'pairs_sft.jsonl')] and pairs == reward['data'][0]
  assert pairs['report']['pairs'] == pairs['files'][0]['rows'] and sum(pairs['report']['problems'].values()) == 16
  assert preference['parent_checkpoint'] == sft['checkpoint'] and sft['parent_checkpoint'] is None
  assert preference['config']['model']['path'] == f'{workdir}/models/sft'
  assert preference['config_difference']['checkpoint_every_steps'] == {'default': 100, 'value': 2}
  assert sft['revision'] == student['revision'] and sft['checkpoint'].startswith('step 30: ') and sft['attempts'] == 1
  assert sft['start_s'] < sft['end_s'] <= preference['end_s']
  assert 'stage             from  steps' in done.stdout and f'The policy is in {workdir}/models/student.' in done.stdout
  assert len({weights(workdir, stage) for stage in ('sft', 'preference', 'rlvr', 'student_start', 'student')}) == 5
  assert not list((workdir / 'data').glob('*.samples')) and not list((workdir / 'evaluations').glob('*.samples'))


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


def test_kill_9_of_the_pipeline_changes_nothing(model, kept):
  workdir, before = kept
  rng = np.random.default_rng(0)
  for path in (workdir / 'records').iterdir():
    if path.name not in ('base.evaluate.json', 'sft.evaluate.json'):
      path.unlink()
  shutil.rmtree(workdir / 'sft')
  shutil.rmtree(workdir / 'data' / 'mixture')

  # Within the mixture, which the pipeline writes itself.
  done = run(model, workdir, '--until=sft', kill=Kill('rl.data.demonstrations:plain', int(rng.integers(2, 65))))
  assert done.returncode == -signal.SIGKILL and [path.name for path in (workdir / 'data' / 'mixture').iterdir()] == [
      '.general_toy_echo_1.jsonl.partial']

  # Within a run, which ends with the pipeline.
  kill_at = int(rng.integers(6, 30))
  done = run(model, workdir, '--until=sft', kill=Kill('rl.monitor:Monitor.write', kill_at, victim='parent'))
  assert done.returncode == -signal.SIGKILL and num_lines(workdir / 'sft' / 'metrics.jsonl') == kill_at - 1
  assert record(workdir, 'data.mixture')['attempts'] == 2 and 'end_s' not in record(workdir, 'sft.train')

  # Between an export and its record; an earlier export has left what a kill within it leaves.
  for left in ('partial', 'old'):
    shutil.copytree(workdir / 'models' / 'sft', workdir / 'models' / f'.sft.1.{left}')
  done = run(model, workdir, '--until=sft', kill=Kill('rl.lineage:write_json', 2, 'sft.export.json'))
  assert done.returncode == -signal.SIGKILL and record(workdir, 'sft.train')['attempts'] == 2 and 'end_s' not in record(workdir, 'sft.export')

  done = run(model, workdir, '--until=sft')
  assert done.returncode == 0 and 'data/mixture: done before.' in done.stderr and 'sft/train: done before.' in done.stderr, done.stderr
  files, texts, runs = outcome(workdir)
  assert files == before[0] and runs == before[2]
  assert texts['lineage.json']['stages'] == before[1]['lineage.json']['stages'][:2]


@pytest.mark.parametrize('name, output, num_groups', [
    ('data.pairs_sft', 'data/pairs_sft.jsonl', 16), ('sft.evaluate', 'evaluations/sft.json', 8)])
def test_sampling_goes_on_where_it_was_killed(kept, name, output, num_groups):
  workdir, before = kept
  path, words = workdir / output, [sys.executable, *record(workdir, name)['command']]
  samples = path.with_name(f'{path.name}.samples')
  path.unlink()
  done = execute(words, Kill('rl.rollout.replay:encode', 7))
  assert done.returncode == -signal.SIGKILL and not path.exists(), done.stderr
  first, *groups = samples.read_text().splitlines()
  assert len(groups) == 6
  # As if others had been finished first, and the kill had fallen within a line.
  samples.write_text('\n'.join([first, *groups[2:], groups[0][:100]]))
  done = execute(words)
  assert done.returncode == 0 and f'4 of {num_groups} groups are there from before, in {samples}' in done.stderr, done.stderr
  assert outcome(workdir) == before


def test_reinforcement_learning_goes_on_where_it_was_killed(kept):
  workdir, before = kept
  words = [sys.executable, *record(workdir, 'rlvr.train')['command']]
  shutil.rmtree(workdir / 'rlvr')
  # The samples of the last step are there, and not yet learned from.
  done = execute(words, Kill('rl.rewards:pay', 3))
  assert done.returncode == -signal.SIGKILL and max(checkpoint.committed_steps(workdir / 'rlvr' / 'checkpoints'), default=0) < 3
  done = execute(words)
  assert done.returncode == 0, done.stderr
  convert.convert(f'{workdir}/rlvr', f'{workdir}/models/rlvr', 'float32', overwrite=True)
  assert outcome(workdir) == before


@pytest.mark.slow
def test_every_action_killed_in_its_middle(model, finished):
  """Each is killed at a random point, the process itself or the pipeline in turn, and before what comes last in it and in its record."""
  workdir = model.parent / 'killed'
  rng = np.random.default_rng(0)

  def within(function, first, last):
    return Kill(function, int(rng.integers(first, last + 1)), victim=str(rng.choice(['self', 'parent'])))

  step, group, sealed = 'rl.monitor:Monitor.write', 'rl.rollout.replay:encode', 'models.tokenizer:save'
  kills = [
      ('base.evaluate', within(group, 2, 8)), ('base.evaluate', within('launch.rollouts:forget', 1, 1)),
      ('data.mixture', Kill('rl.data.demonstrations:plain', int(rng.integers(2, 65)))),
      ('sft.train', within(step, 2, 33)), ('sft.train', Kill('rl.lineage:write_json', 2, 'sft.train.json')),
      ('sft.export', within(sealed, 1, 1)), ('sft.export', Kill('rl.lineage:write_json', 2, 'sft.export.json')),
      ('sft.evaluate', within(group, 2, 8)),
      ('data.pairs_sft', within(group, 2, 16)), ('data.pairs_sft', within('launch.rollouts:forget', 1, 1)),
      ('data.pairs_sft', Kill('rl.lineage:write_json', 2, 'data.pairs_sft.json')),
      ('reward.train', within(step, 2, 9)), ('reward.train', within('rl.reward_model:write_calibrations', 1, 1)),
      ('preference.train', within('rl.reference_logprobs:write', 1, 2)), ('preference.train', within(step, 2, 9)),
      ('preference.export', within(sealed, 1, 1)), ('preference.evaluate', within(group, 2, 8)),
      ('rlvr.train', within('rl.rewards:pay', 2, 3)), ('rlvr.train', within('rl.monitor:TrajectoryLog.write', 1, 2)),
      ('rlvr.export', within(sealed, 1, 1)), ('rlvr.evaluate', within(group, 2, 8)),
      ('student.start', within(sealed, 1, 1)), ('student.train', within(step, 2, 9)), ('student.export', within(sealed, 1, 1)),
      ('student.evaluate', within(group, 2, 8))]
  for name, kill in kills:
    done = run(model, workdir, kill=kill)
    is_own = name == 'data.mixture' or kill.victim == 'parent' or kill.function == 'rl.lineage:write_json'
    assert done.returncode == (-signal.SIGKILL if is_own else 1), (name, kill, done.stderr)
    assert is_own or f'{name.replace(".", "/")} ended with status -9' in done.stderr
    assert record(workdir, name)['attempts'] >= 1 and 'end_s' not in record(workdir, name), (name, kill)
  done = run(model, workdir)
  assert done.returncode == 0, done.stderr
  assert outcome(workdir) == outcome(finished[0])


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
  assert [line for line in lines if line.startswith('# ') and '->' in line] == [f'# {name} -> {tmp_path}/p/{output}' for name, output in (
      ('base/evaluate', 'evaluations/base.json'), ('data/mixture', 'data/mixture'), ('sft/train', 'sft'), ('sft/export', 'models/sft'),
      ('sft/evaluate', 'evaluations/sft.json'))]
  assert lines[-3] == f'python -m launch.convert --source={tmp_path}/p/sft --target={tmp_path}/p/models/sft --dtype=float32 --overwrite'


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
