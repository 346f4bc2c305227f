"""Preference data in JSON lines: which of two replies to a prompt is better, or whether one reply is any good.

| a row has | and means |
|---|---|
| `prompt` (text) or `messages` (list of {"role", "content"}), `chosen`, `rejected` | the chosen reply is better than the rejected one |
| ... with `dimensions`, such as {"helpful": 2, "harmless": -1} | by how much the chosen reply is better in each; negative: worse |
| `prompt` or `messages`, `completion`, `label` (true or false) | the reply is desirable, or not |

A reply is a text, or a list of messages that go on with the assistant's. Other keys are ignored.

The files are read once, row by row, when `Preferences` is made: it keeps where each row lies, and reads rows when they are asked for, in any
order. A row that is no such object at all is an error. One that teaches nothing (a side missing or blank, two equal replies, a label that is
NaN, dimensions that cancel each other) is left out, and counted by why; or it is an error too, as the configuration says.

Held out are whole prompts, chosen by their content: no prompt is on both sides. Deliberately absent: mixing of several sources by rate,
compressed files (a row must be reachable by its place), and tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
import functools
import hashlib
import json
import math
import os
from typing import Any, Literal

import numpy as np

from rl.data import records, sources
from rl.data.records import Message

SPLITS = ('train', 'heldout')
_CHAT = records.schema('chat')


@dataclass(frozen=True)
class Comparison:
  """A prompt with one or two replies.

  Attributes:
    prompt: the messages before the replies.
    replies: (chosen, rejected), or the only one; each the messages that go on from the prompt.
    preferences: for each dimension by how much the chosen reply is better; of a single reply 1 (desirable) or -1.
    weight: how much the row counts; below 1 where its dimensions disagree.
    source: file and 1-based row, for messages.
  """
  prompt: tuple[Message, ...]
  replies: tuple[tuple[Message, ...], ...]
  preferences: tuple[float, ...]
  weight: float
  source: str


@dataclass(frozen=True)
class PreferenceFiles:
  """What is read.

  Attributes:
    paths: .jsonl files or globs.
    dimensions: name -> weight; a row's other dimensions are not looked at. {} takes the chosen reply as the better one, whatever they say.
    heldout_fraction: expected share of the distinct prompts that are 'heldout'; the rest is 'train'.
    bad_rows: what happens to a row that teaches nothing: it is left out and counted ('drop'), or an 'error'.
  """
  paths: tuple[str, ...]
  dimensions: dict[str, float] = field(default_factory=dict)
  heldout_fraction: float = 0.05
  bad_rows: Literal['drop', 'error'] = 'drop'

  def __post_init__(self):
    if isinstance(self.paths, str):
      raise TypeError(f'paths={self.paths!r} must be a tuple of strings, not one string; write ({self.paths!r},).')
    if not all(math.isfinite(weight) and weight > 0 for weight in self.dimensions.values()):
      raise ValueError(f'dimensions={self.dimensions} must all have a positive, finite weight; leave out one that does not count.')
    if not 0 <= self.heldout_fraction < 1:
      raise ValueError(f'heldout_fraction={self.heldout_fraction} must be at least 0 and below 1.')
    # Their order is that of a reward model's heads, so it must not depend on how a config was written.
    object.__setattr__(self, 'dimensions', dict(sorted(self.dimensions.items())))


class Preferences:
  """The rows of the files that teach something, in the order of the files.

  Attributes:
    rows: {'train', 'heldout'} -> int64 numbers of the rows of each split.
    left_out: why rows were left out -> how many.
    max_replies: most replies of a row: 2 if any row is a pair.
    fingerprint: SHA-256 of all rows that are kept, as they are read.
  """

  def __init__(self, config: PreferenceFiles, *, kept_apart: bool, singles: bool):
    """Read and check every row.

    Args:
      kept_apart: give a row's preference in each dimension of its own (reward models with a head for each); else dimensions are weighed
        together, and where the rejected reply comes out better the two change places.
      singles: whether rows with one reply and a label are allowed; pairs always are.

    Raises:
      FileNotFoundError: a path that is not there.
      ValueError: a row that is not what the table says, a row left out under bad_rows='error', or no row for training.
    """
    self._config, self._kept_apart, self._singles = config, kept_apart, singles
    self._paths = sources.find_files(config.paths, ('.jsonl',))
    self._files: list[int] = []
    self.left_out: Counter[str] = Counter()
    self.max_replies = 1
    places, prompts, is_heldout, digest = [], [], [], hashlib.sha256()
    try:
      for file, path in enumerate(self._paths):
        self._files.append(os.open(path, os.O_RDONLY))
        for number, (start, line) in enumerate(_lines(path), start=1):
          source = f'{path} row {number}'
          row = self._parse(line, source)
          if isinstance(row, str):
            self.left_out[row] += 1
            continue
          prompt = json.dumps(row.prompt, ensure_ascii=False).encode()
          places.append((file, number, start, len(line)))
          prompts.append(hashlib.blake2b(prompt, digest_size=8).digest())
          is_heldout.append(records.uniform(prompt) < config.heldout_fraction)
          self.max_replies = max(self.max_replies, len(row.replies))
          digest.update(json.dumps([row.prompt, row.replies, row.preferences, row.weight], ensure_ascii=False).encode())
      self._versions = [_version(file) for file in self._files]
      heldout = np.array(is_heldout, bool)
      self.rows = {'train': np.flatnonzero(~heldout), 'heldout': np.flatnonzero(heldout)}
      if not self.rows['train'].size:
        raise ValueError(f'{", ".join(self._paths)} have no row to train on: {len(heldout)} are held out, left out were '
                         f'{dict(self.left_out) or "none"}.')
    except BaseException:
      self.close()
      raise
    self._places = np.array(places, np.int64)
    self._prompts = np.array(prompts, 'V8')
    self.fingerprint = digest.hexdigest()

  def __getitem__(self, row: int) -> Comparison:
    """Read a row; RuntimeError if its file has changed since it was checked."""
    file, number, start, size = self._places[row].tolist()
    source = f'{self._paths[file]} row {number}'
    if _version(self._files[file]) != self._versions[file]:
      raise RuntimeError(f'{self._paths[file]} has changed since it was checked; restart the program.')
    return self._parse(os.pread(self._files[file], size, start), source)

  def at(self, position: int, seed: int) -> int:
    """Return the row at a position of the endless training stream: every row once an epoch, in an order drawn for each."""
    epoch, index = divmod(position, self.rows['train'].size)
    return int(self.rows['train'][_order(self.rows['train'].size, seed, epoch)[index]])

  @functools.cached_property
  def other_prompts(self) -> np.ndarray:
    """For each row the next one of its split, around the end, that has another prompt; -1 where all prompts are one."""
    found = np.full(len(self._places), -1)
    for rows in self.rows.values():
      prompts = self._prompts[rows]
      following = -1
      # Twice around from the back: `following` is then known at the first row too.
      for index in [*reversed(range(rows.size)), *reversed(range(rows.size))]:
        after = (index + 1) % rows.size
        if prompts[after] != prompts[index]:
          following = int(rows[after])
        found[rows[index]] = following
    return found

  @functools.cached_property
  def is_second_half(self) -> np.ndarray:
    """For each row whether its prompt is in the second of two halves, which are chosen by content and have nothing to do with the splits."""
    # The splits look at the first bits of the same hash.
    return self._prompts.view(np.uint8).reshape(-1, 8)[:, -1] % 2 == 1

  def close(self) -> None:
    """Close the files."""
    while self._files:
      os.close(self._files.pop())

  def __enter__(self) -> Preferences:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _parse(self, line: bytes, source: str) -> Comparison | str:
    """Return the row, or why it teaches nothing."""
    row = parse(line, source)
    if not isinstance(row, str):
      row = _weighed(row, self._config.dimensions, self._kept_apart, source)
    if isinstance(row, str) and self._config.bad_rows == 'error':
      raise ValueError(f"{source} teaches nothing: {row}. Remove or repair it, or leave such rows out with bad_rows='drop'.")
    if isinstance(row, Comparison) and len(row.replies) == 1 and not self._singles:
      raise ValueError(f"{source} has one reply and a label, and this loss compares two; use rows with 'chosen' and 'rejected', or a loss of "
                       'single replies (KTO).')
    return row


@dataclass(frozen=True)
class _Row:
  prompt: tuple[Message, ...]
  replies: tuple[tuple[Message, ...], ...]
  dimensions: Mapping[str, float] | None
  label: bool | None
  source: str


def parse(line: bytes, source: str) -> _Row | str:
  """Check one row; return it, or why it teaches nothing.

  Raises:
    ValueError: the row is not what the table of this module says; the message starts with `source`.
  """
  try:
    row = json.loads(line.decode())
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{source}: not JSON in UTF-8 ({error}); each row must be one JSON object.') from error
  if not isinstance(row, dict):
    raise ValueError(f'{source}: the row must be a JSON object, got {type(row).__name__}.')
  if ('prompt' in row) == ('messages' in row):
    raise ValueError(f'{source}: the row must have either "prompt" or "messages", got {", ".join(map(repr, row)) or "nothing"}.')
  is_pair, is_single = ('chosen' in row or 'rejected' in row), ('completion' in row or 'label' in row)
  if is_pair == is_single:
    raise ValueError(f'{source}: the row must have either "chosen" and "rejected", or "completion" and "label"; got '
                     f'{", ".join(map(repr, row))}.')
  sides = ('chosen', 'rejected') if is_pair else ('completion',)
  if any(_is_missing(row.get(side)) for side in sides) or (is_single and row.get('label') is None):
    return 'a side is missing'
  if any(isinstance(label, float) and not math.isfinite(label) for label in (row.get('label'), *_values(row.get('dimensions')))):
    return 'a label is not a finite number'
  if is_single and not isinstance(row['label'], bool):
    raise ValueError(f'{source}: label={row["label"]!r} must be true or false.')
  prompt = [{'role': 'user', 'content': row['prompt']}] if 'prompt' in row else row['messages']
  if not isinstance(prompt, list):
    raise ValueError(f'{source}: "messages" must be a list of messages, got {type(prompt).__name__}.')
  whole = [_conversation(prompt, row[side], f'{source}, {side}') for side in sides]
  replies = tuple(messages[len(prompt):] for messages in whole)
  if is_pair and replies[0] == replies[1]:
    return 'the replies are equal'
  return _Row(whole[0][:len(prompt)], replies, _dimensions(row.get('dimensions'), source), row.get('label'), source)


def _is_missing(reply: Any) -> bool:
  return reply is None or reply == [] or (isinstance(reply, str) and not reply.strip())


def _conversation(prompt: list, reply: Any, source: str) -> tuple[Message, ...]:
  """Return the checked messages of prompt and reply."""
  reply = reply if isinstance(reply, list) else [{'role': 'assistant', 'content': reply}]
  messages = records.parse(json.dumps({'messages': [*prompt, *reply]}).encode(), _CHAT, source).messages
  if messages[len(prompt)]['role'] != 'assistant':
    raise ValueError(f'{source}: the reply begins with role {messages[len(prompt)]["role"]!r}; it must begin with the assistant\'s message.')
  return messages


def _values(dimensions: Any) -> Iterable[Any]:
  return dimensions.values() if isinstance(dimensions, dict) else ()


def _dimensions(value: Any, source: str) -> dict[str, float] | None:
  if value is None:
    return None
  if not isinstance(value, dict) or not all(isinstance(score, (int, float)) and not isinstance(score, bool) for score in value.values()):
    raise ValueError(f'{source}: dimensions={value!r} must be an object of numbers, such as {{"helpful": 1, "harmless": -0.5}}.')
  return value


def _weighed(row: _Row, weights: Mapping[str, float], kept_apart: bool, source: str) -> Comparison | str:
  """Return the row with what its dimensions come to, or why it teaches nothing.

  Weighed together, a row counts by how far its dimensions agree: |sum of weight x preference| / sum of |weight x preference|.
  """
  if row.label is not None:
    return Comparison(row.prompt, row.replies, (1.0 if row.label else -1.0,), 1.0, source)
  if not weights:
    return Comparison(row.prompt, row.replies, (1.0,), 1.0, source)
  preferences = tuple(float((row.dimensions or {}).get(name, 0)) for name in weights)
  if not any(preferences):
    return 'no preference in any of the dimensions'
  if kept_apart:
    return Comparison(row.prompt, row.replies, preferences, 1.0, source)
  parts = [weight * preference for weight, preference in zip(weights.values(), preferences, strict=True)]
  total, size = math.fsum(parts), math.fsum(map(abs, parts))
  if abs(total) <= 1e-9 * size:
    return 'the dimensions cancel each other'
  replies = row.replies if total > 0 else row.replies[::-1]
  return Comparison(row.prompt, replies, (abs(total) / math.fsum(weights.values()),), abs(total) / size, source)


def _lines(path: str):
  """Yield (offset, line without its end) of a file; ValueError if it has none."""
  start = 0
  with open(path, 'rb') as file:
    for line in file:
      yield start, line.rstrip(b'\r\n')
      start += len(line)
  if not start:
    raise ValueError(f'{path} has no rows; give it at least one, or leave it out.')


def _version(file: int) -> tuple[int, int]:
  status = os.fstat(file)
  return status.st_size, status.st_mtime_ns


@functools.lru_cache(2)
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
  return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(size)
