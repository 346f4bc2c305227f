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
import hashlib
import logging
from pathlib import Path
import signal
import time
from typing import Any, Literal

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
import numpy as np

from models import chat, hf_weights, lora, sharding, transformer
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import batching, checkpoint, monitor, optimizer
from rl import config as config_lib
from rl import learner as learner_lib
from rl import metrics as metrics_lib
from rl.data import records, tasks
from rl.data.loader import Loader, Step
from rl.learner import Learner
from rl.optimizer import OptimizerConfig
from rl.types import Document, HostState, Params

_LOG = logging.getLogger(__name__)
CHECKPOINTS = 'checkpoints'
MAX_SKIPPED_IN_A_ROW = 10
_FINGERPRINT_BYTES = 65_536
# What a resumed run may change; everything else decides what is computed.
_FREE_ON_RESUME = ('num_steps', 'checkpoint_every_steps', 'checkpoints_kept', 'eval_every_steps', 'eval_documents', 'cpu_devices', 'mesh.',
                   'layout.')


@dataclass(frozen=True)
class ModelSource:
  """The pretrained model.

  Attributes:
    path: a Hugging Face directory (config.json, safetensors, tokenizer files) or a .gguf file.
    chat_template: how messages become tokens, one of `chat.TEMPLATES`; 'plain' suits base models.
    frozen_dtype: of weights that are not trained (LoRA's base); trained ones are float32.
  """
  path: str
  chat_template: str = 'plain'
  frozen_dtype: Literal['float32', 'bfloat16'] = 'bfloat16'

  def __post_init__(self):
    if self.chat_template not in chat.TEMPLATES:
      raise ValueError(f'chat_template={self.chat_template!r} is unknown; use one of {", ".join(chat.TEMPLATES)}.')


@dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters.

  Attributes:
    rank: 0 trains all parameters instead.
    alpha: the update is scaled by alpha / rank, or alpha / sqrt(rank) when rank_stabilized.
    targets: weights of the blocks that get an adapter.
  """
  rank: int = 0
  alpha: float = 16.0
  targets: tuple[str, ...] = lora.TARGETS
  rank_stabilized: bool = True

  def __post_init__(self):
    if self.rank < 0:
      raise ValueError(f'rank={self.rank} must be 0 (train everything) or positive.')


@dataclass(frozen=True)
class MeshConfig:
  """Devices along each mesh axis; one may be -1 for the rest."""
  data: int = 1
  fsdp: int = -1
  seq: int = 1
  tensor: int = 1


@dataclass(frozen=True)
class LayoutConfig:
  """How the model is computed; see `sharding.Layout`."""
  attention: str = 'auto'
  remat: str = 'none'
  scan: bool = True
  compute_dtype: Literal['float32', 'bfloat16', 'float16'] = 'bfloat16'


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
  place: NamedSharding
  learner: Learner
  frozen: Params
  mixture: Any
  lineage: dict[str, Any]


def encode(example: records.Example, tokenizer: Tokenizer, template: chat.Template) -> Document:
  """Render an example; what the assistant says is learned, its end-of-turn token included."""
  rendered = chat.render(example.messages, tokenizer, template)
  return Document(rendered.tokens_T, chat.loss_mask_T(rendered), example.source)


def model_fingerprint(path: str | Path) -> str:
  """Return a SHA-256 of the model's files: names, sizes, and the first and last 64 KiB of each, which is fast for any size."""
  path, digest = Path(path), hashlib.sha256()
  for file in [path] if path.is_file() else sorted(item for item in path.iterdir() if item.suffix in ('.json', '.safetensors', '.model')):
    size = file.stat().st_size
    digest.update(f'{file.name}:{size}:'.encode())
    with file.open('rb') as stream:
      digest.update(stream.read(_FINGERPRINT_BYTES))
      stream.seek(max(size - _FINGERPRINT_BYTES, 0))
      digest.update(stream.read(_FINGERPRINT_BYTES))
  return digest.hexdigest()


def load_trainable(config: TrainConfig, mesh: Mesh, layout: Layout) -> tuple[ModelConfig, Params, Params]:
  """Load the model and return (its config, trainable parameters, frozen parameters)."""
  is_lora = config.lora.rank > 0
  model, tree = hf_weights.load(config.model.path, mesh, layout, config.model.frozen_dtype if is_lora else 'float32')
  if not is_lora:
    return model, *params_lib.split(tree, lambda name: True)
  tree = lora.attach(tree, transformer.declare(model), rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets,
                     rank_stabilized=config.lora.rank_stabilized, seed=config.seed, mesh=mesh, layout=layout)
  return model, *params_lib.split(tree, lora.is_trainable)


def set_up(config: TrainConfig) -> tuple[Setup, Params]:
  """Check everything a run needs and return it with the initial trainable parameters.

  Raises:
    ValueError, FileNotFoundError: what is wrong with the data, the mesh, the layout or the model.
  """
  mixture = tasks.build_mixture(tasks.MixtureConfig(config.data.tasks, config.data.rates))
  tokenizer = tokenizer_lib.load(config.model.path)
  mesh = sharding.make_mesh(**vars(config.mesh))
  layout = Layout(**vars(config.layout))
  place = NamedSharding(mesh, layout.spec('batch', 'length'))
  batching.host_rows(place, config.data.rows)
  sharding.check_divides('data.length', config.data.length, ('seq',), mesh)
  model, trainable, frozen = load_trainable(config, mesh, layout)
  layout = params_lib.replicate_indivisible(layout, mesh, model.num_kv_heads)
  learner = learner_lib.build(
      model, layout, mesh, optimizer.build(config.optimizer, config.num_steps), optimizer.schedule(config.optimizer, config.num_steps),
      full=config.lora.rank == 0)
  lineage = {'model': model_fingerprint(config.model.path), 'tokenizer': tokenizer.fingerprint, 'data': tasks.fingerprint(mixture)}
  return Setup(model, tokenizer, layout, mesh, place, learner, frozen, mixture, lineage), trainable


def run(config: TrainConfig, workdir: str | Path) -> dict[str, float]:
  """Train to `num_steps`, from the newest checkpoint in `workdir` if there is one; return the last evaluation (or {}).

  Raises:
    ValueError, FileNotFoundError: bad configuration, data or model; a checkpoint of another run.
    RuntimeError: files that cannot be written, or `MAX_SKIPPED_IN_A_ROW` steps without a finite gradient.
  """
  workdir = Path(workdir)
  setup, trainable = set_up(config)
  resolved = config_lib.to_json(config)
  state = setup.learner.init(trainable)
  with contextlib.ExitStack() as stack:
    store = stack.enter_context(checkpoint.CheckpointStore(
        workdir / CHECKPOINTS, every_steps=config.checkpoint_every_steps, keep=config.checkpoints_kept))
    host = HostState(0, config.seed, resolved, monitor.code_revision(), setup.lineage)
    if store.latest_step() is not None:
      abstract = learner_lib.abstract_state(state)
      del state, trainable  # Their memory is the restored state's.
      _refuse_other_run(checkpoint.read_host(store.directory), host, workdir)
      state, restored = store.restore(abstract)
      host = HostState(restored.documents, config.seed, resolved, host.revision, host.lineage)
    first_step = int(state.step)
    defaults = TrainConfig(ModelSource(config.model.path), DataConfig(config.data.tasks), config.num_steps)
    monitor.write_config(workdir, resolved, config_lib.difference(config, defaults))
    board = stack.enter_context(monitor.Monitor(
        workdir, total_steps=config.num_steps, start_step=first_step,
        flops_per_token=transformer.num_flops_per_token(setup.model, config.data.length, 1.0 if config.lora.rank == 0 else 0.0),
        peak_flops=monitor.measure_matmul_peak(config.layout.compute_dtype) * jax.process_count()))
    stopping = stack.enter_context(_stop_signal())
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
    if self._num_skipped >= MAX_SKIPPED_IN_A_ROW:
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


def _refuse_other_run(stored: HostState, now: HostState, workdir: Path) -> None:
  """Raise ValueError if the checkpoint belongs to another model, other data or another objective."""
  changed = {key: values for key, values in config_lib.difference(now.config, stored.config).items()
             if not key.startswith(_FREE_ON_RESUME)}
  changed |= {f'lineage.{key}': values for key, values in config_lib.difference(now.lineage, dict(stored.lineage)).items()}
  if changed:
    shown = '; '.join(f'{key}: {old!r} there, {new!r} now' for key, (old, new) in list(changed.items())[:5])
    raise ValueError(f'{workdir} holds a run that differs: {shown}. Use another --workdir, or the settings of that run.')


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
  """Give a function that says, equally on all hosts, whether SIGTERM has asked to save and stop."""
  received = []
  try:
    previous = signal.signal(signal.SIGTERM, lambda *_: received.append(True))
  except ValueError as error:  # Only the main thread may handle signals.
    raise RuntimeError('rl.train.run must be called from the main thread, where SIGTERM can be handled.') from error

  def stopping() -> bool:
    if jax.process_count() == 1:
      return bool(received)
    return bool(np.any(multihost_utils.process_allgather(np.array(bool(received)))))

  try:
    yield stopping
  finally:
    signal.signal(signal.SIGTERM, previous)
