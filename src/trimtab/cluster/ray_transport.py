"""An `EngineHost` in a Ray actor: calls of the actor, weights through the object store."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from trimtab.cluster.actors import ActorLost, ActorSlot, ask, end, explained
from trimtab.cluster.object_store_weights import Publication, Publisher, fetch, pack, publication, unpack
from trimtab.config import Config, RayConfig
from trimtab.engines.remote.engine_host import EngineHost
from trimtab.engines.remote.remote_engine import Answer, RemoteEngine, TransportLost
from trimtab.errors import EngineDeadError
from trimtab.types import Engine

WEIGHTS = ".safetensors"
HEARTBEAT_INTERVAL = 1.0  # seconds between two questions for the actor's progress
SHUTDOWN_TIMEOUT = 10.0  # seconds for the engine to close


class EngineActor(EngineHost):
    """The actor. Calls come one at a time, but for `abort` and `progress`: Ray runs them beside the call in progress.

    What `generate` takes and returns is pickled here: arrays in the object store are read-only.
    """

    def begin(self, spec: Mapping[str, Any], files: Mapping[str, bytes], shard_size: int) -> tuple[int, str]:
        """Builds the engine from its specification and the files of its model; returns process id and node."""
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-engine-")
        self._shard_size = shard_size
        for name, content in files.items():
            (Path(self._folder.name) / name).write_bytes(content)
        self.build({**spec, "model": self._folder.name})
        return os.getpid(), os.uname().nodename

    def generate(self, engine: Engine, request: bytes) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _pickled(super().generate(engine, *_unpickled(request)))

    def update_weights(self, engine: Engine, news: Publication, as_is: bool) -> None:
        shards = unpack(fetch(news.references), news.key, news.version)
        engine.update_weights(shards, news.version, as_is=as_is)

    def named_weights(self, engine: Engine) -> Publication:
        return publication(pack(engine.named_weights(), "", engine.policy_version, self._shard_size))

    def close(self) -> None:
        if self.engine is not None:  # it may still be starting
            self.engine.close()
        self._folder.cleanup()


class RayTransport:
    """Starts an actor in `slot` (`remote_engine.Transport`). Engines of one run share a publisher, so that weights are
    stored once.
    """

    pid = 0  # until it has started

    def __init__(self, spec: Mapping[str, Any], slot: ActorSlot, publisher: Publisher, config: RayConfig) -> None:
        self._slot, self._publisher, self._config = slot, publisher, config
        self._spec = {**spec, "threads": slot.threads}
        self._files = _model_files(Path(spec["model"]))
        self._calls = itertools.count(1)
        self._begin()

    def _begin(self) -> None:
        self._host = self._slot.start(EngineActor)
        self._starting = self._host.begin.remote(self._spec, self._files, self._config.shard_mib << 20)
        self._where = "the engine's actor"
        self._progress, self._question, self._asked = 0, None, 0.0

    def wait_until_started(self) -> None:
        """Waits for the engine; all actors of a run start side by side and are waited for one by one.

        Raises:
            EngineDeadError: the actor was lost, or did not start within `ray.start_timeout` seconds.
            TrimtabError: the engine cannot be built there.
        """
        try:
            with self._known_loss():
                self.pid, node = ask(self._starting, self._config.start_timeout)
        except TransportLost as lost:
            raise EngineDeadError(str(lost)) from None
        self._where = f"process {self.pid} on {node}"

    def restart(self) -> None:
        """Starts an actor in the slot of the dead one."""
        end(self._host)
        self._begin()
        self.wait_until_started()

    def submit(self, method: str, *arguments: Any) -> None:
        self._method, self._call = method, next(self._calls)
        if method == "generate":
            arguments = (_pickled(arguments),)
        if method == "update_weights":
            weights, version, exact = arguments
            arguments = (self._publisher.put(weights, version), exact)
        with self._known_loss():
            self._answer = self._host.answer.remote(self._call, method, arguments)

    def wait(self, seconds: float) -> bool:
        import ray

        return bool(ray.wait([self._answer], timeout=seconds)[0])

    def result(self) -> Answer:
        with self._known_loss():
            value, error, state = ask(self._answer)
            if error is None and self._method == "generate":
                value = _unpickled(value)
            if (
                error is None and self._method == "named_weights"
            ):  # objects stay in the store while a tensor of theirs is used
                value = list(unpack(fetch(value.references), value.key, value.version))
        return value, error, state

    def abort(self) -> None:
        self._host.abort.remote(self._call)

    def heartbeat(self) -> int:
        import ray

        now = time.monotonic()
        if self._question is None and now - self._asked >= HEARTBEAT_INTERVAL:
            self._question, self._asked = self._host.progress.remote(), now
        elif self._question is not None and ray.wait([self._question], timeout=0)[0]:
            with self._known_loss():
                self._progress = ask(self._question)
            self._question = None
        return self._progress

    def describe(self, what: str) -> str:
        return f"{self._where} {what}"

    def kill(self) -> None:
        end(self._host)

    def close(self) -> None:
        with contextlib.suppress(ActorLost):
            ask(self._host.close.remote(), SHUTDOWN_TIMEOUT)
        end(self._host)

    @contextlib.contextmanager
    def _known_loss(self) -> Iterator[None]:
        try:
            with explained():
                yield
        except ActorLost as error:
            raise TransportLost(self.describe(f"was lost ({error})")) from None


def build_engines(config: Config, spec: Mapping[str, Any], slots: Sequence[ActorSlot]) -> list[RemoteEngine]:
    """Returns one engine in each slot, all started.

    Raises:
        TrimtabError: an engine cannot be built there, or its actor did not start within `ray.start_timeout` seconds.
    """
    publisher = Publisher(getattr(torch, config.engine.dtype), config.ray.shard_mib << 20)
    transports = [RayTransport(spec, slot, publisher, config.ray) for slot in slots]
    for transport in transports:
        transport.wait_until_started()
    return [RemoteEngine(transport, hang_timeout=config.engine.hang_timeout) for transport in transports]


def _model_files(folder: Path) -> dict[str, bytes]:
    """Returns what an engine reads of a model's folder. Weights are not among it: they are published."""
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file() and item.suffix != WEIGHTS}


def _pickled(value: Any) -> bytes:
    return bytes(ForkingPickler.dumps(value))


def _unpickled(data: bytes) -> Any:
    return ForkingPickler.loads(data)  # pyright: ignore[reportAttributeAccessIssue]
