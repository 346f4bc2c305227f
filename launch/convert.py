"""Convert a model to a Hugging Face directory: `python -m launch.convert --source=model.gguf --target=DIR`.

The target holds weights, config.json and the tokenizer's files, and is complete or not there at all. The conversion runs on the CPU and
needs memory for the weights in the target's dtype.

Deliberately absent: writing GGUF, and quantizing.
"""

from __future__ import annotations

from pathlib import Path
import time
from typing import Any

from absl import app, flags, logging
import jax
from jax.sharding import Mesh

from models import hf_weights, sharding
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from models.config import ModelConfig

_SOURCE = flags.DEFINE_string('source', None, 'Directory with config.json and safetensors, a .safetensors file in one, or a .gguf file.')
_TARGET = flags.DEFINE_string('target', None, 'Directory to make.')
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', list(sharding.DTYPES), 'Dtype of the weights in the target.')
_TOKENIZER = flags.DEFINE_string('tokenizer', None, 'Where the tokenizer is, if not in the source; "none" converts the weights alone.')
_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace the target if it exists.')


def read(source: str, mesh: Mesh, dtype: str) -> tuple[ModelConfig, Any]:
  """Return the configuration and the parameters of a source of any kind, adapters merged."""
  return hf_weights.load(source, mesh, sharding.TRAIN, dtype)


def read_tokenizer(source: str, tokenizer: str | None) -> tokenizer_lib.Tokenizer | None:
  """Return the tokenizer to save beside the weights; None for 'none'."""
  if tokenizer == 'none':
    return None
  if tokenizer is None:
    path = Path(source)
    tokenizer = str(path.parent if path.suffix == '.safetensors' else path)
  return tokenizer_lib.load(tokenizer)


def convert(source: str, target: str, dtype: str, tokenizer: str | None = None, overwrite: bool = False) -> str:
  """Convert, and return one line that says what was done; arguments as the flags, errors as those of `hf_weights`."""
  start = time.perf_counter()
  hf_weights.check_target(target, overwrite)
  vocabulary = read_tokenizer(source, tokenizer)
  config, params = read(source, sharding.make_mesh(devices=jax.devices('cpu')[:1]), dtype)
  hf_weights.export(target, config, params, dtype=dtype, overwrite=overwrite, tokenizer=vocabulary)
  return (f'{source} -> {target}: {config.family}, {params_lib.count(params):,} parameters in {dtype}, '
          f'{"no tokenizer" if vocabulary is None else f"{vocabulary.vocab_size:,} token ids"}, {time.perf_counter() - start:.1f} s.')


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}; every setting is a flag.')
  # Leaves an accelerator to whoever is using it.
  jax.config.update('jax_platforms', 'cpu')
  try:
    summary = convert(_SOURCE.value, _TARGET.value, _DTYPE.value, _TOKENIZER.value, _OVERWRITE.value)
  except (ValueError, TypeError, FileNotFoundError, FileExistsError) as error:
    # Mistakes in the files or flags: the message is the whole story.
    raise SystemExit(f'launch.convert: {error}') from error
  logging.info(summary)


if __name__ == '__main__':
  flags.mark_flags_as_required(['source', 'target'])
  logging.set_verbosity(logging.INFO)
  app.run(main)
