"""Configuration as frozen records: built strictly from an `ml_collections.ConfigDict`, written back as plain JSON.

The annotations of a dataclass are its schema. `build` consumes exactly the fields that the record declares, so a key that nobody reads is
an unknown key, and an unknown key is an error.

Deliberately absent: conversion of strings (`ml_collections` flags already parse the command line), and merging of several configs.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import difflib
import types
import typing
from typing import Any, TypeVar

import ml_collections
from ml_collections import config_dict

ABSENT = '(absent)'

Record = TypeVar('Record')

_SCALARS = (bool, int, float, str)
_MAPPINGS = (dict, Mapping)


def build(cls: type[Record], config: ml_collections.ConfigDict | Mapping[str, Any], path: str = 'config') -> Record:
  """Build the frozen dataclass `cls` from `config`, recursively and strictly.

  Fields may be `bool`, `int`, `float` (an int is accepted), `str`, `X | None`, `Literal[...]`, `tuple[X, ...]`, `tuple[X, Y]`,
  `dict[str, X]` and dataclasses; `Any` takes plain JSON over unchecked, for a reader who builds it. A key may be missing only where its
  field has a default.

  Args:
    cls: the dataclass to build.
    config: the values, one key a field.
    path: dotted name of `config`, which starts every message.

  Raises:
    ValueError: an unknown key, a missing key, a value of the wrong type, or a value that the record itself refuses.
    TypeError: a field's annotation is none of the above, which is a mistake in the record and not in the config.
  """
  if not _is_mapping(config):
    raise ValueError(f'{path}={config!r} must be a mapping with the keys of {cls.__name__}: {", ".join(_fields(cls))}.')
  fields = _fields(cls)
  for key in config:
    if key not in fields:
      close = difflib.get_close_matches(str(key), fields, n=1)
      hint = f'did you mean {path}.{close[0]}? ' if close else ''
      raise ValueError(f'{path}.{key}={config[key]!r} is not a known key; {hint}{cls.__name__} has {", ".join(fields)}.')
  values = {}
  for name, (annotation, is_required) in fields.items():
    if name in config and not _is_unset_placeholder(config, name):
      values[name] = _convert(annotation, config[name], f'{path}.{name}')
    elif is_required:
      raise ValueError(f'{path}.{name} is missing; set it to {_describe(annotation)}.')
  try:
    return cls(**values)
  except (ValueError, TypeError) as error:
    raise ValueError(f'{path}: {error}') from error


def to_json(record: Any, path: str = 'config') -> Any:
  """Return the record, or any part of one, as plain JSON values; `build` of the result gives an equal record.

  Raises:
    TypeError: a value that JSON cannot hold, with its dotted path.
  """
  if dataclasses.is_dataclass(record) and not isinstance(record, type):
    return {field.name: to_json(getattr(record, field.name), f'{path}.{field.name}') for field in dataclasses.fields(record)}
  if _is_mapping(record):
    for key in record:
      if not isinstance(key, str):
        raise TypeError(f'{path} has the key {key!r} of type {type(key).__name__}; keys must be str.')
    return {key: to_json(record[key], f'{path}.{key}') for key in record}
  if isinstance(record, (tuple, list)):
    return [to_json(value, f'{path}[{index}]') for index, value in enumerate(record)]
  if record is None or isinstance(record, _SCALARS):
    return record
  raise TypeError(f'{path}={record!r} is a {type(record).__name__}; JSON holds None, bool, int, float, str, lists and mappings.')


def difference(config: Any, base: Any) -> dict[str, tuple[Any, Any]]:
  """Return {dotted key: (value in base, value in config)} for every value that differs.

  Both may be records, ConfigDicts or their JSON. A key that only one side has counts as `ABSENT` on the other.
  """
  changed = {}

  def compare(new: Any, old: Any, path: str) -> None:
    if isinstance(new, dict) and isinstance(old, dict):
      for key in [*old, *(key for key in new if key not in old)]:
        compare(new.get(key, ABSENT), old.get(key, ABSENT), f'{path}.{key}' if path else key)
    elif new != old or isinstance(new, bool) != isinstance(old, bool):
      changed[path] = (old, new)

  compare(to_json(config), to_json(base), '')
  return changed


def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
  """Return {name: (annotation, is_required)} in declaration order."""
  if not (dataclasses.is_dataclass(cls) and isinstance(cls, type)):
    raise TypeError(f'{cls!r} is not a dataclass.')
  annotations = typing.get_type_hints(cls)
  missing = dataclasses.MISSING
  return {
      field.name: (annotations[field.name], field.default is missing and field.default_factory is missing)
      for field in dataclasses.fields(cls)
      if field.init
  }


def _convert(annotation: Any, value: Any, path: str) -> Any:
  if dataclasses.is_dataclass(annotation):
    return build(annotation, value, path)
  if annotation is Any:
    return to_json(value, path)
  if annotation in _SCALARS:
    return _scalar(annotation, value, path)
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in (typing.Union, types.UnionType):
    return _optional(annotation, arguments, value, path)
  if origin is typing.Literal:
    return _literal(annotation, arguments, value, path)
  if origin is tuple:
    return _tuple(annotation, arguments, value, path)
  if origin in _MAPPINGS and arguments[0] is str:
    return _dict(annotation, arguments[1], value, path)
  raise TypeError(f'{path} is declared as {annotation!r}, which a config cannot hold; allowed are bool, int, float, str, '
                  'X | None, Literal, tuple, dict[str, X], Any and dataclasses.')


def _scalar(annotation: type, value: Any, path: str) -> Any:
  # bool is a subclass of int, so only the exact type tells them apart.
  if type(value) is annotation:
    return value
  if annotation is float and type(value) is int:
    return float(value)
  raise _wrong_type(annotation, value, path)


def _optional(annotation: Any, arguments: tuple[Any, ...], value: Any, path: str) -> Any:
  inner = [argument for argument in arguments if argument is not types.NoneType]
  if len(inner) != 1 or len(arguments) != 2:
    raise TypeError(f'{path} is declared as {annotation!r}; the only union a config can hold is X | None.')
  return None if value is None else _convert(inner[0], value, path)


def _literal(annotation: Any, arguments: tuple[Any, ...], value: Any, path: str) -> Any:
  if not any(value == argument and type(value) is type(argument) for argument in arguments):
    raise ValueError(f'{path}={value!r} must be {_describe(annotation)}.')
  return value


def _tuple(annotation: Any, arguments: tuple[Any, ...], value: Any, path: str) -> tuple:
  if not isinstance(value, (tuple, list)):
    raise _wrong_type(annotation, value, path)
  if arguments[-1] is Ellipsis:
    arguments = arguments[:1] * len(value)
  if len(value) != len(arguments):
    raise ValueError(f'{path}={value!r} has {len(value)} elements; it must be {_describe(annotation)}.')
  return tuple(_convert(kind, item, f'{path}[{index}]') for index, (kind, item) in enumerate(zip(arguments, value, strict=True)))


def _dict(annotation: Any, inner: Any, value: Any, path: str) -> dict[str, Any]:
  if not _is_mapping(value):
    raise _wrong_type(annotation, value, path)
  for key in value:
    if not isinstance(key, str):
      raise ValueError(f'{path} has the key {key!r} of type {type(key).__name__}; keys must be str.')
  return {key: _convert(inner, value[key], f'{path}.{key}') for key in value}


def _is_mapping(value: Any) -> bool:
  return isinstance(value, (Mapping, ml_collections.ConfigDict))


def _is_unset_placeholder(config: Any, name: str) -> bool:
  """Whether `config[name]` is an ml_collections placeholder that had to be given a value and was not."""
  try:
    config[name]
  except config_dict.RequiredValueError:
    return True
  return False


def _wrong_type(annotation: Any, value: Any, path: str) -> ValueError:
  return ValueError(f'{path}={value!r} has type {type(value).__name__}; it must be {_describe(annotation)}.')


def _describe(annotation: Any) -> str:
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is typing.Literal:
    return 'one of ' + ', '.join(map(repr, arguments))
  if origin in (typing.Union, types.UnionType):
    return ' or '.join('None' if argument is types.NoneType else _describe(argument) for argument in arguments)
  if dataclasses.is_dataclass(annotation):
    return f'a mapping with the keys of {annotation.__name__} ({", ".join(_fields(annotation))})'
  return annotation.__name__ if isinstance(annotation, type) and not arguments else str(annotation)
