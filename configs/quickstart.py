"""The README's first run, first stage: Gemma-3-270M base sees a few demonstrations of tool calls, LoRA, on a 2-core CPU.

make quickstart
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.num_steps = 5  # enough to learn the form of a call; what to put into it is left to reinforcement learning
  config.lora.rank = 16
  config.data.tasks.train.schema = 'chat'
  config.optimizer.learning_rate = 5e-4
  config.optimizer.warmup_steps = 2
  config.layout.scan = False  # on CPU unrolled layers are a sixth faster
  config.layout.remat = 'none'
  return config
