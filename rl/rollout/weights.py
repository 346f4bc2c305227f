"""Publishing: from the parameters that are trained to those that sample, and proof that they are the same policy.

`publish` merges adapters, casts, and reshards into the rollout layout. Then it checks what goes wrong without a sound elsewhere: that the
published weights changed when the trained ones did (by checksum), and that both give the same log-probabilities to fixed tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from models import decode, heads, transformer
from models.config import ModelConfig
from models.sharding import Layout
from rl.types import Params

_PROBE_TOKENS = 16


class Published(NamedTuple):
  """Parameters to sample with.

  Attributes:
    version: counts the updates of the policy.
    params: as `Engine.update` takes them.
    checksum: of every bit of them.
    probe_diff_nats: mean absolute difference of the trained and the published parameters' log-probabilities on the probe.
  """
  version: int
  params: Params
  checksum: int
  probe_diff_nats: float


class Publisher:
  """Publishes the versions of one policy."""

  def __init__(self, config: ModelConfig, layout: Layout, mesh: Mesh, train_layout: Layout, probe_T: np.ndarray, *,
               max_probe_diff_nats: float):
    """Prepare for parameters on `mesh`.

    `layout` is the engine's; `probe_T` are the ids of some ordinary text, at least two; `max_probe_diff_nats` bounds the difference that
    the two layouts' precision may make.
    """
    self._config, self._layout, self._mesh, self._train_layout = (
        config, layout, mesh, dataclasses.replace(train_layout, order='contiguous'))
    self._max_probe_diff_nats = max_probe_diff_nats
    self._last: tuple[int, int] | None = None
    rows = max(decode.num_shards(layout, mesh), mesh.shape['data'] * mesh.shape['fsdp'])
    num_tokens = _PROBE_TOKENS * math.prod(mesh.shape[axis] for axis in train_layout.length_axes)
    self._tokens_BT = np.tile(np.resize(probe_T, num_tokens).astype(np.int32), (rows, 1))

  def publish(self, params: Params, version: int, *, has_changed: bool = True) -> Published:
    """Return `params` (adapters included) for the engine.

    Raises:
      RuntimeError: the published weights are those of the version before though the policy `has_changed`, or they are another policy.
    """
    prepared = decode.decode_params(params, self._config, self._layout, self._mesh)
    with jax.set_mesh(self._mesh):
      checksum = int(_checksum(prepared))
      probe = functools.partial(_probe, config=self._config)
      targets_BT = np.roll(self._tokens_BT, -1, axis=1)
      trained_BT = np.asarray(probe(params, self._tokens_BT, targets_BT, layout=self._train_layout))
      published_BT = np.asarray(probe(prepared, self._tokens_BT, targets_BT, layout=self._layout))
    if has_changed and self._last is not None and self._last[1] == checksum:
      raise RuntimeError(f'The weights published as version {version} are bit for bit those of version {self._last[0]}, though the policy was '
                         'updated in between; the trained parameters do not reach the sampler.')
    diff = float(np.abs(trained_BT - published_BT).mean())
    if not diff <= self._max_probe_diff_nats:
      raise RuntimeError(f'Version {version}: trained and published parameters differ by {diff:.4g} nats a token on the probe, at most '
                         f'{self._max_probe_diff_nats} is expected of {self._layout.compute_dtype}; the sampler would be another policy.')
    self._last = (version, checksum)
    return Published(version, prepared, checksum, diff)


@functools.partial(jax.jit, static_argnames=('config', 'layout'))
def _probe(params, tokens_BT, targets_BT, *, config: ModelConfig, layout: Layout) -> jax.Array:
  """Return the log-probabilities of the targets under the parameters and the layout."""
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
  arrays = (tokens_BT, targets_BT, positions_BT, jnp.ones(tokens_BT.shape, jnp.int32))
  tokens_BT, targets_BT, positions_BT, ones_BT = (jax.reshard(array, layout.spec('batch', 'length')) for array in arrays)
  hidden_BTD, _ = transformer.forward(params, tokens_BT, positions_BT, ones_BT, config, layout)
  return heads.token_logprobs(hidden_BTD, transformer.unembedding(params, config), targets_BT, softcap=config.final_softcap)


@jax.jit
def _checksum(params) -> jax.Array:
  """Return the sum of all weights' bits, each leaf's multiplied by its own odd number; integer sums do not depend on their order."""
  total = jnp.uint32(0)
  for number, leaf in enumerate(jax.tree.leaves(params)):
    bits = jax.lax.bitcast_convert_type(leaf, {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]).astype(jnp.uint32)
    total += jnp.sum(bits, dtype=jnp.uint32) * jnp.uint32(2 * number + 1)
  return total
