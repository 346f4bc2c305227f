"""Environments, tools and verifiers in the Gymnasium interface. Pure Python and numpy: this package never imports JAX.

Importing it registers one Gymnasium id per domain, such as 'bessemer/arithmetic-integers-v1', without importing the domains; those that
read a data file take its path: `gymnasium.make('bessemer/programs-mbpp-v1', path='mbpp.jsonl')`.
"""

import gymnasium

from envs import registry

# As in each domain's `Domain.version`, which is not imported here; `checker.check` compares. One that is raised gets an entry of its own.
_VERSIONS = dict.fromkeys(registry.names(), 1) | {'arithmetic/python': 2}


def env_id(name: str) -> str:
  """Return the Gymnasium id of a domain; ValueError names the known ones."""
  if name not in _VERSIONS:
    raise ValueError(f'domain {name!r} is unknown; use one of {", ".join(_VERSIONS)}.')
  return f'bessemer/{name.replace("/", "-")}-v{_VERSIONS[name]}'


for _name in _VERSIONS:
  gymnasium.register(env_id(_name), entry_point='envs.tool_env:ToolEnv', kwargs={'domain': _name})
