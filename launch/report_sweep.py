"""What a sweep found, as a table and as one SVG: means over seeds with 95 % intervals, and changes between settings seed by seed.

Student's intervals assume that what seeds change is normally distributed; of three seeds they are wide, and may reach beyond what a metric can
be. Nothing is said of a change that no interval backs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
import math
from pathlib import Path
from typing import NamedTuple

from launch import svg
from launch.report_run import Series
from launch.report_text import grid, visible
from rl.evals import stats
from rl.evals.stats import Estimate

TABLE_FILE, PICTURE_FILE = 'summary.txt', 'summary.svg'
_COLORS = (*svg.COLORS, '#8e5bc0', '#c23b6b', '#7a7a3a', '#3aa6b0', '#555555')
_WIDTH, _GAP, _LEFT = 980, 30, 44
_TOP, _TITLE, _PLOT, _BELOW, _LEGEND, _ROW = 24, 34, 200, 40, 22, 24
_LEFT_OF_ENDS = 210  # Room for the names of settings.


@dataclass(frozen=True)
class Study:
  """What the runs of a sweep measured.

  Attributes:
    results: setting -> the metrics of a run for each seed, in the order of the seeds, which is the same everywhere.
    metric: whose last value is compared.
    curves: metrics whose course, and mean over the steps, are compared.
    against: setting -> the one it is compared with.
    panels: title -> settings drawn together; {} is all in one.
  """
  results: Mapping[str, Sequence[Mapping[str, Series]]]
  metric: str
  curves: tuple[str, ...]
  against: Mapping[str, str] = field(default_factory=dict)
  panels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Row(NamedTuple):
  """A line of the table: for the last value of the metric, then the mean of each curve, an estimate and the change, None without one."""
  setting: str
  estimates: tuple[Estimate, ...]
  changes: tuple[Estimate | None, ...]


def rows(study: Study) -> list[Row]:
  """Return a row for each setting; ValueError for a run without one of the metrics."""
  numbers = {setting: [_numbers(study, setting, metrics) for metrics in runs] for setting, runs in study.results.items()}
  found = []
  for setting, of_seeds in numbers.items():
    base = numbers.get(study.against.get(setting, ''))
    columns = list(zip(*of_seeds, strict=True))
    changes = [None] * len(columns) if base is None else [
        stats.mean([new - old for new, old in zip(*pair, strict=True)]) for pair in zip(columns, zip(*base, strict=True), strict=True)]
    found.append(Row(setting, tuple(map(stats.mean, columns)), tuple(changes)))
  return found


def table(study: Study) -> str:
  """Return the table as text."""
  num_seeds = len(next(iter(study.results.values())))
  titles = [f'{study.metric} at the end', *(f'{curve}, mean over steps' for curve in study.curves)]
  lines = [['', *(cell for title in titles for cell in (title, 'change'))]]
  for row in rows(study):
    other = f' (to {study.against[row.setting]})' if row.setting in study.against else ''
    lines.append([visible(row.setting + other), *(cell for pair in zip(row.estimates, row.changes, strict=True)
                                                  for cell in (_told(pair[0]), '' if pair[1] is None else _told(pair[1], '+')))])
  return f'Means over {num_seeds} {"seeds" if num_seeds > 1 else "seed"} with 95 % intervals; changes are seed by seed.\n\n{grid(lines)}'


def picture(study: Study, background: str | None = None) -> str:
  """Return the SVG: curves in panels, a row of them for each metric, and last values below."""
  panels = study.panels or {'': tuple(study.results)}
  width = (_WIDTH - _GAP * (len(panels) - 1)) / len(panels)
  parts, y = [svg.text(_WIDTH, 15, 'bars and bands: 95 % intervals', 'end', 0.65)], float(_TOP)
  for curve in study.curves:
    lines = {name: _course(study, name, curve) for names in panels.values() for name in names}
    values = [estimate.value for line in lines.values() for _, estimate in line]
    low, high = min(0.0, *values), max(values)
    bounds = (low, high if high > low else low + 1.0)
    for number, (title, names) in enumerate(panels.items()):
      heading = f'{title}: {curve} by step' if title else f'{curve} by step'
      parts += _panel(number * (width + _GAP), y, width, heading, {name: lines[name] for name in names}, bounds)
    y += _TITLE + _PLOT + _BELOW + _LEGEND * math.ceil(max(map(len, panels.values())) / 2)
  parts += _ends(y, study)
  return svg.frame(_WIDTH, y + _TITLE + _ROW * len(study.results) + 40, 'What the settings of a sweep reached', parts, background)


def write(study: Study, directory: str | Path) -> str:
  """Write table and picture into the directory of a sweep; return the table."""
  text = table(study)
  (Path(directory) / TABLE_FILE).write_text(text + '\n', encoding='utf-8')
  (Path(directory) / PICTURE_FILE).write_text(picture(study, background='white') + '\n', encoding='utf-8')
  return text


def _series(study: Study, setting: str, metrics: Mapping[str, Series], key: str) -> list[tuple[int, float]]:
  series = metrics.get(key, Series())
  known = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if value is not None]
  if not known:
    raise ValueError(f'A run of {setting} has no value of {key!r}; it wrote {", ".join(sorted(metrics))}.')
  return known


def _numbers(study: Study, setting: str, metrics: Mapping[str, Series]) -> tuple[float, ...]:
  """Return of one run the last value of the metric, then the mean of each curve."""
  curves = [[value for _, value in _series(study, setting, metrics, curve)] for curve in study.curves]
  return (_series(study, setting, metrics, study.metric)[-1][1], *(sum(values) / len(values) for values in curves))


def _course(study: Study, setting: str, curve: str) -> list[tuple[int, Estimate]]:
  """Return (step, mean over seeds) for the steps that all seeds have."""
  runs = [dict(_series(study, setting, metrics, curve)) for metrics in study.results[setting]]
  return [(step, stats.mean([run[step] for run in runs])) for step in sorted(set.intersection(*map(set, runs)))]


def _told(estimate: Estimate, sign: str = '') -> str:
  value, low, high = (f'{bound:{sign}.3f}' for bound in estimate)
  return f'{value} [{low}, {high}]' if math.isfinite(estimate.low) else f'{value} (one seed)'


def _panel(x: float, y: float, width: float, title: str, lines: Mapping[str, Sequence[tuple[int, Estimate]]],
           bounds: tuple[float, float]) -> Iterator[str]:
  """Yield curves with bands of their intervals, and their names below."""
  top, left, inner = y + _TITLE, x + _LEFT, width - _LEFT
  last = max((line[-1][0] for line in lines.values() if line), default=0) or 1
  low, high = bounds
  yield svg.title(x, y, title)

  def at(step: int, value: float) -> tuple[float, float]:
    return left + inner * step / last, top + _PLOT * (1 - (min(max(value, low), high) - low) / (high - low))

  for place in range(5):
    height = top + _PLOT * (1 - place / 4)
    yield (f'<line x1="{left:.1f}" x2="{left + inner:.1f}" y1="{height:.1f}" y2="{height:.1f}" stroke="currentColor" '
           f'stroke-opacity="{0.15 if place else 0.6}"/>' + svg.text(left - 6, height + 4, f'{low + (high - low) * place / 4:.2g}', 'end', 0.65))
    yield svg.text(left + inner * place / 4, top + _PLOT + 18, f'{last * place / 4:g}', 'middle', 0.65)
  for number, (name, line) in enumerate(lines.items()):
    color = _COLORS[number % len(_COLORS)]
    edge = [at(step, one.low) for step, one in line] + [at(step, one.high) for step, one in reversed(line)]
    band = f'<polygon fill="{color}" fill-opacity="0.1" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in edge)}"/>'
    yield svg.told(name, [band, svg.line([at(step, one.value) for step, one in line], color)])
    a, b = left + (number % 2) * inner / 2, top + _PLOT + 26 + _LEGEND * (number // 2)
    yield f'<rect x="{a:.0f}" y="{b + 4:.0f}" width="10" height="10" fill="{color}"/>' + svg.text(a + 16, b + 13, name)


def _ends(y: float, study: Study) -> Iterator[str]:
  """Yield a line for each setting with the last values of its seeds, their mean and its interval."""
  found, inner = rows(study), _WIDTH - _LEFT_OF_ENDS
  values = {name: [_series(study, name, metrics, study.metric)[-1][1] for metrics in runs] for name, runs in study.results.items()}
  low, high = min(0.0, *(value for some in values.values() for value in some)), max(value for some in values.values() for value in some)
  high = high if high > low else low + 1.0
  yield svg.title(0, y, f'{study.metric} at the end: every seed, mean, 95 % interval')

  def at(value: float) -> float:
    return _LEFT_OF_ENDS + inner * (min(max(value, low), high) - low) / (high - low)

  for number, row in enumerate(found):
    height, end = y + _TITLE + _ROW * number + 12, row.estimates[0]
    yield svg.text(_LEFT_OF_ENDS - 12, height + 4, row.setting, 'end')
    yield svg.told(f'{row.setting}: {_told(end)}', [
        f'<line x1="{at(end.low):.1f}" x2="{at(end.high):.1f}" y1="{height:.1f}" y2="{height:.1f}" stroke="{_COLORS[0]}" stroke-width="3" '
        'stroke-opacity="0.4"/>',
        *(f'<circle cx="{at(value):.1f}" cy="{height:.1f}" r="3" fill="{_COLORS[1]}" fill-opacity="0.7"/>' for value in values[row.setting]),
        f'<circle cx="{at(end.value):.1f}" cy="{height:.1f}" r="4.5" fill="{_COLORS[0]}"/>'])
  for place in range(5):
    yield svg.text(_LEFT_OF_ENDS + inner * place / 4, y + _TITLE + _ROW * len(found) + 16, f'{low + (high - low) * place / 4:.2g}',
                   'end' if place == 4 else 'middle', 0.65)
