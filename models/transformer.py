"""The decoder-only transformer: its declaration, one block, and the forward pass that training, prefill and decode share.

The caller passes `attend`; with a cache it is a decoding step, without one a training pass. Layers are stacked and scanned over the repeating
pattern of local and global layers, so that a window is static where it is used.

Measured on CPU (Gemma-3-270M, 8 x 256 tokens, bfloat16): unrolled without rematerialization is fastest (11.6 CPU-s and 6.7 GB for a full
step); scanned with remat='full' is smallest (13.7 CPU-s, 6.0 GB). The other two pairs lose on both: XLA shares an unrolled recomputation with
the forward pass, so it saves nothing, and a scan that keeps 16-bit arrays of every layer holds them in float32 as well (10 GB).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh

from models import attention, layers, rope, sharding
from models import params as params_lib
from models.config import ModelConfig
from models.params import ParamSpec
from models.sharding import Layout

# Intermediates that `layout.remat` may name to be kept instead of recomputed; attention is computed once where both of its names are kept.
CHECKPOINT_NAMES = ('query', 'key', 'value', 'attention', 'attention_lse', 'gate', 'up')
_HOST_MEMORY = 'pinned_host'


def declare(config: ModelConfig) -> dict:
  """Return the tree of ParamSpecs of a model."""
  depth, embed, heads, kv_heads, width = (config.num_layers, config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim)
  norm_init = 'zeros' if config.norm_offset else 'ones'

  def norm(size=embed):
    return ParamSpec((depth, size), (None, None), norm_init)

  attend = {
      'norm': norm(),
      'q': ParamSpec((depth, embed, heads, width), (None, 'embed', 'heads', None), 'normal', (1,)),
      'k': ParamSpec((depth, embed, kv_heads, width), (None, 'embed', 'kv_heads', None), 'normal', (1,)),
      'v': ParamSpec((depth, embed, kv_heads, width), (None, 'embed', 'kv_heads', None), 'normal', (1,)),
      'o': ParamSpec((depth, heads, width, embed), (None, 'heads', None, 'embed'), 'normal', (1, 2)),
  }
  if config.qkv_bias:
    attend |= {
        'q_bias': ParamSpec((depth, heads, width), (None, 'heads', None), 'zeros'),
        'k_bias': ParamSpec((depth, kv_heads, width), (None, 'kv_heads', None), 'zeros'),
        'v_bias': ParamSpec((depth, kv_heads, width), (None, 'kv_heads', None), 'zeros'),
    }
  if config.qk_norm:
    attend |= {'q_norm': norm(width), 'k_norm': norm(width)}
  if config.attention_sinks:
    attend |= {'sinks': ParamSpec((depth, heads), (None, 'heads'), 'zeros')}
  mlp = {
      'norm': norm(),
      'gate': ParamSpec((depth, embed, config.mlp_dim), (None, 'embed', 'mlp'), 'normal', (1,)),
      'up': ParamSpec((depth, embed, config.mlp_dim), (None, 'embed', 'mlp'), 'normal', (1,)),
      'down': ParamSpec((depth, config.mlp_dim, embed), (None, 'mlp', 'embed'), 'normal', (1,)),
  }
  if config.post_norms:
    attend |= {'post_norm': norm()}
    mlp |= {'post_norm': norm()}
  tree = {
      'embedding': ParamSpec((config.vocab_size, embed), ('vocab', 'embed'), 'normal', (1,)),
      'blocks': {'attention': attend, 'mlp': mlp},
      'norm': ParamSpec((embed,), (None,), norm_init),
  }
  if not config.tied_embeddings:
    tree['head'] = ParamSpec((config.vocab_size, embed), ('vocab', 'embed'), 'normal', (1,))
  return tree


def unembedding(params, config: ModelConfig) -> jax.Array:
  """Return the output head [V, D]."""
  return params['embedding'] if config.tied_embeddings else params['head']


def check(config: ModelConfig, layout: Layout, mesh: Mesh | None = None) -> None:
  """Raise ValueError if the layout asks for something a forward pass of this model cannot do, on this mesh if one is given."""
  kept = _kept_names(layout)
  unknown = set(kept) - set(CHECKPOINT_NAMES)
  if unknown:
    raise ValueError(f"layout.remat={layout.remat!r} names unknown intermediates {sorted(unknown)}; use 'none', 'full', 'offload' or some of "
                     f"{CHECKPOINT_NAMES} separated by commas ('offload' may be one of them).")
  if layout.mlp_chunk is not None and {'gate', 'up'} & set(kept):
    raise ValueError(f'layout.remat={layout.remat!r} keeps the wide intermediates of the MLP, and layout.mlp_chunk={layout.mlp_chunk} is there '
                     'so that they never exist; leave out gate and up, or set mlp_chunk to None.')
  memories = sorted(memory.kind for memory in jax.local_devices()[0].addressable_memories())
  if _offloads(layout) and _HOST_MEMORY not in memories:
    raise ValueError(f'layout.remat={layout.remat!r} keeps the inputs of the layers in {_HOST_MEMORY} memory, and {jax.default_backend()} here '
                     f"has only {', '.join(memories)}; use 'full'.")
  attention.check(layout, config, jax.default_backend(), mesh)


def _offloads(layout: Layout) -> bool:
  return 'offload' in _remat_words(layout)


def _kept_names(layout: Layout) -> list[str]:
  return [word for word in _remat_words(layout) if word != 'offload']


def _remat_words(layout: Layout) -> list[str]:
  return [] if layout.remat in ('none', 'full') else [word.strip() for word in layout.remat.split(',')]


def _project(x_BTD, params, name, layout: Layout, heads_axis: str):
  y = sharding.einsum('BTD,DNH->BTNH', x_BTD, params[name], layout, 'batch', 'length', heads_axis, None)
  bias = params.get(f'{name}_bias')
  return y if bias is None else y + bias.astype(y.dtype)[None, None]


def block(x_BTD: jax.Array, params, cache, kind: str, angles, attend: Callable, config: ModelConfig, layout: Layout):
  """Apply one layer; returns (x_BTD, cache).

  Args:
    params: this layer's `attention` and `mlp` trees, unstacked.
    cache: passed through `attend`; None in training.
    kind: 'global' or 'local'.
    angles: (sin, cos) of the layer's RoPE.
  """
  own = params['attention']
  normed = layers.rms_norm(x_BTD, own['norm'], config)
  q_BTNH = _project(normed, own, 'q', layout, 'act_heads')
  k_BTKH = _project(normed, own, 'k', layout, 'kv_heads')
  v_BTKH = _project(normed, own, 'v', layout, 'kv_heads')
  if config.qk_norm:
    q_BTNH = layers.rms_norm(q_BTNH, own['q_norm'], config)
    k_BTKH = layers.rms_norm(k_BTKH, own['k_norm'], config)
  q_BTNH = checkpoint_name(rope.rotate(q_BTNH, *angles), 'query')
  k_BTKH = checkpoint_name(rope.rotate(k_BTKH, *angles), 'key')
  sinks_N = own['sinks'].astype(jnp.float32) if config.attention_sinks else None
  out_BTNH, cache = attend(q_BTNH, k_BTKH, checkpoint_name(v_BTKH, 'value'), kind, cache, sinks_N)
  out_BTD = sharding.einsum('BTNH,NHD->BTD', out_BTNH, own['o'], layout, 'batch', 'length', None)
  if config.post_norms:
    out_BTD = layers.rms_norm(out_BTD, own['post_norm'], config)
  x_BTD = x_BTD + out_BTD
  own = params['mlp']
  out_BTD = layers.mlp(layers.rms_norm(x_BTD, own['norm'], config), own, config, layout)
  if config.post_norms:
    out_BTD = layers.rms_norm(out_BTD, own['post_norm'], config)
  return x_BTD + out_BTD, cache


def _remat(function: Callable, layout: Layout) -> Callable:
  """Let backward compute a block again from its input, which stays on the device or in the host's memory, and from what is kept."""
  if layout.remat == 'none':
    return function
  if not _offloads(layout):
    return jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(*_kept_names(layout)))
  policy = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=_kept_names(layout), names_which_can_be_offloaded=['block_input'], offload_src='device',
      offload_dst=_HOST_MEMORY)
  return jax.checkpoint(lambda x_BTD, *rest: function(checkpoint_name(x_BTD, 'block_input'), *rest), policy=policy)


def forward(params, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None, config: ModelConfig, layout: Layout,
            attend: Callable | None = None, cache=None):
  """Return (hidden_BTD after the final norm, cache).

  Args:
    params: the tree of `declare`; `blocks` stacked, or a tuple of one tree per layer (decoding holds them so).
    segment_ids_BT: documents of a packed row from 1, 0 is padding; may be None when `attend` is given.
    attend: (q, k, v, kind, cache, sinks or None) -> (out, cache); None attends within the rows.
    cache: a tuple with one entry per layer, for a decoding `attend`.
  """
  tokens_BT, positions_BT = (sharding.constrain(x, layout, 'batch', 'length') for x in (tokens_BT, positions_BT))
  if attend is None:
    segment_ids_BT = sharding.constrain(segment_ids_BT, layout, 'batch', 'length')
    attend = attention.resolve(layout, config, positions_BT, segment_ids_BT)
  pattern = config.layer_pattern
  tables = {kind: rope.angles(positions_BT, config.layer_rope(kind), config.head_dim) for kind in dict.fromkeys(pattern)}
  x_BTD = layers.embed(tokens_BT, params['embedding'], config, layout)
  blocks = params['blocks']

  def run(kind):
    return _remat(lambda x, own, own_cache, angles: block(x, own, own_cache, kind, angles, attend, config, layout), layout)

  if isinstance(blocks, tuple):
    caches = []
    for layer, own in enumerate(blocks):
      kind = config.layer_kind(layer)
      x_BTD, own_cache = run(kind)(x_BTD, own, None if cache is None else cache[layer], tables[kind])
      caches.append(own_cache)
    cache = None if cache is None else tuple(caches)
  else:
    x_BTD = _stacked(x_BTD, blocks, run, tables, config, layout)
  return layers.rms_norm(x_BTD, params['norm'], config), cache


def _stacked(x_BTD, blocks, run, tables, config: ModelConfig, layout: Layout):
  """Run the stacked layers: whole repeats of the pattern under one scan, what is left over after it."""
  pattern = config.layer_pattern

  def repeat(x, stacked, kinds):
    for kind, own in zip(kinds, params_lib.unstack(stacked), strict=True):
      x, _ = run(kind)(x, own, None, tables[kind])
    return x

  repeats = config.num_layers // len(pattern) if layout.scan else 0
  done = repeats * len(pattern)
  if repeats:
    grouped = jax.tree.map(lambda leaf: leaf[:done].reshape(repeats, len(pattern), *leaf.shape[1:]), blocks)
    x_BTD, _ = jax.lax.scan(lambda x, own: (repeat(x, own, pattern), None), x_BTD, grouped)
  rest = jax.tree.map(lambda leaf: leaf[done:], blocks)
  return repeat(x_BTD, rest, [config.layer_kind(layer) for layer in range(done, config.num_layers)])


def logits(params, hidden_BTD: jax.Array, config: ModelConfig, layout: Layout) -> jax.Array:
  """Return float32 logits_BTV, whole over the vocabulary; for a few positions only (losses use `heads`)."""
  weight_VD = sharding.gathered(unembedding(params, config).astype(hidden_BTD.dtype))
  length = None if hidden_BTD.shape[1] == 1 else 'length'
  # The logits are gathered over the vocabulary and not the head, which is larger by far.
  logits_BTV = jnp.einsum('BTD,VD->BTV', hidden_BTD, weight_VD, preferred_element_type=jnp.float32,
                          out_sharding=layout.spec('batch', length, 'act_vocab'))
  return sharding.constrain(layers.softcap(logits_BTV, config.final_softcap), layout, 'batch', length, None)


def num_flops_per_token(config: ModelConfig, length: int, trainable_fraction: float = 1.0) -> float:
  """Return the matmul FLOPs of a training step per token: 2 forward, 2 for activations' gradients, 2 for weights', per weight.

  Args:
    length: average tokens a query attends over counts as length / 2 (causal), less under a window.
    trainable_fraction: share of the matmul weights whose gradient is computed (about 0 for LoRA).
  """
  weights, scores = _matmuls(config, length)
  return weights * (4 + 2 * trainable_fraction) + 3 * scores


def num_forward_flops_per_token(config: ModelConfig, length: int) -> float:
  """Return the matmul FLOPs per token of a forward pass alone, such as a teacher's; `length` as in `num_flops_per_token`."""
  weights, scores = _matmuls(config, length)
  return 2 * weights + scores


def _matmuls(config: ModelConfig, length: int) -> tuple[int, float]:
  """Return the weights that a token is multiplied by, and the FLOPs of its scores and of the sum over values."""
  weights = params_lib.count(declare(config)) - (0 if config.tied_embeddings else config.vocab_size * config.embed_dim)
  spans = sum(min(length / 2, config.layer_window(config.layer_kind(layer)) or length) for layer in range(config.num_layers))
  return weights, 2 * 2 * spans * config.num_heads * config.head_dim
