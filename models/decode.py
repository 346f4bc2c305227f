"""Generation with a key-value cache: the parameters, `forward` and `block` of training, with an `attend` that reads and writes the cache.

A row of `DecodeState` is a slot: it holds one sequence at its own position, and is filled and retired without regard to its neighbors.
Prompts are computed apart from the slots (`prefill`), in chunks of fixed size, and copied into as many slots as samples are wanted
(`insert`). The cache then holds all of a prompt but its last token, which the first decoding step reads; so every generated token, the
first included, is drawn by the one `decode_step`.

Each layer keeps keys and values as [B, K, S, H], the order in which attention reads them. The place of position p is p mod S: S is the
longest sequence for a global layer and the window for a local one, where new tokens replace those that have left the window. What a place
holds follows from the sequence's length alone, so a slot is reused without being cleared.

On CPU a matmul of a single bfloat16 row converts its whole weight at each step (3-10x slower), so there are at least two rows a device.

Deliberately absent: pages and prefix sharing between slots, speculative decoding, and which request is where (`rl.rollout.engine`).
"""

from __future__ import annotations

import functools

from flax import struct
import jax
from jax.sharding import Mesh, NamedSharding
import jax.numpy as jnp
import numpy as np

from models import attention, lora, params as params_lib, sampling as sampling_lib, sharding, transformer
from models.config import ModelConfig
from models.params import ParamSpec
from models.sampling import Sampling
from models.sharding import Layout

BATCH_AXES = ('data', 'fsdp', 'seq')
Cache = tuple[tuple[jax.Array, jax.Array], ...]


@struct.dataclass
class Slots:
  """What each slot decodes.

  Attributes:
    tokens_B: the last token of the sequence, not yet in the cache.
    lengths_B: how many tokens come before it: its position.
    limits_B: position at which the sequence ends.
    seeds_B: uint32 seed of the request.
    done_B: whether the slot is free or its sequence has ended; it then stands still.
    sampling: settings of the request.
  """
  tokens_B: jax.Array
  lengths_B: jax.Array
  limits_B: jax.Array
  seeds_B: jax.Array
  done_B: jax.Array
  sampling: Sampling


@struct.dataclass
class DecodeState:
  """The slots and, for each layer, their keys and values [B,K,S,H]."""
  cache: Cache
  slots: Slots


@struct.dataclass
class Step:
  """What a decoding step drew; `decode_many` stacks steps on a leading axis.

  Attributes:
    tokens_B, raw_logprobs_B, processed_logprobs_B: as in `sampling.Sample`.
    is_new_B: whether the slot drew a token; the other values of a slot that stood still mean nothing.
  """
  tokens_B: jax.Array
  raw_logprobs_B: jax.Array
  processed_logprobs_B: jax.Array
  is_new_B: jax.Array
