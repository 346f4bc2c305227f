"""Losses of the head against a dense float64 reference: values, gradients, masks, meshes, memory."""

import functools

import jax
from jax.extend.core import jaxprs_in_params
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from models import head_blocks, heads, sharding

B, T, D, V = 2, 8, 16, 97
MESHES = {'fsdp2_tensor2': {'fsdp': 2, 'tensor': 2}, 'data2_fsdp2': {'data': 2, 'fsdp': 2}, 'seq2': {'seq': 2}, 'tensor4': {'tensor': 4}}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(head_blocks, 'BLOCK', 32)  # 97 words are three blocks and one word


@pytest.fixture(autouse=True)
def mesh(request):
  sizes = getattr(request, 'param', {})
  mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:int(np.prod(list(sizes.values()), initial=1))])
  with jax.set_mesh(mesh):
    yield mesh


def arrays(vocab=V, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  hidden = rng.standard_normal((B, T, D)).astype(dtype)
  unembed = rng.standard_normal((vocab, D)).astype(dtype)
  return hidden, unembed, rng.integers(0, vocab, (B, T)).astype(np.int32), rng.uniform(0.1, 1, (B, T)).astype(np.float32)


def place(mesh, hidden, unembed, *per_token):
  """Put the arrays where a training layout has them."""
  parts = (P(('data', 'fsdp'), 'seq', None), P('tensor', 'fsdp')) + (P(('data', 'fsdp'), 'seq'),) * len(per_token)
  return [jax.device_put(x, NamedSharding(mesh, part)) for x, part in zip((hidden, unembed, *per_token), parts, strict=True)]


def dense(hidden, unembed, targets, softcap=None):
  """Return float64 (logprobs, entropy), the plain way."""
  logits = np.einsum('btd,vd->btv', hidden.astype(np.float64), unembed.astype(np.float64))
  if softcap:
    logits = softcap * np.tanh(logits / softcap)
  top = logits.max(-1, keepdims=True)
  logp = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
  return np.take_along_axis(logp, targets[..., None], -1)[..., 0], -(np.exp(logp) * logp).sum(-1)


def dense_jax(hidden, unembed, targets, softcap=None):
  """Return (logprobs, entropy) for reference gradients; float32, at highest precision."""
  logits = jnp.einsum('btd,vd->btv', hidden, unembed, precision='highest')
  if softcap:
    logits = softcap * jnp.tanh(logits / softcap)
  logp = jax.nn.log_softmax(logits)
  return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], -(jnp.exp(logp) * logp).sum(-1)


def weighed(function, mix, hidden, unembed, targets, **options):
  """Weigh logprobs and entropy differently at each position, so that every cotangent matters."""
  scores = function(hidden, unembed, targets, **options)
  return jnp.sum(mix * scores[0] + (mix**2 - 0.3) * scores[1]), scores


@functools.partial(jax.jit, static_argnames=('softcap', 'chunk', 'unembed_grad'))
def scores_and_grads(hidden, unembed, targets, mix, **options):
  grad = jax.grad(functools.partial(weighed, heads.token_logprobs_and_entropy, **options), (1, 2), has_aux=True)
  grads, scores = grad(mix, hidden, unembed, targets)
  return scores, grads


@functools.partial(jax.jit, static_argnames=('softcap', 'chunk', 'unembed_grad'))
def nll_and_grads(hidden, unembed, targets, weight, factor=1.0, **options):
  def loss(hidden, unembed, weight):
    loss, nll = heads.weighted_nll(hidden, unembed, targets, weight, **options)
    return loss * factor, nll

  (loss, nll), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, unembed, weight)
  return loss, nll, grads


@functools.partial(jax.jit, static_argnames='softcap')
def dense_grads(hidden, unembed, targets, mix, softcap=None):
  """Return the reference gradients of `weighed`, and of the nll in (hidden, unembed, weight)."""
  scores = jax.grad(functools.partial(weighed, dense_jax, softcap=softcap), (1, 2), has_aux=True)(mix, hidden, unembed, targets)[0]
  nll = jax.grad(lambda h, e, w: -jnp.sum(w * dense_jax(h, e, targets, softcap)[0]), (0, 1, 2))(hidden, unembed, mix)
  return scores, nll


def close(got, wanted, tolerance=1e-5):
  wanted = np.asarray(wanted, np.float64)
  np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance * max(1e-3, np.abs(wanted).max()))


def test_two_words_by_hand():
  hidden, unembed = np.ones((1, 1, 1), np.float32), np.array([[0.0], [np.log(3)]], np.float32)
  targets, weight = np.array([[1]]), np.array([[2.0]], np.float32)
  (logprobs, entropy), _ = scores_and_grads(hidden, unembed, targets, weight)
  close(logprobs, [[np.log(0.75)]])
  close(entropy, [[-0.25 * np.log(0.25) - 0.75 * np.log(0.75)]])
  loss, nll, (dhidden, dunembed, dweight) = nll_and_grads(hidden, unembed, targets, weight)
  close(loss, -2 * np.log(0.75))
  close(nll, [[-np.log(0.75)]])
  close(dunembed, [[0.5], [-0.5]])  # weight (p - onehot) hidden
  close(dhidden, [[[-0.5 * np.log(3)]]])
  close(dweight, nll)


@pytest.mark.parametrize(('vocab', 'softcap', 'chunk'), [(V, None, None), (V, 3.0, 5), (96, None, 5), (20, 3.0, None)])
def test_values_and_gradients_agree_with_dense(vocab, softcap, chunk):
  hidden, unembed, targets, weight = arrays(vocab)
  wanted = dense(hidden, unembed, targets, softcap)
  wanted_grads, wanted_nll_grads = dense_grads(hidden, unembed, targets, weight, softcap)
  scores, grads = scores_and_grads(hidden, unembed, targets, weight, softcap=softcap, chunk=chunk)
  jax.tree.map(close, (scores, grads), (wanted, wanted_grads))
  loss, nll, grads = nll_and_grads(hidden, unembed, targets, weight, softcap=softcap, chunk=chunk)
  close(nll, -wanted[0])
  close(loss, -(weight * wanted[0]).sum())
  jax.tree.map(close, grads, wanted_nll_grads)
  assert {x.dtype for x in (*scores, nll, loss)} == {jnp.dtype('float32')}
  thrice = nll_and_grads(hidden, unembed, targets, weight, 3.0, softcap=softcap, chunk=chunk)[2]
  jax.tree.map(lambda got, one: close(got, 3 * one), thrice, grads)


def test_the_undifferentiated_loss_and_the_bare_logprobs_are_the_same_numbers():
  hidden, unembed, targets, weight = arrays()
  (logprobs, _), _ = scores_and_grads(hidden, unembed, targets, weight)
  loss, nll = jax.jit(heads.weighted_nll)(hidden, unembed, targets, weight)
  wanted_loss, wanted_nll, _ = nll_and_grads(hidden, unembed, targets, weight)
  close(loss, wanted_loss, 1e-6)
  close(nll, wanted_nll, 1e-6)
  close(jax.jit(heads.token_logprobs)(hidden, unembed, targets), logprobs, 1e-6)


@pytest.mark.parametrize('softcap', [None, 3.0])
def test_gradients_agree_with_finite_differences(softcap):
  hidden, unembed, targets, weight = arrays()

  def losses64(hidden, unembed):
    logprobs, entropy = dense(hidden, unembed, targets, softcap)
    return -(weight * logprobs).sum(), (weight * logprobs + (weight**2 - 0.3) * entropy).sum()

  chunk = 5 if softcap else None  # as compiled above
  nll_grads = nll_and_grads(hidden, unembed, targets, weight, softcap=softcap, chunk=chunk)[2]
  score_grads = scores_and_grads(hidden, unembed, targets, weight, softcap=softcap, chunk=chunk)[1]
  for which, index in ((0, (1, 3, 2)), (0, (0, 0, 7)), (1, (targets[1, 3], 4)), (1, (V - 1, 0)), (1, (33, 9))):
    step = [np.zeros((B, T, D)), np.zeros((V, D))]
    step[which][index] = 1e-6
    above, below = (np.array(losses64(hidden + sign * step[0], unembed + sign * step[1])) for sign in (1, -1))
    close([nll_grads[which][index], score_grads[which][index]], (above - below) / 2e-6, 1e-4)


@pytest.mark.parametrize('mesh', MESHES.values(), ids=MESHES, indirect=True)
def test_meshes_agree(mesh):
  pairs = [np.concatenate(pair) for pair in zip(arrays(48), arrays(48, seed=1), strict=True)]
  hidden, unembed, targets, weight = pairs  # 4 rows, 96 words
  wanted = dense(hidden, unembed, targets, 3.0)
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    wanted_grads, wanted_nll_grads = dense_grads(hidden, unembed, targets, weight, 3.0)
  placed = place(mesh, hidden, unembed, targets, weight)
  scores, grads = scores_and_grads(*placed, softcap=3.0, chunk=3)
  jax.tree.map(close, (scores, grads), (wanted, wanted_grads))
  loss, nll, nll_grads = nll_and_grads(*placed, softcap=3.0, chunk=3)
  close(loss, -(weight * wanted[0]).sum())
  jax.tree.map(close, nll_grads, wanted_nll_grads)
  for got in (grads, nll_grads):
    assert [x.sharding for x in got[:2]] == [x.sharding for x in placed[:2]]


def test_positions_of_weight_zero_contribute_nothing():
  hidden, unembed, targets, weight = arrays()
  dead = np.zeros((B, T), bool)
  dead[0, 2:], dead[1, 5] = True, True  # in chunks of 3, one chunk is all padding
  weight = np.where(dead, 0, weight)
  garbage, nowhere = np.where(dead[..., None], np.nan, hidden), np.where(dead, -1, targets)
  wanted, _, wanted_grads = nll_and_grads(hidden, unembed, targets, weight, chunk=3)
  got, nll, grads = nll_and_grads(garbage, unembed, nowhere, weight, chunk=3)
  close(got, wanted)
  jax.tree.map(close, grads, wanted_grads)
  assert np.all(np.asarray(nll)[dead] == 0) and np.all(np.asarray(grads[0])[dead] == 0)
  got, nll, grads = nll_and_grads(np.full_like(hidden, np.nan), unembed, nowhere, 0 * weight, chunk=3)
  assert got == 0 and all(np.all(np.asarray(grad) == 0) for grad in grads)

  @jax.jit
  def masked(hidden, unembed, targets):
    return jax.grad(lambda h, e: jnp.sum(jnp.where(dead, 0, heads.token_logprobs(h, e, targets, chunk=3))), (0, 1))(hidden, unembed)

  jax.tree.map(close, masked(garbage, unembed, nowhere), masked(hidden, unembed, targets))


@functools.partial(jax.jit, static_argnames=('entropy_grad', 'unembed_grad'))
def masked_scores_and_grads(hidden, unembed, targets, mask, mix, **options):
  def loss(hidden, unembed):
    scores = heads.token_logprobs_and_entropy(hidden, unembed, targets, mask, softcap=3.0, chunk=3, **options)
    return jnp.sum(mix * scores[0] + (mix**2 - 0.3) * scores[1]), scores

  grads, scores = jax.grad(loss, (0, 1), has_aux=True)(hidden, unembed)
  return scores, grads


@pytest.mark.parametrize('mesh', [{}, MESHES['fsdp2_tensor2'], MESHES['seq2']], ids=['one', 'fsdp2_tensor2', 'seq2'], indirect=True)
@pytest.mark.parametrize(('entropy_grad', 'unembed_grad'), [(True, True), (True, False), (False, True), (False, False)])
def test_masked_positions_are_zero_and_the_rest_is_what_it_was(mesh, entropy_grad, unembed_grad):
  hidden, unembed, targets, mix = arrays(96)
  mask = np.random.default_rng(2).random((B, T)) < 0.4
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    wanted = dense_jax(hidden, unembed, targets, 3.0)

    def loss(hidden, unembed):
      logprobs, entropy = dense_jax(hidden, unembed, targets, 3.0)
      entropy = entropy if entropy_grad else jax.lax.stop_gradient(entropy)
      return jnp.sum(jnp.where(mask, mix * logprobs + (mix**2 - 0.3) * entropy, 0))

    wanted_grads = jax.grad(loss, (0, 1))(hidden, unembed)
  garbage, nowhere = np.where(mask[..., None], hidden, np.nan), np.where(mask, targets, -1)
  placed = place(mesh, garbage.astype(np.float32), unembed, nowhere.astype(np.int32), mask, mix)
  scores, grads = masked_scores_and_grads(*placed, entropy_grad=entropy_grad, unembed_grad=unembed_grad)
  for got, want in zip(scores, wanted):
    close(got, np.where(mask, want, 0))
    assert not np.any(np.asarray(got)[~mask])
  close(grads[0], wanted_grads[0])
  close(grads[1], wanted_grads[1] if unembed_grad else 0 * unembed)
  # Nothing counts: nothing is computed, whatever is there.
  for got in jax.tree.leaves(masked_scores_and_grads(*placed[:3], placed[3] & False, placed[4], entropy_grad=entropy_grad,
                                                     unembed_grad=unembed_grad)):
    assert not np.any(got)


@pytest.mark.parametrize(('num_live', 'visited'), [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4)])
def test_chunks_that_count_nothing_are_not_visited(num_live, visited):
  hidden, unembed, targets, _ = arrays()
  mask = np.zeros(B * T, bool)
  mask[np.random.default_rng(3).permutation(B * T)[:num_live]] = True
  plan, _ = head_blocks.make_plan(hidden, unembed, targets, None, 8, False)
  chunks = head_blocks.chunks_of(plan, jnp.asarray(mask.reshape(B, T)))
  assert (chunks.count, chunks.size) == (4, 4)
  assert chunks.fold(lambda _, visits: visits + 1, 0) == visited


def test_a_frozen_head_leaves_no_matmul_to_backward():
  hidden, unembed, targets, _ = arrays()
  for entropy in (False, True):
    function = functools.partial(heads.token_logprobs_and_entropy, entropy_grad=False) if entropy else heads.token_logprobs
    _, transpose = jax.vjp(lambda h: jax.tree.leaves(function(h, unembed, targets, unembed_grad=False))[0], hidden)
    assert 'dot_general' not in str(jax.make_jaxpr(transpose)(jnp.ones((B, T))))


def test_nll_carries_no_gradient():
  hidden, unembed, targets, weight = arrays()
  assert not np.any(jax.grad(lambda h: jnp.sum(heads.weighted_nll(h, unembed, targets, weight)[1]))(hidden))


def test_bfloat16_keeps_the_gradient_of_a_confident_target():
  # The targets' probability is about 0.999. Their factor p - 1 would be 0 or several times too large if it were taken from a bf16 p.
  _, unembed, targets, _ = arrays()
  unembed = jnp.asarray(4 * unembed / np.linalg.norm(unembed, axis=-1, keepdims=True), jnp.bfloat16)
  hidden = 1.25 * unembed[targets]
  wide = [x.astype(jnp.float32) for x in (hidden, unembed)]
  weight = np.full((B, T), 1 / (B * T), np.float32)
  wanted, wanted_nll, wanted_grads = nll_and_grads(*wide, targets, weight)
  loss, nll, grads = nll_and_grads(hidden, unembed, targets, weight)
  assert 1e-4 < wanted < 3e-3, wanted
  np.testing.assert_allclose(nll, wanted_nll, atol=1e-5)
  assert [x.dtype for x in grads[:2]] == [jnp.bfloat16] * 2
  for got, wanted in zip(grads[:2], wanted_grads[:2], strict=True):
    assert np.linalg.norm(np.asarray(got, np.float32) - wanted) < 0.01 * np.linalg.norm(wanted)
  grads = scores_and_grads(hidden, unembed, targets, weight)[1]
  for got, wanted in zip(grads, scores_and_grads(*wide, targets, weight)[1], strict=True):
    assert np.linalg.norm(np.asarray(got, np.float32) - wanted) < 0.01 * np.linalg.norm(wanted)


def test_operands_take_the_dtype_of_hidden_and_gradients_that_of_their_array():
  hidden, unembed, targets, weight = arrays()
  hidden, rounded = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(unembed, jnp.bfloat16)
  got, wanted = nll_and_grads(hidden, unembed, targets, weight), nll_and_grads(hidden, rounded, targets, weight)
  close(got[0], wanted[0], 1e-6)
  assert [x.dtype for x in got[2]] == [jnp.bfloat16, jnp.float32, jnp.float32]
  assert [x.dtype for x in wanted[2]] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


def sizes(jaxpr):
  """Yield the number of elements of every value computed in a jaxpr and the jaxprs inside it."""
  for equation in jaxpr.eqns:
    yield from (value.aval.size for value in equation.outvars)
    for inner in jaxprs_in_params(equation.params):
      yield from sizes(inner)


@pytest.mark.parametrize('function', [nll_and_grads, scores_and_grads])
def test_nothing_is_as_large_as_all_logits(function):
  shape = jax.ShapeDtypeStruct
  arguments = (shape((8, 64, D), jnp.bfloat16), shape((V, D), jnp.bfloat16), shape((8, 64), jnp.int32), shape((8, 64), jnp.float32))
  jaxpr = jax.make_jaxpr(functools.partial(function, chunk=32))(*arguments).jaxpr
  # All logits are 512 x 97; the largest value is hidden itself, 512 x 16, for a chunk's logits are only 32 x 97.
  assert max(sizes(jaxpr)) == 8 * 64 * D


def test_a_frozen_head_costs_no_gradient():
  given = arrays()

  def num_dots(function, unembed_grad):
    return str(jax.make_jaxpr(functools.partial(function, unembed_grad=unembed_grad))(*given)).count('dot_general[')

  # Every dot appears twice: in the loop over whole blocks, and for the rest.
  assert [num_dots(nll_and_grads, wanted) for wanted in (True, False)] == [2 * 3, 2 * 2]
  assert [num_dots(scores_and_grads, wanted) for wanted in (True, False)] == [2 * 4, 2 * 3]
  kept = f'[{V},4]'  # the exponentials of a chunk: 16 tokens in chunks of at most 5 are four of 4
  texts = [str(jax.make_jaxpr(functools.partial(nll_and_grads, chunk=5, unembed_grad=wanted))(*given)) for wanted in (True, False)]
  assert [kept in text for text in texts] == [True, False]
  for got, wanted in ((function(*given, unembed_grad=False)[-1], function(*given)[-1]) for function in (nll_and_grads, scores_and_grads)):
    close(got[0], wanted[0], 1e-6)
    assert not np.any(got[1])


def test_the_default_chunk_bounds_what_is_kept():
  shape = jax.ShapeDtypeStruct
  hidden, targets = shape((8, 256, 64), jnp.float32), shape((8, 256), jnp.int32)
  plan, _ = head_blocks.make_plan(hidden, jnp.zeros((2**18, 64)), targets, None, None, True)
  assert plan.chunk == 256  # 256 tokens x 2**18 words x 4 bytes
  plan, _ = head_blocks.make_plan(hidden, jnp.zeros((100, 64)), targets, None, None, True)
  assert plan.chunk == 1024


@pytest.mark.parametrize(('change', 'error', 'message'), [
    ({'hidden': np.zeros((B, T, D + 1), np.float32)}, ValueError, r'hidden_BTD\(2, 8, 17\) and unembed_VD\(97, 16\).*one D'),
    ({'hidden': np.zeros((B * T, D), np.float32)}, ValueError, r'hidden_BTD\(16, 16\).*\[B, T, D\]'),
    ({'targets': np.zeros((B, T + 1), np.int32)}, ValueError, r'targets_BT\(2, 9\).*hidden_BTD\(2, 8, 16\)'),
    ({'targets': np.zeros((B, T), np.float32)}, TypeError, 'targets_BT must be of integer dtype, got float32'),
    ({'hidden': np.zeros((B, T, D), np.int32)}, TypeError, 'hidden_BTD must be of floating dtype, got int32'),
    ({'unembed': np.zeros((V, D), np.int8)}, TypeError, 'unembed_VD must be of floating dtype, got int8'),
    ({'weight': np.zeros((B,), np.float32)}, ValueError, r'weight_BT\(2,\).*targets_BT\(2, 8\)'),
    ({'weight': np.zeros((B, T), bool)}, TypeError, r'weight_BT must be floating, got bool.*astype'),
    ({'chunk': 0}, ValueError, 'chunk=0 must be at least 1'),
    ({'softcap': 0.0}, ValueError, 'softcap=0.0 must be positive, or None'),
])
def test_bad_input(change, error, message):
  hidden, unembed, targets, weight = arrays()
  given = {'hidden': hidden, 'unembed': unembed, 'targets': targets, 'weight': weight, 'chunk': None, 'softcap': None} | change
  positional = [given.pop(name) for name in ('hidden', 'unembed', 'targets', 'weight')]
  with pytest.raises(error, match=message):
    heads.weighted_nll(*positional, **given)


def test_a_mask_is_bool_and_has_the_shape_of_the_targets():
  hidden, unembed, targets, weight = arrays()
  with pytest.raises(TypeError, match=r'mask_BT must be bool, got float32; a weight becomes a mask by != 0'):
    heads.token_logprobs(hidden, unembed, targets, weight)
  with pytest.raises(ValueError, match=r'mask_BT\(2,\) must have the shape of the tokens, \(2, 8\)'):
    heads.token_logprobs(hidden, unembed, targets, np.ones(B, bool))


@pytest.mark.parametrize('mesh', [{'fsdp': 2, 'tensor': 2}], indirect=True)
@pytest.mark.parametrize(('hidden_part', 'unembed_part', 'message'), [
    (P(None, None, 'tensor'), P(None, None), 'last axis must be whole'),
    (P('tensor', None, None), P('tensor', None), 'splits both the tokens'),
    (P(None, None, None), P(None, 'fsdp'), 'splits D of unembed_VD'),
])
def test_partitions_that_do_not_fit(mesh, hidden_part, unembed_part, message):
  hidden, unembed, targets, _ = arrays(96)
  hidden = jax.device_put(hidden, NamedSharding(mesh, hidden_part))
  unembed = jax.device_put(unembed, NamedSharding(mesh, unembed_part))
  with pytest.raises(ValueError, match=message):
    heads.token_logprobs(hidden, unembed, targets)


def test_a_mesh_is_required():
  hidden, unembed, targets, _ = arrays()
  with jax.set_mesh(jax.make_mesh((1,), ('x',), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Explicit,))), pytest.raises(
      RuntimeError, match='No mesh with axes'):
    heads.token_logprobs(hidden, unembed, targets)
