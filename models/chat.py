"""Chat markup: messages to token ids with role spans, and the append-only continuation of a conversation.

A `Template` is data: special pieces by name and fixed text around each role's content. Contents are encoded apart from the markup with
`Tokenizer.encode`, so text in a message never becomes markup, spans are exact, and the loss mask is right by construction. Ids that a model
sampled are never decoded and encoded again: `extend` only appends.

One consequence: where a published template encodes its newline together with a content that itself begins with white space, ids differ from
its own. Templates that trim contents (`gemma`, `llama3`) never meet this case.

Deliberately absent: Jinja, default system prompts and dates that some published templates insert, and tool-call syntax: the content of a
tool message is its result as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.tokenizer import Tokenizer

ROLES = ('system', 'user', 'assistant', 'tool')
# Which roles may come before each; None is the start of the conversation.
_PREDECESSORS = {
    'system': (None,), 'user': (None, 'system', 'assistant', 'tool'), 'assistant': ('user', 'tool'), 'tool': ('assistant', 'tool')}


class Special(str):
  """The name of a special piece in a template; `EOS` stands for the tokenizer's own."""

  __slots__ = ()


EOS = Special('eos')


@dataclass(frozen=True)
class Turn:
  """Markup around one role's content.

  Attributes:
    begin: pieces before the content; a plain str is text.
    stop: the piece that ends the content and belongs to it (an assistant learns to write it), or None.
    after: text after the stop.
  """

  begin: tuple[str, ...] = ()
  stop: Special | None = None
  after: str = ''


@dataclass(frozen=True)
class Template:
  """How a model family writes a conversation.

  Attributes:
    name: its name in `TEMPLATES`.
    user, assistant: their turns; the generation prompt is `assistant.begin`.
    system: its turn, or None: the system message and a blank line then open the first user message.
    tool: its turn.
    tool_result: format of one tool message inside that turn.
    joins_tools: whether consecutive tool messages share one turn, on separate lines.
    trims: whether white space around contents is dropped.
  """

  name: str
  user: Turn
  assistant: Turn
  system: Turn | None
  tool: Turn
  tool_result: str = '{}'
  joins_tools: bool = False
  trims: bool = False


def _chatml(role: str) -> Turn:
  return Turn((Special('<|im_start|>'), f'{role}\n'), Special('<|im_end|>'), '\n')


def _llama3(role: str) -> Turn:
  return Turn((Special('<|start_header_id|>'), role, Special('<|end_header_id|>'), '\n\n'), Special('<|eot_id|>'))


def _gemma(role: str) -> Turn:
  return Turn((Special('<start_of_turn>'), f'{role}\n'), Special('<end_of_turn>'), '\n')


TEMPLATES: Mapping[str, Template] = {template.name: template for template in (
    # For base models: the texts as they are, eos after each reply, tool results on lines of their own.
    Template('plain', user=Turn(), assistant=Turn(stop=EOS), system=Turn(), tool=Turn(), tool_result='\n{}\n', joins_tools=True),
    # Qwen's dialect: tool results come in a user turn.
    Template('chatml', user=_chatml('user'), assistant=_chatml('assistant'), system=_chatml('system'), tool=_chatml('user'),
             tool_result='<tool_response>\n{}\n</tool_response>', joins_tools=True),
    Template('llama3', user=_llama3('user'), assistant=_llama3('assistant'), system=_llama3('system'), tool=_llama3('ipython'), trims=True),
    # Gemma 3 has no tool role; its guide to function calling puts results in a fenced block of a user turn.
    Template('gemma', user=_gemma('user'), assistant=_gemma('model'), system=None, tool=_gemma('user'),
             tool_result='```tool_output\n{}\n```', joins_tools=True, trims=True),
    Template('mistral', user=Turn((Special('[INST]'),), Special('[/INST]')), assistant=Turn(stop=EOS), system=None,
             tool=Turn((Special('[TOOL_RESULTS]'),), Special('[/TOOL_RESULTS]'))),
)}


@dataclass(frozen=True)
class Span:
  """Tokens [start, end) of one message's content with its stop piece; `message` is its index, the first where several share a turn."""

  role: str
  start: int
  end: int
  message: int


@dataclass(frozen=True)
class Rendered:
  """A conversation as int32 ids, and where each message lies in them."""

  tokens_T: np.ndarray
  spans: tuple[Span, ...]


def render(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, template: Template, *, generation_prompt: bool = False) -> Rendered:
  """Return the ids of a whole conversation: bos if the vocabulary has one, every turn, and the generation prompt if asked for.

  Raises:
    TypeError: a message that is no mapping, or content that is no string.
    ValueError: no messages, an unknown role, roles in an impossible order, or a special piece the vocabulary lacks.
  """
  _check(messages, None, generation_prompt)
  ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  spans = []
  for role, index, content in _turns(messages, template):
    span = _append_turn(ids, getattr(template, role), content, tokenizer)
    spans.append(Span(role, *span, index))
  if generation_prompt:
    _append(ids, template.assistant.begin, tokenizer)
  return Rendered(np.asarray(ids, np.int32), tuple(spans))


def extend(
    tokens_T: np.ndarray | Sequence[int], messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, template: Template, *,
    generation_prompt: bool = True) -> np.ndarray:
  """Return int32 ids that begin with `tokens_T` and go on with `messages`, which follow an assistant's turn.

  If `tokens_T` ends in a sampled reply, the turn is closed first: with the template's stop piece where the reply was cut short of any stop,
  and with the text that belongs after it.

  Raises:
    TypeError, ValueError: as `render`; also for empty or non-integer `tokens_T`.
  """
  before = np.asarray(tokens_T)
  if before.ndim != 1 or not before.size or before.dtype.kind not in 'iu':
    raise ValueError(f'tokens_T must be a non-empty one-dimensional integer array, got {before.dtype}{list(before.shape)}.')
  _check(messages, 'assistant', generation_prompt)
  ids = before.tolist()
  _close(ids, template.assistant, tokenizer)
  for role, _, content in _turns(messages, template):
    _append_turn(ids, getattr(template, role), content, tokenizer)
  if generation_prompt:
    _append(ids, template.assistant.begin, tokenizer)
  return np.asarray(ids, np.int32)


def loss_mask_T(rendered: Rendered) -> np.ndarray:
  """Return bool [T], true on what the assistant writes, its stop included; ValueError if it writes nothing."""
  mask_T = np.zeros(rendered.tokens_T.shape, np.bool_)
  for span in rendered.spans:
    if span.role == 'assistant':
      mask_T[span.start:span.end] = True
  if not mask_T.any():
    raise ValueError(f'nothing to learn: the roles are {[span.role for span in rendered.spans]}, and only assistant messages are learned.')
  return mask_T


def _check(messages: Sequence[Mapping[str, Any]], previous: str | None, generation_prompt: bool) -> None:
  if not messages:
    raise ValueError('no messages; give at least one.')
  for index, message in enumerate(messages):
    if not isinstance(message, Mapping):
      raise TypeError(f'message {index} is a {type(message).__name__}; a message is a mapping with "role" and "content".')
    role, content = message.get('role'), message.get('content')
    if role not in ROLES:
      raise ValueError(f'message {index} has role {role!r}; allowed: {", ".join(ROLES)}.')
    if not isinstance(content, str):
      raise TypeError(f'message {index} ({role}) has content of type {type(content).__name__}; only text is rendered, give a str.')
    if previous not in _PREDECESSORS[role]:
      raise ValueError(
          f'message {index} has role {role} after {previous or "the start"}; '
          f'it may follow: {", ".join(before or "the start" for before in _PREDECESSORS[role])}.')
    previous = role
  if previous == 'system':
    raise ValueError('the only message is a system message; add a user message.')
  if generation_prompt and previous == 'assistant':
    raise ValueError('a generation prompt cannot follow an assistant message; drop it or end with a user or tool message.')


def _turns(messages: Sequence[Mapping[str, Any]], template: Template) -> list[tuple[str, int, str]]:
  """Return role, first message's index and text of every turn."""
  turns = []
  for index, message in enumerate(messages):
    role, text = message['role'], message['content'].strip() if template.trims else message['content']
    if role == 'tool':
      text = template.tool_result.replace('{}', text)
    if role == 'tool' and template.joins_tools and turns and turns[-1][0] == 'tool':
      _, first, joined = turns.pop()
      index, text = first, f'{joined}\n{text}'
    turns.append((role, index, text))
  if turns[0][0] == 'system' and template.system is None:
    (_, _, system), (role, index, text), *rest = turns
    turns = [(role, index, f'{system}\n\n{text}'), *rest]
  return turns


def _special_id(name: Special, tokenizer: Tokenizer) -> int:
  if name != EOS:
    return tokenizer.special(name)
  if tokenizer.eos_id is None:
    raise ValueError('this template ends replies with eos, and the vocabulary has none; choose another template or name an eos_token.')
  return tokenizer.eos_id


def _append(ids: list[int], pieces: Sequence[str | None], tokenizer: Tokenizer) -> None:
  for piece in pieces:
    if isinstance(piece, Special):
      ids.append(_special_id(piece, tokenizer))
    elif piece:
      # Text after text is its continuation: a vocabulary that puts a space before every text must not put one there.
      ids += tokenizer.encode(piece, continues=bool(ids) and not tokenizer.is_special(ids[-1]))


def _append_turn(ids: list[int], turn: Turn, content: str, tokenizer: Tokenizer) -> tuple[int, int]:
  """Append one turn and return where its content and stop lie."""
  _append(ids, turn.begin, tokenizer)
  start = len(ids)
  _append(ids, (content, turn.stop), tokenizer)
  end = len(ids)
  _append(ids, (turn.after,), tokenizer)
  return start, end


def _close(ids: list[int], turn: Turn, tokenizer: Tokenizer) -> None:
  """Append what the last turn lacks of its stop and the text after it."""
  stop_ids = tokenizer.stop_ids | {_special_id(turn.stop, tokenizer)}
  after = tokenizer.encode(turn.after)
  is_complete = after and ids[-len(after):] == after and len(ids) > len(after) and ids[-len(after) - 1] in stop_ids
  if not is_complete:
    _append(ids, (turn.after,) if ids[-1] in stop_ids else (turn.stop, turn.after), tokenizer)
