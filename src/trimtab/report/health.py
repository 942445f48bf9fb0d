"""The health of a run: checks over all logged steps, and the verdict that follows from them.

A metric can have one of these roles (`verdict` in metrics.toml):

mismatch    outside its range, the correction is invalid; only the first such metric is reported: it causes the others
noise       below its range, the policy is in effect not perturbed
unused      outside its range, less data is used than possible
lost        counts data that was left out
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from trimtab.errors import Finding
from trimtab.intervals import wilson
from trimtab.monitor.alarms import clearly_above, lasting_alarms
from trimtab.monitor.scalars import steps_of
from trimtab.report.run_objective import known_objective
from trimtab.runs.metric_catalog import K3, Metric, band_text, bounds, judge, k3_range, metric, with_verdict
from trimtab.runs.reader import Accuracy, Run
from trimtab.text import beside, number, short

ALARMS = {
    "reward-collapse": "reward",
    "gradient-norm": "gradient norm",
    "gradient-explosion": "gradient norm",
    "gradient-zero": "gradient norm",
}
"""Alarms of the monitor that a verdict repeats, with the name of the check; all others are about judged metrics."""
MetricState = Literal["healthy", "at times", "outside"]
MAX_PHASES, MIN_PHASE_STEPS = 4, 5
RULE = (
    "Better or worse than before: held-out accuracy outside the 95% interval of its value before training. Judged over "
    "all logged steps: a metric is outside its range where more than half of the steps of one of up to four equal "
    "parts of the run are, and at times where fewer are. Figures are medians, over the whole run where no steps are "
    "named. In charts, the green band is the healthy range."
)


@dataclass(frozen=True)
class Phase:
    """Consecutive measurements of one metric."""

    first: int  # step
    last: int  # step
    outside: int  # number of measurements outside the range of the metric
    measured: int
    median: float

    @property
    def share(self) -> float:
        return self.outside / self.measured

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


@dataclass(frozen=True)
class JudgedMetric:
    """One metric over the run."""

    key: str
    state: MetricState
    outside: int
    measured: int
    median: float
    worst: Phase  # the largest share of steps outside the range; of equal ones, the median that is furthest outside

    @property
    def steps(self) -> str:
        """Text such as `62 of 80 steps, mostly 61 to 80`; empty if no step is outside."""
        if not self.outside:
            return ""
        where = f", mostly {self.worst}" if self.outside < self.measured > self.worst.measured else ""
        return f"{self.outside} of {self.measured} steps{where}"

    @property
    def shown(self) -> float:
        """The median over the worst phase if any step is outside the range, otherwise over the run."""
        return self.worst.median if self.outside else self.median

    @property
    def sentence(self) -> str:
        """`k3 is 0.12 over the run, 0.81 in steps 21 to 40`; one part if both are equal or the first is healthy."""
        row = metric(self.key)
        whole, worst = (beside(value, bounds(self.key)) for value in (self.median, self.worst.median))
        if judge(self.key, self.median) != "outside":
            where = f"{worst} in steps {self.worst}"
        else:
            where = whole if whole == worst else f"{whole} over the run, {worst} in steps {self.worst}"
        return f"{row.called if row else self.key} is {where}"


class Change(NamedTuple):
    """What training changed."""

    text: str  # such as `Worse than before: 0.461 → 0.352`
    fault: str  # why the change is a fault; empty if it is not a fault


@dataclass(frozen=True)
class HealthVerdict:
    """The verdict on a run, the checks it follows from, and every judged metric by key."""

    learned: str  # the change over the training, such as `Worse than before: 0.461 → 0.352`; empty if not measured
    state: Literal["healthy", "healthy, but", "not healthy", "not judged"]
    length: str
    findings: Sequence[Finding]  # status `fail`: a fault; `note`: lost or unused data; `ok`: information
    metrics: Mapping[str, JudgedMetric]

    @property
    def headline(self) -> str:
        """The change and the verdict, such as `Better than before: 0.46 → 0.81. Healthy over 80 steps`."""
        verdict = f"{self.state.removesuffix(', but').capitalize()} over {self.length}"
        return f"{self.learned}. {verdict}" if self.learned else verdict

    @property
    def text(self) -> str:
        reasons = "; ".join(item.detail for item in self.findings if item.status != "ok")
        link = ", but " if self.state == "healthy, but" else ": "
        return f"{self.headline}{link}{reasons}." if reasons else f"{self.headline}."

    @property
    def note(self) -> str:
        """All findings with status `ok` in one line; empty if there are none."""
        notes = "; ".join(item.detail for item in self.findings if item.status == "ok")
        return f"To note: {notes}." if notes else ""


def health(run: Run) -> HealthVerdict:
    """Returns the verdict on all logged steps of a run, except steps that its guard discarded."""
    done, returns = run.steps, list(_returns(run))
    run = run.kept
    metrics = {key: found for key in run.keys if (found := judge_metric(run, key)) is not None}
    changes, broken = judge_learning(run), _steps_without_numbers(run)
    worse = [Finding("fail", "learning", change.fault) for change in changes if change.fault]
    idle = list(_nothing_learned(run))
    trends = [] if worse or idle else list(_alarms(run))
    fallen = [item for item in trends if item.status == "fail"]
    found = [
        *_end(run, done),
        *returns,
        *([Finding("fail", "numbers", "reward, k3 and gradient norm are not finite there")] if broken else []),
        *worse,
        *idle,
        *_mismatch(run, metrics, learns=not (worse or idle or fallen)),
        *_noise(metrics),
        *(fallen or trends),
        *_losses(run),
        *([] if idle else _unused(run, metrics)),
    ]
    found.sort(key=lambda item: ("fail", "note", "ok").index(item.status))
    statuses = {item.status for item in found}
    if "fail" in statuses:
        state = "not healthy"
    elif metrics.keys().isdisjoint(with_verdict("mismatch")):
        state = "not judged"
    else:
        state = "healthy, but" if "note" in statuses else "healthy"
    planned = run.config.get("trainer", {}).get("steps")
    without = f", the last {'one' if broken == 1 else broken} without finite numbers" if broken else ""
    of = f" of {planned}" if isinstance(planned, int) and planned > done else ""
    length = "1 step" if (done, of) == (1, "") else f"{done}{of} steps"
    return HealthVerdict("; ".join(change.text for change in changes), state, length + without, found, metrics)


def judge_learning(run: Run) -> list[Change]:
    """Returns what training changed: the held-out accuracy of each task (faults first), otherwise the reward.

    The reward is judged if no task was measured before and after training; the list is empty if the run is too short.
    """
    if measured := {task: one for task, one in run.accuracy().items() if None not in (one.before, one.after)}:
        changes = [_accuracy_change(run, task, found, named=len(measured) > 1) for task, found in measured.items()]
        return sorted(changes, key=lambda change: not change.fault)
    steps, rewards = run.series("reward/mean")
    parts = equal_parts(len(rewards))
    if len(parts) == 1:
        return []
    first, last = rewards[parts[0]], rewards[parts[-1]]
    fell = clearly_above(first, last)
    word = "rose" if clearly_above(last, first) else "fell" if fell else "did not clearly change"
    ends = (f"{short(rewards[part].mean())} (steps {steps[part[0]]:.0f} to {steps[part[-1]]:.0f})" for part in parts)
    start, *_, end = ends
    fault = f"the reward fell from {start} to {end}" if fell else ""
    return [Change(f"The reward {word}: {first.mean():.3f} → {last.mean():.3f}", fault)]


def _accuracy_change(run: Run, task: str, accuracy: Accuracy, *, named: bool) -> Change:
    """Judges an accuracy by Wilson's intervals; if the number of problems is unknown, no change is significant.

    The best of several measurements is high by chance: a fall from it counts only if its whole interval lies above the
    interval of the last measurement.
    """
    before, *_, after = (float(value) for value in accuracy.values)
    _, counts = run.series(f"eval/{task}/problems")

    def interval(value: float) -> tuple[float, float]:
        return wilson(value, counts[-1]) if len(counts) else (0.0, 1.0)

    low, high = interval(before)
    if low <= after <= high:
        word = "No better" if after <= before else "Not clearly better"
    else:
        word = "Worse" if after < low else "Better"
    peak = int(accuracy.values.argmax())
    best, fault = float(accuracy.values[peak]), ""
    if after < low:
        fault = f"held-out accuracy on {task} fell from {before:.3f} [{low:.3f}, {high:.3f}] to {after:.3f}"
    elif interval(after)[1] < interval(best)[0]:
        fault = f"held-out accuracy on {task} fell from {best:.3f} after step {accuracy.steps[peak]:.0f} to {after:.3f}"
    return Change(f"{word} than before{f' on {task}' if named else ''}: {before:.3f} → {after:.3f}", fault)


def as_data(verdict: HealthVerdict) -> dict[str, Any]:
    """Returns the verdict for JSON, with every metric that was outside its range at any step."""
    return {
        "learned": verdict.learned,
        "state": verdict.state,
        "text": verdict.text,
        "note": verdict.note,
        "judged": RULE,
        "findings": [asdict(item) for item in verdict.findings],
        "outside": {key: asdict(found) for key, found in verdict.metrics.items() if found.outside},
    }


def _end(run: Run, done: int) -> Iterator[Finding]:
    """Yields a finding if the last start of the run ended early or with an error, from provenance.json.

    done: number of steps that were not discarded.
    """
    last = run.starts[-1] if run.starts else {}
    planned = run.config.get("trainer", {}).get("steps")
    complete = isinstance(planned, int) and done >= planned
    if last.get("outcome") == "failed":
        # Only the first clause: the page shows the whole message further down.
        error, _, _ = str(last.get("error") or "without a message").partition("; ")
        yield Finding("fail", "end", f"it ended with an error ({error})")
    elif "outcome" in last and not complete:
        if last["outcome"] is None:
            yield Finding("ok", "end", "it has not ended: it is still running, or was killed")
        elif last["outcome"] == "stopped":
            yield Finding("ok", "end", "it was stopped before its end")


def _returns(run: Run) -> Iterator[Finding]:
    """Yields how often the guard returned to an earlier policy; the steps it discarded are not judged."""
    if run.returns:
        times = "once" if len(run.returns) == 1 else f"{len(run.returns)} times"
        discarded = len(run.rows) - len(run.kept.rows)
        yield Finding("note", "guard", f"it returned {times} to an earlier policy and discarded {discarded} steps")


def _steps_without_numbers(run: Run) -> int:
    """Returns how many steps at the end of the run have no finite numbers; JSON logs such numbers as null."""
    for count, row in enumerate(reversed(run.rows)):
        found = [row[key] for key in ("reward/mean", K3, "optim/grad_norm") if key in row]
        if len(found) < 2 or any(value is not None for value in found):  # a single null may mean "not measured"
            return count
    return len(run.rows)


def _nothing_learned(run: Run) -> Iterator[Finding]:
    """Yields a finding if all advantages were 0 in more than half of the steps of the last phase.

    There is no finding if steps without signal have the higher mean reward: the policy has learned its prompts.
    """
    idle = np.array([_without_signal(row) for row in run.rows])
    if idle[equal_parts(len(idle))[-1]].mean() <= 0.5:
        return
    rows, others = ([run.rows[index] for index in np.flatnonzero(which)] for which in (idle, ~idle))
    if others and _mean_reward(rows) > _mean_reward(others):
        return
    rewards = {row.get("reward/mean") for row in rows if row.get("reward/std") == 0}
    if len(rewards) == 1 and all(row.get("reward/std") == 0 for row in rows):
        why = f"every response got reward {number(rewards.pop())}"
    else:
        why = "the rewards of every group were equal"
    cut = [row["length/truncated"] for row in rows if row.get("length/truncated") is not None]
    share = float(np.median(cut)) if cut else 0.0
    if judge("length/truncated", share) == "outside":
        why += f", and {share:.0%} of the responses were cut by the length limit"
    yield Finding("fail", "learning", f"nothing was learned in {len(rows)} of {len(idle)} steps: {why}")


def _without_signal(row: Mapping[str, Any]) -> bool:
    """Whether all rewards that a step compares were equal; if it compares the whole batch, it logs no groups."""
    sampled, equal = row.get("groups/sampled") or 0, row.get("groups/no_signal") or 0
    return equal >= sampled > 0 or (row.get("reward/std") == 0 and not row.get("expert/traces"))


def _mean_reward(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(np.mean([row.get("reward/mean") or 0.0 for row in rows]))


def _mismatch(run: Run, metrics: Mapping[str, JudgedMetric], *, learns: bool) -> Iterator[Finding]:
    """Yields the first critical mismatch metric that is outside its range.

    The published ranges are for numerical mismatch alone. Stale samples exceed them as intended: that is a note if the
    objective reads the sampler's log-probs. Without lag, with another objective, or if k3 exceeds all published values,
    it is a fault.
    """
    found = next(_outside(metrics, "mismatch"), None)
    if metrics.keys().isdisjoint(with_verdict("mismatch")):
        yield Finding("note", "mismatch", "no mismatch between trainer and sampler was measured")
    if found is None:
        return
    text, objective = found.sentence, known_objective(run.config)
    _, lags = run.series("lag/max")
    published = k3_range(found.worst.median) if found.key == K3 else None
    if lags.max(initial=0) > 0 and objective is not None and "behavior" in objective.needs:
        text += f", of samples up to {lags.max():.0f} updates old, for which {objective.name} corrects"
        if learns and (published is None or published.name != "beyond"):
            yield Finding("note", "mismatch", text)
            return
    meaning = f"healthy: {band_text(found.key)}" if published is None else published.text
    yield Finding("fail", "mismatch", f"{text}: {meaning}")


def _noise(metrics: Mapping[str, JudgedMetric]) -> Iterator[Finding]:
    """Yields a finding if the perturbation (ALP noise) has no effect. Noise on the logits logs no changed entries."""
    if found := next(_outside(metrics, "noise"), None):
        detail = f"the noise of the perturbation is in effect a no-op: {found.sentence}"
        yield Finding("fail", "noise", detail, "raise perturbation.std or see model.autocast")


def _losses(run: Run) -> Iterator[Finding]:
    for key, words in with_verdict("lost").items():
        if total := int(run.series(key)[1].sum()):
            yield Finding("note", "lost data", f"{words}: {total:,}")


def _unused(run: Run, metrics: Mapping[str, JudgedMetric]) -> Iterator[Finding]:
    """Yields data that is not used.

    If the reward clearly rose, groups without signal are not a problem: their prompts were learned.
    """
    _, rewards = run.series("reward/mean")
    parts = equal_parts(len(rewards))
    rose = len(parts) > 1 and clearly_above(rewards[parts[-1]], rewards[parts[0]])
    for found in _outside(metrics, "unused"):
        status = "ok" if rose and found.key == "groups/no_signal" else "note"
        yield Finding(status, "unused data", f"{found.sentence} (healthy: {band_text(found.key)})")


def _outside(metrics: Mapping[str, JudgedMetric], role: str) -> Iterator[JudgedMetric]:
    return (metrics[key] for key in with_verdict(role) if key in metrics and metrics[key].state == "outside")


def _alarms(run: Run) -> Iterator[Finding]:
    """Yields the alarms of the monitor that hold at the end of the run, among steps with an update (if any)."""
    rows = [row for row in run.rows if row.get("optim/grad_norm") is not None] or run.rows
    for alarm in lasting_alarms(steps_of(rows)):
        if alarm.name in ALARMS:
            when = "" if alarm.step == rows[-1]["step"] else f" (first at step {alarm.step})"
            yield Finding(alarm.status, ALARMS[alarm.name], f"{alarm.detail}{when}", alarm.next_step)


def judge_metric(run: Run, key: str) -> JudgedMetric | None:
    """Returns the judgment of the metric `key`, or None if the metric has no range or was not measured."""
    row = metric(key)
    if row is None or (row.low is None and row.high is None):
        return None
    steps, values = _judged_series(run, row, key)
    states = [judge(key, value) for value in values.tolist()]
    if not any(states):
        return None
    low, high = (-math.inf if row.low is None else row.low), (math.inf if row.high is None else row.high)
    outside = np.array([state == "outside" for state in states])
    phases = [
        Phase(int(steps[at[0]]), int(steps[at[-1]]), int(outside[at].sum()), len(at), float(np.median(values[at])))
        for at in equal_parts(len(values))
    ]
    worst = max(phases, key=lambda part: (part.share, max(part.median - high, low - part.median)))
    state: MetricState = "healthy" if not outside.any() else "outside" if worst.share > 0.5 else "at times"
    return JudgedMetric(key, state, int(outside.sum()), len(values), float(np.median(values)), worst)


def _judged_series(run: Run, row: Metric, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and values to which the range of `key` applies: the metric, or its ratio to another metric."""
    if not row.of:
        return run.series(key)
    measured = [(step["step"], step[key], step.get(row.of)) for step in run.rows if step.get(key) is not None]
    pairs = [(step, part / whole) for step, part, whole in measured if whole]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def equal_parts(count: int) -> list[np.ndarray]:
    """Returns the step indices of up to four equal parts of a run, each with at least five steps."""
    return np.array_split(np.arange(count), min(MAX_PHASES, max(count // MIN_PHASE_STEPS, 1)))
