"""Divergences between two heads against dense float64 references: values, gradients, masks, meshes, blocks, some words instead of all."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from models import head_blocks, sharding
from models.heads_distillation import divergence, logprobs_at, top_logprobs

B, T, D, E, V = 2, 8, 16, 12, 97
KINDS = ('forward', 'reverse', 'jensen_shannon')
MESHES = {'fsdp2_tensor2': {'fsdp': 2, 'tensor': 2}, 'seq2': {'seq': 2}}
OPTIONS = {'beta': 0.3, 'temperature': 1.7, 'softcap': 4.0, 'teacher_softcap': 3.0}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(head_blocks, 'BLOCK', 32)  # 97 words are three blocks and one word.


@pytest.fixture(autouse=True)
def mesh(request):
  sizes = getattr(request, 'param', {})
  mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:int(np.prod(list(sizes.values()), initial=1))])
  with jax.set_mesh(mesh):
    yield mesh


def arrays(vocab=V, rows=B, seed=0):
  """Return (hidden, head, teacher's hidden, teacher's head, a weight for each place)."""
  rng = np.random.default_rng(seed)
  shapes = ((rows, T, D), (vocab, D), (rows, T, E), (vocab, E))
  return *(rng.standard_normal(shape).astype(np.float32) for shape in shapes), rng.uniform(0.1, 1, (rows, T)).astype(np.float32)


def log_softmax(hidden, unembed, temperature, softcap):
  """Return float64 logprobs_BTV."""
  logits = np.einsum('btd,vd->btv', np.asarray(hidden, np.float64), np.asarray(unembed, np.float64))
  if softcap:
    logits = softcap * np.tanh(logits / softcap)
  logits = logits / temperature
  top = logits.max(-1, keepdims=True)
  return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def dense(kind, hidden, unembed, teacher_hidden, teacher_unembed, beta=0.5, temperature=1.0, softcap=None, teacher_softcap=None):
  """Return (divergence_BT, agrees_BT) in float64, from the definitions."""
  logq = log_softmax(hidden, unembed, temperature, softcap)
  logp = log_softmax(teacher_hidden, teacher_unembed, temperature, teacher_softcap)

  def kl(log_first, log_second):
    return (np.exp(log_first) * (log_first - log_second)).sum(-1)

  logm = np.log(beta * np.exp(logp) + (1 - beta) * np.exp(logq))
  value = {'forward': lambda: kl(logp, logq), 'reverse': lambda: kl(logq, logp),
           'jensen_shannon': lambda: beta * kl(logp, logm) + (1 - beta) * kl(logq, logm)}[kind]()
  return value, logq.argmax(-1) == logp.argmax(-1)


@functools.partial(jax.jit, static_argnames=('kind', 'beta', 'softcap', 'teacher_softcap', 'chunk', 'unembed_grad'))
def values_and_grads(hidden, unembed, teacher_hidden, teacher_unembed, weight, mask=None, **options):
  def loss(hidden, unembed, teacher_hidden, teacher_unembed):
    found = divergence(hidden, unembed, teacher_hidden, teacher_unembed, mask, **options)
    return jnp.sum(weight * found[0]), found

  grads, found = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(hidden, unembed, teacher_hidden, teacher_unembed)
  return *found, grads


def place(mesh, hidden, unembed, teacher_hidden, teacher_unembed, *per_token):
  """Put the arrays where a training layout has them."""
  of_tokens, of_head, of_mask = P(('data', 'fsdp'), 'seq', None), P('tensor', 'fsdp'), P(('data', 'fsdp'), 'seq')
  parts = (of_tokens, of_head, of_tokens, of_head) + (of_mask,) * len(per_token)
  given = (hidden, unembed, teacher_hidden, teacher_unembed, *per_token)
  return [jax.device_put(x, NamedSharding(mesh, part)) for x, part in zip(given, parts, strict=True)]


def close(got, wanted, tolerance=2e-5):
  wanted = np.asarray(wanted, np.float64)
  np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance * max(1e-3, np.abs(wanted).max()))


def test_two_words_by_hand():
  one, head, other = np.ones((1, 1, 1), np.float32), np.array([[0.0], [np.log(3)]], np.float32), np.zeros((2, 1), np.float32)
  # The student has (1/4, 3/4), the teacher (1/2, 1/2).
  forward = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
  reverse = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5)
  weight = np.array([[2.0]], np.float32)
  value, _, grads = values_and_grads(one, head, one, other, weight, kind='forward')
  close(value, [[forward]])
  close(grads[1], [[2 * (0.25 - 0.5)], [2 * (0.75 - 0.5)]])
  value, _, grads = values_and_grads(one, head, one, other, weight, kind='reverse')
  close(value, [[reverse]])
  close(grads[1], [[2 * 0.25 * (np.log(0.5) - reverse)], [2 * 0.75 * (np.log(1.5) - reverse)]])
  mixed = 0.5 * (0.5 * np.log(0.5 / 0.375) + 0.5 * np.log(0.5 / 0.625)) + 0.5 * (0.25 * np.log(0.25 / 0.375) + 0.75 * np.log(0.75 / 0.625))
  close(values_and_grads(one, head, one, other, weight, kind='jensen_shannon', beta=0.5)[0], [[mixed]])


@pytest.mark.parametrize('options', [{}, OPTIONS], ids=['plain', 'tempered'])
@pytest.mark.parametrize('kind', KINDS)
def test_values_and_gradients_agree_with_dense_float64(kind, options):
  given = arrays()
  value, agrees, grads = values_and_grads(*given, kind=kind, chunk=5, **options)
  wanted, wanted_agrees = dense(kind, *given[:4], **options)
  close(value, wanted)
  np.testing.assert_array_equal(agrees, wanted_agrees)
  assert value.dtype == agrees.dtype == jnp.float32
  for which, index in ((0, (1, 3, 2)), (0, (0, 0, 7)), (1, (3, 4)), (1, (V - 1, 0)), (1, (33, 9))):
    step = [np.zeros_like(array, np.float64) for array in given[:4]]
    step[which][index] = 1e-5
    moved = [[x + sign * dx for x, dx in zip(given[:4], step, strict=True)] for sign in (1, -1)]
    above, below = ((given[4] * dense(kind, *four, **options)[0]).sum() for four in moved)
    close(grads[which][index], (above - below) / 2e-5, 1e-4)
  assert not np.any(grads[2]) and not np.any(grads[3])  # The teacher learns nothing.


@pytest.mark.parametrize('kind', ['reverse', 'jensen_shannon'])
def test_how_tokens_and_words_are_cut_does_not_matter(kind, monkeypatch):
  given = arrays()
  wanted = values_and_grads(*given, kind=kind, chunk=5, **OPTIONS)
  monkeypatch.setattr(head_blocks, 'BLOCK', 13)
  got = values_and_grads(*given, kind=kind, chunk=7, **OPTIONS)
  jax.tree.map(close, got, wanted)
  frozen = values_and_grads(*given, kind=kind, chunk=5, unembed_grad=False, **OPTIONS)
  close(frozen[2][0], wanted[2][0])
  assert not np.any(frozen[2][1])


@pytest.mark.parametrize(('mesh', 'kind'), [(MESHES['fsdp2_tensor2'], kind) for kind in KINDS] + [(MESHES['seq2'], 'jensen_shannon')],
                         indirect=['mesh'])
def test_meshes_agree(mesh, kind):
  given = arrays(96, rows=4)
  placed = place(mesh, *given)
  got = values_and_grads(*placed, kind=kind, chunk=3, **OPTIONS)
  value, agrees = dense(kind, *given[:4], **OPTIONS)
  close(got[0], value)
  np.testing.assert_array_equal(got[1], agrees)
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    wanted = jax.device_get(values_and_grads(*given, kind=kind, chunk=5, **OPTIONS)[2])
  jax.tree.map(close, got[2], wanted)
  assert [x.sharding for x in got[2][:2]] == [x.sharding for x in placed[:2]]


@pytest.mark.parametrize('mesh', [MESHES['fsdp2_tensor2']], indirect=True)
def test_meshes_agree_on_words(mesh):
  given = arrays(96, rows=4)
  placed = place(mesh, *given)
  ids, logprobs = top_logprobs(placed[2], placed[3], count=7, temperature=1.7)
  wanted = log_softmax(given[2], given[3], 1.7, None)
  np.testing.assert_array_equal(ids, np.argsort(-wanted, -1)[..., :7])
  close(logprobs, -np.sort(-wanted, -1)[..., :7])
  got = at_and_grads(placed[0], placed[1], ids, placed[4])
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    wanted = jax.device_get(at_and_grads(given[0], given[1], np.asarray(ids), given[4]))
  jax.tree.map(close, got, wanted)


@pytest.mark.parametrize('kind', KINDS)
def test_masked_places_contribute_nothing_whatever_they_hold(kind):
  hidden, unembed, teacher_hidden, teacher_unembed, weight = arrays()
  mask = np.random.default_rng(2).random((B, T)) < 0.4
  wanted = values_and_grads(hidden, unembed, teacher_hidden, teacher_unembed, np.where(mask, weight, 0), kind=kind, chunk=3)
  hidden, teacher_hidden = (np.where(mask[..., None], x, bad).astype(np.float32) for x, bad in ((hidden, np.nan), (teacher_hidden, 1e9)))
  value, agrees, grads = values_and_grads(hidden, unembed, teacher_hidden, teacher_unembed, weight, mask, kind=kind, chunk=3)
  close(value, np.where(mask, wanted[0], 0))
  jax.tree.map(close, grads, wanted[2])
  assert not np.any(np.asarray(value)[~mask]) and not np.any(np.asarray(agrees)[~mask])
  # A place without a cotangent is as good as masked.
  dead = values_and_grads(hidden, unembed, teacher_hidden, teacher_unembed, np.where(mask, weight, 0), kind=kind, chunk=3)[2]
  jax.tree.map(close, dead, wanted[2])


@pytest.mark.parametrize('kind', KINDS)
def test_equal_distributions_are_no_apart(kind):
  hidden, unembed, *_, weight = arrays()
  value, agrees, grads = values_and_grads(hidden, unembed, hidden, unembed, weight, kind=kind)
  assert np.all(np.asarray(value) >= 0) and np.max(value) < 2e-6 and np.all(np.asarray(agrees) == 1)
  assert max(np.abs(grads[0]).max(), np.abs(grads[1]).max()) < 1e-5


def test_jensen_shannon_tends_to_both_divergences():
  given = [0.3 * x for x in arrays()]
  for beta, kind, factor in ((1e-3, 'forward', 1e-3), (1 - 1e-3, 'reverse', 1e-3)):
    mixed, plain = (values_and_grads(*given, **options)[0] for options in ({'kind': 'jensen_shannon', 'beta': beta}, {'kind': kind}))
    # The difference is of second order in the teacher's share.
    np.testing.assert_allclose(np.asarray(mixed).mean() / factor, np.asarray(plain).mean(), rtol=0.01)


def test_bfloat16_operands_keep_float32_sums():
  given = arrays()
  rounded = [jnp.asarray(x, jnp.bfloat16) for x in given[:4]]
  wide = [x.astype(jnp.float32) for x in rounded]
  for kind in KINDS:
    wanted, got = values_and_grads(*wide, given[4], kind=kind), values_and_grads(*rounded, given[4], kind=kind)
    close(got[0], wanted[0], 1e-4)
    for grad, want in zip(got[2][:2], wanted[2][:2], strict=True):
      assert grad.dtype == jnp.bfloat16
      assert np.linalg.norm(np.asarray(grad, np.float32) - want) < 0.01 * np.linalg.norm(want)


def test_a_temperature_may_change_without_a_new_program(num_compiled):
  given, compiled = arrays(), []
  function = jax.jit(lambda temperature: divergence(*given[:4], kind='reverse', temperature=temperature)[0])
  for temperature in (0.5, 1.0, 3.0):
    close(function(jnp.float32(temperature)), dense('reverse', *given[:4], temperature=temperature)[0])
    compiled.append(num_compiled())
  assert compiled[-1] == compiled[0] > 0


@functools.partial(jax.jit, static_argnames=('softcap', 'chunk', 'unembed_grad'))
def at_and_grads(hidden, unembed, ids, weight, mask=None, **options):
  def loss(hidden, unembed):
    found = logprobs_at(hidden, unembed, ids, mask, temperature=1.7, **options)
    return jnp.sum(weight[..., None] * jnp.cos(found[0]) * jnp.arange(1, 1 + ids.shape[2])[None, None]), found

  grads, found = jax.grad(loss, (0, 1), has_aux=True)(hidden, unembed)
  return *found, grads


@pytest.mark.parametrize('softcap', [None, 3.0])
def test_the_likeliest_words_and_what_another_head_gives_them(softcap):
  hidden, unembed, teacher_hidden, teacher_unembed, weight = arrays()
  ids, logprobs = top_logprobs(teacher_hidden, teacher_unembed, count=6, temperature=1.7, softcap=softcap, chunk=5)
  wanted = log_softmax(teacher_hidden, teacher_unembed, 1.7, softcap)
  np.testing.assert_array_equal(ids, np.argsort(-wanted, -1)[..., :6])
  close(logprobs, -np.sort(-wanted, -1)[..., :6])

  def loss64(hidden, unembed):
    found = np.take_along_axis(log_softmax(hidden, unembed, 1.7, softcap), np.asarray(ids), -1)
    return found, (weight[..., None] * np.cos(found) * np.arange(1, 7)).sum()

  found, likeliest, grads = at_and_grads(hidden, unembed, ids, weight, softcap=softcap, chunk=5)
  close(found, loss64(hidden, unembed)[0])
  np.testing.assert_array_equal(likeliest, log_softmax(hidden, unembed, 1.7, softcap).argmax(-1))
  word = int(ids[1, 3, 0])
  for which, index in ((0, (1, 3, 2)), (0, (0, 0, 7)), (1, (word, 4)), (1, (V - 1, 0)), (1, (33, 9))):
    step = [np.zeros((B, T, D)), np.zeros((V, D))]
    step[which][index] = 1e-5
    above, below = (loss64(hidden + sign * step[0], unembed + sign * step[1])[1] for sign in (1, -1))
    close(grads[which][index], (above - below) / 2e-5, 2e-4)


def test_masked_places_have_no_words():
  hidden, unembed, teacher_hidden, teacher_unembed, weight = arrays()
  mask = np.random.default_rng(2).random((B, T)) < 0.4
  ids, logprobs = top_logprobs(np.where(mask[..., None], teacher_hidden, np.nan).astype(np.float32), teacher_unembed, mask, count=3, chunk=3)
  wanted_ids, wanted = top_logprobs(teacher_hidden, teacher_unembed, count=3)
  np.testing.assert_array_equal(ids, np.where(mask[..., None], wanted_ids, 0))
  close(logprobs, np.where(mask[..., None], wanted, 0))
  found, _, grads = at_and_grads(np.where(mask[..., None], hidden, np.nan).astype(np.float32), unembed, ids, weight, mask, chunk=3)
  wanted, _, wanted_grads = at_and_grads(hidden, unembed, ids, np.where(mask, weight, 0), chunk=3)
  close(found, np.where(mask[..., None], wanted, 0))
  jax.tree.map(close, grads, wanted_grads)


@pytest.mark.parametrize(('change', 'error', 'message'), [
    ({'kind': 'sideways'}, ValueError, "kind='sideways' is unknown; use one of forward, reverse, jensen_shannon"),
    ({'beta': 1.0}, ValueError, 'beta=1.0 must be between 0 and 1'),
    ({'temperature': 0.0}, ValueError, 'temperature=0.0 must be positive'),
    ({'teacher_unembed': np.zeros((V + 1, E), np.float32)}, ValueError, r'unembed_VD\(97, 16\) and teacher_unembed_VD\(98, 12\) must have one'),
    ({'teacher_hidden': np.zeros((B, T + 1, E), np.float32)}, ValueError, r'hidden_BTD\(2, 8, 16\).*teacher_hidden_BTD\(2, 9, 12\)'),
    ({'mask': np.ones((B, T), np.float32)}, TypeError, 'mask_BT must be bool, got float32'),
])
def test_bad_input(change, error, message):
  names = ('hidden', 'unembed', 'teacher_hidden', 'teacher_unembed')
  given = dict(zip(names, arrays()[:4], strict=True)) | {'mask': None, 'kind': 'forward'} | change
  positional = [given.pop(name) for name in (*names, 'mask')]
  with pytest.raises(error, match=message):
    divergence(*positional, **given)


def test_bad_words():
  hidden, unembed, *_ = arrays()
  with pytest.raises(ValueError, match='count=98 must be at least 1 and at most the 97 words'):
    top_logprobs(hidden, unembed, count=98)
  with pytest.raises(ValueError, match=r'ids_BTJ\(2, 8\) must be \[B, T, J\]'):
    logprobs_at(hidden, unembed, np.zeros((B, T), np.int32))
  with pytest.raises(TypeError, match='ids_BTJ must be of integer dtype, got float32'):
    logprobs_at(hidden, unembed, np.zeros((B, T, 2), np.float32))
