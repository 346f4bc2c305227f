"""Planning in several turns: puzzles whose end state is verified and whose every reply is scored by how far it came.

The policy makes one or several moves and is shown the state they lead to. The episode is over at the goal, or when the moves are used up: as
many as the shortest way takes and a few more. The outcome is 1 at the goal and else 0; the part 'progress' is 1 - (moves that are left at
best) / (moves at the start), at least 0, exact by search over all states. It is a function of the state, so what is gained by a step is lost
by the step back, and no going round in circles is paid (see `core.Session`).

How moves are made is an option of every domain: `style` is 'tool' (the tool `move`), 'text' (a reply is nothing but moves), or 'bare', which
is 'text' without rules and explanations, some dozen bytes a turn, for models too small to read them.

Deliberately absent: partial outcomes, and a price for moves beyond the shortest way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, Literal, get_args

import numpy as np

from envs.core import Domain, Generated, Message, Reason, Session, Task, ToolError, Verdict
from envs.domains.planning_puzzles import PUZZLES, Puzzle
from envs.tool_calls import format_call

Style = Literal['tool', 'text', 'bare']

_SPARE_MOVES = 2
_SPARE_TURNS = 2  # for replies that make no move


def maze(*, style: Style = 'tool') -> Domain:
  """Make the domain of mazes, with a key and a door from level 3 and two from level 5."""
  return _domain('maze', style, chance=0.07)


def hanoi(*, style: Style = 'tool') -> Domain:
  """Make the domain of towers of Hanoi, from any towers to any others, of three disks and from level 5 of four."""
  return _domain('hanoi', style, chance=0.08)


def jugs(*, style: Style = 'tool') -> Domain:
  """Make the domain of two water jugs."""
  return _domain('jugs', style, chance=0.14)


def lights(*, style: Style = 'tool') -> Domain:
  """Make the domain of lights out on boards of eight to ten lights."""
  return _domain('lights', style, chance=0.05)


def _domain(name: str, style: Style, chance: float) -> Domain:
  if style not in get_args(Style):
    raise ValueError(f'planning/{name} with style={style!r}: use one of {", ".join(get_args(Style))}.')
  puzzle, full_name = PUZZLES[name], f'planning/{name}'
  source = Generated(full_name, 1, functools.partial(_task, puzzle, style), len(puzzle.distances))
  return Domain(full_name, 1, source, make_session=lambda problem: Game(puzzle, style, problem.answer), chance=chance,
                max_turns=puzzle.distances[-1][1] + _SPARE_MOVES + _SPARE_TURNS)


class Game(Session):
  """One episode: a state, what moves are left, and how far the goal is."""

  def __init__(self, puzzle: Puzzle, style: Style, answer: Mapping[str, Any]):
    """Begin at the start that a problem's answer tells, with its goal and the distance between them."""
    self._puzzle, self._start, self._goal, self._distance = puzzle, answer['start'], answer['goal'], answer['distance']
    self._state, self._num_left = self._start, self._distance + _SPARE_MOVES
    self._style = style
    self.tools = (MoveTool(self.play),) if style == 'tool' else ()

  @property
  def is_over(self) -> bool:
    return self._is_solved or not self._num_left

  @property
  def _is_solved(self) -> bool:
    return self._puzzle.is_solved(self._state, self._goal)

  def act(self, reply: str) -> str | None:
    """Take a reply as moves, where there is no tool for them."""
    return None if self.tools else self.play(reply)

  def play(self, moves: str) -> str:
    """Make moves, words with spaces between them, until the game is over; return what is shown then.

    Raises:
      ToolError: there is no move, or one cannot be made. It counts, those before it are made, and those after it are not. Under 'bare' it is
        not raised: the state alone is shown.
    """
    for move in moves.split() or ['']:
      if self.is_over:
        break
      self._num_left -= 1
      try:
        self._state = self._puzzle.after(self._state, move)
      except ToolError as error:
        if self._style == 'bare':
          break
        raise ToolError(f'{error}\n{self.show()}') from None
    return self.show()

  def parts(self) -> Mapping[str, float]:
    """Return the progress, 0 where the goal is as far as at the start, or farther."""
    distances = _distances(self._puzzle, self._start, self._goal)
    return {'progress': max(0.0, 1 - distances.get(self._state, self._distance) / self._distance)}

  def verify(self, reply: str) -> Verdict:
    """Return 1 at the goal and else 0, whatever the reply says."""
    return Verdict(1.0, Reason.OK, parsed=self._state) if self._is_solved else Verdict(0.0, Reason.WRONG, parsed=self._state)

  def show(self) -> str:
    """Return the state and the number of moves that are left; without a tool as lines, since templates set only results of tools apart."""
    label, end = '' if self._style == 'bare' else 'moves left: ', '' if self.tools else '\n'
    return f'{self._state}\n{label}{self._num_left}{end}'


class MoveTool:
  """The tool that makes moves of a game."""
  name = 'move'
  schema: Mapping[str, Any] = {
      'type': 'object', 'description': 'Make one move or several, with spaces between them. Returns what they lead to.',
      'properties': {'moves': {'type': 'string'}}, 'required': ['moves'], 'additionalProperties': False}

  def __init__(self, play: Callable[[str], str]):
    """Take what makes moves."""
    self._play = play

  def call(self, arguments: Mapping[str, Any]) -> str:
    """Make the moves in `arguments['moves']`."""
    return self._play(arguments['moves'])

  def close(self) -> None:
    """Do nothing: there is nothing to release."""


def _task(puzzle: Puzzle, style: Style, rng: np.random.Generator, level: int) -> Task:
  least, most = puzzle.distances[level - 1]
  starts: list[str] = []
  while not starts:
    drawn, goal = puzzle.draw(rng, level)
    distances = _distances(puzzle, drawn, goal)
    starts = sorted(state for state, distance in distances.items() if least <= distance <= most)
  start = starts[int(rng.integers(len(starts)))]
  answer = {'start': start, 'goal': goal, 'distance': distances[start]}
  game = Game(puzzle, style, answer)
  question = f'{_rules(puzzle, style, goal)}{game.show()}'
  return Task(f'{question.rstrip()}\n', answer, _demonstration(game, _shortest_way(puzzle, start, distances)), f'{start}|{goal}')


def _rules(puzzle: Puzzle, style: Style, goal: str) -> str:
  """Return what a question says before the state."""
  if style == 'bare':
    return f'{goal}\n' if goal else ''
  rules = puzzle.rules.format(goal=goal)
  return f'{rules}\n\n' if style == 'tool' else f'{rules} Reply with moves and spaces between them, nothing else.\n\n'


def _shortest_way(puzzle: Puzzle, state: str, distances: Mapping[str, int]) -> list[str]:
  way = []
  while distances[state]:
    move, state = next((move, after) for move, after in _steps(puzzle, state) if distances.get(after) == distances[state] - 1)
    way.append(move)
  return way


def _demonstration(game: Game, moves: Sequence[str]) -> tuple[Message, ...]:
  """Return the conversation that makes one move a reply."""
  messages: list[Message] = []
  for move in moves:
    shown = game.play(move)
    if game.tools:
      messages += [{'role': 'assistant', 'content': format_call(MoveTool.name, {'moves': move})},
                   {'role': 'tool', 'name': MoveTool.name, 'content': shown}]
    else:
      messages += [{'role': 'assistant', 'content': move}, {'role': 'user', 'content': shown}]
  return tuple(messages[:-1])  # The last move ends the episode.


def _steps(puzzle: Puzzle, state: str) -> list[tuple[str, str]]:
  """Return (move, where it leads) of each move that can be made."""
  steps = []
  for move in puzzle.moves(state):
    try:
      steps.append((move, puzzle.after(state, move)))
    except ToolError:
      continue
  return steps


@functools.lru_cache(maxsize=256)  # The samples of a group play the same game.
def _distances(puzzle: Puzzle, start: str, goal: str) -> Mapping[str, int]:
  """Return how many moves the goal takes from every state that can be reached from the start and can still reach it."""
  sources: dict[str, list[str]] = {start: []}  # state -> the states one move before it
  waiting, distances = deque([start]), {}
  while waiting:
    state = waiting.popleft()
    if puzzle.is_solved(state, goal):
      distances[state] = 0
      continue
    for _, after in _steps(puzzle, state):
      if after not in sources:
        sources[after] = []
        waiting.append(after)
      sources[after].append(state)
  waiting.extend(distances)
  while waiting:
    state = waiting.popleft()
    for before in sources[state]:
      if before not in distances:
        distances[before] = distances[state] + 1
        waiting.append(before)
  return distances
