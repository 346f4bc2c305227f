"""The monitor of drift: numbers by hand, alarms of simulated runs that exploit a proxy before the truth has fallen, and honest runs without."""

import dataclasses
import json

import numpy as np
import pytest

from rl.drift import DriftConfig, Monitor

GROUPS, SIZE = 16, 8
PROBLEMS = np.repeat(np.arange(GROUPS), SIZE)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


class Policy:
  """Samples are right or not, and flattering or not; both by a chance that REINFORCE with group-relative advantages changes."""

  def __init__(self, seed, skill=0.0, flattery=-4.0):
    self.rng = np.random.default_rng(seed)
    self.logits = np.array([skill, flattery])

  def sample(self, hurts):
    """Return (what was done [N, 2], truth_N): flattery spoils a right answer with the chance `hurts`."""
    done_N2 = self.rng.random((GROUPS * SIZE, 2)) < sigmoid(self.logits)
    spoiled_N = done_N2[:, 1] & (self.rng.random(GROUPS * SIZE) < hurts)
    return done_N2, (done_N2[:, 0] & ~spoiled_N).astype(float)

  def learn(self, done_N2, proxy_N, rate=0.2):
    groups = proxy_N.reshape(GROUPS, SIZE)
    advantages = ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-6)).reshape(-1)
    self.logits = self.logits + rate * (advantages[:, None] * (done_N2 - sigmoid(self.logits))).mean(0) * 5

  def chance(self, hurts):
    skill, flattery = sigmoid(self.logits)
    return skill * (1 - hurts * flattery)


def train(seed, bonus, hurts, num_steps=150, config=DriftConfig(), noise=0.1, **policy):
  """Return (steps of alarms, truth expected at each step, monitor)."""
  policy, monitor, alarms, truths = Policy(seed, **policy), Monitor(config), [], []
  for step in range(num_steps):
    truths.append(policy.chance(hurts))
    done_N2, truth_N = policy.sample(hurts)
    proxy_N = truth_N + bonus * done_N2[:, 1] + policy.rng.normal(0, noise, truth_N.shape)
    alarm = monitor.observe(step, proxy_N, truth_N, PROBLEMS)
    alarms += [alarm] if alarm else []
    policy.learn(done_N2, proxy_N)
  return alarms, np.array(truths), monitor


def falls_by(truths, share):
  """The first step at which the truth is that far below its best so far."""
  return int(np.argmax(truths < (1 - share) * np.maximum.accumulate(truths)))


@pytest.mark.parametrize('case', [
    {'bonus': 2.0, 'hurts': 1.0}, {'bonus': 3.0, 'hurts': 0.7, 'skill': 2.0}, {'bonus': 1.5, 'hurts': 1.0, 'skill': 1.0}])
def test_the_alarm_comes_before_a_tenth_of_the_truth_is_lost(case):
  for seed in range(8):
    alarms, truths, _ = train(seed, **case)
    lost = falls_by(truths, 0.1)
    assert lost > 0, 'the simulated policy must lose what it could do'
    assert alarms and alarms[0].test == 'agreement' and alarms[0].step < lost, (seed, alarms[:1], lost)
    # It is no accident of the start, where flattery is rare.
    assert alarms[0].step >= 5


@pytest.mark.parametrize('noise', [0.1, 1.0])
def test_honest_runs_ring_no_alarm(noise):
  found = [train(seed, bonus=0.0, hurts=1.0, noise=noise) for seed in range(6)]
  assert min(truths[-1] for _, truths, _ in found) > 0.85
  assert [len(alarms) for alarms, _, _ in found] == [0] * 6 and not any(monitor.metrics()['drift/alarm'] for _, _, monitor in found)


def test_where_agreement_is_blind_the_fall_of_the_truth_rings():
  monitor = Monitor(DriftConfig(window=3, drop=0.1, action='stop'))
  found = []
  for step, (truth, proxy) in enumerate([(0.8, 1.0)] * 4 + [(0.75, 1.1)] * 3 + [(0.6, 1.2)] * 4):
    # The samples of a problem are all alike; problems differ a little.
    jitter = np.tile([0.01, -0.01], GROUPS // 2)[PROBLEMS]
    alarm = monitor.observe(step, proxy + jitter, truth + jitter, PROBLEMS)
    found += [(step, alarm)] if alarm else []
  # Windows of .8, .8, ... .75 (6 % lower), then (.75 + .75 + .6) / 3 = .7, 12.5 % lower.
  assert [step for step, _ in found] == [7] and found[0][1].test == 'score' and found[0][1].action == 'stop'
  assert found[0][1].reason == 'The truth fell from 0.8 at step 2 to 0.7 over the last 3 steps, while the proxy went from 1 to 1.133.'
  assert 'drift/agreement' not in monitor.metrics() and monitor.metrics()['drift/truth'] == pytest.approx(0.6)


def test_a_truth_that_falls_with_its_proxy_is_no_hacking():
  monitor = Monitor(DriftConfig(window=1, drop=0.1))
  values = np.linspace(1, 0.2, 10)
  assert [monitor.observe(step, np.full(16, value), np.full(16, value)) for step, value in enumerate(values)] == [None] * 10


def test_agreement_by_hand():
  monitor = Monitor(DriftConfig(window=2))
  # Problem 0: pairs (right, wrong) 2 x 1 of which the proxy orders one rightly and ties the other: 3/4. Problem 1 says nothing.
  monitor.observe(1, [0.9, 0.5, 0.5, 3.0, 4.0], [1, 1, 0, 1, 1], [0, 0, 0, 1, 1])
  values = monitor.metrics()
  assert values['drift/agreement'] == 0.75 and values['drift/truth'] == pytest.approx((2 / 3 + 1) / 2)
  # A problem of its own: 0 of 1, then a mean of .375 over two problems.
  monitor.observe(2, [1.0, 2.0], [1, 0])
  assert monitor.metrics()['drift/agreement'] == 0.375
  # A window of two steps has forgotten the first.
  monitor.observe(3, [2.0, 1.0], [0.7, 0.2])
  assert monitor.metrics()['drift/agreement'] == 0.5


def test_agreement_that_falls_rings_above_chance_too():
  monitor = Monitor(DriftConfig(window=2, fall=0.1, action='snapshot'))
  truth, found = np.tile([1.0, 0.0], 40), []
  for step, share in enumerate([1.0, 1.0, 0.95, 0.9, 0.7, 0.7]):
    # The proxy orders this share of the 40 problems as the truth does.
    proxy = np.where(np.arange(80) // 2 < 40 * share, truth, 1 - truth)
    alarm = monitor.observe(step, proxy, truth)
    found += [alarm] if alarm else []
  # Windows of 97.5, 92.5 and 80 %: the first that is a tenth lower, and not by chance.
  assert [alarm.step for alarm in found] == [4] and (found[0].test, found[0].action) == ('agreement', 'snapshot')
  assert 'in 80% of cases over the last 2 steps' in found[0].reason and 'after 100% in the first ones' in found[0].reason


def test_worse_than_chance_rings_without_a_past():
  monitor = Monitor(DriftConfig(window=5, min_problems=10))
  alarm = monitor.observe(7, np.tile([0.0, 1.0], 20), np.tile([1.0, 0.0], 20))
  assert alarm.step == 7 and 'in 0% of cases' in alarm.reason and 'which is worse than chance' in alarm.reason
  # It rings once, until it has been quiet.
  assert monitor.observe(8, np.tile([0.0, 1.0], 20), np.tile([1.0, 0.0], 20)) is None and monitor.metrics()['drift/alarm'] == 1
  few = Monitor(DriftConfig(min_problems=30))
  assert few.observe(1, np.tile([0.0, 1.0], 20), np.tile([1.0, 0.0], 20)) is None


@pytest.mark.parametrize('proxy, truth', [([], []), ([1.0], [1.0]), ([np.nan, 1.0], [1.0, np.inf]), ([1.0, 1.0], [0.5, 0.5])])
def test_nothing_to_say_is_finite(proxy, truth):
  monitor = Monitor(DriftConfig(window=1, min_problems=1))
  for step in range(3):
    assert monitor.observe(step, proxy, truth) is None
  assert all(np.isfinite(value) for value in monitor.metrics().values())
  assert monitor.metrics()['drift/left_out'] == np.count_nonzero(~(np.isfinite(proxy) & np.isfinite(truth)))


def test_what_is_not_known_changes_nothing():
  rng = np.random.default_rng(0)
  proxy, truth = rng.random(32), rng.random(32).round()
  monitors = Monitor(DriftConfig()), Monitor(DriftConfig())
  monitors[0].observe(1, proxy, truth, np.arange(32) // 4)
  for fill in (np.nan, np.inf):
    dirty = np.append(proxy, [fill, 0.0, 9.0]), np.append(truth, [1.0, fill, fill]), np.append(np.arange(32) // 4, [0, 0, 99])
    other = Monitor(DriftConfig())
    other.observe(1, *dirty)
    assert other.to_json() == monitors[0].to_json() and other.metrics()['drift/left_out'] == 3


def test_a_resumed_monitor_goes_on_as_if_nothing_had_happened():
  config = DriftConfig()
  rng = np.random.default_rng(1)
  steps = [(rng.normal(size=GROUPS * SIZE), (rng.random(GROUPS * SIZE) < 0.5).astype(float)) for _ in range(12)]
  steps += [(-truth, truth) for _, truth in steps]
  whole, resumed = Monitor(config), Monitor(config)
  alarms = [[], []]
  for step, (proxy, truth) in enumerate(steps):
    alarms[0].append(whole.observe(step, proxy, truth, PROBLEMS))
    resumed = Monitor(config, json.loads(json.dumps(resumed.to_json())))
    alarms[1].append(resumed.observe(step, proxy, truth, PROBLEMS))
    assert resumed.to_json() == whole.to_json()
  assert alarms[0] == alarms[1] and sum(alarm is not None for alarm in alarms[0]) == 1


@pytest.mark.parametrize('changes, message', [
    ({'window': 0}, 'window=0 and min_problems=10 must be at least 1'),
    ({'fall': 0.0}, 'fall=0.0 and drop=0.05 are shares'),
    ({'drop': 1.0}, 'fall=0.1 and drop=1.0 are shares'),
])
def test_settings_that_mean_nothing_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(DriftConfig(), **changes)


def test_lengths_must_agree():
  with pytest.raises(ValueError, match=r'proxy \(2,\), truth \(3,\) and problems \(3,\) must be one number for each sample'):
    Monitor(DriftConfig()).observe(1, [1.0, 2.0], [1.0, 0.0, 1.0])
