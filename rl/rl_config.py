"""The settings of a run of reinforcement learning, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl import advantages, optimizer
from rl.batching import Aggregation
from rl.curriculum import DomainConfig
from rl.losses import PolicyLossConfig
from rl.losses_distillation import TeacherConfig
from rl.optimizer import OptimizerConfig
from rl.rollout.worker import RolloutConfig
from rl.run import LayoutConfig, LoraConfig, MeshConfig, ModelSource


@dataclass(frozen=True)
class AdvantageConfig:
  """How rewards of a group become advantages; see `advantages.group_relative`."""
  center: advantages.Center = 'mean'
  scale: advantages.Scale = 'std'
  epsilon: float = 1e-6


@dataclass(frozen=True)
class EvalConfig:
  """Evaluation on held-out problems, with one sample each.

  Attributes:
    every_steps: steps between evaluations; there is also one before the first step and after the last. 0 never evaluates.
    problems: how many, over all domains and levels.
    temperature: 0 decodes greedily.
  """
  every_steps: int = 0
  problems: int = 200
  temperature: float = 0.0


@dataclass(frozen=True)
class RLConfig:
  """A run of reinforcement learning.

  Attributes:
    domains: name -> what is trained on.
    num_steps: optimizer schedule and run end here; a step is one batch of groups.
    aggregation: how token losses become one number (`batching.step_denominator`); 'constant' divides by rollout.max_new_tokens.
    groups: problems of a step.
    group_size: samples of a problem.
    max_rounds: above 1, groups without signal (all rewards equal) are dropped and replaced by new problems, at most so often (dynamic
      sampling, arXiv:2503.14476 sec. 3.2).
    overlong: samples cut off by the length limit are graded as they stand, left out ('mask'), or lose up to 1 ('penalty': the soft overlong
      punishment over the last `overlong_buffer` tokens of a reply).
    minibatches: optimizer steps of a batch, each on its own share of the groups.
    epochs: passes over a batch. With one minibatch and one epoch the old policy is the current one and needs no forward pass.
    rows, length: rows of a micro-batch over all hosts, and their tokens; a conversation (rollout.max_length) must fit in one.
    curriculum: 'adaptive' draws the levels of a domain by how much there is to learn at them, 'fixed' equally.
    teacher: a model that the policy learns from at what it samples itself.
    max_probe_diff_nats: how much trained and published weights may differ on the probe, by their precision.
    Others: as in `train.TrainConfig`.
  """
  model: ModelSource
  domains: dict[str, DomainConfig]
  num_steps: int
  aggregation: Aggregation
  stage: Literal['rl'] = 'rl'
  seed: int = 0
  groups: int = 16
  group_size: int = 8
  max_rounds: int = 1
  overlong: Literal['grade', 'mask', 'penalty'] = 'grade'
  overlong_buffer: int = 32
  minibatches: int = 1
  epochs: int = 1
  rows: int = 8
  length: int = 512
  curriculum: Literal['fixed', 'adaptive'] = 'adaptive'
  max_probe_diff_nats: float = 0.1
  advantage: AdvantageConfig = AdvantageConfig()
  loss: PolicyLossConfig = PolicyLossConfig()
  teacher: TeacherConfig = TeacherConfig()
  rollout: RolloutConfig = RolloutConfig()
  eval: EvalConfig = EvalConfig()
  lora: LoraConfig = LoraConfig()
  mesh: MeshConfig = MeshConfig()
  layout: LayoutConfig = LayoutConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  checkpoint_every_steps: int = 10
  checkpoints_kept: int = 2
  cpu_devices: int = 1

  def __post_init__(self):
    for name, least in (('num_steps', 1), ('seed', 0), ('groups', 1), ('group_size', 1), ('max_rounds', 1), ('overlong_buffer', 1),
                        ('minibatches', 1), ('epochs', 1), ('rows', 1), ('length', 2), ('checkpoint_every_steps', 1),
                        ('checkpoints_kept', 1), ('cpu_devices', 1)):
      if getattr(self, name) < least:
        raise ValueError(f'{name}={getattr(self, name)} must be at least {least}.')
    if self.rollout.max_length > self.length:
      raise ValueError(f'rollout.max_length={self.rollout.max_length} does not fit into rows of length={self.length}; '
                       'raise length or lower rollout.max_length.')
    if self.overlong == 'penalty' and self.overlong_buffer > self.rollout.max_new_tokens:
      raise ValueError(f'overlong_buffer={self.overlong_buffer} is beyond rollout.max_new_tokens={self.rollout.max_new_tokens}.')
    if self.minibatches > self.groups:
      raise ValueError(f'minibatches={self.minibatches} cannot share groups={self.groups}; use at most as many.')
    if self.group_size == 1 and self.advantage.center != 'none':
      raise ValueError(f'group_size=1 leaves nothing to compare with advantage.center={self.advantage.center!r}; raise it to 2 or more.')
    if self.rollout.min_group_size > self.group_size:
      raise ValueError(f'rollout.min_group_size={self.rollout.min_group_size} is more than group_size={self.group_size}.')
    optimizer.schedule(self.optimizer, self.num_updates)

  @property
  def num_updates(self) -> int:
    """Return the optimizer steps of the whole run, over which the learning rate is scheduled."""
    return self.num_steps * self.minibatches * self.epochs
