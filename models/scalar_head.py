"""A scalar head: numbers read off hidden states, for critics and reward models.

The head is one more entry, `SCALAR_HEAD`, of a parameter tree; a plain model does not have it, and nothing else reads it. It starts at 0, so
that a fresh reward model prefers nothing and a fresh critic expects nothing. Computed in float32 whatever the layout's compute dtype is: a
reward is compared with others that are close to it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import params as params_lib
from models import sharding
from models.config import ModelConfig
from models.params import ParamSpec, Tree
from models.sharding import Layout

SCALAR_HEAD = 'scalar_head'


def declare(config: ModelConfig, num_scores: int = 1) -> dict:
  """Return the ParamSpecs of a head of `num_scores` numbers, for the entry `SCALAR_HEAD` of the tree of `transformer.declare`.

  Raises:
    ValueError: num_scores below 1.
  """
  if num_scores < 1:
    raise ValueError(f'num_scores={num_scores} of a scalar head must be at least 1.')
  return {
      'weight': ParamSpec((num_scores, config.embed_dim), (None, 'embed'), 'zeros', (1,)),
      'bias': ParamSpec((num_scores,), (None,), 'zeros'),
  }


def attach(trainable: Tree, frozen: Tree, config: ModelConfig, num_scores: int, mesh: Mesh, layout: Layout) -> tuple[Tree, Tree]:
  """Return (trainable, frozen) with a fresh head of `num_scores` numbers, which is trained; raises as `declare`."""
  head = params_lib.init(declare(config, num_scores), 0, mesh, layout)
  return {**trainable, SCALAR_HEAD: head}, {**frozen, SCALAR_HEAD: jax.tree.map(lambda _: None, head)}


def scores(hidden_BTD: jax.Array, head, mask_BT: jax.Array, layout: Layout) -> tuple[jax.Array, ...]:
  """Return the head's numbers, one scores_BT, float32, for each; 0 where the mask is false, whatever the hidden state holds there.

  Args:
    hidden_BTD: of `transformer.forward`.
    head: the tree of `declare`.
    mask_BT: bool, the places that are read.
  """
  hidden_BTD = jnp.where(mask_BT[..., None], hidden_BTD, 0).astype(jnp.float32)
  weight_CD = sharding.gathered(head['weight'].astype(jnp.float32))
  scores_BTC = jnp.einsum('BTD,CD->BTC', hidden_BTD, weight_CD, precision=jax.lax.Precision.HIGHEST,
                          out_sharding=layout.spec('batch', 'length', None))
  scores_BTC = jnp.where(mask_BT[..., None], scores_BTC + head['bias'].astype(jnp.float32)[None, None], 0)
  return tuple(scores_BTC[..., score] for score in range(scores_BTC.shape[-1]))
