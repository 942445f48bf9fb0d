"""The health verdict of a run: judges each metric against its range over all steps and summarizes it in one line.

A run is divided into up to four phases of at least five steps. A metric is outside its range if more than half of the
steps of some phase are, so that single steps do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trimtab.pages.render import beside, number, short
from trimtab.report import perturbation_verdict
from trimtab.report.clipping import objective_of
from trimtab.report.learning_verdict import collapse, equal_parts, nothing_learned, reward_rose
from trimtab.runs.metric_catalog import K3, band_text, bounds, judge, k3_range, metric
from trimtab.runs.reader import Run

State = Literal["healthy", "at times", "outside", ""]
# Mismatch metrics that invalidate the correction. Only the first one outside its range is reported; the other follows
# from it. The correlation is not among them: the more certain a policy is, the less its probabilities vary, and the
# same small differences of log-probs weigh more.
CRITICAL = {K3: "k3", "mismatch/ess_token": "the effective sample size"}
# The run trains correctly, but uses less of its data than it could.
MILD = {
    "length/truncated": "the share of responses cut by the length limit",
    "weight/changed": "the share of weights at their bound",
    "clip/low": "the share of tokens clipped below",
    "clip/high": "the share of tokens clipped above",
    "clip/dual": "the share of tokens at the dual clip",
    "clip/second_moment": "the share of tokens that the second moment leaves out",
    "reject/tokens": "the share of rejected tokens",
}
LOSSES = {
    "optim/skipped": "update{s} skipped as not finite",
    "trajectories/dropped": "response{s} dropped",
    "metrics/nonfinite": "figure{s} logged as not finite",
}
MANY_CLIPPED = 0.5
"""Share of clipped updates above which a verdict notes them."""
MAX_CLAUSES = 4


@dataclass(frozen=True)
class Phase:
    """Consecutive measurements of one metric from step `first` to `last`, `outside` of them outside its range."""

    first: int
    last: int
    outside: int
    measured: int
    median: float

    @property
    def share(self) -> float:
        return self.outside / self.measured


@dataclass(frozen=True)
class Finding:
    """One metric judged over the run.

    worst: the phase with the largest share of steps outside; among equals the one whose median is furthest out.
    """

    key: str
    state: State
    outside: int
    measured: int
    median: float
    worst: Phase

    @property
    def steps(self) -> str:
        """Text such as `62 of 80 steps, mostly 61 to 80`; empty if no step is outside."""
        if not self.outside:
            return ""
        where = f", mostly {span(self.worst)}" if self.outside < self.measured > self.worst.measured else ""
        return f"{self.outside} of {self.measured} steps{where}"


@dataclass(frozen=True)
class HealthVerdict:
    """The verdict on a run: its state, one line of text, the rule of judgment in words, and findings by metric key.

    note: what is worth knowing and no fault, as a line; empty without any.
    """

    state: Literal["healthy", "healthy, but", "not healthy", "not judged"]
    text: str
    note: str
    judged: str
    findings: Mapping[str, Finding]


def health(run: Run) -> HealthVerdict:
    """Returns the verdict on all steps a run has logged."""
    findings = {key: finding for key in run.keys if (finding := judge_metric(run, key)) is not None}
    mismatch, idle, fallen = (list(found) for found in (_mismatch(findings), nothing_learned(run), collapse(run)))
    corrected = list(_corrected_lag(run, findings)) if mismatch and not (idle or fallen) else []
    critical = [*_failure(run), *idle, *([] if corrected else mismatch), *_ineffective_noise(run), *fallen]
    waste = [] if idle else list(_mild_findings(findings))
    signal, learned = ([] if idle else list(_signal(findings, run))), reward_rose(run)
    mild = [*corrected, *_losses(run), *([] if learned else signal), *waste]
    notes = [*(signal if learned else []), *_clipped(run)]
    length = _length_text(run)
    measured = any(key in findings for key in CRITICAL)
    if critical:
        state, text = "not healthy", f"Not healthy over {length}: {_joined_clauses([*critical, *mild])}"
    elif not measured:
        state, start = "not judged", f"Not judged over {length}: no mismatch between trainer and sampler was measured"
        text = f"{start}; {_joined_clauses(mild)}" if mild else start
    elif mild:
        state, text = "healthy, but", f"Healthy over {length}, but {_joined_clauses(mild)}"
    else:
        state, text = "healthy", f"Healthy over {length}"
    note = f"To note: {'; '.join(notes)}." if notes else ""
    return HealthVerdict(state, f"{text}.{_ending(run)}", note, _rule_text(run), findings)


def judge_metric(run: Run, key: str) -> Finding | None:
    """Returns the finding for one metric; None if it has no range or was not measured."""
    steps, values = _judged_series(run, key)
    states = [judge(key, value) for value in values.tolist()]
    if not any(states):
        return None
    outside = np.array([state == "outside" for state in states])
    phases = [
        Phase(int(steps[part[0]]), int(steps[part[-1]]), int(outside[part].sum()), len(part), _median(values[part]))
        for part in equal_parts(len(values))
    ]
    worst = max(phases, key=lambda part: (part.share, _excess(key, part.median)))
    state: State = "healthy" if not outside.any() else "outside" if worst.share > 0.5 else "at times"
    return Finding(key, state, int(outside.sum()), len(values), _median(values), worst)


def _excess(key: str, value: float) -> float:
    row = metric(key)
    assert row is not None
    low, high = (-math.inf if row.low is None else row.low), (math.inf if row.high is None else row.high)
    return max(value - high, low - value, 0.0)


def clipped_share(run: Run) -> float | None:
    """Returns the share of updates whose gradient was scaled down to optim.grad_clip, or None if not logged."""
    _, shares = run.series("optim/grad_clipped")
    return float(shares.mean()) if len(shares) else None


def span(phase: Phase) -> str:
    return f"{phase.first} to {phase.last}" if phase.last > phase.first else str(phase.first)


def _judged_series(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values that the range of `key` applies to: the metric, or its share of another metric."""
    row = metric(key)
    if row is None or not row.of:
        return run.series(key)
    measured = [(step["step"], step[key], step.get(row.of)) for step in run.rows if step.get(key) is not None]
    pairs = [(step, part / whole) for step, part, whole in measured if whole]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def _length_text(run: Run) -> str:
    done, planned = int(run.last["step"]), run.config.get("trainer", {}).get("steps")
    of = f" of {planned}" if isinstance(planned, int) and planned > done else ""
    return f"{done}{of} step{'s' if done > 1 or of else ''}"


def _rule_text(run: Run) -> str:
    parts = len(equal_parts(len(run.rows)))
    of = "of them" if parts == 1 else f"of those of one of {parts} equal parts of the run"
    return (
        f"Judged over all logged steps: a metric is outside its range where more than half {of} are, and at times "
        "where fewer are. Figures are medians, over the whole run where no steps are named."
    )


def _failure(run: Run) -> Iterator[str]:
    """Yields the error that ended the last start of the run, from provenance.json."""
    last = run.origins[-1] if run.origins else {}
    if last.get("outcome") == "failed":
        error, _, _ = str(last.get("error") or "without a message").partition(
            "; "
        )  # the page shows the whole message further down
        yield f"it ended with an error ({error})"


def _ending(run: Run) -> str:
    """Returns a sentence for a run that was stopped or has not ended; empty if it finished, failed or is unknown."""
    last = run.origins[-1] if run.origins else {}
    planned = run.config.get("trainer", {}).get("steps")
    if isinstance(planned, int) and run.last["step"] >= planned:
        return ""
    if last.get("outcome") == "stopped":
        return " It was stopped before its end."
    if "outcome" in last and last["outcome"] is None:
        return " It has not ended: it is still running, or was killed."
    return ""


def _outside_mismatch(findings: Mapping[str, Finding]) -> Finding | None:
    """Returns the first of the critical mismatch metrics that is outside its range."""
    return next((findings[key] for key in CRITICAL if key in findings and findings[key].state == "outside"), None)


def _mismatch(findings: Mapping[str, Finding]) -> Iterator[str]:
    finding = _outside_mismatch(findings)
    if finding is not None:
        meaning = k3_range(finding.worst.median).text if finding.key == K3 else f"healthy: {band_text(finding.key)}"
        yield f"{CRITICAL[finding.key]} is {_value_text(finding)}: {meaning}"


def _corrected_lag(run: Run, findings: Mapping[str, Finding]) -> Iterator[str]:
    """Yields the mismatch of a run with stale samples whose objective corrects for them.

    The published ranges are for numerics alone; of stale samples the ratio to the behavior policy is what the recipe
    asks for. Without lag, or with an objective that does not read the sampler's log-probs, it is a fault.
    """
    finding, built, (_, lags) = _outside_mismatch(findings), objective_of(run.config), run.series("lag/max")
    if (
        finding is not None
        and len(lags)
        and lags.max() > 0
        and not isinstance(built, str)
        and "behavior" in built.needs
    ):
        yield (
            f"{CRITICAL[finding.key]} is {_value_text(finding)}, of samples up to {lags.max():.0f} updates old, for "
            f"which {built.name} corrects"
        )


def _ineffective_noise(run: Run) -> Iterator[str]:
    noise = perturbation_verdict.perturbation_verdict(run)
    if noise is not None and not noise.acts:
        yield "the noise of the perturbation is in effect a no-op"


def _losses(run: Run) -> Iterator[str]:
    for key, words in LOSSES.items():
        total = int(run.series(key)[1].sum())
        if total:
            yield f"{total:,} {words.format(s='s' if total > 1 else '')}"


def _signal(findings: Mapping[str, Finding], run: Run) -> Iterator[str]:
    """Yields the groups without signal, as a number of groups per step."""
    finding = findings.get("groups/no_signal")
    if finding is None or finding.state != "outside":
        return
    rows = [row for row in run.rows if row.get("groups/sampled") and row.get("groups/no_signal") is not None]
    rows_of_worst = [row for row in rows if finding.worst.first <= row["step"] <= finding.worst.last]
    whole, worst, where = _typical_share(rows), _typical_share(rows_of_worst), f"in steps {span(finding.worst)}"
    if judge(finding.key, finding.median) != "outside":
        yield f"{worst} groups give no signal {where}"
    else:
        yield f"{whole} groups give no signal" + (f", {worst} {where}" if worst != whole else "")


def _typical_share(rows: Sequence[Mapping[str, Any]]) -> str:
    empty, sampled = (float(np.median([row[key] for row in rows])) for key in ("groups/no_signal", "groups/sampled"))
    return f"{empty:g} of {sampled:g}"


def _clipped(run: Run) -> Iterator[str]:
    """Yields how many updates were clipped: no fault, since the step of AdamW hardly depends on the gradient's size."""
    share = clipped_share(run)
    if share is None or share <= MANY_CLIPPED:
        return
    _, norms = run.series("optim/grad_norm")
    bound = run.config.get("optim", {}).get("grad_clip")
    how = "every update was" if share == 1 else f"{share:.0%} of the updates were"
    yield f"{how} clipped (gradient norm {short(norms.min())} to {short(norms.max())}, optim.grad_clip {number(bound)})"


def _mild_findings(findings: Mapping[str, Finding]) -> Iterator[str]:
    for key, name in MILD.items():
        finding = findings.get(key)
        if finding is not None and finding.state == "outside":
            yield f"{name} is {_value_text(finding)} (healthy: {band_text(key)})"


def _value_text(finding: Finding) -> str:
    """Returns `0.12, 0.81 in steps 21 to 40`, or only the second part if the median over the run is healthy."""
    whole, worst = (beside(value, bounds(finding.key)) for value in (finding.median, finding.worst.median))
    if judge(finding.key, finding.median) != "outside":
        return f"{worst} in steps {span(finding.worst)}"
    return f"{whole}, {worst} in steps {span(finding.worst)}" if worst != whole else whole


def _joined_clauses(clauses: Sequence[str]) -> str:
    shown = list(clauses[:MAX_CLAUSES])
    rest = len(clauses) - len(shown)
    if rest:
        shown.append(f"{rest} more below")
    return "; ".join(shown)


def as_data(verdict: HealthVerdict) -> dict[str, Any]:
    """Returns the verdict for JSON: state, text, rule, and every metric that was outside its range at any step."""
    return {
        "state": verdict.state,
        "text": verdict.text,
        "note": verdict.note,
        "judged": verdict.judged,
        "outside": {
            key: {
                "state": finding.state,
                "steps_outside": finding.outside,
                "steps": finding.measured,
                "median": finding.median,
                "worst_steps": [finding.worst.first, finding.worst.last],
                "worst_median": finding.worst.median,
            }
            for key, finding in verdict.findings.items()
            if finding.outside
        },
    }
