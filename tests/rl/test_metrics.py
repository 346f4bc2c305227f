"""Metrics reduce the same way however the step is cut into micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import metrics as metrics_lib
from rl.metrics import Last, Max, Mean, Min, Sum


def collect(values_B, weights_B):
  return {
      'train/loss_nats': Mean.of(values_B, weights_B),
      'train/tokens': Sum(jnp.sum(weights_B)),
      'train/largest': Max(jnp.max(values_B)),
      'train/smallest': Min(jnp.min(values_B)),
      'train/newest': Last(values_B[-1]),
  }


collect_jit = jax.jit(collect)
merge_jit = jax.jit(metrics_lib.merge)

VALUES_B = np.float32([3, 1, 4, 1, 5, 9, 2, 6])
WEIGHTS_B = np.float32([1, 0, 1, 1, 0, 1, 2, 1])
# By hand: (3 + 4 + 1 + 9 + 2*2 + 6) / (1 + 1 + 1 + 1 + 2 + 1).
EXPECTED = {'train/loss_nats': 27 / 7, 'train/tokens': 7.0, 'train/largest': 9.0, 'train/smallest': 1.0, 'train/newest': 6.0}


@pytest.mark.parametrize('num_parts', [1, 2, 4])
def test_micro_batches_give_the_numbers_of_the_whole_batch(num_parts):
  parts = [collect_jit(v, w) for v, w in zip(np.split(VALUES_B, num_parts), np.split(WEIGHTS_B, num_parts), strict=True)]
  assert metrics_lib.compute(functools.reduce(merge_jit, parts)) == pytest.approx(EXPECTED, rel=1e-6)


def test_merging_works_outside_jit_and_leaves_its_inputs_alone():
  first, second = collect_jit(VALUES_B[:4], WEIGHTS_B[:4]), collect_jit(VALUES_B[4:], WEIGHTS_B[4:])
  before = metrics_lib.compute(first)
  assert metrics_lib.compute(metrics_lib.merge(first, second)) == pytest.approx(EXPECTED, rel=1e-6)
  assert metrics_lib.compute(first) == before


def test_a_mean_ignores_whatever_lies_at_weight_zero():
  mean = Mean.of(jnp.float32([2, np.nan, np.inf]), jnp.array([True, False, False]))
  assert metrics_lib.compute({'a/b': mean}) == {'a/b': 2.0}


def test_an_empty_mean_is_left_out_until_something_arrives():
  empty = Mean.of(jnp.zeros(3), jnp.zeros(3))
  assert metrics_lib.compute({'a/b': empty}) == {}
  assert metrics_lib.compute({'a/b': metrics_lib.merge({'a/b': empty}, {'a/b': Mean.of(jnp.ones(1), jnp.ones(1))})['a/b']}) == {'a/b': 1.0}


def test_a_nan_is_never_hidden():
  values = jnp.float32([1, np.nan])
  got = metrics_lib.compute({'a/mean': Mean.of(values, jnp.ones(2)), 'a/max': metrics_lib.merge(
      {'a/m': Max(values[1])}, {'a/m': Max(values[0])})['a/m'], 'a/min': Min(values[0]).merge(Min(values[1]))})
  assert len(got) == 3
  assert all(np.isnan(value) for value in got.values())


def test_means_of_low_precision_values_are_taken_in_float32():
  mean = Mean.of(jnp.full((1000,), 1.0, jnp.bfloat16), jnp.ones((1000,), jnp.bfloat16))
  assert mean.total.dtype == jnp.float32
  assert metrics_lib.compute({'a/b': mean}) == {'a/b': 1.0}


def test_compute_gives_plain_floats_and_accepts_host_numbers():
  got = metrics_lib.compute({'eval/gsm8k/accuracy': Last(np.int32(1)), 'a/b': Sum(2)})
  assert got == {'eval/gsm8k/accuracy': 1.0, 'a/b': 2.0}
  assert all(type(value) is float for value in got.values())


def test_bad_metrics_are_named():
  with pytest.raises(ValueError, match=r"only one side has \['a/c', 'a/d'\]"):
    metrics_lib.merge({'a/b': Sum(1), 'a/c': Sum(1)}, {'a/b': Sum(1), 'a/d': Sum(1)})
  with pytest.raises(ValueError, match=r'a/b is a Sum on one side and a Max on the other'):
    metrics_lib.merge({'a/b': Sum(1)}, {'a/b': Max(1)})
  with pytest.raises(ValueError, match=r"The metric key 'loss' must be 'area/name_unit'"):
    metrics_lib.compute({'loss': Sum(1)})
  with pytest.raises(ValueError, match=r'a/b holds arrays of shapes \[\(3,\)\]; a metric must be a scalar'):
    metrics_lib.compute({'a/b': Sum(jnp.ones(3))})
  with pytest.raises(TypeError, match=r'a/b is a float; a metric must be a Mean, Sum, Max, Min or Last'):
    metrics_lib.compute({'a/b': 1.0})
