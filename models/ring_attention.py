"""Attention over a length that is split on a ring of devices (Ring Attention, arXiv:2310.01889), and on a ring of one: blockwise attention.

Keys and values travel around the ring with their positions and segments while each device attends with its own queries, hop by hop, through a
kernel (`kernels.xla.Kernel`). Partial results are merged in float32 by their log-sum-exp. Backward is written out: keys, values and the sums
of their gradients travel once more, and only the merged result and its log-sum-exp are kept from forward.

A hop's transfer is issued before its computation and neither needs the other. Hops are a rolled loop, so a program's size does not depend on
the number of devices; it is a `while` whose body jax.checkpoint cannot take apart. Nothing depends on the order of tokens but which hops a
window can need at all (`routes`): others are neither sent nor computed.

`over_heads` splits heads instead of tokens for the time of attention (DeepSpeed-Ulysses, arXiv:2309.14509); around a ring, both combine.

Deliberately absent: dropout, biases, and derivatives of second order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from models.kernels import xla
from models.kernels.xla import Kernel, varies_less, varying

# (step, hops): keys move by `step` devices a hop, `hops` times.
Route = tuple[int, int]


@dataclass(frozen=True)
class Ring:
  """What is computed on which ring.

  Attributes:
    axes: the mesh axes that keys travel around, outermost first; none is a ring of one device.
    size: devices of the ring.
    routes: the ways that keys take from their own device, see `routes`.
    scale: multiplies scores.
    window: how many tokens a query sees, its own included; None is all.
    cap: soft cap of scores; None is none.
    kernel: computes a hop.
  """
  axes: tuple[str, ...] = ()
  size: int = 1
  routes: tuple[Route, ...] = ()
  scale: float = 1.0
  window: int | None = None
  cap: float | None = None
  kernel: Kernel = xla.KERNEL

  @property
  def options(self) -> dict:
    return {'scale': self.scale, 'window': self.window, 'cap': self.cap}


def routes(order: str, window: int | None, num_tokens: int, num_shards: int) -> tuple[Route, ...]:
  """Return the ways around a ring of `num_shards` that bring each device every key that its queries can see.

  Args:
    order: of the tokens of a row over the shards, one of `token_order.ORDERS`; a document's tokens are neighbors in a row.
    num_tokens: of a shard.

  Raises:
    ValueError: the order is 'zigzag' and a shard cannot be halved.
  """
  if num_shards > 1 and order == 'zigzag' and num_tokens % 2:
    raise ValueError(f"layout.order 'zigzag' gives each of {num_shards} devices two pieces, and {num_tokens} tokens of a shard cannot be halved; "
                     'pad rows to `token_order.padded_length`.')
  whole = ((1, num_shards - 1),) if num_shards > 1 else ()
  if window is None or order == 'striped':
    return whole
  # How many pieces back the first query of a piece sees.
  reach = -(-(window - 1) // (num_tokens if order == 'contiguous' else num_tokens // 2))
  if order == 'contiguous':
    return ((1, reach),) if 0 < reach < num_shards - 1 else whole if reach else ()
  # Of a device's two pieces, what the early one sees lies on devices before it, and what the late one sees on devices after it.
  if 2 * reach >= num_shards - 1:
    return whole
  return ((1, reach), (-1, reach)) if reach else ()


def merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return (out, lse) of attention over the keys of two parts: out[..., H] float32 normalized in its part, lse[...] `NEGATIVE` if it is empty."""
  high = jnp.maximum(lse_a, lse_b)
  weight_a, weight_b = jnp.exp(lse_a - high), jnp.exp(lse_b - high)
  total = weight_a + weight_b
  return (out_a * (weight_a / total)[..., None] + out_b * (weight_b / total)[..., None]), high + jnp.log(total)


def merge_across(out: jax.Array, lse: jax.Array, axes: str | Sequence[str]) -> tuple[jax.Array, jax.Array]:
  """Return (out, lse) of attention over the keys of all devices along mesh axes, as `merge` does: two all-reduces, of lse and of both."""
  high = lax.pmax(lse, axes)
  weight = jnp.exp(lse - high)
  total = lax.psum(jnp.concatenate([out * weight[..., None], weight[..., None]], axis=-1), axes)
  return total[..., :-1] / total[..., -1:], high + jnp.log(total[..., -1])


def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, query_positions_BT: jax.Array, key_positions_BS: jax.Array,
           query_segments_BT: jax.Array, key_segments_BS: jax.Array, sinks_BTN: jax.Array | None, ring: Ring) -> jax.Array:
  """Return out_BTNH of this device's queries over the keys of the ring; call inside shard_map where the ring has axes.

  Args:
    key_positions_BS, key_segments_BS: a key is seen by queries of its segment whose position is not less; segment 0 is padding.
    sinks_BTN: a logit per query that takes part in the softmax and has no value (arXiv:2309.17453); None is none.
  """
  # One after the other, their transposes would be two sums over devices that do not depend on each other (see `_send`).
  if varies_less(k_BSKH, q_BTNH):
    k_BSKH, v_BSKH = varying(jnp.stack([k_BSKH, v_BSKH]), q_BTNH)
  return _attend(ring, q_BTNH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, sinks_BTN)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring, *arguments):
  return _forward(ring, *arguments)[0]


def _forward(ring, q_BTNH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, sinks_BTN):
  q_BTKGH = _grouped(q_BTNH, k_BSKH)

  def see(keys):
    k, v, where = keys
    out, lse = ring.kernel.forward(q_BTKGH, k, v, query_positions_BT, where[0], query_segments_BT, where[1], **ring.options)
    return out.reshape(q_BTNH.shape), jnp.moveaxis(lse, 3, 1).reshape(q_BTNH.shape[:3])

  def visit(keys, result, _):
    return merge(*result, *see(keys)), ()

  own = _own_keys(k_BSKH, v_BSKH, key_positions_BS, key_segments_BS)
  result, last = see(own), own
  for step, hops in ring.routes:
    result, _, last = _around(ring, step, hops - 1, _send(ring, own, step, after=last[-1:]), visit, result, ())
  out_BTNH, lse_BTN = result
  if sinks_BTN is not None:
    out_BTNH, lse_BTN = merge(out_BTNH, lse_BTN, jnp.zeros_like(out_BTNH), sinks_BTN)
  # With these two kept, the recomputation of a rematerialized layer has no use for the ring and does not run it.
  out_BTNH = checkpoint_name(out_BTNH.astype(q_BTNH.dtype), 'attention')
  lse_BTN = checkpoint_name(lse_BTN, 'attention_lse')
  return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, sinks_BTN, out_BTNH,
                    lse_BTN)


def _backward(ring, saved, dout_BTNH):
  q_BTNH, k_BSKH, v_BSKH, query_positions_BT, key_positions_BS, query_segments_BT, key_segments_BS, sinks_BTN, out_BTNH, lse_BTN = saved
  q_BTKGH, dout_BTKGH = _grouped(q_BTNH, k_BSKH), _grouped(dout_BTNH, k_BSKH)
  delta_BTN = jnp.einsum('BTNH,BTNH->BTN', dout_BTNH, out_BTNH, preferred_element_type=jnp.float32)
  lse_BKGT, delta_BKGT = (jnp.moveaxis(x, 1, 2).reshape(x.shape[0], *q_BTKGH.shape[2:4], -1) for x in (lse_BTN, delta_BTN))

  def visit(keys, dq, sums):
    k, v, where = keys
    dq, *sums = ring.kernel.backward(q_BTKGH, k, v, query_positions_BT, where[0], query_segments_BT, where[1], dout_BTKGH, lse_BKGT,
                                     delta_BKGT, (_grouped(dq, k), *sums), **ring.options)
    return dq.reshape(q_BTNH.shape), tuple(sums)

  def zeros(*arrays):
    return tuple(varying(jnp.zeros(x.shape, jnp.float32), q_BTNH) for x in arrays)

  own = _own_keys(k_BSKH, v_BSKH, key_positions_BS, key_segments_BS)
  (dq_BTNH,), home, last = zeros(q_BTNH), zeros(k_BSKH, v_BSKH), (delta_BTN,)
  for step, hops in ring.routes:
    # Keys first go where forward had them last, and from there come home hop by hop, followed by what was found for them on the way.
    farthest = _send(ring, own, step * hops, after=last[-1:])
    dq_BTNH, sums, _ = _around(ring, -step, hops - 1, farthest, visit, dq_BTNH, zeros(k_BSKH, v_BSKH))
    last = _send(ring, sums, -step, after=sums[-1:])
    home = tuple(x + more for x, more in zip(home, last, strict=True))
  dq_BTNH, (dk_BSKH, dv_BSKH) = visit(own, dq_BTNH, home)
  dsinks_BTN = None if sinks_BTN is None else -jnp.exp(sinks_BTN - lse_BTN) * delta_BTN
  return dq_BTNH.astype(q_BTNH.dtype), dk_BSKH.astype(k_BSKH.dtype), dv_BSKH.astype(v_BSKH.dtype), None, None, None, None, dsinks_BTN


_attend.defvjp(_forward, _backward)


def _grouped(x_BTNH, k_BSKH):
  return x_BTNH.reshape(*x_BTNH.shape[:2], k_BSKH.shape[2], -1, x_BTNH.shape[-1])


def _own_keys(k_BSKH, v_BSKH, positions_BS, segments_BS):
  return k_BSKH, v_BSKH, varying(jnp.stack([positions_BS, segments_BS]), k_BSKH)


def _around(ring, step, hops, keys, visit, carry, followers):
  """Fold visit(keys, carry, followers) -> (carry, followers) over `keys` and what `hops` more hops bring; the followers move along.

  What a hop brings is under way while its predecessor is visited. Returns (carry, followers, the last keys).
  """

  def hop(state):
    count, keys, carry, followers = state
    following, arrived = _send(ring, (keys, followers), step, after=(keys[-1], *followers[-1:]))
    return count + 1, following, *visit(keys, carry, arrived)

  if hops:
    _, keys, carry, followers = lax.while_loop(lambda state: state[0] < hops, hop, (0, keys, carry, followers))
    followers = _send(ring, followers, step, after=(keys[-1], *followers[-1:]))
  return *visit(keys, carry, followers), keys


def _send(ring, tree, distance, *, after):
  """Give every device the arrays of the one `distance` before it on the ring, on CPU one by one and after those of `after`.

  XLA's CPU backend starts collectives that do not depend on each other in any order, and JAX gives all of them the same name; devices would
  take the one for the other, which means wrong data, a deadlock or a crash, now and then. So each is made to depend on its predecessor.
  """
  pairs = [(device, (device + distance) % ring.size) for device in range(ring.size)]
  permute = functools.partial(lax.ppermute, axis_name=ring.axes, perm=pairs)

  def one_by_one(tree, after):
    leaves, structure = jax.tree.flatten(tree)
    for index, leaf in enumerate(leaves):
      leaves[index] = permute(functools.reduce(_wait, after, leaf))
      after = leaves[index:index + 1]
    return jax.tree.unflatten(structure, leaves)

  return lax.platform_dependent(tree, after, cpu=one_by_one, default=lambda tree, after: jax.tree.map(permute, tree))


def _wait(x, other):
  """Return `x` as something computed from `other` too: its first value has a zero added, of which XLA does not know that it is one."""
  bits = lax.bitcast_convert_type(other[(slice(1),) * other.ndim].reshape(()).astype(jnp.float32), jnp.int32)
  zero = jnp.minimum(bits & 0x7FFFFFFF, 0).astype(x.dtype)
  return lax.dynamic_update_slice(x, x[(slice(1),) * x.ndim] + zero, (0,) * x.ndim)


def over_heads(function: Callable, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array, segments_BT: jax.Array,
               sinks_BTN: jax.Array | None, axis: str) -> jax.Array:
  """Return out_BTNH of `function`, called with all tokens of a mesh axis and this device's share of the heads (arXiv:2309.14509 sec. 3).

  Args:
    function: (q, k, v, positions, segments, sinks) -> out; call inside shard_map, as this.
  """
  size = lax.axis_size(axis)
  if k_BTKH.shape[2] < size:
    k_BTKH, v_BTKH = (jnp.repeat(x, size // x.shape[2], axis=2) for x in (k_BTKH, v_BTKH))
  # One exchange, and what gathers after it: see `_send`.
  shares = [x.reshape(*x.shape[:2], size, -1, x.shape[-1]) for x in (q_BTNH, k_BTKH, v_BTKH)]
  ends = np.cumsum([share.shape[3] for share in shares])
  exchanged = lax.all_to_all(jnp.concatenate(shares, axis=3), axis, split_axis=2, concat_axis=1, tiled=True)[:, :, 0]
  q, k, v = jnp.split(exchanged, ends[:-1], axis=2)
  where = _wait(jnp.stack([positions_BT, segments_BT]), lax.stop_gradient(exchanged))
  positions, segments = lax.all_gather(where, axis, axis=2, tiled=True)
  if sinks_BTN is not None:
    share = sinks_BTN.shape[2] // size
    own = lax.dynamic_slice_in_dim(sinks_BTN[:, :1], lax.axis_index(axis) * share, share, axis=2)
    sinks_BTN = jnp.broadcast_to(own, q.shape[:3])
  return lax.all_to_all(function(q, k, v, positions, segments, sinks_BTN), axis, split_axis=1, concat_axis=2, tiled=True)
