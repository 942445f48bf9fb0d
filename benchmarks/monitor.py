"""False alarms, delay and cost of `trimtab.Monitor` on runs of the laboratory.

    OMP_NUM_THREADS=1 python benchmarks/monitor.py [--seeds 20] [--first 0] [--steps 80] [--lost-at 40] [--runs DIR]

Each seed is trained twice: as it is (samplers in float32, bfloat16, int8 and int4 in turn), and with a sampler that
gets no weights from step `--lost-at` on while its versions say that it does. Every batch is shown to a monitor. Then:
memory over 10,000 batches, the time of `observe` beside that of a step, and its figures beside those of `diagnose`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trimtab
from shared import options_of
from trimtab.monitor import Alarm, Monitor
from trimtab.monitor.alarms import EXACT, WINDOW
from trimtab.runs import trajectories
from trimtab.runs.directory import read_metrics
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine

SAMPLERS = ({}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"})


def trained(out: Path, seed: int, steps: int, lost_at: int | None) -> Path:
    """Trains a run of the laboratory, with a sampler by its seed, and writes every batch."""
    sampler = SAMPLERS[seed % len(SAMPLERS)]
    publish, checksums, frozen = EmbeddedEngine.update_weights, EmbeddedEngine.weight_checksums, {}

    def withheld(engine: EmbeddedEngine, weights: Any, version: int, *, as_is: bool = False) -> None:
        if lost_at is None or version < lost_at:
            return publish(engine, weights, version, as_is=as_is)
        frozen.setdefault("weights", [(name, tensor.clone()) for name, tensor in engine.named_weights()])
        publish(engine, frozen["weights"], version, as_is=True)
        return None

    EmbeddedEngine.update_weights = withheld
    EmbeddedEngine.weight_checksums = lambda _: {}  # otherwise the trainer notices that they are withheld
    try:
        overrides = [f"seed={seed}", f"trainer.steps={steps}", "log.trajectories_every=1", "eval.every=0", "threads=1"]
        overrides += [f"engine.{key}={value}" for key, value in sampler.items()]
        return trimtab.train("laboratory", overrides=overrides, out=out).run
    finally:
        EmbeddedEngine.update_weights, EmbeddedEngine.weight_checksums = publish, checksums


def batches(run: Path) -> Iterator[dict[str, Any]]:
    """Yields each step of a run as arguments of `Monitor.observe`."""
    for file in sorted((run / "trajectories").glob("step-*.parquet")):
        rows = trajectories.read(file)
        trainer = [row.logp_current if row.logp_proximal is None else row.logp_proximal for row in rows]
        done = [row.trajectory.completion for row in rows]
        longest = max(len(one.response_ids) for one in done)
        step = int(file.stem.removeprefix("step-"))

        def padded(values: list[np.ndarray], longest: int = longest) -> torch.Tensor:
            return torch.stack([torch.from_numpy(np.pad(v, (0, longest - len(v)))) for v in values])

        yield {
            "logp_train": padded([logps for logps in trainer if logps is not None]),
            "logp_rollout": padded([one.logp_behavior for one in done]),
            "mask": padded([one.sampled for one in done]),
            "step": step,
            "version": padded([one.policy_version for one in done]),
            "reward": torch.tensor([row.trajectory.reward for row in rows]),
            "response_ids": padded([one.response_ids for one in done]),
        }


def watched(run: Path) -> tuple[list[Alarm], list[float], float]:
    """Returns the alarms of a run, its k3 by step, and the mean seconds of a call of `observe`."""
    raised: list[Alarm] = []
    monitor, k3, seconds = Monitor(on_alarm=raised.append), [], []
    for batch in batches(run):
        begin = time.perf_counter()
        k3.append(monitor.observe(**batch)["mismatch/k3"])
        seconds.append(time.perf_counter() - begin)
    monitor.close()
    return raised, k3, statistics.median(seconds)


def largest_jump(k3: list[float]) -> float:
    """Returns the factor by which two steps in a row exceed all others of the window before them."""
    floor = np.maximum(k3, EXACT)
    return max(min(floor[i - 1 : i + 1]) / max(floor[max(0, i + 1 - WINDOW) : i - 1]) for i in range(2, len(k3)))


def growth(batch: dict[str, Any], count: int) -> float:
    """Returns the megabytes by which Python and numpy objects grow over 90 % of `count` observed batches."""
    monitor = Monitor(on_alarm=lambda _: None)
    tracemalloc.start()
    for number in range(count):
        if number == count // 10:
            before = tracemalloc.get_traced_memory()[0]
        monitor.observe(**{**batch, "step": number, "version": number})
    left = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return left / 1e6


def difference(run: Path) -> float:
    """Returns the largest difference to the figures of `trimtab.diagnose`, relative to those (to 1e-4 at least)."""
    monitor, steps = Monitor(), []
    for batch in batches(run):
        steps.append(monitor.observe(**batch))
    found = trimtab.diagnose(run).measured.size.by_step
    pairs = [
        (here[f"mismatch/{name}"], row[name])
        for here, row in zip(steps, found, strict=True)
        for name in ("k1", "k3", "ess_token", "ess_seq", "ratio_mean")
    ]
    return max(abs(a - b) / max(abs(b), 1e-4) for a, b in pairs)


def main() -> None:
    parser = options_of(__doc__, seeds=20, steps=80, lost_at=40, batches=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=Path)
    args = parser.parse_args()
    folder = args.runs or Path(tempfile.mkdtemp())
    false, jumps, delays, missed = Counter(), [], [], 0
    run = folder
    for seed in range(args.first, args.first + args.seeds):
        for lost_at in (None, args.lost_at):
            run = folder / f"{'clean' if lost_at is None else 'lost'}-{seed}"
            if not (run / "report.html").exists():
                trained(run, seed, args.steps, lost_at)
            raised, k3, seconds = watched(run)
            if lost_at is None:
                false.update(one.name for one in raised)
                jumps.append(largest_jump(k3))
            else:
                late = [one.step for one in raised if one.name == "undelivered"]
                missed += not late
                delays += [late[0] - lost_at] if late else []
            print(run.name, [f"{one.name}@{one.step}" for one in raised], f"jump {largest_jump(k3):.2f}", flush=True)
    step = statistics.median(row["time/step"] for row in read_metrics(run / "metrics.jsonl"))
    print(f"{args.seeds} runs without a fault: alarms {dict(false)}, largest jump {max(jumps):.2f}")
    print(f"{args.seeds} runs whose weights are lost: {missed} missed, steps until the alarm {sorted(delays)}")
    print(f"observe {1e3 * seconds:.2f} ms, a step {1e3 * step:.0f} ms: {seconds / step:.1%}")
    last = list(batches(run))[-1]
    print(f"{args.batches:,} batches: {growth(last, args.batches):.2f} MB more after the first tenth")
    print(f"largest relative difference to diagnose: {difference(run):.1e}")


if __name__ == "__main__":
    main()
