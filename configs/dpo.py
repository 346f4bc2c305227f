r"""Learning from preferences: DPO and its family; a variant is a few settings of the loss.

python -m launch.train --config=configs/dpo.py:variant=simpo --config.model.path=MODEL --config.data.paths="('preferences.jsonl',)" \
    --workdir=runs/dpo
"""

import ml_collections

from configs import base

# What each variant changes of DPO's settings below.
VARIANTS = {
    # arXiv:2305.18290.
    'dpo': {},
    # Conservative DPO: a tenth of the labels are taken to be wrong.
    'cdpo': {'loss.label_smoothing': 0.1},
    # arXiv:2310.12036, per token as its authors advise.
    'ipo': {'loss.kind': 'ipo', 'loss.reduce': 'mean'},
    # arXiv:2402.01306; rows may be pairs, or single replies with a label.
    'kto': {'loss.kind': 'kto'},
    # arXiv:2405.14734.
    'simpo': {'loss.kind': 'simpo', 'loss.reduce': 'mean', 'loss.beta': 2.0, 'loss.margin': 1.0},
    # arXiv:2403.07691.
    'orpo': {'loss.kind': 'orpo', 'loss.reduce': 'mean', 'loss.nll_coef': 1.0},
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Return the settings of a variant; `arg` is '' or 'variant=NAME'."""
  variant = arg.removeprefix('variant=') or 'dpo'
  if variant not in VARIANTS:
    raise ValueError(f'configs/dpo.py:{arg} asks for an unknown variant; use variant= one of {", ".join(VARIANTS)}.')
  config = shared('preference')
  config.loss = ml_collections.ConfigDict({
      'kind': 'dpo',  # dpo, ipo, kto, simpo, orpo
      'beta': 0.1,  # of the log-ratio; ipo: 1 / (2 beta) is aimed at; orpo: weight of the odds ratio
      'reduce': 'sum',  # a text's log-ratio over its tokens: sum, mean
      'label_smoothing': 0.0,  # share of labels taken to be wrong; dpo, simpo
      'margin': 0.0,  # in units of beta times log-ratio; dpo, simpo
      'nll_coef': 0.0,  # of the chosen text's negative log-likelihood per token
      'desirable_weight': 1.0,  # kto
      'undesirable_weight': 1.0,
  })
  config.optimizer.learning_rate = 5e-7
  config.update_from_flattened_dict(VARIANTS[variant])
  return config


def shared(stage: str) -> ml_collections.ConfigDict:
  """Return the settings of a stage that learns from comparisons, without its loss."""
  of_all = base.get_config()
  config = ml_collections.ConfigDict({
      'stage': stage,
      'num_steps': 200,  # optimizer steps; the learning rate schedule ends there
      'seed': 0,
      'model': of_all.model,
      'lora': of_all.lora,
      'data': {
          'paths': (),  # .jsonl files or globs: {"prompt" | "messages", "chosen", "rejected"}, with "dimensions" or without
          'dimensions': {},  # {'helpful': 1.0, 'harmless': 2.0}: weights; {} takes what is chosen as better
          'heldout_fraction': 0.05,  # of the prompts, by their content
          'bad_rows': 'drop',  # rows that teach nothing: drop (and count), error
          'rows': 8,  # of a micro-batch, over all hosts
          'length': 1024,  # tokens of a row, in which both texts of a pair must fit
          'micro_batches': 4,  # of an optimizer step
          'max_segments': 16,  # texts of a row, even
          'overlong': 'drop',  # a comparison that does not fit: drop (and count), error
      },
      'optimizer': of_all.optimizer,
      'mesh': of_all.mesh,
      'layout': of_all.layout,
      'checkpoint_every_steps': 50,
      'checkpoints_kept': 2,
      'eval_every_steps': 50,  # on the held-out prompts; 0 never
      'eval_comparisons': 256,  # of the held-out ones; 0 is all
      'cpu_devices': 1,
  })
  config.optimizer.warmup_steps = 10
  return config
