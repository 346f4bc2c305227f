"""Fingerprints say what a path holds and not where it lies; records are whole or absent."""

import hashlib
import json
import os

import pytest

from rl import lineage


def test_a_file_is_described_by_its_content(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
  assert lineage.describe_file(path) == {'path': str(path), 'sha256': hashlib.sha256(b'{"a": 1}\n{"a": 2}\n').hexdigest(), 'bytes': 18, 'rows': 2}
  assert lineage.fingerprint(path) == lineage.describe_file(path)['sha256']


def test_fingerprints_change_with_the_content_and_not_with_the_place(tmp_path):
  for name in ('a', 'b'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'x.jsonl').write_text('1\n')
    (tmp_path / name / 'y.jsonl').write_text('2\n')
  assert lineage.fingerprint(tmp_path / 'a') == lineage.fingerprint(tmp_path / 'b')
  (tmp_path / 'b' / 'y.jsonl').write_text('3\n')
  assert lineage.fingerprint(tmp_path / 'a') != lineage.fingerprint(tmp_path / 'b')
  assert [file['rows'] for file in lineage.describe(tmp_path / 'a')] == [1, 1]


def test_a_run_is_its_newest_complete_checkpoint(tmp_path):
  for step, is_complete in ((5, True), (10, True), (15, False)):
    directory = tmp_path / 'checkpoints' / str(step)
    directory.mkdir(parents=True)
    (directory / 'arrays').write_text(f'step {step}')
    if is_complete:
      (directory / 'commit_success.txt').write_text('')
  before = lineage.fingerprint(tmp_path)
  assert before.startswith('step 10: ')
  (tmp_path / 'checkpoints' / '5' / 'arrays').write_text('other')
  assert lineage.fingerprint(tmp_path) == before
  (tmp_path / 'checkpoints' / '10' / 'arrays').write_text('other')
  assert lineage.fingerprint(tmp_path) != before


def test_what_is_not_there_has_no_fingerprint(tmp_path):
  with pytest.raises(FileNotFoundError, match='nosuch does not exist, so it has no fingerprint'):
    lineage.fingerprint(tmp_path / 'nosuch')


def test_a_record_is_the_old_one_until_the_new_one_is_whole(tmp_path, monkeypatch):
  path = tmp_path / 'records' / 'a.json'
  lineage.write_json(path, {'a': 1})

  def fail(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'fsync', fail)
  with pytest.raises(KeyboardInterrupt):
    lineage.write_json(path, {'a': 2})
  assert lineage.read_json(path) == {'a': 1}


@pytest.mark.parametrize('text, message', [('{"a": ', 'is not JSON'), (json.dumps([1]), 'must hold a JSON object, got list')])
def test_a_damaged_record_says_what_to_do(tmp_path, text, message):
  (tmp_path / 'a.json').write_text(text)
  with pytest.raises(ValueError, match=f'{message}.*delete it to have that part done again'):
    lineage.read_json(tmp_path / 'a.json')
