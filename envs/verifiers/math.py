r"""Final answers in LaTeX: numbers, expressions, sets, intervals, equations, matrices, and words.

A ladder, cheapest first. (1) The same text is equal. (2) Two numbers, or plain arithmetic, are compared as exact fractions in this process.
(3) Answers of different form (brackets, number of parts, percent signs, equations, units that differ) are unequal. (4) The rest goes to
math-verify in a worker process that is killed when it is late. Decimals are exact: 0.333333 is not 1/3. A percentage equals its fraction,
50\% is 0.5 and not 50. An expression copied out of the question is not an answer.

Deliberately absent: answers without a mark, tolerances, and any evaluation of the reply in this process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
import importlib.util
import re

from envs.core import EnvironmentFailure, Problem, Reason, Verdict
from envs.verifiers import numbers
from envs.workers import WorkerPool, WorkerTimeout

_MAX_CHARS = 1000
_UNITS = (r'dollars?|cents?|percent|degrees?|radians?|units?|mm|cm|m|km|inch(?:es)?|in|f(?:oo|ee)?t|yards?|miles?|mph|ms|s|seconds?|min|'
          r'minutes?|h|hours?|days?|weeks?|months?|years?|m?g|kg|grams?|pounds?|lbs?|ounces?|oz|m?l|lit(?:er|re)s?|gallons?|people|'
          r'students?')
_AREA = r'(?:(?:square|cubic|sq\.?|cu\.?)\s+)?'
# A bare unit of one letter would be a variable: '5 m'.
_UNIT = re.compile(rf'(?P<value>.*[^\s\\])\s*'
                   rf'(?:\\text\{{\s*(?P<boxed>{_AREA}(?:{_UNITS}))\.?\s*\}}|\s(?P<bare>{_AREA}(?!\w\b)(?:{_UNITS})))'
                   r'(?:\s*\^\s*\{?[23]\}?)?')
_DELIMITED = re.compile(r'\$+(.*?)\$+|\\\((.*)\\\)|\\\[(.*)\\\]', re.DOTALL)
_REWRITES = tuple((re.compile(pattern), new) for pattern, new in (
    (r',\\!\s*', ','), (r'(?<!\\)\\(?:left|right|displaystyle|[!,;:])(?![a-zA-Z])', ''), (r'(?<!\\)\\[ ~]|~|\s+', ' '), (r'\{,\}', ','),
    (r'\\[dt]frac', r'\\frac'), (r'\\(?:mbox|mathrm|textbf|textit|mathbf|operatorname)\{', r'\\text{'), (r'\\%', '%'),
    (r'\^\s*\{?\\circ\}?', r'\\text{ degrees}'), (r'\\text\{\s*(?:or|and)\s*\}|(?<=[\w})]) (?:or|and) ', ','),
    (r'(?<=\d),(?=\d{3}(?!\d)(?:,\d{3})*\.)', ''),
))
_ASSIGNMENT = re.compile(r'^[A-Za-z](?:\([a-z]\))?\s*(?:=|\\in(?![a-z]))\s*')
_BRACKETS = {'(': ')', '[': ']', '\\{': '\\}'}


@dataclass(frozen=True)
class _Answer:
  """An answer in one spelling: LaTeX without units, and the unit if one was written."""
  latex: str
  unit: str | None

  @property
  def text(self) -> str:
    return re.sub(r'(?<!\d)\s+|\s+(?!\d)', '', re.sub(r'\\text\{([^{}]*)\}', r'\1', self.latex))

  @property
  def is_word(self) -> bool:
    return re.fullmatch(r'\\text\{.*\}|[A-Za-z ]{4,}', self.latex) is not None


class MathVerifier:
  r"""Scores 1 when the last \boxed{} (or, in a reply without boxes, what follows the last '####') equals the LaTeX of `Problem.answer`.

  With `symbolic`, answers that are no numbers are compared by math-verify, in worker processes; without, only their text is.
  """

  id = 'math'
  version = 1

  def __init__(self, *, symbolic: bool = True, num_workers: int = 1, wall_s: float = 2.0):
    """Prepare the workers; they start with the first answer that needs one.

    Raises:
      RuntimeError: `symbolic` without math-verify installed.
    """
    if symbolic and importlib.util.find_spec('math_verify') is None:
      raise RuntimeError('symbolic=True needs math-verify, which is not installed: `pip install math-verify`, or choose symbolic=False.')
    self._pool = WorkerPool('envs.verifiers.math_worker:equal', num_workers=num_workers, wall_s=wall_s) if symbolic else None

  def verify(self, problem: Problem, reply: str) -> Verdict:
    """Return the verdict. An answer that takes too long to compare scores 0; a worker that fails makes the verdict invalid."""
    if not isinstance(problem.answer, str) or not problem.answer.strip():
      return Verdict(None, Reason.VERIFIER_ERROR, detail=f'{problem.id}: answer={problem.answer!r} is not LaTeX text.')
    mark = 'hashes' if isinstance(reply, str) and '\\boxed' not in numbers.after_reasoning(reply) else 'boxed'
    slot, reason = numbers.answer_slot(reply, mark, max_chars=_MAX_CHARS)
    if slot is None:
      return Verdict(0.0, reason)
    expected, stated = _read(problem.answer), _read(slot)
    # The reply may hold lone surrogates, which no file takes.
    parsed = stated.latex.encode('utf-8', 'replace').decode()
    if _is_copied(problem, expected, stated):
      return Verdict(0.0, Reason.WRONG, parsed=parsed, detail='copied out of the question')
    expected, stated = _without_assignment(expected, stated)
    equal = _equal_by_form(expected, stated)
    if equal is not None:
      return Verdict(float(equal), Reason.OK if equal else Reason.WRONG, parsed=parsed)
    if self._pool is None:
      return Verdict(0.0, Reason.WRONG, parsed=parsed, detail='compared as text')
    try:
      found = self._pool.call({'expected': _exact(expected.latex), 'stated': _exact(stated.latex)})
    except WorkerTimeout as error:
      return Verdict(0.0, Reason.TIMEOUT, parsed=parsed, detail=str(error))
    except EnvironmentFailure as error:
      return Verdict(None, Reason.VERIFIER_ERROR, parsed=parsed, detail=str(error))
    return Verdict(float(found['equal']), Reason.OK if found['equal'] else Reason.WRONG, parsed=parsed, detail=found['detail'])

  def close(self) -> None:
    """End the workers; may be called twice."""
    if self._pool is not None:
      self._pool.close()


def _read(text: str) -> _Answer:
  """Return an answer in the spelling that the comparisons use."""
  latex = numbers.plain_characters(text).strip()
  delimited = _DELIMITED.fullmatch(latex)
  if delimited:
    latex = next(group for group in delimited.groups() if group is not None)
  unit = None
  if re.match(r'\\?\$', latex):
    latex, unit = latex.lstrip('\\$'), 'dollar'
  latex = _rewritten(latex).strip().removesuffix('.')
  match = _UNIT.fullmatch(latex)
  if match:
    latex, unit = match['value'], (match['boxed'] or match['bare']).lower().removesuffix('s')
    if unit == 'percent':
      latex, unit = latex + '%', None
  return _Answer(latex.strip(), unit)


def _rewritten(latex: str) -> str:
  for pattern, new in _REWRITES:
    latex = pattern.sub(new, latex)
  return latex


def _without_assignment(expected: _Answer, stated: _Answer) -> tuple[_Answer, _Answer]:
  """Drop 'x =' or 'x in' where only one of the two has it."""
  if any((sign in expected.latex) != (sign in stated.latex) for sign in ('=', '\\in')):
    return replace(expected, latex=_ASSIGNMENT.sub('', expected.latex)), replace(stated, latex=_ASSIGNMENT.sub('', stated.latex))
  return expected, stated


def _equal_by_form(expected: _Answer, stated: _Answer) -> bool | None:
  """Decide what needs no algebra; None if it does."""
  if expected.unit and stated.unit and expected.unit != stated.unit:
    return False
  if expected.text == stated.text:
    return True
  if expected.is_word or stated.is_word:
    return expected.text.strip('()').casefold() == stated.text.strip('()').casefold()
  values = _number(expected.latex), _number(stated.latex)
  if None not in values:
    return values[0] == values[1]
  # How many parts \pm stands for is left to algebra.
  has_signs = '\\pm' in expected.latex + stated.latex
  return None if has_signs or _form(expected.latex) == _form(stated.latex) else False


def _number(latex: str) -> Fraction | None:
  """Return the value of a number or of plain arithmetic."""
  value = numbers.parse_number(latex, percent=True)
  if value is not None or len(latex) > 300:
    return value
  text = latex.replace('\\cdot', '*').replace('\\times', '*').replace('\\div', '/')
  text = re.sub(r'\\frac\s*(\d)\s*(\d)', r'((\1)/(\2))', text)
  text = re.sub(r'\\frac\s*(\d)\s*\{', r'\\frac{\1}{', text)
  previous = ''
  while text != previous:
    previous = text
    text = re.sub(r'\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}', r'((\1)/(\2))', re.sub(r'\^\s*\{([^{}]*)\}', r'^(\1)', text))
  return numbers.evaluate(text)


def _form(latex: str) -> tuple:
  """Return what equal answers have in common: brackets around parts, number of parts, relations, bases, percent signs, and words."""
  bracket = next((opening for opening, closing in _BRACKETS.items() if latex.startswith(opening) and latex.endswith((')', ']', '\\}'))), '')
  inner = latex[len(bracket):len(latex) - len(_BRACKETS[bracket])] if bracket else latex
  depth, num_parts = 0, 1
  for token in re.findall(r'\\?[{}()\[\],]', inner):
    depth += token in ('{', '(', '[', '\\{')
    depth -= token in ('}', ')', ']', '\\}')
    num_parts += token == ',' and depth == 0
  # Braces of a set may be left out, and one part in parentheses is no tuple.
  brackets = (bracket, latex[-1:]) if bracket in ('(', '[') and num_parts > 1 else ()
  # math-verify looks for an answer in prose; here all of the slot is the answer.
  words = re.findall(r'[A-Za-z]{4,}', re.sub(r'\\(?:begin|end)\{\w+\}|\\[A-Za-z]+', ' ', latex))
  return brackets, num_parts, latex.count('='), re.findall(r'_\s*\{?(\w+)', latex), '%' in latex, words


def _is_copied(problem: Problem, expected: _Answer, stated: _Answer) -> bool:
  """Say whether the answer is an expression of the question, such as the one to be simplified, and not also the expected text."""
  if stated.text == expected.text or numbers.parse_number(stated.latex) is not None or not re.search(r'[-+*/^]|\\[a-z]', stated.text):
    return False
  question = _Answer(_rewritten(' '.join(message['content'] for message in problem.messages)), None)
  # x^{2} is x^2, here only: in x^{2}3 the braces mean something.
  found, copied = (re.sub(r'([\^_])\{(\w)\}', r'\1\2', answer.text) for answer in (question, stated))
  return copied in found


def _exact(latex: str) -> str:
  """Write decimals as fractions, so that no parser rounds them; drop what stands on both sides or means nothing to a parser."""
  latex = re.sub(r'(\d*)\.(\d+)', lambda match: rf'{{\frac{{{match[1]}{match[2]}}}{{1{"0" * len(match[2])}}}}}', latex)
  return latex.replace('$', '').replace('%', '')
