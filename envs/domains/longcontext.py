"""Questions that need a long text: 15 domains with the length of the text, the depth of the evidence and the number of hops as dials.

A level is a length: `num_words` gives one length a level, in words between white space, because environments know no tokenizer. Texts are
made up from nothing but the seed, in time and memory linear in their length, and are answered by nothing but what they say. Every problem
records where its evidence lies (`envs.core.Evidence`), for accuracy by position and by length (`rl.evals.evidence`).

The options of a domain are the arguments of its function here:

    num_words: words of the text, a level each: 1000 or (1000, 10000, 100000).
    depth: (low, high), the part of the text in which the evidence lies; 0 is the start and 1 the end. (0.5, 0.5) is the middle.
    hops: how many pieces of evidence are joined; each domain says of what. One number, or one a level.

The kinds are those of RULER (Hsieh et al. 2024, arXiv:2404.06654) and of reading over several documents; all texts are this module's own.

Deliberately absent: texts by others, and answers that need knowledge from outside the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from envs.core import Domain, Evidence, Generated, Task
from envs.domains import longcontext_stories as stories
from envs.domains import longcontext_text as texts
from envs.domains.longcontext_stories import Request
from envs.domains.longcontext_text import Story
from envs.verifiers.values import ValuesVerifier

PerLevel = int | Sequence[int]
Depth = tuple[float, float]
LENGTHS = (100, 200, 400, 800, 1600)
ANYWHERE = (0.0, 1.0)

_CHANCE = 0.02  # Names and numbers of four digits.


def needle(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE) -> Domain:
  """Make the domain of one number in prose, the only one there is."""
  return _make('needle', stories.needle, num_words, depth, words_each=7)


def multikey(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE) -> Domain:
  """Make the domain of one number among those of many other keys."""
  return _make('multikey', stories.multikey, num_words, depth, words_each=7)


def multivalue(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE, hops: PerLevel = 3) -> Domain:
  """Make the domain of all `hops` numbers of a key."""
  return _make('multivalue', stories.multivalue, num_words, depth, hops, words_each=9)


def multiquery(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE, hops: PerLevel = 3) -> Domain:
  """Make the domain of the numbers of `hops` keys."""
  return _make('multiquery', stories.multiquery, num_words, depth, hops, words_each=7)


def variables(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE, hops: PerLevel = 3) -> Domain:
  """Make the domain of all variables that come to a value by `hops` assignments after the first."""
  return _make('variables', stories.variables, num_words, depth, hops, words_each=4)


def common_words(num_words: PerLevel = LENGTHS, hops: PerLevel = 3) -> Domain:
  """Make the domain of the `hops` words that come 10 times in a list where all others come 3 times."""
  return _make('common_words', stories.common_words, num_words, ANYWHERE, hops, words_each=10, separator=' ', has_prose=False)


def frequent_words(num_words: PerLevel = LENGTHS, hops: PerLevel = 3) -> Domain:
  """Make the domain of the `hops` most frequent words of a list whose frequencies follow Zipf's law."""
  lengths, wanted = _per_level('num_words', num_words), _per_level('hops', hops)
  for length, count in _together(lengths, wanted):
    # Ranks `count` and `count` + 1 of 50 are one occurrence apart at least.
    if length < 5 * count * (count + 1):
      raise ValueError(f'longcontext/frequent_words: num_words={length} is too short to rank hops={count} words; '
                       f'use {5 * count * (count + 1)} words or more, or fewer hops.')
  return _make('frequent_words', stories.frequent_words, num_words, ANYWHERE, hops, words_each=1, separator=' ', has_prose=False)


def hops(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE, hops: PerLevel = 3) -> Domain:
  """Make the domain of chains of `hops` links, 8 at most: a person's guild, the guild's town, the town's river, and so on."""
  if max(_per_level('hops', hops)) > stories.MAX_LINKS:
    raise ValueError(f'longcontext/hops: hops={hops} must be at most {stories.MAX_LINKS}, the kinds of links there are.')
  return _make('hops', stories.hops, num_words, depth, hops, words_each=8)


def comparison(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE, hops: PerLevel = 3) -> Domain:
  """Make the domain of the mayor of the largest or smallest of `hops` towns: a comparison, and a step on."""
  return _make('comparison', stories.comparison, num_words, depth, hops, words_each=7)


def latest(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE, hops: PerLevel = 3) -> Domain:
  """Make the domain of a fact told `hops` times, each time otherwise: the last counts, and is the evidence."""
  return _make('latest', stories.latest, num_words, depth, hops, words_each=10)


def counting(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE, hops: PerLevel = 6) -> Domain:
  """Make the domain of how often something happened, from once to `hops` times, all equally likely."""
  # The most frequent count of a sample may be somewhat above its share.
  chance = min(1.0, 1.5 / min(_per_level('hops', hops)))
  return _make('counting', stories.counting, num_words, depth, hops, words_each=6, chance=chance)


def table(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE) -> Domain:
  """Make the domain of one cell of a table; the text is the table."""
  return _make('table', stories.table, num_words, depth, words_each=7, separator='\n', has_prose=False)


def code(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE, hops: PerLevel = 3) -> Domain:
  """Make the domain of what a Python function returns that is computed by `hops` functions; the text is the program."""
  return _make('code', stories.code, num_words, depth, hops, words_each=6, separator='\n\n', has_prose=False)


def timeline(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE, hops: PerLevel = 3) -> Domain:
  """Make the domain of where somebody lived in a year, from `hops` dated moves told in no order."""
  if max(_per_level('hops', hops)) > stories.MAX_MOVES:
    raise ValueError(f'longcontext/timeline: hops={hops} must be at most {stories.MAX_MOVES}, as many moves as have years of their own.')
  return _make('timeline', stories.timeline, num_words, depth, hops, words_each=6)


def abstain(num_words: PerLevel = LENGTHS, depth: Depth = ANYWHERE) -> Domain:
  """Make the domain of facts of which a quarter are not in the text; the answer is then 'not stated'."""
  return _make('abstain', stories.abstain, num_words, depth, words_each=12, chance=0.32)


def _make(kind: str, tell: Callable[[np.random.Generator, Request], Story], num_words: PerLevel, depth: Depth, hops: PerLevel = 1, *,
          words_each: int, separator: str = '', has_prose: bool = True, chance: float = _CHANCE) -> Domain:
  """Make a domain of the stories that `tell` tells, `words_each` words a statement; without a separator, text is prose in paragraphs."""
  name = f'longcontext/{kind}'
  lengths = _per_level('num_words', num_words)
  levels = _together(lengths, _per_level('hops', hops))
  low, high = _range(depth)
  for length, count in levels:
    # The evidence, and as much again that is like it.
    least = words_each * (2 * count + 2)
    if length < least:
      raise ValueError(f'{name}: num_words={length} is too short for hops={count}; use {least} words or more, or fewer hops.')

  def make(rng: np.random.Generator, level: int) -> Task:
    length, count = levels[level - 1]
    story = tell(rng, Request(length, (low, high), count))
    statements, positions = texts.weave(rng, story, length, has_prose=has_prose)
    text = separator.join(statements) if separator else texts.paragraphs(statements)
    return _task(story, text, Evidence(length, tuple(positions)))

  return Domain(name, 1, Generated(name, 1, make, len(levels)), ValuesVerifier(), chance=chance)


def _task(story: Story, text: str, evidence: Evidence) -> Task:
  count = len(story.answer)
  form = 'the answer' if count == 1 else f'all {count} answers separated by commas'
  question = f'{text}\n\n{story.question}\nAnswer from the text alone: "####", then {form}, written as in the text.\n'
  told = [statement for _, statement in story.evidence]
  reply = '\n'.join([*told, f'#### {", ".join(story.answer)}'])
  return Task(question, story.answer, ({'role': 'assistant', 'content': reply},), '\n'.join([story.question, *story.answer, *told]), evidence)


def _range(depth: Depth) -> Depth:
  if not isinstance(depth, (list, tuple)) or len(depth) != 2 or not all(type(end) in (int, float) for end in depth) or (
      not 0 <= depth[0] <= depth[1] <= 1):
    raise ValueError(f'depth={depth!r} must be (low, high) with 0 <= low <= high <= 1, such as (0.5, 0.5) for the middle.')
  return float(depth[0]), float(depth[1])


def _per_level(name: str, value: PerLevel) -> tuple[int, ...]:
  values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
  if not values or not all(type(one) is int and one >= 1 for one in values):
    raise ValueError(f'{name}={value!r} must be a whole number of at least 1, or one for each level.')
  return values


def _together(lengths: tuple[int, ...], hops: tuple[int, ...]) -> list[tuple[int, int]]:
  """Return (length, hops) of each level."""
  if len(hops) not in (1, len(lengths)) and len(lengths) != 1:
    raise ValueError(f'num_words={lengths} has {len(lengths)} levels and hops={hops} {len(hops)}; give one number, or one for each level.')
  count = max(len(lengths), len(hops))
  return list(zip(lengths if len(lengths) == count else lengths * count, hops if len(hops) == count else hops * count, strict=True))
