"""Letters in order: what is paid, and the contract of domains."""

import pytest

from envs import checker, registry
from envs.core import Reason


@pytest.fixture(scope='module')
def domain():
  return registry.make_domain('envs/domains/letters:ordered')


def test_contract(domain):
  checker.check(domain, num_problems=40)
  assert domain.name == 'letters/ordered'


@pytest.mark.parametrize('reply, score', [
    ('abc', 1), ('xyz', 1), ('', 0), ('aac', 1), ('zzz', 1), ('abA', 2 / 3), ('ab', 2 / 3), ('abcd', 3 / 4), ('abcdef', 3 / 6), ('cba', 1 / 3),
    (' abc', 0), ('a\u00e9z', 1 / 3), ('ab\n', 2 / 3)])
def test_pay(domain, reply, score):
  problem = domain.problem('train', 2, 0)
  assert problem.answer == 3 and problem.messages[0]['content'].endswith(': 3?')
  verdict = domain.verifier.verify(problem, reply)
  assert verdict.score == pytest.approx(score) and verdict.reason == (Reason.OK if score == 1 else Reason.WRONG)


def test_levels_are_lengths(domain):
  for level in range(1, domain.source.num_levels + 1):
    task = domain.source.task('heldout', level, 5)
    assert len(task.demonstration[0]['content']) == task.answer == level + 1
