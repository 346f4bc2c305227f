"""The checker passes right domains and names what is wrong with each wrong one."""

from dataclasses import replace
import random
import re

import gymnasium
import numpy as np
import pytest

from envs import checker, env_id, registry
from envs.core import Collection, Generated, Reason, Task, ToolError, Verdict
from envs.tool_env import ToolEnv
from tests.envs import toy


def answered(answer, question='q{n}', content='{n}'):
  """Return a source whose task n has these texts."""
  def make(rng, level):
    n = int(rng.integers(10**9, 10**10))
    return Task(question.format(n=n), answer.format(n=n), ({'role': 'assistant', 'content': content.format(n=n)},), str(n))
  return Generated('toy/made', 1, make, 1)


class Judge:
  """A verifier that a function makes."""
  id = 'judge'
  version = 1

  def __init__(self, verify):
    self.verify = verify


def right_or(wrong):
  """Return a verifier that pays the right reply in full and any other what the function says."""
  def verify(problem, reply):
    if toy.TextVerifier().verify(problem, reply).score:
      return Verdict(1.0, Reason.OK)
    return wrong(problem, reply)
  return Judge(verify)


def test_right_domains_pass():
  checker.check(toy.sums())
  checker.check(toy.doubles())
  tasks = [Task(f'q{i}', f'{i}000', ({'role': 'assistant', 'content': f'{i}000'},), str(i)) for i in range(8)]
  # One that is all of one split, as evaluation data are.
  assert checker.check(toy.sums(source=Collection('toy/sums', tasks, heldout_fraction=1.0))) is None


def impure(rng, level):
  return toy.make_sum(np.random.default_rng(next(COUNTER)), level)


def impolite(rng, level):
  random.random()
  return toy.make_sum(rng, level)


class OneSplit(Generated):
  """Ignores the split that is asked for."""

  def task(self, split, level, index):
    return super().task('train', level, index)


class Greedy(toy.Lookup):
  """Its schema uses what is not checked."""

  def __init__(self):
    super().__init__()
    self.schema = {'type': 'object', 'minProperties': 1}


class Shy(toy.Lookup):
  """Answers otherwise than the demonstrations say."""

  def call(self, arguments):
    raise ToolError('not today')


COUNTER = iter(range(10**9))
BROKEN = {
    'pays for nothing': (toy.sums(verifier=right_or(lambda problem, reply: Verdict(float(not reply), Reason.OK))), "reply '' scores 1.000"),
    'pays the question': (toy.sums(verifier=right_or(lambda problem, reply: Verdict(float('=' in reply), Reason.OK))),
                          "'the question' scores"),
    'constant answer': (toy.sums(source=answered('{n}', content='7'), verifier=Judge(
        lambda problem, reply: Verdict(float(reply.strip() == '7'), Reason.OK))), "reply '7' scores 1.000"),
    'never pays': (toy.sums(verifier=Judge(lambda problem, reply: Verdict(0.0, Reason.WRONG))), 'does not score 1'),
    'fails on text': (toy.sums(verifier=right_or(lambda problem, reply: Verdict(None, Reason.VERIFIER_ERROR))),
                      'may not fail on what a policy'),
    'fails on garbage': (toy.sums(verifier=right_or(lambda problem, reply: Verdict(0.0, Reason.WRONG) if reply.isascii() or len(reply) < 2
                                                    else Verdict(None, Reason.VERIFIER_ERROR))), 'may not fail on what a policy'),
    'moody verifier': (toy.sums(verifier=right_or(lambda problem, reply: Verdict(0.0, Reason.WRONG, {'mood': 1 / (1 + next(COUNTER))}))),
                       "Gymnasium's check_env fails"),
    'impure generator': (toy.sums(source=Generated('toy/sums', 1, impure, 1)), 'two different tasks'),
    'global generator': (toy.sums(source=Generated('toy/sums', 1, impolite, 1)), 'global random generator'),
    'shared tasks': (toy.sums(source=OneSplit('toy/sums', 1, toy.make_sum, 1)), 'in both splits'),
    'shown answer': (toy.sums(source=answered('word{n}', question='say word{n}', content='word{n}')), 'shows its answer'),
    'wrong tool result': (toy.doubles(make_tools=lambda: (Shy(),)), 'not today'),
    'unchecked schema': (toy.doubles(make_tools=lambda: (Greedy(),)), 'minProperties'),
    'twin tools': (toy.doubles(make_tools=lambda: (toy.Lookup(), toy.Lookup())), 'of one name'),
    'too few turns': (toy.doubles(max_turns=1), 'does not score 1'),
    'other version': (toy.sums(name='arithmetic/integers', version=99), 'registered as'),
    'one problem': (toy.sums(source=Collection('toy/sums', [toy.make_sum(np.random.default_rng(0), 1)], 0.0)), 'at least 2 are needed'),
}


@pytest.mark.parametrize('domain,message', BROKEN.values(), ids=BROKEN)
def test_broken_domains_are_named(domain, message):
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    checker.check(domain, num_problems=6)
  assert domain.name in str(error.value) or message == 'minProperties'


class Restless(ToolEnv):
  """Shows something else at each reset."""

  def reset(self, **kwargs):
    messages, info = super().reset(**kwargs)
    return ({'role': 'system', 'content': str(next(COUNTER))}, *messages), info


class Endless(ToolEnv):
  """Takes steps after the end."""

  def step(self, action):
    if self._progress is not None:
      self.last = super().step(action)
    return self.last


class Blurred(ToolEnv):
  """Terminates what was cut off."""

  def step(self, action):
    messages, reward, terminated, truncated, info = super().step(action)
    return messages, reward, terminated or truncated, False, info


class Forgiving(ToolEnv):
  """Takes a failure of the verifier for a wrong answer."""

  def _verify(self, reply):
    verdict = super()._verify(reply)
    return verdict if verdict.is_valid else Verdict(0.0, Reason.WRONG)


class Generous(ToolEnv):
  """Pays double."""

  def step(self, action):
    messages, reward, *rest = super().step(action)
    return messages, 2 * reward, *rest


@pytest.mark.parametrize('kind,message', [
    (Restless, 'differs between two environments'), (Endless, 'takes a step after the end of an episode that the demonstration ended'),
    (Blurred, 'a reply cut off ends with terminated=True, truncated=False, length'), (Forgiving, 'a failing verifier becomes a score'),
    (Generous, 'gives the reward 2.0')])
def test_broken_environments_are_named(monkeypatch, kind, message):
  monkeypatch.setattr(checker, 'ToolEnv', kind)
  with pytest.raises(ValueError, match=message):
    checker.check(toy.sums())


def test_random_bits_are_worth_their_declared_chance_and_no_more():
  def make(rng, level):
    n, bit = int(rng.integers(10**9, 10**10)), str(int(rng.integers(2)))
    return Task(f'q{n}', bit, ({'role': 'assistant', 'content': bit},), str(n))
  coin = toy.sums(source=Generated('toy/coin', 1, make, 1), chance=0.5)
  checker.check(coin, num_problems=40)
  with pytest.raises(ValueError, match='more than the declared chance=0.1'):
    checker.check(replace(coin, chance=0.1), num_problems=40)


def test_without_a_sandbox_nothing_is_stepped_but_the_rest_is_checked():
  log = []
  domain = toy.doubles(log, needs_sandbox=True, verifier=Judge(None))
  checker.check(domain, skip_sandbox=True)
  assert set(log) == {'closed'}
  with pytest.raises(ValueError, match='in both splits'):
    checker.check(replace(domain, source=OneSplit('toy/doubles', 1, toy.make_double, 1)), skip_sandbox=True)
  with pytest.raises(ValueError, match='at least 2'):
    checker.check(domain, num_problems=1)


def test_ids_stand_for_every_domain():
  for name in registry.names():
    assert gymnasium.spec(env_id(name)).kwargs == {'domain': name}
  assert env_id('arithmetic/integers') == 'bessemer/arithmetic-integers-v1'
  with pytest.raises(ValueError, match='unknown; use one of arithmetic/integers'):
    env_id('arithmetic')
