"""Documents into fixed rows: which row each goes to, what the rows hold, and how rows reach the devices.

A row of a `Batch` holds whole documents one after the other. Everything a loss needs beside the logits is decided here, on the host:
`loss_weight_BT` already contains the mask, the aggregation and the denominator of the whole optimizer step, so micro-batches, hosts and
devices only add up. The weight sits at the place that predicts: place t carries the weight of the token at t + 1 of the same document, and
so does everything else that a document says of its tokens.

One row may be longer than a host should hold. Then each lays out its `Share`: the columns of its own devices, already in their order. Targets
are the document's next tokens, so they are right at the edges of shares too.

Deliberately absent: splitting a document over rows (its context would be lost in silence), and any token id that means padding.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
import math
from typing import Any, Literal, get_args

import jax
from jax.experimental import multihost_utils
import numpy as np

from models import token_order
from models.sharding import Layout
from rl.types import Batch, Document, Trajectory

Aggregation = Literal['token_mean', 'sequence_mean', 'sequence_sum', 'constant', 'token_sum']

_BLOCK_TOKENS = 65_536


def plan(lengths: Iterable[int], rows: int, length: int, max_segments: int | None = None) -> tuple[list[list[int]], int]:
  """Assign documents to rows first-fit, in order, up to the first that fits in no row.

  Order is kept so that the documents of a step are a prefix of the stream: its position is then one integer. `lengths` is read lazily, one
  past the last document taken.

  Args:
    lengths: tokens of each document.
    rows: number of rows.
    length: tokens a row holds.
    max_segments: documents a row holds; None for no limit.

  Returns:
    The indices of the documents in each row, and how many documents were taken.

  Raises:
    ValueError: `rows`, `length` or `max_segments` below 1, or a document that is empty or longer than a row.
  """
  check_at_least_one(rows=rows, length=length, max_segments=1 if max_segments is None else max_segments)
  free = np.full(rows, length)
  assignment: list[list[int]] = [[] for _ in range(rows)]
  num_taken = 0
  for size in lengths:
    if not 1 <= size <= length:
      raise ValueError(f'Document {num_taken} has {size} tokens, a row holds 1 to length={length}; drop or truncate it, or raise length.')
    row = int(np.argmax(free >= size))
    if free[row] < size:
      break
    assignment[row].append(num_taken)
    free[row] = 0 if len(assignment[row]) == max_segments else free[row] - size
    num_taken += 1
  return assignment, num_taken


def num_targets(documents: Iterable[Document]) -> int:
  """Return how many tokens are to be learned; a document's first token is predicted by nothing and never counts."""
  return sum(int(np.count_nonzero(document.loss_mask_T[1:])) for document in documents)


def step_denominator(documents: Sequence[Document], aggregation: Aggregation, *, max_length: int | None = None) -> int:
  """Return what the loss of one optimizer step is divided by, from all of its documents: those of every micro-batch and every host.

  With N documents that have a target, the i-th of them T_i targets with losses l_it:
    `token_mean`: sum of l_it / sum of T_i (DAPO, arXiv:2503.14476 eq. 8).
    `sequence_mean`: 1/N sum_i (1/T_i sum_t l_it) (GRPO, arXiv:2402.03300 eq. 3).
    `sequence_sum`: 1/N sum_i sum_t l_it (RLOO, arXiv:2402.14740).
    `constant`: 1/(N max_length) sum_i sum_t l_it (Dr. GRPO, arXiv:2503.20783): length weighs nothing.
    `token_sum`: sum of l_it.

  Args:
    max_length: targets that a document may have at most; read by `constant` alone.

  Raises:
    ValueError: an unknown aggregation, a mean over nothing, or `constant` without a max_length.
  """
  _check_aggregation(aggregation)
  if aggregation == 'token_sum':
    return 1
  if aggregation == 'constant':
    if max_length is None:
      raise ValueError("aggregation='constant' divides by max_length, which is None; set it to the most tokens a reply may have.")
    check_at_least_one(max_length=max_length)
  if aggregation == 'token_mean':
    denominator = num_targets(documents)
  else:
    denominator = sum(num_targets([document]) > 0 for document in documents)
  if denominator == 0:
    sources = ', '.join(document.source or '(unnamed)' for document in documents[:3]) or 'none'
    raise ValueError(
        f'aggregation={aggregation!r} averages over the tokens to learn, and none of the {len(documents)} documents has one '
        f'(first ones: {sources}); loss_mask_T must be true somewhere after the first token.')
  return denominator * max_length if aggregation == 'constant' else denominator


def pack(
    documents: Sequence[Document], rows: int, length: int, *, aggregation: Aggregation, denominator: float | None = None,
) -> Batch:
  """Pack all the documents into a numpy `Batch` of shape [rows, length].

  Args:
    documents: they must all fit (see `plan`).
    rows: number of rows B.
    length: tokens T of a row.
    aggregation: how token losses become one number (see `step_denominator`).
    denominator: of the whole step; None means that these documents are the whole step.

  Raises:
    ValueError: the documents do not fit, or what `plan`, `step_denominator` and `pack_rows` refuse.
  """
  assignment, num_taken = plan((len(document.tokens_T) for document in documents), rows, length)
  if num_taken < len(documents):
    raise ValueError(
        f'Only the first {num_taken} of {len(documents)} documents fit into rows={rows} of length={length}; '
        'pass fewer documents, or raise rows or length.')
  if denominator is None:
    denominator = step_denominator(documents, aggregation)
  return pack_rows([[documents[index] for index in row] for row in assignment], length, denominator=denominator, aggregation=aggregation)


def pack_step(documents: Sequence[Document], rows: int, length: int, *, aggregation: Aggregation, denominator: float | None = None,
              max_length: int | None = None, max_segments: int | None = None) -> list[Batch]:
  """Pack all documents of an optimizer step, longest first, into as few numpy micro-batches of shape [rows, length] as first-fit finds.

  The last micro-batch is padded with empty rows. The arguments are those of `step_denominator` and `plan`; a `denominator` is given where
  the step has more documents than are packed.

  Raises:
    ValueError: no documents, or what `plan`, `step_denominator` and `pack_rows` refuse.
  """
  check_at_least_one(rows=rows)
  if not documents:
    raise ValueError('An optimizer step needs at least one document, got none.')
  if denominator is None:
    denominator = step_denominator(documents, aggregation, max_length=max_length)
  by_length = sorted(documents, key=lambda document: -len(document.tokens_T))
  assignment, _ = plan((len(document.tokens_T) for document in by_length), len(documents), length, max_segments)
  filled = [[by_length[index] for index in row] for row in assignment if row]
  filled += [[]] * (-len(filled) % rows)
  return micro_batches(pack_rows(filled, length, denominator=denominator, aggregation=aggregation), len(filled) // rows)


class Share:
  """Which tokens of a row a process lays out, and in which columns.

  Attributes:
    num_columns: of what it lays out; where none of its tokens lies there is padding.
  """

  def __init__(self, token_T: np.ndarray):
    """Take the tokens of the columns, in order; numbers that no row reaches are padding."""
    self.num_columns = len(token_T)
    starts = np.flatnonzero(np.diff(token_T, prepend=-2) != 1)
    # Long runs are cut, so that whatever is computed of one is small beside the share.
    starts = np.unique(np.concatenate([starts, np.arange(0, len(token_T), _BLOCK_TOKENS)]))
    runs = zip(token_T[starts].tolist(), starts.tolist(), np.diff(starts, append=len(token_T)).tolist(), strict=True)
    self._runs = sorted(runs)

  def of(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Yield (columns, tokens counted from `start`) of what the share has of a row's tokens from `start` to `stop`."""
    for index in range(max(bisect.bisect_right(self._runs, (start, math.inf)) - 1, 0), len(self._runs)):
      token, column, size = self._runs[index]
      if token >= stop:
        return
      first, last = max(start, token), min(stop, token + size)
      if first < last:
        yield slice(column + first - token, column + last - token), slice(first - start, last - start)


def pack_rows(rows: Sequence[Sequence[Document]], length: int, *, denominator: float, aggregation: Aggregation,
              share: Share | None = None) -> Batch:
  """Lay out rows whose documents are already chosen as a numpy `Batch` of shape [len(rows), length]; an empty row is all padding.

  A target's weight is 1 / denominator, and under `sequence_mean` also divided by the number of targets in its document. With a `share` only
  its columns are laid out, and only their tokens are read.

  Raises:
    ValueError: a row too long, a denominator that is not a positive number, an unknown aggregation, documents that differ in what they say
      of their tokens, or a value of a target that is not finite.
  """
  _check_aggregation(aggregation)
  if not (denominator > 0 and math.isfinite(denominator)):
    raise ValueError(f'denominator={denominator} must be positive and finite; it is the step_denominator of the whole optimizer step.')
  share = Share(np.arange(length)) if share is None else share
  shape = (len(rows), share.num_columns)
  tokens_BT, targets_BT, positions_BT, segment_ids_BT = (np.zeros(shape, np.int32) for _ in range(4))
  loss_weight_BT = np.zeros(shape, np.float32)
  per_token = {name: np.zeros(shape + array.shape[1:], array.dtype) for name, array in _per_token(rows).items()}
  for row, documents in enumerate(rows):
    total = sum(len(document.tokens_T) for document in documents)
    if total > length:
      raise ValueError(f'Row {row} is given {total} tokens in {len(documents)} documents, it holds length={length}; plan rows with `plan`.')
    start = 0
    for segment, document in enumerate(documents, start=1):
      size = len(document.tokens_T)
      divisor = denominator * max(num_targets([document]), 1) if aggregation == 'sequence_mean' else denominator
      values = {name: _of_targets(document, name) for name in per_token}
      for columns, taken in share.of(start, start + size):
        tokens_BT[row, columns] = document.tokens_T[taken]
        positions_BT[row, columns] = np.arange(taken.start, taken.stop)
        segment_ids_BT[row, columns] = segment
        # The document's next tokens, whoever lays those out; its last place predicts nothing.
        targets = slice(taken.start + 1, min(taken.stop + 1, size))
        columns = slice(columns.start, columns.start + targets.stop - targets.start)
        targets_BT[row, columns] = document.tokens_T[targets]
        loss_weight_BT[row, columns] = document.loss_mask_T[targets] / divisor
        for name, array_BT in per_token.items():
          array_BT[row, columns] = values[name][taken.start:targets.stop - 1]
      start += size
  fields = {f'{name}_BT{"J" * (array.ndim - 2)}': array for name, array in per_token.items()}
  return Batch(tokens_BT, targets_BT, positions_BT, segment_ids_BT, loss_weight_BT, **fields)


def documents(trajectories: Sequence[Trajectory], advantages: Sequence[float | np.ndarray],
              more: Sequence[Mapping[str, np.ndarray]] | None = None) -> list[Document]:
  """Return what the policy loss learns from: each trajectory with the advantages of the tokens that the policy sampled in it.

  Args:
    advantages: of each trajectory: advantages_T, or one number for all of its tokens.
    more: of each trajectory: what else is said of its tokens (see `types.PER_TOKEN`), the same names for all.

  Raises:
    ValueError: a trajectory that is invalid (it has no advantage; leave it out), or an advantage of a sampled token that is not finite.
  """
  made = []
  for trajectory, advantage, others in zip(trajectories, advantages, more or [{}] * len(trajectories), strict=True):
    if not trajectory.is_valid:
      raise ValueError(f'{trajectory.source} is not for training, its outcome is {trajectory.outcome!r}; leave it out.')
    advantages_T = np.broadcast_to(np.asarray(advantage, np.float32), trajectory.tokens_T.shape)
    wrong = np.flatnonzero(trajectory.loss_mask_T & ~np.isfinite(advantages_T))
    if wrong.size:
      raise ValueError(f'{trajectory.source}: advantage={advantages_T[wrong[0]]} must be finite, and token {wrong[0]} was sampled.')
    made.append(Document(trajectory.tokens_T, trajectory.loss_mask_T, trajectory.source, {
        'advantages': advantages_T, 'behavior_logprobs': trajectory.behavior_logprobs_T, **others}))
  return made


def at_places(documents: Sequence[Document], compute: Callable[[Batch], Any], place: Place, rows: int, length: int) -> list[Any]:
  """Return for each document what `compute` says at each of its places; every host gets all.

  `compute` takes a global batch to an array [B, T, ...] or a tree of them; a document has the same tree of numpy arrays [T, ...].

  The last place, which predicts nothing, is there too.

  Args:
    place: of global batches.
    rows, length: of a batch, over all hosts.
  """
  found: list[Any] = []
  mine = host_rows(place, rows)
  while len(found) < len(documents):
    rest = documents[len(found):]
    assignment, num_taken = plan((len(document.tokens_T) for document in rest), rows, length)
    batch = pack_rows([[rest[index] for index in row] for row in assignment[mine]], length, denominator=1, aggregation='token_sum')
    computed, starts = compute(to_global(batch, place)), {}
    if jax.process_count() > 1:
      computed = multihost_utils.process_allgather(computed, tiled=True)
    computed = jax.tree.map(lambda array_BT: to_host(array_BT, place, length), computed)
    for number, row in enumerate(assignment):
      ends = np.cumsum([len(rest[index].tokens_T) for index in row])
      starts |= {index: (number, int(end) - len(rest[index].tokens_T)) for index, end in zip(row, ends, strict=True)}
    for index in range(num_taken):
      row, start = starts[index]
      found.append(_part(computed, row, slice(start, start + len(rest[index].tokens_T))))
  return found


def _part(computed: Any, row: int, places: slice) -> Any:
  return jax.tree.map(lambda array_BT: array_BT[row, places], computed)


def micro_batches(batch: Batch, count: int) -> list[Batch]:
  """Split the rows into `count` batches of equal size, first rows first.

  Raises:
    ValueError: `count` does not divide the rows.
  """
  rows = batch.tokens_BT.shape[0]
  if count < 1 or rows % count:
    raise ValueError(f'count={count} micro-batches do not divide the {rows} rows of the batch; use a divisor of {rows}.')
  size = rows // count
  return [jax.tree.map(lambda array: array[index * size:(index + 1) * size], batch) for index in range(count)]


@dataclass(frozen=True)
class Place:
  """Where the tokens of global batches lie.

  Attributes:
    sharding: of arrays [rows, length].
    order: of the tokens along a row whose length is split, one of `token_order.ORDERS`.
    num_ring_shards: parts of the length that the order counts.
  """
  sharding: jax.sharding.NamedSharding
  order: str = 'contiguous'
  num_ring_shards: int = 1

  @classmethod
  def of(cls, layout: Layout, mesh: jax.sharding.Mesh) -> Place:
    """Return where batches of this layout lie on the mesh."""
    return cls(jax.sharding.NamedSharding(mesh, layout.spec('batch', 'length')), layout.order,
               math.prod(mesh.shape[axis] for axis in layout.ring_axes))

  def padded(self, length: int) -> int:
    """Return the length of the global rows of a batch of rows of `length`."""
    _, length_shards = _num_shards(self.sharding)
    return token_order.padded_length(self.order, length, self.num_ring_shards, length_shards // self.num_ring_shards)

  def share(self, length: int) -> Share:
    """Return what this process lays out of each row of `length`; the tokens are those of its devices."""
    padded = self.padded(length)
    place_T = np.concatenate([np.arange(*columns) for columns in _local_columns(self.sharding, padded)])
    return Share(token_order.tokens_at(self.order, padded, self.num_ring_shards, place_T))


def host_rows(place: Place, rows: int) -> slice:
  """Return which rows of a global batch of `rows` the devices of this process hold.

  Hosts that split only the length (or nothing) of a batch between them hold the same rows.

  Raises:
    ValueError: the rows do not divide over the mesh, or the mesh gives this process rows that are not next to each other.
  """
  row_shards, _ = _num_shards(place.sharding)
  if rows < 1 or rows % row_shards:
    raise ValueError(
        f'rows={rows} of a batch do not divide over the {row_shards} shards that {_describe(place.sharding)} makes of them; '
        f'use a multiple of {row_shards}, or a mesh with fewer of them.')
  mine = _local_row_shards(place.sharding)
  if mine != list(range(mine[0], mine[-1] + 1)):
    raise ValueError(
        f'{_describe(place.sharding)} gives process {jax.process_index()} the row shards {mine}, which have gaps; '
        'order the devices of the mesh so that each process holds neighbors.')
  return slice(mine[0] * rows // row_shards, (mine[-1] + 1) * rows // row_shards)


def to_global(batch: Batch, place: Place) -> Batch:
  """Put this host's rows (those of `host_rows`, at full length) onto the mesh as one global batch, its tokens in the place's order.

  Rows are padded to a length that the order divides; `to_host` takes results back.

  Raises:
    ValueError: rows do not divide over the mesh; nothing has been sent to a device then.
  """
  length = batch.tokens_BT.shape[1]
  token_T = token_order.places(place.order, place.padded(length), place.num_ring_shards)

  def part(array_BT, columns):
    taken_T = token_T[columns]
    # Padding is zeros in every array; its segment is 0.
    return np.where(_along(taken_T < length, array_BT.ndim - 1), array_BT[:, np.minimum(taken_T, length - 1)], 0)

  return _put(batch, place, len(token_T), part)


def share_to_global(batch: Batch, place: Place, length: int) -> Batch:
  """Put this host's share of rows of `length` (those of `host_rows`, packed with `place.share(length)`) onto the mesh as one global batch.

  Raises:
    ValueError: rows do not divide over the mesh, or the batch has other columns than the share.
  """
  padded = place.padded(length)
  starts, first = {}, 0
  for start, stop in _local_columns(place.sharding, padded):
    starts[start] = first
    first += stop - start
  if batch.tokens_BT.shape[1] != first:
    raise ValueError(f'The batch has {batch.tokens_BT.shape[1]} columns, but the share of process {jax.process_index()} of rows of {length} '
                     f'has {first}; pack it with share=place.share({length}).')

  def part(array_BT, columns):
    return array_BT[:, starts[columns.start]:starts[columns.start] + columns.stop - columns.start]

  return _put(batch, place, padded, part)


def _put(batch: Batch, place: Place, padded: int, part: Callable[[np.ndarray, slice], np.ndarray]) -> Batch:
  """Make global arrays of `padded` columns; `part` returns the columns of a shard from some of this host's rows."""
  local_rows = batch.tokens_BT.shape[0]
  row_shards, _ = _num_shards(place.sharding)
  num_mine = len(_local_row_shards(place.sharding))
  if local_rows < 1 or local_rows % num_mine:
    raise ValueError(
        f'This process has {local_rows} rows for the {num_mine} row shards that {_describe(place.sharding)} gives it; '
        f'use a multiple of {num_mine} rows, or a mesh with fewer shards.')
  rows = local_rows // num_mine * row_shards
  first = host_rows(place, rows).start

  def put(array_BT):
    def shard(index):
      start, stop, _ = index[0].indices(rows)
      return part(array_BT[start - first:stop - first], slice(*index[1].indices(padded)[:2]))

    return jax.make_array_from_callback((rows, padded, *array_BT.shape[2:]), place.sharding, shard)

  return jax.tree.map(put, batch)


def to_host(array_BT: jax.Array, place: Place, length: int) -> np.ndarray:
  """Return a global batch's array as the host's rows of `length`, its tokens in the order in which they were written."""
  token_T = token_order.places(place.order, array_BT.shape[1], place.num_ring_shards)
  return np.asarray(array_BT)[:, np.argsort(token_T)[:length]]


def _along(mask_T: np.ndarray, ndim: int) -> np.ndarray:
  """Return the mask with as many dimensions, to be taken with arrays that have several values for each token."""
  return mask_T.reshape(-1, *[1] * (ndim - 1))


def _per_token(rows: Sequence[Sequence[Document]]) -> Mapping[str, np.ndarray]:
  """Return what the first document says of its tokens; all documents must say the same."""
  first = None
  for document in (document for row in rows for document in row):
    first = document if first is None else first
    if document.per_token.keys() != first.per_token.keys():
      raise ValueError(f'{document.source} has per_token {sorted(document.per_token)} and {first.source} has {sorted(first.per_token)}; '
                       'the documents of a batch must have the same.')
  return {} if first is None else first.per_token


def _of_targets(document: Document, name: str) -> np.ndarray:
  """Return a document's values for its tokens but the first, 0 where there is nothing to learn."""
  values_T = document.per_token[name]
  values_T = np.where(_along(document.loss_mask_T, values_T.ndim), values_T, 0)[1:]
  is_finite_T = np.isfinite(values_T).reshape(len(values_T), -1).all(1)
  if not is_finite_T.all():
    token = 1 + int(np.argmin(is_finite_T))
    raise ValueError(f'{document.source}: {name} of token {token} is {values_T[token - 1]}, but the token is to be learned; '
                     'it must be finite there.')
  return values_T


def _num_shards(sharding: jax.sharding.NamedSharding) -> tuple[int, int]:
  """Return into how many parts the sharding cuts the rows and the length of a batch."""
  if len(sharding.spec) > 2:
    raise ValueError(f'{_describe(sharding)} has {len(sharding.spec)} dimensions, a batch has two: rows and length.')
  axes = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in sharding.spec]
  rows, length = (math.prod(sharding.mesh.shape[axis] for axis in entry) for entry in (axes + [(), ()])[:2])
  return rows, length


def _local_row_shards(sharding: jax.sharding.NamedSharding) -> list[int]:
  # A global array with one row a shard: the rows this process can address are then the numbers of its shards.
  shards = _num_shards(sharding)
  indices = sharding.addressable_devices_indices_map(shards).values()
  return sorted({index[0].indices(shards[0])[0] for index in indices})


def _local_columns(sharding: jax.sharding.NamedSharding, padded: int) -> list[tuple[int, int]]:
  """Return the ranges of columns of the devices of this process, in order, each once."""
  row_shards, _ = _num_shards(sharding)
  indices = sharding.addressable_devices_indices_map((row_shards, padded)).values()
  return sorted({index[1].indices(padded)[:2] for index in indices})


def _describe(sharding: jax.sharding.NamedSharding) -> str:
  return f'{sharding.spec} on mesh {dict(sharding.mesh.shape)}'


def _check_aggregation(aggregation: str) -> None:
  if aggregation not in get_args(Aggregation):
    raise ValueError(f'aggregation={aggregation!r} is unknown; use one of {", ".join(get_args(Aggregation))}.')


def check_at_least_one(**sizes: int) -> None:
  """Raise ValueError for the first size below 1, by its name."""
  for name, size in sizes.items():
    if size < 1:
      raise ValueError(f'{name}={size} must be at least 1.')
