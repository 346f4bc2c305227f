"""Decoding against the teacher-forced forward pass, for every family and mesh; slots; and what the compiled step must not do."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decode, kv_cache, lora, sharding, transformer
from models import params as params_lib
from models.config import RopeConfig
from tests import tiny

LENGTH = 24
CHUNK = 8
PROMPTS = (1, 6, 9, 14)  # Nothing to prefill, one chunk, a token of the second, and beyond the window of 8.
LLAMA = {'activation': 'silu', 'norm_offset': 0.0, 'post_norms': False, 'qk_norm': False, 'scale_embeddings': False, 'tied_embeddings': False,
         'layer_pattern': ('global',), 'window': None, 'local_rope': None}
FAMILIES = {
    'llama': LLAMA | {'rope': RopeConfig(theta=1e4, scaling='llama3', factor=8.0, original_length=16)},
    'qwen2': LLAMA | {'qkv_bias': True, 'tied_embeddings': True},
    'qwen3': LLAMA | {'qk_norm': True},
    'mistral': LLAMA | {'layer_pattern': ('local',), 'window': 8},
    'gemma2': {'qk_norm': False, 'attention_softcap': 5.0, 'final_softcap': 3.0, 'local_rope': None},
    'gemma3': {},
}
MESHES = {'one': {}, 'fsdp': {'fsdp': 2}, 'tensor': {'tensor': 2}, 'data x tensor': {'data': 2, 'tensor': 2}}
LAYOUT = sharding.ROLLOUT


def make_mesh(name):
  sizes = MESHES[name]
  return sharding.make_mesh(**sizes, devices=jax.devices()[:math.prod(sizes.values())])


def make_params(config, mesh, layout):
  """Return random parameters of which none, norms and biases included, is at its initial value."""
  params = params_lib.init(transformer.declare(config), 0, mesh, layout)
  with jax.set_mesh(mesh):
    return jax.tree.map(lambda leaf: leaf + 0.1 * jnp.sin(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape, out_sharding=jax.typeof(leaf).sharding), params)


def make_tokens(config, rows=len(PROMPTS)):
  return np.random.default_rng(0).integers(0, config.vocab_size, (rows, LENGTH)).astype(np.int32)


@functools.partial(jax.jit, static_argnames=('config', 'layout'))
def all_logits(params, tokens_BT, config, layout):
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
  hidden_BTD, _ = transformer.forward(params, tokens_BT, positions_BT, jnp.ones_like(positions_BT), config, layout)
  return transformer.logits(params, hidden_BTD, config, layout)


@functools.cache
def forward_logits(family):
  config = tiny.config(**FAMILIES[family])
  mesh = make_mesh('one')
  with jax.set_mesh(mesh):
    return np.asarray(all_logits(make_params(config, mesh, sharding.TRAIN), make_tokens(config), config, sharding.TRAIN))


@functools.partial(jax.jit, static_argnames=('config', 'layout'))
def forced_logits(params, state, tokens_KB, config, layout):
  """Feed given tokens instead of drawn ones; returns the logits after each, logits_KBV."""

  def step(state, tokens_B):
    slots = state.slots.replace(tokens_B=sharding.constrain(tokens_B, layout, 'batch'))
    logits_BV, cache = decode.next_logits(params, state.replace(slots=slots), config, layout)
    return decode.DecodeState(cache, slots.replace(lengths_B=slots.lengths_B + 1)), logits_BV

  return jax.lax.scan(step, state, tokens_KB)[1]


def filled_state(params, config, layout, mesh, tokens, slots=(2, 0, 3, 1), prompts=PROMPTS):
  """Return a state that holds the prompts, each in its slot."""
  state = decode.empty_state(config, layout, mesh, len(prompts), LENGTH)
  before_last = np.array(prompts, np.int32) - 1
  contents = decode.empty_slots(len(prompts)).replace(
      tokens_B=tokens[np.arange(len(prompts)), before_last], lengths_B=before_last, limits_B=np.full(len(prompts), LENGTH - 1, np.int32),
      done_B=np.zeros(len(prompts), np.bool_), seeds_B=np.arange(len(prompts), dtype=np.uint32))
  with jax.set_mesh(mesh):
    cache = decode.prefill(params, tokens[:, :-(-max(before_last) // CHUNK) * CHUNK], before_last, config, layout, chunk=CHUNK,
                           max_length=LENGTH)
    return decode.insert(state, cache, np.array(slots, np.int32), np.arange(len(prompts), dtype=np.int32), contents, layout)


def check_against_forward(params, config, layout, mesh, tokens, wanted_BTV, prompts=PROMPTS):
  """Prefill the prompts, decode the rest of the tokens, and compare all logits."""
  slots = np.array([2, 0, 3, 1])
  state = filled_state(params, config, layout, mesh, tokens, slots, prompts)
  steps = LENGTH - max(prompts) + 1
  forced = np.zeros((steps, len(slots)), np.int32)
  for row, start in enumerate(prompts):
    forced[:, slots[row]] = tokens[row, start - 1:start - 1 + steps]
  with jax.set_mesh(mesh):
    got_KBV = np.asarray(forced_logits(params, state, forced, config, layout))
  for row, start in enumerate(prompts):
    np.testing.assert_allclose(got_KBV[:, slots[row]], wanted_BTV[row, start - 1:start - 1 + steps], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('mesh_name', MESHES)
@pytest.mark.parametrize('family', FAMILIES)
def test_decoding_equals_the_forward_pass(family, mesh_name):
  config = tiny.config(**FAMILIES[family])
  mesh = make_mesh(mesh_name)
  trained = make_params(config, mesh, sharding.TRAIN)
  params = decode.decode_params(trained, config, LAYOUT, mesh)
  check_against_forward(params, config, LAYOUT, mesh, make_tokens(config), forward_logits(family))
