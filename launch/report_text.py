"""The report of a run as text: what was reached before and after, and conversations about problems that were failed and are now solved."""

from __future__ import annotations

from collections.abc import Sequence
import textwrap

from launch import report_run
from launch.report_run import Change, Evaluation, Rate, Row, Run

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
  elif not evaluations and 'heldout/loss' not in run.metrics:
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
