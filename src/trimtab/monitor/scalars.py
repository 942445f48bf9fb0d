"""The scalars that a run of any framework logged, under common names, judged by the rules of the monitor.

Scalars are means over all trained tokens of a step: they show that a mismatch grows or jumps, not in which tokens, and
so not why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.monitor.alarms import DIAGNOSE, RULES, WINDOW, Alarm, Step, first_alarms
from trimtab.monitor.curves import (
    K3,
    Contradiction,
    Curve,
    Row,
    best_mismatch,
    contradictions,
    curves_of,
    known_scalars,
)
from trimtab.text import short

METRICS = {
    "k3": "mismatch/k3",
    "ess_token": "mismatch/ess_token",
    "grad_norm": "grad_norm",
    "length": "response/length",
    "truncated": "response/truncated",
    "age": "age",
    "reward": "reward/mean",
}
"""Quantity -> name of its metric in the rules of the monitor."""
LIMITS = (
    "Scalars are means over the tokens of a step: they show when a mismatch grew, not in which tokens and not why. "
    "`trimtab diagnose` names the cause from the log-probs of a few thousand tokens."
)
HOW = {
    "trl": "with use_vllm=True",
    "verl": "with actor_rollout_ref.rollout.calculate_log_probs=True",
    "miles": "with --get-mismatch-metrics",
    "slime": "with --get-mismatch-metrics",
}
"""Framework -> how to make it log the mismatch, if it does not always do so."""


@dataclass(frozen=True)
class Restart:
    """A step at which the step counter went back."""

    step: int
    before: float  # k3 of the step before
    after: float  # k3 of this step


@dataclass(frozen=True)
class ScalarReport:
    """What the scalars of a run show."""

    framework: str
    steps: int
    mismatch: Curve | None  # the curve from which k3 was computed; None if no scalar measures the mismatch
    curves: tuple[Curve, ...]
    alarms: tuple[Alarm, ...]
    restarts: tuple[Restart, ...]
    contradictions: tuple[Contradiction, ...] = ()

    @property
    def not_judged(self) -> str:
        """A sentence if some rules for the logged metrics, or all, need more steps; empty if all rules were applied."""
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
    """Returns the alarm with advice to collect log-probs, because no monitor has kept a sample of them."""
    advice = alarm.next_step.replace(DIAGNOSE, "run `trimtab diagnose` on log-probs of these steps")
    return replace(alarm, next_step=advice)


def judge(rows: Sequence[Row]) -> ScalarReport:
    """Returns the known scalars of a run and the alarms that `Monitor` would have raised.

    If no scalar measures the mismatch, only length, truncation, reward and gradient norm are judged. Raises
    `TrimtabError` if no scalar is known.
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
    """Returns logged name -> name of the metric in the monitor's rules."""
    return {one.logged_as: METRICS[one.scalar.quantity] for one in curves if one.scalar.quantity in METRICS}


def run_metrics() -> dict[str, str]:
    """Returns name of a metric in a run of Trimtab's trainer -> its name in the monitor's rules."""
    table = (scalar for scalar in known_scalars() if scalar.framework == "trimtab")
    return {scalar.name: METRICS[scalar.quantity] for scalar in table if scalar.quantity in METRICS}


def steps_of(rows: Iterable[Mapping[str, Any]]) -> list[Step]:
    """Returns the rows of a run's metrics as steps, with the names of the rules. Null values are left out."""
    names = run_metrics().items()
    return [
        Step(row["step"], {ours: row[key] for key, ours in names if row.get(key) is not None}, None) for row in rows
    ]


def step_of(row: Row, mismatch: Curve | None, names: Mapping[str, str]) -> Step | None:
    """Returns a row as a step of the monitor's rules. names: logged name -> name in these rules.

    Returns None if the mismatch is missing or not finite; without a mismatch curve, if this holds for every metric.
    """
    metrics = {name: row[logged] for logged, name in names.items() if logged in row}
    if mismatch is not None:
        metrics["mismatch/k3"] = K3[mismatch.scalar.quantity][1](row.get(mismatch.logged_as, math.nan))
    needed = metrics.values() if mismatch is None else [metrics["mismatch/k3"]]
    return Step(int(row["step"]), metrics, None) if any(map(math.isfinite, needed)) else None


def terminal_lines(report: ScalarReport, read: Path) -> Iterator[str]:
    """Yields the lines of the terminal. read: where the scalars come from."""
    yield f"read      {read}"
    yield f"scalars   {report.framework}, {report.steps} steps; medians of the first and of the last {WINDOW} steps"
    for curve in report.curves:
        values = f"{curve.first:>9.3g} -> {curve.last:<9.3g}"
        relation = K3.get(curve.scalar.quantity, ("", None))[0]
        meaning = "; ".join(filter(None, (curve.scalar.formula, relation, curve.scalar.note)))
        yield f"  {curve.scalar.quantity:<19} {values} {curve.logged_as}: {meaning}"
    for restart in report.restarts:
        yield f"restart   at step {restart.step}: k3 {short(restart.before)} before, {short(restart.after)} after"
    for curve in report.curves:
        if curve.not_finite:
            steps = f"{curve.not_finite} of {curve.not_finite + len(curve.values)} steps"
            end = ", the last among them" if curve.ends_not_finite else ", which are left out"
            yield f"{'fail' if curve.ends_not_finite else 'note':<9} {curve.logged_as} is not finite at {steps}{end}"
    yield from (f"fail      {found.text}" for found in report.contradictions)
    yield from (f"missing   {text}" for text in missing(report))
    if report.mismatch is not None and not any(report.mismatch.values):
        yield f"note      {report.mismatch.logged_as} is 0 at every step: both sides are equal, or it was not measured"
    for alarm in report.alarms:
        yield f"{alarm.status:<9} step {alarm.step}: {alarm.name}: {alarm.text}"
    if report.not_judged:
        yield f"note      {report.not_judged}"
    elif not report.alarms and not report.contradictions and not any(curve.ends_not_finite for curve in report.curves):
        yield "ok        no alarm"
    yield f"limits    {LIMITS}"


def missing(report: ScalarReport) -> list[str]:
    """Returns what could not be judged, and under which names the framework logs it."""
    framework, found = report.framework, {curve.scalar.quantity for curve in report.curves}
    table = [scalar for scalar in known_scalars() if scalar.framework == framework]
    names = {scalar.quantity: scalar.name for scalar in reversed(table)}
    texts = []
    if report.mismatch is None:
        name = next((names[quantity] for quantity in K3 if quantity in names), "")
        logs = f"{framework} logs it as {name} {HOW.get(framework, '')}".rstrip() + "; " if name else ""
        texts = [f"no scalar measures the mismatch of trainer and sampler: {logs}`trimtab.Monitor` does in any trainer"]
    absent = [f"{one} ({names[one]})" for one in ("length", "truncated", "grad_norm") if one in {*names} - found]
    return texts + ([f"not judged, because it is not logged: {', '.join(absent)}"] if absent else [])


def as_dict(report: ScalarReport, read: Path) -> dict[str, Any]:
    """Returns plain values, for JSON."""
    return {
        "read": str(read),
        "framework": report.framework,
        "steps": report.steps,
        "k3_from": None if report.mismatch is None else report.mismatch.logged_as,
        "not_judged": report.not_judged,
        "missing": missing(report),
        "scalars": [
            {
                **asdict(curve.scalar),
                "name": curve.logged_as,
                "first": curve.first,
                "last": curve.last,
                "not_finite": curve.not_finite,
                "ends_not_finite": curve.ends_not_finite,
            }
            for curve in report.curves
        ],
        "restarts": [asdict(restart) for restart in report.restarts],
        "alarms": [asdict(alarm) for alarm in report.alarms],
        "contradictions": [asdict(found) | {"text": found.text} for found in report.contradictions],
        "limits": LIMITS,
    }
