"""Prints docs/results/data/presets.csv: parity, accuracy in the laboratory and cost of every preset.

    python docs/figures/preset_table.py --grids runs/new runs/old --costs costs.md > docs/results/data/presets.csv

Grids are folders of `trimtab compare --regimes on-policy stale-32 int3 reuse-16`; presets that none of them has are
taken from docs/results/laboratory.md (five seeds). Costs are what `benchmarks/objective_step.py` prints. Parity is
computed here from the frozen numbers of tests/parity: the largest error of loss and gradient in float64, relative to
the largest frozen value; for `a3po` of the gradient, since its loss differs where it is clipped.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import torch
from tests.parity import test_areal, test_miles, test_newer_files, test_prime_rl, test_trl, test_verl
from tests.parity.conftest import Given, Peer

import trimtab
from trimtab.objectives import Objective, objectives

ROOT = Path(__file__).parents[2]
REGIMES = ("on-policy", "stale-32", "int3", "reuse-16")
BATCHES = ("mild", "heavy", "ragged")


def parity() -> dict[str, str]:
    """The largest error of each preset, with its peer."""
    errors: dict[str, dict[str, float]] = defaultdict(dict)
    for peer, prefix, losses in (
        ("verl", "", test_verl.LOSSES),
        ("trl", "loss/", test_trl.LOSSES),
        ("miles", "", test_miles.LOSSES),
        ("prime-rl", "", test_prime_rl.LOSSES),
    ):
        for case, objective in losses.items():
            error = _error(Peer(peer), f"{prefix}{case}", case, objective)
            errors[objective.name][peer] = max(error, errors[objective.name].get(peer, 0.0))
    for peer in ("trl", "miles"):
        errors["flash-reinforce"][peer] = max(
            _error(
                Peer("newer"), f"{peer}/flash-{delta:g}", "", trimtab.objective("flash-reinforce", divergence_max=delta)
            )
            for delta in test_newer_files.THRESHOLDS
        )
    errors["score-centering"]["miles"] = max(map(_centering_error, BATCHES))
    errors["a3po"]["areal"] = max(_age_error(case, batch) for case in test_areal.CASES for batch in BATCHES)
    return {name: ", ".join(f"{peer} {error:.0e}" for peer, error in peers.items()) for name, peers in errors.items()}


def _error(peer: Peer, case: str, key: str, objective: Objective) -> float:
    worst = 0.0
    for batch in BATCHES:
        given = Given(batch, torch.float64)
        changes = test_trl.sampler(key, given) if peer.name == "trl" else {}
        loss, gradient = given.run(objective, **changes)
        reference = peer.tensor(case, batch, "gradient")
        worst = max(worst, abs(loss - peer.scalar(case, batch, "loss")) / max(1.0, abs(loss)))
        worst = max(worst, float((gradient - reference).abs().max() / reference.abs().max().clamp(min=1e-12)))
    return worst


def _centering_error(batch: str) -> float:
    peer, given = Peer("newer"), Given(batch, torch.float64)
    _, *gradients = test_newer_files.centered(peer, given, "tis-2")
    references = [peer.tensor("miles/centering-tis-2", batch, key) for key in ("gradient", "head_gradient")]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, references, strict=True))


def _age_error(case: str, batch: str) -> float:
    given = Given(batch, torch.float64)
    _, gradient = given.run(test_areal.A3PO, age=test_areal.ages_of(case, given.mask))
    reference = Peer("areal").tensor(case, batch, "gradient")
    return float((gradient - reference).abs().max() / reference.abs().max())


def accuracies(grids: list[Path]) -> dict[str, dict[str, list[float]]]:
    """Accuracy after training by preset and regime, one for each seed."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for grid in grids:
        for row in pq.read_table(grid / "results.parquet").to_pylist():
            if row["status"] == "done" and row["accuracy"] is not None:
                found[row["method"]][row["regime"]].append(row["accuracy"])
            elif row["status"] not in ("done", "waiting"):
                found[row["method"]][row["regime"]].append(float("nan"))
    return found


def published() -> dict[str, list[str]]:
    """The means of docs/results/laboratory.md by preset, in the order of `REGIMES`."""
    text = (ROOT / "docs" / "results" / "laboratory.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)`[^|]*\|(.*)\|$", text, flags=re.MULTILINE)
    return {
        name: [cell.split()[0] for cell in cells.split("|")]
        for name, cells in rows
        if len(cells.split("|")) == len(REGIMES) and "#" in cells
    }


def costs(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    return dict(re.findall(r"^\| `([a-z0-9-]+)` \| ([0-9.]+) \|", file.read_text(), flags=re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="*", type=Path, default=[])
    parser.add_argument("--costs", type=Path)
    given = parser.parse_args()
    errors, measured, older, cost = parity(), accuracies(given.grids), published(), costs(given.costs)
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["preset", "parity", *REGIMES, "update / grpo"])
    for name in objectives():
        cells = older.get(name, ["-"] * len(REGIMES))
        if name in measured:
            cells = [_cell(measured[name].get(regime, [])) for regime in REGIMES]
        paid = cost.get(name, "1" if name == "grpo" else "-")
        out.writerow([name, errors.get(name, "-"), *cells, paid])


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    if any(value != value for value in values):
        return "refused"
    mean, spread = statistics.fmean(values), (min(values), max(values))
    return f"{mean:.3f} ({spread[0]:.2f}, {spread[1]:.2f})"


if __name__ == "__main__":
    main()
