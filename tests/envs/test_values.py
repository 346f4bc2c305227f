"""Sets of values as final answers: all of them and nothing else, in any order."""

import pytest

from envs.core import Problem, Reason
from envs.verifiers.values import ValuesVerifier


def verify(answer, reply):
  return ValuesVerifier().verify(Problem('d/train/1/0', 'd', 1, (), answer), reply)


@pytest.mark.parametrize('reply', [
    '#### Tolima, 4821', 'So:\n####4821,  tolima.', '#### "TOLIMA", \'4821\'', '#### wrong\nNo: #### ４８２１, Tolima'])
def test_right_in_any_order_and_dress(reply):
  verdict = verify(('Tolima', '4821'), reply)
  assert (verdict.score, verdict.reason, verdict.parts) == (1, Reason.OK, {'format': 1, 'precision': 1, 'recall': 1})


@pytest.mark.parametrize('reply, reason, precision, recall', [
    ('#### Tolima', Reason.WRONG, 1, 0.5),
    ('#### Tolima, 4822', Reason.WRONG, 0.5, 0.5),
    ('#### Tolima, Tolima', Reason.WRONG, 0.5, 0.5),
    ('#### Tolima, 4821, 4822', Reason.MULTIPLE, 2 / 3, 1),
    ('#### Tolima, 4821, Tolima', Reason.MULTIPLE, 2 / 3, 1),
    ('#### Tolima and 4821', Reason.WRONG, 0, 0),
    ('#### Tolima, 4,821', Reason.MULTIPLE, 1 / 3, 0.5),
    ('#### Tolima, 4821,', Reason.BAD_FORMAT, 0, 0),
    ('#### Tolima,, 4821', Reason.BAD_FORMAT, 0, 0),
    ('Tolima, 4821', Reason.NO_ANSWER, 0, 0),
    ('<think>#### Tolima, 4821</think>', Reason.NO_ANSWER, 0, 0),
    ('#### ' + ', '.join(f'n{n}' for n in range(100)), Reason.TOO_LONG, 0, 0),
    ('#### a\n' * 4 + '#### Tolima, 4821', Reason.MULTIPLE, 0, 0),
    (None, Reason.BAD_FORMAT, 0, 0)])
def test_wrong_and_why(reply, reason, precision, recall):
  verdict = verify(('Tolima', '4821'), reply)
  assert (verdict.score, verdict.reason) == (0, reason)
  assert verdict.parts['precision'] == pytest.approx(precision) and verdict.parts['recall'] == pytest.approx(recall)


@pytest.mark.parametrize('answer', ['Tolima', (), ('',), (42,), None, ('a', ' ')])
def test_an_answer_that_is_no_set_is_the_verifiers_failure(answer):
  verdict = verify(answer, '#### Tolima')
  assert verdict.score is None and 'd/train/1/0' in verdict.detail and 'is not a list such as' in verdict.detail
