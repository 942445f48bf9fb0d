"""Seconds of one GRPO step of the laboratory, by phase.

    python benchmarks/laboratory_step.py --steps 80 --rounds 5

16 prompts x 8 samples, one update, float32, one thread. Wall clock and processor time, medians over rounds: the second
is nearly the same on a busy machine. Rounds alternate between the products Trimtab uses and PyTorch's own.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from shared import options_of
from trimtab.trainer.config import load_config
from trimtab.trainer.models import matmul
from trimtab.trainer.run import train

PHASES = ("time/collect", "time/score", "time/update", "time/step")


def measure(steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        sets = [f"trainer.steps={steps}", "log.trajectories_every=0", "eval.problems=1", f"out={run}"]
        wall, processor = time.perf_counter(), time.process_time()
        train(load_config("laboratory", sets))
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The first steps fill caches.
    settled = rows[len(rows) // 4 :]
    phases = {key: statistics.median(row[key] for row in settled if key in row) for key in PHASES if key in settled[0]}
    return phases | {"whole run, wall / steps": wall / steps, "whole run, processor / steps": processor / steps}


def main() -> None:
    given = options_of(__doc__, steps=80, rounds=5).parse_args()
    torch.set_num_threads(1)
    measure(4)
    chosen = matmul._ONEDNN  # pyright: ignore[reportPrivateUsage]
    ours: list[dict[str, float]] = []
    native: list[dict[str, float]] = []
    for _ in range(given.rounds):
        for rounds, onednn in ((ours, chosen), (native, False)):
            matmul._ONEDNN = onednn  # pyright: ignore[reportPrivateUsage]
            rounds.append(measure(given.steps))
    for key in ours[0]:
        values = sorted(result[key] for result in ours)
        other = statistics.median(result[key] for result in native)
        spread = f"{statistics.median(values):.4f} s  [{values[0]:.4f}, {values[-1]:.4f}]"
        print(f"{key:32} {spread}  PyTorch's own products {other:.4f} s")


if __name__ == "__main__":
    main()
