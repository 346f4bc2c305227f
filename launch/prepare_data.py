"""Write demonstrations of a domain as training data: whole right conversations, tool calls and results included.

python -m launch.prepare_data --domain=word_problems/generated --levels=1,2,3 --count=4000 --output=train.jsonl
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from absl import flags

from envs import registry
import launch
from rl.data.demonstrations import demonstrations, plain

_DOMAIN = flags.DEFINE_string('domain', 'word_problems/generated',
                              f'One of {", ".join(registry.names())}, or package/module:function of your own.')
_PATH = flags.DEFINE_string('path', '', 'Data file of the domain, for those that read one.')
_OPTIONS = flags.DEFINE_string('options', '{}', 'Settings of the domain as JSON, such as {"num_words": [1000, 10000]}.')
_LEVELS = flags.DEFINE_list('levels', [], 'Difficulties, in turn; default all. One named twice comes twice as often.')
_SPLIT = flags.DEFINE_enum('split', 'train', ['train', 'heldout'], 'Which problems; no problem is in both.')
_COUNT = flags.DEFINE_integer('count', 4000, 'Number of different problems.', lower_bound=1)
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to write: {"messages": [{"role", "content"}, ...]} a row.')


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
  temporary = path.with_name(path.name + '.tmp')
  with temporary.open('w', encoding='utf-8') as file:
    for messages in demonstrations(domain, levels, _SPLIT.value, _COUNT.value):
      file.write(json.dumps({'messages': plain(messages)}) + '\n')
  os.replace(temporary, path)
  logging.getLogger('launch.prepare_data').info('Wrote %d conversations to %s.', _COUNT.value, path)


if __name__ == '__main__':
  flags.mark_flag_as_required('output')
  launch.run(main)
