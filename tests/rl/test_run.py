"""How a run begins: from its newest checkpoint or anew, never with two states in memory, and never from another run's."""

import contextlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import run
from rl.checkpoint import CheckpointStore
from rl.types import HostState, TrainState

HOST = HostState(0, 7, {'seed': 7}, 'r', {'data': 'a'})


def state_of(step):
  return TrainState(jnp.int32(step), {'w': jnp.arange(4.0) + step}, {'mu': jnp.ones(4) * step})


@contextlib.contextmanager
def opened(directory):
  with CheckpointStore(directory / 'checkpoints', every_steps=1, keep=2) as store:
    yield store


@pytest.fixture
def saved(tmp_path):
  """The directory of a run that saved step 3 after 12 documents."""
  with opened(tmp_path) as store:
    store.save(3, state_of(3), HostState(12, 7, {'seed': 7}, 'old', {'data': 'a'}, {'kl_coef': 0.5}))
  return tmp_path


def test_a_new_run_begins_with_what_is_made(tmp_path):
  made = state_of(0)
  with opened(tmp_path) as store:
    state, host = run.begin(store, lambda: made, HOST, tmp_path, ())
  assert state is made and host is HOST


def test_a_run_goes_on_from_its_newest_checkpoint_whose_state_is_the_only_one(saved, monkeypatch):
  made = []

  def make_state():
    state = state_of(0)
    made.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(state))
    return state

  with opened(saved) as store:
    restore, alive = store.restore, []

    def watched(abstract):
      alive.append(sum(reference() is not None for reference in made))
      return restore(abstract)

    monkeypatch.setattr(store, 'restore', watched)
    state, host = run.begin(store, make_state, HOST, saved, ())
  assert alive == [0] and len(made) == 3
  jax.tree.map(np.testing.assert_array_equal, state, state_of(3))
  assert (host.documents, host.progress, host.revision) == (12, {'kl_coef': 0.5}, 'r')


def test_another_run_is_refused_before_a_state_is_made(saved):
  def never():
    raise RuntimeError('A state was made.')

  other = HostState(0, 8, {'seed': 8}, 'r', {'data': 'b'})
  with opened(saved) as store:
    with pytest.raises(ValueError, match='holds a run that differs: seed: 7 there, 8 now; lineage.data'):
      run.begin(store, never, other, saved, ())
    with pytest.raises(ValueError, match="lineage.data: 'a' there, 'b' now"):
      run.begin(store, never, other, saved, ('seed',))
