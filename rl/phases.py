"""Phases of a supervised run: context extension by ever longer rows and another RoPE, under one configuration.

Shapes and the RoPE are fixed within a phase; parameters, optimizer, learning rate schedule and the position in the data go on from one to
the next. The step alone says which phase it belongs to, so a checkpoint says with which RoPE its model was trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from models.config import ModelConfig
from rl import config as config_lib


@dataclass(frozen=True)
class RopeExtension:
  """What a phase changes of the model's RoPE, that of its global layers; None keeps it. Fields are those of `RopeConfig`."""
  theta: float | None = None
  scaling: Literal['none', 'linear', 'ntk', 'yarn', 'llama3'] | None = None
  factor: float | None = None
  original_length: int | None = None


@dataclass(frozen=True)
class PhaseConfig:
  """A phase as it is written.

  Attributes:
    num_steps: optimizer steps.
    length, rows, micro_batches: as in the data's settings, which None keeps.
    rope: what changes of the model's RoPE as its files give it, not of the phase before.
  """
  num_steps: int
  length: int | None = None
  rows: int | None = None
  micro_batches: int | None = None
  rope: RopeExtension = RopeExtension()

  def __post_init__(self):
    for name in ('num_steps', 'length', 'rows', 'micro_batches'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f'{name}={value} of a phase must be at least 1.')


@dataclass(frozen=True)
class Phase:
  """A phase in its run: optimizer steps `first_step` + 1 to `last_step`."""
  first_step: int
  last_step: int
  length: int
  rows: int
  micro_batches: int
  rope: RopeExtension

  def extend(self, model: ModelConfig) -> ModelConfig:
    """Return the model as it is trained in this phase.

    Raises:
      ValueError: a RoPE that contradicts itself.
    """
    changes = {name: value for name, value in vars(self.rope).items() if value is not None}
    return dataclasses.replace(model, rope=dataclasses.replace(model.rope, **changes), max_length=max(model.max_length, self.length))


def plan(phases: Sequence[PhaseConfig], num_steps: int, *, length: int, rows: int, micro_batches: int) -> tuple[Phase, ...]:
  """Return the phases of a run of `num_steps`, with the data's settings where a phase has none; without phases there is one.

  Raises:
    ValueError: the phases have another number of steps together.
  """
  phases = phases or (PhaseConfig(num_steps),)
  total = sum(phase.num_steps for phase in phases)
  if total != num_steps:
    raise ValueError(f'phases have {" + ".join(str(phase.num_steps) for phase in phases)} = {total} steps, but num_steps={num_steps}; '
                     'they must be the same, because the schedule of the learning rate spans all phases.')
  made, first_step = [], 0
  for phase in phases:
    made.append(Phase(first_step, first_step + phase.num_steps, phase.length or length, phase.rows or rows,
                      phase.micro_batches or micro_batches, phase.rope))
    first_step += phase.num_steps
  return tuple(made)


def at(phases: Sequence[Phase], step: int) -> Phase:
  """Return the phase in which a checkpoint of `step` was trained; the first for step 0."""
  return next(phase for phase in phases if step <= phase.last_step)


def until(phases: Sequence[Phase], step: int) -> tuple[Phase, ...]:
  """Return the phases up to a step, the last one cut there."""
  return tuple(dataclasses.replace(phase, last_step=min(phase.last_step, step)) for phase in phases if phase.first_step < step)


def of_run(config: Mapping[str, Any]) -> tuple[Phase, ...]:
  """Return the phases of a supervised run from its configuration as JSON, as checkpoints hold it."""
  written = tuple(config_lib.build(PhaseConfig, phase, f'config.phases[{index}]') for index, phase in enumerate(config.get('phases', ())))
  return plan(written, config['num_steps'], **{name: config['data'][name] for name in ('length', 'rows', 'micro_batches')})
