"""The process that starts and watches all boxes of a trainer: one thread, one event loop, requests over one socket.

It ends, and all boxes with it, when the trainer closes the socket or is gone. `client` starts it with `main`; see `wire` for the messages.

Deliberately absent: everything that is done once before the loop runs (`host`), and the box itself (`box`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
import contextlib
from dataclasses import dataclass
import itertools
import json
import os
import resource
import socket
from typing import Any

from envs.sandbox import bwrap
from envs.sandbox.box import Box, BoxFailure
from envs.sandbox.host import Host, Unavailable, prepare
from envs.sandbox.wire import Limits, ended_message, pack

_MAX_HEADER_BYTES = 64 << 20
_PROBE_S = 60.0
# What the standard library must have, and what must hold inside: nobody, no privileges, the filter, no user namespaces, no network.
_PROBE = '''
import collections, datetime, decimal, fractions, itertools, json, math, os, random, re, socket, statistics, string, sys
def refused(function, *args):
  try: function(*args)
  except OSError as error: return error.errno
alone = [name for _, name in socket.if_nameindex()] == ['lo']
print([os.getuid(), os.getgid(), sys.version_info >= (3, 11), alone, refused(socket.socket, 40, 1), refused(os.chroot, '/'),
       refused(os.mkdir, '/new'), refused(os.mkdir, '/usr/new')])
open('/workspace/file', 'w').close(), open('/tmp/file', 'w').close(), open('/dev/shm/file', 'w').close()
'''
_PROBE_SAYS = str([bwrap.UID_INSIDE, bwrap.UID_INSIDE, True, True, 97, 1, 30, 30])


@dataclass(frozen=True)
class Tier:
  """What works here: a Python, and whether /proc can be mounted in a box."""
  interpreter: bwrap.Interpreter
  has_proc: bool


def main(config: str) -> None:
  """Serve until the trainer is gone; `config` is the JSON that `client` makes."""
  settings = json.loads(config)
  os.umask(0o022)
  most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each open session takes a few; boxes get a limit of their own
  resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
  with socket.socket(fileno=settings['fd']) as channel:
    # Python passed the socket on open for this process; a box must not get it.
    os.set_inheritable(channel.fileno(), False)
    trainer_fd = os.pidfd_open(settings['parent_pid'])
    if os.getppid() != settings['parent_pid']:
      return  # the number may be another process's by now
    try:
      host = prepare(settings)
    except Unavailable as error:
      channel.sendall(pack({'id': -1, 'unavailable': str(error)}))
      return
    try:
      asyncio.run(_serve(host, settings, channel, trainer_fd))
    finally:
      if host.ended_fd is None:  # else the process that stayed behind does it
        host.cgroups.remove()


async def _serve(host: Host, settings: Mapping[str, Any], channel: socket.socket, trainer_fd: int) -> None:
  reader, writer = await asyncio.open_unix_connection(sock=channel.dup(), limit=_MAX_HEADER_BYTES)
  try:
    tier = await probe(host)
  except Unavailable as error:
    writer.write(pack({'id': -1, 'unavailable': str(error)}))
    await writer.drain()
    return
  writer.write(pack({'id': -1, 'tier': describe(host, tier)}))
  supervisor = Supervisor(host, tier, settings, writer)
  requests = asyncio.create_task(supervisor.read(reader))
  # A child that the trainer forked may hold its end of the socket open, so its own end is watched too.
  for fd in (trainer_fd, host.ended_fd):
    if fd is not None:
      asyncio.get_running_loop().add_reader(fd, requests.cancel)
  await asyncio.wait([requests])
  await supervisor.stop()


async def probe(host: Host) -> Tier:
  """Return what works, found by running a box and looking around inside; Unavailable says why nothing does."""
  said = []
  for interpreter, has_proc in itertools.product(host.interpreters, (True, False)):
    box = Box(host, f'probe-{len(said)}', Limits())
    form = f'{interpreter.path}{"" if has_proc else " without /proc"}'
    try:
      await box.start(('python3', '-I', '-S', '-c', _PROBE), {}, b'', interpreter=interpreter, has_proc=has_proc)
      ended = await box.finish(_PROBE_S)
    except (BoxFailure, OSError) as error:
      said.append(f'{form}: {error}')
      continue
    if ended.status == 'ok' and ended.stdout.decode(errors='replace').strip() == _PROBE_SAYS:
      return Tier(interpreter, has_proc)
    said.append(f'{form}: {ended.status}, printed {ended.stdout[:200]!r}, expected {_PROBE_SAYS}; {ended.stderr[-300:]!r}')
  raise Unavailable(f'sandbox: bubblewrap {host.bwrap_version} gives no box as user {host.uid}: {"; ".join(said)}. '
                    'In a container, its seccomp and AppArmor profiles must allow namespaces and mounts.')


def describe(host: Host, tier: Tier) -> str:
  """Return what isolates the boxes, in words."""
  memory = '' if host.cgroups.limits('memory') else ', memory watched every 50 ms'
  return (f'bubblewrap {host.bwrap_version}, uid {host.uid}, seccomp, no network, {host.cgroups.describe()}{memory}, '
          f'{"/proc" if tier.has_proc else "no /proc (it cannot be mounted here)"}, {tier.interpreter.path}')


class Supervisor:
  """Serves requests; each is a task of its own."""

  def __init__(self, host: Host, tier: Tier, settings: Mapping[str, Any], writer: asyncio.StreamWriter):
    self._host, self._tier, self._writer = host, tier, writer
    self._slot_wait_s = settings['slot_wait_s']
    self._slots = asyncio.Semaphore(settings['max_boxes'])
    self._places = asyncio.Semaphore(settings['max_sessions'])
    self._numbers = itertools.count()
    self._sessions: dict[int, Box] = {}
    self._boxes: set[Box] = set()
    self._tasks: set[asyncio.Task] = set()

  async def read(self, reader: asyncio.StreamReader) -> None:
    """Take requests until the trainer closes its end."""
    while line := await reader.readline():
      request = json.loads(line)
      payload = await reader.readexactly(request['size'])
      task = asyncio.create_task(self._answer(request, payload))
      self._tasks.add(task)
      task.add_done_callback(self._tasks.discard)

  async def stop(self) -> None:
    """Kill all boxes and wait until they are gone."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    for box in tuple(self._boxes):
      box.kill('signal')
    await asyncio.gather(*[box.gone() for box in self._boxes], return_exceptions=True)

  async def _answer(self, request: Mapping[str, Any], payload: bytes) -> None:
    serve = {'run': self._run, 'open': self._open, 'exchange': self._exchange, 'close': self._close}[request['op']]
    try:
      header, content = await serve(request, payload)
    except Exception as error:  # The process boundary: whatever failed here, the trainer must hear of it, or it waits in vain.
      header, content = {'failure': f'{request["op"]} failed: {error or repr(error)}'}, b''
    self._writer.write(pack({**header, 'id': request['id']}, content))

  async def _run(self, request: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    stdin, payload = payload[:request['num_stdin']], payload[request['num_stdin']:]
    async with _held(self._slots, self._slot_wait_s, 'box slot'):
      box = await self._start(request, payload, stdin)
      return ended_message(await box.finish(request['limits']['wall_s']))

  async def _open(self, request: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    await _acquire(self._places, self._slot_wait_s, 'place for a session')  # `_close` gives it back
    try:
      async with _held(self._slots, self._slot_wait_s, 'box slot'):
        box = await self._start(request, payload, None)
    except BaseException:
      self._places.release()
      raise
    number = next(self._numbers)
    self._sessions[number] = box
    return {'session': number}, b''

  async def _exchange(self, request: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    box = self._sessions.get(request['session'])
    if box is None:
      raise BoxFailure('the session was closed; open another one.')
    async with _held(self._slots, self._slot_wait_s, 'box slot'):
      line = await box.exchange(payload, request['timeout_s'])
    return ({}, line) if line is not None else ended_message(await box.gone())

  async def _close(self, request: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    box = self._sessions.pop(request['session'])
    box.kill('signal')
    try:
      await box.gone()
    finally:
      self._places.release()
    return {}, b''

  async def _start(self, request: Mapping[str, Any], payload: bytes, stdin: bytes | None) -> Box:
    files, start = {}, 0
    for name, size in request['files']:
      files[name] = payload[start:start + size]
      start += size
    # Paths of mounts can be seen inside, so a box's name says nothing about its task.
    box = Box(self._host, f'box-{next(self._numbers)}', Limits(**request['limits']))
    await box.start(request['argv'], files, stdin, interpreter=self._tier.interpreter, has_proc=self._tier.has_proc)
    self._boxes.add(box)
    box.ended.add_done_callback(lambda ended: self._forget(box, ended))
    return box

  def _forget(self, box: Box, ended: asyncio.Task) -> None:
    self._boxes.discard(box)
    if not ended.cancelled():
      ended.exception()  # counts as seen, also if nobody asks this box again


async def _acquire(semaphore: asyncio.Semaphore, wait_s: float, what: str) -> None:
  try:
    async with asyncio.timeout(wait_s):
      await semaphore.acquire()
  except TimeoutError as error:
    raise BoxFailure(f'no {what} came free within {wait_s:g} s; raise max_boxes or max_sessions of the sandbox, or close sessions.') from error


@contextlib.asynccontextmanager
async def _held(semaphore: asyncio.Semaphore, wait_s: float, what: str) -> AsyncIterator[None]:
  await _acquire(semaphore, wait_s, what)
  try:
    yield
  finally:
    semaphore.release()


