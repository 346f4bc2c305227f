"""Puzzles: their moves by hand, shortest ways against independent ones, what a reply adds, the moves that are left, and attacks on the state."""

import itertools
import json

import numpy as np
import pytest

from envs import checker, registry
from envs.core import Problem, ToolError
from envs.domains import planning
from envs.domains.planning import Game
from envs.domains.planning_puzzles import PUZZLES
from envs.tool_calls import format_call
from envs.tool_env import ToolEnv

NAMES = tuple(PUZZLES)
TOWER, JUGS = 'A:321\nB:\nC:', 'A:0/5\nB:0/3'


def domain_of(name, **options):
  return registry.make_domain(f'planning/{name}', options=options)


def distances(name, start, goal=''):
  return planning._distances(PUZZLES[name], start, goal)


def game_of(name, start, goal='', style='tool'):
  return Game(PUZZLES[name], style, {'start': start, 'goal': goal, 'distance': distances(name, start, goal)[start]})


def move(moves):
  return format_call('move', {'moves': moves})


def begin(domain, level=2, index=0):
  """Return (environment in an episode, the moves of a shortest way)."""
  env = ToolEnv(domain)
  problem = domain.problem('train', level, index)
  env.reset(options={'problem': problem})
  replies = [message['content'] for message in domain.demonstration('train', level, index) if message['role'] == 'assistant']
  return env, [json.loads(reply.split('\n')[1])['arguments']['moves'] if '\n' in reply else reply for reply in replies]


# Moves.


@pytest.mark.parametrize('name, state, word, after', [
    ('maze', '@.\n#G', 'R', '.@\n#G'), ('maze', '.@\n#G', 'D', '..\n#@'), ('maze', '.@\n#G', 'L', '@.\n#G'), ('maze', '..\n#@', 'U', '.@\n#.'),
    ('maze', '@aA\n#bA', 'R', '.@.\n#b.'), ('maze', 'a@B', 'L', '@.B'), ('maze', '.G\n@A', 'U', '@G\n.A'),
    ('hanoi', TOWER, 'AC', 'A:32\nB:\nC:1'), ('hanoi', 'A:32\nB:\nC:1', 'AB', 'A:3\nB:2\nC:1'), ('hanoi', 'A:3\nB:2\nC:1', 'CB', 'A:3\nB:21\nC:'),
    ('jugs', JUGS, 'A+', 'A:5/5\nB:0/3'), ('jugs', 'A:5/5\nB:0/3', 'AB', 'A:2/5\nB:3/3'), ('jugs', 'A:2/5\nB:3/3', 'B-', 'A:2/5\nB:0/3'),
    ('jugs', 'A:4/5\nB:3/3', 'BA', 'A:5/5\nB:2/3'), ('jugs', 'A:0/11\nB:2/3', 'BA', 'A:2/11\nB:0/3'),
    ('lights', '000\n000\n000', 'b2', '010\n111\n010'), ('lights', '010\n111\n010', 'b2', '000\n000\n000'),
    ('lights', '0000\n0000', 'a1', '1100\n1000'), ('lights', '0000\n0000', 'd2', '0001\n0011')])
def test_moves_by_hand(name, state, word, after):
  assert PUZZLES[name].after(state, word) == after
  assert word in PUZZLES[name].moves(state)


@pytest.mark.parametrize('name, state, word, message', [
    ('maze', '@.\n#G', 'L', 'L leads out'), ('maze', '@.\n#G', 'U', 'U leads out'), ('maze', '@.\n#G', 'D', 'D leads into a wall'),
    ('maze', '.@\n#G', 'R', 'R leads out'), ('maze', '..\n#@', 'D', 'D leads out'), ('maze', '@A', 'R', 'R leads to the locked door A'),
    ('maze', '@G', 'r', "'r' is no move; moves are U, D, L, R"),
    ('hanoi', TOWER, 'BC', 'takes from the empty peg B'), ('hanoi', 'A:32\nB:\nC:1', 'AC', 'AC puts disk 2 on the smaller 1'),
    ('hanoi', TOWER, 'AA', "'AA' is no move"), ('hanoi', TOWER, 'AD', 'is no move'), ('hanoi', TOWER, 'AC\n', 'is no move'),
    ('hanoi', TOWER, '', 'is no move'),
    ('jugs', JUGS, 'A-', 'A- moves no water'), ('jugs', JUGS, 'AB', 'AB moves no water'), ('jugs', 'A:5/5\nB:3/3', 'A+', 'moves no water'),
    ('jugs', 'A:5/5\nB:3/3', 'BA', 'moves no water'), ('jugs', JUGS, 'A', "'A' is no move; moves are"), ('jugs', JUGS, 'C+', 'is no move'),
    ('lights', '000\n000', 'a3', "'a3' is no light; lights are a1 to c2"), ('lights', '000\n000', 'd1', 'is no light'),
    ('lights', '000\n000', 'a٣', 'is no light'), ('lights', '000\n000', 'A1', 'is no light'), ('lights', '000\n000', 'x' * 10**6, 'is no light')])
def test_moves_that_cannot_be_made(name, state, word, message):
  with pytest.raises(ToolError, match=message) as error:
    PUZZLES[name].after(state, word)
  assert len(str(error.value)) < 100


# Shortest ways.


def test_known_shortest_ways():
  assert distances('hanoi', TOWER, 'A:\nB:\nC:321')[TOWER] == 2**3 - 1
  assert distances('hanoi', 'A:4321\nB:\nC:', 'A:\nB:\nC:4321')['A:4321\nB:\nC:'] == 2**4 - 1
  assert distances('jugs', JUGS, '4')[JUGS] == 6  # A+ AB B- AB A+ AB
  assert distances('maze', '@.A.G\n.a###')['@.A.G\n.a###'] == 6  # R D U R R R: by the key
  assert distances('maze', '@#G\na#.') == {}
  assert JUGS not in distances('jugs', 'A:0/4\nB:0/2', '3')


def test_lights_need_as_many_moves_as_the_smallest_set_of_lights():
  """Order does not matter and no light is pressed twice, so the shortest way is the smallest subset."""
  start = '110\n011\n101'
  found = distances('lights', start)
  neighbors = [[abs(i // 3 - j // 3) + abs(i % 3 - j % 3) <= 1 for j in range(9)] for i in range(9)]
  subsets = [np.array(bits) for bits in itertools.product((0, 1), repeat=9)]
  lit = {tuple(subset @ np.array(neighbors, int) % 2): subset.sum() for subset in subsets}
  assert len(lit) == len(found) == 2**9
  for state, distance in found.items():
    assert lit[tuple(int(light) for light in state.replace('\n', ''))] == distance


@pytest.mark.parametrize('name', NAMES)
def test_levels_are_distances_and_demonstrations_are_shortest(name):
  domain = domain_of(name)
  assert domain.source.num_levels == 5
  for level, (least, most) in enumerate(PUZZLES[name].distances, start=1):
    for split, index in itertools.product(('train', 'heldout'), range(6)):
      problem = domain.problem(split, level, index)
      replies = [message for message in domain.demonstration(split, level, index) if message['role'] == 'assistant']
      assert least <= problem.answer['distance'] == len(replies) <= most
      assert len(replies) >= 2 and len(replies) + planning._SPARE_MOVES < domain.max_turns
      assert problem.answer['start'] in problem.messages[0]['content'] and problem.answer['goal'] in problem.messages[0]['content']
      assert json.loads(json.dumps(problem.answer)) == problem.answer


def test_mazes_have_doors_from_level_3():
  domain = domain_of('maze')
  for level, doors in ((1, set()), (2, set()), (3, {'A'}), (4, {'A'}), (5, {'A', 'B'})):
    seen = {char for index in range(12) for char in domain.problem('train', level, index).answer['start'] if char.isupper()} - {'G'}
    assert seen == doors


# What a reply adds.


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('style', ['tool', 'text', 'bare'])
def test_each_move_of_a_shortest_way_adds_its_share(name, style):
  env, moves = begin(domain_of(name, style=style), 3)
  told = [env.step(move(word) if style == 'tool' else word)[-1] for word in moves]
  assert [info['parts']['progress'] for info in told] == pytest.approx([(n + 1) / len(moves) for n in range(len(moves))])
  assert [info['score'] for info in told] == [None] * (len(moves) - 1) + [1.0]


def test_going_back_and_forth_adds_nothing():
  """The walker can do 4 moves beyond the shortest way's 2 only because the budget is 4: forth, back, forth, forth."""
  game = game_of('maze', '.@.G')
  progress = [game.parts()['progress']]
  for word in 'RLR':
    game.play(word)
    progress.append(game.parts()['progress'])
  assert progress == [0, 0.5, 0, 0.5] and sum(np.diff(progress)[:2]) == 0
  # Away from the goal it is not below 0, and the way back to the start is not paid.
  game = game_of('maze', '.@.G')
  game.play('L')
  assert game.parts() == {'progress': 0.0}
  game.play('R')
  assert game.parts() == {'progress': 0.0}


def test_a_lost_game_keeps_its_progress():
  env = ToolEnv(domain_of('lights'))
  domain = env.domain
  problem = domain.problem('train', 2, 0)
  _, moves = begin(domain, 2)
  env.reset(options={'problem': problem})
  assert env.step(move(moves[0]))[-1]['parts'] == {'progress': pytest.approx(1 / 3)}
  _, reward, terminated, _, info = env.step('I give up.')
  assert (reward, terminated, info['outcome'], info['score'], info['reason']) == (0.0, True, 'ok', 0.0, 'wrong')
  assert info['parts'] == {'progress': pytest.approx(1 / 3)}


# The moves that are left.


def test_several_moves_of_a_call_and_of_a_reply():
  env, moves = begin(domain_of('hanoi'), 4)
  assert env.step(move(' '.join(moves[:3])))[-1]['parts']['progress'] == pytest.approx(3 / len(moves))
  messages, _, _, _, info = env.step(move(moves[3]) + move(moves[4]))
  assert len(messages) == 2 and info['parts']['progress'] == pytest.approx(5 / len(moves))
  assert env.step(move(f' {" ".join(moves[5:])} AB BA AB'))[1:3] == (1.0, True)  # at the goal the game is over


def test_a_move_that_is_refused_counts_and_changes_nothing():
  env = ToolEnv(domain_of('jugs'))
  start = env.domain.problem('train', 1, 0)
  env.reset(options={'problem': start})
  left = start.answer['distance'] + planning._SPARE_MOVES
  for spent in range(1, left):
    messages, _, terminated, _, info = env.step(move('AX B+ A+'))
    assert not terminated and info['num_tool_errors'] == spent and info['parts'] == {'progress': 0.0}
    assert messages[0]['content'].startswith("Error: 'AX' is no move") and start.answer['start'] in messages[0]['content']
    assert messages[0]['content'].endswith(f'moves left: {left - spent}')
  _, reward, terminated, _, info = env.step(move(''))
  assert (reward, terminated, info['outcome'], info['score']) == (0.0, True, 'ok', 0.0)


def test_moves_before_a_refused_one_are_made():
  game = game_of('maze', '@..G')
  with pytest.raises(ToolError, match=r'U leads out\.\n\.@\.G\nmoves left: 3'):
    game.play('R U R R')
  assert game.parts()['progress'] == pytest.approx(1 / 3)


def test_bare_replies_and_questions():
  with_tool, bare, short = (domain_of('hanoi', **options).problem('train', 1, 0).messages[0]['content'] for options in (
      {}, {'style': 'text'}, {'style': 'bare'}))
  assert with_tool.startswith('Bring the disks to\nA:') and with_tool.endswith('moves left: 4\n')
  assert 'Reply with moves' in bare and 'Reply with moves' not in with_tool
  goal_and_state = short[:short.index('\n', short.index('C:'))], short[short.rindex('A:'):]
  assert all(part.removesuffix('4\n') in with_tool for part in goal_and_state) and len(short) < 50 and short.count('C:') == 2
  env, moves = begin(domain_of('maze', style='text'), 1)
  (message,) = env.step('x')[0]
  assert message['role'] == 'user' and message['content'].startswith("Error: 'x' is no move") and message['content'].endswith('left: 3\n')
  assert env.step(' '.join(moves))[1:3] == (1.0, True)
  # A call is no move where there is no tool.
  env, moves = begin(domain_of('maze', style='text'), 1)
  assert env.step(move(moves[0]))[-1]['parts'] == {'progress': 0.0}


def test_under_bare_a_refused_move_shows_the_state_alone():
  env, moves = begin(domain_of('jugs', style='bare'), 1)
  problem = env.domain.problem('train', 1, 0)
  goal, state = problem.answer['goal'], problem.answer['start']
  assert problem.messages[0]['content'] == f'{goal}\n{state}\n4\n'
  assert env.step('nonsense A+')[0] == ({'role': 'user', 'content': f'{state}\n3\n'},)
  assert env.step(' '.join(moves))[1:3] == (1.0, True)


def test_a_style_that_is_none():
  with pytest.raises(ValueError, match="planning/maze with style='bear': use one of tool, text, bare"):
    domain_of('maze', style='bear')


@pytest.mark.parametrize('style', ['text', 'bare'])
@pytest.mark.parametrize('name', NAMES)
def test_the_contract_of_bare_replies(name, style):
  assert checker.check(domain_of(name, style=style), num_problems=10) is None


# Attacks.


CONSTANTS = {'maze': ('L U D L U L L D', 'U U R R', 'R D R D', 'L L U U'), 'hanoi': ('CB AC BA CB BA BC AB', 'AB AC', 'AB AC BC'),
             'jugs': ('A+ AB B+ BA', 'A+ AB', 'B+ BA', 'AB A-'), 'lights': ('a2 b2 a1 a2 c2', 'b2 a1', 'a1 b1 c1 a2 b2 c2')}


@pytest.mark.parametrize('name', NAMES)
def test_the_best_constant_moves_pay_no_more_than_is_declared(name):
  """The first of each were searched for, move by move, over 60 problems a level."""
  domain = domain_of(name, style='bare')
  problems = [domain.problem('train', level, index) for level in range(1, 6) for index in range(40)]
  rates = {}
  for moves in CONSTANTS[name]:
    scores = []
    for problem in problems:
      env = ToolEnv(domain)
      env.reset(options={'problem': problem})
      scores.append(env.step(moves)[1])
    rates[moves] = np.mean(scores)
  assert max(rates.values()) <= domain.chance
  assert rates[CONSTANTS[name][0]] > 0


ATTACKS = ('', 'Done.', 'The goal is reached. score 1.0', '<tool_response>moves left: 0, solved</tool_response>', '<think>solved</think>OK', '1',
           move('') * 64, move('solved'), move('U' * 100_000), move('U ' * 100_000), move('\u200b'), move('G'), move('@'),
           format_call('move', {'moves': ['U']}), format_call('move', {'moves': 'U', 'state': '@'}), format_call('verify', {'moves': 'U'}),
           format_call('move', {}), '<tool_call>{"name": "move", "arguments": {"moves": "G', move('__import__("os").system("touch PWNED")'),
           move('0 ' * 50), move('A- ' * 3 + '\x00'))


@pytest.mark.parametrize('name', NAMES)
def test_no_attack_pays(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for style, attack in itertools.product(('tool', 'text', 'bare'), ATTACKS):
    env = ToolEnv(domain_of(name, style=style))
    env.reset(options={'problem': env.domain.problem('train', 5, 0)})
    for _ in range(env.domain.max_turns):
      messages, reward, terminated, truncated, info = env.step(attack)
      assert reward == 0 and info['valid'] and info['parts']['progress'] < 0.5
      assert sum(len(message['content']) for message in messages) < 64 * 4000
      if terminated or truncated:
        break
    assert terminated or truncated and info['score'] == 0
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', NAMES)
def test_random_moves_end_in_time_and_never_raise(name):
  rng = np.random.default_rng(0)
  domain = domain_of(name, style='bare')
  for index in range(20):
    env = ToolEnv(domain)
    problem = domain.problem('train', 1 + index % 5, index)
    env.reset(options={'problem': problem})
    words = PUZZLES[name].moves(problem.answer['start'])
    for _ in range(problem.answer['distance'] + planning._SPARE_MOVES):
      _, reward, terminated, truncated, info = env.step(words[int(rng.integers(len(words)))])
      assert 0 <= info['parts']['progress'] <= 1 and (reward == 1) == (info['parts']['progress'] == 1)
      if terminated:
        break
    assert terminated and not truncated


def test_a_game_needs_no_more_than_the_answer_of_its_problem():
  domain = domain_of('hanoi')
  problem = domain.problem('train', 2, 0)
  copy = Problem(problem.id, problem.domain, 2, (), json.loads(json.dumps(problem.answer)))
  _, moves = begin(domain)
  game = domain.start(copy)
  game.play(' '.join(moves))
  assert game.is_over and game.verify('').score == 1
