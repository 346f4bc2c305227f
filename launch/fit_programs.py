"""The programs of a training step, the learner's own, compiled from shapes alone: what they need of a device and what they do there."""

from __future__ import annotations

from dataclasses import dataclass
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import lora, sharding, transformer
from models import params as params_lib
from models.config import ModelConfig
from models.sharding import Layout
from rl import learner as learner_lib
from rl import optimizer as optimizer_lib
from rl.batching import Place
from rl.learner import Learner, Loss
from rl.optimizer import OptimizerConfig
from rl.run import LoraConfig
from rl.types import Batch, Params

_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


@dataclass(frozen=True)
class Work:
  """A training step, whatever machine does it.

  Attributes:
    model: the shape.
    adapters: rank 0 trains every parameter.
    frozen_dtype: of parameters that are not trained.
    optimizer: its settings.
    loss: what is minimized.
    per_token: arrays that the loss needs of a batch beside those that every batch has.
    rows, length: of a micro-batch.
    micro_batches: of an optimizer step.
    copies: how often the trained parameters lie on the devices beside the state (a reference policy).
    has_critic: whether a second state, a critic's, waits beside.
  """
  model: ModelConfig
  adapters: LoraConfig
  frozen_dtype: str
  optimizer: OptimizerConfig
  loss: Loss
  per_token: tuple[str, ...]
  rows: int
  length: int
  micro_batches: int = 1
  copies: int = 0
  has_critic: bool = False

  @property
  def is_full(self) -> bool:
    return self.adapters.rank == 0


@dataclass(frozen=True)
class Program:
  """One compiled program; bytes are those of one device.

  Attributes:
    name: in `Learner.programs`.
    runs: times in an optimizer step.
    arguments, outputs, temporaries: bytes; an output in the place of an argument (donated) is not counted again.
    peak: most bytes that live at once while it runs, arguments among them. (Temporaries are a sum over time and can be more.)
    beside: bytes that wait on the device for another program meanwhile.
    compile_s: seconds of wall time.
    hlo: the compiled program as text.
  """
  name: str
  runs: int
  arguments: int
  outputs: int
  temporaries: int
  peak: int
  beside: int
  compile_s: float
  hlo: str

  @property
  def needed(self) -> int:
    return self.peak + self.beside


@dataclass(frozen=True)
class TooLarge:
  """A program that the compiler refuses because the device's memory does not hold it.

  Attributes:
    name: in `Learner.programs`.
    needed, available: bytes, as the compiler says.
    message: the compiler's.
  """
  name: str
  needed: float
  available: float
  message: str


def check(work: Work, layout: Layout, mesh: Mesh) -> None:
  """Raise ValueError where rows or parameters do not divide over the mesh, or the layout contradicts the model."""
  sharding.check_divides('rows', work.rows, dict(layout.rules)['batch'], mesh)
  transformer.check(work.model, layout, mesh)
  params_lib.spec_shardings(transformer.declare(work.model), mesh, layout)


def abstract_params(work: Work, mesh: Mesh, layout: Layout) -> tuple[Params, Params]:
  """Return (trainable, frozen) as a run would load them, without values."""
  specs = transformer.declare(work.model)
  tree = params_lib.abstract(specs, mesh, layout, 'float32' if work.is_full else work.frozen_dtype)
  if work.is_full:
    return params_lib.split(tree, lambda name: True)
  declared = lora.declare(specs, work.adapters.rank, work.adapters.targets)
  # The scale is a number in the program and changes no size.
  tree = lora.beside(tree, params_lib.abstract(declared, mesh, layout), 1.0)
  return params_lib.split(tree, lora.is_trainable)


def abstract_batch(work: Work, place: Place) -> Batch:
  """Return a global batch without values."""

  def array(dtype):
    return jax.ShapeDtypeStruct((work.rows, place.padded(work.length)), dtype, sharding=place.sharding)

  integers = {f'{name}_BT': array(jnp.int32) for name in ('tokens', 'targets', 'positions', 'segment_ids')}
  floats = {f'{name}_BT': array(jnp.float32) for name in ('loss_weight', *work.per_token)}
  return Batch(**integers, **floats)


def build(work: Work, layout: Layout, mesh: Mesh) -> Learner:
  """Return the learner of this work; raises as `learner.build`."""
  steps = work.optimizer.warmup_steps + 1
  return learner_lib.build(work.model, layout, mesh, optimizer_lib.build(work.optimizer, steps), optimizer_lib.schedule(work.optimizer, steps),
                           full=work.is_full, loss=work.loss)


def compile_step(work: Work, layout: Layout, mesh: Mesh) -> list[Program | TooLarge]:
  """Return the programs of one optimizer step, in order; the last is a TooLarge where the compiler refuses one.

  Raises:
    ValueError: what `check` or the learner refuses, before anything is traced.
  """
  check(work, layout, mesh)
  programs = build(work, layout, mesh).programs
  trainable, frozen = abstract_params(work, mesh, layout)
  batch = abstract_batch(work, Place.of(layout, mesh))

  results = []
  with jax.set_mesh(mesh):
    state = _result(programs['init'].trace(trainable), mesh)
    traced = {'gradient': programs['gradient'].trace(trainable, frozen, batch)}
    gradient, _ = _result(traced['gradient'], mesh)
    traced['apply_to_params'] = programs['apply_to_params'].trace(trainable, state.opt_state, gradient, state.step)
    traced['apply_to_moments'] = programs['apply_to_moments'].trace(state.opt_state, gradient, trainable)
    others = work.copies * device_bytes(trainable) + work.has_critic * (device_bytes(trainable) + device_bytes(state.opt_state))
    accumulated = device_bytes(gradient) if work.micro_batches > 1 else 0
    beside = {
        'gradient': device_bytes(state.opt_state) + accumulated + others,
        'apply_to_params': device_bytes(frozen) + others,
        'apply_to_moments': device_bytes(frozen) + others,
    }
    for name, program in traced.items():
      start_s = time.perf_counter()
      try:
        compiled = program.lower().compile()
      except jax.errors.JaxRuntimeError as error:
        refusal = _refusal(name, str(error))
        if refusal is None:
          raise
        return [*results, refusal]
      memory = compiled.memory_analysis()
      results.append(Program(
          name, work.micro_batches if name == 'gradient' else 1, memory.argument_size_in_bytes,
          memory.output_size_in_bytes - memory.alias_size_in_bytes, memory.temp_size_in_bytes, memory.peak_memory_in_bytes, beside[name],
          time.perf_counter() - start_s, compiled.as_text()))
  return results


def _result(traced: Any, mesh: Mesh) -> Any:
  """Return what a traced program returns as abstract arrays on the mesh; what depends on no argument is whole on every device."""

  def leaf(info):
    spec = PartitionSpec() if info.sharding is None else info.sharding.spec
    return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree.map(leaf, traced.out_info)


def device_bytes(tree: Any) -> int:
  """Return what a tree of abstract arrays takes of one device."""
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _refusal(name: str, message: str) -> TooLarge | None:
  """Return what the compiler says of a program that does not fit, or None if it fails for another reason."""
  found = re.search(r'\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)', message)
  if found is None:
    found = re.search(r'Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm', message)
  if 'RESOURCE_EXHAUSTED' not in message or found is None:
    return None
  needed, needed_unit, available, available_unit = found.groups()
  return TooLarge(name, float(needed) * _UNITS[needed_unit], float(available) * _UNITS[available_unit], message.splitlines()[0])
