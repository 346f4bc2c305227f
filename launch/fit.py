r"""Compile a training step for TPUs that are not there: does it fit, how fast can it be, and what limits it.

    python -m launch.fit --config=configs/sft.py --model=gemma3-270m --topology=v5e:2x2 --config.data.length=8192
    python -m launch.fit --config=configs/grpo.py --model=llama3-8b --topology=v5p:8x8x8 --config.rows=1 --config.length=1048576 \
        --config.layout.fsdp_splits=length --meshes='fsdp=64 tensor=8, fsdp=64 ulysses=8' --output=fit.json

The config is that of `launch.train`; rows, length, mesh, layout, optimizer, loss and adapters are read from it, data and domains are not, and of
the model only the shape. What is compiled are the learner's own programs. --meshes compares several meshes (or 'auto': those worth it).
libtpu, the compiler, comes with pip install -e .[tpu-aot].

Not counted: the sampler of reinforcement learning (its copy of the weights and its cache), reward models, and what the host does. Of a critic
the state is counted, as large as the policy's; its own programs need no more than the policy's, which have the vocabulary on top.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from absl import flags
import jax
from jax.sharding import Mesh
from ml_collections import config_flags

import launch
from launch import fit_programs, fit_report, fit_topology
from launch.fit_programs import Work
from launch.fit_topology import Topology
from models import weight_files
from models.config import ModelConfig
from models.shapes import SHAPES
from models.sharding import Layout
from rl import config as config_lib
from rl import learner
from rl import run as run_lib
from rl.losses import PolicyLossConfig
from rl.optimizer import OptimizerConfig
from rl.run import LayoutConfig, LoraConfig, ModelSource

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The config of launch.train; fields are flags of their own.')
_MODEL = flags.DEFINE_string('model', '', f'Shape of the model: {", ".join(SHAPES)}, or a directory with config.json or a .gguf file; '
                             'config.model.path if left out.')
_TOPOLOGY = flags.DEFINE_string('topology', None, f'TPUs to compile for: {fit_topology.EXAMPLES}, ...')
_SLICES = flags.DEFINE_integer('slices', 1, 'Such topologies, joined by the data center network.')
_MESHES = flags.DEFINE_list('meshes', [], "Meshes to compare, such as 'fsdp=64 tensor=8, fsdp=512', or 'auto'; config.mesh if left out.")
_LEVEL = flags.DEFINE_enum('optimization', 'O1', ['O1', 'default'], 'How hard the compiler tries; O1 compiles 3 times faster, with about '
                           'the same memory (within 6 %, measured).')
_OUTPUT = flags.DEFINE_string('output', '', 'JSON file to write.')
_LOG = logging.getLogger('launch.fit')


def read_work(config, model: ModelConfig) -> Work:
  """Return what a step of this config computes.

  Raises:
    ValueError: a stage that is not compiled here, or fields that the records refuse.
  """
  stage = config.get('stage')
  shared = {
      'model': model,
      'adapters': config_lib.build(LoraConfig, config.lora, 'config.lora'),
      'frozen_dtype': config_lib.build(ModelSource, config.model, 'config.model').frozen_dtype,
      'optimizer': config_lib.build(OptimizerConfig, config.optimizer, 'config.optimizer'),
  }
  if stage == 'supervised':
    # Of a run in phases, the one with the longest rows needs most.
    shape = max(config.phases, key=lambda phase: phase['length'], default=config.data)
    return Work(**shared, loss=learner.supervised_loss, per_token=(), rows=shape['rows'], length=shape['length'],
                micro_batches=config.data.micro_batches)
  if stage != 'rl':
    raise ValueError(f"config.stage={stage!r} is not compiled here; use a config of stage 'supervised' or 'rl'.")
  settings = config_lib.build(PolicyLossConfig, config.loss, 'config.loss')
  per_token = ['advantages', 'behavior_logprobs']
  per_token += ['old_logprobs'] if settings.decoupled and config.minibatches * config.epochs > 1 else []
  per_token += ['reference_logprobs'] if settings.kl_coef else []
  # How many micro-batches a step has depends on what is sampled; one is reported.
  has_reference = (settings.kl_coef or config.reward_kl.coef) and shared['adapters'].rank == 0
  return Work(**shared, loss=learner.policy_loss(settings), per_token=tuple(per_token), rows=config.rows, length=config.length,
              copies=int(bool(has_reference)), has_critic=config.advantage.estimator == 'gae')


def read_shape(name: str) -> ModelConfig:
  """Return the shape of a model by its name or from its files."""
  if name in SHAPES:
    return SHAPES[name]
  if not name or not Path(name).exists():
    raise ValueError(f'model={name!r} is no shape and no path; use one of {", ".join(SHAPES)}, a directory with config.json or a .gguf file.')
  return weight_files.read_config(name)


def choose_cases(config, work: Work, topology: Topology) -> list[tuple[Mesh, Layout]]:
  """Return the meshes asked for with their layouts, all checked before the first is compiled.

  Raises:
    ValueError: a mesh that does not have the devices or over which the work does not divide; of 'auto', when none is left.
  """
  settings = config_lib.build(LayoutConfig, config.layout, 'config.layout')

  def case(sizes):
    mesh = fit_topology.make_mesh(topology, sizes)
    layout = run_lib.lay_out(settings, work.model, mesh)
    fit_programs.check(work, layout, mesh)
    return mesh, layout

  if _MESHES.value != ['auto']:
    return [case(sizes) for sizes in fit_topology.parse_meshes(_MESHES.value) or [config.mesh.to_dict()]]
  cases, refusal = [], f'rows={work.rows} do not divide over slices={topology.num_slices}'
  for sizes in fit_topology.meshes(topology, work.model, rows=work.rows, fsdp_splits_length=settings.fsdp_splits == 'length'):
    try:
      cases.append(case(sizes))
    except ValueError as error:
      refusal = error
      _LOG.info('Left out %s: %s', fit_report.shown_mesh(sizes), error)
  if not cases:
    raise ValueError(f'meshes=auto finds no mesh of {topology} for this work: {refusal}')
  return cases


def main(_: list[str]) -> None:
  jax.config.update('jax_platforms', 'cpu')
  if _LEVEL.value == 'O1':
    jax.config.update('jax_optimization_level', 'O1')
  # A program for devices that are not there cannot be read back from the cache, and the attempt warns.
  jax.config.update('jax_enable_compilation_cache', False)
  config = _CONFIG.value
  model = read_shape(_MODEL.value or config.model.path)
  work = read_work(config, model)
  topology = fit_topology.describe(_TOPOLOGY.value, _SLICES.value)
  cases = choose_cases(config, work, topology)
  what = 'full' if work.is_full else f'LoRA, rank {work.adapters.rank}'
  print(f'{config.stage} step ({what}) of {_MODEL.value or config.model.path}, {work.rows} x {work.length} tokens x {work.micro_batches}, '
        f'remat {config.layout.remat}, on {len(topology.devices)} devices of {topology}', flush=True)
  fits = []
  for mesh, layout in cases:
    fits.append(fit_report.judge(work, layout.remat, topology, mesh, fit_programs.compile_step(work, layout, mesh)))
    print(fit_report.details(fits[-1]), flush=True)
  if len(fits) > 1:
    print(fit_report.table(fits))
  if _OUTPUT.value:
    Path(_OUTPUT.value).write_text(json.dumps({
        'topology': topology.name, 'slices': topology.num_slices, 'devices': len(topology.devices), 'stage': config.stage,
        'rows': work.rows, 'length': work.length, 'optimization': _LEVEL.value, 'jax': jax.__version__,
        'meshes': [fit_report.to_json(fit) for fit in fits]}, indent=2) + '\n')
    _LOG.info('Wrote %s.', _OUTPUT.value)


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'topology'])
  launch.run(main)
