"""Accuracy by position of the evidence and by length, as one SVG that needs nothing else: for a page of its own or inside another.

Text and axes take the color of the page around them. Pass the same evaluations to compare: each has a line; the tables show the last one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from launch import svg
from rl.evals import evidence
from rl.evals.evidence import NUM_BINS, Try
from rl.evals.stats import Rate

_WIDTH, _GAP = 980, 40
_PANEL = (_WIDTH - _GAP) / 2
_PLOT_HEIGHT, _ROW = 210, 24
_TOP, _TITLE = 24, 34  # Of the legend, and of a panel's title.
_LEFT, _LEFT_OF_DOMAINS = 52, 200  # Room for labels.


class _Series(NamedTuple):
  """A line: its color, and (x in [0, 1], rate) from left to right."""
  color: str
  points: list[tuple[float, Rate]]


def picture(evaluations: Sequence[tuple[str, Sequence[Try]]], background: str | None = None) -> str:
  """Return the SVG of some evaluations, each with its name; '' if none has a problem with a long text.

  Args:
    evaluations: at most three, which are compared; names may hold anything.
    background: color behind it, None for that of the page around.
  """
  evaluations = [(name, tries) for name, tries in evaluations if tries]
  if not evaluations:
    return ''
  tries = evaluations[-1][1]
  lengths = sorted({one.evidence.num_words for _, some in evaluations for one in some})
  domains = sorted({one.domain for one in tries})
  colors = [svg.COLORS[number % len(svg.COLORS)] for number in range(len(evaluations))]
  at = {words: (place + 0.5) / len(lengths) for place, words in enumerate(lengths)}
  positions = [_Series(color, [((place + 0.5) / NUM_BINS, rate) for place, rate in evidence.by_position(some).items()])
               for color, (_, some) in zip(colors, evaluations, strict=True)]
  by_length = [_Series(color, [(at[words], rate) for words, rate in evidence.by_length(some).items()])
               for color, (_, some) in zip(colors, evaluations, strict=True)]
  of_last = f' ({evaluations[-1][0][:svg.MAX_LABEL]})' if len(evaluations) > 1 else ''
  cells = evidence.by_length_and_position(tries)
  rows = [(_short(words), [cells.get((words, place)) for place in range(NUM_BINS)]) for words in lengths]
  by_domain = evidence.by_domain_and_length(tries)
  domain_rows = [(domain, [by_domain.get((domain, words)) for words in lengths]) for domain in domains]
  second = _TOP + _TITLE + _PLOT_HEIGHT + 62
  height = second + _TITLE + _ROW * max(len(rows), len(domain_rows)) + 30
  right = _PANEL + _GAP
  parts = [
      *svg.legend([name for name, _ in evaluations], colors), svg.text(_WIDTH, 15, 'bars: 95 % intervals', 'end', 0.65),
      *_plot(0, _TOP, 'Solved, by position of the evidence', positions, {0.0: 'start', 0.5: 'middle of the text', 1.0: 'end'}),
      *_plot(right, _TOP, 'Solved, by words of the text', by_length, {at[words]: _short(words) for words in lengths}),
      *_table(0, second, f'Percent solved, by words and position{of_last}', rows, [f'{place / NUM_BINS:g}' for place in range(NUM_BINS)], _LEFT),
      *_table(right, second, f'Percent solved, by domain and words{of_last}', domain_rows, [_short(words) for words in lengths],
              _LEFT_OF_DOMAINS)]
  return svg.frame(_WIDTH, height, 'Accuracy by position of the evidence and by length', parts, background)


def _plot(x: float, y: float, title: str, series: Sequence[_Series], labels: Mapping[float, str]) -> Iterator[str]:
  """Yield a panel of lines with intervals over [0, 1]; `labels` stand below the axis."""
  top, left, width = y + _TITLE, x + _LEFT, _PANEL - _LEFT
  yield svg.title(x, y, title)
  for share in (0, 0.25, 0.5, 0.75, 1):
    height = top + _PLOT_HEIGHT * (1 - share)
    yield (f'<line x1="{left:.1f}" x2="{left + width:.1f}" y1="{height:.1f}" y2="{height:.1f}" stroke="currentColor" '
           f'stroke-opacity="{0.15 if share else 0.6}"/>' + svg.text(left - 8, height + 4, f'{share:.0%}', 'end', 0.65))
  for place, label in labels.items():
    anchor = 'start' if place == 0 else 'end' if place == 1 else 'middle'
    yield svg.text(left + width * place, top + _PLOT_HEIGHT + 18, label, anchor, 0.65)
  for number, (color, points) in enumerate(series):
    # Side by side, so that intervals do not hide each other.
    shift = 5 * (number - (len(series) - 1) / 2)
    places = [(left + width * place + shift, *(top + _PLOT_HEIGHT * (1 - share) for share in rate.estimate), rate) for place, rate in points]
    yield svg.line([(a, b) for a, b, *_ in places], color)
    for a, b, low, high, rate in places:
      yield svg.told(_told(rate), [svg.interval(a, low, high, color), f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{color}"/>'])


def _table(x: float, y: float, title: str, rows: Sequence[tuple[str, Sequence[Rate | None]]], columns: Sequence[Hashable],
           left: float) -> Iterator[str]:
  """Yield a panel of rates, darker where higher."""
  top, width = y + _TITLE, (_PANEL - left) / len(columns)
  yield svg.title(x, y, title)
  for row, (label, rates) in enumerate(rows):
    yield svg.text(x + left - 8, top + _ROW * row + 16, label, 'end')
    for column, rate in enumerate(rates):
      if rate is not None:
        a, b, share = x + left + width * column, top + _ROW * row, rate.estimate.value
        cell = (f'<rect x="{a:.1f}" y="{b}" width="{width - 1:.1f}" height="{_ROW - 1}" fill="{svg.COLORS[0]}" '
                f'fill-opacity="{0.05 + 0.7 * share:.2f}"/>')
        yield svg.told(_told(rate), [cell, svg.text(a + width / 2, b + 16, f'{100 * share:.0f}', 'middle')])
  for column, label in enumerate(columns):
    yield svg.text(x + left + width * (column + 0.5), top + _ROW * len(rows) + 14, str(label), 'middle', 0.65)


def _short(words: int) -> str:
  return f'{words / 1e6:.3g}M' if words >= 999_500 else f'{words / 1000:.3g}k' if words >= 1000 else str(words)


def _told(rate: Rate) -> str:
  value, low, high = rate.estimate
  return f'{rate.solved} of {rate.graded} solved, {value:.1%}, 95 % interval {low:.1%} to {high:.1%}'
