"""Files and TFDS directories into rows: formats agree, and what is missing or broken is named."""

import gzip
import json
import os

import numpy as np
import pyarrow
from pyarrow import parquet
import pytest

from rl.data import records, sources

QA = records.schema('qa')
CHAT = records.schema('chat')
ROWS = [{'question': f'q{index}', 'answer': f'a{index}'} for index in range(600)]


def write_jsonl(path, rows, end='\n'):
  data = ''.join(json.dumps(row) + end for row in rows).encode()
  path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
  return str(path)


def jsonl_reader(*paths):
  return sources.FileReader(paths, sources.read_jsonl)


def rows_of(reader):
  return [(path, json.loads(row)) for path, rows in reader.batches() for row in rows]


def rows_of_dataset(reader):
  return [json.loads(row) for rows in reader.dataset().as_numpy_iterator() for row in rows]


@pytest.fixture(scope='module')
def tfds_directory(tmp_path_factory):
  _, tf = sources.import_seqio()
  import tensorflow_datasets as tfds
  root = tmp_path_factory.mktemp('tfds')
  messages = {key: [[f'{key[0]}{index}' for index in (row, 9)] for row in range(5)] for key in ('role', 'content')}
  data = tf.data.Dataset.from_tensor_slices({
      'question': [f'q{index}' for index in range(5)],
      'answer': [f'a{index}' for index in range(5)],
      'messages': messages,
  })
  text = tfds.features.Text()
  builder = tfds.dataset_builders.store_as_tfds_dataset(
      name='pairs', version='1.0.0', data_dir=str(root), split_datasets={'train': data}, disable_shuffling=True,
      features=tfds.features.FeaturesDict({
          'question': text, 'answer': text, 'messages': tfds.features.Sequence({'role': text, 'content': text})}))
  return str(builder.data_path)


# readers


def test_jsonl_plain_and_gzip_in_order(tmp_path):
  first = write_jsonl(tmp_path / 'b.jsonl', ROWS[:400])
  second = write_jsonl(tmp_path / 'a.jsonl.gz', ROWS[400:], end='\r\n')
  reader = jsonl_reader(first, second)
  assert rows_of(reader) == [(first, row) for row in ROWS[:400]] + [(second, row) for row in ROWS[400:]]
  assert rows_of_dataset(reader) == ROWS


def test_the_last_line_needs_no_newline(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "1"}\n{"text": "2"}')
  assert [row for _, row in rows_of(jsonl_reader(str(tmp_path / 'a.jsonl')))] == [{'text': '1'}, {'text': '2'}]


def test_parquet_rows_and_lists(tmp_path):
  path = str(tmp_path / 'a.parquet')
  messages = [[{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': f'a{index}'}] for index in range(3)]
  parquet.write_table(pyarrow.table({'messages': messages, 'when': pyarrow.array([1, 2, 3], pyarrow.timestamp('s'))}), path)
  reader = sources.FileReader([path], lambda path: sources.read_parquet(path, CHAT))
  assert rows_of_dataset(reader) == [{'messages': row} for row in messages]


def test_tfds_rows_and_sequences(tfds_directory):
  reader = sources.TfdsReader([tfds_directory], 'train', QA)
  assert rows_of(reader) == [(tfds_directory, row) for row in ROWS[:5]]
  assert rows_of_dataset(sources.TfdsReader([tfds_directory], 'train[1:3]', QA)) == ROWS[1:3]
  chat = rows_of_dataset(sources.TfdsReader([tfds_directory], 'train', CHAT))
  assert chat[4] == {'messages': [{'role': 'r4', 'content': 'c4'}, {'role': 'r9', 'content': 'c9'}]}


def test_find_files(tmp_path, monkeypatch):
  names = ['d.jsonl', 'b.jsonl', 'e.jsonl', 'a.jsonl', 'f.jsonl']
  for name in [*names, 'c[1].jsonl']:
    write_jsonl(tmp_path / name, ROWS[:1])
  monkeypatch.setenv('HOME', str(tmp_path))
  literal = str(tmp_path / 'c[1].jsonl')
  found = sources.find_files([literal, '~/?.jsonl'], ('.jsonl',))
  assert found == (literal, *(str(tmp_path / name) for name in sorted(names)))


# splits


def scan(reader, heldout_fraction=0.0, limit=None, schema=QA):
  return sources.scan(reader, schema, 'task', heldout_fraction=heldout_fraction, limit=limit)


def test_splits_are_disjoint_complete_and_by_content(tmp_path):
  rows = ROWS + ROWS[:50]
  index = scan(jsonl_reader(write_jsonl(tmp_path / 'a.jsonl', rows)), 0.2)
  heldout = index.members['heldout']
  np.testing.assert_array_equal(index.members['train'], ~heldout)
  np.testing.assert_array_equal(heldout[:50], heldout[600:])
  # 600 draws at 0.2: standard deviation 9.8.
  assert abs(int(heldout[:600].sum()) - 120) < 5 * 9.8
  other = scan(jsonl_reader(write_jsonl(tmp_path / 'b.jsonl', rows[::-1])), 0.2)
  np.testing.assert_array_equal(other.members['heldout'][::-1], heldout)


@pytest.mark.parametrize('fraction, train, heldout', [(0, 600, 0), (1, 0, 600)])
def test_a_split_may_be_everything(tmp_path, fraction, train, heldout):
  index = scan(jsonl_reader(write_jsonl(tmp_path / 'a.jsonl', ROWS)), fraction)
  assert (index.num_examples('train'), index.num_examples('heldout')) == (train, heldout)


def test_limit_keeps_the_first_of_each_split_and_stops_reading(tmp_path):
  path = write_jsonl(tmp_path / 'a.jsonl', ROWS)
  whole = scan(jsonl_reader(path), 0.2)
  # The first batch has more training rows than the limit, but fewer held-out ones.
  assert np.count_nonzero(whole.members['heldout'][:sources.BATCH_ROWS]) < 70 < whole.num_examples('heldout')
  index = scan(jsonl_reader(path), 0.2, limit=70)
  for split in sources.SPLITS:
    np.testing.assert_array_equal(np.flatnonzero(index.members[split]), np.flatnonzero(whole.members[split])[:70])
  assert len(index.members['train']) == 2 * sources.BATCH_ROWS
  assert scan(jsonl_reader(path), 0.2, limit=10_000).num_examples('heldout') == whole.num_examples('heldout')


def test_fingerprint_follows_the_content(tmp_path):
  first = scan(jsonl_reader(write_jsonl(tmp_path / 'a.jsonl', ROWS))).fingerprint
  assert scan(jsonl_reader(write_jsonl(tmp_path / 'b.jsonl.gz', ROWS))).fingerprint == first
  assert scan(jsonl_reader(write_jsonl(tmp_path / 'c.jsonl', ROWS[1:]))).fingerprint != first


def test_rows_are_named_by_file_and_number(tmp_path):
  paths = [write_jsonl(tmp_path / name, ROWS[:count]) for name, count in (('a.jsonl', 300), ('b.jsonl', 2))]
  index = scan(jsonl_reader(*paths))
  assert [index.describe(row) for row in (0, 299, 300)] == [f'{paths[0]} row 1', f'{paths[0]} row 300', f'{paths[1]} row 1']
  write_jsonl(tmp_path / 'b.jsonl', [*ROWS[:270], {'question': 'q'}])
  with pytest.raises(ValueError, match=rf"^task:{paths[1]} row 271: no column 'answer'"):
    scan(jsonl_reader(*paths))


def elements(source, split='train', **arguments):
  return [(json.loads(element['record']), int(element['row'])) for element in source.get_dataset(split, **arguments).as_numpy_iterator()]


def test_source_gives_the_rows_of_each_split(tmp_path):
  reader = jsonl_reader(write_jsonl(tmp_path / 'a.jsonl', ROWS[:300]), write_jsonl(tmp_path / 'b.jsonl', ROWS[300:]))
  for limit in (None, 20):
    index = scan(reader, 0.2, limit)
    source = sources.data_source(reader, index, 1000)
    for split in sources.SPLITS:
      expected = [(ROWS[row], row) for row in np.flatnonzero(index.members[split])]
      assert elements(source, split, shuffle=False) == expected
      assert source.num_input_examples(split) == len(expected)
      shuffled = elements(source, split, seed=3)
      assert shuffled != expected and sorted(shuffled, key=lambda element: element[1]) == expected


def test_source_refuses_low_level_sharding(tmp_path):
  seqio, _ = sources.import_seqio()
  reader = jsonl_reader(write_jsonl(tmp_path / 'a.jsonl', ROWS))
  with pytest.raises(ValueError, match='shard the examples instead'):
    sources.data_source(reader, scan(reader), 10).get_dataset('train', shard_info=seqio.ShardInfo(0, 2))


# what is missing or broken


def test_missing_paths(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  os.mkdir(tmp_path / 'empty.jsonl')
  for path in ('data/none.jsonl', '*.jsonl', 'empty.jsonl'):
    with pytest.raises(FileNotFoundError) as error:
      sources.find_files([path], ('.jsonl',))
    assert repr(path) in str(error.value) and str(tmp_path) in str(error.value)
  with pytest.raises(FileNotFoundError, match='No dataset_info.json in .*nowhere.*download_and_prepare'):
    sources.find_directories(['nowhere'])


def test_wrong_paths(tmp_path):
  path = write_jsonl(tmp_path / 'a.txt', ROWS)
  with pytest.raises(ValueError, match=r'a\.txt must end in \.jsonl or \.jsonl\.gz'):
    sources.find_files([path], sources.SUFFIXES['jsonl'])
  with pytest.raises(ValueError, match=r'a\.txt is named 2 times'):
    sources.find_files([path, str(tmp_path / '*.txt')], ('.txt',))
  with pytest.raises(ValueError, match='paths is empty'):
    sources.find_files([], ('.txt',))


def test_empty_and_blank_files(tmp_path):
  with pytest.raises(ValueError, match=r'a\.jsonl has no rows'):
    scan(jsonl_reader(write_jsonl(tmp_path / 'a.jsonl', [])))
  (tmp_path / 'b.jsonl').write_text('{"question": "q", "answer": "a"}\n\n')
  with pytest.raises(ValueError, match=r'b\.jsonl row 2: the row is blank'):
    scan(jsonl_reader(str(tmp_path / 'b.jsonl')))


def test_truncated_gzip(tmp_path):
  path = tmp_path / 'a.jsonl.gz'
  write_jsonl(path, ROWS)
  whole = path.read_bytes()
  for data in (whole[:-20], b'no gzip', whole[:100] + b'\0' * 50 + whole[150:]):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r'a\.jsonl\.gz is not a whole gzip file .*copy or compress it again'):
      list(sources.read_jsonl(str(path)))


def test_bad_parquet(tmp_path):
  path = str(tmp_path / 'a.parquet')
  parquet.write_table(pyarrow.table({'question': ['q'], 'answer': pyarrow.array([1], pyarrow.timestamp('s'))}), path)
  with pytest.raises(ValueError, match=r'a\.parquet rows 1 to 1 hold what is no text .*answer: timestamp'):
    list(sources.read_parquet(path, QA))
  with pytest.raises(ValueError, match=r"a\.parquet has no column 'messages', .*; it has question, answer\. .*fields="):
    list(sources.read_parquet(path, CHAT))
  parquet.write_table(pyarrow.table({'question': ['q' * 500], 'answer': ['a']}), path, compression='NONE', use_dictionary=False)
  with open(path, 'rb') as file:
    whole = file.read()
  for broken in (whole[:50], b'PAR1' + bytes(60) + whole[64:]):
    with open(path, 'wb') as file:
      file.write(broken)
    with pytest.raises(ValueError, match=r'a\.parquet is not a whole Parquet file .*write or copy it again'):
      list(sources.read_parquet(path, QA))


def test_bad_tfds(tfds_directory):
  for split in ('test', 'train[', 'train[:0]'):
    with pytest.raises(ValueError) as error:
      sources.TfdsReader([tfds_directory], split, QA)
    assert f'{tfds_directory} gives no rows for tfds_split={split!r} (' in str(error.value)
    assert 'use one of train, or a slice' in str(error.value)
  with pytest.raises(ValueError, match=r"has no column 'text'.* it has answer, messages, question"):
    sources.TfdsReader([tfds_directory], 'train', records.schema('text'))


def test_tfds_text_that_is_not_utf8_is_named_by_row(tmp_path):
  _, tf = sources.import_seqio()
  import tensorflow_datasets as tfds
  text = tfds.features.Text()
  builder = tfds.dataset_builders.store_as_tfds_dataset(
      'bad', '1.0.0', tfds.features.FeaturesDict({'text': text}), {'train': tf.data.Dataset.from_tensor_slices({'text': [b'a', b'a\xff']})},
      data_dir=str(tmp_path), disable_shuffling=True)
  schema = records.schema('text')
  with pytest.raises(ValueError, match=r"1\.0\.0 row 2: column 'text' has half of a surrogate pair at character 1"):
    scan(sources.TfdsReader([str(builder.data_path)], 'train', schema), schema=schema)
  shard, = (path for path in builder.data_path.iterdir() if 'tfrecord' in path.name)
  shard.write_bytes(shard.read_bytes()[:-3])
  with pytest.raises(ValueError, match=r'1\.0\.0 cannot be read: .*; prepare the dataset again'):
    list(sources.TfdsReader([str(builder.data_path)], 'train', schema).batches())


def test_a_file_that_changes_later_is_an_error(tmp_path):
  reader = jsonl_reader(write_jsonl(tmp_path / 'a.jsonl', ROWS))
  scan(reader)
  write_jsonl(tmp_path / 'a.jsonl', ROWS[1:])
  with pytest.raises(RuntimeError, match=r'a\.jsonl has changed since it was checked'):
    scan(reader)
