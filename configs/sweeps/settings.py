"""Named settings of a sweep and how they are combined: pure functions over tuples of (name, changes).

The changes of a setting are pairs of a dotted key of the base config and a value. In a product a name is made of the names of its parts; where
two parts change the same key, the later one counts.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any

Changes = tuple[tuple[str, Any], ...]
Settings = tuple[tuple[str, Changes], ...]


def named(changes: Mapping[str, Mapping[str, Any]]) -> Settings:
  """Return settings by their names, as the variants of `configs/grpo.py` are written; {} is the base itself."""
  return tuple((name, tuple(of_name.items())) for name, of_name in changes.items())


def param(key: str, values: Sequence[Any]) -> Settings:
  """Return a setting for each value of one key, such as 'staleness=4'."""
  return tuple((f'{key.rsplit(".", 1)[-1]}={value}', ((key, value),)) for value in values)


def product(*parts: Settings) -> Settings:
  """Return every combination, the last part changing fastest."""
  return tuple(_joined(combination) for combination in itertools.product(*parts))


def zipped(*parts: Settings) -> Settings:
  """Return the first of each part together, then the second, and so on; ValueError if they are not equally many."""
  if len({len(part) for part in parts}) > 1:
    raise ValueError(f'zipped takes settings one from each part and got parts of {", ".join(str(len(part)) for part in parts)}; make them '
                     'equally many.')
  return tuple(_joined(combination) for combination in zip(*parts, strict=True))


def chain(*parts: Settings) -> Settings:
  """Return the settings of all parts, one after the other."""
  return tuple(itertools.chain(*parts))


def ladder(steps: Settings) -> Settings:
  """Return settings that each add their changes to those of all before; they keep their names."""
  return tuple((name, _merged([changes for _, changes in steps[:place + 1]])) for place, (name, _) in enumerate(steps))


def _joined(combination: Sequence[tuple[str, Changes]]) -> tuple[str, Changes]:
  return '-'.join(name for name, _ in combination), _merged([changes for _, changes in combination])


def _merged(parts: Sequence[Changes]) -> Changes:
  return tuple(dict(itertools.chain(*parts)).items())
