"""What a run tells the world: `Monitor` writes metrics to JSON lines and TensorBoard, and shows progress and speed.

The monitor takes plain floats, one step late (`rl.metrics.compute`), and never touches the training state. Only process 0 of a run writes.
`measure_matmul_peak` and `code_revision` supply the facts about the machine and the code; `write_config` records the configuration.

Deliberately absent: uploading to a tracking service, and drawing plots; both can read `metrics.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
import shutil
import socket
import subprocess
import sys
import time
from typing import Any, Literal, TextIO

import jax
import jax.numpy as jnp

from rl.types import Trajectory

METRICS_FILE = 'metrics.jsonl'
TRAJECTORIES_FILE = 'trajectories.jsonl'
CONFIG_FILE = 'config.json'
DIFFERENCE_FILE = 'config_difference.json'
OBJECTIVE_FILE = 'objective.txt'

_SMOOTHING = 0.9  # Weight of the past in the step time that the progress line shows.


class Monitor:
  """The metrics files and the progress line of one run. Use it as a context manager, or call `close`."""

  def __init__(
      self, workdir: str | Path, *, total_steps: int, start_step: int = 0, flops_per_token: float | None = None,
      peak_flops: float | None = None, plain_every_steps: int = 10, stream: TextIO | None = None):
    """Open the metrics files and drop from `metrics.jsonl` what a crashed run wrote after `start_step`.

    Args:
      workdir: directory of the run; created if needed.
      total_steps: optimizer steps of the whole run.
      start_step: the step restored from a checkpoint; the next one written is `start_step + 1`.
      flops_per_token: FLOPs the training step needs for one token, forward and backward; None shows no FLOP/s.
      peak_flops: FLOP/s of all the run's devices together; None shows no fraction.
      plain_every_steps: steps between progress lines where `stream` is not a terminal.
      stream: where progress goes; standard error by default.

    Raises:
      ValueError: a count out of range, or a line of `metrics.jsonl` before the last that is not JSON.
      RuntimeError: the directory or a file in it cannot be written.
    """
    if not 0 <= start_step <= total_steps:
      raise ValueError(f'start_step={start_step} must lie between 0 and total_steps={total_steps}.')
    if plain_every_steps < 1:
      raise ValueError(f'plain_every_steps={plain_every_steps} must be at least 1.')
    self._total_steps = total_steps
    self._step = start_step
    self._flops_per_token = flops_per_token
    self._peak_flops = peak_flops
    self._plain_every_steps = plain_every_steps
    self._stream = sys.stderr if stream is None else stream
    self._step_s: float | None = None  # Smoothed.
    self._is_first_lap = True
    self._lap_start_s = time.perf_counter()
    self._is_writer = jax.process_index() == 0
    if self._is_writer:
      self._path = Path(workdir) / METRICS_FILE
      with _writing(self._path):
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _truncate(self._path, start_step)
        self._file = self._path.open('a', encoding='utf-8')
        self._events = _open_events(Path(workdir) / 'tensorboard', start_step)

  def log_step(self, step: int, values: Mapping[str, float], num_tokens: int, finished_s: float, notes: Sequence[str] = ()) -> None:
    """Write the metrics of one optimizer step with its speed, and show progress.

    The time since the step before finished counts as this step's, except what passed inside `paused`. The first step's time is compilation
    for the most part, so it is written as 'speed/first_step_s' and enters no rate.

    Args:
      step: the optimizer step, counted from 1.
      values: {'area/name_unit': value}; 'train/loss_nats' is shown.
      num_tokens: tokens that the step trained on, over all hosts.
      finished_s: `time.perf_counter()` when its results were there.
      notes: what the progress line shows beside the speed.

    Raises:
      ValueError: `step` lies before one already written.
      RuntimeError: a file cannot be written.
    """
    step_s, self._lap_start_s = max(finished_s - self._lap_start_s, 1e-9), finished_s
    if self._is_first_lap:
      speed = {'speed/first_step_s': step_s}
    else:
      speed = self._speed(step_s, num_tokens)
      self._step_s = step_s if self._step_s is None else _SMOOTHING * self._step_s + (1 - _SMOOTHING) * step_s
    self._is_first_lap = False
    self.write(step, {**values, **speed})
    if self._is_writer:
      self._show_progress(step, values, speed, notes)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Write metrics that are no step of their own, such as an evaluation's; raises as `log_step`."""
    if step < self._step:
      raise ValueError(f'Metrics of step {step} came after those of step {self._step}; write them in order.')
    self._step = step
    if not self._is_writer:
      return
    # JSON knows no NaN and no infinity; null keeps the line readable by every tool, and TensorBoard shows what it was.
    record = {key: float(value) if math.isfinite(value) else None for key, value in values.items()}
    with _writing(self._path):
      self._file.write(json.dumps({'step': step, 'time_s': round(time.time(), 3), **record}, allow_nan=False) + '\n')
      self._file.flush()
      self._events.write(_scalars(step, values))
      self._events.flush()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Keep the time spent inside, such as an evaluation's, out of the step time."""
    start_s = time.perf_counter()
    try:
      yield
    finally:
      self._lap_start_s += time.perf_counter() - start_s

  def close(self) -> None:
    """End the progress line and close the files.

    Raises:
      RuntimeError: what was still buffered cannot be written.
    """
    if not self._is_writer:
      return
    if self._stream.isatty():
      self._stream.write('\n')
    with _writing(self._path), contextlib.closing(self._events), contextlib.closing(self._file):
      pass

  def __enter__(self) -> Monitor:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _speed(self, step_s: float, num_tokens: int) -> dict[str, float]:
    speed = {'speed/step_s': step_s, 'speed/tokens_per_s': num_tokens / step_s}
    if self._flops_per_token is not None:
      speed['speed/flops_per_s'] = num_tokens * self._flops_per_token / step_s
      if self._peak_flops is not None:
        speed['speed/peak_fraction'] = speed['speed/flops_per_s'] / self._peak_flops
    return speed

  def _show_progress(self, step: int, values: Mapping[str, float], speed: Mapping[str, float], notes: Sequence[str]) -> None:
    is_terminal = self._stream.isatty()
    if not is_terminal and step % self._plain_every_steps != 0 and step != self._total_steps:
      return
    parts = [f'step {step}/{self._total_steps}', *notes]
    if 'train/loss_nats' in values:
      parts.append(f'loss {values["train/loss_nats"]:.4f}')
    if 'speed/tokens_per_s' in speed:
      parts.append(f'{_with_prefix(speed["speed/tokens_per_s"])}token/s')
    if 'speed/flops_per_s' in speed:
      parts.append(f'{_with_prefix(speed["speed/flops_per_s"])}FLOP/s')
    if 'speed/peak_fraction' in speed:
      parts[-1] += f' ({speed["speed/peak_fraction"]:.1%} of peak)'
    if self._step_s is not None:
      parts.append(f'{_clock((self._total_steps - step) * self._step_s)} left')
    line = '  '.join(parts)
    if is_terminal:
      # One line that overwrites itself must not wrap, and must cover what stood there before.
      width = shutil.get_terminal_size().columns - 1
      line = '\r' + line[:width].ljust(width)
    self._stream.write(line if is_terminal else line + '\n')
    self._stream.flush()


def trajectory_record(step: int, kind: str, trajectory: Trajectory, advantage: float | None = None, dropped: str = '') -> dict[str, Any]:
  """Return what is kept of an episode, as JSON values; `dropped` is why it was not trained on."""
  sampled = trajectory.loss_mask_T
  evidence = {} if trajectory.evidence is None else {'evidence': dataclasses.asdict(trajectory.evidence)}
  return {
      'step': step, 'kind': kind, 'problem_id': trajectory.problem_id, 'domain': trajectory.domain, 'level': trajectory.level,
      'group': trajectory.group, 'sample': trajectory.sample, 'reward': trajectory.reward, 'advantage': advantage,
      'parts': dict(trajectory.parts), 'turn_scores': list(trajectory.turn_scores),
      'outcome': trajectory.outcome, 'reason': trajectory.reason, 'dropped': dropped, 'num_turns': trajectory.num_turns,
      'num_tool_calls': trajectory.num_tool_calls, 'num_tool_errors': trajectory.num_tool_errors,
      'num_tokens': len(trajectory.tokens_T), 'num_sampled': int(sampled.sum()),
      'mean_logprob': float(trajectory.behavior_logprobs_T[sampled].mean()) if sampled.any() else None,
      'versions': sorted({int(version) for version in trajectory.versions_T[sampled]}),
      'timing_s': {name: round(seconds, 4) for name, seconds in trajectory.timing_s.items()},
      **evidence, 'messages': list(trajectory.messages)}


class TrajectoryLog:
  """`trajectories.jsonl`: one line for each episode of a run, on disk when `write` returns. Use it as a context manager, or call `close`."""

  def __init__(self, workdir: str | Path, start_step: int):
    """Open the file and drop what a crashed run wrote after `start_step`; raises as `Monitor`."""
    self._path = Path(workdir) / TRAJECTORIES_FILE
    with _writing(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      _truncate(self._path, start_step)
      self._file = self._path.open('a', encoding='utf-8')

  def write(self, step: int, kind: Literal['train', 'eval'], entries: Iterable[tuple[Trajectory, float | None, str]]) -> None:
    """Write (trajectory, its advantage, why it was not trained on) of a step; RuntimeError if the file cannot be written."""
    with _writing(self._path):
      for trajectory, advantage, dropped in entries:
        self._file.write(json.dumps(trajectory_record(step, kind, trajectory, advantage, dropped), allow_nan=False) + '\n')
      self._file.flush()
      os.fsync(self._file.fileno())

  def close(self) -> None:
    """Close the file."""
    self._file.close()

  def __enter__(self) -> TrajectoryLog:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


def write_config(workdir: str | Path, config: Mapping[str, Any], difference: Mapping[str, tuple[Any, Any]]) -> None:
  """Write the resolved configuration, and how it differs from the defaults, at the start of a run.

  A different configuration that lies there already, from the run being resumed, is kept as config.1.json, config.2.json, ...

  Args:
    workdir: directory of the run; created if needed.
    config: the resolved configuration as plain JSON (`rl.config.to_json`).
    difference: {dotted key: (default, value)} (`rl.config.difference`).

  Raises:
    RuntimeError: a file cannot be written.
  """
  if jax.process_index() != 0:
    return
  path = Path(workdir) / CONFIG_FILE
  text = json.dumps(config, indent=2) + '\n'
  changes = {key: {'default': default, 'value': value} for key, (default, value) in difference.items()}
  with _writing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text(encoding='utf-8') != text:
      number = 1
      while (kept := path.with_name(f'config.{number}.json')).exists():
        number += 1
      path.rename(kept)
    _replace_text(path, text)
    _replace_text(path.with_name(DIFFERENCE_FILE), json.dumps(changes, indent=2) + '\n')


def write_objective(workdir: str | Path, text: str) -> None:
  """Write what the run maximizes (`rl.objective.describe`) into its directory, which is there; RuntimeError if that cannot be done."""
  if jax.process_index() == 0:
    path = Path(workdir) / OBJECTIVE_FILE
    with _writing(path):
      _replace_text(path, text)


@functools.cache
def measure_matmul_peak(dtype: str, budget_s: float = 1.0) -> float:
  """Measure the FLOP/s of a large matrix product on all local devices at once; measured once a process.

  The best of several rounds counts, with `dtype` inputs, float32 results and the default precision, as in training.

  Args:
    dtype: name of the inputs' dtype, such as 'bfloat16'.
    budget_s: seconds to spend, compilation apart.
  """
  devices = jax.local_devices()
  # On an accelerator one product is too short to hide its launch.
  size, num_products = (1024, 1) if devices[0].platform == 'cpu' else (8192, 8)
  mesh = jax.sharding.Mesh(devices, ('device',))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('device'))
  # Random numbers, because an accelerator computes faster on constant ones.
  fill = jax.jit(lambda key: jax.random.normal(key, (len(devices), size, size), dtype), out_shardings=split)
  product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))

  def round_s(x: jax.Array) -> float:
    start_s = time.perf_counter()
    jax.block_until_ready([product(x) for _ in range(num_products)])
    return time.perf_counter() - start_s

  # A mesh of its own, so that it runs wherever it is called, within another mesh too.
  with jax.set_mesh(mesh):
    x = fill(jax.random.key(0))
    round_s(x)
    best_s, end_s = round_s(x), time.perf_counter() + budget_s
    while time.perf_counter() < end_s:
      best_s = min(best_s, round_s(x))
  return 2 * size**3 * len(devices) * num_products / best_s


def code_revision() -> str:
  """Return the git commit of this checkout, with '-dirty' if tracked files differ from it; '' outside a checkout."""
  root = Path(__file__).resolve().parents[1]

  def git(*arguments: str) -> str | None:
    try:
      result = subprocess.run(['git', '-C', str(root), *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
      return None
    return result.stdout.strip() if result.returncode == 0 else None

  # An installed copy may lie inside somebody else's checkout, whose commit says nothing about this code.
  if git('rev-parse', '--show-toplevel') != str(root):
    return ''
  commit, changes = git('rev-parse', 'HEAD'), git('status', '--porcelain', '--untracked-files=no')
  return '' if commit is None else commit + ('' if changes == '' else '-dirty')


def _truncate(path: Path, last_step: int) -> None:
  """Keep the lines of steps up to `last_step`, and none of a run that starts afresh at 0.

  A last line without its newline is the trace of a crash and goes too.
  """
  if not path.exists():
    return
  kept = []
  lines = path.read_text(encoding='utf-8').split('\n')
  for number, line in enumerate(lines[:-1], start=1):
    try:
      step = json.loads(line)['step']
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f'{path}, line {number}: {line[:80]!r} is not a JSON object with a step; move the file away.') from error
    if step <= last_step and last_step > 0:
      kept.append(line + '\n')
  _replace_text(path, ''.join(kept))


def _replace_text(path: Path, text: str) -> None:
  """Replace the file in one step, so that a crash leaves either the old text or the new."""
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(text, encoding='utf-8')
  os.replace(temporary, path)


def _open_events(directory: Path, start_step: int) -> Any:
  """Open a TensorBoard event file; TensorBoard then forgets what earlier files in the directory say about steps after `start_step`.

  TensorBoard's record writer is used and not a summary writer: those put a queue and a thread between the run and the disk, so that a full
  disk blocks the run without a word.
  """
  from tensorboard.compat.proto import event_pb2
  from tensorboard.summary.writer.record_writer import RecordWriter

  directory.mkdir(parents=True, exist_ok=True)
  # TensorBoard reads the files of a directory in the order of their names, so the time comes first.
  writer = RecordWriter((directory / f'events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}').open('xb'))
  writer.write(event_pb2.Event(wall_time=time.time(), file_version='brain.Event:2').SerializeToString())
  started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
  writer.write(event_pb2.Event(wall_time=time.time(), step=start_step + 1, session_log=started).SerializeToString())
  writer.flush()
  return writer


def _scalars(step: int, values: Mapping[str, float]) -> bytes:
  from tensorboard.compat.proto import event_pb2, summary_pb2

  summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=key, simple_value=value) for key, value in values.items()])
  return event_pb2.Event(wall_time=time.time(), step=step, summary=summary).SerializeToString()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise RuntimeError(f'Cannot write {path}: {error}. Free space or fix the permissions, then resume from the last checkpoint.') from error


def _with_prefix(value: float) -> str:
  """Format with three digits and an SI prefix: 12345 is '12.3 k'."""
  value = float(f'{value:.3g}')
  power = 0 if value < 1 else min(int(math.log10(value)) // 3, 5)
  return f'{value / 1000**power:.3g} {("", "k", "M", "G", "T", "P")[power]}'


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  return f'{minutes // 60}:{minutes % 60:02d}:{seconds:02d}'
