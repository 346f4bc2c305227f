"""Decoding against the teacher-forced forward pass, for every family and mesh; slots; and what the compiled step must not do."""

import dataclasses
import functools
import math
import os
from pathlib import Path
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decode, kv_cache, lora, sharding, transformer
from models import params as params_lib
from models.config import RopeConfig
from models.params import ParamSpec
from tests import tiny

LENGTH = 24
CHUNK = 8
PROMPTS = (1, 6, 9, 14)  # Nothing to prefill, one chunk, a token of the second, and beyond the window of 8.
LLAMA = {'activation': 'silu', 'norm_offset': 0.0, 'post_norms': False, 'qk_norm': False, 'scale_embeddings': False,
         'tied_embeddings': False, 'layer_pattern': ('global',), 'window': None, 'local_rope': None}
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
  rng = np.random.default_rng(0)
  specs = transformer.declare(config)

  def leaf(spec, place):
    scale = math.prod(spec.shape[dim] for dim in spec.inputs) ** -0.5 if spec.inputs else 0.2
    return jax.device_put((scale * rng.standard_normal(spec.shape) + (spec.init == 'ones')).astype(np.float32), place)

  return jax.tree.map(leaf, specs, params_lib.spec_shardings(specs, mesh, layout), is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


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


@pytest.mark.parametrize(('family', 'mesh_name'), [
    *((family, 'one') for family in FAMILIES), *((family, 'data x tensor') for family in ('llama', 'qwen2', 'gemma2', 'gemma3')),
    ('gemma3', 'fsdp'), ('gemma3', 'tensor')])
def test_decoding_equals_the_forward_pass(family, mesh_name):
  config = tiny.config(**FAMILIES[family])
  mesh = make_mesh(mesh_name)
  trained = make_params(config, mesh, sharding.TRAIN)
  params = decode.decode_params(trained, config, LAYOUT, mesh)
  check_against_forward(params, config, LAYOUT, mesh, make_tokens(config), forward_logits(family))


def test_kv_heads_that_do_not_divide_over_tensor():
  """Four devices have a query head each, and two of them share a kv head."""
  config = tiny.config(num_kv_heads=2)
  one, split = make_mesh('one'), sharding.make_mesh(tensor=4, devices=jax.devices()[:4])
  with jax.set_mesh(one):
    wanted = np.asarray(all_logits(make_params(config, one, sharding.TRAIN), make_tokens(config), config, sharding.TRAIN))
  train, layout = (params_lib.replicate_indivisible(layout, split, config.num_kv_heads) for layout in (sharding.TRAIN, LAYOUT))
  params = decode.decode_params(make_params(config, split, train), config, layout, split)
  check_against_forward(params, config, layout, split, make_tokens(config), wanted)


def test_adapters_decode_as_they_train():
  config, mesh = tiny.config(), make_mesh('data x tensor')
  attached = lora.attach(make_params(config, mesh, sharding.TRAIN), transformer.declare(config), rank=3, alpha=6.0,
                         targets=('q', 'o', 'down'), rank_stabilized=False, seed=0, mesh=mesh, layout=sharding.TRAIN)
  rng = np.random.default_rng(1)

  def trained(name, leaf):
    return jax.device_put(0.3 * rng.standard_normal(leaf.shape).astype(np.float32), leaf.sharding) if name.endswith('/b') else leaf

  attached = params_lib.map_named(trained, attached)
  tokens = make_tokens(config)
  with jax.set_mesh(mesh):
    wanted = np.asarray(all_logits(attached, tokens, config, sharding.TRAIN))
  assert np.abs(wanted - forward_logits('gemma3')).max() > 0.1
  check_against_forward(decode.decode_params(attached, config, LAYOUT, mesh), config, LAYOUT, mesh, tokens, wanted)


def test_blockwise_prefill_equals_dense():
  """The same prompts by the kernel for long contexts, in one launch and in chunks."""
  config, mesh = tiny.config(attention_softcap=5.0), make_mesh('one')
  params = decode.decode_params(make_params(config, mesh, LAYOUT), config, LAYOUT, mesh)
  tokens, lengths = make_tokens(config)[:, :16], np.array([16, 3, 0, 9], np.int32)

  def prefill(kernel, chunk):
    layout = dataclasses.replace(LAYOUT, attention=kernel)
    with jax.set_mesh(mesh):
      return decode.prefill(params, tokens, lengths, config, layout, chunk=chunk, max_length=LENGTH)

  def held(cache):
    """Return keys and values of each layer in the order of positions, those that are held."""
    for layer in cache:
      places = layer[0].shape[2]
      for row, length in enumerate(lengths):
        positions = np.arange(max(0, length - config.window), length)
        yield [np.asarray(x)[row, :, positions % places] for x in layer]

  wanted = list(held(prefill('dense', 16)))
  for kernel, chunk in (('dense', 8), ('blockwise', 8), ('blockwise', 16)):
    for got, reference in zip(held(prefill(kernel, chunk)), wanted, strict=True):
      np.testing.assert_allclose(got, reference, atol=1e-5, err_msg=f'{kernel} {chunk}')


def test_a_bfloat16_cache(monkeypatch):
  """What accelerators keep; against the float32 forward pass, so within what bfloat16 resolves."""
  config, mesh = tiny.config(), make_mesh('one')
  layout = dataclasses.replace(LAYOUT, compute_dtype='bfloat16')
  monkeypatch.setattr(kv_cache, 'dtype', lambda layout: layout.dtype)
  params = decode.decode_params(make_params(config, mesh, LAYOUT), config, layout, mesh)
  state = filled_state(params, config, layout, mesh, make_tokens(config), slots=(0, 1, 2, 3))
  assert {x.dtype for x in jax.tree.leaves(state.cache)} == {jnp.dtype('bfloat16')}
  forced = np.stack([make_tokens(config)[row, start - 1:start + 9] for row, start in enumerate(PROMPTS)], axis=1)
  with jax.set_mesh(mesh):
    got_KBV = np.asarray(forced_logits(params, state, forced, config, layout))
  for row, start in enumerate(PROMPTS):
    wanted_KV = forward_logits('gemma3')[row, start - 1:start + 9]
    assert np.abs(got_KBV[:, row] - wanted_KV).max() < 0.05 * np.abs(wanted_KV).max()


def test_places_of_a_ring_by_hand():
  lengths = jnp.array([0, 1, 4, 5, 10])
  assert kv_cache.held_positions(lengths, 4).tolist() == [
      [-4, -3, -2, -1], [0, -3, -2, -1], [0, 1, 2, 3], [4, 1, 2, 3], [8, 9, 6, 7]]


@pytest.fixture(scope='module')
def gemma3():
  config, mesh = tiny.config(), make_mesh('one')
  return config, mesh, decode.decode_params(make_params(config, mesh, LAYOUT), config, LAYOUT, mesh)


def nothing_given(num_steps, num_slots=4):
  return np.full((num_steps, num_slots), -1, np.int32), np.full(num_slots, -1, np.int32)


def decode_many(model, state, num_steps=6, stop_ids=(-1,)):
  config, mesh, params = model
  with jax.set_mesh(mesh):
    state, steps = decode.decode_many(params, state, *nothing_given(num_steps), np.array(stop_ids, np.int32), config, LAYOUT)
  return state, jax.device_get(steps)


def test_a_used_slot_is_as_good_as_a_new_one(gemma3):
  """Slots that held longer sequences, and whose rings have wrapped, yield for new prompts exactly what fresh slots yield."""
  config, mesh, params = gemma3
  tokens = make_tokens(config)
  used, _ = decode_many(gemma3, filled_state(params, config, LAYOUT, mesh, tokens[:, ::-1].copy(), prompts=(14, 15, 16, 13)))
  contents = decode.empty_slots(4).replace(tokens_B=tokens[:, 4], lengths_B=np.full(4, 4, np.int32), limits_B=np.full(4, 20, np.int32),
                                           done_B=np.zeros(4, np.bool_))
  results = []
  for state in (used, decode.empty_state(config, LAYOUT, mesh, 4, LENGTH)):
    with jax.set_mesh(mesh):
      cache = decode.prefill(params, tokens[:, :8], np.full(4, 4, np.int32), config, LAYOUT, chunk=CHUNK, max_length=LENGTH)
      state = decode.insert(state, cache, np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32), contents, LAYOUT)
    results.append(decode_many(gemma3, state)[1])
  np.testing.assert_array_equal(results[0].tokens_B, results[1].tokens_B)
  np.testing.assert_array_equal(results[0].raw_logprobs_B, results[1].raw_logprobs_B)


def test_limits_and_stop_ids_end_a_sequence_and_others_go_on(gemma3):
  config, mesh, params = gemma3
  state = functools.partial(filled_state, params, config, LAYOUT, mesh, make_tokens(config), slots=(0, 1, 2, 3))
  start = state()
  start = start.replace(slots=start.slots.replace(limits_B=jnp.array([23, 7, 23, 23]) + 0 * start.slots.limits_B))
  end, steps = decode_many(gemma3, start)
  # Prompt 1 has 6 tokens, so its last is at position 5, and position 7 is its second new one.
  assert steps.is_new_B.tolist() == [[True] * 4] * 2 + [[True, False, True, True]] * 4
  assert end.slots.lengths_B.tolist() == [6, 7, 14, 19]
  assert end.slots.done_B.tolist() == [False, True, False, False]
  assert end.slots.tokens_B.tolist() == [*steps.tokens_B[5, :1], steps.tokens_B[1, 1], *steps.tokens_B[5, 2:]]
  stop = int(steps.tokens_B[2, 0])
  stopped, again = decode_many(gemma3, state(), stop_ids=(stop,))
  first = np.argmax(again.tokens_B == stop, axis=0)
  ends = [index if again.tokens_B[index, slot] == stop else 5 for slot, index in enumerate(first)]
  assert ends[0] <= 2
  assert again.is_new_B.sum(0).tolist() == [index + 1 for index in ends]
  np.testing.assert_array_equal(again.tokens_B[:ends[0] + 1, 0], steps.tokens_B[:ends[0] + 1, 0])
  assert stopped.slots.done_B[0]


def test_one_launch_equals_many_and_ends_early(gemma3):
  config, mesh, params = gemma3
  once, steps = decode_many(gemma3, filled_state(params, config, LAYOUT, mesh, make_tokens(config)))
  state, parts = filled_state(params, config, LAYOUT, mesh, make_tokens(config)), []
  for _ in range(3):
    state, part = decode_many(gemma3, state, num_steps=2)
    parts.append(part.tokens_B)
  np.testing.assert_array_equal(np.concatenate(parts), steps.tokens_B)
  assert state.slots.lengths_B.tolist() == once.slots.lengths_B.tolist()
  _, none = decode_many(gemma3, once.replace(slots=once.slots.replace(done_B=once.slots.done_B | True)))
  assert not none.is_new_B.any()
  assert not none.raw_logprobs_B.any()  # No step was taken, else there would be numbers of slots that stand still.


def test_rows_are_rounded_up():
  bf16 = dataclasses.replace(LAYOUT, compute_dtype='bfloat16')
  assert decode.num_rows(1, LAYOUT, make_mesh('one')) == 1
  assert decode.num_rows(1, bf16, make_mesh('one')) == 2
  assert decode.num_rows(3, LAYOUT, make_mesh('data x tensor')) == 4
  assert decode.num_rows(1, bf16, make_mesh('data x tensor')) == 4


def test_layouts_that_cannot_decode():
  mesh = sharding.make_mesh(seq=2, devices=jax.devices()[:2])
  with pytest.raises(ValueError) as error:
    decode.empty_state(tiny.config(), sharding.TRAIN, mesh, 2, 16)
  assert "layout.rules split 'length' over ('seq', 'ulysses')" in str(error.value)
  assert 'use sharding.ROLLOUT' in str(error.value)
  assert 'sharding.LONG_ROLLOUT' in str(error.value)
  with pytest.raises(ValueError, match="parameter blocks/attention/k .*'kv_heads'"):
    decode.decode_params(None, tiny.config(num_kv_heads=1), LAYOUT, make_mesh('tensor'))


def big_results(hlo, size):
  """Return the shape of every array of at least `size` values that an instruction writes; a fusion writes its result alone."""
  fused = set(re.findall(r' fusion\(.*?calls=(%[\w.\-]+)', hlo))
  found, computation = [], None
  for line in hlo.splitlines():
    header = re.match(r'(?:ENTRY )?(%[\w.\-]+) .*\{$', line)
    computation = header[1] if header else computation
    made = re.match(r'\s+(?:ROOT )?%[\w.\-]+ = (\w+\[([\d,]*)\])\S* ([\w\-]+)\(', line)
    if not made or computation in fused or made[3] in ('parameter', 'get-tuple-element', 'bitcast'):
      continue
    if math.prod(int(part) for part in made[2].split(',') if part) >= size:
      found.append(made[1])
  return found


@pytest.mark.parametrize(('dtype', 'rows', 'tied'), [
    ('float32', 1, True), ('float32', 4, False), ('bfloat16', 2, False), ('bfloat16', 4, True)])
def test_a_step_writes_nothing_large_but_the_cache_and_that_once(dtype, rows, tied):
  """No weight is converted, copied or transposed: the smallest has 4096 values, more than any activation or the logits have.

  Keys and values are larger, and each layer's are written once, in place.
  """
  config = tiny.config(vocab_size=512, embed_dim=64, mlp_dim=256, num_heads=4, num_kv_heads=1, head_dim=64, layer_pattern=('global',),
                       tied_embeddings=tied)
  layout, mesh = dataclasses.replace(LAYOUT, compute_dtype=dtype), make_mesh('one')
  params = decode.decode_params(make_params(config, mesh, LAYOUT), config, layout, mesh)
  state = decode.empty_state(config, layout, mesh, rows, 128)
  assert min(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1) == 4096
  with jax.set_mesh(mesh):
    hlo = decode.decode_many.lower(params, state, *nothing_given(2, rows), np.array([-1], np.int32), config, layout).compile().as_text()
  assert big_results(hlo, 4096) == [f'f32[{rows},1,128,64]'] * 2 * config.num_layers


def test_every_process_compiles_the_same_program():
  """A program that depends on the order of a set of names misses the compilation cache, and hangs several hosts that must agree."""
  program = """if True:
    from tests import conftest, tiny
    import jax, numpy as np
    from models import decode, sharding, transformer
    from models import params as params_lib
    config, layout, mesh = tiny.config(), sharding.ROLLOUT, sharding.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    params = decode.decode_params(params_lib.init(transformer.declare(config), 0, mesh, layout), config, layout, mesh)
    state = decode.empty_state(config, layout, mesh, 4, 16)
    with jax.set_mesh(mesh):
      print(decode.decode_many.lower(params, state, np.full((2, 4), -1, np.int32), np.full(4, -1, np.int32), np.array([-1], np.int32),
                                     config, layout).as_text())
  """
  root = Path(__file__).parents[2]
  processes = [subprocess.Popen([sys.executable, '-c', program], cwd=root, stdout=subprocess.PIPE, text=True,
                                env=os.environ | {'PYTHONPATH': str(root), 'PYTHONHASHSEED': str(seed)}) for seed in (0, 1, 4)]
  one, *others = [process.communicate()[0] for process in processes]
  assert 'stablehlo.while' in one
  assert others == [one] * 2
