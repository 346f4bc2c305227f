"""Four puzzles as plain functions over states that are text: a maze with keys and doors, towers of Hanoi, water jugs, lights out.

A state is what the policy is shown, so nothing is hidden and nothing is drawn twice. Every puzzle is small enough for all of its states to be
searched. Levels differ in how far the start is from the goal (`distances`), in moves of the shortest way, and in size.

Deliberately absent: chance, opponents, and what the policy cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
import functools
import itertools
import re

import numpy as np

from envs.core import ToolError


@dataclass(frozen=True)
class Puzzle:
  """A puzzle, in terms of its states and of goals, which are text.

  Attributes:
    name: of the domain, after 'planning/'.
    rules: what moves there are and what is wanted; {goal} stands for the goal.
    distances: level -> least and most moves from a start to the goal; the first is level 1.
    draw: (generator, level) -> a state from which starts are reached, and a goal, which may be out of reach.
    moves: (state) -> the words that can be moves in it.
    after: (state, move) -> the next state; ToolError says why there is none.
    is_solved: (state, goal) -> whether the goal is reached.
  """
  name: str
  rules: str
  distances: tuple[tuple[int, int], ...]
  draw: Callable[[np.random.Generator, int], tuple[str, str]]
  moves: Callable[[str], Sequence[str]]
  after: Callable[[str, str], str]
  is_solved: Callable[[str, str], bool]


def _choice(rng: np.random.Generator, values: Sequence) -> object:
  return values[int(rng.integers(len(values)))]


# Maze: rows of cells. @ is the walker, G the goal, # a wall, a small letter a key and its capital a door.

_MAZES = ((4, 0), (5, 0), (5, 1), (6, 1), (7, 2))  # level -> rows and columns, doors
_WALLS = 0.2


def _draw_maze(rng: np.random.Generator, level: int) -> tuple[str, str]:
  size, num_doors = _MAZES[level - 1]
  grid = np.where(rng.random((size, size)) < _WALLS, '#', '.')
  # Walls from edge to edge, with the doors in them; the goal is behind the last, each key before its own.
  walls = sorted(int(n) for n in rng.choice(np.arange(1, size - 1, 2), num_doors, replace=False))
  rooms = list(itertools.pairwise([-1, *walls, size]))
  for letter, column in zip('ab', walls):
    grid[:, column] = '#'
    grid[rng.integers(size), column] = letter.upper()

  def place(char: str, room: tuple[int, int]) -> None:
    free = [(row, column) for row in range(size) for column in range(room[0] + 1, room[1]) if grid[row, column] not in 'abG@']
    grid[_choice(rng, free)] = char

  for char, room in zip('@ab'[:num_doors + 1], [rooms[0], *rooms]):
    place(char, room)
  place('G', rooms[-1])
  return '\n'.join(map(''.join, grid if rng.random() < 0.5 else grid.T)), ''


def _after_step(state: str, move: str) -> str:
  width = (state + '\n').index('\n') + 1
  steps = {'U': -width, 'D': width, 'L': -1, 'R': 1}
  if move not in steps:
    raise ToolError(f'{move[:20]!r} is no move; moves are {", ".join(steps)}.')
  here = state.index('@')
  there = here + steps[move]
  cell = state[there] if 0 <= there < len(state) else '\n'
  if cell in '\n#' or cell.isupper() and cell != 'G':
    raise ToolError(f'{move} leads {"out" if cell == chr(10) else "into a wall" if cell == "#" else f"to the locked door {cell}"}.')
  cells = list(state)
  cells[here], cells[there] = '.', '@'
  return ''.join(cells).replace(cell.upper(), '.') if cell.islower() else ''.join(cells)


# Hanoi: a peg a line, its disks from the lowest up; a larger digit is a larger disk.

_PEGS = 'ABC'


def _draw_hanoi(rng: np.random.Generator, level: int) -> tuple[str, str]:
  num_disks = 3 if level < 5 else 4

  def towers() -> str:
    places = rng.integers(len(_PEGS), size=num_disks)
    return '\n'.join(f'{peg}:{"".join(str(n) for n in range(num_disks, 0, -1) if places[n - 1] == number)}'
                     for number, peg in enumerate(_PEGS))

  return towers(), towers()


def _after_disk(state: str, move: str) -> str:
  pegs = dict(line.split(':') for line in state.split('\n'))
  if not re.fullmatch(f'[{_PEGS}]{{2}}', move) or move[0] == move[1]:
    raise ToolError(f'{move[:20]!r} is no move; moves are two different pegs, such as AC.')
  source, target = move
  if not pegs[source]:
    raise ToolError(f'{move} takes from the empty peg {source}.')
  disk = pegs[source][-1]
  if pegs[target] and pegs[target][-1] < disk:
    raise ToolError(f'{move} puts disk {disk} on the smaller {pegs[target][-1]}.')
  pegs |= {source: pegs[source][:-1], target: pegs[target] + disk}
  return '\n'.join(f'{peg}:{disks}' for peg, disks in pegs.items())


# Jugs: a jug a line, 'A:liters/capacity'.

_LARGEST_JUGS = (5, 7, 9, 9, 11)  # by level


def _draw_jugs(rng: np.random.Generator, level: int) -> tuple[str, str]:
  first, second = (int(n) for n in rng.choice(np.arange(2, _LARGEST_JUGS[level - 1] + 1), 2, replace=False))
  return f'A:0/{first}\nB:0/{second}', str(int(rng.integers(1, max(first, second))))


def _after_pour(state: str, move: str) -> str:
  jugs = {line[0]: [int(n) for n in line[2:].split('/')] for line in state.split('\n')}
  if not re.fullmatch(r'A[+\-B]|B[+\-A]', move):
    raise ToolError(f'{move[:20]!r} is no move; moves are A+ B+ A- B- AB BA.')
  (filled, capacity), way = jugs[move[0]], move[1]
  other, room = (jugs[way][0], jugs[way][1] - jugs[way][0]) if way in jugs else (0, filled)
  poured = filled - capacity if way == '+' else min(filled, room)
  if not poured:
    raise ToolError(f'{move} moves no water.')
  jugs[move[0]][0] = filled - poured
  if way in jugs:
    jugs[way][0] = other + poured
  return '\n'.join(f'{jug}:{liters}/{size}' for jug, (liters, size) in jugs.items())


def _is_measured(state: str, goal: str) -> bool:
  return any(line[2:].split('/')[0] == goal for line in state.split('\n'))


# Lights: rows of 1 (on) and 0. A light is named by its column's letter and its row's number.

_BOARDS = ((3, 3), (2, 4), (4, 2), (2, 5), (5, 2))  # rows and columns


def _draw_lights(rng: np.random.Generator, level: int) -> tuple[str, str]:
  num_rows, num_columns = _choice(rng, _BOARDS)
  # One light away from darkness, and so from every board that can be solved.
  return _after_press('\n'.join(['0' * num_columns] * num_rows), 'a1'), ''


@functools.cache
def _switches(num_rows: int, num_columns: int) -> Mapping[str, tuple[int, ...]]:
  """Return light -> the places in a state's text that it switches."""
  def place(row: int, column: int) -> int:
    return row * (num_columns + 1) + column

  lights = {}
  for row, column in itertools.product(range(num_rows), range(num_columns)):
    near = ((row, column), (row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
    lights[f'{chr(ord("a") + column)}{row + 1}'] = tuple(place(y, x) for y, x in near if 0 <= y < num_rows and 0 <= x < num_columns)
  return lights


def _switches_of(state: str) -> Mapping[str, tuple[int, ...]]:
  return _switches(state.count('\n') + 1, state.index('\n'))


def _after_press(state: str, move: str) -> str:
  switches = _switches_of(state)
  if move not in switches:
    raise ToolError(f'{move[:20]!r} is no light; lights are a1 to {[*switches][-1]}.')
  cells = list(state)
  for place in switches[move]:
    cells[place] = '0' if cells[place] == '1' else '1'
  return ''.join(cells)


PUZZLES = {puzzle.name: puzzle for puzzle in (
    Puzzle('maze', 'Lead @ to G. U, D, L and R are steps; # is a wall, stepping on a key opens the door of its capital.',
           ((2, 2), (3, 5), (6, 8), (8, 11), (11, 16)), _draw_maze, lambda state: 'UDLR', _after_step,
           lambda state, goal: 'G' not in state),
    Puzzle('hanoi', 'Bring the disks to\n{goal}\nAC moves the last disk of A to C, never onto a smaller one.',
           ((2, 2), (3, 3), (4, 5), (6, 7), (8, 15)), _draw_hanoi,
           lambda state: tuple(map(''.join, itertools.permutations(_PEGS, 2))), _after_disk, lambda state, goal: state == goal),
    Puzzle('jugs', 'Measure {goal} liters in a jug. A+ fills A, A- empties it, AB pours A into B until A is empty or B full.',
           ((2, 2), (3, 3), (4, 5), (6, 7), (8, 12)), _draw_jugs, lambda state: ('A+', 'B+', 'A-', 'B-', 'AB', 'BA'), _after_pour,
           _is_measured),
    Puzzle('lights', 'Put all lights out. a1 switches the light of column a, row 1, and those beside, above and below it.',
           ((2, 2), (3, 3), (4, 4), (5, 5), (6, 7)), _draw_lights, lambda state: tuple(_switches_of(state)), _after_press,
           lambda state, goal: '1' not in state),
)}
