"""Every registered domain keeps the contract of `envs.checker`, and is the same in every process."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

from envs import checker, registry
from envs.sandbox import client

ROOT = Path(__file__).resolve().parents[2]
GENERATED = [name for name in registry.names() if not registry.needs_path(name)]


@pytest.mark.parametrize('name', GENERATED)
def test_contract(name):
  domain = registry.make_domain(name)
  checker.check(domain, num_problems=6 if domain.needs_sandbox else 20)
  assert domain.name == name


def test_problems_do_not_depend_on_the_process():
  program = ("from envs import registry\n"
             f"for name in {GENERATED}:\n"
             "  domain = registry.make_domain(name)\n"
             "  for level in range(1, domain.source.num_levels + 1):\n"
             "    for split in ('train', 'heldout'):\n"
             "      print(domain.problem(split, level, 3))\n")
  outputs = [subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True,
                            env=os.environ | {'PYTHONHASHSEED': seed}).stdout for seed in ('0', '1')]
  assert outputs[0] == outputs[1]
  assert outputs[0].count('Problem(') >= 2 * len(GENERATED)


def test_the_sandbox_says_what_it_is():
  assert 'bwrap' in client.describe() or 'bubblewrap' in client.describe()
