"""The layers around attention: norm, gated MLP, embedding, soft cap.

The MLP is several times wider than the residual stream. With `layout.mlp_chunk` each device takes its tokens a chunk at a time (Blockwise
Parallel Transformer, arXiv:2305.19370), forward and backward, so that memory is linear in its tokens with the stream's width. Weights are
gathered once and their gradients reduced once, in float32, however many chunks there are.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models import sharding
from models.config import ModelConfig
from models.quantize import QuantArray, dequantize
from models.sharding import Layout, LoraArray

_ACTIVATIONS = {
    'silu': jax.nn.silu,
    'gelu': functools.partial(jax.nn.gelu, approximate=False),
    'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


def rms_norm(x: jax.Array, scale: jax.Array, config: ModelConfig) -> jax.Array:
  """Normalize the last axis by its root mean square (arXiv:1910.07467 eq. 4); statistics in float32, result in x's dtype."""
  x_float = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(x_float * x_float, axis=-1, keepdims=True) + config.norm_eps)
  gain = scale.astype(jnp.float32) + config.norm_offset
  return (x_float * inverse * jnp.expand_dims(gain, range(x.ndim - 1))).astype(x.dtype)


def mlp(x_BTD: jax.Array, params, config: ModelConfig, layout: Layout) -> jax.Array:
  """Apply the gated MLP: (activation(x gate) * (x up)) down (arXiv:2002.05202 eq. 6)."""
  if layout.mlp_chunk is not None and _num_local_tokens(x_BTD) > layout.mlp_chunk:
    weights = {name: _without_base_gradient(params[name]) for name in ('gate', 'up', 'down')}
    return _mlp_in_chunks(_MlpPlan.of(x_BTD, weights, config, layout), x_BTD.astype(layout.dtype), weights)
  hidden = ('batch', 'length', 'act_mlp')
  gate_BTF = checkpoint_name(sharding.einsum('BTD,DF->BTF', x_BTD, params['gate'], layout, *hidden), 'gate')
  up_BTF = checkpoint_name(sharding.einsum('BTD,DF->BTF', x_BTD, params['up'], layout, *hidden), 'up')
  inner_BTF = _gate(config.activation, gate_BTF, up_BTF)
  return sharding.einsum('BTF,FD->BTD', inner_BTF, params['down'], layout, 'batch', 'length', None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gate(activation: str, gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
  """Return activation(gate) * up, computed in float32, in the operands' dtype.

  Backward recomputes the activation from the two operands. Left to JAX, it would keep the float32 pieces of its derivative: four arrays of
  the MLP's width for each layer, a gigabyte for 2048 tokens of an 18-layer model. The barrier keeps XLA from saving the operands as the
  float32 they were rounded from.
  """
  return _gate_float32(activation, gate_BTF, up_BTF).astype(gate_BTF.dtype)


def _gate_float32(activation, gate_BTF, up_BTF):
  return _ACTIVATIONS[activation](gate_BTF.astype(jnp.float32)) * up_BTF.astype(jnp.float32)


def _gate_forward(activation, gate_BTF, up_BTF):
  saved = jax.lax.optimization_barrier((gate_BTF, up_BTF))
  return _gate(activation, *saved), saved


def _gate_backward(activation, saved, gradient):
  # The barrier ties the recomputation to the gradient, so that it is not shared with forward's.
  *saved, gradient = jax.lax.optimization_barrier((*saved, gradient))
  _, transpose = jax.vjp(functools.partial(_gate_float32, activation), *saved)
  return transpose(gradient.astype(jnp.float32))


_gate.defvjp(_gate_forward, _gate_backward)


# The MLP over chunks of a device's tokens. What follows runs inside `shard_map`, on one device's part.


class _MlpPlan(NamedTuple):
  """The static part of a call.

  Attributes:
    activation, chunk: the model's and the layout's.
    tokens: partition of x_BTD.
    weights: partitions of the weights, a tree like theirs.
    token_axes: mesh axes that split the tokens.
    hidden_axes: mesh axes that split F.
  """
  activation: str
  chunk: int
  tokens: P
  weights: tuple[tuple[str, Any], ...]
  token_axes: tuple[str, ...]
  hidden_axes: tuple[str, ...]

  @classmethod
  def of(cls, x_BTD, weights, config: ModelConfig, layout: Layout) -> _MlpPlan:
    tokens = jax.typeof(x_BTD).sharding.spec
    specs = {name: jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, weight) for name, weight in weights.items()}
    gate = specs['gate'].base if isinstance(specs['gate'], LoraArray) else specs['gate']
    gate = gate.values if isinstance(gate, QuantArray) else gate
    plan = cls(config.activation, layout.mlp_chunk, tokens, tuple(specs.items()), _axes(*tokens), _axes(gate[1]))
    stored = {axis for spec in jax.tree.leaves(specs) for axis in _axes(*spec)} - set(plan.hidden_axes)
    if _axes(tokens[2]) or stored - set(plan.token_axes):
      raise ValueError(f'layout.mlp_chunk={layout.mlp_chunk} needs tokens that are whole along D and split over the axes that split the '
                       f'weights, got x_BTD {tokens} and weights {specs}; set it to None.')
    return plan


def _axes(*parts) -> tuple[str, ...]:
  """Return the mesh axes of some entries of a partition."""
  return tuple(axis for part in parts if part is not None for axis in (part if isinstance(part, tuple) else (part,)))


def _num_local_tokens(x_BTD) -> int:
  shape = jax.typeof(x_BTD).sharding.shard_shape(x_BTD.shape)
  return math.prod(shape[:2])


def _without_base_gradient(weight):
  return weight.replace(base=lax.stop_gradient(weight.base)) if isinstance(weight, LoraArray) else weight


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp_in_chunks(plan: _MlpPlan, x_BTD: jax.Array, weights) -> jax.Array:
  """Return `mlp` with at most `plan.chunk` tokens of a device at once."""
  def device(x_BTD, weights):
    weights = _gathered(plan, weights, x_BTD.dtype)

    def one(x_TD):
      inner_TF = _gate(plan.activation, *(_apply(x_TD, weights[name]).astype(x_TD.dtype) for name in ('gate', 'up')))
      return _sum_hidden(plan, _apply(inner_TF, weights['down'])).astype(x_TD.dtype)

    return _uncut(lax.map(one, _cut(plan, x_BTD)), x_BTD)

  specs = dict(plan.weights)
  return jax.shard_map(device, in_specs=(plan.tokens, specs), out_specs=plan.tokens)(x_BTD, weights)


def _mlp_forward(plan, x_BTD, weights):
  return _mlp_in_chunks(plan, x_BTD, weights), (x_BTD, weights)


def _mlp_backward(plan, saved, dout_BTD):
  """Compute each chunk again and add up the weights' gradients in float32; they are reduced over the mesh when all is added."""
  x_BTD, weights = saved

  def device(x_BTD, weights, dout_BTD):
    whole = _gathered(plan, weights, x_BTD.dtype)

    def one(total, chunk):
      x_TD, dout_TD = chunk
      dtype = x_TD.dtype
      gate_TF, up_TF = (_apply(x_TD, whole[name]).astype(dtype) for name in ('gate', 'up'))
      inner_TF, gate_pull = jax.vjp(functools.partial(_gate, plan.activation), gate_TF, up_TF)
      dinner_TF, down = _pull(inner_TF, whole['down'], dout_TD)
      dgate_TF, dup_TF = gate_pull(dinner_TF.astype(dtype))
      dx_gate, gate = _pull(x_TD, whole['gate'], dgate_TF)
      dx_up, up = _pull(x_TD, whole['up'], dup_TF)
      grads = {'gate': gate, 'up': up, 'down': down}
      total = {name: jax.tree.map(jnp.add, total[name], grads[name]) for name in total}
      return total, _sum_hidden(plan, dx_gate + dx_up).astype(dtype)

    varying = plan.token_axes + plan.hidden_axes
    zeros = jax.tree.map(lambda leaf: lax.pcast(jnp.zeros(leaf.shape, jnp.float32), varying, to='varying'),
                         {name: _trained(whole)[name] for name in _trained(weights)})
    total, dx = lax.scan(one, zeros, (_cut(plan, x_BTD), _cut(plan, dout_BTD)))
    grads = jax.tree.map(functools.partial(_reduced, plan), total, _trained(dict(plan.weights)))
    return _uncut(dx, x_BTD), jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, _trained(weights))

  specs = dict(plan.weights)
  dx_BTD, grads = jax.shard_map(device, in_specs=(plan.tokens, specs, plan.tokens), out_specs=(plan.tokens, _trained(specs)))(
      x_BTD, weights, dout_BTD)
  return dx_BTD, {name: LoraArray(None, *grads[name], weight.scale) if isinstance(weight, LoraArray) else grads.get(name)
                  for name, weight in weights.items()}


_mlp_in_chunks.defvjp(_mlp_forward, _mlp_backward)


def _cut(plan: _MlpPlan, x_BTD) -> jax.Array:
  """Return [chunks, tokens of a chunk, D], the last padded with zeros."""
  x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
  count = -(-x_TD.shape[0] // plan.chunk)
  size = -(-x_TD.shape[0] // count)
  return jnp.pad(x_TD, ((0, count * size - x_TD.shape[0]), (0, 0))).reshape(count, size, -1)


def _uncut(chunks, like_BTD) -> jax.Array:
  return chunks.reshape(-1, chunks.shape[-1])[:like_BTD.shape[0] * like_BTD.shape[1]].reshape(like_BTD.shape)


def _dot(a, b, contract_a: int, contract_b: int) -> jax.Array:
  return lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)


def _apply(x, weight) -> jax.Array:
  """Return x weight, float32."""
  if not isinstance(weight, LoraArray):
    return _dot(x, weight, 1, 0)
  return _dot(x, weight.base, 1, 0) + _dot(_dot(x, weight.a, 1, 0).astype(x.dtype), weight.b, 1, 0) * weight.scale


def _pull(x, weight, dy) -> tuple[jax.Array, Any]:
  """Return the gradients of x and of what is trained of the weight, float32, from that of x weight."""
  if not isinstance(weight, LoraArray):
    return _dot(dy, weight, 1, 1), _dot(x, dy, 0, 0)
  dlow_TR = (_dot(dy, weight.b, 1, 1) * weight.scale).astype(x.dtype)
  low_TR = _dot(x, weight.a, 1, 0).astype(x.dtype)
  return (_dot(dy, weight.base, 1, 1) + _dot(dlow_TR, weight.a, 1, 1),
          (_dot(x, dlow_TR, 0, 0), _dot(low_TR, dy, 0, 0) * weight.scale))


def _trained(weights) -> dict[str, Any]:
  """Return what has a gradient: a weight, or the two adapters beside a frozen one; nothing of a quantized weight."""
  return {name: (weight.a, weight.b) if isinstance(weight, LoraArray) else weight
          for name, weight in weights.items() if not isinstance(weight, QuantArray)}


def _stored_axes(plan: _MlpPlan, part) -> tuple[str, ...]:
  """Return the axes of an entry of a weight's partition that only say on which of several devices it is stored."""
  return tuple(axis for axis in _axes(part) if axis not in plan.hidden_axes and lax.axis_size(axis) > 1)


def _gathered(plan: _MlpPlan, weights, dtype) -> dict[str, Any]:
  """Return the weights in the compute dtype, whole but for the axes that split F."""
  def gather(weight, spec):
    for dim, part in enumerate(spec):
      if _stored_axes(plan, part):
        weight = lax.all_gather(weight, _stored_axes(plan, part), axis=dim, tiled=True)
    return weight

  def leaf(weight, spec):
    if isinstance(weight, QuantArray):
      return dequantize(jax.tree.map(gather, weight, spec), dtype)
    return gather(weight.astype(dtype), spec)

  return jax.tree.map(leaf, weights, dict(plan.weights), is_leaf=lambda leaf: isinstance(leaf, QuantArray))


def _reduced(plan: _MlpPlan, grad, spec: P) -> jax.Array:
  """Sum a weight's gradient over the devices, each keeping what it stores."""
  for dim, part in enumerate(spec):
    if _stored_axes(plan, part):
      grad = lax.psum_scatter(grad, _stored_axes(plan, part), scatter_dimension=dim, tiled=True)
  rest = tuple(axis for axis in plan.token_axes + plan.hidden_axes if axis not in _axes(*spec))
  return lax.psum(grad, rest) if rest else grad


def _sum_hidden(plan: _MlpPlan, x) -> jax.Array:
  return lax.psum(x, plan.hidden_axes) if plan.hidden_axes else x


def embed(tokens_BT: jax.Array, embedding_VD: jax.Array, config: ModelConfig, layout: Layout) -> jax.Array:
  """Look up token embeddings x_BTD."""
  x_BTD = sharding.take_rows(embedding_VD, tokens_BT, layout.spec('batch', 'length', None)).astype(layout.dtype)
  if config.scale_embeddings:
    # The factor is rounded to the compute dtype first, as the published models were trained.
    x_BTD = x_BTD * jnp.asarray(config.embed_dim**0.5, layout.dtype)
  return x_BTD


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
  """Return cap * tanh(x / cap), or x where there is no cap (arXiv:2408.00118 sec. 2)."""
  return x if cap is None else cap * jnp.tanh(x / cap)
