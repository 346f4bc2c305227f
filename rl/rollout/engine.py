"""Continuous batching: requests are put into free slots of a decoding batch, sampled side by side, and replaced as they finish.

Host code, synchronous: `submit` queues a request, `step` admits what is waiting, takes several decoding steps in one launch and returns what
has finished. A request may hold its slot when it finishes, and then goes on with more tokens (`extend`), which is how a conversation with
tools keeps its cache. New parameters may come between any two steps (`update`); every token says which version drew it.

What a request yields depends on its prompt, sampling settings, seed and what it was extended by, never on its slot, its neighbors, or on when
and with what it was admitted, bit for bit. That is why prompts are prefilled in shapes that follow from their own length alone: the same
row computed in a larger batch may differ in its last bit, and sampling would turn that into another text. Requests with the same prompt that
are admitted together share its prefill.

Deliberately absent: eviction (a request holds its slot to its end), and prefixes kept for later requests, so that nothing computed with old
parameters is ever used for a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
from jax.sharding import Mesh
import numpy as np

from models import decode, kv_cache
from models import params as params_lib
from models import sampling as sampling_lib
from models.config import ModelConfig
from models.sampling import Sampling
from models.sharding import Layout

_SHORTEST_PREFILL = 16
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
    holds: whether it keeps its slot when it finishes, until `Engine.extend` or `Engine.release`.
  """

  id: Hashable
  tokens_T: np.ndarray
  sampling: Sampling
  max_new_tokens: int
  seed: int
  holds: bool = False


@dataclass(frozen=True)
class Completion:
  """What was sampled for a request since it was submitted or extended.

  Attributes:
    id: the request's.
    tokens_T: int32 ids; a stop id is the last of them.
    raw_logprobs_T, processed_logprobs_T: of each token, as in `sampling.Sample`; float32, nats.
    versions_T: int32, the version of the parameters that drew each token.
    stop: 'stop' at a stop id, 'length' at max_new_tokens.
  """

  id: Hashable
  tokens_T: np.ndarray
  raw_logprobs_T: np.ndarray
  processed_logprobs_T: np.ndarray
  versions_T: np.ndarray
  stop: Literal['stop', 'length']


@dataclass
class _Slot:
  """A request in a slot.

  Attributes:
    num_tokens: of the sequence, given ones that are still to be read included, ones that are drawn now not.
    parts: of the completion so far.
    num_new: tokens in them.
    max_new: tokens the completion may have.
    given: tokens to be read before any is drawn.
    limit: position of the last token that may be drawn, to be told to the device; -1 once it knows.
    is_held: finished, and waiting for `extend` or `release`.
  """
  request: Request
  num_tokens: int
  max_new: int
  parts: list[tuple[np.ndarray, ...]] = field(default_factory=list)
  num_new: int = 0
  given: deque[int] = field(default_factory=deque)
  limit: int = -1
  is_held: bool = False


class Engine:
  """Generates completions; not for several threads at once.

  Attributes:
    num_slots: sequences generated side by side: what was asked for, rounded up to what the devices want (`decode.num_rows`).
    max_length: most tokens of a sequence, all of its turns together.
    version: of the parameters in use.
  """

  def __init__(self, params, config: ModelConfig, layout: Layout, mesh: Mesh, *, num_slots: int, max_length: int, steps_per_launch: int = 8,
               prefill_chunk: int = 256, version: int = 0):
    """Prepare the parameters and allocate the cache.

    `params` is the tree as trained, adapters included, in any layout on `mesh`; `layout` is that of decoding (`decode.rollout_layout`). The
    engine looks at what has finished after every `steps_per_launch` decoding steps, and computes `prefill_chunk` tokens of prompts at once,
    rounded up to divide over the devices that share a row, which bounds the memory that they take.

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
    self._num_shards, self._num_sharing = decode.num_shards(self._layout, mesh), kv_cache.num_shards(self._layout, mesh)
    self._steps_per_launch, self._prefill_chunk = steps_per_launch, self._dealt(prefill_chunk)
    self.update(decode.decode_params(params, config, self._layout, mesh), version)
    self._state = decode.empty_state(config, self._layout, mesh, self.num_slots, max_length)
    self._queue: deque[Request] = deque()
    self._slots: dict[int, _Slot] = {}
    self.stop_at(())

  @property
  def layout(self) -> Layout:
    """Return the layout with which parameters are prepared (`decode.decode_params`) for `update`."""
    return self._layout

  @property
  def is_busy(self) -> bool:
    """Say whether `step` has anything to do."""
    return bool(self._queue) or any(not slot.is_held for slot in self._slots.values())

  def update(self, params, version: int) -> None:
    """Use other parameters from the next step on, prepared by `decode.decode_params`; sequences in the slots go on with them."""
    self._params, self.version = params, version

  def stop_at(self, stop_ids: Iterable[int]) -> None:
    """Set the ids at which completions end; ValueError for one outside the vocabulary."""
    stop_ids = sorted(set(stop_ids))
    for token in stop_ids:
      if not 0 <= token < self._config.vocab_size:
        raise ValueError(f'stop id {token} is not one of the {self._config.vocab_size} ids of the vocabulary.')
    padding = -len(stop_ids) % _STOP_IDS_MULTIPLE or (0 if stop_ids else _STOP_IDS_MULTIPLE)
    self._stop_ids_E = np.array([*stop_ids, *[-1] * padding], np.int32)

  def submit(self, request: Request) -> None:
    """Queue a request.

    Raises:
      TypeError, ValueError: it is not as documented, or its id is in use; the message names the request.
    """
    self._check(request)
    if any(request.id == other.id for other in (*self._queue, *(slot.request for slot in self._slots.values()))):
      raise ValueError(f'Request {request.id!r} is already queued or in a slot; ids must be unique, since completions come back in any order.')
    self._queue.append(request)

  def extend(self, id: Hashable, tokens_T: np.ndarray, max_new_tokens: int) -> None:
    """Let a finished request that holds its slot read `tokens_T` and go on from there, with up to `max_new_tokens` new ones.

    Raises:
      ValueError: no such request is held, no tokens, an id outside the vocabulary, or a sequence beyond `max_length`.
    """
    slot = next((slot for slot in self._slots.values() if slot.request.id == id and slot.is_held), None)
    if slot is None:
      held = [slot.request.id for slot in self._slots.values() if slot.is_held]
      raise ValueError(f'Request {id!r} holds no slot; only a finished request submitted with holds=True does: {held[:5]}.')
    self._check_tokens(f'Request {id!r}', tokens_T, slot.num_tokens, max_new_tokens)
    slot.num_tokens += len(tokens_T)
    slot.given.extend(int(token) for token in tokens_T)
    slot.limit = slot.num_tokens - 1 + max_new_tokens
    slot.parts, slot.num_new, slot.max_new, slot.is_held = [], 0, max_new_tokens, False

  def release(self, id: Hashable) -> None:
    """Forget a request, queued, running or held; ValueError if there is none of that id."""
    for request in self._queue:
      if request.id == id:
        self._queue.remove(request)
        return
    for index, slot in self._slots.items():
      if slot.request.id == id:
        # Whatever still stands in the slot is overwritten by the next request there; only the host knows that nobody waits for it.
        del self._slots[index]
        return
    raise ValueError(f'Request {id!r} is neither queued nor in a slot.')

  def step(self) -> list[Completion]:
    """Admit waiting requests, take the decoding steps of one launch, and return what has finished.

    Raises:
      RuntimeError: the model's logits are not finite.
    """
    self._admit()
    return self._decode() if any(not slot.is_held for slot in self._slots.values()) else []

  def generate(self, requests: Iterable[Request], stop_ids: Iterable[int] = ()) -> Iterator[Completion]:
    """Return an iterator over the completions of these requests, in the order in which they finish.

    All requests are read and checked at once; the work is done as the iterator is advanced. An iterator that is closed early gives its
    slots back.

    Raises:
      TypeError, ValueError: at once: a request or stop id that is not as documented; the message names the request.
      RuntimeError: the engine is busy with other requests, or the model's logits are not finite.
    """
    if self._queue or self._slots:
      raise RuntimeError(f'This engine still has {len(self._queue) + len(self._slots)} requests of an earlier call; use that iterator up, '
                         'or close it, first.')
    self.stop_at(stop_ids)
    try:
      for request in requests:
        self.submit(request)
    except (TypeError, ValueError):
      self._forget_all()
      raise
    return self._run()

  def _run(self) -> Iterator[Completion]:
    try:
      while self.is_busy:
        yield from self.step()
    finally:
      self._forget_all()

  def _forget_all(self) -> None:
    self._queue.clear()
    self._slots.clear()

  def _check(self, request: Request) -> None:
    name = f'Request {request.id!r}'
    self._check_tokens(name, request.tokens_T, 0, request.max_new_tokens)
    if not 0 <= request.seed < _NUM_SEEDS:
      raise ValueError(f'{name}: seed={request.seed} must be from 0 to 2**32 - 1.')
    try:
      sampling_lib.check(request.sampling)
    except ValueError as error:
      raise ValueError(f'{name}: {error}') from error

  def _check_tokens(self, name: str, tokens_T: np.ndarray, num_before: int, max_new_tokens: int) -> None:
    tokens_T, size = np.asarray(tokens_T), self._config.vocab_size
    if tokens_T.ndim != 1 or not tokens_T.size:
      raise ValueError(f'{name}: the prompt must be a list of at least one token id, got shape {tokens_T.shape}; '
                       'start from the bos id if there is no text.')
    if tokens_T.dtype.kind not in 'iu':
      raise TypeError(f'{name}: token ids must be integers, got {tokens_T.dtype}.')
    outside = np.flatnonzero((tokens_T < 0) | (tokens_T >= size))
    if outside.size:
      raise ValueError(f'{name}: token {tokens_T[outside[0]]} at {outside[0]} is not one of the {size} ids of the vocabulary; '
                       'encode the prompt with the tokenizer of this model.')
    if max_new_tokens < 1:
      raise ValueError(f'{name}: max_new_tokens={max_new_tokens} must be at least 1.')
    length = num_before + tokens_T.size + max_new_tokens
    if length > self.max_length:
      raise ValueError(f'{name}: {num_before + tokens_T.size} prompt tokens and max_new_tokens={max_new_tokens} make {length}, but '
                       f'engine.max_length={self.max_length}; shorten the prompt, ask for fewer tokens or raise max_length.')

  def _admit(self) -> None:
    """Put waiting requests into the free slots."""
    free = [slot for slot in range(self.num_slots) if slot not in self._slots]
    slots_of_prompt: dict[bytes, list[int]] = {}
    for slot in free[:len(self._queue)]:
      request = self._queue.popleft()
      self._slots[slot] = _Slot(request, len(request.tokens_T), request.max_new_tokens)
      slots_of_prompt.setdefault(_tokens(request).tobytes(), []).append(slot)
    buckets: dict[int, list[list[int]]] = {}
    for slots in slots_of_prompt.values():
      buckets.setdefault(self._bucket(len(_tokens(self._slots[slots[0]].request)) - 1), []).append(slots)
    for bucket, prompts in sorted(buckets.items()):
      rows = max(1, self._prefill_chunk // bucket) * self._num_shards
      for start in range(0, len(prompts), rows):
        self._prefill(prompts[start:start + rows], rows, bucket)

  def _bucket(self, length: int) -> int:
    """Return the padded length for a prompt: a power of two up to the chunk, and from there a multiple of the chunk."""
    chunk = self._prefill_chunk
    if length > chunk:
      return -(-length // chunk) * chunk
    return min(self._dealt(max(_SHORTEST_PREFILL, 1 << (length - 1).bit_length())), chunk)

  def _dealt(self, num_tokens: int) -> int:
    """Round up to what divides over the devices that share the cache of a row."""
    return -(-num_tokens // self._num_sharing) * self._num_sharing

  def _prefill(self, prompts: Sequence[Sequence[int]], num_rows: int, length: int) -> None:
    """Compute prompts, each given by the slots that share it, and put them into their slots."""
    tokens_PT, lengths_P = np.zeros((num_rows, length), np.int32), np.zeros(num_rows, np.int32)
    slots_A, prompts_A = np.full(self.num_slots, -1, np.int32), np.zeros(self.num_slots, np.int32)
    placed = [(slot, row) for row, slots in enumerate(prompts) for slot in slots]
    for row, slots in enumerate(prompts):
      before_last_T = _tokens(self._slots[slots[0]].request)[:-1]
      tokens_PT[row, :len(before_last_T)], lengths_P[row] = before_last_T, len(before_last_T)
    slots_A[:len(placed)], prompts_A[:len(placed)] = zip(*placed, strict=True)
    requests = [self._slots[slot].request for slot, _ in placed]
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

  def _decode(self) -> list[Completion]:
    """Take the steps of one launch and return what has finished."""
    given_KB = np.full((self._steps_per_launch, self.num_slots), -1, np.int32)
    limits_B = np.full(self.num_slots, -1, np.int32)
    for index, slot in self._slots.items():
      count = min(len(slot.given), self._steps_per_launch)
      given_KB[:count, index] = [slot.given.popleft() for _ in range(count)]
      limits_B[index], slot.limit = slot.limit, -1
    with jax.set_mesh(self._mesh):
      self._state, steps = decode.decode_many(self._params, self._state, given_KB, limits_B, self._stop_ids_E, self._config, self._layout)
      steps = jax.device_get(steps)
    finished = []
    for index, slot in list(self._slots.items()):
      is_new_K = steps.is_new_B[:, index]
      if not is_new_K.any():
        continue
      part = tuple(values_KB[is_new_K, index] for values_KB in (steps.tokens_B, steps.raw_logprobs_B, steps.processed_logprobs_B))
      slot.parts.append((*part, np.full(len(part[0]), self.version, np.int32)))
      slot.num_new += len(part[0])
      if not np.all(np.isfinite(part[1])):
        raise RuntimeError(f'Request {slot.request.id!r}: the logits are not finite within new tokens {slot.num_new - len(part[0])} '
                           f'to {slot.num_new - 1}; the parameters hold NaN or infinity, or {self._layout.compute_dtype} overflows: '
                           'compute in float32 to tell which.')
      is_stop = bool(np.isin(part[0][-1], self._stop_ids_E))
      if is_stop or slot.num_new == slot.max_new:
        finished.append(Completion(slot.request.id, *(np.concatenate(parts) for parts in zip(*slot.parts, strict=True)),
                                   'stop' if is_stop else 'length'))
        slot.num_tokens, slot.is_held = slot.num_tokens + slot.num_new, slot.request.holds
        if not slot.is_held:
          del self._slots[index]
    return finished


def _tokens(request: Request) -> np.ndarray:
  return np.asarray(request.tokens_T, np.int32)
