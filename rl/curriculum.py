"""Which problem comes next: domains by weight, levels by how much there is to learn at them.

Problems of a run are counted by an ordinal; the problem of an ordinal depends on the seed, the ordinal and the state alone. Under 'adaptive' a
level is drawn in proportion to p (1 - p), p its pass rate of late, so that effort goes where some samples pass and some fail; a floor keeps
every level in sight. The state is a few numbers a level and part of every checkpoint.

Deliberately absent: statistics of single problems (generated ones do not come twice).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
import logging
from typing import Any, Literal

import numpy as np

from envs import registry
from envs.core import Domain, Problem, Split
from envs.sandbox import client

_LOG = logging.getLogger(__name__)
_STREAM = 1
_MEMORY = 0.9  # Of the pass rate, at each group.
_FLOOR = 0.05


@dataclass(frozen=True)
class DomainConfig:
  """A domain to train on.

  Attributes:
    path: its data file, for domains that have one.
    options: arguments of the function that makes it, such as {'num_words': (1000, 10000)}.
    weight: relative number of problems drawn from it.
    levels: difficulties to draw from; () is all.
  """
  path: str = ''
  weight: float = 1.0
  levels: tuple[int, ...] = ()
  options: dict[str, Any] = field(default_factory=dict)

  def __post_init__(self):
    if not 0 < self.weight < float('inf'):
      raise ValueError(f'weight={self.weight} must be positive; leave a domain out that is not to be trained on.')


def make_domains(configs: Mapping[str, DomainConfig]) -> tuple[dict[str, Domain], dict[str, DomainConfig]]:
  """Return the domains, and the configs, by the domains' own names.

  Raises:
    ValueError: none is named, an unknown one, one twice, or a level or an option it does not have.
    FileNotFoundError: a data file is not there.
    SandboxUnavailable: a domain runs code, and there is no sandbox to run it in.
  """
  if not configs:
    raise ValueError(f'domains={{}} names none; give at least one of {", ".join(registry.names())}.')
  domains, by_name = {}, {}
  for name, config in configs.items():
    domain = registry.make_domain(name, config.path, config.options)
    if domain.name in domains:
      raise ValueError(f'domains names {domain.name!r} twice; give it once.')
    domains[domain.name], by_name[domain.name] = domain, config
    for level in config.levels:
      if not 1 <= level <= domain.source.num_levels:
        raise ValueError(f'domains.{name}.levels={config.levels}: level {level} is not one of 1 to {domain.source.num_levels}.')
  if any(domain.needs_sandbox for domain in domains.values()):
    _LOG.info('sandbox: %s', client.shared().tier)
  return domains, by_name


class Curriculum:
  """Draws problems; its state is `to_json()`."""

  def __init__(self, domains: Mapping[str, Domain], configs: Mapping[str, DomainConfig], kind: Literal['fixed', 'adaptive'], seed: int,
               state: Mapping[str, Any] | None = None):
    """Start fresh, or from the `to_json()` of another."""
    self._domains, self._kind, self._seed = domains, kind, seed
    self._places = [(name, level) for name, config in configs.items() for level in _levels(config, domains[name])]
    shares = {name: config.weight / len(_levels(config, domains[name])) for name, config in configs.items()}
    self._weights = np.array([shares[name] for name, _ in self._places])
    state = state or {}
    self.ordinal = int(state.get('ordinal', 0))
    self._num_drawn = {place: int(state.get('num_drawn', {}).get(_key(place), 0)) for place in self._places}
    self._pass_rate = {place: float(state.get('pass_rate', {}).get(_key(place), 0.5)) for place in self._places}

  def draw(self) -> tuple[int, Problem]:
    """Return the next (ordinal, problem)."""
    ordinal, self.ordinal = self.ordinal, self.ordinal + 1
    weights = self._weights
    if self._kind == 'adaptive':
      rates = np.array([self._pass_rate[place] for place in self._places])
      weights = weights * (rates * (1 - rates) + _FLOOR)
    rng = np.random.default_rng([self._seed, _STREAM, ordinal])
    place = self._places[int(rng.choice(len(self._places), p=weights / weights.sum()))]
    index, self._num_drawn[place] = self._num_drawn[place], self._num_drawn[place] + 1
    return ordinal, self._domains[place[0]].problem('train', place[1], index)

  def update(self, domain: str, level: int, rewards: Sequence[float]) -> None:
    """Take note of the rewards of a group."""
    place = (domain, level)
    self._pass_rate[place] = _MEMORY * self._pass_rate[place] + (1 - _MEMORY) * float(np.mean(rewards))

  def to_json(self) -> dict[str, Any]:
    """Return the state as JSON values."""
    return {'ordinal': self.ordinal, 'num_drawn': {_key(place): count for place, count in self._num_drawn.items()},
            'pass_rate': {_key(place): rate for place, rate in self._pass_rate.items()}}

  def metrics(self) -> dict[str, float]:
    """Return the pass rates of late by domain and level."""
    return {f'curriculum/pass_rate/{_key(place)}': rate for place, rate in self._pass_rate.items()}


def heldout_problems(domains: Mapping[str, Domain], configs: Mapping[str, DomainConfig], count: int) -> list[Problem]:
  """Return `count` held-out problems, domains and levels in turn, the same ones at every call; a collection gives no more than it has.

  Raises:
    ValueError: a domain without held-out problems.
  """
  return problems_in_turn(domains, configs, 'heldout', count)


def problems_in_turn(domains: Mapping[str, Domain], configs: Mapping[str, DomainConfig], split: Split, count: int,
                     first: int = 0) -> list[Problem]:
  """Return `count` problems of a split, domains and levels in turn, the same ones at every call; a collection gives no more than it has.

  `first` is the index at which generated problems start; those of a collection start at 0.

  Raises:
    ValueError: a domain without problems in the split.
  """
  places = [(name, level) for name, config in configs.items() for level in _levels(config, domains[name])]
  problems, index = [], 0
  while len(problems) < count and places:
    for name, level in list(places):
      size = domains[name].source.size(split, level)
      if size == 0:
        what, change = ('held-out', 'raise') if split == 'heldout' else ('training', 'lower')
        raise ValueError(f'Domain {name!r} has no {what} problems; {change} its held-out share, or give a larger file.')
      if size is not None and index >= size:
        places.remove((name, level))
      elif len(problems) < count:
        problems.append(domains[name].problem(split, level, index if size is not None else first + index))
    index += 1
  return problems


def _levels(config: DomainConfig, domain: Domain) -> tuple[int, ...]:
  return config.levels or tuple(range(1, domain.source.num_levels + 1))


def _key(place: tuple[str, int]) -> str:
  return f'{place[0]}/{place[1]}'
