"""How much sampler lag does OAPL bear? OAPL against GRPO with token importance sampling, in the laboratory.

    python benchmarks/oapl_lag.py --out runs/oapl-lag

Both methods get the same 1200 optimizer updates of 8 x 8 responses; the sampler's weights are refreshed only every L
updates. Held-out greedy accuracy on 128 problems, and pass@k from 512 samples of 64 problems. An interrupted run goes
on where it stopped. `--figure docs/images/oapl-lag.png` draws it; `--sweep LAG` tries settings at one lag instead, with
one seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grid import Cell, by_seed, mean_and_range, run, table
from shared import options_of

LAGS = (1, 8, 32, 128, 400)
SEEDS = (0, 1, 2)
UPDATES = 1200


TIS = ("objective.name=token-tis", "objective.clip_high=0.28")
# Each with the learning rate (and beta_2) that did best in `--sweep 32`, and OAPL with a weaker pull to its sampler.
METHODS = {
    "oapl-beta1": ("objective.name=oapl", "objective.beta=1.0", "optim.lr=5e-5"),
    "token-tis": (*TIS, "optim.lr=2e-5"),
    "oapl-beta0.1": ("objective.name=oapl", "objective.beta=0.1", "optim.lr=1e-4"),
}
# By lag, the best of `--sweep LAG`.
TUNED = {
    400: {
        "oapl-tuned": ("objective.name=oapl", "objective.beta=0.3", "optim.lr=5e-5"),
        "token-tis-tuned": (*TIS, "optim.lr=1e-5"),
    }
}
COLORS = {"oapl-beta1": "#0072B2", "token-tis": "#D55E00", "oapl-beta0.1": "#56B4E9"}
KS = (1, 4, 16, 64, 256)
# beta_2 of OAPL (0.001 as published) and learning rate, then the learning rates of token importance sampling.
PULLS = (
    *((0.001, 1e-5), (0.001, 1e-4), (0.03, 5e-5), (0.1, 2e-5), (0.1, 5e-5), (0.1, 1e-4), (0.3, 5e-5), (0.3, 1e-4)),
    *((1.0, 5e-5), (1.0, 1e-4)),
)
SWEEP: dict[str, tuple[str, ...]] = {
    **{
        f"oapl, beta {beta:g}, lr {lr:g}": ("objective.name=oapl", f"objective.beta={beta}", f"optim.lr={lr}")
        for beta, lr in PULLS
    },
    "oapl, beta 0.1, lr 0.0001, gradient clip 1e-3": (
        *("objective.name=oapl", "objective.beta=0.1", "optim.lr=1e-4", "optim.grad_clip=1e-3"),
    ),
    **{f"token-tis, lr {lr:g}": (*TIS, f"optim.lr={lr}") for lr in (1e-5, 2e-5, 5e-5, 1e-4)},
}
SWEEP_COLUMNS = 6


def methods_at(lag: int) -> dict[str, tuple[str, ...]]:
    return {**METHODS, **TUNED.get(lag, {})}


def name_of(method: str, lag: int, seed: int) -> str:
    return f"{method}-L{lag}-seed{seed}"


def cells(lags: tuple[int, ...], seeds: tuple[int, ...], updates: int) -> list[Cell]:
    fixed = (f"trainer.steps={updates}", "trainer.prompts=8", "eval.every=100", "log.trajectories_every=0")
    return [
        Cell(name_of(name, lag, seed), "laboratory", (*words, f"trainer.sync_every={lag}", f"seed={seed}", *fixed))
        for lag in sorted(lags, reverse=True)
        for name, words in methods_at(lag).items()
        for seed in seeds
    ]


def sweep(root: Path, lag: int, updates: int, workers: int) -> None:
    """Learning rate, beta_2 and gradient clip at one lag, one seed: where the settings of `METHODS` come from."""
    every = updates // SWEEP_COLUMNS
    fixed = (f"trainer.steps={updates}", "trainer.prompts=8", f"eval.every={every}", "log.trajectories_every=0")
    made = {
        words: Cell(f"sweep-{lag}-{index}", "laboratory", (*overrides, f"trainer.sync_every={lag}", *fixed))
        for index, (words, overrides) in enumerate(SWEEP.items())
    }
    results = run(list(made.values()), root, workers=workers, samples=0, problems=0)
    rows = [[words, *(f"{value:.2f}" for value in results[cell.name]["curve"])] for words, cell in made.items()]
    print(table(["setting", *(f"after {update}" for update in range(0, updates + 1, every))], rows))


def print_tables(results: Mapping[str, Any], lags: tuple[int, ...], seeds: tuple[int, ...], ks: Sequence[int]) -> None:
    rows = []
    for lag in lags:
        for method in methods_at(lag):
            names = [name_of(method, lag, seed) for seed in seeds]
            best = [max(results[name]["curve"]) for name in names]
            passes = [mean_and_range([results[name]["pass"][str(k)] for name in names]) for k in ks]
            rows.append([str(lag), method, mean_and_range(by_seed(results, names)), mean_and_range(best), *passes])
    print(table(["L", "method", "greedy, last", "greedy, best of run", *[f"pass@{k}" for k in ks]], rows))


def draw(results: Mapping[str, Any], lags: tuple[int, ...], seeds: tuple[int, ...], path: Path) -> None:
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for shift, (name, color) in zip((0.94, 1.0, 1.06), COLORS.items(), strict=True):
        values = np.array([by_seed(results, [name_of(name, lag, s) for s in seeds]) for lag in lags])
        place = np.array(lags) * shift
        left.plot(place, values.mean(1), color=color, lw=2, label=name)
        left.plot(np.repeat(place, len(seeds)), values.ravel(), "o", color=color, ms=4, alpha=0.6)
        for lag, style in ((min(lags), "--"), (max(lags), "-")):
            curves = [results[name_of(name, lag, s)]["pass"] for s in seeds]
            ks = sorted(map(int, curves[0]))
            mean = [np.mean([curve[str(k)] for curve in curves]) for k in ks]
            right.plot(ks, mean, style, color=color, lw=2, label=f"{name}, L = {lag}")
    left.set(xscale="log", xlabel="L: updates between weight refreshes", ylabel="held-out greedy accuracy", ylim=(0, 1))
    left.set_xticks(lags, [str(lag) for lag in lags])
    left.minorticks_off()
    right.set(xscale="log", xlabel="k", ylabel="pass@k at temperature 1", ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = options_of(__doc__, out=Path("runs/oapl-lag"), lags=LAGS, seeds=SEEDS)
    parser.add_argument("--updates", type=int, default=UPDATES, help="of a run; docs/results has `--sweep 32` with 600")
    parser.add_argument("--samples", type=int, default=512, help="for pass@k")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--sweep", type=int, metavar="LAG", help="try settings at this lag instead")
    given = parser.parse_args()
    if given.sweep:
        sweep(given.out, given.sweep, given.updates, given.workers)
        return
    lags, seeds = tuple(given.lags), tuple(given.seeds)
    results = run(
        cells(lags, seeds, given.updates), given.out, workers=given.workers, samples=given.samples, problems=64
    )
    print_tables(results, lags, seeds, [k for k in KS if k <= given.samples])
    if given.figure:
        draw(results, lags, seeds, given.figure)


if __name__ == "__main__":
    main()
