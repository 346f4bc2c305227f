"""A reward model from training to rewards: right and calibrated on held-out pairs of people who err, normalized, and judged by a program."""

import json
from pathlib import Path
import subprocess
import sys
import xml.etree.ElementTree

import jax
import numpy as np
import pytest

from envs.core import Outcome
from models import sharding
from models import tokenizer as tokenizer_lib
from rl import config as config_lib
from rl import reward_model, train_preference
from rl.data.preferences import Preferences
from rl.proxy_reward import ProxyReward, RewardModelConfig
from rl.types import Trajectory
from tests import tiny_model

ROOT = Path(__file__).resolve().parents[2]
ROWS, LENGTH, NUM_STEPS = 4, 64, 120
FLIPPED = 0.04  # Share of labels in which people err.


def rows(count, seed=0, flipped=FLIPPED):
  """Letters of the first half of the alphabet are better than those of the second, but for some labels; the prompt does not matter."""
  rng = np.random.default_rng(seed)

  def word(letters):
    return ''.join(rng.choice(list(letters), int(rng.integers(2, 6))))

  def sign():
    return -1.0 if rng.random() < flipped else 1.0

  return [{'prompt': f'{number}?', 'chosen': word('abcdefgh'), 'rejected': word('stuvwxyz'),
           'dimensions': {'helpful': sign() * float(rng.integers(1, 3)), 'harmless': sign() * float(rng.integers(0, 2))}}
          for number in range(count)]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """(config, directory, what the program wrote) of a run, half of whose rows are held out."""
  root = tmp_path_factory.mktemp('rewards')
  tiny_model.write_model(root / 'model', vocab_size=tokenizer_lib.ByteTokenizer().vocab_size)
  (root / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows(2400)))
  changes = {
      'model.path': root / 'model', 'data.paths': (str(root / 'rows.jsonl'),), 'data.heldout_fraction': 0.5, 'data.rows': ROWS,
      'data.dimensions': {'helpful': 1.0, 'harmless': 2.0}, 'data.length': LENGTH, 'data.max_segments': 8, 'data.micro_batches': 1,
      'num_steps': NUM_STEPS, 'checkpoint_every_steps': NUM_STEPS, 'eval_every_steps': NUM_STEPS, 'eval_comparisons': 0,
      'layout.remat': 'none', 'layout.compute_dtype': 'float32', 'mesh.fsdp': 1, 'lora.rank': 4, 'model.frozen_dtype': 'float32',
      'optimizer.learning_rate': 5e-3, 'optimizer.warmup_steps': 2}
  done = subprocess.run([sys.executable, '-m', 'launch.train', '--config=configs/reward_model.py', f'--workdir={root / "run"}',
                         *(f'--config.{key}={value}' for key, value in changes.items())],
                        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
  assert done.returncode == 0, done.stderr
  config = config_lib.build(train_preference.RewardConfig, json.loads((root / 'run' / 'config.json').read_text()))
  return config, root / 'run', done.stdout + done.stderr


@pytest.fixture(scope='module')
def model(trained):
  return reward_model.load(trained[1], sharding.make_mesh(devices=jax.devices()[:1]), sharding.TRAIN, 'float32')


def conversation(row, side):
  return [{'role': 'user', 'content': row['prompt']}, {'role': 'assistant', 'content': row[side]}]


def test_it_is_right_and_calibrated_on_held_out_pairs(trained):
  _, directory, written = trained
  results = json.loads((directory / 'metrics.jsonl').read_text().splitlines()[-1])
  assert results['heldout/accuracy'] > 0.9
  found = reward_model.read_calibrations(directory, NUM_STEPS)
  assert list(found) == ['harmless', 'helpful']
  for name, one in found.items():
    # Nobody can be right about labels that are wrong by chance, and a calibrated model knows.
    assert 0.9 < one.accuracy < 1 and one.accuracy == pytest.approx(results[f'heldout/accuracy_{name}'], abs=1e-6)
    assert one.scaled.ece_mass < 0.05 and one.scaled.brier <= one.raw.brier + 1e-3 and abs(one.length_correlation) < 0.4
    assert f'heldout/ece_scaled_{name} {one.scaled.ece_mass:.4f}' in written and f'{one.temperature:.3g}' in written
  drawn = ''.join(xml.etree.ElementTree.parse(directory / 'calibration.svg').getroot().itertext())
  assert 'harmless: ECE' in drawn and 'helpful: ECE' in drawn
  # Half of the pairs do not say which text is more harmless.
  assert 1000 < found['helpful'].pairs < 1400 and 0.3 < found['harmless'].pairs / found['helpful'].pairs < 0.7


def test_fresh_texts_are_ranked_and_what_does_not_fit_is_said(model):
  assert list(model.dimensions) == ['harmless', 'helpful'] and model.step == NUM_STEPS
  fresh = rows(20, seed=1)
  scores = [model.score([conversation(row, side) for row in fresh], rows=ROWS, length=LENGTH) for side in ('chosen', 'rejected')]
  assert scores[0].shape == (20, 2) and (scores[0] > scores[1]).mean() > 0.9
  np.testing.assert_allclose(model.combined(scores[0]), (2 * scores[0][:, 0] + scores[0][:, 1]) / 3, rtol=1e-5)
  assert model.score([], rows=ROWS, length=LENGTH).shape == (0, 2)
  with pytest.raises(ValueError, match='conversation 0: the assistant says nothing after the first 0 messages'):
    model.score([[{'role': 'user', 'content': 'x'}]], rows=ROWS, length=LENGTH)
  with pytest.raises(ValueError, match=r'conversation 1 has \d+ tokens, a row holds length=12; raise length, or leave it out'):
    model.score([conversation(fresh[0], 'chosen'), [{'role': 'user', 'content': 'x' * 20}, {'role': 'assistant', 'content': 'y'}]],
                rows=ROWS, length=12)


def test_scores_are_normalized_over_the_held_out_texts(trained, model):
  config = trained[0]
  with Preferences(config.data, kept_apart=True, singles=False) as data:
    texts = [(*item.prompt, *reply) for item in (data[int(row)] for row in data.rows['heldout']) for reply in item.replies]
  scores = model.normalized(model.score(texts, rows=ROWS, length=LENGTH))
  np.testing.assert_allclose(scores.mean(0), 0, atol=1e-4)
  np.testing.assert_allclose(scores.std(0), 1, rtol=1e-4)


def test_a_run_is_judged_once_and_by_its_own_checkpoint(trained, model, tmp_path, monkeypatch):
  config, directory, _ = trained
  assert train_preference.judge(config, directory) == {}
  assert reward_model.read_calibrations(directory, NUM_STEPS - 1) is None and reward_model.read_calibrations(tmp_path) is None
  monkeypatch.setitem(vars(model), 'calibrations', None)
  with pytest.raises(ValueError, match=f'has no calibration.json of step {NUM_STEPS}, by which scores are normalized; train with eval_every'):
    model.normalized(np.zeros((1, 2)))
  for text, why in (('{', 'JSONDecodeError'), ('{"step": 24}', "KeyError\\('dimensions'\\)"), ('[]', 'TypeError'),
                    ('{"step": 24, "dimensions": {"helpful": {"pairs": 1}}}', 'helpful.accuracy is missing')):
    (tmp_path / 'calibration.json').write_text(text)
    with pytest.raises(ValueError, match=f'calibration.json is not what a reward run writes .*{why}'):
      reward_model.read_calibrations(tmp_path, 24)


def trajectory(number, messages):
  tokens_T = np.arange(4, dtype=np.int32)
  mask_T = tokens_T > 1
  return Trajectory(
      tokens_T=tokens_T, loss_mask_T=mask_T, behavior_logprobs_T=np.where(mask_T, -1, np.nan).astype(np.float32),
      versions_T=np.where(mask_T, 0, -1).astype(np.int32), reward=0.0, outcome=Outcome.OK, problem_id='p', domain='d', level=1, group=0,
      sample=number, terminated=True, truncated=False, num_turns=1, messages=tuple(messages))


def test_it_is_a_proxy_reward(trained, model):
  fresh = rows(6, seed=2)
  conversations = [conversation(row, side) for row in fresh for side in ('chosen', 'rejected')]
  samples = [trajectory(number, messages) for number, messages in enumerate([
      *conversations, [{'role': 'user', 'content': 'x' * LENGTH}, {'role': 'assistant', 'content': 'long'}], [{'role': 'user', 'content': 'x'}]])]
  config = RewardModelConfig(paths=(str(trained[1]),), rows=ROWS, length=LENGTH)
  judged = ProxyReward.load(config, model.mesh, sharding.TRAIN, 'float32').judge(samples)
  wanted = model.combined(model.normalized(model.score(conversations, rows=ROWS, length=LENGTH)))
  np.testing.assert_allclose(judged.rewards_N[:-2], wanted, rtol=1e-5)
  # Too long, and nothing said: no reward, which is not 0.
  assert np.isnan(judged.rewards_N[-2:]).all() and judged.metrics['proxy/unscored'] == 2
  assert judged.rewards_N.dtype == np.float32 and (judged.rewards_N[:-2:2] > judged.rewards_N[1:-2:2]).all()
  assert judged.metrics['proxy/mean'] == pytest.approx(wanted.mean(), rel=1e-5)


def test_what_tools_say_is_not_read_unless_asked_for(model):
  def samples(answer):
    return [trajectory(0, [{'role': 'user', 'content': '1?'}, {'role': 'assistant', 'content': 'st'},
                           {'role': 'tool', 'name': 'look', 'content': answer}, {'role': 'assistant', 'content': 'uv'}])]

  def scores(**changes):
    proxy = ProxyReward(RewardModelConfig(rows=ROWS, length=LENGTH, **changes), {'one': model})
    return [float(proxy.score(samples(answer))[0]) for answer in ('abab', 'zzzzz')]

  hidden, seen = scores(), scores(sees_tools=True)
  assert hidden[0] == hidden[1] and seen[0] != seen[1]


def test_the_program_judges_it_on_any_pairs(trained, tmp_path):
  path = tmp_path / 'pairs.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in [*rows(40, seed=3, flipped=0), {'prompt': 'x', 'chosen': 'a'}]))
  command = [sys.executable, '-m', 'launch.evaluate', f'--model={trained[1]}', f'--data={path}', f'--length={LENGTH}', '--dtype=float32',
             f'--output={tmp_path / "found.json"}']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
  assert done.returncode == 0, done.stderr
  assert f'step {NUM_STEPS}, on 40 pairs (1 rows left out)' in done.stdout
  lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith(('harmless', 'helpful'))}
  found = json.loads((tmp_path / 'found.json').read_text())
  assert found['left_out'] == {'a side is missing': 1} and found['dimensions']['helpful']['pairs'] == 40
  for name, one in found['dimensions'].items():
    assert one['accuracy'] > 0.9 and f'{one["raw"]["ece_mass"]:.4f}' in lines[name] and f'{one["length_correlation"]:+.3f}' in lines[name]
  assert 'helpful' in ''.join(xml.etree.ElementTree.parse(tmp_path / 'found.svg').getroot().itertext())
