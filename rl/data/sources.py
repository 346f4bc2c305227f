"""Where rows come from: JSONL, Parquet and prepared TFDS directories as SeqIO data sources, and the one lazy import of TensorFlow.

A row travels as one JSON object in UTF-8 together with its number, whatever the format, so that every error can name it. Each source is
read once, whole, before anything is trained on: bad rows come to light at once, and the `Index` of that pass says which rows belong to
which split. A split is a function of the example's content alone, so equal examples never lie on both sides, whatever file they are in.

Shuffling is the source's own, over a window of rows, before the repeat: with a window as large as the split, every epoch is an exact
permutation. Deliberately absent: downloads, remote file systems, and sharding by host (the loader's plan is global).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
from dataclasses import dataclass
import functools
import glob
import gzip
import hashlib
import itertools
import json
import os
import re
import tempfile
from typing import Any, Protocol
import warnings
import zlib

import numpy as np

from rl.data import records

SPLITS = ('train', 'heldout')
SUFFIXES = {'jsonl': ('.jsonl', '.jsonl.gz'), 'parquet': ('.parquet',), 'npy': ('.tokens.npy',)}
BATCH_ROWS = 256  # rows handed over at once: enough that Python and TensorFlow meet rarely, few enough that the first row comes at once

_TF_LOG_LINE = re.compile(rb'WARNING: All log messages before absl|[IWE]\d{4} |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] ')


@functools.cache
def import_seqio() -> tuple[Any, Any]:
  """Import SeqIO and TensorFlow, which takes seconds, kept off the accelerators and off stderr; return (seqio, tf)."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  with _without_startup_log(), warnings.catch_warnings():
    warnings.simplefilter('ignore')
    import seqio
    import tensorflow as tf
    # CUDA_VISIBLE_DEVICES would hide the devices from JAX too, which shares this process.
    for kind in ('GPU', 'TPU'):
      tf.config.set_visible_devices([], kind)
  return seqio, tf


@contextlib.contextmanager
def _without_startup_log() -> Iterator[None]:
  # TensorFlow logs before it reads its own log level, straight to file descriptor 2. What else is written meanwhile is passed on.
  stderr = os.dup(2)
  with tempfile.TemporaryFile() as log:
    os.dup2(log.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      log.seek(0)
      for line in log:
        if not _TF_LOG_LINE.match(line):
          os.write(2, line)


class Reader(Protocol):
  """Reads the rows of a source in a fixed order, as JSON bytes.

  Attributes:
    version: changes when the files do.
    failures: what was raised under a `dataset`, whose elements then just end. TensorFlow would log pages of it and turn it into text.
  """

  version: Any
  failures: list[Exception]

  def batches(self) -> Iterator[tuple[str, list[bytes]]]:
    """Yield (path, rows) in Python; a path's rows are consecutive."""

  def dataset(self) -> Any:
    """Return a `tf.data.Dataset` of string tensors [n], which hold the same rows in the same order."""


@dataclass(frozen=True)
class Index:
  """What one pass over a source found.

  Attributes:
    paths: the files, or TFDS directories, in the order read.
    starts: number, from 0 over the whole source, of the first row of each path.
    members: for each split, a bool a row: whether it belongs to the split. Rows beyond the arrays are never used (see `limit` in `scan`).
    fingerprint: SHA-256 of the examples in the rows that were read.
  """

  paths: tuple[str, ...]
  starts: np.ndarray
  members: Mapping[str, np.ndarray]
  fingerprint: str

  def describe(self, row: int) -> str:
    """Return the path and the 1-based row in it, for messages."""
    place = int(np.searchsorted(self.starts, row, side='right')) - 1
    return f'{self.paths[place]} row {row - int(self.starts[place]) + 1}'

  def num_examples(self, split: str) -> int:
    """Return how many rows the split has."""
    return int(np.count_nonzero(self.members[split]))


def scan(reader: Reader, schema: records.Schema, name: str, *, heldout_fraction: float, limit: int | None) -> Index:
  """Read every row once: check it against the schema and give it to a split.

  Args:
    reader: the rows.
    schema: what each row must be.
    name: of the task, for messages.
    heldout_fraction: expected share of the distinct examples that are held out.
    limit: examples to keep of each split, the first ones; reading stops when both splits have them. None keeps all.

  Raises:
    ValueError: a row that is not what the schema says, or a path without rows.
  """
  paths: list[str] = []
  starts: list[int] = []
  is_heldout: list[bool] = []
  found = {split: 0 for split, share in zip(SPLITS, (1 - heldout_fraction, heldout_fraction), strict=True) if share > 0}
  digest = hashlib.sha256()
  for path, lines in reader.batches():
    if not paths or paths[-1] != path:
      paths.append(path)
      starts.append(len(is_heldout))
    for line in lines:
      source = f'{name}:{path} row {len(is_heldout) - starts[-1] + 1}'
      content = records.content(records.parse(line, schema, source))
      digest.update(content)
      is_heldout.append(records.uniform(content) < heldout_fraction)
      found[SPLITS[is_heldout[-1]]] += 1
    if limit is not None and min(found.values()) >= limit:
      break
  heldout = np.array(is_heldout, bool)
  members = {'train': ~heldout, 'heldout': heldout}
  if limit is not None:
    members = {split: member & (np.cumsum(member) <= limit) for split, member in members.items()}
  return Index(tuple(paths), np.array(starts), members, digest.hexdigest())


def data_source(reader: Reader, index: Index, shuffle_window: int) -> Any:
  """Return a `seqio.DataSource` with splits 'train' and 'heldout', whose elements are {'record': JSON, 'row': number from 0}."""
  return _source_class()(reader, index, shuffle_window)


@functools.cache
def _source_class() -> type:
  seqio, tf = import_seqio()

  class RowSource(seqio.DataSource):
    """The rows that an `Index` gives to each split."""

    def __init__(self, reader: Reader, index: Index, shuffle_window: int):
      super().__init__(
          SPLITS, {split: index.num_examples(split) for split in SPLITS}, caching_permitted=False, performs_internal_shuffling=True)
      self.reader = reader
      self.index = index
      self.shuffle_window = shuffle_window

    @property
    def supports_arbitrary_sharding(self):
      return False

    def list_shards(self, split):
      return [split]

    def get_dataset(
        self, split='train', shuffle=True, seed=None, shard_info=None, *, sequence_length=None, use_cached=False, num_epochs=1):
      if shard_info is not None and shard_info.num_shards > 1:
        raise ValueError(f'shard_info={shard_info} asks for part of a source that has one; shard the examples instead.')
      member = tf.constant(self.index.members[split])
      num_rows = member.shape[0]

      def number(first, lines):
        return first + tf.size(lines, tf.int64), {'record': lines, 'row': first + tf.range(tf.size(lines, tf.int64))}

      def select(batch):
        keep = tf.gather(member, batch['row'])
        return {name: tf.boolean_mask(values, keep) for name, values in batch.items()}

      # A `limit` ends the scan after a whole batch.
      dataset = self.reader.dataset().scan(np.int64(0), number).take_while(lambda batch: batch['row'][0] < num_rows)
      dataset = dataset.map(select).unbatch()
      if shuffle:
        window = max(1, min(self.shuffle_window, self.num_input_examples(split)))
        dataset = dataset.shuffle(window, seed=seed, reshuffle_each_iteration=True)
      return dataset

  return RowSource


class FileReader:
  """Reads local files one after the other; a file that changes after it was opened here is an error, not other data."""

  def __init__(self, paths: Sequence[str], read: Callable[[str], Iterator[list[bytes]]], version: Callable[[str], list[int]] | None = None):
    self._file_version = file_version if version is None else version
    self.version = {path: self._file_version(path) for path in paths}
    self.failures: list[Exception] = []
    self._read = read

  def batches(self) -> Iterator[tuple[str, list[bytes]]]:
    """Yield (path, rows); raise ValueError for a file without rows, RuntimeError for one that changed."""
    for path, version in self.version.items():
      is_empty = True
      for rows in self._read(path):
        if self._file_version(path) != version:
          raise RuntimeError(f'{path} has changed since it was checked, so the order of its rows is undefined; restart the program.')
        is_empty = False
        yield path, rows
      if is_empty:
        raise ValueError(f'{path} has no rows; give it at least one, or leave it out.')

  def dataset(self) -> Any:
    """Return the rows as a `tf.data.Dataset`, see `Reader`."""
    _, tf = import_seqio()

    def generate():
      try:
        for _, rows in self.batches():
          yield np.array(rows, object)
      except Exception as error:  # every kind: it is raised where the elements are consumed
        self.failures.append(error)

    return tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([None], tf.string))


class TfdsReader:
  """Reads prepared TFDS datasets from their directories, through `seqio.TfdsDataSource`; it never downloads."""

  def __init__(self, directories: Sequence[str], split: str, schema: records.Schema):
    seqio, _ = import_seqio()
    self.version = {directory: file_version(os.path.join(directory, 'dataset_info.json')) for directory in directories}
    self.failures: list[Exception] = []
    self._columns = list(schema.columns.values())
    self._sources = {}
    for directory in directories:
      source = seqio.TfdsDataSource(tfds_data_dir=directory, splits={'rows': split}, read_only=True)
      info = source.tfds_dataset.info
      try:
        source.get_dataset('rows', shuffle=False)
      except (ValueError, KeyError) as error:
        splits = ', '.join(info.splits)
        raise ValueError(
            f'{directory} gives no rows for tfds_split={split!r} ({error}); use one of {splits}, or a slice of one.') from error
      _check_columns(directory, schema, sorted(info.features))
      self._sources[directory] = source

  def batches(self) -> Iterator[tuple[str, list[bytes]]]:
    """Yield (directory, rows); raise ValueError for records that cannot be read."""
    _, tf = import_seqio()
    for directory in self._sources:
      try:
        for rows in self._rows(directory).as_numpy_iterator():
          yield directory, list(rows)
      except tf.errors.OpError as error:
        raise ValueError(f'{directory} cannot be read: {error.message}; prepare the dataset again.') from error

  def dataset(self) -> Any:
    """Return the rows as a `tf.data.Dataset`, see `Reader`."""
    return functools.reduce(lambda first, second: first.concatenate(second), map(self._rows, self._sources))

  def _rows(self, directory: str) -> Any:
    _, tf = import_seqio()

    def to_json(element):
      columns = {column: element[column] for column in self._columns}

      def dump(*values):
        return json.dumps(_plain(tf.nest.pack_sequence_as(columns, values))).encode()

      line = tf.numpy_function(dump, tf.nest.flatten(columns), tf.string)
      line.set_shape([])
      return line

    return self._sources[directory].get_dataset('rows', shuffle=False).map(to_json).batch(BATCH_ROWS)


def read_jsonl(path: str) -> Iterator[list[bytes]]:
  """Yield the lines of a file, gzipped if its name ends in .gz, in batches; raise ValueError if it does not decompress."""
  with gzip.open(path, 'rb') if path.endswith('.gz') else open(path, 'rb') as file:
    lines = iter(file)
    while True:
      try:
        rows = [line.rstrip(b'\r\n') for line in itertools.islice(lines, BATCH_ROWS)]
      except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f'{path} is not a whole gzip file ({error}); copy or compress it again.') from error
      if not rows:
        return
      yield rows


def read_parquet(path: str, schema: records.Schema) -> Iterator[list[bytes]]:
  """Yield the rows of a file, only the columns of the schema, in batches.

  Raises:
    ValueError: not a Parquet file, or a column is missing or holds what JSON cannot.
  """
  import pyarrow
  from pyarrow import parquet

  try:
    with parquet.ParquetFile(path) as file:
      _check_columns(path, schema, file.schema_arrow.names)
      first = 1
      for batch in file.iter_batches(BATCH_ROWS, columns=list(schema.columns.values())):
        last = first + batch.num_rows - 1
        try:
          yield [json.dumps(row, ensure_ascii=False).encode() for row in batch.to_pylist()]
        except TypeError as error:
          types = ', '.join(f'{field.name}: {field.type}' for field in batch.schema)
          raise ValueError(f'{path} rows {first} to {last} hold what is no text ({error}); columns are {types}.') from error
        first = last + 1
  except (pyarrow.ArrowException, OSError) as error:
    cause = ' '.join(str(error).split())
    raise ValueError(f'{path} is not a whole Parquet file ({cause}); write or copy it again.') from error


def find_files(paths: Sequence[str], suffixes: Sequence[str]) -> tuple[str, ...]:
  """Expand globs, in order of name, and check that every file is there.

  Raises:
    FileNotFoundError: a path or a glob that names no file.
    ValueError: no path at all, a file named twice, or a name without one of the suffixes.
  """
  found = []
  for path in map(os.path.expanduser, paths):
    # A file whose name has a bracket in it is itself, not a pattern.
    matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    matches = [match for match in matches if os.path.isfile(match)]
    if not matches:
      raise FileNotFoundError(f'No file at {path!r} (seen from {os.getcwd()}); give a file or a glob that matches files.')
    found += matches
  for path in found:
    if not path.endswith(tuple(suffixes)):
      raise ValueError(f'{path} must end in {" or ".join(suffixes)}; choose the source that fits the file, or rename it.')
  return _checked_once(found)


def find_directories(paths: Sequence[str]) -> tuple[str, ...]:
  """Check that every path is the directory of a prepared TFDS dataset.

  Raises:
    FileNotFoundError: one is not.
    ValueError: no path at all, or one named twice.
  """
  found = [os.path.expanduser(path) for path in paths]
  for path in found:
    if not os.path.isfile(os.path.join(path, 'dataset_info.json')):
      raise FileNotFoundError(
          f'No dataset_info.json in {path!r} (seen from {os.getcwd()}); give the directory of a prepared dataset, such as '
          '.../gsm8k/1.0.0, made by download_and_prepare() of its TFDS builder.')
  return _checked_once(found)


def _checked_once(paths: list[str]) -> tuple[str, ...]:
  if not paths:
    raise ValueError('paths is empty; give at least one path.')
  for path in paths:
    if paths.count(path) > 1:
      raise ValueError(f'{path} is named {paths.count(path)} times; name each file once.')
  return tuple(paths)


def _check_columns(path: str, schema: records.Schema, names: Sequence[str]) -> None:
  for field, column in schema.columns.items():
    if column not in names:
      raise ValueError(
          f'{path} has no column {column!r}, which schema {schema.kind!r} reads as {field!r}; it has {", ".join(names) or "none"}. '
          f'Choose another schema, or name the column with fields={{{field!r}: ...}}.')


def file_version(path: str) -> list[int]:
  """Return what changes when the file does."""
  status = os.stat(path)
  return [status.st_size, status.st_mtime_ns]


def _plain(value: Any) -> Any:
  """Turn a TFDS value into plain JSON; TFDS holds a sequence of records as a record of sequences, which is turned back."""
  if isinstance(value, Mapping):
    fields = {name: _plain(item) for name, item in value.items()}
    if fields and all(isinstance(item, np.ndarray) and item.ndim for item in value.values()):
      return [dict(zip(fields, items, strict=True)) for items in zip(*fields.values(), strict=True)]
    return fields
  if isinstance(value, bytes):
    # What is not UTF-8 becomes half of a surrogate pair, which `records` refuses by row.
    return value.decode(errors='surrogateescape')
  if isinstance(value, (np.ndarray, np.generic)):
    return _plain(value.tolist())
  return [_plain(item) for item in value] if isinstance(value, list) else value
