"""Programs: `python -m launch.train`, `launch.generate`, `launch.evaluate`, `launch.convert`, `launch.bench`.

When a program of this package is started, this file is the first that runs. glibc gives every XLA buffer above 32 MiB back to the kernel and
faults it in again, page by page (a 64 MiB output costs 37 ms of CPU instead of 10); huge pages cure it, but glibc reads the setting before
Python exists. So the program replaces itself once by the same command with the setting in its environment.
"""

import os
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
