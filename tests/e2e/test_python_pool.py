"""Pools of sandboxes: values, variables, threads, dead processes, and what is left when a pool ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.support.processes import gone

from trimtab.errors import TrimtabError
from trimtab.trainer.sandbox.code_result import CodeResult
from trimtab.trainer.sandbox.python_pool import PythonPool, PythonSession, SandboxName, sandbox_unavailable

pytestmark = pytest.mark.slow

LONG = 600.0  # seconds of a run that a test ends
LOOP = "while True: pass"


@pytest.fixture(scope="module")
def bubblewrap() -> None:
    if missing := sandbox_unavailable("bubblewrap"):
        pytest.skip(missing)


@pytest.fixture(scope="module")
def pool(sandbox: SandboxName) -> Iterator[PythonPool]:
    with PythonPool(sandbox, workers=2, timeout=20.0) as pool:
        yield pool


@pytest.fixture
def session(pool: PythonPool) -> Iterator[PythonSession]:
    with pool.session() as session:
        yield session


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2\n"),
        ("print('a', end='')\n'b'", "a'b'\n"),
        ("x = 1", ""),
        ("None", ""),
        ("print(1); 2;", "1\n2\n"),
        ("1 + 1  # why", "2\n"),
        ("(1,\n 2)", "(1, 2)\n"),
        ("*[1], 2", "(1, 2)\n"),
        ("'é'; '日本' + 'ü'", "'日本ü'\n"),
        ("def f(x):\n    return x * 2\n\nf(4)\n\n", "8\n"),
        ("for i in range(2):\n    i", ""),
        ("x = 3\nif x: x", ""),
        ("class A:\n    def __repr__(self): return 'shown'\nA()", "shown\n"),
        ("import math\nmath.sqrt(2)", "1.4142135623730951\n"),
        ("import sys\nprint('to errors', file=sys.stderr)", "to errors\n"),
        ("def f():\n    return '''a\nb'''\nprint(f())", "a\nb\n"),
    ],
)
def test_output_is_that_of_the_interactive_interpreter(session: PythonSession, code: str, output: str) -> None:
    assert session.run(code) == CodeResult(output)


def test_an_exception_is_a_short_traceback_after_what_was_printed(session: PythonSession) -> None:
    result = session.run("def half(x):\n    return x / 0\n\nprint('before')\nhalf(1)")
    lines = [line for line in (result.error or "").splitlines() if not set(line) <= set(" ^~")]
    assert lines == [
        "Traceback (most recent call last):",
        '  File "<python>", line 5, in <module>',
        "    half(1)",
        '  File "<python>", line 2, in half',
        "    return x / 0",
        "ZeroDivisionError: division by zero",
    ]
    assert (result.output, result.timed_out, result.lost) == ("before\n", False, False)


def test_variables_live_on_in_their_session_alone(pool: PythonPool) -> None:
    with pool.session() as one, pool.session() as other:
        assert one.run("def double(y): return 2 * y\nx = 21") == CodeResult("")
        assert other.run("x = 1\nx") == CodeResult("1\n")
        assert "ZeroDivisionError" in (one.run("1 / 0").error or "")
        assert one.run("double(x)") == CodeResult("42\n")
    with pool.session() as third:
        assert "NameError" in (third.run("x").error or "")


def test_a_limit_takes_the_variables_and_says_so(sandbox: SandboxName) -> None:
    with PythonPool(sandbox, workers=1, timeout=2.0) as pool, pool.session() as session:
        assert session.run("x = 1") == CodeResult("")
        assert session.run(LOOP) == CodeResult("", "took longer than 2 s", timed_out=True, lost=True)
        assert "NameError" in (session.run("x").error or "")
        assert session.run("x = 2\nx") == CodeResult("2\n")


def test_printing_too_much_keeps_the_first_part(sandbox: SandboxName) -> None:
    with PythonPool(sandbox, workers=1, timeout=20.0, max_output=10) as pool, pool.session() as session:
        assert session.run("print('é' * 10, end='')") == CodeResult("é" * 10)
        cut = session.run("print('é' * 11, end='')")
        assert (cut.output, cut.error) == ("é" * 10, "printed more than 10 characters")
        long = session.run("raise ValueError('x' * 10**5)").error or ""
        assert long.startswith("Traceback")
        assert long.endswith("xxx")
        assert len(long) < 2100


def test_more_threads_than_workers_get_their_own_answers(pool: PythonPool) -> None:
    def episode(number: int) -> list[str]:
        with pool.session() as session:
            session.run(f"x = {number}")
            return [session.run(code).output for code in ("x", "x * 2", "x * 3")]

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(episode, range(24)))
    assert answers == [[f"{n}\n", f"{2 * n}\n", f"{3 * n}\n"] for n in range(24)]


def processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("direct", [True, False])
def test_killed_processes_cost_their_run_alone(sandbox: SandboxName, direct: bool) -> None:
    """A child of this process is killed, or what runs below one."""
    before = set(processes())
    with PythonPool(sandbox, workers=1, timeout=LONG) as pool, pool.session() as session:
        for _ in range(2):
            assert session.run("x = 1") == CodeResult("")
            with ThreadPoolExecutor(1) as thread:
                run, killed = thread.submit(session.run, LOOP), set()
                while not run.done():  # once may be before the run has begun
                    for process in set(processes()) - before:
                        with suppress(psutil.NoSuchProcess):
                            if (process.ppid() == os.getpid()) == direct:
                                process.kill()
                                killed.add(process.pid)
            assert all(gone(pid) for pid in killed)
            result = run.result()
            assert result.error
            assert not result.timed_out
            assert result.lost
            assert result.sandbox_failed or not direct
            assert session.run("1 + 1") == CodeResult("2\n")


def test_a_dead_idle_pool_is_started_again(sandbox: SandboxName) -> None:
    before = set(processes())
    with PythonPool(sandbox, workers=6, timeout=20.0) as pool:
        started = set(processes()) - before
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert all(gone(process.pid) for process in started)
        for _ in range(7):
            with pool.session() as session:
                assert session.run("1 + 1") == CodeResult("2\n")


def test_a_session_learns_that_another_one_lost_its_process() -> None:
    """Only Monty's workers serve several sessions."""
    before = set(processes())
    with PythonPool("monty", workers=1) as pool, pool.session() as one, pool.session() as other:
        one.run("x = 1")
        other.run("x = 2")
        [worker] = [process for process in set(processes()) - before if process.ppid() == os.getpid()]
        worker.kill()
        for result in (one.run("x"), other.run("x")):
            assert result.lost or (result.error or "").endswith("the variables of this session are lost")
        assert [one.run("1 + 1"), other.run("1 + 1")] == [CodeResult("2\n")] * 2


def test_closing_a_pool_ends_its_runs_and_its_processes(sandbox: SandboxName) -> None:
    before = set(processes())
    pool = PythonPool(sandbox, workers=2, timeout=LONG)
    with ThreadPoolExecutor(1) as thread:
        pool.session().run("x = 1")
        run = thread.submit(pool.session().run, LOOP)
        started = set(processes()) - before
        assert len(started) >= 2
        pool.close()
        assert run.result().error
    assert all(gone(process.pid) for process in started)
    assert set(processes()) - before == set()
    with pytest.raises(TrimtabError, match="closed"):
        pool.session().run("1")


def test_ending_a_session_frees_its_container(bubblewrap: None) -> None:  # noqa: ARG001
    before = set(processes())
    with PythonPool("bubblewrap", workers=1, timeout=20.0) as pool:
        for _ in range(20):
            with pool.session() as session:
                assert "NameError" in (session.run("x").error or "")
                assert session.run("x = 1") == CodeResult("")
        containers = []
        for process in set(processes()) - before:
            with suppress(psutil.NoSuchProcess):  # the last container may just be ending
                containers += [process] if process.name() == "bwrap" else []
        assert len(containers) <= 2 * 2  # one that was used, one kept ready; each is two processes outside


# A timer of the kernel that sends SIGCONT, with which a stopped process would go on.
TIMER = """
import ctypes, signal
signal.signal(signal.SIGCONT, lambda number, frame: None)
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
event = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0)
if libc.timer_create(1, event, ctypes.byref(timer)) == 0:
    libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 1000000, 0, 1000000), None)
"""


@pytest.mark.parametrize("before", ["", TIMER], ids=["", "timer"])
def test_threads_left_behind_stand_still_between_two_runs(bubblewrap: None, before: str) -> None:  # noqa: ARG001
    ticking = """
        import threading, time
        ticks = [time.monotonic()]
        def tick():
            while True:
                ticks.append(time.monotonic())
                time.sleep(0.01)
        threading.Thread(target=tick, daemon=True).start()
    """
    with PythonPool("bubblewrap", workers=1, timeout=20.0) as pool, pool.session() as session, pool.session() as other:
        assert session.run(before + textwrap.dedent(ticking)) == CodeResult("")
        assert other.run("import time\ntime.sleep(1)") == CodeResult("")
        result = session.run("max(b - a for a, b in zip(ticks, [*ticks[1:], time.monotonic()]))")
    assert float(result.output) > 0.9


@pytest.mark.parametrize("code", [LOOP, "1 + 1", "import time\nwhile True: time.sleep(1)"])
def test_nothing_is_left_when_the_parent_is_killed(sandbox: SandboxName, code: str) -> None:
    program = """
        import sys, threading, time
        from trimtab.trainer.sandbox.python_pool import PythonPool
        pool = PythonPool(sys.argv[1], workers=2, timeout=3600)
        session = pool.session()
        session.run("1")
        threading.Thread(target=session.run, args=(sys.argv[2],)).start()
        print("running", flush=True)
        time.sleep(3600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), sandbox, code], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "running\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) >= 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert all(gone(process.pid) for process in children)


def test_a_forked_copy_of_this_process_neither_uses_nor_ends_the_pool(pool: PythonPool) -> None:
    with pool.session() as session:
        assert session.run("x = 7") == CodeResult("")
        pid = os.fork()
        if pid == 0:
            refused = False
            try:
                session.run("x = 8")
            except TrimtabError as error:
                refused = "make another one after a fork" in str(error)
            session.close()
            pool.close()
            os._exit(refused)
        _, status = os.waitpid(pid, 0)
        assert pool._end.alive
        assert session.run("x") == CodeResult("7\n")
        assert os.waitstatus_to_exitcode(status) == 1


def test_a_thread_that_ends_does_not_take_a_container_along(bubblewrap: None) -> None:  # noqa: ARG001
    with PythonPool("bubblewrap", workers=1, timeout=20.0) as pool:
        session = pool.session()
        thread = threading.Thread(target=session.run, args=("x = 7",))
        thread.start()
        thread.join()
        assert session.run("x") == CodeResult("7\n")


def test_named_packages_can_be_imported_and_no_others(bubblewrap: None) -> None:  # noqa: ARG001
    with PythonPool("bubblewrap", workers=1, packages=["sympy", "numpy"], timeout=60.0) as pool:
        run = pool.session().run
        assert run("import sympy\nx = sympy.symbols('x')\nsympy.integrate(2 * x, x)") == CodeResult("x**2\n")
        assert run("import numpy as np\nint(np.arange(10).sum())") == CodeResult("45\n")
        assert "No module named 'tqdm'" in (run("import tqdm").error or "")
        assert "Read-only file system" in (run("open('/packages/sympy/new', 'w')").error or "")
    with pytest.raises(TrimtabError, match="pip install no-such-package"):
        PythonPool("bubblewrap", packages=["no-such-package"])


def test_what_cannot_run_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "pydantic_monty", None)
        assert (sandbox_unavailable("monty") or "").endswith("pip install pydantic-monty")
    with pytest.raises(TrimtabError, match='use sandbox = "bubblewrap"'):
        PythonPool("monty", packages=["numpy"])
    with pytest.raises(TrimtabError, match="did you mean 'monty'"):
        PythonPool("mont")  # type: ignore[arg-type]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (sandbox_unavailable("bubblewrap") or "").endswith("apt install bubblewrap")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.6.1\n")
    (tmp_path / "bwrap").chmod(0o755)
    assert "0.6.1 is older than 0.8" in (sandbox_unavailable("bubblewrap") or "")


def test_disabled_namespaces_are_found_by_running_it(bubblewrap: None) -> None:  # noqa: ARG001
    code = "from trimtab.trainer.sandbox.python_pool import sandbox_unavailable as f; print(f('bubblewrap'))"
    inside = ["bwrap", "--dev-bind", "/", "/", "--unshare-user", "--disable-userns", sys.executable, "-c", code]
    message = subprocess.run(inside, capture_output=True, text=True, check=True).stdout
    root = os.geteuid() == 0
    assert ("this process is root in a container" if root else "user namespaces are disabled: sysctl") in message
    assert message.count("\n") == 1
