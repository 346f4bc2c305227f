"""Packing by hand on tiny documents, sums of loss weights, and rows on a mesh."""

import socket
import subprocess
import sys

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from rl import batching
from rl.types import Document


def document(tokens, mask=None, source=''):
  mask = [True] * len(tokens) if mask is None else mask
  return Document(np.array(tokens, np.int32), np.array(mask, bool), source)


def random_documents(seed, num, longest):
  random = np.random.default_rng(seed)
  sizes = random.integers(2, longest + 1, num)
  return [
      document(random.integers(1, 100, size), [False, *(random.random(size - 2) < 0.6), True], f'task:{index}')
      for index, size in enumerate(sizes)]


def unpack(batch):
  """Read the documents back from tokens, segments and targets, row by row."""
  found = []
  for row in range(batch.tokens_BT.shape[0]):
    for segment in range(1, batch.segment_ids_BT[row].max() + 1):
      place = np.flatnonzero(batch.segment_ids_BT[row] == segment)
      np.testing.assert_array_equal(batch.positions_BT[row, place], np.arange(len(place)))
      np.testing.assert_array_equal(batch.targets_BT[row, place], [*batch.tokens_BT[row, place][1:], 0])
      found.append(batch.tokens_BT[row, place].tolist())
  return found


# plan


def test_plan_is_first_fit_in_order_and_stops_at_the_first_that_fits_nowhere():
  # Rows of 10: 6 -> row 0; 5 -> row 1; 4 -> row 0 (full); 3 -> row 1 (2 free); 3 fits nowhere, so the 2 that would fit is not taken.
  assert batching.plan([6, 5, 4, 3, 3, 2], 2, 10) == ([[0, 2], [1, 3]], 4)


def test_plan_reads_lengths_only_as_far_as_it_must():
  read = []

  def lengths():
    for size in (4, 4, 4, 4):
      read.append(size)
      yield size

  assert batching.plan(lengths(), 1, 9) == ([[0, 1]], 2)
  assert len(read) == 3


def test_plan_leaves_rows_empty_when_documents_run_out():
  assert batching.plan([], 2, 4) == ([[], []], 0)
  assert batching.plan([4], 3, 4) == ([[0], [], []], 1)


@pytest.mark.parametrize('lengths, rows, length, message', [
    ([3, 5], 2, 4, r'Document 1 has 5 tokens, a row holds 1 to length=4; drop or truncate it'),
    ([0], 2, 4, r'Document 0 has 0 tokens'),
    ([1], 0, 4, r'rows=0 must be at least 1'),
    ([1], 1, 0, r'length=0 must be at least 1'),
])
def test_plan_refuses(lengths, rows, length, message):
  with pytest.raises(ValueError, match=message):
    batching.plan(lengths, rows, length)


# pack


def test_pack_by_hand():
  documents = [document([5, 6, 7], [False, True, True]), document([8, 9], [True, True]), document([3, 4, 2], [False, False, True])]
  batch = batching.pack(documents, 2, 6)
  np.testing.assert_array_equal(batch.tokens_BT, [[5, 6, 7, 8, 9, 0], [3, 4, 2, 0, 0, 0]])
  np.testing.assert_array_equal(batch.targets_BT, [[6, 7, 0, 9, 0, 0], [4, 2, 0, 0, 0, 0]])
  np.testing.assert_array_equal(batch.positions_BT, [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 0, 0]])
  np.testing.assert_array_equal(batch.segment_ids_BT, [[1, 1, 1, 2, 2, 0], [1, 1, 1, 0, 0, 0]])
  # Targets: 6 and 7 of the first document, 9 of the second (its first token 8 is predicted by nothing), 2 of the third.
  np.testing.assert_array_equal(batch.loss_weight_BT, np.float32([[0.25, 0.25, 0, 0.25, 0, 0], [0, 0.25, 0, 0, 0, 0]]))
  assert {name: array.dtype.name for name, array in batch.__dict__.items()} == {
      'tokens_BT': 'int32', 'targets_BT': 'int32', 'positions_BT': 'int32', 'segment_ids_BT': 'int32', 'loss_weight_BT': 'float32'}


def test_aggregations_by_hand():
  # 3 targets in one document, 1 in the other, none in the third.
  documents = [document([1, 2, 3, 4]), document([5, 6]), document([7, 8], [True, False])]
  weights = {
      aggregation: batching.pack(documents, 1, 8, aggregation=aggregation).loss_weight_BT[0]
      for aggregation in ('token_mean', 'sequence_mean', 'token_sum')}
  np.testing.assert_array_equal(weights['token_mean'], np.float32([1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0, 0, 0]))
  np.testing.assert_array_equal(weights['sequence_mean'], np.float32([1 / 6, 1 / 6, 1 / 6, 0, 1 / 2, 0, 0, 0]))
  np.testing.assert_array_equal(weights['token_sum'], np.float32([1, 1, 1, 0, 1, 0, 0, 0]))


def test_num_targets_leaves_out_first_tokens():
  assert batching.num_targets([document([1, 2, 3]), document([4]), document([5, 6], [True, False])]) == 2


@pytest.mark.parametrize('aggregation, total', [('token_mean', 1), ('sequence_mean', 1), ('token_sum', None)])
@pytest.mark.parametrize('seed', range(3))
def test_weights_of_a_step_add_up_and_documents_come_back(seed, aggregation, total):
  documents = random_documents(seed, 23, 9)
  batch = batching.pack(documents, 16, 12, aggregation=aggregation)
  total = batching.num_targets(documents) if total is None else total
  assert batch.loss_weight_BT.sum(dtype=np.float64) == pytest.approx(total, rel=1e-6)
  assert not batch.loss_weight_BT[batch.segment_ids_BT == 0].any()
  assert sorted(unpack(batch)) == sorted(document.tokens_T.tolist() for document in documents)


@pytest.mark.parametrize('aggregation', ['token_mean', 'sequence_mean', 'token_sum'])
def test_parts_of_a_step_with_its_denominator_are_the_step(aggregation):
  documents = random_documents(7, 12, 6)
  denominator = batching.step_denominator(documents, aggregation)
  whole = batching.pack(documents, 12, 6, aggregation=aggregation)
  first, second = (
      batching.pack(part, 6, 6, denominator=denominator, aggregation=aggregation) for part in (documents[:5], documents[5:]))
  parts = np.concatenate([first.loss_weight_BT, second.loss_weight_BT])
  np.testing.assert_array_equal(np.sort(parts, None), np.sort(whole.loss_weight_BT, None))


def test_an_empty_row_is_all_padding():
  batch = batching.pack_rows([[], [document([1, 2])]], 3, denominator=1)
  for array in batch.__dict__.values():
    assert not array[0].any()


@pytest.mark.parametrize('call, message', [
    (lambda: batching.pack([document([1, 2, 3])] * 3, 1, 7), r'Only the first 2 of 3 documents fit into rows=1 of length=7'),
    (lambda: batching.pack([document([1, 2], [True, False], 'task:9')], 1, 4), r"'token_mean' averages.*none of the 1 doc.*task:9"),
    (lambda: batching.pack([], 1, 4, aggregation='sequence_mean'), r"'sequence_mean' averages.*none of the 0 documents.*none\)"),
    (lambda: batching.pack([document([1, 2])], 1, 4, aggregation='mean'), r"aggregation='mean' is unknown; use one of token_mean, seq"),
    (lambda: batching.pack([document([1, 2])], 1, 4, denominator=0), r'denominator=0 must be positive and finite'),
    (lambda: batching.pack([document([1, 2])], 1, 4, denominator=float('nan')), r'denominator=nan must be positive and finite'),
    (lambda: batching.pack_rows([[document([1, 2])] * 3], 5, denominator=1), r'Row 0 is given 6 tokens in 3 documents, it holds length=5'),
])
def test_pack_refuses(call, message):
  with pytest.raises(ValueError, match=message):
    call()


# micro-batches and the mesh


def test_micro_batches_are_the_rows_in_order():
  batch = batching.pack(random_documents(1, 6, 6), 6, 6)
  parts = batching.micro_batches(batch, 3)
  assert [part.tokens_BT.shape for part in parts] == [(2, 6)] * 3
  for name, array in batch.__dict__.items():
    np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), array)


@pytest.mark.parametrize('count', [0, 4])
def test_micro_batches_refuse_a_count_that_does_not_divide(count):
  batch = batching.pack(random_documents(1, 6, 6), 6, 6)
  with pytest.raises(ValueError, match=f'count={count} micro-batches do not divide the 6 rows'):
    batching.micro_batches(batch, count)


def sharding(spec, **axes):
  explicit = (jax.sharding.AxisType.Explicit,) * len(axes)
  devices = jax.devices()[:int(np.prod(list(axes.values())))]
  return NamedSharding(jax.make_mesh(tuple(axes.values()), tuple(axes), explicit, devices=devices), PartitionSpec(*spec))


@pytest.mark.parametrize('spec, axes', [
    ((), {'data': 2}),
    (('data',), {'data': 2}),
    ((('data', 'fsdp'), None), {'data': 2, 'fsdp': 2, 'tensor': 2}),
    ((('data', 'fsdp'), 'seq'), {'data': 2, 'fsdp': 2, 'seq': 2}),
])
def test_to_global_keeps_values_and_takes_the_sharding(spec, axes):
  batch = batching.pack(random_documents(2, 8, 6), 8, 6)
  target = sharding(spec, **axes)
  assert batching.host_rows(target, 8) == slice(0, 8)
  for name, array in batching.to_global(batch, target).__dict__.items():
    assert array.sharding == target
    np.testing.assert_array_equal(np.asarray(array), getattr(batch, name))


@pytest.mark.parametrize('call, message', [
    (lambda batch: batching.to_global(batch, sharding((('data', 'fsdp'),), data=2, fsdp=4)), r"6 rows for the 8 row shards.*'data': 2"),
    (lambda batch: batching.to_global(batch, sharding((None, 'seq'), seq=4)), r'length=6 does not divide over the 4 shards'),
    (lambda batch: batching.host_rows(sharding(('data',), data=4), 6), r'rows=6 .* do not divide over the 4 shards'),
    (lambda batch: batching.to_global(batch, sharding((None, None, 'data'), data=2)), r'has 3 dimensions, a batch has two'),
])
def test_what_does_not_divide_the_mesh_is_refused(call, message, monkeypatch):
  batch = batching.pack(random_documents(1, 6, 6), 6, 6)
  monkeypatch.setattr(jax, 'make_array_from_callback', lambda *_: pytest.fail('a device was used'))
  with pytest.raises(ValueError, match=message):
    call(batch)


TWO_PROCESSES = """
import sys
import models
import jax
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
from rl import batching
from rl.types import Batch
whole = np.arange(4 * 6, dtype=np.int32).reshape(4, 6)
devices = np.array(jax.devices()).reshape(2, 2)  # the first axis is the process
rows_over_hosts = NamedSharding(jax.sharding.Mesh(devices, ('data', 'seq')), PartitionSpec('data', 'seq'))
length_over_hosts = NamedSharding(jax.sharding.Mesh(devices.T, ('data', 'seq')), PartitionSpec('data', 'seq'))
torn = NamedSharding(jax.sharding.Mesh(devices[[0, 1, 1, 0], [0, 0, 1, 1]], ('data',)), PartitionSpec('data'))
for sharding, expected in ((rows_over_hosts, slice(2 * int(sys.argv[2]), 2 * int(sys.argv[2]) + 2)), (length_over_hosts, slice(0, 4))):
  rows = batching.host_rows(sharding, 4)
  if rows != expected:
    sys.exit(f'{rows} instead of {expected}')
  array = batching.to_global(Batch(*[whole[rows]] * 5), sharding).tokens_BT
  for shard in array.addressable_shards:
    np.testing.assert_array_equal(shard.data, whole[shard.index])
try:
  print(batching.host_rows(torn, 4))
except ValueError as error:
  print(error)
"""


def test_two_processes_hold_their_own_rows():
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  pipe = subprocess.PIPE
  processes = [
      subprocess.Popen([sys.executable, '-c', TWO_PROCESSES, address, str(index)], stdout=pipe, stderr=pipe, text=True)
      for index in range(2)]
  outputs = [process.communicate(timeout=120) for process in processes]
  assert [process.returncode for process in processes] == [0, 0], outputs
  assert 'gives process 0 the row shards [0, 3], which have gaps' in outputs[0][0]
  assert outputs[1][0].strip() == 'slice(1, 3, None)'
