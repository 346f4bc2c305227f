"""`ToolEnv`: a domain as a Gymnasium environment that speaks messages.

An episode shows a problem, answers tool calls with their results, and ends with the first reply that calls no tool, which the domain's
verifier scores. Where a domain has sessions (`core.Session`), a reply can be a move without a tool, the session can end the episode and its
state is what is scored; `info['parts']` then says after every reply how far the parts of the work are.

`terminated` says that the policy gave its answer or the session is over, or that the verifier failed; `truncated` that the episode was cut
off: by the token limit of a reply, the turn limit of the domain, or a failure of the infrastructure. A failure is never a score: the reward
Gymnasium wants is then 0.0, `info['valid']` is False and `info['score']` None, and the sample must be left out.

Deliberately absent: rendering, resets inside `step`, and time limits of whole episodes, which belong to whoever steps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
import logging
from types import MappingProxyType
from typing import Any

import gymnasium

from envs import registry, spaces, tool_calls
from envs.core import Domain, EnvironmentFailure, Message, Outcome, Problem, Reason, Session, Tool, ToolError, Verdict, check_parts

_OPTIONS = ('problem', 'split', 'level', 'index')
_MIN_OBSERVATION_CHARS = 100
_MAX_INDEX = 2**31  # of a problem drawn by seed
_logger = logging.getLogger(__name__)

Observation = tuple[Message, ...]


@dataclass(frozen=True)
class _Progress:
  """What has happened in an episode."""
  problem: Problem
  turn: int = 0
  num_tool_calls: int = 0
  num_tool_errors: int = 0

  def info(self, outcome: Outcome | None = None, verdict: Verdict | None = None, parts: Mapping[str, float] = MappingProxyType({}),
           ) -> dict[str, Any]:
    """Return plain JSON-able data, new at each call, in which the problem's answer is not; a verdict has its own parts."""
    return {
        'problem_id': self.problem.id, 'level': self.problem.level, 'turn': self.turn,
        'outcome': None if outcome is None else outcome.value, 'valid': outcome is None or outcome.is_valid,
        'score': None if verdict is None or verdict.score is None else float(verdict.score),
        'reason': None if verdict is None else verdict.reason.value,
        'parts': {name: float(part) for name, part in (parts if verdict is None else verdict.parts).items()},
        'parsed': None if verdict is None else verdict.parsed,
        'num_tool_calls': self.num_tool_calls, 'num_tool_errors': self.num_tool_errors}


class ToolEnv(gymnasium.Env[Observation, Any]):
  """One domain's problems, tools and verifier; a task without tools is the case of one turn.

  The observation of `reset` is the conversation so far, that of `step` only the new messages. An action is the text of one assistant
  message, or {'content': text, 'truncated': True} if a token limit cut it off.
  """

  metadata = {'render_modes': []}

  def __init__(self, domain: Domain | str, *, path: str = '', describe_tools: bool = True, max_observation_chars: int = 4000):
    """Make the environment.

    Args:
      domain: or its name in the registry.
      path: data file, for named domains that read one.
      describe_tools: whether a system message first tells of the tools, if there are any.
      max_observation_chars: longer results of tools are cut in their middle, visibly.

    Raises:
      ValueError: a bad argument, or a name or path that the registry refuses.
      FileNotFoundError: there is no data file at the path.
    """
    if not isinstance(domain, Domain):
      domain = registry.make_domain(domain, path)
    elif path:
      raise ValueError(f'path={path!r} is for a domain given by name, got the domain {domain.name!r} itself; leave the path out.')
    if max_observation_chars < _MIN_OBSERVATION_CHARS:
      raise ValueError(f'max_observation_chars={max_observation_chars} must be at least {_MIN_OBSERVATION_CHARS}.')
    self.domain = domain
    self.observation_space = spaces.MessageSpace()
    self.action_space = spaces.ReplySpace()
    self._describe_tools = describe_tools
    self._max_observation_chars = max_observation_chars
    self._tools: dict[str, Tool] = {}
    self._session: Session | None = None  # None outside of episodes, as is the progress
    self._progress: _Progress | None = None

  def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
    """Start an episode; the same seed and options give the same messages, byte for byte.

    Args:
      seed: starts the random generator that chooses what the options leave open.
      options: {'problem': Problem}, or any of 'split', 'level' and 'index' of a problem of the domain. The split is 'train' if not
        given, and 'heldout' where there is nothing to train on.

    Raises:
      ValueError: options that name no problem of this domain.
      EnvironmentFailure: a tool or a session cannot be made.
    """
    super().reset(seed=seed)
    self.close()
    problem = self._choose_problem(dict(options or {}))
    self._session = self.domain.start(problem)
    self._tools = {tool.name: tool for tool in self._session.tools}
    self._progress = _Progress(problem)
    messages = tuple(Message(**message) for message in problem.messages)
    if self._tools and self._describe_tools:
      description = tool_calls.format_tools({name: tool.schema for name, tool in self._tools.items()})
      messages = (Message(role='system', content=description), *messages)
    return messages, self._progress.info()

  def step(self, action: str | Mapping[str, Any]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """Take one reply of the policy.

    Raises:
      ResetNeeded: no episode is running.
      TypeError: the action is neither text nor such a dict.
    """
    if self._progress is None:
      raise gymnasium.error.ResetNeeded('step() without a running episode: it has ended or never begun; call reset() first.')
    if action not in self.action_space:
      raise TypeError(f'action must be text or {{"content": text, "truncated": bool}}, got {action!r:.200}.')
    text, is_cut = (action, False) if isinstance(action, str) else (action['content'], action.get('truncated', False))
    self._progress = replace(self._progress, turn=self._progress.turn + 1)
    parsed = tool_calls.parse(text)
    if is_cut:  # a call in it may lack its end, so none is run
      return self._end((), Outcome.LENGTH, self._verify(parsed.content))
    is_call = bool(self._tools and (parsed.calls or parsed.errors))
    is_last = self._progress.turn >= self.domain.max_turns
    if is_call and is_last and self.domain.make_session is None:  # no reply could follow, and results change no state
      return self._end((), Outcome.TURNS, Verdict(0.0, Reason.TRUNCATED))
    messages: list[Message] = []
    try:
      if is_call:
        self._call(parsed, messages)
      is_answer = not is_call and not self._act(parsed.content, messages)
    except EnvironmentFailure as error:
      _logger.warning('%s: a tool failed: %s', self._progress.problem.id, error)
      return self._end(tuple(messages), Outcome.ENV_ERROR, None)
    if is_answer:
      return self._end((), Outcome.OK, self._verify(parsed.content))
    return self._go_on(tuple(messages), parsed.content, is_last)

  def close(self) -> None:
    """End the episode, if one is running, and release its tools; may be called at any time."""
    tools, self._tools, self._session, self._progress = self._tools, {}, None, None
    for tool in tools.values():
      try:
        tool.close()
      except Exception:  # the boundary to the tools' code: one that fails to close must not keep the others open
        _logger.warning('tool %r did not close', tool.name, exc_info=True)

  def _choose_problem(self, options: dict[str, Any]) -> Problem:
    unknown = set(options) - set(_OPTIONS)
    if unknown or ('problem' in options and len(options) > 1):
      raise ValueError(f'options {sorted(options)}: allowed are problem alone, or any of {", ".join(_OPTIONS[1:])}.')
    if 'problem' in options:
      problem = options['problem']
      if not isinstance(problem, Problem) or problem.domain != self.domain.name:
        raise ValueError(f'options["problem"]={problem!r:.200} is not a problem of domain {self.domain.name!r}.')
      return problem
    level = options['level'] if 'level' in options else 1 + int(self.np_random.integers(self.domain.source.num_levels))
    index = options['index'] if 'index' in options else int(self.np_random.integers(_MAX_INDEX))
    has_training = self.domain.source.size('train', level) != 0
    return self.domain.problem(options.get('split', 'train' if has_training else 'heldout'), level, index)

  def _go_on(self, messages: Observation, reply: str, is_last: bool) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """Return what a step returns after a reply that was not the last of its own accord, unless the session or the turns are over."""
    try:
      is_over, parts = self._session.is_over, self._session.parts()
      check_parts(parts)
    except Exception:  # the boundary to the domain's code, as in `_verify`
      _logger.warning('%s: the session raised', self._progress.problem.id, exc_info=True)
      return self._end((), Outcome.OK, Verdict(None, Reason.VERIFIER_ERROR))
    if is_over or is_last:
      return self._end((), Outcome.OK if is_over else Outcome.TURNS, self._verify(reply))
    return messages, 0.0, False, False, self._progress.info(parts=parts)

  def _call(self, parsed: tool_calls.Parsed, messages: list[Message]) -> None:
    """Run a reply's calls and append what answers them; EnvironmentFailure if a tool failed."""
    for call in parsed.calls:
      messages.append(self._run(call))
    messages.extend(self._observe(f'Error: {error}', is_error=True) for error in parsed.errors)

  def _act(self, reply: str, messages: list[Message]) -> bool:
    """Give the session a reply without calls and append what it shows; return whether that was a move and not the last reply."""
    try:
      shown = self._session.act(reply)
    except ToolError as error:
      shown = f'Error: {error}'
    except EnvironmentFailure:
      raise
    except Exception as error:  # the boundary to the domain's code: what a session does not declare is its failure, not the policy's
      raise EnvironmentFailure(f'the session raised {error!r}') from error
    if not isinstance(shown, str | None):
      raise EnvironmentFailure(f'the session showed {type(shown).__name__}, expected text')
    if shown is None:
      return False
    messages.append(Message(role='user', content=self._harmless(shown)))
    return True

  def _run(self, call: tool_calls.ToolCall) -> Message:
    """Return the message that answers a call; EnvironmentFailure if the tool failed rather than the policy."""
    tool = self._tools.get(call.name)
    if tool is None:
      return self._observe(f'Error: there is no tool {call.name[:100]!r}; the tools are {", ".join(self._tools)}.', is_error=True)
    arguments = tool_calls.coerce(call.arguments, tool.schema) if call.is_untyped else dict(call.arguments)
    wrong = tool_calls.validate(arguments, tool.schema)
    if wrong is not None:
      return self._observe(f'Error: bad_arguments: {wrong}', tool.name, is_error=True)
    try:
      result = tool.call(arguments)
    except ToolError as error:
      return self._observe(f'Error: {error}', tool.name, is_error=True)
    except EnvironmentFailure:
      raise
    except Exception as error:  # the boundary to the tools' code: what a tool does not declare is its failure, not the policy's
      raise EnvironmentFailure(f'tool {tool.name!r} raised {error!r}') from error
    if not isinstance(result, str):
      raise EnvironmentFailure(f'tool {tool.name!r} returned {type(result).__name__}, expected text')
    return self._observe(result, tool.name)

  def _observe(self, content: str, name: str = '', is_error: bool = False) -> Message:
    """Count a call and return its result as the policy sees it."""
    progress = self._progress
    self._progress = replace(progress, num_tool_calls=progress.num_tool_calls + 1, num_tool_errors=progress.num_tool_errors + is_error)
    message = Message(role='tool', content=self._harmless(content))
    if name:
      message['name'] = name
    return message

  def _harmless(self, content: str) -> str:
    return _clip(tool_calls.neutralize(content), self._max_observation_chars)

  def _verify(self, reply: str) -> Verdict:
    """Return the session's verdict on the last reply, with the parts of its state."""
    problem = self._progress.problem
    try:
      verdict = self._session.verify(reply)
      if isinstance(verdict, Verdict) and verdict.is_valid:
        verdict = replace(verdict, parts={**self._session.parts(), **verdict.parts})
    except Exception:  # the boundary to the verifiers' code: one that raises has failed, and its failure must not become a score
      _logger.warning('%s: the verifier raised', problem.id, exc_info=True)
      return Verdict(None, Reason.VERIFIER_ERROR)
    if not isinstance(verdict, Verdict):
      _logger.warning('%s: the verifier returned %s, expected a Verdict', problem.id, type(verdict).__name__)
      return Verdict(None, Reason.VERIFIER_ERROR)
    return verdict

  def _end(self, messages: Observation, outcome: Outcome, verdict: Verdict | None) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
    """End the episode; `outcome` says what ended it, an invalid verdict makes it VERIFIER_ERROR."""
    is_truncated = outcome != Outcome.OK
    if verdict is not None and not verdict.is_valid:
      outcome = Outcome.VERIFIER_ERROR
    reward = float(verdict.score) if verdict is not None and verdict.is_valid else 0.0
    info = self._progress.info(outcome, verdict)
    self.close()
    return messages, reward, not is_truncated, is_truncated, info


def _clip(text: str, max_chars: int) -> str:
  """Return at most max_chars of a text: its two ends around a visible mark where it is longer."""
  if len(text) <= max_chars:
    return text
  mark = f'\n[... {len(text)} characters, the middle is cut ...]\n'
  kept = max_chars - len(mark)
  return text[:kept - kept // 2] + mark + text[len(text) - kept // 2:]
