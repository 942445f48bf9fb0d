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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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

    def __init__(self) -> None:
        self._start = 0.0

    def ready(self, **facts: Any) -> None:
        print(ANSWER + json.dumps(facts), flush=True)

    def wait(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)  # the driver has seen enough; a trainer cannot be asked to stop from inside a step
        self._start = time.perf_counter()

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


class StepProfiler:
    """Writes what the third step spends its time on: `variant["profile"]`, and a trace, `variant["trace"]`."""

    def __init__(self, variant: dict[str, Any]) -> None:
        self._files, self._steps, self._profile = (variant["profile"], variant["trace"]), 0, None

    def begin(self) -> None:
        from torch.profiler import profile

        self._steps += 1
        if self._steps == 3:
            self._profile, self._start = profile(), time.perf_counter()
            self._profile.__enter__()

    def end(self) -> None:
        import torch

        if self._profile is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = time.perf_counter() - self._start
        self._profile.__exit__(None, None, None)
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        rows = sorted(self._profile.key_averages(), key=lambda row: -getattr(row, key))
        top = [{"name": row.key[:80], "calls": row.count, "ms": getattr(row, key) / 1e3} for row in rows[:20]]
        busy = sum(getattr(row, key) for row in rows) / 1e6
        Path(self._files[0]).write_text(json.dumps({"wall": wall, "busy": busy, "top": top}))
        self._profile.export_chrome_trace(self._files[1])
        self._profile = None


def trimtab_worker(model: str, tokens: int, variant: dict[str, Any]) -> None:
    import torch

    from trimtab.objectives import objective
    from trimtab.runs.directory import RunDirectory
    from trimtab.trainer import rewards
    from trimtab.trainer.build_model import build_model
    from trimtab.trainer.config import parse_config
    from trimtab.trainer.held_out import eval_tasks
    from trimtab.trainer.observer import NullObserver
    from trimtab.trainer.run import RunParts, build_trainer
    from trimtab.trainer.tasks.task import BuiltTask
    from trimtab.trainer.tasks.templates import Chat
    from trimtab.types import Problem, RewardSpec

    commands, profiler = Commands(), StepProfiler(variant) if "profile" in variant else None

    class Stepwise(NullObserver):
        def phase(self, name: str, *_: Any) -> None:
            if name == "collect":
                commands.wait()
                if profiler:
                    profiler.begin()

        def step(self, metrics: Any) -> None:
            if profiler:
                profiler.end()
            seen = {key: value for key, value in metrics.items() if key.startswith(("time/", "memory/"))}
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
    parts = RunParts(objective("token-tis"), task, scorer, eval_tasks(config, task, scorer, []))
    with RunDirectory.create(Path(tempfile.mkdtemp()), config.dump()) as run:
        trainer = build_trainer(config, parts, build_model(config), run, Stepwise())
        responses = trainer.collector.responses
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

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
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


def alternate(workers: list[Worker], rounds: int) -> Iterator[list[dict[str, Any]]]:
    for worker in workers:
        worker.step()
    for _ in range(rounds):
        yield [worker.step() for worker in workers]


def compare(trl_python: str, model: str, tokens: int, rounds: int, variant: dict[str, Any], micro: int | None) -> None:
    theirs = Worker(trl_python, "trl", model, tokens, variant)
    own = {"prompts": variant["prompts"]} | ({"micro_batch_tokens": micro} if micro else {})
    ours = Worker(sys.executable, "trimtab", model, tokens, {"trainer": own})
    results = list(alternate([theirs, ours], rounds))
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
    floor = update * 8 / 6  # and those of sampling, which are the forward's
    print(f"  products of the update alone: {update:.1f} s at {rate:.0f} GFLOP/s (feed-forward's shape)")
    shares = sorted(seconds / floor for seconds in trimtab)
    middle = statistics.median(shares)
    print(f"  step / floor: {middle:.2f} ({shares[0]:.2f} .. {shares[-1]:.2f}), of {floor:.1f} s of products")
    speed = statistics.median(trl) / statistics.median(trimtab)
    print(f"speed {speed:.2f}x TRL (range {ratios[0]:.2f} .. {ratios[-1]:.2f} over {rounds} rounds; target >= 3)")
    print(f"{theirs.facts['threads']} and {ours.facts['threads']} threads")


def products_alone(model: str, rows: int) -> tuple[float, float]:
    """Returns the rate of products here (GFLOP/s), in bfloat16 where the device multiplies it, else in float32.

    Also the seconds that the products of an update on `rows` tokens take at this rate.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from trimtab.trainer.models.load import default_device
    from trimtab.trainer.models.matmul import product

    loaded = AutoModelForCausalLM.from_pretrained(model)
    width, inner = loaded.config.hidden_size, loaded.config.intermediate_size
    dtype = torch.bfloat16 if has_bfloat16() else torch.float32
    device = default_device()
    states, weight = (torch.randn(size, width, dtype=dtype, device=device) for size in (rows, inner))
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        product(states, weight)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    rate = 2 * rows * width * inner / statistics.median(seconds)
    parameters = sum(parameter.numel() for parameter in loaded.parameters())
    return rate / 1e9, 6 * parameters * rows / rate  # forward, and both products of backward


def has_bfloat16() -> bool:
    """Whether the device multiplies bfloat16 in hardware."""
    import torch

    return torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def model_folder() -> str:
    from trimtab.trainer.models import bundled

    return str(bundled.folder())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=".venv-bench/bin/python", help="interpreter that has trl==1.16.0")
    parser.add_argument("--model", help="a model folder; default: the bundled model, converted once")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="each with 8 completions")
    parser.add_argument("--rounds", type=int, default=3)
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
    model = arguments.model or model_folder()
    both = arguments.trl_python, model, arguments.tokens
    given, prompts = arguments.trl_variant, arguments.prompts
    variant = given | {"prompts": prompts} if given else fastest_trl(*both, prompts, max(1, arguments.rounds // 2))
    compare(*both, arguments.rounds, variant, arguments.micro_batch_tokens)


if __name__ == "__main__":
    main()
