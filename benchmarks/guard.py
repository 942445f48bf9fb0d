"""What `[guard]` does for runs that collapse, for runs that do not, and what it costs.

    python benchmarks/guard.py [--hours 2] [--only stale-32 grpo] [--seeds 8]    # trains; goes on where it was stopped
    python benchmarks/guard.py --hours 0       # tables of the runs that are there
    python benchmarks/guard.py --figure docs/images/guard.png
    python benchmarks/guard.py --offline       # signs in the stored runs of the fair map; trains nothing
    python benchmarks/guard.py --healthy 209 [--after 109]   # as many that did not fall, of other cells, with the guard
    python benchmarks/guard.py --lost 20 [--silent]    # samplers whose weights stop arriving at a random step
    python benchmarks/guard.py --cost laboratory-long    # a step with the guard against one without, in alternation

`CELLS` are the cells of the fair map whose mean at published settings is more than .05 below that of the same method
at its tuned rate and below the accuracy before training, and cells of the sweeps of rates that fail. Each run with the
guard is compared with the stored run of the same seed at the tuned rate. A run's result is the last evaluation that
was not discarded. With the guard, accuracy is measured at each of its checkpoints.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pyarrow.parquet as pq

from fair_map import BLUE, Store, train
from fair_map import RESULTS as FAIR_MAP
from trimtab.intervals import seed_interval
from trimtab.monitor.collapse_signs import Sign
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import METRICS
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.engines.factory import build_engines
from trimtab.trainer.guard import KeptSteps
from trimtab.trainer.lab.experiment import PlannedRun, plan_experiment
from trimtab.trainer.lab.regimes import regime
from trimtab.trainer.models.load import LoadedModel
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train as train_run
from trimtab.types import Engine

RESULTS = FAIR_MAP.with_name("guard.parquet")
PART, BASELINE, HEALTHY = "guard", "baseline", "healthy"
LONG = "laboratory-long"
UNHARMED = "did not fall"
ON = 'guard.on=["reward","ess","mismatch","nonfinite"]'
PROBLEMS = 512  # held-out problems of short runs; long runs are compared with stored ones, which have 128


class Cell(NamedTuple):
    """A method at a rate that fails, and the same method at its tuned rate. every: steps between checkpoints."""

    model: str | None
    regime: str
    failing: str
    tuned: str
    every: int


CELLS = (
    Cell(LONG, "stale-32", "grpo", "grpo:optim.lr=1.25e-05", 4),
    *(
        Cell(None, name, f"grpo:optim.lr={rate}", "grpo:optim.lr=1e-4", 4)
        for rate in ("8e-4", "4e-4")
        for name in ("on-policy", "int8", "int4", "noise")
    ),
    Cell(LONG, "reuse-16", "m2po", "m2po:optim.lr=2.5e-05", 1),
    Cell(LONG, "reuse-16", "grpo", "grpo:optim.lr=2.5e-05", 1),
    Cell(LONG, "reuse-16", "token-tis", "token-tis:optim.lr=2.5e-05", 1),
    Cell(LONG, "stale-32", "opsm", "opsm:optim.lr=1.25e-05", 4),
    Cell(LONG, "int4", "grpo:optim.lr=4e-4", "grpo", 4),
    Cell(LONG, "reuse-16", "opsm", "opsm:optim.lr=5e-05", 1),
    Cell(LONG, "reuse-16", "seq-bypass", "seq-bypass:optim.lr=2.5e-05", 1),
    Cell(LONG, "reuse-16", "token-alp", "token-alp:optim.lr=5e-05", 1),
    Cell(LONG, "int4", "token-alp", "token-alp:optim.lr=5e-05", 4),
)

UNSEEN = (
    Cell(None, "int3", "grpo:optim.lr=8e-4", "grpo:optim.lr=1e-4", 4),
    Cell(None, "stale-8", "token-bypass:optim.lr=1e-3", "token-bypass:optim.lr=5e-5", 4),
    Cell(None, "reuse-4", "dapo:optim.lr=8e-4", "dapo:optim.lr=1e-4", 4),
)
"""Cells that no setting of the guard was chosen on, at 8 to 20 times a rate that learns."""


def planned(cell: Cell, seeds: int, out: Path, factor: float, *, guarded: bool) -> list[PlannedRun]:
    sets = [] if cell.model else [f"eval.problems={PROBLEMS}"]
    if guarded:
        sets += [*guarded_every(cell.every), f"guard.lr_factor={factor}"]
    spec = cell.failing if guarded else cell.tuned
    folder = out / (cell.model or "laboratory") / (PART if guarded else BASELINE)
    plan = plan_experiment([spec], [regime(cell.regime)], seeds, folder, model=cell.model, sets=sets)
    # Results are kept by method, regime and seed: the short and the long laboratory must differ in one of them.
    named = replace(plan.runs[0].regime, name=cell.regime if cell.model else f"{cell.regime}, 11 tokens")
    return [replace(run, regime=named) for run in plan.runs]


def guarded_every(steps: int) -> list[str]:
    """Settings of a guard that keeps a checkpoint, and evaluates, after so many steps."""
    return [ON, f"guard.every={steps}", f"eval.every={steps}"]


def result(row: dict[str, Any]) -> float:
    """The last evaluation: a run that was stopped by its guard ends with that of the restored policy."""
    return row["curve"][-1]


def baselines(cell: Cell, store: Store) -> dict[int, float]:
    """Accuracy of the same method at its tuned rate, by seed."""
    rows = pq.read_table(FAIR_MAP).to_pylist() if cell.model else list(store.rows.values())
    part = "map" if cell.model else BASELINE
    name = cell.regime if cell.model else f"{cell.regime}, 11 tokens"
    return {
        row["seed"]: row["accuracy"]
        for row in rows
        if (row["part"], row["regime"], row["method"]) == (part, name, cell.tuned) and row["accuracy"] is not None
    }


def table(cells: Sequence[Cell], store: Store) -> Iterable[str]:
    """How the runs of these cells ended, compared with tuned runs: that of the same seed, and the mean of all."""
    yield (
        "| method, regime | runs | stopped | accuracy with the guard | at the tuned rate | within .05 of the same seed "
        "| of the mean | lowest result / best | returns |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    totals: dict[str, float] = defaultdict(float)
    for cell in cells:
        name = cell.regime if cell.model else f"{cell.regime}, 11 tokens"
        rows = [r for r in store.rows.values() if (r["part"], r["regime"], r["method"]) == (PART, name, cell.failing)]
        tuned = baselines(cell, store)
        rows = sorted((row for row in rows if row["seed"] in tuned), key=lambda row: row["seed"])
        if not rows:
            continue
        mean = statistics.mean(tuned.values())
        without = {seed: statistics.mean([one for other, one in tuned.items() if other != seed]) for seed in tuned}
        pairs = [one >= other - 0.05 for one, other in permutations(tuned.values(), 2)]
        counts = {
            "runs": len(rows),
            "low": sum(result(row) < 0.5 * max(row["curve"]) for row in rows),
            "seed": sum(result(row) >= tuned[row["seed"]] - 0.05 for row in rows),
            "unseen": sum(result(row) < tuned[row["seed"]] - 0.05 and not returned(row) for row in rows),
            "mean": sum(result(row) >= mean - 0.05 for row in rows),
            "tuned, seed": len(rows) * statistics.mean(pairs),
            "tuned, mean": len(rows) * statistics.mean(tuned[seed] >= without[seed] - 0.05 for seed in tuned),
        }
        shares = [result(row) / max(row["curve"]) for row in rows]
        yield (
            f"| `{cell.failing}`, {name} | {len(rows)} | {sum(row['status'] == 'diverged' for row in rows)} "
            f"| {interval(result(row) for row in rows)} | {interval(tuned[row['seed']] for row in rows)} "
            f"| {counts['seed']} | {counts['mean']} | {min(shares):.2f} | {statistics.mean(map(returned, rows)):.1f} |"
        )
        for key, value in counts.items():
            totals[key] += value
    if count := totals["runs"]:
        yield f"\n{count:.0f} runs; below half of its best: {totals['low']:.0f}; far, no return: {totals['unseen']:.0f}"
        for name, words in (("seed", "the tuned run of the same seed"), ("mean", "the mean of the tuned runs")):
            yield (
                f"within .05 of {words}: {totals[name]:.0f} ({totals[name] / count:.0%}); "
                f"tuned runs of other seeds: {totals[f'tuned, {name}'] / count:.0%}"
            )


def interval(values: Iterable[float]) -> str:
    found = seed_interval(list(values))
    assert found is not None
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def returned(row: dict[str, Any]) -> float:
    found = [value for value in row["metrics"]["guard/returns"] if value is not None]
    return max(found, default=0)


def signs(watched: Sequence[str] = ("reward", "ess", "mismatch")) -> Iterable[tuple[dict[str, Any], str, Sign | None]]:
    """Yields each stored run of the fair map, how it ended without the guard, and the first sign in it."""
    for row in pq.read_table(FAIR_MAP).to_pylist():
        accuracy = dict(zip(row["curve_steps"], row["curve"], strict=True))
        steps, sign = KeptSteps("sort"), None
        for index in range(row["steps"]):
            metrics = {name: values[index] for name, values in row["metrics"].items() if values is not None}
            metrics |= {"step": index + 1, "eval/sort/problems": 128.0}
            metrics |= {"eval/sort/before": accuracy[0]} if index == 0 else {}
            metrics |= {"eval/sort/greedy": accuracy[index + 1]} if index + 1 in accuracy else {}
            steps.add(metrics)
            sign = sign or steps.sign(watched)
        change = row["curve"][-1] - row["curve"][0]
        yield row, "fell by .12 and more" if change < -0.12 else UNHARMED if change >= -0.02 else "fell a little", sign


def offline() -> Iterable[str]:
    """Which stored runs of the fair map the guard would change."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    names: list[str] = []
    for row, kind, sign in signs():
        counts[kind][0] += sign is not None
        counts[kind][1] += 1
        if sign is not None and kind == UNHARMED:
            names.append(
                f"  {row['regime']} {row['method']} seed {row['seed']} ({row['part']}): {sign.name} {sign.text}"
            )
    yield from (f"{kind}: a sign in {found} of {count} runs" for kind, (found, count) in counts.items())
    yield from names


def healthy(store: Store, out: Path, workers: int, after: int, count: int) -> Iterable[str]:
    """Trains runs that did not fall, of cells that do not fail, with the guard: how many returned, their accuracy."""
    failing = {(cell.regime, cell.failing) for cell in CELLS}  # their runs are in the table of these cells
    unharmed = [row for row, kind, _ in signs() if kind == UNHARMED and row["part"] == "map"]
    random.Random(0).shuffle(unharmed)
    rows = [row for row in unharmed if (row["regime"], row["method"]) not in failing][after:count]
    runs: list[PlannedRun] = []
    for row in rows:
        # Where a step has few updates, every step may be the last one before a collapse.
        sets = guarded_every(4 if row["planned_steps"] > 8 else 1)
        plan = plan_experiment(
            [row["method"]], [regime(row["regime"])], row["seed"] + 1, out / HEALTHY, model=LONG, sets=sets
        )
        runs += [run for run in plan.runs if run.seed == row["seed"]]
    yield from train(HEALTHY, runs, store, workers, math.inf)
    pairs = [(row, store.rows[HEALTHY, row["method"], row["regime"], row["seed"]]) for row in rows]
    for row, with_guard in pairs:
        if returned(with_guard) or result(with_guard) != row["accuracy"]:
            yield (
                f"{row['regime']} {row['method']} seed {row['seed']}: {row['accuracy']:.3f} without, "
                f"{result(with_guard):.3f} with, returned {returned(with_guard):g} times"
            )
    yield f"{sum(not returned(one) for _, one in pairs)} of {len(pairs)} runs that did not fall did not return"
    keys = [(HEALTHY, row["method"], row["regime"], row["seed"]) for row in unharmed]
    others = [store.rows[key] for key in keys if key in store.rows and (key[2], key[1]) in failing]
    yield f"of cells that fail, {sum(map(bool, map(returned, others)))} of {len(others)} such runs returned"
    yield f"with the guard less without: {interval(result(one) - row['accuracy'] for row, one in pairs)}"


def draw(store: Store, path: Path) -> None:
    """Held-out accuracy of one run with and without the guard: `grpo` at stale-32, the first seed."""
    without = next(
        row
        for row in pq.read_table(FAIR_MAP).to_pylist()
        if (row["part"], row["regime"], row["method"], row["seed"]) == ("map", "stale-32", "grpo", 0)
    )
    row = store.rows[PART, "grpo", "stale-32", 0]
    returns = [value or 0 for value in row["metrics"]["guard/returns"]]
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(without["curve_steps"], without["curve"], color="#8c8c8c", marker="o", markersize=3, label="without")
    steps = [step - 0.5 for step, (before, after) in enumerate(pairwise([0, *returns]), start=1) if after > before]
    for start, end in pairwise([-1, *steps, math.inf]):
        part = [(x, y) for x, y in zip(row["curve_steps"], row["curve"], strict=True) if start < x < end]
        axes.plot(*zip(*part, strict=True), color=BLUE, marker="o", markersize=3, label="with [guard]" * (start < 0))
    for step in steps:
        axes.axvline(step, color=BLUE, linewidth=1, linestyle=":")
        axes.text(step + 0.7, 1.0, "returned", color=BLUE, fontsize=8, va="top")
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(-0.02, 1.02))
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})


class LosesWeights:
    """An engine that keeps its weights from one version on, until a publication is repeated; reports the new ones.

    silent: it does not say which weights it has, so that only statistics can tell.
    """

    def __init__(self, engine: Engine, first: int, *, silent: bool) -> None:
        self.engine, self.first, self.repaired = engine, first, False
        if silent:
            self.weight_checksums = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        self.repaired |= version == self.engine.policy_version >= self.first and not as_is
        if version >= self.first and not self.repaired and not as_is:
            weights, as_is = [(name, weight.clone()) for name, weight in self.engine.named_weights()], True
        self.engine.update_weights(weights, version, as_is=as_is)


def lost_weights(runs: int, names: Sequence[str], *, silent: bool) -> Iterable[str]:
    """Runs whose sampler gets no new weights from a random step on: how the guard repairs them, by sampler."""
    for name in names or ("on-policy", "bf16", "int8", "int4", "noise"):
        outcomes: Counter[str] = Counter()
        delays: list[int] = []
        for seed in range(runs):
            first = random.Random(f"{name} {seed}").randrange(5, 56)
            sets = [*regime(name).settings(), "trainer.steps=60", "eval.every=0", "eval.problems=8", f"seed={seed}"]
            sets += [ON, "trainer.prompts=8", "log.trajectories_every=0", "checkpoint.every=0"]

            def build(config: Config, loaded: LoadedModel, folder: Path, first: int = first) -> list[Any]:
                return [
                    LosesWeights(engine, first, silent=silent)
                    for engine in build_engines(config, loaded, folder, print)
                ]

            with tempfile.TemporaryDirectory() as folder:
                train_run(load_config("laboratory", sets), out=Path(folder) / "run", engines=build)
                rows = read_metrics(Path(folder) / "run" / METRICS)
            events = [row for row in rows if "guard/event" in row]
            returned = any("guard/returns" in row for row in rows)
            outcomes["returned" if returned else "repaired" if events else "not seen"] += 1
            delays += [events[0]["step"] - 1 - first] if events else []
        counts = ", ".join(f"{count} {word}" for word, count in outcomes.most_common())
        yield f"{name}: {counts} of {runs}; seen after {statistics.median(delays or [math.nan]):g} steps (median)"


class Clock(NullObserver):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step(self, metrics: Mapping[str, float | str]) -> None:  # noqa: ARG002 - of the protocol
        self.ends.append(time.perf_counter())


def cost(model: str, rounds: int) -> Iterable[str]:
    """Seconds of a step with and without the guard, by round; checkpoints of the guard included."""
    recipe = model if model in ("laboratory", LONG) else "quickstart"
    sets = ["trainer.steps=31", "eval.every=0", "eval.problems=8", "checkpoint.every=0", "log.trajectories_every=0"]
    ratios: list[float] = []
    for number in range(rounds):
        seconds = []
        for guard in ([], [ON]):
            clock = Clock()
            with tempfile.TemporaryDirectory() as folder:
                train_run(load_config(recipe, [*sets, *guard]), out=Path(folder) / "run", observer=clock)
            # From the first step to the 30th: the 31st saves the last checkpoint of both.
            seconds.append((clock.ends[29] - clock.ends[0]) / 29)
        ratios.append(seconds[1] / seconds[0])
        yield f"round {number + 1}: without {seconds[0]:.4f} s, with {seconds[1]:.4f} s a step, {ratios[-1] - 1:+.1%}"
    yield f"{recipe}: median {statistics.median(ratios) - 1:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="methods, regimes, or both")
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run after so many hours")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--factor", type=float, default=0.25, help="guard.lr_factor; another one: give other --results")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("runs/guard"))
    parser.add_argument("--offline", action="store_true", help="signs in the stored runs of the fair map")
    parser.add_argument("--healthy", type=int, metavar="RUNS", help="train as many of those that did not fall")
    parser.add_argument(
        "--after", type=int, metavar="RUNS", default=0, help="of --healthy: leave out the first of them"
    )
    parser.add_argument("--figure", type=Path, help="draw one run with and without the guard")
    parser.add_argument("--cost", metavar="RECIPE", help="what the guard costs in a step of this recipe")
    parser.add_argument("--lost", type=int, metavar="RUNS", help="runs of each sampler that loses its weights")
    parser.add_argument("--silent", action="store_true", help="of --lost: the samplers do not say what they have")
    parser.add_argument("--rounds", type=int, default=5, help="of --cost")
    given = parser.parse_args()
    if given.cost:
        for line in cost(given.cost, given.rounds):
            print(line, flush=True)
        return
    if given.offline:
        print(*offline(), sep="\n")
        return
    if given.lost:
        for line in lost_weights(given.lost, given.only, silent=given.silent):
            print(line, flush=True)
        return
    if given.healthy:
        for line in healthy(Store.open(given.results), given.out, given.workers, given.after, given.healthy):
            print(line, flush=True)
        return
    if given.figure:
        draw(Store.open(given.results), given.figure)
        return
    deadline = time.monotonic() + 3600 * given.hours
    store = Store.open(given.results)
    errors: list[str] = []
    for cell in (*CELLS, *UNSEEN):
        words = {cell.regime, cell.failing, cell.failing.partition(":")[0], cell.model or "laboratory"}
        if set(given.only) <= words:
            for part in (BASELINE, PART) if cell.model is None else (PART,):
                runs = planned(cell, given.seeds, given.out, given.factor, guarded=part == PART)
                errors += train(part, runs, store, given.workers, deadline)
    for cells in (CELLS, UNSEEN):
        print(*table(cells, store), "", sep="\n")
    guarded = [row for row in store.rows.values() if row["part"] == PART and returned(row)]
    if lost := sorted((row["steps"] - row["planned_steps"]) / returned(row) for row in guarded):
        tenth = len(lost) // 10
        print(f"a return costs {statistics.median(lost):g} steps, 80% {lost[tenth]:g} to {lost[-1 - tenth]:g}")
    hours = sum(row["processor_seconds"] for row in store.rows.values()) / 3600
    print(f"{len(store.rows)} runs took {hours:.2f} processor hours", *(f"failed: {line}" for line in errors), sep="\n")


if __name__ == "__main__":
    main()
