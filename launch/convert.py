"""Convert a model to a Hugging Face directory: `python -m launch.convert --source=runs/sft --target=DIR`.

The source is a run directory (its newest checkpoint, adapters merged), a Hugging Face directory, or a .gguf file. The target holds weights,
config.json and the tokenizer's files, and is complete or not there at all. The conversion runs on the CPU and needs memory for the weights
in the target's dtype. With --layers=0,2,4 the target is a smaller model of these layers, a student for distillation; with --adapter it holds the
adapters of a LoRA run alone, as `peft` reads them.

Deliberately absent: writing GGUF, and quantizing.
"""

from __future__ import annotations

from collections.abc import Sequence
import logging
import time

from absl import flags
import jax

import launch
from models import adapter_files, hf_weights, sharding, student
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from rl import policy as policy_lib

_SOURCE = flags.DEFINE_string('source', None, 'Run directory, directory with config.json and safetensors, a .safetensors or a .gguf file.')
_TARGET = flags.DEFINE_string('target', None, 'Directory to make.')
_STEP = flags.DEFINE_integer('step', None, 'Checkpoint of a run; default the newest.')
_DTYPE = flags.DEFINE_enum('dtype', None, list(sharding.DTYPES),
                            'Dtype of the weights in the target; default bfloat16, of adapters float32, as they were trained.')
_ADAPTER = flags.DEFINE_bool('adapter', False, 'Write the adapters of a LoRA run for peft, not the whole model.')
_TOKENIZER = flags.DEFINE_string('tokenizer', None, 'Where the tokenizer is, if not in the source; "none" converts the weights alone.')
_LAYERS = flags.DEFINE_list('layers', [], 'Layers to keep, counted from 0, for a student of distillation; default all.')
_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace the target if it exists.')


def convert(source: str, target: str, dtype: str | None = None, *, adapter: bool = False, step: int | None = None,
            tokenizer: str | None = None, overwrite: bool = False, layers: Sequence[int] = ()) -> str:
  """Convert, and return one line that says what was done; arguments as the flags, errors as those of `policy`, `hf_weights`, `adapter_files`."""
  start = time.perf_counter()
  hf_weights.check_target(target, overwrite)
  # The tokenizer first: it is quick to load, and missing files should cost no minutes.
  vocabulary = {None: lambda: policy_lib.load_tokenizer(source), 'none': lambda: None}.get(tokenizer, lambda: tokenizer_lib.load(tokenizer))()
  mesh = sharding.make_mesh(devices=jax.devices('cpu')[:1])
  if adapter:
    if layers:
      raise ValueError(f'--adapter writes all adapters of a run, and --layers={",".join(map(str, layers))} asks for some layers; leave one out.')
    dtype = dtype or 'float32'
    config, params, settings, base = policy_lib.load_adapters(source, mesh, sharding.TRAIN, step)
    count = adapter_files.export(target, config, params, base=base, rank_stabilized=settings.rank_stabilized, dtype=dtype, overwrite=overwrite,
                                 tokenizer=vocabulary)
    what = f'adapters of rank {settings.rank} for {base}, {count:,} parameters'
  else:
    dtype = dtype or 'bfloat16'
    config, params = policy_lib.load_params(source, mesh, sharding.TRAIN, dtype, step)
    if layers:
      params, config = student.slice_layers(params, config, layers)
    hf_weights.export(target, config, params, dtype=dtype, overwrite=overwrite, tokenizer=vocabulary)
    what = f'{params_lib.count(params):,} parameters'
  return (f'{source} -> {target}: {config.family}, {what} in {dtype}, '
          f'{"no tokenizer" if vocabulary is None else f"{vocabulary.vocab_size:,} token ids"}, {time.perf_counter() - start:.1f} s.')


def main(_: list[str]) -> None:
  jax.config.update('jax_platforms', 'cpu')  # Leaves an accelerator to whoever is using it.
  try:
    layers = [int(layer) for layer in _LAYERS.value]
  except ValueError as error:
    raise ValueError(f'--layers={",".join(_LAYERS.value)} must be whole numbers separated by commas.') from error
  logging.getLogger('launch.convert').info(
      convert(_SOURCE.value, _TARGET.value, _DTYPE.value, adapter=_ADAPTER.value, step=_STEP.value, tokenizer=_TOKENIZER.value,
              overwrite=_OVERWRITE.value, layers=layers))


if __name__ == '__main__':
  flags.mark_flags_as_required(['source', 'target'])
  launch.run(main)
