"""Tokenize documents for long rows: `python -m launch.tokenize --model=MODEL --paths=books.jsonl --target=data/books`.

Writes TARGET.tokens.npy and TARGET.ends.npy (see `rl.data.token_files`), which a run reads with source 'npy' and schema 'tokens' without
holding whole documents. Each row {"text": ...} becomes what training on the row itself would see.
"""

from __future__ import annotations

from collections.abc import Iterator
import logging

from absl import flags
import numpy as np

import launch
from models import chat
from models import tokenizer as tokenizer_lib
from rl import train
from rl.data import tasks, token_files

_MODEL = flags.DEFINE_string('model', None, 'Where the tokenizer is: a model directory or a .gguf file.')
_PATHS = flags.DEFINE_list('paths', None, 'Files or globs of rows {"text": ...}.')
_SOURCE = flags.DEFINE_enum('source', 'jsonl', ['jsonl', 'parquet'], 'Format of the files.')
_COLUMN = flags.DEFINE_string('column', 'text', 'Column that holds the text.')
_TARGET = flags.DEFINE_string('target', None, 'Beginning of the names of the two files.')


def tokenize(model: str, paths: tuple[str, ...], source: str, column: str, target: str) -> str:
  """Write the token files and return one line that says what was done; raises as `tasks.build_mixture` and `token_files.write`."""
  tokenizer = tokenizer_lib.load(model)
  mixture = tasks.build_mixture(tasks.MixtureConfig({'documents': tasks.TaskConfig(paths, source, 'text', {'text': column})}))
  sizes = []

  def documents() -> Iterator[np.ndarray]:
    for example in tasks.examples(mixture, seed=0, num_epochs=1, shuffle=False):
      tokens_T = train.encode(example, tokenizer, chat.TEMPLATES['plain']).tokens_T
      sizes.append(tokens_T.size)
      yield tokens_T

  count = token_files.write(target, documents())
  return f'{target}{token_files.SUFFIX}: {count:,} documents, {sum(sizes):,} tokens, the longest {max(sizes):,}.'


def main(_: list[str]) -> None:
  logging.getLogger('launch.tokenize').info(
      tokenize(_MODEL.value, tuple(_PATHS.value), _SOURCE.value, _COLUMN.value, _TARGET.value))


if __name__ == '__main__':
  flags.mark_flags_as_required(['model', 'paths', 'target'])
  launch.run(main)
