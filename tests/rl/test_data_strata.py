"""The files of a mixture: shares by component, domain and level, rows of users kept apart from evaluations, and what is reported."""

import json

import numpy as np
import pytest

from rl.curriculum import DomainConfig
from rl.data import strata, tasks
from rl.data.decontaminate import Protected
from rl.data.strata import ComponentConfig, MixtureConfig, TextFiles

GENERAL = ComponentConfig(rate=0.6, domains={'word_problems/generated': DomainConfig(levels=(1, 3), weight=2.0),
                                             'arithmetic/integers': DomainConfig(levels=(2,))}, count=30)


def write_rows(path, questions):
  path.write_text(''.join(json.dumps({'q': question, 'a': f'answer to {question}'}) + '\n' for question in questions))
  return str(path)


@pytest.fixture
def mixture(tmp_path):
  easy = write_rows(tmp_path / 'easy.jsonl', ['What is 1 + 1?', 'What is 2 + 2?', 'what is 1 + 1'])
  hard = write_rows(tmp_path / 'hard.jsonl', ['What is 1234 * 5678?'])
  own = ComponentConfig((easy, hard), 'qa', {'question': 'q', 'answer': 'a'}, rate=0.4)
  return strata.strata({'general': GENERAL, 'own': own})


def test_shares_of_levels_domains_and_components(mixture):
  rates = {stratum.name: stratum.rate for stratum in mixture}
  assert rates == pytest.approx({'general_word_problems_generated_1': 0.2, 'general_word_problems_generated_3': 0.2,
                                 'general_arithmetic_integers_2': 0.2, 'own_1': 0.2, 'own_2': 0.2})
  assert [stratum.count for stratum in mixture] == [10, 10, 10, 0, 0]


def test_files_are_written_and_drawn_by_rate(mixture, tmp_path):
  report = strata.write(mixture, tmp_path / 'mixture', Protected())
  assert {name: entry['rows'] for name, entry in report.items()} == {
      'general_word_problems_generated_1': 10, 'general_word_problems_generated_3': 10, 'general_arithmetic_integers_2': 10,
      'own_1': 3, 'own_2': 1}
  first = json.loads((tmp_path / 'mixture' / 'own_1.jsonl').read_text().splitlines()[0])
  assert first == {'messages': [{'role': 'user', 'content': 'What is 1 + 1?'}, {'role': 'assistant', 'content': 'answer to What is 1 + 1?'}]}
  found, rates = strata.tasks_and_rates(mixture, tmp_path / 'mixture', 0.0)
  config = tasks.MixtureConfig({name: tasks.TaskConfig(**task) for name, task in found.items()}, rates)
  drawn = tasks.examples(tasks.build_mixture(config), seed=0)
  sources = [next(drawn).source.split(':')[0] for _ in range(1000)]
  assert {name: sources.count(name) / 1000 for name in rates} == pytest.approx(rates, abs=5 * np.sqrt(0.2 * 0.8 / 1000))


def test_the_same_files_every_time(mixture, tmp_path):
  for name in ('a', 'b'):
    strata.write(mixture, tmp_path / name, Protected())
  names = sorted(path.name for path in (tmp_path / 'a').iterdir())
  assert names == [f'{name}.jsonl' for name in sorted(stratum.name for stratum in mixture)]
  assert all((tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes() for name in names)


def test_rows_that_are_evaluated_on_are_left_out_by_name(mixture, tmp_path):
  protected = Protected()
  protected.add([{'role': 'user', 'content': 'What is 1 + 1?'}], 'exam row 7')
  report = strata.write(mixture, tmp_path / 'mixture', protected)
  assert report['own_1']['rows'] == 1 and report['own_1']['left_out'] == {'same question': 2}
  assert report['own_1']['examples_left_out'][1] == {'row': f'{tmp_path}/easy.jsonl row 3', 'why': 'same question', 'shared_with': 'exam row 7'}
  assert report['own_2']['left_out'] == {}
  protected.add([{'role': 'user', 'content': 'What is 1234 * 5678?'}], 'exam row 8')
  with pytest.raises(ValueError, match="component own: no row of .*hard.jsonl is left, left out were {'same question': 1}"):
    strata.write(mixture, tmp_path / 'mixture', protected)


@pytest.mark.parametrize('make, message', [
    (lambda: ComponentConfig(rate=1.0), 'give one of them; a component is generated or read'),
    (lambda: ComponentConfig(('a.jsonl',), domains={'arithmetic/integers': DomainConfig()}), 'give one of them'),
    (lambda: ComponentConfig(('a.jsonl',), rate=0.0), 'rate=0.0 must be positive and finite'),
    (lambda: ComponentConfig(('a.jsonl',), rate=float('nan')), 'rate=nan must be positive and finite'),
    (lambda: ComponentConfig(('a.jsonl',), count=0), 'count=0 must be at least 1'),
    (lambda: ComponentConfig(('a.jsonl',), 'npy'), "schema='npy' is unknown"),
    (lambda: TextFiles('a.jsonl'), r"write \('a.jsonl',\)"),
    (lambda: MixtureConfig({}), 'a mixture needs at least one'),
    (lambda: MixtureConfig({'a.b': GENERAL}), "components names 'a.b'; a name must be letters"),
    (lambda: strata.strata({'x': ComponentConfig(domains={'arithmetic/integers': DomainConfig(levels=(1, 1))})}), 'two parts called x_arith'),
    (lambda: MixtureConfig({'general': GENERAL}, heldout_fraction=1.0), 'heldout_fraction=1.0 must be at least 0 and below 1'),
    (lambda: MixtureConfig({'general': GENERAL}, ngram=0), 'ngram=0 must be at least 2'),
    (lambda: strata.strata({'x': ComponentConfig(domains={'nosuch/one': DomainConfig()})}), "domain 'nosuch/one' is unknown"),
    (lambda: strata.strata({'x': ComponentConfig(domains={'arithmetic/integers': DomainConfig(levels=(9,))})}), 'level 9 is not one of 1 to 5'),
])
def test_mixtures_that_cannot_be(make, message):
  with pytest.raises((ValueError, TypeError), match=message):
    make()


def test_a_bad_row_is_named(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n{"messages": []}\n')
  found = strata.strata({'own': ComponentConfig((str(path),))})
  with pytest.raises(ValueError, match='a.jsonl row 2'):
    strata.write(found, tmp_path / 'mixture', Protected())
  assert not (tmp_path / 'mixture' / 'own_1.jsonl').exists()
