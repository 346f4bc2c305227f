"""Scores programs by running them on hidden cases in a sandbox. The expected values stay in this process.

One box per submission. It holds the submission and `code_worker`; calls go in one at a time, each with a nonce of its own, and only plain
data comes out, compared here. A forged, early, malformed, oversized or missing row fails its case, so exit codes, output, files and objects
that equal everything are worth nothing. What it cannot tell apart from a solution: code that computes the right values in an odd way.

Deliberately absent: partial pay (the share of right cases is a metric), tests that are programs themselves, other languages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
import json
import math
from pathlib import Path
import secrets
import time
from typing import Any, ClassVar

from envs.core import EnvironmentFailure, Problem, Reason, Verdict
from envs.sandbox import client
from envs.verifiers import code_worker

_WORKER = Path(code_worker.__file__).name
_MAX_CODE_CHARS = 64 * 1024
_MAX_OUTPUT_BYTES = 1 << 20
_LANGUAGES = ('', 'python', 'python3', 'py')
_REL_TOLERANCE, _ABS_TOLERANCE = 1e-6, 1e-12
_NUMBERS = {bool, int, float}
_UNORDERED = ('set', 'frozenset', 'dict')


def extract(reply: str) -> str | None:
  """Return the program of a reply: its last complete fenced block of Python, or all of it if it has no fence; None if there is neither.

  A block opens with a line of three or more backticks and 'python', 'py', 'python3' or nothing after them, and closes with a line of at
  least as many backticks alone. An unclosed block is no block.
  """
  found, lines, fence, language = None, [], '', ''
  has_fence = False
  for line in reply.split('\n'):
    text = line.strip()
    ticks = text[:len(text) - len(text.lstrip('`'))]
    if fence:
      if len(ticks) >= len(fence) and ticks == text:
        found = '\n'.join(lines) if language in _LANGUAGES else found
        fence = ''
      else:
        lines.append(line)
    elif len(ticks) >= 3 and '`' not in text[len(ticks):]:
      has_fence, fence, language, lines = True, ticks, text[len(ticks):].strip().lower(), []
  return found if has_fence else reply


@dataclass(frozen=True)
class CodeVerifier:
  """Pays 1 if every hidden case is right, else 0.

  `Problem.answer` is {'entry': function name, 'cases': [[args, expected], ...]} with values as `code_worker.encode` writes them, or, for
  programs that read standard input, {'cases': [[stdin, stdout], ...]}. Values must have the type of what is expected: True is not 1, 1.0 is
  not 1, a tuple is not a list; a float where a float is expected may be off by 1e-6 of it. With 'is_by_value': True in the answer, for
  data whose own tests are so, True and 1.0 are 1. Printed text is compared line by line without trailing white space.

  Attributes:
    sandbox: where submissions run; None takes the process's own, started at the first use.
    call_s: wall-clock limit of a call, loading the submission included; an answer after it is none.
    total_s: wall-clock time that the calls share. A call gets what is left of it, but at least an equal share, because the time that was
      waited for a slot of the sandbox counts and must not fail a submission. The worst is thus twice as long.
  """
  sandbox: client.Sandbox | None = None
  call_s: float = 5.0
  total_s: float = 15.0

  id: ClassVar[str] = 'code'
  version: ClassVar[int] = 1

  def __post_init__(self):
    if self.call_s <= 0 or self.total_s <= 0:
      raise ValueError(f'call_s={self.call_s}, total_s={self.total_s} must be positive.')

  def verify(self, problem: Problem, reply: str) -> Verdict:
    """Return the verdict, with the share of right cases as parts['cases_fraction']."""
    if not isinstance(reply, str):
      return _refuse(Reason.BAD_FORMAT, 'the reply is not text.')
    code, entry = extract(reply), problem.answer.get('entry')
    if not code or not code.strip() or (entry and entry not in code):
      return _refuse(Reason.NO_ANSWER, 'no complete fenced block of Python' + (f' that defines {entry}.' if entry else '.'))
    if len(code) > _MAX_CODE_CHARS:
      return _refuse(Reason.TOO_LONG, f'{len(code)} characters of code; {_MAX_CODE_CHARS} are allowed.')
    try:
      reasons, detail = self._grade(problem.answer, code)
    except EnvironmentFailure as failure:
      return Verdict(None, Reason.VERIFIER_ERROR, parsed=code, detail=str(failure))
    num_right = sum(reason == Reason.OK for reason in reasons)
    is_right = num_right == len(problem.answer['cases'])
    reason = Reason.OK if is_right else next(reason for reason in reasons if reason != Reason.OK)
    return Verdict(float(is_right), reason, {'cases_fraction': num_right / len(problem.answer['cases'])}, code, detail)

  def _grade(self, answer: Mapping[str, Any], code: str) -> tuple[list[Reason], str]:
    """Return (the reason of each case up to the one that ended the box, what was first wrong)."""
    sandbox = self.sandbox or client.shared()
    limits = client.Limits(cpu_s=math.ceil(2 * self.total_s), output_bytes=_MAX_OUTPUT_BYTES)
    # surrogatepass: text that is no UTF-8 must fail as a program inside, not as an encoding here.
    files = {_WORKER: Path(code_worker.__file__).read_bytes(), code_worker.SUBMISSION: code.encode('utf-8', 'surrogatepass')}
    session = sandbox.open((*client.PYTHON, _WORKER), files=files, limits=limits)
    try:
      outcomes = list(self._cases(session, answer))
    finally:
      session.close()
    return [reason for reason, _ in outcomes], next((detail for reason, detail in outcomes if reason != Reason.OK), '')

  def _cases(self, session: client.Session, answer: Mapping[str, Any]) -> Iterator[tuple[Reason, str]]:
    """Yield (reason, detail) of each case until the box ends."""
    share_s = self.total_s / len(answer['cases'])
    left_s = self.total_s
    for given, expected in answer['cases']:
      nonce, started = secrets.token_hex(8), time.monotonic()
      call = {'entry': answer['entry'], 'args': given} if 'entry' in answer else {'stdin': given}
      limit_s = min(self.call_s, max(left_s, share_s))
      try:
        row = session.exchange(json.dumps({'nonce': nonce, **call}).encode(), limit_s)
      except client.SessionEnded as end:
        yield (Reason.TIMEOUT if end.reason == 'timeout' else Reason.WRONG), f'the program ended: {end.reason}.'
        return
      left_s -= min(limit_s, time.monotonic() - started)
      yield _judge(row, nonce, expected, answer)


def _refuse(reason: Reason, detail: str) -> Verdict:
  return Verdict(0.0, reason, {'cases_fraction': 0.0}, detail=detail)


def _judge(row: bytes, nonce: str, expected: Any, answer: Mapping[str, Any]) -> tuple[Reason, str]:
  """Return (reason, detail) of one case from the row that came back; every byte of it is the submission's."""
  try:
    reply = json.loads(row) if len(row) <= _MAX_OUTPUT_BYTES else None
  except (ValueError, RecursionError):
    reply = None
  if not isinstance(reply, dict) or reply.get('nonce') != nonce:
    return Reason.WRONG, 'the row is not an answer to the call.'
  if 'unreadable' in reply:
    return Reason.BAD_FORMAT, str(reply['unreadable'])
  if 'value' not in reply:
    return Reason.WRONG, str(reply.get('error'))
  value = reply['value']
  if 'entry' in answer:
    is_right = matches(expected, value, is_by_value=answer.get('is_by_value', False))
  else:
    is_right = isinstance(value, str) and _lines(value) == _lines(expected)
  return (Reason.OK, '') if is_right else (Reason.WRONG, 'a wrong value.')


def matches(expected: Any, value: Any, is_by_value: bool = False) -> bool:
  """Say whether an encoded value is the encoded expected one: same types, floats within tolerance, sets and dicts in any order.

  Only `expected` steers the comparison; `value` is hostile and is never turned into sets or dicts of its own keys. With `is_by_value`
  numbers of different types are compared as Python does.
  """
  if type(expected) is not type(value):
    return is_by_value and {type(expected), type(value)} <= _NUMBERS and expected == value
  if isinstance(expected, float):
    return math.isclose(expected, value, rel_tol=_REL_TOLERANCE, abs_tol=_ABS_TOLERANCE)
  if isinstance(expected, list):
    return len(expected) == len(value) and all(matches(item, other, is_by_value) for item, other in zip(expected, value))
  if isinstance(expected, dict):
    (kind, contents), = expected.items()
    if list(value) != [kind]:
      return False
    return (_match_unordered if kind in _UNORDERED else matches)(contents, value[kind], is_by_value)
  return expected == value


def _match_unordered(expected: list, value: Any, is_by_value: bool) -> bool:
  if not isinstance(value, list) or len(expected) != len(value):
    return False
  return all(any(matches(item, other, is_by_value) for other in value) for item in expected)


def _lines(text: str) -> list[str]:
  return [line.rstrip() for line in text.rstrip().split('\n')]
