"""A run as one HTML page: report.html and its scripts beside this file, with everything they show embedded as JSON; it loads nothing.

What the model wrote reaches the page as data of a script block that cannot be closed from inside, and is shown as text only.

Deliberately absent: a server, and charts drawn here; the page's own script draws them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import datetime
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from launch import report_evidence, report_reward, report_run
from launch.report_run import Change, Episode, EpisodeLog, Evaluation, Rate, Row, Run, Series
from rl import monitor, reward_model

_HERE = Path(__file__).parent
_TEMPLATE, _SCRIPTS = 'report.html', ('report.js', 'report_curves.js', 'report_episodes.js')
_MAX_POINTS = 1000  # Of a curve; longer ones are averaged over neighboring steps.
_MAX_MESSAGE_CHARS = 20_000
_MAX_OUTCOMES = 40
_MAX_HIGHLIGHTS = 12


def render(run: Run, baseline: Evaluation | None, max_episode_bytes: int) -> str:
  """Return the page of a run.

  Args:
    run: what it shows.
    baseline: an evaluation of another model on the same problems.
    max_episode_bytes: of the episodes to embed, as JSON. The compared evaluations come first, then the others, then a sample of training
      groups, each group whole; the choice depends on the ids alone.

  Raises:
    ValueError: the configuration lacks what a run writes.
  """
  ends = report_run.ends_of(run, baseline)
  chosen, num_left_out = choose_episodes(run, baseline, max_episode_bytes)
  episodes = [record for log, some in chosen for record in _episode_records(log, some, None if log is run.log else baseline)]
  curves, stride = _curves(run.metrics)
  data = {
      'name': run.directory.name or str(run.directory), 'facts': _facts(run, num_left_out, stride, max_episode_bytes), 'notes': run.notes,
      'difference': [[key, change.get('default'), change.get('value')] for key, change in run.difference.items()],
      'objective': run.objective, 'config': json.dumps(run.config, indent=2), 'evaluations': [evaluation.name for evaluation in ends],
      'rows': [_row(row) for row in report_run.compare(ends)] if ends else [],
      'places': _places(run), 'curves': curves, 'outcomes': _outcomes(run.log.episodes if run.log else []),
      'ledger': {key.removeprefix('ledger/'): series.values[-1] for key, series in run.metrics.items() if key.startswith('ledger/')},
      'highlights': _highlights(run, episodes), 'episodes': episodes}
  script = '\n'.join((_HERE / name).read_text(encoding='utf-8') for name in _SCRIPTS)
  page = (_HERE / _TEMPLATE).read_text(encoding='utf-8').replace('{{script}}', script)
  drawings = {'evidence': report_evidence.picture([(evaluation.name, evaluation.tries()) for evaluation in ends]),
              'reliability': report_reward.reliability(reward_model.read_calibrations(run.directory) or {}),
              'over_optimization': report_reward.over_optimization(run.metrics)}
  head, _, tail = page.partition('{{data}}')
  for name, drawing in drawings.items():
    head = head.replace(f'{{{{{name}}}}}', drawing)
  return head + embed(data) + tail


def embed(data: Any) -> str:
  """Return JSON that is safe inside a script element: ASCII, and without the characters that could end the element or start a comment."""
  text = json.dumps(data, allow_nan=False, separators=(',', ':'))
  return text.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')


def choose_episodes(run: Run, baseline: Evaluation | None, max_bytes: int) -> tuple[list[tuple[EpisodeLog, list[Episode]]], int]:
  """Return (log, its episodes to embed, in their order) for each log, and how many of the run's are left out.

  Units are whole training groups, and problems with what all evaluations say of them; the first and the last evaluation and the baseline
  come first, then the other evaluations, then the groups. Within each, units are taken by the hash of their ids until one does not fit.
  """
  steps = sorted(run.evaluations)
  units: dict[tuple[int, str, str], list[tuple[EpisodeLog, Episode]]] = {}
  for log in [log for log in (baseline.log if baseline else None, run.log) if log is not None]:
    for episode in log.episodes:
      if log is not run.log or (episode.kind == 'eval' and episode.step in (steps[0], steps[-1])):
        priority, unit = 0, episode.problem_id
      elif episode.kind == 'eval':
        priority, unit = 1, episode.problem_id
      else:
        priority, unit = 2, f'{episode.step}/{episode.group}'
      units.setdefault((priority, hashlib.blake2b(unit.encode(), digest_size=8).hexdigest(), unit), []).append((log, episode))
  kept: dict[int, list[Episode]] = {}
  total = 0
  for key in sorted(units):
    total += sum(episode.num_bytes for _, episode in units[key])
    if total > max_bytes:
      break
    for log, episode in units[key]:
      kept.setdefault(id(log), []).append(episode)
  logs = [log for log in (baseline.log if baseline else None, run.log) if log is not None]
  chosen = [(log, sorted(kept.get(id(log), []), key=lambda episode: episode.number)) for log in logs]
  return chosen, sum(len(log.episodes) for log in logs) - sum(len(some) for _, some in chosen)


def _episode_records(log: EpisodeLog, episodes: Sequence[Episode], baseline: Evaluation | None) -> Iterable[dict[str, Any]]:
  for episode, record in zip(episodes, log.read(episodes), strict=True):
    messages = [{**message, 'content': message['content'][:_MAX_MESSAGE_CHARS], 'cut': max(len(message['content']) - _MAX_MESSAGE_CHARS, 0)}
                for message in record['messages']]
    origin = {} if baseline is None else {'step': None, 'kind': 'baseline', 'name': baseline.name}
    yield {**record, 'messages': messages, **origin, 'line': episode.number}


def _highlights(run: Run, episodes: Sequence[Mapping[str, Any]]) -> list[int]:
  """Return the places in `episodes` of some problems' last evaluation, failed in the first and solved there."""
  steps = sorted(run.evaluations)
  if len(steps) < 2:
    return []
  place_of = {record['line']: place for place, record in enumerate(episodes) if record['kind'] == 'eval'}
  pairs = report_run.newly_solved(run.evaluations[steps[0]], run.evaluations[steps[-1]])
  return [place_of[after.number] for _, after in pairs if after.number in place_of][:_MAX_HIGHLIGHTS]


def _facts(run: Run, num_left_out: int, stride: int, max_episode_bytes: int) -> list[list[str]]:
  facts = [['Model', str(run.setting('model.path'))], ['Stage', str(run.setting('stage'))],
           ['Steps', f'{run.last_step} of {run.setting("num_steps")}'], ['Seed', str(run.setting('seed'))],
           ['Code revision', run.revision or 'not known (no checkpoint)']]
  if run.setting('stage') == 'rl':
    facts.insert(2, ['Domains', ', '.join(run.setting('domains'))])
    facts.insert(3, ['A step', f'{run.setting("groups")} problems with {run.setting("group_size")} samples'])
  if run.times_s:
    start = datetime.datetime.fromtimestamp(run.times_s[0], datetime.UTC)
    elapsed = datetime.timedelta(seconds=round(run.times_s[1] - run.times_s[0]))
    facts += [['Started', f'{start:%Y-%m-%d %H:%M} UTC'], ['Duration', str(elapsed)]]
  if 'train/tokens' in run.metrics:
    facts.append(['Tokens trained on', f'{sum(value or 0 for value in run.metrics["train/tokens"].values):,.0f}'])
  if run.log is not None:
    facts.append(['Episodes', f'{len(run.log.episodes):,}'])
  if num_left_out:
    facts.append(['Not on this page', f'{num_left_out:,} episodes beyond {max_episode_bytes / 2**20:g} MiB. Evaluations come first, then a '
                                      f"sample of training groups; the run's {monitor.TRAJECTORIES_FILE} has all."])
  if stride > 1:
    facts.append(['Curves', f'a point is the mean of up to {stride} values'])
  return facts


def _row(row: Row) -> dict[str, Any]:
  return {'domain': row.place.domain, 'level': row.place.level, 'rates': [_rate(rate) for rate in row.rates],
          'changes': [_change(change) for change in row.changes], 'total': _change(row.total)}


def _rate(rate: Rate | None) -> dict[str, float] | None:
  return rate and {**rate._asdict(), **rate.estimate._asdict()}


def _change(change: Change | None) -> dict[str, float] | None:
  return change and {**change._asdict(), **change.estimate._asdict()}


def _places(run: Run) -> list[list[Any]]:
  """Return [domain, its levels] of the run's episodes."""
  levels: dict[str, set[int]] = {}
  for episode in run.log.episodes if run.log else []:
    levels.setdefault(episode.domain, set()).add(episode.level)
  return [[domain, sorted(some)] for domain, some in sorted(levels.items())]


def _curves(metrics: Mapping[str, Series]) -> tuple[dict[str, Any], int]:
  """Return {'axes': lists of steps, 'series': {key: [number of its axis, values]}} and how many values a point stands for at most."""
  axes: dict[tuple[int, ...], int] = {}
  series, largest = {}, 1
  for key, one in sorted(metrics.items()):
    stride = math.ceil(len(one.steps) / _MAX_POINTS)
    largest = max(largest, stride)
    values = [_mean(one.values[start:start + stride]) for start in range(0, len(one.values), stride)]
    if any(value is not None for value in values):
      steps = tuple(one.steps[min(start + stride, len(one.steps)) - 1] for start in range(0, len(one.steps), stride))
      series[key] = [axes.setdefault(steps, len(axes)), values]
  return {'axes': [list(axis) for axis in axes], 'series': series}, largest


def _mean(values: Sequence[float | None]) -> float | None:
  known = [value for value in values if value is not None]
  return float(f'{sum(known) / len(known):.5g}') if known else None


def _outcomes(episodes: Iterable[Episode]) -> list[list[Any]]:
  """Return [outcome, reason, why not trained on, count in training, count in evaluations], frequent ones first."""
  counts = Counter((episode.outcome, episode.reason[:120], episode.dropped, episode.kind) for episode in episodes)
  causes = Counter()
  for (*cause, _), count in counts.items():
    causes[tuple(cause)] += count
  rows = [[*cause, counts[*cause, 'train'], counts[*cause, 'eval']] for cause, _ in causes.most_common(_MAX_OUTCOMES)]
  rest = [cause for cause, _ in causes.most_common()[_MAX_OUTCOMES:]]
  if rest:
    rows.append([f'{len(rest)} others', '', '', *(sum(counts[*cause, kind] for cause in rest) for kind in ('train', 'eval'))])
  return rows
