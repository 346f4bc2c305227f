"""Arithmetic word problems from templates: a question, a worked solution in GSM8K's form, and the number.

A problem is a short story about one quantity: it starts somewhere and each step changes it (gains, losses, groups, shares, comparisons). The
dial is the number of steps. Values stay non-negative integers, and a share always divides evenly, so the answer is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_NAMES = ('Ada', 'Ben', 'Chloe', 'Dev', 'Elif', 'Femi', 'Grace', 'Hugo', 'Ines', 'Jun', 'Kofi', 'Lena', 'Mateo', 'Nora', 'Omar', 'Priya',
          'Quinn', 'Rosa', 'Sven', 'Tara', 'Uma', 'Viktor', 'Wanda', 'Yusuf', 'Zoe')
_THINGS = ('apples', 'marbles', 'stickers', 'books', 'coins', 'pencils', 'shells', 'cards', 'beads', 'stamps', 'cookies', 'bricks',
           'buttons', 'tickets', 'flowers', 'eggs', 'postcards', 'bottles', 'candles', 'magnets')
_GAINS = ('{name} finds {n} more.', 'A friend gives {name} {n} more.', '{name} buys another {n}.', 'A neighbor brings {n} more.')
_LOSSES = ('{name} gives away {n}.', '{name} loses {n} of them.', '{name} sells {n} of them.', 'Then {n} of them break.')
_GROUPS = ('Over the next week the number grows to {n} times as many.', 'A machine turns each one into {n}.',
           'The collection is then multiplied by {n}.')
_SHARES = ('{name} shares them equally among {n} boxes and keeps one box.', '{name} splits them into {n} equal piles and keeps one pile.',
           '{name} divides them equally among {n} people, one of whom is {name}.')
_QUESTIONS = ('How many {thing} does {name} have now?', 'How many {thing} are left with {name}?',
              'What is the number of {thing} that {name} has now?')


@dataclass(frozen=True)
class WordProblem:
  """One problem.

  Attributes:
    question: the story and its question.
    answer: the worked steps, then '#### ' and the number.
    value: the number.
  """
  question: str
  answer: str
  value: int


def word_problem(seed: int, num_steps: int = 2) -> WordProblem:
  """Return the problem of this seed; equal arguments give equal problems.

  Raises:
    ValueError: num_steps below 1.
  """
  if num_steps < 1:
    raise ValueError(f'num_steps={num_steps} must be at least 1.')
  rng = np.random.default_rng([seed, num_steps])
  name, thing = str(rng.choice(_NAMES)), str(rng.choice(_THINGS))
  value = int(rng.integers(2, 60))
  story, work = [f'{name} has {value} {thing}.'], []
  for _ in range(num_steps):
    sentence, step, value = _step(rng, value)
    story.append(sentence.format(name=name, n=step[1]))
    work.append(f'{step[0]} = {value}.')
  story.append(str(rng.choice(_QUESTIONS)).format(name=name, thing=thing))
  return WordProblem(' '.join(story), ' '.join(work) + f'\n#### {value}', value)


def _step(rng: np.random.Generator, value: int) -> tuple[str, tuple[str, int], int]:
  """Return (sentence, (expression, operand), new value)."""
  divisors = [n for n in range(2, 10) if value % n == 0 and value > n]
  kinds = ['gain', 'gain', 'loss', 'loss'] + (['group'] if value < 100 else []) + (['share'] * 2 if divisors else [])
  kind = str(rng.choice(kinds)) if value > 1 else 'gain'
  if kind == 'gain':
    n = int(rng.integers(2, 50))
    return str(rng.choice(_GAINS)), (f'{value} + {n}', n), value + n
  if kind == 'loss':
    n = int(rng.integers(1, value))
    return str(rng.choice(_LOSSES)), (f'{value} - {n}', n), value - n
  if kind == 'group':
    n = int(rng.integers(2, 6))
    return str(rng.choice(_GROUPS)), (f'{value} * {n}', n), value * n
  n = int(rng.choice(divisors))
  return str(rng.choice(_SHARES)), (f'{value} / {n}', n), value // n


def word_problems(seed: int, count: int, num_steps: tuple[int, ...] = (1, 2, 3)) -> Iterator[WordProblem]:
  """Yield `count` different problems; their numbers of steps take turns through `num_steps`."""
  seen: set[str] = set()
  index = 0
  while len(seen) < count:
    problem = word_problem(seed * 1_000_003 + index, num_steps[index % len(num_steps)])
    index += 1
    if problem.question not in seen:
      seen.add(problem.question)
      yield problem
