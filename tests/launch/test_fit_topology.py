"""Chips, topologies and meshes; what needs the TPU compiler is skipped where libtpu is missing."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

from launch import fit_topology
from launch.fit_hlo import BETWEEN_SLICES
from launch.fit_topology import CHIPS, GIB, Topology
from models import sharding
from models.shapes import SHAPES
from models.sharding import AXES

HAS_LIBTPU = importlib.util.find_spec('libtpu') is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason='libtpu is not installed (pip install -e .[tpu-aot])')


def imagined(shape, slices=1, chip='v5p'):
  """Return a topology of stand-ins for devices, in row-major order of their coordinates."""
  devices = [SimpleNamespace(coords=coords, slice_index=index, platform='tpu') for index in range(slices) for coords in np.ndindex(*shape)]
  return Topology(f'{chip}:{"x".join(map(str, shape))}', slices, CHIPS[chip], tuple(devices))


def arranged(topology, **sizes):
  """Return a stand-in for a mesh whose devices lie in row-major order."""
  shape = tuple((dict.fromkeys(AXES, 1) | sizes)[axis] for axis in AXES)
  devices = np.empty(len(topology.devices), object)
  devices[:] = topology.devices
  return SimpleNamespace(devices=devices.reshape(shape), axis_names=AXES)


def test_chips_have_their_published_rates():
  assert {name: (chip.flops_per_s / 1e12, chip.hbm_bytes_per_s / 1e9) for name, chip in CHIPS.items()} == {
      'v4': (275, 1200), 'v5e': (197, 820), 'v5p': (459, 2765), 'v6e': (918, 1638), 'tpu7x': (1153.5, 3690)}
  # Links in one direction, times directions and ports of a chip, give the published total.
  ports = {'v5e': 4, 'v5p': 6, 'v6e': 4}
  assert {name: CHIPS[name].link_bytes_per_s * 2 * ports[name] / 1e9 for name in ports} == {'v5e': 400, 'v5p': 1200, 'v6e': 800}
  # A program never gets all of the 32, 16, 96, 32 and 192 / 2 GiB.
  assert [round(chip.hbm_bytes / GIB, 2) for chip in CHIPS.values()] == [30.75, 15.75, 95.74, 31.25, 94.75]


@pytest.mark.parametrize('name', ['v5p', 'v5litepod-16', 'h100:8', 'v5p:8', 'v5p:8xx8', ''])
def test_a_name_that_is_no_topology_says_what_one_is(name):
  with pytest.raises(ValueError, match=f"topology='{name}' is unknown; use one of v4, v5e, v5p, v6e, tpu7x, a colon and its shape.*v5p:8x8x8"):
    fit_topology.describe(name)


def test_slices_are_at_least_one():
  with pytest.raises(ValueError, match='slices=0 must be at least 1'):
    fit_topology.describe('v5e:2x2', 0)


def test_a_missing_compiler_says_how_to_get_it(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"topology='v5e:2x2' needs the TPU compiler, and libtpu is not installed; pip install -e .\[tpu-aot\]"):
    fit_topology.describe('v5e:2x2')


def test_meshes_are_parsed():
  assert fit_topology.parse_meshes(['fsdp=64 tensor=8', ' data=-1']) == [{'fsdp': 64, 'tensor': 8}, {'data': -1}]
  for wrong in ('', 'fsdp', 'fsdp=0', 'expert=2', 'fsdp=1.5'):
    with pytest.raises(ValueError, match=f"meshes='{wrong}' is not a mesh; write axes of data, fsdp, seq, ulysses, tensor and sizes"):
      fit_topology.parse_meshes([wrong])


@pytest.mark.parametrize(('sizes', 'message'), [
    ({'fsdp': 3}, 'fsdp=3 .* does not match the 64 devices of v5p:4x4x4; the sizes must multiply to 64'),
    ({'fsdp': -1, 'seq': -1}, 'at most one may be -1'),
    ({'fsdp': -1, 'seq': 3}, 'does not match the 64 devices'),
    ({'fsdp': 64, 'tensor': 0}, 'is not a mesh'),
    ({'expert': 64}, 'the axes are data, fsdp, seq, ulysses, tensor'),
])
def test_a_mesh_must_have_the_devices(sizes, message):
  with pytest.raises(ValueError, match=message):
    fit_topology.make_mesh(imagined((4, 4, 4)), sizes)


def test_slices_must_divide_an_axis():
  with pytest.raises(ValueError, match=r'no axis that divides over slices=3; make data or fsdp a multiple of it'):
    sharding.within_slice({'fsdp': 8}, 3)


def test_bandwidth_follows_the_links():
  topology = imagined((8, 8, 4))
  mesh = arranged(topology, fsdp=64, tensor=4)

  def rate(*axes, **options):
    return fit_topology.bytes_per_s(topology, mesh, axes, **options) / 1e9

  # fsdp fills two closed dimensions of the torus and tensor one: both directions of each, 100 GB/s a link.
  assert (rate('fsdp'), rate('tensor'), rate('fsdp', 'tensor')) == (400, 200, 600)
  assert rate('fsdp', is_permute=True) == 100
  # Half of a dimension is no ring, so one direction only.
  half = arranged(topology, fsdp=32, seq=2, tensor=4)
  assert fit_topology.bytes_per_s(topology, half, ['seq']) == 100e9
  # A side of 2 does not close, nor does one of 4 on a v5e.
  small = imagined((4, 2), chip='v5e')
  assert fit_topology.bytes_per_s(small, arranged(small, fsdp=4, tensor=2), ['fsdp']) == 50e9
  assert fit_topology.bytes_per_s(small, arranged(small, fsdp=8), ['fsdp']) == 100e9


def test_between_slices_the_data_center_network_counts():
  topology = imagined((4, 4, 4), slices=2)
  mesh = arranged(topology, fsdp=128)
  assert fit_topology.bytes_per_s(topology, mesh, BETWEEN_SLICES) == 6.25e9
  # Within a slice fsdp fills the whole torus.
  assert fit_topology.bytes_per_s(topology, mesh, ['fsdp']) == 600e9
  assert sharding.within_slice({'data': 3, 'fsdp': 8, 'seq': 4}, 2) == {'data': 3, 'fsdp': 4, 'seq': 4}


def test_auto_splits_parameters_first_and_length_last():
  topology = imagined((4, 4, 4))
  model = SHAPES['llama3-8b']

  def auto(**options):
    return [{axis: size for axis, size in sizes.items() if size > 1} for sizes in fit_topology.meshes(topology, model, **options)]

  assert auto(rows=64, fsdp_splits_length=False) == [
      {'fsdp': 64}, {'fsdp': 32, 'tensor': 2}, {'fsdp': 16, 'tensor': 4}, {'fsdp': 8, 'tensor': 8}]
  # Two rows: 32 times along the length, with and without 8 key-value heads exchanged.
  assert auto(rows=2, fsdp_splits_length=False)[:2] == [{'fsdp': 2, 'seq': 32}, {'fsdp': 2, 'seq': 4, 'ulysses': 8}]
  assert auto(rows=1, fsdp_splits_length=True)[:2] == [{'fsdp': 64}, {'fsdp': 8, 'ulysses': 8}]
  assert {len(topology.devices)} == {np.prod(list(sizes.values())) for sizes in auto(rows=1, fsdp_splits_length=True)}
  # Gemma-3-270M has 4 heads, so no tensor=8.
  assert [sizes['tensor'] for sizes in fit_topology.meshes(topology, SHAPES['gemma3-270m'], rows=64, fsdp_splits_length=False)] == [1, 2, 4]
  assert not list(fit_topology.meshes(imagined((4, 4, 4), slices=2), model, rows=3, fsdp_splits_length=False))


@needs_libtpu
@pytest.mark.parametrize(('name', 'count'), [('v4:2x2x1', 4), ('v5e:2x2', 4), ('v5e:1x1', 1), ('v5p:8x8x8', 512), ('tpu7x:2x2x1', 8)])
def test_topologies_exist(name, count):
  topology = fit_topology.describe(name)
  assert len(topology.devices) == count
  assert fit_topology.make_mesh(topology, {'fsdp': -1}).shape['fsdp'] == count


@needs_libtpu
def test_a_shape_that_no_machine_has_is_refused():
  with pytest.raises(ValueError, match="topology='v5e:3x5' does not exist: .*not divisible.*Some that do: v5e:2x2"):
    fit_topology.describe('v5e:3x5')


@needs_libtpu
def test_slices_lie_along_the_first_axis_that_they_divide():
  mesh = fit_topology.make_mesh(fit_topology.describe('v5p:2x2x2', 2), {'data': 2, 'fsdp': 8})
  assert [{device.slice_index for device in half.flatten()} for half in mesh.devices] == [{0}, {1}]
