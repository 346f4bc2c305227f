"""XLA's CPU flags: set in every process, and without them the canary fails."""

import os
import subprocess
import sys

import pytest

from models import startup


def run_python(code, **environment):
  # A worker starts from a clean environment, as a user's shell has it.
  clean = {key: value for key, value in os.environ.items() if key not in ('XLA_FLAGS', 'GLIBC_TUNABLES')}
  return subprocess.run([sys.executable, '-c', code], env={**clean, **environment}, capture_output=True, text=True, check=False)


def test_flags_are_set_in_this_process():
  assert f'{startup.MISCOMPILE_FLAG}=-reduce' in os.environ['XLA_FLAGS']
  assert '--xla_cpu_enable_concurrency_optimized_scheduler=false' in os.environ['XLA_FLAGS']
  assert startup.canary() < 1e-5


def test_canary_fails_without_the_flag():
  # The default's result depends on uninitialized memory, so a single process may be lucky; ten in a row are not.
  code = ('import importlib.util, sys\n'
          'spec = importlib.util.spec_from_file_location("startup", sys.argv[1] if len(sys.argv) > 1 else PATH)\n'
          'startup = importlib.util.module_from_spec(spec); spec.loader.exec_module(startup)\n'
          'print(max(startup.canary() for _ in range(3)))').replace('PATH', repr(startup.__file__))
  errors = []
  for _ in range(10):
    done = run_python(code, JAX_PLATFORMS='cpu', JAX_ENABLE_COMPILATION_CACHE='0')
    assert done.returncode == 0, done.stderr
    errors.append(float(done.stdout))
    if not errors[-1] < 1e-4:
      break
  assert not errors[-1] < 1e-4, f'the default no longer miscompiles ({errors}): the flag may be dropped for this jaxlib'


@pytest.mark.parametrize('package', ['models', 'rl', 'launch'])
def test_importing_a_package_sets_the_flag(package):
  done = run_python(f'import {package}, os; print(os.environ["XLA_FLAGS"])')
  assert f'{startup.MISCOMPILE_FLAG}=-reduce' in done.stdout, done.stderr


def test_jax_may_be_imported_first_but_not_used():
  assert run_python('import jax, models', JAX_PLATFORMS='cpu').returncode == 0
  done = run_python('import jax; jax.devices(); import models', JAX_PLATFORMS='cpu')
  assert done.returncode != 0
  assert 'A JAX backend was created before Bessemer could set' in done.stderr


def test_a_contradicting_flag_is_refused_and_other_flags_stay():
  done = run_python('import models', XLA_FLAGS=f'{startup.MISCOMPILE_FLAG}=dot')
  assert 'keeps a fusion that computes wrong numbers' in done.stderr
  done = run_python('import models, os; print(os.environ["XLA_FLAGS"])', XLA_FLAGS='--xla_cpu_enable_fast_math=false')
  assert done.stdout.startswith('--xla_cpu_enable_fast_math=false ')
  assert '-reduce' in done.stdout


def test_simulated_devices_get_threads_of_their_own_and_leave_the_environment():
  """A collective holds a thread until all devices have come."""
  done = run_python('import os, models\n'
                    'from models import startup\n'
                    'before = dict(os.environ)\n'
                    'startup.use_cpu_devices(3)\n'
                    'import jax\n'
                    'threads = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]\n'
                    'print(len(jax.devices()), threads.count("tf_XLAEigen"), dict(os.environ) == before)', JAX_PLATFORMS='cpu')
  assert done.stdout.split() == ['3', '24', 'True'], done.stderr
