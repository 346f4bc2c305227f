"""Arithmetic with a dial: expressions over integers, over fractions, and calculations told in words that need the python tool.

Prompts are short, so that a small model on a small machine can be trained on them. Every value is exact; expressions over integers have no
division, and the told calculations divide only what divides. The answer must be written out as a number: a copy of the question is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from envs.core import Domain, Generated, Task, Tool
from envs.tool_calls import format_call
from envs.verifiers.numbers import NumberVerifier

# Level -> number of operations, largest number, whether there are brackets.
_INTEGER_LEVELS = ((1, 99, False), (2, 30, False), (2, 99, True), (3, 99, True), (4, 199, True))
_ASKS = ('Compute {}.\n', 'What is {}?\n', 'Work out {}.\n', 'Find the value of {}.\n')

# Level -> number of operations, largest denominator, operators, whether there are brackets.
_RATIONAL_LEVELS = ((1, 9, '+-', False), (1, 9, '+-*÷', False), (2, 6, '+-*', False), (2, 9, '+-*÷', True), (3, 12, '+-*÷', True))
_RATIONAL_ASKS = ('Compute {} in lowest terms.\n', 'What is {}, in lowest terms?\n', 'Work out {} as a reduced fraction.\n')

_LEAST, _MOST = 100, 9999
_STARTS = ('Start with {}.', 'Take {}.', 'Begin with {}.', 'Take the number {}.')
_STEPS = {'+': ('add {}', 'increase it by {}'), '-': ('subtract {}', 'decrease it by {}'), '*': ('multiply by {}', 'multiply it by {}'),
          '//': ('divide by {}', 'divide it by {}')}
_ENDS = ('What is the result?', 'What do you get?', 'What is the final number?')

# An expression: a number, or (operator, left, right).
_Tree = Fraction | tuple[str, '_Tree', '_Tree']
_RANK = {'+': 1, '-': 1, '*': 2, '÷': 2}


def integers() -> Domain:
  """Make the domain of sums, differences and products of integers, with brackets from level 3."""
  return Domain('arithmetic/integers', 1, Generated('arithmetic/integers', 1, _integer_task, len(_INTEGER_LEVELS)), NumberVerifier(),
                chance=0.05)


def rationals() -> Domain:
  """Make the domain of expressions over fractions, answered in lowest terms."""
  return Domain('arithmetic/rationals', 1, Generated('arithmetic/rationals', 1, _rational_task, len(_RATIONAL_LEVELS)), NumberVerifier(),
                chance=0.05)


def with_python() -> Domain:
  """Make the domain of calculations told in words, too large for the head, with the python tool; the level is the number of operations."""
  return Domain('arithmetic/python', 2, Generated('arithmetic/python', 1, _told_task, 5), NumberVerifier(), make_tools=_python_tools,
                max_turns=3, chance=0.02, needs_sandbox=True)


def _python_tools() -> Sequence[Tool]:
  # Imported when an episode starts: the rest of this module needs no sandbox.
  from envs.tools import PythonTool

  return (PythonTool(),)


def _integer_task(rng: np.random.Generator, level: int) -> Task:
  num_operations, largest, has_brackets = _INTEGER_LEVELS[level - 1]
  tree = _tree(rng, num_operations, '+-*', has_brackets, lambda: Fraction(int(rng.integers(2, largest + 1))))
  return _expression_task(rng, tree, _ASKS)


def _rational_task(rng: np.random.Generator, level: int) -> Task:
  num_operations, largest, operators, has_brackets = _RATIONAL_LEVELS[level - 1]

  def fraction() -> Fraction:
    denominator = int(rng.integers(2, largest + 1))
    numerators = [n for n in range(1, 2 * denominator) if np.gcd(n, denominator) == 1]
    return Fraction(int(rng.choice(numerators)), denominator)

  while True:
    tree = _tree(rng, num_operations, operators, has_brackets, fraction)
    try:
      return _expression_task(rng, tree, _RATIONAL_ASKS)
    except ZeroDivisionError:
      continue


def _tree(rng: np.random.Generator, num_operations: int, operators: str, has_brackets: bool,
          number: Callable[[], Fraction]) -> _Tree:
  """Return a random expression; without brackets, one that is written without any."""
  if not num_operations:
    return number()
  num_left = int(rng.integers(num_operations)) if has_brackets else num_operations - 1
  tree = (str(rng.choice(list(operators))), _tree(rng, num_left, operators, has_brackets, number),
          _tree(rng, num_operations - 1 - num_left, operators, has_brackets, number))
  while not has_brackets and '(' in _write(tree):
    tree = (str(rng.choice(list(operators))), *tree[1:])
  return tree


def _write(tree: _Tree) -> str:
  """Return the expression with the brackets that it needs."""
  if isinstance(tree, Fraction):
    return str(tree) if tree >= 0 else f'({tree})'
  operator, left, right = tree
  sides = [_write(left), _write(right)]
  for index, side in enumerate((left, right)):
    # On the right also at equal rank, so that what is written is worked from left to right.
    if isinstance(side, tuple) and _RANK[side[0]] < _RANK[operator] + index:
      sides[index] = f'({sides[index]})'
  return f'{sides[0]} {operator} {sides[1]}'


def _solve(tree: _Tree, steps: list[str]) -> Fraction:
  """Return the value, and append one line per operation to `steps`; ZeroDivisionError where there is none."""
  if isinstance(tree, Fraction):
    return tree
  operator, left, right = tree[0], _solve(tree[1], steps), _solve(tree[2], steps)
  value = _apply(operator, left, right)
  steps.append(f'{_write((operator, left, right))} = {value}')
  return value


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
  match operator:
    case '+':
      return left + right
    case '-':
      return left - right
    case '*':
      return left * right
  return left / right


def _expression_task(rng: np.random.Generator, tree: _Tree, asks: Sequence[str]) -> Task:
  steps: list[str] = []
  answer, expression = str(_solve(tree, steps)), _write(tree)
  work = '. '.join(steps) + f'.\n#### {answer}'
  return Task(str(rng.choice(asks)).format(expression), answer, ({'role': 'assistant', 'content': work},), expression)


def _told_task(rng: np.random.Generator, level: int) -> Task:
  value = int(rng.integers(_LEAST, _MOST + 1))
  start, code, phrases, canonical = str(rng.choice(_STARTS)).format(value), str(value), [], [str(value)]
  for _ in range(level):
    operator, number = _step(rng, value)
    # Brackets even where they change nothing: what is shown is then one rule, and none has to be found out by sampling.
    code = f'({code}) {operator} {number}' if phrases else f'{code} {operator} {number}'
    phrases.append(str(rng.choice(_STEPS[operator])).format(number))
    canonical.append(f'{operator} {number}')
    value = {'+': value + number, '-': value - number, '*': value * number, '//': value // number}[operator]
  sentences = [', then '.join(phrases[i:i + 2]).capitalize() + '.' for i in range(0, level, 2)]
  question = ' '.join((start, *sentences, str(rng.choice(_ENDS)))) + '\n'
  demonstration = ({'role': 'assistant', 'content': format_call('python', {'code': f'print({code})'})},
                   {'role': 'tool', 'name': 'python', 'content': str(value)}, {'role': 'assistant', 'content': f'#### {value}'})
  return Task(question, str(value), demonstration, ' '.join(canonical))


def _step(rng: np.random.Generator, value: int) -> tuple[str, int]:
  """Return an operation that is long-winded without a tool; its result is an integer of at least `_LEAST`."""
  divisors = [n for n in range(3, 100) if value % n == 0 and value // n >= _LEAST]
  operators = ['+', '*', '*'] + ['-'] * (value > 2 * _LEAST) + ['//'] * bool(divisors)
  operator = str(rng.choice(operators))
  if operator == '*':
    return operator, int(rng.integers(12, 100))
  if operator == '//':
    return operator, int(rng.choice(divisors))
  return operator, int(rng.integers(11, (_MOST if operator == '+' else min(value - _LEAST, _MOST)) + 1))
