"""Does a model learn on a ring what it learns on one device? A multi-key needle, for `launch.bench ring --cases=A14`.

Pairs of a key and a value lie anywhere in a text of filler; at its end some keys are asked for, and each answer is the value that followed the
key. The same small model starts twice from the same parameters, on one device and on a ring of 8 in zigzag order, and reads the same texts:
first short ones, of which it learns to look anything up at all, then ever longer ones. One layer sees two tokens, which tells a value its key
from the first step on (without it the two layers need thousands of steps to find that out), the other sees all.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

_NUM_KEYS = 48
_QUESTION, _FIRST_FILLER, _VOCABULARY = 2 * _NUM_KEYS, 2 * _NUM_KEYS + 1, 128
_NUM_TEXTS = 64


class Phase(NamedTuple):
  """Texts of one length: `rows` of them in each of `steps`."""
  length: int
  num_pairs: int
  num_questions: int
  rows: int
  steps: int


PHASES = (Phase(64, 6, 12, 64, 300), Phase(256, 12, 32, 16, 40), Phase(1024, 16, 64, 8, 30), Phase(2048, 24, 128, 4, 30),
          Phase(4096, 24, 256, 2, 20))


def text(rng: np.random.Generator, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
  """Return (tokens_T, is_answer_T) of one text."""
  length, num_pairs, num_questions = phase[:3]
  keys, values = rng.permutation(_NUM_KEYS)[:num_pairs], rng.integers(_NUM_KEYS, 2 * _NUM_KEYS, num_pairs)
  filler = rng.integers(_FIRST_FILLER, _VOCABULARY, length - 2 * num_pairs - 3 * num_questions)
  places = rng.integers(0, filler.size + 1, num_pairs)
  body = np.insert(filler, np.repeat(places, 2), np.stack([keys, values], 1).reshape(-1))
  asked = rng.integers(0, num_pairs, num_questions)
  questions = np.stack([np.full(num_questions, _QUESTION), keys[asked], values[asked]], 1).reshape(-1)
  is_answer_T = np.zeros(length, np.bool_)
  is_answer_T[length - questions.size + 2::3] = True
  return np.concatenate([body, questions]).astype(np.int32), is_answer_T


def measure(seq: int, phases: tuple[Phase, ...] = PHASES) -> list[tuple[float, float]]:
  """Return the share of right answers (before, after) each phase on texts not trained on, of a model trained on a ring of `seq` devices."""
  import jax
  import jax.numpy as jnp

  from models import params as params_lib
  from models import sharding, transformer
  from models.config import ModelConfig, RopeConfig
  from rl import batching, learner, optimizer
  from rl.types import Document

  config = ModelConfig(family='llama', vocab_size=_VOCABULARY, num_layers=2, embed_dim=64, mlp_dim=128, num_heads=4, num_kv_heads=2, head_dim=32,
                       max_length=phases[-1].length, tied_embeddings=True, rope=RopeConfig(theta=1e4), layer_pattern=('local', 'global'),
                       window=2)
  mesh = sharding.make_mesh(seq=seq, devices=jax.devices()[:seq])
  layout = dataclasses.replace(sharding.TRAIN, order='zigzag' if seq > 1 else 'contiguous', attention='blockwise')
  place = batching.Place.of(layout, mesh)
  settings = optimizer.OptimizerConfig(learning_rate=4e-3, schedule='constant', warmup_steps=50)
  num_steps = sum(phase.steps for phase in phases)
  learn = learner.build(config, layout, mesh, optimizer.build(settings, num_steps), optimizer.schedule(settings, num_steps), full=True)
  trainable, frozen = params_lib.split(params_lib.init(transformer.declare(config), 0, mesh, layout), lambda name: True)
  state = learn.init(trainable)

  def batch(rng, phase):
    texts = [Document(*text(rng, phase)) for _ in range(phase.rows)]
    return batching.to_global(batching.pack(texts, phase.rows, phase.length, aggregation='token_mean'), place)

  @jax.jit
  def count_right(params, batch):
    hidden = transformer.forward(params, batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT, config, layout)[0]
    is_right = jnp.argmax(transformer.logits(params, hidden, config, layout), -1) == batch.targets_BT
    return jnp.sum(is_right & (batch.loss_weight_BT != 0))

  def accuracy(phase):
    rng = np.random.default_rng([1, phase.length])
    with jax.set_mesh(mesh):
      counts = [int(count_right(state.trainable, batch(rng, phase))) for _ in range(_NUM_TEXTS // phase.rows)]
    return sum(counts) / (_NUM_TEXTS * phase.num_questions)

  rng, found = np.random.default_rng(0), []
  for phase in phases:
    before = accuracy(phase)
    for _ in range(phase.steps):
      state, _ = learn.update(state, frozen, [batch(rng, phase)])
    found.append((before, accuracy(phase)))
  return found
