"""One trainer rank as a Ray actor, with the environment that torchrun would set."""

from __future__ import annotations

import json
import os
import socket
import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch

from trimtab import rewards
from trimtab.cluster.actors import enter
from trimtab.cluster.events import Relay
from trimtab.cluster.placement_group import Seats
from trimtab.cluster.ray_engine import build_engines
from trimtab.cluster.reward_actors import RayScorer
from trimtab.config import Config, check_config
from trimtab.engines.factory import engine_spec
from trimtab.errors import Diverged, Stopped, TrimtabError
from trimtab.models.load import Loaded
from trimtab.rewards import Scorer
from trimtab.training.makers import LOCAL, Makers
from trimtab.training.observer import Silent
from trimtab.training.run import train
from trimtab.training.stop import Stop
from trimtab.types import Engine, RewardSpec, Task

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
        self, recipe: str, folder: str, out: str, resume: bool, meeting: tuple[str, int], seats: Seats, command: str
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
                check_config(tomllib.loads(recipe), "recipe"),
                out=Path(out),
                resume=resume,
                observer=self._relay if self._rank == 0 else Silent(),
                makers=_makers(folder, seats) if self._rank == 0 else LOCAL,
                stop=self._stop,
                command=command,
            )
        except TrimtabError as error:
            return json.dumps({"error": DIVERGED if isinstance(error, Diverged) else MISTAKE, "line": str(error)})
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


def _makers(folder: str, seats: Seats) -> Makers:
    """Engines and rewards of the cluster, where they have seats there."""

    def engines(config: Config, loaded: Loaded, files: Path) -> Sequence[Engine]:  # noqa: ARG001
        return build_engines(config, engine_spec(config, files), seats.engines)

    def scorer(config: Config, specs: Sequence[RewardSpec], task: Task) -> Scorer:
        return RayScorer(rewards.weighted(specs, task), config, folder, seats.rewards)

    return Makers(engines if seats.engines else None, scorer if seats.rewards else None)
