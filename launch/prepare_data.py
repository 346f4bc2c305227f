"""Write generated training data: `python -m launch.prepare_data --domain=word_problems --count=4000 --output=train.jsonl`."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from absl import flags

from envs.domains import word_problems
import launch

_DOMAINS = {'word_problems': word_problems.word_problems}

_DOMAIN = flags.DEFINE_enum('domain', 'word_problems', list(_DOMAINS), 'Generator of the problems.')
_COUNT = flags.DEFINE_integer('count', 4000, 'Number of different problems.', lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Root of the problems; equal seeds give equal files.', lower_bound=0)
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to write: {"question", "answer"} a row.')


def main(_: list[str]) -> None:
  path = Path(_OUTPUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(path.name + '.tmp')
  with temporary.open('w', encoding='utf-8') as file:
    for problem in _DOMAINS[_DOMAIN.value](_SEED.value, _COUNT.value):
      file.write(json.dumps({'question': problem.question, 'answer': problem.answer}) + '\n')
  os.replace(temporary, path)
  logging.getLogger('launch.prepare_data').info('Wrote %d problems to %s.', _COUNT.value, path)


if __name__ == '__main__':
  flags.mark_flag_as_required('output')
  launch.run(main)
