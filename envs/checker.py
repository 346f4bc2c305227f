"""An executable contract of environments: `check` plays a domain and says what is wrong with it.

Run it on a new domain before anything is trained on it: a verifier that pays for nothing, or does not pay for the right answer, is the most
expensive fault there is. It asks more than Gymnasium's `check_env`, which it runs too.

Deliberately absent: attacks on answers of a certain kind (numbers, programs), which are tests of the verifiers that read them, and any
claim about hangs: a verifier bounds its own time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
import json
import math
import os
import random
from typing import Any
import warnings

import gymnasium
from gymnasium.utils.env_checker import check_env
import numpy as np

from envs import env_id, registry, tool_calls
from envs.core import Domain, Message, Outcome, Problem, Reason, Session, Verdict
from envs.tool_env import Observation, ToolEnv

_SPLITS = ('train', 'heldout')
_IDLE_REPLIES = ('', ' \n\t', '\u200b', 'Done.', 'I do not know.')
_CONSTANT_REPLIES = ('0', '1', 'yes', 'True', '#### 0', '#### 1', '\\boxed{0}', '<answer></answer>')
_NUM_COMMON_REPLIES = 4  # final replies of demonstrations that are tried on the other problems
_NUM_GARBAGE = 200
_GARBAGE = ('<tool_call>', '</tool_call>', '{"name": ', '{}', '[[', '"', '<function=x>', '<think>', '</think>', '#### ', '\\boxed{', '}',
            '```', '```python\n', '<|im_end|>', '<tool_response>', '9' * 50, '-', '1/0', 'nan', '\\frac{', '\x00', '\ud800', '\u202e',
            '٣', '１', '\n')
_LUCK = 1e-4  # a constant reply is blamed when luck explains its score with less than this probability
_MIN_LEAK_CHARS = 8  # shorter answers may be words of their question, as in a choice


@dataclass(frozen=True)
class _Case:
  place: tuple[str, int, int]
  problem: Problem
  demonstration: tuple[Message, ...]


@dataclass(frozen=True)
class _Ending:
  messages: Observation
  reward: float
  terminated: bool
  truncated: bool
  info: dict[str, Any]


def check(domain: Domain, *, num_problems: int = 20, skip_sandbox: bool = False) -> None:
  """Check that a domain and its environment keep the contract.

  Args:
    domain: to be checked.
    num_problems: played at least, spread over both splits and all levels.
    skip_sandbox: leave out all that takes a step, if the domain needs a sandbox.

  Raises:
    ValueError: the contract is broken; the message says how, and on which problem.
    EnvironmentFailure: the domain's tools cannot be made, for lack of a sandbox for instance.
  """
  if num_problems < 2:
    raise ValueError(f'num_problems={num_problems} must be at least 2: a constant reply is tried on other problems than its own.')
  if domain.name in registry.names() and not env_id(domain.name).endswith(f'-v{domain.version}'):
    _fail(domain, f'is of version {domain.version}, but registered as {env_id(domain.name)!r}; raise its version in envs/__init__.py too')
  cases = _cases(domain, num_problems)
  before = _process_state()
  env = ToolEnv(domain)
  try:
    has_tools = _check_session(domain, cases[0].problem)
    _check_splits(domain, num_problems)
    _check_resets(env, cases)
    _check_leaks(env, cases)
    if not (domain.needs_sandbox and skip_sandbox):
      _check_gymnasium(domain)
      _check_demonstrations(env, cases)
      _check_endings(env, cases[0], has_tools)
      _check_failures(domain, cases[0])
      _check_chance(env, cases)
      _check_garbage(env, cases)
  finally:
    env.close()
  if _process_state() != before:
    _fail(domain, 'changed a global random generator, the working directory or the environment variables; use what is passed instead')


def _fail(domain: Domain, what: str) -> None:
  raise ValueError(f'{domain.name}: {what}.')


def _places(domain: Domain, per_level: int) -> Iterator[tuple[str, int, int]]:
  """Yield (split, level, index) of the first problems of every level, split by split."""
  for split in _SPLITS:
    for level in range(1, domain.source.num_levels + 1):
      size = domain.source.size(split, level)
      yield from ((split, level, index) for index in range(per_level if size is None else min(size, per_level)))


def _cases(domain: Domain, num_problems: int) -> list[_Case]:
  per_level = math.ceil(num_problems / (len(_SPLITS) * domain.source.num_levels))
  places = list(_places(domain, per_level))
  if len({split for split, _, _ in places}) == 1:  # a collection that is all of one split
    places = list(_places(domain, num_problems))
  if len(places) < 2:
    _fail(domain, f'has {len(places)} problems, at least 2 are needed')
  return [_Case(place, domain.problem(*place), domain.demonstration(*place)) for place in places]


def _process_state() -> tuple[Any, ...]:
  return os.getcwd(), dict(os.environ), random.getstate(), json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)


def _check_session(domain: Domain, problem: Problem) -> bool:
  """Check an episode at its start; return whether there are tools."""
  session = domain.start(problem)
  tools = session.tools
  try:
    if any(session.parts().values()):
      _fail(domain, f'begins {problem.id} with the parts {session.parts()}; they must begin at 0, or the first reply is paid for them')
    if len({tool.name for tool in tools}) != len(tools):
      _fail(domain, f'has tools of one name among {[tool.name for tool in tools]}')
    for tool in tools:
      tool_calls.validate({}, tool.schema)
  finally:
    for tool in tools:
      tool.close()
      tool.close()  # twice, as the protocol allows
  return bool(tools)


def _check_splits(domain: Domain, num_problems: int) -> None:
  tasks = {split: set() for split in _SPLITS}
  for split, level, index in _places(domain, num_problems):
    task = domain.source.task(split, level, index)
    if task != domain.source.task(split, level, index):
      _fail(domain, f'makes two different tasks at {split}/{level}/{index}; generators may use nothing but their arguments')
    tasks[split].add(task.canonical)
  if shared := tasks['train'] & tasks['heldout']:
    _fail(domain, f'has tasks in both splits, such as {min(shared)!r:.200}')


def _check_resets(env: ToolEnv, cases: Sequence[_Case]) -> None:
  fresh = ToolEnv(env.domain)
  try:
    for seed, case in enumerate(cases):
      first, second = _dump(env.reset(seed=seed)), _dump(fresh.reset(seed=seed))
      if first != second:
        _fail(env.domain, f'reset(seed={seed}) differs between two environments: {first:.200} and {second:.200}')
      split, level, index = case.place
      first = _dump(env.reset(seed=seed, options={'split': split, 'level': level, 'index': index}))
      second = _dump(fresh.reset(options={'problem': case.problem}))
      if first != second:
        _fail(env.domain, f'{case.problem.id} differs between two resets: {first:.200} and {second:.200}')
  finally:
    fresh.close()


def _dump(value: Any) -> str:
  return json.dumps(value, sort_keys=True)


def _check_leaks(env: ToolEnv, cases: Sequence[_Case]) -> None:
  for case in cases:
    answer = case.problem.answer
    text = answer if isinstance(answer, str) else json.dumps(answer)
    messages, info = env.reset(options={'problem': case.problem})
    if not _is_number(text) and len(text) >= _MIN_LEAK_CHARS:
      for place, shown in (('prompt', [message['content'] for message in messages]), ('info', [json.dumps(info)])):
        if any(text in content for content in shown):
          _fail(env.domain, f'{case.problem.id} shows its answer {text!r:.200} in the {place}')


def _is_number(text: str) -> bool:
  try:
    Fraction(text.strip())
  except (ValueError, ZeroDivisionError):
    return False
  return True


def _check_gymnasium(domain: Domain) -> None:
  env = ToolEnv(domain)
  # A specification of its own, since a domain may need a path or not be registered.
  env.spec = gymnasium.envs.registration.EnvSpec('bessemer/checked', entry_point=lambda: ToolEnv(domain))
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      check_env(env)
  except (AssertionError, gymnasium.error.Error, Warning) as error:
    raise ValueError(f"{domain.name}: Gymnasium's check_env fails: {error}") from error
  finally:
    env.close()


def _step(env: ToolEnv, action: str | dict[str, Any]) -> _Ending:
  ending = _Ending(*env.step(action))
  if not 0 <= ending.reward <= 1:
    _fail(env.domain, f'{ending.info["problem_id"]} gives the reward {ending.reward} for {action!r:.100}; it must be from 0 to 1')
  if ending.info['outcome'] is None and (ending.terminated or ending.truncated or ending.reward):
    _fail(env.domain, f'{ending.info["problem_id"]} ends or pays without an outcome after {action!r:.100}')
  return ending


def _check_demonstrations(env: ToolEnv, cases: Sequence[_Case]) -> None:
  for case in cases:
    messages = list(case.demonstration)
    if messages[:1] != list(case.problem.messages):
      _fail(env.domain, f'the demonstration of {case.problem.id} does not begin with its question')
    messages = messages[1:]
    env.reset(options={'problem': case.problem})
    ending, told = None, []
    while messages and (ending is None or ending.info['outcome'] is None):
      reply = messages.pop(0)
      if reply['role'] != 'assistant':
        _fail(env.domain, f'the demonstration of {case.problem.id} has a message of {reply["role"]!r} where the assistant speaks')
      ending = _step(env, reply['content'])
      told.append(sorted(ending.info['parts']))
      stated, messages = messages[:len(ending.messages)], messages[len(ending.messages):]
      if [(m['role'], m['content']) for m in stated] != [(m['role'], m['content']) for m in ending.messages]:
        _fail(env.domain, f'the demonstration of {case.problem.id} states {stated!r:.200}, the environment says {ending.messages!r:.200}')
    if messages or ending is None or not ending.terminated or ending.info['score'] != 1 or ending.reward != 1:
      got = 'it has no reply' if ending is None else f'{len(messages)} messages are left over, {ending.info}'
      _fail(env.domain, f'the demonstration of {case.problem.id} does not score 1: {got}')
    if env.domain.make_session is not None and any(names != told[0] for names in told):
      _fail(env.domain, f'{case.problem.id} tells of other parts after some replies than after others: {told}; what a reply adds is the '
            'difference of their means, so they must be the same throughout')


def _check_endings(env: ToolEnv, case: _Case, has_tools: bool) -> None:
  final = case.demonstration[-1]['content']
  endings = [('the demonstration', _replies(case), True, Outcome.OK),
             ('a reply cut off', [{'content': final, 'truncated': True}], False, Outcome.LENGTH)]
  if has_tools:
    calls = [tool_calls.format_call('no_such_tool', {})] * env.domain.max_turns
    endings.append(('only calls', calls, False, Outcome.TURNS))
  for what, actions, is_terminated, outcome in endings:
    env.reset(options={'problem': case.problem})
    ending = [_step(env, action) for action in actions][-1]
    if (ending.terminated, ending.truncated, ending.info['outcome']) != (is_terminated, not is_terminated, outcome.value):
      _fail(env.domain, f'{what} ends with terminated={ending.terminated}, truncated={ending.truncated}, {ending.info["outcome"]}; '
            f'expected {is_terminated}, {not is_terminated}, {outcome.value}')
    try:
      env.step(final)
    except gymnasium.error.ResetNeeded:
      continue
    _fail(env.domain, f'takes a step after the end of an episode that {what} ended')


class _FailingVerifier:
  id = 'failing'
  version = 1

  def verify(self, problem: Problem, reply: str) -> Verdict:
    return Verdict(None, Reason.VERIFIER_ERROR)


def _check_failures(domain: Domain, case: _Case) -> None:
  env = ToolEnv(_with_failing_verdicts(domain))
  env.reset(options={'problem': case.problem})
  ending = [_step(env, reply) for reply in _replies(case)][-1]
  if ending.info['valid'] or ending.info['score'] is not None or ending.info['outcome'] != Outcome.VERIFIER_ERROR or ending.reward:
    _fail(domain, f'a failing verifier becomes a score: {ending.info}')


def _with_failing_verdicts(domain: Domain) -> Domain:
  if domain.make_session is None:
    return replace(domain, verifier=_FailingVerifier())

  def make_session(problem: Problem) -> Session:
    session = domain.make_session(problem)
    session.verify = lambda reply: Verdict(None, Reason.VERIFIER_ERROR)
    return session

  return replace(domain, make_session=make_session)


def _replies(case: _Case) -> list[str]:
  return [message['content'] for message in case.demonstration if message['role'] == 'assistant']


def _score(env: ToolEnv, problem: Problem, reply: str) -> float:
  env.reset(options={'problem': problem})
  ending = _step(env, reply)
  if not ending.info['valid']:
    _fail(env.domain, f'{problem.id}: {ending.info["outcome"]} on the reply {reply!r:.200}; a verifier may not fail on what a policy '
          'writes')
  return ending.reward


def _check_chance(env: ToolEnv, cases: Sequence[_Case]) -> None:
  """Check that no reply without work is paid more than the domain's chance, up to the luck of the sample."""
  candidates = {reply: [_score(env, case.problem, reply) for case in cases] for reply in _IDLE_REPLIES + _CONSTANT_REPLIES}
  candidates['the question'] = [_score(env, case.problem, case.problem.messages[-1]['content']) for case in cases]
  for reply, _ in Counter(case.demonstration[-1]['content'] for case in cases).most_common(_NUM_COMMON_REPLIES):
    own = next(case for case in cases if case.demonstration[-1]['content'] == reply)
    candidates[reply] = [_score(env, case.problem, reply) for case in cases if case is not own]
  for reply, scores in candidates.items():
    mean = sum(scores) / len(scores)
    if not _is_luck(mean, len(scores), env.domain.chance):
      _fail(env.domain, f'the reply {reply!r:.200} scores {mean:.3f} over {len(scores)} problems, more than the declared '
            f'chance={env.domain.chance}')


def _is_luck(mean: float, count: int, chance: float) -> bool:
  """Say whether a mean of scores in [0, 1] is likely enough if their expectation is `chance`, by Chernoff's bound with relative entropy."""
  if mean <= chance:
    return True
  if chance == 0:
    return False
  divergence = mean * math.log(mean / chance) + ((1 - mean) * math.log((1 - mean) / (1 - chance)) if mean < 1 else 0.0)
  return math.exp(-count * divergence) >= _LUCK


def _check_garbage(env: ToolEnv, cases: Sequence[_Case]) -> None:
  """Step with text that nobody meant; only the environment's own errors would get out of here."""
  rng = np.random.default_rng(0)
  for i in range(_NUM_GARBAGE):
    choices = rng.integers(2 * len(_GARBAGE), size=rng.integers(20))
    pieces = [_GARBAGE[k] if k < len(_GARBAGE) else chr(rng.integers(0x110000)) for k in choices]
    _score(env, cases[i % len(cases)].problem, ''.join(pieces))
