"""What a row of data may look like on disk, and the one `Example` that every row becomes.

| schema | fields | becomes |
|---|---|---|
| `chat` | `messages`: a list of {"role", "content"} | the same messages |
| `qa` | `question`, `answer` | a user and an assistant message |
| `text` | `text` | one assistant message: all of it is to be learned |
| `tokens` | none: rows are documents of token files | where its tokens lie (see `token_files`) |

A column may have another name than its field (`Schema.columns`); columns that no field reads are ignored, unknown keys inside a message
are not, because dropping a tool call would change what is taught. Every error starts with the file and the 1-based row.

Deliberately absent: the order of roles (the chat template knows it), tokens, and repair of bad rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import hashlib
import json
from typing import Any

ROLES = ('system', 'user', 'assistant', 'tool')
FIELDS = {'chat': ('messages',), 'qa': ('question', 'answer'), 'text': ('text',), 'tokens': ()}

Message = Mapping[str, str]


@dataclass(frozen=True)
class TokenSpan:
  """A document in a file of tokens: those from `start` to `stop` of the array at `path`, with a digest of them."""

  path: str
  start: int
  stop: int
  digest: str


@dataclass(frozen=True)
class Example:
  """One conversation or one document to learn from.

  Attributes:
    messages: {'role', 'content'} each, at least one of them by the assistant; () for a document.
    source: task, file and 1-based row, for error messages.
    tokens: where the tokens of a document lie.
  """

  messages: tuple[Message, ...]
  source: str
  tokens: TokenSpan | None = None


@dataclass(frozen=True)
class Schema:
  """The kind of a row and the column that holds each of its fields; make one with `schema`."""

  kind: str
  columns: Mapping[str, str]


def schema(kind: str, fields: Mapping[str, str] | None = None) -> Schema:
  """Return the schema of `kind`, with the columns named in `fields` instead of its own field names.

  Raises:
    ValueError: an unknown kind or field, a column name that is not a non-empty string, two fields in one column.
  """
  if kind not in FIELDS:
    raise ValueError(f'schema={kind!r} is unknown; use one of {", ".join(FIELDS)}.')
  renamed = dict(fields or {})
  for field, column in renamed.items():
    if field not in FIELDS[kind]:
      raise ValueError(f'fields names {field!r}, which schema {kind!r} does not have; it has {", ".join(FIELDS[kind])}.')
    if not isinstance(column, str) or not column:
      raise ValueError(f'fields[{field!r}]={column!r} must be the name of a column, a non-empty string.')
  columns = {field: renamed.get(field, field) for field in FIELDS[kind]}
  if len(set(columns.values())) < len(columns):
    raise ValueError(f'fields of schema {kind!r} must be in different columns, got {columns}.')
  return Schema(kind, columns)


def parse(line: bytes, schema: Schema, source: str) -> Example:
  """Check one row, a JSON object in UTF-8, against the schema.

  Raises:
    ValueError: the row is not what the schema says; the message starts with `source`.
  """
  row = _load(line, source)
  if schema.kind == 'tokens':
    return Example((), source, TokenSpan(**row))
  values = {field: _column(row, field, schema, source) for field in schema.columns}
  if schema.kind == 'chat':
    messages = _messages(values['messages'], schema.columns['messages'], source)
  else:
    texts = {field: _text(value, f'column {schema.columns[field]!r}', source) for field, value in values.items()}
    if schema.kind == 'qa':
      messages = ({'role': 'user', 'content': texts['question']}, {'role': 'assistant', 'content': texts['answer']})
    else:
      messages = ({'role': 'assistant', 'content': texts['text']},)
  return Example(messages, source)


def canonical(example: Example) -> bytes:
  """Return the example as JSON bytes that do not depend on how the row was written; `restore` reads them back."""
  if example.tokens is not None:
    return json.dumps(vars(example.tokens)).encode()
  messages = [{'role': message['role'], 'content': message['content']} for message in example.messages]
  return json.dumps(messages, ensure_ascii=False, separators=(',', ':')).encode()


def restore(data: bytes, source: str) -> Example:
  """Return the example that `canonical` wrote."""
  value = json.loads(data)
  return Example(tuple(value), source) if isinstance(value, list) else Example((), source, TokenSpan(**value))


def content(example: Example) -> bytes:
  """Return bytes that are equal for examples of equal content, wherever they lie."""
  return canonical(example) if example.tokens is None else example.tokens.digest.encode()


def uniform(data: bytes) -> float:
  """Return a number in [0, 1) that is a function of the bytes alone: equal examples fall on the same side of any threshold."""
  # 53 bits, the most that a float holds exactly; a full 64-bit hash could round up to 1.0.
  return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), 'big') >> 11) / 2**53


def _load(line: bytes, source: str) -> dict[str, Any]:
  try:
    text = line.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f'{source}: byte {error.start} ({line[error.start]:#04x}) is not UTF-8; save the file as UTF-8.') from error
  if not text.strip():
    raise ValueError(f'{source}: the row is blank; each row must be a JSON object, remove blank lines.')
  try:
    row = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{source}: not JSON ({error}): {_show(text)}; each row must be one JSON object.') from error
  if not isinstance(row, dict):
    raise ValueError(f'{source}: the row must be a JSON object, got {_type(row)}: {_show(text)}.')
  return row


def _column(row: dict[str, Any], field: str, schema: Schema, source: str) -> Any:
  column = schema.columns[field]
  if column not in row:
    raise ValueError(
        f'{source}: no column {column!r}, which schema {schema.kind!r} reads as {field!r}; the row has '
        f'{", ".join(map(repr, row)) or "none"}. Choose another schema, or name the column with fields={{{field!r}: ...}}.')
  return row[column]


def _messages(value: Any, column: str, source: str) -> tuple[Message, ...]:
  if not isinstance(value, list) or not value:
    raise ValueError(f'{source}: column {column!r} must be a non-empty list of messages, got {_type(value)}: {_show(value)}.')
  messages = []
  for index, message in enumerate(value):
    place = f'{column}[{index}]'
    if not isinstance(message, dict):
      raise ValueError(f'{source}: {place} must be an object with "role" and "content", got {_type(message)}: {_show(message)}.')
    if set(message) != {'role', 'content'}:
      raise ValueError(f'{source}: {place} must have exactly the keys "role" and "content", got {", ".join(map(repr, message)) or "none"}.')
    if message['role'] not in ROLES:
      raise ValueError(f'{source}: {place}.role={_show(message["role"])} is unknown; use one of {", ".join(ROLES)}.')
    messages.append({'role': message['role'], 'content': _text(message['content'], f'{place}.content', source)})
  if all(message['role'] != 'assistant' for message in messages):
    raise ValueError(f'{source}: column {column!r} has no message with role "assistant", so there is nothing to learn; remove the row.')
  return tuple(messages)


def _text(value: Any, place: str, source: str) -> str:
  if not isinstance(value, str):
    raise ValueError(f'{source}: {place} must be a string, got {_type(value)}: {_show(value)}.')
  if not value.strip():
    raise ValueError(f'{source}: {place} must not be blank, got {_show(value)}; fill it in or remove the row.')
  try:
    value.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
        f'{source}: {place} has half of a surrogate pair at character {error.start} ({value[error.start]!r}), which is no text; '
        'remove it or write the whole pair.') from error
  return value


def _type(value: Any) -> str:
  names = {dict: 'an object', list: 'a list', str: 'a string', bool: 'a boolean', int: 'a number', float: 'a number', type(None): 'null'}
  return names[type(value)]


def _show(value: Any, limit: int = 80) -> str:
  text = repr(value)
  return text if len(text) <= limit else f'{text[:limit]}... ({len(text)} characters)'
