"""Episodes: environments and the engine, joined by token ids.

A worker turns problems into groups of trajectories. Environments speak messages; here a first prompt is rendered once, what the policy samples
is kept as the ids it sampled, and what tools say is appended (`chat.extend`): nothing is ever decoded and encoded again. The worker checks at
each turn that the ids so far are a prefix of the next.

One thread drives the engine; each call of an environment runs in a thread of its own, so tools and verifiers work while the device decodes.
Every call has a deadline and so has every group. A call that outlives its deadline cannot be ended, only abandoned. Failures that the policy
did not cause end in a trajectory without a reward; its sample is issued again, with the same seed, so that a run whose failures pass is the
run without failures.

Deliberately absent: engines on other devices, and groups that outlive a call of `collect`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
from dataclasses import dataclass, field
import queue
import threading
import time
from typing import Any

import gymnasium
import numpy as np

from envs.core import Domain, EnvironmentFailure, Outcome, Problem
from models import chat
from models.chat import Template
from models.sampling import Sampling
from models.tokenizer import Tokenizer
from rl.rollout.engine import Completion, Engine, Request
from rl.rollout.ledger import Ledger
from rl.types import Group, Trajectory

# Observations longer than this are prefilled with their conversation; shorter ones are read step by step beside their neighbors.
_LONGEST_GIVEN = 64


@dataclass(frozen=True)
class RolloutConfig:
  """How episodes are run.

  Attributes:
    max_new_tokens: of one reply.
    max_length: tokens of a conversation, prompt and tool results included.
    slots: sequences generated side by side.
    steps_per_launch: decoding steps between looks at what has finished.
    prefill_chunk: prompt tokens computed at once.
    describe_tools: whether a system message describes the tools; a model that was fine-tuned to use them may not need it.
    env_timeout_s: deadline of one call of an environment, tools and verifier included.
    group_timeout_s: deadline of a group; what is not finished then is cancelled.
    max_attempts: how often a sample is issued when it is not the policy that fails.
    min_group_size: groups with fewer valid samples are dropped.
    staleness: batches that wait between sampling and training, so that a step trains on samples of weights that are so many versions old,
      as an asynchronous sampler's are; 0 is on-policy.
  """
  max_new_tokens: int = 128
  max_length: int = 512
  slots: int = 32
  steps_per_launch: int = 8
  prefill_chunk: int = 256
  describe_tools: bool = True
  env_timeout_s: float = 60.0
  group_timeout_s: float = 900.0
  max_attempts: int = 3
  min_group_size: int = 2
  staleness: int = 0

  def __post_init__(self):
    for name in ('max_new_tokens', 'max_length', 'slots', 'steps_per_launch', 'prefill_chunk', 'max_attempts', 'min_group_size'):
      if getattr(self, name) < 1:
        raise ValueError(f'rollout.{name}={getattr(self, name)} must be at least 1.')
    for name in ('env_timeout_s', 'group_timeout_s'):
      if not getattr(self, name) > 0:
        raise ValueError(f'rollout.{name}={getattr(self, name)} must be positive.')
    if self.staleness < 0:
      raise ValueError(f'rollout.staleness={self.staleness} must not be negative; 0 trains on what the newest weights sampled.')


@dataclass(frozen=True)
class Assignment:
  """A problem to be sampled; `ordinal` counts the problems of a run and names the group."""
  ordinal: int
  problem: Problem


@dataclass
class Timing:
  """Seconds of `collect` in launches of the engine, and waiting for environments with nothing to decode; and tokens sampled."""
  decode_s: float = 0.0
  environment_s: float = 0.0
  num_tokens: int = 0


@dataclass(eq=False)
class _Episode:
  """One attempt at one sample of a group."""
  group: _OpenGroup
  sample: int
  attempt: int
  env: gymnasium.Env | None = None
  deadline_s: float | None = None  # Of the environment's call in progress.
  start_s: float = 0.0
  environment_s: float = 0.0
  call_start_s: float = 0.0
  ids: list[int] = field(default_factory=list)
  mask: list[bool] = field(default_factory=list)
  logprobs: list[float] = field(default_factory=list)
  versions: list[int] = field(default_factory=list)
  messages: list[dict[str, Any]] = field(default_factory=list)
  in_engine: bool = False
  parts: Mapping[str, float] = field(default_factory=dict)
  turn_scores: list[float] = field(default_factory=list)

  @property
  def key(self) -> tuple[int, int, int]:
    return self.group.assignment.ordinal, self.sample, self.attempt

  def score_turn(self, parts: Mapping[str, float]) -> None:
    """Take note of what the environment told after a message of the policy; where it told nothing, nothing was added."""
    before = _mean(self.parts)
    self.parts = parts or self.parts
    self.turn_scores.append(_mean(self.parts) - before)

  def append(self, tokens, is_sampled: bool, logprobs=None, versions=None) -> None:
    count = len(tokens)
    self.ids += [int(token) for token in tokens]
    self.mask += [is_sampled] * count
    self.logprobs += [float('nan')] * count if logprobs is None else logprobs.tolist()
    self.versions += [-1] * count if versions is None else versions.tolist()


@dataclass(eq=False)
class _OpenGroup:
  assignment: Assignment
  size: int
  deadline_s: float | None = None  # From the start of its first episode.
  open: set[int] = field(default_factory=set)
  done: dict[int, Trajectory] = field(default_factory=dict)


class Worker:
  """Runs episodes on one engine."""

  def __init__(self, engine: Engine, tokenizer: Tokenizer, template: Template, domains: Mapping[str, Domain],
               make_env: Callable[[Domain], gymnasium.Env], config: RolloutConfig, *, seed: int, ledger: Ledger):
    """Take what episodes need; `make_env(domain)` returns an environment whose reset takes options={'problem': Problem}."""
    self._engine, self._tokenizer, self._template = engine, tokenizer, template
    self._domains, self._make_env, self._config = domains, make_env, config
    self._seed, self._ledger = seed, ledger
    self._results: queue.SimpleQueue = queue.SimpleQueue()
    self._calls: dict[tuple, _Episode] = {}
    self._live: dict[tuple, _Episode] = {}
    self._waiting: deque[_Episode] = deque()
    self._timing = Timing()

  def take_timing(self) -> Timing:
    """Return the timing since the last call."""
    timing, self._timing = self._timing, Timing()
    return timing

  @property
  def num_in_flight(self) -> int:
    """Return how many samples are issued and not finished."""
    return len(self._live)

  def collect(self, assignments: Sequence[Assignment], group_size: int, sampling: Sampling) -> Iterator[Group]:
    """Sample every problem `group_size` times and yield each group when its last sample is finished, complete or not.

    A group holds what is valid and the last attempt of what is not; `Group.trajectories` are in the order of their samples.

    Raises:
      ValueError: a problem of an unknown domain.
      RuntimeError: the model's logits are not finite.
    """
    groups = [_OpenGroup(assignment, group_size) for assignment in assignments]
    for group in groups:
      if group.assignment.problem.domain not in self._domains:
        raise ValueError(f'Problem {group.assignment.problem.id}: domain {group.assignment.problem.domain!r} is not one of '
                         f'{", ".join(self._domains)}.')
      group.open = set(range(group_size))
      self._waiting += [_Episode(group, sample, 0) for sample in range(group_size)]
    self._engine.stop_at(self._tokenizer.stop_ids)
    self._sampling = sampling
    remaining = deque(groups)
    try:
      while remaining:
        self._start_waiting()
        self._wait()
        self._end_overdue(remaining)
        for group in [group for group in remaining if not group.open]:
          remaining.remove(group)
          yield Group(group.assignment.problem.id, tuple(group.done[sample] for sample in sorted(group.done)))
    finally:
      self._abandon_all()

  def _start_waiting(self) -> None:
    # Environments are prepared ahead of free slots, but not by so much that all of a long list lives at once.
    while self._waiting and len(self._live) < 2 * self._engine.num_slots:
      episode = self._waiting.popleft()
      if episode.sample not in episode.group.open:
        continue
      self._ledger.issued += 1
      self._live[episode.key] = episode
      episode.start_s = time.monotonic()
      if episode.group.deadline_s is None:
        episode.group.deadline_s = episode.start_s + self._config.group_timeout_s
      self._call(episode, self._reset, episode)

  def _reset(self, episode: _Episode) -> Any:
    problem = episode.group.assignment.problem
    episode.env = self._make_env(self._domains[problem.domain])
    return episode.env.reset(options={'problem': problem})

  def _call(self, episode: _Episode, function: Callable, *arguments: Any) -> None:
    """Run an environment's call in a thread of its own; its result comes through the queue unless it is too late."""
    token = (*episode.key, object())
    episode.call_start_s = time.monotonic()
    episode.deadline_s = episode.call_start_s + self._config.env_timeout_s
    self._calls[token] = episode

    def run():
      try:
        result = function(*arguments)
      # The boundary of a thread: whatever an environment raises is an outcome of its episode, and the run goes on.
      except Exception as error:
        result = error
      self._results.put((token, episode, result))

    threading.Thread(target=run, daemon=True, name=f'environment-{episode.key}').start()

  def _wait(self) -> None:
    """Decode, or wait for an environment if there is nothing to decode, and handle what has come."""
    if self._engine.is_busy:
      start_s = time.monotonic()
      for completion in self._engine.step():
        self._on_completion(self._live[completion.id], completion)
      self._timing.decode_s += time.monotonic() - start_s
    elif self._calls:
      start_s = time.monotonic()
      deadline_s = min(min(episode.deadline_s, episode.group.deadline_s) for episode in self._calls.values())
      with contextlib.suppress(queue.Empty):
        self._on_result(*self._results.get(timeout=max(deadline_s - start_s, 0.0)))
      self._timing.environment_s += time.monotonic() - start_s
    while not self._results.empty():
      self._on_result(*self._results.get())

  def _on_result(self, token: tuple, episode: _Episode, result: Any) -> None:
    if self._calls.pop(token, None) is None:
      self._leave(episode)  # Abandoned, and finished long ago; only now can its environment be closed for sure.
      return
    episode.environment_s += time.monotonic() - episode.call_start_s
    episode.deadline_s = None
    if isinstance(result, Exception):
      self._finish(episode, Outcome.ENV_ERROR, None, detail=f'{type(result).__name__}: {result}')
      return
    messages, *rest = result
    if len(rest) == 1:  # A reset.
      self._begin(episode, messages)
      return
    _, terminated, truncated, info = rest
    episode.messages += [dict(message) for message in messages]
    parts = {name: float(part) for name, part in info.get('parts', {}).items()}
    numbers = [*parts.values(), *([info['score']] if (terminated or truncated) and info['valid'] else [])]
    if not np.isfinite(numbers).all():
      self._finish(episode, Outcome.VERIFIER_ERROR, None, detail=f'The environment gave score={info.get("score")}, parts={parts}; scores must '
                   'be finite.')
      return
    episode.score_turn(parts)
    if terminated or truncated:
      self._finish(episode, Outcome(info['outcome']), info['score'] if info['valid'] else None, info=info, terminated=terminated,
                   truncated=truncated)
    else:
      self._go_on(episode, messages)

  def _begin(self, episode: _Episode, messages: Sequence[Mapping[str, Any]]) -> None:
    rendered = chat.render(messages, self._tokenizer, self._template, generation_prompt=True)
    episode.messages = [dict(message) for message in messages]
    episode.append(rendered.tokens_T, False)
    room = self._config.max_length - len(episode.ids)
    if room < 1:
      # It will be as long at every attempt.
      self._finish(episode, Outcome.ENV_ERROR, None, is_final=True, detail=f'The prompt has {len(episode.ids)} tokens, rollout.max_length is '
                   f'{self._config.max_length}; raise it, or leave such problems out.')
      return
    self._submit(episode)

  def _submit(self, episode: _Episode) -> None:
    assignment = episode.group.assignment
    seed = int(np.random.SeedSequence([self._seed, assignment.ordinal, episode.sample]).generate_state(1)[0])
    room = self._config.max_length - len(episode.ids)
    self._engine.submit(Request(
        episode.key, np.asarray(episode.ids, np.int32), self._sampling, min(self._config.max_new_tokens, room), seed,
        holds=self._domains[assignment.problem.domain].max_turns > 1))
    episode.in_engine = True

  def _on_completion(self, episode: _Episode, completion: Completion) -> None:
    episode.append(completion.tokens_T, True, completion.raw_logprobs_T, completion.versions_T)
    self._timing.num_tokens += len(completion.tokens_T)
    holds = self._domains[episode.group.assignment.problem.domain].max_turns > 1
    episode.in_engine = holds
    text = self._tokenizer.decode(completion.tokens_T)
    episode.messages.append({'role': 'assistant', 'content': text})
    self._call(episode, episode.env.step, {'content': text, 'truncated': True} if completion.stop == 'length' else text)

  def _go_on(self, episode: _Episode, messages: Sequence[Mapping[str, Any]]) -> None:
    extended = chat.extend(episode.ids, messages, self._tokenizer, self._template)
    before = len(episode.ids)
    if extended[:before].tolist() != episode.ids:
      raise RuntimeError(f'{episode.key}: the conversation so far is not a prefix of its continuation; chat.extend may only append.')
    given_T = extended[before:]
    room = self._config.max_length - len(extended)
    if room < 1:
      # No room for a reply: the episode is graded as it stands.
      self._call(episode, episode.env.step, {'content': '', 'truncated': True})
      return
    episode.append(given_T, False)
    if len(given_T) > _LONGEST_GIVEN:
      self._engine.release(episode.key)
      self._submit(episode)
    else:
      self._engine.extend(episode.key, given_T, min(self._config.max_new_tokens, room))

  def _finish(self, episode: _Episode, outcome: Outcome, reward: float | None, *, info: Mapping[str, Any] | None = None,
              terminated: bool = False, truncated: bool = False, detail: str = '', is_final: bool = False) -> None:
    """Make the episode's trajectory, or issue its sample again if it is not the policy that failed and that `is_final`."""
    group = episode.group
    del self._live[episode.key]
    self._leave(episode)
    is_valid = reward is not None
    if not is_valid:
      self._ledger.dropped[str(outcome)] += 1
    if not is_valid and not is_final and episode.attempt + 1 < self._config.max_attempts:
      self._waiting.appendleft(_Episode(group, episode.sample, episode.attempt + 1))
      return
    group.open.discard(episode.sample)
    info = info or {}
    problem = group.assignment.problem
    group.done[episode.sample] = Trajectory(
        tokens_T=np.asarray(episode.ids, np.int32), loss_mask_T=np.asarray(episode.mask, np.bool_),
        behavior_logprobs_T=np.asarray(episode.logprobs, np.float32), versions_T=np.asarray(episode.versions, np.int32),
        reward=reward, parts=episode.parts, turn_scores=_turn_scores(episode) if is_valid else (), outcome=outcome,
        terminated=terminated, truncated=truncated, num_turns=sum(message['role'] == 'assistant' for message in episode.messages),
        num_tool_calls=info.get('num_tool_calls', 0), num_tool_errors=info.get('num_tool_errors', 0),
        problem_id=problem.id, domain=problem.domain, level=problem.level,
        group=group.assignment.ordinal, sample=episode.sample,
        timing_s={'total': time.monotonic() - episode.start_s, 'environment': episode.environment_s},
        messages=tuple(episode.messages), reason=detail or str(info.get('reason', '')), evidence=problem.evidence)

  def _leave(self, episode: _Episode) -> None:
    if episode.in_engine:
      self._engine.release(episode.key)
      episode.in_engine = False
    if episode.env is not None:
      # Closing may take as long as any other call, and nobody waits for it.
      threading.Thread(target=_close, args=(episode.env,), daemon=True, name='close').start()

  def _end_overdue(self, groups: Sequence[_OpenGroup]) -> None:
    now_s = time.monotonic()
    for token, episode in list(self._calls.items()):
      if episode.deadline_s is not None and now_s >= episode.deadline_s:
        del self._calls[token]
        self._finish(episode, Outcome.ENV_ERROR, None,
                     detail=f'An environment call took longer than rollout.env_timeout_s={self._config.env_timeout_s}.')
    late = {id(group) for group in groups if group.deadline_s is not None and now_s >= group.deadline_s}
    if late:
      self._calls = {token: episode for token, episode in self._calls.items() if id(episode.group) not in late}
      for episode in [episode for episode in self._live.values() if id(episode.group) in late]:
        self._finish(episode, Outcome.CANCELLED, None, detail=f'The group took longer than {self._config.group_timeout_s} s.', is_final=True)
      for group in groups:
        if id(group) in late:
          group.open.clear()

  def _abandon_all(self) -> None:
    self._waiting.clear()
    self._calls.clear()
    for episode in list(self._live.values()):
      self._finish(episode, Outcome.CANCELLED, None, detail='The collection was abandoned.', is_final=True)


def _mean(parts: Mapping[str, float]) -> float:
  return sum(parts.values()) / len(parts) if parts else 0.0


def _turn_scores(episode: _Episode) -> tuple[float, ...]:
  """Return the scores of the messages that were sampled; a message that had no room, and is empty, counts with the one before."""
  if not episode.parts:
    return ()
  sampled = np.asarray(episode.mask)
  num_turns, scores = np.count_nonzero(sampled & np.diff(sampled, prepend=False)), episode.turn_scores
  return (*scores[:num_turns - 1], sum(scores[num_turns - 1:]))


def _close(env: gymnasium.Env) -> None:
  # Its episode is over; a sandbox that cannot be closed is reaped by its supervisor.
  with contextlib.suppress(EnvironmentFailure):
    env.close()
