"""The records that pass between the host and the devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import struct
import jax
import numpy as np

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Document:
  """One training sequence on the host.

  Attributes:
    tokens_T: int32 ids, prompt and reply together.
    loss_mask_T: bool, true where the token is to be learned. The mask belongs to the token itself, not to its predecessor.
    source: where it came from, as 'task:row', for error messages.
  """
  tokens_T: np.ndarray
  loss_mask_T: np.ndarray
  source: str = ''

  def __post_init__(self):
    if self.tokens_T.ndim != 1 or self.tokens_T.dtype != np.int32:
      raise ValueError(f'{self.source}: tokens_T must be one-dimensional int32, got {self.tokens_T.dtype}{self.tokens_T.shape}.')
    if self.loss_mask_T.shape != self.tokens_T.shape or self.loss_mask_T.dtype != np.bool_:
      raise ValueError(
          f'{self.source}: loss_mask_T must be bool{self.tokens_T.shape} like tokens_T, '
          f'got {self.loss_mask_T.dtype}{self.loss_mask_T.shape}.')


@struct.dataclass
class Batch:
  """Packed rows on the devices (or, before `to_global`, as numpy on the host).

  A row holds several documents one after the other. `segment_ids_BT` numbers them from 1 within the row; 0 is padding, and nothing else
  marks padding. `targets_BT` is the token to be predicted at each place, explicit because under some layouts the next column is not the
  next token. `loss_weight_BT` carries mask, aggregation and the denominator of the whole optimizer step: the loss is a plain weighted sum.
  """
  tokens_BT: jax.Array
  targets_BT: jax.Array
  positions_BT: jax.Array
  segment_ids_BT: jax.Array
  loss_weight_BT: jax.Array


@struct.dataclass
class TrainState:
  """What one `apply` consumes and returns: optimizer step, trainable parameters, optimizer state."""
  step: jax.Array
  trainable: Params
  opt_state: Any


@dataclass(frozen=True)
class HostState:
  """What resuming needs besides arrays; JSON-able.

  Attributes:
    documents: documents taken from the data stream by all hosts together since the start.
    seed: the root seed of the run.
    config: the resolved configuration as plain JSON.
    revision: code revision, '' outside a checkout.
    lineage: model source and data fingerprints.
  """
  documents: int
  seed: int
  config: Mapping[str, Any]
  revision: str = ''
  lineage: Mapping[str, Any] = field(default_factory=dict)
