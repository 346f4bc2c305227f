r"""The whole of post-training: a base model is taught, learns what is preferred, is trained against verifiers, and teaches a smaller one.

python -m launch.pipeline --config=configs/pipeline.py --config.model.path=MODEL --workdir=runs/pipeline

Every setting of every run is a flag (--config.rlvr.loss.kl_coef=0.01). `:size=tiny` is for a model of some thousand parameters and a tokenizer
of bytes, on 2 CPU cores in minutes: it shows that all stages work together, not what they can reach.
"""

import ml_collections

from configs import base, distill, dpo, grpo, reward_model, sft

SIZES = ('', 'small', 'tiny')
# What the pipeline gives every run.
_SHARED = ('seed', 'model', 'mesh', 'layout', 'cpu_devices')


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Return the settings; `arg` is '', 'size=small' or 'size=tiny'."""
  size = arg.removeprefix('size=')
  if size not in SIZES:
    raise ValueError(f'configs/pipeline.py:{arg} asks for an unknown size; use none, :size=small or :size=tiny.')
  shared = base.get_config()
  config = ml_collections.ConfigDict({
      'stage': 'pipeline',
      'stages': ('sft', 'reward', 'preference', 'rlvr', 'student'),  # in this order; each starts from the policy before it
      'model': shared.model,  # the base model
      'seed': 0,
      'mixture': {
          # What is drawn, by examples. A domain's levels have equal shares of it, and so have the entries of `paths`, a level each.
          'components': {
              'general': component(0.40, {'word_problems/generated': domain()}),
              'code': component(0.25, {'programs/generated': domain()}),
              'documents': component(0.20, {f'longcontext/{kind}': domain(num_words=(100, 200, 400, 800))
                                            for kind in ('multikey', 'hops', 'latest', 'timeline', 'abstain')}),
              'tools': component(0.15, {'arithmetic/python': domain()}),
          },
          'heldout_fraction': 0.02,  # of the rows, by content, to measure the loss on
          'against': {},  # {'gsm8k': {'paths': ('test.jsonl',), 'schema': 'qa', 'fields': {}}}: rows of `paths` that overlap are left out
          'ngram': 13,  # words in a row that are an overlap
      },
      # Of pairs, RLVR and evaluations.
      'domains': {
          'word_problems/generated': domain(weight=0.40),
          'programs/generated': domain(weight=0.25),
          'longcontext/hops': domain(weight=0.20, num_words=(100, 200, 400, 800)),
          'arithmetic/python': domain(weight=0.15),
      },
      'pairs': {
          'problems': 512,
          'samples': 8,  # of a problem
          'first_index': 100_000,  # of generated problems: beyond those of the mixture
          'pairs_per_problem': 2,
          'min_pairs': 64,  # fewer are filled up with demonstrations against wrong samples; 0 never
          'temperature': 1.0,
      },
      'evaluate': True,  # the base model and each policy, on rlvr.eval.problems held-out problems
      'export_dtype': 'float32',  # of models between stages; bfloat16 would round small updates away
      'mesh': shared.mesh,
      'layout': shared.layout,
      'cpu_devices': 1,
      'sft': run(sft.get_config(), 'data.tasks', 'data.rates'),
      'reward': run(reward_model.get_config(), 'data.paths'),
      'preference': run(dpo.get_config(), 'data.paths'),
      'rlvr': run(grpo.get_config(), 'domains'),
      'student': run(distill.get_config(), 'data.tasks', 'data.rates', 'teacher.path'),
      'student_layers': (),  # of the policy before it, counted from 0; () is every second one of each kind of attention
  })
  for stage in (config.sft, config.student):
    stage.data.length = 2048
    stage.num_steps = 1000
  for stage in (config.reward, config.preference):
    stage.data.length = 4096  # both texts of a pair
    stage.data.rows = 4
  config.rlvr.length = 2048
  config.rlvr.rollout.max_length = 2048
  config.rlvr.rollout.max_new_tokens = 256
  config.rlvr.rollout.describe_tools = False  # as in the mixture, whose demonstrations show how tools are called
  if size == 'small':
    fit_small(config)
  if size == 'tiny':
    shrink(config)
  return config


def fit_small(config: ml_collections.ConfigDict) -> None:
  """Fit a model of some hundred million parameters and two CPU cores: tasks whose texts are short, LoRA in every stage."""
  short = {'num_words': 60, 'hops': 2}
  config.mixture.components = {
      'general': component(0.40, {'word_problems/generated': domain(levels=(1,))}, count=800),
      'code': component(0.25, {'programs/generated': domain(levels=(1,))}, count=500),
      'documents': component(0.20, {'longcontext/hops': domain(**short)}, count=400),
      'tools': component(0.15, {'arithmetic/python': domain(levels=(1, 2))}, count=300),
  }
  config.domains = {
      'word_problems/generated': domain(weight=0.20, levels=(1,)),
      'programs/generated': domain(weight=0.25, levels=(1,)),
      'longcontext/hops': domain(weight=0.20, **short),
      # One level: calls of the two differ in their first bracket, so what few pairs say of one level, a small model takes to be said of both.
      'arithmetic/python': domain(weight=0.35, levels=(2,)),
  }
  config.layout.scan = False  # on CPU unrolled layers are a sixth faster
  config.layout.remat = 'none'
  config.export_dtype = 'bfloat16'  # what LoRA keeps its base in
  config.pairs.update({'problems': 160, 'samples': 4, 'min_pairs': 160})
  for stage in (config.sft, config.reward, config.preference, config.rlvr):
    stage.lora.rank = 16
    stage.optimizer.warmup_steps = 2
  for stage in (config.sft, config.student):
    stage.data.rows = 8
    stage.data.length = 256
    stage.eval_every_steps = 0
  for stage in (config.reward, config.preference):
    stage.data.rows = 8
    stage.data.length = 384
    stage.data.micro_batches = 1
    stage.data.heldout_fraction = 0.25
  config.sft.num_steps = 12  # more would leave little to find out: a policy that is sure of itself samples nothing new
  config.sft.optimizer.learning_rate = 5e-4
  config.reward.num_steps = 14
  config.reward.eval_every_steps = 14
  config.reward.optimizer.learning_rate = 3e-4
  config.preference.num_steps = 8
  config.preference.eval_every_steps = 8
  config.preference.optimizer.learning_rate = 3e-5
  config.student_layers = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 17)  # of 18; of the slices tried, those without later middle layers lost least
  config.student.num_steps = 40
  config.student.lora.rank = 64
  config.student.loss.update({'alpha': 0.5, 'temperature': 1.0})
  config.student.optimizer.update({'learning_rate': 1e-3, 'warmup_steps': 4})
  config.rlvr.update({'num_steps': 12, 'groups': 8, 'group_size': 8, 'aggregation': 'token_mean', 'length': 256, 'rows': 8,
                      'checkpoint_every_steps': 6})
  config.rlvr.rollout.update({'max_new_tokens': 56, 'max_length': 192, 'slots': 64, 'steps_per_launch': 2})
  config.rlvr.eval.update({'problems': 100, 'every_steps': 0})
  config.rlvr.optimizer.learning_rate = 5e-5


def shrink(config: ml_collections.ConfigDict) -> None:
  """Make everything short and small."""
  short = {'num_words': (80, 120)}
  config.mixture.components = {
      'general': component(0.40, {'word_problems/generated': domain(levels=(1, 2))}, count=400),
      'code': component(0.25, {'programs/generated': domain(levels=(1, 2))}, count=400),
      'documents': component(0.20, {'longcontext/hops': domain(**short), 'longcontext/abstain': domain(**short)}, count=400),
      'tools': component(0.15, {'arithmetic/python': domain(levels=(1, 2))}, count=400),
  }
  config.domains = {
      'word_problems/generated': domain(weight=0.40, levels=(1, 2)),
      'programs/generated': domain(weight=0.25, levels=(1, 2)),
      'longcontext/hops': domain(weight=0.20, **short),
      'arithmetic/python': domain(weight=0.15, levels=(1, 2)),
  }
  config.layout.compute_dtype = 'float32'
  config.layout.remat = 'none'
  config.pairs.update({'problems': 32, 'samples': 4, 'min_pairs': 32})
  for stage in (config.sft, config.reward, config.preference, config.rlvr, config.student):
    stage.checkpoint_every_steps = 10
    stage.optimizer.warmup_steps = 2
  for stage in (config.sft, config.reward, config.preference, config.student):
    stage.data.rows = 4
    stage.data.micro_batches = 1
    stage.eval_every_steps = 20
  for stage in (config.sft, config.student):
    stage.num_steps = 60
    stage.data.length = 1024
    stage.optimizer.learning_rate = 3e-3
  config.student_layers = (1,)
  for stage in (config.reward, config.preference):
    stage.num_steps = 20
    stage.data.length = 2048
    stage.data.heldout_fraction = 0.2
    stage.optimizer.learning_rate = 1e-4
  config.rlvr.update({'num_steps': 4, 'groups': 4, 'group_size': 4, 'length': 1280, 'rows': 4, 'checkpoint_every_steps': 1})
  config.rlvr.rollout.update({'max_new_tokens': 48, 'max_length': 1280, 'slots': 16})
  config.rlvr.eval.update({'problems': 16, 'every_steps': 4})
  config.rlvr.optimizer.learning_rate = 1e-4


def component(rate: float, domains: dict, count: int = 4000) -> dict:
  """Return a component of the mixture that is demonstrations of domains."""
  return {
      'rate': rate,  # relative number of examples drawn
      'domains': domains,
      'count': count,  # demonstrations written
      'paths': (),  # instead of domains: .jsonl files or globs, one for each level of difficulty
      'schema': 'chat',  # of paths: chat, qa, text
      'fields': {},  # of paths: where a column has another name
  }


def domain(*, weight: float = 1.0, levels: tuple = (), **options) -> dict:
  """Return the use of a domain."""
  return {'path': '', 'weight': weight, 'levels': levels, 'options': options}


def run(config: ml_collections.ConfigDict, *given: str) -> ml_collections.ConfigDict:
  """Return a run's settings without those that the pipeline gives it."""
  for key in (*_SHARED, *given):
    *path, last = key.split('.')
    holder = config
    for part in path:
      holder = holder[part]
    del holder[last]
  return config
