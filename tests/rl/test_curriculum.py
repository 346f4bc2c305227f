"""Which problems a run sees: reproducible, by weight, by what there is to learn, and none of the held-out ones."""

from collections import Counter

import pytest

from envs.core import Collection, Domain, Generated, Task
from envs.sandbox import client
from rl.curriculum import Curriculum, DomainConfig, heldout_problems, make_domains
from tests import toys


def make(rng, level):
  number = int(rng.integers(10**9))
  return Task(f'{level}:{number}', str(number), (), f'{level}:{number}')


DOMAINS = {'a': Domain('a', 1, Generated('a', 1, make, 3, 0.3), toys.Exact()), 'b': Domain('b', 1, Generated('b', 1, make, 1, 0.3), toys.Exact())}
CONFIGS = {'a': DomainConfig(weight=3.0), 'b': DomainConfig()}


def draw(curriculum, count):
  return [curriculum.draw() for _ in range(count)]


def test_draws_follow_the_weights_and_the_state_goes_on():
  curriculum = Curriculum(DOMAINS, CONFIGS, 'fixed', 0)
  drawn = draw(curriculum, 400)
  assert [ordinal for ordinal, _ in drawn] == list(range(400))
  assert len({problem.id for _, problem in drawn}) == 400
  counts = Counter(problem.domain for _, problem in drawn)
  assert abs(counts['a'] - 300) < 40
  levels = Counter(problem.level for _, problem in drawn if problem.domain == 'a')
  assert all(abs(levels[level] - counts['a'] / 3) < 40 for level in (1, 2, 3))
  again = Curriculum(DOMAINS, CONFIGS, 'fixed', 0)
  draw(again, 150)
  resumed = Curriculum(DOMAINS, CONFIGS, 'fixed', 0, again.to_json())
  assert draw(resumed, 250) == drawn[150:]
  assert draw(Curriculum(DOMAINS, CONFIGS, 'fixed', 1), 50) != drawn[:50]


def test_levels_are_drawn_by_what_there_is_to_learn():
  curriculum = Curriculum(DOMAINS, {'a': DomainConfig()}, 'adaptive', 0)
  for _ in range(60):
    curriculum.update('a', 1, [1.0, 1.0])
    curriculum.update('a', 2, [1.0, 0.0])
    curriculum.update('a', 3, [0.0, 0.0])
  rates = curriculum.to_json()['pass_rate']
  assert rates['a/1'] > 0.99 and abs(rates['a/2'] - 0.5) < 0.01 and rates['a/3'] < 0.01
  # p (1 - p) + 0.05: 0.3 against 0.05 each.
  levels = Counter(problem.level for _, problem in draw(curriculum, 400))
  assert abs(levels[2] - 300) < 40 and levels[1] > 20 and levels[3] > 20
  assert curriculum.metrics()['curriculum/pass_rate/a/2'] == rates['a/2']
  # One group moves the rate by a tenth of its distance.
  curriculum = Curriculum(DOMAINS, {'a': DomainConfig()}, 'adaptive', 0)
  curriculum.update('a', 1, [1.0, 0.0, 0.0, 0.0])
  assert curriculum.to_json()['pass_rate']['a/1'] == pytest.approx(0.9 * 0.5 + 0.1 * 0.25)


def test_held_out_problems_are_fixed_and_apart():
  problems = heldout_problems(DOMAINS, {'a': DomainConfig(levels=(1, 3)), 'b': DomainConfig()}, 10)
  assert [(problem.domain, problem.level) for problem in problems[:4]] == [('a', 1), ('a', 3), ('b', 1), ('a', 1)]
  assert problems == heldout_problems(DOMAINS, {'a': DomainConfig(levels=(1, 3)), 'b': DomainConfig()}, 10)
  trained = {problem.messages[0]['content'] for _, problem in draw(Curriculum(DOMAINS, CONFIGS, 'fixed', 0), 200)}
  assert not trained & {problem.messages[0]['content'] for problem in problems}


def test_a_collection_gives_no_more_than_it_has():
  tasks = [Task(str(number), str(number), (), str(number)) for number in range(20)]
  domain = Domain('c', 1, Collection('c', tasks, 0.5), toys.Exact())
  problems = heldout_problems({'c': domain}, {'c': DomainConfig()}, 100)
  assert len(problems) == domain.source.size('heldout', 1) < 20
  empty = Domain('c', 1, Collection('c', tasks, 0.0), toys.Exact())
  with pytest.raises(ValueError, match="Domain 'c' has no held-out problems"):
    heldout_problems({'c': empty}, {'c': DomainConfig()}, 5)


def test_code_does_not_run_without_a_sandbox(monkeypatch):
  def unavailable():
    raise client.SandboxUnavailable('user namespaces are off; allow them')

  monkeypatch.setattr(client, 'shared', unavailable)
  with pytest.raises(client.SandboxUnavailable, match='user namespaces are off'):
    make_domains({'programs/generated': DomainConfig()})
  assert list(make_domains({'word_problems/generated': DomainConfig()})[0]) == ['word_problems/generated']


def test_domains_by_name():
  domains, configs = make_domains({'tests/toys:one_token': DomainConfig(weight=2.0), 'word_problems/generated': DomainConfig(levels=(1,))})
  assert list(domains) == ['toy/one_token', 'word_problems/generated'] == list(configs)
  assert configs['toy/one_token'].weight == 2.0
  for wrong, message in (({}, 'names none; give at least one of arithmetic/integers'),
                         ({'nosuch': DomainConfig()}, "domain 'nosuch' is unknown; use one of"),
                         ({'nosuch:make': DomainConfig()}, "No module named 'nosuch'"),
                         ({'tests/toys:nosuch': DomainConfig()}, "no attribute 'nosuch'"),
                         ({'word_problems/gsm8k': DomainConfig()}, 'needs the path of its data file'),
                         ({'word_problems/generated': DomainConfig(options={'steps': 3})}, "unexpected keyword argument 'steps'; it takes none"),
                         ({'longcontext/hops': DomainConfig(options={'num_words': 9})}, 'num_words=9 is too short for hops=3'),
                         ({'word_problems/generated': DomainConfig(levels=(9,))}, 'level 9 is not one of 1 to 5')):
    with pytest.raises(ValueError, match=message.replace('(', r'\(')):
      make_domains(wrong)
  with pytest.raises(ValueError, match='weight=0 must be positive'):
    DomainConfig(weight=0)


def test_options_reach_the_domain():
  domains, configs = make_domains({'longcontext/multikey': DomainConfig(options={'num_words': [50, 90], 'depth': [1, 1]})})
  lengths = [problem.evidence for problem in heldout_problems(domains, configs, 2)]
  assert [(one.num_words, one.positions) for one in lengths] == [(50, (1.0,)), (90, (1.0,))]
