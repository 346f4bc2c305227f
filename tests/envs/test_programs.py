"""Programming tasks: what is asked, shown, hidden and solved agree, and files of tests become data without running them."""

from collections import Counter
import copy
import json
import logging

import numpy as np
import pytest

from envs.domains import programs
from envs.sandbox import client
from envs.verifiers import code
from envs.verifiers.code import CodeVerifier
from envs.verifiers.code_worker import decode, encode

PLACES = [(split, level, index) for split in ('train', 'heldout') for level in range(1, 6) for index in range(12)]


@pytest.fixture(scope='module')
def tasks():
  source = programs.generated().source
  return {place: source.task(*place) for place in PLACES}


@pytest.fixture(scope='module')
def verifier():
  with client.Sandbox(max_boxes=2) as sandbox:
    yield CodeVerifier(sandbox)


def solution(task):
  """Return the function of a task's demonstration."""
  namespace = {}
  exec(code.extract(task.demonstration[-1]['content']), namespace)
  return namespace[task.answer['entry']]


def operation(words, takes='ints'):
  found, = (operation for operation in programs._OPERATIONS if operation.takes == takes and operation.words.startswith(words))
  return found


@pytest.mark.parametrize('kinds', sorted(programs._TABLE), ids='-'.join)
def test_operations_do_what_their_source_does_on_every_probe(kinds):
  types = {'ints': list, 'words': list, 'text': str, 'int': int, 'bool': bool, 'counts': dict}
  for op in (op for op in programs._OPERATIONS if (op.takes, op.gives) == kinds):
    results = []
    for parameter in op.parameters or [None]:
      function = eval('lambda x: ' + op.source.replace('@', 'x').replace('#', str(parameter)))
      for value in programs._PROBES[op.takes]:
        before = copy.deepcopy(value)
        result = op.apply(value, parameter)
        assert value == before, op.words
        assert encode(result) == encode(function(value)), (op.words, parameter, value)
        assert type(result) is types[op.gives]
        results.append(repr(result))
    assert len(set(results)) > 1, op.words


def test_a_chain_by_hand():
  steps = ((operation('keep the even'), None), (operation('square every'), None), (operation('take the sum'), None),
           (operation('add #', 'int'), 7))
  assert programs._run(steps, [1, 2, -4, 3, 2]) == 4 + 16 + 4 + 7
  assert programs._run(steps, []) == 7
  assert programs._source('f', steps) == ('def f(xs):\n    xs = [v for v in xs if v % 2 == 0]\n    xs = [v * v for v in xs]\n'
                                          '    n = sum(xs)\n    return n + 7')
  text = ((operation('split it', 'text'), None), (operation('reverse each', 'words'), None), (operation('join them', 'words'), '-'))
  assert programs._run(text, ' ab  Cd e') == 'ba-dC-e'
  assert programs._results(((operation('list the integers', 'int'), None),), [3, 201]) is None


@pytest.mark.parametrize(('words', 'is_sound'), [
    (('keep the even', 'square every', 'take the sum'), True),
    (('sort the numbers in ascending', 'take the maximum (0'), False),  # the first step changes nothing
    (('take the absolute', 'square every'), False),
    (('reverse the order', 'take the sum'), False),
    (('negate every', 'take the sum'), True),
    (('keep the numbers less than', 'keep the numbers greater than', 'count the numbers'), False),  # almost always 0
])
def test_chains_that_their_cases_do_not_pin_down_are_no_tasks(words, is_sound):
  steps = [(operation(prefix), {'keep the numbers less than': -3, 'keep the numbers greater than': 9}.get(prefix)) for prefix in words]
  assert programs._is_sound('ints', steps, programs._PROBES['ints']) == is_sound


def test_the_reference_solves_the_hidden_cases_and_the_example_is_none_of_them(tasks):
  for task in tasks.values():
    function = solution(task)
    for args, expected in task.answer['cases']:
      assert code.matches(expected, json.loads(json.dumps(encode(function(*decode(args))))))
    example = task.question.split('Example: `')[1].split('`\n')[0]
    assert eval(example, {task.answer['entry']: function}) is True
    shown = eval(example.split(' == ')[0], {task.answer['entry']: lambda *args: list(args)})
    assert [encode(value) for value in shown] not in [args for args, _ in task.answer['cases']]


def test_a_hidden_case_is_never_the_example(monkeypatch):
  draws = iter([5, 6] * 25)
  monkeypatch.setattr(programs, '_draw', lambda rng, kind: next(draws))
  assert programs._example(np.random.default_rng(0), 'int', ((operation('square it', 'int'), None),), [5]) == 6


def test_constants_and_the_identity_fail(tasks):
  for task in tasks.values():
    cases = task.answer['cases']
    top = Counter(json.dumps(expected) for _, expected in cases).most_common(1)[0][1]
    assert top <= len(cases) * 2 // 3
    assert not all(code.matches(expected, args[0]) for args, expected in cases)


def test_edge_cases_are_hidden_cases(tasks):
  edges = {'xs': ([], [-4], [3, 3, 3], [-5, -2, -9]), 's': ('',), 'n': (0, -12), 'words': ([], ['noon', 'noon'])}
  for task in tasks.values():
    variable = task.question.split('(')[1].split(')')[0]
    given = [args[0] for args, _ in task.answer['cases']]
    assert all(edge in given for edge in edges[variable])
    assert len(given) >= 14


def test_tasks_are_those_of_their_place_short_and_plain(tasks):
  again = programs.generated()
  for place, task in tasks.items():
    split, level, index = place
    assert again.source.task(*place) == task
    assert again.problem(*place).messages[0]['content'] == task.question
    assert len(task.question) < 200 + 80 * level
    assert task.question.endswith('```python block.\n')
    assert task.question.count(', then ') == level - 1
    assert code.extract(task.demonstration[-1]['content']).count('\n') == level
    assert json.loads(json.dumps(task.answer)) == task.answer
  canonical = {split: {task.canonical for place, task in tasks.items() if place[0] == split} for split in ('train', 'heldout')}
  assert not canonical['train'] & canonical['heldout']


def test_two_ways_to_the_same_function_are_one_task():
  def canonical(*words):
    steps = [(operation(prefix), parameter) for prefix, parameter in words]
    return programs._task(np.random.default_rng(0), 'ints', steps, [[]], programs._results(steps, programs._PROBES['ints'])).canonical

  assert canonical(('sort the numbers in asc', None), ('reverse the', None)) == canonical(('sort the numbers in desc', None))
  assert canonical(('take the sum', None)) != canonical(('count the numbers', None))


def test_demonstrations_score_one_and_shortcuts_zero_in_boxes(tasks, verifier):
  domain = programs.generated()
  assert domain.needs_sandbox
  assert domain.verifier == CodeVerifier()
  for level in range(1, 6):
    problem, task = domain.problem('train', level, 0), tasks['train', level, 0]
    entry = task.answer['entry']
    assert verifier.verify(problem, task.demonstration[-1]['content']).score == 1.0
    example = task.question.split('Example: `')[1].split('`\n')[0].split(' == ')[1]
    for reply in (task.question, f'def {entry}(x): return x', f'def {entry}(x): return {example}', f'def {entry}(x): return None'):
      assert verifier.verify(problem, reply).score == 0.0, reply


MBPP = [
    {'task_id': 1, 'text': 'Add two numbers.', 'code': 'def add(a, b):\r\n  return a + b', 'test_setup_code': '',
     'test_list': ['assert add(1, 2) == 3', 'assert add(-1, 1)==0', 'assert add(2 * 3, 1.0) == 14 / 2'], 'challenge_test_list': []},
    {'task_id': 2, 'text': 'Tell even numbers.', 'code': 'def even(n):\n  return n % 2 == 0', 'test_setup_code': '',
     'test_list': ['assert (even(2)) is True', 'assert even(3) == False'], 'challenge_test_list': []},
    {'task_id': 3, 'text': 'Pair them.', 'code': 'def pair(a):\n  return {(1, 2): {3}, None: a[::-1]}', 'test_setup_code': '',
     'test_list': ['assert pair((1, "a")) == {(1, 2): {3}, None: ("a", 1)}', 'assert pair([]) == {(1, 2): {3}, None: []}']},
]
UNFIT = [
    {'task_id': 10, 'text': 'x', 'code': 'x', 'test_list': ['assert f(1) == 1', 'assert f(2) == g(2)']},  # not a literal
    {'task_id': 11, 'text': 'x', 'code': 'x', 'test_list': ['assert set(f(1)) == {1}']},
    {'task_id': 12, 'text': 'x', 'code': 'x', 'test_list': ['assert f(1)', 'assert not f(2)']},
    {'task_id': 13, 'text': 'x', 'code': 'x', 'test_list': ['assert f(x) == 1', 'assert f(2) == 2']},
    {'task_id': 14, 'text': 'x', 'code': 'x', 'test_list': ['assert f(1, k=2) == 1', 'assert f(2) == 2']},
    {'task_id': 15, 'text': 'x', 'code': 'x', 'test_list': ['assert 1 < f(1) < 3', 'assert f(2) == 2']},
    {'task_id': 16, 'text': 'x', 'code': 'x', 'test_list': ['assert m.f(1) == 1', 'assert f(2) == 2']},
    {'task_id': 17, 'text': 'x', 'code': 'x', 'test_list': ['assert f(1) == 1j', 'assert f(2) == 2']},
    {'task_id': 18, 'text': 'x', 'code': 'x', 'test_list': ['assert f(1) == 9 ** 9 ** 9', 'assert f(2) == 1 / 0']},
    {'task_id': 19, 'text': 'x', 'code': 'x', 'test_list': ['r = f(1)', 'assert r == 1']},
    {'task_id': 20, 'text': 'x', 'code': 'x', 'test_list': ['assert f(1) == 1', 'assert g(2) == 2']},
    {'task_id': 21, 'text': 'x', 'code': 'x', 'test_list': ['assert f(1) == 1', 'assert f(2) == 1']},  # a constant passes
]


def write_jsonl(path, rows):
  path.write_text('\n'.join(json.dumps(row) for row in rows) + '\n')
  return str(path)


def all_tasks(domain):
  return [domain.source.task(split, 1, index) for split in ('train', 'heldout') for index in range(domain.source.size(split, 1))]


def test_mbpp_reads_both_forms_alike(tmp_path):
  full = programs.mbpp(write_jsonl(tmp_path / 'mbpp.jsonl', MBPP))
  rows = [{**{key: row[key] for key in ('task_id', 'code', 'test_list')}, 'prompt': row['text'], 'test_imports': []} for row in MBPP]
  (tmp_path / 'sanitized.json').write_text(json.dumps(rows, indent=2))
  sanitized = programs.mbpp(str(tmp_path / 'sanitized.json'))
  assert full.name == 'programs/mbpp'
  assert sorted(all_tasks(full), key=repr) == sorted(all_tasks(sanitized), key=repr)
  tasks = {task.canonical: task for task in all_tasks(full)}
  assert sorted(tasks) == ['mbpp/1', 'mbpp/2', 'mbpp/3']
  assert tasks['mbpp/1'].answer == {'entry': 'add', 'is_by_value': True, 'cases': [[[1, 2], 3], [[-1, 1], 0], [[6, 1.0], 7.0]]}
  assert tasks['mbpp/2'].answer['cases'] == [[[2], True], [[3], False]]
  assert tasks['mbpp/1'].question == 'Add two numbers.\nExample: `add(1, 2) == 3`\nReply with a ```python block.\n'
  assert tasks['mbpp/1'].demonstration[0]['content'] == '```python\ndef add(a, b):\n  return a + b\n```'


def test_mbpp_leaves_out_and_counts_what_is_no_data(tmp_path, caplog):
  with caplog.at_level(logging.INFO, 'envs.domains.programs'):
    domain = programs.mbpp(write_jsonl(tmp_path / 'mbpp.jsonl', MBPP + UNFIT))
  assert len(all_tasks(domain)) == 3
  assert '3 of 15 tasks' in caplog.text
  for part in ("'a test is not a call on literals compared with a literal': 9", "'a test is not an assert statement': 1",
               "'the tests call no function or several': 1", "'a constant passes the tests': 1"):
    assert part in caplog.text


HUMANEVAL = [
    {'task_id': 'HumanEval/0', 'entry_point': 'mean', 'prompt': 'def mean(xs):\n    """Return the mean of xs."""\n',
     'canonical_solution': '    return sum(xs) / len(xs)\n',
     'test': 'METADATA = {}\n\ndef check(candidate):\n    assert candidate([1, 2]) == 1.5, "a message"\n    assert candidate([2.0]) == 4 / 2\n'
             '    assert True, "padding"\n    print\n'},
    {'task_id': 'HumanEval/1', 'entry_point': 'f', 'prompt': 'def f(x):\n', 'canonical_solution': '    return x\n',
     'test': 'def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i\n'},
]


def test_humaneval_is_held_out(tmp_path, caplog):
  rows = HUMANEVAL + [{**HUMANEVAL[0], 'task_id': f'HumanEval/{i}'} for i in range(2, 10)]
  with caplog.at_level(logging.INFO, 'envs.domains.programs'):
    domain = programs.humaneval(write_jsonl(tmp_path / 'HumanEval.jsonl', rows))
  assert '9 of 10 tasks' in caplog.text
  assert "'a test is not an assert statement': 1" in caplog.text
  assert (domain.source.size('train', 1), domain.source.size('heldout', 1)) == (0, 9)
  task = domain.source.task('heldout', 1, 0)
  assert task.answer == {'entry': 'mean', 'is_by_value': True, 'cases': [[[[1, 2]], 1.5], [[[2.0]], 2.0]]}
  assert task.question == 'Complete this function. Reply with a ```python block.\n\ndef mean(xs):\n    """Return the mean of xs."""\n'
  assert '1.5' not in task.question


def test_demonstrations_of_files_score_one_and_a_hardcoded_example_zero(tmp_path, verifier):
  for domain in (programs.mbpp(write_jsonl(tmp_path / 'm.jsonl', MBPP)), programs.humaneval(write_jsonl(tmp_path / 'h.jsonl', HUMANEVAL))):
    for split in ('train', 'heldout'):
      for index in range(domain.source.size(split, 1)):
        problem = domain.problem(split, 1, index)
        assert verifier.verify(problem, domain.demonstration(split, 1, index)[-1]['content']).score == 1.0
        assert verifier.verify(problem, problem.messages[0]['content']).score == 0.0
        (_, first), entry = problem.answer['cases'][0], problem.answer['entry']
        assert verifier.verify(problem, f'def {entry}(*args):\n  return {decode(first)!r}').score == 0.0


@pytest.mark.parametrize(('text', 'message'), [
    ('{"task_id": 1}\n', r"row 1: not a task of programs/mbpp \(KeyError: 'test_list'\)"),
    ('{"task_id": 1, "text": "x", "code": "y", "test_list": []}\n', 'row 1: .*IndexError'),
    ('{"task_id": 1, "text": "x", "code": "y", "test_list": ["assert f( =="]}\n', 'row 1: .*SyntaxError'),
    ('[1]', 'row 1: .*TypeError'),
    ('{"task_id": 1\n', 'neither a JSON list nor one JSON object a line'),
])
def test_files_that_are_no_mbpp_are_refused_by_row(tmp_path, text, message):
  (tmp_path / 'mbpp.jsonl').write_text(text)
  with pytest.raises(ValueError, match=message):
    programs.mbpp(str(tmp_path / 'mbpp.jsonl'))


def test_a_missing_file_is_named(tmp_path):
  for make in (programs.mbpp, programs.humaneval):
    with pytest.raises(FileNotFoundError, match='nothing.jsonl'):
      make(str(tmp_path / 'nothing.jsonl'))
