"""Attention over a split length, measured on simulated devices and beside its bounds; a part of `launch.bench`.

    python -m launch.bench ring                    # all figures, about half an hour of CPU
    python -m launch.bench ring --cases=A5,A6      # some of them

| figure | what |
|---|---|
| A1 | largest error against float64 of 4,096 to 65,536 tokens on 1, 2, 4 and 8 devices, in every order |
| A2 | error of bfloat16 beside that of the full score matrix, and that it does not grow from 2 devices to 64 |
| A4 | memory and compile time of a forward and a backward pass of 1,048,576 and 10,485,760 tokens |
| A5 | 1,048,576 tokens with a window of 1,024, computed on 8 devices |
| A6 | 65,536 tokens without a window, computed on 8 devices |
| A7 | CPU time beside the full score matrix |
| A8 | work of the device with most of it, in blocks of scores |
| A10 | a decoding step over a split cache beside one that passes the cache around |
| A13 | memory of the gradient of a model of two layers with 1,048,576 tokens on 64 devices |
| A14 | a small model that looks up keys in texts of up to 4,096 tokens, trained on 8 devices and on one (see launch.bench_ring_needle) |
| train | steps of `launch.train` on one row: 1,048,576 tokens with windows, 131,072 without (see launch.bench_ring_train) |

One head of size 64 in float32 unless said. CPU seconds are the ones to trust on a shared machine, so bounds on time are on those. Memory is what
XLA assigns to temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import functools
import time

import numpy as np

from launch import bench_ring_decode, bench_ring_needle, bench_ring_train

MILLION = 2**20
_WIDTH = 64


@dataclass(frozen=True)
class Figure:
  """One line of the table: `value` is to be at most `bound`, or at least if `least`."""
  name: str
  value: float
  bound: float
  unit: str = ''
  least: bool = False

  @property
  def is_met(self) -> bool:
    return self.value >= self.bound if self.least else self.value <= self.bound

  def __str__(self):
    sign = '>=' if self.least else '<='
    return f'{self.name:<80} {self.value:>10.4g} {sign} {self.bound:<8.4g} {self.unit:<10} {"met" if self.is_met else "MISSED"}'


@dataclass(frozen=True)
class Case:
  """A measurement in a process of its own, which simulates some devices."""
  measure: Callable[[], list[Figure]]
  num_devices: int = 1


def run(name: str) -> list[dict]:
  """Measure a case in this process and return its figures as mappings."""
  from models import startup

  case = CASES[name]
  startup.use_cpu_devices(case.num_devices)
  return [vars(figure) for figure in case.measure()]


# What is measured: one row of random tokens, forward and backward, on the first devices of the process.


def _draw(length: int):
  rng = np.random.default_rng(0)
  return [rng.standard_normal((1, length, 1, _WIDTH), dtype=np.float32) for _ in range(4)]


class _Program:
  """Forward and backward over a row of `length` tokens on a ring."""

  def __init__(self, length: int, num_devices: int, order: str, *, window: int | None = None, kernel: str = 'blockwise', dtype: str = 'float32'):
    import jax

    from models import attention, sharding, token_order
    from models.config import ModelConfig

    config = ModelConfig(family='llama', vocab_size=1, num_layers=1, embed_dim=_WIDTH, mlp_dim=1, num_heads=1, num_kv_heads=1, head_dim=_WIDTH,
                         max_length=length, window=window, layer_pattern=('local' if window else 'global',))
    self.mesh = sharding.make_mesh(seq=num_devices, devices=jax.devices()[:num_devices])
    self.layout = sharding.Layout(attention=kernel, order=order, compute_dtype=dtype)
    self.length, self.token_T, self.dtype = length, token_order.places(order, length, num_devices), dtype

    def both(q, k, v, dout, positions, segments):
      attend = attention.resolve(self.layout, config, positions, segments)
      out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, config.layer_kind(0))[0], q, k, v)
      return out, *vjp(dout)

    self.function = jax.jit(both)

  def _sharding(self, *axes):
    import jax
    return jax.NamedSharding(self.mesh, self.layout.spec('batch', 'length', *axes))

  def compiled(self):
    """Return the compiled program."""
    import jax

    head = jax.ShapeDtypeStruct((1, self.length, 1, _WIDTH), self.dtype, sharding=self._sharding('act_heads', None))
    where = jax.ShapeDtypeStruct((1, self.length), 'int32', sharding=self._sharding())
    with jax.set_mesh(self.mesh):
      return self.function.lower(head, head, head, head, where, where).compile()

  def place(self, inputs):
    """Return the arguments on the devices, tokens in the program's order."""
    import jax
    import jax.numpy as jnp

    heads = [jax.device_put(jnp.asarray(x[:, self.token_T], self.dtype), self._sharding('act_heads', None)) for x in inputs]
    where = [jax.device_put(x[None].astype(np.int32), self._sharding()) for x in (self.token_T, np.ones_like(self.token_T))]
    return *heads, *where

  def __call__(self, arguments):
    """Return (out, dq, dk, dv), each [T, H] in the order of tokens, of the one head."""
    import jax

    with jax.set_mesh(self.mesh):
      results = jax.block_until_ready(self.function(*arguments))
    back_T = np.argsort(self.token_T)
    return [np.asarray(x)[0, back_T, 0] for x in results]

  def time(self, arguments, repeats: int) -> tuple[float, float]:
    """Return the least (CPU seconds, seconds) of a call after one that compiles."""
    import jax

    times = []
    with jax.set_mesh(self.mesh):
      for _ in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(self.function(*arguments))
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    return min(times[1:])


def _exact(inputs, queries=None, window: int | None = None):
  """Return (out, dq, dk, dv) in float64 by the definition, with gradients that come from `queries` (all if None) alone."""
  q, k, v, dout = (x[0, :, 0] for x in inputs)
  out, dq, dk, dv = (np.zeros(q.shape) for _ in range(4))
  queries = np.arange(len(q)) if queries is None else np.sort(queries)
  for chosen in np.array_split(queries, max(1, len(queries) // 256)):
    first = 0 if window is None else max(0, chosen[0] - window + 1)
    seen = slice(first, chosen[-1] + 1)
    distance = chosen[:, None] - np.arange(seen.start, seen.stop)
    mask = (distance >= 0) & (distance < (window or len(q)))
    query, cotangent, key, value = (x.astype(np.float64) for x in (q[chosen], dout[chosen], k[seen], v[seen]))
    scores = np.where(mask, query @ key.T * _WIDTH**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    out[chosen] = weights @ value
    dscores = weights * (cotangent @ value.T - np.sum(out[chosen] * cotangent, 1, keepdims=True)) * _WIDTH**-0.5
    dq[chosen] = dscores @ key
    dk[seen] += dscores.T @ query
    dv[seen] += weights.T @ cotangent
  return out, dq, dk, dv


def _off(got, wanted, rows=slice(None)) -> float:
  return float(np.abs(got[rows].astype(np.float64) - wanted[rows]).max())


# The figures.


def _errors(length: int) -> list[Figure]:
  inputs = _draw(length)
  wanted, figures = _exact(inputs), []
  for order in ('contiguous', 'zigzag', 'striped'):
    programs = [_Program(length, num_devices, order) for num_devices in (1, 2, 4, 8)]
    errors = np.max([[_off(*pair) for pair in zip(program(program.place(inputs)), wanted, strict=True)] for program in programs], axis=0)
    figures += [Figure(f'A1 {length:,} tokens, {order}: error of {name}', float(error), bound)
                for name, error, bound in zip(('out', 'dq', 'dk', 'dv'), errors, (1e-6, 2e-6, 1e-5, 1e-5), strict=True)]
  return figures


def _rounding() -> list[Figure]:
  import jax.numpy as jnp

  inputs = [np.asarray(jnp.asarray(x, 'bfloat16'), np.float32) for x in _draw(4096)]
  wanted = _exact(inputs)

  def errors(*arguments, **options):
    program = _Program(4096, *arguments, dtype='bfloat16', **options)
    return [float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
            for got, want in zip(program(program.place(inputs)), wanted, strict=True)]

  plain, *rings = errors(1, 'contiguous', kernel='dense'), *(errors(size, 'zigzag') for size in (2, 8, 64))
  names = ('out', 'dq', 'dk', 'dv')
  return [*(Figure(f'A2 bfloat16 on 8 devices: error of {name} over that of the score matrix', ring / full, 1.1)
            for name, ring, full in zip(names, rings[1], plain, strict=True)),
          *(Figure(f'A2 bfloat16: error of {name} on 64 devices over that on 2', many / few, 1.1)
            for name, many, few in zip(names, rings[2], rings[0], strict=True))]


def _memory(length: int, num_devices: int) -> list[Figure]:
  import jax

  jax.config.update('jax_enable_compilation_cache', False)
  program, start = _Program(length, num_devices, 'zigzag'), time.process_time()
  compiled = program.compiled()
  seconds = time.process_time() - start
  local = length // num_devices
  used, allowed = compiled.memory_analysis().temp_size_in_bytes / 2**20, 2.5 + 1600 * local / 2**20
  title = f'A4 {length:,} tokens on {num_devices} devices'
  return [Figure(f'{title}: temporaries of one', used, 260 if length > MILLION else allowed, 'MiB'),
          Figure(f'{title}: compile', seconds, 10, 'CPU-s')]


def _windowed() -> list[Figure]:
  window, inputs = 1024, _draw(MILLION)
  program = _Program(MILLION, 8, 'contiguous', window=window)
  arguments = program.place(inputs)
  cpu_s, wall_s = program.time(arguments, 1)
  got = program(arguments)
  # Queries around borders of shards, and keys of which all queries are among them.
  starts = np.array([0, MILLION // 8 - 700, MILLION // 2 - 1500, MILLION - 2 * window - 1])
  queries = np.unique(np.minimum(starts[:, None] + np.arange(2 * window + 1), MILLION - 1))
  keys = (starts[:, None] + np.arange(window)).reshape(-1)
  wanted = _exact(inputs, queries, window)
  title = 'A5 1,048,576 tokens, window 1,024, 8 devices'
  return [Figure(f'{title}: forward and backward', cpu_s, 60, 'CPU-s'), Figure(f'{title}: the same by the clock', wall_s, 60, 's'),
          *(Figure(f'{title}: error of {name}, relative, {len(rows):,} tokens', _off(ours, theirs, rows) / np.abs(theirs[rows]).max(), 1e-6)
            for name, rows, ours, theirs in zip(('out', 'dq', 'dk', 'dv'), (queries, queries, keys, keys), got, wanted, strict=True))]


def _dense() -> list[Figure]:
  import resource

  inputs = _draw(65_536)
  program = _Program(65_536, 8, 'zigzag')
  arguments = program.place(inputs)
  cpu_s, _ = program.time(arguments, 1)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  queries = np.random.default_rng(1).choice(65_536, 512, replace=False)
  wanted, got = _exact(inputs, queries), program(arguments)
  title = 'A6 65,536 tokens, 8 devices'
  return [Figure(f'{title}: forward and backward', cpu_s, 40, 'CPU-s'), Figure(f'{title}: resident memory of the process', peak, 1, 'GiB'),
          Figure(f'{title}: error of out at 512 tokens', _off(got[0], wanted[0], queries), 1e-6),
          Figure(f'{title}: error of dq at 512 tokens', _off(got[1], wanted[1], queries), 2e-6)]


def _speed(length: int, bound: float) -> list[Figure]:
  inputs, times = _draw(length), {}
  for kernel in ('blockwise', 'dense'):
    program = _Program(length, 1, 'contiguous', kernel=kernel)
    times[kernel], _ = program.time(program.place(inputs), 3 if kernel == 'blockwise' else 1)
  return [Figure(f'A7 {length:,} tokens on one device: CPU time over that of the score matrix', times['blockwise'] / times['dense'], bound)]


def _schedule() -> list[Figure]:
  figures = []
  for num_devices, gain in ((8, 1.85), (64, 1.97)):
    most = {order: _most_blocks(order, num_devices) for order in ('zigzag', 'contiguous')}
    ideal = (8 * num_devices)**2 / 2 / num_devices
    figures += [Figure(f'A8 zigzag on {num_devices} devices: blocks of the busiest over the ideal', most['zigzag'] / ideal, 1.02),
                Figure(f'A8 contiguous over zigzag on {num_devices} devices', most['contiguous'] / most['zigzag'], gain, least=True)]
  return figures


def _most_blocks(order: str, num_devices: int) -> int:
  """Return the blocks of scores that the busiest device of each hop computes, summed over hops; a shard has 8 blocks of tokens."""
  import jax

  from models import token_order
  from models.kernels import xla

  positions = token_order.places(order, num_devices * 8 * xla.BLOCK, num_devices).astype(np.int32)[None]
  ones = np.ones_like(positions)
  possible = np.asarray(jax.jit(xla.possible_blocks, static_argnums=4)(positions, positions, ones, ones, None))
  pairs = possible.reshape(num_devices, 8, num_devices, 8).sum((1, 3))
  devices = np.arange(num_devices)
  return sum(int(pairs[devices, (devices - hop) % num_devices].max()) for hop in range(num_devices))


def _decode() -> list[Figure]:
  result = bench_ring_decode.measure(MILLION)
  return [Figure('A10 decoding over 1,048,576 keys: CPU time of passing the cache around over ours', result['ratio'], 5, least=True),
          Figure('A10 decoding over 1,048,576 keys: error', result['max_error'], 1e-6)]


def _model() -> list[Figure]:
  import jax

  from models import params as params_lib
  from models import sharding, transformer
  from models.config import ModelConfig
  from rl import learner
  from rl.types import Batch

  config = ModelConfig(family='llama', vocab_size=32_768, num_layers=2, embed_dim=256, mlp_dim=1024, num_heads=4, num_kv_heads=4, head_dim=64,
                       max_length=MILLION)
  mesh = sharding.make_mesh(seq=64)
  layout = sharding.Layout(order='zigzag', remat='attention,attention_lse')
  place = jax.NamedSharding(mesh, layout.spec('batch', 'length'))
  per_token = {'tokens_BT': 'int32', 'positions_BT': 'int32', 'segment_ids_BT': 'int32', 'targets_BT': 'int32', 'loss_weight_BT': 'float32'}
  batch = Batch(**{name: jax.ShapeDtypeStruct((1, MILLION), dtype, sharding=place) for name, dtype in per_token.items()})
  params = params_lib.abstract(transformer.declare(config), mesh, layout)
  loss = functools.partial(learner.supervised_loss, config=config, layout=layout, unembed_grad=True)
  with jax.set_mesh(mesh):
    compiled = jax.jit(jax.grad(lambda params, batch: loss(params, batch)[0])).lower(params, batch).compile()
  return [Figure('A13 two layers, 32,768 ids, 1,048,576 tokens on 64 devices: temporaries',
                 compiled.memory_analysis().temp_size_in_bytes / 2**30, 1.25, 'GiB')]


def _needle() -> list[Figure]:
  phases = bench_ring_needle.PHASES
  one, eight = (bench_ring_needle.measure(seq, phases) for seq in (1, 8))
  figures = []
  for phase, (before, after), (_, on_ring) in zip(phases, one, eight, strict=True):
    if phase.length >= 2048:
      title = f'A14 {phase.length:,} tokens: right answers'
      figures += [Figure(f'{title} on one device', after, max(0.95, before), least=True),
                  Figure(f'{title} on 8 devices less those on one', abs(on_ring - after), 0.01)]
  return figures


def _training(length: int, window: int | None, bound_s: float) -> list[Figure]:
  steps = bench_ring_train.measure(length, window)
  title = f'{length:,} tokens, {f"window {window:,}" if window else "no window"}, 8 devices: launch.train,'
  return [Figure(f'{title} a step', steps.cpu_s, bound_s, 'CPU-s'), Figure(f'{title} resident memory', steps.peak_gb, 8, 'GB'),
          Figure(f'{title} loss after {len(steps.losses)} steps', steps.losses[-1], steps.losses[0] - 0.1, 'nats')]


CASES: Mapping[str, Case] = {
    **{f'A1-{length // 1024}k': Case(functools.partial(_errors, length), 8) for length in (4096, 16_384, 65_536)},
    'A2': Case(_rounding, 64),
    **{f'A4-{num_devices}': Case(functools.partial(_memory, MILLION, num_devices), num_devices)
       for num_devices in (8, 16, 64, 128)},
    'A4-10M': Case(functools.partial(_memory, 10 * MILLION, 64), 64),
    'A5': Case(_windowed, 8),
    'A6': Case(_dense, 8),
    'A7-8k': Case(functools.partial(_speed, 8192, 0.25)),
    'A7-16k': Case(functools.partial(_speed, 16_384, 0.2)),
    'A8': Case(_schedule),
    'A10': Case(_decode, 8),
    'A13': Case(_model, 64),
    'A14': Case(_needle, 8),
    # Twice what A5 and A6 allow one layer's attention, for each layer and what is around it.
    'train-1M': Case(functools.partial(_training, MILLION, 1024, 2 * 60 * bench_ring_train.NUM_LAYERS)),
    'train-128k': Case(functools.partial(_training, MILLION // 8, None, 2 * 4 * 40 * bench_ring_train.NUM_LAYERS)),
}
