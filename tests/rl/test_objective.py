"""The formula of a run: by hand for some presets, and no setting of the objective that it leaves out."""

import dataclasses

import pytest

from configs import grpo, ppo
from rl import config as config_lib
from rl import objective
from rl.losses import PolicyLossConfig
from rl.rl_config import RLConfig


def preset(variant, config=None, **changes):
  config = config or grpo.get_config(f'variant={variant}')
  config.model.path = '/model'
  config.domains = {'arithmetic/integers': {'levels': (1,)}}
  config.update_from_flattened_dict(changes)
  return config_lib.build(RLConfig, config)


def test_grpo_as_a_formula():
  assert objective.describe(preset('grpo', **{'loss.kl_coef': 0.01, 'loss.entropy_coef': 0.001})) == """\
maximize 1/N sum_i 1/T_i sum_t [w min(r A, clip(r, 0.8, 1.2) A) - 0.01 k + 0.001 H]
  r         = policy/old
  w         = sg[clip(old/behavior, 0, 2)]
  k         = d^2 / 2, d = log policy - log reference
  H         = entropy of the policy at the token
  A         = (R - mean(R)) / (std(R) + 1e-06)
  mean      = over the 8 samples of a problem, and so std; where all are equal the difference is 0
  R         = score
  score     = the verifier's; samples cut off by the length limit are graded as they stand
  old       = sg[policy], for a batch is stepped on once
  behavior  = the policy that sampled, as the sampler computed it
  reference = the policy before the first step
  sums      = N samples i of a minibatch, T_i tokens t that the policy sampled in it
  batch     = 16 problems x 8 samples, minibatches: 1, epochs: 1
"""


def test_a_critic_and_everything_that_pays_as_a_formula():
  config = preset('grpo', config=ppo.get_config(), **{
      'process.weight': 0.2, 'process.credit': 'turn', 'overlong': 'bootstrap', 'rollout.staleness': 2, 'reward.source_weight': 0.5,
      'reward_kl.target': 3.0, 'reward_model.paths': ('runs/helpful', 'runs/harmless'), 'reward_model.combine': 'min', 'reward_model.clip': 5.0})
  assert objective.describe(config) == """\
maximize 1/sum_i(T_i) sum_i sum_t [w min(r A, clip(r, 0.8, 1.2) A)]
  r         = policy/old
  w         = sg[clip(old/behavior, 0, 2)]
  A         = (B - mean(B)) / (std(B) + 1e-06), over all sampled tokens of the batch
  B         = sum of (1 x 0.95)^n delta over the sampled tokens from t on, n = 0, 1, ...
  delta     = u + 1 V(next sampled token) - V
  V         = the critic, minimizing (V - G)^2 / 2, clipped within 0.2 of its value before the batch
  G         = the returns, V + A before whitening with trace 1
  u         = R at the last token of a sample, 0.2 s at that of a turn, -c (log behavior - log reference) at each
  s         = what the turn of the token added to parts
  R         = (0.8 score) + 0.5 source
  parts     = scores of parts of the work, which pay at most 0.1 where score = 0
  score     = the verifier's; samples cut off by the length limit get V of what follows instead
  source    = min of runs/helpful, runs/harmless, normalized over held-out texts, within +-5; without what tools answered
  c         = 0.001 at first, then adapted with gain 0.1 to 3 nats a sample
  old       = the policy before this batch
  behavior  = the policy that sampled, as the sampler computed it, 2 batches before
  reference = the policy before the first step
  sums      = N samples i of a minibatch, T_i tokens t that the policy sampled in it
  batch     = 128 problems x 1 samples, minibatches: 4, epochs: 1; the first 5 train V alone
"""


TAUGHT = {'teacher.path': '/big', 'teacher.coef': 2.0, 'teacher.reward_coef': 0.5}


def test_a_teacher_as_a_formula():
  sampled = objective.describe(preset('grpo', **TAUGHT)).splitlines()
  assert sampled[0] == 'maximize 1/N sum_i 1/T_i sum_t [w min(r A, clip(r, 0.8, 1.2) A)]'
  assert '  A        = 0.5 A_R + 2 sg[log teacher - log policy]' in sampled
  assert '  A_R      = (R - mean(R)) / (std(R) + 1e-06)' in sampled and '  teacher  = /big' in sampled
  full = objective.describe(preset('grpo', **TAUGHT, **{'teacher.divergence': 'full', 'teacher.temperature': 3.0})).splitlines()
  assert full[0] == 'maximize 1/N sum_i 1/T_i sum_t [w min(r A, clip(r, 0.8, 1.2) A) - 18 D]'
  assert '  A        = 0.5 A_R' in full
  assert '  D        = KL(policy | teacher) of the whole vocabulary at the token, both at temperature 3' in full


@pytest.mark.parametrize('variant, parts', [
    ('dr_grpo', ['maximize 1/(128 N) sum_i sum_t [', 'A        = R - mean(R)\n']),
    ('dapo', ['1/sum_i(T_i) sum_i sum_t', 'clip(r, 0.8, 1.28)', 'clip((96 - L) / 32, -1, 0)', 'replaced in up to 4 rounds']),
    ('gspo', ['clip(r, 0.9997, 1.0004)', 'r        = geometric mean of policy/old over the sample']),
    ('cispo', ['[w sg[clip(r, 0, 5)] A log policy]']),
    ('rloo', ['1/N sum_i sum_t [w A log policy]', 'R - mean(R of the others)']),
    ('naive', ['[min(r A, clip(r, 0.8, 1.2) A)]', 'r        = policy/behavior']),
    ('decoupled', ['w        = sg[old/behavior] where 0 <= old/behavior <= 5, else 0', 'old      = the policy before this batch']),
    ('icepop', ['where 0.5 <= old/behavior <= 5, else 0']),
    ('maxrl', ['A        = (R - mean(R)) / (mean(R) + 0)']),
    ('opo', ['R - sum_i(T_i R) / sum_i(T_i)']),
    ('dppo', ['[m r A]', 'm        = 0 where A > 0 and policy - behavior > 0.15, or A < 0 and behavior - policy > 0.15, else 1',
              'A        = R - mean(R)\n']),
    ('deepseek_v32', ['[w o min(', 'o         = 0 where A < 0 and mean_t(log behavior - log policy) > 0.5', 'policy/old (exp(-d) - 1 + d)',
                      'A         = R - mean(R)\n']),
    ('as_trl', ['sg[product of old/behavior over the sample] where 0 <= product of old/behavior over the sample <= 3, else 0']),
    ('as_verl', ['[max(min(r A, clip(r, 0.8, 1.2) A), 3 A if A < 0)]', 'minibatches: 4']),
    ('reinforce_pp', ['B        = sum of u over the sampled tokens from t on', 'u        = R at the last token of a sample\n']),
    ('reinforce_pp_baseline', ['B        = R - mean(R)\n', 'over all sampled tokens of the batch']),
    ('as_openrlhf', ['score - 0.01 sum_t(log behavior - log reference)']),
    ('as_prime_rl', ['[m r A]', 'policy - behavior > 0.2', 'A        = R - mean(R)']),
])
def test_presets_say_what_they_are(variant, parts):
  text = objective.describe(preset(variant))
  for part in parts:
    assert part in text, text


def test_presets_are_different_objectives():
  texts = {objective.describe(preset(variant)) for variant in grpo.PRESETS}
  assert len(texts) == len(grpo.PRESETS) == len(grpo.VARIANTS) + len(grpo.PEERS)


# A setting under which the field counts, and another value of it.
BASE = PolicyLossConfig(kl_coef=0.1, entropy_coef=0.1, opsm_nats=0.5, importance_low=0.5, dual_clip=3.0)
OTHERS = {
    'kind': ('dppo', {'dual_clip': None}), 'clip_low': 0.1, 'clip_high': 0.3, 'dual_clip': 4.0, 'ratio': 'sequence',
    'decoupled': (False, {'importance_cap': None, 'importance_low': None}), 'importance_cap': 3.0, 'importance_low': 0.6,
    'importance_level': 'geometric', 'importance_mode': 'mask', 'opsm_nats': 0.6, 'kl_coef': 0.2, 'kl_estimator': 'k3', 'entropy_coef': 0.2}


@pytest.mark.parametrize('field', [field.name for field in dataclasses.fields(PolicyLossConfig) if field.name != 'max_segments'])
def test_every_setting_of_the_loss_is_in_the_formula(field):
  other, needed = OTHERS[field] if isinstance(OTHERS[field], tuple) else (OTHERS[field], {})
  config = preset('grpo')
  before = dataclasses.replace(BASE, **needed) if field != 'decoupled' else BASE
  after = dataclasses.replace(before, **{field: other} | needed)
  assert objective.describe(dataclasses.replace(config, loss=before)) != objective.describe(dataclasses.replace(config, loss=after))


@pytest.mark.parametrize('changes', [
    {'aggregation': 'token_sum'}, {'aggregation': 'token_mean'}, {'groups': 4}, {'group_size': 4}, {'max_rounds': 2}, {'overlong': 'mask'},
    {'overlong': 'penalty'}, {'minibatches': 2}, {'epochs': 2}, {'advantage.center': 'none'}, {'advantage.scale': 'batch_std'},
    {'advantage.epsilon': 0.1}, {'advantage.whiten': True}, {'overlong': 'grade', 'rollout.staleness': 1}, {'reward.verifier_weight': 0.5},
    {'process.weight': 0.1}, {'process.weight': 0.1, 'process.credit': 'turn'}, {'reward_kl.coef': 0.1}])
def test_every_setting_beside_the_loss_is_in_the_formula(changes):
  assert objective.describe(preset('grpo', **changes)) != objective.describe(preset('grpo'))


PROXY = {'reward.source_weight': 0.5, 'reward_model.paths': ('runs/a', 'runs/b'), 'reward_model.combine': 'mean_minus_std'}


@pytest.mark.parametrize('changes', [
    {'reward.source_weight': 0.0}, {'reward.verifier_weight': 0.0}, {'reward_model.paths': ('runs/a',)}, {'reward_model.combine': 'min'},
    {'reward_model.std_coef': 0.5}, {'reward_model.normalize': False}, {'reward_model.clip': 3.0}, {'reward_model.sees_tools': True}])
def test_every_setting_of_reward_models_is_in_the_formula(changes):
  assert objective.describe(preset('grpo', **PROXY | changes)) != objective.describe(preset('grpo', **PROXY))


@pytest.mark.parametrize('changes', [
    {'advantage.discount': 0.9}, {'advantage.trace': 0.9}, {'advantage.whiten': False}, {'critic.trace': 0.9}, {'critic.warmup_steps': 4},
    {'critic.loss.clip': None}, {'reward_kl.coef': 0.1}, {'reward_kl.target': 2.0}, {'overlong': 'bootstrap'}, {'process.weight': 0.1},
    {'advantage.estimator': 'reinforce_pp', 'advantage.trace': 1.0}])
def test_every_setting_of_a_critic_is_in_the_formula(changes):
  assert objective.describe(preset('', config=ppo.get_config(), **changes)) != objective.describe(preset('', config=ppo.get_config()))


@pytest.mark.parametrize('name, values, needed', [
    ('process.cap', (0.1, 0.2), {'process.weight': 0.1}), ('reward_kl.gain', (0.1, 0.2), {'reward_kl.coef': 0.1, 'reward_kl.target': 2.0}),
    ('process.cap', (0.1, 0.2), {'process.weight': 0.1, 'process.credit': 'turn', 'advantage.estimator': 'reinforce_pp',
                                 'advantage.scale': 'none'})])
def test_numbers_that_count_only_with_others_are_in_the_formula(name, values, needed):
  assert len({objective.describe(preset('grpo', **needed, **{name: value})) for value in values}) == 2


@pytest.mark.parametrize('changes', [{'overlong_buffer': 16}, {'rollout.max_new_tokens': 64}])
def test_numbers_of_the_overlong_penalty_are_in_the_formula(changes):
  assert objective.describe(preset('dapo', **changes)) != objective.describe(preset('dapo'))


def test_the_reference_of_adapters_is_their_base():
  assert 'reference = the base without adapters' in objective.describe(preset('grpo', **{'loss.kl_coef': 0.1, 'lora.rank': 4}))
  assert 'reference' not in objective.describe(preset('grpo'))
