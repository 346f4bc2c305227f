"""From compiled programs to an answer: does the step fit, how long does it take at the chips' published rates, and what limits it.

Times are bounds, not predictions of a schedule: each resource works at its published rate all the time. A step takes at least as long as its
busiest resource (all overlap) and, by these rates, at most their sum (nothing does); the model FLOPs utilization is given for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from launch import fit_hlo, fit_topology
from launch.fit_hlo import Movement
from launch.fit_programs import Program, TooLarge, Work
from launch.fit_topology import GIB, Topology
from models import sharding, transformer
from models.config import ModelConfig

_SENT_SHOWN = 1e6


@dataclass(frozen=True)
class Fit:
  """The answer for one mesh.

  Attributes:
    mesh: sizes of its axes.
    programs: those that compiled.
    refused: the program that did not, or None.
    movements: of each compiled program.
    model_flops, executed_flops: of a step, on one device (see `flops_per_token`).
    compute_s, memory_s, network_s: seconds of a step at the published rates; None without all programs.
    hbm_bytes: of one device.
  """
  mesh: Mapping[str, int]
  programs: tuple[Program, ...]
  refused: TooLarge | None
  movements: tuple[Movement, ...]
  model_flops: float
  executed_flops: float
  flops_per_s: float
  compute_s: float | None
  memory_s: float | None
  network_s: float | None
  hbm_bytes: float

  @property
  def needed_bytes(self) -> float:
    """Most bytes of a device at any time; of a refused step, what the compiler says it would need at least."""
    return self.refused.needed if self.refused else max(program.needed for program in self.programs)

  @property
  def fits(self) -> bool:
    return self.refused is None and self.needed_bytes <= self.hbm_bytes

  @property
  def step_s(self) -> tuple[float, float] | None:
    """Return (all overlap, nothing overlaps), or None where a program is missing."""
    if self.compute_s is None:
      return None
    times = (self.compute_s, self.memory_s, self.network_s)
    return max(times), sum(times)

  @property
  def utilization(self) -> tuple[float, float] | None:
    """Return the model FLOPs utilization (nothing overlaps, all overlap)."""
    return self.step_s and tuple(self.model_flops / self.flops_per_s / seconds for seconds in reversed(self.step_s))

  @property
  def bottleneck(self) -> str:
    if not self.fits:
      return 'memory capacity'
    return max((self.compute_s, 'compute'), (self.memory_s, 'memory bandwidth'), (self.network_s, 'interconnect'))[1]

  def sent(self) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return {(kind, axes): bytes that a device sends in a step}."""
    total: Counter = Counter()
    for program, movement in zip(self.programs, self.movements, strict=True):
      for key, size in movement.sent().items():
        total[key] += program.runs * size
    return dict(total)


def flops_per_token(model: ModelConfig, length: int, is_full: bool, remat: str) -> tuple[float, float]:
  """Return (model, executed) FLOPs per token of a training step.

  The model's are `transformer.num_flops_per_token`: matmuls of forward and of both gradients, half of the scores under the causal mask, nothing
  computed twice. Executed adds what is: attention's scores in backward, and the forward pass where layers are rematerialized (without the
  attention where its result is kept; other kept names save little and count as computed again).
  """
  frozen = transformer.num_flops_per_token(model, length, 0.0)
  full = transformer.num_flops_per_token(model, length, 1.0)
  forward_weights = full - frozen
  forward_scores = (frozen - 2 * forward_weights) / 3
  executed = (full if is_full else frozen) + forward_scores / 2
  if remat != 'none':
    kept = {name.strip() for name in remat.split(',')}
    executed += forward_weights + (0 if {'attention', 'attention_lse'} <= kept else forward_scores)
  return full if is_full else frozen, executed


def judge(work: Work, remat: str, topology: Topology, mesh: Mesh, results: Sequence[Program | TooLarge]) -> Fit:
  """Return the answer for the programs of one mesh."""
  chip, shape = topology.chip, sharding.within_slice(mesh.shape, topology.num_slices)
  programs = tuple(result for result in results if isinstance(result, Program))
  refused = next((result for result in results if isinstance(result, TooLarge)), None)
  movements = tuple(fit_hlo.movement(program.hlo, shape) for program in programs)
  tokens = work.rows * work.length * work.micro_batches / len(topology.devices)
  model_flops, executed_flops = (tokens * flops for flops in flops_per_token(work.model, work.length, work.is_full, remat))
  times = (None, None, None)
  if refused is None:
    times = (
        executed_flops / chip.flops_per_s,
        sum(program.runs * movement.memory_bytes for program, movement in zip(programs, movements, strict=True)) / chip.hbm_bytes_per_s,
        sum(program.runs * one.runs * one.sent_bytes / fit_topology.bytes_per_s(
            topology, mesh, shape if one.axes == fit_hlo.UNKNOWN_AXES else one.axes, is_permute=one.kind == 'collective-permute')
            for program, movement in zip(programs, movements, strict=True) for one in movement.collectives),
    )
  return Fit({axis: size for axis, size in mesh.shape.items() if size > 1}, programs, refused, movements, model_flops, executed_flops,
             chip.flops_per_s, *times, chip.hbm_bytes)


def best(fits: Sequence[Fit]) -> Fit | None:
  """Return the fastest of those that fit, or None."""
  return min((fit for fit in fits if fit.fits), key=lambda fit: fit.step_s, default=None)


def to_json(fit: Fit) -> dict[str, Any]:
  """Return the answer as plain values."""
  return {
      'mesh': dict(fit.mesh), 'fits': fit.fits, 'bottleneck': fit.bottleneck, 'needed_bytes': fit.needed_bytes, 'hbm_bytes': fit.hbm_bytes,
      'refused': fit.refused and fit.refused.message, 'model_flops': fit.model_flops, 'executed_flops': fit.executed_flops,
      'compute_s': fit.compute_s, 'memory_s': fit.memory_s, 'network_s': fit.network_s, 'step_s': fit.step_s, 'utilization': fit.utilization,
      'sent': [{'kind': kind, 'axes': list(axes), 'bytes': size} for (kind, axes), size in sorted(fit.sent().items())],
      'programs': [{
          'name': program.name, 'runs': program.runs, 'argument_bytes': program.arguments, 'output_bytes': program.outputs,
          'temporary_bytes': program.temporaries, 'peak_bytes': program.peak, 'beside_bytes': program.beside, 'compile_s': program.compile_s,
          'memory_traffic_bytes': movement.memory_bytes, 'unknown_loops': movement.unknown_loops, 'hand_kernels': movement.hand_kernels,
      } for program, movement in zip(fit.programs, fit.movements, strict=True)],
  }


def shown_mesh(mesh: Mapping[str, int]) -> str:
  return ' '.join(f'{axis}={size}' for axis, size in mesh.items()) or 'one device'


def verdict(fit: Fit) -> str:
  """Return 'fits: needs X of Y GiB' or why not."""
  needed = f'{fit.needed_bytes / GIB:.1f} of {fit.hbm_bytes / GIB:.1f} GiB'
  if fit.fits:
    return f'fits: needs {needed}, {(fit.hbm_bytes - fit.needed_bytes) / GIB:.1f} GiB left'
  if fit.refused:
    return f'does not fit: {fit.refused.name} alone needs {needed}, and the compiler refuses it'
  return f'does not fit: needs {needed}'


def details(fit: Fit) -> str:
  """Return the report of one mesh as text."""
  lines = [f'mesh {shown_mesh(fit.mesh)}: {verdict(fit)}']
  if fit.programs:
    columns = ('arguments', 'outputs', 'temporary', 'peak', 'beside', 'headroom')
    lines.append(f'  {"GiB of a device":18s} {"runs":>4s} ' + ' '.join(f'{name:>9s}' for name in columns) + '  compiled in')
  for program in fit.programs:
    sizes = (program.arguments, program.outputs, program.temporaries, program.peak, program.beside, fit.hbm_bytes - program.needed)
    lines.append(f'  {program.name:18s} {program.runs:4d} ' + ' '.join(f'{size / GIB:9.2f}' for size in sizes) + f' {program.compile_s:10.0f} s')
  if fit.refused:
    return '\n'.join([*lines, f'  {fit.refused.name}: {fit.refused.message}'])
  for (kind, axes), size in sorted(fit.sent().items(), key=lambda item: -item[1]):
    if size >= _SENT_SHOWN:
      lines.append(f'  sends {size / 1e9:10.3f} GB  {kind} over {", ".join(axes)}')
  low, high = fit.utilization
  unknown = sum(movement.unknown_loops for movement in fit.movements)
  lines += [
      f'  {fit.model_flops / 1e12:.1f} TFLOP of the model, {fit.executed_flops / 1e12:.1f} executed',
      f'  compute {_shown_s(fit.compute_s)}, memory {_shown_s(fit.memory_s)}, interconnect {_shown_s(fit.network_s)}: '
      f'a step takes {_shown_s(fit.step_s[0])} to {_shown_s(fit.step_s[1])}, MFU {low:.0%} to {high:.0%}, limited by {fit.bottleneck}',
  ]
  kernels = sum(movement.hand_kernels for movement in fit.movements)
  if unknown or kernels:
    lines.append(f'  memory may be more: {unknown} loops run as often as the data say and count once, {kernels} hand-written kernels count what '
                 'they are given once')
  return '\n'.join(lines)


def table(fits: Sequence[Fit]) -> str:
  """Return one line for each mesh, the best marked."""
  chosen = best(fits)
  width = max(len(shown_mesh(fit.mesh)) for fit in fits)
  lines = [f'  {"mesh":{width}s} {"GiB":>7s} {"left":>7s} {"compute":>9s} {"memory":>9s} {"network":>9s} {"MFU":>9s}  limited by']
  for fit in fits:
    left = (fit.hbm_bytes - fit.needed_bytes) / GIB
    line = f'{"*" if fit is chosen else " "} {shown_mesh(fit.mesh):{width}s} {fit.needed_bytes / GIB:7.1f} {left:7.1f}'
    if fit.refused is None:
      low, high = fit.utilization
      line += f' {_shown_s(fit.compute_s):>9s} {_shown_s(fit.memory_s):>9s} {_shown_s(fit.network_s):>9s} {f"{low:.0%}-{high:.0%}":>9s}'
    else:
      line += f' {"-":>9s} {"-":>9s} {"-":>9s} {"-":>9s}'
    lines.append(f'{line}  {fit.bottleneck}')
  return '\n'.join(lines)


def _shown_s(seconds: float) -> str:
  return f'{seconds:.2f} s' if seconds >= 1 else f'{1e3 * seconds:.1f} ms'
