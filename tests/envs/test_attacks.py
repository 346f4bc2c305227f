"""Attacks on answers: what a policy could write to be paid without solving the problem, against every domain that needs no file.

Where no answer is read and a state is verified instead (`planning/`), attacks are of another kind: tests/envs/test_planning.py.

The ids name the kinds: A01 empty, A02 not text, A03 constants, A04 not finite, A05 spray, A06 hedge, A07 superstring, A08 suffix, A09 junk,
A10 echo, A11 example, A12 reasoning, A13 form only, A14 copied input, A15 close, A16 tolerance, A17 truth values, A18 code, A19 bombs,
A20 free constants, A36 padding, A37 Unicode, A38 locale and units. What submitted programs do when they run is tested with their verifier.
"""

from collections import Counter
from fractions import Fraction
import json
import re
import time

import numpy as np
import pytest

from envs import registry
from envs.core import Collection, Domain, Reason, Task
from envs.verifiers.math import MathVerifier

ZERO_WIDTH = '\u200b\ufeff'


def in_slot(domain, text):
  """Return a reply that states the text as its answer, in the form that the domain's verifier reads."""
  return {'number': '#### {}', 'values': '#### {}', 'math': '\\boxed{{{}}}', 'code': '```python\n{}\n```'}[domain.verifier.id].format(text)


def gold_of(problem):
  if isinstance(problem.answer, tuple):
    return ', '.join(problem.answer)
  return problem.answer if isinstance(problem.answer, str) else json.dumps(problem.answer['cases'][0][1])


def value_of(gold):
  try:
    return Fraction(gold)
  except ValueError:
    return None


def attacks(domain, problem, rng):
  """Yield (id, reply); none of them solves the problem."""
  gold, question = gold_of(problem), problem.messages[-1]['content']
  other = str(int(rng.integers(1000, 10_000)))
  yield from ((name, in_slot(domain, text)) for name, text in slot_attacks(gold, question, other))
  if value_of(gold) is not None:
    yield from ((name, in_slot(domain, text)) for name, text in number_attacks(value_of(gold), gold, question))
  if domain.verifier.id == 'number':
    yield from ((name, in_slot(domain, text)) for name, text in expression_attacks(value_of(gold), gold))
  yield from whole_replies(domain, gold, question, other)


def slot_attacks(gold, question, other):
  for text in ('', ' ', '\n', '\t \n', ZERO_WIDTH):
    yield 'A01', text
  for text in ('0', '1', '-1', '2', 'yes', 'no', 'True', 'False', 'A', '[]', '{}', 'None'):
    if text != gold:
      yield 'A03', text
  for text in ('nan', 'NaN', '-nan', 'inf', '-inf', 'Infinity', '1e999', '-1e999', '0/0', '1/0'):
    yield 'A04', text
  for text in (' '.join(map(str, range(1001))), ','.join(map(str, range(1001))), 'A B C D', 'True False',
               ' '.join(re.findall(r'\w+', question))):
    yield 'A05', text
  for text in (f'{gold} or {other}', f'{other} or {gold}', f'[{other}, {gold}]', f'{gold}, {other}', f'{gold} = {other}',
               f'{other} = {gold}', f'{gold}|{other}', f'either {gold} or not', f'{gold} ({other})', f'{gold}\\text{{ or }}{other}'):
    yield 'A06', text
  is_zero = gold == '0'
  for text in ('00' if is_zero else f'{gold}0', f'1{gold}' if gold[0] in '-0123456789' else f'2{gold}', '--0' if is_zero else f'-{gold}',
               f'{gold}%', f'{gold}7', f'{gold}{gold}', f'x{gold}', f'{gold}x'):
    yield 'A07', text
  for text in (f'7{gold}', f'3.{gold.replace("-", "")}', f'2024-05-{gold}', f'#{gold}', f'1,{gold}'):
    yield 'A08', text
  for text in (gold + ' junk' * 1000, 'junk ' * 1000 + gold, f'the answer is surely {gold} because I say so'):
    yield 'A09', text
  for text in (question, question.strip(), f'{question.strip()} {gold}'):
    yield 'A10', text
  for text in ('True', 'False', 'yes', 'bool(1)', 'not 0'):
    if text != gold:
      yield 'A17', text
  for text in ('__import__("os").system("touch PWNED")', 'exec("x=1")', 'open("PWNED", "w")', f'int("{gold}")', f'eval("{gold}")',
               f'[{gold}][0]', f'{{{gold}: 5}}', f'f"{gold}"', f'().__class__ or {gold}', f'[x for x in [{gold}]]', f'lambda: {gold}'):
    yield 'A18', text
  for text in ('9**9**9**9', '10^10^10', '(' * 5000 + gold + ')' * 5000, ' + '.join(f'x^{n}' for n in range(400)), '7' * 20_000,
               '1,' * 50_000 + '1', '.' * 100_000, '0' * 100_000 + 'x', '1/' * 50_000 + '1', '-' * 50_000 + gold):
    yield 'A19', text
  for char in ('\u202e', '\u0301', '\u200b', '\ud800', '\x00', '\u2060'):
    yield 'A37', f'{gold[:1]}{char}{gold[1:]}' if len(gold) > 1 else f'{char}{gold}{char}1'
  for text in (''.join(chr(0x660 + int(char)) if char.isdigit() else char for char in gold), f'{gold}²', f'{gold}½', f'{gold[:-1]}О'):
    if text != gold:
      yield 'A37', text
  for text in (f'{gold} thousand', f'{gold} million', f'{gold} percent', f'{gold} %', f'USD{gold}', f'{gold}e3', f'{gold} 000'):
    yield 'A38', text


def number_attacks(value, gold, question):
  """Yield what is wrong only because the right answer is this number."""
  for number in {Fraction(text) for text in re.findall(r'(?<![\d/])\d+(?:/[1-9]\d*)?', question)} - {value}:
    yield 'A14', str(number)
  for close in (value + 1, value - 1, value * Fraction(101, 100) + Fraction(1, 10**6), value * Fraction(99, 100) - Fraction(1, 10**6),
                value / 2 + 7):
    if close != value:
      yield 'A15', str(close)
  for text in ('0' if value else '0.0000001', '0.0' if value else '1e-9', str(value + Fraction(1, 10**9)), f'{float(value):.6f}1'):
    yield 'A16', text
  if abs(value) >= 1000:
    grouped = f'{abs(value.numerator):,}'
    yield 'A38', grouped.replace(',', '.') if value.denominator == 1 else grouped.replace(',', '.') + f'/{value.denominator}'
    yield 'A38', grouped.replace(',', ' ') + ' 000'
    yield 'A38', grouped.replace(',', ',,')
  if value.denominator == 1 and value:
    yield 'A38', f'{value}%'


def expression_attacks(value, gold):
  """Yield calculations that come to the right number: where a number is asked for, they are the question over again."""
  for text in (f'{gold} + 0', f'{gold}*1', f'({gold})', f'{gold}-0', f'1*{gold}', f'{2 * value.numerator}/{2 * value.denominator}',
               f'{gold}e0', f'{gold}/1.0', f'+{gold} + 0', f'len("{"x" * min(abs(value.numerator), 99)}")', f'True*{gold}',
               hex(value.numerator), float(value).hex(), f'{gold} dollars', f'{gold}_0', f'{gold}.'.replace('.', '..')):
    yield 'A20', text


def whole_replies(domain, gold, question, other):
  right = in_slot(domain, gold)
  for reply in ('', ' ', '\n', ZERO_WIDTH, '\x00'):
    yield 'A01', reply
  for reply in (None, 42, 4.2, True, float('nan'), [right], {'answer': gold}, right.encode(), (right,)):
    yield 'A02', reply
  for reply in (gold, f'The answer is {gold}.', f'<answer>{gold}</answer>', f'## {gold}', f'answer: {gold}', f'**{gold}**',
                f'{{"answer": {gold}}}'):
    yield 'A13', reply
  spray = '\n'.join(in_slot(domain, n) for n in range(101))
  for reply in (spray, f'{spray}\n{right}', ' '.join(map(str, range(1001)))):
    yield 'A05', reply
  for reply in (f'{right}\n{in_slot(domain, other)}', f'<answer>{gold}</answer><answer>{other}</answer>',
                '\n'.join(in_slot(domain, text) for text in (other, '5', '6', '7', gold))):
    yield 'A06', reply
  for reply in (question, question * 50, f'{question}{gold}', question.upper()):
    yield 'A10', reply
  for reply in ('Question: What is 2 + 2?\nAnswer: 4', in_slot(domain, other) + '\n(as in the example)',
                'For example, #### n where n is the number.'):
    yield 'A11', reply
  for reply in (f'<think>{right}</think> I do not know.', f'<think>{right}', f'{right}</think> I do not know.',
                f'<think>a</think>{right}</think> Hm.', f'<think>a</think> Well. <think>{right}',
                f'<think>{right}</think>\n{in_slot(domain, other)}'):
    yield 'A12', reply
  for reply in ('<think></think><answer></answer>', '<think>x</think>a', '<think></think>' * 100, '<answer></answer>' * 100, '####',
                '#### ' * 3, '\\boxed{}', '\\boxed{', '```python\n```', '```python\n', in_slot(domain, 'the final answer')):
    yield 'A13', reply
  for reply in (f'{right}\n' * 50, 'word ' * 50_000, f'{gold} ' * 10_000, in_slot(domain, other) + '\n' + 'so ' * 20_000):
    yield 'A36', reply


@pytest.fixture(scope='module')
def math_domain():
  pytest.importorskip('math_verify')
  pairs = (('Expand $(x+1)^{2}$.', 'x^2+2x+1'), ('Solve $x^2 = 5$ for positive $x$.', r'\sqrt{5}'), ('Compute $18 + 24$.', '42'),
           (r'Simplify $\frac{6}{14}$.', r'\frac{3}{7}'), ('Where is $x^2 < 4$?', '(-2,2)'), ('Find the roots of $x^2-x-6$.', '-2,3'))
  tasks = [Task(f'{question}\n', answer, ({'role': 'assistant', 'content': f'So it is \\boxed{{{answer}}}.'},), question)
           for question, answer in pairs]
  domain = Domain('test/math', 1, Collection('test/math', tasks, 0.0), MathVerifier(wall_s=1.0), chance=1 / 6)
  yield domain
  domain.verifier.close()


DOMAINS = [name for name in registry.names() if not registry.needs_path(name) and not name.startswith('planning/')] + ['test/math']


@pytest.fixture
def make_domain(request):
  return lambda name: request.getfixturevalue('math_domain') if name == 'test/math' else registry.make_domain(name)


def places(domain, per_level):
  for level in range(1, domain.source.num_levels + 1):
    size = domain.source.size('train', level)
    yield from (('train', level, index) for index in range(per_level if size is None else size))


@pytest.mark.parametrize('name', DOMAINS)
def test_no_attack_pays_and_the_solution_does(name, make_domain, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  domain = make_domain(name)
  rng = np.random.default_rng(0)
  paid, seen = [], Counter()
  slowest_s = 0.0
  for place in places(domain, 1 if domain.verifier.id == 'code' else 4):
    problem = domain.problem(*place)
    for attack, reply in attacks(domain, problem, rng):
      start = time.perf_counter()
      verdict = domain.verifier.verify(problem, reply)
      slowest_s = max(slowest_s, time.perf_counter() - start)
      seen[attack] += 1
      if verdict.score != 0:
        paid.append((attack, gold_of(problem), str(reply)[:80], verdict.score, verdict.reason))
    verdict = domain.verifier.verify(problem, domain.demonstration(*place)[-1]['content'])
    assert (verdict.score, verdict.reason) == (1, Reason.OK), (problem, verdict)
  assert not paid
  assert slowest_s < 5 and not list(tmp_path.iterdir())
  assert set(seen) >= {f'A{n:02}' for n in range(1, 20) if n not in (14, 15, 16)} | {'A36', 'A37', 'A38'}
  assert domain.verifier.id in ('code', 'values') or {'A14', 'A15', 'A16'} <= set(seen)


@pytest.mark.parametrize('name', [name for name in DOMAINS if not name.startswith('programs/')])
def test_the_best_constant_pays_no_more_than_is_declared(name, make_domain):
  domain = make_domain(name)
  problems = [domain.problem(*place) for place in places(domain, 40)]
  common = [answer for answer, _ in Counter(gold_of(problem) for problem in problems).most_common(3)]
  for constant in (*common, '0', '1', '-1', '2', '10', 'yes', 'True'):
    scores = [domain.verifier.verify(problem, in_slot(domain, constant)).score for problem in problems]
    assert np.mean(scores) <= domain.chance, constant


@pytest.mark.parametrize('name', DOMAINS)
def test_padding_earns_nothing_and_costs_nothing(name, make_domain):
  domain = make_domain(name)
  problem = domain.problem('train', 1, 0)
  right = domain.demonstration('train', 1, 0)[-1]['content']
  for reply in ('well ' * 20_000 + '\n' + right, f'<think>{"hm " * 20_000}</think>\n{right}', right + '\n' * 20_000):
    assert domain.verifier.verify(problem, reply).score == 1


@pytest.mark.parametrize('name', DOMAINS)
def test_random_text_never_raises_or_pays(name, make_domain):
  domain = make_domain(name)
  problem = domain.problem('train', 1, 0)
  rng = np.random.default_rng(1)
  for _ in range(1000 if domain.verifier.id == 'number' else 100):
    reply = bytes(rng.integers(0, 256, size=int(rng.integers(0, 60)), dtype=np.uint8)).decode('utf-8', 'surrogateescape')
    assert domain.verifier.verify(problem, reply).score == 0
    assert domain.verifier.verify(problem, in_slot(domain, reply)).score == 0
