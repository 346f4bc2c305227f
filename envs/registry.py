"""The domains by name. A domain's module is imported when it is asked for; 'package/module:function' names your own."""

from __future__ import annotations

from collections.abc import Mapping
import importlib
import inspect
from types import MappingProxyType
from typing import Any

from envs.core import Domain

# Name -> module:function that makes it; those in _FROM_PATH read a file of the user's.
_MAKERS: Mapping[str, str] = {
    'arithmetic/integers': 'envs.domains.arithmetic:integers',
    'arithmetic/rationals': 'envs.domains.arithmetic:rationals',
    'arithmetic/python': 'envs.domains.arithmetic:with_python',
    'word_problems/generated': 'envs.domains.word_problems:generated',
    'word_problems/gsm8k': 'envs.domains.word_problems:gsm8k',
    'programs/generated': 'envs.domains.programs:generated',
    'programs/mbpp': 'envs.domains.programs:mbpp',
    'programs/humaneval': 'envs.domains.programs:humaneval',
    'planning/maze': 'envs.domains.planning:maze',
    'planning/hanoi': 'envs.domains.planning:hanoi',
    'planning/jugs': 'envs.domains.planning:jugs',
    'planning/lights': 'envs.domains.planning:lights',
    'longcontext/needle': 'envs.domains.longcontext:needle',
    'longcontext/multikey': 'envs.domains.longcontext:multikey',
    'longcontext/multivalue': 'envs.domains.longcontext:multivalue',
    'longcontext/multiquery': 'envs.domains.longcontext:multiquery',
    'longcontext/variables': 'envs.domains.longcontext:variables',
    'longcontext/common_words': 'envs.domains.longcontext:common_words',
    'longcontext/frequent_words': 'envs.domains.longcontext:frequent_words',
    'longcontext/hops': 'envs.domains.longcontext:hops',
    'longcontext/comparison': 'envs.domains.longcontext:comparison',
    'longcontext/latest': 'envs.domains.longcontext:latest',
    'longcontext/counting': 'envs.domains.longcontext:counting',
    'longcontext/table': 'envs.domains.longcontext:table',
    'longcontext/code': 'envs.domains.longcontext:code',
    'longcontext/timeline': 'envs.domains.longcontext:timeline',
    'longcontext/abstain': 'envs.domains.longcontext:abstain',
}
_FROM_PATH = ('word_problems/gsm8k', 'programs/mbpp', 'programs/humaneval')


def names() -> tuple[str, ...]:
  """Return every domain's name."""
  return tuple(_MAKERS)


def needs_path(name: str) -> bool:
  """Say whether a domain reads a data file of the user's."""
  return name in _FROM_PATH


def make_domain(name: str, path: str = '', options: Mapping[str, Any] = MappingProxyType({})) -> Domain:
  """Return the domain of this name, or what the 'package/module:function' of your own makes.

  Args:
    name: of the domain.
    path: its data file; the function's first argument where it is not ''.
    options: keyword arguments of the function, such as {'num_words': (1000, 10000)}.

  Raises:
    ValueError: an unknown name, a path that is missing or not wanted, or options that the domain does not have or allow.
    FileNotFoundError: the path is not there.
  """
  if name in _MAKERS and needs_path(name) != bool(path):
    wanted = 'needs the path of its data file' if needs_path(name) else 'generates its problems and takes no path'
    raise ValueError(f'domain {name!r} {wanted}, got path={path!r}.')
  if name not in _MAKERS and ':' not in name:
    raise ValueError(f"domain {name!r} is unknown; use one of {', '.join(_MAKERS)}, or 'package/module:function' for one of your own.")
  # A name of the user's has slashes, because keys of a config have no dots.
  module, function = _MAKERS.get(name, name.replace('/', '.')).split(':', 1)
  try:
    make = getattr(importlib.import_module(module), function)
  except (ModuleNotFoundError, AttributeError) as error:
    raise ValueError(f'domain {name!r}: {error}; the module must be importable from here and have that function.') from error
  arguments = (path,) if path else ()
  signature = inspect.signature(make)
  try:
    signature.bind(*arguments, **options)
  except TypeError as error:
    raise ValueError(f'domain {name!r} with options={dict(options)}: {error}; it takes {", ".join(signature.parameters) or "none"}.') from error
  return make(*arguments, **options)
