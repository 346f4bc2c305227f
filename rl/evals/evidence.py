"""Accuracy by position of the evidence and by length of the text: whether a model is lost in the middle (Liu et al. 2023, arXiv:2307.03172).

A problem counts once at each position where a piece of its evidence lies, so problems of one piece and of several can be taken together:
as the pieces are spread alike, a dip of the curve is a place where evidence is missed. Problems without named evidence count by length only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from envs.core import Evidence
from rl.evals.stats import Rate
from rl.types import Trajectory

NUM_BINS = 10

Key = TypeVar('Key', bound=Hashable)


class Try(NamedTuple):
  """A graded sample of a problem with a long text."""
  domain: str
  evidence: Evidence
  is_solved: bool


def tries_of(trajectories: Iterable[Trajectory]) -> list[Try]:
  """Return what was graded of problems with a long text."""
  return [Try(one.domain, one.evidence, one.reward == 1) for one in trajectories if one.evidence is not None and one.is_valid]


def by_position(tries: Iterable[Try], num_bins: int = NUM_BINS) -> dict[int, Rate]:
  """Return {bin: rate}, bin 0 at the start of the text, for the bins in which evidence lies."""
  return _rates((place, one.is_solved) for one in tries for place in _bins(one.evidence, num_bins))


def by_length(tries: Iterable[Try]) -> dict[int, Rate]:
  """Return {words: rate}."""
  return _rates((one.evidence.num_words, one.is_solved) for one in tries)


def by_length_and_position(tries: Iterable[Try], num_bins: int = NUM_BINS) -> dict[tuple[int, int], Rate]:
  """Return {(words, bin): rate}."""
  return _rates(((one.evidence.num_words, place), one.is_solved) for one in tries for place in _bins(one.evidence, num_bins))


def by_domain_and_length(tries: Iterable[Try]) -> dict[tuple[str, int], Rate]:
  """Return {(domain, words): rate}."""
  return _rates(((one.domain, one.evidence.num_words), one.is_solved) for one in tries)


def summary(tries: Sequence[Try]) -> dict[str, list[dict[str, Any]]]:
  """Return the tables as JSON values, each rate with its 95 % interval."""
  return {
      'by_position': [{**_span(place), **_values(rate)} for place, rate in by_position(tries).items()],
      'by_length': [{'num_words': words, **_values(rate)} for words, rate in by_length(tries).items()],
      'by_length_and_position': [{'num_words': words, **_span(place), **_values(rate)}
                                 for (words, place), rate in by_length_and_position(tries).items()],
      'by_domain_and_length': [{'domain': domain, 'num_words': words, **_values(rate)}
                               for (domain, words), rate in by_domain_and_length(tries).items()]}


def _bins(evidence: Evidence, num_bins: int) -> set[int]:
  return {min(int(position * num_bins), num_bins - 1) for position in evidence.positions}


def _rates(outcomes: Iterable[tuple[Key, bool]]) -> dict[Key, Rate]:
  counts: dict[Key, list[int]] = {}
  for key, is_solved in outcomes:
    count = counts.setdefault(key, [0, 0])
    count[0] += is_solved
    count[1] += 1
  return {key: Rate(*counts[key]) for key in sorted(counts)}


def _span(place: int) -> Mapping[str, float]:
  return {'from': place / NUM_BINS, 'to': (place + 1) / NUM_BINS}


def _values(rate: Rate) -> dict[str, float]:
  return {**rate._asdict(), **rate.estimate._asdict()}
