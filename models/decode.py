"""Generation with a key-value cache: the parameters, `forward` and `block` of training, with an `attend` that reads and writes the cache.

A row of `DecodeState` is a slot: it holds one sequence at its own position, and is filled and retired without regard to its neighbors.
Prompts are computed apart from the slots, in chunks of a fixed size (`prefill`), and copied into as many slots as samples are wanted
(`insert`). The cache then holds all of a prompt but its last token, which the first decoding step reads; so one `decode_step` draws every
generated token, the first included.

On CPU a matmul of a single bfloat16 row converts its whole weight at each step (3-10x slower), so there are at least two rows a device.

A sequence goes on after its end (the next turn of a conversation) by steps that read given tokens instead of drawing them: the shapes stay
those of every other step, so what a sequence yields does not depend on when it goes on, bit for bit. That suits what tools say; long texts
are cheaper to prefill.

Deliberately absent: prefixes shared between slots, speculative decoding, and which request is where (`rl.rollout.engine`).
"""

from __future__ import annotations

import dataclasses
import functools
import math

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from models import attention, kv_cache, quantize, sharding, transformer
from models import params as params_lib
from models import sampling as sampling_lib
from models.config import ModelConfig
from models.kv_cache import Cache
from models.params import ParamSpec
from models.sampling import Sampling
from models.sharding import Layout


@struct.dataclass
class Slots:
  """What slots decode, one value per slot.

  Attributes:
    tokens_B: last token of the sequence, not yet in the cache.
    lengths_B: how many tokens come before it, which is its position.
    limits_B: position of the last token that may be drawn.
    seeds_B: uint32 seed of the request.
    done_B: whether the slot is free or its sequence has ended; it then stands still.
    sampling: settings of the request.
  """

  tokens_B: jax.Array
  lengths_B: jax.Array
  limits_B: jax.Array
  seeds_B: jax.Array
  done_B: jax.Array
  sampling: Sampling


@struct.dataclass
class DecodeState:
  """The slots and their keys and values."""

  cache: Cache
  slots: Slots


@struct.dataclass
class Step:
  """What a decoding step drew; steps of `decode_many` are stacked on a leading axis.

  Attributes:
    tokens_B, raw_logprobs_B, processed_logprobs_B: as in `sampling.Sample`.
    is_new_B: whether the slot drew a token; the other values mean nothing where it stood still or was given one.
  """

  tokens_B: jax.Array
  raw_logprobs_B: jax.Array
  processed_logprobs_B: jax.Array
  is_new_B: jax.Array


def check(config: ModelConfig, layout: Layout, mesh: Mesh) -> None:
  """Raise ValueError unless the model can be decoded under this layout and mesh."""
  table = dict(layout.rules)
  if any(mesh.shape[axis] > 1 for axis in table.get('length', ())):
    raise ValueError(f"layout.rules split 'length' over {table['length']} on mesh {dict(mesh.shape)}, but a decoding step has one token; "
                     'use sharding.ROLLOUT, which splits rows over those axes, or sharding.LONG_ROLLOUT, which splits the cache.')
  transformer.check(config, layout)
  layout.spec('batch', 'kv_heads', 'cache', None)
  if kv_cache.axes(layout) and layout.attention == 'dense':
    raise ValueError(f"layout.attention={layout.attention!r} attends to whole rows, but layout.rules split 'cache' over "
                     f"{kv_cache.axes(layout)}; use 'auto' or a kernel for a split length:\n{attention.support_table()}")


def rollout_layout(train: Layout, mesh: Mesh) -> Layout:
  """Return the layout with which to decode what is trained with the layout `train`, in its compute dtype.

  Where training splits the length of rows, decoding splits the cache over the same axes, so that it takes prompts as long. Elsewhere rows
  are split over as many devices as there are.
  """
  split = train.length_axes
  if math.prod(mesh.shape[axis] for axis in split) == 1:
    return dataclasses.replace(sharding.ROLLOUT, compute_dtype=train.compute_dtype)
  rules = dict(train.rules) | {'length': (), 'embed': (), 'cache': split}
  return dataclasses.replace(sharding.LONG_ROLLOUT, rules=tuple(rules.items()), compute_dtype=train.compute_dtype)


def num_shards(layout: Layout, mesh: Mesh) -> int:
  """Return over how many shards the layout splits rows."""
  return math.prod(mesh.shape[axis] for axis in dict(layout.rules).get('batch', ()))


def num_rows(num_slots: int, layout: Layout, mesh: Mesh) -> int:
  """Return how many rows to hold for at least `num_slots`: a multiple of the shards, and two a device where one would be slow."""
  shards = num_shards(layout, mesh)
  is_slow = mesh.devices.flat[0].platform == 'cpu' and layout.dtype.itemsize < 4
  return shards * max(-(-num_slots // shards), 2 if is_slow else 1)


def decode_params(params, config: ModelConfig, layout: Layout, mesh: Mesh):
  """Return the tree as decoding wants it: one tree per layer, in `layout`'s shardings, matmul weights in its compute dtype.

  Done once, so that no step converts, slices or gathers a weight; a quantized base is multiplied out here. Norms' scales and biases keep
  their dtype. Adapters stay apart: merged into 16-bit weights, an update smaller than their spacing is rounded away, and the sampler is not
  the policy that is trained (0.2 nats a token apart after the first step of a LoRA run).

  Raises:
    ValueError: a parameter does not divide over the mesh.
  """
  params_lib.spec_shardings(transformer.declare(config), mesh, layout)
  with jax.set_mesh(mesh):
    return _convert_params(params, config, layout)


@functools.partial(jax.jit, static_argnames=('config', 'layout'))
def _convert_params(params, config: ModelConfig, layout: Layout):
  def convert(weight, is_matrix, *axes):
    if params_lib.is_quantized(weight):
      weight = quantize.dequantize(weight, layout.dtype)
    return jax.reshard(weight.astype(layout.dtype) if is_matrix else weight, layout.spec(*axes))

  def leaf(spec, weight):
    if not params_lib.is_lora(weight):
      return convert(weight, bool(spec.inputs), *spec.axes)
    end = weight.a.ndim - 1
    return weight.replace(base=convert(weight.base, True, *spec.axes), a=convert(weight.a, True, None, *spec.axes[1:end], None),
                          b=convert(weight.b, True, None, None, *spec.axes[end:]))

  params = jax.tree.map(leaf, transformer.declare(config), params, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
  return params | {'blocks': params_lib.unstack(params['blocks'])}


def empty_state(config: ModelConfig, layout: Layout, mesh: Mesh, num_slots: int, max_length: int) -> DecodeState:
  """Return `num_rows(num_slots, layout, mesh)` free slots for sequences of up to `max_length` tokens.

  Raises:
    ValueError: the layout cannot decode on this mesh.
  """
  check(config, layout, mesh)
  rows = num_rows(num_slots, layout, mesh)

  def make():
    contents = empty_slots(rows)
    return DecodeState(kv_cache.empty(config, layout, rows, max_length),
                       jax.tree.map(lambda x: sharding.constrain(x, layout, 'batch'), contents))

  with jax.set_mesh(mesh):
    return jax.jit(make)()


def empty_slots(num_slots: int) -> Slots:
  """Return free slots as host arrays."""
  tokens, lengths, limits = np.zeros((3, num_slots), np.int32)
  return Slots(tokens, lengths, limits, np.zeros(num_slots, np.uint32), np.ones(num_slots, np.bool_),
               sampling_lib.stack([Sampling()] * num_slots))


def prefill(params, tokens_PT: np.ndarray, lengths_P: np.ndarray, config: ModelConfig, layout: Layout, *, chunk: int,
            max_length: int) -> Cache:
  """Return the keys and values of P prompts, for `insert`; call under a mesh.

  `tokens_PT` are the prompts without their last tokens, padded at the end with any id; `lengths_P` are their lengths. P must divide over
  the layout's shards, and T by `chunk` if it is longer; both by `kv_cache.num_shards`. `max_length` is that of the state the prompts are
  for. Compiles once for each shape [P, T] up to a chunk, and twice for each P beyond.

  Raises:
    ValueError: the devices that share a row cannot share a chunk equally.
  """
  length = tokens_PT.shape[1]
  shards = kv_cache.num_shards(layout, sharding.current_mesh())
  if min(length, chunk) % shards or length % min(length, chunk):
    raise ValueError(f'prefill: {length} tokens in chunks of {chunk} do not divide over the {shards} devices that share the cache of a row; '
                     f'pad them to a multiple of the chunk, and the chunk to a multiple of {shards}.')
  num_places = min(length, max_length) if length <= chunk else max_length
  cache = None
  for start in range(0, length, chunk):
    tokens_PI = np.ascontiguousarray(tokens_PT[:, start:start + chunk])
    cache = _prefill_chunk(params, cache, tokens_PI, np.int32(start), lengths_P, config, layout, num_places)
  return cache


@functools.partial(jax.jit, static_argnames=('config', 'layout', 'max_length'), donate_argnames=('cache',))
def _prefill_chunk(params, cache, tokens_PT, start, lengths_P, config: ModelConfig, layout: Layout, max_length: int) -> Cache:
  # The devices that share the cache of a row share the chunk alike, each computing the keys and values that it keeps.
  layout = dataclasses.replace(layout, rules=tuple((dict(layout.rules) | {'length': kv_cache.axes(layout)}).items()))
  shards = kv_cache.num_shards(layout, sharding.current_mesh())
  lengths_P = sharding.constrain(lengths_P, layout, 'batch')
  positions_PT = jnp.broadcast_to(start + jnp.arange(tokens_PT.shape[1])[None], tokens_PT.shape)
  tokens_PT, positions_PT = (kv_cache.deal(x, shards) for x in (tokens_PT, positions_PT))
  attend = kv_cache.attend_chunk(start, lengths_P, cache is None, config, layout)
  if cache is None:
    cache = kv_cache.empty(config, layout, tokens_PT.shape[0], max_length)
  return transformer.forward(params, tokens_PT, positions_PT, None, config, layout, attend, cache)[1]


@functools.partial(jax.jit, static_argnames=('layout',), donate_argnames=('state',))
def insert(state: DecodeState, prompts: Cache, slots_A: np.ndarray, prompts_A: np.ndarray, contents: Slots, layout: Layout) -> DecodeState:
  """Return the state with A sequences put into slots; call under a mesh.

  Slot `slots_A[i]` gets row `prompts_A[i]` of the prefilled `prompts`, which may go to many slots, and value i of each of the `contents`.
  Negative slots at the end are padding, so that one compiled shape serves any number.
  """
  row, batch_axes = layout.spec('batch'), dict(layout.rules)['batch']
  cached = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, state.cache)
  unsplit = jax.tree.map(lambda x: jax.P(None, *jax.typeof(x).sharding.spec[1:]), state.cache)

  @functools.partial(jax.shard_map, in_specs=(cached, row, unsplit, jax.P(), jax.P(), jax.P()), out_specs=(cached, row))
  def local(cache, slots, prompts, slots_A, prompts_A, contents):
    num_own = slots.done_B.shape[0]
    own_A = slots_A - jax.lax.axis_index(batch_axes) * num_own
    is_own_A = (slots_A >= 0) & (own_A >= 0) & (own_A < num_own)
    index_A = jnp.where(is_own_A, own_A, num_own)
    slots = jax.tree.map(lambda old, new: old.at[index_A].set(new, mode='drop'), slots, contents)

    def copy(number, cache):
      def one(old_BKSH, prompts_PKSH):
        place = (jnp.minimum(index_A[number], num_own - 1), 0, 0, 0)
        new = jax.lax.dynamic_slice_in_dim(prompts_PKSH, prompts_A[number], 1)
        kept = jax.lax.dynamic_slice(old_BKSH, place, new.shape)
        return jax.lax.dynamic_update_slice(old_BKSH, jnp.where(is_own_A[number], new, kept), place)

      return jax.tree.map(one, cache, prompts)

    return jax.lax.fori_loop(0, jnp.sum(slots_A >= 0), copy, cache), slots

  prompts = jax.reshard(prompts, unsplit)
  return DecodeState(*local(state.cache, state.slots, prompts, slots_A, prompts_A, contents))


def next_logits(params, state: DecodeState, config: ModelConfig, layout: Layout) -> tuple[jax.Array, Cache]:
  """Read each slot's last token; returns (float32 logits_BV of the token after it, the cache with it)."""
  slots = state.slots
  # Makes the weights depend on the step. Else XLA lifts converted and transposed copies of them out of the loop in `decode_many`.
  tokens_B, params = jax.lax.optimization_barrier((slots.tokens_B, params))
  attend = kv_cache.attend_token(slots.lengths_B, config, layout)
  hidden_B1D, cache = transformer.forward(params, tokens_B[:, None], slots.lengths_B[:, None], None, config, layout, attend, state.cache)
  return transformer.logits(params, hidden_B1D, config, layout)[:, 0], cache


def decode_step(params, state: DecodeState, given_B: jax.Array, stop_ids_E: jax.Array, config: ModelConfig,
                layout: Layout) -> tuple[DecodeState, Step]:
  """Append a token to every slot that is not done: the `given` one, or one drawn where that is negative.

  A sequence ends at a drawn stop id or at its limit, that token included.
  """
  logits_BV, cache = next_logits(params, state, config, layout)
  slots = state.slots
  is_drawn_B, is_active_B = given_B < 0, ~slots.done_B
  lengths_B = slots.lengths_B + is_active_B
  drawn = sampling_lib.sample(logits_BV, slots.sampling, slots.seeds_B, slots.lengths_B + 1, layout)
  tokens_B = jnp.where(is_drawn_B, drawn.tokens_B, given_B)
  is_stop_B = is_drawn_B & jnp.any(tokens_B[:, None] == stop_ids_E[None], axis=-1)
  slots = slots.replace(tokens_B=jnp.where(is_active_B, tokens_B, slots.tokens_B), lengths_B=lengths_B,
                        done_B=slots.done_B | is_stop_B | (lengths_B >= slots.limits_B))
  return DecodeState(cache, slots), Step(tokens_B, drawn.raw_logprobs_B, drawn.processed_logprobs_B, is_active_B & is_drawn_B)


@functools.partial(jax.jit, static_argnames=('config', 'layout'), donate_argnames=('state',))
def decode_many(params, state: DecodeState, given_KB: jax.Array, limits_B: jax.Array, stop_ids_E: jax.Array, config: ModelConfig,
                layout: Layout) -> tuple[DecodeState, Step]:
  """Take up to K steps in one launch, fewer when every slot is done; returns (state, Step of arrays [K, B]).

  `given_KB` are tokens to append at each step, negative where one is to be drawn. A slot with a `limits_B` that is not negative gets it as
  its new limit and goes on.
  """
  row = layout.spec('batch')
  limits_B, given_KB = jax.reshard((limits_B, given_KB), (row, layout.spec(None, 'batch')))
  slots, goes_on_B = state.slots, limits_B >= 0
  state = state.replace(slots=slots.replace(limits_B=jnp.where(goes_on_B, limits_B, slots.limits_B), done_B=slots.done_B & ~goes_on_B))
  num_steps = given_KB.shape[0]

  def wanted(carry):
    number, state, _ = carry
    return (number < num_steps) & jnp.any(~state.slots.done_B)

  def step(carry):
    number, state, steps = carry
    given_B = jax.lax.dynamic_index_in_dim(given_KB, number, keepdims=False)
    state, one = decode_step(params, state, given_B, stop_ids_E, config, layout)
    steps = jax.tree.map(lambda all_KB, one_B: jax.lax.dynamic_update_index_in_dim(all_KB, one_B, number, 0), steps, one)
    return number + 1, state, steps

  nothing = Step(*(jnp.zeros(given_KB.shape, dtype, out_sharding=layout.spec(None, 'batch'))
                   for dtype in (jnp.int32, jnp.float32, jnp.float32, jnp.bool_)))
  return jax.lax.while_loop(wanted, step, (0, state, nothing))[1:]
