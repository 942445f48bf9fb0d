"""An engine in a Ray actor: requests through calls, weights through the object store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.cluster.actors import ActorLost, ActorSlot, ask, end, explained
from trimtab.cluster.object_store_weights import Publisher, fetch, unpack
from trimtab.cluster.ray_host import EngineHost
from trimtab.config import Config, RayConfig
from trimtab.engines.embedded.decoding_rows import check_prefixes
from trimtab.engines.remote import wire
from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.types import AbortSignal, Completion, Prompt, Sampling

WEIGHTS = ".safetensors"
LOOK = 0.02  # seconds between two looks at an interrupt while an actor works
SIGNS = 1.0  # seconds between two questions after a sign of life


class RayEngine:
    """`types.Engine` over the actor in `seat`, built there from a specification of `rollout.hosted`.

    Engines of one run share a publisher, so that weights are stored once. `place`: process and node of the actor.
    `patience`: seconds without a sign of life after which a call gives the actor up (`EngineDeadError`). While it
    generates, the signs are tokens; otherwise, that it runs at all.
    """

    def __init__(
        self, spec: Mapping[str, Any], seat: ActorSlot, publisher: Publisher, config: RayConfig, patience: float
    ) -> None:
        self.policy_version = 0
        self.decoded = 0
        self.prefilled = 0
        self.place: dict[str, Any]
        self._spec = dict(spec)
        self._files = _files(Path(spec["model"]))
        self._seat = seat
        self._publisher = publisher
        self.hang_timeout = patience
        self._start_patience = config.patience
        self._limit = config.shard_mib << 20
        self._calls = 0
        self._host: Any = None
        self._starting: Any = None
        self._begin()

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        *,
        seed: int,
        prefixes: Sequence[Sequence[Completion]] | None = None,
        interrupt: AbortSignal | None = None,
    ) -> list[list[Completion]]:
        check_prefixes(prefixes, prompts, samples, sampling)
        self.wait()
        if not self._has_weights:
            raise TrimtabError("the engine's actor holds no weights yet: publish before generating")
        names, arrays = wire.pack_prompts(prompts)
        head = None
        if prefixes is not None:
            head, more = wire.pack_completions(prefixes)
            arrays |= more
        request = {
            "prompts": names,
            "samples": samples,
            "sampling": wire.pack_sampling(sampling),
            "seed": seed,
            "prefixes": head,
        }
        self._calls += 1
        host = self._host  # `close` may take it away from another thread
        with self._alive():
            answer = host.generate.remote(self._calls, request, arrays)
            found, parts, *counters = self._await(host, answer, interrupt)
        self._count(*counters)
        # Objects of the store are read-only, and stay there as long as an array of theirs is used.
        return wire.unpack_completions(found, {name: np.array(part) for name, part in parts.items()})

    def publish(self, weights: Iterable[tuple[str, Any]], version: int, *, exact: bool = False) -> None:
        self.wait()
        news = self._publisher.put(weights, version)
        host = self._host
        with self._alive():
            self._await(host, host.publish.remote(news, exact))
        self.policy_version, self._has_weights = version, True

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Copies in the object store; they stay there as long as a tensor is used."""
        self.wait()
        host = self._host
        with self._alive():
            found = self._await(host, host.weights.remote(self._limit))
            shards = list(fetch(found.references))
        yield from unpack(shards, found.key, found.version)

    def recover(self) -> None:
        """A new actor in the seat of the dead one, without weights; where it lives, nothing.

        Raises:
            EngineDeadError: the new actor was lost too, or did not start within `ray.patience` seconds.
            TrimtabError: the engine was closed.
        """
        if self._host is None:
            raise TrimtabError("the engine was closed: build another one")
        try:
            with self._alive():
                ask(self._host.alive.remote(), self._start_patience)
        except EngineDeadError:
            end(self._host)
            self._begin()
            self.wait()

    def close(self) -> None:
        """Let the engine end its own processes, then end its actor."""
        if self._host is None:
            return
        with contextlib.suppress(ActorLost):
            ask(self._host.close.remote(), patience=10.0)
        end(self._host)
        self._host = None

    def _begin(self) -> None:
        self._host = self._seat.start(EngineHost, self._seat.threads)
        self.place = {}
        self._starting = self._host.start.remote(self._spec, self._files)
        self._counted = (0, 0)  # tokens of this actor's own counters
        self.policy_version, self._has_weights = 0, False

    def wait(self) -> None:
        """Wait for the actor's engine; all actors of a run start side by side and are waited for one by one."""
        if self._starting is not None:
            with self._alive():
                self.place = ask(self._starting, self._start_patience)
            self._starting = None

    def _await(self, host: Any, answer: Any, interrupt: AbortSignal | None = None) -> Any:
        """The answer of `host`, which is told of the interrupt. `ActorLost` without signs of life; it is then dead."""
        import ray

        told, sign, seen = interrupt is None, None, None
        since = asked = before = time.monotonic()
        while not ray.wait([answer], timeout=SIGNS if told else LOOK)[0]:
            if interrupt is not None and not told and interrupt.is_set():
                host.interrupt.remote(self._calls)
                told = True
            now = time.monotonic()
            # A trainer that was stopped itself did not wait meanwhile.
            since += now - before if now - before > 3 * SIGNS else 0
            before = now
            if sign is not None and ray.wait([sign], timeout=0)[0]:
                found, sign = ask(sign), None
                seen, since = (seen, since) if found == seen else (found, now)
            if sign is None and now - asked >= SIGNS:
                sign, asked = host.sign.remote(), now
            if now - since > self.hang_timeout:
                end(host)
                raise ActorLost(f"it gave no sign of life for {self.hang_timeout:g} s (engine.patience)")
        return ask(answer)

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            with explained():
                yield
        except ActorLost as error:
            where = f"process {self.place['pid']} on {self.place['node']}" if self.place else "its actor"
            raise EngineDeadError(f"{where}: {error}") from None

    def _count(self, decoded: int, prefilled: int) -> None:
        self.decoded += decoded - self._counted[0]
        self.prefilled += prefilled - self._counted[1]
        self._counted = (decoded, prefilled)


def build_engines(config: Config, spec: Mapping[str, Any], seats: Sequence[ActorSlot]) -> list[RayEngine]:
    """One engine in each seat, all started.

    Raises:
        TrimtabError: an engine cannot be built there, or its actor did not start within `ray.patience` seconds.
    """
    publisher = Publisher(getattr(torch, config.engine.dtype), config.ray.shard_mib << 20)
    engines = [RayEngine(spec, seat, publisher, config.ray, config.engine.patience) for seat in seats]
    for engine in engines:
        engine.wait()
    return engines


def _files(folder: Path) -> dict[str, bytes]:
    """What an engine reads of a model's folder. Weights are not among it: they are published."""
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file() and item.suffix != WEIGHTS}
