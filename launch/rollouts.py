"""A policy and the environments of a configuration, ready to be sampled from, for the programs that do so without training."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from envs.core import Domain
from envs.tool_env import ToolEnv
from models import chat, decode, sharding, startup
from rl import policy as policy_lib
from rl.rl_config import RLConfig
from rl.rollout.engine import Engine
from rl.rollout.ledger import Ledger
from rl.rollout.worker import Worker


def open_worker(model: str, config: RLConfig, domains: Mapping[str, Domain], *, step: int | None, dtype: str, seed: int) -> Worker:
  """Start the devices, load a model or a run, and return a worker that samples it as training would.

  Args:
    model: as `policy.load` takes it, with `step`.
    config: says how episodes are run; its own model is not looked at, but for the template.
    domains: of the problems to come, by name.
    dtype: of weights and computation.
    seed: root of the sampling.
  """
  startup.use_cpu_devices(config.cpu_devices)
  startup.check_backend()
  mesh = sharding.make_mesh(**vars(config.mesh))
  layout = decode.rollout_layout(dataclasses.replace(sharding.TRAIN, compute_dtype=dtype), mesh)
  policy = policy_lib.load(model, mesh, sharding.TRAIN, dtype, step)
  rollout = config.rollout
  engine = Engine(policy.params, policy.config, layout, mesh, num_slots=rollout.slots, max_length=rollout.max_length,
                  steps_per_launch=rollout.steps_per_launch, prefill_chunk=rollout.prefill_chunk)
  return Worker(engine, policy.tokenizer, chat.TEMPLATES[config.model.chat_template], domains,
                lambda domain: ToolEnv(domain, describe_tools=rollout.describe_tools), rollout, seed=seed, ledger=Ledger())
