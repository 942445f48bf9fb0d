"""Models the training loop as a pipeline and computes step time, utilization, and age of tokens.

    engines: load the newest weights, sample batch m  ->  rewards: score it  ->  trainer: update, publish version m + 1

`ahead` is the number of batches the engines may be ahead of the weights: batch m starts with weights of at least
m - ahead steps (`trainer.max_lag` = ahead x updates per step). The trainer publishes after every step; engines load the
newest weights between batches. With ahead = 0 every batch waits for the previous step: the phases run in turn.

The time of a step is bounded from below by each of the three stages and by the loop through all of them, and equals the
largest bound (the maximum cycle mean of the system in max-plus algebra):

    step = max(engines, rewards, trainer, (engines + rewards + trainer) / (ahead + 1))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.errors import TrimtabError

# Simulated steps until the steady state, and steps measured; phases are constant, so the schedule is periodic.
_WARMUP_STEPS, _MEASURED_STEPS = 200, 400


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one step by phase. publish: the trainer writes weights. load: engines read them."""

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
        """Seconds of a step without overlap."""
        return self.engines + self.score + self.trainer

    @property
    def ideal(self) -> float:
        """Seconds of a step with complete overlap."""
        return max(self.engines, self.score, self.trainer)


@dataclass(frozen=True, slots=True)
class Cycle:
    """A step in the steady state: seconds, utilization of engines and trainer, and age of tokens in steps."""

    seconds: float
    engines: float
    trainer: float
    lag_mean: float
    lag_max: int


def steady_cycle(phases: Phases, ahead: int) -> Cycle:
    """Returns the steady state with engines at most `ahead` steps ahead."""
    seconds = max(phases.ideal, phases.in_turn / (ahead + 1))
    lags = _lags(phases, ahead)
    busy = (part / seconds if seconds else 0.0 for part in (phases.engines, phases.trainer))
    return Cycle(seconds, *busy, lag_mean=sum(lags) / len(lags), lag_max=max(lags))


def sufficient_steps_ahead(phases: Phases) -> int:
    """Returns the smallest number of steps ahead at which the slowest stage alone determines the step time."""
    if not phases.ideal:
        return 0
    return math.ceil(phases.in_turn / phases.ideal - 1 - 1e-9)


def steps_ahead(max_lag: int | None, updates: int, phases: Phases) -> int:
    """Returns the number of steps engines may be ahead under `max_lag` updates; with None the smallest sufficient one.

    Raises `TrimtabError` for a `max_lag` above 0 and below the updates of a step.
    """
    if max_lag is None:
        return sufficient_steps_ahead(phases)
    if 0 < max_lag < updates:
        raise TrimtabError(
            f"--max-lag {max_lag} is less than the {updates} updates of a step: nothing could be generated during "
            f"training; give {updates} or more, or 0"
        )
    return max_lag // updates


def _lags(phases: Phases, ahead: int) -> list[int]:
    """Returns the age in steps of every batch when it is consumed, in the steady state."""
    published = [0.0]  # time at which the weights after this number of steps are published
    newest, generated, scored = 0, 0.0, 0.0
    lags = []
    for batch in range(_WARMUP_STEPS + _MEASURED_STEPS):
        started = max(generated, published[max(0, batch - ahead)])
        while newest + 1 < len(published) and published[newest + 1] <= started:
            newest += 1
        generated = started + phases.engines
        scored = max(generated, scored) + phases.score
        published.append(max(published[batch], scored) + phases.trainer)
        lags.append(batch - newest)
    return lags[_WARMUP_STEPS:]
