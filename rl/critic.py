"""A critic: what it expects of every token, and its own learner. It guides the policy (`advantages.gae`) and is no part of it.

It starts as the policy does, with a scalar head at 0 on top, and is trained in the same form: a copy of all parameters, or adapters of its
own on the same frozen base, which is held once. Its optimizer and its state are its own.

Deliberately absent: a trunk shared with the policy (two losses would pull at one representation), and a critic that starts as a reward model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from models import params as params_lib
from models import scalar_head
from models.config import ModelConfig
from models.sharding import Layout
from rl import batching, optimizer
from rl import learner as learner_lib
from rl.batching import Place
from rl.learner import Learner
from rl.losses_reward import ValueLossConfig
from rl.optimizer import OptimizerConfig
from rl.types import Batch, Document, Params, TrainState

# Of the learner's metrics, what is reported of a critic, and as what.
METRICS = {'train/loss': 'critic/loss', 'train/grad_norm': 'critic/grad_norm', 'train/learning_rate': 'critic/learning_rate',
           'train/skipped_steps': 'critic/skipped_steps', 'value/clip_fraction': 'critic/vf_clipfrac',
           'value/squared_error': 'critic/squared_error'}


@dataclass(frozen=True)
class CriticConfig:
  """How the critic of estimator='gae' learns.

  Attributes:
    warmup_steps: batches at the start from which only the critic learns; then the policy does too.
    trace: lambda of the returns that it learns; None is advantage.trace. 1 are plain returns, without a bias (VAPO, arXiv:2504.05118
      sec. 4.1, whose policy has another).
  """
  optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule='constant')
  loss: ValueLossConfig = ValueLossConfig()
  warmup_steps: int = 0
  trace: float | None = None

  def __post_init__(self):
    if self.warmup_steps < 0:
      raise ValueError(f'critic.warmup_steps={self.warmup_steps} must not be negative.')
    if self.trace is not None and not 0 <= self.trace <= 1:
      raise ValueError(f'critic.trace={self.trace} must be between 0 and 1, or None for that of the advantages.')


class Expectation(NamedTuple):
  """What a critic expects of a document: values_T before each token was sampled, and `after` the last one."""
  values_T: np.ndarray
  after: float


class Critic(NamedTuple):
  """What `build` returns.

  Attributes:
    init: the policy's trainable parameters, which it copies -> the critic's TrainState at step 0.
    learner: of the value loss.
    frozen: parameters that are not trained.
    score: (trainable, frozen, batch) -> values_BT at every place, each of the token that follows.
  """
  init: Callable[[Params], TrainState]
  learner: Learner
  frozen: Params
  score: Callable[[Params, Params, Batch], jax.Array]

  def expect(self, trainable: Params, documents: Sequence[Document], place: Place, rows: int, length: int) -> list[Expectation]:
    """Return what the critic expects of each document; arguments as in `batching.at_places`."""
    found = batching.at_places(documents, lambda batch: self.score(trainable, self.frozen, batch), place, rows, length)
    # The first token follows nothing.
    return [Expectation(np.append(np.float32(0), values_T[:-1]), float(values_T[-1])) for values_T in found]


def build(config: CriticConfig, model: ModelConfig, layout: Layout, mesh: Mesh, frozen: Params, *, full: bool, num_updates: int) -> Critic:
  """Return the critic of a policy with these frozen parameters.

  Args:
    full: every parameter is trainable.
    num_updates: optimizer steps of the run, over which the learning rate is scheduled.

  Raises:
    ValueError: the layout asks for something this model or platform cannot do.
  """
  head, rest = scalar_head.attach({}, frozen, model, 1, mesh, layout)
  learner = learner_lib.build(model, layout, mesh, optimizer.build(config.optimizer, num_updates),
                              optimizer.schedule(config.optimizer, num_updates), full=full, loss=learner_lib.value_loss(config.loss))

  @jax.jit
  def values(trainable, frozen, batch):
    return learner_lib.scalar_scores(params_lib.combine(trainable, frozen), batch, model, layout)[0]

  def score(trainable, frozen, batch):
    with jax.set_mesh(mesh):
      return values(trainable, frozen, batch)

  return Critic(lambda trainable: learner.init({**jax.tree.map(jnp.copy, trainable), **head}), learner, rest, score)
