"""The code verifier: what it takes for right, and that nothing a submission does makes it more than that."""

from concurrent.futures import ThreadPoolExecutor
import json
import time

import pytest

from envs.core import EnvironmentFailure, Problem, Reason
from envs.sandbox import client
from envs.verifiers import code, code_worker
from envs.verifiers.code import CodeVerifier

# 987123 is the expected value that attacks look for; nothing but a right program comes to it.
ADD = {'entry': 'add', 'cases': [[[2, 3], 5], [[987000, 123], 987123], [[-4, 4], 0], [[10, -7], 3]]}
SECRET = {'entry': 'add', 'cases': [[[987000, 123], 987123]]}
RIGHT = 'def add(a, b):\n  return a + b\n'


def problem(answer):
  return Problem('programs/test/train/1/0', 'programs/test', 1, ({'role': 'user', 'content': 'write it'},), answer)


def fenced(text, language='python'):
  return f'Here it is.\n```{language}\n{text}\n```\n'


@pytest.fixture(scope='module')
def sandbox():
  with client.Sandbox(max_boxes=2) as sandbox:
    yield sandbox


@pytest.fixture(scope='module')
def verifier(sandbox):
  """With limits that a busy machine does not reach."""
  return CodeVerifier(sandbox, call_s=20.0, total_s=60.0)


@pytest.fixture(scope='module')
def hasty(sandbox):
  """For programs that do not end."""
  return CodeVerifier(sandbox, call_s=1.2, total_s=3.0)


class Script:
  """A sandbox and its session that answer with given rows: a row, an error to raise, or a function of the request."""

  def __init__(self, *rows):
    self.rows, self.files, self.requests, self.limits, self.num_closed = list(rows), {}, [], [], 0

  def open(self, argv, *, files, limits):
    self.files = files
    return self

  def exchange(self, line, timeout_s):
    self.requests.append(json.loads(line))
    self.limits.append(timeout_s)
    row = self.rows[min(len(self.requests), len(self.rows)) - 1]
    if isinstance(row, Exception):
      raise row
    return row(self.requests[-1]) if callable(row) else row

  def close(self):
    self.num_closed += 1


def value_row(value):
  return lambda request: json.dumps({'nonce': request['nonce'], 'value': value}).encode()


def ended(reason):
  return client.SessionEnded(client.Result(reason, None, '', '', 1.0))


@pytest.mark.parametrize(('reply', 'expected'), [
    ('```python\na = 1\n```', 'a = 1'),
    ('```\na = 1\n```', 'a = 1'),
    ('```py\na = 1\n```\nor better\n``` Python3 \na = 2\n```\nThat is it.', 'a = 2'),
    ('```python\na = 1\n```\nwhich prints\n```text\n5\n```', 'a = 1'),  # output is no program
    ('```python\na = 1\n```\n```python\na = 2', 'a = 1'),  # cut off: not complete
    ('```python\na = 2', None),
    ('````python\n```\n````', '```'),  # a shorter fence is text of the block
    ('```python\r\na = 1\r\n```', 'a = 1\r'),
    ('  ```python\n  a = 1\n  ```', '  a = 1'),
    ('```json\n{}\n```', None),
    ('a = 1', 'a = 1'),
    ('see ```a = 1```', 'see ```a = 1```'),  # ticks in a line open nothing
    ('', ''),
])
def test_extract(reply, expected):
  assert code.extract(reply) == expected


def test_extract_takes_linear_time():
  assert code.extract('\n'.join('`' * (3 + i % 300) for i in range(100_000))) is not None


@pytest.mark.parametrize('value', [None, True, 0, -3, 1.5, 'é\ud800', b'\x00\xff', [1, [2]], (), (1, (2,)), {1, 2}, frozenset('ab'), {},
                                   {'tuple': [1]}, {1: 'a', (1, 2): {None: b''}}])
def test_values_survive_the_encoding(value):
  written = json.loads(json.dumps(code_worker.encode(value)))
  assert code_worker.decode(written) == value
  assert type(code_worker.decode(written)) is type(value)
  assert code.matches(written, written)


class Three(int):
  pass


@pytest.mark.parametrize(('value', 'error'), [
    (float('nan'), ValueError), (float('inf'), ValueError), ([1, {2: float('-inf')}], ValueError),
    (Three(3), TypeError), (1j, TypeError), (object(), TypeError), (range(3), TypeError), ((x for x in 'ab'), TypeError)])
def test_values_that_are_not_plain_data_are_refused(value, error):
  with pytest.raises(error, match='finite|not plain data'):
    code_worker.encode(value)


@pytest.mark.parametrize(('expected', 'value', 'strict', 'by_value'), [
    (1, True, False, True), (True, 1, False, True), (1, 1.0, False, True), (1.0, 1, False, True), (2, 2.0000001, False, False),
    (0, False, False, True), ('1', 1, False, False), (None, 0, False, False), (None, False, False, False),
    ((1, 2), [1, 2], False, False), ({1}, [1], False, False), ({1}, frozenset({1}), False, False),
    ({1, 2}, {2, 1}, True, True), ({1, 2}, {1, 3}, False, False), ({1: 'a', 2: 'b'}, {2: 'b', 1: 'a'}, True, True),
    ({1: 'a'}, {True: 'a'}, False, True), ({1: 'a'}, {1: 'b'}, False, False), ([], (), False, False), ([1, 2], [2, 1], False, False),
    (1.0, 1.0 + 5e-7, True, True), (1.0, 1.0 + 2e-6, False, False), (1e-5, 0.0, False, False), (0.0, 1e-17, True, True),
    ([1.0, [2.0]], [1.0, [2.0 + 1e-9]], True, True), (10**400, 1.0, False, False), (1.0, 10**400, False, False)])
def test_matches(expected, value, strict, by_value):
  expected, value = code_worker.encode(expected), code_worker.encode(value)
  assert code.matches(expected, value) == strict
  assert code.matches(expected, value, is_by_value=True) == by_value


def test_matches_does_not_trust_the_shape_of_a_value():
  for value in ({}, {'set': 3}, {'set': [1, 1]}, {'set': [1, 2], 'tuple': []}, {'dict': [[1, 2]]}, {'set': [1, {}]}, [1, 2], float('inf')):
    assert not code.matches({'set': [1, 2]}, value)
  assert not code.matches(1.0, float('nan'))
  assert not code.matches({'dict': [[1, 2]]}, {'dict': [[1]]})


@pytest.mark.parametrize('row', [
    b'', b'nonsense', b'[]', b'7', b'null', b'"x"', b'\xff\xfe', b'{"value": 5}', b'{"nonce": "0000000000000000", "value": 5}',
    b'[' * 100_000, b'{"nonce": ' + b'9' * 5000 + b'}', b'{"value": 5, "nonce": null}'])
def test_a_row_that_answers_no_call_is_wrong(row):
  verdict = CodeVerifier(Script(row)).verify(problem(ADD), RIGHT)
  assert (verdict.score, verdict.reason) == (0.0, Reason.WRONG)
  assert 'not an answer' in verdict.detail


@pytest.mark.parametrize('row', [
    value_row(True), value_row('5'), value_row(5.0), value_row([5]), value_row(None),
    lambda request: b'{"nonce": "%s", "value": NaN}' % request['nonce'].encode(),
    lambda request: b'{"nonce": "%s", "value": 5%s}' % (request['nonce'].encode(), b' ' * (1 << 20)),
    lambda request: b'{"nonce": "%s"}' % request['nonce'].encode(),
    lambda request: b'{"nonce": ["%s"], "value": 5}' % request['nonce'].encode()])
def test_a_value_of_another_type_or_an_oversized_row_is_wrong(row):
  five = {'entry': 'add', 'cases': [[[2, 3], 5]]}
  assert CodeVerifier(Script(value_row(5))).verify(problem(five), RIGHT).score == 1.0
  verdict = CodeVerifier(Script(row)).verify(problem(five), RIGHT)
  assert (verdict.score, verdict.reason) == (0.0, Reason.WRONG)


def test_rows_ahead_of_their_call_are_wrong():
  script = Script()
  script.rows = [value_row(5), lambda request: value_row(987123)(script.requests[0])]  # the second answer repeats the first nonce
  verdict = CodeVerifier(script).verify(problem(ADD), RIGHT)
  assert verdict.score == 0.0
  assert verdict.parts['cases_fraction'] == 0.25
  assert len({request['nonce'] for request in script.requests}) == 4


def test_expected_values_do_not_enter_the_box():
  script = Script(value_row(5))
  CodeVerifier(script).verify(problem(ADD), RIGHT)
  assert sorted(script.files) == ['code_worker.py', 'submission.py']
  sent = json.dumps(script.requests) + repr(script.files)
  assert '987000' in sent
  assert '987123' not in sent
  assert all(sorted(request) == ['args', 'entry', 'nonce'] for request in script.requests)


def test_reasons_of_the_end_of_a_box():
  for end, reason in (('timeout', Reason.TIMEOUT), ('nonzero', Reason.WRONG), ('output', Reason.WRONG), ('oom', Reason.WRONG)):
    script = Script(value_row(5), ended(end))
    verdict = CodeVerifier(script).verify(problem(ADD), RIGHT)
    assert (verdict.score, verdict.reason, verdict.parts['cases_fraction']) == (0.0, reason, 0.25)
    assert end in verdict.detail
    assert (len(script.requests), script.num_closed) == (2, 1)


def test_a_failing_sandbox_is_invalid_and_never_zero():
  class Broken:
    def open(self, argv, *, files, limits):
      raise EnvironmentFailure('no box could be started')

  script = Script(value_row(5), EnvironmentFailure('the supervisor is gone'))
  for sandbox in (Broken(), script):
    verdict = CodeVerifier(sandbox).verify(problem(ADD), fenced(RIGHT))
    assert (verdict.score, verdict.reason, verdict.is_valid) == (None, Reason.VERIFIER_ERROR, False)
  assert 'the supervisor is gone' in verdict.detail
  assert script.num_closed == 1


def test_every_call_gets_a_share_of_the_time_whatever_was_waited():
  script = Script(value_row(5))
  CodeVerifier(script, call_s=3.0, total_s=4.0).verify(problem(ADD), RIGHT)
  assert script.limits == pytest.approx([3.0] * 4, abs=0.5)
  slow = Script(lambda request: time.sleep(0.1) or b'')
  CodeVerifier(slow, call_s=1.0, total_s=0.2).verify(problem(ADD), RIGHT)
  assert slow.limits == pytest.approx([0.2, 0.1, 0.05, 0.05], abs=0.04)


def test_times_must_be_positive():
  with pytest.raises(ValueError, match='call_s=0, total_s=1.0 must be positive'):
    CodeVerifier(call_s=0, total_s=1.0)


@pytest.mark.parametrize(('reply', 'reason'), [
    ('', Reason.NO_ANSWER), (' \n', Reason.NO_ANSWER), ('I cannot do that.', Reason.NO_ANSWER), ('```python\n\n```', Reason.NO_ANSWER),
    ('```python\ndef add(a, b): return a + b', Reason.NO_ANSWER), ('```python\ndef sub(a, b): return a - b\n```', Reason.NO_ANSWER),
    (fenced(RIGHT + '#' * 70_000), Reason.TOO_LONG)])
def test_replies_without_a_program_open_no_box(reply, reason):
  script = Script(value_row(5))
  verdict = CodeVerifier(script).verify(problem(ADD), reply)
  assert (verdict.score, verdict.reason, verdict.parts['cases_fraction']) == (0.0, reason, 0.0)
  assert not script.requests


# From here on in real boxes.

@pytest.mark.parametrize('reply', [
    RIGHT, fenced(RIGHT), fenced('add = lambda a, b: a + b'), fenced(RIGHT + 'print("done")\nassert input is not None'),
    fenced('from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Sum:\n  a: int\n  b: "int" = 0\n'
           'def add(a, b):\n  import sys\n  print("x" * 2_000_000)\n  print("y", file=sys.stderr)\n  s = Sum(a, b)\n  return s.a + s.b'),
    fenced(RIGHT + 'if __name__ == "__main__":\n  raise SystemExit(1)')])
def test_right_programs_score_one(verifier, reply):
  verdict = verifier.verify(problem(ADD), reply)
  assert (verdict.score, verdict.reason, verdict.parts['cases_fraction']) == (1.0, Reason.OK, 1.0), verdict.detail
  assert verdict.parsed == code.extract(reply)


@pytest.mark.parametrize(('text', 'reason', 'fraction', 'detail'), [
    ('def add(a, b):\n  return a - b', Reason.WRONG, 0.0, 'wrong value'),
    ('def add(a, b):\n  return abs(a + b) if a < 100 else 0', Reason.WRONG, 0.75, 'wrong value'),
    ('def add(a, b):\n  return a + c', Reason.WRONG, 0.0, "name 'c' is not defined"),
    ('def add(a):\n  return a', Reason.WRONG, 0.0, 'positional argument'),
    ('def add(a, b) return a', Reason.BAD_FORMAT, 0.0, 'SyntaxError'),
    ('I would add a and b.', Reason.BAD_FORMAT, 0.0, 'SyntaxError'),
    ('add = "\ud800"', Reason.BAD_FORMAT, 0.0, 'SyntaxError'),
    ('add = 1\0', Reason.BAD_FORMAT, 0.0, 'null bytes'),
    ('import numpy\n' + RIGHT, Reason.WRONG, 0.0, "No module named 'numpy'"),
    ('def add(a, b):\n  if a < 0: raise ValueError\n  return a + b', Reason.WRONG, 0.75, 'ValueError'),
    ('def add(a, b):\n  if a < 0: raise SystemExit\n  return a + b', Reason.WRONG, 0.75, 'SystemExit'),
    ('add = 5', Reason.WRONG, 0.0, 'not callable'),
    ('def added(a, b):\n  return a + b', Reason.WRONG, 0.0, 'add'),
])
def test_wrong_programs_score_zero_and_say_why(verifier, text, reason, fraction, detail):
  verdict = verifier.verify(problem(ADD), text)
  assert (verdict.score, verdict.reason, verdict.parts['cases_fraction']) == (0.0, reason, fraction)
  assert detail in verdict.detail


FORGE = 'import json, os\nROW = json.dumps({"nonce": "0" * 16, "value": 5}).encode() + b"\\n"\n'
# Knows the value that it looks for without holding it.
SEARCH = '''
import re
def seen(x):
  return type(x) is int and x * 2 == 1974246
def read(data):
  return next((int(digits) for digits in re.findall(rb"[0-9]{6}", data) if seen(int(digits))), None)
'''
ATTACKS = {
    'sys.exit at import': 'import sys\nsys.exit(0)\ndef add(a, b): pass',
    'sys.exit in the call': 'import sys\ndef add(a, b): sys.exit(0)',
    'os._exit at import': 'import os\nos._exit(0)  # add',
    'os._exit in the call': 'import os\ndef add(a, b): os._exit(0)',
    'atexit': 'import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): raise SystemExit(0)',
    'prints that all is well': 'import os\nprint("4 passed in 0.01s")\ndef add(a, b):\n  print("4 passed")\n  os._exit(0)',
    'exec of another program': 'import os\ndef add(a, b): os.execv("/bin/echo", ["echo", "5"])',
    'rows on every descriptor at import': FORGE + '''
for fd in range(64):
  for _ in range(4):
    try: os.write(fd, ROW)
    except OSError: pass
''' + 'def add(a, b): return 0',
    'rows on every descriptor in the call': FORGE + '''
def add(a, b):
  for fd in range(64):
    try: os.write(fd, ROW)
    except OSError: pass
  return 5
''',
    'answers ahead with the nonce of the call': '''
import gc, json, os
def add(a, b):
  frame = __import__("sys")._getframe(2)
  nonce = frame.f_locals["request"]["nonce"]
  for value in (5, 987123, 0, 3):
    frame.f_locals["replies"].write(json.dumps({"nonce": nonce, "value": value}).encode() + b"\\n")
  frame.f_locals["replies"].flush()
  os._exit(0)
''',
    'an object equal to everything': '''
class Any:
  def __eq__(self, other): return True
  def __hash__(self): return 0
def add(a, b): return Any()
''',
    'an int equal to everything': '''
class Any(int):
  def __eq__(self, other): return True
  __ne__ = __lt__ = __gt__ = lambda self, other: False
  def __hash__(self): return 0
def add(a, b): return Any(5)
''',
    'a class that claims to be int': '''
class Any:
  __class__ = int
  def __eq__(self, other): return True
def add(a, b): return Any()
''',
    'a list that changes as it is read': '''
class Any(list):
  def __iter__(self): return iter([5])
  def __eq__(self, other): return True
def add(a, b): return Any()
''',
    'expected values in frames': SEARCH + '''
import sys
def add(a, b):
  frame = sys._getframe()
  while frame:
    for x in [*frame.f_locals.values(), *frame.f_globals.values()]:
      for y in [x, *(x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ())]:
        if seen(y): return y
    frame = frame.f_back
  return 5
''',
    'expected values in the garbage collector': SEARCH + '''
import gc
def add(a, b):
  for thing in gc.get_objects():
    if isinstance(thing, (list, tuple)):
      for x in thing:
        if seen(x): return x
    elif isinstance(thing, dict):
      for x in list(thing.values()):
        if seen(x): return x
  return 5
''',
    'expected values on disk': SEARCH + '''
import os
def add(a, b):
  for top in ("/workspace", "/tmp", "/home", "/run", "/proc/self", "/etc"):
    for folder, _, names in os.walk(top):
      for name in names:
        try: data = open(os.path.join(folder, name), "rb").read(1 << 20)
        except OSError: continue
        if read(data): return read(data)
  return 5
''',
    'expected values in the environment': SEARCH + 'import os\ndef add(a, b): return read(repr(os.environ).encode()) or 5',
    'expected values in the memory of the parents': SEARCH + '''
import os
def add(a, b):
  for pid in ("1", str(os.getppid())):
    try:
      with open(f"/proc/{pid}/mem", "rb") as memory, open(f"/proc/{pid}/maps") as maps:
        for line in maps:
          start, end = (int(x, 16) for x in line.split()[0].split("-"))
          memory.seek(start)
          data = memory.read(end - start)
          if read(data): return read(data)
    except (OSError, ValueError, OverflowError): pass
  return 5
''',
    'patched json': 'import json\njson.dumps = lambda *a, **k: \'{"nonce": "x", "value": 5}\'\ndef add(a, b): return 5',
    'a json of its own on disk': 'open("json.py", "w").write("loads = dumps = lambda *a: True")\ndef add(a, b): return 5',
    'a site of its own on disk': '''
for name in ("sitecustomize.py", "usercustomize.py", "conftest.py", "code_worker.py", "pytest.ini", "reward.txt", "result.json"):
  try: open(name, "w").write("1")
  except OSError: pass
def add(a, b): return 5
''',
    'patched worker': 'import sys\nw = sys.modules["__main__"]\nw.encode = lambda value: True\ndef add(a, b): return 5',
    'patched builtins': 'import builtins\nbuiltins.getattr = lambda *a: (lambda *b: 5)\nbuiltins.type = lambda x: int\ndef add(a, b): return "5"',
    'huge value': 'def add(a, b): return "5" * 50_000_000',
    'huge int': 'def add(a, b): return 5 ** 100_000',
    'nested value': 'def add(a, b):\n  x = []\n  for _ in range(100_000): x = [x]\n  return x',
    'value that holds itself': 'def add(a, b):\n  x = []\n  x.append(x)\n  return x',
    'flood on the real pipe': '''
import os
def add(a, b):
  for fd in range(3, 64):
    try:
      while True: os.write(fd, b"x" * 65536)
    except OSError: pass
''',
    'nan': 'def add(a, b): return float("nan")',
    'infinity': 'def add(a, b): return float("inf")',
    'text for a number': 'def add(a, b): return str(a + b)',
    'float for an int': 'def add(a, b): return float(a + b)',
    'nothing': 'def add(a, b): pass',
    'the same for all': 'def add(a, b): return 5',
    'an input': 'def add(a, b): return a',
    'a table of what was shown': 'def add(a, b): return {(2, 3): 5}.get((a, b))',
    'infinite loop at import': 'while True: pass\ndef add(a, b): pass',
    'infinite loop in the call': 'def add(a, b):\n  while True: pass',
    'sleep': 'import time\ndef add(a, b): time.sleep(1000)',
    'loop that catches all': 'def add(a, b):\n  while True:\n    try:\n      while True: pass\n    except BaseException: pass',
    'fork bomb': 'import os\ndef add(a, b):\n  while True:\n    try: os.fork()\n    except OSError: pass',
    'threads': 'import threading, time\ndef add(a, b):\n  while True: threading.Thread(target=time.sleep, args=(99,)).start()',
    'recursion': 'def add(a, b): return add(a, b)',
    'recursion without a limit': 'import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b) + add(b, a)',
    'memory bomb': 'def add(a, b):\n  x = []\n  while True: x.append(bytearray(1 << 24))',
    'disk bomb': 'def add(a, b):\n  with open("big", "wb") as f:\n    while True: f.write(b"x" * (1 << 20))',
    'power tower': 'def add(a, b): return 9 ** 9 ** 9',
    'reads the requests itself': '''
import os
def add(a, b):
  for fd in range(3, 64):
    try: os.read(fd, 1 << 16)
    except OSError: pass
  return 5
''',
    'closes every descriptor': 'import os\ndef add(a, b):\n  os.closerange(0, 256)\n  return 5',
    'signals': 'import os, signal\ndef add(a, b):\n  for pid in (os.getpid(), os.getppid(), 1, -1, 0):\n    try: os.kill(pid, signal.SIGKILL)\n'
               '    except OSError: pass\n  return 5',
    'stops itself': 'import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGSTOP)',
    'leaves a process behind': 'import os, time\nif not os.fork(): time.sleep(100)\ndef add(a, b): return 5',
    'deep source': 'add = ' + '-' * 30_000 + '1',
    'nested source': 'add = ' + '(' * 5_000 + ')' * 5_000,
    'raises in describing': 'class E(Exception):\n  def __str__(self): raise self\ndef add(a, b): raise E',
}
SLOW = {'infinite loop at import', 'infinite loop in the call', 'sleep', 'loop that catches all', 'power tower', 'stops itself',
        'reads the requests itself'}


@pytest.mark.parametrize('name', ATTACKS)
def test_attacks_score_zero_and_the_next_submission_is_scored_as_ever(verifier, hasty, name):
  # With one case, whoever finds its expected value would score.
  verdict = hasty.verify(problem(SECRET if name.startswith('expected values') else ADD), fenced(ATTACKS[name]))
  assert verdict.is_valid, verdict.detail
  assert verdict.score == 0.0
  assert verdict.reason in (Reason.WRONG, Reason.TIMEOUT, Reason.BAD_FORMAT)
  if name in SLOW:
    assert verdict.reason == Reason.TIMEOUT, verdict.detail
  assert verifier.verify(problem(ADD), fenced(RIGHT)).score == 1.0


def test_bool_for_int_and_containers_are_told_apart_in_boxes(verifier):
  cases = {'entry': 'f', 'cases': [[[1], 1], [[0], 0]]}
  assert verifier.verify(problem(cases), 'def f(n): return n').score == 1.0
  assert verifier.verify(problem(cases), 'def f(n): return bool(n)').score == 0.0
  given = {'tuple': [1, {'set': [2]}, {'dict': [[{'tuple': [1, 2]}, None]]}, {'bytes': '00ff'}, 1.5]}
  cases = {'entry': 'f', 'cases': [[[given], given], [[[given]], [given]]]}
  assert verifier.verify(problem(cases), 'def f(x): return x').score == 1.0
  assert verifier.verify(problem(cases), 'def f(x): return list(x)').parts['cases_fraction'] == 0.5
  counts = {'entry': 'f', 'cases': [[['aba'], {'dict': [['b', 1], ['a', 2]]}], [[''], {'dict': []}]]}
  assert verifier.verify(problem(counts), 'import collections\nf = collections.Counter').score == 1.0


def test_a_submission_is_loaded_once_and_calls_get_arguments_of_their_own(verifier):
  cases = {'entry': 'f', 'cases': [[[], 1], [[], 2], [[], 3]]}
  assert verifier.verify(problem(cases), 'calls = []\ndef f():\n  calls.append(0)\n  return len(calls)').score == 1.0
  cases = {'entry': 'f', 'cases': [[[[1, 2]], 2], [[[1, 2]], 2]]}
  assert verifier.verify(problem(cases), 'def f(xs):\n  n = len(xs)\n  xs.clear()\n  return n').score == 1.0


ECHO_SUM = {'cases': [['1 2\n3\n', '6\n'], ['', '0'], ['10\n\n-4\n', '6']]}


@pytest.mark.parametrize(('text', 'score', 'fraction'), [
    ('import sys\nprint(sum(map(int, sys.stdin.read().split())))', 1.0, 1.0),
    ('print(sum(map(int, open(0).read().split())), "", "\\n")', 1.0, 1.0),  # trailing white space does not count
    ('import os\nos.write(1, str(sum(map(int, os.read(0, 999).split()))).encode())', 1.0, 1.0),
    ('if __name__ == "__main__":\n  import sys\n  print(sum(int(x) for line in sys.stdin for x in line.split()))\n  sys.exit()', 1.0, 1.0),
    ('print(6)', 0.0, 2 / 3),
    ('print(" 6")', 0.0, 0.0),
    ('import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(3)', 0.0, 0.0),
    ('total = 0\nwhile True: total += sum(map(int, input().split()))', 0.0, 0.0),
    ('import os\nos.write(1, b"\\xff")', 0.0, 0.0),
    ('import os\nfor fd in range(64):\n  try: os.write(fd, b\'{"nonce": "0", "value": "6"}\\n\')\n  except OSError: pass', 0.0, 0.0),
    ('print("6\\n" * 10_000_000)', 0.0, 0.0),
    ('x = ', 0.0, 0.0),
])
def test_programs_with_standard_input(verifier, text, score, fraction):
  verdict = verifier.verify(problem(ECHO_SUM), fenced(text))
  assert (verdict.score, verdict.parts['cases_fraction']) == (score, pytest.approx(fraction)), verdict.detail


def test_threads_share_a_verifier(verifier):
  replies = [fenced(RIGHT), fenced(ATTACKS['the same for all'])] * 4
  with ThreadPoolExecutor(4) as pool:
    verdicts = list(pool.map(lambda reply: verifier.verify(problem(ADD), reply), replies))
  assert [verdict.score for verdict in verdicts] == [1.0, 0.0] * 4
