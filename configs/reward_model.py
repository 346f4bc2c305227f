r"""A reward model: a scalar head learns from comparisons which text is the better one (Bradley-Terry), one head for each dimension.

The finished model is judged on the held-out pairs: `launch.train` prints its calibration and writes calibration.json, which normalizes its
scores as a reward, and calibration.svg.

python -m launch.train --config=configs/reward_model.py --config.model.path=MODEL --config.data.paths="('preferences.jsonl',)" \
    --workdir=runs/reward_model
"""

import ml_collections

from configs import dpo


def get_config() -> ml_collections.ConfigDict:
  config = dpo.shared('reward')
  config.loss = ml_collections.ConfigDict({
      'margin_scale': 0.0,  # lead asked for each unit of preference; 0 is no margin
      'center_coef': 0.01,  # of (chosen + rejected)^2
  })
  config.optimizer.learning_rate = 1e-5
  return config
