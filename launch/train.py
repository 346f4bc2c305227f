"""Train: `python -m launch.train --config=configs/sft.py --config.model.path=... --workdir=runs/sft`.

`config.stage` says how: 'supervised' (`rl.train`), 'preference' or 'reward' (`rl.train_preference`), 'distillation'
(`rl.train_distillation`), or 'rl' (`rl.train_rl`).

Every field of the config is a flag (`--config.optimizer.learning_rate=1e-5`); a key that nothing reads is an error. The same command run again
continues from the newest checkpoint of the workdir.
"""

from __future__ import annotations

import logging

from absl import flags
from ml_collections import config_flags

import launch
from launch import report_reward, report_run, report_text, stages
from models import startup
from rl import config as config_lib
from rl import reward_model

_CONFIG = config_flags.DEFINE_config_file('config', None, 'File with get_config(); fields are flags of their own.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run: checkpoints, metrics, resolved config.')
_LOG = logging.getLogger('launch.train')


def main(_: list[str]) -> None:
  stage = _CONFIG.value.get('stage')
  record, run = stages.find(stage)
  config = config_lib.build(record, _CONFIG.value)
  launch.join_processes()
  startup.use_cpu_devices(config.cpu_devices)
  startup.check_backend()
  results = run(config, _WORKDIR.value)
  if stage == 'rl' and config.eval.every_steps:
    done = report_run.read_run(_WORKDIR.value)
    print(report_text.results(done, None), report_text.transcripts(done, 2, 100), sep='\n\n')
  if stage == 'reward' and (calibrations := reward_model.read_calibrations(_WORKDIR.value)):
    report_reward.write_picture(_WORKDIR.value, calibrations)
    print(report_reward.table(calibrations))
  _LOG.info('Finished; checkpoints and metrics are in %s. %s', _WORKDIR.value,
            '  '.join(f'{name} {value:.4f}' for name, value in results.items()))


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  launch.run(main)
