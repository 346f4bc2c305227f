"""The report of a run: a run written by the monitor's own writers, with text that wants to be code, and damaged ones."""

import html.parser
import io
import json
from pathlib import Path
import shutil
import subprocess
import sys

import numpy as np
import pytest

from envs.core import Outcome
from launch import report_page, report_run, report_text
from launch.report_run import Change, Place, Rate
from rl import monitor
from rl.types import Trajectory

ROOT = Path(__file__).resolve().parents[2]
PLACES = (('arithmetic/integers', 1), ('arithmetic/integers', 2), ('arithmetic/integers', 3), ('arithmetic/python', 1), ('arithmetic/python', 2))
HOSTILE = 'So \u2192 </script><script>document.title = "owned"</script> & <img src=x onerror=alert(1)> \x1b[31mred\u202eback <!-- \u2028 \ud800.'
CONFIG = {'stage': 'rl', 'model': {'path': 'models/tiny'}, 'num_steps': 6, 'seed': 3, 'groups': 2, 'group_size': 2,
          'domains': {'arithmetic/integers': {}, 'arithmetic/python': {}}}
DIFFERENCE = {'groups': (16, 2), 'loss.kl_coef': (0.0, 1e-3), 'rollout.slots': (32, '<default>')}
SUPERVISED = {'stage': 'supervised', 'model': {'path': 'models/tiny'}, 'num_steps': 3, 'seed': 0}


def trajectory(problem_id, domain, level, group, sample, reward, outcome=Outcome.OK, reason='', reply='It is #### 12', version=0, num_sampled=5):
  messages = [{'role': 'user', 'content': f'What is 3 * 4, as {problem_id}?\n\tThink.'}]
  calls = int(domain == 'arithmetic/python')
  if calls:
    messages += [{'role': 'assistant', 'content': '<tool_call>\n{"name": "python", "arguments": {"code": "print(3 * 4)"}}\n</tool_call>'},
                 {'role': 'tool', 'name': 'python', 'content': '12\n'}]
  messages.append({'role': 'assistant', 'content': reply})
  tokens = np.arange(num_sampled + 10, dtype=np.int32)
  mask = tokens >= 10
  return Trajectory(
      tokens_T=tokens, loss_mask_T=mask, behavior_logprobs_T=np.where(mask, -0.5, np.nan).astype(np.float32),
      versions_T=np.where(mask, version, -1).astype(np.int32), reward=reward, outcome=outcome, problem_id=problem_id, domain=domain,
      level=level, group=group, sample=sample, terminated=True, truncated=False, num_turns=1 + calls, num_tool_calls=calls,
      timing_s={'total': 1.5, 'environment': 0.1}, messages=tuple(messages), reason=reason or ('ok' if reward == 1 else 'wrong'))


def write_evaluation(log, board, step, solved, per_place):
  """Write an evaluation in which `solved(number)` says which of the problems pass; the last problem of all cannot be graded."""
  entries, passed = [], {}
  for number in range(per_place * len(PLACES)):
    domain, level = PLACES[number % len(PLACES)]
    problem_id = f'{domain}/heldout/{level}/{number // len(PLACES)}'
    if number == per_place * len(PLACES) - 1:
      one = trajectory(problem_id, domain, level, number, 0, None, Outcome.ENV_ERROR, 'The sandbox did not start.', version=step)
    else:
      reward = float(solved(number))
      passed.setdefault((domain, level), []).append(reward)
      one = trajectory(problem_id, domain, level, number, 0, reward, reply='It is #### 12' if reward else HOSTILE, version=step)
    entries.append((one, None, ''))
  log.write(step, 'eval', entries)
  rewards = sum(passed.values(), [])
  rate = Rate(int(sum(rewards)), len(rewards)).estimate
  board.write(step, {'heldout/pass@1': rate.value, 'heldout/pass@1_low': rate.low, 'heldout/pass@1_high': rate.high,
                     'heldout/graded': len(rewards), 'heldout/not_graded': 1,
                     **{f'heldout/pass@1/{domain}/{level}': float(np.mean(some)) for (domain, level), some in passed.items()}})


def write_run(directory, num_steps=6, every=3, groups=2, size=2, per_place=2, seed=0):
  """Write a run that learns: with the defaults 2 of 9 graded problems are solved at the start, 6 at the end (2, 6: see `solves`)."""
  rng = np.random.default_rng(seed)
  monitor.write_config(directory, CONFIG | {'num_steps': num_steps, 'groups': groups, 'group_size': size}, DIFFERENCE)
  monitor.write_objective(directory, 'maximize A < B\n')
  issued = trained = failed = 0
  with monitor.Monitor(directory, total_steps=num_steps, stream=io.StringIO()) as board, monitor.TrajectoryLog(directory, 0) as log:
    write_evaluation(log, board, 0, lambda number: solves(number, 0.0), per_place)
    for step in range(1, num_steps + 1):
      done, entries = step / num_steps, []
      for group in range(groups):
        domain, level = PLACES[int(rng.integers(len(PLACES)))]
        for sample in range(size):
          problem_id, number = f'{domain}/train/{level}/{step * groups + group}', step * groups + group
          issued += 1
          if rng.random() < 0.03:
            failed += 1
            entries.append((trajectory(problem_id, domain, level, number, sample, None, Outcome.VERIFIER_ERROR, 'The worker died.'), 0.0, ''))
            continue
          reward = float(rng.random() < 0.2 + 0.6 * done)
          trained += 1
          entries.append((trajectory(problem_id, domain, level, number, sample, reward, version=step - 1,
                                     outcome=Outcome.OK if rng.random() < 0.9 else Outcome.LENGTH), reward - 0.5, ''))
      log.write(step, 'train', entries)
      score = 0.2 + 0.6 * done + 0.05 * rng.normal()
      board.log_step(step, {
          'critic/score/mean': score, 'critic/rewards/mean': score, 'policy/entropy': 2.5 - 1.8 * done + 0.05 * rng.normal(),
          'response_length/mean': 40 + 30 * done, 'response_length/max': 128, 'correct_seq_len/mean': 35 + 30 * done,
          'incorrect_seq_len/mean': 70 + 20 * rng.random(), 'train/grad_norm': 0.3 + 0.2 * rng.random() + (3 if step % 37 == 36 else 0),
          'policy/ppo_kl': 1e-3 * rng.random(), 'policy/pg_clipfrac_low': 0.01 * rng.random(), 'policy/pg_clipfrac_high': 0.02 * rng.random(),
          'mismatch/logprob_abs_diff': 0.012 + 0.001 * rng.random(), 'mismatch/k3_kl': 3e-4 + 1e-5 * rng.random(),
          'frac_reward_zero_std': 0.5 - 0.2 * done, 'solve_none': 0.4 * (1 - done), 'solve_all': 0.3 * done,
          'response_length/clip_ratio': 0.2 * (1 - done), 'env/outcome/ok': 0.9, 'env/outcome/verifier_error': 0.03, 'num_turns/mean': 1.5,
          'env/outcome/timeout': 0.01 * rng.random(), 'tool_call_counts/mean': 0.5, 'tool_error_rate': 0.1 * (1 - done),
          'rollout/tokens_per_s': 900 + 50 * rng.random(), 'train/tokens': 1000.0, 'train/learning_rate': 1e-5 * (1 - done),
          **{f'curriculum/pass_rate/{domain}/{level}': min(1.0, (0.5 + 0.7 * done) / level) for domain, level in PLACES},
          'timing_s/decode': 4 + rng.random(), 'timing_s/environment': 0.6, 'timing_s/score': 0.8, 'timing_s/train': 3.0, 'timing_s/sync': 0.2,
          'timing_s/log': 0.02, 'timing_s/idle': 0.1, 'timing_s/total': 9.2, **({'timing_s/evaluate': 6.0} if step % every == 1 else {}),
          'ledger/issued': issued, 'ledger/trained': trained, 'ledger/dropped/verifier_error': failed, 'mismatch/chi2': float('nan')},
                     1000, 0.0)
      if step % every == 0:
        write_evaluation(log, board, step, lambda number: solves(number, done), per_place)
  return directory


def solves(number, done):
  """Say whether a problem is solved: 0 and 4 always, 8 only at first, 1 and 2 and 5 from half on."""
  place = number % 10
  return place in (0, 4) or (place == 8 and done == 0) or (place in (1, 2, 5) and done >= 0.5)


def write_baseline(run, path, name='base'):
  """Write an evaluation of another model that solves nothing but the first problem, on the same problems as the run."""
  lines = [json.loads(line) for line in (run / monitor.TRAJECTORIES_FILE).read_text().splitlines()]
  lines = [line | {'reward': None if line['reward'] is None else float(number == 0)}
           for number, line in enumerate(line for line in lines if line['kind'] == 'eval' and line['step'] == 0)]
  path.write_text(json.dumps({'name': name, 'pass_rate': {}, 'passed': 1, 'graded': 9, 'trajectories': lines}))
  return path


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  return write_run(tmp_path_factory.mktemp('runs') / 'learned')


@pytest.fixture(scope='module')
def run(directory):
  return report_run.read_run(directory)


@pytest.fixture
def copy(directory, tmp_path):
  return shutil.copytree(directory, tmp_path / 'copy')


class Scripts(html.parser.HTMLParser):
  """Collects what a browser takes for scripts, and the elements of the page."""

  def __init__(self, page):
    super().__init__()
    self.scripts, self.tags = [], []
    self.feed(page)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag == 'script':
      self.scripts.append('')

  def handle_data(self, data):
    if self.tags and self.tags[-1][0] == 'script':
      self.scripts[-1] += data


def data_of(page):
  return json.loads(Scripts(page).scripts[0])


# Evaluations compared.


def test_rates_and_changes_by_hand(run, directory, tmp_path):
  # Problems 0 to 8 are graded. At first 0, 4 and 8 are solved, at the end 0, 4, 1, 2 and 5.
  first, last = report_run.ends_of(run, None)
  assert (first.name, last.name) == ('step 0', 'step 6') and sorted(run.evaluations) == [0, 3, 6]
  rows = {str(row.place): row for row in report_run.compare([first, last])}
  assert rows['all'].rates == (Rate(3, 9), Rate(5, 9)) and rows['all'].changes == (Change(3, 1, 9),) and rows['all'].total == Change(3, 1, 9)
  assert rows['all'].changes[0].estimate.value == pytest.approx(2 / 9)
  # Problem 9, python at level 2, is not graded; problem 4 is of the same place.
  assert rows['arithmetic/python level 2'].rates == (Rate(1, 1), Rate(1, 1))
  # Problems 3 and 8 are python at level 1: 8 is lost.
  assert rows['arithmetic/python level 1'].changes == (Change(0, 1, 2),)
  assert rows['arithmetic/integers'].rates == (Rate(1, 6), Rate(4, 6))
  assert list(rows) == ['all', 'arithmetic/integers', 'arithmetic/integers level 1', 'arithmetic/integers level 2', 'arithmetic/integers level 3',
                        'arithmetic/python', 'arithmetic/python level 1', 'arithmetic/python level 2']
  base = report_run.read_baseline(write_baseline(directory, tmp_path / 'base.json'))
  row = report_run.compare(report_run.ends_of(run, base))[0]
  assert row.rates == (Rate(1, 9), Rate(3, 9), Rate(5, 9)) and row.changes == (Change(2, 0, 9), Change(3, 1, 9)) and row.total == Change(4, 0, 9)


def test_only_common_graded_problems_are_compared(run):
  first, last = report_run.ends_of(run, None)
  integers = {key: episode for key, episode in last.episodes.items() if episode.domain == 'arithmetic/integers'}
  fewer = report_run.Evaluation('fewer', integers, last.log)
  row = report_run.compare([first, fewer])[0]
  assert row.rates == (Rate(3, 9), Rate(4, 6)) and row.changes == (Change(3, 0, 6),)
  nothing = report_run.Evaluation('nothing', {}, last.log)
  assert report_run.compare([first, nothing])[0].rates[1] is None and report_run.compare([first, nothing])[0].changes == (None,)


def test_newly_solved_problems_come_from_different_places_hard_ones_first(run):
  pairs = report_run.newly_solved(*report_run.ends_of(run, None))
  # Solved only at the end: 1 (integers 2), 2 (integers 3), 5 (integers 1, the second of its level). All are of one domain.
  assert [(first.problem_id, first.reward, second.reward) for first, second in pairs] == [
      ('arithmetic/integers/heldout/3/0', 0, 1), ('arithmetic/integers/heldout/2/0', 0, 1), ('arithmetic/integers/heldout/1/1', 0, 1)]
  assert report_run.newly_solved(run.evaluations[3], run.evaluations[6]) == []


def test_the_later_of_two_first_evaluations_counts(copy):
  lines = (copy / monitor.TRAJECTORIES_FILE).read_text().splitlines()
  again = json.dumps(json.loads(lines[1]) | {'reward': 1.0})
  (copy / monitor.TRAJECTORIES_FILE).write_text('\n'.join([*lines, again]) + '\n')
  assert report_run.read_run(copy).evaluations[0].rate(Place()) == Rate(4, 9)


# What the terminal shows.


def test_the_terminal_shows_the_tables(run, directory, tmp_path):
  text = report_text.results(run, report_run.read_baseline(write_baseline(directory, tmp_path / 'base.json', name='base\x1b[2J')))
  lines = [' '.join(line.split()) for line in text.splitlines()]
  # Wilson, and Bonett and Price: (4 - 2) / 11 +- 1.96 sqrt((6 / 11 - (2 / 11)^2) / 11).
  assert 'step 6 5 of 9 55.6% [26.7%, 81.1%] +22.2 points [-24.1, +60.5] (+3 -1 of 9)' in lines
  assert 'base\\x1b[2J 1 of 9 11.1% [2.0%, 43.5%]' in lines and '\x1b' not in text
  assert 'base\\x1b[2J to step 6: +44.4 points [-1.6, +74.4] (+4 -0 of 9)' in lines
  assert 'arithmetic/integers 6 16.7% 16.7% 66.7% +50.0 points [-10.7, +85.7] (+3 -0 of 6)' in lines
  assert lines[0] == f'Run {directory}: step 6 of 6, models/tiny.'


def test_transcripts_are_whole_and_harmless(run):
  text = report_text.transcripts(run, 1, 80)
  assert text.startswith('3 problems were failed at step 0 and are solved at step 6. Some of them:\n== arithmetic/integers/heldout/3/0 ==')
  assert '\nuser:\n  What is 3 * 4, as arithmetic/integers/heldout/3/0?\n          Think.\n-- step 0: reward 0, ok, wrong, 5 tokens --' in text
  assert text.count('user:') == 1 and text.count('assistant:') == 2 and text.count('== arith') == 1
  assert '\\x1b[31mred\\u202eback' in text and '\\u2028' in text and '\\ud800' in text
  assert all(character.isprintable() or character == '\n' for character in text)
  assert max(map(len, text.splitlines())) <= 80
  assert text.endswith('-- step 6: reward 1, ok, ok, 5 tokens ------------------------------------------\nassistant:\n  It is #### 12')
  assert report_text.transcripts(run, 0, 80) == ''


def test_the_program_prints_and_writes_the_page(directory, tmp_path):
  base, page = write_baseline(directory, tmp_path / 'base.json'), tmp_path / 'new' / 'x.html'
  done = subprocess.run([sys.executable, '-m', 'launch.report', f'--workdir={directory}', f'--baseline={base}', f'--output={page}'],
                        capture_output=True, text=True, check=False, cwd=ROOT,
                        env={'PYTHONIOENCODING': 'ascii', 'PATH': '', 'JAX_PLATFORMS': 'cpu'})
  assert done.returncode == 0, done.stderr
  assert 'Held-out pass@1 with 95 % intervals:' in done.stdout and 'So \\u2192 </script>' in done.stdout and f'Page: {page}' in done.stdout
  assert data_of(page.read_text())['evaluations'] == ['base', 'step 0', 'step 6']
  done = subprocess.run([sys.executable, '-m', 'launch.report', f'--workdir={tmp_path}'], capture_output=True, text=True, check=False, cwd=ROOT)
  assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith(f'launch.report: {tmp_path} is not the directory of a run')
  assert 'Traceback' not in done.stderr


# The page.


def test_text_of_the_model_stays_data(run):
  page = report_page.render(run, None, 2**20)
  found = Scripts(page)
  assert [tag for tag, _ in found.tags].count('script') == 2 and 'img' not in [tag for tag, _ in found.tags]
  data = json.loads(found.scripts[0])
  replies = [episode['messages'][-1]['content'] for episode in data['episodes'] if episode['kind'] == 'eval' and episode['reward'] == 0]
  assert replies and set(replies) == {HOSTILE}
  assert not set('<>&') & set(report_page.embed(HOSTILE + '</script x>'))
  # Nothing of the page is loaded from elsewhere, and the policy forbids it.
  assert not [tag for tag, attributes in found.tags if {'src', 'href'} & set(attributes)] and 'http-equiv' in page
  assert {tag for tag, _ in found.tags} & {'link', 'iframe', 'object', 'embed'} == set()
  assert "default-src 'none'" in page and '@import' not in page and 'url(' not in page


def test_the_script_never_makes_html_of_text(run):
  script = Scripts(report_page.render(run, None, 2**20)).scripts[1]
  for forbidden in ('innerHTML', 'outerHTML', 'insertAdjacentHTML', 'document.write', 'eval(', 'fetch(', 'XMLHttpRequest', 'new Function'):
    assert forbidden not in script


def test_the_page_has_what_the_run_has(run):
  data = data_of(report_page.render(run, None, 2**20))
  rate = data['rows'][0]['rates'][1]
  assert (rate['solved'], rate['graded']) == (5, 9) and rate['value'] == 5 / 9 and rate['low'] < 5 / 9 < rate['high']
  axis, values = data['curves']['series']['heldout/pass@1']
  assert data['curves']['axes'][axis] == [0, 3, 6] and values == pytest.approx([3 / 9, 5 / 9, 5 / 9], abs=1e-4)
  assert 'mismatch/chi2' not in data['curves']['series']  # Never finite.
  assert data['ledger']['issued'] == 24 == data['ledger']['trained'] + data['ledger']['dropped/verifier_error']
  assert sum(row[3] for row in data['outcomes']) == 24 and sum(row[4] for row in data['outcomes']) == 30
  assert ['env_error', 'The sandbox did not start.', '', 0, 3] in data['outcomes']
  assert data['difference'][0] == ['groups', 16, 2] and json.loads(data['config'])['seed'] == 3
  assert data['objective'] == run.objective == 'maximize A < B\n'
  facts = dict(data['facts'])
  assert facts['Steps'] == '6 of 6' and facts['Tokens trained on'] == '6,000' and facts['Episodes'] == '54' and 'Not on this page' not in facts
  assert facts['Code revision'] == 'not known (no checkpoint)' and facts['A step'] == '2 problems with 2 samples'
  assert [data['episodes'][place]['problem_id'] for place in data['highlights']] == [
      'arithmetic/integers/heldout/3/0', 'arithmetic/integers/heldout/2/0', 'arithmetic/integers/heldout/1/1']
  assert all(data['episodes'][place]['step'] == 6 for place in data['highlights'])
  # The lines' numbers find the episodes in the file.
  lines = (run.directory / monitor.TRAJECTORIES_FILE).read_text().splitlines()
  found = [json.loads(lines[episode['line'] - 1])['messages'][0]['content'] for episode in data['episodes']]
  assert found == [episode['messages'][0]['content'] for episode in data['episodes']]


def test_a_large_log_keeps_evaluations_first_and_whole_groups(run):
  of_kind = {kind: sum(episode.num_bytes for episode in run.log.episodes if episode.kind == kind) for kind in ('eval', 'train')}
  limit = of_kind['eval'] + of_kind['train'] // 2
  data = data_of(report_page.render(run, None, limit))
  kept = [(episode['kind'], episode['step'], episode['group']) for episode in data['episodes']]
  assert sum(kind == 'eval' for kind, _, _ in kept) == 30
  groups = {(step, group): kept.count(('train', step, group)) for kind, step, group in kept if kind == 'train'}
  assert 0 < len(groups) < 12 and set(groups.values()) == {2}
  assert dict(data['facts'])['Not on this page'].startswith(f'{54 - len(kept)} episodes beyond ')
  assert data_of(report_page.render(run, None, limit)) == data
  # With less room, what remains are the first and the last evaluation, of the same problems.
  (log, few), = report_page.choose_episodes(run, None, of_kind['eval'] // 3)[0]
  assert log is run.log and few and {episode.step for episode in few} == {0, 6}
  assert {episode.problem_id for episode in few if episode.step == 0} == {episode.problem_id for episode in few if episode.step == 6}
  assert report_page.choose_episodes(run, None, 0) == ([(run.log, [])], 54)


def test_the_baseline_is_among_the_episodes(run, directory, tmp_path):
  base = report_run.read_baseline(write_baseline(directory, tmp_path / 'base.json'))
  data = data_of(report_page.render(run, base, 2**20))
  own = [episode for episode in data['episodes'] if episode['kind'] == 'baseline']
  assert len(own) == 10 and {episode['name'] for episode in own} == {'base'} and {episode['step'] for episode in own} == {None}
  assert [data['episodes'][place]['step'] for place in data['highlights']] == [6, 6, 6]


def test_long_messages_and_long_curves_are_cut_and_said_so(copy):
  path = copy / monitor.TRAJECTORIES_FILE
  lines = path.read_text().splitlines()
  record = json.loads(lines[0])
  record['messages'][0]['content'] = 'x' * 20_005
  path.write_text('\n'.join([json.dumps(record), *lines[1:]]) + '\n')
  with (copy / monitor.METRICS_FILE).open('a') as stream:
    stream.writelines(json.dumps({'step': step, 'time_s': 1.0, 'train/grad_norm': float(step % 2)}) + '\n' for step in range(7, 2011))
  data = data_of(report_page.render(report_run.read_run(copy), None, 2**20))
  message = data['episodes'][0]['messages'][0]
  assert len(message['content']) == 20_000 and message['cut'] == 5
  axis, values = data['curves']['series']['train/grad_norm']
  # 2010 steps: three to a point, the last point stands for all up to step 2010.
  assert len(values) == 670 == len(data['curves']['axes'][axis]) and data['curves']['axes'][axis][-1] == 2010
  assert values[-1] == pytest.approx(1 / 3, abs=1e-4) and dict(data['facts'])['Curves'] == 'a point is the mean of up to 3 values'


def test_a_supervised_run_has_curves_and_loss(tmp_path):
  monitor.write_config(tmp_path, SUPERVISED, {})
  with monitor.Monitor(tmp_path, total_steps=3, stream=io.StringIO()) as board:
    for step in range(1, 4):
      board.log_step(step, {'train/loss_nats': 2.0 / step, 'train/grad_norm': 1.0}, 100, 0.0)
      board.write(step, {'heldout/loss_nats': 3.0 / step})
  run = report_run.read_run(tmp_path)
  text = report_text.results(run, None)
  assert [line.split() for line in text.splitlines()[-2:]] == [['step', '1', '3.0000'], ['step', '3', '1.0000']]
  assert report_text.transcripts(run, 2, 80) == ''
  data = data_of(report_page.render(run, None, 2**20))
  assert data['rows'] == data['episodes'] == data['outcomes'] == [] and data['ledger'] == {} and data['objective'] == ''
  assert data['curves']['series']['train/loss_nats'][1] == [2.0, 1.0, 0.66667] and 'A step' not in dict(data['facts'])


# Bad input.


def test_no_run(tmp_path):
  with pytest.raises(FileNotFoundError, match='is not the directory of a run: it lacks config.json, config_difference.json, metrics.jsonl.'):
    report_run.read_run(tmp_path / 'nowhere')


def test_an_unfinished_last_line_is_left_out_with_a_note(copy):
  path = copy / monitor.TRAJECTORIES_FILE
  path.write_text(path.read_text()[:-20])
  run = report_run.read_run(copy)
  assert len(run.log.episodes) == 53 and run.notes == (
      f'The last line of {path} is not finished, as of a run that goes on or was killed; it is left out.',)
  assert 'Note: The last line of' in report_text.results(run, None) and data_of(report_page.render(run, None, 2**20))['notes'] == list(run.notes)


@pytest.mark.parametrize('change, message', [
    ({'reward': 'high'}, "line 2: reward is 'high' and must be int or float or null"),
    ({'step': True}, 'line 2: step is True and must be int'),
    ({'reward': float('nan')}, r'line 2: .* is not JSON \(NaN is no JSON number\)'),
    ({'outcome': None}, 'line 2: outcome is None and must be str'),
    ({'messages': [{'role': 'user'}]}, 'line 2: the message .* must have a role and a content'),
    ({'messages': None}, 'line 2: messages is None and must be list')])
def test_damaged_episodes_are_named(copy, change, message):
  path = copy / monitor.TRAJECTORIES_FILE
  lines = path.read_text().splitlines()
  path.write_text('\n'.join([lines[0], json.dumps(json.loads(lines[1]) | change), *lines[2:]]) + '\n')
  with pytest.raises(ValueError, match=f'{path}, {message}'):
    report_run.read_run(copy)


@pytest.mark.parametrize('line, message', [
    ('{"step": 1', 'line 3: .* is not JSON'), ('[1]', 'line 3: .* is not a JSON object'),
    ('{"step": 1}', 'line 3: step=1 must be an integer and time_s=None a number'),
    ('{"step": 1, "time_s": 1, "x": "y"}', "line 3: x is 'y' and must be a number or null"), ('\udcff', 'line 3: .* is not JSON'),
    ('{"step": 1, "time_s": 1, "x": 1e999}', 'line 3: x is inf and must be a number or null')])
def test_damaged_metrics_are_named(copy, line, message):
  path = copy / monitor.METRICS_FILE
  lines = path.read_text().splitlines()
  path.write_text('\n'.join([*lines[:2], line, *lines[2:]]) + '\n', errors='surrogateescape')
  with pytest.raises(ValueError, match=f'{path}, {message}'):
    report_run.read_run(copy)


def test_a_line_without_a_field(copy):
  path = copy / monitor.TRAJECTORIES_FILE
  record = json.loads(path.read_text().splitlines()[0])
  del record['versions']
  path.write_text(json.dumps(record) + '\n')
  with pytest.raises(ValueError, match='line 1: versions is missing and must be list; repair the line or delete it'):
    report_run.read_run(copy)


@pytest.mark.parametrize('text, message', [
    ('{', 'is not JSON'), ('[]', 'must hold a JSON object, got list'), ('{"answers": {}}', "has no 'name' and list of 'trajectories'"),
    ('{"name": "x", "trajectories": [3]}', 'trajectories, line 1: .* is not a JSON object')])
def test_a_baseline_that_is_none(tmp_path, text, message):
  path = tmp_path / 'base.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    report_run.read_baseline(path)
  with pytest.raises(FileNotFoundError, match='is no file; give what launch.evaluate'):
    report_run.read_baseline(tmp_path / 'none.json')


def test_a_configuration_of_something_else(copy):
  (copy / monitor.CONFIG_FILE).write_text('{"stage": "rl"}')
  with pytest.raises(ValueError, match=r"config.json has no 'model.path'; it must be the configuration that the run wrote"):
    report_page.render(report_run.read_run(copy), None, 2**20)
