"""The optimizer steps of a batch of documents: laid out, scored with the old policy and the reference, and learned from.

What a document says of its tokens (advantages, and with a critic values and returns) is made elsewhere: by `estimation` from rewards, or by
whatever else gives every sampled token an advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl import batching
from rl import metrics as metrics_lib
from rl.batching import Place
from rl.critic import METRICS as CRITIC_METRICS
from rl.critic import Critic
from rl.learner import TEACHER, Learner
from rl.rl_config import RLConfig
from rl.types import ActorCriticState, Batch, Document, Params, TrainState


class Updater:
  """Takes the optimizer steps of a run's batches."""

  def __init__(self, config: RLConfig, learner: Learner, frozen: Params, reference: Params | None, critic: Critic | None,
               teacher: Params | None, place: Place):
    """Take what a step computes with; `reference` are trainable parameters, None for the frozen base of adapters."""
    self._config, self._learner, self._frozen, self._reference = config, learner, frozen, reference
    self._frozen_of_update = frozen if teacher is None else {**frozen, TEACHER: teacher}
    self._critic, self._place = critic, place

  def prepare(self, state: TrainState, shares: Sequence[Sequence[Document]]) -> list[list[Batch]]:
    """Return the micro-batches of each optimizer step of a pass on the devices, from its share of the documents.

    Scored are the old policy, where several steps make it another than the current one, and the reference of a KL term in the loss.
    """
    config, learner = self._config, self._learner
    needs_old = config.loss.decoupled and config.minibatches * config.epochs > 1
    prepared = []
    for documents in shares:
      batches = [batching.to_global(batch, self._place) for batch in make_batches(config, documents)]
      if needs_old:
        batches = [batch.replace(old_logprobs_BT=learner.score(state.trainable, self._frozen, batch).logprobs_BT) for batch in batches]
      if config.loss.kl_coef:
        batches = [batch.replace(reference_logprobs_BT=self.reference_logprobs(batch)) for batch in batches]
      prepared.append(batches)
    return prepared

  def reference_logprobs(self, batch: Batch):
    """Return logprobs_BT of a global batch under the reference."""
    return self._learner.score(self._reference, self._frozen, batch).logprobs_BT

  def apply(self, state: TrainState, prepared: Sequence[Sequence[Batch]], *, only_critic: bool = False) -> tuple[TrainState, dict]:
    """Take the optimizer steps of all passes; returns (state, metrics merged over the steps); donates the state."""
    found: list[Mapping] = []
    critic_state = state.critic if self._critic else None
    policy_state = TrainState(state.step, state.trainable, state.opt_state)
    for _ in range(self._config.epochs):
      for batches in prepared:
        metrics = {}
        if not only_critic:
          policy_state, metrics = self._learner.update(policy_state, self._frozen_of_update, batches)
        if self._critic:
          critic_state, of_critic = self._critic.learner.update(critic_state, self._critic.frozen, batches)
          metrics |= {CRITIC_METRICS[name]: metric for name, metric in of_critic.items() if name in CRITIC_METRICS}
        found.append(metrics)
    total = found[0]
    for metrics in found[1:]:
      total = metrics_lib.merge(total, metrics)
    if self._critic:
      policy_state = ActorCriticState(**vars(policy_state), critic=critic_state)
    return policy_state, metrics_lib.compute(total)


def make_batches(config: RLConfig, documents: Sequence[Document]) -> list[Batch]:
  """Return the micro-batches of one optimizer step, as numpy.

  Documents whose advantages are all 0 count in every denominator but are left out, where nothing but an advantage gives them a gradient.
  """
  denominator = batching.step_denominator(documents, config.aggregation, max_length=config.rollout.max_new_tokens)
  if not (config.loss.kl_coef or config.loss.entropy_coef or config.has_critic or config.teacher.path):
    documents = [document for document in documents if np.any(document.per_token['advantages'][document.loss_mask_T])] or documents[:1]
  return batching.pack_step(documents, config.rows, config.length, aggregation=config.aggregation, denominator=denominator,
                            max_segments=config.loss.segment_limit)
