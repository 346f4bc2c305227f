"""The files of a supervised mixture: components by rate, each in strata of one difficulty that have equal shares of it.

A rate counts examples, not tokens: of 100 examples that a run draws, 20 are of a component with rate 0.20, however long they are. Within a
component each domain has its weight, and the levels of a domain have equal shares. Every stratum is a task of its own in the run's mixture
(`rl.data.tasks`), so the shares are those of what is drawn, however many rows there are of each.

A component comes from generated domains, or from files of the user's, one entry of `paths` for each level of difficulty. Generated tasks are
held out by their content (`envs.core`), and no row of a held-out one is written. Rows of files are compared with what is evaluated on and
left out where they overlap (`decontaminate`); what was left out and why is in the report.

Deliberately absent: judging difficulty (a generator or the user says it), and weighting by tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
import json
import math
import os
from pathlib import Path
import re
from typing import Any, Literal

from envs import registry
from envs.core import Domain
from rl.curriculum import DomainConfig
from rl.data import decontaminate, records, sources
from rl.data.decontaminate import Protected
from rl.data.demonstrations import demonstrations, plain
from rl.data.records import Message

_MOST_EXAMPLES = 20  # Of rows left out, that a report names.


@dataclass(frozen=True)
class TextFiles:
  """Files of conversations or documents: .jsonl or .jsonl.gz, and what a row is (see `records`)."""
  paths: tuple[str, ...] = ()
  schema: Literal['chat', 'qa', 'text'] = 'chat'
  fields: dict[str, str] = field(default_factory=dict)

  def __post_init__(self):
    if isinstance(self.paths, str):
      raise TypeError(f'paths={self.paths!r} must be a tuple of strings, not one string; write ({self.paths!r},).')
    records.schema(self.schema, self.fields)

  def rows(self) -> Iterator[tuple[str, tuple[Message, ...]]]:
    """Yield (path and 1-based row, messages) of all files; raises as `records.parse` and `sources.find_files`."""
    schema = records.schema(self.schema, self.fields)
    for path in sources.find_files(self.paths, sources.SUFFIXES['jsonl']):
      number = 0
      for batch in sources.read_jsonl(path):
        for line in batch:
          number += 1
          source = f'{path} row {number}'
          yield source, records.parse(line, schema, source).messages


@dataclass(frozen=True)
class ComponentConfig(TextFiles):
  """One part of a mixture.

  Attributes:
    rate: relative number of examples drawn from it.
    domains: it is demonstrations of these; or
    paths: rows of these files (a file or glob for each level of difficulty, in equal shares), which `schema` and `fields` describe.
    count: demonstrations written of all domains together.
  """
  rate: float = 1.0
  domains: dict[str, DomainConfig] = field(default_factory=dict)
  count: int = 4000

  def __post_init__(self):
    super().__post_init__()
    if bool(self.domains) == bool(self.paths):
      raise ValueError(f'domains={dict(self.domains)} and paths={self.paths}: give one of them; a component is generated or read.')
    if not (math.isfinite(self.rate) and self.rate > 0):
      raise ValueError(f'rate={self.rate} must be positive and finite; leave a component out that is not to be drawn.')
    if self.count < 1:
      raise ValueError(f'count={self.count} must be at least 1.')


@dataclass(frozen=True)
class MixtureConfig:
  """A supervised mixture.

  Attributes:
    components: by name.
    heldout_fraction: share of the rows, by content, that runs keep out of training to measure the loss on.
    against: name -> files of evaluations; rows of `paths` that overlap with them are left out.
    ngram: words in a row that count as an overlap.
  """
  components: dict[str, ComponentConfig]
  heldout_fraction: float = 0.05
  against: dict[str, TextFiles] = field(default_factory=dict)
  ngram: int = decontaminate.NGRAM

  def __post_init__(self):
    if not self.components:
      raise ValueError('components={} is empty; a mixture needs at least one.')
    for name in self.components:
      if not re.fullmatch(r'[A-Za-z0-9_]+', name):
        raise ValueError(f'components names {name!r}; a name must be letters, digits and "_", because files and tasks are called after it.')
    if not 0 <= self.heldout_fraction < 1:
      raise ValueError(f'heldout_fraction={self.heldout_fraction} must be at least 0 and below 1.')
    Protected(self.ngram)


@dataclass(frozen=True)
class Stratum:
  """A part of a component that is of one difficulty.

  Attributes:
    name: of its file and of its task.
    rate: relative number of examples drawn.
    count: rows to generate.
    domain, level: where they are generated; None and 0 for files.
    files: where they are read.
  """
  name: str
  component: str
  rate: float
  count: int = 0
  domain: Domain | None = None
  level: int = 0
  files: TextFiles | None = None


def strata(components: Mapping[str, ComponentConfig]) -> list[Stratum]:
  """Return the strata of a mixture.

  Raises:
    ValueError, FileNotFoundError: a domain that is unknown or refuses its options, a level that it does not have or that is named twice.
  """
  found = []
  for name, component in components.items():
    found += _of_files(name, component) if component.paths else _of_domains(name, component)
  names = [stratum.name for stratum in found]
  twice = next((name for name in names if names.count(name) > 1), None)
  if twice:
    raise ValueError(f'components {", ".join(components)} have two parts called {twice}; give one of them another name, or a level once.')
  return found


def _of_files(name: str, component: ComponentConfig) -> list[Stratum]:
  rate = component.rate / len(component.paths)
  return [Stratum(f'{name}_{level}', name, rate, level=level, files=TextFiles((path,), component.schema, component.fields))
          for level, path in enumerate(component.paths, start=1)]


def _of_domains(name: str, component: ComponentConfig) -> list[Stratum]:
  found, total = [], math.fsum(config.weight for config in component.domains.values())
  for domain_name, config in component.domains.items():
    domain = registry.make_domain(domain_name, config.path, config.options)
    levels = config.levels or tuple(range(1, domain.source.num_levels + 1))
    wrong = [level for level in levels if not 1 <= level <= domain.source.num_levels]
    if wrong:
      raise ValueError(f'components.{name}.domains.{domain_name}.levels={levels}: level {wrong[0]} is not one of 1 to '
                       f'{domain.source.num_levels}.')
    share = config.weight / total / len(levels)
    found += [Stratum(f'{name}_{re.sub("[^A-Za-z0-9]+", "_", domain.name)}_{level}', name, component.rate * share,
                      math.ceil(component.count * share), domain, level) for level in levels]
  return found


def tasks_and_rates(found: Sequence[Stratum], directory: str | Path, heldout_fraction: float) -> tuple[dict[str, Any], dict[str, float]]:
  """Return what a supervised run's `data.tasks` and `data.rates` are for the files of `write`."""
  tasks = {stratum.name: {'paths': (str(_path(directory, stratum)),), 'schema': 'chat', 'heldout_fraction': heldout_fraction}
           for stratum in found}
  return tasks, {stratum.name: stratum.rate for stratum in found}


def write(found: Sequence[Stratum], directory: str | Path, protected: Protected) -> dict[str, Any]:
  """Write a file of {"messages"} rows for each stratum, and return a report as JSON values.

  The report has for each stratum the rows written, of files also how many were read and left out by cause, and the first of those by name.

  Raises:
    ValueError: a row that is not what its schema says, a domain without enough problems, or a stratum of which no row is left.
  """
  Path(directory).mkdir(parents=True, exist_ok=True)
  report = {}
  for stratum in found:
    left_out: Counter[str] = Counter()
    examples: list[dict[str, str]] = []
    if stratum.files is None:
      rows = demonstrations(stratum.domain, [stratum.level], 'train', stratum.count)
    else:
      rows = _clean(stratum.files, protected, left_out, examples)
    num_written = _write_rows(_path(directory, stratum), rows)
    if not num_written:
      raise ValueError(f'component {stratum.component}: no row of {", ".join(stratum.files.paths)} is left, left out were {dict(left_out)}; '
                       'they are evaluated on, so train on others.')
    report[stratum.name] = {'component': stratum.component, 'level': stratum.level, 'rate': stratum.rate, 'rows': num_written,
                            'left_out': dict(left_out), 'examples_left_out': examples}
  return report


def _clean(files: TextFiles, protected: Protected, left_out: Counter[str], examples: list[dict[str, str]]) -> Iterator[tuple[Message, ...]]:
  for source, messages in files.rows():
    found = protected.find(messages)
    if found is None:
      yield messages
      continue
    why, other = found
    left_out[why] += 1
    if len(examples) < _MOST_EXAMPLES:
      examples.append({'row': source, 'why': why, 'shared_with': other})


def _write_rows(path: Path, rows: Iterator[tuple[Message, ...]]) -> int:
  partial, count = path.with_name(f'.{path.name}.partial'), 0
  with partial.open('w', encoding='utf-8') as file:
    for messages in rows:
      file.write(json.dumps({'messages': plain(messages)}) + '\n')
      count += 1
  os.replace(partial, path)
  return count


def _path(directory: str | Path, stratum: Stratum) -> Path:
  return Path(directory) / f'{stratum.name}.jsonl'
