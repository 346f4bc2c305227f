"""One box: a program in a bubblewrap container with its file system, limits and streams, from start to what is known of its end.

Everything is launched from the thread of the event loop, because a box dies with the thread that started it. The program waits at bubblewrap's
block descriptor until its limits are set, so no limit is ever late. The end is seen on process descriptors, and a box is over only when its
whole process namespace is.

Deliberately absent: slots, sessions and requests (`supervisor`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import fcntl
import json
import os
from pathlib import Path
import resource
import signal
import subprocess
import time

from envs.sandbox import bwrap, linux
from envs.sandbox.cgroup import Cgroup
from envs.sandbox.host import BASE, Host
from envs.sandbox.wire import Ended, Limits, Status

_START_S, _KILL_S = 30.0, 20.0
_READ_BYTES = 1 << 16
_MAX_INODES = 20_000
_WATCH_MEMORY_S, _WATCH_PIDS_S, _WATCH_IDLE_S = 0.05, 0.2, 1.0


class BoxFailure(RuntimeError):
  """The box failed, not the program in it."""


class Box:
  """A running program.

  Attributes:
    output: what the program wrote to standard output and was not taken yet.
    ended: done when the box is gone, with how it ended, or with `BoxFailure`.
  """

  def __init__(self, host: Host, name: str, limits: Limits):
    self._host, self._name, self._limits = host, name, limits
    self._folder = f'{BASE}/{name}'
    self._status: Status | None = None
    self._has_hit_pids = False
    self._is_over = False
    self._errors = bytearray()
    self._arrived = asyncio.Event()
    self._is_asked = asyncio.Event()  # not set for a session between exchanges
    self._open_fds: set[int] = set()
    self._stdin: int | None = None
    self._group: Cgroup | None = None
    self._process: subprocess.Popen | None = None
    self._process_fd: int | None = None
    self._init_fd: int | None = None
    self.output = bytearray()
    self.ended: asyncio.Task[Ended]

  async def start(self, argv: Sequence[str], files: Mapping[str, bytes], stdin: bytes | None, *, interpreter: bwrap.Interpreter,
                  has_proc: bool) -> None:
    """Start the program; `stdin` of None is a pipe that `exchange` writes to.

    Raises:
      BoxFailure: bubblewrap did not get as far as the program's limits.
      OSError: a lack of memory, processes or descriptors.
    """
    try:
      self._lay_files(files)
      self._group = self._host.cgroups.create(self._name, self._limits.memory_bytes + self._limits.disk_bytes, self._limits.num_processes + 1)
      info_fd, block_fd, status_fd = self._launch(argv, stdin, interpreter, has_proc)
      try:
        async with asyncio.timeout(_START_S):
          init = await self._read_init(info_fd)
      except TimeoutError as error:
        raise BoxFailure(f'bubblewrap did not start within {_START_S:.0f} s.') from error
      # Taken while the process waits for us, so the number cannot have passed to another one.
      self._init_fd = self._own(os.pidfd_open(init))
      self._limit(init)
      os.write(block_fd, b'1')
      self._begun = time.monotonic()
      self._disown(block_fd)
      self._disown(info_fd)
    except BaseException:
      await self._discard()
      raise
    if stdin is not None:
      self._is_asked.set()
    self.ended = asyncio.create_task(self._watch_end(status_fd, init))

  def kill(self, status: Status) -> None:
    """End the program; `status` is why, unless there is a reason already."""
    if self._status is None:
      self._status = status
    for fd in (self._init_fd, self._process_fd):
      if fd in self._open_fds:
        with contextlib.suppress(ProcessLookupError):
          signal.pidfd_send_signal(fd, signal.SIGKILL)

  async def finish(self, timeout_s: float) -> Ended:
    """Wait for the end and kill the program when the time is over."""
    await asyncio.wait([self.ended], timeout=timeout_s)
    if not self.ended.done():
      self.kill('timeout')
    return await self.gone()

  async def gone(self) -> Ended:
    """Wait for the end of a program that was killed or has ended."""
    done, _ = await asyncio.wait([self.ended], timeout=_KILL_S)
    if not done:
      raise BoxFailure(f'a killed box is still there after {_KILL_S:.0f} s.')
    return self.ended.result()

  async def exchange(self, line: bytes, timeout_s: float) -> bytes | None:
    """Write a line and return the line that comes back, without newlines; None if the program is over or was killed for how it behaved."""
    if self._is_over:
      return None
    if self.output:
      self.kill('output')  # it wrote before it was asked
      return None
    self._is_asked.set()
    try:
      async with asyncio.timeout(timeout_s):
        await self._write(line + b'\n')
        return await self._read_line()
    except TimeoutError:
      self.kill('timeout')
      return None
    finally:
      self._is_asked.clear()

  # Start.

  def _own(self, fd: int) -> int:
    self._open_fds.add(fd)
    return fd

  def _disown(self, fd: int) -> None:
    if fd in self._open_fds:
      self._open_fds.remove(fd)
      loop = asyncio.get_running_loop()
      loop.remove_reader(fd)
      loop.remove_writer(fd)
      os.close(fd)

  def _pipe(self) -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    return self._own(read_fd), self._own(write_fd)

  def _lay_files(self, files: Mapping[str, bytes]) -> None:
    os.mkdir(self._folder)
    linux.mount_tmpfs(self._folder, f'size={self._limits.disk_bytes},nr_inodes={_MAX_INODES},mode=700')
    for name in ('workspace', 'tmp', 'shm'):
      os.mkdir(f'{self._folder}/{name}')
    for name, content in files.items():
      path = Path(self._folder, 'workspace', name)
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(content)

  def _launch(self, argv: Sequence[str], stdin: bytes | None, interpreter: bwrap.Interpreter, has_proc: bool) -> tuple[int, int, int]:
    """Start bubblewrap; return our ends of its info, block and status descriptors."""
    info_fd, info_theirs = self._pipe()
    status_fd, status_theirs = self._pipe()
    out_fd, out_theirs = self._pipe()
    err_fd, err_theirs = self._pipe()
    block_theirs, block_fd = self._pipe()
    seccomp_fd = self._own(os.open(self._host.seccomp_path, os.O_RDONLY))
    options = bwrap.arguments(interpreter=interpreter, etc=self._host.etc, folder=self._folder, has_proc=has_proc,
                              fds={'seccomp': seccomp_fd, 'info': info_theirs, 'block': block_theirs, 'status': status_theirs})
    # Options on the command line would show in the box's /proc/1/cmdline.
    args_fd = self._own(_memory_file('\0'.join(options).encode() + b'\0'))
    if stdin is None:
      in_theirs, self._stdin = self._pipe()
      os.set_blocking(self._stdin, False)
    else:
      in_theirs = self._own(_memory_file(stdin) if stdin else os.open('/dev/null', os.O_RDONLY))
    theirs = (args_fd, seccomp_fd, info_theirs, block_theirs, status_theirs)
    self._process = subprocess.Popen([self._host.bwrap_path, '--args', str(args_fd), '--', *argv], stdin=in_theirs, stdout=out_theirs,
                                     stderr=err_theirs, pass_fds=theirs, env={})
    self._process_fd = self._own(os.pidfd_open(self._process.pid))
    for fd in (*theirs, in_theirs, out_theirs, err_theirs):
      self._disown(fd)
    self._out_fd, self._err_fd = out_fd, err_fd
    loop = asyncio.get_running_loop()
    for fd, data in ((out_fd, self.output), (err_fd, self._errors)):
      os.set_blocking(fd, False)
      loop.add_reader(fd, self._pump, fd, data)
    return info_fd, block_fd, status_fd

  async def _read_init(self, info_fd: int) -> int:
    """Return the process id, seen from here, of the first process in the box."""
    text = b''
    while b'}' not in text:
      await _readable(info_fd)
      if not (piece := os.read(info_fd, _READ_BYTES)):
        await _readable(self._process_fd)
        raise BoxFailure(self._complaint())
      text += piece
    return json.loads(text)['child-pid']

  def _complaint(self) -> str:
    self._drain()
    said = bytes(self._errors).decode(errors='replace').strip()
    return f'bubblewrap could not start the program: {said or "it gave no reason"}'

  def _limit(self, init: int) -> None:
    """Set what is limited per process and inherited, and put the box in its group."""
    limits = self._limits
    # With a pids group, that one refuses first and counts it; this limit then only backs it up.
    num_tasks = limits.num_processes + 1 + (16 if self._host.cgroups.limits('pids') else 0)
    values = {
        resource.RLIMIT_NPROC: num_tasks, resource.RLIMIT_NOFILE: 256, resource.RLIMIT_CORE: 0,
        # Twice the memory: one huge allocation fails in the program, a slow flood meets the group's limit, which counts all processes.
        resource.RLIMIT_DATA: 2 * limits.memory_bytes, resource.RLIMIT_FSIZE: 2 * limits.disk_bytes, resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_MEMLOCK: 64 << 10, resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, value in values.items():
      ceiling = resource.getrlimit(which)[1]
      value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
      resource.prlimit(init, which, (value, value))
    resource.prlimit(init, resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))  # a signal that can be told apart, then one that kills
    self._group.add(init)

  # Streams.

  def _pump(self, fd: int, data: bytearray) -> None:
    """Take what a stream has; stop the program when it wrote too much."""
    try:
      piece = os.read(fd, _READ_BYTES)
    except BlockingIOError:
      return
    if not piece:
      self._disown(fd)
    room = self._limits.output_bytes - len(self.output) - len(self._errors)
    data += piece[:room]
    if len(piece) > room:
      asyncio.get_running_loop().remove_reader(fd)
      self.kill('output')
    self._arrived.set()

  def _drain(self) -> None:
    """Take what the streams of a dead box still hold."""
    for fd, data in ((self._out_fd, self.output), (self._err_fd, self._errors)):
      while fd in self._open_fds and self._status != 'output':
        before = len(data)
        self._pump(fd, data)
        if len(data) == before:
          break

  async def _write(self, data: bytes) -> None:
    view = memoryview(data)
    loop = asyncio.get_running_loop()
    while view and self._stdin in self._open_fds:
      try:
        view = view[os.write(self._stdin, view):]
      except BlockingIOError:
        self._arrived.clear()
        loop.add_writer(self._stdin, self._arrived.set)
        await self._arrived.wait()
      except BrokenPipeError:  # it closed its input or is over; the wait for its answer tells
        return
      finally:
        if self._stdin in self._open_fds:
          loop.remove_writer(self._stdin)

  async def _read_line(self) -> bytes | None:
    searched = 0
    while (end := self.output.find(b'\n', searched)) < 0:
      if self._is_over or self._status is not None:
        return None
      searched = len(self.output)
      self._arrived.clear()
      await self._arrived.wait()
    line = bytes(self.output[:end])
    del self.output[:end + 1]
    return line

  # End.

  async def _watch_end(self, status_fd: int, init: int) -> Ended:
    watch = asyncio.create_task(self._watch(init))
    try:
      await _readable(self._process_fd)
      await _readable(self._init_fd)
      wall_s = time.monotonic() - self._begun
      self._drain()
      return self._judge(_exit_code(status_fd), wall_s)
    finally:
      watch.cancel()
      self._is_over = True
      self._arrived.set()
      await self._discard()

  def _judge(self, exit_code: int | None, wall_s: float) -> Ended:
    """Return how the program ended, from all that is known."""
    if self._group.has_hit('memory') and exit_code != 0:
      self._status = 'oom'
    if exit_code is None and self._status is None:
      raise BoxFailure(self._complaint())
    has_hit_pids = self._has_hit_pids or self._group.has_hit('pids')
    space = os.statvfs(self._folder)
    if self._status is None:
      if exit_code == 0:
        self._status = 'ok'
      elif exit_code == 128 + signal.SIGXCPU:
        self._status = 'timeout'
      elif not space.f_bfree or not space.f_ffree or exit_code == 128 + signal.SIGXFSZ:
        self._status = 'disk'
      elif has_hit_pids:
        self._status = 'pids'
      else:
        self._status = 'signal' if exit_code > 128 else 'nonzero'
    return Ended(self._status, exit_code, bytes(self.output), bytes(self._errors), wall_s)

  async def _discard(self) -> None:
    """Release everything; the box's processes are dead, or die here."""
    if self._process is not None:
      self._process.kill()
      if self._process_fd is not None:
        await _readable(self._process_fd)
      self._process.wait()
    for fd in list(self._open_fds):
      self._disown(fd)
    with contextlib.suppress(OSError):  # not mounted yet
      linux.unmount(self._folder)
    with contextlib.suppress(FileNotFoundError):
      os.rmdir(self._folder)
    if self._group is not None and not self._group.remove():
      # The kernel empties a group a moment after its last process; nobody has to wait for that.
      asyncio.get_running_loop().call_later(0.2, self._group.remove)

  async def _watch(self, init: int) -> None:
    """Count memory and tasks where no group does."""
    groups = self._host.cgroups
    if groups.limits('memory') and groups.limits('pids'):
      return
    pause_s = _WATCH_PIDS_S if groups.limits('memory') else _WATCH_MEMORY_S
    while True:
      if self._is_asked.is_set():
        await asyncio.sleep(pause_s)
      else:
        try:
          async with asyncio.timeout(_WATCH_IDLE_S):
            await self._is_asked.wait()
          continue
        except TimeoutError:
          pass
      memory_bytes, num_tasks = usage(init)
      self._has_hit_pids |= num_tasks > self._limits.num_processes
      if not groups.limits('memory') and memory_bytes > self._limits.memory_bytes:
        self.kill('oom')


def usage(pid: int) -> tuple[int, int]:
  """Return (bytes of anonymous and shared memory, tasks) of a process and all its descendants."""
  memory_bytes, num_tasks, pending = 0, 0, [pid]
  while pending:
    folder = Path('/proc', str(pending.pop()))
    # A process may be gone by now.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
      fields = dict(line.split(':\t', 1) for line in (folder / 'status').read_text().splitlines() if ':\t' in line)
      memory_bytes += sum(int(fields[name].split()[0]) << 10 for name in ('RssAnon', 'RssShmem') if name in fields)
      num_tasks += int(fields['Threads'])
      for task in (folder / 'task').iterdir():
        pending += map(int, (task / 'children').read_text().split())
  return memory_bytes, num_tasks


def _exit_code(status_fd: int) -> int | None:
  """Return what bubblewrap says the program returned, None if it did not come to that; nothing inside can write there."""
  os.set_blocking(status_fd, False)
  text = b''
  with contextlib.suppress(BlockingIOError):
    while piece := os.read(status_fd, _READ_BYTES):
      text += piece
  codes = [row['exit-code'] for row in map(json.loads, text.splitlines()) if 'exit-code' in row]
  return codes[0] if codes else None


def _memory_file(data: bytes) -> int:
  """Return a file that holds `data` and can be neither changed nor grown by who gets it."""
  fd = os.memfd_create('box', os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
  view = memoryview(data)
  while view:
    view = view[os.write(fd, view):]
  fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd


async def _readable(fd: int) -> None:
  loop = asyncio.get_running_loop()
  future = loop.create_future()
  loop.add_reader(fd, lambda: future.done() or future.set_result(None))
  try:
    await future
  finally:
    loop.remove_reader(fd)
