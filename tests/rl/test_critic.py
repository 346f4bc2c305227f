"""A critic: what it expects stands at the right tokens, masked places hold anything, and it learns beside a policy."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from models.scalar_head import SCALAR_HEAD
from rl import batching, critic, losses_reward
from rl import metrics as metrics_lib
from rl.losses_reward import ValueLossConfig
from rl.optimizer import OptimizerConfig
from tests.rl.test_learner import CONFIG, LENGTH, fresh, setting
from tests.rl.test_policy_gradient import conversations, place

SETTINGS = critic.CriticConfig(OptimizerConfig(learning_rate=3e-3, schedule='constant'), ValueLossConfig(clip=0.2))


@functools.cache
def made(name, rank=0):
  """Return (critic, its state, the policy's frozen parameters) on a mesh; its head is not 0, so that all of it has a gradient."""
  mesh, layout, _, trainable, frozen = setting(name, rank)
  found = critic.build(SETTINGS, CONFIG, layout, mesh, frozen, full=rank == 0, num_updates=10)
  state = found.init(trainable)
  head = state.trainable[SCALAR_HEAD]
  numbers = np.random.default_rng(0).normal(0, 0.3, head['weight'].shape).astype(np.float32)
  head = {**head, 'weight': jax.device_put(numbers, head['weight'].sharding)}
  return found, dataclasses.replace(state, trainable={**state.trainable, SCALAR_HEAD: head}), frozen


@functools.cache
def documents():
  """Conversations whose old values lie near the critic's and whose returns lie far enough for the clip to matter somewhere."""
  rng = np.random.default_rng(1)
  found, state, _ = made('one')
  docs = conversations()
  expected = found.expect(state.trainable, docs, place('one'), 8, LENGTH)
  return [dataclasses.replace(document, per_token={
      'values': (one.values_T + rng.normal(0, 0.3, one.values_T.shape)).astype(np.float32),
      'returns': (one.values_T + rng.normal(0, 2, one.values_T.shape)).astype(np.float32)}) for document, one in zip(docs, expected)]


def test_a_fresh_critic_is_the_policy_with_a_head_of_zeros_and_has_its_own_memory():
  mesh, layout, _, trainable, frozen = setting('one')
  found = critic.build(SETTINGS, CONFIG, layout, mesh, frozen, full=True, num_updates=10)
  state = found.init(trainable)
  own = dict(state.trainable)
  head = own.pop(SCALAR_HEAD)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(head))
  jax.tree.map(np.testing.assert_array_equal, own, trainable)
  assert not {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(own)} & {
      leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trainable)}
  assert all(not one.values_T.any() and one.after == 0 for one in found.expect(state.trainable, conversations(), place('one'), 8, LENGTH))


def test_adapters_of_a_critic_lie_on_the_policys_own_base():
  found, state, frozen = made('one', 4)
  base = {id(leaf) for leaf in jax.tree.leaves(frozen)}
  assert {id(leaf) for leaf in jax.tree.leaves(found.frozen)} == base
  assert len(jax.tree.leaves(state.trainable)) > 2


@pytest.mark.parametrize('name', ['one', 'fsdp2_seq2_ulysses2'])
def test_values_stand_before_their_tokens_however_documents_are_packed(name):
  found, state, _ = made(name)
  docs = conversations(12)
  expected = found.expect(state.trainable, docs, place(name), 8, LENGTH)
  alone, one_state, _ = made('one')
  for document, one in zip(docs, expected, strict=True):
    batch = batching.to_global(batching.pack_rows([[document]], LENGTH, denominator=1, aggregation='token_sum'), place('one'))
    scores_T = np.asarray(alone.score(one_state.trainable, alone.frozen, batch))[0]
    size = len(document.tokens_T)
    np.testing.assert_allclose(one.values_T[1:], scores_T[:size - 1], rtol=1e-5, atol=1e-5)
    assert one.after == pytest.approx(scores_T[size - 1], rel=1e-4, abs=1e-5) and one.values_T[0] == 0
  assert np.ptp(np.concatenate([one.values_T for one in expected])) > 0.1


def test_masked_places_hold_anything():
  found, state, _ = made('one')
  batch, = batching.pack_step(documents(), 8, LENGTH, aggregation='token_mean')
  is_masked_BT = batch.loss_weight_BT == 0
  wild = batch.replace(values_BT=np.where(is_masked_BT, 1e9, batch.values_BT), returns_BT=np.where(is_masked_BT, np.nan, batch.returns_BT))
  results = [found.learner.gradient(state.trainable, found.frozen, batching.to_global(one, place('one'))) for one in (batch, wild)]
  jax.tree.map(np.testing.assert_array_equal, *[jax.tree.map(np.asarray, one[0]) for one in results])
  assert metrics_lib.compute(results[0][1]) == metrics_lib.compute(results[1][1])
  loss_BT, _ = losses_reward.value_loss_BT(np.full(wild.tokens_BT.shape, 1e9, np.float32), wild, SETTINGS.loss)
  assert not np.asarray(loss_BT)[is_masked_BT].any()


def test_a_critic_learns_its_returns():
  found, state, _ = made('one')
  state = dataclasses.replace(state, trainable=fresh(state.trainable), opt_state=fresh(state.opt_state), step=fresh(state.step))
  batch, = batching.pack_step(documents(), 8, LENGTH, aggregation='token_mean')
  batch = batching.to_global(batch, place('one'))
  errors = []
  for _ in range(25):
    state, metrics = found.learner.update(state, found.frozen, [batch])
    errors.append(metrics_lib.compute(metrics)['value/squared_error'])
  assert errors[-1] < 0.7 * errors[0]


@pytest.mark.parametrize('changes, message', [
    ({'warmup_steps': -1}, 'critic.warmup_steps=-1 must not be negative'),
    ({'trace': 1.5}, 'critic.trace=1.5 must be between 0 and 1'),
])
def test_bad_settings(changes, message):
  with pytest.raises(ValueError, match=message):
    critic.CriticConfig(**changes)
