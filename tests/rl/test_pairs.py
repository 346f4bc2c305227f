"""Pairs from samples: which problems give one, which samples count, and when a demonstration stands in."""

import json

import numpy as np
import pytest

from envs.core import Outcome
from rl import pairs
from rl.data import preferences
from rl.types import Group, Trajectory


def sample(group, number, reward, reply='x', outcome=Outcome.OK, parts=(), system=()):
  messages = (*system, {'role': 'user', 'content': f'question {group}'}, {'role': 'assistant', 'content': reply, 'name': 'policy'})
  tokens_T = np.array([1, 2], np.int32)
  return Trajectory(
      tokens_T=tokens_T, loss_mask_T=np.array([False, True]), behavior_logprobs_T=np.array([np.nan, -1], np.float32),
      versions_T=np.array([-1, 0], np.int32), reward=reward, outcome=outcome, problem_id=f'toy/train/1/{group}', domain='toy', level=1,
      group=group, sample=number, terminated=True, truncated=False, num_turns=1, parts=dict(parts), messages=messages)


def group(number, *samples):
  return Group(f'toy/train/1/{number}', tuple(sample(number, place, *each) for place, each in enumerate(samples)))


def demonstrate(one):
  return ({'role': 'user', 'content': 'question'}, {'role': 'assistant', 'content': f'shown for {one.group}'})


def find(*groups, most=2, least=0, uses_cut_off=True):
  return pairs.find_pairs(groups, most=most, least=least, uses_cut_off=uses_cut_off, demonstrate=demonstrate)


def texts(found):
  return [(row['messages'][-1]['content'], row['chosen'][0]['content'], row['rejected'][0]['content']) for row in found.rows]


def test_right_against_wrong_in_the_order_of_the_problems():
  found = find(group(2, (0, 'd'), (1, 'c')), group(1, (1, 'a'), (0.5, 'b'), (0, 'b2'), (1, 'a2'), (1, 'a3'), (0, 'b3')))
  assert texts(found) == [('question 1', 'a', 'b'), ('question 1', 'a2', 'b2'), ('question 2', 'c', 'd')]
  assert found.problems == {'pair': 2} and found.samples == {'right': 4, 'wrong': 4}
  assert found.rows[0]['dimensions'] == {'correct': 0.5} and found.rows[1]['dimensions'] == {'correct': 1.0}
  assert found.rows[0]['source'] == 'samples' and found.rows[0]['problem'] == 'toy/train/1/1'


def test_problems_whose_samples_agree_give_none():
  found = find(group(0, (1, 'a'), (1, 'b')), group(1, (0, 'a'), (0, 'b')), group(2, (None, '', Outcome.ENV_ERROR)))
  assert not found.rows
  assert found.report() == {'pairs': 0, 'pairs_by_source': {}, 'problems': {'all right': 1, 'all wrong': 1, 'no samples': 1},
                            'samples': {'right': 2, 'wrong': 2, 'failed': 1}}


@pytest.mark.parametrize('least, wanted', [(0, 1), (1, 1), (2, 2), (9, 3)])
def test_demonstrations_fill_up_to_a_number(least, wanted):
  found = find(group(0, (1, 'a'), (0, 'b')), group(1, (0, 'c'), (0, 'd')), group(2, (0, 'e')), group(3, (1, 'f')), least=least)
  assert texts(found) == [('question 0', 'a', 'b'), ('question 1', 'shown for 1', 'c'), ('question 2', 'shown for 2', 'e')][:wanted]
  assert [row['source'] for row in found.rows] == ['samples', 'demonstration', 'demonstration'][:wanted]
  assert found.problems['demonstration'] == wanted - 1 and found.problems['all wrong'] == 3 - wanted


def test_samples_that_cannot_be_shown():
  found = find(group(0, (1, 'a'), (0, ' \n')), group(1, (1, 'a'), (0, 'b', Outcome.LENGTH)), uses_cut_off=False)
  assert not found.rows and found.samples == {'right': 2, 'blank': 1, 'cut off': 1} and found.problems == {'all right': 2}
  assert texts(find(group(1, (1, 'a'), (0, 'b', Outcome.LENGTH)))) == [('question 1', 'a', 'b')]


def test_equal_replies_count_once():
  assert texts(find(group(0, (1, 'a'), (0, 'b'), (1, 'a'), (0, 'b')))) == [('question 0', 'a', 'b')]


def test_parts_become_dimensions_that_the_data_can_read():
  made = Group('toy/train/1/0', (sample(0, 0, 1.0, 'a', parts={'format': 1.0, 'recall': 1.0}, system=({'role': 'system', 'content': 's'},)),
                                 sample(0, 1, 0.0, 'b', parts={'format': 1.0, 'recall': 0.25}, system=({'role': 'system', 'content': 's'},))))
  row, = find(made).rows
  assert row['dimensions'] == {'format': 0.0, 'recall': 0.75, 'correct': 1.0}
  read = preferences.parse(json.dumps(row).encode(), 'row 1')
  assert [message['content'] for message in read.prompt] == ['s', 'question 0']
  assert [reply[0]['content'] for reply in read.replies] == ['a', 'b'] and read.dimensions == row['dimensions']
