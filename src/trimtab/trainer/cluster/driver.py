"""Training on a Ray cluster. The driver reserves resources, starts the ranks, shows their events and cleans up. Each
rank is an actor with the environment variables that torchrun would set.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import RESUME, Stopped, TrimtabError
from trimtab.runs import provenance
from trimtab.runs.layout import CONFIG
from trimtab.trainer.cluster.actors import (
    ActorLost,
    ActorSlots,
    connect,
    get_result,
    kill_actor,
    reserve_slots,
    use_working_directory,
)
from trimtab.trainer.cluster.ray_transport import build_engines
from trimtab.trainer.config import Config
from trimtab.trainer.models.load import LoadedModel
from trimtab.trainer.observer import Moment, NullObserver, Observer
from trimtab.trainer.ranks import launched_by_torchrun
from trimtab.trainer.run import TrainResult, build_parts
from trimtab.trainer.run import train as train_rank
from trimtab.trainer.stop import Stop
from trimtab.types import Engine

POLL_TIMEOUT = 1.0  # seconds that one poll for events waits at most
FAILURE_WINDOW = 15.0  # seconds to wait for the other ranks after one has failed
Event = tuple[Any, ...]
"""The name of a method of `Observer`, and its arguments."""


def train(
    config: Config, *, out: Path | str | None = None, resume: bool = False, observer: Observer | None = None
) -> TrainResult:
    """Trains on the Ray cluster of `config.ray`; otherwise the same as `trimtab.trainer.run.train`.

    The run directory is written by the first rank on its node, and must be visible to this process.

    Raises `TrimtabError` for errors that the user can correct, including a rank that died. After Ctrl-C or SIGTERM,
    finishes the step in progress and its checkpoint, then raises `Stopped`.
    """
    if launched_by_torchrun():
        raise TrimtabError('placement = "ray" starts the ranks itself: leave torchrun out and set ray.trainers')
    observer, run = observer or NullObserver(), Path(os.path.realpath(out or config.out or "runs/run"))
    build_parts(config).close()
    stop = Stop()
    with stop.signals(), connect(config.ray), reserve_slots(config) as slots, _start_ranks(slots) as ranks:
        try:
            rendezvous = get_result(ranks[0].address.remote(), config.ray.start_timeout)
        except ActorLost as lost:
            raise TrimtabError(f"the first trainer rank did not start ({lost}): see the cluster's logs") from None
        arguments = (config, str(Path.cwd()), run, resume, rendezvous, slots, provenance.command())
        runs = [rank.train.remote(*arguments) for rank in ranks]
        with stop.finishing():
            metrics = _wait_for_ranks(ranks, runs, observer, run, stop)
    return TrainResult(run, metrics)


@contextmanager
def _start_ranks(slots: ActorSlots) -> Iterator[list[Any]]:
    """Starts one actor per rank and kills them on exit; the actors that rank 0 started end with it."""
    ranks: list[Any] = []
    try:
        ranks += [slot.start(TrainerRank, rank, len(slots.trainers)) for rank, slot in enumerate(slots.trainers)]
        yield ranks
    finally:
        for rank in ranks:
            kill_actor(rank)


def _wait_for_ranks(ranks: list[Any], runs: list[Any], observer: Observer, run: Path, stop: Stop) -> dict[str, Any]:
    """Waits for all ranks while showing events of the first rank; returns the metrics of that rank's last step."""
    import ray
    from ray.exceptions import RayTaskError

    first, stop_sent, stopped = ranks[0], False, None
    running, events = list(runs), first.poll_events.remote(POLL_TIMEOUT)
    try:
        while running:
            if stop.signal_number is not None and not stop_sent:
                stop_sent = True
                for rank in ranks:
                    rank.stop.remote(stop.signal_number)
            (ready, *_), _ = ray.wait([events, *running], num_returns=1)
            if ready == events:
                _show_events(get_result(events), observer, run)
                events = first.poll_events.remote(POLL_TIMEOUT)
            else:
                running.remove(ready)
                try:
                    _rank_result(ready)
                except Stopped as error:
                    stopped = error  # the first rank may still be writing the checkpoint
        _show_events(get_result(first.poll_events.remote(0.0)), observer, run)
        if stopped is not None:
            raise stopped
        return _rank_result(runs[0])
    except (TrimtabError, ActorLost, RayTaskError) as error:
        cause = _first_cause(runs, error)
        with suppress(ActorLost):
            replay_events(get_result(first.poll_events.remote(0.0), FAILURE_WINDOW), observer)
        raise cause from None


def _show_events(events: list[Event], observer: Observer, run: Path) -> None:
    """Replays events on `observer`. Raises `TrimtabError` if the run directory is not visible to this machine."""
    replay_events(events, observer)
    if any(name == "started" for name, *_ in events) and not (run / CONFIG).is_file():
        raise TrimtabError(
            f"the first rank writes {run}, which this machine does not see: choose an --out on a file system that all "
            "nodes share"
        )


def _rank_result(finished: Any) -> dict[str, Any]:
    """Returns the last metrics of a finished rank, or raises its error."""
    result = get_result(finished)
    if isinstance(result, int):
        raise Stopped(result)
    return result


def _first_cause(runs: list[Any], error: Exception) -> Exception:
    """Returns the error to report after a rank failed. Ranks that wait for the failed rank fail too, possibly earlier.

    A lost rank takes precedence over a user error, and a user error over any other exception.
    """
    import ray
    from ray.exceptions import RayTaskError

    errors: list[tuple[int, Exception]] = []
    done, _ = ray.wait(runs, num_returns=len(runs), timeout=FAILURE_WINDOW)
    for rank, run in enumerate(runs):
        try:
            _rank_result(run) if run in done else None
        except ActorLost as lost:
            errors.append((0, TrimtabError(f"trainer rank {rank} was lost ({lost}): {RESUME}")))
        except TrimtabError as user_error:
            errors.append((1, user_error))
        except Stopped:
            continue  # because another rank failed
        except RayTaskError as unexpected:
            errors.append((2, unexpected))
    return min(errors, key=lambda entry: entry[0])[1] if errors else error


class EventBuffer(NullObserver):
    """An observer that stores events until the driver polls them. Of consecutive phases, it stores only the newest.

    It ignores `finished`, which the process that writes the report calls on its own observer.
    """

    def __init__(self) -> None:
        self._pending: list[Event] = []
        self._changed = threading.Condition()

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:
        self._append("started", config, equation, total_steps, run)

    def phase(self, name: str, done: int, total: int) -> None:
        self._append("phase", name, done, total)

    def step(self, metrics: Mapping[str, float | str]) -> None:
        self._append("step", metrics)

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        self._append("evaluated", task, moment, value)

    def message(self, text: str) -> None:
        self._append("message", text)

    def poll(self, timeout: float) -> list[Event]:
        """Returns all events since the last call; waits `timeout` seconds for the first."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pending), timeout)
            events, self._pending = self._pending, []
        return events

    def _append(self, *event: Any) -> None:
        with self._changed:
            if event[0] == "phase" and self._pending and self._pending[-1][0] == "phase":
                self._pending.pop()
            self._pending.append(event)
            self._changed.notify_all()


def replay_events(events: Iterable[Event], observer: Observer) -> None:
    """Calls `observer` with polled events, in order."""
    for name, *arguments in events:
        getattr(observer, name)(*arguments)


class TrainerRank:
    """The actor of one trainer rank. Rank 0 also has the data side of the run: engines, rewards, the run directory."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._events, self._stop = EventBuffer(), Stop()

    def address(self) -> tuple[str, int]:
        """Returns a rendezvous address for the ranks: this node, and a port that was free just now."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def train(
        self,
        config: Config,
        folder: str,
        out: Path,
        resume: bool,
        rendezvous: tuple[str, int],
        slots: ActorSlots,
        command: str,
    ) -> dict[str, Any] | int:
        """Trains to the end; returns the metrics of the last step, or the number of the signal that stopped the run.

        `command` is the command line of the driver. Raises what `trimtab.trainer.run.train` raises, except `Stopped`.
        """
        try:
            use_working_directory(folder)
            # As torchrun would set them. An actor sees only its own device, so its local rank is 0.
            os.environ |= {
                "RANK": str(self._rank),
                "WORLD_SIZE": str(self._ranks),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": rendezvous[0],
                "MASTER_PORT": str(rendezvous[1]),
            }
            torch.set_num_threads(slots.trainers[self._rank].threads)

            def engines(config: Config, loaded: LoadedModel, files: Path) -> Sequence[Engine]:  # noqa: ARG001
                return build_engines(config, files, slots.engines)

            result = train_rank(
                config,
                out=out,
                resume=resume,
                observer=self._events if self._rank == 0 else NullObserver(),
                engines=engines if slots.engines else None,
                stop=self._stop,
                command=command,
            )
        except Stopped as stop:  # Ray would replace the exception, a `KeyboardInterrupt`, by its own
            return stop.signal
        return result.metrics

    def poll_events(self, timeout: float) -> list[Event]:
        """Returns the events since the last call (see `EventBuffer.poll`)."""
        return self._events.poll(timeout)

    def stop(self, number: int) -> None:
        """Ends the run after the step in progress, like signal `number`."""
        self._stop.request(number)
