"""Presets: does each preset of configs/grpo.py learn, and PPO with a critic?

python -m launch.sweep --config=configs/sweeps/presets.py --workdir=runs/presets --parallel=2

The task, the steps and the learning rate are those of staleness.py for all: none needed its own on seed 7, which is not of the study. It
shows that they learn and what they take, and does not rank them: most intervals overlap, and presets that step once a batch have a quarter of
the updates.

Found, in 9 minutes of a core (presets.svg): all but one end at 95 % or more of the held-out problems with every seed. MaxRL does with two of
three (seven of eight, with seeds 3 to 7): in one, all samples became 'bdbd', which is paid half, and nothing was left to compare; it is for
rewards of 0 and 1. 90 % takes 10 to 30 steps with four or eight updates a batch, 30 to 45 with one, and DAPO, which has to end its replies,
30 to 40. GSPO's bounds stop a quarter of the tokens. On samples two versions old IcePop masks 6 % of the tokens, TRL's preset 1 %,
DeepSeek-V3.2's drops 3 %, and all end where they do on-policy.
"""

import ml_collections

from configs import grpo, ppo
from configs.sweeps import settings, toy

# What papers propose is stepped on four times a batch, so that there is a ratio to bound, but not what has none. Peers' are as they are.
ON_POLICY = ('rloo', 'opo')
NEEDED = {
    # The answer takes four tokens; that what is overlong is punished, and not the answer, takes room beyond.
    'dapo': {'rollout.max_new_tokens': 6, 'overlong_buffer': 1},
    'ppo': {'groups': 64, 'critic.optimizer.learning_rate': 1e-2},
}
# They weigh, mask or drop what is far from the policy that sampled: on-policy nothing is. (Decoupled and naive: staleness.py.)
CORRECTED = ('grpo', 'icepop', 'deepseek_v32', 'as_trl', 'as_prime_rl', 'as_areal')
PANELS = {
    'advantages': ('grpo', 'dr_grpo', 'rloo', 'opo', 'maxrl', 'reinforce_pp', 'ppo', 'reinforce_pp_baseline'),
    'ratios': ('dapo', 'gspo', 'cispo', 'dppo', 'decoupled', 'naive', 'icepop', 'deepseek_v32'),
    'peers': tuple(grpo.PEERS),
}


def get_config() -> ml_collections.ConfigDict:
  papers = {name: {'minibatches': 1 if name in ON_POLICY else 4} | changes for name, changes in grpo.VARIANTS.items()}
  presets = {name: changes | NEEDED.get(name, {}) for name, changes in (papers | {'ppo': ppo.CHANGES} | grpo.PEERS).items()}
  old = settings.product(settings.named({name: presets[name] for name in CORRECTED}), settings.param('rollout.staleness', (2,)))
  return ml_collections.ConfigDict({
      'base': toy.base(level=3, max_new_tokens=4),
      'settings': settings.chain(settings.named(presets), old),
      'seeds': (0, 1, 2),
      'metric': 'heldout/pass@1',
      'curves': ('heldout/pass@1', 'critic/score/mean'),
      'against': tuple((name, of) for (name, _), of in zip(old, CORRECTED, strict=True)),  # the same, on-policy
      'panels': tuple(PANELS.items()),
      'model': toy.model(),
  })
