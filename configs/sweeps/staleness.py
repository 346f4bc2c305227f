"""Staleness: how old may samples be, with the ratio to the policy before the batch (decoupled) and with that to the one that sampled (naive)?

python -m launch.sweep --config=configs/sweeps/staleness.py --workdir=runs/staleness --parallel=2

Four minibatches a batch at a large learning rate move the policy far from one version to the next, so that samples of four versions ago are
of another policy. On-policy both are the same objective. The reward is that of the samples, which are older than the policy that is evaluated.

Found, in 6 minutes on 2 cores (staleness.svg): decoupled solves 99.7 % of the held-out problems at every age, and loses 8 of 60 steps at four
versions old, 4 of which are the age itself; naive loses 15, 20 and 39 steps at one, two and four, where it ends at 42 %.
"""

import ml_collections

from configs import grpo
from configs.sweeps import settings, toy

VERSIONS_OLD = (0, 1, 2, 4)
OBJECTIVES = ('decoupled', 'naive')


def get_config() -> ml_collections.ConfigDict:
  ages = settings.param('rollout.staleness', VERSIONS_OLD)
  found = settings.product(settings.named({name: grpo.VARIANTS[name] for name in OBJECTIVES}), ages)
  panels = tuple((objective, tuple(name for name, _ in found if name.startswith(objective))) for objective in OBJECTIVES)
  return ml_collections.ConfigDict({
      'base': toy.base(level=3, max_new_tokens=4),
      'settings': found,
      'seeds': (0, 1, 2),
      'metric': 'heldout/pass@1',
      'curves': ('heldout/pass@1', 'critic/score/mean'),
      'against': tuple((name, names[0]) for _, names in panels for name in names[1:]),  # the same, on-policy
      'panels': panels,
      'model': toy.model(),
  })
