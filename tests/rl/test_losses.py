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
    A, old = data['advantages'][row, t], data['old' if config.decoupled else 'behavior'][row]
    mine = MASK[row] & (SEGMENTS[row] == SEGMENTS[row, t])

    def ratio(values):
      if config.ratio == 'token':
        return np.exp(values[row, t] - old[t])
      return np.prod(np.exp(values[row, mine] - old[mine])) ** (1 / mine.sum())

    r, low, high = ratio(logprobs), 1 - config.clip_low, 1 + config.clip_high
    if config.kind == 'clip':
      objective = min(r * A, min(max(r, low), high) * A)
      if config.dual_clip is not None and A < 0:
        objective = max(objective, config.dual_clip * A)
    elif config.kind == 'dppo':
      rise = np.exp(at[row, t]) - np.exp(old[t])
      objective = 0 if (A > 0 and rise > config.clip_high) or (A < 0 and -rise > config.clip_low) else r * A
    elif config.kind == 'cispo':
      objective = min(max(ratio(at), low), high) * A * logprobs[row, t]
    else:
      objective = A * logprobs[row, t]
    if config.importance_cap is not None:
      of_tokens = np.exp(data['old'][row] - data['behavior'][row])
      weight = {'token': of_tokens[t], 'sequence': np.prod(of_tokens[mine]),
                'geometric': np.prod(of_tokens[mine]) ** (1 / mine.sum())}[config.importance_level]
      least = config.importance_low or 0
      is_inside = least <= weight <= config.importance_cap
      objective *= {'truncate': max(min(weight, config.importance_cap), least), 'mask': weight * is_inside,
                    'filter': 1 * is_inside}[config.importance_mode]
    if config.opsm_nats is not None and A < 0 and np.mean(data['behavior'][row, mine] - at[row, mine]) > config.opsm_nats:
      objective = 0
    d = logprobs[row, t] - data['reference'][row, t]
    kl = d**2 / 2 if config.kl_estimator == 'k2' else np.exp(-d) - 1 + d
    if config.kl_estimator == 'k3_corrected':
      kl *= np.exp(logprobs[row, t] - old[t])
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
    'dppo': PolicyLossConfig(kind='dppo', clip_low=0.02, clip_high=0.02, kl_coef=0.3, kl_estimator='k3_corrected'),
    'naive': PolicyLossConfig(decoupled=False, importance_cap=None, clip_low=0.1, clip_high=0.1, kl_coef=0.3, kl_estimator='k3_corrected'),
    'naive_gspo': PolicyLossConfig(decoupled=False, importance_cap=None, ratio='sequence', clip_low=0.03, clip_high=0.04),
    'naive_dppo': PolicyLossConfig(kind='dppo', clip_low=0.02, clip_high=0.02, decoupled=False, importance_cap=None),
    'sequence_tis': PolicyLossConfig(importance_level='sequence', importance_cap=1.1),
    'sequence_mis': PolicyLossConfig(importance_level='sequence', importance_mode='mask', importance_cap=1.1),
    'geometric': PolicyLossConfig(importance_level='geometric', importance_mode='filter', importance_low=0.9, importance_cap=1.1),
    'icepop': PolicyLossConfig(importance_mode='mask', importance_low=0.8, importance_cap=1.2),
    'both_truncated': PolicyLossConfig(kind='cispo', importance_low=0.9, importance_cap=1.1),
    'opsm': PolicyLossConfig(opsm_nats=0.05),
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


def test_the_settings_of_these_tests_drop_and_bound_some_tokens_and_not_all():
  found = {name: [total_and_metrics(arrays(seed), config)[3] for seed in range(3)] for name, config in CONFIGS.items()}
  for name, key in (('sequence_tis', 'capped'), ('both_truncated', 'capped'), ('sequence_mis', 'masked'), ('geometric', 'masked'),
                    ('icepop', 'masked'), ('opsm', 'opsm')):
    assert any(0 < metrics[f'mismatch/{key}_fraction'] < 1 for metrics in found[name]), name
  assert all('mismatch/capped_fraction' not in metrics and 'mismatch/masked_fraction' not in metrics for metrics in found['naive'])


def test_importance_weights_by_hand():
  # Document 1 of row 0 has two sampled tokens, of weights 2 and 4: product 8, geometric mean sqrt(8). Advantage 1, ratio 1: loss = -w.
  data = arrays() | {'advantages': np.ones(SHAPE), 'behavior': np.zeros(SHAPE), 'old': np.zeros(SHAPE), 'logprobs': np.zeros(SHAPE)}
  data['behavior'][0, [1, 2]] = -np.log([2, 4])
  wanted = {
      ('token', 'truncate', None, 3): (2, 3), ('token', 'truncate', 3, 5): (3, 4), ('token', 'mask', None, 3): (2, 0),
      ('token', 'filter', None, 3): (1, 0), ('token', 'mask', 3, 5): (0, 4), ('sequence', 'truncate', None, 3): (3, 3),
      ('sequence', 'truncate', None, 9): (8, 8), ('sequence', 'mask', None, 9): (8, 8), ('sequence', 'mask', None, 7): (0, 0),
      ('geometric', 'truncate', None, 9): (8**0.5, 8**0.5), ('geometric', 'filter', 2, 3): (1, 1), ('geometric', 'filter', 2.9, 3): (0, 0)}
  for (level, mode, low, cap), weights in wanted.items():
    config = PolicyLossConfig(importance_level=level, importance_mode=mode, importance_low=low, importance_cap=cap)
    _, loss_BT, _, _ = total_and_metrics(data | {'old': np.zeros(SHAPE)}, config)
    np.testing.assert_allclose(-loss_BT[0, [1, 2]], weights, rtol=1e-6, err_msg=str((level, mode, low, cap)))


def test_off_policy_sequences_are_dropped_by_hand():
  # Means of log behavior - log policy over the sampled tokens: 0.3 in both documents of row 0, of which the second has A < 0.
  data = arrays() | {'behavior': np.zeros(SHAPE), 'old': np.zeros(SHAPE), 'logprobs': np.zeros(SHAPE)}
  data['logprobs'][0, [1, 2, 4, 5, 6]] = -np.array([0.1, 0.5, 0.0, 0.0, 0.9])
  for limit, is_kept in ((0.29, False), (0.31, True)):
    _, loss_BT, (grad, _), metrics = total_and_metrics(data, PolicyLossConfig(opsm_nats=limit, clip_low=1.0, clip_high=9.0))
    assert loss_BT[0, [4, 5, 6]].any() == grad[0, [4, 5, 6]].any() == is_kept
    assert loss_BT[0, [1, 2]].all() and loss_BT[1][MASK[1]].all()
    assert metrics['mismatch/opsm_fraction'] == pytest.approx(0 if is_kept else 3 / MASK.sum())


@pytest.mark.parametrize('estimator, of_reference', [('k2', False), ('k3', True), ('k3_corrected', False)])
@pytest.mark.parametrize('is_on_policy', [True, False])
def test_gradients_of_kl_estimators_are_those_of_divergences(estimator, of_reference, is_on_policy):
  """The mean over all tokens of a vocabulary, weighted by who sampled them, is exact: no sampling error hides a wrong gradient."""
  logits, other, old = np.array([0.3, -0.5, 1.0]), np.array([-0.2, 0.4, 0.1]), np.array([0.9, 0.0, 0.2])
  old = logits if is_on_policy else old

  def log_softmax(values):
    return values - np.log(np.exp(values).sum())

  def divergence(values):
    pair = (log_softmax(other), log_softmax(values)) if of_reference else (log_softmax(values), log_softmax(other))
    return np.sum(np.exp(pair[0]) * (pair[0] - pair[1]))

  def loss(values):
    row = lambda array: jnp.asarray(log_softmax(array), jnp.float32)[None]  # noqa: E731
    one = np.ones((1, 3), np.int32)
    batch = Batch(one, one, one, jnp.asarray(one), jnp.exp(row(old)), advantages_BT=jnp.zeros((1, 3)), old_logprobs_BT=row(old),
                  reference_logprobs_BT=row(other))
    config = PolicyLossConfig(kl_coef=1.0, kl_estimator=estimator, importance_cap=None)
    return jnp.sum(losses.policy_loss_BT(jax.nn.log_softmax(values)[None], batch, config)[0] * batch.loss_weight_BT)

  wanted = [(divergence(logits + step) - divergence(logits - step)) / 2e-5 for step in 1e-5 * np.eye(3)]
  close = np.allclose(jax.grad(loss)(jnp.asarray(logits, jnp.float32)), wanted, atol=1e-5)
  # Off policy only the corrected one keeps its promise.
  assert close == (is_on_policy or estimator == 'k3_corrected')


@pytest.mark.parametrize('ratio', ['token', 'sequence'])
@pytest.mark.parametrize('kind', ['clip', 'cispo', 'naive'])
@pytest.mark.parametrize('advantage', [1.0, -1.0])
@pytest.mark.parametrize('place', ['far below', 'below', 'low', 'inside', 'high', 'above', 'far above'])
def test_gradient_inside_at_and_outside_the_clip(ratio, kind, advantage, place):
  """At a bound itself the gradient is one of the two one-sided slopes; everywhere else it is the slope."""
  if (ratio, kind) == ('sequence', 'cispo'):
    with pytest.raises(ValueError, match="ratio='sequence' with kind='cispo' is not defined"):
      PolicyLossConfig(kind=kind, ratio=ratio)
    return
  is_naive, kind = kind == 'naive', kind.replace('naive', 'clip')
  config = PolicyLossConfig(kind=kind, ratio=ratio, clip_low=0.25, clip_high=0.5, importance_cap=None, max_segments=2, decoupled=not is_naive)
  value = {'far below': 0.01, 'below': 0.7, 'low': 0.75, 'inside': 1.1, 'high': 1.5, 'above': 1.6, 'far above': 50.0}[place]
  data = arrays() | {'advantages': np.full(SHAPE, advantage)}
  data['logprobs'] = data['behavior' if is_naive else 'old'] + np.log(value)
  _, _, (grad, _), _ = total_and_metrics(data, config)
  for token in map(tuple, np.argwhere(MASK)):
    sides = sorted(slope(data, config, token, step) for step in (1e-7, -1e-7))
    room = 1e-5 + 2e-4 * abs(sides[0])
    assert sides[0] - room <= grad[token] <= sides[1] + room
    if kind == 'clip' and place in ('far below', 'below', 'above', 'far above'):
      # Below the range only a positive advantage pulls, above it only a negative one.
      assert (grad[token] == 0) == ((advantage < 0) == ('below' in place))


@pytest.mark.parametrize('advantage', [1.0, -1.0])
@pytest.mark.parametrize('rise', [-0.39, -0.26, -0.25, 0.0, 0.5, 0.51, 0.59])
def test_gradient_inside_at_and_outside_the_bounds_of_probability(advantage, rise):
  """A token of probability 0.4 may fall by 0.25 and rise by 0.5; the gradient is that of the ratio, and none beyond."""
  config = PolicyLossConfig(kind='dppo', clip_low=0.25, clip_high=0.5, importance_cap=None)
  data = arrays() | {'advantages': np.full(SHAPE, advantage), 'old': np.full(SHAPE, np.log(0.4)), 'logprobs': np.full(SHAPE, np.log(0.4 + rise))}
  _, loss_BT, (grad, _), _ = total_and_metrics(data, config)
  ratio = (0.4 + rise) / 0.4
  # The derivative of -A r by the logprob is -A r.
  allowed = {0.0, -advantage * ratio} if rise in (-0.25, 0.5) else {
      0.0 if (rise < -0.25 and advantage < 0) or (rise > 0.5 and advantage > 0) else -advantage * ratio}
  for token in map(tuple, np.argwhere(MASK)):
    assert any(grad[token] == pytest.approx(value * data['weight'][token], rel=1e-5) for value in allowed)
    assert any(loss_BT[token] == pytest.approx(value, rel=1e-5) for value in allowed)


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


@pytest.mark.parametrize('name', ['gspo', 'sequence_tis', 'geometric', 'opsm'])
def test_more_documents_than_declared_are_loud(name):
  assert CONFIGS[name].segment_limit is not None and CONFIGS['grpo'].segment_limit is None
  value, loss_BT, (grad, _), _ = total_and_metrics(arrays(), dataclasses.replace(CONFIGS[name], max_segments=1))
  assert np.isnan(value) and np.isnan(grad).any() and np.isfinite(loss_BT[SEGMENTS == 1]).all()


@pytest.mark.parametrize('fields, message', [
    ({'kl_estimator': 'k1'}, r"kl_estimator='k1' is no loss: its gradient is the score function, whose mean .* is 0"),
    ({'kl_estimator': 'k4'}, r"kl_estimator='k4' is unknown; use one of k2, k3, k3_corrected"), ({'kind': 'ppo'}, r"kind='ppo' is unknown"),
    ({'ratio': 'turn'}, r"ratio='turn' is unknown; use one of token, sequence"),
    ({'clip_low': 1.5}, r'clip_low=1.5 must be above 0 and at most 1'), ({'clip_high': 0.0}, r'clip_high=0.0 above 0'),
    ({'dual_clip': 1.1}, r'dual_clip=1.1 with .* above 1 \+ clip_high'), ({'kind': 'cispo', 'dual_clip': 3.0}, r"needs kind='clip'"),
    ({'kind': 'reinforce', 'ratio': 'sequence'}, r'is not defined'), ({'max_segments': 0}, r'max_segments=0 must be at least 1'),
    ({'importance_level': 'turn'}, r"importance_level='turn' is unknown; use one of token, sequence, geometric"),
    ({'importance_mode': 'drop'}, r"importance_mode='drop' is unknown; use one of truncate, mask, filter"),
    ({'importance_low': 2.0}, r'importance_low=2.0 must be from 0 to below importance_cap=2.0'),
    ({'importance_low': 0.5, 'importance_cap': None}, r'importance_low=0.5 .* without a cap there is no importance weight'),
    ({'importance_mode': 'mask', 'importance_cap': None}, r"importance_mode='mask' say how importance_cap is used, and it is None"),
    ({'decoupled': False}, r'decoupled=False with importance_cap=2.0 would correct twice'), ({'opsm_nats': -0.1}, r'opsm_nats=-0.1 must not'),
    ({'importance_cap': 0.0}, r'importance_cap=0.0 must be positive, or None'), ({'kl_coef': -1.0}, r'kl_coef=-1.0 .* must not be negative')])
def test_settings_that_make_no_sense_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    PolicyLossConfig(**fields)


@pytest.mark.parametrize('missing, config, message', [
    ('advantages_BT', PolicyLossConfig(), r'advantages_BT is None'),
    ('behavior_logprobs_BT', PolicyLossConfig(), r'importance_cap=2.0 .* batch.behavior_logprobs_BT is None; pack the logprobs'),
    ('behavior_logprobs_BT', PolicyLossConfig(decoupled=False, importance_cap=None), r'decoupled=False, .* batch.behavior_logprobs_BT is None'),
    ('behavior_logprobs_BT', PolicyLossConfig(importance_cap=None, opsm_nats=0.1), r'opsm_nats=0.1 need the policy that sampled'),
    ('reference_logprobs_BT', PolicyLossConfig(kl_coef=0.1), r'kl_coef=0.1 .* batch.reference_logprobs_BT is None; score the batch'),
    ('', PolicyLossConfig(entropy_coef=0.1), r'entropy_coef=0.1 needs entropy_BT')])
def test_a_missing_array_is_an_error_and_never_zeros(missing, config, message):
  batch = batch_of(arrays(), **({missing: None} if missing else {}))
  with pytest.raises(ValueError, match=message):
    losses.policy_loss_BT(jnp.zeros(SHAPE), batch, config)
