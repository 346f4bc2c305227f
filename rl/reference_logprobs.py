"""Reference logprobs of preference data: computed once before training, and kept with the run.

For each row of data its texts' learned tokens have one float32 each. They are written in parts, each complete or not there at all, so a run
that is killed while scoring goes on where it was, and one that is resumed for more steps scores only what is new. The directory carries a
digest of what decides the values: another model, tokenizer, template or other data has a directory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from rl import batching
from rl.batching import Place
from rl.comparisons import Texts
from rl.types import Batch, Document

# Written at once; a run that is killed loses at most the scores of one part.
_PART_TOKENS = 1 << 24


class ReferenceLogprobs:
  """What a reference says of each row's texts. Every process reads; process 0 writes."""

  def __init__(self, directory: str | Path, identity: Mapping[str, Any]):
    """Open the parts that are there.

    Args:
      directory: of the run.
      identity: plain JSON of everything that decides the values.
    """
    self._directory = Path(directory) / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    # Row -> (values of all parts' texts, first and last index); the arrays are mapped, not read.
    self._places: dict[int, tuple[np.ndarray, int, int]] = {}
    self._num_parts = 0
    for index in sorted(self._directory.glob('*.index.npy')):
      self._open(index)

  def __contains__(self, row: int) -> bool:
    return row in self._places

  def attach(self, texts: Texts) -> Texts:
    """Return the texts with the reference's logprobs of their learned tokens.

    Raises:
      KeyError: the row has not been scored.
    """
    values, start, end = self._places[texts.row]
    sizes = [_num_targets(document) for document in texts.all_documents]
    if sum(sizes) != end - start:
      raise ValueError(f'{self._directory} has {end - start} reference logprobs of {texts.documents[0].source}, whose texts have '
                       f'{sum(sizes)} learned tokens; remove the directory and start again.')
    parts = np.split(values[start:end], np.cumsum(sizes)[:-1])
    documents = [_with_reference(document, part) for document, part in zip(texts.all_documents, parts, strict=True)]
    mismatched = None if texts.mismatched is None else documents.pop()
    return dataclasses.replace(texts, documents=tuple(documents), mismatched=mismatched)

  def score(self, items: Iterable[Texts], score: Callable[[Batch], jax.Array], place: Place, rows: int, length: int) -> None:
    """Score texts with the reference, and keep the result.

    Args:
      items: rows that are not there yet.
      score: a global batch to logprobs_BT of its targets.
      place: of global batches.
      rows, length: of a batch, over all hosts.
    """
    part: list[Texts] = []
    num_tokens = 0
    for texts in items:
      part.append(texts)
      num_tokens += sum(len(document.tokens_T) for document in texts.all_documents)
      if num_tokens >= _PART_TOKENS:
        self._add(part, score, place, rows, length)
        part, num_tokens = [], 0
    if part:
      self._add(part, score, place, rows, length)

  def _add(self, part: Sequence[Texts], score, place: Place, rows: int, length: int) -> None:
    values = score_documents([document for texts in part for document in texts.all_documents], score, place, rows, length)
    per_row, taken = [], 0
    for texts in part:
      per_row.append(sum(values[taken + index].size for index in range(len(texts.all_documents))))
      taken += len(texts.all_documents)
    ends = np.cumsum(per_row)
    index = np.stack([[texts.row for texts in part], ends - per_row, ends]).astype(np.int64)
    values_path, index_path = (self._directory / f'{self._num_parts:05d}.{kind}.npy' for kind in ('values', 'index'))
    if jax.process_index() == 0:
      self._directory.mkdir(parents=True, exist_ok=True)
      # The index says that the values are complete, so it comes last.
      write(values_path, np.concatenate(values))
      write(index_path, index)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f'reference logprobs {index_path.name}')
    self._open(index_path)

  def _open(self, index: Path) -> None:
    values = np.load(index.with_name(index.name.replace('.index.', '.values.')), mmap_mode='r')
    for row, start, end in np.load(index).T.tolist():
      self._places[row] = (values, start, end)
    self._num_parts += 1


def score_documents(documents: Sequence[Document], score: Callable[[Batch], Any], place: Place, rows: int, length: int) -> list[Any]:
  """Return for each document what `score` says of its learned tokens; arguments as in `ReferenceLogprobs.score`.

  `score` may return a tree of arrays [B, T, ...]; a document has the same tree of numpy arrays [learned tokens, ...].
  """
  found = batching.at_places(documents, score, place, rows, length)
  return [_learned(document, scored) for document, scored in zip(documents, found, strict=True)]


def _learned(document: Document, scored: Any) -> Any:
  return jax.tree.map(lambda array_T: array_T[:-1][document.loss_mask_T[1:]], scored)


def _num_targets(document: Document) -> int:
  return batching.num_targets([document])


def _with_reference(document: Document, values: np.ndarray) -> Document:
  logprobs_T = np.full(document.tokens_T.shape, np.nan, np.float32)
  mask_T = document.loss_mask_T.copy()
  mask_T[0] = False  # It is predicted by nothing.
  logprobs_T[mask_T] = values
  return dataclasses.replace(document, per_token={**document.per_token, 'reference_logprobs': logprobs_T})


def write(path: Path, array: np.ndarray) -> None:
  """Write a file that is complete if it is there."""
  partial = path.with_name(path.name + '.partial')
  with partial.open('wb') as file:
    np.save(file, array)
    file.flush()
    os.fsync(file.fileno())
  partial.rename(path)
