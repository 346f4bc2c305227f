"""The generation program, run as a program: what it prints and writes, and how it says no."""

import json
import os
from pathlib import Path
import subprocess
import sys

import jax
import pytest

from models import hf_weights, sharding, transformer
from models import params as params_lib
from models import tokenizer as tokenizer_lib
from tests import tiny

ROOT = Path(__file__).parents[2]


def run(*arguments):
  return subprocess.run([sys.executable, '-m', 'launch.generate', '--dtype=float32', '--max_new_tokens=6', *arguments], cwd=ROOT,
                        capture_output=True, text=True, check=False, env=os.environ | {'PYTHONPATH': str(ROOT)})


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  directory = tmp_path_factory.mktemp('model') / 'tiny'
  tokenizer = tokenizer_lib.load('byte')
  config = tiny.config(vocab_size=tokenizer.vocab_size)
  params = params_lib.init(transformer.declare(config), 0, sharding.make_mesh(devices=jax.devices()[:1]), sharding.TRAIN)
  hf_weights.export(directory, config, params, dtype='float32', tokenizer=tokenizer)
  return f'--model={directory}'


def test_prompts_and_samples(model, tmp_path):
  (tmp_path / 'prompts.jsonl').write_text(
      '{"prompt": "one", "id": "first"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
  done = run(model, '--prompt=zero', f'--prompts={tmp_path}/prompts.jsonl', '--num_samples=2', '--slots=3',
             f'--output={tmp_path}/out/o.jsonl')
  assert done.returncode == 0, done.stderr
  rows = [json.loads(line) for line in (tmp_path / 'out' / 'o.jsonl').read_text().splitlines()]
  assert sorted((str(row['id']), row['sample']) for row in rows) == [(name, sample) for name in ('0', '2', 'first') for sample in (0, 1)]
  assert [row['messages'][0]['content'] for row in rows if row['id'] == 'first'] == ['one', 'one']
  assert all(len(row['tokens']) == len(row['logprobs']) <= 6 and max(row['logprobs']) < 0 for row in rows)
  assert all(f'[{row["id"]}/{row["sample"]}] ' in done.stdout for row in rows)
  assert len({tuple(row['tokens']) for row in rows}) == 6  # Each sample has random numbers of its own.
  num_tokens = sum(len(row['tokens']) for row in rows)
  assert f'\n{num_tokens} tokens of 6 completions in ' in done.stdout
  assert 'tokens/s (float32, 3 slots)' in done.stdout
  # What was written is never written over.
  again = run(model, '--prompt=zero', f'--output={tmp_path}/out/o.jsonl')
  assert (again.returncode, again.stdout) == (1, '')
  assert 'o.jsonl exists; name a new file' in again.stderr


@pytest.mark.parametrize(('arguments', 'message'), [
    ([], 'launch.generate: there is no prompt; give --prompt=TEXT or --prompts=FILE.jsonl'),
    (['--prompts={}/bad.jsonl'], 'bad.jsonl:2: {"text": 1} must be an object with either "prompt" or "messages".'),
    (['--prompt=x', '--max_new_tokens=500'], 'engine.max_length=128'),
])
def test_mistakes_are_one_message(model, tmp_path, arguments, message):
  (tmp_path / 'bad.jsonl').write_text('{"prompt": "x"}\n{"text": 1}\n')
  done = run(model, *(argument.format(tmp_path) for argument in arguments))
  assert done.returncode == 1
  assert message in done.stderr
  assert 'Traceback' not in done.stderr
