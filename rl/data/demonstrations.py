"""Demonstrations of a domain: whole right conversations, tool calls and results included, as rows of training data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from envs.core import Domain, Message, Split


def demonstrations(domain: Domain, levels: Sequence[int], split: Split, count: int) -> Iterator[tuple[Message, ...]]:
  """Yield `count` different conversations, levels in turn; a level named twice comes twice as often.

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
      messages = domain.demonstration(split, level, index)
      if messages[0]['content'] in seen:
        continue
      seen.add(messages[0]['content'])
      yield messages
      if len(seen) == count:
        return
  raise ValueError(f'{domain.name} gave only {len(seen)} different problems of levels {levels}; lower the count or add levels.')


def plain(messages: Sequence[Message]) -> list[dict[str, str]]:
  """Return the messages as rows of data have them: role and content."""
  return [{'role': message['role'], 'content': message['content']} for message in messages]
