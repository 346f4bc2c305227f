"""Problems of a domain as rows of training data: different ones, levels in turn, and whole right conversations about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from envs.core import Domain, Message, Split


def demonstrations(domain: Domain, levels: Sequence[int], split: Split, count: int) -> Iterator[tuple[Message, ...]]:
  """Yield the demonstrations of `count` different problems, tool calls and results included; order and errors as of `different`."""
  return different(domain, levels, split, count, lambda level, index: domain.demonstration(split, level, index), lambda messages: messages)


def different(domain: Domain, levels: Sequence[int], split: Split, count: int, get: Callable[[int, int], Any],
              messages_of: Callable[[Any], Sequence[Message]]) -> Iterator[Any]:
  """Yield what `get(level, index)` makes of `count` different problems, levels in turn; a level named twice comes twice as often.

  Problems differ by the first of the messages that `messages_of` finds.

  Raises:
    ValueError: the domain has not so many.
  """
  seen: set[str] = set()
  next_index = dict.fromkeys(levels, 0)
  for _ in range(100 * count):
    for level in levels:
      index = next_index[level]
      next_index[level] += 1
      size = domain.source.size(split, level)
      if size is not None and index >= size:
        raise ValueError(f'{domain.name} has only {len(seen)} different problems of levels {levels} in split {split!r}; lower the count.')
      made = get(level, index)
      question = messages_of(made)[0]['content']
      if question in seen:
        continue
      seen.add(question)
      yield made
      if len(seen) == count:
        return
  raise ValueError(f'{domain.name} gave only {len(seen)} different problems of levels {levels}; lower the count or add levels.')


def plain(messages: Sequence[Message]) -> list[dict[str, str]]:
  """Return the messages as rows of data have them: role and content."""
  return [{'role': message['role'], 'content': message['content']} for message in messages]
