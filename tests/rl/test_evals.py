"""Statistics by hand, and final answers in text."""

import math

import numpy as np
import pytest

from envs.verifiers.numbers import NumberVerifier
from models.sampling import Sampling
from models.tokenizer import ByteTokenizer
from rl.data.records import Example
from rl.evals import answers, stats
from rl.rollout.engine import Completion


def test_wilson_by_hand():
  # 8 of 10: center (0.8 + 3.8415/20) / 1.38415 = 0.71674, half 1.96 sqrt(0.016 + 3.8415/400) / 1.38415 = 0.22655.
  estimate = stats.proportion(8, 10)
  assert estimate.value == 0.8
  assert estimate.low == pytest.approx(0.49016, abs=1e-5) and estimate.high == pytest.approx(0.94331, abs=1e-5)
  assert stats.proportion(0, 20).low == 0 and 0.1 < stats.proportion(0, 20).high < 0.2
  assert stats.proportion(20, 20).high == 1


@pytest.mark.parametrize('successes, trials', [(1, 0), (3, 2), (-1, 5)])
def test_no_proportion(successes, trials):
  with pytest.raises(ValueError, match=f'successes={successes} of trials={trials} is not a proportion'):
    stats.proportion(successes, trials)


def test_paired_difference_by_hand_and_coverage():
  # 3 gained and 1 lost of 9: 4/11 and 2/11; half 1.96 sqrt((6/11 - 4/121) / 11) = 0.42301 around 2/11.
  estimate = stats.paired_difference(3, 1, 9)
  assert estimate == pytest.approx((2 / 9, 2 / 11 - 0.42301, 2 / 11 + 0.42301), abs=1e-5)
  assert stats.paired_difference(1, 3, 9) == pytest.approx((-2 / 9, -2 / 11 - 0.42301, 0.42301 - 2 / 11), abs=1e-5)
  assert stats.paired_difference(0, 50, 50).low == -1 and stats.paired_difference(50, 0, 50).high == 1
  # Rates of 0.5 and 0.3 over problems that share their difficulty: two independent intervals would be far too wide.
  rng = np.random.default_rng(0)
  found = []
  for _ in range(1000):
    difficulty = rng.random(60)
    first, second = difficulty < 0.3, difficulty < 0.5
    found.append(stats.paired_difference(int((second & ~first).sum()), int((first & ~second).sum()), 60))
  assert 0.92 < np.mean([one.low <= 0.2 <= one.high for one in found]) < 0.99


@pytest.mark.parametrize('gained, lost, pairs', [(0, 0, 0), (3, 2, 4), (-1, 0, 4)])
def test_no_paired_difference(gained, lost, pairs):
  with pytest.raises(ValueError, match=f'gained={gained} and lost={lost} of pairs={pairs}: pairs must be positive'):
    stats.paired_difference(gained, lost, pairs)


def test_ratio_of_sums_by_hand_and_coverage():
  estimate = stats.ratio_of_sums([2.0, 6.0], [2.0, 2.0])
  # Value 2; residuals -2 and 2; error sqrt(2/1 * 8) / 4 = 1.
  assert estimate.value == 2 and estimate.high == pytest.approx(2 + stats.Z_95)
  assert stats.ratio_of_sums([1.0], [2.0]) == (0.5, -math.inf, math.inf)
  # The interval covers the truth in about 95 % of 400 samples; 90 % is 4.6 standard deviations away.
  rng = np.random.default_rng(0)
  covered = 0
  for _ in range(400):
    sizes = rng.integers(1, 60, 80)
    level = rng.normal(1.0, 0.5, 80)  # Tokens of a document share its level: a naive per-token error would be far too small.
    found = stats.ratio_of_sums(sizes * level, sizes)
    covered += found.low <= 1.0 <= found.high
  assert covered > 360


WORDS = ByteTokenizer()
REPLIES = {'so 3. #### 12\nno, #### 1,250': ('1250', True), '<think>#### 7</think>#### 1250.0': ('1250', True), 'it is 1250': (None, False),
           '#### 1251': ('1251', False), '#### 1250 or 1251': (None, False), '#### 1\n#### 2\n#### 3\n#### 1250': (None, False)}


class Parrot:
  """An engine that gives the replies in turn, the last first, as they might finish."""

  def generate(self, requests, stop_ids):
    self.prompts = [WORDS.decode(request.tokens_T) for request in requests]
    for request, reply in reversed(list(zip(requests, REPLIES, strict=True))):
      yield Completion(request.id, np.array(WORDS.encode(reply), np.int32), *[np.zeros(0)] * 3, 'stop')


def example(*messages):
  return Example(tuple({'role': role, 'content': content} for role, content in messages), 'file:3')


def test_answers_are_verified_as_in_training():
  examples = [example(('user', f'{number}?'), ('assistant', 'It is 1,250.\n#### 1,250')) for number in range(len(REPLIES))]
  engine = Parrot()
  found = list(answers.generate_answers(engine, WORDS, 'plain', examples, sampling=Sampling(), max_new_tokens=8, seed=0))
  assert {answer.reply: (answer.stated, answer.is_correct) for answer in found} == REPLIES
  assert {answer.expected for answer in found} == {'1,250'} and [answer.reply for answer in found] == list(REPLIES)[::-1]
  assert all(f'{number}?' in prompt and '1,250' not in prompt for number, prompt in enumerate(engine.prompts))
  boxed = answers.problem_of(example(('user', 'How many?'), ('assistant', r'\boxed{7}')), NumberVerifier('boxed'))
  assert boxed.answer == '7' and boxed.messages == ({'role': 'user', 'content': 'How many?'},)


@pytest.mark.parametrize('messages', [
    [('user', 'a'), ('assistant', 'it is 12')], [('user', 'a'), ('assistant', '#### many')], [('assistant', 'a'), ('user', '#### 12')]])
def test_references_without_an_answer_are_refused(messages):
  with pytest.raises(ValueError, match=f"file:3: the last message, by {messages[-1][0]}, states no number .* .mark='hashes'"):
    answers.problem_of(example(*messages), NumberVerifier())
