"""Low-rank adaptation (LoRA, arXiv:2106.09685; rank-stabilized scale, arXiv:2312.03732)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import fnmatch
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import params as params_lib
from models import quantize
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


def scale_of(rank: int, alpha: float, rank_stabilized: bool) -> float:
  """Return the factor of a b: alpha / rank, or alpha / sqrt(rank) when rank-stabilized."""
  return alpha / (math.sqrt(rank) if rank_stabilized else rank)


def attach(params, specs, *, rank: int, alpha: float, targets: Sequence[str], rank_stabilized: bool, seed: int, mesh: Mesh,
           layout: Layout, dtype: str = 'float32'):
  """Return the tree with a LoraArray in the place of every targeted weight; at first the model computes what it did before."""
  values = params_lib.init(declare(specs, rank, targets), seed, mesh, layout, dtype)
  return beside(params, values, scale_of(rank, alpha, rank_stabilized))


def beside(params, adapters: Mapping[str, tuple], scale: float):
  """Return the tree with the adapters, {path: (a, b)} as of `declare`, beside their weights; leaves of any kind."""

  def leaf(name, weight):
    return LoraArray(weight, *adapters[name], scale) if name in adapters else weight

  return params_lib.map_named(leaf, params, is_leaf=params_lib.is_quantized)


def merge(params, dtype: str | None = None):
  """Return the tree with every LoraArray replaced by base + scale a b, and every QuantArray by what it stands for; call under a mesh.

  Args:
    dtype: of all weights; None leaves the base's, which is bfloat16 for a quantized one. A merged weight is never quantized again, which
      would round most of the update away.
  """

  def leaf(weight):
    is_lora = params_lib.is_lora(weight)
    base = weight.base if is_lora else weight
    is_quantized = params_lib.is_quantized(base)
    wanted = dtype or (quantize.PLAIN_DTYPE if is_quantized else base.dtype)
    if is_quantized:
      base = quantize.dequantize(base, jnp.float32)
    if is_lora:
      depth, rank = weight.a.shape[0], weight.a.shape[-1]
      update = jnp.einsum('LIR,LRO->LIO', weight.a.astype(jnp.float32).reshape(depth, -1, rank),
                          weight.b.astype(jnp.float32).reshape(depth, rank, -1)).reshape(base.shape)
      base = base.astype(jnp.float32) + weight.scale * update
    return base.astype(wanted)

  return jax.tree.map(leaf, params, is_leaf=lambda leaf: params_lib.is_lora(leaf) or params_lib.is_quantized(leaf))
