"""What a pipeline was made of and what came of it: `lineage.json` from the records of its actions and the files of its runs, and tables.

Deliberately absent: pages and curves; each stage is a run that `launch.report` shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch import report_run, report_text
from launch.pipeline_plan import Action, Layout, PipelineConfig, Stage
from rl import config as config_lib
from rl import lineage, monitor
from rl.evals import stats

LINEAGE_FILE = 'lineage.json'
# Of each stage the metric that says most, the first of these that its run has.
_KEY_METRICS: Mapping[str, Sequence[str]] = {
    'sft': ('heldout/loss_nats', 'train/loss_nats'),
    'reward': ('heldout/accuracy', 'reward_model/accuracy'),
    'preference': ('heldout/accuracy', 'preference/accuracy'),
    'rlvr': ('heldout/pass@1',),  # rewards of its steps are of other problems each time, under a curriculum also harder ones
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
    # Data that an earlier stage had made, this one did not.
    made = {data['name'] for other in earlier.values() for data in other['data']}
    work = [record for name, record in records.items() if name not in made]
    entry |= {'revision': records[stage.actions[-1].name]['revision'], 'start_s': min(record['start_s'] for record in records.values()),
              'end_s': max(record['end_s'] for record in records.values()),
              'work_s': sum(record['last_attempt_s'] for record in work),
              'work_cpu_s': sum(record['last_attempt_cpu_s'] for record in work),
              'attempts': max(record['attempts'] for record in records.values())}
  return entry


def _key_metric(stage: str, directory: Path) -> dict[str, Any] | None:
  metrics = report_run.read_run(directory).metrics
  name = next((name for name in _KEY_METRICS[stage] if name in metrics), None)
  known = _known(metrics[name]) if name else []
  if not known:
    return None
  comparisons = _known(metrics['heldout/comparisons']) if name == 'heldout/accuracy' and 'heldout/comparisons' in metrics else []
  return {'name': name, 'first': known[0], 'last': known[-1], 'comparisons': int(comparisons[-1][1]) if comparisons else None}


def _known(series: report_run.Series) -> list[tuple[int, float]]:
  return [(step, value) for step, value in zip(series.steps, series.values, strict=True) if value is not None]


def summary(workdir: str | Path, value: Mapping[str, Any]) -> str:
  """Return what a pipeline did: its stages with their cost and key metric, what each changed on held-out problems, notes on its data."""
  evaluations = [replace(report_run.read_baseline(Layout(Path(workdir)).evaluation(entry['stage'])), name=entry['stage'])
                 for entry in value['stages'] if 'heldout' in entry]
  last = value['stages'][-1]['model']['path'] if value['stages'][-1].get('model') else ''
  notes = [note for entry in value['stages'] for data in entry['data'] for note in _notes_on(data)]
  parts = [_stages(value['stages']), *_heldout(evaluations), '\n'.join(dict.fromkeys(notes)),
           f'The policy is in {report_text.visible(last)}.' if last else '']
  return '\n\n'.join(part for part in parts if part)


def _stages(entries: Sequence[Mapping[str, Any]]) -> str:
  rows = [['stage', 'from', 'steps', 'seconds', 'CPU seconds', 'metric of its run', 'first', 'last']]
  for entry in entries:
    work = [f'{entry[key]:.0f}' if key in entry else '' for key in ('work_s', 'work_cpu_s')]
    rows.append([entry['stage'], entry['parent'] or '', str(entry.get('steps', '')), *work, *_ends(entry.get('key_metric'))])
  rows.append(['in all', '', '', *(f'{sum(entry.get(key, 0) for entry in entries):.0f}' for key in ('work_s', 'work_cpu_s')), '', '', ''])
  return report_text.grid(rows)


def _ends(metric: Mapping[str, Any] | None) -> list[str]:
  """Return a metric's name, and its first and its last value; of one measurement only the last."""
  if metric is None:
    return ['', '', '']
  (first_step, first), (last_step, last) = metric['first'], metric['last']
  shown = f'{last:.4f} (step {last_step})'
  if metric['comparisons']:
    estimate = stats.proportion(last * metric['comparisons'], metric['comparisons'])
    shown = f'{last:.1%} [{estimate.low:.1%}, {estimate.high:.1%}] of {metric["comparisons"]} pairs'
  return [metric['name'], f'{first:.4f} (step {first_step})' if first_step < last_step else '', shown]


def _heldout(evaluations: Sequence[report_run.Evaluation]) -> list[str]:
  """Return the tables of pass@1, each policy beside the one before it."""
  if not evaluations:
    return []
  names, (overall, *places) = [evaluation.name for evaluation in evaluations], report_run.compare(evaluations)
  return ['Held-out pass@1 with 95 % intervals:', report_text.overall(names, overall),
          'By domain and level:', report_text.by_place(names, places)]


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
