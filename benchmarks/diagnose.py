"""`trimtab diagnose` on 10 million tokens of trajectories: wall seconds and peak memory of a process of its own.

    .venv/bin/python benchmarks/diagnose.py [--tokens 10000000] [--folder DIR]

Writes 40 steps of synthetic trajectories in the trainer's layout (parquet, zstd, every optional column; responses of
log-normal length around 400 tokens, a third of them of several turns; bf16-like noise that grows for rare tokens, some
staleness) into a temporary folder, or into DIR, where a second run finds them. Then a child process, one thread, goes
through all stages of the command; its resident high-water mark is its own.

Target: <= 10 s and <= 1 GB on two cores with AVX-512.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shared import options_of

STEPS, SAMPLES, VOCABULARY = 40, 8, 150_000
_KINDS = {"response_ids": pa.int64(), "loss_mask": pa.bool_(), "policy_version": pa.int64()}


def write_step(file: Path, step: int, tokens: int) -> int:
    """One step of about `tokens` tokens; returns how many it became."""
    rng = np.random.default_rng(step)
    rows = SAMPLES * max(1, round(tokens / 400 / SAMPLES))
    lengths = np.clip(rng.lognormal(np.log(400) - 0.25, 0.7, rows), 1, 8000).astype(np.int64)
    count, starts = int(lengths.sum()), np.cumsum(lengths) - lengths
    place = np.arange(count) - np.repeat(starts, lengths)
    certain = rng.random(count) < 0.6
    behavior = -np.where(certain, 1e-4, 1.0) * rng.exponential(1.0, count)
    old = np.repeat(rng.random(rows) < 0.4, lengths)
    spread = (0.03 + 0.03 * old) * np.sqrt(-behavior)
    proximal = behavior + spread * rng.standard_normal(count) - spread**2 / 2
    turns = np.repeat(rng.random(rows) < 0.33, lengths)
    per_token = {
        "response_ids": np.minimum(rng.zipf(1.2, count), VOCABULARY - 1),
        "loss_mask": ~(turns & (place % 200 >= 170)),
        "logp_behavior": behavior.astype(np.float32),
        "logp_proximal": np.minimum(proximal, 0).astype(np.float32),
        "logp_current": np.minimum(proximal, 0).astype(np.float32),
        "entropy": (-behavior * rng.random(count)).astype(np.float32),
        "policy_version": step - 3 * old,
    }
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    columns = {
        "step": np.full(rows, step),
        "prompt_id": [f"problem-{index // SAMPLES}" for index in range(rows)],
        "group": np.arange(rows) // SAMPLES,
        "prompt_ids": [list(range(50))] * rows,
        **{
            name: pa.ListArray.from_arrays(offsets, pa.array(values, _KINDS.get(name, pa.float32())))
            for name, values in per_token.items()
        },
        "proximal_version": np.full(rows, step),
        "reward": rng.integers(0, 2, rows).astype(np.float64),
        "advantage": rng.standard_normal(rows),
        "sampling": [{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": "processed"}] * rows,
    }
    pq.write_table(pa.table(columns), file, compression="zstd")
    return count


def write_run(folder: Path, tokens: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return sum(write_step(folder / f"step-{step:06d}.parquet", step, tokens // STEPS) for step in range(1, STEPS + 1))


def phases(folder: Path) -> dict[str, float]:
    """What the child process does: the stages of the command one after the other, and the page."""
    start = time.perf_counter()
    from trimtab.diagnosis.output.html_page import write_page
    from trimtab.diagnosis.pipeline import diagnose

    marks: dict[str, float] = {"imports": time.perf_counter()}

    def watch(what: str, _tokens: int) -> None:
        marks.setdefault(what, time.perf_counter())

    diagnosis = diagnose(folder, on_progress=watch)
    marks["page"] = time.perf_counter()
    write_page(diagnosis, folder / "diagnose.html")
    names, times = list(marks), [*marks.values(), time.perf_counter()]
    spent = {f"{name}, s": end - begin for name, begin, end in zip(names[1:], times[1:-1], times[2:], strict=True)}
    return {
        "tokens": diagnosis.measured.origin.tokens,
        "imports, s": times[0] - start,
        **spent,
        "whole process, s": times[-1] - start,
        "processor, s": time.process_time(),
        "peak, GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    parser = options_of(__doc__, tokens=10_000_000)
    parser.add_argument("--folder", type=Path, help="where the trajectories are kept between runs")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(phases(chosen.child)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        if not list(folder.glob("*.parquet")):
            print(f"wrote {write_run(folder, chosen.tokens):,} tokens", file=sys.stderr)
        command = [sys.executable, __file__, "--child", str(folder)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for name, value in json.loads(output.stdout).items():
        print(f"{name:24} {value:,.4g}" if value < 1e4 else f"{name:24} {value:,.0f}")


if __name__ == "__main__":
    main()
