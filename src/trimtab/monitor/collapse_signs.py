"""The first sign of a collapse in the steps of a run, and how far back its policy may be trusted. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from trimtab.intervals import least_fall
from trimtab.monitor.alarms import RECENT, WINDOW, Step, alarms

Watched = Literal["reward", "ess", "length", "mismatch", "nonfinite"]

WATCHED: dict[str, Watched] = {
    "reward-collapse": "reward",
    "ess": "ess",
    "truncation": "length",
    "length": "length",
    "k3-large": "mismatch",
    "undelivered": "mismatch",
}
"""Alarms of the monitor that are a sign, and what is watched by them."""
LEVEL_99 = 2.576
"""Standard errors of a 99% interval: every evaluation is compared with the best one so far."""


class Evaluation(NamedTuple):
    """Accuracy on `problems` held-out problems after `step` steps."""

    step: int
    accuracy: float
    problems: float


class Sign(NamedTuple):
    """A sign of a collapse: what was judged, the name of the rule, and what it found.

    healthy: the newest step whose policy it does not put in doubt; 0: the policy before training.
    """

    watched: Watched
    name: str
    text: str
    healthy: int


def first_sign(steps: Sequence[Step], on: Collection[str]) -> Sign | None:
    """Returns the first alarm at the last of the steps that is watched.

    Its rule needs up to `WINDOW` steps to see anything, so that policies are trusted up to `WINDOW` steps before. An
    alarm that holds since the first step that its rule can judge is of the setup, not of training: it is left out.
    """
    for alarm in alarms(steps):
        watched = WATCHED.get(alarm.name)
        if watched is None or watched not in on or _since_the_start(alarm.name, steps):
            continue
        return Sign(watched, alarm.name, alarm.detail, trusted_step(steps))
    return None


def trusted_step(steps: Sequence[Step]) -> int:
    """Returns the newest step that every rule has had the time to judge; 0 if there is none."""
    return steps[-1 - WINDOW].number if len(steps) > WINDOW else 0


def needed_snapshots(snapshots: Sequence[int], trusted: int, *others: int, every: int = 1) -> set[int]:
    """Returns the steps of those snapshots that a return may need.

    These are the ones after the `trusted` step, which not every rule has had the time to judge, at multiples of
    `every`, the last one before them, and the last one before each of the `others`; the oldest one where none is.
    """
    newest = {step for step in snapshots if step > trusted and step % every == 0}
    oldest = min(snapshots, default=0)
    return newest | {max((step for step in snapshots if step <= at), default=oldest) for at in (trusted, *others)}


def _since_the_start(name: str, steps: Sequence[Step]) -> bool:
    """Whether each prefix of the steps that the rule can judge raises the alarm `name`."""
    if len(steps) > WINDOW:
        return False
    judged = (alarms(steps[: count + 1]) for count in range(RECENT - 1, len(steps)))
    return all(any(alarm.name == name for alarm in found) for found in judged)


def accuracy_falls(evaluations: Sequence[Evaluation]) -> Sign | None:
    """The last evaluation is below the best one: the 99% interval of the difference excludes 0 (Newcombe 1998)."""
    best, last = max(evaluations, key=lambda one: one.accuracy), evaluations[-1]
    if not least_fall(best.accuracy, last.accuracy, last.problems, LEVEL_99) > 0:
        return None
    detail = (
        f"{last.accuracy:.2f} on {last.problems:.0f} held-out problems after step {last.step}, "
        f"{best.accuracy:.2f} after step {best.step}"
    )
    return Sign("reward", "accuracy", detail, best.step)
