"""A trainer whose process is stopped in the middle of a call, and goes on later: `started` and `stand_still` for tests.

`stopped_trainer.py SETTINGS` is that process. It prints a line when a call has begun (the engine's process), and one
when it is over (that process, and a digest of what was sampled).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from tests.programs.worker_parent import Announced
from tests.support.engines import prompt

from trimtab.trainer.config import load_config
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine
from trimtab.trainer.models import laboratory
from trimtab.types import AbortSignal, SamplingParams


@contextmanager
def started(
    model: Path, calls: list[bool], patience: float, address: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The process, which makes one call undisturbed, and then `calls` with patience, those with an interrupt or not.

    Its engine is a worker process, or an actor of the Ray cluster at `address`.
    """
    settings = json.dumps({"model": str(model), "calls": calls, "patience": patience, "address": address})
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, __file__, settings], {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        try:
            yield trainer
            assert trainer.wait() == 0
        finally:
            trainer.kill()


def stand_still(trainer: int, others: list[int], seconds: float) -> None:
    """Stop the trainer while it waits for an answer, and `others` before it; all go on after some seconds."""
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    while (status := psutil.Process(trainer).status()) != psutil.STATUS_SLEEPING:
        assert status != psutil.STATUS_ZOMBIE, "its last call was over before it was stopped"
    os.kill(trainer, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in (trainer, *others):
        os.kill(pid, signal.SIGCONT)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model = Path(settings["model"])
    with actor(model, settings["address"]) if settings["address"] else worker(model) as engine:
        engine.update_weights(laboratory.build(1)[0].named_parameters(), version=5)
        call(engine, None)
        engine.hang_timeout = settings["patience"]
        for interruptible in settings["calls"]:
            begun = Announced(str(engine.transport.pid))
            if not interruptible:
                begun.is_set()
            call(engine, begun if interruptible else None)


@contextmanager
def worker(model: Path) -> Iterator[Any]:
    recipe = load_config("laboratory", ["engine.dtype=float32"])
    engine = RemoteEngine(ProcessTransport(recipe, model, threads=1))
    yield engine
    engine.close()


@contextmanager
def actor(model: Path, address: str) -> Iterator[Any]:
    from trimtab.trainer.cluster.actors import connect, reserve_slots
    from trimtab.trainer.cluster.ray_transport import build_engines

    config = load_config("laboratory", ["engine.dtype=float32", "placement=ray", f"ray.address={address}"])
    with connect(config.ray), reserve_slots(config) as seats:
        [engine] = build_engines(config, model, seats.engines)
        yield engine
        engine.close()


def call(engine: Any, interrupt: AbortSignal | None) -> None:
    long = SamplingParams(max_tokens=40, ignore_stop=True)
    completions = engine.generate([prompt([1, 2, 3])] * 16, 16, long, seed=0, abort=interrupt)
    rows = [(one.response_ids.tolist(), one.logp_behavior.tolist()) for one in chain(*completions)]
    # More than a pipe holds would keep it waiting here, where it must not be stopped, and be cut short by the signal.
    print(engine.transport.pid, hashlib.sha256(json.dumps(rows).encode()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
