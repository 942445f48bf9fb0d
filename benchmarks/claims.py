"""Small experiments in the laboratory, each of which settles one claim of docs/results.

    python benchmarks/claims.py EXPERIMENT [--seeds 3] [--out runs/claims]

    sigma     does the noise of ALP settle at the mismatch? Four initial sizes, three samplers, 240 updates at a hundred
              times the published rate of ln sigma
    arms      off-policy sequence masking, and as controls the same mask on positive responses and on both
    prefixes  SOUP: share of a response that the older policy wrote x batches between its refreshes, against on-policy
              training
    batches   responses an update x learning rate
    tails     do ratios blow up without noise? 2,000 updates, 16 a batch, no gradient clip, at two learning rates
    small     does a small mismatch alone collapse training? Size and kind of the mismatch x learning rate
    small-long  the same with responses of 120 tokens
    lags      no correction, a clip around the sampler and token weights with a sampler 1 and 4 updates old, 120 tokens
    layers    noise of ALP on all four layers, on some of them, and on the logits, 120 tokens
    lengths   do masks of products prefer short responses? Responses of 4, 10, 20 and 40 tokens in one run

Accuracy is greedy, on 128 held-out problems; mean [lowest, highest] of the seeds. An interrupted run goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from grid import Cell, by_seed, mean_and_range, run, table
from trimtab.lab.experiment import LONG_RECIPE, WARM_STARTS
from trimtab.lab.regimes import RECIPE, regime
from trimtab.runs import trajectories
from trimtab.runs.directory import read_metrics

SIZES = (1.0, 0.1, 0.01, 1e-4)
SAMPLERS = {
    "bf16": ("engine.dtype=bfloat16",),
    "int4": ("engine.quantize=int4",),
    "int3": ("engine.quantize=int3",),
}
NOISY = ("objective.name=token-alp", "perturbation.lr=0.05", "trainer.steps=240", "optim.lr=5e-5")
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
ARMS = ("no mask", "negative", "positive", "both")
REGIMES = ("stale-32", "int3", "reuse-16")
RATIOS, REFRESHES = (0.3, 0.6, 0.9), (2, 8, 16)
PROMPTS, RATES = (4, 16, 64), (1e-4, 2e-4, 4e-4, 8e-4)
ALP_CLIPS = ("objective.clip_low=0.2", "objective.clip_high=0.28", "objective.clip_dual=10.0")
NOISES = {"none": None, "1e-4": 1e-4, "1e-2": 1e-2}
TAIL_RATES = (2.5e-5, 1e-4)
SMALL = {
    "none": (),
    "bf16": ("engine.dtype=bfloat16",),
    "int8": ("engine.quantize=int8",),
    "int4": ("engine.quantize=int4",),
    "noise-.05": ("engine.noise=0.05",),
    "noise-.1": ("engine.noise=0.1",),
    "noise-.2": ("engine.noise=0.2",),
}
LONG_SMALL, LONG_RATES = ("none", "int8", "noise-.1", "int4"), (2e-4, 4e-4)
LAGS = {"up to 1": 2, "up to 4": 5}  # trainer.sync_every
LAG_METHODS = ("grpo", "token-bypass", "token-tis")
LAYERS = ("all", "0", "1-2", "3", "logits")
LENGTHS = (4, 10, 20, 40)  # of `sort`: one digit less, and the stop
BANDS = {"product": ("sequence", 0.5, 2.0), "geometric": ("geometric", 0.93, 1.07)}

Results = Mapping[str, dict[str, Any]]
Rows = tuple[Sequence[str], list[list[str]]]


@dataclass(frozen=True)
class Experiment:
    """Overrides of each run by name, and the table that is made of them: `rows(results, seeds, out)`."""

    settings: Callable[[], dict[str, tuple[str, ...]]]
    rows: Callable[[Results, Sequence[int], Path], Rows]
    recipe: str = RECIPE

    def cells(self, seeds: Sequence[int], extra: Sequence[str]) -> list[Cell]:
        settings = self.settings()
        start = {seed: [f"sft.seed={seed % WARM_STARTS}"] if self.recipe == LONG_RECIPE else [] for seed in seeds}
        return [
            Cell(
                f"{name}/seed{seed}",
                self.recipe,
                ("log.trajectories_every=0", *sets, *start[seed], f"seed={seed}", *extra),
            )
            for seed in seeds
            for name, sets in settings.items()
        ]


def accuracy(results: Results, name: str, seeds: Sequence[int]) -> str:
    return mean_and_range(by_seed(results, [f"{name}/seed{seed}" for seed in seeds]))


def sigma_settings() -> dict[str, tuple[str, ...]]:
    return {
        f"sigma/{sampler}/{size:g}": (*NOISY, *sets, f"perturbation.std={size}")
        for sampler, sets in SAMPLERS.items()
        for size in SIZES
    }


def sigma_rows(results: Results, seeds: Sequence[int], out: Path) -> Rows:
    """Means over seeds: sigma over training, and what noise and mismatch move a log-prob by at the end, nats."""
    rows = []
    for sampler in SAMPLERS:
        for size in SIZES:
            name = f"sigma/{sampler}/{size:g}"
            runs = [read_metrics(out / f"{name}/seed{seed}" / "metrics.jsonl") for seed in seeds]
            sigmas = [
                mean(steps[int(part * (len(steps) - 1))]["perturbation/sigma_mean"] for steps in runs) for part in PARTS
            ]
            last = [
                mean(at_end(steps, key) for steps in runs) for key in ("perturbation/dlogp", "mismatch/abs_diff_mean")
            ]
            texts = [f"{value:.1e}" for value in (*sigmas, *last)]
            rows.append([sampler, *texts, accuracy(results, name, seeds)])
    head = ["sampler", *(f"sigma at {part:.0%}" for part in PARTS), "noise, nats", "mismatch, nats", "accuracy"]
    return head, rows


def at_end(steps: Sequence[dict[str, Any]], key: str) -> float:
    """The mean of a metric over the last twenty steps that have it."""
    return mean([step[key] for step in steps if key in step][-20:])


def arm_settings() -> dict[str, tuple[str, ...]]:
    masks = {arm: f'objective.mask=[{{kind="opsm",delta=0.05,sign="{arm}"}}]' for arm in ARMS[1:]}
    return {
        f"arms/{name}/{arm.replace(' ', '-')}": (
            "objective.name=grpo",
            "trainer.max_idle_steps=0",  # where an arm collapses, no reward is left
            *regime(name).settings,
            *filter(None, [masks.get(arm)]),
        )
        for name in REGIMES
        for arm in ARMS
    }


def arm_rows(results: Results, seeds: Sequence[int], _: Path) -> Rows:
    names = {arm: arm.replace(" ", "-") for arm in ARMS}
    rows = [[arm, *(accuracy(results, f"arms/{name}/{names[arm]}", seeds) for name in REGIMES)] for arm in ARMS]
    return ["masked", *REGIMES], rows


def prefix_settings() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {"prefixes/none": ("objective.name=grpo",)}
    for ratio in RATIOS:
        for refresh in REFRESHES:
            for whole in (False, True):
                name = f"prefixes/{ratio:g}-{refresh}-{whole}"
                sets = (f"prefix.ratio={ratio}", f"prefix.refresh={refresh}", f"prefix.whole={str(whole).lower()}")
                found[name] = ("objective.name=soup", *sets)
    return found


def prefix_rows(results: Results, seeds: Sequence[int], _: Path) -> Rows:
    rows = [["none", "", accuracy(results, "prefixes/none", seeds), *[""] * (len(REFRESHES) - 1)]]
    for whole in (False, True):
        for ratio in RATIOS:
            name = f"prefixes/{ratio:g}"
            rows.append(
                [
                    f"{ratio:g}",
                    "whole" if whole else "prefix alone",
                    *(accuracy(results, f"{name}-{refresh}-{whole}", seeds) for refresh in REFRESHES),
                ]
            )
    return ["share", "sampled", *(f"refreshed every {refresh}" for refresh in REFRESHES)], rows


def batch_settings() -> dict[str, tuple[str, ...]]:
    return {
        f"batches/{prompts}-{rate:g}": (
            "objective.name=grpo",
            "trainer.max_idle_steps=0",
            f"trainer.prompts={prompts}",
            f"optim.lr={rate}",
        )
        for prompts in PROMPTS
        for rate in RATES
    }


def batch_rows(results: Results, seeds: Sequence[int], _: Path) -> Rows:
    rows = [
        [f"{rate:g}", *(accuracy(results, f"batches/{prompts}-{rate:g}", seeds) for prompts in PROMPTS)]
        for rate in RATES
    ]
    return ["learning rate", *(f"{8 * prompts} responses" for prompts in PROMPTS)], rows


def tail_settings() -> dict[str, tuple[str, ...]]:
    """`token-bypass` has the clips of `token-alp`; a step is 16 updates on one batch."""
    fixed = (
        *regime("reuse-16").settings,
        *ALP_CLIPS,
        "trainer.steps=125",
        "optim.grad_clip=1e9",
        "trainer.max_idle_steps=0",
    )
    methods = {
        noise: ("objective.name=token-bypass",)
        if std is None
        else ("objective.name=token-alp", f"perturbation.std={std}", "perturbation.lr=5e-4")
        for noise, std in NOISES.items()
    }
    return {
        f"tails/{rate:g}/{noise}": (*method, *fixed, f"optim.lr={rate}")
        for rate in TAIL_RATES
        for noise, method in methods.items()
    }


def tail_rows(results: Results, seeds: Sequence[int], out: Path) -> Rows:
    """Quantiles of the token ratio policy/sampler over a step's 16 updates: of the first and the last twenty steps."""
    rows = []
    for rate in TAIL_RATES:
        for noise in NOISES:
            name = f"tails/{rate:g}/{noise}"
            runs = [read_metrics(out / f"{name}/seed{seed}" / "metrics.jsonl") for seed in seeds]
            first = [steps[:20] for steps in runs]
            tails = [
                " to ".join(f"{mean(at_end(steps, key) for steps in part):.3g}" for part in (first, runs))
                for key in ("ratio/q01", "ratio/q99", "update/kl", "optim/grad_norm")
            ]
            largest = mean_and_range([max(step["optim/grad_norm"] for step in steps) for steps in runs])
            rows.append([f"{rate:g}", noise, accuracy(results, name, seeds), *tails, largest])
    quantiles = ["1 % quantile", "99 % quantile", "KL of the updates", "gradient norm"]
    return ["learning rate", "noise", "accuracy", *quantiles, "largest norm"], rows


def small_settings(samplers: Sequence[str], rates: Sequence[float], name: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{name}/{sampler}/{rate:g}": (
            "objective.name=grpo",
            "trainer.max_idle_steps=0",
            f"optim.lr={rate}",
            *SMALL[sampler],
        )
        for sampler in samplers
        for rate in rates
    }


def small_rows(
    results: Results, seeds: Sequence[int], out: Path, samplers: Sequence[str], rates: Sequence[float], name: str
) -> Rows:
    rows = []
    for sampler in samplers:
        cells = [f"{name}/{sampler}/{rate:g}" for rate in rates]
        first = [
            read_metrics(out / cell / f"seed{seed}" / "metrics.jsonl")[0]["mismatch/k3"]
            for cell in cells
            for seed in seeds
        ]
        rows.append([sampler, f"{mean(first):.1e}", *(accuracy(results, cell, seeds) for cell in cells)])
    return ["sampler", "k3 at the start", *(f"rate {rate:g}" for rate in rates)], rows


def lag_settings() -> dict[str, tuple[str, ...]]:
    return {
        f"lags/{every}/{method}": (
            f"objective.name={method}",
            f"trainer.sync_every={every}",
            "trainer.steps=64",
            "trainer.max_idle_steps=0",
            "optim.lr=2e-4",
        )
        for every in LAGS.values()
        for method in LAG_METHODS
    }


def lag_rows(results: Results, seeds: Sequence[int], out: Path) -> Rows:
    rows = []
    for lag, every in LAGS.items():
        for method in LAG_METHODS:
            name = f"lags/{every}/{method}"
            runs = [read_metrics(out / f"{name}/seed{seed}" / "metrics.jsonl") for seed in seeds]
            worst = [
                mean_and_range([pick(step[key] for step in steps if key in step) for steps in runs])
                for key, pick in (
                    ("mismatch/k3", max),
                    ("mismatch/ess_token", min),
                    ("length/truncated", max),
                    ("optim/grad_norm", max),
                )
            ]
            rows.append([lag, method, accuracy(results, name, seeds), *worst])
    watched = ["largest k3", "smallest ESS", "most truncated", "largest gradient norm"]
    return ["updates old", "method", "accuracy", *watched], rows


def layer_settings() -> dict[str, tuple[str, ...]]:
    return {
        f"layers/{layers}": (
            "objective.name=token-alp",
            *ALP_CLIPS,
            "perturbation.std=0.01",
            f"perturbation.layers={layers}",
            "engine.quantize=int4",
            "trainer.max_idle_steps=0",
        )
        for layers in LAYERS
    }


def layer_rows(results: Results, seeds: Sequence[int], _: Path) -> Rows:
    whole = by_seed(results, [f"layers/all/seed{seed}" for seed in seeds])
    rows = []
    for layers in LAYERS:
        found = by_seed(results, [f"layers/{layers}/seed{seed}" for seed in seeds])
        lead = mean_and_range([value - other for value, other in zip(found, whole, strict=True)])
        rows.append([layers, mean_and_range(found), "" if layers == "all" else lead])
    return ["layers with noise", "accuracy", "less all layers"], rows


def length_settings() -> dict[str, tuple[str, ...]]:
    parts = ",".join(f'{{name="sort",label="{n}",digits={n - 1},holdout=64}}' for n in LENGTHS)
    masks = {
        arm: (f'objective.mask=[{{kind="band",level="{level}",min={low},max={high}}}]',)
        for arm, (level, low, high) in BANDS.items()
    }
    return {
        f"lengths/{arm}": (
            "objective.name=grpo",
            "task.name=mixture",
            f"task.part=[{parts}]",
            "sft.steps=400",
            "engine.quantize=int3",
            "trainer.steps=60",
            "trainer.max_idle_steps=0",
            "log.trajectories_every=10",
            *sets,
        )
        for arm, sets in {"none": (), **masks}.items()
    }


def length_rows(_: Results, seeds: Sequence[int], out: Path) -> Rows:
    """Of responses that ended: the share that each mask keeps; and the reward of the last twenty steps, by length."""
    rows = []
    for arm in ("none", *BANDS):
        folders = [out / f"lengths/{arm}/seed{seed}" for seed in seeds]
        runs = [read_metrics(folder / "metrics.jsonl") for folder in folders]
        rewards = [mean_and_range([at_end(steps, f"mixture/{n}/reward") for steps in runs]) for n in LENGTHS]
        kept = kept_shares(folders, *BANDS[arm]) if arm in BANDS else dict.fromkeys(LENGTHS, 1.0)
        rows.append([arm, *(f"{kept[n]:.2f}" for n in LENGTHS), *rewards])
    return ["mask", *(f"kept at {n}" for n in LENGTHS), *(f"reward at {n}" for n in LENGTHS)], rows


def kept_shares(folders: Sequence[Path], level: str, low: float, high: float) -> dict[int, float]:
    """Length -> share of the stored responses of that many tokens whose ratio lies in the band."""
    inside: dict[int, list[bool]] = {n: [] for n in LENGTHS}
    for file in (file for folder in folders for file in (folder / "trajectories").glob("step-*.parquet")):
        for row in trajectories.read(file):
            trainer = row.logp_current if row.logp_proximal is None else row.logp_proximal
            assert trainer is not None
            log_ratio = trainer - row.trajectory.completion.logp_behavior
            if len(log_ratio) in inside:
                total = log_ratio.sum() if level == "sequence" else log_ratio.mean()
                inside[len(log_ratio)].append(bool(math.log(low) <= total <= math.log(high)))
    return {n: mean(values) for n, values in inside.items()}


SMALL_GRID = {"samplers": tuple(SMALL), "rates": RATES, "name": "small"}
LONG_GRID = {"samplers": LONG_SMALL, "rates": LONG_RATES, "name": "small-long"}
EXPERIMENTS = {
    "sigma": Experiment(sigma_settings, sigma_rows),
    "arms": Experiment(arm_settings, arm_rows),
    "prefixes": Experiment(prefix_settings, prefix_rows),
    "batches": Experiment(batch_settings, batch_rows),
    "tails": Experiment(tail_settings, tail_rows),
    "small": Experiment(partial(small_settings, **SMALL_GRID), partial(small_rows, **SMALL_GRID)),
    "small-long": Experiment(partial(small_settings, **LONG_GRID), partial(small_rows, **LONG_GRID), LONG_RECIPE),
    "lags": Experiment(lag_settings, lag_rows, LONG_RECIPE),
    "layers": Experiment(layer_settings, layer_rows, LONG_RECIPE),
    "lengths": Experiment(length_settings, length_rows),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/claims"))
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of every run")
    given = parser.parse_args()
    experiment, seeds = EXPERIMENTS[given.experiment], range(given.seeds)
    cells = experiment.cells(seeds, given.set)
    results = run(cells, given.out, workers=given.workers, samples=0, problems=0)
    print(table(*experiment.rows(results, seeds, given.out)))


if __name__ == "__main__":
    main()
