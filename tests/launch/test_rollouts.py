"""Sampling that goes on: groups that are finished are not sampled again, bit for bit, and samples of something else are refused."""

from collections import Counter
import dataclasses
import json
import re

import numpy as np
import pytest

from envs import registry
from envs.core import Outcome
from launch import rollouts, teacher_texts
from launch.rollouts import KeptGroups, Sampler, Source
from models import sharding
from rl.rollout.worker import Assignment, RolloutConfig
from rl.types import Group
from tests import tiny_model, toys
from tests.rl.test_batching import trajectory

DOMAIN = toys.echo()
ROLLOUT = RolloutConfig(max_new_tokens=2, max_length=40, slots=8, steps_per_launch=2, prefill_chunk=32)
PROBLEMS = [DOMAIN.problem('train', 1, index) for index in range(12)]
ASSIGNMENTS = [Assignment(number, problem) for number, problem in enumerate(PROBLEMS)]


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  model = tiny_model.write_model(tmp_path_factory.mktemp('rollouts') / 'model')
  return Source(str(model), None, None, 'float32', ROLLOUT, {DOMAIN.name: DOMAIN}, {}, seed=3, group_size=2, temperature=1.0)


def sampler(source, output):
  return Sampler(source, lambda: sharding.make_mesh(data=-1), output)


def same(groups, others):
  """Say whether groups are equal in all but times and order."""
  def plain(group):
    return [{field.name: getattr(one, field.name) for field in dataclasses.fields(one) if field.name != 'timing_s'}
            for one in group.trajectories]

  for one, other in zip(*(sorted(found, key=lambda group: group.trajectories[0].group) for found in (groups, others)), strict=True):
    np.testing.assert_equal(plain(one), plain(other))
  return True


@pytest.fixture(scope='module')
def undisturbed(source):
  return list(sampler(source, None).collect(ASSIGNMENTS))


def test_what_is_finished_is_not_sampled_again(source, undisturbed, tmp_path, caplog):
  output = tmp_path / 'made' / 'pairs.jsonl'
  samples = output.with_name('pairs.jsonl.samples')
  first = sampler(source, output).collect(ASSIGNMENTS)
  before = [next(first) for _ in range(5)]
  first.close()  # All that a kill leaves is the file.
  assert len(samples.read_text().splitlines()) == 6
  second = sampler(source, output)
  with caplog.at_level('INFO', 'launch.rollouts'):
    found = list(second.collect(ASSIGNMENTS))
  assert f'5 of 12 groups are there from before, in {samples}' in caplog.text
  assert same(found, undisturbed) and same(found[:5], before)
  assert second._worker._ledger.issued == 7 * source.group_size
  # Everything is there: no model is loaded.
  third = Sampler(source, lambda: pytest.fail('the devices were asked for'), output)
  assert same(list(third.collect(ASSIGNMENTS)), undisturbed)
  rollouts.forget(output)
  rollouts.forget(output)
  assert not list(output.parent.iterdir())


def test_a_teacher_goes_on_with_its_texts(source, tmp_path, monkeypatch):
  settings = teacher_texts.TeacherConfig(source.model, dtype='float32', samples=2, temperature=1.0)
  rollout = dataclasses.replace(ROLLOUT, max_new_tokens=60, max_length=96)  # Long enough that some end by themselves.
  monkeypatch.setattr(teacher_texts, '_PROBLEMS_AT_ONCE', 5)

  def texts(output):
    counts = Counter()
    return list(teacher_texts.conversations(settings, DOMAIN, PROBLEMS, rollout, counts, domain_settings={}, output=output)), counts

  whole, output = texts(None), tmp_path / 'texts.jsonl'
  assert whole[0] and texts(output) == whole
  samples = output.with_name('texts.jsonl.samples')
  head, *groups = samples.read_text().splitlines()
  samples.write_text('\n'.join([head, *groups[:1:-2], '']))
  assert texts(output) == whole
  assert len(samples.read_text().splitlines()) == 13


def group(ordinal, *, reward=0.5, outcome=Outcome.OK):
  sample = dataclasses.replace(trajectory([False, True]), problem_id=PROBLEMS[ordinal].id, group=ordinal, reward=reward, outcome=outcome)
  return Group(sample.problem_id, (sample, dataclasses.replace(sample, sample=1)))


def test_a_line_that_a_kill_cut_off_is_sampled_again(tmp_path):
  path = tmp_path / 'x.samples'
  kept = KeptGroups(path, {'seed': 0})
  assert not path.exists()
  for ordinal in range(3):
    kept.add(ASSIGNMENTS[ordinal], group(ordinal))
  whole = path.read_bytes()
  sizes = np.cumsum([len(line) + 1 for line in whole.split(b'\n')[:-1]])
  for cut in (0, 1, sizes[0] - 1, sizes[0], sizes[1] - 1, sizes[1], sizes[2] + 7, sizes[3] - 1, sizes[3]):
    path.write_bytes(whole[:cut])
    kept = KeptGroups(path, {'seed': 0})
    there = max(int(np.searchsorted(sizes, cut, 'right')) - 1, 0)
    assert [one in kept for one in ASSIGNMENTS[:3]] == [ordinal < there for ordinal in range(3)], cut
    for ordinal in range(there, 3):
      kept.add(ASSIGNMENTS[ordinal], group(ordinal))
    assert path.read_bytes() == whole, cut
  assert same([KeptGroups(path, {'seed': 0}).read(one) for one in ASSIGNMENTS[:3]], [group(ordinal) for ordinal in range(3)])


def test_a_problem_is_known_by_its_content_and_its_place(tmp_path):
  kept = KeptGroups(tmp_path / 'x.samples', {})
  kept.add(ASSIGNMENTS[1], group(1))
  kept = KeptGroups(tmp_path / 'x.samples', {})
  problem = PROBLEMS[1]
  others = [dataclasses.replace(problem, answer='z'), dataclasses.replace(problem, messages=({'role': 'user', 'content': '?'},))]
  assert ASSIGNMENTS[1] in kept and Assignment(2, problem) not in kept and not any(Assignment(1, other) in kept for other in others)


class FakeWorker:
  """Gives groups of which some failed for no fault of the policy."""

  def collect(self, assignments, group_size, sampling):
    for one in assignments:
      yield group(one.ordinal) if one.ordinal % 2 else group(one.ordinal, reward=None, outcome=Outcome.ENV_ERROR)


def test_what_the_infrastructure_failed_is_tried_again(source, tmp_path, monkeypatch):
  monkeypatch.setattr(Sampler, '_worker', FakeWorker())
  assert len(list(sampler(source, tmp_path / 'x').collect(ASSIGNMENTS))) == 12
  kept = sampler(source, tmp_path / 'x')._kept
  assert [one.ordinal for one in ASSIGNMENTS if one in kept] == [1, 3, 5, 7, 9, 11]


def test_domains_are_told_apart_by_versions_with_a_verifier_or_without(source):
  jugs = registry.make_domain('planning/jugs')
  versions = dataclasses.replace(source, domains={DOMAIN.name: DOMAIN, jugs.name: jugs}).identity()['versions']
  assert versions == {'toy/echo': [1, 'toy/exact', 1], 'planning/jugs': [jugs.version]}


@pytest.mark.parametrize('change, message', [
    ({'seed': 4}, 'seed: 3 there, 4 now'), ({'temperature': 0.5}, 'temperature: 1.0 there, 0.5 now'),
    ({'group_size': 3}, 'group_size: 2 there, 3 now'), ({'dtype': 'bfloat16'}, "dtype: 'float32' there, 'bfloat16' now"),
    ({'rollout': dataclasses.replace(ROLLOUT, max_new_tokens=3)}, 'rollout.max_new_tokens: 2 there, 3 now'),
    ({'domains': {DOMAIN.name: dataclasses.replace(DOMAIN, version=2)}}, r'versions.toy/echo: \[1, .toy/exact., 1\] there, \[2, '),
    ({'domain_settings': {'toy/echo': {'path': 'a'}}}, 'domain_settings.toy/echo: .* there, '),
])
def test_samples_of_something_else_are_refused_and_stay(source, tmp_path, change, message):
  output = tmp_path / 'x.jsonl'
  sampler(source, output)._kept.add(ASSIGNMENTS[0], group(0))
  before = (tmp_path / 'x.jsonl.samples').read_bytes()
  with pytest.raises(ValueError, match=f'x.jsonl.samples holds samples that were made otherwise: {message}.*another --output, or delete it'):
    sampler(dataclasses.replace(source, **change), output)
  assert (tmp_path / 'x.jsonl.samples').read_bytes() == before


def test_another_model_is_refused(source, tmp_path):
  other = tiny_model.write_model(tmp_path / 'model', num_layers=1)
  sampler(source, tmp_path / 'x')._kept.add(ASSIGNMENTS[0], group(0))
  with pytest.raises(ValueError, match='made otherwise: model: '):
    sampler(dataclasses.replace(source, model=str(other)), tmp_path / 'x')
  with pytest.raises(FileNotFoundError, match=f'{re.escape(str(tmp_path))}/none.* does not exist; give'):
    sampler(dataclasses.replace(source, model=f'{tmp_path}/none'), tmp_path / 'x')


@pytest.mark.parametrize('text', ['{\n', '[]\n', '{"sampled_from": {}}\n{"problem": 1}\n', '{"sampled_from": {}}\n\n'])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
  path = tmp_path / 'x.samples'
  path.write_text(text)
  with pytest.raises(ValueError, match='x.samples is not what a sampling program keeps .*; delete it to sample anew'):
    KeptGroups(path, {})
  assert path.read_text() == text


def test_the_first_line_says_what_was_sampled(source, tmp_path):
  sampler(source, tmp_path / 'x')._kept.add(ASSIGNMENTS[0], group(0))
  stored = json.loads((tmp_path / 'x.samples').read_text().splitlines()[0])['sampled_from']
  assert stored['seed'] == 3 and stored['rollout']['max_length'] == 40 and len(stored['model']) == 64 and 'path' not in stored
