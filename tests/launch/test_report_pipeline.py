"""What is told of a pipeline at its end: cost and key metric of each stage, what each policy solves that the one before did not."""

import json

import pytest

from launch import report_pipeline
from launch.pipeline_plan import Action, Stage
from rl import monitor
from tests.launch.test_report import trajectory

# (domain, level) -> whether a stage solves each of its problems.
SOLVED = {
    'base': {('arithmetic/python', 1): [0, 0, 0], ('word_problems/generated', 1): [0, 1]},
    'sft': {('arithmetic/python', 1): [1, 0, 0], ('word_problems/generated', 1): [1, 1]},
    'preference': {('arithmetic/python', 1): [1, 1, 0], ('word_problems/generated', 1): [1, 0]},
}


def write_evaluation(workdir, stage):
  lines = [monitor.trajectory_record(0, 'eval', trajectory(f'{domain}/heldout/{level}/{index}', domain, level, index, 0, float(reward)))
           for (domain, level), rewards in SOLVED[stage].items() for index, reward in enumerate(rewards)]
  path = workdir / 'evaluations' / f'{stage}.json'
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps({'name': f'a/path/of/{stage}', 'trajectories': lines}))


def metric(name, first, last, comparisons=None):
  return {'name': name, 'first': first, 'last': last, 'comparisons': comparisons}


@pytest.fixture
def shown(tmp_path):
  for stage in SOLVED:
    write_evaluation(tmp_path, stage)
  heldout = {'passed': 1, 'graded': 5}
  return report_pipeline.summary(tmp_path, {'stages': [
      {'stage': 'base', 'parent': None, 'data': [], 'heldout': heldout, 'model': {'path': 'base.gguf'}, 'work_s': 10.4, 'work_cpu_s': 20.0},
      {'stage': 'sft', 'parent': 'base', 'data': [], 'steps': 30, 'heldout': heldout, 'model': {'path': 'p/models/sft'}, 'work_s': 100.0,
       'work_cpu_s': 180.2, 'key_metric': metric('train/loss_nats', (1, 2.0), (30, 0.125))},
      {'stage': 'reward', 'parent': 'sft', 'data': [], 'steps': 12, 'work_s': 50.0, 'work_cpu_s': 90.0,
       'key_metric': metric('heldout/accuracy', (12, 0.9), (12, 0.9), 20)},
      {'stage': 'preference', 'parent': 'sft', 'data': [], 'steps': 8, 'heldout': heldout, 'model': {'path': 'p/models/preference'},
       'work_s': 40.0, 'work_cpu_s': 70.0, 'key_metric': metric('heldout/accuracy', (4, 0.5), (8, 0.75), 20)}]})


def row(text, start, number=0):
  """Return the cells of the line that starts so, the `number`-th of them."""
  line = [line for line in text.splitlines() if line.startswith(start)][number]
  return [cell for cell in line.split('  ') if cell]


def test_each_stage_has_its_cost_and_its_metric(shown):
  assert [cell.strip() for cell in row(shown, 'sft')] == ['sft', 'base', '30', '100', '180', 'train/loss_nats', '2.0000 (step 1)',
                                                           '0.1250 (step 30)']
  # Measured once, so there is no first; 18 of 20 by Wilson.
  assert [cell.strip() for cell in row(shown, 'reward')] == ['reward', 'sft', '12', '50', '90', 'heldout/accuracy',
                                                              '90.0% [69.9%, 97.2%] of 20 pairs']
  assert [cell.strip() for cell in row(shown, 'preference')][-2:] == ['0.5000 (step 4)', '75.0% [53.1%, 88.8%] of 20 pairs']
  assert [cell.strip() for cell in row(shown, 'in all')] == ['in all', '200', '360']


def test_each_policy_is_compared_with_the_one_before_it_on_the_same_problems(shown):
  of = {stage: [cell.strip() for cell in row(shown, stage, number)] for stage, number in (('base', 1), ('sft', 1), ('preference', 1))}
  assert of['base'][:2] == ['base', '1 of 5'] and of['base'][2].startswith('20.0% [')
  assert of['sft'][1] == '3 of 5' and of['sft'][3].startswith('+40.0 points [') and of['sft'][3].endswith('(+2 -0 of 5)')
  assert of['preference'][1] == '3 of 5' and of['preference'][3].startswith('+0.0 points [') and of['preference'][3].endswith('(+1 -1 of 5)')
  assert '\n\nbase to preference: +40.0 points [' in shown
  assert [cell.strip() for cell in row(shown, 'arithmetic/python')][:5] == ['arithmetic/python', '3', '0.0%', '33.3%', '66.7%']
  assert [cell.strip() for cell in row(shown, 'word_problems/generated')][:5] == ['word_problems/generated', '2', '50.0%', '100.0%', '50.0%']
  assert shown.endswith('The policy is in p/models/preference.')


def test_stages_without_evaluations_have_no_table_of_them(tmp_path):
  text = report_pipeline.summary(tmp_path, {'stages': [{'stage': 'base', 'parent': None, 'data': [], 'model': {'path': 'base.gguf'}}]})
  assert 'pass@1' not in text and row(text, 'base') == ['base'] and text.endswith('The policy is in base.gguf.')


@pytest.mark.parametrize('stage, lines, expected', [
    ('reward', [{'heldout/accuracy': 0.5, 'heldout/comparisons': 20.0}, {'heldout/accuracy': 0.75, 'heldout/comparisons': 20.0}],
     metric('heldout/accuracy', (1, 0.5), (2, 0.75), 20)),
    ('reward', [{'reward_model/accuracy': 0.5}, {'reward_model/accuracy': 0.25}], metric('reward_model/accuracy', (1, 0.5), (2, 0.25))),
    ('reward', [{'train/loss': 1.0}], None),
    # The rewards of two steps are of different problems.
    ('rlvr', [{'critic/score/mean': 0.5}, {'critic/score/mean': 0.25}], None),
])
def test_the_key_metric_of_a_run(tmp_path, stage, lines, expected):
  monitor.write_config(tmp_path, {'stage': 'reward', 'model': {'path': 'm'}, 'num_steps': 2, 'seed': 0}, {})
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps({'step': step, 'time_s': float(step), **line}) + '\n'
                                                  for step, line in enumerate(lines, 1)))
  assert report_pipeline._key_metric(stage, tmp_path) == expected


def test_data_of_two_stages_is_the_work_of_the_first():
  action = Action('data/pairs_sft', ('-m', 'launch.prepare_pairs'), (), 'pairs.jsonl')
  record = {'command': ['-m'], 'files': [], 'report': {}, 'revision': 'x', 'start_s': 1.0, 'end_s': 9.0, 'attempts': 1, 'last_attempt_s': 8.0,
            'last_attempt_cpu_s': 12.0}
  found = {}
  for name in ('reward', 'preference'):
    found[name] = report_pipeline._entry(Stage(name, 'sft', (action,), ''), {action.name: record}, dict(found))
  assert [(entry['work_s'], entry['work_cpu_s']) for entry in found.values()] == [(8.0, 12.0), (0, 0)]
  assert [entry['data'][0]['name'] for entry in found.values()] == ['data/pairs_sft'] * 2
