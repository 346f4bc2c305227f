"""A smaller model made of some layers of a larger one: where a student of distillation starts.

Embedding, final norm and output head are the teacher's; so is all of each layer that stays, its kind (local or global attention) included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from models import params as params_lib
from models import presets
from models.config import ModelConfig


def check_layers(layers: Sequence[int], num_layers: int) -> None:
  """Raise ValueError if there are no layers, or their numbers do not increase or are not those of a model of `num_layers`."""
  if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < num_layers:
    raise ValueError(f'layers={tuple(layers)} must be increasing numbers of layers from 0 to {num_layers - 1}, at least one.')


def slice_layers(params: Any, config: ModelConfig, layers: Sequence[int]) -> tuple[Any, ModelConfig]:
  """Return (params, config) of the model that has only these layers, in this order (arXiv:1910.01108 sec. 3).

  Args:
    params: of the whole model, layers stacked, adapters merged.
    layers: numbers from 0, increasing.

  Raises:
    ValueError: no layers, or numbers that do not increase or are not the model's; adapters.
  """
  chosen = tuple(layers)
  check_layers(chosen, config.num_layers)
  adapted = [name for name, leaf in params_lib.named_leaves(params, is_leaf=params_lib.is_lora) if params_lib.is_lora(leaf)]
  if adapted:
    raise ValueError(f'{adapted[0]} has adapters beside it (LoraArray); merge them first (lora.merge).')
  kinds = [config.layer_kind(layer) for layer in chosen]
  blocks = jax.tree.map(lambda leaf: jnp.stack([leaf[layer] for layer in chosen]), params['blocks'])
  return {**params, 'blocks': blocks}, replace(config, num_layers=len(chosen), layer_pattern=presets.shortest_pattern(kinds))
