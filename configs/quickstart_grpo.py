"""The README's first run, second stage: GRPO on calculations told in words, with a sandboxed Python tool, on a 2-core CPU.

make quickstart
"""

import ml_collections

from configs import grpo


def get_config() -> ml_collections.ConfigDict:
  config = grpo.get_config()
  config.domains = {'arithmetic/python': {'path': '', 'weight': 1.0, 'levels': (1, 2, 3)}}
  config.num_steps = 40
  config.groups = 16
  config.group_size = 8
  config.aggregation = 'token_mean'
  config.lora.rank = 16
  config.optimizer.learning_rate = 1e-4
  config.rollout.max_new_tokens = 80
  config.rollout.max_length = 160
  config.rollout.slots = 64
  config.rollout.describe_tools = False  # the supervised stage has shown how
  config.length = 160
  config.rows = 16
  config.eval.every_steps = 20
  config.eval.problems = 210
  config.layout.scan = False  # on CPU unrolled layers are a sixth faster
  config.layout.remat = 'none'
  config.checkpoint_every_steps = 20
  return config
