"""The system call filter of a box, as the bytes of a BPF program.

Everything is allowed but what has no place in a box, most of which needs privileges that it lacks anyway: the filter is there for the day when
the kernel has a hole. Calls of another architecture kill; x32 and clone3 do not exist (C libraries fall back to clone, whose flags a filter
can see); sockets are of four families. Memory that neither belongs to a process nor lies in a file system (memfd, System V) is refused,
because only a cgroup would count it.

Source: Linux, Documentation/userspace-api/seccomp_filter.rst and include/uapi/linux/{filter,seccomp,audit}.h; numbers from the kernel's
syscall tables. Deliberately absent: architectures other than x86_64 and aarch64.
"""

from __future__ import annotations

import errno
import struct

# name -> number on (x86_64, aarch64); None where it does not exist.
REFUSED = {
    # mounts and roots
    'mount': (165, 40), 'umount2': (166, 39), 'pivot_root': (155, 41), 'chroot': (161, 51), 'open_tree': (428, 428), 'move_mount': (429, 429),
    'fsopen': (430, 430), 'fsconfig': (431, 431), 'fsmount': (432, 432), 'fspick': (433, 433), 'mount_setattr': (442, 442),
    'open_tree_attr': (467, 467), 'name_to_handle_at': (303, 264), 'open_by_handle_at': (304, 265), 'quotactl': (179, 60),
    'quotactl_fd': (443, 443), 'swapon': (167, 224), 'swapoff': (168, 225), 'acct': (163, 89),
    # namespaces
    'unshare': (272, 97), 'setns': (308, 268), 'sethostname': (170, 161), 'setdomainname': (171, 162),
    # other processes
    'ptrace': (101, 117), 'process_vm_readv': (310, 270), 'process_vm_writev': (311, 271), 'pidfd_getfd': (438, 438), 'kcmp': (312, 272),
    'process_madvise': (440, 440),
    # large and often faulty parts of the kernel
    'bpf': (321, 280), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282), 'io_uring_setup': (425, 425), 'io_uring_enter': (426, 426),
    'io_uring_register': (427, 427), 'add_key': (248, 217), 'request_key': (249, 218), 'keyctl': (250, 219), 'fanotify_init': (300, 262),
    'modify_ldt': (154, None), 'personality': (135, 92), 'move_pages': (279, 239), 'migrate_pages': (256, 238), 'mbind': (237, 235),
    'vhangup': (153, 58), 'lookup_dcookie': (212, 18), 'nfsservctl': (180, 42),
    # the machine
    'kexec_load': (246, 104), 'kexec_file_load': (320, 294), 'init_module': (175, 105), 'finit_module': (313, 273), 'delete_module': (176, 106),
    'create_module': (174, None), 'reboot': (169, 142), 'syslog': (103, 116), 'iopl': (172, None), 'ioperm': (173, None),
    'clock_settime': (227, 112), 'settimeofday': (164, 170), 'adjtimex': (159, 171), 'clock_adjtime': (305, 266),
    # memory that only a cgroup counts
    'memfd_create': (319, 279), 'memfd_secret': (447, 447), 'shmget': (29, 194),
}
# machine -> (column above, AUDIT_ARCH value, numbers of clone, clone3, ioctl and socket)
_MACHINES = {
    'x86_64': (0, 0xC000003E, 56, 435, 16, 41),
    'aarch64': (1, 0xC00000B7, 220, 435, 29, 198),
}
_X32_BIT = 0x40000000
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET; clone has no NEWTIME.
_CLONE_NEW = 0x7E020000
_IOCTLS = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX type into a terminal
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16  # offsets in struct seccomp_data; low halves come first on both machines
ALLOW, KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def refuse(code: int) -> int:
  """Return the action that fails a call with an errno."""
  return _ERRNO | code


def machines() -> tuple[str, ...]:
  """Return the machines that a filter can be made for, named as `os.uname().machine` does."""
  return tuple(_MACHINES)


def program(machine: str) -> bytes:
  """Return the filter of a machine as an array of `struct sock_filter`.

  Raises:
    ValueError: an unknown machine.
  """
  if machine not in _MACHINES:
    raise ValueError(f'machine {machine!r} has no system call table here; boxes run on {", ".join(_MACHINES)}.')
  column, arch, clone, clone3, ioctl, socket = _MACHINES[machine]
  code = [(_LOAD, 0, 0, _ARCH_AT), (_JUMP_EQUAL, 1, 0, arch), _return(KILL), (_LOAD, 0, 0, _NUMBER_AT)]
  if machine == 'x86_64':
    code += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), _return(refuse(errno.ENOSYS))]
  code += _if_number(clone3, [_return(refuse(errno.ENOSYS))])
  code += _if_number(clone, [_load_arg(0), (_JUMP_ANY_BIT, 0, 1, _CLONE_NEW), _return(refuse(errno.EPERM)), _return(ALLOW)])
  code += _if_number(ioctl, [_load_arg(1), *_if_any(_IOCTLS, refuse(errno.EPERM)), _return(ALLOW)])
  code += _if_number(socket, [_load_arg(0), *_if_any(_FAMILIES, ALLOW), _return(refuse(errno.EAFNOSUPPORT))])
  code += _if_any([row[column] for row in REFUSED.values() if row[column] is not None], refuse(errno.EPERM))
  code += [_return(ALLOW)]
  return b''.join(struct.pack('=HBBI', *instruction) for instruction in code)


def _return(action: int) -> tuple[int, int, int, int]:
  return _RETURN, 0, 0, action


def _load_arg(index: int) -> tuple[int, int, int, int]:
  return _LOAD, 0, 0, _ARGS_AT + 8 * index


def _if_number(number: int, then: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
  return [(_JUMP_EQUAL, 0, len(then), number), *then]


def _if_any(values, action: int) -> list[tuple[int, int, int, int]]:
  """Return the instructions that end with `action` if the loaded word is one of `values`, and go on behind them if not."""
  tests = [(_JUMP_EQUAL, len(values) - 1 - index, 0, value) for index, value in enumerate(values)]
  # The last test, if it fails, must jump over the return.
  tests[-1] = (_JUMP_EQUAL, 0, 1, values[-1])
  return [*tests, _return(action)]
