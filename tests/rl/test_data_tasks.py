"""SeqIO tasks and mixtures: the same order in every process, exact epochs, true rates, disjoint splits."""

from collections import Counter
import itertools
import json
import os
import subprocess
import sys

import pyarrow
from pyarrow import parquet
import pytest

from rl.data import records, sources, tasks


def write_qa(path, start, stop):
  path.write_text(''.join(json.dumps({'question': f'q{index}', 'answer': f'a{index}'}) + '\n' for index in range(start, stop)))
  return str(path)


def qa(path, **settings):
  return tasks.TaskConfig((path,), schema='qa', **settings)


def build(**configs):
  return tasks.build_mixture(tasks.MixtureConfig(configs))


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  root = tmp_path_factory.mktemp('data')
  return {name: write_qa(root / f'{name}.jsonl', *span) for name, span in {'a': (0, 40), 'b': (100, 110), 'c': (200, 600)}.items()}


@pytest.fixture(scope='module')
def two(files):
  return tasks.build_mixture(tasks.MixtureConfig({'a': qa(files['a']), 'b': qa(files['b'])}, rates={'a': 0.7, 'b': 0.3}))


def stream(mixture, count, **arguments):
  return [example.source.split('/')[-1] for example in itertools.islice(tasks.examples(mixture, **arguments), count)]


OTHER_PROCESS = """
import json, os, sys
import rl, rl.batching, rl.data.loader, rl.data.tasks, rl.data.sources, rl.data.records
early = [name for name in ('tensorflow', 'seqio', 'tensorflow_datasets', 'pyarrow') if name in sys.modules]
from rl.data import sources, tasks
configs = {name: tasks.TaskConfig((path,), schema='qa') for name, path in zip('ba', reversed(sys.argv[1:]))}
config = tasks.MixtureConfig(configs, rates={'b': 0.3, 'a': 0.7})
found = tasks.examples(tasks.build_mixture(config), seed=5, position=123)
order = [next(found).source.split('/')[-1] for _ in range(400)]
found.close()
_, tf = sources.import_seqio()
os.write(2, b'kept')
print(json.dumps({'early': early, 'order': order, 'devices': [device.device_type for device in tf.config.get_visible_devices()]}))
"""


@pytest.fixture(scope='module')
def other_process(files):
  arguments = [sys.executable, '-W', 'error', '-c', OTHER_PROCESS, files['a'], files['b']]
  result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=os.environ | {'PYTHONHASHSEED': '77'})
  if result.returncode:
    pytest.fail(result.stderr)
  return result


def test_tensorflow_is_imported_late_without_accelerators_or_noise(other_process):
  found = json.loads(other_process.stdout)
  assert (found['early'], found['devices']) == ([], ['CPU'])
  assert other_process.stderr == 'kept'


# what a task gives


def test_one_epoch_without_shuffle_is_the_file(files):
  mixture = build(a=qa(files['a']))
  found = list(tasks.examples(mixture, seed=0, num_epochs=1, shuffle=False))
  messages = [({'role': 'user', 'content': f'q{index}'}, {'role': 'assistant', 'content': f'a{index}'}) for index in range(40)]
  assert found == [records.Example(pair, f'a:{files["a"]} row {row}') for row, pair in enumerate(messages, start=1)]


def test_formats_and_schemas_mix(tmp_path, files):
  chat = tmp_path / 'chat.jsonl'
  chat.write_text(json.dumps({'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'ho'}]}) + '\n')
  table = str(tmp_path / 'text.parquet')
  parquet.write_table(pyarrow.table({'body': ['once', 'twice']}), table)
  text = tasks.TaskConfig((table,), source='parquet', schema='text', fields={'text': 'body'})
  mixture = build(chat=tasks.TaskConfig((str(chat),)), text=text, qa=qa(files['b']))
  found = [example.messages[-1]['content'] for example in tasks.examples(mixture, seed=0, num_epochs=1)]
  assert sorted(found) == sorted(['ho', 'once', 'twice', *(f'a{index}' for index in range(100, 110))])


def test_tfds_task(tmp_path):
  _, tf = sources.import_seqio()
  import tensorflow_datasets as tfds
  data = tf.data.Dataset.from_tensor_slices({'question': ['q0', 'q1'], 'answer': ['a0', 'a1']})
  text = tfds.features.Text()
  builder = tfds.dataset_builders.store_as_tfds_dataset(
      'tiny', '1.0.0', tfds.features.FeaturesDict({'question': text, 'answer': text}), {'train': data}, data_dir=str(tmp_path),
      disable_shuffling=True)
  task = tasks.TaskConfig((str(builder.data_path),), source='tfds', schema='qa')
  found = list(tasks.examples(build(tiny=task), seed=0, num_epochs=1, shuffle=False))
  assert [example.messages[1]['content'] for example in found] == ['a0', 'a1']
  assert found[1].source == f'tiny:{builder.data_path} row 2'


def test_building_again_gives_the_same_object_and_other_data_another(tmp_path, files):
  seqio, _ = sources.import_seqio()
  path = write_qa(tmp_path / 'x.jsonl', 0, 5)
  first = build(x=qa(path), a=qa(files['a']))
  assert build(a=qa(files['a']), x=qa(path)) is first is seqio.get_mixture_or_task(first.name)
  assert tasks.build_task('x', qa(path)) is first.tasks[1]
  write_qa(tmp_path / 'x.jsonl', 0, 6)
  assert tasks.num_examples(build(x=qa(path))) == 6
  assert tasks.num_examples(build(x=qa(path, limit=3))) == 3


def test_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path, files):
  one, other, more = (
      tasks.fingerprint(build(x=qa(path)))
      for path in (files['a'], write_qa(tmp_path / 'y.jsonl', 0, 40), write_qa(tmp_path / 'z.jsonl', 0, 41)))
  assert one == other != more


# order


def test_order_is_the_same_from_any_position(two):
  whole = stream(two, 623, seed=5)
  for position in (1, 256, 600):
    assert stream(two, 20, seed=5, position=position) == whole[position:position + 20]


def test_order_is_the_same_in_another_process(two, other_process):
  assert json.loads(other_process.stdout)['order'] == stream(two, 400, seed=5, position=123)


def test_the_seed_decides(two):
  assert stream(two, 30, seed=5) == stream(two, 30, seed=5) != stream(two, 30, seed=6)


def test_every_epoch_is_another_permutation(files):
  mixture = build(a=qa(files['a']))
  found = stream(mixture, 120, seed=1)
  epochs = [found[start:start + 40] for start in (0, 40, 80)]
  assert all(sorted(epoch) == sorted(f'a.jsonl row {row}' for row in range(1, 41)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 3
  assert found == stream(mixture, 120, seed=1)


def test_a_small_window_still_gives_every_example_once_an_epoch(files):
  mixture = build(a=qa(files['a'], shuffle_window=4))
  found = stream(mixture, 80, seed=1)
  assert Counter(found) == Counter({f'a.jsonl row {row}': 2 for row in range(1, 41)})
  # An example can come at most window - 1 places early.
  assert all(int(source.split()[-1]) <= place + 4 for place, source in enumerate(found[:40]))


# rates


def test_rates_hold(two):
  count = 4000
  share = sum(source.startswith('a.') for source in stream(two, count, seed=2)) / count
  # Standard deviation of the mean of 4000 draws at 0.7 is 0.0072.
  assert abs(share - 0.7) < 4 * 0.0072


@pytest.mark.parametrize('temperature, expected', [(1.0, [40, 10]), (2.0, [40**0.5, 10**0.5])])
def test_rates_by_size(files, temperature, expected):
  mixture = tasks.build_mixture(tasks.MixtureConfig({'a': qa(files['a']), 'b': qa(files['b'])}, temperature=temperature))
  assert [mixture.get_rate(task) for task in mixture.tasks] == expected


def test_a_finite_stream_gives_everything_whatever_the_rates(two):
  expected = [f'{name}.jsonl row {row}' for name, size in (('a', 40), ('b', 10)) for row in range(1, size + 1)]
  assert sorted(stream(two, None, seed=3, num_epochs=1)) == sorted(expected)
  assert sorted(stream(two, None, seed=3, num_epochs=2)) == sorted(2 * expected)
  assert stream(two, None, seed=3, num_epochs=1, position=48) == stream(two, None, seed=3, num_epochs=1)[48:]
  assert stream(two, None, seed=3, num_epochs=1, position=60) == []


# splits


def test_held_out_examples_are_never_trained_on_not_even_from_another_task(tmp_path, files):
  copy = write_qa(tmp_path / 'copy.jsonl', 150, 450)
  mixture = build(c=qa(files['c'], heldout_fraction=0.2), d=qa(copy, heldout_fraction=0.2))
  train, heldout = (
      [example.messages for example in tasks.examples(mixture, seed=0, num_epochs=1, split=split)] for split in sources.SPLITS)
  assert len(train) + len(heldout) == 700
  assert len(heldout) == tasks.num_examples(mixture, 'heldout') > 100
  assert not [messages for messages in heldout if messages in train]


def test_a_task_without_held_out_examples_takes_no_part_in_the_evaluation(files):
  mixture = build(a=qa(files['a']), c=qa(files['c'], heldout_fraction=0.1, limit=7))
  found = stream(mixture, None, seed=0, num_epochs=1, split='heldout')
  assert len(found) == 7 and all(source.startswith('c.') for source in found)


# refusals


def test_a_bad_row_is_named_before_anything_is_drawn(tmp_path):
  path = tmp_path / 'bad.jsonl'
  path.write_text('{"question": "q", "answer": "a"}\n{"question": "q", "answer": 3}\n')
  with pytest.raises(ValueError, match=rf"^bad:{path} row 2: column 'answer' must be a string, got a number: 3"):
    tasks.build_task('bad', qa(str(path)))


def test_missing_file(tmp_path):
  with pytest.raises(FileNotFoundError, match='none.jsonl'):
    tasks.build_task('none', qa(str(tmp_path / 'none.jsonl')))


def test_a_file_that_changes_while_it_is_read_is_an_error_and_nothing_is_drawn_out_of_order(tmp_path, capfd):
  path = write_qa(tmp_path / 'x.jsonl', 0, 1000)
  mixture = build(x=qa(path))
  expected = stream(mixture, 10_000, seed=0)
  found = []
  with pytest.raises(RuntimeError, match=r'x\.jsonl has changed since it was checked'):
    for example in tasks.examples(mixture, seed=0):
      found.append(example.source.split('/')[-1])
      if len(found) == 1:
        write_qa(tmp_path / 'x.jsonl', 0, 1000)
  assert 0 < len(found) < 10_000 and found == expected[:len(found)]
  assert capfd.readouterr().err == ''
  # The same rows in a new file are new data, which is read again.
  assert stream(build(x=qa(path)), 10_000, seed=0) == expected


@pytest.mark.parametrize('arguments, message', [
    ({'split': 'test'}, r"split='test' is unknown; use one of train, heldout"),
    ({'split': 'heldout'}, r"Split 'heldout' of a, b is empty"),
    ({'position': -1}, r'position=-1'),
    ({'num_epochs': 0}, r'num_epochs=0'),
])
def test_examples_refuse(two, arguments, message):
  with pytest.raises(ValueError, match=message):
    tasks.examples(two, **{'seed': 0} | arguments)


@pytest.mark.parametrize('settings, error, message', [
    ({'paths': 'x.jsonl'}, TypeError, r"paths='x\.jsonl' must be a tuple.*write \('x\.jsonl',\)"),
    ({'source': 'csv'}, ValueError, r"source='csv' is unknown; use one of jsonl, parquet, tfds"),
    ({'schema': 'csv'}, ValueError, r"schema='csv' is unknown"),
    ({'fields': {'x': 'y'}}, ValueError, r"fields names 'x'"),
    ({'heldout_fraction': 1.5}, ValueError, r'heldout_fraction=1\.5 must be between 0 and 1'),
    ({'limit': 0}, ValueError, r'limit=0 must be at least 1, or None'),
    ({'shuffle_window': 0}, ValueError, r'shuffle_window=0 must be at least 1'),
])
def test_task_config_refuses(settings, error, message):
  with pytest.raises(error, match=message):
    tasks.TaskConfig(**{'paths': ('x.jsonl',)} | settings)


@pytest.mark.parametrize('names, settings, message', [
    ('', {}, r'tasks={} is empty; a mixture needs at least one task'),
    ('t ', {}, r"letters, digits, .* got ' '"),
    ('tu', {'rates': {'t': 1.0}}, r'rates names t but the tasks are t, u; give each a rate, or none'),
    ('tu', {'rates': {'t': 1.0, 'u': 0.0}}, r'must all be positive and finite'),
    ('t', {'temperature': 0.0}, r'temperature=0\.0 must be positive and finite'),
    ('t', {'rates': {'t': 1.0}, 'temperature': 2.0}, r'temperature=2\.0 has no effect beside rates'),
])
def test_mixture_config_refuses(names, settings, message):
  with pytest.raises(ValueError, match=message):
    tasks.MixtureConfig({name: tasks.TaskConfig(('x.jsonl',)) for name in names}, **settings)
