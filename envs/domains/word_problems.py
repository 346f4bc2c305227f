"""Arithmetic word problems: generated from templates in GSM8K's form, and GSM8K itself from a file of the user's.

A generated problem is a short story about one quantity: it starts somewhere and each step changes it (gains, losses, groups, shares). The
dial is the number of steps. Values stay non-negative integers, and a share always divides evenly, so the answer is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import json
from pathlib import Path
import re

import numpy as np

from envs.core import Collection, Domain, Generated, Task
from envs.verifiers.numbers import NumberVerifier, parse_number

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
  return _compose(np.random.default_rng([seed, num_steps]), num_steps)[0]


def _compose(rng: np.random.Generator, num_steps: int) -> tuple[WordProblem, str]:
  """Return a problem, and its numbers and operations without the story."""
  name, thing = str(rng.choice(_NAMES)), str(rng.choice(_THINGS))
  value = int(rng.integers(2, 60))
  story, work, operations = [f'{name} has {value} {thing}.'], [], [str(value)]
  for _ in range(num_steps):
    sentence, step, value = _step(rng, value)
    story.append(sentence.format(name=name, n=step[1]))
    work.append(f'{step[0]} = {value}.')
    operations.append(step[0].partition(' ')[2])
  story.append(str(rng.choice(_QUESTIONS)).format(name=name, thing=thing))
  return WordProblem(' '.join(story), ' '.join(work) + f'\n#### {value}', value), ' '.join(operations)


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


def generated() -> Domain:
  """Make the domain of generated problems; the level is the number of steps."""

  def make(rng: np.random.Generator, level: int) -> Task:
    problem, operations = _compose(rng, level)
    return Task(problem.question + '\n', str(problem.value), ({'role': 'assistant', 'content': problem.answer},), operations)

  return Domain('word_problems/generated', 1, Generated('word_problems/generated', 1, make, 5), NumberVerifier(), chance=0.1)


def gsm8k(path: str, *, heldout_fraction: float = 0.2) -> Domain:
  """Make a domain of a JSONL file in GSM8K's form: "question", and "answer" ending in '#### ' and a number.

  A dollar sign before the stated number, or the word dollars after it, are allowed. Source: Cobbe et al. 2021, arXiv:2110.14168.

  Args:
    path: the file.
    heldout_fraction: share of the questions, chosen by their hash, that is never trained on; 1 for a file that is for evaluation only, such
      as test.jsonl, and 0 to train on all of a file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a row that is not of this form, by its number; or no rows.
  """
  with Path(path).open(encoding='utf-8') as file:
    tasks = [_read_row(line, f'{path}, row {number}') for number, line in enumerate(file, 1) if line.strip()]
  if not tasks:
    raise ValueError(f'{path} has no rows; expected one JSON object with "question" and "answer" a line.')
  return Domain('word_problems/gsm8k', 1, Collection('word_problems/gsm8k', tasks, heldout_fraction),
                NumberVerifier(currency=True, units=('dollars', 'dollar')), chance=0.05)


def _read_row(line: str, place: str) -> Task:
  try:
    row = json.loads(line)
  except ValueError as error:
    raise ValueError(f'{place} is not JSON: {error}.') from error
  fields = (row.get('question'), row.get('answer')) if isinstance(row, dict) else ()
  if len(fields) != 2 or not all(isinstance(field, str) and field.strip() for field in fields):
    raise ValueError(f'{place}: expected an object with the texts "question" and "answer", got {line.strip()[:100]!r}.')
  question, answer = fields
  work, mark, last = answer.rpartition('####')
  value = parse_number(last)
  if not mark or value is None:
    raise ValueError(f'{place}: the answer must end in "#### " and a number such as 42 or 1,234.5, got ...{answer[-60:]!r}.')
  # The calculator annotations, <<48/2=24>>, are GSM8K's own; no model is asked to write them.
  demonstration = re.sub(r'<<[^<>]*>>', '', work).rstrip() + f'\n#### {value}'
  # The same question in other spacing or capitals is the same task.
  canonical = ' '.join(question.casefold().split())
  return Task(question.strip() + '\n', str(value), ({'role': 'assistant', 'content': demonstration.lstrip()},), canonical)
