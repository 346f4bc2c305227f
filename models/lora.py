"""Low-rank adaptation (LoRA, arXiv:2106.09685; rank-stabilized scale, arXiv:2312.03732)."""

from __future__ import annotations

from collections.abc import Sequence
import fnmatch
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import params as params_lib
from models.params import ParamSpec
from models.sharding import Layout, LoraArray

TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


def is_trainable(name: str) -> bool:
  """Whether a leaf of a tree with LoraArrays is part of an adapter."""
  return name.endswith(('/a', '/b'))


def _targeted(name: str, targets: Sequence[str]) -> bool:
  return name.startswith('blocks/') and any(fnmatch.fnmatch(name.rsplit('/', 1)[-1], target) for target in targets)


def declare(specs, rank: int, targets: Sequence[str]):
  """Return {path: (a spec, b spec)} for the targeted weights; a is drawn, b starts at 0.

  Raises:
    ValueError: a target matches nothing, or the rank is not positive.
  """
  if rank < 1:
    raise ValueError(f'lora.rank={rank} must be at least 1.')
  found = {}
  named = [(name, spec) for name, spec in params_lib.named_leaves(specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec)) if spec.inputs]
  for target in targets:
    if not any(_targeted(name, [target]) for name, _ in named):
      raise ValueError(f'lora.targets: {target!r} matches no weight of the blocks; use some of {TARGETS}.')
  for name, spec in named:
    if _targeted(name, targets):
      end = max(spec.inputs) + 1
      depth = spec.shape[:1]
      found[name] = (
          ParamSpec((*depth, *spec.shape[1:end], rank), (None, *spec.axes[1:end], None), 'normal', spec.inputs),
          ParamSpec((*depth, rank, *spec.shape[end:]), (None, None, *spec.axes[end:]), 'zeros'),
      )
  return found


def attach(params, specs, *, rank: int, alpha: float, targets: Sequence[str], rank_stabilized: bool, seed: int, mesh: Mesh,
           layout: Layout, dtype: str = 'float32'):
  """Return the tree with a LoraArray in the place of every targeted weight; at first the model computes what it did before."""
  adapters = declare(specs, rank, targets)
  values = params_lib.init({name: {'a': a, 'b': b} for name, (a, b) in adapters.items()}, seed, mesh, layout, dtype)
  scale = alpha / (math.sqrt(rank) if rank_stabilized else rank)

  def leaf(name, weight):
    return LoraArray(weight, values[name]['a'], values[name]['b'], scale) if name in adapters else weight

  return params_lib.map_named(leaf, params)


def merge(params):
  """Return the tree with every LoraArray replaced by base + scale a b, in the base's dtype and sharding; call under a mesh."""

  def leaf(weight):
    if not isinstance(weight, LoraArray):
      return weight
    depth, rank = weight.a.shape[0], weight.a.shape[-1]
    update = jnp.einsum('LIR,LRO->LIO', weight.a.astype(jnp.float32).reshape(depth, -1, rank),
                        weight.b.astype(jnp.float32).reshape(depth, rank, -1)).reshape(weight.base.shape)
    return (weight.base.astype(jnp.float32) + weight.scale * update).astype(weight.base.dtype)

  return jax.tree.map(leaf, params, is_leaf=params_lib.is_lora)
