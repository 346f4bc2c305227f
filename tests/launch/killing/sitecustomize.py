"""Ends a process by SIGKILL at a point that a test chose: Python imports this file first where its directory is in PYTHONPATH.

KILL_AT is JSON: `function` ('module:name' or 'module:Class.name'), `call` (the number of its call, from 1, before which the kill falls), `when`
(only calls with this in their arguments count) and `victim` ('self', or 'parent': the process that started this one).
"""

import functools
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time

_POINT = json.loads(os.environ['KILL_AT'])
_MODULE, _, _NAME = _POINT['function'].partition(':')


def _kill():
  os.kill(os.getpid() if _POINT['victim'] == 'self' else os.getppid(), signal.SIGKILL)
  time.sleep(20)  # A run ends with its pipeline; one that does not says so, and must not go on.
  print('outlived its parent', file=sys.stderr, flush=True)
  os._exit(1)


def _watch(module):
  *outer, name = _NAME.split('.')
  holder = functools.reduce(getattr, outer, module)
  function, calls = getattr(holder, name), []

  @functools.wraps(function)
  def watched(*arguments, **named):
    if not _POINT['when'] or _POINT['when'] in f'{arguments} {named}':
      calls.append(1)
      if len(calls) == _POINT['call']:
        _kill()
    return function(*arguments, **named)

  setattr(holder, name, watched)


class _Finder(importlib.abc.MetaPathFinder):
  """Lets the module be imported as ever, and watches its function."""

  def find_spec(self, name, path, target=None):
    if name != _MODULE:
      return None
    sys.meta_path.remove(self)
    spec = importlib.util.find_spec(name)
    execute = spec.loader.exec_module

    def exec_module(module):
      execute(module)
      _watch(module)

    spec.loader.exec_module = exec_module
    return spec


sys.meta_path.insert(0, _Finder())
