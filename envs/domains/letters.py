"""Letters in order: a task without knowledge, which a tiny model of random weights learns by trying, for studies of methods.

Partial pay makes the first right letter worth finding; the length that is asked for has to be read, and the reply has to be ended there.
It is not registered, because nothing that it teaches is of use elsewhere: name it 'envs/domains/letters:ordered'.
"""

from __future__ import annotations

import string

import numpy as np

from envs.core import Domain, Generated, Problem, Reason, Task, Verdict

_LEAST = 2  # Letters asked for at level 1; one more at each level.
_NUM_LEVELS = 4


def ordered() -> Domain:
  """Make the domain: write so many small letters in alphabetical order; the level is their number less one."""
  # The best constant reply, of four letters, is paid (2/4 + 3/4 + 1 + 4/5) / 4 over the levels.
  return Domain('letters/ordered', 1, Generated('letters/ordered', 1, _task, _NUM_LEVELS, 0.5), OrderVerifier(), chance=0.7625)


class OrderVerifier:
  """Pays the share of the letters that are in order from the first on, of those asked for or those written, whichever are more."""
  id, version = 'letters/ordered', 1

  def verify(self, problem: Problem, reply: str) -> Verdict:
    num_right = _num_ordered(reply[:problem.answer])
    score = num_right / max(problem.answer, len(reply))
    return Verdict(score, Reason.OK if score == 1 else Reason.WRONG, parsed=reply[:num_right])


def _num_ordered(text: str) -> int:
  last = ''
  for place, letter in enumerate(text):
    if letter not in string.ascii_lowercase or letter < last:
      return place
    last = letter
  return len(text)


def _task(rng: np.random.Generator, level: int) -> Task:
  length = _LEAST + level - 1
  number = int(rng.integers(10**4))  # Makes problems different, and says nothing.
  letters = ''.join(sorted(rng.choice(list(string.ascii_lowercase), length)))
  return Task(f'{number}: {length}?', length, ({'role': 'assistant', 'content': letters},), f'{number} {length}')
