"""The transport to an engine in a Ray actor; weights go through the object store."""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import EngineDeadError
from trimtab.trainer.cluster.actors import ActorLost, ActorSlot, convert_ray_errors, get_result, kill_actor
from trimtab.trainer.cluster.object_store_weights import (
    StoredWeights,
    WeightPublisher,
    fetch_shards,
    pack,
    store_shards,
    unpack,
)
from trimtab.trainer.config import Config, RayConfig
from trimtab.trainer.engines.remote.engine_host import CallResult, EngineHost
from trimtab.trainer.engines.remote.hosted_turns import EndedTurn, HandledTurn
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine, TransportLost
from trimtab.types import Engine

WEIGHTS_SUFFIX = ".safetensors"
HEARTBEAT_INTERVAL = 1.0  # seconds between two reports of the actor, without turns that end
SHUTDOWN_TIMEOUT = 10.0  # seconds for the engine to close


class EngineActor(EngineHost):
    """The actor. Calls come one at a time except `abort`, `handled` and `report`, which Ray runs during another call.

    Arguments and results of `generate` are pickled here, because arrays in the object store are read-only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ended: queue.SimpleQueue[EndedTurn] = queue.SimpleQueue()

    def start_engine(self, spec: Mapping[str, Any], files: Mapping[str, bytes], shard_size: int) -> tuple[int, str]:
        """Builds the engine from its specification and the files of its model; returns process id and node."""
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-engine-")
        self._shard_size = shard_size
        for name, content in files.items():
            (Path(self._folder.name) / name).write_bytes(content)
        self.build({**spec, "model": self._folder.name})
        return os.getpid(), os.uname().nodename

    def generate(self, engine: Engine, request: bytes) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _pickle(super().generate(engine, *_unpickle(request)))

    def update_weights(self, engine: Engine, stored: StoredWeights, as_is: bool) -> None:
        shards = unpack(fetch_shards(stored.references), stored.key, stored.version)
        engine.update_weights(shards, stored.version, as_is=as_is)

    def named_weights(self, engine: Engine) -> StoredWeights:
        return store_shards(pack(engine.named_weights(), "", engine.policy_version, self._shard_size))

    def send_turn(self, turn: EndedTurn) -> None:
        self._ended.put(turn)

    def report(self) -> tuple[int, list[EndedTurn]]:
        """Returns the progress and the turns that ended; waits for one, at most `HEARTBEAT_INTERVAL` seconds."""
        turns: list[EndedTurn] = []
        with contextlib.suppress(queue.Empty):
            turns.append(self._ended.get(timeout=HEARTBEAT_INTERVAL))
            while True:
                turns.append(self._ended.get_nowait())
        return self.progress(), turns

    def close(self) -> None:
        if self.engine is not None:  # it may still be starting
            self.engine.close()
        self._folder.cleanup()


class RayTransport:
    """Runs an engine in an actor (`remote_engine.Transport`).

    Engines of one run share a publisher, so that weights are stored once.
    """

    pid = 0  # until the engine has started

    def __init__(self, spec: Mapping[str, Any], slot: ActorSlot, publisher: WeightPublisher, config: RayConfig) -> None:
        self._slot, self._publisher, self._config = slot, publisher, config
        self._spec = {**spec, "threads": slot.threads}
        files = [item for item in Path(spec["model"]).iterdir() if item.is_file()]
        # Weights are published.
        self._files = {item.name: item.read_bytes() for item in files if item.suffix != WEIGHTS_SUFFIX}
        self._start()

    def _start(self) -> None:
        self._host = self._slot.start(EngineActor)
        self._starting = self._host.start_engine.remote(self._spec, self._files, self._config.shard_mib << 20)
        self._where = "the engine's actor"
        self.progress, self.turns, self._report = 0, list[EndedTurn](), None

    def wait_until_started(self) -> None:
        """Waits for the engine; all actors of a run start concurrently and are waited for one by one.

        Raises:
            EngineDeadError: the actor was lost, or did not start within `ray.start_timeout` seconds.
            TrimtabError: the engine cannot be built there.
        """
        try:
            with self._convert_loss():
                self.pid, node = get_result(self._starting, self._config.start_timeout)
        except TransportLost as lost:
            raise EngineDeadError(str(lost)) from None
        self._where = f"process {self.pid} on {node}"

    def restart(self) -> None:
        """Starts an actor in the slot of the dead one."""
        kill_actor(self._host)
        self._start()
        self.wait_until_started()

    def submit(self, call: int, method: str, *arguments: Any) -> None:
        self._method = method
        if method == "generate":
            arguments = (_pickle(arguments),)
        if method == "update_weights":
            weights, version, as_is = arguments
            arguments = (self._publisher.put(weights, version), as_is)
        with self._convert_loss():
            self._answer = self._host.answer.remote(call, method, arguments)

    def wait(self, seconds: float) -> CallResult | None:
        import ray

        # A report of the call before may be under way: what it brings must not be lost.
        self._report = self._report or self._host.report.remote()
        ready, _ = ray.wait([self._answer, self._report], num_returns=1, timeout=seconds)
        with self._convert_loss():
            if self._report in ready:
                self.progress, turns = get_result(self._report)
                self._report = None
                self.turns += turns
            if self._answer not in ready:
                return None
            value, error, state = get_result(self._answer)
            if error is None and self._method == "generate":
                value = _unpickle(value)
            if error is None and self._method == "named_weights":
                # Objects stay in the store while one of their tensors is used.
                value = list(unpack(fetch_shards(value.references), value.key, value.version))
        return value, error, state

    def send_result(self, turn: HandledTurn) -> None:
        self._host.handled.remote(turn)

    def abort(self, call: int) -> None:
        self._host.abort.remote(call)

    def describe(self, what: str) -> str:
        return f"{self._where} {what}"

    def kill(self) -> None:
        kill_actor(self._host)

    def close(self) -> None:
        with contextlib.suppress(ActorLost):
            get_result(self._host.close.remote(), SHUTDOWN_TIMEOUT)
        kill_actor(self._host)

    @contextlib.contextmanager
    def _convert_loss(self) -> Iterator[None]:
        try:
            with convert_ray_errors():
                yield
        except ActorLost as error:
            raise TransportLost(self.describe(f"was lost ({error})")) from None


def build_engines(config: Config, spec: Mapping[str, Any], slots: Sequence[ActorSlot]) -> list[RemoteEngine]:
    """Starts one engine in each slot and returns them.

    Raises:
        TrimtabError: an engine cannot be built there, or its actor did not start within `ray.start_timeout` seconds.
    """
    publisher = WeightPublisher(getattr(torch, config.engine.dtype), config.ray.shard_mib << 20)
    transports = [RayTransport(spec, slot, publisher, config.ray) for slot in slots]
    for transport in transports:
        transport.wait_until_started()
    return [RemoteEngine(transport, hang_timeout=config.engine.hang_timeout) for transport in transports]


def _pickle(value: Any) -> bytes:
    return bytes(ForkingPickler.dumps(value))


def _unpickle(data: bytes) -> Any:
    return ForkingPickler.loads(data)  # pyright: ignore[reportAttributeAccessIssue]
