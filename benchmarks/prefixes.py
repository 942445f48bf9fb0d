"""What prefixes by a historical policy cost: tokens and seconds per step against on-policy sampling (SOUP).

    python benchmarks/prefixes.py [--cases laboratory quickstart long] [--rounds 5] [--ratio 0.3]

Variants, all trained with the same objective: on-policy; only the prefix sampled, every response with its own (share
1) or 2, 4 responses of a group continuing the same one; and the paper's way, whole historical responses cut. They share
one model and one sampler, take turns step by step, and keep the weights (the learning rate is next to nothing), so that
all do the same work. A round is one cycle of `refresh` steps of each; the refill counts in the step that does it.

Tokens are what the sampler ran through the model, decoded + prefilled, in all rounds, relative to on-policy. `expected`
is that ratio from mean lengths alone, if no two prefixes were equal and none ended early. With prompts of Q tokens, S
samples, responses of L, prefixes of k shared by m, a row of an on-policy step takes

    Q/S + L - 1

(the first token comes from the prompt's own logits), and a row of any other step of a cycle

    2 Q/S + (k - 1)/m + k/m + (L - k - 1)

for the prompt under both policies, the prefix written and run again, and the suffix; the paper's way has L - 1 + k in
place of the two prefix terms. A prefix of one's own is paid twice, written by one policy and run by the other, so share
1 cannot come below about 1 + ratio x (refresh - 1) / refresh unless prefixes happen to be equal (these are run once).
Sharing by two pays it once. The prompt is paid twice in any case: short answers to long prompts never meet the target.

Seconds are medians over rounds of the mean step of a cycle; the ratio is that of the medians, its interval (95 %) from
2000 bootstrap resamples of the rounds. The target is at most 1.05 times the tokens at ratio 0.3; the paper paid 1.27
times the seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared import median_interval, options_of
from trimtab.runs.directory import RunDirectory
from trimtab.trainer.build_model import build_model
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.loop import Trainer
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.collector import Collector
from trimtab.trainer.rollout.prefixes import PrefixedSampler
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.rollout.source import SyncSource
from trimtab.trainer.run import build_parts, build_trainer

TARGET = 1.05
BASE = "on-policy"
VARIANTS: dict[str, list[str]] = {
    BASE: ["prefix.refresh=1"],
    "prefix, share 1": ["prefix.share=1"],
    "prefix, share 2": ["prefix.share=2"],
    "prefix, share 4": ["prefix.share=4"],
    "whole (the paper)": ["prefix.whole=true"],
}
CASES: dict[str, tuple[str, list[str]]] = {
    "laboratory": ("laboratory", []),
    "quickstart": ("quickstart", []),
    "long": ("quickstart", ["trainer.prompts=4", "sampling.max_tokens=64"]),
}
FORCED = ("long",)  # stops are ignored: every response has the full length
KEYS = ("time/step", "time/collect", "tokens/decoded", "tokens/prefilled")


class Turns(NullObserver):
    """Gives every step to the next variant, and keeps what each one cost."""

    def __init__(self, refresh: int) -> None:
        self.refresh = refresh
        self.trainer: Trainer | None = None
        self.feeds: dict[str, SyncSource] = {}
        self.seen: dict[str, list[Mapping[str, Any]]] = {name: [] for name in VARIANTS}
        self._turn = 0

    def phase(self, name: str, done: int, total: int) -> None:
        del done, total
        if name == "collect":
            assert self.trainer is not None
            self.trainer.source = self.feeds[self._name]

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.seen[self._name].append({key: metrics[key] for key in (*KEYS, "length/mean")})
        self._turn += 1
        done, left = divmod(self._turn, len(VARIANTS) * self.refresh)
        if not left:
            print(f"  {done} cycles of all variants done (the first warms up)", flush=True)

    @property
    def _name(self) -> str:
        return list(VARIANTS)[self._turn % len(VARIANTS)]

    def cycles(self, name: str, *keys: str) -> np.ndarray:
        """Sum of the metrics `keys`, a step's mean over each cycle but the first, (rounds,)."""
        values = np.array([sum(step[key] for key in keys) for step in self.seen[name]])
        return values.reshape(-1, self.refresh)[1:].mean(-1)


def recipe(case: str, variant: str, options: argparse.Namespace, steps: int) -> Config:
    base, overrides = CASES[case]
    return load_config(
        base,
        [
            "objective.name=soup",
            "prefix.rule=length",
            f"prefix.ratio={options.ratio}",
            f"prefix.refresh={options.refresh}",
            "optim.lr=1e-12",
            f"trainer.steps={steps}",
            "eval.problems=1",
            f"eval.every={steps}",
            f"checkpoint.every={steps}",
            "log.trajectories_every=0",
            *overrides,
            *VARIANTS[variant],
        ],
    )


def run(case: str, options: argparse.Namespace) -> tuple[Turns, float]:
    """All variants in turn; the second value is the mean number of prompt tokens."""
    steps = len(VARIANTS) * options.refresh * (options.rounds + 1)
    config, turns = recipe(case, BASE, options, steps), Turns(options.refresh)
    parts, loaded = build_parts(config), build_model(config)
    with tempfile.TemporaryDirectory() as folder, RunDirectory.create(Path(folder) / "run", config.dump()) as directory:
        trainer = turns.trainer = build_trainer(config, parts, loaded, directory, turns)
        sampling = replace(trainer.source.collector.sampling, ignore_stop=case in FORCED)
        for name in VARIANTS:
            own = recipe(case, name, options, steps)
            assert own.prefix is not None
            responses = PrefixedSampler(own, PromptStream(parts.task, loaded.tokenizer, own.seed), sampling)
            collector = Collector(own, responses, parts.scorer)
            turns.feeds[name] = SyncSource(collector, Buffer(own.trainer), trainer.source.engine)  # pyright: ignore[reportAttributeAccessIssue]
        trainer.train()
        parts.scorer.close()
    asked = PromptStream(parts.task, loaded.tokenizer, config.seed).at(0, 64)
    return turns, float(np.mean([len(prompt.ids) for prompt in asked]))


def expected(config: Config, prompt: float, length: float) -> float:
    """The formula of the module's docstring, relative to on-policy, over a cycle."""
    assert config.prefix is not None
    prefix, samples = config.prefix, config.trainer.samples
    k, m, alone = prefix.ratio * length, prefix.share, prompt / samples + length - 1
    history = length - 1 + k if prefix.whole else (2 * k - 1) / m
    mixed = 2 * prompt / samples + history + length - k - 1
    return (alone + (prefix.refresh - 1) * mixed) / (prefix.refresh * alone)


def report(case: str, turns: Turns, prompt: float, options: argparse.Namespace) -> None:
    config = recipe(case, BASE, options, 1)
    length = float(np.mean([step["length/mean"] for step in turns.seen[BASE]]))
    print(
        f"{case}: {config.trainer.prompts} prompts of {prompt:.1f} tokens, {config.trainer.samples} samples of "
        f"{length:.1f} tokens, ratio {options.ratio}, refresh {options.refresh}, {options.rounds} rounds"
    )
    print(f"  {'':18} {'decoded':>8} {'prefilled':>9} {'tokens':>7} {'expected':>8}   sampling s         step s")
    alone = turns.cycles(BASE, "tokens/decoded", "tokens/prefilled").sum()
    for name in VARIANTS:
        decoded, prefilled = (turns.cycles(name, key).mean() for key in ("tokens/decoded", "tokens/prefilled"))
        tokens = turns.cycles(name, "tokens/decoded", "tokens/prefilled").sum() / alone
        formula = expected(recipe(case, name, options, 1), prompt, length)
        line = f"  {name:18} {decoded:8.0f} {prefilled:9.0f} {tokens:6.3f}x {formula:7.3f}x"
        for key in ("time/collect", "time/step"):
            ours, theirs = turns.cycles(name, key), turns.cycles(BASE, key)
            low, high = median_interval(ours, theirs)
            ratio = np.median(ours) / np.median(theirs)
            line += f"   {np.median(ours):.3f} ({ratio:.2f}x, {low:.2f} .. {high:.2f})"
        print(line + (f"   tokens <= {TARGET}" if tokens <= TARGET else ""))
    print(f"  {torch.get_num_threads()} threads", flush=True)


def main() -> None:
    parser = options_of(__doc__, rounds=5, ratio=0.3, refresh=8)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    for case in options.cases:
        turns, prompt = run(case, options)
        report(case, turns, prompt, options)


if __name__ == "__main__":
    main()
