"""Learning from preferences: DPO and its family on a policy, or a reward model with a scalar head; the stages of `rl.offline` on pairs.

Preference learning holds the policy close to a reference, the model it starts from; in a LoRA run that is the frozen base. The reference's
logprobs of all texts that the run will read are computed before the first step and kept with the run (`reference_logprobs`), so no second
model is held while training, and a resumed run reads the very same numbers.

KTO's reference point needs logprobs of the current policy on prompts with other replies: one more forward pass a step, no backward.

Deliberately absent: pairs sampled while training, and mixtures of several sources by rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
from dataclasses import dataclass, field
import itertools
import logging
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from models import chat, scalar_head, sharding, weight_files
from models.config import ModelConfig
from rl import batching, checkpoint, comparisons, losses_preference, offline, reward_model
from rl import learner as learner_lib
from rl import metrics as metrics_lib
from rl import run as run_lib
from rl.batching import Place
from rl.comparisons import Encoder, Step
from rl.data.preferences import PreferenceFiles, Preferences
from rl.learner import Learner
from rl.losses_preference import PreferenceLossConfig
from rl.losses_reward import RewardLossConfig
from rl.offline import OfflineConfig
from rl.reference_logprobs import ReferenceLogprobs
from rl.run import ModelSource
from rl.types import Batch, Params

_LOG = logging.getLogger(__name__)
REFERENCE = 'reference_logprobs'
_FREE_ON_RESUME = ('num_steps', 'checkpoint_every_steps', 'checkpoints_kept', 'eval_every_steps', 'eval_comparisons', 'cpu_devices', 'mesh.',
                   'layout.')


@dataclass(frozen=True)
class DataConfig(PreferenceFiles):
  """What is learned from, and how it is laid out.

  Attributes:
    rows: rows of one micro-batch, over all hosts.
    length: tokens of a row, in which both texts of a pair must fit.
    micro_batches: micro-batches of one optimizer step.
    max_segments: most texts of a row, an even number.
    overlong: what happens to a comparison whose texts do not fit into a row.
  """
  rows: int = 8
  length: int = 512
  micro_batches: int = 1
  max_segments: int = 32
  overlong: Literal['error', 'drop'] = 'drop'

  def __post_init__(self):
    super().__post_init__()
    batching.check_at_least_one(rows=self.rows, length=self.length, micro_batches=self.micro_batches)
    if self.max_segments < 2 or self.max_segments % 2:
      raise ValueError(f'max_segments={self.max_segments} must be even and at least 2: a row holds whole pairs.')


@dataclass(frozen=True, kw_only=True)
class _Config(OfflineConfig):
  """The fields of both stages; `eval_comparisons`: how many held-out ones an evaluation reads, 0 is all."""
  data: DataConfig
  eval_comparisons: int = 256

  def __post_init__(self):
    super().__post_init__()
    self.check_at_least(eval_comparisons=0)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(_Config):
  """A run that makes a policy prefer what is preferred."""
  stage: Literal['preference'] = 'preference'
  loss: PreferenceLossConfig = PreferenceLossConfig()


@dataclass(frozen=True, kw_only=True)
class RewardConfig(_Config):
  """A run that makes a reward model: `data.dimensions` get a head each; without them there is one."""
  stage: Literal['reward'] = 'reward'
  loss: RewardLossConfig = RewardLossConfig()


def run(config: PreferenceConfig | RewardConfig, workdir: str | Path) -> dict[str, float]:
  """Train to `num_steps`, from the newest checkpoint in `workdir` if there is one; return the last evaluation; raises as `offline.run`.

  A reward model is then judged on the held-out pairs that `eval_comparisons` allows, if the run evaluates at all.
  """
  defaults = type(config)(model=ModelSource(config.model.path), data=DataConfig(config.data.paths), num_steps=config.num_steps)
  with contextlib.ExitStack() as stack:
    results = offline.run(config, lambda: make_stage(config, stack), workdir, defaults=defaults, free_on_resume=_FREE_ON_RESUME)
  if config.stage == 'reward' and config.eval_every_steps:
    results = results | judge(config, Path(workdir))
  return results


def judge(config: RewardConfig, workdir: Path) -> dict[str, float]:
  """Write what held-out pairs say of a finished run's reward model, loaded as it will be used; return the main numbers.

  A run that was stopped early, or is judged already, is left as it is.
  """
  step = checkpoint.committed_steps(workdir / run_lib.CHECKPOINTS)[-1]
  if step != config.num_steps or reward_model.read_calibrations(workdir, step) is not None:
    return {}
  mesh = sharding.make_mesh(**vars(config.mesh))
  layout = run_lib.lay_out(config.layout, weight_files.read_config(config.model.path), mesh)
  model = reward_model.load(workdir, mesh, layout, config.layout.compute_dtype, step)
  with Preferences(config.data, kept_apart=True, singles=False) as data:
    numbers = data.rows['heldout'][:config.eval_comparisons or None]
    found = model.assess(data, numbers, rows=config.data.rows, length=config.data.length)
  reward_model.write_calibrations(workdir, step, found)
  return {f'heldout/{key}_{name}': value for name, one in found.items() for key, value in (
      ('brier', one.raw.brier), ('ece', one.raw.ece_mass), ('ece_scaled', one.scaled.ece_mass), ('temperature', one.temperature),
      ('length_correlation', one.length_correlation))}


def make_stage(config: PreferenceConfig | RewardConfig, stack: contextlib.ExitStack) -> tuple[ComparisonStage, Params]:
  """Check everything a run needs and return it with the initial trainable parameters; `stack` will close the data.

  Raises:
    ValueError, FileNotFoundError: what is wrong with the data, the mesh, the layout or the model.
  """
  is_reward = config.stage == 'reward'
  singly = not is_reward and not config.loss.is_paired
  data = stack.enter_context(Preferences(config.data, kept_apart=is_reward, singles=singly))
  if data.left_out:
    _LOG.warning('Left out %d rows of %s: %s.', data.left_out.total(), ', '.join(config.data.paths),
                 '; '.join(f'{why}: {count}' for why, count in data.left_out.items()))
  if config.eval_every_steps and not data.rows['heldout'].size:
    raise ValueError(f'eval_every_steps={config.eval_every_steps} evaluates on held-out rows, and data.heldout_fraction='
                     f'{config.data.heldout_fraction} left none; raise it, or set eval_every_steps=0.')
  tokenizer, _, mesh, layout, place = run_lib.open_model(config, config.data.rows)
  model, trainable, frozen = run_lib.load_trainable(config.model, config.lora, config.seed, mesh, layout)
  if is_reward:
    dimensions = config.data.dimensions or reward_model.OVERALL
    loss = learner_lib.reward_loss(config.loss, dimensions, config.data.max_segments)
    trainable, frozen = scalar_head.attach(trainable, frozen, model, len(dimensions), mesh, layout)
  else:
    loss = learner_lib.preference_loss(config.loss, config.data.max_segments)
  learner = offline.build_learner(config, model, layout, mesh, loss)
  encode = Encoder(data, tokenizer, chat.TEMPLATES[config.model.chat_template], config.data.length, config.data.overlong, singly)
  lineage = {'model': run_lib.model_fingerprint(config.model.path), 'tokenizer': tokenizer.fingerprint, 'data': data.fingerprint}
  return ComparisonStage(config, model, mesh, place, learner, frozen, lineage, encode), trainable


@dataclass
class ComparisonStage:
  """A stage of `offline` that learns from comparisons; made by `make_stage`."""
  config: PreferenceConfig | RewardConfig
  model: ModelConfig
  mesh: Mesh
  place: Place
  learner: Learner
  frozen: Params
  lineage: Mapping[str, Any]
  encode: Encoder
  references: ReferenceLogprobs | None = field(default=None, init=False)

  @property
  def shown(self) -> dict[str, str]:
    """What the progress line shows."""
    return {'loss': 'train/loss', 'accuracy': 'preference/accuracy' if self.config.stage == 'preference' else 'reward_model/accuracy'}

  def flops_per_token(self, length: int) -> float:
    """Return the FLOPs that a step needs for each token of rows of this length; not those of KTO's reference point."""
    return offline.flops_per_token(self.config, self.model, length)

  def prepare(self, workdir: Path, trainable: Params) -> None:
    """Score the texts of all steps with the reference, if the loss has one and they are not scored yet."""
    config = self.config
    if config.stage == 'reward' or not config.loss.has_reference:
      return
    identity = {**self.lineage, 'chat_template': config.model.chat_template, 'length': config.data.length, 'singly': self.encode.singly,
                'dtype': config.model.frozen_dtype if config.lora.rank else 'float32'}
    self.references = ReferenceLogprobs(workdir / REFERENCE, identity)
    missing = [row for row in self._rows_to_come() if row not in self.references]
    if not missing:
      return
    _LOG.info('Scoring the texts of %d rows with the reference.', len(missing))
    reference = None if config.lora.rank else trainable

    def score(batch):
      return self.learner.score(reference, self.frozen, batch).logprobs_BT

    self.references.score(map(self.encode, missing), score, self.place, config.data.rows, config.data.length)

  def _rows_to_come(self) -> list[int]:
    """Return the rows of all steps, and of evaluation, each once."""
    rows = dict.fromkeys(texts.row for plan in itertools.islice(self._plans(0), self.config.num_steps) for texts in plan.texts)
    if self.config.eval_every_steps:
      rows |= dict.fromkeys(texts.row for plan in self._heldout_plans() for texts in plan.texts)
    return list(rows)

  def _plans(self, position: int, split: str = 'train') -> Iterator[comparisons.Plan]:
    data = self.config.data
    items = comparisons.stream(self.encode.data, self.encode, seed=self.config.seed, position=position, split=split)
    rows = data.rows * (data.micro_batches if split == 'train' else 1)
    return comparisons.plans(items, rows, data.length, data.max_segments // self.encode.data.max_replies)

  def _heldout_plans(self) -> Iterator[comparisons.Plan]:
    for plan in self._plans(0, 'heldout'):
      yield plan
      if 0 < self.config.eval_comparisons <= plan.position:
        return

  def _lay_out(self, plan: comparisons.Plan, *, mean: bool) -> Step:
    if self.references is not None:
      texts = tuple(map(self.references.attach, plan.texts))
      plan = comparisons.Plan(texts, plan.assignment, plan.position, plan.num_dropped)
    data = self.config.data
    return comparisons.lay_out(plan, rows=data.rows, length=data.length, host_rows=batching.host_rows(self.place, data.rows), mean=mean)

  def steps(self, position: int) -> Iterator[Step]:
    """Return the data of each step from a position on."""
    return comparisons.prefetched(self._lay_out(plan, mean=True) for plan in self._plans(position))

  def _batches(self, trainable: Params, taken: Step) -> list[Batch]:
    """Put a step on the devices, KTO's reference point included."""
    batches, others = ([batching.to_global(batch, self.place) for batch in found] for found in (taken.batches, taken.mismatched))
    if not others:
      return batches
    logprobs = [self.learner.score(trainable, self.frozen, batch).logprobs_BT for batch in others]
    with jax.set_mesh(self.mesh):
      point = _reference_point(logprobs, others, taken.num_comparisons)
    return [batch.replace(reference_point=point) for batch in batches]

  def update(self, state, taken: Step):
    """Take an optimizer step; returns (state, metrics)."""
    return self.learner.update(state, self.frozen, self._batches(state.trainable, taken))

  def evaluate(self, trainable: Params) -> dict[str, float]:
    """Return the metrics of the held-out comparisons, and 'heldout/loss', the mean of theirs."""
    total, num_comparisons = None, 0
    for plan in self._heldout_plans():
      taken = self._lay_out(plan, mean=False)
      num_comparisons += taken.num_comparisons
      for batch in self._batches(trainable, taken):
        metrics = self.learner.evaluate(trainable, self.frozen, batch)
        total = metrics if total is None else metrics_lib.merge(total, metrics)
    if total is None:
      raise ValueError(f'No held-out comparison fits data.length={self.config.data.length}; raise it, or set eval_every_steps=0.')
    values = metrics_lib.compute(total)
    found = {f'heldout/{key.split("/", 1)[1]}': value for key, value in values.items() if not key.startswith('train/')}
    return {'heldout/loss': values['train/loss'] / num_comparisons, **found, 'heldout/comparisons': num_comparisons}

  def describe(self, taken: Step) -> dict[str, float]:
    """Return what is reported of a step's data."""
    data = self.config.data
    return {'data/comparisons': taken.num_comparisons, 'data/dropped_documents': taken.num_dropped,
            'data/left_out_rows': self.encode.data.left_out.total(),
            'data/fill_fraction': taken.num_tokens / (data.rows * data.micro_batches * data.length)}


_reference_point = jax.jit(losses_preference.reference_point)
