"""The queue of batches: first in, first out, and bit for bit the same after a checkpoint."""

import dataclasses
import json

import numpy as np

from envs.core import Evidence, Outcome
from rl.rollout.collection import Collected
from rl.rollout.replay import ReplayQueue
from rl.types import Group
from tests.rl.test_batching import random_trajectories, trajectory


def batch(seed):
  members = random_trajectories(seed, 4)
  failed = trajectory([False, False], seed=9, reward=None, outcome=Outcome.ENV_ERROR, reason='it broke')
  rich = dataclasses.replace(
      trajectory([False, True, False, True]), reward=1 / 3, parts={'steps': 0.1 + 0.2}, turn_scores=(0.1, 0.2), outcome=Outcome.LENGTH,
      timing_s={'total': 0.1}, messages=({'role': 'user', 'content': 'é?'}, {'role': 'assistant', 'content': 'a'}),
      evidence=Evidence(100, (0.25, 1 / 3)))
  problem_id = members[0].problem_id
  good = Group(problem_id, (*members[:2], failed)), Group(problem_id, (rich,))
  return Collected(good, ((Group(problem_id, tuple(members[2:])), 'no_signal'),))


def check_same(one, other):
  assert [cause for _, cause in one.dropped] == [cause for _, cause in other.dropped]
  groups, others = ((*part.groups, *(group for group, _ in part.dropped)) for part in (one, other))
  for group, twin in zip(groups, others, strict=True):
    assert group.problem_id == twin.problem_id
    for first, second in zip(group.trajectories, twin.trajectories, strict=True):
      for field in dataclasses.fields(first):
        value, copy = getattr(first, field.name), getattr(second, field.name)
        assert type(value) is type(copy), field.name
        if isinstance(value, np.ndarray):
          assert value.dtype == copy.dtype and value.tobytes() == copy.tobytes(), field.name
        else:
          assert value == copy, field.name


def test_first_in_first_out():
  queue = ReplayQueue()
  assert len(queue) == queue.num_samples == 0 and queue.to_json() == []
  batches = [batch(seed) for seed in range(3)]
  for one in batches:
    queue.put(one)
  assert len(queue) == 3 and queue.num_samples == 9  # Without the failed one and those that are dropped.
  assert queue.take() is batches[0] and queue.take() is batches[1] and queue.num_samples == 3


def test_a_checkpoint_holds_every_bit():
  queue, batches = ReplayQueue(), [batch(0), Collected((), ()), batch(1)]
  for one in batches:
    queue.put(one)
  restored = ReplayQueue(json.loads(json.dumps(queue.to_json(), allow_nan=False)))
  assert len(restored) == 3 and restored.num_samples == queue.num_samples
  for one in batches:
    check_same(restored.take(), one)
