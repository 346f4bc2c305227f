"""Packing by hand on tiny documents, and sums of loss weights."""

import numpy as np
import pytest

from envs.core import Outcome
from rl import batching
from rl.types import PER_TOKEN, Document, Group, Trajectory

AGGREGATIONS = ('token_mean', 'sequence_mean', 'sequence_sum', 'constant', 'token_sum')


def document(tokens, mask=None, source='', **per_token):
  mask = [True] * len(tokens) if mask is None else mask
  return Document(np.array(tokens, np.int32), np.array(mask, bool), source,
                  {name: np.array(values, np.float32) for name, values in per_token.items()})


def present(batch):
  """The fields that a batch has, by name."""
  return {name: array for name, array in batch.__dict__.items() if array is not None}


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
  batch = batching.pack(documents, 2, 6, aggregation='token_mean')
  np.testing.assert_array_equal(batch.tokens_BT, [[5, 6, 7, 8, 9, 0], [3, 4, 2, 0, 0, 0]])
  np.testing.assert_array_equal(batch.targets_BT, [[6, 7, 0, 9, 0, 0], [4, 2, 0, 0, 0, 0]])
  np.testing.assert_array_equal(batch.positions_BT, [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 0, 0]])
  np.testing.assert_array_equal(batch.segment_ids_BT, [[1, 1, 1, 2, 2, 0], [1, 1, 1, 0, 0, 0]])
  # Targets: 6 and 7 of the first document, 9 of the second (its first token 8 is predicted by nothing), 2 of the third.
  np.testing.assert_array_equal(batch.loss_weight_BT, np.float32([[0.25, 0.25, 0, 0.25, 0, 0], [0, 0.25, 0, 0, 0, 0]]))
  assert {name: array.dtype.name for name, array in present(batch).items()} == {
      'tokens_BT': 'int32', 'targets_BT': 'int32', 'positions_BT': 'int32', 'segment_ids_BT': 'int32', 'loss_weight_BT': 'float32'}


def test_aggregations_by_hand():
  # 3 targets in one document, 1 in the other, none in the third.
  documents = [document([1, 2, 3, 4]), document([5, 6]), document([7, 8], [True, False])]
  weights = {}
  for aggregation in AGGREGATIONS:
    denominator = batching.step_denominator(documents, aggregation, max_length=5)
    weights[aggregation] = batching.pack(documents, 1, 8, denominator=denominator, aggregation=aggregation).loss_weight_BT[0]
  np.testing.assert_array_equal(weights['token_mean'], np.float32([1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0, 0, 0]))
  np.testing.assert_array_equal(weights['sequence_mean'], np.float32([1 / 6, 1 / 6, 1 / 6, 0, 1 / 2, 0, 0, 0]))
  np.testing.assert_array_equal(weights['sequence_sum'], np.float32([1 / 2, 1 / 2, 1 / 2, 0, 1 / 2, 0, 0, 0]))
  np.testing.assert_array_equal(weights['constant'], np.float32([1 / 10, 1 / 10, 1 / 10, 0, 1 / 10, 0, 0, 0]))
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


@pytest.mark.parametrize('aggregation', AGGREGATIONS)
def test_parts_of_a_step_with_its_denominator_are_the_step(aggregation):
  documents = random_documents(7, 12, 6)
  denominator = batching.step_denominator(documents, aggregation, max_length=6)
  whole = batching.pack(documents, 12, 6, denominator=denominator, aggregation=aggregation)
  first, second = (
      batching.pack(part, 6, 6, denominator=denominator, aggregation=aggregation) for part in (documents[:5], documents[5:]))
  parts = np.concatenate([first.loss_weight_BT, second.loss_weight_BT])
  np.testing.assert_array_equal(np.sort(parts, None), np.sort(whole.loss_weight_BT, None))


def test_an_empty_row_is_all_padding():
  batch = batching.pack_rows([[], [document([1, 2])]], 3, denominator=1, aggregation='token_mean')
  for array in present(batch).values():
    assert not array[0].any()


def pack(documents, rows, length, aggregation='token_mean', **settings):
  return batching.pack(documents, rows, length, aggregation=aggregation, **settings)


@pytest.mark.parametrize('call, message', [
    (lambda: pack([document([1, 2, 3])] * 3, 1, 7), r'Only the first 2 of 3 documents fit into rows=1 of length=7'),
    (lambda: pack([document([1, 2], [True, False], 'task:9')], 1, 4), r"'token_mean' averages.*none of the 1 doc.*task:9"),
    (lambda: pack([], 1, 4, 'sequence_mean'), r"'sequence_mean' averages.*none of the 0 documents.*none\)"),
    (lambda: pack([document([1, 2])], 1, 4, 'mean'), r"aggregation='mean' is unknown; use one of token_mean, seq"),
    (lambda: pack([document([1, 2])], 1, 4, denominator=0), r'denominator=0 must be positive and finite'),
    (lambda: pack([document([1, 2])], 1, 4, denominator=float('nan')), r'denominator=nan must be positive and finite'),
    (lambda: batching.step_denominator([document([1, 2])], 'constant'), r"'constant' divides by max_length, which is None"),
    (lambda: batching.step_denominator([document([1, 2])], 'constant', max_length=0), r'max_length=0 must be at least 1'),
    (lambda: batching.pack_rows([[document([1, 2])] * 3], 5, denominator=1, aggregation='token_sum'),
     r'Row 0 is given 6 tokens in 3 documents, it holds length=5'),
])
def test_pack_refuses(call, message):
  with pytest.raises(ValueError, match=message):
    call()


# what a document says of its tokens


def test_values_stand_where_their_token_is_predicted():
  batch = batching.pack(
      [document([5, 6, 7], [False, True, False], advantages=[np.nan, 2, 1e9], old_logprobs=[9, -1, np.nan]),
       document([8, 9], advantages=[np.inf, 3], old_logprobs=[np.nan, -2])], 2, 6, aggregation='token_sum')
  np.testing.assert_array_equal(batch.advantages_BT, [[2, 0, 0, 3, 0, 0], [0] * 6])
  np.testing.assert_array_equal(batch.old_logprobs_BT, [[-1, 0, 0, -2, 0, 0], [0] * 6])
  assert batch.advantages_BT.dtype == np.float32
  assert batch.behavior_logprobs_BT is None and batch.reference_logprobs_BT is None
  parts = batching.micro_batches(batch, 2)
  assert parts[1].behavior_logprobs_BT is None and not parts[1].advantages_BT.any()


@pytest.mark.parametrize('call, message', [
    (lambda: document([1, 2], rewards=[0, 0]), r"unknown names \['rewards'\]; use some of advantages, behavior_logprobs, old_logprobs"),
    (lambda: document([1, 2], advantages=[0]), r"per_token\['advantages'\] must be float32\(2,\) like tokens_T, got float32\(1,\)"),
    (lambda: batching.pack([document([1, 2], advantages=[0, 0]), document([1, 2], source='b')], 1, 4, aggregation='token_sum'),
     r"b has per_token \[\] and  has \['advantages'\]; the documents of a batch must have the same"),
    (lambda: batching.pack([document([1, 2, 3], source='a', old_logprobs=[0, 0, np.nan])], 1, 4, aggregation='token_sum'),
     r'a: old_logprobs of token 2 is nan, but the token is to be learned'),
])
def test_values_that_would_be_wrong_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()


# trajectories


def trajectory(mask, seed=0, **changes):
  """A trajectory in which every place that was not sampled holds what would show in a batch: token 99, NaN."""
  rng = np.random.default_rng(seed)
  mask = np.array(mask, bool)
  fields = {
      'tokens_T': np.where(mask, rng.integers(1, 90, mask.size), 99).astype(np.int32), 'loss_mask_T': mask,
      'behavior_logprobs_T': np.where(mask, -rng.random(mask.size), np.nan).astype(np.float32),
      'versions_T': np.where(mask, 3, -1).astype(np.int32), 'reward': 1.0, 'outcome': Outcome.OK, 'problem_id': 'sums/train/1/0',
      'domain': 'sums', 'level': 1, 'group': 4, 'sample': seed, 'terminated': True, 'truncated': False, 'num_turns': 1}
  return Trajectory(**(fields | changes))


def random_trajectories(seed, num, longest=24):
  """Prompt, then one to four turns of the policy with a tool's result or a template's tokens after each, the last perhaps without."""
  rng = np.random.default_rng(seed)
  made = []
  for sample in range(num):
    mask = [False] * int(rng.integers(1, 6))
    for _ in range(int(rng.integers(1, 5))):
      mask += [True] * int(rng.integers(1, 5)) + [False] * int(rng.integers(0, 4))
    made.append(trajectory(mask[:longest] if any(mask[:longest]) else [False, True], sample))
  return made


@pytest.mark.parametrize('aggregation', AGGREGATIONS)
@pytest.mark.parametrize('seed', range(8))
def test_only_what_the_policy_sampled_has_weight(seed, aggregation):
  trajectories = random_trajectories(seed, 15)
  advantages = np.random.default_rng(seed).normal(size=15)
  batches = batching.pack_step(batching.documents(trajectories, advantages), 4, 32, aggregation=aggregation, max_length=24, max_segments=3)
  found = []
  for batch in batches:
    weight = batch.loss_weight_BT
    assert batch.tokens_BT.shape == (4, 32) and batch.segment_ids_BT.max() <= 3
    # Token 99 is whatever the policy did not sample, and the target 0 is padding or what follows a document.
    np.testing.assert_array_equal(weight != 0, (batch.targets_BT != 99) & (batch.targets_BT != 0))
    assert not (weight < 0).any()
    for array in (batch.advantages_BT, batch.behavior_logprobs_BT):
      assert np.isfinite(array).all() and not array[weight == 0].any()
    assert batch.old_logprobs_BT is None and batch.reference_logprobs_BT is None
    for row, segment in {(row, batch.segment_ids_BT[row, t]) for row, t in np.argwhere(weight)}:
      mine = (batch.segment_ids_BT[row] == segment) & (weight[row] != 0)
      found.append((tuple(batch.targets_BT[row, mine]), tuple(batch.behavior_logprobs_BT[row, mine]), tuple(batch.advantages_BT[row, mine]),
                    weight[row, mine].sum(dtype=np.float64)))
  # Every sampled token is there once, beside its own logprob and advantage, with the weight of the aggregation.
  sizes = np.array([item.loss_mask_T.sum() for item in trajectories])
  share = {'token_mean': sizes / sizes.sum(), 'sequence_mean': np.full(15, 1 / 15), 'sequence_sum': sizes / 15,
           'constant': sizes / (15 * 24), 'token_sum': sizes}[aggregation]
  wanted = [(tuple(item.tokens_T[item.loss_mask_T]), tuple(item.behavior_logprobs_T[item.loss_mask_T]),
             (np.float32(advantage),) * item.loss_mask_T.sum(), pytest.approx(part, rel=1e-5))
            for item, advantage, part in zip(trajectories, advantages, share)]
  assert sorted(found, key=lambda item: item[:2]) == sorted(wanted, key=lambda item: item[:2])


def test_documents_say_what_each_token_is_worth():
  whole, part = trajectory([False, True, True]), trajectory([False, True])
  made = batching.documents([whole, part], [np.array([1e9, 1, 2], np.float32), 0.5],
                            [{'values': np.array([np.nan, 3, 4], np.float32)}, {'values': np.array([1e9, 5], np.float32)}])
  batch, = batching.pack_step(made, 1, 6, aggregation='token_sum')
  assert batch.advantages_BT.tolist() == [[1, 2, 0, 0.5, 0, 0]]
  assert batch.values_BT.tolist() == [[3, 4, 0, 5, 0, 0]]
  with pytest.raises(ValueError, match='advantage=inf must be finite, and token 2 was sampled'):
    batching.documents([whole], [np.array([0, 1, np.inf])])


def test_pack_step_uses_few_micro_batches_of_one_shape():
  # Longest first into rows of 8: [6 2], [5 3], [4 4], so two batches of two rows, the last row empty.
  documents = [document(range(1, size + 1)) for size in (2, 3, 4, 5, 6, 4)]
  batches = batching.pack_step(documents, 2, 8, aggregation='token_mean')
  assert [[row.max() for row in batch.segment_ids_BT] for batch in batches] == [[2, 2], [2, 0]]
  assert sum(batch.loss_weight_BT.sum() for batch in batches) == pytest.approx(1)
  assert [len(item.tokens_T) for item in documents] == [2, 3, 4, 5, 6, 4]
  assert len(batching.pack_step(documents, 2, 8, aggregation='token_mean', max_segments=1)) == 3


@pytest.mark.parametrize('call, message', [
    (lambda: batching.pack_step([], 2, 8, aggregation='token_sum'), r'at least one document, got none'),
    (lambda: batching.pack_step([document(range(1, 9))], 2, 4, aggregation='token_sum'), r'has 8 tokens, a row holds 1 to length=4'),
    (lambda: batching.pack_step([document([1, 2])], 2, 8, aggregation='token_sum', max_segments=0), r'max_segments=0 must be at least 1'),
    (lambda: batching.documents([trajectory([False, True], reward=None, outcome=Outcome.ENV_ERROR)], [0.0]),
     r"sums/train/1/0#4.0 is not for training, its outcome is <Outcome.ENV_ERROR: 'env_error'>; leave it out"),
    (lambda: batching.documents([trajectory([False, True])], [np.nan]), r'advantage=nan must be finite'),
    (lambda: batching.documents([trajectory([False, True])], [0.0, 1.0]), r'zip\(\)'),
])
def test_pack_step_refuses(call, message):
  with pytest.raises(ValueError, match=message):
    call()


@pytest.mark.parametrize('fields, message', [
    ({'reward': None}, r"reward=None with outcome=<Outcome.OK: 'ok'>; a reward is None exactly where"),
    ({'outcome': Outcome.VERIFIER_ERROR}, r'reward=1.0 with outcome=.*verifier_error'),
    ({'reward': np.nan}, r'reward=nan must be finite'),
    ({'outcome': 'done', 'reward': None}, r"outcome='done' is unknown; use one of ok, length, turns, timeout, env_error"),
    ({'tokens_T': np.zeros(2, np.int64)}, r'tokens_T must be one-dimensional int32, got int64\(2,\)'),
    ({'versions_T': np.zeros(3, np.int32)}, r'versions_T must be int32\(2,\) like tokens_T, got int32\(3,\)'),
    ({'behavior_logprobs_T': np.float32([np.nan, np.nan])}, r'behavior_logprobs_T\[1\]=nan where loss_mask_T is True'),
    ({'behavior_logprobs_T': np.float32([0, -1])}, r'behavior_logprobs_T\[0\]=0.0 where loss_mask_T is False; it must be known exactly'),
    ({'versions_T': np.int32([0, 1])}, r'versions_T\[0\]=0 where loss_mask_T is False'),
    ({'turn_scores': (0.5, 0.5)}, r'2 turn_scores for the 1 messages that the policy sampled'),
])
def test_trajectories_that_contradict_themselves_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    trajectory([False, True], **fields)


def test_a_group_is_of_one_problem():
  samples = (trajectory([False, True]), trajectory([False, True], 1, reward=None, outcome='judge_error'))
  assert [sample.is_valid for sample in Group('sums/train/1/0', samples).trajectories] == [True, False]
  with pytest.raises(ValueError, match=r'Group of other holds trajectories of sums/train/1/0'):
    Group('other', samples)


def test_every_per_token_name_is_a_field_of_the_batch():
  values = {name: [0.0, index + 1.0] for index, name in enumerate(PER_TOKEN)}
  batch = batching.pack([document([1, 2], **values)], 1, 2, aggregation='token_sum')
  assert [getattr(batch, f'{name}_BT')[0, 0] for name in PER_TOKEN] == list(range(1, len(PER_TOKEN) + 1))


# micro-batches


def test_micro_batches_are_the_rows_in_order():
  batch = batching.pack(random_documents(1, 6, 6), 6, 6, aggregation='token_mean')
  parts = batching.micro_batches(batch, 3)
  assert [part.tokens_BT.shape for part in parts] == [(2, 6)] * 3
  for name, array in present(batch).items():
    np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), array)


@pytest.mark.parametrize('count', [0, 4])
def test_micro_batches_refuse_a_count_that_does_not_divide(count):
  batch = batching.pack(random_documents(1, 6, 6), 6, 6, aggregation='token_mean')
  with pytest.raises(ValueError, match=f'count={count} micro-batches do not divide the 6 rows'):
    batching.micro_batches(batch, count)
