"""What the client and its supervisor say to each other: a line of JSON whose 'size' counts the bytes that follow it.

Requests carry an 'id' that their reply repeats; a reply with 'failure' is a failure of the infrastructure, in words. Standard library only,
like all that the supervisor imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import json
from typing import Any, Literal

Status = Literal['ok', 'nonzero', 'timeout', 'oom', 'pids', 'disk', 'output', 'signal']


@dataclass(frozen=True)
class Limits:
  """What a box may use.

  Attributes:
    wall_s: time from the program's start, which is after a slot was waited for; a session gives each exchange its own instead.
    cpu_s: processor seconds of each process, whole ones.
    memory_bytes: anonymous and shared memory of all processes together.
    disk_bytes: everything written, in /workspace, /tmp and /dev/shm together; it lives in memory, on top of `memory_bytes`.
    num_processes: processes and threads together.
    output_bytes: standard output and error together; a program that writes more is stopped.
  """
  wall_s: float = 10.0
  cpu_s: int = 10
  memory_bytes: int = 512 << 20
  disk_bytes: int = 64 << 20
  num_processes: int = 64
  output_bytes: int = 1 << 20

  def __post_init__(self):
    for name, least in (('wall_s', 0.001), ('cpu_s', 1), ('memory_bytes', 32 << 20), ('disk_bytes', 64 << 10), ('num_processes', 4),
                        ('output_bytes', 1)):
      value = getattr(self, name)
      if not isinstance(value, (int, float)) or not least <= value < 2**60 or (name != 'wall_s' and value != int(value)):
        kind = 'a number' if name == 'wall_s' else 'an integer'
        raise ValueError(f'Limits.{name}={value!r} must be {kind} of at least {least}.')


@dataclass(frozen=True)
class Ended:
  """How a program ended, in bytes; `client.Result` is the same in text."""
  status: Status
  exit_code: int | None
  stdout: bytes
  stderr: bytes
  wall_s: float


def pack(header: Mapping[str, Any], payload: bytes = b'') -> bytes:
  """Return the bytes of one message."""
  return json.dumps({**header, 'size': len(payload)}).encode() + b'\n' + payload


def ended_message(ended: Ended) -> tuple[dict[str, Any], bytes]:
  """Return (header, payload) that say how a program ended."""
  header = {'status': ended.status, 'exit_code': ended.exit_code, 'wall_s': ended.wall_s, 'num_stdout': len(ended.stdout)}
  return header, ended.stdout + ended.stderr


def read_ended(header: Mapping[str, Any], payload: bytes) -> Ended:
  """Return what `ended_message` wrote."""
  split = header['num_stdout']
  return Ended(header['status'], header['exit_code'], payload[:split], payload[split:], header['wall_s'])
