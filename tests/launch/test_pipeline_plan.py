"""The plan of a pipeline: who starts from whom, flags that give exactly the settings wanted, and mistakes of any stage said at once."""

import ast

from absl import flags
from ml_collections import config_flags
import pytest

from configs import pipeline
from launch import pipeline_plan
from launch.pipeline_plan import PipelineConfig
from rl import config as config_lib
from tests import tiny, tiny_model


def build(arg='size=tiny', **changes):
  config = pipeline.get_config(arg)
  config.student_layers = (1,)
  config.model.path = 'base_model'
  config.update_from_flattened_dict({key.replace('__', '.'): value for key, value in changes.items()})
  return config_lib.build(PipelineConfig, config)


def actions(stages):
  return {action.name: action for stage in stages for action in stage.actions}


def test_each_stage_starts_from_the_policy_before_it():
  stages = pipeline_plan.plan(build(), 'p')
  assert [(stage.name, stage.parent) for stage in stages] == [
      ('base', ''), ('sft', 'base'), ('reward', 'sft'), ('preference', 'sft'), ('rlvr', 'preference'), ('student', 'rlvr')]
  found = actions(stages)
  assert list(found) == [
      'base/evaluate', 'data/mixture', 'sft/train', 'sft/export', 'sft/evaluate', 'data/pairs_sft', 'reward/train', 'preference/train',
      'preference/export', 'preference/evaluate', 'rlvr/train', 'rlvr/export', 'rlvr/evaluate', 'student/start', 'student/train',
      'student/export', 'student/evaluate']
  assert found['sft/train'].inputs == ('base_model', 'p/data/mixture') and found['sft/train'].output == 'p/sft'
  assert found['data/pairs_sft'].inputs == ('p/models/sft',)
  assert found['preference/train'].inputs == ('p/models/sft', 'p/data/pairs_sft.jsonl')
  assert found['rlvr/train'].inputs == ('p/models/preference',) and found['rlvr/train'].last_step == 4
  assert [stage.model for stage in stages] == ['base_model', 'p/models/sft', '', 'p/models/preference', 'p/models/rlvr',
                                              'p/models/student']


def test_the_student_starts_from_layers_of_its_teacher():
  found = actions(pipeline_plan.plan(build(), 'p'))
  assert found['student/start'].command[2:] == ('--source=p/models/rlvr', '--target=p/models/student_start', '--dtype=float32', '--layers=1',
                                                '--overwrite')
  assert found['student/train'].inputs == ('p/models/student_start', 'p/models/rlvr', 'p/data/mixture')
  assert '--config.teacher.path=p/models/rlvr' in found['student/train'].command
  assert '--config.model.path=p/models/student_start' in found['student/train'].command
  model = tiny.config(num_layers=7, layer_pattern=('local', 'local', 'global'))
  assert pipeline_plan.every_second(model) == (0, 2, 3, 6)


def test_rlvr_may_be_paid_by_the_reward_model_before_it():
  found = actions(pipeline_plan.plan(build(rlvr__reward__source_weight=0.5), 'p'))
  assert "--config.reward_model.paths=('p/reward',)" in found['rlvr/train'].command
  assert found['rlvr/train'].inputs == ('p/models/preference', 'p/reward')
  assert found['student/train'].inputs == ('p/models/student_start', 'p/models/rlvr', 'p/data/mixture')
  with pytest.raises(ValueError, match='source_weight=0.5'):
    pipeline_plan.plan(build(rlvr__reward__source_weight=0.5, stages=('sft', 'rlvr', 'reward')), 'p')


def test_fewer_stages_in_another_order():
  stages = pipeline_plan.plan(build(stages=('sft', 'rlvr', 'preference'), evaluate=False), 'p')
  assert [(stage.name, stage.parent) for stage in stages] == [('base', ''), ('sft', 'base'), ('rlvr', 'sft'), ('preference', 'rlvr')]
  found = actions(stages)
  assert found['data/pairs_rlvr'].inputs == ('p/models/rlvr',) and not any(name.endswith('/evaluate') for name in found)


def test_a_part_of_the_stages():
  stages = pipeline_plan.plan(build(), 'p')
  assert pipeline_plan.until(stages, None) == stages and pipeline_plan.until(stages, 'reward') == stages[:3]
  with pytest.raises(ValueError, match='--until=dpo must be one of base, sft, reward, preference, rlvr, student'):
    pipeline_plan.until(stages, 'dpo')


@pytest.mark.parametrize('size', ['', 'size=small', 'size=tiny'])
def test_rates_are_those_of_the_recipe_and_levels_have_equal_shares(size):
  config = build(size)
  rates = {name: component.rate for name, component in config.mixture.components.items()}
  assert rates == {'general': 0.40, 'code': 0.25, 'documents': 0.20, 'tools': 0.15}
  flag = next(word for word in actions(pipeline_plan.plan(config, 'p'))['sft/train'].command if word.startswith('--config.data.rates='))
  drawn = ast.literal_eval(flag.partition('=')[2])
  for name, rate in rates.items():
    of_component = [value for task, value in drawn.items() if task.startswith(f'{name}_')]
    assert sum(of_component) == pytest.approx(rate) and of_component == pytest.approx([rate / len(of_component)] * len(of_component))


@pytest.mark.parametrize('size', ['', 'size=small', 'size=tiny'])
def test_policies_are_asked_what_the_mixture_shows_and_as_it_shows_it(size):
  config = build(size)

  def places(domains):
    return {(name, str(domain.options), level) for name, domain in domains.items() for level in domain.levels or ('all',)}

  shown = set().union(*(places(component.domains) for component in config.mixture.components.values()))
  assert places(config.domains) <= shown
  # Demonstrations have no system message.
  assert not config.rlvr['rollout']['describe_tools']
  evaluate = actions(pipeline_plan.plan(config, 'p'))['sft/evaluate'].command
  assert '--config.rollout.describe_tools=False' in evaluate


def test_a_small_pipeline_trains_adapters_and_keeps_its_texts_in_rows():
  config = build('size=small')
  for name in ('sft', 'reward', 'preference', 'rlvr'):
    assert getattr(config, name)['lora']['rank'] > 0
  # A conversation of RLVR fits into a row of the trainer, and two of them into one of pairs.
  longest = config.rlvr['rollout']['max_length']
  assert longest <= config.rlvr['length'] and longest <= config.sft['data']['length']
  assert all(2 * longest <= getattr(config, name)['data']['length'] for name in ('reward', 'preference'))


@pytest.mark.filterwarnings('ignore:the load_module')  # Of ml_collections.
@pytest.mark.parametrize('changes', [{}, {
    'seed': 3, 'mesh__data': 2, 'cpu_devices': 2, 'model__chat_template': 'chatml', 'sft__phases': ({'num_steps': 60, 'length': 64},),
    'reward__data__dimensions': {'correct': 1.0, 'cases_fraction': 0.5}, 'preference__loss__kind': 'simpo', 'preference__loss__reduce': 'mean',
    'rlvr__loss__dual_clip': 3.0, 'rlvr__curriculum': 'fixed', 'layout__scan': False}])
def test_the_flags_give_the_settings(changes):
  config = build(**changes)
  for name, kind in pipeline_plan.KINDS.items():
    action = actions(pipeline_plan.plan(config, 'p'))[f'{name}/train']
    values = flags.FlagValues()
    arguments = ['launch.train', *(word for word in action.command if word.startswith('--config'))]
    config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=arguments)
    values(arguments)
    record = config_lib.build(kind.record, values.config)
    run, given = config_lib.to_json(record), {'mixture': ('tasks', 'rates'), 'pairs': ('paths',), 'domains': ()}[kind.data]
    wanted = {**getattr(config, name), 'model': {**config_lib.to_json(config.model), 'path': action.inputs[0]}, 'seed': config.seed,
              'mesh': config.mesh, 'layout': config.layout, 'cpu_devices': config.cpu_devices}
    if name == 'student':
      wanted['teacher'] = {**wanted['teacher'], 'path': 'p/models/rlvr'}
    if kind.data == 'domains':
      wanted['domains'] = config.domains
    else:
      wanted['data'] = {**wanted['data'], **{key: run['data'][key] for key in given}}
    assert config_lib.build(kind.record, config_lib.to_json(wanted)) == record
    assert kind.data != 'pairs' or run['data']['paths'] == ['p/data/pairs_sft.jsonl']


def test_what_a_policy_samples_does_not_depend_on_how_it_is_trained():
  evaluate = actions(pipeline_plan.plan(build(), 'p'))['base/evaluate'].command
  assert actions(pipeline_plan.plan(build(rlvr__optimizer__learning_rate=1e-3, rlvr__num_steps=9), 'p'))['base/evaluate'].command == evaluate
  assert actions(pipeline_plan.plan(build(rlvr__rollout__max_new_tokens=7), 'p'))['base/evaluate'].command != evaluate


@pytest.mark.parametrize('changes, message', [
    ({'stages': ('sft', 'dpo')}, r"stages=\('sft', 'dpo'\) must be some of sft, reward, preference, rlvr, student"),
    ({'stages': ()}, 'must be some of'),
    ({'stages': ('sft', 'sft')}, 'each at most once'),
    ({'model__path': ''}, "model.path='' must be the base model"),
    ({'rlvr__group_size': 1}, 'config.rlvr: group_size=1 leaves nothing to compare'),
    ({'reward__data__max_segments': 3}, 'config.reward.data: max_segments=3 must be even'),
    ({'sft__optimizer__warmup_steps': 99}, 'config.sft: optimizer.warmup_steps=99'),
    ({'mixture__components__general__paths': ('/nowhere/a.jsonl',)}, 'config.mixture.components.general: domains=.*give one of them'),
    ({'mixture__against': {'exam': {'paths': ('/nowhere/a.jsonl',), 'schema': 'qa'}}}, 'No file at ./nowhere/a.jsonl'),
])
def test_mistakes_are_said_before_anything_runs(changes, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    pipeline_plan.plan(build(**changes), 'p')


def test_layers_that_the_base_model_has_not_are_said_before_anything_runs(tmp_path):
  model = str(tiny_model.write_model(tmp_path / 'model'))
  pipeline_plan.check_layers(build(model__path=model))
  pipeline_plan.check_layers(build(model__path=model, student_layers=(), stages=('sft', 'student')))
  pipeline_plan.check_layers(build(model__path=model, student_layers=(99,), stages=('sft',)))
  with pytest.raises(ValueError, match=r'config.student_layers: layers=\(1, 99\) must be increasing numbers of layers from 0 to \d'):
    pipeline_plan.check_layers(build(model__path=model, student_layers=(1, 99)))


def test_a_setting_that_the_pipeline_gives_is_not_a_runs_own():
  config = pipeline.get_config()
  for stage, given in (('sft', ('tasks', 'rates')), ('student', ('tasks', 'rates')), ('reward', ('paths',)), ('preference', ('paths',))):
    assert not set(given) & set(config[stage].data)
  assert 'domains' not in config.rlvr
  assert all(not {'seed', 'model', 'mesh', 'layout', 'cpu_devices'} & set(config[stage]) for stage in pipeline_plan.KINDS)
  with pytest.raises(ValueError, match='size=huge asks for an unknown size; use none, :size=small or :size=tiny'):
    pipeline.get_config('size=huge')
