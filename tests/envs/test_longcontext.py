"""Long texts: solved by readers of their own from the text alone, of the length and with the evidence at the depth that was asked for."""

from collections import Counter
import re
import time

import numpy as np
import pytest

from envs import registry
from envs.core import Evidence, Reason
from envs.domains import longcontext_text as texts

NAMES = [name for name in registry.names() if name.startswith('longcontext/')]
WITH_HOPS = ('multivalue', 'multiquery', 'variables', 'common_words', 'frequent_words', 'hops', 'comparison', 'latest', 'counting', 'code',
             'timeline')
WHOLE = ('common_words', 'frequent_words')


def make(name, **options):
  return registry.make_domain(f'longcontext/{name.removeprefix("longcontext/")}', '', options)


def parts_of(problem):
  """Return the text, the question and the instruction."""
  text, _, tail = problem.messages[-1]['content'].rpartition('\n\n')
  return text, *tail.splitlines()


def sentences(text):
  return re.findall(r'[^.]+\.', text.replace('\n', ' '))


# Readers: from the text and the question to the answer, by regular expressions, sharing nothing with the generators.


def read_number(text, question):
  keys = re.findall(r'[A-Z][a-z]+', question.removeprefix('What'))
  return {re.search(rf'secret number of {key} is (\d+)', text)[1] for key in keys}


def read_multivalue(text, question):
  return set(re.findall(rf'of {question.split()[0]} is (\d+)', text))


def read_variables(text, question):
  value = re.search(r'\d+', question)[0]
  values = {}
  for name, source in re.findall(r'Let (\w+) equal (\w+)', text):
    values[name] = values.get(source, source)  # An assignment before its source would leave a name here.
  return {name for name, one in values.items() if one == value}


def read_words(text, question):
  count = int(re.search(r'\d+', question)[0])
  ranked = Counter(text.split()).most_common(count + 1)
  assert ranked[-2][1] > ranked[-1][1]
  return {word for word, _ in ranked[:count]}


def read_hops(text, question):
  pairs = [re.findall('[A-Z][a-z]{5,7}', sentence) for sentence in sentences(text)]
  links = dict(pair for pair in pairs if len(pair) == 2)
  current = question.split()[0]
  for _ in range(question.count(';') + 1):
    current = links[current]
  return {current}


def read_comparison(text, question):
  towns = re.findall(r'[A-Z]\w+', question.split(' take ')[0].removeprefix('Of'))
  sizes = {town: int(re.search(rf'town of {town} has (\d+)', text)[1]) for town in towns}
  chosen = (max if 'the most' in question else min)(towns, key=sizes.get)
  return {re.search(rf'town of {chosen} obeys mayor (\w+)', text)[1]}


def read_latest(text, question):
  place = question.split()[-1].rstrip('?')
  return {re.findall(rf'toll at {place} is (\d+)', text)[-1]}


def read_counting(text, question):
  town = question.split()[-1].rstrip('?')
  return {str(len(re.findall(rf'reached {town}\.', text)))}


def read_table(text, question):
  columns = question.removeprefix('The columns are ').split('. ')[0].split(', ')
  column, key = re.search(r'the (\w+) in the row of (\w+)\?', question).groups()
  row, = (line.split(' | ') for line in text.splitlines() if line.startswith(key + ' '))
  return {row[columns.index(column)]}


def read_code(text, question):
  namespace = {}
  exec(text, namespace)  # Our own generator's program.
  return {str(namespace[question.split()[2].removesuffix('()')]())}


def read_timeline(text, question):
  person, year = re.search(r'did (\w+) live at the end of (\d+)', question).groups()
  moves = sorted((int(when), town) for when, town in re.findall(rf'In (\d+) {person} moved to (\w+)', text))
  return {[town for when, town in moves if when <= int(year)][-1]}


def read_abstain(text, question):
  office, town = re.search(r'Who is the (\w+) of (\w+)\?', question).groups()
  assert town in text
  found = re.search(rf'The {office} of {town} is (\w+)', text)
  return {found[1] if found else 'not stated'}


READERS = {'needle': read_number, 'multikey': read_number, 'multivalue': read_multivalue, 'multiquery': read_number, 'variables': read_variables,
           'common_words': read_words, 'frequent_words': read_words, 'hops': read_hops, 'comparison': read_comparison, 'latest': read_latest,
           'counting': read_counting, 'table': read_table, 'code': read_code, 'timeline': read_timeline, 'abstain': read_abstain}


def test_there_are_fifteen_domains():
  assert sorted(READERS) == sorted(name.removeprefix('longcontext/') for name in NAMES) and len(NAMES) == 15


@pytest.mark.parametrize('name', READERS)
def test_a_reader_of_the_text_alone_scores_1_at_every_length(name):
  domain = make(name, num_words=(100, 300, 1000, 5000))
  for level in range(1, 5):
    for index in range(15):
      problem = domain.problem('train', level, index)
      text, question, _ = parts_of(problem)
      answer = READERS[name](text, question)
      assert answer == set(problem.answer), problem.id
      verdict = domain.verifier.verify(problem, f'I read it.\n#### {", ".join(sorted(answer))}.')
      assert (verdict.score, verdict.reason) == (1, Reason.OK)


@pytest.mark.parametrize('name', READERS)
def test_the_text_is_as_long_as_asked_and_its_evidence_where_it_says(name):
  domain = make(name, num_words=(100, 1000, 7000))
  for level, num_words in ((1, 100), (2, 1000), (3, 7000)):
    for index in range(8):
      problem = domain.problem('heldout', level, index)
      text = parts_of(problem)[0]
      count = len(text.split())
      # One statement may lack at the end, a chain of them in a program.
      assert num_words - 25 <= count <= num_words, problem.id
      told = domain.demonstration('heldout', level, index)[-1]['content'].split('\n####')[0]
      evidence = problem.evidence
      assert evidence.num_words == num_words
      # Statements of a demonstration are in the order of the positions; in a program they have two lines.
      statements = re.findall(r'def .*\n.*', told) if name == 'code' else told.splitlines() if evidence.positions else []
      assert len(statements) == len(evidence.positions)
      searched = text if name == 'code' else text.replace('\n', ' ')
      found = {round(len(text[:place.start()].split()) / (count - len(statement.split())), 4)
               for statement in statements for place in re.finditer(re.escape(statement), searched)}
      assert found == set(evidence.positions), problem.id


@pytest.mark.parametrize('name', [name for name in READERS if name not in WHOLE])
def test_depth_is_a_dial(name):
  for depth in ((0.0, 0.0), (0.4, 0.6), (1.0, 1.0)):
    domain = make(name, num_words=2000, depth=depth)
    positions = [place for index in range(12) for place in domain.problem('train', 1, index).evidence.positions]
    # Several pieces at one depth stand beside each other, so not all exactly there.
    assert min(positions) >= depth[0] - 0.03 and max(positions) <= depth[1] + 0.03
    # In their order, too, where it matters.
    for index in range(12):
      problem = domain.problem('train', 1, index)
      assert READERS[name](*parts_of(problem)[:2]) == set(problem.answer), problem.id
  spread = [place for index in range(40) for place in make(name, num_words=2000).problem('train', 1, index).evidence.positions]
  assert min(spread) < 0.2 and max(spread) > 0.8 and 0.35 < np.mean(spread) < 0.65


def test_positions_at_the_ends_are_0_and_1():
  for depth, wanted in ((0.0, 0.0), (1.0, 1.0)):
    problem = make('needle', num_words=300, depth=(depth, depth)).problem('train', 1, 0)
    assert problem.evidence == Evidence(300, (wanted,))
    assert (sentences(parts_of(problem)[0])[int(-depth)]).strip().startswith('The secret number of')


@pytest.mark.parametrize('name', WITH_HOPS)
def test_hops_are_a_dial(name):
  for hops in (2, 4):
    domain = make(name, num_words=(400, 600), hops=hops)
    for index in range(6):
      problem = domain.problem('train', 2, index)
      text, question, _ = parts_of(problem)
      assert READERS[name](text, question) == set(problem.answer)
      wanted = {'multivalue': hops, 'multiquery': hops, 'variables': hops + 1, 'hops': hops, 'comparison': hops + 1, 'latest': 1, 'code': hops,
                'timeline': hops, 'counting': int(problem.answer[0]) if name == 'counting' else 0}.get(name, 0)
      assert len(problem.evidence.positions) == wanted
      if name in ('multivalue', 'multiquery', 'variables', 'common_words', 'frequent_words'):
        assert len(problem.answer) == hops + (name == 'variables')
      elif name == 'latest':
        assert text.count(question.split()[-1].rstrip('?') + ' is') == hops
      elif name == 'counting':
        assert 1 <= int(problem.answer[0]) <= hops
  by_level = make(name, num_words=500, hops=(1, 2, 3))
  assert by_level.source.num_levels == 3 and by_level.problem('train', 3, 0).evidence.num_words == 500


def test_an_assignment_comes_before_those_that_use_it():
  text = parts_of(make('variables', num_words=4000).problem('train', 1, 0))[0]
  known = set()
  for name, source in re.findall(r'Let (\w+) equal (\w+)', text):
    assert source.isdigit() or source in known
    known.add(name)
  assert len(known) > 100


def test_a_quarter_is_not_stated_and_only_in_abstain():
  problems = [make('abstain').problem('train', 1 + index % 5, index) for index in range(400)]
  absent = [problem for problem in problems if problem.answer == ('not stated',)]
  assert 0.2 < len(absent) / 400 < 0.3  # 2.3 standard deviations.
  for problem in absent[:30]:
    text, question, _ = parts_of(problem)
    town = re.search(r'of (\w+)\?', question)[1]
    # The town's three other offices are told, and the office asked for is told of other towns.
    assert problem.evidence.positions == () and text.count(f'of {town} is') == 3
    assert f'The {question.split()[3]} of ' in text or problem.level == 1
  assert not [name for name in NAMES if name != 'longcontext/abstain' for index in range(20)
              if make(name).problem('train', 1, index).answer == ('not stated',)]


@pytest.mark.parametrize('name', NAMES)
def test_lists_of_candidates_copies_and_constants_do_not_pay(name):
  domain = registry.make_domain(name)
  scores = {}
  for level in range(1, 6):
    for index in range(20):
      problem = domain.problem('train', level, index)
      prompt = problem.messages[-1]['content']
      text = parts_of(problem)[0]
      candidates = list(dict.fromkeys(re.findall(r'[A-Z][a-z]{5,7}\b|\d+', text))) or list(dict.fromkeys(text.split()))
      replies = {'copy': prompt, 'copied': f'#### {prompt}', 'words': '#### ' + ', '.join(text.split()), 'none': '#### not stated',
                 'list': '#### ' + ', '.join(candidates), 'few': '#### ' + ', '.join(candidates[:len(problem.answer) + 1]),
                 'lines': '\n'.join(f'#### {word}' for word in text.split()), 'both': f'#### {", ".join(problem.answer)}, not stated',
                 'hedge': f'#### {", ".join(problem.answer)} or not stated', 'three': '#### 3'}
      for attack, reply in replies.items():
        scores.setdefault(attack, []).append(domain.verifier.verify(problem, reply).score)
  means = {attack: np.mean(some) for attack, some in scores.items()}
  assert max(means.values()) <= domain.chance, means
  assert {attack for attack, mean in means.items() if mean} <= {'longcontext/abstain': {'none'}, 'longcontext/counting': {'three'}}.get(
      name, set()), means


def test_prose_states_nothing():
  text = ' '.join(texts.prose(np.random.default_rng(0), 30_000))
  assert 29_980 <= len(text.split()) <= 30_000 and not re.search(r'\d|secret|toll|inhabitants|Let ', text)
  # Capital letters begin sentences only.
  assert not re.findall(r'[^.] [A-Z]', text)
  assert texts.prose(np.random.default_rng(0), 5) == texts.prose(np.random.default_rng(0), 0) == []


def test_names_are_different():
  for count in (1, 10_000, 60_000):
    found = texts.names(np.random.default_rng(1), count)
    assert len(set(found)) == count and all(re.fullmatch('[A-Z][a-z]{5}' if count <= 10_000 else '[A-Z][a-z]{7}', name) for name in found)


@pytest.mark.parametrize('name', ['multikey', 'common_words', 'variables', 'code'])
def test_a_million_words_take_seconds(name):
  domain = make(name, num_words=1_000_000)
  start = time.process_time()
  task = domain.source.make(np.random.default_rng(0), 1)
  assert time.process_time() - start < 5
  assert 999_970 <= len(task.question.split()) <= 1_000_040


def test_tasks_are_theirs_alone():
  domain = make('hops', num_words=200)
  tasks = {domain.source.task(split, 1, index).canonical for split in ('train', 'heldout') for index in range(100)}
  assert len(tasks) == 200
  # The same facts in another text are the same task, so that length and depth do not carry a problem into the other split.
  assert {make('needle', num_words=words).source.make(np.random.default_rng(3), 1).canonical for words in (100, 500)} == {
      make('needle', num_words=900, depth=(0.5, 0.5)).source.make(np.random.default_rng(3), 1).canonical}


@pytest.mark.parametrize('name, options, message', [
    ('hops', {'words': 3}, "domain 'longcontext/hops' with options={'words': 3}: got an unexpected keyword argument 'words'; it takes "
                           'num_words, depth, hops.'),
    ('common_words', {'depth': (0, 1)}, "unexpected keyword argument 'depth'; it takes num_words, hops"),
    ('needle', {'num_words': 20}, 'num_words=20 is too short for hops=1; use 28 words or more'),
    ('latest', {'num_words': (100, 1000), 'hops': 9}, 'num_words=100 is too short for hops=9; use 200 words or more, or fewer hops'),
    ('frequent_words', {'num_words': 100, 'hops': 5}, 'num_words=100 is too short to rank hops=5 words; use 150 words or more'),
    ('needle', {'num_words': ()}, r'num_words=\(\) must be a whole number of at least 1, or one for each level'),
    ('needle', {'num_words': 1e6}, 'num_words=1000000.0 must be a whole number'),
    ('needle', {'num_words': True}, 'num_words=True must be a whole number'),
    ('code', {'num_words': (100, 200), 'hops': (1, 2, 3)}, r'num_words=\(100, 200\) has 2 levels and hops=\(1, 2, 3\) 3'),
    ('needle', {'depth': 0.5}, r'depth=0.5 must be \(low, high\) with 0 <= low <= high <= 1'),
    ('needle', {'depth': (0.6, 0.5)}, r'depth=\(0.6, 0.5\) must be \(low, high\)'),
    ('needle', {'depth': (0.6, 1.5)}, r'depth=\(0.6, 1.5\) must be \(low, high\)'),
    ('hops', {'hops': 9, 'num_words': 1000}, 'hops=9 must be at most 8, the kinds of links there are'),
    ('timeline', {'hops': 100, 'num_words': 100_000}, 'hops=100 must be at most 69')])
def test_options_that_cannot_be(name, options, message):
  with pytest.raises(ValueError, match=message):
    make(name, **options)
