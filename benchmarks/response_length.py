"""Seconds of one RL step against the length of its responses.

    python benchmarks/response_length.py [--lengths 64 128 256 512 1024 2048] [--prompts 1]

The step of `trainer_step.py` with `--prompts` x 8 responses of exactly each length, SmolLM2-135M-Instruct. Each length
has a process whose first step is a warm-up; beyond `--warm` tokens the first step is the one that counts. Cost is
linear where seconds for 1,000 tokens stay the same. Rows of the table are printed as they are measured.
"""

from __future__ import annotations

import statistics
import sys

from shared import options_of
from trainer_step import SAMPLES, Worker
from trimtab.trainer.models import bundled


def main() -> None:
    parser = options_of(__doc__, lengths=[64, 128, 256, 512, 1024, 2048], prompts=1)
    parser.add_argument("--model", help="a model folder; default: the bundled model, converted once")
    parser.add_argument("--rounds", type=int, default=1, help="measured steps of each length, of which the median")
    parser.add_argument("--warm", type=int, default=512, help="longest response with a warm-up step")
    arguments = parser.parse_args()
    model = arguments.model or str(bundled.folder())
    print("| tokens a response | collect, s | update, s | step, s | step, s for 1,000 tokens | peak memory, GB |")
    print("|---|---|---|---|---|---|", flush=True)
    for length in arguments.lengths:
        worker = Worker(sys.executable, "trimtab", model, length, {"trainer": {"prompts": arguments.prompts}})
        if length <= arguments.warm:
            worker.step()
        steps = [worker.step() for _ in range(arguments.rounds)]
        worker.close()
        collect, update, step = (
            statistics.median(one[name] for one in steps) for name in ("time/collect", "time/update", "seconds")
        )
        tokens = arguments.prompts * SAMPLES * length
        memory = max(one["memory/rss"] for one in steps) / 1e9
        cells = [f"{collect:.1f}", f"{update:.1f}", f"{step:.1f}", f"{1000 * step / tokens:.2f}", f"{memory:.1f}"]
        print(f"| {length:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
