"""A policy and the environments of a configuration, ready to be sampled from, for the programs that do so without training."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from jax.sharding import Mesh

from envs.core import Domain
from envs.tool_env import ToolEnv
from models import chat, decode, sharding, startup
from rl import policy as policy_lib
from rl.rl_config import RLConfig
from rl.rollout.engine import Engine
from rl.rollout.ledger import Ledger
from rl.rollout.worker import RolloutConfig, Worker


def open_worker(model: str, config: RLConfig, domains: Mapping[str, Domain], *, step: int | None, dtype: str, seed: int) -> Worker:
  """Start the devices and return a worker that samples `model` as training with `config` would; arguments as of `worker_on`."""
  startup.use_cpu_devices(config.cpu_devices)
  startup.check_backend()
  return worker_on(sharding.make_mesh(**vars(config.mesh)), model, config.rollout, domains, template=config.model.chat_template, step=step,
                   dtype=dtype, seed=seed)


def worker_on(mesh: Mesh, model: str, rollout: RolloutConfig, domains: Mapping[str, Domain], *, template: str | None, step: int | None,
              dtype: str, seed: int) -> Worker:
  """Load a model or a run and return a worker that samples it.

  Args:
    model: as `policy.load` takes it, with `step`; raises as that.
    domains: of the problems to come, by name.
    template: one of `chat.TEMPLATES`; None is the run's, or plain.
    dtype: of weights and computation.
    seed: root of the sampling.
  """
  layout = decode.rollout_layout(dataclasses.replace(sharding.TRAIN, compute_dtype=dtype), mesh)
  policy = policy_lib.load(model, mesh, sharding.TRAIN, dtype, step)
  engine = Engine(policy.params, policy.config, layout, mesh, num_slots=rollout.slots, max_length=rollout.max_length,
                  steps_per_launch=rollout.steps_per_launch, prefill_chunk=rollout.prefill_chunk)
  return Worker(engine, policy.tokenizer, chat.TEMPLATES[template or policy.chat_template], domains,
                lambda domain: ToolEnv(domain, describe_tools=rollout.describe_tools), rollout, seed=seed, ledger=Ledger())
