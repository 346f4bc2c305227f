"""A teacher on the student's mesh: a second frozen tree, checked against the student before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from models import heads_distillation, transformer
from models import params as params_lib
from models.config import ModelConfig
from models.sharding import Layout
from models.tokenizer import Tokenizer
from rl import policy as policy_lib
from rl.learner import TeacherModel
from rl.losses_distillation import TeacherSource
from rl.types import Batch, Params


@dataclass(frozen=True)
class Teacher:
  """A teacher whose parameters are loaded when they are asked for; made by `find`.

  Attributes:
    source: where it is.
    model: what it computes, and how.
    fingerprint: of its parameters.
  """
  source: TeacherSource
  model: TeacherModel
  fingerprint: str
  mesh: Mesh

  def load(self) -> Params:
    """Return its tree on the mesh, adapters merged; raises as `policy.load_params`."""
    return policy_lib.load_params(self.source.path, self.mesh, self.model.layout, self.source.dtype)[1]

  def top_scorer(self, params: Params, count: int, temperature: float) -> Callable[[Batch], tuple[jax.Array, jax.Array]]:
    """Return a function of a global batch to (ids_BTJ, logprobs_BTJ): the likeliest words at the places that count."""
    config, layout = self.model

    @jax.jit
    def score(params, batch):
      hidden_BTD, _ = transformer.forward(params, batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT, config, layout)
      return heads_distillation.top_logprobs(hidden_BTD, transformer.unembedding(params, config), batch.loss_weight_BT != 0, count=count,
                                             temperature=temperature, softcap=config.final_softcap)

    def on_mesh(batch):
      with jax.set_mesh(self.mesh):
        return score(params, batch)

    return on_mesh


def find(source: TeacherSource, student: ModelConfig, tokenizer: Tokenizer, mesh: Mesh, layout: Layout) -> Teacher:
  """Return the teacher of a student, whose `layout` it shares as far as its shapes allow.

  Raises:
    ValueError: there is no path, the vocabularies differ, or the layout asks for something the teacher cannot do.
    FileNotFoundError: the path is not there.
  """
  if not source.path:
    raise ValueError("teacher.path='' names no teacher; give a Hugging Face directory, a .gguf file or a run directory.")
  config = policy_lib.read_config(source.path)
  if config.vocab_size != student.vocab_size:
    raise ValueError(f'teacher.path={source.path} has {config.vocab_size} words in its vocabulary and the student {student.vocab_size}; '
                     'distributions are compared word by word, so they must share one vocabulary. Without that, let the teacher write texts '
                     '(launch.prepare_data --teacher) and learn from these.')
  theirs = policy_lib.load_tokenizer(source.path).fingerprint
  if theirs != tokenizer.fingerprint:
    raise ValueError(f'teacher.path={source.path} has another tokenizer ({theirs[:12]}) than the student ({tokenizer.fingerprint[:12]}) '
                     'though their vocabularies are of one size, so an id means different words; use a teacher with the student\'s tokenizer.')
  layout = params_lib.replicate_indivisible(layout, mesh, config.num_kv_heads)
  transformer.check(config, layout, mesh)
  return Teacher(source, TeacherModel(config, layout), policy_lib.fingerprint(source.path), mesh)
