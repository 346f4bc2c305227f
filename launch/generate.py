"""Generate from a pretrained model or a run: `python -m launch.generate --model=PATH --prompt='The capital of France is'`.

    python -m launch.generate --model=gemma.gguf --prompts=prompts.jsonl --num_samples=4 --output=samples.jsonl
    python -m launch.generate --model=runs/sft --prompt='What is 6 times 7?' --temperature=0

A row of the --prompts file is {"prompt": TEXT} or {"messages": [{"role", "content"}, ...]}, perhaps with an "id". Completions are printed,
and written to --output, as they finish. What is sampled depends on --seed, the prompt's place and the sample's number, not on --slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import json
from pathlib import Path
import time
from typing import Any

from absl import flags
import numpy as np

import launch
from models import chat, sharding, startup
from models.sampling import Sampling
from models.tokenizer import Tokenizer
from rl import policy as policy_lib
from rl.rollout.engine import Engine, Request

_MODEL = flags.DEFINE_string('model', None, 'Hugging Face directory, .gguf file or run directory.')
_STEP = flags.DEFINE_integer('step', None, 'Checkpoint of a run; default the newest.')
_PROMPT = flags.DEFINE_multi_string('prompt', [], 'Text to continue, or to answer under a chat template; may be repeated.')
_PROMPTS = flags.DEFINE_string('prompts', None, 'JSONL file of prompts.')
_TEMPLATE = flags.DEFINE_enum('chat_template', None, list(chat.TEMPLATES), "How messages become tokens; default the run's, or plain.")
_NUM_SAMPLES = flags.DEFINE_integer('num_samples', 1, 'Completions of each prompt.', lower_bound=1)
_MAX_NEW = flags.DEFINE_integer('max_new_tokens', 64, 'Longest completion, in tokens.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float('temperature', 0.7, '0 decodes greedily.', lower_bound=0)
_TOP_K = flags.DEFINE_integer('top_k', 0, 'Sample among this many likeliest tokens; 0 among all.', lower_bound=0)
_TOP_P = flags.DEFINE_float('top_p', 1.0, 'Sample among the likeliest tokens that have this probability together.')
_MIN_P = flags.DEFINE_float('min_p', 0.0, "Sample among tokens of at least this fraction of the likeliest one's probability.")
_SEED = flags.DEFINE_integer('seed', 0, 'Root of the sampling.', lower_bound=0)
_SLOTS = flags.DEFINE_integer('slots', 16, 'Completions generated side by side.', lower_bound=1)
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Of weights and computation.')
_OUTPUT = flags.DEFINE_string('output', None, 'JSONL file to write; must not exist.')

_LENGTH_MULTIPLE = 64  # Prompts of about the same length then find the compiled functions of earlier runs.


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A conversation to be continued, and where it came from."""

  id: Any
  messages: list[Mapping[str, str]]
  source: str


def read_prompts() -> Iterator[Prompt]:
  """Yield the prompts of the flags, then those of the file."""
  for number, text in enumerate(_PROMPT.value):
    yield Prompt(number, [{'role': 'user', 'content': text}], '--prompt')
  if _PROMPTS.value is None:
    return
  lines = Path(_PROMPTS.value).read_text(encoding='utf-8').splitlines()
  for number, line in enumerate(lines, 1):
    source = f'{_PROMPTS.value}:{number}'
    try:
      row = json.loads(line)
    except ValueError as error:
      raise ValueError(f'{source}: not JSON ({error}); a row is {{"prompt": TEXT}} or {{"messages": [...]}}.') from error
    if not isinstance(row, dict) or ('prompt' in row) == ('messages' in row):
      raise ValueError(f'{source}: {line[:80]} must be an object with either "prompt" or "messages".')
    messages = row['messages'] if 'messages' in row else [{'role': 'user', 'content': row['prompt']}]
    yield Prompt(row.get('id', len(_PROMPT.value) + number - 1), messages, source)


def make_requests(prompts: list[Prompt], tokenizer: Tokenizer, template: chat.Template) -> list[Request]:
  """Return a request for each sample, named (index of the prompt, number of the sample)."""
  sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _MIN_P.value)
  requests = []
  for index, prompt in enumerate(prompts):
    try:
      tokens_T = chat.render(prompt.messages, tokenizer, template, generation_prompt=True).tokens_T
    except (TypeError, ValueError) as error:
      raise ValueError(f'{prompt.source}: {error}') from error
    for sample in range(_NUM_SAMPLES.value):
      seed = int(np.random.SeedSequence([_SEED.value, index, sample]).generate_state(1)[0])
      requests.append(Request((index, sample), tokens_T, sampling, _MAX_NEW.value, seed))
  return requests


def main(_: list[str]) -> None:
  prompts = list(read_prompts())
  if not prompts:
    raise ValueError('there is no prompt; give --prompt=TEXT or --prompts=FILE.jsonl with at least one row.')
  output = None if _OUTPUT.value is None else Path(_OUTPUT.value)
  if output is not None and output.exists():
    raise ValueError(f'--output={output} exists; name a new file, so that nothing is lost.')
  start = time.perf_counter()
  startup.check_backend()
  mesh = sharding.make_mesh(data=-1)
  layout = dataclasses.replace(sharding.ROLLOUT, compute_dtype=_DTYPE.value)
  policy = policy_lib.load(_MODEL.value, mesh, layout, _DTYPE.value, _STEP.value)
  requests = make_requests(prompts, policy.tokenizer, chat.TEMPLATES[_TEMPLATE.value or policy.chat_template])
  length = max(len(request.tokens_T) for request in requests) + _MAX_NEW.value
  engine = Engine(policy.params, policy.config, layout, mesh, num_slots=min(_SLOTS.value, len(requests)),
                  max_length=min(-(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, policy.config.max_length))
  completions = engine.generate(requests, policy.tokenizer.stop_ids)
  if output is not None:
    output.parent.mkdir(parents=True, exist_ok=True)
  loaded, num_tokens = time.perf_counter(), 0
  for completion in completions:
    index, sample = completion.id
    text = policy.tokenizer.decode(completion.tokens_T)
    num_tokens += len(completion.tokens_T)
    print(text if len(requests) == 1 else f'[{prompts[index].id}/{sample}] {text}', flush=True)
    if output is not None:
      with output.open('a', encoding='utf-8') as file:
        file.write(json.dumps({
            'id': prompts[index].id, 'sample': sample, 'messages': prompts[index].messages, 'text': text, 'stop': completion.stop,
            'tokens': completion.tokens_T.tolist(), 'logprobs': [round(float(value), 6) for value in completion.raw_logprobs_T]}) + '\n')
  elapsed = time.perf_counter() - loaded
  print(f'{num_tokens} tokens of {len(requests)} completions in {elapsed:.1f} s with compilation: {num_tokens / elapsed:.1f} tokens/s '
        f'({_DTYPE.value}, {engine.num_slots} slots); ready to generate after {loaded - start:.1f} s.')


if __name__ == '__main__':
  flags.mark_flags_as_required(['model'])
  launch.run(main)
