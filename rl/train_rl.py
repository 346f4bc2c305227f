"""The online loop: reinforcement learning with verifiable rewards, sampler and trainer on the same devices in turns.

One step is: draw problems, sample a group of replies to each (`rollout.worker`), compare rewards within groups (`advantages`), pack, update
(`learner`), publish the new weights to the sampler (`rollout.weights`); then evaluation and checkpoint on their schedules. GRPO and its
variants are settings of these parts (`configs/grpo.py`).

Every sample depends on its seeds alone, and what a step trains on depends on the samples and not on when they finished; so a killed run
continues from its checkpoint as if nothing had happened, bit for bit. (Only failures of the infrastructure that outlast all attempts, and
deadlines, change what is trained on.) Samples whose advantage is 0 count in every denominator but are not computed, where nothing but
their advantage would give them a gradient.

Deliberately absent: sampling on other devices while training, and critics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
from dataclasses import dataclass, field
import logging
from pathlib import Path
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import numpy as np

from envs.core import Domain, Outcome
from envs.tool_env import ToolEnv
from models import chat, sharding, transformer
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from models.sampling import Sampling
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import advantages, batching, checkpoint, monitor, optimizer
from rl import config as config_lib
from rl import learner as learner_lib
from rl import metrics as metrics_lib
from rl import run as run_lib
from rl.batching import Aggregation
from rl.curriculum import Curriculum, DomainConfig, heldout_problems, make_domains
from rl.evals import runner
from rl.learner import Learner
from rl.losses import PolicyLossConfig
from rl.optimizer import OptimizerConfig
from rl.rollout.engine import Engine
from rl.rollout.ledger import Ledger
from rl.rollout.weights import Publisher
from rl.rollout.worker import Assignment, RolloutConfig, Worker
from rl.run import LayoutConfig, LoraConfig, MeshConfig, ModelSource
from rl.types import Batch, Group, HostState, Params, Trajectory

_LOG = logging.getLogger(__name__)
_PROBE_TEXT = 'Ada had twelve apples and gave five of them to her friend. How many apples are left?'
_FREE_ON_RESUME = ('num_steps', 'checkpoint_every_steps', 'checkpoints_kept', 'eval.', 'cpu_devices', 'mesh.', 'layout.')


@dataclass(frozen=True)
class AdvantageConfig:
  """How rewards of a group become advantages; see `advantages.group_relative`."""
  center: advantages.Center = 'mean'
  scale: advantages.Scale = 'std'
  epsilon: float = 1e-6


@dataclass(frozen=True)
class EvalConfig:
  """Evaluation on held-out problems, with one sample each.

  Attributes:
    every_steps: steps between evaluations; there is also one before the first step and after the last. 0 never evaluates.
    problems: how many, over all domains and levels.
    temperature: 0 decodes greedily.
  """
  every_steps: int = 0
  problems: int = 200
  temperature: float = 0.0


@dataclass(frozen=True)
class RLConfig:
  """A run of reinforcement learning.

  Attributes:
    domains: name -> what is trained on.
    num_steps: optimizer schedule and run end here; a step is one batch of groups.
    aggregation: how token losses become one number (`batching.step_denominator`); 'constant' divides by rollout.max_new_tokens.
    groups: problems of a step.
    group_size: samples of a problem.
    max_rounds: above 1, groups without signal (all rewards equal) are dropped and replaced by new problems, at most so often (dynamic
      sampling, arXiv:2503.14476 sec. 3.2).
    overlong: samples cut off by the length limit are graded as they stand, left out ('mask'), or lose up to 1 ('penalty': the soft overlong
      punishment over the last `overlong_buffer` tokens of a reply).
    minibatches: optimizer steps of a batch, each on its own share of the groups.
    epochs: passes over a batch. With one minibatch and one epoch the old policy is the current one and needs no forward pass.
    rows, length: rows of a micro-batch over all hosts, and their tokens; a conversation (rollout.max_length) must fit in one.
    curriculum: 'adaptive' draws the levels of a domain by how much there is to learn at them, 'fixed' equally.
    max_probe_diff_nats: how much trained and published weights may differ on the probe, by their precision.
    Others: as in `train.TrainConfig`.
  """
  model: ModelSource
  domains: dict[str, DomainConfig]
  num_steps: int
  aggregation: Aggregation
  stage: Literal['rl'] = 'rl'
  seed: int = 0
  groups: int = 16
  group_size: int = 8
  max_rounds: int = 1
  overlong: Literal['grade', 'mask', 'penalty'] = 'grade'
  overlong_buffer: int = 32
  minibatches: int = 1
  epochs: int = 1
  rows: int = 8
  length: int = 512
  curriculum: Literal['fixed', 'adaptive'] = 'adaptive'
  max_probe_diff_nats: float = 0.1
  advantage: AdvantageConfig = AdvantageConfig()
  loss: PolicyLossConfig = PolicyLossConfig()
  rollout: RolloutConfig = RolloutConfig()
  eval: EvalConfig = EvalConfig()
  lora: LoraConfig = LoraConfig()
  mesh: MeshConfig = MeshConfig()
  layout: LayoutConfig = LayoutConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  checkpoint_every_steps: int = 10
  checkpoints_kept: int = 2
  cpu_devices: int = 1

  def __post_init__(self):
    for name, least in (('num_steps', 1), ('seed', 0), ('groups', 1), ('group_size', 1), ('max_rounds', 1), ('overlong_buffer', 1),
                        ('minibatches', 1), ('epochs', 1), ('rows', 1), ('length', 2), ('checkpoint_every_steps', 1),
                        ('checkpoints_kept', 1), ('cpu_devices', 1)):
      if getattr(self, name) < least:
        raise ValueError(f'{name}={getattr(self, name)} must be at least {least}.')
    if self.rollout.max_length > self.length:
      raise ValueError(f'rollout.max_length={self.rollout.max_length} does not fit into rows of length={self.length}; '
                       'raise length or lower rollout.max_length.')
    if self.overlong == 'penalty' and self.overlong_buffer > self.rollout.max_new_tokens:
      raise ValueError(f'overlong_buffer={self.overlong_buffer} is beyond rollout.max_new_tokens={self.rollout.max_new_tokens}.')
    if self.minibatches > self.groups:
      raise ValueError(f'minibatches={self.minibatches} cannot share groups={self.groups}; use at most as many.')
    if self.group_size == 1 and self.advantage.center != 'none':
      raise ValueError(f'group_size=1 leaves nothing to compare with advantage.center={self.advantage.center!r}; raise it to 2 or more.')
    if self.rollout.min_group_size > self.group_size:
      raise ValueError(f'rollout.min_group_size={self.rollout.min_group_size} is more than group_size={self.group_size}.')
    optimizer.schedule(self.optimizer, self.num_steps)


@dataclass(frozen=True)
class Setup:
  """What a run computes with, made once by `set_up`."""
  model: ModelConfig
  tokenizer: Tokenizer
  domains: dict[str, Domain]
  domain_configs: dict[str, DomainConfig]
  layout: Layout
  mesh: Mesh
  place: NamedSharding
  learner: Learner
  frozen: Params
  reference: Params | None
  lineage: dict[str, Any]


@dataclass
class Clock:
  """Seconds of one step by phase; what no phase claims is 'idle'."""
  start_s: float = field(default_factory=time.perf_counter)
  phases_s: Counter = field(default_factory=Counter)

  @contextlib.contextmanager
  def phase(self, name: str):
    """Count the time inside as the phase's."""
    start_s = time.perf_counter()
    try:
      yield
    finally:
      self.phases_s[name] += time.perf_counter() - start_s

  def take(self) -> dict[str, float]:
    """Return the phases' seconds with 'total' and 'idle', and start over."""
    now_s = time.perf_counter()
    total_s, claimed_s = now_s - self.start_s, self.phases_s.total()
    result = {**self.phases_s, 'idle': max(total_s - claimed_s, 0.0), 'total': total_s}
    self.start_s, self.phases_s = now_s, Counter()
    return result


def set_up(config: RLConfig) -> tuple[Setup, Params]:
  """Check everything a run needs and return it with the initial trainable parameters.

  Raises:
    ValueError, FileNotFoundError: what is wrong with the domains, the mesh, the layout or the model.
    RuntimeError: a domain needs the sandbox and there is none.
  """
  domains, domain_configs = make_domains(config.domains)
  for domain in domains.values():
    if domain.needs_sandbox:
      from envs.sandbox import client
      _LOG.info('sandbox: %s', client.shared().tier)
  if config.eval.every_steps:
    heldout_problems(domains, domain_configs, 1)
  tokenizer = tokenizer_lib.load(config.model.path)
  mesh = sharding.make_mesh(**vars(config.mesh))
  layout = Layout(**vars(config.layout))
  place = NamedSharding(mesh, layout.spec('batch', 'length'))
  batching.host_rows(place, config.rows)
  sharding.check_divides('length', config.length, ('seq',), mesh)
  model, trainable, frozen = run_lib.load_trainable(config.model, config.lora, config.seed, mesh, layout)
  layout = params_lib.replicate_indivisible(layout, mesh, model.num_kv_heads)
  is_full = config.lora.rank == 0
  learner = learner_lib.build(
      model, layout, mesh, optimizer.build(config.optimizer, config.num_steps * config.minibatches * config.epochs),
      optimizer.schedule(config.optimizer, config.num_steps * config.minibatches * config.epochs), full=is_full,
      loss=learner_lib.policy_loss(config.loss))
  reference = jax.tree.map(jnp.copy, trainable) if is_full and config.loss.kl_coef else None
  lineage = {'model': run_lib.model_fingerprint(config.model.path), 'tokenizer': tokenizer.fingerprint,
             'domains': {name: domain.version for name, domain in domains.items()}}
  return Setup(model, tokenizer, domains, domain_configs, layout, mesh, place, learner, frozen, reference, lineage), trainable


class Sampler:
  """The policy as a sampler: engine, workers for training and evaluation, and publishing."""

  def __init__(self, config: RLConfig, setup: Setup, trainable: Params, version: int, ledger: Ledger,
               make_env: Callable[[Domain], Any] | None = None):
    """Build the engine and publish `trainable` as `version`."""
    self._config, self._setup = config, setup
    rollout = config.rollout
    make_env = make_env or (lambda domain: ToolEnv(domain, describe_tools=rollout.describe_tools))
    layout = dataclasses.replace(sharding.ROLLOUT, compute_dtype=config.layout.compute_dtype)
    params = params_lib.combine(trainable, setup.frozen)
    self.engine = Engine(params, setup.model, layout, setup.mesh, num_slots=rollout.slots, max_length=rollout.max_length,
                         steps_per_launch=rollout.steps_per_launch, prefill_chunk=rollout.prefill_chunk, version=version)
    self._publisher = Publisher(setup.model, self.engine.layout, setup.mesh, setup.layout, np.array(setup.tokenizer.encode(_PROBE_TEXT)),
                                max_probe_diff_nats=config.max_probe_diff_nats)
    self.publish(trainable, version)
    template = chat.TEMPLATES[config.model.chat_template]

    def worker(seed, ledger):
      return Worker(self.engine, setup.tokenizer, template, setup.domains, make_env, rollout, seed=seed, ledger=ledger)

    self.worker, self.evaluator = worker(config.seed, ledger), worker(config.seed + 2**31, Ledger())

  def publish(self, trainable: Params, version: int, *, has_changed: bool = True) -> dict[str, float]:
    """Give the engine new weights; returns metrics, raises as `Publisher.publish`."""
    published = self._publisher.publish(params_lib.combine(trainable, self._setup.frozen), version, has_changed=has_changed)
    self.engine.update(published.params, version)
    return {'weight_sync/probe_diff_nats': published.probe_diff_nats, 'weight_sync/version': version}

  def evaluate(self) -> runner.Result:
    """Return how many held-out problems the current policy solves."""
    config = self._config
    problems = heldout_problems(self._setup.domains, self._setup.domain_configs, config.eval.problems)
    return runner.evaluate(self.evaluator, problems, Sampling(temperature=config.eval.temperature))


@dataclass(frozen=True)
class Collected:
  """What one step collected.

  Attributes:
    groups: those to train on, in the order of their ordinals.
    dropped: groups that are not, with the cause.
  """
  groups: tuple[Group, ...]
  dropped: tuple[tuple[Group, str], ...]

  @property
  def num_queued(self) -> int:
    """Return how many valid samples wait to be trained on."""
    return sum(trajectory.is_valid for group in self.groups for trajectory in group.trajectories)


def collect(config: RLConfig, curriculum: Curriculum, worker: Worker, ledger: Ledger) -> Collected:
  """Sample groups for one step, in rounds until there are `config.groups` of use.

  Raises:
    RuntimeError: no group came through, because of failures that are not the policy's.
  """
  good: list[tuple[int, Group]] = []
  dropped: list[tuple[Group, str]] = []
  for _ in range(config.max_rounds):
    assignments = [Assignment(*curriculum.draw()) for _ in range(config.groups - len(good))]
    if not assignments:
      break
    for group in worker.collect(assignments, config.group_size, Sampling()):
      valid = [trajectory for trajectory in group.trajectories if trajectory.is_valid]
      if len(valid) < config.rollout.min_group_size:
        dropped.append((group, 'group_too_small'))
      elif config.max_rounds > 1 and len({trajectory.reward for trajectory in valid}) == 1:
        dropped.append((group, 'no_signal'))
      else:
        good.append((group.trajectories[0].group, group))
  for group, cause in dropped:
    ledger.dropped[cause] += sum(trajectory.is_valid for trajectory in group.trajectories)
  if not good and all(cause == 'group_too_small' for _, cause in dropped):
    reasons = Counter(trajectory.reason for group, _ in dropped for trajectory in group.trajectories if not trajectory.is_valid)
    shown = '; '.join(f'{count}x {reason}' for reason, count in reasons.most_common(3))
    raise RuntimeError(f'None of {len(dropped)} groups came through, because the environments fail and not the policy: {shown}.')
  return Collected(tuple(group for _, group in sorted(good, key=lambda pair: pair[0])), tuple(dropped))


def rewards_of(config: RLConfig, groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
  """Return (rewards_QU, is_used_QU) after the treatment of overlong samples; unused places hold 0."""
  rewards_QU, is_used_QU = np.zeros((len(groups), config.group_size)), np.zeros((len(groups), config.group_size), np.bool_)
  for row, group in enumerate(groups):
    for column, trajectory in enumerate(group.trajectories):
      is_cut = trajectory.outcome == Outcome.LENGTH
      if not trajectory.is_valid or (is_cut and config.overlong == 'mask'):
        continue
      penalty = 0.0
      if config.overlong == 'penalty':
        penalty = advantages.soft_overlong_penalty(_reply_length(trajectory), config.rollout.max_new_tokens, config.overlong_buffer)
      rewards_QU[row, column], is_used_QU[row, column] = trajectory.reward + penalty, True
  return rewards_QU, is_used_QU


def _reply_length(trajectory: Trajectory) -> int:
  """Return the tokens of the policy's last reply."""
  ends = np.flatnonzero(trajectory.loss_mask_T)
  starts = np.flatnonzero(~trajectory.loss_mask_T[:ends[-1]]) if ends.size else ends
  return int(ends[-1] - starts[-1]) if ends.size and starts.size else int(ends.size)


def make_batches(config: RLConfig, trajectories: Sequence[Trajectory], advantage_of: Sequence[float]) -> list[Batch]:
  """Return the micro-batches of one optimizer step, as numpy."""
  documents = batching.documents(trajectories, advantage_of)
  denominator = batching.step_denominator(documents, config.aggregation, max_length=config.rollout.max_new_tokens)
  if not (config.loss.kl_coef or config.loss.entropy_coef):
    documents = [document for document, value in zip(documents, advantage_of, strict=True) if value != 0] or documents[:1]
  max_segments = config.loss.max_segments if config.loss.ratio == 'sequence' else None
  return batching.pack_step(documents, config.rows, config.length, aggregation=config.aggregation, denominator=denominator,
                            max_segments=max_segments)


def update(config: RLConfig, setup: Setup, state, groups: Sequence[Group], advantages_QU: np.ndarray, is_used_QU: np.ndarray,
           clock: Clock) -> tuple[Any, dict]:
  """Take the optimizer steps of one batch; returns (state, metrics of `learner.update` merged over them)."""
  learner, total = setup.learner, None
  needs_old = config.minibatches * config.epochs > 1
  shares = np.array_split(np.arange(len(groups)), min(config.minibatches, len(groups)))

  def place(batches):
    return [batching.to_global(batch, setup.place) for batch in batches]

  prepared = []
  with clock.phase('score'):
    for share in shares:
      chosen = [(groups[row].trajectories[column], float(advantages_QU[row, column])) for row in share
                for column in range(config.group_size) if is_used_QU[row, column]]
      if not chosen:
        continue
      batches = place(make_batches(config, *zip(*chosen, strict=True)))
      if needs_old:
        batches = [batch.replace(old_logprobs_BT=learner.score(state.trainable, setup.frozen, batch).logprobs_BT) for batch in batches]
      if config.loss.kl_coef:
        batches = [batch.replace(reference_logprobs_BT=learner.score(setup.reference, setup.frozen, batch).logprobs_BT)
                   for batch in batches]
      prepared.append(batches)
    jax.block_until_ready(prepared)
  with clock.phase('train'):
    for _ in range(config.epochs):
      for batches in prepared:
        state, metrics = learner.update(state, setup.frozen, batches)
        total = metrics if total is None else metrics_lib.merge(total, metrics)
    values = metrics_lib.compute(total)
    jax.block_until_ready(state)
  return state, values


def run(config: RLConfig, workdir: str | Path, make_env: Callable[[Domain], Any] | None = None) -> dict[str, float]:
  """Train to `num_steps`, from the newest checkpoint in `workdir` if there is one; return the last evaluation (or {}).

  `make_env(domain)` makes the environments; by default they are `ToolEnv`s.

  Raises:
    ValueError, FileNotFoundError: bad configuration, data or model; a checkpoint of another run.
    RuntimeError: files that cannot be written, environments that fail throughout, weights that do not reach the sampler, or
      `run.MAX_SKIPPED_IN_A_ROW` updates without a finite gradient.
  """
  if jax.process_count() > 1:
    raise RuntimeError(f'rl.train_rl runs in one process, there are {jax.process_count()}; start it on one host.')
  workdir = Path(workdir)
  setup, trainable = set_up(config)
  resolved = config_lib.to_json(config)
  state = setup.learner.init(trainable)
  with contextlib.ExitStack() as stack:
    store = stack.enter_context(checkpoint.CheckpointStore(
        workdir / run_lib.CHECKPOINTS, every_steps=config.checkpoint_every_steps, keep=config.checkpoints_kept))
    host = HostState(0, config.seed, resolved, monitor.code_revision(), setup.lineage)
    if store.latest_step() is not None:
      abstract = learner_lib.abstract_state(state)
      del state, trainable
      run_lib.refuse_other_run(checkpoint.read_host(store.directory), host, workdir, _FREE_ON_RESUME)
      state, restored = store.restore(abstract)
      host = dataclasses.replace(host, progress=restored.progress)
    first_step = int(host.progress.get('step', 0))
    ledger = Ledger(**host.progress.get('ledger', {}))
    curriculum = Curriculum(setup.domains, setup.domain_configs, config.curriculum, config.seed, host.progress.get('curriculum'))
    sampler = Sampler(config, setup, state.trainable, first_step, ledger, make_env)
    defaults = RLConfig(config.model, config.domains, config.num_steps, config.aggregation)
    monitor.write_config(workdir, resolved, config_lib.difference(config, defaults))
    board = stack.enter_context(monitor.Monitor(
        workdir, total_steps=config.num_steps, start_step=first_step, plain_every_steps=1,
        flops_per_token=transformer.num_flops_per_token(setup.model, config.length, 1.0 if config.lora.rank == 0 else 0.0)))
    log = stack.enter_context(monitor.TrajectoryLog(workdir, first_step))
    stopping = stack.enter_context(run_lib.stop_signal())
    _LOG.info('%s: %d parameters, %d trained; %s; step %d of %d.', setup.model.family, params_lib.count(state.trainable) +
              params_lib.count(setup.frozen), params_lib.count(state.trainable), ', '.join(config.domains), first_step, config.num_steps)
    return _Loop(config, setup, sampler, curriculum, ledger, board, log).run(state, host, store, first_step, stopping)


class _Loop:
  """The steps of a run."""

  def __init__(self, config: RLConfig, setup: Setup, sampler: Sampler, curriculum: Curriculum, ledger: Ledger, board: monitor.Monitor,
               log: monitor.TrajectoryLog):
    self._config, self._setup, self._sampler = config, setup, sampler
    self._curriculum, self._ledger, self._board, self._log = curriculum, ledger, board, log
    self._clock = Clock()
    self._num_skipped = 0
    self._pass_rate: float | None = None

  def run(self, state, host: HostState, store: checkpoint.CheckpointStore, first_step: int, stopping: Callable[[], bool]) -> dict[str, float]:
    config, results = self._config, {}
    if config.eval.every_steps and first_step == 0:
      results = self._evaluate(0)
    self._clock.take()
    for step in range(first_step + 1, config.num_steps + 1):
      state = self._step(step, state)
      stop = stopping()
      if config.eval.every_steps and (step % config.eval.every_steps == 0 or step == config.num_steps):
        results = self._evaluate(step)
      host = dataclasses.replace(host, progress={
          'step': step, 'ledger': self._ledger.to_json(), 'curriculum': self._curriculum.to_json(), 'in_flight': []})
      if step == config.num_steps or stop or store.is_due(step):
        with self._clock.phase('checkpoint'):
          store.save(step, state, host)
      if stop and step < config.num_steps:
        _LOG.warning('Stopped by a signal after step %d; run the same command again to go on.', step)
        break
    return results

  def _step(self, step: int, state) -> Any:
    config, sampler, ledger, clock = self._config, self._sampler, self._ledger, self._clock
    timing = sampler.worker.take_timing()
    collected = collect(config, self._curriculum, sampler.worker, ledger)
    timing = sampler.worker.take_timing()
    clock.phases_s.update({'decode': timing.decode_s, 'environment': timing.environment_s})
    ledger.check(queued=collected.num_queued, in_flight=sampler.worker.num_in_flight)
    groups = collected.groups
    rewards_QU, is_used_QU = rewards_of(config, groups)
    advantages_QU = advantages.group_relative(rewards_QU, is_used_QU, **vars(config.advantage))
    updated = {}
    if is_used_QU.any():
      state, updated = update(config, self._setup, state, groups, advantages_QU, is_used_QU, clock)
      self._watch(step, updated)
      with clock.phase('sync'):
        has_changed = bool(np.any(advantages_QU)) and not updated['train/skipped_steps']
        updated |= sampler.publish(state.trainable, step, has_changed=has_changed)
    ledger.trained += int(is_used_QU.sum())
    ledger.dropped['overlong'] += collected.num_queued - int(is_used_QU.sum())
    ledger.check(queued=0, in_flight=sampler.worker.num_in_flight)
    for group in (*groups, *(group for group, _ in collected.dropped)):
      valid = [trajectory.reward for trajectory in group.trajectories if trajectory.is_valid]
      if valid:
        self._curriculum.update(group.trajectories[0].domain, group.trajectories[0].level, valid)
    with clock.phase('log'):
      self._log.write(step, 'train', [(trajectory, float(advantages_QU[row, column]), '') for row, group in enumerate(groups)
                                      for column, trajectory in enumerate(group.trajectories)]
                      + [(trajectory, None, cause) for group, cause in collected.dropped for trajectory in group.trajectories])
    phases_s = clock.take()
    values = {**updated, **rollout_metrics(config, collected, rewards_QU, is_used_QU, advantages_QU), **self._curriculum.metrics(),
              'rollout/tokens_per_s': timing.num_tokens / max(timing.decode_s + timing.environment_s, 1e-9),
              **{f'timing_s/{name}': seconds for name, seconds in phases_s.items()},
              **{f'ledger/{name}': getattr(ledger, name) for name in ('issued', 'trained')},
              **{f'ledger/dropped/{cause}': count for cause, count in ledger.dropped.items()}}
    num_tokens = sum(len(trajectory.tokens_T) for group in groups for trajectory in group.trajectories)
    self._board.log_step(step, values, num_tokens, time.perf_counter(), self._notes(values, phases_s))
    return state

  def _notes(self, values: Mapping[str, float], phases_s: Mapping[str, float]) -> list[str]:
    total_s = max(phases_s['total'], 1e-9)
    shares = '  '.join(f'{name} {phases_s.get(name, 0) / total_s:.0%}' for name in ('decode', 'environment', 'score', 'train', 'sync', 'idle')
                       if phases_s.get(name, 0) / total_s >= 0.005)
    heldout = [] if self._pass_rate is None else [f'held-out {self._pass_rate:.1%}']
    return [f'reward {values["critic/score/mean"]:.3f}', *heldout, f'sampled {values["rollout/tokens_per_s"]:.0f} tok/s',
            f'{total_s:.1f} s: {shares}']

  def _watch(self, step: int, updated: Mapping[str, float]) -> None:
    self._num_skipped = self._num_skipped + 1 if updated['train/skipped_steps'] else 0
    if self._num_skipped >= run_lib.MAX_SKIPPED_IN_A_ROW:
      raise RuntimeError(f'{self._num_skipped} steps in a row up to step {step} had a gradient that is not finite and were skipped; lower '
                         f'optimizer.learning_rate={self._config.optimizer.learning_rate}.')

  def _evaluate(self, step: int) -> dict[str, float]:
    with self._clock.phase('evaluate'), self._board.paused():
      result = self._sampler.evaluate()
      self._pass_rate = result.pass_rate.value
      self._log.write(step, 'eval', [(trajectory, None, '') for trajectory in result.trajectories])
      values = result.metrics()
      self._board.write(step, values)
    _LOG.info('step %d: held-out pass@1 %s (%d of %d problems)', step, result.pass_rate, result.num_passed, result.num_graded)
    return values


def rollout_metrics(config: RLConfig, collected: Collected, rewards_QU: np.ndarray, is_used_QU: np.ndarray,
                    advantages_QU: np.ndarray) -> dict[str, float]:
  """Return what is to be known of a step's samples; 'all' are the valid ones, those of dropped groups too."""
  groups = [*collected.groups, *(group for group, _ in collected.dropped)]
  all_samples = [trajectory for group in groups for trajectory in group.trajectories]
  valid = [trajectory for trajectory in all_samples if trajectory.is_valid]
  values: dict[str, float] = {}

  def spread(name: str, numbers: Sequence[float]) -> None:
    if len(numbers):
      values.update({f'{name}/mean': float(np.mean(numbers)), f'{name}/min': float(np.min(numbers)), f'{name}/max': float(np.max(numbers))})

  spread('critic/score', [trajectory.reward for trajectory in valid])
  spread('critic/rewards', rewards_QU[is_used_QU])
  spread('critic/advantages', advantages_QU[is_used_QU])
  spread('response_length', [int(trajectory.loss_mask_T.sum()) for trajectory in valid])
  spread('prompt_length', [int(np.argmax(trajectory.loss_mask_T)) for trajectory in valid])
  spread('num_turns', [trajectory.num_turns for trajectory in valid])
  spread('tool_call_counts', [trajectory.num_tool_calls for trajectory in valid])
  num_calls = sum(trajectory.num_tool_calls for trajectory in valid)
  if num_calls:
    values['tool_error_rate'] = sum(trajectory.num_tool_errors for trajectory in valid) / num_calls
  for name, passed in (('correct', True), ('incorrect', False)):
    lengths = [int(trajectory.loss_mask_T.sum()) for trajectory in valid if (trajectory.reward == 1) == passed]
    if lengths:
      values[f'{name}_seq_len/mean'] = float(np.mean(lengths))
  of_groups = [[trajectory.reward for trajectory in group.trajectories if trajectory.is_valid] for group in groups]
  of_groups = [rewards for rewards in of_groups if rewards]
  values['frac_reward_zero_std'] = float(np.mean([len(set(rewards)) == 1 for rewards in of_groups])) if of_groups else 1.0
  values['solve_none'] = float(np.mean([max(rewards) == 0 for rewards in of_groups])) if of_groups else 0.0
  values['solve_all'] = float(np.mean([min(rewards) == 1 for rewards in of_groups])) if of_groups else 0.0
  outcomes = Counter(trajectory.outcome for trajectory in all_samples)
  values |= {f'env/outcome/{outcome}': outcomes[outcome] / len(all_samples) for outcome in Outcome}
  values['response_length/clip_ratio'] = outcomes[Outcome.LENGTH] / len(all_samples)
  for name in {trajectory.domain: None for trajectory in valid}:
    values[f'critic/score/{name}'] = float(np.mean([trajectory.reward for trajectory in valid if trajectory.domain == name]))
  return values
