"""Engines as actors of a real Ray cluster, with real kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tests.programs import stopped_trainer
from tests.support.processes import gone
from tests.support.ray_support import Cluster, local_cluster

pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.trainer import tasks
from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.cluster.actors import ActorSlots, connect, reserve_slots
from trimtab.trainer.cluster.ray_transport import HEARTBEAT_INTERVAL, WeightPublisher, build_engines
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.engines.weight_transfer import share
from trimtab.trainer.models.load import load
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.types import Prompt, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLING = SamplingParams(max_tokens=12, stop=(".",))


@pytest.fixture(scope="module")
def config() -> Config:
    places = ["placement=ray", "ray.engines=2", "ray.shard_mib=1", "ray.start_timeout=60"]
    return load_config("laboratory", places)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def seats(config: Config, cluster: Cluster) -> Iterator[ActorSlots]:
    place = config.ray.model_copy(update={"address": cluster.address})
    with connect(place), reserve_slots(config.model_copy(update={"ray": place})) as seats:
        yield seats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    loaded = load("laboratory", dtype=torch.float32)
    folder = tmp_path_factory.mktemp("model") / "files"
    save_model_files(loaded.model, loaded.tokenizer, folder)
    return loaded, folder


@pytest.fixture(scope="module")
def engines(config: Config, seats: ActorSlots, model: tuple[Any, Path]) -> Iterator[list[Any]]:
    engines = build_engines(config, model[1], seats.engines)
    yield engines
    for engine in engines:
        pid = engine.transport.pid
        engine.close()
        assert gone(pid)


@pytest.fixture(scope="module")
def prompts(config: Config, model: tuple[Any, Path]) -> list[Prompt]:
    return PromptStream(tasks.build(config.task.name), model[0].tokenizer, seed=0).at(0, 4)


def test_resources_that_are_not_there_are_named(seats: ActorSlots, config: Config) -> None:  # noqa: ARG001  # connected
    large = config.model_copy(update={"ray": config.ray.model_copy(update={"trainers": 9, "start_timeout": 0.5})})
    message = r"9 trainers of 1 CPU, 0 GPU; 2 engines of 1 CPU, 0 GPU.*it has 8 CPU, 0 GPU in all"
    with pytest.raises(TrimtabError, match=message), reserve_slots(large):
        pass


def weights(model: tuple[Any, Path], scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, scale * weight.detach()) for name, weight in model[0].model.named_parameters()]


def rows(groups: Any) -> list[tuple[list[int], list[float], list[int], str]]:
    return [
        (c.response_ids.tolist(), c.logp_behavior.tolist(), c.policy_version.tolist(), c.finish_reason)
        for group in groups
        for c in group
    ]


def test_one_publication_is_stored_once_for_all_engines(seats, model) -> None:  # noqa: ARG001  # connected
    import ray

    publisher, shared = WeightPublisher(torch.bfloat16, 1 << 18), share(weights(model))
    first = publisher.put(shared, 1)
    assert len(first.references) > 2
    assert publisher.put(shared, 1) is first
    assert publisher.put(share(weights(model)), 1).references != first.references  # equal numbers, but nobody says so
    shard = ray.get(publisher.put(shared, 2).references[0])
    assert sum(array.nbytes for *_, array in shard) <= 1 << 18


def test_a_killed_actor_is_lost_and_its_successor_takes_its_seat(engines, prompts, model) -> None:
    engine, other = engines
    published = share(weights(model))
    engine.update_weights(published, 1)
    expected, done = rows(engine.generate(prompts, 2, SAMPLING, seed=9)), engine.decoded_tokens
    pid, lost = engine.transport.pid, []

    class Kill:
        """Kills the actor when it is checked, while the actor works, and interrupts nothing."""

        def is_set(self) -> bool:
            if psutil.pid_exists(pid) and not lost:
                lost.append(pid)
                os.kill(pid, signal.SIGKILL)
            return False

    with pytest.raises(EngineDeadError, match=rf"^process {pid} on .*died\) during generate$"):
        engine.generate(prompts, 256, SamplingParams(max_tokens=50, ignore_stop=True), seed=9, abort=Kill())
    with pytest.raises(EngineDeadError):
        engine.update_weights(published, 1)
    other.update_weights(published, 1)  # the neighbor does not notice
    engine.restart()
    assert engine.transport.pid not in (pid, other.transport.pid)
    with pytest.raises(TrimtabError, match="no weights yet"):
        engine.generate(prompts, 2, SAMPLING, seed=9)
    engine.update_weights(published, 1)
    assert rows(engine.generate(prompts, 2, SAMPLING, seed=9)) == expected
    assert engine.decoded_tokens > done
    again = engine.transport.pid
    engine.restart()  # alive: nothing happens
    assert engine.transport.pid == again


@pytest.mark.parametrize("doing", ["generate", "update_weights"])
def test_a_stopped_actor_is_given_up_and_its_successor_takes_its_seat(
    engines, prompts, model, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, published = engines[0], share(weights(model))
    engine.update_weights(published, 1)
    expected, pid = rows(engine.generate(prompts, 2, SAMPLING, seed=9)), engine.transport.pid
    monkeypatch.setattr(engine, "hang_timeout", 3.0)
    if doing == "update_weights":
        os.kill(pid, signal.SIGSTOP)
    long = SamplingParams(max_tokens=50, ignore_stop=True)
    # Never set; stops the process for good when it is first checked.
    stop = SimpleNamespace(is_set=lambda: os.kill(pid, signal.SIGSTOP))
    calls = {
        "generate": lambda: engine.generate(prompts, 256, long, seed=9, abort=stop),
        "update_weights": lambda: engine.update_weights(published, 2),
    }
    with pytest.raises(
        EngineDeadError, match=rf"^process {pid} on .*no sign of life for 3 s \(engine.hang_timeout\) during {doing}$"
    ):
        calls[doing]()
    monkeypatch.undo()
    engine.restart()
    assert engine.transport.pid != pid
    engine.update_weights(published, 1)
    assert rows(engine.generate(prompts, 2, SAMPLING, seed=9)) == expected


def test_a_trainer_that_stood_still_together_with_its_actor_keeps_it(cluster: Cluster, model: tuple[Any, Path]) -> None:
    """As in a frozen container, for longer than its patience, and than its longest check of an actor."""
    patience = 3 * HEARTBEAT_INTERVAL + 2
    with stopped_trainer.started(model[1], [True], patience, address=cluster.address) as trainer:
        assert trainer.stdout is not None
        expected, pid = trainer.stdout.readline(), int(trainer.stdout.readline())
        stopped_trainer.stand_still(trainer.pid, [pid], patience + 1)
        assert trainer.stdout.readline() == expected
