"""Comparisons into batches: the texts of a row of preference data side by side, and steps of them at a position that is one integer.

The two texts of a pair are neighbors in one row of a batch, the chosen one first. As for documents (`rl.data.loader`), the position counts
rows of the endless stream, a step takes comparisons in order until one fits nowhere, and every host plans the whole step and lays out only
its own rows.

A text ends with its last learned token, where a reward model reads it: what a template writes after a reply is not there when a sampled
reply is scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from models import chat
from models.tokenizer import Tokenizer
from rl import batching
from rl.data.preferences import Comparison, Preferences
from rl.data.records import Message
from rl.types import Batch, Document

MAX_DROPPED_IN_A_ROW = 10_000


@dataclass(frozen=True)
class Texts:
  """One comparison after encoding.

  Attributes:
    row: its number in the data.
    documents: (chosen, rejected), or the only text.
    preferences: of each document, for each dimension: see `Batch.preferences`.
    weight: as in `Comparison`.
    mismatched: the prompt with a reply to another one, for KTO's reference point.
  """
  row: int
  documents: tuple[Document, ...]
  preferences: tuple[tuple[float, ...], ...]
  weight: float
  mismatched: Document | None = None

  @property
  def num_tokens(self) -> int:
    return sum(len(document.tokens_T) for document in self.documents)

  @property
  def all_documents(self) -> tuple[Document, ...]:
    """What a reference has to score."""
    return self.documents if self.mismatched is None else (*self.documents, self.mismatched)


@dataclass(frozen=True)
class Plan:
  """The comparisons of a step, not yet laid out.

  Attributes:
    texts: in order.
    assignment: the indices of the comparisons in each row.
    position: rows of the stream consumed since its start.
    num_dropped: of these, in this step, what was too long or had equal texts.
  """
  texts: tuple[Texts, ...]
  assignment: list[list[int]]
  position: int
  num_dropped: int


@dataclass(frozen=True)
class Step:
  """What one optimizer step learns from.

  Attributes:
    batches: this host's rows of each micro-batch, numpy.
    mismatched: likewise of the prompts with other replies; empty unless asked for.
    documents: position after the step.
    num_comparisons, num_tokens, num_dropped: of the step, over all hosts.
  """
  batches: tuple[Batch, ...]
  mismatched: tuple[Batch, ...]
  documents: int
  num_comparisons: int
  num_tokens: int
  num_dropped: int


@dataclass(frozen=True)
class Encoder:
  """Turns rows of preference data into texts.

  Attributes:
    length: tokens that the texts of a row of data may have together, which is what a row of a batch holds.
    overlong: 'drop' or 'error' where they have more.
    singly: texts are learned from one by one (KTO): each says whether it is desirable, and each prompt also gets a reply to another one.
  """
  data: Preferences
  tokenizer: Tokenizer
  template: chat.Template
  length: int
  overlong: str
  singly: bool = False

  def __call__(self, row: int) -> Texts | None:
    """Return the texts of a row, or None if they are too long together, or equal.

    Raises:
      ValueError: too long under overlong='error', or a conversation that the template cannot write; the message names the row.
    """
    item = self.data[row]
    documents = tuple(self._document(item, reply) for reply in item.replies)
    size = sum(len(document.tokens_T) for document in documents)
    if size > self.length:
      if self.overlong == 'error':
        raise ValueError(f'{item.source}: its texts have {size} tokens, a row holds length={self.length}; raise data.length, or choose '
                         "data.overlong='drop'.")
      return None
    if len(documents) == 2 and np.array_equal(documents[0].tokens_T, documents[1].tokens_T):
      return None  # Different texts, but the same once the template has trimmed them.
    if not self.singly:
      return Texts(row, documents, (item.preferences,) * 2, item.weight)
    labels = ((1.0,), (-1.0,)) if len(documents) == 2 else (item.preferences,)
    return Texts(row, documents, labels, item.weight, self._mismatched(row, item))

  def _document(self, item: Comparison, reply: Sequence[Message]) -> Document:
    return document((*item.prompt, *reply), len(item.prompt), self.tokenizer, self.template, item.source)

  def _mismatched(self, row: int, item: Comparison) -> Document:
    other = self.data.other_prompts[row]
    if other < 0:
      raise ValueError(f'{item.source}: KTO compares with replies to other prompts, and all rows of its split have one prompt; add others, or '
                       'use a loss of pairs.')
    replies = self.data[other].replies
    # Desirable and undesirable ones alike: a reference point that follows the desirable ones would hide that they are learned.
    found = self._document(item, replies[other % len(replies)])
    # Cut to what a row holds: the prompt fits with a reply of its own, so at least one token is learned.
    return Document(found.tokens_T[:self.length], found.loss_mask_T[:self.length], f'{item.source} (other reply)')


def document(messages: Sequence[Message], num_prompt: int, tokenizer: Tokenizer, template: chat.Template, source: str) -> Document:
  """Return a conversation up to its last learned token; what the assistant says after the first `num_prompt` messages is learned.

  Raises:
    ValueError: a conversation that the template cannot write, or where the assistant says nothing; the message starts with `source`.
  """
  try:
    rendered = chat.render(messages, tokenizer, template)
  except ValueError as error:
    raise ValueError(f'{source}: {error}') from error
  mask_T = np.zeros(rendered.tokens_T.shape, np.bool_)
  for span in rendered.spans:
    if span.role == 'assistant' and span.message >= num_prompt:
      mask_T[span.start:span.end] = True
  if not mask_T.any():
    raise ValueError(f'{source}: the assistant says nothing after the first {num_prompt} messages; give a reply.')
  end = int(np.flatnonzero(mask_T)[-1]) + 1
  return Document(rendered.tokens_T[:end], mask_T[:end], source)


def stream(data: Preferences, encode: Encoder, *, seed: int, position: int, split: str = 'train') -> Iterator[tuple[int, Texts | None]]:
  """Yield (position after it, texts) of the stream: for 'train' without end and shuffled, else every row once, in order.

  Raises:
    ValueError: what `encode` refuses, or so many rows in a row that do not fit that none seems to.
  """
  num_dropped, rows = 0, data.rows[split]
  while split == 'train' or position < rows.size:
    row = data.at(position, seed) if split == 'train' else int(rows[position])
    position += 1
    texts = encode(row)
    num_dropped = 0 if texts else num_dropped + 1
    if num_dropped == min(rows.size, MAX_DROPPED_IN_A_ROW):
      raise ValueError(f'{num_dropped} comparisons in a row were dropped, because their texts together do not fit data.length={encode.length} '
                       'or are equal; raise data.length.')
    yield position, texts


def plans(items: Iterable[tuple[int, Texts | None]], rows: int, length: int, max_comparisons: int) -> Iterator[Plan]:
  """Yield what each step takes: comparisons in order, first-fit, up to the first that fits in none of the `rows`.

  A row holds at most `max_comparisons`. A step without any comparison is not given.
  """
  stream_ = iter(items)
  first = next(stream_, None)
  while first is not None:
    consumed: list[tuple[int, Texts | None]] = []

    def sizes(first=first, consumed=consumed):
      item = first
      while item is not None:
        consumed.append(item)
        if item[1] is not None:
          yield item[1].num_tokens
        item = next(stream_, None)

    assignment, num_taken = batching.plan(sizes(), rows, length, max_comparisons)
    texts = [item[1] for item in consumed if item[1] is not None]
    # `plan` reads one past the last that fits, unless the stream ended.
    first = consumed.pop() if num_taken < len(texts) else None
    if num_taken:
      yield Plan(tuple(texts[:num_taken]), assignment, consumed[-1][0], sum(item[1] is None for item in consumed))


def lay_out(plan: Plan, *, rows: int, length: int, host_rows: slice, mean: bool) -> Step:
  """Lay out a step's rows.

  A text weighs its comparison's weight over the number of texts in the whole step, or with `mean=False` (evaluation, which adds up steps)
  over that of a comparison.

  Args:
    rows: of a micro-batch, over all hosts.
    host_rows: those of them that this host lays out.
  """
  num_documents = sum(len(texts.documents) for texts in plan.texts)
  denominator = num_documents if mean else num_documents / len(plan.texts)
  batches = []
  for first in range(0, len(plan.assignment), rows):
    mine = [[plan.texts[index] for index in row] for row in plan.assignment[first:first + rows][host_rows]]
    batches.append(_pack(mine, length, denominator, plan.texts[0]))
  others = [texts.mismatched for texts in plan.texts if texts.mismatched is not None]
  mismatched = batching.pack_step(others, rows, length, aggregation='token_sum') if others else []
  return Step(tuple(batches), tuple(jax.tree.map(lambda array: array[host_rows], batch) for batch in mismatched), plan.position,
              len(plan.texts), sum(texts.num_tokens for texts in plan.texts), plan.num_dropped)


def _pack(rows: Sequence[Sequence[Texts]], length: int, denominator: float, example: Texts) -> Batch:
  """Pack rows, which may be empty, into a batch with the fields that `example` of the same step has."""
  batch = batching.pack_rows([[document for texts in row for document in texts.documents] for row in rows], length, denominator=denominator,
                             aggregation='sequence_mean')
  if 'reference_logprobs' in example.documents[0].per_token and batch.reference_logprobs_BT is None:
    batch = batch.replace(reference_logprobs_BT=np.zeros_like(batch.loss_weight_BT))
  num_columns = 1 + len(example.preferences[0])
  columns = np.zeros((num_columns, *batch.loss_weight_BT.shape), np.float32)
  for number, row in enumerate(rows):
    # One line for each segment, of which the first is padding.
    of_segment = np.array([(0.0,) * num_columns] + [(texts.weight, *values) for texts in row for values in texts.preferences], np.float32)
    columns[:, number] = of_segment[batch.segment_ids_BT[number]].T
  return batch.replace(loss_weight_BT=batch.loss_weight_BT * columns[0], preferences=tuple(columns[1:]))


def prefetched(items: Iterator) -> Iterator:
  """Yield the items, the next one being made in a thread meanwhile; what making one raises is raised here."""
  with ThreadPoolExecutor(1, 'comparisons') as thread:
    pending = thread.submit(next, items, None)
    while (item := pending.result()) is not None:
      pending = thread.submit(next, items, None)
      yield item
