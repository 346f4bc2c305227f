"""TensorBoard event files with scalars, written and flushed at once.

A file is a row of TFRecord frames, each an Event protocol buffer; both are simple enough to be written here. The usual writer libraries put
a queue and a thread between the run and the disk, so that a full disk blocks the run without a word, and import torch where it is
installed, whose CUDA libraries clash with JAX's.

Deliberately absent: every kind of summary but scalars, and reading.
"""

from __future__ import annotations

from collections.abc import Mapping
import ctypes
import os
from pathlib import Path
import socket
import struct
import time

# CRC-32C (Castagnoli), reflected: one table entry a byte value.
_POLYNOMIAL = 0x82F63B78
_SESSION_START = b'\x08\x01'  # SessionLog.status = START


def _table_entry(value: int) -> int:
  for _ in range(8):
    value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
  return value


_TABLE = [_table_entry(value) for value in range(256)]


class EventFile:
  """One event file, new in its directory; open until `close`."""

  def __init__(self, directory: str | Path, start_step: int = 0):
    """Create the file; TensorBoard then forgets what earlier files in the directory say about steps after `start_step`.

    Raises:
      OSError: the directory or the file cannot be written.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files of a directory in the order of their names, so the time comes first.
    name = f'events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}'
    self._file = (Path(directory) / name).open('xb')
    self._write(_event(0, _bytes_field(3, b'brain.Event:2')))
    self._write(_event(start_step + 1, _bytes_field(7, _SESSION_START)))

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Append the scalars of one step; raises OSError if they cannot be written."""
    scalars = (_bytes_field(1, tag.encode()) + b'\x15' + _float32(value) for tag, value in values.items())
    self._write(_event(step, _bytes_field(5, b''.join(_bytes_field(1, scalar) for scalar in scalars))))

  def close(self) -> None:
    self._file.close()

  def _write(self, payload: bytes) -> None:
    length = struct.pack('<Q', len(payload))
    self._file.write(length + _masked_crc(length) + payload + _masked_crc(payload))
    self._file.flush()


def _event(step: int, body: bytes) -> bytes:
  return b'\x09' + struct.pack('<d', time.time()) + b'\x10' + _varint(step) + body


def _bytes_field(number: int, payload: bytes) -> bytes:
  return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _float32(value: float) -> bytes:
  # C's conversion turns what float32 cannot hold into infinity, where struct raises.
  return struct.pack('<f', ctypes.c_float(value).value)


def _varint(value: int) -> bytes:
  encoded = bytearray()
  while value > 0x7F:
    encoded.append(value & 0x7F | 0x80)
    value >>= 7
  encoded.append(value)
  return bytes(encoded)


def _masked_crc(data: bytes) -> bytes:
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
  crc ^= 0xFFFFFFFF
  return struct.pack('<I', ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
