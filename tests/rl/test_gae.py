"""Generalized advantage estimation by hand, against its definition, over what is no step of the policy, and refused input."""

import numpy as np
import pytest

from rl import advantages


def test_three_steps_by_hand():
  # deltas: 0 + .5 * .6 - .5 = -.2; 0 + .5 * .4 - .6 = -.4; 1 - .4 = .6. With discount * trace = .25:
  # A3 = .6, A2 = -.4 + .25 * .6 = -.25, A1 = -.2 + .25 * -.25 = -.2625.
  found, returns = advantages.gae(np.array([0, 0, 1.0]), np.array([0.5, 0.6, 0.4]), np.ones(3, bool), discount=0.5, trace=0.5)
  np.testing.assert_allclose(found, [-0.2625, -0.25, 0.6], rtol=1e-6)
  np.testing.assert_allclose(returns, [0.2375, 0.35, 1.0], rtol=1e-6)
  assert found.dtype == returns.dtype == np.float32


def test_cut_off_episodes_go_on_with_the_critic():
  found, returns = advantages.gae(np.array([0.0, 1.0]), np.array([0.5, 0.25]), np.ones(2, bool), discount=0.5, trace=1, bootstrap_value=2.0)
  np.testing.assert_allclose(returns, [0 + 0.5 * (1 + 0.5 * 2), 1 + 0.5 * 2], rtol=1e-6)
  np.testing.assert_allclose(found, returns - [0.5, 0.25], rtol=1e-6)


@pytest.mark.parametrize('discount, trace', [(1.0, 1.0), (0.9, 0.0), (0.97, 0.95)])
def test_is_the_double_sum_of_its_definition(discount, trace):
  rng = np.random.default_rng(0)
  rewards, values = rng.normal(size=(2, 12))
  deltas = rewards + discount * np.append(values[1:], 0.3) - values
  wanted = [sum((discount * trace)**(later - t) * deltas[later] for later in range(t, 12)) for t in range(12)]
  found, returns = advantages.gae(rewards, values, np.ones(12, bool), discount=discount, trace=trace, bootstrap_value=0.3)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(returns, wanted + values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('fill', [0.0, 1e9, np.nan])
def test_what_the_policy_did_not_sample_is_no_step(fill):
  rng = np.random.default_rng(1)
  mask = np.array([0, 1, 1, 0, 0, 1, 0, 1, 0], bool)
  rewards, values = rng.normal(size=(2, 4))
  spread = np.full((2, 9), fill)
  spread[:, mask] = rewards, values
  found, returns = advantages.gae(*spread, mask, discount=0.9, trace=0.8)
  dense, dense_returns = advantages.gae(rewards, values, np.ones(4, bool), discount=0.9, trace=0.8)
  np.testing.assert_array_equal(found[mask], dense)
  np.testing.assert_array_equal(returns[mask], dense_returns)
  assert not found[~mask].any() and not returns[~mask].any()


def test_no_sampled_token_and_one():
  empty = advantages.gae(np.full(2, np.nan), np.full(2, np.nan), np.zeros(2, bool), discount=1, trace=1)
  assert [array.tolist() for array in empty] == [[0, 0], [0, 0]]
  found, returns = advantages.gae(np.array([2.0]), np.array([0.5]), np.ones(1, bool), discount=0.5, trace=0.5, bootstrap_value=3.0)
  assert (found.item(), returns.item()) == (3.0, 3.5)


def test_explained_variance_by_hand():
  returns, mask = np.array([1.0, 3.0, 1e9, 5.0]), np.array([1, 1, 0, 1], bool)
  assert advantages.explained_variance(returns, returns, mask) == 1
  assert advantages.explained_variance(np.full(4, 7.0), returns, mask) == pytest.approx(0)
  # Errors 0, 0 and 3: their variance is 2, that of the returns 8 / 3.
  assert advantages.explained_variance(np.array([1.0, 3.0, np.nan, 2.0]), returns, mask) == pytest.approx(1 - 2 / (8 / 3))
  assert advantages.explained_variance(returns, np.full(4, 2.0), mask) is None
  assert advantages.explained_variance(returns, returns, np.zeros(4, bool)) is None


@pytest.mark.parametrize('changes, message', [
    ({'discount': 1.1}, 'discount=1.1 must be between 0 and 1'),
    ({'trace': -0.1}, 'trace=-0.1 must be between 0 and 1'),
    ({'bootstrap_value': np.inf}, 'bootstrap_value=inf must be finite'),
    ({'rewards_T': np.array([0, np.nan])}, r'rewards_T\[1\] is nan, and the policy sampled that token'),
    ({'values_T': np.zeros(3)}, r'values_T\(3,\) and mask_T\(2,\) must have the same shape'),
    ({'mask_T': np.ones(2)}, r'mask_T must be one-dimensional and bool, got float64\(2,\)'),
])
def test_refuses(changes, message):
  arguments = {'rewards_T': np.zeros(2), 'values_T': np.zeros(2), 'mask_T': np.ones(2, bool), 'discount': 1.0, 'trace': 1.0}
  with pytest.raises(ValueError, match=message):
    advantages.gae(**(arguments | changes))
