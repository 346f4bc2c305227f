"""The loop of an offline run: what every stage that learns from stored data shares, from the first step to a checkpoint that resumes.

One step is: the stage's next data, its update, metrics one step late (so the loop never waits for the device to read them), then evaluation
and checkpoint on their schedules. What decides a step is the config, the arrays, the optimizer step and the position in the data; all four
are in every checkpoint, so a killed run continues as if nothing had happened. A `Stage` says what is learned from what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import contextlib
from dataclasses import dataclass
import logging
from pathlib import Path
import time
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from models import params as params_lib
from models import transformer
from models.config import ModelConfig
from models.sharding import Layout
from rl import checkpoint, monitor, optimizer
from rl import config as config_lib
from rl import learner as learner_lib
from rl import metrics as metrics_lib
from rl import run as run_lib
from rl.learner import Learner, Loss
from rl.optimizer import OptimizerConfig
from rl.run import LayoutConfig, LoraConfig, MeshConfig, ModelSource
from rl.types import HostState, Params, TrainState

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
  """What the runs of all these stages are told; the record of a stage adds its data and its loss.

  Attributes:
    num_steps: optimizer steps of the whole run; the schedule ends there.
    seed: root of everything random.
    checkpoint_every_steps, checkpoints_kept: when to save, and how many of the newest to keep.
    eval_every_steps: steps between evaluations on the held-out split; 0 never evaluates.
    cpu_devices: simulated devices of each process when running on CPU; read by `launch.train` before JAX starts.
  """
  model: ModelSource
  num_steps: int
  seed: int = 0
  lora: LoraConfig = LoraConfig()
  mesh: MeshConfig = MeshConfig()
  layout: LayoutConfig = LayoutConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  checkpoint_every_steps: int = 100
  checkpoints_kept: int = 2
  eval_every_steps: int = 0
  cpu_devices: int = 1

  def __post_init__(self):
    self.check_at_least(num_steps=1, seed=0, checkpoint_every_steps=1, checkpoints_kept=1, eval_every_steps=0, cpu_devices=1)
    optimizer.schedule(self.optimizer, self.num_steps)

  def check_at_least(self, **bounds: int) -> None:
    """Raise ValueError for a field below its bound."""
    for name, least in bounds.items():
      if getattr(self, name) < least:
        raise ValueError(f'{name}={getattr(self, name)} must be at least {least}.')


def build_learner(config: OfflineConfig, model: ModelConfig, layout: Layout, mesh: Mesh, loss: Loss = learner_lib.supervised_loss) -> Learner:
  """Return the learner of a run; raises as `learner.build`."""
  return learner_lib.build(model, layout, mesh, optimizer.build(config.optimizer, config.num_steps),
                           optimizer.schedule(config.optimizer, config.num_steps), full=config.lora.rank == 0, loss=loss)


def flops_per_token(config: OfflineConfig, model: ModelConfig, length: int) -> float:
  """Return the FLOPs that a step of the model alone needs for each token."""
  return transformer.num_flops_per_token(model, length, 1.0 if config.lora.rank == 0 else 0.0)


class Taken(Protocol):
  """The data of a step.

  Attributes:
    documents: position in the data after it.
    num_tokens: tokens of it, over all hosts.
  """
  documents: int
  num_tokens: int


class Stage(Protocol):
  """What a run computes with, made once, and what a step of it is.

  Attributes:
    lineage: what the run is made from, for checkpoints.
    shown: name -> metric, for the progress line.
  """
  model: ModelConfig
  mesh: Mesh
  learner: Learner
  frozen: Params
  lineage: Mapping[str, Any]
  shown: Mapping[str, str]

  def flops_per_token(self, length: int) -> float:
    """Return the FLOPs that a step needs for each token of rows of this length."""

  def prepare(self, workdir: Path, trainable: Params) -> None:
    """Compute what a run needs of the initial model, before its parameters change or are restored."""

  def steps(self, position: int) -> Iterator[Taken]:
    """Return the data of each step from a position on; a generator, which is closed at the end."""

  def update(self, state: TrainState, taken: Any) -> tuple[TrainState, dict]:
    """Take an optimizer step; returns (state, metrics)."""

  def evaluate(self, trainable: Params) -> dict[str, float]:
    """Return metrics of held-out data."""

  def describe(self, taken: Any) -> dict[str, float]:
    """Return what is reported of a step's data."""


def run(config: OfflineConfig, make_stage: Callable[[], tuple[Stage, Params]], workdir: str | Path, *, defaults: Any,
        free_on_resume: Sequence[str], last_step: int | None = None, length: int | None = None) -> dict[str, float]:
  """Train to `last_step` of `config.num_steps`, from the newest checkpoint in `workdir` if there is one; return the last evaluation (or {}).

  Args:
    config: a stage's record; `config.data.length` are the tokens of a row.
    make_stage: checks everything a run needs and returns it with the initial trainable parameters.
    defaults: a record of the same kind, to say what differs from it.
    free_on_resume: beginnings of the config's keys that a resumed run may change.
    last_step: the last optimizer step of this call; None is `config.num_steps`.
    length: tokens of a row; None is `config.data.length`.

  Raises:
    ValueError, FileNotFoundError: bad configuration, data or model; a checkpoint of another run.
    RuntimeError: files that cannot be written, or `run_lib.MAX_SKIPPED_IN_A_ROW` steps without a finite gradient.
  """
  workdir = Path(workdir)
  stage, trainable = make_stage()
  resolved = config_lib.to_json(config)
  with contextlib.ExitStack() as stack:
    store = stack.enter_context(checkpoint.CheckpointStore(
        workdir / run_lib.CHECKPOINTS, every_steps=config.checkpoint_every_steps, keep=config.checkpoints_kept))

    def initial_state():
      stage.prepare(workdir, trainable)
      return stage.learner.init(trainable)

    state, host = run_lib.begin(store, initial_state, HostState(0, config.seed, resolved, monitor.code_revision(), stage.lineage), workdir,
                                free_on_resume)
    first_step = int(state.step)
    monitor.write_config(workdir, resolved, config_lib.difference(config, defaults))
    board = stack.enter_context(monitor.Monitor(
        workdir, total_steps=config.num_steps, start_step=first_step,
        flops_per_token=stage.flops_per_token(length or config.data.length),
        peak_flops=monitor.measure_matmul_peak(config.layout.compute_dtype) * jax.process_count()))
    stopping = stack.enter_context(run_lib.stop_signal())
    steps = stack.enter_context(contextlib.closing(stage.steps(host.documents)))
    _LOG.info('%s: %d parameters, %d trained; mesh %s; step %d of %d.', stage.model.family, params_lib.count(state.trainable) +
              params_lib.count(stage.frozen), params_lib.count(state.trainable), dict(stage.mesh.shape), first_step, config.num_steps)
    return _loop(config, last_step or config.num_steps, stage, state, host, steps, store, board, stopping)


def _loop(config, last_step: int, stage: Stage, state, host: HostState, steps, store, board, stopping: Callable[[], bool]) -> dict[str, float]:
  results, reporter = {}, _Reporter(stage, board, config.optimizer.learning_rate)
  with reporter:
    for step in range(int(state.step) + 1, last_step + 1):
      taken = next(steps)
      state, metrics = stage.update(state, taken)
      reporter.add(step, taken, metrics)
      host = HostState(taken.documents, host.seed, host.config, host.revision, host.lineage)
      stop = stopping()
      # Before the checkpoint, because a run that goes on from it does not evaluate this step again.
      if config.eval_every_steps and (step % config.eval_every_steps == 0 or step == last_step):
        reporter.flush()
        with board.paused():
          results = stage.evaluate(state.trainable)
          board.write(step, results)
        _LOG.info('step %d: %s', step, '  '.join(f'{name} {value:.4f}' for name, value in results.items()))
      if step == last_step or stop or store.is_due(step):
        reporter.flush()
        store.save(step, state, host)
      if stop and step < last_step:
        _LOG.warning('Stopped by a signal after step %d; run the same command again to go on.', step)
        break
  return results


class _Reporter:
  """Write a step's metrics while the next step runs; a thread waits for the device, so the loop does not and completion times are exact."""

  def __init__(self, stage: Stage, board: monitor.Monitor, learning_rate: float):
    self._stage, self._board, self._learning_rate = stage, board, learning_rate
    self._num_skipped = 0
    self._pending = None
    self._thread = ThreadPoolExecutor(1, 'metrics')

  def add(self, step: int, taken: Taken, metrics: dict) -> None:
    """Take a step's metrics and report the step before; raises as `flush`."""
    self.flush()
    self._pending = (step, taken, self._thread.submit(lambda: (metrics_lib.compute(metrics), time.perf_counter())))

  def flush(self) -> None:
    """Report what is pending.

    Raises:
      RuntimeError: too many steps in a row without a finite gradient, or files that cannot be written.
    """
    if self._pending is None:
      return
    (step, taken, future), self._pending = self._pending, None
    values, finished_s = future.result()
    notes = [f'{name} {values[key]:.4f}' for name, key in self._stage.shown.items() if key in values]
    self._board.log_step(step, {**values, 'data/documents': taken.documents, **self._stage.describe(taken)}, taken.num_tokens, finished_s,
                         notes)
    self._num_skipped = self._num_skipped + 1 if values['train/skipped_steps'] else 0
    if self._num_skipped >= run_lib.MAX_SKIPPED_IN_A_ROW:
      raise RuntimeError(f'{self._num_skipped} steps in a row up to step {step} had a gradient that is not finite and were skipped; '
                         f'lower optimizer.learning_rate={self._learning_rate} or look at the data of these steps.')

  def __enter__(self) -> _Reporter:
    return self

  def __exit__(self, kind, *_) -> None:
    try:
      if kind is None:
        self.flush()
    finally:
      self._thread.shutdown()
