"""The driver of a cluster run: reserves resources, starts the ranks, shows their events, cleans up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trimtab.cluster.actors import ActorLost, ask, end
from trimtab.cluster.placement_group import ActorSlots, connected, reserved
from trimtab.cluster.trainer_actor import DIVERGED, TrainerRank, replay
from trimtab.config import Config
from trimtab.errors import RESUME, DivergedError, Stopped, TrimtabError
from trimtab.runs import provenance
from trimtab.runs.layout import CONFIG
from trimtab.training.observer import NullObserver, Observer
from trimtab.training.ranks import several
from trimtab.training.run import RunResult, check
from trimtab.training.stop import Stop

NEWS = 1.0  # seconds one look for news lasts at most
NOTICE = 15.0  # seconds the other ranks of a failed one have to fail as well


def train(
    config: Config, *, out: Path | str | None = None, resume: bool = False, observer: Observer | None = None
) -> RunResult:
    """Train as `config` says on the Ray cluster of `config.ray`.

    Everything else is as in `trimtab.training.run.train`. The run directory is written by the first rank, on its node:
    it must lie where this process sees it too.

    Raises:
        TrimtabError: for anything a user can mend, a rank that died among it.
        Stopped: by Ctrl-C or SIGTERM, of which the first waits for the step in progress and its checkpoint.
    """
    if several():
        raise TrimtabError('placement = "ray" starts the ranks itself: leave torchrun out and set ray.trainers')
    watcher, run = observer or NullObserver(), Path(out or config.out or "runs/run").resolve()
    check(config).scorer.close()
    stop = Stop()
    with stop.signals(), connected(config.ray), reserved(config) as seats, _started(seats) as ranks:
        meeting = _meeting(ranks[0], config.ray.start_timeout)
        arguments = (config.dump(), str(Path.cwd()), str(run), resume, meeting, seats, provenance.command())
        runs = [rank.train.remote(*arguments) for rank in ranks]
        with stop.finishing():
            metrics = _follow(ranks, runs, watcher, config, run, stop)
    return RunResult(run, metrics)


@contextmanager
def _started(seats: ActorSlots) -> Iterator[list[Any]]:
    """The ranks. At the end they are killed whatever they do, and with rank 0 the actors it started."""
    ranks: list[Any] = []
    try:
        ranks += [seat.start(TrainerRank, rank, len(seats.trainers)) for rank, seat in enumerate(seats.trainers)]
        yield ranks
    finally:
        for rank in ranks:
            end(rank)


def _meeting(first: Any, patience: float) -> tuple[str, int]:
    try:
        return ask(first.address.remote(), patience)
    except ActorLost as lost:
        raise TrimtabError(f"the first trainer rank did not start ({lost}): look at the cluster's logs") from None


def _follow(
    ranks: list[Any], runs: list[Any], observer: Observer, config: Config, run: Path, stop: Stop
) -> dict[str, Any]:
    """Show the first rank's news until all ranks are done; returns its metrics of the last step."""
    import ray
    from ray.exceptions import RayTaskError

    first, told, stopped = ranks[0], False, None
    left, news = list(runs), first.news.remote(NEWS)
    try:
        while left:
            if stop.asked is not None and not told:
                told = True
                for rank in ranks:
                    rank.stop.remote(stop.asked)
            (ready, *_), _ = ray.wait([news, *left], num_returns=1)
            if ready == news:
                _show(ask(news), observer, config, run)
                news = first.news.remote(NEWS)
            else:
                left.remove(ready)
                try:
                    _metrics(ready)
                except Stopped as error:
                    stopped = error  # the first rank may still be writing the checkpoint
        if stopped is not None:
            raise stopped
        _show(ask(first.news.remote(0.0)), observer, config, run)
        return _metrics(runs[0])
    except Stopped:
        _show(ask(first.news.remote(0.0)), observer, config, run)
        raise
    except (TrimtabError, ActorLost, RayTaskError) as error:
        cause = _cause(runs, error)
        with suppress(ActorLost):
            replay(ask(first.news.remote(0.0), NOTICE), observer, config)
        raise cause from None


def _show(news: str, observer: Observer, config: Config, run: Path) -> None:
    if replay(news, observer, config) and not (run / CONFIG).is_file():
        raise TrimtabError(
            f"the first rank writes {run} where this machine does not see it: choose an --out on a file system that "
            "all nodes share"
        )


def _metrics(finished: Any) -> dict[str, Any]:
    """Of a rank that is done. Raises what it failed of."""
    answer = json.loads(ask(finished))
    if "stopped" in answer:
        raise Stopped(answer["stopped"])
    if "error" in answer:
        raise (DivergedError if answer["error"] == DIVERGED else TrimtabError)(answer["line"])
    return answer["metrics"]


def _cause(runs: list[Any], error: Exception) -> Exception:
    """What to tell when a rank failed: those that wait for it fail as well, in other words and perhaps before it.

    Which rank was lost comes first, then what a rank says in a line of its own, then whatever else was raised.
    """
    import ray
    from ray.exceptions import RayTaskError

    found: list[tuple[int, Exception]] = []
    done, _ = ray.wait(runs, num_returns=len(runs), timeout=NOTICE)
    for rank, run in enumerate(runs):
        try:
            _metrics(run) if run in done else None
        except ActorLost as lost:
            found.append((0, TrimtabError(f"trainer rank {rank} was lost ({lost}): {RESUME}")))
        except TrimtabError as told:
            found.append((1, told))
        except Stopped:
            continue  # because another one failed
        except RayTaskError as unexpected:
            found.append((2, unexpected))
    return min(found, key=lambda entry: entry[0])[1] if found else error
