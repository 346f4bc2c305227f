"""GGUF files: metadata, tensor index and dequantized tensors in numpy, and a small writer.

`open_gguf` checks the whole header against the file's size before any tensor is touched, so a truncated or hostile file is one error, not a
crash half-way through a load. Blocks are unpacked in cache-sized pieces on several threads straight into the result; float arithmetic
follows the reference order (scale times scale, times level, minus offset), so float32 results are bit-equal to the `gguf` package's.

Deliberately absent: the mapping of tensor names to a model's parameters (`hf_weights`), the vocabulary (`tokenizer`), big-endian files,
split files, and the i-quants and other types no model of ours needs.

Source: the GGUF specification, versions 2 and 3 (ggml, docs/gguf.md), and ggml's block layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
import difflib
import math
import mmap
import os
from pathlib import Path
import struct
from types import MappingProxyType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

MAGIC = b'GGUF'
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
OUTPUT_TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# Values unpacked at a time: a float32 scratch of 512 KiB stays in a core's L2 cache, and Python's overhead per piece is a few percent.
PIECE_VALUES = 1 << 17

_STRING, _ARRAY = 8, 9
_SCALARS = {0: '<u1', 1: '<i1', 2: '<u2', 3: '<i2', 4: '<u4', 5: '<i4', 6: '<f4', 7: '?', 10: '<u8', 11: '<i8', 12: '<f8'}
_SCALAR_IDS = {np.dtype(text): number for number, text in _SCALARS.items()}
# Read by ggml but not here; listed so that the error can name them.
_UNSUPPORTED = {
    9: 'Q8_1', 10: 'Q2_K', 11: 'Q3_K', 15: 'Q8_K', 16: 'IQ2_XXS', 17: 'IQ2_XS', 18: 'IQ3_XXS', 19: 'IQ1_S', 20: 'IQ4_NL', 21: 'IQ3_S',
    22: 'IQ2_S', 23: 'IQ4_XS', 24: 'I8', 25: 'I16', 26: 'I32', 27: 'I64', 28: 'F64', 29: 'IQ1_M', 34: 'TQ1_0', 35: 'TQ2_0', 39: 'MXFP4'}


# Block layouts: an unpack function fills out[blocks, values] in float32.

def _halves(packed, out) -> None:
  """Write the low nibbles, then the high nibbles, along the last axis but one of `out`."""
  np.bitwise_and(packed, 15, out=out[..., 0, :])
  np.right_shift(packed, 4, out=out[..., 1, :])


def _column(values) -> np.ndarray:
  return values.astype(np.float32)[:, None]


def _unpack_q8_0(blocks, out) -> None:
  out[...] = blocks['q']
  out *= _column(blocks['d'])


def _levels_of_32(blocks) -> np.ndarray:
  """Levels of a 32-value block: nibbles, and the fifth bit where the layout has one."""
  levels = np.empty((len(blocks), 2, 16), np.uint8)
  _halves(blocks['q'], levels)
  levels = levels.reshape(-1, 32)
  if 'h' in blocks.dtype.names:
    levels |= np.unpackbits(blocks['h'], axis=1, bitorder='little') << 4
  return levels


def _unpack_symmetric(zero: int) -> Callable[[np.ndarray, np.ndarray], None]:
  def unpack(blocks, out) -> None:
    out[...] = _levels_of_32(blocks)
    out -= zero
    out *= _column(blocks['d'])
  return unpack


def _unpack_offset(blocks, out) -> None:
  out[...] = _levels_of_32(blocks)
  out *= _column(blocks['d'])
  out += _column(blocks['m'])


def _unpack_q45_k(blocks, out) -> None:
  """Q4_K and Q5_K: 8 sub-blocks of 32 values; their 6-bit scales and offsets share 12 bytes."""
  low, middle, top = blocks['s'].reshape(-1, 3, 4).transpose(1, 0, 2)
  scales = np.concatenate([low & 63, top & 15 | low >> 6 << 4], axis=1)
  offsets = np.concatenate([middle & 63, top >> 4 | middle >> 6 << 4], axis=1)
  levels = np.empty((len(blocks), 4, 2, 32), np.uint8)
  _halves(blocks['q'].reshape(-1, 4, 32), levels)
  levels = levels.reshape(-1, 8, 32)
  if 'h' in blocks.dtype.names:
    levels |= (blocks['h'][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
  out = out.reshape(-1, 8, 32)
  out[...] = levels
  out *= (_column(blocks['d']) * scales)[:, :, None]
  out -= (_column(blocks['m']) * offsets)[:, :, None]


def _unpack_q6_k(blocks, out) -> None:
  """Two halves of 128 values; each byte of `h` holds the top two bits of four values 32 apart; 16 signed scales of 16 values."""
  levels = np.empty((len(blocks), 2, 2, 64), np.uint8)
  _halves(blocks['q'].reshape(-1, 2, 64), levels)
  levels = levels.reshape(-1, 2, 4, 32)
  shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
  levels |= (blocks['h'].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
  out = out.reshape(-1, 16, 16)
  out[...] = levels.reshape(-1, 16, 16)
  out -= 32
  out *= (_column(blocks['d']) * blocks['s'])[:, :, None]


@dataclass(frozen=True)
class _Format:
  number: int
  name: str
  block: int
  dtype: np.dtype
  unpack: Callable[[np.ndarray, np.ndarray], None] | None = None


def _blocks(*fields) -> np.dtype:
  return np.dtype([(name, kind, (count,)) if count > 1 else (name, kind) for name, kind, count in fields])


_D, _M = ('d', '<f2', 1), ('m', '<f2', 1)
_FORMATS = {f.name: f for f in (
    _Format(0, 'F32', 1, np.dtype('<f4')),
    _Format(1, 'F16', 1, np.dtype('<f2')),
    _Format(30, 'BF16', 1, np.dtype(ml_dtypes.bfloat16)),
    _Format(2, 'Q4_0', 32, _blocks(_D, ('q', 'u1', 16)), _unpack_symmetric(8)),
    _Format(3, 'Q4_1', 32, _blocks(_D, _M, ('q', 'u1', 16)), _unpack_offset),
    _Format(6, 'Q5_0', 32, _blocks(_D, ('h', 'u1', 4), ('q', 'u1', 16)), _unpack_symmetric(16)),
    _Format(7, 'Q5_1', 32, _blocks(_D, _M, ('h', 'u1', 4), ('q', 'u1', 16)), _unpack_offset),
    _Format(8, 'Q8_0', 32, _blocks(_D, ('q', 'i1', 32)), _unpack_q8_0),
    _Format(12, 'Q4_K', 256, _blocks(_D, _M, ('s', 'u1', 12), ('q', 'u1', 128)), _unpack_q45_k),
    _Format(13, 'Q5_K', 256, _blocks(_D, _M, ('s', 'u1', 12), ('h', 'u1', 32), ('q', 'u1', 128)), _unpack_q45_k),
    _Format(14, 'Q6_K', 256, _blocks(('q', 'u1', 128), ('h', 'u1', 64), ('s', 'i1', 16), _D), _unpack_q6_k),
)}
_FORMAT_NUMBERS = {f.number: f for f in _FORMATS.values()}


@dataclass(frozen=True)
class TensorInfo:
  """Where one tensor lies: shape in numpy order (row-major, the contiguous dimension last), offset from the start of the file."""

  name: str
  shape: tuple[int, ...]
  type_name: str
  offset: int
  num_bytes: int


class GgufFile:
  """A memory-mapped GGUF file; made by `open_gguf`.

  Attributes:
    path: the file.
    metadata: key to int, float, bool, str, list of str, or numpy array.
    tensors: name to `TensorInfo`, in file order.
  """

  def __init__(self, path: Path, buffer: mmap.mmap, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]):
    self.path = path
    self.metadata = MappingProxyType(dict(metadata))
    self.tensors = MappingProxyType(dict(tensors))
    self._buffer = buffer

  @property
  def architecture(self) -> str:
    """Return `general.architecture`; ValueError if the file has none."""
    name = self.metadata.get('general.architecture')
    if not isinstance(name, str):
      raise ValueError(f'{self.path}: metadata key general.architecture is {name!r}; a model file names its architecture there.')
    return name

  def read(self, name: str, dtype=np.float32) -> np.ndarray:
    """Return one tensor, dequantized, as a new array of `dtype` (float32, float16 or bfloat16).

    Raises:
      ValueError: no such tensor, or another dtype.
    """
    if name not in self.tensors:
      near = difflib.get_close_matches(name, self.tensors, n=3)
      raise ValueError(f'{self.path}: no tensor {name!r} among {len(self.tensors)}' + (f'; near names: {near}.' if near else '.'))
    dtype = np.dtype(dtype)
    if dtype not in OUTPUT_TYPES:
      raise ValueError(f'{self.path}: cannot read {name} as {dtype}; allowed: {", ".join(map(str, OUTPUT_TYPES))}.')
    info = self.tensors[name]
    layout = _FORMATS[info.type_name]
    blocks = np.frombuffer(self._buffer, layout.dtype, info.num_bytes // layout.dtype.itemsize, info.offset)
    out = np.empty((len(blocks), layout.block), dtype)
    step = PIECE_VALUES // layout.block
    pieces = [(blocks[start:start + step], out[start:start + step]) for start in range(0, len(blocks), step)]

    def fill(piece) -> None:
      source, target = piece
      if layout.unpack is None:
        target[...] = source[:, None]
      elif dtype == np.float32:
        layout.unpack(source, target)
      else:
        scratch = np.empty(target.shape, np.float32)
        layout.unpack(source, scratch)
        target[...] = scratch

    if len(pieces) == 1:
      fill(pieces[0])
    else:
      with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, pieces))
    return out.reshape(info.shape)


class _Cursor:
  """Reads the header; every length is checked against what is left of the file before it is believed."""

  def __init__(self, path: Path, buffer: mmap.mmap):
    self.path, self.buffer, self.at, self.size = path, buffer, 0, len(buffer)

  def skip(self, num_bytes: int, what: str) -> int:
    """Advance and return where the bytes start."""
    start = self.at
    if num_bytes > self.size - start:
      raise ValueError(
          f'{self.path}: truncated: {what} needs {num_bytes} bytes at offset {start}, the file ends at {self.size}; fetch the file again.')
    self.at += num_bytes
    return start

  def number(self, kind: str, what: str) -> int:
    return struct.unpack_from(kind, self.buffer, self.skip(struct.calcsize(kind), what))[0]

  def string(self, what: str) -> str:
    num_bytes = self.number('<Q', what)
    start = self.skip(num_bytes, what)
    try:
      return self.buffer[start:start + num_bytes].decode()
    except UnicodeDecodeError as error:
      raise ValueError(f'{self.path}: {what} at offset {start} is not UTF-8: {error}.') from error

  def strings(self, count: int, what: str) -> list[str]:
    # Vocabularies have hundreds of thousands of entries, so this loop does its own bookkeeping.
    buffer, size, at, length = self.buffer, self.size, self.at, struct.Struct('<Q').unpack_from
    found = []
    try:
      for _ in range(count):
        start = at + 8
        at = start + length(buffer, at)[0]
        if at > size:
          raise ValueError(
              f'{self.path}: truncated: string {len(found)} of {what} ends at byte {at}, the file at {size}; fetch the file again.')
        found.append(buffer[start:at].decode())
    except struct.error as error:
      raise ValueError(f'{self.path}: truncated: {what} promises {count} strings, the file ends after {len(found)}; '
                       'fetch the file again.') from error
    except UnicodeDecodeError as error:
      raise ValueError(f'{self.path}: string {len(found)} of {what} is not UTF-8: {error}.') from error
    self.at = at
    return found

  def value(self, what: str) -> Any:
    kind = self.number('<I', what)
    if kind == _STRING:
      return self.string(what)
    if kind == _ARRAY:
      kind, count = self.number('<I', what), self.number('<Q', what)
      if kind == _STRING:
        return self.strings(count, what)
      if kind not in _SCALARS:
        raise ValueError(f'{self.path}: {what} is an array of value type {kind}; allowed: string (8) and {sorted(_SCALARS)}.')
      return self.array(kind, count, what)
    if kind not in _SCALARS:
      raise ValueError(f'{self.path}: {what} has value type {kind}; allowed: string (8), array (9) and {sorted(_SCALARS)}.')
    return self.array(kind, 1, what)[0].item()

  def array(self, kind: int, count: int, what: str) -> np.ndarray:
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(self.buffer, dtype, count, self.skip(count * dtype.itemsize, what)).copy()


def open_gguf(path: str | os.PathLike) -> GgufFile:
  """Map a GGUF file and check its whole header; tensor data stays on disk until `read`.

  Raises:
    FileNotFoundError: no such file.
    ValueError: not GGUF, another version or byte order, truncated, a tensor of an unsupported type or past the end of the file,
      duplicate names, bad alignment, or one part of a split model.
  """
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'{path}: no such GGUF file.')
  with open(path, 'rb') as file:
    start = file.read(4)
    if start != MAGIC:
      raise ValueError(f'{path}: not a GGUF file: it starts with {start!r}, expected {MAGIC!r}.')
    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  cursor = _Cursor(path, buffer)
  cursor.skip(4, 'magic')
  version = cursor.number('<I', 'version')
  if version not in VERSIONS:
    swapped = int.from_bytes(version.to_bytes(4, 'little'), 'big')
    if swapped in VERSIONS:
      raise ValueError(f'{path}: a big-endian GGUF file; only little-endian ones are read. Convert it (gguf-convert-endian).')
    raise ValueError(f'{path}: GGUF version {version}; allowed: {VERSIONS}. Convert the model again with a current converter.')
  num_tensors, num_keys = cursor.number('<Q', 'tensor count'), cursor.number('<Q', 'metadata count')
  metadata = {}
  for index in range(num_keys):
    key = cursor.string(f'metadata key {index}')
    if key in metadata:
      raise ValueError(f'{path}: metadata key {key!r} appears twice.')
    metadata[key] = cursor.value(f'metadata {key!r}')
  if metadata.get('split.count', 1) > 1:
    raise ValueError(f'{path}: one of the {metadata["split.count"]} parts of a split model; merge them first (gguf-split --merge).')
  alignment = _checked_alignment(metadata, path)
  headers = [_tensor_header(cursor, index) for index in range(num_tensors)]
  return GgufFile(path, buffer, metadata, _checked_tensors(cursor, headers, alignment))


def _checked_alignment(metadata: Mapping[str, Any], path: Path) -> int:
  alignment = metadata.get('general.alignment', DEFAULT_ALIGNMENT)
  if not isinstance(alignment, int) or alignment < 1 or alignment & alignment - 1:
    raise ValueError(f'{path}: general.alignment is {alignment!r}; it must be a power of two.')
  return alignment


def _tensor_header(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
  name = cursor.string(f'name of tensor {index}')
  num_dims = cursor.number('<I', f'tensor {name!r}')
  if num_dims > MAX_DIMS:
    raise ValueError(f'{cursor.path}: tensor {name!r} has {num_dims} dimensions; at most {MAX_DIMS} are allowed.')
  shape = tuple(cursor.number('<Q', f'tensor {name!r}') for _ in range(num_dims))[::-1]
  return name, shape, cursor.number('<I', f'tensor {name!r}'), cursor.number('<Q', f'tensor {name!r}')


def _checked_tensors(cursor: _Cursor, headers, alignment: int) -> dict[str, TensorInfo]:
  data_start = -(-cursor.at // alignment) * alignment
  tensors = {}
  for name, shape, number, offset in headers:
    where = f'{cursor.path}: tensor {name!r}'
    if name in tensors:
      raise ValueError(f'{where} appears twice.')
    layout = _FORMAT_NUMBERS.get(number)
    if layout is None:
      raise ValueError(
          f'{where} has type {_UNSUPPORTED.get(number, "unknown")} ({number}); allowed: {", ".join(_FORMATS)}. Convert the model to these.')
    if layout.block > 1 and (not shape or shape[-1] % layout.block):
      raise ValueError(f'{where} of shape {shape} has type {layout.name}: its last dimension must be a multiple of {layout.block}.')
    if offset % alignment:
      raise ValueError(f'{where} starts at offset {offset} of the data, which is not a multiple of the alignment {alignment}.')
    num_bytes = math.prod(shape) // layout.block * layout.dtype.itemsize
    start = data_start + offset
    if start + num_bytes > cursor.size:
      raise ValueError(
          f'{where} ({layout.name} {shape}) needs {num_bytes} bytes at offset {start}, the file has {max(cursor.size - start, 0)} there '
          f'({cursor.size} in all): truncated, fetch it again.')
    tensors[name] = TensorInfo(name, shape, layout.name, start, num_bytes)
  return tensors


def write_gguf(
    path: str | os.PathLike, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, q8_0: Collection[str] = ()) -> None:
  """Write a GGUF version 3 file under a temporary name and rename it, so `path` is either the old file or the whole new one.

  A metadata int becomes uint32 where it fits, else int32, uint64 or int64; a float becomes float32; a numpy scalar or array keeps its type.

  Args:
    path: the file to make or replace.
    metadata: key to bool, int, float, str, list of one of these, numpy scalar or one-dimensional numpy array.
    tensors: name to float32, float16 or bfloat16 array; stored in that type. Read one at a time, so the mapping may be lazy.
    q8_0: names of the tensors to store as Q8_0 instead (last dimension a multiple of 32).

  Raises:
    ValueError: a dtype, shape, value or name that the format cannot hold.
    TypeError: a metadata value of another kind.
  """
  path = Path(path)
  unknown = sorted(set(q8_0) - set(tensors))
  if unknown:
    raise ValueError(f'{path}: q8_0 names tensors that are not there: {unknown}.')
  alignment = _checked_alignment(metadata, path)
  partial = path.with_name(f'.{path.name}.{os.getpid()}.partial')
  try:
    with open(partial, 'wb') as file:
      _write(file, metadata, tensors, frozenset(q8_0), alignment)
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)


def _write(file: BinaryIO, metadata, tensors, q8_0: frozenset[str], alignment: int) -> None:
  header = [MAGIC, struct.pack('<IQQ', VERSIONS[-1], len(tensors), len(metadata))]
  for key, value in metadata.items():
    header += [_string(key), _encoded(key, value)]
  offset = 0
  for name, array in tensors.items():
    layout = _layout_for(name, array, name in q8_0)
    dims = array.shape[::-1]
    header += [_string(name), struct.pack(f'<I{len(dims)}QIQ', len(dims), *dims, layout.number, offset)]
    offset += -(-(array.size // layout.block * layout.dtype.itemsize) // alignment) * alignment
  file.write(b''.join(header))
  for name, array in tensors.items():
    file.write(bytes(-file.tell() % alignment))
    values = np.ascontiguousarray(array).reshape(-1)
    data = _quantize_q8_0(name, values) if name in q8_0 else values.astype(_layout_for(name, array, False).dtype, copy=False)
    file.write(data.view(np.uint8))
  file.write(bytes(-file.tell() % alignment))


def _layout_for(name: str, array: np.ndarray, quantized: bool) -> _Format:
  layout = next((f for f in _FORMATS.values() if f.unpack is None and f.dtype == array.dtype), None)
  if layout is None:
    raise ValueError(f'tensor {name!r} is {array.dtype}; allowed: {", ".join(map(str, OUTPUT_TYPES))}.')
  if array.ndim > MAX_DIMS:
    raise ValueError(f'tensor {name!r} has shape {array.shape}; GGUF allows at most {MAX_DIMS} dimensions.')
  if quantized:
    layout = _FORMATS['Q8_0']
    if not array.ndim or array.shape[-1] % layout.block:
      raise ValueError(f'tensor {name!r} of shape {array.shape} cannot be Q8_0: its last dimension must be a multiple of {layout.block}.')
  return layout


def _quantize_q8_0(name: str, values) -> np.ndarray:
  layout = _FORMATS['Q8_0']
  blocks = np.empty(values.size // layout.block, layout.dtype)
  step = PIECE_VALUES // layout.block
  for start in range(0, len(blocks), step):
    piece = blocks[start:start + step]
    x = values[start * layout.block:(start + step) * layout.block].astype(np.float32).reshape(-1, layout.block)
    scale = np.abs(x).max(axis=1) / np.float32(127)
    if not np.all(scale <= np.finfo(np.float16).max):
      raise ValueError(f'tensor {name!r} holds NaN, infinity or values beyond 127 x 65504, which Q8_0 cannot store.')
    x *= np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)[:, None]
    whole = np.trunc(x)
    piece['d'] = scale
    piece['q'] = whole + np.trunc(2 * (x - whole))  # Halves go away from zero, as in ggml.
  return blocks


def _string(text: str) -> bytes:
  data = text.encode()
  return struct.pack('<Q', len(data)) + data


def _encoded(key: str, value: Any) -> bytes:
  if isinstance(value, str):
    return struct.pack('<I', _STRING) + _string(value)
  if isinstance(value, list) and all(isinstance(item, str) for item in value):
    return struct.pack('<IIQ', _ARRAY, _STRING, len(value)) + b''.join(map(_string, value))
  array = _as_numbers(key, value)
  number = _SCALAR_IDS.get(array.dtype)
  if number is None or array.ndim > 1:
    raise TypeError(f'metadata {key!r} is {array.dtype} of shape {array.shape}; allowed: bool, ints, float32, float64; one dimension.')
  prefix = struct.pack('<IIQ', _ARRAY, number, array.size) if array.ndim else struct.pack('<I', number)
  return prefix + array.tobytes()


def _as_numbers(key: str, value: Any) -> np.ndarray:
  if isinstance(value, (np.ndarray, np.generic)):
    return np.asarray(value).astype(value.dtype.newbyteorder('<'), copy=False)
  items = value if isinstance(value, list) else [value]
  if all(isinstance(item, bool) for item in items):
    dtype = np.dtype(np.bool_)
  elif all(isinstance(item, int) and not isinstance(item, bool) for item in items):
    fits = (kind for kind in ('<u4', '<i4', '<u8', '<i8') if np.iinfo(kind).min <= min(items) and max(items) <= np.iinfo(kind).max)
    dtype = next(fits, None)
    if dtype is None:
      raise ValueError(f'metadata {key!r}: {value} does not fit in 64 bits.')
  elif all(isinstance(item, float) for item in items):
    dtype = np.dtype(np.float32)
  else:
    raise TypeError(f'metadata {key!r} is {type(value).__name__} {value!r}; allowed: bool, int, float, str, a list of one of these, numpy.')
  return np.asarray(value, dtype)
