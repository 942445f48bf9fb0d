"""The verdict on a run: each metric against its range over all steps, summarized in one line.

A run is cut into up to four phases of at least five steps. A metric is outside its range where more than half of the
steps of some phase are, so that neither a single odd step nor a good last one decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trimtab.pages.render import number, short
from trimtab.report import perturbation_verdict
from trimtab.runs.metric_catalog import metric
from trimtab.runs.metric_ranges import K3, band_text, judge, k3_range
from trimtab.runs.reader import Run

State = Literal["healthy", "at times", "outside", ""]
PHASES, PHASE_STEPS = 4, 5
# Mismatch that makes the data other than training takes it for. The first that is outside is said; the others follow.
GRAVE = {K3: "k3", "mismatch/ess_token": "the effective sample size", "mismatch/pearson": "the correlation"}
# Milder: the run trains on what it should, and does less with it than it could.
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
COLLAPSED, SPREADS = 0.5, 3.0
SHOWN = 4


@dataclass(frozen=True)
class Phase:
    """Consecutive measurements of one metric: of steps `first` to `last`, `outside` of them beyond its range."""

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
    """One metric over the run. `worst`: the phase with the largest share of steps outside; of equal ones the one whose
    median is furthest out."""

    key: str
    state: State
    outside: int
    measured: int
    median: float
    worst: Phase

    @property
    def steps(self) -> str:
        """`62 of 80 steps, mostly 61 to 80`; empty where nothing is outside."""
        if not self.outside:
            return ""
        where = f", mostly {span(self.worst)}" if self.outside < self.measured > self.worst.measured else ""
        return f"{self.outside} of {self.measured} steps{where}"


@dataclass(frozen=True)
class Verdict:
    """`text` is one line; `state` is what it begins with, `findings` every judged metric by its key."""

    state: Literal["healthy", "healthy, but", "not healthy", "not judged"]
    text: str
    judged: str
    findings: Mapping[str, Finding]


def health(run: Run) -> Verdict:
    """The verdict on all steps a run has logged."""
    findings = {key: found for key in run.keys if (found := judged(run, key)) is not None}
    grave = [*_failure(run), *_mismatch(findings), *_noise(run), *_collapse(run)]
    mild = [*_losses(run), *_signal(findings, run), *_clipped(run), *_others(findings)]
    length = _so_far(run)
    measured = any(key in findings for key in GRAVE)
    if grave:
        state, text = "not healthy", f"Not healthy over {length}: {_listed([*grave, *mild])}"
    elif not measured:
        state, begin = "not judged", f"Not judged over {length}: no mismatch between trainer and sampler was measured"
        text = f"{begin}; {_listed(mild)}" if mild else begin
    elif mild:
        state, text = "healthy, but", f"Healthy over {length}, but {_listed(mild)}"
    else:
        state, text = "healthy", f"Healthy over {length}"
    return Verdict(state, f"{text}.{_end(run)}", _rule(run), findings)


def judged(run: Run, key: str) -> Finding | None:
    """One metric over the run; None where it has no range or was not measured."""
    steps, values = _measured(run, key)
    states = [judge(key, value) for value in values.tolist()]
    if not any(states):
        return None
    outside = np.array([state == "outside" for state in states])
    parts = [
        Phase(int(steps[part[0]]), int(steps[part[-1]]), int(outside[part].sum()), len(part), _median(values[part]))
        for part in _phases(len(values))
    ]
    worst = max(parts, key=lambda part: (part.share, _beyond(key, part.median)))
    state: State = "healthy" if not outside.any() else "outside" if worst.share > 0.5 else "at times"
    return Finding(key, state, int(outside.sum()), len(values), _median(values), worst)


def _beyond(key: str, value: float) -> float:
    row = metric(key)
    assert row is not None
    low, high = (-math.inf if row.low is None else row.low), (math.inf if row.high is None else row.high)
    return max(value - high, low - value, 0.0)


def clipped_share(run: Run) -> float | None:
    """Share of the run's updates whose gradient was scaled down to optim.grad_clip."""
    _, shares = run.series("optim/grad_clipped")
    return float(shares.mean()) if len(shares) else None


def span(phase: Phase) -> str:
    return f"{phase.first} to {phase.last}" if phase.last > phase.first else str(phase.first)


def _measured(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """The values the range of `key` is about: its own, or its share of another metric."""
    row = metric(key)
    if row is None or not row.of:
        return run.series(key)
    found = [(step["step"], step[key], step.get(row.of)) for step in run.rows if step.get(key) is not None]
    pairs = [(step, part / whole) for step, part, whole in found if whole]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def _phases(count: int) -> list[np.ndarray]:
    return np.array_split(np.arange(count), min(PHASES, max(count // PHASE_STEPS, 1)))


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def _so_far(run: Run) -> str:
    done, planned = int(run.last["step"]), run.config.get("trainer", {}).get("steps")
    of = f" of {planned}" if isinstance(planned, int) and planned > done else ""
    return f"{done}{of} step{'s' if done > 1 or of else ''}"


def _rule(run: Run) -> str:
    parts = len(_phases(len(run.rows)))
    of = "of them" if parts == 1 else f"of those of one of {parts} equal parts of the run"
    return (
        f"Judged over all logged steps: a metric is outside its range where more than half {of} are, and at times "
        "where fewer are. Figures are medians, over the whole run where no steps are named."
    )


def _failure(run: Run) -> Iterator[str]:
    """The error that ended the last start of the run, from provenance.json."""
    last = run.origins[-1] if run.origins else {}
    if last.get("outcome") == "failed":
        error, _, _ = str(last.get("error") or "without a message").partition("; ")  # the whole line is further down
        yield f"it ended with an error ({error})"


def _end(run: Run) -> str:
    """A sentence for a run that did not reach its last step without failing; empty where provenance.json is silent."""
    last = run.origins[-1] if run.origins else {}
    planned = run.config.get("trainer", {}).get("steps")
    if isinstance(planned, int) and run.last["step"] >= planned:
        return ""
    if last.get("outcome") == "stopped":
        return " It was stopped before its end."
    if "outcome" in last and last["outcome"] is None:
        return " It has not ended: it is still running, or was killed."
    return ""


def _mismatch(findings: Mapping[str, Finding]) -> Iterator[str]:
    found = next((findings[key] for key in GRAVE if key in findings and findings[key].state == "outside"), None)
    if found is not None:
        meaning = k3_range(found.worst.median).text if found.key == K3 else f"healthy: {band_text(found.key)}"
        yield f"{GRAVE[found.key]} is {_size(found)}: {meaning}"


def _noise(run: Run) -> Iterator[str]:
    found = perturbation_verdict.verdict(run)
    if found is not None and not found.acts:
        yield "the noise of the perturbation is in effect a no-op"


def _collapse(run: Run) -> Iterator[str]:
    """The mean reward of the last phase against the best one before it: less than half, and more than chance makes."""
    steps, rewards = run.series("reward/mean")
    parts = _phases(len(rewards))
    if len(parts) < 2:
        return
    means, last = [float(rewards[part].mean()) for part in parts], parts[-1]
    top = int(np.argmax(means[:-1]))
    error = math.hypot(*(float(rewards[part].std(ddof=1)) / math.sqrt(len(part)) for part in (parts[top], last)))
    if means[top] > 0 and means[-1] < COLLAPSED * means[top] and means[top] - means[-1] > SPREADS * error:
        best = parts[top]
        yield (
            f"the reward fell from {short(means[top])} (steps {steps[best[0]]:.0f} to {steps[best[-1]]:.0f}) to "
            f"{short(means[-1])} (steps {steps[last[0]]:.0f} to {steps[last[-1]]:.0f})"
        )


def _losses(run: Run) -> Iterator[str]:
    for key, words in LOSSES.items():
        total = int(run.series(key)[1].sum())
        if total:
            yield f"{total:,} {words.format(s='s' if total > 1 else '')}"


def _signal(findings: Mapping[str, Finding], run: Run) -> Iterator[str]:
    """In groups of a step, as people count them."""
    found = findings.get("groups/no_signal")
    if found is None or found.state != "outside":
        return
    rows = [row for row in run.rows if row.get("groups/sampled") and row.get("groups/no_signal") is not None]
    there = [row for row in rows if found.worst.first <= row["step"] <= found.worst.last]
    whole, worst, where = _typical(rows), _typical(there), f"in steps {span(found.worst)}"
    if judge(found.key, found.median) != "outside":
        yield f"{worst} groups give no signal {where}"
    else:
        yield f"{whole} groups give no signal" + (f", {worst} {where}" if worst != whole else "")


def _typical(rows: Sequence[Mapping[str, Any]]) -> str:
    empty, sampled = (float(np.median([row[key] for row in rows])) for key in ("groups/no_signal", "groups/sampled"))
    return f"{empty:g} of {sampled:g}"


def _clipped(run: Run) -> Iterator[str]:
    share = clipped_share(run)
    if share is None or judge("optim/grad_clipped", share) != "outside":
        return
    _, norms = run.series("optim/grad_norm")
    bound = run.config.get("optim", {}).get("grad_clip")
    how = "every update was" if share == 1 else f"{share:.0%} of the updates were"
    yield f"{how} clipped (gradient norm {short(norms.min())} to {short(norms.max())}, optim.grad_clip {number(bound)})"


def _others(findings: Mapping[str, Finding]) -> Iterator[str]:
    for key, name in MILD.items():
        found = findings.get(key)
        if found is not None and found.state == "outside":
            yield f"{name} is {_size(found)} (healthy: {band_text(key)})"


def _size(found: Finding) -> str:
    """`0.12, 0.81 in steps 21 to 40`, or the latter alone where the run's own median is healthy."""
    whole, worst = short(found.median), short(found.worst.median)
    if judge(found.key, found.median) != "outside":
        return f"{worst} in steps {span(found.worst)}"
    return f"{whole}, {worst} in steps {span(found.worst)}" if worst != whole else whole


def _listed(clauses: Sequence[str]) -> str:
    shown = list(clauses[:SHOWN])
    rest = len(clauses) - len(shown)
    if rest:
        shown.append(f"{rest} more below")
    return "; ".join(shown)


def as_data(verdict: Verdict) -> dict[str, Any]:
    """For programs: the line, what it begins with, and every metric that was ever outside its range."""
    return {
        "state": verdict.state,
        "text": verdict.text,
        "judged": verdict.judged,
        "outside": {
            key: {
                "state": found.state,
                "steps_outside": found.outside,
                "steps": found.measured,
                "median": found.median,
                "worst_steps": [found.worst.first, found.worst.last],
                "worst_median": found.worst.median,
            }
            for key, found in verdict.findings.items()
            if found.outside
        },
    }
