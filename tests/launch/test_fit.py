"""Training steps compiled from shapes alone: the learner's own programs, what they need, what they move, and what that means on a chip."""

import dataclasses
import importlib.util
import json
from pathlib import Path
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import grpo, ppo, sft
from launch import fit, fit_programs, fit_report
from launch.fit_hlo import Collective, Movement
from launch.fit_programs import Program, Work
from launch.fit_topology import CHIPS, GIB, Topology
from models import params as params_lib
from models import sharding, transformer
from models.shapes import SHAPES
from rl import batching, learner
from rl import run as run_lib
from rl.losses import PolicyLossConfig
from rl.optimizer import OptimizerConfig
from rl.run import LayoutConfig, LoraConfig
from rl.types import Document
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
HAS_LIBTPU = importlib.util.find_spec('libtpu') is not None
SETTINGS = LayoutConfig(attention='blockwise', remat='full', compute_dtype='float32')
ONE_LAYER = {'num_layers': 1, 'layer_pattern': ('global',), 'window': None}


def work(**changes):
  return Work(**({'model': tiny.config(), 'adapters': LoraConfig(), 'frozen_dtype': 'bfloat16', 'optimizer': OptimizerConfig(),
                  'loss': learner.supervised_loss, 'per_token': (), 'rows': 8, 'length': 16} | changes))


def compiled(some_work, *, fsdp_splits='rows', **sizes):
  mesh = sharding.make_mesh(**sizes)
  layout = run_lib.lay_out(dataclasses.replace(SETTINGS, fsdp_splits=fsdp_splits), some_work.model, mesh)
  return mesh, layout, fit_programs.compile_step(some_work, layout, mesh)


def policy_work():
  """Return a step with a reference policy, a critic, two micro-batches and everything trained."""
  return work(model=tiny.config(**ONE_LAYER), loss=learner.policy_loss(PolicyLossConfig(kl_coef=0.1)),
              per_token=('advantages', 'behavior_logprobs', 'reference_logprobs'), micro_batches=2, copies=1, has_critic=True)


@pytest.fixture(scope='module')
def split():
  return compiled(policy_work(), fsdp=4, tensor=2)


def specs(**changes):
  return list(params_lib.named_leaves(transformer.declare(tiny.config(**changes)), is_leaf=lambda leaf: isinstance(leaf, params_lib.ParamSpec)))


def num_params(**changes):
  return sum(np.prod(spec.shape) for _, spec in specs(**changes))


def test_programs_need_the_state_they_are_given(split):
  _, _, (gradient, to_params, to_moments) = split
  assert [program.name for program in split[2]] == ['gradient', 'apply_to_params', 'apply_to_moments']
  assert [program.runs for program in split[2]] == [2, 1, 1]
  # Matrices are split 4 x 2 ways; what is not (norms) is whole everywhere. A parameter has 4 bytes.
  whole = sum(np.prod(spec.shape) for name, spec in specs(**ONE_LAYER) if 'norm' in name)
  params = 4 * ((num_params(**ONE_LAYER) - whole) // 8 + whole)
  # Tokens, targets, positions, segments, weights and three arrays of reinforcement learning, of 2 of the 8 rows.
  assert gradient.arguments == params + 8 * 4 * 2 * 16
  # Beside it wait two moments, two counts of steps, the gradient summed so far, the reference, and the critic with moments and counts.
  assert gradient.beside == 7 * params + 16
  # Parameters, moments, gradient, the counts and the learner's own in; what is replaced goes where it was. Reference and critic wait.
  assert to_params.arguments == 4 * params + 12 and to_params.beside == 4 * params + 8 == to_moments.beside
  assert max(to_params.outputs, to_moments.outputs) < params / 8
  assert to_params.peak >= 4 * params and to_params.needed == to_params.peak + to_params.beside and to_params.compile_s > 0


def test_they_are_the_programs_that_training_runs(split):
  mesh, layout, programs = split
  some_work = policy_work()
  built = fit_programs.build(some_work, layout, mesh)
  trainable, frozen = params_lib.split(params_lib.init(transformer.declare(some_work.model), 0, mesh, layout), lambda name: True)
  state = built.init(trainable)
  values = np.zeros(16, np.float32)
  document = Document(np.arange(16, dtype=np.int32), np.ones(16, bool), '', dict.fromkeys(some_work.per_token, values))
  place = batching.Place.of(layout, mesh)
  batch = batching.to_global(batching.pack([document] * 8, 8, 16, aggregation='token_mean'), place)

  def kind(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)

  assert kind(batch) == kind(fit_programs.abstract_batch(some_work, place))
  assert kind((state.trainable, frozen)) == kind(fit_programs.abstract_params(some_work, mesh, layout))
  # Moments of policy and critic; a gradient, the reference and the critic.
  waiting = 2 * fit_programs.device_bytes(state.opt_state) + 3 * fit_programs.device_bytes(state.trainable)
  assert waiting == programs[0].beside


def test_collectives_lie_along_the_axes_that_caused_them(split):
  mesh, _, programs = split
  answer = fit_report.judge(policy_work(), 'full', Topology('v5p:2x2x2', 1, CHIPS['v5p'], tuple(range(8))), on_torus(mesh), programs)
  sent = answer.sent()
  # Weights are gathered over fsdp and activations summed over tensor.
  assert sent['all-gather', ('fsdp',)] > 0 and sent['all-reduce', ('tensor',)] > 0
  assert {axes for _, axes in sent} <= {('fsdp',), ('tensor',), ('fsdp', 'tensor')}
  # The layer's matrices at least forward and backward, for both micro-batches: 3 of 4 parts of this device's half.
  matrices = sum(np.prod(spec.shape) for name, spec in specs(**ONE_LAYER) if spec.inputs and name.startswith('blocks'))
  assert sent['all-gather', ('fsdp',)] >= 2 * 2 * 4 * matrices / 2 * 3 / 4
  assert answer.fits and answer.mesh == {'fsdp': 4, 'tensor': 2}


class on_torus:
  """A mesh whose devices say where on a torus they are, as TPUs do."""

  def __init__(self, mesh):
    self.shape, self.axis_names = mesh.shape, mesh.axis_names
    places = np.empty(8, object)
    places[:] = [dataclasses.make_dataclass('Device', ['coords'])(coords) for coords in np.ndindex(2, 2, 2)]
    self.devices = places.reshape(mesh.devices.shape)


def test_adapters_leave_the_base_without_moments():
  lora = work(adapters=LoraConfig(rank=2))
  mesh = sharding.make_mesh(fsdp=8)
  trainable, frozen = fit_programs.abstract_params(lora, mesh, run_lib.lay_out(SETTINGS, lora.model, mesh))
  assert {leaf.dtype.name for leaf in jax.tree.leaves(trainable)} == {'float32'}
  assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {'bfloat16'}
  assert params_lib.count(frozen) == num_params()
  # Rank 2: for each of 2 layers q 32->64, k, v 32->32, o 64->32, gate, up 32->48, down 48->32.
  assert params_lib.count(trainable) == 2 * 2 * ((32 + 64) + 2 * (32 + 32) + (64 + 32) + 3 * (32 + 48))


@pytest.mark.parametrize(('changes', 'sizes', 'message'), [
    ({'rows': 6}, {'fsdp': 8}, r"rows=6 does not divide over mesh axes \('data', 'fsdp'\) of 8 shards"),
    ({'model': tiny.config(embed_dim=36)}, {'fsdp': 8}, r"parameter .*axis 'embed'=36 does not divide over mesh axes \('fsdp'"),
    ({}, {'ulysses': 8}, 'mesh.ulysses=8 exchanges tokens for heads'),
])
def test_sizes_that_do_not_divide_are_refused_before_tracing(changes, sizes, message):
  with pytest.raises(ValueError, match=message):
    compiled(work(**changes), **sizes)


def test_one_row_goes_over_fsdp_as_length():
  mesh = sharding.make_mesh(fsdp=4, seq=2)
  layout = run_lib.lay_out(dataclasses.replace(SETTINGS, fsdp_splits='length'), tiny.config(), mesh)
  assert layout.ring_axes == ('fsdp', 'seq') and layout.order == 'zigzag'
  # 100 tokens on 8 shards of two pieces each.
  place = batching.Place.of(layout, mesh)
  batch = fit_programs.abstract_batch(work(rows=1, length=100), place)
  assert batch.tokens_BT.shape == (1, 112) and place.sharding.shard_shape((1, 112)) == (1, 14)
  fit_programs.check(work(rows=1, length=100), layout, mesh)
  with pytest.raises(ValueError, match='rows=1 does not divide'):
    fit_programs.check(work(rows=1, length=100), run_lib.lay_out(SETTINGS, tiny.config(), mesh), mesh)


def test_the_compilers_refusal_is_a_result():
  said = ('RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (144.05G) exceeds available HBM '
          '(95.73G).\nmore')
  refused = fit_programs._refusal('gradient', said)
  assert (refused.needed / GIB, refused.available / GIB) == (144.05, 95.73) and 'more' not in refused.message
  assert fit_programs._refusal('gradient', 'INTERNAL: HBM (1G) exceeds available HBM (2G)') is None
  assert fit_programs._refusal('gradient', 'RESOURCE_EXHAUSTED: scoped vmem') is None
  answer = fit_report.judge(work(), 'none', Topology('v5p:2x2x2', 1, CHIPS['v5p'], tuple(range(8))), sharding.make_mesh(fsdp=8), [refused])
  assert not answer.fits and answer.bottleneck == 'memory capacity' and answer.step_s is None and answer.utilization is None
  assert fit_report.verdict(answer) == 'does not fit: gradient alone needs 144.1 of 95.7 GiB, and the compiler refuses it'
  assert 'exceeds available HBM' in fit_report.details(answer)
  json.dumps(fit_report.to_json(answer))


# The report.


def program(peak=1 * GIB, beside=0, runs=1):
  return Program('gradient', runs, 0, 0, 0, int(peak), int(beside), 1.0, '')


def answer(*, peak=GIB, beside=0, compute_s=1.0, memory_s=0.5, network_s=0.25, mesh=(('fsdp', 8),)):
  moved = Movement((Collective('all-gather', ('fsdp',), 3e9, 2),), 1e9, 1, 2)
  return fit_report.Fit(dict(mesh), (program(peak, beside, 4),), None, (moved,), 3e14, 4e14, 459e12, compute_s, memory_s, network_s, 2 * GIB)


def test_a_step_takes_between_its_busiest_resource_and_their_sum():
  fit_ = answer()
  assert fit_.step_s == (1.0, 1.75) and fit_.bottleneck == 'compute'
  assert fit_.utilization == (pytest.approx(3e14 / 459e12 / 1.75), pytest.approx(3e14 / 459e12))
  assert answer(memory_s=2.0).bottleneck == 'memory bandwidth' and answer(network_s=3.0).bottleneck == 'interconnect'
  # 4 runs of 2 times 3 GB.
  assert fit_.sent() == {('all-gather', ('fsdp',)): 24e9}


def test_what_waits_beside_a_program_counts():
  assert answer(peak=GIB, beside=GIB).fits and fit_report.verdict(answer(beside=GIB / 2)) == 'fits: needs 1.5 of 2.0 GiB, 0.5 GiB left'
  over = answer(peak=1.5 * GIB, beside=GIB)
  assert not over.fits and over.bottleneck == 'memory capacity' and fit_report.verdict(over) == 'does not fit: needs 2.5 of 2.0 GiB'


def test_the_best_mesh_is_the_fastest_that_fits():
  fits = [answer(compute_s=0.1, peak=3 * GIB, mesh=(('fsdp', 8),)), answer(compute_s=2.0, mesh=(('fsdp', 4), ('tensor', 2))),
          answer(compute_s=0.9, mesh=(('tensor', 8),))]
  assert fit_report.best(fits) is fits[2] and fit_report.best(fits[:1]) is None
  lines = fit_report.table(fits).splitlines()
  assert [line[0] for line in lines] == [' ', ' ', ' ', '*']
  assert lines[1].endswith('memory capacity') and lines[2].split()[:2] == ['fsdp=4', 'tensor=2']
  text = fit_report.details(fits[2])
  assert 'sends     24.000 GB  all-gather over fsdp' in text and '1 loops run as often as' in text and '2 hand-written' in text
  assert 'compute 900.0 ms, memory 500.0 ms, interconnect 250.0 ms: a step takes 900.0 ms to 1.65 s, MFU 40% to 73%' in text


def test_flops_are_those_of_the_formula():
  model = tiny.config(**ONE_LAYER)
  # Matmul weights: q 32x64, k, v 32x32, o 64x32, 3 of 32x48, embedding 96x32; norms are counted by the formula too.
  weights = num_params(**ONE_LAYER)
  # 16 tokens see 8 on average; two matmuls of 4 heads of 16.
  scores = 2 * 2 * 8 * 4 * 16
  assert fit_report.flops_per_token(model, 16, True, 'none') == (6 * weights + 3 * scores, 6 * weights + 3.5 * scores)
  assert fit_report.flops_per_token(model, 16, True, 'full')[1] == 8 * weights + 4.5 * scores
  assert fit_report.flops_per_token(model, 16, True, 'attention, attention_lse')[1] == 8 * weights + 3.5 * scores
  assert fit_report.flops_per_token(model, 16, False, 'none')[0] == 4 * weights + 3 * scores


# From a config.


def test_a_config_of_each_stage_becomes_work():
  config = sft.get_config()
  config.data.rows, config.data.length, config.data.micro_batches = 4, 128, 3
  supervised = fit.read_work(config, tiny.config())
  assert (supervised.rows, supervised.length, supervised.micro_batches, supervised.per_token) == (4, 128, 3, ())
  config.phases = ({'rows': 2, 'length': 512}, {'rows': 1, 'length': 1024}, {'rows': 8, 'length': 64})
  longest = fit.read_work(config, tiny.config())
  assert (longest.rows, longest.length) == (1, 1024)
  config = grpo.get_config()
  online = fit.read_work(config, tiny.config())
  assert online.per_token == ('advantages', 'behavior_logprobs') and (online.rows, online.copies) == (8, 0)
  config.loss.kl_coef, config.epochs = 0.1, 2
  anchored = fit.read_work(config, tiny.config())
  assert anchored.per_token == ('advantages', 'behavior_logprobs', 'old_logprobs', 'reference_logprobs') and anchored.copies == 1
  config.lora.rank = 4
  assert fit.read_work(config, tiny.config()).copies == 0
  with_critic = fit.read_work(ppo.get_config(), tiny.config())
  assert with_critic.has_critic and not online.has_critic and with_critic.copies == 1 and 'reference_logprobs' not in with_critic.per_token
  config.stage = 'distillation'
  with pytest.raises(ValueError, match="config.stage='distillation' is not compiled here; use a config of stage 'supervised' or 'rl'"):
    fit.read_work(config, tiny.config())


def test_shapes_have_the_published_sizes():
  billions = {name: params_lib.count(transformer.declare(model)) / 1e9 for name, model in SHAPES.items()}
  assert {name: round(size, 3) for name, size in billions.items()} == {
      'gemma3-270m': 0.268, 'llama3-8b': 8.030, 'llama3-70b': 70.554, 'llama3-405b': 405.853}
  with pytest.raises(ValueError, match="model='llama9' is no shape and no path; use one of gemma3-270m, llama3-8b"):
    fit.read_shape('llama9')


def launch_fit(*arguments):
  return subprocess.run([sys.executable, '-m', 'launch.fit', '--config=configs/sft.py', *arguments], cwd=ROOT, capture_output=True, text=True,
                        check=False, timeout=280)


def test_a_mistake_is_one_message():
  done = launch_fit('--topology=v5p:nonsense', '--model=gemma3-270m')
  assert done.returncode == 1 and done.stderr.startswith("launch.fit: topology='v5p:nonsense' is unknown") and 'Traceback' not in done.stderr


@pytest.mark.skipif(HAS_LIBTPU, reason='libtpu is installed')
def test_without_the_compiler_the_program_says_how_to_get_it():
  done = launch_fit('--topology=v5e:2x2', '--model=gemma3-270m')
  assert done.returncode == 1 and 'pip install -e .[tpu-aot]' in done.stderr and 'Traceback' not in done.stderr


@pytest.mark.skipif(not HAS_LIBTPU, reason='libtpu is not installed (pip install -e .[tpu-aot])')
def test_a_step_is_compiled_for_a_machine_that_is_not_here(tmp_path):
  small = [f'--model={tmp_path}', '--topology=v5e:2x2', '--config.layout.attention=blockwise', '--config.data.rows=4']
  (tmp_path / 'config.json').write_text(json.dumps({
      'model_type': 'llama', 'vocab_size': 256, 'hidden_size': 128, 'intermediate_size': 256, 'num_hidden_layers': 2,
      'num_attention_heads': 4, 'num_key_value_heads': 2, 'max_position_embeddings': 512, 'rms_norm_eps': 1e-5, 'rope_theta': 1e4}))
  done = launch_fit(*small, '--meshes=fsdp=4, fsdp=2 tensor=2', f'--output={tmp_path}/fit.json')
  assert done.returncode == 0, done.stderr
  report = json.loads((tmp_path / 'fit.json').read_text())
  assert [one['mesh'] for one in report['meshes']] == [{'fsdp': 4}, {'fsdp': 2, 'tensor': 2}]
  assert all(one['fits'] and one['needed_bytes'] < GIB for one in report['meshes'])
  assert 'fits: needs 0.0 of 15.8 GiB' in done.stdout and 'limited by' in done.stdout
  huge = launch_fit(*small, '--config.data.length=262144', '--config.data.rows=1024', '--config.layout.remat=none')
  assert huge.returncode == 0 and 'does not fit: gradient alone needs' in huge.stdout, huge.stderr + huge.stdout
  wrong = launch_fit(*small, '--meshes=fsdp=3')
  assert wrong.returncode == 1 and 'does not match the 4 devices of v5e:2x2' in wrong.stderr
