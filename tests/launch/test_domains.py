"""The programs on domains, as a user runs them: demonstrations, evaluation on held-out problems, and a run of GRPO from the command line."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from rl import monitor
from tests import tiny_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = ['--config.rollout.max_new_tokens=4', '--config.rollout.max_length=64', '--config.rollout.slots=8', '--config.eval.problems=6']


def run(program, *arguments):
  return subprocess.run([sys.executable, '-m', f'launch.{program}', *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
                        env=os.environ | {'JAX_PLATFORMS': 'cpu'})


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny_model.write_model(tmp_path_factory.mktemp('domains') / 'model')


def test_demonstrations_are_data(tmp_path):
  for name in ('a', 'b'):
    done = run('prepare_data', '--domain=arithmetic/python', '--levels=1,3', '--count=20', f'--output={tmp_path}/{name}.jsonl')
    assert done.returncode == 0, done.stderr
  assert (tmp_path / 'a.jsonl').read_bytes() == (tmp_path / 'b.jsonl').read_bytes()
  rows = [json.loads(line) for line in (tmp_path / 'a.jsonl').read_text().splitlines()]
  assert len({row['messages'][0]['content'] for row in rows}) == 20
  assert [message['role'] for message in rows[0]['messages']] == ['user', 'assistant', 'tool', 'assistant']
  assert all(set(message) == {'role', 'content'} for row in rows for message in row['messages'])


@pytest.mark.parametrize('arguments, message', [
    (['--domain=nosuch'], "domain 'nosuch' is unknown"),
    (['--domain=arithmetic/python', '--levels=1,x'], '--levels=1,x must be whole numbers'),
    (['--domain=arithmetic/python', '--levels=9'], 'levels are 1 to 5'),
    (['--domain=word_problems/gsm8k', '--path=DATA', '--count=50'], 'has only 2 different problems'),
])
def test_demonstrations_that_cannot_be(tmp_path, arguments, message):
  rows = [{'question': f'What is {n} + 1?', 'answer': f'{n} + 1 = {n + 1}\n#### {n + 1}'} for n in range(2)]
  (tmp_path / 'data.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  arguments = [argument.replace('DATA', f'{tmp_path}/data.jsonl') for argument in arguments]
  done = run('prepare_data', *arguments, f'--output={tmp_path}/out.jsonl')
  if message.startswith('has only'):
    assert done.returncode != 0 and 'different problems' in done.stderr and 'lower the count' in done.stderr, done.stderr
  else:
    assert done.returncode != 0 and message in done.stderr and 'Traceback' not in done.stderr, done.stderr
  assert not (tmp_path / 'out.jsonl').exists()


def test_a_teacher_that_is_never_right_leaves_nothing(model, tmp_path):
  done = run('prepare_data', '--domain=arithmetic/integers', f'--teacher={model}', '--verified', '--count=3', '--max_new_tokens=2',
             '--max_length=128', '--slots=4', f'--output={tmp_path}/out.jsonl')
  assert done.returncode != 0 and "wrote nothing to keep: {'cut off': 3" in done.stderr and 'Traceback' not in done.stderr, done.stderr
  assert not (tmp_path / 'out.jsonl').exists()
  done = run('prepare_data', '--domain=arithmetic/integers', '--verified', f'--output={tmp_path}/out.jsonl')
  assert done.returncode != 0 and '--verified says which texts of a teacher are kept, and there is no --teacher' in done.stderr, done.stderr


def test_evaluating_on_held_out_problems(model, tmp_path):
  done = run('evaluate', f'--model={model}', '--config=configs/grpo.py', "--config.domains={'arithmetic/integers': {'levels': (1, 2)}}",
             f'--output={tmp_path}/base.json', '--dtype=float32', *SMALL)
  assert done.returncode == 0, done.stderr
  assert 'held-out pass@1 0.0000' in done.stdout and '(0 of 6 problems, 0 not graded' in done.stdout
  assert 'arithmetic/integers/2' in done.stdout
  results = json.loads((tmp_path / 'base.json').read_text())
  assert (results['passed'], results['graded'], len(results['trajectories'])) == (0, 6, 6)
  assert {line['problem_id'].split('/')[2] for line in results['trajectories']} == {'heldout'}


def test_what_to_evaluate_on_is_said_once(model):
  for arguments in ([], ['--config=configs/grpo.py', '--data=x.jsonl']):
    done = run('evaluate', f'--model={model}', *arguments)
    assert done.returncode != 0 and 'give one of them, files or a configuration of domains' in done.stderr


def test_a_run_from_the_command_line(model, tmp_path):
  done = run('train', '--config=configs/grpo.py:variant=dapo', f'--config.model.path={model}', '--config.num_steps=2',
             "--config.domains={'tests/toys:one_token': {}}", '--config.groups=4', '--config.group_size=16', '--config.length=64',
             '--config.rows=2', '--config.overlong_buffer=1', '--config.layout.compute_dtype=float32', '--config.lora.rank=4',
             '--config.eval.every_steps=2', f'--workdir={tmp_path}/run', *SMALL, '--config.rollout.max_new_tokens=1')
  assert done.returncode == 0, done.stderr
  assert 'step 1/2  reward ' in done.stderr and 'tok/s' in done.stderr and 'decode ' in done.stderr and 'train ' in done.stderr
  assert 'Held-out pass@1 with 95 % intervals:' in done.stdout and 'step 0' in done.stdout and 'step 2' in done.stdout
  for name in ('metrics.jsonl', 'trajectories.jsonl', 'config.json', 'config_difference.json', 'tensorboard', 'checkpoints'):
    assert (tmp_path / 'run' / name).exists()


def test_a_run_that_starts_afresh_keeps_nothing_of_a_killed_one(tmp_path):
  for start_step, wanted in ((0, []), (2, [0, 1, 2])):
    path = tmp_path / str(start_step) / monitor.TRAJECTORIES_FILE
    path.parent.mkdir()
    path.write_text(''.join(json.dumps({'step': step}) + '\n' for step in range(5)) + '{"st')
    with monitor.TrajectoryLog(path.parent, start_step):
      pass
    assert [json.loads(line)['step'] for line in path.read_text().splitlines()] == wanted
