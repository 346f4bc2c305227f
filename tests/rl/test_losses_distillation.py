"""Divergences over some words and the rest, the settings of distillation, and the learner's losses with a teacher."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import params as params_lib
from models import sharding, transformer
from rl import batching
from rl import learner as learner_lib
from rl import metrics as metrics_lib
from rl import optimizer as optimizer_lib
from rl.learner import TeacherModel
from rl.losses import PolicyLossConfig
from rl.losses_distillation import DistillationLossConfig, TeacherConfig, top_divergence_BT
from rl.types import Document
from tests import tiny

KINDS = ('forward', 'reverse', 'jensen_shannon')
STUDENT = tiny.config(num_layers=1, layer_pattern=('global',), final_softcap=5.0)
TEACHER = tiny.config(num_layers=1, layer_pattern=('global',), embed_dim=24, mlp_dim=40)
LENGTH = 32
# The settings of most tests, so that their programs are compiled once.
TEXTS = DistillationLossConfig(alpha=0.7, divergence='jensen_shannon', beta=0.3, temperature=2.0)


def kl(first, second):
  return (first * (np.log(first) - np.log(second))).sum(-1)


def dense(kind, q, p, beta=0.5):
  m = beta * p + (1 - beta) * q
  return {'forward': lambda: kl(p, q), 'reverse': lambda: kl(q, p), 'jensen_shannon': lambda: beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]()


def distributions(words=12):
  rng = np.random.default_rng(0)
  return (rng.dirichlet(np.ones(words), (2, 3)) for _ in range(2))


@pytest.mark.parametrize('kind', KINDS)
def test_divergence_over_some_words_is_that_of_coarse_distributions(kind):
  q, p = distributions()
  order = np.argsort(-p, -1)
  q, p = (np.take_along_axis(x, order, -1) for x in (q, p))
  mask = np.ones((2, 3), bool)
  coarse = [np.concatenate([x[..., :5], x[..., 5:].sum(-1, keepdims=True)], -1) for x in (q, p)]
  value, gradient = jax.value_and_grad(lambda logq: top_divergence_BT(logq, np.log(p[..., :5]), mask, kind, 0.3).sum())(jnp.log(q[..., :5]))
  wanted = dense(kind, *coarse, 0.3)
  np.testing.assert_allclose(value, wanted.sum(), rtol=1e-5)
  assert np.all(wanted < dense(kind, q, p, 0.3))  # A lower bound of the divergence over all words.
  for index in ((0, 0, 0), (1, 2, 4)):
    moved = []
    for sign in (1, -1):
      logq = np.log(q[..., :5])
      logq[index] += sign * 1e-6
      moved.append(dense(kind, np.concatenate([np.exp(logq), 1 - np.exp(logq).sum(-1, keepdims=True)], -1), coarse[1], 0.3).sum())
    np.testing.assert_allclose(gradient[index], (moved[0] - moved[1]) / 2e-6, rtol=1e-3)
  all_words = top_divergence_BT(np.log(q), np.log(p), mask, kind, 0.3)
  np.testing.assert_allclose(all_words, dense(kind, q, p, 0.3), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('bad', [1e9, np.nan])
def test_masked_places_are_replaced(kind, bad):
  q, p = distributions(5)
  mask = np.array([[True, False, True], [False, True, False]])
  logq, logp = (np.where(mask[..., None], np.log(x), bad).astype(np.float32) for x in (q, p))
  value, gradient = jax.value_and_grad(lambda logq: top_divergence_BT(logq, logp, mask, kind).sum())(logq)
  wanted, wanted_gradient = jax.value_and_grad(lambda logq: (top_divergence_BT(logq, np.log(p), mask | True, kind) * mask).sum())(
      jnp.log(q).astype(jnp.float32))
  np.testing.assert_allclose(value, wanted, rtol=1e-5)
  np.testing.assert_allclose(gradient, np.where(mask[..., None], wanted_gradient, 0), rtol=1e-4, atol=1e-6)


def test_the_temperature_goes_linearly_to_its_last_value():
  settings = DistillationLossConfig(temperature=4.0, final_temperature=1.0)
  assert [float(settings.temperature_at(jnp.int32(step), 4)) for step in (0, 1, 3, 9)] == [4, 3, 1, 1]
  assert settings.last_temperature == 1
  assert float(DistillationLossConfig(temperature=2.0).temperature_at(jnp.int32(0), 1)) == 2


@pytest.mark.parametrize(('record', 'settings', 'message'), [
    (DistillationLossConfig, {'alpha': 0.0}, 'alpha=0.0 must be above 0 and at most 1'),
    (DistillationLossConfig, {'divergence': 'kl'}, "divergence='kl' is unknown; use one of forward, reverse, jensen_shannon"),
    (DistillationLossConfig, {'temperature': 0.0}, 'temperature=0.0 and final_temperature=None must be positive'),
    (DistillationLossConfig, {'top_k': -1}, 'top_k=-1 must be at least 0'),
    (DistillationLossConfig, {'top_k': 4, 'final_temperature': 2.0}, 'top_k=4 keeps probabilities at one temperature'),
    (TeacherConfig, {'coef': 0.0}, 'coef=0.0 and temperature=1.0 must be positive'),
    (TeacherConfig, {'temperature': 2.0}, "teacher.temperature=2.0 with divergence='sampled': the tokens are sampled at temperature 1"),
])
def test_settings_that_mean_nothing_are_refused(record, settings, message):
  with pytest.raises(ValueError, match=message):
    record(**settings)


MESHES = {'one': {}, 'fsdp2_tensor2': {'fsdp': 2, 'tensor': 2}}


@functools.cache
def setting(name, loss):
  """Return (place, learner, trainable, frozen with the teacher, the teacher's model)."""
  sizes = MESHES[name]
  mesh = sharding.make_mesh(devices=jax.devices()[:int(np.prod(list(sizes.values()), initial=1))], **sizes)
  layout = sharding.TRAIN
  teacher = TeacherModel(TEACHER, layout)
  config = optimizer_lib.OptimizerConfig()
  made = learner_lib.distillation_loss(loss, teacher) if isinstance(loss, DistillationLossConfig) else learner_lib.policy_loss(
      PolicyLossConfig(kind='reinforce', importance_cap=None), teacher, loss)
  learner = learner_lib.build(STUDENT, layout, mesh, optimizer_lib.build(config, 10), optimizer_lib.schedule(config, 10), full=True, loss=made)
  trainable, frozen = params_lib.split(params_lib.init(transformer.declare(STUDENT), 0, mesh, layout), lambda _: True)
  frozen = {**frozen, learner_lib.TEACHER: params_lib.init(transformer.declare(TEACHER), 1, mesh, layout)}
  return batching.Place.of(layout, mesh), mesh, learner, trainable, frozen


def documents(count=6):
  rng = np.random.default_rng(0)
  made = []
  for _ in range(count):
    size = int(rng.integers(5, 14))
    mask = rng.random(size) < 0.7
    mask[-1] = True
    made.append(Document(rng.integers(0, 96, size).astype(np.int32), mask, per_token={'advantages': np.full(size, rng.normal(), np.float32)}))
  return made


def gradient(name, loss, temperature=None):
  place, mesh, learner, trainable, frozen = setting(name, loss)
  batch = batching.to_global(batching.pack(documents(), 4, LENGTH, aggregation='token_mean'), place)
  if temperature is not None:
    with jax.set_mesh(mesh):
      batch = batch.replace(temperature=jnp.float32(temperature))
  grads, metrics = learner.gradient(trainable, frozen, batch)
  return jax.tree.map(np.asarray, grads), metrics_lib.compute(metrics)


@functools.partial(jax.jit, static_argnums=4)
def hidden_of(params, tokens_BT, positions_BT, segment_ids_BT, config):
  return transformer.forward(params, tokens_BT, positions_BT, segment_ids_BT, config, sharding.TRAIN)[0]


def logits64(params, config, batch):
  """Return logits_BTV of a model in float64, from its hidden states."""
  hidden = hidden_of(params, batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT, config)
  logits = np.asarray(hidden, np.float64) @ np.asarray(transformer.unembedding(params, config), np.float64).T
  if config.final_softcap:
    logits = config.final_softcap * np.tanh(logits / config.final_softcap)
  return logits


def softmax(logits):
  exp = np.exp(logits - logits.max(-1, keepdims=True))
  return exp / exp.sum(-1, keepdims=True)


def everything(loss, temperature):
  """Return what the loss and its parts are, from dense float64 distributions."""
  _, mesh, _, trainable, frozen = setting('one', loss)
  batch = batching.pack(documents(), 4, LENGTH, aggregation='token_mean')
  with jax.set_mesh(mesh):
    student, teacher = logits64(trainable, STUDENT, batch), logits64(frozen[learner_lib.TEACHER], TEACHER, batch)
  logq = np.log(softmax(student))
  nll = -np.take_along_axis(logq, batch.targets_BT[..., None], -1)[..., 0]
  q, p = softmax(student / temperature), softmax(teacher / temperature)
  return batch, nll, q, p


def test_the_loss_is_a_mixture_of_supervised_and_divergence():
  _, metrics = gradient('one', TEXTS, 2.0)
  batch, nll, q, p = everything(TEXTS, 2.0)
  weight, divergence = batch.loss_weight_BT, dense('jensen_shannon', q, p, 0.3)
  mask = weight != 0
  assert metrics['train/loss'] == pytest.approx(0.3 * (weight * nll).sum() + 0.7 * 4 * (weight * divergence).sum(), rel=1e-4)
  assert metrics['train/loss_nats'] == pytest.approx(nll[mask].mean(), rel=1e-4)
  assert metrics['distillation/divergence_nats'] == pytest.approx(divergence[mask].mean(), rel=1e-4)
  assert metrics['distillation/agreement'] == pytest.approx((q.argmax(-1) == p.argmax(-1))[mask].mean())
  assert metrics['distillation/temperature'] == 2


def check_close(got, wanted, tolerance):
  for (path, grad), want in zip(params_lib.named_leaves(got), jax.tree.leaves(wanted), strict=True):
    assert np.linalg.norm(grad - want) <= tolerance * np.linalg.norm(want), path


def test_gradients_do_not_depend_on_the_mesh():
  (wanted, wanted_metrics), (got, metrics) = (gradient(name, TEXTS, 2.0) for name in MESHES)
  check_close(got, wanted, 1e-5)
  assert metrics == pytest.approx(wanted_metrics, rel=1e-4, abs=1e-6)


def test_all_words_kept_are_the_teacher_held():
  kept = dataclasses.replace(TEXTS, top_k=96)
  wanted, wanted_metrics = gradient('one', TEXTS, 2.0)
  batch, _, _, p = everything(TEXTS, 2.0)
  place, mesh, learner, trainable, frozen = setting('one', kept)
  order = np.argsort(-p, -1)
  words = np.log(np.take_along_axis(p, order, -1)).astype(np.float32)
  # What stands where nothing is learned is read by nothing.
  words = np.where((batch.loss_weight_BT != 0)[..., None], words, 1e9).astype(np.float32)
  batch = batching.to_global(batch.replace(teacher_ids_BTJ=order.astype(np.int32), teacher_logprobs_BTJ=words), place)
  with jax.set_mesh(mesh):
    got, metrics = learner.gradient(trainable, frozen, batch.replace(temperature=jnp.float32(2)))
  check_close(got, wanted, 2e-4)
  assert metrics_lib.compute(metrics) == pytest.approx(wanted_metrics, rel=1e-4, abs=1e-5)


def test_a_teacher_is_a_reward_for_what_was_sampled_or_a_loss_over_all_words():
  sampled = TeacherConfig('t', coef=0.5, reward_coef=2.0)
  _, metrics = gradient('one', sampled)
  batch, nll, q, p = everything(sampled, 1.0)
  weight, mask = batch.loss_weight_BT, batch.loss_weight_BT != 0
  logp = np.log(np.take_along_axis(p, batch.targets_BT[..., None], -1)[..., 0])
  gain = logp + nll
  assert metrics['teacher/sampled_kl_nats'] == pytest.approx(-gain[mask].mean(), rel=1e-4)
  assert metrics['train/loss'] == pytest.approx((weight * (2 * batch.advantages_BT + 0.5 * gain) * nll).sum(), rel=1e-4)
  full = TeacherConfig('t', coef=0.5, divergence='full', temperature=2.0, reward_coef=0.0)
  _, metrics = gradient('one', full)
  _, _, q, p = everything(full, 2.0)
  assert metrics['train/loss'] == pytest.approx(0.5 * 4 * (weight * kl(q, p)).sum(), rel=1e-4)
  assert metrics['teacher/reverse_kl_nats'] == pytest.approx(kl(q, p)[mask].mean(), rel=1e-4)


def test_the_sampled_gradient_is_that_of_the_divergence_in_the_mean():
  """Over all words as samples, each weighed by its probability, the score function's gradient is that of the reverse KL divergence."""
  logits, teacher = (jnp.asarray(np.random.default_rng(seed).standard_normal(7)) for seed in (0, 1))
  logp = jax.nn.log_softmax(teacher)

  def reverse(logits):
    logq = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logq) * (logq - logp))

  def sampled(logits):
    logq = jax.nn.log_softmax(logits)
    gain = jax.lax.stop_gradient(logp - logq)
    return -jnp.sum(jax.lax.stop_gradient(jnp.exp(logq)) * gain * logq)

  np.testing.assert_allclose(jax.grad(sampled)(logits), jax.grad(reverse)(logits), atol=1e-6)
