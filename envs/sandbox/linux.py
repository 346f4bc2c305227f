"""The few system calls that Python 3.11 does not offer, and entering namespaces of one's own with them.

Linux only, of the standard library only; the caller must have a single thread. Deliberately absent: anything about boxes.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
_MNT_DETACH = 2
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, function, *args) -> None:
  if function(*args) != 0:
    number = ctypes.get_errno()
    raise OSError(number, f'{what}: {os.strerror(number)}')


def unshare(flags: int) -> None:
  """Move this process into new namespaces of the kinds in `flags`."""
  _call(f'unshare({flags:#x})', _libc.unshare, flags)


def make_mounts_private() -> None:
  """Keep mounts made from here on out of other mount namespaces, and theirs out of this one."""
  _call('mount --make-rprivate /', _libc.mount, None, b'/', None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)


def mount_tmpfs(path: str, options: str) -> None:
  """Mount a tmpfs without devices and setuid programs on `path`."""
  _call(f'mount tmpfs ({options}) on {path}', _libc.mount, b'tmpfs', path.encode(), b'tmpfs', ctypes.c_ulong(_MS_NOSUID | _MS_NODEV),
        options.encode())


def bind(source: str, target: str) -> None:
  """Show the folder `source` and what is mounted below it at `target` as well."""
  _call(f'bind {source} to {target}', _libc.mount, os.fsencode(source), target.encode(), None, ctypes.c_ulong(_MS_BIND | _MS_REC), None)


def unmount(path: str) -> None:
  """Take a mount out of the tree; it goes away when its last user does."""
  _call(f'umount {path}', _libc.umount2, path.encode(), _MNT_DETACH)


def drop_root(uid: int) -> None:
  """Become the user and group `uid` for good, with no other groups and no way to get privileges back by exec."""
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)
  _call('prctl(PR_SET_NO_NEW_PRIVS)', _libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  # A change of user makes /proc/self root's; its id maps must be written by us.
  _call('prctl(PR_SET_DUMPABLE)', _libc.prctl, _PR_SET_DUMPABLE, 1, 0, 0, 0)


def enter_user_namespace() -> None:
  """Move into a new user and mount namespace in which this process keeps its ids and may mount; what it executes may not."""
  uid, gid = os.getuid(), os.getgid()
  unshare(CLONE_NEWUSER | CLONE_NEWNS)
  Path('/proc/self/setgroups').write_text('deny')
  Path('/proc/self/uid_map').write_text(f'{uid} {uid} 1')
  Path('/proc/self/gid_map').write_text(f'{gid} {gid} 1')
  make_mounts_private()


def enter_pid_namespace(afterwards: Callable[[], None]) -> int | None:
  """Go on as the first process of a new pid namespace, whose end is the end of all that it started, even of what it was just starting.

  The calling process stays behind, with the privileges it has, and exits when this one does. Needs the right to mount /proc, which containers
  may withhold. /proc is mounted anew, so the mount namespace must be our own.

  Args:
    afterwards: what the process that stays behind does at the end.

  Returns:
    A descriptor that reads as ended when the process that stayed behind is gone; None if the namespace cannot be had and nothing changed.
  """
  if not _can_mount_proc():
    return None
  ended_fd, held_fd = os.pipe()
  unshare(CLONE_NEWPID)
  pid = os.fork()
  if pid:
    # Only the pipe: another copy of the trainer's socket here would keep its end from being seen.
    os.closerange(0, held_fd)
    os.closerange(held_fd + 1, 1 << 16)
    _, status = os.waitpid(pid, 0)
    afterwards()
    os._exit(abs(os.waitstatus_to_exitcode(status)))
  os.close(held_fd)
  _mount_proc()
  return ended_fd


def _can_mount_proc() -> bool:
  """Try it in a process that is thrown away, because there is no way back from a new pid namespace."""
  pid = os.fork()
  if pid:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
  code = 1
  try:
    unshare(CLONE_NEWPID | CLONE_NEWNS)
    if inner := os.fork():
      code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    else:
      _mount_proc()
      code = 0
  finally:
    os._exit(abs(code))


def _mount_proc() -> None:
  _call('mount proc', _libc.mount, b'proc', b'/proc', b'proc', ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC), None)


def is_mapped(uid: int) -> bool:
  """Say whether this user namespace knows the user `uid`."""
  for line in Path('/proc/self/uid_map').read_text().splitlines():
    first, _, count = map(int, line.split())
    if first <= uid < first + count:
      return True
  return False


def kernel_version() -> tuple[int, int]:
  """Return (major, minor) of the running kernel."""
  major, minor = os.uname().release.split('.')[:2]
  return int(major), int(''.join(char for char in minor if char.isdigit()))
