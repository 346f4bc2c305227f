"""Shared test set-up: simulated devices and strict switches before the first JAX import."""

import gc
import os
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

from models import startup  # noqa: E402, I001  (sets XLA's flags; must precede jax)
import jax  # noqa: E402
import pytest  # noqa: E402

startup.use_cpu_devices(8)
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(autouse=True, scope='module')
def forget_programs():
  """Programs that were compiled are memory maps, of which a process may have 65,530; XLA does not survive more."""
  yield
  maps = Path('/proc/self/maps')
  if maps.exists() and len(maps.read_bytes().splitlines()) > 15_000:
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def num_compiled():
  """Return a function that says how many programs JAX has lowered since the test began."""
  lowered = []

  def listen(event, seconds, **_):
    if event == '/jax/core/compile/jaxpr_to_mlir_module_duration':
      lowered.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield lambda: len(lowered)
  jax.monitoring.unregister_event_duration_listener(listen)
