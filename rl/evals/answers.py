"""Evaluate by generating answers to questions and comparing the final answer with the reference's.

Generation runs through the engine and the chat rendering that training uses; nothing here has its own prompt or decoding code. The final
answer is found by one pattern in both texts, the last match counts, and numbers are compared as exact decimals. A reply without a match is
wrong and counted apart, because a model that never states an answer fails in another way than one that states a wrong one.

Deliberately absent: verifiers that run or judge model text (they belong to environments).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
import re

import numpy as np

from models import chat
from models.sampling import Sampling
from models.tokenizer import Tokenizer
from rl.data.records import Example
from rl.rollout.engine import Engine, Request

# GSM8K's form; the last match counts.
NUMBER_AFTER_MARK = r'####\s*(-?[\d,]*\.?\d+)'


@dataclass(frozen=True)
class Answer:
  """One generated answer.

  Attributes:
    source: the example's.
    reply: what the model said.
    expected, stated: final answers of the reference and of the reply; None where the reply states none.
    is_correct: whether they are equal.
    stop: why the generation ended.
  """
  source: str
  reply: str
  expected: str
  stated: str | None
  is_correct: bool
  stop: str


def final_answer(text: str, pattern: str) -> str | None:
  """Return the last match of the pattern's first group, or None."""
  found = re.findall(pattern, text)
  return found[-1].strip() if found else None


def is_equal(stated: str | None, expected: str) -> bool:
  """Compare final answers: as exact decimals when both are numbers (thousands separators ignored), else as text."""
  if stated is None:
    return False
  try:
    return Decimal(stated.replace(',', '')) == Decimal(expected.replace(',', ''))
  except InvalidOperation:
    return stated == expected


def generate_answers(engine: Engine, tokenizer: Tokenizer, chat_template: str, examples: Sequence[Example], *, sampling: Sampling,
                     max_new_tokens: int, seed: int, pattern: str = NUMBER_AFTER_MARK) -> Iterator[Answer]:
  """Yield an `Answer` for each example, as they finish.

  The prompt is everything before the example's last message, which must be the assistant's and state a final answer.

  Raises:
    ValueError: an example whose reference states no answer, or a prompt that the engine refuses.
  """
  template = chat.TEMPLATES[chat_template]
  requests, expected = [], []
  for index, example in enumerate(examples):
    *prompt, reference = example.messages
    wanted = final_answer(reference['content'], pattern) if reference['role'] == 'assistant' else None
    if wanted is None:
      raise ValueError(f'{example.source}: the last message, by {reference["role"]}, states no answer that matches {pattern!r}; '
                       'choose another answer pattern or other data.')
    expected.append(wanted)
    tokens_T = chat.render(prompt, tokenizer, template, generation_prompt=True).tokens_T
    requests.append(Request(str(index), np.asarray(tokens_T, np.int32), sampling, max_new_tokens, seed + index))
  for completion in engine.generate(requests, tokenizer.stop_ids):
    index = int(completion.id)
    reply = tokenizer.decode(completion.tokens_T)
    stated = final_answer(reply, pattern)
    yield Answer(examples[index].source, reply, expected[index], stated, is_equal(stated, expected[index]), completion.stop)
