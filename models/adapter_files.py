"""LoRA adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors, with the names that `peft` gives their modules.

The files hold the adapters alone; `peft.PeftModel.from_pretrained` puts them over the base model in transformers. Layers, which are stacked
here, are tensors of their own there, and matrices are [outputs, inputs] as in every Hugging Face file.

Deliberately absent: reading such files, adapters of anything but the blocks' matrices, and modules that PEFT would keep whole beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import math
import os
from typing import Any

import numpy as np

from models import hf_weights, lora, sharding, transformer, weight_files
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from models.hf_weights import Piece
from models.sharding import LoraArray

CONFIG_FILE, WEIGHTS_FILE = 'adapter_config.json', 'adapter_model.safetensors'


def export(directory: str | os.PathLike, config: ModelConfig, params, *, base: str, rank_stabilized: bool, dtype: str = 'float32',
           overwrite: bool = False, tokenizer: tokenizer_lib.Tokenizer | None = None) -> int:
  """Write the adapters of a tree, and return how many values they have.

  Args:
    directory: to make; it may exist if it is empty.
    config: of the model.
    params: its tree with LoraArrays, whose bases are not read and may be None, as may all other leaves.
    base: the model that the adapters belong to, for `base_model_name_or_path`.
    rank_stabilized: which formula the files give for the scale (`lora.scale_of`); the product is the same.
    dtype: of the tensors in the file.
    overwrite: replace a directory that is not empty.
    tokenizer: its files are written too.

  Raises:
    FileExistsError: the directory is not empty.
    ValueError: there are no adapters, they differ in rank or scale, or they are not this model's.
  """
  if dtype not in sharding.DTYPES:
    raise ValueError(f'dtype={dtype!r} of the exported adapters is unknown; use one of {sharding.DTYPES}.')
  adapters = {name: leaf for name, leaf in params_lib.named_leaves(params, is_leaf=params_lib.is_lora) if params_lib.is_lora(leaf)}
  places = _places(config, adapters)
  table = _table(adapters, places, base, rank_stabilized)
  with hf_weights.new_directory(directory, overwrite) as partial:
    shapes = {name: shape for name, shape, _ in _tensors(adapters, places)}
    arrays = (_file_tensor(name, values, dtype) for name, _, values in _tensors(adapters, places))
    weight_files.write_safetensors(partial / WEIGHTS_FILE, shapes, np.dtype(dtype), arrays)
    (partial / CONFIG_FILE).write_text(json.dumps(table, indent=2) + '\n')
    if tokenizer is not None:
      tokenizer_lib.save(tokenizer, partial)
  return sum(math.prod(shape) for shape in shapes.values())


def _places(config: ModelConfig, adapters: dict[str, LoraArray]) -> dict[str, list[Piece]]:
  """Return the tensors of the base model under each adapter, layer by layer, after checking that they fit."""
  if not adapters:
    raise ValueError('the tree holds no adapters (LoraArray): it was trained whole, or they are merged; export the model itself.')
  settings = {(leaf.a.shape[-1], leaf.scale) for leaf in adapters.values()}
  if len(settings) > 1:
    raise ValueError(f'adapters of several ranks and scales {sorted(settings)} have no file of PEFT here; attach them with one of each.')
  specs = transformer.declare(config)
  wanted = lora.declare(specs, settings.pop()[0], lora.TARGETS)
  differ = [f'{name}: {leaf.a.shape} and {leaf.b.shape}' for name, leaf in adapters.items()
            if name not in wanted or (leaf.a.shape, leaf.b.shape) != tuple(spec.shape for spec in wanted[name])]
  if differ:
    raise ValueError(f'adapters are not those of this {config.family} configuration: {weight_files.some(differ)}; layers must be stacked.')
  named = dict(params_lib.named_leaves(specs, is_leaf=lambda leaf: isinstance(leaf, params_lib.ParamSpec)))
  return {name: hf_weights.locate(name, named[name], config, False) for name in adapters}


def _module(piece: Piece) -> str:
  return piece.name.removesuffix('.weight')


def _table(adapters: dict[str, LoraArray], places: dict[str, list[Piece]], base: str, rank_stabilized: bool) -> dict[str, Any]:
  """Return what adapter_config.json says."""
  leaf = next(iter(adapters.values()))
  rank = leaf.a.shape[-1]
  # Twelve digits: alpha is a plain number where the scale was computed from one.
  alpha = float(f'{leaf.scale / lora.scale_of(rank, 1.0, rank_stabilized):.12g}')
  return {
      'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': base, 'r': rank,
      'lora_alpha': int(alpha) if alpha.is_integer() else alpha, 'use_rslora': rank_stabilized,
      'target_modules': sorted({_module(piece).rsplit('.', 1)[-1] for pieces in places.values() for piece in pieces}),
      'lora_dropout': 0.0, 'bias': 'none', 'fan_in_fan_out': False, 'inference_mode': True}


def _tensors(adapters: dict[str, LoraArray], places: dict[str, list[Piece]]) -> Iterator[tuple[str, tuple[int, ...], np.ndarray]]:
  """Yield (name, shape, values as stored here, of that shape transposed) of every tensor."""
  for name, leaf in adapters.items():
    rank = leaf.a.shape[-1]
    a_LIR, b_LRO = (np.asarray(x).reshape(x.shape[0], *shape) for x, shape in ((leaf.a, (-1, rank)), (leaf.b, (rank, -1))))
    for piece in places[name]:
      for part, values in (('lora_A', a_LIR[piece.layer]), ('lora_B', b_LRO[piece.layer])):
        yield f'base_model.model.{_module(piece)}.{part}.weight', values.shape[::-1], values


def _file_tensor(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
  tensor = np.ascontiguousarray(values.T.astype(dtype))
  if not np.isfinite(tensor).all():
    raise ValueError(f'{name} has values that are not finite in {dtype}; export float32, or an earlier checkpoint of the run.')
  return tensor
