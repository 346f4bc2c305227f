import itertools
import os
import sys

import pytest

from launch import bench_rl, peers_rl
from models import params as params_lib
from models import presets, transformer


def _step(wall_s, others_s=0.0, **phases_s):
  return {'wall_s': wall_s, 'cpu_s': 2 * wall_s, 'others_s': others_s, 'phases_s': phases_s}


class _Times:
  """Stands for the clocks: wall time, own and all CPU time advance together."""

  def __init__(self, monkeypatch):
    self.now = 0.0
    monkeypatch.setattr(peers_rl.time, 'perf_counter', lambda: self.now)
    monkeypatch.setattr(peers_rl.time, 'process_time', lambda: 1.5 * self.now)
    monkeypatch.setattr(peers_rl, '_busy_s', lambda cpus: 1.75 * self.now)


def test_phases_of_a_step_add_up_to_it(monkeypatch):
  times = _Times(monkeypatch)
  clock = peers_rl.StepClock()
  for now, phase in ((1.0, 'generation'), (3.0, 'rest'), (3.5, 'update')):
    times.now = now
    clock.enter(phase)
  times.now = 4.0
  clock.end_step()
  times.now = 6.0
  clock.enter('generation')
  times.now = 8.0
  clock.end_step()
  assert clock.steps == [
      {'wall_s': 4.0, 'cpu_s': 6.0, 'others_s': 1.0, 'phases_s': {'rest': 1.5, 'generation': 2.0, 'update': 0.5}},
      {'wall_s': 4.0, 'cpu_s': 6.0, 'others_s': 1.0, 'phases_s': {'update': 2.0, 'generation': 2.0}}]


def test_busy_counts_everything_but_idle_and_waiting_of_these_cpus(monkeypatch, tmp_path):
  stat = tmp_path / 'stat'
  # user nice system idle iowait irq softirq steal guest guest_nice; guest time is in user already.
  stat.write_text('cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 4 1000 1000 8 16 32 1 0\ncpu1 100 0 0 7 7 0 0 0 0 0\ncpu11 5 5 5 5 5 5 5 5 5 5\nintr 5\n')
  monkeypatch.setattr(peers_rl, 'open', lambda path: stat.open(), raising=False)
  ticks = os.sysconf('SC_CLK_TCK')
  assert peers_rl._busy_s({0}) == 63 / ticks
  assert peers_rl._busy_s({0, 1}) == 163 / ticks


def test_busy_of_this_machine_grows():
  cpus = os.sched_getaffinity(0)
  before, clock = peers_rl._busy_s(cpus), peers_rl.time.process_time()
  while peers_rl.time.process_time() < clock + 0.1:
    pass
  assert peers_rl._busy_s(cpus) >= before + 0.05


def test_the_shape_has_the_parameters_of_the_comparison():
  assert params_lib.count(transformer.declare(presets.from_hf(peers_rl.SHAPE))) == 4_330_752


def test_prompts_are_the_same_at_every_call_and_of_one_length():
  first = peers_rl.prompts(3)
  assert first == peers_rl.prompts(4)[:3]
  assert len({tuple(ids) for ids in first}) == 3
  assert {len(ids) for ids in first} == {peers_rl.PROMPT}
  assert all(0 <= token < 512 for ids in first for token in ids)


def test_a_completion_of_another_length_is_refused():
  right = [peers_rl.to_text(range(peers_rl.COMPLETION))] * peers_rl.GROUP
  assert peers_rl.check_length(right) is None
  for wrong in (right[1:], [*right[1:], peers_rl.to_text(range(63))]):
    with pytest.raises(RuntimeError, match='instead of 16 of 64'):
      peers_rl.check_length(wrong)


def test_reward_is_the_share_of_different_pieces():
  assert peers_rl.reward(['w1', 'w2', 'w1', 'w1']) == 0.5


def test_medians_leave_out_steps_with_other_processes():
  quiet = [_step(1.0 + 0.01 * index, others_s=0.19, update=0.5) for index in range(11)]
  loud = [_step(9.0, others_s=9.0 * 2 * 0.11, update=8.0)] * 30
  result = bench_rl.summarize([*loud, *quiet], 1.0)
  assert (result.wall_s, result.cpu_s, result.fastest_s, result.phases_s) == (1.05, 2.1, 1.0, {'update': 0.5})
  assert (result.num_steps, result.num_quiet, result.is_quiet) == (41, 11, True)


def test_too_few_quiet_steps_are_said_to_be_so():
  result = bench_rl.summarize([*[_step(9.0, others_s=9.0)] * 30, *[_step(1.0)] * 9], 1.0)
  assert (result.wall_s, result.num_quiet, result.is_quiet) == (9.0, 9, False)


def test_a_summary_shows_phases_in_one_order():
  shown = str(bench_rl.summarize([_step(1.0, rest=0.25, update=0.5, generation=0.25)] * 3, 1.5))
  assert 'generation 0.250  update 0.500  rest 0.250' in shown
  assert '3 of 3 steps quiet' in shown


def _fake_runs(monkeypatch, others_s):
  runs = []
  monkeypatch.setattr(bench_rl.os, 'sched_setaffinity', lambda pid, cpus: runs.append(len(cpus)))
  monkeypatch.setattr(bench_rl.os, 'sched_getaffinity', lambda pid: {3, 1, 2})

  def run_child(command, environment):
    runs.append(command[0])
    warm_up = [_step(100.0)] * peers_rl.WARM_UP_STEPS
    return {'steps': [*warm_up, *[_step({'a': 1.0, 'b': 2.0}[command[0]], others_s=next(others_s))] * 8], 'peak_gb': 0.5}

  monkeypatch.setattr(bench_rl, 'run_child', run_child)
  return runs


def test_systems_take_turns_and_warm_up_is_not_counted(monkeypatch):
  runs = _fake_runs(monkeypatch, itertools.repeat(0.0))
  results = bench_rl.measure({'a': ['a'], 'b': ['b']})
  assert runs == [2, 'a', 'b', 'a', 'b']
  assert [(results[name].wall_s, results[name].num_steps) for name in 'ab'] == [(1.0, 16), (2.0, 16)]


def test_a_busy_machine_gets_more_turns_up_to_a_limit(monkeypatch):
  runs = _fake_runs(monkeypatch, itertools.chain([0.0, 4.0], itertools.repeat(0.0)))
  assert bench_rl.measure({'a': ['a'], 'b': ['b']})['b'].is_quiet
  assert runs[1:] == ['a', 'b'] * 3
  runs = _fake_runs(monkeypatch, itertools.repeat(4.0))
  assert not bench_rl.measure({'a': ['a'], 'b': ['b']})['b'].is_quiet
  assert runs[1:] == ['a', 'b'] * 4


def test_one_cpu_is_refused(monkeypatch):
  monkeypatch.setattr(bench_rl.os, 'sched_getaffinity', lambda pid: {0})
  with pytest.raises(RuntimeError, match='for 2 CPUs and this process may use 1'):
    bench_rl.measure({})


def test_a_child_says_its_result_in_the_environment_asked_for():
  code = 'import os; print("noise"); print("RESULT {\\"steps\\": [%s]}" % os.environ["ANSWER"])'
  assert bench_rl.run_child([sys.executable, '-c', code], {'ANSWER': '42'}) == {'steps': [42]}


def test_a_child_that_fails_is_an_error_with_its_last_words():
  with pytest.raises(RuntimeError, match='exit status 3:\nlast words'):
    bench_rl.run_child([sys.executable, '-c', 'import sys; print("RESULT 1"); sys.stderr.write("last words"); sys.exit(3)'])
  with pytest.raises(RuntimeError, match='exit status 0'):
    bench_rl.run_child([sys.executable, '-c', 'print("no result")'])


def test_a_peer_is_installed_once(monkeypatch, tmp_path):
  calls = []

  def run(command, check):
    calls.append(command[1:4])
    (tmp_path / 'trl').mkdir(exist_ok=True)

  monkeypatch.setattr(bench_rl.subprocess, 'run', run)
  command = bench_rl.peer_command('trl', tmp_path, 20)
  assert command == [str(tmp_path / 'trl/bin/python'), '-P', peers_rl.__file__, 'trl', '23']
  assert calls == [['-m', 'venv', '--clear'], ['-m', 'pip', 'install']]
  bench_rl.peer_command('trl', tmp_path, 20)
  assert len(calls) == 2
  (tmp_path / 'trl/installed.txt').write_text('trl==0.1')
  bench_rl.peer_command('trl', tmp_path, 20)
  assert len(calls) == 4


def test_a_failed_installation_is_an_error_and_tried_again(monkeypatch, tmp_path):
  def run(command, check):
    raise bench_rl.subprocess.CalledProcessError(1, command)

  monkeypatch.setattr(bench_rl.subprocess, 'run', run)
  with pytest.raises(RuntimeError, match='peer tunix could not be installed .* exit status 1'):
    bench_rl.peer_command('tunix', tmp_path, 1)
  assert not (tmp_path / 'tunix/installed.txt').exists()


def test_phases_of_our_loop_are_summed_and_a_wrong_length_is_refused():
  record = {'prompt_length/min': 32, 'prompt_length/max': 32, 'response_length/min': 64, 'response_length/max': 64, 'timing_s/decode': 0.25,
            'timing_s/environment': 0.125, 'timing_s/score': 0.0625, 'timing_s/train': 0.5}
  assert bench_rl._phases_s(record, 1.0) == {'generation': 0.375, 'update': 0.5625, 'sync': 0.0, 'rest': 0.0625}
  with pytest.raises(RuntimeError, match='response_length of a step is from 63 to 64 tokens instead of 64'):
    bench_rl._phases_s({**record, 'response_length/min': 63}, 1.0)


def test_our_loop_does_the_work_of_the_comparison():
  result = bench_rl.run_child([sys.executable, '-m', 'launch.bench', 'rl', '--child=ours:rl:1'], {'JAX_PLATFORMS': 'cpu'})
  steps = result['steps']
  assert result['peak_gb'] > 0.1
  assert len(steps) == 1 + peers_rl.WARM_UP_STEPS
  for step in steps:
    assert list(step['phases_s']) == ['generation', 'update', 'sync', 'rest']
    assert sum(step['phases_s'].values()) == pytest.approx(step['wall_s'])
    assert min(step['phases_s'].values()) >= 0
    assert step['phases_s']['update'] > 0 and step['phases_s']['sync'] > 0 and step['cpu_s'] > 0
