"""Other systems doing the same GRPO steps as ours, for `launch.bench rl`: TRL (torch) and Tunix (JAX).

    PEER_VENV/bin/python -P launch/peers_rl.py trl NUM_STEPS      # one line of JSON at the end

Their requirements contradict ours, so each lives in a virtual environment of its own, which `launch.bench rl --peer` makes. There only this
file runs, as a script: of what is installed with Bessemer it needs nothing, and it imports nothing of Bessemer.

Every system is asked for the same: a random Qwen2 of `SHAPE` in float32, one prompt of `PROMPT` tokens a step, `GROUP` completions of
exactly `COMPLETION` tokens (the end-of-text id lies outside the model's vocabulary), no KL term, one AdamW step. `reward` is called once
per step with the completions as text, which makes it the clock: a step lasts from one call to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import os
import random
import resource
import sys
import tempfile
import time

# Hugging Face's names. 4,330,752 parameters.
SHAPE = {
    'model_type': 'qwen2', 'num_hidden_layers': 4, 'hidden_size': 256, 'intermediate_size': 1024, 'num_attention_heads': 4,
    'num_key_value_heads': 4, 'vocab_size': 512, 'max_position_embeddings': 128, 'rms_norm_eps': 1e-6, 'rope_theta': 1e6,
    'tie_word_embeddings': True, 'hidden_act': 'silu',
}
GROUP, PROMPT, COMPLETION, LEARNING_RATE = 16, 32, 64, 1e-4
WARM_UP_STEPS = 3  # the first two compile
_VOCAB = SHAPE['vocab_size']
_END, _PADDING = _VOCAB, _VOCAB + 1  # never sampled, never fed


class StepClock:
  """Time the steps of a loop and the phases in them; a moment belongs to the phase that was entered last.

  Attributes:
    steps: of each ended step {'wall_s', 'cpu_s' of this process, 'others_s': CPU seconds that others took of the cores this process may
      use, 'phases_s': phase -> seconds, adding up to wall_s}.
  """

  def __init__(self):
    self.steps: list[dict] = []
    self._start = self._now()
    self._phase, self._entered_s, self._phases_s = 'rest', self._start['wall_s'], {}

  def enter(self, phase: str) -> None:
    """Say that a phase begins, and with that the one before ends; 'rest' is what has no name."""
    self._enter(phase, time.perf_counter())

  def end_step(self) -> None:
    """Record the step since the last call and begin the next one, in the same phase."""
    now = self._now()
    self._enter(self._phase, now['wall_s'])
    step = {name: now[name] - self._start[name] for name in now}
    self.steps.append({'wall_s': step['wall_s'], 'cpu_s': step['cpu_s'], 'others_s': step['busy_s'] - step['cpu_s'],
                       'phases_s': self._phases_s})
    self._start, self._phases_s = now, {}

  def _enter(self, phase: str, now_s: float) -> None:
    self._phases_s[self._phase] = self._phases_s.get(self._phase, 0.0) + now_s - self._entered_s
    self._phase, self._entered_s = phase, now_s

  def _now(self) -> dict[str, float]:
    return {'wall_s': time.perf_counter(), 'cpu_s': time.process_time(), 'busy_s': _busy_s(os.sched_getaffinity(0))}


def _busy_s(cpus: set[int]) -> float:
  """Return the seconds that these CPUs were not idle since the machine started, those that a hypervisor took included."""
  names, busy = {f'cpu{cpu}' for cpu in cpus}, 0
  with open('/proc/stat') as file:
    for line in file:
      name, *ticks = line.split()
      if name in names:
        user, nice, system, _, _, interrupt, soft_interrupt, stolen, *_ = map(int, ticks)
        busy += user + nice + system + interrupt + soft_interrupt + stolen
  return busy / os.sysconf('SC_CLK_TCK')


def reward(pieces: Sequence[str]) -> float:
  """Return the share of different pieces: cheap, and not the same for all samples of a random model."""
  return len(set(pieces)) / len(pieces)


def prompts(count: int) -> list[list[int]]:
  """Return the ids of `count` prompts, the same for every system."""
  draw = random.Random(0)
  return [[draw.randrange(_VOCAB) for _ in range(PROMPT)] for _ in range(count)]


def to_text(ids: Sequence[int]) -> str:
  """Return the text of ids: every id is a word."""
  return ' '.join(f'w{token}' for token in ids)


def check_length(completions: Sequence[str]) -> None:
  """Raise RuntimeError unless a step's completions are as many and as long as every system was asked for."""
  sizes = [len(completion.split()) for completion in completions]
  if sizes != [COMPLETION] * GROUP:
    raise RuntimeError(f'The step sampled completions of {sizes} tokens instead of {GROUP} of {COMPLETION}; the comparison would be unfair.')


def run_trl(num_steps: int) -> list[dict]:
  """Time steps of TRL's GRPOTrainer with transformers' own generation."""
  import datasets
  import tokenizers
  import torch
  import transformers
  import trl

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  words = {f'w{token}': token for token in range(_VOCAB)} | {'<end>': _END, '<padding>': _PADDING}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token='<padding>'))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  processing_class = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='<end>', pad_token='<padding>')
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**SHAPE), dtype=torch.float32)
  clock = StepClock()

  def score(completions, **_):
    clock.end_step()
    check_length(completions)
    return [reward(completion.split()) for completion in completions]

  class Trainer(trl.GRPOTrainer):
    def _generate_single_turn(self, *arguments, **named):
      clock.enter('generation')
      result = super()._generate_single_turn(*arguments, **named)
      clock.enter('rest')
      return result

    def _prepare_inputs(self, *arguments, **named):
      result = super()._prepare_inputs(*arguments, **named)
      clock.enter('update')
      return result

  class EndOfUpdate(transformers.TrainerCallback):
    def on_step_end(self, *_, **__):
      clock.enter('rest')

  with tempfile.TemporaryDirectory() as directory:
    args = trl.GRPOConfig(
        output_dir=directory, use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=GROUP,
        num_generations=GROUP, max_completion_length=COMPLETION, temperature=1.0, beta=0.0, loss_type='grpo', learning_rate=LEARNING_RATE,
        max_grad_norm=1.0, max_steps=num_steps, logging_strategy='no', save_strategy='no', report_to=[], disable_tqdm=True)
    dataset = datasets.Dataset.from_list([{'prompt': to_text(ids)} for ids in prompts(num_steps)])
    Trainer(model=model, reward_funcs=score, args=args, train_dataset=dataset, processing_class=processing_class,
            callbacks=[EndOfUpdate()]).train()
  return clock.steps


def run_tunix(num_steps: int) -> list[dict]:
  """Time steps of Tunix's GRPOLearner with its own sampler."""
  from flax import nnx
  import jax
  import numpy as np
  import optax
  from tunix.models.qwen2 import model as qwen2
  from tunix.rl import rl_cluster
  from tunix.rl.grpo import grpo_learner
  from tunix.rl.rollout import base_rollout

  class Tokenizer:
    """What Tunix asks of a tokenizer."""

    def encode(self, text, **_):
      return [int(word[1:]) for word in text.split()]

    def decode(self, ids, **_):
      return to_text(ids)

    def bos_id(self):
      return 0  # none is put in front

    def eos_id(self):
      return _END

    def pad_id(self):
      return _PADDING

  model = qwen2.Qwen2(qwen2.ModelConfig(
      num_layers=SHAPE['num_hidden_layers'], vocab_size=_VOCAB, embed_dim=SHAPE['hidden_size'], hidden_dim=SHAPE['intermediate_size'],
      num_heads=SHAPE['num_attention_heads'], head_dim=SHAPE['hidden_size'] // SHAPE['num_attention_heads'],
      num_kv_heads=SHAPE['num_key_value_heads'], rope_theta=int(SHAPE['rope_theta']), norm_eps=SHAPE['rms_norm_eps'],
      use_tied_embedding=SHAPE['tie_word_embeddings']), rngs=nnx.Rngs(0))
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ('fsdp', 'tp'))
  cluster = rl_cluster.RLCluster(
      actor=model, tokenizer=Tokenizer(), cluster_config=rl_cluster.ClusterConfig(
          role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
          training_config=rl_cluster.RLTrainingConfig(
              actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE, weight_decay=0.0)),
              eval_every_n_steps=num_steps + 1, max_steps=num_steps, mini_batch_size=1, train_micro_batch_size=1, pbar_description=None),
          rollout_config=base_rollout.RolloutConfig(
              max_tokens_to_generate=COMPLETION, max_prompt_length=PROMPT, kv_cache_size=PROMPT + COMPLETION, temperature=1.0, top_p=1.0,
              top_k=None)))
  clock = StepClock()
  generate, update = cluster.generate, cluster.update_actor

  def timed_generate(*arguments, **named):
    clock.enter('generation')
    result = generate(*arguments, **named)
    clock.enter('rest')
    return result

  def timed_update(*arguments, **named):
    clock.enter('update')
    update(*arguments, **named)
    jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
    clock.enter('rest')

  def score(prompts, completions, **_):
    clock.end_step()
    check_length(completions)
    return [reward(completion.split()) for completion in completions]

  cluster.generate, cluster.update_actor = timed_generate, timed_update
  learner = grpo_learner.GRPOLearner(
      cluster, grpo_learner.GRPOConfig(num_generations=GROUP, num_iterations=1, beta=0.0, epsilon=0.2), reward_fns=score)
  learner.train([{'prompts': np.array([to_text(ids)])} for ids in prompts(num_steps)])
  return clock.steps


RUNNERS = {'trl': run_trl, 'tunix': run_tunix}


def main(argv: Sequence[str]) -> None:
  if len(argv) != 3 or argv[1] not in RUNNERS:
    raise SystemExit(f'usage: {argv[0]} {"|".join(RUNNERS)} NUM_STEPS')
  steps = RUNNERS[argv[1]](int(argv[2]))
  sys.stdout.write('RESULT ' + json.dumps({'steps': steps, 'peak_gb': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}) + '\n')


if __name__ == '__main__':
  main(sys.argv)
