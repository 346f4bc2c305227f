"""Every family against transformers (torch, CPU, eager attention, float32): random tiny models, written by transformers, read by us."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention, hf_weights, presets, rope, sharding, transformer

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

LENGTH, PADDED, WINDOW = 40, 25, 8
DOCUMENTS = (17, 23)
SIZES = {
    'vocab_size': 96, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 4,
    'num_key_value_heads': 2, 'head_dim': 16, 'max_position_embeddings': 64,
    'pad_token_id': None, 'bos_token_id': None, 'eos_token_id': None}
# The original length is short, so that scaling shows within LENGTH.
LINEAR = {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 4.0}
DYNAMIC = {'rope_type': 'dynamic', 'rope_theta': 1e4, 'factor': 2.0}
LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 16, 'low_freq_factor': 1.0,
          'high_freq_factor': 4.0}
YARN = {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 16}
FULL, SLIDING = 'full_attention', 'sliding_attention'
CASES = {
    'llama': ('llama', {}),
    'llama-linear': ('llama', {'rope_parameters': LINEAR}),
    'llama-dynamic': ('llama', {'rope_parameters': DYNAMIC, 'max_position_embeddings': 16}),
    'llama-llama3': ('llama', {'rope_parameters': LLAMA3, 'tie_word_embeddings': True}),
    'mistral-window': ('mistral', {'sliding_window': WINDOW}),
    'qwen2-yarn': ('qwen2', {'rope_parameters': YARN, 'use_sliding_window': True, 'sliding_window': WINDOW, 'max_window_layers': 1}),
    'qwen3': ('qwen3', {'head_dim': 24, 'num_attention_heads': 2, 'num_key_value_heads': 1}),
    'gemma2': ('gemma2', {
        'sliding_window': WINDOW, 'query_pre_attn_scalar': 40, 'attn_logit_softcapping': 5.0, 'final_logit_softcapping': 3.0}),
    'gemma3-dual': ('gemma3_text', {
        'sliding_window': WINDOW, 'num_hidden_layers': 3, 'layer_types': [SLIDING, FULL, SLIDING],
        'rope_parameters': {FULL: LINEAR | {'rope_theta': 1e6}, SLIDING: {'rope_type': 'default', 'rope_theta': 1e4}}}),
}


def randomize(model):
  """Give every parameter values at which each part of the model shows in the logits."""
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for name, value in model.named_parameters():
      noise = torch.randn(value.shape, generator=generator)
      if value.ndim == 2:
        value.copy_(noise * (1.0 if 'embed' in name else 1.5 * value.shape[1] ** -0.5))
      else:
        value.add_(0.3 * noise)


def build(case: str):
  model_type, changes = CASES[case]
  config = transformers.AutoConfig.for_model(model_type, **(SIZES | changes))
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager', dtype=torch.float32).eval()
  randomize(model)
  return model


@pytest.fixture(scope='module', params=CASES)
def pair(request, tmp_path_factory):
  """Return a torch model and the same model as (config, params, mesh) after a round through its files."""
  model = build(request.param)
  path = tmp_path_factory.mktemp(request.param)
  model.save_pretrained(path)
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  context_length = LENGTH if 'dynamic' in request.param else None
  config, params = hf_weights.load(path, mesh, sharding.TRAIN, context_length=context_length)
  return request.param, model, config, params, mesh


def rows():
  """Return tokens, positions and segment ids [4, LENGTH]: full, padded on the right, padded on the left, two documents packed."""
  tokens = np.random.default_rng(0).integers(1, 96, (4, LENGTH))
  positions = np.tile(np.arange(LENGTH), (4, 1))
  segments = np.ones((4, LENGTH), int)
  segments[1, PADDED:] = 0
  segments[2, :-PADDED] = 0
  positions[2] = np.maximum(np.arange(LENGTH) - (LENGTH - PADDED), 0)
  positions[3] = np.concatenate([np.arange(size) for size in DOCUMENTS])
  segments[3] = np.repeat([1, 2], DOCUMENTS)
  return tokens, positions, segments


def theirs(model, tokens, positions=None, mask=None):
  arguments = {name: torch.tensor(value) for name, value in (('position_ids', positions), ('attention_mask', mask)) if value is not None}
  with torch.no_grad():
    return model(torch.tensor(tokens), use_cache=False, **arguments).logits.numpy()


def agree(ours, wanted):
  """Check 1e-4 of the typical logit, at every logit."""
  assert np.abs(ours - wanted).max() <= 1e-4 * np.sqrt(np.mean(wanted**2)), np.abs(ours - wanted).max()


def test_logits_agree_with_transformers(pair):
  case, model, config, params, mesh = pair
  tokens, positions, segments = rows()

  @jax.jit
  def run(params, tokens, positions, segments):
    hidden, _ = transformer.forward(params, tokens, positions, segments, config, sharding.TRAIN)
    return transformer.logits(params, hidden, config, sharding.TRAIN)

  with jax.set_mesh(mesh):
    ours = np.asarray(run(params, *(jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments))))
  assert np.all(np.isfinite(ours))
  # All rows in one call, so that dynamic RoPE sees one length.
  whole = theirs(model, tokens[:3], positions[:3], segments[:3])
  agree(ours[0], whole[0])
  agree(ours[1, :PADDED], whole[1, :PADDED])
  agree(ours[2, -PADDED:], whole[2, -PADDED:])
  if 'dynamic' not in case:
    start = 0
    for size in DOCUMENTS:
      agree(ours[3, start:start + size], theirs(model, tokens[3:, start:start + size])[0])
      start += size


def test_window_and_packing_show_in_these_rows():
  """The comparison above would miss a wrong window if rows were shorter than one."""
  assert min(PADDED, *DOCUMENTS) > 2 * WINDOW
  tokens, positions, segments = rows()
  seen = np.asarray(attention.visible(positions[:, :, None], positions[:, None], segments[:, :, None], segments[:, None], WINDOW))
  assert seen[0].sum(1).max() == WINDOW
  assert not seen[3, DOCUMENTS[0]:, :DOCUMENTS[0]].any()
  assert not seen[2, :LENGTH - PADDED].any()


@pytest.mark.parametrize('table', [
    LINEAR, DYNAMIC, LLAMA3, YARN, LLAMA3 | {'low_freq_factor': 2.0, 'high_freq_factor': 3.0, 'rope_theta': 5e5},
    YARN | {'beta_fast': 8.0, 'beta_slow': 2.0}, YARN | {'truncate': False}, YARN | {'attention_factor': 0.7},
    YARN | {'mscale': 0.8, 'mscale_all_dim': 1.3}, YARN | {'factor': 1.0},
    YARN | {'original_max_position_embeddings': 4096, 'factor': 40.0}, {'rope_type': 'default', 'rope_theta': 5e5}], ids=str)
def test_frequencies_agree_with_transformers(table):
  from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

  config = transformers.LlamaConfig(**(SIZES | {'head_dim': 64, 'max_position_embeddings': 32, 'rope_parameters': dict(table)}))
  ours = presets.from_hf(config.to_dict(), context_length=100)
  frequencies, factor = rope.inverse_frequencies(ours.rope, 64)
  if table['rope_type'] == 'default':
    wanted, wanted_factor = 5e5 ** -(np.arange(0, 64, 2) / 64), 1.0
  else:
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[table['rope_type']](config, seq_len=100)
  np.testing.assert_allclose(frequencies, np.asarray(wanted), rtol=3e-6)
  assert factor == pytest.approx(wanted_factor, rel=1e-6)


def test_config_survives_to_hf_and_back(pair):
  _, model, config, _, _ = pair
  table = presets.to_hf(config, 'float32')
  back = presets.from_hf(transformers.AutoConfig.for_model(**table).to_dict())
  if config.rope.scaling == 'ntk':
    # Static NTK is written as the base that it amounts to.
    assert np.allclose(*(rope.inverse_frequencies(x.rope, x.head_dim)[0] for x in (config, back)), rtol=1e-12)
    back = dataclasses.replace(back, rope=config.rope)
  assert back == config
