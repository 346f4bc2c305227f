"""From a shipped domain of several turns to the gradient: failures with good steps teach those steps, and teach nothing where no one pays."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest

from envs import registry
from envs.tool_calls import format_call
from models import params as params_lib
from models import sharding, transformer
from models.sampling import Sampling
from models.tokenizer import ByteTokenizer
from rl import advantages, batching, estimation, rewards
from rl import learner as learner_lib
from rl import optimizer as optimizer_lib
from rl.policy_update import make_batches
from rl.rl_config import AdvantageConfig, ProcessConfig
from rl.rollout import collection
from rl.rollout.ledger import Ledger
from tests import tiny
from tests.rl.test_train_rl import ROLLOUT, make_config
from tests.rl.test_worker import assignments, make_worker

LENGTH = 160
PLUS = AdvantageConfig('reinforce_pp', center='none', scale='none')


def config_of(credit='episode', weight=0.3, advantage=AdvantageConfig(), **changes):
  return make_config('/model', groups=1, group_size=3, rows=4, length=LENGTH, process=ProcessConfig(weight, credit=credit), advantage=advantage,
                     rollout=dataclasses.replace(ROLLOUT, max_length=LENGTH), **changes)


@functools.cache
def lost_games(tool=False):
  """Return a group of lost games: the first sample moves well in its first turn, the second in its second, the last in none."""
  domain = registry.make_domain('planning/hanoi', options={'style': 'tool' if tool else 'bare'})
  (assignment,) = assignments(domain, 1)
  first = json.loads(registry.make_domain('planning/hanoi').demonstration('train', 1, 0)[1]['content'].split('\n')[1])['arguments']['moves']
  turns, good, bad = {}, *(format_call('move', {'moves': move}) if tool else move for move in (first, 'zz'))

  def say(id, text):
    turn = turns[id] = turns.get(id, -1) + 1
    return good if (id[1], turn) in ((0, 0), (1, 1)) else bad

  worker, *_ = make_worker(domain, say, max_length=1000 if tool else LENGTH)
  (group,) = worker.collect([assignment], 3, Sampling())
  return group


@functools.cache
def learner():
  """Return (learner, its parameters, frozen ones, where batches go)."""
  model = tiny.config(vocab_size=ByteTokenizer().vocab_size, max_length=LENGTH)
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  settings = optimizer_lib.OptimizerConfig(learning_rate=1e-3, schedule='constant')
  built = learner_lib.build(model, sharding.TRAIN, mesh, optimizer_lib.build(settings, 10), optimizer_lib.schedule(settings, 10), full=True,
                            loss=learner_lib.policy_loss(config_of().loss))
  trainable, frozen = params_lib.split(params_lib.init(transformer.declare(model), 0, mesh, sharding.TRAIN), lambda name: True)
  return built, trainable, frozen, batching.Place.of(sharding.TRAIN, mesh)


def estimated(config, group):
  found = rewards.pay(config, [group])
  return estimation.estimate(config, [group], found)


def batch_of(config, group):
  documents = batching.documents(group.trajectories, [one.advantages_T for one in estimated(config, group)])
  (batch,) = make_batches(config, documents)
  return batching.to_global(batch, learner()[-1])


def gradient_norm(config, group):
  built, trainable, frozen, _ = learner()
  gradient, _ = built.gradient(trainable, frozen, batch_of(config, group))
  return float(np.sqrt(sum(np.sum(np.asarray(leaf, np.float64)**2) for leaf in jax.tree.leaves(gradient))))


def turn_logprobs(state_params, group):
  """Return for each sample the mean log-probability of the tokens of each of its turns."""
  built, _, frozen, place = learner()
  documents = batching.documents(group.trajectories, [1.0] * len(group.trajectories))
  scores = batching.at_places(documents, lambda batch: built.score(state_params, frozen, batch).logprobs_BT, place, 4, LENGTH)
  found = []
  for trajectory, at_place_T in zip(group.trajectories, scores, strict=True):
    of_token_T, turns_T = np.roll(at_place_T, 1), advantages.turn_numbers(trajectory.loss_mask_T)
    found.append([of_token_T[turns_T == turn].mean() for turn in range(turns_T.max() + 1)])
  return found


@pytest.mark.parametrize('tool', [False, True])
def test_what_the_turns_of_lost_games_added(tool):
  group = lost_games(tool)
  assert [one.reward for one in group.trajectories] == [0.0] * 3 and [one.num_turns for one in group.trajectories] == [4] * 3
  assert [one.turn_scores for one in group.trajectories] == [(0.5, 0.0, 0.0, 0.0), (0.0, 0.5, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)]
  assert [one.parts for one in group.trajectories] == [{'progress': 0.5}, {'progress': 0.5}, {'progress': 0.0}]
  assert [(one.num_tool_calls, one.num_tool_errors) for one in group.trajectories] == ([(4, 3), (4, 3), (4, 4)] if tool else [(0, 0)] * 3)


class Once:
  """Stands for a worker and for a curriculum that have one group."""

  def draw(self):
    return 10, None

  def collect(self, assignments, group_size, sampling):
    yield lost_games()


@pytest.mark.parametrize('weight, cause', [(0.3, None), (0.0, 'no_signal')])
def test_dynamic_sampling_keeps_lost_games_whose_steps_are_paid(weight, cause):
  collected = collection.collect(config_of('turn', weight, max_rounds=2), Once(), Once(), Ledger())
  assert [why for _, why in collected.dropped] == ([cause] * 2 if cause else [])
  assert len(collected.groups) == (0 if cause else 1)


@pytest.mark.parametrize('credit', ['episode', 'turn'])
@pytest.mark.parametrize('advantage', [AdvantageConfig(), AdvantageConfig(scale='none'), PLUS], ids=['std', 'none', 'reinforce_pp'])
def test_lost_games_teach_where_progress_is_paid_and_only_there(credit, advantage):
  assert gradient_norm(config_of(credit, advantage=advantage), lost_games()) > 1e-3
  assert gradient_norm(config_of(credit, weight=0.0, advantage=advantage), lost_games()) == 0


def test_a_turn_that_made_progress_is_raised_over_one_that_did_not():
  """Of one state, where one sample moved well and the others did not."""
  group = lost_games()
  found = [one.advantages_T for one in estimated(config_of('turn'), group)]
  by_turn = [[advantages_T[advantages.turn_numbers(one.loss_mask_T) == turn] for turn in range(4)]
             for advantages_T, one in zip(found, group.trajectories, strict=True)]
  # Turn by turn (0.5, 0, 0) has the mean 1/6 and the deviation 0.5 / sqrt(3): advantages 2 / sqrt(3) and -1 / sqrt(3).
  for sample, turn in itertools.product(range(3), range(4)):
    wanted = {(0, 0): 2, (1, 0): -1, (2, 0): -1, (0, 1): -1, (1, 1): 2, (2, 1): -1}.get((sample, turn), 0) * 0.3 / np.sqrt(3)
    np.testing.assert_allclose(by_turn[sample][turn], wanted, rtol=1e-4)


def test_an_update_makes_good_turns_likelier_than_bad_ones():
  group, (built, trainable, frozen, _) = lost_games(), learner()
  before = turn_logprobs(trainable, group)
  state, _ = built.update(built.init(jax.tree.map(lambda leaf: leaf + 0, trainable)), frozen, [batch_of(config_of('turn'), group)])
  changes = [np.subtract(new, old) for new, old in zip(turn_logprobs(state.trainable, group), before, strict=True)]
  assert changes[0][0] > changes[1][0] and changes[0][0] > changes[2][0]  # the same prompt in all three
  assert changes[1][1] > changes[2][1]
  assert changes[0][0] > 0 > changes[2][0]
