"""Sampling: both log-probabilities by hand, filters against sorting, and draws against exact probabilities.

Seeds are fixed, so a statistical test passes or fails for good; the stated probability is that a right sampler fails for another seed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import sampling, sharding
from models.sampling import Sampling

LAYOUT = sharding.ROLLOUT
FOUR = np.log(np.array([0.15, 0.5, 0.1, 0.25], np.float32))


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh(devices=jax.devices()[:1])


_sample = jax.jit(sampling.sample, static_argnames='layout')


def sample(logits_BV, settings, mesh, seeds=None, position=7):
  """Sample on the host's arrays; `settings` is one Sampling for all rows or one each."""
  logits_BV = np.asarray(logits_BV, np.float32)
  rows = len(logits_BV)
  settings = [settings] * rows if isinstance(settings, Sampling) else settings
  seeds = np.arange(rows) if seeds is None else np.asarray(seeds)
  with jax.set_mesh(mesh):
    drawn = _sample(logits_BV, sampling.stack(settings), seeds.astype(np.uint32), np.full(rows, position, np.int32), layout=LAYOUT)
  return jax.tree.map(np.asarray, drawn)


# By hand from probabilities 0.5, 0.25, 0.15, 0.1 of ids 1, 3, 0, 2: settings -> what each id is drawn with.
BY_HAND = {
    'plain': (Sampling(), {1: 0.5, 3: 0.25, 0: 0.15, 2: 0.1}),
    'temperature 1/2 squares': (Sampling(temperature=0.5), {1: 0.25 / 0.345, 3: 0.0625 / 0.345, 0: 0.0225 / 0.345, 2: 0.01 / 0.345}),
    'top-k 2': (Sampling(top_k=2), {1: 2 / 3, 3: 1 / 3}),
    'top-k beyond the vocabulary': (Sampling(top_k=9), {1: 0.5, 3: 0.25, 0: 0.15, 2: 0.1}),
    'top-p just below one token': (Sampling(top_p=0.49), {1: 1.0}),
    'top-p just above one token': (Sampling(top_p=0.51), {1: 2 / 3, 3: 1 / 3}),
    'min-p keeps 0.125 and more': (Sampling(min_p=0.25), {1: 5 / 9, 3: 2.5 / 9, 0: 1.5 / 9}),
    # 0.8 of the 0.9 that top-k leaves is reached by two tokens, 0.8 of all by three.
    'top-p counts what top-k left': (Sampling(top_k=3, top_p=0.8), {1: 2 / 3, 3: 1 / 3}),
    # Squared probabilities reach 0.85 with two tokens, plain ones with three.
    'filters follow the temperature': (Sampling(temperature=0.5, top_p=0.85), {1: 0.8, 3: 0.2}),
    'greedy': (Sampling(temperature=0.0, top_p=0.9, top_k=3), {1: 1.0}),
}


def test_both_logprobs_by_hand(mesh):
  num_draws = 64
  cases = [case for case in BY_HAND.values() for _ in range(num_draws)]
  drawn = sample(np.tile(FOUR, (len(cases), 1)), [settings for settings, _ in cases], mesh)
  np.testing.assert_allclose(drawn.raw_logprobs_B, FOUR[drawn.tokens_B], atol=1e-6)
  for index, (name, (_, expected)) in enumerate(BY_HAND.items()):
    rows = slice(index * num_draws, (index + 1) * num_draws)
    tokens = drawn.tokens_B[rows].tolist()
    # The rarest id here has probability 1/35, so 64 draws miss it with probability 0.16: what is drawn must be among those kept.
    assert set(tokens) <= set(expected), name
    np.testing.assert_allclose(drawn.processed_logprobs_B[rows], np.log([expected[token] for token in tokens]), atol=1e-6, err_msg=name)


def test_equals_are_kept_together_and_greedy_takes_the_first(mesh):
  tied = np.log(np.array([0.1, 0.3, 0.3, 0.3], np.float32))
  drawn = sample(np.tile(tied, (640, 1)), [Sampling(top_k=2)] * 639 + [Sampling(temperature=0.0)], mesh)
  assert set(drawn.tokens_B[:-1].tolist()) == {1, 2, 3}
  np.testing.assert_allclose(drawn.processed_logprobs_B[:-1], np.log(1 / 3), atol=1e-6)
  assert drawn.tokens_B[-1] == 1


def kept_mass(logits_V, settings):
  """Return (lowest probability kept, mass of all tokens kept) in float64, by sorting."""
  probabilities = np.exp(logits_V.astype(np.float64))
  probabilities /= probabilities.sum()
  ordered = np.sort(probabilities)[::-1]
  lowest = ordered[min(settings.top_k or len(ordered), len(ordered)) - 1]
  ordered = ordered[ordered >= lowest]
  if settings.top_p < 1:
    lowest = ordered[np.searchsorted(np.cumsum(ordered), settings.top_p * ordered.sum())]
  return lowest, probabilities[probabilities >= lowest].sum()


@pytest.mark.parametrize(('spread', 'ks'), [(3.0, (0, 1, 2, 7, 600)), (0.3, (0, 1, 7, 600, 2500))])
def test_filters_equal_sorting(mesh, spread, ks):
  """What is kept, read off the two log-probabilities; spread 3 is decided by the likeliest 1024 tokens, spread 0.3 needs all 3000."""
  settings = [Sampling(top_k=k, top_p=p) for k in ks for p in (0.05, 0.6, 0.9, 1.0)]
  logits = np.random.default_rng(0).standard_normal((len(settings), 3000)) * spread
  logits = np.round(logits, 1).astype(np.float32)  # So that many are equal.
  drawn = sample(logits, settings, mesh)
  for row, one in enumerate(settings):
    lowest, mass = kept_mass(logits[row], one)
    raw, processed = drawn.raw_logprobs_B[row], drawn.processed_logprobs_B[row]
    assert np.exp(raw) >= lowest * 0.999, one
    assert raw - processed == pytest.approx(np.log(mass), abs=2e-5), one


def test_draws_follow_the_probabilities(mesh):
  """Pearson's chi-square of 20,000 draws in 30 random groups; 90 is beyond the 1 - 5e-8 quantile, so the false-alarm probability is 5e-8.

  1500 tokens are three blocks, the last one part full.
  """
  num_draws, size, groups = 20_000, 1500, 30
  rng = np.random.default_rng(1)
  logits = rng.standard_normal(size).astype(np.float32)
  probabilities = np.exp(logits.astype(np.float64))
  probabilities /= probabilities.sum()
  drawn = sample(np.tile(logits, (num_draws, 1)), Sampling(), mesh)
  group = rng.permutation(np.arange(size) % groups)
  expected = np.bincount(group, probabilities, groups) * num_draws
  observed = np.bincount(group[drawn.tokens_B], minlength=groups)
  assert np.sum((observed - expected) ** 2 / expected) < 90


def test_a_row_depends_on_its_own_seed_and_position_only(mesh):
  rng = np.random.default_rng(2)
  logits, seeds = rng.standard_normal((8, 1500)), rng.integers(0, 2**32, 8)
  settings = Sampling(temperature=0.8, top_p=0.9)
  drawn = sample(logits, settings, mesh, seeds)
  order = rng.permutation(8)
  np.testing.assert_array_equal(sample(logits[order], settings, mesh, seeds[order]).tokens_B, drawn.tokens_B[order])
  # Among unlike neighbors, and alone.
  mixed = [settings, *[Sampling(top_k=3, min_p=0.1)] * 6, Sampling(temperature=0.0)]
  assert sample(logits, mixed, mesh, seeds).tokens_B[0] == drawn.tokens_B[0]
  assert sample(logits[:1], settings, mesh, seeds[:1]).tokens_B[0] == drawn.tokens_B[0]
  same = np.tile(logits[:1], (8, 1))
  assert len(set(sample(same, Sampling(), mesh, np.full(8, 5)).tokens_B.tolist())) == 1
  assert len(set(sample(same, Sampling(), mesh).tokens_B.tolist())) > 1
  assert len({int(sample(same, Sampling(), mesh, np.full(8, 5), position).tokens_B[0]) for position in range(6)}) > 1


def test_rows_split_over_devices_draw_the_same(mesh):
  logits = np.random.default_rng(3).standard_normal((8, 1500))
  settings = [Sampling(top_k=index) for index in range(8)]
  split = sharding.make_mesh(data=2, fsdp=2, tensor=2, devices=jax.devices()[:8])
  one, many = sample(logits, settings, mesh), sample(logits, settings, split)
  np.testing.assert_array_equal(one.tokens_B, many.tokens_B)
  np.testing.assert_allclose(one.processed_logprobs_B, many.processed_logprobs_B, atol=1e-6)


def test_both_ends_of_the_unit_interval_draw_tokens_with_weight():
  """Rounding of running sums can put a fraction at the very end, so 1 is tried although no uniform number is."""
  weights = jnp.array([[0.0, 0.0, 1e-30, 0.0, 1.0, 0.0]] * 2)
  index, total = sampling._invert(weights, jnp.array([0.0, 1.0]))
  assert index.tolist() == [2, 4]
  assert total.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(('settings', 'message'), [
    (Sampling(temperature=-1.0), 'sampling.temperature=-1.0 must be 0 (greedy) or a finite number of at least 0.0001.'),
    (Sampling(temperature=float('nan')), 'sampling.temperature=nan must be 0'),
    (Sampling(temperature=1e-9), 'sampling.temperature=1e-09 must be 0'),
    (Sampling(top_k=-3), 'sampling.top_k=-3 must be a whole number'),
    (Sampling(top_k=1.5), 'sampling.top_k=1.5 must be a whole number, at least 1, or 0 to keep all tokens.'),
    (Sampling(top_p=0.0), 'sampling.top_p=0.0 must be above 0 and at most 1; 1 keeps all tokens.'),
    (Sampling(top_p=1.1), 'sampling.top_p=1.1 must be above 0 and at most 1'),
    (Sampling(min_p=-0.1), 'sampling.min_p=-0.1 must be between 0 and 1; 0 keeps all tokens.'),
])
def test_settings_that_make_no_sense(settings, message):
  with pytest.raises(ValueError) as error:
    sampling.check(settings)
  assert message in str(error.value)


def test_settings_that_make_sense():
  assert sampling.check(Sampling()) is None
  assert sampling.check(Sampling(temperature=0, top_k=40, top_p=0.95, min_p=1.0)) is None
