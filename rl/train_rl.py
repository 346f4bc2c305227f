"""The online loop: reinforcement learning with verifiable rewards, sampler and trainer on the same devices in turns.

One step is: draw problems, sample a group of replies to each (`rollout.worker`), say what they earn (`rewards`, with a `proxy_reward` if there
are reward models) and what that means for their tokens (`estimation`, with a `critic` if there is one), update (`policy_update`), publish the
new weights to the sampler (`rollout.weights`); then evaluation and checkpoint on their schedules. GRPO and its variants, REINFORCE++ and PPO are
settings of these parts (`configs/grpo.py`, `configs/ppo.py`), with verifiers or with reward models (RLHF); where there are both, `drift` watches
whether they part. Under rollout.staleness batches wait in a queue between sampling and the rest (`rollout.replay`).

Every sample depends on its seeds alone, and what a step trains on depends on the samples and not on when they finished; so a killed run
continues from its checkpoint as if nothing had happened, bit for bit. (Only failures of the infrastructure that outlast all attempts, and
deadlines, change what is trained on.)

Deliberately absent: sampling on other devices while training.
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
from models import chat, decode, transformer
from models import params as params_lib
from models.config import ModelConfig
from models.sampling import Sampling
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import batching, checkpoint, drift, estimation, monitor, objective, optimizer, proxy_reward
from rl import config as config_lib
from rl import critic as critic_lib
from rl import learner as learner_lib
from rl import rewards as rewards_lib
from rl import run as run_lib
from rl import teacher as teacher_lib
from rl.batching import Place
from rl.critic import Critic
from rl.curriculum import Curriculum, DomainConfig, heldout_problems, make_domains
from rl.estimation import Estimate
from rl.evals import runner
from rl.learner import Learner
from rl.policy_update import Updater
from rl.proxy_reward import ProxyReward
from rl.rewards import Rewards
from rl.rl_config import RLConfig
from rl.rollout import collection
from rl.rollout.engine import Engine
from rl.rollout.ledger import Ledger
from rl.rollout.replay import ReplayQueue
from rl.rollout.weights import Publisher
from rl.rollout.worker import Timing, Worker
from rl.types import ActorCriticState, Document, Group, HostState, Params, TrainState

_LOG = logging.getLogger(__name__)
SNAPSHOTS = 'snapshots'
_PROBE_TEXT = 'Ada had twelve apples and gave five of them to her friend. How many apples are left?'
_PHASES = ('decode', 'environment', 'score', 'train', 'sync', 'log', 'evaluate', 'checkpoint', 'idle')
_FREE_ON_RESUME = ('num_steps', 'checkpoint_every_steps', 'checkpoints_kept', 'eval.', 'drift.', 'cpu_devices', 'mesh.', 'layout.')


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
  critic: Critic | None
  proxy: ProxyReward | None
  updater: Updater
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
    ValueError, FileNotFoundError: what is wrong with the domains, the mesh, the layout, the model or the reward models.
    SandboxUnavailable: a domain needs the sandbox and there is none.
  """
  domains, domain_configs = make_domains(config.domains)
  if config.eval.every_steps:
    heldout_problems(domains, domain_configs, 1)
  tokenizer, source, mesh, layout, place = run_lib.open_model(config, config.rows)
  teacher = teacher_lib.find(config.teacher, source, tokenizer, mesh, layout) if config.teacher.path else None
  model, trainable, frozen = run_lib.load_trainable(config.model, config.lora, config.seed, mesh, layout)
  is_full = config.lora.rank == 0
  learner = learner_lib.build(
      model, layout, mesh, optimizer.build(config.optimizer, config.num_updates),
      optimizer.schedule(config.optimizer, config.num_updates), full=is_full,
      loss=learner_lib.policy_loss(config.loss, teacher and teacher.model, config.teacher))
  critic = None
  if config.has_critic:
    critic = critic_lib.build(config.critic, model, layout, mesh, frozen, full=is_full,
                              num_updates=config.num_steps * config.minibatches * config.epochs)
  needs_reference = config.loss.kl_coef or config.reward_kl.coef
  reference = jax.tree.map(jnp.copy, trainable) if is_full and needs_reference else None
  updater = Updater(config, learner, frozen, reference, critic, teacher and teacher.load(), place)
  lineage = {'model': run_lib.model_fingerprint(config.model.path), 'tokenizer': tokenizer.fingerprint,
             'domains': {name: domain.version for name, domain in domains.items()}}
  if teacher is not None:
    lineage['teacher'] = teacher.fingerprint
  proxy = None
  if config.reward_model.paths:
    proxy = ProxyReward.load(config.reward_model, mesh, layout, config.layout.compute_dtype)
    lineage['reward_models'] = proxy_reward.fingerprints(config.reward_model)
  return Setup(model, tokenizer, domains, domain_configs, layout, mesh, place, learner, frozen, critic, proxy, updater, lineage), trainable


def initial_state(setup: Setup, trainable: Params) -> TrainState:
  """Return the state at step 0, with the critic's where there is one; donates `trainable`."""
  of_critic = setup.critic.init(trainable) if setup.critic else None
  state = setup.learner.init(trainable)
  return ActorCriticState(**vars(state), critic=of_critic) if setup.critic else state


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


def run(config: RLConfig, workdir: str | Path, make_env: Callable[[Domain], Any] | None = None) -> dict[str, float]:
  """Train to `num_steps`, from the newest checkpoint in `workdir` if there is one; return the last evaluation (or {}).

  Args:
    make_env: makes the environments from their domain; by default they are `ToolEnv`s.

  Raises:
    ValueError, FileNotFoundError: bad configuration, data or model; a checkpoint of another run.
    RuntimeError: files that cannot be written, environments that fail throughout, weights that do not reach the sampler, or
      `run.MAX_SKIPPED_IN_A_ROW` updates without a finite gradient.
  """
  if jax.process_count() > 1:
    raise ValueError(f'rl.train_rl runs in one process, and there are {jax.process_count()}; start it on one host, without '
                     'JAX_COORDINATOR_ADDRESS.')
  workdir = Path(workdir)
  setup, trainable = set_up(config)
  resolved = config_lib.to_json(config)
  with contextlib.ExitStack() as stack:
    store = stack.enter_context(checkpoint.CheckpointStore(
        workdir / run_lib.CHECKPOINTS, every_steps=config.checkpoint_every_steps, keep=config.checkpoints_kept))
    state, host = run_lib.begin(store, lambda: initial_state(setup, trainable),
                                HostState(0, config.seed, resolved, monitor.code_revision(), setup.lineage), workdir, _FREE_ON_RESUME)
    first_step = int(host.progress.get('step', 0))
    ledger = Ledger(**host.progress.get('ledger', {}))
    curriculum = Curriculum(setup.domains, setup.domain_configs, config.curriculum, config.seed, host.progress.get('curriculum'))
    sampler = Sampler(config, setup, state.trainable, first_step, ledger, make_env)
    queue = ReplayQueue(host.progress.get('queue', ()))
    watcher = drift.Monitor(config.drift, host.progress.get('drift')) if setup.proxy else None
    defaults = RLConfig(config.model, config.domains, config.num_steps, config.aggregation)
    monitor.write_config(workdir, resolved, config_lib.difference(config, defaults))
    formula = objective.describe(config)
    monitor.write_objective(workdir, formula)
    _LOG.info('The objective:\n%s', formula)
    board = stack.enter_context(monitor.Monitor(
        workdir, total_steps=config.num_steps, start_step=first_step, plain_every_steps=1,
        flops_per_token=transformer.num_flops_per_token(setup.model, config.length, 1.0 if config.lora.rank == 0 else 0.0)))
    log = stack.enter_context(monitor.TrajectoryLog(workdir, first_step))
    stopping = stack.enter_context(run_lib.stop_signal())
    _LOG.info('%s: %d parameters, %d trained; %s; step %d of %d.', setup.model.family, params_lib.count(state.trainable) +
              params_lib.count(setup.frozen), params_lib.count(state.trainable), ', '.join(config.domains), first_step, config.num_steps)
    kl_coef = float(host.progress.get('kl_coef', config.reward_kl.coef))
    loop = _Loop(config, setup, sampler, curriculum, ledger, queue, board, log, watcher, kl_coef)
    return loop.run(state, host, store, first_step, stopping)


class _Loop:
  """The steps of a run."""

  def __init__(self, config: RLConfig, setup: Setup, sampler: Sampler, curriculum: Curriculum, ledger: Ledger, queue: ReplayQueue,
               board: monitor.Monitor, log: monitor.TrajectoryLog, watcher: drift.Monitor | None, kl_coef: float):
    self._config, self._setup, self._sampler = config, setup, sampler
    self._curriculum, self._ledger, self._queue, self._board, self._log = curriculum, ledger, queue, board, log
    self._watcher, self._kl_coef = watcher, kl_coef
    self._clock = Clock()
    self._num_skipped = 0
    self._pass_rate: float | None = None
    self._alarm: drift.Alarm | None = None

  def run(self, state, host: HostState, store: checkpoint.CheckpointStore, first_step: int, stopping: Callable[[], bool]) -> dict[str, float]:
    config, results = self._config, {}
    if config.eval.every_steps and first_step == 0:
      results = self._evaluate(0)
    self._clock.take()
    for step in range(first_step + 1, config.num_steps + 1):
      state = self._step(step, state)
      action = self._alarm.action if self._alarm else ''
      stop = stopping() or action == 'stop'
      if config.eval.every_steps and (step % config.eval.every_steps == 0 or step == config.num_steps):
        results = self._evaluate(step)
      is_saved = step == config.num_steps or stop or store.is_due(step)
      if is_saved or action == 'snapshot':
        with self._clock.phase('checkpoint'):
          host = dataclasses.replace(host, progress=self._progress(step))
          if is_saved:
            store.save(step, state, host)
          if action == 'snapshot':
            _snapshot(store, step, state, host)
      if stop and step < config.num_steps:
        _LOG.warning('Stopped by %s after step %d; run the same command again to go on.', 'an alarm' if action == 'stop' else 'a signal', step)
        break
    return results

  def _progress(self, step: int) -> dict[str, Any]:
    """Return what resuming after `step` needs besides arrays; packing the queue takes time, so only for a checkpoint."""
    return {'step': step, 'ledger': self._ledger.to_json(), 'curriculum': self._curriculum.to_json(), 'queue': self._queue.to_json(),
            'kl_coef': self._kl_coef, **({'drift': self._watcher.to_json()} if self._watcher else {})}

  def _step(self, step: int, state) -> Any:
    config, ledger, clock = self._config, self._ledger, self._clock
    collected, timing = self._collect()
    groups = collected.groups
    values = collection.summarize(collected, self._sampler.engine.version)
    with clock.phase('score'):
      rewards = rewards_lib.pay(config, groups, self._setup.proxy)
      estimates, estimated = self._estimate(state, groups, rewards)
    values |= estimated | self._observe(step, rewards)
    state, updated = self._update(step, state, groups, rewards, estimates)
    ledger.trained += len(estimates)
    ledger.dropped.update(rewards.dropped)
    ledger.check(queued=self._queue.num_samples, in_flight=self._sampler.worker.num_in_flight)
    with clock.phase('log'):
      self._write(step, collected, rewards, estimates)
    phases_s = clock.take()
    values |= {**updated, **self._curriculum.metrics(),
               'rollout/tokens_per_s': timing.num_tokens / max(timing.decode_s + timing.environment_s, 1e-9),
               **{f'timing_s/{name}': seconds for name, seconds in phases_s.items()},
               **{f'ledger/{name}': getattr(ledger, name) for name in ('issued', 'trained')}, 'ledger/queued': self._queue.num_samples,
               **{f'ledger/dropped/{cause}': count for cause, count in ledger.dropped.items()}}
    num_tokens = sum(len(trajectory.tokens_T) for group in groups for trajectory in group.trajectories)
    self._board.log_step(step, values, num_tokens, time.perf_counter(), self._notes(values, phases_s))
    return state

  def _collect(self) -> tuple[collection.Collected, Timing]:
    """Sample until more than `staleness` batches wait; return the oldest of them, and what sampling took."""
    worker = self._sampler.worker
    worker.take_timing()  # Whatever came before is not this step's.
    while len(self._queue) <= self._config.rollout.staleness:
      collected = collection.collect(self._config, self._curriculum, worker, self._ledger)
      self._queue.put(collected)
      for group in (*collected.groups, *(group for group, _ in collected.dropped)):
        valid = [trajectory.reward for trajectory in group.trajectories if trajectory.is_valid]
        if valid:
          self._curriculum.update(group.trajectories[0].domain, group.trajectories[0].level, valid)
    timing = worker.take_timing()
    self._clock.phases_s.update({'decode': timing.decode_s, 'environment': timing.environment_s})
    self._ledger.check(queued=self._queue.num_samples, in_flight=worker.num_in_flight)
    return self._queue.take(), timing

  def _estimate(self, state, groups: Sequence[Group], rewards: Rewards) -> tuple[list[Estimate], dict[str, float]]:
    """Return an estimate of each used sample, and what is to be known of them; adapts the coefficient of the KL term."""
    config, setup = self._config, self._setup
    trajectories = estimation.used(groups, rewards)
    if not trajectories:
      return [], {}
    where = (setup.place, config.rows, config.length)
    needs_scores = config.reward_kl.coef or setup.critic
    documents = batching.documents(trajectories, [0.0] * len(trajectories)) if needs_scores else []
    differences = expectations = None
    paid, values = rewards.paid_QU[rewards.is_used_QU], {}
    if config.reward_kl.coef:
      logprobs = batching.at_places(documents, setup.updater.reference_logprobs, *where)
      differences = estimation.differences(trajectories, logprobs)
      kl_N = estimation.sample_kl(trajectories, differences)
      paid = paid - self._kl_coef * kl_N
      values = {'objective/kl': float(kl_N.mean()), 'objective/kl_coef': self._kl_coef,
                'objective/non_score_reward': -self._kl_coef * float(kl_N.mean())}
    if setup.critic:
      expectations = setup.critic.expect(state.critic.trainable, documents, *where)
    estimates = estimation.estimate(config, groups, rewards, kl_coef=self._kl_coef, differences=differences, expectations=expectations)
    if config.reward_kl.coef:
      self._kl_coef = estimation.next_coef(config.reward_kl, self._kl_coef, values['objective/kl'])
    return estimates, values | collection.spread('critic/rewards', paid) | estimation.summarize(trajectories, estimates)

  def _observe(self, step: int, rewards: Rewards) -> dict[str, float]:
    """Show the monitor of drift what reward models and verifiers say of the same samples; return metrics of the models and of the monitor."""
    self._alarm = None
    if self._watcher is None:
      return {}
    used_QU = rewards.is_used_QU
    self._alarm = self._watcher.observe(step, rewards.source_QU[used_QU], rewards.gold_QU[used_QU], np.nonzero(used_QU)[0])
    if self._alarm:
      _LOG.warning('step %d: %s', step, self._alarm.reason)
    return {**rewards.metrics, **self._watcher.metrics()}

  def _update(self, step: int, state, groups: Sequence[Group], rewards: Rewards, estimates: Sequence[Estimate]) -> tuple[Any, dict]:
    """Take the optimizer steps of a batch, if it has any sample, and publish; returns (state, metrics)."""
    config, updater, clock = self._config, self._setup.updater, self._clock
    updated: dict[str, float] = {'train/empty_batches': float(not estimates)}
    only_critic = config.has_critic and step <= config.critic.warmup_steps
    has_changed = False
    if estimates:
      with clock.phase('score'):
        prepared = updater.prepare(state, self._shares(groups, rewards, estimates))
        jax.block_until_ready(prepared)
      with clock.phase('train'):
        state, metrics = updater.apply(state, prepared, only_critic=only_critic)
        jax.block_until_ready(state)
      updated |= metrics
      self._watch(step, updated)
      is_taught = bool(config.teacher.path) or any(one.advantages_T.any() for one in estimates)
      has_changed = is_taught and not only_critic and not updated['train/skipped_steps']
    with clock.phase('sync'):
      updated |= self._sampler.publish(state.trainable, step, has_changed=has_changed)
    return state, updated

  def _shares(self, groups: Sequence[Group], rewards: Rewards, estimates: Sequence[Estimate]) -> list[list[Document]]:
    """Return the documents of each optimizer step of a pass, each with its own share of the groups."""
    documents = batching.documents(estimation.used(groups, rewards), [one.advantages_T for one in estimates],
                                   [one.others for one in estimates])
    rows = np.nonzero(rewards.is_used_QU)[0]
    shares = np.array_split(np.arange(len(groups)), min(self._config.minibatches, len(groups)))
    found = [[document for document, row in zip(documents, rows, strict=True) if row in share] for share in shares]
    return [share for share in found if share]

  def _write(self, step: int, collected: collection.Collected, rewards: Rewards, estimates: Sequence[Estimate]) -> None:
    advantages_QU = np.zeros(rewards.is_used_QU.shape)
    advantages_QU[rewards.is_used_QU] = [
        one.advantages_T[trajectory.loss_mask_T].mean(dtype=np.float64)
        for one, trajectory in zip(estimates, estimation.used(collected.groups, rewards), strict=True)]
    self._log.write(step, 'train', [(trajectory, float(advantages_QU[row, column]), '') for row, group in enumerate(collected.groups)
                                    for column, trajectory in enumerate(group.trajectories)]
                    + [(trajectory, None, cause) for group, cause in collected.dropped for trajectory in group.trajectories])

  def _notes(self, values: Mapping[str, float], phases_s: Mapping[str, float]) -> list[str]:
    total_s = max(phases_s['total'], 1e-9)
    shares = '  '.join(f'{name} {phases_s.get(name, 0) / total_s:.0%}' for name in _PHASES if phases_s.get(name, 0) / total_s >= 0.005)
    heldout = [] if self._pass_rate is None else [f'held-out {self._pass_rate:.1%}']
    return [f'reward {values["critic/score/mean"]:.3f}', *heldout, f'sampled {values["rollout/tokens_per_s"]:.0f} tok/s',
            f'{total_s:.1f} s: {shares}']

  def _watch(self, step: int, updated: Mapping[str, float]) -> None:
    is_skipped = any(updated.get(f'{part}/skipped_steps', 0) for part in ('train', 'critic'))
    self._num_skipped = self._num_skipped + 1 if is_skipped else 0
    if self._num_skipped >= run_lib.MAX_SKIPPED_IN_A_ROW:
      raise RuntimeError(f'{self._num_skipped} steps in a row up to step {step} had a gradient that is not finite and were skipped; lower '
                         f'optimizer.learning_rate={self._config.optimizer.learning_rate} or that of the critic.')

  def _evaluate(self, step: int) -> dict[str, float]:
    with self._clock.phase('evaluate'), self._board.paused():
      result = self._sampler.evaluate()
      self._pass_rate = result.pass_rate.value
      self._log.write(step, 'eval', [(trajectory, None, '') for trajectory in result.trajectories])
      values = result.metrics()
      self._board.write(step, values)
    _LOG.info('step %d: held-out pass@1 %s (%d of %d problems)', step, result.pass_rate, result.num_passed, result.num_graded)
    return values


def _snapshot(store: checkpoint.CheckpointStore, step: int, state, host: HostState) -> None:
  """Keep a checkpoint of this step that newer ones do not replace."""
  with checkpoint.CheckpointStore(store.directory.parent / SNAPSHOTS, every_steps=1, keep=1_000_000) as kept:
    if kept.latest_step() is None or kept.latest_step() < step:  # A run that was killed comes by here again.
      kept.save(step, state, host)
