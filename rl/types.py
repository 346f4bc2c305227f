"""The records that pass between the host and the devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import struct
import jax
import numpy as np

from envs.core import Evidence, Message, Outcome

Params = Mapping[str, Any]
# What a `Document` may say of each of its tokens; each is the field of `Batch` with _BT behind its name.
PER_TOKEN = ('advantages', 'behavior_logprobs', 'old_logprobs', 'reference_logprobs', 'values', 'returns')
# The same of several words for each token [T, J], with _BTJ behind the name.
PER_TOKEN_WORDS = {'teacher_ids': np.int32, 'teacher_logprobs': np.float32}


@dataclass(frozen=True)
class Document:
  """One training sequence on the host.

  Attributes:
    tokens_T: int32 ids, prompt and reply together.
    loss_mask_T: bool, true where the token is to be learned. The mask belongs to the token itself, not to its predecessor.
    source: where it came from, as 'task:row', for error messages.
    per_token: name of `PER_TOKEN` -> float32 [T], or of `PER_TOKEN_WORDS` -> [T, J]. Like the mask, a value belongs to the token itself;
      where nothing is to be learned it is never read.
  """
  tokens_T: np.ndarray
  loss_mask_T: np.ndarray
  source: str = ''
  per_token: Mapping[str, np.ndarray] = field(default_factory=dict)

  def __post_init__(self):
    _check_arrays(self.source, self.tokens_T, loss_mask_T=(self.loss_mask_T, np.bool_))
    unknown = sorted(set(self.per_token) - {*PER_TOKEN, *PER_TOKEN_WORDS})
    if unknown:
      raise ValueError(f'{self.source}: per_token has the unknown names {unknown}; use some of {", ".join((*PER_TOKEN, *PER_TOKEN_WORDS))}.')
    for name, array in self.per_token.items():
      words = array.shape[1:2] if name in PER_TOKEN_WORDS else ()
      _check_arrays(self.source, self.tokens_T, words, **{f'per_token[{name!r}]': (array, PER_TOKEN_WORDS.get(name, np.float32))})


@dataclass(frozen=True, kw_only=True)
class Trajectory:
  """One episode as it was sampled, tokens and all; the unit of reinforcement learning.

  Attributes:
    tokens_T: int32 ids of the whole conversation, in the order the policy saw and wrote them.
    loss_mask_T: bool, true exactly where the policy sampled the token; false for prompts, tools' results and what a template adds.
    behavior_logprobs_T: float32 nats, of the sampled tokens under the policy that sampled them, at temperature 1 over the whole vocabulary;
      NaN elsewhere, so that a wrong use is loud.
    versions_T: int32, of the weights that sampled each token; -1 elsewhere.
    reward: of the episode, None exactly where the outcome is invalid (the infrastructure's failure, never 0).
    parts: named scores behind the reward, the last that the environment told.
    turn_scores: of each of the policy's messages: by how much it raised the mean of the parts. () where the environment never told them.
    outcome: how the episode ended.
    terminated, truncated: as in Gymnasium.
    num_turns, num_tool_calls, num_tool_errors: the policy's messages, its calls, and those of them answered by an error.
    problem_id, domain, level: of the problem.
    group: number of the group in the run; its samples are compared with each other.
    sample: number in the group.
    timing_s: phase -> seconds.
    messages: the conversation for people and logs.
    reason: the verifier's, or what failed.
    evidence: the problem's.
  """
  tokens_T: np.ndarray
  loss_mask_T: np.ndarray
  behavior_logprobs_T: np.ndarray
  versions_T: np.ndarray
  reward: float | None
  outcome: Outcome
  problem_id: str
  domain: str
  level: int
  group: int
  sample: int
  terminated: bool
  truncated: bool
  num_turns: int
  num_tool_calls: int = 0
  num_tool_errors: int = 0
  parts: Mapping[str, float] = field(default_factory=dict)
  turn_scores: tuple[float, ...] = ()
  timing_s: Mapping[str, float] = field(default_factory=dict)
  messages: tuple[Message, ...] = ()
  reason: str = ''
  evidence: Evidence | None = None

  def __post_init__(self):
    _check_arrays(self.source, self.tokens_T, loss_mask_T=(self.loss_mask_T, np.bool_),
                  behavior_logprobs_T=(self.behavior_logprobs_T, np.float32), versions_T=(self.versions_T, np.int32))
    for name, known in (('behavior_logprobs_T', np.isfinite(self.behavior_logprobs_T)), ('versions_T', self.versions_T >= 0)):
      wrong = np.flatnonzero(known != self.loss_mask_T)
      if wrong.size:
        raise ValueError(f'{self.source}: {name}[{wrong[0]}]={getattr(self, name)[wrong[0]]} where loss_mask_T is '
                         f'{self.loss_mask_T[wrong[0]]}; it must be known exactly where the policy sampled the token, and else NaN or -1.')
    if self.outcome not in list(Outcome):
      raise ValueError(f'{self.source}: outcome={self.outcome!r} is unknown; use one of {", ".join(Outcome)}.')
    if (self.reward is not None) != self.is_valid:
      raise ValueError(f'{self.source}: reward={self.reward} with outcome={self.outcome!r}; a reward is None exactly where the outcome is '
                       'not the policy\'s doing.')
    if self.reward is not None and not np.isfinite(self.reward):
      raise ValueError(f'{self.source}: reward={self.reward} must be finite.')
    num_turns = np.count_nonzero(self.loss_mask_T & np.diff(self.loss_mask_T, prepend=False))
    if self.turn_scores and len(self.turn_scores) != num_turns:
      raise ValueError(f'{self.source}: {len(self.turn_scores)} turn_scores for the {num_turns} messages that the policy sampled; give each '
                       'one, or none.')

  @property
  def source(self) -> str:
    return f'{self.problem_id}#{self.group}.{self.sample}'

  @property
  def is_valid(self) -> bool:
    return Outcome(self.outcome).is_valid


@dataclass(frozen=True)
class Group:
  """The samples of one problem that are compared with each other.

  Attributes:
    problem_id: of the problem.
    trajectories: valid and invalid ones.
  """
  problem_id: str
  trajectories: tuple[Trajectory, ...]

  def __post_init__(self):
    others = sorted({trajectory.problem_id for trajectory in self.trajectories} - {self.problem_id})
    if others:
      raise ValueError(f'Group of {self.problem_id} holds trajectories of {", ".join(others)}; a group has one problem.')


@struct.dataclass
class Batch:
  """Packed rows on the devices (or, before `to_global`, as numpy on the host).

  A row holds several documents one after the other. `segment_ids_BT` numbers them from 1 within the row; 0 is padding, and nothing else
  marks padding. `targets_BT` is the token to be predicted at each place, explicit because under some layouts the next column is not the
  next token. `loss_weight_BT` carries mask, aggregation and the denominator of the whole optimizer step: the loss is a plain weighted sum.

  What only some losses need is None elsewhere, never zeros. Such a value stands, like the weight, at the place that predicts its token, and
  is 0 where the weight is 0. A logprob says whose it is: `behavior` sampled the token, `old` is the policy before this batch as the learner
  computes it, `reference` is what the policy is held close to. `values` are the critic's before this batch, `returns` what they should be.

  `preferences` has one array for each dimension of quality, constant over a text: by how much a pair's chosen text is better than its
  rejected one (in both of them), or by its sign whether a single text is desirable. `reference_point` is one number for the whole step.

  `teacher_ids` are the likeliest words of a teacher at a place, `teacher_logprobs` what it gives them at the `temperature` of distillation, one
  number for the whole step.
  """
  tokens_BT: jax.Array
  targets_BT: jax.Array
  positions_BT: jax.Array
  segment_ids_BT: jax.Array
  loss_weight_BT: jax.Array
  advantages_BT: jax.Array | None = None
  behavior_logprobs_BT: jax.Array | None = None
  old_logprobs_BT: jax.Array | None = None
  reference_logprobs_BT: jax.Array | None = None
  values_BT: jax.Array | None = None
  returns_BT: jax.Array | None = None
  preferences: tuple[jax.Array, ...] | None = None
  reference_point: jax.Array | None = None
  teacher_ids_BTJ: jax.Array | None = None
  teacher_logprobs_BTJ: jax.Array | None = None
  temperature: jax.Array | None = None


@struct.dataclass
class Scores:
  """What a model says of a batch's targets: logprobs and the entropy of the whole distribution, float32 nats; 0 where the weight is 0."""
  logprobs_BT: jax.Array
  entropy_BT: jax.Array


@struct.dataclass
class TrainState:
  """What one `apply` consumes and returns: optimizer step, trainable parameters, optimizer state."""
  step: jax.Array
  trainable: Params
  opt_state: Any


@struct.dataclass
class ActorCriticState(TrainState):
  """A policy's state with its critic's beside it; whoever reads the policy from a checkpoint of it need not know."""
  critic: TrainState


@dataclass(frozen=True)
class HostState:
  """What resuming needs besides arrays; JSON-able.

  Attributes:
    documents: documents taken from the data stream by all hosts together since the start.
    seed: the root seed of the run.
    config: the resolved configuration as plain JSON.
    revision: code revision, '' outside a checkout.
    lineage: model source and data fingerprints.
    progress: of reinforcement learning: the curriculum and its frontier of problems, the ledger, samples that wait, and what adapts.
  """
  documents: int
  seed: int
  config: Mapping[str, Any]
  revision: str = ''
  lineage: Mapping[str, Any] = field(default_factory=dict)
  progress: Mapping[str, Any] = field(default_factory=dict)


def _check_arrays(source: str, tokens_T: np.ndarray, words: tuple[int, ...] = (), **arrays: tuple[np.ndarray, type]) -> None:
  if tokens_T.ndim != 1 or tokens_T.dtype != np.int32:
    raise ValueError(f'{source}: tokens_T must be one-dimensional int32, got {tokens_T.dtype}{tokens_T.shape}.')
  for name, (array, dtype) in arrays.items():
    shape = tokens_T.shape + words
    if array.shape != shape or array.dtype != dtype:
      raise ValueError(f'{source}: {name} must be {np.dtype(dtype)}{shape} like tokens_T, got {array.dtype}{array.shape}.')
