"""Ray actors: the connection to the cluster, the placement group of a run, calls, and the errors of lost actors."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab.errors import TrimtabError, first_line
from trimtab.plugins import require_extra
from trimtab.trainer.config import Config
from trimtab.trainer.config.schema import RayConfig

MAX_CONCURRENT_CALLS = 5  # per actor: the long call, its abort, the report, the result of a turn, and one to spare


class ActorLost(Exception):
    """The actor or its node died, or a call timed out; the message says which."""


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """The placement-group bundle of one actor. The replacement of a dead actor uses the same bundle."""

    group: Any
    bundle: int
    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        """Number of CPU threads an actor in this slot may use."""
        return max(1, int(self.cpus))

    def start(self, host: type, *arguments: Any) -> Any:
        """Starts an actor of class `host` in this slot; returns its handle without waiting for the start."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "max_concurrency": MAX_CONCURRENT_CALLS,
            "max_restarts": 0,  # a restarted engine has no weights: its caller must know
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle),
        }
        return ray.remote(**options)(host).remote(*arguments)


def get_result(reference: Any, timeout: float | None = None) -> Any:
    """Returns the result of a remote call, waiting at most `timeout` seconds if given.

    Raises a `TrimtabError` of the actor, and `ActorLost` if it is dead or unreachable, or did not answer in time.
    """
    import ray

    with convert_ray_errors():
        return ray.get(reference, timeout=timeout)


@contextmanager
def convert_ray_errors() -> Iterator[None]:
    """Converts Ray's exceptions to those of `get_result`; unexpected exceptions of the actor's code are re-raised."""
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, TrimtabError):
            raise cause from None
        raise
    except GetTimeoutError:
        raise ActorLost("it did not answer in time") from None
    except RayError as error:
        raise ActorLost(_reason(str(error)) or type(error).__name__) from None


def _reason(text: str) -> str:
    """Returns the first sentence of the last line of a Ray error, without its list of possible causes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition(". ")[0][:200] if lines else ""


def kill_actor(handle: Any) -> None:
    """Kills an actor's process. Idempotent."""
    import ray

    ray.kill(handle, no_restart=True)


def use_working_directory(folder: str) -> None:
    """Changes to the folder in which the run was started, where relative paths of the recipe resolve."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise TrimtabError(
            f"{folder} does not exist on node {os.uname().nodename} ({error.strerror}): start the run in a folder that "
            "every node of the cluster has"
        ) from None


CONNECT_TIMEOUT = 10.0  # seconds until the cluster's address must accept a connection


@dataclass(frozen=True, slots=True)
class ActorSlots:
    """The slots of all actors of a run."""

    trainers: tuple[ActorSlot, ...]
    engines: tuple[ActorSlot, ...]


@contextmanager
def connect(config: RayConfig) -> Iterator[None]:
    """Connects to the cluster for the duration of the context. An existing connection is used and stays open."""
    require_extra("ray", 'placement = "ray"')
    import ray

    if ray.is_initialized():
        yield
        return
    from ray._private import worker

    shows_logs = worker._worker_logs_enabled
    handler, in_main = signal.getsignal(signal.SIGTERM), threading.current_thread() is threading.main_thread()
    try:
        try:
            # Ray itself would try for 15 minutes if nothing listens at the address.
            host, _, port = config.address.rpartition(":")
            if host and port.isdecimal():
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
            # Ray prints the death of an actor to stdout, amid the display and before `--json`; the run reports it.
            worker._worker_logs_enabled = False
            ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
            if in_main:
                signal.signal(signal.SIGTERM, handler)  # Ray installs a handler that exits at once
        except (OSError, ValueError, RuntimeError) as error:
            raise TrimtabError(
                f"no Ray cluster at ray.address = {config.address!r} ({first_line(error)}): start one with "
                "`ray start --head`, or set ray.address"
            ) from None
        yield
    finally:
        ray.shutdown()
        worker._worker_logs_enabled = shows_logs


@contextmanager
def reserve_slots(config: Config) -> Iterator[ActorSlots]:
    """Reserves all slots of a run or none. Releases them on exit, which also kills the actors still in them."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    actors = _actors(config)
    group = placement_group(bundles(config), strategy=config.ray.strategy)
    try:
        if not group.wait(config.ray.start_timeout):
            counts = Counter(actors).items()
            requested = [f"{count} {kind} of {cpus:g} CPU, {gpus:g} GPU" for (kind, cpus, gpus), count in counts]
            cpus, gpus = (ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU"))
            raise TrimtabError(
                f"the cluster did not give {'; '.join(requested)} within {config.ray.start_timeout:g} s "
                f"({config.ray.strategy}); it has {cpus:g} CPU, {gpus:g} GPU in all: lower [ray], add nodes, or wait "
                "for other jobs"
            )
        slots = tuple(ActorSlot(group, bundle, cpus, gpus) for bundle, (_, cpus, gpus) in enumerate(actors))
        yield ActorSlots(slots[: config.ray.trainers], slots[config.ray.trainers :])
    finally:
        remove_placement_group(group)


def bundles(config: Config) -> list[dict[str, float]]:
    """Returns the resources to reserve: one bundle per actor."""
    return [
        {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount} for _, cpus, gpus in _actors(config)
    ]


def _actors(config: Config) -> list[tuple[str, float, float]]:
    """Returns kind, CPUs and GPUs of each actor: trainers, then engines; inference servers need no actor."""
    ray = config.ray
    engines = 0 if config.engine.type == "server" else ray.engines
    trainers = [("trainers", ray.trainer_cpus, ray.trainer_gpus)] * ray.trainers
    return trainers + [("engines", ray.engine_cpus, ray.engine_gpus)] * engines
