"""The figures of `launch.bench ring` that are cheap: what programs of a million tokens would need, and the table."""

import sys

import pytest

from launch import bench_ring, bench_rl
from launch.bench_ring import Figure


@pytest.mark.parametrize('name', ['A4-8', 'A13'])
def test_a_million_tokens_fit(name):
  """Compiled for as many simulated devices, in a process that has them: attention alone on 8, and a small model on 64."""
  command = [sys.executable, '-m', 'launch.bench', 'ring', f'--child=ours:ring:{name}']
  figures = [Figure(**figure) for figure in bench_rl.run_child(command)['figures']]
  assert figures and all(figure.is_met for figure in figures), '\n'.join(map(str, figures))


def test_bounds_are_kept_from_either_side():
  assert Figure('a', 1.0, 1.0).is_met and not Figure('a', 1.1, 1.0).is_met
  assert Figure('a', 1.1, 1.0, least=True).is_met and not Figure('a', 0.9, 1.0, least=True).is_met
  assert str(Figure('a', 2, 1.5, 's')).split() == ['a', '2', '<=', '1.5', 's', 'MISSED']


def test_float64_follows_a_case_by_hand():
  """Two tokens, the second of which sees both with equal weight: queries of zeros make all scores 0."""
  import numpy as np

  zeros, ones = np.zeros((1, 2, 1, 64), np.float32), np.ones((1, 2, 1, 64), np.float32)
  value = np.concatenate([ones[:, :1], 3 * ones[:, 1:]], axis=1)
  out, dq, dk, dv = bench_ring._exact((zeros, ones, value, ones))
  np.testing.assert_allclose(out[:, 0], [1, 2])
  np.testing.assert_allclose(dv[:, 0], [1.5, 0.5])
  assert not np.any(dk) and not np.any(np.round(dq, 12))
