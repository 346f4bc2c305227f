"""TPU chips by their published rates, topologies that are not there, and the ways to arrange their devices in a mesh.

Deliberately absent: GPUs (their compiler wants a description of the card that only the card can give).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
import numpy as np

from launch.fit_hlo import BETWEEN_SLICES
from models import sharding
from models.config import ModelConfig
from models.sharding import AXES

GIB = 2**30


@dataclass(frozen=True)
class Chip:
  """What one device can do; devices are counted as JAX counts them, which is two for a TPU7x chip.

  Attributes:
    flops_per_s: dense bfloat16.
    hbm_bytes: what the compiler lets a program use.
    hbm_bytes_per_s: of the memory.
    link_bytes_per_s: of one interconnect link in one direction.
    ring: a dimension of the topology is closed to a ring where its size is a multiple of this.
    dcn_bytes_per_s: to other slices.
    options: what `get_topology_desc` needs for devices as they are on the machine.
  """
  flops_per_s: float
  hbm_bytes: float
  hbm_bytes_per_s: float
  link_bytes_per_s: float
  ring: int
  dcn_bytes_per_s: float
  options: tuple[tuple[str, Any], ...] = ()


# Rates: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, "system architecture". They give the bidirectional bandwidth of all links of
# a chip together: over 2 x 4 (v5e 400, v6e 800 GB/s) or 2 x 6 (v5p, tpu7x 1200 GB/s); v4: 50 GB/s a link, arXiv:2304.01433 table 4.
# DCN: 50 Gb/s a chip (v5p), 100 (v6e, tpu7x), 2 x 100 for the 8 chips of a v5e host; v4's is not published, v5p's is taken.
# Rings: whole cubes of 4 x 4 x 4 are tori, 2D topologies only where a side is 16. Memory: libtpu 0.0.42's own limit.
CHIPS = {
    'v4': Chip(275e12, 30.75 * GIB, 1.2e12, 50e9, 4, 6.25e9, (('chip_config_name', 'megacore'),)),
    'v5e': Chip(197e12, 15.75 * GIB, 0.82e12, 50e9, 16, 3.125e9),
    'v5p': Chip(459e12, 95.74 * GIB, 2.765e12, 100e9, 4, 6.25e9),
    'v6e': Chip(918e12, 31.25 * GIB, 1.638e12, 100e9, 16, 12.5e9),
    'tpu7x': Chip(2307e12 / 2, 94.75 * GIB, 7.38e12 / 2, 100e9 / 2, 4, 12.5e9 / 2),
}
EXAMPLES = 'v5e:2x2, v5e:16x16, v5p:4x4x4, v5p:8x8x8, v6e:16x16, tpu7x:4x4x4'


@dataclass(frozen=True)
class Topology:
  """A machine that may not exist.

  Attributes:
    name: as the user wrote it, 'v5p:8x8x8'.
    num_slices: copies of it, joined by the data center's network.
    chip: what its devices can do.
    devices: to compile for; nothing can run on them.
  """
  name: str
  num_slices: int
  chip: Chip
  devices: tuple[Any, ...]

  def __str__(self) -> str:
    return self.name if self.num_slices == 1 else f'{self.num_slices} x {self.name}'


def describe(name: str, num_slices: int = 1) -> Topology:
  """Return the topology of this name.

  Raises:
    ValueError: libtpu is not installed, or it knows no such topology.
  """
  kind, colon, shape = name.partition(':')
  if kind not in CHIPS or not colon or not re.fullmatch(r'\d+(x\d+)+', shape):
    raise ValueError(f'topology={name!r} is unknown; use one of {", ".join(CHIPS)}, a colon and its shape in chips, such as {EXAMPLES}.')
  if num_slices < 1:
    raise ValueError(f'slices={num_slices} must be at least 1.')
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError(f'topology={name!r} needs the TPU compiler, and libtpu is not installed; pip install -e .[tpu-aot] brings it (0.7 GB, '
                     'best in a virtual environment of its own). No TPU is needed.')
  _prepare_libtpu()
  options = dict(CHIPS[kind].options) | ({'num_slices': num_slices} if num_slices > 1 else {})
  if math.prod(map(int, shape.split('x'))) == 1:
    options['chips_per_host_bounds'] = (1, 1, 1)
  try:
    devices = topologies.get_topology_desc(platform='tpu', topology_name=name, **options).devices
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(f'topology={name!r} does not exist: {str(error).splitlines()[0]}. Some that do: {EXAMPLES}.') from error
  return Topology(name, num_slices, CHIPS[kind], tuple(devices))


def _prepare_libtpu() -> None:
  """Tell libtpu, before it is loaded, that no TPU is here, that others may use it too, and to be quiet."""
  for name, value in {
      'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_ACCELERATOR_TYPE': 'v5litepod-16', 'TPU_STDERR_LOG_LEVEL': '3',
      'TPU_MIN_LOG_LEVEL': '3', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_LOG_DIR': 'disabled'}.items():
    os.environ.setdefault(name, value)


def make_mesh(topology: Topology, sizes: dict[str, int]) -> Mesh:
  """Arrange the devices so that the axes follow the links, slices as `sharding.within_slice` says.

  One size may be -1 for "the rest", and an axis not named has size 1.

  Raises:
    ValueError: sizes that do not multiply to the number of devices, cannot be laid along its links, or what `within_slice` refuses.
  """
  count = len(topology.devices)
  sizes = dict.fromkeys(AXES, 1) | sizes
  shown = ' x '.join(f'{axis}={size}' for axis, size in sizes.items())
  free = [axis for axis, size in sizes.items() if size == -1]
  known = math.prod(size for size in sizes.values() if size != -1)
  if set(sizes) - set(AXES) or len(free) > 1 or known < 1 or min(sizes.values()) < -1:
    raise ValueError(f'mesh {shown} is not a mesh; the axes are {", ".join(AXES)}, sizes are positive, and at most one may be -1.')
  if free and count % known == 0:
    sizes[free[0]] = count // known
  if math.prod(sizes.values()) != count:
    raise ValueError(f'mesh {shown} does not match the {count} devices of {topology}; the sizes must multiply to {count}.')
  try:
    return sharding.arrange(topology.devices, sizes)
  except ValueError as error:
    raise ValueError(f'{topology}: {error}') from error


def bytes_per_s(topology: Topology, mesh: Mesh, axes: Iterable[str], *, is_permute: bool = False) -> float:
  """Return the bandwidth of one device into a collective over these mesh axes: what it sends a second.

  A collective uses both directions of every dimension of the torus that the axes lie along, one direction where that dimension is not
  closed; a permute sends to one neighbor over one link. Axes are taken to have their links to themselves, and neighbors to be adjacent.
  Between slices it is a chip's share of the data center's network. Two permutes in opposite directions are so counted one after the other.
  """
  chip = topology.chip
  chosen = set(axes)
  if chosen == set(BETWEEN_SLICES):
    return chip.dcn_bytes_per_s
  group = mesh.devices[tuple(slice(None) if axis in chosen else 0 for axis in mesh.axis_names)].flatten()
  if is_permute:
    return chip.link_bytes_per_s
  coords = np.array([device.coords for device in group])
  whole = [int(size) for size in topology.name.partition(':')[2].split('x')]
  links = 0
  for dimension, size in enumerate(whole):
    spanned = len(set(coords[:, dimension]))
    if spanned > 1:
      links += 2 if spanned == size and size % chip.ring == 0 else 1
  # Two devices of one chip meet on the chip itself, six times as fast as over a link (tpu7x's documentation).
  return chip.link_bytes_per_s * (links or 12)


def meshes(topology: Topology, model: ModelConfig, *, rows: int, fsdp_splits_length: bool) -> Iterator[dict[str, int]]:
  """Yield the meshes worth comparing: for each size of `tensor` parameters split as far as they can be, and the rest along the length.

  Where the length is split, a mesh with as much of it over `ulysses` as there are heads comes too. Slices go to `data`, whose traffic, one sum
  of gradients a step, is the least.
  """
  slices = topology.num_slices
  chips = len(topology.devices) // slices
  for tensor in (1, 2, 4, 8):
    if rows % slices or chips % tensor or model.num_heads % tensor:
      continue
    rest = chips // tensor
    fsdp = max(size for size in range(1, rest + 1) if rest % size == 0 and model.embed_dim % size == 0 and (
        fsdp_splits_length or rows % (slices * size) == 0))
    sizes = {'data': slices, 'fsdp': fsdp, 'seq': rest // fsdp, 'tensor': tensor}
    yield sizes
    ring = 'fsdp' if fsdp_splits_length else 'seq'
    ulysses = math.gcd(max(model.num_kv_heads // tensor, 1), sizes[ring])
    if ulysses > 1:
      yield sizes | {ring: sizes[ring] // ulysses, 'ulysses': ulysses}


def parse_meshes(text: Sequence[str]) -> list[dict[str, int]]:
  """Return the sizes of each mesh, written 'fsdp=64 tensor=8'.

  Raises:
    ValueError: anything else.
  """
  parsed = []
  for one in text:
    pairs = [word.partition('=') for word in one.split()]
    if not pairs or any(axis not in AXES or not re.fullmatch(r'-1|[1-9]\d*', size) for axis, _, size in pairs):
      raise ValueError(f"meshes={one!r} is not a mesh; write axes of {', '.join(AXES)} and sizes, such as 'fsdp=64 tensor=8'.")
    parsed.append({axis: int(size) for axis, _, size in pairs})
  return parsed

