"""What a compiled program moves: collectives by kind and mesh axis, and traffic of the device's memory, read from its HLO text.

XLA's own cost analysis counts the body of a loop once, whatever its trip count; here a body counts as often as it runs. What cannot be known
from the text is said and not guessed: a loop whose bound is data counts once (`unknown_loops`), a kernel written by hand counts its operands
and results once, however often it reads them (`hand_kernels`), and every branch of a conditional counts, as if all were taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
import itertools
import math
import re

import numpy as np

UNKNOWN_AXES = ('?',)
# Not an axis: from slice to slice, which the compiler makes of the part of a collective that crosses slices.
BETWEEN_SLICES = ('slices',)
# Bytes that a member of a group of n sends, over the bytes of its operand (rings; all-reduce is reduce-scatter and all-gather).
_SENT = {
    'all-gather': lambda n: n - 1,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'ragged-all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
}
_ITEM_BITS = {'pred': 8, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8, 's16': 16, 'u16': 16, 'bf16': 16, 'f16': 16, 's32': 32, 'u32': 32, 'f32': 32,
              's64': 64, 'u64': 64, 'f64': 64, 'c64': 64, 'c128': 128}
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\(')
_ARRAY = re.compile(r'\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?')
_CALLED = re.compile(r'\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)')
# Nothing moves for these: names of what is there already, or the second half of what another instruction began.
_FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional', 'call', 'after-all', 'partition-id',
         'replica-id', 'iota', 'optimization-barrier', 'opt-barrier', 'domain', 'async-start', 'async-update'}


@dataclass(frozen=True)
class Collective:
  """One collective instruction.

  Attributes:
    kind: 'all-gather', 'reduce-scatter', ...
    axes: mesh axes that its groups lie along; `UNKNOWN_AXES` where they are no product of axes, or `BETWEEN_SLICES`.
    sent_bytes: by one device, each time.
    runs: how often it runs in one run of the program.
  """
  kind: str
  axes: tuple[str, ...]
  sent_bytes: float
  runs: int


@dataclass(frozen=True)
class Movement:
  """What one run of a program moves, on one device.

  Attributes:
    collectives: those that leave the device.
    memory_bytes: read from and written to the device's main memory.
    unknown_loops: loops whose trip count is data; what is in them counts once.
    hand_kernels: kernels (Pallas) whose traffic inside is not known.
  """
  collectives: tuple[Collective, ...]
  memory_bytes: float
  unknown_loops: int
  hand_kernels: int

  def sent(self) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return {(kind, axes): bytes that a device sends}."""
    total: Counter = Counter()
    for one in self.collectives:
      total[one.kind, one.axes] += one.sent_bytes * one.runs
    return dict(total)


@dataclass(frozen=True)
class _Instruction:
  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  line: str
  is_root: bool


def movement(hlo: str, mesh_shape: Mapping[str, int]) -> Movement:
  """Read a compiled program's text.

  `mesh_shape` names the axes of the mesh it was compiled for, in order; of several slices that of one, since groups name its devices.
  """
  computations, entry = _parse(hlo)
  runs, unknown = _runs(computations, entry)
  collectives, memory = [], 0.0
  for name, body in computations.items():
    if not runs[name]:
      continue
    for one in body.values():
      kind = one.opcode.removesuffix('-start')
      if kind in _SENT:
        found = _collective(one, kind, body, name, mesh_shape)
        if found.sent_bytes:
          collectives.append(Collective(found.kind, found.axes, found.sent_bytes, runs[name]))
      elif one.opcode == 'send' and 'xla_megascale' in one.line:
        collectives.append(_between_slices(one, body, runs[name]))
  inside = _inside_fusions(computations)
  for name, body in computations.items():
    if runs[name] and name not in inside:
      memory += runs[name] * sum(_moved_bytes(one, body, computations) for one in body.values())
  kernels = sum('custom_call_target="tpu_custom_call"' in one.line for name, body in computations.items() if runs[name] for one in body.values())
  return Movement(tuple(collectives), memory, unknown, kernels)


def _parse(hlo: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
  """Return ({computation: {name: instruction}}, the entry's name)."""
  computations: dict[str, dict[str, _Instruction]] = {}
  entry, body = '', None
  for line in hlo.splitlines():
    found = _COMPUTATION.match(line)
    if found:
      body = computations.setdefault(found.group(2), {})
      entry = found.group(2) if found.group(1) else entry
      continue
    found = _INSTRUCTION.match(line)
    if found and body is not None:
      operands = tuple(re.findall(r'%([\w.\-]+)', _within_parentheses(line, found.end() - 1)))
      body[found.group(2)] = _Instruction(found.group(2), found.group(3), found.group(4), operands, line, bool(found.group(1)))
  if not entry:
    raise ValueError(f'The program text has no ENTRY computation; it must be HLO, as `compiled.as_text()` gives it, and begins {hlo[:80]!r}.')
  return computations, entry


def _within_parentheses(line: str, start: int) -> str:
  depth = 0
  for index in range(start, len(line)):
    depth += {'(': 1, ')': -1}.get(line[index], 0)
    if depth == 0:
      return line[start + 1:index]
  return line[start + 1:]


def _called(one: _Instruction) -> list[tuple[str, str]]:
  """Return (attribute, computation) of everything an instruction calls."""
  return [(attribute, name) for attribute, names in _CALLED.findall(one.line) for name in re.findall(r'[\w.\-]+', names)]


def _runs(computations: dict[str, dict[str, _Instruction]], entry: str) -> tuple[Counter, int]:
  """Return how often each computation runs, and the number of loops whose trip count the text does not say."""
  order, seen = [], set()

  def visit(name):
    if name not in seen and name in computations:
      seen.add(name)
      for one in computations[name].values():
        for _, callee in _called(one):
          visit(callee)
      order.append(name)

  visit(entry)
  runs, unknown = Counter({entry: 1}), 0
  # Callers come before what they call.
  for name in reversed(order):
    for one in computations[name].values():
      if one.opcode in ('async-done', 'async-update'):
        continue  # They name what their start has run.
      times = 1
      called = _called(one)
      if one.opcode == 'while':
        times = _trip_count(one, computations)
        unknown += times is None
      for attribute, callee in called:
        if attribute != 'to_apply' or one.opcode == 'call':
          runs[callee] += runs[name] * (times or 1)
  return runs, unknown


def _trip_count(loop: _Instruction, computations: dict[str, dict[str, _Instruction]]) -> int | None:
  """Return how often a loop runs: as XLA notes it, or the constant that its counter is compared with (JAX counts up from 0)."""
  noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line)
  if noted:
    return int(noted.group(1))
  condition = computations.get(dict(_called(loop)).get('condition', ''), {})
  root = next((one for one in condition.values() if one.is_root), None)
  while root is not None and root.opcode in ('fusion', 'bitcast', 'copy'):
    inner = dict(_called(root)).get('calls')
    root = (next((one for one in computations[inner].values() if one.is_root), None) if inner else condition.get(root.operands[0]))
  if root is None or root.opcode != 'compare' or 'direction=LT' not in root.line:
    return None
  bounds = [re.search(r'constant\((\d+)\)', condition[name].line) for name in condition if condition[name].opcode == 'constant']
  values = [int(found.group(1)) for found in bounds if found]
  return values[0] if len(values) == 1 else None


def _inside_fusions(computations: dict[str, dict[str, _Instruction]]) -> set[str]:
  """Return the computations whose values stay on the chip: the bodies of fusions and what those call."""
  inside: set[str] = set()
  waiting = [callee for body in computations.values() for one in body.values() if one.opcode != 'async-start' for attribute, callee in
             _called(one) if attribute == 'calls' or (attribute == 'to_apply' and one.opcode != 'call')]
  while waiting:
    name = waiting.pop()
    if name not in inside:
      inside.add(name)
      waiting.extend(callee for one in computations.get(name, {}).values() for _, callee in _called(one))
  return inside


# Collectives.


def _collective(one: _Instruction, kind: str, body: dict[str, _Instruction], computation: str, mesh_shape: Mapping[str, int]) -> Collective:
  operand = sum(_bytes(body[name].shape) for name in one.operands if name in body)
  if kind == 'collective-permute':
    listed = re.search(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}', one.line)
    pairs = np.array([[int(number) for number in pair.split(',')] for pair in re.findall(r'\{(\d+,\d+)\}', listed.group(1))])
    return Collective(kind, _axes_of(pairs, mesh_shape, is_product=False), float(operand), 1)
  groups = _groups(one.line, math.prod(mesh_shape.values()))
  size = groups.shape[1]
  # The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and a slice.
  if kind == 'all-reduce' and computation.startswith('all-reduce-scatter'):
    kind = 'reduce-scatter'
  return Collective(kind, _axes_of(groups, mesh_shape), operand * _SENT[kind](size) if size > 1 else 0.0, 1)


def _between_slices(one: _Instruction, body: dict[str, _Instruction], runs: int) -> Collective:
  """Return what goes to other slices: the operand once, which leaves out what the hosts do with it there."""
  named = re.search(r'rendezvous="([a-z\-]+)', one.line)
  kind = named.group(1) if named else ''
  return Collective(kind if kind in _SENT else 'send', BETWEEN_SLICES, float(_bytes(body[one.operands[0]].shape)), runs)


def _groups(line: str, num_devices: int) -> np.ndarray:
  """Return the replica groups [groups, members] from any of the forms in which XLA writes them."""
  listed = re.search(r'replica_groups=\{((?:\{[\d,]+\},?)*)\}', line)
  if listed:
    groups = [[int(number) for number in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', listed.group(1))]
    return np.array(groups) if groups else np.arange(num_devices)[None]
  tiled = re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', line)
  if tiled:
    shape, source, order = ([int(number) for number in part.split(',')] if part else None for part in tiled.groups())
    ids = np.arange(math.prod(source)).reshape(source)
    return (ids if order is None else ids.transpose(order)).reshape(shape)
  named = re.search(r"replica_groups=@?mesh\[([^\]]*)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)? ?\{([^}]*)\}", line)
  if named:
    return _named_groups(*named.groups())
  return np.arange(num_devices)[None]


def _named_groups(axes: str, source: str | None, order: str | None, chosen: str) -> np.ndarray:
  """Return the groups of `mesh['a'=4,'b'=2] {'a'}`; a part of an axis is written 'a':(major)size."""
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
  ids = np.arange(math.prod(sizes.values()))
  if source:
    ids = ids.reshape([int(number) for number in source.split(',')])
    ids = ids.transpose([int(number) for number in order.split(',')]) if order else ids
  picked = {name: (int(major or 1), int(size or sizes[name])) for name, major, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)}
  shape, member, rest = [], [], []
  for name, size in sizes.items():
    major, part = picked.get(name, (1, 1))
    for extent, is_member in ((major, False), (part, name in picked), (size // (major * part), False)):
      (member if is_member else rest).append(len(shape))
      shape.append(extent)
  ids = ids.reshape(shape).transpose(rest + member)
  return ids.reshape(-1, math.prod(shape[index] for index in member))


def _axes_of(groups: np.ndarray, mesh_shape: Mapping[str, int], is_product: bool = True) -> tuple[str, ...]:
  """Return the mesh axes along which the members of the groups differ."""
  coordinates = np.stack(np.unravel_index(groups, tuple(mesh_shape.values())), axis=-1)
  differs = (coordinates != coordinates[:, :1]).any(axis=(0, 1))
  axes = tuple(itertools.compress(mesh_shape, differs))
  if is_product and math.prod(mesh_shape[axis] for axis in axes) != groups.shape[1]:
    return UNKNOWN_AXES
  return axes


# Memory.


def _arrays(shape: str) -> list[tuple[int, bool]]:
  """Return (bytes, whether it is in main memory) of each array of a shape; the chip's own memories are marked S(1) and up."""
  arrays = []
  for dtype, dims, layout in _ARRAY.findall(shape):
    bits = _ITEM_BITS.get(dtype, 8)
    size = math.prod(int(number) for number in dims.split(',')) if dims else 1
    arrays.append((-(-size * bits // 8), re.search(r'S\([1-9]\)', layout) is None))
  return arrays


def _bytes(shape: str) -> int:
  return sum(size for size, _ in _arrays(shape))


def _main_bytes(shape: str) -> int:
  return sum(size for size, is_main in _arrays(shape) if is_main)


def _moved_bytes(one: _Instruction, body: dict[str, _Instruction], computations: dict[str, dict[str, _Instruction]]) -> int:
  """Return what an instruction reads from and writes to main memory."""
  if one.opcode in _FREE or one.opcode.endswith('-done') or 'AllocateBuffer' in one.line:
    return 0
  shapes = [body[name].shape if name in body else '' for name in one.operands]
  if one.opcode.endswith('-start'):
    # The result names operands and semaphores too; what arrives is as large as what leaves, or the second array.
    arrived = _arrays(one.shape)
    return sum(map(_main_bytes, shapes)) + sum(size for size, is_main in arrived[:1] if is_main)
  if one.opcode == 'dynamic-slice':
    return 2 * _main_bytes(one.shape)
  if one.opcode == 'dynamic-update-slice':
    return 2 * _main_bytes(shapes[1])
  if one.opcode == 'fusion':
    read = (min(_main_bytes(shape), _read(one, index, computations)) for index, shape in enumerate(shapes))
    written = (min(size, update) for (size, is_main), update in zip(_arrays(one.shape), _written(one, computations)) if is_main)
    return sum(read) + sum(written)
  return sum(map(_main_bytes, shapes)) + _main_bytes(one.shape)


def _read(fusion: _Instruction, index: int, computations: dict[str, dict[str, _Instruction]]) -> float:
  """Return the bytes that a fusion reads of an operand: slices where it is only sliced, nothing where it is only updated, else all (inf)."""
  inner = computations[dict(_called(fusion))['calls']]
  waiting = [one.name for one in inner.values() if one.opcode == 'parameter' and f'parameter({index})' in one.line]
  total = 0.0
  while waiting:
    name = waiting.pop()
    for one in inner.values():
      for position, operand in enumerate(one.operands):
        if operand != name:
          continue
        if one.opcode == 'bitcast':
          waiting.append(one.name)
        elif one.opcode in ('dynamic-slice', 'slice'):
          total += _bytes(one.shape)
        elif one.opcode == 'fusion':
          total += _read(one, position, computations)
        elif not (one.opcode == 'dynamic-update-slice' and position == 0):
          return math.inf
  return total


def _written(fusion: _Instruction, computations: dict[str, dict[str, _Instruction]]) -> list[float]:
  """Return the bytes that a fusion writes of each of its results: the update of one updated in place, else all (inf)."""
  inner = computations[dict(_called(fusion))['calls']]
  root = next(one for one in inner.values() if one.is_root)
  sizes = []
  for output in ([inner[name] for name in root.operands] if root.opcode == 'tuple' else [root]):
    while output.opcode == 'bitcast':
      output = inner[output.operands[0]]
    if output.opcode == 'dynamic-update-slice':
      sizes.append(_bytes(inner[output.operands[1]].shape))
    elif output.opcode == 'fusion':
      sizes += _written(output, computations)
    else:
      sizes += [math.inf] * max(len(_arrays(output.shape)), 1)
  return sizes
