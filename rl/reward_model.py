"""A trained reward model at work: conversations in, scores out, one for each of its dimensions; and what held-out pairs say of it.

A run of the stage 'reward' keeps that judgment beside its checkpoints (`CALIBRATION_FILE`); scores can be normalized by it to mean 0 and
standard deviation 1 over held-out texts. Several models together are `rl.proxy_reward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from models import chat, lora, scalar_head, weight_files
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from models.scalar_head import SCALAR_HEAD
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import batching, calibration, checkpoint, comparisons, learner
from rl import config as config_lib
from rl.batching import Place
from rl.calibration import Calibration
from rl.data.preferences import Preferences
from rl.data.records import Message
from rl.run import CHECKPOINTS, LoraConfig, ModelSource, load_trainable
from rl.segments import Segments
from rl.types import Document, Params

CALIBRATION_FILE = 'calibration.json'
# Of a reward model whose data keep no dimensions apart.
OVERALL = {'overall': 1.0}
_MAX_SEGMENTS = 32


@dataclass(frozen=True)
class RewardModel:
  """What `load` returns.

  Attributes:
    path, step: the run and its checkpoint.
    params: with the scalar head; adapters are merged.
    dimensions: name -> weight of each of the head's scores.
    calibrations: what the run's held-out pairs say of each dimension; None if this checkpoint was not judged.
  """
  path: Path
  step: int
  config: ModelConfig
  params: Params
  tokenizer: Tokenizer
  template: chat.Template
  dimensions: Mapping[str, float]
  calibrations: Mapping[str, Calibration] | None
  layout: Layout
  mesh: Mesh

  def encode(self, conversation: Sequence[Message], source: str) -> Document:
    """Return a conversation as it is scored, up to the end of its last message by the assistant; ValueError as `comparisons.document`."""
    return comparisons.document(conversation, 0, self.tokenizer, self.template, source)

  def score(self, conversations: Sequence[Sequence[Message]], *, rows: int, length: int) -> np.ndarray:
    """Return float32 scores, [conversations, dimensions], read at the end of each conversation's last message by the assistant.

    Args:
      rows, length: of a batch; each conversation must fit in a row.

    Raises:
      ValueError: a conversation that does not fit, or that the template cannot write.
    """
    return self.score_documents([self.encode(messages, f'conversation {index}') for index, messages in enumerate(conversations)],
                                rows=rows, length=length)

  def score_documents(self, documents: Sequence[Document], *, rows: int, length: int) -> np.ndarray:
    """Return float32 scores, [documents, dimensions], read at the last token of each; ValueError if one does not fit in a row."""
    place = Place.of(self.layout, self.mesh)
    host_rows, found = batching.host_rows(place, rows), []
    for document in documents:
      if len(document.tokens_T) > length:
        raise ValueError(f'{document.source} has {len(document.tokens_T)} tokens, a row holds length={length}; raise length, or leave it out.')
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

  def normalized(self, scores: np.ndarray) -> np.ndarray:
    """Return scores, [..., dimensions], with mean 0 and standard deviation 1 over the run's held-out texts; ValueError without them."""
    if self.calibrations is None:
      raise ValueError(f'{self.path} has no {CALIBRATION_FILE} of step {self.step}, by which scores are normalized; train with '
                       'eval_every_steps above 0 and held-out rows, use the last checkpoint, or set normalize=False.')
    mean, std = (np.array([getattr(self.calibrations[name], field) for name in self.dimensions]) for field in ('mean', 'std'))
    return ((scores - mean) / std).astype(np.float32)

  def combined(self, scores: np.ndarray) -> np.ndarray:
    """Return one score for each conversation: the weighted mean over the dimensions."""
    return np.average(scores, axis=1, weights=list(self.dimensions.values())).astype(np.float32)

  def assess(self, data: Preferences, numbers: Sequence[int], *, rows: int, length: int) -> dict[str, Calibration]:
    """Return what the pairs with these numbers in the data say of each dimension.

    Args:
      data: with the model's dimensions kept apart; pairs that do not fit are left out as in training.
      rows, length: of a batch; both texts of a pair must fit in a row.
    """
    encode = comparisons.Encoder(data, self.tokenizer, self.template, length, 'drop')
    pairs = [texts for texts in (encode(int(number)) for number in numbers) if texts is not None]
    scores = self.score_documents([document for texts in pairs for document in texts.documents], rows=rows, length=length)
    scores_N2D = scores.reshape(len(pairs), 2, len(self.dimensions))
    num_tokens_N2 = np.array([[document.loss_mask_T.sum() for document in texts.documents] for texts in pairs], float).reshape(-1, 2)
    preferences_ND = np.array([texts.preferences[0] for texts in pairs], float).reshape(len(pairs), len(self.dimensions))
    half_N = data.is_second_half[[texts.row for texts in pairs]]
    return {name: calibration.assess(scores_N2D[..., index], preferences_ND[:, index], num_tokens_N2, half_N)
            for index, name in enumerate(self.dimensions)}

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
  path = Path(path)
  directory = path / CHECKPOINTS
  run = checkpoint.read_host(directory, step).config
  if run['stage'] != 'reward':
    raise ValueError(f'{path} is a run of stage {run["stage"]!r} and has no reward model; give one made with configs/reward_model.py.')
  step = checkpoint.committed_steps(directory)[-1] if step is None else step
  source = config_lib.build(ModelSource, run['model'], 'config.model')
  dimensions = dict(sorted(run['data']['dimensions'].items())) or OVERALL
  layout = params_lib.replicate_indivisible(layout, mesh, weight_files.read_config(source.path).num_kv_heads)
  model, *parts = load_trainable(source, config_lib.build(LoraConfig, run['lora'], 'config.lora'), run['seed'], mesh, layout)
  trainable, frozen = scalar_head.attach(*parts, model, len(dimensions), mesh, layout)
  trainable = checkpoint.read_params(directory, learner.abstract_state(trainable), step)
  with jax.set_mesh(mesh):
    params = params_lib.combine(trainable, frozen)
    head = params.pop(SCALAR_HEAD)  # Stays float32.
    params = {**lora.merge(params, dtype), SCALAR_HEAD: head}
  return RewardModel(path, step, model, params, tokenizer_lib.load(source.path), chat.TEMPLATES[source.chat_template], dimensions,
                     read_calibrations(path, step), layout, mesh)


def write_calibrations(directory: str | Path, step: int, calibrations: Mapping[str, Calibration]) -> None:
  """Write what held-out pairs say of a run's checkpoint, as JSON; the first process does."""
  if jax.process_index() == 0:
    record = {'step': step, 'dimensions': {name: config_lib.to_json(one) for name, one in calibrations.items()}}
    path = Path(directory) / CALIBRATION_FILE
    temporary = path.with_suffix('.tmp')
    temporary.write_text(json.dumps(record, indent=2, allow_nan=False) + '\n', encoding='utf-8')
    temporary.replace(path)


def read_calibrations(directory: str | Path, step: int | None = None) -> dict[str, Calibration] | None:
  """Return what `write_calibrations` wrote; None if nothing, or of another step than `step`, was written. ValueError if it is damaged."""
  path = Path(directory) / CALIBRATION_FILE
  if not path.is_file():
    return None
  try:
    record = json.loads(path.read_text(encoding='utf-8'))
    if step is not None and record['step'] != step:
      return None
    return {name: config_lib.build(Calibration, one, name) for name, one in record['dimensions'].items()}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{path} is not what a reward run writes ({error!r}); delete it and run the same training command again.') from error
