"""Arithmetic domains: true, exact, as hard as asked, and the same in every process."""

from collections import Counter
from fractions import Fraction
import json
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

from envs.domains import arithmetic
from envs.tool_calls import parse
from envs.verifiers.numbers import evaluate

LEVELS = range(1, 6)
MAKERS = (arithmetic.integers, arithmetic.rationals, arithmetic.with_python)
domains = pytest.mark.parametrize('domain', [make() for make in MAKERS], ids=lambda domain: domain.name)


def tasks(domain, count=60, splits=('train', 'heldout')):
  return [(level, domain.source.task(split, level, index)) for level in LEVELS for split in splits for index in range(count)]


def value_of(text):
  """Evaluate what a question shows, by the rules of school: fractions bind first."""
  return evaluate(re.sub(r'\d+/\d+', r'(\g<0>)', text).replace('÷', '/'))


@domains
def test_the_demonstration_scores_one_and_the_answer_is_not_in_the_question(domain):
  for level, task in tasks(domain):
    reply = task.demonstration[-1]['content']
    problem = domain.problem('train', level, 0)
    assert domain.verifier.verify(type(problem)('p', 'd', 1, problem.messages, task.answer), reply).score == 1
    assert reply.endswith(f'#### {task.answer}') and '####' not in task.question
    assert task.question.endswith('\n') and task.question.count('\n') == 1


@pytest.mark.parametrize('make, operators', [(arithmetic.integers, '+-*'), (arithmetic.rationals, '+-*÷')])
def test_expressions_have_the_value_that_is_asked_for_by_true_steps(make, operators):
  domain = make()
  counts = Counter()
  for level, task in tasks(domain):
    assert task.canonical in task.question
    assert value_of(task.canonical) == Fraction(task.answer)
    *steps, last = re.split(r'\. |\.\n', task.demonstration[0]['content'])
    for step in steps:
      left, right = step.split(' = ')
      assert value_of(left) == value_of(right)
    assert last == f'#### {task.answer}' and steps[-1].endswith(f'= {task.answer}')
    counts[level, len(steps)] += 1
    assert len(re.findall(rf' [{re.escape(operators)}] ', task.canonical)) == len(steps)
    assert make is arithmetic.rationals or '/' not in task.question
  per_level = {'arithmetic/integers': (1, 2, 2, 3, 4), 'arithmetic/rationals': (1, 1, 2, 2, 3)}[domain.name]
  assert counts == dict.fromkeys(zip(LEVELS, per_level), 120)


def test_brackets_are_written_where_they_are_needed_only():
  write = arithmetic._write
  one, two, three = Fraction(1), Fraction(2), Fraction(3)
  assert write(('-', one, ('+', two, three))) == '1 - (2 + 3)'
  assert write(('+', ('-', one, two), three)) == '1 - 2 + 3'
  assert write(('*', ('+', one, two), three)) == '(1 + 2) * 3'
  assert write(('+', ('*', one, two), three)) == '1 * 2 + 3'
  assert write(('÷', one, ('*', two, three))) == '1 ÷ (2 * 3)'
  assert write(('-', Fraction(-1, 2), Fraction(-3))) == '(-1/2) - (-3)'
  assert not any('(' in task.question for level, task in tasks(arithmetic.integers()) if level <= 2)
  assert any('(' in task.question for level, task in tasks(arithmetic.integers()) if level == 3)


PHRASES = {'add': '+', 'increase it by': '+', 'subtract': '-', 'decrease it by': '-', 'multiply by': '*', 'multiply it by': '*',
           'divide by': '//', 'divide it by': '//'}


def test_told_calculations_say_what_the_code_does():
  seen = Counter()
  for level, task in tasks(arithmetic.with_python()):
    start, *steps = re.findall(r'(?:^|[.,] (?:then )?)([A-Z]?[a-z ]+) (\d+)', task.question)
    value = int(start[1])
    for phrase, number in steps:
      operator = PHRASES[phrase.lower()]
      seen[operator] += 1
      value, rest = {'+': (value + int(number), 0), '-': (value - int(number), 0), '*': (value * int(number), 0),
                     '//': divmod(value, int(number))}[operator]
      assert rest == 0 and value >= 100
    assert len(steps) == level and str(value) == task.answer
    call, result, reply = task.demonstration
    parsed = parse(call['content'])
    assert not parsed.errors and not parsed.content and len(parsed.calls) == 1 and parsed.calls[0].name == 'python'
    code = parsed.calls[0].arguments['code']
    assert evaluate(re.fullmatch(r'print\((.*)\)', code)[1].replace('//', '/')) == value
    assert result == {'role': 'tool', 'name': 'python', 'content': task.answer} and reply['content'] == f'#### {task.answer}'
  assert set(seen) == set('+-*') | {'//'} and min(seen.values()) > 100


def test_short_prompts():
  for level, task in tasks(arithmetic.with_python()):
    assert level > 3 or len(task.question) < 120
  assert max(len(task.question) for _, task in tasks(arithmetic.integers())) < 75


@domains
def test_splits_are_apart_and_constants_do_not_pay(domain):
  by_split = {split: {task.canonical for _, task in tasks(domain, 100, [split])} for split in ('train', 'heldout')}
  assert not by_split['train'] & by_split['heldout']
  for level in LEVELS:
    answers = Counter(domain.source.task('heldout', level, index).answer for index in range(200))
    assert answers.most_common(1)[0][1] / 200 <= domain.chance
  assert domain.source.size('train', 1) is None and domain.source.num_levels == 5
  with pytest.raises(ValueError, match='level=6, index=0: levels are 1 to 5'):
    domain.problem('train', 6, 0)


def test_other_processes_make_the_same_problems():
  code = ('import json; from envs.registry import make_domain\n'
          'names = ("arithmetic/integers", "arithmetic/rationals", "arithmetic/python", "word_problems/generated")\n'
          'print(json.dumps([make_domain(name).problem("heldout", level, 7).messages[0]["content"] for name in names\n'
          '                  for level in range(1, 6)]))')
  found = []
  for seed in ('1', '2'):
    done = subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).parents[2], env={**os.environ, 'PYTHONHASHSEED': seed},
                          capture_output=True, text=True, check=True)
    found.append(json.loads(done.stdout))
  assert found[0] == found[1] and len(set(found[0])) == 20
  assert found[0][:5] == [arithmetic.integers().problem('heldout', level, 7).messages[0]['content'] for level in LEVELS]


def test_the_python_domain_declares_its_sandbox_and_its_turns():
  domain = arithmetic.with_python()
  assert domain.needs_sandbox and domain.max_turns == 3
  assert not arithmetic.integers().needs_sandbox and arithmetic.integers().max_turns == 1
  tools = domain.make_tools()
  assert [tool.name for tool in tools] == ['python']
  for tool in tools:
    tool.close()
