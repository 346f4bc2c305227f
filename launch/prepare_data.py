"""Write conversations of a domain as training data, tool calls and results included: right demonstrations, or what a teacher writes.

    python -m launch.prepare_data --domain=word_problems/generated --levels=1,2,3 --count=4000 --output=train.jsonl
    python -m launch.prepare_data --domain=word_problems/generated --teacher=runs/grpo --verified --samples=4 --temperature=1 --output=train.jsonl

With --teacher each problem is tried by a model or a run, and its texts are written (sequence-level distillation); with --verified only right
ones (rejection sampling). The same command goes on where one that was killed left off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
import json
import logging
import os
from pathlib import Path
from typing import Any

from absl import flags

from envs import registry
from envs.core import Domain
import launch
from rl.data.demonstrations import demonstrations, different, plain

_DOMAIN = flags.DEFINE_string('domain', 'word_problems/generated',
                              f'One of {", ".join(registry.names())}, or package/module:function of your own.')
_PATH = flags.DEFINE_string('path', '', 'Data file of the domain, for those that read one.')
_OPTIONS = flags.DEFINE_string('options', '{}', 'Settings of the domain as JSON, such as {"num_words": [1000, 10000]}.')
_LEVELS = flags.DEFINE_list('levels', [], 'Difficulties, in turn; default all. One named twice comes twice as often.')
_SPLIT = flags.DEFINE_enum('split', 'train', ['train', 'heldout'], 'Which problems; no problem is in both.')
_COUNT = flags.DEFINE_integer('count', 4000, 'Number of different problems.', lower_bound=1)
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to write: {"messages": [{"role", "content"}, ...]} a row.')
_TEACHER = flags.DEFINE_string('teacher', None, 'Model or run directory that writes the texts; default the demonstrations of the domain.')
_STEP = flags.DEFINE_integer('step', None, 'Checkpoint of a run; default the newest.')
_VERIFIED = flags.DEFINE_bool('verified', False, 'Of a teacher: only right texts.')
_SAMPLES = flags.DEFINE_integer('samples', 1, 'Of a teacher: texts of a problem; of equal ones one is kept.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, 'Of a teacher; 0 decodes greedily.', lower_bound=0)
_SEED = flags.DEFINE_integer('seed', 0, 'Of a teacher: root of the sampling.', lower_bound=0)
_TEMPLATE = flags.DEFINE_string('chat_template', None, "Of a teacher; default the run's, or plain.")
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Of a teacher: weights and computation.')
_MAX_NEW = flags.DEFINE_integer('max_new_tokens', 256, 'Of a teacher: longest reply.', lower_bound=1)
_MAX_LENGTH = flags.DEFINE_integer('max_length', 1024, 'Of a teacher: longest conversation, in tokens.', lower_bound=2)
_SLOTS = flags.DEFINE_integer('slots', 32, 'Of a teacher: conversations side by side.', lower_bound=1)


def _written(domain: Domain, levels: list[int], counts: Counter, output: Path) -> Iterator:
  """Yield the conversations that the flags ask for."""
  split, count = _SPLIT.value, _COUNT.value
  if _TEACHER.value is None:
    if _VERIFIED.value:
      raise ValueError('--verified says which texts of a teacher are kept, and there is no --teacher; demonstrations are right.')
    for messages in demonstrations(domain, levels, split, count):
      counts['kept'] += 1
      yield messages
    return
  # Demonstrations need no JAX, whose import takes seconds.
  from launch import teacher_texts
  from models import startup
  from rl.rollout.worker import RolloutConfig

  settings = teacher_texts.TeacherConfig(_TEACHER.value, _STEP.value, _TEMPLATE.value, _DTYPE.value, _SAMPLES.value, _TEMPERATURE.value,
                                         _VERIFIED.value, _SEED.value)
  rollout = RolloutConfig(max_new_tokens=_MAX_NEW.value, max_length=_MAX_LENGTH.value, slots=_SLOTS.value)
  startup.check_backend()
  problems = different(domain, levels, split, count, lambda level, index: domain.problem(split, level, index),
                       lambda problem: problem.messages)
  yield from teacher_texts.conversations(settings, domain, problems, rollout, counts, output=output,
                                         domain_settings={domain.name: {'path': _PATH.value, 'options': _options()}})
  if not counts['kept']:
    raise ValueError(f'--teacher={_TEACHER.value} wrote nothing to keep: {dict(counts)}; use a better teacher, more --samples or a higher '
                     '--max_new_tokens, or leave out --verified.')


def _options() -> dict[str, Any]:
  try:
    options = json.loads(_OPTIONS.value)
  except ValueError as error:
    raise ValueError(f'--options={_OPTIONS.value} is not JSON ({error}); give an object such as {{"num_words": 1000}}.') from error
  if not isinstance(options, dict):
    raise ValueError(f'--options={_OPTIONS.value} must be a JSON object such as {{"num_words": 1000}}.')
  return options


def main(_: list[str]) -> None:
  domain = registry.make_domain(_DOMAIN.value, _PATH.value, _options())
  try:
    levels = [int(level) for level in _LEVELS.value] or list(range(1, domain.source.num_levels + 1))
  except ValueError as error:
    raise ValueError(f'--levels={",".join(_LEVELS.value)} must be whole numbers.') from error
  path = Path(_OUTPUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  counts: Counter = Counter()
  temporary = path.with_name(path.name + '.tmp')
  with temporary.open('w', encoding='utf-8') as file:
    for messages in _written(domain, levels, counts, path):
      file.write(json.dumps({'messages': plain(messages)}) + '\n')
  os.replace(temporary, path)
  if _TEACHER.value is not None:
    from launch import rollouts

    rollouts.forget(path)
  more = '; '.join(f'{what}: {count}' for what, count in sorted(counts.items()) if what != 'kept')
  logging.getLogger('launch.prepare_data').info('Wrote %d conversations to %s.%s', counts['kept'], path, more and f' {more}.')


if __name__ == '__main__':
  flags.mark_flag_as_required('output')
  launch.run(main)
