r"""Run a pipeline of post-training, each stage's checkpoint feeding the next: SFT, a reward model, preferences, RL, distillation.

    python -m launch.pipeline --config=configs/pipeline.py --config.model.path=MODEL --workdir=runs/pipeline
    python -m launch.pipeline ... --dry_run            # print the commands
    python -m launch.pipeline ... --until=preference   # and go on later, with the same command without it

Every stage is a process of its own, so its memory is given back. What is done is recorded when it is whole: the same command again, after
whatever ended the last one, goes on where it was: a run from its own checkpoint, sampling with the groups that are not finished. Settings of
what has not begun may change; what was made with other settings, or from other files than there are now, is refused by name.

In the directory lie a run for each stage (`launch.report --workdir=runs/pipeline/sft`), `models/`, `data/`, `evaluations/`, `records/`, and
`lineage.json`: for each stage its data with digests, its parent, its configuration, the code's revision, times and results.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import ctypes
import fcntl
import functools
import logging
import os
from pathlib import Path
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time

from absl import flags
from ml_collections import config_flags

import launch
from launch import pipeline_plan, report_pipeline
from launch.pipeline_plan import Action, PipelineConfig
from rl import checkpoint, lineage, monitor
from rl import config as config_lib
from rl import run as run_lib
from rl.curriculum import heldout_problems, make_domains
from rl.data import strata
from rl.data.decontaminate import Protected

_CONFIG = config_flags.DEFINE_config_file('config', None, 'File with get_config(); fields are flags of their own.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the pipeline.')
_UNTIL = flags.DEFINE_string('until', None, 'Last stage to run now; default all.')
_DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print the commands and do nothing.')
_LOG = logging.getLogger('launch.pipeline')
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def main(_: list[str]) -> None:
  config = config_lib.build(PipelineConfig, _CONFIG.value)
  stages = pipeline_plan.plan(config, _WORKDIR.value)
  chosen = pipeline_plan.until(stages, _UNTIL.value)
  if _DRY_RUN.value:
    print('\n'.join(dict.fromkeys(_shown(action) for stage in chosen for action in stage.actions)))
    return
  if not Path(config.model.path).exists():
    raise FileNotFoundError(f'model.path={config.model.path!r} does not exist; give a Hugging Face directory or a .gguf file.')
  pipeline_plan.check_layers(config)
  make_domains(config.domains)  # Says now, and not after hours, what is wrong with them or the sandbox.
  with _held(Path(_WORKDIR.value)) as lock:
    runner = Runner(config, Path(_WORKDIR.value), lock)
    for stage in stages:
      for action in stage.actions:
        runner.check(action)
    for stage in chosen:
      for action in stage.actions:
        runner.do(action)
      found = report_pipeline.write(_WORKDIR.value, config, stages)
  print(report_pipeline.summary(_WORKDIR.value, found))


def _shown(action: Action) -> str:
  return f'# {action.name} -> {action.output}\n{_shell(action) if action.command else "# written by launch.pipeline itself"}'


def _shell(action: Action) -> str:
  """Return the command as one types it; settings that are literals have single quotes inside, so they stand in double ones."""
  words = (f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word) for word in action.command)
  return ' '.join(('python', *words))


class Runner:
  """Does actions, once each."""

  def __init__(self, config: PipelineConfig, workdir: Path, lock: int):
    """Take the descriptor that holds the directory, which children keep open."""
    self._config, self._workdir, self._lock = config, workdir, lock

  def check(self, action: Action) -> dict:
    """Return an action's record, a fresh one if it has none; ValueError if it was done, or begun, with other settings or from other files."""
    path = report_pipeline.record_path(self._workdir, action)
    if not path.exists():
      return {'revision': monitor.code_revision(), 'start_s': time.time(), 'attempts': 0}
    record, now = lineage.read_json(path), _decides(action)
    parts = [f'{piece!r} {when}' for mine, other, when in ((record, now, 'then'), (now, record, 'now'))
             for piece in mine['command'] if piece not in other['command']]
    parts += [f'{key}: {old!r} then, {new!r} now' for what in ('settings', 'inputs')
              for key, (old, new) in config_lib.difference(now[what], record[what]).items()]
    if parts:
      raise ValueError(f'{action.output} was made, or begun, otherwise ({path}): {"; ".join(parts[:4])}. Use another --workdir, or the settings '
                       f'and files of then; or delete {action.output}, what was made from it, and their records, to have them made again.')
    return record

  def do(self, action: Action) -> None:
    """Do an action, or what is left of it, unless its record says that it is done.

    Raises:
      ValueError: as `check`.
      SystemExit: its command failed, or was stopped.
    """
    record = self.check(action)
    if 'end_s' in record and Path(action.output).exists():
      _LOG.info('%s: done before.', action.name)
      return
    path, start_s, start_cpu_s = report_pipeline.record_path(self._workdir, action), time.time(), _cpu_s()
    begun = {**_decides(action), **{key: record[key] for key in ('revision', 'start_s')}, 'attempts': record['attempts'] + 1}
    lineage.write_json(path, begun)
    _LOG.info('%s -> %s', action.name, action.output)
    report = self._run(action) if action.command else self._write_mixture(action)
    files = lineage.describe(action.output) if action.is_data else []
    lineage.write_json(path, {**begun, 'report': report, 'files': files, 'output': lineage.fingerprint(action.output), 'end_s': time.time(),
                              'last_attempt_s': time.time() - start_s, 'last_attempt_cpu_s': _cpu_s() - start_cpu_s})

  def _write_mixture(self, action: Action) -> dict:
    config = self._config
    protected = Protected(config.mixture.ngram)
    if any(component.paths for component in config.mixture.components.values()):
      domains, domain_configs = make_domains(config.domains)
      for problem in heldout_problems(domains, domain_configs, config.rlvr['eval']['problems']):
        protected.add(problem.messages, problem.id)
      for files in config.mixture.against.values():
        for source, messages in files.rows():
          protected.add(messages, source)
    shutil.rmtree(action.output, ignore_errors=True)  # What was begun.
    return strata.write(strata.strata(config.mixture.components), action.output, protected)

  def _run(self, action: Action) -> dict:
    for left in ('partial', 'old'):  # By a killed export.
      for directory in Path(action.output).parent.glob(f'.{Path(action.output).name}.*.{left}'):
        shutil.rmtree(directory)
    process = subprocess.Popen([sys.executable, *action.command], pass_fds=(self._lock,), preexec_fn=functools.partial(_die_with, os.getpid()))
    with _forwarded(process) as signals:
      status = process.wait()
    if signals:
      raise SystemExit(f'launch.pipeline: stopped by a signal during {action.name}; run the same command again to go on.')
    step = max(checkpoint.committed_steps(Path(action.output) / run_lib.CHECKPOINTS), default=0)
    if status or step < action.last_step:
      why = f'ended with status {status}; what it said stands above' if status else f'ended at step {step} of {action.last_step}'
      raise SystemExit(f'launch.pipeline: {action.name} {why}. Run the same command again to go on. It was: {_shell(action)}')
    return lineage.read_json(Path(action.output).with_suffix('.report.json')) if action.is_data else {}


def _cpu_s() -> float:
  """Return the CPU time of this process and of those that it waited for."""
  return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def _decides(action: Action) -> dict:
  return {'command': list(action.command), 'settings': dict(action.settings),
          'inputs': {name: lineage.fingerprint(name) for name in action.inputs}}


@contextlib.contextmanager
def _held(workdir: Path) -> Iterator[int]:
  """Hold the directory against other pipelines; children inherit the descriptor, so it is held until the last of them is gone."""
  workdir.mkdir(parents=True, exist_ok=True)
  lock = os.open(workdir / '.lock', os.O_RDWR | os.O_CREAT, 0o644)
  try:
    deadline_s = time.monotonic() + 10  # What was just killed may still be going.
    while not _try_lock(lock):
      if time.monotonic() > deadline_s:
        raise ValueError(f'{workdir} is in use by another launch.pipeline or by a run that it started; wait for it, or end it.')
      time.sleep(0.1)
    yield lock
  finally:
    os.close(lock)


def _try_lock(lock: int) -> bool:
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


def _die_with(parent: int) -> None:
  """Have Linux kill this process when the one that started it ends, so that a pipeline that was killed leaves no run behind."""
  if sys.platform == 'linux':
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before it was asked for.
      os._exit(1)


@contextlib.contextmanager
def _forwarded(process: subprocess.Popen) -> Iterator[list[int]]:
  """Pass SIGTERM on to a process, which saves and ends; gives the list of signals received."""
  received: list[int] = []

  def forward(number, frame):
    received.append(number)
    process.send_signal(number)

  previous = signal.signal(signal.SIGTERM, forward)
  try:
    yield received
  finally:
    signal.signal(signal.SIGTERM, previous)


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  launch.run(main)
