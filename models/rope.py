"""Rotary position embedding (RoFormer, arXiv:2104.09864 eq. 15) and its scalings for longer contexts.

Pairs are (i, i + H/2), the half-split convention of every family here.

A float32 holds seven digits, and position x frequency spends all of them on whole turns: at position 10^6 its sine is wrong by 0.03. So angles
are counted in turns, as 64-bit binary fractions, by integer arithmetic that drops whole turns exactly; sine and cosine are then those of an
angle below an eighth of a turn. The error is below 1.5e-7 at every position to 2^24. Tables of sines and angle addition are as exact, but cost
5 times the CPU and megabytes of constants in every program (measured).
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
  """Return (sin_BTH, cos_BTH) float32 with H = head_dim / 2, of integer positions from 0 on."""
  frequencies, factor = inverse_frequencies(config, head_dim)
  sin_BTH, cos_BTH = _sin_cos(_turns(positions_BT, frequencies))
  return sin_BTH * factor, cos_BTH * factor


def _turns(positions_BT: jax.Array, frequencies: np.ndarray) -> jax.Array:
  """Return frac(position x frequency / 2 pi) uint32 [B, T, H/2] in units of 2^-32 turns, at most 3 units too small."""
  fractions = [round(frequency / (2 * math.pi) * 2**64) for frequency in frequencies.tolist()]
  # The upper word of position x fraction wraps at whole turns by itself; the lower one is multiplied in halves to find what it carries over.
  upper, high, low = (jnp.asarray([(fraction >> shift) & mask for fraction in fractions], jnp.uint32)[None, None]
                      for shift, mask in ((32, 2**32 - 1), (16, 2**16 - 1), (0, 2**16 - 1)))
  position = positions_BT.astype(jnp.uint32)[..., None]
  position_high, position_low = position >> 16, position & (2**16 - 1)
  return position * upper + position_high * high + ((position_high * low) >> 16) + ((position_low * high) >> 16)


def _sin_cos(turns: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return float32 sine and cosine of angles in units of 2^-32 turns."""
  quarter = (turns + jnp.uint32(2**29)) >> 30
  # What is left beside whole quarters is at most pi/4, where the Taylor series to the tenth power are exact to 2e-9.
  angle = (turns - (quarter << 30)).astype(jnp.int32).astype(jnp.float32) * (2 * math.pi / 2**32)
  square = angle * angle
  sin = angle * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square / 362_880))))
  cos = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40_320 - square / 3_628_800))))
  is_odd = (quarter & 1) == 1
  sin, cos = jnp.where(is_odd, cos, sin), jnp.where(is_odd, sin, cos)
  return jnp.where((quarter & 2) == 2, -sin, sin), jnp.where(((quarter + 1) & 2) == 2, -cos, cos)


def rotate(x_BTNH: jax.Array, sin_BTH: jax.Array, cos_BTH: jax.Array) -> jax.Array:
  """Rotate the pairs of each head by the angles of its position; computed in float32, returned in x's dtype."""
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  sin, cos = sin_BTH[:, :, None], cos_BTH[:, :, None]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)
