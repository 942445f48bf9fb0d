"""Which metrics warn of a collapse before it happens, how early, and how often in runs that do not collapse.

    python benchmarks/early_warnings.py [--seeds 7] [--steps 96] [--out runs/early-warnings]
    python benchmarks/early_warnings.py --results docs/results/data/fair-map.parquet    # runs that are there

Without --results it trains `CELLS` on the laboratory: three that learn, and three of which most runs collapse. A run
collapses where its reward, as a mean over 8 steps, falls below half of its best so far and stays there for 16 steps or
to the end; the steps before the first such mean are what a warning can see.

A warning compares the median of the last 10 steps with that of the first 10, or of the 10 before (sudden), or with
nothing (large). AUROC: the share of pairs of a collapsing run and another of its regime in which the collapsing one has
the larger extreme, both up to the same step (.5 is chance). Caught: collapses before which the warning exceeds what 5 %
of the other runs of the regime exceed at some step (with fewer than 20, what none does); lead: steps until then. Second
table: the alarms of `trimtab.Monitor`. Last lines: the verdicts of `trimtab report`, on the steps before a collapse.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from fair_map import Store, train
from grid import table
from shared import options_of
from trimtab.monitor.alarms import History, Step, alarms
from trimtab.monitor.scalars import run_metrics
from trimtab.report.health import health
from trimtab.runs.reader import Run
from trimtab.trainer.lab.experiment import PlannedRun, plan_experiment
from trimtab.trainer.lab.regimes import regime

CELLS = (
    ("on-policy", "grpo"),
    ("stale-32", "token-tis"),
    ("int3", "token-tis"),
    ("on-policy", "grpo:optim.lr=1e-3"),
    ("stale-32", "grpo"),
    ("int3", "token-bypass"),
)
PART = "warnings"
SETS = ("optim.warmup=60", "eval.every=0", "eval.problems=8", "log.trajectories_every=0", "trainer.max_idle_steps=0")
SMOOTH, HOLD, FALLEN = 8, 16, 0.5  # steps of a mean reward, means in a row, share of the best
WINDOW = 10
FALSE_ALARMS = 0.05
ALARMS = (
    *("k3-rising", "k3-large", "ess", "gradient-norm", "gradient-explosion", "reward-collapse", "truncation", "length"),
)


@dataclass(frozen=True)
class Watched:
    """A run. series: (steps,) by metric, NaN where a step has none. end: steps before its collapse, all without."""

    regime: str
    series: dict[str, np.ndarray]
    end: int
    collapsed: bool


@dataclass(frozen=True)
class Candidate:
    """A metric and the direction in which it warns.

    against: "first" steps, the steps "before", or "nothing". relative: scores are logarithms of factors.
    """

    metric: str
    sign: int
    against: str = "first"
    relative: bool = True

    def scores(self, run: Watched) -> np.ndarray:
        """At each step before the collapse, NaN before two windows are there."""
        values = run.series[self.metric][: run.end]
        values = np.log(np.maximum(values, 1e-7)) if self.relative else values
        found = np.full(len(values), math.nan)
        for end in range(2 * WINDOW, len(values) + 1):
            start = 0 if self.against == "first" else end - 2 * WINDOW
            base = 0.0 if self.against == "nothing" else middle(values[start : start + WINDOW])
            found[end - 1] = self.sign * (middle(values[end - WINDOW : end]) - base)
        return found


CANDIDATES = {
    "k3 rises": Candidate("mismatch/k3", 1),
    "k3 is large": Candidate("mismatch/k3", 1, "nothing"),
    "ESS of tokens falls": Candidate("mismatch/ess_token", -1, relative=False),
    "ESS of sequences falls": Candidate("mismatch/ess_seq", -1, relative=False),
    "gradient norm falls": Candidate("optim/grad_norm", -1),
    "gradient norm falls, sudden": Candidate("optim/grad_norm", -1, "before"),
    "gradient norm rises": Candidate("optim/grad_norm", 1),
    "length rises": Candidate("length/mean", 1),
    "truncation rises": Candidate("length/truncated", 1, relative=False),
    "entropy falls": Candidate("entropy/rollout", -1),
    "entropy rises": Candidate("entropy/rollout", 1),
}


def middle(values: np.ndarray) -> float:
    """The median of the finite values; NaN without one."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def collapse(reward: np.ndarray) -> int | None:
    """The number of steps before the collapse; None without one."""
    means = np.convolve(reward, np.full(SMOOTH, 1 / SMOOTH), "valid")
    low = means < FALLEN * np.maximum.accumulate(means)
    for start in np.flatnonzero(low):
        if low[start : start + HOLD].all() and len(low) - start >= SMOOTH:
            return int(start)
    return None


def watched(row: dict[str, Any]) -> Watched:
    series = {
        name: np.array([math.nan if value is None else value for value in values], dtype=np.float64)
        for name, values in row["metrics"].items()
    }
    steps = collapse(series["reward/mean"])
    return Watched(row["regime"], series, len(series["reward/mean"]) if steps is None else steps, steps is not None)


def extreme(scores: np.ndarray, end: int) -> float:
    return float(np.nanmax(scores[:end])) if np.isfinite(scores[:end]).any() else math.nan


def auroc(scores: Sequence[tuple[Watched, np.ndarray]]) -> float:
    """The share of pairs that the warning orders rightly; equal ones count half, NaN without a pair."""
    wins = []
    for bad, here in scores:
        for good, there in scores:
            one, other = extreme(here, bad.end), extreme(there, bad.end)
            if bad.collapsed and not good.collapsed and math.isfinite(one) and math.isfinite(other):
                wins.append((one > other) + 0.5 * (one == other))
    return sum(wins) / len(wins) if wins else math.nan


def lead(run: Watched, fires: Sequence[bool]) -> int | None:
    """Steps between the first warning and the collapse."""
    return next((run.end - step for step, warned in enumerate(fires) if warned), None)


def candidates(runs: Sequence[Watched]) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of the first table; scores and thresholds are compared within a regime."""
    regimes = list(dict.fromkeys(run.regime for run in runs))
    rows = []
    for name, warning in CANDIDATES.items():
        shares, leads = [], []
        for one in regimes:
            scores = [(run, warning.scores(run)) for run in runs if run.regime == one]
            clean = [extreme(values, run.end) for run, values in scores if not run.collapsed]
            clean = [value for value in clean if math.isfinite(value)]
            limit = float(np.quantile(clean, 1 - FALSE_ALARMS, method="higher")) if clean else math.nan
            leads += [lead(run, list(values > limit)) for run, values in scores if run.collapsed]
            shares.append(f"{auroc(scores):.2f}")
        rows.append([name, *shares, *caught(leads)])
    return ["warning", *(f"AUROC, {one}" for one in regimes), "caught", "median lead"], rows


def caught(leads: Sequence[int | None]) -> list[str]:
    early = [steps for steps in leads if steps is not None]
    return [f"{len(early)} of {len(leads)}", f"{median(early):.0f}" if early else "-"]


def alarm_steps(run: Watched) -> dict[str, list[bool]]:
    """At which steps before the collapse the monitor raises each alarm."""
    columns = {ours: run.series[key] for key, ours in run_metrics().items() if key in run.series}
    steps = [Step(i, {ours: float(values[i]) for ours, values in columns.items()}, None) for i in range(run.end)]
    history, raised = History(), []
    for step in steps:
        history.add(step)
        raised.append({alarm.name for alarm in alarms(history.steps())})
    return {name: [name in names for names in raised] for name in ALARMS}


def rules(runs: Sequence[Watched]) -> list[list[str]]:
    found = [(run, alarm_steps(run)) for run in runs]
    rows = []
    for name in ALARMS:
        clean = [any(fires[name]) for run, fires in found if not run.collapsed]
        leads = [lead(run, fires[name]) for run, fires in found if run.collapsed]
        rows.append([name, f"{sum(clean)} of {len(clean)}", *caught(leads)])
    return rows


def verdicts(runs: Sequence[Watched]) -> str:
    """What the report says of the steps before the collapse, and how often it notes the gradient norm."""
    found = Counter()
    for run in runs:
        names = list(run.series)
        rows = [
            {"step": i + 1}
            | {name: float(run.series[name][i]) for name in names if not math.isnan(run.series[name][i])}
            for i in range(run.end)
        ]
        verdict = health(Run(Path("run"), {}, rows))
        found[verdict.state] += 1
        found["gradient norm noted"] += any(finding.name == "gradient norm" for finding in verdict.findings)
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items()))


def planned(seeds: int, steps: int, out: Path) -> list[PlannedRun]:
    """The runs of all cells, seed by seed."""
    sets = [*SETS, f"trainer.steps={steps}"]
    plans = [plan_experiment([method], [regime(name)], seeds, out, sets=sets) for name, method in CELLS]
    return sorted((run for plan in plans for run in plan.runs), key=lambda run: run.seed)


def cells(rows: Sequence[dict[str, Any]], runs: Sequence[Watched]) -> list[list[str]]:
    """How many runs of each method and regime collapsed, when, and where their held-out accuracy was first halved."""
    names = list(dict.fromkeys((row["regime"], row["method"]) for row in rows))
    found = []
    for name in names:
        here = [(row, run) for row, run in zip(rows, runs, strict=True) if (row["regime"], row["method"]) == name]
        ends = [run.end for _, run in here if run.collapsed]
        when = f"{min(ends)} to {max(ends)}" if ends else "-"
        halves = " ".join(str(step) for row, run in here if run.collapsed and (step := halved(row)) is not None)
        found.append([*name, str(len(here)), str(len(ends)), when, halves or "-"])
    return found


def halved(row: dict[str, Any]) -> int | None:
    """The first evaluation with less than half of the held-out accuracy before training; None without one."""
    curve = zip(row["curve_steps"], row["curve"], strict=True)
    return next((step for step, accuracy in curve if accuracy < row["accuracy_before"] / 2), None)


def main() -> None:
    parser = options_of(__doc__, seeds=7, steps=96, workers=2, out=Path("runs/early-warnings"))
    parser.add_argument("--results", type=Path, help="a file of benchmarks/fair_map.py, in place of training")
    given = parser.parse_args()
    path = given.results or given.out / "runs.parquet"
    if given.results is None:
        train(PART, planned(given.seeds, given.steps, given.out), Store.open(path), given.workers, math.inf)
    rows = [row for row in pq.read_table(path).to_pylist() if len(row["metrics"]["reward/mean"]) >= 2 * WINDOW]
    runs = [watched(row) for row in rows]
    print(
        table(["regime", "method", "runs", "collapsed", "after steps", "accuracy halved at"], cells(rows, runs)),
        end="\n\n",
    )
    print(table(*candidates(runs)), end="\n\n")
    print(table(["alarm of the monitor", "false alarms", "caught", "median lead"], rules(runs)), end="\n\n")
    for collapsed in (False, True):
        text = "before the collapse" if collapsed else "runs that do not collapse"
        print(f"report, {text}: {verdicts([run for run in runs if run.collapsed == collapsed])}")


if __name__ == "__main__":
    main()
