"""Slots: each item for one thread at a time, given back whatever ends its use, and no wait without end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.sandbox.slots import Slots


def test_an_item_is_given_back_whatever_ends_its_use() -> None:
    slots = Slots(["only"], longest=30.0)

    def fail(error: BaseException) -> None:
        raise error

    for error in (ValueError(), KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)):
            slots.use(lambda _, error=error: fail(error))
    assert slots.use(str.upper) == "ONLY"


def test_no_item_is_used_twice_at_once() -> None:
    slots, together, using = Slots(range(3), longest=30.0), threading.Barrier(3), set[int]()

    def action(item: int) -> int:
        assert item not in using
        using.add(item)
        together.wait(30)
        using.remove(item)
        return item

    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(slots.use, [action] * 3)) == {0, 1, 2}


def test_waiting_ends_where_no_use_does() -> None:
    slots, taken, release = Slots([0], longest=0.01), threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(slots.use, lambda _: taken.set() or release.wait(60))
        assert taken.wait(60)
        with pytest.raises(
            TrimtabError, match=r"no process of the sandbox has become free for 0\.02 s: make a new pool"
        ):
            slots.use(str)
        release.set()
