"""Distillation end to end on a toy whose answer is verified: a student of one layer of its teacher, on given texts and on its own samples.

Its students are whole or adapters on a frozen, quantized base; a run goes on after a kill as if nothing had happened, on any mesh.
"""

from collections import Counter
import dataclasses
import json
import math
import shutil
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import distill
from envs.core import Outcome
from launch import convert, teacher_texts
from models import adapter_files, hf_weights, lora, sharding, student, transformer
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from rl import checkpoint, policy, train, train_distillation, train_rl
from rl import config as config_lib
from rl import learner as learner_lib
from rl import teacher as teacher_lib
from rl.curriculum import DomainConfig
from rl.data.tasks import TaskConfig
from rl.losses_distillation import DistillationLossConfig, TeacherConfig, TeacherSource
from rl.optimizer import OptimizerConfig
from rl.rl_config import AdvantageConfig, EvalConfig, RLConfig
from rl.rollout.worker import RolloutConfig
from rl.run import LayoutConfig, LoraConfig, MeshConfig, ModelSource
from rl.train_distillation import DistillationConfig
from tests import checkpoints, tiny_model, toys

LAYOUT, MESH = LayoutConfig(compute_dtype='float32', scan=False), MeshConfig(data=1, fsdp=1)


@pytest.fixture(scope='module', autouse=True)
def few_devices():
  """Meshes take the devices that they need, where others would have to have all."""
  make_mesh = sharding.make_mesh

  def on_the_first(**sizes):
    count = math.prod(value for name, value in sizes.items() if name != 'devices')
    return make_mesh(**sizes | {'devices': jax.devices()[:count]})

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'make_mesh', on_the_first)
    yield


@pytest.fixture(scope='module')
def files(tmp_path_factory, few_devices):
  """A teacher's run that was shown how to answer, its second layer as a student, and the texts it was shown."""
  root = tmp_path_factory.mktemp('distillation')
  rows = [[dict(message) for message in toys.echo().demonstration('train', 1, index)] for index in range(1000)]
  (root / 'rows.jsonl').write_text(''.join(json.dumps({'messages': row}) + '\n' for row in rows))
  train.run(train.TrainConfig(
      model=ModelSource(str(tiny_model.write_model(root / 'model'))), data=data(root, heldout_fraction=0.0), num_steps=120, mesh=MESH,
      layout=LAYOUT, optimizer=OptimizerConfig(learning_rate=1e-2, schedule='linear'), checkpoint_every_steps=1000), root / 'teacher')
  taught = policy.load(root / 'teacher', sharding.make_mesh(), sharding.TRAIN, 'float32')
  params, config = student.slice_layers(taught.params, taught.config, (1,))
  hf_weights.export(root / 'student', config, params, dtype='float32', tokenizer=taught.tokenizer)
  return root


def data(root, heldout_fraction=0.1):
  return train.DataConfig({'train': TaskConfig(paths=(str(root / 'rows.jsonl'),), schema='chat', heldout_fraction=heldout_fraction)}, rows=4,
                          length=128)


def offline_config(root, **changes):
  return DistillationConfig(**{
      'model': ModelSource(str(root / 'student')), 'teacher': TeacherSource(str(root / 'teacher'), 'float32'), 'data': data(root),
      'num_steps': 30, 'mesh': MESH, 'layout': LAYOUT, 'optimizer': OptimizerConfig(learning_rate=5e-3, schedule='constant'),
      'eval_every_steps': 30, 'eval_documents': 20} | changes)


def online_config(root, **changes):
  rollout = RolloutConfig(max_new_tokens=2, max_length=40, slots=64, steps_per_launch=2, prefill_chunk=32, min_group_size=1)
  return RLConfig(**{
      'model': ModelSource(str(root / 'student')), 'domains': {'tests/toys:echo': DomainConfig()}, 'num_steps': 20, 'aggregation': 'token_mean',
      'groups': 64, 'group_size': 1, 'rows': 8, 'length': 64, 'rollout': rollout, 'layout': LAYOUT, 'mesh': MESH,
      'advantage': AdvantageConfig('none', 'none'), 'optimizer': OptimizerConfig(learning_rate=5e-3, schedule='constant'),
      'teacher': TeacherConfig(str(root / 'teacher'), 'float32', divergence='full', reward_coef=0.0),
      'eval': EvalConfig(every_steps=20, problems=200, temperature=1.0)} | changes)


def metrics(workdir):
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def held_out(workdir):
  return {record['step']: record['heldout/pass@1'] for record in metrics(workdir) if 'heldout/pass@1' in record}


@pytest.mark.parametrize('divergence', ['full', 'sampled'])
def test_on_policy_distillation_closes_the_gap_to_the_teacher(files, divergence):
  """No reward is paid: what the student learns of the task is the teacher's alone."""
  steps = {'full': 20, 'sampled': 30}[divergence]
  teacher = TeacherConfig(str(files / 'teacher'), 'float32', divergence=divergence, reward_coef=0.0)
  config = online_config(files, teacher=teacher, num_steps=steps, eval=EvalConfig(steps, 200, 1.0))
  train_rl.run(config, files / divergence)
  rates = held_out(files / divergence)
  # The teacher is right at most always, so the gap is at most what is missing to 1.
  assert rates[0] < 0.4 and (rates[steps] - rates[0]) / (1 - rates[0]) > 0.8
  # Samples that got no reward are learned from too.
  assert all(record['train/target_tokens'] >= 64 for record in metrics(files / divergence) if 'train/loss' in record)
  name = {'full': 'teacher/reverse_kl_nats', 'sampled': 'teacher/sampled_kl_nats'}[divergence]
  divergences = [record[name] for record in metrics(files / divergence) if name in record]
  assert len(divergences) == steps and np.mean(divergences[-5:]) < 0.1 * divergences[0]
  other = dataclasses.replace(teacher, path=str(files / 'model'))
  with pytest.raises(ValueError, match='lineage.teacher'):
    train_rl.run(dataclasses.replace(config, teacher=other), files / divergence)


@pytest.fixture(scope='module')
def kept(files):
  """A run that keeps the teacher's four likeliest words."""
  config = offline_config(files, loss=DistillationLossConfig(top_k=4), checkpoint_every_steps=10, checkpoints_kept=5)
  return config, train_distillation.run(config, files / 'kept')


def test_texts_make_the_student_agree_with_its_teacher(files, kept):
  _, results = kept
  first = next(record for record in metrics(files / 'kept') if 'distillation/agreement' in record)
  assert first['distillation/agreement'] < 0.75 < 0.9 < results['heldout/agreement']
  assert results['heldout/divergence_nats'] < 0.25 * first['distillation/divergence_nats']
  held = train_distillation.run(offline_config(files, loss=DistillationLossConfig(alpha=0.9, temperature=3.0, final_temperature=1.0)),
                                files / 'held')
  temperatures = [record['distillation/temperature'] for record in metrics(files / 'held') if 'distillation/temperature' in record]
  np.testing.assert_allclose(temperatures, np.linspace(3, 1, 30), rtol=1e-6)
  assert held['heldout/agreement'] > 0.9 and held['heldout/divergence_nats'] < 0.25 * first['distillation/divergence_nats']


# Students that are adapters.


LORA = LoraConfig(rank=8)
FAST = OptimizerConfig(learning_rate=1e-2, schedule='constant')


def of_adapters(files, case):
  """Return the settings of a LoRA run: its base, quantized or not, its teacher and how it learns from it."""
  base, dtype, loss = {
      'held': ('student', 'int8', DistillationLossConfig()),
      'kept': ('student', 'bfloat16', DistillationLossConfig(top_k=4)),
      # The teacher is a run of the student's own base.
      'same_base': ('model', 'int8', DistillationLossConfig(alpha=1.0, temperature=1.0))}[case]
  return offline_config(files, model=ModelSource(str(files / base), frozen_dtype=dtype), lora=LORA, optimizer=FAST, loss=loss,
                        eval_every_steps=10, checkpoint_every_steps=10, checkpoints_kept=5)


def without_times(workdir):
  return [{key: value for key, value in record.items() if not key.startswith(('speed/', 'timing_s/', 'time_s', 'rollout/tokens_per_s'))}
          for record in metrics(workdir)]


def check_that_it_resumes(run, config, whole, killed, step):
  """Run again from a checkpoint of a finished run, from a copy where all that came later never was."""
  shutil.copytree(whole, killed)
  for later in checkpoint.committed_steps(whole / 'checkpoints'):
    if later > step:
      shutil.rmtree(killed / 'checkpoints' / str(later))
  assert checkpoint.committed_steps(killed / 'checkpoints')[-1] == step
  run(config, killed)
  assert without_times(killed) == without_times(whole) and len(without_times(whole)) > config.num_steps
  checkpoints.check_equal(killed, whole, config.num_steps)


@pytest.mark.parametrize('case', ['held', 'kept', pytest.param('same_base', marks=pytest.mark.slow)])
def test_adapters_learn_from_a_teacher_and_resume(files, case):
  config, workdir = of_adapters(files, case), files / f'adapters_{case}'
  stage, trainable = train_distillation.set_up(config, workdir)
  stage.prepare(workdir, trainable)
  before = stage.evaluate(trainable)
  names = [name for name, _ in params_lib.named_leaves(trainable)]
  assert len(names) == 14 and all(map(lora.is_trainable, names))
  after = train_distillation.run(config, workdir)
  assert before['heldout/agreement'] < 0.6 and after['heldout/agreement'] > 0.9
  assert after['heldout/divergence_nats'] < 0.25 * before['heldout/divergence_nats']
  losses = [record['train/loss'] for record in metrics(workdir) if 'train/loss' in record]
  assert len(losses) == 30 and np.mean(losses[-5:]) < 0.25 * losses[0]
  check_that_it_resumes(train_distillation.run, config, workdir, files / f'adapters_{case}_killed', 10)


def test_adapters_are_exported_alone_and_merged(files):
  """The run on the int8 base of `test_adapters_learn_from_a_teacher_and_resume`, made again if that did not."""
  workdir = files / 'adapters_held'
  train_distillation.run(of_adapters(files, 'held'), workdir)
  tuned = policy.load(workdir, sharding.make_mesh(), sharding.TRAIN, 'float32')
  assert learner_lib.TEACHER not in tuned.params and not any(
      params_lib.is_lora(leaf) for _, leaf in params_lib.named_leaves(tuned.params, is_leaf=params_lib.is_lora))
  convert.convert(str(workdir), str(files / 'merged'), 'float32')
  _, merged = hf_weights.load(files / 'merged', sharding.make_mesh(), sharding.TRAIN, 'float32')
  jax.tree.map(np.testing.assert_array_equal, merged, tuned.params)
  convert.convert(str(workdir), str(files / 'adapter'), adapter=True)
  table = json.loads((files / 'adapter' / adapter_files.CONFIG_FILE).read_text())
  assert (table['r'], table['lora_alpha'], table['use_rslora']) == (8, 16, True)
  assert table['base_model_name_or_path'] == str(files / 'student')
  tensors = load_file(files / 'adapter' / adapter_files.WEIGHTS_FILE)
  name = 'base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight'
  update = 16 / math.sqrt(8) * tensors[name.format('B')] @ tensors[name.format('A')]
  # What int8 makes of the base is a small part of what was learned.
  base = hf_weights.load(files / 'student', sharding.make_mesh(), sharding.TRAIN, 'float32')[1]['blocks']['mlp']['up'][0]
  learned = np.asarray(tuned.params['blocks']['mlp']['up'][0] - base)
  assert np.linalg.norm(learned - update.T) < 0.1 * np.linalg.norm(update)


def test_adapters_learn_from_a_teacher_on_policy_and_resume(files):
  config = online_config(files, model=ModelSource(str(files / 'student'), frozen_dtype='int8'), lora=LORA, optimizer=FAST,
                         checkpoint_every_steps=10, checkpoints_kept=5)
  workdir = files / 'online_adapters'
  train_rl.run(config, workdir)
  rates = held_out(workdir)
  assert rates[0] < 0.4 and (rates[20] - rates[0]) / (1 - rates[0]) > 0.8
  check_that_it_resumes(train_rl.run, config, workdir, files / 'online_adapters_killed', 10)


MESHES = {'data2': {'data': 2}, 'seq2': {'seq': 2}, 'fsdp2': {'fsdp': 2}}


def first_losses(files, workdir, kept, **sizes):
  """Return what the first steps of a run say: of a whole student with its teacher, or of adapters with words kept."""
  changes = {'model': ModelSource(str(files / 'student'), frozen_dtype='int8'), 'lora': LORA} if kept else {}
  run_config = offline_config(files, loss=DistillationLossConfig(top_k=4 * kept), num_steps=3, eval_every_steps=0, optimizer=FAST,
                              mesh=MeshConfig(**{'data': 1, 'fsdp': 1} | sizes), **changes)
  train_distillation.run(run_config, workdir)
  return [{key: value for key, value in record.items() if not key.startswith('data/')} for record in without_times(workdir)]


# How a step with a held teacher is split is in test_invariance too.
@pytest.mark.parametrize('kept', [pytest.param(False, marks=pytest.mark.slow), True], ids=['held', 'kept'])
def test_losses_do_not_depend_on_the_mesh(files, tmp_path, kept):
  wanted = first_losses(files, tmp_path / 'one', kept)
  assert len(wanted) == 3 and wanted[2]['train/loss'] < 0.9 * wanted[0]['train/loss']
  for name, sizes in MESHES.items():
    got = first_losses(files, tmp_path / name, kept, **sizes)
    for one, other in zip(got, wanted, strict=True):
      assert one == pytest.approx(other, rel=2e-4, abs=1e-5), name


def test_words_are_kept_so_that_the_teacher_is_not_needed_again(files, kept, monkeypatch):
  config, wanted = kept

  def never(*_):
    raise RuntimeError('The teacher was loaded.')

  stage, trainable = train_distillation.set_up(config, files / 'kept')
  assert learner_lib.TEACHER not in stage.frozen
  held, _ = train_distillation.set_up(offline_config(files), files / 'not_run')
  # Kept words cost a step nothing; a held teacher has two of the student's layers, and its forward pass is computed in each.
  forward = transformer.num_forward_flops_per_token(policy.read_config(files / 'teacher'), 64)
  assert held.flops_per_token(64) == stage.flops_per_token(64) + forward > stage.flops_per_token(64) > forward
  monkeypatch.setattr(teacher_lib.Teacher, 'load', never)
  stage.prepare(files / 'kept', trainable)
  # The same run again, from the words of the first: bit for bit.
  copied = files / 'again'
  (copied / train_distillation.WORDS).mkdir(parents=True)
  for directory in (files / 'kept' / train_distillation.WORDS).iterdir():
    (copied / train_distillation.WORDS / directory.name).symlink_to(directory)
  assert train_distillation.run(config, copied) == wanted


def test_a_distilled_student_is_a_policy(files, kept):
  loaded = policy.load(files / 'kept', sharding.make_mesh(), sharding.TRAIN, 'float32')
  assert loaded.config.num_layers == 1 and learner_lib.TEACHER not in loaded.params
  assert policy.read_config(files / 'kept') == loaded.config
  assert policy.fingerprint(files / 'kept') != policy.fingerprint(files / 'teacher')


@pytest.mark.parametrize(('change', 'message'), [
    ({'teacher': TeacherSource()}, "teacher.path='' names no teacher"),
    ({'loss': DistillationLossConfig(top_k=1000)}, 'loss.top_k=1000 is more than the 261 words of the vocabulary'),
])
def test_settings_that_do_not_fit_are_refused(files, tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    train_distillation.set_up(offline_config(files, **change), tmp_path)


def test_texts_that_are_cut_cannot_be_kept(files):
  cut = dataclasses.replace(data(files), overlong='truncate')
  with pytest.raises(ValueError, match="loss.top_k=4 keeps the teacher's words of whole texts, and data.overlong='truncate' cuts them"):
    offline_config(files, data=cut, loss=DistillationLossConfig(top_k=4))


def test_a_teacher_of_another_vocabulary_is_refused(files, tmp_path):
  mesh, source = sharding.make_mesh(), policy.read_config(files / 'student')
  words = tokenizer_lib.load(files / 'student')
  tiny_model.write_model(tmp_path / 'wide', vocab_size=300)
  with pytest.raises(ValueError, match='has 300 words in its vocabulary and the student 261.*launch.prepare_data --teacher'):
    teacher_lib.find(TeacherSource(str(tmp_path / 'wide')), source, words, mesh, sharding.TRAIN)
  other = type('Other', (), {'fingerprint': 'f' * 64})()
  with pytest.raises(ValueError, match='has another tokenizer .* than the student .ffffffffffff.'):
    teacher_lib.find(TeacherSource(str(files / 'teacher')), source, other, mesh, sharding.TRAIN)


def test_a_teacher_writes_texts(files):
  domain, rollout = toys.echo(), RolloutConfig(max_new_tokens=2, max_length=40, slots=16, steps_per_launch=2, prefill_chunk=32)
  problems = [domain.problem('train', 1, index) for index in range(24)]
  settings = teacher_texts.TeacherConfig(str(files / 'teacher'), dtype='float32', samples=2, temperature=1.0, verified=True)
  counts = Counter()
  rows = list(teacher_texts.conversations(settings, domain, problems, rollout, counts, domain_settings={}, output=None))
  assert counts['kept'] == len(rows) >= 20 and counts['written twice'] >= 20
  assert sum(counts[cause] for cause in ('kept', 'written twice', 'wrong', 'cut off', 'not graded')) == 48
  assert all([message['role'] for message in row] == ['user', 'assistant'] and row[1]['content'] == row[0]['content'][0] for row in rows)
  questions = [row[0]['content'] for row in rows]
  assert questions == [problem.messages[0]['content'] for problem in problems if problem.messages[0]['content'] in set(questions)]


def test_texts_are_kept_by_what_became_of_them():
  def trajectory(reply, reward=1.0, outcome=Outcome.OK):
    return types.SimpleNamespace(messages=({'role': 'user', 'content': 'a?'}, {'role': 'assistant', 'content': reply}), reward=reward,
                                 outcome=outcome, is_valid=outcome.is_valid, truncated=outcome == Outcome.LENGTH)

  group = types.SimpleNamespace(trajectories=[trajectory('a'), trajectory('a'), trajectory('b', 0.5), trajectory('c', 1.0, Outcome.LENGTH),
                                              trajectory('d', None, Outcome.ENV_ERROR)])
  for verified, wanted in ((False, ['a', 'b']), (True, ['a'])):
    counts = Counter()
    assert [one.messages[1]['content'] for one in teacher_texts.kept(group, verified, counts)] == wanted
    assert counts == Counter(kept=len(wanted), **{'written twice': 1, 'cut off': 1, 'not graded': 1, 'problems with a text': 1},
                             **({'wrong': 1} if verified else {}))
  for change, message in (({'samples': 2}, 'samples=2 at temperature=0 would all be the same text'),
                          ({'samples': 0}, 'samples=0 must be at least 1'), ({'chat_template': 'x'}, "chat_template='x' is unknown; use one")):
    with pytest.raises(ValueError, match=message):
      teacher_texts.TeacherConfig('teacher', **change)


def test_the_shipped_settings():
  assert config_lib.build(DistillationConfig, distill.get_config()).loss.temperature == 2
  online = config_lib.build(RLConfig, distill.get_config('variant=on_policy'))
  assert online.teacher.divergence == 'full' and online.teacher.reward_coef == 0
  with pytest.raises(ValueError, match='distill.py:other asks for an unknown variant'):
    distill.get_config('other')
