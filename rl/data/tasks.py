"""SeqIO tasks and mixtures from plain configuration, and the endless stream of examples they give.

A `seqio.Task` is a checked source and one preprocessor, which turns rows into the canonical example; a `seqio.Mixture` draws from tasks by
rate. Both are built and registered only when asked for, under names that hold a digest of their configuration and of the data itself: the
same configuration over the same data gives the same object, and nothing happens at import.

The order of a stream is a function of the mixture and the seed alone, in any process and after any restart (the tests compare processes),
as long as nobody sets TensorFlow's global seed and its version stays.

SeqIO would draw the task of each example with TensorFlow's sampler, which costs more than all the rest together; `_draw` takes that place
through SeqIO's `sample_fn`. Deliberately absent: tokens (the loader encodes after skipping) and caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
import hashlib
import json
import math
import re
from typing import Any, Literal, get_args

import numpy as np

from rl.data import records, sources, token_files

Source = Literal['jsonl', 'parquet', 'tfds', 'npy']

_NAME = re.compile(r'[A-Za-z0-9_.]+')


@dataclass(frozen=True)
class TaskConfig:
  """One body of data.

  Attributes:
    paths: files or globs; for `tfds` the directories of prepared datasets, such as '.../gsm8k/1.0.0'.
    source: format of the files: `jsonl` (.jsonl, .jsonl.gz), `parquet`, `tfds`, or `npy` (tokenized documents, see `token_files`).
    schema: what a row is: `chat`, `qa` or `text` (see `records`), and `tokens` for the source `npy`.
    fields: the column of a schema's field where it has another name, such as {'question': 'prompt'}.
    tfds_split: which split of the TFDS dataset is read, such as 'train' or 'train[:10%]'; not a word about training.
    heldout_fraction: share of the distinct examples, chosen by their content, that is 'heldout'; the rest is 'train'.
    limit: keep only the first so many examples of 'train' and of 'heldout'.
    shuffle_window: rows held in memory to shuffle; a split no larger than that is shuffled exactly.
  """

  paths: tuple[str, ...]
  source: Source = 'jsonl'
  schema: str = 'chat'
  fields: dict[str, str] = field(default_factory=dict)
  tfds_split: str = 'train'
  heldout_fraction: float = 0.0
  limit: int | None = None
  shuffle_window: int = 100_000

  def __post_init__(self):
    if isinstance(self.paths, str):
      raise TypeError(f'paths={self.paths!r} must be a tuple of strings, not one string; write ({self.paths!r},).')
    if self.source not in get_args(Source):
      raise ValueError(f'source={self.source!r} is unknown; use one of {", ".join(get_args(Source))}.')
    if not 0 <= self.heldout_fraction <= 1:
      raise ValueError(f'heldout_fraction={self.heldout_fraction} must be between 0 and 1.')
    if self.limit is not None and self.limit < 1:
      raise ValueError(f'limit={self.limit} must be at least 1, or None for all examples.')
    if self.shuffle_window < 1:
      raise ValueError(f'shuffle_window={self.shuffle_window} must be at least 1 row.')
    records.schema(self.schema, self.fields)
    if (self.source == 'npy') != (self.schema == 'tokens'):
      raise ValueError(f"source={self.source!r} with schema={self.schema!r}; tokenized documents have source='npy' and schema='tokens', "
                       'and nothing else has.')


@dataclass(frozen=True)
class MixtureConfig:
  """Tasks and how often each is drawn from.

  Attributes:
    tasks: by name; the name starts every message about a row.
    rates: relative number of examples drawn from each task; {} draws in proportion to num_examples ** (1 / temperature).
    temperature: 1 is proportional to size, larger is more even. Only without `rates`.
  """

  tasks: dict[str, TaskConfig]
  rates: dict[str, float] = field(default_factory=dict)
  temperature: float = 1.0

  def __post_init__(self):
    if not self.tasks:
      raise ValueError('tasks={} is empty; a mixture needs at least one task.')
    for name in self.tasks:
      _check_name(name)
    if self.rates and set(self.rates) != set(self.tasks):
      raise ValueError(f'rates names {", ".join(self.rates)} but the tasks are {", ".join(self.tasks)}; give each a rate, or none.')
    if not all(math.isfinite(rate) and rate > 0 for rate in self.rates.values()):
      raise ValueError(f'rates={self.rates} must all be positive and finite; leave out a task that is not to be drawn.')
    if not (math.isfinite(self.temperature) and self.temperature > 0):
      raise ValueError(f'temperature={self.temperature} must be positive and finite.')
    if self.rates and self.temperature != 1:
      raise ValueError(f'temperature={self.temperature} has no effect beside rates={self.rates}; set only one of them.')


def build_task(name: str, config: TaskConfig) -> Any:
  """Check all the data of a task and return its `seqio.Task`, registered.

  Raises:
    FileNotFoundError: a path is not there.
    ValueError: a row, a column or a file is not what the configuration says; the message names it.
  """
  _check_name(name)
  seqio, tf = sources.import_seqio()
  schema = records.schema(config.schema, config.fields)
  reader = _reader(config, schema)
  index = sources.scan(reader, schema, name, heldout_fraction=config.heldout_fraction, limit=config.limit)
  unique = f'{name}:{_digest(asdict(config), reader.version, index.fingerprint)}'
  if unique in seqio.TaskRegistry.names():
    return seqio.TaskRegistry.get(unique)
  text = seqio.Feature(seqio.PassThroughVocabulary(size=0), add_eos=False, dtype=tf.string, rank=0)
  return seqio.TaskRegistry.add(
      unique,
      source=sources.data_source(reader, index, config.shuffle_window),
      preprocessors=[_to_examples(name, schema, index)],
      output_features={'example': text, 'source': text},
      shuffle_buffer_size=None,
  )


def build_mixture(config: MixtureConfig) -> Any:
  """Build the tasks and return their `seqio.Mixture`, registered; it raises what `build_task` does."""
  seqio, _ = sources.import_seqio()
  tasks = {name: build_task(name, task) for name, task in sorted(config.tasks.items())}
  rates = config.rates or {name: max(task.num_input_examples('train'), 1) ** (1 / config.temperature) for name, task in tasks.items()}
  rated = [(task, float(rates[name])) for name, task in tasks.items()]
  unique = f'mixture:{_digest([(task.name, rate) for task, rate in rated])}'
  if unique in seqio.MixtureRegistry.names():
    return seqio.MixtureRegistry.get(unique)
  return seqio.MixtureRegistry.add(unique, rated, sample_fn=_draw)


def num_examples(mixture: Any, split: str = 'train') -> int:
  """Return how many examples one epoch of a split has, over all tasks.

  Raises:
    ValueError: an unknown split.
  """
  _check_split(split)
  return mixture.num_input_examples(split)


def fingerprint(mixture: Any) -> str:
  """Return the SHA-256 of all the examples that the mixture can give; it does not depend on where the files lie."""
  return hashlib.sha256(''.join(sorted(task.source.index.fingerprint for task in mixture.tasks)).encode()).hexdigest()


def check_vocabulary(mixture: Any, size: int) -> None:
  """Raise ValueError if a tokenized document has an id that a vocabulary of `size` does not."""
  for task in mixture.tasks:
    reader = task.source.reader
    if isinstance(reader, token_files.TokenReader) and reader.largest_token >= size:
      raise ValueError(f'{task.name.split(":")[0]}: the files {", ".join(reader.version)} hold token {reader.largest_token}, but the model has '
                       f'only {size}; tokenize them with its own tokenizer.')


def examples(
    mixture: Any, *, seed: int, position: int = 0, split: str = 'train', num_epochs: int | None = None, shuffle: bool = True,
) -> Iterator[records.Example]:
  """Yield the examples of a mixture from `position` on.

  Skipping reads but does not tokenize: 20 to 30 microseconds an example on one core.

  Args:
    mixture: of `build_mixture`.
    seed: of the order; together with the mixture it decides everything.
    position: examples to skip.
    split: 'train' or 'heldout'.
    num_epochs: times that each task is repeated, until each example has come so often whatever the rates; None is without end.
    shuffle: False keeps each task in the order of its files.

  Raises:
    ValueError: an unknown split, a negative number, or a split without examples.
    RuntimeError: a file has changed since the mixture was built.
  """
  _check_split(split)
  if position < 0 or seed < 0 or (num_epochs is not None and num_epochs < 1):
    raise ValueError(f'position={position} and seed={seed} must be at least 0, num_epochs={num_epochs} at least 1, or None.')
  check_not_empty(mixture, split, is_endless=num_epochs is None)
  return _stream(mixture, seed=seed, position=position, split=split, num_epochs=num_epochs, shuffle=shuffle)


def check_not_empty(mixture: Any, split: str, *, is_endless: bool = False) -> None:
  """Raise ValueError if no task has examples in a split, or with `is_endless`, which draws from all of them, if one has none."""
  empty = [task.name.split(':')[0] for task in mixture.tasks if task.num_input_examples(split) == 0]
  if len(empty) == len(mixture.tasks) or (empty and is_endless):
    without = ', set eval_every_steps=0' if split == 'heldout' else ''
    raise ValueError(f'Split {split!r} of {", ".join(empty)} is empty, so there is nothing to draw; change heldout_fraction{without} or leave '
                     'the task out.')


def _stream(mixture: Any, *, seed: int, position: int, split: str, num_epochs: int | None, shuffle: bool) -> Iterator[records.Example]:
  _, tf = sources.import_seqio()
  # SeqIO's memory cache would fix the first epoch's order for all.
  dataset = mixture.get_dataset(
      split=split, seed=seed, shuffle=shuffle, num_epochs=num_epochs, try_in_mem_cache=False, trim_output_features=False)
  options = tf.data.Options()
  options.deterministic = True
  iterator = dataset.skip(position).with_options(options).as_numpy_iterator()
  while True:
    element = next(iterator, None)
    # Looked at after `next`: whatever comes out of order because its source ended early comes after the failure was noted.
    for task in mixture.tasks:
      if task.source.reader.failures:
        raise task.source.reader.failures[0]
    if element is None:
      return
    yield records.restore(element['example'], element['source'].decode())


def _reader(config: TaskConfig, schema: records.Schema) -> sources.Reader:
  if config.source == 'tfds':
    return sources.TfdsReader(sources.find_directories(config.paths), config.tfds_split, schema)
  files = sources.find_files(config.paths, sources.SUFFIXES[config.source])
  if config.source == 'npy':
    return token_files.TokenReader(files)
  if config.source == 'parquet':
    return sources.FileReader(files, lambda path: sources.read_parquet(path, schema))
  return sources.FileReader(files, sources.read_jsonl)


def _to_examples(name: str, schema: records.Schema, index: sources.Index) -> Any:
  """Return the preprocessor from {'record', 'row'} to {'example': canonical JSON, 'source': where it came from}."""
  _, tf = sources.import_seqio()

  def convert(lines, rows):
    parsed = [records.parse(line, schema, f'{name}:{index.describe(row)}') for line, row in zip(lines, rows, strict=True)]
    return np.array([records.canonical(example) for example in parsed], object), np.array([example.source for example in parsed], object)

  def convert_batch(batch):
    example, source = tf.numpy_function(convert, [batch['record'], batch['row']], [tf.string, tf.string])
    return {'example': tf.ensure_shape(example, [None]), 'source': tf.ensure_shape(source, [None])}

  def to_examples(dataset):
    # In batches: one call from TensorFlow into Python costs more than parsing a row.
    return dataset.batch(sources.BATCH_ROWS).map(convert_batch).unbatch()

  return to_examples


def _draw(datasets: list[Any], rates: list[float], seed: int) -> Any:
  """Interleave datasets, drawing each next one by rate, until all are exhausted."""
  _, tf = sources.import_seqio()
  cumulative = np.cumsum(np.asarray(rates, np.float64) / math.fsum(rates))
  cumulative[-1] = 1.0

  def draws():
    generator = np.random.Generator(np.random.Philox(seed))
    while True:
      yield np.searchsorted(cumulative, generator.random(1024), side='right')

  choices = tf.data.Dataset.from_generator(draws, output_signature=tf.TensorSpec([None], tf.int64)).unbatch()
  return tf.data.Dataset.choose_from_datasets(datasets, choices, stop_on_empty_dataset=False)


def _check_name(name: str) -> None:
  if not _NAME.fullmatch(name):
    raise ValueError(f'The name of a task must be letters, digits, "_" and ".", at least one; got {name!r}.')


def _check_split(split: str) -> None:
  if split not in sources.SPLITS:
    raise ValueError(f'split={split!r} is unknown; use one of {", ".join(sources.SPLITS)}.')


def _digest(*parts: Any) -> str:
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
