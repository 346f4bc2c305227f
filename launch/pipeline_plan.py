"""The stages of a pipeline as commands: what each reads, what it makes, and the settings of its run, all checked before the first one starts.

A stage is an ordinary run of `launch.train` with an ordinary config. It starts from the policy of the stage before it; a reward model is no
policy, so the stage after it starts from the same one. What the pipeline gives a run (`PipelineConfig`) is not among the run's own settings.

| stage | config | learns from |
|---|---|---|
| sft | configs/sft.py | the mixture (`rl.data.strata`) |
| reward | configs/reward_model.py | pairs sampled from the policy it starts from (`launch.prepare_pairs`) |
| preference | configs/dpo.py | the same pairs |
| rlvr | configs/grpo.py | the domains' verifiers |
| student | configs/distill.py | the policy before it, on the mixture; it starts from some of that policy's layers |

Deliberately absent: running the commands (`launch.pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
import importlib
import itertools
from pathlib import Path
from typing import Any, Literal, NamedTuple

from models import student, weight_files
from models.config import ModelConfig
from rl import config as config_lib
from rl.curriculum import DomainConfig
from rl.data import sources, strata
from rl.data.strata import MixtureConfig
from rl.rl_config import RLConfig
from rl.run import LayoutConfig, MeshConfig, ModelSource
from rl.train import TrainConfig
from rl.train_distillation import DistillationConfig
from rl.train_preference import PreferenceConfig, RewardConfig

BASE, STUDENT = 'base', 'student'
# Of the settings of RLVR, those that decide what a policy samples and how it is graded.
_SAMPLING = ('seed', 'model', 'domains', 'rollout', 'eval', 'overlong', 'overlong_buffer', 'length', 'mesh', 'cpu_devices')


class Kind(NamedTuple):
  """What a stage is: its config file, the record that reads it, the data it learns from, and whether it makes a policy."""
  file: str
  record: type
  data: Literal['mixture', 'pairs', 'domains']
  is_policy: bool = True


KINDS: Mapping[str, Kind] = {
    'sft': Kind('sft', TrainConfig, 'mixture'),
    'reward': Kind('reward_model', RewardConfig, 'pairs', is_policy=False),
    'preference': Kind('dpo', PreferenceConfig, 'pairs'),
    'rlvr': Kind('grpo', RLConfig, 'domains'),
    STUDENT: Kind('distill', DistillationConfig, 'mixture'),
}


@dataclass(frozen=True)
class PairsConfig:
  """How preference pairs are made; see the flags of `launch.prepare_pairs`."""
  problems: int = 512
  samples: int = 8
  first_index: int = 100_000
  pairs_per_problem: int = 2
  min_pairs: int = 1
  temperature: float = 1.0


@dataclass(frozen=True)
class PipelineConfig:
  """A pipeline.

  Attributes:
    model: the base model.
    stages: which ones, in order.
    mixture: what supervised stages learn from.
    domains: what pairs are sampled on, RLVR learns, and policies are evaluated on.
    pairs: how pairs are made.
    evaluate: whether the base model and each policy are tried on `rlvr.eval.problems` held-out problems.
    export_dtype: of the models between stages.
    seed, mesh, layout, cpu_devices: of all runs.
    student_layers: of the policy that it learns from, those that the student starts with; () is every second one of each kind.
    sft, reward, preference, rlvr, student: settings of the runs as in their config files, without those that the pipeline gives them. With
      rlvr.reward.source_weight above 0, RLVR is paid by the reward model of the stage before it too.
  """
  model: ModelSource
  mixture: MixtureConfig
  domains: dict[str, DomainConfig]
  sft: dict[str, Any]
  reward: dict[str, Any]
  preference: dict[str, Any]
  rlvr: dict[str, Any]
  student: dict[str, Any]
  stage: Literal['pipeline'] = 'pipeline'
  stages: tuple[str, ...] = tuple(KINDS)
  pairs: PairsConfig = PairsConfig()
  student_layers: tuple[int, ...] = ()
  evaluate: bool = True
  export_dtype: Literal['float32', 'bfloat16'] = 'float32'
  seed: int = 0
  mesh: MeshConfig = MeshConfig()
  layout: LayoutConfig = LayoutConfig()
  cpu_devices: int = 1

  def __post_init__(self):
    unknown = [name for name in self.stages if name not in KINDS]
    if unknown or not self.stages or len(set(self.stages)) < len(self.stages):
      raise ValueError(f'stages={self.stages} must be some of {", ".join(KINDS)}, each at most once.')
    if not self.model.path:
      raise ValueError("model.path='' must be the base model: a Hugging Face directory or a .gguf file.")


@dataclass(frozen=True)
class Action:
  """One thing to be done for a stage, all of it or nothing.

  Attributes:
    name: 'stage/what', of its record.
    command: arguments of Python; () is the mixture, which the pipeline writes itself.
    inputs: files, models and runs that it reads.
    output: what it makes.
    settings: JSON values that decide it besides the command.
    last_step: of a run, its last one.
  """
  name: str
  command: tuple[str, ...]
  inputs: tuple[str, ...]
  output: str
  settings: Mapping[str, Any] = field(default_factory=dict)
  last_step: int = 0

  @property
  def is_data(self) -> bool:
    return self.name.startswith('data/')


@dataclass(frozen=True)
class Stage:
  """A stage and its actions in order.

  Attributes:
    parent: the stage whose policy it starts from; '' for the base model.
    model: the policy it makes, '' for a reward model.
  """
  name: str
  parent: str
  actions: tuple[Action, ...]
  model: str


class Layout(NamedTuple):
  """Where things lie in a pipeline's directory."""
  root: Path

  @property
  def mixture(self) -> str:
    return str(self.root / 'data' / 'mixture')

  def pairs(self, policy: str) -> str:
    """Return the file of the pairs that a stage's policy sampled."""
    return str(self.root / 'data' / f'pairs_{policy}.jsonl')

  def run(self, stage: str) -> str:
    """Return the directory of a stage's run."""
    return str(self.root / stage)

  def model(self, stage: str) -> str:
    """Return the directory of a stage's exported policy."""
    return str(self.root / 'models' / stage)

  def evaluation(self, policy: str) -> str:
    """Return the file of a policy's evaluation."""
    return str(self.root / 'evaluations' / f'{policy}.json')


def plan(config: PipelineConfig, workdir: str | Path) -> list[Stage]:
  """Return the stages of a pipeline, the base model first.

  Raises:
    ValueError, FileNotFoundError: settings of a run or of the mixture that cannot be.
  """
  planner = _Planner(config, Layout(Path(workdir)))
  return [planner.base(), *(planner.stage(name) for name in config.stages)]


def check_layers(config: PipelineConfig) -> None:
  """Read the base model and raise ValueError if it has not the layers that the student is to start with."""
  if STUDENT not in config.stages or not config.student_layers:
    return
  num_layers = weight_files.read_config(config.model.path).num_layers
  try:
    student.check_layers(config.student_layers, num_layers)
  except ValueError as error:
    raise ValueError(f'config.student_layers: {error} {config.model.path} has no others; () takes every second one.') from error


def until(stages: Sequence[Stage], last: str | None) -> list[Stage]:
  """Return the stages up to one, None for all of them; ValueError if there is none of that name."""
  names = [stage.name for stage in stages]
  if last is not None and last not in names:
    raise ValueError(f'--until={last} must be one of {", ".join(names)}.')
  return list(stages if last is None else stages[:names.index(last) + 1])


class _Planner:
  """Goes from stage to stage."""

  def __init__(self, config: PipelineConfig, layout: Layout):
    self._config, self._layout = config, layout
    self._strata = strata.strata(config.mixture.components)
    self._policy, self._model = BASE, config.model.path
    grpo = _defaults('grpo')
    rlvr = config_lib.to_json(_merged(config.rlvr, {**self._shared(''), **self._domains('', '')[0]}))
    config_lib.build(RLConfig, rlvr, 'config.rlvr')
    self._sampling = tuple(_flags({**grpo, **{key: rlvr[key] for key in _SAMPLING}}, grpo))

  def base(self) -> Stage:
    return Stage(BASE, '', self._evaluation(BASE, self._model), self._model)

  def stage(self, name: str) -> Stage:
    """Return the next stage."""
    kind, layout, parent, model = KINDS[name], self._layout, self._policy, self._model
    data, made_by = {'mixture': self._mixture, 'pairs': self._pairs, 'domains': self._domains}[kind.data](parent, model)
    start = model
    if name == STUDENT:
      start, data = layout.model(f'{name}_start'), {**data, 'teacher': {'path': model}}
      made_by = [*made_by, self._slice(model, start)]
    given = {**self._shared(start), **data}
    settings = config_lib.to_json(_merged(getattr(self._config, name), given))
    config_lib.build(kind.record, settings, f'config.{name}')
    run, exported = layout.run(name), layout.model(name) if kind.is_policy else ''
    reads = self._reward_runs() if name == 'rlvr' else ()
    actions = [*made_by, Action(
        f'{name}/train', ('-m', 'launch.train', f'--config=configs/{kind.file}.py', *_flags(settings, _defaults(kind.file)),
                          f'--workdir={run}'),
        tuple(dict.fromkeys((start, model, *(action.output for action in made_by), *reads))), run, last_step=settings['num_steps'])]
    if kind.is_policy:
      actions.append(Action(f'{name}/export', ('-m', 'launch.convert', f'--source={run}', f'--target={exported}',
                                               f'--dtype={self._config.export_dtype}', '--overwrite'), (run,), exported))
      actions += self._evaluation(name, exported)
      self._policy, self._model = name, exported
    return Stage(name, parent, tuple(actions), exported)

  def _slice(self, model: str, start: str) -> Action:
    layers = self._config.student_layers or every_second(weight_files.read_config(self._config.model.path))
    return Action(f'{STUDENT}/start', ('-m', 'launch.convert', f'--source={model}', f'--target={start}', f'--dtype={self._config.export_dtype}',
                                       f'--layers={",".join(map(str, layers))}', '--overwrite'), (model,), start)

  def _shared(self, model: str) -> dict[str, Any]:
    config = self._config
    return {'seed': config.seed, 'model': {**config_lib.to_json(config.model), 'path': model}, 'mesh': config_lib.to_json(config.mesh),
            'layout': config_lib.to_json(config.layout), 'cpu_devices': config.cpu_devices}

  def _mixture(self, parent: str, model: str) -> tuple[dict[str, Any], list[Action]]:
    mixture, directory = self._config.mixture, self._layout.mixture
    tasks, rates = strata.tasks_and_rates(self._strata, directory, mixture.heldout_fraction)
    read = [path for files in (*mixture.components.values(), *mixture.against.values()) for path in files.paths]
    inputs = sources.find_files(dict.fromkeys(read), sources.SUFFIXES['jsonl']) if read else ()
    # The problems of evaluations too, because the mixture is kept apart from them.
    settings = {'mixture': config_lib.to_json(mixture), 'domains': config_lib.to_json(self._config.domains),
                'eval_problems': self._config.rlvr['eval']['problems']}
    return {'data': {'tasks': tasks, 'rates': rates}}, [Action('data/mixture', (), inputs, directory, settings)]

  def _pairs(self, parent: str, model: str) -> tuple[dict[str, Any], list[Action]]:
    path = self._layout.pairs(parent)
    action = Action(f'data/pairs_{parent}', (
        '-m', 'launch.prepare_pairs', f'--model={model}', '--config=configs/grpo.py', *self._sampling,
        *(f'--{name}={value}' for name, value in vars(self._config.pairs).items()), f'--dtype={self._dtype}', f'--output={path}'),
        (model,), path)
    return {'data': {'paths': (path,)}}, [action]

  def _domains(self, parent: str, model: str) -> tuple[dict[str, Any], list[Action]]:
    given: dict[str, Any] = {'domains': config_lib.to_json(self._config.domains)}
    if runs := self._reward_runs():
      given['reward_model'] = {'paths': runs}
    return given, []

  def _reward_runs(self) -> tuple[str, ...]:
    """Return the pipeline's own reward model where RLVR is to be paid by one and names none."""
    config = self._config
    before = itertools.takewhile(lambda name: name != 'rlvr', config.stages)
    is_wanted = config.rlvr['reward']['source_weight'] > 0 and not config.rlvr['reward_model']['paths']
    return (self._layout.run('reward'),) if is_wanted and 'reward' in before else ()

  def _evaluation(self, policy: str, model: str) -> tuple[Action, ...]:
    if not self._config.evaluate:
      return ()
    path = self._layout.evaluation(policy)
    return (Action(f'{policy}/evaluate', ('-m', 'launch.evaluate', f'--model={model}', '--config=configs/grpo.py', *self._sampling,
                                          f'--dtype={self._dtype}', f'--output={path}'), (model,), path),)

  @property
  def _dtype(self) -> str:
    return self._config.layout.compute_dtype


def every_second(model: ModelConfig) -> tuple[int, ...]:
  """Return every second layer of each kind of attention, the first of each included."""
  by_kind: dict[Any, list[int]] = {}
  for layer in range(model.num_layers):
    by_kind.setdefault(model.layer_kind(layer), []).append(layer)
  return tuple(sorted(layer for layers in by_kind.values() for layer in layers[::2]))


def _defaults(file: str) -> dict[str, Any]:
  return config_lib.to_json(importlib.import_module(f'configs.{file}').get_config())


def _merged(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
  """Return `settings` with what is given, which goes before, at any depth."""
  result = dict(settings)
  for key, value in given.items():
    inner = result.get(key)
    result[key] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
  return result


def _flags(settings: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = '--config') -> Iterator[str]:
  """Yield a flag for each setting that is not the config file's; a mapping with keys of its own is one flag."""
  for key, value in settings.items():
    default = defaults[key]
    if isinstance(value, dict) and value.keys() == default.keys():
      yield from _flags(value, default, f'{prefix}.{key}')
    elif value != default:
      yield f'{prefix}.{key}={value if isinstance(value, str) else repr(_literal(value))}'


def _literal(value: Any) -> Any:
  """Return JSON values as the literals of a config, whose sequences are tuples."""
  if isinstance(value, Mapping):
    return {key: _literal(inner) for key, inner in value.items()}
  if isinstance(value, Sequence) and not isinstance(value, str):
    return tuple(map(_literal, value))
  return value
