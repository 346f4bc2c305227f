"""What a run's newest checkpoint holds, without the run's configuration: for comparing two runs bit for bit."""

import contextlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from rl import checkpoint


def newest_arrays(workdir: Path):
  """Return (step, the tree of all arrays, parameters and optimizer, as numpy)."""
  directory = workdir / 'checkpoints'
  step = checkpoint.committed_steps(directory)[-1]
  path = directory / str(step) / 'state'
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as reader:
    tree = reader.metadata(path).tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return step, reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def check_equal(workdir: Path, other: Path, step: int) -> None:
  """Raise AssertionError unless both are at this step, with the same arrays in parameters and optimizer."""
  (found, arrays), (wanted, other_arrays) = newest_arrays(workdir), newest_arrays(other)
  assert found == wanted == step
  assert {'trainable', 'opt_state'} <= set(arrays) and len(jax.tree.leaves(arrays)) > 10
  jax.tree.map(np.testing.assert_array_equal, arrays, other_arrays)
