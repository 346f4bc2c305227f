r"""Write preference pairs from a policy's own samples: a verified right reply against a wrong one to the same problem.

    python -m launch.prepare_pairs --model=runs/sft --config=configs/grpo.py --problems=512 --samples=8 --output=pairs.jsonl \
        --config.domains="{'word_problems/generated': {'levels': (1, 2)}}"

The policy is sampled as in reinforcement learning with the same configuration (`rollout`, templates, tools, verifiers). Its `overlong` says
whether samples that the length limit cut off count ('mask' leaves them out). Beside x.jsonl lies x.report.json: how many problems gave a
pair, and why others did not. The same command gives the same file, and goes on where one that was killed left off.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
import re
import time

from absl import flags
from ml_collections import config_flags

import launch
from launch import rollouts
from rl import config as config_lib
from rl import lineage, pairs, rl_config
from rl.curriculum import make_domains, problems_in_turn
from rl.rollout.worker import Assignment
from rl.types import Trajectory

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Configuration of reinforcement learning: domains, rollout, template.')
_MODEL = flags.DEFINE_string('model', None, 'Hugging Face directory, .gguf file or run directory.')
_STEP = flags.DEFINE_integer('step', None, 'Checkpoint of a run; default the newest.')
_PROBLEMS = flags.DEFINE_integer('problems', 512, 'Training problems to sample, over domains and levels in turn.', lower_bound=1)
_SAMPLES = flags.DEFINE_integer('samples', 8, 'Samples of a problem.', lower_bound=2)
_FIRST = flags.DEFINE_integer('first_index', 100_000, 'Where generated problems start: beyond those that the policy saw demonstrated.',
                              lower_bound=0)
_PER_PROBLEM = flags.DEFINE_integer('pairs_per_problem', 2, 'Most pairs of a problem.', lower_bound=1)
_MIN_PAIRS = flags.DEFINE_integer('min_pairs', 1, 'Fewer pairs are filled up with demonstrations against wrong samples; 0 never.',
                                  lower_bound=0)
_TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Of the sampling.', lower_bound=0)
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Of weights and computation.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to write.')


def find() -> pairs.Pairs:
  """Sample the problems that the flags ask for, and return their pairs.

  Raises:
    ValueError: bad settings, or no pair at all.
  """
  settings = _CONFIG.value.copy_and_resolve_references()
  settings.model.path = _MODEL.value
  config = config_lib.build(rl_config.RLConfig, settings)
  domains, domain_configs = make_domains(config.domains)
  problems = problems_in_turn(domains, domain_configs, 'train', _PROBLEMS.value, _FIRST.value)
  sampler = rollouts.open_sampler(config, domains, step=_STEP.value, dtype=_DTYPE.value, seed=config.seed + 2**30, group_size=_SAMPLES.value,
                                  temperature=_TEMPERATURE.value, output=Path(_OUTPUT.value))

  def demonstrate(sample: Trajectory):
    split, level, index = re.fullmatch(r'.*/(\w+)/(\d+)/(\d+)', sample.problem_id).groups()
    return domains[sample.domain].demonstration(split, int(level), int(index))

  groups = sampler.collect([Assignment(number, problem) for number, problem in enumerate(problems)])
  found = pairs.find_pairs(groups, most=_PER_PROBLEM.value, least=_MIN_PAIRS.value, uses_cut_off=config.overlong != 'mask',
                           demonstrate=demonstrate)
  if not found.rows:
    raise ValueError(f'No pair from {len(problems)} problems: {found.report()}. Choose levels that the policy solves sometimes, more samples, '
                     'or --min_pairs above 0.')
  return found


def main(_: list[str]) -> None:
  start = time.perf_counter()
  found = find()
  path = Path(_OUTPUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  lineage.write_json(path.with_suffix('.report.json'), found.report())
  partial = path.with_name(f'.{path.name}.partial')
  partial.write_text(''.join(json.dumps(row) + '\n' for row in found.rows), encoding='utf-8')
  os.replace(partial, path)
  rollouts.forget(path)
  logging.getLogger('launch.prepare_pairs').info('%s: %s; %.0f s.', path, found.report(), time.perf_counter() - start)


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'model', 'output'])
  launch.run(main)
