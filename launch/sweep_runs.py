"""The runs of a sweep: what they are called, what their configs are, what would keep them from running, and the model they may share.

Every stage of `launch.train` can be swept.

Deliberately absent: running them, which is the program's (`sweep`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import copy
from dataclasses import dataclass
import itertools
from pathlib import Path
import re
from typing import Any

import jax

from launch import report_run, stages
from launch.report_sweep import Study
from models import hf_weights, sharding, transformer, weight_files
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from rl import checkpoint
from rl import config as config_lib
from rl import run as run_lib

MODEL = 'model'
_NAME = re.compile(r'[\w.=+-]+')


@dataclass(frozen=True)
class SweepConfig:
  """Runs that differ in a few settings.

  Attributes:
    base: settings of a run, as a config of `launch.train` holds them.
    settings: (name, its (dotted key of the base, value) pairs); pairs and not mappings, as keys of a config have no dots.
    seeds: each setting is run with each of them as its `seed`.
    metric: a metric of runs whose last value is compared.
    curves: metrics of runs that are drawn over the steps; the mean of one over all steps says how fast a run learned.
    against: (setting, the one that it is compared with seed by seed).
    panels: (title, settings drawn together); () is all in one.
    model: of random weights and a tokenizer of bytes, made in the sweep's directory for runs whose model.path is ''.
  """
  base: Any
  settings: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
  metric: str
  curves: tuple[str, ...]
  seeds: tuple[int, ...] = (0, 1, 2)
  against: tuple[tuple[str, str], ...] = ()
  panels: tuple[tuple[str, tuple[str, ...]], ...] = ()
  model: ModelConfig | None = None

  def __post_init__(self):
    known = [name for name, _ in self.settings]
    for attribute, values in (('settings', known), ('seeds', self.seeds)):
      if not values or len(set(values)) < len(values):
        raise ValueError(f'{attribute}={list(values)} must be at least one, and none twice.')
    for name in known:
      if not _NAME.fullmatch(name):
        raise ValueError(f'settings has the name {name!r}; names are directories, of letters, digits and _ . = + -')
    if fixed := [name for name, changes in self.settings if 'seed' in dict(changes)]:
      raise ValueError(f'settings {", ".join(fixed)} change the seed, and every setting is run with seeds={self.seeds}; name them there.')
    if empty := [title for title, names in self.panels if not names]:
      raise ValueError(f'panels {", ".join(empty)} draw nothing; give them settings, or leave them out.')
    for attribute, names in (('against', itertools.chain(*self.against)), ('panels', itertools.chain(*(names for _, names in self.panels)))):
      if unknown := sorted(set(names) - set(known)):
        raise ValueError(f'{attribute} names {", ".join(unknown)}; settings are {", ".join(known)}.')


@dataclass(frozen=True)
class Run:
  """One run of a sweep: its name, setting and seed, the record of its config, and its directory."""
  name: str
  setting: str
  seed: int
  config: Any
  directory: Path

  @property
  def last_step(self) -> int:
    """Return the step of its newest checkpoint, 0 without one."""
    return max(checkpoint.committed_steps(self.directory / run_lib.CHECKPOINTS), default=0)

  @property
  def is_finished(self) -> bool:
    return self.last_step >= self.config.num_steps

  def run(self) -> None:
    """Run it in this process, from its newest checkpoint; raises as its stage does."""
    stages.find(self.config.stage).run(self.config, self.directory)


def runs_of(config: SweepConfig, workdir: str | Path) -> list[Run]:
  """Return the runs of a sweep, settings in order and seeds within them.

  Raises:
    ValueError: a setting that changes what the base does not have or does not allow, or runs that cannot share a process.
  """
  workdir, runs = Path(workdir), []
  for setting, changes in config.settings:
    for seed in config.seeds:
      values = _changed(config.base, (*changes, ('seed', seed)), f'settings.{setting}')
      if not values.get('model', {}).get('path'):
        values = _changed(values, (('model.path', str(workdir / MODEL)),), f'settings.{setting}')
      record, name = stages.find(values.get('stage')).record, f'{setting}-seed={seed}'
      runs.append(Run(name, setting, seed, config_lib.build(record, values, f'settings.{setting}'), workdir / name))
  if len(counts := {run.config.cpu_devices for run in runs}) > 1:
    raise ValueError(f'Runs ask for cpu_devices of {", ".join(map(str, sorted(counts)))}, and they share a process; make it the same in all.')
  return runs


def _changed(base: Mapping[str, Any], changes: Sequence[tuple[str, Any]], path: str) -> dict[str, Any]:
  """Return a copy of nested settings with some of them changed; ValueError for one that is not there."""
  result = copy.deepcopy(dict(base))
  for key, value in changes:
    *parents, last = key.split('.')
    place = result
    for parent in parents:
      place = place.get(parent) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
      raise ValueError(f'{path} changes {key!r}, which base does not have; its keys are written like optimizer.learning_rate.')
    place[last] = value
  return result


def check(config: SweepConfig, runs: Sequence[Run]) -> None:
  """Refuse what would stop a sweep on its way.

  Raises:
    ValueError: a directory that holds another run or another model, or no model for a run.
  """
  made = runs[0].directory.parent / MODEL
  if config.model is not None and made.exists() and (changed := config_lib.difference(config.model, weight_files.read_config(made))):
    raise ValueError(f'{made} holds another model: {_shown(changed)}. Use another --workdir, or delete that of this sweep.')
  for run in runs:
    if Path(run.config.model.path) == made and config.model is None:
      raise ValueError(f'Run {run.name} has no model: give base.model.path, or model, from which the sweep makes one of random weights.')
    if run.last_step:
      stored = checkpoint.read_host(run.directory / run_lib.CHECKPOINTS).config
      if changed := config_lib.difference(config_lib.to_json(run.config), stored):
        raise ValueError(f'{run.directory} holds a run that differs: {_shown(changed)}. Use another --workdir, or delete that directory.')


def _shown(changed: Mapping[str, tuple[Any, Any]]) -> str:
  return '; '.join(f'{key}: {old!r} there, {new!r} now' for key, (old, new) in list(changed.items())[:5])


def chosen(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
  """Return the runs of these names, all where none is named; ValueError for a name that no run has."""
  if unknown := sorted(set(names) - {run.name for run in runs}):
    raise ValueError(f'--only names {", ".join(unknown)}; runs are {", ".join(run.name for run in runs)}.')
  return [run for run in runs if not names or run.name in names]


def make_model(model: ModelConfig, directory: Path) -> None:
  """Write a model of random weights, the same at every call, unless it is there; ValueError if it has no room for bytes."""
  words = tokenizer_lib.ByteTokenizer()
  if model.vocab_size < words.vocab_size:
    raise ValueError(f'model.vocab_size={model.vocab_size} has no room for the {words.vocab_size} ids of bytes; raise it.')
  if not directory.exists():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    params = params_lib.init(transformer.declare(model), 0, mesh, sharding.TRAIN)
    hf_weights.export(directory, model, params, dtype='float32', tokenizer=words)


def plan(runs: Sequence[Run]) -> str:
  """Return, for each setting, what it changes of the first run's config, and for each run how far it is."""
  first = config_lib.to_json(runs[0].config)
  lines = []
  for run in runs:
    changed = config_lib.difference(config_lib.to_json(run.config), first)
    told = '  '.join(f'{key}={new!r}' for key, (_, new) in changed.items() if key != 'seed')
    lines.append(f'{run.name}: step {run.last_step} of {run.config.num_steps}' + (f'; {told}' if told else ''))
  return '\n'.join(lines)


def study(config: SweepConfig, runs: Sequence[Run]) -> Study:
  """Return what finished runs measured; raises as `report_run.read_run`."""
  results = {setting: [report_run.read_run(run.directory).metrics for run in runs if run.setting == setting] for setting, _ in config.settings}
  return Study(results, config.metric, config.curves, dict(config.against), dict(config.panels))
