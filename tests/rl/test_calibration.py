"""Calibration by hand, against definitions written anew, and where there is next to nothing to say."""

import numpy as np
import pytest

from rl import calibration
from rl import config as config_lib
from rl.calibration import Bin, Calibration


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def assess(leads, **changes):
  """The judgment of pairs of which the first text is preferred."""
  leads = np.asarray(leads, float)
  inputs = {'scores_N2': np.stack([leads, 0 * leads], 1), 'preference_N': np.ones(leads.size),
            'num_tokens_N2': np.ones((leads.size, 2)), 'half_N': np.arange(leads.size) % 2 == 1}
  return calibration.assess(**inputs | changes)


def overconfident(count, scale, seed=0):
  """Leads `scale` times too large, with labels drawn from what a calibrated model says."""
  rng = np.random.default_rng(seed)
  true = rng.normal(0, 2, count)
  people = np.where(rng.random(count) < sigmoid(true), 1, -1)
  return scale * true * people


def test_bins_and_errors_by_hand():
  # Confidences .6 (right), .6 (wrong), .9 (right), .9 (right), in halves: |.5 - .6| and |1 - .9|, each of half the pairs.
  logit = np.log(np.array([0.6, 0.9]) / np.array([0.4, 0.1]))
  leads = np.array([logit[0], -logit[0], logit[1], logit[1]])
  wanted = [Bin(2, pytest.approx(0.6), 0.5), Bin(2, pytest.approx(0.9), 1.0)]
  assert calibration.bins(leads, 'mass', 2) == wanted and calibration.bins(leads, 'width', 10) == wanted
  found = calibration.fit(leads)
  assert found.ece_width == pytest.approx(0.1) and found.brier == pytest.approx((0.16 + 0.36 + 0.01 + 0.01) / 4)
  assert found.nll_nats == pytest.approx(-np.log([0.6, 0.4, 0.9, 0.9]).mean())
  # Wrong with 9 of 10 in one bin of its own: 3 of 4 are 0.9 sure and 2/3 right.
  leads = np.array([logit[0], -logit[1], logit[1], logit[1]])
  assert calibration.calibration_error(calibration.bins(leads, 'width', 2)) == pytest.approx((1 * 0.4 + 3 * (0.9 - 2 / 3)) / 4)
  # All in one bin the errors cancel: (.6 + 3 x .9) / 4 against 3 / 4.
  assert calibration.calibration_error(calibration.bins(leads, 'mass', 1)) == pytest.approx(0.825 - 0.75)


def test_equal_masses_hold_equal_numbers_and_equal_confidences_share_a_bin():
  leads = np.random.default_rng(0).normal(size=200)
  assert [one.pairs for one in calibration.bins(leads, 'mass')] == [20] * 10
  tied = np.repeat([-1.0, 1.0], [30, 70])
  for order in (tied, tied[::-1]):
    assert calibration.bins(order, 'mass') == [Bin(100, pytest.approx(sigmoid(1)), 0.7)]
  widths = calibration.bins(leads, 'width')
  edges = np.linspace(0.5, 1, 11)
  assert all(sum(low <= one.confidence < high for one in widths) <= 1 for low, high in zip(edges[:-1], edges[1:], strict=True))
  assert sum(one.pairs for one in widths) == 200


def test_the_temperature_is_the_most_likely_one():
  leads = overconfident(400, 3.0)
  found = calibration.temperature(leads)

  def loss(value):
    target = 401 / 402
    chance = sigmoid(leads / value)
    return -np.mean(target * np.log(chance) + (1 - target) * np.log(1 - chance))

  grid = np.exp(np.linspace(np.log(1.0), np.log(10), 3000))
  assert found == pytest.approx(grid[np.argmin([loss(value) for value in grid])], rel=3e-3)
  assert found == pytest.approx(3.0, rel=0.15) and calibration.temperature(7 * leads) == pytest.approx(7 * found)


def test_a_temperature_repairs_what_is_too_sure_and_is_judged_on_the_other_half():
  leads = overconfident(4000, 4.0)
  found = assess(leads)
  assert found.raw.ece_mass > 0.1 > 0.03 > found.scaled.ece_mass and found.raw.ece_width > 0.1 and found.scaled.ece_width < 0.03
  assert found.scaled.brier < found.raw.brier and found.scaled.nll_nats < found.raw.nll_nats
  # The order of texts is kept, so what is right stays right.
  assert found.accuracy == (leads > 0).mean()
  # The error of chance alone is of the size of what perfect calibration shows.
  assert 0.4 < assess(overconfident(4000, 1.0)).raw.ece_mass / found.scaled.ece_mass_floor < 2.5
  # Where the halves differ, each is judged by the temperature of the other.
  leads = np.array([1, 1, 1, -1] * 50 + [5, 5, 5, -5] * 50, float)
  half = np.arange(400) >= 200
  ours = assess(leads, half_N=half)
  first, second = (calibration.temperature(leads[mask]) for mask in (~half, half))
  assert second == pytest.approx(5 * first)
  assert ours.scaled == calibration.fit(np.concatenate([leads[:200] / second, leads[200:] / first]))


def test_the_side_on_which_the_better_text_stands_says_nothing():
  rng = np.random.default_rng(2)
  scores, lengths = rng.normal(1, 2, (60, 2)), rng.integers(1, 30, (60, 2))
  preference = rng.normal(size=60)
  half = rng.random(60) < 0.5
  wanted = calibration.assess(scores, preference, lengths, half)
  swap = rng.random(60) < 0.5
  turned = [np.where(swap[:, None], array[:, ::-1], array) for array in (scores, lengths)]
  found = calibration.assess(turned[0], np.where(swap, -preference, preference), turned[1], half)
  assert numbers(config_lib.to_json(found)) == pytest.approx(numbers(config_lib.to_json(wanted)), rel=1e-12)


def test_pairs_that_do_not_say_count_for_the_scores_alone():
  scores = np.array([[1.0, 0.0], [2.0, 1.0], [50.0, -50.0]])
  found = calibration.assess(scores, np.array([1.0, -2.0, 0.0]), np.ones((3, 2)), np.zeros(3, bool))
  assert found.pairs == 2 and found.accuracy == 0.5 and found.mean == pytest.approx(scores.mean()) and found.std == pytest.approx(scores.std())


def test_a_bias_for_length_shows():
  rng = np.random.default_rng(3)
  lengths = rng.integers(1, 200, (400, 2))
  biased = np.log(lengths)
  even = rng.normal(size=(400, 2))
  people = rng.normal(size=400)
  found = calibration.assess(biased, people, lengths, people > 0)
  assert found.length_correlation > 0.8 and found.longer_scored == pytest.approx(1, abs=0.01) and abs(found.longer_preferred - 0.5) < 0.1
  found = calibration.assess(even, people, lengths, people > 0)
  assert abs(found.length_correlation) < 0.1 and abs(found.longer_scored - 0.5) < 0.1
  # By hand: leads 1, 2 with 3 and 1 tokens more. Ranks of (1, 2, -1, -2) are 3, 4, 2, 1 and those of (3, 1, -3, -1) are 4, 3, 1, 2:
  # deviations .5, 1.5, -.5, -1.5 and 1.5, .5, -1.5, -.5, so 3 of 5.
  assert calibration.rank_correlation(np.array([1.0, 2.0]), np.array([3.0, 1.0])) == pytest.approx(0.6)
  assert calibration.rank_correlation(np.array([1.0, 2.0]), np.array([-3.0, -1.0])) == pytest.approx(-0.6)


def numbers(value):
  if isinstance(value, dict):
    return [one for inner in value.values() for one in numbers(inner)]
  return [one for inner in value for one in numbers(inner)] if isinstance(value, list) else [value]


@pytest.mark.parametrize('leads', [[], [0.0], [3.0], [-3.0], [1e6] * 5, [-1e6, 1e6], [0.0] * 7, [1e-300, 2e-300]])
def test_next_to_nothing_is_finite(leads):
  found = assess(leads)
  assert np.isfinite(numbers(config_lib.to_json(found))).all() and found.std > 0 and found.temperature > 0
  assert config_lib.build(Calibration, config_lib.to_json(found)) == found
  if not leads:
    assert (found.pairs, found.accuracy, found.accuracy_low, found.accuracy_high) == (0, 0.5, 0.0, 1.0)
    assert found.raw.brier == 0.25 and found.raw.ece_mass == 0 and found.raw.bins == () and found.temperature == 1


def test_always_right_becomes_no_certainty():
  leads = np.full(50, 2.0)
  # Platt's target is 51 / 52, whose log-odds are ln 51.
  assert calibration.temperature(leads) == pytest.approx(2 / np.log(51))
  # Worse than chance: as unsure as is allowed.
  assert sigmoid(leads / calibration.temperature(-leads))[0] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize('changes, message', [
    ({'preference_N': np.ones(2)}, r'scores \(3, 2\) and lengths \(3, 2\) must be \[pairs, 2\], preferences \(2,\)'),
    ({'num_tokens_N2': np.ones((3, 1))}, r'lengths \(3, 1\) must be'),
    ({'scores_N2': np.array([[1.0, np.nan]] * 3)}, '3 scores and 0 preferences are not finite'),
    ({'preference_N': np.array([1.0, np.nan, 1.0])}, '0 scores and 1 preferences are not finite'),
])
def test_what_does_not_fit_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    assess([1.0, 2.0, 3.0], **changes)


def test_unknown_bins_are_refused():
  with pytest.raises(ValueError, match="binning='quantile' is unknown; use 'mass' or 'width'"):
    calibration.bins(np.ones(3), 'quantile')
  with pytest.raises(ValueError, match='num_bins=0 must be at least 1'):
    calibration.bins(np.ones(3), 'mass', 0)
