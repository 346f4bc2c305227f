"""From the hidden states of a student and a teacher to what is between their distributions, without ever building logits_BTV of either.

Two ways. `divergence` walks both heads side by side in blocks of the vocabulary, so the teacher must be there. `top_logprobs` reduces a
teacher's distribution to its likeliest words, which can be kept, and `logprobs_at` says what a student gives to just these.

A KL divergence is one walk forward: its expectation is a sum under the running maximum like the normalizers. The Jensen-Shannon divergence
has the logarithm of a mixture of normalized distributions in it and takes a second walk. Backward computes the logits again and knows the
rest: with q = softmax(z), a divergence D(q) has the gradient q (dD/dq - <q, dD/dq>) in z.

The teacher gets no gradient. Everything about chunks, blocks, meshes and masks is as in `heads`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
import functools
import math
from typing import Literal, get_args

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models import head_blocks as blocks
from models.layers import softcap as capped

Divergence = Literal['forward', 'reverse', 'jensen_shannon']


@dataclass(frozen=True)
class _Pair:
  """The static part of a call of `divergence`."""
  student: blocks.Plan
  teacher: blocks.Plan
  kind: Divergence
  beta: float


def divergence(hidden_BTD: jax.Array, unembed_VD: jax.Array, teacher_hidden_BTD: jax.Array, teacher_unembed_VD: jax.Array,
               mask_BT: jax.Array | None = None, *, kind: Divergence, beta: float = 0.5, temperature: float | jax.Array = 1.0,
               softcap: float | None = None, teacher_softcap: float | None = None, chunk: int | None = None,
               unembed_grad: bool = True) -> tuple[jax.Array, jax.Array]:
  """Return (divergence_BT, agrees_BT): how far the student's distributions q are from the teacher's p, and if they have one likeliest word.

  Both distributions are softmax(logits / temperature). With m = beta p + (1 - beta) q, in float32 nats: 'forward' is KL(p | q), 'reverse'
  KL(q | p), and 'jensen_shannon' beta KL(p | m) + (1 - beta) KL(q | m) (arXiv:2306.13649 eq. 1), which over beta tends to the forward one
  at 0 and over 1 - beta to the reverse one at 1. Differentiable in hidden and unembed.

  The heads may differ in D, not in V. `temperature` may be traced, so that a schedule compiles once. `agrees_BT` is float32, 1 or 0. The
  other arguments, and masked positions, are as in `heads.token_logprobs`.

  Raises:
    ValueError: as `heads.token_logprobs`; vocabularies, rows or partitions of student and teacher that differ; an unknown kind; beta not
      between 0 and 1, temperature not positive.
    TypeError, RuntimeError: as `heads.token_logprobs`.
  """
  if kind not in get_args(Divergence):
    raise ValueError(f'kind={kind!r} is unknown; use one of {", ".join(get_args(Divergence))}.')
  if not 0 < beta < 1:
    raise ValueError(f"beta={beta} must be between 0 and 1; its limits are kind='forward' and kind='reverse'.")
  if unembed_VD.shape[:1] != teacher_unembed_VD.shape[:1]:
    raise ValueError(f'unembed_VD{unembed_VD.shape} and teacher_unembed_VD{teacher_unembed_VD.shape} must have one vocabulary: words are '
                     'compared by their ids.')
  temperature = _as_temperature(temperature)
  student, unembed_VD = blocks.make_plan(hidden_BTD, unembed_VD, None, softcap, chunk, unembed_grad)
  teacher, teacher_unembed_VD = blocks.make_plan(teacher_hidden_BTD, teacher_unembed_VD, None, teacher_softcap, student.chunk, False)
  if hidden_BTD.shape[:2] != teacher_hidden_BTD.shape[:2] or (student.tokens, student.vocab_axes) != (teacher.tokens, teacher.vocab_axes):
    raise ValueError(f'hidden_BTD{hidden_BTD.shape} split {student.tokens} and teacher_hidden_BTD{teacher_hidden_BTD.shape} split '
                     f'{teacher.tokens} must be the same tokens at the same places, their vocabularies split over the same axes '
                     f'(got {student.vocab_axes} and {teacher.vocab_axes}).')
  mask_BT = blocks.check_mask(student, hidden_BTD.shape[:2], mask_BT)
  return _divergence(_Pair(student, teacher, kind, beta), hidden_BTD, unembed_VD, lax.stop_gradient(teacher_hidden_BTD), teacher_unembed_VD,
                     lax.stop_gradient(temperature), mask_BT)


def top_logprobs(hidden_BTD: jax.Array, unembed_VD: jax.Array, mask_BT: jax.Array | None = None, *, count: int,
                 temperature: float | jax.Array = 1.0, softcap: float | None = None,
                 chunk: int | None = None) -> tuple[jax.Array, jax.Array]:
  """Return (ids_BTJ, logprobs_BTJ) of the `count` likeliest words under softmax(logits / temperature), likeliest first; no gradient.

  Arguments, masked positions (0 in both) and errors as in `divergence`; ValueError where the vocabulary has fewer words than `count`.
  """
  if not 1 <= count <= unembed_VD.shape[0]:
    raise ValueError(f'count={count} must be at least 1 and at most the {unembed_VD.shape[0]} words of the vocabulary.')
  plan, unembed_VD = blocks.make_plan(hidden_BTD, unembed_VD, None, softcap, chunk, False)
  mask_BT = blocks.check_mask(plan, hidden_BTD.shape[:2], mask_BT)

  def device(hidden_BTD, unembed_VD, mask_BT, temperature):
    whole_VD = blocks.whole_head(plan, unembed_VD, hidden_BTD.dtype)
    chunks = blocks.chunks_of(plan, mask_BT)
    _, found = chunks.map(lambda _, arrays: (None, _top(plan, arrays[0], whole_VD, temperature, count)), None, (chunks.take(hidden_BTD),))
    return tuple(map(chunks.put, found))

  per_word = P(*plan.tokens, None)
  run = jax.shard_map(device, in_specs=(per_word, plan.unembed, plan.tokens, P()), out_specs=(per_word, per_word), check_vma=False)
  return run(lax.stop_gradient(hidden_BTD), unembed_VD, mask_BT, _as_temperature(temperature))


def logprobs_at(hidden_BTD: jax.Array, unembed_VD: jax.Array, ids_BTJ: jax.Array, mask_BT: jax.Array | None = None, *,
                temperature: float | jax.Array = 1.0, softcap: float | None = None, chunk: int | None = None,
                unembed_grad: bool = True) -> tuple[jax.Array, jax.Array]:
  """Return (logprobs_BTJ, likeliest_BT): of several words at each place, and the likeliest of all, under softmax(logits / temperature).

  The logprobs are float32 nats, and differentiable in hidden and unembed.

  Arguments, masked positions and errors as in `divergence` and `heads.token_logprobs`.
  """
  if ids_BTJ.ndim != 3 or ids_BTJ.shape[:2] != hidden_BTD.shape[:2]:
    raise ValueError(f'ids_BTJ{ids_BTJ.shape} must be [B, T, J] with the first two axes of hidden_BTD{hidden_BTD.shape}.')
  if not jnp.issubdtype(ids_BTJ.dtype, jnp.integer):
    raise TypeError(f'ids_BTJ must be of integer dtype, got {ids_BTJ.dtype}.')
  plan, unembed_VD = blocks.make_plan(hidden_BTD, unembed_VD, None, softcap, chunk, unembed_grad)
  # The words' rows of the head are fetched for a whole chunk.
  fits = max(1, blocks.KEPT_BYTES // (4 * ids_BTJ.shape[2] * unembed_VD.shape[1]))
  plan = replace(plan, chunk=min(plan.chunk, fits))
  return _logprobs_at(plan, hidden_BTD, unembed_VD, jax.reshard(ids_BTJ, P(*plan.tokens, None)),
                      blocks.check_mask(plan, hidden_BTD.shape[:2], mask_BT), lax.stop_gradient(_as_temperature(temperature)))


def _as_temperature(temperature: float | jax.Array) -> jax.Array:
  if isinstance(temperature, (int, float)) and not temperature > 0:
    raise ValueError(f'temperature={temperature} must be positive.')
  return jnp.asarray(temperature, jnp.float32)


# The divergence over the whole vocabulary.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(pair, hidden_BTD, unembed_VD, teacher_hidden_BTD, teacher_unembed_VD, temperature, mask_BT):
  arguments = (hidden_BTD, unembed_VD, teacher_hidden_BTD, teacher_unembed_VD, temperature, mask_BT)
  return _divergence_forward(pair, *arguments)[0]


def _divergence_forward(pair, *arguments):
  def device(hidden_BTD, unembed_VD, teacher_hidden_BTD, teacher_unembed_VD, temperature, mask_BT):
    heads = (blocks.whole_head(pair.student, unembed_VD, hidden_BTD.dtype),
             blocks.whole_head(pair.teacher, teacher_unembed_VD, teacher_hidden_BTD.dtype))
    chunks = blocks.chunks_of(pair.student, mask_BT)
    _, found = chunks.map(lambda _, hidden: (None, _compare(pair, hidden, heads, temperature)), None,
                          (chunks.take(hidden_BTD), chunks.take(teacher_hidden_BTD)))
    return tuple(map(chunks.put, found))

  divergence_BT, agrees_BT, *normalizers = _on_mesh(pair, device, num_per_token=1, returned=(pair.student.tokens,) * 5)(*arguments)
  return (divergence_BT, agrees_BT), (*arguments, *normalizers)


def _on_mesh(pair: _Pair, device: Callable, *, num_per_token: int, returned: tuple) -> Callable:
  """Run `device(hidden, head, teacher's hidden, teacher's head, temperature, *per_token)` on each device's part."""
  tokens, student, teacher = pair.student.tokens, pair.student.unembed, pair.teacher.unembed
  return jax.shard_map(device, in_specs=(P(*tokens, None), student, P(*tokens, None), teacher, P()) + (tokens,) * num_per_token,
                       out_specs=returned, check_vma=False)


def _both(pair: _Pair, hidden: tuple, both_VD: tuple, temperature) -> tuple[jax.Array, jax.Array, jax.Array | float]:
  """Return a block's logits_VT of student and teacher over the temperature, and the derivative of the student's in its raw ones."""
  (student_TD, teacher_TD), (student_VD, teacher_VD) = hidden, both_VD
  logits_VT, slope_VT = blocks.logits(pair.student, student_VD, student_TD)
  teacher_VT, _ = blocks.logits(pair.teacher, teacher_VD, teacher_TD)
  return logits_VT / temperature, teacher_VT / temperature, slope_VT / temperature


def _rows_of_both(hidden: tuple, heads: tuple, start, size: int) -> tuple[jax.Array, ...]:
  return tuple(blocks.rows(head_VD, start, size, hidden_TD.dtype) for head_VD, hidden_TD in zip(heads, hidden, strict=True))


def _compare(pair: _Pair, hidden: tuple, heads: tuple, temperature) -> tuple[jax.Array, ...]:
  """Return of a chunk (divergence_T, agrees_T, the student's and the teacher's log-normalizers, <q, dD/dq>_T)."""
  plan, num, vocab = pair.student, hidden[0].shape[0], heads[0].shape[0]

  def body(walks, block, start, size):
    del block
    logits = _both(pair, hidden, _rows_of_both(hidden, heads, start, size), temperature)[:2]
    new = tuple(_step(walk, own_VT, start) for walk, own_VT in zip(walks, logits, strict=True))
    if pair.kind != 'jensen_shannon':
      # Of the KL divergence's first argument: the sum of exp(z) (z - z'), relative to its own maximum.
      first = 1 if pair.kind == 'forward' else 0
      excess_VT = logits[first] - logits[1 - first]
      moment_T = (walks[first]['moment_T'] * jnp.exp(walks[first]['top_T'] - new[first]['top_T'])
                  + (jnp.exp(logits[first] - new[first]['top_T'][None]) * excess_VT).sum(0))
      new[first]['moment_T'] = moment_T
    return new

  walks = blocks.over_blocks(vocab, body, (_start(num), _start(num)))
  lse_T, teacher_lse_T = (blocks.logsumexp(plan, walk) for walk in walks)
  agrees_T = (_likeliest(plan, walks[0], vocab) == _likeliest(plan, walks[1], vocab)).astype(jnp.float32)
  if pair.kind == 'jensen_shannon':
    found = _mixture_sums(pair, hidden, heads, lse_T, teacher_lse_T, temperature)
  else:
    own_T, other_T, walk = (teacher_lse_T, lse_T, walks[1]) if pair.kind == 'forward' else (lse_T, teacher_lse_T, walks[0])
    moment_T = blocks.over_vocab(plan, lax.psum, walk['moment_T'] * jnp.exp(walk['top_T'] - own_T))
    # Rounding may leave less than nothing where the two are equal.
    found = (jnp.maximum(moment_T - own_T + other_T, 0),) * 2
  return found[0], agrees_T, lse_T, teacher_lse_T, found[1]


def _start(num: int) -> dict:
  zeros_T = jnp.zeros((num,), jnp.float32)
  return {'top_T': jnp.full((num,), jnp.finfo(jnp.float32).min), 'total_T': zeros_T, 'moment_T': zeros_T,
          'likeliest_T': jnp.zeros((num,), jnp.int32)}


def _step(walk: dict, logits_VT, start) -> dict:
  """Take a block into the walk of one head; `moment_T` is left to whoever needs it."""
  highest_T = logits_VT.max(0)
  top_T = jnp.maximum(walk['top_T'], highest_T)
  total_T = walk['total_T'] * jnp.exp(walk['top_T'] - top_T) + jnp.exp(logits_VT - top_T[None]).sum(0)
  likeliest_T = jnp.where(highest_T > walk['top_T'], start + logits_VT.argmax(0).astype(jnp.int32), walk['likeliest_T'])
  return walk | {'top_T': top_T, 'total_T': total_T, 'likeliest_T': likeliest_T}


def _likeliest(plan: blocks.Plan, walk: dict, vocab: int) -> jax.Array:
  """Return the id of each token's likeliest word; of several the first."""
  top_T = blocks.over_vocab(plan, lax.pmax, walk['top_T'])
  ids_T = walk['likeliest_T'] + _first_word(plan, vocab)
  return blocks.over_vocab(plan, lax.pmin, jnp.where(walk['top_T'] == top_T, ids_T, jnp.iinfo(jnp.int32).max))


def _first_word(plan: blocks.Plan, vocab: int):
  return lax.axis_index(plan.vocab_axes) * vocab if plan.vocab_axes else 0


def _log_mixture(pair: _Pair, logp_VT, logq_VT) -> jax.Array:
  return jnp.logaddexp(math.log(pair.beta) + logp_VT, math.log1p(-pair.beta) + logq_VT)


def _mixture_sums(pair: _Pair, hidden, heads, lse_T, teacher_lse_T, temperature) -> tuple[jax.Array, jax.Array]:
  """Return the Jensen-Shannon divergence of each token, and KL(q | m)."""
  def body(carry, block, start, size):
    del block
    logits_VT, teacher_VT, _ = _both(pair, hidden, _rows_of_both(hidden, heads, start, size), temperature)
    logq_VT, logp_VT = logits_VT - lse_T[None], teacher_VT - teacher_lse_T[None]
    logm_VT = _log_mixture(pair, logp_VT, logq_VT)
    return (carry[0] + (jnp.exp(logp_VT) * (logp_VT - logm_VT)).sum(0), carry[1] + (jnp.exp(logq_VT) * (logq_VT - logm_VT)).sum(0))

  zeros_T = jnp.zeros(lse_T.shape, jnp.float32)
  sums = blocks.over_blocks(heads[0].shape[0], body, (zeros_T, zeros_T))
  of_teacher_T, of_student_T = (blocks.over_vocab(pair.student, lax.psum, sum_T) for sum_T in sums)
  return jnp.maximum(pair.beta * of_teacher_T + (1 - pair.beta) * of_student_T, 0), of_student_T


def _pull(pair: _Pair, logq_VT, logp_VT, mean_T) -> jax.Array:
  """Return the derivative of the divergence in the student's logits over the temperature."""
  if pair.kind == 'forward':
    return jnp.exp(logq_VT) - jnp.exp(logp_VT)
  if pair.kind == 'reverse':
    return jnp.exp(logq_VT) * (logq_VT - logp_VT - mean_T[None])
  return (1 - pair.beta) * jnp.exp(logq_VT) * (logq_VT - _log_mixture(pair, logp_VT, logq_VT) - mean_T[None])


def _divergence_backward(pair, saved, cotangents):
  plan = pair.student
  hidden_BTD, unembed_VD, teacher_hidden_BTD, teacher_unembed_VD, temperature, mask_BT, *per_token = saved

  def device(hidden_BTD, unembed_VD, teacher_hidden_BTD, teacher_unembed_VD, temperature, mask_BT, *per_token):
    heads = (blocks.whole_head(plan, unembed_VD, hidden_BTD.dtype),
             blocks.whole_head(pair.teacher, teacher_unembed_VD, teacher_hidden_BTD.dtype))

    def dlogits(arrays, block_VD, start, size):
      student_TD, teacher_TD, lse_T, teacher_lse_T, mean_T, gradient_T = arrays
      both_VD = (block_VD, blocks.rows(heads[1], start, size, teacher_TD.dtype))
      logits_VT, teacher_VT, slope_VT = _both(pair, (student_TD, teacher_TD), both_VD, temperature)
      return gradient_T[None] * _pull(pair, logits_VT - lse_T[None], teacher_VT - teacher_lse_T[None], mean_T) * slope_VT

    alive_BT = mask_BT & (per_token[-1] != 0)
    return blocks.gradients(plan, heads[0], alive_BT, (hidden_BTD, teacher_hidden_BTD, *per_token), dlogits, unembed_VD.dtype)

  grads = (P(*plan.tokens, None), plan.unembed if plan.unembed_grad else None)
  run = _on_mesh(pair, device, num_per_token=2 + len(per_token), returned=grads)
  found = run(hidden_BTD, unembed_VD, teacher_hidden_BTD, teacher_unembed_VD, temperature, mask_BT, *per_token, cotangents[0])
  return (*found, None, None, None, None)


_divergence.defvjp(_divergence_forward, _divergence_backward)


# Some words.


def _top(plan: blocks.Plan, hidden_TD, whole_VD, temperature, count: int) -> tuple[jax.Array, jax.Array]:
  """Return of a chunk the likeliest words' (ids_TJ, logprobs_TJ)."""
  num, vocab = hidden_TD.shape[0], whole_VD.shape[0]

  def merge(logits_TV, ids_TV):
    logits_TJ, places_TJ = lax.top_k(logits_TV, count)
    return logits_TJ, jnp.take_along_axis(ids_TV, places_TJ, 1)

  def body(carry, block, start, size):
    del block
    walk, logits_TJ, ids_TJ = carry
    logits_VT = blocks.logits(plan, blocks.rows(whole_VD, start, size, hidden_TD.dtype), hidden_TD)[0] / temperature
    words_TV = jnp.broadcast_to((start + jnp.arange(size, dtype=jnp.int32))[None], (num, size))
    found = merge(jnp.concatenate([logits_TJ, logits_VT.T], 1), jnp.concatenate([ids_TJ, words_TV], 1))
    return _step(walk, logits_VT, start), *found

  lowest_TJ = jnp.full((num, count), jnp.finfo(jnp.float32).min)
  walk, logits_TJ, ids_TJ = blocks.over_blocks(vocab, body, (_start(num), lowest_TJ, jnp.zeros((num, count), jnp.int32)))
  if plan.vocab_axes:
    ids_TJ = ids_TJ + _first_word(plan, vocab)
    logits_TJ, ids_TJ = merge(*(lax.all_gather(x, plan.vocab_axes, axis=1, tiled=True) for x in (logits_TJ, ids_TJ)))
  return ids_TJ, logits_TJ - blocks.logsumexp(plan, walk)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs_at(plan, hidden_BTD, unembed_VD, ids_BTJ, mask_BT, temperature):
  return _logprobs_at_forward(plan, hidden_BTD, unembed_VD, ids_BTJ, mask_BT, temperature)[0]


def _logprobs_at_forward(plan, *arguments):
  def device(hidden_BTD, unembed_VD, ids_BTJ, mask_BT, temperature):
    dtype = hidden_BTD.dtype
    whole_VD = blocks.whole_head(plan, unembed_VD, dtype)

    def chunk(_, arrays):
      hidden_TD, ids_TJ = arrays

      def body(walk, block, start, size):
        del block
        return _step(walk, blocks.logits(plan, blocks.rows(whole_VD, start, size, dtype), hidden_TD)[0] / temperature, start)

      walk = blocks.over_blocks(whole_VD.shape[0], body, _start(hidden_TD.shape[0]))
      lse_T = blocks.logsumexp(plan, walk)
      raw_TJ = jnp.einsum('TD,TJD->TJ', hidden_TD, blocks.rows_of(whole_VD, ids_TJ, dtype), preferred_element_type=jnp.float32)
      logits_TJ = capped(blocks.over_vocab(plan, lax.psum, raw_TJ), plan.softcap)
      return None, (logits_TJ / temperature - lse_T[:, None], _likeliest(plan, walk, whole_VD.shape[0]), lse_T)

    chunks = blocks.chunks_of(plan, mask_BT)
    _, found = chunks.map(chunk, None, (chunks.take(hidden_BTD), chunks.take(blocks.local_ids(plan, ids_BTJ, whole_VD))))
    return tuple(map(chunks.put, found))

  per_word = P(*plan.tokens, None)
  run = jax.shard_map(device, in_specs=(per_word, plan.unembed, per_word, plan.tokens, P()), out_specs=(per_word, plan.tokens, plan.tokens),
                      check_vma=False)
  logprobs_BTJ, likeliest_BT, lse_BT = run(*arguments)
  return (logprobs_BTJ, likeliest_BT), (*arguments, logprobs_BTJ, lse_BT)


def _logprobs_at_backward(plan, saved, cotangents):
  """With p = softmax(z): dz = sum of g at the words - p sum_J g, the first of which is not dense."""
  def device(hidden_BTD, unembed_VD, ids_BTJ, mask_BT, temperature, logprobs_BTJ, lse_BT, gradient_BTJ):
    dtype = hidden_BTD.dtype
    whole_VD = blocks.whole_head(plan, unembed_VD, dtype)

    def dlogits(arrays, block_VD, start, size):
      del start, size
      hidden_TD, _, _, lse_T, gradient_TJ = arrays
      logits_VT, slope_VT = blocks.logits(plan, block_VD, hidden_TD)
      return -jnp.exp(logits_VT / temperature - lse_T[None]) * gradient_TJ.sum(1)[None] * (slope_VT / temperature)

    def add(arrays, dhidden_TD, dunembed_VD):
      hidden_TD, ids_TJ, logprobs_TJ, lse_T, gradient_TJ = arrays
      slope_TJ = 1.0 if plan.softcap is None else 1 - ((logprobs_TJ + lse_T[:, None]) * temperature / plan.softcap)**2
      pull_TJ = gradient_TJ * slope_TJ / temperature
      rows_TJD = blocks.rows_of(whole_VD, ids_TJ, dtype)
      dhidden_TD = dhidden_TD + jnp.einsum('TJ,TJD->TD', pull_TJ, rows_TJD.astype(jnp.float32))
      if plan.unembed_grad:
        # A negative index would count from the end, so a word of another device is sent past it and dropped.
        index_TJ = jnp.where(ids_TJ < 0, whole_VD.shape[0], ids_TJ)
        dunembed_VD = dunembed_VD.at[index_TJ].add(pull_TJ[..., None] * hidden_TD.astype(jnp.float32)[:, None], mode='drop')
      return dhidden_TD, dunembed_VD

    per_token = (hidden_BTD, blocks.local_ids(plan, ids_BTJ, whole_VD), logprobs_BTJ, lse_BT, gradient_BTJ)
    return blocks.gradients(plan, whole_VD, mask_BT & jnp.any(gradient_BTJ != 0, -1), per_token, dlogits, unembed_VD.dtype, add)

  per_word = P(*plan.tokens, None)
  run = jax.shard_map(device, in_specs=(per_word, plan.unembed, per_word, plan.tokens, P(), per_word, plan.tokens, per_word),
                      out_specs=(per_word, plan.unembed if plan.unembed_grad else None), check_vma=False)
  return (*run(*saved, cotangents[0]), None, None, None)


_logprobs_at.defvjp(_logprobs_at_forward, _logprobs_at_backward)
