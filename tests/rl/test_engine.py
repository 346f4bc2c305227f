"""The engine: what a request yields is its own affair, whatever the slots, neighbors, order and devices; and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decode, sharding, transformer
from models import params as params_lib
from models.sampling import Sampling
from rl.rollout.engine import Engine, Request
from tests import tiny

CONFIG = tiny.config()
LAYOUT = sharding.ROLLOUT
MAX_LENGTH = 48
STOP = 3


def make_mesh(**sizes):
  return sharding.make_mesh(**sizes, devices=jax.devices()[:int(np.prod(list(sizes.values()) or [1]))])


def make_params(mesh, layout=LAYOUT):
  return params_lib.init(transformer.declare(CONFIG), 0, mesh, layout)


def make_engine(num_slots=4, mesh=None, layout=LAYOUT, params=None, **options):
  mesh = mesh or make_mesh()
  options = {'max_length': MAX_LENGTH, 'steps_per_launch': 4, 'prefill_chunk': 16} | options
  return Engine(make_params(mesh) if params is None else params, CONFIG, layout, mesh, num_slots=num_slots, **options)


@pytest.fixture(scope='module')
def engine():
  return make_engine()


def make_requests():
  """Return ten unlike requests; two prompts are longer than a chunk and than the window, one is a single token."""
  rng = np.random.default_rng(0)
  settings = [Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.7, top_k=5), Sampling(top_p=0.8, min_p=0.02)]
  lengths = (5, 30, 1, 9, 16, 12, 20, 7, 3, 14)
  return [Request(f'r{index}', rng.integers(0, 96, length).astype(np.int32), settings[index % 4], 4 + index, 10 * index)
          for index, length in enumerate(lengths)]


def run(engine, requests, stop_ids=(STOP,)):
  return {completion.id: completion for completion in engine.generate(requests, stop_ids)}


@pytest.fixture(scope='module')
def reference(engine):
  return run(engine, make_requests())


def check_equal(got, wanted, atol=1e-5):
  assert got.keys() == wanted.keys()
  for name, completion in wanted.items():
    np.testing.assert_array_equal(got[name].tokens_T, completion.tokens_T, err_msg=name)
    np.testing.assert_allclose(got[name].raw_logprobs_T, completion.raw_logprobs_T, atol=atol, err_msg=name)
    np.testing.assert_allclose(got[name].processed_logprobs_T, completion.processed_logprobs_T, atol=atol, err_msg=name)
    assert got[name].stop == completion.stop


def test_completions_agree_with_the_forward_pass(reference):
  """Raw log-probabilities, processed ones where only the temperature acts, greedy choices, and how completions end."""
  mesh = make_mesh()
  assert len(reference) == 10
  requests = {request.id: request for request in make_requests()}

  @jax.jit
  def logprobs(params, tokens_BT):
    positions_BT = jnp.broadcast_to(jnp.arange(MAX_LENGTH)[None], tokens_BT.shape)
    hidden_BTD, _ = transformer.forward(params, tokens_BT, positions_BT, jnp.ones_like(positions_BT), CONFIG, LAYOUT)
    return transformer.logits(params, hidden_BTD, CONFIG, LAYOUT)

  rows = [np.concatenate([requests[name].tokens_T, completion.tokens_T]) for name, completion in reference.items()]
  with jax.set_mesh(mesh):
    logits_BTV = np.asarray(logprobs(make_params(mesh), np.stack([np.pad(row, (0, MAX_LENGTH - len(row))) for row in rows])), np.float64)
  for logits_TV, (name, completion) in zip(logits_BTV, reference.items(), strict=True):
    request, count = requests[name], len(completion.tokens_T)
    start = len(request.tokens_T) - 1
    logits_TV = logits_TV[start:start + count]

    def of_tokens(logits_TV, tokens_T=completion.tokens_T):
      return (logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True)))[np.arange(len(tokens_T)), tokens_T]

    np.testing.assert_allclose(completion.raw_logprobs_T, of_tokens(logits_TV), atol=1e-4)
    if request.sampling == Sampling():
      np.testing.assert_array_equal(completion.processed_logprobs_T, completion.raw_logprobs_T)
    elif request.sampling.temperature == 0:
      np.testing.assert_array_equal(completion.tokens_T, logits_TV.argmax(-1))
      assert not completion.processed_logprobs_T.any()
    else:
      assert (completion.processed_logprobs_T > of_tokens(logits_TV / request.sampling.temperature) - 1e-4).all()
    assert completion.stop == ('stop' if completion.tokens_T[-1] == STOP else 'length')
    assert completion.stop == 'stop' or count == request.max_new_tokens
    assert STOP not in completion.tokens_T[:-1]


def test_order_slots_launches_and_chunks_change_nothing(engine, reference):
  check_equal(run(engine, make_requests()[::-1]), reference)
  check_equal(run(make_engine(num_slots=7, steps_per_launch=3, prefill_chunk=8), make_requests()[3:] + make_requests()[:3]), reference)
  check_equal(run(engine, make_requests()[5:6]), {'r5': reference['r5']})


def test_devices_change_nothing(reference):
  mesh = make_mesh(data=2, tensor=2)
  engine = make_engine(num_slots=3, mesh=mesh, params=make_params(mesh, sharding.TRAIN))
  assert engine.num_slots == 4
  check_equal(run(engine, make_requests()), reference, atol=1e-4)


def test_a_cache_split_over_devices_changes_nothing(reference, monkeypatch):
  """Prompts of up to 30 tokens where a device keeps 12 of a row; chunks of 10 become 12, which four devices share equally."""
  mesh = make_mesh(data=2, seq=2, ulysses=2)
  engine = make_engine(num_slots=3, mesh=mesh, layout=decode.rollout_layout(sharding.TRAIN, mesh), params=make_params(mesh, sharding.TRAIN),
                       prefill_chunk=10)
  shapes = record_prefills(monkeypatch)
  assert engine.num_slots == 4
  check_equal(run(engine, make_requests()), reference, atol=1e-4)
  assert {length for _, length in shapes} == {12, 24, 36}


def test_stop_ids_end_a_completion(engine):
  free = run(engine, make_requests(), stop_ids=())
  assert all(completion.stop == 'length' for completion in free.values())
  name, completion = next((name, completion) for name, completion in free.items() if len(set(completion.tokens_T.tolist())) > 3)
  stop = int(completion.tokens_T[3])
  end = completion.tokens_T.tolist().index(stop)
  stopped = run(engine, make_requests(), stop_ids=(stop, 95))[name]
  assert (stopped.stop, stopped.tokens_T.tolist()) == ('stop', completion.tokens_T[:end + 1].tolist())
  np.testing.assert_allclose(stopped.raw_logprobs_T, completion.raw_logprobs_T[:end + 1], atol=1e-5)


def record_prefills(monkeypatch):
  shapes, prefill = [], decode.prefill
  monkeypatch.setattr(decode, 'prefill', lambda params, tokens_PT, *rest, **options: (
      shapes.append(tokens_PT.shape), prefill(params, tokens_PT, *rest, **options))[1])
  return shapes


def test_samples_of_a_prompt_share_its_prefill(engine, monkeypatch):
  prompt = make_requests()[3].tokens_T
  requests = [Request(seed, prompt, Sampling(), 6, seed) for seed in range(4)]
  shapes = record_prefills(monkeypatch)
  together = run(engine, requests)
  assert shapes == [(1, 16)]
  check_equal({seed: run(engine, [requests[seed]])[seed] for seed in range(4)}, together)
  assert len({tuple(completion.tokens_T.tolist()) for completion in together.values()}) > 1


def test_prompts_are_prefilled_in_few_shapes(monkeypatch):
  shapes = record_prefills(monkeypatch)
  engine = make_engine(num_slots=7, prefill_chunk=64)
  rng = np.random.default_rng(1)
  # The last tokens are read by decoding. Shapes hold 64 tokens whatever the number of prompts.
  requests = [Request(length, rng.integers(0, 96, length), Sampling(), 2, 0) for length in (3, 17, 5, 9, 18, 2, 16)]
  assert len(run(engine, requests)) == 7
  assert shapes == [(4, 16), (4, 16), (2, 32)]


def test_low_precision_gets_the_rows_it_wants():
  engine = make_engine(num_slots=1, layout=dataclasses.replace(LAYOUT, compute_dtype='bfloat16'))
  assert engine.num_slots == 2
  completions = run(engine, make_requests()[:3])
  assert all(np.isfinite(completion.raw_logprobs_T).all() for completion in completions.values())


def test_an_iterator_closed_early_gives_its_slots_back(engine, reference):
  iterator = engine.generate(make_requests(), (STOP,))
  next(iterator)
  with pytest.raises(RuntimeError, match='still has .* requests of an earlier call; use that iterator up, or close it'):
    next(engine.generate(make_requests()))
  iterator.close()
  check_equal(run(engine, make_requests()), reference)


def converse(engine, delays, turns=((7, 3), (1, 4), (13, 5))):
  """Run conversations of several turns side by side; conversation i waits `delays[i]` launches before each of its turns."""
  rng = np.random.default_rng(2)
  given = {name: [rng.integers(0, 96, length).astype(np.int32) for length, _ in turns] for name in range(len(delays))}
  parts = {name: [] for name in given}
  engine.stop_at((STOP,))
  for name, (first, *_) in given.items():
    engine.submit(Request(name, first, Sampling(), turns[0][1], name, holds=True))
  waiting = {}
  while engine.is_busy or waiting:
    for completion in engine.step():
      parts[completion.id].append(completion)
      waiting[completion.id] = delays[completion.id]
    for name in [name for name, left in waiting.items() if left == 0]:
      turn = len(parts[name])
      if turn < len(turns):
        engine.extend(name, given[name][turn], turns[turn][1])
      else:
        engine.release(name)
      del waiting[name]
    waiting = {name: left - 1 for name, left in waiting.items()}
  return given, parts


def test_a_conversation_goes_on_in_its_slot(engine):
  """Each turn is what a new request with the whole conversation as its prompt yields."""
  given, parts = converse(engine, [0, 2, 1])
  for name, completions in parts.items():
    prompt = given[name][0]
    for turn, completion in enumerate(completions):
      alone = run(engine, [Request('alone', prompt, Sampling(), len(completion.tokens_T), name)])['alone']
      np.testing.assert_array_equal(completion.tokens_T, alone.tokens_T)
      np.testing.assert_allclose(completion.raw_logprobs_T, alone.raw_logprobs_T, atol=1e-5)
      prompt = np.concatenate([prompt, completion.tokens_T, *given[name][turn + 1:turn + 2]])
  assert [len(completions) for completions in parts.values()] == [3, 3, 3]


def test_when_a_conversation_goes_on_changes_no_bit(engine):
  _, at_once = converse(engine, [0, 0, 0, 0, 0, 0])
  _, late = converse(engine, [3, 0, 1, 5, 2, 4])
  for name, completions in at_once.items():
    for one, other in zip(completions, late[name], strict=True):
      np.testing.assert_array_equal(one.tokens_T, other.tokens_T)
      np.testing.assert_array_equal(one.raw_logprobs_T, other.raw_logprobs_T)


def test_tokens_say_which_parameters_drew_them():
  mesh = make_mesh()
  engine = make_engine(mesh=mesh)
  other = decode.decode_params(params_lib.init(transformer.declare(CONFIG), 1, mesh, LAYOUT), CONFIG, engine.layout, mesh)
  engine.submit(Request('a', np.array([5, 6]), Sampling(temperature=0.0), 8, 0))
  assert not engine.step()
  engine.update(other, 7)
  completion, = engine.step()
  assert completion.versions_T.tolist() == [0] * 4 + [7] * 4
  prompt = np.concatenate([[5, 6], completion.tokens_T[:4]])
  engine.submit(Request('b', prompt, Sampling(temperature=0.0), 4, 0))
  completion, = engine.step()
  # A new request is computed with the new parameters alone: nothing of the old cache is left.
  fresh = make_engine(mesh=mesh, params=params_lib.init(transformer.declare(CONFIG), 1, mesh, LAYOUT))
  alone = run(fresh, [Request('b', prompt, Sampling(temperature=0.0), 4, 0)])['b']
  np.testing.assert_array_equal(completion.raw_logprobs_T, alone.raw_logprobs_T)
  assert completion.versions_T.tolist() == [7] * 4


def test_extending_what_is_not_held(engine):
  engine.submit(Request('a', np.array([5, 6]), Sampling(), 2, 0, holds=True))
  with pytest.raises(ValueError, match="Request 'a' holds no slot; only a finished request submitted with holds=True does"):
    engine.extend('a', np.array([1]), 2)
  engine.step()
  with pytest.raises(ValueError, match="Request 'a': 44 prompt tokens and max_new_tokens=5 make 49"):
    engine.extend('a', np.ones(40, np.int32), 5)
  with pytest.raises(ValueError, match='token 96 at 0 is not one of the 96 ids'):
    engine.extend('a', np.array([96]), 2)
  assert not engine.is_busy
  engine.release('a')
  with pytest.raises(ValueError, match="Request 'a' is neither queued nor in a slot"):
    engine.release('a')


def test_a_released_request_leaves_no_trace(engine, reference):
  for request in make_requests():
    engine.submit(request)
  engine.stop_at((STOP,))
  engine.step()
  for request in make_requests()[2:]:
    engine.release(request.id)  # Two of them run, the others wait.
  completions = {}
  while engine.is_busy:
    completions |= {completion.id: completion for completion in engine.step()}
  check_equal(completions, {name: reference[name] for name in ('r0', 'r1') if name in completions})
  assert set(completions) <= {'r0', 'r1'}
  check_equal(run(engine, make_requests()), reference)


def test_logits_that_are_not_finite():
  mesh = make_mesh()
  params = make_params(mesh)
  params['norm'] = params['norm'] * jnp.nan
  for sampling in (Sampling(), Sampling(temperature=0.0)):
    with pytest.raises(RuntimeError, match="Request 'a': the logits are not finite within new tokens 0 to [13]; .* compute in float32"):
      run(make_engine(mesh=mesh, params=params), [Request('a', np.array([1]), sampling, 4, 0)])


def changed(**fields):
  return dataclasses.replace(Request('q', np.array([5, 6]), Sampling(), 4, 0), **fields)


@pytest.mark.parametrize(('request_', 'error', 'message'), [
    (changed(tokens_T=np.zeros(0, np.int32)), ValueError, "Request 'q': the prompt must be a list of at least one token id, got shape (0"),
    (changed(tokens_T=np.zeros((1, 2), np.int32)), ValueError, 'got shape (1, 2)'),
    (changed(tokens_T=np.array([1.0])), TypeError, "Request 'q': token ids must be integers, got float64."),
    (changed(tokens_T=np.array([1, 96])), ValueError, "Request 'q': token 96 at 1 is not one of the 96 ids of the vocabulary"),
    (changed(tokens_T=np.array([-1, 2])), ValueError, 'token -1 at 0 is not one of the 96 ids'),
    (changed(max_new_tokens=0), ValueError, "Request 'q': max_new_tokens=0 must be at least 1."),
    (changed(tokens_T=np.ones(45, np.int32)), ValueError,
     "Request 'q': 45 prompt tokens and max_new_tokens=4 make 49, but engine.max_length=48; shorten the prompt"),
    (changed(seed=2**32), ValueError, "Request 'q': seed=4294967296 must be from 0 to 2**32 - 1."),
    (changed(sampling=Sampling(top_p=2.0)), ValueError, "Request 'q': sampling.top_p=2.0 must be above 0"),
    (changed(id='r0'), ValueError, "Request 'r0' is already queued or in a slot; ids must be unique"),
])
def test_bad_requests_are_refused_before_any_work(engine, monkeypatch, request_, error, message):
  monkeypatch.setattr(decode, 'prefill', None)
  monkeypatch.setattr(decode, 'decode_many', None)
  with pytest.raises(error) as raised:
    engine.generate([*make_requests(), request_])
  assert message in str(raised.value)


def test_a_bad_stop_id_is_refused(engine):
  with pytest.raises(ValueError, match='stop id 96 is not one of the 96 ids of the vocabulary'):
    engine.generate(make_requests(), [1, 96])


@pytest.mark.parametrize(('options', 'message'), [
    ({'num_slots': 0}, 'engine.num_slots=0 must be at least 1.'),
    ({'steps_per_launch': 0}, 'engine.steps_per_launch=0 must be at least 1.'),
    ({'max_length': 129}, 'engine.max_length=129 is beyond the 128 tokens that the model was trained for'),
    ({'mesh': 'seq', 'layout': sharding.TRAIN}, "layout.rules split 'length' over ('seq', 'ulysses')"),
])
def test_engines_that_cannot_be(options, message):
  if 'mesh' in options:
    options = options | {'mesh': make_mesh(seq=2)}
  with pytest.raises(ValueError) as raised:
    make_engine(params={}, **options)
  assert message in str(raised.value)


def test_a_request_that_just_fits(engine):
  request = Request('full', np.ones(MAX_LENGTH - 2, np.int32), Sampling(temperature=0.0), 2, 0)
  assert len(run(engine, [request], stop_ids=())['full'].tokens_T) == 2
