"""The actor around an engine, without the cluster: its signs of life, and what brings it back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.support.engines import prompts

from trimtab.cluster.ray_host import EngineHost
from trimtab.engines.remote import wire
from trimtab.errors import EngineDeadError
from trimtab.types import Sampling


class Stuck:
    """In the place of the engine: looks at the interrupt when it is told to, and otherwise stands still."""

    def __init__(self) -> None:
        self.look, self.looked, self.end = threading.Semaphore(0), threading.Semaphore(0), False

    decoded = prefilled = 0

    def generate(self, *_: Any, interrupt: Any, **__: Any) -> list[Any]:
        while not self.end:
            self.look.acquire()
            interrupt.is_set()
            self.looked.release()
        return []


def test_a_sign_is_the_life_of_the_process_but_while_it_generates_a_token() -> None:
    host, engine = EngineHost(1), Stuck()
    host._engine = engine  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    assert host.sign() != host.sign()
    names, arrays = wire.pack_prompts(prompts([5]))
    request = {"prompts": names, "samples": 1, "sampling": wire.pack_sampling(Sampling()), "seed": 0, "prefixes": None}
    call = threading.Thread(target=host.generate, args=(1, request, arrays), daemon=True)
    call.start()
    seen = host.sign()
    for _ in range(3):
        engine.look.release()
        assert engine.looked.acquire(timeout=30)
        assert host.sign() != seen
        seen = host.sign()
        assert host.sign() == seen
    engine.end = True
    engine.look.release()
    call.join(30)
    assert host.sign() != host.sign()


def test_alive_means_that_what_it_hosts_is_brought_back() -> None:
    host = EngineHost(1)
    host.alive()  # still starting: the process answers
    lost = Lost()
    host._engine = lost  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    with pytest.raises(EngineDeadError):
        host.alive()
    host.alive()
    assert lost.attempts == 2


class Lost:
    """Comes back at the second attempt."""

    attempts = 0

    def recover(self) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise EngineDeadError("not yet")
