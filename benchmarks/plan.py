"""The arithmetic of `trimtab plan --run` against real runs: predict the asynchronous run from the synchronous one.

    .venv/bin/python benchmarks/plan.py [--steps 40] [--only slow-reward]

For each workload of the laboratory model: a synchronous run (engine, rewards and trainer in turn), what `trimtab plan`
predicts from its files, then an asynchronous run with the same recipe and the predicted `trainer.max_lag`, then the
synchronous one again; the prediction is made from both. Each run is a process of its own; its first fifth is left out.
Two sides that compute at once need a core each: on a machine that is busy with something else, every run has phases of
another length. So the arithmetic is also given the asynchronous run's own phases (means), which leaves nothing but the
schedule to be predicted. Target: seconds of a step within 15%, and no token ever older than max_lag.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 128  # responses of a step


@dataclass(frozen=True)
class Workload:
    """Recipe `laboratory` with changes; rewards of a batch take `reward` seconds."""

    name: str
    reward: float
    sets: tuple[str, ...] = ()
    max_lag: int | None = None


WORKLOADS = (
    Workload("slow-reward", 0.5),
    Workload("slow-reward, bound of one step", 0.5, max_lag=1),
    Workload("slow-trainer", 0.05, ("trainer.epochs=8",)),
    Workload("slow-engine", 0.05, ("task.digits=24",)),
)
FIXED = (
    "trainer.prompts=16",
    "trainer.samples=8",
    "threads=1",
    "eval.every=0",
    "eval.problems=1",
    "log.trajectories_every=0",
)


def run(folder: Path, sets: list[str], reward: float) -> None:
    """One run, in this process."""
    from trimtab.api import train
    from trimtab.types import Problem

    def waits(completion: str, problem: Problem) -> float:
        time.sleep(reward / BATCH)
        return float(completion == problem.answer)

    train("laboratory", reward=waits, overrides=sets, out=folder)


def in_a_process(folder: Path, workload: Workload, sets: list[str]) -> Path:
    options = ["--out", str(folder), "--reward", str(workload.reward), "--sets", json.dumps(sets)]
    done = subprocess.run([sys.executable, __file__, "--worker", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return folder


def planned(folder: Path, max_lag: int | None) -> dict[str, Any]:
    more = [] if max_lag is None else ["--max-lag", str(max_lag)]
    call = [sys.executable, "-m", "trimtab", "plan", "--run", str(folder), "--json", *more]
    return json.loads(subprocess.run(call, capture_output=True, text=True, check=True).stdout)


@dataclass(frozen=True)
class Observed:
    """An asynchronous run: means over its steps, the largest age of a token, and what its own phases predict."""

    seconds: float
    age: float
    oldest: float
    predicted: float


def observed(folder: Path, ahead: int) -> Observed:
    from trimtab.trainer.planning.estimates import Phases, steady_cycle

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = rows[len(rows) // 5 :]
    mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0] if key.startswith(("time/", "lag/m"))}
    rest = mean["time/step"] - sum(mean[f"time/{phase}"] for phase in ("wait", "proximal", "update", "publish"))
    phases = Phases(
        generate=mean["time/collect"],
        score=mean["time/score"],
        train=mean["time/proximal"] + mean["time/update"] + rest,
        publish=mean["time/publish"],
    )
    oldest = max(row["lag/max"] for row in rows)
    return Observed(mean["time/step"], mean["lag/mean"], oldest, steady_cycle(phases, ahead).seconds)


def compare(workload: Workload, steps: int, folder: Path) -> float:
    base = [*FIXED, f"trainer.steps={steps}", *workload.sets]
    before = in_a_process(folder / "before", workload, base)
    lag = planned(before, workload.max_lag)["recipe"]["trainer.max_lag"]
    beside = in_a_process(folder / "beside", workload, [*base, f"trainer.max_lag={lag}"])
    after = in_a_process(folder / "after", workload, base)
    predictions = [planned(run, lag) for run in (before, after)]
    in_turn = statistics.mean(each["measured"]["step"] for each in predictions)
    expected = statistics.mean(each["predicted"]["step"] for each in predictions)
    result = observed(beside, lag // predictions[0]["lag"]["updates"])
    if result.oldest > lag:
        raise SystemExit(f"{workload.name}: a token was {result.oldest} updates old, the bound is {lag}")
    age = statistics.mean(each["lag"]["mean"] for each in predictions)
    print(
        f"| {workload.name} | {lag} | {in_turn:.3f} | {expected:.3f} | {result.seconds:.3f} | "
        f"{expected / result.seconds:.2f} | {result.predicted / result.seconds:.2f} | {age:.1f} | {result.age:.1f} | "
        f"{result.oldest:.0f} |",
        flush=True,
    )
    return result.predicted / result.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", help="workloads whose name contains this")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--reward", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--sets", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run(arguments.out, arguments.sets, arguments.reward)
        return
    chosen = [workload for workload in WORKLOADS if (arguments.only or "") in workload.name]
    print(
        "| workload | max_lag | in turn, s | predicted, s | asynchronous, s | ratio | ratio, own phases | age | "
        "mean | max |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        ratios = [compare(workload, arguments.steps, Path(folder) / str(n)) for n, workload in enumerate(chosen)]
    print(f"\npredicted / measured, own phases: {min(ratios):.2f} to {max(ratios):.2f} (target .85 to 1.15)")


if __name__ == "__main__":
    main()
