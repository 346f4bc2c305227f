"""Keeps what is evaluated on out of what is trained on: the same question, or a long run of the same words.

Two texts are compared as their words: Unicode's compatibility forms are unified (NFKC), capitals and spacing do not count, nor does
punctuation, but signs of arithmetic do ('2 + 3' is not '2 * 3'). A conversation is contaminated if
- its question, the messages up to the assistant's first, is word for word one that is evaluated on ('same question'); or
- what its user or assistant says has a run of `ngram` words in common with what stands there in an evaluation ('shared words'); 13 words as in
  Brown et al. 2020, arXiv:2005.14165 appendix C.

System messages and the results of tools are not compared: many conversations share them. Deliberately absent: paraphrases and translations,
which need a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import itertools
import re
import unicodedata

from rl.data.records import Message

SAME_QUESTION, SHARED_WORDS = 'same question', 'shared words'
NGRAM = 13

_WORD = re.compile(r'\w+|[-+*/=<>%^×÷]')
_SPOKEN = ('user', 'assistant')


def words(text: str) -> list[str]:
  """Return the words of a text, as they are compared."""
  return _WORD.findall(unicodedata.normalize('NFKC', text).casefold())


class Protected:
  """What must not be trained on."""

  def __init__(self, ngram: int = NGRAM):
    """Start with nothing; `ngram` is the length, in words, of a run that counts as contamination.

    Raises:
      ValueError: ngram below 2, which common words alone would reach.
    """
    if ngram < 2:
      raise ValueError(f'ngram={ngram} must be at least 2 words; 13 is usual.')
    self._ngram = ngram
    self._questions: dict[tuple[str, ...], str] = {}
    self._runs: dict[int, str] = {}  # By their 64-bit hash: long texts have many.

  def add(self, messages: Sequence[Message], source: str) -> None:
    """Protect a conversation, or a question alone; `source` is where it comes from, for reports."""
    question = _question(messages)
    if question:
      self._questions.setdefault(question, source)
    for run in self._runs_of(messages):
      self._runs.setdefault(run, source)

  def find(self, messages: Sequence[Message]) -> tuple[str, str] | None:
    """Return (why a conversation is contaminated, the source of what it has in common), or None if it is clean."""
    question = _question(messages)
    if question in self._questions:
      return SAME_QUESTION, self._questions[question]
    found = next((run for run in self._runs_of(messages) if run in self._runs), None)
    return None if found is None else (SHARED_WORDS, self._runs[found])

  def _runs_of(self, messages: Sequence[Message]) -> Iterator[int]:
    for message in messages:
      if message['role'] in _SPOKEN:
        spoken = words(message['content'])
        for start in range(len(spoken) - self._ngram + 1):
          yield hash(tuple(spoken[start:start + self._ngram]))


def _question(messages: Sequence[Message]) -> tuple[str, ...]:
  before = itertools.takewhile(lambda message: message['role'] != 'assistant', messages)
  return tuple(word for message in before if message['role'] == 'user' for word in words(message['content']))
