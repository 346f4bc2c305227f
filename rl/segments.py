"""Sums over each text of packed rows, in any order of tokens and with the length split over devices.

A number of a text is [B, M]: row, and number of the text in the row less 1. Everything is a reduction over the row under the text's mask, so a
row that lies on several devices costs one all-reduce of [B, M]. Memory is linear in a device's tokens times M: with M = 32 a loss and its
gradient take 400 to 500 bytes a token (measured on CPU); very long rows hold few texts, and are told so by a smaller M.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rl.types import Batch


class Segments:
  """The texts of a batch, at most `max_segments` in a row.

  Attributes:
    is_over: bool scalar, whether a row has more texts than that; what is computed of it is then not to be trusted.
  """

  def __init__(self, batch: Batch, max_segments: int):
    """Raise ValueError if `max_segments` is below 1."""
    if max_segments < 1:
      raise ValueError(f'max_segments={max_segments} must be at least 1.')
    self._positions_BT = batch.positions_BT
    self._is_in_BTM = batch.segment_ids_BT[..., None] == jnp.arange(1, max_segments + 1)[None, None]
    self.is_over = jnp.any(batch.segment_ids_BT > max_segments)

  def sum(self, values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Return sums_BM, float32, of the values where the mask is true."""
    values_BT = jnp.where(mask_BT, values_BT, 0).astype(jnp.float32)
    return jnp.sum(jnp.where(self._is_in_BTM, values_BT[..., None], 0), axis=1)

  def mean(self, values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Return means_BM over the places where the mask is true; 0 where there is none."""
    return self.sum(values_BT, mask_BT) / jnp.maximum(self.sum(mask_BT, mask_BT), 1)

  def last(self, values_BT: jax.Array) -> jax.Array:
    """Return values_BM, each text's value at its last token; 0 where there is no such text."""
    positions_BTM = jnp.where(self._is_in_BTM, self._positions_BT[..., None], -1)
    is_last_BTM = self._is_in_BTM & (positions_BTM == positions_BTM.max(1, keepdims=True))
    return jnp.sum(jnp.where(is_last_BTM, values_BT[..., None], 0), axis=1)


def pairs(values_BM: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return (chosen_BM, rejected_BM) of rows whose texts are pairs: odd segments are the chosen texts, each followed by its rejected one."""
  return values_BM[:, 0::2], values_BM[:, 1::2]
