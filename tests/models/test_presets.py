"""Published configurations: files as transformers 4 and 5 write them, GGUF metadata, and every key that is refused."""

import dataclasses

import numpy as np
import pytest

from models import presets
from models.config import ModelConfig, RopeConfig

LLAMA3_ROPE = {
    'factor': 32.0, 'high_freq_factor': 4.0, 'low_freq_factor': 1.0, 'original_max_position_embeddings': 8192, 'rope_type': 'llama3'}
# Llama 3.2 1B as transformers 4 wrote it.
LLAMA = {
    'architectures': ['LlamaForCausalLM'], 'attention_bias': False, 'attention_dropout': 0.0, 'bos_token_id': 128000,
    'eos_token_id': 128001, 'head_dim': 64, 'hidden_act': 'silu', 'hidden_size': 2048, 'initializer_range': 0.02, 'intermediate_size': 8192,
    'max_position_embeddings': 131072, 'mlp_bias': False, 'model_type': 'llama', 'num_attention_heads': 32, 'num_hidden_layers': 16,
    'num_key_value_heads': 8, 'pretraining_tp': 1, 'rms_norm_eps': 1e-05, 'rope_scaling': LLAMA3_ROPE, 'rope_theta': 500000.0,
    'tie_word_embeddings': True, 'torch_dtype': 'bfloat16', 'use_cache': True, 'vocab_size': 128256}
QWEN = {
    'model_type': 'qwen2', 'hidden_act': 'silu', 'hidden_size': 896, 'intermediate_size': 4864, 'max_position_embeddings': 32768,
    'max_window_layers': 21, 'num_attention_heads': 14, 'num_hidden_layers': 24, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-06,
    'rope_theta': 1000000.0, 'sliding_window': 32768, 'tie_word_embeddings': True, 'use_mrope': False, 'use_sliding_window': False,
    'vocab_size': 151936}
MISTRAL = {
    'model_type': 'mistral', 'hidden_act': 'silu', 'hidden_size': 4096, 'intermediate_size': 14336, 'max_position_embeddings': 32768,
    'num_attention_heads': 32, 'num_hidden_layers': 32, 'num_key_value_heads': 8, 'rms_norm_eps': 1e-05, 'rope_theta': 10000.0,
    'sliding_window': 4096, 'tie_word_embeddings': False, 'vocab_size': 32000}
GEMMA2 = {
    'model_type': 'gemma2', 'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0, 'head_dim': 256,
    'hidden_act': 'gelu_pytorch_tanh', 'hidden_activation': 'gelu_pytorch_tanh', 'hidden_size': 2304, 'intermediate_size': 9216,
    'max_position_embeddings': 8192,
    'num_attention_heads': 8, 'num_hidden_layers': 26, 'num_key_value_heads': 4, 'query_pre_attn_scalar': 256, 'rms_norm_eps': 1e-06,
    'rope_theta': 10000.0, 'sliding_window': 4096, 'vocab_size': 256000}
# Gemma 3 4B: the wrapper's text_config says only what differs from the class.
GEMMA3 = {'model_type': 'gemma3', 'mm_tokens_per_image': 256, 'vision_config': {'hidden_size': 1152}, 'text_config': {
    'hidden_size': 2560, 'intermediate_size': 10240, 'model_type': 'gemma3_text', 'num_hidden_layers': 34,
    'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}, 'sliding_window': 1024}}


def test_llama():
  wanted = ModelConfig(
      'llama', vocab_size=128256, num_layers=16, embed_dim=2048, mlp_dim=8192, num_heads=32, num_kv_heads=8, head_dim=64, max_length=131072,
      norm_eps=1e-5, tied_embeddings=True, rope=RopeConfig(5e5, 'llama3', 32.0, 8192, 1.0, 4.0))
  assert presets.from_hf(LLAMA) == wanted
  new = {key: value for key, value in LLAMA.items() if key not in ('rope_scaling', 'rope_theta')}
  assert presets.from_hf(new | {'rope_parameters': LLAMA3_ROPE | {'rope_theta': 5e5}}) == wanted
  assert presets.from_hf(new | {'rope_parameters': LLAMA3_ROPE, 'rope_theta': 5e5, 'head_dim': None}) == wanted


def test_qwen_windows_start_after_the_full_layers():
  plain = presets.from_hf(QWEN)
  assert plain == ModelConfig(
      'qwen2', vocab_size=151936, num_layers=24, embed_dim=896, mlp_dim=4864, num_heads=14, num_kv_heads=2, head_dim=64, max_length=32768,
      qkv_bias=True, tied_embeddings=True, rope=RopeConfig(1e6))
  windowed = presets.from_hf(QWEN | {'use_sliding_window': True})
  assert [windowed.layer_kind(layer) for layer in range(24)] == ['global'] * 21 + ['local'] * 3 and windowed.window == 32768
  table = presets.to_hf(windowed, 'bfloat16')
  table.pop('layer_types')
  assert presets.from_hf(table) == windowed
  assert presets.from_hf(QWEN | {'model_type': 'qwen3'}).head_dim == 128
  qwen3 = presets.from_hf(QWEN | {'model_type': 'qwen3'})
  assert qwen3.qk_norm and not qwen3.qkv_bias


def test_mistral():
  config = presets.from_hf(MISTRAL)
  assert (config.layer_pattern, config.window, config.tied_embeddings, config.head_dim) == (('local',), 4096, False, 128)
  later = presets.from_hf(MISTRAL | {'sliding_window': None})
  assert (later.layer_pattern, later.window) == (('global',), None)
  assert presets.from_hf(presets.to_hf(later, 'float32')) == later


def test_gemma2():
  assert presets.from_hf(GEMMA2) == ModelConfig(
      'gemma2', vocab_size=256000, num_layers=26, embed_dim=2304, mlp_dim=9216, num_heads=8, num_kv_heads=4, head_dim=256, max_length=8192,
      activation='gelu_tanh', norm_offset=1.0, post_norms=True, tied_embeddings=True, scale_embeddings=True, attention_softcap=50.0,
      final_softcap=30.0, layer_pattern=('local', 'global'), window=4096)
  assert presets.from_hf(GEMMA2 | {'query_pre_attn_scalar': 144}).score_scale == 1 / 12
  assert presets.from_hf(GEMMA2 | {'attn_logit_softcapping': None}).attention_softcap is None


def test_gemma3():
  config = presets.from_hf(GEMMA3)
  assert config == ModelConfig(
      'gemma3', vocab_size=262208, num_layers=34, embed_dim=2560, mlp_dim=10240, num_heads=8, num_kv_heads=4, head_dim=256,
      max_length=131072, activation='gelu_tanh', norm_offset=1.0, post_norms=True, qk_norm=True, tied_embeddings=True,
      scale_embeddings=True, layer_pattern=('local',) * 5 + ('global',), window=1024, rope=RopeConfig(1e6, 'linear', 8.0),
      local_rope=RopeConfig(1e4))
  table = presets.to_hf(config, 'bfloat16')
  assert table['rope_parameters'] == {
      'full_attention': {'rope_type': 'linear', 'rope_theta': 1e6, 'factor': 8.0},
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4}}
  assert [i for i, kind in enumerate(table['layer_types']) if kind == 'full_attention'] == [5, 11, 17, 23, 29]
  assert (table['architectures'], table['model_type'], table['dtype']) == (['Gemma3ForCausalLM'], 'gemma3_text', 'bfloat16')
  assert presets.from_hf(table) == config


def test_dynamic_ntk_is_fixed_at_one_length():
  table = QWEN | {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}
  assert presets.from_hf(table).rope == RopeConfig(1e6)
  config = presets.from_hf(table, context_length=3 * 32768)
  # factor * length / trained - (factor - 1) = 2 * 3 - 1.
  assert config.rope == RopeConfig(1e6, 'ntk', 5.0) and config.max_length == 3 * 32768
  written = presets.to_hf(config, 'float32')['rope_parameters']
  assert written == {'rope_type': 'default', 'rope_theta': pytest.approx(1e6 * 5 ** (64 / 62), rel=1e-12)}
  assert presets.from_hf(QWEN, context_length=1024).max_length == 1024
  with pytest.raises(ValueError, match=r'model\.max_length=0 must be at least 1'):
    presets.from_hf(QWEN, context_length=0)


def test_yarn_factor_may_come_from_the_lengths():
  table = QWEN | {'max_position_embeddings': 131072, 'rope_scaling': {'rope_type': 'yarn', 'original_max_position_embeddings': 32768}}
  assert presets.from_hf(table).rope == RopeConfig(1e6, 'yarn', 4.0, 32768)
  table = QWEN | {'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0, 'attention_factor': None}}
  assert presets.from_hf(table).rope == RopeConfig(1e6, 'yarn', 4.0, 32768)


REFUSED = {
    'unknown model': (LLAMA | {'model_type': 'mamba'}, "model_type='mamba' is not supported; supported: gemma2, gemma3, gemma3_text"),
    'no model': ({}, 'model_type=None is not supported'),
    'attention bias': (LLAMA | {'attention_bias': True}, 'attention_bias=True is not computed here; allowed for llama: False or absent'),
    'mlp bias': (LLAMA | {'mlp_bias': True}, 'mlp_bias=True is not computed here'),
    'partial rotary': (LLAMA | {'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5 is not computed here; allowed for llama: 1'),
    'quantized': (LLAMA | {'quantization_config': {'quant_method': 'fp8'}}, "quantization_config={'quant_method': 'fp8'} is not computed"),
    'quantized wrapper': (GEMMA3 | {'quantization_config': {'bits': 4}}, "quantization_config={'bits': 4} is not computed here"),
    'outer length': (LLAMA | {'original_max_position_embeddings': 8192}, 'original_max_position_embeddings=8192 is not computed here'),
    'experts': (QWEN | {'num_experts': 60}, 'num_experts=60 is not computed here'),
    'bidirectional': (GEMMA3 | {'text_config': {'use_bidirectional_attention': True}}, 'use_bidirectional_attention=True is not computed'),
    'activation': (LLAMA | {'hidden_act': 'relu2'}, "hidden_act='relu2' is not computed here; use one of silu, swish, gelu"),
    'gemma activation': (GEMMA2 | {'hidden_activation': 'relu'}, "hidden_activation='relu' is not computed here"),
    'rope type': (LLAMA | {'rope_scaling': {'rope_type': 'longrope'}}, "rope_type='longrope' is not computed here; use one of default"),
    'rope key': (MISTRAL | {'rope_parameters': {'rope_type': 'yarn', 'factor': 4.0, 'llama_4_scaling_beta': 0.1}},
                 r"\{'llama_4_scaling_beta': 0.1\} in the RoPE table of type 'yarn' is not computed here; known keys"),
    'rope partial': (LLAMA | {'rope_scaling': {'rope_type': 'default', 'partial_rotary_factor': 0.25}},
                     "{'partial_rotary_factor': 0.25} in the"),
    'rope factor': (LLAMA | {'rope_scaling': {'rope_type': 'linear'}}, "RoPE of type 'linear' needs a factor"),
    'rope twice': (LLAMA | {'rope_parameters': {'rope_type': 'default'}}, 'both rope_scaling=.* and rope_parameters='),
    'rope flat': (GEMMA3 | {'text_config': {'rope_parameters': {'rope_type': 'default'}}}, r"rope_parameters has keys \['rope_type'\]"),
    'layer kinds': (QWEN | {'layer_types': ['chunked_attention'] * 24}, r"unknown kinds \['chunked_attention'\]; each layer is"),
    'layer count': (QWEN | {'layer_types': ['full_attention'] * 3}, 'layer_types has 3 entries for num_hidden_layers=24'),
    'mixed mistral': (MISTRAL | {'layer_types': ['full_attention'] * 32}, r'mistral has one kind for all layers \(sliding_window=4096\)'),
    'no window': (QWEN | {'layer_types': ['sliding_attention'] * 24}, r'model\.window=None must be at least 1'),
    'missing': ({key: value for key, value in LLAMA.items() if key != 'hidden_size'}, "no 'hidden_size', which 'llama' needs"),
    'heads': (LLAMA | {'num_key_value_heads': 5}, r'model\.num_kv_heads=5 does not divide model\.num_heads=32'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_is_not_computed_is_refused(case):
  table, match = REFUSED[case]
  with pytest.raises(ValueError, match=match):
    presets.from_hf(table)


@pytest.mark.parametrize(('key', 'value', 'kind'), [
    ('vocab_size', '32000', 'int'), ('vocab_size', True, 'int'), ('rms_norm_eps', '1e-5', 'int or float'),
    ('tie_word_embeddings', 1, 'bool'), ('rope_scaling', [], 'Mapping'), ('hidden_act', 3, 'str')])
def test_wrong_types_are_named(key, value, kind):
  with pytest.raises(TypeError, match=f'{key}={value!r}'.replace('[]', r'\[\]') + f' must be {kind}, got {type(value).__name__}'):
    presets.from_hf(LLAMA | {key: value})


def test_to_hf_refuses_what_the_class_cannot_say():
  config = presets.from_hf(LLAMA)
  with pytest.raises(ValueError, match="model.family='falcon' has no Hugging Face class; use one of llama, mistral"):
    presets.to_hf(dataclasses.replace(config, family='falcon'), 'float32')
  for changes, match in [
      ({'qkv_bias': True}, 'llama cannot express this model: qkv_bias=True would become False; set model.family'),
      ({'layer_pattern': ('local', 'global'), 'window': 8}, r"window=8 would become None"),
      ({'final_softcap': 30.0}, 'final_softcap=30.0 would become None'), ({'local_rope': RopeConfig(3e4)}, 'local_rope=RopeConfig'),
      ({'query_scale': 0.1}, 'query_scale=0.1 would become None')]:
    with pytest.raises(ValueError, match=match):
      presets.to_hf(dataclasses.replace(config, **changes), 'float32')
  # The same function said in other words is no loss.
  same = dataclasses.replace(config, layer_pattern=('global', 'global'), query_scale=64**-0.5, local_rope=config.rope)
  assert presets.to_hf(same, 'float32') == presets.to_hf(config, 'float32')


def test_to_hf_states_the_token_ids():
  config = presets.from_hf(LLAMA)
  # Without these transformers would fill in another model's.
  assert {key: presets.to_hf(config, 'float32')[key] for key in ('bos_token_id', 'eos_token_id', 'pad_token_id')} == {
      'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None}
  assert presets.to_hf(config, 'float32', {'eos_token_id': [1, 106]})['eos_token_id'] == [1, 106]


# GGUF.

GGUF = {
    'general.architecture': 'gemma3', 'gemma3.context_length': 32768, 'gemma3.embedding_length': 640, 'gemma3.block_count': 18,
    'gemma3.feed_forward_length': 2048, 'gemma3.attention.head_count': 4,
    'gemma3.attention.layer_norm_rms_epsilon': float(np.float32(1e-6)),
    'gemma3.attention.key_length': 256, 'gemma3.attention.value_length': 256, 'gemma3.rope.freq_base': 1e6,
    'gemma3.attention.sliding_window': 512, 'gemma3.attention.head_count_kv': 1, 'tokenizer.ggml.tokens': ['a'] * 262144}


def read(metadata, tied=True, **arguments):
  return presets.from_gguf(metadata, tied_embeddings=tied, **arguments)


def renamed(architecture, **changes):
  own = {key.replace('gemma3', architecture): value for key, value in GGUF.items() if 'sliding' not in key}
  return own | {'general.architecture': architecture} | {f'{architecture}.{key}': value for key, value in changes.items()}


def test_gguf_gemma3_fills_in_what_the_file_does_not_say():
  assert read(GGUF) == ModelConfig(
      'gemma3', vocab_size=262144, num_layers=18, embed_dim=640, mlp_dim=2048, num_heads=4, num_kv_heads=1, head_dim=256, max_length=32768,
      activation='gelu_tanh', norm_eps=1e-6, norm_offset=1.0, post_norms=True, qk_norm=True, tied_embeddings=True, scale_embeddings=True,
      layer_pattern=('local',) * 5 + ('global',), window=512, rope=RopeConfig(1e6), local_rope=RopeConfig(1e4))
  assert read(GGUF | {'gemma3.rope.freq_base_swa': 2e4}).local_rope == RopeConfig(2e4)
  scaled = read(GGUF | {'gemma3.rope.scaling.type': 'linear', 'gemma3.rope.scaling.factor': 8.0})
  assert (scaled.rope, scaled.local_rope) == (RopeConfig(1e6, 'linear', 8.0), RopeConfig(1e4))
  large = read(GGUF | {'gemma3.block_count': 62, 'gemma3.embedding_length': 5376, 'gemma3.attention.head_count': 32})
  assert large.query_scale == 168**-0.5
  assert read(GGUF, context_length=4096).max_length == 4096


def test_gguf_other_architectures():
  yarn = {'rope.scaling.type': 'yarn', 'rope.scaling.factor': 4.0, 'rope.scaling.original_context_length': 8192}
  qwen = read(renamed('qwen2', **yarn), False)
  assert (qwen.family, qwen.qkv_bias, qwen.tied_embeddings, qwen.activation) == ('qwen2', True, False, 'silu')
  assert qwen.rope == RopeConfig(1e6, 'yarn', 4.0, 8192)
  assert (qwen.layer_pattern, qwen.window, qwen.norm_offset) == (('global',), None, 0.0)
  gemma2 = read(renamed('gemma2', attn_logit_softcapping=50.0, final_logit_softcapping=30.0))
  assert (gemma2.layer_pattern, gemma2.window, gemma2.attention_softcap, gemma2.final_softcap) == (('local', 'global'), 4096, 50.0, 30.0)
  assert read(renamed('llama', **{'rope.dimension_count': 256})).family == 'llama'
  mistral = read(renamed('llama', **{'attention.sliding_window': 4096}))
  assert (mistral.family, mistral.layer_pattern, mistral.window) == ('mistral', ('local',), 4096)


@pytest.mark.parametrize(('metadata', 'match'), [
    (GGUF | {'general.architecture': 'mamba'}, r"general\.architecture='mamba' is not supported; supported: llama, qwen2, qwen3, gemma2"),
    (GGUF | {'gemma3.expert_count': 8}, r"GGUF keys of gemma3 that are not computed here: \{'expert_count': 8\}; known: attention"),
    (renamed('llama', **{'rope.freq_base_swa': 1e4}), r"not computed here: \{'rope\.freq_base_swa'"),
    ({key: value for key, value in GGUF.items() if key != 'gemma3.block_count'}, r'gemma3\.block_count is missing; it must be one number'),
    (GGUF | {'gemma3.attention.head_count_kv': np.array([1, 2])}, r'head_count_kv is array\(\[1, 2\]\); it must be one number'),
    (GGUF | {'gemma3.attention.value_length': 128}, r'value_length=128 differs from the head dimension 256'),
    (renamed('llama', **{'rope.dimension_count': 64}), r'llama\.rope\.dimension_count=64 differs from the head dimension 256'),
    (renamed('qwen2', **{'attention.sliding_window': 64}), r'sliding_window=64 does not say which layers'),
    (renamed('llama', **{'rope.scaling.type': 'longrope'}), r"rope\.scaling\.type='longrope' is not computed here; use one of none"),
    (renamed('llama', **{'rope.scaling.type': 'linear'}), r'rope\.scaling\.factor is missing'),
])
def test_gguf_refusals(metadata, match):
  with pytest.raises(ValueError, match=match):
    read(metadata)
