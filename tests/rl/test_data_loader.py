"""Steps from a stream: by hand, from any position, for any number of hosts, and the thread's manners."""

import itertools
import json
import threading
import time

import numpy as np
import pytest

from rl.data import loader as loader_lib
from rl.data import tasks
from rl.data.loader import Loader
from rl.data.records import Example
from rl.types import Document


def encode(example):
  """Tokens from the size in the message, so that a test chooses lengths; everything after the first half is learned."""
  size, first = (int(part) for part in example.messages[0]['content'].split(','))
  return Document(np.arange(first, first + size, dtype=np.int32), np.arange(size) >= size // 2, example.source)


def sized(*sizes):
  def open_stream(position):
    for index in range(position, len(sizes)):
      yield Example(({'role': 'assistant', 'content': f'{sizes[index]},{10 * index + 10}'},), f'row {index}')
  return open_stream


def endless(seed):
  sizes = np.random.default_rng(seed).integers(2, 13, 100_000).tolist()
  return sized(*sizes)


def steps(*arguments, count=None, **settings):
  with Loader(*arguments, **settings) as loader:
    return list(itertools.islice(loader, count))


def arrays(batch):
  """Return the (name, array) pairs that a supervised batch has."""
  return [(name, array) for name, array in batch.__dict__.items() if array is not None]


def assert_equal(left, right):
  assert [step.documents for step in left] == [step.documents for step in right]
  for one, other in zip(left, right, strict=True):
    assert one.sources == other.sources
    for first, second in zip(one.batches, other.batches, strict=True):
      for name, array in arrays(first):
        np.testing.assert_array_equal(array, getattr(second, name), strict=True)


# steps by hand


def test_steps_by_hand():
  # Rows of 6: 4 -> row 0, 3 -> row 1, 2 -> row 0, 4 fits nowhere and begins the next step, then 6, and the tail is padded.
  first, second = steps(sized(4, 3, 2, 4, 6), encode, rows=2, length=6)
  np.testing.assert_array_equal(first.batches[0].tokens_BT, [[10, 11, 12, 13, 30, 31], [20, 21, 22, 0, 0, 0]])
  np.testing.assert_array_equal(first.batches[0].segment_ids_BT, [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]])
  # Learned: the last 2 of 4, the last 2 of 3, the last of 2, so 5 targets.
  np.testing.assert_array_equal(
      first.batches[0].loss_weight_BT, np.float32([[0, 1 / 5, 1 / 5, 0, 1 / 5, 0], [1 / 5, 1 / 5, 0, 0, 0, 0]]))
  assert (first.documents, first.num_tokens, first.num_targets) == (3, 9, 5)
  assert first.sources == ('row 0', 'row 1', 'row 2')
  np.testing.assert_array_equal(second.batches[0].tokens_BT, [[40, 41, 42, 43, 0, 0], [50, 51, 52, 53, 54, 55]])
  assert second.documents == 5


def test_the_last_step_of_a_finite_stream_is_padded_with_empty_rows():
  found = steps(sized(5, 5, 5), encode, rows=2, length=6, micro_batches=1)
  assert [step.documents for step in found] == [2, 3]
  assert found[1].batches[0].tokens_BT.shape == (2, 6)
  assert not found[1].batches[0].segment_ids_BT[1].any()
  assert found[1].batches[0].loss_weight_BT.sum() == pytest.approx(1)


def test_micro_batches_are_the_rows_of_one_large_batch():
  whole = steps(endless(1), encode, rows=6, length=16, count=5)
  parts = steps(endless(1), encode, rows=2, micro_batches=3, length=16, count=5)
  assert [step.documents for step in parts] == [step.documents for step in whole]
  for one, other in zip(whole, parts, strict=True):
    for name, array in arrays(one.batches[0]):
      np.testing.assert_array_equal(np.concatenate([getattr(batch, name) for batch in other.batches]), array)
    assert sum(batch.loss_weight_BT.sum(dtype=np.float64) for batch in other.batches) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize('aggregation, total', [('sequence_mean', 1), ('token_sum', None)])
def test_aggregations_reach_the_rows(aggregation, total):
  for step in steps(endless(2), encode, rows=3, length=16, count=3, aggregation=aggregation):
    expected = step.num_targets if total is None else total
    assert step.batches[0].loss_weight_BT.sum() == pytest.approx(expected, rel=1e-6)


# position and hosts


@pytest.mark.parametrize('overlong', ['truncate', 'drop'])
def test_a_new_loader_at_the_position_goes_on_bit_for_bit(overlong):
  settings = {'rows': 2, 'length': 10, 'micro_batches': 2, 'overlong': overlong}
  whole = steps(endless(3), encode, count=12, **settings)
  for done in (1, 5, 11):
    with Loader(endless(3), encode, **settings) as loader:
      for _ in range(done):
        next(loader)
      position = loader.documents
    rest = steps(endless(3), encode, count=12 - done, position=position, **settings)
    assert_equal(rest, whole[done:])
    assert [(step.num_dropped, step.num_truncated) for step in rest] == [(step.num_dropped, step.num_truncated) for step in whole[done:]]


@pytest.mark.parametrize('hosts', [2, 4])
def test_hosts_together_give_the_batch_of_one(hosts):
  settings = {'rows': 4, 'length': 16, 'micro_batches': 2, 'count': 4}
  whole = steps(endless(4), encode, **settings)
  size = 4 // hosts
  parts = [steps(endless(4), encode, host_rows=slice(host * size, (host + 1) * size), **settings) for host in range(hosts)]
  for index, step in enumerate(whole):
    assert {part[index].documents for part in parts} == {step.documents}
    assert {part[index].num_targets for part in parts} == {step.num_targets}
    for micro_batch, batch in enumerate(step.batches):
      for name, array in arrays(batch):
        rows = [getattr(part[index].batches[micro_batch], name) for part in parts]
        np.testing.assert_array_equal(np.concatenate(rows), array)


def test_from_files_and_back_at_any_step(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text(''.join(json.dumps({'text': f'{2 + index % 9},{index}'}) + '\n' for index in range(90)))
  mixture = tasks.build_mixture(tasks.MixtureConfig({'t': tasks.TaskConfig((str(path),), schema='text')}))

  def open_stream(position):
    return tasks.examples(mixture, seed=3, position=position)

  settings = {'rows': 2, 'length': 12}
  whole = steps(open_stream, encode, count=60, **settings)
  assert whole[-1].documents > 180  # beyond two epochs
  for done in (7, 40):
    assert_equal(steps(open_stream, encode, count=5, position=whole[done - 1].documents, **settings), whole[done:done + 5])


# documents that do not fit


def test_overlong_error_names_the_row():
  with pytest.raises(ValueError, match=r"^row 1: the document has 7 tokens, a row holds length=6; .*overlong='truncate' or 'drop'"):
    steps(sized(4, 7), encode, rows=1, length=6)


def test_overlong_truncate_keeps_the_beginning_and_counts():
  step, = steps(sized(3, 9), encode, rows=2, length=6, overlong='truncate')
  np.testing.assert_array_equal(step.batches[0].tokens_BT, [[10, 11, 12, 0, 0, 0], [20, 21, 22, 23, 24, 25]])
  assert (step.num_truncated, step.num_dropped, step.num_targets) == (1, 0, 4)


def test_overlong_drop_counts_and_moves_the_position():
  # 9 is dropped; 4 and 2 fill the row; 9 is dropped within the first step's span; 5 begins the second.
  first, second = steps(sized(9, 4, 2, 9, 5, 8), encode, rows=1, length=6, overlong='drop')
  assert (first.sources, first.documents, first.num_dropped) == (('row 1', 'row 2'), 4, 2)
  assert (second.sources, second.documents, second.num_dropped) == (('row 4',), 6, 1)


def test_a_truncated_document_with_nothing_left_to_learn_is_dropped():
  step, = steps(sized(4, 20), encode, rows=2, length=6, overlong='truncate')
  assert (step.sources, step.num_truncated, step.num_dropped, step.documents) == (('row 0',), 0, 1, 2)


def test_a_document_with_nothing_to_learn_is_named():
  with pytest.raises(ValueError, match=r'^row 0: the document has 1 tokens and none to learn after its first'):
    steps(sized(1), encode, rows=1, length=6)


def test_a_stream_of_which_nothing_fits_is_an_error(monkeypatch):
  with pytest.raises(ValueError, match=r'ended without one document that fits a row of length=4'):
    steps(sized(9, 9), encode, rows=1, length=4, overlong='drop')
  monkeypatch.setattr(loader_lib, 'MAX_DROPPED_IN_A_ROW', 5)
  with pytest.raises(ValueError, match=r"5 documents in a row, up to row 5, were dropped .*length=4 \(overlong='drop'\); raise length"):
    steps(sized(3, *[9] * 50), encode, rows=1, length=4, overlong='drop')


# the thread


def test_an_error_of_encode_reaches_the_consumer_after_the_good_steps_and_stays():
  def refuse(example):
    if example.source == 'row 2':
      raise ValueError('no such role')
    return encode(example)

  with Loader(sized(5, 5, 5, 5), refuse, rows=1, length=6) as loader:
    assert next(loader).documents == 1
    for _ in range(2):
      with pytest.raises(ValueError, match='^row 2: no such role$'):
        while True:
          next(loader)
    assert loader.documents == 1


def test_any_other_error_reaches_the_consumer_too():
  def open_stream(position):
    yield from sized(5)(position)
    raise OSError('disk is gone')

  with Loader(open_stream, encode, rows=1, length=6) as loader, pytest.raises(OSError, match='disk is gone'):
    list(loader)


def test_an_ended_stream_stays_ended():
  with Loader(sized(5), encode, rows=1, length=6) as loader:
    assert len(list(loader)) == 1
    assert list(loader) == []


def test_no_more_than_the_prefetch_is_prepared_and_close_ends_the_thread():
  encoded = []

  def count(example):
    encoded.append(example.source)
    return encode(example)

  before = threading.active_count()
  with Loader(sized(*[5] * 100), count, rows=1, length=6, prefetch=2) as loader:
    next(loader)
    deadline = time.monotonic() + 10
    while len(encoded) < 5 and time.monotonic() < deadline:
      time.sleep(0.01)
    time.sleep(0.2)
    # One step taken, two waiting, one in hand, and the document that did not fit into it.
    assert len(encoded) == 5
  assert threading.active_count() == before
  with pytest.raises(RuntimeError, match='The loader is closed; start a new one at its `documents`'):
    next(loader)
  loader.close()


@pytest.mark.parametrize('settings, message', [
    ({'rows': 0}, r'rows=0 must be at least 1'),
    ({'length': 0}, r'length=0 must be at least 1'),
    ({'micro_batches': 0}, r'micro_batches=0 must be at least 1'),
    ({'prefetch': 0}, r'prefetch=0 must be at least 1'),
    ({'position': -1}, r'position=-1 must be at least 0'),
    ({'overlong': 'cut'}, r"overlong='cut' is unknown; use one of error, truncate, drop"),
    ({'host_rows': slice(2, 5)}, r'host_rows=slice\(2, 5, None\) must be a non-empty part of the rows 0 to 4'),
    ({'aggregation': 'mean'}, r"aggregation='mean' is unknown"),
])
def test_bad_settings(settings, message):
  with pytest.raises(ValueError, match=message):
    steps(sized(4), encode, **{'rows': 4, 'length': 6} | settings)
