"""One trainer rank as a Ray actor, with the environment that torchrun would set."""

from __future__ import annotations

import json
import os
import socket
import threading
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import DivergedError, Stopped, TrimtabError
from trimtab.trainer import rewards
from trimtab.trainer.cluster.actors import use_working_directory
from trimtab.trainer.cluster.placement_group import ActorSlots
from trimtab.trainer.cluster.ray_transport import build_engines
from trimtab.trainer.cluster.reward_actors import RayScorer
from trimtab.trainer.config import Config, parse_config
from trimtab.trainer.engines.factory import engine_spec
from trimtab.trainer.models.load import LoadedModel
from trimtab.trainer.observer import Moment, NullObserver, Observer
from trimtab.trainer.rewards import Scorer
from trimtab.trainer.run import LOCAL_BACKENDS, Backends, train
from trimtab.trainer.stop import Stop
from trimtab.types import Engine, RewardSpec, Task


class EventBuffer:
    """An observer that keeps events until the driver polls them. Of consecutive phases only the newest is kept."""

    def __init__(self) -> None:
        self._pending: list[list[Any]] = []
        self._changed = threading.Condition()

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:  # noqa: ARG002
        self._append("started", equation, total_steps, str(run))

    def phase(self, name: str, done: int, total: int) -> None:
        self._append("phase", name, done, total)

    def step(self, metrics: Mapping[str, float | str]) -> None:
        self._append("step", dict(metrics))

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        self._append("evaluated", task, moment, value)

    def message(self, text: str) -> None:
        self._append("message", text)

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        """Called in the process that writes the report, and not here."""

    def poll(self, timeout: float) -> str:
        """Returns all events since the last call as JSON for `replay_events`; waits `timeout` seconds for the first."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pending), timeout)
            events, self._pending = self._pending, []
        return json.dumps(events, default=lambda number: number.item())  # numpy's scalars

    def _append(self, *event: Any) -> None:
        with self._changed:
            if event[0] == "phase" and self._pending and self._pending[-1][0] == "phase":
                self._pending.pop()
            self._pending.append(list(event))
            self._changed.notify_all()


def replay_events(events: str, observer: Observer, config: Config) -> bool:
    """Calls `observer` with polled events, in order; returns whether the start of the run was among them."""
    parsed = json.loads(events)
    for name, *arguments in parsed:
        if name == "started":
            equation, total, run = arguments
            observer.started(config, equation, total, Path(run))
        else:
            getattr(observer, name)(*arguments)
    return any(name == "started" for name, *_ in parsed)


DIVERGED = "diverged"
USER_ERROR = "user_error"


class TrainerRank:
    """The actor. Rank 0 also holds the data side of the run: engines, rewards, the run directory."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._events = EventBuffer()
        self._stop = Stop()

    def address(self) -> tuple[str, int]:
        """Returns a rendezvous address for the ranks: this node, and a port that was free just now."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def train(
        self,
        recipe: str,
        folder: str,
        out: str,
        resume: bool,
        rendezvous: tuple[str, int],
        slots: ActorSlots,
        command: str,
    ) -> str:
        """Trains to the end and returns JSON: `metrics` of the last step, or the kind of an `error` and its `line`, or
        for a run that was stopped the signal number `stopped`.

        `command` is the command line of the driver.
        """
        try:
            use_working_directory(folder)
            self._set_rank_environment(rendezvous)
            torch.set_num_threads(slots.trainers[self._rank].threads)
            result = train(
                parse_config(tomllib.loads(recipe), "recipe"),
                out=Path(out),
                resume=resume,
                observer=self._events if self._rank == 0 else NullObserver(),
                backends=_cluster_backends(folder, slots) if self._rank == 0 else LOCAL_BACKENDS,
                stop=self._stop,
                command=command,
            )
        except TrimtabError as error:
            return json.dumps(
                {"error": DIVERGED if isinstance(error, DivergedError) else USER_ERROR, "line": str(error)}
            )
        except Stopped as stop:
            return json.dumps({"stopped": stop.signal})
        return json.dumps({"metrics": result.metrics}, default=lambda number: number.item())

    def poll_events(self, timeout: float) -> str:
        """Returns the events since the last call (see `EventBuffer.poll`)."""
        return self._events.poll(timeout)

    def stop(self, number: int) -> None:
        """Ends the run after the step in progress, like signal `number`."""
        self._stop.request(number)

    def _set_rank_environment(self, rendezvous: tuple[str, int]) -> None:
        """Sets the variables that torchrun would set. Ray shows an actor only its own device: local rank 0."""
        host, port = rendezvous
        os.environ |= {
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }


def _cluster_backends(folder: str, slots: ActorSlots) -> Backends:
    """Returns factories of engines and rewards as actors, where there are slots for them."""

    def engines(config: Config, loaded: LoadedModel, files: Path) -> Sequence[Engine]:  # noqa: ARG001
        return build_engines(config, engine_spec(config, files), slots.engines)

    def scorer(config: Config, specs: Sequence[RewardSpec], task: Task) -> Scorer:
        return RayScorer(rewards.weighted(specs, task), config, folder, slots.rewards)

    return Backends(engines if slots.engines else None, scorer if slots.rewards else None)
