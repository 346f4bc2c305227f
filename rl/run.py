"""What every kind of run shares: the model and how it is laid out, what decides whether a checkpoint is this run's, and the signal to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
from dataclasses import dataclass
import hashlib
import math
from pathlib import Path
import signal
from typing import Any, Literal, NamedTuple, Protocol

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
import numpy as np

from models import chat, hf_weights, lora, sharding, token_order, transformer, weight_files
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import batching, checkpoint
from rl import config as config_lib
from rl import learner as learner_lib
from rl.batching import Place
from rl.checkpoint import CheckpointStore
from rl.types import HostState, Params

CHECKPOINTS = 'checkpoints'
MAX_SKIPPED_IN_A_ROW = 10
_FINGERPRINT_BYTES = 65_536


@dataclass(frozen=True)
class ModelSource:
  """The pretrained model.

  Attributes:
    path: a Hugging Face directory (config.json, safetensors, tokenizer files) or a .gguf file.
    chat_template: how messages become tokens, one of `chat.TEMPLATES`; 'plain' suits base models.
    frozen_dtype: of weights that are not trained (LoRA's base); trained ones are float32. 'int8' and 'nf4' quantize the matrices of the
      blocks (see `models.quantize`), and the rest is bfloat16.
  """
  path: str
  chat_template: str = 'plain'
  frozen_dtype: Literal['float32', 'bfloat16', 'int8', 'nf4'] = 'bfloat16'

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
  ulysses: int = 1
  tensor: int = 1


@dataclass(frozen=True)
class LayoutConfig:
  """How the model is computed; see `sharding.Layout`.

  Attributes:
    fsdp_splits: what of a batch the mesh axis `fsdp` splits, which splits parameters always: rows, or the length of rows where they are few
      and long.
  """
  attention: str = 'auto'
  remat: str = 'none'
  scan: bool = True
  compute_dtype: Literal['float32', 'bfloat16', 'float16'] = 'bfloat16'
  order: str = 'auto'
  mlp_chunk: int | None = None
  fsdp_splits: Literal['rows', 'length'] = 'rows'


def lay_out(settings: LayoutConfig, model: ModelConfig, mesh: Mesh) -> Layout:
  """Return the layout of a model on a mesh.

  Raises:
    ValueError: settings that are unknown or contradict the model.
  """
  fields = vars(settings) | {'order': 'contiguous'}
  layout = Layout(**{name: value for name, value in fields.items() if name != 'fsdp_splits'})
  if settings.fsdp_splits == 'length':
    changed = {'batch': ('data',), 'length': ('fsdp', *layout.length_axes)}
    layout = dataclasses.replace(layout, rules=tuple((name, changed.get(name, axes)) for name, axes in layout.rules))
  layout = params_lib.replicate_indivisible(layout, mesh, model.num_kv_heads)
  num_shards = math.prod(mesh.shape[axis] for axis in layout.ring_axes)
  return dataclasses.replace(layout, order=token_order.resolve(settings.order, model, num_shards))


class RunConfig(Protocol):
  """What the settings of every run have."""
  model: ModelSource
  mesh: MeshConfig
  layout: LayoutConfig


class OpenModel(NamedTuple):
  """A run's model before its parameters are loaded.

  Attributes:
    source: as it is stored.
    place: of batches.
  """
  tokenizer: Tokenizer
  source: ModelConfig
  mesh: Mesh
  layout: Layout
  place: Place


def open_model(config: RunConfig, *rows: int) -> OpenModel:
  """Return what a run computes with, as far as it is known without the parameters, for batches of so many `rows`.

  Raises:
    ValueError, FileNotFoundError: what is wrong with the tokenizer, the mesh or the layout, or rows that do not divide over the devices.
  """
  tokenizer = tokenizer_lib.load(config.model.path)
  source = weight_files.read_config(config.model.path)
  mesh = sharding.make_mesh(**vars(config.mesh))
  layout = lay_out(config.layout, source, mesh)
  place = Place.of(layout, mesh)
  for count in rows:
    batching.host_rows(place, count)
  return OpenModel(tokenizer, source, mesh, layout, place)


def model_fingerprint(path: str | Path) -> str:
  """Return a SHA-256 of the model's files: names, sizes, and the first and last 64 KiB of each, which is fast for any size."""
  path, digest = Path(path), hashlib.sha256()
  for file in [path] if path.is_file() else sorted(item for item in path.iterdir() if item.suffix in ('.json', '.safetensors', '.model')):
    digest.update(f'{file.name}:'.encode())
    digest_ends(file, digest)
  return digest.hexdigest()


def digest_ends(file: Path, digest: Any) -> None:
  """Add a file's size and its first and last 64 KiB to a digest of `hashlib`."""
  size = file.stat().st_size
  digest.update(f'{size}:'.encode())
  with file.open('rb') as stream:
    digest.update(stream.read(_FINGERPRINT_BYTES))
    stream.seek(max(size - _FINGERPRINT_BYTES, 0))
    digest.update(stream.read(_FINGERPRINT_BYTES))


def load_trainable(source: ModelSource, adapters: LoraConfig, seed: int, mesh: Mesh, layout: Layout) -> tuple[ModelConfig, Params, Params]:
  """Load the model and return (its config, trainable parameters, frozen parameters)."""
  is_lora = adapters.rank > 0
  model, tree = hf_weights.load(source.path, mesh, layout, source.frozen_dtype if is_lora else 'float32')
  if not is_lora:
    return model, *params_lib.split(tree, lambda name: True)
  tree = lora.attach(tree, transformer.declare(model), rank=adapters.rank, alpha=adapters.alpha, targets=adapters.targets,
                     rank_stabilized=adapters.rank_stabilized, seed=seed, mesh=mesh, layout=layout)
  return model, *params_lib.split(tree, lora.is_trainable)


def refuse_other_run(stored: HostState, now: HostState, workdir: Path, free: Sequence[str]) -> None:
  """Raise ValueError if the checkpoint belongs to a run of another model, other data or another objective.

  `free` are the beginnings of the config's keys that may differ.
  """
  changed = {key: values for key, values in config_lib.difference(now.config, stored.config).items() if not key.startswith(tuple(free))}
  changed |= {f'lineage.{key}': values for key, values in config_lib.difference(now.lineage, dict(stored.lineage)).items()}
  if changed:
    shown = '; '.join(f'{key}: {old!r} there, {new!r} now' for key, (old, new) in list(changed.items())[:5])
    raise ValueError(f'{workdir} holds a run that differs: {shown}. Use another --workdir, or the settings of that run.')


def begin(store: CheckpointStore, make_state: Callable[[], Any], host: HostState, workdir: Path, free: Sequence[str]) -> tuple[Any, HostState]:
  """Return the state and the host state to go on from: those of the newest checkpoint, or of a new run, `make_state()` and `host`.

  Of what `make_state` returns there must be no other reference, as there is none to what a learner's `init` donates: the restored state takes
  its memory.

  Raises:
    ValueError: as `refuse_other_run`, before a state is made; the checkpoint does not fit the state.
    RuntimeError: the checkpoint's files are damaged.
  """
  resumes = store.latest_step() is not None
  if resumes:
    refuse_other_run(checkpoint.read_host(store.directory), host, workdir, free)
  state = make_state()
  if not resumes:
    return state, host
  abstract = learner_lib.abstract_state(state)
  del state
  state, restored = store.restore(abstract)
  return state, dataclasses.replace(host, documents=restored.documents, progress=restored.progress)


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
  """Give a function that says, equally on all hosts, whether SIGTERM has asked to save and stop."""
  received = []
  try:
    previous = signal.signal(signal.SIGTERM, lambda *_: received.append(True))
  except ValueError as error:  # Only the main thread may handle signals.
    raise RuntimeError('A run must be started from the main thread, where SIGTERM can be handled.') from error

  def stopping() -> bool:
    if jax.process_count() == 1:
      return bool(received)
    return bool(np.any(multihost_utils.process_allgather(np.array(bool(received)))))

  try:
    yield stopping
  finally:
    signal.signal(signal.SIGTERM, previous)
