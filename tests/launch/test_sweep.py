"""Sweeps: how settings combine, what is refused before anything starts, what runs and what does not, and what is made of the results."""

import importlib
import json
import math
import os
from pathlib import Path
import runpy
import subprocess
import sys
import xml.etree.ElementTree

import ml_collections
import numpy as np
import pytest

from configs.sweeps import process, settings, toy
from launch import report_sweep, sweep_runs
from launch.report_run import Series
from launch.report_sweep import Study
from rl import config as config_lib
from rl.evals import stats

ROOT = Path(__file__).resolve().parents[2]
SVG = '{http://www.w3.org/2000/svg}'
SWEEP = """
import ml_collections
from configs.sweeps import settings, toy

def get_config():
  base = toy.base(level=1, max_new_tokens=2)
  base.num_steps, base.groups, base.group_size, base.rollout.slots, base.rows = 2, 2, 2, 4, 2
  base.eval.every_steps, base.eval.problems = 1, 4
  found = settings.param('optimizer.learning_rate', (0.1, 0.2))
  return ml_collections.ConfigDict({
      'base': base, 'settings': found, 'seeds': (5,), 'metric': 'heldout/pass@1', 'curves': ('critic/score/mean',),
      'against': ((found[1][0], found[0][0]),), 'panels': (), 'model': toy.model()})
"""


def test_settings_combine():
  a, b = settings.param('x.a', (1, 2)), settings.named({'off': {}, 'on': {'x.b': True, 'x.a': 9}})
  assert a == (('a=1', (('x.a', 1),)), ('a=2', (('x.a', 2),)))
  assert settings.product(a, b) == (
      ('a=1-off', (('x.a', 1),)), ('a=1-on', (('x.a', 9), ('x.b', True))), ('a=2-off', (('x.a', 2),)), ('a=2-on', (('x.a', 9), ('x.b', True))))
  assert settings.zipped(a, b) == (('a=1-off', (('x.a', 1),)), ('a=2-on', (('x.a', 9), ('x.b', True))))
  assert [name for name, _ in settings.chain(a, b, a)] == ['a=1', 'a=2', 'off', 'on', 'a=1', 'a=2']
  assert settings.ladder(settings.chain(a, b)) == (
      ('a=1', (('x.a', 1),)), ('a=2', (('x.a', 2),)), ('off', (('x.a', 2),)), ('on', (('x.a', 9), ('x.b', True))))
  assert settings.product() == (('', ()),) and settings.chain() == ()
  with pytest.raises(ValueError, match='parts of 2, 1; make them equally many'):
    settings.zipped(a, a[:1])


def make(**changes):
  return config_lib.build(sweep_runs.SweepConfig, ml_collections.ConfigDict({
      'base': toy.base(level=3, max_new_tokens=4), 'settings': settings.param('rollout.staleness', (0, 4)), 'seeds': (0, 7),
      'metric': 'm', 'curves': (), 'model': toy.model()} | changes))


def test_runs_have_names_and_resolved_configs(tmp_path):
  runs = sweep_runs.runs_of(make(), tmp_path)
  assert [run.name for run in runs] == ['staleness=0-seed=0', 'staleness=0-seed=7', 'staleness=4-seed=0', 'staleness=4-seed=7']
  last = runs[-1]
  assert (last.config.rollout.staleness, last.config.seed, last.config.groups) == (4, 7, 8)
  assert last.config.model.path == str(tmp_path / 'model') and last.directory == tmp_path / 'staleness=4-seed=7'
  assert runs[0].config.rollout.staleness == 0 and not last.is_finished
  base = toy.base(level=3, max_new_tokens=4)
  base.model.path = '/mine'
  assert sweep_runs.runs_of(make(base=base), tmp_path)[0].config.model.path == '/mine'
  assert [run.name for run in sweep_runs.chosen(runs, ['staleness=4-seed=0'])] == ['staleness=4-seed=0'] and sweep_runs.chosen(runs, []) == runs


@pytest.mark.parametrize('name, num_runs', [('staleness', 24), ('ladder', 36), ('process', 9), ('presets', 90)])
def test_the_studies_are_valid(tmp_path, name, num_runs):
  config = config_lib.build(sweep_runs.SweepConfig, importlib.import_module(f'configs.sweeps.{name}').get_config())
  runs = sweep_runs.runs_of(config, tmp_path)
  assert len(runs) == num_runs == len({json.dumps(config_lib.to_json(run.config)) for run in runs})
  sweep_runs.check(config, runs)


def test_what_cannot_be_run_is_refused(tmp_path):
  def refused(**changes):
    with pytest.raises(ValueError) as caught:
      config = make(**changes)
      sweep_runs.check(config, sweep_runs.runs_of(config, tmp_path))
    return str(caught.value)

  assert refused(settings=settings.param('rollout.stale', (1,))).startswith("settings.stale=1 changes 'rollout.stale', which base does not have")
  assert "changes 'seed.x'" in refused(settings=settings.param('seed.x', (1,)))
  assert 'settings.groups=0: groups=0 must be at least 1' in refused(settings=settings.param('groups', (0,)))
  assert "settings.groups=many.groups='many' has type str" in refused(settings=settings.param('groups', ('many',)))
  assert "settings has the name 'a/b'" in refused(settings=settings.named({'a/b': {}}))
  assert 'seeds=[1, 1] must be at least one, and none twice' in refused(seeds=(1, 1))
  assert 'settings=[] must be at least one' in refused(settings=())
  assert 'against names x; settings are staleness=0, staleness=4' in refused(against=(('staleness=0', 'x'),))
  assert 'settings seed=3 change the seed, and every setting is run with seeds=(0, 7)' in refused(settings=settings.param('seed', (3,)))
  assert 'panels none draw nothing' in refused(panels=(('none', ()),))
  assert 'panels names y;' in refused(panels=(('title', ('y',)),))
  assert 'cpu_devices of 1, 2' in refused(settings=settings.param('cpu_devices', (1, 2)))
  assert "config.stage='sft' must be one of supervised" in refused(settings=settings.param('stage', ('sft',)))
  assert 'staleness=0-seed=0 has no model: give base.model.path' in refused(model=None)
  with pytest.raises(ValueError, match='--only names nobody; runs are staleness=0-seed=0'):
    sweep_runs.chosen(sweep_runs.runs_of(make(), tmp_path), ['nobody'])
  with pytest.raises(ValueError, match='vocab_size=100 has no room for the 261 ids'):
    sweep_runs.make_model(make(model=toy.model() | {'vocab_size': 100}).model, tmp_path / 'model')


def run(config, workdir, *more):
  # This process simulates 8 devices, the program has one.
  return subprocess.run([sys.executable, '-m', 'launch.sweep', f'--config={config}', f'--workdir={workdir}', *more], cwd=ROOT,
                        capture_output=True, text=True, check=False, timeout=300, env=os.environ | {'JAX_PLATFORMS': 'cpu'})


def test_a_sweep_from_the_command_line(tmp_path):
  file, workdir = tmp_path / 'tiny.py', tmp_path / 'sweep'
  file.write_text(SWEEP)
  done = run(file, workdir, '--dry_run')
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [
      'learning_rate=0.1-seed=5: step 0 of 2', 'learning_rate=0.2-seed=5: step 0 of 2; optimizer.learning_rate=0.2']
  assert not workdir.exists()

  done = run(file, workdir, '--only=learning_rate=0.2-seed=5')
  assert done.returncode == 0 and '1 of 2 runs are finished' in done.stderr, done.stderr
  assert sorted(path.name for path in workdir.iterdir()) == ['learning_rate=0.2-seed=5', 'model'] and not done.stdout
  first = workdir / 'learning_rate=0.2-seed=5'
  assert json.loads((first / 'config.json').read_text())['optimizer']['learning_rate'] == 0.2
  before = {path: path.stat().st_mtime_ns for path in first.rglob('*') if path.is_file()}

  done = run(file, workdir, '--parallel=2')
  assert done.returncode == 0 and '2 of 2 runs are finished' in done.stderr, done.stderr
  assert {path: path.stat().st_mtime_ns for path in first.rglob('*') if path.is_file()} == before
  log = (workdir / 'process0.log').read_text()
  assert 'Run 1 of 1: learning_rate=0.1-seed=5, from step 0 of 2' in log and not (workdir / 'process1.log').exists()
  table = (workdir / 'summary.txt').read_text()
  assert table == done.stdout and table.splitlines()[-1].startswith('learning_rate=0.2 (to learning_rate=0.1)  ') and '(one seed)' in table
  xml.etree.ElementTree.fromstring((workdir / 'summary.svg').read_text())

  config = runpy.run_path(str(file))['get_config']()
  for field, value, message in (('base.groups', 3, r'learning_rate=0.1-seed=5 holds a run that differs: groups: 2 there, 3 now. Use another'),
                                ('model.mlp_dim', 8, r'model holds another model: mlp_dim: 64 there, 8 now')):
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict({field: value})
    changed = config_lib.build(sweep_runs.SweepConfig, changed)
    with pytest.raises(ValueError, match=message):
      sweep_runs.check(changed, sweep_runs.runs_of(changed, workdir))


def series(*values):
  return Series([5 * place for place in range(len(values))], list(values))


STUDY = Study({'old': [{'m': series(0.0, 0.2), 'c': series(0.0, 1.0)}, {'m': series(0.0, 0.4), 'c': series(0.5, 1.0)}],
               'new': [{'m': series(0.0, 0.5), 'c': series(0.0, 0.5)}, {'m': series(0.1, 0.9), 'c': series(0.0, 0.5)}]},
              'm', ('c',), {'new': 'old'})


def test_rows_are_means_over_seeds_and_changes_seed_by_seed():
  old, new = report_sweep.rows(STUDY)
  # Two seeds: the half-width is t(1) = 12.7062 times half their distance.
  assert old.estimates[0] == pytest.approx((0.3, 0.3 - 12.7062 * 0.1, 0.3 + 12.7062 * 0.1))
  assert old.estimates[1] == pytest.approx((0.625, 0.625 - 12.7062 * 0.125, 0.625 + 12.7062 * 0.125))
  assert new.changes[0] == pytest.approx((0.4, 0.4 - 12.7062 * 0.1, 0.4 + 12.7062 * 0.1))
  assert new.changes[1] == pytest.approx((-0.375, -0.375 - 12.7062 * 0.125, -0.375 + 12.7062 * 0.125))
  assert old.changes == (None, None)
  lines = report_sweep.table(STUDY).splitlines()
  assert lines[0].startswith('Means over 2 seeds ') and lines[-1].startswith('new (to old)') and '+0.400 [-0.871, +1.671]' in lines[-1]


def test_a_run_without_the_metric_is_named():
  for values in ({'c': series(1.0)}, {'c': series(1.0), 'm': series(None)}):
    with pytest.raises(ValueError, match="A run of new has no value of 'm'; it wrote c"):
      report_sweep.table(Study({**STUDY.results, 'new': [values] * 2}, 'm', ()))


def test_the_picture_shows_curves_seeds_and_means():
  picture = report_sweep.picture(STUDY, background='white')
  root = xml.etree.ElementTree.fromstring(picture)
  lines = [line.get('points').split() for line in root.iter(SVG + 'polyline')]
  # Bounds are 0 and the largest mean, 1; the plot is 200 high and starts 58 from the top.
  assert [float(point.split(',')[1]) for point in lines[0]] == [58 + 200 * 0.75, 58]
  assert [float(point.split(',')[1]) for point in lines[1]] == [258, 158] and len(lines) == 2
  assert len(list(root.iter(SVG + 'circle'))) == 2 * 3
  titles = [title.text for title in root.iter(SVG + 'title')]
  assert titles == ['old', 'new', 'old: 0.300 [-0.971, 1.571]', 'new: 0.700 [-1.841, 3.241]']
  two = report_sweep.picture(Study(STUDY.results, 'm', ('m', 'c'), {}, {'<left>': ('old',), 'right': ('new',)}))
  assert two.count('<polyline') == 4 and '&lt;left&gt;: m by step' in two and '<left>' not in two


def test_one_seed_has_no_interval_and_draws():
  study = Study({'one': [{'m': series(0.0, 0.0), 'c': series(None, 0.0)}]}, 'm', ('c',))
  assert '0.000 (one seed)' in report_sweep.table(study)
  assert 'nan' not in report_sweep.picture(study) and 'inf' not in report_sweep.picture(study)


def test_student_intervals():
  assert stats.mean([2.0]) == (2.0, -math.inf, math.inf)
  value, low, high = stats.mean([1.0, 2.0, 3.0])
  assert value == 2 and high - value == pytest.approx(4.3027 / math.sqrt(3)) and value - low == pytest.approx(high - value)
  # Quantiles from a table: 11, 20 and 120 degrees of freedom.
  for count, quantile in ((12, 2.2010), (21, 2.0860), (121, 1.9799)):
    values = np.arange(count, dtype=float)
    assert stats.mean(values).high - values.mean() == pytest.approx(quantile * values.std(ddof=1) / math.sqrt(count), rel=1e-4)
  with pytest.raises(ValueError, match=r'values of shape \(0,\) have no mean'):
    stats.mean([])


def test_the_process_study_has_a_start_of_its_own(tmp_path):
  config = config_lib.build(sweep_runs.SweepConfig, process.get_config('start'))
  (run,) = sweep_runs.runs_of(config, tmp_path)
  assert (run.config.stage, run.name, config.model.max_length) == ('supervised', 'start-seed=0', process.LENGTH)
  with pytest.raises(ValueError, match='process.py:stop asks for an unknown part'):
    process.get_config('stop')
