"""A cache split over devices: attention against float64, decoding against the forward pass, who keeps what, and what a step sends."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decode, kv_cache, sharding
from models import params as params_lib
from tests import tiny
from tests.models import test_decode
from tests.models.test_decode import CHUNK, LENGTH, PROMPTS

LONG = sharding.LONG_ROLLOUT


def make_mesh(**sizes):
  return sharding.make_mesh(**sizes, devices=jax.devices()[:math.prod(sizes.values())])


def reference(q_TNH, k_SKH, v_SKH, sinks_N, cap, window):
  """Return attention in float64 of the last T of S tokens, one row."""
  num_tokens, num_heads, width = q_TNH.shape
  k, v = (np.repeat(np.asarray(x, np.float64), num_heads // x.shape[1], axis=1) for x in (k_SKH, v_SKH))
  scores = np.einsum('tnh,snh->nts', np.asarray(q_TNH, np.float64), k) / np.sqrt(width)
  scores = scores if cap is None else cap * np.tanh(scores / cap)
  back = np.arange(len(k) - num_tokens, len(k))[:, None] - np.arange(len(k))
  scores = np.where((back >= 0) & (back < (window or len(k))), scores, -np.inf)
  sinks = np.full((num_heads, num_tokens, 1), -np.inf) if sinks_N is None else np.broadcast_to(sinks_N[:, None, None], (num_heads, num_tokens, 1))
  scores = np.concatenate([scores, sinks], axis=-1)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum('nts,snh->tnh', (weights / weights.sum(-1, keepdims=True))[..., :-1], v)


@functools.partial(jax.jit, static_argnames=('config', 'layout', 'kind', 'chunk'))
def attend_all(q_BTNH, k_BTKH, v_BTKH, last_B1, sinks_N, lengths_B, config, layout, kind, chunk):
  """Prefill tokens in chunks as `decode.prefill` does; then decode one token of each row, and return what both gave."""
  shards, total = kv_cache.num_shards(layout, sharding.current_mesh()), q_BTNH.shape[1]
  split = dataclasses.replace(layout, rules=tuple((dict(layout.rules) | {'length': kv_cache.axes(layout)}).items()))
  cache = kv_cache.empty(config, layout, q_BTNH.shape[0], total)[0]
  lengths_B = sharding.constrain(lengths_B, layout, 'batch')
  sinks_N = None if sinks_N is None else sharding.constrain(sinks_N, layout, 'act_heads')
  outs = []

  def place(x, spec_layout, heads):
    return jax.reshard(x, spec_layout.spec('batch', 'length', heads, None))

  def dealt(x):
    return jnp.swapaxes(x.reshape(x.shape[0], -1, shards, *x.shape[2:]), 1, 2).reshape(x.shape)

  for start in range(0, total, chunk):
    attend = kv_cache.attend_chunk(jnp.int32(start), lengths_B, start == 0, config, split)
    q, k, v = (dealt(x[:, start:start + chunk]) for x in (q_BTNH, k_BTKH, v_BTKH))
    out, cache = attend(place(q, split, 'act_heads'), place(k, split, 'kv_heads'), place(v, split, 'kv_heads'), kind, cache, sinks_N)
    out = jax.reshard(out, layout.spec('batch', None, 'act_heads', None))
    outs.append(jnp.swapaxes(out.reshape(out.shape[0], shards, -1, *out.shape[2:]), 1, 2).reshape(out.shape))
  attend = kv_cache.attend_token(lengths_B, config, layout)
  q, k, v = last_B1
  token, _ = attend(place(q, layout, 'act_heads'), place(k, layout, 'kv_heads'), place(v, layout, 'kv_heads'), kind, cache, sinks_N)
  return jnp.concatenate(outs, axis=1), token[:, 0]


@pytest.mark.parametrize(('sizes', 'kind', 'chunk', 'cap', 'has_sinks', 'factor'), [
    ({}, 'global', 12, None, True, 1.0),
    ({'seq': 2}, 'global', 24, 5.0, False, 1.0),
    ({'seq': 3}, 'global', 6, None, True, 1.0),
    ({'seq': 2, 'ulysses': 2, 'tensor': 2}, 'global', 8, 3.0, True, 1.0),
    ({'seq': 8}, 'global', 8, None, True, 1e4),  # EasyContext#14: scores of +-1e4 overflow a merge that is not shifted.
    ({'seq': 4}, 'local', 8, None, True, 1.0),
])
def test_attention_in_chunks_and_by_token_equals_float64(sizes, kind, chunk, cap, has_sinks, factor):
  """Rows of 23 tokens, which no share divides, of 5, which not every device has some of, and of none."""
  lengths, total = np.array([23, 5, 0, 16], np.int32), 24
  config = tiny.config(num_layers=1, attention_softcap=cap, layer_pattern=(kind,), window=7)
  rng = np.random.default_rng(0)
  q, k, v = (rng.standard_normal((4, total, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
  q *= factor
  sinks_N = 2 * rng.standard_normal(4).astype(np.float32) if has_sinks else None
  with jax.set_mesh(make_mesh(**sizes)):
    last = tuple(x[np.arange(4), lengths][:, None] for x in (q, k, v))
    chunks, token = jax.device_get(attend_all(q, k, v, last, sinks_N, lengths, config, LONG, kind, chunk))
  window = config.layer_window(kind)
  for row, length in enumerate(lengths):
    wanted = reference(q[row, :length + 1], k[row, :length + 1], v[row, :length + 1], sinks_N, cap, window)
    np.testing.assert_allclose(chunks[row, :length], wanted[:-1], atol=1e-6 * max(factor / 10, 1))
    np.testing.assert_allclose(token[row], wanted[-1], atol=1e-6 * max(factor / 10, 1))


MODELS = {
    'gemma2 with sinks': ({'seq': 4}, test_decode.FAMILIES['gemma2'] | {'attention_sinks': True}),
    'gemma3': ({'data': 2, 'seq': 2, 'ulysses': 2}, {}),
    'kv heads whole over tensor': ({'seq': 3, 'tensor': 2}, test_decode.LLAMA | {'num_kv_heads': 1}),
}


@pytest.mark.parametrize('name', MODELS)
def test_decoding_with_a_split_cache_equals_the_forward_pass_and_a_whole_cache(name):
  """The longest prompt has 14 tokens and decoding goes to 24, of which a device keeps at most 12."""
  sizes, changes = MODELS[name]
  config, one, mesh = tiny.config(**changes), make_mesh(), make_mesh(**sizes)
  tokens = test_decode.make_tokens(config)
  with jax.set_mesh(one):
    wanted = np.asarray(test_decode.all_logits(test_decode.make_params(config, one, sharding.TRAIN), tokens, config, sharding.TRAIN))

  def logits(layout, mesh):
    layout = params_lib.replicate_indivisible(layout, mesh, config.num_kv_heads)
    params = decode.decode_params(test_decode.make_params(config, mesh, layout), config, layout, mesh)
    chunk = -(-CHUNK // kv_cache.num_shards(layout, mesh)) * kv_cache.num_shards(layout, mesh)
    with jax.set_mesh(mesh):
      state = filled_state(params, config, layout, mesh, tokens, chunk)
      return np.asarray(test_decode.forced_logits(params, state, forced(tokens), config, layout))

  split_KBV, whole_KBV = logits(LONG, mesh), logits(sharding.ROLLOUT, one)
  for row, start in enumerate(PROMPTS):
    bound = 1e-5 * np.abs(wanted[row]).max()
    np.testing.assert_allclose(split_KBV[:, row], wanted[row, start - 1:start + 10], atol=bound, rtol=1e-5)
    np.testing.assert_allclose(split_KBV[:, row], whole_KBV[:, row], atol=bound, rtol=1e-5)


def forced(tokens):
  return np.stack([tokens[row, start - 1:start + 10] for row, start in enumerate(PROMPTS)], axis=1)


def filled_state(params, config, layout, mesh, tokens, chunk):
  """Return a state whose slots hold the prompts; call under the mesh."""
  before_last = np.array(PROMPTS, np.int32) - 1
  contents = decode.empty_slots(4).replace(tokens_B=tokens[np.arange(4), before_last], lengths_B=before_last,
                                           limits_B=np.full(4, LENGTH - 1, np.int32), done_B=np.zeros(4, np.bool_))
  state = decode.empty_state(config, layout, mesh, 4, LENGTH)
  padded = np.pad(tokens[:, :14], ((0, 0), (0, -14 % chunk)))
  cache = decode.prefill(params, padded, before_last, config, layout, chunk=chunk, max_length=LENGTH)
  rows = np.arange(4, dtype=np.int32)
  return decode.insert(state, cache, rows, rows, contents, layout)


@pytest.fixture(scope='module')
def model():
  """A local and a global layer over four devices, two rows each: (config, params, mesh)."""
  config, mesh = tiny.config(), make_mesh(data=2, seq=4)
  return config, decode.decode_params(test_decode.make_params(config, mesh, LONG), config, LONG, mesh), mesh


def test_devices_keep_equal_shares_of_every_sequence(model):
  """Device i of 4 keeps tokens i, 4 + i, ... of a row, in places 0, 1, ...; what a slot holds does not depend on which slot it is."""
  config, params, mesh = model
  tokens = test_decode.make_tokens(config)
  one = make_mesh()
  with jax.set_mesh(mesh):
    split = filled_state(params, config, LONG, mesh, tokens, CHUNK).cache
  with jax.set_mesh(one):
    whole_params = decode.decode_params(test_decode.make_params(config, one, LONG), config, sharding.ROLLOUT, one)
    whole = filled_state(whole_params, config, sharding.ROLLOUT, one, tokens, CHUNK).cache
  (local, _), (keys, _) = split
  # Four rows of two heads of 16 float32: a quarter of 24 tokens of two rows a device; the window of 8 as a whole.
  assert {shard.data.shape for shard in keys.addressable_shards} == {(2, 2, 6, 16)}
  assert {shard.data.nbytes for shard in keys.addressable_shards} == {whole[1][0].nbytes // 8}
  assert {shard.data.shape for shard in local.addressable_shards} == {(2, 2, 8, 16)}
  wanted = np.asarray(whole[1][0])
  for device, shard in zip(mesh.devices.reshape(2, 4)[0], sorted(keys.addressable_shards, key=lambda shard: shard.device.id)[:4], strict=True):
    assert shard.device == device
    index = list(mesh.devices.reshape(2, 4)[0]).index(device)
    for row in range(2):
      held = range(index, PROMPTS[row] - 1, 4)
      np.testing.assert_allclose(np.asarray(shard.data)[row, :, :len(held)], wanted[row][:, list(held)], atol=1e-5)
      assert not np.asarray(shard.data)[row, :, len(held):].any()


def collectives(hlo):
  """Return (operation, shape) of each collective of a program."""
  made = re.findall(r'= \(?(\w+\[[\d,]*\])\S* (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)(?:-start)?\(', hlo)
  return sorted((operation, shape) for shape, operation in made)


def test_a_step_sends_two_small_sums_a_layer_and_writes_the_cache_once():
  """Hq (D + 2) float32 values a layer and row: the maxima, then the values with their weight; the keys and values stay where they are."""
  config, mesh = tiny.config(layer_pattern=('global',), num_layers=2, num_heads=8, num_kv_heads=2, head_dim=16, vocab_size=64), make_mesh(seq=8)
  params = decode.decode_params(test_decode.make_params(config, mesh, LONG), config, LONG, mesh)
  with jax.set_mesh(mesh):
    state = decode.empty_state(config, LONG, mesh, 3, 8 * 512)
    given = np.full((2, 3), -1, np.int32), np.full(3, -1, np.int32), np.array([-1], np.int32)
    hlo = decode.decode_many.lower(params, state, *given, config, LONG).compile().as_text()
  assert collectives(hlo) == [('all-reduce', 'f32[3,2,4,17]')] * 2 + [('all-reduce', 'f32[3,2,4]')] * 2
  assert test_decode.big_results(hlo, 3 * 2 * 512 * 16) == ['f32[3,2,512,16]'] * 4


def test_a_chunk_of_a_prompt_costs_a_device_its_share():
  """Queries travel and what they find, as many as the chunk has; memory grows with a device's share, by one layer's at a time."""
  config, mesh = tiny.config(num_layers=2, layer_pattern=('global',)), make_mesh(seq=8)
  params = decode.decode_params(test_decode.make_params(config, mesh, LONG), config, LONG, mesh)

  def compiled(length):
    with jax.set_mesh(mesh):
      cache = jax.jit(functools.partial(kv_cache.empty, config, LONG, 1, length))()
      arguments = (params, cache, np.zeros((1, 64), np.int32), np.int32(64), np.array([100], np.int32), config, LONG, length)
      return decode._prefill_chunk.lower(*arguments).compile()

  short, long = compiled(8 * 1024), compiled(8 * 4096)
  # Of one layer: what the last one attends to decides nothing that is kept, and is not computed.
  assert collectives(long.as_text()) == [('all-gather', 'f32[1,64,4,16]'), ('all-reduce', 'f32[1,64,2,2,17]'), ('all-reduce', 'f32[1,64,2,2]')]
  more, less = long.memory_analysis(), short.memory_analysis()
  layer_bytes = 2 * 3 * 1024 * config.num_kv_heads * config.head_dim * 4
  assert more.argument_size_in_bytes - less.argument_size_in_bytes == 2 * layer_bytes
  assert more.temp_size_in_bytes - less.temp_size_in_bytes <= 1.25 * layer_bytes


def test_the_layout_of_decoding_follows_that_of_training():
  mesh = make_mesh(data=2, seq=2, ulysses=2)
  assert decode.rollout_layout(sharding.TRAIN, mesh) == LONG
  assert decode.rollout_layout(sharding.TRAIN, make_mesh(data=2, fsdp=2)) == sharding.ROLLOUT
  assert decode.rollout_layout(dataclasses.replace(sharding.TRAIN, compute_dtype='bfloat16'), mesh).compute_dtype == 'bfloat16'
  over_fsdp = dataclasses.replace(sharding.TRAIN, rules=tuple((dict(sharding.TRAIN.rules) | {'batch': ('data',), 'length': ('fsdp',)}).items()))
  layout = decode.rollout_layout(over_fsdp, make_mesh(fsdp=4))
  assert kv_cache.axes(layout) == ('fsdp',)
  assert kv_cache.num_shards(layout, make_mesh(fsdp=4)) == 4
  decode.check(tiny.config(), layout, make_mesh(fsdp=4))


def test_what_a_split_cache_refuses(model):
  config, params, mesh = model
  with jax.set_mesh(mesh):
    for tokens, chunk in ((8, 6), (6, 8), (12, 8)):
      with pytest.raises(ValueError, match=f'{tokens} tokens in chunks of {chunk} do not divide over the 4 devices') as error:
        decode.prefill(params, np.zeros((2, tokens), np.int32), np.ones(2, np.int32), config, LONG, chunk=chunk, max_length=LENGTH)
      assert 'pad them to a multiple of the chunk' in str(error.value)
  with pytest.raises(ValueError, match=r"layout.attention='dense' attends to whole rows, but layout.rules split 'cache'"):
    decode.check(config, dataclasses.replace(LONG, attention='dense'), mesh)
  twice = dataclasses.replace(LONG, rules=tuple((dict(LONG.rules) | {'batch': ('data', 'seq')}).items()))
  with pytest.raises(ValueError, match='layout.rules put one mesh axis twice'):
    decode.empty_state(config, twice, mesh, 2, LENGTH)
