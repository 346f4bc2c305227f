"""`ToolEnv`: how episodes go and end, what counts as a score, what the verifier sees, and that nothing leaks from one to the next."""

import json
import os
import pickle
import random

import gymnasium
from gymnasium.utils.env_checker import check_env
import numpy as np
import pytest

import envs
from envs import spaces
from envs.core import Collection, EnvironmentFailure, Reason, Task, Verdict
from envs.tool_calls import format_call
from envs.tool_env import ToolEnv
from tests.envs import toy

ResetNeeded = gymnasium.error.ResetNeeded


def call(n, name='double'):
  return format_call(name, {'n': n})


def start(domain, **options):
  """Return (environment in an episode, its problem)."""
  env = ToolEnv(domain)
  problem = domain.problem('train', 1, 0)
  env.reset(options={'problem': problem, **options})
  return env, problem


class Recorder:
  """A verifier that keeps the replies it sees."""
  id = 'recorder'
  version = 1

  def __init__(self):
    self.replies = []

  def verify(self, problem, reply):
    self.replies.append(reply)
    return Verdict(0.5, Reason.OK, {'half': 0.5}, reply)


# How an episode ends.


def test_a_right_and_a_wrong_reply():
  env, problem = start(toy.sums())
  messages, reward, terminated, truncated, info = env.step(f'#### {problem.answer}')
  assert (messages, reward, terminated, truncated) == ((), 1.0, True, False)
  assert info == {'problem_id': 'toy/sums/train/1/0', 'level': 1, 'turn': 1, 'outcome': 'ok', 'valid': True, 'score': 1.0, 'reason': 'ok',
                  'parts': {'exact': 1.0}, 'parsed': problem.answer, 'num_tool_calls': 0, 'num_tool_errors': 0}
  assert type(reward) is float and json.loads(json.dumps(info)) == info
  env, _ = start(toy.sums())
  _, reward, terminated, truncated, info = env.step('#### 1')
  assert (reward, terminated, truncated, info['outcome'], info['score'], info['reason']) == (0.0, True, False, 'ok', 0.0, 'wrong')


def test_a_reply_cut_off_runs_no_call_and_is_verified_as_it_stands():
  log = []
  env, problem = start(toy.doubles(log))
  messages, reward, terminated, truncated, info = env.step({'content': f'#### {problem.answer}{call(3)}', 'truncated': True})
  assert (messages, reward, terminated, truncated, info['outcome'], info['score']) == ((), 1.0, False, True, 'length', 1.0)
  assert log == ['closed'] and info['num_tool_calls'] == 0
  env, problem = start(toy.doubles(log))
  _, reward, terminated, truncated, info = env.step({'content': f'#### {problem.answer}'})
  assert (reward, terminated, truncated, info['outcome']) == (1.0, True, False, 'ok')


def test_the_turn_limit_truncates_a_call_and_verifies_an_answer():
  log = []
  env, problem = start(toy.doubles(log, max_turns=2))
  assert env.step(call(3))[2:4] == (False, False)
  messages, reward, terminated, truncated, info = env.step(f'#### {problem.answer} {call(4)}')
  assert (messages, reward, terminated, truncated) == ((), 0.0, False, True)
  assert (info['outcome'], info['score'], info['reason'], info['valid'], info['turn']) == ('turns', 0.0, 'truncated', True, 2)
  assert 4 not in log
  env, problem = start(toy.doubles(log, max_turns=2))
  env.step(call(3))
  _, reward, terminated, truncated, info = env.step(f'#### {problem.answer}')
  assert (reward, terminated, truncated, info['outcome']) == (1.0, True, False, 'ok')
  env, _ = start(toy.doubles(log, max_turns=1))
  assert env.step('<tool_call>{"broken')[-1]['outcome'] == 'turns'


def test_without_tools_a_call_is_no_reply_to_wait_for():
  env, problem = start(toy.sums(max_turns=3))
  _, reward, terminated, truncated, info = env.step(f'#### {problem.answer}{call(3)}')
  assert (reward, terminated, truncated, info['outcome']) == (1.0, True, False, 'ok')


class Failing:
  id = 'failing'
  version = 1

  def __init__(self, result):
    self.result = result

  def verify(self, problem, reply):
    if isinstance(self.result, Exception):
      raise self.result
    return self.result


@pytest.mark.parametrize('result', [Verdict(None, Reason.VERIFIER_ERROR), KeyError('a bug'), EnvironmentFailure('no worker'), None, 1.0])
@pytest.mark.parametrize('is_cut', [False, True])
def test_a_verifier_that_fails_is_never_a_score(result, is_cut):
  env, _ = start(toy.sums(verifier=Failing(result)))
  _, reward, terminated, truncated, info = env.step({'content': '#### 1', 'truncated': is_cut})
  assert (reward, terminated, truncated) == (0.0, not is_cut, is_cut)
  assert (info['outcome'], info['valid'], info['score'], info['reason']) == ('verifier_error', False, None, 'verifier_error')


@pytest.mark.parametrize('n', [-2, -3, -4])
def test_a_tool_that_fails_ends_the_episode_as_invalid(n):
  log = []
  env, _ = start(toy.doubles(log))
  messages, reward, terminated, truncated, info = env.step(call(5) + call(n) + call(6))
  assert [message['content'] for message in messages] == ['10']
  assert (reward, terminated, truncated) == (0.0, False, True)
  assert (info['outcome'], info['valid'], info['score'], info['reason']) == ('env_error', False, None, None)
  assert log == [5, n, 'closed']
  with pytest.raises(ResetNeeded):
    env.step('x')


def test_a_tool_that_cannot_be_made_raises_as_it_is_and_leaves_no_episode():
  def fail():
    raise EnvironmentFailure('no sandbox here')
  env = ToolEnv(toy.doubles(make_tools=fail))
  with pytest.raises(EnvironmentFailure, match='no sandbox here'):
    env.reset(seed=0)
  with pytest.raises(ResetNeeded, match='never begun; call reset'):
    env.step('x')


# Tool calls.


def test_calls_are_answered_in_order():
  env, _ = start(toy.doubles())
  messages, reward, terminated, truncated, info = env.step(f'I look. {call(3)}{call(-1)}{call(4)}')
  results = ('6', 'Error: only natural numbers', '8')
  assert messages == tuple({'role': 'tool', 'content': content, 'name': 'double'} for content in results)
  assert (reward, terminated, truncated) == (0.0, False, False)
  assert (info['outcome'], info['valid'], info['score'], info['num_tool_calls'], info['num_tool_errors']) == (None, True, None, 3, 1)


@pytest.mark.parametrize('text,message', [
    ('<tool_call>{"name": "double", "arguments": {"n": 1,}}</tool_call>', 'Error: malformed_json: '),
    ('<tool_call>{"name": "double"', 'Error: truncated: '), (call(1, 'triple'), "Error: there is no tool 'triple'; the tools are double."),
    (call('1'), 'Error: bad_arguments: n must be of type integer.'),
    (format_call('double', {}), 'Error: bad_arguments: the arguments lack n.'),
    ('<tool_call>{"name": "double", "arguments": [1]}</tool_call>', 'Error: bad_arguments: '), (call(-1), 'Error: only natural numbers')])
def test_a_wrong_call_is_an_observation_and_the_episode_goes_on(text, message):
  log = []
  env, problem = start(toy.doubles(log))
  messages, reward, terminated, truncated, info = env.step(text)
  assert len(messages) == 1 and messages[0]['role'] == 'tool' and messages[0]['content'].startswith(message)
  assert (reward, terminated, truncated, info['num_tool_calls'], info['num_tool_errors']) == (0.0, False, False, 1, 1)
  assert log in ([], [-1])
  assert env.step(problem.answer)[1:3] == (1.0, True)


def test_a_call_in_xml_is_typed_by_the_schema():
  env, _ = start(toy.doubles())
  xml = '<tool_call><function=double><parameter=n>{}</parameter></function></tool_call>'
  assert env.step(xml.format(21))[0][0]['content'] == '42'
  assert env.step(xml.format('many'))[0][0]['content'] == 'Error: bad_arguments: n must be of type integer.'


def test_observations_are_clipped_and_harmless():
  env = ToolEnv(toy.doubles(), max_observation_chars=100)
  env.reset(seed=0)
  messages = env.step(call(-5) + call(-6) + call(1, '<|im_end|>' * 100))[0]
  clipped, harmless, unknown = (message['content'] for message in messages)
  assert len(clipped) == 100 and clipped.startswith('xx') and clipped.endswith('xend')
  assert '\n[... 303 characters, the middle is cut ...]\n' in clipped
  assert harmless == '< tool_call>{}< /tool_call>< |im_end|>\ufffd'
  assert len(unknown) <= 100 and '<|im_end|>' not in unknown
  with pytest.raises(ValueError, match='max_observation_chars=99 must be at least 100'):
    ToolEnv(toy.doubles(), max_observation_chars=99)


def test_tools_are_described_only_where_there_are_some():
  messages, _ = ToolEnv(toy.doubles()).reset(seed=0)
  assert [message['role'] for message in messages] == ['system', 'user'] and '"name": "double"' in messages[0]['content']
  assert [m['role'] for m in ToolEnv(toy.doubles(), describe_tools=False).reset(seed=0)[0]] == ['user']
  assert [m['role'] for m in ToolEnv(toy.sums()).reset(seed=0)[0]] == ['user']


# What the verifier sees.


@pytest.mark.parametrize('reply,seen', [
    ('#### 4\n', '#### 4\n'), ('<think>#### 4</think>no', 'no'), ('<think>#### 4', ''), ('#### 1 </think> #### 2 </think>#### 3', '#### 3'),
    ('', ''), ('\ud800', '\ud800')])
def test_the_verifier_sees_the_final_message_without_reasoning(reply, seen):
  recorder = Recorder()
  env, _ = start(toy.doubles(verifier=recorder))
  env.step('#### 7' + call(1))
  _, reward, _, _, info = env.step(reply)
  assert recorder.replies == [seen] and reward == 0.5 and info['parts'] == {'half': 0.5}


def test_a_cut_reply_is_verified_without_its_calls():
  recorder = Recorder()
  env, _ = start(toy.doubles(verifier=recorder))
  env.step({'content': 'a<tool_call>{"name": "double", "arg', 'truncated': True})
  assert recorder.replies == ['a']


# Resets.


def test_resets_are_byte_identical_and_leave_the_process_alone():
  state = (random.getstate(), np.random.get_state()[1].tolist(), os.getcwd(), dict(os.environ))
  first, second = ToolEnv(toy.doubles()), ToolEnv(toy.doubles())
  drawn = set()
  for seed in range(20):
    messages, info = first.reset(seed=seed)
    assert json.dumps((messages, info)) == json.dumps(second.reset(seed=seed))
    drawn.add(info['problem_id'])
    second.step(call(1))
    third, fourth = first.reset(), second.reset()
    assert third == fourth  # the generator goes on, whatever was stepped
  assert len(drawn) == 20
  assert (random.getstate(), np.random.get_state()[1].tolist(), os.getcwd(), dict(os.environ)) == state


def test_options_choose_the_problem():
  domain = toy.sums()
  env = ToolEnv(domain)
  messages, info = env.reset(options={'split': 'heldout', 'level': 2, 'index': 7})
  assert info['problem_id'] == 'toy/sums/heldout/2/7' and info['level'] == 2 and info['outcome'] is None and info['valid']
  assert env.reset(options={'problem': domain.problem('heldout', 2, 7)}) == (messages, info)
  levels = {env.reset(seed=seed, options={'index': 3})[1]['problem_id'] for seed in range(20)}
  assert levels == {'toy/sums/train/1/3', 'toy/sums/train/2/3'}


def test_evaluation_only_data_are_heldout_by_default():
  tasks = [Task(f'q{i}', str(i), ({'role': 'assistant', 'content': str(i)},), str(i)) for i in range(3)]
  env = ToolEnv(toy.sums(source=Collection('toy/sums', tasks, 1.0)))
  assert env.reset(seed=0)[1]['problem_id'].startswith('toy/sums/heldout/1/')
  with pytest.raises(ValueError, match="no task in split 'train'"):
    env.reset(options={'split': 'train'})


@pytest.mark.parametrize('options,message', [
    ({'levle': 1}, 'allowed are problem alone, or any of split, level, index'), ({'problem': 3}, "not a problem of domain 'toy/sums'"),
    ({'problem': toy.doubles().problem('train', 1, 0)}, "not a problem of domain 'toy/sums'"), ({'level': 3}, 'levels are 1 to 2'),
    ({'split': 'test'}, "split='test' must be train or heldout"), ({'index': -1}, 'indices start at 0'),
    ({'problem': toy.sums().problem('train', 1, 0), 'level': 1}, 'allowed are problem alone')])
def test_bad_options_are_refused(options, message):
  env = ToolEnv(toy.sums())
  with pytest.raises(ValueError, match=message):
    env.reset(options=options)
  with pytest.raises(ResetNeeded):
    env.step('x')


def test_what_was_returned_is_not_shared():
  env, problem = start(toy.doubles())
  messages, info = env.reset(options={'problem': problem})
  messages[1]['content'] = 'x'
  info['parts']['x'] = 1
  assert problem.messages[0]['content'].startswith('Double') and env.step(call(1))[-1]['parts'] == {}


# Life cycle.


def test_tools_live_for_one_episode():
  log = []
  env, problem = start(toy.doubles(log))
  assert log == []
  env.step(problem.answer)
  assert log == ['closed']
  env.reset(seed=0)
  env.reset(seed=0)
  assert log == ['closed'] * 2
  env.close()
  env.close()
  assert log == ['closed'] * 3
  with pytest.raises(ResetNeeded):
    env.step('x')


def test_a_tool_that_does_not_close_keeps_no_other_open():
  class Stuck(toy.Lookup):
    def close(self):
      raise OSError('stuck')
  log = []
  env, problem = start(toy.doubles(make_tools=lambda: (Stuck(name='stuck'), toy.Lookup(log))))
  assert env.step(problem.answer)[1] == 1.0 and log == ['closed']


def test_no_step_after_the_end():
  env, problem = start(toy.sums())
  env.step('#### 1')
  with pytest.raises(ResetNeeded, match='has ended or never begun; call reset'):
    env.step(f'#### {problem.answer}')


@pytest.mark.parametrize('action', [None, 3, b'x', ['x'], {'content': 3}, {'text': 'x'}, {'content': 'x', 'truncated': 1},
                                    {'content': 'x', 'role': 'user'}])
def test_an_action_of_another_kind_is_refused_before_it_counts(action):
  env, problem = start(toy.sums())
  with pytest.raises(TypeError, match='action must be text or'):
    env.step(action)
  assert env.step(problem.answer)[-1]['turn'] == 1


def test_a_path_belongs_to_a_name():
  with pytest.raises(ValueError, match="path='x' is for a domain given by name"):
    ToolEnv(toy.sums(), path='x')
  with pytest.raises(ValueError, match='is unknown; use one of'):
    ToolEnv('arithmetic')


# Gymnasium.


@pytest.mark.parametrize('make', [toy.sums, toy.doubles])
def test_gymnasium_accepts_the_environment(make):
  gymnasium.register('test/toy-v1', entry_point=lambda: ToolEnv(make()))
  try:
    env = gymnasium.make('test/toy-v1')  # with Gymnasium's passive checker and its order-enforcing wrapper
    check_env(env.unwrapped)
    messages, _ = env.reset(seed=3)
    assert messages in env.observation_space and env.step('#### 1')[2] is True
    env.close()
  finally:
    del gymnasium.registry['test/toy-v1']


def test_registered_ids_pickle_and_name_their_domain():
  spec = gymnasium.spec(envs.env_id('word_problems/gsm8k'))
  assert pickle.loads(pickle.dumps(spec)) == spec and spec.entry_point == 'envs.tool_env:ToolEnv'
  assert pickle.loads(pickle.dumps(ToolEnv(toy.sums()).action_space)) == spaces.ReplySpace()


def test_spaces():
  messages, replies = spaces.MessageSpace(seed=1), spaces.ReplySpace(seed=1)
  assert messages.sample() == spaces.MessageSpace(seed=1).sample()
  for space in (messages, replies):
    space.seed(5)
    first = [space.sample() for _ in range(20)]
    space.seed(5)
    assert first == [space.sample() for _ in range(20)] and all(sample in space for sample in first) and len(set(map(str, first))) > 15
    with pytest.raises(ValueError, match='sampled without masks'):
      space.sample(mask=1)
    assert space == type(space)() and space != gymnasium.spaces.Discrete(2)
  assert () in messages and [{'role': 'tool', 'content': '', 'name': 'x'}] in messages and '' in replies and '\ud800' in replies
  for wrong in ('x', None, ({'role': 'bot', 'content': ''},), ({'role': 'user'},), ({'role': 'user', 'content': 3},), ('x',),
                ({'role': 'user', 'content': '', 'x': ''},), ({'role': 'tool', 'content': '', 'name': None},)):
    assert wrong not in messages
  for wrong in (None, b'', {}, {'truncated': True}, {'content': '', 'truncated': None}):
    assert wrong not in replies
