"""Weight files: round trips through transformers bit for bit, shardings, GGUF, and what happens to every kind of broken file."""

import json
import os
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import gguf, hf_weights, lora, sharding, transformer, weight_files
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig, RopeConfig

SIZES = {'vocab_size': 64, 'num_layers': 3, 'embed_dim': 32, 'mlp_dim': 48, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 16,
         'max_length': 64}
GEMMA = {'norm_offset': 1.0, 'post_norms': True, 'tied_embeddings': True, 'scale_embeddings': True, 'activation': 'gelu_tanh',
         'layer_pattern': ('local', 'global'), 'window': 8}
CONFIGS = {
    'llama': ModelConfig('llama', **SIZES, rope=RopeConfig(5e5, 'llama3', 8.0, 32)),
    'mistral': ModelConfig('mistral', **SIZES, layer_pattern=('local',), window=8),
    'qwen2': ModelConfig('qwen2', **SIZES, qkv_bias=True, tied_embeddings=True),
    'qwen3': ModelConfig('qwen3', **SIZES, qk_norm=True, rope=RopeConfig(1e6, 'yarn', 4.0, 32)),
    'gemma2': ModelConfig('gemma2', **SIZES, **GEMMA, attention_softcap=50.0, final_softcap=30.0),
    'gemma3': ModelConfig('gemma3', **SIZES, **GEMMA, qk_norm=True, rope=RopeConfig(1e6), local_rope=RopeConfig(1e4)),
}
LLAMA = CONFIGS['llama']


def mesh_of(count=1, **sizes):
  return sharding.make_mesh(devices=jax.devices()[:count], **sizes)


def make_params(config, dtype='float32', mesh=None):
  """Return random values everywhere, norms and biases too."""
  mesh = mesh or mesh_of()
  specs = transformer.declare(config)
  rng = np.random.default_rng(0)
  places = params_lib.spec_shardings(specs, mesh, sharding.TRAIN)
  return jax.tree.map(lambda spec, place: jax.device_put(rng.standard_normal(spec.shape, np.float32).astype(dtype), place), specs, places,
                      is_leaf=lambda leaf: isinstance(leaf, params_lib.ParamSpec))


def load(path, mesh=None, **arguments):
  return hf_weights.load(path, mesh or mesh_of(), sharding.TRAIN, **arguments)


def assert_same(got, wanted):
  got, wanted = (dict(params_lib.named_leaves(tree)) for tree in (got, wanted))
  assert got.keys() == wanted.keys()
  for name in got:
    assert got[name].dtype == wanted[name].dtype, name
    np.testing.assert_array_equal(np.asarray(got[name]).view(np.uint8), np.asarray(wanted[name]).view(np.uint8), err_msg=name)


@pytest.fixture
def saved(tmp_path):
  """Return a directory with a llama model and its tensors, to be broken and written again."""
  path = tmp_path / 'model'
  hf_weights.export(path, LLAMA, make_params(LLAMA), dtype='float32')
  return path, load_file(path / 'model.safetensors')


@pytest.fixture
def no_device(monkeypatch):
  """Make any placing of data on a device fail the test."""
  def fail(*_, **__):
    raise AssertionError('device work before the error')
  monkeypatch.setattr(jax, 'make_array_from_callback', fail)


# Round trips.


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('family', CONFIGS)
def test_export_transformers_import_is_bit_exact(family, dtype, tmp_path):
  transformers = pytest.importorskip('transformers')
  config = CONFIGS[family]
  params = make_params(config, dtype)
  hf_weights.export(tmp_path / 'ours', config, params, dtype=dtype)
  model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'ours', output_loading_info=True)
  assert not any(report.values()), report
  assert str(model.dtype) == f'torch.{dtype}'
  model.save_pretrained(tmp_path / 'theirs', max_shard_size='20KB')
  assert (tmp_path / 'theirs' / weight_files.INDEX_FILE).is_file()
  back_config, back = load(tmp_path / 'theirs', dtype=dtype)
  assert back_config == config
  assert_same(back, params)


def test_float32_becomes_bfloat16_by_rounding_to_nearest(tmp_path):
  params = make_params(LLAMA)
  hf_weights.export(tmp_path / 'm', LLAMA, params, dtype='bfloat16')
  rounded = jax.tree.map(lambda x: x.astype('bfloat16'), params)
  assert_same(load(tmp_path / 'm', dtype='bfloat16')[1], rounded)
  assert_same(load(tmp_path / 'm')[1], jax.tree.map(lambda x: x.astype('float32'), rounded))


def test_matrices_are_stored_outputs_by_inputs(saved):
  _, tensors = saved
  params = make_params(LLAMA)
  own = params['blocks']['attention']
  # Row 17 of q_proj is head 1, dimension 1; column 17 of o_proj too.
  np.testing.assert_array_equal(tensors['model.layers.2.self_attn.q_proj.weight'][17], own['q'][2, :, 1, 1])
  np.testing.assert_array_equal(tensors['model.layers.2.self_attn.o_proj.weight'][:, 17], own['o'][2, 1, 1])
  np.testing.assert_array_equal(tensors['model.layers.1.mlp.down_proj.weight'], params['blocks']['mlp']['down'][1].T)
  np.testing.assert_array_equal(tensors['lm_head.weight'], params['head'])


def test_shards_are_small_and_listed(tmp_path):
  params = make_params(LLAMA)
  hf_weights.export(tmp_path / 'm', LLAMA, params, dtype='float32', max_shard_bytes=20_000)
  files = sorted((tmp_path / 'm').glob('*.safetensors'))
  assert len(files) > 3
  assert all(file.stat().st_size < 20_000 + 4_000 for file in files)
  index = json.loads((tmp_path / 'm' / weight_files.INDEX_FILE).read_text())
  assert index['metadata']['total_size'] == 4 * params_lib.count(params)
  assert list(index['weight_map'])[0] == 'model.embed_tokens.weight' and set(index['weight_map'].values()) == {file.name for file in files}
  assert_same(load(tmp_path / 'm')[1], params)


@pytest.mark.parametrize('sizes', [{'fsdp': 2, 'tensor': 2}, {'fsdp': 2, 'tensor': 4}, {'data': 2, 'fsdp': 4}], ids=str)
def test_load_on_a_mesh(saved, sizes, monkeypatch):
  path, tensors = saved
  count = int(np.prod(list(sizes.values())))
  mesh = mesh_of(count, **sizes)
  read = {}
  original = weight_files.SafetensorsFiles.read

  def counted(self, name, index, dtype):
    part = original(self, name, index, dtype)
    read[name] = read.get(name, 0) + part.size
    return part

  monkeypatch.setattr(weight_files.SafetensorsFiles, 'read', counted)
  _, params = load(path, mesh)
  assert_same(params, make_params(LLAMA))
  # Each value is read once, whatever the number of devices that hold it.
  assert read == {name: tensor.size for name, tensor in tensors.items()}
  layout = params_lib.replicate_indivisible(sharding.TRAIN, mesh, LLAMA.num_kv_heads)
  places = params_lib.spec_shardings(transformer.declare(LLAMA), mesh, layout)
  assert jax.tree.map(lambda leaf: leaf.sharding, params) == places
  # A cast goes piece by piece.
  monkeypatch.setattr(weight_files, '_PIECE_VALUES', 40)
  assert_same(load(path, mesh, dtype='bfloat16')[1], make_params(LLAMA, 'bfloat16'))


def test_export_from_a_mesh(saved, tmp_path):
  path, _ = saved
  hf_weights.export(tmp_path / 'again', *load(path, mesh_of(4, fsdp=2, tensor=2)), dtype='float32')
  assert (tmp_path / 'again' / 'model.safetensors').read_bytes() == (path / 'model.safetensors').read_bytes()


def test_one_file_beside_its_config(saved):
  path, _ = saved
  os.rename(path / 'model.safetensors', path / 'weights.safetensors')
  assert_same(load(path / 'weights.safetensors')[1], make_params(LLAMA))
  assert weight_files.read_config(path / 'weights.safetensors') == LLAMA


@pytest.mark.parametrize('prefix', ['model.language_model.', 'language_model.model.'])
def test_text_model_of_a_multimodal_file(prefix, tmp_path, caplog):
  config = CONFIGS['gemma3']
  params = make_params(config)
  hf_weights.export(tmp_path, config, params, dtype='float32')
  tensors = {name.replace('model.', prefix, 1): tensor for name, tensor in load_file(tmp_path / 'model.safetensors').items()}
  vision = {name: np.zeros(3, np.float32) for name in ('vision_tower.vision_model.embeddings.weight', 'model.multi_modal_projector.x')}
  save_file(tensors | vision, tmp_path / 'model.safetensors')
  table = json.loads((tmp_path / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'gemma3', 'text_config': table, 'vision_config': {}}))
  back_config, back = load(tmp_path)
  assert back_config == config
  assert_same(back, params)
  assert 'skipped 2 vision tensors' in caplog.text


def test_derived_buffers_of_old_files_are_no_parameters(saved):
  path, tensors = saved
  save_file(tensors | {'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros(8, np.float32)}, path / 'model.safetensors')
  assert_same(load(path)[1], make_params(LLAMA))


# GGUF.


def gguf_tensors(config, params):
  """Return the tensors as llama.cpp's converter lays them out, written from its description."""
  tensors = {'token_embd.weight': np.asarray(params['embedding']), 'output_norm.weight': np.asarray(params['norm']) + config.norm_offset}
  if not config.tied_embeddings:
    tensors['output.weight'] = np.asarray(params['head'])
  names = {'norm': 'attn_norm', 'q': 'attn_q', 'k': 'attn_k', 'v': 'attn_v', 'o': 'attn_output', 'q_norm': 'attn_q_norm',
           'k_norm': 'attn_k_norm', 'post_norm': 'post_attention_norm'}
  mlp_names = {'norm': 'ffn_norm', 'gate': 'ffn_gate', 'up': 'ffn_up', 'down': 'ffn_down', 'post_norm': 'post_ffw_norm'}
  for layer in range(config.num_layers):
    for kind, table in (('attention', names), ('mlp', mlp_names)):
      for key, leaf in params['blocks'][kind].items():
        value, name = np.asarray(leaf[layer]), table[key.removesuffix('_bias')]
        if 'norm' in key:
          value = value + np.float32(config.norm_offset)
        elif key.endswith('_bias'):
          value = value.reshape(-1)
        elif key == 'o':
          value = value.reshape(-1, config.embed_dim).T
        else:
          value = value.reshape(config.embed_dim if key != 'down' else config.mlp_dim, -1).T
        if config.family in ('llama', 'mistral') and key in 'qk':
          heads = len(value) // config.head_dim
          value = value.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(value.shape)
        tensors[f'blk.{layer}.{name}.{"bias" if key.endswith("_bias") else "weight"}'] = np.ascontiguousarray(value, np.float32)
  return tensors


def gguf_metadata(config, **changes):
  architecture = 'llama' if config.family == 'mistral' else config.family
  values = {
      'context_length': config.max_length, 'embedding_length': config.embed_dim, 'block_count': config.num_layers,
      'feed_forward_length': config.mlp_dim, 'attention.head_count': config.num_heads, 'attention.head_count_kv': config.num_kv_heads,
      'attention.key_length': config.head_dim, 'attention.value_length': config.head_dim,
      'attention.layer_norm_rms_epsilon': config.norm_eps, 'rope.freq_base': config.rope.theta, 'vocab_size': config.vocab_size,
      **({'attention.sliding_window': config.window} if config.window else {}),
      **({'rope.dimension_count': config.head_dim} if architecture == 'llama' else {}), **changes}
  return {'general.architecture': architecture, **{f'{architecture}.{key}': value for key, value in values.items()}}


GGUF_CONFIGS = {
    'llama': ModelConfig('llama', **SIZES),
    'mistral': CONFIGS['mistral'],
    'qwen2': CONFIGS['qwen2'],
    'qwen3': ModelConfig('qwen3', **SIZES, qk_norm=True),
    'gemma3': ModelConfig('gemma3', **SIZES, **(GEMMA | {'layer_pattern': ('local',)}), qk_norm=True, rope=RopeConfig(1e6),
                          local_rope=RopeConfig(1e4)),
}


@pytest.mark.parametrize('family', GGUF_CONFIGS)
def test_gguf(family, tmp_path):
  config = GGUF_CONFIGS[family]
  params = make_params(config)
  tensors = gguf_tensors(config, params)
  gguf.write_gguf(tmp_path / 'm.gguf', gguf_metadata(config), tensors)
  back_config, back = load(tmp_path / 'm.gguf', mesh_of(4, fsdp=2, tensor=2))
  assert back_config == config
  if config.norm_offset:
    # The file's 1 + w rounded w; what is left is that sum minus 1.
    params = params_lib.map_named(lambda name, leaf: (leaf + 1) - 1 if 'norm' in name else leaf, params)
  assert_same(back, params)
  half = load(tmp_path / 'm.gguf', dtype='bfloat16')[1]
  assert_same(half, jax.tree.map(lambda x: x.astype('bfloat16'), params))


def test_gguf_rows_of_q_and_k_agree_with_transformers(tmp_path):
  transformers = pytest.importorskip('transformers')
  pytest.importorskip('gguf')
  config = GGUF_CONFIGS['llama']
  gguf.write_gguf(tmp_path / 'm.gguf', gguf_metadata(config), gguf_tensors(config, make_params(config)))
  wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file='m.gguf').state_dict()
  hf_weights.export(tmp_path / 'hf', *load(tmp_path / 'm.gguf'), dtype='float32')
  got = load_file(tmp_path / 'hf' / 'model.safetensors')
  assert got.keys() == wanted.keys()
  for name, tensor in got.items():
    np.testing.assert_array_equal(tensor, wanted[name].numpy(), err_msg=name)


def test_gguf_llama3_scaling_comes_from_its_tensor(tmp_path):
  config = ModelConfig('llama', **SIZES, rope=RopeConfig(5e5, 'llama3', 32.0, 8192))
  tensors = gguf_tensors(config, make_params(config))
  # Divisors for head_dim 16, theta 500000, by hand: wavelengths 2 pi theta^(i/8) are 6.3, 32, 167, 861 (below 8192 / 4: kept), 4443
  # (between), 22915, 118181, 609522 (above 8192: divided by 32).
  rotations = 8192 / (2 * np.pi * 5e5**0.5)
  keep = (rotations - 1) / 3
  factors = np.array([1, 1, 1, 1, 1 / (keep + (1 - keep) / 32), 32, 32, 32], np.float32)
  gguf.write_gguf(tmp_path / 'm.gguf', gguf_metadata(config), tensors | {'rope_freqs.weight': factors})
  assert weight_files.read_config(tmp_path / 'm.gguf') == config
  assert load(tmp_path / 'm.gguf')[0] == config
  gguf.write_gguf(tmp_path / 'm.gguf', gguf_metadata(config), tensors | {'rope_freqs.weight': factors[::-1].copy()})
  with pytest.raises(ValueError, match=r"m\.gguf: rope_freqs\.weight \(8,\) is not Llama 3's scaling"):
    load(tmp_path / 'm.gguf')


def test_gguf_errors_name_the_file(tmp_path, no_device):
  config = GGUF_CONFIGS['qwen3']
  tensors = gguf_tensors(config, make_params(config))
  path = tmp_path / 'm.gguf'
  gguf.write_gguf(path, gguf_metadata(config) | {'general.architecture': 'mamba'}, tensors)
  with pytest.raises(ValueError, match=r"m\.gguf: general\.architecture='mamba' is not supported; supported: llama, qwen2"):
    load(path)
  extra = tensors | {'blk.0.attn_q.bias': np.zeros(64, np.float32)}
  extra.pop('output_norm.weight')
  gguf.write_gguf(path, gguf_metadata(config), extra)
  with pytest.raises(ValueError, match=r"missing \['output_norm.weight \(32,\)'\]; left over \['blk.0.attn_q.bias \(64,\)'\]"):
    load(path)
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(ValueError, match='truncated'):
    load(path)


# Broken files.


def test_every_mismatch_in_one_error(saved, no_device):
  path, tensors = saved
  tensors['model.layers.1.extra.weight'] = np.zeros((2, 3), np.float32)
  tensors['model.norm.weight'] = np.zeros(31, np.float32)
  del tensors['lm_head.weight']
  save_file(tensors, path / 'model.safetensors')
  with pytest.raises(ValueError) as caught:
    load(path)
  message = str(caught.value)
  assert str(path) in message and 'llama' in message
  assert "missing ['lm_head.weight (64, 32)']" in message
  assert "left over ['model.layers.1.extra.weight (2, 3)']" in message
  assert "of another shape ['model.norm.weight: file (31,), model (32,)']" in message


def test_a_head_beside_tied_embeddings_is_left_over(saved, no_device):
  path, _ = saved
  table = json.loads((path / 'config.json').read_text()) | {'tie_word_embeddings': True}
  (path / 'config.json').write_text(json.dumps(table))
  with pytest.raises(ValueError, match=r"missing \[\]; left over \['lm_head.weight \(64, 32\)'\]; of another shape \[\]"):
    load(path)


def test_many_mismatches_are_counted(saved, no_device):
  path, tensors = saved
  save_file({name: tensor for name, tensor in tensors.items() if 'mlp' not in name}, path / 'model.safetensors')
  with pytest.raises(ValueError, match=r"missing \['model.layers.0.mlp.down_proj.weight \(32, 48\)'.*'and 1 more'\]"):
    load(path)


@pytest.mark.parametrize('keep', [5, 100, -3])
def test_truncated_safetensors(saved, no_device, keep):
  path, _ = saved
  data = (path / 'model.safetensors').read_bytes()
  (path / 'model.safetensors').write_bytes(data[:keep])
  with pytest.raises(ValueError, match=r'model\.safetensors \(\d+ bytes\) is not a whole safetensors file: .*fetch it again'):
    load(path)


@pytest.mark.parametrize(('kind', 'size'), [('I8', 1), ('F8_E4M3', 1), ('F64', 8)])
def test_dtypes_that_are_not_read(saved, no_device, kind, size):
  path, _ = saved
  data = (path / 'model.safetensors').read_bytes()
  length = struct.unpack('<Q', data[:8])[0]
  header = json.loads(data[8:8 + length])
  header = {'model.norm.weight': {'dtype': kind, 'shape': [32], 'data_offsets': [0, 32 * size]}}
  text = json.dumps(header).encode()
  (path / 'model.safetensors').write_bytes(struct.pack('<Q', len(text)) + text + bytes(32 * size))
  with pytest.raises(ValueError, match=f'tensor model.norm.weight is {kind}; allowed: F32, BF16, F16'):
    load(path)


def test_index_and_shards_must_match(tmp_path, no_device):
  path = tmp_path / 'm'
  hf_weights.export(path, LLAMA, make_params(LLAMA), dtype='float32', max_shard_bytes=20_000)
  index_path = path / weight_files.INDEX_FILE
  index = json.loads(index_path.read_text())
  last = index['weight_map']['lm_head.weight']
  index['weight_map']['model.ghost.weight'] = last
  index_path.write_text(json.dumps(index))
  with pytest.raises(ValueError, match=rf"{last} disagree: missing from the file \['model.ghost.weight'\], not in the index \[\]"):
    load(path)
  (path / last).unlink()
  with pytest.raises(FileNotFoundError, match=rf"lacks \['{last}'\], which {weight_files.INDEX_FILE} names"):
    load(path)
  index_path.write_text('{}')
  with pytest.raises(ValueError, match='has no weight_map table'):
    load(path)


def test_paths_that_hold_no_model(saved, tmp_path, no_device):
  path, _ = saved
  with pytest.raises(FileNotFoundError, match='nowhere does not exist; give a directory with config.json and safetensors'):
    load(tmp_path / 'nowhere')
  (tmp_path / 'pytorch_model.bin').write_bytes(b'')
  with pytest.raises(ValueError, match=r'pytorch_model\.bin is neither \.gguf nor \.safetensors; pickled'):
    load(tmp_path / 'pytorch_model.bin')
  with pytest.raises(ValueError, match=r"dtype='int4' of the loaded parameters is unknown; use one of \('float32', 'bfloat16'"):
    load(path, dtype='int4')
  (path / 'model.safetensors').unlink()
  with pytest.raises(FileNotFoundError, match='has neither model.safetensors nor model.safetensors.index.json'):
    load(path)
  (path / 'config.json').write_text('{"model_type": "gpt2"}')
  with pytest.raises(ValueError, match=r"config\.json: model_type='gpt2' is not supported; supported: gemma2, gemma3"):
    load(path)
  (path / 'config.json').write_text('{')
  with pytest.raises(ValueError, match=r'config\.json is not JSON'):
    load(path)
  (path / 'config.json').write_text('[]')
  with pytest.raises(ValueError, match=r'config\.json: expected a JSON object, got list'):
    load(path)
  (path / 'config.json').unlink()
  with pytest.raises(FileNotFoundError, match=r'config\.json does not exist'):
    load(path)


# Export.


def test_export_refuses_what_it_cannot_write(tmp_path):
  params = make_params(LLAMA)
  adapted = lora.attach(params, transformer.declare(LLAMA), rank=2, alpha=4.0, targets=['q'], rank_stabilized=False, seed=0, mesh=mesh_of(),
                        layout=sharding.TRAIN)

  def refused(match, tree=params, config=LLAMA, **arguments):
    with pytest.raises(ValueError, match=match):
      hf_weights.export(tmp_path / 'm', config, tree, **({'dtype': 'float32'} | arguments))
    assert list(tmp_path.iterdir()) == []

  refused(r"\['blocks/attention/q'\] have adapters beside them \(LoraArray\); export lora\.merge\(params\)", adapted)
  refused(r"embedding: params \(64, 32\), model \(80, 32\)", config=ModelConfig('llama', **(SIZES | {'vocab_size': 80})))
  refused(r'blocks/0/attention/k: params \(32, 2, 16\), model None.*layers must be stacked',
          params | {'blocks': params_lib.unstack(params['blocks'])})
  refused("dtype='int4' of the exported weights", dtype='int4')
  refused('max_shard_bytes=0 must be positive', max_shard_bytes=0)
  refused('cannot express this model: post_norms=True would become False', make_params(ModelConfig('qwen3', **SIZES, post_norms=True)),
          ModelConfig('qwen3', **SIZES, post_norms=True))
  refused(r'lm_head\.weight has values that float16 cannot hold', params | {'head': params['head'] + 1e30}, dtype='float16')
  refused('the tokenizer has 261 ids but the model only 64', tokenizer=tokenizer_lib.load('byte'))


def test_export_writes_the_tokenizer_and_its_ids(tmp_path):
  config = ModelConfig('llama', **(SIZES | {'vocab_size': 300}))
  tokenizer = tokenizer_lib.load('byte')
  hf_weights.export(tmp_path / 'm', config, make_params(config), dtype='float32', tokenizer=tokenizer)
  table = json.loads((tmp_path / 'm' / 'config.json').read_text())
  assert table['bos_token_id'] == tokenizer.bos_id and table['pad_token_id'] == tokenizer.pad_id
  assert set(table['eos_token_id']) == set(tokenizer.stop_ids)
  assert tokenizer_lib.load(tmp_path / 'm').encode('hi') == tokenizer.encode('hi')


def test_a_directory_is_replaced_whole_or_not_at_all(saved, monkeypatch):
  path, _ = saved
  before = {file.name: file.read_bytes() for file in path.iterdir()}
  (path / 'notes.txt').write_text('mine')
  params = jax.tree.map(lambda x: x + 1, make_params(LLAMA))
  with pytest.raises(FileExistsError, match='exists and is not an empty directory; choose another, or say overwrite'):
    hf_weights.export(path, LLAMA, params, dtype='float32')

  written = []

  def fail_second(self, text, **arguments):
    written.append(self)
    raise OSError('disk full')

  with monkeypatch.context() as patch:
    patch.setattr(type(path), 'write_text', fail_second)
    with pytest.raises(OSError, match='disk full'):
      hf_weights.export(path, LLAMA, params, dtype='float32', overwrite=True)
  assert written
  assert {file.name for file in path.parent.iterdir()} == {'model'}
  assert (path / 'notes.txt').read_text() == 'mine'
  assert all((path / name).read_bytes() == data for name, data in before.items())

  hf_weights.export(path, LLAMA, params, dtype='float32', overwrite=True)
  assert {file.name for file in path.parent.iterdir()} == {'model'}
  assert not (path / 'notes.txt').exists()
  assert_same(load(path)[1], params)


def test_export_into_an_empty_directory(tmp_path):
  (tmp_path / 'm').mkdir()
  hf_weights.export(tmp_path / 'm', LLAMA, make_params(LLAMA), dtype='float32')
  assert weight_files.read_config(tmp_path / 'm') == LLAMA
  with pytest.raises(FileExistsError, match='exists and is not an empty directory'):
    hf_weights.export(tmp_path / 'm' / 'config.json', LLAMA, make_params(LLAMA), dtype='float32', overwrite=True)
