"""How wide the bounds of a mask on whole responses must be, by the length of responses: do they follow 1/sqrt(T)?

    python benchmarks/mask_widths.py [--regimes int4 int3 noise stale-8] [--lengths 10 28 64 120] [--seeds 2]

Trains `laboratory-long` for some steps without a correction and takes the responses of the last ones. Of each T tokens
count, so that all lengths have the same prompts and weights: the first ones (as if the response ended there) and, in
the second table, ones drawn from the whole response (so that all lengths have the same kind of tokens). Printed are the
bounds that hold 95 % of the geometric means of the ratio trainer/sampler, the standard deviation of their logarithms,
and the power of T that fits it: -.5 for independent tokens, 0 for a shift common to the response.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from grid import log_ratios, table
from shared import options_of
from trimtab.diagnosis.tokens import k3
from trimtab.trainer.display import RunsDisplay, open_display
from trimtab.trainer.lab.experiment import LONG_RECIPE, plan_experiment
from trimtab.trainer.lab.regimes import regime
from trimtab.trainer.lab.runner import train_all

SETS = ("trainer.steps=8", "eval.every=0", "eval.problems=8", "log.trajectories_every=1")
LAST = 4  # steps whose responses count
INSIDE = 0.95


def responses_of(run: Path, longest: int) -> np.ndarray:
    """(responses, longest): trainer minus sampler, of the responses that are long enough."""
    files = sorted((run / "trajectories").glob("step-*.parquet"))[-LAST:]
    return np.stack([row[:longest] for row in log_ratios(files) if len(row) >= longest])


def drawn(values: np.ndarray) -> np.ndarray:
    """The tokens of each response in random order."""
    return np.random.default_rng(0).permuted(values, axis=1)


def cells(values: np.ndarray, lengths: list[int]) -> list[str]:
    means = [values[:, :n].mean(1) for n in lengths]
    tail = (1 - INSIDE) / 2
    bounds = [np.exp(np.quantile(mean, [tail, 1 - tail])) for mean in means]
    spreads = [float(mean.std()) for mean in means]
    texts = [f"[{low:.3f}, {high:.3f}] {spread:.1e}" for (low, high), spread in zip(bounds, spreads, strict=True)]
    return [*texts, f"{np.polyfit(np.log(lengths), np.log(spreads), 1)[0]:+.2f}"]


def main() -> None:
    lists = {"regimes": ["int4", "int3", "noise", "stale-8"], "lengths": [10, 28, 64, 120]}
    parser = options_of(__doc__, **lists, seeds=2, out=Path("runs/mask-widths"))
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE of every run")
    given = parser.parse_args()
    regimes = [regime(name) for name in given.regimes]
    sets = [*SETS, *given.set]
    plan = plan_experiment(["grpo"], regimes, given.seeds, given.out, model=LONG_RECIPE, sets=sets)
    with open_display(RunsDisplay, to_stderr=True) as observer:
        results = train_all({run.name: run.config for run in plan.runs}, workers=2, observer=observer)
    if failed := [f"{name}: {result.error}" for name, result in results.items() if result.status == "failed"]:
        parser.exit(1, "\n".join(failed) + "\n")
    rows = {}
    for name in given.regimes:
        folders = [Path(str(run.config.out)) for run in plan.runs if run.regime.name == name]
        values = np.concatenate([responses_of(folder, max(given.lengths)) for folder in folders])
        rows[name] = (values, [name, str(len(values)), f"{float(k3(values).mean()):.1e}"])
    heads = ["regime", "responses", "k3", *(f"T = {n}" for n in given.lengths), "power of T"]
    for what, order in (("first", np.asarray), ("drawn", drawn)):
        print(f"T tokens, {what}: bounds that hold {INSIDE:.0%}, standard deviation of the logarithm\n")
        print(table(heads, [[*head, *cells(order(values), given.lengths)] for values, head in rows.values()]))
        print()
    print(f"1/sqrt(T) would narrow bounds from {given.lengths[0]} to {given.lengths[-1]} tokens by", end=" ")
    print(f"{math.sqrt(given.lengths[-1] / given.lengths[0]):.2f}")


if __name__ == "__main__":
    main()
