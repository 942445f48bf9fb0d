"""The corpus of the fair map: rollouts of every cell with both log-probs, and what `trimtab diagnose` says of each.

    python benchmarks/corpus.py pack runs/fair-map corpus [--responses 32]    # the runs with the first seed
    python benchmarks/corpus.py score corpus

`pack` writes one file for each method and regime, REGIME--METHOD.parquet, in the format of Trimtab's trajectories:
some responses of each step that the run kept. Every column but entropies and drift is there. `score` diagnoses each
file: which mismatch the regime is, what was found first, and how often that is right.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import trimtab
from grid import table

MISMATCH = {
    "on-policy": {"-", "precision"},
    # They agree when a batch is sampled. Without a proximal pass the trainer's log-probs are of the first update of a
    # mini-batch, some updates later.
    "reuse-16": {"-", "precision", "stale"},
    "int4": {"quantized"},
    "stale-32": {"stale"},
}
"""Regime -> the causes that are right; `-` is none."""
LEFT_OUT = ("entropy", "drift_mismatch", "drift_staleness")


def pack(runs: Path, out: Path, responses: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    size = 0
    for folder in sorted(runs.glob("*/*/seed0/trajectories")):
        regime, method = folder.parts[-4:-2]
        steps = [pq.read_table(file).slice(0, responses) for file in sorted(folder.glob("step-*.parquet"))]
        whole = pa.concat_tables(steps, promote_options="default")
        path = out / f"{regime}--{method}.parquet"
        kept = [name for name in whole.column_names if name not in LEFT_OUT]
        pq.write_table(whole.select(kept), path, compression="zstd")
        size += path.stat().st_size
    print(f"{len(list(out.glob('*.parquet')))} files, {size / 1e6:.1f} MB")


def score(corpus: Path) -> None:
    rows, right = [], Counter()
    for path in sorted(corpus.glob("*.parquet")):
        regime, _, method = path.stem.partition("--")
        diagnosis = trimtab.diagnose(path)
        first = diagnosis.causes[0] if diagnosis.causes else None
        name = first.name if first else "-"
        ok = name in MISMATCH[regime]
        right[regime, ok] += 1
        k3 = f"{diagnosis.measured.size.mismatch['k3']:.1e}"
        sure = f"{first.confidence:.2f}" if first else ""
        rows.append([regime, method, k3, name, sure, "yes" if ok else "no", diagnosis.recommendation.preset or "-"])
    print(table(["regime", "method", "k3", "found first", "confidence", "right", "recommended"], rows))
    for regime in dict.fromkeys(regime for regime, _ in right):
        count = right[regime, True] + right[regime, False]
        print(f"{regime}: {right[regime, True]} of {count} right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pack", "score"])
    parser.add_argument("folders", nargs="+", type=Path, help="RUNS CORPUS, or CORPUS")
    parser.add_argument("--responses", type=int, default=32, help="of each step")
    given = parser.parse_args()
    if given.what == "pack":
        runs, corpus = given.folders
        pack(runs, corpus, given.responses)
    else:
        score(*given.folders)


if __name__ == "__main__":
    main()
