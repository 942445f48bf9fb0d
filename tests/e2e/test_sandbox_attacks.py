"""Every attack of the list against both sandboxes: nothing leaks, and the next run is right."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.sandbox_attacks import ATTACKS, TIME, WRITABLE, Attack

from trimtab.trainer.sandbox.code_result import MAX_ERROR, CodeResult
from trimtab.trainer.sandbox.container_command import container_command
from trimtab.trainer.sandbox.python_pool import PythonPool, sandbox_unavailable

pytestmark = pytest.mark.slow

MAX_OUTPUT = 5000
VARIABLE = "TRIMTAB_SECRET"
UNSANDBOXED = 60  # seconds


@dataclass
class Machine:
    """What an attack may try to reach: a secret in a file and in the environment, a folder, a server."""

    secret: str
    folder: Path
    server: socket.socket
    connections: list[str] = field(default_factory=list)

    def code(self, attack: Attack) -> str:
        code = attack.code
        for word, value in {
            "@SECRET_FILE@": str(self.folder / "secret"),
            "@FOLDER@": str(self.folder),
            "@PORT@": str(self.server.getsockname()[1]),
            "@PID@": str(os.getpid()),
            "@HOME@": str(Path.home()),
        }.items():
            code = code.replace(word, value)
        return code

    def serve(self) -> None:
        while True:
            try:
                connection, address = self.server.accept()
            except OSError:
                return
            self.connections.append(str(address))
            connection.close()

    def violations(self, output: str, error: str) -> list[str]:
        """What the attack reached, and removes it."""
        there = [f"wrote {path.name}" for path in self.folder.iterdir() if path.name != "secret"]
        for path in self.folder.iterdir():
            if path.name != "secret":
                path.unlink()
        # An error quotes lines of the code, where the word of success stands as well.
        there += ["escaped"] * ("ESCAPED" in output) + ["read the secret"] * (self.secret in output + error)
        there += [f"connected from {address}" for address in self.connections]
        self.connections.clear()
        return there


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    server = socket.create_server(("127.0.0.1", 0))
    machine = Machine(secrets.token_hex(16), tmp_path_factory.mktemp("machine"), server)
    (machine.folder / "secret").write_text(machine.secret)
    os.environ[VARIABLE] = machine.secret
    thread = threading.Thread(target=machine.serve, daemon=True)
    thread.start()
    yield machine
    del os.environ[VARIABLE]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


@pytest.fixture(scope="module", params=["monty", "bubblewrap"])
def pools(request: pytest.FixtureRequest, machine: Machine) -> Iterator[dict[float, PythonPool]]:  # noqa: ARG001
    """By timeout in seconds: short for attacks that never end, long for those that end by themselves."""
    if missing := sandbox_unavailable(request.param):
        pytest.skip(missing)

    def pool(timeout: float) -> PythonPool:
        return PythonPool(request.param, workers=1, timeout=timeout, memory_mb=128, max_output=MAX_OUTPUT)

    with pool(1.0) as short, pool(3.0) as long:
        yield {1.0: short, 3.0: long}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_an_attack_is_held_and_the_next_run_is_right(
    request: pytest.FixtureRequest, pools: dict[float, PythonPool], machine: Machine, attack: Attack
) -> None:
    expected = getattr(attack, request.node.callspec.params["pools"])
    timeout = 1.0 if expected == TIME else 3.0
    pool = pools[timeout]
    with pool.session() as session:
        result = session.run(machine.code(attack))
    with pool.session() as session:
        after, other = session.run("1 + 1"), session.run("'leaked' in dir()")
    printed = f"{result.error}\n{result.output}"
    assert machine.violations(result.output, result.error or "") == []
    assert re.search(expected, printed), printed[:2000]
    assert after == CodeResult("2\n")
    assert other.output == "False\n" or "NameError" in (other.error or "")
    assert len(result.output) <= MAX_OUTPUT
    assert len(result.error or "") <= MAX_ERROR + 100  # the line about what was cut out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", printed)
    assert result.timed_out == (f"took longer than {timeout:g} s" in (result.error or ""))


@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if attack.bare], ids=lambda attack: attack.name.replace(" ", "-")
)
def test_the_same_attack_succeeds_without_a_sandbox(machine: Machine, attack: Attack) -> None:
    run = subprocess.run(
        [sys.executable, "-c", machine.code(attack)], capture_output=True, text=True, timeout=UNSANDBOXED, check=False
    )
    # A connection is accepted by a thread, which may be behind.
    if "@PORT@" in attack.code:
        with socket.create_connection(machine.server.getsockname()) as last:
            last.recv(1)
    expected = 2 if "@PORT@" in attack.code else 1
    assert len(machine.violations(run.stdout, run.stderr)) >= expected


@pytest.fixture
def bubblewrap() -> Iterator[PythonPool]:
    if missing := sandbox_unavailable("bubblewrap"):
        pytest.skip(missing)
    with PythonPool("bubblewrap", timeout=60.0, workers=1) as pool:
        yield pool


def test_no_file_anywhere_can_be_written(bubblewrap: PythonPool) -> None:
    assert bubblewrap.session().run(WRITABLE.format("'/'")) == CodeResult("held\n")


# What of a container code can change without a right, and how its successor could see it.
MARKS = """import os, resource, threading
for _ in range(50): open('/tmp/x', 'w').close(); os.unlink('/tmp/x')
for _ in range(5): threading.Thread(target=print).start()
for mark in (
    lambda: os.utime('/tmp', ns=(7, 7)), lambda: os.mkdir('/tmp/note'), lambda: os.chmod('/tmp', 0o1733),
    lambda: os.setxattr('/tmp', 'user.note', b'7'), lambda: os.nice(7), lambda: os.sched_setaffinity(1, {0}),
    lambda: os.sched_setaffinity(0, {0}), lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (77, 77))
):
    try: mark()
    except OSError: pass
"""
SIGHTS = """import os
open('/tmp/y', 'w').close()
print(os.stat('/tmp').st_atime_ns == 7, os.listdir('/tmp'), os.stat('/tmp/y').st_ino, os.getpid(),
      os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(1), os.sched_getaffinity(0),
      oct(os.stat('/tmp').st_mode), os.statvfs('/tmp').f_ffree, os.listxattr('/tmp'))
"""


def test_code_leaves_no_note_for_a_later_session(bubblewrap: PythonPool) -> None:
    def see() -> str:
        with bubblewrap.session() as session:
            return session.run(SIGHTS).output

    before = see()
    with bubblewrap.session() as session:
        assert session.run(MARKS).error is None
        assert session.run(SIGHTS).output != before  # within the session the marks are seen
    assert before
    assert [see() for _ in range(3)] == [before] * 3


# What of a device that anybody may write, here of a file of the test, code can change or find out.
TOUCHES = """import ctypes, os
libc, now = ctypes.CDLL(None), (ctypes.c_long * 4)(0, (1 << 30) - 1, 0, (1 << 30) - 1)
old = os.uname().machine == 'x86_64'
file, path = os.open('/dev/device', os.O_RDWR), b'/dev/device'
for touch in (
    lambda: os.utime(path), lambda: os.utime(file), lambda: os.utime(path, ns=(7, 7)),
    lambda: libc.utimensat(-100, path, now, 0), lambda: libc.futimens(file, None),  # UTIME_NOW, as its owner need not
    lambda: old and [libc.syscall(132, path, None), libc.syscall(235, path, None), libc.syscall(261, -100, path, None)],
):
    try: touch()
    except OSError: pass
try: print(os.preadv(file, [bytearray(4)], 0, os.RWF_NOWAIT))
except OSError as error: print(error.strerror)
print(os.preadv(file, [bytearray(4)], 0, 0))
"""


def test_a_file_that_all_containers_share_keeps_its_times_and_does_not_tell_what_is_in_memory(
    bubblewrap: PythonPool,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As /dev/null is bound, whose times a later container could read. No device is touched here."""
    shared = tmp_path / "device"
    shared.write_bytes(bytes(4096))
    shared.chmod(0o666)
    os.utime(shared, ns=(10**18, 10**18))
    before = shared.stat()

    def command(*arguments: Any, **options: Any) -> list[str]:
        words = container_command(*arguments, **options)
        end = words.index("--chdir")
        return [*words[:end], "--dev-bind", str(shared), "/dev/device", *words[end:]]

    monkeypatch.setattr("trimtab.trainer.sandbox.bubblewrap.container_command", command)
    with PythonPool("bubblewrap", timeout=60.0, workers=1) as pool, pool.session() as session:
        seen = session.run("import os\nos.stat('/dev/device').st_mtime_ns, os.access('/dev/device', os.W_OK)")
        result = session.run(TOUCHES)
    after = shared.stat()
    assert seen == CodeResult(f"({10**18}, True)\n")
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert result == CodeResult("Operation not supported\n4\n")
