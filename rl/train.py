"""Supervised fine-tuning, full or LoRA, from a pretrained model: what is learned from, in which phases, and one step of it.

The loop, and how a killed run goes on, are `offline`'s. A phase (see `phases`) is a run of that loop to its last step, from the checkpoint of
the phase before: rows and RoPE are static, so each has its own learner, and nothing else changes.

Configuration, data, mesh and model are checked in this order, for all phases, before the first step; a run that resumes refuses another model,
other data, or another past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from jax.sharding import Mesh
import numpy as np

from models import chat
from models.config import ModelConfig
from models.tokenizer import Tokenizer
from rl import batching, checkpoint, offline
from rl import metrics as metrics_lib
from rl import phases as phases_lib
from rl import run as run_lib
from rl.batching import Place
from rl.data import records, tasks, token_files
from rl.data.loader import Loader, Step
from rl.learner import Learner
from rl.offline import OfflineConfig
from rl.phases import Phase, PhaseConfig
from rl.run import ModelSource
from rl.types import Document, Params, TrainState

# What a resumed run may change; everything else decides what is computed. Of the phases, those to come.
_FREE_ON_RESUME = ('num_steps', 'phases', 'checkpoint_every_steps', 'checkpoints_kept', 'eval_every_steps', 'eval_documents', 'cpu_devices',
                   'mesh.', 'layout.')


@dataclass(frozen=True)
class DataConfig:
  """What is learned from.

  Attributes:
    tasks: name -> body of data.
    rates: name -> relative number of examples drawn; {} draws in proportion to size.
    rows: rows of one micro-batch, over all hosts.
    length: tokens of a row.
    micro_batches: micro-batches of one optimizer step.
    overlong: what happens to a document longer than a row.
    aggregation: how token losses become one number.
  """
  tasks: dict[str, tasks.TaskConfig]
  rates: dict[str, float] = field(default_factory=dict)
  rows: int = 8
  length: int = 256
  micro_batches: int = 1
  overlong: Literal['error', 'truncate', 'drop'] = 'drop'
  aggregation: Literal['token_mean', 'sequence_mean', 'token_sum'] = 'token_mean'


@dataclass(frozen=True, kw_only=True)
class TrainConfig(OfflineConfig):
  """A supervised run.

  Attributes:
    phases: of other rows and another RoPE, one after the other; () is one of the data's settings.
    eval_documents: how many held-out documents an evaluation reads; 0 reads all.
  """
  data: DataConfig
  phases: tuple[PhaseConfig, ...] = ()
  stage: Literal['supervised'] = 'supervised'
  eval_documents: int = 256

  def __post_init__(self):
    super().__post_init__()
    self.check_at_least(eval_documents=0)
    self.plan()

  def plan(self) -> tuple[Phase, ...]:
    """Return the phases of the run."""
    data = self.data
    return phases_lib.plan(self.phases, self.num_steps, length=data.length, rows=data.rows, micro_batches=data.micro_batches)


def encode(example: records.Example, tokenizer: Tokenizer, template: chat.Template) -> Document:
  """Render an example; what the assistant says is learned, its end-of-turn token included.

  A text that nobody asked for is a document: it ends with the tokenizer's eos, has no markup of the template, and all of it is learned. So is
  all of a tokenized document, as it is.
  """
  if example.tokens is not None:
    tokens_T = token_files.document(example.tokens)
    return Document(tokens_T, np.broadcast_to(True, tokens_T.shape), example.source)
  if [message['role'] for message in example.messages] == ['assistant']:
    begin, end = ([] if id is None else [id] for id in (tokenizer.bos_id, tokenizer.eos_id))
    tokens_T = np.array([*begin, *tokenizer.encode(example.messages[0]['content']), *end], np.int32)
    return Document(tokens_T, np.arange(tokens_T.size) >= len(begin), example.source)
  rendered = chat.render(example.messages, tokenizer, template)
  return Document(rendered.tokens_T, chat.loss_mask_T(rendered), example.source)


def run(config: TrainConfig, workdir: str | Path) -> dict[str, float]:
  """Train to `num_steps`, from the newest checkpoint in `workdir` if there is one; return the last evaluation; raises as `offline.run`."""
  defaults = TrainConfig(model=ModelSource(config.model.path), data=DataConfig(config.data.tasks), num_steps=config.num_steps)
  directory = Path(workdir) / run_lib.CHECKPOINTS
  mixture = open_data(config.data, has_evaluations=config.eval_every_steps > 0)
  plan, results = config.plan(), {}
  done = _refuse_other_past(plan, directory, workdir)
  for phase in plan:
    if phase.last_step <= done and phase is not plan[-1]:
      continue
    results = offline.run(config, lambda: set_up(config, phase, mixture), workdir, defaults=defaults, free_on_resume=_FREE_ON_RESUME,
                          last_step=phase.last_step, length=phase.length)
    if checkpoint.committed_steps(directory)[-1] < phase.last_step:
      break  # By a signal.
  return results


def _refuse_other_past(plan: tuple[Phase, ...], directory: Path, workdir: str | Path) -> int:
  """Return the step of the newest checkpoint; raise ValueError if it was reached through other phases."""
  steps = checkpoint.committed_steps(directory)
  if not steps:
    return 0
  then, now = (phases_lib.until(phases, steps[-1]) for phases in (phases_lib.of_run(checkpoint.read_host(directory).config), plan))
  if then != now:
    raise ValueError(f'{workdir} holds step {steps[-1]} of a run whose phases were {then} up to there, and are {now} now. Use another '
                     '--workdir, or change only phases that have not begun.')
  return steps[-1]


def open_data(data: DataConfig, *, has_evaluations: bool) -> Any:
  """Check all the data and return it as a mixture; raises as `tasks.build_mixture`, and ValueError where there is nothing to learn or score."""
  mixture = tasks.build_mixture(tasks.MixtureConfig(data.tasks, data.rates))
  tasks.check_not_empty(mixture, 'train', is_endless=True)
  if has_evaluations:
    tasks.check_not_empty(mixture, 'heldout')
  return mixture


def set_up(config: TrainConfig, phase: Phase | None = None, mixture: Any = None) -> tuple[SupervisedStage, Params]:
  """Check everything a run needs and return a phase of it (default: the first) with the initial trainable parameters.

  `mixture` is that of `open_data`, if it is open.

  Raises:
    ValueError, FileNotFoundError: what is wrong with the data, the mesh, the layout or the model.
  """
  mixture = open_data(config.data, has_evaluations=config.eval_every_steps > 0) if mixture is None else mixture
  plan = config.plan()
  phase = plan[0] if phase is None else phase
  tokenizer, source, mesh, layout, place = run_lib.open_model(config, *(each.rows for each in plan))
  tasks.check_vocabulary(mixture, source.vocab_size)
  for each in plan:
    each.extend(source)
  model, trainable, frozen = run_lib.load_trainable(config.model, config.lora, config.seed, mesh, layout)
  model = phase.extend(model)
  learner = offline.build_learner(config, model, layout, mesh)
  lineage = {'model': run_lib.model_fingerprint(config.model.path), 'tokenizer': tokenizer.fingerprint, 'data': tasks.fingerprint(mixture)}
  return SupervisedStage(config, phase, model, tokenizer, mesh, place, learner, frozen, mixture, lineage), trainable


@dataclass(frozen=True)
class SupervisedStage:
  """A phase of a supervised run, as a stage of `offline`; made by `set_up`."""
  config: TrainConfig
  phase: Phase
  model: ModelConfig
  tokenizer: Tokenizer
  mesh: Mesh
  place: Place
  learner: Learner
  frozen: Params
  mixture: Any
  lineage: dict[str, Any]
  shown: ClassVar[dict[str, str]] = {}

  def flops_per_token(self, length: int) -> float:
    """Return the FLOPs that a step needs for each token of rows of this length."""
    return offline.flops_per_token(self.config, self.model, length)

  def prepare(self, workdir: Path, trainable: Params) -> None:
    """Nothing is computed of the initial model."""

  def steps(self, position: int) -> Iterator[Step]:
    """Yield the data of each step from a position on."""
    with self._loader(position, 'train') as loader:
      yield from loader

  def update(self, state: TrainState, taken: Step) -> tuple[TrainState, dict]:
    """Take an optimizer step; returns (state, metrics)."""
    return self.learner.update(state, self.frozen, [self._to_global(batch) for batch in taken.batches])

  def describe(self, taken: Step) -> dict[str, float]:
    """Return what is reported of a step's data."""
    phase = self.phase
    return {'data/dropped_documents': taken.num_dropped, 'data/truncated_documents': taken.num_truncated, 'data/length_tokens': phase.length,
            'data/fill_fraction': taken.num_tokens / (phase.rows * phase.micro_batches * phase.length)}

  def evaluate(self, trainable: Params) -> dict[str, float]:
    """Return the held-out loss in nats per learned token, its perplexity, and the number of tokens, over `eval_documents` documents."""
    values = self.heldout(trainable)
    return {'heldout/loss_nats': values['train/loss_nats'], 'heldout/perplexity': float(np.exp(values['train/loss_nats'])),
            'heldout/target_tokens': values['train/target_tokens']}

  def heldout(self, trainable: Params) -> dict[str, float]:
    """Return the learner's metrics over the held-out documents."""
    total = None
    with self._loader(0, 'heldout') as loader:
      for taken in loader:
        for batch in taken.batches:
          metrics = self.learner.evaluate(trainable, self.frozen, self._to_global(batch))
          total = metrics if total is None else metrics_lib.merge(total, metrics)
        if self.config.eval_documents and taken.documents >= self.config.eval_documents:
          break
    return metrics_lib.compute(total)

  def document(self, example: records.Example) -> Document:
    """Return what is learned of an example."""
    return encode(example, self.tokenizer, chat.TEMPLATES[self.config.model.chat_template])

  def _to_global(self, batch):
    return batching.share_to_global(batch, self.place, self.phase.length)

  def _stream(self, position: int, split: str) -> Iterator[records.Example]:
    is_train = split == 'train'
    return tasks.examples(self.mixture, seed=self.config.seed, position=position, split=split, num_epochs=None if is_train else 1,
                          shuffle=is_train)

  def _loader(self, position: int, split: str, document: Callable[[records.Example], Document] | None = None) -> Loader:
    """Open the data at a position; the held-out split is read once, in order, and its weights are sums so that steps add up.

    `document` is what is learned of an example, `self.document` by default.
    """
    is_train = split == 'train'
    data, phase = self.config.data, self.phase
    return Loader(
        lambda start: self._stream(start, split), document or self.document, rows=phase.rows, length=phase.length,
        micro_batches=phase.micro_batches if is_train else 1, host_rows=batching.host_rows(self.place, phase.rows),
        share=self.place.share(phase.length), position=position, overlong=data.overlong,
        aggregation=data.aggregation if is_train else 'token_sum')
