"""Evaluate by generating answers to questions and verifying the number that each states against the reference's.

Generation runs through the engine and the chat rendering that training uses, and what counts as a right answer is the verifier's that pays in
training; nothing here has its own prompt, decoding or reading of answers. A reply that states no number is wrong and counted apart, because a
model that never states an answer fails in another way than one that states a wrong one.

Deliberately absent: answers that are not one number (environments have verifiers for them, and `runner` tries their problems).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from envs.core import Problem
from envs.verifiers.numbers import NumberVerifier, answer_slot
from models import chat
from models.sampling import Sampling
from models.tokenizer import Tokenizer
from rl.data.records import Example
from rl.rollout.engine import Engine, Request


@dataclass(frozen=True)
class Answer:
  """One generated answer.

  Attributes:
    source: the example's.
    reply: what the model said.
    expected, stated: numbers of the reference and of the reply; None where the reply states none.
    is_correct: the verifier's verdict.
    stop: why the generation ended.
  """
  source: str
  reply: str
  expected: str
  stated: str | None
  is_correct: bool
  stop: str


def problem_of(example: Example, verifier: NumberVerifier) -> Problem:
  """Return what an example asks, and the number that its last message states.

  Raises:
    ValueError: the last message is not the assistant's, or the verifier does not take it for a right answer to itself.
  """
  *prompt, reference = example.messages
  stated, _ = answer_slot(reference['content'], verifier.mark)
  problem = Problem(example.source, 'data', 1, tuple(prompt), stated)
  if reference['role'] != 'assistant' or verifier.verify(problem, reference['content']).score != 1:
    raise ValueError(f'{example.source}: the last message, by {reference["role"]}, states no number as the verifier reads it (mark='
                     f'{verifier.mark!r}: after "####", or in "\\boxed{{}}"); choose another mark or other data.')
  return problem


def generate_answers(engine: Engine, tokenizer: Tokenizer, chat_template: str, examples: Sequence[Example], *, sampling: Sampling,
                     max_new_tokens: int, seed: int, verifier: NumberVerifier = NumberVerifier()) -> Iterator[Answer]:
  """Yield an `Answer` for each example, as they finish.

  The prompt is everything before the example's last message.

  Raises:
    ValueError: as `problem_of`, before anything is generated; a prompt that the engine refuses.
  """
  template = chat.TEMPLATES[chat_template]
  problems = [problem_of(example, verifier) for example in examples]
  requests = []
  for index, problem in enumerate(problems):
    tokens_T = chat.render(problem.messages, tokenizer, template, generation_prompt=True).tokens_T
    requests.append(Request(str(index), np.asarray(tokens_T, np.int32), sampling, max_new_tokens, seed + index))
  for completion in engine.generate(requests, tokenizer.stop_ids):
    problem, reply = problems[int(completion.id)], tokenizer.decode(completion.tokens_T)
    verdict = verifier.verify(problem, reply)
    yield Answer(problem.id, reply, problem.answer, verdict.parsed, verdict.score == 1, completion.stop)
