"""How much of the ideal overlap does generation beside training reach? Laboratory model, a reward that waits.

    python benchmarks/overlap.py --rounds 3

Three phases of comparable length: an engine in a process of its own, one thread, generates; reward workers wait, 0.5 s
a batch in all; the trainer, one thread, trains. In step, a step takes the sum of the three; beside each other it could
take as long as the longest. Both runs score in the same workers, with the same engine and the same number of groups.

    ideal = (generate + score + train) / max(generate, score, train), of the run in step
    share = (seconds a step in step / seconds a step beside) / ideal

Seconds a step are wall clock from one finished step to the next, over all steps but the first ones. Rounds alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared import options_of
from trimtab.trainer.config import load_config
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train
from trimtab.types import Problem

WAIT = 0.5  # seconds the rewards of a batch wait
WARM = 6  # steps that fill caches and the pipeline


@dataclass
class Clock(NullObserver):
    """When each step ended, and what it was made of."""

    ends: list[float] = field(default_factory=list)
    steps: list[Mapping[str, Any]] = field(default_factory=list)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.ends.append(time.perf_counter())
        self.steps.append(metrics)

    @property
    def period(self) -> float:
        """Seconds a step."""
        return (self.ends[-1] - self.ends[WARM - 1]) / (len(self.ends) - WARM)

    def mean(self, *phases: str) -> float:
        return statistics.mean(sum(row[f"time/{phase}"] for phase in phases) for row in self.steps[WARM:])


def waiting(responses: int) -> Any:
    """A reward that lets the batch wait `WAIT` seconds, divided among the processes that run rewards."""
    each = WAIT * min(8, os.cpu_count() or 1) / responses

    def matching(completion: str, problem: Problem) -> float:
        """The share of right characters: whole answers are never right after so few steps."""
        time.sleep(each)
        pairs = zip(completion.strip(), problem.answer.strip(), strict=False)
        return sum(one == other for one, other in pairs) / len(problem.answer.strip())

    return matching


def measure(options: argparse.Namespace, *, lag: int) -> Clock:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        sets = [
            f"trainer.steps={options.steps}",
            f"trainer.prompts={options.prompts}",
            f"trainer.samples={options.samples}",
            f"trainer.max_lag={lag}",
            "trainer.micro_batch_tokens=8192",
            "task.digits=20",  # twice the tokens for each reward that waits
            "sft.steps=20",
            "engine.workers=1",
            "eval.problems=1",
            "eval.every=0",
            "log.trajectories_every=0",
        ]
        reward = waiting(options.prompts * options.samples)
        train(load_config("laboratory", sets), reward=reward, out=Path(folder) / "run", observer=clock)
    return clock


def lengths(clock: Clock) -> dict[str, float]:
    """Seconds of each phase of a step."""
    trained = clock.mean("proximal", "update", "publish")
    return {"generate": clock.mean("collect"), "score": clock.mean("score"), "train": trained}


def said(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items())


def main() -> None:
    options = options_of(__doc__, rounds=3, steps=40, prompts=64, samples=8, lag=4).parse_args()
    shares = []
    for number in range(options.rounds):
        step, beside = measure(options, lag=0), measure(options, lag=options.lag)
        phases = lengths(step)
        ideal, faster = sum(phases.values()) / max(phases.values()), step.period / beside.period
        shares.append(faster / ideal)
        print(f"round {number + 1}: in step {said(phases)}; beside {said(lengths(beside))}")
        print(
            f"  in step {step.period:.3f} s, beside {beside.period:.3f} s, of them waiting {beside.mean('wait'):.3f} s"
        )
        print(f"  {faster:.2f} times as fast; ideal {ideal:.2f}: {shares[-1]:.1%} of it", flush=True)
        largest = max(row["lag/max"] for row in beside.steps)
        print(f"  oldest token consumed: {largest} updates, bound {options.lag}")
    print(f"share of the ideal: {statistics.median(shares):.1%} (median of {options.rounds} rounds)")


if __name__ == "__main__":
    main()
