r"""Distillation of a teacher into a student of the same vocabulary: on given texts, or on what the student samples itself.

python -m launch.convert --source=TEACHER --target=student --layers=0,2,4,6
python -m launch.train --config=configs/distill.py --config.model.path=student --config.teacher.path=TEACHER \
    --config.data.tasks.train.paths="('train.jsonl',)" --workdir=runs/distill
python -m launch.train --config=configs/distill.py:variant=on_policy --config.model.path=student --config.teacher.path=TEACHER \
    --config.domains="{'word_problems/generated': {'levels': (1, 2)}}" --workdir=runs/distill_on_policy
"""

import ml_collections
from ml_collections import config_dict

from configs import base, grpo


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Return the settings of a variant; `arg` is '' (given texts) or 'variant=on_policy' (arXiv:2306.13649)."""
  if arg == 'variant=on_policy':
    config = grpo.get_config()
    config.aggregation = 'token_mean'
    config.teacher.divergence = 'full'
    config.teacher.reward_coef = 0.0
    config.optimizer.learning_rate = 1e-5
    return config
  if arg:
    raise ValueError(f"configs/distill.py:{arg} asks for an unknown variant; use none, or variant=on_policy.")
  config = base.get_config()
  del config.phases
  config.stage = 'distillation'
  config.num_steps = 200
  config.teacher = ml_collections.ConfigDict({
      'path': '',  # Hugging Face directory, .gguf file or run directory
      'dtype': 'bfloat16',
  })
  config.loss = ml_collections.ConfigDict({
      'alpha': 0.9,  # share of the divergence; the rest is the supervised loss
      'divergence': 'forward',  # forward KL(teacher | student), reverse, jensen_shannon
      'beta': 0.5,  # jensen_shannon: the teacher's share of the mixture
      'temperature': 2.0,  # of both distributions
      'final_temperature': config_dict.placeholder(float),  # at the last step, linearly; None stays
      'top_k': 0,  # keep the teacher's likeliest words beside the run instead of holding the teacher; 0 holds it
  })
  config.optimizer.learning_rate = 2e-5
  config.optimizer.warmup_steps = 10
  config.eval_every_steps = 50
  config.checkpoint_every_steps = 50
  return config
