"""Tokenizers behind one interface: `tokenizer.json`, SentencePiece `tokenizer.model`, the vocabulary inside a GGUF file, and plain bytes.

Two things hold for all of them. `encode` never yields a special id, whatever the text says: the encoder is built from a vocabulary in which
the special pieces do not exist, so their names are ordinary characters. And `decode` joins the bytes of the pieces before it reads them as
UTF-8, so a character split over tokens comes out whole.

Special pieces are those the vocabulary calls control or special, and those it calls ordinary although they mark structure (`STRUCTURAL`:
image and fill-in-the-middle markers). Pieces a model writes as text stay text: HTML tags, runs of white space, `<think>`, `<tool_call>`.

A SentencePiece vocabulary from GGUF becomes a SentencePiece model in memory: exact (user-defined pieces are matched longest first, so 33
spaces are 31 + 2 as in llama.cpp) and loaded in a fraction of a second.

Deliberately absent: adding bos or eos (`chat` does), training a vocabulary, and models other than BPE in `tokenizer.json`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
import difflib
from functools import cached_property
import hashlib
import json
import os
from pathlib import Path
import re
import struct
from typing import Any

from models import vocabularies
from models.gguf import GgufFile, open_gguf
from models.vocabularies import CHARS_OF_BYTES, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED

# Pieces that mark structure even where their vocabulary calls them ordinary.
STRUCTURAL = re.compile(r'<\|[^<>|]+\|>|\[multimodal\]|</?(start|end)_of_\w+>')
# Names that end a turn or a document wherever they are special; a vocabulary's eos is added to these.
STOP_NAMES = ('<end_of_turn>', '<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<|end|>', '<|end_of_text|>', '<|endoftext|>')
BYTE_SPECIALS = ('<pad>', '<bos>', '<eos>', '<|im_start|>', '<|im_end|>')
CONFIG_FILE = 'tokenizer_config.json'

_FAST_CLASS = {'tokenizer_class': 'PreTrainedTokenizerFast'}
_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(CHARS_OF_BYTES)}
_BYTE_PIECE = re.compile(r'<0x([0-9A-Fa-f]{2})>')


class Tokenizer(ABC):
  """Text to ids and back.

  Attributes:
    vocab_size: ids are 0 to vocab_size - 1; a model's embedding may have more rows.
    bos_id: the id every document of this model begins with, or None.
    eos_id: the id that ends a document, or None.
    pad_id: declared by the vocabulary, else eos, else 0; padding is masked, so nothing depends on which.
    stop_ids: eos and every end-of-turn id.
    special_ids: name to id of all special pieces.
  """

  def __init__(
      self, pieces: Sequence[str], special_ids: Mapping[str, int], *, bos_id: int | None, eos_id: int | None, pad_id: int | None = None,
      stop_ids: Iterable[int] = ()):
    self.vocab_size = len(pieces)
    self.special_ids = dict(special_ids)
    self.bos_id, self.eos_id = bos_id, eos_id
    self.pad_id = next(id for id in (pad_id, eos_id, 0) if id is not None)
    named = (special_ids[name] for name in STOP_NAMES if name in special_ids)
    self.stop_ids = frozenset((*named, *stop_ids, *(() if eos_id is None else (eos_id,))))
    self._pieces = pieces
    self._special_set = frozenset(special_ids.values())
    self._bytes: dict[int, bytes] = {}

  @abstractmethod
  def _encode(self, text: str) -> list[int]:
    """Return the ids of valid Unicode text."""

  @abstractmethod
  def _piece_bytes(self, piece: str, id: int) -> bytes:
    """Return what an ordinary piece stands for."""

  @abstractmethod
  def _save(self, directory: Path) -> None:
    """Write the vocabulary's files."""

  def encode(self, text: str, *, continues: bool = False) -> list[int]:
    """Return the ids of `text`, without bos or eos and never a special id.

    The one exception is the unknown id, which a vocabulary without byte pieces gives for characters it lacks.

    Args:
      text: any Unicode text.
      continues: the text goes on from text before it, so a vocabulary that puts a space before every text leaves that out.

    Raises:
      TypeError: not a string.
      ValueError: a lone surrogate, which no UTF-8 text contains.
    """
    if not isinstance(text, str):
      raise TypeError(f'encode takes a str, got {type(text).__name__}: {text!r:.80}.')
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise ValueError(
          f'text has the lone surrogate {text[error.start]!r} at {error.start}; decode its source with errors="replace".') from error
    if not (continues and self._adds_space):
      return self._encode(text)
    # No vocabulary with that habit joins a newline to what follows, so the text's own ids begin right after one.
    newline, ids = self._encode('\n'), self._encode('\n' + text)
    if ids[:len(newline)] != newline:
      raise ValueError(f'this vocabulary joins a newline to {text[:20]!r}, so that text cannot be encoded as a continuation.')
    return ids[len(newline):]

  def is_special(self, id: int) -> bool:
    """Return whether an id is a special piece's."""
    return id in self._special_set

  def special(self, name: str) -> int:
    """Return the id of a special piece such as '<start_of_turn>'; ValueError names the nearest ones."""
    if name not in self.special_ids:
      near = difflib.get_close_matches(name, self.special_ids, n=5, cutoff=0.5) or list(self.special_ids)[:8]
      raise ValueError(f'the vocabulary has no special piece {name!r}; near names: {near}. Choose a chat template made for this model.')
    return self.special_ids[name]

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

    So does an id beyond the vocabulary: many models have more rows in their embedding than pieces, and may draw one.

    Where the vocabulary puts a space before every text (`encode('a')` is ' a'), one leading space is dropped, so decode undoes encode.

    Raises:
      ValueError: a negative id.
    """
    data = b''.join(self.token_bytes(id) if id < self.vocab_size else b'\xff' for id in ids
                    if not (skip_special and id < self.vocab_size and self.is_special(id)))
    return data.removeprefix(b' ' if self._adds_space else b'').decode(errors='replace')

  def token_bytes(self, id: int) -> bytes:
    """Return the bytes one id stands for (of a special piece, its name); ValueError if the id is out of range."""
    id = int(id)
    if id not in self._bytes:
      piece = self.id_to_piece(id)
      self._bytes[id] = piece.encode() if self.is_special(id) else self._piece_bytes(piece, id)
    return self._bytes[id]

  def id_to_piece(self, id: int) -> str:
    """Return the piece as the vocabulary writes it ('' for a hole in the numbering); ValueError if the id is out of range."""
    if not 0 <= id < self.vocab_size:
      raise ValueError(f'token id {id} is not in the vocabulary; allowed: 0 to {self.vocab_size - 1}.')
    return self._pieces[id]

  @cached_property
  def _adds_space(self) -> bool:
    first = self._encode('a')[:1]
    return bool(first) and self.token_bytes(first[0]).startswith(b' ')

  @cached_property
  def fingerprint(self) -> str:
    """The sha256 (hex) of every id's bytes and of which ids are special; equal for the same vocabulary in another file format."""
    digest = hashlib.sha256()
    for id in range(self.vocab_size):
      data = self.token_bytes(id)
      digest.update(struct.pack('<I?', len(data), self.is_special(id)) + data)
    return digest.hexdigest()

  def _config(self) -> dict[str, Any]:
    named = {'bos_token': self.bos_id, 'eos_token': self.eos_id, 'pad_token': self.pad_id}
    tokens = {key: None if id is None else self.id_to_piece(id) for key, id in named.items()}
    return tokens | {'add_bos_token': self.bos_id is not None, 'add_eos_token': False, 'clean_up_tokenization_spaces': False}


class JsonTokenizer(Tokenizer):
  """A BPE `tokenizer.json`, byte-level or SentencePiece-like, run by the `tokenizers` library.

  Args:
    document: the parsed file.
    config: the parsed `tokenizer_config.json` beside it, which names bos, eos and pad.
    stop_ids: more ids that end a turn.
    where: the file, for messages.
  """

  def __init__(
      self, document: Mapping[str, Any], config: Mapping[str, Any], *, stop_ids: Iterable[int] = (), where: str = 'tokenizer.json'):
    import tokenizers

    model, added = document.get('model', {}), document.get('added_tokens', [])
    if model.get('type') != 'BPE':
      raise ValueError(f'{where}: model type {model.get("type")!r}; allowed: BPE.')
    decoders = {part['type'] for part in vocabularies.parts(document.get('decoder'), 'decoders')}
    self._is_byte_level = 'ByteLevel' in decoders
    if not self._is_byte_level and 'ByteFallback' not in decoders:
      raise ValueError(f'{where}: decoder {sorted(decoders)}; allowed: ByteLevel, or ByteFallback (SentencePiece-like).')
    ids = {**model['vocab'], **{token['content']: token['id'] for token in added}}
    special = {token['content']: token['id'] for token in added if token['special'] or STRUCTURAL.fullmatch(token['content'])}
    pieces = [''] * (max(ids.values()) + 1)
    for piece, id in ids.items():
      pieces[id] = piece
    bos_id, eos_id, pad_id = (_named_id(config, f'{role}_token', ids, where) for role in ('bos', 'eos', 'pad'))
    adds_bos = config.get('add_bos_token')
    if adds_bos is None:
      adds_bos = bos_id is not None and vocabularies.begins_with(document, pieces[bos_id])
    try:
      self._encoder = tokenizers.Tokenizer.from_str(json.dumps(vocabularies.without(document, special)))
    except Exception as error:  # The library raises bare Exception.
      raise ValueError(f'{where}: the tokenizers library cannot use it: {error}.') from error
    super().__init__(pieces, special, bos_id=bos_id if adds_bos else None, eos_id=eos_id, pad_id=pad_id, stop_ids=stop_ids)
    self._added = {token['id'] for token in added}
    self._files = {'tokenizer.json': _json(document), CONFIG_FILE: _json(config)}

  def _encode(self, text: str) -> list[int]:
    return self._encoder.encode(text, add_special_tokens=False).ids

  def _piece_bytes(self, piece: str, id: int) -> bytes:
    if not self._is_byte_level:
      return _sentence_piece_bytes(piece)
    # Added pieces, and padding that is not written in the byte alphabet, stand for themselves.
    if id in self._added or not _BYTE_OF_CHAR.keys() >= set(piece):
      return piece.encode()
    return bytes(_BYTE_OF_CHAR[char] for char in piece)

  def _save(self, directory: Path) -> None:
    for name, text in self._files.items():
      (directory / name).write_text(text, encoding='utf-8')


class SentencePieceTokenizer(Tokenizer):
  """A SentencePiece model, run by the `sentencepiece` library.

  Args:
    proto: the serialized model.
    config: names of bos, eos and pad where they differ from the model's own (`tokenizer_config.json`); may be empty.
    stop_ids: more ids that end a turn.
    where: the file, for messages.
  """

  def __init__(self, proto: bytes, config: Mapping[str, Any], *, stop_ids: Iterable[int] = (), where: str = 'tokenizer.model'):
    import sentencepiece

    plain, special, pieces = bytearray(proto), {}, []
    for id, (piece, kind, kind_at) in enumerate(vocabularies.proto_pieces(proto, where)):
      pieces.append(piece)
      if kind in (CONTROL, UNKNOWN):
        special[piece] = id
      elif kind == USER_DEFINED and STRUCTURAL.fullmatch(piece):
        special[piece] = id
        plain[kind_at] = CONTROL  # SentencePiece never finds a control piece in text.
    beyond = [id for id in config.get('added_tokens_decoder', {}) if int(id) >= len(pieces)]
    if beyond:
      raise ValueError(
          f'{where}: {CONFIG_FILE} adds ids {beyond} beyond the {len(pieces)} of the model; '
          'save the tokenizer as tokenizer.json (transformers does) and load that.')
    try:
      self._encoder = sentencepiece.SentencePieceProcessor(model_proto=bytes(plain))
    except RuntimeError as error:
      raise ValueError(f'{where}: the sentencepiece library cannot use it: {error}.') from error
    ids = {piece: id for id, piece in enumerate(pieces)}
    own = {'bos_token': self._encoder.bos_id(), 'eos_token': self._encoder.eos_id(), 'pad_token': self._encoder.pad_id()}
    bos_id, eos_id, pad_id = (
        _named_id(config, key, ids, where) if key in config else (id if id >= 0 else None) for key, id in own.items())
    adds_bos = config.get('add_bos_token', True)
    super().__init__(pieces, special, bos_id=bos_id if adds_bos else None, eos_id=eos_id, pad_id=pad_id, stop_ids=stop_ids)
    self._proto = proto
    self._given_config = dict(config)

  def _encode(self, text: str) -> list[int]:
    return self._encoder.encode(text)

  def _piece_bytes(self, piece: str, id: int) -> bytes:
    return _sentence_piece_bytes(piece)

  def _save(self, directory: Path) -> None:
    (directory / 'tokenizer.model').write_bytes(self._proto)
    config = {'tokenizer_class': 'LlamaTokenizer' if self._adds_space else 'GemmaTokenizer', **self._config(), **self._given_config}
    (directory / CONFIG_FILE).write_text(_json(config), encoding='utf-8')


class ByteTokenizer(Tokenizer):
  """The 256 bytes, then special pieces; needs no file and no library.

  Args:
    specials: special names; '<pad>', '<bos>' and '<eos>' play those parts where present.
  """

  def __init__(self, specials: Sequence[str] = BYTE_SPECIALS):
    if len(set(specials)) != len(specials) or not all(specials):
      raise ValueError(f'specials must be distinct names, got {list(specials)}.')
    special_ids = {name: 256 + index for index, name in enumerate(specials)}
    super().__init__(
        [*CHARS_OF_BYTES, *specials], special_ids,
        bos_id=special_ids.get('<bos>'), eos_id=special_ids.get('<eos>'), pad_id=special_ids.get('<pad>'))

  def _encode(self, text: str) -> list[int]:
    return list(text.encode())

  def _piece_bytes(self, piece: str, id: int) -> bytes:
    return bytes([id])

  def _save(self, directory: Path) -> None:
    types = [NORMAL] * 256 + [CONTROL] * len(self.special_ids)
    document = vocabularies.byte_level_document(self._pieces, types, [], bos_id=self.bos_id)
    JsonTokenizer(document, {**_FAST_CLASS, **self._config()})._save(directory)


def load(path: str | os.PathLike) -> Tokenizer:
  """Return the tokenizer at `path`: a model directory (tokenizer.json, else tokenizer.model), a .gguf file, or 'byte'.

  Raises:
    FileNotFoundError: nothing there, or a directory without the files.
    ValueError: a file that is malformed or of an unsupported kind.
  """
  if path == 'byte':
    return ByteTokenizer()
  path = Path(path)
  if path.suffix == '.gguf' and not path.is_dir():
    return from_gguf(open_gguf(path))
  document, proto, config = path / 'tokenizer.json', path / 'tokenizer.model', path / CONFIG_FILE
  if document.is_file():
    if not config.is_file():
      raise FileNotFoundError(f'{config} is missing: tokenizer.json does not say which pieces are bos and eos; copy it from the model.')
    return JsonTokenizer(_read_json(document), _read_json(config), where=str(document))
  if proto.is_file():
    return SentencePieceTokenizer(proto.read_bytes(), _read_json(config) if config.is_file() else {}, where=str(proto))
  raise FileNotFoundError(f'no tokenizer at {path}; give a directory with tokenizer.json or tokenizer.model, a .gguf file, or "byte".')


def from_gguf(file: GgufFile) -> Tokenizer:
  """Return the tokenizer embedded in a GGUF file; ValueError if there is none or it is of an unsupported kind."""
  vocabulary = vocabularies.from_gguf(file)
  if vocabulary.proto is not None:
    return SentencePieceTokenizer(vocabulary.proto, vocabulary.config, stop_ids=vocabulary.stop_ids, where=str(file.path))
  return JsonTokenizer(vocabulary.document, {**_FAST_CLASS, **vocabulary.config}, stop_ids=vocabulary.stop_ids, where=str(file.path))


def save(tokenizer: Tokenizer, directory: str | os.PathLike) -> None:
  """Write files that `load` and transformers' AutoTokenizer read; a byte tokenizer becomes a `tokenizer.json` with the same ids.

  transformers converts a SentencePiece model itself, and splits long runs of white space otherwise than SentencePiece does.
  """
  directory = Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  tokenizer._save(directory)


def _json(value: Mapping[str, Any]) -> str:
  return json.dumps(value, ensure_ascii=False, indent=2)


def _read_json(path: Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path}: not JSON: {error}.') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path}: expected a JSON object, got {type(value).__name__}.')
  return value


def _named_id(config: Mapping[str, Any], key: str, ids: Mapping[str, int], where: str) -> int | None:
  name = config.get(key)
  if isinstance(name, Mapping):
    name = name['content']
  if name is not None and name not in ids:
    raise ValueError(f'{where}: {CONFIG_FILE} names {key} {name!r}, which is not in the vocabulary.')
  return None if name is None else ids[name]


def _sentence_piece_bytes(piece: str) -> bytes:
  byte = _BYTE_PIECE.fullmatch(piece)
  return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, ' ').encode()
