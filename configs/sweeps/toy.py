"""What the studies share: a model of 0.03M random weights learns by trying to write letters in order, in less than a minute on 2 cores."""

import ml_collections

from configs import grpo

DOMAIN = 'envs/domains/letters:ordered'


def model() -> dict:
  """Return the model: two layers over bytes."""
  return {'family': 'qwen3', 'vocab_size': 261, 'num_layers': 2, 'embed_dim': 32, 'mlp_dim': 64, 'num_heads': 2, 'num_kv_heads': 1,
          'head_dim': 16, 'max_length': 64, 'qk_norm': True, 'tied_embeddings': True}


def base(*, level: int, max_new_tokens: int) -> ml_collections.ConfigDict:
  """Return the settings of a run: four letters at level 3, and so on."""
  config = grpo.get_config()
  config.domains = {DOMAIN: {'path': '', 'weight': 1.0, 'levels': (level,), 'options': {}}}
  config.curriculum = 'fixed'
  config.num_steps = 60
  config.groups = 8
  config.group_size = 8
  config.rollout.max_new_tokens = max_new_tokens
  config.rollout.max_length = 24
  config.rollout.slots = 64
  config.rollout.steps_per_launch = 2
  config.rollout.prefill_chunk = 32
  config.rows = 16
  config.length = 32
  config.layout.compute_dtype = 'float32'
  config.layout.scan = False
  config.layout.remat = 'none'
  config.optimizer.learning_rate = 4e-3
  config.eval.every_steps = 5
  config.eval.problems = 100
  config.eval.temperature = 1.0  # the policy itself, and not its best guess
  config.checkpoint_every_steps = 1000  # a run is shorter than what a checkpoint saves
  return config
