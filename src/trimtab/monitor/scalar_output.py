"""What the scalars of a run show, as lines of the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimtab.monitor.alarms import WINDOW
from trimtab.monitor.curves import K3, known_scalars
from trimtab.monitor.scalars import ScalarReport
from trimtab.text import short

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
"""How a framework is made to log the mismatch, where it does not always."""


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
