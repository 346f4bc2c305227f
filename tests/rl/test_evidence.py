"""Accuracy by position of the evidence and by length, by hand."""

import numpy as np
import pytest

from envs.core import Evidence, Outcome
from rl.evals import evidence, stats
from rl.evals.evidence import Try
from rl.evals.stats import Rate
from rl.types import Trajectory

TRIES = [
    Try('a', Evidence(100, (0.0,)), True),
    Try('a', Evidence(100, (0.04, 0.09)), False),  # Two pieces in a bin count once.
    Try('a', Evidence(1000, (0.05, 0.95)), True),
    Try('b', Evidence(1000, (1.0,)), False),  # The end belongs to the last bin.
    Try('b', Evidence(1000, ()), True)]


def test_by_position_by_hand():
  assert evidence.by_position(TRIES) == {0: Rate(2, 3), 9: Rate(1, 2)}
  assert evidence.by_position(TRIES, 2) == {0: Rate(2, 3), 1: Rate(1, 2)}
  assert evidence.by_position([]) == {}


def test_by_length_and_by_domain_by_hand():
  assert evidence.by_length(TRIES) == {100: Rate(1, 2), 1000: Rate(2, 3)}
  assert evidence.by_length_and_position(TRIES) == {(100, 0): Rate(1, 2), (1000, 0): Rate(1, 1), (1000, 9): Rate(1, 2)}
  assert evidence.by_domain_and_length(TRIES) == {('a', 100): Rate(1, 2), ('a', 1000): Rate(1, 1), ('b', 1000): Rate(1, 2)}
  assert list(evidence.by_length(reversed(TRIES))) == [100, 1000]


def test_the_summary_has_intervals():
  # Wilson for 2 of 3: center (2/3 + 3.8415/6) / (1 + 3.8415/3) = 0.5730, half 1.96 sqrt(2/27 + 3.8415/36) / 2.2805 = 0.3654.
  found = evidence.summary(TRIES)
  first = found['by_position'][0]
  assert (first['from'], first['to'], first['solved'], first['graded'], first['value']) == (0.0, 0.1, 2, 3, 2 / 3)
  assert first['low'] == pytest.approx(0.2077, abs=1e-4) and first['high'] == pytest.approx(0.9385, abs=1e-4)
  assert [row['num_words'] for row in found['by_length']] == [100, 1000]
  assert found['by_domain_and_length'][2]['domain'] == 'b' and found['by_length_and_position'][2]['to'] == 1.0
  assert Rate(2, 3).estimate == stats.proportion(2, 3)


def test_a_dip_in_the_middle_is_found_whatever_the_number_of_pieces():
  rng = np.random.default_rng(0)
  tries = []
  for count in (1, 2, 4):
    for _ in range(3000):
      positions = tuple(rng.random(count).tolist())
      # Each piece is missed half the time if it lies between 0.4 and 0.6.
      tries.append(Try('a', Evidence(1000, positions), all(rng.random() < (0.5 if 0.4 <= place < 0.6 else 1.0) for place in positions)))
  rates = {place: rate.estimate.value for place, rate in evidence.by_position(tries).items()}
  inside, outside = [rates[place] for place in (4, 5)], [rates[place] for place in (0, 1, 2, 3, 6, 7, 8, 9)]
  # Inside, half of what it is outside.
  assert max(inside) < 0.47 and min(outside) > 0.75 and np.ptp(outside) < 0.06


def trajectory(reward, outcome, evidence_):
  return Trajectory(tokens_T=np.zeros(1, np.int32), loss_mask_T=np.zeros(1, bool), behavior_logprobs_T=np.full(1, np.nan, np.float32),
                    versions_T=np.full(1, -1, np.int32), reward=reward, outcome=outcome, problem_id='a/heldout/1/0', domain='a', level=1,
                    group=0, sample=0, terminated=True, truncated=False, num_turns=1, evidence=evidence_)


def test_only_what_was_graded_and_has_a_long_text_counts():
  place = Evidence(100, (0.5,))
  trajectories = [trajectory(1.0, Outcome.OK, place), trajectory(0.5, Outcome.LENGTH, place), trajectory(None, Outcome.ENV_ERROR, place),
                  trajectory(1.0, Outcome.OK, None)]
  assert evidence.tries_of(trajectories) == [Try('a', place, True), Try('a', place, False)]
