"""Rotary embedding: hand-derived angles, relative positions, and each scaling's own definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import rope
from models.config import RopeConfig
from tests import tiny


def test_angles_by_hand():
  sin, cos = rope.angles(jnp.array([[0, 2]]), RopeConfig(theta=100.0), head_dim=4)
  # Frequencies 100 ** -(0, 1/2) = 1, 0.1.
  np.testing.assert_allclose(sin[0], [[0, 0], [np.sin(2), np.sin(0.2)]], rtol=1e-6)
  np.testing.assert_allclose(cos[0], [[1, 1], [np.cos(2), np.cos(0.2)]], rtol=1e-6)


SCALINGS = {
    'none': RopeConfig(theta=1e4),
    'million': RopeConfig(theta=2.8e9),
    'linear': RopeConfig(theta=1e4, scaling='linear', factor=8),
    'ntk': RopeConfig(theta=1e4, scaling='ntk', factor=32),
    'yarn': RopeConfig(theta=1e6, scaling='yarn', factor=32, original_length=32_768, attention_factor=1.0),
    'llama3': RopeConfig(theta=5e5, scaling='llama3', factor=8, original_length=8192),
}


@pytest.mark.parametrize('name', SCALINGS)
def test_angles_are_exact_at_ten_million_tokens(name):
  """A float32 product of position and frequency is off by 0.03 at 10^6; half-precision RoPE gives NaN (Megatron-DeepSpeed PR#399)."""
  rng = np.random.default_rng(0)
  edges = [0, 1, 2**16 - 1, 2**16, 2**20 - 1, 2**20, 2**24 - 1, 2**24]
  positions = np.concatenate([rng.integers(0, 2**24, 20_000), edges]).astype(np.int32)
  sin, cos = jax.jit(lambda positions_BT: rope.angles(positions_BT, SCALINGS[name], 128))(positions[None])
  assert sin.dtype == cos.dtype == jnp.float32
  turned = positions.astype(np.longdouble)[:, None] * rope.inverse_frequencies(SCALINGS[name], 128)[0]
  np.testing.assert_allclose(sin[0], np.sin(turned).astype(np.float64), rtol=0, atol=1.5e-7)
  np.testing.assert_allclose(cos[0], np.cos(turned).astype(np.float64), rtol=0, atol=1.5e-7)


def test_global_and_local_layers_have_their_own_base():
  config = tiny.config()
  for kind, theta in (('global', 1e6), ('local', 1e4)):
    sin, _ = rope.angles(jnp.array([[10**6]]), config.layer_rope(kind), 16)
    np.testing.assert_allclose(sin[0, 0], np.sin(1e6 * theta ** -(np.arange(8) / 8)), rtol=0, atol=1.5e-7)


def test_far_scores_depend_on_the_distance_only():
  """At position 10^7 the score of two tokens is what it is at the start: the first token is where rounding was worst (arXiv:2411.13476)."""
  rng = np.random.default_rng(1)
  q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 64)), jnp.float32) for _ in range(2))

  def score(query_position, key_position):
    turned = [rope.rotate(x, *rope.angles(jnp.array([[p]]), RopeConfig(theta=5e7), 64)) for x, p in ((q, query_position), (k, key_position))]
    return float(jnp.sum(turned[0] * turned[1]))

  assert score(10_000_123, 10_000_000) == pytest.approx(score(123, 0), abs=2e-5)


def test_scores_depend_on_the_distance_only():
  rng = np.random.default_rng(0)
  q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

  def score(query_position, key_position):
    config = RopeConfig(theta=1e4)
    turned = [rope.rotate(x, *rope.angles(jnp.array([[p]]), config, 16)) for x, p in ((q, query_position), (k, key_position))]
    return float(jnp.sum(turned[0] * turned[1]))

  assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
  assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_scalings():
  plain, factor = rope.inverse_frequencies(RopeConfig(theta=1e4), 64)
  assert factor == 1 and plain[0] == 1
  linear, _ = rope.inverse_frequencies(RopeConfig(theta=1e4, scaling='linear', factor=4), 64)
  np.testing.assert_allclose(linear, plain / 4)
  # NTK leaves the fastest pair alone and slows the slowest one by exactly the factor.
  ntk, _ = rope.inverse_frequencies(RopeConfig(theta=1e4, scaling='ntk', factor=4), 64)
  assert ntk[0] == 1 and ntk[-1] == pytest.approx(plain[-1] / 4)
  # llama3 leaves wavelengths below original/high alone, divides those above original/low.
  llama3, _ = rope.inverse_frequencies(
      RopeConfig(theta=5e5, scaling='llama3', factor=8, original_length=8192, low_freq_factor=1, high_freq_factor=4), 128)
  base, _ = rope.inverse_frequencies(RopeConfig(theta=5e5), 128)
  wavelengths = 2 * np.pi / base
  np.testing.assert_allclose(llama3[wavelengths < 2048], base[wavelengths < 2048])
  np.testing.assert_allclose(llama3[wavelengths > 8192], base[wavelengths > 8192] / 8)
  yarn, factor = rope.inverse_frequencies(RopeConfig(theta=1e4, scaling='yarn', factor=4, original_length=2048), 64)
  assert yarn[0] == plain[0] and yarn[-1] == pytest.approx(plain[-1] / 4)
  assert factor == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize('fields, message', [
    ({'scaling': 'longrope'}, "rope.scaling='longrope' is unknown; use one of"),
    ({'scaling': 'yarn', 'factor': 2.0}, "rope.scaling='yarn' needs rope.original_length"),
    ({'factor': 0.5}, 'rope.factor=0.5 at least 1'),
    ({'scaling': 'llama3', 'factor': 2.0, 'original_length': 64, 'low_freq_factor': 4.0}, 'rope.low_freq_factor=4.0 must be below'),
])
def test_bad_settings(fields, message):
  with pytest.raises(ValueError, match=message.replace('(', '\\(')):
    RopeConfig(**fields)
