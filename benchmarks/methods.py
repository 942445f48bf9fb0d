"""Every method under three kinds of off-policyness, in the laboratory: docs/results/data/methods.csv.

    python benchmarks/methods.py --out runs/methods

on-policy  the sampler is refreshed at every update (100 updates)
stale      the sampler is refreshed every 32 updates (128 updates)
reuse      16 updates on every batch: 4 mini-batches, 4 epochs (256 updates)

Within a regime all methods share all but the objective: model, task, seeds, learning rate, batch, updates. Held-out
greedy accuracy on 128 problems. An interrupted run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grid import Cell, by_seed, mean_and_range, run, table
from shared import options_of

REGIMES: dict[str, tuple[str, ...]] = {
    "on-policy": ("trainer.steps=100", "eval.every=20", "optim.lr=1e-4"),
    "stale": ("trainer.steps=128", "eval.every=16", "optim.lr=5e-5", "trainer.sync_every=32"),
    "reuse": ("trainer.steps=16", "eval.every=4", "optim.lr=1e-4", "trainer.minibatches=4", "trainer.epochs=4"),
}
# The methods with what differs from their own defaults.
METHODS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dapo": (),
    "token-bypass": (),
    "seq-bypass": (),
    "seq-mis": (),
    "seq-mis-seq-ratio": (),
    "token-tis": (),
    "token-alp": (),
    "token-alp, std 0.01": ("perturbation.std=0.01",),
    "seq-alp": (),
    "seq-alp, std 0.01": ("perturbation.std=0.01",),
    "soup": (),
    "soup, share 2": ("prefix.share=2",),
    "soup, share 4": ("prefix.share=4",),
    "m2po": (),
    "m2po, mask": ("objective.form=mask",),
    "luffy": ("objective.length_max=16",),
    "oapl": ("objective.beta=0.1",),
}
SEEDS = (0, 1, 2)


def makes_sense(method: str, regime: str) -> bool:
    """SOUP's prefixes are its staleness: the sampler itself is refreshed at every step."""
    return not (method.startswith("soup") and regime == "stale")


def name_of(regime: str, method: str, seed: int) -> str:
    return f"{regime}-{method.replace(', ', '-').replace(' ', '')}-seed{seed}"


def cell(regime: str, method: str, seed: int, more: Sequence[str]) -> Cell:
    words = (f"objective.name={method.partition(',')[0]}", *METHODS[method], *REGIMES[regime])
    return Cell(
        name_of(regime, method, seed), "laboratory", (*words, f"seed={seed}", "log.trajectories_every=0", *more)
    )


def main() -> None:
    parser = options_of(__doc__, out=Path("runs/methods"), methods=list(METHODS), regimes=list(REGIMES), seeds=SEEDS)
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of every run")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    given = parser.parse_args()
    chosen = [(r, m) for r in given.regimes for m in given.methods if makes_sense(m, r)]
    results = run(
        [cell(r, m, seed, given.set) for r, m in chosen for seed in given.seeds],
        given.out,
        workers=given.workers,
        samples=0,
        problems=0,
    )
    rows = []
    for method in given.methods:
        row = [f"`{method.partition(',')[0]}`{''.join(method.partition(',')[1:])}"]
        for regime in given.regimes:
            names = [name_of(regime, method, seed) for seed in given.seeds]
            row.append(mean_and_range(by_seed(results, names)) if makes_sense(method, regime) else "-")
        rows.append(row)
    print(table(["method", *given.regimes], rows))


if __name__ == "__main__":
    main()
