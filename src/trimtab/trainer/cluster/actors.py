"""Starts Ray actors, calls them, and maps the errors of lost actors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab.errors import TrimtabError

MAX_CONCURRENT_CALLS = 5  # per actor: the long call, its abort, the report, the result of a turn, and one to spare


class ActorLost(Exception):
    """The actor or its node died, or a call timed out; the message says which."""


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """The placement-group bundle of one actor. The replacement of a dead actor uses the same one."""

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

    Raises:
        TrimtabError: raised by the actor.
        ActorLost: the actor is dead or unreachable, or did not answer in time.
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
