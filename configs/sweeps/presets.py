"""Presets: does each preset of configs/grpo.py learn, and PPO with a critic?

python -m launch.sweep --config=configs/sweeps/presets.py --workdir=runs/presets --parallel=2
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
    'ratios, weights': ('dapo', 'gspo', 'cispo', 'dppo', 'decoupled', 'naive', 'icepop', 'deepseek_v32'),
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
