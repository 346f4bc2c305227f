"""Attention on rings of simulated devices, forward and backward, and the same by its definition in float64."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import attention, sharding, token_order
from tests import tiny


class Inputs(NamedTuple):
  """Arrays of whole rows, in the order of their tokens."""
  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  dout: np.ndarray
  positions: np.ndarray
  segments: np.ndarray
  sinks: np.ndarray | None = None


class Results(NamedTuple):
  out: np.ndarray
  dq: np.ndarray
  dk: np.ndarray
  dv: np.ndarray
  dsinks: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Case:
  """A program: what is computed, and on how many devices."""
  seq: int = 1
  ulysses: int = 1
  tensor: int = 1
  order: str = 'contiguous'
  window: int | None = None
  cap: float | None = None
  sinks: bool = False
  dtype: str = 'float32'
  kernel: str = 'auto'
  scale: float | None = None
  vjp: bool = True


def draw(length, *, rows=1, heads=1, kv_heads=1, head_dim=8, documents=(), sinks=False, seed=0) -> Inputs:
  """Draw normal inputs; `documents` are the lengths of a row's documents (the same in all rows, or a list for each), rest is padding."""
  rng = np.random.default_rng(seed)
  q, k, v, dout = (rng.standard_normal((rows, length, n, head_dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads, heads))
  positions, segments = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
  for row in range(rows):
    mine = documents[row] if documents and not isinstance(documents[0], int) else documents or (length,)
    start = 0
    for number, size in enumerate(mine, start=1):
      positions[row, start:start + size], segments[row, start:start + size] = np.arange(size), number
      start += size
  return Inputs(q, k, v, dout, positions, segments, rng.standard_normal(heads).astype(np.float32) if sinks else None)


def mesh_of(case: Case):
  sizes = {'seq': case.seq, 'ulysses': case.ulysses, 'tensor': case.tensor}
  return sharding.make_mesh(devices=jax.devices()[:math.prod(sizes.values())], **sizes)


def config_of(case: Case, inputs: Inputs):
  _, _, heads, head_dim = inputs.q.shape
  return tiny.config(num_heads=heads, num_kv_heads=inputs.k.shape[2], head_dim=head_dim, query_scale=case.scale or head_dim**-0.5,
                     attention_softcap=case.cap, attention_sinks=case.sinks, window=case.window or 1)


def layout_of(case: Case, kv_heads: int):
  rules = tuple((name, () if name == 'kv_heads' and kv_heads % case.tensor else axes) for name, axes in sharding.TRAIN.rules)
  return dataclasses.replace(sharding.TRAIN, order=case.order, attention=case.kernel, rules=rules, compute_dtype=case.dtype)


@functools.cache
def program(case: Case, config):
  """Return (the jitted function of Inputs, its mesh, the layout)."""
  mesh, layout = mesh_of(case), layout_of(case, config.num_kv_heads)

  def run(q, k, v, dout, positions, segments, sinks):
    attend = attention.resolve(layout, config, positions, segments)
    kind = 'global' if case.window is None else 'local'
    function = lambda q, k, v, sinks: attend(q, k, v, kind, None, sinks)[0]
    if not case.vjp:
      return (function(q, k, v, sinks),)
    out, vjp = jax.vjp(function, q, k, v, sinks)
    return out, *vjp(dout)

  return jax.jit(run), mesh, layout


def place(case: Case, inputs: Inputs):
  """Return (the program, its arguments, which place each token has)."""
  function, mesh, layout = program(case, config_of(case, inputs))
  length = inputs.q.shape[1]
  padded = token_order.padded_length(case.order, length, case.seq, case.ulysses)
  token_T = token_order.places(case.order, padded, case.seq)

  def put(x, *axes):
    x = np.pad(x, [(0, 0), (0, padded - length)] + [(0, 0)] * (x.ndim - 2))[:, token_T]
    x = x if x.dtype == np.int32 else jnp.asarray(x, case.dtype)
    return jax.device_put(x, jax.NamedSharding(mesh, layout.spec('batch', 'length', *axes)))

  heads = [put(x, name, None) for x, name in zip(inputs[:4], ('act_heads', 'kv_heads', 'kv_heads', 'act_heads'))]
  sinks = None if inputs.sinks is None else jax.device_put(inputs.sinks, jax.NamedSharding(mesh, layout.spec('act_heads')))
  return function, mesh, (*heads, put(inputs.positions), put(inputs.segments), sinks), np.argsort(token_T)


def run(case: Case, inputs: Inputs) -> Results:
  """Compute on the case's mesh; results are in the order of the inputs, padding that the split needs left out."""
  function, mesh, arguments, place_T = place(case, inputs)
  with jax.set_mesh(mesh):
    results = [x if x is None or x.ndim == 1 else np.asarray(x)[:, place_T] for x in function(*arguments)]
  for x in results:
    if x is not None and x.ndim > 1:
      assert not np.any(x[:, inputs.q.shape[1]:]), 'padding must give exactly 0'
  return Results(*(x if x is None or x.ndim == 1 else x[:, :inputs.q.shape[1]] for x in results))


def by_definition(case: Case, inputs: Inputs) -> Results:
  """Compute in float64, from the operands as the case's dtype rounds them."""
  q, k, v, dout = (np.asarray(jnp.asarray(x, case.dtype), np.float64) for x in inputs[:4])
  rows, length, heads, head_dim = q.shape
  group, scale = heads // k.shape[2], case.scale or head_dim**-0.5
  out, dq, dk, dv = (np.zeros(x.shape) for x in (q, q, k, v))
  dsinks = None if inputs.sinks is None else np.zeros(heads)
  for b, n, start in np.ndindex(rows, heads, -(-length // 512)):
    block = slice(start * 512, (start + 1) * 512)
    positions, segments = inputs.positions[b], inputs.segments[b]
    seen = (segments[block, None] == segments) & (segments[block, None] > 0) & (positions[block, None] >= positions)
    if case.window is not None:
      seen &= positions[block, None] - positions < case.window
    key, value = k[b, :, n // group], v[b, :, n // group]
    scores = q[b, block, n] @ key.T * scale
    capped = scores if case.cap is None else case.cap * np.tanh(scores / case.cap)
    sink = -np.inf if inputs.sinks is None else float(inputs.sinks[n])
    high = np.maximum(np.max(np.where(seen, capped, -np.inf), axis=1), sink)
    high = np.where(np.isfinite(high), high, 0)[:, None]
    weights = np.where(seen, np.exp(np.minimum(capped - high, 0)), 0)
    at_sink = np.exp(sink - high)
    total = np.maximum(weights.sum(1, keepdims=True) + at_sink, 1e-300)
    weights, at_sink = weights / total, at_sink / total
    out[b, block, n] = weights @ value
    delta = np.sum(out[b, block, n] * dout[b, block, n], axis=1, keepdims=True)
    dscores = weights * (dout[b, block, n] @ value.T - delta) * scale
    if case.cap is not None:
      dscores *= 1 - np.square(capped / case.cap)
    dq[b, block, n] = dscores @ key
    dk[b, :, n // group] += dscores.T @ q[b, block, n]
    dv[b, :, n // group] += weights.T @ dout[b, block, n]
    if dsinks is not None:
      dsinks[n] -= np.sum(at_sink * delta)
  return Results(out, dq, dk, dv, dsinks)


def assert_near(got: Results, expected: Results, *, out=1e-6, dq=2e-6, dkv=1e-5):
  """Assert that results are near; the tolerances are absolute."""
  for name, bound in (('out', out), ('dq', dq), ('dk', dkv), ('dv', dkv), ('dsinks', dkv)):
    ours, theirs = getattr(got, name), getattr(expected, name)
    if theirs is not None:
      np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound, err_msg=name)


def relative(got: Results, expected: Results) -> dict[str, float]:
  """Return the length of the difference over that of what is expected, of out, dq, dk and dv."""
  return {name: float(np.linalg.norm(getattr(got, name).astype(np.float64) - getattr(expected, name)) / np.linalg.norm(getattr(expected, name)))
          for name in ('out', 'dq', 'dk', 'dv')}
