"""A teacher's words of texts: kept once, found by content, whole or not there; and how several words of a token reach a batch."""

import jax
import numpy as np
import pytest

from models import sharding
from rl import batching
from rl.data.loader import Loader
from rl.data.records import Example
from rl.teacher_words import TeacherWords
from rl.types import Document

LENGTH, COUNT = 16, 3
PLACES = {'one': {}, 'seq2_zigzag': {'seq': 2}}


def place(name):
  sizes = PLACES[name]
  mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:int(np.prod(list(sizes.values()), initial=1))])
  layout = sharding.Layout(order='zigzag' if sizes else 'contiguous')
  return batching.Place.of(layout, mesh)


def documents(count=5):
  rng = np.random.default_rng(0)
  made = []
  for _ in range(count):
    size = int(rng.integers(3, 9))
    mask = rng.random(size) < 0.6
    mask[1] = True
    made.append(Document(rng.integers(1, 90, size).astype(np.int32), mask, f'toy:{len(made)}'))
  return made


def teacher(batch):
  """A teacher whose words are the target and those after it, and whose logprobs say the place."""
  ids = batch.targets_BT[..., None] + np.arange(COUNT, dtype=np.int32)[None, None]
  logprobs = -(batch.positions_BT[..., None] + np.arange(COUNT, dtype=np.float32)[None, None] / 10)
  return ids, logprobs


def check_words(document):
  mask = document.loss_mask_T.copy()
  mask[0] = False
  places = np.flatnonzero(mask)
  np.testing.assert_array_equal(document.per_token['teacher_ids'][mask], document.tokens_T[mask][:, None] + np.arange(COUNT))
  np.testing.assert_allclose(document.per_token['teacher_logprobs'][mask], -(places[:, None] - 1 + np.arange(COUNT) / 10), rtol=1e-6)
  assert np.isnan(document.per_token['teacher_logprobs'][~mask]).all()


@pytest.mark.parametrize('name', PLACES)
def test_words_belong_to_the_learned_tokens_of_their_text(name, tmp_path):
  words = TeacherWords(tmp_path, {'teacher': 'a'}, COUNT)
  words.score(documents(), teacher, place(name), 2, LENGTH)
  for document in documents():
    check_words(words.attach(document))


def test_a_text_that_comes_again_is_not_scored_again(tmp_path):
  calls = []

  def counted(batch):
    calls.append(batch)
    return teacher(batch)

  words = TeacherWords(tmp_path, {'teacher': 'a'}, COUNT)
  words.score(documents(2) * 3, counted, place('one'), 2, LENGTH)
  assert len(calls) == 1
  again = TeacherWords(tmp_path, {'teacher': 'a'}, COUNT)
  again.score(documents(2), counted, place('one'), 2, LENGTH)
  assert len(calls) == 1
  check_words(again.attach(documents()[0]))
  again.score(documents(3), counted, place('one'), 2, LENGTH)
  assert len(calls) == 2 and documents()[2] in again
  check_words(TeacherWords(tmp_path, {'teacher': 'a'}, COUNT).attach(documents()[2]))


def test_what_decides_the_words_has_a_directory_of_its_own(tmp_path):
  TeacherWords(tmp_path, {'teacher': 'a'}, COUNT).score(documents(1), teacher, place('one'), 2, LENGTH)
  assert documents(1)[0] in TeacherWords(tmp_path, {'teacher': 'a'}, COUNT)
  for identity, count in (({'teacher': 'b'}, COUNT), ({'teacher': 'a'}, COUNT + 1)):
    assert documents(1)[0] not in TeacherWords(tmp_path, identity, count)
  other = documents(1)[0]
  assert Document(other.tokens_T, ~other.loss_mask_T) not in TeacherWords(tmp_path, {'teacher': 'a'}, COUNT)


def test_a_part_without_its_index_is_not_there(tmp_path):
  TeacherWords(tmp_path, {}, COUNT).score(documents(1), teacher, place('one'), 2, LENGTH)
  index, = tmp_path.glob('*/*.index.npy')
  index.unlink()
  words = TeacherWords(tmp_path, {}, COUNT)
  with pytest.raises(KeyError):
    words.attach(documents(1)[0])
  words.score(documents(1), teacher, place('one'), 2, LENGTH)
  check_words(words.attach(documents(1)[0]))


@pytest.mark.parametrize('name', PLACES)
def test_words_stand_at_the_places_that_predict_their_tokens(name, tmp_path):
  where = place(name)
  words = TeacherWords(tmp_path, {}, COUNT)
  words.score(documents(), teacher, where, 2, LENGTH)
  given = [words.attach(document) for document in documents()]
  batch = batching.pack_rows([given[:2], given[2:4]], LENGTH, denominator=1, aggregation='token_sum')
  ids, logprobs = (batching.to_host(array, where, LENGTH) for array in (
      batching.to_global(batch, where).teacher_ids_BTJ, batching.share_to_global(
          batching.pack_rows([given[:2], given[2:4]], LENGTH, denominator=1, aggregation='token_sum', share=where.share(LENGTH)), where,
          LENGTH).teacher_logprobs_BTJ))
  learned = batch.loss_weight_BT != 0
  np.testing.assert_array_equal(ids[learned], batch.targets_BT[learned][:, None] + np.arange(COUNT))
  np.testing.assert_allclose(logprobs[learned], -(batch.positions_BT[learned][:, None] + np.arange(COUNT) / 10), rtol=1e-6)
  assert not ids[~learned].any() and not logprobs[~learned].any()


def test_a_text_that_is_cut_keeps_the_words_of_what_is_left():
  tokens = np.arange(1, 13, dtype=np.int32)
  ids = np.tile(tokens[:, None], (1, COUNT))
  document = Document(tokens, np.ones(12, bool), per_token={'teacher_ids': ids, 'teacher_logprobs': -ids.astype(np.float32)})
  with Loader(lambda _: iter([Example('toy:0', None, None)]), lambda _: document, rows=1, length=8, overlong='truncate') as loader:
    batch = next(loader).batches[0]
  np.testing.assert_array_equal(batch.teacher_ids_BTJ[0, :, 0], [2, 3, 4, 5, 6, 7, 8, 0])


@pytest.mark.parametrize(('name', 'array', 'message'), [
    ('teacher_ids', np.zeros((3, 2), np.float32), r"per_token\['teacher_ids'\] must be int32\(3, 2\) like tokens_T, got float32\(3, 2\)"),
    ('teacher_logprobs', np.zeros((2, 2), np.float32), r"per_token\['teacher_logprobs'\] must be float32\(3, 2\).*got float32\(2, 2\)"),
    ('advantages', np.zeros((3, 2), np.float32), r"per_token\['advantages'\] must be float32\(3,\) like tokens_T, got float32\(3, 2\)"),
    ('words', np.zeros((3, 2), np.float32), r"unknown names \['words'\]; use some of .*teacher_logprobs"),
])
def test_words_of_another_shape_are_refused(name, array, message):
  with pytest.raises(ValueError, match=message):
    Document(np.arange(3, dtype=np.int32), np.ones(3, bool), per_token={name: array})


def test_words_of_learned_tokens_must_be_finite():
  logprobs = np.zeros((3, 2), np.float32)
  logprobs[2, 1] = np.nan
  document = Document(np.arange(3, dtype=np.int32), np.ones(3, bool), 'toy:0', {'teacher_logprobs': logprobs})
  with pytest.raises(ValueError, match='toy:0: teacher_logprobs of token 2 is'):
    batching.pack_rows([[document]], 4, denominator=1, aggregation='token_sum')
