"""Policy losses beside TRL's GRPOTrainer on the same log-probabilities: value and gradient, over its loss types and corrections."""

import collections
import dataclasses
import functools
import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import grpo
from rl import batching, losses
from rl.losses import PolicyLossConfig
from rl.types import Document

pytest.importorskip('trl', reason='TRL is not installed; pip install .[peers] brings it')

ROWS, TOKENS, PROMPT, MAX_TOKENS = 4, 7, 2, 9
MASK = np.array([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0]], bool)

CASES = {
    'dapo': ({'loss_type': 'dapo', 'epsilon_high': 0.1}, 'token_mean', PolicyLossConfig(clip_high=0.1, importance_cap=None)),
    'grpo': ({'loss_type': 'grpo', 'beta': 0.3, 'use_bias_correction_kl': False}, 'sequence_mean',
             PolicyLossConfig(kl_coef=0.3, kl_estimator='k3', importance_cap=None)),
    'dr_grpo': ({'loss_type': 'dr_grpo', 'beta': 0.3, 'use_bias_correction_kl': True}, 'constant',
                PolicyLossConfig(kl_coef=0.3, kl_estimator='k3_corrected', importance_cap=None)),
    # Its bound of a ratio holds for either sign of the advantage, but counts for one only where the other bound has not counted already.
    'two_sided': ({'loss_type': 'dapo', 'delta': 1.3}, 'token_mean', PolicyLossConfig(dual_clip=1.3, importance_cap=None)),
    'gspo': ({'loss_type': 'grpo', 'importance_sampling_level': 'sequence', 'epsilon_low': 0.03, 'epsilon_high': 0.04}, 'sequence_mean',
             PolicyLossConfig(ratio='sequence', clip_low=0.03, clip_high=0.04, importance_cap=None)),
    'cispo': ({'loss_type': 'cispo', 'epsilon_high': 1.1}, 'token_mean',
              PolicyLossConfig(kind='cispo', clip_low=1.0, clip_high=0.1, importance_cap=None)),
    'opsm': ({'loss_type': 'dapo', 'off_policy_mask_threshold': 0.02}, 'token_mean', PolicyLossConfig(importance_cap=None, opsm_nats=0.02)),
    'token_truncate': ({'loss_type': 'dapo', 'mode': 'token_truncate', 'bounds': (0.8, 1.2)}, 'token_mean',
                       PolicyLossConfig(importance_low=0.8, importance_cap=1.2)),
    'token_mask': ({'loss_type': 'dapo', 'mode': 'token_mask', 'bounds': (0.8, 1.2)}, 'token_mean',
                   PolicyLossConfig(importance_low=0.8, importance_cap=1.2, importance_mode='mask')),
    'sequence_mask': ({'loss_type': 'dapo', 'mode': 'sequence_mask', 'bounds': (0.0, 1.2)}, 'token_mean',
                      PolicyLossConfig(importance_cap=1.2, importance_mode='mask', importance_level='sequence')),
}


def arrays():
  rng = np.random.default_rng(0)
  logprobs = -rng.exponential(1.5, MASK.shape)
  return {'logprobs': logprobs, **{name: logprobs + rng.normal(0, 0.3, MASK.shape) for name in ('old', 'behavior', 'reference')},
          'advantages': np.array([1.5, -0.5, -2.0, 0.7])}


def theirs(data, settings):
  """TRL's own `_compute_loss`, with the model's log-probabilities given."""
  import torch
  from trl import GRPOTrainer

  settings = {'beta': 0.0, 'epsilon_low': 0.2, 'epsilon_high': 0.2, 'importance_sampling_level': 'token', 'off_policy_mask_threshold': None,
              'delta': None, 'use_bias_correction_kl': True, 'mode': None, **settings}
  tensors = {name: torch.tensor(array) for name, array in data.items()}
  mask = torch.tensor(MASK).long()
  logprobs = tensors['logprobs'].requires_grad_()
  trainer = object.__new__(GRPOTrainer)
  trainer.__dict__ |= {
      '_get_per_token_logps_and_entropies': lambda *_, **__: (logprobs, torch.ones(MASK.shape), None), 'aux_loss_enabled': False,
      'top_entropy_quantile': 1.0, 'use_vllm': settings['mode'] is not None, 'vllm_importance_sampling_correction': True,
      'current_gradient_accumulation_steps': 1, '_entropy_bonus_enabled': False, 'max_completion_length': MAX_TOKENS,
      'model': types.SimpleNamespace(training=True), '_metrics': {'train': collections.defaultdict(list)},
      'accelerator': types.SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x,
                                           reduce=lambda x, reduction: x),
      'args': types.SimpleNamespace(delta=settings['delta'], use_bias_correction_kl=settings['use_bias_correction_kl'], steps_per_generation=1),
      **{name: settings[name] for name in ('loss_type', 'beta', 'epsilon_low', 'epsilon_high', 'importance_sampling_level',
                                           'off_policy_mask_threshold')}}
  inputs = {'prompt_ids': torch.zeros(ROWS, PROMPT).long(), 'prompt_mask': torch.ones(ROWS, PROMPT).long(), 'completion_ids': mask,
            'completion_mask': torch.ones_like(mask), 'tool_mask': mask, 'advantages': tensors['advantages'],
            'old_per_token_logps': tensors['old'], 'sampling_per_token_logps': tensors['behavior'],
            'ref_per_token_logps': tensors['reference'], 'num_items_in_batch': mask.sum()}
  if settings['mode'] is not None:
    # As its sampling step computes it, in a method that also samples.
    difference, (low, high) = (tensors['old'] - tensors['behavior']) * mask, settings['bounds']
    weight = torch.exp(difference.sum(-1, keepdim=True) if 'sequence' in settings['mode'] else difference)
    is_outside = (weight < low) | (weight > high)
    inputs['importance_sampling_ratio'] = weight.clamp(low, high) if 'truncate' in settings['mode'] else weight.masked_fill(is_outside, 0)
  loss = trainer._compute_loss(trainer.model, inputs)
  loss.backward()
  return loss.detach().item(), logprobs.grad.numpy()


def ours(data, aggregation, config):
  def spread(array):
    return np.concatenate([np.zeros((ROWS, PROMPT)), np.broadcast_to(array, MASK.shape)], 1).astype(np.float32)

  mask = spread(MASK).astype(bool)
  documents = [Document(np.zeros(mask.shape[1], np.int32), mask[row], str(row), {
      f'{name}{"" if name == "advantages" else "_logprobs"}': spread(data[name][:, None] if name == 'advantages' else data[name])[row]
      for name in ('advantages', 'old', 'behavior', 'reference')}) for row in range(ROWS)]
  denominator = batching.step_denominator(documents, aggregation, max_length=MAX_TOKENS)
  batch = batching.pack_rows([[document] for document in documents], mask.shape[1], denominator=denominator, aggregation=aggregation)
  batch = jax.tree.map(jnp.asarray, batch)

  def total(logprobs):
    # A place predicts the next token.
    logprobs_BT = jnp.pad(logprobs, ((0, 0), (PROMPT - 1, 1)))
    return jnp.sum(losses.policy_loss_BT(logprobs_BT, batch, config)[0] * batch.loss_weight_BT)

  value, grad = jax.value_and_grad(total)(jnp.asarray(data['logprobs'], jnp.float32))
  return float(value), np.asarray(grad)


@pytest.mark.parametrize('name', CASES)
def test_value_and_gradient_are_those_of_trl(name):
  settings, aggregation, config = CASES[name]
  (value, grad), (wanted, wanted_grad) = ours(arrays(), aggregation, config), theirs(arrays(), settings)
  assert value == pytest.approx(wanted, rel=1e-5)
  np.testing.assert_allclose(grad, wanted_grad, rtol=1e-4, atol=1e-6)


def test_the_preset_is_what_trl_does_by_default():
  import trl

  theirs = types.SimpleNamespace(**{field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)})
  level, mode = theirs.vllm_importance_sampling_mode.split('_')
  # A batch is stepped on once for each of its steps_per_generation, which are gradient_accumulation_steps where nothing is said.
  steps = theirs.steps_per_generation or theirs.gradient_accumulation_steps
  wanted = {
      'aggregation': {'dapo': 'token_mean', 'grpo': 'sequence_mean', 'dr_grpo': 'constant'}[theirs.loss_type],
      'advantage.estimator': {'sum_then_normalize': 'group'}[theirs.multi_objective_aggregation],
      'advantage.center': 'mean',
      'advantage.scale': {'group': 'std', 'batch': 'batch_std', 'none': 'none'}[theirs.scale_rewards],
      'advantage.whiten': False,
      'loss.kind': 'clip',
      'loss.ratio': theirs.importance_sampling_level,
      'loss.clip_low': theirs.epsilon,
      'loss.clip_high': theirs.epsilon if theirs.epsilon_high is None else theirs.epsilon_high,
      'loss.dual_clip': theirs.delta,
      'loss.decoupled': theirs.vllm_importance_sampling_correction,
      'loss.importance_level': level,
      'loss.importance_mode': mode,
      'loss.importance_cap': theirs.vllm_importance_sampling_clip_max,
      'loss.importance_low': theirs.vllm_importance_sampling_clip_min,
      'loss.opsm_nats': theirs.off_policy_mask_threshold,
      'loss.kl_coef': theirs.beta,
      'reward_kl.coef': 0.0,
      'loss.entropy_coef': theirs.entropy_coef,
      'overlong': 'mask' if theirs.mask_truncated_completions else 'grade',
      'minibatches': steps // theirs.gradient_accumulation_steps,
      'epochs': theirs.num_iterations,
  }
  preset = grpo.get_config('variant=as_trl')
  assert {key: functools.reduce(getattr, key.split('.'), preset) for key in wanted} == wanted
  assert theirs.top_entropy_quantile == 1 and not theirs.use_adaptive_entropy and not theirs.sync_ref_model
  # What is added to deviations is no setting there, but a number in the code.
  epsilons = re.findall(r'/ \(std_rewards \+ (.*?)\)', inspect.getsource(trl.GRPOTrainer))
  assert epsilons and {float(epsilon) for epsilon in epsilons} == {preset.advantage.epsilon}
