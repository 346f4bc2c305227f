"""Step batches from a stream of examples, at a position that is one integer.

The position counts examples of the global stream. A step takes documents in order until one fits in none of its rows, and the next step
starts with that one: nothing is carried over, so a step is a function of the position where it starts. Every host plans the whole step and
lays out only its own rows; the position, and all batches taken together, do not depend on the number of hosts.

A thread prepares the next steps while the device works. Deliberately absent: saved iterator state (skipping is cheap, it never tokenizes),
and TensorFlow (the stream is any callable from position to iterator; `tasks.examples` is the one for SeqIO mixtures).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
import itertools
import queue
import threading
from typing import Literal, get_args

from rl import batching
from rl.data.records import Example
from rl.types import Batch, Document

Overlong = Literal['error', 'truncate', 'drop']

MAX_DROPPED_IN_A_ROW = 10_000


@dataclass(frozen=True)
class Step:
  """What one optimizer step learns from.

  Attributes:
    batches: this host's rows of each micro-batch, or its share of them, numpy.
    documents: position after the step: examples of the stream consumed since its start.
    sources: of the documents in the step, over all hosts, in order.
    num_tokens: tokens in the rows of all hosts, without padding.
    num_targets: of them, those to be learned.
    num_truncated: documents cut to the length of a row.
    num_dropped: documents consumed but left out.
  """

  batches: tuple[Batch, ...]
  documents: int
  sources: tuple[str, ...]
  num_tokens: int
  num_targets: int
  num_truncated: int
  num_dropped: int


@dataclass(frozen=True)
class _Encoded:
  """One example of the stream after encoding; `document` is None where it is dropped."""

  index: int
  document: Document | None
  is_truncated: bool


class Loader:
  """Iterator of `Step`s; close it, or use it as a context manager, to end its thread.

  Steps end only with the stream; the last one is padded with empty rows.

  Attributes:
    documents: position after the last step that was handed out; start a new loader there to go on.
  """

  def __init__(
      self,
      open_stream: Callable[[int], Iterator[Example]],
      encode: Callable[[Example], Document],
      *,
      rows: int,
      length: int,
      micro_batches: int = 1,
      host_rows: slice | None = None,
      share: batching.Share | None = None,
      position: int = 0,
      overlong: Overlong = 'error',
      aggregation: batching.Aggregation = 'token_mean',
      prefetch: int = 2,
  ):
    """Start preparing steps.

    Args:
      open_stream: from a position to the examples from there on; the same every time.
      encode: example to tokens and loss mask; called in the loader's thread.
      rows: rows of one micro-batch over all hosts.
      length: tokens of a row.
      micro_batches: micro-batches of a step.
      host_rows: rows of a micro-batch that this host lays out (see `batching.host_rows`); None is all.
      share: columns of a row that this host lays out (see `batching.Place.share`); None is all.
      position: where to start.
      overlong: what happens to a document longer than a row: `error`, `truncate` (keep its beginning), or `drop`. Truncated documents
        without a token left to learn are dropped too.
      aggregation: see `batching.step_denominator`.
      prefetch: steps prepared ahead.

    Raises:
      ValueError: a value above that is out of range. While iterating: a document that is too long under `error`, one without a token to
        learn, one that `encode` refuses; the message names the row.
    """
    batching.check_at_least_one(rows=rows, length=length, micro_batches=micro_batches, prefetch=prefetch)
    if position < 0:
      raise ValueError(f'position={position} must be at least 0.')
    if overlong not in get_args(Overlong):
      raise ValueError(f'overlong={overlong!r} is unknown; use one of {", ".join(get_args(Overlong))}.')
    host_rows = host_rows or slice(0, rows)
    if not 0 <= host_rows.start < host_rows.stop <= rows:
      raise ValueError(f'host_rows={host_rows} must be a non-empty part of the rows 0 to {rows}.')
    self.documents = position
    self._open_stream = open_stream
    self._encode = encode
    self._rows = rows
    self._length = length
    self._micro_batches = micro_batches
    self._host_rows = host_rows
    self._share = share
    self._overlong = overlong
    self._aggregation = aggregation
    self._prefetched = _Prefetch(self._steps(position), prefetch)

  def __iter__(self) -> Loader:
    return self

  def __next__(self) -> Step:
    step = next(self._prefetched)
    self.documents = step.documents
    return step

  def __enter__(self) -> Loader:
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def close(self) -> None:
    """Stop the thread and wait for it; steps prepared ahead are lost, `documents` stays."""
    self._prefetched.close()

  def _steps(self, position: int) -> Iterator[Step]:
    stream = self._encoded(position)
    first = next(stream, None)
    is_empty = True
    while first is not None:
      step, first = self._take_step(first, stream)
      if step is not None:
        is_empty = False
        yield step
    if is_empty and position == 0:
      raise ValueError(f'The stream ended without one document that fits a row of length={self._length}; raise length or check the data.')

  def _take_step(self, first: _Encoded, stream: Iterator[_Encoded]) -> tuple[Step | None, _Encoded | None]:
    """Return the step that starts with `first`, and the document that the next one starts with."""
    consumed: list[_Encoded] = []

    def lengths():
      for item in itertools.chain([first], stream):
        consumed.append(item)
        if item.document is not None:
          yield len(item.document.tokens_T)

    # `plan` stops at a document that does not fit, which is then the last one consumed, or where the stream ends.
    assignment, num_taken = batching.plan(lengths(), self._rows * self._micro_batches, self._length)
    documents = [item.document for item in consumed if item.document is not None]
    following = consumed.pop() if num_taken < len(documents) else None
    documents = documents[:num_taken]
    if not documents:
      return None, following
    denominator = batching.step_denominator(documents, self._aggregation)
    mine = [
        [[documents[index] for index in row] for row in assignment[first_row:first_row + self._rows][self._host_rows]]
        for first_row in range(0, len(assignment), self._rows)]
    step = Step(
        batches=tuple(
            batching.pack_rows(rows, self._length, denominator=denominator, aggregation=self._aggregation, share=self._share)
            for rows in mine),
        documents=consumed[-1].index + 1,
        sources=tuple(document.source for document in documents),
        num_tokens=sum(len(document.tokens_T) for document in documents),
        num_targets=batching.num_targets(documents),
        num_truncated=sum(item.is_truncated for item in consumed),
        num_dropped=sum(item.document is None for item in consumed),
    )
    return step, following

  def _encoded(self, position: int) -> Iterator[_Encoded]:
    num_dropped = 0
    for index, example in enumerate(self._open_stream(position), start=position):
      try:
        document = self._encode(example)
      except ValueError as error:
        raise ValueError(f'{example.source}: {error}') from error
      item = self._fitted(index, document, example.source)
      num_dropped = num_dropped + 1 if item.document is None else 0
      if num_dropped == MAX_DROPPED_IN_A_ROW:
        raise ValueError(
            f'{num_dropped} documents in a row, up to {example.source}, were dropped because they do not fit length={self._length} '
            f'(overlong={self._overlong!r}); raise length.')
      yield item

  def _fitted(self, index: int, document: Document, source: str) -> _Encoded:
    size = len(document.tokens_T)
    is_overlong = size > self._length
    if is_overlong and self._overlong == 'error':
      raise ValueError(f'{source}: the document has {size} tokens, a row holds length={self._length}; '
                       "raise length, or choose overlong='truncate' or 'drop'.")
    if is_overlong and self._overlong == 'drop':
      return _Encoded(index, None, False)
    if is_overlong:
      document = Document(document.tokens_T[:self._length], document.loss_mask_T[:self._length], document.source,
                          {name: array[:self._length] for name, array in document.per_token.items()})
    if batching.num_targets([document]) == 0:
      if is_overlong:
        return _Encoded(index, None, False)
      raise ValueError(f'{source}: the document has {size} tokens and none to learn after its first; remove the row.')
    return _Encoded(index, document, is_overlong)


class _Prefetch:
  """Runs an iterator in a thread, a bounded number of items ahead; what it raises is raised by `next` here."""

  def __init__(self, iterator: Iterator[Step], size: int):
    self._queue: queue.Queue = queue.Queue(size)
    self._stopping = threading.Event()
    self._ended: Exception | None = None
    self._thread = threading.Thread(target=self._run, args=(iterator,), name='loader', daemon=True)
    self._thread.start()

  def __next__(self) -> Step:
    if self._ended is not None:
      raise self._ended
    if self._stopping.is_set():
      raise RuntimeError('The loader is closed; start a new one at its `documents`.')
    item = self._queue.get()
    if isinstance(item, Exception):
      self._ended = item
      self._thread.join()
      raise item
    return item

  def close(self) -> None:
    self._stopping.set()
    self._thread.join()

  def _run(self, iterator: Iterator[Step]) -> None:
    try:
      for item in iterator:
        if not self._put(item):
          return
      self._put(StopIteration())
    except Exception as error:  # every kind: the consumer must see it, or it would wait for ever
      self._put(error)

  def _put(self, item: Step | Exception) -> bool:
    while not self._stopping.is_set():
      try:
        self._queue.put(item, timeout=0.1)
      except queue.Full:
        continue
      return True
    return False
