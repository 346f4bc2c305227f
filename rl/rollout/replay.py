"""Batches of samples that wait between sampling and training, first in, first out, and how they are kept in a checkpoint.

With one thread and the same devices for both, a queue of k batches makes a step train on samples of weights that are k versions old: what an
asynchronous sampler does, but exactly, and the same in every run. `encode` and `decode` are for whoever else keeps samples.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Sequence
import dataclasses
import io
import json
from typing import Any

import numpy as np

from envs.core import Evidence, Outcome
from rl.rollout.collection import Collected
from rl.types import Group, Trajectory

_ARRAYS = ('tokens_T', 'loss_mask_T', 'behavior_logprobs_T', 'versions_T')


class ReplayQueue:
  """The queue; its state is `to_json()`."""

  def __init__(self, state: Sequence[str] = ()):
    """Start empty, or from the `to_json()` of another."""
    self._batches = deque(map(decode, state))

  def __len__(self) -> int:
    """Return how many batches wait."""
    return len(self._batches)

  @property
  def num_samples(self) -> int:
    """Return how many valid samples wait to be trained on."""
    return sum(batch.num_queued for batch in self._batches)

  def put(self, batch: Collected) -> None:
    """Add a batch behind the others."""
    self._batches.append(batch)

  def take(self) -> Collected:
    """Remove and return the batch that has waited longest."""
    return self._batches.popleft()

  def to_json(self) -> list[str]:
    """Return the state as JSON values, bit for bit: each batch as text, compressed."""
    return [encode(batch) for batch in self._batches]


def encode(batch: Collected) -> str:
  """Return a batch as text without line breaks, compressed and exact to the bit."""
  trajectories = [trajectory for group in _groups(batch) for trajectory in group.trajectories]
  records = [{field.name: getattr(trajectory, field.name) for field in dataclasses.fields(Trajectory) if field.name not in _ARRAYS}
             for trajectory in trajectories]
  for record in records:
    record['evidence'] = None if record['evidence'] is None else dataclasses.asdict(record['evidence'])
  arrays = {name: np.concatenate([getattr(trajectory, name) for trajectory in trajectories]) for name in _ARRAYS} if trajectories else {}
  text = json.dumps({
      'groups': [[group.problem_id, len(group.trajectories)] for group in _groups(batch)], 'causes': [cause for _, cause in batch.dropped],
      'lengths': [len(trajectory.tokens_T) for trajectory in trajectories], 'records': records})
  buffer = io.BytesIO()
  np.savez_compressed(buffer, text=np.frombuffer(text.encode(), np.uint8), **arrays)
  return base64.b64encode(buffer.getvalue()).decode()


def decode(text: str) -> Collected:
  """Return the batch of `encode`."""
  with np.load(io.BytesIO(base64.b64decode(text))) as stored:
    described = json.loads(stored['text'].tobytes())
    ends = np.cumsum(described['lengths'])[:-1]
    arrays = {name: np.split(stored[name], ends) for name in _ARRAYS if name in stored}
  trajectories = iter([
      Trajectory(**{name: parts[number] for name, parts in arrays.items()}, **_restored(record))
      for number, record in enumerate(described['records'])])
  groups = [Group(problem_id, tuple(next(trajectories) for _ in range(size))) for problem_id, size in described['groups']]
  num_good = len(groups) - len(described['causes'])
  return Collected(tuple(groups[:num_good]), tuple(zip(groups[num_good:], described['causes'], strict=True)))


def _restored(record: dict[str, Any]) -> dict[str, Any]:
  """Return the fields as a trajectory has them: JSON knows no tuples, enumerations and records."""
  evidence = record['evidence']
  if evidence is not None:
    evidence = Evidence(evidence['num_words'], tuple(evidence['positions']))
  return {**record, 'outcome': Outcome(record['outcome']), 'messages': tuple(record['messages']),
          'turn_scores': tuple(record['turn_scores']), 'evidence': evidence}


def _groups(batch: Collected) -> list[Group]:
  return [*batch.groups, *(group for group, _ in batch.dropped)]
