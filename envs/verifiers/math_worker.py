"""Symbolic equality of two LaTeX answers. Runs in a worker process that is killed when it is late, since a policy wrote one of them.

Parsing and the comparison of sets, equations, intervals and matrices are math-verify's; its parser of plain expressions, which evaluates
Python, is left out. Expressions are compared here, by value: math-verify rounds decimals and drops tiny values.
"""

from __future__ import annotations

import random
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
import sympy

_DIGITS = 40
_RELATIVE = sympy.Float('1e-25', _DIGITS)
_ZERO = sympy.Float('1e-100', _DIGITS)
_NUM_POINTS = 12
_MIN_POINTS = 3


def equal(payload: dict[str, Any]) -> dict[str, Any]:
  """Compare payload['stated'] with payload['expected'], LaTeX without dollar signs; return {'equal': bool, 'detail': str}."""
  try:
    expected, stated = _parse(payload['expected']), _parse(payload['stated'])
    if expected is None or stated is None:
      return {'equal': False, 'detail': 'not understood'}
    return {'equal': _is_equal(expected, stated), 'detail': ''}
  except MemoryError:
    raise
  except Exception as error:  # The boundary to a library that may raise anything on text like this; what it cannot compare is not equal.
    return {'equal': False, 'detail': f'{type(error).__name__} in the comparison'}


def _parse(latex: str) -> Any:
  # Without its timeouts, which are signals; the worker has a deadline instead.
  found = parse(f'${latex}$', [LatexExtractionConfig()], fallback_mode='no_fallback', parsing_timeout=None, raise_on_error=True)
  return next((item for item in found if not isinstance(item, str)), None)


def _is_equal(expected: Any, stated: Any) -> bool:
  # x/x is not 1: it has another domain, and a variable that does not belong there.
  if _symbols(expected) != _symbols(stated):
    return False
  if isinstance(expected, sympy.Expr) and isinstance(stated, sympy.Expr):
    by_value = _equal_by_value(expected, stated)
    if by_value is not None:
      return by_value
  return bool(verify(expected, stated, timeout_seconds=None, raise_on_error=True))


def _symbols(expression: Any) -> set[str]:
  return {str(symbol) for symbol in expression.free_symbols}


def _equal_by_value(expected: sympy.Expr, stated: sympy.Expr) -> bool | None:
  """Compare as real functions at fixed random points: equal wherever either is real; None if there are too few such points."""
  names = sorted(_symbols(expected))
  rng = random.Random(0)
  num_real = 0
  for _ in range(_NUM_POINTS if names else 1):
    point = {name: sympy.Rational(rng.choice((-1, 1)) * rng.randint(20, 300), 97) for name in names}
    first, second = _real(expected, point), _real(stated, point)
    if (first is None) != (second is None):
      return False
    if first is not None:
      largest = max(abs(first), abs(second))
      if largest > _ZERO and abs(first - second) > _RELATIVE * largest:
        return False
      num_real += 1
  return True if num_real >= (_MIN_POINTS if names else 1) else None


def _real(expression: sympy.Expr, point: dict[str, sympy.Rational]) -> sympy.Float | None:
  """Return the value if it is a finite real number, else None."""
  value = sympy.N(expression.subs({symbol: point[str(symbol)] for symbol in expression.free_symbols}), _DIGITS)
  if not value.is_number or not value.is_finite:
    return None
  real, imaginary = value.as_real_imag()
  return real if abs(imaginary) <= _RELATIVE * max(abs(real), _ZERO) else None
