r"""PPO with a critic (arXiv:1707.06347), for verifiable rewards and, with a reward model, for human feedback; a few settings over GRPO's.

python -m launch.train --config=configs/ppo.py --config.model.path=MODEL \
    --config.domains="{'word_problems/generated': {'levels': (1, 2)}}" --workdir=runs/ppo

RLHF: the same with a reward model of configs/reward_model.py, that alone is paid. Its distance from the reference is held at some nats of a
sample. Where the verifier can tell, it watches: two samples of a problem let rl.drift see a policy that begins to exploit the model.

    --config.reward_model.paths="('runs/reward_model',)" --config.reward.verifier_weight=0 --config.reward.source_weight=1 \
    --config.reward_kl.coef=0.05 --config.reward_kl.target=6 --config.groups=64 --config.group_size=2 --config.drift.action=snapshot
"""

import ml_collections

from configs import grpo

# What it changes of GRPO's settings.
CHANGES = {
    'groups': 128,  # one sample of a problem is enough: the critic is what it is compared with
    'group_size': 1,
    'rollout.min_group_size': 1,
    'advantage.estimator': 'gae',
    'advantage.center': 'none',
    'advantage.scale': 'none',
    'advantage.trace': 0.95,
    'advantage.whiten': True,
    'critic.optimizer.learning_rate': 1e-5,
    'critic.trace': 1.0,  # returns without bias, as replies are long and rewards come at their end
    'critic.warmup_steps': 5,
    'aggregation': 'token_mean',
    'minibatches': 4,
    # arXiv:1909.08593 sec. 2.2: the KL divergence is a part of the reward; a target (in nats of a sample) adapts the coefficient.
    'reward_kl.coef': 0.001,
}


def get_config() -> ml_collections.ConfigDict:
  config = grpo.get_config()
  config.update_from_flattened_dict(CHANGES)
  return config
