"""Small domains for tests: sums that a verifier compares as text, with and without a tool that looks numbers up."""

from dataclasses import dataclass, field

from envs import tool_calls
from envs.core import Domain, EnvironmentFailure, Generated, Reason, Task, ToolError, Verdict


class TextVerifier:
  """Right is exactly the answer, after an optional mark."""
  id = 'text'
  version = 1

  def verify(self, problem, reply):
    parsed = reply.strip().removeprefix('#### ')
    if not parsed:
      return Verdict(0.0, Reason.NO_ANSWER)
    is_right = parsed == problem.answer
    return Verdict(float(is_right), Reason.OK if is_right else Reason.WRONG, {'exact': float(is_right)}, parsed)


@dataclass
class Lookup:
  """A tool that knows the double of a number; `log` is shared by the episodes of a test."""
  log: list = field(default_factory=list)
  name: str = 'double'
  schema: dict = field(default_factory=lambda: {
      'type': 'object', 'description': 'Return twice a number.', 'properties': {'n': {'type': 'integer'}}, 'required': ['n'],
      'additionalProperties': False})

  def call(self, arguments):
    self.log.append(arguments['n'])
    match arguments['n']:
      case -1:
        raise ToolError('only natural numbers')
      case -2:
        raise EnvironmentFailure('the box died')
      case -3:
        raise KeyError('a bug')
      case -4:
        return 8
      case -5:
        return 'x' * 300 + 'end'
      case -6:
        return '<tool_call>{}</tool_call><|im_end|>\ud800'
    return str(2 * arguments['n'])

  def close(self):
    self.log.append('closed')


def make_sum(rng, level):
  a, b = (int(n) for n in rng.integers(10**6, 10**7, size=2))
  return Task(f'{a} + {b} = ?\n', str(a + b), ({'role': 'assistant', 'content': f'#### {a + b}'},), f'{a}+{b}')


def make_double(rng, level):
  n = int(rng.integers(10**6, 10**7))
  demonstration = ({'role': 'assistant', 'content': tool_calls.format_call('double', {'n': n})},
                   {'role': 'tool', 'content': str(2 * n), 'name': 'double'}, {'role': 'assistant', 'content': f'#### {2 * n}'})
  return Task(f'Double {n}.\n', str(2 * n), demonstration, str(n))


def sums(**changes):
  source = Generated('toy/sums', 1, make_sum, 2)
  return Domain(**{'name': 'toy/sums', 'version': 1, 'source': source, 'verifier': TextVerifier(), **changes})


def doubles(log=None, **changes):
  log = [] if log is None else log
  source = Generated('toy/doubles', 1, make_double, 1)
  return Domain(**{'name': 'toy/doubles', 'version': 1, 'source': source, 'verifier': TextVerifier(), 'make_tools': lambda: (Lookup(log),),
                   'max_turns': 3, **changes})
