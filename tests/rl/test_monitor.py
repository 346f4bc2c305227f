"""The monitor's files survive crashes, its numbers follow from the clock, and it fails loudly."""

import io
import json
import math
from pathlib import Path
import subprocess
import types

import jax
import pytest

from rl import monitor as monitor_lib
from rl.monitor import Monitor


class Clock:
  """A clock that moves only when told to."""

  def __init__(self):
    self.now_s = 100.0

  def perf_counter(self) -> float:
    return self.now_s

  def time(self) -> float:
    return 1e9 + self.now_s


class Terminal(io.StringIO):

  def isatty(self) -> bool:
    return True


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(monitor_lib, 'time', types.SimpleNamespace(perf_counter=clock.perf_counter, time=clock.time))
  return clock


def records(workdir):
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def run_steps(monitor, clock, steps, step_s=2.0, num_tokens=1000):
  for step in steps:
    clock.now_s += step_s
    monitor.log_step(step, {'train/loss_nats': 3.0 - step}, num_tokens, clock.now_s)


def test_speed_follows_from_the_clock(tmp_path, clock):
  with Monitor(tmp_path / 'run', total_steps=3, flops_per_token=6e3, peak_flops=1e7, stream=io.StringIO()) as monitor:
    run_steps(monitor, clock, [1], step_s=50.0)
    run_steps(monitor, clock, [2, 3])
  first, second, third = records(tmp_path / 'run')
  assert first == {'step': 1, 'time_s': 1e9 + 150, 'train/loss_nats': 2.0, 'speed/first_step_s': 50.0}
  # 1000 tokens in 2 s; times 6000 FLOPs; over 1e7 FLOP/s.
  assert second == {'step': 2, 'time_s': 1e9 + 152, 'train/loss_nats': 1.0, 'speed/step_s': 2.0, 'speed/tokens_per_s': 500.0,
                    'speed/flops_per_s': 3e6, 'speed/peak_fraction': 0.3}
  assert third['speed/step_s'] == 2.0


def test_what_is_not_known_is_not_claimed(tmp_path, clock):
  with Monitor(tmp_path, total_steps=2, plain_every_steps=1, stream=(stream := io.StringIO())) as monitor:
    run_steps(monitor, clock, [1, 2])
  assert 'speed/flops_per_s' not in records(tmp_path)[1]
  assert 'FLOP' not in stream.getvalue()


def test_paused_time_is_no_step_time(tmp_path, clock):
  with Monitor(tmp_path, total_steps=2, stream=io.StringIO()) as monitor:
    run_steps(monitor, clock, [1])
    with monitor.paused():
      clock.now_s += 100
    run_steps(monitor, clock, [2])
  assert records(tmp_path)[1]['speed/step_s'] == 2.0


def test_plain_progress_comes_every_few_steps_and_at_the_end(tmp_path, clock):
  stream = io.StringIO()
  with Monitor(tmp_path, total_steps=5, flops_per_token=6e9, peak_flops=1e13, plain_every_steps=2, stream=stream) as monitor:
    run_steps(monitor, clock, [1, 2], step_s=1800.0)
    run_steps(monitor, clock, [3, 4, 5], step_s=2.0)
  # Smoothed after step 4: 1800, then 0.9 * 1800 + 0.1 * 2 = 1620.2, then 0.9 * 1620.2 + 0.1 * 2 = 1458.38 s a step.
  assert stream.getvalue().splitlines() == [
      'step 2/5  loss 1.0000  0.556 token/s  3.33 GFLOP/s (0.0% of peak)  1:30:00 left',
      'step 4/5  loss -1.0000  500 token/s  3 TFLOP/s (30.0% of peak)  0:24:18 left',
      'step 5/5  loss -2.0000  500 token/s  3 TFLOP/s (30.0% of peak)  0:00:00 left',
  ]


def test_a_terminal_gets_one_line_that_overwrites_itself(tmp_path, clock, monkeypatch):
  monkeypatch.setenv('COLUMNS', '31')
  with Monitor(tmp_path, total_steps=3, stream=(stream := Terminal())) as monitor:
    run_steps(monitor, clock, [1, 2])
  assert stream.getvalue() == '\rstep 1/3  loss 2.0000' + ' ' * 9 + '\rstep 2/3  loss 1.0000  500 tok\n'


def test_numbers_are_shown_with_three_digits():
  shown = {0: '0 ', 0.5: '0.5 ', 12: '12 ', 999.4: '999 ', 999.6: '1 k', 1234: '1.23 k', 12.3e6: '12.3 M', 2.5e9: '2.5 G', 7e14: '700 T',
           2e15: '2 P', 3e19: '3e+04 P'}
  assert {value: monitor_lib._with_prefix(value) for value in shown} == shown


def test_resuming_drops_later_steps_and_a_half_written_line(tmp_path, clock):
  with Monitor(tmp_path, total_steps=9, stream=io.StringIO()) as monitor:
    run_steps(monitor, clock, range(1, 6))
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 6, "train/lo')
  with Monitor(tmp_path, total_steps=9, start_step=3, stream=io.StringIO()) as monitor:
    run_steps(monitor, clock, [4, 5])
  assert [record['step'] for record in records(tmp_path)] == [1, 2, 3, 4, 5]
  assert 'speed/step_s' in records(tmp_path)[2]
  assert 'speed/step_s' not in records(tmp_path)[3]


def test_a_run_without_a_checkpoint_starts_its_metrics_again(tmp_path, clock):
  for _ in range(2):
    with Monitor(tmp_path, total_steps=9, stream=io.StringIO()) as monitor:
      run_steps(monitor, clock, [1, 2])
  assert [record['step'] for record in records(tmp_path)] == [1, 2]


def test_each_line_is_on_disk_as_soon_as_it_is_written(tmp_path, clock):
  with Monitor(tmp_path, total_steps=2, stream=io.StringIO()) as monitor:
    run_steps(monitor, clock, [1])
    assert len(records(tmp_path)) == 1
    assert list((tmp_path / 'tensorboard').glob('events.out.tfevents.*'))


def test_what_is_not_finite_becomes_null(tmp_path):
  with Monitor(tmp_path, total_steps=2, stream=io.StringIO()) as monitor:
    monitor.write(1, {'a/nan': math.nan, 'a/inf': -math.inf, 'a/one': 1.0})
  record = json.loads((tmp_path / 'metrics.jsonl').read_text(), parse_constant=pytest.fail)
  assert record == {'step': 1, 'time_s': record['time_s'], 'a/nan': None, 'a/inf': None, 'a/one': 1.0}


def test_an_evaluation_may_share_a_step_but_time_does_not_run_back(tmp_path):
  with Monitor(tmp_path, total_steps=9, start_step=4, stream=io.StringIO()) as monitor:
    monitor.write(5, {'train/loss_nats': 1.0})
    monitor.write(5, {'eval/loss_nats': 1.0})
    with pytest.raises(ValueError, match='Metrics of step 4 came after those of step 5'):
      monitor.write(4, {'eval/loss_nats': 1.0})
  assert len(records(tmp_path)) == 2


def test_only_process_0_writes(tmp_path, clock, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  with Monitor(tmp_path, total_steps=1, plain_every_steps=1, stream=(stream := io.StringIO())) as monitor:
    run_steps(monitor, clock, [1])
  monitor_lib.write_config(tmp_path, {}, {})
  assert list(tmp_path.iterdir()) == []
  assert stream.getvalue() == ''


def test_bad_arguments_and_files_are_named(tmp_path):
  with pytest.raises(ValueError, match='start_step=3 must lie between 0 and total_steps=2'):
    Monitor(tmp_path, total_steps=2, start_step=3)
  with pytest.raises(ValueError, match='plain_every_steps=0 must be at least 1'):
    Monitor(tmp_path, total_steps=2, plain_every_steps=0)
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: 'nonsense' is not a JSON object with a step; move the file away"):
    Monitor(tmp_path, total_steps=2)
  (tmp_path / 'metrics.jsonl').write_text('{"stop": 1}\n')
  with pytest.raises(ValueError, match=r'line 1: .*is not a JSON object with a step'):
    Monitor(tmp_path, total_steps=2)
  (tmp_path / 'file').write_text('')
  with pytest.raises(RuntimeError, match=r'Cannot write .*/file/run/metrics\.jsonl: .*Not a directory.*then resume'):
    Monitor(tmp_path / 'file' / 'run', total_steps=2)


def test_a_full_disk_stops_the_run_and_names_the_file(tmp_path):
  monitor = Monitor(tmp_path, total_steps=2, stream=io.StringIO())
  monitor._file.close()
  monitor._file = Path('/dev/full').open('a', encoding='utf-8')  # noqa: SIM115
  with pytest.raises(RuntimeError, match=r'Cannot write .*/metrics\.jsonl: .*No space left on device.*resume'):
    monitor.write(1, {'a/b': 1.0})
  with pytest.raises(RuntimeError, match='No space left'):
    monitor.close()


def test_the_configuration_is_recorded_with_what_changed(tmp_path):
  for layers in (2, 3, 3, 4):
    monitor_lib.write_config(tmp_path / 'run', {'model': {'layers': layers}}, {'model.layers': (1, layers)})
  read = {path.name: json.loads(path.read_text()) for path in (tmp_path / 'run').iterdir()}
  assert read == {
      'config.1.json': {'model': {'layers': 2}},
      'config.2.json': {'model': {'layers': 3}},
      'config.json': {'model': {'layers': 4}},
      'config_difference.json': {'model.layers': {'default': 1, 'value': 4}},
  }


def test_the_configuration_names_a_path_it_cannot_write(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(RuntimeError, match=r'Cannot write .*/file/config\.json: '):
    monitor_lib.write_config(tmp_path / 'file', {}, {})


def test_the_peak_is_that_of_a_matrix_product_and_is_measured_once():
  monitor_lib.measure_matmul_peak.cache_clear()
  with jax.set_mesh(jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])):
    peak = monitor_lib.measure_matmul_peak('float32', 0.1)
  assert 1e8 < peak < 1e14  # A CPU, in FLOP/s.
  assert monitor_lib.measure_matmul_peak('float32', 0.1) == peak


def git(directory, *arguments):
  subprocess.run(['git', '-C', str(directory), '-c', 'user.name=n', '-c', 'user.email=e@x', *arguments], check=True, capture_output=True)


def test_code_revision_tells_the_commit_and_whether_files_changed(tmp_path, monkeypatch):
  checkout = tmp_path / 'checkout'
  (checkout / 'rl').mkdir(parents=True)
  monkeypatch.setattr(monitor_lib, '__file__', str(checkout / 'rl' / 'monitor.py'))
  assert monitor_lib.code_revision() == ''
  git(checkout, 'init')
  assert monitor_lib.code_revision() == ''  # No commit yet.
  (checkout / 'rl' / 'monitor.py').write_text('1')
  git(checkout, 'add', '.')
  git(checkout, 'commit', '-m', 'first')
  revision = monitor_lib.code_revision()
  assert len(revision) == 40
  (checkout / 'untracked').write_text('')
  assert monitor_lib.code_revision() == revision
  (checkout / 'rl' / 'monitor.py').write_text('2')
  assert monitor_lib.code_revision() == f'{revision}-dirty'
  # A copy installed inside somebody else's checkout is not that checkout.
  monkeypatch.setattr(monitor_lib, '__file__', str(checkout / 'site-packages' / 'rl' / 'monitor.py'))
  (checkout / 'site-packages').mkdir()
  assert monitor_lib.code_revision() == ''
