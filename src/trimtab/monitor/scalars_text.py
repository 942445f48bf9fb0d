"""What the scalars of a run show, as lines of text and as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from trimtab.monitor.alarms import WINDOW
from trimtab.monitor.scalars import K3, Curve, ScalarReport

LIMITS = (
    "Scalars are means over the tokens of a step: they show when a mismatch grew, not in which tokens and not why. "
    "`trimtab diagnose` names the cause from the log-probs of a few thousand tokens."
)


def lines(report: ScalarReport) -> Iterator[str]:
    """Yields the lines of the terminal."""
    yield f"scalars   {report.framework}, {report.steps} steps; medians of the first and of the last {WINDOW} steps"
    for curve in report.curves:
        values = f"{curve.first:>9.3g} -> {curve.last:<9.3g}"
        yield f"  {curve.scalar.quantity:<19} {values} {curve.logged_as}: {_meaning(curve)}"
    for restart in report.restarts:
        yield f"restart   at step {restart.step}: k3 {restart.before:.1e} before, {restart.after:.1e} after"
    for curve in report.curves:
        if curve.not_finite:
            yield f"note      {curve.logged_as} is not finite at {curve.not_finite} steps, which are left out"
    if not any(report.mismatch.values):
        yield f"note      {report.mismatch.logged_as} is 0 at every step: both sides are equal, or it was not measured"
    for alarm in report.alarms:
        yield f"{alarm.status:<9} step {alarm.step}: {alarm.name}: {alarm.text}"
    if not report.alarms:
        yield "ok        no alarm"
    yield f"limits    {LIMITS}"


def as_dict(report: ScalarReport) -> dict[str, Any]:
    """Returns plain values, for JSON."""
    return {
        "framework": report.framework,
        "steps": report.steps,
        "k3_from": report.mismatch.logged_as,
        "scalars": [
            {
                **asdict(curve.scalar),
                "name": curve.logged_as,
                "first": curve.first,
                "last": curve.last,
                "not_finite": curve.not_finite,
            }
            for curve in report.curves
        ],
        "restarts": [asdict(restart) for restart in report.restarts],
        "alarms": [asdict(alarm) for alarm in report.alarms],
        "limits": LIMITS,
    }


def _meaning(curve: Curve) -> str:
    relation = K3.get(curve.scalar.quantity, ("", None))[0]
    return "; ".join(filter(None, (curve.scalar.formula, relation, curve.scalar.note)))
