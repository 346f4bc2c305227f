"""The optimizer: optax chains, schedules in optimizer steps, decay by parameter path.

Trainable parameters and moments are float32: bfloat16 has 8 bits of precision, so an update below 1/256 of a weight, and the 1/1000 by which
Adam's second moment moves, would round to nothing. `first_moment_dtype` may be bfloat16 to save memory: it changes by 1/10 a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import optax

from models import params as params_lib


@dataclass(frozen=True)
class OptimizerConfig:
  """AdamW (arXiv:1711.05101 alg. 2) and its schedule.

  Attributes:
    learning_rate: peak, reached after the warm-up.
    schedule: shape after the warm-up, from the peak to `final_fraction` of it at the last step.
    warmup_steps: optimizer steps of linear rise from 0.
    final_fraction: last learning rate over the peak; unused by 'constant'.
    beta1, beta2, epsilon: Adam's.
    weight_decay: decoupled, times the learning rate; applies to matrices only (no norms, biases, embeddings).
    clip_norm: largest global gradient norm; None means no clipping.
    first_moment_dtype: of Adam's first moment.
  """
  learning_rate: float = 1e-5
  schedule: Literal['constant', 'linear', 'cosine'] = 'cosine'
  warmup_steps: int = 0
  final_fraction: float = 0.1
  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float | None = 1.0
  first_moment_dtype: Literal['float32', 'bfloat16'] = 'float32'

  def __post_init__(self):
    if self.learning_rate <= 0:
      raise ValueError(f'learning_rate={self.learning_rate} must be positive.')
    if self.warmup_steps < 0:
      raise ValueError(f'warmup_steps={self.warmup_steps} must not be negative.')
    if not 0 <= self.final_fraction <= 1:
      raise ValueError(f'final_fraction={self.final_fraction} must be between 0 and 1.')
    if self.clip_norm is not None and self.clip_norm <= 0:
      raise ValueError(f'clip_norm={self.clip_norm} must be positive, or None for no clipping.')


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
  """Return the learning rate as a function of the optimizer step.

  Raises:
    ValueError: the warm-up takes the whole run.
  """
  if config.warmup_steps >= num_steps:
    raise ValueError(f'optimizer.warmup_steps={config.warmup_steps} leaves nothing of num_steps={num_steps}; use a shorter warm-up.')
  rest = num_steps - config.warmup_steps
  peak, final = config.learning_rate, config.learning_rate * config.final_fraction
  after = {
      'constant': lambda: optax.constant_schedule(peak),
      'linear': lambda: optax.linear_schedule(peak, final, rest),
      'cosine': lambda: optax.cosine_decay_schedule(peak, rest, config.final_fraction),
  }[config.schedule]()
  if not config.warmup_steps:
    return after
  # The first step is already a step: a rate of 0 would waste its gradient.
  rise = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
  return optax.join_schedules([rise, after], [config.warmup_steps])


def is_decayed(name: str) -> bool:
  """Whether weight decay applies to the parameter of this path: matrices of the blocks and adapters, nothing else."""
  return name.startswith('blocks/') and not name.endswith(('norm', '_bias'))


def build(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
  """Return the chain clip -> Adam -> decay -> learning rate."""
  parts = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
  parts.append(optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, mu_dtype=config.first_moment_dtype))
  if config.weight_decay:
    parts.append(optax.add_decayed_weights(config.weight_decay, lambda tree: params_lib.map_named(lambda name, _: is_decayed(name), tree)))
  parts.append(optax.scale_by_learning_rate(schedule(config, num_steps)))
  return optax.chain(*parts)
