"""What a decoder-only transformer computes, as frozen records that check themselves.

`ModelConfig` covers Llama 3, Qwen 2/2.5/3, Mistral and Gemma 2/3 by its fields; there is no code path per family. How the same function is
laid out on devices is `sharding.Layout`'s business, and reading `config.json` or GGUF metadata is `presets`'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ROPE_SCALINGS = ('none', 'linear', 'ntk', 'yarn', 'llama3')
ACTIVATIONS = ('silu', 'gelu_tanh', 'gelu')


@dataclass(frozen=True)
class RopeConfig:
  """Rotary position embedding and its extension to longer contexts (see `rope.inverse_frequencies`).

  Attributes:
    theta: base of the geometric series of wavelengths.
    scaling: how frequencies change for contexts longer than the trained one. 'ntk' is the static rule: dynamic NTK moves with the current
      length and so contradicts keys already cached; `presets` fixes it at one context length.
    factor: context extension factor; 1 means none.
    original_length: context length the model was trained at, in tokens; needed by yarn and llama3.
    low_freq_factor, high_freq_factor: llama3's band edges, in rotations over the original context.
    beta_fast, beta_slow: yarn's band edges, in rotations over the original context.
    attention_factor: multiplies cos and sin; None derives yarn's 0.1 ln(factor) + 1.
    mscale, mscale_all_dim: yarn's attention scale as some checkpoints give it; 0 means absent.
    truncate: yarn rounds its band edges to whole dimensions.
  """
  theta: float = 10_000.0
  scaling: Literal['none', 'linear', 'ntk', 'yarn', 'llama3'] = 'none'
  factor: float = 1.0
  original_length: int | None = None
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  mscale: float = 0.0
  mscale_all_dim: float = 0.0
  truncate: bool = True

  def __post_init__(self):
    if self.scaling not in ROPE_SCALINGS:
      raise ValueError(f'rope.scaling={self.scaling!r} is unknown; use one of {ROPE_SCALINGS}.')
    if self.theta <= 0 or self.factor < 1:
      raise ValueError(f'rope.theta={self.theta} must be positive and rope.factor={self.factor} at least 1.')
    if self.scaling in ('yarn', 'llama3') and self.original_length is None:
      raise ValueError(f'rope.scaling={self.scaling!r} needs rope.original_length (tokens the model was trained at), got None.')
    if self.scaling == 'llama3' and not self.low_freq_factor < self.high_freq_factor:
      raise ValueError(
          f'rope.low_freq_factor={self.low_freq_factor} must be below rope.high_freq_factor={self.high_freq_factor}.')


@dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer.

  Attributes:
    family: which published family it is; names its weights (`hf_weights`) and its chat template, and computes nothing.
    vocab_size, num_layers, embed_dim, mlp_dim, num_heads, num_kv_heads, head_dim: sizes V, L, D, F, N, K, H.
    max_length: longest context the checkpoint claims, in tokens.
    activation: of the gated MLP.
    norm_eps: added to the mean square.
    norm_offset: norms multiply by (norm_offset + scale); 1 in Gemma.
    post_norms: a second norm on each sub-layer's output (Gemma's sandwich).
    qk_norm: RMS norm over head_dim on queries and keys, before RoPE.
    qkv_bias: biases on q, k and v (Qwen 2).
    tied_embeddings: the output head is the embedding.
    scale_embeddings: multiply embeddings by sqrt(embed_dim) (Gemma).
    query_scale: multiplies scores; None means head_dim ** -0.5.
    attention_softcap, final_softcap: c tanh(x / c) on scores and logits; None means none.
    attention_sinks: each query head has a learned logit that takes part in its softmax and has no value (arXiv:2309.17453).
    layer_pattern: attention kind of each layer, repeated over the depth ('global' sees everything before it, 'local' a window).
    window: how many tokens a local layer sees, its own included.
    rope, local_rope: for global and local layers; local_rope None means the same as rope.
  """
  family: str
  vocab_size: int
  num_layers: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_length: int
  activation: Literal['silu', 'gelu_tanh', 'gelu'] = 'silu'
  norm_eps: float = 1e-6
  norm_offset: float = 0.0
  post_norms: bool = False
  qk_norm: bool = False
  qkv_bias: bool = False
  tied_embeddings: bool = False
  scale_embeddings: bool = False
  query_scale: float | None = None
  attention_softcap: float | None = None
  final_softcap: float | None = None
  attention_sinks: bool = False
  layer_pattern: tuple[Literal['global', 'local'], ...] = ('global',)
  window: int | None = None
  rope: RopeConfig = RopeConfig()
  local_rope: RopeConfig | None = None

  def __post_init__(self):
    for name in ('vocab_size', 'num_layers', 'embed_dim', 'mlp_dim', 'num_heads', 'num_kv_heads', 'head_dim', 'max_length'):
      if getattr(self, name) < 1:
        raise ValueError(f'model.{name}={getattr(self, name)} must be at least 1.')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f'model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}.')
    if self.head_dim % 2:
      raise ValueError(f'model.head_dim={self.head_dim} must be even: RoPE rotates pairs.')
    if self.activation not in ACTIVATIONS:
      raise ValueError(f'model.activation={self.activation!r} is unknown; use one of {ACTIVATIONS}.')
    if not self.layer_pattern or set(self.layer_pattern) - {'global', 'local'}:
      raise ValueError(f"model.layer_pattern={self.layer_pattern} must be a non-empty tuple of 'global' and 'local'.")
    if 'local' in self.layer_pattern and (self.window is None or self.window < 1):
      raise ValueError(f'model.window={self.window} must be at least 1 when model.layer_pattern has local layers.')

  @property
  def score_scale(self) -> float:
    return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

  def layer_kind(self, layer: int) -> str:
    return self.layer_pattern[layer % len(self.layer_pattern)]

  def layer_window(self, kind: str) -> int | None:
    return self.window if kind == 'local' else None

  def layer_rope(self, kind: str) -> RopeConfig:
    return self.local_rope if kind == 'local' and self.local_rope is not None else self.rope
