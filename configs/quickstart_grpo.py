"""The README's first run, second stage: GRPO on calculations told in words, with a sandboxed Python tool, on a 2-core CPU.

make quickstart
"""

import ml_collections

from configs import grpo


def get_config() -> ml_collections.ConfigDict:
  config = grpo.get_config()
  config.domains = {'arithmetic/python': {'path': '', 'weight': 1.0, 'levels': (2,), 'options': {}}}
  config.num_steps = 32
  config.groups = 8
  config.group_size = 8
  config.aggregation = 'token_mean'
  config.lora.rank = 16
  config.optimizer.learning_rate = 3e-5
  config.optimizer.warmup_steps = 2
  config.rollout.max_new_tokens = 52
  config.rollout.max_length = 112
  config.rollout.slots = 64
  config.rollout.steps_per_launch = 2  # a step of 64 rows takes 0.12 s, so looking often costs nothing
  config.rollout.describe_tools = False  # the supervised stage has shown how
  config.length = 112
  config.rows = 8
  config.eval.every_steps = 16
  config.eval.problems = 200
  config.layout.scan = False  # on CPU unrolled layers are a sixth faster
  config.layout.remat = 'none'
  config.checkpoint_every_steps = 16
  return config
