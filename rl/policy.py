"""A model to use: its parameters, tokenizer and chat template, from a pretrained model or from a run directory alike."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from models import hf_weights, lora, transformer, weight_files
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import checkpoint, learner, phases
from rl import config as config_lib
from rl.phases import Phase
from rl.run import CHECKPOINTS, LoraConfig, ModelSource, load_trainable, model_fingerprint
from rl.types import Params


class Policy(NamedTuple):
  """What `load` returns; adapters are merged.

  Attributes:
    chat_template: of the run that trained it, or 'plain'.
  """
  config: ModelConfig
  params: Params
  tokenizer: Tokenizer
  chat_template: str


class Adapters(NamedTuple):
  """What `load_adapters` returns.

  Attributes:
    params: the model's tree with LoraArrays whose base is None, and None for all else.
    base: path of the pretrained model they belong to.
  """
  config: ModelConfig
  params: Params
  settings: LoraConfig
  base: str


class _Run(NamedTuple):
  """What a run of any stage was trained from.

  Attributes:
    phase: of a supervised run, that of the checkpoint.
  """
  model: ModelSource
  lora: LoraConfig
  seed: int
  phase: Phase | None

  def extend(self, config: ModelConfig) -> ModelConfig:
    """Return the model's configuration as it was trained."""
    return config if self.phase is None else self.phase.extend(config)


def load(path: str | Path, mesh: Mesh, layout: Layout, dtype: str, step: int | None = None) -> Policy:
  """Load a Hugging Face directory, a .gguf file, or a run directory at `step` (default: its newest checkpoint).

  Raises:
    FileNotFoundError: the path or the step is not there.
    ValueError: `step` for something that is no run, or what the loaders refuse.
  """
  run = _read_run(path, step)
  tokenizer = load_tokenizer(path)
  config, params = load_params(path, mesh, layout, dtype, step)
  return Policy(config, params, tokenizer, run.model.chat_template if run else 'plain')


def load_tokenizer(path: str | Path) -> Tokenizer:
  """Load the tokenizer of a model or a run; raises as `load`."""
  run = _read_run(path, None)
  if run:
    path = run.model.path
  path = Path(path)
  return tokenizer_lib.load(path.parent if path.suffix == '.safetensors' else path)


def read_config(path: str | Path, step: int | None = None) -> ModelConfig:
  """Return the configuration of a model or a run without its parameters; raises as `load`."""
  run = _read_run(path, step)
  return weight_files.read_config(path) if run is None else run.extend(weight_files.read_config(run.model.path))


def fingerprint(path: str | Path) -> str:
  """Return a SHA-256 of what decides the parameters: a model's files, or the configuration, lineage and newest step of a run."""
  directory = Path(path) / CHECKPOINTS
  if not directory.is_dir():
    return model_fingerprint(path)
  host = checkpoint.read_host(directory)
  what = [checkpoint.committed_steps(directory)[-1], host.config, host.lineage]
  return hashlib.sha256(json.dumps(what, sort_keys=True, default=dict).encode()).hexdigest()


def load_params(path: str | Path, mesh: Mesh, layout: Layout, dtype: str, step: int | None = None) -> tuple[ModelConfig, Params]:
  """Load only (config, parameters); arguments and errors as `load`."""
  run = _read_run(path, step)
  if run is None:
    return hf_weights.load(path, mesh, layout, dtype)
  directory = Path(path) / CHECKPOINTS
  config = run.extend(weight_files.read_config(run.model.path))
  layout = params_lib.replicate_indivisible(layout, mesh, config.num_kv_heads)
  if run.lora.rank == 0:
    params = checkpoint.read_params(directory, params_lib.abstract(transformer.declare(config), mesh, layout), step)
    return config, jax.tree.map(lambda leaf: leaf.astype(dtype), params)
  _, adapters, frozen = load_trainable(run.model, run.lora, run.seed, mesh, layout)
  adapters = checkpoint.read_params(directory, learner.abstract_state(adapters), step)
  with jax.set_mesh(mesh):
    return config, lora.merge(params_lib.combine(adapters, frozen), dtype)


def load_adapters(path: str | Path, mesh: Mesh, layout: Layout, step: int | None = None) -> Adapters:
  """Load only the adapters of a run, at `step` (default: its newest checkpoint); the base is not read.

  Raises:
    FileNotFoundError: the path or the step is not there.
    ValueError: no run, or one that trained every parameter.
  """
  run = _read_run(path, step)
  if run is None:
    raise ValueError(f'{path} is no run directory ({CHECKPOINTS} is missing), so it has no adapters; only a run with lora.rank > 0 has.')
  if run.lora.rank == 0:
    raise ValueError(f'{path} is a run that trained every parameter (lora.rank=0) and has no adapters; export its whole model instead.')
  config = run.extend(weight_files.read_config(run.model.path))
  layout = params_lib.replicate_indivisible(layout, mesh, config.num_kv_heads)
  specs, settings = transformer.declare(config), run.lora
  tree = lora.beside(params_lib.abstract(specs, mesh, layout),
                     params_lib.abstract(lora.declare(specs, settings.rank, settings.targets), mesh, layout),
                     lora.scale_of(settings.rank, settings.alpha, settings.rank_stabilized))
  trainable, _ = params_lib.split(tree, lora.is_trainable)
  return Adapters(config, checkpoint.read_params(Path(path) / CHECKPOINTS, trainable, step), settings, run.model.path)


def _read_run(path: str | Path, step: int | None) -> _Run | None:
  """Return what a run directory was trained from, or None for a pretrained model."""
  directory = Path(path) / CHECKPOINTS
  if directory.is_dir():
    config = checkpoint.read_host(directory, step).config
    step = checkpoint.committed_steps(directory)[-1] if step is None else step
    return _Run(config_lib.build(ModelSource, config['model'], 'config.model'), config_lib.build(LoraConfig, config['lora'], 'config.lora'),
                config['seed'], phases.at(phases.of_run(config), step) if config['stage'] == 'supervised' else None)
  if step is not None:
    raise ValueError(f'step={step} was asked of {path}, which has no {CHECKPOINTS} directory; leave it out for a pretrained model.')
  return None
