"""Prepares the supervisor's process and the machine for boxes, once, and refuses where boxes cannot be had.

As root: claim control groups, mount a private folder for boxes, show interpreters there that only root can reach, then become an ordinary
user for good. From there on, and from the start without root, everything happens in a user and mount namespace of our own, so what is
mounted vanishes with the last process, however it ends.

Deliberately absent: the trial of a box, which needs the event loop (`supervisor`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import os
from pathlib import Path
import platform
import subprocess
from typing import Any

from envs.sandbox import bwrap, linux, seccomp
from envs.sandbox.cgroup import Cgroups, claim

# The user that boxes run as when the trainer is root; no account has this number by convention.
BOX_UID = 61729
# Present on every Linux, and hidden by our mount from nobody but ourselves.
BASE = '/dev/shm'
_BASE_BYTES = 64 << 20
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
  """
  bwrap_path: str
  bwrap_version: str
  interpreters: tuple[bwrap.Interpreter, ...]
  cgroups: Cgroups
  seccomp_path: str
  etc: str
  uid: int


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
  if not cgroups.limits('memory') and not Path('/proc/thread-self/children').exists():
    raise Unavailable('sandbox: no memory cgroup of our own, and a kernel without /proc/PID/task/TID/children to count memory with; '
                      'give the trainer a cgroup that it may write, or use a kernel with CONFIG_PROC_CHILDREN.')
  wanted = _wanted(config['pythons'])
  try:
    # A container's root may lack the right to mount; it then goes the ordinary user's way from the start.
    is_mounted = is_root and _mount_as_root(uid)
    if is_mounted:
      interpreters = _show(wanted)
    if is_root:
      linux.drop_root(uid)
    linux.enter_user_namespace()
    if not is_mounted:
      _mount_base(uid)
      interpreters = _show(wanted)
  except OSError as error:
    raise Unavailable(f'sandbox: cannot enter namespaces as user {uid}: {error}. {_FIX}') from error
  if not interpreters:
    raise Unavailable(f'sandbox: no Python that user {uid} can run: {", ".join(path for path, _ in config["pythons"])}; '
                      'install python3 (3.11 or newer) from the distribution.')
  path = _lay(binary, machine)
  return Host(path, binary.version, interpreters, cgroups, f'{BASE}/seccomp', f'{BASE}/etc', uid)


def _mount_as_root(uid: int) -> bool:
  try:
    linux.unshare(linux.CLONE_NEWNS)
  except PermissionError:
    return False
  linux.make_mounts_private()
  _mount_base(uid)
  return True


def _mount_base(uid: int) -> None:
  linux.mount_tmpfs(BASE, f'size={_BASE_BYTES},mode=755,uid={uid},gid={uid}')


def _wanted(pythons: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
  """Return the (path, prefix) that are there, recent enough and different; paths without symbolic links."""
  wanted = []
  for path, prefix in pythons:
    real = Path(os.path.realpath(path))
    version = real.name.removeprefix('python').split('.')
    if real.exists() and version[0] == '3' and len(version) == 2 and version[1].isdigit() and int(version[1]) >= 11:
      wanted.append((str(real), prefix))
  return list(dict.fromkeys(wanted))


def _show(wanted: Sequence[tuple[str, str]]) -> tuple[bwrap.Interpreter, ...]:
  """Return the interpreters that the box's user can reach, with their folders bound below BASE where /usr does not hold them."""
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
