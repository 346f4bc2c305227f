"""Whole training steps on one very long row, for `launch.bench ring`: the program users start, on files as they have them, on 8 devices.

A row of 1,048,576 tokens through two layers with a window; a global layer of that length is compiled only (A13, and `launch.fit`), because
it would take about 100 CPU minutes a layer and step. A row of 131,072 tokens through two global layers. Both are one document with a skewed
distribution of bytes, of which a few steps learn something.
"""

from __future__ import annotations

from dataclasses import dataclass
import json
from pathlib import Path
import resource
import subprocess
import sys
import tempfile

import numpy as np

_NUM_DEVICES = 8
_NUM_STEPS = 3
NUM_LAYERS = 2


@dataclass(frozen=True)
class Steps:
  """What a run of `launch.train` did.

  Attributes:
    losses: nats a token, of each step.
    cpu_s: of the whole process over the number of steps, compilation and loading included.
    step_s: of the last step, by the clock.
    peak_gb: resident memory of the process with all its devices.
  """
  losses: list[float]
  cpu_s: float
  step_s: float
  peak_gb: float


def measure(length: int, window: int | None) -> Steps:
  """Train a small model for a few steps on one row of `length` tokens, split over 8 simulated devices."""
  from launch import sweep_runs

  with tempfile.TemporaryDirectory() as name:
    root = Path(name)
    sweep_runs.make_model(_model(length, window), root / 'model')
    _write_document(root / 'document', length)
    settings = {
        'model.path': root / 'model', 'data.tasks.train.paths': (str(root / 'document.tokens.npy'),), 'phases': (), 'num_steps': _NUM_STEPS,
        'data.length': length, 'data.rows': 1, 'cpu_devices': _NUM_DEVICES, 'layout.remat': 'attention,attention_lse',
        'layout.compute_dtype': 'float32', 'optimizer.learning_rate': 1e-2, 'optimizer.warmup_steps': 0,
    }
    command = [sys.executable, '-m', 'launch.train', '--config=configs/long_context.py', f'--workdir={root / "run"}',
               *(f'--config.{key}={value}' for key, value in settings.items())]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[1], stdout=sys.stderr)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (root / 'run' / 'metrics.jsonl').read_text().splitlines()]
  steps = [row for row in rows if 'train/loss_nats' in row]
  return Steps([row['train/loss_nats'] for row in steps], (usage.ru_utime + usage.ru_stime) / _NUM_STEPS, steps[-1]['speed/step_s'],
               usage.ru_maxrss / 1e6)


def _model(length: int, window: int | None):
  from models.config import ModelConfig
  from models.tokenizer import ByteTokenizer

  return ModelConfig(family='mistral' if window else 'llama', vocab_size=ByteTokenizer().vocab_size, num_layers=NUM_LAYERS,
                     embed_dim=64, mlp_dim=256, num_heads=1, num_kv_heads=1, head_dim=64, max_length=length, window=window,
                     layer_pattern=('local' if window else 'global',))


def _write_document(path: Path, length: int) -> None:
  from rl.data import token_files

  token_files.write(path, [np.random.default_rng(0).geometric(0.05, length).clip(1, 255).astype(np.int32)])
