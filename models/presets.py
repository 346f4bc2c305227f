"""Published models as `ModelConfig`s: Hugging Face's `config.json` and GGUF metadata read, and `config.json` written.

A key that changes the function and that we do not compute is an error naming key and value, never ignored; so is a GGUF key of the
architecture that is not known here. Defaults are those of the Hugging Face classes, because `config.json` leaves them out.

Deliberately absent: sizes of named checkpoints (their files say them), vision towers, biases outside q, k and v, mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from models import rope as rope_lib
from models.config import ModelConfig, RopeConfig

# Family -> (`model_type`, class) as Hugging Face names them.
HF_NAMES = {
    'llama': ('llama', 'LlamaForCausalLM'),
    'mistral': ('mistral', 'MistralForCausalLM'),
    'qwen2': ('qwen2', 'Qwen2ForCausalLM'),
    'qwen3': ('qwen3', 'Qwen3ForCausalLM'),
    'gemma2': ('gemma2', 'Gemma2ForCausalLM'),
    'gemma3': ('gemma3_text', 'Gemma3ForCausalLM'),
}
_HF_FAMILIES = {model_type: family for family, (model_type, _) in HF_NAMES.items()} | {'gemma3': 'gemma3'}
_GGUF_FAMILIES = ('llama', 'qwen2', 'qwen3', 'gemma2', 'gemma3')
_GEMMA = {'norm_offset': 1.0, 'post_norms': True, 'scale_embeddings': True}
# What a family is, whatever its files say.
_TRAITS = {
    'llama': {}, 'mistral': {}, 'qwen2': {'qkv_bias': True}, 'qwen3': {'qk_norm': True},
    'gemma2': _GEMMA, 'gemma3': _GEMMA | {'qk_norm': True}}
_ACTIVATIONS = {'silu': 'silu', 'swish': 'silu', 'gelu': 'gelu', 'gelu_pytorch_tanh': 'gelu_tanh'}
_HF_ACTIVATIONS = {'silu': 'silu', 'gelu': 'gelu', 'gelu_tanh': 'gelu_pytorch_tanh'}
_LAYER_TYPES = {'full_attention': 'global', 'sliding_attention': 'local'}

_GEMMA_DEFAULTS = {
    'head_dim': 256, 'hidden_activation': 'gelu_pytorch_tanh', 'tie_word_embeddings': True, 'query_pre_attn_scalar': 256,
    'sliding_window': 4096}
_HF_DEFAULTS = {
    'mistral': {'sliding_window': 4096, 'num_key_value_heads': 8},
    'qwen2': {'sliding_window': 4096, 'max_window_layers': 28},
    'qwen3': {'sliding_window': 4096, 'max_window_layers': 28, 'head_dim': 128},
    'gemma2': _GEMMA_DEFAULTS | {'sliding_window_pattern': 2, 'final_logit_softcapping': 30.0, 'attn_logit_softcapping': 50.0},
    # The multimodal wrapper's text_config states only what differs from the class.
    'gemma3': _GEMMA_DEFAULTS | {
        'sliding_window_pattern': 6, 'rope_theta': 1_000_000.0, 'rope_local_base_freq': 10_000.0, 'vocab_size': 262_208,
        'hidden_size': 2304, 'intermediate_size': 9216, 'num_hidden_layers': 26, 'num_attention_heads': 8, 'num_key_value_heads': 4,
        'max_position_embeddings': 131_072},
}
# Keys that would change the function, and the value with which they do not.
_INERT = {
    'attention_bias': False, 'mlp_bias': False, 'use_bidirectional_attention': False, 'use_mrope': False, 'partial_rotary_factor': 1,
    'num_experts': 0, 'num_local_experts': 0, 'quantization_config': None, 'original_max_position_embeddings': None}
# A null here means "off", not "the default".
_NULLABLE = ('sliding_window', 'final_logit_softcapping', 'attn_logit_softcapping')
_ROPE_FIELDS = {
    'factor': 'factor', 'original_max_position_embeddings': 'original_length', 'low_freq_factor': 'low_freq_factor',
    'high_freq_factor': 'high_freq_factor', 'beta_fast': 'beta_fast', 'beta_slow': 'beta_slow', 'attention_factor': 'attention_factor',
    'mscale': 'mscale', 'mscale_all_dim': 'mscale_all_dim', 'truncate': 'truncate'}
_ROPE_KEYS = {
    'default': (), 'linear': ('factor',), 'dynamic': ('factor',),
    'llama3': ('factor', 'original_max_position_embeddings', 'low_freq_factor', 'high_freq_factor'),
    'yarn': ('factor', 'original_max_position_embeddings', 'beta_fast', 'beta_slow', 'attention_factor', 'mscale', 'mscale_all_dim',
             'truncate')}
_REQUIRED = object()


def _get(config: Mapping[str, Any], key: str, kinds: type | tuple[type, ...], default=_REQUIRED):
  """Return a value of the right type; a null counts as left out."""
  value = config.get(key)
  if value is None:
    if default is _REQUIRED:
      raise ValueError(f'config.json has no {key!r}, which {config.get("model_type")!r} needs; it is incomplete, fetch it again.')
    return default
  kinds = kinds if isinstance(kinds, tuple) else (kinds,)
  if not isinstance(value, kinds) or isinstance(value, bool) != (bool in kinds):
    raise TypeError(f'config.json: {key}={value!r} must be {" or ".join(kind.__name__ for kind in kinds)}, got {type(value).__name__}.')
  return value


def _float(config, key, default=_REQUIRED):
  value = _get(config, key, (int, float), default)
  return None if value is None else float(value)


# Hugging Face.


def from_hf(config: Mapping[str, Any], context_length: int | None = None) -> ModelConfig:
  """Return the model that a Hugging Face `config.json` describes, as transformers 4 and 5 write it.

  Args:
    config: the parsed file; a multimodal `gemma3` is read for its text model.
    context_length: tokens the model will be used at; it becomes `max_length` (default: the file's) and fixes dynamic NTK, which
      transformers moves with the current length, contradicting keys already cached.

  Raises:
    ValueError: an unknown `model_type`, or a key whose value asks for something not computed here.
    TypeError: a value of the wrong type.
  """
  model_type = config.get('model_type')
  if model_type not in _HF_FAMILIES:
    raise ValueError(f'config.json: model_type={model_type!r} is not supported; supported: {", ".join(sorted(_HF_FAMILIES))}.')
  family = _HF_FAMILIES[model_type]
  if 'text_config' in config:
    outer = {key: config.get(key) for key in ('tie_word_embeddings', 'quantization_config')}
    config = outer | dict(_get(config, 'text_config', Mapping)) | {'model_type': model_type}
  config = _HF_DEFAULTS.get(family, {}) | {key: value for key, value in config.items() if value is not None or key in _NULLABLE}
  for key, inert in _INERT.items():
    if key in config and config[key] != inert:
      raise ValueError(f'config.json: {key}={config[key]!r} is not computed here; allowed for {model_type}: {inert!r} or absent.')
  num_heads, embed_dim = _get(config, 'num_attention_heads', int), _get(config, 'hidden_size', int)
  num_layers, max_length = _get(config, 'num_hidden_layers', int), _get(config, 'max_position_embeddings', int)
  head_dim = _get(config, 'head_dim', int, embed_dim // max(num_heads, 1))
  activation_key = 'hidden_activation' if family.startswith('gemma') else 'hidden_act'
  activation = _get(config, activation_key, str, 'silu')
  if activation not in _ACTIVATIONS:
    raise ValueError(f'config.json: {activation_key}={activation!r} is not computed here; use one of {", ".join(_ACTIVATIONS)}.')
  kinds, window = _hf_attention(config, family, num_layers)
  rope, local_rope = _hf_ropes(config, family, max_length, context_length)
  scalar = _float(config, 'query_pre_attn_scalar', None)
  return ModelConfig(
      family=family, vocab_size=_get(config, 'vocab_size', int), num_layers=num_layers, embed_dim=embed_dim,
      mlp_dim=_get(config, 'intermediate_size', int), num_heads=num_heads, num_kv_heads=_get(config, 'num_key_value_heads', int, num_heads),
      head_dim=head_dim, max_length=max_length if context_length is None else context_length, activation=_ACTIVATIONS[activation],
      norm_eps=_float(config, 'rms_norm_eps', 1e-6), tied_embeddings=_get(config, 'tie_word_embeddings', bool, False),
      query_scale=None if scalar in (None, head_dim) else scalar**-0.5,
      attention_softcap=_float(config, 'attn_logit_softcapping', None) if family.startswith('gemma') else None,
      final_softcap=_float(config, 'final_logit_softcapping', None) if family.startswith('gemma') else None,
      layer_pattern=shortest_pattern(kinds), window=window, rope=rope, local_rope=None if local_rope == rope else local_rope,
      **_TRAITS[family])


def _hf_attention(config, family: str, num_layers: int) -> tuple[Sequence[str], int | None]:
  """Return the kind of each layer and the window."""
  window = _get(config, 'sliding_window', int, None)
  if family.startswith('qwen') and not _get(config, 'use_sliding_window', bool, False):
    window = None
  if family.startswith('gemma'):
    period = _get(config, 'sliding_window_pattern', int)
    kinds = ['local' if (layer + 1) % period else 'global' for layer in range(num_layers)]
  else:
    first = {'llama': num_layers, 'mistral': 0}.get(family)
    first = _get(config, 'max_window_layers', int) if first is None else first
    kinds = ['local' if window is not None and layer >= first else 'global' for layer in range(num_layers)]
  stated = _get(config, 'layer_types', (list, tuple), None)
  if stated is not None:
    unknown = sorted(set(stated) - set(_LAYER_TYPES))
    if unknown or len(stated) != num_layers:
      raise ValueError(f'config.json: layer_types has {len(stated)} entries for num_hidden_layers={num_layers} and unknown kinds '
                       f'{unknown}; each layer is one of {", ".join(_LAYER_TYPES)}.')
    stated = [_LAYER_TYPES[kind] for kind in stated]
    if family in ('llama', 'mistral') and stated != kinds:
      raise ValueError(f'config.json: layer_types={config["layer_types"]} mixes kinds, but {family} has one kind for all layers '
                       f'(sliding_window={window}).')
    kinds = stated
  return kinds, None if family == 'llama' else window


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
  """Return the shortest pattern that repeats over the depth; short patterns compile fast."""
  lengths = range(1, len(kinds) + 1)
  return tuple(next((kinds[:size] for size in lengths if all(kind == kinds[i % size] for i, kind in enumerate(kinds))), ('global',)))


def _hf_ropes(config, family: str, max_length: int, context_length: int | None) -> tuple[RopeConfig, RopeConfig | None]:
  """Return the RoPE of global layers and, for Gemma 3, of local layers."""
  new, old = _get(config, 'rope_parameters', Mapping, {}), _get(config, 'rope_scaling', Mapping, {})
  theta = _float(config, 'rope_theta', 10_000.0)
  if old and new and old != new:
    raise ValueError(f'config.json has both rope_scaling={old} and rope_parameters={new}; keep the second, which transformers 5 writes.')
  if family != 'gemma3':
    return _hf_rope(new or old, theta, max_length, context_length), None
  if set(new) - set(_LAYER_TYPES):
    raise ValueError(f'config.json: rope_parameters has keys {sorted(new)}; for {config["model_type"]} it holds one table for each of '
                     f'{", ".join(_LAYER_TYPES)}.')
  local_theta = _float(config, 'rope_local_base_freq')
  return (_hf_rope(_get(new, 'full_attention', Mapping, old), theta, max_length, context_length),
          _hf_rope(_get(new, 'sliding_attention', Mapping, {}), local_theta, max_length, context_length))


def _hf_rope(table: Mapping[str, Any], theta: float, max_length: int, context_length: int | None) -> RopeConfig:
  kind = table.get('rope_type', table.get('type', 'default'))
  if kind not in _ROPE_KEYS:
    raise ValueError(f'config.json: rope_type={kind!r} is not computed here; use one of {", ".join(_ROPE_KEYS)}.')
  allowed = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor', *_ROPE_KEYS[kind]}
  if set(table) - allowed or table.get('partial_rotary_factor', 1) != 1:
    unknown = {key: value for key, value in table.items() if key not in allowed or key == 'partial_rotary_factor'}
    raise ValueError(f'config.json: {unknown} in the RoPE table of type {kind!r} is not computed here; known keys: {sorted(allowed)}, '
                     'and partial_rotary_factor must be 1.')
  values = {key: _get(table, key, bool if key == 'truncate' else (int, float), None) for key in _ROPE_KEYS[kind]}
  given = {key: value for key, value in values.items() if value is not None}
  theta = _float(table, 'rope_theta', theta)
  if kind in ('yarn', 'llama3'):
    given = {'original_max_position_embeddings': max_length} | given
  if kind == 'yarn':
    given = {'factor': max_length / given['original_max_position_embeddings']} | given
  elif kind != 'default' and 'factor' not in given:
    raise ValueError(f'config.json: RoPE of type {kind!r} needs a factor, got {dict(table)}.')
  if kind == 'dynamic':
    factor = given['factor'] * max(context_length or 0, max_length) / max_length - (given['factor'] - 1)
    return RopeConfig(theta, 'ntk', factor) if factor > 1 else RopeConfig(theta)
  scaling = 'none' if kind == 'default' else kind
  return RopeConfig(theta, scaling, **{_ROPE_FIELDS[key]: value for key, value in given.items()})


def to_hf(config: ModelConfig, dtype: str, token_ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
  """Return the `config.json` with which transformers 5 computes the same function.

  Args:
    config: the model; its `family` chooses the class.
    dtype: of the weights beside it.
    token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` where known; generation in transformers stops at eos.

  Raises:
    ValueError: the family's class cannot express this configuration; the message names the fields.
  """
  if config.family not in HF_NAMES:
    raise ValueError(f'model.family={config.family!r} has no Hugging Face class; use one of {", ".join(HF_NAMES)}.')
  model_type, architecture = HF_NAMES[config.family]
  kinds = [config.layer_kind(layer) for layer in range(config.num_layers)]
  table = {
      'architectures': [architecture], 'model_type': model_type, 'dtype': dtype,
      # Left out, these would be the class's, which are another model's.
      'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None, **(token_ids or {}),
      'vocab_size': config.vocab_size, 'hidden_size': config.embed_dim, 'intermediate_size': config.mlp_dim,
      'num_hidden_layers': config.num_layers, 'num_attention_heads': config.num_heads, 'num_key_value_heads': config.num_kv_heads,
      'head_dim': config.head_dim, 'max_position_embeddings': config.max_length, 'rms_norm_eps': config.norm_eps,
      'tie_word_embeddings': config.tied_embeddings, 'attention_bias': False, 'rope_parameters': _to_hf_rope(config, 'global')}
  if config.family.startswith('gemma'):
    table |= {
        'hidden_activation': _HF_ACTIVATIONS[config.activation], 'query_pre_attn_scalar': round(config.score_scale**-2),
        'attn_logit_softcapping': config.attention_softcap, 'final_logit_softcapping': config.final_softcap}
  else:
    table |= {'hidden_act': _HF_ACTIVATIONS[config.activation]}
  if config.family != 'llama':
    table['sliding_window'] = config.window
  if config.family not in ('llama', 'mistral'):
    names = {kind: name for name, kind in _LAYER_TYPES.items()}
    table['layer_types'] = [names[kind] for kind in kinds]
  if config.family.startswith('qwen'):
    full_layers = kinds.index('local') if 'local' in kinds else len(kinds)
    table |= {'use_sliding_window': config.window is not None, 'max_window_layers': full_layers}
  if config.family == 'gemma3':
    table['rope_parameters'] = {'full_attention': table['rope_parameters'], 'sliding_attention': _to_hf_rope(config, 'local')}
  _check_expressible(config, table)
  return table


def _ntk_theta(rope: RopeConfig, head_dim: int) -> float:
  return rope.theta * rope.factor ** (head_dim / (head_dim - 2))


def _to_hf_rope(config: ModelConfig, kind: str) -> dict[str, Any]:
  rope = config.layer_rope(kind)
  if rope.scaling == 'ntk':
    # Static NTK is plain RoPE of another base; Hugging Face has no other name for it.
    return {'rope_type': 'default', 'rope_theta': _ntk_theta(rope, config.head_dim)}
  name = 'default' if rope.scaling == 'none' else rope.scaling
  values = {key: getattr(rope, _ROPE_FIELDS[key]) for key in _ROPE_KEYS[name]}
  optional = {'attention_factor': None, 'mscale': 0, 'mscale_all_dim': 0}
  stated = {key: value for key, value in values.items() if key not in optional or value != optional[key]}
  return {'rope_type': name, 'rope_theta': rope.theta, **stated}


def _check_expressible(config: ModelConfig, table: Mapping[str, Any]) -> None:
  """Raise ValueError unless reading the table back gives the same function."""

  def plain(rope):
    return RopeConfig(_ntk_theta(rope, config.head_dim)) if rope.scaling == 'ntk' else rope

  kinds = [config.layer_kind(layer) for layer in range(config.num_layers)]
  rope, local_rope = plain(config.rope), plain(config.layer_rope('local'))
  scale = None if config.query_scale is None or config.query_scale == config.head_dim**-0.5 else config.query_scale
  wanted = vars(dataclasses.replace(config, layer_pattern=shortest_pattern(kinds), rope=rope, query_scale=scale,
                                    local_rope=None if local_rope == rope else local_rope))
  got = vars(from_hf(table))
  lost = {name: value for name, value in wanted.items() if got[name] != value}
  if lost:
    raise ValueError(f'Hugging Face\'s {table["model_type"]} cannot express this model: '
                     + ', '.join(f'{name}={value!r} would become {got[name]!r}' for name, value in lost.items())
                     + f'; set model.family to the family that has these (now {config.family!r}).')


# GGUF.

_GGUF_KEYS = {
    'context_length', 'embedding_length', 'block_count', 'feed_forward_length', 'attention.head_count', 'attention.head_count_kv',
    'attention.key_length', 'attention.value_length', 'attention.layer_norm_rms_epsilon', 'attention.sliding_window',
    'attn_logit_softcapping', 'final_logit_softcapping', 'vocab_size', 'rope.freq_base', 'rope.dimension_count', 'rope.scaling.type',
    'rope.scaling.factor', 'rope.scaling.original_context_length', 'rope.scaling.finetuned'}
# llama.cpp scales the queries of these depths by the embedding width of a head, as the 27B models do; the file does not say it.
_GGUF_27B_LAYERS = {'gemma2': 46, 'gemma3': 62}
_GGUF_PERIODS = {'gemma2': 2, 'gemma3': 6}


def from_gguf(metadata: Mapping[str, Any], *, tied_embeddings: bool, rope_factors: np.ndarray | None = None,
              context_length: int | None = None) -> ModelConfig:
  """Return the model that a GGUF file's metadata describes; what the format leaves to the reader is filled in.

  Args:
    metadata: of the whole file; Mistral files call themselves llama.
    tied_embeddings: whether the file lacks `output.weight`.
    rope_factors: `rope_freqs.weight` [H/2], where the file has it: what Llama 3's scaling divides each frequency by.
    context_length: tokens the model will be used at; it becomes `max_length` (default: the file's).

  Raises:
    ValueError: an unknown architecture, a missing key, or one whose value asks for something not computed here.
  """
  family = metadata.get('general.architecture')
  if family not in _GGUF_FAMILIES:
    raise ValueError(f'general.architecture={family!r} is not supported; supported: {", ".join(_GGUF_FAMILIES)}.')
  own = {key.removeprefix(f'{family}.'): value for key, value in metadata.items() if key.startswith(f'{family}.')}
  known = _GGUF_KEYS | ({'rope.freq_base_swa'} if family == 'gemma3' else set())
  unknown = {key: value for key, value in own.items() if key not in known}
  if unknown:
    raise ValueError(f'GGUF keys of {family} that are not computed here: {unknown}; known: {", ".join(sorted(known))}.')

  def number(key, default=_REQUIRED):
    value = own.get(key, default)
    if value is _REQUIRED or not isinstance(value, (int, float, type(None))) or isinstance(value, bool):
      raise ValueError(f'GGUF key {family}.{key} is {"missing" if value is _REQUIRED else repr(value)}; it must be one number.')
    # A float32 read as its shortest decimal: 1e-06, not 9.999999974752427e-07.
    return float(str(np.float32(value))) if isinstance(value, float) else value

  embed_dim, num_heads, num_layers = number('embedding_length'), number('attention.head_count'), number('block_count')
  head_dim = number('attention.key_length', embed_dim // max(num_heads, 1))
  for key in ('attention.value_length', 'rope.dimension_count'):
    if number(key, head_dim) != head_dim:
      raise ValueError(f'GGUF key {family}.{key}={own[key]} differs from the head dimension {head_dim}, which is not computed here.')
  window = number('attention.sliding_window', 4096 if family == 'gemma2' else None)
  if family == 'llama' and window is not None:
    family = 'mistral'
  elif family.startswith('qwen') and window is not None:
    raise ValueError(
        f'GGUF key {family}.attention.sliding_window={window} does not say which layers it holds for; use the Hugging Face files.')
  period = _GGUF_PERIODS.get(family)
  kinds = (['local' if (layer + 1) % period else 'global' for layer in range(num_layers)] if period
           else ['local' if family == 'mistral' else 'global'] * num_layers)
  tokens = metadata.get('tokenizer.ggml.tokens', ())
  gemma_27b = _GGUF_27B_LAYERS.get(family) == num_layers
  return ModelConfig(
      family=family, vocab_size=number('vocab_size', len(tokens)), num_layers=num_layers, embed_dim=embed_dim,
      mlp_dim=number('feed_forward_length'), num_heads=num_heads, num_kv_heads=number('attention.head_count_kv', num_heads),
      head_dim=head_dim, max_length=number('context_length') if context_length is None else context_length,
      activation='gelu_tanh' if period else 'silu', norm_eps=number('attention.layer_norm_rms_epsilon'), tied_embeddings=tied_embeddings,
      query_scale=(embed_dim // num_heads) ** -0.5 if gemma_27b else None,
      attention_softcap=number('attn_logit_softcapping', 50.0 if family == 'gemma2' else None),
      final_softcap=number('final_logit_softcapping', 30.0 if family == 'gemma2' else None),
      layer_pattern=shortest_pattern(kinds), window=window, rope=_gguf_rope(own, number, head_dim, rope_factors),
      local_rope=RopeConfig(float(number('rope.freq_base_swa', 10_000.0))) if family == 'gemma3' else None, **_TRAITS[family])


def _gguf_rope(own, number, head_dim: int, factors: np.ndarray | None) -> RopeConfig:
  theta, kind = float(number('rope.freq_base', 10_000.0)), own.get('rope.scaling.type', 'none')
  if kind not in ('none', 'linear', 'yarn'):
    raise ValueError(f'GGUF rope.scaling.type={kind!r} is not computed here; use one of none, linear, yarn.')
  if factors is None:
    if kind == 'none':
      return RopeConfig(theta)
    original = number('rope.scaling.original_context_length', number('context_length')) if kind == 'yarn' else None
    return RopeConfig(theta, kind, number('rope.scaling.factor'), original)
  # Llama 3 files hold the divisors but not the rule; every published one has these band edges, and the tensor itself confirms them.
  rope = RopeConfig(theta, 'llama3', float(np.max(factors)), 8192, 1.0, 4.0)
  expected = rope_lib.inverse_frequencies(RopeConfig(theta), head_dim)[0] / rope_lib.inverse_frequencies(rope, head_dim)[0]
  if kind != 'none' or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
    raise ValueError(f'rope_freqs.weight {factors.shape} is not Llama 3\'s scaling (factor {rope.factor}, 8192 tokens, bands 1 and 4), '
                     f'the only one known here (rope.scaling.type={kind!r}); use the Hugging Face files.')
  return rope
