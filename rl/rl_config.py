"""The settings of a run of reinforcement learning, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl import advantages, optimizer
from rl.batching import Aggregation
from rl.critic import CriticConfig
from rl.curriculum import DomainConfig
from rl.drift import DriftConfig
from rl.losses import PolicyLossConfig
from rl.losses_distillation import TeacherConfig
from rl.optimizer import OptimizerConfig
from rl.proxy_reward import RewardModelConfig
from rl.rollout.worker import RolloutConfig
from rl.run import LayoutConfig, LoraConfig, MeshConfig, ModelSource


@dataclass(frozen=True)
class AdvantageConfig:
  """How rewards become advantages.

  Attributes:
    estimator: 'group' compares the samples of a problem, one advantage for all tokens of a sample (`advantages.group_relative`); 'gae' has a
      critic to compare with (`advantages.gae`, RLConfig.critic); 'reinforce_pp' takes what a token and those after it earn (REINFORCE++,
      arXiv:2501.03262).
    center, scale, epsilon: of `group_relative`. Under 'reinforce_pp' the outcome is centered so before it is given to tokens (its baseline
      form is 'mean'), and whitening scales; under 'gae' the critic is the baseline.
    discount, trace: gamma and lambda of 'gae'.
    whiten: last, subtract the mean and divide by the standard deviation over all sampled tokens of a batch (`advantages.whiten`).
  """
  estimator: Literal['group', 'gae', 'reinforce_pp'] = 'group'
  center: advantages.Center = 'mean'
  scale: advantages.Scale = 'std'
  epsilon: float = 1e-6
  discount: float = 1.0
  trace: float = 1.0
  whiten: bool = False

  def __post_init__(self):
    if self.estimator == 'gae' and (self.center, self.scale) != ('none', 'none'):
      raise ValueError(f"estimator='gae' has the critic as its baseline, and center={self.center!r}, scale={self.scale!r} compare groups; set "
                       "both to 'none'.")
    if self.estimator == 'reinforce_pp' and self.scale != 'none':
      raise ValueError(f"estimator='reinforce_pp' is scaled by whitening over the batch, not by scale={self.scale!r}; set it to 'none'.")
    if self.estimator != 'gae' and (self.discount, self.trace) != (1, 1):
      raise ValueError(f"discount={self.discount} and trace={self.trace} are read by estimator='gae' alone; leave them at 1.")
    if not (0 <= self.discount <= 1 and 0 <= self.trace <= 1):
      raise ValueError(f'discount={self.discount} and trace={self.trace} must be between 0 and 1.')


@dataclass(frozen=True)
class RewardConfig:
  """What a sample earns: a weighted sum of the verifier's score and of what the run's reward models say (`RLConfig.reward_model`).

  Both are computed and logged whatever they weigh: the verifier's score is the truth that reward models are held against. Learning from a
  reward model alone is verifier_weight=0.
  """
  verifier_weight: float = 1.0
  source_weight: float = 0.0

  def __post_init__(self):
    if not (self.verifier_weight >= 0 and self.source_weight >= 0 and self.verifier_weight + self.source_weight > 0):
      raise ValueError(f'verifier_weight={self.verifier_weight} and source_weight={self.source_weight} must not be negative, and one of them '
                       'must be positive.')


@dataclass(frozen=True)
class ProcessConfig:
  """What verified parts of the work pay (`advantages.pay_process`); they are logged always.

  Attributes:
    weight: their share of a reward; 0 pays nothing.
    cap: the most they pay in an episode whose outcome is 0.
    credit: 'episode' pays at the end. 'turn' gives each of the policy's messages what it added (`Trajectory.turn_scores`): as a reward at its
      last token or, under estimator='group', as an advantage over the siblings' messages of the same number, which sums to 0 over them and so
      needs no cap (`advantages.turn_advantages`).
  """
  weight: float = 0.0
  cap: float = 0.1
  credit: Literal['episode', 'turn'] = 'episode'

  def __post_init__(self):
    if not (self.cap >= 0 and 0 <= self.weight < 1 - self.cap):
      raise ValueError(f'weight={self.weight} must be from 0 to below 1 - cap, cap={self.cap} at least 0: a failure may not earn as much as '
                       'a success.')


@dataclass(frozen=True)
class RewardKLConfig:
  """The KL divergence from the reference policy as a part of the reward: -coef (log policy - log reference) at each sampled token.

  Under estimator='group' its sum over a sample is subtracted from the sample's reward (RLOO, arXiv:2402.14740). The policy is the one that
  sampled. A KL term in the loss is `loss.kl_coef`.

  Attributes:
    coef: in reward per nat; 0 is none. With a target, the first value.
    target: nats per sample that the coefficient is adapted to reach; None keeps it.
    gain: of the proportional controller, coef <- coef (1 + gain clip(KL / target - 1, -0.2, 0.2)) (arXiv:1909.08593 sec. 2.2).
  """
  coef: float = 0.0
  target: float | None = None
  gain: float = 0.1

  def __post_init__(self):
    if not self.coef >= 0:
      raise ValueError(f'reward_kl.coef={self.coef} must not be negative.')
    if self.target is not None and not (self.target > 0 and self.coef > 0 and 0 < self.gain < 5):
      raise ValueError(f'reward_kl.target={self.target} nats must be positive, and so must coef={self.coef}, where it starts, and gain='
                       f'{self.gain}, below 5; a coefficient of 0 would stay 0.')


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
    max_rounds: above 1, groups without signal (all rewards equal, and all parts where they are paid) are dropped and replaced by new problems,
      at most so often (dynamic sampling, arXiv:2503.14476 sec. 3.2).
    overlong: samples cut off by the length limit are graded as they stand, left out ('mask'), lose up to 1 ('penalty': the soft overlong
      punishment over the last `overlong_buffer` tokens of a reply), or earn what the critic expects of their rest ('bootstrap').
    minibatches: optimizer steps of a batch, each on its own share of the groups.
    epochs: passes over a batch. With one minibatch and one epoch the old policy is the current one and needs no forward pass.
    rows, length: rows of a micro-batch over all hosts, and their tokens; a conversation (rollout.max_length) must fit in one.
    curriculum: 'adaptive' draws the levels of a domain by how much there is to learn at them, 'fixed' equally.
    reward, reward_model, process, reward_kl: what a sample earns.
    drift: when reward models and the verifier have parted. With group_size=1 no two samples of a problem can be compared, and only the fall
      of the truth is seen.
    critic: of estimator='gae'.
    teacher: a model that the policy learns from at what it samples itself.
    max_probe_diff_nats: how much trained and published weights may differ on the probe, by their precision.
    Others: as in `offline.OfflineConfig`.
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
  overlong: Literal['grade', 'mask', 'penalty', 'bootstrap'] = 'grade'
  overlong_buffer: int = 32
  minibatches: int = 1
  epochs: int = 1
  rows: int = 8
  length: int = 512
  curriculum: Literal['fixed', 'adaptive'] = 'adaptive'
  max_probe_diff_nats: float = 0.1
  reward: RewardConfig = RewardConfig()
  reward_model: RewardModelConfig = RewardModelConfig()
  drift: DriftConfig = DriftConfig()
  process: ProcessConfig = ProcessConfig()
  reward_kl: RewardKLConfig = RewardKLConfig()
  advantage: AdvantageConfig = AdvantageConfig()
  critic: CriticConfig = CriticConfig()
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
    if self.overlong == 'bootstrap' and not self.has_critic:
      raise ValueError(f"overlong='bootstrap' asks a critic, and advantage.estimator={self.advantage.estimator!r} has none; use 'gae'.")
    if self.reward_kl.coef and self.loss.kl_coef:
      raise ValueError(f'reward_kl.coef={self.reward_kl.coef} and loss.kl_coef={self.loss.kl_coef} both hold the policy close to the '
                       'reference; set one of them to 0.')
    if self.advantage.scale == 'mean' and self.reward_kl.coef:
      raise ValueError(f"advantage.scale='mean' divides by mean rewards, and reward_kl.coef={self.reward_kl.coef} can make them negative; "
                       'use loss.kl_coef.')
    if self.reward.source_weight and not self.reward_model.paths:
      raise ValueError(f'reward.source_weight={self.reward.source_weight} pays what reward models say, and reward_model.paths=() names none; '
                       'name a run of the stage reward or a function, or set the weight to 0.')
    if self.max_rounds > 1 and not self.reward.verifier_weight:
      raise ValueError(f'max_rounds={self.max_rounds} replaces groups that the verifier scores equally, and reward.verifier_weight=0 pays '
                       'nothing for that; set max_rounds=1.')
    if self.advantage.scale == 'mean' and self.reward.source_weight:
      raise ValueError(f"advantage.scale='mean' divides by mean rewards, and what reward models say (reward.source_weight="
                       f"{self.reward.source_weight}) can be negative; use 'std' or 'none'.")
    if self.advantage.scale == 'mean' and self.overlong == 'penalty':
      raise ValueError("advantage.scale='mean' divides by mean rewards, and overlong='penalty' can make them negative; use 'grade' or 'mask'.")
    if self.has_critic and self.critic.warmup_steps >= self.num_steps:
      raise ValueError(f'critic.warmup_steps={self.critic.warmup_steps} leaves the policy nothing of num_steps={self.num_steps}.')
    optimizer.schedule(self.optimizer, self.num_updates)
    if self.has_critic:
      optimizer.schedule(self.critic.optimizer, self.num_steps * self.minibatches * self.epochs)

  @property
  def has_critic(self) -> bool:
    return self.advantage.estimator == 'gae'

  @property
  def num_updates(self) -> int:
    """Return the policy's optimizer steps of the whole run, over which the learning rate is scheduled."""
    num_steps = self.num_steps - (self.critic.warmup_steps if self.has_critic else 0)
    return num_steps * self.minibatches * self.epochs
