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
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from envs.core import Domain
from envs.tool_env import ToolEnv
from models import chat, decode, sharding, transformer, weight_files
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
from rl import teacher as teacher_lib
from rl.batching import Place
from rl.curriculum import Curriculum, DomainConfig, heldout_problems, make_domains
from rl.evals import runner
from rl.learner import Learner
from rl.rl_config import RLConfig
from rl.rollout import collection
from rl.rollout.engine import Engine
from rl.rollout.ledger import Ledger
from rl.rollout.weights import Publisher
from rl.rollout.worker import Worker
from rl.types import Batch, Group, HostState, Params, Trajectory

_LOG = logging.getLogger(__name__)
_PROBE_TEXT = 'Ada had twelve apples and gave five of them to her friend. How many apples are left?'
_PHASES = ('decode', 'environment', 'score', 'train', 'sync', 'log', 'evaluate', 'checkpoint', 'idle')
_FREE_ON_RESUME = ('num_steps', 'checkpoint_every_steps', 'checkpoints_kept', 'eval.', 'cpu_devices', 'mesh.', 'layout.')


@dataclass(frozen=True)
class Setup:
  """What a run computes with, made once by `set_up`."""
  model: ModelConfig
  tokenizer: Tokenizer
  domains: dict[str, Domain]
  domain_configs: dict[str, DomainConfig]
  layout: Layout
  mesh: Mesh
  place: Place
  learner: Learner
  frozen: Params
  reference: Params | None
  lineage: dict[str, Any]
  teacher: Params | None = None


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
    SandboxUnavailable: a domain needs the sandbox and there is none.
  """
  domains, domain_configs = make_domains(config.domains)
  if config.eval.every_steps:
    heldout_problems(domains, domain_configs, 1)
  tokenizer = tokenizer_lib.load(config.model.path)
  mesh = sharding.make_mesh(**vars(config.mesh))
  source = weight_files.read_config(config.model.path)
  layout = run_lib.lay_out(config.layout, source, mesh)
  place = Place.of(layout, mesh)
  batching.host_rows(place, config.rows)
  teacher = teacher_lib.find(config.teacher, source, tokenizer, mesh, layout) if config.teacher.path else None
  model, trainable, frozen = run_lib.load_trainable(config.model, config.lora, config.seed, mesh, layout)
  is_full = config.lora.rank == 0
  learner = learner_lib.build(
      model, layout, mesh, optimizer.build(config.optimizer, config.num_updates),
      optimizer.schedule(config.optimizer, config.num_updates), full=is_full,
      loss=learner_lib.policy_loss(config.loss, teacher and teacher.model, config.teacher))
  reference = jax.tree.map(jnp.copy, trainable) if is_full and config.loss.kl_coef else None
  lineage = {'model': run_lib.model_fingerprint(config.model.path), 'tokenizer': tokenizer.fingerprint,
             'domains': {name: domain.version for name, domain in domains.items()}}
  if teacher is not None:
    lineage['teacher'] = teacher.fingerprint
  return Setup(model, tokenizer, domains, domain_configs, layout, mesh, place, learner, frozen, reference, lineage,
               teacher and teacher.load()), trainable


class Sampler:
  """The policy as a sampler: engine, workers for training and evaluation, and publishing."""

  def __init__(self, config: RLConfig, setup: Setup, trainable: Params, version: int, ledger: Ledger,
               make_env: Callable[[Domain], Any] | None = None):
    """Build the engine and publish `trainable` as `version`."""
    self._config, self._setup = config, setup
    rollout = config.rollout
    make_env = make_env or (lambda domain: ToolEnv(domain, describe_tools=rollout.describe_tools))
    layout = decode.rollout_layout(setup.layout, setup.mesh)
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


def make_batches(config: RLConfig, trajectories: Sequence[Trajectory], advantage_of: Sequence[float]) -> list[Batch]:
  """Return the micro-batches of one optimizer step, as numpy."""
  documents = batching.documents(trajectories, advantage_of)
  denominator = batching.step_denominator(documents, config.aggregation, max_length=config.rollout.max_new_tokens)
  if not (config.loss.kl_coef or config.loss.entropy_coef or config.teacher.path):
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
        frozen = setup.frozen if setup.teacher is None else {**setup.frozen, learner_lib.TEACHER: setup.teacher}
        state, metrics = learner.update(state, frozen, batches)
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
      del state, trainable  # Their memory is the restored state's.
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
          'step': step, 'ledger': self._ledger.to_json(), 'curriculum': self._curriculum.to_json()})
      if step == config.num_steps or stop or store.is_due(step):
        with self._clock.phase('checkpoint'):
          store.save(step, state, host)
      if stop and step < config.num_steps:
        _LOG.warning('Stopped by a signal after step %d; run the same command again to go on.', step)
        break
    return results

  def _step(self, step: int, state) -> Any:
    config, sampler, ledger, clock = self._config, self._sampler, self._ledger, self._clock
    sampler.worker.take_timing()  # Whatever came before is not this step's.
    collected = collection.collect(config, self._curriculum, sampler.worker, ledger)
    timing = sampler.worker.take_timing()
    clock.phases_s.update({'decode': timing.decode_s, 'environment': timing.environment_s})
    ledger.check(queued=collected.num_queued, in_flight=sampler.worker.num_in_flight)
    groups = collected.groups
    rewards_QU, is_used_QU = collection.rewards_of(config, groups)
    advantages_QU = advantages.group_relative(rewards_QU, is_used_QU, **vars(config.advantage))
    updated = {}
    if is_used_QU.any():
      state, updated = update(config, self._setup, state, groups, advantages_QU, is_used_QU, clock)
      self._watch(step, updated)
      with clock.phase('sync'):
        has_changed = bool(np.any(advantages_QU) or config.teacher.path) and not updated['train/skipped_steps']
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
    values = {**updated, **collection.summarize(collected, rewards_QU, is_used_QU, advantages_QU), **self._curriculum.metrics(),
              'rollout/tokens_per_s': timing.num_tokens / max(timing.decode_s + timing.environment_s, 1e-9),
              **{f'timing_s/{name}': seconds for name, seconds in phases_s.items()},
              **{f'ledger/{name}': getattr(ledger, name) for name in ('issued', 'trained')},
              **{f'ledger/dropped/{cause}': count for cause, count in ledger.dropped.items()}}
    num_tokens = sum(len(trajectory.tokens_T) for group in groups for trajectory in group.trajectories)
    self._board.log_step(step, values, num_tokens, time.perf_counter(), self._notes(values, phases_s))
    return state

  def _notes(self, values: Mapping[str, float], phases_s: Mapping[str, float]) -> list[str]:
    total_s = max(phases_s['total'], 1e-9)
    shares = '  '.join(f'{name} {phases_s.get(name, 0) / total_s:.0%}' for name in _PHASES if phases_s.get(name, 0) / total_s >= 0.005)
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
