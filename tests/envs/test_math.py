"""Answers in LaTeX: a table of what is equal and what is not, hostile expressions, and faults of the worker."""

from concurrent.futures import ThreadPoolExecutor
import importlib.util
import os
from pathlib import Path
import signal
import time

import pytest

from envs.core import Problem, Reason
from envs.verifiers.math import MathVerifier
from envs.workers import WorkerPool

pytest.importorskip('math_verify')

# Expected, stated. Decided in this process.
EQUAL_CHEAPLY = [
    ('42', '42'), ('42', '42.'), ('1{,}234', '1,234'), (r'11,\! 111', '11111'), ('18.00', '18'), ('1,234.5', '1234.5'),
    ('0.00001', '10^{-5}'), (r'\frac12', '0.5'), (r'\dfrac{1}{2}', '1/2'), (r'-\frac{3}{7}', r'\frac{-3}{7}'), ('3', r'\frac{6}{2}'),
    ('2^{10}', '1024'), (r'\frac{1}{1+\frac{1}{2}}', r'\tfrac{2}{3}'), ('6', r'2 \cdot 3'), ('x=5', '5'), ('5', 'x = 5'),
    ('18', r'18\text{ dollars}'), ('18', '18 dollars'), ('18', r'\$18'), ('18', '$18$'), ('18', '$18'), ('18', r'\(18\)'),
    (r'10\text{ cm}^2', '10'), (r'10\text{ cm}', '10 cm'), (r'90^\circ', '90'), (r'50\%', '0.5'), (r'50\%', r'50 \text{ percent}'),
    (r'50\%', '50%'), (r'\text{(A)}', 'A'), (r'\text{Evelyn}', 'Evelyn'), (r'\text{even}', r'\mathrm{Even}'), ('A', r'\text{A}'),
    ('６', '6'), (r'5 \text{ or } 6', '5,6'), (r'(-\infty,3]', r'\left(-\infty, 3\right]'), (r'12\pi', r'12 \pi'),
]
EQUAL_SYMBOLICALLY = [
    ('1,2,3', '3,2,1'), (r'\{1,2,3\}', '3, 1, 2'), (r'\frac{1}{\sqrt{2}}', r'\frac{\sqrt{2}}{2}'),
    (r'\sqrt{\frac1n}', r'\frac{1}{\sqrt n}'), (r'3\sqrt{13}', r'\sqrt{117}'), (r'\sqrt{2}', '2^{1/2}'), ('x^2-1', '(x-1)(x+1)'),
    ('e^{x}', r'\exp(x)'), (r'2\frac12', r'\frac52'), (r'2.5\pi', r'\frac{5\pi}{2}'), (r'x \in [-2,7]', '[-2,7]'), ('y=2x+3', '2x+3'),
    ('y=2x+3', 'y-3=2x'), ('f(x)=x+1', '1+x'), (r'5\pm 2', '7,3'), ('-2,2', r'\pm 2'), (r'\left(\frac{1}{2},3\right)', '(0.5,3)'),
    (r'x \le 3', r'3 \ge x'), ('4210_{5}', '4210_5'), (r'\binom{5}{2}', '10'),
    (r'\begin{pmatrix}1\\2\end{pmatrix}', r'\begin{pmatrix} 1 \\ 2 \end{pmatrix}'), ('|x|', r'\sqrt{x^2}'), (r'\infty', r'+\infty'),
]
UNEQUAL_CHEAPLY = [
    # Subsets, orders and brackets.
    ('1,2,3', '1,2'), ('1,2', '1,2,3'), (r'\{1,2,3\}', r'\{1,2\}'), ('(1,2)', '1,2'), ('(1,2)', '[1,2]'), ('(1,2]', '(1,2)'),
    ('5', '5,6'), ('5', '5 or 6'), ('5', r'5\text{ or }6'), ('6', '5=6'), ('6', '6=5'),
    # Roundings, tiny values, percentages, units, scales, bases.
    (r'\frac13', '0.333333'), ('0', '10^{-7}'), ('0.00001', '0'), ('18', r'18\%'), (r'50\%', '50'), ('0.5', '50'),
    (r'5 \text{ cm}', r'5 \text{ m}'), ('4210_5', '4210'), ('42', '420'), ('42', '142'), ('42', '-42'), ('11', '711'), ('11', '0.11'),
    ('42', '4 2'), (r'\frac{1}{23}', r'\frac{12}{3}'),
    # Words.
    ('even', 'neve'), (r'\text{Evelyn}', r'\text{Eve}'), ('7', r'\text{7 or 8}'), ('(A)', 'A,B'),
]
UNEQUAL_SYMBOLICALLY = [
    ('(1,2)', '(2,1)'), ('1', 'x/x'), (r'\frac{x}{x}', '1'), (r'\sqrt2', '1.414214'), (r'2\pi', '6.283185'),
    (r'\frac{\pi}{10^{8}}', r'\frac{\pi}{10^{9}}'), ('0', r'10^{-30}\pi'), ('x+1', 'y+1'), ('A', 'B'), ('x^2', 'x^{2.0000001}'),
    (r'\sqrt{x^2}', 'x'), (r'\infty', r'-\infty'), ('42', 'nan'), ('18', '18 million'), ('18', '18 not'),
    (r'\frac{\pi}{7}', r'the answer is surely \frac{\pi}{7} I say'), ('1', r'\text{eval}(1)'), (r'\frac{\pi}{2}', r'\frac{\pi}{3}'),
    (r'(-\infty,3]', r'(-\infty,4]'),
]


@pytest.fixture(scope='module')
def verifier():
  made = MathVerifier()
  yield made
  made.close()


def problem(answer, question='What is it?\n'):
  return Problem('p', 'd', 1, ({'role': 'user', 'content': question},), answer)


def score(verifier, expected, stated, question='What is it?\n'):
  return verifier.verify(problem(expected, question), f'So it is \\boxed{{{stated}}}.').score


def test_the_table_of_equal_answers(verifier):
  wrong = [pair for pair in EQUAL_CHEAPLY + EQUAL_SYMBOLICALLY if score(verifier, *pair) != 1]
  assert not wrong
  # Where both are numbers, expressions or sets the relation has no direction.
  assert [pair for pair in EQUAL_SYMBOLICALLY if score(verifier, *pair[::-1]) != 1] == []


def test_the_table_of_unequal_answers(verifier):
  wrong = [pair for pair in UNEQUAL_CHEAPLY + UNEQUAL_SYMBOLICALLY if score(verifier, *pair) != 0]
  assert not wrong


def test_the_cheap_rungs_start_no_worker():
  lazy = MathVerifier(symbolic=False)
  assert [pair for pair in EQUAL_CHEAPLY if score(lazy, *pair) != 1] == []
  assert [pair for pair in UNEQUAL_CHEAPLY + UNEQUAL_SYMBOLICALLY if score(lazy, *pair) != 0] == []
  # Without algebra what is not a number is compared as text.
  assert score(lazy, 'x+1', '1+x') == 0
  start = time.perf_counter()
  for _ in range(1000):
    score(lazy, '42', '43')
  assert time.perf_counter() - start < 2
  lazy.close()


@pytest.mark.parametrize('reply, reason', [
    (r'\boxed{x+1} or \boxed{x+2}', Reason.WRONG), (r'\boxed{x+1', Reason.TRUNCATED), (r'\boxed{x+1} and \boxed{x+1', Reason.TRUNCATED),
    ('x+1', Reason.NO_ANSWER), ('', Reason.NO_ANSWER), (r'<think>\boxed{x+1}</think> Hm.', Reason.NO_ANSWER),
    (r'\boxed{}', Reason.NO_ANSWER), (r'\boxed{1}\boxed{2}\boxed{3}\boxed{x+1}', Reason.MULTIPLE),
    (r'\boxed{x+1' + ' word' * 1000 + '}', Reason.TOO_LONG), (None, Reason.BAD_FORMAT), (['x+1'], Reason.BAD_FORMAT),
    ('#### x+2', Reason.WRONG), (r'#### x+1 so \boxed{x+2}', Reason.WRONG),
])
def test_replies_that_state_no_right_answer(verifier, reply, reason):
  found = verifier.verify(problem('x+1'), reply)
  assert (found.score, found.reason) == (0, reason)


@pytest.mark.parametrize('reply', [r'\boxed{x+1}', r'\boxed{x+2}, no: \boxed{1 + x}', '#### x+1', r'<think>\boxed{2}</think>\boxed{x+1}',
                                   r'#### 2 \boxed{x+1}'])
def test_the_last_answer_counts(verifier, reply):
  assert verifier.verify(problem('x+1'), reply).score == 1


def test_an_expression_copied_out_of_the_question_is_no_answer(verifier):
  question = 'Expand $\\left(x+1\\right)^{2}$. Choose (A) or (B).\n'
  assert score(verifier, 'x^2+2x+1', '(x+1)^2', question) == 0
  assert score(verifier, 'x^2+2x+1', '(1+x)^2', question) == 1
  assert score(verifier, '(x+1)^2', '(x + 1)^2', question) == 1
  assert score(verifier, r'\text{(A)}', 'A', question) == score(verifier, 'A', '(A)', question) == 1
  assert score(verifier, '1024', '2^{10}', 'Compute $2^{10}$.\n') == 0
  assert score(verifier, '1024', '1024', 'Is $2^{10}$ equal to 1024?\n') == 1


def test_hostile_expressions_end_in_time_and_the_next_is_scored(tmp_path):
  verifier = MathVerifier(wall_s=1.0)
  assert score(verifier, 'x+1', '1+x') == 1
  bombs = ['9^{9^{9^{9}}}', '10^{10^{10}}', '99999999!', '(' * 500 + '1' + ')' * 500, '(' * 450 + '1' + ')' * 450, '1' * 20_000,
           '+'.join(f'x^{{{n}}}' for n in range(400)), r'\frac{' * 100 + '1' + '}{2}' * 100, r'\sqrt{' * 100 + '2' + '}' * 100,
           r'\sum_{n=1}^{10^{12}} \sin(n!)', 'a' * 900, ' ' * 900 + 'x', 'x,' * 400]
  for bomb in bombs:
    start = time.perf_counter()
    found = verifier.verify(problem('7'), f'\\boxed{{{bomb}}}')
    assert found.score == 0 and found.reason in (Reason.WRONG, Reason.TOO_LONG, Reason.TIMEOUT), bomb[:40]
    assert time.perf_counter() - start < 3, bomb[:40]
  assert verifier.verify(problem('7'), r'\boxed{9^{9^{9^{9}}}}').reason == Reason.TIMEOUT
  assert score(verifier, 'x+1', '1+x') == 1
  marker = tmp_path / 'ran'
  for code in (f'__import__("os").system("touch {marker}")', f'open("{marker}", "w")', f'[open("{marker}", "w") for _ in [1]]', 'True+6',
               'len("xxxxxxx")'):
    assert score(verifier, '7', code) == 0
  assert not marker.exists()
  verifier.close()


def test_threads_share_the_verifier(verifier):
  with ThreadPoolExecutor(4) as threads:
    scores = list(threads.map(lambda n: score(verifier, f'x+{n}', f'{n}+x' if n % 2 else f'x+{n + 1}'), range(1, 21)))
  assert scores == [1.0, 0.0] * 10


def test_a_worker_that_fails_is_never_a_score(verifier, monkeypatch):
  broken = MathVerifier()
  broken.close()
  monkeypatch.setattr(broken, '_pool', WorkerPool('envs.verifiers.math_worker:missing'))
  found = broken.verify(problem('x+1'), r'\boxed{1+x}')
  assert found.score is None and found.reason == Reason.VERIFIER_ERROR and 'missing' in found.detail
  # Numbers need no worker.
  assert broken.verify(problem('7'), r'\boxed{7}').score == 1
  broken.close()
  # A worker that is killed between calls is replaced.
  score(verifier, 'x+1', '1+x')
  workers = [pid for task in Path('/proc/self/task').iterdir() for pid in (task / 'children').read_text().split()
             if 'math_worker' in Path(f'/proc/{pid}/cmdline').read_text()]
  for pid in workers:
    os.kill(int(pid), signal.SIGKILL)
  assert workers and score(verifier, 'x+1', '1+x') == 1


def test_bad_answers_of_ours_and_a_missing_library(monkeypatch, verifier):
  for answer in (None, 7, '', ' ', ['7']):
    found = verifier.verify(problem(answer), r'\boxed{7}')
    assert found.score is None and 'is not LaTeX text' in found.detail
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(RuntimeError, match='needs math-verify, which is not installed: `pip install math-verify`, or choose symbolic=False'):
    MathVerifier()
  assert score(MathVerifier(symbolic=False), '7', '7') == 1
