"""What `numerics = "invariant"` costs: one step with and without it, interleaved in one run.

    .venv/bin/python benchmarks/invariant.py [--threads 2] [--rounds 5] [--model smollm2-135m-instruct]

A step samples 8 responses to each prompt (forced length) and runs forward and backward over them, as the trainer does:
in bfloat16 with float32 weights under autocast, or with `--dtype float32` in float32, for a processor without bfloat16
instructions. Each figure is a median over rounds. Target: a whole step in at most 1.15 times the native one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from generation import SAMPLES, case, make_prompts
from shared import options_of
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models import invariant
from trimtab.trainer.models.load import load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.types import Completion, Prompt, SamplingParams

CASES = ((64, 48), (64, 192))
TARGET = 1.15


class Side:
    """A trainer's model and its engine, with one kind of numerics."""

    def __init__(self, path: str, numerics: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model, tokenizer, _ = load(path, dtype=torch.float32)
        if numerics == "invariant":
            invariant.make_invariant(self.model)
        self.engine = EmbeddedEngine(self.model, tokenizer, dtype)
        self.tokenizer = tokenizer
        self.model.train()

    def sample(self, prompts: Sequence[Prompt], tokens: int) -> list[list[Completion]]:
        return self.engine.generate(prompts, SAMPLES, SamplingParams(max_tokens=tokens, ignore_stop=True), seed=0)

    def train(self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> float:
        """Largest difference to the log-probs that the completions carry."""
        worst = 0.0
        for prompt, group in zip(prompts, groups, strict=True):
            batch = TokenBatch.pack([prompt.ids], [one.response_ids for one in group], [0] * len(group), pad_id=0)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                logp = score(self.model, batch).logp
            logp.mean().backward()
            theirs = torch.stack([torch.from_numpy(one.logp_behavior) for one in group])
            worst = max(worst, float((logp.detach() - theirs).abs().max()))
        self.model.zero_grad()
        return worst


def main() -> None:
    parser = options_of(__doc__, model="smollm2-135m-instruct", threads=2, rounds=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--cases", nargs="+", type=case, default=CASES, help="ROWSxTOKENS")
    parser.add_argument("--processor", action="store_true", help="processor time: for a machine that is not idle")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.processor else time.perf_counter
    sides = {name: Side(options.model, name, getattr(torch, options.dtype)) for name in ("native", "invariant")}
    for rows, tokens in options.cases:
        prompts = make_prompts(sides["native"].tokenizer, rows // SAMPLES)
        report(rows, tokens, *measure(sides, prompts, tokens, options.rounds, clock))


def measure(
    sides: dict[str, Side], prompts: list[Prompt], tokens: int, rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float]]:
    sampling: dict[str, list[float]] = {name: [] for name in sides}
    training: dict[str, list[float]] = {name: [] for name in sides}
    worst = dict.fromkeys(sides, 0.0)
    for _ in range(rounds + 1):
        for name, side in sides.items():
            start = clock()
            groups = side.sample(prompts, tokens)
            between = clock()
            worst[name] = max(worst[name], side.train(prompts, groups))
            sampling[name].append(between - start)
            training[name].append(clock() - between)
    # The first round compiles kernels.
    return {k: v[1:] for k, v in sampling.items()}, {k: v[1:] for k, v in training.items()}, worst


def report(
    rows: int, tokens: int, sampling: dict[str, list[float]], training: dict[str, list[float]], worst: dict[str, float]
) -> None:
    print(
        f"{rows} responses of {tokens} tokens; largest |log mu - log pi|: native {worst['native']:.3g}, invariant "
        f"{worst['invariant']:.3g}"
    )
    whole = {name: [a + b for a, b in zip(sampling[name], training[name], strict=True)] for name in sampling}
    for what, seconds in (("sampling", sampling), ("training", training), ("step", whole)):
        native, other = (statistics.median(seconds[name]) for name in ("native", "invariant"))
        target = f"   target <= {TARGET}" if what == "step" else ""
        print(f"  {what:9} native {native:6.2f} s   invariant {other:6.2f} s   ratio {other / native:.2f}{target}")


if __name__ == "__main__":
    main()
