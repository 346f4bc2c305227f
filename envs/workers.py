"""Worker processes that can be killed: for library code that may hang, blow up or crash on text that a policy wrote.

A `WorkerPool` calls one function in plain subprocesses over pipes, one JSON line each way, with a hard deadline: a call that is late has
its process group killed and reaped, and the next call gets a fresh worker. A slow call is the doing of whoever wrote the payload
(`WorkerTimeout`); a worker that dies or cannot start is ours (`EnvironmentFailure`), after one retry with a fresh one.

The processes are started anew, never forked, so a parent that runs JAX is safe, and they import only what the function's module imports.
Deliberately absent: isolation. Workers run our own functions on data; code that a policy wrote belongs in the sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import importlib
import itertools
import json
import math
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any, BinaryIO
import weakref

# A worker's imports may take long on a busy machine; this only bounds a start that hangs.
_START_S = 120.0
_STOP_S = 5.0
_ATTEMPTS = 2
_MAX_REPLY_BYTES = 1 << 20
# Libraries of linear algebra reserve address space for every thread, which would count against the memory limit.
_ENVIRONMENT = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'PYTHONHASHSEED': '0'}


class WorkerTimeout(Exception):
  """The call used up its time or its memory: a result about the payload, not a failure of ours."""


class _WorkerDied(Exception):
  """The worker ended, did not start, or said something that is no answer."""


class WorkerPool:
  """Calls a function in up to `num_workers` processes; safe to use from many threads.

  Workers start when they are first needed, live on between calls, and end with `close()`, with the pool, or with this process.
  """

  def __init__(self, target: str, *, num_workers: int = 1, wall_s: float = 2.0, memory_bytes: int = 1 << 30, recycle_after: int = 1000,
               wait_s: float = 120.0):
    """Set the limits.

    Args:
      target: 'module:function', from a JSON-able dict to a JSON-able dict.
      num_workers: calls at once.
      wall_s: seconds of one call, counted from when a running worker takes it.
      memory_bytes: address space of a worker.
      recycle_after: calls after which a worker is replaced, which bounds what its libraries leak.
      wait_s: seconds that a call waits for a free worker.
    """
    if target.count(':') != 1:
      raise ValueError(f'target={target!r} must name a function as "package.module:function".')
    if min(num_workers, wall_s, memory_bytes, recycle_after, wait_s) <= 0:
      raise ValueError(f'num_workers={num_workers}, wall_s={wall_s}, memory_bytes={memory_bytes}, recycle_after={recycle_after}, '
                       f'wait_s={wait_s} must all be positive.')
    self._target, self._wall_s, self._wait_s = target, wall_s, wait_s
    workers = [_Worker(target, wall_s, memory_bytes, recycle_after) for _ in range(num_workers)]
    # Last in, first out: the warm ones are used first.
    self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()
    for worker in workers:
      self._free.put(worker)
    # The finalizer also runs at interpreter exit; it must not hold the pool itself.
    self._finalizer = weakref.finalize(self, _stop_all, workers)

  def call(self, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the function returns.

    Raises:
      WorkerTimeout: it took longer than `wall_s` or more than `memory_bytes`.
      EnvironmentFailure: it raised, its workers died twice or do not start, or none was free within `wait_s`.
      RuntimeError: the pool is closed.
    """
    # Imported here, since a worker runs this file alone.
    from envs.core import EnvironmentFailure

    if not self._finalizer.alive:
      raise RuntimeError(f'the worker pool of {self._target} is closed.')
    try:
      worker = self._free.get(timeout=self._wait_s)
    except queue.Empty:
      raise EnvironmentFailure(f'no worker of {self._target} was free within {self._wait_s:g} s; raise num_workers.') from None
    try:
      reply = worker.call(payload)
    except TimeoutError:
      raise WorkerTimeout(f'{self._target} took longer than {self._wall_s:g} s.') from None
    except MemoryError:
      raise WorkerTimeout(f'{self._target} needed more memory than its worker may use.') from None
    except _WorkerDied as error:
      raise EnvironmentFailure(f'{self._target}: workers failed {_ATTEMPTS} times in a row, lastly: {error}.') from error
    finally:
      self._free.put(worker)
    if 'error' in reply:
      raise EnvironmentFailure(f'{self._target} raised {reply["error"]}')
    return reply['result']

  def close(self) -> None:
    """End all workers; calls in flight fail. May be called twice."""
    self._finalizer()


def _stop_all(workers: Sequence[_Worker]) -> None:
  for worker in workers:
    worker.stop()


class _Worker:
  """One place of a pool: a process that is started when there is a call for it, and again after it was killed. One call at a time."""

  def __init__(self, target: str, wall_s: float, memory_bytes: int, recycle_after: int):
    self._target, self._wall_s, self._memory_bytes, self._recycle_after = target, wall_s, memory_bytes, recycle_after
    self._process: subprocess.Popen | None = None
    self._ids = itertools.count()
    self._num_calls = 0
    self._is_stopped = False
    self._in_call = threading.Lock()
    # Keeps `stop`, in another thread, from signaling a process that was reaped, whose id may be another's by now.
    self._lock = threading.Lock()

  def call(self, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the worker's reply; TimeoutError or MemoryError by the payload's doing, _WorkerDied by ours."""
    with self._in_call:
      return self._call(payload)

  def _call(self, payload: Mapping[str, Any]) -> dict[str, Any]:
    for attempt in range(1, _ATTEMPTS + 1):
      try:
        if self._process is None:
          self._start()
        reply = self._exchange(payload, self._wall_s)
        break
      except _WorkerDied:
        self._kill()
        if attempt == _ATTEMPTS or self._is_stopped:
          raise
      except BaseException:
        # Late or interrupted: an answer that still comes must not meet the next call.
        self._kill()
        raise
    self._num_calls += 1
    if reply.get('out_of_memory') or self._num_calls >= self._recycle_after:
      self._kill()
    if reply.get('out_of_memory'):
      raise MemoryError
    return reply

  def stop(self) -> None:
    """End the process for good; a call in another thread sees it die and lets go of its pipes."""
    with self._lock:
      self._is_stopped = True
      if self._process is not None:
        _kill_group(self._process)
    if self._in_call.acquire(timeout=_STOP_S):
      self._kill()
      self._in_call.release()

  def _start(self) -> None:
    setup = json.dumps([self._target, self._memory_bytes, self._wall_s, sys.path])
    with self._lock:
      if self._is_stopped:
        raise _WorkerDied('the pool is closed')
      try:
        # -P: this file's folder must not come first in the worker's path. Its own session is the process group that is killed.
        self._process = subprocess.Popen([sys.executable, '-P', __file__, setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True, env={**os.environ, **_ENVIRONMENT})
      except OSError as error:
        raise _WorkerDied(f'{sys.executable} does not start: {error}') from error
      os.set_blocking(self._process.stdin.fileno(), False)
    self._num_calls = 0
    try:
      reply = self._exchange({}, _START_S)
    except TimeoutError:
      raise _WorkerDied(f'the worker did not start within {_START_S:g} s') from None
    if 'error' in reply:
      raise _WorkerDied(f'the worker cannot start: {reply["error"]}')

  def _exchange(self, payload: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
    """Send one line and return the line that answers it."""
    deadline = time.monotonic() + wall_s
    number = next(self._ids)
    pending = memoryview(json.dumps([number, payload]).encode() + b'\n')
    received = bytearray()
    to_worker, from_worker = self._process.stdin.fileno(), self._process.stdout.fileno()
    poller = select.poll()
    poller.register(from_worker, select.POLLIN)
    poller.register(to_worker, select.POLLOUT)
    while not received.endswith(b'\n'):
      left_s = deadline - time.monotonic()
      ready = poller.poll(1000 * left_s) if left_s > 0 else ()
      if not ready:
        raise TimeoutError
      for fd, _ in ready:
        if fd == from_worker:
          chunk = os.read(from_worker, 1 << 16)
          received += chunk
          if not chunk or len(received) > _MAX_REPLY_BYTES:
            raise _WorkerDied('the worker ended in a call' if not chunk else f'the reply is longer than {_MAX_REPLY_BYTES} bytes')
        elif pending:
          try:
            pending = pending[os.write(to_worker, pending):]
          except BrokenPipeError:
            raise _WorkerDied('the worker ended before a call') from None
          if not pending:
            poller.unregister(to_worker)
    return _parse_reply(bytes(received), number)

  def _kill(self) -> None:
    """Kill the process with all that it started, reap it, and close its pipes."""
    with self._lock:
      if self._process is not None:
        _kill_group(self._process)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None


def _kill_group(process: subprocess.Popen) -> None:
  # Until it has been waited for, a process keeps its id, and the group of that id is its own.
  if process.returncode is None:
    os.killpg(process.pid, signal.SIGKILL)


def _parse_reply(line: bytes, number: int) -> dict[str, Any]:
  try:
    answered, reply = json.loads(line)
  except (ValueError, TypeError):
    answered = None
  if answered != number:
    raise _WorkerDied(f'the worker said {line[:80]!r}, which is no answer to call {number}')
  return reply


def _serve(target: str, memory_bytes: int, wall_s: float, path: Sequence[str]) -> None:
  """Answer calls until the pipe closes. Runs in the worker."""
  # The pipes move to private descriptors: nothing that a library reads or prints touches them.
  requests, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(null, 1)
  _limit(resource.RLIMIT_CORE, 0)
  _limit(resource.RLIMIT_AS, memory_bytes)
  sys.path[:] = path
  module, name = target.split(':')
  # The first call is the start: it has no payload, and its answer says whether the function is there.
  _answer(requests.readline(), lambda _: bool(getattr(importlib.import_module(module), name)), replies)
  function = getattr(sys.modules[module], name)
  for line in requests:
    # Ends a busy worker whose parent is gone; an idle one ends with the pipe.
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + wall_s) + 1)
    _answer(line, function, replies)


def _limit(kind: int, value: int) -> None:
  """Lower a soft limit, as far as the hard one allows."""
  hard = resource.getrlimit(kind)[1]
  resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _answer(line: bytes, function: Callable[[Any], Any], replies: BinaryIO) -> None:
  number, payload = json.loads(line)
  try:
    reply = json.dumps([number, {'result': function(payload)}])
  except MemoryError:
    reply = json.dumps([number, {'out_of_memory': True}])
  except Exception as error:  # The process boundary: whatever it is, the caller is told.
    reply = json.dumps([number, {'error': f'{type(error).__name__}: {error}'[:1000]}])
  replies.write(reply.encode() + b'\n')
  replies.flush()


if __name__ == '__main__':
  _serve(*json.loads(sys.argv[1]))
