"""The training loop as a pipeline: step time, idle time, and age of tokens.

    engines: take the newest weights, write batch m  ->  rewards: score it  ->  trainer: update, publish version m + 1

`ahead` is how many batches the engines may be ahead of the weights: batch m is begun with weights of at least m - ahead
steps (`trainer.max_lag` = ahead x updates of a step). The trainer publishes after every step; engines take the newest
weights between batches. With 0 every batch waits for the step before it, and the phases take turns.

Three machines and one loop around them bound the time of a step from below, and the largest bound is reached (the
longest mean cycle of a system of such delays, as in max-plus algebra):

    step = max(engines, rewards, trainer, (engines + rewards + trainer) / (ahead + 1))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.errors import TrimtabError

# Steps until transients are gone, and steps looked at: phases are constant, so what follows repeats.
_SETTLE, _LOOK = 200, 400


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one step. `load`: engines taking weights; `publish`: the trainer giving them."""

    generate: float
    train: float
    score: float = 0.0
    publish: float = 0.0
    load: float = 0.0

    @property
    def engines(self) -> float:
        return self.load + self.generate

    @property
    def trainer(self) -> float:
        return self.train + self.publish

    @property
    def in_turn(self) -> float:
        """A step without overlap."""
        return self.engines + self.score + self.trainer

    @property
    def ideal(self) -> float:
        """A step in which everything overlaps."""
        return max(self.engines, self.score, self.trainer)


@dataclass(frozen=True, slots=True)
class Cycle:
    """A step in the steady state: its seconds, the share of them each side works, and the age of tokens in steps."""

    seconds: float
    engines: float
    trainer: float
    lag_mean: float
    lag_max: int


def cycle(phases: Phases, ahead: int) -> Cycle:
    """The steady state of the loop with engines at most `ahead` steps ahead."""
    seconds = max(phases.ideal, phases.in_turn / (ahead + 1))
    lags = _lags(phases, ahead)
    busy = (part / seconds if seconds else 0.0 for part in (phases.engines, phases.trainer))
    return Cycle(seconds, *busy, lag_mean=sum(lags) / len(lags), lag_max=max(lags))


def enough_ahead(phases: Phases) -> int:
    """The smallest lead with which nothing but the slowest phase is waited for."""
    if not phases.ideal:
        return 0
    return math.ceil(phases.in_turn / phases.ideal - 1 - 1e-9)


def lead(max_lag: int | None, updates: int, phases: Phases) -> int:
    """How many steps engines may be ahead under `max_lag` updates; None: as many as are needed."""
    if max_lag is None:
        return enough_ahead(phases)
    if 0 < max_lag < updates:
        raise TrimtabError(
            f"--max-lag {max_lag} is less than the {updates} updates of a step: nothing could be generated beside "
            f"training; give {updates} or more, or 0"
        )
    return max_lag // updates


def _lags(phases: Phases, ahead: int) -> list[int]:
    """Age, in steps, of every batch when it is consumed, once the loop has settled."""
    published = [0.0]  # when the weights after so many steps were out
    newest, written, scored = 0, 0.0, 0.0
    lags = []
    for batch in range(_SETTLE + _LOOK):
        begun = max(written, published[max(0, batch - ahead)])
        while newest + 1 < len(published) and published[newest + 1] <= begun:
            newest += 1
        written = begun + phases.engines
        scored = max(written, scored) + phases.score
        published.append(max(published[batch], scored) + phases.trainer)
        lags.append(batch - newest)
    return lags[_SETTLE:]
