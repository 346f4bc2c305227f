"""A run as its files tell it: configuration, metrics, episodes, evaluations, and comparisons of evaluations problem by problem.

Only the facts of an episode stay in memory; its conversation is read when it is asked for, so a log may be larger than memory.

Deliberately absent: repair of damaged files, and all that would need the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
import functools
import io
import json
import math
from pathlib import Path
import sys
from typing import Any, BinaryIO, NamedTuple

from envs.core import Evidence
from rl import checkpoint, monitor
from rl import run as run_lib
from rl.evals import stats
from rl.evals.evidence import Try
from rl.evals.stats import Rate

_NUMBER = (int, float)
_NULLABLE = (int, float, type(None))
# What a line of trajectories.jsonl must hold (`monitor.TrajectoryLog`).
_EPISODE_FIELDS: Mapping[str, tuple[type, ...]] = {
    'step': (int,), 'kind': (str,), 'problem_id': (str,), 'domain': (str,), 'level': (int,), 'group': (int,), 'sample': (int,),
    'reward': _NULLABLE, 'advantage': _NULLABLE, 'outcome': (str,), 'reason': (str,), 'dropped': (str,), 'num_turns': (int,),
    'num_tool_calls': (int,), 'num_tool_errors': (int,), 'num_tokens': (int,), 'num_sampled': (int,), 'mean_logprob': _NULLABLE,
    'versions': (list,), 'timing_s': (dict,), 'messages': (list,)}


@dataclass(frozen=True)
class Series:
  """A metric over the run: the steps that wrote it and the values, None where one was not finite."""
  steps: list[int] = field(default_factory=list)
  values: list[float | None] = field(default_factory=list)

  def append(self, step: int, value: float | None) -> None:
    """Add a value; one of the same step, from before a crash, is replaced."""
    if self.steps and self.steps[-1] == step:
      self.values[-1] = value
    else:
      self.steps.append(step)
      self.values.append(value)


@dataclass(frozen=True, slots=True)
class Episode:
  """The facts of one line of a log of episodes; `EpisodeLog.read` has the whole line."""
  step: int
  kind: str
  problem_id: str
  domain: str
  level: int
  group: int
  sample: int
  reward: float | None
  outcome: str
  reason: str
  dropped: str
  evidence: Evidence | None
  number: int
  offset: int
  num_bytes: int

  @property
  def is_graded(self) -> bool:
    return self.reward is not None

  @property
  def is_solved(self) -> bool:
    return self.reward == 1


class EpisodeLog:
  """Episodes as JSON lines."""

  def __init__(self, name: str, open_lines: Callable[[], BinaryIO]):
    """Read the facts of every line.

    Args:
      name: for messages.
      open_lines: () -> the lines as bytes; called again for conversations.

    Raises:
      ValueError: a line that is no episode, by number.
    """
    self.name, self._open = name, open_lines
    self.notes: list[str] = []
    with open_lines() as stream:
      self.episodes = [_episode(name, *line) for line in _json_lines(stream, name, self.notes)]

  def read(self, episodes: Iterable[Episode]) -> list[dict[str, Any]]:
    """Return the whole lines of some of the episodes."""
    records = []
    with self._open() as stream:
      for episode in episodes:
        stream.seek(episode.offset)
        records.append(json.loads(stream.read(episode.num_bytes)))
    return records


class Change(NamedTuple):
  """The change between two evaluations over the problems that both graded."""
  gained: int
  lost: int
  pairs: int

  @property
  def estimate(self) -> stats.Estimate:
    return stats.paired_difference(self.gained, self.lost, self.pairs)


class Place(NamedTuple):
  """Where problems lie: everywhere, in a domain, or at a level of it."""
  domain: str | None = None
  level: int | None = None

  def __str__(self) -> str:
    return 'all' if self.domain is None else self.domain if self.level is None else f'{self.domain} level {self.level}'

  def holds(self, episode: Episode) -> bool:
    """Say whether the episode's problem lies here."""
    return self.domain in (None, episode.domain) and self.level in (None, episode.level)


@dataclass(frozen=True)
class Evaluation:
  """One sample of each held-out problem.

  Attributes:
    name: 'step 0', or what a baseline calls itself.
    episodes: by problem and sample.
    log: where they lie.
  """
  name: str
  episodes: Mapping[tuple[str, int], Episode]
  log: EpisodeLog

  def tries(self) -> list[Try]:
    """Return what was graded of problems with a long text."""
    return [Try(episode.domain, episode.evidence, episode.is_solved) for episode in self.episodes.values()
            if episode.evidence is not None and episode.is_graded]

  def rate(self, place: Place) -> Rate | None:
    """Return pass@1 at a place, None if nothing was graded there."""
    graded = [episode for episode in self.episodes.values() if place.holds(episode) and episode.is_graded]
    return Rate(sum(episode.is_solved for episode in graded), len(graded)) if graded else None


@dataclass(frozen=True)
class Row:
  """A place in a comparison of evaluations.

  Attributes:
    rates: pass@1 by evaluation, None where nothing was graded.
    changes: from each evaluation to the next, None where no problem was graded in both.
    total: from the first evaluation to the last.
  """
  place: Place
  rates: tuple[Rate | None, ...]
  changes: tuple[Change | None, ...]
  total: Change | None


@dataclass(frozen=True)
class Run:
  """What is in a run's directory.

  Attributes:
    config, difference: as `monitor.write_config` wrote them.
    objective: as `monitor.write_objective` wrote it, '' for a run without.
    revision: of the code, '' if it is not known.
    metrics: by key.
    times_s: Unix times of the first and the last line of metrics.
    log: its episodes, None for a run without.
    evaluations: by step.
    notes: what a reader should know first: what is wrong with files, and alarms.
  """
  directory: Path
  config: Mapping[str, Any]
  difference: Mapping[str, Mapping[str, Any]]
  objective: str
  revision: str
  metrics: Mapping[str, Series]
  times_s: tuple[float, float] | None
  log: EpisodeLog | None
  evaluations: Mapping[int, Evaluation]
  notes: tuple[str, ...]

  @property
  def last_step(self) -> int:
    return max((series.steps[-1] for series in self.metrics.values()), default=0)

  def setting(self, key: str) -> Any:
    """Return the configuration's value of a dotted key; ValueError if there is none."""
    value: Any = self.config
    for part in key.split('.'):
      if not isinstance(value, dict) or part not in value:
        raise ValueError(f'{self.directory / monitor.CONFIG_FILE} has no {key!r}; it must be the configuration that the run wrote.')
      value = value[part]
    return value


def read_run(directory: str | Path) -> Run:
  """Read the files of a run, finished or not.

  Raises:
    FileNotFoundError: the directory is no run.
    ValueError: a damaged file, with the line's number.
  """
  directory = Path(directory)
  needed = (monitor.CONFIG_FILE, monitor.DIFFERENCE_FILE, monitor.METRICS_FILE)
  missing = [name for name in needed if not (directory / name).is_file()]
  if missing:
    raise FileNotFoundError(f'{directory} is not the directory of a run: it lacks {", ".join(missing)}. '
                            'Give what --workdir of launch.train was.')
  notes: list[str] = []
  metrics, times_s = _read_metrics(directory / monitor.METRICS_FILE, notes)
  notes += [_alarm(metrics, step) for step in alarm_steps(metrics)]
  path, log = directory / monitor.TRAJECTORIES_FILE, None
  if path.is_file():
    log = EpisodeLog(str(path), functools.partial(path.open, 'rb'))
    notes += log.notes
  try:
    revision = checkpoint.read_host(directory / run_lib.CHECKPOINTS).revision
  except FileNotFoundError:
    revision = ''
  path = directory / monitor.OBJECTIVE_FILE
  objective = path.read_text(encoding='utf-8') if path.is_file() else ''
  return Run(directory, _read_object(directory / monitor.CONFIG_FILE), _read_object(directory / monitor.DIFFERENCE_FILE), objective, revision,
             metrics, times_s, log, {} if log is None else _evaluations(log), tuple(notes))


def read_baseline(path: str | Path) -> Evaluation:
  """Read what `launch.evaluate --config=... --output=` wrote.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is something else, or damaged.
  """
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'--baseline={path} is no file; give what launch.evaluate --config=... --output= wrote.')
  record = _read_object(path)
  name, lines = record.get('name'), record.get('trajectories')
  if not isinstance(name, str) or not isinstance(lines, list):
    raise ValueError(f"{path} has no 'name' and list of 'trajectories'; give what launch.evaluate --config=... --output= wrote.")
  # Lines like those of a run, so that everything else need not know the difference.
  text = ''.join(json.dumps(line) + '\n' for line in lines).encode()
  log = EpisodeLog(f'{path}, trajectories', lambda: io.BytesIO(text))
  return Evaluation(name, {(episode.problem_id, episode.sample): episode for episode in log.episodes}, log)


def ends_of(run: Run, baseline: Evaluation | None) -> tuple[Evaluation, ...]:
  """Return the evaluations to compare: the baseline, the run's first and its last, as far as there are."""
  steps = sorted(run.evaluations)
  own = dict.fromkeys(steps[:1] + steps[-1:])
  return (*([baseline] if baseline else []), *(run.evaluations[step] for step in own))


def compare(evaluations: Sequence[Evaluation]) -> list[Row]:
  """Return pass@1 of evaluations and its changes: over all, by domain and by level."""
  found = {(episode.domain, episode.level) for evaluation in evaluations for episode in evaluation.episodes.values()}
  places = [Place()]
  for domain in sorted({domain for domain, _ in found}):
    levels = sorted(level for other, level in found if other == domain)
    places += [Place(domain), *(Place(domain, level) for level in levels if len(levels) > 1)]
  return [Row(place, tuple(evaluation.rate(place) for evaluation in evaluations),
              tuple(_change(before, after, place) for before, after in zip(evaluations, evaluations[1:], strict=False)),
              _change(evaluations[0], evaluations[-1], place) if evaluations else None) for place in places]


def newly_solved(before: Evaluation, after: Evaluation) -> list[tuple[Episode, Episode]]:
  """Return the problems failed before and solved after, such that the first few come from different domains and levels, hard ones first."""
  pairs = [(first, second) for first, second in _pairs(before, after) if not first.is_solved and second.is_solved]
  seen: Counter[Any] = Counter()

  def rank(key: Any) -> int:
    seen[key] += 1
    return seen[key]

  by_level = sorted(((rank((pair[0].domain, pair[0].level)), -pair[0].level, pair) for pair in pairs), key=lambda entry: entry[:2])
  by_domain = [(rank(pair[0].domain), pair[0].domain, pair) for _, _, pair in by_level]
  return [pair for _, _, pair in sorted(by_domain, key=lambda entry: entry[:2])]


def _pairs(before: Evaluation, after: Evaluation) -> Iterator[tuple[Episode, Episode]]:
  for key, first in before.episodes.items():
    second = after.episodes.get(key)
    if second is not None and first.is_graded and second.is_graded:
      yield first, second


def _change(before: Evaluation, after: Evaluation, place: Place) -> Change | None:
  pairs = [(first.is_solved, second.is_solved) for first, second in _pairs(before, after) if place.holds(first)]
  return Change(pairs.count((False, True)), pairs.count((True, False)), len(pairs)) if pairs else None


def _evaluations(log: EpisodeLog) -> dict[int, Evaluation]:
  by_step: dict[int, dict[tuple[str, int], Episode]] = {}
  for episode in log.episodes:
    if episode.kind == 'eval':
      # A run that was killed before its first checkpoint evaluates step 0 again; the later line counts.
      by_step.setdefault(episode.step, {})[episode.problem_id, episode.sample] = episode
  return {step: Evaluation(f'step {step}', episodes, log) for step, episodes in sorted(by_step.items())}


def _json_lines(stream: BinaryIO, name: str, notes: list[str]) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
  """Yield (line number, offset, bytes, object); a last line without its newline, of a run that goes on or was killed, becomes a note."""
  offset = 0
  for number, line in enumerate(stream, start=1):
    if not line.endswith(b'\n'):
      notes.append(f'The last line of {name} is not finished, as of a run that goes on or was killed; it is left out.')
      return
    try:
      record = json.loads(line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
      raise ValueError(f'{name}, line {number}: {line[:80]!r} is not JSON ({error}); repair the line or delete it.') from error
    if not isinstance(record, dict):
      raise ValueError(f'{name}, line {number}: {line[:80]!r} is not a JSON object; repair the line or delete it.')
    yield number, offset, len(line), record
    offset += len(line)


def _episode(name: str, number: int, offset: int, num_bytes: int, record: Mapping[str, Any]) -> Episode:
  for key, types in _EPISODE_FIELDS.items():
    value = record.get(key, _EPISODE_FIELDS)  # A value that no line holds.
    if not isinstance(value, types) or isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
      got = 'missing' if value is _EPISODE_FIELDS else repr(value)[:80]
      wanted = ' or '.join('null' if kind is type(None) else kind.__name__ for kind in types)
      raise ValueError(f'{name}, line {number}: {key} is {got} and must be {wanted}; repair the line or delete it.')
  for message in record['messages']:
    if not isinstance(message, dict) or not isinstance(message.get('role'), str) or not isinstance(message.get('content'), str):
      raise ValueError(f'{name}, line {number}: the message {repr(message)[:80]} must have a role and a content that are strings; '
                       'repair the line or delete it.')
  evidence = record.get('evidence')
  if evidence is not None:
    evidence = _evidence(evidence, f'{name}, line {number}')
  texts = {key: sys.intern(record[key]) for key in ('kind', 'problem_id', 'domain', 'outcome', 'reason', 'dropped')}
  return Episode(**texts, **{key: record[key] for key in ('step', 'level', 'group', 'sample', 'reward')}, evidence=evidence, number=number,
                 offset=offset, num_bytes=num_bytes)


def _evidence(value: Any, place: str) -> Evidence:
  positions = value.get('positions') if isinstance(value, dict) else None
  if not isinstance(positions, list) or not all(type(one) in _NUMBER and 0 <= one <= 1 for one in positions) or (
      type(value.get('num_words')) is not int):
    raise ValueError(f'{place}: evidence is {repr(value)[:80]} and must have num_words and positions from 0 to 1; '
                     'repair the line or delete it.')
  return Evidence(value['num_words'], tuple(positions))


def _read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, Series], tuple[float, float] | None]:
  metrics: dict[str, Series] = {}
  times_s: tuple[float, float] | None = None
  with path.open('rb') as stream:
    for number, _, _, record in _json_lines(stream, str(path), notes):
      for key, value in record.items():
        if not isinstance(value, _NULLABLE) or isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
          raise ValueError(f'{path}, line {number}: {key} is {repr(value)[:80]} and must be a number or null; '
                           'repair the line or delete it.')
      step, time_s = record.pop('step', None), record.pop('time_s', None)
      if not isinstance(step, int) or not isinstance(time_s, _NUMBER):
        raise ValueError(f'{path}, line {number}: step={step!r} must be an integer and time_s={time_s!r} a number; '
                         'repair the line or delete it.')
      times_s = (times_s[0] if times_s else time_s, time_s)
      for key, value in record.items():
        metrics.setdefault(key, Series()).append(step, value)
  return metrics, times_s


def alarm_steps(metrics: Mapping[str, Series]) -> list[int]:
  """Return the steps at which `rl.drift` raised an alarm."""
  series = metrics.get('drift/alarms', Series())
  counts = [count or 0 for count in series.values]
  return [step for step, count, before in zip(series.steps, counts, [0, *counts], strict=False) if count > before]


def _alarm(metrics: Mapping[str, Series], step: int) -> str:
  def seen(name: str) -> str:
    series = metrics.get(f'drift/{name}', Series())
    value = dict(zip(series.steps, series.values, strict=True)).get(step)
    return 'unknown' if value is None else f'{value:.3g}'

  return (f'Alarm at step {step}: reward models and verifier part. Over the last steps they ranked samples of a problem alike in a share of '
          f'{seen("agreement")} (95 % interval {seen("agreement_low")} to {seen("agreement_high")}), and the mean score was {seen("truth")} by '
          f'the verifier and {seen("proxy")} by the reward models.')


def _read_object(path: Path) -> dict[str, Any]:
  try:
    record = json.loads(path.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON ({error}); repair it.') from error
  if not isinstance(record, dict):
    raise ValueError(f'{path} must hold a JSON object, got {type(record).__name__}.')
  return record


def _refuse_constant(text: str) -> float:
  raise ValueError(f'{text} is no JSON number')
