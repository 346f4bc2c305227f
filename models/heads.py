"""From hidden states to per-token losses: logprobs, entropy and the supervised loss, without ever building logits_BTV.

The vocabulary is walked in blocks under a running log-sum-exp, for a chunk of tokens at a time, so one block of logits is the largest
temporary. Under a mesh each device walks its own tokens and its own part of the vocabulary, and the parts meet in a few sums over tokens.

The supervised loss is linear in the logprobs, so its gradients are known up to one factor before backward starts. Forward computes them in
the walk itself: three matmuls in all, where recomputing the logits takes four. The gradient of the head needs the exponentials once more
when their sum is known; those of one chunk are kept, in the operands' dtype, and the default chunk bounds them.

Deliberately absent: a dense path for small vocabularies (a second definition of every loss), and logits for sampling
(`transformer.logits`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import functools
import math

import jax
from jax import lax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models import sharding
from models.layers import softcap as capped

# A block of 2048 x 1024 float32 logits stays in a CPU's last-level cache; larger or smaller ones measured slower.
_BLOCK = 2048
_CHUNK = 1024
_KEPT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _Plan:
  """The static part of a call.

  Attributes:
    tokens: partition of targets_BT.
    unembed: partition of unembed_VD.
    token_axes, vocab_axes, embed_axes: mesh axes of more than one device that split the tokens, and V and D of unembed_VD.
    softcap, chunk, unembed_grad: the caller's.
    entropy: whether the entropy is computed beside the logprobs.
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


def token_logprobs(hidden_BTD: jax.Array, unembed_VD: jax.Array, targets_BT: jax.Array, *, softcap: float | None = None,
                   chunk: int | None = None, unembed_grad: bool = True) -> jax.Array:
  """Return logprobs_BT, float32 nats, of the targets under softmax(hidden unembed^T).

  Differentiable in hidden and unembed; backward computes the logits again, block by block. A position whose cotangent is 0 adds nothing to
  any gradient, whatever its hidden state holds. A target outside the vocabulary counts as one of logit 0; use it where a mask follows.

  `softcap`: logits become softcap * tanh(logits / softcap) (arXiv:2408.00118 sec. 2). `chunk`: tokens a device handles at once; None takes
  1024, or as many as keep chunk x vocabulary operands under 256 MiB. `unembed_grad=False` freezes unembed, whose gradient is then not
  computed.

  Raises:
    ValueError: shapes or partitions that do not fit together; chunk or softcap not positive.
    TypeError: hidden or unembed not floating, targets not integers.
    RuntimeError: no mesh is set.
  """
  plan, unembed_VD = _plan(hidden_BTD, unembed_VD, targets_BT, softcap, chunk, unembed_grad)
  return _scores(plan, hidden_BTD, unembed_VD, jax.reshard(targets_BT, plan.tokens))[0]


def token_logprobs_and_entropy(hidden_BTD: jax.Array, unembed_VD: jax.Array, targets_BT: jax.Array, *, softcap: float | None = None,
                               chunk: int | None = None, unembed_grad: bool = True) -> tuple[jax.Array, jax.Array]:
  """Return (logprobs_BT, entropy_BT), float32 nats; the entropy is the whole distribution's, and differentiable too.

  Arguments, errors and masked positions as in `token_logprobs`.
  """
  plan, unembed_VD = _plan(hidden_BTD, unembed_VD, targets_BT, softcap, chunk, unembed_grad, entropy=True)
  return _scores(plan, hidden_BTD, unembed_VD, jax.reshard(targets_BT, plan.tokens))


def weighted_nll(hidden_BTD: jax.Array, unembed_VD: jax.Array, targets_BT: jax.Array, weight_BT: jax.Array, *,
                 softcap: float | None = None, chunk: int | None = None, unembed_grad: bool = True) -> tuple[jax.Array, jax.Array]:
  """Return (loss, nll_BT), float32: the sum of weight * nll, and every position's nll in nats (0 where the weight is 0).

  The loss is differentiable in hidden, unembed and weight; nll_BT carries no gradient. A position of weight 0 contributes exactly nothing,
  whatever its hidden state holds.

  `weight_BT` is mask, aggregation and denominator in one (`Batch.loss_weight_BT`). The other arguments, and the errors, are as in
  `token_logprobs`.
  """
  plan, unembed_VD = _plan(hidden_BTD, unembed_VD, targets_BT, softcap, chunk, unembed_grad)
  if weight_BT.shape != targets_BT.shape:
    raise ValueError(f'weight_BT{weight_BT.shape} must have the shape of targets_BT{targets_BT.shape}.')
  if not jnp.issubdtype(weight_BT.dtype, jnp.floating):
    raise TypeError(f'weight_BT must be floating, got {weight_BT.dtype}; a mask becomes a weight by .astype(jnp.float32).')
  targets_BT, weight_BT = (jax.reshard(x, plan.tokens) for x in (targets_BT, weight_BT))
  return _nll(plan, hidden_BTD, unembed_VD, targets_BT, weight_BT)


def _plan(hidden_BTD, unembed_VD, targets_BT, softcap, chunk, unembed_grad, entropy=False) -> tuple[_Plan, jax.Array]:
  if hidden_BTD.ndim != 3 or unembed_VD.ndim != 2 or hidden_BTD.shape[-1] != unembed_VD.shape[-1]:
    raise ValueError(f'hidden_BTD{hidden_BTD.shape} and unembed_VD{unembed_VD.shape} must be [B, T, D] and [V, D] with one D.')
  if targets_BT.shape != hidden_BTD.shape[:2]:
    raise ValueError(f'targets_BT{targets_BT.shape} must have the first two axes of hidden_BTD{hidden_BTD.shape}.')
  for name, array, kind in (('hidden_BTD', hidden_BTD, jnp.floating), ('unembed_VD', unembed_VD, jnp.floating),
                            ('targets_BT', targets_BT, jnp.integer)):
    if not jnp.issubdtype(array.dtype, kind):
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
    chunk = min(_CHUNK, max(1, _KEPT_BYTES // (vocab * hidden_BTD.dtype.itemsize)))
  plan = _Plan(P(*hidden[:2]), unembed, token_axes, vocab_axes, embed_axes, softcap, chunk, unembed_grad, entropy)
  return plan, unembed_VD if unembed_grad else lax.stop_gradient(unembed_VD)


def _on_mesh(plan: _Plan, function: Callable, *, num_per_token: int, num_returned: int, gradients: bool) -> Callable:
  """Run `function(hidden, unembed, *per_token)` on each device's part; it returns (dhidden, dunembed) if so, then per-token arrays."""
  returned = (plan.tokens,) * num_returned
  grads = (P(*plan.tokens, None), plan.unembed if plan.unembed_grad else None) if gradients else ()
  return jax.shard_map(function, in_specs=(P(*plan.tokens, None), plan.unembed) + (plan.tokens,) * num_per_token,
                       out_specs=grads + returned, check_vma=False)


# What one device computes.


def _dot(a, b, contract_b: int) -> jax.Array:
  # Float32 results and an lhs contracted over its last axis: the only bf16 dots for which XLA:CPU has a native kernel.
  return lax.dot_general(a, b, (((1,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)


def _transposed(x) -> jax.Array:
  if jax.default_backend() != 'cpu':
    return x.T
  # Left to itself XLA:CPU folds the transpose into the dot, which then runs in float32 at a third of the speed; a copy costs far less.
  return with_layout_constraint(x.T, ArrayLayout(major_to_minor=(0, 1)))


def _as_bits(x) -> jax.Array:
  # XLA:CPU slices and updates 16-bit floats by converting the whole array to float32 and back; their bits it moves as they are.
  return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def _from_bits(x, dtype) -> jax.Array:
  return lax.bitcast_convert_type(x, dtype) if jnp.dtype(dtype).itemsize == 2 else x


def _rows(x_VD, start, size: int, dtype) -> jax.Array:
  return _from_bits(lax.dynamic_slice_in_dim(_as_bits(x_VD), start, size), x_VD.dtype).astype(dtype)


def _over_blocks(vocab: int, body: Callable, carry):
  """Fold `body(carry, block, start, size)` over blocks of the vocabulary; the last may be smaller."""
  blocks, rest = divmod(vocab, _BLOCK)
  if blocks:
    carry = lax.fori_loop(0, blocks, lambda block, carry: body(carry, block, block * _BLOCK, _BLOCK), carry)
  return body(carry, blocks, blocks * _BLOCK, rest) if rest else carry


def _in_chunks(plan: _Plan, x_BT: jax.Array) -> jax.Array:
  """Reshape [B, T, ...] to [chunks, tokens of a chunk, ...], padded with zeros."""
  num = x_BT.shape[0] * x_BT.shape[1]
  chunks = -(-num // plan.chunk)
  size = -(-num // chunks)
  x_T = x_BT.reshape(num, *x_BT.shape[2:])
  return jnp.pad(x_T, ((0, chunks * size - num),) + ((0, 0),) * (x_T.ndim - 1)).reshape(chunks, size, *x_T.shape[1:])


def _in_rows(x, like_BT: jax.Array) -> jax.Array:
  """Undo `_in_chunks`."""
  tail = x.shape[2:]
  return x.reshape(-1, *tail)[:like_BT.shape[0] * like_BT.shape[1]].reshape(*like_BT.shape[:2], *tail)


def _whole(plan: _Plan, unembed_VD, dtype) -> jax.Array:
  if not plan.embed_axes:
    return unembed_VD
  return _from_bits(lax.all_gather(_as_bits(unembed_VD.astype(dtype)), plan.embed_axes, axis=1, tiled=True), dtype)


def _reduced(plan: _Plan, dunembed_VD, dtype) -> jax.Array:
  """Sum the head's gradient over the devices that share its part of the vocabulary, each keeping its own columns."""
  if plan.embed_axes:
    dunembed_VD = lax.psum_scatter(dunembed_VD, plan.embed_axes, scatter_dimension=1, tiled=True)
  rest = tuple(axis for axis in plan.token_axes if axis not in plan.embed_axes)
  return (lax.psum(dunembed_VD, rest) if rest else dunembed_VD).astype(dtype)


def _local(plan: _Plan, targets, unembed_VD) -> jax.Array:
  """Number the targets from the first row of this device's part of the vocabulary."""
  first = lax.axis_index(plan.vocab_axes) * unembed_VD.shape[0] if plan.vocab_axes else 0
  return targets.astype(jnp.int32) - first


def _over_vocab(plan: _Plan, reduce: Callable, x) -> jax.Array:
  return reduce(x, plan.vocab_axes) if plan.vocab_axes else x


def _logits(plan: _Plan, block_VD, hidden_TD) -> tuple[jax.Array, jax.Array | float]:
  """Return capped logits_VT and their derivative with respect to the raw ones."""
  logits_VT = capped(_dot(block_VD, hidden_TD, 1), plan.softcap)
  return logits_VT, 1.0 if plan.softcap is None else 1 - (logits_VT / plan.softcap)**2


def _walk(plan: _Plan, hidden_TD, unembed_VD, targets_T=None, *, keep: bool = False) -> dict:
  """Walk the vocabulary once under a running maximum: `top_T`, and `total_T`, the sum of exp(logit - top).

  With entropy also `moment_T`, the sum of logit * exp(logit - top). With targets (numbered locally) also `pull_DT`, the sum of
  exp(logit - top) d logit / d hidden over all words but the target, whose share is near -1 and would drown in bf16; with `keep` the
  factors under that sum, `kept_VT`, each block relative to its own `tops_IT`.
  """
  dtype, (num, embed) = hidden_TD.dtype, hidden_TD.shape
  vocab = unembed_VD.shape[0]
  carry = {'top_T': jnp.full((num,), jnp.finfo(jnp.float32).min), 'total_T': jnp.zeros((num,), jnp.float32)}
  if plan.entropy:
    carry['moment_T'] = jnp.zeros((num,), jnp.float32)
  if targets_T is not None:
    carry['pull_DT'] = jnp.zeros((embed, num), jnp.float32)
  if keep:
    carry['kept_VT'] = _as_bits(jnp.zeros((vocab, num), dtype))
    carry['tops_IT'] = jnp.zeros((-(-vocab // _BLOCK), num), jnp.float32)

  def body(carry, block, start, size):
    block_VD = _rows(unembed_VD, start, size, dtype)
    logits_VT, slope_VT = _logits(plan, block_VD, hidden_TD)
    top_T = jnp.maximum(carry['top_T'], logits_VT.max(0))
    exp_VT = jnp.exp(logits_VT - top_T[None])
    shrink_T = jnp.exp(carry['top_T'] - top_T)
    new = {'top_T': top_T, 'total_T': carry['total_T'] * shrink_T + exp_VT.sum(0)}
    if plan.entropy:
      new['moment_T'] = carry['moment_T'] * shrink_T + (exp_VT * logits_VT).sum(0)
    if targets_T is not None:
      factor_VT = (jnp.where(_hits(start, size, targets_T), 0, exp_VT) * slope_VT).astype(dtype)
      new['pull_DT'] = carry['pull_DT'] * shrink_T[None] + _dot(_transposed(block_VD), factor_VT, 0)
    if keep:
      new['kept_VT'] = lax.dynamic_update_slice_in_dim(carry['kept_VT'], _as_bits(factor_VT), start, 0)
      new['tops_IT'] = lax.dynamic_update_index_in_dim(carry['tops_IT'], top_T, block, 0)
    return new

  return _over_blocks(vocab, body, carry)


def _hits(start, size: int, targets_T) -> jax.Array:
  return (start + jnp.arange(size))[:, None] == targets_T[None]


def _logsumexp(plan: _Plan, walk: dict) -> jax.Array:
  top_T = _over_vocab(plan, lax.pmax, walk['top_T'])
  return top_T + jnp.log(_over_vocab(plan, lax.psum, walk['total_T'] * jnp.exp(walk['top_T'] - top_T)))


def _target_rows(unembed_VD, targets_T, dtype) -> jax.Array:
  """Return the targets' rows of the head, 0 for targets that are not this device's."""
  mine_T = (targets_T >= 0) & (targets_T < unembed_VD.shape[0])
  # As bits: XLA's CPU backend has no 16-bit gather and would convert the whole head first.
  rows_TD = _from_bits(_as_bits(unembed_VD)[jnp.where(mine_T, targets_T, 0)], unembed_VD.dtype)
  return jnp.where(mine_T[:, None], rows_TD, 0).astype(dtype)


def _target_logits(plan: _Plan, hidden_TD, rows_TD) -> jax.Array:
  raw_T = (hidden_TD.astype(jnp.float32) * rows_TD.astype(jnp.float32)).sum(-1)
  return capped(_over_vocab(plan, lax.psum, raw_T), plan.softcap)


# Logprobs and entropy.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(plan, hidden_BTD, unembed_VD, targets_BT):
  return _scores_forward(plan, hidden_BTD, unembed_VD, targets_BT)[0]


def _scores_forward(plan, hidden_BTD, unembed_VD, targets_BT):
  def device(hidden_BTD, unembed_VD, targets_BT):
    dtype = hidden_BTD.dtype
    whole_VD = _whole(plan, unembed_VD, dtype)

    def chunk(arrays):
      hidden_TD, targets_T = arrays
      walk = _walk(plan, hidden_TD, whole_VD)
      lse_T = _logsumexp(plan, walk)
      logprobs_T = _target_logits(plan, hidden_TD, _target_rows(whole_VD, targets_T, dtype)) - lse_T
      if not plan.entropy:
        return logprobs_T, lse_T
      return logprobs_T, lse_T, lse_T - _over_vocab(plan, lax.psum, walk['moment_T'] * jnp.exp(walk['top_T'] - lse_T))

    scores = lax.map(chunk, (_in_chunks(plan, hidden_BTD), _in_chunks(plan, _local(plan, targets_BT, whole_VD))))
    return tuple(_in_rows(x, targets_BT) for x in scores)

  run = _on_mesh(plan, device, num_per_token=1, num_returned=2 + plan.entropy, gradients=False)
  logprobs_BT, lse_BT, *entropy_BT = run(hidden_BTD, unembed_VD, targets_BT)
  return (logprobs_BT, *entropy_BT), (hidden_BTD, unembed_VD, targets_BT, lse_BT, *entropy_BT)


def _scores_backward(plan, saved, cotangents):
  """With p = softmax(logits) and entropy H: dlogits = g_logprob (onehot - p) - g_entropy p (log p + H), each block recomputed."""
  def device(hidden_BTD, unembed_VD, targets_BT, lse_BT, *rest):
    dtype, embed = hidden_BTD.dtype, hidden_BTD.shape[-1]
    alive_BT = functools.reduce(jnp.logical_or, [x != 0 for x in rest[plan.entropy:]])
    hidden_BTD = jnp.where(alive_BT[..., None], hidden_BTD, 0)
    per_token = [jnp.where(alive_BT, x, 0) for x in (lse_BT, *rest)]
    whole_VD = _whole(plan, unembed_VD, dtype)
    hidden, targets, *per_token = (_in_chunks(plan, x) for x in (hidden_BTD, _local(plan, targets_BT, whole_VD), *per_token))
    chunks, size, _ = hidden.shape

    def body(carry, block, start, size):
      block_VD = _rows(whole_VD, start, size, dtype)
      block_DV = _transposed(block_VD)

      def chunk(dblock_VD, arrays):
        dhidden_DT, hidden_TD, targets_T, lse_T, *rest = arrays
        logits_VT, slope_VT = _logits(plan, block_VD, hidden_TD)
        surprise_VT = logits_VT - lse_T[None]
        if plan.entropy:
          entropy_T, glogprob_T, gentropy_T = rest
          pull_VT = glogprob_T[None] + gentropy_T[None] * (surprise_VT + entropy_T[None])
        else:
          glogprob_T, = rest
          pull_VT = glogprob_T[None]
        dlogits_VT = jnp.where(_hits(start, size, targets_T), glogprob_T[None], 0) - jnp.exp(surprise_VT) * pull_VT
        dlogits_VT = (dlogits_VT * slope_VT).astype(dtype)
        if plan.unembed_grad:
          dblock_VD = dblock_VD + _dot(dlogits_VT, hidden_TD, 0)
        return dblock_VD, dhidden_DT + _dot(block_DV, dlogits_VT, 0)

      dhidden, dunembed_VD = carry
      dblock_VD = jnp.zeros((size, embed), jnp.float32) if plan.unembed_grad else None
      dblock_VD, dhidden = lax.scan(chunk, dblock_VD, (dhidden, hidden, targets, *per_token))
      if plan.unembed_grad:
        dunembed_VD = lax.dynamic_update_slice_in_dim(dunembed_VD, dblock_VD, start, 0)
      return dhidden, dunembed_VD

    dunembed_VD = jnp.zeros(whole_VD.shape, jnp.float32) if plan.unembed_grad else None
    dhidden, dunembed_VD = _over_blocks(whole_VD.shape[0], body, (jnp.zeros((chunks, embed, size), jnp.float32), dunembed_VD))
    dhidden_BTD = _in_rows(_over_vocab(plan, lax.psum, dhidden.swapaxes(1, 2)), targets_BT).astype(dtype)
    return dhidden_BTD, _reduced(plan, dunembed_VD, unembed_VD.dtype) if plan.unembed_grad else None

  hidden_BTD, unembed_VD, targets_BT, *per_token = saved
  run = _on_mesh(plan, device, num_per_token=1 + len(per_token) + len(cotangents), num_returned=0, gradients=True)
  return (*run(hidden_BTD, unembed_VD, targets_BT, *per_token, *cotangents), None)


_scores.defvjp(_scores_forward, _scores_backward)


# The supervised loss.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(plan, hidden_BTD, unembed_VD, targets_BT, weight_BT):
  hidden_BTD = jnp.where((weight_BT != 0)[..., None], hidden_BTD, 0)
  return _summed(weight_BT, -_scores(plan, hidden_BTD, unembed_VD, targets_BT)[0])


def _summed(weight_BT, nll_BT):
  nll_BT = jnp.where(weight_BT != 0, nll_BT, 0)
  return jnp.sum(weight_BT.astype(jnp.float32) * nll_BT), nll_BT


def _nll_forward(plan, hidden_BTD, unembed_VD, targets_BT, weight_BT):
  def device(hidden_BTD, unembed_VD, targets_BT, weight_BT):
    dtype = hidden_BTD.dtype
    whole_VD = _whole(plan, unembed_VD, dtype)
    dunembed_VD = jnp.zeros(whole_VD.shape, jnp.float32) if plan.unembed_grad else None
    hidden_BTD = jnp.where((weight_BT != 0)[..., None], hidden_BTD, 0)
    arrays = (hidden_BTD, _local(plan, targets_BT, whole_VD), weight_BT.astype(jnp.float32))
    dunembed_VD, (dhidden, nll) = lax.scan(functools.partial(_nll_chunk, plan, whole_VD), dunembed_VD,
                                           tuple(_in_chunks(plan, x) for x in arrays))
    dunembed_VD = _reduced(plan, dunembed_VD, unembed_VD.dtype) if plan.unembed_grad else None
    return _in_rows(dhidden, targets_BT).astype(dtype), dunembed_VD, _in_rows(nll, targets_BT)

  run = _on_mesh(plan, device, num_per_token=2, num_returned=1, gradients=True)
  dhidden_BTD, dunembed_VD, nll_BT = run(hidden_BTD, unembed_VD, targets_BT, weight_BT)
  loss, nll_BT = _summed(weight_BT, nll_BT)
  return (loss, nll_BT), (dhidden_BTD, dunembed_VD, nll_BT, weight_BT)


def _nll_chunk(plan, unembed_VD, dunembed_VD, arrays):
  """Add a chunk's gradient of the head to `dunembed_VD`; return it with the chunk's (dhidden_TD, nll_T)."""
  hidden_TD, targets_T, weight_T = arrays
  dtype = hidden_TD.dtype
  walk = _walk(plan, hidden_TD, unembed_VD, targets_T, keep=plan.unembed_grad)
  lse_T = _logsumexp(plan, walk)
  rows_TD = _target_rows(unembed_VD, targets_T, dtype)
  logits_T = _target_logits(plan, hidden_TD, rows_TD)
  slope_T = 1.0 if plan.softcap is None else 1 - (logits_T / plan.softcap)**2
  at_target_T = weight_T * (jnp.exp(logits_T - lse_T) - 1) * slope_T
  dhidden_TD = (walk['pull_DT'] * (weight_T * jnp.exp(walk['top_T'] - lse_T))[None]).T
  dhidden_TD = _over_vocab(plan, lax.psum, dhidden_TD + at_target_T[:, None] * rows_TD.astype(jnp.float32))
  if plan.unembed_grad:
    scale_IT = weight_T[None] * jnp.exp(walk['tops_IT'] - lse_T[None])

    def body(dunembed_VD, block, start, size):
      factor_VT = _from_bits(lax.dynamic_slice_in_dim(walk['kept_VT'], start, size), dtype)
      scaled_TD = (hidden_TD.astype(jnp.float32) * scale_IT[block][:, None]).astype(dtype)
      sum_VD = lax.dynamic_slice_in_dim(dunembed_VD, start, size) + _dot(factor_VT, scaled_TD, 0)
      return lax.dynamic_update_slice_in_dim(dunembed_VD, sum_VD, start, 0)

    dunembed_VD = _over_blocks(unembed_VD.shape[0], body, dunembed_VD)
    # A negative index would count from the end, so a target of another device is sent past it and dropped.
    index_T = jnp.where(targets_T < 0, unembed_VD.shape[0], targets_T)
    dunembed_VD = dunembed_VD.at[index_T].add(at_target_T[:, None] * hidden_TD.astype(jnp.float32), mode='drop')
  return dunembed_VD, (dhidden_TD, lse_T - logits_T)


def _nll_backward(plan, saved, cotangents):
  del plan
  dhidden_BTD, dunembed_VD, nll_BT, weight_BT = saved
  # The constant 1 of jax.grad, mostly: XLA then drops the multiplication, and a pass over the gradient with it. nll_BT's cotangent is ignored.
  factor = cotangents[0]

  def scaled(x):
    return None if x is None else (x.astype(jnp.float32) * factor).astype(x.dtype)

  return scaled(dhidden_BTD), scaled(dunembed_VD), None, (factor * nll_BT).astype(weight_BT.dtype)


_nll.defvjp(_nll_forward, _nll_backward)
