"""The stages of post-training, by the name that `config.stage` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rl import rl_config, train, train_distillation, train_preference, train_rl


class Stage(NamedTuple):
  """The record of a stage's settings, and what runs them: (record, workdir) -> results."""
  record: type
  run: Callable[..., dict[str, float]]


STAGES = {
    'supervised': Stage(train.TrainConfig, train.run),
    'preference': Stage(train_preference.PreferenceConfig, train_preference.run),
    'reward': Stage(train_preference.RewardConfig, train_preference.run),
    'distillation': Stage(train_distillation.DistillationConfig, train_distillation.run),
    'rl': Stage(rl_config.RLConfig, train_rl.run),
}


def find(name: Any) -> Stage:
  """Return the stage of a name; ValueError for one that is none."""
  if name not in STAGES:
    raise ValueError(f'config.stage={name!r} must be one of {", ".join(STAGES)}.')
  return STAGES[name]
