"""Phases by hand: which step belongs to which, what each makes of the model, and what does not fit together."""

import dataclasses

import pytest

from models.config import RopeConfig
from rl import config as config_lib
from rl import phases
from rl.phases import PhaseConfig, RopeExtension
from tests import tiny

DATA = {'length': 64, 'rows': 8, 'micro_batches': 2}
WRITTEN = (PhaseConfig(3), PhaseConfig(2, length=256, rows=2, rope=RopeExtension(theta=5e7)),
           PhaseConfig(1, length=1024, rows=1, micro_batches=1, rope=RopeExtension(scaling='yarn', factor=8.0, original_length=128)))


def test_plan_by_hand():
  plan = phases.plan(WRITTEN, 6, **DATA)
  assert [(phase.first_step, phase.last_step, phase.length, phase.rows, phase.micro_batches) for phase in plan] == [
      (0, 3, 64, 8, 2), (3, 5, 256, 2, 2), (5, 6, 1024, 1, 1)]
  assert [phases.at(plan, step).length for step in range(7)] == [64, 64, 64, 64, 256, 256, 1024]
  assert phases.plan((), 7, **DATA) == (phases.Phase(0, 7, 64, 8, 2, RopeExtension()),)


def test_each_phase_starts_from_the_model_of_the_files():
  model = tiny.config(max_length=128)
  first, second, third = (phase.extend(model) for phase in phases.plan(WRITTEN, 6, **DATA))
  assert first == model
  assert second == dataclasses.replace(model, rope=RopeConfig(theta=5e7), max_length=256)
  assert third.rope == RopeConfig(theta=1e6, scaling='yarn', factor=8.0, original_length=128) and third.max_length == 1024
  assert third.local_rope == model.local_rope == RopeConfig(theta=1e4)


def test_the_past_is_cut_at_a_step():
  plan = phases.plan(WRITTEN, 6, **DATA)
  longer = phases.plan((*WRITTEN[:1], PhaseConfig(9, length=256, rows=2, rope=RopeExtension(theta=5e7))), 12, **DATA)
  assert phases.until(plan, 0) == ()
  assert phases.until(plan, 4) == phases.until(longer, 4) and phases.until(plan, 5) == phases.until(longer, 5)
  assert phases.until(plan, 6) != phases.until(longer, 6)
  other = phases.plan((PhaseConfig(3, rope=RopeExtension(theta=2e4)), *WRITTEN[1:]), 6, **DATA)
  assert phases.until(plan, 1) != phases.until(other, 1)


def test_phases_come_back_from_a_checkpoints_config():
  stored = {'phases': config_lib.to_json(WRITTEN), 'num_steps': 6, 'data': {**DATA, 'overlong': 'drop'}}
  assert phases.of_run(stored) == phases.plan(WRITTEN, 6, **DATA)


@pytest.mark.parametrize('call, message', [
    (lambda: phases.plan(WRITTEN, 7, **DATA), r'phases have 3 \+ 2 \+ 1 = 6 steps, but num_steps=7; they must be the same'),
    (lambda: PhaseConfig(0), 'num_steps=0 of a phase must be at least 1'),
    (lambda: PhaseConfig(1, length=0), 'length=0 of a phase must be at least 1'),
    (lambda: phases.plan((PhaseConfig(1, rope=RopeExtension(scaling='yarn')),), 1, **DATA)[0].extend(tiny.config()),
     "rope.scaling='yarn' needs rope.original_length"),
    (lambda: config_lib.build(PhaseConfig, {'num_steps': 1, 'rope': {'base': 1e6}}), 'config.rope.base=1000000.0 is not a known key'),
])
def test_what_does_not_fit_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
