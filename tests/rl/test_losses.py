"""Policy losses against float64 numpy written from the papers, their gradients against finite differences, and masks that hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import losses
from rl import metrics as metrics_lib
from rl.losses import PolicyLossConfig
from rl.types import Batch

SHAPE = (2, 9)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 2, 2, 2]], np.int32)
MASK = np.array([[0, 1, 1, 0, 1, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0, 1, 1, 0]], bool)
# One advantage a document, of either sign; ratios far beyond both clips and within.
ADVANTAGES = np.array([[1.5] * 4 + [-0.5] * 4 + [0], [-2.0] * 6 + [0.7] * 3])


def arrays(seed=0):
  rng = np.random.default_rng(seed)
  logprobs = -rng.exponential(1.5, SHAPE)
  noise = {name: logprobs + rng.normal(0, 0.3, SHAPE) for name in ('old', 'behavior', 'reference')}
  return {'logprobs': logprobs, **noise, 'advantages': ADVANTAGES, 'entropy': rng.random(SHAPE) + 0.5,
          'weight': np.where(MASK, rng.random(SHAPE) / 10 + 0.05, 0)}


def batch_of(data, **changes):
  integers = np.zeros(SHAPE, np.int32)
  fields = {f'{name}_BT': jnp.asarray(data[source], jnp.float32) for name, source in (
      ('advantages', 'advantages'), ('behavior_logprobs', 'behavior'), ('old_logprobs', 'old'), ('reference_logprobs', 'reference'))}
  return Batch(integers, integers, integers, jnp.asarray(SEGMENTS), jnp.asarray(data['weight'], jnp.float32), **(fields | changes))


def total_and_metrics(data, config, **changes):
  """Our loss, its gradient with respect to logprobs and entropy, and its metrics."""
  batch = batch_of(data, **changes)

  def total(logprobs_BT, entropy_BT):
    loss_BT, metrics = losses.policy_loss_BT(logprobs_BT, batch, config, entropy_BT)
    return jnp.sum(loss_BT * batch.loss_weight_BT), (loss_BT, metrics)

  inputs = (jnp.asarray(data['logprobs'], jnp.float32), jnp.asarray(data['entropy'], jnp.float32))
  (value, (loss_BT, metrics)), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(*inputs)
  return float(value), np.asarray(loss_BT), [np.asarray(grad) for grad in grads], metrics_lib.compute(metrics)


def paper(logprobs, data, config, at):
  """The weighted sum in float64, token by token; what a paper puts under a stop-gradient is computed from the logprobs `at`."""
  total = 0.0
  for place in np.argwhere(MASK):
    row, t = place
    A, old = data['advantages'][row, t], data['old'][row, t]

    def ratio(values):
      if config.ratio == 'token':
        return np.exp(values[row, t] - data['old'][row, t])
      mine = MASK[row] & (SEGMENTS[row] == SEGMENTS[row, t])
      return np.prod(np.exp(values[row, mine] - data['old'][row, mine])) ** (1 / mine.sum())

    r, low, high = ratio(logprobs), 1 - config.clip_low, 1 + config.clip_high
    if config.kind == 'clip':
      objective = min(r * A, min(max(r, low), high) * A)
      if config.dual_clip is not None and A < 0:
        objective = max(objective, config.dual_clip * A)
    elif config.kind == 'cispo':
      objective = min(max(ratio(at), low), high) * A * logprobs[row, t]
    else:
      objective = A * logprobs[row, t]
    if config.importance_cap is not None:
      objective *= min(np.exp(old - data['behavior'][row, t]), config.importance_cap)
    d = logprobs[row, t] - data['reference'][row, t]
    kl = d**2 / 2 if config.kl_estimator == 'k2' else np.exp(-d) - 1 + d
    total += data['weight'][row, t] * (-objective + config.kl_coef * kl - config.entropy_coef * data['entropy'][row, t])
  return total


def slope(data, config, place, step):
  moved = data['logprobs'].copy()
  moved[place] += step
  return (paper(moved, data, config, data['logprobs']) - paper(data['logprobs'], data, config, data['logprobs'])) / step


CONFIGS = {
    'grpo': PolicyLossConfig(kl_coef=0.3, kl_estimator='k3'),
    'dapo': PolicyLossConfig(clip_high=0.28),
    'dual': PolicyLossConfig(clip_high=0.1, dual_clip=1.2, importance_cap=None),
    'k2_entropy': PolicyLossConfig(kl_coef=0.3, entropy_coef=0.2, importance_cap=1.05),
    'gspo': PolicyLossConfig(ratio='sequence', clip_low=0.03, clip_high=0.04, max_segments=2),
    'cispo': PolicyLossConfig(kind='cispo', clip_low=1.0, clip_high=0.2),
    'reinforce': PolicyLossConfig(kind='reinforce'),
}


@pytest.mark.parametrize('name', CONFIGS)
def test_losses_are_those_of_the_papers(name):
  for seed in range(3):
    data = arrays(seed)
    value, loss_BT, _, _ = total_and_metrics(data, CONFIGS[name])
    assert value == pytest.approx(paper(data['logprobs'], data, CONFIGS[name], data['logprobs']), rel=1e-5)
    assert not loss_BT[~MASK].any()


@pytest.mark.parametrize('name', CONFIGS)
def test_gradients_are_finite_differences_of_the_papers(name):
  data = arrays(1)
  _, _, (grad, entropy_grad), metrics = total_and_metrics(data, CONFIGS[name])
  wanted = np.zeros(SHAPE)
  for place in map(tuple, np.argwhere(MASK)):
    wanted[place] = (slope(data, CONFIGS[name], place, 1e-6) + slope(data, CONFIGS[name], place, -1e-6)) / 2
  np.testing.assert_allclose(grad, wanted, rtol=2e-4, atol=1e-6)
  np.testing.assert_allclose(entropy_grad, -CONFIGS[name].entropy_coef * data['weight'], rtol=1e-6)
  if CONFIGS[name].kind != 'reinforce':
    assert 0 < metrics['policy/pg_clipfrac'] < 1


@pytest.mark.parametrize('ratio', ['token', 'sequence'])
@pytest.mark.parametrize('kind', ['clip', 'cispo'])
@pytest.mark.parametrize('advantage', [1.0, -1.0])
@pytest.mark.parametrize('place', ['far below', 'below', 'low', 'inside', 'high', 'above', 'far above'])
def test_gradient_inside_at_and_outside_the_clip(ratio, kind, advantage, place):
  """At a bound itself the gradient is one of the two one-sided slopes; everywhere else it is the slope."""
  if (ratio, kind) == ('sequence', 'cispo'):
    with pytest.raises(ValueError, match="ratio='sequence' with kind='cispo' is not defined"):
      PolicyLossConfig(kind=kind, ratio=ratio)
    return
  config = PolicyLossConfig(kind=kind, ratio=ratio, clip_low=0.25, clip_high=0.5, importance_cap=None, max_segments=2, dual_clip=None)
  value = {'far below': 0.01, 'below': 0.7, 'low': 0.75, 'inside': 1.1, 'high': 1.5, 'above': 1.6, 'far above': 50.0}[place]
  data = arrays() | {'advantages': np.full(SHAPE, advantage)}
  data['logprobs'] = data['old'] + np.log(value)
  _, _, (grad, _), _ = total_and_metrics(data, config)
  for token in map(tuple, np.argwhere(MASK)):
    sides = sorted(slope(data, config, token, step) for step in (1e-7, -1e-7))
    room = 1e-5 + 2e-4 * abs(sides[0])
    assert sides[0] - room <= grad[token] <= sides[1] + room
    if kind == 'clip' and place in ('far below', 'below', 'above', 'far above'):
      # Below the range only a positive advantage pulls, above it only a negative one.
      assert (grad[token] == 0) == ((advantage < 0) == ('below' in place))


def test_first_update_on_policy_is_the_policy_gradient():
  data = arrays() | {'weight': MASK / 10}
  for config in (PolicyLossConfig(importance_cap=None), PolicyLossConfig(ratio='sequence', importance_cap=None)):
    _, loss_BT, (grad, _), metrics = total_and_metrics(data, config, old_logprobs_BT=None)
    assert metrics['policy/ppo_kl'] == 0 and metrics['policy/pg_clipfrac'] == 0
    assert metrics['policy/probs_ratio_min'] == metrics['policy/probs_ratio_max'] == metrics['policy/probs_ratio'] == 1
    np.testing.assert_allclose(loss_BT, np.where(MASK, -ADVANTAGES, 0), rtol=1e-6)
    np.testing.assert_allclose(grad[MASK], (-ADVANTAGES * data['weight'])[MASK], rtol=1e-5)


def test_metrics_by_hand():
  data = arrays()
  config = PolicyLossConfig(clip_high=0.1, dual_clip=1.2, importance_cap=1.05)
  _, _, _, metrics = total_and_metrics(data, config)
  ratio = np.exp(data['logprobs'] - data['old'])[MASK]
  weight, positive = np.exp(data['old'] - data['behavior'])[MASK], ADVANTAGES[MASK] > 0
  difference = (data['logprobs'] - data['reference'])[MASK]
  low, high, lower = ~positive & (ratio < 0.8), positive & (ratio > 1.1), ~positive & (ratio > 1.2)
  wanted = {
      'policy/ppo_kl': -np.log(ratio).mean(), 'policy/pg_clipfrac': (low | high).mean(), 'policy/pg_clipfrac_low': low.mean(),
      'policy/pg_clipfrac_high': high.mean(), 'policy/pg_clipfrac_lower': lower.mean(), 'policy/probs_ratio': ratio.mean(),
      'policy/probs_ratio_min': ratio.min(), 'policy/probs_ratio_max': ratio.max(), 'policy/entropy': data['entropy'][MASK].mean(),
      'policy/reference_kl_k1': difference.mean(), 'policy/reference_kl_k2': (difference**2 / 2).mean(),
      'policy/reference_kl_k3': (np.exp(-difference) - 1 + difference).mean(),
      'mismatch/logprob_abs_diff': np.abs(np.log(weight)).mean(), 'mismatch/logprob_abs_diff_max': np.abs(np.log(weight)).max(),
      'mismatch/token_mult_prob_error': np.exp(np.abs(np.log(weight))).mean(), 'mismatch/kl': -np.log(weight).mean(),
      'mismatch/k3_kl': (weight - 1 - np.log(weight)).mean(), 'mismatch/importance_mean': weight.mean(),
      'mismatch/importance_max': weight.max(), 'mismatch/chi2': (weight**2).mean() - 1, 'mismatch/capped_fraction': (weight > 1.05).mean(),
      'mismatch/ess': weight.sum()**2 / (weight.size * (weight**2).sum()),
      'policy/pg_loss': paper(data['logprobs'], data, config, data['logprobs'])}
  assert metrics.keys() == wanted.keys()
  for key, value in wanted.items():
    assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key


def test_effective_share_merges_by_its_sums():
  # Weights 1, 1 and 4: (6)^2 / (3 x 18) = 2/3; no weights at all have no value.
  share = losses.EffectiveShare(jnp.float32(2), jnp.float32(2), jnp.float32(2))
  one = losses.EffectiveShare(jnp.float32(4), jnp.float32(1), jnp.float32(16))
  none = losses.EffectiveShare(jnp.float32(0), jnp.float32(0), jnp.float32(0))
  assert metrics_lib.compute({'a/b': share.merge(one)})['a/b'] == pytest.approx(2 / 3)
  assert metrics_lib.compute(metrics_lib.merge({'a/b': share}, {'a/b': none}))['a/b'] == 1
  assert metrics_lib.compute({'a/b': none}) == {}


@pytest.mark.parametrize('garbage', [np.nan, 1e9, -1e9, np.inf])
@pytest.mark.parametrize('name', CONFIGS)
def test_what_masked_places_hold_changes_nothing(name, garbage):
  clean = arrays(2)
  dirty = {key: np.where(MASK, value, garbage) if key != 'weight' else value for key, value in clean.items()}
  wanted, got = (total_and_metrics(data, CONFIGS[name]) for data in (clean, dirty))
  assert got[0] == wanted[0] and got[3] == wanted[3]
  np.testing.assert_array_equal(got[1], wanted[1])
  for got_grad, wanted_grad in zip(got[2], wanted[2]):
    np.testing.assert_array_equal(got_grad, wanted_grad)
    assert not got_grad[~MASK].any()


def test_a_batch_of_padding_has_no_loss_and_no_metrics_but_sums():
  data = {key: np.full(SHAPE, np.nan) for key in arrays()} | {'weight': np.zeros(SHAPE)}
  for config in CONFIGS.values():
    value, _, grads, metrics = total_and_metrics(data, config)
    assert value == 0 and not np.any(grads)
    assert {key for key, number in metrics.items() if number != 0} <= {'policy/probs_ratio_min'}


def test_a_ratio_beyond_float32_does_not_spoil_a_clipped_gradient():
  data = arrays() | {'advantages': np.full(SHAPE, 1.0)}
  data['logprobs'] = data['old'] + 200
  _, _, (grad, _), metrics = total_and_metrics(data, PolicyLossConfig(importance_cap=None))
  assert not grad.any() and metrics['policy/pg_clipfrac'] == 1


def test_more_documents_than_declared_are_loud():
  value, loss_BT, _, _ = total_and_metrics(arrays(), dataclasses.replace(CONFIGS['gspo'], max_segments=1))
  assert np.isnan(value) and np.isfinite(loss_BT[SEGMENTS == 1]).all()


@pytest.mark.parametrize('fields, message', [
    ({'kl_estimator': 'k1'}, r"kl_estimator='k1' is no loss: its gradient is the score function, whose mean .* is 0"),
    ({'kl_estimator': 'k4'}, r"kl_estimator='k4' is unknown; use one of k2, k3"), ({'kind': 'ppo'}, r"kind='ppo' is unknown"),
    ({'ratio': 'turn'}, r"ratio='turn' is unknown; use one of token, sequence"),
    ({'clip_low': 1.5}, r'clip_low=1.5 must be above 0 and at most 1'), ({'clip_high': 0.0}, r'clip_high=0.0 above 0'),
    ({'dual_clip': 1.1}, r'dual_clip=1.1 with .* above 1 \+ clip_high'), ({'kind': 'cispo', 'dual_clip': 3.0}, r"needs kind='clip'"),
    ({'kind': 'reinforce', 'ratio': 'sequence'}, r'is not defined'), ({'max_segments': 0}, r'max_segments=0 must be at least 1'),
    ({'importance_cap': 0.0}, r'importance_cap=0.0 must be positive, or None'), ({'kl_coef': -1.0}, r'kl_coef=-1.0 .* must not be negative')])
def test_settings_that_make_no_sense_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    PolicyLossConfig(**fields)


@pytest.mark.parametrize('missing, config, message', [
    ('advantages_BT', PolicyLossConfig(), r'advantages_BT is None'),
    ('behavior_logprobs_BT', PolicyLossConfig(), r'importance_cap=2.0 .* batch.behavior_logprobs_BT is None; pack the logprobs'),
    ('reference_logprobs_BT', PolicyLossConfig(kl_coef=0.1), r'kl_coef=0.1 .* batch.reference_logprobs_BT is None; score the batch'),
    ('', PolicyLossConfig(entropy_coef=0.1), r'entropy_coef=0.1 needs entropy_BT')])
def test_a_missing_array_is_an_error_and_never_zeros(missing, config, message):
  batch = batch_of(arrays(), **({missing: None} if missing else {}))
  with pytest.raises(ValueError, match=message):
    losses.policy_loss_BT(jnp.zeros(SHAPE), batch, config)
