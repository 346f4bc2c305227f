"""Rotary position embedding (RoFormer, arXiv:2104.09864 eq. 15) and its scalings for longer contexts.

Pairs are (i, i + H/2), the half-split convention of every family here. Angles are float32 always: bfloat16 rounds position 257 to 256.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from models.config import RopeConfig


def _correction_dimension(rotations: float, head_dim: int, config: RopeConfig) -> float:
  """Return the dimension whose wavelength makes `rotations` turns over the original context (YaRN, arXiv:2309.00071 sec. 3.2)."""
  return head_dim * math.log(config.original_length / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
  """Return (radians per position [H/2] float64, factor on cos and sin)."""
  exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  plain = config.theta ** -exponent
  if config.scaling == 'none':
    return plain, 1.0
  if config.scaling == 'linear':
    return plain / config.factor, 1.0
  if config.scaling == 'ntk':
    return (config.theta * config.factor ** (head_dim / (head_dim - 2))) ** -exponent, 1.0
  if config.scaling == 'llama3':
    rotations = config.original_length * plain / (2 * np.pi)
    keep = np.clip((rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor), 0, 1)
    return plain * keep + plain / config.factor * (1 - keep), 1.0
  low = _correction_dimension(config.beta_fast, head_dim, config)
  high = _correction_dimension(config.beta_slow, head_dim, config)
  if config.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
  return plain * (1 - ramp) + plain / config.factor * ramp, _yarn_attention_factor(config)


def _yarn_attention_factor(config: RopeConfig) -> float:
  def scale(multiplier):
    return 0.1 * multiplier * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

  if config.attention_factor is not None:
    return config.attention_factor
  if config.mscale and config.mscale_all_dim:
    return scale(config.mscale) / scale(config.mscale_all_dim)
  return scale(1.0)


def angles(positions_BT: jax.Array, config: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
  """Return (sin_BTH, cos_BTH) float32 with H = head_dim / 2."""
  frequencies, factor = inverse_frequencies(config, head_dim)
  turned = positions_BT.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)[None, None]
  return jnp.sin(turned) * factor, jnp.cos(turned) * factor


def rotate(x_BTNH: jax.Array, sin_BTH: jax.Array, cos_BTH: jax.Array) -> jax.Array:
  """Rotate the pairs of each head by the angles of its position; computed in float32, returned in x's dtype."""
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  sin, cos = sin_BTH[:, :, None], cos_BTH[:, :, None]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)
