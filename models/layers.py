"""The layers around attention: norm, gated MLP, embedding, soft cap."""

from __future__ import annotations

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from models import sharding
from models.config import ModelConfig
from models.sharding import Layout

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
