"""What the texts of `longcontext` say and what is asked of them: one function a domain, from a random generator to a `Story`.

All names and numbers are drawn for the problem, so nothing but its text answers it. Statements that answer another question stand in the
same form all over the text: the right one is found by what it says, not by how it looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.domains.longcontext_text import Placed, Story, different_numbers, names, numbers, shuffled

NOT_STATED = 'not stated'
_SHARE = 0.5  # Of the words of a text of prose, in statements like the evidence.

# Each with the noun that the next one speaks of, and how the question describes it.
_LINKS = (('{} serves the guild of {}.', 'serves a guild', 'guild'),
          ('The guild of {} meets in the town of {}.', 'that guild meets in a town', 'town'),
          ('The town of {} lies on the river {}.', 'that town lies on a river', 'river'),
          ('The river {} flows into the lake {}.', 'that river flows into a lake', 'lake'),
          ('The lake {} belongs to the duke {}.', 'that lake belongs to a duke', 'duke'),
          ('The duke {} borrows from the bank of {}.', 'that duke borrows from a bank', 'bank'),
          ('The bank of {} trusts the widow {}.', 'that bank trusts a widow', 'widow'),
          ('The widow {} owns the ship {}.', 'that widow owns a ship', 'ship'))
MAX_LINKS = len(_LINKS)
_OFFICES = ('mayor', 'judge', 'doctor', 'teacher')
_COLUMNS = ('name', 'town', 'guild', 'number')
_FIRST_YEAR, _LAST_YEAR = 1300, 1999
MAX_MOVES = (_LAST_YEAR - _FIRST_YEAR) // 10
_COMMON, _RARE = 10, 3  # How often common words come, and others.
_DISTINCT = 50  # Words whose frequencies follow Zipf's law.


@dataclass(frozen=True)
class Request:
  """What is wanted of a text: its words, the range of depths for its evidence, and the domain's own dial (`longcontext` says which)."""
  num_words: int
  depth: tuple[float, float]
  hops: int

  def scatter(self, rng: np.random.Generator, statements: Sequence[str]) -> list[Placed]:
    """Give statements depths, in any order."""
    return [(float(depth), text) for depth, text in zip(rng.uniform(*self.depth, len(statements)), statements, strict=True)]

  def room(self, words_each: int, taken: int, share: float = _SHARE) -> int:
    """Return how many statements may be added beside `taken` ones of evidence, all of so many words."""
    return max(int(share * self.num_words) // words_each - taken, 1)


def needle(rng: np.random.Generator, request: Request) -> Story:
  """One number in prose."""
  (key,), (value,) = names(rng, 1), numbers(rng, 1)
  evidence = request.scatter(rng, [_number_of(key, value)])
  return Story(evidence, (), f'What is the secret number of {key}?', (value,))


def multikey(rng: np.random.Generator, request: Request) -> Story:
  """One number among those of other keys."""
  count = request.room(7, 1)
  (key, *keys), (value, *values) = names(rng, count + 1), numbers(rng, count + 1)
  others = [_number_of(*pair) for pair in zip(keys, values, strict=True)]
  return Story(request.scatter(rng, [_number_of(key, value)]), others, f'What is the secret number of {key}?', (value,))


def multivalue(rng: np.random.Generator, request: Request) -> Story:
  """All the numbers of a key; other keys have as many."""
  hops = request.hops
  count = -(-request.room(9, hops) // hops)
  (key, *keys), values = names(rng, count + 1), different_numbers(rng, hops)
  others = [_one_of(key_, value) for key_, value in zip(keys * hops, numbers(rng, count * hops), strict=True)]
  others = shuffled(rng, others)[:request.room(9, hops)]
  question = f'{key} has several secret numbers. What are they?'
  return Story(request.scatter(rng, [_one_of(key, value) for value in values]), others, question, tuple(values))


def multiquery(rng: np.random.Generator, request: Request) -> Story:
  """The numbers of several keys."""
  hops = request.hops
  count = request.room(7, hops)
  keys, values = names(rng, hops + count), different_numbers(rng, hops)
  others = [_number_of(*pair) for pair in zip(keys[hops:], numbers(rng, count), strict=True)]
  evidence = [_number_of(*pair) for pair in zip(keys[:hops], values, strict=True)]
  return Story(request.scatter(rng, evidence), others, f'What are the secret numbers of {_listed(keys[:hops])}?', tuple(values))


def variables(rng: np.random.Generator, request: Request) -> Story:
  """All variables that come to a value by `hops` assignments after the first; other chains stand between."""
  size = request.hops + 1
  count = max(request.room(4, size) // size, 1)
  variables_, value = names(rng, size * (count + 1)), int(rng.integers(1000, 10_000))
  values = rng.integers(1000, 9999, count)
  values += values >= value  # All but the one that is asked for.
  chains = [_assignments(variables_[size * k:size * (k + 1)], start) for k, start in enumerate([value, *values.tolist()])]
  # Each chain in its order, all of them mixed.
  order = np.argsort(np.sort(rng.random((count, size)), axis=1), axis=None).tolist()
  flat = [statement for chain in chains[1:] for statement in chain]
  evidence = list(zip(sorted(rng.uniform(*request.depth, size).tolist()), chains[0], strict=True))
  question = f'Which variables equal {value}, directly or by way of others?'
  return Story(evidence, [flat[place] for place in order], question, tuple(variables_[:size]))


def common_words(rng: np.random.Generator, request: Request) -> Story:
  """The words that come 10 times where all others come 3 times."""
  common = request.hops
  rare = (request.num_words - _COMMON * common) // _RARE
  return _word_list(rng, [_COMMON] * common + [_RARE] * rare, common)


def frequent_words(rng: np.random.Generator, request: Request) -> Story:
  """The most frequent words where frequencies follow Zipf's law."""
  top = request.num_words / sum(1 / rank for rank in range(1, _DISTINCT + 1))
  counts = [int(top / rank) for rank in range(1, _DISTINCT + 1)]
  return _word_list(rng, counts + [1] * (request.num_words - sum(counts)), request.hops)


def hops(rng: np.random.Generator, request: Request) -> Story:
  """The end of a chain of links, each a statement of its own."""
  links, size = _LINKS[:request.hops], request.hops + 1
  count = max(request.room(8, request.hops) // request.hops, 1)
  people = names(rng, size * (count + 1))
  chains = [[form.format(*people[start + k:start + k + 2]) for k, (form, _, _) in enumerate(links)] for start in range(0, len(people), size)]
  others = shuffled(rng, [statement for chain in chains[1:] for statement in chain])
  question = f'{people[0]} {"; ".join(text for _, text, _ in links)}. What is the name of that {links[-1][2]}?'
  return Story(request.scatter(rng, chains[0]), others, question, (people[request.hops],))


def comparison(rng: np.random.Generator, request: Request) -> Story:
  """The mayor of the largest or smallest of some towns: a comparison, then a step on."""
  compared = request.hops
  count = max(request.room(7, 2 * compared) // 2, 1)
  towns = names(rng, 2 * (compared + count))
  towns, mayors = towns[:compared + count], towns[compared + count:]
  sizes = different_numbers(rng, compared) + numbers(rng, count)
  is_largest = bool(rng.integers(2))
  chosen = sizes.index((max if is_largest else min)(sizes[:compared]))
  inhabitants = [f'The town of {town} has {size} inhabitants.' for town, size in zip(towns, sizes, strict=True)]
  ruled = [f'The town of {town} obeys mayor {mayor}.' for town, mayor in zip(towns, mayors, strict=True)]
  others = inhabitants[compared:] + [text for number, text in enumerate(ruled) if number != chosen]
  question = (f'Of the towns {_listed(towns[:compared])}, take the one with the {"most" if is_largest else "fewest"} inhabitants. '
              'Which mayor does it obey?')
  return Story(request.scatter(rng, [*inhabitants[:compared], ruled[chosen]]), shuffled(rng, others), question, (mayors[chosen],))


def latest(rng: np.random.Generator, request: Request) -> Story:
  """A fact that later notices replace: the last of `hops` counts."""
  versions = request.hops
  count = -(-request.room(10, versions) // versions)
  places, values = names(rng, count + 1), different_numbers(rng, versions)
  others = [_toll(place, value) for place, value in zip(places[1:] * versions, numbers(rng, count * versions), strict=True)]
  others = shuffled(rng, others)[:request.room(10, versions)]
  last = float(rng.uniform(*request.depth))
  earlier = list(zip(np.sort(rng.uniform(0, last, versions - 1)).tolist(), (_toll(places[0], value) for value in values), strict=False))
  question = f'The notices stand in the order they were given in, and a later one replaces those before it. What is the toll at {places[0]}?'
  return Story([(last, _toll(places[0], values[-1]))], others, question, (values[-1],), rivals=earlier)


def counting(rng: np.random.Generator, request: Request) -> Story:
  """How often something happened, from once to `hops` times."""
  times = 1 + int(rng.integers(request.hops))
  count = request.room(6, times)
  towns = names(rng, 2 + max(2 * count // (request.hops + 1), 1))
  starts = rng.integers(len(towns), size=times + count)
  ends = np.concatenate([np.zeros(times, int), rng.integers(1, len(towns), size=count)])
  # A cart that comes from its own town has come from the next one; towns are at least three.
  starts = np.where(starts == ends, (starts + 1) % len(towns), starts)
  statements = [f'A cart from {towns[a]} reached {towns[b]}.' for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
  return Story(request.scatter(rng, statements[:times]), statements[times:], f'How many carts reached {towns[0]}?', (str(times),))


def table(rng: np.random.Generator, request: Request) -> Story:
  """A cell of a table."""
  count = request.room(7, 1, share=1.0)
  cells = names(rng, 3 * (count + 1))
  rows = list(zip(cells[::3], cells[1::3], cells[2::3], numbers(rng, count + 1), strict=True))
  column = 1 + int(rng.integers(len(_COLUMNS) - 1))
  lines = [' | '.join(row) for row in rows]
  question = f'The columns are {", ".join(_COLUMNS)}. What is the {_COLUMNS[column]} in the row of {rows[0][0]}?'
  return Story(request.scatter(rng, lines[:1]), lines[1:], question, (rows[0][column],))


def code(rng: np.random.Generator, request: Request) -> Story:
  """What a function returns that calls others."""
  size = request.hops
  count = request.room(6 * size - 2, 1, share=1.0)
  functions = [name.lower() for name in names(rng, size * (count + 1))]
  steps = rng.integers(2, 100, size * (count + 1)).tolist()
  bases = rng.integers(1000, 10_000, count + 1).tolist()
  texts = []
  for place, (function, step) in enumerate(zip(functions, steps, strict=True)):
    is_last = place % size == size - 1
    texts.append(f'def {function}():\n  return ' + (str(bases[place // size]) if is_last else f'{functions[place + 1]}() + {step}'))
  value = bases[0] + sum(steps[:size - 1])
  return Story(request.scatter(rng, texts[:size]), shuffled(rng, texts[size:]), f'What does {functions[0]}() return?', (str(value),))


def timeline(rng: np.random.Generator, request: Request) -> Story:
  """Where somebody lived in a year, from dated moves that are told in no order."""
  moves = request.hops
  count = -(-request.room(6, moves) // moves)
  people, towns = names(rng, count + 1), names(rng, (count + 1) * moves)
  years = rng.integers(_FIRST_YEAR, _LAST_YEAR, count * moves).tolist()
  # Ten years apart at least, so that a year between two moves is left.
  own = (_FIRST_YEAR + 10 * np.sort(rng.choice(MAX_MOVES, moves, replace=False))).tolist()
  asked = int(rng.integers(moves))
  others = [_move(*some) for some in zip(people[1:] * moves, years, towns[moves:], strict=True)]
  others = shuffled(rng, others)[:request.room(6, moves)]
  evidence = request.scatter(rng, [_move(people[0], year, town) for year, town in zip(own, towns[:moves], strict=True)])
  question = f'Where did {people[0]} live at the end of {own[asked] + int(rng.integers(1, 10))}?'
  return Story(evidence, others, question, (towns[asked],))


def abstain(rng: np.random.Generator, request: Request) -> Story:
  """Who holds an office in a town; in a quarter of the problems the text tells of the town's other offices only."""
  is_stated = rng.random() >= 0.25
  count = -(-request.room(6, 4) // 3)
  towns = names(rng, count + 1)
  asked = int(rng.integers(len(_OFFICES)))
  held = [(towns[0], office) for office in range(len(_OFFICES)) if office != asked]
  # Other towns lack an office too, any of them.
  missing = rng.integers(len(_OFFICES), size=count).tolist()
  held += [(town, office) for town, gap in zip(towns[1:], missing, strict=True) for office in range(len(_OFFICES)) if office != gap]
  holders = names(rng, len(held) + 1)
  others = [_office(*some) for some in zip(held, holders[1:], strict=True)]
  evidence = request.scatter(rng, [_office((towns[0], asked), holders[0])] if is_stated else [])
  question = f'Who is the {_OFFICES[asked]} of {towns[0]}? If the text does not say, the answer is: {NOT_STATED}.'
  return Story(evidence, shuffled(rng, others), question, (holders[0] if is_stated else NOT_STATED,))


def _number_of(key: str, value: str) -> str:
  return f'The secret number of {key} is {value}.'


def _one_of(key: str, value: str) -> str:
  return f'One of the secret numbers of {key} is {value}.'


def _assignments(variables_: Sequence[str], value: int) -> list[str]:
  return [f'Let {variable} equal {source}.' for variable, source in zip(variables_, [value, *variables_], strict=False)]


def _toll(place: str, value: str) -> str:
  return f'From now on the toll at {place} is {value} coins.'


def _move(person: str, year: int, town: str) -> str:
  return f'In {year} {person} moved to {town}.'


def _office(place: tuple[str, int], holder: str) -> str:
  return f'The {_OFFICES[place[1]]} of {place[0]} is {holder}.'


def _listed(items: Sequence[str]) -> str:
  return items[0] if len(items) == 1 else f'{", ".join(items[:-1])} and {items[-1]}'


def _word_list(rng: np.random.Generator, counts: Sequence[int], asked: int) -> Story:
  words = [name.lower() for name in names(rng, len(counts))]
  text = [words[place] for place in rng.permutation(np.repeat(np.arange(len(words)), counts)).tolist()]
  return Story((), text, f'Which {asked} words come most often?', tuple(words[:asked]))
