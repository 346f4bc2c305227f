"""A device's tokens in chunks of one size, those that count first: work on tokens that costs nothing for those that do not.

Called on one device's part, inside `shard_map`. How many chunks are visited is known only when it runs, so what folds over them has its own
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax import lax
import jax.numpy as jnp


@dataclass(frozen=True)
class Chunks:
  """A device's tokens in chunks, those that count first.

  Attributes:
    order_T: the places of the tokens in this order.
    mask_BT: which of them count.
    count, size: chunks, and tokens of each.
  """

  order_T: jax.Array
  mask_BT: jax.Array
  count: int
  size: int

  @classmethod
  def of(cls, mask_BT: jax.Array, most: int, least_count: int = 1) -> Chunks:
    """Cut into at least `least_count` chunks of at most `most` tokens."""
    count = max(-(-mask_BT.size // most), min(least_count, mask_BT.size))
    return cls(jnp.argsort(~mask_BT.reshape(-1), stable=True), mask_BT, count, -(-mask_BT.size // count))

  def take(self, x_BT: jax.Array) -> jax.Array:
    """Return [chunks, tokens of a chunk, ...] from [B, T, ...]; 0 where a token does not count."""
    tail = x_BT.shape[2:]
    x_BT = jnp.where(jnp.expand_dims(self.mask_BT, range(2, x_BT.ndim)), x_BT, 0)
    x_T = x_BT.reshape(-1, *tail)[self.order_T]
    return jnp.pad(x_T, ((0, self.count * self.size - self.mask_BT.size),) + ((0, 0),) * len(tail)).reshape(self.count, self.size, *tail)

  def put(self, x: jax.Array) -> jax.Array:
    """Undo `take`."""
    tail = x.shape[2:]
    x_BT = jnp.zeros((self.mask_BT.size, *tail), x.dtype).at[self.order_T].set(x.reshape(-1, *tail)[:self.mask_BT.size])
    return jnp.where(jnp.expand_dims(self.mask_BT, range(2, 2 + len(tail))), x_BT.reshape(*self.mask_BT.shape, *tail), 0)

  def fold(self, body: Callable, carry):
    """Fold `body(index, carry)` over the chunks that hold a token that counts."""
    num_live = (jnp.sum(self.mask_BT) + self.size - 1) // self.size
    return lax.fori_loop(0, num_live, body, carry)

  def map(self, function: Callable, carry, arrays: tuple):
    """Return (carry, results) of `function(carry, chunk's arrays)`; results of chunks that are left out are 0."""
    def one(carry, index):
      return function(carry, tuple(lax.dynamic_index_in_dim(x, index, keepdims=False) for x in arrays))

    _, shapes = jax.eval_shape(one, carry, 0)

    def body(index, state):
      carry, results = state
      carry, new = one(carry, index)
      return carry, jax.tree.map(lambda whole, x: lax.dynamic_update_index_in_dim(whole, x, index, 0), results, new)

    return self.fold(body, (carry, jax.tree.map(lambda x: jnp.zeros((self.count, *x.shape), x.dtype), shapes)))
