"""Reading a compiled program's text: bytes, loops and axes worked out by hand on small programs in XLA's own notation."""

import math

import numpy as np
import pytest

from launch import fit_hlo

MESH = {'data': 1, 'fsdp': 4, 'seq': 1, 'ulysses': 1, 'tensor': 2}

# A scan of 5 layers: each gathers a weight over fsdp and sums an activation over tensor; then one sum over everything.
SCANNED = '''HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (carry: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %carry = (s32[], f32[8,16]{1,0}) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%carry), index=1
  %w = bf16[4,16]{1,0:T(8,128)(2,1)} constant({...})
  %whole = bf16[16,16]{1,0} all-gather(%w), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true
  %summed = f32[8,16]{1,0} all-reduce(%x), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %out = (s32[], f32[8,16]{1,0}) tuple(%x, %summed)
}

%condition (carry.1: (s32[], f32[8,16])) -> pred[] {
  %carry.1 = (s32[], f32[8,16]{1,0}) parameter(0)
  %limit = s32[] constant(5)
  %i = s32[] get-tuple-element(%carry.1), index=0
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (p: (s32[], f32[8,16])) -> f32[8,16] {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %loop = (s32[], f32[8,16]{1,0}) while(%p), condition=%condition, body=%body
  %last = f32[8,16]{1,0} get-tuple-element(%loop), index=1
  ROOT %all = f32[8,16]{1,0} all-reduce(%last), channel_id=3, replica_groups={}, to_apply=%add
}
'''


def test_collectives_have_kind_axes_and_bytes_and_loops_multiply():
  moved = fit_hlo.movement(SCANNED, MESH)
  assert moved.unknown_loops == 0
  assert moved.sent() == {
      # 4 x 16 bf16 are 128 bytes; each of the 4 gets 3 others' shares; 5 layers.
      ('all-gather', ('fsdp',)): 5 * 3 * 128,
      # 8 x 16 float32 are 512 bytes; twice the half, over 2 devices.
      ('all-reduce', ('tensor',)): 5 * 512,
      ('all-reduce', ('fsdp', 'tensor')): 2 * 512 * 7 / 8,
  }


def test_memory_traffic_counts_operands_and_results_as_often_as_they_move():
  # In a layer: gather 128 + 512, sum 512 + 512; the comparison of two int32 to a byte, 5 times too; at the end the sum of 512 + 512.
  assert fit_hlo.movement(SCANNED, MESH).memory_bytes == 5 * (128 + 512 + 512 + 512 + 4 + 4 + 1) + 1024


def test_a_noted_trip_count_wins_and_a_bound_that_is_data_is_said():
  noted = SCANNED.replace('body=%body', 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
  assert fit_hlo.movement(noted, MESH).sent()['all-reduce', ('tensor',)] == 3 * 512
  data = SCANNED.replace('s32[] constant(5)', 's32[] get-tuple-element(%carry.1), index=0')
  moved = fit_hlo.movement(data, MESH)
  assert moved.unknown_loops == 1
  assert moved.sent()['all-reduce', ('tensor',)] == 512


def entry(*lines, before=''):
  return f'HloModule m\n{before}\nENTRY %main (x: f32[1]) -> f32[1] {{\n' + ''.join(f'  {line}\n' for line in lines) + '}\n'


def sent(*lines, mesh=MESH, before=''):
  return fit_hlo.movement(entry(*lines, before=before), mesh).sent()


X = '%x = f32[64]{0} parameter(0)'


@pytest.mark.parametrize(('groups', 'axes', 'size'), [
    ('{{0,2,4,6},{1,3,5,7}}', ('fsdp',), 4),
    ('[4,2]<=[8]', ('tensor',), 2),
    ('[1,8]<=[8]', ('fsdp', 'tensor'), 8),
    ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ('fsdp',), 4),
    ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ('tensor',), 2),
    ("mesh['a'=2,'b'=4]<=[4,2]T(1,0) {'a'}", ('tensor',), 2),
    ("mesh['a'=8] {'a':(1)4}", ('fsdp',), 4),
    ('{{0,3},{1,2},{4,7},{5,6}}', ('?',), 2),
])
def test_every_notation_of_groups(groups, axes, size):
  line = f'ROOT %y = f32[64]{{0}} reduce-scatter(%x), replica_groups={groups}, dimensions={{0}}'
  assert sent(X, line) == {('reduce-scatter', axes): 256 * (size - 1) / size}


def test_part_of_an_axis_is_no_axis():
  # 4 = 2 x 2 neighbors of fsdp: half an axis, which no name of the mesh means.
  assert list(sent(X, "ROOT %y = f32[64]{0} all-to-all(%x), replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}")) == [('all-to-all', ('?',))]


def test_a_group_of_one_sends_nothing():
  assert sent(X, 'ROOT %y = f32[64]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add') == {}


def test_a_permute_sends_its_operand_around_its_axis():
  ring = ','.join(f'{{{source},{(source + 2) % 8}}}' for source in range(8))
  line = f'ROOT %y = (f32[64]{{0}}, f32[64]{{0}}, u32[]) collective-permute-start(%x), source_target_pairs={{{ring}}}, metadata={{a}}'
  assert sent(X, line) == {('collective-permute', ('fsdp',)): 256}


def test_asynchronous_collectives_count_once():
  wrapped = ('%inner (p: f32[64]) -> f32[512] {\n  %p = f32[64]{0} parameter(0)\n'
             '  ROOT %g = f32[512]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}\n}\n')
  lines = (X, '%s = ((f32[64]{0}), f32[512]{0}, u32[]) async-start(%x), calls=%inner',
           'ROOT %d = f32[512]{0} async-done(%s), calls=%inner')
  assert sent(*lines, before=wrapped) == {('all-gather', ('fsdp', 'tensor')): 7 * 256}
  started = (X, '%s = (f32[64]{0}, f32[512]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}',
             'ROOT %d = f32[512]{0} all-gather-done(%s)')
  assert sent(*started) == {('all-gather', ('fsdp', 'tensor')): 7 * 256}


def test_a_fused_all_reduce_and_slice_is_a_reduce_scatter():
  fused = ('%all-reduce-scatter.1 (p: f32[64]) -> f32[8] {\n  %p = f32[64]{0} parameter(0)\n'
           '  %r = f32[64]{0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add\n'
           '  ROOT %s = f32[8]{0} dynamic-slice(%r), dynamic_slice_sizes={8}\n}\n')
  assert sent(X, 'ROOT %y = f32[8]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1', before=fused) == {
      ('reduce-scatter', ('fsdp', 'tensor')): 256 * 7 / 8}


def test_what_crosses_slices_is_named_so():
  host = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="%s"}'
  lines = (X, '%t = token[] after-all()', f'%r = (f32[64]{{0}}, u32[], token[]) recv(%t), channel_id=1, {host % "all-reduce.25_0"}',
           f'ROOT %s = (f32[64]{{0}}, u32[], token[]) send(%x, %t), channel_id=2, {host % "all-reduce.25_0"}')
  assert sent(*lines) == {('all-reduce', fit_hlo.BETWEEN_SLICES): 256}
  assert sent(*(line.replace('all-reduce.25', 'psum.3') for line in lines)) == {('send', fit_hlo.BETWEEN_SLICES): 256}
  assert sent(*(line.replace('xla_megascale_runtime', 'tf_host') for line in lines)) == {}


def memory(*lines, before=''):
  return fit_hlo.movement(entry(*lines, before=before), MESH).memory_bytes


def test_values_in_the_chips_own_memory_move_nothing():
  fast = '%y = f32[64]{0:T(128)S(1)} negate(%x)'
  assert memory(X, fast, 'ROOT %z = f32[64]{0} negate(%y)') == 256 + 256
  assert memory(X, '%y = f32[64]{0:T(128)} negate(%x)', 'ROOT %z = f32[64]{0} negate(%y)') == 4 * 256


def test_a_prefetch_reads_once():
  lines = (X, '%s = (f32[64]{0:T(128)S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%x)', 'ROOT %d = f32[64]{0:T(128)S(1)} copy-done(%s)')
  assert memory(*lines) == 256


STACK = '%stack = f32[32,64]{1,0} parameter(0)'


def test_a_fusion_reads_the_slice_it_uses_and_not_the_stack():
  inner = ('%deeper (q: f32[32,64], k: s32[]) -> f32[1,64] {\n  %q = f32[32,64]{1,0} parameter(0)\n  %k = s32[] parameter(1)\n'
           '  ROOT %cut = f32[1,64]{1,0} dynamic-slice(%q, %k, %k), dynamic_slice_sizes={1,64}\n}\n'
           '%fused (p: f32[32,64], i: s32[]) -> f32[1,64] {\n  %p = f32[32,64]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n'
           '  %same = f32[32,64]{1,0} bitcast(%p)\n  %piece = f32[1,64]{1,0} fusion(%same, %i), kind=kLoop, calls=%deeper\n'
           '  ROOT %r = f32[1,64]{1,0} negate(%piece)\n}\n')
  lines = (STACK, '%at = s32[] parameter(1)', 'ROOT %y = f32[1,64]{1,0} fusion(%stack, %at), kind=kLoop, calls=%fused')
  # A slice of 256 bytes in, the index of 4, 256 out.
  assert memory(*lines, before=inner) == 256 + 4 + 256


UPDATE = ('%update (p: f32[32,64], u: f32[1,64], i: s32[]) -> f32[32,64] {\n  %p = f32[32,64]{1,0} parameter(0)\n'
          '  %u = f32[1,64]{1,0} parameter(1)\n  %i = s32[] parameter(2)\n'
          '  %r = f32[32,64]{1,0} dynamic-update-slice(%p, %u, %i, %i)\n  ROOT %same = f32[32,64]{1,0} bitcast(%r)\n}\n')
NESTED = ('%nested (p: f32[32,64], u: f32[1,64], i: s32[]) -> f32[32,64] {\n  %p = f32[32,64]{1,0} parameter(0)\n'
          '  %u = f32[1,64]{1,0} parameter(1)\n  %i = s32[] parameter(2)\n'
          '  ROOT %f = f32[32,64]{1,0} fusion(%p, %u, %i), kind=kLoop, calls=%update\n}\n')


@pytest.mark.parametrize('called', ['update', 'nested'])
def test_a_fusion_that_updates_in_place_writes_the_update(called):
  lines = (STACK, '%new = f32[1,64]{1,0} parameter(1)', '%at = s32[] parameter(2)',
           f'ROOT %y = f32[32,64]{{1,0}} fusion(%stack, %new, %at), kind=kLoop, calls=%{called}')
  assert memory(*lines, before=UPDATE + NESTED) == 256 + 4 + 256


def test_a_kernel_written_by_hand_counts_its_operands_once_and_is_said():
  moved = fit_hlo.movement(entry(X, 'ROOT %y = f32[64]{0} custom-call(%x, %x), custom_call_target="tpu_custom_call"'), MESH)
  assert (moved.memory_bytes, moved.hand_kernels) == (3 * 256, 1)


def test_a_conditional_counts_every_branch():
  branches = ''.join(f'%branch{index} (p: f32[64]) -> f32[64] {{\n  %p = f32[64]{{0}} parameter(0)\n  ROOT %r = f32[64]{{0}} {body}\n}}\n'
                     for index, body in enumerate(('negate(%p)', 'copy(%p)')))
  lines = (X, '%at = s32[] parameter(1)', 'ROOT %y = f32[64]{0} conditional(%at, %x, %x), branch_computations={%branch0, %branch1}')
  assert memory(*lines, before=branches) == 2 * 512


def test_text_that_is_no_program_is_refused():
  with pytest.raises(ValueError, match='no ENTRY computation.*begins .stablehlo'):
    fit_hlo.movement('stablehlo.module {}', MESH)


def test_named_groups_equal_the_mesh_they_name():
  ids = np.arange(math.prod((2, 3, 4))).reshape(2, 3, 4)
  groups = fit_hlo._groups("replica_groups=mesh['a'=2,'b'=3,'c'=4] {'a','c'}", 24)
  assert np.array_equal(groups, ids.transpose(1, 0, 2).reshape(3, 8))
