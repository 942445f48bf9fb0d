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

from trimtab import rewards
from trimtab.cluster.actors import enter
from trimtab.cluster.placement_group import ActorSlots
from trimtab.cluster.ray_transport import build_engines
from trimtab.cluster.reward_actors import RayScorer
from trimtab.config import Config, parse_config
from trimtab.engines.factory import engine_spec
from trimtab.errors import DivergedError, Stopped, TrimtabError
from trimtab.models.load import LoadedModel
from trimtab.rewards import Scorer
from trimtab.training.backends import LOCAL_BACKENDS, Backends
from trimtab.training.observer import Moment, NullObserver, Observer
from trimtab.training.run import train
from trimtab.training.stop import Stop
from trimtab.types import Engine, RewardSpec, Task


class Relay:
    """The observer of the run.

    Of the phases only the newest is kept: they are the hand of a clock, everything else is a record.
    """

    def __init__(self) -> None:
        self._news: list[list[Any]] = []
        self._changed = threading.Condition()

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:  # noqa: ARG002
        self._tell("started", equation, total_steps, str(run))

    def phase(self, name: str, done: int, total: int) -> None:
        self._tell("phase", name, done, total)

    def step(self, metrics: Mapping[str, float | str]) -> None:
        self._tell("step", dict(metrics))

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        self._tell("evaluated", task, moment, value)

    def message(self, text: str) -> None:
        self._tell("message", text)

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        """The run itself does not finish a display; the process that writes the report does."""

    def take(self, patience: float) -> str:
        """Everything that happened since the last call, as JSON for `replay`; waits `patience` seconds for any."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._news), patience)
            news, self._news = self._news, []
        return json.dumps(news, default=lambda number: number.item())  # numpy's scalars

    def _tell(self, *event: Any) -> None:
        with self._changed:
            if event[0] == "phase" and self._news and self._news[-1][0] == "phase":
                self._news.pop()
            self._news.append(list(event))
            self._changed.notify_all()


def replay(news: str, observer: Observer, config: Config) -> bool:
    """Tell `observer` what a relay took, in its order; returns whether the run started among it."""
    events = json.loads(news)
    for name, *arguments in events:
        if name == "started":
            equation, total, run = arguments
            observer.started(config, equation, total, Path(run))
        else:
            getattr(observer, name)(*arguments)
    return any(name == "started" for name, *_ in events)


DIVERGED, MISTAKE = "diverged", "mistake"


class TrainerRank:
    """The actor. Rank 0 also holds the data side of the run: engines, rewards, the run directory."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._relay = Relay()
        self._stop = Stop()

    def address(self) -> tuple[str, int]:
        """Where the ranks meet if they meet here: this node, and a port that was free a moment ago."""
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
        meeting: tuple[str, int],
        seats: ActorSlots,
        command: str,
    ) -> str:
        """Train to the end. The answer is JSON: `metrics` of the last step, or
        `error`, which kind of one, and its `line`; of a run that was stopped, `stopped` and the signal's number.

        `command` is what the user started it with.
        """
        try:
            enter(folder)
            self._join(meeting)
            torch.set_num_threads(seats.trainers[self._rank].threads)
            result = train(
                parse_config(tomllib.loads(recipe), "recipe"),
                out=Path(out),
                resume=resume,
                observer=self._relay if self._rank == 0 else NullObserver(),
                makers=_makers(folder, seats) if self._rank == 0 else LOCAL_BACKENDS,
                stop=self._stop,
                command=command,
            )
        except TrimtabError as error:
            return json.dumps({"error": DIVERGED if isinstance(error, DivergedError) else MISTAKE, "line": str(error)})
        except Stopped as stop:
            return json.dumps({"stopped": stop.signal})
        return json.dumps({"metrics": result.metrics}, default=lambda number: number.item())

    def news(self, patience: float) -> str:
        """What the run has to tell since the last call (see events.py)."""
        return self._relay.take(patience)

    def stop(self, number: int) -> None:
        """End the run after the step in progress, as signal `number` would."""
        self._stop.ask(number)

    def _join(self, meeting: tuple[str, int]) -> None:
        """The environment torchrun gives its children. Ray shows an actor its own device only: local rank 0."""
        host, port = meeting
        os.environ |= {
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }


def _makers(folder: str, seats: ActorSlots) -> Backends:
    """Engines and rewards of the cluster, where they have seats there."""

    def engines(config: Config, loaded: LoadedModel, files: Path) -> Sequence[Engine]:  # noqa: ARG001
        return build_engines(config, engine_spec(config, files), seats.engines)

    def scorer(config: Config, specs: Sequence[RewardSpec], task: Task) -> Scorer:
        return RayScorer(rewards.weighted(specs, task), config, folder, seats.rewards)

    return Backends(engines if seats.engines else None, scorer if seats.rewards else None)
