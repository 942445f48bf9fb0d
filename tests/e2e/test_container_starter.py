"""The process that starts bubblewrap containers, where files run out or have high numbers, and where one hangs."""

from __future__ import annotations

import gc
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.support.processes import gone

from trimtab.trainer.sandbox import bubblewrap, container_starter
from trimtab.trainer.sandbox.bubblewrap import Container, ContainerError, Setup
from trimtab.trainer.sandbox.code_result import CodeResult
from trimtab.trainer.sandbox.container_init import READY
from trimtab.trainer.sandbox.python_pool import PythonPool, sandbox_unavailable

pytestmark = pytest.mark.slow

TWO = CodeResult("2\n")
MANY_FILES = 1100  # more than `select` takes


@pytest.fixture(autouse=True)
def needs_bubblewrap() -> None:
    if missing := sandbox_unavailable("bubblewrap"):
        pytest.skip(missing)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Holds so many open files that the next one has a number above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * MANY_FILES:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY_FILES), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY_FILES)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_trainer_with_many_open_files_runs_code(many_files: None) -> None:  # noqa: ARG001
    with PythonPool("bubblewrap", workers=1, timeout=20.0) as pool:
        assert pool.session().run("1 + 1") == TWO


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (b"", "it was killed, or took too long"),
        (b"first\nbwrap: no such file\n", "bwrap: no such file"),
        (b"a warning\n" + READY, "it was killed"),
    ],
)
def test_a_container_that_ends_before_its_first_run_says_why(written: bytes, error: str) -> None:
    connection, inside = socket.socketpair()
    with connection:
        inside.sendall(written)
        inside.close()
        with pytest.raises(ContainerError, match=f"^{error}$"):
            Container(connection, 0, lambda: None).wait_until_ready()


def test_a_start_that_fails_leaves_no_file_open() -> None:
    gc.collect()  # what earlier tests left open must not be closed in between
    before = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            container_starter.start(Setup(["/no/such/program"], b""))
    assert psutil.Process().num_fds() == before


NO_FILES = """
import contextlib, os, psutil, resource
from trimtab.trainer.sandbox.python_pool import PythonPool

with PythonPool("bubblewrap", workers=6, timeout=20.0) as pool, pool.session() as session:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000))
    [starter] = psutil.Process().children()
    processes = [starter, *starter.children(recursive=True)]
    files = []
    try:
        while True:
            files.append(os.open("/dev/null", 0))
    except OSError:
        for process in processes:  # those of the starter end with it
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, 9)  # psutil would read a file first
    results = [session.run("1 + 1") for _ in range(20)]
    for file in files:
        os.close(file)
    # Files of containers that have ended may be enough for the next one.
    known = ("could not be started", "was killed")
    failed = [result for result in results if result.output != "2\\n"]
    print(all(result.sandbox_failed and any(words in result.error for words in known) for result in failed))
    print(session.run("1 + 1").output, end="")
"""


def test_a_trainer_without_a_file_left_gets_an_error_and_goes_on_later() -> None:
    run = subprocess.run([sys.executable, "-c", NO_FILES], capture_output=True, text=True, timeout=100, check=False)
    assert (run.stdout, run.stderr) == ("True\n2\n", "")


QUICK_STARTER = """
from trimtab.trainer.sandbox import container_starter
container_starter.END_TIMEOUT = 0.5
container_starter.main()
"""


def is_process_1(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # bwrap's own helpers end while they are listed
        parent = process.parent()
        return parent is not None and parent.name() == "bwrap" and bool(process.children())
    return False


def test_a_stopped_container_ends_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quick_starter.py").write_text(QUICK_STARTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("trimtab.trainer.sandbox.bubblewrap.STARTER", "quick_starter")
    monkeypatch.setattr(bubblewrap, "GRACE", 1.0)
    with PythonPool("bubblewrap", workers=1, timeout=1.0) as pool, pool.session() as session:
        assert session.run("x = 1") == CodeResult("")
        started = filter(is_process_1, psutil.Process().children(recursive=True))
        process_1 = min(started, key=lambda process: process.create_time())  # another one was started ahead
        process_1.suspend()
        assert session.run("x").timed_out
        assert gone(process_1.pid)
        assert session.run("1 + 1") == TWO
