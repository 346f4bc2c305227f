"""Continuous batching: requests are put into free slots of a decoding batch, sampled side by side, and replaced as they finish.

Host code, synchronous. A launch takes several decoding steps; between launches finished sequences leave and waiting ones are prefilled.
Requests with the same prompt that are admitted together share its prefill. What a request yields depends on its prompt, sampling settings
and seed, never on its slot, its neighbors or the order of requests.

Prompts are prefilled in groups of few sizes, padded to few lengths, so that a handful of compiled shapes serves every mixture of requests.

Deliberately absent: prompts that arrive while others are generated, and eviction: a request holds its slot to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
from jax.sharding import Mesh
import numpy as np

from models import decode
from models import params as params_lib
from models import sampling as sampling_lib
from models.config import ModelConfig
from models.sampling import Sampling
from models.sharding import Layout

_SHORTEST_PREFILL = 16
# Prompts prefilled at once on each shard, and the most tokens they may have together: with more, a device is busy anyway.
_PREFILL_ROWS = (16, 4, 1)
_PREFILL_TOKENS = 2048
_STOP_IDS_MULTIPLE = 8
_NUM_SEEDS = 2**32


@dataclass(frozen=True)
class Request:
  """A prompt to be continued.

  Attributes:
    id: names the completion; unique among the requests of one call.
    tokens_T: the prompt's ids, at least one.
    sampling: how tokens are drawn.
    max_new_tokens: the completion ends here if no stop id came before.
    seed: decides the random numbers; samples of one prompt need different seeds.
  """

  id: Hashable
  tokens_T: np.ndarray
  sampling: Sampling
  max_new_tokens: int
  seed: int


@dataclass(frozen=True)
class Completion:
  """What was sampled for a request.

  Attributes:
    id: the request's.
    tokens_T: int32 ids; a stop id is the last of them.
    raw_logprobs_T, processed_logprobs_T: of each token, as in `sampling.Sample`; float32, nats.
    stop: 'stop' at a stop id, 'length' at max_new_tokens.
  """

  id: Hashable
  tokens_T: np.ndarray
  raw_logprobs_T: np.ndarray
  processed_logprobs_T: np.ndarray
  stop: Literal['stop', 'length']


@dataclass
class _Running:
  """A request in a slot and the parts of its completion so far."""

  request: Request
  parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
  num_new: int = 0


class Engine:
  """Generates completions with one set of parameters.

  Attributes:
    num_slots: sequences generated side by side: what was asked for, rounded up to what the devices want (`decode.num_rows`).
    max_length: most tokens of a prompt and its completion together.
  """

  def __init__(self, params, config: ModelConfig, layout: Layout, mesh: Mesh, *, num_slots: int, max_length: int, steps_per_launch: int = 8,
               prefill_chunk: int = 256):
    """Prepare the parameters and allocate the cache.

    `params` is the tree as trained, adapters included, in any layout on `mesh`; `layout` is `sharding.ROLLOUT` with the dtype to compute
    in. The engine looks at what has finished after every `steps_per_launch` decoding steps, and computes `prefill_chunk` tokens of a prompt
    at once, which bounds the memory that long prompts take.

    Raises:
      ValueError: a size that is not positive, `max_length` beyond the model's, or a layout that cannot decode on this mesh.
    """
    sizes = {'num_slots': num_slots, 'max_length': max_length, 'steps_per_launch': steps_per_launch, 'prefill_chunk': prefill_chunk}
    for name, size in sizes.items():
      if size < 1:
        raise ValueError(f'engine.{name}={size} must be at least 1.')
    if max_length > config.max_length:
      raise ValueError(f'engine.max_length={max_length} is beyond the {config.max_length} tokens that the model was trained for; lower it, '
                       'or load the model for a longer context.')
    self._config, self._mesh = config, mesh
    self._layout = params_lib.replicate_indivisible(layout, mesh, config.num_kv_heads)
    decode.check(config, self._layout, mesh)
    self.num_slots = decode.num_rows(num_slots, self._layout, mesh)
    self.max_length = max_length
    self._steps_per_launch, self._prefill_chunk = steps_per_launch, prefill_chunk
    self._num_shards = decode.num_shards(self._layout, mesh)
    self._params = decode.decode_params(params, config, self._layout, mesh)
    self._state = decode.empty_state(config, self._layout, mesh, self.num_slots, max_length)
    self._running: dict[int, _Running] = {}

  def generate(self, requests: Iterable[Request], stop_ids: Iterable[int] = ()) -> Iterator[Completion]:
    """Return an iterator over completions, in the order in which they finish.

    All requests are read and checked at once; the work is done as the iterator is advanced. An iterator that is closed early gives its
    slots back.

    Raises:
      TypeError, ValueError: at once: a request or stop id that is not as documented; the message names the request.
      RuntimeError: on the way: an earlier iterator of this engine is not finished, or the model's logits are not finite.
    """
    requests = list(requests)
    stop_ids = sorted(set(stop_ids))
    for token in stop_ids:
      if not 0 <= token < self._config.vocab_size:
        raise ValueError(f'stop id {token} is not one of the {self._config.vocab_size} ids of the vocabulary.')
    seen = set()
    for request in requests:
      self._check(request)
      if request.id in seen:
        raise ValueError(f'Two requests have the id {request.id!r}; ids must be unique, since completions come back in any order.')
      seen.add(request.id)
    padding = -len(stop_ids) % _STOP_IDS_MULTIPLE or (0 if stop_ids else _STOP_IDS_MULTIPLE)
    return self._run(deque(requests), np.array([*stop_ids, *[-1] * padding], np.int32))

  def _check(self, request: Request) -> None:
    name, tokens_T, size = f'Request {request.id!r}', np.asarray(request.tokens_T), self._config.vocab_size
    if tokens_T.ndim != 1 or not tokens_T.size:
      raise ValueError(f'{name}: the prompt must be a list of at least one token id, got shape {tokens_T.shape}; '
                       'start from the bos id if there is no text.')
    if tokens_T.dtype.kind not in 'iu':
      raise TypeError(f'{name}: token ids must be integers, got {tokens_T.dtype}.')
    outside = np.flatnonzero((tokens_T < 0) | (tokens_T >= size))
    if outside.size:
      raise ValueError(f'{name}: token {tokens_T[outside[0]]} at {outside[0]} is not one of the {size} ids of the vocabulary; '
                       'encode the prompt with the tokenizer of this model.')
    if request.max_new_tokens < 1:
      raise ValueError(f'{name}: max_new_tokens={request.max_new_tokens} must be at least 1.')
    length = tokens_T.size + request.max_new_tokens
    if length > self.max_length:
      raise ValueError(f'{name}: {tokens_T.size} prompt tokens and max_new_tokens={request.max_new_tokens} make {length}, but '
                       f'engine.max_length={self.max_length}; shorten the prompt, ask for fewer tokens or raise max_length.')
    if not 0 <= request.seed < _NUM_SEEDS:
      raise ValueError(f'{name}: seed={request.seed} must be from 0 to 2**32 - 1.')
    try:
      sampling_lib.check(request.sampling)
    except ValueError as error:
      raise ValueError(f'{name}: {error}') from error

  def _run(self, queue: deque[Request], stop_ids_E: np.ndarray) -> Iterator[Completion]:
    if self._running:
      raise RuntimeError(f'This engine is still generating for {len(self._running)} requests of an earlier call; use that iterator up, or '
                         'close it, first.')
    try:
      while queue or self._running:
        self._admit(queue)
        yield from self._decode(stop_ids_E)
    finally:
      # Whatever still stands in a slot is overwritten by the next request there; only the host knows that nobody waits for it.
      self._running.clear()

  def _admit(self, queue: deque[Request]) -> None:
    """Put waiting requests into the free slots."""
    free = [slot for slot in range(self.num_slots) if slot not in self._running]
    slots_of_prompt: dict[bytes, list[int]] = {}
    for slot in free[:len(queue)]:
      request = queue.popleft()
      self._running[slot] = _Running(request)
      slots_of_prompt.setdefault(_tokens(request).tobytes(), []).append(slot)
    buckets: dict[int, list[list[int]]] = {}
    for slots in slots_of_prompt.values():
      buckets.setdefault(self._bucket(len(_tokens(self._running[slots[0]].request)) - 1), []).append(slots)
    for bucket, prompts in sorted(buckets.items()):
      while prompts:
        rows = next(rows * self._num_shards for rows in _PREFILL_ROWS
                    if rows == 1 or (rows * self._num_shards <= len(prompts) and rows * bucket <= _PREFILL_TOKENS))
        self._prefill(prompts[:rows], rows, bucket)
        del prompts[:rows]

  def _bucket(self, length: int) -> int:
    """Return the padded length for a prompt: a power of two up to the chunk, and from there a multiple of the chunk."""
    chunk = self._prefill_chunk
    if length > chunk:
      return -(-length // chunk) * chunk
    return min(max(_SHORTEST_PREFILL, 1 << (length - 1).bit_length()), chunk)

  def _prefill(self, prompts: Sequence[Sequence[int]], num_rows: int, length: int) -> None:
    """Compute prompts, each given by the slots that share it, and put them into their slots."""
    tokens_PT, lengths_P = np.zeros((num_rows, length), np.int32), np.zeros(num_rows, np.int32)
    slots_A, prompts_A = np.full(self.num_slots, -1, np.int32), np.zeros(self.num_slots, np.int32)
    placed = [(slot, row) for row, slots in enumerate(prompts) for slot in slots]
    for row, slots in enumerate(prompts):
      before_last_T = _tokens(self._running[slots[0]].request)[:-1]
      tokens_PT[row, :len(before_last_T)], lengths_P[row] = before_last_T, len(before_last_T)
    slots_A[:len(placed)], prompts_A[:len(placed)] = zip(*placed, strict=True)
    requests = [self._running[slot].request for slot, _ in placed]
    with jax.set_mesh(self._mesh):
      cache = decode.prefill(self._params, tokens_PT, lengths_P, self._config, self._layout, chunk=self._prefill_chunk,
                             max_length=self.max_length)
      self._state = decode.insert(self._state, cache, slots_A, prompts_A, self._contents(requests), self._layout)

  def _contents(self, requests: Sequence[Request]) -> decode.Slots:
    contents = decode.empty_slots(self.num_slots)
    for index, request in enumerate(requests):
      length = len(request.tokens_T)
      contents.tokens_B[index] = request.tokens_T[-1]
      contents.lengths_B[index] = length - 1
      contents.limits_B[index] = length - 1 + request.max_new_tokens
      contents.seeds_B[index] = request.seed
      contents.done_B[index] = False
    unused = [Sampling()] * (self.num_slots - len(requests))
    return contents.replace(sampling=sampling_lib.stack([*(request.sampling for request in requests), *unused]))

  def _decode(self, stop_ids_E: np.ndarray) -> list[Completion]:
    """Take the steps of one launch and return what has finished."""
    with jax.set_mesh(self._mesh):
      self._state, steps = decode.decode_many(self._params, self._state, stop_ids_E, self._steps_per_launch, self._config, self._layout)
      steps = jax.device_get(steps)
    finished = []
    for slot, running in list(self._running.items()):
      is_new_K = steps.is_new_B[:, slot]
      part = tuple(values_KB[is_new_K, slot] for values_KB in (steps.tokens_B, steps.raw_logprobs_B, steps.processed_logprobs_B))
      running.parts.append(part)
      running.num_new += len(part[0])
      if not np.all(np.isfinite(part[1])):
        raise RuntimeError(f'Request {running.request.id!r}: the logits are not finite within new tokens {running.num_new - len(part[0])} '
                           f'to {running.num_new - 1}; the parameters hold NaN or infinity, or {self._layout.compute_dtype} overflows: '
                           'compute in float32 to tell which.')
      is_stop = bool(np.isin(part[0][-1], stop_ids_E))
      if is_stop or running.num_new == running.request.max_new_tokens:
        tokens_T, raw_T, processed_T = (np.concatenate(parts) for parts in zip(*running.parts, strict=True))
        finished.append(Completion(running.request.id, tokens_T, raw_T, processed_T, 'stop' if is_stop else 'length'))
        del self._running[slot]
    return finished


def _tokens(request: Request) -> np.ndarray:
  return np.asarray(request.tokens_T, np.int32)
