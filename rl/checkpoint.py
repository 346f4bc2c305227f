"""`CheckpointStore`: the whole state of a run in Orbax, one directory an optimizer step, written in the background, restored onto any mesh.

A step holds two items: `state` (the TrainState's arrays) and `host` (the HostState as JSON). Only what lies committed on disk counts: every
question about steps lists the directory again, and a step without Orbax's commit marker does not exist. Saving is loud: a save that fails
in the background raises at the next call of `is_due`, `save`, `restore`, `wait` or `close`.

`committed_steps`, `read_state`, `read_params` and `read_host` read a checkpoint without owning it, for evaluation and export.

Deliberately absent: typed PRNG keys (the root seed and the step give every key), the moment to stop on a signal (the loop's), and falling
back to an older step when the newest cannot be restored (the message says how to choose it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import json
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from rl.types import HostState, Params, TrainState

_COMMIT_MARKER = 'commit_success.txt'
_NUM_DIFFERENCES_SHOWN = 5


class CheckpointStore:
  """The checkpoints of one run, and the only writer of their directory. Use it as a context manager, or call `close`."""

  def __init__(self, directory: str | epath.PathLike, *, every_steps: int, keep: int):
    """Open the directory for writing; create it if needed and clear what killed saves left behind.

    Args:
      directory: local path or bucket URL; one subdirectory a step.
      every_steps: optimizer steps between saves; see `is_due`.
      keep: number of newest checkpoints kept; older ones are deleted once a newer one is committed.

    Raises:
      ValueError: `every_steps` or `keep` below 1.
      RuntimeError: the directory cannot be created or written.
    """
    for name, value in (('every_steps', every_steps), ('keep', keep)):
      if value < 1:
        raise ValueError(f'{name}={value} must be at least 1.')
    self.directory = _absolute(directory)
    self._every_steps = every_steps
    self._writing_step: int | None = None
    self._known_step: int | None = None  # The step whose state this process wrote or restored last.
    try:
      self._manager = ocp.CheckpointManager(
          self.directory,
          item_names=('state', 'host'),
          # Trained floats hardly compress: without it the disk holds an eighth more, and saving costs a quarter of the processor time.
          item_handlers={'state': ocp.PyTreeCheckpointHandler(use_compression=False), 'host': ocp.JsonCheckpointHandler()},
          options=ocp.CheckpointManagerOptions(
              preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True))
    except OSError as error:
      raise RuntimeError(f'Cannot keep checkpoints in {self.directory}: {error}. Choose a directory that can be written.') from error

  def is_due(self, step: int) -> bool:
    """Say whether `step` is one of every `every_steps`; asked at each step, it is also where a failed save is heard of.

    Raises:
      RuntimeError: the save in the background has failed.
    """
    if self._writing_step is not None and not self._manager.is_saving_in_progress():
      self.wait()
    return step % self._every_steps == 0

  def save(self, step: int, state: TrainState, host: HostState) -> bool:
    """Start to write a checkpoint; when this returns, `state` may be donated.

    Returns:
      True, or False if this process already wrote or restored this very step, so that there is nothing to add.

    Raises:
      ValueError: a leaf of `state` that is no array or a typed PRNG key, a host state that JSON cannot hold, or a step that is not newer
        than what is on disk.
      RuntimeError: this save or the one before it failed.
    """
    self.wait()
    if step == self._known_step:
      return False
    host_json = _host_to_json(host)
    _refuse_unstorable(state)
    self._refuse_older(step)
    try:
      self._manager.reload()
      self._manager.save(step, args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(state), host=ocp.args.JsonSave(host_json)), force=True)
    except Exception as error:
      raise self._failure(step, error) from error
    self._writing_step = step
    return True

  def restore(self, abstract_state: TrainState, step: int | None = None) -> tuple[TrainState, HostState] | None:
    """Restore the newest committed step, or `step`, or return None if there is none.

    Args:
      abstract_state: shapes, dtypes and shardings wanted, as `jax.ShapeDtypeStruct`s; the mesh need not be the one that saved.
      step: the optimizer step to restore.

    Raises:
      ValueError: the checkpoint's arrays differ from `abstract_state`; names the first that do.
      FileNotFoundError: `step` is not there.
      RuntimeError: its files are damaged, or the save in progress failed.
    """
    self.wait()
    if step is None and not committed_steps(self.directory):
      return None
    step, _ = _find(self.directory, step)
    restored = read_state(self.directory, abstract_state, step), read_host(self.directory, step)
    self._known_step = step
    return restored

  def latest_step(self) -> int | None:
    """Return the newest committed step on disk, or None."""
    return max(committed_steps(self.directory), default=None)

  def wait(self) -> None:
    """Block until the save in progress, if any, is committed.

    Raises:
      RuntimeError: it failed; the message names its directory and the newest step that can be restored.
    """
    if self._writing_step is None:
      return
    step, self._writing_step = self._writing_step, None
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      raise self._failure(step, error) from error
    if step not in committed_steps(self.directory):
      raise self._failure(step, 'it ended without an error and without the commit marker')
    self._known_step = step

  def close(self) -> None:
    """Wait for the save in progress and release Orbax's threads; raises as `wait` does."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def __enter__(self) -> CheckpointStore:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _refuse_older(self, step: int) -> None:
    newest = self.latest_step()
    if newest is not None and step <= newest:
      raise ValueError(
          f'Cannot save step {step} in {self.directory}: it already holds step {newest}, and the newest step is the one that resuming '
          f'takes. Resume from step {newest}, use another directory, or delete the steps from {step} on.')
    if (self.directory / str(step)).exists():
      raise ValueError(
          f'Cannot save step {step}: {self.directory / str(step)} exists without its {_COMMIT_MARKER}, so it is an incomplete copy. '
          'Delete it.')

  def _failure(self, step: int, error: object) -> RuntimeError:
    return RuntimeError(
        f'Saving step {step} to {self.directory} failed: {error}. The newest complete checkpoint is step {self.latest_step()}. '
        'Check free space and permissions, then resume.')


def committed_steps(directory: str | epath.PathLike) -> list[int]:
  """Return the optimizer steps whose checkpoints are complete on disk, in ascending order."""
  root = _absolute(directory)
  if not root.exists():
    return []
  return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal() and (path / _COMMIT_MARKER).exists())


def read_state(directory: str | epath.PathLike, abstract_state: TrainState, step: int | None = None) -> TrainState:
  """Read the whole state of `step` (default: the newest) onto the shardings of `abstract_state`.

  Raises:
    ValueError: the checkpoint's arrays differ from `abstract_state`, or a leaf of it has no sharding.
    FileNotFoundError: the directory holds no such step.
    RuntimeError: its files are damaged.
  """
  _, path = _find(directory, step)
  return _read_arrays(path, abstract_state, is_partial=False)


def read_params(directory: str | epath.PathLike, abstract_params: Params, step: int | None = None) -> Params:
  """Read only the trainable parameters of `step` (default: the newest), without the optimizer's memory; raises as `read_state`."""
  _, path = _find(directory, step)
  return _read_arrays(path, {'trainable': abstract_params}, is_partial=True)['trainable']


def read_host(directory: str | epath.PathLike, step: int | None = None) -> HostState:
  """Read the host state of `step` (default: the newest).

  Raises:
    ValueError: the file holds other fields than HostState.
    FileNotFoundError: the directory holds no such step.
    RuntimeError: its files are damaged.
  """
  _, path = _find(directory, step)
  file = path / 'host' / 'metadata'
  with _explained(path):
    values = json.loads(file.read_text())
  wanted = {field.name for field in dataclasses.fields(HostState)}
  if set(values) != wanted:
    raise ValueError(
        f'{file} holds the fields {sorted(values)}, but this version of the code reads {sorted(wanted)}; '
        'use the version that wrote it.')
  return HostState(**values)


def _absolute(directory: str | epath.PathLike) -> epath.Path:
  path = epath.Path(directory)
  return path if '://' in str(directory) else path.absolute()


def _find(directory: str | epath.PathLike, step: int | None) -> tuple[int, epath.Path]:
  """Return the step wanted, or the newest one, and its directory."""
  steps = committed_steps(directory)
  if not steps or (step is not None and step not in steps):
    held = f'complete checkpoints there: {steps}' if steps else 'it holds no complete checkpoint'
    raise FileNotFoundError(f'No checkpoint{"" if step is None else f" of step {step}"} in {_absolute(directory)}; {held}.')
  step = steps[-1] if step is None else step
  return step, _absolute(directory) / str(step)


def _host_to_json(host: HostState) -> dict[str, Any]:
  # Serialized here and not in the background: a mistake is raised at the call, and later changes of the mappings do not leak in.
  try:
    return json.loads(json.dumps(dataclasses.asdict(host)))
  except TypeError as error:
    raise ValueError(f'The host state cannot be stored as JSON: {error}. Give plain numbers, strings, lists and mappings.') from error


def _named_leaves(tree: Any) -> dict[str, Any]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


def _refuse_unstorable(state: Any) -> None:
  for path, leaf in _named_leaves(state).items():
    if not isinstance(leaf, jax.Array):
      raise ValueError(f'{path} is a {type(leaf).__name__}; a TrainState holds jax.Arrays only.')
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise ValueError(f'{path} is a typed PRNG key, which is never stored; derive keys from the root seed and the step.')


def _read_arrays(step_path: epath.Path, abstract: Any, *, is_partial: bool) -> Any:
  wanted = _named_leaves(abstract)
  for path, leaf in wanted.items():
    if getattr(leaf, 'sharding', None) is None:
      raise ValueError(f'{path} of the state to restore has no sharding; give jax.ShapeDtypeStruct(shape, dtype, sharding=...).')
  directory = step_path / 'state'
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as reader:
    with _explained(step_path):
      stored = _named_leaves(reader.metadata(directory).tree)
    if is_partial:
      stored = {path: leaf for path, leaf in stored.items() if path.split('/')[0] in abstract}
    _refuse_differences(step_path, stored, wanted)
    with _explained(step_path):
      return reader.restore(directory, args=ocp.args.PyTreeRestore(
          item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=is_partial))


@contextlib.contextmanager
def _explained(step_path: epath.Path) -> Iterator[None]:
  """Name the checkpoint in whatever Orbax or the file system raises."""
  try:
    yield
  except Exception as error:
    raise RuntimeError(
        f'Reading the checkpoint {step_path} failed: {error}. If its files are damaged, delete that directory to use an older '
        f'step; complete are {committed_steps(step_path.parent)}.') from error


def _refuse_differences(step_path: epath.Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
  # Orbax itself would cast a differing dtype without a word.
  lines = []
  for path in [*wanted, *(path for path in stored if path not in wanted)]:
    have, want = (_shape(tree[path]) if path in tree else 'nothing' for tree in (stored, wanted))
    if have != want:
      lines.append(f'  {path}: the checkpoint has {have}, the run wants {want}')
  if lines:
    raise ValueError('\n'.join([
        f'{step_path} does not fit the state to restore; {len(lines)} arrays differ:', *lines[:_NUM_DIFFERENCES_SHOWN],
        f'Use the model, trainable parameters and optimizer of the config in {step_path / "host" / "metadata"}, or a new directory.']))


def _shape(leaf: Any) -> str:
  return f'{leaf.dtype}[{",".join(map(str, leaf.shape))}]'
