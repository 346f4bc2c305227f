"""Show what a run did: pass@1 on held-out problems before and after, problems it learned to solve, and a page of curves and episodes.

    python -m launch.report --workdir=runs/x
    python -m launch.report --workdir=runs/x --baseline=base.json --output=x.html

Works on a run that goes on, too. --baseline is what `launch.evaluate --config=... --output=` wrote of another model, on the same problems.
The page is one file that needs no network; pass@1 is the share of problems solved with one sample each, and intervals are of 95 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
import shutil
import sys
import textwrap

from absl import flags

import launch
from launch import report_page, report_run
from launch.report_run import Change, Evaluation, Rate, Row, Run

_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
_BASELINE = flags.DEFINE_string('baseline', None, 'Evaluation of another model, as launch.evaluate --output writes it.')
_OUTPUT = flags.DEFINE_string('output', None, 'The page; default report.html in the run.')
_TRANSCRIPTS = flags.DEFINE_integer('transcripts', 2, 'Problems to show that were failed before and are solved after.', lower_bound=0)
_MAX_MIB = flags.DEFINE_float('max_mib', 24.0, 'Most episodes to put on the page, in MiB.', lower_bound=0)

_LEVELS_FROM = 2  # Rows of a comparison before this one are totals.


def results(run: Run, baseline: Evaluation | None) -> str:
  """Return the tables of what was reached: pass@1 of evaluations by domain and level, or the held-out loss."""
  evaluations = report_run.ends_of(run, baseline)
  parts = [f'Run {visible(str(run.directory))}: step {run.last_step} of {run.setting("num_steps")}, {visible(run.setting("model.path"))}.',
           *(f'Note: {visible(note)}' for note in run.notes)]
  if evaluations:
    rows = report_run.compare(evaluations)
    names = [visible(evaluation.name) for evaluation in evaluations]
    parts += ['Held-out pass@1 with 95 % intervals:', overall(names, rows[0])]
    if len(rows) > _LEVELS_FROM:
      parts += ['By domain and level:', by_place(names, rows[1:])]
  if 'heldout/loss_nats' in run.metrics:
    losses = run.metrics['heldout/loss_nats']
    known = [(step, value) for step, value in zip(losses.steps, losses.values, strict=True) if value is not None]
    ends = known[:1] + known[1:][-1:]
    parts += ['Held-out loss:', grid([['', 'nats/token'], *([f'step {step}', f'{value:.4f}'] for step, value in ends)])]
  elif not evaluations:
    parts.append('The run has no evaluations on held-out problems.')
  return '\n\n'.join(parts)


def overall(names: Sequence[str], row: Row) -> str:
  """Return the table of evaluations over all problems, each with its change from the one above."""
  lines = [['', 'solved', 'pass@1', 'change from the one above, same problems']]
  for name, rate, change in zip(names, row.rates, (None, *row.changes), strict=True):
    lines.append([name, f'{rate.solved} of {rate.graded}' if rate else 'none graded', _rate(rate), _change(change)])
  text = grid(lines)
  if len(names) > 2 and row.total:
    text += f'\n\n{names[0]} to {names[-1]}: {_change(row.total)}'
  return text


def by_place(names: Sequence[str], rows: Sequence[Row]) -> str:
  """Return the table of domains and levels, with the last change."""
  lines = [['', 'problems', *names, 'last change']]
  for row in rows:
    label = str(row.place) if row.place.level is None else f'  level {row.place.level}'
    graded = max((rate.graded for rate in row.rates if rate), default=0)
    rates = [f'{rate.estimate.value:.1%}' if rate else '-' for rate in row.rates]
    lines.append([visible(label), str(graded), *rates, _change(row.changes[-1] if row.changes else None)])
  return grid(lines)


def transcripts(run: Run, count: int, width: int) -> str:
  """Return whole conversations about problems that the first evaluation failed and the last one solves."""
  evaluations = report_run.ends_of(run, None)
  if count == 0 or len(evaluations) < 2:
    return ''
  before, after = evaluations
  pairs = report_run.newly_solved(before, after)
  parts = [f'{len(pairs)} problems were failed at {before.name} and are solved at {after.name}.' + (' Some of them:' if pairs else '')]
  for pair in pairs[:count]:
    records = [before.log.read(pair[:1])[0], after.log.read(pair[1:])[0]]
    prompts = [record['messages'][:_num_prompt(record['messages'])] for record in records]
    shared = prompts[0] if prompts[0] == prompts[1] else []
    parts.append(f'== {visible(pair[0].problem_id)} ' + '=' * max(width - len(pair[0].problem_id) - 4, 4))
    parts += [_message(message, width) for message in shared]
    for evaluation, record in zip((before, after), records, strict=True):
      facts = [f'reward {record["reward"]:g}', record['outcome'], record['reason'], f'{record["num_sampled"]} tokens']
      title = f'-- {evaluation.name}: {", ".join(visible(fact) for fact in facts if fact)} '
      parts.append(title + '-' * max(width - len(title), 4))
      parts += [_message(message, width) for message in record['messages'][len(shared):]]
  return '\n'.join(parts)


def visible(text: str) -> str:
  """Return one line's text with whatever could move the cursor, hide or reorder text spelled out."""
  return ''.join(character if character.isprintable() else character.encode('unicode_escape').decode() for character in text)


def grid(rows: Sequence[Sequence[str]]) -> str:
  """Align columns: the first to the left, the others to the right."""
  widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
  lines = [[row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in rows]
  return '\n'.join('  '.join(line).rstrip() for line in lines)


def _num_prompt(messages: Sequence[dict]) -> int:
  """Return how many messages stand before the policy's first."""
  return next((place for place, message in enumerate(messages) if message['role'] == 'assistant'), len(messages))


def _message(message: dict, width: int) -> str:
  name = visible(f'{message["role"]} {message["name"]}' if message.get('name') else message['role'])
  lines = [piece for line in message['content'].split('\n') for piece in textwrap.wrap(
      visible(line.expandtabs()), max(width - 2, 20), replace_whitespace=False, drop_whitespace=False) or ['']]
  return '\n'.join([f'{name}:', *(f'  {line.rstrip()}'.rstrip() for line in lines)])


def _rate(rate: Rate | None) -> str:
  return f'{rate.estimate.value:.1%} [{rate.estimate.low:.1%}, {rate.estimate.high:.1%}]' if rate else '-'


def _change(change: Change | None) -> str:
  if change is None:
    return ''
  value, low, high = (100 * bound for bound in change.estimate)
  return f'{value:+.1f} points [{low:+.1f}, {high:+.1f}] (+{change.gained} -{change.lost} of {change.pairs})'


def main(_: list[str]) -> None:
  # A terminal that lacks a character that the model wrote must not end the report.
  sys.stdout.reconfigure(errors='backslashreplace')
  run = report_run.read_run(_WORKDIR.value)
  baseline = report_run.read_baseline(_BASELINE.value) if _BASELINE.value else None
  output = Path(_OUTPUT.value or run.directory / 'report.html')
  page = report_page.render(run, baseline, int(_MAX_MIB.value * 2**20))
  shown = transcripts(run, _TRANSCRIPTS.value, min(shutil.get_terminal_size().columns, 100))
  print('\n\n'.join(part for part in (results(run, baseline), shown) if part))
  output.parent.mkdir(parents=True, exist_ok=True)
  output.write_text(page, encoding='utf-8')
  print(f'\nPage: {output} ({len(page) / 2**20:.1f} MiB); open it in a browser.')


if __name__ == '__main__':
  flags.mark_flag_as_required('workdir')
  launch.run(main)
