"""Distillation on given texts: a student learns a teacher's distributions at each learned token; a stage of `rl.offline`.

The texts are those of a supervised run (`rl.train`), from its tasks and loader. The teacher is either held on the same mesh, as a second
frozen tree whose forward pass is part of the training program (`loss.top_k=0`; exact, and its temperature may change), or its likeliest words
of all texts to come are computed before the first step and kept with the run (`loss.top_k`), so that training holds the student alone and a
resumed run reads the very same numbers.

Distillation on what the student itself writes is `rl.train_rl` with a `teacher`; a student made of some of a teacher's layers is made by
`launch.convert --layers`. Deliberately absent: phases, and teachers of another vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
import functools
import itertools
import logging
from pathlib import Path
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from models import transformer
from rl import learner as learner_lib
from rl import offline, phases, train
from rl import run as run_lib
from rl import teacher as teacher_lib
from rl.data import records, tasks
from rl.data.loader import Step
from rl.losses_distillation import DistillationLossConfig, TeacherSource
from rl.offline import OfflineConfig
from rl.run import ModelSource
from rl.teacher import Teacher
from rl.teacher_words import TeacherWords
from rl.types import Batch, Document, Params, TrainState

_LOG = logging.getLogger(__name__)
WORDS = 'teacher_words'
_FREE_ON_RESUME = ('checkpoint_every_steps', 'checkpoints_kept', 'eval_every_steps', 'eval_documents', 'cpu_devices', 'mesh.', 'layout.')


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(OfflineConfig):
  """A run that makes a student, the model, like its teacher; `eval_documents`: how many held-out ones an evaluation reads, 0 is all."""
  teacher: TeacherSource
  data: train.DataConfig
  stage: Literal['distillation'] = 'distillation'
  loss: DistillationLossConfig = DistillationLossConfig()
  eval_documents: int = 256

  def __post_init__(self):
    super().__post_init__()
    self.check_at_least(eval_documents=0)
    if self.loss.top_k and self.data.overlong == 'truncate':
      raise ValueError(f"loss.top_k={self.loss.top_k} keeps the teacher's words of whole texts, and data.overlong='truncate' cuts them; use "
                       "'drop' or 'error', or top_k=0.")


def run(config: DistillationConfig, workdir: str | Path) -> dict[str, float]:
  """Train to `num_steps`, from the newest checkpoint in `workdir` if there is one; return the last evaluation; raises as `offline.run`."""
  defaults = DistillationConfig(model=ModelSource(config.model.path), teacher=TeacherSource(config.teacher.path),
                                data=train.DataConfig(config.data.tasks), num_steps=config.num_steps)
  free = _FREE_ON_RESUME
  if config.loss.last_temperature == config.loss.temperature:
    free += ('num_steps',)
  return offline.run(config, lambda: set_up(config, workdir), workdir, defaults=defaults, free_on_resume=free)


def set_up(config: DistillationConfig, workdir: str | Path) -> tuple[DistillationStage, Params]:
  """Check everything a run needs and return it with the initial trainable parameters.

  Raises:
    ValueError, FileNotFoundError: what is wrong with the data, the mesh, the layout, the student or the teacher.
  """
  mixture = train.open_data(config.data, has_evaluations=config.eval_every_steps > 0)
  tokenizer, source, mesh, layout, place = run_lib.open_model(config, config.data.rows)
  tasks.check_vocabulary(mixture, source.vocab_size)
  teacher = teacher_lib.find(config.teacher, source, tokenizer, mesh, layout)
  if config.loss.top_k > source.vocab_size:
    raise ValueError(f'loss.top_k={config.loss.top_k} is more than the {source.vocab_size} words of the vocabulary.')
  model, trainable, frozen = run_lib.load_trainable(config.model, config.lora, config.seed, mesh, layout)
  learner = offline.build_learner(config, model, layout, mesh, learner_lib.distillation_loss(config.loss, teacher.model))
  words = None
  if config.loss.top_k:
    identity = {'teacher': teacher.fingerprint, 'dtype': config.teacher.dtype, 'compute_dtype': config.layout.compute_dtype,
                'temperature': config.loss.temperature}
    words = TeacherWords(Path(workdir) / WORDS, identity, config.loss.top_k)
  else:
    frozen = {**frozen, learner_lib.TEACHER: teacher.load()}
  lineage = {'model': run_lib.model_fingerprint(config.model.path), 'teacher': teacher.fingerprint, 'tokenizer': tokenizer.fingerprint,
             'data': tasks.fingerprint(mixture)}
  data = config.data
  phase, = phases.plan((), config.num_steps, length=data.length, rows=data.rows, micro_batches=data.micro_batches)
  return DistillationStage(config, phase, model, tokenizer, mesh, place, learner, frozen, mixture, lineage, teacher, words), trainable


@dataclass(frozen=True)
class DistillationStage(train.SupervisedStage):
  """A stage of `offline`; made by `set_up`.

  Attributes:
    words: the teacher's, where it is not held.
  """
  teacher: Teacher
  words: TeacherWords | None
  shown: ClassVar[dict[str, str]] = {'divergence': 'distillation/divergence_nats', 'agreement': 'distillation/agreement'}

  def flops_per_token(self, length: int) -> float:
    """Return the FLOPs that a step needs for each token of rows of this length, a held teacher's forward pass included."""
    of_teacher = transformer.num_forward_flops_per_token(self.teacher.model.config, length) if self.words is None else 0.0
    return super().flops_per_token(length) + of_teacher

  def prepare(self, workdir: Path, trainable: Params) -> None:
    """Score the texts of all steps with the teacher, if its words are kept and these are not there yet."""
    if self.words is None:
      return
    missing = (document for document in self._documents_to_come() if document not in self.words)
    first = next(missing, None)
    if first is None:
      return
    _LOG.info('Scoring the texts with the teacher: the %d likeliest words of each learned token.', self.config.loss.top_k)
    score = self.teacher.top_scorer(self.teacher.load(), self.config.loss.top_k, self.config.loss.temperature)
    self.words.score(itertools.chain([first], missing), score, self.place, self.config.data.rows, self.config.data.length)

  def _documents_to_come(self) -> Iterator[Document]:
    """Yield the documents of all steps, and of evaluation."""
    config, plain = self.config, super().document

    def position_after(split: str, is_last: Callable[[int, int], bool]) -> int:
      with self._loader(0, split, plain) as loader:
        for number, taken in enumerate(loader, 1):
          if is_last(number, taken.documents):
            break
        return loader.documents

    streams = [itertools.islice(self._stream(0, 'train'), position_after('train', lambda number, _: number == config.num_steps))]
    if config.eval_every_steps:
      end = position_after('heldout', lambda _, documents: 0 < config.eval_documents <= documents)
      streams.append(itertools.islice(self._stream(0, 'heldout'), end))
    for example in itertools.chain(*streams):
      document = plain(example)
      if len(document.tokens_T) <= config.data.length:
        yield document

  def document(self, example: records.Example) -> Document:
    """Return what is learned of an example, with the teacher's words of it if they are kept."""
    document = super().document(example)
    return self.words.attach(document) if self.words is not None and document in self.words else document

  def update(self, state: TrainState, taken: Step) -> tuple[TrainState, dict]:
    """Take an optimizer step; returns (state, metrics)."""
    with jax.set_mesh(self.mesh):
      temperature = _temperature(self.config.loss, self.config.num_steps, state.step)
    batches = [self._to_global(batch).replace(temperature=temperature) for batch in taken.batches]
    return self.learner.update(state, self.frozen, batches)

  def evaluate(self, trainable: Params) -> dict[str, float]:
    """Return what a supervised run does, and how far from the teacher the student is on the same documents, at the last temperature."""
    values = self.heldout(trainable)
    return {'heldout/loss_nats': values['train/loss_nats'], 'heldout/perplexity': float(np.exp(values['train/loss_nats'])),
            'heldout/target_tokens': values['train/target_tokens'], 'heldout/divergence_nats': values['distillation/divergence_nats'],
            'heldout/agreement': values['distillation/agreement']}

  def _to_global(self, batch: Batch) -> Batch:
    return super()._to_global(batch).replace(temperature=jnp.float32(self.config.loss.last_temperature))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _temperature(settings: DistillationLossConfig, num_steps: int, step: jax.Array) -> jax.Array:
  return settings.temperature_at(step, num_steps)
