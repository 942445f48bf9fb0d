"""Functions that hang, raise, eat memory or leave fail their own call, and the next call works again."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from tests.support.processes import gone

from trimtab.trainer.sandbox.function_pool import FunctionCall, FunctionPool, Outcome

pytestmark = pytest.mark.e2e

MEMORY = 256 << 20


def naughty(word):
    if word == "hang":
        while True:
            pass
    if word == "sleep":
        time.sleep(1000)
    if word == "raise":
        raise KeyError("no such thing")
    if word == "exit":
        sys.exit(3)
    if word == "leave":
        os._exit(7)
    if word == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hog":
        return len(bytearray(MEMORY * 2))
    if word == "slow hog":
        kept = []
        while True:
            kept.append(bytearray(1 << 20))
    return {"nan": float("nan"), "inf": np.inf, "none": None, "text": "1.0", "numpy": np.float32(0.25), "true": True}[
        word
    ]


@pytest.fixture(scope="module")
def pool():
    isolated = FunctionPool([naughty, lambda x: x + 1], workers=2, memory=MEMORY)
    yield isolated
    isolated.close()


def outcome(pool, word, timeout=60.0):
    return pool.run([FunctionCall(0, {"word": word}, timeout)])[0]


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("raise", "raised KeyError: 'no such thing'"),
        ("exit", "raised SystemExit: 3"),
        ("leave", "ended its process (exit code 7)"),
        ("crash", "ended its process (signal SIGKILL)"),
        ("hog", "ran out of the memory it may use"),
        ("slow hog", "ran out of the memory it may use"),
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("none", "returned NoneType, not a number"),
        ("text", "returned str, not a number"),
    ],
)
def test_failures_are_named_and_the_next_call_works(pool, word, error):
    assert outcome(pool, word) == Outcome(error=error)
    assert outcome(pool, "numpy") == Outcome(0.25)


@pytest.mark.parametrize("word", ["hang", "sleep"])
def test_a_hang_costs_its_timeout_and_is_named(pool, word):
    start = time.monotonic()
    assert outcome(pool, word, timeout=0.2) == Outcome(error="took longer than 0.2 s")
    assert time.monotonic() - start < 50
    assert outcome(pool, "true") == Outcome(1.0)


def test_a_batch_keeps_its_order_around_failures(pool):
    words = ["numpy", "leave", "true", "hang", "numpy", "raise", "true", "hog", "numpy"]
    calls = [FunctionCall(0, {"word": word}, 0.5 if word == "hang" else 60.0) for word in words]
    outcomes = pool.run([*calls, FunctionCall(1, {"x": 41}, 60.0)])
    assert [o.value for o in outcomes] == [0.25, None, 1.0, None, 0.25, None, 1.0, None, 0.25, 42.0]
    assert [o.error is None for o in outcomes] == [o.value is not None for o in outcomes]


def test_large_batches_do_not_deadlock(pool):
    calls = [FunctionCall(1, {"x": index}, 60.0) for index in range(500)]
    calls += [FunctionCall(0, {"word": "x" * 200_000}, 60.0)] * 20
    outcomes = pool.run(calls)
    assert [o.value for o in outcomes[:500]] == [index + 1 for index in range(500)]
    assert all((o.error or "").startswith("raised KeyError") for o in outcomes[500:])


def test_a_killed_supervisor_loses_one_batch_only():
    pool = FunctionPool([os.getppid], workers=1)
    supervisor = int(pool.run([FunctionCall(0, {}, 60.0)])[0].value or 0)
    os.kill(supervisor, signal.SIGKILL)
    assert "died" in (pool.run([FunctionCall(0, {}, 60.0)])[0].error or "")
    assert pool.run([FunctionCall(0, {}, 60.0)])[0].value not in (None, supervisor)
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("during_a_call", [False, True])
def test_children_die_with_a_killed_parent(during_a_call):
    code = """
        import os, sys, time
        from trimtab.trainer.sandbox.function_pool import FunctionCall, FunctionPool
        def slow():
            print(os.getpid(), os.getppid(), flush=True)
            time.sleep(3600 if sys.argv[1] == "True" else 0)  # far longer than `gone` waits
            return 0
        pool = FunctionPool([slow], workers=1)
        pool.run([FunctionCall(0, {}, 3600.0)])
        time.sleep(3600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(during_a_call)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker, supervisor = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    assert gone(worker)
    assert gone(supervisor)


def test_what_a_hung_function_started_is_killed_too(tmp_path):
    """The function is a closure, which cannot be pickled."""
    note = tmp_path / "pid"

    def starts_a_child():
        child = subprocess.Popen(["sleep", "3600"])
        note.write_text(str(child.pid))
        child.wait()

    pool = FunctionPool([starts_a_child], workers=1)
    assert pool.run([FunctionCall(0, {}, 3.0)])[0].error == "took longer than 3 s"
    pool.close()
    assert gone(int(note.read_text()))


def pipe_and_number():
    """The socket that the worker answers through, and the number of the request."""
    frame = sys._getframe()
    while "pipe" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["pipe"], frame.f_locals["request"].get("number")


def line(value, number):
    return json.dumps({"value": value, "error": None, "number": number}).encode() + b"\n"


def writes(what):
    pipe, number = pipe_and_number()
    pipe.sendall(
        {
            "another number": line(99.0, 1),
            "its own number": line(99.0, number),
            "its own number twice": line(99.0, number) * 2,
            "text": b"debug: 12\n",
            "no object": b"[]\n",
            "no number": b'{"value": "text"}\n',
            "bytes before the answer": b"\0\xff",
            "much": b"x" * (1 << 17),
        }[what]
    )
    return 1.0


WROTE = "wrote to the file descriptor that its worker answers through (the worker is replaced)"


@pytest.mark.parametrize(
    "what",
    ["another number", "its own number twice", "text", "no object", "no number", "bytes before the answer", "much"],
)
def test_what_a_function_writes_to_its_pipe_fails_its_call_only(what):
    pool = FunctionPool([writes, lambda x: x], workers=1)
    calls = [FunctionCall(0, {"what": what}, 60.0), *(FunctionCall(1, {"x": float(x)}, 60.0) for x in range(5))]
    first, *others = pool.run(calls)
    pool.close()
    assert first == Outcome(error=WROTE)
    assert others == [Outcome(float(x)) for x in range(5)]


def test_a_function_that_forges_its_own_answer_changes_no_other_value():
    pool = FunctionPool([writes, lambda x: x], workers=1)
    calls = [
        FunctionCall(0, {"what": "its own number"}, 60.0),
        *(FunctionCall(1, {"x": float(x)}, 60.0) for x in range(5)),
    ]
    _, second, *others = pool.run(calls)
    pool.close()
    assert second in (Outcome(0.0), Outcome(error=WROTE))  # the real answer may arrive before or after its request
    assert others == [Outcome(float(x)) for x in range(1, 5)]


def test_half_a_message_costs_its_own_timeout_only():
    def writes_half():
        pipe_and_number()[0].sendall(b"\0\0\0")
        time.sleep(3600)

    pool = FunctionPool([writes_half, lambda x: x], workers=2)
    calls = [FunctionCall(0, {}, 0.5), *(FunctionCall(1, {"x": float(x)}, 60.0) for x in range(5))]
    first, *others = pool.run(calls)
    pool.close()
    assert first == Outcome(error="took longer than 0.5 s")
    assert others == [Outcome(float(x)) for x in range(5)]


def test_a_thread_that_writes_after_the_answer_is_found_before_the_next_call(tmp_path):
    def leaves_a_thread():
        pipe, number = pipe_and_number()

        def write():
            while not (tmp_path / "go").exists():
                time.sleep(0.001)
            pipe.sendall(line(99.0, number))
            (tmp_path / "done").touch()

        threading.Thread(target=write, daemon=True).start()
        return 1.0

    pool = FunctionPool([leaves_a_thread, lambda x: x], workers=1)
    assert pool.run([FunctionCall(0, {}, 60.0)]) == [Outcome(1.0)]
    (tmp_path / "go").touch()
    while not (tmp_path / "done").exists():
        time.sleep(0.001)
    assert pool.run([FunctionCall(1, {"x": float(x)}, 60.0) for x in range(3)]) == [Outcome(float(x)) for x in range(3)]
    pool.close()


def test_a_stopped_worker_costs_its_timeout_even_if_it_reads_nothing():
    pool = FunctionPool([os.getpid], workers=1)
    worker = int(pool.run([FunctionCall(0, {}, 60.0)])[0].value or 0)
    os.kill(worker, signal.SIGSTOP)
    slow, next_one = pool.run([FunctionCall(0, {"x": "y" * (1 << 22)}, 0.5), FunctionCall(0, {}, 60.0)])
    pool.close()
    assert slow == Outcome(error="took longer than 0.5 s")
    assert next_one.value not in (None, worker)
