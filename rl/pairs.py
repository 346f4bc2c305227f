"""Preference pairs from a policy's own samples: of two replies to a problem, the verified right one is better than the wrong one.

A problem whose samples are all right, or all wrong, says nothing of which is better and gives no pair. Where too few pairs are found, problems
with only wrong samples give one each after all: the demonstration against a wrong sample. Such pairs also differ in who wrote them, so they
are the exception, asked for by number, marked in their rows and counted.

A row is one of `rl.data.preferences`. Its `dimensions` say by how much the better reply leads: 'correct' by the score, and each part of the
verifier's judgement under its own name. Deliberately absent: pairs of two wrong replies, and rewards of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from envs.core import Message, Outcome
from rl.data.demonstrations import plain
from rl.types import Group, Trajectory

SAMPLES, DEMONSTRATION = 'samples', 'demonstration'


@dataclass
class Pairs:
  """What was found.

  Attributes:
    rows: of preference data, in the order of the problems.
    problems: 'pair', 'all right', 'all wrong', 'demonstration' (all wrong, and a demonstration beside it), 'no samples' -> how many.
    samples: 'right', 'wrong', and why others were left out ('failed', 'cut off', 'blank') -> how many.
  """
  rows: list[dict[str, Any]] = field(default_factory=list)
  problems: Counter[str] = field(default_factory=Counter)
  samples: Counter[str] = field(default_factory=Counter)

  def report(self) -> dict[str, Any]:
    """Return the counts as JSON values."""
    sources = Counter(row['source'] for row in self.rows)
    return {'pairs': len(self.rows), 'pairs_by_source': dict(sources), 'problems': dict(self.problems), 'samples': dict(self.samples)}


def find_pairs(groups: Iterable[Group], *, most: int, least: int, uses_cut_off: bool,
               demonstrate: Callable[[Trajectory], tuple[Message, ...]]) -> Pairs:
  """Return the pairs of groups of samples.

  Args:
    groups: in any order; problems are taken in that of their numbers.
    most: pairs of a problem.
    least: fewer pairs in all than this are filled up with demonstrations; 0 never uses one.
    uses_cut_off: whether samples that the length limit cut off count as what they were graded; else they are left out.
    demonstrate: from a sample to a whole right conversation about its problem, the question first.
  """
  found, only_wrong = Pairs(), []
  for group in sorted(groups, key=lambda group: group.trajectories[0].group):
    right, wrong = _sides(group, uses_cut_off, found.samples)
    if not right and not wrong:
      found.problems['no samples'] += 1
    elif right and wrong:
      found.problems['pair'] += 1
      found.rows += [_row(better, worse) for better, worse in list(zip(right, wrong, strict=False))[:most]]
    else:
      found.problems['all right' if right else 'all wrong'] += 1
      only_wrong += wrong[:1]
  for sample in only_wrong[:max(least - len(found.rows), 0)]:
    found.problems.subtract({'all wrong': 1, 'demonstration': -1})
    found.rows.append(_against_demonstration(demonstrate(sample), sample))
  return found


def _sides(group: Group, uses_cut_off: bool, counts: Counter[str]) -> tuple[list[Trajectory], list[Trajectory]]:
  """Return the (right, wrong) samples of a group that can be shown, of equal replies the first."""
  right, wrong, seen = [], [], set()
  for sample in group.trajectories:
    reply = plain(sample.messages[_num_prompt(sample):])
    if not sample.is_valid:
      counts['failed'] += 1
    elif sample.outcome == Outcome.LENGTH and not uses_cut_off:
      counts['cut off'] += 1
    elif not reply or not all(message['content'].strip() for message in reply):
      counts['blank'] += 1
    else:
      side, name = (right, 'right') if sample.reward == 1 else (wrong, 'wrong')
      counts[name] += 1
      text = str(reply)
      if text not in seen:
        seen.add(text)
        side.append(sample)
  return right, wrong


def _row(better: Trajectory, worse: Trajectory) -> dict[str, Any]:
  start = _num_prompt(better)
  parts = {name: better.parts[name] - worse.parts[name] for name in better.parts if name in worse.parts}
  return {'messages': plain(better.messages[:start]), 'chosen': plain(better.messages[start:]), 'rejected': plain(worse.messages[start:]),
          'dimensions': {**parts, 'correct': better.reward - worse.reward}, 'problem': better.problem_id, 'source': SAMPLES}


def _against_demonstration(demonstration: tuple[Message, ...], worse: Trajectory) -> dict[str, Any]:
  start = _num_prompt(worse)
  return {'messages': plain(worse.messages[:start]), 'chosen': plain(demonstration[1:]), 'rejected': plain(worse.messages[start:]),
          'dimensions': {'correct': 1.0 - worse.reward}, 'problem': worse.problem_id, 'source': DEMONSTRATION}


def _num_prompt(sample: Trajectory) -> int:
  """Return how many messages stand before the policy's first."""
  return next((place for place, message in enumerate(sample.messages) if message['role'] == 'assistant'), len(sample.messages))
