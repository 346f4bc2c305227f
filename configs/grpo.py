r"""Reinforcement learning with verifiable rewards; the variants of GRPO are settings.

python -m launch.train --config=configs/grpo.py:variant=dapo --config.model.path=MODEL \
    --config.domains="{'word_problems/generated': {'levels': (1, 2)}}" --workdir=runs/grpo
"""

import ml_collections
from ml_collections import config_dict

from configs import base

# What each variant changes of GRPO's settings below.
VARIANTS = {
    # arXiv:2402.03300, without the KL term (kl_coef adds it).
    'grpo': {},
    # arXiv:2503.20783: no division by the group's deviation, nor by a reply's length.
    'dr_grpo': {'advantage.scale': 'none', 'aggregation': 'constant'},
    # arXiv:2503.14476: a wider upper clip, groups without signal replaced, a soft punishment of overlong replies.
    'dapo': {'loss.clip_high': 0.28, 'aggregation': 'token_mean', 'max_rounds': 4, 'overlong': 'penalty'},
    # arXiv:2507.18071: ratios of whole replies.
    'gspo': {'loss.ratio': 'sequence', 'loss.clip_low': 3e-4, 'loss.clip_high': 4e-4},
    # arXiv:2506.13585: the clipped ratio weighs, and no token loses its gradient.
    'cispo': {'loss.kind': 'cispo', 'loss.clip_low': 1.0, 'loss.clip_high': 4.0, 'aggregation': 'token_mean'},
    # arXiv:2402.14740.
    'rloo': {'loss.kind': 'reinforce', 'advantage.center': 'leave_one_out', 'advantage.scale': 'none', 'aggregation': 'sequence_sum'},
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Return the settings of a variant; `arg` is '' or 'variant=NAME'."""
  variant = arg.removeprefix('variant=') or 'grpo'
  if variant not in VARIANTS:
    raise ValueError(f'configs/grpo.py:{arg} asks for an unknown variant; use variant= one of {", ".join(VARIANTS)}.')
  shared = base.get_config()
  config = ml_collections.ConfigDict({
      'stage': 'rl',
      'num_steps': 100,  # batches of groups; an optimizer step each, times minibatches and epochs
      'seed': 0,
      'model': shared.model,
      'lora': shared.lora,
      'domains': {},  # {'longcontext/hops': {'levels': (1, 2), 'weight': 1.0, 'path': '', 'options': {'num_words': (1000, 9000)}}}
      'curriculum': 'adaptive',  # fixed, adaptive: levels by how much there is to learn at them
      'groups': 16,  # problems of a step
      'group_size': 8,  # samples of a problem
      'max_rounds': 1,  # above 1: replace groups without signal, at most so often
      'overlong': 'grade',  # samples cut off by the length limit: grade as they stand, mask, penalty (soft, over the last overlong_buffer tokens)
      'overlong_buffer': 32,
      'rollout': {
          'max_new_tokens': 128,  # of one reply
          'max_length': 512,  # of a conversation
          'slots': 32,  # sequences generated side by side
          'steps_per_launch': 8,
          'prefill_chunk': 256,
          'describe_tools': True,  # in a system message
          'env_timeout_s': 60.0,
          'group_timeout_s': 900.0,
          'max_attempts': 3,  # of a sample, when it is not the policy that fails
          'min_group_size': 2,
      },
      'advantage': {
          'center': 'mean',  # mean, leave_one_out, none
          'scale': 'std',  # std, batch_std, none
          'epsilon': 1e-6,
      },
      'aggregation': 'sequence_mean',  # token_mean, sequence_mean, sequence_sum, constant, token_sum
      'loss': {
          'kind': 'clip',  # clip, cispo, reinforce
          'ratio': 'token',  # token, sequence
          'clip_low': 0.2,
          'clip_high': 0.2,
          'dual_clip': config_dict.placeholder(float),
          'max_segments': 32,  # ratio=sequence: documents of a row
          'importance_cap': 2.0,  # of trainer over sampler probability
          'kl_coef': 0.0,
          'kl_estimator': 'k2',  # k2, k3
          'entropy_coef': 0.0,
      },
      'teacher': {  # of what the policy samples itself (configs/distill.py)
          'path': '',  # model or run directory of the policy's vocabulary; '' is none
          'dtype': 'bfloat16',
          'coef': 1.0,  # of KL(policy | teacher)
          'divergence': 'sampled',  # sampled: of the tokens that were sampled; full: over the whole vocabulary
          'temperature': 1.0,  # full only
          'reward_coef': 1.0,  # of the rewards' advantages; 0 learns from the teacher alone
      },
      'minibatches': 1,  # optimizer steps of a batch
      'epochs': 1,  # passes over a batch
      'rows': 8,  # of a micro-batch
      'length': 512,  # tokens of a row
      'max_probe_diff_nats': 0.1,  # trained against published weights
      'optimizer': shared.optimizer,
      'mesh': shared.mesh,
      'layout': shared.layout,
      'eval': {
          'every_steps': 10,  # and before the first and after the last; 0 never
          'problems': 200,  # held-out ones
          'temperature': 0.0,
      },
      'checkpoint_every_steps': 10,
      'checkpoints_kept': 2,
      'cpu_devices': 1,
  })
  config.optimizer.learning_rate = 1e-6
  config.optimizer.schedule = 'constant'
  config.update_from_flattened_dict(VARIANTS[variant])
  return config
