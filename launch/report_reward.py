"""Whether rewards can be trusted, as pictures and a table: how well calibrated a reward model is, and what its optimization does to the truth.

The curve of over-optimization has the proxy's reward and the gold verdict over the distance from the reference, d = sqrt(KL) in nats of a
reply (arXiv:2210.10760). Each has a scale of its own, so read the shapes: where gold turns down while the proxy goes on is the place to stop.
Points lie in the order of their distance, which is that of the steps only as long as a run moves away.

Deliberately absent: a fit of that paper's functional form, which a single run does not determine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import math
from pathlib import Path
from typing import NamedTuple

from launch import report_run, svg
from launch.report_run import Series
from launch.report_text import grid, visible
from rl.calibration import Bin, Calibration
from rl.evals import stats

PICTURE_FILE = 'calibration.svg'
_WIDTH, _GAP = 980, 40
_PANEL, _PLOT = (_WIDTH - _GAP) / 2, 230
_TOP, _TITLE, _LEFT, _BELOW = 24, 34, 52, 56
_MAX_POINTS = 40  # Of a curve; more are averaged in groups of neighbors.
GOLD, PROXY, LENGTH = 'critic/score/mean', 'proxy/mean', 'response_length/mean'
# Of a whole reply, or else of a token.
_KL_OF_REPLY, _KL_OF_TOKEN = ('objective/kl',), ('policy/reference_kl_k3', 'policy/reference_kl_k1')


class Point(NamedTuple):
  """A step of a run against a proxy: the root of the KL from the reference in nats of a reply, both rewards, and whether there was an alarm."""
  step: float
  distance: float
  proxy: float
  gold: float
  is_alarm: bool


def table(calibrations: Mapping[str, Calibration]) -> str:
  """Return the main numbers of each dimension, as text."""
  lines = [['', 'pairs', 'accuracy', 'ECE', 'scaled', 'chance', 'Brier', 'scaled', 'temperature', 'length corr.', 'longer (people)',
            'longer (model)']]
  for name, one in calibrations.items():
    lines.append([visible(name), str(one.pairs), f'{one.accuracy:.1%} [{one.accuracy_low:.1%}, {one.accuracy_high:.1%}]',
                  f'{one.raw.ece_mass:.4f}', f'{one.scaled.ece_mass:.4f}', f'{one.scaled.ece_mass_floor:.4f}', f'{one.raw.brier:.4f}',
                  f'{one.scaled.brier:.4f}', f'{one.temperature:.3g}', f'{one.length_correlation:+.3f}', f'{one.longer_preferred:.1%}',
                  f'{one.longer_scored:.1%}'])
  return grid(lines) + ('\n\nECE: expected calibration error, bins of equal mass; scaled: by a temperature fitted on the other half of the pairs;'
                        '\nchance: about what perfect calibration shows with so few pairs; length corr.: Spearman, of leads in score and tokens.')


def reliability(calibrations: Mapping[str, Calibration], background: str | None = None) -> str:
  """Return the SVG of how often people agree by how sure the model is, a panel for each dimension; '' without any pair.

  Args:
    background: color behind it, None for that of the page around.
  """
  shown = {name: one for name, one in calibrations.items() if one.pairs}
  if not shown:
    return ''
  parts = [*svg.legend(['scores as they are', 'with a temperature'], svg.COLORS[:2]), svg.text(_WIDTH, 15, 'bars: 95 % intervals', 'end', 0.65)]
  for number, (name, one) in enumerate(shown.items()):
    parts += _reliability_panel((number % 2) * (_PANEL + _GAP), _TOP + (number // 2) * (_TITLE + _PLOT + _BELOW), name, one)
  height = _TOP + math.ceil(len(shown) / 2) * (_TITLE + _PLOT + _BELOW)
  return svg.frame(_WIDTH, height, 'Agreement with people by confidence of the reward model', parts, background)


def over_optimization(metrics: Mapping[str, Series], background: str | None = None) -> str:
  """Return the SVG of proxy and gold over the distance from the reference; '' for a run without both, or without a KL."""
  points = optimization_points(metrics)
  if not points:
    return ''
  left, width, top = _LEFT, _WIDTH - 2 * _LEFT, _TOP + _TITLE
  farthest = max(point.distance for point in points) or 1.0
  parts = [*svg.legend(['reward of the proxy (left)', 'gold verdict (right)'], svg.COLORS[:2]),
           svg.title(0, _TOP, 'Over-optimization: rewards by distance from the reference')]
  if any(point.is_alarm for point in points):
    parts.append(svg.text(_WIDTH, 15, 'dashed: alarms', 'end', 0.65))

  def x(distance: float) -> float:
    return left + width * distance / farthest

  for k in range(6):
    parts.append(svg.text(x(farthest * k / 5), top + _PLOT + 18, f'{farthest * k / 5:.3g}', 'middle', 0.65))
  parts.append(svg.text(left + width / 2, top + _PLOT + 38, 'sqrt KL, nats of a reply', 'middle', 0.65))
  for point in points:
    if point.is_alarm:
      parts.append(svg.told(f'alarm at step {point.step:g}', [
          f'<line x1="{x(point.distance):.1f}" x2="{x(point.distance):.1f}" y1="{top}" y2="{top + _PLOT}" stroke="#c0392b" '
          'stroke-dasharray="4 4" stroke-opacity="0.6"/>']))
  for color, name, edge, anchor in ((svg.COLORS[0], 'proxy', left - 8, 'end'), (svg.COLORS[1], 'gold', left + width + 8, 'start')):
    values = [point.proxy if name == 'proxy' else point.gold for point in points]
    low, high = min(values), max(values)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)

    def y(value: float, low=low, high=high) -> float:
      return top + _PLOT * (high - value) / (high - low)

    parts += [svg.text(edge, y(value) + 4, f'{value:.3g}', anchor, 0.65) for value in (low, (low + high) / 2, high)]
    places = [(x(point.distance), y(value)) for point, value in zip(points, values, strict=True)]
    parts.append(svg.line(places, color))
    parts += [svg.told(f'{name} {value:.4g} at sqrt KL {point.distance:.3g}, step {point.step:g}',
                       [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>'])
              for (a, b), point, value in zip(places, points, values, strict=True)]
  return svg.frame(_WIDTH, top + _PLOT + _BELOW, 'Proxy and gold over the distance from the reference', parts, background)


def optimization_points(metrics: Mapping[str, Series]) -> list[Point]:
  """Return the steps of a run against a proxy by their distance, neighbors averaged where there are many; [] where something is missing."""
  of_step = [dict(zip(metrics[key].steps, metrics[key].values, strict=True)) if key in metrics else {} for key in (PROXY, GOLD)]
  alarms = report_run.alarm_steps(metrics)
  distances = _distances(metrics)
  known = [step for step in distances if of_step[0].get(step) is not None and of_step[1].get(step) is not None]
  points = sorted((Point(step, distances[step], of_step[0][step], of_step[1][step], step in alarms) for step in known),
                  key=lambda point: point.distance)
  size = math.ceil(len(points) / _MAX_POINTS)
  return [_merged(points[start:start + size]) for start in range(0, len(points), size)] if points else []


def _distances(metrics: Mapping[str, Series]) -> dict[int, float]:
  """Return step -> sqrt(KL) in nats of a reply; an estimate below 0 counts as 0."""
  for key in (*_KL_OF_REPLY, *_KL_OF_TOKEN):
    if key in metrics and (key in _KL_OF_REPLY or LENGTH in metrics):
      lengths = {} if key in _KL_OF_REPLY else dict(zip(metrics[LENGTH].steps, metrics[LENGTH].values, strict=True))
      found = {step: (value, 1.0 if key in _KL_OF_REPLY else lengths.get(step))
               for step, value in zip(metrics[key].steps, metrics[key].values, strict=True)}
      return {step: math.sqrt(max(value * length, 0.0)) for step, (value, length) in found.items() if None not in (value, length)}
  return {}


def _merged(points: Sequence[Point]) -> Point:
  means = [sum(getattr(point, name) for point in points) / len(points) for name in ('step', 'distance', 'proxy', 'gold')]
  return Point(*means, any(point.is_alarm for point in points))


def _reliability_panel(x: float, y: float, name: str, one: Calibration) -> Iterator[str]:
  """Yield a panel: agreement from 0 to 1 over confidence from 1/2 to 1, with the diagonal of perfect calibration."""
  top, left, width = y + _TITLE, x + _LEFT, _PANEL - _LEFT
  yield svg.title(x, y, f'{name[:svg.MAX_LABEL]}: ECE {one.raw.ece_mass:.3f}, {one.scaled.ece_mass:.3f} at temperature '
                        f'{one.temperature:.2g}')
  for share in (0, 0.25, 0.5, 0.75, 1):
    height = top + _PLOT * (1 - share)
    yield (f'<line x1="{left:.1f}" x2="{left + width:.1f}" y1="{height:.1f}" y2="{height:.1f}" stroke="currentColor" '
           f'stroke-opacity="{0.15 if share else 0.6}"/>' + svg.text(left - 8, height + 4, f'{share:.0%}', 'end', 0.65))
    yield svg.text(left + width * share, top + _PLOT + 18, f'{50 * (1 + share):g}%', 'middle', 0.65)
  yield svg.text(left + width / 2, top + _PLOT + 38, 'how sure the model is', 'middle', 0.65)
  yield (f'<line x1="{left:.1f}" x2="{left + width:.1f}" y1="{top + _PLOT / 2:.1f}" y2="{top:.1f}" stroke="currentColor" '
         'stroke-dasharray="5 4" stroke-opacity="0.5"/>')
  for color, fit in zip(svg.COLORS[:2], (one.raw, one.scaled), strict=True):
    places = [(left + width * (2 * bin_.confidence - 1), bin_) for bin_ in fit.bins]
    yield svg.line([(a, top + _PLOT * (1 - bin_.right)) for a, bin_ in places], color)
    for a, bin_ in places:
      _, low, high = stats.proportion(bin_.right * bin_.pairs, bin_.pairs)
      yield svg.told(_told(bin_), [svg.interval(a, top + _PLOT * (1 - low), top + _PLOT * (1 - high), color),
                                   f'<circle cx="{a:.1f}" cy="{top + _PLOT * (1 - bin_.right):.1f}" r="3.5" fill="{color}"/>'])


def _told(bin_: Bin) -> str:
  return f'{bin_.pairs} pairs, {bin_.confidence:.1%} sure, {bin_.right:.1%} right'


def write_picture(directory: str | Path, calibrations: Mapping[str, Calibration]) -> None:
  """Write the reliability picture of a reward run into its directory, if there is anything to show."""
  drawing = reliability(calibrations, background='white')
  if drawing:
    (Path(directory) / PICTURE_FILE).write_text(drawing + '\n', encoding='utf-8')
