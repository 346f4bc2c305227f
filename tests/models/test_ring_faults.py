"""What users of other long-context attention met and reported, one test each, by repository and number.

Elsewhere: cuDNN's NaNs and its probe (jax#32242: test_kernels), rotary positions (Megatron-DeepSpeed#399: test_rope), loss and labels over shards
(DeepSpeed#5248, transformers#36607: tests/rl), wrong declared requirements (ringattention#16: tests/test_static.py).
"""

import dataclasses
import inspect
import os

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention, ring_attention, sharding, startup, token_order
from models.kernels import xla
from tests import tiny
from tests.models import rings
from tests.models.rings import Case

ZIGZAG = Case(seq=8, order='zigzag')


def test_rounding_does_not_grow_with_the_ring():
  """zhuzilin/ring-flash-attention#42, #22: block results in bfloat16 made an error of gradients that grew with the ring."""
  inputs = rings.draw(512, head_dim=16)
  expected = rings.by_definition(Case(dtype='bfloat16'), inputs)
  dense, two, eight = (rings.relative(rings.run(Case(seq=seq, order=order, dtype='bfloat16', kernel=kernel), inputs), expected)
                       for seq, order, kernel in ((1, 'contiguous', 'dense'), (2, 'zigzag', 'auto'), (8, 'zigzag', 'auto')))
  for name in dense:
    assert eight[name] <= 1.1 * two[name], name
    assert eight[name] <= 1.1 * dense[name], name


def test_merging_large_logits():
  """jzhang38/EasyContext#14: a merge by log(1 + exp(x)) overflowed."""
  out_a, out_b = jnp.ones((2, 3)), jnp.full((2, 3), 2.0)
  for high, low in ((1e4, -1e4), (1e4, 9.9999e3), (1e4, xla.NEGATIVE), (xla.NEGATIVE, xla.NEGATIVE)):
    share = 1 / (1 + np.exp(np.float64(low) - high))
    out, lse = ring_attention.merge(out_a, jnp.full(2, high), out_b, jnp.full(2, low))
    np.testing.assert_allclose(out, np.full((2, 3), share + 2 * (1 - share)), rtol=1e-3)
    np.testing.assert_allclose(lse, np.full(2, high), rtol=1e-4)
  inputs = rings.draw(256)
  large = inputs._replace(q=inputs.q * 3e4)
  expected = rings.by_definition(ZIGZAG, large)
  got = rings.run(ZIGZAG, large)
  # With logits of +-1e5 a query takes one value or the mean of two that are equal to within float32.
  assert np.mean(np.abs(got.out - expected.out) > 1e-2) < 0.01 and all(np.all(np.isfinite(x)) for x in got[:4])


@pytest.mark.parametrize('mask', ['causal', 'documents', 'window'])
@pytest.mark.parametrize('order', ['contiguous', 'zigzag'])
def test_gradients_of_every_mask_and_order(mask, order):
  """NVIDIA/TransformerEngine#1557, Megatron-LM#1464: dq, dk and dv were wrong where forward was right."""
  inputs = rings.draw(256, documents=(60, 150, 40) if mask == 'documents' else ())
  case = Case(seq=8, order=order, window=40 if mask == 'window' else None)
  rings.assert_near(rings.run(case, inputs), rings.by_definition(case, inputs))


@pytest.mark.parametrize('length, seq', [(1, 8), (7, 8), (97, 8), (7, 2), (1000, 2), (4097, 8)])
def test_any_length_is_exact(length, seq):
  """TransformerEngine#1930, Megatron-LM#1669: 7 tokens on two devices were taken for 6; TransformerEngine#3331: padding cost real keys."""
  inputs = rings.draw(length, seed=length)
  case = Case(seq=seq, order='zigzag')
  rings.assert_near(rings.run(case, inputs), rings.by_definition(case, inputs))


def test_padding_at_the_end_changes_no_bit_from_run_to_run():
  """TransformerEngine#3331: with padding at the end, results changed from run to run."""
  inputs = rings.draw(256, documents=(60, 150))
  first, second = rings.run(ZIGZAG, inputs), rings.run(ZIGZAG, inputs)
  jax.tree.map(np.testing.assert_array_equal, first, second)
  rings.assert_near(first, rings.by_definition(ZIGZAG, inputs))


@pytest.mark.parametrize('documents', [(20,), (0,)], ids=['most devices have only padding', 'all have'])
def test_a_device_of_padding_gives_zeros(documents):
  """Megatron-LM#1764, NeMo#14488, axolotl#3033, Megatron-Bridge#3117: where all was masked came NaN."""
  inputs = rings.draw(256, documents=documents)
  got = rings.run(ZIGZAG, inputs)
  rings.assert_near(got, rings.by_definition(ZIGZAG, inputs))
  for x in got[:4]:
    assert not np.any(x[:, documents[0]:])


def test_the_order_of_a_ring_of_rings():
  """feifeibear/long-context-attention#53: a zigzag over a ring and an exchange of heads was put together in the wrong order."""
  inputs = rings.draw(320, heads=4, kv_heads=2, documents=(100, 200))
  case = Case(seq=2, ulysses=4, order='zigzag')
  rings.assert_near(rings.run(case, inputs), rings.by_definition(case, inputs), out=2e-6, dq=4e-6)
  for order, length in (('zigzag', 320), ('striped', 4096), ('contiguous', 320)):
    token_T = token_order.places(order, length, 8)
    np.testing.assert_array_equal(token_T[np.argsort(token_T)], np.arange(length))


@pytest.mark.parametrize('sizes, layout, message', [
    ({'ulysses': 8}, {}, 'mesh.ulysses=8 exchanges tokens for heads, and the 4 heads that a device has of model.num_heads=4 cannot be dealt '
                         'to 8; use mesh.ulysses=4'),
    ({'ulysses': 2, 'tensor': 4}, {}, 'the 1 heads that a device has of model.num_heads=4 cannot be dealt to 2'),
    ({'seq': 2}, {'attention': 'dense'}, "layout.attention='dense' needs whole rows, but the mesh splits their length in 2"),
])
def test_what_cannot_be_split_is_refused_before_tracing(sizes, layout, message):
  """zhuzilin/ring-flash-attention#39, #67, #46: shapes that did not divide ended in collectives that did not match."""
  mesh = sharding.make_mesh(devices=jax.devices()[:int(np.prod(list(sizes.values())))], **sizes)
  rules = tuple((name, () if name == 'kv_heads' else axes) for name, axes in sharding.TRAIN.rules)
  with pytest.raises(ValueError) as error:
    attention.check(sharding.Layout(**layout, rules=rules), tiny.config(), 'cpu', mesh)
  assert message in str(error.value)


def test_kv_heads_that_cannot_be_dealt_are_refused():
  """zhuzilin/ring-flash-attention#46: as above, for grouped heads."""
  mesh = sharding.make_mesh(ulysses=4, devices=jax.devices()[:4])
  with pytest.raises(ValueError, match='the 6 heads that a device has of model.num_kv_heads=6 cannot be dealt to 4; use mesh.ulysses=2'):
    attention.check(sharding.TRAIN, tiny.config(num_heads=12, num_kv_heads=6), 'cpu', mesh)


def test_positions_and_segments_have_no_default():
  """TransformerEngine#2349: default positions were not split as the segments were."""
  names = ['query_positions_BT', 'key_positions_BS', 'query_segments_BT', 'key_segments_BS']
  for function in (ring_attention.attend, attention.attend_dense):
    parameters = inspect.signature(function).parameters
    assert [parameters[name].default for name in names] == [inspect.Parameter.empty] * 4


@pytest.mark.parametrize('kernel', ['dense', 'blockwise'])
def test_a_window_without_documents_hides_past_and_future(kernel):
  """jax#32300, jax#39576: a window was ignored without a mask, or let queries see the future."""
  inputs = rings.draw(64)
  case = Case(window=5, kernel=kernel)
  before = rings.run(case, inputs).out
  rng = np.random.default_rng(1)
  for token, unchanged in ((30, [*range(30), *range(35, 64)]), (63, range(63)), (0, range(5, 64))):
    k, v = inputs.k.copy(), inputs.v.copy()
    k[:, token], v[:, token] = rng.standard_normal((2, 8))
    after = rings.run(case, inputs._replace(k=k, v=v)).out
    np.testing.assert_array_equal(before[:, list(unchanged)], after[:, list(unchanged)])
    assert np.any(before != after)


def test_a_query_that_sees_nothing_has_finite_numbers():
  """TransformerEngine#3528: a window of -1 gave a log-sum-exp of -inf and then NaN in backward."""
  one = jnp.ones((1, 16, 1, 1, 8))
  arrays = (one, one[:, :, 0], one[:, :, 0], *(jnp.full((1, 16), x, jnp.int32) for x in (0, 5, 1, 1)))
  options = {'scale': 1.0, 'window': None, 'cap': None}
  out, lse = xla.KERNEL.forward(*arrays, **options)
  assert not np.any(out) and np.all(lse == np.float32(xla.NEGATIVE)) and np.all(np.isfinite(lse))
  gradients = xla.KERNEL.backward(*arrays, one, lse, jnp.zeros_like(lse), tuple(jnp.zeros(x.shape) for x in arrays[:3]), **options)
  assert not any(np.any(x) for x in gradients)
  with pytest.raises(ValueError, match='model.window=-1 must be at least 1'):
    tiny.config(window=-1)


@pytest.mark.parametrize('kernel', ['dense', 'blockwise'])
def test_padding_does_not_attend_to_padding(kernel):
  """AI-Hypercomputer/maxtext#4908: the segment of padding equaled itself, so that padding was attended to."""
  inputs = rings.draw(64, documents=(40,))
  assert not np.any(rings.run(Case(kernel=kernel), inputs).out[:, 40:])


def test_no_mask_is_made_on_the_host_or_for_the_whole_row():
  """maxtext#2011, jax#37179, tokamax's NumpyMask: a causal mask of 1M tokens would take a terabyte."""
  length = 2**20
  function, mesh, layout = rings.program(ZIGZAG, rings.config_of(ZIGZAG, rings.draw(1)))
  shapes = [(1, length, 1, 8)] * 4 + [(1, length)] * 2
  arguments = [jax.ShapeDtypeStruct(shape, jnp.int32 if len(shape) == 2 else jnp.float32, sharding=jax.NamedSharding(
      mesh, layout.spec('batch', 'length', *['act_heads', None][:len(shape) - 2]))) for shape in shapes]
  with jax.set_mesh(mesh):
    jaxpr = function.trace(*arguments, None).jaxpr.jaxpr
  assert max(variable.aval.size for equation in equations(jaxpr) for variable in (*equation.outvars, *equation.invars)
             if not isinstance(variable, jax.extend.core.Literal)) == length * 8


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      yield from equations(inner)


def test_keys_are_passed_on_and_not_gathered():
  """openxla/xla#20808: the permutes of a shard_map became an all-gather."""
  function, mesh, arguments, _ = rings.place(ZIGZAG, rings.draw(256))
  with jax.set_mesh(mesh):
    text = function.lower(*arguments).compile().as_text()
  assert 'collective-permute' in text
  assert not any(name in text for name in ('all-gather', 'all-reduce', 'all-to-all'))


def test_simulated_devices_may_wait_for_each_other():
  """jax#31818, jax#40831, openxla/xla#32115: collectives of devices that share a core ran into a time limit of seconds."""
  flags = dict(flag.split('=') for flag in os.environ['XLA_FLAGS'].split() if 'collective_call' in flag)
  assert flags == {name: seconds for name, seconds in startup.CPU_FLAGS.items() if 'collective_call' in name}
  assert float(flags['--xla_cpu_collective_call_terminate_timeout_seconds']) >= 600


def test_rows_of_a_batch_have_packings_of_their_own():
  """marin-community/marin#5749: the packing of the first row was used for all."""
  inputs = rings.draw(256, rows=3, documents=[(100, 50, 90), (1, 200), (256,)])
  rings.assert_near(rings.run(ZIGZAG, inputs), rings.by_definition(ZIGZAG, inputs))


@pytest.mark.parametrize('platform', ['cpu', 'elsewhere'])
def test_what_a_hop_sends_does_not_wait_for_what_it_computes(platform):
  """flash_attn_jax#10, marin#7024: transfers were to overlap with the computation and did not, for they depended on it."""
  function, mesh, arguments, _ = rings.place(ZIGZAG, rings.draw(256))
  with jax.set_mesh(mesh):
    jaxpr = function.trace(*arguments).jaxpr.jaxpr
  hops = [body for body in bodies(jaxpr) if any(equation.primitive.name == 'ppermute' for equation in equations(body))
          and any(equation.primitive.name == 'dot_general' for equation in equations(body))]
  # The loops of forward and of backward, in whose bodies the first equation that sends reads the loop's state and nothing computed in it.
  assert len(hops) == 2
  index = 0 if platform == 'elsewhere' else 1
  for body in hops:
    sends, = (equation for equation in body.eqns if any(inner.primitive.name == 'ppermute' for inner in equations_of(equation)))
    assert len(sends.params['branches']) == 2 and len(sends.params['branches'][index].jaxpr.eqns) >= 3
    computed = {id(variable) for equation in body.eqns[:body.eqns.index(sends)]
                if any(inner.primitive.name == 'dot_general' for inner in equations_of(equation)) for variable in equation.outvars}
    assert not computed and not any(id(variable) in computed for variable in sends.invars)


def equations_of(equation):
  yield equation
  for inner in jax.extend.core.jaxprs_in_params(equation.params):
    yield from equations(inner)


def bodies(jaxpr):
  return [equation.params['body_jaxpr'].jaxpr for equation in equations(jaxpr) if equation.primitive.name == 'while']


@pytest.mark.parametrize('case', [ZIGZAG, Case(seq=8, order='zigzag', window=20), Case(seq=4, ulysses=2, order='zigzag', sinks=True)], ids=str)
def test_collectives_of_a_program_on_cpu_are_in_one_order(case):
  """XLA's CPU backend takes collectives that do not depend on each other for one another: wrong data, a deadlock or a crash, now and then."""
  function, mesh, arguments, _ = rings.place(dataclasses.replace(case, vjp=False), rings.draw(256, heads=2, kv_heads=2, sinks=case.sinks))
  with jax.set_mesh(mesh):
    gradient = jax.jit(jax.grad(lambda q, k, v, *rest: jnp.sum(jnp.sin(function(q, k, v, *rest)[0])), argnums=(0, 1, 2)))
    text = gradient.lower(*arguments).compile().as_text()
  for computation in text.split('\n\n'):
    assert is_a_chain(computation), computation[:200]
  assert text.count('channel_id=1,') >= 10


def is_a_chain(computation):
  """Return whether of any two collectives of an HLO computation (a loop that has some counts as one) one depends on the other."""
  operands, collectives = {}, []
  for line in computation.splitlines():
    name, equals, rest = line.strip().removeprefix('ROOT ').partition(' = ')
    if equals:
      operands[name] = {word.strip('(),') for word in rest.replace('(', ' (').split() if word.strip('(),').startswith('%')}
      # JAX names its own so; what XLA adds has other numbers.
      collectives += [name] * ('channel_id=1,' in rest)

  def ancestors(name, seen):
    for operand in operands.get(name, ()):
      if operand not in seen:
        seen.add(operand)
        ancestors(operand, seen)
    return seen

  above = [ancestors(name, set()) for name in collectives]
  return all(a in above[j] or b in above[i] for i, a in enumerate(collectives) for j, b in enumerate(collectives) if i != j)
