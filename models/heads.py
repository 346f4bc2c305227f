"""From hidden states to per-token losses: logprobs, entropy and the supervised loss, without ever building logits_BTV.

The vocabulary is walked in blocks under a running log-sum-exp, for a chunk of tokens at a time, so one block of logits is the largest
temporary. Under a mesh each device walks its own tokens and its own part of the vocabulary, and the parts meet in a few sums over tokens.

Tokens that count nothing cost nothing: each device puts those that count first and walks only the chunks that hold one. In reinforcement
learning and in dialogs that is most of the work.

A logprob's gradient with respect to its hidden state is known before backward starts, up to the cotangent. Where the head is frozen, forward
computes it in the walk itself: two matmuls in all, where recomputing the logits takes three.

The supervised loss is linear in the logprobs, so its gradients are known up to one factor before backward starts. Forward computes them in
the walk itself: three matmuls in all, where recomputing the logits takes four. The gradient of the head needs the exponentials once more
when their sum is known; those of one chunk are kept, in the operands' dtype, and the default chunk bounds them.

Deliberately absent: a dense path for small vocabularies (a second definition of every loss), and logits for sampling
(`transformer.logits`).
"""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from models import head_blocks as blocks
from models.layers import softcap as capped
from models.slices import as_bits, from_bits


def token_logprobs(hidden_BTD: jax.Array, unembed_VD: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array | None = None, *,
                   softcap: float | None = None, chunk: int | None = None, unembed_grad: bool = True) -> jax.Array:
  """Return logprobs_BT, float32 nats, of the targets under softmax(hidden unembed^T).

  Differentiable in hidden and unembed; backward computes the logits again, block by block. A position whose cotangent is 0 adds nothing to
  any gradient, whatever its hidden state holds. A target outside the vocabulary counts as one of logit 0; use it where a mask follows.

  `mask_BT`: bool; where it is false the result is 0, costs nothing and has no gradient, whatever the hidden state holds. None is true
  everywhere. `softcap`: logits become softcap * tanh(logits / softcap) (arXiv:2408.00118 sec. 2). `chunk`: most tokens a device handles at once;
  None takes 1024, or as many as keep chunk x vocabulary operands under 256 MiB. `unembed_grad=False` freezes unembed, whose gradient is then not
  computed.

  Raises:
    ValueError: shapes or partitions that do not fit together; chunk or softcap not positive.
    TypeError: hidden or unembed not floating, targets not integers, mask not bool.
    RuntimeError: no mesh is set.
  """
  plan, unembed_VD = blocks.make_plan(hidden_BTD, unembed_VD, targets_BT, softcap, chunk, unembed_grad)
  return _scores(plan, hidden_BTD, unembed_VD, jax.reshard(targets_BT, plan.tokens), blocks.check_mask(plan, targets_BT.shape, mask_BT))[0]


def token_logprobs_and_entropy(hidden_BTD: jax.Array, unembed_VD: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array | None = None, *,
                               softcap: float | None = None, chunk: int | None = None, unembed_grad: bool = True,
                               entropy_grad: bool = True) -> tuple[jax.Array, jax.Array]:
  """Return (logprobs_BT, entropy_BT), float32 nats; the entropy is the whole distribution's, and differentiable with `entropy_grad`.

  Arguments, errors and masked positions as in `token_logprobs`.
  """
  plan, unembed_VD = blocks.make_plan(hidden_BTD, unembed_VD, targets_BT, softcap, chunk, unembed_grad, entropy=True,
                                      entropy_grad=entropy_grad)
  mask_BT = blocks.check_mask(plan, targets_BT.shape, mask_BT)
  logprobs_BT, entropy_BT = _scores(plan, hidden_BTD, unembed_VD, jax.reshard(targets_BT, plan.tokens), mask_BT)
  return logprobs_BT, entropy_BT if entropy_grad else lax.stop_gradient(entropy_BT)


def weighted_nll(hidden_BTD: jax.Array, unembed_VD: jax.Array, targets_BT: jax.Array, weight_BT: jax.Array, *,
                 softcap: float | None = None, chunk: int | None = None, unembed_grad: bool = True) -> tuple[jax.Array, jax.Array]:
  """Return (loss, nll_BT), float32: the sum of weight * nll, and every position's nll in nats (0 where the weight is 0).

  The loss is differentiable in hidden, unembed and weight; nll_BT carries no gradient. A position of weight 0 contributes exactly nothing,
  whatever its hidden state holds.

  `weight_BT` is mask, aggregation and denominator in one (`Batch.loss_weight_BT`). The other arguments, and the errors, are as in
  `token_logprobs`.
  """
  plan, unembed_VD = blocks.make_plan(hidden_BTD, unembed_VD, targets_BT, softcap, chunk, unembed_grad)
  if weight_BT.shape != targets_BT.shape:
    raise ValueError(f'weight_BT{weight_BT.shape} must have the shape of targets_BT{targets_BT.shape}.')
  if not jnp.issubdtype(weight_BT.dtype, jnp.floating):
    raise TypeError(f'weight_BT must be floating, got {weight_BT.dtype}; a mask becomes a weight by .astype(jnp.float32).')
  targets_BT, weight_BT = (jax.reshard(x, plan.tokens) for x in (targets_BT, weight_BT))
  return _nll(plan, hidden_BTD, unembed_VD, targets_BT, weight_BT)


def _walk(plan: blocks.Plan, hidden_TD, unembed_VD, targets_T=None, *, keep: bool = False) -> dict:
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
    carry['kept_VT'] = as_bits(jnp.zeros((vocab, num), dtype))
    carry['tops_IT'] = jnp.zeros((blocks.num_blocks(vocab), num), jnp.float32)

  def body(carry, block, start, size):
    block_VD = blocks.rows(unembed_VD, start, size, dtype)
    logits_VT, slope_VT = blocks.logits(plan, block_VD, hidden_TD)
    top_T = jnp.maximum(carry['top_T'], logits_VT.max(0))
    exp_VT = jnp.exp(logits_VT - top_T[None])
    shrink_T = jnp.exp(carry['top_T'] - top_T)
    new = {'top_T': top_T, 'total_T': carry['total_T'] * shrink_T + exp_VT.sum(0)}
    if plan.entropy:
      new['moment_T'] = carry['moment_T'] * shrink_T + (exp_VT * logits_VT).sum(0)
    if targets_T is not None:
      factor_VT = (jnp.where(blocks.hits(start, size, targets_T), 0, exp_VT) * slope_VT).astype(dtype)
      new['pull_DT'] = carry['pull_DT'] * shrink_T[None] + blocks.dot(blocks.transposed(block_VD), factor_VT, 0)
    if keep:
      new['kept_VT'] = lax.dynamic_update_slice_in_dim(carry['kept_VT'], as_bits(factor_VT), start, 0)
      new['tops_IT'] = lax.dynamic_update_index_in_dim(carry['tops_IT'], top_T, block, 0)
    return new

  return blocks.over_blocks(vocab, body, carry)


def _target_logits(plan: blocks.Plan, hidden_TD, rows_TD) -> jax.Array:
  raw_T = (hidden_TD.astype(jnp.float32) * rows_TD.astype(jnp.float32)).sum(-1)
  return capped(blocks.over_vocab(plan, lax.psum, raw_T), plan.softcap)


def _nll_pull(plan: blocks.Plan, walk: dict, lse_T, logits_T, rows_TD) -> tuple[jax.Array, jax.Array]:
  """Return (d nll / d hidden)_TD, and the derivative of nll with respect to the target's raw logit."""
  slope_T = 1.0 if plan.softcap is None else 1 - (logits_T / plan.softcap)**2
  at_target_T = (jnp.exp(logits_T - lse_T) - 1) * slope_T
  pull_TD = (walk['pull_DT'] * jnp.exp(walk['top_T'] - lse_T)[None]).T
  return blocks.over_vocab(plan, lax.psum, pull_TD + at_target_T[:, None] * rows_TD.astype(jnp.float32)), at_target_T


# Logprobs and entropy.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(plan, hidden_BTD, unembed_VD, targets_BT, mask_BT):
  return _scored(plan, hidden_BTD, unembed_VD, targets_BT, mask_BT, pulls=False)[0]


def _scores_forward(plan, hidden_BTD, unembed_VD, targets_BT, mask_BT):
  scores, (lse_BT, pull_BTD) = _scored(plan, hidden_BTD, unembed_VD, targets_BT, mask_BT, pulls=plan.pulls)
  saved = (pull_BTD,) if plan.pulls else (hidden_BTD, unembed_VD, targets_BT, mask_BT, lse_BT, *scores[1:])
  return scores, saved


def _scored(plan, hidden_BTD, unembed_VD, targets_BT, mask_BT, *, pulls: bool):
  """Return ((logprobs_BT, entropy_BT if asked), (lse_BT, pull_BTD)); pull_BTD, if asked, is the logprobs' gradient, else None."""
  def device(hidden_BTD, unembed_VD, targets_BT, mask_BT):
    dtype = hidden_BTD.dtype
    whole_VD = blocks.whole_head(plan, unembed_VD, dtype)

    def chunk(_, arrays):
      hidden_TD, targets_T = arrays
      walk = _walk(plan, hidden_TD, whole_VD, targets_T if pulls else None)
      lse_T = blocks.logsumexp(plan, walk)
      rows_TD = blocks.rows_of(whole_VD, targets_T, dtype)
      logits_T = _target_logits(plan, hidden_TD, rows_TD)
      found = [logits_T - lse_T, lse_T]
      if plan.entropy:
        found.append(lse_T - blocks.over_vocab(plan, lax.psum, walk['moment_T'] * jnp.exp(walk['top_T'] - lse_T)))
      if pulls:
        found.append(-_nll_pull(plan, walk, lse_T, logits_T, rows_TD)[0].astype(dtype))
      return None, tuple(found)

    chunks = blocks.chunks_of(plan, mask_BT)
    _, found = chunks.map(chunk, None, (chunks.take(hidden_BTD), chunks.take(blocks.local_ids(plan, targets_BT, whole_VD))))
    return tuple(chunks.put(x) for x in found)

  run = blocks.on_mesh(plan, device, num_per_token=2, num_returned=2 + plan.entropy + pulls, gradients=False)
  logprobs_BT, lse_BT, *rest = run(hidden_BTD, unembed_VD, targets_BT, mask_BT)
  pull_BTD = rest.pop() if pulls else None
  return (logprobs_BT, *rest), (lse_BT, pull_BTD)


def _scores_backward(plan, saved, cotangents):
  """With p = softmax(logits) and entropy H: dlogits = g_logprob (onehot - p) - g_entropy p (log p + H), each block recomputed."""
  if plan.pulls:
    pull_BTD, = saved
    gradient_BT1 = cotangents[0][..., None]
    # A cotangent of 0 adds nothing, whatever the hidden state held.
    dhidden_BTD = jnp.where(gradient_BT1 != 0, gradient_BT1 * pull_BTD.astype(jnp.float32), 0).astype(pull_BTD.dtype)
    return dhidden_BTD, None, None, None

  def device(hidden_BTD, unembed_VD, targets_BT, mask_BT, lse_BT, *rest):
    alive_BT = functools.reduce(jnp.logical_or, [x != 0 for x in rest[plan.entropy:]])
    whole_VD = blocks.whole_head(plan, unembed_VD, hidden_BTD.dtype)

    def dlogits(arrays, block_VD, start, size):
      hidden_TD, targets_T, lse_T, *rest = arrays
      logits_VT, slope_VT = blocks.logits(plan, block_VD, hidden_TD)
      surprise_VT = logits_VT - lse_T[None]
      if plan.entropy:
        entropy_T, glogprob_T, gentropy_T = rest
        pull_VT = glogprob_T[None] + gentropy_T[None] * (surprise_VT + entropy_T[None])
      else:
        glogprob_T, = rest
        pull_VT = glogprob_T[None]
      return (jnp.where(blocks.hits(start, size, targets_T), glogprob_T[None], 0) - jnp.exp(surprise_VT) * pull_VT) * slope_VT

    per_token = (hidden_BTD, blocks.local_ids(plan, targets_BT, whole_VD), lse_BT, *rest)
    return blocks.gradients(plan, whole_VD, mask_BT & alive_BT, per_token, dlogits, unembed_VD.dtype)

  hidden_BTD, unembed_VD, targets_BT, mask_BT, *per_token = saved
  run = blocks.on_mesh(plan, device, num_per_token=2 + len(per_token) + len(cotangents), num_returned=0, gradients=True)
  return (*run(hidden_BTD, unembed_VD, targets_BT, mask_BT, *per_token, *cotangents), None, None)


_scores.defvjp(_scores_forward, _scores_backward)


# The supervised loss.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(plan, hidden_BTD, unembed_VD, targets_BT, weight_BT):
  return _summed(weight_BT, -_scores(plan, hidden_BTD, unembed_VD, targets_BT, weight_BT != 0)[0])


def _summed(weight_BT, nll_BT):
  nll_BT = jnp.where(weight_BT != 0, nll_BT, 0)
  return jnp.sum(weight_BT.astype(jnp.float32) * nll_BT), nll_BT


def _nll_forward(plan, hidden_BTD, unembed_VD, targets_BT, weight_BT):
  def device(hidden_BTD, unembed_VD, targets_BT, weight_BT):
    dtype = hidden_BTD.dtype
    whole_VD = blocks.whole_head(plan, unembed_VD, dtype)
    dunembed_VD = jnp.zeros(whole_VD.shape, jnp.float32) if plan.unembed_grad else None
    chunks = blocks.chunks_of(plan, weight_BT != 0)
    arrays = (hidden_BTD, blocks.local_ids(plan, targets_BT, whole_VD), weight_BT.astype(jnp.float32))
    dunembed_VD, (dhidden, nll) = chunks.map(functools.partial(_nll_chunk, plan, whole_VD), dunembed_VD, tuple(map(chunks.take, arrays)))
    dunembed_VD = blocks.reduced_gradient(plan, dunembed_VD, unembed_VD.dtype) if plan.unembed_grad else None
    return chunks.put(dhidden).astype(dtype), dunembed_VD, chunks.put(nll)

  run = blocks.on_mesh(plan, device, num_per_token=2, num_returned=1, gradients=True)
  dhidden_BTD, dunembed_VD, nll_BT = run(hidden_BTD, unembed_VD, targets_BT, weight_BT)
  loss, nll_BT = _summed(weight_BT, nll_BT)
  return (loss, nll_BT), (dhidden_BTD, dunembed_VD, nll_BT, weight_BT)


def _nll_chunk(plan, unembed_VD, dunembed_VD, arrays):
  """Add a chunk's gradient of the head to `dunembed_VD`; return it with the chunk's (dhidden_TD, nll_T)."""
  hidden_TD, targets_T, weight_T = arrays
  dtype = hidden_TD.dtype
  walk = _walk(plan, hidden_TD, unembed_VD, targets_T, keep=plan.unembed_grad)
  lse_T = blocks.logsumexp(plan, walk)
  rows_TD = blocks.rows_of(unembed_VD, targets_T, dtype)
  logits_T = _target_logits(plan, hidden_TD, rows_TD)
  dhidden_TD, at_target_T = _nll_pull(plan, walk, lse_T, logits_T, rows_TD)
  dhidden_TD, at_target_T = weight_T[:, None] * dhidden_TD, weight_T * at_target_T
  if plan.unembed_grad:
    scale_IT = weight_T[None] * jnp.exp(walk['tops_IT'] - lse_T[None])

    def body(dunembed_VD, block, start, size):
      factor_VT = from_bits(lax.dynamic_slice_in_dim(walk['kept_VT'], start, size), dtype)
      scaled_TD = (hidden_TD.astype(jnp.float32) * scale_IT[block][:, None]).astype(dtype)
      sum_VD = lax.dynamic_slice_in_dim(dunembed_VD, start, size) + blocks.dot(factor_VT, scaled_TD, 0)
      return lax.dynamic_update_slice_in_dim(dunembed_VD, sum_VD, start, 0)

    dunembed_VD = blocks.over_blocks(unembed_VD.shape[0], body, dunembed_VD)
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
