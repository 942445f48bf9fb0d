"""What `numerics = "invariant"` costs: one step with and without it, interleaved in one run.

    .venv/bin/python benchmarks/invariant.py [--threads 2] [--rounds 5] [--model smollm2-135m-instruct]

A step samples 8 responses to each prompt (forced length) and runs forward and backward over them, as the trainer does:
in bfloat16 with float32 weights under autocast, or with `--dtype float32` in float32, for a processor without bfloat16
instructions. Each figure is a median over rounds. Target: a whole step in at most 1.15 times the native one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from generation import SAMPLES, case, make_prompts
from shared import alternate, medians, options_of
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
        self.model, tokenizer = load(path, dtype=torch.float32)
        if numerics == "invariant":
            invariant.make_invariant(self.model)
        self.engine = EmbeddedEngine(self.model, tokenizer, dtype)
        self.tokenizer = tokenizer
        self.groups: list[list[Completion]] = []
        self.worst = 0.0  # largest difference to the log-probs that the completions carry
        self.model.train()

    def sample(self, prompts: Sequence[Prompt], tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_stop=True)
        self.groups = self.engine.generate(prompts, SAMPLES, sampling, seed=0)

    def train(self, prompts: Sequence[Prompt]) -> None:
        for prompt, group in zip(prompts, self.groups, strict=True):
            batch = TokenBatch.pack([prompt.ids], [one.response_ids for one in group], [0] * len(group), pad_id=0)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                logp = score(self.model, batch).logp
            logp.mean().backward()
            theirs = torch.stack([torch.from_numpy(one.logp_behavior) for one in group])
            self.worst = max(self.worst, float((logp.detach() - theirs).abs().max()))
        self.model.zero_grad()


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
        runs: dict[str, Callable[[], None]] = {}
        for name, side in sides.items():
            side.worst = 0.0
            runs[f"{name} sampling"] = partial(side.sample, prompts, tokens)
            runs[f"{name} training"] = partial(side.train, prompts)
        seconds = alternate(runs, options.rounds, clock)
        worst = ", ".join(f"{name} {side.worst:.3g}" for name, side in sides.items())
        print(f"{rows} responses of {tokens} tokens; largest |log mu - log pi|: {worst}")
        report(seconds)


def report(seconds: dict[str, list[float]]) -> None:
    for name in ("native", "invariant"):
        parts = seconds[f"{name} sampling"], seconds[f"{name} training"]
        seconds[f"{name} step"] = list(map(sum, zip(*parts, strict=True)))
    median = medians(seconds)
    for what in ("sampling", "training", "step"):
        native, other = median[f"native {what}"], median[f"invariant {what}"]
        target = f"   target <= {TARGET}" if what == "step" else ""
        print(f"  {what:9} native {native:6.2f} s   invariant {other:6.2f} s   ratio {other / native:.2f}{target}")


if __name__ == "__main__":
    main()
