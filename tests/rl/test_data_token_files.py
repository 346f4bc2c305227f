"""Tokenized documents: written, checked, read through memory maps, and refused by name."""

import json
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from models import chat
from models import tokenizer as tokenizer_lib
from rl import train
from rl.data import tasks, token_files

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [np.array(tokens, np.int32) for tokens in ([5, 6, 7], [8, 9], range(10, 50))]


def build(path, **settings):
  return tasks.build_mixture(tasks.MixtureConfig({'books': tasks.TaskConfig((str(path),), 'npy', 'tokens', **settings)}))


def examples(mixture, **settings):
  return list(tasks.examples(mixture, **{'seed': 0, 'num_epochs': 1, 'shuffle': False} | settings))


def test_files_by_hand(tmp_path):
  assert token_files.write(tmp_path / 'a', DOCUMENTS) == 3
  np.testing.assert_array_equal(np.load(tmp_path / 'a.tokens.npy'), [5, 6, 7, 8, 9, *range(10, 50)])
  np.testing.assert_array_equal(np.load(tmp_path / 'a.ends.npy'), [3, 5, 45])
  assert sorted(path.name for path in tmp_path.iterdir()) == ['a.ends.npy', 'a.tokens.npy']


def test_documents_come_back_as_maps_and_all_of_them_is_learned(tmp_path):
  token_files.write(tmp_path / 'a', DOCUMENTS)
  found = examples(build(tmp_path / 'a.tokens.npy'))
  assert [example.source for example in found] == [f'books:{tmp_path}/a.tokens.npy row {row}' for row in (1, 2, 3)]
  for example, tokens_T in zip(found, DOCUMENTS, strict=True):
    document = train.encode(example, None, None)
    np.testing.assert_array_equal(document.tokens_T, tokens_T)
    assert isinstance(document.tokens_T, np.memmap) and document.loss_mask_T.all()
    assert document.loss_mask_T.strides == (0,)  # One byte in memory, however long the document.


def test_content_decides_splits_and_fingerprint_wherever_the_files_lie(tmp_path):
  rng = np.random.default_rng(0)
  documents = [rng.integers(0, 99, 5).astype(np.int32) for _ in range(300)]
  for name, order in (('a', documents), ('b', documents[::-1])):
    token_files.write(tmp_path / name, order)
  mixtures = [build(tmp_path / f'{name}.tokens.npy', heldout_fraction=0.3) for name in 'ab']
  heldout = [{token_files.document(example.tokens).tobytes() for example in examples(mixture, split='heldout')} for mixture in mixtures]
  assert heldout[0] == heldout[1] and 60 < len(heldout[0]) < 120
  train_examples = examples(mixtures[0], num_epochs=2, shuffle=True, seed=3)
  assert not heldout[0] & {token_files.document(example.tokens).tobytes() for example in train_examples}
  assert tasks.fingerprint(mixtures[0]) != tasks.fingerprint(mixtures[1])  # The order of rows counts, as in other sources.
  token_files.write(tmp_path / 'elsewhere' / 'a', documents)
  assert tasks.fingerprint(build(tmp_path / 'elsewhere' / 'a.tokens.npy', heldout_fraction=0.3)) == tasks.fingerprint(mixtures[0])


def test_tokenized_rows_are_what_training_on_the_rows_sees(tmp_path):
  texts = ['Once upon a time', 'The end', 'x' * 200]
  (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps({'body': text}) + '\n' for text in texts))
  # In a process of its own: programs define flags, and two of them in one process may define the same.
  done = subprocess.run([sys.executable, '-m', 'launch.tokenize', '--model=byte', f'--paths={tmp_path}/rows.jsonl', '--column=body',
                         f'--target={tmp_path}/books'], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  words = tokenizer_lib.load('byte')
  rows = tasks.build_mixture(tasks.MixtureConfig({'rows': tasks.TaskConfig((str(tmp_path / 'rows.jsonl'),), schema='text',
                                                                           fields={'text': 'body'})}))
  wanted = [train.encode(example, words, chat.TEMPLATES['plain']).tokens_T for example in examples(rows)]
  found = [token_files.document(example.tokens) for example in examples(build(tmp_path / 'books.tokens.npy'))]
  for mine, other in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(mine, other)
  np.testing.assert_array_equal(wanted[1], [words.bos_id, *words.encode('The end'), words.eos_id])
  summary = f'{tmp_path}/books.tokens.npy: 3 documents, {sum(map(len, wanted))} tokens, the longest {max(map(len, wanted))}.'
  assert summary in done.stderr + done.stdout


def put(directory, tokens, ends, dtypes=(np.int32, np.int64)):
  np.save(directory / 'a.tokens.npy', np.array(tokens, dtypes[0]))
  np.save(directory / 'a.ends.npy', np.array(ends, dtypes[1]))


@pytest.mark.parametrize('tokens, ends, dtypes, message', [
    ([1, 2, 3], [2], (np.int32, np.int64), r'a.ends.npy: the last document ends at 2 of 3 tokens; it must hold the growing ends'),
    ([1, 2, 3], [2, 2, 3], (np.int32, np.int64), r'a.ends.npy: document 2 ends at 2 and begins at 2'),
    ([1, 2, -3, 4], [1, 4], (np.int32, np.int64), r'a.tokens.npy row 2: token 1 of the document is -3; ids are from 0 on'),
    ([1, 2], [2], (np.uint16, np.int64), r'a.tokens.npy holds uint16\(2,\); it must be a non-empty one-dimensional array of int32'),
    ([[1, 2]], [2], (np.int32, np.int64), r'a.tokens.npy holds int32\(1, 2\)'),
    ([1, 2], [2], (np.int32, np.float32), r'a.ends.npy holds float32\(1,\); it must be .* of int64'),
])
def test_files_that_contradict_themselves_are_refused(tmp_path, tokens, ends, dtypes, message):
  put(tmp_path, tokens, ends, dtypes)
  with pytest.raises(ValueError, match=message):
    build(tmp_path / 'a.tokens.npy')


def test_missing_and_torn_files_are_named(tmp_path):
  put(tmp_path, range(1000), [1000])
  whole = (tmp_path / 'a.tokens.npy').read_bytes()
  (tmp_path / 'a.tokens.npy').write_bytes(whole[:900])
  with pytest.raises(ValueError, match=r'a.tokens.npy is not a whole .npy file .*; write it again'):
    build(tmp_path / 'a.tokens.npy')
  (tmp_path / 'a.tokens.npy').write_bytes(whole)
  (tmp_path / 'a.ends.npy').unlink()
  with pytest.raises(FileNotFoundError, match=r'a.ends.npy does not exist; it must say where the documents of .*a.tokens.npy end'):
    build(tmp_path / 'a.tokens.npy')


def test_a_foreign_vocabulary_is_refused(tmp_path):
  token_files.write(tmp_path / 'a', DOCUMENTS)
  mixture = build(tmp_path / 'a.tokens.npy')
  tasks.check_vocabulary(mixture, 50)
  with pytest.raises(ValueError, match=r'books: the files .*a.tokens.npy hold token 49, but the model has only 49; tokenize them with its own'):
    tasks.check_vocabulary(mixture, 49)


@pytest.mark.parametrize('documents, message', [
    ([], r'There are no documents to write to .*a.tokens.npy'),
    ([np.array([1], np.int32), np.array([1], np.int64)], r'document 2 is int64\(1,\); it must be a non-empty one-dimensional int32 array'),
    ([np.array([], np.int32)], r'document 1 is int32\(0,\)'),
])
def test_write_refuses_and_leaves_nothing(tmp_path, documents, message):
  with pytest.raises(ValueError, match=message):
    token_files.write(tmp_path / 'a', documents)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('source, schema', [('npy', 'text'), ('jsonl', 'tokens')])
def test_source_and_schema_go_together(source, schema):
  with pytest.raises(ValueError, match=f"source='{source}' with schema='{schema}'; tokenized documents have source='npy' and schema='tokens'"):
    tasks.TaskConfig(('a.tokens.npy',), source, schema)
