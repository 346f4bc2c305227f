"""The tensors of one model as its files hold them: a safetensors file, shards with an index, or GGUF.

Names are those of the text model alone (`hf_weights` maps them to parameters). Nothing is read before `read`, but what the headers promise
is checked at once, so that a damaged download is one error and not a crash half-way through a load.

Deliberately absent: pickled checkpoints, quantized safetensors, vision tensors of multimodal files (skipped, and said so in the log).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import json
import logging
import math
import os
from pathlib import Path
import re
import struct
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from models import presets
from models.config import ModelConfig
from models.gguf import GgufFile, open_gguf

INDEX_FILE = 'model.safetensors.index.json'
_DTYPES = {'F32': np.dtype(np.float32), 'BF16': np.dtype(ml_dtypes.bfloat16), 'F16': np.dtype(np.float16)}
# Multimodal files put the text model under one of these, beside tensors of other parts.
_TEXT_PREFIXES = (('model.language_model.', 'model.'), ('language_model.', ''))
_OTHER_MODALITIES = re.compile(r'(model\.)?(vision_tower|multi_modal_projector)\.')
# A buffer that old Llama files carry; the configuration determines it.
_DERIVED = re.compile(r'.*\.rotary_emb\.inv_freq')
# A cast goes through pieces of this many values, so that a large tensor is never there twice.
_PIECE_VALUES = 1 << 22

_log = logging.getLogger(__name__)


class SafetensorsFiles:
  """One model's safetensors files and the config.json beside them.

  Attributes:
    path: the directory, or the one file.
    config: of the model.
    shapes: name to shape of every tensor.
    is_gguf: which names the tensors have.
  """

  is_gguf = False

  def __init__(self, path: Path, context_length: int | None = None):
    self.path = path
    self.config = hf_config(path, context_length)
    self._tensors: dict[str, tuple[Any, str]] = {}
    skipped = 0
    for file, listed in _shards(path).items():
      opened = _open_safetensors(file)
      held = set(opened.keys())
      if listed is not None and held != listed:
        raise ValueError(f'{path / INDEX_FILE} and {file.name} disagree: missing from the file {some(listed - held)}, '
                         f'not in the index {some(held - listed)}; fetch both again.')
      for name in held:
        if _OTHER_MODALITIES.match(name):
          skipped += 1
        elif not _DERIVED.fullmatch(name):
          self._tensors[_text_name(name)] = (opened, name)
    if skipped:
      _log.warning('%s: only the text model is loaded; skipped %d vision tensors.', path, skipped)
    self.shapes = {}
    for name, (opened, file_name) in self._tensors.items():
      piece = opened.get_slice(file_name)
      if piece.get_dtype() not in _DTYPES:
        raise ValueError(f'{path}: tensor {file_name} is {piece.get_dtype()}; allowed: {", ".join(_DTYPES)}. Use the checkpoint '
                         'that is not quantized.')
      self.shapes[name] = tuple(piece.get_shape())

  def read(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """Return part of a tensor, of one or two dimensions, as a new array of `dtype`; only that part is read."""
    opened, file_name = self._tensors[name]
    tensor = opened.get_slice(file_name)
    if _DTYPES[tensor.get_dtype()] == dtype:
      return tensor[index]
    rows, rest = index[0], index[1:]
    out = np.empty([dim.stop - dim.start for dim in index], dtype)
    step = max(1, _PIECE_VALUES // math.prod(out.shape[1:]))
    for start in range(0, len(out), step):
      stop = min(start + step, len(out))
      out[start:stop] = tensor[(slice(rows.start + start, rows.start + stop), *rest)]
    return out


def some(names: Iterable[str]) -> list[str]:
  """Return what an error message lists of many names."""
  names = sorted(names)
  return names if len(names) <= 8 else [*names[:8], f'and {len(names) - 8} more']


def _text_name(name: str) -> str:
  for prefix, canonical in _TEXT_PREFIXES:
    if name.startswith(prefix):
      return canonical + name.removeprefix(prefix)
  return name


def _shards(path: Path) -> dict[Path, set[str] | None]:
  """Return the safetensors files of a model and, if an index lists them, the tensors of each."""
  if path.is_file():
    return {path: None}
  index_path, single = path / INDEX_FILE, path / 'model.safetensors'
  if single.is_file():
    return {single: None}
  if not index_path.is_file():
    raise FileNotFoundError(f'{path} has neither model.safetensors nor {INDEX_FILE}; give a directory with safetensors, or the '
                            '.safetensors or .gguf file itself.')
  weight_map = _read_json(index_path).get('weight_map')
  if not isinstance(weight_map, Mapping):
    raise ValueError(f'{index_path} has no weight_map table; fetch it again.')
  shards: dict[Path, set[str] | None] = {}
  for name, file_name in weight_map.items():
    shards.setdefault(path / file_name, set()).add(name)
  missing = [file.name for file in shards if not file.is_file()]
  if missing:
    raise FileNotFoundError(f'{path} lacks {some(missing)}, which {INDEX_FILE} names; fetch them.')
  return shards


def _open_safetensors(path: Path):
  try:
    return safetensors.safe_open(path, 'numpy')
  except safetensors.SafetensorError as error:
    raise ValueError(f'{path} ({path.stat().st_size} bytes) is not a whole safetensors file: {error}; fetch it again.') from error


def _read_json(path: Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is not JSON: {error}; fetch it again.') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path}: expected a JSON object, got {type(value).__name__}; fetch it again.')
  return value


class GgufTensors:
  """The tensors of a GGUF file; attributes as in `SafetensorsFiles`."""

  is_gguf = True

  def __init__(self, path: Path, context_length: int | None = None):
    self._file = open_gguf(path)
    self.path = path
    self.config = _gguf_config(self._file, context_length)
    self.shapes = {name: info.shape for name, info in self._file.tensors.items() if name != 'rope_freqs.weight'}
    # llama.cpp rotates neighboring pairs in the models it calls llama, and stores the rows of q and k so.
    self._interleaves = self._file.architecture == 'llama'

  def read(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """Return part of a tensor in `dtype`; the whole of it is unpacked each time."""
    if name.endswith('norm.weight') and self.config.norm_offset:
      # The file holds offset + scale; the difference is taken in float32, which holds it exactly.
      return (self._file.read(name) - np.float32(self.config.norm_offset))[index].astype(dtype)
    array = self._file.read(name, dtype)
    if self._interleaves and ('.attn_q.' in name or '.attn_k.' in name):
      half = self.config.head_dim // 2
      array = array.reshape(-1, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array[index]


def _gguf_config(file: GgufFile, context_length: int | None) -> ModelConfig:
  factors = file.read('rope_freqs.weight') if 'rope_freqs.weight' in file.tensors else None
  try:
    return presets.from_gguf(file.metadata, tied_embeddings='output.weight' not in file.tensors, rope_factors=factors,
                             context_length=context_length)
  except ValueError as error:
    raise ValueError(f'{file.path}: {error}') from error


def hf_config(path: Path, context_length: int | None = None) -> ModelConfig:
  """Return the configuration in the config.json of a directory, or beside a file."""
  config_path = (path.parent if path.is_file() else path) / 'config.json'
  if not config_path.is_file():
    raise FileNotFoundError(f'{config_path} does not exist; the weights cannot be read without it.')
  try:
    return presets.from_hf(_read_json(config_path), context_length)
  except (ValueError, TypeError) as error:
    raise type(error)(f'{config_path}: {error}') from error


def _checked(path: str | os.PathLike) -> Path:
  path = Path(path)
  if not path.exists():
    raise FileNotFoundError(f'{path} does not exist; give a directory with config.json and safetensors, a .safetensors file beside its '
                            'config.json, or a .gguf file.')
  if path.is_file() and path.suffix not in ('.gguf', '.safetensors'):
    raise ValueError(f'{path} is neither .gguf nor .safetensors; pickled checkpoints are not read, convert them first.')
  return path


def open_model(path: str | os.PathLike, context_length: int | None = None) -> SafetensorsFiles | GgufTensors:
  """Return the tensors of the model at `path`, after checking every header.

  Raises:
    FileNotFoundError: nothing there, no config.json, or a shard that the index names is missing.
    ValueError: a damaged file, a dtype that is not F32, F16 or BF16, an index that does not match its files, or an unsupported model.
  """
  path = _checked(path)
  return GgufTensors(path, context_length) if path.suffix == '.gguf' else SafetensorsFiles(path, context_length)


def read_config(path: str | os.PathLike, context_length: int | None = None) -> ModelConfig:
  """Return the configuration of the model at `path` without touching its weights; errors as for `open_model`."""
  path = _checked(path)
  return _gguf_config(open_gguf(path), context_length) if path.suffix == '.gguf' else hf_config(path, context_length)


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, arrays: Iterable[np.ndarray]) -> None:
  """Write one file tensor by tensor (the safetensors package wants them all at once): header length, JSON header, data.

  Args:
    path: the file to make.
    shapes: name to shape.
    dtype: of all tensors.
    arrays: their values, in the order of `shapes`.
  """
  file_dtype = next(name for name, known in _DTYPES.items() if known == dtype)
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for name, shape in shapes.items():
    end = offset + math.prod(shape) * dtype.itemsize
    header[name] = {'dtype': file_dtype, 'shape': shape, 'data_offsets': (offset, end)}
    offset = end
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  with open(path, 'wb') as file:
    file.write(struct.pack('<Q', len(text)) + text)
    for array in arrays:
      file.write(array.reshape(-1).view(np.uint8))
    file.flush()
    os.fsync(file.fileno())
