"""Function-writing tasks: made from a grammar of operations, and read from MBPP and HumanEval files.

A generated task chains operations on integers, text and words ('keep the even numbers, then square every number, then take the sum'); the
dial is their number. Every operation is written three times: in words, as the Python of the reference solution, and as the function that
computes the hidden cases here. No text is ever executed in this process: the data sets' tests become cases only where they compare a call on
literals with a literal, read from their syntax tree.

Deliberately absent: the data files (give their path), tests that are programs, floats in generated tasks.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
import hashlib
import json
import logging
import operator
from pathlib import Path
from typing import Any

import numpy as np

from envs.core import Collection, Domain, Generated, Task
from envs.verifiers.code import CodeVerifier
from envs.verifiers.code_worker import encode

_LOG = logging.getLogger(__name__)
_DRAWS = 10_000
_NUM_RANDOM_CASES = 8
_MAX_WEIGHT = 4
_EXAMPLE_CHARS = 14
_MAX_VALUE, _MAX_LENGTH = 100_000, 200
_REQUEST = 'Reply with a ```python block.\n'
_VOWELS = 'aeiouAEIOU'
_FUNCTIONS = ('f', 'solve', 'transform', 'compute')
_WORDS = ('apple', 'Anna', 'sun', 'noon', 'Zebra', 'kite', 'level', 'moon', 'x', 'River', 'echo', 'Ivy', 'ab12', 'tree', 'Oslo', '7up', 'bob')

# Kind of value -> (name of the variable, what it is called).
_KINDS: Mapping[str, tuple[str, str]] = {
    'ints': ('xs', 'a list of integers'),
    'text': ('s', 'a string'),
    'words': ('words', 'a list of non-empty strings'),
    'int': ('n', 'an integer'),
}
# Inputs that every task of a kind is tested on.
_EDGES: Mapping[str, Sequence[Any]] = {
    'ints': ([], [0], [-4], [3, 3, 3], [-5, -2, -9], [1, 2, 3, 4, 5, 6], [5, 1, 5, 2, 2]),
    'text': ('', 'a', 'Level', 'noon', ' two  words ', '2024', 'AaBb aabb', 'Hello, World 42'),
    'words': ([], ['a'], ['noon', 'noon'], ['Bob', 'bob', 'BOB'], ['pear', 'fig', 'apple', 'fig'], ['x9', 'Level', 'eel']),
    'int': (0, 1, 2, 7, -12, 36, 100, 121),
}


@dataclass(frozen=True)
class _Operation:
  """One step; '@' stands for the value and '#' for the parameter.

  Attributes:
    takes: kind of the value.
    gives: kind of the result.
    words: what to do.
    source: the Python expression.
    apply: (value, parameter) -> result; the value is left as it is.
    parameters: what '#' may be; empty if there is none.
  """
  takes: str
  gives: str
  words: str
  source: str
  apply: Callable[[Any, Any], Any]
  parameters: Sequence[Any] = ()


# (kind taken, kind given) -> (words, source, apply[, parameters]).
_TABLE: Mapping[tuple[str, str], Sequence[tuple]] = {
    ('ints', 'ints'): (
        ('keep the even numbers', '[v for v in @ if v % 2 == 0]', lambda x, k: [v for v in x if v % 2 == 0]),
        ('keep the odd numbers', '[v for v in @ if v % 2 == 1]', lambda x, k: [v for v in x if v % 2 == 1]),
        ('keep the numbers greater than #', '[v for v in @ if v > #]', lambda x, k: [v for v in x if v > k], range(-3, 10)),
        ('keep the numbers less than #', '[v for v in @ if v < #]', lambda x, k: [v for v in x if v < k], range(-3, 10)),
        ('keep the multiples of #', '[v for v in @ if v % # == 0]', lambda x, k: [v for v in x if v % k == 0], range(3, 6)),
        ('remove the multiples of #', '[v for v in @ if v % # != 0]', lambda x, k: [v for v in x if v % k != 0], range(3, 6)),
        ('add # to every number', '[v + # for v in @]', lambda x, k: [v + k for v in x], range(1, 10)),
        ('subtract # from every number', '[v - # for v in @]', lambda x, k: [v - k for v in x], range(1, 10)),
        ('multiply every number by #', '[v * # for v in @]', lambda x, k: [v * k for v in x], range(2, 10)),
        ('square every number', '[v * v for v in @]', lambda x, k: [v * v for v in x]),
        ('negate every number', '[-v for v in @]', lambda x, k: [-v for v in x]),
        ('take the absolute value of every number', '[abs(v) for v in @]', lambda x, k: [abs(v) for v in x]),
        ('replace every number by its value % #', '[v % # for v in @]', lambda x, k: [v % k for v in x], range(3, 10)),
        ('lower every number above # to #', '[min(v, #) for v in @]', lambda x, k: [min(v, k) for v in x], range(2, 9)),
        ('raise every number below # to #', '[max(v, #) for v in @]', lambda x, k: [max(v, k) for v in x], range(-2, 5)),
        ('sort the numbers in ascending order', 'sorted(@)', lambda x, k: sorted(x)),
        ('sort the numbers in descending order', 'sorted(@, reverse=True)', lambda x, k: sorted(x, reverse=True)),
        ('reverse the order', '@[::-1]', lambda x, k: x[::-1]),
        ('keep only the first of equal numbers', 'list(dict.fromkeys(@))', lambda x, k: list(dict.fromkeys(x))),
        ('keep the first # numbers', '@[:#]', lambda x, k: x[:k], range(2, 5)),
        ('remove the first # numbers', '@[#:]', lambda x, k: x[k:], range(1, 4)),
        ('keep every second number, starting with the first', '@[::2]', lambda x, k: x[::2]),
        ('append the same numbers in reverse order', '@ + @[::-1]', lambda x, k: x + x[::-1]),
        ('replace every number by the sum of the numbers up to and including it', '[sum(@[:i + 1]) for i in range(len(@))]',
         lambda x, k: [sum(x[:i + 1]) for i in range(len(x))]),
        ('list the differences between neighbors (the later minus the earlier)', '[b - a for a, b in zip(@, @[1:])]',
         lambda x, k: [b - a for a, b in zip(x, x[1:])]),
    ),
    ('ints', 'int'): (
        ('take the sum', 'sum(@)', lambda x, k: sum(x)),
        ('take the maximum (0 if there is none)', 'max(@, default=0)', lambda x, k: max(x, default=0)),
        ('take the minimum (0 if there is none)', 'min(@, default=0)', lambda x, k: min(x, default=0)),
        ('take the last number (0 if there is none)', '(@ or [0])[-1]', lambda x, k: (x or [0])[-1]),
        ('count the numbers', 'len(@)', lambda x, k: len(x)),
        ('count the distinct numbers', 'len(set(@))', lambda x, k: len(set(x))),
        ('count how often # occurs', '@.count(#)', lambda x, k: x.count(k), range(1, 6)),
        ('take the maximum minus the minimum (0 if there is none)', 'max(@, default=0) - min(@, default=0)',
         lambda x, k: max(x, default=0) - min(x, default=0)),
        ('take the first number minus the second plus the third and so on (0 if there is none)', 'sum(@[::2]) - sum(@[1::2])',
         lambda x, k: sum(x[::2]) - sum(x[1::2])),
    ),
    ('ints', 'bool'): (
        ('say whether they are in ascending order (equal neighbors allowed)', '@ == sorted(@)', lambda x, k: x == sorted(x)),
        ('say whether some number occurs more than once', 'len(set(@)) < len(@)', lambda x, k: len(set(x)) < len(x)),
        ('say whether all are greater than # (True if there is none)', 'all(v > # for v in @)',
         lambda x, k: all(v > k for v in x), range(-3, 4)),
    ),
    ('ints', 'counts'): (
        ('map every number to how often it occurs, as a dict', '{v: @.count(v) for v in @}', lambda x, k: {v: x.count(v) for v in x}),
    ),
    ('ints', 'words'): (
        ('write every number as a string', '[str(v) for v in @]', lambda x, k: [str(v) for v in x]),
    ),
    ('int', 'int'): (
        ('add #', '@ + #', lambda x, k: x + k, range(1, 20)),
        ('multiply by #', '@ * #', lambda x, k: x * k, range(2, 10)),
        ('divide by #, rounding down', '@ // #', lambda x, k: x // k, range(2, 8)),
        ('take the value % #', '@ % #', lambda x, k: x % k, range(5, 12)),
        ('take the absolute value', 'abs(@)', lambda x, k: abs(x)),
        ('square it', '@ * @', lambda x, k: x * x),
        ('add its decimal digits, ignoring the sign', 'sum(int(d) for d in str(abs(@)))', lambda x, k: sum(int(d) for d in str(abs(x)))),
        ('reverse its decimal digits, dropping the sign', 'int(str(abs(@))[::-1])', lambda x, k: int(str(abs(x))[::-1])),
    ),
    ('int', 'ints'): (
        ('list the integers from 1 up to it (none if it is below 1)', 'list(range(1, @ + 1))', lambda x, k: list(range(1, x + 1))),
        ('list its positive divisors in ascending order (none for 0)', '[d for d in range(1, abs(@) + 1) if @ % d == 0]',
         lambda x, k: [d for d in range(1, abs(x) + 1) if x % d == 0]),
        ('list its decimal digits, ignoring the sign', '[int(d) for d in str(abs(@))]', lambda x, k: [int(d) for d in str(abs(x))]),
    ),
    ('int', 'bool'): (
        ('say whether it is even', '@ % 2 == 0', lambda x, k: x % 2 == 0),
        ('say whether it is greater than #', '@ > #', lambda x, k: x > k, range(2, 20)),
    ),
    ('int', 'text'): (
        ('write it in binary, without a prefix', "format(@, 'b')", lambda x, k: format(x, 'b')),
    ),
    ('text', 'text'): (
        ('make it lower case', '@.lower()', lambda x, k: x.lower()),
        ('make it upper case', '@.upper()', lambda x, k: x.upper()),
        ('swap upper and lower case', '@.swapcase()', lambda x, k: x.swapcase()),
        ('reverse it', '@[::-1]', lambda x, k: x[::-1]),
        ('remove the vowels', "''.join(c for c in @ if c not in 'aeiouAEIOU')", lambda x, k: ''.join(c for c in x if c not in _VOWELS)),
        ('keep only the letters', "''.join(c for c in @ if c.isalpha())", lambda x, k: ''.join(c for c in x if c.isalpha())),
        ('remove the digits', "''.join(c for c in @ if not c.isdigit())", lambda x, k: ''.join(c for c in x if not c.isdigit())),
        ('remove the spaces', "@.replace(' ', '')", lambda x, k: x.replace(' ', '')),
        ("replace every '#' by '*'", "@.replace('#', '*')", lambda x, k: x.replace(k, '*'), tuple('aeon')),
        ('double every character', "''.join(c * 2 for c in @)", lambda x, k: ''.join(c * 2 for c in x)),
        ('keep only the first of equal characters', "''.join(dict.fromkeys(@))", lambda x, k: ''.join(dict.fromkeys(x))),
        ('sort its characters', "''.join(sorted(@))", lambda x, k: ''.join(sorted(x))),
        ('keep the first # characters', '@[:#]', lambda x, k: x[:k], range(2, 6)),
        ('remove the first # characters', '@[#:]', lambda x, k: x[k:], range(1, 5)),
        ('keep every second character, starting with the first', '@[::2]', lambda x, k: x[::2]),
    ),
    ('text', 'words'): (
        ('split it at white space', '@.split()', lambda x, k: x.split()),
        ('list its characters', 'list(@)', lambda x, k: list(x)),
    ),
    ('text', 'int'): (
        ('count its characters', 'len(@)', lambda x, k: len(x)),
        ('count its distinct characters', 'len(set(@))', lambda x, k: len(set(x))),
        ("count how often '#' occurs", "@.count('#')", lambda x, k: x.count(k), tuple('aelno')),
        ('count its vowels', "sum(c in 'aeiouAEIOU' for c in @)", lambda x, k: sum(c in _VOWELS for c in x)),
        ('count its upper-case letters', 'sum(c.isupper() for c in @)', lambda x, k: sum(c.isupper() for c in x)),
    ),
    ('text', 'bool'): (
        ('say whether it reads the same backwards', '@ == @[::-1]', lambda x, k: x == x[::-1]),
        ('say whether it contains a digit', 'any(c.isdigit() for c in @)', lambda x, k: any(c.isdigit() for c in x)),
    ),
    ('text', 'counts'): (
        ('map every character to how often it occurs, as a dict', '{c: @.count(c) for c in @}', lambda x, k: {c: x.count(c) for c in x}),
    ),
    ('words', 'words'): (
        ('sort them', 'sorted(@)', lambda x, k: sorted(x)),
        ('sort them by length, equal ones as they come', 'sorted(@, key=len)', lambda x, k: sorted(x, key=len)),
        ('reverse their order', '@[::-1]', lambda x, k: x[::-1]),
        ('reverse each of them', '[w[::-1] for w in @]', lambda x, k: [w[::-1] for w in x]),
        ('make each of them upper case', '[w.upper() for w in @]', lambda x, k: [w.upper() for w in x]),
        ('keep those longer than # characters', '[w for w in @ if len(w) > #]', lambda x, k: [w for w in x if len(w) > k], range(2, 5)),
        ('keep those that start with a vowel', "[w for w in @ if w[0] in 'aeiouAEIOU']", lambda x, k: [w for w in x if w[0] in _VOWELS]),
        ("keep those that contain '#'", "[w for w in @ if '#' in w]", lambda x, k: [w for w in x if k in w], tuple('aeno')),
        ('keep only the first of equal ones', 'list(dict.fromkeys(@))', lambda x, k: list(dict.fromkeys(x))),
        ('keep the first # of them', '@[:#]', lambda x, k: x[:k], range(2, 5)),
        ('cut each of them to its first # characters', '[w[:#] for w in @]', lambda x, k: [w[:k] for w in x], range(2, 4)),
    ),
    ('words', 'text'): (
        ("join them with '#'", "'#'.join(@)", lambda x, k: k.join(x), tuple('-+/')),
        ('join their first characters', "''.join(w[0] for w in @)", lambda x, k: ''.join(w[0] for w in x)),
        ('take the longest, the first of equals (the empty string if there is none)', "max(@, key=len, default='')",
         lambda x, k: max(x, key=len, default='')),
    ),
    ('words', 'ints'): (
        ('replace each of them by its length', '[len(w) for w in @]', lambda x, k: [len(w) for w in x]),
    ),
    ('words', 'int'): (
        ('count them', 'len(@)', lambda x, k: len(x)),
        ('count the distinct ones', 'len(set(@))', lambda x, k: len(set(x))),
    ),
    ('words', 'counts'): (
        ('map each of them to how often it occurs, as a dict', '{w: @.count(w) for w in @}', lambda x, k: {w: x.count(w) for w in x}),
    ),
}
_OPERATIONS = tuple(_Operation(*kinds, *row) for kinds, rows in _TABLE.items() for row in rows)

_Step = tuple[_Operation, Any]


def generated() -> Domain:
  """Return the domain of generated tasks; a task of level l is a chain of l operations.

  Every operation of a chain changes some hidden case, neither a constant nor the identity passes, and two tasks are the same one if they
  agree on a fixed set of probes, whatever their operations.
  """
  name, version = 'programs/generated', 1
  return Domain(name, version, Generated(name, version, _make, 5, heldout_fraction=0.3), CodeVerifier(), chance=0.1, needs_sandbox=True)


def mbpp(path: str) -> Domain:
  """Return the tasks of an MBPP file, the full .jsonl or the sanitized .json; a fifth is held out, the same in both forms.

  Source: Austin et al., 'Program Synthesis with Large Language Models', 2021. The prompt shows the first test, all are graded. Tasks with
  tests other than `f(literals) == literal`, or that a constant passes, are left out and counted in the log. As in their tests, 1 equals 1.0.
  The official test split (ids 11-510) is not kept apart.

  Raises:
    FileNotFoundError: the path is not there.
    ValueError: a row that is not of MBPP's form.
  """
  return _from_file('programs/mbpp', path, _mbpp_task, heldout_fraction=0.2)


def humaneval(path: str) -> Domain:
  """Return the tasks of a HumanEval .jsonl file, all of them held out.

  Source: Chen et al., 'Evaluating Large Language Models Trained on Code', 2021. The reply must hold the whole function. Tasks are left out
  as in `mbpp`.

  Raises:
    FileNotFoundError: the path is not there.
    ValueError: a row that is not of HumanEval's form.
  """
  return _from_file('programs/humaneval', path, _humaneval_task, heldout_fraction=1.0)


def _make(rng: np.random.Generator, level: int) -> Task:
  for _ in range(_DRAWS):
    steps = _chain(rng, level)
    kind = steps[0][0].takes
    inputs = [*_EDGES[kind], *(_draw(rng, kind) for _ in range(_NUM_RANDOM_CASES))]
    behavior = _results(steps, _PROBES[kind])
    if behavior is not None and _is_sound(kind, steps, inputs):
      return _task(rng, kind, steps, inputs, behavior)
  raise RuntimeError(f'level {level}: {_DRAWS} chains of operations gave no sound task.')


def _task(rng: np.random.Generator, kind: str, steps: Sequence[_Step], inputs: Sequence[Any], behavior: Sequence[Any]) -> Task:
  name, (variable, article) = _FUNCTIONS[rng.integers(len(_FUNCTIONS))], _KINDS[kind]
  example = _example(rng, kind, steps, inputs)
  words = ', then '.join(operation.words.replace('#', str(parameter)) for operation, parameter in steps)
  question = (f'Write a Python function `{name}({variable})` for {article} `{variable}`: {words}. Return the result.\n'
              f'Example: `{name}({example!r}) == {_run(steps, example)!r}`\n{_REQUEST}')
  cases = [[[encode(given)], encode(_run(steps, given))] for given in inputs]
  canonical = hashlib.blake2b(json.dumps([kind, [encode(result) for result in behavior]]).encode(), digest_size=16).hexdigest()
  return Task(question, {'entry': name, 'cases': cases}, _demonstration(_source(name, steps)), canonical)


def _demonstration(code: str) -> tuple[Any, ...]:
  return ({'role': 'assistant', 'content': f'```python\n{code.strip()}\n```'},)


def _draw(rng: np.random.Generator, kind: str) -> Any:
  """Return a random input."""
  if kind == 'int':
    return int(rng.integers(-200, 1000))
  if kind == 'ints':
    return [int(v) for v in rng.integers(-9, 16, size=rng.integers(1, 9))]
  words = [_WORDS[i] for i in rng.integers(len(_WORDS), size=rng.integers(1, 6))]
  return words if kind == 'words' else ' '.join(words)


_PROBES = {kind: (*edges, *(_draw(np.random.default_rng(i), kind) for i in range(16))) for kind, edges in _EDGES.items()}


def _chain(rng: np.random.Generator, num_steps: int) -> tuple[_Step, ...]:
  """Return operations that fit together, no operation twice."""
  steps: list[_Step] = []
  for i in range(num_steps):
    used = [operation for operation, _ in steps]
    fitting = [operation for operation in _OPERATIONS if operation not in used and (not steps or operation.takes == used[-1].gives)
               and (i == num_steps - 1 or operation.gives in _KINDS)]
    # An operation with parameters is several tasks, but must not crowd out the others.
    weighted = [operation for operation in fitting for _ in range(min(max(1, len(operation.parameters)), _MAX_WEIGHT))]
    operation = weighted[rng.integers(len(weighted))]
    steps.append((operation, operation.parameters[rng.integers(len(operation.parameters))] if operation.parameters else None))
  return tuple(steps)


def _run(steps: Sequence[_Step], value: Any) -> Any:
  for operation, parameter in steps:
    value = operation.apply(value, parameter)
  return value


def _results(steps: Sequence[_Step], inputs: Sequence[Any]) -> list[Any] | None:
  """Return the result of each input, None if one gets too large on the way."""
  results = list(inputs)
  for step in steps:
    results = [_run((step,), value) for value in results]
    if not all(map(_is_small, results)):
      return None
  return results


def _is_small(value: Any) -> bool:
  if isinstance(value, int):
    return abs(value) <= _MAX_VALUE
  return len(value) <= _MAX_LENGTH and (not isinstance(value, list) or all(map(_is_small, value)))


def _is_sound(kind: str, steps: Sequence[_Step], inputs: Sequence[Any]) -> bool:
  """Say whether the cases tell the task from constants, from the identity and from itself with a step left out."""
  results = _results(steps, inputs)
  if results is None or results == list(inputs):
    return False
  if max(Counter(map(repr, results)).values()) > len(results) * 2 // 3:
    return False
  shorter = [(*steps[:i], *steps[i + 1:]) for i in range(len(steps))]
  return all(_results(rest, inputs) != results for rest in shorter if _fits(kind, rest))


def _fits(kind: str, steps: Sequence[_Step]) -> bool:
  kinds = [kind, *(operation.gives for operation, _ in steps)]
  return all(operation.takes == kind for kind, (operation, _) in zip(kinds, steps))


def _example(rng: np.random.Generator, kind: str, steps: Sequence[_Step], hidden: Sequence[Any]) -> Any:
  """Return an input that is no hidden case, preferably a short one with something to show."""
  drawn = [given for given in (_draw(rng, kind) for _ in range(50)) if given not in hidden and _results(steps, [given]) is not None]
  telling = [given for given in drawn if _run(steps, given) not in (given, 0, '', [], {})]
  return min(telling or drawn, key=lambda given: abs(len(repr(given)) - _EXAMPLE_CHARS))


def _source(name: str, steps: Sequence[_Step]) -> str:
  """Return the reference solution."""
  lines = [f'def {name}({_KINDS[steps[0][0].takes][0]}):']
  for i, (operation, parameter) in enumerate(steps):
    value = operation.source.replace('@', _KINDS[operation.takes][0]).replace('#', str(parameter))
    lines.append(f'    return {value}' if i == len(steps) - 1 else f'    {_KINDS[operation.gives][0]} = {value}')
  return '\n'.join(lines)


class _Unfit(Exception):
  """A task of a file that is left out; the message says why."""


def _from_file(name: str, path: str, convert: Callable[[Mapping[str, Any]], Task], heldout_fraction: float) -> Domain:
  tasks, left_out = [], Counter()
  for place, row in _rows(path):
    try:
      tasks.append(convert(row))
    except _Unfit as unfit:
      left_out[str(unfit)] += 1
    except (LookupError, TypeError, SyntaxError) as error:
      raise ValueError(f'{path}, row {place}: not a task of {name} ({type(error).__name__}: {error}).') from error
  _LOG.info('%s: %d of %d tasks of %s; left out: %s.', name, len(tasks), len(tasks) + left_out.total(), path, dict(left_out) or 'none')
  return Domain(name, 1, Collection(name, tasks, heldout_fraction), CodeVerifier(), needs_sandbox=True)


def _rows(path: str) -> Iterator[tuple[int, Any]]:
  """Yield (number from 1, row) of a JSON list or a JSONL file."""
  text = Path(path).read_text(encoding='utf-8')
  try:
    rows = json.loads(text) if text.lstrip().startswith('[') else [json.loads(line) for line in text.splitlines() if line.strip()]
  except json.JSONDecodeError as error:
    raise ValueError(f'{path}: neither a JSON list nor one JSON object a line ({error}).') from error
  yield from enumerate(rows, start=1)


def _mbpp_task(row: Mapping[str, Any]) -> Task:
  tests = [statement for test in row['test_list'] for statement in ast.parse(test).body]
  shown = ast.unparse(tests[0]).removeprefix('assert ')
  entry, cases = _cases(tests)
  question = f'{row["text"] if "text" in row else row["prompt"]}\nExample: `{shown}`\n{_REQUEST}'
  demonstration = _demonstration(row['code'].replace('\r\n', '\n'))
  return Task(question, {'entry': entry, 'cases': cases, 'is_by_value': True}, demonstration, f'mbpp/{row["task_id"]}')


def _humaneval_task(row: Mapping[str, Any]) -> Task:
  checks = {node.name: node for node in ast.parse(row['test']).body if isinstance(node, ast.FunctionDef)}
  _, cases = _cases(node for node in checks['check'].body if not _is_padding(node))
  question = f'Complete this function. {_REQUEST}\n{row["prompt"]}'
  return Task(question, {'entry': row['entry_point'], 'cases': cases, 'is_by_value': True},
              _demonstration(row['prompt'] + row['canonical_solution']), row['task_id'])


def _is_padding(node: ast.stmt) -> bool:
  """Say whether a statement of a check tests nothing: `assert True, ...`, a bare name."""
  return isinstance(node, ast.Expr) or (isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant))


def _cases(tests: Iterable[ast.stmt]) -> tuple[str, list[list[Any]]]:
  """Return (function, cases) of assert statements.

  Raises:
    _Unfit: they are not all about one function on literals, or a constant passes them.
  """
  names, cases = set(), []
  for test in tests:
    if not isinstance(test, ast.Assert):
      raise _Unfit('a test is not an assert statement')
    name, case = _case(test.test)
    names.add(name)
    cases.append(case)
  if len(names) != 1:
    raise _Unfit('the tests call no function or several')
  if len({json.dumps(expected) for _, expected in cases}) == 1:
    raise _Unfit('a constant passes the tests')
  return names.pop(), cases


def _case(test: ast.expr) -> tuple[str, list[Any]]:
  """Return (function, [args, expected]) of `f(...) == literal` or `f(...) is literal`."""
  is_comparison = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is))
  call = test.left if is_comparison else None
  if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
    raise _Unfit('a test is not a call on literals compared with a literal')
  return call.func.id, [[_literal(arg) for arg in call.args], _literal(test.comparators[0])]


class _Fold(ast.NodeTransformer):
  """Computes sums, differences, products and quotients of literals; the values stay as small as the text that writes them."""

  _OPERATORS: Mapping[type, Callable] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

  def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
    self.generic_visit(node)
    sides, function = (node.left, node.right), self._OPERATORS.get(type(node.op))
    is_foldable = function and all(isinstance(side, ast.Constant) and type(side.value) in (int, float) for side in sides)
    return ast.Constant(function(*(side.value for side in sides))) if is_foldable else node


def _literal(node: ast.expr) -> Any:
  """Return the value of a literal, encoded."""
  try:
    return encode(ast.literal_eval(_Fold().visit(node)))
  except (ValueError, TypeError, ArithmeticError) as error:
    raise _Unfit('a test is not a call on literals compared with a literal') from error
