"""A policy that is sampled without training, as training would sample it; and its finished groups, which outlive a process that is killed.

A sample depends on its seed only. So each group that is finished is kept in a file beside the output to come, and the same command, after
whatever ended the last one, reads those groups and samples the others: the output is the same as if nothing had happened. Programs call
`forget` when their output is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from dataclasses import dataclass
import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from envs.core import Domain
from envs.tool_env import ToolEnv
from models import chat, decode, sharding, startup
from models.sampling import Sampling
from rl import config as config_lib
from rl import policy as policy_lib
from rl.rl_config import RLConfig
from rl.rollout import replay
from rl.rollout.collection import Collected
from rl.rollout.engine import Engine
from rl.rollout.ledger import Ledger
from rl.rollout.worker import Assignment, RolloutConfig, Worker
from rl.types import Group

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
  """All that decides what is sampled of a problem.

  Attributes:
    model: as `policy.load` takes it, with `step`.
    template: one of `chat.TEMPLATES`; None is the run's, or plain.
    dtype: of weights and computation.
    rollout: how episodes are run.
    domains: of the problems, by name.
    domain_settings: what the domains were made with, as JSON values.
    seed: root of the sampling.
    group_size: samples of a problem.
    temperature: of the sampling.
  """
  model: str
  step: int | None
  template: str | None
  dtype: str
  rollout: RolloutConfig
  domains: Mapping[str, Domain]
  domain_settings: Mapping[str, Any]
  seed: int
  group_size: int
  temperature: float

  def identity(self) -> dict[str, Any]:
    """Return what it is as JSON values: models by their content, domains by their versions."""
    # Domains with sessions have no verifier of their own.
    versions = {name: [domain.version, *([domain.verifier.id, domain.verifier.version] if domain.verifier else [])]
                for name, domain in self.domains.items()}
    plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in ('model', 'rollout', 'domains')}
    return json.loads(json.dumps({'model': policy_lib.fingerprint(self.model), **plain, 'rollout': config_lib.to_json(self.rollout),
                                  'versions': versions}))


class Sampler:
  """Samples problems. The model is loaded when the first one is not there yet."""

  def __init__(self, source: Source, make_mesh: Callable[[], Mesh], output: Path | None):
    """Take what to sample, the devices, and the output beside which finished groups are kept; None keeps nothing.

    Raises:
      FileNotFoundError, ValueError: what is wrong with the model's path; other samples are kept there, or the file is damaged.
    """
    policy_lib.read_config(source.model, source.step)
    self._source, self._make_mesh = source, make_mesh
    self._kept = None if output is None else KeptGroups(_beside(output), source.identity())

  def collect(self, assignments: Sequence[Assignment]) -> Iterator[Group]:
    """Yield the group of each problem, in any order: those that are kept, and the others as they finish.

    A group is kept if all its samples are valid; what failed for no fault of the policy is tried again by the process that goes on.

    Raises:
      ValueError, FileNotFoundError: what `policy.load` and `Worker.collect` refuse.
      RuntimeError: the model's logits are not finite.
    """
    missing = {one.ordinal: one for one in assignments if self._kept is None or one not in self._kept}
    if len(missing) < len(assignments):
      _LOG.info('%d of %d groups are there from before, in %s.', len(assignments) - len(missing), len(assignments), self._kept.path)
    yield from (self._kept.read(one) for one in assignments if one.ordinal not in missing)
    if not missing:
      return
    source = self._source
    for group in self._worker.collect(list(missing.values()), source.group_size, Sampling(temperature=source.temperature)):
      if self._kept is not None and len(group.trajectories) == source.group_size and all(one.is_valid for one in group.trajectories):
        self._kept.add(missing[group.trajectories[0].group], group)
      yield group

  @functools.cached_property
  def _worker(self) -> Worker:
    source, mesh = self._source, self._make_mesh()
    layout = decode.rollout_layout(dataclasses.replace(sharding.TRAIN, compute_dtype=source.dtype), mesh)
    policy = policy_lib.load(source.model, mesh, sharding.TRAIN, source.dtype, source.step)
    rollout = source.rollout
    engine = Engine(policy.params, policy.config, layout, mesh, num_slots=rollout.slots, max_length=rollout.max_length,
                    steps_per_launch=rollout.steps_per_launch, prefill_chunk=rollout.prefill_chunk)
    return Worker(engine, policy.tokenizer, chat.TEMPLATES[source.template or policy.chat_template], source.domains,
                  lambda domain: ToolEnv(domain, describe_tools=rollout.describe_tools), rollout, seed=source.seed, ledger=Ledger())


def open_sampler(config: RLConfig, domains: Mapping[str, Domain], *, step: int | None, dtype: str, seed: int, group_size: int,
                 temperature: float, output: Path | None) -> Sampler:
  """Return a sampler of `config.model.path`, a model or a run, on the devices of `config`; other arguments as of `Source` and `Sampler`."""
  source = Source(config.model.path, step, config.model.chat_template, dtype, config.rollout, domains, config_lib.to_json(config.domains), seed,
                  group_size, temperature)

  def make_mesh():
    startup.use_cpu_devices(config.cpu_devices)
    startup.check_backend()
    return sharding.make_mesh(**vars(config.mesh))

  return Sampler(source, make_mesh, output)


def forget(output: Path) -> None:
  """Remove the groups that are kept beside an output, which is whole."""
  _beside(output).unlink(missing_ok=True)


def _beside(output: Path) -> Path:
  return output.with_name(f'{output.name}.samples')


class KeptGroups:
  """Groups in a file: its first line says what they were sampled from, each other line is a group, on the disk when `add` returns.

  Attributes:
    path: of the file; it is made with the first group.
  """

  def __init__(self, path: Path, identity: Mapping[str, Any]):
    """Read what is there; a last line that a kill cut off is removed.

    Args:
      path: of the file.
      identity: JSON values of all that decides the groups, besides the problems.

    Raises:
      ValueError: it holds samples of something else, or lines that are not its own.
    """
    self.path, self._identity = path, identity
    self._texts: dict[str, str] = {}
    *lines, torn = path.read_bytes().split(b'\n') if path.exists() else [b'']
    try:
      records = [json.loads(line) for line in lines]
      stored = records[0]['sampled_from'] if records else identity
      self._texts = {record['problem']: record['group'] for record in records[1:]}
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f'{path} is not what a sampling program keeps ({error!r}); delete it to sample anew.') from error
    if changed := config_lib.difference(identity, stored):
      shown = '; '.join(f'{key}: {old!r} there, {new!r} now' for key, (old, new) in list(changed.items())[:5])
      raise ValueError(f'{path} holds samples that were made otherwise: {shown}. Go on with the settings of then, use another --output, or '
                       'delete it to sample anew.')
    if torn:
      os.truncate(path, path.stat().st_size - len(torn))

  def __contains__(self, assignment: Assignment) -> bool:
    return _key(assignment) in self._texts

  def read(self, assignment: Assignment) -> Group:
    """Return the group of a problem that is there; KeyError if it is not."""
    return replay.decode(self._texts[_key(assignment)]).groups[0]

  def add(self, assignment: Assignment, group: Group) -> None:
    """Append a problem's group, for the next process."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with self.path.open('a', encoding='utf-8') as file:
      if not file.tell():
        file.write(json.dumps({'sampled_from': self._identity}) + '\n')
      file.write(json.dumps({'problem': _key(assignment), 'group': replay.encode(Collected((group,), ()))}) + '\n')
      file.flush()
      os.fsync(file.fileno())


def _key(assignment: Assignment) -> str:
  """Return a digest of a problem and of its place in the run, which is part of the samples' seeds."""
  problem = assignment.problem
  text = json.dumps([assignment.ordinal, problem.id, [dict(message) for message in problem.messages], problem.answer])
  return hashlib.sha256(text.encode()).hexdigest()
