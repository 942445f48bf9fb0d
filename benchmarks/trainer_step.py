"""One RL step against TRL's `GRPOTrainer`: same model, prompts, lengths and machine, in alternation.

    make bench-step        (or: python benchmarks/trainer_step.py --trl-python .venv-bench/bin/python)

A step is everything from "no completions yet" to "weights updated and visible to the sampler": 8 chat prompts of about
45 tokens x 8 completions of exactly 64 tokens (end of text is ignored on both sides) of SmolLM2-135M-Instruct, a reward
that costs nothing, one AdamW update; bf16, gradient checkpointing off. TRL runs in every variant that could suit it
(per-device batch 8 and 64, float32 or bf16 weights under `bf16=True`; on a processor without bfloat16 instructions,
where bfloat16 takes several times as long, float32 alone) and its fastest is the one compared with.

Each side lives in its own process and waits while the other steps. The first step of each is a warm-up. Figures are
medians; the range of the ratio is over rounds; peak memory is that of the process, on a GPU that of its allocator.
Target: at least 3x TRL's steps per second.

On a CPU one more step is recorded after the last round, and each of its matrix products timed alone (`products.py`):
their sum is the floor, which a step should take at most 1.3 times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared import options_of

PROMPTS, SAMPLES = 8, 8
TRL_VARIANTS = tuple({"batch": batch, "weights": weights} for batch in (8, 64) for weights in ("float32", "bfloat16"))
TRL_FLOAT32 = tuple({"batch": batch, "weights": "float32", "bf16": False} for batch in (8, 64))
ANSWER = "@@"  # marks our lines among whatever a library prints


def question(index: int) -> str:
    return f"What is {17 + index} plus {83 - index}? Answer with a single number."


def letters(text: str) -> float:
    """A reward that costs nothing and differs between samples."""
    return text.count("e") / (1 + len(text))


class Commands:
    """The worker's end: wait for the word to go, report how long the step took."""

    def ready(self, **facts: Any) -> None:
        print(ANSWER + json.dumps(facts), flush=True)

    def wait(self) -> str:
        """Returns the word to go: "step", "products" or "profile"."""
        word = sys.stdin.readline().strip()
        if not word:
            os._exit(0)  # the driver has seen enough; a trainer cannot be asked to stop from inside a step
        self._start = time.perf_counter()
        return word

    def done(self, **facts: Any) -> None:
        import torch

        seconds = time.perf_counter() - self._start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        self.ready(seconds=seconds, peak=peak, gpu_peak=torch.cuda.max_memory_allocated(), **facts)


def trl_worker(model: str, tokens: int, variant: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    commands = Commands()

    class Stepwise(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            commands.ready(threads=torch.get_num_threads())

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            commands.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            commands.done(length=trainer._metrics["train"]["completions/mean_length"][-1])

    rows = [{"prompt": [{"role": "user", "content": question(index)}]} for index in range(64)]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not torch.cuda.is_available(),
        bf16=variant.get("bf16", True),
        model_init_kwargs={"dtype": variant["weights"]},
        per_device_train_batch_size=variant["batch"],
        gradient_accumulation_steps=variant["prompts"] * SAMPLES // variant["batch"],
        num_generations=SAMPLES,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
        gradient_checkpointing=False,
        learning_rate=1e-6,
        max_steps=1000,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=lambda completions, **_: [letters(c[0]["content"]) for c in completions],
        callbacks=[Stepwise()],
    )
    trainer.train()


def profile_facts(profile: Any, wall: float, trace: str) -> dict[str, Any]:
    """Writes the trace of a profiled step; returns its seconds, those of its kernels and the 20 slowest operations."""
    import torch

    profile.export_chrome_trace(trace)
    key = f"self_{'device' if torch.cuda.is_available() else 'cpu'}_time_total"
    rows = sorted(profile.key_averages(), key=lambda row: -getattr(row, key))
    top = [{"name": row.key[:80], "calls": row.count, "ms": getattr(row, key) / 1e3} for row in rows[:20]]
    return {"wall": wall, "busy": sum(getattr(row, key) for row in rows) / 1e6, "top": top}


def trimtab_worker(model: str, tokens: int, variant: dict[str, Any]) -> None:
    import torch
    from torch.profiler import profile

    from products import RecordedProducts
    from trimtab.objectives import objective
    from trimtab.runs.directory import RunDirectory
    from trimtab.trainer import rewards
    from trimtab.trainer.build_model import build_model
    from trimtab.trainer.config import parse_config
    from trimtab.trainer.held_out import build_held_out
    from trimtab.trainer.observer import NullObserver
    from trimtab.trainer.run import RunParts, build_trainer
    from trimtab.trainer.tasks.task import BuiltTask, Chat
    from trimtab.types import Problem, RewardSpec

    commands, watches = Commands(), {"products": lambda: RecordedProducts(loaded.model.config), "profile": profile}

    class Stepwise(NullObserver):
        def phase(self, name: str, *_: Any) -> None:
            if name == "collect":
                make = watches.get(commands.wait())
                self.watch = None if make is None else make().__enter__()

        def step(self, metrics: Any) -> None:
            seen = {key: value for key, value in metrics.items() if key.startswith(("time/", "memory/"))}
            if self.watch is not None:
                self.watch.__exit__(None, None, None)
                if isinstance(self.watch, RecordedProducts):
                    seen["products"] = self.watch.seconds()
                else:
                    seen["profile"] = profile_facts(self.watch, metrics["time/step"], variant["trace"])
            commands.done(length=metrics["length/mean"], **seen)

    problems = [Problem(str(index), question(index), "100") for index in range(64)]
    spec = RewardSpec(lambda completion, _problem: letters(completion))
    task = BuiltTask("sums", problems, problems[:1], Chat(), (spec,), (), tokens)
    config = parse_config(
        {
            "model": {"path": model} | variant.get("model", {}),
            "objective": {"name": "token-tis"},
            "trainer": {"steps": 1000, "prompts": PROMPTS, "samples": SAMPLES} | variant.get("trainer", {}),
            "optim": {"lr": 1e-6},
            "eval": {"problems": 1},
            "log": {"trajectories_every": 0},
        },
        "benchmark",
    )
    scorer = rewards.build([spec], task)
    parts = RunParts(objective("token-tis"), task, scorer, build_held_out(config, task, scorer, []))
    loaded = build_model(config)
    with RunDirectory.create(Path(tempfile.mkdtemp()), config.dump()) as run:
        trainer = build_trainer(config, parts, loaded, run, Stepwise())
        responses = trainer.source.collector.responses
        responses.sampling = replace(responses.sampling, ignore_stop=True)
        commands.ready(threads=torch.get_num_threads())
        trainer.train()


class Worker:
    """One side, in a process of its own."""

    def __init__(self, python: str, side: str, model: str, tokens: int, variant: dict[str, Any]) -> None:
        self.name = f"{side} {' '.join(f'{key}={value}' for key, value in variant.items())}".strip()
        self._tokens = tokens
        call = [python, __file__, "--worker", side, "--model", model, "--tokens", str(tokens)]
        call += ["--variant", json.dumps(variant)]
        self._process = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise SystemExit(f"{self.name} stopped with exit code {self._process.wait()}")

    def step(self, word: str = "step") -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer["length"] != self._tokens:
            raise SystemExit(f"{self.name} wrote {answer['length']} tokens a completion instead of {self._tokens}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def fastest_trl(python: str, model: str, tokens: int, prompts: int, steps: int) -> dict[str, Any]:
    """TRL's best variant, each measured alone after one warm-up step."""
    from products import has_bfloat16

    result: list[tuple[float, dict[str, Any]]] = []
    for one in TRL_VARIANTS if has_bfloat16() else TRL_FLOAT32:
        if one["batch"] > prompts * SAMPLES:
            continue
        variant = one | {"prompts": prompts}
        worker = Worker(python, "trl", model, tokens, variant)
        worker.step()
        seconds = statistics.median(worker.step()["seconds"] for _ in range(steps))
        worker.close()
        print(f"{worker.name:<36} {seconds:7.2f} s a step", flush=True)
        result.append((seconds, variant))
    return min(result, key=lambda pair: pair[0])[1]


def compare(trl_python: str, model: str, tokens: int, rounds: int, variant: dict[str, Any], micro: int | None) -> None:
    from products import products_alone

    theirs = Worker(trl_python, "trl", model, tokens, variant)
    own = {"prompts": variant["prompts"]} | ({"micro_batch_tokens": micro} if micro else {})
    ours = Worker(sys.executable, "trimtab", model, tokens, {"trainer": own})
    results = [[worker.step() for worker in (theirs, ours)] for _ in range(rounds + 1)][1:]
    products = {} if results[-1][1]["gpu_peak"] else ours.step("products")["products"]
    for worker in (theirs, ours):
        worker.close()
    trl, trimtab = ([step["seconds"] for step in column] for column in zip(*results, strict=True))
    ratios = sorted(a / b for a, b in zip(trl, trimtab, strict=True))
    last = results[-1]
    kind = "gpu_peak" if last[1]["gpu_peak"] else "peak"
    memory = [step[kind] / 1e9 for step in last]
    print(f"{theirs.name:<36} {statistics.median(trl):7.2f} s a step, peak memory {memory[0]:.1f} GB")
    print(f"{'trimtab':<36} {statistics.median(trimtab):7.2f} s a step, peak memory {memory[1]:.1f} GB")
    for key in sorted(key for key in results[0][1] if key.startswith("time/") and key != "time/step"):
        print(f"  {key:<34} {statistics.median(step[key] for _, step in results):7.2f} s")
    rate, update = products_alone(model, variant["prompts"] * SAMPLES * tokens)
    for kind, seconds in sorted(products.items()):
        print(f"  products alone: {kind:<25} {seconds:.2f} s")
    floors = {"its products alone": sum(products.values())} if products else {}
    # All products of an update, and of sampling those of the forward: 8 of 6 parts.
    for name, floor in (floors | {f"8 x parameters x tokens at {rate:.0f} GFLOP/s": update * 8 / 6}).items():
        shares = sorted(seconds / floor for seconds in trimtab)
        middle = statistics.median(shares)
        print(f"  step / floor: {middle:.2f} ({shares[0]:.2f} .. {shares[-1]:.2f}), of {floor:.1f} s, {name}")
    speed = statistics.median(trl) / statistics.median(trimtab)
    print(f"speed {speed:.2f}x TRL (range {ratios[0]:.2f} .. {ratios[-1]:.2f} over {rounds} rounds; target >= 3)")
    print(f"{theirs.facts['threads']} and {ours.facts['threads']} threads")


def main() -> None:
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--trl-python", default=".venv-bench/bin/python", help="interpreter that has trl==1.16.0")
    parser.add_argument("--model", help="a model folder; default: the bundled model, converted once")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="each with 8 completions")
    parser.add_argument(
        "--trl-variant", type=json.loads, help='skip the search, e.g. \'{"batch": 64, "weights": "bfloat16"}\''
    )
    parser.add_argument("--micro-batch-tokens", type=int, help="of Trimtab, in place of the default; on a GPU try 8192")
    parser.add_argument("--worker", choices=["trl", "trimtab"], help=argparse.SUPPRESS)
    parser.add_argument("--variant", type=json.loads, default={}, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        {"trl": trl_worker, "trimtab": trimtab_worker}[arguments.worker](
            arguments.model, arguments.tokens, arguments.variant
        )
        return
    if not Path(arguments.trl_python).is_file():
        raise SystemExit(
            f"{arguments.trl_python} does not exist: `make bench-install` makes an environment that has TRL"
        )
    from trimtab.trainer.models import bundled

    model = arguments.model or str(bundled.folder())
    both = arguments.trl_python, model, arguments.tokens
    given, prompts = arguments.trl_variant, arguments.prompts
    variant = given | {"prompts": prompts} if given else fastest_trl(*both, prompts, max(1, arguments.rounds // 2))
    compare(*both, arguments.rounds, variant, arguments.micro_batch_tokens)


if __name__ == "__main__":
    main()
