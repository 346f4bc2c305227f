"""Numbers as final answers: what is the same number, what is none, and what a reply states."""

from fractions import Fraction
import math
import random
import time

import pytest

from envs.core import Problem, Reason
from envs.verifiers import numbers
from envs.verifiers.numbers import NumberVerifier, evaluate, parse_number


def problem(answer):
  return Problem('p', 'd', 1, ({'role': 'user', 'content': 'Compute 84/2.\n'},), answer)


def verdict(reply, answer='42', **settings):
  return NumberVerifier(**settings).verify(problem(answer), reply)


@pytest.mark.parametrize('text, value', [
    ('42', 42), ('+42', 42), ('-42', -42), ('\N{MINUS SIGN}42', -42), (' 42. ', 42), ('0', 0), ('18.00', 18), ('.5', Fraction(1, 2)),
    ('-0.25', Fraction(-1, 4)), ('1,234', 1234), ('1,234,567.5', Fraction(2469135, 2)), ('-3/7', Fraction(-3, 7)), ('6/14', Fraction(3, 7)),
    ('0.1', Fraction(1, 10)), ('４２', 42), ('\U0001d7d2\U0001d7d0', 42), ('1' * 200, int('1' * 200)),
])
def test_numbers_are_read_exactly(text, value):
  assert parse_number(text) == value


@pytest.mark.parametrize('text', [
    '', ' ', '.', '-', '4 2', '12,34', '1,2345', ',123', '042', '00', '1.234,5', '1e3', '0x2a', '1_000', 'nan', 'inf', '-inf', '1/0', '0/0',
    '1/-2', '3/07', '1 1/2', '42%', '$42', '42 dollars', '4²', '½', '4½', '٤٢', '4\u030a2', '\u202e24', '4\u200b2', '42\x00', '\ud800',
    'forty-two', '42!', '(42)', '--42', '1' * 201, '0.' + '0' * 200, '１' * 201, '42..',
])
def test_what_is_no_number(text):
  assert parse_number(text) is None


def test_signs_and_units_count_only_where_they_are_declared():
  assert parse_number('$1,000', currency=True) == 1000
  assert parse_number('-$5', currency=True) == -5
  assert parse_number('$$5', currency=True) is None
  assert parse_number('18 dollars.', units=('dollars',)) == 18
  assert parse_number('18dollars', units=('dollars',)) is None
  assert parse_number('18 dollars dollars', units=('dollars',)) is None
  assert parse_number('18 million', units=('dollars',)) is None
  assert parse_number('50%', percent=True) == Fraction(1, 2)
  assert parse_number('50%%', percent=True) is None


@pytest.mark.parametrize('text, value', [
    ('2 + 3 * 4', 14), ('(2+3)*4', 20), ('2^10', 1024), ('2**-2', Fraction(1, 4)), ('-2^2', -4), ('2^3^2', 512),
    ('0.1+0.2', Fraction(3, 10)), ('1/3', Fraction(1, 3)), ('- -3', 3), ('2^64', 2**64), (' 7 ', 7),
])
def test_arithmetic_is_exact(text, value):
  assert evaluate(text) == value


@pytest.mark.parametrize('text', [
    '', '1+', '1/0', '0^-1', '2^65', '9**9**9**9', '(9^60)^60', '10^(10^10)', '2^0.5', '5//2', '5%2', '1 2', '007', '2(3)', 'x',
    '__import__("os")', '1 if 1 else 2', 'True', '0x10', '1e5', '1_0', '[1]', '1,2', '~1', '1<2', '(' * 200 + '1' + ')' * 200,
    '-' * 60 + '1', '1' * 301, '9' * 150 + '*' + '9' * 140, '٣+1', '\x00',
])
def test_arithmetic_is_bounded_and_nothing_else_is_read(text):
  start = time.perf_counter()
  assert evaluate(text) is None
  assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize('reply, score, reason', [
    ('6 * 7 = 42.\n#### 42', 1, Reason.OK), ('####42', 1, Reason.OK), ('#### 42.00\n', 1, Reason.OK), ('#### 42\nDone: 43.', 1, Reason.OK),
    ('#### 41\nNo:\n#### 42', 1, Reason.OK), ('<think>#### 41</think>#### 42', 1, Reason.OK), ('so #### 41</think>#### 42', 1, Reason.OK),
    ('#### 43', 0, Reason.WRONG), ('#### 42\n#### 43', 0, Reason.WRONG), ('#### -42', 0, Reason.WRONG), ('#### 420', 0, Reason.WRONG),
    ('42', 0, Reason.NO_ANSWER), ('', 0, Reason.NO_ANSWER), ('####', 0, Reason.NO_ANSWER), ('####\n42', 0, Reason.NO_ANSWER),
    ('### 42', 0, Reason.NO_ANSWER), ('##### 42', 0, Reason.NO_ANSWER), ('<think>#### 42</think> Hm.', 0, Reason.NO_ANSWER),
    ('<think>#### 42', 0, Reason.NO_ANSWER), ('#### 42 <think>', 1, Reason.OK), ('#### 42 or 43', 0, Reason.MULTIPLE),
    ('#### 42, 43', 0, Reason.MULTIPLE), ('#### 42 = 84/2', 0, Reason.MULTIPLE), ('#### 84/2', 0, Reason.BAD_FORMAT),
    ('#### 42/1', 1, Reason.OK), ('#### 40 + 2', 0, Reason.MULTIPLE), ('#### 42 apples', 0, Reason.BAD_FORMAT),
    ('#### 42%', 0, Reason.BAD_FORMAT), ('#### $42', 0, Reason.BAD_FORMAT), ('#### 42' + ' word' * 1000, 0, Reason.TOO_LONG),
    ('#### 40\n#### 41\n#### 42', 1, Reason.OK), ('#### 39 #### 40 #### 41 #### 42', 0, Reason.MULTIPLE),
    ('\n'.join(f'#### {n}' for n in range(43)), 0, Reason.MULTIPLE),
])
def test_the_last_marked_answer_counts(reply, score, reason):
  found = verdict(reply)
  assert (found.score, found.reason) == (score, reason)
  assert found.parts['format'] == float(found.parsed is not None)


@pytest.mark.parametrize('reply, score, reason', [
    (r'So \boxed{42}.', 1, Reason.OK), (r'\boxed{41} no, \boxed{ 42 }', 1, Reason.OK), (r'\boxed{42}, or \boxed{43}', 0, Reason.WRONG),
    (r'\boxed{42} and \boxed{42', 0, Reason.TRUNCATED), (r'\boxed{42', 0, Reason.TRUNCATED), (r'\boxed{42\}', 0, Reason.TRUNCATED),
    (r'\boxed{}', 0, Reason.NO_ANSWER), (r'\boxed{{42}}', 0, Reason.BAD_FORMAT), ('#### 42', 0, Reason.NO_ANSWER),
    (r'\boxed{41, 42}', 0, Reason.MULTIPLE), (r'\boxed{1}' * 3 + r'\boxed{42}', 0, Reason.MULTIPLE),
    (r'\boxed{' * 50_000, 0, Reason.TRUNCATED),
])
def test_the_last_box_counts_and_must_be_closed(reply, score, reason):
  found = verdict(reply, mark='boxed')
  assert (found.score, found.reason) == (score, reason)


def test_fractions_count_in_lowest_terms_or_as_exact_decimals():
  assert verdict('#### -3/7', '-3/7').score == 1
  assert verdict('#### -6/14', '-3/7').reason == Reason.BAD_FORMAT
  assert verdict('#### 0.75', '3/4').score == 1
  assert verdict('#### 0.333333', '1/3').reason == Reason.WRONG
  assert verdict('#### 0.00001', '1/100000').score == 1
  assert verdict('#### 0', '1/100000').reason == Reason.WRONG


def test_declared_units():
  settings = {'currency': True, 'units': ('dollars',)}
  assert verdict('#### $42', **settings).score == verdict('#### 42 dollars', **settings).score == 1
  assert [verdict(f'#### 42{wrong}', **settings).score for wrong in (' cents', ' thousand', '%', ' $')] == [0] * 4


def test_an_answer_of_ours_that_is_no_number_is_never_a_score():
  for answer in (None, 42, '', 'x', '1,2', {'a': 1}):
    found = verdict('#### 42', answer)
    assert found.score is None and found.reason == Reason.VERIFIER_ERROR
  assert 'is not a number such as "42"' in verdict('#### 42', 'x').detail


def test_nothing_that_a_policy_writes_raises_or_pays():
  for reply in (None, 42, 4.2, b'#### 42', ['#### 42'], {'text': '#### 42'}):
    assert verdict(reply).score == 0
  rng = random.Random(0)
  pieces = ['####', '\\boxed{', '}', '<think>', '</think>', '\n', '/', '-', ',', '.', '%', '1', '9' * 99, '\ud800', '\u0664', '\x00', 'nan',
            '²', '４', '\u200f']
  for _ in range(2000):
    reply = ''.join(rng.choices(pieces, k=rng.randrange(12)))
    for mark in ('hashes', 'boxed'):
      assert math.isfinite(verdict(reply, '123456789', mark=mark).score)
      assert verdict(reply, '123456789', mark=mark).score == 0


def test_long_replies_are_read_in_linear_time():
  for reply in ('#### 1' * 200_000, '#' * 1_000_000, '<think>' * 150_000, '\\boxed{1}' * 100_000, '1,234' * 200_000 + '#### 42',
                '\\' * 1_000_000):
    start = time.perf_counter()
    for mark in ('hashes', 'boxed'):
      verdict(reply, mark=mark)
    assert time.perf_counter() - start < 2


def test_plain_characters_change_no_meaning():
  assert numbers.plain_characters('ａ−４\u00a0') == 'a-4 '
  assert numbers.plain_characters('x² ½ ٤ é') == 'x² ½ ٤ é'
