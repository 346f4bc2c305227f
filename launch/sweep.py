"""Sweep: `python -m launch.sweep --config=configs/sweeps/staleness.py --workdir=runs/staleness`.

A sweep is a config of many runs: a base, as `launch.train` takes it, named changes of it (`configs/sweeps/settings.py` combines them), and
seeds. Everything is checked before the first run starts. Each run has a directory of its name with its resolved config, is resumed where it
was killed, and is not run again when it is finished; so the same command goes on, and at the end only sums up (`report_sweep`).

Runs share this process, one after the other, which saves most of their start; --parallel deals them to so many processes.

Deliberately absent: search, and scheduling over machines (--only=RUN gives one to whatever schedules).
"""

from __future__ import annotations

from collections.abc import Sequence
import logging
from pathlib import Path
import signal
import subprocess
import sys

from absl import flags
import jax
from ml_collections import config_flags

import launch
from launch import report_sweep, sweep_runs
from launch.sweep_runs import Run, SweepConfig
from models import startup
from rl import config as config_lib

_CONFIG = config_flags.DEFINE_config_file('config', None, 'File with get_config() of a sweep; fields are flags of their own.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the sweep; each run has one of its name in it.')
_DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Check everything and print the runs, and start none.')
_ONLY = flags.DEFINE_list('only', [], 'Names of the runs to run; the others are left alone, and nothing is summed up.')
_PARALLEL = flags.DEFINE_integer('parallel', 1, 'Processes that share the runs.', lower_bound=1)
_LOG = logging.getLogger('launch.sweep')


def run_here(runs: Sequence[Run]) -> bool:
  """Run what is not finished, one after the other; return False where a signal ended one, and with it the rest."""
  for number, run in enumerate(runs, start=1):
    if run.is_finished:
      continue
    _LOG.info('Run %d of %d: %s, from step %d of %d.', number, len(runs), run.name, run.last_step, run.config.num_steps)
    run.run()
    jax.clear_caches()  # Programs of a run are its own, and a process has room for the memory maps of some thousand.
    if not run.is_finished:
      return False
  return True


def run_in_processes(runs: Sequence[Run], count: int, workdir: Path) -> None:
  """Deal what is not finished to some processes of this program, whose output goes to process0.log, process1.log, ...

  Raises:
    RuntimeError: a process failed; the others have done their part.
  """
  waiting = [run.name for run in runs if not run.is_finished]
  shares = [share for share in (waiting[place::count] for place in range(count)) if share]
  logs = [workdir / f'process{place}.log' for place in range(len(shares))]
  processes = []
  # As a signal of the keyboard does: what is raised ends the processes below, which save and stop.
  previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit('launch.sweep: stopped by a signal; run the same command again to go on.'))
  try:
    for log, share in zip(logs, shares, strict=True):
      command = [sys.executable, '-m', 'launch.sweep', *sys.argv[1:], '--parallel=1', f'--only={",".join(share)}']
      with log.open('w') as stream:
        processes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT))
      _LOG.info('%s: %s', log, ', '.join(share))
    failed = [log for log, process in zip(logs, processes, strict=True) if process.wait()]
  finally:
    signal.signal(signal.SIGTERM, previous)
    for process in processes:
      if process.poll() is None:
        process.terminate()
  if failed:
    tail = failed[0].read_text(encoding='utf-8', errors='replace').strip().splitlines()[-3:]
    raise RuntimeError(f'{len(failed)} of {len(processes)} processes failed; see {", ".join(map(str, failed))}. The first ends with: '
                       + ' / '.join(tail))


def main(_: list[str]) -> None:
  config = config_lib.build(SweepConfig, _CONFIG.value)
  workdir = Path(_WORKDIR.value)
  runs = sweep_runs.runs_of(config, workdir)
  sweep_runs.check(config, runs)
  wanted = sweep_runs.chosen(runs, _ONLY.value)
  if _DRY_RUN.value:
    print(sweep_runs.plan(wanted))
    return
  startup.use_cpu_devices(runs[0].config.cpu_devices)
  startup.check_backend()
  workdir.mkdir(parents=True, exist_ok=True)
  if any(Path(run.config.model.path) == workdir / sweep_runs.MODEL for run in wanted):
    sweep_runs.make_model(config.model, workdir / sweep_runs.MODEL)
  if _PARALLEL.value > 1:
    run_in_processes(wanted, _PARALLEL.value, workdir)
  elif not run_here(wanted):
    _LOG.warning('Stopped by a signal; run the same command again to go on.')
  num_finished = sum(run.is_finished for run in runs)
  _LOG.info('%d of %d runs are finished, in %s.', num_finished, len(runs), workdir)
  if num_finished == len(runs) and not _ONLY.value:
    print(report_sweep.write(sweep_runs.study(config, runs), workdir))


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  launch.run(main)
