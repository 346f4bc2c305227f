"""The learner: gradients that do not depend on how a step is split, resumable state, skipped steps, LoRA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import lora, sharding, transformer
from models import params as params_lib
from rl import batching
from rl import learner as learner_lib
from rl import metrics as metrics_lib
from rl import optimizer as optimizer_lib
from rl.types import Document
from tests import tiny

CONFIG = tiny.config()
ROWS, LENGTH = 16, 48
MESHES = {'one': {}, 'fsdp2': {'fsdp': 2}, 'fsdp2_tensor2': {'fsdp': 2, 'tensor': 2}, 'data2_fsdp2': {'data': 2, 'fsdp': 2}, 'seq2': {'seq': 2}}
# Rows whose length is split, with the order of their tokens.
LONG_MESHES = {
    'seq2_contiguous': {'seq': 2, 'order': 'contiguous'},
    'seq2_striped': {'seq': 2, 'order': 'striped'},
    'seq4_zigzag': {'seq': 4, 'order': 'zigzag'},
    'seq8_zigzag': {'seq': 8, 'order': 'zigzag'},
    'ulysses2': {'ulysses': 2},
    'seq4_ulysses2': {'seq': 4, 'ulysses': 2, 'order': 'zigzag'},
    'fsdp2_seq2_ulysses2': {'fsdp': 2, 'seq': 2, 'ulysses': 2, 'order': 'zigzag'},
    'seq2_tensor2': {'seq': 2, 'tensor': 2, 'order': 'zigzag'},
}


def documents(count=12, seed=0):
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(count):
    size = int(rng.integers(5, 17))
    mask = rng.random(size) < 0.7
    mask[-1] = True
    made.append(Document(rng.integers(0, 96, size).astype(np.int32), mask))
  return made


@functools.cache
def setting(name, rank=0, policy=None):
  """Return (mesh, layout, learner, trainable, frozen) on a mesh; with settings of a policy loss, the learner minimizes that."""
  sizes = dict((MESHES | LONG_MESHES)[name])
  order = sizes.pop('order', 'contiguous')
  mesh = sharding.make_mesh(devices=jax.devices()[:int(np.prod(list(sizes.values()) or [1]))], **sizes)
  layout = dataclasses.replace(params_lib.replicate_indivisible(sharding.TRAIN, mesh, CONFIG.num_kv_heads), order=order)
  config = optimizer_lib.OptimizerConfig(learning_rate=1e-3, schedule='constant', weight_decay=0.1)
  loss = learner_lib.supervised_loss if policy is None else learner_lib.policy_loss(policy)
  learner = learner_lib.build(CONFIG, layout, mesh, optimizer_lib.build(config, 10), optimizer_lib.schedule(config, 10), full=rank == 0,
                              loss=loss)
  specs = transformer.declare(CONFIG)
  tree = params_lib.init(specs, 0, mesh, layout)
  if rank:
    tree = lora.attach(tree, specs, rank=rank, alpha=8, targets=lora.TARGETS, rank_stabilized=True, seed=1, mesh=mesh, layout=layout)
  trainable, frozen = params_lib.split(tree, lora.is_trainable if rank else lambda _: True)
  return mesh, layout, learner, trainable, frozen


def split(items, micro_batches, num_rows):
  """Spread rows over micro-batches, and those of one over its devices; one shape for all, so that it compiles once."""
  rows = [[] for _ in range(micro_batches * num_rows)]
  for part in range(micro_batches):
    own = items[part::micro_batches]
    for place, item in enumerate(own):
      rows[part * num_rows + place * num_rows // len(own)] = item
  return rows


def step_gradient(name, micro_batches, packed, aggregation='token_mean'):
  """The gradient of one optimizer step over the same documents, one or three of them a row."""
  mesh, layout, learner, trainable, frozen = setting(name)
  docs = documents()
  denominator = batching.step_denominator(docs, aggregation)
  rows = split([docs[row::4] for row in range(4)] if packed else [[document] for document in docs], micro_batches, ROWS)
  batch = batching.pack_rows(rows, LENGTH, denominator=denominator, aggregation=aggregation)
  place = batching.Place.of(layout, mesh)
  total, loss = None, None
  for part in batching.micro_batches(batch, micro_batches):
    grads, metrics = learner.gradient(trainable, frozen, batching.to_global(part, place))
    total = grads if total is None else learner.accumulate(total, grads)
    loss = metrics if loss is None else metrics_lib.merge(loss, metrics)
  for (path, grad), param in zip(params_lib.named_leaves(total), jax.tree.leaves(trainable)):
    assert grad.sharding == param.sharding, path
  return jax.tree.map(np.asarray, total), metrics_lib.compute(loss)


def check_equal(grads, wanted, bound=1e-6):
  """Float32 sums in another order: the whole gradient within the bound, and no tensor, however small, beyond five times that."""
  named = [(path, grad - want, want) for (path, grad), want in zip(params_lib.named_leaves(grads), jax.tree.leaves(wanted))]
  whole = [np.sqrt(sum(np.sum(np.square(item[index], dtype=np.float64)) for item in named)) for index in (1, 2)]
  assert whole[0] < bound * whole[1], f'relative error of the whole gradient {whole[0] / whole[1]:.1e}'
  for path, error, want in named:
    assert np.linalg.norm(error) <= 5 * bound * np.linalg.norm(want), f'{path}: {np.linalg.norm(error) / np.linalg.norm(want):.1e}'


@functools.cache
def expected(aggregation='token_mean'):
  return step_gradient('one', 1, True, aggregation)


@pytest.mark.parametrize('packed', [True, False])
@pytest.mark.parametrize('micro_batches', [1, 2, 4])
@pytest.mark.parametrize('name', MESHES)
def test_gradient_is_the_same_however_a_step_is_split(name, micro_batches, packed):
  grads, metrics = step_gradient(name, micro_batches, packed)
  wanted, wanted_metrics = expected()
  check_equal(grads, wanted)
  for key in ('train/loss_nats', 'train/tokens', 'train/target_tokens'):
    assert metrics[key] == pytest.approx(wanted_metrics[key], rel=1e-6), key


@pytest.mark.parametrize('packed', [True, False])
@pytest.mark.parametrize('name', LONG_MESHES)
def test_gradient_is_the_same_however_the_length_is_split(name, packed):
  """Nor is it scaled by the number of parts (DeepSpeed#5248): parts of a row that hold only padding add 0 (Megatron-LM#1764)."""
  grads, metrics = step_gradient(name, 1, packed)
  wanted, wanted_metrics = expected()
  check_equal(grads, wanted)
  for key in ('train/loss_nats', 'train/tokens', 'train/target_tokens'):
    assert metrics[key] == pytest.approx(wanted_metrics[key], rel=1e-6), key


@pytest.mark.parametrize('aggregation', ['sequence_mean', 'token_sum'])
def test_aggregations_do_not_depend_on_the_split_either(aggregation):
  for micro_batches, packed in ((2, True), (4, False)):
    check_equal(step_gradient('one', micro_batches, packed, aggregation)[0], expected(aggregation)[0])
  # And they are three different objectives.
  mean, other = expected()[0]['norm'], expected(aggregation)[0]['norm']
  assert np.linalg.norm(mean - other) > 1e-3 * np.linalg.norm(mean)


def batch_for(name, docs=None):
  mesh, layout = setting(name)[:2]
  batch = batching.pack(docs or documents(), 4, LENGTH, aggregation='token_mean')
  return batching.to_global(batch, batching.Place.of(layout, mesh))


def fresh(tree):
  return jax.tree.map(jnp.copy, tree)


def test_loss_falls_and_the_programs_compile_once(num_compiled):
  _, _, learner, trainable, frozen = setting('fsdp2')
  state, losses, compiled = learner.init(fresh(trainable)), [], []
  batch = batch_for('fsdp2')
  for _ in range(8):
    state, metrics = learner.update(state, frozen, [batch])
    losses.append(metrics_lib.compute(metrics)['train/loss_nats'])
    compiled.append(num_compiled())
  assert losses[-1] < losses[0] - 0.3
  assert int(state.step) == 8
  place = jax.tree.map(lambda leaf: leaf.sharding, trainable)
  assert jax.tree.map(lambda leaf: leaf.sharding, state.trainable) == place
  assert compiled[-1] == compiled[0] > 0


def test_first_update_is_adam_by_hand():
  _, _, learner, trainable, frozen = setting('one')
  grads, _ = learner.gradient(trainable, frozen, batch_for('one'))
  before = jax.tree.map(np.asarray, trainable)
  norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in jax.tree.leaves(grads)))
  clip = min(1.0, 1.0 / norm)
  clipped = jax.tree.map(lambda g: np.asarray(g) * clip, grads)
  state, metrics = learner.update(learner.init(fresh(trainable)), frozen, [batch_for('one')])
  assert metrics_lib.compute(metrics)['train/grad_norm'] == pytest.approx(norm, rel=1e-5)
  # After one step both moments are bias-corrected to the gradient itself: update = g / (|g| + eps), plus decay on the blocks' matrices only.
  for name in ('norm', 'embedding'):
    g = clipped[name]
    np.testing.assert_allclose(np.asarray(state.trainable[name]), before[name] - 1e-3 * g / (np.abs(g) + 1e-8), atol=2e-6)
  g, w = clipped['blocks']['mlp']['up'], before['blocks']['mlp']['up']
  np.testing.assert_allclose(np.asarray(state.trainable['blocks']['mlp']['up']), w - 1e-3 * (g / (np.abs(g) + 1e-8) + 0.1 * w), atol=2e-6)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
  _, _, learner, trainable, frozen = setting('one')
  state, _ = learner.update(learner.init(fresh(trainable)), frozen, [batch_for('one')])
  before = jax.tree.map(np.asarray, state)
  bad = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state.trainable)
  state, metrics = learner.apply(state, bad)
  assert metrics_lib.compute(metrics)['train/skipped_steps'] == 1
  assert int(state.step) == 2
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.replace(step=before.step)), before)


def test_lora_trains_the_adapters_only_and_starts_as_the_base():
  _, _, learner, trainable, frozen = setting('fsdp2', rank=4)
  names = [name for name, _ in params_lib.named_leaves(trainable)]
  assert len(names) == 14 and all(name.endswith(('/a', '/b')) for name in names)
  _, _, full, base, nothing = setting('fsdp2')
  batch = batch_for('fsdp2')
  start = metrics_lib.compute(learner.evaluate(trainable, frozen, batch))['train/loss_nats']
  assert start == pytest.approx(metrics_lib.compute(full.evaluate(base, nothing, batch))['train/loss_nats'], rel=1e-6)
  kept = jax.tree.map(np.asarray, frozen)
  state = learner.init(fresh(trainable))
  for _ in range(6):
    state, metrics = learner.update(state, frozen, [batch])
  assert metrics_lib.compute(metrics)['train/loss_nats'] < start - 0.02
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, frozen), kept)
  # Merged, the model computes what the adapters compute beside their base.
  with jax.set_mesh(setting('fsdp2')[0]):
    merged = lora.merge(params_lib.combine(state.trainable, frozen))
  after = metrics_lib.compute(learner.evaluate(state.trainable, frozen, batch))['train/loss_nats']
  assert metrics_lib.compute(full.evaluate(merged, nothing, batch))['train/loss_nats'] == pytest.approx(after, rel=1e-5)
  assert jax.tree.map(lambda leaf: leaf.sharding, merged) == jax.tree.map(lambda leaf: leaf.sharding, base)


def test_lora_targets_must_exist():
  with pytest.raises(ValueError, match="lora.targets: 'qkv' matches no weight of the blocks"):
    lora.declare(transformer.declare(CONFIG), 4, ['q', 'qkv'])


def test_changing_a_token_of_one_document_leaves_the_others_gradients():
  """The gradient of document 2 alone is what it was, whatever stands before it in its row."""
  mesh, layout, learner, trainable, frozen = setting('one')
  first, second = documents(2)
  silent = dataclasses.replace(first, loss_mask_T=np.zeros_like(first.loss_mask_T))
  changed = dataclasses.replace(silent, tokens_T=(first.tokens_T + 1) % 96)
  place = batching.Place.of(layout, mesh)
  rows = [batching.pack_rows([[doc, second]] + [[]] * 3, LENGTH, denominator=1, aggregation='token_sum') for doc in (silent, changed)]
  grads = [learner.gradient(trainable, frozen, batching.to_global(batch, place))[0] for batch in rows]
  for (name, a), b in zip(params_lib.named_leaves(grads[0]), jax.tree.leaves(grads[1])):
    np.testing.assert_array_equal(a, b, err_msg=name)


def test_schedule_by_hand():
  config = optimizer_lib.OptimizerConfig(learning_rate=1.0, schedule='linear', warmup_steps=4, final_fraction=0.0)
  rates = [float(optimizer_lib.schedule(config, 8)(step)) for step in range(9)]
  np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0], atol=1e-6)
  cosine = dataclasses.replace(config, schedule='cosine', warmup_steps=0, final_fraction=0.2)
  np.testing.assert_allclose([float(optimizer_lib.schedule(cosine, 2)(step)) for step in range(3)], [1.0, 0.6, 0.2], atol=1e-6)
  assert isinstance(optimizer_lib.build(config, 8), optax.GradientTransformation)


@pytest.mark.parametrize('fields, message', [
    ({'learning_rate': 0.0}, 'learning_rate=0.0 must be positive'), ({'warmup_steps': -1}, 'warmup_steps=-1 must not be negative'),
    ({'final_fraction': 2.0}, 'final_fraction=2.0 must be between 0 and 1'), ({'clip_norm': 0.0}, 'clip_norm=0.0 must be positive')])
def test_bad_optimizer_settings(fields, message):
  with pytest.raises(ValueError, match=message):
    optimizer_lib.OptimizerConfig(**fields)


def test_warmup_must_leave_something():
  with pytest.raises(ValueError, match='optimizer.warmup_steps=10 leaves nothing of num_steps=10'):
    optimizer_lib.schedule(optimizer_lib.OptimizerConfig(warmup_steps=10), 10)
