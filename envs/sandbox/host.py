"""Prepares the supervisor's process and the machine for boxes, once, and refuses where boxes cannot be had.

Mounts and processes are made in mount and pid namespaces of our own, so all of them vanish with this process, however it ends. As root: claim
control groups, mount a private folder for boxes, show interpreters there that only root can reach, then become an ordinary user in a user
namespace for good. Without root everything happens in that one.

Deliberately absent: the trial of a box, which needs the event loop (`supervisor`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import os
from pathlib import Path
import platform
import re
import subprocess
from typing import Any

from envs.sandbox import bwrap, linux, seccomp
from envs.sandbox.cgroup import Cgroups, claim

# The user that boxes run as when the trainer is root; no account has this number by convention.
BOX_UID = 61729
# Present on every Linux, and hidden by our mount from nobody but ourselves.
BASE = '/dev/shm'
_BASE_BYTES = 64 << 20
_LEAST_PYTHON = 11  # of Python 3
_LEAST_KERNEL = (5, 14)  # limits of processes are counted per user namespace from here on
_FIX = ('boxes need unprivileged user namespaces: check `sysctl user.max_user_namespaces` (above 0), `kernel.unprivileged_userns_clone` (1, '
        'Debian), `kernel.apparmor_restrict_unprivileged_userns` (0, Ubuntu), and in a container its seccomp and AppArmor profiles '
        '(docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined).')


class Unavailable(RuntimeError):
  """Boxes cannot be had; the message says which part failed, why, and how to fix it."""


@dataclass(frozen=True)
class Host:
  """What boxes are made from.

  Attributes:
    bwrap_path: bubblewrap, where the box's user can execute it.
    bwrap_version: as it says.
    interpreters: the Pythons to try, best first.
    cgroups: where boxes are limited.
    seccomp_path: file with the filter.
    etc: folder that becomes /etc.
    uid: the user that boxes run as, seen from outside.
    ended_fd: readable when this process's parent, which the trainer started, is gone; None if the trainer started this one. Then there is no
      pid namespace of our own, and a box that is just starting when this process is killed may outlive it.
  """
  bwrap_path: str
  bwrap_version: str
  interpreters: tuple[bwrap.Interpreter, ...]
  cgroups: Cgroups
  seccomp_path: str
  etc: str
  uid: int
  ended_fd: int | None


def prepare(config: Mapping[str, Any]) -> Host:
  """Turn this process into one that can start boxes.

  Args:
    config: 'bwraps' are paths, 'pythons' are [path, prefix]; in order of preference.

  Raises:
    Unavailable: with the reason and the cure.
  """
  kernel, machine = linux.kernel_version(), platform.machine()
  if kernel < _LEAST_KERNEL:
    raise Unavailable(f'sandbox: Linux {kernel[0]}.{kernel[1]} is too old for bubblewrap boxes; {_LEAST_KERNEL[0]}.{_LEAST_KERNEL[1]} is needed.')
  if machine not in seccomp.machines():
    raise Unavailable(f'sandbox: no system call filter for {machine!r}; boxes run on {", ".join(seccomp.machines())}.')
  is_root = os.geteuid() == 0
  if is_root and not linux.is_mapped(BOX_UID):
    raise Unavailable(f'sandbox: this is root in a user namespace without user {BOX_UID}, and root must not run boxes; '
                      f'run as an ordinary user, or map ids 0 to {BOX_UID} (/etc/subuid).')
  uid = BOX_UID if is_root else os.geteuid()
  try:
    binary = bwrap.choose(config['bwraps'])
  except (OSError, subprocess.SubprocessError) as error:
    raise Unavailable(f'sandbox: {error}') from error
  cgroups = claim(uid)
  try:
    if not cgroups.limits('memory') and not Path('/proc/thread-self/children').exists():
      raise Unavailable('sandbox: no memory cgroup of our own, and a kernel without /proc/PID/task/TID/children to count memory with; '
                        'give the trainer a cgroup that it may write, or use a kernel with CONFIG_PROC_CHILDREN.')
    ended_fd, interpreters = _enter(uid, _wanted(config['pythons']), cgroups)
    if not interpreters:
      raise Unavailable(f'sandbox: no Python that user {uid} can run: {", ".join(path for path, _ in config["pythons"])}; '
                        'install python3 (3.11 or newer) from the distribution.')
  except OSError as error:
    cgroups.remove()
    raise Unavailable(f'sandbox: cannot enter namespaces as user {uid}: {error}. {_FIX}') from error
  except Unavailable:
    cgroups.remove()
    raise
  path = _lay(binary, machine)
  return Host(path, binary.version, interpreters, cgroups, f'{BASE}/seccomp', f'{BASE}/etc', uid, ended_fd)


def _enter(uid: int, wanted: Sequence[tuple[str, str]], cgroups: Cgroups) -> tuple[int | None, tuple[bwrap.Interpreter, ...]]:
  """Become user `uid` in namespaces of our own, with BASE mounted; return (ended_fd, interpreters) for `Host`."""
  # A container's root may lack the right to mount; it then goes the ordinary user's way from the start.
  is_root = os.geteuid() == 0
  may_mount = is_root and _unshare_mounts()
  if may_mount:
    ended_fd = linux.enter_pid_namespace(cgroups.remove)
    interpreters = _mount_base(uid, wanted)
  if is_root:
    linux.drop_root(uid)
  linux.enter_user_namespace()
  if not may_mount:
    ended_fd = linux.enter_pid_namespace(cgroups.remove)
    interpreters = _mount_base(uid, wanted)
  return ended_fd, interpreters


def _unshare_mounts() -> bool:
  try:
    linux.unshare(linux.CLONE_NEWNS)
  except PermissionError:
    return False
  linux.make_mounts_private()
  return True


def _wanted(pythons: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
  """Return the (path, prefix) that are there, recent enough and different; paths without symbolic links."""
  wanted = []
  for path, prefix in pythons:
    real = Path(os.path.realpath(path))
    version = re.fullmatch(r'python3\.(\d+)', real.name)
    if real.exists() and real.is_relative_to(prefix) and version and int(version[1]) >= _LEAST_PYTHON:
      wanted.append((str(real), prefix))
  return list(dict.fromkeys(wanted))


def _mount_base(uid: int, wanted: Sequence[tuple[str, str]]) -> tuple[bwrap.Interpreter, ...]:
  """Mount BASE; return the interpreters that the box's user can reach, with their folders bound there where /usr does not hold them."""
  linux.mount_tmpfs(BASE, f'size={_BASE_BYTES},mode=755,uid={uid},gid={uid}')
  shown = []
  for index, (path, prefix) in enumerate(wanted):
    source = ''
    if not path.startswith('/usr/'):
      source = f'{BASE}/python{index}'
      os.mkdir(source)
      try:
        linux.bind(prefix, source)
      except PermissionError:  # an ordinary user's view of /root, say; another interpreter may do
        continue
    shown.append(bwrap.Interpreter(path, prefix, source))
  return tuple(shown)


def _lay(binary: bwrap.Binary, machine: str) -> str:
  """Write what boxes share below BASE; return the path of bubblewrap."""
  base = Path(BASE)
  (base / 'seccomp').write_bytes(seccomp.program(machine))
  etc = base / 'etc'
  etc.mkdir()
  (etc / 'passwd').write_text(f'root:x:0:0:root:/:/bin/false\nbox:x:{bwrap.UID_INSIDE}:{bwrap.UID_INSIDE}:box:{bwrap.WORKSPACE}:/bin/sh\n')
  (etc / 'group').write_text(f'root:x:0:\nbox:x:{bwrap.UID_INSIDE}:\n')
  (etc / 'hosts').write_text('127.0.0.1 localhost box\n::1 localhost box\n')
  cache = Path('/etc/ld.so.cache')
  if cache.exists():
    (etc / 'ld.so.cache').write_bytes(cache.read_bytes())
  for name, content in binary.files:
    file = base / 'bwrap' / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    file.chmod(0o755)
  return f'{BASE}/bwrap/{binary.files[0][0]}' if binary.files else binary.path
