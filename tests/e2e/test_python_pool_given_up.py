"""Runs whose caller gives up: no later run gets their answer, and their session says what became of its variables."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from trimtab.trainer.processes import WorkerProcess
from trimtab.trainer.sandbox.code_result import LOST, CodeResult
from trimtab.trainer.sandbox.container import Container
from trimtab.trainer.sandbox.python_pool import PythonPool, SandboxName, sandbox_unavailable

pytestmark = pytest.mark.e2e

GIVEN_UP = CodeResult("", "not run: the run before was given up, and the variables of this session are lost")
CLOSED = CodeResult("", "not run: the session is closed")
LOST_WORKER = "not run: the process of this sandbox was replaced, and the variables of this session are lost"
KILLED = "the process of this sandbox was killed (by hand, or for lack of memory)"


@pytest.fixture(scope="module", params=["monty", "bubblewrap"])
def sandbox(request: pytest.FixtureRequest) -> SandboxName:
    if missing := sandbox_unavailable(request.param):
        pytest.skip(missing)
    return request.param


@pytest.fixture(params=[True, False], ids=["with variables", "without"])
def pool(request: pytest.FixtureRequest, sandbox: SandboxName) -> Iterator[PythonPool]:
    with PythonPool(sandbox, workers=1, timeout=20.0, stateful=request.param) as pool:
        yield pool


def once_sent(monkeypatch: pytest.MonkeyPatch, sandbox: SandboxName, action: Callable[[], None]) -> None:
    """Calls `action` when the next code has been sent, before its answer is read."""
    kind, method = (WorkerProcess, "receive") if sandbox == "monty" else (Container, "_receive")
    original, pending = getattr(kind, method), [action]

    def receive(self: Any, *arguments: Any) -> Any:
        if pending:
            pending.pop()()
        return original(self, *arguments)

    monkeypatch.setattr(kind, method, receive)


class GaveUp(BaseException):
    """As KeyboardInterrupt, which ends a test."""


def give_up() -> None:
    raise GaveUp


def test_an_answer_that_nobody_took_is_not_that_of_the_next_run(
    pool: PythonPool, sandbox: SandboxName, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with pool.session() as session, pool.session() as other:
        assert [session.run("x = 1"), other.run("x = 2")] == [CodeResult("")] * 2
        once_sent(monkeypatch, sandbox, give_up)
        with pytest.raises(GaveUp):
            session.run("x = 3; 'first'")
        if "with variables" in request.node.name:
            assert session.run("x") == GIVEN_UP
            # In Monty it shared a worker, in bubblewrap it has a container of its own.
            assert other.run("x") in (CodeResult("2\n"), CodeResult("", LOST_WORKER))
        assert "NameError" in (session.run("x").error or "")
        assert session.run("'second'") == CodeResult("'second'\n")
        assert other.run("'third'") == CodeResult("'third'\n")


@pytest.mark.parametrize("stateful", [True, False], ids=["with variables", "without"])
def test_a_pool_goes_on_after_callers_gave_up_at_any_moment(sandbox: SandboxName, stateful: bool) -> None:
    """Six threads, each with an exception between two steps of Python, as Ctrl-C and a time limit of a caller come."""
    draw = random.Random(7)
    wrong: list[CodeResult] = []

    def call(number: int) -> None:
        with contextlib.suppress(GaveUp), pool.session() as session:
            for factor in range(8):
                if (result := session.run(f"{number} * {factor}")) != CodeResult(f"{number * factor}\n"):
                    wrong.append(result)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with PythonPool(sandbox, workers=2, timeout=20.0, stateful=stateful) as pool:
            for wave in range(10 if sandbox == "monty" else 12):
                threads = [threading.Thread(target=call, args=(10 * wave + i,), daemon=True) for i in range(6)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(draw.random() * (0.004 if sandbox == "monty" else 0.15))
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(GaveUp)
                    )
                deadline = time.monotonic() + 60
                for thread in threads:
                    thread.join(max(0.0, deadline - time.monotonic()))
                assert not any(thread.is_alive() for thread in threads), f"a run waits for ever in wave {wave}"
            sys.setswitchinterval(interval)
            answers: list[CodeResult] = []
            threads = [
                threading.Thread(target=lambda: answers.append(pool.session().run("7")), daemon=True) for _ in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60.0)
            assert answers == [CodeResult("7\n")] * 6, "a run waits for ever"
    finally:
        sys.setswitchinterval(interval)
    # A run of another session may be lost with a shared process, and then says so; none has a wrong output.
    assert [result for result in wrong if result.output] == []
    assert {result.error for result in wrong} <= {LOST_WORKER, GIVEN_UP.error, KILLED, f"{KILLED}; {LOST}"}


def test_a_session_that_was_given_up_after_its_answer_has_lost_its_variables_too(
    sandbox: SandboxName, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PythonPool(sandbox, workers=1, timeout=20.0, stateful=True) as pool, pool.session() as session:
        with monkeypatch.context() as patch:
            patch.setattr("trimtab.trainer.sandbox.python_pool.clean", lambda _: give_up())
            with pytest.raises(GaveUp):
                session.run("x = 3")
        assert session.run("x") == GIVEN_UP
        assert "NameError" in (session.run("x").error or "")


def test_a_session_closed_during_its_run_leaves_nothing_for_others(
    sandbox: SandboxName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an episode is whose tool took longer than `environment.timeout`."""
    before = set(psutil.Process().children(recursive=True))
    with PythonPool(sandbox, workers=1, timeout=2.0, stateful=True) as pool:
        sent = threading.Event()
        once_sent(monkeypatch, sandbox, sent.set)
        session = pool.session()
        with ThreadPoolExecutor(1) as thread:
            run = thread.submit(session.run, "while True: pass")
            assert sent.wait(60)
            session.close()
            with pool.session() as other:
                assert [other.run("x = 7"), other.run("x")] == [CodeResult(""), CodeResult("7\n")]
            assert run.result().timed_out
        with pool.session() as other:
            assert [other.run("x = 7"), other.run("x")] == [CodeResult(""), CodeResult("7\n")]
    assert {process for process in psutil.Process().children(recursive=True) if process not in before} == set()


def test_a_closed_session_runs_nothing(pool: PythonPool) -> None:
    """Its process would be held to the end of the pool."""
    session = pool.session()
    assert session.run("x = 1") == CodeResult("")
    session.close()
    assert session.run("x") == CLOSED
    session.close()
