"""What a run of reinforcement learning maximizes, as a formula with the numbers of its settings.

Settings of many records make one objective, and names of methods do not say which: this writes it down, so that two runs can be compared by
reading. Every setting that changes the objective changes the text.

Deliberately absent: how the objective is reached (optimizer, sampling, devices), and typesetting; it is plain text for logs and files.
"""

from __future__ import annotations

import re

from rl.losses import PolicyLossConfig
from rl.proxy_reward import RewardModelConfig
from rl.rl_config import RewardKLConfig, RLConfig

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
  term = _taught(config, term, definitions)
  definitions |= _reward(config)
  definitions |= _policies(config, term, definitions)
  definitions |= _samples(config)
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
  name = 'A'
  if settings.whiten:
    name = 'B'
    found['A'] = f'(B - mean(B)) / (std(B) + {settings.epsilon:g}), over all sampled tokens of the batch'
  compared, kl = _compared('R', config), config.reward_kl.coef
  if settings.estimator == 'group':
    found[name] = compared + (f' + {config.process.weight:g} ({_compared("s", config)})' if _pays_turns(config) else '')
  elif settings.estimator == 'reinforce_pp':
    found[name] = 'sum of u over the sampled tokens from t on'
  else:
    found[name] = f'sum of ({settings.discount:g} x {settings.trace:g})^n delta over the sampled tokens from t on, n = 0, 1, ...'
    found['delta'] = f'u + {settings.discount:g} V(next sampled token) - V'
    found |= _critic(config)
  if settings.estimator != 'group':
    found['u'] = f'{compared} at the last token of a sample' + (f', {config.process.weight:g} s at that of a turn' if _pays_turns(config) else '')
    found['u'] += f', -{_kl_coef(config)} (log behavior - log reference) at each' if kl else ''
  if settings.center != 'none' or settings.scale in ('std', 'mean'):
    found['mean'] = f'over the {config.group_size} samples of a problem, and so std; where all are equal the difference is 0'
  if _pays_turns(config):
    found['s'] = 'what the turn of the token added to parts' + (', among turns of the same number' if settings.estimator == 'group' else '')
  return found


def _taught(config: RLConfig, term: str, definitions: dict[str, str]) -> str:
  """Return the term of a token with what a teacher adds to it, or to the advantage in it."""
  teacher = config.teacher
  if not teacher.path:
    return term
  of_rewards = [('A_R' if name == 'A' else name, text.replace('V + A ', 'V + A_R ')) for name, text in definitions.items()]
  definitions.clear()
  definitions |= {'A': f'{teacher.reward_coef:g} A_R', **dict(of_rewards), 'teacher': teacher.path}
  if teacher.divergence == 'sampled':
    definitions['A'] += f' + {teacher.coef:g} sg[log teacher - log policy]'
    return term
  definitions['D'] = f'KL(policy | teacher) of the whole vocabulary at the token, both at temperature {teacher.temperature:g}'
  return f'{term} - {teacher.coef * teacher.temperature**2:g} D'


def _compared(name: str, config: RLConfig) -> str:
  """Return a reward as it is compared with those of the group."""
  center, scale = config.advantage.center, config.advantage.scale
  text = 'R' if center == 'none' else f'R - {_BASELINES[center]}'
  if scale != 'none':
    text = f'({text}) / ({_SCALES[scale]} + {config.advantage.epsilon:g})'
  return text.replace('R', name)


def _critic(config: RLConfig) -> dict[str, str]:
  clip, trace = config.critic.loss.clip, config.critic.trace
  return {'V': 'the critic, minimizing (V - G)^2 / 2' + ('' if clip is None else f', clipped within {clip:g} of its value before the batch'),
          'G': f'the returns, V + A before whitening with trace {config.advantage.trace if trace is None else trace:g}'}


def _pays_turns(config: RLConfig) -> bool:
  return config.process.weight > 0 and config.process.credit == 'turn'


def _kl_coef(config: RLConfig) -> str:
  return f'{config.reward_kl.coef:g}' if config.reward_kl.target is None else 'c'


def _reward(config: RLConfig) -> dict[str, str]:
  reward, process, found = config.reward, config.process, {}
  score = 'score'
  if process.weight:
    found['parts'] = 'scores of parts of the work'
    if not (_pays_turns(config) and config.advantage.estimator == 'group'):
      score = f'({1 - process.weight:g} score{"" if _pays_turns(config) else f" + {process.weight:g} mean(parts)"})'
      found['parts'] += f', which pay at most {process.cap:g} where score = 0'
  terms = [score if reward.verifier_weight == 1 else f'{reward.verifier_weight:g} {score}'] if reward.verifier_weight else []
  terms += [f'{reward.source_weight:g} source'] if reward.source_weight else []
  text = ' + '.join(terms)
  if config.overlong == 'penalty':
    free = config.rollout.max_new_tokens - config.overlong_buffer
    text += f' + clip(({free} - L) / {config.overlong_buffer}, -1, 0), L the tokens of the last reply'
  if config.reward_kl.coef and config.advantage.estimator == 'group':
    text += f' - {_kl_coef(config)} sum_t(log behavior - log reference)'
  return {'R': text, **found, 'score': f'the verifier\'s; {_OVERLONG[config.overlong]}',
          **({'source': _source(config.reward_model)} if reward.source_weight else {}), **_adapted(config.reward_kl)}


def _source(models: RewardModelConfig) -> str:
  text = ', '.join(models.paths) + (', normalized over held-out texts' if models.normalize else '')
  if len(models.paths) > 1:
    how = {'mean_minus_std': f'mean - {models.std_coef:g} std'}.get(models.combine, models.combine)
    text = f'{how} of {text}'
  return text + (f', within +-{models.clip:g}' if models.clip else '') + ('' if models.sees_tools else "; without what tools answered")


def _adapted(kl: RewardKLConfig) -> dict[str, str]:
  return {} if kl.target is None else {'c': f'{kl.coef:g} at first, then adapted with gain {kl.gain:g} to {kl.target:g} nats a sample'}


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


def _samples(config: RLConfig) -> dict[str, str]:
  batch = f'{config.groups} problems x {config.group_size} samples, minibatches: {config.minibatches}, epochs: {config.epochs}'
  if config.max_rounds > 1:
    batch += f', problems whose R are equal replaced in up to {config.max_rounds} rounds'
  if config.has_critic and config.critic.warmup_steps:
    batch += f'; the first {config.critic.warmup_steps} train V alone'
  return {'sums': 'N samples i of a minibatch, T_i tokens t that the policy sampled in it', 'batch': batch}
