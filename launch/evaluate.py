r"""Evaluate a pretrained model or a run: held-out likelihood and the share of right answers, with 95 % intervals.

    python -m launch.evaluate --model=runs/sft --data=test.jsonl
    python -m launch.evaluate --model=gemma.gguf --data=train.jsonl --heldout_fraction=0.05 --limit=200 --output=eval.json

    python -m launch.evaluate --model=runs/grpo --config=configs/grpo.py --config.domains="{'arithmetic/integers': {}}"

With --config the held-out problems of its domains are tried instead, with the environments, tools and verifiers of training. Of domains with
long texts, --output=x.json also writes x.svg: accuracy by position of the evidence and by length.

    python -m launch.evaluate --model=runs/grpo --config=configs/grpo.py --output=x.json \
        --config.domains="{'longcontext/multikey': {'options': {'num_words': (1000, 10000)}}}" \
        --config.rollout.max_length=40000 --config.length=40000

A reward model is judged by pairs in JSON lines, as it is trained on: accuracy, calibration before and after a temperature, and whether it
favors long texts, for each of its dimensions. --output=x.json also writes x.svg, agreement with people by confidence.

    python -m launch.evaluate --model=runs/rm --data=pairs.jsonl

With a run as --model, its newest checkpoint is taken (--step chooses another). --heldout_fraction takes the held-out split of a file that is
also trained on, the same one that `launch.train` keeps out; 0 takes the whole file. With --config and --output, the same command goes on
where one that was killed left off.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
import time
from typing import get_args

from absl import flags
import jax
from ml_collections import config_flags
import numpy as np

from envs.verifiers.numbers import Mark, NumberVerifier
import launch
from launch import report_evidence, report_reward, rollouts
from models import chat, heads, sampling, sharding, startup, transformer
from rl import batching, checkpoint, lineage, monitor, reward_model, rl_config, train
from rl import config as config_lib
from rl import policy as policy_lib
from rl.curriculum import heldout_problems, make_domains
from rl.data import tasks
from rl.data.preferences import PreferenceFiles, Preferences
from rl.data.records import Example
from rl.evals import answers, evidence, runner, stats
from rl.rollout.engine import Engine
from rl.rollout.worker import Assignment
from rl.run import CHECKPOINTS
from rl.types import Document

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Configuration of reinforcement learning whose held-out problems to try.')
_MODEL = flags.DEFINE_string('model', None, 'Hugging Face directory, .gguf file or run directory.')
_STEP = flags.DEFINE_integer('step', None, 'Checkpoint of a run; default the newest.')
_DATA = flags.DEFINE_list('data', None, 'Files or globs.')
_SOURCE = flags.DEFINE_enum('source', 'jsonl', ['jsonl', 'parquet', 'tfds'], 'Format of the data.')
_SCHEMA = flags.DEFINE_enum('schema', 'qa', ['qa', 'chat', 'text'], 'What a row is.')
_HELDOUT = flags.DEFINE_float('heldout_fraction', 0.0, 'Use only this share of the data, chosen by content.', lower_bound=0, upper_bound=1)
_LIMIT = flags.DEFINE_integer('limit', 200, 'Most examples to use; 0 is all.', lower_bound=0)
_METRICS = flags.DEFINE_list('metrics', ['likelihood', 'answers'], 'Some of likelihood, answers.')
_MARK = flags.DEFINE_enum('answer_mark', 'hashes', get_args(Mark), 'What announces the final number: hashes is "####", boxed "\\boxed{}".')
_TEMPLATE = flags.DEFINE_enum('chat_template', None, list(chat.TEMPLATES), "How messages become tokens; default the run's, or plain.")
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0 decodes greedily.', lower_bound=0)
_MAX_NEW = flags.DEFINE_integer('max_new_tokens', 128, 'Longest reply, in tokens.', lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Root of the sampling.', lower_bound=0)
_SLOTS = flags.DEFINE_integer('slots', 32, 'Replies generated side by side.', lower_bound=1)
_LENGTH = flags.DEFINE_integer('length', 1024, 'Tokens of a row; longer documents are an error.', lower_bound=8)
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Of weights and computation.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file for results and every reply; a picture of long texts lies beside it.')


def likelihood(policy: policy_lib.Policy, documents: list[Document], mesh, layout) -> stats.Estimate:
  """Return nats per learned token, over documents as independent clusters."""
  rows = 4 * mesh.shape['data'] * mesh.shape['fsdp']
  place = batching.Place.of(layout, mesh)

  @jax.jit
  def logprobs(params, batch):
    hidden_BTD, _ = transformer.forward(params, batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT, policy.config, layout)
    return heads.token_logprobs(hidden_BTD, transformer.unembedding(params, policy.config), batch.targets_BT,
                                softcap=policy.config.final_softcap)

  totals, counts = [], []
  while documents:
    assignment, taken = batching.plan((len(document.tokens_T) for document in documents), rows, _LENGTH.value)
    rows_of_documents = [[documents[index] for index in row] for row in assignment]
    batch = batching.pack_rows(rows_of_documents, _LENGTH.value, denominator=1, aggregation='token_sum')
    documents = documents[taken:]
    with jax.set_mesh(mesh):
      logprobs_BT = logprobs(policy.params, batching.to_global(batch, place))
    nll_BT = -batching.to_host(logprobs_BT, place, _LENGTH.value)
    for row, indices in enumerate(assignment):
      for segment in range(1, len(indices) + 1):
        learned = (batch.segment_ids_BT[row] == segment) & (batch.loss_weight_BT[row] > 0)
        totals.append(float(nll_BT[row, learned].sum()))
        counts.append(int(learned.sum()))
  return stats.ratio_of_sums(totals, counts)


def read_examples() -> list[Example]:
  """Return the examples that the flags ask for, in the order of the files."""
  split = 'heldout' if _HELDOUT.value else 'train'
  task = tasks.TaskConfig(paths=tuple(_DATA.value), source=_SOURCE.value, schema=_SCHEMA.value, heldout_fraction=_HELDOUT.value,
                          limit=_LIMIT.value or None)
  mixture = tasks.build_mixture(tasks.MixtureConfig({'data': task}))
  return list(tasks.examples(mixture, seed=0, split=split, num_epochs=1, shuffle=False))


def evaluate() -> dict:
  """Run what the flags ask for and return the results as JSON values."""
  unknown = set(_METRICS.value) - {'likelihood', 'answers'}
  if unknown or not _METRICS.value:
    raise ValueError(f'--metrics={",".join(_METRICS.value)} must be some of likelihood, answers.')
  examples = read_examples()
  startup.check_backend()
  mesh = sharding.make_mesh(fsdp=-1)
  layout = dataclasses.replace(sharding.TRAIN, compute_dtype=_DTYPE.value)
  policy = policy_lib.load(_MODEL.value, mesh, layout, _DTYPE.value, _STEP.value)
  template = _TEMPLATE.value or policy.chat_template
  results = {'model': _MODEL.value, 'step': _STEP.value, 'data': _DATA.value, 'examples': len(examples), 'chat_template': template}
  print(f'{_MODEL.value} on {len(examples)} examples, template {template}, {_DTYPE.value}')
  if 'likelihood' in _METRICS.value:
    documents = [train.encode(example, policy.tokenizer, chat.TEMPLATES[template]) for example in examples]
    nats = likelihood(policy, documents, mesh, layout)
    results['likelihood'] = {'loss_nats': nats._asdict(), 'perplexity': float(np.exp(nats.value))}
    print(f'loss       {nats} nats per token, perplexity {np.exp(nats.value):.3f}', flush=True)
  if 'answers' in _METRICS.value:
    start = time.perf_counter()
    engine = Engine(policy.params, policy.config, dataclasses.replace(sharding.ROLLOUT, compute_dtype=_DTYPE.value), mesh,
                    num_slots=_SLOTS.value, max_length=_LENGTH.value)
    found = list(answers.generate_answers(
        engine, policy.tokenizer, template, examples, sampling=sampling.Sampling(temperature=_TEMPERATURE.value),
        max_new_tokens=_MAX_NEW.value, seed=_SEED.value, verifier=NumberVerifier(_MARK.value)))
    accuracy = stats.proportion(sum(answer.is_correct for answer in found), len(found))
    unstated = sum(answer.stated is None for answer in found)
    results['answers'] = {'accuracy': accuracy._asdict(), 'without_answer': unstated, 'sampling': {'temperature': _TEMPERATURE.value},
                          'samples': [dataclasses.asdict(answer) for answer in found]}
    print(f'accuracy   {accuracy} ({sum(answer.is_correct for answer in found)} of {len(found)}; {unstated} without an answer; '
          f'{time.perf_counter() - start:.0f} s)')
  return results


def evaluate_domains() -> tuple[dict, str]:
  """Try the held-out problems of --config; return the results as JSON values, and a picture if there are problems with long texts."""
  settings = _CONFIG.value.copy_and_resolve_references()
  settings.model.path = _MODEL.value
  config = config_lib.build(rl_config.RLConfig, settings)
  domains, domain_configs = make_domains(config.domains)
  problems = heldout_problems(domains, domain_configs, config.eval.problems)
  start = time.perf_counter()
  sampler = rollouts.open_sampler(config, domains, step=_STEP.value, dtype=_DTYPE.value, seed=config.seed + 2**31, group_size=1,
                                  temperature=config.eval.temperature, output=Path(_OUTPUT.value) if _OUTPUT.value else None)
  result = runner.Result.of(sampler.collect([Assignment(number, problem) for number, problem in enumerate(problems)]))
  print(f'{_MODEL.value}: held-out pass@1 {result.pass_rate} ({result.num_passed} of {result.num_graded} problems, '
        f'{len(problems) - result.num_graded} not graded; {time.perf_counter() - start:.0f} s)')
  for name, value in result.metrics().items():
    if name.startswith('heldout/pass@1/'):
      print(f'  {name.removeprefix("heldout/pass@1/"):32} {value:.4f}')
  results = {'name': _MODEL.value, 'pass_rate': result.pass_rate._asdict(), 'passed': result.num_passed, 'graded': result.num_graded}
  tries = evidence.tries_of(result.trajectories)
  if tries:
    results['evidence'] = evidence.summary(tries)
    for title, rates in (('words of the text', evidence.by_length(tries)), ('position of the evidence, in tenths', evidence.by_position(tries))):
      print(f'  by {title}: ' + ', '.join(f'{key} {rate.estimate}' for key, rate in rates.items()))
  results['trajectories'] = [monitor.trajectory_record(0, 'eval', trajectory) for trajectory in result.trajectories]
  return results, report_evidence.picture([(_MODEL.value, tries)], background='white')


def is_reward_run() -> bool:
  """Say whether --model is a run of the stage 'reward'."""
  directory = Path(_MODEL.value) / CHECKPOINTS
  return directory.is_dir() and checkpoint.read_host(directory, _STEP.value).config['stage'] == 'reward'


def evaluate_reward() -> tuple[dict, str]:
  """Judge a reward model on the pairs of --data; return the results as JSON values, and a picture."""
  startup.check_backend()
  mesh = sharding.make_mesh(fsdp=-1)
  model = reward_model.load(_MODEL.value, mesh, dataclasses.replace(sharding.TRAIN, compute_dtype=_DTYPE.value), _DTYPE.value, _STEP.value)
  dimensions = checkpoint.read_host(Path(_MODEL.value) / CHECKPOINTS, model.step).config['data']['dimensions']
  files = PreferenceFiles(tuple(_DATA.value), dimensions, _HELDOUT.value)
  with Preferences(files, kept_apart=True, singles=False) as data:
    numbers = data.rows['heldout' if _HELDOUT.value else 'train'][:_LIMIT.value or None]
    found = model.assess(data, numbers, rows=4 * mesh.shape['data'] * mesh.shape['fsdp'], length=_LENGTH.value)
    print(f'{_MODEL.value}, step {model.step}, on {len(numbers)} pairs ({data.left_out.total()} rows left out)\n\n{report_reward.table(found)}')
  results = {'model': _MODEL.value, 'step': model.step, 'data': _DATA.value, 'pairs': len(numbers), 'left_out': dict(data.left_out),
             'dimensions': {name: config_lib.to_json(one) for name, one in found.items()}}
  return results, report_reward.reliability(found, background='white')


def main(_: list[str]) -> None:
  if (_CONFIG.value is None) == (_DATA.value is None):
    raise ValueError(f'--data={_DATA.value} and --config={_CONFIG.value and "..."}: give one of them, files or a configuration of domains.')
  if _CONFIG.value is not None:
    results, picture = evaluate_domains()
  else:
    results, picture = evaluate_reward() if is_reward_run() else (evaluate(), '')
  if _OUTPUT.value:
    path = Path(_OUTPUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    if picture:
      path.with_suffix('.svg').write_text(picture + '\n', encoding='utf-8')
    lineage.write_json(path, results)
    rollouts.forget(path)


if __name__ == '__main__':
  flags.mark_flags_as_required(['model'])
  launch.run(main)
