"""The offline loop: supervised fine-tuning, full or LoRA, from a pretrained model to checkpoints that resume bit for bit.

One step is: the loader's rows, `learner.update`, metrics one step late (so the loop never waits for the device to read them), then evaluation
and checkpoint on their schedules. What decides a step is the config, the arrays, the optimizer step and the documents taken; all four are in
every checkpoint, so a killed run continues as if nothing had happened.

Configuration, data, mesh and model are checked in this order, before the first step; a run that resumes refuses another model or other data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
import contextlib
from dataclasses import dataclass, field
import logging
from pathlib import Path
import time
from typing import Any, Literal

import jax
from jax.sharding import Mesh
import numpy as np

from models import chat, sharding, transformer, weight_files
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import batching, checkpoint, monitor, optimizer
from rl import config as config_lib
from rl import learner as learner_lib
from rl import metrics as metrics_lib
from rl import run as run_lib
from rl.batching import Place
from rl.data import records, tasks
from rl.data.loader import Loader, Step
from rl.learner import Learner
from rl.optimizer import OptimizerConfig
from rl.run import LayoutConfig, LoraConfig, MeshConfig, ModelSource
from rl.types import Document, HostState, Params

_LOG = logging.getLogger(__name__)
# What a resumed run may change; everything else decides what is computed.
_FREE_ON_RESUME = ('num_steps', 'checkpoint_every_steps', 'checkpoints_kept', 'eval_every_steps', 'eval_documents', 'cpu_devices', 'mesh.',
                   'layout.')


@dataclass(frozen=True)
class DataConfig:
  """What is learned from.

  Attributes:
    tasks: name -> body of data.
    rates: name -> relative number of examples drawn; {} draws in proportion to size.
    rows: rows of one micro-batch, over all hosts.
    length: tokens of a row.
    micro_batches: micro-batches of one optimizer step.
    overlong: what happens to a document longer than a row.
    aggregation: how token losses become one number.
  """
  tasks: dict[str, tasks.TaskConfig]
  rates: dict[str, float] = field(default_factory=dict)
  rows: int = 8
  length: int = 256
  micro_batches: int = 1
  overlong: Literal['error', 'truncate', 'drop'] = 'drop'
  aggregation: Literal['token_mean', 'sequence_mean', 'token_sum'] = 'token_mean'


@dataclass(frozen=True)
class TrainConfig:
  """A supervised run.

  Attributes:
    num_steps: optimizer steps of the whole run; the schedule ends there.
    seed: root of everything random.
    checkpoint_every_steps, checkpoints_kept: when to save, and how many of the newest to keep.
    eval_every_steps: steps between evaluations on the held-out split; 0 never evaluates.
    eval_documents: how many held-out documents an evaluation reads; 0 reads all.
    cpu_devices: simulated devices when running on CPU; read by `launch.train` before JAX starts.
  """
  model: ModelSource
  data: DataConfig
  num_steps: int
  stage: Literal['supervised'] = 'supervised'
  seed: int = 0
  lora: LoraConfig = LoraConfig()
  mesh: MeshConfig = MeshConfig()
  layout: LayoutConfig = LayoutConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  checkpoint_every_steps: int = 100
  checkpoints_kept: int = 2
  eval_every_steps: int = 0
  eval_documents: int = 256
  cpu_devices: int = 1

  def __post_init__(self):
    for name, least in (('num_steps', 1), ('checkpoint_every_steps', 1), ('checkpoints_kept', 1), ('eval_every_steps', 0),
                        ('eval_documents', 0), ('seed', 0), ('cpu_devices', 1)):
      if getattr(self, name) < least:
        raise ValueError(f'{name}={getattr(self, name)} must be at least {least}.')
    optimizer.schedule(self.optimizer, self.num_steps)


@dataclass(frozen=True)
class Setup:
  """What a run computes with, made once by `set_up`."""
  model: ModelConfig
  tokenizer: Tokenizer
  layout: Layout
  mesh: Mesh
  place: Place
  learner: Learner
  frozen: Params
  mixture: Any
  lineage: dict[str, Any]


def encode(example: records.Example, tokenizer: Tokenizer, template: chat.Template) -> Document:
  """Render an example; what the assistant says is learned, its end-of-turn token included."""
  rendered = chat.render(example.messages, tokenizer, template)
  return Document(rendered.tokens_T, chat.loss_mask_T(rendered), example.source)


def set_up(config: TrainConfig) -> tuple[Setup, Params]:
  """Check everything a run needs and return it with the initial trainable parameters.

  Raises:
    ValueError, FileNotFoundError: what is wrong with the data, the mesh, the layout or the model.
  """
  mixture = tasks.build_mixture(tasks.MixtureConfig(config.data.tasks, config.data.rates))
  tokenizer = tokenizer_lib.load(config.model.path)
  mesh = sharding.make_mesh(**vars(config.mesh))
  layout = run_lib.lay_out(config.layout, weight_files.read_config(config.model.path), mesh)
  place = Place.of(layout, mesh)
  batching.host_rows(place, config.data.rows)
  model, trainable, frozen = run_lib.load_trainable(config.model, config.lora, config.seed, mesh, layout)
  learner = learner_lib.build(
      model, layout, mesh, optimizer.build(config.optimizer, config.num_steps), optimizer.schedule(config.optimizer, config.num_steps),
      full=config.lora.rank == 0)
  lineage = {'model': run_lib.model_fingerprint(config.model.path), 'tokenizer': tokenizer.fingerprint, 'data': tasks.fingerprint(mixture)}
  return Setup(model, tokenizer, layout, mesh, place, learner, frozen, mixture, lineage), trainable


def run(config: TrainConfig, workdir: str | Path) -> dict[str, float]:
  """Train to `num_steps`, from the newest checkpoint in `workdir` if there is one; return the last evaluation (or {}).

  Raises:
    ValueError, FileNotFoundError: bad configuration, data or model; a checkpoint of another run.
    RuntimeError: files that cannot be written, or `run_lib.MAX_SKIPPED_IN_A_ROW` steps without a finite gradient.
  """
  workdir = Path(workdir)
  setup, trainable = set_up(config)
  resolved = config_lib.to_json(config)
  state = setup.learner.init(trainable)
  with contextlib.ExitStack() as stack:
    store = stack.enter_context(checkpoint.CheckpointStore(
        workdir / run_lib.CHECKPOINTS, every_steps=config.checkpoint_every_steps, keep=config.checkpoints_kept))
    host = HostState(0, config.seed, resolved, monitor.code_revision(), setup.lineage)
    if store.latest_step() is not None:
      abstract = learner_lib.abstract_state(state)
      del state, trainable  # Their memory is the restored state's.
      run_lib.refuse_other_run(checkpoint.read_host(store.directory), host, workdir, _FREE_ON_RESUME)
      state, restored = store.restore(abstract)
      host = HostState(restored.documents, config.seed, resolved, host.revision, host.lineage)
    first_step = int(state.step)
    defaults = TrainConfig(ModelSource(config.model.path), DataConfig(config.data.tasks), config.num_steps)
    monitor.write_config(workdir, resolved, config_lib.difference(config, defaults))
    board = stack.enter_context(monitor.Monitor(
        workdir, total_steps=config.num_steps, start_step=first_step,
        flops_per_token=transformer.num_flops_per_token(setup.model, config.data.length, 1.0 if config.lora.rank == 0 else 0.0),
        peak_flops=monitor.measure_matmul_peak(config.layout.compute_dtype) * jax.process_count()))
    stopping = stack.enter_context(run_lib.stop_signal())
    loader = stack.enter_context(_loader(config, setup, host.documents))
    _LOG.info('%s: %d parameters, %d trained; mesh %s; step %d of %d.', setup.model.family, params_lib.count(state.trainable) +
                 params_lib.count(setup.frozen), params_lib.count(state.trainable), dict(setup.mesh.shape), first_step, config.num_steps)
    return _loop(config, setup, state, host, loader, store, board, stopping)


def _loop(config, setup: Setup, state, host: HostState, loader: Loader, store, board, stopping: Callable[[], bool]) -> dict[str, float]:
  results, reporter = {}, _Reporter(config, board)
  with reporter:
    for step in range(int(state.step) + 1, config.num_steps + 1):
      taken = next(loader)
      batches = [batching.to_global(batch, setup.place) for batch in taken.batches]
      state, metrics = setup.learner.update(state, setup.frozen, batches)
      reporter.add(step, taken, metrics)
      host = HostState(taken.documents, host.seed, host.config, host.revision, host.lineage)
      stop = stopping()
      if step == config.num_steps or stop or store.is_due(step):
        reporter.flush()
        store.save(step, state, host)
      if config.eval_every_steps and (step % config.eval_every_steps == 0 or step == config.num_steps):
        reporter.flush()
        with board.paused():
          results = evaluate(config, setup, state.trainable)
          board.write(step, results)
        _LOG.info('step %d: %s', step, '  '.join(f'{name} {value:.4f}' for name, value in results.items()))
      if stop and step < config.num_steps:
        _LOG.warning('Stopped by a signal after step %d; run the same command again to go on.', step)
        break
  return results


class _Reporter:
  """Write a step's metrics while the next step runs; a thread waits for the device, so the loop does not and completion times are exact."""

  def __init__(self, config: TrainConfig, board: monitor.Monitor):
    self._config, self._board = config, board
    self._num_skipped = 0
    self._pending = None
    self._thread = ThreadPoolExecutor(1, 'metrics')

  def add(self, step: int, taken: Step, metrics: dict) -> None:
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
    data = self._config.data
    self._board.log_step(step, {
        **values, 'data/documents': taken.documents, 'data/dropped_documents': taken.num_dropped,
        'data/truncated_documents': taken.num_truncated,
        'data/fill_fraction': taken.num_tokens / (data.rows * data.micro_batches * data.length)}, taken.num_tokens, finished_s)
    self._num_skipped = self._num_skipped + 1 if values['train/skipped_steps'] else 0
    if self._num_skipped >= run_lib.MAX_SKIPPED_IN_A_ROW:
      raise RuntimeError(f'{self._num_skipped} steps in a row up to step {step} had a gradient that is not finite and were skipped; '
                         f'lower optimizer.learning_rate={self._config.optimizer.learning_rate} or look at the data of these steps.')

  def __enter__(self) -> _Reporter:
    return self

  def __exit__(self, kind, *_) -> None:
    try:
      if kind is None:
        self.flush()
    finally:
      self._thread.shutdown()


def evaluate(config: TrainConfig, setup: Setup, trainable: Params) -> dict[str, float]:
  """Return the held-out loss in nats per learned token, its perplexity, and the number of tokens, over `eval_documents` documents."""
  total = None
  with _loader(config, setup, 0, split='heldout') as loader:
    for taken in loader:
      for batch in taken.batches:
        metrics = setup.learner.evaluate(trainable, setup.frozen, batching.to_global(batch, setup.place))
        total = metrics if total is None else metrics_lib.merge(total, metrics)
      if config.eval_documents and taken.documents >= config.eval_documents:
        break
  values = metrics_lib.compute(total)
  return {'heldout/loss_nats': values['train/loss_nats'], 'heldout/perplexity': float(np.exp(values['train/loss_nats'])),
          'heldout/target_tokens': values['train/target_tokens']}


def _loader(config: TrainConfig, setup: Setup, position: int, split: str = 'train') -> Loader:
  """Open the data at a position; the held-out split is read once, in order, and its weights are sums so that steps add up."""
  is_train = split == 'train'
  template = chat.TEMPLATES[config.model.chat_template]
  data = config.data

  def stream(start: int) -> Iterator[records.Example]:
    return tasks.examples(setup.mixture, seed=config.seed, position=start, split=split, num_epochs=None if is_train else 1, shuffle=is_train)

  return Loader(
      stream, lambda example: encode(example, setup.tokenizer, template), rows=data.rows, length=data.length,
      micro_batches=data.micro_batches if is_train else 1, host_rows=batching.host_rows(setup.place, data.rows), position=position,
      overlong=data.overlong, aggregation=data.aggregation if is_train else 'token_sum')
