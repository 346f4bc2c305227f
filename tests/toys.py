"""Toy domains that a tiny byte-level model can learn within seconds."""

import string

import numpy as np

from envs.core import Domain, Generated, Reason, Task, ToolError, Verdict
from envs.tool_calls import format_call

LETTERS = 'abcdefgh'


class Exact:
  """Scores 1 for the answer itself, and for one of several where the answer is a list."""
  id, version = 'toy/exact', 1

  def verify(self, problem, reply):
    allowed = problem.answer if isinstance(problem.answer, list) else [problem.answer]
    return Verdict(float(reply in allowed), Reason.OK if reply in allowed else Reason.WRONG, parsed=reply)


def one_token() -> Domain:
  """A reply of one lower-case letter of the alphabet's first half is right."""

  def make(rng: np.random.Generator, level: int) -> Task:
    number = int(rng.integers(10**6))
    return Task(f'{number}?', list('abcdefghijklm'), ({'role': 'assistant', 'content': 'a'},), str(number))

  return Domain('toy/one_token', 1, Generated('toy/one_token', 1, make, 1, 0.5), Exact(), chance=1.0)


def echo() -> Domain:
  """The right reply is the letter that the question begins with."""

  def make(rng: np.random.Generator, level: int) -> Task:
    letter, number = str(rng.choice(list(LETTERS))), int(rng.integers(10**4))
    return Task(f'{letter}{number:04d}?', letter, ({'role': 'assistant', 'content': letter},), f'{letter}{number}')

  return Domain('toy/echo', 1, Generated('toy/echo', 1, make, 1, 0.5), Exact(), chance=1 / len(LETTERS))


def after_a_long_text() -> Domain:
  """A reply of one printable character is right; 300 letters come before."""

  def make(rng: np.random.Generator, level: int) -> Task:
    text = ''.join(rng.choice(list(LETTERS), 300))
    return Task(f'{text}?', list(string.printable), ({'role': 'assistant', 'content': 'a'},), text)

  return Domain('toy/after_a_long_text', 1, Generated('toy/after_a_long_text', 1, make, 1, 0.5), Exact(), chance=1.0)


class Look:
  """Tells the secret of its episode."""
  name = 'look'
  schema = {'type': 'object', 'description': 'Look.', 'properties': {}, 'additionalProperties': False}

  def __init__(self, secrets):
    self._secrets = secrets

  def call(self, arguments):
    if arguments:
      raise ToolError('look takes no arguments.')
    return next(self._secrets)

  def close(self):
    pass


def look_and_say() -> Domain:
  """The right reply is the letter that the tool tells: at every call and in every episode the same one, which the question does not."""

  def make(rng: np.random.Generator, level: int) -> Task:
    number = int(rng.integers(10**6))
    return Task(f'{number}?', 'c', (
        {'role': 'assistant', 'content': format_call('look', {})}, {'role': 'tool', 'name': 'look', 'content': 'c'},
        {'role': 'assistant', 'content': 'c'}), str(number))

  def forever():
    while True:
      yield 'c'

  return Domain('toy/look_and_say', 1, Generated('toy/look_and_say', 1, make, 1, 0.5), Exact(), lambda: (Look(forever()),), max_turns=2)
