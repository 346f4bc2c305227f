"""Weights in the files others use: Hugging Face safetensors read and written, GGUF read.

Import streams: each device's part of a parameter is cut out of the files and goes straight to its shard, so the host holds one parameter
(all layers of one kind) at a time and no device ever holds the whole model. Files and configuration are checked against each other before
that: every tensor is consumed and every parameter filled, or one error names what is missing and what is left over.

File tensors are [outputs, inputs]; ours keep inputs first and heads apart, so a matrix of a block is transposed and its axes are merged.
`ParamSpec.inputs` says which axes are which; the table below only holds names.

Deliberately absent: vision tensors of multimodal files (skipped, and said so in the log), pickled checkpoints, adapters (`adapter_files`),
arrays that span several hosts on export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import json
import math
import os
from pathlib import Path
import shutil
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np

from models import params as params_lib
from models import presets, quantize, sharding, transformer, weight_files
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig
from models.params import ParamSpec
from models.sharding import Layout
from models.weight_files import some

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
_STRIP_ROWS = 16
DEFAULT_MAX_SHARD_BYTES = 5 * 10**9


class Piece(NamedTuple):
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


def locate(path: str, spec: ParamSpec, config: ModelConfig, is_gguf: bool) -> list[Piece]:
  """Return where a parameter lies in a file, layer by layer.

  Args:
    path: name of the parameter, such as 'blocks/attention/q'.
  """
  if not path.startswith('blocks/'):
    return [Piece(f'{_TOP_NAMES[path][is_gguf]}.weight', spec.shape, False, None)]
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
  return [Piece(f'{prefix}.{layer}.{name}.{suffix}', shape, bool(num_inputs), layer) for layer in range(config.num_layers)]


# Import.


def load(path: str | os.PathLike, mesh: Mesh, layout: Layout, dtype: str = 'float32',
         context_length: int | None = None) -> tuple[ModelConfig, Any]:
  """Return the model at `path`: its configuration and its parameters, in their shards.

  Kv heads are whole on every device where they do not divide over `tensor`, as after `params.replicate_indivisible`.

  Args:
    path: a directory with config.json and safetensors (one file, or shards and their index), a .safetensors file beside its config.json,
      or a .gguf file.
    mesh: the devices the parameters go to.
    layout: which axes are split over which devices.
    dtype: of the parameters; or one of `quantize.KINDS`, in which the matrices of the blocks are then stored, the rest in bfloat16.
    context_length: tokens the model will be used at, as in `presets.from_hf`.

  Raises:
    FileNotFoundError: no such file, or a shard is missing.
    ValueError: a damaged file, an unsupported model or dtype, or tensors and parameters that do not match one to one.
  """
  if dtype not in sharding.DTYPES + quantize.KINDS:
    raise ValueError(f'dtype={dtype!r} of the loaded parameters is unknown; use one of {sharding.DTYPES + quantize.KINDS}.')
  source = weight_files.open_model(path, context_length)
  config = source.config
  specs = transformer.declare(config)
  places = params_lib.spec_shardings(specs, mesh, params_lib.replicate_indivisible(layout, mesh, config.num_kv_heads))
  plan = {name: locate(name, spec, config, source.is_gguf) for name, spec in params_lib.named_leaves(specs, is_leaf=_is_spec)}
  _check_complete(source, plan)

  def leaf(name, spec, place):
    array = _load_leaf(source, plan[name], spec, place, np.dtype(quantize.plain_dtype(dtype)))
    with jax.set_mesh(mesh):
      return params_lib.stored(array, name, spec, dtype)

  return config, params_lib.map_named(leaf, specs, places, is_leaf=_is_spec)


def _is_spec(leaf) -> bool:
  return isinstance(leaf, ParamSpec)


def _check_complete(source, plan: Mapping[str, list[Piece]]) -> None:
  """Raise one ValueError for all tensors that are missing, left over or of another shape."""
  wanted = {piece.name: piece.shape for pieces in plan.values() for piece in pieces}
  missing = [f'{name} {wanted[name]}' for name in wanted.keys() - source.shapes.keys()]
  extra = [f'{name} {source.shapes[name]}' for name in source.shapes.keys() - wanted.keys()]
  differ = [f'{name}: file {source.shapes[name]}, model {shape}'
            for name, shape in wanted.items() if source.shapes.get(name, shape) != shape]
  if missing or extra or differ:
    raise ValueError(f'{source.path} does not hold the {source.config.family} model its configuration describes: missing {some(missing)}; '
                     f'left over {some(extra)}; of another shape {some(differ)}. Either the configuration belongs to other weights, or the '
                     'model has parts that are not computed here.')


def _load_leaf(source, pieces: list[Piece], spec: ParamSpec, place, dtype: np.dtype) -> jax.Array:
  parts: dict[str, np.ndarray] = {}
  whole = tuple(slice(0, size) for size in spec.shape)

  def part(index):
    index = tuple(slice(*dim.indices(size)[:2]) for dim, size in zip(index, spec.shape, strict=True))
    # Devices that hold the same part share it; a GGUF tensor can only be unpacked whole, so that happens once.
    cut = whole if source.is_gguf else index
    if str(cut) not in parts:
      parts[str(cut)] = _assemble(source, pieces, spec, cut, dtype)
    return parts[str(cut)][index] if source.is_gguf else parts[str(cut)]

  return jax.make_array_from_callback(spec.shape, place, part, dtype)


def _assemble(source, pieces: list[Piece], spec: ParamSpec, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
  """Return the part `index` of a parameter."""
  if pieces[0].layer is None:
    return source.read(pieces[0].name, index, dtype)
  num_inputs = len(spec.inputs)
  inputs = _merged(index[1:1 + num_inputs], spec.shape[1:1 + num_inputs])
  outputs = _merged(index[1 + num_inputs:], spec.shape[1 + num_inputs:])
  out = np.empty([dim.stop - dim.start for dim in index], dtype)
  for target, piece in zip(out, pieces[index[0]], strict=True):
    if piece.transposed:
      _transpose_into(target.reshape(inputs.stop - inputs.start, -1), source.read(piece.name, (outputs, inputs), dtype))
    else:
      target[...] = source.read(piece.name, (outputs,), dtype).reshape(target.shape)
  return out


def _merged(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
  """Return the range that `index` is after its axes are merged."""
  if any(dim != slice(0, size) for dim, size in zip(index[1:], shape[1:], strict=True)):
    raise ValueError(f'the layout splits axes {shape} at {index}; of axes that a file merges, only the first can be split.')
  inner = math.prod(shape[1:])
  return slice(index[0].start * inner, index[0].stop * inner) if index else slice(0, 1)


def _transpose_into(out: np.ndarray, matrix: np.ndarray) -> None:
  """Write the transpose; strips of rows stay in cache (up to 6 times faster than copying a large matrix at once)."""
  for start in range(0, len(matrix), _STRIP_ROWS):
    out[:, start:start + _STRIP_ROWS] = matrix[start:start + _STRIP_ROWS].T


# Export.


def check_target(directory: str | os.PathLike, overwrite: bool) -> None:
  """Raise FileExistsError unless `export` may write there; for a caller that has long work to do first."""
  directory = Path(directory)
  if directory.exists() and not (directory.is_dir() and (overwrite or not any(directory.iterdir()))):
    raise FileExistsError(f'{directory} exists and is not an empty directory; choose another, or say overwrite to replace a directory.')


def export(directory: str | os.PathLike, config: ModelConfig, params, *, dtype: str, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
           overwrite: bool = False, tokenizer: tokenizer_lib.Tokenizer | None = None) -> None:
  """Write a directory that transformers loads: safetensors, config.json, and an index if there are several files.

  It is made beside its place and renamed when it is whole. The host holds one layer's tensor at a time.

  Args:
    directory: to make; it may exist if it is empty.
    config: of the model.
    params: its tree, layers stacked.
    dtype: of the tensors in the files.
    max_shard_bytes: start a new file before one grows past this.
    overwrite: replace a directory that is not empty.
    tokenizer: its files are written too, and its ids into config.json.

  Raises:
    FileExistsError: the directory is not empty.
    ValueError: adapters that are not merged, a tree that is not this model's, or one that the family's class cannot express.
  """
  if dtype not in sharding.DTYPES:
    raise ValueError(f'dtype={dtype!r} of the exported weights is unknown; use one of {sharding.DTYPES}.')
  if max_shard_bytes < 1:
    raise ValueError(f'max_shard_bytes={max_shard_bytes} must be positive.')
  check_target(directory, overwrite)
  tensors = _tensors(config, params)
  table = presets.to_hf(config, dtype, _token_ids(tokenizer, config))
  with new_directory(directory, overwrite) as partial:
    _write_weights(partial, tensors, np.dtype(dtype), max_shard_bytes)
    (partial / 'config.json').write_text(json.dumps(table, indent=2) + '\n')
    if tokenizer is not None:
      tokenizer_lib.save(tokenizer, partial)


@contextlib.contextmanager
def new_directory(directory: str | os.PathLike, overwrite: bool) -> Iterator[Path]:
  """Give a directory to fill; it gets its name when the block ends, and is gone if the block fails.

  Raises:
    FileExistsError: as `check_target`.
  """
  check_target(directory, overwrite)
  directory = Path(directory).absolute()
  directory.parent.mkdir(parents=True, exist_ok=True)
  partial = directory.with_name(f'.{directory.name}.{os.getpid()}.partial')
  partial.mkdir()
  try:
    yield partial
    _put(partial, directory)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _put(new: Path, directory: Path) -> None:
  """Rename a directory to its place; one that is already there is removed last."""
  if not directory.exists() or not any(directory.iterdir()):
    new.rename(directory)
    return
  old = new.with_suffix('.old')
  directory.rename(old)
  try:
    new.rename(directory)
  except OSError:
    old.rename(directory)
    raise
  shutil.rmtree(old)


def _token_ids(tokenizer: tokenizer_lib.Tokenizer | None, config: ModelConfig) -> dict[str, Any]:
  if tokenizer is None:
    return {}
  if tokenizer.vocab_size > config.vocab_size:
    raise ValueError(f'the tokenizer has {tokenizer.vocab_size} ids but the model only {config.vocab_size}; they do not belong together.')
  stop_ids = sorted(tokenizer.stop_ids)
  return {'bos_token_id': tokenizer.bos_id, 'eos_token_id': stop_ids if len(stop_ids) > 1 else tokenizer.eos_id,
          'pad_token_id': tokenizer.pad_id}


def _tensors(config: ModelConfig, params) -> list[tuple[Piece, ParamSpec, jax.Array]]:
  """Return every tensor of the files in the order of the model, and where its values are.

  Raises:
    ValueError: the tree is not this model's.
  """
  leaves = dict(params_lib.named_leaves(params, is_leaf=params_lib.is_lora))
  adapted = [name for name, leaf in leaves.items() if params_lib.is_lora(leaf)]
  if adapted:
    raise ValueError(f'{some(adapted)} have adapters beside them (LoraArray); export lora.merge(params), which adds them into the weights.')
  specs = dict(params_lib.named_leaves(transformer.declare(config), is_leaf=_is_spec))
  got, wanted = ({name: leaf.shape for name, leaf in table.items()} for table in (leaves, specs))
  differ = [f'{name}: params {got.get(name)}, model {wanted.get(name)}'
            for name in got.keys() | wanted.keys() if got.get(name) != wanted.get(name)]
  if differ:
    raise ValueError(f'params are not those of this {config.family} configuration: {some(differ)}; layers must be stacked.')
  remote = [name for name, leaf in leaves.items() if not leaf.is_fully_addressable]
  if remote:
    raise ValueError(f'{some(remote)} lie partly on other hosts; bring the parameters onto one host before export.')
  entries = [(piece, spec, leaves[name]) for name, spec in specs.items() for piece in locate(name, spec, config, False)]
  return sorted(entries, key=lambda entry: _file_order(entry[0]))


def _file_order(piece: Piece) -> int:
  if piece.layer is not None:
    return piece.layer
  return -1 if piece.name == f'{_TOP_NAMES["embedding"][0]}.weight' else 1 << 30


def _write_weights(directory: Path, tensors: list[tuple[Piece, ParamSpec, jax.Array]], dtype: np.dtype, max_shard_bytes: int) -> None:
  shards, sizes = [[]], [0]
  for entry in tensors:
    size = math.prod(entry[0].shape) * dtype.itemsize
    if sizes[-1] and sizes[-1] + size > max_shard_bytes:
      shards.append([])
      sizes.append(0)
    shards[-1].append(entry)
    sizes[-1] += size
  files = [f'model-{i + 1:05}-of-{len(shards):05}.safetensors' if len(shards) > 1 else 'model.safetensors' for i in range(len(shards))]
  for file, shard in zip(files, shards, strict=True):
    shapes = {piece.name: piece.shape for piece, _, _ in shard}
    weight_files.write_safetensors(directory / file, shapes, dtype, (_file_tensor(*entry, dtype) for entry in shard))
  if len(shards) > 1:
    weight_map = {piece.name: file for file, shard in zip(files, shards, strict=True) for piece, _, _ in shard}
    index = {'metadata': {'total_size': sum(sizes)}, 'weight_map': weight_map}
    (directory / weight_files.INDEX_FILE).write_text(json.dumps(index, indent=2) + '\n')


def _file_tensor(piece: Piece, spec: ParamSpec, leaf: jax.Array, dtype: np.dtype) -> np.ndarray:
  """Return a tensor as the file holds it, brought together from the shards of the parameter."""
  first = 0 if piece.layer is None else 1
  values = np.empty(leaf.shape[first:], dtype)
  with np.errstate(over='ignore'):
    for shard in leaf.addressable_shards:
      start, stop, _ = shard.index[0].indices(leaf.shape[0])
      if piece.layer is None:
        values[shard.index] = np.asarray(shard.data)
      elif start <= piece.layer < stop:
        values[shard.index[1:]] = np.asarray(shard.data[piece.layer - start])
  if dtype == np.float16 and not np.isfinite(values).all():
    raise ValueError(f'{piece.name} has values that float16 cannot hold (beyond 65504, or not finite); export bfloat16 or float32.')
  if not piece.transposed:
    return values.reshape(piece.shape)
  out = np.empty(piece.shape, dtype)
  _transpose_into(out, values.reshape(math.prod(values.shape[:len(spec.inputs)]), -1))
  return out
