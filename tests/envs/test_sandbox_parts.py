"""The parts of the sandbox that need no box: the system call filter, control groups, the choice of bubblewrap, what the supervisor imports."""

import os
from pathlib import Path
import struct
import subprocess
import sys

import pytest

from envs.sandbox import bwrap, cgroup, client, seccomp

ROOT = Path(__file__).resolve().parents[2]


def simulate(program, arch, number, args=(0, 0, 0, 0, 0, 0)):
  """Run a classic BPF program on a system call; an interpreter independent of how the program is made."""
  data = struct.pack('=iIQ6Q', number, arch, 0, *args)
  code = list(struct.iter_unpack('=HBBI', program))
  at, word = 0, 0
  while True:
    operation, if_true, if_false, constant = code[at]
    if operation == 0x20:
      word = struct.unpack_from('=I', data, constant)[0]
    elif operation == 0x06:
      return constant
    else:
      is_true = {0x15: word == constant, 0x35: word >= constant, 0x45: bool(word & constant)}[operation]
      at += if_true if is_true else if_false
    at += 1


EPERM, ENOSYS, EAFNOSUPPORT = 0x50001, 0x50026, 0x50061
# (call, arguments, result) with numbers from the kernel's tables: x86_64, aarch64.
CALLS = [
    ((0, 63), (), seccomp.ALLOW),  # read
    ((59, 221), (), seccomp.ALLOW),  # execve
    ((165, 40), (), EPERM),  # mount
    ((272, 97), (), EPERM),  # unshare
    ((101, 117), (), EPERM),  # ptrace
    ((29, 194), (), EPERM),  # shmget
    ((425, 425), (), EPERM),  # io_uring_setup
    ((304, 265), (), EPERM),  # open_by_handle_at
    ((435, 435), (), ENOSYS),  # clone3
    ((56, 220), (0x003D0F00,), seccomp.ALLOW),  # clone of a thread
    ((56, 220), (0x10000011,), EPERM),  # clone with CLONE_NEWUSER
    ((56, 220), (0x00020011,), EPERM),  # clone with CLONE_NEWNS
    ((16, 29), (0, 0x5401), seccomp.ALLOW),  # ioctl TCGETS
    ((16, 29), (0, 0x5412), EPERM),  # ioctl TIOCSTI
    ((16, 29), (0, 0xFFFFFFFF00005412), EPERM),  # the kernel looks at the low half only
    ((41, 198), (2,), seccomp.ALLOW),  # socket AF_INET
    ((41, 198), (40,), EAFNOSUPPORT),  # socket AF_VSOCK
    ((41, 198), (0,), EAFNOSUPPORT),
]


@pytest.mark.parametrize('column, machine, arch', [(0, 'x86_64', 0xC000003E), (1, 'aarch64', 0xC00000B7)])
def test_the_filter_of_each_machine(column, machine, arch):
  program = seccomp.program(machine)
  for numbers, args, expected in CALLS:
    assert simulate(program, arch, numbers[column], (*args, 0, 0, 0, 0, 0, 0)[:6]) == expected, (numbers, args)
  assert simulate(program, 0x40000003, 0) == seccomp.KILL  # i386
  for name, numbers in seccomp.REFUSED.items():
    assert numbers[column] is None or simulate(program, arch, numbers[column]) == EPERM, name
  if machine == 'x86_64':
    assert simulate(program, arch, 0x40000000 | 59) == ENOSYS  # x32
  with pytest.raises(ValueError, match="machine 'sparc64' has no system call table"):
    seccomp.program('sparc64')


def test_the_supervisor_imports_nothing_heavy():
  code = client._BOOT.rpartition(';')[0] + '; print(*sys.modules)'
  done = subprocess.run([sys.executable, '-I', '-S', '-c', code, str(ROOT / 'envs')], capture_output=True, text=True, check=True)
  assert not {'numpy', 'jax', 'gymnasium', 'envs.core'} & set(done.stdout.split()) and 'envs.sandbox.box' in done.stdout


def test_choosing_a_bubblewrap(tmp_path):
  for name, version in (('old', '0.8.0'), ('new', '0.10.0')):
    (tmp_path / name).write_text(f'#!/bin/sh\necho bubblewrap {version}\n')
    (tmp_path / name).chmod(0o755)
  chosen = bwrap.choose([str(tmp_path / 'old'), str(tmp_path / 'new')])
  assert (chosen.version, chosen.path, chosen.files) == ('0.10.0', str(tmp_path / 'new'), ())
  with pytest.raises(FileNotFoundError, match=r'found .*old \(bubblewrap 0.8.0\)'):
    bwrap.choose([str(tmp_path / 'old')])


# Control groups, on folders that stand in for the kernel's.


@pytest.fixture
def fake_kernel(tmp_path, monkeypatch):
  """Folders whose subfolders get the control files of a group, as the kernel makes them."""
  files = ('cgroup.procs', 'cgroup.subtree_control', 'memory.limit_in_bytes', 'memory.max', 'pids.max')
  mkdir = Path.mkdir

  def make(self, *args, **kwargs):
    mkdir(self, *args, **kwargs)
    for name in files:
      (self / name).write_text('')

  def proc(groups, mounts):
    (tmp_path / 'proc/self').mkdir(parents=True)
    (tmp_path / 'proc/self/cgroup').write_text(groups)
    (tmp_path / 'proc/self/mountinfo').write_text(mounts)
    monkeypatch.setattr(Path, 'mkdir', make)
    return tmp_path / 'proc'

  return proc


def test_groups_of_version_1_nest_under_our_own_and_never_at_the_root(tmp_path, fake_kernel):
  own = tmp_path / 'memory/mine'
  own.mkdir(parents=True)
  (tmp_path / 'pids').mkdir()
  (tmp_path / 'pids/release_agent').write_text('')
  proc = fake_kernel('8:pids:/\n4:memory:/docker/mine\n0::/\n',
                     f'30 1 0:1 /docker {tmp_path}/memory rw - cgroup cgroup rw,memory\n31 1 0:2 / {tmp_path}/pids rw - cgroup cgroup rw,pids\n')
  groups = cgroup.claim(os.getuid(), proc)
  assert groups.describe() == 'cgroup v1 (memory)' and groups.limits('memory') and not groups.limits('pids')
  group = groups.create('box-1', 1000, 7)
  group.add(42)
  folder = own / f'bessemer-{os.getpid()}' / 'box-1'
  assert [(folder / name).read_text() for name in ('memory.limit_in_bytes', 'cgroup.procs', 'pids.max')] == ['1000', '42', '']
  (folder / 'memory.oom_control').write_text('oom_kill_disable 0\nunder_oom 0\noom_kill 0\n')
  assert not group.has_hit('memory')
  (folder / 'memory.oom_control').write_text('oom_kill_disable 0\nunder_oom 0\noom_kill 1\n')
  assert group.has_hit('memory') and not group.has_hit('pids')


def test_groups_of_version_2_move_the_trainer_aside_but_nobody_else(tmp_path, fake_kernel):
  own = tmp_path / 'unified/mine'
  own.mkdir(parents=True)
  stranger = 2 if os.getppid() == 1 else 1
  for name, text in (('cgroup.type', 'domain'), ('cgroup.controllers', 'cpu memory pids'), ('cgroup.subtree_control', ''),
                     ('cgroup.procs', f'{os.getpid()}\n{stranger}\n')):
    (own / name).write_text(text)
  proc = fake_kernel('0::/mine\n', f'30 1 0:1 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n')
  assert cgroup.claim(os.getuid(), proc).describe() == 'no cgroup' and not list(own.glob('bessemer*'))
  (own / 'cgroup.procs').write_text(f'{os.getpid()}\n{os.getppid()}\n')
  groups = cgroup.claim(os.getuid(), proc)
  assert groups.describe() == 'cgroup v2 (memory, pids)'
  ours = own / f'bessemer-{os.getpid()}'
  assert (own / 'bessemer-trainer/cgroup.procs').read_text() == str(os.getppid())
  assert (ours / 'supervisor/cgroup.procs').read_text() == str(os.getpid())
  assert [(folder / 'cgroup.subtree_control').read_text() for folder in (own, ours)] == ['+memory +pids'] * 2
  groups.create('box-1', 1000, 7)
  assert [(ours / 'box-1' / name).read_text() for name in ('memory.max', 'pids.max')] == ['1000', '7']
