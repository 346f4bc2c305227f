"""Set what must be set before JAX creates its first backend; importing any Bessemer package that uses JAX runs it.

XLA's CPU backend is wrong by default: the YNNPACK reduce fusion miscompiles `reduce(dot(E, broadcast(c)) * E)`, which reverse mode produces
for ordinary code (jaxlib 0.10.2 to 0.12.0.1; results off by 1e25 and different from run to run). Removing that fusion restores the right
numbers and costs no speed. `canary` computes the pattern, so a program can refuse to start on a backend that still gets it wrong.

Deliberately absent: memory settings that only the process's parent can make (`launch` makes them), and `jax.distributed` (`launch` again).
"""

import contextlib
import os
from pathlib import Path
import sys

MISCOMPILE_FLAG = '--xla_cpu_experimental_ynn_fusion_type'
CPU_FLAGS = {
    MISCOMPILE_FLAG: '-reduce',
    # Simulated devices share the cores, so a collective can wait minutes for its slowest participant without being stuck.
    '--xla_cpu_collective_call_warn_stuck_timeout_seconds': '300',
    '--xla_cpu_collective_call_terminate_timeout_seconds': '1200',
    # Operations run in the order of least memory. XLA's default runs all that are ready, so what backward needs without waiting (zeros to add
    # to, activations computed again) is made for every layer in advance: 0.6 of 2.2 GB of a LoRA step. Steps of models of hundreds of millions
    # of parameters are no faster for it, an update of one of four million is by 8 %.
    '--xla_cpu_enable_concurrency_optimized_scheduler': 'false',
}
_THREADS_PER_DEVICE = 8


def _flags_in(text: str) -> dict[str, str]:
  return dict(flag.split('=', 1) if '=' in flag else (flag, '') for flag in text.split())


def prepare() -> None:
  """Set XLA's CPU flags and the persistent compilation cache in this process's environment.

  A value the user chose stays, except for the miscompiled fusion.

  Raises:
    RuntimeError: a JAX backend already runs without the flag, or the user's XLA_FLAGS ask for the miscompiled fusion.
  """
  present = _flags_in(os.environ.get('XLA_FLAGS', ''))
  chosen = present.get(MISCOMPILE_FLAG)
  if chosen is not None and '-reduce' not in chosen.split(','):
    raise RuntimeError(
        f'XLA_FLAGS sets {MISCOMPILE_FLAG}={chosen}, which keeps a fusion that computes wrong numbers on CPU; '
        f'drop it or use {MISCOMPILE_FLAG}=-reduce.')
  if chosen is None and _backend_runs():
    raise RuntimeError(
        f'A JAX backend was created before Bessemer could set {MISCOMPILE_FLAG}=-reduce, so CPU results would be wrong; '
        'import models, rl or launch before the first JAX computation, or set XLA_FLAGS in the environment.')
  missing = [f'{name}={value}' for name, value in CPU_FLAGS.items() if name not in present]
  os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *missing]).strip()
  cache = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(Path(cache) / 'bessemer' / 'jax'))
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')


def _backend_runs() -> bool:
  # XLA reads its flags once, when the first backend is created; jax has no public name for "has that happened".
  bridge = sys.modules.get('jax._src.xla_bridge')
  return bridge is not None and bridge.backends_are_initialized()


def use_cpu_devices(count: int) -> None:
  """Simulate `count` devices when JAX runs on CPU; call before the first computation.

  On CPU, collectives of `shard_map` that do not depend on each other may meet in one rendezvous, since JAX gives all of them one channel: the
  program hangs or crashes. `ring_attention` makes its own depend on each other. For all others it is made unlikely: XLA does not run all
  operations that are ready (`CPU_FLAGS`), and has several threads a device here, each of which a collective may hold.

  Raises:
    RuntimeError: a backend already runs with another number.
  """
  import jax

  if _backend_runs():
    if jax.default_backend() == 'cpu' and len(jax.devices()) != count:
      raise RuntimeError(f'cpu_devices={count}, but a JAX backend with {len(jax.devices())} devices already runs; set it before computing.')
    return
  jax.config.update('jax_num_cpu_devices', count)
  if count > 1:
    with _environment(PJRT_NPROC=str(_THREADS_PER_DEVICE * count)):
      jax.devices()  # The backend reads it when it starts; processes of this one's own must not.


@contextlib.contextmanager
def _environment(**variables: str):
  before = {name: os.environ.get(name) for name in variables}
  os.environ.update(variables)
  try:
    yield
  finally:
    for name, value in before.items():
      if value is None:
        del os.environ[name]
      else:
        os.environ[name] = value


def check_backend() -> None:
  """Raise RuntimeError if this process's CPU backend computes wrong numbers."""
  import jax

  error = canary() if jax.default_backend() == 'cpu' else 0.0
  if not error < 1e-4:
    raise RuntimeError(f'XLA computes wrong numbers in this process (relative error {error:.1e} in a known case); set '
                       f'XLA_FLAGS={MISCOMPILE_FLAG}=-reduce before Python starts.')


def canary() -> float:
  """Return the largest relative error of the pattern that XLA's CPU backend miscompiles without our flag (about 1e-6 when right)."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  worst = 0.0
  for size in (48, 64, 96):
    values = np.random.default_rng(size).standard_normal((size, size)).astype(np.float32)

    def pattern(x, c):
      return jnp.sum(jnp.dot(x, jnp.broadcast_to(c, x.shape)) * x, axis=0)

    wanted = ((values.astype(np.float64) @ np.full(values.shape, 0.5)) * values).sum(0)
    got = np.asarray(jax.jit(pattern)(values, jnp.float32(0.5)), np.float64)
    worst = max(worst, float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted))))
  return worst
