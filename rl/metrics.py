"""Metric values that know their reduction, so that micro-batches, steps and shards merge without anyone remembering how.

A function under `jit` returns a dict from 'area/name_unit' to one of the types below; `merge` folds two such dicts, under `jit` or
outside, and `compute` fetches the result as plain floats. A value is a scalar over the global batch, so hosts need no merging.

Deliberately absent: histograms and moving averages (the reader of the metrics file can make them), and keys that come and go between
micro-batches (one compiled shape serves all).
"""

from __future__ import annotations

from collections.abc import Mapping
import re
from typing import TypeAlias

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

_KEY = re.compile(r'[A-Za-z0-9_.:-]+(/[A-Za-z0-9_.:-]+)+')


@struct.dataclass
class Mean:
  """A weighted mean, kept as its numerator and denominator. With weight 0 it has no value, and `compute` leaves it out."""

  total: jax.Array
  weight: jax.Array

  @classmethod
  def of(cls, values: jax.Array, weights: jax.Array) -> Mean:
    """Average `values` with `weights` of the same shape, in float32; a place of weight 0 may hold anything, NaN too."""
    weights = weights.astype(jnp.float32)
    return cls(jnp.sum(jnp.where(weights != 0, values.astype(jnp.float32), 0) * weights), jnp.sum(weights))

  def merge(self, other: Mean) -> Mean:
    return Mean(self.total + other.total, self.weight + other.weight)

  def value(self) -> float | None:
    return float(self.total) / float(self.weight) if self.weight != 0 else None


@struct.dataclass
class Sum:
  """A total: counts, and terms that already carry their denominator."""

  total: jax.Array

  def merge(self, other: Sum) -> Sum:
    return Sum(self.total + other.total)

  def value(self) -> float:
    return float(self.total)


@struct.dataclass
class Max:
  """A maximum; NaN if any part is NaN."""

  maximum: jax.Array

  def merge(self, other: Max) -> Max:
    return Max(jnp.maximum(self.maximum, other.maximum))

  def value(self) -> float:
    return float(self.maximum)


@struct.dataclass
class Min:
  """A minimum; NaN if any part is NaN."""

  minimum: jax.Array

  def merge(self, other: Min) -> Min:
    return Min(jnp.minimum(self.minimum, other.minimum))

  def value(self) -> float:
    return float(self.minimum)


@struct.dataclass
class Last:
  """The newest value, for what happens once a step: the learning rate, the norm of the whole gradient."""

  newest: jax.Array

  def merge(self, other: Last) -> Last:
    return other

  def value(self) -> float:
    return float(self.newest)


Metric: TypeAlias = Mean | Sum | Max | Min | Last
Metrics: TypeAlias = Mapping[str, Metric]


def merge(earlier: Metrics, later: Metrics) -> dict[str, Metric]:
  """Fold two dicts of metrics with the same keys into one, each by its own reduction.

  Raises:
    ValueError: the keys differ, or one key has two types.
  """
  if earlier.keys() != later.keys():
    raise ValueError(f'Metrics to merge must have the same keys; only one side has {sorted(earlier.keys() ^ later.keys())}.')
  for key, metric in earlier.items():
    if type(metric) is not type(later[key]):
      raise ValueError(f'{key} is a {type(metric).__name__} on one side and a {type(later[key]).__name__} on the other; use one type.')
  return {key: metric.merge(later[key]) for key, metric in earlier.items()}


def compute(metrics: Metrics) -> dict[str, float]:
  """Fetch the metrics in one transfer and return their values; a `Mean` of weight 0 is left out.

  Raises:
    ValueError: a key that is not 'area/name_unit', or a value that is not a scalar.
    TypeError: a value that is none of the types of this module.
  """
  for key, metric in metrics.items():
    if not isinstance(metric, Metric):
      raise TypeError(f'{key} is a {type(metric).__name__}; a metric must be a Mean, Sum, Max, Min or Last.')
    if not _KEY.fullmatch(key):
      raise ValueError(f"The metric key {key!r} must be 'area/name_unit', such as 'train/loss_nats'.")
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(metric)]
    if any(shapes):
      raise ValueError(f'{key} holds arrays of shapes {shapes}; a metric must be a scalar, so reduce it where it is made.')
  values = {key: metric.value() for key, metric in jax.device_get(dict(metrics)).items()}
  return {key: value for key, value in values.items() if value is not None}
