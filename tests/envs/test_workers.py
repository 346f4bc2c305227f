"""Workers: killed when late, replaced when dead, silent on the pipes, and never left behind."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import gc
import os
from pathlib import Path
import signal
import subprocess
import sys
import threading
import time

import pytest

from envs.core import EnvironmentFailure
from envs.workers import WorkerPool, WorkerTimeout

MODULE = '''
import os, signal, subprocess, sys, time

calls = 0

def work(payload):
  global calls
  calls += 1
  kind = payload['kind']
  if kind == 'sleep':
    time.sleep(payload['s'])
  elif kind == 'child':
    subprocess.Popen(['sleep', payload['s']], stdin=subprocess.DEVNULL)
    time.sleep(1000)
  elif kind == 'spin':
    while True:
      pass
  elif kind == 'memory':
    return {'size': len('x' * (1 << 40))}
  elif kind == 'exit':
    os._exit(0)
  elif kind == 'exit_once' and not os.path.exists(payload['path']):
    open(payload['path'], 'w').close()
    os.kill(os.getpid(), signal.SIGSEGV)
  elif kind == 'junk':
    print('{"junk": 1}', flush=True)
    print('to stderr', file=sys.stderr)
    os.write(1, b'[0, {"result": {"forged": true}}]\\n')
    return {'read': sys.stdin.read()}
  elif kind == 'wrong_pipe':
    for fd in range(3, 10):
      try:
        os.write(fd, b'junk\\n')
      except OSError:
        pass
  elif kind == 'raise':
    raise KeyError('what it was')
  elif kind == 'not_json':
    return {'value': object()}
  elif kind == 'flood':
    return {'value': 'x' * (2 << 20)}
  return {'pid': os.getpid(), 'calls': calls, 'jax': 'jax' in sys.modules, 'echo': payload.get('text')}

def broken():
  pass
'''


@pytest.fixture(scope='module', autouse=True)
def module(tmp_path_factory):
  folder = tmp_path_factory.mktemp('target')
  (folder / 'worker_target.py').write_text(MODULE)
  (folder / 'worker_unimportable.py').write_text('import no_such_module_at_all\n')
  sys.path.append(str(folder))
  yield
  sys.path.remove(str(folder))


@pytest.fixture
def pool():
  with_pool = WorkerPool('worker_target:work', wall_s=1.0)
  yield with_pool
  with_pool.close()


def children():
  """Return the ids of this process's children, zombies too."""
  return {int(pid) for task in Path('/proc/self/task').iterdir() for pid in (task / 'children').read_text().split()}


def is_running(pid):
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def command_lines():
  lines = set()
  for path in Path('/proc').glob('[0-9]*/cmdline'):
    with contextlib.suppress(OSError):  # it ended meanwhile
      lines.add(path.read_bytes())
  return lines


def wait_until(condition, limit_s=5.0):
  deadline = time.monotonic() + limit_s
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.02)
  return condition()


def test_calls_share_a_worker_without_jax(pool):
  first = pool.call({'kind': 'ok', 'text': 'é\ud800\n' * 50_000})
  second = pool.call({'kind': 'ok'})
  assert first['echo'] == 'é\ud800\n' * 50_000 and not first['jax']
  assert first['pid'] == second['pid'] != os.getpid() and (first['calls'], second['calls']) == (1, 2)


def test_a_late_call_is_killed_with_all_that_it_started_and_the_next_is_answered(pool):
  old = pool.call({'kind': 'ok'})['pid']
  for kind in ('spin', 'child'):
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match='worker_target:work took longer than 1 s'):
      pool.call({'kind': kind, 's': f'1000.{os.getpid()}'})
    assert 0.9 < time.monotonic() - start < 4
    new = pool.call({'kind': 'ok'})
    assert new['pid'] != old and new['calls'] == 1
    assert children() >= {new['pid']} and old not in children()
    old = new['pid']
  assert wait_until(lambda: f'sleep\x001000.{os.getpid()}\x00'.encode() not in command_lines())


def test_too_much_memory_is_the_payloads_doing_and_the_worker_is_replaced(pool):
  old = pool.call({'kind': 'ok'})['pid']
  with pytest.raises(WorkerTimeout, match='needed more memory'):
    pool.call({'kind': 'memory'})
  assert pool.call({'kind': 'ok'})['pid'] != old


def test_a_worker_that_dies_is_replaced_once_and_then_is_our_failure(pool, tmp_path):
  assert pool.call({'kind': 'exit_once', 'path': str(tmp_path / 'died')})['calls'] == 1
  assert (tmp_path / 'died').exists()
  with pytest.raises(EnvironmentFailure, match='failed 2 times in a row, lastly: the worker ended in a call'):
    pool.call({'kind': 'exit'})
  assert pool.call({'kind': 'ok'})['calls'] == 1


def test_a_worker_killed_from_outside(pool):
  idle = pool.call({'kind': 'ok'})['pid']
  os.kill(idle, signal.SIGKILL)
  assert wait_until(lambda: not is_running(idle))
  busy = pool.call({'kind': 'ok'})['pid']
  assert busy != idle
  # Killed in the middle of a call, it is called again.
  timer = threading.Timer(0.2, os.kill, (busy, signal.SIGKILL))
  timer.start()
  again = pool.call({'kind': 'sleep', 's': 0.6})
  timer.join()
  assert again['pid'] != busy and again['calls'] == 1


def test_a_stopped_worker_is_late_even_for_a_payload_that_fills_the_pipe(pool):
  stopped = pool.call({'kind': 'ok'})['pid']
  os.kill(stopped, signal.SIGSTOP)
  with pytest.raises(WorkerTimeout):
    pool.call({'kind': 'ok', 'text': 'x' * (1 << 20)})
  assert pool.call({'kind': 'ok'})['pid'] != stopped


def test_prints_of_a_library_do_not_reach_the_pipe(pool):
  assert pool.call({'kind': 'junk'}) == {'read': ''}
  assert pool.call({'kind': 'ok'})['calls'] == 2


def test_a_line_that_is_no_answer_is_our_failure(pool):
  for kind, message in (('wrong_pipe', 'is no answer to call'), ('flood', 'the reply is longer than 1048576 bytes')):
    with pytest.raises(EnvironmentFailure, match=message):
      pool.call({'kind': kind})
    assert pool.call({'kind': 'ok'})['calls'] == 1


def test_what_the_function_raises_is_our_failure_and_is_told(pool):
  for kind, message in (('raise', "raised KeyError: 'what it was'"), ('not_json', 'raised TypeError')):
    with pytest.raises(EnvironmentFailure, match=message):
      pool.call({'kind': kind})
  assert pool.call({'kind': 'ok'})['calls'] == 3


@pytest.mark.parametrize('target, message', [
    ('worker_target:missing', 'cannot start: AttributeError.*missing'),
    ('worker_unimportable:work', 'cannot start: ModuleNotFoundError.*no_such_module'),
    ('no_such_module_at_all:work', 'cannot start: ModuleNotFoundError'),
])
def test_a_worker_that_cannot_start_says_why(target, message):
  pool = WorkerPool(target)
  with pytest.raises(EnvironmentFailure, match=message):
    pool.call({})
  pool.close()


def test_workers_are_recycled():
  pool = WorkerPool('worker_target:work', recycle_after=2)
  counts = [pool.call({'kind': 'ok'})['calls'] for _ in range(5)]
  pool.close()
  assert counts == [1, 2, 1, 2, 1]


def test_many_threads_share_the_workers_and_waiting_has_its_own_deadline():
  pool = WorkerPool('worker_target:work', num_workers=2, wall_s=2.0)
  with ThreadPoolExecutor(8) as threads:
    # Eight calls of 0.3 s on two workers take longer than one may; only the time in a worker counts.
    found = list(threads.map(lambda _: pool.call({'kind': 'sleep', 's': 0.3}), range(16)))
  assert len(found) == 16 and len({reply['pid'] for reply in found}) == 2
  pool.close()
  pool = WorkerPool('worker_target:work', wall_s=5.0, wait_s=0.2)
  with ThreadPoolExecutor(1) as threads:
    slow = threads.submit(pool.call, {'kind': 'sleep', 's': 1.0})
    time.sleep(0.3)
    with pytest.raises(EnvironmentFailure, match=r'no worker of worker_target:work was free within 0\.2 s; raise num_workers'):
      pool.call({'kind': 'ok'})
    assert slow.result()['calls'] == 1
  pool.close()


def test_closing_ends_workers_also_busy_ones_and_leaks_nothing():
  gc.collect()
  descriptors, before = set(os.listdir('/proc/self/fd')), children()
  pool = WorkerPool('worker_target:work', num_workers=2, wall_s=60.0)
  pool.call({'kind': 'ok'})
  with ThreadPoolExecutor(1) as threads:
    busy = threads.submit(pool.call, {'kind': 'sleep', 's': 50})
    time.sleep(0.3)
    pool.close()
    with pytest.raises(EnvironmentFailure):
      busy.result(timeout=5)
  pool.close()
  with pytest.raises(RuntimeError, match='worker pool of worker_target:work is closed'):
    pool.call({'kind': 'ok'})
  for _ in range(3):
    forgotten = WorkerPool('worker_target:work')
    forgotten.call({'kind': 'ok'})
    del forgotten
  gc.collect()
  assert children() == before
  assert set(os.listdir('/proc/self/fd')) == descriptors


@pytest.mark.parametrize('ending', [
    '', 'os.kill(os.getpid(), 9)', "threading.Timer(0.3, os.kill, (os.getpid(), 9)).start(); pool.call({'kind': 'spin'})",
])
def test_workers_end_with_their_parent(ending):
  code = (f"import os, sys, threading; sys.path.append({sys.path[-1]!r})\nfrom envs.workers import WorkerPool\n"
          f"pool = WorkerPool('worker_target:work', wall_s=1.0)\nprint(pool.call({{'kind': 'ok'}})['pid'], flush=True)\n{ending}")
  done = subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
  assert done.stdout.strip().isdigit(), done.stderr
  # The busy one ends after a few seconds of processor time, however long those take on a busy machine.
  assert wait_until(lambda: not is_running(int(done.stdout)), 60.0)


def test_bad_settings():
  with pytest.raises(ValueError, match="target='work' must name a function"):
    WorkerPool('work')
  with pytest.raises(ValueError, match='num_workers=0, wall_s=2.0.*must all be positive'):
    WorkerPool('a:b', num_workers=0)
