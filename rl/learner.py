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

from models import heads, heads_distillation, scalar_head, transformer
from models import params as params_lib
from models.config import ModelConfig
from models.sharding import Layout
from rl import losses, losses_distillation, losses_preference, losses_reward
from rl import metrics as metrics_lib
from rl.losses import PolicyLossConfig
from rl.losses_distillation import DistillationLossConfig, TeacherConfig
from rl.losses_preference import PreferenceLossConfig
from rl.losses_reward import RewardLossConfig, ValueLossConfig
from rl.metrics import Last, Mean, Sum
from rl.types import Batch, Params, Scores, TrainState

# A teacher's tree in `frozen`, beside what belongs to the model.
TEACHER = 'teacher'


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
    programs: name -> the jitted program behind these functions, for compiling it ahead of time under the learner's mesh.
  """
  init: Callable[[Params], TrainState]
  gradient: Callable[[Params, Params, Batch], tuple[Params, dict]]
  accumulate: Callable[[Params, Params], Params]
  apply: Callable[[TrainState, Params], tuple[TrainState, dict]]
  update: Callable[[TrainState, Params, Sequence[Batch]], tuple[TrainState, dict]]
  evaluate: Callable[[Params, Params, Batch], dict]
  score: Callable[[Params | None, Params, Batch], Scores]
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


def policy_loss(settings: PolicyLossConfig, teacher: TeacherModel | None = None, distillation: TeacherConfig | None = None) -> Loss:
  """Return the loss of reinforcement learning with these settings; see `losses.policy_loss_BT` for what a batch needs.

  The entropy of the policy is always reported; its gradient is computed only for an entropy bonus. With a `teacher`, whose tree is in
  `frozen`, the policy is drawn to it as `distillation` says.
  """

  def loss(params, batch, config, layout, *, unembed_grad):
    hidden_BTD = _hidden(params, batch, config, layout)
    logprobs_BT, entropy_BT = heads.token_logprobs_and_entropy(
        hidden_BTD, transformer.unembedding(params, config), batch.targets_BT, batch.loss_weight_BT != 0, softcap=config.final_softcap,
        unembed_grad=unembed_grad, entropy_grad=settings.entropy_coef != 0)
    taught, drawn = 0.0, {}
    if teacher is not None:
      batch = batch.replace(advantages_BT=distillation.reward_coef * batch.advantages_BT)
      if distillation.divergence == 'sampled':
        batch, drawn = _pay_for_the_teachers_words(logprobs_BT, params, batch, teacher, distillation)
      else:
        divergence_BT, agrees_BT = _divergence(hidden_BTD, params, batch, config, teacher, 'reverse', temperature=distillation.temperature,
                                               unembed_grad=unembed_grad)
        taught = distillation.coef * distillation.temperature**2 * jnp.sum(divergence_BT * batch.loss_weight_BT)
        mask_BT = batch.loss_weight_BT != 0
        drawn = {'teacher/reverse_kl_nats': Mean.of(divergence_BT, mask_BT), 'teacher/agreement': Mean.of(agrees_BT, mask_BT)}
    loss_BT, metrics = losses.policy_loss_BT(logprobs_BT, batch, settings, entropy_BT)
    total = taught + jnp.sum(loss_BT * batch.loss_weight_BT)
    return total, {'train/loss': Sum(total), **_counts(batch), **metrics, **drawn}

  return loss


def distillation_loss(settings: DistillationLossConfig, teacher: TeacherModel | None) -> Loss:
  """Return the loss of learning from a teacher's distributions on given texts.

  The batch needs `temperature`, and with `settings.top_k` the teacher's words; without, the teacher's tree is in `frozen`. Its forward pass is
  part of the same program and keeps nothing for backward: of the teacher there are its parameters and its last hidden states, as long as the
  student's.
  """

  def loss(params, batch, config, layout, *, unembed_grad):
    hidden_BTD, head_VD, mask_BT = _hidden(params, batch, config, layout), transformer.unembedding(params, config), batch.loss_weight_BT != 0
    if settings.top_k:
      logprobs_BTJ, likeliest_BT = heads_distillation.logprobs_at(
          hidden_BTD, head_VD, batch.teacher_ids_BTJ, mask_BT, temperature=batch.temperature, softcap=config.final_softcap,
          unembed_grad=unembed_grad)
      divergence_BT = losses_distillation.top_divergence_BT(logprobs_BTJ, batch.teacher_logprobs_BTJ, mask_BT, settings.divergence, settings.beta)
      agrees_BT = likeliest_BT == batch.teacher_ids_BTJ[..., 0]
    else:
      divergence_BT, agrees_BT = _divergence(hidden_BTD, params, batch, config, teacher, settings.divergence, beta=settings.beta,
                                             temperature=batch.temperature, unembed_grad=unembed_grad)
    total = settings.alpha * batch.temperature**2 * jnp.sum(divergence_BT * batch.loss_weight_BT)
    if settings.alpha < 1:
      supervised, nll_BT = heads.weighted_nll(hidden_BTD, head_VD, batch.targets_BT, batch.loss_weight_BT, softcap=config.final_softcap,
                                              unembed_grad=unembed_grad)
      total = total + (1 - settings.alpha) * supervised
    else:
      hidden_BTD, head_VD = jax.lax.stop_gradient((hidden_BTD, head_VD))
      nll_BT = -heads.token_logprobs(hidden_BTD, head_VD, batch.targets_BT, mask_BT, softcap=config.final_softcap, unembed_grad=False)
    return total, {
        'train/loss': Sum(total), 'train/loss_nats': Mean.of(nll_BT, batch.loss_weight_BT), **_counts(batch),
        'distillation/divergence_nats': Mean.of(divergence_BT, batch.loss_weight_BT),
        'distillation/agreement': Mean.of(agrees_BT, mask_BT), 'distillation/temperature': Last(batch.temperature)}

  return loss


class TeacherModel(NamedTuple):
  """What a teacher computes and how; its tokens lie where the student's do."""
  config: ModelConfig
  layout: Layout


def _divergence(hidden_BTD, params, batch: Batch, config: ModelConfig, teacher: TeacherModel, kind: str, *, unembed_grad: bool,
                **options) -> tuple[jax.Array, jax.Array]:
  """Return how far the policy is from the teacher at the places that count, and where their likeliest words are one."""
  own = params[TEACHER]
  return heads_distillation.divergence(
      hidden_BTD, transformer.unembedding(params, config), _hidden(own, batch, *teacher), transformer.unembedding(own, teacher.config),
      batch.loss_weight_BT != 0, kind=kind, softcap=config.final_softcap, teacher_softcap=teacher.config.final_softcap,
      unembed_grad=unembed_grad, **options)


def _pay_for_the_teachers_words(logprobs_BT, params, batch: Batch, teacher: TeacherModel, distillation: TeacherConfig) -> tuple[Batch, dict]:
  """Add coef (log teacher - log policy) of the sampled tokens to the advantages; its score function is the gradient of -KL(policy | teacher).

  The policy is the one of this update, so that with a ratio to the old policy it stays the gradient when a batch is used again.
  """
  own, mask_BT = params[TEACHER], batch.loss_weight_BT != 0
  teacher_BT = heads.token_logprobs(_hidden(own, batch, *teacher), transformer.unembedding(own, teacher.config), batch.targets_BT, mask_BT,
                                    softcap=teacher.config.final_softcap, unembed_grad=False)
  gain_BT = jnp.where(mask_BT, jax.lax.stop_gradient(teacher_BT - logprobs_BT), 0)
  return (batch.replace(advantages_BT=batch.advantages_BT + distillation.coef * gain_BT),
          {'teacher/sampled_kl_nats': Mean.of(-gain_BT, mask_BT)})


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
    return loss(_combine(trainable, frozen), batch, config, layout, unembed_grad=full)

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

  return Learner(calls['init'], calls['gradient'], calls['accumulate'], apply, update, calls['evaluate'], score, programs)


def _combine(trainable: Params, frozen: Params) -> Params:
  """Return the model's tree, with what only `frozen` has beside it: a teacher's."""
  beside = {name: tree for name, tree in frozen.items() if name not in trainable}
  return params_lib.combine(trainable, {name: tree for name, tree in frozen.items() if name in trainable}) | beside


def _without_adapters(frozen: Params) -> Params:
  return jax.tree.map(lambda leaf: leaf.base if params_lib.is_lora(leaf) else leaf, frozen, is_leaf=params_lib.is_lora)


def abstract_state(state: Any) -> Any:
  """Return the abstract state with shardings: what a checkpoint is restored to."""
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
