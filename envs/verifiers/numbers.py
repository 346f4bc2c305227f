"""Final answers that are one number: found by a mark, parsed exactly, compared as fractions.

This is the cheap and total part of checking mathematics: pure functions, microseconds, no time limit needed, since every input is capped
before any arithmetic is done. What counts as the same number is written here and nowhere else:

- '1,234' is 1234 (only with well-formed groups), '18.00' is 18, '-3/7' and '0.5' are fractions; a period that ends a sentence is dropped;
- full-width and styled digits read as digits; superscripts, vulgar fractions and digits of other scripts do not;
- '%', '$' and unit words only where they are declared; exponents, mixed numbers, nan and infinity never.

Deliberately absent: eval, tolerances, answers in words.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
import re
from typing import ClassVar, Literal
import unicodedata

from envs.core import Problem, Reason, Verdict

Mark = Literal['hashes', 'boxed']

MAX_DIGITS = 200
MAX_MARKS = 3
_MAX_EXPONENT = 64
_MAX_DEPTH = 50
_MAX_EXPRESSION_CHARS = 300

_HASHES = re.compile(r'(?<!#)####(?!#)')
_BOXED = re.compile(r'\\boxed\s*\{')
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)
_INTEGER = r'(?:0|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*)'
_NUMBER = re.compile(rf'(?P<sign>[-+]?)(?:(?P<whole>{_INTEGER})(?P<decimals>\.\d+)?|(?P<bare>\.\d+))(?:/(?P<denominator>[1-9]\d*))?',
                     re.ASCII)
_NUMBERS_IN_TEXT = re.compile(r'\d[\d,./]*', re.ASCII)
_EXPRESSION = re.compile(r'[-+*/().^\d ]+', re.ASCII)
# Forms of a character that differ from it in looks only. Superscripts and vulgar fractions are not among them: 4² is not 42.
_SAME_CHARACTER = ('<wide>', '<narrow>', '<font>', '<noBreak>')


def plain_characters(text: str) -> str:
  """Replace characters by the plain ones that they are variants of: full-width and styled letters and digits, minus signs, hard spaces."""
  if text.isascii():
    return text
  plain = (unicodedata.normalize('NFKC', char) if unicodedata.decomposition(char).startswith(_SAME_CHARACTER) else char for char in text)
  return ''.join(plain).replace('\N{MINUS SIGN}', '-')


def after_reasoning(reply: str) -> str:
  """Return what follows the last '</think>'; reasoning that was not closed is not an answer."""
  return reply.rpartition('</think>')[2].partition('<think>')[0]


def answer_slot(reply: object, mark: Mark, *, max_chars: int = 300) -> tuple[str | None, Reason]:
  r"""Return (text of the answer slot, OK), or (None, why there is none).

  The slot is what follows the last '####' on its line, or the content of the last '\boxed{...}'. The last one counts, so a reply may
  correct itself, but not often: more than `MAX_MARKS` answers are a list of guesses. A box that is not closed is a cut-off answer, and no
  earlier box stands in for it.
  """
  if not isinstance(reply, str):
    return None, Reason.BAD_FORMAT
  text = after_reasoning(reply)
  slots = _boxes(text) if mark == 'boxed' else [part.split('\n', 1)[0] for part in _HASHES.split(text)[1:]]
  if slots and slots[-1] is None:
    return None, Reason.TRUNCATED
  if len(slots) > MAX_MARKS:
    return None, Reason.MULTIPLE
  slot = slots[-1].strip() if slots else ''
  if not slot:
    return None, Reason.NO_ANSWER
  return (None, Reason.TOO_LONG) if len(slot) > max_chars else (slot, Reason.OK)


def _boxes(text: str) -> list[str | None]:
  """Return the contents of the outermost boxes in order; None for one that does not end, which swallows the rest of the text."""
  boxes: list[str | None] = []
  end = 0
  while opening := _BOXED.search(text, end):
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
      depth += {'{': 1, '}': -1}.get(brace.group(), 0)
      if not depth:
        break
    if depth:
      return [*boxes, None]
    boxes.append(text[opening.end():brace.start()])
    end = brace.end()
  return boxes


def parse_number(text: str, *, currency: bool = False, percent: bool = False, units: Sequence[str] = ()) -> Fraction | None:
  """Return the number that the whole text is, or None.

  Args:
    text: at most `MAX_DIGITS` digits in all.
    currency: allow a '$' before the number.
    percent: read 'n%' as n/100; otherwise a percent sign makes it no number.
    units: words that may follow the number after a space.
  """
  text = plain_characters(text).strip().removesuffix('.')
  for unit in units:
    if text.endswith(' ' + unit):
      text = text.removesuffix(unit).rstrip()
      break
  is_percent = percent and text.endswith('%')
  if is_percent:
    text = text[:-1].rstrip()
  if currency:
    text = re.sub(r'^(-?)\$\s?', r'\1', text)
  match = _NUMBER.fullmatch(text)
  if match is None or sum(char.isdigit() for char in text) > MAX_DIGITS:
    return None
  value = Fraction((match['whole'] or '').replace(',', '') + (match['decimals'] or match['bare'] or '')) / int(match['denominator'] or 1)
  return (-value if match['sign'] == '-' else value) / (100 if is_percent else 1)


def evaluate(text: str) -> Fraction | None:
  """Return the exact value of plain arithmetic in + - * / ** ^ and parentheses, or None if the text is anything else or too big.

  `^` is a power. Nothing is executed: the syntax tree is walked, and every operation is bounded before it is done.
  """
  if len(text) > _MAX_EXPRESSION_CHARS or not _EXPRESSION.fullmatch(text):
    return None
  source = text.replace('^', '**').strip()
  try:
    return _value(ast.parse(source, mode='eval').body, source, 0)
  except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError):
    return None


def _value(node: ast.expr, source: str, depth: int) -> Fraction | None:
  if depth > _MAX_DEPTH:
    return None
  match node:
    case ast.Constant():
      # From the source, since the tree holds decimals as binary floats.
      return Fraction(source[node.col_offset:node.end_col_offset])
    case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
      value = _value(node.operand, source, depth + 1)
      return None if value is None else -value if isinstance(node.op, ast.USub) else value
    case ast.BinOp():
      left, right = _value(node.left, source, depth + 1), _value(node.right, source, depth + 1)
      return None if left is None or right is None else _operate(node.op, left, right)
  return None


def _operate(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction | None:
  match operator:
    case ast.Add():
      value = left + right
    case ast.Sub():
      value = left - right
    case ast.Mult():
      value = left * right
    case ast.Div():
      value = left / right
    case ast.Pow() if right.denominator == 1 and abs(right) <= _MAX_EXPONENT:
      value = left ** int(right)
    case _:
      return None
  # Operands below the cap keep the next result below its 64th power, so no step is ever large.
  return value if max(abs(value.numerator), value.denominator) < 10**MAX_DIGITS else None


@dataclass(frozen=True)
class NumberVerifier:
  r"""Scores 1 exactly when the answer slot holds the number `Problem.answer`, written out.

  A fraction counts in lowest terms only, and an expression never: '84/2' and '40 + 2' are questions whose answer is 42. Two different
  numbers in the slot are a hedge.

  Attributes:
    mark: what announces the answer, '#### ' or '\boxed{}'.
    currency, units: as in `parse_number`.
  """
  mark: Mark = 'hashes'
  currency: bool = False
  units: tuple[str, ...] = ()

  id: ClassVar[str] = 'number'
  version: ClassVar[int] = 1

  def verify(self, problem: Problem, reply: str) -> Verdict:
    """Return the verdict; the part 'format' is 1 where a number was stated, right or wrong."""
    expected = parse_number(problem.answer) if isinstance(problem.answer, str) else None
    if expected is None:
      return Verdict(None, Reason.VERIFIER_ERROR, detail=f'{problem.id}: answer={problem.answer!r} is not a number such as "42" or "-3/7".')
    slot, reason = answer_slot(reply, self.mark)
    stated = None
    if slot is not None:
      stated, reason = self._read(slot)
    if stated is None:
      return Verdict(0.0, reason, {'format': 0.0})
    is_right = stated == expected
    return Verdict(float(is_right), Reason.OK if is_right else Reason.WRONG, {'format': 1.0}, parsed=str(stated))

  def _read(self, slot: str) -> tuple[Fraction | None, Reason]:
    stated = parse_number(slot, currency=self.currency, units=self.units)
    if stated is None:
      is_hedge = len(set(_NUMBERS_IN_TEXT.findall(plain_characters(slot)))) > 1
      return None, Reason.MULTIPLE if is_hedge else Reason.BAD_FORMAT
    written = re.search(r'/(\d+)', plain_characters(slot))
    if written and int(written[1]) != stated.denominator:
      return None, Reason.BAD_FORMAT
    return stated, Reason.OK
