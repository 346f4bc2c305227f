"""A model to use: its parameters, tokenizer and chat template, from a pretrained model or from a run directory alike."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from models import hf_weights, lora, params as params_lib, tokenizer as tokenizer_lib, transformer, weight_files
from models.config import ModelConfig
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import checkpoint, config as config_lib
from rl.train import CHECKPOINTS, TrainConfig
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


def load(path: str | Path, mesh: Mesh, layout: Layout, dtype: str, step: int | None = None) -> Policy:
  """Load a Hugging Face directory, a .gguf file, or a run directory at `step` (default: its newest checkpoint).

  Raises:
    FileNotFoundError: the path or the step is not there.
    ValueError: `step` for something that is no run, or what the loaders refuse.
  """
  path = Path(path)
  if not (path / CHECKPOINTS).is_dir():
    if step is not None:
      raise ValueError(f'step={step} was asked of {path}, which has no {CHECKPOINTS} directory; leave it out for a pretrained model.')
    config, params = hf_weights.load(path, mesh, layout, dtype)
    return Policy(config, params, tokenizer_lib.load(path), 'plain')
  directory = path / CHECKPOINTS
  run = config_lib.build(TrainConfig, dict(checkpoint.read_host(directory, step).config))
  config = weight_files.read_config(run.model.path)
  place = params_lib.replicate_indivisible(layout, mesh, config.num_kv_heads)
  specs = transformer.declare(config)
  if run.lora.rank:
    _, base = hf_weights.load(run.model.path, mesh, layout, run.model.frozen_dtype)
    tree = lora.attach(base, specs, rank=run.lora.rank, alpha=run.lora.alpha, targets=run.lora.targets,
                       rank_stabilized=run.lora.rank_stabilized, seed=run.seed, mesh=mesh, layout=place)
    adapters, frozen = params_lib.split(tree, lora.is_trainable)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), adapters)
    tree = params_lib.combine(checkpoint.read_params(directory, abstract, step), frozen)
    with jax.set_mesh(mesh):
      params = lora.merge(tree)
  else:
    params = checkpoint.read_params(directory, params_lib.abstract(specs, mesh, place), step)
  params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
  return Policy(config, params, tokenizer_lib.load(run.model.path), run.model.chat_template)
