"""Whether a reward model's scores mean what they say: calibration against human labels, on held-out pairs. Plain numpy.

A lead is the score of the text that people prefer less that of the other one, so a model is right where its lead is positive; it says that
the preferred text is better with probability sigmoid(lead) (Bradley-Terry). Which text of a pair comes first is a convention, so everything
here is symmetric in it: a confidence is the probability of the text that the model itself scores higher, from 1/2 to 1, and correlations count
each pair both ways. For the same reason Platt scaling (1999) has no intercept and is temperature scaling (arXiv:1706.04599).

Every number is defined and finite for no pair, one pair, equal scores and a model that is always right.

Deliberately absent: isotonic regression, and calibration of what a policy writes (`rl.drift` watches that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl.evals import stats

Binning = Literal['mass', 'width']
NUM_BINS = 10
_TEMPERATURES = (1e-3, 1e3)  # In units of the leads' root mean square.
_BISECTIONS = 60


@dataclass(frozen=True)
class Bin:
  """Pairs of like confidence: their mean confidence, and the share of them in which people agree with the model."""
  pairs: int
  confidence: float
  right: float


@dataclass(frozen=True)
class Fit:
  """How far probabilities are from what people say.

  Attributes:
    brier: mean squared error of the probability (Brier 1950); 0.25 is knowing nothing.
    nll_nats: mean negative log-likelihood.
    ece_mass, ece_width: expected calibration error with bins of equal numbers of pairs, and of equal widths of confidence.
    ece_mass_floor: about the `ece_mass` that perfect calibration would show by chance, with so few pairs.
    bins: those of `ece_mass`.
  """
  brier: float
  nll_nats: float
  ece_mass: float
  ece_width: float
  ece_mass_floor: float
  bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Calibration:
  """What held-out pairs say of one dimension of a reward model.

  Attributes:
    pairs: those that say which text is better.
    accuracy, accuracy_low, accuracy_high: share of them in which the model agrees, with its 95 % interval (Wilson).
    mean, std: of the scores of all texts; std is 1 where they do not differ.
    temperature: fitted on all pairs; P(better) = sigmoid(lead / temperature).
    raw: of sigmoid(lead).
    scaled: of the temperature; each half of the pairs is judged with the temperature of the other half.
    length_correlation: Spearman's, of leads and of how many tokens longer the preferred text is.
    longer_preferred, longer_scored: share of pairs in which people, and the model, take the longer text; a half for texts of equal length.
  """
  pairs: int
  accuracy: float
  accuracy_low: float
  accuracy_high: float
  mean: float
  std: float
  temperature: float
  raw: Fit
  scaled: Fit
  length_correlation: float
  longer_preferred: float
  longer_scored: float


def assess(scores_N2: np.ndarray, preference_N: np.ndarray, num_tokens_N2: np.ndarray, half_N: np.ndarray) -> Calibration:
  """Judge one dimension on held-out pairs.

  Args:
    scores_N2: of the texts of each pair.
    preference_N: positive where people prefer the first text, negative where the second; 0 where they do not say, which counts for `mean` and
      `std` alone.
    num_tokens_N2: lengths of the texts.
    half_N: bool, in which half of the data a pair lies; the same prompt should lie in one.

  Raises:
    ValueError: shapes that do not fit, or a score or preference that is not finite.
  """
  scores_N2, preference_N, num_tokens_N2 = (np.asarray(array, np.float64) for array in (scores_N2, preference_N, num_tokens_N2))
  half_N = np.asarray(half_N, bool)
  if not (scores_N2.shape == num_tokens_N2.shape == (preference_N.size, 2) and half_N.shape == preference_N.shape):
    raise ValueError(f'scores {scores_N2.shape} and lengths {num_tokens_N2.shape} must be [pairs, 2], preferences {preference_N.shape} and '
                     f'halves {half_N.shape} [pairs].')
  if not (np.isfinite(scores_N2).all() and np.isfinite(preference_N).all()):
    raise ValueError(f'{np.count_nonzero(~np.isfinite(scores_N2))} scores and {np.count_nonzero(~np.isfinite(preference_N))} preferences are '
                     'not finite; leave such pairs out, and look at the model that gave them.')
  says = preference_N != 0
  sign_N = np.sign(preference_N[says])
  leads_N, longer_N = (sign_N * (array[says, 0] - array[says, 1]) for array in (scores_N2, num_tokens_N2))
  half_N = half_N[says]
  right_N = _step(leads_N)
  accuracy = stats.proportion(float(right_N.sum()), right_N.size) if right_N.size else stats.Estimate(0.5, 0.0, 1.0)
  scaled_N = np.where(half_N, leads_N / temperature(leads_N[~half_N]), leads_N / temperature(leads_N[half_N]))
  std = float(scores_N2.std()) if scores_N2.size else 0.0
  return Calibration(
      pairs=int(leads_N.size), accuracy=accuracy.value, accuracy_low=accuracy.low, accuracy_high=accuracy.high,
      mean=float(scores_N2.mean()) if scores_N2.size else 0.0, std=std if std > 0 else 1.0, temperature=temperature(leads_N),
      raw=fit(leads_N), scaled=fit(scaled_N), length_correlation=rank_correlation(leads_N, longer_N),
      longer_preferred=_mean(_step(longer_N), 0.5), longer_scored=_mean(_step(longer_N * leads_N), 0.5))


def fit(leads_N: np.ndarray) -> Fit:
  """Judge the probabilities sigmoid(lead)."""
  chance_N = _sigmoid(leads_N)
  by_mass = bins(leads_N, 'mass')
  return Fit(brier=_mean((1 - chance_N)**2, 0.25), nll_nats=_mean(np.logaddexp(0, -leads_N), float(np.log(2))),
             ece_mass=calibration_error(by_mass), ece_width=calibration_error(bins(leads_N, 'width')), ece_mass_floor=_floor(leads_N),
             bins=tuple(by_mass))


def bins(leads_N: np.ndarray, binning: Binning, num_bins: int = NUM_BINS) -> list[Bin]:
  """Return the bins that hold a pair, in the order of their confidence; a lead of 0 is half right.

  Raises:
    ValueError: an unknown binning, or fewer than one bin.
  """
  confidence_N, right_N = _sigmoid(np.abs(leads_N)), _step(leads_N)
  index_N = _bin_of(confidence_N, binning, num_bins)
  masks = [index_N == number for number in np.unique(index_N)]
  return [Bin(int(mask_N.sum()), float(confidence_N[mask_N].mean()), float(right_N[mask_N].mean())) for mask_N in masks]


def calibration_error(of_bins: Sequence[Bin]) -> float:
  """Return the expected calibration error (arXiv:1706.04599 eq. 3): the mean over pairs of |right - confidence| of their bin; 0 without any."""
  total = sum(one.pairs for one in of_bins)
  return float(sum(one.pairs * abs(one.right - one.confidence) for one in of_bins) / max(total, 1))


def temperature(leads_N: np.ndarray) -> float:
  """Return the temperature T of sigmoid(lead / T) with the largest likelihood; 1 where no lead says anything.

  The targets are Platt's, (N + 1) / (N + 2) instead of 1, so a model that is always right gets a finite one. A model that is no better than
  chance gets the largest temperature allowed.
  """
  leads_N = np.asarray(leads_N, np.float64)
  size = float(np.sqrt(np.mean(np.square(leads_N)))) if leads_N.size else 0.0
  if size == 0:
    return 1.0
  unit_N, target = leads_N / size, (leads_N.size + 1) / (leads_N.size + 2)
  # The slope of the loss in 1 / T, which is convex: it rises from below 0 to above.
  low, high = (np.log(bound) for bound in _TEMPERATURES)
  for _ in range(_BISECTIONS):
    middle = (low + high) / 2
    slope = np.mean(unit_N * (_sigmoid(unit_N / np.exp(middle)) - target))
    low, high = (low, middle) if slope < 0 else (middle, high)
  return float(size * np.exp((low + high) / 2))


def rank_correlation(x_N: np.ndarray, y_N: np.ndarray) -> float:
  """Return Spearman's correlation of differences whose sign is a convention: each pair counts as (x, y) and as (-x, -y); 0 if undefined."""
  ranks = [_ranks(np.concatenate([values_N, -np.asarray(values_N)])) for values_N in (x_N, y_N)]
  x_2N, y_2N = (values - _mean(values, 0.0) for values in ranks)
  size = float(np.sqrt((x_2N @ x_2N) * (y_2N @ y_2N)))
  return float(x_2N @ y_2N / size) if size > 0 else 0.0


def _bin_of(confidence_N: np.ndarray, binning: Binning, num_bins: int) -> np.ndarray:
  if num_bins < 1:
    raise ValueError(f'num_bins={num_bins} must be at least 1.')
  if binning == 'width':
    share_N = 2 * confidence_N - 1
  elif binning == 'mass':
    # By middle ranks, so that equal confidences share a bin and their order says nothing.
    share_N = (_ranks(confidence_N) - 0.5) / max(confidence_N.size, 1)
  else:
    raise ValueError(f"binning={binning!r} is unknown; use 'mass' or 'width'.")
  return np.minimum((share_N * num_bins).astype(int), num_bins - 1)


def _floor(leads_N: np.ndarray) -> float:
  """Return the expected `ece_mass` if pairs were right with their very confidence: the mean |error| of a normal variable in each bin."""
  confidence_N = _sigmoid(np.abs(leads_N))
  index_N = _bin_of(confidence_N, 'mass', NUM_BINS)
  variance_N = confidence_N * (1 - confidence_N)
  return float(sum(np.sqrt(2 / np.pi * variance_N[index_N == number].sum()) for number in np.unique(index_N)) / max(leads_N.size, 1))


def _ranks(values_N: np.ndarray) -> np.ndarray:
  """Return ranks from 1, the middle one of equal values."""
  _, inverse_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
  return (np.cumsum(counts) - (counts - 1) / 2)[inverse_N]


def _sigmoid(x: np.ndarray) -> np.ndarray:
  return np.exp(-np.logaddexp(0, -np.asarray(x, np.float64)))


def _step(x: np.ndarray) -> np.ndarray:
  return (np.sign(x) + 1) / 2


def _mean(values_N: np.ndarray, of_none: float) -> float:
  return float(np.mean(values_N)) if np.size(values_N) else of_none
