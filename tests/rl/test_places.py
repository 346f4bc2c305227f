"""Batches on a mesh: which rows and columns a process lays out, the order of tokens, and that a long row is on no host whole."""

import socket
import subprocess
import sys

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from rl import batching
from rl.batching import Place
from rl.data import token_files
from tests.rl.test_batching import document, present, random_documents


def place(spec, order='contiguous', num_ring_shards=1, **axes):
  explicit = (jax.sharding.AxisType.Explicit,) * len(axes)
  devices = jax.devices()[:int(np.prod(list(axes.values())))]
  return Place(NamedSharding(jax.make_mesh(tuple(axes.values()), tuple(axes), explicit, devices=devices), PartitionSpec(*spec)), order,
               num_ring_shards)


@pytest.mark.parametrize('spec, axes', [
    ((), {'data': 2}),
    (('data',), {'data': 2}),
    ((('data', 'fsdp'), None), {'data': 2, 'fsdp': 2, 'tensor': 2}),
    ((('data', 'fsdp'), 'seq'), {'data': 2, 'fsdp': 2, 'seq': 2}),
])
def test_to_global_keeps_values_and_takes_the_sharding(spec, axes):
  batch = batching.pack(random_documents(2, 8, 6), 8, 6, aggregation='token_mean')
  target = place(spec, **axes)
  assert batching.host_rows(target, 8) == slice(0, 8)
  for name, array in present(batching.to_global(batch, target)).items():
    assert array.sharding == target.sharding
    np.testing.assert_array_equal(np.asarray(array), getattr(batch, name))


@pytest.mark.parametrize('order', ['contiguous', 'zigzag'])
def test_what_is_computed_of_rows_comes_back_by_documents(order):
  target, documents = place((('data',), ('seq',)), order, 2, data=2, seq=2), random_documents(3, 11, 6)
  found = batching.at_places(documents, lambda batch: batch.tokens_BT * 100 + batch.positions_BT, target, 2, 8)
  assert len(found) == 11
  for array_T, item in zip(found, documents, strict=True):
    assert array_T.tolist() == [100 * int(token) + number for number, token in enumerate(item.tokens_T)]
  assert batching.at_places([], lambda batch: 1 / 0, target, 2, 8) == []


@pytest.mark.parametrize('call, message', [
    (lambda batch: batching.to_global(batch, place((('data', 'fsdp'),), data=2, fsdp=4)), r"6 rows for the 8 row shards.*'data': 2"),
    (lambda batch: batching.host_rows(place(('data',), data=4), 6), r'rows=6 .* do not divide over the 4 shards'),
    (lambda batch: batching.to_global(batch, place((None, None, 'data'), data=2)), r'has 3 dimensions, a batch has two'),
])
def test_what_does_not_divide_the_mesh_is_refused(call, message, monkeypatch):
  batch = batching.pack(random_documents(1, 6, 6), 6, 6, aggregation='token_mean')
  monkeypatch.setattr(jax, 'make_array_from_callback', lambda *_: pytest.fail('a device was used'))
  with pytest.raises(ValueError, match=message):
    call(batch)


# the order of tokens


RING = {'spec': (('data',), ('seq', 'ulysses'))}
# name -> (order, mesh, length, padded length by hand): shards of 2 and, under zigzag, of 2 pieces; ulysses splits each shard once more.
ORDERS = {
    'contiguous': ('contiguous', {'data': 2, 'seq': 4, 'ulysses': 1}, 6, 8),
    'contiguous-ulysses': ('contiguous', {'data': 1, 'seq': 2, 'ulysses': 4}, 9, 16),
    'zigzag': ('zigzag', {'data': 2, 'seq': 4, 'ulysses': 1}, 17, 24),
    'zigzag-ulysses': ('zigzag', {'data': 1, 'seq': 2, 'ulysses': 4}, 5, 8),
    'zigzag-ulysses-odd': ('zigzag', {'data': 1, 'seq': 2, 'ulysses': 3}, 10, 12),
    'striped': ('striped', {'data': 2, 'seq': 2, 'ulysses': 2}, 600, 1024),
    'one ring shard': ('zigzag', {'data': 1, 'seq': 1, 'ulysses': 4}, 6, 8),
}


def ordered(name):
  order, axes, length, padded = ORDERS[name]
  return place(order=order, num_ring_shards=axes['seq'], **RING, **axes), length, padded


def long_batch(length, rows=2, **settings):
  """Rows of a few documents, the last row without any."""
  documents = random_documents(3, 60, max(length // 3, 2))
  assignment, _ = batching.plan((len(item.tokens_T) for item in documents), rows - 1, length)
  return batching.pack_rows([*([documents[index] for index in row] for row in assignment), []], length, denominator=1,
                            aggregation='token_sum', **settings)


@pytest.mark.parametrize('name', ORDERS)
def test_every_order_round_trips_and_pads_with_nothing(name):
  target, length, padded = ordered(name)
  batch = long_batch(length)
  for field, array in present(batching.to_global(batch, target)).items():
    assert array.shape == (2, padded) and array.sharding == target.sharding
    np.testing.assert_array_equal(batching.to_host(array, target, length), getattr(batch, field))
    # All that was there is there once, and what was added is 0.
    np.testing.assert_array_equal(np.sort(np.asarray(array), 1)[:, ::-1][:, :length], np.sort(getattr(batch, field), 1)[:, ::-1])


@pytest.mark.parametrize('order, wanted', [
    # Four shards of pieces of two tokens: i and 7 - i of eight.
    ('zigzag', [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
    ('contiguous', [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
])
def test_shards_hold_the_tokens_of_their_order(order, wanted):
  """One object owns the order and its inverse; a wrong one is silently wrong (feifeibear/long-context-attention#53)."""
  target = place((None, 'seq'), order, 4, seq=4)
  batch = batching.pack([document(range(100, 116))], 1, 16, aggregation='token_sum')
  shards = batching.to_global(batch, target).positions_BT.addressable_shards
  assert [shard.data[0].tolist() for shard in sorted(shards, key=lambda shard: shard.index[1].start)] == wanted


def test_stripes_are_dealt_in_turn():
  target = place((None, 'seq'), 'striped', 2, seq=2)
  batch = batching.pack([document([1] * 1024)], 1, 1024, aggregation='token_sum')
  first, second = sorted(batching.to_global(batch, target).positions_BT.addressable_shards, key=lambda shard: shard.index[1].start)
  np.testing.assert_array_equal(first.data[0], [*range(256), *range(512, 768)])
  np.testing.assert_array_equal(second.data[0], [*range(256, 512), *range(768, 1024)])


@pytest.mark.parametrize('name', ORDERS)
def test_labels_are_shifted_before_the_order_is_applied(name):
  """A shift within shards loses the label at each boundary (HF transformers PR#36607, #48563; ChatLearn PR#343)."""
  target, length, _ = ordered(name)
  batch = batching.to_global(batching.pack([document(range(100, 100 + length))] * 2, 2, length, aggregation='token_sum'), target)
  tokens, targets, weight = (np.asarray(array) for array in (batch.tokens_BT, batch.targets_BT, batch.loss_weight_BT))
  np.testing.assert_array_equal(targets[weight != 0], tokens[weight != 0] + 1)
  assert np.count_nonzero(weight) == 2 * (length - 1)


# shares


@pytest.mark.parametrize('name', ORDERS)
def test_a_share_is_the_columns_of_the_whole(name, monkeypatch):
  target, length, padded = ordered(name)
  monkeypatch.setattr(batching, '_BLOCK_TOKENS', 5)  # Runs are cut, as long ones would be.
  share = target.share(length)
  assert share.num_columns == padded
  whole, mine = batching.to_global(long_batch(length), target), batching.share_to_global(long_batch(length, share=share), target, length)
  for field, array in present(mine).items():
    assert array.sharding == target.sharding
    np.testing.assert_array_equal(np.asarray(array), np.asarray(getattr(whole, field)))


def test_part_of_a_share_reads_only_its_own_tokens():
  # Columns hold tokens 6, 7, 2, 3 and one beyond the row.
  share = batching.Share(np.array([6, 7, 2, 3, 40]))
  batch = batching.pack_rows([[document([10, 11, 12], advantages=[0, 1, 2]), document([20, 21, 22, 23, 24], advantages=[0, 3, 4, 5, 6])]], 9,
                             denominator=2, aggregation='token_sum', share=share)
  assert {name: array[0].tolist() for name, array in present(batch).items()} == {
      'tokens_BT': [23, 24, 12, 20, 0], 'targets_BT': [24, 0, 0, 21, 0], 'positions_BT': [3, 4, 2, 0, 0],
      'segment_ids_BT': [2, 2, 1, 2, 0], 'loss_weight_BT': [0.5, 0, 0, 0.5, 0], 'advantages_BT': [6, 0, 0, 3, 0]}


def test_a_batch_that_is_not_the_share_is_refused():
  target = place((None, 'seq'), seq=4)
  with pytest.raises(ValueError, match=r'has 6 columns, but the share of process 0 of rows of 6 has 8; pack it with share=place.share\(6\)'):
    batching.share_to_global(long_batch(6), target, 6)


# several processes


def run_two(code, *arguments):
  """Run the code as two processes with two devices each and return what they print."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  pipe = subprocess.PIPE
  processes = [subprocess.Popen([sys.executable, '-c', START + code, address, str(index), *arguments], stdout=pipe, stderr=pipe, text=True)
               for index in range(2)]
  outputs = [process.communicate(timeout=200) for process in processes]
  assert [process.returncode for process in processes] == [0, 0], outputs
  return [output for output, _ in outputs]


START = """
import sys
import models
import jax
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
from rl import batching
from rl.batching import Place
from rl.types import Batch
devices = np.array(jax.devices()).reshape(2, 2)  # the first axis is the process
"""

ROWS = """
whole = np.arange(4 * 6, dtype=np.int32).reshape(4, 6)
rows_over_hosts = NamedSharding(jax.sharding.Mesh(devices, ('data', 'seq')), PartitionSpec('data', 'seq'))
length_over_hosts = NamedSharding(jax.sharding.Mesh(devices.T, ('data', 'seq')), PartitionSpec('data', 'seq'))
torn = NamedSharding(jax.sharding.Mesh(devices[[0, 1, 1, 0], [0, 0, 1, 1]], ('data',)), PartitionSpec('data'))
for place, expected in ((Place(rows_over_hosts), slice(2 * int(sys.argv[2]), 2 * int(sys.argv[2]) + 2)), (Place(length_over_hosts), slice(0, 4))):
  rows = batching.host_rows(place, 4)
  if rows != expected:
    sys.exit(f'{rows} instead of {expected}')
  array = batching.to_global(Batch(*[whole[rows]] * 5), place).tokens_BT
  for shard in array.addressable_shards:
    np.testing.assert_array_equal(shard.data, whole[shard.index])
try:
  print(batching.host_rows(Place(torn), 4))
except ValueError as error:
  print(error)
"""


def test_two_processes_hold_their_own_rows():
  outputs = run_two(ROWS)
  assert 'gives process 0 the row shards [0, 3], which have gaps' in outputs[0]
  assert outputs[1].strip() == 'slice(1, 3, None)'


LONG_ROW = """
import tracemalloc
from rl.data import token_files
from rl.data.loader import Loader
from rl.data.records import Example, TokenSpan
from rl.types import Document
path, count = sys.argv[3], int(sys.argv[4])
tracemalloc.start()
for order in ('contiguous', 'zigzag', 'striped'):
  place = Place(NamedSharding(jax.sharding.Mesh(devices.reshape(1, 4), ('data', 'seq')), PartitionSpec('data', 'seq')), order, 4)
  share = place.share(count)
  tracemalloc.reset_peak()
  before, _ = tracemalloc.get_traced_memory()

  def open_stream(position):
    yield from [Example((), 'one', TokenSpan(path, 0, count, ''))][position:]

  def encode(example):
    tokens_T = token_files.document(example.tokens)
    return Document(tokens_T, np.broadcast_to(True, tokens_T.shape), example.source)

  with Loader(open_stream, encode, rows=1, length=count, host_rows=batching.host_rows(place, 1), share=share) as loader:
    batch = batching.share_to_global(next(loader).batches[0], place, count)
  _, peak = tracemalloc.get_traced_memory()
  for field, offset in (('tokens_BT', 0), ('targets_BT', 1)):
    for shard in getattr(batch, field).addressable_shards:
      positions = np.concatenate([np.asarray(other.data[0]) for other in batch.positions_BT.addressable_shards if other.device == shard.device])
      wanted = (positions + offset) % 251
      np.testing.assert_array_equal(np.asarray(shard.data[0])[positions + offset < count], wanted[positions + offset < count])
  print(order, (peak - before) / (count // 2 * 20))
"""


def test_a_row_over_two_hosts_is_whole_on_none(tmp_path):
  """A row of 2^21 tokens, of which each process has half: 5 arrays of 4 bytes are its share, and what it allocates is little more."""
  count = 1 << 21
  token_files.write(tmp_path / 'long', [(np.arange(count) % 251).astype(np.int32)])
  for output in run_two(LONG_ROW, str(tmp_path / 'long.tokens.npy'), str(count)):
    shares = dict(line.split() for line in output.splitlines())
    assert list(shares) == ['contiguous', 'zigzag', 'striped']
    assert all(0.9 < float(share) < 1.2 for share in shares.values()), shares
