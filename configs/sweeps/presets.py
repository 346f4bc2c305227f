"""Presets: does each preset of configs/grpo.py learn, and PPO with a critic?

python -m launch.sweep --config=configs/sweeps/presets.py --workdir=runs/presets --parallel=2
"""

import ml_collections

from configs import grpo, ppo
from configs.sweeps import settings, toy

# What papers propose is stepped on four times a batch, so that there is a ratio to bound; what has none is on-policy, and peers as they are.
ON_POLICY = ('rloo', 'opo')
NEEDED = {
    # The answer takes four tokens; to punish what is overlong, and not the answer, there must be room beyond.
    'dapo': {'rollout.max_new_tokens': 6, 'overlong_buffer': 1},
    'ppo': {'groups': 64, 'critic.optimizer.learning_rate': 1e-2},
}
PANELS = {
    'advantages': ('grpo', 'dr_grpo', 'rloo', 'opo', 'reinforce_pp', 'reinforce_pp_baseline', 'maxrl', 'ppo'),
    'ratios, weights': ('dapo', 'gspo', 'cispo', 'dppo', 'decoupled', 'naive', 'icepop', 'deepseek_v32'),
    'peers': tuple(grpo.PEERS),
}


def get_config() -> ml_collections.ConfigDict:
  papers = {name: {'minibatches': 1 if name in ON_POLICY else 4} | changes for name, changes in grpo.VARIANTS.items()}
  found = {name: changes | NEEDED.get(name, {}) for name, changes in (papers | {'ppo': ppo.CHANGES} | grpo.PEERS).items()}
  return ml_collections.ConfigDict({
      'base': toy.base(level=3, max_new_tokens=4),
      'settings': settings.named(found),
      'seeds': (0, 1, 2),
      'metric': 'heldout/pass@1',
      'curves': ('heldout/pass@1', 'critic/score/mean'),
      'against': (),
      'panels': tuple(PANELS.items()),
      'model': toy.model(),
  })
