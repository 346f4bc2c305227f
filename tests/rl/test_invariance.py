"""Every loss has the same gradient however a step is split: over micro-batches, data-parallel devices, the length, and rows, packed or not.

The losses are the product's own in its own learner. On a mesh all of them compile as one program, on one forward pass of the model; which
one it computes is a number among the frozen parameters.
"""

import dataclasses
import functools
from typing import NamedTuple, get_args

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import dpo, grpo
from models import heads, scalar_head, sharding, transformer
from models import params as params_lib
from models.heads_distillation import Divergence
from rl import batching, comparisons, losses, losses_preference, train_preference, types
from rl import config as config_lib
from rl import learner as learner_lib
from rl import metrics as metrics_lib
from rl import optimizer as optimizer_lib
from rl.batching import Place
from rl.learner import Learner, TeacherModel
from rl.losses import PolicyLossConfig
from rl.losses_distillation import DistillationLossConfig, TeacherConfig
from rl.losses_preference import PreferenceLossConfig
from rl.losses_reward import RewardLossConfig, ValueLossConfig
from rl.types import Document, Params
from tests import tiny
from tests.rl.test_learner import check_equal, split

CONFIG = tiny.config()
TEACHER = tiny.config(num_layers=1, layer_pattern=('global',), embed_dim=24, mlp_dim=40)
ROWS, LENGTH, MAX_SEGMENTS, NUM_WORDS = 8, 40, 4, 4
DIMENSIONS = {'harmless': 2.0, 'helpful': 1.0}
CASE = 'case'  # Of the frozen parameters: the number of the loss.

SPLITS = [(micro_batches, packed) for micro_batches in (1, 2, 4) for packed in (True, False)]
MESHES = {'one': {}, 'data2': {'data': 2}, 'seq2': {'seq': 2}, 'data2_seq2': {'data': 2, 'seq': 2, 'order': 'zigzag'}}
MORE_MESHES = {'fsdp2': {'fsdp': 2}, 'fsdp2_seq2_ulysses2': {'fsdp': 2, 'seq': 2, 'ulysses': 2, 'order': 'zigzag'}}
AGGREGATIONS = ('token_mean', 'sequence_mean', 'sequence_sum', 'constant', 'token_sum')

# Losses that bound or drop some tokens and not all, and the metric that says so.
CROSSED = {
    'token': ('policy/pg_clipfrac', PolicyLossConfig(clip_low=0.2, clip_high=0.3, kl_coef=0.05)),
    'sequence': ('policy/pg_clipfrac', PolicyLossConfig(ratio='sequence', clip_low=0.05, clip_high=0.1, max_segments=4)),
    'naive': ('mismatch/opsm_fraction', PolicyLossConfig(
        decoupled=False, importance_cap=None, dual_clip=1.3, opsm_nats=0.05, max_segments=4, kl_coef=0.05, kl_estimator='k3_corrected')),
    'naive_sequence': ('mismatch/opsm_fraction', PolicyLossConfig(
        decoupled=False, importance_cap=None, ratio='sequence', opsm_nats=0.05, max_segments=4)),
    'dppo': ('mismatch/masked_fraction', PolicyLossConfig(
        kind='dppo', clip_low=1e-3, clip_high=1e-3, importance_level='geometric', importance_mode='filter', importance_low=0.8,
        importance_cap=1.2, max_segments=4, kl_coef=0.05, kl_estimator='k3')),
    'cispo': ('mismatch/masked_fraction', PolicyLossConfig(
        kind='cispo', importance_level='sequence', importance_mode='mask', importance_cap=1.5, max_segments=4)),
    'sequence_truncated': ('mismatch/capped_fraction', PolicyLossConfig(
        importance_level='sequence', importance_low=0.7, importance_cap=1.3, max_segments=4)),
    'reinforce': ('mismatch/masked_fraction', PolicyLossConfig(
        kind='reinforce', importance_mode='mask', importance_low=0.7, importance_cap=1.3)),
    'entropy': ('policy/pg_clipfrac', PolicyLossConfig(entropy_coef=0.1)),
}
PRESETS = {name: config_lib.build(PolicyLossConfig, grpo.get_config(f'variant={name}').loss) for name in grpo.PRESETS}
# Many presets differ in what is no part of a loss.
POLICY = {name: loss for name, (_, loss) in CROSSED.items()} | {
    f'preset_{name}': loss for name, loss in PRESETS.items() if name == next(other for other in PRESETS if PRESETS[other] == loss)}
PREFERENCE = {name: config_lib.build(PreferenceLossConfig, dpo.get_config(f'variant={name}').loss) for name in dpo.VARIANTS}
PREFERENCE['mean'] = PreferenceLossConfig(reduce='mean', margin=0.2, nll_coef=0.3)
DISTILLATION = {
    'forward': DistillationLossConfig(), 'reverse': DistillationLossConfig(divergence='reverse'),
    'jensen_shannon': DistillationLossConfig(0.7, 'jensen_shannon', beta=0.3),
    **{f'top_{kind}': DistillationLossConfig(divergence=kind, top_k=NUM_WORDS) for kind in get_args(Divergence)},
}
TAUGHT = {'sampled': TeacherConfig('t', coef=0.5, reward_coef=2.0), 'full': TeacherConfig('t', coef=0.5, divergence='full', temperature=2.0)}
CRITIC = ValueLossConfig(clip=0.2)


class Setting(NamedTuple):
  """A learner of all losses on a mesh."""
  place: Place
  learner: Learner
  trainable: Params
  frozen: Params


def make_losses(teacher):
  """Return name -> loss; the first word of the name says what data it needs."""
  plain = PolicyLossConfig(kind='reinforce', importance_cap=None)
  return {
      **{f'policy {name}': learner_lib.policy_loss(loss) for name, loss in POLICY.items()},
      'critic': learner_lib.value_loss(CRITIC),
      'critic unclipped': learner_lib.value_loss(ValueLossConfig(clip=None)),
      **{f'{"pairs" if loss.is_paired else "texts"} {name}': learner_lib.preference_loss(loss, MAX_SEGMENTS)
         for name, loss in PREFERENCE.items()},
      'pairs reward': learner_lib.reward_loss(RewardLossConfig(margin_scale=0.3, center_coef=0.01), DIMENSIONS, MAX_SEGMENTS),
      **{f'distillation {name}': learner_lib.distillation_loss(loss, teacher) for name, loss in DISTILLATION.items()},
      **{f'taught {name}': learner_lib.policy_loss(plain, teacher, loss) for name, loss in TAUGHT.items()},
  }


LOSSES = list(make_losses(None))


def any_loss(params, batch, config, layout, *, unembed_grad):
  """The loss whose number stands in the parameters; what a loss asks of the model is computed once for all."""
  teacher = TeacherModel(TEACHER, layout)
  hidden_BTD, head_VD = learner_lib._hidden(params, batch, config, layout), transformer.unembedding(params, config)
  taught_BTD = learner_lib._hidden(params[learner_lib.TEACHER], batch, *teacher)
  said = (hidden_BTD, head_VD, learner_lib.scalar_scores(params, batch, config, layout),
          heads.token_logprobs_and_entropy(hidden_BTD, head_VD, batch.targets_BT, batch.loss_weight_BT != 0, unembed_grad=unembed_grad))
  fixed = lax.stop_gradient(said)

  def on_what_was_said(loss):
    def total(said):
      hidden_BTD, head_VD, scores, logprobs = said

      def known(module, name, value, is_asked):
        function = getattr(module, name)
        patch.setattr(module, name, lambda given, *args, **options: value if is_asked(given) else function(given, *args, **options))

      with pytest.MonkeyPatch.context() as patch:
        known(learner_lib, '_hidden', hidden_BTD, lambda given: given is params)
        known(learner_lib, '_hidden', taught_BTD, lambda given: given is params[learner_lib.TEACHER])
        known(learner_lib, 'scalar_scores', scores, lambda given: given is params)
        known(transformer, 'unembedding', head_VD, lambda given: given is params)
        known(heads, 'token_logprobs', logprobs[0], lambda given: given.shape == hidden_BTD.shape)
        known(heads, 'token_logprobs_and_entropy', logprobs, lambda given: given.shape == hidden_BTD.shape)
        return loss(params, batch, config, layout, unembed_grad=unembed_grad)

    return total

  totals, kinds = [on_what_was_said(loss) for loss in make_losses(teacher).values()], {}
  for total in totals:
    kinds |= jax.eval_shape(total, fixed)[1]

  def with_all_metrics(total, said):
    (value, metrics), grads = jax.value_and_grad(total, has_aux=True)(said)
    missing = {key: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kind) for key, kind in kinds.items() if key not in metrics}
    return value, missing | metrics, grads

  value, metrics, grads = lax.switch(params[CASE], [functools.partial(with_all_metrics, total) for total in totals], fixed)
  # Each loss has its gradient already, so that nothing is kept for those of all others.
  return value + sum(jax.tree.leaves(jax.tree.map(lambda grad, x, at: jnp.sum(grad * (x - at)), grads, said, fixed))), metrics


@functools.cache
def initial():
  """Return (parameters, the teacher's) on the host."""
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  # Drawn, not 0, so that a gradient reaches the layers.
  head = scalar_head.declare(CONFIG, len(DIMENSIONS))
  head['weight'] = dataclasses.replace(head['weight'], init='normal')
  specs = (transformer.declare(CONFIG) | {scalar_head.SCALAR_HEAD: head}, transformer.declare(TEACHER))
  return [(one, jax.device_get(params_lib.init(one, seed, mesh, sharding.TRAIN))) for seed, one in enumerate(specs)]


@functools.cache
def setting(name, only=None):
  """Return the setting of a mesh, of all losses or of one that the product makes."""
  sizes = dict((MESHES | MORE_MESHES)[name])
  order = sizes.pop('order', 'contiguous')
  mesh = sharding.make_mesh(devices=jax.devices()[:int(np.prod(list(sizes.values()) or [1]))], **sizes)
  layout = dataclasses.replace(params_lib.replicate_indivisible(sharding.TRAIN, mesh, CONFIG.num_kv_heads), order=order)
  config = optimizer_lib.OptimizerConfig()
  loss = any_loss if only is None else make_losses(TeacherModel(TEACHER, layout))[only]
  learner = learner_lib.build(CONFIG, layout, mesh, optimizer_lib.build(config, 10), optimizer_lib.schedule(config, 10), full=True, loss=loss)
  params, teacher = (jax.device_put(values, params_lib.spec_shardings(specs, mesh, layout)) for specs, values in initial())
  trainable, frozen = params_lib.split(params, lambda _: True)
  return Setting(Place.of(layout, mesh), learner, trainable, {**frozen, learner_lib.TEACHER: teacher})


def scalar(name, value):
  return jax.device_put(value, jax.NamedSharding(setting(name).place.sharding.mesh, jax.P()))


def score(name, rows):
  """Return the batch of some rows of documents, and its logprobs_BT under the policy."""
  place, learner, trainable, frozen = setting(name)
  batch = batching.to_global(batching.pack_rows(rows, LENGTH, denominator=1, aggregation='token_sum'), place)
  return batch, learner.score(trainable, {key: frozen[key] for key in trainable}, batch).logprobs_BT


def conversation(rng, size):
  """Tokens, and a mask of one or several replies of which the last ends the document."""
  mask_T = np.repeat(rng.random(size) < 0.6, 2)[:size]
  mask_T[0], mask_T[-1] = False, True
  return Document(rng.integers(0, 96, size).astype(np.int32), mask_T, per_token={
      'reference_logprobs': rng.normal(-6, 0.3, size).astype(np.float32)})


@functools.cache
def pairs():
  """Four pairs of documents of which the first two fill a row, each with everything that any loss needs, and another reply for KTO."""
  rng, found = np.random.default_rng(0), []
  documents = [conversation(rng, size) for size in (8, 9, 12, 11, 13, 14, 16, 12)]
  logprobs_BT = np.asarray(score('one', [[document] for document in documents])[1])
  for row, document in enumerate(documents):
    size, mask_T = len(document.tokens_T), document.loss_mask_T
    own_T = np.append(0, logprobs_BT[row, :size - 1])

    def drawn(center, width):
      return np.where(mask_T, rng.normal(center, width, size), np.nan).astype(np.float32)  # noqa: B023

    words = np.argsort(rng.random((size, CONFIG.vocab_size)))[:, :NUM_WORDS].astype(np.int32)
    found.append(dataclasses.replace(document, per_token={
        'advantages': np.full(size, rng.normal(), np.float32), **{f'{whose}_logprobs': drawn(own_T, 0.3) for whose in (
            'old', 'behavior', 'reference')}, 'values': drawn(0, 1), 'returns': drawn(0, 2), 'teacher_ids': words,
        'teacher_logprobs': np.log(rng.dirichlet(np.ones(NUM_WORDS + 1), size)[:, :NUM_WORDS]).astype(np.float32)}))
  return [comparisons.Texts(row, tuple(found[2 * row:2 * row + 2]), ((2.0, -1.0), (2.0, -1.0)) if row % 2 else ((-1.0, 0.0), (-1.0, 0.0)),
                            weight, conversation(rng, 10)) for row, weight in enumerate((1.0, 0.5, 2.0, 1.5))]


@functools.cache
def batches(name, data, micro_batches, packed, aggregation):
  """Return the micro-batches of a step on a mesh.

  Args:
    data: a word that a loss's name starts with: losses of 'pairs' need two texts side by side, of 'texts' whether each is desirable.
  """
  place, texts = setting(name).place, pairs()
  others = split([[one.mismatched for one in texts]] if packed else [[one.mismatched] for one in texts], micro_batches, ROWS)
  scored = [score(name, others[start:start + ROWS]) for start in range(0, len(others), ROWS) if any(others[start:start + ROWS])]
  with jax.set_mesh(place.sharding.mesh):
    point = train_preference._reference_point([logprobs_BT for _, logprobs_BT in scored], [batch for batch, _ in scored], len(texts))
  if data in ('pairs', 'texts'):
    if data == 'texts':
      texts = [dataclasses.replace(one, preferences=((1.0, 0.0), (-1.0, 0.0))) for one in texts]
    rows = split([[0, 1], [2], [3]] if packed else [[0], [1], [2], [3]], micro_batches, ROWS)
    plan = comparisons.Plan(tuple(dataclasses.replace(one, mismatched=None) for one in texts), rows, 4, 0)
    found = comparisons.lay_out(plan, rows=ROWS, length=LENGTH, host_rows=slice(0, ROWS), mean=True).batches
  else:
    documents = [document for one in texts for document in one.documents]
    rows = split([documents[:4], documents[4:6], documents[6:]] if packed else [[document] for document in documents], micro_batches, ROWS)
    denominator = batching.step_denominator(documents, aggregation, max_length=10)
    found = batching.micro_batches(batching.pack_rows(rows, LENGTH, denominator=denominator, aggregation=aggregation), micro_batches)
    found = [batch.replace(preferences=(np.zeros_like(batch.loss_weight_BT),) * len(DIMENSIONS)) for batch in found]
  scalars = {'reference_point': point, 'temperature': scalar(name, np.float32(1.5))}
  return [batching.to_global(with_all_fields(batch), place).replace(**scalars) for batch in found]


def with_all_fields(batch):
  """Batches of one structure, so that one program takes them: padding has what its neighbors have, too."""
  fields = {f'{key}_BT': np.float32 for key in types.PER_TOKEN} | {f'{key}_BTJ': kind for key, kind in types.PER_TOKEN_WORDS.items()}
  shape = batch.tokens_BT.shape
  return batch.replace(**{key: np.zeros(shape + (NUM_WORDS,) * key.endswith('J'), kind) for key, kind in fields.items()
                          if getattr(batch, key) is None})


def step_gradient(name, loss, micro_batches, packed, aggregation='sequence_mean', alone=False):
  """The gradient of one optimizer step and its metrics; `alone`: by a learner of this loss only."""
  _, learner, trainable, frozen = setting(name, loss if alone else None)
  frozen = frozen if alone else {**frozen, CASE: scalar(name, np.int32(LOSSES.index(loss)))}
  total, metrics = None, None
  for batch in batches(name, loss.split()[0], micro_batches, packed, aggregation):
    grads, more = learner.gradient(trainable, frozen, batch)
    total = grads if total is None else learner.accumulate(total, grads)
    metrics = more if metrics is None else metrics_lib.merge(metrics, more)
  return jax.tree.map(np.asarray, total), metrics_lib.compute(metrics)


@functools.cache
def expected(loss, aggregation='sequence_mean'):
  return step_gradient('one', loss, 1, True, aggregation)


def check_step(found, wanted, bound=1e-6):
  check_equal(found[0], wanted[0], bound)
  assert found[1].keys() == wanted[1].keys()
  for key, value in wanted[1].items():
    assert found[1][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize('loss', LOSSES)
@pytest.mark.parametrize('name', [*MESHES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_MESHES)])
def test_gradient_is_the_same_however_a_step_is_split(name, loss):
  for micro_batches, packed in SPLITS:
    # Sums over 8 devices are rounded more often.
    check_step(step_gradient(name, loss, micro_batches, packed), expected(loss), 2e-6 if 'ulysses' in name else 1e-6)


@pytest.mark.parametrize('aggregation', [one for one in AGGREGATIONS if one != 'sequence_mean'])
@pytest.mark.parametrize('name', MESHES)
def test_other_aggregations_do_not_depend_on_the_split_either(name, aggregation):
  for micro_batches, packed in SPLITS:
    check_step(step_gradient(name, 'policy token', micro_batches, packed, aggregation), expected('policy token', aggregation))


@pytest.mark.parametrize('name, packed', [('seq2', True), ('data2_seq2', True), ('data2_seq2', False)])
def test_a_mesh_does_split_documents_and_rows(name, packed):
  batch = batches(name, 'policy', 1, packed, 'sequence_mean')[0]
  learned_BT = np.where(np.asarray(batch.loss_weight_BT) != 0, np.asarray(batch.segment_ids_BT), 0)
  halves = [{(int(row), int(part_BT[row, place])) for row, place in np.argwhere(part_BT)} for part_BT in np.split(learned_BT, 2, axis=1)]
  assert halves[0] & halves[1] and all(part_BT.any() for part_BT in np.split(learned_BT, 2))


@pytest.mark.parametrize('loss', ['taught full', 'critic'])
def test_the_program_of_all_losses_computes_each(loss):
  """Between them these two ask the model for all that any loss does."""
  found, metrics = expected(loss)
  wanted, wanted_metrics = step_gradient('one', loss, 1, True, alone=True)
  check_equal(found, wanted)
  assert all(metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6) for key, value in wanted_metrics.items())


def test_losses_and_aggregations_are_different_objectives():
  names = [loss for loss in LOSSES if 'preset_' not in loss] + [f'policy token, {other}' for other in AGGREGATIONS if other != 'sequence_mean']
  found = [expected(*name.split(', '))[0]['norm'] for name in names]
  for index, one in enumerate(found):
    for other, name in zip(found[:index], names):
      assert np.linalg.norm(one - other) > 1e-2 * min(np.linalg.norm(one), np.linalg.norm(other)), (names[index], name)


def test_what_drops_tokens_drops_some_of_them():
  for name, (key, _) in CROSSED.items():
    assert 0 < expected(f'policy {name}')[1][key] < 1, name
  assert 0 < expected('critic')[1]['value/clip_fraction'] < 1 and expected('texts kto')[1]['preference/reference_point_nats'] > 0


@pytest.mark.parametrize('configs, field, kinds', [
    (POLICY, 'kind', losses.Kind), (POLICY, 'ratio', losses.Ratio), (POLICY, 'importance_level', losses.ImportanceLevel),
    (POLICY, 'importance_mode', losses.ImportanceMode), (PREFERENCE, 'kind', losses_preference.Kind), (DISTILLATION, 'divergence', Divergence)])
def test_no_kind_is_left_out(configs, field, kinds):
  assert {getattr(config, field) for config in configs.values()} == set(get_args(kinds))


def test_every_preset_and_estimator_is_there():
  assert set(losses.KL_ESTIMATORS) == {config.kl_estimator for config in POLICY.values() if config.kl_coef}
  assert set(PRESETS.values()) <= set(POLICY.values())
