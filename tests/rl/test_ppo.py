"""The algorithms of the online loop, end to end: each learns a toy task, with a critic, stale samples and a KL term in the reward too."""

import dataclasses

import numpy as np
import pytest

from rl import train_rl
from rl.critic import CriticConfig
from rl.losses import PolicyLossConfig
from rl.optimizer import OptimizerConfig
from rl.rl_config import AdvantageConfig, EvalConfig
from tests.rl.test_train_rl import ROLLOUT, make_config, model, one_device, read, steps_of  # noqa: F401

GAE = AdvantageConfig('gae', center='none', scale='none', whiten=True)
CRITIC = CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-2, schedule='constant'))
ALGORITHMS = {
    'ppo': {'advantage': GAE, 'critic': CRITIC, 'groups': 64, 'group_size': 1, 'minibatches': 2,
            'rollout': dataclasses.replace(ROLLOUT, min_group_size=1)},
    'reinforce_pp': {'advantage': AdvantageConfig('reinforce_pp', center='none', scale='none', whiten=True)},
    'rloo': {'advantage': AdvantageConfig(center='leave_one_out', scale='none'), 'loss': PolicyLossConfig(kind='reinforce'),
             'aggregation': 'sequence_sum'},
    'cispo': {'loss': PolicyLossConfig(kind='cispo', clip_low=1.0, clip_high=4.0), 'minibatches': 2},
    'gspo': {'loss': PolicyLossConfig(ratio='sequence', clip_low=3e-2, clip_high=4e-2), 'minibatches': 2},
    'decoupled': {'rollout': dataclasses.replace(ROLLOUT, staleness=2), 'minibatches': 2},
}


@pytest.mark.parametrize('name', ALGORITHMS)
def test_an_algorithm_learns(model, tmp_path, name):  # noqa: F811
  results = train_rl.run(make_config(model, **{
      'num_steps': 40, 'eval': EvalConfig(every_steps=40, problems=100, temperature=1.0), 'checkpoint_every_steps': 1000,
      **ALGORITHMS[name]}), tmp_path)
  first = next(line for line in read(tmp_path, 'metrics.jsonl') if 'heldout/pass@1' in line)
  assert first['heldout/pass@1'] < 0.3 and results['heldout/pass@1'] > 0.85
  records = steps_of(tmp_path)
  assert all(np.isfinite(value) for record in records.values() for value in record.values() if value is not None)
