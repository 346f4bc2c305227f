"""Rewards of reinforcement learning from reward models: one, or several together (an ensemble), or functions of your own.

A proxy is what is optimized in place of the truth. Where there is a truth to be had (a verifier, people), log it beside the proxy: whether the
two still agree is what `rl.drift` watches, and the curve of both over the distance from the reference (arXiv:2210.10760) is on the run's page.
Several models that disagree where none was trained make over-optimization harder (arXiv:2310.02743): combine them by 'min', or by their mean
less their standard deviation.

Deliberately absent: models on devices of their own, members that share one base in memory, and training of the proxy along the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
import hashlib
import importlib
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from jax.sharding import Mesh
import numpy as np

from models.sharding import Layout
from rl import batching, policy, reward_model
from rl.batching import Place
from rl.data.records import Message
from rl.reward_model import RewardModel
from rl.types import Trajectory

Combine = Literal['mean', 'min', 'mean_minus_std']
# Trajectories to one score for each, NaN where there is none.
Source = Callable[[Sequence[Trajectory]], Sequence[float]]


@dataclass(frozen=True)
class RewardModelConfig:
  """Which reward models score a run's samples, and how their scores become one.

  Attributes:
    paths: runs of the stage 'reward', or 'package/module:function' for functions of your own (`Source`); () is no proxy.
    combine: of several, their 'mean', the 'min' (conservative), or 'mean_minus_std'.
    std_coef: of the standard deviation in 'mean_minus_std'.
    normalize: scores of models have mean 0 and standard deviation 1 over the texts that their runs held out; those of functions stay as
      they are.
    clip: largest size of the reward; 0 does not clip.
    rows, length: of a batch of the models. A sample longer than a row is not scored.
    sees_tools: whether the models read what tools answered. A policy can make a tool say what pleases a model, so by default they see that
      there was an answer, and nothing of it.
  """
  paths: tuple[str, ...] = ()
  combine: Combine = 'mean'
  std_coef: float = 1.0
  normalize: bool = True
  clip: float = 0.0
  rows: int = 8
  length: int = 1024
  sees_tools: bool = False

  def __post_init__(self):
    if isinstance(self.paths, str):
      raise TypeError(f'paths={self.paths!r} must be a tuple of strings, not one string; write ({self.paths!r},).')
    if not (np.isfinite([self.std_coef, self.clip]).all() and self.std_coef >= 0 and self.clip >= 0):
      raise ValueError(f'std_coef={self.std_coef} and clip={self.clip} must be finite and not negative.')
    batching.check_at_least_one(rows=self.rows, length=self.length)


class Judged(NamedTuple):
  """What a proxy says of samples: float32 rewards, NaN where there is none, and metrics."""
  rewards_N: np.ndarray
  metrics: dict[str, float]


class ProxyReward:
  """The reward models of a run."""

  def __init__(self, config: RewardModelConfig, members: Mapping[str, RewardModel | Source]):
    """Take members that are loaded already, by name.

    Raises:
      ValueError: no member, or a model without the numbers that normalize its scores.
    """
    if not members:
      raise ValueError('reward_model.paths=() names no reward model; give at least one run of the stage reward, or a function.')
    self._config, self._members = config, dict(members)
    for member in self._members.values():
      if config.normalize and isinstance(member, RewardModel):
        member.normalized(np.zeros((1, len(member.dimensions))))

  @classmethod
  def load(cls, config: RewardModelConfig, mesh: Mesh, layout: Layout, dtype: str) -> ProxyReward:
    """Load the config's models onto a mesh; `dtype` is the layers'.

    Raises:
      FileNotFoundError: a run that is not there.
      ValueError: a run of another stage or without calibration, a function that is not there, one named twice, or rows that do not divide
        over the mesh.
    """
    repeated = sorted({path for path in config.paths if config.paths.count(path) > 1})
    if repeated:
      raise ValueError(f'reward_model.paths names {", ".join(repeated)} more than once; an ensemble needs different members.')
    if any(':' not in path for path in config.paths):
      batching.host_rows(Place.of(layout, mesh), config.rows)
    return cls(config, {path: _function(path) if ':' in path else reward_model.load(path, mesh, layout, dtype) for path in config.paths})

  def score(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return float32 rewards [N]; NaN where a member has none, which must be left out and never taken for 0."""
    return self.judge(trajectories).rewards_N

  def judge(self, trajectories: Sequence[Trajectory]) -> Judged:
    """Return rewards as `score`, with metrics: 'proxy/mean' and other statistics, and how far the members disagree.

    Raises:
      ValueError: a function that returns anything but a number for each sample, or a conversation that a model's template cannot write.
    """
    config = self._config
    scores_KN = np.stack([self._scores(name, member, trajectories) for name, member in self._members.items()])
    rewards_N = combine(np.where(np.isfinite(scores_KN), scores_KN, np.nan), config.combine, config.std_coef)
    is_scored_N = np.isfinite(rewards_N)
    metrics = {'proxy/unscored': float(np.count_nonzero(~is_scored_N))}
    if is_scored_N.any():
      known = rewards_N[is_scored_N]
      metrics |= {'proxy/mean': float(known.mean()), 'proxy/std': float(known.std()), 'proxy/min': float(known.min()),
                  'proxy/max': float(known.max())}
      if len(scores_KN) > 1:
        metrics['proxy/disagreement'] = float(scores_KN[:, is_scored_N].std(axis=0).mean())
      if config.clip:
        metrics['proxy/clipped_fraction'] = float(np.mean(np.abs(known) > config.clip))
        rewards_N = np.clip(rewards_N, -config.clip, config.clip)
    return Judged(rewards_N.astype(np.float32), metrics)

  def _scores(self, name: str, member: RewardModel | Source, trajectories: Sequence[Trajectory]) -> np.ndarray:
    if isinstance(member, RewardModel):
      return self._model_scores(member, trajectories)
    returned = member(trajectories)
    try:
      scores_N = np.asarray(returned, np.float64)
    except (TypeError, ValueError) as error:
      raise ValueError(f'reward_model.paths {name!r} gave no numbers for {len(trajectories)} samples: {error}.') from error
    if scores_N.shape != (len(trajectories),):
      raise ValueError(f'reward_model.paths {name!r} returned {scores_N.shape} for {len(trajectories)} samples; return one number for each.')
    return scores_N

  def _model_scores(self, model: RewardModel, trajectories: Sequence[Trajectory]) -> np.ndarray:
    config, scores_N = self._config, np.full(len(trajectories), np.nan)
    spoken = {index: model.encode(self._conversation(one.messages), one.source) for index, one in enumerate(trajectories)
              if any(message['role'] == 'assistant' for message in one.messages)}
    documents = {index: document for index, document in spoken.items() if len(document.tokens_T) <= config.length}
    if documents:
      scores = model.score_documents(list(documents.values()), rows=config.rows, length=config.length)
      scores_N[list(documents)] = model.combined(model.normalized(scores) if config.normalize else scores)
    return scores_N

  def _conversation(self, messages: Sequence[Message]) -> Sequence[Message]:
    if self._config.sees_tools:
      return messages
    return [{**message, 'content': ''} if message['role'] == 'tool' else message for message in messages]


def fingerprints(config: RewardModelConfig) -> dict[str, str]:
  """Return what identifies the reward models by path, without loading them: of a function, the SHA-256 of its module's file.

  Raises:
    FileNotFoundError: a run that is not there.
    ValueError: a function whose module is not there.
  """
  return {path: _source_digest(path) if ':' in path else policy.fingerprint(path) for path in config.paths}


def combine(scores_KN: np.ndarray, how: Combine, std_coef: float = 1.0) -> np.ndarray:
  """Return one score for each sample from those of K members; NaN where one of them is NaN.

  Raises:
    ValueError: an unknown way.
  """
  if how == 'mean':
    return scores_KN.mean(axis=0)
  if how == 'min':
    return scores_KN.min(axis=0)
  if how == 'mean_minus_std':
    return scores_KN.mean(axis=0) - std_coef * scores_KN.std(axis=0)
  raise ValueError(f"combine={how!r} is unknown; use 'mean', 'min' or 'mean_minus_std'.")


def _source_digest(path: str) -> str:
  return hashlib.sha256(Path(_import(path).__file__).read_bytes()).hexdigest()


def _import(path: str) -> ModuleType:
  try:
    # A name of the user's has slashes, as those of domains.
    return importlib.import_module(path.replace('/', '.').split(':', 1)[0])
  except ModuleNotFoundError as error:
    raise ValueError(f'reward_model.paths {path!r}: {error}; the module must be importable from here.') from error


def _function(path: str) -> Source:
  try:
    function = getattr(_import(path), path.split(':', 1)[1])
  except AttributeError as error:
    raise ValueError(f'reward_model.paths {path!r}: {error}; the module must have that function.') from error
  if not callable(function):
    raise ValueError(f'reward_model.paths {path!r} is of type {type(function).__name__}; it must be a function of trajectories.')
  return function
