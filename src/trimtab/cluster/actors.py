"""Starting Ray actors, calling them, and the errors of actors that are lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab.errors import TrimtabError

CALLS = 4  # at once in one actor: the long one, its interruption, and a look from outside


class ActorLost(Exception):
    """The actor died, its node did, or it did not answer in time; says which."""


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """The bundle of one actor. The replacement of a dead actor takes its seat."""

    group: Any
    bundle: int
    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        """What an actor of this seat may use for arithmetic on the CPU."""
        return max(1, int(self.cpus))

    def start(self, host: type, *arguments: Any) -> Any:
        """A new actor of class `host` here; returns its handle at once, while Ray still starts it."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "max_concurrency": CALLS,
            "max_restarts": 0,  # a restarted engine has no weights: its caller must know
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle),
        }
        return ray.remote(**options)(host).remote(*arguments)


def ask(reference: Any, patience: float | None = None) -> Any:
    """The answer to a remote call, within `patience` seconds if given.

    Raises:
        TrimtabError: raised over there, and here as it was.
        ActorLost: the actor is dead or unreachable.
    """
    import ray

    with explained():
        return ray.get(reference, timeout=patience)


@contextmanager
def explained() -> Iterator[None]:
    """Ray's exceptions as those of `ask`; an unexpected exception of the actor's own code stays as Ray shows it."""
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
    """The first sentence of the last line: Ray goes on with everything that might have been."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition(". ")[0][:200] if lines else ""


def end(handle: Any) -> None:
    """Kill an actor's process, whatever it does; idempotent."""
    import ray

    ray.kill(handle, no_restart=True)


def enter(folder: str) -> None:
    """Work in the folder the run was started from, so that relative paths of the recipe mean the same everywhere."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise TrimtabError(
            f"{folder} is not there on node {os.uname().nodename} ({error.strerror}): start the run in a folder that "
            "every node of the cluster has"
        ) from None
