"""One declaration per parameter, and what is derived from it: values, abstract tree, shardings, counts, trainable parts.

A parameter tree is nested dicts. Layers are stacked on the leading axis of every leaf under `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from models import prng, quantize, sharding
from models.quantize import QuantArray
from models.sharding import Layout, LoraArray

Tree = Any


@dataclass(frozen=True)
class ParamSpec:
  """Shape, logical axes and initializer of one parameter.

  Attributes:
    shape: array shape.
    axes: a logical axis (or None) for each dimension.
    init: 'normal' draws with standard deviation fan_in ** -0.5; fan_in is the product of the dimensions named by `inputs`.
    inputs: which dimensions a matmul contracts.
  """
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  init: Literal['normal', 'zeros', 'ones']
  inputs: tuple[int, ...] = ()

  def __post_init__(self):
    if len(self.shape) != len(self.axes):
      raise ValueError(f'ParamSpec shape {self.shape} and axes {self.axes} differ in length.')


def _is_spec(leaf) -> bool:
  return isinstance(leaf, ParamSpec)


def path_name(path) -> str:
  """Return 'blocks/attention/q' for a key path."""
  return '/'.join(str(getattr(part, 'key', getattr(part, 'name', getattr(part, 'idx', part)))) for part in path)


def named_leaves(tree: Tree, is_leaf: Callable | None = None) -> Iterator[tuple[str, Any]]:
  """Yield (path name, leaf) in tree order."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
    yield path_name(path), leaf


def map_named(function: Callable, tree: Tree, *rest: Tree, is_leaf: Callable | None = None) -> Tree:
  """Map `function(name, leaf, *others)` over a tree."""
  return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_name(path), *leaves), tree, *rest, is_leaf=is_leaf)


def spec_shardings(specs: Tree, mesh: Mesh, layout: Layout) -> Tree:
  """Return the NamedSharding of every declared parameter.

  Raises:
    ValueError: a dimension does not divide over its mesh axes; the message names the parameter.
  """
  table = dict(layout.rules)

  def leaf(name, spec):
    partition = layout.spec(*spec.axes)
    for size, axis in zip(spec.shape, spec.axes):
      if axis in table:
        sharding.check_divides(f'parameter {name} {spec.shape}: axis {axis!r}', size, table[axis], mesh)
    return NamedSharding(mesh, partition)

  return map_named(leaf, specs, is_leaf=_is_spec)


def replicate_indivisible(layout: Layout, mesh: Mesh, num_kv_heads: int) -> Layout:
  """Return the layout with kv heads whole on every device when they do not divide over `tensor` (each shard then takes those it needs)."""
  if num_kv_heads % mesh.shape['tensor'] == 0:
    return layout
  rules = tuple((name, () if name == 'kv_heads' else axes) for name, axes in layout.rules)
  return Layout(**{**vars(layout), 'rules': rules})


def abstract(specs: Tree, mesh: Mesh, layout: Layout, dtype: str = 'float32') -> Tree:
  """Return ShapeDtypeStructs with shardings, of a float dtype or one of `quantize.KINDS`: what a checkpoint or weight file is restored to."""

  def leaf(name, spec, place):
    array = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(quantize.plain_dtype(dtype)), sharding=place)
    with jax.set_mesh(mesh):
      made = jax.eval_shape(lambda array: stored(array, name, spec, dtype), array)
    return jax.tree.map(lambda part: part.update(sharding=NamedSharding(mesh, part.sharding.spec)), made) if is_quantized(made) else array

  return map_named(leaf, specs, spec_shardings(specs, mesh, layout), is_leaf=_is_spec)


def stored(array: jax.Array, name: str, spec: ParamSpec, dtype: str) -> jax.Array | QuantArray:
  """Return a parameter as it is stored where the frozen ones are of `dtype`: a QuantArray if that is a kind of it and this a block's matrix."""
  if dtype not in quantize.KINDS or not name.startswith('blocks/') or not spec.inputs:
    return array
  # Blocks of values keep to axes that are not split over `fsdp`, which may have more devices than an axis has blocks.
  block_axis = max(axis for axis, logical in enumerate(spec.axes) if logical != 'embed') - len(spec.axes)
  return quantize.quantize(array, dtype, inputs=spec.inputs, block_axis=block_axis)


def init(specs: Tree, seed: int, mesh: Mesh, layout: Layout, dtype: str = 'float32') -> Tree:
  """Draw initial values straight into their shards; the key of each folds in its name, so adding one changes no other."""

  def leaf(name, spec):
    if spec.init == 'zeros':
      return jnp.zeros(spec.shape, dtype)
    if spec.init == 'ones':
      return jnp.ones(spec.shape, dtype)
    scale = math.prod(spec.shape[dim] for dim in spec.inputs) ** -0.5
    return (jax.random.normal(prng.stream_key(seed, f'init/{name}'), spec.shape, jnp.float32) * scale).astype(dtype)

  # One program a parameter: drawn together, all of their random bits would be alive at once.
  def make(name, spec, place):
    return jax.jit(lambda: leaf(name, spec), out_shardings=place)()

  with jax.set_mesh(mesh):
    return map_named(make, specs, spec_shardings(specs, mesh, layout), is_leaf=_is_spec)


def split(tree: Tree, is_trainable: Callable[[str], bool]) -> tuple[Tree, Tree]:
  """Return (trainable, frozen): the tree twice, with None at the places that belong to the other."""
  trainable = map_named(lambda name, leaf: leaf if is_trainable(name) else None, tree)
  frozen = map_named(lambda name, leaf: None if is_trainable(name) else leaf, tree)
  return trainable, frozen


def combine(trainable: Tree, frozen: Tree) -> Tree:
  """Undo `split`."""
  return jax.tree.map(lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda leaf: leaf is None)


def count(tree: Tree) -> int:
  """Return the number of values in a tree of arrays, abstract arrays or ParamSpecs."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree, is_leaf=_is_spec))


def is_lora(leaf) -> bool:
  return isinstance(leaf, LoraArray)


def is_quantized(leaf) -> bool:
  return isinstance(leaf, QuantArray)


def unstack(blocks: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
  """Return one tree per layer from the stacked `blocks`; the gradient is stacked in one pass.

  Differentiated as `leaf[layer]`, it would be a sum of as many padded arrays as layers, a tenth of a training step on CPU.
  """
  leaves, structure = jax.tree.flatten(blocks)
  layers = zip(*(_unstack_leaf(leaf) for leaf in leaves), strict=True)
  return tuple(jax.tree.unflatten(structure, layer) for layer in layers)


@jax.custom_vjp
def _unstack_leaf(leaf):
  return tuple(leaf[layer] for layer in range(leaf.shape[0]))


_unstack_leaf.defvjp(lambda leaf: (_unstack_leaf(leaf), None), lambda _, gradients: (jnp.stack(gradients),))
