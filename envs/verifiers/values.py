"""Final answers that are a set of values: names or numbers, written as in the text they come from, separated by commas.

All of the values and nothing else: a list of candidates that holds the right ones is wrong. Capital letters, spaces, quotation marks around a
value and a period at the end make no difference; everything else does.

Deliberately absent: synonyms, tolerances, numbers in another notation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from envs.core import Problem, Reason, Verdict
from envs.verifiers.numbers import answer_slot, plain_characters

MAX_VALUE_CHARS = 64


@dataclass(frozen=True)
class ValuesVerifier:
  """Scores 1 exactly when the text after the last '####' lists the values of `Problem.answer`, each once, in any order."""

  id: ClassVar[str] = 'values'
  version: ClassVar[int] = 1

  def verify(self, problem: Problem, reply: str) -> Verdict:
    """Return the verdict; the parts are 'format', 'precision' and 'recall' of the stated values."""
    answer = problem.answer
    if not isinstance(answer, (list, tuple)) or not answer or not all(isinstance(value, str) and _plain(value) for value in answer):
      return Verdict(None, Reason.VERIFIER_ERROR, detail=f'{problem.id}: answer={answer!r:.200} is not a list such as ["Tolima", "42"].')
    expected = {_plain(value) for value in answer}
    slot, reason = answer_slot(reply, 'hashes', max_chars=(MAX_VALUE_CHARS + 2) * len(expected))
    stated = [] if slot is None else [_plain(value) for value in slot.removesuffix('.').split(',')]
    if not all(stated):
      reason = Reason.BAD_FORMAT
    if reason != Reason.OK:
      return Verdict(0.0, reason, {'format': 0.0, 'precision': 0.0, 'recall': 0.0})
    hits = len(expected & set(stated))
    parts = {'format': 1.0, 'precision': hits / len(stated), 'recall': hits / len(expected)}
    is_right = hits == len(stated) == len(expected)
    reason = Reason.OK if is_right else Reason.MULTIPLE if len(stated) > len(expected) else Reason.WRONG
    return Verdict(float(is_right), reason, parts, parsed=', '.join(stated))


def _plain(value: str) -> str:
  return ' '.join(plain_characters(value).casefold().split()).strip('\'"')
