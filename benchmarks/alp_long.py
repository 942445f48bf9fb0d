"""Does the noise of ALP help on responses of 120 tokens? Noise of five sizes against the same loss without noise.

    python benchmarks/alp_long.py [--hours 1.2] [--workers 2]
    python benchmarks/alp_long.py --hours 0    # tables of the runs that are there

Tuned with one other seed on other problems, as in fair_map.py: every size, with sigma fixed and learned, at the usual
learning rate and at half of it; the best size of each kind and the loss without noise also with wider clip bounds. The
second regime gets the three best sizes of the first. The best fixed and the best learned noise are then trained with
eight seeds, each beside the loss without noise at the same bounds and learning rate. Sigma is learned at a hundred
times the published rate: at that rate it moves by 2 % in 40 updates; the first table has all three rates (Figure 9 of
arXiv 2603.19470). Runs of the fair map (--map) are not trained again. All take about 1.3 processor hours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from fair_map import MAP, RESULTS, TUNING, WATCHED, Store, choices, keep_rollouts, rows_of, train
from grid import table
from trimtab.intervals import seed_interval
from trimtab.trainer.config import load_config
from trimtab.trainer.lab import tuning
from trimtab.trainer.lab.experiment import LONG_RECIPE, ExperimentPlan, plan_experiment
from trimtab.trainer.lab.regimes import Regime, regime

ALP, CONTROL = "token-alp", "token-alp-bypass"
SIGMAS, KEPT_SIGMAS = (0.01, 0.03, 0.1, 0.3, 1.0), 3
FIXED, PUBLISHED, LEARNED = 0.0, 5e-4, 5e-2  # learning rates of ln sigma
RATES = (1.0, 0.5)  # factors of the regime's learning rate
CLIP, WIDE = {False: "[0.8, 1.28]", True: "[0.5, 2]"}, tuning.OTHER_BOUND[CONTROL]
REFERENCES = ("grpo", "token-tis", "icepop", "geo-mask-token-tis")
SIGMA = "perturbation/sigma_mean"
LAST = 8  # steps that count as the end of a run
Rows = dict[int, dict[str, Any]]  # by seed


@dataclass(frozen=True, order=True)
class Setting:
    """Noise of size sigma, the learning rate of ln sigma, and what the loss without noise shares with it."""

    sigma: float = 0.0
    noise_rate: float = FIXED
    factor: float = 1.0  # of the regime's learning rate
    wide: bool = False  # clip bounds

    def spec(self, rate: float) -> str:
        """The method at the learning rate `rate` of the regime; without noise written as in the fair map."""
        learned = [f"perturbation.lr={self.noise_rate:g}"] if self.noise_rate != PUBLISHED else []
        noise = [f"perturbation.std={self.sigma:g}", *learned] if self.sigma else []
        slower = [f"optim.lr={self.factor * rate:.3g}"] if self.factor != 1 else []
        changes = ",".join([*([WIDE] if self.wide else []), *noise, *slower])
        return (ALP if self.sigma else CONTROL) + (f":{changes}" if changes else "")

    def __str__(self) -> str:
        noise = f"σ {self.sigma:g}, {'fixed' if self.noise_rate == FIXED else 'learned'}" if self.sigma else "no noise"
        return f"{noise}, learning rate x {self.factor:g}, clip {CLIP[self.wide]}"


@dataclass(frozen=True)
class Runs:
    """The runs of this experiment, and those of the fair map."""

    store: Store
    shared: Store
    given: argparse.Namespace
    deadline: float

    def plan(self, part: str, specs: Sequence[str], place: Regime) -> ExperimentPlan:
        sets, out, seeds, first = self.given.set, self.given.out, self.given.seeds, 0
        if part == TUNING:
            section = load_config(LONG_RECIPE, sets).eval
            sets = [*sets, f"eval.skip={section.skip + section.problems}", "eval.every=0"]
            out, seeds, first = out / tuning.FOLDER, 1, tuning.FIRST_SEED
        plan = plan_experiment(specs, [place], seeds, out, model=LONG_RECIPE, sets=sets, first_seed=first)
        return keep_rollouts(plan)

    def train(self, part: str, settings: Iterable[Setting], place: Regime) -> dict[Setting, Rows]:
        """Train what is missing until the deadline; the rows that are there of each setting."""
        rate = self.plan(MAP, [CONTROL], place).runs[0].config.optim.lr
        specs = {setting.spec(rate): setting for setting in settings}
        runs = self.plan(part, list(specs), place).runs
        missing = [run for run in runs if self.shared.row(part, run) is None]
        for error in train(part, missing, self.store, self.given.workers, self.deadline):
            print(f"failed: {error}")
        found: dict[Setting, Rows] = {setting: {} for setting in specs.values()}
        for run in runs:
            if (row := self.shared.row(part, run) or self.store.row(part, run)) is not None:
                found[specs[run.method.spec]][run.seed] = row
        return found

    def references(self, place: Regime) -> dict[str, Rows]:
        """Rows of other methods in the fair map, with published and with tuned settings."""
        published = self.plan(MAP, REFERENCES, place)
        chosen = choices(tuning.plan_tuning(published, 1), self.shared)
        plan = tuning.plan_comparison(published, chosen)
        found: dict[str, Rows] = {}
        for row in rows_of(keep_rollouts(plan), chosen, self.shared):
            found.setdefault(row["method"], {})[row["seed"]] = row
        return dict(sorted(found.items()))


def accuracy(row: Mapping[str, Any]) -> float:
    return row["accuracy"] or 0.0  # None: diverged


def interval(values: Sequence[float], form: str) -> str:
    found = seed_interval(values)
    return "-" if found is None else f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def lead(rows: Rows, others: Rows) -> str:
    return interval([accuracy(rows[seed]) - accuracy(others[seed]) for seed in rows if seed in others], "+.3f")


def of_runs(rows: Rows, name: str, last: int = 0) -> str:
    """Mean of a metric over the last so many steps of the runs (0: all)."""
    series = [[value for value in row["metrics"].get(name) or [] if value is not None] for row in rows.values()]
    values = [mean(one[-last:]) for one in series if one]
    return f"{mean(values):.2g}" if values else "-"


def values_of(tried: Mapping[Setting, Rows]) -> dict[Setting, float]:
    return {setting: mean(map(accuracy, rows.values())) for setting, rows in tried.items() if rows}


def best_of_each_kind(values: Mapping[Setting, float]) -> list[Setting]:
    """The best setting with fixed noise, with learned noise, and without noise."""
    kinds = ((True, FIXED), (True, LEARNED), (False, FIXED))
    return [max((s for s in values if (s.sigma > 0, s.noise_rate) == kind), key=values.__getitem__) for kind in kinds]


def tuning_table(values: Mapping[Setting, float]) -> str:
    kinds = sorted({(s.noise_rate, s.factor) for s in values})
    rows = [
        [f"{sigma:g}", CLIP[wide]]
        + [f"{values[s]:.3f}" if (s := Setting(sigma, *kind, wide)) in values else "-" for kind in kinds]
        for sigma, wide in sorted({(s.sigma, s.wide) for s in values})
    ]
    return table(["σ", "clip", *(f"ln σ at {rate:g}, learning rate x {factor:g}" for rate, factor in kinds)], rows)


def results_tables(found: Mapping[Setting, Rows], others: Mapping[str, Rows]) -> list[str]:
    named = {**{str(setting): rows for setting, rows in found.items()}, **others}
    rows = []
    for name, one in named.items():
        metrics = (of_runs(one, SIGMA, LAST), of_runs(one, "entropy/rollout", LAST), of_runs(one, "mismatch/k3"))
        rows.append([name, str(len(one)), interval([accuracy(row) for row in one.values()], ".3f"), *metrics])
    noisy = {s: found[replace(s, sigma=0.0, noise_rate=FIXED)] for s in found if s.sigma}
    pairs = [["the same without noise", *(lead(found[s], own) for s, own in noisy.items())]]
    pairs += [[n, *(lead(found[s], one) for s in noisy)] for n, one in named.items() if n not in map(str, noisy)]
    heads = ["setting", "seeds", "accuracy", "σ at the end", "entropy at the end", "mean k3"]
    return [table(heads, rows), table(["noise less", *map(str, noisy)], pairs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", nargs="+", default=["int4", "stale-32"])
    parser.add_argument("--sigmas", nargs="+", type=float, default=SIGMAS)
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run after so many hours")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of every run; change --results and --map too")
    parser.add_argument("--results", type=Path, default=RESULTS.with_name("alp-long.parquet"))
    parser.add_argument("--map", type=Path, default=RESULTS, help="the fair map's results")
    parser.add_argument("--out", type=Path, default=Path("runs/alp-long"), help="where runs in progress are")
    given = parser.parse_args()
    store = Store.open(given.results, (*WATCHED, SIGMA, "perturbation/dlogp"))
    runs = Runs(store, Store.open(given.map), given, time.monotonic() + 3600 * given.hours)
    sigmas, lines = list(given.sigmas), []
    for place in map(regime, given.regimes):
        settings = [Setting(factor=factor, wide=wide) for factor in RATES for wide in (False, True)]
        settings += [Setting(sigma, kind, factor) for sigma in sigmas for kind in (FIXED, LEARNED) for factor in RATES]
        settings += [Setting(sigma, PUBLISHED) for sigma in sigmas if not lines]
        tried = runs.train(TUNING, settings, place)
        if all(tried.values()):
            noisy = best_of_each_kind(values_of(tried))[:2]
            tried |= runs.train(TUNING, [replace(s, factor=f, wide=True) for s in noisy for f in RATES], place)
        values = values_of(tried)
        lines += [f"## {place.name}", tuning_table(values)]
        if not all(tried.values()):
            break
        best = best_of_each_kind(values)
        found = runs.train(MAP, [s for one in best for s in (one, replace(one, sigma=0.0, noise_rate=FIXED))], place)
        lines += results_tables(found, runs.references(place))
        sigmas = sorted(sigmas, key=lambda sigma: max(values[s] for s in values if s.sigma == sigma))[-KEPT_SIGMAS:]
    hours = sum(row["processor_seconds"] for row in store.rows.values()) / 3600
    print("", *lines, f"{len(store.rows)} runs took {hours:.2f} processor hours.", sep="\n\n")


if __name__ == "__main__":
    main()
