"""Where data and models come from: what identifies a file or a model, and records that are whole or not there at all.

A record is written beside its place, flushed to the disk, and renamed: a process that is killed, or a machine that loses its power, leaves
the old record or the new one. Deliberately absent: what is recorded (the caller knows), and signatures.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from rl import checkpoint
from rl import run as run_lib

_BLOCK_BYTES = 1 << 20


def describe_file(path: str | Path) -> dict[str, Any]:
  """Return {'path', 'sha256', 'bytes', 'rows'} of a file of data; rows are its lines.

  Raises:
    FileNotFoundError: the file is not there.
  """
  digest, num_bytes, num_rows = hashlib.sha256(), 0, 0
  with Path(path).open('rb') as file:
    while block := file.read(_BLOCK_BYTES):
      digest.update(block)
      num_bytes += len(block)
      num_rows += block.count(b'\n')
  return {'path': str(path), 'sha256': digest.hexdigest(), 'bytes': num_bytes, 'rows': num_rows}


def fingerprint(path: str | Path) -> str:
  """Return what identifies the content of a path, without the path itself.

  Of a file of data, or a directory of such, a SHA-256 of all of it. Of a run, the step of its newest checkpoint and a SHA-256 as
  `run.model_fingerprint` takes it of a pretrained model: names, sizes and ends of the files.

  Raises:
    FileNotFoundError: there is nothing.
  """
  path = Path(path)
  if path.is_file() and path.suffix not in ('.gguf', '.safetensors'):
    return describe_file(path)['sha256']
  steps = checkpoint.committed_steps(path / run_lib.CHECKPOINTS)
  if steps:
    return f'step {steps[-1]}: {_of_ends(path / run_lib.CHECKPOINTS / str(steps[-1]))}'
  if not path.exists():
    raise FileNotFoundError(f'{path} does not exist, so it has no fingerprint.')
  if path.is_dir() and any(path.glob('*.jsonl')):
    return hashlib.sha256(''.join(f'{Path(file["path"]).name}:{file["sha256"]}\n' for file in describe(path)).encode()).hexdigest()
  return run_lib.model_fingerprint(path)


def describe(path: str | Path) -> list[dict[str, Any]]:
  """Return `describe_file` of a file, or of the .jsonl files of a directory by name."""
  path = Path(path)
  return [describe_file(file) for file in (sorted(path.glob('*.jsonl')) if path.is_dir() else [path])]


def _of_ends(directory: Path) -> str:
  digest = hashlib.sha256()
  for file in sorted(item for item in directory.rglob('*') if item.is_file()):
    digest.update(f'{file.relative_to(directory)}:'.encode())
    run_lib.digest_ends(file, digest)
  return digest.hexdigest()


def write_json(path: str | Path, value: Any) -> None:
  """Write a record, whole or not at all."""
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f'.{path.name}.partial')
  with partial.open('w', encoding='utf-8') as file:
    file.write(json.dumps(value, indent=2) + '\n')
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)


def read_json(path: str | Path) -> dict[str, Any]:
  """Read a record.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is not a JSON object.
  """
  try:
    value = json.loads(Path(path).read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON ({error}); delete it to have that part done again.') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} must hold a JSON object, got {type(value).__name__}; delete it to have that part done again.')
  return value
