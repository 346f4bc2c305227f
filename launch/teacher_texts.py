"""What a teacher itself writes on a domain's problems, as training data (sequence-level distillation, arXiv:1606.07947).

The teacher is sampled with the engine, environments, tools and verifiers of reinforcement learning, so a student that learns from the texts
has seen what it will be asked. Only whole conversations are kept; with a verifier, if asked, only right ones (rejection sampling). What a
process that is killed had sampled is not sampled again (`rollouts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.core import Domain, Outcome, Problem
from launch import rollouts
from models import chat, sharding
from rl.rollout.worker import Assignment, RolloutConfig
from rl.types import Group, Trajectory

# Problems that are given to the worker at once, so that their texts are written as they come.
_PROBLEMS_AT_ONCE = 256


@dataclass(frozen=True)
class TeacherConfig:
  """A teacher and how it is sampled.

  Attributes:
    path: a Hugging Face directory, a .gguf file or a run directory.
    step: checkpoint of a run; None is the newest.
    chat_template: one of `chat.TEMPLATES`; None is the run's, or plain.
    dtype: of weights and computation.
    samples: of each problem; of equal texts one is kept.
    temperature: 0 decodes greedily, which is nearest to the teacher's mode and needs one sample only.
    verified: keep only texts that the verifier gives full marks.
    seed: root of the sampling.
  """
  path: str
  step: int | None = None
  chat_template: str | None = None
  dtype: str = 'bfloat16'
  samples: int = 1
  temperature: float = 0.0
  verified: bool = False
  seed: int = 0

  def __post_init__(self):
    if self.chat_template not in (None, *chat.TEMPLATES):
      raise ValueError(f'chat_template={self.chat_template!r} is unknown; use one of {", ".join(chat.TEMPLATES)}.')
    if self.samples < 1 or self.temperature < 0:
      raise ValueError(f'samples={self.samples} must be at least 1 and temperature={self.temperature} at least 0.')
    if self.samples > 1 and self.temperature == 0:
      raise ValueError(f'samples={self.samples} at temperature=0 would all be the same text; raise the temperature, or use one sample.')


def conversations(config: TeacherConfig, domain: Domain, problems: Iterable[Problem], rollout: RolloutConfig, counts: Counter, *,
                  domain_settings: Mapping[str, Any], output: Path | None) -> Iterator[Sequence]:
  """Yield the messages of each text that is kept, problems in order, and count in `counts` what became of all.

  Args:
    domain_settings, output: as of `rollouts.Source` and `rollouts.Sampler`.

  Raises:
    ValueError, FileNotFoundError: what `policy.load` refuses, or `rollouts.Sampler`.
    RuntimeError: the model's logits are not finite.
  """
  source = rollouts.Source(config.path, config.step, config.chat_template, config.dtype, rollout, {domain.name: domain}, domain_settings,
                           config.seed, config.samples, config.temperature)
  sampler = rollouts.Sampler(source, lambda: sharding.make_mesh(data=-1), output)
  assignments = [Assignment(number, problem) for number, problem in enumerate(problems)]
  for start in range(0, len(assignments), _PROBLEMS_AT_ONCE):
    groups = sampler.collect(assignments[start:start + _PROBLEMS_AT_ONCE])
    for group in sorted(groups, key=lambda group: group.trajectories[0].group):
      for trajectory in kept(group, config.verified, counts):
        yield trajectory.messages


def kept(group: Group, verified: bool, counts: Counter) -> list[Trajectory]:
  """Return the samples of a problem to learn from, and count what becomes of each."""
  texts, chosen = set(), []
  for trajectory in group.trajectories:
    text = tuple((message['role'], message['content']) for message in trajectory.messages)
    if not trajectory.is_valid:
      cause = 'not graded'
    elif trajectory.truncated or trajectory.outcome == Outcome.LENGTH:
      cause = 'cut off'
    elif verified and trajectory.reward != 1:
      cause = 'wrong'
    elif text in texts:
      cause = 'written twice'
    else:
      cause = 'kept'
      chosen.append(trajectory)
      texts.add(text)
    counts[cause] += 1
  counts['problems with a text'] += bool(chosen)
  return chosen
