"""Distillation: the settings of learning from a teacher's distributions, and divergences over what is kept of them.

Divergences over the whole vocabulary are `heads_distillation.divergence`'s, which never holds a distribution. Here is the other way: of a
teacher its likeliest words are kept, and the rest of its probability as one outcome more. The divergence between such coarse distributions is
a lower bound of the one between the full ones (the data-processing inequality), and equal to it where all words are kept.

A token counts where its loss weight is not 0; everything else is replaced before any arithmetic. Everything is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from models.heads_distillation import Divergence

# Below float32's resolution of 1, from which the rest is computed.
_LEAST_REST = 1e-7


@dataclass(frozen=True)
class TeacherSource:
  """A frozen model to learn from.

  Attributes:
    path: a Hugging Face directory, a .gguf file or a run directory (its newest checkpoint); its vocabulary is the student's.
    dtype: of its parameters.
  """
  path: str = ''
  dtype: Literal['float32', 'bfloat16'] = 'bfloat16'


@dataclass(frozen=True)
class TeacherConfig(TeacherSource):
  """A teacher of the policy's own samples (arXiv:2306.13649); path='' is none.

  Attributes:
    coef: of the reverse KL divergence KL(policy | teacher), in nats per sampled token.
    divergence: 'sampled' pays log teacher - log policy of the token that was sampled as its advantage, which costs no memory; 'full' is the
      divergence over the whole vocabulary at the sampled places, whose gradient has less variance.
    temperature: 'full' only: of both distributions; the divergence counts temperature^2 times.
    reward_coef: of the advantages that come from rewards; 0 learns from the teacher alone.
  """
  coef: float = 1.0
  divergence: Literal['sampled', 'full'] = 'sampled'
  temperature: float = 1.0
  reward_coef: float = 1.0

  def __post_init__(self):
    if not (self.coef > 0 and self.temperature > 0 and self.reward_coef >= 0):
      raise ValueError(f'teacher: coef={self.coef} and temperature={self.temperature} must be positive, reward_coef={self.reward_coef} not '
                       "negative; path='' leaves the teacher out.")
    if self.divergence == 'sampled' and self.temperature != 1:
      raise ValueError(f"teacher.temperature={self.temperature} with divergence='sampled': the tokens are sampled at temperature 1, and only "
                       "there is their log-ratio an estimate of the divergence; use 1, or divergence='full'.")


@dataclass(frozen=True)
class DistillationLossConfig:
  """The loss (1 - alpha) x supervised + alpha x temperature^2 x divergence (arXiv:1503.02531 sec. 2) on given texts.

  Attributes:
    alpha: share of the divergence.
    divergence: from the teacher's distribution p to the student's q: 'forward' KL(p | q), 'reverse' KL(q | p), 'jensen_shannon'
      (arXiv:2306.13649 eq. 1).
    beta: 'jensen_shannon' only: the teacher's share of the mixture.
    temperature: of both distributions.
    final_temperature: reached linearly at the last step; None stays at `temperature`.
    top_k: the teacher's likeliest words that are computed once and kept with the run, so that training does not hold the teacher; 0 holds it.
  """
  alpha: float = 1.0
  divergence: Divergence = 'forward'
  beta: float = 0.5
  temperature: float = 1.0
  final_temperature: float | None = None
  top_k: int = 0

  def __post_init__(self):
    if self.divergence not in get_args(Divergence):
      raise ValueError(f'divergence={self.divergence!r} is unknown; use one of {", ".join(get_args(Divergence))}.')
    if not (0 < self.alpha <= 1 and 0 < self.beta < 1):
      raise ValueError(f'alpha={self.alpha} must be above 0 and at most 1, beta={self.beta} between 0 and 1.')
    if not (self.temperature > 0 and self.last_temperature > 0):
      raise ValueError(f'temperature={self.temperature} and final_temperature={self.final_temperature} must be positive.')
    if self.top_k < 0:
      raise ValueError(f'top_k={self.top_k} must be at least 0, which holds the teacher instead.')
    if self.top_k and self.last_temperature != self.temperature:
      raise ValueError(f'top_k={self.top_k} keeps probabilities at one temperature, and temperature={self.temperature} changes to '
                       f'final_temperature={self.final_temperature}; use one temperature, or top_k=0.')

  @property
  def last_temperature(self) -> float:
    """Return the temperature of the last step, and of evaluations."""
    return self.temperature if self.final_temperature is None else self.final_temperature

  def temperature_at(self, step: jax.Array, num_steps: int) -> jax.Array:
    """Return the temperature after so many steps, float32."""
    share = jnp.minimum(step.astype(jnp.float32) / max(num_steps - 1, 1), 1)
    return jnp.float32(self.temperature) + share * jnp.float32(self.last_temperature - self.temperature)


def top_divergence_BT(logprobs_BTJ: jax.Array, teacher_logprobs_BTJ: jax.Array, mask_BT: jax.Array, kind: Divergence,
                      beta: float = 0.5) -> jax.Array:
  """Return the divergence in nats over J words and the rest, from the student's and the teacher's logprobs of these words.

  Differentiable in the student's logprobs. `kind` and `beta` are as in `heads_distillation.divergence`; 0 where the mask is false.
  """
  logq, logp = (_with_rest(jnp.where(mask_BT[..., None], x.astype(jnp.float32), -math.log(2 * x.shape[-1])))
                for x in (logprobs_BTJ, teacher_logprobs_BTJ))
  if kind == 'forward':
    found_BT = _kl(logp, logq)
  elif kind == 'reverse':
    found_BT = _kl(logq, logp)
  else:
    logm = jnp.logaddexp(math.log(beta) + logp, math.log1p(-beta) + logq)
    found_BT = beta * _kl(logp, logm) + (1 - beta) * _kl(logq, logm)
  return jnp.where(mask_BT, found_BT, 0)


def _with_rest(logprobs_BTJ: jax.Array) -> jax.Array:
  """Append the log of the probability that is left."""
  rest_BT = jnp.log(jnp.maximum(1 - jnp.exp(logprobs_BTJ).sum(-1), _LEAST_REST))
  return jnp.concatenate([logprobs_BTJ, rest_BT[..., None]], -1)


def _kl(log_first, log_second) -> jax.Array:
  return (jnp.exp(log_first) * (log_first - log_second)).sum(-1)
