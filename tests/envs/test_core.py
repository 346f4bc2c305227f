"""The records of environments: outcomes, verdicts, generated and collected tasks, and their splits."""

from dataclasses import FrozenInstanceError
import os
from pathlib import Path
import subprocess
import sys

import pytest

from envs.core import Collection, Domain, Generated, Outcome, Problem, Reason, Task, Verdict, split_of
from tests.envs import toy


def task(n):
  return Task(f'q{n}', str(n), ({'role': 'assistant', 'content': str(n)},), f'c{n}')


def test_outcomes_are_graded_or_masked():
  assert {outcome.value for outcome in Outcome if outcome.is_valid} == {'ok', 'length', 'turns', 'timeout'}
  assert {outcome.value for outcome in Outcome if not outcome.is_valid} == {'env_error', 'verifier_error', 'judge_error', 'cancelled'}


def test_a_verdict_is_invalid_exactly_when_its_verifier_failed():
  assert Verdict(0.0, Reason.WRONG).is_valid and Verdict(1.0, Reason.OK).is_valid and not Verdict(None, Reason.VERIFIER_ERROR).is_valid
  for score, reason in ((None, Reason.WRONG), (0.0, Reason.VERIFIER_ERROR)):
    with pytest.raises(ValueError, match='None exactly when the verifier failed'):
      Verdict(score, reason)


@pytest.mark.parametrize('score', [-0.1, 1.5, float('nan'), float('inf')])
def test_a_score_is_from_0_to_1(score):
  with pytest.raises(ValueError, match='must be a number from 0 to 1'):
    Verdict(score, Reason.OK)


def test_records_are_frozen():
  verdict, problem = Verdict(0.0, Reason.WRONG), toy.sums().problem('train', 1, 0)
  with pytest.raises(FrozenInstanceError):
    verdict.score = 1.0
  with pytest.raises(FrozenInstanceError):
    problem.answer = '1'


def test_generated_tasks_are_pure_and_split_by_hash():
  source = Generated('toy/sums', 1, toy.make_sum, 2)
  canonicals = {}
  for split in ('train', 'heldout'):
    tasks = [source.task(split, level, index) for level in (1, 2) for index in range(50)]
    assert tasks == [source.task(split, level, index) for level in (1, 2) for index in range(50)]
    canonicals[split] = {made.canonical for made in tasks}
    assert len(canonicals[split]) == 100 and all(split_of(canonical, 0.2) == split for canonical in canonicals[split])
    assert source.size(split, 1) is None
  assert not canonicals['train'] & canonicals['heldout']
  # Neighbors share nothing, and another name or version is another sequence.
  assert Generated('toy/sums', 2, toy.make_sum, 2).task('train', 1, 0) != source.task('train', 1, 0)
  assert Generated('toy/other', 1, toy.make_sum, 2).task('train', 1, 0) != source.task('train', 1, 0)


def test_tasks_do_not_depend_on_the_process():
  code = 'from tests.envs import toy; print(toy.sums().problem("heldout", 2, 3))'
  root = Path(__file__).resolve().parents[2]
  printed = []
  for seed in ('1', '2'):
    environment = {**os.environ, 'PYTHONHASHSEED': seed}
    done = subprocess.run([sys.executable, '-c', code], cwd=root, env=environment, capture_output=True, text=True, check=True)
    printed.append(done.stdout.strip())
  assert printed == [str(toy.sums().problem('heldout', 2, 3))] * 2


def test_a_generator_with_too_few_tasks_says_so():
  source = Generated('toy/one', 1, lambda rng, level: task(1), 1)
  split = split_of('c1', 0.2)
  assert source.task(split, 1, 0) == source.task(split, 1, 5) == task(1)
  with pytest.raises(RuntimeError, match='toy/one level 1: 1000 draws gave no task'):
    source.task('train' if split == 'heldout' else 'heldout', 1, 0)


@pytest.mark.parametrize('source', [Generated('toy/sums', 1, toy.make_sum, 2), Collection('toy/c', map(task, range(9)), 0.5)])
@pytest.mark.parametrize('place,message', [
    (('test', 1, 0), "split='test' must be train or heldout"), (('train', 0, 0), 'level=0, index=0: levels are'),
    (('train', 3, 0), 'level=3, index=0: levels are'), (('train', 1, -1), 'indices start at 0')])
def test_places_that_are_not_there(source, place, message):
  with pytest.raises(ValueError, match=message):
    source.task(*place)


def test_a_collection_is_split_by_hash_without_twins_and_starts_over():
  source = Collection('toy/c', [*map(task, range(100)), *map(task, range(100))], 0.2)
  sizes = {split: source.size(split, 1) for split in ('train', 'heldout')}
  assert sum(sizes.values()) == 100 and 5 < sizes['heldout'] < 40
  tasks = {split: [source.task(split, 1, index) for index in range(size)] for split, size in sizes.items()}
  assert len({made.canonical for split in tasks.values() for made in split}) == 100
  assert source.task('heldout', 1, sizes['heldout'] + 2) == tasks['heldout'][2]
  # A task keeps its split when others come and go.
  fewer = Collection('toy/c', map(task, range(50)), 0.2)
  assert all(split_of(fewer.task('heldout', 1, i).canonical, 0.2) == 'heldout' for i in range(fewer.size('heldout', 1)))
  whole = Collection('toy/c', map(task, range(5)), 1.0)
  assert (whole.size('train', 1), whole.size('heldout', 1)) == (0, 5)
  with pytest.raises(ValueError, match="no task in split 'train'; choose another heldout_fraction"):
    whole.task('train', 1, 0)


def test_the_heldout_fraction_is_kept():
  share = sum(split_of(f'task {i}', 0.2) == 'heldout' for i in range(5000)) / 5000
  assert abs(share - 0.2) < 0.025  # more than four standard deviations
  assert {split_of(str(i), 0.0) for i in range(100)} == {'train'} and {split_of(str(i), 1.0) for i in range(100)} == {'heldout'}


def test_a_domain_tells_problems_and_demonstrations():
  domain = Domain('toy/sums', 1, Generated('toy/sums', 1, toy.make_sum, 2), toy.TextVerifier())
  made = domain.source.task('heldout', 2, 4)
  question = {'role': 'user', 'content': made.question}
  assert domain.problem('heldout', 2, 4) == Problem('toy/sums/heldout/2/4', 'toy/sums', 2, (question,), made.answer)
  assert domain.demonstration('heldout', 2, 4) == (question, {'role': 'assistant', 'content': f'#### {made.answer}'})
  assert domain.make_tools() == () and domain.max_turns == 1
