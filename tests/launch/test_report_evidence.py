"""The picture of accuracy by position and length: what it shows, on the page of a run too, and from an evaluation as a user runs it."""

import dataclasses
import html.parser
import io
import json
import os
from pathlib import Path
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
import pytest

from envs.core import Evidence, Outcome
from launch import report_evidence, report_page, report_run
from rl import monitor
from rl.evals.evidence import Try
from rl.types import Trajectory
from tests import tiny_model

ROOT = Path(__file__).resolve().parents[2]
SVG = '{http://www.w3.org/2000/svg}'
HOSTILE = '</template></svg><script>alert(1)</script> & "x" \x1b'
TRIES = [Try('a/b', Evidence(100, (0.05,)), True), Try('a/b', Evidence(100, (0.05,)), False), Try(HOSTILE, Evidence(20_000, (0.95,)), False)]


def elements(picture, tag):
  return list(xml.etree.ElementTree.fromstring(picture).iter(SVG + tag))


def test_the_picture_shows_the_rates():
  picture = report_evidence.picture([('base', TRIES)], background='white')
  titles = [element.text for element in elements(picture, 'title')]
  # By position and by length, then the cells of both tables; Wilson for 1 of 2 and 0 of 1.
  assert titles.count('1 of 2 solved, 50.0%, 95 % interval 9.5% to 90.5%') == 4
  assert titles.count('0 of 1 solved, 0.0%, 95 % interval 0.0% to 79.3%') == 4 and len(titles) == 8
  texts = [element.text for element in elements(picture, 'text')]
  assert {'base', '100', '20k', 'a/b', '50', '0', 'Solved, by position of the evidence'} <= set(texts)
  left, right = elements(picture, 'polyline')
  first, last = [tuple(map(float, point.split(','))) for point in left.get('points').split()]
  # The first bin is a twentieth from the left, the last from the right; half is in the middle of the height, 0 at its foot.
  assert last[0] - first[0] == pytest.approx(0.9 * (470 - 52), abs=0.2) and last[1] - first[1] == pytest.approx(105, abs=0.2)
  assert len(right.get('points').split()) == 2
  assert [element.get('fill') for element in elements(picture, 'rect')][0] == 'white'


def test_evaluations_are_compared_and_the_last_is_in_the_tables():
  solved = [one._replace(is_solved=True) for one in TRIES]
  picture = report_evidence.picture([('before', TRIES), ('none', []), ('after', solved)])
  assert len(elements(picture, 'polyline')) == 4
  titles = [element.text for element in elements(picture, 'title')]
  # Four of each line, then the cells, all of them of the last.
  assert len(titles) == 4 * 2 + 4 and sum(title.startswith(('0 of 1', '1 of 2')) for title in titles[:8]) == 4
  assert [title[:6] for title in titles[8:]] == ['2 of 2', '1 of 1', '1 of 1', '2 of 2']
  texts = [element.text for element in elements(picture, 'text')]
  assert 'Percent solved, by domain and words (after)' in texts and 'before' in texts and 'none' not in texts
  assert not [element for element in elements(picture, 'rect') if element.get('width') == '100%']


def test_text_stays_text_and_is_cut():
  picture = report_evidence.picture([(HOSTILE * 9, TRIES)])
  assert '<script' not in picture and '</template' not in picture and '\x1b' not in picture
  assert [element.text for element in elements(picture, 'text')][0] == HOSTILE[:30] + '\u2026'
  assert report_evidence.picture([('a', [])]) == report_evidence.picture([]) == ''


@pytest.mark.parametrize('words, label', [(100, '100'), (1500, '1.5k'), (999_499, '999k'), (1_048_576, '1.05M')])
def test_lengths_are_short(words, label):
  picture = report_evidence.picture([('a', [Try('b', Evidence(words, ()), False)])])
  assert [element.text for element in elements(picture, 'text')].count(label) == 3


def trajectory(number, reward, evidence):
  mask = np.array([False, True])
  return Trajectory(tokens_T=np.arange(2, dtype=np.int32), loss_mask_T=mask, versions_T=np.where(mask, 0, -1).astype(np.int32),
                    behavior_logprobs_T=np.where(mask, -0.5, np.nan).astype(np.float32), reward=reward, outcome=Outcome.OK,
                    problem_id=f'long/heldout/1/{number}', domain='long', level=1, group=number, sample=0, terminated=True, truncated=False,
                    num_turns=1, messages=({'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}), evidence=evidence)


def write_run(directory, evidences):
  monitor.write_config(directory, {'stage': 'rl', 'model': {'path': 'm'}, 'num_steps': 4, 'seed': 0, 'groups': 1, 'group_size': 1,
                                   'domains': {'long': {}}}, {})
  with monitor.Monitor(directory, total_steps=4, stream=io.StringIO()) as board, monitor.TrajectoryLog(directory, 0) as log:
    for step in (0, 4):
      log.write(step, 'eval', [(trajectory(number, float(step == 4), one), None, '') for number, one in enumerate(evidences)])
      board.write(step, {'heldout/pass@1': step / 4})
  return report_run.read_run(directory)


class Template(html.parser.HTMLParser):
  """Collects the elements inside and outside of the page's template."""

  def __init__(self, page):
    super().__init__()
    self.inside, self.outside, self._is_inside = [], [], False
    self.feed(page)
    self.close()

  def handle_starttag(self, tag, attrs):
    self._is_inside = self._is_inside or tag == 'template'
    (self.inside if self._is_inside else self.outside).append(tag)

  def handle_endtag(self, tag):
    self._is_inside = self._is_inside and tag != 'template'


def test_the_page_of_a_run_shows_it(tmp_path):
  run = write_run(tmp_path / 'long', [Evidence(100, (0.25, 0.5)), Evidence(1000, ())])
  first, last = report_run.ends_of(run, None)
  assert first.tries() == [Try('long', Evidence(100, (0.25, 0.5)), False), Try('long', Evidence(1000, ()), False)]
  assert [one.is_solved for one in last.tries()] == [True, True]
  found = Template(report_page.render(run, None, 2**20))
  assert found.inside.count('svg') == 1 and found.inside.count('polyline') == 4 and 'script' not in found.inside
  assert 'svg' not in found.outside and found.outside.count('script') == 2
  none = write_run(tmp_path / 'short', [None])
  assert set(Template(report_page.render(none, None, 2**20)).inside) == {'template'}
  assert report_run.ends_of(none, None)[0].tries() == []


@pytest.mark.parametrize('evidence', [{'num_words': 5}, {'num_words': '5', 'positions': []}, {'num_words': 5, 'positions': [2]}, 3,
                                      {'num_words': 5, 'positions': [True]}])
def test_damaged_evidence_is_named(tmp_path, evidence):
  write_run(tmp_path, [None])
  path = tmp_path / monitor.TRAJECTORIES_FILE
  lines = path.read_text().splitlines()
  path.write_text('\n'.join([lines[0], json.dumps(json.loads(lines[1]) | {'evidence': evidence})]) + '\n')
  with pytest.raises(ValueError, match=r'line 2: evidence is .* and must have num_words and positions from 0 to 1'):
    report_run.read_run(tmp_path)


def run_program(program, *arguments):
  return subprocess.run([sys.executable, '-m', f'launch.{program}', *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
                        env=os.environ | {'JAX_PLATFORMS': 'cpu'})


def test_an_evaluation_writes_the_picture(tmp_path):
  model = tiny_model.write_model(tmp_path / 'model', max_length=1024)
  done = run_program(
      'evaluate', f'--model={model}', '--config=configs/grpo.py', f'--output={tmp_path}/base.json', '--dtype=float32',
      "--config.domains={'longcontext/hops': {'options': {'num_words': (40, 60), 'hops': 1, 'depth': (0.5, 0.5)}}}",
      '--config.length=1024', '--config.rollout.max_new_tokens=2', '--config.rollout.max_length=1024',
      '--config.rollout.slots=4', '--config.eval.problems=6')
  assert done.returncode == 0, done.stderr
  assert 'by words of the text: 40 0.0000 [0.0000, ' in done.stdout and 'by position of the evidence, in tenths: ' in done.stdout
  results = json.loads((tmp_path / 'base.json').read_text())
  assert [(row['num_words'], row['solved'], row['graded']) for row in results['evidence']['by_length']] == [(40, 0, 3), (60, 0, 3)]
  assert sum(row['graded'] for row in results['evidence']['by_position']) == 6
  assert all(0.2 < place < 0.8 for line in results['trajectories'] for place in line['evidence']['positions'])
  assert len(elements((tmp_path / 'base.svg').read_text(), 'polyline')) == 2
  base = report_run.read_baseline(tmp_path / 'base.json')
  assert len(base.tries()) == 6 and dataclasses.asdict(base.tries()[0].evidence)['num_words'] == 40


def test_demonstrations_take_options(tmp_path):
  done = run_program('prepare_data', '--domain=longcontext/variables', '--options={"num_words": [60, 300], "hops": 2}', '--levels=2', '--count=3',
                     f'--output={tmp_path}/a.jsonl')
  assert done.returncode == 0, done.stderr
  rows = [json.loads(line)['messages'] for line in (tmp_path / 'a.jsonl').read_text().splitlines()]
  assert [340 > len(row[0]['content'].split()) > 290 and row[1]['content'].count('Let') == 3 for row in rows] == [True] * 3
  for options, message in (('{', '--options={ is not JSON'), ('[]', r'--options=[] must be a JSON object'),
                           ('{"words": 1}', "got an unexpected keyword argument 'words'; it takes num_words, depth, hops")):
    done = run_program('prepare_data', '--domain=longcontext/variables', f'--options={options}', f'--output={tmp_path}/b.jsonl')
    assert done.returncode != 0 and message in done.stderr and 'Traceback' not in done.stderr, done.stderr
