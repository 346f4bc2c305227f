"""The learner: the one place where a forward pass and a loss meet, as a few jitted functions over pytrees.

`gradient` and `apply` are two programs and micro-batches a Python loop, so one compiled shape serves any number of them. The loss is a plain
sum over the batch: `loss_weight_BT` carries the mask, the aggregation and the denominator of the whole step, so micro-batches, devices and
hosts only add up.

Memory (measured on CPU): the first micro-batch's gradient becomes the accumulator itself, which saves one copy of the gradient in the usual
case of a single micro-batch. `apply` is two programs, parameters and then moments, each donating what it replaces: as one program XLA reads
the old moments for the parameters after it has overwritten them, and so copies both first (2.2 GB for 268M parameters). The choice between
old and new values, for a step that is not finite, sits inside the same loops and costs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from models import heads, scalar_head, transformer
from models import params as params_lib
from models.config import ModelConfig
from models.sharding import Layout
from rl import losses, losses_preference, losses_reward
from rl import metrics as metrics_lib
from rl.losses import PolicyLossConfig
from rl.losses_preference import PreferenceLossConfig
from rl.losses_reward import RewardLossConfig, ValueLossConfig
from rl.metrics import Last, Mean, Sum
from rl.types import Batch, Params, Scores, TrainState


class Learner(NamedTuple):
  """What `build` returns; every function runs on the learner's mesh.

  Attributes:
    init: (trainable) -> TrainState at step 0.
    gradient: (trainable, frozen, batch) -> (gradient, metrics).
    accumulate: (total, gradient) -> total; donates both.
    apply: (state, gradient) -> (state, metrics); donates the state.
    update: (state, frozen, micro-batches) -> (state, metrics): one optimizer step.
    evaluate: (trainable, frozen, batch) -> metrics, no gradient.
    score: (trainable, frozen, batch) -> Scores: old logprobs with the policy's parameters, reference logprobs with those of the reference. In
      a LoRA run trainable=None scores the frozen base alone, which is the usual reference there.
    num_compiled: () -> how often each program of a step was compiled; more than once means that a shape or a sharding drifts.
    programs: name -> the jitted program behind these functions, for compiling it ahead of time under the learner's mesh.
  """
  init: Callable[[Params], TrainState]
  gradient: Callable[[Params, Params, Batch], tuple[Params, dict]]
  accumulate: Callable[[Params, Params], Params]
  apply: Callable[[TrainState, Params], tuple[TrainState, dict]]
  update: Callable[[TrainState, Params, Sequence[Batch]], tuple[TrainState, dict]]
  evaluate: Callable[[Params, Params, Batch], dict]
  score: Callable[[Params | None, Params, Batch], Scores]
  num_compiled: Callable[[], dict[str, int]]
  programs: Mapping[str, Any]


class Loss(Protocol):
  """A model's loss on a batch."""

  def __call__(self, params: Params, batch: Batch, config: ModelConfig, layout: Layout, *, unembed_grad: bool) -> tuple[jax.Array, dict]:
    """Return (a plain sum with `batch.loss_weight_BT`, metrics); without `unembed_grad` the head is frozen."""


def supervised_loss(params: Params, batch: Batch, config: ModelConfig, layout: Layout, *, unembed_grad: bool) -> tuple[jax.Array, dict]:
  """Return (sum of loss_weight x negative log-likelihood in nats, metrics)."""
  hidden_BTD = _hidden(params, batch, config, layout)
  loss, nll_BT = heads.weighted_nll(hidden_BTD, transformer.unembedding(params, config), batch.targets_BT, batch.loss_weight_BT,
                                    softcap=config.final_softcap, unembed_grad=unembed_grad)
  return loss, {'train/loss_nats': Mean.of(nll_BT, batch.loss_weight_BT), **_counts(batch)}


def policy_loss(settings: PolicyLossConfig) -> Loss:
  """Return the loss of reinforcement learning with these settings; see `losses.policy_loss_BT` for what a batch needs.

  The entropy of the policy is always reported; its gradient is computed only for an entropy bonus.
  """

  def loss(params, batch, config, layout, *, unembed_grad):
    hidden_BTD = _hidden(params, batch, config, layout)
    logprobs_BT, entropy_BT = heads.token_logprobs_and_entropy(
        hidden_BTD, transformer.unembedding(params, config), batch.targets_BT, batch.loss_weight_BT != 0, softcap=config.final_softcap,
        unembed_grad=unembed_grad, entropy_grad=settings.entropy_coef != 0)
    loss_BT, metrics = losses.policy_loss_BT(logprobs_BT, batch, settings, entropy_BT)
    total = jnp.sum(loss_BT * batch.loss_weight_BT)
    return total, {'train/loss': Sum(total), **_counts(batch), **metrics}

  return loss


def preference_loss(settings: PreferenceLossConfig, max_segments: int) -> Loss:
  """Return the loss of learning from preferences; see `losses_preference.preference_loss` for what a batch needs."""

  def loss(params, batch, config, layout, *, unembed_grad):
    logprobs_BT = heads.token_logprobs(_hidden(params, batch, config, layout), transformer.unembedding(params, config), batch.targets_BT,
                                       batch.loss_weight_BT != 0, softcap=config.final_softcap, unembed_grad=unembed_grad)
    total, metrics = losses_preference.preference_loss(logprobs_BT, batch, settings, max_segments)
    return total, {'train/loss': Sum(total), **_counts(batch), **metrics}

  return loss


def reward_loss(settings: RewardLossConfig, dimensions: Mapping[str, float], max_segments: int) -> Loss:
  """Return the loss of a reward model with one score for each dimension; see `losses_reward.reward_loss` for what a batch needs."""

  def loss(params, batch, config, layout, *, unembed_grad):
    del unembed_grad  # The output head has no part in it.
    total, metrics = losses_reward.reward_loss(scalar_scores(params, batch, config, layout), batch, settings, dimensions, max_segments)
    return total, {'train/loss': Sum(total), **_counts(batch), **metrics}

  return loss


def value_loss(settings: ValueLossConfig) -> Loss:
  """Return the loss of a critic with one score; see `losses_reward.value_loss_BT` for what a batch needs."""

  def loss(params, batch, config, layout, *, unembed_grad):
    del unembed_grad
    loss_BT, metrics = losses_reward.value_loss_BT(scalar_scores(params, batch, config, layout)[0], batch, settings)
    total = jnp.sum(loss_BT * batch.loss_weight_BT)
    return total, {'train/loss': Sum(total), **_counts(batch), **metrics}

  return loss


def scalar_scores(params: Params, batch: Batch, config: ModelConfig, layout: Layout) -> tuple[jax.Array, ...]:
  """Return the numbers of the tree's scalar head, one scores_BT for each, at every token; 0 at padding."""
  return scalar_head.scores(_hidden(params, batch, config, layout), params[scalar_head.SCALAR_HEAD], batch.segment_ids_BT != 0, layout)


def _hidden(params: Params, batch: Batch, config: ModelConfig, layout: Layout) -> jax.Array:
  return transformer.forward(params, batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT, config, layout)[0]


def _counts(batch: Batch) -> dict:
  return {
      'train/target_tokens': Sum(jnp.sum(batch.loss_weight_BT != 0).astype(jnp.float32)),
      'train/tokens': Sum(jnp.sum(batch.segment_ids_BT != 0).astype(jnp.float32)),
  }


def build(config: ModelConfig, layout: Layout, mesh: Mesh, optimizer: optax.GradientTransformation, learning_rate: optax.Schedule, *,
          full: bool, loss: Loss = supervised_loss) -> Learner:
  """Return the learner of one model on one mesh.

  Args:
    learning_rate: only reported; the optimizer has its own copy.
    full: every parameter is trainable (else the head is frozen, and its gradient is never computed).
    loss: what is minimized.

  Raises:
    ValueError: the layout asks for something this model or platform cannot do.
  """
  transformer.check(config, layout, mesh)

  def loss_of(trainable, frozen, batch):
    return loss(params_lib.combine(trainable, frozen), batch, config, layout, unembed_grad=full)

  @jax.jit
  def gradient(trainable, frozen, batch):
    grads, metrics = jax.grad(loss_of, has_aux=True)(trainable, frozen, batch)
    return grads, metrics

  def score_params(params, batch):
    return Scores(*heads.token_logprobs_and_entropy(_hidden(params, batch, config, layout), transformer.unembedding(params, config),
                                                    batch.targets_BT, batch.loss_weight_BT != 0, softcap=config.final_softcap))

  def accumulate(total, grads):
    return jax.tree.map(jnp.add, total, grads)

  def unless_skipped(norm, new, old):
    return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(norm), a, b), new, old)

  def apply_to_params(trainable, opt_state, grads, step):
    norm = optax.tree.norm(grads)
    updates, _ = optimizer.update(grads, opt_state, trainable)
    return unless_skipped(norm, optax.apply_updates(trainable, updates), trainable), step + 1, {
        'train/grad_norm': Last(norm),
        'train/learning_rate': Last(jnp.float32(learning_rate(step))),
        'train/skipped_steps': Sum(1 - jnp.isfinite(norm).astype(jnp.float32)),
    }

  def apply_to_moments(opt_state, grads, trainable):
    _, new = optimizer.update(grads, opt_state, trainable)
    return unless_skipped(optax.tree.norm(grads), new, opt_state)

  init = jax.jit(lambda trainable: TrainState(jnp.int32(0), trainable, optimizer.init(trainable)), donate_argnums=0)
  programs = {
      'init': init,
      'gradient': gradient,
      'accumulate': jax.jit(accumulate, donate_argnums=0),
      'apply_to_params': jax.jit(apply_to_params, donate_argnums=0),
      'apply_to_moments': jax.jit(apply_to_moments, donate_argnums=0),
      'evaluate': jax.jit(lambda trainable, frozen, batch: loss_of(trainable, frozen, batch)[1]),
      'score': jax.jit(lambda trainable, frozen, batch: score_params(params_lib.combine(trainable, frozen), batch)),
      'score_base': jax.jit(lambda frozen, batch: score_params(_without_adapters(frozen), batch)),
  }

  def on_mesh(function):
    def run(*arguments):
      with jax.set_mesh(mesh):
        return function(*arguments)
    return run

  calls = {name: on_mesh(function) for name, function in programs.items()}

  def apply(state, grads):
    trainable, step, metrics = calls['apply_to_params'](state.trainable, state.opt_state, grads, state.step)
    return TrainState(step, trainable, calls['apply_to_moments'](state.opt_state, grads, trainable)), metrics

  def update(state, frozen, batches):
    total, metrics = calls['gradient'](state.trainable, frozen, batches[0])
    for batch in batches[1:]:
      grads, more = calls['gradient'](state.trainable, frozen, batch)
      total, metrics = calls['accumulate'](total, grads), metrics_lib.merge(metrics, more)
    state, applied = apply(state, total)
    return state, {**metrics, **applied}

  def score(trainable, frozen, batch):
    if trainable is not None:
      return calls['score'](trainable, frozen, batch)
    if full:
      raise ValueError('trainable=None scores the frozen base of adapters, and a full run has none; pass the parameters of the reference.')
    return calls['score_base'](frozen, batch)

  def num_compiled():
    return {name: programs[name]._cache_size() for name in ('gradient', 'apply_to_params', 'apply_to_moments', 'score', 'score_base')}

  return Learner(calls['init'], calls['gradient'], calls['accumulate'], apply, update, calls['evaluate'], score, num_compiled, programs)


def _without_adapters(frozen: Params) -> Params:
  return jax.tree.map(lambda leaf: leaf.base if params_lib.is_lora(leaf) else leaf, frozen, is_leaf=params_lib.is_lora)


def abstract_state(state: Any) -> Any:
  """Return the abstract state with shardings: what a checkpoint is restored to."""
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
