"""Programs `launch.X`: train, sweep, pipeline, evaluate, generate, report, convert, prepare_data, prepare_pairs, tokenize, bench, fit.

When a program of this package is started, this file is the first that runs. glibc gives every XLA buffer above 32 MiB back to the kernel and
faults it in again, page by page (a 64 MiB output costs 37 ms of CPU instead of 10); huge pages cure it, but glibc reads the setting before
Python exists. So the program replaces itself once by the same command with the setting in its environment.
"""

from collections.abc import Callable
import logging
import os
import re
import sys

_TUNABLE = 'glibc.malloc.hugetlb=1'


def _restart_with_huge_pages() -> None:
  """Re-execute `python -m launch.X ...`; nothing happens when the package is merely imported."""
  # While runpy looks for the module of `-m`, sys.argv[0] is '-m'.
  present = os.environ.get('GLIBC_TUNABLES', '')
  if sys.argv[:1] != ['-m'] or sys.platform != 'linux' or 'glibc.malloc.hugetlb' in present:
    return
  os.environ['GLIBC_TUNABLES'] = ':'.join(part for part in (present, _TUNABLE) if part)
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


_restart_with_huge_pages()

from models import startup  # noqa: E402  (after the restart, so that it runs once)

startup.prepare()


def join_processes() -> None:
  """Make this process one of several that compute together, if JAX_COORDINATOR_ADDRESS says where they meet; call before JAX computes.

  JAX_NUM_PROCESSES and JAX_PROCESS_ID say how many there are and which this one is; where they are not set, JAX asks the cluster: TPU hosts,
  Slurm, Open MPI and Kubernetes tell.

  Raises:
    ValueError: a variable that is no such number, or unset where no cluster tells.
  """
  if not os.environ.get('JAX_COORDINATOR_ADDRESS'):
    return
  import jax

  found = {name: os.environ.get(name, '') for name in ('JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')}
  for name, value in found.items():
    if value and not value.isdecimal():
      raise ValueError(f'{name}={value!r} must be a whole number: JAX_NUM_PROCESSES how many processes there are, JAX_PROCESS_ID from 0 on '
                       'which of them this one is.')
  count, index = (int(value) if value else None for value in found.values())
  jax.distributed.initialize(num_processes=count, process_id=index)


def run(main: Callable[[list[str]], None]) -> None:
  """Run a program: parse flags, log what our packages say and the warnings of others, and turn mistakes of the user into one message.

  `ValueError`, `FileNotFoundError` and `SandboxUnavailable` carry the whole story: what, value, allowed, how to fix.
  Their traceback would hide it.
  """
  from absl import app
  from absl import logging as absl_logging

  from envs.sandbox.client import SandboxUnavailable

  def guarded(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f'unexpected arguments {argv[1:]}; every setting is a flag.')
    # Orbax and JAX log every step of theirs at INFO.
    absl_logging.set_verbosity(absl_logging.WARNING)
    for package in ('models', 'rl', 'envs', 'launch'):
      logging.getLogger(package).setLevel(logging.INFO)
    try:
      main(argv)
    except (ValueError, FileNotFoundError, SandboxUnavailable) as error:
      logging.getLogger('launch').debug('Where it was raised:', exc_info=True)
      raise SystemExit(f'launch.{os.path.splitext(os.path.basename(argv[0]))[0]}: {error}') from error

  app.run(guarded, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
  """Parse flags; a field that the config file does not have, or a value of another type than its, ends the program with one message."""
  from absl import app

  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, KeyError, TypeError) as error:  # What ml_collections raises, without saying which flag it was.
    fields = [flag for flag in argv[1:] if flag.startswith('--config.')]
    words = re.findall(r'\w+', str(error).split('\\n')[0])
    blamed = [flag for flag in fields if flag.split('=')[0].rsplit('.', 1)[-1] in words] or fields
    raise SystemExit(f'launch: {" or ".join(blamed)} does not fit the config: {" ".join(words)}') from error
