"""Checkpoints: bit-exact on any mesh, never half-written, never lost, and loud when they fail."""

import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from rl import checkpoint
from rl.checkpoint import CheckpointStore
from rl.types import HostState, TrainState

HOST = HostState(documents=7, seed=2**40, config={'lr': 0.1, 'shape': [2, 3], 'clip': None}, revision='abc', lineage={'model': 'm'})


def mesh_of(num_devices, shape=None):
  shape = (1, num_devices) if shape is None else shape
  return jax.make_mesh(shape, ('data', 'fsdp'), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:num_devices])


def train_state(mesh, seed=0, width=16):
  """A state as a LoRA run has it: None where a parameter is not trained, and optax's nested records with empty parts."""
  rng = np.random.default_rng(seed)

  def array(shape, dtype, *spec):
    # Random bits, so that NaNs with payloads and denormal numbers are among them.
    bits = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return jax.device_put(bits.view(dtype).reshape(shape), NamedSharding(mesh, P(*spec)))

  def params():
    return {
        'blocks': {'q': array((8, width), np.float32, 'fsdp'), 'k': None, 'norm': array((8,), jnp.bfloat16)},
        'head': {'w': array((width, 8), jnp.bfloat16, None, 'fsdp')},
        'embedding': {},
    }

  adam = optax.ScaleByAdamState(count=array((), np.int32), mu=params(), nu=params())
  return TrainState(step=array((), np.int32), trainable=params(), opt_state=(optax.EmptyState(), (adam, optax.EmptyState())))


def abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def bits(tree):
  return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def save_steps(directory, steps, state, keep=9):
  with CheckpointStore(directory, every_steps=1, keep=keep) as store:
    for step in steps:
      store.save(step, state, HOST)


@pytest.fixture(scope='module')
def state():
  return train_state(mesh_of(8))


@pytest.fixture(scope='module')
def saved(tmp_path_factory, state):
  """A directory with step 4, saved from 8 devices; read only."""
  directory = tmp_path_factory.mktemp('saved')
  save_steps(directory, [4], state)
  return directory


@pytest.mark.parametrize(('num_devices', 'shape'), [(8, (1, 8)), (8, (4, 2)), (4, (1, 4)), (2, (1, 2)), (1, (1, 1))])
def test_a_checkpoint_restores_bit_exactly_onto_any_mesh(saved, state, num_devices, shape):
  target = abstract(train_state(mesh_of(num_devices, shape), seed=1))
  with CheckpointStore(saved, every_steps=1, keep=9) as store:
    restored, host = store.restore(target)
  assert host == HOST
  assert bits(restored) == bits(state)
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)


def test_parameters_are_read_without_the_optimizer(saved, state):
  target = abstract(train_state(mesh_of(2)).trainable)
  params = checkpoint.read_params(saved, target)
  assert bits(params) == bits(state.trainable)
  assert jax.tree.structure(params) == jax.tree.structure(state.trainable)
  assert params['blocks']['q'].sharding == target['blocks']['q'].sharding


def test_the_host_state_is_readable_before_any_array(saved):
  assert checkpoint.read_host(saved, 4) == checkpoint.read_host(saved) == HOST


def test_an_empty_directory_holds_nothing_and_says_so(tmp_path, state):
  with CheckpointStore(tmp_path / 'a' / 'b', every_steps=1, keep=1) as store:
    assert store.latest_step() is None
    assert store.restore(abstract(state)) is None
    with pytest.raises(FileNotFoundError, match=r'No checkpoint of step 3 in .*/a/b; it holds no complete checkpoint'):
      store.restore(abstract(state), 3)
  with pytest.raises(FileNotFoundError, match=r'No checkpoint in .*/nowhere; it holds no complete checkpoint'):
    checkpoint.read_host(tmp_path / 'nowhere')


def test_saves_come_every_few_steps_and_old_ones_go(tmp_path, state):
  with CheckpointStore(tmp_path, every_steps=2, keep=2) as store:
    assert [store.is_due(step) for step in range(1, 8)] == [False, True, False, True, False, True, False]
    for step in (2, 4, 6):
      assert store.save(step, state, HOST)
    assert store.save(7, state, HOST)
    assert not store.save(7, state, HOST)  # As when a run is told to stop right after a save.
    store.wait()
    assert checkpoint.committed_steps(tmp_path) == [6, 7]
    assert store.latest_step() == 7


def test_a_resumed_run_has_nothing_to_save_until_it_moves(tmp_path, state):
  save_steps(tmp_path, [3], state)
  with CheckpointStore(tmp_path, every_steps=1, keep=2) as store:
    store.restore(abstract(state))
    assert not store.save(3, state, HOST)
    assert store.save(4, state, HOST)


def test_a_step_that_is_not_the_newest_is_refused(tmp_path, state):
  save_steps(tmp_path, [3, 5], state)
  with CheckpointStore(tmp_path, every_steps=1, keep=2) as store:
    assert store.restore(abstract(state), 3) is not None
    for step in (4, 5):
      with pytest.raises(ValueError, match=rf'Cannot save step {step} in .*: it already holds step 5.*delete the steps from {step} on'):
        store.save(step, state, HOST)
  with pytest.raises(FileNotFoundError, match=r'No checkpoint of step 4 in .*; complete checkpoints there: \[3, 5\]'):
    checkpoint.read_host(tmp_path, 4)


def test_donating_the_state_right_after_a_save_changes_nothing_on_disk(tmp_path):
  sharding = NamedSharding(mesh_of(1), P())
  wanted = np.random.default_rng(0).standard_normal((4 << 20,), np.float32)
  state = TrainState(jax.device_put(np.int32(1), sharding), {'w': jax.device_put(wanted, sharding)}, ())
  apply = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  with CheckpointStore(tmp_path, every_steps=1, keep=1) as store, jax.set_mesh(mesh_of(1)):
    store.save(1, state, HOST)
    target = abstract(state)
    for _ in range(5):
      state = apply(state)
    assert float(state.trainable['w'][0]) != wanted[0]
    restored, _ = store.restore(target)
  assert np.array_equal(restored.trainable['w'], wanted)


def test_a_host_state_changed_after_the_save_does_not_leak_in():
  # What Orbax gets, because Orbax writes it in the background, some time later.
  config = {'lr': 0.1, 'layers': [1, 2]}
  written = checkpoint._host_to_json(HostState(1, 2, config))
  config['lr'] = 0.2
  config['layers'].append(3)
  assert written['config'] == {'lr': 0.1, 'layers': [1, 2]}


# Interrupted and failed saves.

CHILD_ENVIRONMENT = os.environ | {'PYTHONPATH': str(Path(__file__).parents[2])}

SAVING_CHILD = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from rl.checkpoint import CheckpointStore
from rl.types import HostState, TrainState

base = jnp.asarray(np.random.default_rng(0).standard_normal((6 << 20,), np.float32))
store = CheckpointStore(sys.argv[1], every_steps=1, keep=2)
step = 0
while True:
  step += 1
  store.save(step, TrainState(jnp.int32(step), {'w': base + step}, ()), HostState(step, 0, {}))
"""


def kill_in_mid_save(directory, process, delay_s):
  """Kill the child while a step later than its first is being written, and return that step."""
  deadline_s = time.monotonic() + 60
  while time.monotonic() < deadline_s:
    if process.poll() is not None:
      pytest.fail(f'The child ended by itself: {process.returncode}')
    writing = [path for path in directory.glob('*.orbax-checkpoint-tmp') if path.name != '1.orbax-checkpoint-tmp']
    if not writing:
      continue
    time.sleep(delay_s)
    process.send_signal(signal.SIGSTOP)
    if writing[0].exists():
      process.kill()
      process.wait()
      return int(writing[0].name.split('.')[0])
    process.send_signal(signal.SIGCONT)
  return pytest.fail('The child was never seen writing.')


def test_a_save_killed_half_way_is_never_restored_and_hides_nothing(tmp_path):
  delays_s = [0.0, 0.005, 0.02]
  directories = [tmp_path / str(index) for index in range(len(delays_s))]
  children = [subprocess.Popen([sys.executable, '-c', SAVING_CHILD, str(d)], env=CHILD_ENVIRONMENT) for d in directories]
  try:
    killed = [kill_in_mid_save(*arguments) for arguments in zip(directories, children, delays_s, strict=True)]
  finally:
    for child in children:
      child.kill()
      child.wait()
  base = jnp.asarray(np.random.default_rng(0).standard_normal((6 << 20,), np.float32))
  sharding = NamedSharding(mesh_of(1), P())
  target = TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding),
                      {'w': jax.ShapeDtypeStruct(base.shape, base.dtype, sharding=sharding)}, ())
  for directory, step in zip(directories, killed, strict=True):
    with CheckpointStore(directory, every_steps=1, keep=2) as store:
      restored, host = store.restore(target)
      assert store.latest_step() == int(restored.step) == host.documents == step - 1
      assert np.array_equal(restored.trainable['w'], base + (step - 1))
      # The next save has the number of the killed one; what that left behind is in nobody's way.
      assert store.save(step, restored, HOST)
      store.wait()
      assert store.latest_step() == step
    assert not list(directory.glob('*tmp*'))


def test_leftovers_are_cleared_and_incomplete_copies_do_not_count(tmp_path, state):
  save_steps(tmp_path, [1], state)
  (tmp_path / '5.orbax-checkpoint-tmp' / 'state').mkdir(parents=True)
  (tmp_path / '3' / 'state').mkdir(parents=True)
  with CheckpointStore(tmp_path, every_steps=1, keep=9) as store:
    assert store.latest_step() == 1
    store.restore(abstract(state))
    assert store.save(2, state, HOST)
    with pytest.raises(ValueError, match=r'Cannot save step 3: .*/3 exists without its commit_success\.txt, so it is an incomplete copy'):
      store.save(3, state, HOST)
  assert checkpoint.committed_steps(tmp_path) == [1, 2]
  assert not list(tmp_path.glob('*tmp*'))


# A file size limit makes writes fail as a full disk does. It holds for a whole process, and Orbax leaves broken event loops behind when
# writing or reading fails, so this happens in a process of its own.
FAULTY_DISK_CHILD = """
import json, os, resource, sys, time
from pathlib import Path
import jax
import jax.numpy as jnp
import numpy as np
from rl.checkpoint import CheckpointStore, committed_steps, read_state
from rl.types import HostState, TrainState

directory, report = sys.argv[1], {}
host = HostState(1, 0, {})
state = TrainState(jnp.int32(1), {'w': jnp.asarray(np.random.default_rng(0).standard_normal((1 << 20,), np.float32))}, ())
target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)

def fill_disk(is_full):
  resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]) if is_full else limits)

store = CheckpointStore(directory, every_steps=10, keep=1)
store.save(10, state, host)
store.wait()
fill_disk(True)
report['started'] = store.save(20, state, host)
try:
  for step in range(21, 29):
    time.sleep(0.5)
    store.is_due(step)
except RuntimeError as error:
  report['in the loop'] = str(error)
report['kept'] = committed_steps(directory)
fill_disk(False)
restored, _ = store.restore(target)
report['is intact'] = bool(jnp.all(restored.trainable['w'] == state.trainable['w']))
report['saved again'] = store.save(20, state, host)
store.wait()
report['kept then'] = committed_steps(directory)
fill_disk(True)
store.save(30, state, host)
try:
  store.close()
except RuntimeError as error:
  report['at the end'] = str(error)
fill_disk(False)
for path in (Path(directory) / '20' / 'state').rglob('d/*'):
  os.truncate(path, path.stat().st_size // 2)
try:
  read_state(directory, target)
except RuntimeError as error:
  report['reading'] = str(error)
print(json.dumps(report))
"""


def test_a_failed_save_is_loud_and_costs_nothing_already_written(tmp_path):
  result = subprocess.run([sys.executable, '-c', FAULTY_DISK_CHILD, str(tmp_path)], env=CHILD_ENVIRONMENT, capture_output=True, text=True,
                          timeout=120, check=True)
  report = json.loads(result.stdout)
  for moment, newest, step in (('in the loop', 10, 20), ('at the end', 20, 30)):
    message = report.pop(moment)
    assert f'Saving step {step} to {tmp_path} failed: ' in message
    assert 'File too large' in message
    assert f'The newest complete checkpoint is step {newest}. Check free space and permissions' in message
  assert f'Reading the checkpoint {tmp_path}/20 failed: ' in report['reading']
  assert 'If its files are damaged, delete that directory to use an older step' in report.pop('reading')
  assert report == {'started': True, 'kept': [10], 'is intact': True, 'saved again': True, 'kept then': [20]}
  assert checkpoint.committed_steps(tmp_path) == [20]


def test_a_save_that_ends_without_a_commit_is_loud(tmp_path, state, monkeypatch):
  with CheckpointStore(tmp_path, every_steps=1, keep=1) as store:
    monkeypatch.setattr(store._manager, 'save', lambda *args, **kwargs: True)
    store.save(1, state, HOST)
    with pytest.raises(RuntimeError, match='Saving step 1 to .* failed: it ended without an error and without the commit marker'):
      store.wait()


def test_damaged_files_are_named_with_what_is_left(tmp_path, state):
  save_steps(tmp_path, [1, 2], state)
  (tmp_path / '2' / 'host' / 'metadata').write_text('{"docu')
  with pytest.raises(RuntimeError, match=r'Reading the checkpoint .*/2 failed: .*delete that directory .*complete are \[1, 2\]'):
    checkpoint.read_host(tmp_path)
  (tmp_path / '2' / 'state' / '_METADATA').write_text('{')
  with pytest.raises(RuntimeError, match=r'(?s)Reading the checkpoint .*/2 failed: .*delete that directory'):
    checkpoint.read_state(tmp_path, abstract(state))
  assert bits(checkpoint.read_state(tmp_path, abstract(state), 1)) == bits(state)


# What does not fit.

def test_arrays_that_differ_are_named_with_both_shapes(saved, state):
  wrong = train_state(mesh_of(8), width=32)
  with pytest.raises(ValueError) as caught:
    checkpoint.read_state(saved, abstract(wrong))
  message = str(caught.value)
  assert '/4 does not fit the state to restore; 6 arrays differ:' in message
  assert '  trainable/blocks/q: the checkpoint has float32[8,16], the run wants float32[8,32]' in message
  assert '  trainable/head/w: the checkpoint has bfloat16[16,8], the run wants bfloat16[32,8]' in message
  assert message.count('the checkpoint has') == 5
  assert '/4/host/metadata' in message


def test_other_trees_and_dtypes_are_named(saved, state):
  params = dict(state.trainable)
  del params['head']
  params['blocks'] = {**params['blocks'], 'k': params['blocks']['q'], 'norm': params['blocks']['norm'].astype(jnp.float32)}
  with pytest.raises(ValueError) as caught:
    checkpoint.read_params(saved, abstract(params))
  lines = str(caught.value).splitlines()
  assert lines[1:4] == [
      '  trainable/blocks/k: the checkpoint has nothing, the run wants float32[8,16]',
      '  trainable/blocks/norm: the checkpoint has bfloat16[8], the run wants float32[8]',
      '  trainable/head/w: the checkpoint has bfloat16[16,8], the run wants nothing',
  ]


def test_an_optimizer_that_differs_is_named(saved, state):
  with pytest.raises(ValueError, match=r'opt_state/1/0/count: the checkpoint has int32\[\], the run wants nothing'):
    checkpoint.read_state(saved, abstract(state.replace(opt_state=(optax.EmptyState(),))))


def test_a_target_without_shardings_is_refused(saved, state):
  with pytest.raises(ValueError, match=r'step of the state to restore has no sharding; give jax\.ShapeDtypeStruct'):
    checkpoint.read_state(saved, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))


def test_what_cannot_be_stored_is_refused_by_name(tmp_path, state):
  with CheckpointStore(tmp_path, every_steps=1, keep=1) as store:
    with pytest.raises(ValueError, match=r'trainable/rng is a typed PRNG key, which is never stored; derive keys from the root seed'):
      store.save(1, state.replace(trainable={'rng': jax.random.key(0)}), HOST)
    with pytest.raises(ValueError, match=r'trainable/w is a float; a TrainState holds jax\.Arrays only'):
      store.save(1, state.replace(trainable={'w': 1.0}), HOST)
    with pytest.raises(ValueError, match=r'host state cannot be stored as JSON: .*set.* Give plain numbers'):
      store.save(1, state, HostState(1, 2, {'a': {1}}))
  assert checkpoint.committed_steps(tmp_path) == []


def test_a_host_state_of_another_version_is_named(tmp_path, state):
  save_steps(tmp_path, [1], state)
  path = tmp_path / '1' / 'host' / 'metadata'
  path.write_text(json.dumps({'documents': 1, 'examples': 2}))
  with pytest.raises(ValueError, match=r"host/metadata holds the fields \['documents', 'examples'\], but .* reads \['config', 'documents'"):
    checkpoint.read_host(tmp_path)


def test_bad_settings_are_named_before_anything_is_written(tmp_path):
  with pytest.raises(ValueError, match='every_steps=0 must be at least 1'):
    CheckpointStore(tmp_path / 'a', every_steps=0, keep=1)
  with pytest.raises(ValueError, match='keep=0 must be at least 1'):
    CheckpointStore(tmp_path / 'a', every_steps=1, keep=0)
  (tmp_path / 'file').write_text('')
  with pytest.raises(RuntimeError, match=r'Cannot keep checkpoints in .*/file/a: .*Choose a directory that can be written'):
    CheckpointStore(tmp_path / 'file' / 'a', every_steps=1, keep=1)
  assert [path.name for path in tmp_path.iterdir()] == ['file']
