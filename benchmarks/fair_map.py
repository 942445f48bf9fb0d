"""The fair map: methods x kinds of mismatch on responses of 120 tokens, each with tuned and with published settings.

    python benchmarks/fair_map.py [--hours 2] [--only stale-32 token-tis] [--table fair-map.md] [--figure map.png]
    python benchmarks/fair_map.py --hours 0 --figure map.png    # of the runs that are there

For each method and regime six settings are tried, as by `trimtab compare --tune`; the best and the published one are
then trained with other seeds. Results are kept in one file (--results): a run that is in it is not trained again, in
this or another checkout, so that the map may be made in parts. With each are the metrics that may warn of a collapse,
step by step. Printed are the table of the runs that are there, the processor time they took, and about how much the
missing ones will take. Runs with the first seed keep some of their rollouts (--out).

    python benchmarks/fair_map.py --hours 0 --pair token-alp token-alp-bypass "m2po (tuned)" "grpo (tuned)"

prints by how much the first of each two leads the second, paired by seed.

    python benchmarks/fair_map.py --hours 0 --advice src/trimtab/diagnosis/advice/fair_map.json

writes what `trimtab diagnose` recommends by: the results of methods in the regimes that it can tell.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.errors import TrimtabError
from trimtab.intervals import seed_interval
from trimtab.report.experiment_page import MethodScore, describe_marks, format_markdown, rank_methods
from trimtab.runs import atomic
from trimtab.runs.directory import read_metrics
from trimtab.runs.summary import SCHEMA, RunSummary
from trimtab.trainer.display import RunsDisplay, open_display
from trimtab.trainer.lab import tuning
from trimtab.trainer.lab.experiment import LONG_RECIPE, ExperimentPlan, PlannedRun, plan_experiment
from trimtab.trainer.lab.regimes import regime
from trimtab.trainer.lab.runner import train_all

METHODS = (
    "grpo",
    "token-tis",
    "icepop",
    "geo-mask-token-tis",
    "m2po",
    "opsm",
    "seq-bypass",
    "token-alp-bypass",
    "token-alp",
)
# int8 is on-policy to the digit here (k3 5e-6 before training, int4 1e-3).
REGIMES = ("stale-32", "int4", "reuse-16")
# Where trainer and sampler agree all weights are 1, so that these are `grpo` and `token-tis` there, to the digit.
LEFT_OUT = {("icepop", "reuse-16"), ("geo-mask-token-tis", "reuse-16")}
# Regime -> what `trimtab diagnose` calls its mismatch ("" for none), and how it is described there.
DIAGNOSED = {
    "stale-32": ("stale", "weights renewed every 32 updates"),
    "int4": ("quantized", "a sampler of four bits"),
    "reuse-16": ("", "16 updates a batch"),
}
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "data" / "fair-map.parquet"
BLUE = "#0072B2"
TUNING, MAP = "tuning", "map"
TUNED = tuning.tuned_name("")  # how the rows with chosen settings end
RUNS_AT_ONCE = 4  # of each worker: the clock of --hours is read between so many
KEPT_STEPS = 4  # whose rollouts a run with the first seed keeps
ADVISING_SEEDS = 5  # fewest seeds of a regime that `trimtab diagnose` recommends by: fewer hardly separate methods
WATCHED = (
    "reward/mean",
    "length/mean",
    "length/truncated",
    "entropy/rollout",
    "mismatch/k3",
    "mismatch/ess_token",
    "mismatch/ess_seq",
    "optim/grad_norm",
    "update/kl",
    "guard/returns",
)
Key = tuple[str, str, str, int]  # part, setting of the method, regime, seed


@dataclass
class Store:
    """The finished runs in one file, which is replaced after every run."""

    path: Path
    rows: dict[Key, dict[str, Any]]
    watched: Sequence[str] = WATCHED

    @classmethod
    def open(cls, path: Path, watched: Sequence[str] = WATCHED) -> Store:
        rows = pq.read_table(path).to_pylist() if path.exists() else []
        return cls(path, {(row["part"], row["method"], row["regime"], row["seed"]): row for row in rows}, watched)

    def add(self, part: str, runs: Iterable[tuple[PlannedRun, RunSummary]]) -> None:
        for run, result in runs:
            if result.status == "failed":
                continue
            self.rows[key(part, run)] = {
                "part": part,
                "method": run.method.spec,
                "objective": run.method.objective,
                "keywords": " ".join(run.method.overrides),
                "regime": run.regime.name,
                "regime_description": run.regime.description,
                "seed": run.seed,
                "run": run.name,
                "planned_steps": run.config.trainer.steps,
                "settings": digest(run),
                "metrics": series(run, self.watched),
                **asdict(result),
            }
        table = pa.Table.from_pylist([self.rows[name] for name in sorted(self.rows)], schema_of_parts(self.watched))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        atomic.write_bytes(self.path, sink.getvalue().to_pybytes())

    def row(self, part: str, run: PlannedRun) -> dict[str, Any] | None:
        row = self.rows.get(key(part, run))
        if row is not None and row["settings"] != digest(run):
            raise TrimtabError(f"{self.path} has {run.name} with other settings: give another --results")
        return row

    def summary(self, part: str, run: PlannedRun) -> RunSummary | None:
        row = self.row(part, run)
        if row is None:
            return None
        found = RunSummary(**{field.name: row[field.name] for field in fields(RunSummary)})
        return replace(found, curve=tuple(found.curve), curve_steps=tuple(found.curve_steps))


def schema_of_parts(watched: Sequence[str]) -> pa.Schema:
    return pa.schema(
        [
            pa.field("part", pa.string()),
            *SCHEMA,
            pa.field("settings", pa.string()),
            pa.field("metrics", pa.struct([pa.field(name, pa.list_(pa.float32())) for name in watched])),
        ]
    )


def key(part: str, run: PlannedRun) -> Key:
    return part, run.method.spec, run.regime.name, run.seed


def series(run: PlannedRun, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Metrics of a run by name, one value a step, None where a step has none."""
    rows = read_metrics(Path(str(run.config.out)) / "metrics.jsonl")
    return {name: [row.get(name) for row in rows] for name in names}


def digest(run: PlannedRun) -> str:
    """Of all settings that are not defaults, so that a new key of recipes changes nothing."""
    config = run.config.model_dump(mode="json", exclude={"out", "description"}, exclude_defaults=True)
    return sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def train(part: str, runs: Sequence[PlannedRun], store: Store, workers: int, deadline: float) -> list[str]:
    """Train the runs that are missing until the deadline; the errors of those that failed."""
    waiting = [run for run in runs if store.row(part, run) is None]
    print(f"{part}: {len(runs) - len(waiting)} of {len(runs)} runs are there", flush=True)
    errors: list[str] = []
    while waiting and time.monotonic() < deadline:
        some, waiting = waiting[: RUNS_AT_ONCE * workers], waiting[RUNS_AT_ONCE * workers :]
        by_name = {run.name: run for run in some}
        with open_display(RunsDisplay) as observer:
            results = train_all(
                {name: run.config for name, run in by_name.items()},
                workers=workers,
                observer=observer,
                save=lambda done, by_name=by_name: store.add(part, [(by_name[name], done[name]) for name in done]),
            )
        errors += [f"{name}: {result.error}" for name, result in results.items() if result.status == "failed"]
    return errors


def choices(candidates: tuning.Candidates, store: Store) -> list[tuning.Choice]:
    """The chosen settings of all pairs of method and regime whose tuning is complete."""
    results = {run.name: store.summary(TUNING, run) for run in candidates.plan.runs}
    found = []
    for (method, name), specs in candidates.specs.items():
        runs = tuple(r for r in candidates.plan.runs if r.regime.name == name and r.method.spec in specs)
        known = {run.name: result for run in runs if (result := results[run.name]) is not None}
        if len(known) == len(runs):
            part = tuning.Candidates(replace(candidates.plan, runs=runs), {(method, name): specs}, candidates.seeds)
            found += tuning.choose(part, known)
    return found


def rows_of(plan: ExperimentPlan, chosen: Sequence[tuning.Choice], store: Store) -> list[dict[str, Any]]:
    """The runs of the map that are there, by the names of its rows."""
    found = [(run, store.row(MAP, original(run, chosen))) for run in plan.runs]
    return [{**row, "method": run.method.spec} for run, row in found if row is not None]


def page(
    rows: Sequence[dict[str, Any]],
    missing: int,
    chosen: Sequence[tuning.Choice],
    tuned: tuning.Candidates,
    store: Store,
) -> str:
    """Tables of tuned and of published settings, what was tuned, and the processor time, of all runs that are there.

    They are tables of their own, so that each compares methods that were treated alike.
    """
    hours = sum(row["processor_seconds"] for row in store.rows.values()) / 3600
    each = hours / max(len(store.rows), 1)
    cost = (
        f"{len(store.rows)} runs took {hours:.2f} processor hours; {missing} are missing, about {missing * each:.1f}."
    )
    if not rows:
        return cost
    tables = [
        rank_methods([row for row in rows if row["method"].endswith(TUNED) == is_tuned])
        for is_tuned in sorted({row["method"].endswith(TUNED) for row in rows}, reverse=True)
    ]
    lines = [
        *(line for table in tables for line in (format_markdown(table), "", describe_marks(table), "")),
        *(f"- {line}" for line in tuning.describe(chosen, tuned)),
        "",
        cost,
    ]
    return "\n".join(lines)


def leads(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Of each two names: mean difference of accuracy, paired by seed, with its 95 % interval, in each regime."""
    by_seed = {
        name: dict(zip(score.seeds, score.values, strict=True)) for name, score in rank_methods(rows).scores.items()
    }
    found = []
    for first, other in zip(names[::2], names[1::2], strict=True):
        for place in DIAGNOSED:
            one, two = by_seed.get((first, place), {}), by_seed.get((other, place), {})
            if lead := seed_interval([one[seed] - two[seed] for seed in one if seed in two]):
                found.append(f"{place}: {first} - {other} {lead.mean:+.3f} [{lead.low:+.3f}, {lead.high:+.3f}]")
    return found


def tried(store: Store, method: str) -> list[str]:
    """Accuracy of every setting of a method while it was tuned, by regime."""
    found = [row for (part, *_), row in store.rows.items() if part == TUNING and row["objective"] == method]
    return [f"{row['regime']}: {row['method']} (seed {row['seed']}) {row['accuracy']:.3f}" for row in found]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy with intervals: a panel for each regime, published settings hollow and tuned ones filled."""
    table = rank_methods(rows)
    methods = [name for name in METHODS if {name, tuning.tuned_name(name)} & set(table.methods)]
    size = (3.2 * len(table.regimes) + 1.8, 0.36 * len(methods) + 1.5)
    figure, panels = plt.subplots(1, len(table.regimes), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for axes, name in zip(panels[0], table.regimes, strict=True):
        start = [row["accuracy_before"] for row in rows if row["regime"] == name]
        axes.axvline(sum(start) / len(start), color="#8c8c8c", linewidth=1, linestyle=":")
        for place, method in enumerate(methods):
            for spec, below, face in ((method, -0.15, "white"), (tuning.tuned_name(method), 0.15, BLUE)):
                if (score := table.scores.get((spec, name))) is not None:
                    mean, low, high = score.accuracy.mean, score.accuracy.low, score.accuracy.high
                    axes.plot([low, high], [place + below] * 2, color=BLUE, linewidth=1.2)
                    axes.plot(mean, place + below, "o", color=BLUE, markerfacecolor=face, markersize=5)
        axes.set(title=name, xlim=(-0.02, 1), xlabel="held-out accuracy")
        axes.grid(axis="x", color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_yticks(range(len(methods)), methods)
    panels[0, 0].invert_yaxis()
    figure.suptitle("filled: tuned; hollow: published settings; dotted: before training", fontsize=9, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})


def advice(rows: Sequence[dict[str, Any]], rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """The results by regime, for `trimtab.diagnosis.advice`; `rates` are the published learning rates.

    A method has its tuned or its published settings, whichever ended higher: tuned ones were chosen with one seed and
    may be worse. Its mean is therefore slightly too high. Regimes with fewer than `ADVISING_SEEDS` seeds of a method,
    or not the same number of all, are left out.
    """
    seeds = Counter((row["method"], row["regime"]) for row in rows)
    found = []
    for name, (cause, description) in DIAGNOSED.items():
        most = max((count for (_, regime), count in seeds.items() if regime == name), default=0)
        complete = [row for row in rows if row["regime"] == name and seeds[row["method"], name] == most]
        scores = better_settings(complete, name)
        published = {method: score for (method, _), score in rank_methods(complete).scores.items()}
        results = {m: result_of(score, rates[name], published.get(m)) for m, score in scores.items()}
        runs = [row for score in scores.values() for row in score.rows]
        wanted = {method for method in METHODS if (method, name) not in LEFT_OUT}
        if most >= ADVISING_SEEDS and scores.keys() == wanted:
            k3, tokens = (
                [mean(value for value in row["metrics"][key] if value is not None) for row in runs]
                for key in ("mismatch/k3", "length/mean")
            )
            found.append(
                {
                    "name": name,
                    "cause": cause,
                    "description": description,
                    "seeds": most,
                    "before": rounded(mean(row["accuracy_before"] for row in runs)),
                    "k3": [rounded(min(k3)), rounded(max(k3))],
                    "tokens": [rounded(min(tokens)), rounded(max(tokens))],
                    "methods": results,
                }
            )
    return found


def better_settings(rows: Sequence[dict[str, Any]], regime: str) -> dict[str, MethodScore]:
    """The results of each method at the settings of the higher mean, compared with those of the others."""
    means = {spec: score.accuracy.mean for (spec, _), score in rank_methods(rows).scores.items()}
    tried = {method: [s for s in (tuning.tuned_name(method), method) if s in means] for method in METHODS}
    kept = {max(specs, key=means.__getitem__): method for method, specs in tried.items() if specs}
    table = rank_methods([row for row in rows if row["method"] in kept])
    return {method: table.scores[spec, regime] for spec, method in kept.items()}


def result_of(score: MethodScore, rate: float, published: MethodScore | None) -> dict[str, Any]:
    chosen = dict(change.split("=") for change in score.rows[0]["keywords"].split())
    factor = float(chosen.pop("optim.lr", rate)) / rate
    return {
        "accuracy": rounded(score.accuracy.mean),
        "low": rounded(score.accuracy.low),
        "high": rounded(score.accuracy.high),
        "best": score.is_best,
        "rate": rounded(factor),
        "settings": {key.split(".")[-1]: float(value) for key, value in chosen.items() if key.startswith("objective.")},
        "published": None if published is None else rounded(published.accuracy.mean),
    }


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def original(run: PlannedRun, chosen: Sequence[tuning.Choice]) -> PlannedRun:
    """The run of a row: that of the chosen setting for a row of a tuned method."""
    for choice in chosen:
        if (run.method.spec, run.regime.name) == (tuning.tuned_name(choice.method), choice.regime):
            return replace(run, method=replace(run.method, spec=choice.spec))
    return run


def keep_rollouts(plan: ExperimentPlan) -> ExperimentPlan:
    """Runs with the first seed keep some of their rollouts."""
    runs = list(plan.runs)
    for index, run in enumerate(runs):
        if run.seed == 0:
            every = max(1, run.config.trainer.steps // KEPT_STEPS)
            log = run.config.log.model_copy(update={"trajectories_every": every})
            runs[index] = replace(run, config=run.config.model_copy(update={"log": log}))
    return replace(plan, runs=tuple(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="methods, regimes, or both: this part of the map")
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run after so many hours")
    parser.add_argument("--seeds", type=int, default=8, help="seeds of the map")
    parser.add_argument("--tune", type=int, default=1, help="seeds of each setting that is tuned")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--model", default=LONG_RECIPE)
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of every run; give another --results too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("runs/fair-map"), help="where runs in progress are")
    parser.add_argument("--table", type=Path, help="write the table there too")
    parser.add_argument("--advice", type=Path, help="write what `trimtab diagnose` recommends by there")
    parser.add_argument("--pair", nargs="+", default=[], metavar="METHOD", help="two or more pairs of rows to compare")
    parser.add_argument("--tried", metavar="METHOD", help="print the accuracies of all settings while it was tuned")
    parser.add_argument("--figure", type=Path, help="draw the table there")
    given = parser.parse_args()
    if unknown := set(given.only) - {*METHODS, *REGIMES}:
        parser.error(f"--only {' '.join(sorted(unknown))}: neither a method nor a regime of the map")
    deadline = time.monotonic() + 3600 * given.hours

    methods = [name for name in METHODS if name in given.only] or list(METHODS)
    regimes = [regime(name) for name in REGIMES if name in given.only] or [regime(name) for name in REGIMES]
    published = plan_experiment(methods, regimes, given.seeds, given.out, model=given.model, sets=given.set)
    trained = [run for run in published.runs if (run.method.spec, run.regime.name) not in LEFT_OUT]
    published = replace(published, runs=tuple(trained))
    candidates = tuning.plan_tuning(published, given.tune)
    store = Store.open(given.results)
    errors = train(TUNING, candidates.plan.runs, store, given.workers, deadline)
    chosen = choices(candidates, store)
    plan = keep_rollouts(tuning.plan_comparison(published, chosen))
    runs = list({run.name: original(run, chosen) for run in plan.runs}.values())
    errors += train(MAP, runs, store, given.workers, deadline)

    wanted = [*((TUNING, run) for run in candidates.plan.runs), *((MAP, run) for run in runs)]
    missing = sum(store.row(part, run) is None for part, run in wanted)
    found = rows_of(plan, chosen, store)
    text = page(found, missing, chosen, candidates, store)
    print(f"\n{text}", *leads(found, given.pair), sep="\n")
    if given.tried:
        print(*tried(store, given.tried), sep="\n")
    if given.table:
        given.table.write_text(text + "\n")
    if given.figure and found:
        draw(found, given.figure)
    if given.advice:
        rates = {run.regime.name: run.config.optim.lr for run in published.runs}
        atomic.write_bytes(given.advice, (json.dumps(advice(found, rates), indent=1) + "\n").encode())
    for line in errors:
        print(f"failed: {line}")


if __name__ == "__main__":
    main()
