"""Gymnasium spaces for conversations: what an environment shows, and what a policy answers.

`gymnasium.spaces.Text` does not do: it holds no empty text, a fixed alphabet, and no structure. Deliberately absent: vectors of these
spaces; episodes differ in length, so each is stepped by itself.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from envs.core import Message

ROLES = ('system', 'user', 'assistant', 'tool')
# No bracket: a sample is plain text in every chat template and holds no tool call.
_ALPHABET = tuple('abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 .,:;!?#$%&*+-/=_\'"\n\téßñ中あ😀')
_MAX_SAMPLE_CHARS = 40


def _sample_text(rng: np.random.Generator) -> str:
  return ''.join(_ALPHABET[i] for i in rng.integers(len(_ALPHABET), size=rng.integers(_MAX_SAMPLE_CHARS + 1)))


def _is_message(value: Any) -> bool:
  if not isinstance(value, dict) or not {'role', 'content'} <= set(value) <= {'role', 'content', 'name'}:
    return False
  return value['role'] in ROLES and isinstance(value['content'], str) and isinstance(value.get('name', ''), str)


class MessageSpace(gymnasium.Space[tuple[Message, ...]]):
  """Tuples and lists of chat messages, the empty one included (the observation after a last reply)."""

  is_np_flattenable = False

  def sample(self, mask: None = None, probability: None = None) -> tuple[Message, ...]:
    """Return one to three messages of random text; no mask is supported."""
    _refuse_masks(mask, probability)
    roles = self.np_random.integers(len(ROLES), size=self.np_random.integers(1, 4))
    return tuple({'role': ROLES[i], 'content': _sample_text(self.np_random)} for i in roles)

  def contains(self, x: Any) -> bool:
    """Say whether x is a sequence of messages as `envs.core.Message` describes them, with no other key."""
    return isinstance(x, (tuple, list)) and all(map(_is_message, x))

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, MessageSpace)

  def __repr__(self) -> str:
    return 'MessageSpace()'


class ReplySpace(gymnasium.Space[str | dict[str, Any]]):
  """Any text, or {'content': text, 'truncated': bool} where truncated says that a token limit cut the text off."""

  is_np_flattenable = False

  def sample(self, mask: None = None, probability: None = None) -> str:
    """Return up to 40 random characters, without a tool call; no mask is supported."""
    _refuse_masks(mask, probability)
    return _sample_text(self.np_random)

  def contains(self, x: Any) -> bool:
    """Say whether x is a text or such a dict."""
    if not isinstance(x, dict):
      return isinstance(x, str)
    has_keys = {'content'} <= set(x) <= {'content', 'truncated'}
    return has_keys and isinstance(x['content'], str) and isinstance(x.get('truncated', False), bool)

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, ReplySpace)

  def __repr__(self) -> str:
    return 'ReplySpace()'


def _refuse_masks(mask: Any, probability: Any) -> None:
  if mask is not None or probability is not None:
    raise ValueError(f'mask={mask!r}, probability={probability!r}: text is sampled without masks; leave both None.')
