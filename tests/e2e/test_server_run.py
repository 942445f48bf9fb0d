"""A whole run over inference servers, one of which is killed in the middle of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.server_process import ServerProcess, starter

from trimtab.runs import trajectories
from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train
from trimtab.trainer.sft import laboratory_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, PROMPTS, SAMPLES = 3, 4, 4
SMALL = (
    f"trainer.steps={STEPS}",
    f"trainer.prompts={PROMPTS}",
    f"trainer.samples={SAMPLES}",
    "eval.problems=4",
    "log.trajectories_every=1",
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    home = tmp_path_factory.mktemp("servers")
    with starter() as start:
        running = [ServerProcess(start, "vllm", laboratory_folder(), home / str(index)) for index in range(2)]
        yield running
        for one in running:
            one.kill()


def recipe(servers: list[ServerProcess], *overrides: str) -> Config:
    urls = ", ".join(f'"{one.url}"' for one in servers)
    engine = ("engine.type=server", f"engine.server.urls=[{urls}]", "engine.server.reconnect_timeout=30.0")
    return load_config("laboratory", (*SMALL, *engine, *overrides))


class Killer(threading.Thread):
    """Kills a server that has begun to answer a batch, and starts it again, at once or when it is joined."""

    def __init__(self, victim: ServerProcess, *, returns: bool) -> None:
        super().__init__(daemon=True)
        self._victim, self._returns = victim, returns

    def start(self) -> None:
        self._victim.configure(after=2)
        super().start()

    def run(self) -> None:
        self._victim.wait_for_held()
        self._victim.kill()
        if self._returns:
            self._victim.start()

    def join(self, timeout: float | None = 60.0) -> None:
        super().join(timeout)
        assert not self.is_alive()
        if not self._victim.alive:
            self._victim.start()
        self._victim.reset()


class After(NullObserver):
    """Does something once, after the first step."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def step(self, metrics: Mapping[str, float | str]) -> None:
        if metrics["step"] == 1:
            self._act()


def rows(run: Path) -> list[tuple[Any, ...]]:
    """Every trajectory of a run, in order."""
    files = sorted((run / "trajectories").iterdir())
    assert len(files) == STEPS
    return [
        (t.group, t.completion.response_ids.tolist(), t.completion.logp_behavior.tolist(), t.reward)
        for file in files
        for t in trajectories.from_bytes(file.read_bytes())
    ]


@pytest.fixture(scope="module")
def undisturbed(servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(recipe(servers), out=tmp_path_factory.mktemp("runs") / "undisturbed").run


@pytest.mark.parametrize("returns", [False, True], ids=["the other takes over", "it returns in time"])
def test_a_server_killed_in_the_middle_of_a_batch_changes_nothing(
    servers: list[ServerProcess], undisturbed: Path, tmp_path: Path, returns: bool
) -> None:
    """Every response has a seed of its own, so the killed run must be the undisturbed one, token for token."""
    first, second = servers
    killer = Killer(second, returns=returns)
    result = train(recipe([first, second]), out=tmp_path / "run", observer=After(killer.start))
    killer.join()
    assert rows(result.run) == rows(undisturbed)


def test_episodes_go_on_at_the_other_server(servers: list[ServerProcess], tmp_path: Path) -> None:
    """The turn that is lost is requested from the other server, with the seed of its length; no tool is run again."""
    first, second = servers
    environment = ("environment.name=tests.support.turns:Counting", "environment.format=tests.support.turns:AfterThree")
    config = recipe([first, second], *environment, "sampling.max_tokens=32", "environment.max_turns=4")
    undisturbed = train(config, out=tmp_path / "undisturbed").run
    killer = Killer(second, returns=False)
    killed = train(config, out=tmp_path / "killed", observer=After(killer.start)).run
    killer.join()
    assert repr(rows(killed)) == repr(rows(undisturbed))  # nan is not equal to itself
    for run in (undisturbed, killed):
        metrics = read_metrics(run / "metrics.jsonl")
        assert sum(row["episode/calls"] for row in metrics) > 0
        assert {row["episode/failed"] for row in metrics} == {0}
        assert all(abs(row["mismatch/k3"]) < 1e-6 for row in metrics)
