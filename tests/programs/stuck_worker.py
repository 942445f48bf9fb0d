"""The worker process of a test, whose engine stands still, or takes its time, where the seed or the version says so."""

from __future__ import annotations

import threading
import time
from typing import Any

from trimtab.trainer.engines import factory
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.remote import engine_host

STUCK, SLOW = 13, 17
TIME = 3.0  # seconds that slow work takes


class Troubled(EmbeddedEngine):
    def generate(self, *arguments: Any, seed: int, abort: Any, **keywords: Any) -> Any:
        if seed == STUCK:
            threading.Event().wait()
        end = time.monotonic() + TIME * (seed == SLOW)
        while time.monotonic() < end:
            abort.is_set()
            time.sleep(0.1)
        return super().generate(*arguments, seed=seed, abort=abort, **keywords)

    def update_weights(self, weights: Any, version: int, **keywords: Any) -> None:
        time.sleep(TIME * (version == SLOW))
        super().update_weights(weights, version, **keywords)


if __name__ == "__main__":
    factory.EmbeddedEngine = Troubled
    engine_host.main()
