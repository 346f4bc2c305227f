"""Control groups for boxes, nested under the group that this process is in, on version 1, 2 or a mix of both.

A group is only ever made below our own, so whatever limits the trainer limits its boxes too; where our own group is the root of a hierarchy,
or may not be written, that hierarchy is not used. Version 2 wants a group that has children to hold no process, so there the trainer and this
process move into groups of their own, and only if nobody else is in ours: a login session's group is left alone.

Deliberately absent: processor and I/O limits.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
from dataclasses import dataclass
import errno
import os
from pathlib import Path
import time

CONTROLLERS = ('memory', 'pids')
_PREFIX = 'bessemer-'
_TRAINER = 'bessemer-trainer'
_REMOVE_S = 2.0


@dataclass(frozen=True)
class Hierarchy:
  """A place to make groups in.

  Attributes:
    version: 1 or 2.
    controllers: which of CONTROLLERS work here.
    folder: where the groups of boxes go; its parent is our own group.
  """
  version: int
  controllers: tuple[str, ...]
  folder: Path


class Cgroups:
  """All hierarchies that boxes can be limited by; none if `hierarchies` is empty."""

  def __init__(self, hierarchies: Sequence[Hierarchy]):
    self._hierarchies = tuple(hierarchies)

  def limits(self, controller: str) -> bool:
    """Say whether a controller works on boxes."""
    return any(controller in hierarchy.controllers for hierarchy in self._hierarchies)

  def describe(self) -> str:
    """Return the hierarchies in words."""
    parts = [f'cgroup v{hierarchy.version} ({", ".join(hierarchy.controllers)})' for hierarchy in self._hierarchies]
    return ' and '.join(parts) or 'no cgroup'

  def create(self, name: str, memory_bytes: int, num_processes: int) -> Cgroup:
    """Make the group of a box; OSError if that fails."""
    group = Cgroup([(hierarchy, hierarchy.folder / name) for hierarchy in self._hierarchies])
    try:
      group.make(memory_bytes, num_processes)
    except OSError:
      group.remove()
      raise
    return group

  def remove(self) -> None:
    """Remove the folders of the hierarchies; what is left after two seconds stays for the next `claim`."""
    deadline = time.monotonic() + _REMOVE_S
    for hierarchy in self._hierarchies:
      if hierarchy.version == 2:
        with contextlib.suppress(OSError):  # after the privileges are gone, it is not ours to do
          (hierarchy.folder.parent / _TRAINER / 'cgroup.procs').write_text(str(os.getpid()))
      # The kernel empties a group a moment after its last process.
      while not _remove_tree(hierarchy.folder) and time.monotonic() < deadline:
        time.sleep(0.01)


class Cgroup:
  """The group of one box."""

  def __init__(self, places: Sequence[tuple[Hierarchy, Path]]):
    self._places = tuple(places)

  def make(self, memory_bytes: int, num_processes: int) -> None:
    """Create the folders and write the limits."""
    for hierarchy, folder in self._places:
      folder.mkdir()
      for name, value, is_needed in _settings(hierarchy, memory_bytes, num_processes):
        if is_needed or (folder / name).exists():
          (folder / name).write_text(str(value))

  def add(self, pid: int) -> None:
    """Move a process in; its later children follow."""
    for _, folder in self._places:
      (folder / 'cgroup.procs').write_text(str(pid))

  def has_hit(self, controller: str) -> bool:
    """Say whether the memory limit killed a process, or the limit of processes refused one."""
    names = {('memory', 1): ('memory.oom_control', 'oom_kill'), ('memory', 2): ('memory.events', 'oom_kill'),
             ('pids', 1): ('pids.events', 'max'), ('pids', 2): ('pids.events', 'max')}
    for hierarchy, folder in self._places:
      if controller in hierarchy.controllers:
        name, key = names[controller, hierarchy.version]
        counts = dict(line.split() for line in (folder / name).read_text().splitlines())
        if int(counts.get(key, 0)):
          return True
    return False

  def remove(self) -> bool:
    """Remove the folders; False if one still holds a process that is about to go."""
    done = True
    for _, folder in self._places:
      try:
        folder.rmdir()
      except FileNotFoundError:
        pass
      except OSError:
        done = False
    return done


def claim(uid: int, proc: Path = Path('/proc')) -> Cgroups:
  """Return the hierarchies that boxes of user `uid` can be put in; leftovers of processes that died are removed on the way.

  Must run with the privileges that own our group, before they are dropped.
  """
  hierarchies = []
  for version, controllers, folder in _own_groups(proc):
    # Read-only mounts and groups of others are common (containers); boxes then have one enforcer less, which `describe` shows.
    with contextlib.suppress(OSError):
      hierarchy = _claim_v1(controllers, folder, uid) if version == 1 else _claim_v2(folder, uid)
      if hierarchy is not None:
        hierarchies.append(hierarchy)
  return Cgroups(hierarchies)


def _settings(hierarchy: Hierarchy, memory_bytes: int, num_processes: int) -> list[tuple[str, int, bool]]:
  """Return (file, value, whether it must exist); swap accounting is not in every kernel."""
  settings: list[tuple[str, int, bool]] = []
  if 'memory' in hierarchy.controllers and hierarchy.version == 1:
    settings += [('memory.limit_in_bytes', memory_bytes, True), ('memory.memsw.limit_in_bytes', memory_bytes, False)]
  elif 'memory' in hierarchy.controllers:
    settings += [('memory.max', memory_bytes, True), ('memory.swap.max', 0, False)]
  if 'pids' in hierarchy.controllers:
    settings += [('pids.max', num_processes, True)]
  return settings


def _own_groups(proc: Path) -> list[tuple[int, tuple[str, ...], Path]]:
  """Return (version, controllers of interest, folder) of this process's groups that are mounted and not the root of their hierarchy."""
  mounts = []
  for line in (proc / 'self/mountinfo').read_text().splitlines():
    before, after = line.split(' - ')
    root, point = before.split()[3:5]
    kind, _, options = after.split()[:3]
    if kind in ('cgroup', 'cgroup2'):
      mounts.append((kind, options.split(','), root, point))
  found = []
  for line in (proc / 'self/cgroup').read_text().splitlines():
    _, names, path = line.split(':', 2)
    version = 1 if names else 2
    controllers = tuple(name for name in names.split(',') if name in CONTROLLERS)
    if version == 1 and not controllers:
      continue
    for kind, options, root, point in mounts:
      is_it = kind == 'cgroup2' if version == 2 else kind == 'cgroup' and set(controllers) <= set(options)
      if is_it and (root == '/' or path == root or path.startswith(root + '/')):
        folder = Path(point) / path.removeprefix('' if root == '/' else root).lstrip('/')
        # Only the real root has a release agent (v1) or no type (v2); in a container's view every group may look like it.
        is_root = (folder / 'release_agent').exists() if version == 1 else not (folder / 'cgroup.type').exists()
        if not is_root:
          found.append((version, controllers, folder))
        break
  return found


def _claim_v1(controllers: tuple[str, ...], own: Path, uid: int) -> Hierarchy:
  _sweep(own)
  folder = own / f'{_PREFIX}{os.getpid()}'
  folder.mkdir()
  _give(uid, folder, folder / 'cgroup.procs')
  return Hierarchy(1, controllers, folder)


def _claim_v2(own: Path, uid: int) -> Hierarchy | None:
  if own.name == _TRAINER:  # an earlier sandbox of this trainer moved it there
    own = own.parent
  controllers = tuple(name for name in CONTROLLERS if name in (own / 'cgroup.controllers').read_text().split())
  inside = {int(pid) for pid in (own / 'cgroup.procs').read_text().split()}
  if not controllers or not inside <= {os.getpid(), os.getppid()}:
    return None
  _sweep(own)
  enable = ' '.join(f'+{name}' for name in controllers)
  folder = own / f'{_PREFIX}{os.getpid()}'
  supervisor = folder / 'supervisor'
  supervisor.mkdir(parents=True)
  (own / _TRAINER).mkdir(exist_ok=True)
  for pid in inside - {os.getpid()}:
    (own / _TRAINER / 'cgroup.procs').write_text(str(pid))
  (supervisor / 'cgroup.procs').write_text(str(os.getpid()))
  for group in (own, folder):
    (group / 'cgroup.subtree_control').write_text(enable)
  # Moving a process takes the right to write the list of the group above both places.
  _give(uid, folder, folder / 'cgroup.procs', folder / 'cgroup.subtree_control', supervisor, supervisor / 'cgroup.procs')
  return Hierarchy(2, controllers, folder)


def _give(uid: int, *paths: Path) -> None:
  for path in paths:
    if path.stat().st_uid != uid:
      os.chown(path, uid, uid)


def _sweep(own: Path) -> None:
  """Remove groups whose supervisor was killed before it could."""
  for folder in own.glob(f'{_PREFIX}[0-9]*'):
    if not Path('/proc', folder.name.removeprefix(_PREFIX)).exists():
      _remove_tree(folder)


def _remove_tree(folder: Path) -> bool:
  """Remove a group and the groups in it; False if one is busy, with a process that is about to go."""
  try:
    for child in folder.iterdir():
      if child.is_dir():
        child.rmdir()
    folder.rmdir()
  except OSError as error:
    return error.errno != errno.EBUSY
  return True
