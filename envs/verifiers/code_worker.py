"""What runs inside the box: loads a submission and answers one call at a time, JSON lines in and out. Standard library only.

Nothing here is trusted: the submission shares this process and may change all of it. What it can send back is plain data, and no expected
value ever comes in, so there is nothing to find and nothing to forge. `encode` and `decode` are the one spelling of Python values as JSON.

A request is {'nonce', 'entry', 'args'} or {'nonce', 'stdin'}; a reply repeats the nonce with 'value', 'error' (the submission raised) or
'unreadable' (it is not Python).
"""

from __future__ import annotations

import json
import os
import sys

SUBMISSION = 'submission.py'
_MAX_MESSAGE = 300
_UNORDERED = {'set': set, 'frozenset': frozenset}


def encode(value):
  """Return a value as JSON: scalars and lists as they are, other types as {type: contents}, so that an object is never ambiguous.

  Types are exact for scalars: an int subclass is refused. A subclass of a container counts as the container. Sets and the items of a dict
  have no order.

  Raises:
    TypeError: a type outside None, bool, int, float, str, bytes, list, tuple, set, frozenset and dict.
    ValueError: NaN or an infinity.
  """
  kind = type(value)
  if value is None or kind in (bool, int, str):
    return value
  if kind is float:
    if value - value != 0:
      raise ValueError(f'{value} has no place in a result; results are finite.')
    return value
  if kind is bytes:
    return {'bytes': value.hex()}
  if isinstance(value, list):
    return [encode(item) for item in value]
  if isinstance(value, tuple):
    return {'tuple': [encode(item) for item in value]}
  if isinstance(value, dict):
    return {'dict': [[encode(key), encode(item)] for key, item in value.items()]}
  for name, unordered in _UNORDERED.items():
    if isinstance(value, unordered):
      return {name: [encode(item) for item in value]}
  raise TypeError(f'a result of type {kind.__name__} is not plain data; return numbers, text, bytes, lists, tuples, sets or dicts of them.')


def decode(value):
  """Return the value that `encode` wrote."""
  if isinstance(value, list):
    return [decode(item) for item in value]
  if not isinstance(value, dict):
    return value
  (kind, contents), = value.items()
  if kind == 'bytes':
    return bytes.fromhex(contents)
  if kind == 'tuple':
    return tuple(decode(item) for item in contents)
  if kind == 'dict':
    return {decode(key): decode(item) for key, item in contents}
  return _UNORDERED[kind](decode(item) for item in contents)


def serve() -> None:
  """Answer requests until there are no more."""
  requests, replies = _take_pipes()
  code, unreadable = _compile()
  modules = []
  for line in requests:
    request = json.loads(line)
    # The boundary to code that may raise anything, SystemExit too; what it raised is the answer.
    try:
      reply = json.dumps({'nonce': request['nonce'], **(unreadable or {'value': _answer(code, modules, request)})})
    except BaseException as error:
      reply = json.dumps({'nonce': request['nonce'], 'error': _describe(error)})
    replies.write(reply.encode() + b'\n')
    replies.flush()


def _answer(code, modules, request):
  """Return the encoded value of a call, or what the program prints; `modules` holds the loaded submission from the first call on."""
  if 'stdin' in request:
    return _run_program(code, request['stdin'].encode(), request['nonce'])
  if not modules:
    modules.append(_load(code))
  return encode(getattr(modules[0], request['entry'])(*decode(request['args'])))


def _take_pipes():
  """Move the pipes to the driver out of the way: what the submission prints or reads by the usual descriptors goes nowhere."""
  requests, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
  null = os.open(os.devnull, os.O_RDWR)
  for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
  return requests, replies


def _compile():
  """Return (code, None), or (None, the reply to every request)."""
  with open(SUBMISSION, 'rb') as file:
    source = file.read()
  try:
    return compile(source, SUBMISSION, 'exec', dont_inherit=True), None
  except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
    return None, {'unreadable': _describe(error)}


def _load(code, name: str = 'submission'):
  """Run the submission as a module and return it."""
  module = type(sys)(name)
  sys.modules[name] = module  # dataclasses and typing look the module up
  exec(code, module.__dict__)
  return module


def _describe(error) -> str:
  return f'{type(error).__name__}: {error}'[:_MAX_MESSAGE]


def _run_program(code, stdin: bytes, name: str) -> str:
  """Run the submission as a program in a child with these bytes as standard input; return what it printed."""
  with _scratch(f'{name}.in') as source, _scratch(f'{name}.out') as sink:
    source.write(stdin)
    source.seek(0)
    child = os.fork()
    if not child:
      _become_program(code, source.fileno(), sink.fileno())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
      raise RuntimeError(f'the program ended with status {status}.')
    sink.seek(0)
    return sink.read().decode()


def _scratch(name: str):
  """Return an empty unbuffered file that has no name anymore."""
  path = os.path.join('/tmp', name)
  file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), 'r+b', buffering=0)
  os.unlink(path)
  return file


def _become_program(code, source: int, sink: int) -> None:
  """Run the submission as __main__ on these descriptors, never return."""
  status = 1
  # Whatever it raises ends this child only; nothing of the parent's may run in it afterwards.
  try:
    for descriptor, place in ((source, 0), (sink, 1)):
      os.dup2(descriptor, place)
    _load(code, '__main__')
    status = 0
  except SystemExit as leave:
    status = 0 if leave.code in (None, 0) else 1
  except BaseException:
    status = 1
  finally:
    try:
      sys.stdout.flush()
    finally:
      os._exit(status)


if __name__ == '__main__':
  serve()
