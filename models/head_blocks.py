"""What the functions of the output head share: tokens in chunks, the vocabulary in blocks, and their parts on the devices of a mesh.

A `Plan` is read off the arguments' shardings; everything below it runs on one device's part, inside `shard_map`. `heads` and
`heads_distillation` say what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import math

import jax
from jax import lax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models import sharding
from models.chunks import Chunks
from models.layers import softcap as capped
from models.slices import as_bits, dynamic_slice, from_bits, take_rows

# A block of 2048 x 1024 float32 logits stays in a CPU's last-level cache; larger or smaller ones measured slower.
BLOCK = 2048
CHUNK = 1024
# Chunks that a device's tokens make at least, so that those that count nothing can be left out. A trained head reads and writes its gradient
# once for each chunk, so there fewer are better.
LEAST_CHUNKS = 4
KEPT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Plan:
  """The static part of a call.

  Attributes:
    tokens: partition of targets_BT.
    unembed: partition of unembed_VD.
    token_axes, vocab_axes, embed_axes: mesh axes of more than one device that split the tokens, and V and D of unembed_VD.
    softcap, chunk, unembed_grad: the caller's.
    entropy: whether the entropy is computed beside the logprobs.
    entropy_grad: whether it is differentiated too.
  """

  tokens: P
  unembed: P
  token_axes: tuple[str, ...]
  vocab_axes: tuple[str, ...]
  embed_axes: tuple[str, ...]
  softcap: float | None
  chunk: int
  unembed_grad: bool
  entropy: bool
  entropy_grad: bool

  @property
  def pulls(self) -> bool:
    """Whether forward leaves nothing to backward but a product."""
    return not (self.unembed_grad or self.entropy_grad)


def check_mask(plan: Plan, shape: tuple[int, ...], mask_BT) -> jax.Array:
  """Return the mask as the plan has it, true everywhere for None; raises as `heads.token_logprobs`."""
  if mask_BT is None:
    mask_BT = jnp.ones(shape, bool)
  if mask_BT.shape != shape:
    raise ValueError(f'mask_BT{mask_BT.shape} must have the shape of the tokens, {shape}.')
  if mask_BT.dtype != jnp.bool_:
    raise TypeError(f'mask_BT must be bool, got {mask_BT.dtype}; a weight becomes a mask by != 0.')
  return jax.reshard(mask_BT, plan.tokens)


def make_plan(hidden_BTD, unembed_VD, targets_BT, softcap, chunk, unembed_grad, entropy=False, entropy_grad=False) -> tuple[Plan, jax.Array]:
  """Return the static part of a call and the head, without its gradient if that is not wanted; raises as `heads.token_logprobs`.

  `targets_BT` is None where a function has none.
  """
  if hidden_BTD.ndim != 3 or unembed_VD.ndim != 2 or hidden_BTD.shape[-1] != unembed_VD.shape[-1]:
    raise ValueError(f'hidden_BTD{hidden_BTD.shape} and unembed_VD{unembed_VD.shape} must be [B, T, D] and [V, D] with one D.')
  if targets_BT is not None and targets_BT.shape != hidden_BTD.shape[:2]:
    raise ValueError(f'targets_BT{targets_BT.shape} must have the first two axes of hidden_BTD{hidden_BTD.shape}.')
  for name, array, kind in (('hidden_BTD', hidden_BTD, jnp.floating), ('unembed_VD', unembed_VD, jnp.floating),
                            ('targets_BT', targets_BT, jnp.integer)):
    if array is not None and not jnp.issubdtype(array.dtype, kind):
      raise TypeError(f'{name} must be of {kind.__name__} dtype, got {array.dtype}.')
  if chunk is not None and chunk < 1:
    raise ValueError(f'chunk={chunk} must be at least 1 token.')
  if softcap is not None and softcap <= 0:
    raise ValueError(f'softcap={softcap} must be positive, or None for no cap.')
  mesh = sharding.current_mesh()
  hidden, unembed = (jax.typeof(x).sharding.spec for x in (hidden_BTD, unembed_VD))

  def axes(*parts):
    names = [name for part in parts if part is not None for name in (part if isinstance(part, tuple) else (part,))]
    return tuple(name for name in names if mesh.shape[name] > 1)

  token_axes, vocab_axes, embed_axes = axes(*hidden[:2]), axes(unembed[0]), axes(unembed[1])
  if axes(hidden[2]):
    raise ValueError(f'hidden_BTD is split {hidden}, but its last axis must be whole; constrain it to batch, length, None.')
  if set(token_axes) & set(vocab_axes):
    raise ValueError(f'A mesh axis splits both the tokens of hidden_BTD ({hidden}) and the vocabulary of unembed_VD ({unembed}); a token '
                     'must meet the whole vocabulary, so give them different axes.')
  if set(embed_axes) - set(token_axes):
    raise ValueError(f'A mesh axis splits D of unembed_VD ({unembed}) but not the tokens of hidden_BTD ({hidden}), so its devices would '
                     'all do the same work; let it split the batch too, or gather unembed_VD first.')
  if chunk is None:
    vocab = unembed_VD.shape[0] // math.prod(mesh.shape[axis] for axis in vocab_axes)
    chunk = min(CHUNK, max(1, KEPT_BYTES // (vocab * hidden_BTD.dtype.itemsize)))
  plan = Plan(P(*hidden[:2]), unembed, token_axes, vocab_axes, embed_axes, softcap, chunk, unembed_grad, entropy, entropy_grad)
  return plan, unembed_VD if unembed_grad else lax.stop_gradient(unembed_VD)


def on_mesh(plan: Plan, function: Callable, *, num_per_token: int, num_returned: int, gradients: bool) -> Callable:
  """Run `function(hidden, unembed, *per_token)` on each device's part; it returns (dhidden, dunembed) if so, then per-token arrays."""
  returned = (plan.tokens,) * num_returned
  grads = (P(*plan.tokens, None), plan.unembed if plan.unembed_grad else None) if gradients else ()
  return jax.shard_map(function, in_specs=(P(*plan.tokens, None), plan.unembed) + (plan.tokens,) * num_per_token,
                       out_specs=grads + returned, check_vma=False)


# What one device computes.


def dot(a, b, contract_b: int) -> jax.Array:
  """Contract the last axis of `a` with axis `contract_b` of `b`; float32."""
  # Float32 results and an lhs contracted over its last axis: the only bf16 dots for which XLA:CPU has a native kernel.
  return lax.dot_general(a, b, (((1,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)


def transposed(x) -> jax.Array:
  """Return the transpose, laid out as such on CPU."""
  if jax.default_backend() != 'cpu':
    return x.T
  # Left to itself XLA:CPU folds the transpose into the dot, which then runs in float32 at a third of the speed; a copy costs far less.
  return with_layout_constraint(x.T, ArrayLayout(major_to_minor=(0, 1)))


def rows(x_VD, start, size: int, dtype) -> jax.Array:
  """Return the block of the head from row `start`."""
  return dynamic_slice(x_VD, (start, 0), (size, x_VD.shape[1])).astype(dtype)


def num_blocks(vocab: int) -> int:
  """Return how many blocks a vocabulary makes."""
  return -(-vocab // BLOCK)


def over_blocks(vocab: int, body: Callable, carry):
  """Fold `body(carry, block, start, size)` over blocks of the vocabulary; the last may be smaller."""
  blocks, rest = divmod(vocab, BLOCK)
  if blocks:
    carry = lax.fori_loop(0, blocks, lambda block, carry: body(carry, block, block * BLOCK, BLOCK), carry)
  return body(carry, blocks, blocks * BLOCK, rest) if rest else carry


def chunks_of(plan: Plan, mask_BT) -> Chunks:
  """Return the tokens of this device in chunks."""
  return Chunks.of(mask_BT, plan.chunk, 1 if plan.unembed_grad else LEAST_CHUNKS)


def whole_head(plan: Plan, unembed_VD, dtype) -> jax.Array:
  """Return the head with all of its columns, this device's part of the vocabulary."""
  if not plan.embed_axes:
    return unembed_VD
  return from_bits(lax.all_gather(as_bits(unembed_VD.astype(dtype)), plan.embed_axes, axis=1, tiled=True), dtype)


def reduced_gradient(plan: Plan, dunembed_VD, dtype) -> jax.Array:
  """Sum the head's gradient over the devices that share its part of the vocabulary, each keeping its own columns."""
  if plan.embed_axes:
    dunembed_VD = lax.psum_scatter(dunembed_VD, plan.embed_axes, scatter_dimension=1, tiled=True)
  rest = tuple(axis for axis in plan.token_axes if axis not in plan.embed_axes)
  return (lax.psum(dunembed_VD, rest) if rest else dunembed_VD).astype(dtype)


def local_ids(plan: Plan, targets, unembed_VD) -> jax.Array:
  """Number the targets from the first row of this device's part of the vocabulary."""
  first = lax.axis_index(plan.vocab_axes) * unembed_VD.shape[0] if plan.vocab_axes else 0
  return targets.astype(jnp.int32) - first


def over_vocab(plan: Plan, reduce: Callable, x) -> jax.Array:
  """Reduce over the devices that share the tokens and split the vocabulary."""
  return reduce(x, plan.vocab_axes) if plan.vocab_axes else x


def logits(plan: Plan, block_VD, hidden_TD) -> tuple[jax.Array, jax.Array | float]:
  """Return capped logits_VT and their derivative with respect to the raw ones."""
  logits_VT = capped(dot(block_VD, hidden_TD, 1), plan.softcap)
  return logits_VT, 1.0 if plan.softcap is None else 1 - (logits_VT / plan.softcap)**2


def hits(start, size: int, targets_T) -> jax.Array:
  """Say of a block's rows which is the target of which token."""
  return (start + jnp.arange(size))[:, None] == targets_T[None]


def logsumexp(plan: Plan, walk: dict) -> jax.Array:
  """Return the log of the sum of all exponentials, from the walks of all devices."""
  top_T = over_vocab(plan, lax.pmax, walk['top_T'])
  return top_T + jnp.log(over_vocab(plan, lax.psum, walk['total_T'] * jnp.exp(walk['top_T'] - top_T)))


def rows_of(unembed_VD, ids, dtype) -> jax.Array:
  """Return the rows of the head of ids of any shape, numbered as by `local_ids`; 0 for those that are not this device's."""
  is_mine = (ids >= 0) & (ids < unembed_VD.shape[0])
  found = take_rows(unembed_VD, jnp.where(is_mine, ids, 0).reshape(-1)).reshape(*ids.shape, -1)
  return jnp.where(is_mine[..., None], found, 0).astype(dtype)


def gradients(plan: Plan, whole_VD, alive_BT, per_token: tuple, dlogits: Callable, dtype, add: Callable | None = None):
  """Return (dhidden_BTD, dunembed_VD or None) from `dlogits(a chunk's per-token arrays, block_VD, start, size)`, dlogits_VT of each block.

  The hidden states are the first of `per_token`, and `alive_BT` says which of them have a gradient. `add(arrays, dhidden_TD, dunembed_VD)`
  adds to both what is not dense over the vocabulary, once for each chunk.
  """
  chunks = chunks_of(plan, alive_BT)
  arrays = tuple(chunks.take(x) for x in per_token)
  operand, embed = per_token[0].dtype, per_token[0].shape[-1]

  def of(index):
    return tuple(lax.dynamic_index_in_dim(x, index, keepdims=False) for x in arrays)

  def body(carry, block, start, size):
    del block
    block_VD = rows(whole_VD, start, size, operand)
    block_DV = transposed(block_VD)

    def chunk(index, carry):
      dblock_VD, dhidden = carry
      taken = of(index)
      dlogits_VT = dlogits(taken, block_VD, start, size).astype(operand)
      if plan.unembed_grad:
        dblock_VD = dblock_VD + dot(dlogits_VT, taken[0], 0)
      dhidden_DT = lax.dynamic_index_in_dim(dhidden, index, keepdims=False) + dot(block_DV, dlogits_VT, 0)
      return dblock_VD, lax.dynamic_update_index_in_dim(dhidden, dhidden_DT, index, 0)

    dhidden, dunembed_VD = carry
    dblock_VD, dhidden = chunks.fold(chunk, (jnp.zeros((size, embed), jnp.float32) if plan.unembed_grad else None, dhidden))
    if plan.unembed_grad:
      dunembed_VD = lax.dynamic_update_slice_in_dim(dunembed_VD, dblock_VD, start, 0)
    return dhidden, dunembed_VD

  dunembed_VD = jnp.zeros(whole_VD.shape, jnp.float32) if plan.unembed_grad else None
  dhidden = jnp.zeros((chunks.count, embed, chunks.size), jnp.float32)
  dhidden, dunembed_VD = over_blocks(whole_VD.shape[0], body, (dhidden, dunembed_VD))
  dhidden = dhidden.swapaxes(1, 2)
  if add is not None:
    def sparse(index, carry):
      dhidden, dunembed_VD = carry
      dhidden_TD, dunembed_VD = add(of(index), lax.dynamic_index_in_dim(dhidden, index, keepdims=False), dunembed_VD)
      return lax.dynamic_update_index_in_dim(dhidden, dhidden_TD, index, 0), dunembed_VD

    dhidden, dunembed_VD = chunks.fold(sparse, (dhidden, dunembed_VD))
  dhidden_BTD = chunks.put(over_vocab(plan, lax.psum, dhidden)).astype(operand)
  return dhidden_BTD, reduced_gradient(plan, dunembed_VD, dtype) if plan.unembed_grad else None
