"""Pictures and table of rewards: what they show of numbers by hand, on the page of a run, and of names that want to be markup."""

import dataclasses
import io
import json
import xml.etree.ElementTree

import numpy as np
import pytest

from launch import report_page, report_reward, report_run
from launch.report_reward import Point
from launch.report_run import Series
from rl import calibration, monitor, reward_model

SVG = '{http://www.w3.org/2000/svg}'
HOSTILE = '</template><script>alert(1)</script>{{data}}{{rewards}}'


def elements(picture, tag):
  return list(xml.etree.ElementTree.fromstring(picture).iter(SVG + tag))


def judged(leads):
  leads = np.asarray(leads, float)
  count = leads.size
  return calibration.assess(np.stack([leads, 0 * leads], 1), np.ones(count), np.tile([3, 2], (count, 1)), np.arange(count) % 2 == 1)


ONE = judged([np.log(4)] * 4 + [-np.log(4)])


def test_reliability_shows_confidence_and_agreement():
  picture = report_reward.reliability({'helpful': ONE, 'harmless': judged([1.0, -2.0, 3.0]), 'silent': judged([])}, background='white')
  texts = [element.text for element in elements(picture, 'text')]
  # Sure to 4/5 and right in 4 of 5: calibrated; the third dimension has no pair.
  assert any(text.startswith('helpful: ECE 0.000, ') for text in texts) and not any('silent' in text for text in texts)
  titles = [element.text for element in elements(picture, 'title')]
  assert titles[0] == '5 pairs, 80.0% sure, 80.0% right' and len(elements(picture, 'polyline')) == 4
  first = elements(picture, 'circle')[0]
  # Four fifths sure is three fifths of the way from a half to 1.
  assert [float(first.get(name)) for name in ('cx', 'cy')] == pytest.approx([52 + 0.6 * (470 - 52), 58 + 0.2 * 230], abs=0.1)
  assert report_reward.reliability({'silent': judged([])}) == '' == report_reward.reliability({})


def test_the_table_has_a_line_for_each_dimension():
  lines = report_reward.table({'helpful': ONE, 'silent': judged([])}).splitlines()
  assert lines[1].split()[:2] == ['helpful', '5'] and '80.0% [' in lines[1] and lines[1].endswith('100.0%           80.0%')
  assert lines[2].split()[:4] == ['silent', '0', '50.0%', '[0.0%,']


def metrics(**series):
  return {key.replace('__', '/'): Series(list(range(1, len(values) + 1)), list(values)) for key, values in series.items()}


RUN = metrics(proxy__mean=[0.0, 1.0, 2.0, 3.0], critic__score__mean=[0.1, 0.5, 0.4, None], objective__kl=[0.0, 9.0, 4.0, 16.0],
              drift__alarms=[0.0, 1.0, 1.0, 2.0])


def test_over_optimization_is_drawn_over_the_root_of_the_kl():
  # In the order of distance; the last step has no gold verdict.
  wanted = [Point(1, 0, 0.0, 0.1, False), Point(3, 2, 2.0, 0.4, False), Point(2, 3, 1.0, 0.5, True)]
  assert report_reward.optimization_points(RUN) == wanted
  picture = report_reward.over_optimization(RUN)
  titles = [element.text for element in elements(picture, 'title')]
  assert 'dashed: alarms' in [element.text for element in elements(picture, 'text')]
  assert titles[0] == 'alarm at step 2' and 'gold 0.5 at sqrt KL 3, step 2' in titles
  proxy, gold = ([tuple(map(float, point.split(','))) for point in line.get('points').split()] for line in elements(picture, 'polyline'))
  assert [x for x, _ in proxy] == [x for x, _ in gold] == pytest.approx([52, 52 + 876 * 2 / 3, 52 + 876], abs=0.1)
  # Each from its least at the foot to its most at the top.
  assert [y for _, y in proxy] == pytest.approx([288, 58, 173]) and [y for _, y in gold] == pytest.approx([288, 115.5, 58])


def test_a_kl_of_tokens_is_that_of_a_reply_of_the_mean_length():
  of_tokens = {key: series for key, series in RUN.items() if key != 'objective/kl'}
  assert report_reward.optimization_points(of_tokens) == []
  of_tokens |= metrics(policy__reference_kl_k3=[-0.1, 0.9, 0.4, 1.0])
  assert report_reward.optimization_points(of_tokens) == []
  of_tokens |= metrics(response_length__mean=[10.0] * 4)
  # An estimate below 0 is no distance.
  assert [point.distance for point in report_reward.optimization_points(of_tokens)] == pytest.approx([0, 2, 3])


@pytest.mark.parametrize('missing', ['proxy/mean', 'critic/score/mean', 'objective/kl'])
def test_without_both_rewards_and_a_distance_there_is_no_picture(missing):
  assert report_reward.over_optimization({key: series for key, series in RUN.items() if key != missing}) == ''


def test_one_step_and_many_are_drawn():
  one = metrics(proxy__mean=[1.0], critic__score__mean=[1.0], objective__kl=[0.0])
  assert len(elements(report_reward.over_optimization(one), 'circle')) == 2
  many = metrics(proxy__mean=range(1000), critic__score__mean=[1.0] * 1000, objective__kl=np.arange(1000.0) ** 2,
                 drift__alarms=[0.0] * 999 + [1.0])
  points = report_reward.optimization_points(many)
  assert len(points) == 40 and points[0].distance == pytest.approx(12) and points[-1].is_alarm and not points[-2].is_alarm


def test_the_page_of_a_run_has_both_and_no_name_is_markup(tmp_path):
  monitor.write_config(tmp_path, {'stage': 'reward', 'model': {'path': 'm'}, 'num_steps': 4, 'seed': 0}, {})
  with monitor.Monitor(tmp_path, total_steps=4, stream=io.StringIO()) as board:
    for step in range(1, 4):
      board.log_step(step, {key: series.values[step - 1] for key, series in RUN.items() if series.values[step - 1] is not None}, 10, 0.0)
  # The count of alarms rose at the second step, of whose window nothing more was written.
  notes = report_run.read_run(tmp_path).notes
  assert len(notes) == 1 and notes[0].startswith('Alarm at step 2: reward models and verifier part.') and 'a share of unknown' in notes[0]
  plain = report_page.render(report_run.read_run(tmp_path), None, 2**20)
  assert plain.count('<svg') == 1 and '<template id="reliability-picture"></template>' in plain
  assert '<template id="over-optimization-picture"><svg ' in plain and '</svg></template>' in plain
  reward_model.write_calibrations(tmp_path, 4, {HOSTILE: ONE, 'helpful': dataclasses.replace(ONE, accuracy=0.25)})
  page = report_page.render(report_run.read_run(tmp_path), None, 2**20)
  assert page.count('<svg') == 2 and page.count('<script') == 2 and '<script>alert' not in page
  data = page.partition('<script type="application/json" id="data">')[2].partition('</script>')[0]
  assert json.loads(data)['name'] == tmp_path.name
  assert HOSTILE[:30] not in page and '&lt;/template&gt;' in page
  report_reward.write_picture(tmp_path, {'helpful': ONE})
  assert elements((tmp_path / report_reward.PICTURE_FILE).read_text(), 'rect')[0].get('fill') == 'white'
