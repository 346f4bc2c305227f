"""Meshes, layouts, and the two functions through which every weight meets an activation.

A `Layout` says how a model is computed: one table from logical to mesh axes, the attention kernel, rematerialization, precision. It is a
frozen static argument and is passed, never ambient: two traces under different ambient rules would share one jit cache entry.

Mesh axes are explicit, so the type of every array carries its sharding. `einsum` reads it to see that a weight is split over `fsdp` and
gathers it; gradients come back with the parameters' shardings, and a wrong layout is an error at trace time.

What XLA's CPU backend teaches (measured): a bf16 dot is native only when it is asked for a float32 result, in backward too. Left to JAX,
the transposed dots get float32 cotangents and fall off that path (2x slower), so the linear map has its own backward.

Leaves of a parameter tree are arrays, `QuantArray`s or `LoraArray`s; only this file and the MLP in chunks (`layers`) look inside. The
algorithms that make them are `quantize`'s and `lora`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import functools
import math
import string

from flax import struct
import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from models.quantize import QuantArray, dequantize

# Slow networks first: neighbors in the last axis talk the most. `seq` and `ulysses` split the length of rows: around a ring of `seq`, and
# over `ulysses` by exchanging tokens for heads (see `ring_attention`).
AXES = ('data', 'fsdp', 'seq', 'ulysses', 'tensor')
DTYPES = ('float32', 'bfloat16', 'float16')

Rules = tuple[tuple[str, tuple[str, ...]], ...]

_RULES: Rules = (
    ('batch', ('data', 'fsdp')),
    ('length', ('seq', 'ulysses')),
    ('act_heads', ('tensor',)),
    ('act_mlp', ('tensor',)),
    ('act_vocab', ('tensor',)),
    # Rows that one device cannot hold need parameters split over the devices that share them, too.
    ('embed', ('fsdp', 'seq', 'ulysses')),
    ('heads', ('tensor',)),
    ('kv_heads', ('tensor',)),
    ('mlp', ('tensor',)),
    ('vocab', ('tensor',)),
)


@dataclass(frozen=True)
class Layout:
  """How a model is computed; what it computes is `ModelConfig`'s.

  Attributes:
    rules: logical axis -> mesh axes; an axis not listed is not split.
    attention: kernel, one of `attention.KERNELS`, or 'auto' for the best one here.
    remat: what backward keeps of a block: 'none' keeps everything, 'full' only the block's input, else a comma list of names from
      `transformer.CHECKPOINT_NAMES`; 'offload', alone or in the list, keeps the input in the host's memory.
    scan: run the stacked layers under `lax.scan` (compile time independent of depth); False unrolls them.
    compute_dtype: of matmul operands and the residual stream; softmax, norms' statistics, logprobs and losses are float32 always.
    order: in which order the tokens of a row lie where its length is split, one of `token_order.ORDERS`.
    mlp_chunk: most tokens of a device that the MLP handles at once, so that its wide intermediates never exist for all; None is no limit.
  """
  rules: Rules = _RULES
  attention: str = 'auto'
  remat: str = 'none'
  scan: bool = True
  compute_dtype: str = 'float32'
  order: str = 'contiguous'
  mlp_chunk: int | None = None

  def __post_init__(self):
    if self.mlp_chunk is not None and self.mlp_chunk < 1:
      raise ValueError(f'layout.mlp_chunk={self.mlp_chunk} must be at least 1 token, or None for no limit.')
    if self.compute_dtype not in DTYPES:
      raise ValueError(f'layout.compute_dtype={self.compute_dtype!r} is unknown; use one of {DTYPES}.')
    for logical, axes in self.rules:
      if set(axes) - set(AXES):
        raise ValueError(f'layout.rules: {logical!r} -> {axes} names an unknown mesh axis; use some of {AXES}.')

  def spec(self, *logical: str | None) -> P:
    """Return the partition of an array with these logical axes.

    Raises:
      ValueError: two of the axes would use the same mesh axis.
    """
    table = dict(self.rules)
    parts = [table.get(name, ()) if name is not None else () for name in logical]
    used = [axis for part in parts for axis in part]
    if len(used) != len(set(used)):
      raise ValueError(f'layout.rules put one mesh axis twice on an array with axes {logical}: {parts}; change one of the rules.')
    return P(*(part if len(part) > 1 else (part[0] if part else None) for part in parts))

  @property
  def dtype(self) -> jnp.dtype:
    return jnp.dtype(self.compute_dtype)

  @property
  def length_axes(self) -> tuple[str, ...]:
    """The mesh axes that split the length of rows."""
    return dict(self.rules).get('length', ())

  @property
  def ring_axes(self) -> tuple[str, ...]:
    """Those of them that keys and values travel around."""
    return tuple(axis for axis in self.length_axes if axis != 'ulysses')


TRAIN = Layout()
# Decoding splits rows over every axis but `tensor`, and keeps weights whole over `fsdp`: gathering them for each token would dominate.
ROLLOUT = Layout(rules=tuple(
    (name, ('data', 'fsdp', 'seq', 'ulysses') if name == 'batch' else () if name in ('length', 'embed') else axes) for name, axes in _RULES))
# Where one device cannot hold the keys and values of a long sequence, they are split over the axes that split its length in training.
LONG_ROLLOUT = Layout(rules=tuple((dict(_RULES) | {'length': (), 'embed': (), 'cache': ('seq', 'ulysses')}).items()))


def make_mesh(*, data: int = 1, fsdp: int = 1, seq: int = 1, ulysses: int = 1, tensor: int = 1,
              devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Arrange devices (default: all) in a mesh with explicit axes `AXES`; one size may be -1 for "the rest".

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = dict(zip(AXES, (data, fsdp, seq, ulysses, tensor)))
  shown = ' x '.join(f'{name}={size}' for name, size in sizes.items())
  free = [name for name, size in sizes.items() if size == -1]
  known = math.prod(size for size in sizes.values() if size != -1)
  if len(free) > 1 or known < 1 or min(sizes.values()) < -1 or 0 in sizes.values():
    raise ValueError(f'mesh {shown} is not a mesh; sizes are positive, and at most one may be -1 for the rest.')
  if free and len(devices) % known == 0:
    sizes[free[0]] = len(devices) // known
  if math.prod(sizes.values()) != len(devices):
    raise ValueError(f'mesh {shown} does not match the {len(devices)} devices here ({devices[0].platform}); the sizes must multiply to '
                     f'{len(devices)}. On CPU, --config.cpu_devices=N simulates N devices.')
  return arrange(devices, sizes)


def arrange(devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> Mesh:
  """Return the mesh of these sizes along `AXES`, the axes along the devices' links, slices as `within_slice` says.

  Raises:
    ValueError: the sizes cannot be laid along the links, or what `within_slice` refuses.
  """
  # Devices tell their slice only where there are several.
  num_slices = len({getattr(device, 'slice_index', 0) for device in devices})
  inner = tuple(within_slice(sizes, num_slices).values())
  outer = tuple(size // part for size, part in zip(sizes.values(), inner))
  try:
    if num_slices > 1:
      placed = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    else:
      placed = mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True)
  except (NotImplementedError, TypeError, ValueError) as error:  # What JAX raises where it finds no way.
    raise ValueError(f'mesh {dict(sizes)} cannot be laid along the links of {len(devices)} {devices[0].device_kind} devices; use powers of two, '
                     'or sizes that divide the sides of the topology.') from error
  return Mesh(placed, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def within_slice(sizes: Mapping[str, int], num_slices: int) -> dict[str, int]:
  """Return the sizes of a mesh within one slice: slices are told apart along the first axis that they divide.

  Raises:
    ValueError: they divide none.
  """
  axis = next((axis for axis, size in sizes.items() if size % num_slices == 0), None)
  if axis is None:
    shown = ' x '.join(f'{name}={size}' for name, size in sizes.items())
    raise ValueError(f'mesh {shown} has no axis that divides over slices={num_slices}; make data or fsdp a multiple of it.')
  return dict(sizes) | {axis: sizes[axis] // num_slices}


def current_mesh() -> Mesh:
  """Return the mesh set by `jax.set_mesh`.

  Raises:
    RuntimeError: none is set; a model is always computed on a mesh, if only of one device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or tuple(mesh.axis_names) != AXES:
    raise RuntimeError(f'No mesh with axes {AXES} is set (got {mesh.axis_names}); compute inside `with jax.set_mesh(sharding.make_mesh()):`.')
  return mesh


def check_divides(name: str, size: int, axes: Sequence[str], mesh: Mesh) -> None:
  """Raise ValueError if `size` does not split evenly over the mesh axes."""
  shards = math.prod(mesh.shape[axis] for axis in axes)
  if size % shards:
    raise ValueError(f'{name}={size} does not divide over mesh axes {tuple(axes)} of {shards} shards; '
                     f'use a multiple of {shards} or a smaller mesh.')


@struct.dataclass
class LoraArray:
  """A weight W plus a low-rank update: W + scale a b (arXiv:2106.09685 eq. 3).

  Attributes:
    base: the frozen weight, its input axes first; an array or a QuantArray.
    a: [*inputs, R].
    b: [R, *outputs].
    scale: alpha / R, or alpha / sqrt(R) when rank-stabilized (arXiv:2312.03732).
  """
  base: jax.Array | QuantArray
  a: jax.Array
  b: jax.Array
  scale: float = struct.field(pytree_node=False)


def constrain(x: jax.Array, layout: Layout, *logical: str | None) -> jax.Array:
  """Give `x` the sharding of these logical axes."""
  return jax.reshard(x, layout.spec(*logical))


def einsum(expression: str, x: jax.Array, weight: jax.Array | QuantArray | LoraArray, layout: Layout, *out_axes: str | None) -> jax.Array:
  """Multiply an activation by a weight; the result has logical axes `out_axes` and the layout's compute dtype.

  Operands are cast to the compute dtype, sums are float32, a weight split over the batch's mesh axes is gathered, and its gradient is
  reduced straight to the weight's own sharding and dtype. A QuantArray has no gradient.
  """
  if isinstance(weight, LoraArray):
    inputs, rest = expression.split(',')
    letters, outputs = rest.split('->')
    contracted = ''.join(c for c in letters if c in inputs)
    kept = ''.join(c for c in letters if c not in inputs)
    batch = ''.join(c for c in inputs if c not in contracted)
    axes = tuple(out_axes[outputs.index(c)] for c in batch)
    low = einsum(f'{inputs},{contracted}R->{batch}R', x, weight.a, layout, *axes, None)
    update = einsum(f'{batch}R,R{kept}->{outputs}', low, weight.b, layout, *out_axes)
    return einsum(expression, x, jax.lax.stop_gradient(weight.base), layout, *out_axes) + update * jnp.asarray(weight.scale, update.dtype)
  return _linear(expression, layout.spec(*out_axes), x.astype(layout.dtype), weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(expression, out_spec, x, weight):
  return _dot(expression, x, _ready(weight, x.dtype), out_spec).astype(x.dtype)


def _linear_forward(expression, out_spec, x, weight):
  return _linear(expression, out_spec, x, weight), (x, weight)


def _linear_backward(expression, out_spec, saved, gradient):
  del out_spec
  x, weight = saved
  inputs, rest = expression.split(',')
  letters, outputs = rest.split('->')
  gradient = gradient.astype(x.dtype)
  is_quantized = isinstance(weight, QuantArray)
  if is_quantized:
    # Ties the weight to the gradient, so that it is not forward's that is kept.
    weight, gradient = jax.lax.optimization_barrier((weight, gradient))
  dx = _dot(f'{outputs},{letters}->{inputs}', gradient, _ready(weight, x.dtype), jax.typeof(x).sharding.spec)
  if is_quantized:
    return dx.astype(x.dtype), None
  dweight = _dot(f'{inputs},{outputs}->{letters}', x, gradient, jax.typeof(weight).sharding.spec)
  return dx.astype(x.dtype), dweight.astype(weight.dtype)


_linear.defvjp(_linear_forward, _linear_backward)


def _ready(weight: jax.Array | QuantArray, dtype) -> jax.Array:
  """Return a weight as a matmul takes it; a quantized one travels as it is stored."""
  if isinstance(weight, QuantArray):
    return dequantize(jax.tree.map(gathered, weight), dtype)
  return gathered(weight.astype(dtype))


def _dot(expression, a, b, spec):
  # jnp.einsum contracts letters in alphabetical order; any order but the operand's own makes XLA transpose the whole weight.
  letters = {old: new for new, old in zip(string.ascii_letters, dict.fromkeys(c for c in expression if c.isalpha()))}
  expression = ''.join(letters.get(c, c) for c in expression)
  return jnp.einsum(expression, a, b, preferred_element_type=jnp.float32, out_sharding=spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def take_rows(table_VD: jax.Array, ids: jax.Array, out_spec: P) -> jax.Array:
  """Return table_VD[ids] with the partition `out_spec`; the gradient is summed in float32 and has the table's sharding and dtype.

  XLA's CPU backend has no 16-bit gather and converts the whole table to float32 first, so 16-bit rows are fetched as integers.
  """
  whole = gathered(table_VD)
  if whole.dtype.itemsize != 2:
    return whole.at[ids].get(out_sharding=out_spec)
  bits = jax.lax.bitcast_convert_type(whole, jnp.uint16).at[ids].get(out_sharding=out_spec)
  return jax.lax.bitcast_convert_type(bits, whole.dtype)


def _take_rows_forward(table_VD, ids, out_spec):
  return take_rows(table_VD, ids, out_spec), (table_VD, ids)


def _take_rows_backward(out_spec, saved, gradient):
  del out_spec
  table_VD, ids = saved
  spec = jax.typeof(table_VD).sharding.spec
  # Summed where the rows are, then given to the table's owners.
  whole = _whole_spec(spec)
  zeros = jnp.zeros(table_VD.shape, jnp.float32, out_sharding=whole)
  total = zeros.at[ids].add(gradient.astype(jnp.float32), out_sharding=whole)
  return jax.reshard(total, spec).astype(table_VD.dtype), None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def gathered(weight: jax.Array) -> jax.Array:
  """Return a weight whole over every mesh axis but `tensor`, as a computation needs it."""
  spec = jax.typeof(weight).sharding.spec
  return weight if _whole_spec(spec) == spec else jax.reshard(weight, _whole_spec(spec))


def _whole_spec(spec: P) -> P:
  return P(*('tensor' if 'tensor' in (part if isinstance(part, tuple) else (part,)) else None for part in spec))
