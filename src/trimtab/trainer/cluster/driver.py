"""The driver of a cluster run: reserves resources, starts the ranks, shows their events, cleans up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trimtab.errors import RESUME, DivergedError, Stopped, TrimtabError
from trimtab.runs import provenance
from trimtab.runs.layout import CONFIG
from trimtab.trainer.cluster.actors import ActorLost, get_result, kill_actor
from trimtab.trainer.cluster.placement_group import ActorSlots, connect, reserve_slots
from trimtab.trainer.cluster.trainer_actor import DIVERGED, TrainerRank, replay_events
from trimtab.trainer.config import Config
from trimtab.trainer.observer import NullObserver, Observer
from trimtab.trainer.ranks import launched_by_torchrun
from trimtab.trainer.run import TrainResult, check
from trimtab.trainer.stop import Stop

POLL_TIMEOUT = 1.0  # seconds that one poll for events waits at most
FAILURE_WINDOW = 15.0  # seconds to wait for the other ranks after one has failed


def train(
    config: Config, *, out: Path | str | None = None, resume: bool = False, observer: Observer | None = None
) -> TrainResult:
    """Trains on the Ray cluster of `config.ray`; otherwise the same as `trimtab.trainer.run.train`.

    The run directory is written by the first rank on its node, and must be visible to this process.

    Raises:
        TrimtabError: errors that the user can correct, including a rank that died.
        Stopped: by Ctrl-C or SIGTERM, after the step in progress and its checkpoint.
    """
    if launched_by_torchrun():
        raise TrimtabError('placement = "ray" starts the ranks itself: leave torchrun out and set ray.trainers')
    observer, run = observer or NullObserver(), Path(os.path.realpath(out or config.out or "runs/run"))
    check(config).close()
    stop = Stop()
    with stop.signals(), connect(config.ray), reserve_slots(config) as slots, _start_ranks(slots) as ranks:
        rendezvous = _rendezvous_address(ranks[0], config.ray.start_timeout)
        arguments = (config.dump(), str(Path.cwd()), str(run), resume, rendezvous, slots, provenance.command())
        runs = [rank.train.remote(*arguments) for rank in ranks]
        with stop.finishing():
            metrics = _wait_for_ranks(ranks, runs, observer, config, run, stop)
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


def _rendezvous_address(first: Any, timeout: float) -> tuple[str, int]:
    try:
        return get_result(first.address.remote(), timeout)
    except ActorLost as lost:
        raise TrimtabError(f"the first trainer rank did not start ({lost}): see the cluster's logs") from None


def _wait_for_ranks(
    ranks: list[Any], runs: list[Any], observer: Observer, config: Config, run: Path, stop: Stop
) -> dict[str, Any]:
    """Waits for all ranks while showing events of the first; returns the metrics of its last step."""
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
                _show_events(get_result(events), observer, config, run)
                events = first.poll_events.remote(POLL_TIMEOUT)
            else:
                running.remove(ready)
                try:
                    _rank_result(ready)
                except Stopped as error:
                    stopped = error  # the first rank may still be writing the checkpoint
        if stopped is not None:
            raise stopped
        _show_events(get_result(first.poll_events.remote(0.0)), observer, config, run)
        return _rank_result(runs[0])
    except Stopped:
        _show_events(get_result(first.poll_events.remote(0.0)), observer, config, run)
        raise
    except (TrimtabError, ActorLost, RayTaskError) as error:
        cause = _first_cause(runs, error)
        with suppress(ActorLost):
            replay_events(get_result(first.poll_events.remote(0.0), FAILURE_WINDOW), observer, config)
        raise cause from None


def _show_events(events: str, observer: Observer, config: Config, run: Path) -> None:
    """Replays events on `observer`. Raises `TrimtabError` if the run directory is not visible to this machine."""
    if replay_events(events, observer, config) and not (run / CONFIG).is_file():
        raise TrimtabError(
            f"the first rank writes {run}, which this machine does not see: choose an --out on a file system that all "
            "nodes share"
        )


def _rank_result(finished: Any) -> dict[str, Any]:
    """Returns the last metrics of a finished rank, or raises its error."""
    result = json.loads(get_result(finished))
    if "stopped" in result:
        raise Stopped(result["stopped"])
    if "error" in result:
        raise (DivergedError if result["error"] == DIVERGED else TrimtabError)(result["line"])
    return result["metrics"]


def _first_cause(runs: list[Any], error: Exception) -> Exception:
    """Returns the error to report after a rank failed: ranks that wait for it fail too, possibly before it does.

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
