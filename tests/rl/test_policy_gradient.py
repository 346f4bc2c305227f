"""Policy losses through the learner: long trajectories, scores, on-policy first updates, objectives that move."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from models import params as params_lib
from rl import batching
from rl import metrics as metrics_lib
from rl.losses import PolicyLossConfig
from rl.types import Document
from tests.rl.test_learner import LENGTH, check_equal, fresh, setting

TOKEN = PolicyLossConfig(clip_low=0.2, clip_high=0.3, kl_coef=0.05)
ON_POLICY = PolicyLossConfig(importance_cap=None)


def place(name):
  mesh, layout = setting(name)[:2]
  return batching.Place.of(layout, mesh)


def conversations(num=8, seed=0):
  """Documents of one to three turns, each with what was given before it."""
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(num):
    mask = [part for _ in range(int(rng.integers(1, 4))) for part in [False] * int(rng.integers(1, 3)) + [True] * int(rng.integers(1, 4))]
    made.append(Document(rng.integers(0, 96, len(mask)).astype(np.int32), np.array(mask)))
  return made


@functools.cache
def documents():
  """Conversations with an advantage each, and behavior logprobs near those of the policy."""
  rng, (_, _, learner, trainable, frozen) = np.random.default_rng(1), setting('one')
  found = conversations()
  batch = batching.pack_rows([[document] for document in found], LENGTH, denominator=1, aggregation='token_sum')
  logprobs_BT = np.asarray(learner.score(trainable, frozen, batching.to_global(batch, place('one'))).logprobs_BT)
  made = []
  for row, document in enumerate(found):
    own_T = np.concatenate([[0], logprobs_BT[row, :len(document.tokens_T) - 1]])
    behavior_T = np.where(document.loss_mask_T, own_T + rng.normal(0, 0.3, own_T.shape), np.nan).astype(np.float32)
    made.append(dataclasses.replace(document, per_token={
        'advantages': np.full(own_T.shape, rng.normal(), np.float32), 'behavior_logprobs': behavior_T}))
  return made


@pytest.mark.parametrize('length', [4096, pytest.param(65_536, marks=pytest.mark.slow)])
def test_gradient_of_long_trajectories_does_not_depend_on_how_their_length_is_split(length):
  """Conversations of many turns, longer than what one of 8 devices holds, and short ones packed behind one of them."""
  rng, docs = np.random.default_rng(3), []
  for size in (length - 7, length - 100, 90):
    mask = np.repeat(rng.random(size // 10 + 1) < 0.4, 10)[:size]
    values = {name: np.where(mask, rng.normal(center, 0.3, size), np.nan).astype(np.float32)
              for name, center in (('old_logprobs', -4.5), ('behavior_logprobs', -4.5), ('reference_logprobs', -4.5))}
    docs.append(Document(rng.integers(0, 96, size).astype(np.int32), mask,
                         per_token={'advantages': np.full(size, rng.normal(), np.float32), **values}))
  batch = batching.pack(docs, 2, length, aggregation='sequence_mean')
  found = {}
  for name in ('one', 'seq8_zigzag'):
    _, _, learner, trainable, frozen = setting(name, policy=TOKEN)
    grads, metrics = learner.gradient(trainable, frozen, batching.to_global(batch, place(name)))
    found[name] = jax.tree.map(np.asarray, grads), metrics_lib.compute(metrics)
  check_equal(found['seq8_zigzag'][0], found['one'][0])
  for key, value in found['one'][1].items():
    assert found['seq8_zigzag'][1][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def on_policy_batch(name='one', **fields):
  """One micro-batch without old or reference logprobs."""
  batch, = batching.pack_step(documents(), 4, LENGTH, aggregation='token_mean')
  return batching.to_global(batch, place(name)).replace(**fields)


def test_first_update_of_an_on_policy_batch_has_no_kl_and_ratios_of_one():
  _, _, learner, trainable, frozen = setting('one', policy=ON_POLICY)
  batch = on_policy_batch()
  scores = learner.score(trainable, frozen, batch)
  sampled = np.asarray(batch.loss_weight_BT) != 0
  grads = {}
  for case, fields, bound in (('implied', {}, 0), ('scored', {'old_logprobs_BT': scores.logprobs_BT}, 1e-6)):
    exact = batch.replace(behavior_logprobs_BT=scores.logprobs_BT, **fields)
    grads[case], metrics = learner.gradient(trainable, frozen, exact)
    metrics = metrics_lib.compute(metrics)
    assert abs(metrics['policy/ppo_kl']) <= bound and metrics['policy/pg_clipfrac'] == 0
    for key in ('policy/probs_ratio_min', 'policy/probs_ratio_max', 'mismatch/importance_mean', 'mismatch/importance_max', 'mismatch/ess'):
      assert metrics[key] == pytest.approx(1, abs=1e-5), key
    assert metrics['mismatch/logprob_abs_diff_max'] < 1e-5
    assert metrics['train/target_tokens'] == sampled.sum()
    assert metrics['policy/entropy'] == pytest.approx(np.asarray(scores.entropy_BT)[sampled].mean(), rel=1e-5)
    assert metrics['train/loss'] == pytest.approx(-float((batch.loss_weight_BT * batch.advantages_BT).sum()), rel=1e-5)
  check_equal(jax.tree.map(np.asarray, grads['scored']), jax.tree.map(np.asarray, grads['implied']))


def test_scores_are_zero_where_nothing_is_learned():
  _, _, learner, trainable, frozen = setting('one')
  batch = on_policy_batch()
  for scores_BT in jax.tree.leaves(learner.score(trainable, frozen, batch)):
    np.testing.assert_array_equal(np.asarray(scores_BT) != 0, np.asarray(batch.loss_weight_BT) != 0)


def test_the_reference_of_a_lora_run_is_its_frozen_base():
  _, _, learner, trainable, frozen = setting('fsdp2', 4, ON_POLICY)
  _, _, full, base, nothing = setting('fsdp2')
  batch = on_policy_batch('fsdp2')
  wanted = full.score(base, nothing, batch)
  moved = jax.tree.map(lambda leaf: leaf + 0.1, trainable)
  for got, want in zip(jax.tree.leaves(learner.score(None, frozen, batch)), jax.tree.leaves(wanted)):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
  difference = np.abs(np.asarray(learner.score(moved, frozen, batch).logprobs_BT) - np.asarray(wanted.logprobs_BT))
  assert difference.max() > 1e-2
  with pytest.raises(ValueError, match='trainable=None scores the frozen base of adapters, and a full run has none'):
    full.score(None, nothing, batch)


def test_updates_follow_the_advantages_and_compile_once(num_compiled):
  _, _, learner, trainable, frozen = setting('fsdp2', 4, ON_POLICY)
  batch = on_policy_batch('fsdp2')
  empty = batch.replace(loss_weight_BT=batch.loss_weight_BT * 0)
  before = learner.score(trainable, frozen, batch).logprobs_BT
  state, compiled = learner.init(fresh(trainable)), []
  for step in range(6):
    state, metrics = learner.update(state, frozen, [batch] + [empty] * (step % 3))
    compiled.append(num_compiled())
  assert compiled[-1] == compiled[2]  # Each number of micro-batches has been seen by then.
  gain = np.asarray(batch.advantages_BT * (learner.score(state.trainable, frozen, batch).logprobs_BT - before))
  assert gain.sum() > 0.1
  values = metrics_lib.compute(metrics)
  assert values['train/grad_norm'] > 0 and values['policy/pg_loss'] == values['train/loss']


def test_no_advantage_no_gradient_and_the_bonus_raises_the_entropy():
  batch = on_policy_batch('fsdp2')
  batch = batch.replace(advantages_BT=batch.advantages_BT * 0)
  _, _, learner, trainable, frozen = setting('fsdp2', 4, ON_POLICY)
  for path, grad in params_lib.named_leaves(learner.gradient(trainable, frozen, batch)[0]):
    assert not np.any(grad), path
  bonus = setting('fsdp2', 4, dataclasses.replace(ON_POLICY, entropy_coef=1.0))[2]
  after = trainable
  for _ in range(3):
    after = jax.tree.map(lambda leaf, grad: leaf - 0.5 * grad, after, bonus.gradient(after, frozen, batch)[0])
  sampled = np.asarray(batch.loss_weight_BT) != 0
  entropies = [np.asarray(learner.score(tree, frozen, batch).entropy_BT)[sampled].mean() for tree in (trainable, after)]
  assert entropies[1] > entropies[0] + 1e-3
