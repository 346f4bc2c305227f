"""Episodes: tokens in and out, faults of every kind, deadlines, and an account of every sample. The engine says what a test wants."""

from collections import Counter, deque
import dataclasses
import threading
import time

import numpy as np
import pytest

from envs.core import Domain, EnvironmentFailure, Outcome, Reason, Verdict
from envs.tool_env import ToolEnv
from models import chat
from models.sampling import Sampling
from models.tokenizer import ByteTokenizer
from rl.rollout.engine import Completion
from rl.rollout.ledger import Ledger
from rl.rollout.worker import Assignment, RolloutConfig, Worker
from tests import toys

WORDS = ByteTokenizer()
TEMPLATE = chat.TEMPLATES['plain']


class ScriptedEngine:
  """Answers with `say(request id, text so far)`; several requests finish in one step, out of order."""

  def __init__(self, say, num_slots=4):
    self.say, self.num_slots, self.version = say, num_slots, 3
    self.queue, self.running, self.held, self.log = deque(), {}, {}, []

  def stop_at(self, stop_ids):
    assert stop_ids == WORDS.stop_ids

  def submit(self, request):
    assert request.id not in self.held
    self.log.append(('submit', request.id, request.tokens_T.tolist(), request.seed))
    self.queue.append((request, request.tokens_T.tolist(), request.max_new_tokens))

  def extend(self, id, tokens_T, max_new_tokens):
    request, ids = self.held.pop(id)
    self.log.append(('extend', id, list(tokens_T), request.seed))
    self.queue.append((request, [*ids, *tokens_T], max_new_tokens))

  def release(self, id):
    self.log.append(('release', id))
    if id in self.held:
      del self.held[id]
    else:
      assert any(request.id == id for request, *_ in self.queue)
      self.queue = deque(entry for entry in self.queue if entry[0].id != id)

  @property
  def is_busy(self):
    return bool(self.queue)

  def step(self):
    done = []
    while self.queue and len(done) < 3:
      request, ids, room = self.queue.pop()
      reply = [*WORDS.encode(self.say(request.id, WORDS.decode(ids))), WORDS.eos_id]
      new = np.array(reply[:room], np.int32)
      done.append(Completion(request.id, new, np.full(len(new), -0.5, np.float32), np.full(len(new), -0.5, np.float32),
                             np.full(len(new), self.version, np.int32), 'stop' if len(reply) <= room else 'length'))
      if request.holds:
        self.held[request.id] = (request, [*ids, *new.tolist()])
    return done


def quiet_env(domain):
  return ToolEnv(domain, describe_tools=False)


def make_worker(domain, say, make_env=quiet_env, **config):
  config = RolloutConfig(**({'max_new_tokens': 80, 'max_length': 400, 'env_timeout_s': 5.0} | config))
  engine = ScriptedEngine(say)
  ledger = Ledger()
  worker = Worker(engine, WORDS, TEMPLATE, {domain.name: domain}, make_env, config, seed=7, ledger=ledger)
  return worker, engine, ledger


def assignments(domain, count):
  return [Assignment(10 + number, domain.problem('train', 1, number)) for number in range(count)]


def collect(worker, domain, count=3, group_size=4):
  groups = list(worker.collect(assignments(domain, count), group_size, Sampling()))
  return sorted(groups, key=lambda group: group.trajectories[0].group)


def check_account(worker, ledger, groups):
  valid = sum(trajectory.is_valid for group in groups for trajectory in group.trajectories)
  ledger.check(queued=valid, in_flight=worker.num_in_flight)


def test_a_single_turn():
  domain = toys.one_token()
  worker, engine, ledger = make_worker(domain, lambda id, text: 'a' if id[1] % 2 else 'z')
  groups = collect(worker, domain)
  assert [[trajectory.reward for trajectory in group.trajectories] for group in groups] == [[0.0, 1.0, 0.0, 1.0]] * 3
  for group, assignment in zip(groups, assignments(domain, 3), strict=True):
    prompt = [WORDS.bos_id, *WORDS.encode(assignment.problem.messages[0]['content'])]
    for sample, trajectory in enumerate(group.trajectories):
      assert trajectory.tokens_T.tolist() == [*prompt, ord('z' if sample % 2 == 0 else 'a'), WORDS.eos_id]
      assert trajectory.loss_mask_T.tolist() == [False] * len(prompt) + [True, True]
      np.testing.assert_array_equal(trajectory.behavior_logprobs_T[-2:], [-0.5, -0.5])
      assert np.isnan(trajectory.behavior_logprobs_T[:-2]).all()
      assert trajectory.versions_T.tolist() == [-1] * len(prompt) + [3, 3]
      assert (trajectory.outcome, trajectory.terminated, trajectory.num_turns, trajectory.sample) == (Outcome.OK, True, 1, sample)
      assert [message['role'] for message in trajectory.messages] == ['user', 'assistant']
  assert (ledger.issued, ledger.dropped.total()) == (12, 0)
  check_account(worker, ledger, groups)
  # Every sample has a seed of its own, which depends on the run's seed, the problem's ordinal and the sample.
  seeds = {entry[1][:2]: entry[3] for entry in engine.log}
  assert len(set(seeds.values())) == 12
  again, engine_again, _ = make_worker(domain, lambda id, text: 'a')
  collect(again, domain)
  assert {entry[1][:2]: entry[3] for entry in engine_again.log} == seeds


def look_then_say(id, text):
  return 'c' if text.endswith('c\n') else toys.format_call('look', {})


def test_turns_with_a_tool_only_append():
  domain = toys.look_and_say()
  worker, engine, ledger = make_worker(domain, look_then_say)
  groups = collect(worker, domain, 2, 2)
  for group in groups:
    for trajectory in group.trajectories:
      call = [*WORDS.encode(toys.format_call('look', {})), WORDS.eos_id]
      prompt = [WORDS.bos_id, *WORDS.encode(trajectory.messages[0]['content'])]
      assert trajectory.reward == 1
      assert trajectory.tokens_T.tolist() == [*prompt, *call, *b'\nc\n', ord('c'), WORDS.eos_id]
      assert trajectory.loss_mask_T.tolist() == [False] * len(prompt) + [True] * len(call) + [False] * 3 + [True, True]
      assert (trajectory.num_turns, trajectory.num_tool_calls) == (2, 1)
      assert [message['role'] for message in trajectory.messages] == ['user', 'assistant', 'tool', 'assistant']
  assert [entry[0] for entry in engine.log].count('extend') == 4
  assert not engine.held
  check_account(worker, ledger, groups)


def test_long_observations_are_prefilled_with_their_conversation():
  domain = toys.look_and_say()

  class Verbose(toys.Look):
    def call(self, arguments):
      return 'x' * 90 + super().call(arguments)

  domain = dataclasses.replace(domain, make_tools=lambda: (Verbose(iter('ccc')),))
  worker, engine, _ = make_worker(domain, look_then_say)
  (trajectory,), = [group.trajectories for group in collect(worker, domain, 1, 1)]
  assert trajectory.reward == 1
  kinds = [entry[0] for entry in engine.log]
  assert kinds == ['submit', 'release', 'submit', 'release']
  assert engine.log[2][2] == trajectory.tokens_T[:len(engine.log[2][2])].tolist()
  assert engine.log[2][3] == engine.log[0][3]


def test_replies_without_an_end_and_conversations_without_room():
  domain = toys.one_token()
  worker, _, ledger = make_worker(domain, lambda id, text: 'a' * 100, max_new_tokens=3)
  trajectory = collect(worker, domain, 1, 1)[0].trajectories[0]
  assert (trajectory.outcome, trajectory.truncated, trajectory.terminated, trajectory.reward) == (Outcome.LENGTH, True, False, 0.0)
  assert trajectory.loss_mask_T.sum() == 3
  domain = toys.look_and_say()
  length = len(WORDS.encode(toys.format_call('look', {}))) + 9
  worker, engine, ledger = make_worker(domain, look_then_say, max_length=length)
  trajectory = collect(worker, domain, 1, 1)[0].trajectories[0]
  # The tool's result fills the conversation: it is graded as it stands, and nothing is sampled any more.
  assert (trajectory.outcome, trajectory.reward, trajectory.num_turns) == (Outcome.LENGTH, 0.0, 1)
  assert len(trajectory.tokens_T) <= length
  assert not engine.held
  worker, _, ledger = make_worker(domain, look_then_say, max_length=5)
  groups = collect(worker, domain, 1, 2)
  assert [(one.outcome, one.reward) for one in groups[0].trajectories] == [(Outcome.ENV_ERROR, None)] * 2
  assert 'The prompt has' in groups[0].trajectories[0].reason and 'rollout.max_length is 5' in groups[0].trajectories[0].reason
  assert ledger.issued == 2
  check_account(worker, ledger, groups)


class Steps(ToolEnv):
  """Tells after every reply which sub-steps are done: one more at each, as `told` says."""
  told: tuple = ()

  def reset(self, *, seed=None, options=None):
    self.number = 0
    return super().reset(seed=seed, options=options)

  def step(self, action):
    *rest, info = super().step(action)
    parts, self.number = self.told[self.number], self.number + 1
    return *rest, {**info, 'parts': parts}


def stepping(told):
  return lambda domain: type('Steps', (Steps,), {'told': told})(domain, describe_tools=False)


@pytest.mark.parametrize('told, scores, parts', [
    (({'found': 1, 'said': 0}, {'found': 1, 'said': 1}), (0.5, 0.5), {'found': 1, 'said': 1}),
    (({'found': 1, 'said': 0}, {}), (0.5, 0.0), {'found': 1, 'said': 0}),
    (({}, {'said': 0.25}), (0.0, 0.25), {'said': 0.25}),
    (({}, {}), (), {}),
])
def test_every_message_is_scored_by_the_steps_it_added(told, scores, parts):
  worker, *_ = make_worker(toys.look_and_say(), look_then_say, stepping(told))
  trajectory, = collect(worker, toys.look_and_say(), 1, 1)[0].trajectories
  assert (trajectory.turn_scores, trajectory.parts, trajectory.num_turns) == (scores, parts, 2)


def test_a_message_without_room_counts_with_the_one_before():
  domain, told = toys.look_and_say(), ({'found': 1, 'said': 0}, {'found': 1, 'said': 1})
  length = len(WORDS.encode(toys.format_call('look', {}))) + 9
  worker, *_ = make_worker(domain, look_then_say, stepping(told), max_length=length)
  trajectory, = collect(worker, domain, 1, 1)[0].trajectories
  assert (trajectory.num_turns, trajectory.turn_scores) == (1, (1.0,))


@pytest.mark.parametrize('wrong', [{'score': float('nan')}, {'parts': {'steps': float('inf')}}])
def test_scores_that_are_not_finite_are_the_verifiers_failure(wrong):
  class Broken(ToolEnv):
    def step(self, action):
      *rest, info = super().step(action)
      return *rest, {**info, **wrong}

  worker, _, ledger = make_worker(toys.one_token(), lambda id, text: 'a', Broken, max_attempts=2)
  groups = collect(worker, toys.one_token(), 1, 2)
  for trajectory in groups[0].trajectories:
    assert (trajectory.outcome, trajectory.reward) == (Outcome.VERIFIER_ERROR, None) and 'scores must be finite' in trajectory.reason
  assert ledger.dropped == {'verifier_error': 4}
  check_account(worker, ledger, groups)


class Faulty(ToolEnv):
  """Fails as `faults[(problem id, number of its attempt)]` says; attempts count over the samples of a problem."""
  faults: dict = {}
  attempts: Counter = Counter()
  lock = threading.Lock()

  def reset(self, *, seed=None, options=None):
    name = options['problem'].id
    with self.lock:
      number = self.attempts[name]
      self.attempts[name] += 1
    self.fault = self.faults.get((name.rsplit('/', 1)[1], number))
    if self.fault == 'reset':
      raise EnvironmentFailure('the box does not start')
    if self.fault == 'verifier':
      class Broken:
        id, version = 'broken', 1

        def verify(self, problem, reply):
          return Verdict(None, Reason.VERIFIER_ERROR, detail='the worker was killed')

      self.domain = dataclasses.replace(self.domain, verifier=Broken())
    return super().reset(seed=seed, options=options)

  def step(self, action):
    if self.fault == 'hang':
      time.sleep(30)
    if self.fault == 'bug':
      raise KeyError('a bug')
    return super().step(action)


def make_faulty(faults):
  return type('FaultyHere', (Faulty,), {'faults': faults, 'attempts': Counter()})


FAULTS = {('0', 1): 'reset', ('0', 2): 'hang', ('1', 0): 'verifier', ('1', 3): 'bug', ('2', 0): 'reset', ('2', 1): 'verifier'}


def test_failures_are_issued_again_and_change_nothing():
  domain = toys.one_token()
  say = lambda id, text: 'a' if id[1] % 2 else 'z'
  worker, _, ledger = make_worker(domain, say, make_faulty(FAULTS), env_timeout_s=0.5)
  groups = collect(worker, domain)
  plain, *_ = make_worker(domain, say)
  for group, wanted in zip(groups, collect(plain, domain), strict=True):
    for one, other in zip(group.trajectories, wanted.trajectories, strict=True):
      assert (one.reward, one.outcome, one.tokens_T.tolist()) == (other.reward, other.outcome, other.tokens_T.tolist())
  assert ledger.issued == 12 + len(FAULTS)
  assert dict(ledger.dropped) == {'env_error': 4, 'verifier_error': 2}
  check_account(worker, ledger, groups)


def test_failures_that_last_are_masked_and_never_a_reward():
  domain = toys.one_token()
  faults = {('0', number): 'verifier' for number in range(100)} | {('1', 0): 'reset'}
  worker, _, ledger = make_worker(domain, lambda id, text: 'a', make_faulty(faults), max_attempts=2)
  groups = collect(worker, domain, 2)
  assert [[one.reward for one in group.trajectories] for group in groups] == [[None] * 4, [1.0] * 4]
  assert {one.outcome for one in groups[0].trajectories} == {Outcome.VERIFIER_ERROR}
  assert ledger.issued == 8 + 4 + 1
  assert dict(ledger.dropped) == {'verifier_error': 8, 'env_error': 1}
  check_account(worker, ledger, groups)


def test_a_straggler_does_not_hold_up_its_group():
  domain = toys.one_token()
  worker, _, ledger = make_worker(domain, lambda id, text: 'a', make_faulty({('0', 2): 'hang'}), env_timeout_s=20.0, group_timeout_s=1.0)
  start = time.monotonic()
  groups = collect(worker, domain, 2)
  assert time.monotonic() - start < 10
  outcomes = Counter(one.outcome for group in groups for one in group.trajectories)
  assert outcomes == {Outcome.OK: 7, Outcome.CANCELLED: 1}
  assert dict(ledger.dropped) == {'cancelled': 1}
  check_account(worker, ledger, groups)


def test_a_collection_that_is_abandoned_is_accounted_for():
  domain = toys.look_and_say()
  worker, engine, ledger = make_worker(domain, look_then_say)
  iterator = worker.collect(assignments(domain, 5), 3, Sampling())
  first = next(iterator)
  iterator.close()
  assert worker.num_in_flight == 0
  assert not engine.held and not engine.queue
  done = ledger.issued - ledger.dropped['cancelled']
  assert done >= len(first.trajectories)
  # What has been finished and not handed out is the caller's to count; the worker is as good as new.
  again = collect(worker, domain, 2, 2)
  assert [[one.reward for one in group.trajectories] for group in again] == [[1.0, 1.0]] * 2


def test_environments_are_closed():
  open_envs, lock = [], threading.Lock()

  class Counted(ToolEnv):
    def reset(self, **kwargs):
      with lock:
        open_envs.append(self)
      return super().reset(**kwargs)

    def close(self):
      super().close()
      with lock:
        if self in open_envs:
          open_envs.remove(self)

  domain = toys.look_and_say()
  worker, *_ = make_worker(domain, look_then_say, lambda domain: Counted(domain, describe_tools=False))
  collect(worker, domain)
  deadline = time.monotonic() + 5
  while open_envs and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not open_envs


def test_a_template_that_rewrites_the_conversation_is_noticed(monkeypatch):
  domain = toys.look_and_say()
  worker, *_ = make_worker(domain, look_then_say)
  extend = chat.extend
  monkeypatch.setattr(chat, 'extend', lambda ids, *rest: extend([*ids[:-1], 0], *rest))
  with pytest.raises(RuntimeError, match='the conversation so far is not a prefix of its continuation'):
    collect(worker, domain, 1, 1)


def test_bad_settings():
  with pytest.raises(ValueError, match=r'rollout.slots=0 must be at least 1'):
    RolloutConfig(slots=0)
  with pytest.raises(ValueError, match=r'rollout.env_timeout_s=0 must be positive'):
    RolloutConfig(env_timeout_s=0)
  domain = toys.one_token()
  worker, *_ = make_worker(domain, lambda id, text: 'a')
  other = dataclasses.replace(domain, name='toy/other')
  assert isinstance(other, Domain)
  with pytest.raises(ValueError, match=r"Problem toy/other/train/1/0: domain 'toy/other' is not one of toy/one_token"):
    list(worker.collect(assignments(other, 1), 1, Sampling()))


def test_the_ledger_notices_what_is_lost():
  ledger = Ledger(issued=5, trained=2, dropped={'env_error': 1})
  ledger.check(queued=1, in_flight=1)
  assert Ledger(**ledger.to_json()).to_json() == ledger.to_json()
  with pytest.raises(RuntimeError, match='5 samples were issued, but 4 are accounted for: 2 trained, 1 queued, 0 in flight'):
    ledger.check(queued=1, in_flight=0)
