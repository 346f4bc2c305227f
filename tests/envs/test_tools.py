"""The python tool: what a policy is told, what lives on between calls, and what it costs to break the interpreter."""

import gc
import threading
import time

import pytest

from envs.core import EnvironmentFailure, ToolError
from envs.sandbox import client
from envs.tools import PythonTool, clip
from tests.envs.test_sandbox import NAMESPACES, needs_boxes

RESTARTED = 'The interpreter was restarted, so earlier variables are gone.'


@pytest.fixture(scope='module')
def sandbox():
  if not NAMESPACES:
    pytest.skip('this machine gives no user namespaces')
  with client.Sandbox(max_boxes=4, max_sessions=4, slot_wait_s=20.0) as sandbox:
    yield sandbox


@pytest.fixture(scope='module')
def shared_tool(sandbox):
  """One interpreter for the cells that leave it whole."""
  tool = PythonTool(sandbox, timeout_s=20.0)
  yield tool
  tool.close()


@pytest.fixture
def tool(sandbox):
  tool = PythonTool(sandbox, timeout_s=1.0, limits=client.Limits(cpu_s=60, memory_bytes=64 << 20, disk_bytes=1 << 20, num_processes=16))
  yield tool
  tool.close()


@pytest.mark.parametrize('code, expected', [
    ('1 + 1', '2'),
    ('print("a"); 1 + 1', 'a'),
    ('x = 3', 'No output.'),
    ('', 'No output.'),
    ('None', 'No output.'),
    ('"text"', "'text'"),
    ('import os; os.system("echo out; echo err >&2")', 'out\nerr'),
    ('import sys; print("a"); print("b", file=sys.stderr); print("c")', 'a\nb\nc'),
    ('print("no newline", end="")', 'no newline'),
    ('def f(n):\n  return 1 / n\n\nf(0)', 'Error: ZeroDivisionError: division by zero (line 2)'),
    ('print("before")\nundefined', "before\nError: NameError: name 'undefined' is not defined (line 2)"),
    ('x = (\n', "Error: SyntaxError: '(' was never closed (line 1)"),
    ('raise ValueError', 'Error: ValueError (line 1)'),
    ('raise SystemExit(2)', 'Error: SystemExit: 2 (line 1)'),
    ('class Odd(Exception):\n  def __str__(self): raise KeyError\nraise Odd', 'Error: Odd: (its text cannot be shown) (line 3)'),
    ('class Odd:\n  def __repr__(self): raise KeyError(7)\nOdd()', 'Error: KeyError: 7 (line 2)'),
    ('input()', 'Error: EOFError: EOF when reading a line (line 1)'),
    ('def f(): f()\nf()', 'Error: RecursionError: maximum recursion depth exceeded (line 1)'),
    ('print("\\x1b[31mred\\x07\\u202e")', '\ufffd[31mred\ufffd\ufffd'),
    ('import os; os.write(1, b"a\\xffb"); None', 'a\ufffdb'),
    ('"\\ud800"', "'\\ud800'"),
    ('from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\nP(1)', 'P(x=1)'),
    ('import numpy', "Error: ModuleNotFoundError: No module named 'numpy' (line 1)"),
    ('{"b", "a", "c"} == {"c", "b", "a"}', 'True'),
    ('é = "ü"; é', "'ü'"),
    ('import sys; sys.stdout = None; print(1)', 'No output.'),
    ('import os; os.close(1); print(1)', 'Error: OSError: [Errno 9] Bad file descriptor (line 1)'),
    ('import os; os.fork(); 5', '5'),
    ('bytearray(10**11)', 'Error: MemoryError (line 1)'),
])
def test_what_a_cell_shows(shared_tool, code, expected):
  assert shared_tool.call({'code': code}) == expected


def test_variables_imports_and_functions_live_on_and_episodes_are_apart(sandbox, tool):
  tool.call({'code': 'import math\ndef area(r): return math.pi * r * r\nlist_of = [1]'})
  tool.call({'code': 'list_of.append(area(1))'})
  assert tool.call({'code': 'list_of[0], round(list_of[1], 3), __name__'}) == "(1, 3.142, '__main__')"
  other = PythonTool(sandbox)
  assert other.call({'code': 'list_of'}).startswith('Error: NameError')
  other.close()


def test_long_observations_lose_their_middle(shared_tool):
  shown = shared_tool.call({'code': 'print("a" * 50_000 + "b" * 1_000_000 + "c" * 50_000)'})
  assert len(shown) == 4000 and shown.startswith('a' * 1900) and shown.endswith('c' * 1900) and 'characters left out' in shown
  value = shared_tool.call({'code': '"x" * 10**7'})
  assert len(value) == 4000 and value.startswith("'xxx") and value.endswith("xxx'")
  assert shared_tool.call({'code': '1'}) == '1'
  assert clip('é' * 200, 200) == 'é' * 200 and len(clip('é' * 201, 200)) == 200
  assert clip('a\r\nb\n\n', 200) == 'a\nb'


@pytest.mark.parametrize('code, expected', [
    ('while True: pass', 'Error: timed out after 1 s.'),
    ('import os; os._exit(3)', 'Error: the interpreter ended with exit code 3.'),
    ('import os; os.kill(os.getpid(), 9)', 'Error: the interpreter ended with exit code 137.'),
    ('blocks = []\nwhile True: blocks.append(bytearray(b"x" * (1 << 20)))', 'Error: out of memory, more than 64 MiB.'),
    ('import os\nfor fd in range(3, 20):\n  try: os.write(fd, b"forged\\n")\n  except OSError: pass', "Error: the code wrote into the "
     "interpreter's own channel."),
])
def test_breaking_the_interpreter_costs_the_variables_and_says_so(tool, code, expected):
  assert tool.call({'code': 'x = 5'}) == 'No output.'
  assert tool.call({'code': code}) == f'{expected} {RESTARTED}'
  assert tool.call({'code': 'x'}) == "Error: NameError: name 'x' is not defined (line 1)"


def test_a_full_disk_is_an_error_of_the_cell(tool):
  shown = tool.call({'code': 'while True: print("y" * 1000)'})
  assert shown.startswith('yyy') and shown.endswith('Error: OSError: [Errno 28] No space left on device (line 1)')
  assert tool.call({'code': '1'}) == '1'


def test_a_reply_must_carry_the_nonce_of_its_call(tool):
  # A line that a thread writes into the channel after its call is over cannot pass for the answer to the next one.
  late = ('import os, threading, time\ndef forge():\n  time.sleep(0.2)\n  for fd in range(3, 20):\n    try: os.write(fd, b"0" * 16 + b" 66\\n")\n'
          '    except OSError: pass\nthreading.Thread(target=forge).start()')
  assert tool.call({'code': late}) == 'No output.'
  assert tool.call({'code': 'time.sleep(0.5)'}) == f"Error: the code wrote into the interpreter's own channel. {RESTARTED}"


@pytest.mark.parametrize('arguments', [{}, {'code': 1}, {'code': '1', 'more': 2}, {'Code': '1'}, {'code': 'x' * 300_000}])
def test_wrong_arguments_are_the_policys_fault(tool, arguments):
  with pytest.raises(ToolError, match='the text "code"|262144 are allowed'):
    tool.call(arguments)


def test_the_schema_says_what_is_needed():
  tool = PythonTool(timeout_s=7)
  assert tool.name == 'python' and tool.schema['required'] == ['code'] and '7 seconds' in tool.schema['description']
  with pytest.raises(ValueError, match='timeout_s=0 must be positive'):
    PythonTool(timeout_s=0)


def test_nothing_starts_before_the_first_call_and_close_is_final(sandbox, monkeypatch):
  opened = []
  monkeypatch.setattr(sandbox, 'open', lambda *args, **kwargs: opened.append(args) or client.Sandbox.open(sandbox, *args, **kwargs))
  idle = PythonTool(sandbox)
  idle.close()
  idle.close()
  assert opened == []
  with pytest.raises(EnvironmentFailure, match='after it was closed'):
    idle.call({'code': '1'})
  used = PythonTool(sandbox)
  used.call({'code': '1'})
  used.call({'code': '2'})
  assert len(opened) == 1
  used.close()
  used.close()


def test_close_ends_a_call_of_another_thread(sandbox):
  tool = PythonTool(sandbox, timeout_s=50.0)
  tool.call({'code': '1'})
  shown = []
  thread = threading.Thread(target=lambda: shown.append(tool.call({'code': 'while True: pass'})))
  thread.start()
  time.sleep(0.2)
  tool.close()
  thread.join(10)
  assert not thread.is_alive() and shown[0].startswith('Error: the interpreter ended')


def test_calls_from_threads_take_turns_in_one_interpreter(sandbox):
  tool = PythonTool(sandbox)
  threads = [threading.Thread(target=tool.call, args=({'code': 'globals().setdefault("calls", []).append(1)'},)) for _ in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert tool.call({'code': 'calls'}) == '[1, 1, 1]'
  tool.close()


def test_tools_that_are_dropped_give_their_place_back(sandbox):
  # With room for 4 sessions, 12 dropped ones would block if any was kept.
  for number in range(12):
    assert PythonTool(sandbox).call({'code': f'{number}'}) == str(number)
    gc.collect()


@needs_boxes
def test_failures_of_the_sandbox_are_not_observations():
  sandbox = client.Sandbox(max_boxes=1)
  tool, new = PythonTool(sandbox), PythonTool(sandbox)
  assert tool.call({'code': '1'}) == '1'
  sandbox.close()
  for failing in (tool, new):
    with pytest.raises(EnvironmentFailure, match='supervisor is gone'):
      failing.call({'code': '1'})
    failing.close()


def test_a_worker_that_does_not_start_is_a_failure_of_ours(sandbox, monkeypatch):
  monkeypatch.setattr('envs.tools._ARGV', ('python3', '-c', 'raise SystemExit("no worker")'))
  with pytest.raises(EnvironmentFailure, match='did not start: nonzero, no worker'):
    PythonTool(sandbox).call({'code': '1'})
