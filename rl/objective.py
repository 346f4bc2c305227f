"""What a run of reinforcement learning maximizes, as a formula with the numbers of its settings.

Settings of many records make one objective, and names of methods do not say which: this writes it down, so that two runs can be compared by
reading. Every setting that changes the objective changes the text.

Deliberately absent: how the objective is reached (optimizer, sampling, devices), and typesetting; it is plain text for logs and files.
"""

from __future__ import annotations

import re

from rl.losses import PolicyLossConfig
from rl.rl_config import RLConfig

_SUMS = {
    'token_mean': '1/sum_i(T_i) sum_i sum_t',
    'sequence_mean': '1/N sum_i 1/T_i sum_t',
    'sequence_sum': '1/N sum_i sum_t',
    'constant': '1/({max_tokens} N) sum_i sum_t',
    'token_sum': 'sum_i sum_t',
}
_BASELINES = {
    'mean': 'mean(R)',
    'leave_one_out': 'mean(R of the others)',
    'length_weighted': 'sum_i(T_i R) / sum_i(T_i)',
}
_SCALES = {'std': 'std(R)', 'batch_std': 'std(R of the batch)', 'mean': 'mean(R)'}
_RATIOS = {
    'token': '{}',
    'sequence': 'product of {} over the sample',
    'geometric': 'geometric mean of {} over the sample',
}
_OVERLONG = {
    'grade': 'samples cut off by the length limit are graded as they stand',
    'penalty': 'samples cut off by the length limit are graded as they stand',
    'mask': 'samples cut off by the length limit are left out',
    'bootstrap': 'samples cut off by the length limit get V of what follows instead',
}
_KL = {'k2': 'd^2 / 2', 'k3': 'exp(-d) - 1 + d', 'k3_corrected': 'policy/{} (exp(-d) - 1 + d)'}


def describe(config: RLConfig) -> str:
  """Return the objective of a run as lines of plain text: what is maximized, then what each symbol of it stands for.

  Names of policies stand for the probabilities of a token under them; sg[.] has no gradient.
  """
  loss, definitions = config.loss, {}
  term = _surrogate(loss, definitions)
  if loss.opsm_nats is not None:
    term = f'o {term}'
    definitions['o'] = f'0 where A < 0 and mean_t(log behavior - log policy) > {loss.opsm_nats:g}, else 1'
  if loss.importance_cap is not None:
    term = f'w {term}'
    definitions['w'] = _importance(loss)
  if loss.kl_coef:
    term += f' - {loss.kl_coef:g} k'
    definitions['k'] = _KL[loss.kl_estimator].format(_denominator(loss)) + ', d = log policy - log reference'
  if loss.entropy_coef:
    term += f' + {loss.entropy_coef:g} H'
    definitions['H'] = 'entropy of the policy at the token'
  definitions |= _advantage(config)
  definitions |= _reward(config)
  definitions |= _policies(config, term, definitions)
  definitions['sums'] = _samples(config)
  width = max(map(len, definitions))
  sums = _SUMS[config.aggregation].format(max_tokens=config.rollout.max_new_tokens)
  return '\n'.join([f'maximize {sums} [{term}]', *(f'  {name:<{width}} = {text}' for name, text in definitions.items())]) + '\n'


def _denominator(loss: PolicyLossConfig) -> str:
  return 'old' if loss.decoupled else 'behavior'


def _surrogate(loss: PolicyLossConfig, definitions: dict[str, str]) -> str:
  if loss.kind == 'reinforce':
    return 'A log policy'
  ratio = f'policy/{_denominator(loss)}'
  definitions['r'] = _RATIOS['geometric' if loss.ratio == 'sequence' else 'token'].format(ratio)
  if loss.kind == 'dppo':
    definitions['m'] = (f'0 where A > 0 and policy - {_denominator(loss)} > {loss.clip_high:g}, or A < 0 and '
                        f'{_denominator(loss)} - policy > {loss.clip_low:g}, else 1')
    return 'm r A'
  clipped = f'clip(r, {1 - loss.clip_low:g}, {1 + loss.clip_high:g})'
  if loss.kind == 'cispo':
    return f'sg[{clipped}] A log policy'
  smaller = f'min(r A, {clipped} A)'
  return smaller if loss.dual_clip is None else f'max({smaller}, {loss.dual_clip:g} A if A < 0)'


def _importance(loss: PolicyLossConfig) -> str:
  weight = _RATIOS[loss.importance_level].format('old/behavior')
  low, cap = loss.importance_low or 0, loss.importance_cap
  if loss.importance_mode == 'truncate':
    return f'sg[clip({weight}, {low:g}, {cap:g})]'
  return f'sg[{weight if loss.importance_mode == "mask" else "1"}] where {low:g} <= {weight} <= {cap:g}, else 0'


def _advantage(config: RLConfig) -> dict[str, str]:
  settings, found = config.advantage, {}
  compared = _compared('R', config)
  if settings.estimator == 'group':
    found['A'] = compared
    if _pays_turns(config):
      found['A'] += f' + {config.process.weight:g} a'
      found['a'] = f'{_compared("s", config)}, over turns of the same number; s what the turn of the token added to the parts'
  else:
    found['A'] = 'sum of u over the sampled tokens from t on'
    if settings.estimator == 'gae':
      found['A'] = f'sum of {settings.discount:g}^n {settings.trace:g}^n delta over the sampled tokens, n from t on'
      found['delta'] = f'u + {settings.discount:g} V(next token) - V'
      found['V'] = _critic(config)
    found['u'] = f'at the last token of the sample {compared}'
    if _pays_turns(config):
      found['u'] += f'; at the last token of a turn {config.process.weight:g} s, s what the turn added to the parts'
    if config.reward_kl.coef:
      found['u'] += f'; at each token -{_kl_coef(config)} (log behavior - log reference)'
  if settings.whiten:
    found['A'] += f'; then less its mean and over (std + {settings.epsilon:g}), over all tokens of the batch'
  return found


def _compared(name: str, config: RLConfig) -> str:
  """Return a reward as it is compared with those of the group."""
  center, scale = config.advantage.center, config.advantage.scale
  text = name if center == 'none' else f'{name} - {_BASELINES[center]}'.replace('R', name)
  if scale != 'none':
    text = f'({text}) / ({_SCALES[scale]} + {config.advantage.epsilon:g})'.replace('R', name)
  if center != 'none' or scale in ('std', 'mean'):
    text += f', over the {config.group_size} samples of a problem; 0 where all {name} are equal'
  return text


def _critic(config: RLConfig) -> str:
  critic = config.critic
  clip = '' if critic.loss.clip is None else f', moved by at most {critic.loss.clip:g} a batch'
  trace = config.advantage.trace if critic.trace is None else critic.trace
  warmup = f'; the policy waits for its first {critic.warmup_steps} batches' if critic.warmup_steps else ''
  return f'the critic, minimizing (V - G)^2 / 2{clip}, G the returns with trace {trace:g}{warmup}'


def _pays_turns(config: RLConfig) -> bool:
  return config.process.weight > 0 and config.process.credit == 'turn'


def _kl_coef(config: RLConfig) -> str:
  kl = config.reward_kl
  return f'{kl.coef:g}' if kl.target is None else f'c (from {kl.coef:g}, adapted by {kl.gain:g} to {kl.target:g} nats a sample)'


def _reward(config: RLConfig) -> dict[str, str]:
  reward, process, found = config.reward, config.process, {}
  score = 'score'
  if process.weight and not (_pays_turns(config) and config.advantage.estimator == 'group'):
    paid = '' if _pays_turns(config) else f' + {process.weight:g} mean(parts)'
    score = f'({1 - process.weight:g} score{paid})'
    found['parts'] = f'scores of parts of the work, which pay at most {process.cap:g} where score = 0'
  terms = [score if reward.verifier_weight == 1 else f'{reward.verifier_weight:g} {score}'] if reward.verifier_weight else []
  terms += [f'{reward.source_weight:g} source'] if reward.source_weight else []
  text = ' + '.join(terms)
  if config.overlong == 'penalty':
    free = config.rollout.max_new_tokens - config.overlong_buffer
    text += f' + clip(({free} - L) / {config.overlong_buffer}, -1, 0), L the tokens of the last reply'
  if config.reward_kl.coef and config.advantage.estimator == 'group':
    text += f' - {_kl_coef(config)} sum_t(log behavior - log reference)'
  return {'R': text, **found, 'score': f'the verifier\'s; {_OVERLONG[config.overlong]}',
          **({'source': 'mean of the other sources of reward'} if reward.source_weight else {})}


def _policies(config: RLConfig, term: str, definitions: dict[str, str]) -> dict[str, str]:
  """Return what the names of policies stand for that appear somewhere."""
  used = set(re.findall(r'\w+', ' '.join([term, *definitions.values()])))
  texts = {
      'old': 'the policy before this batch',
      'behavior': 'the policy that sampled, as the sampler computed it' + _age(config),
      'reference': 'the policy before the first step' if config.lora.rank == 0 else 'the base without adapters',
  }
  if config.minibatches * config.epochs == 1:
    texts['old'] = 'sg[policy], for a batch is stepped on once'
  return {name: text for name, text in texts.items() if name in used}


def _age(config: RLConfig) -> str:
  staleness = config.rollout.staleness
  return f', {staleness} batches before' if staleness else ''


def _samples(config: RLConfig) -> str:
  sizes = f'{config.groups} problems x {config.group_size} samples a step, in {config.minibatches} minibatches, {config.epochs} times'
  replaced = f', problems whose R are equal replaced in up to {config.max_rounds} rounds' if config.max_rounds > 1 else ''
  return f'N samples i of a minibatch, T_i tokens t that the policy sampled in it; {sizes}{replaced}'
