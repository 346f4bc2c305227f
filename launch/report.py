"""Show what a run did: pass@1 on held-out problems before and after, problems it learned to solve, and a page of curves and episodes.

    python -m launch.report --workdir=runs/x
    python -m launch.report --workdir=runs/x --baseline=base.json --output=x.html

Works on a run that goes on, too. --baseline is what `launch.evaluate --config=... --output=` wrote of another model, on the same problems.
With the directory of a pipeline it prints what each of its stages did, each of which is a run of its own.
The page is one file that needs no network; pass@1 is the share of problems solved with one sample each, and intervals are of 95 %.
"""

from __future__ import annotations

from pathlib import Path
import shutil
import sys

from absl import flags

import launch
from launch import report_page, report_pipeline, report_reward, report_run, report_text
from rl import reward_model

_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
_BASELINE = flags.DEFINE_string('baseline', None, 'Evaluation of another model, as launch.evaluate --output writes it.')
_OUTPUT = flags.DEFINE_string('output', None, 'The page; default report.html in the run.')
_TRANSCRIPTS = flags.DEFINE_integer('transcripts', 2, 'Problems to show that were failed before and are solved after.', lower_bound=0)
_MAX_MIB = flags.DEFINE_float('max_mib', 24.0, 'Most episodes to put on the page, in MiB.', lower_bound=0)


def main(_: list[str]) -> None:
  # A terminal that lacks a character that the model wrote must not end the report.
  sys.stdout.reconfigure(errors='backslashreplace')
  pipeline = report_pipeline.read(_WORKDIR.value)
  if pipeline is not None:
    print(report_pipeline.summary(_WORKDIR.value, pipeline))
    return
  run = report_run.read_run(_WORKDIR.value)
  baseline = report_run.read_baseline(_BASELINE.value) if _BASELINE.value else None
  output = Path(_OUTPUT.value or run.directory / 'report.html')
  page = report_page.render(run, baseline, int(_MAX_MIB.value * 2**20))
  shown = report_text.transcripts(run, _TRANSCRIPTS.value, min(shutil.get_terminal_size().columns, 100))
  calibrations = reward_model.read_calibrations(run.directory)
  judged = report_reward.table(calibrations) if calibrations else ''
  print('\n\n'.join(part for part in (report_text.results(run, baseline), judged, shown) if part))
  output.parent.mkdir(parents=True, exist_ok=True)
  output.write_text(page, encoding='utf-8')
  print(f'\nPage: {output} ({len(page) / 2**20:.1f} MiB); open it in a browser.')


if __name__ == '__main__':
  flags.mark_flag_as_required('workdir')
  launch.run(main)
