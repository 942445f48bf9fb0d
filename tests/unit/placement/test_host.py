"""Signs of life of an engine in an actor, without the cluster."""

from __future__ import annotations

import threading
from typing import Any

from tests.unit.rollout.support import prompts

from trimtab.placement.host import EngineHost
from trimtab.rollout import wire
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
