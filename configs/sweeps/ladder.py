"""Ladder: what each part of DAPO (arXiv:2503.14476) adds to GRPO, one after the other, and last Dr. GRPO's advantages (arXiv:2503.20783).

python -m launch.sweep --config=configs/sweeps/ladder.py --workdir=runs/ladder --parallel=2

Four letters and the end of the reply fit twice into the limit, so a reply has to be ended in time: a policy that writes letters in order and
never stops earns half, and has to leave that behind. Four minibatches a batch, so that there is a ratio to clip.

Found, in 8 minutes on 2 cores (ladder.svg): on the first four rungs it is luck whether a run learns in time to end its replies, so that their
held-out pass@1 (83, 62, 35 and 66 %) cannot be told apart; three seeds said 99.7, 90, 33 and 33 %. With the overlong penalty all runs solve
all problems. Advantages that are not divided by the deviation change nothing that six seeds show.
"""

import ml_collections

from configs.sweeps import settings, toy

STEPS = settings.named({
    'grpo': {'minibatches': 4},
    '+clip_higher': {'loss.clip_high': 0.28},
    '+token_mean': {'aggregation': 'token_mean'},
    '+dynamic_sampling': {'max_rounds': 4},
    '+overlong_penalty': {'overlong': 'penalty', 'overlong_buffer': 3},  # from the sixth token of eight on
    '+unscaled': {'advantage.scale': 'none'},
})


def get_config() -> ml_collections.ConfigDict:
  names = [name for name, _ in STEPS]
  return ml_collections.ConfigDict({
      'base': toy.base(level=3, max_new_tokens=8),
      'settings': settings.ladder(STEPS),
      'seeds': (0, 1, 2, 3, 4, 5),
      'metric': 'heldout/pass@1',
      'curves': ('heldout/pass@1', 'critic/score/mean'),
      'against': tuple(zip(names[1:], names, strict=False)),  # each and the one before
      'panels': (),
      'model': toy.model(),
  })
