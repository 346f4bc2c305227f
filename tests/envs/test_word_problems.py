"""Generated word problems: exact, reproducible, and as hard as asked."""

import re

import pytest

from envs.domains import word_problems


def test_equal_seeds_give_equal_problems_and_other_seeds_others():
  first = list(word_problems.word_problems(3, 50))
  assert first == list(word_problems.word_problems(3, 50))
  assert not {p.question for p in first} & {p.question for p in word_problems.word_problems(4, 50)}
  assert len({p.question for p in first}) == 50


def test_the_worked_steps_are_true_and_lead_to_the_answer():
  for problem in word_problems.word_problems(0, 300):
    *steps, last = re.split(r'\. |\.\n', problem.answer)
    assert last == f'#### {problem.value}'
    value = int(re.search(r'has (\d+) ', problem.question).group(1))
    for step in steps:
      left, operator, right, result = re.fullmatch(r'(\d+) ([-+*/]) (\d+) = (\d+)', step).groups()
      assert int(left) == value
      value = {'+': value + int(right), '-': value - int(right), '*': value * int(right), '/': value / int(right)}[operator]
      assert value == int(result) >= 0
      assert right in problem.question
    assert value == problem.value


def test_dial():
  assert len(word_problems.word_problem(0, 5).answer.split(' = ')) == 6
  with pytest.raises(ValueError, match='num_steps=0 must be at least 1'):
    word_problems.word_problem(0, 0)
