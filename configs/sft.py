"""Supervised fine-tuning of a base model on question and answer rows.

python -m launch.train --config=configs/sft.py --config.model.path=MODEL --config.data.tasks.train.paths="('train.jsonl',)" --workdir=runs/sft
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.num_steps = 200
  config.optimizer.learning_rate = 2e-5
  config.optimizer.warmup_steps = 10
  config.eval_every_steps = 50
  config.checkpoint_every_steps = 50
  return config
