"""The few system calls that Python 3.11 does not offer, and entering namespaces of one's own with them.

Linux only, of the standard library only; the caller must have a single thread. Deliberately absent: anything about boxes.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 1 << 18
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
