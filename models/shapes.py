"""Shapes of published models, for what needs no weights: benchmarks, and compiling for machines that are not there."""

from __future__ import annotations

from models.config import ModelConfig, RopeConfig

_LLAMA3_ROPE = RopeConfig(theta=5e5, scaling='llama3', factor=8.0, original_length=8192)


def _llama3(num_layers: int, embed_dim: int, mlp_dim: int, num_heads: int) -> ModelConfig:
  return ModelConfig(
      family='llama', vocab_size=128_256, num_layers=num_layers, embed_dim=embed_dim, mlp_dim=mlp_dim, num_heads=num_heads, num_kv_heads=8,
      head_dim=128, max_length=131_072, norm_eps=1e-5, rope=_LLAMA3_ROPE)


SHAPES = {
    'gemma3-270m': ModelConfig(
        family='gemma3', vocab_size=262_144, num_layers=18, embed_dim=640, mlp_dim=2048, num_heads=4, num_kv_heads=1, head_dim=256,
        max_length=32_768, activation='gelu_tanh', norm_offset=1.0, post_norms=True, qk_norm=True, tied_embeddings=True,
        scale_embeddings=True, query_scale=256**-0.5, layer_pattern=('local',) * 5 + ('global',), window=512,
        rope=RopeConfig(theta=1e6), local_rope=RopeConfig(theta=1e4)),
    # arXiv:2407.21783 table 3.
    'llama3-8b': _llama3(32, 4096, 14_336, 32),
    'llama3-70b': _llama3(80, 8192, 28_672, 64),
    'llama3-405b': _llama3(126, 16_384, 53_248, 128),
}
