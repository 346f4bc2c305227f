"""Domains with a state: how sessions meet the environment, what they tell after every reply, and that their failures are no scores."""

import re

import gymnasium
import pytest

from envs import checker
from envs.core import Domain, EnvironmentFailure, Generated, Message, Outcome, Reason, Session, Task, ToolError, Verdict
from envs.tool_calls import format_call
from envs.tool_env import ToolEnv
from tests.envs import toy


class Add:
  """A tool that raises the count of its session."""
  name = 'add'
  schema = {'type': 'object', 'description': 'Add.', 'properties': {'n': {'type': 'integer'}}, 'required': ['n'], 'additionalProperties': False}

  def __init__(self, session):
    self.session, self.is_closed = session, False

  def call(self, arguments):
    return self.session.add(arguments['n'])

  def close(self):
    self.is_closed = True


class Count(Session):
  """Count to the answer, with the tool or by bare numbers; beyond it the game is lost, and -3 is refused."""

  def __init__(self, problem, has_tool=True):
    self.wanted, self.count = problem.answer['wanted'], 0
    self.tools = (Add(self),) if has_tool else ()

  def add(self, n):
    if n == -3:
      raise ToolError('3 is refused')
    self.count += n
    return str(self.count)

  @property
  def is_over(self):
    return self.count >= self.wanted

  def act(self, reply):
    return None if self.tools or not reply.lstrip('-').isdigit() else self.add(int(reply))

  def parts(self):
    return {'share': min(max(self.count, 0) / self.wanted, 1)}

  def verify(self, reply):
    return Verdict(float(self.count == self.wanted), Reason.OK if self.count == self.wanted else Reason.WRONG, parsed=reply)


def make_task(rng, level):
  wanted, number = int(rng.integers(4, 9)), int(rng.integers(10**6))
  demonstration = [Message(role='assistant', content=format_call('add', {'n': 3})), Message(role='tool', name='add', content='3'),
                   Message(role='assistant', content=format_call('add', {'n': wanted - 3}))]
  return Task(f'{number}: {wanted}?', {'wanted': wanted}, tuple(demonstration), str(number))


def make_plain_task(rng, level):
  task = make_task(rng, level)
  wanted = task.answer['wanted']
  messages = (Message(role='assistant', content='3'), Message(role='user', content='3'), Message(role='assistant', content=str(wanted - 3)))
  return Task(task.question, task.answer, messages, task.canonical)


def counts(make_session=Count, max_turns=3, make=make_task):
  # A constant reply of one call counts right in one problem of five.
  return Domain('toy/counts', 1, Generated('toy/counts', 1, make, 1, 0.5), make_session=make_session, max_turns=max_turns, chance=0.2)


def start(domain):
  """Return (environment in an episode, what is wanted)."""
  env = ToolEnv(domain)
  problem = domain.problem('train', 1, 0)
  env.reset(options={'problem': problem})
  return env, problem.answer['wanted']


def add(n):
  return format_call('add', {'n': n})


def test_the_contract_holds_with_and_without_a_tool():
  checker.check(counts())
  assert checker.check(counts(lambda problem: Count(problem, False), make=make_plain_task)) is None


def test_parts_are_told_after_every_reply_and_the_session_ends_the_episode():
  env, wanted = start(counts())
  messages, reward, terminated, truncated, info = env.step(add(1))
  assert messages == ({'role': 'tool', 'name': 'add', 'content': '1'},)
  assert (reward, terminated, truncated, info['outcome'], info['score'], info['reason']) == (0.0, False, False, None, None, None)
  assert info['parts'] == {'share': pytest.approx(1 / wanted)}
  messages, reward, terminated, truncated, info = env.step(add(wanted - 1))
  assert (messages, reward, terminated, truncated) == ((), 1.0, True, False)
  assert (info['outcome'], info['score'], info['parts'], info['num_tool_calls']) == ('ok', 1.0, {'share': 1.0}, 2)
  with pytest.raises(gymnasium.error.ResetNeeded):
    env.step(add(1))
  # Lost: over, and not at the goal.
  env, wanted = start(counts())
  _, reward, terminated, _, info = env.step(f'so be it {add(wanted + 1)}')
  assert (reward, terminated, info['outcome'], info['reason'], info['parts'], info['parsed']) == (
      0.0, True, 'ok', 'wrong', {'share': 1.0}, 'so be it ')


def test_a_reply_without_a_call_is_the_last_and_the_state_is_verified():
  env, _ = start(counts())
  env.step(add(2))
  _, reward, terminated, _, info = env.step('I have counted it all.')
  assert (reward, terminated, info['outcome'], info['score'], info['parsed']) == (0.0, True, 'ok', 0.0, 'I have counted it all.')
  assert info['parts']['share'] > 0


def test_the_last_turn_is_taken_and_then_the_state_counts():
  env, wanted = start(counts(max_turns=2))
  env.step(add(1))
  assert env.step(add(wanted - 1))[1:4] == (1.0, True, False)
  env, wanted = start(counts(max_turns=2))
  env.step(add(1))
  messages, reward, terminated, truncated, info = env.step(add(1))
  assert (messages, reward, terminated, truncated, info['outcome'], info['score']) == ((), 0.0, False, True, 'turns', 0.0)
  assert info['parts'] == {'share': pytest.approx(2 / wanted)}


def test_a_reply_cut_off_makes_no_move():
  env, wanted = start(counts())
  env.step(add(2))
  _, reward, _, truncated, info = env.step({'content': add(wanted - 2), 'truncated': True})
  assert (reward, truncated, info['outcome'], info['parts']) == (0.0, True, 'length', {'share': pytest.approx(2 / wanted)})


def test_bare_replies_are_moves():
  env, wanted = start(counts(lambda problem: Count(problem, False)))
  assert env.step('2')[0] == ({'role': 'user', 'content': '2'},)
  messages, _, terminated, _, info = env.step('<think>so 9</think>-3')
  assert (messages, terminated, info['num_tool_calls']) == (({'role': 'user', 'content': 'Error: 3 is refused'},), False, 0)
  assert env.step(str(wanted - 2))[1:3] == (1.0, True)
  env, _ = start(counts(lambda problem: Count(problem, False)))
  assert env.step('enough')[1:4] == (0.0, True, False)


class Odd(Count):
  """Fails as it is told to."""

  def __init__(self, problem, what, result):
    super().__init__(problem, has_tool=what != 'act')
    self.what, self.result = what, result

  def fail(self, name, right):
    if name != self.what:
      return right()
    if isinstance(self.result, Exception):
      raise self.result
    return self.result

  @property
  def is_over(self):
    return self.fail('is_over', lambda: Count.is_over.fget(self))

  def act(self, reply):
    return self.fail('act', lambda: super(Odd, self).act(reply))

  def parts(self):
    return self.fail('parts', super().parts)

  def verify(self, reply):
    return self.fail('verify', lambda: super(Odd, self).verify(reply))


@pytest.mark.parametrize('what, result, outcome', [
    ('parts', KeyError('a bug'), 'verifier_error'), ('parts', {'share': 1.5}, 'verifier_error'), ('parts', {'share': -0.1}, 'verifier_error'),
    ('parts', {'share': float('nan')}, 'verifier_error'), ('parts', None, 'verifier_error'), ('is_over', KeyError('a bug'), 'verifier_error'),
    ('act', EnvironmentFailure('no box'), 'env_error'), ('act', KeyError('a bug'), 'env_error'), ('act', 7, 'env_error')])
def test_a_session_that_fails_is_never_a_score(what, result, outcome):
  env, _ = start(counts(lambda problem: Odd(problem, what, result)))
  tools = [*env._tools.values()]
  _, reward, _, _, info = env.step('1' if what == 'act' else add(1))
  assert (reward, info['outcome'], info['valid'], info['score'], info['parts']) == (0.0, outcome, False, None, {})
  assert all(tool.is_closed for tool in tools)


@pytest.mark.parametrize('result', [KeyError('a bug'), None, 1.0, Verdict(None, Reason.VERIFIER_ERROR)])
def test_a_verdict_that_fails_is_never_a_score(result):
  env, wanted = start(counts(lambda problem: Odd(problem, 'verify', result)))
  _, reward, _, _, info = env.step(add(wanted))
  assert (reward, info['outcome'], info['valid'], info['score']) == (0.0, 'verifier_error', False, None)


class Forgetful(Count):
  """Tells of its part only until the goal."""

  def parts(self):
    return {} if self.is_over else super().parts()


class Given(Count):
  """Says that something is done before anything is."""

  def parts(self):
    return {'share': max(super().parts()['share'], 0.1)}


class Silent(Session):
  def __init__(self, problem):
    pass


def test_the_checker_names_sessions_that_are_wrong():
  with pytest.raises(ValueError, match='tells of other parts after some replies than after others'):
    checker.check(counts(Forgetful), num_problems=4)
  with pytest.raises(ValueError, match=r"with the parts \{'share': 0.1\}; they must begin at 0"):
    checker.check(counts(Given), num_problems=4)
  with pytest.raises(ValueError, match='does not score 1'):
    checker.check(counts(Silent), num_problems=4)


def test_sessions_keep_nothing_of_each_other():
  domain = counts()
  env, wanted = start(domain)
  env.step(add(wanted - 1))
  env.reset(options={'problem': domain.problem('train', 1, 0)})
  assert env.step(add(1))[-1]['parts'] == {'share': pytest.approx(1 / wanted)}


def test_a_domain_has_a_verifier_or_sessions():
  source = Generated('toy/x', 1, make_task, 1)
  with pytest.raises(ValueError, match=re.escape('toy/x: verifier=None and make_session=None; give one of them')):
    Domain('toy/x', 1, source)
  with pytest.raises(ValueError, match='give one of them'):
    Domain('toy/x', 1, source, toy.TextVerifier(), make_session=Count)
  with pytest.raises(ValueError, match='is not asked where there is make_session'):
    Domain('toy/x', 1, source, make_tools=lambda: (), make_session=Count)
  with pytest.raises(ValueError, match=re.escape("parts['exact']=1.5 must be a number from 0 to 1")):
    Verdict(1.0, Reason.OK, {'exact': 1.5})


def test_as_it_stands_a_session_ends_with_its_first_reply():
  class Judged(Session):
    def __init__(self, problem):
      pass

    def verify(self, reply):
      return Verdict(float(reply == 'yes'), Reason.OK)

  env, _ = start(counts(Judged))
  assert env.step('yes')[1:3] == (1.0, True)
  env, _ = start(counts(Silent))
  assert env.step('yes')[-1]['outcome'] == Outcome.VERIFIER_ERROR
  with pytest.raises(NotImplementedError, match=r'Silent verifies nothing; define verify\(reply\)'):
    Silent(None).verify('yes')
