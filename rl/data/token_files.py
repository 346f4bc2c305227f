"""Documents that are tokenized beforehand: two numpy files, read through memory maps, so that a document may be longer than a host should hold.

`NAME.tokens.npy` holds the tokens of all documents one after the other, int32; `NAME.ends.npy` says where each ends, int64. All tokens of a
document but its first are learned. The files are read once before training, in blocks, to check them and to take a digest of each document;
after that a host touches only the tokens that it lays out.

Deliberately absent: other integer types (a view could not be handed on), compression, and the tokenizer's name (ids are checked against the
model's vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from rl.data import records, sources

SUFFIX, = sources.SUFFIXES['npy']
ENDS_SUFFIX = '.ends.npy'
_BLOCK_TOKENS = 1 << 20


class TokenReader(sources.FileReader):
  """Reads where documents lie as rows of schema `tokens`.

  Attributes:
    largest_token: of the files that were read.
  """

  def __init__(self, paths: Iterable[str]):
    paths = list(paths)
    for path in paths:
      if not os.path.isfile(_ends_path(path)):
        raise FileNotFoundError(f'{_ends_path(path)} does not exist; it must say where the documents of {path} end (one document: its length).')
    super().__init__(paths, self._rows, lambda path: [*sources.file_version(path), *sources.file_version(_ends_path(path))])
    self.largest_token = 0
    # Digests are taken once; later passes only list what is known.
    self._documents: dict[str, tuple[np.ndarray, list[str]]] = {}

  def _rows(self, path: str) -> Iterator[list[bytes]]:
    if path not in self._documents:
      self._documents[path] = self._scan(path)
    ends, digests = self._documents[path]
    for first in range(0, len(digests), sources.BATCH_ROWS):
      batch = range(first, min(first + sources.BATCH_ROWS, len(digests)))
      yield [json.dumps({'path': path, 'start': int(ends[row]), 'stop': int(ends[row + 1]), 'digest': digests[row]}).encode()
             for row in batch]

  def _scan(self, path: str) -> tuple[np.ndarray, list[str]]:
    """Check the files; return where documents end, with a 0 before, and their digests."""
    tokens, ends = _open(path, np.int32), np.concatenate([[0], _open(_ends_path(path), np.int64)])
    wrong = np.flatnonzero(np.diff(ends) < 1)
    if wrong.size or ends[-1] != len(tokens):
      what = f'document {wrong[0] + 1} ends at {ends[wrong[0] + 1]} and begins at {ends[wrong[0]]}' if wrong.size else (
          f'the last document ends at {ends[-1]} of {len(tokens)} tokens')
      raise ValueError(f'{_ends_path(path)}: {what}; it must hold the growing ends of documents, the last one the number of tokens.')
    return ends, [self._digest(tokens[start:stop], f'{path} row {row}') for row, (start, stop) in enumerate(zip(ends, ends[1:]), start=1)]

  def _digest(self, tokens_T: np.ndarray, source: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens_T), _BLOCK_TOKENS):
      block = np.asarray(tokens_T[start:start + _BLOCK_TOKENS])
      if block.min() < 0:
        raise ValueError(f'{source}: token {start + int(np.argmin(block))} of the document is {block.min()}; ids are from 0 on.')
      self.largest_token = max(self.largest_token, int(block.max()))
      digest.update(block)
    return digest.hexdigest()


def document(span: records.TokenSpan) -> np.ndarray:
  """Return the tokens of a document, int32 [T], without reading them."""
  return np.load(span.path, mmap_mode='r')[span.start:span.stop]


def write(prefix: str | os.PathLike, documents: Iterable[np.ndarray]) -> int:
  """Write documents of int32 tokens to `prefix`.tokens.npy and `prefix`.ends.npy, and return how many; one is held at a time.

  Raises:
    ValueError: no documents, or one that is empty or not one-dimensional int32.
  """
  paths = [Path(f'{prefix}{suffix}') for suffix in (SUFFIX, ENDS_SUFFIX)]
  partial = [path.with_name(f'.{path.name}.{os.getpid()}.partial') for path in paths]
  paths[0].parent.mkdir(parents=True, exist_ok=True)
  ends = [0]
  try:
    with partial[0].open('wb') as file:
      _write_header(file, 0)
      for number, tokens_T in enumerate(documents, start=1):
        if tokens_T.ndim != 1 or tokens_T.dtype != np.int32 or not tokens_T.size:
          raise ValueError(f'document {number} is {tokens_T.dtype}{tokens_T.shape}; it must be a non-empty one-dimensional int32 array.')
        file.write(tokens_T.data)
        ends.append(ends[-1] + tokens_T.size)
      file.seek(0)
      _write_header(file, ends[-1])
    if len(ends) == 1:
      raise ValueError(f'There are no documents to write to {paths[0]}.')
    with partial[1].open('wb') as file:
      np.save(file, np.array(ends[1:], np.int64))
    for path, written in zip(paths, partial, strict=True):
      written.replace(path)
  finally:
    for path in partial:
      path.unlink(missing_ok=True)
  return len(ends) - 1


def _write_header(file, count: int) -> None:
  # numpy leaves room for a longer count, so the header can be written again.
  np.lib.format.write_array_header_1_0(file, {'descr': '<i4', 'fortran_order': False, 'shape': (count,)})


def _ends_path(path: str) -> str:
  return path.removesuffix(SUFFIX) + ENDS_SUFFIX


def _open(path: str, dtype: type) -> np.ndarray:
  try:
    array = np.load(path, mmap_mode='r')
  except (ValueError, EOFError) as error:
    raise ValueError(f'{path} is not a whole .npy file ({error}); write it again.') from error
  if array.ndim != 1 or array.dtype != dtype or not array.size:
    raise ValueError(f'{path} holds {array.dtype}{array.shape}; it must be a non-empty one-dimensional array of {np.dtype(dtype)}.')
  return array
