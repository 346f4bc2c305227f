"""Preference rows: what each kind means, what teaches nothing and is counted, what is refused, splits and order."""

import collections
import json

import numpy as np
import pytest

from rl.data.preferences import PreferenceFiles, Preferences

PAIR = {'prompt': 'Say a', 'chosen': 'a', 'rejected': 'b'}


def write(path, rows):
  path.write_text(''.join((row if isinstance(row, str) else json.dumps(row)) + '\n' for row in rows), encoding='utf-8')
  return str(path)


def load(tmp_path, rows, *, kept_apart=False, singles=False, **settings):
  settings = {'heldout_fraction': 0.0} | settings
  return Preferences(PreferenceFiles((write(tmp_path / 'rows.jsonl', rows),), **settings), kept_apart=kept_apart, singles=singles)


def test_a_row_is_a_prompt_and_its_replies(tmp_path):
  turns = [{'role': 'user', 'content': 'é?'}, {'role': 'assistant', 'content': 'yes'}, {'role': 'user', 'content': 'Say a'}]
  tool = [{'role': 'assistant', 'content': 'look'}, {'role': 'tool', 'content': '1'}, {'role': 'assistant', 'content': 'a'}]
  rows = [PAIR, {'messages': turns, 'chosen': tool, 'rejected': 'b', 'other': 5}, {'prompt': 'x', 'completion': 'y', 'label': False}]
  with load(tmp_path, rows, singles=True) as data:
    first, second, third = (data[row] for row in range(3))
    assert first.prompt == ({'role': 'user', 'content': 'Say a'},)
    assert first.replies == (({'role': 'assistant', 'content': 'a'},), ({'role': 'assistant', 'content': 'b'},))
    assert second.prompt == tuple(turns) and second.replies[0] == tuple(tool)
    assert (first.preferences, first.weight, third.preferences, len(third.replies)) == ((1.0,), 1.0, (-1.0,), 1)
    assert second.source.endswith('rows.jsonl row 2') and data.max_replies == 2 and not data.left_out


def test_dimensions_are_weighed_together_or_kept_apart(tmp_path):
  def row(**dimensions):
    return {**PAIR, 'dimensions': dimensions}

  rows = [row(helpful=1.0, harmless=0.5), row(helpful=1.0, harmless=-1.0, other=9), row(helpful=2, harmless=-1.0), row(harmless=0.5), PAIR]
  weights = {'helpful': 1.0, 'harmless': 2.0}
  with load(tmp_path, rows, dimensions=weights) as data:
    # 1 + 2 x .5 agree; 1 - 2 x 1 = -1 of 3 in all, so the rejected one is better; 2 - 2 cancel; one speaks alone; one says nothing.
    assert [data[row].weight for row in range(3)] == [1.0, pytest.approx(1 / 3), 1.0]
    assert [data[row].preferences[0] for row in range(3)] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert [data[row].replies[0][0]['content'] for row in range(3)] == ['a', 'b', 'a']
    assert data.left_out == {'the dimensions cancel each other': 1, 'no preference in any of the dimensions': 1}
  with load(tmp_path, rows, dimensions=weights, kept_apart=True) as data:
    # In the order of the names.
    assert [data[row].preferences for row in range(4)] == [(0.5, 1.0), (-1.0, 1.0), (-1.0, 2.0), (0.5, 0.0)]
    assert [data[row].weight for row in range(4)] == [1.0] * 4 and data.left_out.total() == 1
  with load(tmp_path, rows) as data:
    assert [data[row].preferences for row in range(5)] == [(1.0,)] * 5


BAD = [
    ({'prompt': 'x', 'chosen': 'a'}, 'a side is missing'),
    ({'prompt': 'x', 'rejected': 'a', 'chosen': None}, 'a side is missing'),
    ({'prompt': 'x', 'rejected': ' ', 'chosen': 'a'}, 'a side is missing'),
    ({'prompt': 'x', 'rejected': [], 'chosen': 'a'}, 'a side is missing'),
    ({'prompt': 'x', 'completion': 'a'}, 'a side is missing'),
    ({'prompt': 'x', 'chosen': 'a', 'rejected': 'a'}, 'the replies are equal'),
    ({'prompt': 'x', 'chosen': 'a', 'rejected': [{'role': 'assistant', 'content': 'a'}]}, 'the replies are equal'),
    ({**PAIR, 'dimensions': {'helpful': float('nan'), 'harmless': 1.0}}, 'a label is not a finite number'),
    ({**PAIR, 'dimensions': {'helpful': -float('inf')}}, 'a label is not a finite number'),
    ({'prompt': 'x', 'completion': 'a', 'label': float('nan')}, 'a label is not a finite number'),
]


def test_rows_that_teach_nothing_are_counted_or_an_error(tmp_path):
  with load(tmp_path, [PAIR] + [row for row, _ in BAD], singles=True) as data:
    assert data.left_out == collections.Counter(why for _, why in BAD) and len(data.rows['train']) == 1
  for row, why in BAD:
    with pytest.raises(ValueError, match=rf'rows.jsonl row 2 teaches nothing: {why}'):
      load(tmp_path, [PAIR, row], singles=True, bad_rows='error')


@pytest.mark.parametrize('row, message', [
    ('', 'row 2: not JSON in UTF-8'),
    ('[]', 'row 2: the row must be a JSON object, got list'),
    ({'chosen': 'a', 'rejected': 'b'}, 'row 2: the row must have either "prompt" or "messages", got \'chosen\', \'rejected\''),
    ({'prompt': 'x', 'text': 'b'}, 'must have either "chosen" and "rejected", or "completion" and "label"'),
    ({'prompt': 'x', 'chosen': 'a', 'rejected': 'b', 'label': True}, 'must have either "chosen" and "rejected", or "completion"'),
    ({'prompt': 'x', 'chosen': 5, 'rejected': 'b'}, r'row 2, chosen: messages\[1\].content must be a string, got a number'),
    ({'prompt': ' ', 'chosen': 'a', 'rejected': 'b'}, r'row 2, chosen: messages\[0\].content must not be blank'),
    ({'messages': 'x', 'chosen': 'a', 'rejected': 'b'}, '"messages" must be a list of messages, got str'),
    ({'prompt': 'x', 'chosen': 'a', 'rejected': [{'role': 'user', 'content': 'b'}, {'role': 'assistant', 'content': 'b'}]},
     "row 2, rejected: the reply begins with role 'user'"),
    ({**PAIR, 'dimensions': {'helpful': True}}, "dimensions={'helpful': True} must be an object of numbers"),
    ({'prompt': 'x', 'completion': 'a', 'label': 1}, 'label=1 must be true or false'),
    ({'prompt': 'x', 'completion': 'a', 'label': True}, 'has one reply and a label, and this loss compares two'),
])
def test_rows_that_are_no_such_thing_are_refused(tmp_path, row, message):
  with pytest.raises(ValueError, match=message):
    load(tmp_path, [PAIR, row])


def test_files_that_give_nothing_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match='nowhere.jsonl'):
    Preferences(PreferenceFiles((str(tmp_path / 'nowhere.jsonl'),)), kept_apart=False, singles=False)
  with pytest.raises(ValueError, match='has no rows; give it at least one'):
    load(tmp_path, [])
  with pytest.raises(ValueError, match=r"have no row to train on: 0 are held out, left out were .*'a side is missing': 1"):
    load(tmp_path, [BAD[0][0]])
  with pytest.raises(ValueError, match='must end in .jsonl'):
    Preferences(PreferenceFiles((write(tmp_path / 'rows.txt', [PAIR]),)), kept_apart=False, singles=False)
  for broken, message in (({'dimensions': {'helpful': 0.0}}, 'must all have a positive, finite weight'),
                          ({'heldout_fraction': 1.0}, 'heldout_fraction=1.0 must be at least 0 and below 1')):
    with pytest.raises(ValueError, match=message):
      PreferenceFiles(('x.jsonl',), **broken)
  with pytest.raises(TypeError, match='must be a tuple of strings, not one string'):
    PreferenceFiles('x.jsonl')


def many(count=60):
  # Three rows for each prompt.
  return [{'prompt': f'prompt {number // 3}', 'chosen': f'{number} yes', 'rejected': 'no'} for number in range(count)]


def test_prompts_are_on_one_side_and_every_row_comes_once_an_epoch(tmp_path):
  with load(tmp_path, many(), heldout_fraction=0.3) as data:
    prompts = {split: {data[row].prompt[0]['content'] for row in rows} for split, rows in data.rows.items()}
    assert not prompts['train'] & prompts['heldout'] and len(prompts['train'] | prompts['heldout']) == 20 and len(prompts['heldout']) > 2
    size = len(data.rows['train'])
    epochs = [[data.at(epoch * size + index, seed=7) for index in range(size)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == data.rows['train'].tolist() and epochs[0] != epochs[1]
    assert epochs[0] != [data.at(index, seed=8) for index in range(size)]
    fingerprint = data.fingerprint
  with load(tmp_path, many()[::-1], heldout_fraction=0.3) as data:
    assert {data[row].prompt[0]['content'] for row in data.rows['heldout']} == prompts['heldout'] and data.fingerprint != fingerprint


def test_the_other_prompt_is_another_one_of_the_same_split(tmp_path):
  with load(tmp_path, many(), heldout_fraction=0.3) as data:
    for rows in data.rows.values():
      for row in rows:
        assert data.other_prompts[row] in rows and data[data.other_prompts[row]].prompt != data[row].prompt
    last = data.rows['train'][-1]
    assert data.other_prompts[last] == data.rows['train'][0]
  with load(tmp_path, [PAIR, PAIR]) as data:
    np.testing.assert_array_equal(data.other_prompts, [-1, -1])


def test_halves_are_of_prompts_and_cross_the_splits(tmp_path):
  with load(tmp_path, many(600), heldout_fraction=0.5) as data:
    halves = data.is_second_half.reshape(-1, 3)
    assert (halves == halves[:, :1]).all() and 70 < halves[:, 0].sum() < 130
    for rows in data.rows.values():
      assert 0.35 < data.is_second_half[rows].mean() < 0.65
  with load(tmp_path, many(600)[::-1], heldout_fraction=0.5) as data:
    np.testing.assert_array_equal(data.is_second_half.reshape(-1, 3), halves[::-1])


def test_a_file_that_changes_is_noticed(tmp_path):
  with load(tmp_path, [PAIR, PAIR]) as data:
    with open(tmp_path / 'rows.jsonl', 'a') as file:
      file.write('\n')
    with pytest.raises(RuntimeError, match='rows.jsonl has changed since it was checked'):
      data[0]
