"""Preference, reward and value losses against float64 numpy written from the papers, gradients against differences, masks that hold."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import sharding
from rl import batching, losses_preference, losses_reward
from rl import metrics as metrics_lib
from rl.losses_preference import PreferenceLossConfig
from rl.losses_reward import RewardLossConfig, ValueLossConfig
from rl.types import Batch

# Two pairs in the first row, one pair and padding in the second.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4], [1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0]], np.int32)
MASK = np.array([[0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0]], bool)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]], np.int32)
SHAPE = MASK.shape
PAIRS = ((0, 1), (0, 3), (1, 1))
TEXTS = [(row, segment + side) for row, segment in PAIRS for side in (0, 1)]
WEIGHTS = dict(zip(TEXTS, np.repeat([0.2, 0.3, 0.1], 2), strict=True))
MAX_SEGMENTS = 6

CONFIGS = {
    'dpo': PreferenceLossConfig(),
    'dpo margin and nll': PreferenceLossConfig(beta=0.5, margin=0.3, nll_coef=0.2),
    'dpo mean': PreferenceLossConfig(beta=2.0, reduce='mean'),
    'cdpo': PreferenceLossConfig(beta=0.5, label_smoothing=0.1),
    'ipo': PreferenceLossConfig('ipo', beta=0.2, reduce='mean'),
    'ipo sum': PreferenceLossConfig('ipo', beta=0.2),
    'simpo': PreferenceLossConfig('simpo', beta=2.0, reduce='mean', margin=0.7),
    'orpo': PreferenceLossConfig('orpo', beta=0.3, reduce='mean', nll_coef=1.0),
    'kto': PreferenceLossConfig('kto', beta=0.3, desirable_weight=1.5, undesirable_weight=0.5),
}
DIMENSIONS = {'harmless': 2.0, 'helpful': 1.0}
REWARD = RewardLossConfig(margin_scale=0.5, center_coef=0.01)


def where(row, segment):
  return (SEGMENTS[row] == segment) & MASK[row]


def spread(of_text):
  """A value for each text, at all its places."""
  array = np.zeros(SHAPE)
  for (row, segment), value in of_text.items():
    array[row, SEGMENTS[row] == segment] = value
  return array


def data(seed=0):
  """The numbers of a batch in float64, with a sign for each text (KTO) and two dimensions of preference (reward models)."""
  rng = np.random.default_rng(seed)
  logprobs = -rng.exponential(1.5, SHAPE)
  num_targets = {text: where(*text).sum() for text in TEXTS}
  preferences = np.repeat(rng.normal(size=(3, 2)), 2, 0)
  preferences[2:4, 0] = 0  # The second pair does not say which of its texts is more harmless.
  return {
      'logprobs': logprobs, 'reference': logprobs + rng.normal(0, 0.5, SHAPE), 'scores': rng.normal(size=(2, *SHAPE)),
      'values': rng.normal(size=SHAPE), 'old_values': rng.normal(size=SHAPE), 'returns': rng.normal(size=SHAPE),
      'weight': np.where(MASK, spread({text: WEIGHTS[text] / num_targets[text] for text in TEXTS}), 0),
      'signs': [spread(dict(zip(TEXTS, (1, -1, -1, -1, 1, 1), strict=True)))],
      'preferences': [spread(dict(zip(TEXTS, column, strict=True))) for column in preferences.T], 'point': 0.4}


def batch_of(data, preferences, **changes):
  integers = jnp.zeros(SHAPE, jnp.int32)

  def floats(name):
    return jnp.asarray(data[name], jnp.float32)

  fields = {'reference_logprobs_BT': floats('reference'), 'values_BT': floats('old_values'), 'returns_BT': floats('returns'),
            'preferences': tuple(jnp.asarray(array, jnp.float32) for array in data[preferences]), 'reference_point': floats('point')}
  return Batch(integers, integers, jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS), floats('weight'), **fields).replace(**changes)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def paper(data, config):
  """The loss in float64, text by text."""
  logprobs, reference = data['logprobs'], data['reference']

  def mean_logprob(row, segment):
    return logprobs[row, where(row, segment)].mean()

  def ratio(row, segment):
    if config.kind in ('simpo', 'orpo'):
      return mean_logprob(row, segment)
    differences = (logprobs - reference)[row, where(row, segment)]
    return differences.mean() if config.reduce == 'mean' else differences.sum()

  total = 0.0
  if config.kind == 'kto':
    for row, segment in TEXTS:
      sign = data['signs'][0][row, SEGMENTS[row] == segment][0]
      value = 1 - sigmoid(sign * config.beta * (ratio(row, segment) - data['point']))
      total += WEIGHTS[row, segment] * (config.desirable_weight if sign > 0 else config.undesirable_weight) * value
    return total
  for row, segment in PAIRS:
    chosen, rejected = (row, segment), (row, segment + 1)
    difference = ratio(*chosen) - ratio(*rejected)
    if config.kind == 'ipo':
      loss = (difference - 1 / (2 * config.beta))**2
    elif config.kind == 'orpo':
      odds = [np.exp(mean_logprob(*text)) / (1 - np.exp(mean_logprob(*text))) for text in (chosen, rejected)]
      loss = -config.beta * np.log(sigmoid(np.log(odds[0] / odds[1])))
    else:
      smoothing, excess = config.label_smoothing, config.beta * difference - config.margin
      loss = -(1 - smoothing) * np.log(sigmoid(excess)) - smoothing * np.log(sigmoid(-excess))
    total += 2 * WEIGHTS[chosen] * (loss - config.nll_coef * mean_logprob(*chosen))
  return total


def paper_reward(data):
  last = {text: np.flatnonzero(SEGMENTS[text[0]] == text[1])[-1] for text in TEXTS}
  total = 0.0
  for row, segment in PAIRS:
    for dimension, share in enumerate((2 / 3, 1 / 3)):
      better, worse = (data['scores'][dimension, row, last[row, segment + side]] for side in (0, 1))
      center = (better + worse)**2
      preference = data['preferences'][dimension][row, last[row, segment]]
      if preference < 0:
        better, worse = worse, better
      if preference:
        loss = -np.log(sigmoid(better - worse - REWARD.margin_scale * abs(preference)))
        total += 2 * WEIGHTS[row, segment] * share * (loss + REWARD.center_coef * center)
  return total


def paper_value(data, clip):
  total = 0.0
  for row, t in np.argwhere(MASK):
    value, old, wanted = (data[name][row, t] for name in ('values', 'old_values', 'returns'))
    errors = [(value - wanted)**2]
    if clip is not None:
      errors.append((old + np.clip(value - old, -clip, clip) - wanted)**2)
    total += data['weight'][row, t] * max(errors) / 2
  return total


def cases():
  """(what is differentiated, our loss of a batch and that input, the paper's, which preferences the batch has)."""

  def preference(config):
    return lambda x, batch: losses_preference.preference_loss(x, batch, config, MAX_SEGMENTS)

  def value(config):
    def loss(x, batch):
      loss_BT, metrics = losses_reward.value_loss_BT(x, batch, config)
      return jnp.sum(loss_BT * batch.loss_weight_BT), metrics
    return loss

  found = {name: ('logprobs', preference(config), lambda data, config=config: paper(data, config),
                  'signs' if config.kind == 'kto' else 'preferences') for name, config in CONFIGS.items()}
  found['reward'] = ('scores', lambda x, batch: losses_reward.reward_loss(tuple(x), batch, REWARD, DIMENSIONS, MAX_SEGMENTS), paper_reward,
                     'preferences')
  for name, clip in (('value', None), ('value clipped', 0.5)):
    found[name] = ('values', value(ValueLossConfig(clip)), lambda data, clip=clip: paper_value(data, clip), 'preferences')
  return found


CASES = cases()


@functools.cache
def compiled(name):
  return jax.jit(jax.value_and_grad(CASES[name][1], has_aux=True))


def ours(name, data, **changes):
  """(value, gradient, metrics) of our loss."""
  wrt, _, _, preferences = CASES[name]
  (value, metrics), grad = compiled(name)(jnp.asarray(data[wrt], jnp.float32), batch_of(data, preferences, **changes))
  return float(value), np.asarray(grad), metrics_lib.compute(metrics)


@pytest.mark.parametrize('name', CASES)
def test_is_the_papers_and_its_gradient_the_difference(name):
  wrt, _, reference, _ = CASES[name]
  numbers = data()
  value, grad, _ = ours(name, numbers)
  assert value == pytest.approx(reference(numbers), rel=2e-6)
  for index in np.ndindex(grad.shape):
    difference = []
    for step in (1e-6, -1e-6):
      moved = numbers[wrt].copy()
      moved[index] += step
      difference.append(reference({**numbers, wrt: moved}))
    assert grad[index] == pytest.approx((difference[0] - difference[1]) / 2e-6, rel=1e-4, abs=1e-7), index


@pytest.mark.parametrize('fill', [1e9, -np.inf, np.nan])
@pytest.mark.parametrize('name', CASES)
def test_masked_places_add_exactly_nothing(name, fill):
  numbers = data()
  # A score is read at a text's last token, which no loss weight marks.
  is_read = np.stack([np.append(SEGMENTS[:, 1:], [[9], [9]], 1) != SEGMENTS] * 2) & (SEGMENTS != 0) if name == 'reward' else MASK
  wrt = CASES[name][0]
  dirty = {**numbers, **{key: np.where(MASK, numbers[key], fill) for key in ('reference', 'old_values', 'returns')},
           'preferences': [np.where(MASK, array, fill) for array in numbers['preferences']],
           'signs': [np.where(MASK, array, fill) for array in numbers['signs']], wrt: np.where(is_read, numbers[wrt], fill)}
  (value, grad, metrics), (wanted, wanted_grad, wanted_metrics) = ours(name, dirty), ours(name, numbers)
  assert value == wanted and metrics == wanted_metrics
  np.testing.assert_array_equal(grad, wanted_grad)
  assert not grad[~is_read].any()


@pytest.mark.parametrize('name', CASES)
def test_any_order_of_tokens_is_the_same(name):
  order = np.random.default_rng(3).permutation(SHAPE[1])
  numbers = data()
  moved = {key: np.asarray(value)[..., order] if np.ndim(value) else value for key, value in numbers.items()}
  value, grad, _ = ours(name, moved, segment_ids_BT=jnp.asarray(SEGMENTS[:, order]), positions_BT=jnp.asarray(POSITIONS[:, order]))
  wanted, wanted_grad, _ = ours(name, numbers)
  assert value == pytest.approx(wanted, rel=1e-6)
  np.testing.assert_allclose(grad, wanted_grad[..., order], rtol=1e-5, atol=1e-8)


MESHES = {'seq2 ulysses2': {'seq': 2, 'ulysses': 2}, 'data2 seq2': {'data': 2, 'seq': 2}}


@pytest.mark.parametrize('mesh_name', MESHES)
@pytest.mark.parametrize('name', CASES)
def test_rows_split_over_devices_are_the_same(name, mesh_name):
  sizes, numbers = MESHES[mesh_name], data()
  mesh = sharding.make_mesh(devices=jax.devices()[:4], **sizes)
  layout = sharding.Layout(order='zigzag')
  place = batching.Place.of(layout, mesh)
  wrt, _, _, preferences = CASES[name]
  # The input of the loss goes the way of a batch's array.
  batch = batch_of(numbers, preferences)
  split = [batching.to_global(jax.tree.map(np.asarray, batch.replace(advantages_BT=x, reference_point=None)), place)
           for x in (numbers[wrt] if name == 'reward' else [numbers[wrt]])]
  inputs = [part.advantages_BT.astype(jnp.float32) for part in split]
  with jax.set_mesh(mesh):
    (value, metrics), grad = compiled(name)(inputs if name == 'reward' else inputs[0],
                                            split[0].replace(advantages_BT=None, reference_point=jnp.float32(numbers['point'])))
  wanted, wanted_grad, wanted_metrics = ours(name, numbers)
  assert value == pytest.approx(wanted, rel=2e-6)
  found = np.stack([batching.to_host(part, place, SHAPE[1]) for part in jax.tree.leaves(grad)]).reshape(wanted_grad.shape)
  assert np.linalg.norm(found - wanted_grad) < 2e-6 * np.linalg.norm(wanted_grad)
  assert metrics_lib.compute(metrics) == pytest.approx(wanted_metrics, rel=1e-5, abs=1e-6)


def of_logprobs(config, chosen, rejected, reference=0.0):
  """(loss, metrics) of one pair of texts of two learned tokens each, with these logprobs at each token."""
  segments = jnp.array([[1, 1, 1, 2, 2, 2]])
  batch = Batch(segments, segments, jnp.array([[0, 1, 2] * 2]), segments, jnp.array([[0.25, 0.25, 0] * 2]),
                reference_logprobs_BT=jnp.full((1, 6), reference, jnp.float32))
  loss, metrics = jax.jit(losses_preference.preference_loss, static_argnums=(2, 3))(
      jnp.array([[chosen, chosen, 9, rejected, rejected, 9]]), batch, config, 2)
  return float(loss), metrics_lib.compute(metrics)


def test_values_by_hand():
  # No margin: ln 2 and right by half. A pair's weight here is 1.
  loss, metrics = of_logprobs(PreferenceLossConfig(), -1.0, -1.0, -1.0)
  assert loss == pytest.approx(np.log(2)) and metrics['preference/accuracy'] == 0.5 and metrics['preference/margin'] == 0
  # Log-ratios 2 (-1 + 3) = 4 and 2 (-2 + 3) = 2; beta of their difference is 1: ln(1 + 1/e).
  loss, metrics = of_logprobs(PreferenceLossConfig(beta=0.5), -1.0, -2.0, -3.0)
  assert loss == pytest.approx(np.log1p(np.exp(-1))) and metrics['preference/accuracy'] == 1
  assert metrics['preference/reward_chosen'] == 2 and metrics['preference/reward_rejected'] == 1 and metrics['preference/margin'] == 1
  assert metrics['preference/logprob_chosen_nats'] == -1 and metrics['preference/logprob_rejected_nats'] == -2
  # A difference of 1 a token, 1 / (2 beta) = 5 aimed at: 16.
  assert of_logprobs(PreferenceLossConfig('ipo', reduce='mean'), -1.0, -2.0)[0] == pytest.approx(16)
  # 2 x 1 - 1 = 1.
  assert of_logprobs(PreferenceLossConfig('simpo', beta=2.0, margin=1.0, reduce='mean'), -1.0, -2.0)[0] == pytest.approx(np.log1p(np.exp(-1)))
  # p = 1/2 and 1/3: odds 1 and 1/2, sigmoid(ln 2) = 2/3; and ln 2 of likelihood.
  loss = of_logprobs(PreferenceLossConfig('orpo', beta=0.5, reduce='mean', nll_coef=1.0), np.log(1 / 2), np.log(1 / 3))[0]
  assert loss == pytest.approx(0.5 * np.log(1.5) + np.log(2))


def test_a_lead_by_hand():
  def loss(chosen, rejected, preference, **settings):
    segments = jnp.array([[1, 1, 2, 2]])
    batch = Batch(segments, segments, jnp.array([[0, 1, 0, 1]]), segments, jnp.array([[0.5, 0, 0.5, 0]]),
                  preferences=(jnp.full((1, 4), preference, jnp.float32),))
    # Only the score at the last token is read.
    return float(losses_reward.reward_loss((jnp.array([[9.0, chosen, 9.0, rejected]]),), batch, RewardLossConfig(**settings), {'all': 3.0}, 2)[0])

  assert loss(5.0, 5.0, 1.0) == pytest.approx(np.log(2))
  # A lead of ln 3 is a chance of 3/4; where the rejected text is the better one, of 1/4.
  assert loss(np.log(3), 0.0, 1.0) == pytest.approx(np.log(4 / 3)) and loss(np.log(3), 0.0, -1.0) == pytest.approx(np.log(4))
  # Two units of preference ask for a lead of ln 3 more.
  assert loss(np.log(3), 0.0, 2.0, margin_scale=np.log(3) / 2) == pytest.approx(np.log(2))
  assert loss(1.0, 2.0, 0.0) == 0 and loss(1.0, -3.0, 1.0, center_coef=0.5) == pytest.approx(np.log1p(np.exp(-4)) + 0.5 * 4)


def test_a_long_text_loses_no_digits():
  # 4096 tokens of -9 nats each, 1e-3 above the reference; summed first, float32 would know the difference of about 4 to 2e-3.
  size = 4096
  rng = np.random.default_rng(0)
  logprobs = -rng.uniform(8, 10, (1, 2 * size)).astype(np.float32)
  segments = jnp.array([[1] * size + [2] * size])
  reference = logprobs - rng.uniform(0, 2e-3, logprobs.shape).astype(np.float32) * (np.arange(2 * size) < size)[None]
  batch = Batch(segments, segments, jnp.arange(2 * size)[None] % size, segments, jnp.full((1, 2 * size), 0.5 / size),
                reference_logprobs_BT=jnp.asarray(reference))
  _, metrics = losses_preference.preference_loss(jnp.asarray(logprobs), batch, PreferenceLossConfig(beta=1.0), 2)
  exact = (logprobs.astype(np.float64) - reference).sum()
  assert metrics_lib.compute(metrics)['preference/margin'] == pytest.approx(exact, rel=1e-5)


def test_the_reference_point_is_a_mean_over_texts_and_never_negative():
  numbers = data()
  batch = batch_of(numbers, 'signs')
  point = losses_preference.reference_point([jnp.asarray(numbers['logprobs'], jnp.float32)] * 2, [batch] * 2, 12)
  exact = np.where(MASK, numbers['logprobs'] - numbers['reference'], 0).sum() / 6
  assert exact < 0 and point == 0
  point = losses_preference.reference_point([jnp.asarray(numbers['reference'], jnp.float32)], [
      batch.replace(reference_logprobs_BT=jnp.asarray(numbers['logprobs'], jnp.float32))], 6)
  assert point == pytest.approx(-exact, rel=1e-5)


def test_metrics_of_a_reward_model_count_only_what_is_said():
  metrics = ours('reward', data())[2]
  numbers = data()
  last = {text: np.flatnonzero(SEGMENTS[text[0]] == text[1])[-1] for text in TEXTS}
  right = {name: [] for name in DIMENSIONS}
  for dimension, name in enumerate(DIMENSIONS):
    for row, segment in PAIRS:
      lead = numbers['scores'][dimension, row, last[row, segment]] - numbers['scores'][dimension, row, last[row, segment + 1]]
      preference = numbers['preferences'][dimension][row, last[row, segment]]
      right[name] += [lead * preference > 0] if preference else []
    assert metrics[f'reward_model/accuracy_{name}'] == pytest.approx(np.mean(right[name]))
  assert [len(values) for values in right.values()] == [2, 3]
  assert metrics['reward_model/accuracy'] == pytest.approx(np.mean(sum(right.values(), [])))


def test_a_batch_of_padding_is_worth_nothing():
  numbers = data()
  for name in CASES:
    value, grad, _ = ours(name, {**numbers, 'weight': np.zeros(SHAPE)}, segment_ids_BT=jnp.zeros(SHAPE, jnp.int32))
    assert value == 0 and not grad.any(), name


def test_more_texts_than_were_said_are_loud():
  numbers = data()
  many = SEGMENTS + np.where(SEGMENTS == 4, MAX_SEGMENTS, 0)
  for name in CASES:
    assert np.isnan(ours(name, numbers, segment_ids_BT=jnp.asarray(many))[0]) != name.startswith('value'), name


REFUSED = [
    ({'kind': 'ppo'}, "kind='ppo' is unknown; use one of dpo"),
    ({'reduce': 'max'}, "reduce='max' is unknown; use one of sum, mean"),
    ({'beta': 0.0}, 'beta=0.0 must be positive'),
    ({'kind': 'simpo'}, "reduce='sum' with kind='simpo', which is defined by mean logprobs"),
    ({'label_smoothing': 0.5}, 'label_smoothing=0.5 must be at least 0 and below 0.5'),
    ({'kind': 'ipo', 'label_smoothing': 0.1}, "with kind='ipo': only dpo and simpo have them"),
    ({'nll_coef': -1.0}, 'nll_coef=-1.0 and margin=0.0 must not be negative'),
    ({'kind': 'kto', 'nll_coef': 1.0}, "nll_coef=1.0 with kind='kto'"),
    ({'kind': 'kto', 'desirable_weight': -1.0}, 'desirable_weight=-1.0 and undesirable_weight=1.0 must not be negative'),
    ({'desirable_weight': 2.0}, "with kind='dpo': only 'kto' has them"),
]


@pytest.mark.parametrize('changes, message', REFUSED)
def test_settings_that_mean_nothing_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    PreferenceLossConfig(**changes)


def test_what_a_batch_lacks_is_said():
  numbers = data()
  logprobs_BT, scores = (jnp.asarray(numbers[name], jnp.float32) for name in ('logprobs', 'scores'))
  batch = batch_of(numbers, 'preferences')
  with pytest.raises(ValueError, match=r"kind='dpo' compares with a reference, and batch.reference_logprobs_BT is None"):
    losses_preference.preference_loss(logprobs_BT, batch.replace(reference_logprobs_BT=None), CONFIGS['dpo'], 4)
  with pytest.raises(ValueError, match=r"kind='kto' needs batch.preferences"):
    losses_preference.preference_loss(logprobs_BT, batch.replace(reference_point=None), CONFIGS['kto'], 4)
  with pytest.raises(ValueError, match='max_segments=3 with kind='):
    losses_preference.preference_loss(logprobs_BT, batch, CONFIGS['dpo'], 3)
  with pytest.raises(ValueError, match='1 scores and 2 preferences for the 2 dimensions harmless, helpful'):
    losses_reward.reward_loss(tuple(scores)[:1], batch, REWARD, DIMENSIONS, 4)
  with pytest.raises(ValueError, match='must all have a positive weight'):
    losses_reward.reward_loss(tuple(scores), batch, REWARD, DIMENSIONS | {'helpful': 0.0}, 4)
  with pytest.raises(ValueError, match='needs batch.returns_BT'):
    losses_reward.value_loss_BT(logprobs_BT, batch.replace(returns_BT=None), ValueLossConfig())
  for broken in ({'margin_scale': -1.0}, {'center_coef': -0.1}):
    with pytest.raises(ValueError, match='must not be negative'):
      dataclasses.replace(REWARD, **broken)
  with pytest.raises(ValueError, match='clip=0 must be positive, or None'):
    ValueLossConfig(0)
