r"""Context extension to 1,048,576 tokens: one run in phases of ever longer rows and a larger RoPE base, a million tokens a step.

python -m launch.train --config=configs/long_context.py:schedule=llama3 --config.model.path=MODEL \
    --config.data.tasks.train.paths="('books.tokens.npy',)" --workdir=runs/long_context

Schedules: `llama2` has the lengths and bases of Large World Model (arXiv:2402.08268), `llama3` those of Gradient's Llama 3 8B. Another one is
written on the command line, such as --config.phases="({'num_steps': 100, 'length': 65536, 'rows': 16, 'rope': {'theta': 2e7}},)" with
--config.num_steps=100; RoPE scalings (linear, ntk, yarn, llama3) go where theta does. All devices form one ring; where every phase has several
rows, some may go to `mesh.fsdp`. The data is tokenized beforehand by `launch.tokenize`.
"""

import ml_collections

from configs import base

# (length, rows, RoPE base, steps) of each phase.
SCHEDULES = {
    'llama2': ((32_768, 32, 1e6, 400), (131_072, 8, 1e7, 400), (262_144, 4, 1e7, 400), (524_288, 2, 2.5e7, 200), (1_048_576, 1, 5e7, 200)),
    'llama3': ((65_536, 16, 1.53e7, 400), (262_144, 4, 2.07e8, 400), (524_288, 2, 1.06e9, 200), (1_048_576, 1, 2.80e9, 200)),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Return the settings of a schedule; `arg` is '' or 'schedule=NAME'."""
  name, _, schedule = (arg or 'schedule=llama2').partition('=')
  if name != 'schedule' or schedule not in SCHEDULES:
    raise ValueError(f'configs/long_context.py:{arg} is unknown; use :schedule= with one of {", ".join(SCHEDULES)}.')
  config = base.get_config()
  config.phases = tuple({'num_steps': num_steps, 'length': length, 'rows': rows, 'rope': {'theta': theta}}
                        for length, rows, theta, num_steps in SCHEDULES[schedule])
  config.num_steps = sum(phase['num_steps'] for phase in config.phases)
  config.data.tasks.train.source = 'npy'
  config.data.tasks.train.schema = 'tokens'
  config.data.tasks.train.heldout_fraction = 0.0
  config.data.overlong = 'truncate'
  config.optimizer.learning_rate = 2e-5
  config.optimizer.schedule = 'constant'
  config.optimizer.warmup_steps = 20
  config.mesh.fsdp = 1
  config.mesh.seq = -1
  # Backward neither runs the ring again nor holds the inputs of all layers on the devices.
  config.layout.remat = 'offload,attention,attention_lse'
  config.layout.mlp_chunk = 4096
  config.checkpoint_every_steps = 50
  return config
