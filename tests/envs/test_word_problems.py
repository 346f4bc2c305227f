"""Word problems: exact, reproducible, as hard as asked; and GSM8K's form from a file."""

from collections import Counter
import json
import re

import pytest

from envs.core import Problem
from envs.domains import word_problems
from envs.registry import make_domain


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


def test_the_generated_domain():
  domain = word_problems.generated()
  canonical = {'train': set(), 'heldout': set()}
  for level in range(1, 6):
    for split in canonical:
      for index in range(60):
        task = domain.source.task(split, level, index)
        problem = Problem('p', domain.name, level, ({'role': 'user', 'content': task.question},), task.answer)
        assert domain.verifier.verify(problem, task.demonstration[0]['content']).score == 1
        canonical[split].add(task.canonical)
        # Numbers and operations, no words: two stories of the same calculation are one task.
        assert re.fullmatch(rf'\d+( [-+*/] \d+){{{level}}}', task.canonical)
        value = int(task.canonical.split()[0])
        for operator, number in re.findall(r'([-+*/]) (\d+)', task.canonical):
          value = {'+': value + int(number), '-': value - int(number), '*': value * int(number), '/': value // int(number)}[operator]
        assert str(value) == task.answer and task.question.endswith('?\n')
    answers = Counter(domain.source.task('heldout', level, index).answer for index in range(200))
    assert answers.most_common(1)[0][1] / 200 <= domain.chance
  assert not canonical['train'] & canonical['heldout']


def write_rows(path, rows):
  path.write_text(''.join((row if isinstance(row, str) else json.dumps(row)) + '\n' for row in rows))
  return str(path)


ROWS = [{'question': f'Tom buys {n} pens for $3 each. What does he pay?',
'answer': f'{n} pens cost {n}*3 = $<<{n}*3={3 * n}>>{3 * n}.\n#### {3 * n:,}'}
        for n in range(300, 340)]


def test_gsm8k_from_a_path(tmp_path):
  path = write_rows(tmp_path / 'train.jsonl', [*ROWS, '', {**ROWS[0], 'question': '  tom BUYS 300 pens for $3 each. What does he pay?'}])
  domain = make_domain('word_problems/gsm8k', path)
  sizes = [domain.source.size(split, 1) for split in ('train', 'heldout')]
  # The same question twice is one task.
  assert sum(sizes) == 40 and 2 <= sizes[1] <= 16
  found = set()
  for split, size in zip(('train', 'heldout'), sizes):
    for index in range(size):
      problem = domain.problem(split, 1, index)
      question, reply = domain.demonstration(split, 1, index)
      assert problem.messages == (question,) and '<<' not in reply['content']
      assert domain.verifier.verify(problem, reply['content']).score == 1
      written = ('#### ${}', '#### {} dollars', '#### {}%', '#### {} pens')
      assert [domain.verifier.verify(problem, form.format(problem.answer)).score for form in written] == [1, 1, 0, 0]
      found.add(problem.answer)
  assert found == {str(3 * n) for n in range(300, 340)} and '1017' in found
  assert word_problems.gsm8k(path, heldout_fraction=1.0).source.size('heldout', 1) == 40
  with pytest.raises(ValueError, match="has no task in split 'train'"):
    word_problems.gsm8k(path, heldout_fraction=1.0).problem('train', 1, 0)


@pytest.mark.parametrize('row, message', [
    ('{"question": ', r'train.jsonl, row 2 is not JSON'),
    ('[1]', r'row 2: expected an object with the texts "question" and "answer", got .\[1\]'),
    ({'question': 'Q?'}, 'row 2: expected an object'), ({'question': 'Q?', 'answer': 3}, 'row 2: expected an object'),
    ({'question': 'Q?', 'answer': 'It is 3.'}, r'row 2: the answer must end in "#### " and a number such as 42 or 1,234.5, got'),
    ({'question': 'Q?', 'answer': '#### three'}, 'row 2: the answer must end in'),
    ({'question': 'Q?', 'answer': '#### 3 #### 4 or 5'}, 'row 2: the answer must end'),
])
def test_a_row_that_is_wrong_is_named(tmp_path, row, message):
  path = write_rows(tmp_path / 'train.jsonl', [ROWS[0], row])
  with pytest.raises(ValueError, match=message):
    word_problems.gsm8k(path)


def test_a_file_that_is_missing_or_empty(tmp_path):
  with pytest.raises(FileNotFoundError):
    word_problems.gsm8k(str(tmp_path / 'none.jsonl'))
  with pytest.raises(ValueError, match='empty.jsonl has no rows'):
    word_problems.gsm8k(write_rows(tmp_path / 'empty.jsonl', ['']))
  with pytest.raises(ValueError, match='needs the path of its data file'):
    make_domain('word_problems/gsm8k')
