"""What an engine in a process of its own costs, against the same engine in this process, alternating in one run.

    python benchmarks/worker.py [--models laboratory smollm2-135m-instruct] [--threads 1] [--rounds 9]

Both sample the same tokens (checked, bit for bit), so what differs is messages and their pickling; a publication adds
the copy that is handed over. One of the two processes waits while the other works: no core is shared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.trainer import tasks
from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine
from trimtab.trainer.engines.weight_transfer import share
from trimtab.trainer.models.load import LABORATORY, LoadedModel, load
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import Completion, Engine, SamplingParams

TARGET = 1.05  # of a batch, where a batch takes longer than a few messages
# name -> task, prompts of a batch, forced tokens of a response; 8 samples each
CASES = {LABORATORY: ("sort", 16, 11), "smollm2-135m-instruct": ("arithmetic", 8, 32)}
SAMPLES = 8


class Clock:
    """An interruption that is set at the third look; says when."""

    def __init__(self) -> None:
        self.looks, self.set_at = 0, 0.0

    def is_set(self) -> bool:
        self.looks += 1
        if self.looks == 3:
            self.set_at = time.perf_counter()
        return self.looks >= 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.models:
        path = str(laboratory_folder()) if name == LABORATORY else name
        compare(name, load(path, dtype=torch.float32), options.threads, options.rounds)


def compare(name: str, loaded: LoadedModel, threads: int, rounds: int) -> None:
    kind, count, tokens = CASES[name]
    prompts = PromptStream(tasks.build(kind), loaded.tokenizer, 0).take(count)
    sampling, weights = SamplingParams(max_tokens=tokens, ignore_stop=True), list(loaded.model.state_dict().items())
    with tempfile.TemporaryDirectory() as folder:
        save_model_files(loaded.model, loaded.tokenizer, Path(folder) / "model")
        spec = {"type": "embedded", "model": f"{folder}/model", "dtype": "bfloat16", "quantization": {}}
        start = time.perf_counter()
        worker = RemoteEngine(ProcessTransport(spec, threads=threads))
        worker.update_weights(iter(weights), 0)
        started = time.perf_counter() - start
        own = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16)
        print(f"{name}: {count} prompts x {SAMPLES} x {tokens} tokens, bfloat16, {threads} threads, {rounds} rounds")
        print(f"  start of the process to its first weights: {started:.1f} s")

        def generate(engine: Engine, seed: int) -> list[list[Completion]]:
            return engine.generate(prompts, SAMPLES, sampling, seed=seed)

        def publish(engine: Engine, version: int) -> None:
            engine.update_weights(iter(weights), version)

        assert same(generate(own, 0), generate(worker, 0))
        target = "" if name == LABORATORY else f"   target <= {TARGET}"
        report("batch", alternate(generate, own, worker, rounds), target)
        report("publication", alternate(publish, own, worker, rounds))
        writing = statistics.median(timed(share, weights) for _ in range(rounds))
        shared = share(weights)
        taking = statistics.median(timed(worker.update_weights, shared, i) for i in range(rounds))
        print(f"  of it: writing {writing:.4f} s; taking over what is written {taking:.4f} s")
        waits = [interrupted(worker, prompts, sampling, seed) for seed in range(rounds)]
        step = timed(generate, worker, 0) / tokens
        print(
            f"  interruption to answer: median {statistics.median(waits):.3f} s, longest {max(waits):.3f} s; one token "
            f"of all rows takes {step:.3f} s",
            flush=True,
        )
        worker.close()


def alternate(
    call: Callable[[Engine, int], Any], own: Engine, worker: Engine, rounds: int
) -> tuple[list[float], list[float]]:
    pairs = [[timed(call, engine, i) for engine in (own, worker)] for i in range(1, rounds + 1)]
    ours, theirs = zip(*pairs, strict=True)
    return list(ours), list(theirs)


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def interrupted(worker: Engine, prompts: list[Any], sampling: SamplingParams, seed: int) -> float:
    clock = Clock()
    worker.generate(prompts, SAMPLES, sampling, seed=seed, abort=clock)
    return time.perf_counter() - clock.set_at


def same(ours: list[list[Completion]], theirs: list[list[Completion]]) -> bool:
    pairs = [(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    return all(
        np.array_equal(a.response_ids, b.response_ids) and np.array_equal(a.logp_behavior, b.logp_behavior)
        for a, b in pairs
    )


def report(what: str, seconds: tuple[list[float], list[float]], target: str = "") -> None:
    ours, theirs = (statistics.median(side) for side in seconds)
    print(f"  {what}: here {ours:.4f} s, in its own process {theirs:.4f} s ({theirs / ours:.2f}x){target}")


if __name__ == "__main__":
    main()
