"""Everything that is measured on one GPU, by one command of at most nine minutes that continues where it was stopped.

    python benchmarks/gpu.py --out runs/gpu
    python benchmarks/gpu.py --out runs/gpu --small     # the same parts with a tiny model, for a CPU, some minutes

Parts, in this order; each is skipped where it is finished or too little time is left, and a later call does it:

    setup      missing packages (`pip install`), and a model of 1.5B parameters with random weights
    tests      the tests that a device changes: bits, waits, CUDA graphs
    step-64    a training step of 8 prompts x 8 responses of 64 tokens by phase, its products alone, peak memory; TRL's
    step-512   the same for 512 tokens
    options    the step of 512 tokens without deterministic algorithms, with compiled layers, with small micro-batches
    profile    the twenty operations that take longest on the device, and the gaps between kernels; a trace
    decoding   the embedded engine against `transformers.generate`

Results are in `results.json`, the tables of docs/results/gpu.md in `gpu.md`, both in the folder. Targets: an update of
512 tokens <= 2 times its products, a whole step >= 3 times TRL's, memory not above TRL's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = {"trl": "trl==1.16.0", "transformers": ".[train]", "pytest": ".[dev]"}
TESTS = ("tests/e2e/test_devices.py", "tests/unit/trainer/engines/embedded/test_graphs.py", "tests/unit/trainer/models")
SHAPE = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
VOCABULARY = 151936
PHASES = ("collect", "update", "publish", "step")
OPTIONS = {
    "not deterministic": {"trainer": {"deterministic": False}},
    "compiled layers": {"model": {"compile": True}},
    "micro-batches of 2,048 tokens": {"trainer": {"micro_batch_tokens": 2048}},
}


class Session:
    """The parts of one call, their time, and the file of results."""

    def __init__(self, out: Path, minutes: float, small: bool) -> None:
        self.out, self.small = out, small
        self.chosen: list[str] | None = None
        self.end = time.monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "results.json"
        self.results: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.model = out / "model"

    def part(self, name: str, expected: float, measure: Callable[[], Any]) -> None:
        """Does a part that is expected to take so many seconds, unless it is finished or the time is too short."""
        left = self.end - time.monotonic()
        if name in self.results:
            print(f"{name}: finished before")
        elif self.chosen and name not in self.chosen:
            return
        elif left < expected:
            print(f"{name}: skipped, {left:.0f} s are left; call again")
        else:
            start = time.monotonic()
            try:
                self.results[name] = measure()
            except (SystemExit, subprocess.SubprocessError) as error:  # the other parts are worth having
                print(f"{name}: failed: {error}")
                return
            temporary = self.file.with_suffix(".new")
            temporary.write_text(json.dumps(self.results, indent=1))
            os.replace(temporary, self.file)
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)

    def run(self, *command: str) -> str:
        """Returns the output of a command, which ends with the time of this call."""
        left = max(1.0, self.end - time.monotonic())
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        }
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=left,
            cwd=ROOT,
            env=environment,
            check=False,
        )
        if done.returncode not in (0, 1):  # 1: tests failed
            raise SystemExit((done.stderr or done.stdout).strip().splitlines()[-1])
        return done.stdout


def setup(session: Session) -> dict[str, str]:
    missing = [package for name, package in PACKAGES.items() if importlib.util.find_spec(name) is None]
    if missing and not session.small:
        session.run("-m", "pip", "install", "--quiet", *missing)
    if not (session.model / "tokenizer_config.json").exists():  # which is written last
        session.run(__file__, "--out", str(session.out), "--write-model", *(["--small"] if session.small else []))
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "torch": torch.__version__, "without": ", ".join(missing) if session.small else ""}


def write_model(folder: Path, small: bool) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from trimtab.trainer.models import bundled
    from trimtab.trainer.models.load import default_device

    shape = SHAPE | ({"hidden_size": 96, "intermediate_size": 256} if small else {})
    config = Qwen2Config(
        **shape,
        vocab_size=49152 if small else VOCABULARY,
        num_hidden_layers=2 if small else 28,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **{f"{name}_token_id": token for name, token in (("bos", 1), ("eos", 2), ("pad", 2))},
    )
    torch.manual_seed(0)
    with default_device():  # a CPU takes minutes for it
        model = Qwen2ForCausalLM(config)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled.folder()).save_pretrained(folder)


def tests(session: Session) -> str:
    """The last line of pytest. In the small form one test."""
    chosen = ("tests/unit/trainer/models/test_packed_attention.py",) if session.small else TESTS
    output = session.run("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *chosen)
    lines = output.strip().splitlines()
    if not lines:
        raise SystemExit("pytest did not run")
    return "; ".join([lines[-1], *(line for line in lines if line.startswith("FAILED"))])


def step(session: Session, tokens: int) -> dict[str, Any]:
    """Our step and TRL's, three after a warm-up each, and the seconds of the products of the update."""
    from products import products_alone
    from trainer_step import PROMPTS, SAMPLES

    sizes = {"trainer": {"prompts": PROMPTS}}
    result = {"trimtab": steps(session, "trimtab", tokens, sizes)}
    if importlib.util.find_spec("trl") is not None:
        for batch in (8, 64):
            variant = {"batch": batch, "weights": "bfloat16", "prompts": PROMPTS}
            result[f"TRL, batch {batch}"] = steps(session, "trl", tokens, variant)
    rate, floor = products_alone(str(session.model), PROMPTS * SAMPLES * tokens)
    return result | {"products": floor, "TFLOP/s": rate / 1e3}


def steps(session: Session, side: str, tokens: int, variant: dict[str, Any]) -> dict[str, Any]:
    from trainer_step import Worker

    worker = Worker(sys.executable, side, str(session.model), tokens, variant)
    facts = [worker.step() for _ in range(4)][1:]
    worker.close()
    peak = "gpu_peak" if facts[-1]["gpu_peak"] else "peak"
    times = {key: statistics.median(fact[key] for fact in facts) for key in facts[0] if key.startswith("time/")}
    return times | {"step": statistics.median(fact["seconds"] for fact in facts), "GiB": facts[-1][peak] / 2**30}


def profile(session: Session) -> dict[str, Any]:
    """What the third step of 512 tokens spends its time on, by PyTorch's profiler."""
    from trainer_step import Worker

    variant = {"trace": str(session.out / "trace.json")}
    worker = Worker(sys.executable, "trimtab", str(session.model), tokens_of(session, 512), variant)
    facts = [worker.step(word) for word in ("step", "step", "profile")]
    worker.close()
    return facts[-1]["profile"]


def decoding(session: Session) -> list[str]:
    cases = ["8x4"] if session.small else ["64x64", "512x64"]
    output = session.run("benchmarks/generation.py", "--model", str(session.model), "--rounds", "3", "--cases", *cases)
    return [line for line in output.splitlines() if line.strip()]


def tokens_of(session: Session, tokens: int) -> int:
    return tokens // 32 if session.small else tokens


def tables(results: dict[str, Any]) -> str:
    facts = results.get("setup", {})
    lines = [f"{facts.get('device')}, torch {facts.get('torch')}. Tests: {results.get('tests', 'not run')}.", ""]
    header = ["tokens", "side", *(f"{phase}, s" for phase in PHASES), "update / products", "GiB"]
    lines += [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    rows = [(name.removeprefix("step-"), results[name]) for name in ("step-64", "step-512") if name in results]
    options = {name: results[f"option: {name}"] for name in OPTIONS if f"option: {name}" in results}
    if options and "step-512" in results:
        rows.append(("512", {"products": results["step-512"]["products"]} | options))
    for tokens, sides in rows:
        for side, row in sides.items():
            if not isinstance(row, dict):
                continue
            cells = [f"{row[f'time/{phase}']:.2f}" if f"time/{phase}" in row else "-" for phase in PHASES[:-1]]
            share = f"{row['time/update'] / sides['products']:.1f}" if "time/update" in row else "-"
            lines.append(
                f"| {tokens} | {side} | {' | '.join(cells)} | {row['step']:.2f} | {share} | {row['GiB']:.1f} |"
            )
        if "TFLOP/s" in sides:
            name, seconds = f"products alone, {sides['TFLOP/s']:.0f} TFLOP/s", f"{sides['products']:.2f}"
            lines.append(f"| {tokens} | {name} | - | {seconds} | - | - | 1 | - |")
    if "profile" in results:
        found = results["profile"]
        lines += ["", f"Kernels compute for {found['busy']:.2f} of {found['wall']:.2f} s.", ""]
        lines += ["| operation | calls | ms |", "|---|---|---|"]
        lines += [f"| `{row['name']}` | {row['calls']} | {row['ms']:.1f} |" for row in found["top"]]
    return "\n".join([*lines, "", *results.get("decoding", [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and of the results")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", nargs="+", help="only these; default: all")
    parser.add_argument("--write-model", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    session = Session(given.out.resolve(), given.minutes, given.small)
    session.chosen = given.parts
    if given.write_model:
        write_model(session.model, given.small)
        return
    scale = 0.2 if given.small else 1.0
    session.part("setup", 0, lambda: setup(session))
    session.part("step-512", 120 * scale, lambda: step(session, tokens_of(session, 512)))
    session.part("tests", 90 * scale, lambda: tests(session))
    session.part("step-64", 60 * scale, lambda: step(session, tokens_of(session, 64)))
    session.part("profile", 40 * scale, lambda: profile(session))
    for name, variant in OPTIONS.items():
        session.part(
            f"option: {name}", 60 * scale, lambda v=variant: steps(session, "trimtab", tokens_of(session, 512), v)
        )
    session.part("decoding", 60 * scale, lambda: decoding(session))
    text = tables(session.results)
    (session.out / "gpu.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
