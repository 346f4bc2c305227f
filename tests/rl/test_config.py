"""Configs become records strictly: every mistake is one message with the full dotted path, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
from typing import Any, Literal

import ml_collections
from ml_collections import config_dict
import pytest

from rl import config as config_lib


@dataclasses.dataclass(frozen=True)
class Schedule:
  peak: float
  warmup_steps: int
  shape: Literal['cosine', 'linear', 1]

  def __post_init__(self):
    if self.warmup_steps < 0:
      raise ValueError(f'warmup_steps={self.warmup_steps} must be at least 0.')


@dataclasses.dataclass(frozen=True)
class Lora:
  rank: int
  alpha: float = 16.0


@dataclasses.dataclass(frozen=True)
class Run:
  name: str
  schedule: Schedule
  lora: Lora | None
  is_frozen: bool
  clip: float | None
  lengths: tuple[int, ...]
  betas: tuple[float, float]
  rates: dict[str, float]
  stages: tuple[Schedule, ...] = ()
  experts: Mapping[str, Lora] = dataclasses.field(default_factory=dict)


def valid() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      'name': 'sft',
      'schedule': {'peak': 1, 'warmup_steps': 10, 'shape': 'cosine'},
      'lora': {'rank': 8},
      'is_frozen': False,
      'clip': None,
      'lengths': [128, 256],
      'betas': (0.9, 0.99),
      'rates': {'gsm8k': 1, 'chat': 0.5},
      'stages': ({'peak': 0.1, 'warmup_steps': 0, 'shape': 1},),
  })


def test_build_gives_the_record_with_exact_types():
  record = config_lib.build(Run, valid())
  assert record == Run(
      name='sft', schedule=Schedule(1.0, 10, 'cosine'), lora=Lora(8), is_frozen=False, clip=None, lengths=(128, 256),
      betas=(0.9, 0.99), rates={'gsm8k': 1.0, 'chat': 0.5}, stages=(Schedule(0.1, 0, 1),))
  assert type(record.schedule.peak) is float
  assert type(record.rates['gsm8k']) is float
  assert type(record.lengths) is tuple
  assert record.lora.alpha == 16.0


def test_build_takes_plain_mappings_and_resolves_references():
  reference = config_dict.FieldReference(4)
  config = ml_collections.ConfigDict({'rank': reference, 'alpha': reference * 2})
  assert config_lib.build(Lora, config) == config_lib.build(Lora, {'rank': 4, 'alpha': 8}) == Lora(4, 8.0)


@pytest.mark.parametrize(('key', 'value', 'parts'), [
    ('schedule.warmup_step', 3, ['config.schedule.warmup_step=3', 'not a known key', 'did you mean config.schedule.warmup_steps?',
                                 'Schedule has peak, warmup_steps, shape']),
    ('zzz', 'red', ["config.zzz='red' is not a known key; Run has name, schedule"]),
    ('schedule.warmup_steps', 1.0, ['config.schedule.warmup_steps=1.0 has type float; it must be int']),
    ('schedule.warmup_steps', True, ['config.schedule.warmup_steps=True has type bool; it must be int']),
    ('schedule.warmup_steps', -1, ['config.schedule: warmup_steps=-1 must be at least 0']),
    ('schedule.peak', True, ['config.schedule.peak=True has type bool; it must be float']),
    ('schedule.peak', '1e-3', ["config.schedule.peak='1e-3' has type str; it must be float"]),
    ('schedule.shape', 'cos', ["config.schedule.shape='cos' must be one of 'cosine', 'linear', 1"]),
    ('schedule.shape', True, ["config.schedule.shape=True must be one of 'cosine', 'linear', 1"]),
    ('schedule', 3, ['config.schedule=3 must be a mapping with the keys of Schedule: peak, warmup_steps, shape']),
    ('name', 3, ['config.name=3 has type int; it must be str']),
    ('is_frozen', 0, ['config.is_frozen=0 has type int; it must be bool']),
    ('clip', 'off', ["config.clip='off' has type str; it must be float"]),
    ('lora.rank', None, ['config.lora.rank=None has type NoneType; it must be int']),
    ('lengths', 128, ['config.lengths=128 has type int; it must be tuple[int, ...]']),
    ('lengths', 'abc', ["config.lengths='abc' has type str"]),
    ('lengths', [1, 2.5], ['config.lengths[1]=2.5 has type float; it must be int']),
    ('betas', (0.9,), ['config.betas=(0.9,) has 1 elements; it must be tuple[float, float]']),
    ('rates', 0.5, ['config.rates=0.5 has type float; it must be dict[str, float]']),
    ('rates.chat', 'half', ["config.rates.chat='half' has type str; it must be float"]),
    ('stages', ({'peak': 0.1, 'warmup_steps': 0},), ["config.stages[0].shape is missing; set it to one of 'cosine', 'linear', 1"]),
    ('experts', {'first': {'rank': 1.5}}, ['config.experts.first.rank=1.5 has type float; it must be int']),
])
def test_every_mistake_is_named(key, value, parts):
  config = valid().to_dict()
  node = config
  *parents, last = key.split('.')
  for parent in parents:
    node = node[parent]
  node[last] = value
  with pytest.raises(ValueError) as caught:
    config_lib.build(Run, config)
  for part in parts:
    assert part in str(caught.value)


def test_a_missing_key_is_named_with_what_it_needs():
  config = valid()
  del config['lora']
  with pytest.raises(ValueError, match=r'run\.lora is missing; set it to a mapping with the keys of Lora \(rank, alpha\) or None'):
    config_lib.build(Run, config, 'run')


def test_a_placeholder_that_was_never_set_is_missing():
  config = valid()
  config.schedule = ml_collections.ConfigDict(
      {'peak': config_dict.placeholder(float, required=True), 'warmup_steps': 10, 'shape': 'cosine'})
  with pytest.raises(ValueError, match=r'config\.schedule\.peak is missing; set it to float'):
    config_lib.build(Run, config)


@dataclasses.dataclass(frozen=True)
class Open:
  tasks: Mapping[str, Mapping[str, Any]]


def test_any_is_taken_over_as_plain_json():
  record = config_lib.build(Open, ml_collections.ConfigDict({'tasks': {'gsm8k': {'splits': ('a',), 'limits': {'rows': 3}}}}))
  assert record.tasks == {'gsm8k': {'splits': ['a'], 'limits': {'rows': 3}}}
  assert type(record.tasks['gsm8k']['limits']) is dict
  with pytest.raises(ValueError, match=r'config\.tasks\.gsm8k=3 has type int'):
    config_lib.build(Open, {'tasks': {'gsm8k': 3}})


@dataclasses.dataclass(frozen=True)
class Undeclarable:
  size: int | str


def test_an_annotation_that_a_config_cannot_hold_is_the_records_mistake():
  with pytest.raises(TypeError, match=r'config\.size is declared as int \| str; the only union a config can hold is X \| None'):
    config_lib.build(Undeclarable, {'size': 1})
  with pytest.raises(TypeError, match='not a dataclass'):
    config_lib.build(int, {'size': 1})


def test_json_round_trip_is_exact():
  record = config_lib.build(Run, valid())
  text = json.dumps(config_lib.to_json(record))
  assert config_lib.build(Run, json.loads(text)) == record
  assert json.loads(text)['lora'] == {'rank': 8, 'alpha': 16.0}


def test_to_json_refuses_what_json_cannot_hold():
  with pytest.raises(TypeError, match=r'config\.rates\.a=\{1\} is a set'):
    config_lib.to_json(dataclasses.replace(config_lib.build(Run, valid()), rates={'a': {1}}))
  with pytest.raises(TypeError, match='config has the key 3 of type int; keys must be str'):
    config_lib.to_json({3: 'x'})


def test_difference_lists_changed_dotted_keys_only():
  base = config_lib.build(Run, valid())
  changed = dataclasses.replace(
      base, schedule=dataclasses.replace(base.schedule, peak=2.0), lora=None, rates={'gsm8k': 1.0, 'code': 3.0}, lengths=(128,))
  assert config_lib.difference(base, valid().to_dict() | {'lora': {'rank': 8, 'alpha': 16.0}, 'experts': {}}) == {}
  assert config_lib.difference(changed, base) == {
      'schedule.peak': (1.0, 2.0),
      'lora': ({'rank': 8, 'alpha': 16.0}, None),
      'lengths': ([128, 256], [128]),
      'rates.chat': (0.5, config_lib.ABSENT),
      'rates.code': (config_lib.ABSENT, 3.0),
  }
  assert config_lib.difference({'a': True}, {'a': 1}) == {'a': (1, True)}
