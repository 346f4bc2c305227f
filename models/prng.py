"""Random keys by name and counter: folded from one root, never stored, never carried through a loop."""

from __future__ import annotations

import hashlib

import jax


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
  """Derive the key of a named stream; adding a stream changes no other."""
  return jax.random.fold_in(key, int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], 'little'))


def stream_key(seed: int, name: str, *counters) -> jax.Array:
  """Return the key of stream `name` under the root `seed`, folded with the counters (step, index ...) in order."""
  key = fold_in_name(jax.random.key(seed), name)
  for counter in counters:
    key = jax.random.fold_in(key, counter)
  return key
