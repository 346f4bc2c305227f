"""Learning from comparisons end to end: batches, kept references, learning, and kill -9."""

import contextlib
import dataclasses
import functools
import json
from pathlib import Path
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from configs import dpo
from models import chat, sharding, transformer
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from rl import batching, checkpoint, comparisons, optimizer, policy, reference_logprobs, train_preference
from rl import config as config_lib
from rl import learner as learner_lib
from rl import metrics as metrics_lib
from rl.data.preferences import PreferenceFiles, Preferences
from rl.losses_preference import PreferenceLossConfig
from rl.reference_logprobs import ReferenceLogprobs, score_documents
from rl.types import Document
from tests import tiny, tiny_model

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 64
WORDS = tokenizer_lib.ByteTokenizer()
DIMENSIONS = {'harmless': 2.0, 'helpful': 1.0}
DPO = learner_lib.preference_loss(PreferenceLossConfig(beta=0.5), 8)


def rows(count=48, seed=0):
  """Letters of the first half of the alphabet are better than those of the second, and the prompt does not matter."""
  rng = np.random.default_rng(seed)

  def word(letters):
    return ''.join(rng.choice(list(letters), int(rng.integers(2, 6))))

  return [{'prompt': f'{int(rng.integers(10**4))}?', 'chosen': word('abcdefgh'), 'rejected': word('stuvwxyz'),
           'dimensions': {'helpful': float(rng.integers(1, 3)), 'harmless': float(rng.integers(0, 2))}} for _ in range(count)]


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  root = tmp_path_factory.mktemp('preferences')
  tiny_model.write_model(root / 'model', vocab_size=WORDS.vocab_size)
  (root / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows()))
  return root


@pytest.fixture(scope='module')
def encoders(files):
  """Encoders of the rows, a third of them held out."""
  with contextlib.ExitStack() as stack:
    found = {}
    for case, kept_apart, singly in (('pairs', True, False), ('singly', False, True)):
      settings = PreferenceFiles((str(files / 'rows.jsonl'),), DIMENSIONS if kept_apart else {}, heldout_fraction=0.3)
      data = stack.enter_context(Preferences(settings, kept_apart=kept_apart, singles=singly))
      found[case] = comparisons.Encoder(data, WORDS, chat.TEMPLATES['plain'], LENGTH, 'drop', singly)
    yield found


# Batches.


def test_the_texts_of_a_pair_are_neighbors_and_weigh_its_share_of_the_step(encoders):
  encode = encoders['pairs']
  plan = next(comparisons.plans(comparisons.stream(encode.data, encode, seed=0, position=0), 4, LENGTH, 3))
  halved = dataclasses.replace(plan.texts[1], weight=0.5)
  plan = dataclasses.replace(plan, texts=(plan.texts[0], halved, *plan.texts[2:]))
  step = comparisons.lay_out(plan, rows=2, length=LENGTH, host_rows=slice(0, 2), mean=True)
  assert step.num_comparisons == len(plan.texts) and len(step.batches) == 2 and step.documents == plan.position
  for number, indices in enumerate(plan.assignment):
    batch, row = step.batches[number // 2], number % 2
    assert batch.segment_ids_BT[row].max() == 2 * len(indices) <= 6
    for place, index in enumerate(indices):
      texts = plan.texts[index]
      for side, document in enumerate(texts.documents):
        own = batch.segment_ids_BT[row] == 2 * place + side + 1
        np.testing.assert_array_equal(batch.tokens_BT[row, own], document.tokens_T)
        assert batch.loss_weight_BT[row, own].sum() == pytest.approx(texts.weight / (2 * len(plan.texts)))
        assert [array[row, own].tolist() for array in batch.preferences] == [[value] * own.sum() for value in texts.preferences[side]]
  # The reply alone is learned, up to its end.
  text = plan.texts[0].documents[0]
  item = encode.data[plan.texts[0].row]
  assert WORDS.decode(text.tokens_T[text.loss_mask_T][:-1]) == item.replies[0][0]['content'] and text.tokens_T[-1] == WORDS.eos_id


def test_steps_cover_the_stream_and_do_not_depend_on_where_they_start(encoders):
  encode = encoders['pairs']

  def plans(position):
    return comparisons.plans(comparisons.stream(encode.data, encode, seed=3, position=position), 2, LENGTH, 4)

  whole = [plan for _, plan in zip(range(12), plans(0))]
  taken = [texts.row for plan in whole for texts in plan.texts]
  assert taken == [encode.data.at(position, 3) for position in range(whole[-1].position)]
  again = next(plans(whole[4].position))
  assert [texts.row for texts in again.texts] == [texts.row for texts in whole[5].texts] and again.position == whole[5].position
  heldout = list(comparisons.plans(comparisons.stream(encode.data, encode, seed=3, position=0, split='heldout'), 2, LENGTH, 4))
  assert [texts.row for plan in heldout for texts in plan.texts] == encode.data.rows['heldout'].tolist()


def test_what_does_not_fit_is_counted_or_refused(encoders):
  encode = dataclasses.replace(encoders['pairs'], length=22)
  sizes = [sum(len(document.tokens_T) for document in encoders['pairs'](row).documents) for row in encode.data.rows['train']]
  plan = list(comparisons.plans(((row, encode(row)) for row in encode.data.rows['train']), 100, 22, 4))[0]
  assert 0 < len(plan.texts) == sum(size <= 22 for size in sizes) and plan.num_dropped == sum(size > 22 for size in sizes) > 0
  with pytest.raises(ValueError, match=r'rows.jsonl row \d+: its texts have \d+ tokens, a row holds length=22; raise data.length'):
    for row in encode.data.rows['train']:
      dataclasses.replace(encode, overlong='error')(row)
  with pytest.raises(ValueError, match=r'comparisons in a row were dropped, because their texts together do not fit data.length=5'):
    next(comparisons.stream(encode.data, dataclasses.replace(encode, length=5), seed=0, position=0))
    list(comparisons.plans(comparisons.stream(encode.data, dataclasses.replace(encode, length=5), seed=0, position=0), 2, 5, 4))


def test_single_texts_have_labels_and_an_answer_to_another_prompt(encoders):
  encode = encoders['singly']
  texts = encode(int(encode.data.rows['train'][0]))
  other = encode.data[encode.data.other_prompts[texts.row]]
  assert texts.preferences == ((1.0,), (-1.0,))
  mismatched = texts.mismatched
  # Of every other row the rejected reply, so that the reference point does not follow one kind alone.
  reply = other.replies[encode.data.other_prompts[texts.row] % 2]
  assert WORDS.decode(mismatched.tokens_T[mismatched.loss_mask_T][:-1]) == reply[0]['content']
  num_prompt = int(np.argmax(mismatched.loss_mask_T))
  np.testing.assert_array_equal(mismatched.tokens_T[:num_prompt], texts.documents[0].tokens_T[:num_prompt])
  plan = next(comparisons.plans(comparisons.stream(encode.data, encode, seed=0, position=0), 4, LENGTH, 4))
  step = comparisons.lay_out(plan, rows=2, length=LENGTH, host_rows=slice(0, 2), mean=True)
  assert sum(np.count_nonzero(batch.loss_weight_BT) for batch in step.mismatched) == batching.num_targets(
      texts.mismatched for texts in plan.texts)


def test_what_making_a_step_raises_is_raised_where_it_is_wanted():
  def items():
    yield 1
    raise ValueError('row 7')

  found = comparisons.prefetched(items())
  assert next(found) == 1
  with pytest.raises(ValueError, match='row 7'):
    next(found)
  assert list(comparisons.prefetched(iter(range(5)))) == [0, 1, 2, 3, 4]


# References.


def test_reference_logprobs_are_kept_by_row_and_read_back(encoders, tmp_path, monkeypatch):
  encode = encoders['singly']
  place = batching.Place.of(sharding.TRAIN, sharding.make_mesh(devices=jax.devices()[:1]))
  numbers = encode.data.rows['train'].tolist()
  calls = []

  def score(batch):
    calls.append(batch)
    return -batch.targets_BT.astype('float32') - batch.positions_BT / 128

  def check(kept, rows):
    for row in rows:
      texts = kept.attach(encode(row))
      for document in texts.all_documents:
        learned = np.flatnonzero(document.loss_mask_T)
        found = document.per_token['reference_logprobs']
        np.testing.assert_array_equal(found[learned], -document.tokens_T[learned] - np.float32(learned - 1) / 128)
        assert np.isnan(np.delete(found, learned)).all()

  monkeypatch.setattr(reference_logprobs, '_PART_TOKENS', 200)
  kept = ReferenceLogprobs(tmp_path, {'model': 'one'})
  kept.score(map(encode, numbers[:10]), score, place, 2, LENGTH)
  check(kept, numbers[:10])
  num_parts = len(list(tmp_path.rglob('*.index.npy')))
  assert num_parts > 1
  # A part without its index was being written when the run was killed.
  last = sorted(tmp_path.rglob('*.index.npy'))[-1]
  last.unlink()
  again = ReferenceLogprobs(tmp_path, {'model': 'one'})
  missing = [row for row in numbers[:12] if row not in again]
  assert 2 < len(missing) < 12
  calls.clear()
  again.score(map(encode, missing), score, place, 2, LENGTH)
  check(ReferenceLogprobs(tmp_path, {'model': 'one'}), numbers[:12])
  assert len(calls) > 0 and numbers[0] not in ReferenceLogprobs(tmp_path, {'model': 'another'})


# Learning.

VARIANTS = {name: config_lib.build(PreferenceLossConfig, dpo.get_config(f'variant={name}').loss) for name in dpo.VARIANTS}


@functools.cache
def setting(loss):
  """Return (place, learner, trainable, frozen) of a model of one layer."""
  config = tiny.config(vocab_size=WORDS.vocab_size, num_layers=1, layer_pattern=('global',))
  mesh, layout = sharding.make_mesh(devices=jax.devices()[:1]), sharding.TRAIN
  rate = optimizer.OptimizerConfig(learning_rate=3e-3, schedule='constant')
  learner = learner_lib.build(config, layout, mesh, optimizer.build(rate, 99), optimizer.schedule(rate, 99), full=True, loss=loss)
  params = params_lib.init(transformer.declare(config), 0, mesh, layout)
  return batching.Place.of(layout, mesh), learner, *params_lib.split(params, lambda _: True)


@pytest.fixture(scope='module')
def material(encoders):
  """Case -> (training batch, held-out batch, batches of mismatched texts), with references of the initial model, and its learner."""
  place, learner, trainable, frozen = setting(DPO)
  found = {}
  for case, encode in encoders.items():
    def laid_out(split, encode=encode):
      texts = [encode(int(row)) for row in encode.data.rows[split]]
      documents = [document for item in texts for document in item.all_documents]
      values = iter(score_documents(documents, lambda batch: learner.score(trainable, frozen, batch).logprobs_BT, place, 8, LENGTH))
      kept = []
      for item in texts:
        made = [Document(document.tokens_T, document.loss_mask_T, document.source, {'reference_logprobs': spread(document, next(values))})
                for document in item.all_documents]
        kept.append(dataclasses.replace(item, documents=tuple(made[:2]), mismatched=made[2] if item.mismatched else None))
      plan = next(comparisons.plans(enumerate(kept), 8, LENGTH, 4))
      step = comparisons.lay_out(plan, rows=8, length=LENGTH, host_rows=slice(0, 8), mean=True)
      return (batching.to_global(step.batches[0], place), [batching.to_global(batch, place) for batch in step.mismatched], len(plan.texts))
    found[case] = {split: laid_out(split) for split in ('train', 'heldout')}
  return found


def spread(document, values):
  array_T = np.full(document.tokens_T.shape, np.nan, np.float32)
  array_T[document.loss_mask_T] = values
  return array_T


def learn(loss, material, num_updates=8):
  """Return the metrics of the held-out comparisons before and after some plain steps down the gradient."""
  place, learner, params, frozen = setting(loss)
  scorer = setting(DPO)[1]

  def metrics_and_gradient(split):
    batch, others, num_texts = material[split]
    if others:
      logprobs = [scorer.score(params, frozen, other).logprobs_BT for other in others]
      with jax.set_mesh(place.sharding.mesh):
        batch = batch.replace(reference_point=train_preference._reference_point(logprobs, others, num_texts))
    grads, metrics = learner.gradient(params, frozen, batch)
    return metrics_lib.compute(metrics), grads

  before = metrics_and_gradient('heldout')[0]
  for _ in range(num_updates):
    grads = metrics_and_gradient('train')[1]
    rate = 0.3 / float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grads))))
    params = jax.tree.map(lambda leaf, grad, rate=rate: leaf - rate * grad, params, grads)
  return before, metrics_and_gradient('heldout')[0]


@pytest.mark.parametrize('variant', VARIANTS)
def test_heldout_accuracy_goes_up(variant, material):
  config = VARIANTS[variant]
  before, after = learn(learner_lib.preference_loss(config, 8), material['pairs' if config.is_paired else 'singly'])
  accuracies = [values['preference/accuracy'] for values in (before, after)]
  assert accuracies[1] >= 0.9 and accuracies[1] > accuracies[0] + 0.2, accuracies
  gains = [values['preference/reward_chosen'] - values['preference/reward_rejected'] for values in (before, after)]
  assert gains[1] > gains[0] and gains[1] > 0
  if config.has_reference and config.is_paired:
    assert accuracies[0] == 0.5  # The policy is the reference yet.


# Whole runs.


def settings(files):
  return {
      'model.path': str(files / 'model'), 'data.paths': (str(files / 'rows.jsonl'),), 'data.heldout_fraction': 0.3, 'data.rows': 4,
      'data.length': LENGTH, 'data.max_segments': 8, 'data.micro_batches': 1, 'num_steps': 12, 'checkpoint_every_steps': 2, 'eval_every_steps': 6,
      'eval_comparisons': 0, 'layout.remat': 'none', 'layout.compute_dtype': 'float32', 'mesh.data': 1, 'mesh.fsdp': 1,
      'optimizer.learning_rate': 3e-3, 'optimizer.warmup_steps': 2}


def configured(record, config, files, changes):
  config.update_from_flattened_dict(settings(files) | {'mesh.data': 8, 'data.rows': 8} | changes)
  return config_lib.build(record, config)


def records(workdir):
  path = workdir / 'metrics.jsonl'
  found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  return [{key: value for key, value in record.items() if not key.startswith(('speed/', 'time_s'))} for record in found]


def command(files, workdir):
  return [sys.executable, '-m', 'launch.train', '--config=configs/dpo.py:variant=kto', f'--workdir={workdir}',
          *(f'--config.{key}={value}' for key, value in settings(files).items())]


def test_kill_9_changes_nothing(files):
  """KTO, which has everything: references, texts with other replies, a reference point of the step."""
  whole = files / 'whole'
  done = subprocess.run(command(files, whole), cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
  assert done.returncode == 0, done.stderr
  assert 'Scoring the texts of' in done.stderr and 'accuracy' in done.stderr
  killed = files / 'killed'
  process = subprocess.Popen(command(files, killed), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  deadline = time.time() + 400
  while len(records(killed)) < 7 and process.poll() is None and time.time() < deadline:
    time.sleep(0.002)
  process.kill()
  process.wait()
  assert 7 <= len(records(killed)) < 14 and 0 < checkpoint.committed_steps(killed / 'checkpoints')[-1] < 12
  done = subprocess.run(command(files, killed), cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
  assert done.returncode == 0 and 'Scoring the texts of' not in done.stderr, done.stderr
  assert records(killed) == records(whole) and len(records(whole)) == 14
  assert [record['heldout/loss'] for record in records(whole) if 'heldout/loss' in record][1] < 0.5
  states = [checkpoint_arrays(workdir) for workdir in (whole, killed)]
  jax.tree.map(np.testing.assert_array_equal, *states)


def checkpoint_arrays(workdir):
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  assert checkpoint.committed_steps(workdir / 'checkpoints')[-1] == 12
  return jax.tree.map(np.asarray, policy.load(workdir, mesh, sharding.TRAIN, 'float32').params)


def test_the_reference_of_a_lora_run_is_the_base_alone(files, tmp_path):
  changes = {'lora.rank': 4, 'model.frozen_dtype': 'float32'}
  with contextlib.ExitStack() as stack:
    stage, trainable = train_preference.make_stage(configured(train_preference.PreferenceConfig, dpo.get_config(), files, changes), stack)
    stage.prepare(tmp_path, trainable)
    values = stage.evaluate(trainable)
    assert values['heldout/loss'] == pytest.approx(np.log(2), abs=1e-6) and abs(values['heldout/margin']) < 1e-6
    moved = stage.evaluate(jax.tree.map(lambda leaf: leaf + 0.1, trainable))
    assert abs(moved['heldout/margin']) > 1e-2 and moved['heldout/comparisons'] == stage.encode.data.rows['heldout'].size


@pytest.mark.parametrize('changes, message', [
    ({'data.heldout_fraction': 0.0}, 'eval_every_steps=6 evaluates on held-out rows'),
    ({'data.max_segments': 3}, 'max_segments=3 must be even'),
    ({'data.length': 0}, 'length=0 must be at least 1'),
    ({'loss.kind': 'simpo'}, "reduce='sum' with kind='simpo'"),
    ({'num_steps': 0}, 'num_steps=0 must be at least 1'),
])
def test_mistakes_are_said_before_anything_is_made(files, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    train_preference.run(configured(train_preference.PreferenceConfig, dpo.get_config(), files, changes), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
