"""Small experiments in the laboratory, each of which settles one claim of docs/results.

    python benchmarks/claims.py {sigma,arms,prefixes,batches,lengths} [--seeds 3] [--out runs/claims]

    sigma     does the noise of ALP settle at the mismatch? Four initial sizes, three samplers, 240 updates at a hundred
              times the published rate of ln sigma
    arms      off-policy sequence masking, and as controls the same mask on positive responses and on both
    prefixes  SOUP: share of a response that the older policy wrote x batches between its refreshes, against on-policy
              training
    batches   responses an update x learning rate
    lengths   do masks of products prefer short responses? Responses of 4, 10, 20 and 30 tokens in one run, and masks
              that keep the same share of them all

Accuracy is greedy, on 128 held-out problems; mean [lowest, highest] of the seeds. An interrupted run goes on where it
stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from grid import Cell, by_seed, log_ratios, mean_and_range, run, table
from shared import options_of
from trimtab.diagnosis.tokens import k3
from trimtab.runs.directory import read_metrics
from trimtab.trainer.lab.regimes import regime

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
LENGTHS = (4, 10, 20, 30)  # of `sort`: its digits, and the stop
# Each keeps 0.8 of all responses of the runs without a mask.
BANDS = {"product": ("sequence", 0.25, 4.0), "geometric": ("geometric", 0.935, 1.07)}

Results = Mapping[str, dict[str, Any]]
Table = tuple[Sequence[str], list[list[str]]]
Rows = Callable[[Results, Sequence[int], Path], Table]


def cells_of(settings: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[Cell]:
    return [
        Cell(f"{name}/seed{seed}", "laboratory", ("log.trajectories_every=0", *sets, f"seed={seed}"))
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


def sigma_rows(results: Results, seeds: Sequence[int], out: Path) -> Table:
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
            *regime(name).settings(),
            *filter(None, [masks.get(arm)]),
        )
        for name in REGIMES
        for arm in ARMS
    }


def arm_rows(results: Results, seeds: Sequence[int], _: Path) -> Table:
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


def prefix_rows(results: Results, seeds: Sequence[int], _: Path) -> Table:
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


def batch_rows(results: Results, seeds: Sequence[int], _: Path) -> Table:
    rows = [
        [f"{rate:g}", *(accuracy(results, f"batches/{prompts}-{rate:g}", seeds) for prompts in PROMPTS)]
        for rate in RATES
    ]
    return ["learning rate", *(f"{8 * prompts} responses" for prompts in PROMPTS)], rows


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


def length_rows(_: Results, seeds: Sequence[int], out: Path) -> Table:
    """By length of the response: k3, the share that a mask keeps, and the reward of the last twenty steps."""
    rows = []
    for arm in ("none", *BANDS):
        folders = [out / f"lengths/{arm}/seed{seed}" for seed in seeds]
        runs = [read_metrics(folder / "metrics.jsonl") for folder in folders]
        rewards = [mean_and_range([at_end(steps, f"mixture/{n}/reward") for steps in runs]) for n in LENGTHS]
        ratios: dict[int, list[np.ndarray]] = {n: [] for n in LENGTHS}
        for row in log_ratios(file for folder in folders for file in (folder / "trajectories").glob("step-*.parquet")):
            if len(row) in ratios:
                ratios[len(row)].append(row)
        sizes = [f"{mean(float(k3(row).mean()) for row in ratios[n]):.1e}" for n in LENGTHS]
        for mask in [arm] if arm in BANDS else BANDS:
            shares = [kept_share(ratios[n], mask) for n in LENGTHS]
            shares.append(kept_share([row for n in LENGTHS for row in ratios[n]], mask))
            name = arm if arm in BANDS else f"none, judged by the {mask}"
            rows.append([name, *sizes, *(f"{share:.2f}" for share in shares), *rewards])
    of = {"k3": LENGTHS, "kept": (*LENGTHS, "all"), "reward": LENGTHS}
    return ["mask", *(f"{what} at {n}" for what, lengths in of.items() for n in lengths)], rows


def kept_share(ratios: Sequence[np.ndarray], mask: str) -> float:
    level, low, high = BANDS[mask]
    totals = [float(row.sum() if level == "sequence" else row.mean()) for row in ratios]
    return mean(math.log(low) <= total <= math.log(high) for total in totals)


EXPERIMENTS: dict[str, tuple[Callable[[], dict[str, tuple[str, ...]]], Rows]] = {
    "sigma": (sigma_settings, sigma_rows),
    "arms": (arm_settings, arm_rows),
    "prefixes": (prefix_settings, prefix_rows),
    "batches": (batch_settings, batch_rows),
    "lengths": (length_settings, length_rows),
}


def main() -> None:
    parser = options_of(__doc__, seeds=3, workers=2, out=Path("runs/claims"))
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of every run")
    given = parser.parse_args()
    settings, rows = EXPERIMENTS[given.experiment]
    seeds = range(given.seeds)
    cells = cells_of({name: (*sets, *given.set) for name, sets in settings().items()}, seeds)
    results = run(cells, given.out, workers=given.workers, samples=0, problems=0)
    print(table(*rows(results, seeds, given.out)))


if __name__ == "__main__":
    main()
