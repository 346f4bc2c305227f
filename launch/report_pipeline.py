"""What a pipeline was made of and what came of it: `lineage.json` from the records of its actions and the files of its runs, and a table.

Deliberately absent: pages and curves; each stage is a run that `launch.report` shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import report_run, report_text
from launch.pipeline_plan import Action, PipelineConfig, Stage
from rl import config as config_lib
from rl import lineage, monitor
from rl.evals.stats import Rate

LINEAGE_FILE = 'lineage.json'
# Of each stage the metric that says most, the first of these that its run has.
_KEY_METRICS: Mapping[str, Sequence[str]] = {
    'sft': ('heldout/loss_nats', 'train/loss_nats'),
    'reward': ('heldout/accuracy', 'reward_model/accuracy'),
    'preference': ('heldout/accuracy', 'preference/accuracy'),
    'rlvr': ('heldout/pass@1', 'critic/score/mean'),
    'student': ('heldout/agreement', 'heldout/loss_nats', 'train/loss_nats'),
}


def record_path(workdir: str | Path, action: Action) -> Path:
  """Return where an action's record lies."""
  return Path(workdir) / 'records' / f'{action.name.replace("/", ".")}.json'


def write(workdir: str | Path, config: PipelineConfig, stages: Sequence[Stage]) -> dict[str, Any]:
  """Write `lineage.json` of the stages that are done, and return it."""
  found: dict[str, dict[str, Any]] = {}
  for stage in stages:
    paths = [record_path(workdir, action) for action in stage.actions]
    records = {action.name: lineage.read_json(path) for action, path in zip(stage.actions, paths, strict=True) if path.exists()}
    if len(records) == len(paths) and all('end_s' in record for record in records.values()):
      found[stage.name] = _entry(stage, records, found)
  value = {'pipeline': config_lib.to_json(config), 'stages': list(found.values())}
  lineage.write_json(Path(workdir) / LINEAGE_FILE, value)
  return value


def _entry(stage: Stage, records: Mapping[str, Mapping[str, Any]], earlier: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  entry: dict[str, Any] = {'stage': stage.name, 'parent': stage.parent or None, 'data': [],
                           'commands': {name: record['command'] for name, record in records.items() if record['command']}}
  for action in stage.actions:
    record, what = records[action.name], action.name.split('/')[1]
    if action.is_data:
      entry['data'].append({'name': action.name, 'files': record['files'], 'report': record['report']})
    elif what == 'train':
      directory = Path(action.output)
      entry |= {'parent_checkpoint': earlier.get(stage.parent, {}).get('checkpoint'),
                'parent_model': {'path': action.inputs[0], 'fingerprint': record['inputs'][action.inputs[0]]},
                'inputs': record['inputs'], 'run': action.output, 'steps': action.last_step, 'checkpoint': record['output'],
                'config': lineage.read_json(directory / monitor.CONFIG_FILE),
                'config_difference': lineage.read_json(directory / monitor.DIFFERENCE_FILE),
                'key_metric': _key_metric(stage.name, directory)}
    elif what == 'evaluate':
      evaluation = lineage.read_json(action.output)
      entry['heldout'] = {'passed': evaluation['passed'], 'graded': evaluation['graded']}
  if stage.model:
    entry['model'] = {'path': stage.model, 'fingerprint': lineage.fingerprint(stage.model)}
  if records:
    entry |= {'revision': records[stage.actions[-1].name]['revision'], 'start_s': min(record['start_s'] for record in records.values()),
              'end_s': max(record['end_s'] for record in records.values()),
              'work_s': sum(record['last_attempt_s'] for record in records.values()),
              'attempts': max(record['attempts'] for record in records.values())}
  return entry


def _key_metric(stage: str, directory: Path) -> dict[str, Any] | None:
  metrics = report_run.read_run(directory).metrics
  name = next((name for name in _KEY_METRICS[stage] if name in metrics), None)
  known = [(step, value) for step, value in zip(metrics[name].steps, metrics[name].values, strict=True) if value is not None] if name else []
  return {'name': name, 'first': known[0], 'last': known[-1]} if known else None


def summary(value: Mapping[str, Any]) -> str:
  """Return a pipeline's table: each stage with its steps, seconds, key metric at its first and last measurement, and held-out pass@1."""
  rows = [['stage', 'from', 'steps', 'seconds', 'metric', 'first', 'last', 'held-out pass@1']]
  for entry in value['stages']:
    metric, rate = entry.get('key_metric'), entry.get('heldout')
    shown = [metric['name'], *(f'{number:.4f} (step {step})' for step, number in (metric['first'], metric['last']))] if metric else ['-'] * 3
    estimate = Rate(rate['passed'], rate['graded']).estimate if rate and rate['graded'] else None
    rows.append([entry['stage'], entry['parent'] or '', str(entry.get('steps', '')), f'{entry["work_s"]:.0f}' if 'work_s' in entry else '',
                 *shown, f'{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]' if estimate else '-'])
  total_s = sum(entry.get('work_s', 0) for entry in value['stages'])
  last = value['stages'][-1]['model']['path'] if value['stages'][-1].get('model') else ''
  ends = [f'{total_s:.0f} s in all.'] + ([f'The policy is in {report_text.visible(last)}.'] if last else [])
  notes = [note for entry in value['stages'] for data in entry['data'] for note in _notes_on(data)]
  return '\n'.join([report_text.grid(rows), '', *dict.fromkeys(notes), ' '.join(ends)])


def _notes_on(data: Mapping[str, Any]) -> list[str]:
  """Return what a reader should know of a stage's data: of pairs where they come from, of a mixture what was left out."""
  report, rows = data['report'], sum(file['rows'] for file in data['files'])
  if 'pairs' in report:
    sources = ', '.join(f'{count} {"from samples" if source == "samples" else "of a demonstration and a wrong sample"}'
                        for source, count in report['pairs_by_source'].items())
    problems = ', '.join(f'{why} {count}' for why, count in report['problems'].items() if count)
    return [f'{data["name"]}: {rows} pairs, {sources}; problems: {problems}.']
  left_out: Counter[str] = Counter()
  for stratum in report.values():
    left_out.update(stratum['left_out'])
  shown = ', '.join(f'{why} {count}' for why, count in left_out.items()) or 'none'
  return [f'{data["name"]}: {rows} rows in {len(report)} parts; left out because they are evaluated on: {shown}.']


def read(workdir: str | Path) -> dict[str, Any] | None:
  """Return the lineage of a directory, or None if it is no pipeline's."""
  path = Path(workdir) / LINEAGE_FILE
  return lineage.read_json(path) if path.exists() else None
