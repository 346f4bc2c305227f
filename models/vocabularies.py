"""Vocabulary files as data: `tokenizer.json` documents, SentencePiece models, and the vocabulary fields of a GGUF file.

`tokenizer` builds its encoders from these. SentencePiece models are read and written as protobuf bytes by hand: several libraries register
SentencePiece's schema with the protobuf runtime and clash in one process, and only a few fields are needed.

Deliberately absent: encoding and decoding (`tokenizer`), and the pre-tokenizers of families that `presets` does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.gguf import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # Piece types, the same in SentencePiece and GGUF.
SPACE = '\u2581'  # How SentencePiece writes a space.

_LLAMA3_NAMES = ('llama-bpe', 'llama3', 'llama-v3')
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
_CASED = rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|'
_TAIL = r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
# GGUF names its pre-tokenizer; the splitting pattern is part of the vocabulary's definition.
_PRE_TOKENIZERS = {
    'gpt-2': {'pattern': r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"},
    'qwen2': {'pattern': _WORDS + r'\p{N}' + _TAIL, 'normalizer': {'type': 'NFC'}},
    'tekken': {'pattern': _CASED + r'\p{N}' + _TAIL.replace(r'[\r\n]*', r'[\r\n/]*'), 'ignore_merges': True},
    **dict.fromkeys(_LLAMA3_NAMES, {'pattern': _WORDS + r'\p{N}{1,3}' + _TAIL, 'ignore_merges': True})}


def _byte_alphabet() -> list[str]:
  """Return the printable character that byte-level BPE writes for each byte: itself where printable, the others from U+0100 up."""
  printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  others = iter(range(0x100, 0x200))
  return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


CHARS_OF_BYTES = _byte_alphabet()


# GGUF.

@dataclass(frozen=True)
class GgufVocabulary:
  """What a GGUF file says of its tokenizer.

  Attributes:
    document: a `tokenizer.json`, for byte-level BPE; else None.
    proto: a SentencePiece model; else None.
    config: the matching `tokenizer_config.json`.
    stop_ids: declared end-of-turn ids.
  """

  document: Mapping[str, Any] | None
  proto: bytes | None
  config: Mapping[str, Any]
  stop_ids: tuple[int, ...]


def from_gguf(file: GgufFile) -> GgufVocabulary:
  """Return the vocabulary embedded in a GGUF file; ValueError if there is none, it is of another kind, or its fields do not fit."""
  where = str(file.path)
  kind = file.metadata.get('tokenizer.ggml.model')
  if kind not in ('llama', 'gpt2'):
    raise ValueError(f'{where}: tokenizer.ggml.model is {kind!r}; allowed: llama (SentencePiece BPE) and gpt2 (byte-level BPE).')
  pieces, types, third = _gguf_lists(file, 'scores' if kind == 'llama' else 'merges')
  ids = {name: _gguf_id(file, name, len(pieces)) for name in ('bos', 'eos', 'unknown', 'padding', 'eot', 'eom')}
  pre = file.metadata.get('tokenizer.ggml.pre', 'gpt-2')
  adds_bos = file.metadata.get('tokenizer.ggml.add_bos_token', kind == 'llama' or pre in _LLAMA3_NAMES)
  tokens = {f'{role}_token': None if ids[name] is None else pieces[ids[name]]
            for role, name in (('bos', 'bos'), ('eos', 'eos'), ('pad', 'padding'))}
  config = {**tokens, 'add_bos_token': adds_bos, 'add_eos_token': False, 'clean_up_tokenization_spaces': False}
  stop_ids = tuple(ids[name] for name in ('eot', 'eom') if ids[name] is not None)
  if kind == 'llama':
    proto = _model_proto(pieces, third, types, ids, file.metadata.get('tokenizer.ggml.add_space_prefix', True))
    return GgufVocabulary(None, proto, config, stop_ids)
  if pre not in _PRE_TOKENIZERS:
    raise ValueError(f'{where}: tokenizer.ggml.pre is {pre!r}; allowed: {sorted(_PRE_TOKENIZERS)}.')
  merges = [merge.split(' ') for merge in third]
  document = byte_level_document(pieces, types, merges, bos_id=ids['bos'] if adds_bos else None, **_PRE_TOKENIZERS[pre])
  return GgufVocabulary(document, None, config, stop_ids)


def _gguf_lists(file: GgufFile, third: str) -> tuple[list[str], list[int], Any]:
  wanted = {'tokens': list, 'token_type': np.ndarray, third: list if third == 'merges' else np.ndarray}
  values = {name: file.metadata.get(f'tokenizer.ggml.{name}') for name in wanted}
  for name, value in values.items():
    if not isinstance(value, wanted[name]):
      raise ValueError(f'{file.path}: tokenizer.ggml.{name} is missing or of the wrong type; its vocabulary needs {", ".join(wanted)}.')
  lengths = {name: len(value) for name, value in values.items() if name != 'merges'}
  if len(set(lengths.values())) > 1 or not values['tokens']:
    raise ValueError(f'{file.path}: the lists of tokenizer.ggml must have one length, at least 1, got {lengths}.')
  piece, count = Counter(values['tokens']).most_common(1)[0]
  if count > 1:
    raise ValueError(f'{file.path}: piece {piece!r} appears {count} times in tokenizer.ggml.tokens; ids would be ambiguous.')
  return values['tokens'], values['token_type'].tolist(), values[third]


def _gguf_id(file: GgufFile, name: str, count: int) -> int | None:
  id = file.metadata.get(f'tokenizer.ggml.{name}_token_id')
  if id is not None and not 0 <= id < count:
    raise ValueError(f'{file.path}: tokenizer.ggml.{name}_token_id is {id}; allowed: 0 to {count - 1}.')
  return id


# tokenizer.json.

def byte_level_document(
    pieces: Sequence[str], types: Sequence[int], merges: list[list[str]], *, bos_id: int | None, pattern: str | None = None,
    normalizer: Mapping[str, Any] | None = None, ignore_merges: bool = False) -> dict[str, Any]:
  """Return the `tokenizer.json` of a byte-level BPE vocabulary."""
  byte_level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
  flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
  added = [
      {'id': id, 'content': pieces[id], **flags, 'special': kind != USER_DEFINED}
      for id, kind in enumerate(types) if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
  split = {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
  pre_tokenizer = byte_level if pattern is None else {'type': 'Sequence', 'pretokenizers': [split, byte_level]}
  bos = [] if bos_id is None else [{'SpecialToken': {'id': pieces[bos_id], 'type_id': 0}}]
  first, second = ({'Sequence': {'id': name, 'type_id': type_id}} for type_id, name in enumerate('AB'))
  used = {} if bos_id is None else {pieces[bos_id]: {'id': pieces[bos_id], 'ids': [bos_id], 'tokens': [pieces[bos_id]]}}
  post_processor = {'type': 'TemplateProcessing', 'single': [*bos, first], 'pair': [*bos, first, second], 'special_tokens': used}
  model = {
      'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None, 'end_of_word_suffix': None, 'fuse_unk': False,
      'byte_fallback': False, 'ignore_merges': ignore_merges, 'vocab': {piece: id for id, piece in enumerate(pieces)}, 'merges': merges}
  return {
      'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': added, 'normalizer': normalizer,
      'pre_tokenizer': pre_tokenizer, 'post_processor': post_processor, 'decoder': byte_level, 'model': model}


def without(document: Mapping[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
  """Return the document of an encoder that cannot yield the `special` pieces: neither matched whole nor reached by merges."""
  model = document['model']
  kept = [token for token in document.get('added_tokens', []) if token['content'] not in special]
  # Added tokens get their ids by position unless the model's vocabulary holds them, so the kept ones go there.
  vocab = model['vocab'] | {token['content']: token['id'] for token in kept}
  merges = model['merges']
  if not special.keys().isdisjoint(vocab):
    vocab = {piece: id for piece, id in vocab.items() if piece not in special or piece == model.get('unk_token')}
    pairs = (merge.split(' ', 1) if isinstance(merge, str) else merge for merge in merges)
    merges = [[left, right] for left, right in pairs if special.keys().isdisjoint((left, right, left + right))]
  return {
      **document, 'added_tokens': kept, 'truncation': None, 'padding': None, 'post_processor': None,
      'model': {**model, 'vocab': vocab, 'merges': merges}}


def parts(node: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
  """Return a decoder or processor as the list of its parts; `key` is where a Sequence keeps them."""
  if node is None:
    return []
  return node[key] if node['type'] == 'Sequence' else [node]


def begins_with(document: Mapping[str, Any], piece: str) -> bool:
  """Return whether the document's own post-processor puts `piece` before every text."""
  templates = [part['single'] for part in parts(document.get('post_processor'), 'processors') if part['type'] == 'TemplateProcessing']
  return any(template[0].get('SpecialToken', {}).get('id') == piece for template in templates)


# SentencePiece models; field numbers as in sentencepiece_model.proto.

def _varint(value: int) -> bytes:
  out = bytearray()
  while value > 127:
    out.append(value & 127 | 128)
    value >>= 7
  out.append(value)
  return bytes(out)


def _message(number: int, body: bytes) -> bytes:
  return _varint(number << 3 | 2) + _varint(len(body)) + body


def _integers(fields: Mapping[int, int]) -> bytes:
  # A negative number is written as 64 bits.
  return b''.join(_varint(number << 3) + _varint(value & (1 << 64) - 1) for number, value in fields.items())


def _model_proto(pieces, scores, types, ids: Mapping[str, int | None], adds_space: bool) -> bytes:
  """Return a BPE model without normalization, as llama.cpp runs it."""
  messages = []
  score_bytes = np.asarray(scores, '<f4').tobytes()
  type_bytes = {kind: _integers({3: kind}) for kind in set(types) | {UNKNOWN, CONTROL}}
  for id, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
    if id == ids['unknown']:
      kind = UNKNOWN
    elif kind == UNKNOWN:
      kind = CONTROL  # SentencePiece allows one unknown piece.
    elif kind == USER_DEFINED:
      piece = piece.replace(' ', SPACE)  # GGUF writes these as they read; SentencePiece looks for them after escaping spaces.
    messages.append(_message(1, _message(1, piece.encode()) + b'\x15' + score_bytes[4 * id:4 * id + 4] + type_bytes[kind]))
  number_of = {name: -1 if id is None else id for name, id in ids.items()}
  trainer = _integers({
      3: 2, 4: len(pieces), 35: BYTE in types,
      40: number_of['unknown'], 41: number_of['bos'], 42: number_of['eos'], 43: number_of['padding']})
  for field, name in ((45, 'unknown'), (46, 'bos'), (47, 'eos'), (48, 'padding')):
    trainer += b'' if ids[name] is None else _message(field, pieces[ids[name]].encode())
  normalizer = _message(1, b'identity') + _integers({3: adds_space, 4: False, 5: True})
  return b''.join(messages) + _message(2, trainer) + _message(3, normalizer)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
  """Yield number, start and end of each field's value."""

  def varint(at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
      byte = data[at]
      value |= (byte & 127) << shift
      at, shift = at + 1, shift + 7
      if byte < 128:
        return value, at

  while at < end:
    tag, at = varint(at)
    start = at
    if tag & 7 == 0:
      _, at = varint(at)
    elif tag & 7 == 2:
      size, start = varint(at)
      at = start + size
    else:
      at += {1: 8, 5: 4}[tag & 7]
    if at > end:
      raise IndexError('field past the end')
    yield tag >> 3, start, at


def proto_pieces(proto: bytes, where: str) -> Iterator[tuple[str, int, int]]:
  """Yield each piece's text, its type, and where in `proto` that type is written (-1 where it is left at normal)."""
  try:
    for number, start, end in _fields(proto, 0, len(proto)):
      if number == 1:
        piece, kind, kind_at = '', NORMAL, -1
        for field, first, last in _fields(proto, start, end):
          if field == 1:
            piece = proto[first:last].decode()
          elif field == 3:
            kind, kind_at = proto[first], first
        yield piece, kind, kind_at
  except (IndexError, KeyError, UnicodeDecodeError) as error:
    raise ValueError(f'{where}: not a SentencePiece model ({error!r}); fetch the file again.') from error
