"""The cluster resources of a run: one placement group, a bundle per actor, released when the run ends."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab.cluster.actors import ActorSlot
from trimtab.config import Config, RayConfig
from trimtab.errors import TrimtabError

REACH = 10.0  # seconds for the cluster's address to answer


@dataclass(frozen=True, slots=True)
class ActorSlots:
    """Every bundle of a run."""

    trainers: tuple[ActorSlot, ...]
    engines: tuple[ActorSlot, ...]
    rewards: tuple[ActorSlot, ...]


@contextmanager
def connected(config: RayConfig) -> Iterator[None]:
    """A connection to the cluster; one that is there already is used and left alone.

    Raises:
        TrimtabError: Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
    except ImportError:
        raise TrimtabError('placement = "ray" needs Ray: pip install "trimtab[ray]"') from None
    if ray.is_initialized():
        yield
        return
    from ray._private import worker

    handler, mine = signal.getsignal(signal.SIGTERM), threading.current_thread() is threading.main_thread()
    try:
        _reach(config.address)
        # Ray tells the death of an actor on stdout, amid the display and before `--json`; the run tells it itself.
        worker._worker_logs_enabled = False
        ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
        if mine:
            signal.signal(signal.SIGTERM, handler)  # Ray puts in one of its own, which exits at once
    except (OSError, ValueError, RuntimeError) as error:
        raise TrimtabError(
            f"no Ray cluster at ray.address = {config.address!r} ({str(error).splitlines()[0]}): start one with "
            "`ray start --head`, or set ray.address"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
        worker._worker_logs_enabled = True


def _reach(address: str) -> None:
    """A short look at whether anybody listens: Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH).close()


@contextmanager
def reserved(config: Config) -> Iterator[ActorSlots]:
    """The seats of a run, all or none; removing the group at the end also ends every actor still in it.

    Raises:
        TrimtabError: the cluster does not have the resources within `ray.start_timeout` seconds.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(bundles(config), strategy=config.ray.strategy)
    try:
        if not group.wait(config.ray.start_timeout):
            wanted = [
                f"{count} {kind} of {cpus:g} CPU, {gpus:g} GPU" for kind, (count, cpus, gpus) in _kinds(config).items()
            ]
            cpus, gpus = (ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU"))
            raise TrimtabError(
                f"the cluster did not give {'; '.join(wanted)} within {config.ray.start_timeout:g} s "
                f"({config.ray.strategy}); it has {cpus:g} CPU, {gpus:g} GPU in all: lower [ray], add nodes, or wait "
                "for other jobs"
            )
        yield _seats(config, group)
    finally:
        remove_placement_group(group)


def bundles(config: Config) -> list[dict[str, float]]:
    """What Ray is asked for: one bundle for each actor, trainers, engines and rewards in this order."""
    return [
        {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
        for count, cpus, gpus in _kinds(config).values()
        for _ in range(count)
    ]


def _kinds(config: Config) -> dict[str, tuple[int, float, float]]:
    """Count, CPUs and GPUs of each kind of actor; servers are elsewhere already."""
    place = config.ray
    return {
        "trainers": (place.trainers, place.trainer_cpus, place.trainer_gpus),
        "engines": (0 if config.engine.type == "server" else place.engines, place.engine_cpus, place.engine_gpus),
        "rewards": (place.rewards, place.reward_cpus, 0.0),
    }


def _seats(config: Config, group: Any) -> ActorSlots:
    seats, bundle = {}, 0
    for kind, (count, cpus, gpus) in _kinds(config).items():
        seats[kind] = tuple(ActorSlot(group, bundle + index, cpus, gpus) for index in range(count))
        bundle += count
    return ActorSlots(**seats)
