"""The README's first run: Gemma-3-270M base learns to solve generated word problems, LoRA, on a 2-core CPU.

make quickstart
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.num_steps = 40
  config.lora.rank = 16
  config.optimizer.learning_rate = 5e-4
  config.optimizer.warmup_steps = 3
  config.layout.scan = False  # on CPU unrolled layers are a sixth faster
  config.layout.remat = 'none'
  config.eval_every_steps = 20
  config.eval_documents = 100
  config.checkpoint_every_steps = 20
  return config
