"""The records of environments: messages, problems, domains, verdicts, tools, sessions, and how an episode can end.

Everything here is plain data, a protocol, or the `Session` to derive from. What the policy sees are a problem's `messages` and what tools and
sessions return; a problem's `answer` is the verifier's alone. A failure of the infrastructure is never a score: it is an `EnvironmentFailure`
or an invalid `Verdict`, and the sample is left out of training and of its group's baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
import enum
import hashlib
from typing import Any, Literal, NotRequired, Protocol, TypedDict

import numpy as np

Split = Literal['train', 'heldout']
_SPLIT_DRAWS = 1000


class Message(TypedDict):
  """A chat message in OpenAI's shape; roles are system, user, assistant and tool. `name` is the tool that a result comes from."""
  role: str
  content: str
  name: NotRequired[str]


class Outcome(enum.StrEnum):
  """How an episode ended. The first four are the policy's doing and graded; the others are not, and mask the sample."""
  OK = 'ok'
  LENGTH = 'length'
  TURNS = 'turns'
  TIMEOUT = 'timeout'
  ENV_ERROR = 'env_error'
  VERIFIER_ERROR = 'verifier_error'
  JUDGE_ERROR = 'judge_error'
  CANCELLED = 'cancelled'

  @property
  def is_valid(self) -> bool:
    return self in (Outcome.OK, Outcome.LENGTH, Outcome.TURNS, Outcome.TIMEOUT)


class Reason(enum.StrEnum):
  """Why a verdict is what it is."""
  OK = 'ok'
  WRONG = 'wrong'
  NO_ANSWER = 'no_answer'
  MULTIPLE = 'multiple'
  BAD_FORMAT = 'bad_format'
  TRUNCATED = 'truncated'
  TOO_LONG = 'too_long'
  TIMEOUT = 'timeout'
  VERIFIER_ERROR = 'verifier_error'


class EnvironmentFailure(RuntimeError):
  """The infrastructure failed, not the policy: a sandbox that does not start, a worker that died. The sample is masked, never scored 0."""


class ToolError(Exception):
  """The policy used a tool wrongly; the message is its observation."""


def check_parts(parts: Mapping[str, float]) -> None:
  """Raise ValueError if a score of a part of the work is no number from 0 to 1."""
  for name, value in parts.items():
    if not 0 <= value <= 1:
      raise ValueError(f'parts[{name!r}]={value} must be a number from 0 to 1.')


@dataclass(frozen=True)
class Verdict:
  """What a verifier says of a reply.

  Attributes:
    score: in [0, 1], or None if the verifier itself failed (`reason` is then VERIFIER_ERROR): invalid, never 0.
    reason: why.
    parts: named scores of parts of the work, for metrics and process rewards.
    parsed: the answer as it was understood.
    detail: for people.
  """
  score: float | None
  reason: Reason
  parts: Mapping[str, float] = field(default_factory=dict)
  parsed: str | None = None
  detail: str = ''

  def __post_init__(self):
    if (self.score is None) != (self.reason == Reason.VERIFIER_ERROR):
      raise ValueError(f'score={self.score} with reason={self.reason}: a score is None exactly when the verifier failed.')
    if self.score is not None and not 0 <= self.score <= 1:
      raise ValueError(f'score={self.score} must be a number from 0 to 1.')
    check_parts(self.parts)

  @property
  def is_valid(self) -> bool:
    return self.score is not None


@dataclass(frozen=True)
class Evidence:
  """Where a long text says what its question needs, for accuracy by length and by position.

  Attributes:
    num_words: of the text, as it was asked for; words are what stands between white space.
    positions: of each statement that is needed: the share of the other words that stand before it, so 0 is the start of the text and 1 its
      end. () where the whole text is needed, or where it does not say.
  """
  num_words: int
  positions: tuple[float, ...]


@dataclass(frozen=True)
class Problem:
  """One task of a domain.

  Attributes:
    id: 'domain/split/level/index'; the same id is the same problem in every process.
    domain: the domain's name.
    level: difficulty, from 1.
    messages: what the policy is shown first.
    answer: what the verifier compares with; JSON-able, never shown to the policy.
    evidence: of a long text, None elsewhere; never shown to the policy.
  """
  id: str
  domain: str
  level: int
  messages: tuple[Message, ...]
  answer: Any
  evidence: Evidence | None = None


@dataclass(frozen=True)
class Task:
  """What a generator makes: the question, the verifier's answer, and a right transcript after the question.

  Attributes:
    question: text of the user message.
    answer: as in `Problem`.
    demonstration: the messages of a policy that solves it, tool results included; they score 1.
    canonical: what makes two tasks the same one, such as numbers and operations without the wording; splits are made by its hash.
    evidence: as in `Problem`.
  """
  question: str
  answer: Any
  demonstration: tuple[Message, ...]
  canonical: str
  evidence: Evidence | None = None


class Verifier(Protocol):
  """Scores final replies; must never raise for anything a policy can write, and be safe to call from threads."""
  id: str
  version: int

  def verify(self, problem: Problem, reply: str) -> Verdict:
    """Return the verdict on the policy's last message; `reply` is only what the policy wrote."""


class Tool(Protocol):
  """A tool of one episode."""
  name: str
  schema: Mapping[str, Any]  # JSON schema of the arguments, with a 'description'

  def call(self, arguments: Mapping[str, Any]) -> str:
    """Return the observation.

    Raises:
      ToolError: the policy's fault; shown to it.
      EnvironmentFailure: ours; ends the episode as invalid.
    """

  def close(self) -> None:
    """Release what the tool holds; may be called twice."""


class Session:
  """One episode of a domain whose replies change something: a game, a plan, a database. As it stands, the first reply is the last one.

  A domain with a state makes one for each episode and overrides what it needs. It holds the state and the tools that act on it, scores parts
  of the work after every reply, and verifies the state at the end; so every message of the policy can be paid for what it added:

      class Shelf(Session):
        def __init__(self, problem):
          self._wanted, self._books = problem.answer['wanted'], []
          self.tools = (PutTool(self._books),)  # PutTool.call appends arguments['title'], or raises ToolError

        @property
        def is_over(self):
          return self._books == self._wanted

        def parts(self):
          in_place = sum(map(operator.eq, self._books, self._wanted))
          return {'in_place': in_place / len(self._wanted)}

        def verify(self, reply):
          return Verdict(1.0, Reason.OK) if self.is_over else Verdict(0.0, Reason.WRONG)

      Domain('library/shelf', 1, source, make_session=Shelf, max_turns=8)

  What a reply adds is the difference that it makes to the mean of `parts`, which begin at 0. Make them functions of the state as it is now and
  not of the best one so far: then who goes back loses what was gained, and going round in circles earns exactly nothing, as differences of
  potentials do (Ng, Harada & Russell, ICML 1999).

  What the tools hold is released by their `close`; a session has nothing else to release.
  """
  tools: Sequence[Tool] = ()

  @property
  def is_over(self) -> bool:
    """Whether nothing is left to do, as at the goal or in a lost game; asked after every reply."""
    return False

  def act(self, reply: str) -> str | None:
    """Take a reply that calls no tool as a move and return what it leads to, or return None: it is the last one.

    Raises:
      ToolError: the policy's fault; shown to it.
      EnvironmentFailure: ours; ends the episode as invalid.
    """
    return None

  def parts(self) -> Mapping[str, float]:
    """Return how far parts of the work are, each from 0 (as at the start) to 1, and always of the same names; asked after every reply."""
    return {}

  def verify(self, reply: str) -> Verdict:
    """Return the verdict on the state as the last reply left it; `parts` need not be in it. Must not raise for what a policy can write."""
    raise NotImplementedError(f'{type(self).__name__} verifies nothing; define verify(reply) in it.')


class TaskSource(Protocol):
  """Where a domain's tasks come from; the same arguments give the same task in every process."""
  num_levels: int

  def task(self, split: Split, level: int, index: int) -> Task:
    """Return task `index`, counted from 0, of a level, counted from 1; ValueError if there is none."""

  def size(self, split: Split, level: int) -> int | None:
    """Return how many tasks there are, None for no end."""


@dataclass(frozen=True)
class Generated:
  """Tasks without end, from a pure function of a random generator and a level.

  A task belongs to the split that its hash says, so no task is in both, whatever the seeds: index i is drawn again until it falls in the
  split that is asked for.
  """
  name: str
  version: int
  make: Callable[[np.random.Generator, int], Task]
  num_levels: int
  heldout_fraction: float = 0.2

  def task(self, split: Split, level: int, index: int) -> Task:
    _check_place(self, split, level, index)
    for draw in range(_SPLIT_DRAWS):
      key = f'{self.name}/{self.version}/{split}/{level}/{index}/{draw}'
      task = self.make(np.random.default_rng(int.from_bytes(_digest(key))), level)
      if split_of(task.canonical, self.heldout_fraction) == split:
        return task
    raise RuntimeError(f'{self.name} level {level}: {_SPLIT_DRAWS} draws gave no task of split {split!r}; it has too few different tasks.')

  def size(self, split: Split, level: int) -> int | None:
    return None


class Collection:
  """A fixed list of tasks of one level, split by hash; an index beyond its end starts over."""

  num_levels = 1

  def __init__(self, name: str, tasks: Iterable[Task], heldout_fraction: float):
    """Split the tasks; 0 puts all in 'train', 1 all in 'heldout'. Tasks that are the same one count once."""
    self.name = name
    self._tasks: dict[str, list[Task]] = {'train': [], 'heldout': []}
    for task in {task.canonical: task for task in tasks}.values():
      self._tasks[split_of(task.canonical, heldout_fraction)].append(task)

  def task(self, split: Split, level: int, index: int) -> Task:
    _check_place(self, split, level, index)
    tasks = self._tasks[split]
    if not tasks:
      raise ValueError(f'{self.name} has no task in split {split!r}; choose another heldout_fraction.')
    return tasks[index % len(tasks)]

  def size(self, split: Split, level: int) -> int | None:
    return len(self._tasks[split])


@dataclass(frozen=True)
class Domain:
  """A family of tasks and what verifies them: a verifier of final replies, or sessions where there is a state.

  Attributes:
    name: 'family/name', unique.
    version: raised when the tasks or the scoring change.
    source: its tasks.
    verifier: scores final replies; None with `make_session`.
    make_tools: () -> the tools of one episode; called at each reset, released at its end.
    max_turns: assistant messages of an episode.
    chance: share of the problems that the best constant reply may solve.
    needs_sandbox: whether tools or verifier run code; `check` then refuses to start without a sandbox.
    make_session: (problem) -> the session of one episode, with its own tools and verdict; called at each reset.
  """
  name: str
  version: int
  source: TaskSource
  verifier: Verifier | None = None
  make_tools: Callable[[], Sequence[Tool]] = tuple
  max_turns: int = 1
  chance: float = 0.0
  needs_sandbox: bool = False
  make_session: Callable[[Problem], Session] | None = None

  def __post_init__(self):
    if (self.verifier is None) == (self.make_session is None):
      raise ValueError(f'{self.name}: verifier={self.verifier} and make_session={self.make_session}; give one of them: a verifier of final '
                       'replies, or sessions that verify their state.')
    if self.make_session is not None and self.make_tools is not tuple:
      raise ValueError(f'{self.name}: make_tools={self.make_tools} is not asked where there is make_session; give the sessions their tools.')

  def start(self, problem: Problem) -> Session:
    """Return the session of a new episode; whatever making it raises."""
    return self.make_session(problem) if self.make_session else _Replies(problem, self.verifier, self.make_tools())

  def problem(self, split: Split, level: int, index: int) -> Problem:
    """Return the problem of this place; ValueError if there is none."""
    task = self.source.task(split, level, index)
    return Problem(f'{self.name}/{split}/{level}/{index}', self.name, level, ({'role': 'user', 'content': task.question},), task.answer,
                   task.evidence)

  def demonstration(self, split: Split, level: int, index: int) -> tuple[Message, ...]:
    """Return a whole right conversation, the question first."""
    task = self.source.task(split, level, index)
    return ({'role': 'user', 'content': task.question}, *task.demonstration)


class _Replies(Session):
  """A session without a state: only the last reply counts."""

  def __init__(self, problem: Problem, verifier: Verifier, tools: Sequence[Tool]):
    self._problem, self._verifier, self.tools = problem, verifier, tools

  def verify(self, reply: str) -> Verdict:
    return self._verifier.verify(self._problem, reply)


def split_of(canonical: str, heldout_fraction: float) -> Split:
  """Return the split of a task, by the hash of what it is."""
  return 'heldout' if int.from_bytes(_digest(canonical)) < heldout_fraction * 2**64 else 'train'


def _digest(text: str) -> bytes:
  return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _check_place(source: TaskSource, split: str, level: int, index: int) -> None:
  if split not in ('train', 'heldout'):
    raise ValueError(f'split={split!r} must be train or heldout.')
  if not 1 <= level <= source.num_levels or index < 0:
    raise ValueError(f'level={level}, index={index}: levels are 1 to {source.num_levels}, indices start at 0.')
