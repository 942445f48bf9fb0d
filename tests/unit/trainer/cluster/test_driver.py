"""Runs on a cluster: events for observers, resources of actors, and weights that are split and joined again."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.trainer.cluster import ray_transport
from trimtab.trainer.cluster.actors import bundles, connect
from trimtab.trainer.cluster.driver import EventBuffer, replay_events
from trimtab.trainer.cluster.ray_transport import pack_shards, unpack_shards
from trimtab.trainer.config import load_config

CONFIG = load_config("laboratory")


def test_events_arrive_in_order_with_only_the_newest_of_adjacent_phases() -> None:
    relay, watcher = EventBuffer(), Mock()
    relay.started(CONFIG, "loss = 0", 3, Path("runs/x"))
    relay.phase("collect", 0, 3)
    relay.phase("update", 1, 2)
    relay.step({"step": np.int64(1), "loss": np.float32(0.5), "mismatch/anchor": "proximal"})
    relay.phase("collect", 1, 3)
    relay.evaluated("sort", "before", 0.25)
    relay.message("said")
    replay_events(relay.poll(0.0), watcher)
    assert watcher.mock_calls == [
        call.started(CONFIG, "loss = 0", 3, Path("runs/x")),
        call.phase("update", 1, 2),
        call.step({"step": 1, "loss": 0.5, "mismatch/anchor": "proximal"}),
        call.phase("collect", 1, 3),
        call.evaluated("sort", "before", 0.25),
        call.message("said"),
    ]
    assert relay.poll(0.0) == []


def test_a_cluster_that_does_not_answer_leaves_the_logs_of_workers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")
    worker = pytest.importorskip("ray._private.worker")
    monkeypatch.setattr(worker, "_worker_logs_enabled", True)
    monkeypatch.setattr(ray, "init", Mock(side_effect=ConnectionError("it did not answer")))
    with pytest.raises(TrimtabError, match=r"no Ray cluster .*it did not answer"), connect(CONFIG.ray):
        pass
    assert worker._worker_logs_enabled


def test_an_actor_whose_engine_fails_to_close_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, kill = object.__new__(ray_transport.RayTransport), Mock()
    transport._host = Mock()
    monkeypatch.setattr(ray_transport, "get_result", Mock(side_effect=OSError("no space left")))
    monkeypatch.setattr(ray_transport, "kill_actor", kill)
    transport.close()
    kill.assert_called_once_with(transport._host)


def test_one_bundle_for_each_actor_trainers_first() -> None:
    places = ["placement=ray", "ray.engines=2", "ray.engine_gpus=1", "ray.engine_cpus=0", "ray.trainers=1"]
    config = load_config("laboratory", [*places, "ray.trainer_gpus=0.5"])
    assert bundles(config) == [{"CPU": 1, "GPU": 0.5}, {"GPU": 1}, {"GPU": 1}]


def test_servers_need_no_bundles() -> None:
    server = ["engine.type=server", 'engine.server.urls=["http://127.0.0.1:1"]']
    assert bundles(load_config("laboratory", ["placement=ray", *server])) == [{"CPU": 1}]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (1000 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=12),
    kinds=st.lists(st.sampled_from(sorted(DTYPES)), min_size=12, max_size=12),
    limit=st.integers(1, 400),
)
def test_every_tensor_arrives_bit_for_bit_in_its_order(
    shapes: list[tuple[int, ...]], kinds: list[str], limit: int
) -> None:
    sent = [(f"w{i}", random(shape, DTYPES[kinds[i]], i)) for i, shape in enumerate(shapes)]
    shards = list(pack_shards(sent, limit))
    arrived = list(unpack_shards(shards))
    assert [name for name, _ in arrived] == [name for name, _ in sent]
    for (_, before), (_, after) in zip(sent, arrived, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert torch.equal(before, after)
    for shard in shards:
        assert sum(array.nbytes for *_, array in shard) <= limit or len(shard) == 1


def test_objects_are_filled_up_to_their_limit() -> None:
    sent = [(name, random((10,), torch.float32)) for name in "abcde"]  # 40 bytes each
    sizes = [len(shard) for shard in pack_shards(sent, 85)]
    assert sizes == [2, 2, 1]


def test_matrices_are_sent_in_the_dtype_of_the_engine_and_vectors_unchanged() -> None:
    matrix, vector, counts = random((3, 4), torch.float32), random((4,), torch.float32), torch.arange(4).view(2, 2)
    sent = [("matrix", matrix), ("vector", vector), ("counts", counts)]
    arrived = dict(unpack_shards(pack_shards(sent, 1 << 20, torch.bfloat16)))
    assert torch.equal(arrived["matrix"], matrix.bfloat16())
    assert torch.equal(arrived["vector"], vector)
    assert torch.equal(arrived["counts"], counts)


def test_a_tied_tensor_is_sent_once() -> None:
    tied = random((4, 4), torch.float32)
    assert [name for name, _ in unpack_shards(pack_shards([("a", tied), ("b", tied)], 1 << 20))] == ["a"]
