"""Measure speed and memory as ratios in one run: against the machine's measured matmul peak, and against a peer doing the same work.

    python -m launch.bench train                    # ours, full and LoRA, beside the measured peak
    python -m launch.bench train --peer             # beside torch + transformers (+ peft); pip install -e .[peers]
    python -m launch.bench load --model=FILE.gguf --peer
    python -m launch.bench rl --peer                # GRPO steps beside TRL and Tunix (see launch.bench_rl)
    python -m launch.bench ring                     # long contexts on simulated devices beside their bounds (see launch.bench_ring)

Every measurement is a fresh process, one after the other, so peak memory is its own and nothing shares the cores. The first step of each is
compilation and warm-up and is not counted. Figures are medians over the counted steps; CPU seconds are the ones to trust on a shared machine.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time

from absl import app, flags

from launch import bench_ring, bench_rl
from models.shapes import SHAPES

_CASES = flags.DEFINE_list('cases', ['full-bfloat16', 'full-float32', 'lora-bfloat16'],
                            'Which of MODE-DTYPE to measure; ring: which figures, all if this is not given.')
_ROWS = flags.DEFINE_integer('rows', 8, 'Rows of the batch.', lower_bound=1)
_LENGTH = flags.DEFINE_integer('length', 256, 'Tokens of a row.', lower_bound=1)
_STEPS = flags.DEFINE_integer('steps', 3, 'Counted steps of each measurement; rl counts 20 if this is not given.', lower_bound=1)
_REMAT = flags.DEFINE_string('remat', 'none', 'train: what backward keeps of a block (see `sharding.Layout`).')
_SCAN = flags.DEFINE_bool('scan', False, 'train: scan the layers instead of unrolling them.')
_PEER = flags.DEFINE_bool('peer', False, 'Measure the peer too.')
_MODEL = flags.DEFINE_string('model', '', 'load: the GGUF file.')
_PEER_VENVS = flags.DEFINE_string('peer_venvs', 'runs/peers', 'rl: where the virtual environments of the peers are, or are made.')
_CHILD = flags.DEFINE_string('child', '', 'Run one measurement in this process and print it as JSON (used by this program itself).')

# How much faster than torch, and which share of its memory: (must, goal) of each case.
_BARS = {
    'full-bfloat16': {'speed': (1.2, 1.5), 'memory': (0.65, 0.5)},
    'full-float32': {'speed': (1.5, 1.8), 'memory': None},
    'lora-bfloat16': {'speed': (1.5, 1.9), 'memory': (0.45, 0.35)},
}
_LOAD_BARS_S = (10, 5)


def _train(mode: str, dtype: str) -> list[dict]:
  """Time supervised steps of our learner on random tokens; weights are random too, which changes no speed."""
  import dataclasses

  import jax
  import numpy as np

  from models import lora, sharding, transformer
  from models import params as params_lib
  from rl import batching
  from rl import learner as learner_lib
  from rl import optimizer as optimizer_lib
  from rl.types import Document

  config, mesh = SHAPES['gemma3-270m'], sharding.make_mesh()
  layout = dataclasses.replace(sharding.TRAIN, compute_dtype=dtype, scan=_SCAN.value, remat=_REMAT.value)
  specs = transformer.declare(config)
  tree = params_lib.init(specs, 0, mesh, layout, dtype if mode == 'lora' else 'float32')
  if mode == 'lora':
    tree = lora.attach(tree, specs, rank=16, alpha=16, targets=lora.TARGETS, rank_stabilized=False, seed=0, mesh=mesh, layout=layout)
  trainable, frozen = params_lib.split(tree, lora.is_trainable if mode == 'lora' else lambda name: True)
  del tree
  optimizer = optimizer_lib.OptimizerConfig()
  learner = learner_lib.build(config, layout, mesh, optimizer_lib.build(optimizer, 100), optimizer_lib.schedule(optimizer, 100),
                              full=mode == 'full')
  state = learner.init(trainable)
  del trainable
  tokens = np.random.default_rng(0).integers(1000, config.vocab_size, (_ROWS.value, _LENGTH.value), dtype=np.int32)
  documents = [Document(row, np.ones(row.shape, bool)) for row in tokens]
  batch = batching.to_global(batching.pack(documents, _ROWS.value, _LENGTH.value, aggregation='token_mean'), batching.Place.of(layout, mesh))
  steps = []
  for _ in range(_STEPS.value + 1):
    wall, cpu = time.perf_counter(), time.process_time()
    state, metrics = learner.update(state, frozen, [batch])
    loss = metrics['train/loss_nats'].value()
    jax.block_until_ready(state)
    steps.append({'wall_s': time.perf_counter() - wall, 'cpu_s': time.process_time() - cpu, 'loss_nats': loss})
  return steps


def _run_child(what: str) -> None:
  """Measure `what` here and print one line of JSON."""
  side, kind, *rest = what.split(':')
  start = time.process_time()
  if kind == 'train':
    mode, dtype = rest[0].split('-')
    if side == 'torch':
      from launch import peers
      from models import presets

      steps = peers.torch_train(presets.to_hf(SHAPES['gemma3-270m'], dtype), mode=mode, dtype=dtype, rows=_ROWS.value, length=_LENGTH.value,
                                num_steps=_STEPS.value)
    else:
      steps = _train(mode, dtype)
    result = {'steps': steps}
  elif kind == 'ring':
    result = {'figures': bench_ring.run(rest[0])}
  elif kind == 'rl':
    result = {'steps': bench_rl.ours(int(rest[0]))}
  elif kind == 'peak':
    from rl import monitor

    result = {'flops_per_s': monitor.measure_matmul_peak(rest[0])}
  else:
    if side == 'torch':
      from launch import peers

      peers.transformers_load(_MODEL.value)
    else:
      import jax

      from models import hf_weights, sharding, tokenizer

      _, tree = hf_weights.load(_MODEL.value, sharding.make_mesh(), sharding.TRAIN, rest[0])
      jax.block_until_ready(tree)
      tokenizer.load(_MODEL.value)
    result = {'cpu_s': time.process_time() - start}
  result.setdefault('cpu_s', time.process_time() - start)
  result['peak_gb'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
  print('RESULT ' + json.dumps(result), flush=True)


def _command(what: str) -> list[str]:
  return [sys.executable, '-m', 'launch.bench', *sys.argv[1:], f'--child={what}']


def _measure(what: str) -> dict:
  """Run one measurement in a fresh process."""
  return bench_rl.run_child(_command(what))


def _median(result: dict, key: str) -> float:
  return statistics.median(step[key] for step in result['steps'][1:])


def _verdict(ratio: float, bars: tuple[float, float] | None, *, smaller: bool = False) -> str:
  if bars is None:
    return f'{ratio:.2f}x'
  met = [ratio <= bar if smaller else ratio >= bar for bar in bars]
  return f'{ratio:.2f}x (must {bars[0]}: {"met" if met[0] else "MISSED"}, goal {bars[1]}: {"met" if met[1] else "missed"})'


def bench_train() -> None:
  from models import transformer

  flops_per_token = {mode: transformer.num_flops_per_token(SHAPES['gemma3-270m'], _LENGTH.value, fraction)
                     for mode, fraction in (('full', 1.0), ('lora', 0.0))}
  tokens = _ROWS.value * _LENGTH.value
  print(f'Supervised step of Gemma-3-270M, {_ROWS.value} x {_LENGTH.value} tokens, median of {_STEPS.value} steps')
  for case in _CASES.value:
    mode, dtype = case.split('-')
    peak = _measure(f'ours:peak:{dtype}')['flops_per_s']
    ours = _measure(f'ours:train:{case}')
    step_s = _median(ours, 'wall_s')
    achieved = flops_per_token[mode] * tokens / step_s
    print(f'{case:14s} ours   {step_s:6.2f} s/step {_median(ours, "cpu_s"):6.2f} CPU-s {ours["peak_gb"]:6.2f} GB {tokens / step_s:6.0f} tok/s '
          f'{achieved / 1e9:5.0f} GFLOP/s = {achieved / peak:.0%} of the measured {peak / 1e9:.0f}', flush=True)
    if _PEER.value:
      peer = _measure(f'torch:train:{case}')
      bars = _BARS[case]
      print(f'{"":14s} torch  {_median(peer, "wall_s"):6.2f} s/step {_median(peer, "cpu_s"):6.2f} CPU-s {peer["peak_gb"]:6.2f} GB\n'
            f'{"":14s} speed  {_verdict(_median(peer, "wall_s") / step_s, bars["speed"])}\n'
            f'{"":14s} CPU    {_median(peer, "cpu_s") / _median(ours, "cpu_s"):.2f}x\n'
            f'{"":14s} memory {_verdict(ours["peak_gb"] / peer["peak_gb"], bars["memory"], smaller=True)}', flush=True)


def bench_load() -> None:
  for dtype in ('float32', 'bfloat16'):
    ours = _measure(f'ours:load:{dtype}')
    met = ['met' if ours['cpu_s'] <= bar else 'missed' for bar in _LOAD_BARS_S]
    print(f'load {dtype:9s} ours         {ours["cpu_s"]:6.2f} CPU-s {ours["peak_gb"]:6.2f} GB '
          f'(must {_LOAD_BARS_S[0]}: {met[0]}, goal {_LOAD_BARS_S[1]}: {met[1]})', flush=True)
  if _PEER.value:
    peer = _measure('torch:load')
    print(f'load float32   transformers {peer["cpu_s"]:6.2f} CPU-s {peer["peak_gb"]:6.2f} GB')


def bench_grpo() -> None:
  num_steps = _STEPS.value if _STEPS.present else 20
  commands = {'ours': _command(f'ours:rl:{num_steps}')}
  if _PEER.value:
    commands |= {name: bench_rl.peer_command(name, _PEER_VENVS.value, num_steps) for name in bench_rl.PEERS}
  print(bench_rl.WORK, flush=True)
  results = bench_rl.measure(commands)
  for name, result in results.items():
    print(f'{name:6s} {result}')
  ours, peers = results.pop('ours'), results
  noisy = [name for name, result in [('ours', ours), *peers.items()] if not result.is_quiet]
  if noisy:
    print(f'Other processes were busy during the steps of {", ".join(noisy)}; repeat this on a quiet machine for a verdict.')
  if peers:
    fastest = min(peers, key=lambda name: peers[name].wall_s)
    print(f'speed  {_verdict(peers[fastest].wall_s / ours.wall_s, None if noisy else bench_rl.BARS)} of {fastest}\n'
          f'CPU    {min(peer.cpu_s for peer in peers.values()) / ours.cpu_s:.2f}x the most frugal peer')


def bench_rings() -> None:
  wanted = [name for name in bench_ring.CASES if not _CASES.present or name.split('-')[0] in _CASES.value or name in _CASES.value]
  if not wanted:
    raise app.UsageError(f'--cases={",".join(_CASES.value)} names no figure of bench ring; use some of {", ".join(bench_ring.CASES)}.')
  for name in wanted:
    result = _measure(f'ours:ring:{name}')
    for figure in result['figures']:
      print(bench_ring.Figure(**figure))
    print(f'{"":4}{name}: {result["cpu_s"]:.1f} CPU-s, {result["peak_gb"]:.2f} GB in all', flush=True)


_BENCHES = {'train': bench_train, 'load': bench_load, 'rl': bench_grpo, 'ring': bench_rings}


def main(argv: list[str]) -> None:
  if len(argv) != 2 or argv[1] not in _BENCHES:
    raise app.UsageError(f'bench takes one of {", ".join(_BENCHES)}, got {argv[1:]}.')
  if argv[1] == 'load' and not _MODEL.value:
    raise app.UsageError('bench load needs --model=FILE.gguf.')
  if _CHILD.value:
    _run_child(_CHILD.value)
  else:
    _BENCHES[argv[1]]()


if __name__ == '__main__':
  app.run(main)
