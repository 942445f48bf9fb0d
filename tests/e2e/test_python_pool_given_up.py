"""Runs whose caller gives up: no later run gets their answer, and their session begins anew."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from trimtab.trainer import processes
from trimtab.trainer.processes import WorkerProcess
from trimtab.trainer.sandbox.bubblewrap import Container
from trimtab.trainer.sandbox.code_result import MAX_CODE, CodeResult
from trimtab.trainer.sandbox.python_pool import PythonPool, SandboxName

pytestmark = pytest.mark.slow

CLOSED = CodeResult("", "not run: the session is closed", sandbox_failed=True)
LOST_WORKER = "not run: the process of this sandbox was replaced, and the variables of this session are lost"


@pytest.fixture
def pool(sandbox: SandboxName) -> Iterator[PythonPool]:
    with PythonPool(sandbox, workers=1, timeout=20.0) as pool:
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
    pool: PythonPool, sandbox: SandboxName, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool.session() as session, pool.session() as other:
        assert [session.run("x = 1"), other.run("x = 2")] == [CodeResult("")] * 2
        once_sent(monkeypatch, sandbox, give_up)
        with pytest.raises(GaveUp):
            session.run("x = 3; 'first'")
        # In Monty it shared a worker, in bubblewrap it has a container of its own.
        assert other.run("x") in (CodeResult("2\n"), CodeResult("", LOST_WORKER, sandbox_failed=True))
        assert "NameError" in (session.run("x").error or "")
        assert session.run("'second'") == CodeResult("'second'\n")
        assert other.run("'third'") == CodeResult("'third'\n")


def test_a_session_that_was_given_up_after_its_answer_has_lost_its_variables_too(
    pool: PythonPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool.session() as session:
        with monkeypatch.context() as patch:
            patch.setattr("trimtab.trainer.sandbox.python_pool.clean", lambda _: give_up())
            with pytest.raises(GaveUp):
                session.run("x = 3")
        assert "NameError" in (session.run("x").error or "")


def test_a_session_closed_during_its_run_leaves_nothing_for_others(
    sandbox: SandboxName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an episode is whose tool took longer than `environment.timeout`."""
    before = set(psutil.Process().children(recursive=True))
    with PythonPool(sandbox, workers=1, timeout=2.0) as pool:
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


def test_a_worker_that_takes_no_more_code_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())
    monkeypatch.setattr(processes, "TRANSFER_TIMEOUT", 1)
    with PythonPool("monty", workers=1, timeout=20.0) as pool, pool.session() as session:
        [worker] = set(psutil.Process().children()) - before
        worker.suspend()
        result = session.run(f"'{'𝄞' * (MAX_CODE - 2)}'")
        assert result.error == "the process of this sandbox moved no byte for 1 s"
        assert result.lost
        assert session.run("1 + 1") == CodeResult("2\n")


def test_a_worker_that_cannot_be_replaced_is_an_error_until_it_can() -> None:
    before = set(psutil.Process().children())
    with PythonPool("monty", workers=1, timeout=20.0) as pool, pool.session() as session:
        [worker] = set(psutil.Process().children()) - before
        worker.kill()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            result = session.run("1 + 1")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "Too many open files" in (result.error or "")
        assert session.run("1 + 1") == CodeResult("2\n")


def test_a_closed_session_runs_nothing(pool: PythonPool) -> None:
    """Its process would be held to the end of the pool."""
    session = pool.session()
    assert session.run("x = 1") == CodeResult("")
    session.close()
    assert session.run("x") == CLOSED
    session.close()
