"""Tool calls in the text of a reply: reading them, writing one, checking arguments, and making tool output harmless.

Two forms are read, both inside <tool_call> ... </tool_call>: the JSON of Hermes and Qwen, {"name": ..., "arguments": {...}}, and the XML of
Qwen3-Coder, <function=NAME><parameter=KEY>VALUE</parameter></function>. A call's end is found by parsing it, so tags inside strings cut
nothing. The tags win wherever they stand, a code fence included; JSON without them is text. What cannot be read is an error for the model
to see, never an exception and never repaired; after broken syntax nothing can tell a call from the text of one, so nothing after it is run.

Deliberately absent: formats of other families (Llama's and Gemma's calls, Harmony), and repair of malformed JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import json
import math
import re
from typing import Any

MAX_CALLS = 64  # of one reply
MAX_CHARS = 1 << 20  # of one reply
_MAX_DEPTH = 64  # of nested values; far below where writing them as JSON again would exhaust the stack

_OPEN, _CLOSE = '<tool_call>', '</tool_call>'
_END_OF_REASONING = '</think>'
_TAG = re.compile(r'<tool_call>|</?think>')
_CALL_TAG = re.compile(r'</?tool_call>')
_SPACE = re.compile(r'[ \t\r\n]*')
_FUNCTION = re.compile(r'<function=([^<>\n]+)>\s*')
_PARAMETER = re.compile(r'<parameter=([^<>\n]+)>')
# A value may hold a closing tag; the one that ends it is followed by what can come next.
_PARAMETER_END = re.compile(r'</parameter>\s*(?=<parameter=|</function>)')
_FUNCTION_END = re.compile(r'</function>\s*')
_CONTROL = re.compile(
    r'<[|｜][^<>|｜\s]{1,64}[|｜]?>|<[^<>|｜\s]{1,64}[|｜]>'  # <|im_start|>, <|tool_call>, <tool_call|>
    r'|</?(?:tool_call|tool_response|tool_output|tools|think|function|parameter|(?:start|end)_of_\w{1,32}|bos|eos|pad|unk|s)[=>]'
    r'|\[/?(?:inst|tool_calls|tool_results|available_tools|system_prompt|multimodal)\]', re.IGNORECASE)
_SURROGATE = re.compile('[\ud800-\udfff]')

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    'object': dict, 'array': list, 'string': str, 'boolean': bool, 'integer': int, 'number': (int, float), 'null': type(None)}
_KEYWORDS = frozenset({'type', 'properties', 'required', 'additionalProperties', 'items', 'enum', 'description', 'title'})


@dataclass(frozen=True)
class ToolCall:
  """A call as the policy wrote it.

  Attributes:
    id: unique within its reply, in the order written.
    name: of the tool.
    arguments: by name.
    is_untyped: whether the values are raw text (the XML form), to be read by the tool's schema; see `coerce`.
  """
  id: str
  name: str
  arguments: Mapping[str, Any]
  is_untyped: bool = False


@dataclass(frozen=True)
class Parsed:
  """A reply taken apart.

  Attributes:
    calls: those that can be run, in order.
    content: the text outside calls and reasoning.
    errors: messages for the model, one for each call that cannot be run. Each begins with its kind: malformed_json, malformed_xml,
      bad_call, bad_arguments, truncated, too_long or too_many.
  """
  calls: tuple[ToolCall, ...]
  content: str
  errors: tuple[str, ...]


@dataclass(frozen=True)
class _Block:
  """What stood inside one pair of tags; `end` is where the text goes on, None if broken syntax left that unknown."""
  calls: tuple[tuple[str, Mapping[str, Any], bool], ...]
  errors: tuple[str, ...]
  end: int | None


class _CallError(Exception):
  """A value that is no call; the message is for the model."""


def parse(text: str, *, thinking_prefilled: bool = False) -> Parsed:
  """Return the calls, the content and the errors of a reply; raises for no text.

  Reasoning is everything up to the last </think> that is not in a string of a call, and everything after a <think> that is never closed.

  Args:
    text: what the policy wrote.
    thinking_prefilled: whether the prompt ended with <think>, which `text` then lacks.
  """
  if len(text) > MAX_CHARS:
    return Parsed((), '', (f'too_long: the reply has {len(text)} characters, at most {MAX_CHARS} are read.',))
  content, calls, errors = [], [], []
  position = _find_end_of_reasoning(text, 0) if thinking_prefilled else 0
  while (tag := _TAG.search(text, position)) is not None:
    content.append(text[position:tag.start()])
    if tag.group() == '<think>':
      position = _find_end_of_reasoning(text, tag.end())
    elif tag.group() == _END_OF_REASONING:
      content, calls, errors, position = [], [], [], tag.end()
    else:
      block = _read_block(text, tag.end())
      calls.extend(block.calls)
      errors.extend(block.errors)
      position = block.end
      if len(calls) + len(errors) > MAX_CALLS:
        calls, errors, position = [], [f'too_many: at most {MAX_CALLS} calls in a reply; none was run.'], None
      if position is None:  # only the end of reasoning, where all before is dropped, makes what follows readable again
        position = text.rfind(_END_OF_REASONING, tag.end())
        position = len(text) if position < 0 else position
  content.append(text[position:])
  return Parsed(tuple(ToolCall(f'call_{i}', *call) for i, call in enumerate(calls)), ''.join(content), tuple(errors))


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
  """Return a call as `parse` reads it; ValueError for values that JSON cannot hold, such as NaN."""
  return f'{_OPEN}\n{json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, allow_nan=False)}\n{_CLOSE}'


def format_tools(schemas: Mapping[str, Mapping[str, Any]]) -> str:
  """Return the system message that tells a policy of its tools, by name and JSON schema, in the form Hermes and Qwen models know."""
  lines = []
  for name, schema in schemas.items():
    parameters = {key: value for key, value in schema.items() if key != 'description'}
    function = {'name': name, 'description': schema.get('description', ''), 'parameters': parameters}
    lines.append(json.dumps({'type': 'function', 'function': function}, ensure_ascii=False))
  return ('You have these tools, each given with the JSON schema of its parameters:\n<tools>\n' + '\n'.join(lines) + '\n</tools>\n'
          f'To use one, end your message with a call in this form and wait for its result:\n{_OPEN}\n'
          '{"name": <tool name>, "arguments": <JSON object>}\n' + _CLOSE)


def neutralize(text: str) -> str:
  """Return tool output in which no tag of ours or of a chat template is left: each gets a space after its bracket.

  Lone surrogates, which no tokenizer can encode, become U+FFFD.
  """
  return _CONTROL.sub(lambda match: f'{match.group()[0]} {match.group()[1:]}', _SURROGATE.sub('\ufffd', text))


def coerce(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
  """Return untyped arguments read by their schema: a value that is not a string there is decoded as JSON; what cannot be stays text."""
  properties = schema.get('properties', {})
  return {name: _coerce_value(value, properties.get(name, {}).get('type', 'string')) for name, value in arguments.items()}


def validate(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
  """Return what is wrong with the arguments, for the model to read, or None.

  Checked are type, properties, required, additionalProperties (false), items and enum of JSON Schema, and that text is valid Unicode.

  Raises:
    ValueError: the schema itself uses anything else.
  """
  return _check(arguments, schema, '')


def _find_end_of_reasoning(text: str, position: int) -> int:
  """Return where the next </think> begins, else the text's end."""
  found = text.find(_END_OF_REASONING, position)
  return len(text) if found < 0 else found


def _skip_space(text: str, position: int) -> int:
  return _SPACE.match(text, position).end()


def _read_block(text: str, start: int) -> _Block:
  """Read what follows an opening tag that ends at `start`."""
  position = _skip_space(text, start)
  if position == len(text):
    return _broken(text, start, 'malformed_json', 'no call')
  if text.startswith('<function=', position):
    return _read_xml(text, position)
  if text[position] not in '{[':
    end = position + len(_CLOSE) if text.startswith(_CLOSE, position) else start
    return _Block((), ('malformed_json: no JSON object after <tool_call>.',), end)
  values = []
  while position < len(text) and text[position] in '{[':  # some models write several calls in one block
    try:
      value, position = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
      return _broken(text, start, 'malformed_json', f'{error.msg} at character {error.pos - start} of the call')
    except ValueError as error:  # the hooks below, and integers of too many digits
      return _broken(text, start, 'malformed_json', str(error))
    except RecursionError:
      return _broken(text, start, 'malformed_json', 'too deeply nested')
    if _depth(value) > _MAX_DEPTH:
      return _broken(text, start, 'malformed_json', f'nested deeper than {_MAX_DEPTH} levels')
    values.extend(value if isinstance(value, list) else [value])
    position = _skip_space(text, position)
  tag = _CALL_TAG.search(text, position)
  is_closed = tag is not None and tag.group() == _CLOSE
  if is_closed and tag.start() != position:
    return _broken(text, start, 'malformed_json', 'text between the JSON object and </tool_call>')
  calls, errors = [], []
  for value in values:
    try:
      calls.append((*_as_call(value), False))
    except _CallError as error:
      errors.append(str(error))
  return _Block(tuple(calls), tuple(errors), tag.end() if is_closed else position)


def _broken(text: str, start: int, kind: str, why: str) -> _Block:
  if text.find(_CLOSE, start) < 0:
    return _Block((), (f'truncated: the call is not complete ({why}). Write the whole call, then </tool_call>.',), None)
  return _Block((), (f'{kind}: {why}.',), None)


def _as_call(value: Any) -> tuple[str, dict[str, Any]]:
  if not isinstance(value, dict):
    raise _CallError('bad_call: a call must be a JSON object with "name" and "arguments".')
  name = value.get('name')
  if not isinstance(name, str) or not name:
    raise _CallError('bad_call: "name" must be the name of a tool.')
  if 'arguments' in value and 'parameters' in value:
    raise _CallError('bad_call: give either "arguments" or "parameters", not both.')
  arguments = value.get('arguments', value.get('parameters'))
  if isinstance(arguments, str):  # as OpenAI's interface writes them; only this one level is undone
    try:
      arguments = _DECODER.decode(arguments)
    except (ValueError, RecursionError):
      raise _CallError('bad_arguments: "arguments" must be a JSON object, got text that is not one.') from None
  arguments = {} if arguments is None else arguments
  if not isinstance(arguments, dict) or _depth(arguments) > _MAX_DEPTH:
    raise _CallError(f'bad_arguments: "arguments" must be a JSON object of at most {_MAX_DEPTH} levels.')
  return name, arguments


def _read_xml(text: str, start: int) -> _Block:
  function = _FUNCTION.match(text, start)
  if function is None:
    return _broken(text, start, 'malformed_xml', 'the name after <function= does not end with >')
  arguments, position = {}, function.end()
  while (parameter := _PARAMETER.match(text, position)) is not None:
    end = _PARAMETER_END.search(text, parameter.end())
    name = parameter.group(1).strip()
    if end is None:
      return _broken(text, start, 'malformed_xml', f'parameter {name!r} is not closed')
    if name in arguments:
      return _broken(text, start, 'malformed_xml', f'parameter {name!r} is given twice')
    arguments[name] = text[parameter.end():end.start()].removeprefix('\n').removesuffix('\n')
    position = end.end()
  end = _FUNCTION_END.match(text, position)
  if end is None:
    return _broken(text, start, 'malformed_xml', 'expected <parameter=NAME> or </function>')
  # The closing tag may be missing, as after JSON, but nothing else may stand before it.
  tag = _CALL_TAG.search(text, end.end())
  is_closed = tag is not None and tag.group() == _CLOSE
  if is_closed and tag.start() != end.end():
    return _broken(text, start, 'malformed_xml', 'text between </function> and </tool_call>')
  return _Block(((function.group(1).strip(), arguments, True),), (), tag.end() if is_closed else end.end())


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) != len(pairs):
    raise ValueError('a key is given twice in one object')
  return value


def _finite(number: str) -> float:
  value = float(number)
  if not math.isfinite(value):
    raise ValueError(f'{number} is too large a number')
  return value


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is not JSON')


# Not strict: models write raw newlines in strings, and what they mean is plain.
_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_unique_keys, parse_float=_finite, parse_constant=_refuse_constant)


def _depth(value: Any) -> int:
  """Return how many containers are nested, without recursion."""
  depth, level = 0, [value]
  while level := [item for item in level if isinstance(item, (dict, list))]:
    depth += 1
    level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
  return depth


def _coerce_value(value: Any, type_name: str) -> Any:
  if not isinstance(value, str) or type_name == 'string':
    return value
  try:
    decoded = _DECODER.decode(value.lower() if type_name == 'boolean' else value)
  except (ValueError, RecursionError):
    return value
  return decoded if _is_type(decoded, type_name) and _depth(decoded) <= _MAX_DEPTH else value


def _is_type(value: Any, type_name: str) -> bool:
  if isinstance(value, bool):  # to Python a kind of int, to JSON not
    return type_name == 'boolean'
  return isinstance(value, _TYPES[type_name])


def _check(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
  place = path or 'the arguments'
  if set(schema) - _KEYWORDS or schema.get('type', 'object') not in _TYPES or schema.get('additionalProperties', False) is not False:
    raise ValueError(f'schema of {place}: {dict(schema)} has a keyword or type that is not checked; use {sorted(_KEYWORDS)}, the types '
                     f'{sorted(_TYPES)} and additionalProperties only as false.')
  if 'type' in schema and not _is_type(value, schema['type']):
    return f'{place} must be of type {schema["type"]}.'
  if 'enum' in schema and value not in schema['enum']:
    return f'{place} must be one of {schema["enum"]}.'
  if isinstance(value, str) and _SURROGATE.search(value):
    return f'{place} has a lone surrogate, which is not a character.'
  if isinstance(value, dict):
    return _check_object(value, schema, path)
  if isinstance(value, list):
    checks = (_check(item, schema.get('items', {}), f'{path}[{i}]') for i, item in enumerate(value))
    return next((wrong for wrong in checks if wrong), None)
  return None


def _check_object(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str | None:
  properties = schema.get('properties', {})
  missing = [name for name in schema.get('required', ()) if name not in value]
  if missing:
    return f'{path or "the arguments"} lack {", ".join(missing)}.'
  if 'additionalProperties' in schema and (unknown := [name for name in value if name not in properties]):
    return f'{path or "the arguments"} have no {unknown[0][:50]!r}; allowed are {", ".join(properties) or "none"}.'
  if any(_SURROGATE.search(name) for name in value):
    return f'{path or "the arguments"} have a name with a lone surrogate, which is not a character.'
  checks = (_check(item, properties.get(name, {}), f'{path}.{name}' if path else name) for name, item in value.items())
  return next((wrong for wrong in checks if wrong), None)
