"""A teacher's likeliest words of training texts: computed once before training, and kept with the run.

Each learned token of a text has its J words and their logprobs. A text is known by its content, so texts that come again are scored once, and
so do other mixtures of the same texts. Like `reference_logprobs`, values are written in parts, each complete or not there at all, in a
directory that carries a digest of what decides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from rl import batching
from rl.batching import Place
from rl.reference_logprobs import score_documents, write
from rl.types import Batch, Document

# Written at once; a run that is killed loses at most the scores of one part.
_PART_BYTES = 1 << 28
_NAMES = ('ids', 'logprobs')


class TeacherWords:
  """What a teacher says of each text. Every process reads; process 0 writes."""

  def __init__(self, directory: str | Path, identity: Mapping[str, Any], count: int):
    """Open the parts that are there.

    Args:
      directory: of the run.
      identity: plain JSON of everything but the texts that decides the values.
      count: words of a token.
    """
    what = json.dumps({**identity, 'count': count}, sort_keys=True)
    self._directory = Path(directory) / hashlib.sha256(what.encode()).hexdigest()[:16]
    self._count = count
    # Key of a text -> (arrays of its part, first and last index); the arrays are mapped, not read.
    self._places: dict[tuple[int, int], tuple[tuple[np.ndarray, ...], int, int]] = {}
    self._num_parts = 0
    for index in sorted(self._directory.glob('*.index.npy')):
      self._open(index)

  def __contains__(self, document: Document) -> bool:
    return _key(document) in self._places

  def attach(self, document: Document) -> Document:
    """Return the document with the teacher's words of its learned tokens.

    Raises:
      KeyError: it has not been scored.
    """
    arrays, start, end = self._places[_key(document)]
    mask_T = document.loss_mask_T.copy()
    mask_T[0] = False  # It is predicted by nothing.
    ids_TJ = np.zeros((len(mask_T), self._count), np.int32)
    logprobs_TJ = np.full(ids_TJ.shape, np.nan, np.float32)
    ids_TJ[mask_T], logprobs_TJ[mask_T] = (array[start:end] for array in arrays)
    return dataclasses.replace(document, per_token={**document.per_token, 'teacher_ids': ids_TJ, 'teacher_logprobs': logprobs_TJ})

  def score(self, documents: Iterable[Document], score: Callable[[Batch], tuple[jax.Array, jax.Array]], place: Place, rows: int,
            length: int) -> None:
    """Keep the teacher's words of documents.

    Args:
      documents: those that are there already are left out.
      score: a global batch to (ids_BTJ, logprobs_BTJ) of its targets.
      place: of global batches.
      rows, length: of a batch, over all hosts.
    """
    part: dict[tuple[int, int], Document] = {}
    num_bytes = 0
    for document in documents:
      key = _key(document)
      if key in self._places or key in part:
        continue
      part[key] = document
      num_bytes += 8 * self._count * batching.num_targets([document])
      if num_bytes >= _PART_BYTES:
        self._add(part, score, place, rows, length)
        part, num_bytes = {}, 0
    if part:
      self._add(part, score, place, rows, length)

  def _add(self, part: Mapping[tuple[int, int], Document], score, place: Place, rows: int, length: int) -> None:
    found = score_documents(list(part.values()), score, place, rows, length)
    ends = np.cumsum([len(ids) for ids, _ in found])
    index = np.stack([*np.array(list(part)).T, np.concatenate([[0], ends[:-1]]), ends]).astype(np.int64)
    index_path = self._directory / f'{self._num_parts:05d}.index.npy'
    if jax.process_index() == 0:
      self._directory.mkdir(parents=True, exist_ok=True)
      for name, values in zip(_NAMES, zip(*found, strict=True), strict=True):
        write(_beside(index_path, name), np.concatenate(values))
      # The index says that the values are complete, so it comes last.
      write(index_path, index)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f'teacher words {index_path.name}')
    self._open(index_path)

  def _open(self, index: Path) -> None:
    arrays = tuple(np.load(_beside(index, name), mmap_mode='r') for name in _NAMES)
    for first, second, start, end in np.load(index).T.tolist():
      self._places[first, second] = (arrays, start, end)
    self._num_parts += 1


def _beside(index: Path, name: str) -> Path:
  return index.with_name(index.name.replace('.index.', f'.{name}.'))


def _key(document: Document) -> tuple[int, int]:
  """Return a digest of the tokens and of which of them are learned."""
  digest = hashlib.blake2b(document.tokens_T.tobytes(), digest_size=16)
  digest.update(document.loss_mask_T.tobytes())
  first, second = np.frombuffer(digest.digest(), np.int64).tolist()
  return first, second
