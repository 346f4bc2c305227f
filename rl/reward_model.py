"""A trained reward model at work: conversations in, scores out; one for each of its dimensions.

Deliberately absent: ensembles, normalization and calibration; a score is what the head says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from models import chat, lora, weight_files
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from models.scalar_head import SCALAR_HEAD
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import batching, checkpoint, comparisons, learner
from rl import config as config_lib
from rl.batching import Place
from rl.data.records import Message
from rl.run import CHECKPOINTS, load_trainable
from rl.segments import Segments
from rl.train_preference import OVERALL, RewardConfig, with_head
from rl.types import Params

_MAX_SEGMENTS = 32


@dataclass(frozen=True)
class RewardModel:
  """What `load` returns.

  Attributes:
    params: with the scalar head; adapters are merged.
    dimensions: name -> weight of each of the head's scores.
  """
  config: ModelConfig
  params: Params
  tokenizer: Tokenizer
  template: chat.Template
  dimensions: Mapping[str, float]
  layout: Layout
  mesh: Mesh

  def score(self, conversations: Sequence[Sequence[Message]], *, rows: int, length: int) -> np.ndarray:
    """Return float32 scores, [conversations, dimensions], read at the end of each conversation's last message by the assistant.

    Args:
      rows, length: of a batch; each conversation must fit in a row.

    Raises:
      ValueError: a conversation that does not fit, or that the template cannot write.
    """
    documents = [comparisons.document(messages, 0, self.tokenizer, self.template, f'conversation {index}')
                 for index, messages in enumerate(conversations)]
    place = Place.of(self.layout, self.mesh)
    host_rows, found = batching.host_rows(place, rows), []
    while len(found) < len(documents):
      rest = documents[len(found):]
      assignment, num_taken = batching.plan((len(document.tokens_T) for document in rest), rows, length, _MAX_SEGMENTS)
      batch = batching.pack_rows([[rest[index] for index in row] for row in assignment[host_rows]], length, denominator=1,
                                 aggregation='token_sum')
      with jax.set_mesh(self.mesh):
        scores_CBM = np.asarray(self._last_scores(self.params, batching.to_global(batch, place)))
      of_text = {index: scores_CBM[:, row, segment] for row, indices in enumerate(assignment) for segment, index in enumerate(indices)}
      found += [of_text[index] for index in range(num_taken)]
    return np.array(found, np.float32).reshape(len(found), len(self.dimensions))

  def combined(self, scores: np.ndarray) -> np.ndarray:
    """Return one score for each conversation: the weighted mean over the dimensions."""
    return np.average(scores, axis=1, weights=list(self.dimensions.values())).astype(np.float32)

  @functools.cached_property
  def _last_scores(self):
    def run(params, batch):
      texts = Segments(batch, _MAX_SEGMENTS)
      scores_CBM = jnp.stack([texts.last(scores_BT) for scores_BT in learner.scalar_scores(params, batch, self.config, self.layout)])
      return jax.reshard(scores_CBM, PartitionSpec())  # Every process reads them.

    return jax.jit(run)


def load(path: str | Path, mesh: Mesh, layout: Layout, dtype: str, step: int | None = None) -> RewardModel:
  """Load what a run of the stage 'reward' made, at `step` (default: its newest checkpoint); `dtype` is the layers'.

  Raises:
    FileNotFoundError: the path or the step is not there.
    ValueError: a run of another stage, or files that do not fit.
  """
  directory = Path(path) / CHECKPOINTS
  host = checkpoint.read_host(directory, step)
  if host.config['stage'] != 'reward':
    raise ValueError(f'{path} is a run of stage {host.config["stage"]!r} and has no reward model; give one made with '
                     'configs/reward_model.py.')
  config = config_lib.build(RewardConfig, host.config)
  dimensions = config.data.dimensions or OVERALL
  layout = params_lib.replicate_indivisible(layout, mesh, weight_files.read_config(config.model.path).num_kv_heads)
  model, *parts = load_trainable(config.model, config.lora, config.seed, mesh, layout)
  trainable, frozen = with_head(*parts, model, len(dimensions), mesh, layout)
  trainable = checkpoint.read_params(directory, learner.abstract_state(trainable), step)
  with jax.set_mesh(mesh):
    params = params_lib.combine(trainable, frozen)
    head = params.pop(SCALAR_HEAD)  # Stays float32.
    params = {**lora.merge(params, dtype), SCALAR_HEAD: head}
  return RewardModel(model, params, tokenizer_lib.load(config.model.path), chat.TEMPLATES[config.model.chat_template], dimensions, layout, mesh)
