"""Seconds of a GRPO step on CPU, by phase, beside TRL and Tunix; a part of `launch.bench`.

    python -m launch.bench rl            # ours
    python -m launch.bench rl --peer     # beside the peers, which are installed first (3 GB under --peer_venvs)

Ours is `rl.train_rl.run` itself with all that it does in a step: environments in threads, curriculum, logs and metrics on disk, weights
published with their checks. What is asked of every system, and of a clock, is in `launch.peers_rl`.

Every measurement is a fresh process on the first two CPUs. The systems are measured in turns, so that a machine whose speed drifts does not
favor one of them, and steps during which other processes took part of the two CPUs are left out; if too few remain of a system, there are
more turns, up to a limit. Linux only.

Torch's wheel on PyPI brings 3 GB of CUDA libraries; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes it the CPU one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
import importlib.metadata
import itertools
import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
import threading

from launch import peers_rl

WORK = (f'GRPO step of a random Qwen2 of 4.33M parameters, {peers_rl.GROUP} completions of {peers_rl.COMPLETION} tokens to a prompt of '
        f'{peers_rl.PROMPT}, float32, 2 CPUs; medians')
# How much faster than the faster peer: must, goal.
BARS = (1.5, 2.5)
# Pinned, as bars are; Tunix gets the JAX that runs here.
PEERS: Mapping[str, tuple[str, ...]] = {
    'trl': ('trl==1.16.0', 'torch==2.13.0', 'transformers==5.24.0', 'accelerate==1.15.0', 'datasets==5.2.0'),
    'tunix': ('google-tunix==0.1.7', f'jax=={importlib.metadata.version("jax")}'),
}
_NUM_CPUS = 2
_FEWEST_TURNS, _MOST_TURNS = 2, 4
# Share of the CPUs that others may take in a step that is quiet.
_MOST_OTHERS_FRACTION = 0.1
_FEWEST_QUIET_STEPS = 10
_ENVIRONMENT = {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': '', 'HF_HUB_OFFLINE': '1', 'TRANSFORMERS_VERBOSITY': 'error'}
# Our loop's phases by the names that all systems share; 'environment' is waiting for rewards with nothing left to decode.
_PHASES = {'decode': 'generation', 'environment': 'generation', 'score': 'update', 'train': 'update', 'sync': 'sync'}


@dataclass(frozen=True)
class Summary:
  """Medians over steps.

  Attributes:
    wall_s, cpu_s: of a step.
    fastest_s: the shortest step.
    phases_s: phase -> seconds.
    num_steps, num_quiet: counted steps, and those of them without other processes; medians are over the latter if there are enough.
    peak_gb: resident memory of the process.
  """
  wall_s: float
  cpu_s: float
  fastest_s: float
  phases_s: dict[str, float]
  num_steps: int
  num_quiet: int
  peak_gb: float

  @property
  def is_quiet(self) -> bool:
    return self.num_quiet >= _FEWEST_QUIET_STEPS

  def __str__(self):
    phases = '  '.join(f'{name} {seconds:.3f}' for name, seconds in self.phases_s.items())
    return (f'{self.wall_s:6.3f} s/step (fastest {self.fastest_s:.3f})  {self.cpu_s:6.3f} CPU-s  {self.peak_gb:4.1f} GB  {phases}  '
            f'[{self.num_quiet} of {self.num_steps} steps quiet]')


def summarize(steps: Sequence[Mapping], peak_gb: float) -> Summary:
  """Return the medians of counted steps, each as in `StepClock.steps`."""
  quiet = [step for step in steps if step['others_s'] <= _MOST_OTHERS_FRACTION * step['wall_s'] * _NUM_CPUS]
  used = quiet if len(quiet) >= _FEWEST_QUIET_STEPS else steps

  def median(value: Callable[[Mapping], float]) -> float:
    return statistics.median(value(step) for step in used)

  names = {name: None for step in used for name in step['phases_s']}
  phases_s = {name: median(lambda step: step['phases_s'].get(name, 0.0)) for name in sorted(names, key=_column)}
  return Summary(median(lambda step: step['wall_s']), median(lambda step: step['cpu_s']), min(step['wall_s'] for step in used), phases_s,
                 len(steps), len(quiet), peak_gb)


def _column(phase: str) -> int:
  return ('generation', 'update', 'sync', 'rest').index(phase)


def measure(commands: Mapping[str, Sequence[str]]) -> dict[str, Summary]:
  """Run the commands of the systems in turns and return what their steps took; from then on this process stays on the two CPUs.

  Raises:
    RuntimeError: fewer than two CPUs, or a command failed.
  """
  cpus = sorted(os.sched_getaffinity(0))[:_NUM_CPUS]
  if len(cpus) < _NUM_CPUS:
    raise RuntimeError(f'The comparison is for {_NUM_CPUS} CPUs and this process may use {len(cpus)}; give it more.')
  os.sched_setaffinity(0, cpus)
  steps: dict[str, list] = {name: [] for name in commands}
  peak_gb = dict.fromkeys(commands, 0.0)
  results: dict[str, Summary] = {}
  for turn in range(_MOST_TURNS):
    if turn >= _FEWEST_TURNS and all(result.is_quiet for result in results.values()):
      break
    for name, command in commands.items():
      child = run_child(command, _ENVIRONMENT)
      steps[name] += child['steps'][peers_rl.WARM_UP_STEPS:]
      peak_gb[name] = max(peak_gb[name], child['peak_gb'])
      results[name] = summarize(steps[name], peak_gb[name])
  return results


def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict:
  """Run a measurement in a fresh process and return what follows RESULT in its output; RuntimeError with its last words if it fails."""
  done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})})
  lines = [line for line in done.stdout.splitlines() if line.startswith('RESULT ')]
  if done.returncode or not lines:
    raise RuntimeError(f'The measurement {" ".join(command)} failed with exit status {done.returncode}:\n{done.stderr[-3000:]}')
  return json.loads(lines[-1].removeprefix('RESULT '))


def peer_command(name: str, directory: str | Path, num_steps: int) -> list[str]:
  """Return the command that measures a peer, whose virtual environment is made under `directory` if it is not there.

  Raises:
    RuntimeError: the installation failed; what is there of it is made anew next time.
  """
  venv = Path(directory) / name
  python, installed = venv / 'bin' / 'python', venv / 'installed.txt'
  wanted = '\n'.join(PEERS[name])
  if not installed.is_file() or installed.read_text() != wanted:
    try:
      subprocess.run([sys.executable, '-m', 'venv', '--clear', str(venv)], check=True)
      subprocess.run([str(python), '-m', 'pip', 'install', '--quiet', *PEERS[name]], check=True)
    except subprocess.CalledProcessError as error:
      raise RuntimeError(f'The peer {name} could not be installed in {venv}: {" ".join(error.cmd)} ended with exit status '
                         f'{error.returncode}; its reason stands above.') from error
    installed.write_text(wanted)
  # -P: the script's directory is not searched for modules, where `launch.evaluate` would pass for another package's.
  return [str(python), '-P', str(Path(peers_rl.__file__)), name, str(num_steps + peers_rl.WARM_UP_STEPS)]


def ours(num_steps: int) -> list[dict]:
  """Run our loop for `num_steps` steps after the warm-up and return them as `StepClock.steps`, the warm-up included."""
  from rl import monitor, rl_config, train_rl
  from rl.curriculum import DomainConfig
  from rl.optimizer import OptimizerConfig
  from rl.rollout.worker import RolloutConfig
  from rl.run import LayoutConfig, ModelSource

  total = num_steps + peers_rl.WARM_UP_STEPS
  clock, started, lock = peers_rl.StepClock(), itertools.count(), threading.Lock()
  make = _environment()

  def make_env(domain):
    # A step begins when the first of its episodes does; the last one ends unseen.
    with lock:
      if next(started) % peers_rl.GROUP == 0:
        clock.end_step()
    return make(domain)

  with tempfile.TemporaryDirectory() as directory:
    _write_model(Path(directory) / 'model')
    train_rl.run(rl_config.RLConfig(
        model=ModelSource(str(Path(directory) / 'model')), domains={'arithmetic/integers': DomainConfig()}, num_steps=total + 1,
        groups=1, group_size=peers_rl.GROUP, aggregation='sequence_mean', rows=peers_rl.GROUP,
        length=peers_rl.PROMPT + peers_rl.COMPLETION, rollout=RolloutConfig(
            max_new_tokens=peers_rl.COMPLETION, max_length=peers_rl.PROMPT + peers_rl.COMPLETION, slots=peers_rl.GROUP,
            steps_per_launch=16, prefill_chunk=peers_rl.PROMPT),
        layout=LayoutConfig(scan=False, compute_dtype='float32'),
        optimizer=OptimizerConfig(learning_rate=peers_rl.LEARNING_RATE, schedule='constant'),
        checkpoint_every_steps=total + 1), Path(directory) / 'run', make_env)
    records = [json.loads(line) for line in (Path(directory) / 'run' / monitor.METRICS_FILE).read_text().splitlines()]
  return [{**step, 'phases_s': _phases_s(record, step['wall_s'])} for step, record in zip(clock.steps[1:], records[:total], strict=True)]


def _phases_s(record: Mapping[str, float], wall_s: float) -> dict[str, float]:
  """Return the phases of a step from its metrics; 'rest' is what is left of its time.

  Raises:
    RuntimeError: the step did not sample what was asked for.
  """
  for name, wanted in (('prompt_length', peers_rl.PROMPT), ('response_length', peers_rl.COMPLETION)):
    lengths = record[f'{name}/min'], record[f'{name}/max']
    if lengths != (wanted, wanted):
      raise RuntimeError(f'{name} of a step is from {lengths[0]} to {lengths[1]} tokens instead of {wanted}; the comparison would be unfair.')
  phases_s = dict.fromkeys(_PHASES.values(), 0.0)
  for phase, name in _PHASES.items():
    phases_s[name] += record.get(f'timing_s/{phase}', 0.0)
  return {**phases_s, 'rest': wall_s - sum(phases_s.values())}


def _write_model(directory: Path) -> None:
  """Write a random model of `peers_rl.SHAPE` whose ids are bytes; none of them ends a completion."""
  from models import hf_weights, presets, sharding, tokenizer, transformer
  from models import params as params_lib

  config = presets.from_hf(peers_rl.SHAPE)
  params = params_lib.init(transformer.declare(config), 0, sharding.make_mesh(), sharding.TRAIN, 'float32')
  hf_weights.export(directory, config, params, dtype='float32', tokenizer=tokenizer.ByteTokenizer(()))


def _environment() -> Callable:
  """Return what makes our environments: `ToolEnv`s with prompts and reward of the comparison."""
  import dataclasses

  from envs.core import Reason, Verdict
  from envs.tool_env import ToolEnv

  class Variety:
    """Scores a reply as `peers_rl.reward` does, by characters."""
    id, version = 'bench/variety', 1

    def verify(self, problem, reply):
      return Verdict(peers_rl.reward(list(reply)), Reason.OK)

  class Env(ToolEnv):
    """Shows a prompt of the length of the comparison instead of the problem."""

    def reset(self, *, seed=None, options=None):
      content = options['problem'].id.ljust(peers_rl.PROMPT, '.')[-peers_rl.PROMPT:]
      problem = dataclasses.replace(options['problem'], messages=({'role': 'user', 'content': content},))
      return super().reset(seed=seed, options={'problem': problem})

  return lambda domain: Env(dataclasses.replace(domain, verifier=Variety()))
