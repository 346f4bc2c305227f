r"""Reinforcement learning with verifiable rewards; the variants of GRPO are settings.

python -m launch.train --config=configs/grpo.py:variant=dapo --config.model.path=MODEL \
    --config.domains="{'word_problems/generated': {'levels': (1, 2)}}" --workdir=runs/grpo

A run writes the objective that its settings make as a formula to WORKDIR/objective.txt.
"""

import ml_collections
from ml_collections import config_dict

from configs import base

# What each variant changes of GRPO's settings below, after its paper.
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
    # arXiv:2602.04879: tokens are dropped by how far their probability has moved from the sampler's (sec. 5.2), and not by its ratio; bounds
    # and advantages are those of its authors' runs.
    'dppo': {'loss.kind': 'dppo', 'loss.decoupled': False, 'loss.importance_cap': None, 'loss.clip_low': 0.15, 'loss.clip_high': 0.15,
             'advantage.scale': 'none', 'aggregation': 'constant'},
    # arXiv:2402.14740.
    'rloo': {'loss.kind': 'reinforce', 'advantage.center': 'leave_one_out', 'advantage.scale': 'none', 'aggregation': 'sequence_sum'},
    # arXiv:2501.03262: rewards summed from each token on and whitened over the batch, which need no groups.
    'reinforce_pp': {'advantage.estimator': 'reinforce_pp', 'advantage.center': 'none', 'advantage.scale': 'none', 'advantage.whiten': True,
                     'aggregation': 'token_mean'},
    # The same paper's form for groups: the group's mean is subtracted before; its KL term is k2, the estimator that kl_coef adds here.
    'reinforce_pp_baseline': {'advantage.scale': 'none', 'advantage.whiten': True, 'aggregation': 'token_mean'},
    # arXiv:2602.02710: division by the group's mean, which weighs problems that are rarely solved as maximum likelihood would.
    'maxrl': {'advantage.scale': 'mean', 'advantage.epsilon': 0.0, 'aggregation': 'token_mean'},
    # arXiv:2505.23585: the baseline of least variance for gradients that grow with the length; one exact on-policy step of a batch.
    'opo': {'loss.kind': 'reinforce', 'advantage.center': 'length_weighted', 'advantage.scale': 'none', 'aggregation': 'sequence_sum'},
    # arXiv:2110.00641 and 2505.24298: samples may be older than the policy the ratio is bounded against; weights beyond 5 are left out.
    'decoupled': {'loss.importance_cap': 5.0, 'loss.importance_mode': 'mask', 'aggregation': 'token_mean', 'minibatches': 4},
    # What that is compared with: the ratio to the policy that sampled is all the correction there is.
    'naive': {'loss.decoupled': False, 'loss.importance_cap': None, 'aggregation': 'token_mean', 'minibatches': 4},
    # arXiv:2510.18855: no gradient of tokens where trainer and sampler are far apart, whichever is larger.
    'icepop': {'loss.importance_low': 0.5, 'loss.importance_cap': 5.0, 'loss.importance_mode': 'mask'},
    # arXiv:2512.02556: no division by the deviation, unbiased KL, and failed replies that the policy has moved away from are left out.
    'deepseek_v32': {'advantage.scale': 'none', 'loss.kl_coef': 1e-3, 'loss.kl_estimator': 'k3_corrected', 'loss.opsm_nats': 0.5},
}

# GRPO as other systems compute it when asked for GRPO and left at their defaults, by the file that says so. The objective and how often a
# batch is stepped on are theirs; numbers of problems and samples, lengths and the optimizer remain this file's.
_NO_IMPORTANCE = {'loss.importance_cap': None}
PEERS = {
    # verl at 018f23b, trainer/config/actor/actor.yaml and algorithm/rollout_correction.yaml: dual clip 3, no correction, 1024 problems in
    # minibatches of 256.
    'as_verl': {'aggregation': 'token_mean', 'loss.dual_clip': 3.0, 'minibatches': 4, **_NO_IMPORTANCE},
    # TRL 1.16.0, GRPOConfig: loss_type 'dapo', whole replies masked where the product of their weights is above 3.
    'as_trl': {'aggregation': 'token_mean', 'advantage.epsilon': 1e-4, 'loss.importance_level': 'sequence', 'loss.importance_mode': 'mask',
               'loss.importance_cap': 3.0},
    # NeMo RL at b26cfeb, examples/configs/grpo_math_1B.yaml: leave-one-out baseline, k3 in the loss. Its clamps of log-ratios are left out,
    # and its deviation is that of the siblings, here the group's.
    'as_nemo_rl': {'aggregation': 'token_mean', 'advantage.center': 'leave_one_out', 'loss.kl_coef': 0.01, 'loss.kl_estimator': 'k3',
                   **_NO_IMPORTANCE},
    # OpenRLHF at 021d1b0, cli/train_ppo_ray.py with --advantage_estimator group_norm: k1 in the reward. 1024 problems in minibatches of 128
    # samples are 8 steps for each sample of a problem; here they are 8. Its penalty is subtracted token by token after the normalization of
    # the group, here from the sample's reward before it.
    'as_openrlhf': {'aggregation': 'token_mean', 'advantage.epsilon': 1e-9, 'minibatches': 8, 'reward_kl.coef': 0.01, **_NO_IMPORTANCE},
    # prime-rl at 065a864, configs/algorithm.py and losses.py: the ratio to the sampler, not clipped but masked by probabilities (DPPO), and no
    # division by the deviation. Its pull to the sampler (1e-3 times the squared log-ratio) is left out.
    'as_prime_rl': {'aggregation': 'token_mean', 'advantage.scale': 'none', 'loss.kind': 'dppo', 'loss.decoupled': False, **_NO_IMPORTANCE},
    # SkyRL at 1331ec7, train/config/ppo_base_config.yaml: k3 in the loss (its clamps left out), 1024 problems in minibatches of 256.
    'as_skyrl': {'aggregation': 'token_mean', 'minibatches': 4, 'loss.kl_coef': 1e-3, 'loss.kl_estimator': 'k3', **_NO_IMPORTANCE},
    # AReaL at e851361, examples/math/gsm8k_grpo_megatron_lora.yaml: decoupled, bounds of 0.4, weights above 5 left out, advantages whitened
    # after the group's normalization. (Its bare defaults have no baseline and k1 in the reward.)
    'as_areal': {'aggregation': 'token_mean', 'advantage.whiten': True, 'loss.clip_low': 0.4, 'loss.clip_high': 0.4,
                 'loss.importance_cap': 5.0, 'loss.importance_mode': 'mask'},
    # Tunix 0.1.7, rl/grpo/grpo_learner.py: means of replies. Its default KL term is k1 as a loss, which pulls nowhere and is refused here;
    # k2, its 'mse_kl', is the estimator with the gradient that k1 stands for.
    'as_tunix': {'loss.kl_coef': 0.04, 'loss.kl_estimator': 'k2', **_NO_IMPORTANCE},
}
PRESETS = VARIANTS | PEERS


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Return the settings of a variant; `arg` is '' or 'variant=NAME'."""
  variant = arg.removeprefix('variant=') or 'grpo'
  if variant not in PRESETS:
    raise ValueError(f'configs/grpo.py:{arg} asks for an unknown variant; use variant= one of {", ".join(PRESETS)}.')
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
      # Samples cut off by the length limit: grade as they stand, mask, penalty (soft, over the last overlong_buffer tokens), bootstrap (by
      # a critic).
      'overlong': 'grade',
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
          'staleness': 0,  # versions between the weights that sample and those that are trained
      },
      'reward': {
          'verifier_weight': 1.0,
          'source_weight': 0.0,  # of what reward models say
      },
      'reward_model': {
          'paths': (),  # runs of configs/reward_model.py, or functions of trajectories as 'package/module:function'; () is none
          'combine': 'mean',  # of several: mean, min, mean_minus_std
          'std_coef': 1.0,  # mean_minus_std
          'normalize': True,  # to mean 0 and standard deviation 1 over held-out texts
          'clip': 0.0,  # largest size; 0 does not clip
          'rows': 8,  # of a batch
          'length': 1024,  # tokens of a row
          'sees_tools': False,  # what tools answered
      },
      'drift': {  # alarm where reward models and the verifier part
          'window': 5,  # steps that are looked at together
          'fall': 0.1,  # of the share of pairs that both rank alike, from what it was at first
          'drop': 0.05,  # of the truth, as a share of its best
          'min_problems': 10,  # with two samples that differ in truth, in a window
          'action': 'warn',  # warn, snapshot (a checkpoint that is kept), stop
      },
      'process': {
          'weight': 0.0,  # share of a reward that verified parts of the work make up
          'cap': 0.1,  # most they pay where the outcome is 0
          'credit': 'episode',  # episode, turn
      },
      'reward_kl': {
          'coef': 0.0,  # of the KL divergence from the reference, in the reward
          'target': config_dict.placeholder(float),  # nats of a sample that the coefficient is adapted to reach
          'gain': 0.1,
      },
      'advantage': {
          'estimator': 'group',  # group, reinforce_pp, gae (with a critic)
          'center': 'mean',  # mean, leave_one_out, length_weighted, none
          'scale': 'std',  # std, batch_std, mean, none
          'epsilon': 1e-6,
          'discount': 1.0,  # gae
          'trace': 1.0,  # gae
          'whiten': False,  # over all sampled tokens of a batch
      },
      'critic': {  # of estimator=gae
          'optimizer': shared.optimizer.to_dict() | {'schedule': 'constant'},
          'loss': {'clip': 0.2},  # of values around the old ones
          'warmup_steps': 0,  # batches from which only the critic learns
          'trace': config_dict.placeholder(float),  # of its returns; None is advantage.trace
      },
      'aggregation': 'sequence_mean',  # token_mean, sequence_mean, sequence_sum, constant, token_sum
      'loss': {
          'kind': 'clip',  # clip, dppo, cispo, reinforce
          'ratio': 'token',  # token, sequence
          'clip_low': 0.2,
          'clip_high': 0.2,
          'dual_clip': config_dict.placeholder(float),
          'decoupled': True,  # ratio to the policy before the batch; False: to the one that sampled
          'max_segments': 32,  # documents of a row, where whole documents are looked at
          'importance_cap': 2.0,  # of trainer over sampler probability
          'importance_low': config_dict.placeholder(float),
          'importance_level': 'token',  # token, sequence, geometric
          'importance_mode': 'truncate',  # truncate, mask, filter
          'opsm_nats': config_dict.placeholder(float),
          'kl_coef': 0.0,
          'kl_estimator': 'k2',  # k2, k3, k3_corrected
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
  config.update_from_flattened_dict(PRESETS[variant])
  return config
