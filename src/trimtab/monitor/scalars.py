"""The scalars that a run of any framework logged, under common names, judged by the rules of the monitor.

Scalars are means over all trained tokens of a step: they show that a mismatch grows or jumps, not in which tokens, and
so not why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.monitor.alarms import DIAGNOSE, RULES, Alarm, Step, first_alarms
from trimtab.monitor.contradictions import Contradiction, contradictions
from trimtab.monitor.curves import K3, Curve, Row, best_mismatch, curves_of, known_scalars

METRICS = {
    "k3": "mismatch/k3",
    "ess_token": "mismatch/ess_token",
    "grad_norm": "grad_norm",
    "length": "response/length",
    "truncated": "response/truncated",
    "age": "age",
    "reward": "reward/mean",
}
"""Names of quantities in the rules of the monitor."""


@dataclass(frozen=True)
class Restart:
    """A step counter that went back. before, after: k3 of the step before it and of the first one after it."""

    step: int
    before: float
    after: float


@dataclass(frozen=True)
class ScalarReport:
    """What the scalars of a run show. mismatch: the curve that k3 was taken from; None if none measures it."""

    framework: str
    steps: int
    mismatch: Curve | None
    curves: tuple[Curve, ...]
    alarms: tuple[Alarm, ...]
    restarts: tuple[Restart, ...]
    contradictions: tuple[Contradiction, ...] = ()

    @property
    def not_judged(self) -> str:
        """Says that all or some of the rules for what is logged need more steps; empty where all were asked."""
        names = {"mismatch/k3"} if self.mismatch else set()
        names |= {METRICS[one.scalar.quantity] for one in self.curves if one.scalar.quantity in METRICS}
        needed = [rule.steps for rule in RULES if rule.metric in names]
        if not needed:
            return "no rule judges what is logged"
        least, most = min(needed), max(needed)
        if self.steps >= most:
            return ""
        some = "" if self.steps < least else " by every rule"
        span = f"{least}" if least == most else f"{least} to {most}"
        return f"too few steps to judge{some} ({self.steps}, the rules need {span})"


def without_sample(alarm: Alarm) -> Alarm:
    """Returns an alarm whose advice asks for log-probs, where no monitor has kept a sample of them."""
    advice = alarm.next_step.replace(DIAGNOSE, "run `trimtab diagnose` on log-probs of these steps")
    return replace(alarm, next_step=advice)


def judge(rows: Sequence[Row]) -> ScalarReport:
    """Returns the known scalars of a run and the alarms that `Monitor` would have raised.

    Without a scalar of the mismatch, length, truncation, reward and gradient norm are judged. Raises `TrimtabError`
    where no scalar is known.
    """
    framework, curves = curves_of(rows)
    mismatch = best_mismatch(curves)
    if not curves:
        known = sorted({f"{s.name} ({s.framework})" for s in known_scalars() if s.quantity in K3})
        raise TrimtabError(f"no scalar is known; those that measure the mismatch are {', '.join(known)}")
    names = metric_names(curves)
    steps = [step for row in rows if (step := step_of(row, mismatch, names)) is not None]
    restarts = tuple(
        Restart(after.number, before["mismatch/k3"], after["mismatch/k3"])
        for before, after in pairwise(steps)
        if mismatch is not None and after.number <= before.number
    )
    alarms = tuple(map(without_sample, first_alarms(steps)))
    excluded = tuple(contradictions(rows, curves))
    return ScalarReport(framework, len(steps), mismatch, curves, alarms, restarts, excluded)


def metric_names(curves: Iterable[Curve]) -> dict[str, str]:
    """Returns the names of the monitor's rules by logged name."""
    return {one.logged_as: METRICS[one.scalar.quantity] for one in curves if one.scalar.quantity in METRICS}


def run_metrics() -> dict[str, str]:
    """Returns the names of the monitor's rules by those of the metrics of a run of this package."""
    table = (scalar for scalar in known_scalars() if scalar.framework == "trimtab")
    return {scalar.name: METRICS[scalar.quantity] for scalar in table if scalar.quantity in METRICS}


def steps_of(rows: Iterable[Mapping[str, Any]]) -> list[Step]:
    """Returns rows of a run's metrics in the names of the rules. A number that is missing or null is left out."""
    names = run_metrics().items()
    return [
        Step(row["step"], {ours: row[key] for key, ours in names if row.get(key) is not None}, None) for row in rows
    ]


def step_of(row: Row, mismatch: Curve | None, names: Mapping[str, str]) -> Step | None:
    """Returns a row in the names of the monitor's rules, which are `names` by logged name.

    None where the mismatch, or without one every metric of the rules, is missing or not finite.
    """
    metrics = {name: row[logged] for logged, name in names.items() if logged in row}
    if mismatch is not None:
        metrics["mismatch/k3"] = K3[mismatch.scalar.quantity][1](row.get(mismatch.logged_as, math.nan))
    needed = metrics.values() if mismatch is None else [metrics["mismatch/k3"]]
    return Step(int(row["step"]), metrics, None) if any(map(math.isfinite, needed)) else None
