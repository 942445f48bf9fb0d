"""The transport to an engine in a Ray actor; weights go through Ray's object store, in objects of bounded size.

Each object holds whole tensors. On the receiving node, the tensors share the memory of the object store.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.errors import EngineDeadError
from trimtab.trainer.cluster.actors import ActorLost, ActorSlot, convert_ray_errors, get_result, kill_actor
from trimtab.trainer.config import Config
from trimtab.trainer.engines.remote.engine_host import EngineHost
from trimtab.trainer.engines.remote.hosted_turns import CallResult, EndedTurn, HandledTurn
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine, TransportLost
from trimtab.trainer.engines.weight_transfer import with_first_names
from trimtab.types import Engine

HEARTBEAT_INTERVAL = 1.0  # seconds between two reports of the actor while no turn ends
SHUTDOWN_TIMEOUT = 10.0  # seconds for the engine to close


class EngineActor(EngineHost):
    """The actor of an engine. One call runs at a time; meanwhile Ray may run `abort`, `handled` and `report`.

    Arguments and results of `generate` are pickled here, because arrays in the object store are read-only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ended: queue.SimpleQueue[EndedTurn] = queue.SimpleQueue()

    def start_engine(self, config: Config, files: Mapping[str, bytes], threads: int) -> tuple[int, str]:
        """Builds the engine of a recipe with the files of its model; returns process id and node."""
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-engine-")
        self._shard_size = config.ray.shard_mib << 20
        for name, content in files.items():
            (Path(self._folder.name) / name).write_bytes(content)
        self.build(config, Path(self._folder.name), threads)
        return os.getpid(), os.uname().nodename

    def generate(self, engine: Engine, request: bytes) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _pickle(super().generate(engine, *_unpickle(request)))

    def update_weights(self, engine: Engine, stored: StoredWeights, as_is: bool) -> None:
        engine.update_weights(fetch_weights(stored), stored.version, as_is=as_is)

    def named_weights(self, engine: Engine) -> StoredWeights:
        return store_shards(pack_shards(engine.named_weights(), self._shard_size), engine.policy_version)

    def send_turn(self, turn: EndedTurn) -> None:
        self._ended.put(turn)

    def report(self) -> tuple[int, list[EndedTurn]]:
        """Returns the progress and the turns that ended; waits at most `HEARTBEAT_INTERVAL` seconds for a turn."""
        turns: list[EndedTurn] = []
        with contextlib.suppress(queue.Empty):
            turns.append(self._ended.get(timeout=HEARTBEAT_INTERVAL))
            while True:
                turns.append(self._ended.get_nowait())
        return self.progress(), turns

    def close(self) -> None:
        with self._folder:  # removed in any case
            if self.engine is not None:  # it may still be starting
                self.engine.close()


class RayTransport:
    """Runs an engine in an actor (`remote_engine.Transport`).

    Engines of one run share a publisher, so that weights are stored once.
    """

    pid = 0  # until the engine has started

    def __init__(self, config: Config, folder: Path, slot: ActorSlot, publisher: WeightPublisher) -> None:
        self._config, self._slot, self._publisher = config, slot, publisher
        # The folder has no weights: they are published.
        self._files = {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}
        self._start()

    def _start(self) -> None:
        self._host = self._slot.start(EngineActor)
        self._starting = self._host.start_engine.remote(self._config, self._files, self._slot.threads)
        self._where = "the engine's actor"
        self.progress, self.turns, self._report = 0, list[EndedTurn](), None

    def wait_until_started(self) -> None:
        """Waits until the engine has started. All actors of a run start concurrently.

        Raises `EngineDeadError` if the actor was lost, or did not start within `ray.start_timeout` seconds.
        """
        try:
            with self._convert_loss():
                self.pid, node = get_result(self._starting, self._config.ray.start_timeout)
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

        # Reuse an unfinished report of the previous call, so that its progress and turns are not lost.
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
                value = list(fetch_weights(value))
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
        with contextlib.suppress(Exception):  # whatever the engine raises, its process ends
            get_result(self._host.close.remote(), SHUTDOWN_TIMEOUT)
        kill_actor(self._host)

    @contextlib.contextmanager
    def _convert_loss(self) -> Iterator[None]:
        try:
            with convert_ray_errors():
                yield
        except ActorLost as error:
            raise TransportLost(self.describe(f"was lost ({error})")) from None


def build_engines(config: Config, folder: Path, slots: Sequence[ActorSlot]) -> list[RemoteEngine]:
    """Starts one engine in each slot and returns them. folder: config, generation config and tokenizer of the model."""
    publisher = WeightPublisher(getattr(torch, config.engine.dtype), config.ray.shard_mib << 20)
    transports = [RayTransport(config, folder, slot, publisher) for slot in slots]
    for transport in transports:
        transport.wait_until_started()
    return [RemoteEngine(transport, hang_timeout=config.engine.hang_timeout) for transport in transports]


def _pickle(value: Any) -> bytes:
    return bytes(ForkingPickler.dumps(value))


def _unpickle(data: bytes) -> Any:
    return ForkingPickler.loads(data)  # pyright: ignore[reportAttributeAccessIssue]


Shard = list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]
"""One object: name, dtype (without the prefix "torch."), shape and bytes of each of its tensors."""


class StoredWeights(NamedTuple):
    """References to all objects of one weight update, in order."""

    version: int
    references: list[Any]


class WeightPublisher:
    """Puts weights into the object store, once for all engines that load the same update.

    Matrices are stored in `dtype`, the dtype to which the engine would round them on arrival. Other tensors (norms,
    biases, buffers) are not converted: they are small, and engines may keep them in full precision.
    """

    def __init__(self, dtype: torch.dtype, limit: int) -> None:
        self._dtype = dtype
        self._limit = limit
        self._lock = threading.Lock()
        self._source: Iterable[tuple[str, Tensor]] | None = None
        self._last: StoredWeights | None = None

    def put(self, weights: Iterable[tuple[str, Tensor]], version: int) -> StoredWeights:
        """Returns references to the stored `weights`; the previous ones are freed once no engine reads them.

        Repeated calls are recognized by the identity of `weights`: version numbers are not enough, because an
        evaluation publishes two sets of weights under one version.
        """
        with self._lock:
            if self._last is None or self._last.version != version or self._source is not weights:
                self._source = self._last = None  # freed before the next update fills the store
                self._last = store_shards(pack_shards(weights, self._limit, self._dtype), version)
                self._source = None if isinstance(weights, Iterator) else weights
            return self._last


def store_shards(shards: Iterable[Shard], version: int) -> StoredWeights:
    import ray

    return StoredWeights(version, [ray.put(shard) for shard in shards])


def pack_shards(weights: Iterable[tuple[str, Tensor]], limit: int, dtype: torch.dtype | None = None) -> Iterator[Shard]:
    """Groups tensors, in order, into objects of at most `limit` bytes (a larger tensor is a separate object).

    A tied tensor is stored once, under its first name.
    """
    shard: Shard = []
    size = 0
    for name, weight, first in with_first_names(weights):
        if first != name:
            continue
        tensor = weight.detach()
        if dtype is not None and tensor.ndim > 1 and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if shard and size + raw.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw))
        size += raw.nbytes
    if shard:
        yield shard


def unpack_shards(shards: Iterable[Shard]) -> Iterator[tuple[str, Tensor]]:
    """Yields the named tensors of a weight update. They share memory with the objects and must not be written to."""
    for shard in shards:
        for name, dtype, shape, array in shard:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            if array.size:  # an empty array cannot be viewed as another type
                with warnings.catch_warnings():
                    # Objects of the store are read-only; torch has no read-only tensors and warns.
                    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                    tensor = torch.from_numpy(array).view(tensor.dtype).reshape(shape)
            yield name, tensor


def fetch_weights(stored: StoredWeights) -> Iterator[tuple[str, Tensor]]:
    """Yields the named weights of an update, object by object."""
    import ray

    return unpack_shards(ray.get(reference) for reference in stored.references)
