"""The first sign of a collapse in the steps of a run, and the newest policy still to be trusted. Pure functions."""

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
"""Alarm of the monitor that is a sign of a collapse -> what it watches."""
LEVEL_99 = 2.576
"""Standard errors of a 99% interval; 99%, because every evaluation is compared with the best one so far."""


class Evaluation(NamedTuple):
    """Accuracy on `problems` held-out problems after `step` steps."""

    step: int
    accuracy: float
    problems: float


class Sign(NamedTuple):
    """A sign of a collapse."""

    watched: Watched  # what was judged
    name: str  # the rule
    text: str  # what the rule found
    healthy: int  # the newest step whose policy is not in doubt; 0: the policy before training


def first_sign(steps: Sequence[Step], on: Collection[str]) -> Sign | None:
    """Returns the first watched alarm that the last of the steps raises, as a sign, or None.

    A rule needs up to `WINDOW` steps to see a fault, so policies are trusted up to `WINDOW` steps before the sign. An
    alarm raised at every step that its rule could judge comes from the setup, not from training, and is left out.
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
    """Returns the steps of the snapshots that a return may need.

    They are the snapshots after step `trusted` at multiples of `every`, because not every rule has judged these steps;
    the last one up to `trusted`; and the last one up to each of the `others`. If there is none, the oldest is needed.
    """
    newest = {step for step in snapshots if step > trusted and step % every == 0}
    oldest = min(snapshots, default=0)
    return newest | {max((step for step in snapshots if step <= at), default=oldest) for at in (trusted, *others)}


def _since_the_start(name: str, steps: Sequence[Step]) -> bool:
    """Returns whether every step that the rule could judge raised the alarm `name`; False after `WINDOW` steps."""
    if len(steps) > WINDOW:
        return False
    judged = (alarms(steps[: count + 1]) for count in range(RECENT - 1, len(steps)))
    return all(any(alarm.name == name for alarm in found) for found in judged)


def accuracy_falls(evaluations: Sequence[Evaluation]) -> Sign | None:
    """Returns a sign if the last evaluation is below the best: the fall's 99% interval (Newcombe 1998) excludes 0."""
    best, last = max(evaluations, key=lambda one: one.accuracy), evaluations[-1]
    if not least_fall(best.accuracy, last.accuracy, last.problems, LEVEL_99) > 0:
        return None
    detail = (
        f"{last.accuracy:.2f} on {last.problems:.0f} held-out problems after step {last.step}, "
        f"{best.accuracy:.2f} after step {best.step}"
    )
    return Sign("reward", "accuracy", detail, best.step)
