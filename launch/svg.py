"""Pieces of pictures that need nothing else: text that cannot become markup, titles, legends, and the frame around them.

Text and axes take the color of the page around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from launch.report_text import visible

COLORS = ('#2f7fd6', '#d9661c', '#2a9d63')
MAX_LABEL = 30  # Characters.
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'


def frame(width: float, height: float, label: str, parts: Iterable[str], background: str | None) -> str:
  """Return the whole SVG; `background` is a color behind it, None for that of the page around."""
  back = f'<rect width="100%" height="100%" fill={quoteattr(background)}/>' if background else ''
  return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 {width + 24:.0f} {height:.0f}" width="{width + 24:.0f}" {_FONT} '
          f'fill="currentColor" role="img" aria-label={quoteattr(label)}>{back}{"".join(parts)}</svg>')


def title(x: float, y: float, words: str) -> str:
  """Return the heading of a panel whose upper left corner is (x, y)."""
  return f'<text x="{x:.1f}" y="{y + 20:.1f}" font-weight="600" font-size="14">{escape(visible(words))}</text>'


def text(x: float, y: float, words: str, anchor: str = 'start', opacity: float = 1) -> str:
  """Return a label, cut if it is long."""
  words = visible(words)
  words = words if len(words) <= MAX_LABEL + 1 else words[:MAX_LABEL] + '\u2026'
  return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill-opacity="{opacity}">{escape(words)}</text>'


def told(words: str, parts: Iterable[str]) -> str:
  """Return parts that say something when pointed at."""
  return f'<g><title>{escape(visible(words))}</title>{"".join(parts)}</g>'


def line(points: Iterable[tuple[float, float]], color: str) -> str:
  """Return a line through points."""
  return f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>'


def interval(x: float, low: float, high: float, color: str) -> str:
  """Return a bar from one height to another."""
  return (f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{color}" stroke-width="3" stroke-opacity="0.4"/>')


def legend(names: Sequence[str], colors: Sequence[str]) -> Iterator[str]:
  """Yield the names of lines, side by side at the top."""
  x = 0.0
  for name, color in zip(names, colors, strict=True):
    yield f'<rect x="{x:.0f}" y="6" width="10" height="10" fill="{color}"/>' + text(x + 16, 15, name)
    x += 44 + 7 * min(len(visible(name)), MAX_LABEL)
