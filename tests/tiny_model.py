"""A tiny model on disk, as a user has one: Hugging Face files and a byte tokenizer, with data to train it on."""

import json
from pathlib import Path

import jax

from envs.domains import word_problems
from models import hf_weights, sharding, tokenizer, transformer
from models import params as params_lib
from tests import tiny


def write_model(directory: Path, **changes) -> Path:
  """Write the tiny model (byte vocabulary) into `directory`."""
  words = tokenizer.ByteTokenizer()
  config = tiny.config(**({'vocab_size': words.vocab_size, 'max_length': 512} | changes))
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  hf_weights.export(directory, config, params_lib.init(transformer.declare(config), 0, mesh, sharding.TRAIN), dtype='float32', tokenizer=words)
  tokenizer.save(words, directory)
  return directory


def write_data(path: Path, count: int = 200) -> Path:
  """Write word problems as question and answer rows."""
  rows = ({'question': problem.question, 'answer': problem.answer} for problem in word_problems.word_problems(0, count, (1,)))
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return path
