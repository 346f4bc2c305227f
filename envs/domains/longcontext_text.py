"""Long texts in time and memory linear in their length: invented names, prose that says nothing, and statements woven into it at given depths.

Lengths are in words, the pieces between white space, because environments know no tokenizer; how many tokens a word takes is the model's
affair (about 1.3 for prose, 2 to 3 for invented names). Prose has neither names nor digits, so it never states or contradicts a fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import itertools

import numpy as np

Placed = tuple[float, str]  # A depth, from 0 at the start of the text to 1 at its end, and the statement that stands there.

_SYLLABLES = [consonant + vowel for consonant in 'bdhlmnprstvw' for vowel in 'aeio']
_PAIRS = [first + second for first in _SYLLABLES for second in _SYLLABLES]
_HEADS = [pair.capitalize() for pair in _PAIRS]
_FEW_NAMES = 10_000  # Up to here names have three syllables; beyond, a fourth keeps them far from running out.

_NOUNS = ('baker', 'barn', 'basket', 'bell', 'boat', 'bridge', 'broom', 'candle', 'carpenter', 'cellar', 'child', 'cloak', 'dog', 'door',
          'farmer', 'fence', 'field', 'fisherman', 'forge', 'garden', 'gate', 'goat', 'hammer', 'harbor', 'hedge', 'hill', 'horse', 'kettle',
          'ladder', 'lantern', 'letter', 'meadow', 'miller', 'mirror', 'orchard', 'painter', 'path', 'pond', 'roof', 'sailor', 'shepherd',
          'shutter', 'singer', 'stable', 'stove', 'street', 'tailor', 'tower', 'traveler', 'wagon', 'wall', 'well', 'window', 'wind')
_VERBS = ('admired', 'avoided', 'blocked', 'called', 'carried', 'copied', 'covered', 'crossed', 'described', 'drew', 'feared', 'followed',
          'forgot', 'found', 'guarded', 'heard', 'hid', 'kept', 'left', 'liked', 'lost', 'measured', 'mended', 'missed', 'moved', 'needed',
          'noticed', 'painted', 'passed', 'praised', 'reached', 'remembered', 'saved', 'saw', 'shook', 'touched', 'turned', 'watched')
_ADJECTIVES = ('bare', 'big', 'blue', 'bright', 'broken', 'calm', 'clean', 'cold', 'crooked', 'dark', 'deep', 'dry', 'faint', 'flat', 'gentle',
               'gray', 'green', 'heavy', 'high', 'hollow', 'late', 'light', 'little', 'lonely', 'long', 'loud', 'low', 'narrow', 'new', 'pale',
               'patient', 'plain', 'proud', 'quiet', 'red', 'rough', 'round', 'short', 'slow', 'small', 'soft', 'tall', 'thin', 'warm', 'wide')
_SETTINGS = ('behind the mill', 'below the bank', 'beside the road', 'beyond the wood', 'by the shore', 'during the storm', 'in the evening',
             'in the morning', 'near the chapel', 'on the slope', 'over the water', 'past the quarry', 'through the fog', 'toward the coast',
             'under the moon', 'without a word')
_STARTS = tuple(setting.capitalize() for setting in _SETTINGS)
# Slots: 0 and 1 nouns, 2 a verb, 3 and 4 adjectives, 5 a setting, 6 a setting that begins the sentence.
_SENTENCES = ('The {3} {0} {2} the {1} {5}.', '{6}, the {0} {2} a {4} {1}.', 'Nobody {2} the {3} {0}, and the {1} was {4}.',
              'After that the {0} {2} the {1} {5}.', 'The {0} was {3}, but the {4} {1} {2} it {5}.')
# Every setting has three words and every other slot one.
_LENGTHS = np.array([len(form.format(0, 0, 0, 0, 0, _SETTINGS[0], _STARTS[0]).split()) for form in _SENTENCES])
_SENTENCES_OF_A_PARAGRAPH = 7


@dataclass(frozen=True)
class Story:
  """What a text says and what is asked of it.

  Attributes:
    evidence: the statements that the answer needs; () where it needs the whole text, or where the text does not say.
    others: statements like the evidence that the answer does not need; they keep their order.
    question, answer: what is asked, and the values that answer it, in any order.
    rivals: as `others`, but at given depths.
  """
  evidence: Sequence[Placed]
  others: Sequence[str]
  question: str
  answer: tuple[str, ...]
  rivals: Sequence[Placed] = ()


def names(rng: np.random.Generator, count: int) -> list[str]:
  """Return different invented names of six letters, or of eight where more than 10,000 are wanted."""
  last = _SYLLABLES if count <= _FEW_NAMES else _PAIRS
  codes = rng.choice(len(_HEADS) * len(last), count, replace=False)
  heads, tails = (codes // len(last)).tolist(), (codes % len(last)).tolist()
  return [_HEADS[head] + last[tail] for head, tail in zip(heads, tails, strict=True)]


def numbers(rng: np.random.Generator, count: int) -> list[str]:
  """Return numbers of four digits, which may repeat."""
  return list(map(str, rng.integers(1000, 10_000, count).tolist()))


def different_numbers(rng: np.random.Generator, count: int) -> list[str]:
  """Return different numbers of four digits."""
  return [str(1000 + code) for code in rng.choice(9000, count, replace=False).tolist()]


def shuffled(rng: np.random.Generator, statements: Sequence[str]) -> list[str]:
  """Return the statements in random order."""
  return [statements[place] for place in rng.permutation(len(statements)).tolist()]


def prose(rng: np.random.Generator, num_words: int) -> list[str]:
  """Return sentences that fill `num_words` words but for less than a sentence."""
  kinds = rng.integers(len(_SENTENCES), size=max(num_words, 0) // int(_LENGTHS.min()))
  count = int(np.searchsorted(np.cumsum(_LENGTHS[kinds]), num_words, side='right'))
  words = (_NOUNS, _NOUNS, _VERBS, _ADJECTIVES, _ADJECTIVES, _SETTINGS)
  slots = zip(*(rng.integers(len(some), size=count).tolist() for some in words), strict=True)
  return [_SENTENCES[kind].format(_NOUNS[a], _NOUNS[b], _VERBS[c], _ADJECTIVES[d], _ADJECTIVES[e], _SETTINGS[f], _STARTS[f])
          for kind, (a, b, c, d, e, f) in zip(kinds[:count].tolist(), slots, strict=True)]


def weave(rng: np.random.Generator, story: Story, num_words: int, *, has_prose: bool) -> tuple[list[str], list[float]]:
  """Return the statements of a text of at most `num_words` words, and where each piece of evidence ended up.

  A position is the share of the other words that stand before the evidence: 0 at the start of the text, 1 at its end.

  Args:
    rng: orders what has no place of its own.
    story: what is said.
    num_words: of the whole text.
    has_prose: fill with prose what the story's statements leave; otherwise there is nothing else in the text.
  """
  marked = [(depth, text, number) for number, (depth, text) in enumerate(story.evidence)] + [(depth, text, -1) for depth, text in story.rivals]
  others = list(story.others)
  if has_prose:
    taken = sum(_num_words(others)) + sum(_num_words([text for _, text, _ in marked]))
    others = _merge(rng, others, prose(rng, num_words - taken))
  # Rivals first where depths are equal: what replaces something comes after it.
  marked.sort(key=lambda entry: (entry[0], entry[2]))
  statements, found, start = [], [0] * len(story.evidence), 0
  for depth, text, number in marked:
    end = round(depth * len(others))
    statements += others[start:end]
    start = max(start, end)
    if number >= 0:
      found[number] = len(statements)
    statements.append(text)
  statements += others[start:]
  sizes = _num_words(statements)
  before = list(itertools.accumulate(sizes, initial=0))
  return statements, [round(before[place] / max(before[-1] - sizes[place], 1), 4) for place in found]


def paragraphs(sentences: Sequence[str]) -> str:
  """Join sentences, a few to a line."""
  step = _SENTENCES_OF_A_PARAGRAPH
  return '\n'.join(' '.join(sentences[start:start + step]) for start in range(0, len(sentences), step))


def _num_words(texts: Sequence[str]) -> list[int]:
  return [len(text.split()) for text in texts]


def _merge(rng: np.random.Generator, first: Sequence[str], second: Sequence[str]) -> list[str]:
  """Mix two lists of statements at random; each keeps its order."""
  is_first = np.zeros(len(first) + len(second), bool)
  is_first[rng.choice(len(is_first), len(first), replace=False)] = True
  sources = iter(second), iter(first)
  return [next(sources[here]) for here in is_first.tolist()]
