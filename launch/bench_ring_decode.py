"""One decoding step over a cache split on eight devices: by sending the query's results, and by sending the cache around the ring.

The second is what implementations of Ring Attention do that have one program for training and decoding: every device sees every key. It is
written here at its best, without the last transfer, which brings the keys home. A step is `kv_cache.attend_token`, its writes included.
"""

from __future__ import annotations

from collections.abc import Callable
import time

import jax
import jax.numpy as jnp
import numpy as np

from models import kv_cache, ring_attention, sharding
from models.config import ModelConfig

NUM_DEVICES = 8
_HEADS, _WIDTH = 2, 64


def measure(num_keys: int, num_steps: int = 3) -> dict:
  """Return CPU seconds of a step for either way, their ratio, and the larger error against float64.

  Needs `NUM_DEVICES` devices, simulated ones on CPU (`startup.use_cpu_devices`), and 4 KiB of memory a key.

  Args:
    num_keys: of the row, a multiple of NUM_DEVICES; the last is the new token's.
    num_steps: over which the least time is taken, after one that compiles.
  """
  config = ModelConfig(family='llama', vocab_size=1, num_layers=1, embed_dim=_HEADS * _WIDTH, mlp_dim=1, num_heads=_HEADS, num_kv_heads=_HEADS,
                       head_dim=_WIDTH, max_length=num_keys)
  layout, mesh = sharding.LONG_ROLLOUT, sharding.make_mesh(seq=NUM_DEVICES, devices=jax.devices()[:NUM_DEVICES])
  length_B = np.array([num_keys - 1], np.int32)
  with jax.set_mesh(mesh):
    q_BTNH, k_BTKH, v_BTKH, cache = _inputs(layout, num_keys)
    wanted_NH = _in_float64(q_BTNH, k_BTKH, v_BTKH, cache, num_keys)

    def merge(q, k, v, cache):
      length = sharding.constrain(jnp.asarray(length_B), layout, 'batch')
      return kv_cache.attend_token(length, config, layout)(q, k, v, 'global', cache)

    merged, rotated = jax.jit(merge, donate_argnums=3), jax.jit(_rotate(layout, config.score_scale))
    merge_s, rotate_s = [], []
    for _ in range(num_steps + 1):
      start = time.process_time()
      out, cache = jax.block_until_ready(merged(q_BTNH, k_BTKH, v_BTKH, cache))
      merge_s.append(time.process_time() - start)
    for _ in range(num_steps + 1):
      start = time.process_time()
      other = jax.block_until_ready(rotated(q_BTNH, cache))
      rotate_s.append(time.process_time() - start)
  merge_s, rotate_s = min(merge_s[1:]), min(rotate_s[1:])
  error = max(np.abs(np.asarray(x, np.float64)[0, 0] - wanted_NH).max() for x in (out, other))
  return {'num_keys': num_keys, 'merge_cpu_s': merge_s, 'rotate_cpu_s': rotate_s, 'ratio': rotate_s / merge_s,
          'max_error': float(error)}


def _inputs(layout, num_keys):
  """Return a token's q, k and v, and a full cache of random numbers."""
  keys = jax.random.split(jax.random.key(0), 5)
  cached = layout.spec('batch', 'kv_heads', 'cache', None)

  @jax.jit
  def make():
    token = [jax.random.normal(key, (1, 1, _HEADS, _WIDTH), out_sharding=layout.spec('batch', None, 'act_heads', None)) for key in keys[:3]]
    cache = tuple(jax.random.normal(key, (1, _HEADS, num_keys, _WIDTH), out_sharding=cached) for key in keys[3:])
    return *token, cache

  return make()


def _in_float64(q_BTNH, k_BTKH, v_BTKH, cache, num_keys):
  """Return out_NH of attention to the cache, in which the token replaces the last key."""
  own, place = (num_keys - 1) % NUM_DEVICES, (num_keys - 1) // NUM_DEVICES
  index = own * (num_keys // NUM_DEVICES) + place
  outs = []
  for head in range(_HEADS):
    keys, values = (np.asarray(x)[0, head].astype(np.float64) for x in cache)
    keys[index], values[index] = (np.asarray(x)[0, 0, head] for x in (k_BTKH, v_BTKH))
    scores = keys @ np.asarray(q_BTNH)[0, 0, head].astype(np.float64) * _WIDTH**-0.5
    weights = np.exp(scores - scores.max())
    outs.append(weights @ values / weights.sum())
  return np.stack(outs)


def _rotate(layout, scale: float) -> Callable:
  """Return step(q_BTNH, cache) -> out_BTNH: a cache that has the token goes around the ring, past the query, which is on every device."""
  heads, cached = layout.spec('batch', None, 'act_heads', None), layout.spec('batch', 'kv_heads', 'cache', None)
  axes = kv_cache.axes(layout)
  pairs = [(device, (device + 1) % NUM_DEVICES) for device in range(NUM_DEVICES)]

  def see(q_BNH, k_BNSH, v_BNSH):
    scores_BNS = jnp.einsum('BNH,BNSH->BNS', q_BNH, k_BNSH) * scale
    return jnp.einsum('BNS,BNSH->BNH', jax.nn.softmax(scores_BNS, axis=-1), v_BNSH), jax.nn.logsumexp(scores_BNS, axis=-1)

  def local(q_BTNH, cache):
    q_BNH = q_BTNH[:, 0]

    def hop(_, state):
      held, result = state
      held = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, pairs), held)
      return held, ring_attention.merge(*result, *see(q_BNH, *held))

    _, (out_BNH, _) = jax.lax.fori_loop(0, NUM_DEVICES - 1, hop, (cache, see(q_BNH, *cache)))
    # All devices have the same result; the mean says so to the compiler.
    return jax.lax.pmean(out_BNH, axes)[:, None]

  return jax.shard_map(local, in_specs=(heads, (cached, cached)), out_specs=heads)
