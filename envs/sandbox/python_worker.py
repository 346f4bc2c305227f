"""What runs inside the box of the python tool: executes cells in one namespace and answers each with what it showed.

A request is a line `NONCE HEX`, a reply `NONCE HEX`, of UTF-8. Descriptors 0 to 2 are taken away from the real pipes before any cell runs:
what cells and their children print lands in an unnamed file, which counts as disk. The nonce keeps replies in step with requests; a cell that
forges one only changes what the policy itself is told.

Imports only what every Python has loaded or built in, because a box starts for every episode that uses the tool.
"""

import _ast
import os
import sys

CELL = '<cell>'
END_BYTES = 32 << 10  # kept of the start and of the end of what is long
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST; the module ast takes longer to import than a box to start


def execute(code: str, namespace: dict) -> str | None:
  """Run a cell; return the value of its last expression as text, None if there is none or it is None."""
  tree = compile(code, CELL, 'exec', _ONLY_AST, True)
  last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
  exec(compile(tree, CELL, 'exec', 0, True), namespace)
  if last is None:
    return None
  value = eval(compile(_ast.Expression(last.value), CELL, 'eval', 0, True), namespace)
  return None if value is None else repr(value)


def explain(error: BaseException) -> str:
  """Return an exception as one line: type, text, and the line of the cell it came from."""
  line = error.lineno if isinstance(error, SyntaxError) else None
  trace = error.__traceback__
  while trace is not None:
    if trace.tb_frame.f_code.co_filename == CELL:
      line = trace.tb_lineno
    trace = trace.tb_next
  try:
    text = str(error.msg if isinstance(error, SyntaxError) else error)
  except BaseException:  # The boundary to a policy's own exception classes, whose text is code too.
    text = '(its text cannot be shown)'
  return f'Error: {type(error).__name__}{": " if text else ""}{text}{"" if line is None else f" (line {line})"}'


def take(fd: int) -> bytes:
  """Return what the capture file holds, without its middle if it is long, and empty it."""
  size = os.lseek(fd, 0, os.SEEK_END)
  if size <= 2 * END_BYTES:
    data = os.pread(fd, size, 0)
  else:
    data = os.pread(fd, END_BYTES, 0) + left_out(size) + os.pread(fd, END_BYTES, size - END_BYTES)
  os.ftruncate(fd, 0)
  return data


def left_out(size: int) -> bytes:
  """Return what stands for the middle of `size` bytes."""
  return f'\n... {size - 2 * END_BYTES} bytes left out ...\n'.encode()


def encode(text: str) -> bytes:
  """Return a text as UTF-8, without its middle if it is long."""
  data = text.encode(errors='replace')
  return data if len(data) <= 2 * END_BYTES else data[:END_BYTES] + left_out(len(data)) + data[-END_BYTES:]


def attach(null: int, capture: int):
  """Make the standard streams what they are meant to be, whatever an earlier cell did to them; return the output."""
  for target in (0, 1, 2):
    os.dup2(null, target)
  sys.stdout = sys.stderr = None  # what the old ones could not write, to a full disk for instance, must not come up now
  for target in (1, 2):
    os.dup2(capture, target)
  sys.stdin = os.fdopen(0, encoding='utf-8', closefd=False)
  sys.stdout = os.fdopen(1, 'w', encoding='utf-8', errors='backslashreplace', closefd=False, buffering=1)
  sys.stderr = os.fdopen(2, 'w', encoding='utf-8', errors='backslashreplace', closefd=False, buffering=1)
  return sys.stdout


def main() -> None:
  """Answer requests until there are no more."""
  requests, replies = os.fdopen(os.dup(0), 'rb'), os.dup(1)
  capture = os.open('/tmp', os.O_TMPFILE | os.O_RDWR | os.O_APPEND, 0o600)
  null = os.open(os.devnull, os.O_RDONLY)
  module = type(sys)('__main__')
  sys.modules['__main__'] = module
  pid = os.getpid()
  for request in requests:
    nonce, code = request.split(b' ')
    output = attach(null, capture)
    value, error = None, ''
    try:
      value = execute(bytes.fromhex(code.decode()).decode(errors='replace'), module.__dict__)
    except BaseException as raised:  # The boundary to the policy's code: whatever it raises is what it is told.
      error = explain(raised)
    if os.getpid() != pid:
      os._exit(0)  # a child that the cell forked and let run on must not answer
    try:
      output.flush()
    except Exception as raised:  # The cell may have closed its output or filled the disk.
      error = error or explain(raised)
    del output
    shown = take(capture) or (b'' if value is None else encode(value))
    if error:
      shown += (b'' if not shown or shown.endswith(b'\n') else b'\n') + encode(error)
    os.write(replies, nonce + b' ' + shown.hex().encode() + b'\n')


if __name__ == '__main__':
  main()
