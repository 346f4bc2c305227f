"""Adapters as PEFT's files: `peft` over the model in transformers computes what we compute, and merges to what we merge."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models import adapter_files, hf_weights, lora, sharding, transformer
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from tests.models.test_hf_weights import CONFIGS, make_params, mesh_of

LENGTH = 12


def attached(config, *, rank=3, alpha=6.0, targets=lora.TARGETS, rank_stabilized=True):
  """Return a model with adapters that change what it computes."""
  mesh = mesh_of()
  params = jax.tree.map(lambda leaf: 0.3 * leaf, make_params(config))
  tree = lora.attach(params, transformer.declare(config), rank=rank, alpha=alpha, targets=targets, rank_stabilized=rank_stabilized, seed=1,
                     mesh=mesh, layout=sharding.TRAIN)
  rng = np.random.default_rng(1)
  return params, params_lib.map_named(
      lambda name, leaf: jnp.asarray(0.2 * rng.standard_normal(leaf.shape, np.float32)) if name.endswith('/b') else leaf, tree)


def logits(config, tree):
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH)).astype(np.int32)
  positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)

  @jax.jit
  def run(tree, tokens, positions, segments):
    hidden, _ = transformer.forward(tree, tokens, positions, segments, config, sharding.TRAIN)
    return transformer.logits(tree, hidden, config, sharding.TRAIN)

  with jax.set_mesh(mesh_of()):
    return tokens, np.asarray(run(tree, *map(jnp.asarray, (tokens, positions, np.ones_like(tokens)))))


def with_peft(base, adapter):
  transformers, peft = pytest.importorskip('transformers'), pytest.importorskip('peft')
  torch = pytest.importorskip('torch')
  model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation='eager').eval()
  return torch, peft.PeftModel.from_pretrained(model, adapter)


@pytest.mark.filterwarnings('ignore:`is_gradient_checkpointing` is deprecated')  # Between peft and transformers.
@pytest.mark.parametrize('family', CONFIGS)
def test_peft_computes_and_merges_as_we_do(family, tmp_path):
  config = CONFIGS[family]
  params, tree = attached(config)
  hf_weights.export(tmp_path / 'base', config, params, dtype='float32')
  count = adapter_files.export(tmp_path / 'adapter', config, tree, base=str(tmp_path / 'base'), rank_stabilized=True)
  assert count == sum(leaf.size for name, leaf in params_lib.named_leaves(tree) if lora.is_trainable(name))
  torch, model = with_peft(tmp_path / 'base', tmp_path / 'adapter')
  tokens, wanted = logits(config, tree)
  with torch.no_grad():
    got = model(torch.from_numpy(tokens).long()).logits.numpy()
    alone = model.get_base_model()
    with model.disable_adapter():
      base = alone(torch.from_numpy(tokens).long()).logits.numpy()
  assert np.abs(base - wanted).max() > 0.05
  np.testing.assert_allclose(got, wanted, atol=1e-4)
  # Merged, every tensor is that of our merged model.
  with jax.set_mesh(mesh_of()):
    hf_weights.export(tmp_path / 'merged', config, lora.merge(tree), dtype='float32')
  theirs, ours = model.merge_and_unload().state_dict(), load_file(tmp_path / 'merged' / 'model.safetensors')
  assert all(name in theirs for name in ours)
  for name, tensor in ours.items():
    np.testing.assert_allclose(theirs[name].numpy(), tensor, atol=1e-5, err_msg=name)


def test_names_shapes_and_settings_by_hand(tmp_path):
  config = CONFIGS['llama']
  _, tree = attached(config, rank=4, alpha=8.0, targets=('q', 'down'), rank_stabilized=False)
  adapter_files.export(tmp_path / 'a', config, tree, base='some/model', rank_stabilized=False, dtype='bfloat16',
                       tokenizer=tokenizer_lib.load('byte'))
  table = json.loads((tmp_path / 'a' / 'adapter_config.json').read_text())
  assert {key: table[key] for key in ('peft_type', 'r', 'lora_alpha', 'use_rslora', 'target_modules', 'base_model_name_or_path')} == {
      'peft_type': 'LORA', 'r': 4, 'lora_alpha': 8, 'use_rslora': False, 'target_modules': ['down_proj', 'q_proj'],
      'base_model_name_or_path': 'some/model'}
  tensors = load_file(tmp_path / 'a' / 'adapter_model.safetensors')
  assert len(tensors) == 2 * 2 * config.num_layers
  lora_a = tensors['base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight']
  assert lora_a.shape == (4, 32) and lora_a.dtype == 'bfloat16'
  np.testing.assert_array_equal(lora_a, np.asarray(tree['blocks']['attention']['q'].a[2].astype('bfloat16')).T)
  lora_b = tensors['base_model.model.model.layers.0.mlp.down_proj.lora_B.weight']
  np.testing.assert_array_equal(lora_b, np.asarray(tree['blocks']['mlp']['down'].b[0].astype('bfloat16')).T)
  assert tokenizer_lib.load(tmp_path / 'a').encode('one') == tokenizer_lib.load('byte').encode('one')


def test_scales_agree_under_either_formula(tmp_path):
  _, tree = attached(CONFIGS['llama'], rank=4, alpha=6.5, targets=('q',))
  for rank_stabilized, alpha in ((True, 6.5), (False, 13)):
    adapter_files.export(tmp_path / f'{alpha}', CONFIGS['llama'], tree, base='b', rank_stabilized=rank_stabilized)
    assert json.loads((tmp_path / f'{alpha}' / 'adapter_config.json').read_text())['lora_alpha'] == alpha


def test_bad_input_is_refused_and_leaves_nothing(tmp_path):
  config = CONFIGS['llama']
  params, tree = attached(config, targets=('q', 'k'))

  def refused(message, tree, config=config, **changes):
    with pytest.raises(ValueError, match=message):
      adapter_files.export(tmp_path / 'a', config, tree, **({'base': 'b', 'rank_stabilized': True} | changes))

  refused('the tree holds no adapters .LoraArray.: it was trained whole, or they are merged; export the model itself', params)
  refused(r"dtype='int8' of the exported adapters is unknown; use one of \('float32'", tree, dtype='int8')
  refused('not those of this qwen3 configuration: .*blocks/attention/q', jax.tree.map(lambda leaf: leaf[:2], tree), CONFIGS['qwen3'])
  one = tree['blocks']['attention']['q']
  refused(r'several ranks and scales \[\(3, 1\.0\), \(3, 3', {**tree, 'again': one.replace(scale=1.0)})
  broken = params_lib.map_named(lambda name, leaf: leaf * np.nan if name.endswith('k/b') else leaf, tree)
  refused('layers.0.self_attn.k_proj.lora_B.weight has values that are not finite in float32', broken)
  assert not any(tmp_path.iterdir())
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / 'precious').write_text('')
  with pytest.raises(FileExistsError, match='is not an empty directory'):
    adapter_files.export(tmp_path / 'a', config, tree, base='b', rank_stabilized=True)
  assert (tmp_path / 'a' / 'precious').exists()
