"""The domains by name. A domain's module is imported when it is asked for; 'package/module:function' names your own."""

from __future__ import annotations

from collections.abc import Mapping
import importlib

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
}
_FROM_PATH = ('word_problems/gsm8k', 'programs/mbpp', 'programs/humaneval')


def names() -> tuple[str, ...]:
  """Return every domain's name."""
  return tuple(_MAKERS)


def needs_path(name: str) -> bool:
  """Say whether a domain reads a data file of the user's."""
  return name in _FROM_PATH


def make_domain(name: str, path: str = '') -> Domain:
  """Return the domain of this name, or what the 'package/module:function' of your own makes; a path is the function's only argument.

  Raises:
    ValueError: an unknown name, or a path that is missing or not wanted.
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
  return make(path) if path else make()
