"""Tools that policies call during an episode.

What a tool returns goes into the conversation, so it is clipped and free of control characters here; keeping special tokens out of it is the
chat template's part. Deliberately absent: interactive shells, files, packages beyond the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
import secrets
import threading
from typing import Any
import unicodedata

from envs.core import EnvironmentFailure, ToolError
from envs.sandbox import client, python_worker

_ARGV = (*client.PYTHON, '-c', Path(python_worker.__file__).read_text())
_MAX_CODE_BYTES = 256 << 10
_START_S = 30.0
_RESTARTED = 'The interpreter was restarted, so earlier variables are gone.'


class PythonTool:
  """A Python interpreter of one episode, in a box: what one call defines, the next ones see.

  The observation is what the code printed, or else the value of its last expression as a notebook shows it, or 'No output.'; an exception
  adds a line 'Error: ...'. A call that takes too long, or code that ends the interpreter, costs the variables, and the observation says so.
  Only the standard library is there. Calls from several threads take turns; `close` need not wait for them.
  """

  name = 'python'

  def __init__(self, sandbox: client.Sandbox | None = None, *, timeout_s: float = 5.0, max_chars: int = 4000,
               limits: client.Limits = client.Limits(cpu_s=60, memory_bytes=256 << 20, disk_bytes=16 << 20, num_processes=32)):
    """Make a tool without starting anything.

    Args:
      sandbox: where the box comes from; None takes the process's own at the first call.
      timeout_s: wall-clock limit of a call.
      max_chars: longest observation; the middle of a longer one is left out.
      limits: of the box; `cpu_s` counts over all calls.
    """
    if timeout_s <= 0 or max_chars < 200:
      raise ValueError(f'timeout_s={timeout_s} must be positive and max_chars={max_chars} at least 200.')
    self.schema: Mapping[str, Any] = {
        'description': f'Run Python 3 code. Variables live on between calls. Returns what the code prints, or the value of its last expression. '
                       f'Standard library only; no network; {timeout_s:g} seconds a call.',
        'type': 'object', 'properties': {'code': {'type': 'string', 'description': 'The code to run.'}}, 'required': ['code'],
        'additionalProperties': False}
    self._sandbox, self._timeout_s, self._max_chars, self._limits = sandbox, timeout_s, max_chars, limits
    self._call_lock, self._state_lock = threading.Lock(), threading.Lock()
    self._session: client.Session | None = None
    self._is_closed = False

  def call(self, arguments: Mapping[str, Any]) -> str:
    """Run `arguments['code']` and return the observation.

    Raises:
      ToolError: the arguments are not one text 'code'.
      EnvironmentFailure: the sandbox failed, or the tool is closed.
    """
    code = arguments.get('code')
    if not isinstance(code, str) or set(arguments) != {'code'}:
      raise ToolError(f'python takes one argument, the text "code", got {dict(arguments)!r:.200}.')
    data = code.encode('utf-8', 'replace')
    if len(data) > _MAX_CODE_BYTES:
      raise ToolError(f'the code has {len(data)} bytes, {_MAX_CODE_BYTES} are allowed.')
    with self._call_lock:
      session = self._open()
      try:
        return clip(self._ask(session, data, self._timeout_s), self._max_chars)
      except client.SessionEnded as end:
        self._drop(session)
        return f'Error: {self._explain(end)} {_RESTARTED}'

  def close(self) -> None:
    """End the box; later calls fail. May be called twice, and while a call runs in another thread."""
    with self._state_lock:
      self._is_closed = True
      if self._session is not None:
        self._session.close()
        self._session = None

  def _open(self) -> client.Session:
    """Return the session, with its interpreter running."""
    with self._state_lock:
      if self._is_closed:
        raise EnvironmentFailure('the python tool was called after it was closed.')
      if self._session is not None:
        return self._session
    session = (self._sandbox or client.shared()).open(_ARGV, limits=self._limits)
    try:
      self._ask(session, b'', _START_S)  # how long a start takes is not the policy's doing
    except client.SessionEnded as end:
      session.close()
      raise EnvironmentFailure(f'the interpreter of the python tool did not start: {end.reason}, {end.result.stderr[-500:]}') from end
    with self._state_lock:
      if self._is_closed:
        session.close()
        raise EnvironmentFailure('the python tool was closed while it started.')
      self._session = session
    return session

  def _drop(self, session: client.Session) -> None:
    session.close()
    with self._state_lock:
      if self._session is session:
        self._session = None

  def _ask(self, session: client.Session, code: bytes, timeout_s: float) -> str:
    nonce = secrets.token_hex(8).encode()
    row = session.exchange(nonce + b' ' + code.hex().encode(), timeout_s)
    echo, _, data = row.partition(b' ')
    try:
      if echo == nonce:
        return bytes.fromhex(data.decode('ascii')).decode(errors='replace')
    except ValueError:
      pass
    self._drop(session)
    return f'Error: the code wrote into the interpreter\'s own channel. {_RESTARTED}'

  def _explain(self, end: client.SessionEnded) -> str:
    limits = self._limits
    if end.reason == 'timeout' and end.result.exit_code is not None:
      return f'used up the {limits.cpu_s} s of processor time of this interpreter.'
    reasons = {'timeout': f'timed out after {self._timeout_s:g} s.', 'oom': f'out of memory, more than {limits.memory_bytes >> 20} MiB.',
               'output': 'the code wrote into the interpreter\'s own channel.'}
    return reasons.get(end.reason, f'the interpreter ended with exit code {end.result.exit_code}.')


def clip(text: str, max_chars: int) -> str:
  """Return an observation: no control characters but newlines and tabs, no trailing white space, no more than `max_chars` characters."""
  text = ''.join(char if char in '\n\t' or unicodedata.category(char) not in ('Cc', 'Cf', 'Cs', 'Co') else '\ufffd'
                 for char in text.replace('\r\n', '\n')).rstrip()
  if not text:
    return 'No output.'
  if len(text) <= max_chars:
    return text
  mark = f'\n... {len(text) - max_chars} characters left out ...\n'
  head = (max_chars - len(mark)) // 2
  tail = max_chars - len(mark) - head
  return f'{text[:head]}{mark}{text[-tail:]}'
