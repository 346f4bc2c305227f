"""The tiny model shared by the tests, so that its compiled functions are shared too."""

from models.config import ModelConfig, RopeConfig


def config(**changes) -> ModelConfig:
  """Return a two-layer model with a local and a global layer; fields may be overridden."""
  return ModelConfig(**({
      'family': 'gemma3', 'vocab_size': 96, 'num_layers': 2, 'embed_dim': 32, 'mlp_dim': 48, 'num_heads': 4, 'num_kv_heads': 2,
      'head_dim': 16, 'max_length': 128, 'activation': 'gelu_tanh', 'norm_offset': 1.0, 'post_norms': True, 'qk_norm': True,
      'tied_embeddings': True, 'scale_embeddings': True, 'layer_pattern': ('local', 'global'), 'window': 8,
      'rope': RopeConfig(theta=1e6), 'local_rope': RopeConfig(theta=1e4)} | changes))
