"""Does the staleness bound hold, and is every group trained on once, over a thousand steps and twenty kills?

    python benchmarks/survival.py --steps 1000 --kills 0
    python benchmarks/survival.py --steps 200 --kills 20

Laboratory model, two engines in processes of their own, bound of 4 updates, checkpoints every other step. SIGKILL goes
to the trainer or to one of its engines, at random moments: while it starts, generates, trains or saves. A killed
trainer is started again with --resume; a killed engine is the trainer's to replace. What was consumed is read from the
trajectory files afterwards: the groups of each step and the version of each token.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil

from shared import options_of
from trimtab.runs import trajectories
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import list_checkpoints
from trimtab.trainer.checkpoint import store

PROMPTS, SAMPLES, LAG = 4, 4, 4


def command(out: Path, options: argparse.Namespace) -> list[str]:
    sets = [
        f"trainer.steps={options.steps}",
        f"trainer.prompts={PROMPTS}",
        f"trainer.samples={SAMPLES}",
        f"trainer.max_lag={LAG}",
        f'trainer.in_flight="{options.in_flight}"',
        "engine.workers=2",
        "checkpoint.every=2" if options.kills else "checkpoint.every=100",
        "log.trajectories_every=1",
        "eval.every=0",
        "eval.problems=4",
        "optim.lr=2e-5",
    ]
    words = [word for change in sets for word in ("--set", change)]
    resume = ["--resume"] if (out / "config.toml").exists() else []
    return [sys.executable, "-m", "trimtab", "train", "laboratory", *words, "--out", str(out), "--json", *resume]


def steps_done(out: Path) -> int:
    return len(read_metrics(out / "metrics.jsonl")) if (out / "metrics.jsonl").exists() else 0


def victims(trainer: psutil.Process) -> list[psutil.Process]:
    """The engines that are alive."""
    result = []
    for child in trainer.children():
        try:
            if any("trimtab.trainer.engines.remote.engine_host" in word for word in child.cmdline()):
                result.append(child)
        except psutil.Error:
            continue
    return result


def live(out: Path, options: argparse.Namespace) -> Counter[str]:
    """Run to the end, through all kills."""
    chance, killed = random.Random(options.seed), Counter[str]()
    while True:
        before = steps_done(out)
        process = subprocess.Popen(command(out, options), stdout=subprocess.DEVNULL)
        while killed.total() < options.kills and process.poll() is None:
            early = chance.random() < 0.15  # some kills come while the run still starts
            while not early and steps_done(out) <= before and process.poll() is None:
                time.sleep(0.05)
            time.sleep(chance.uniform(0.0, options.spread))
            engines = victims(psutil.Process(process.pid)) if process.poll() is None else []
            if engines and chance.random() < 0.5:
                chance.choice(engines).send_signal(signal.SIGKILL)
                killed["engine"] += 1
                before = steps_done(out)
            elif process.poll() is None:
                process.kill()
                killed["trainer"] += 1
                process.wait()
            print(f"kills {dict(killed)}, step {steps_done(out)}", flush=True)
        if process.wait() == 0:
            return killed
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(f"the run failed with exit code {process.returncode}")


def examine(out: Path) -> None:
    ages, groups = Counter[int](), Counter[int]()
    rows = read_metrics(out / "metrics.jsonl")
    for row in rows:
        read = trajectories.read(out / "trajectories" / f"step-{row['step']:06d}.parquet")
        groups.update({one.trajectory.group for one in read})
        for one in read:
            assert one.proximal_version is not None
            old = one.proximal_version - one.trajectory.completion.policy_version
            ages.update(dict(zip(*(part.tolist() for part in np.unique(old, return_counts=True)), strict=True)))
    books = store.load(list_checkpoints(out / "checkpoints")[-1]).meta["source"]
    twice = [group for group, times in groups.items() if times > 1]
    pending = len(books["ready"] + books["unfinished"])
    stale = [row["trajectories/stale"] for row in rows] + [books["stale"]]
    dropped = round(sum(stale)) // SAMPLES
    lost = books["drawn"] - books["consumed"] - dropped - pending
    print(f"steps {len(rows)}, groups {len(groups)}, restarts of engines {sum(row['engine/restarts'] for row in rows)}")
    print(f"groups in more than one batch: {len(twice)}; neither consumed, pending nor dropped: {lost}")
    print(f"dropped {dropped}, pending {pending}")
    total = ages.total()
    print("age of consumed tokens: " + ", ".join(f"{age}: {ages[age] / total:.1%}" for age in sorted(ages)))
    if twice or lost or max(ages) > LAG or len(groups) != books["consumed"]:
        raise SystemExit("FAILED")
    print(f"no token was older than {LAG} updates")


def main() -> None:
    parser = options_of(__doc__, steps=1000, kills=0, seed=0)
    parser.add_argument("--spread", type=float, default=4.0, help="seconds until the next kill, at most")
    parser.add_argument("--in-flight", choices=["finish", "continue"], default="finish")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "run"
        killed = live(out, options)
        print(f"killed: {dict(killed)}")
        examine(out)


if __name__ == "__main__":
    main()
