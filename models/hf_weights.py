"""Weights in the files others use: Hugging Face safetensors read and written, GGUF read.

Import streams: each device's part of a parameter is cut out of the files and goes straight to its shard, so the host holds one parameter
(all layers of one kind) at a time and no device ever holds the whole model. Files and configuration are checked against each other before
that: every tensor is consumed and every parameter filled, or one error names what is missing and what is left over.

File tensors are [outputs, inputs]; ours keep inputs first and heads apart, so a matrix of a block is transposed and its axes are merged.
`ParamSpec.inputs` says which axes are which; the table below only holds names.

Deliberately absent: vision tensors of multimodal files (skipped, and said so in the log), pickled checkpoints, PEFT adapters, arrays that
span several hosts on export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
import json
import logging
import math
import os
from pathlib import Path
import re
import shutil
import struct
from typing import Any, Protocol

import jax
from jax.sharding import Mesh
import ml_dtypes
import numpy as np
import safetensors

from models import params as params_lib, presets, sharding, transformer
from models.config import ModelConfig
from models.gguf import GgufFile, open_gguf
from models.params import ParamSpec
from models.sharding import Layout

# Parameter -> (safetensors name, GGUF name) under the layer's prefix.
_BLOCK_NAMES = {
    'attention/norm': ('input_layernorm', 'attn_norm'),
    'attention/q': ('self_attn.q_proj', 'attn_q'),
    'attention/k': ('self_attn.k_proj', 'attn_k'),
    'attention/v': ('self_attn.v_proj', 'attn_v'),
    'attention/o': ('self_attn.o_proj', 'attn_output'),
    'attention/q_norm': ('self_attn.q_norm', 'attn_q_norm'),
    'attention/k_norm': ('self_attn.k_norm', 'attn_k_norm'),
    'attention/post_norm': ('post_attention_layernorm', 'post_attention_norm'),
    'mlp/norm': ('pre_feedforward_layernorm', 'ffn_norm'),
    'mlp/gate': ('mlp.gate_proj', 'ffn_gate'),
    'mlp/up': ('mlp.up_proj', 'ffn_up'),
    'mlp/down': ('mlp.down_proj', 'ffn_down'),
    'mlp/post_norm': ('post_feedforward_layernorm', 'post_ffw_norm'),
}
_TOP_NAMES = {
    'embedding': ('model.embed_tokens', 'token_embd'),
    'norm': ('model.norm', 'output_norm'),
    'head': ('lm_head', 'output'),
}
# Multimodal files put the text model under one of these, beside tensors of other parts.
_TEXT_PREFIXES = (('model.language_model.', 'model.'), ('language_model.lm_head.', 'lm_head.'), ('language_model.', ''))
_OTHER_MODALITIES = re.compile(r'(model\.)?(vision_tower|multi_modal_projector)\.')
# A buffer that old Llama files carry; the configuration determines it.
_DERIVED = re.compile(r'.*\.rotary_emb\.inv_freq')
_SAFETENSORS_DTYPES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}
_INDEX_FILE = 'model.safetensors.index.json'
_STRIP_ROWS = 16
DEFAULT_MAX_SHARD_BYTES = 5 * 10**9

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Piece:
  """The tensor of a file that holds a parameter, or one layer of it.

  Attributes:
    name: in the file.
    shape: in the file.
    transposed: the file has [outputs, inputs].
    layer: which index of the stacked parameter, or None.
  """
  name: str
  shape: tuple[int, ...]
  transposed: bool
  layer: int | None


def _pieces(path: str, spec: ParamSpec, config: ModelConfig, is_gguf: bool) -> list[_Piece]:
  """Return where a parameter lies in a file, layer by layer."""
  if not path.startswith('blocks/'):
    return [_Piece(f'{_TOP_NAMES[path][is_gguf]}.weight', spec.shape, False, None)]
  key, suffix = path.removeprefix('blocks/'), 'weight'
  if key.endswith('_bias'):
    key, suffix = key.removesuffix('_bias'), 'bias'
  name = _BLOCK_NAMES[key][is_gguf]
  if key == 'mlp/norm' and not config.post_norms and not is_gguf:
    # Without the sandwich this is the norm after attention, and is called so.
    name = 'post_attention_layernorm'
  shape, num_inputs = (math.prod(spec.shape[1:]),), len(spec.inputs)
  if num_inputs:
    shape = (math.prod(spec.shape[1 + num_inputs:]), math.prod(spec.shape[1:1 + num_inputs]))
  prefix = 'blk' if is_gguf else 'model.layers'
  return [_Piece(f'{prefix}.{layer}.{name}.{suffix}', shape, bool(num_inputs), layer) for layer in range(config.num_layers)]


def _transpose_into(out: np.ndarray, rows: np.ndarray) -> None:
  """Write rows.T into `out`, casting; strips of rows stay in cache (5 times faster than a plain copy of a large matrix)."""
  for start in range(0, len(rows), _STRIP_ROWS):
    strip = rows[start:start + _STRIP_ROWS]
    out[:, start:start + _STRIP_ROWS] = strip.astype(out.dtype, copy=False).T


# Files to read.


class _Source(Protocol):
  """Tensors of one model, under canonical names."""
  path: Path
  config: ModelConfig
  shapes: Mapping[str, tuple[int, ...]]
  is_gguf: bool

  def read(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """Return part of a tensor, in `dtype` or the file's own."""


class _Safetensors:
  """One model's safetensors files and the config.json beside them."""
  is_gguf = False

  def __init__(self, path: Path):
    self.path = path
    self.config = read_config(path)
    self._tensors: dict[str, tuple[Any, str]] = {}
    skipped = 0
    for file, listed in _shards(path).items():
      opened = _open_safetensors(file)
      held = set(opened.keys())
      if listed is not None and held != listed:
        raise ValueError(f'{path / _INDEX_FILE} and {file.name} disagree: missing from the file {_some(listed - held)}, '
                         f'not in the index {_some(held - listed)}; fetch both again.')
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
      if piece.get_dtype() not in _SAFETENSORS_DTYPES:
        raise ValueError(f'{path}: tensor {file_name} is {piece.get_dtype()}; allowed: {", ".join(_SAFETENSORS_DTYPES)}. '
                         'Use the unquantized checkpoint.')
      self.shapes[name] = tuple(piece.get_shape())

  def read(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    del dtype
    opened, file_name = self._tensors[name]
    return opened.get_slice(file_name)[index]


def _some(names) -> list[str]:
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
  index_path, single = path / _INDEX_FILE, path / 'model.safetensors'
  if single.is_file():
    return {single: None}
  if not index_path.is_file():
    raise FileNotFoundError(f'{path} has neither model.safetensors nor {_INDEX_FILE}; give a directory with safetensors, or the .safetensors '
                            'or .gguf file itself.')
  weight_map = _read_json(index_path).get('weight_map')
  if not isinstance(weight_map, Mapping):
    raise ValueError(f'{index_path} has no weight_map table; fetch it again.')
  shards: dict[Path, set[str] | None] = {}
  for name, file_name in weight_map.items():
    shards.setdefault(path / file_name, set()).add(name)
  missing = [file.name for file in shards if not file.is_file()]
  if missing:
    raise FileNotFoundError(f'{path} lacks {_some(missing)}, which {_INDEX_FILE} names; fetch them.')
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


class _Gguf:
  """A GGUF file."""
  is_gguf = True

  def __init__(self, file: GgufFile):
    self.path, self._file = file.path, file
    self.config = _gguf_config(file)
    self.shapes = {name: info.shape for name, info in file.tensors.items() if name != 'rope_freqs.weight'}
    # llama.cpp rotates neighboring pairs in the models it calls llama and stores their rows so.
    self._interleaves = file.architecture == 'llama'

  def read(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    if name.endswith('norm.weight') and self.config.norm_offset:
      # The file holds offset + scale; the difference is taken in float32, where it is exact.
      return self._file.read(name)[index] - np.float32(self.config.norm_offset)
    array = self._file.read(name, dtype)
    if self._interleaves and '.attn_q.' in name or '.attn_k.' in name:
      half = self.config.head_dim // 2
      array = array.reshape(-1, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array[index]


def _gguf_config(file: GgufFile) -> ModelConfig:
  factors = file.read('rope_freqs.weight') if 'rope_freqs.weight' in file.tensors else None
  try:
    return presets.from_gguf(file.metadata, tied_embeddings='output.weight' not in file.tensors, rope_factors=factors)
  except ValueError as error:
    raise ValueError(f'{file.path}: {error}') from error


def _open(path: str | os.PathLike) -> _Source:
  path = Path(path)
  if not path.exists():
    raise FileNotFoundError(f'{path} does not exist; give a directory with config.json and safetensors, a .safetensors file beside its '
                            'config.json, or a .gguf file.')
  if path.is_file() and path.suffix not in ('.gguf', '.safetensors'):
    raise ValueError(f'{path} is neither .gguf nor .safetensors; pickled checkpoints are not read, convert them first.')
  return _Gguf(open_gguf(path)) if path.suffix == '.gguf' else _Safetensors(path)


def read_config(path: str | os.PathLike) -> ModelConfig:
  """Return the configuration of the model at `path`, without its weights; arguments and errors as for `load`."""
  path = Path(path)
  if path.suffix == '.gguf':
    return _gguf_config(open_gguf(path))
  config_path = (path.parent if path.is_file() else path) / 'config.json'
  if not config_path.is_file():
    raise FileNotFoundError(f'{config_path} does not exist; the weights cannot be read without it.')
  try:
    return presets.from_hf(_read_json(config_path))
  except (ValueError, TypeError) as error:
    raise type(error)(f'{config_path}: {error}') from error


# Import.


def load(path: str | os.PathLike, mesh: Mesh, layout: Layout, dtype: str = 'float32') -> tuple[ModelConfig, Any]:
  """Return the model at `path`: its configuration and its parameters, in their shards.

  Kv heads are whole on every device where they do not divide over `tensor`, as after `params.replicate_indivisible`.

  Args:
    path: a directory with config.json and safetensors (one file, or shards and their index), a .safetensors file beside its config.json,
      or a .gguf file.
    mesh, layout: where the parameters go.
    dtype: of the parameters.

  Raises:
    FileNotFoundError: no such file, or a shard is missing.
    ValueError: a damaged file, an unsupported model or dtype, or tensors and parameters that do not match one to one.
  """
  if dtype not in sharding.DTYPES:
    raise ValueError(f'dtype={dtype!r} of the loaded parameters is unknown; use one of {sharding.DTYPES}.')
  source = _open(path)
  config = source.config
  specs = transformer.declare(config)
  places = params_lib.spec_shardings(specs, mesh, params_lib.replicate_indivisible(layout, mesh, config.num_kv_heads))
  plan = {name: _pieces(name, spec, config, source.is_gguf) for name, spec in params_lib.named_leaves(specs, is_leaf=_is_spec)}
  _check_complete(source, plan)

  def leaf(name, spec, place):
    return _load_leaf(source, plan[name], spec, place, np.dtype(dtype))

  return config, params_lib.map_named(leaf, specs, places, is_leaf=_is_spec)


def _is_spec(leaf) -> bool:
  return isinstance(leaf, ParamSpec)


def _check_complete(source: _Source, plan: Mapping[str, list[_Piece]]) -> None:
  """Raise one ValueError for all tensors that are missing, left over or of another shape."""
  wanted = {piece.name: piece.shape for pieces in plan.values() for piece in pieces}
  missing = [f'{name} {wanted[name]}' for name in wanted.keys() - source.shapes.keys()]
  extra = [f'{name} {source.shapes[name]}' for name in source.shapes.keys() - wanted.keys()]
  differ = [f'{name}: file {source.shapes[name]}, model {shape}'
            for name, shape in wanted.items() if source.shapes.get(name, shape) != shape]
  if missing or extra or differ:
    raise ValueError(f'{source.path} does not hold a {source.config.family} model of its configuration: missing {_some(missing)}; '
                     f'left over {_some(extra)}; of another shape {_some(differ)}. The configuration belongs to other weights, or the '
                     'model has parts that are not computed here.')


def _load_leaf(source: _Source, pieces: list[_Piece], spec: ParamSpec, place, dtype: np.dtype) -> jax.Array:
  parts: dict[str, np.ndarray] = {}
  whole = tuple(slice(0, size) for size in spec.shape)

  def part(index):
    # Devices that hold the same part share it; a GGUF tensor is unpacked whole, and once.
    index = tuple(slice(*dim.indices(size)[:2]) for dim, size in zip(index, spec.shape))
    cut = whole if source.is_gguf else index
    if str(cut) not in parts:
      parts[str(cut)] = _assemble(source, pieces, spec, cut, dtype)
    return parts[str(cut)][index] if source.is_gguf else parts[str(cut)]

  return jax.make_array_from_callback(spec.shape, place, part, dtype)


def _assemble(source: _Source, pieces: list[_Piece], spec: ParamSpec, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
  """Return the part `index` of a parameter; only that part of each tensor is read."""
  if pieces[0].layer is None:
    return np.ascontiguousarray(source.read(pieces[0].name, index, dtype).astype(dtype, copy=False))
  out = np.empty([dim.stop - dim.start for dim in index], dtype)
  num_inputs = len(spec.inputs)
  for target, piece in zip(out, pieces[index[0]]):
    outputs = _merged(index[1 + num_inputs:], spec.shape[1 + num_inputs:])
    if piece.transposed:
      inputs = _merged(index[1:1 + num_inputs], spec.shape[1:1 + num_inputs])
      rows = source.read(piece.name, (outputs, inputs), dtype)
      _transpose_into(target.reshape(inputs.stop - inputs.start, -1), rows)
    else:
      target[...] = source.read(piece.name, (outputs,), dtype).reshape(target.shape)
  return out


def _merged(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
  """Return the range that `index` is after its axes are merged; only the first axis of a group is ever split."""
  if any(dim != slice(0, size) for dim, size in zip(index[1:], shape[1:])):
    raise ValueError(f'the layout splits an inner axis of a group of axes {shape} at {index}; only the first can be cut out of a file.')
  inner = math.prod(shape[1:])
  return slice(index[0].start * inner, index[0].stop * inner)


# Export.


def export(directory: str | os.PathLike, config: ModelConfig, params, *, dtype: str, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
           overwrite: bool = False, tokenizer=None) -> None:
  """Write a directory that transformers loads: safetensors, config.json, and an index if there are several files.

  It is written beside its place and renamed, so `directory` is the old one or the whole new one; the host holds one layer's tensor at a time.

  Args:
    directory: to make; it may exist if it is empty.
    config: of the model.
    params: its tree, layers stacked.
    dtype: of the tensors in the files.
    max_shard_bytes: start a new file before one grows past this.
    overwrite: replace a directory that is not empty.
    tokenizer: its files are saved too, and its ids go into config.json.

  Raises:
    FileExistsError: the directory is not empty.
    ValueError: adapters that are not merged, a tree that is not this model's, or one that the family's class cannot express.
  """
  directory = Path(directory)
  if dtype not in sharding.DTYPES:
    raise ValueError(f'dtype={dtype!r} of the exported weights is unknown; use one of {sharding.DTYPES}.')
  if max_shard_bytes < 1:
    raise ValueError(f'max_shard_bytes={max_shard_bytes} must be positive.')
  if directory.exists() and not overwrite and (not directory.is_dir() or any(directory.iterdir())):
    raise FileExistsError(f'{directory} exists and is not empty; choose another or say overwrite.')
  tensors = list(_tensors(config, params))
  table = presets.to_hf(config, dtype, tokenizer and {f'{name}_token_id': getattr(tokenizer, f'{name}_id') for name in ('bos', 'eos', 'pad')})
  directory.parent.mkdir(parents=True, exist_ok=True)
  partial = directory.with_name(f'.{directory.name}.{os.getpid()}.partial')
  partial.mkdir()
  try:
    _write_weights(partial, tensors, np.dtype(dtype), max_shard_bytes)
    (partial / 'config.json').write_text(json.dumps(table, indent=2) + '\n')
    if tokenizer is not None:
      from models import tokenizer as tokenizer_lib
      tokenizer_lib.save(tokenizer, partial)
    _replace(directory, partial)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _replace(directory: Path, new: Path) -> None:
  if directory.exists() and any(directory.iterdir()):
    old = directory.with_name(f'.{directory.name}.{os.getpid()}.old')
    directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old)
  else:
    new.rename(directory)


def _tensors(config: ModelConfig, params) -> Iterator[tuple[_Piece, ParamSpec, jax.Array]]:
  """Yield every tensor of the files, in the order of the model.

  Raises:
    ValueError: the tree is not this model's.
  """
  leaves = dict(params_lib.named_leaves(params, is_leaf=params_lib.is_lora))
  adapted = [name for name, leaf in leaves.items() if params_lib.is_lora(leaf)]
  if adapted:
    raise ValueError(f'{_some(adapted)} are adapted (LoraArray); export lora.merge(params), which adds the adapters into the weights.')
  specs = dict(params_lib.named_leaves(transformer.declare(config), is_leaf=_is_spec))
  differ = [f'{name}: params {leaves[name].shape if name in leaves else "-"}, model {specs[name].shape if name in specs else "-"}'
            for name in sorted(leaves.keys() | specs.keys())
            if name not in leaves or name not in specs or leaves[name].shape != specs[name].shape]
  if differ:
    raise ValueError(f'params are not those of this {config.family} configuration: {_some(differ)}; layers must be stacked.')
  remote = [name for name, leaf in leaves.items() if not leaf.is_fully_addressable]
  if remote:
    raise ValueError(f'{_some(remote)} lie partly on other hosts; bring the parameters onto one host before export.')
  plan = {name: _pieces(name, spec, config, False) for name, spec in specs.items()}
  yield plan['embedding'][0], specs['embedding'], leaves['embedding']
  for layer in range(config.num_layers):
    for name in specs:
      if name.startswith('blocks/'):
        yield plan[name][layer], specs[name], leaves[name]
  for name in specs.keys() & {'norm', 'head'}:
    yield plan[name][0], specs[name], leaves[name]


def _to_host(leaf: jax.Array, layer: int | None, dtype: np.dtype) -> np.ndarray:
  """Return one layer of a stacked array (or the whole of another) from its shards."""
  out = np.empty(leaf.shape if layer is None else leaf.shape[1:], dtype)
  for shard in leaf.addressable_shards:
    if shard.replica_id:
      continue
    if layer is None:
      out[shard.index] = np.asarray(shard.data)
    else:
      start, stop, _ = shard.index[0].indices(leaf.shape[0])
      if start <= layer < stop:
        out[shard.index[1:]] = np.asarray(shard.data[layer - start])
  return out


def _write_weights(directory: Path, tensors: list, dtype: np.dtype, max_shard_bytes: int) -> None:
  sizes = [math.prod(piece.shape) * dtype.itemsize for piece, _, _ in tensors]
  shards, filled = [[]], 0
  for entry, size in zip(tensors, sizes):
    if filled and filled + size > max_shard_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(entry)
    filled += size
  names = ['model.safetensors'] if len(shards) == 1 else [f'model-{i + 1:05}-of-{len(shards):05}.safetensors' for i in range(len(shards))]
  for name, shard in zip(names, shards):
    _write_safetensors(directory / name, shard, dtype)
  if len(shards) > 1:
    weight_map = {piece.name: name for name, shard in zip(names, shards) for piece, _, _ in shard}
    index = {'metadata': {'total_size': sum(sizes)}, 'weight_map': weight_map}
    (directory / _INDEX_FILE).write_text(json.dumps(index, indent=2) + '\n')


def _write_safetensors(path: Path, tensors: list, dtype: np.dtype) -> None:
  """Write one file, tensor by tensor: the length of a JSON header, the header, the data (the safetensors package wants them all at once)."""
  file_dtype = next(name for name, known in _SAFETENSORS_DTYPES.items() if known == dtype.name)
  header, offset = {'__metadata__': {'format': 'pt'}}, 0
  for piece, _, _ in tensors:
    end = offset + math.prod(piece.shape) * dtype.itemsize
    header[piece.name] = {'dtype': file_dtype, 'shape': piece.shape, 'data_offsets': (offset, end)}
    offset = end
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  with open(path, 'wb') as file:
    file.write(struct.pack('<Q', len(text)) + text)
    for piece, spec, leaf in tensors:
      array = _to_host(leaf, piece.layer, dtype)
      if piece.transposed:
        array = np.ascontiguousarray(array.reshape(math.prod(array.shape[:len(spec.inputs)]), -1).T)
      file.write(array.view(np.uint8).data)
    file.flush()
    os.fsync(file.fileno())
