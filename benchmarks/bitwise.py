"""How far sampler and trainer are apart, token for token, over a training run of mixed batches.

    .venv/bin/python benchmarks/bitwise.py [--tokens 100000] [--native 10000] [--threads 2] [--seed 0]

Every round samples a batch of its own kind (1 to 12 prompts of 3 to 300 tokens, 1 to 8 responses each, of forced
lengths between 1 and 512, at temperature 0.7 or 1) in bfloat16, scores it as the trainer does (packed micro-batches,
with gradient, float32 weights under bfloat16 autocast), makes an AdamW update of the whole model with advantages drawn
at random, and publishes the new weights. Prints the largest |log mu - log pi_old| and the k3 of all tokens, for
`numerics = "invariant"` (target: both exactly 0) and, on fewer tokens, for native numerics (which must not be 0).
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from shared import options_of
from trimtab.diagnosis.tokens import k3
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models import invariant
from trimtab.trainer.models.load import BUNDLED, load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.types import Completion, Problem, Prompt, SamplingParams

BUDGET = 2048  # tokens of a micro-batch


@dataclass
class Tally:
    tokens: int = 0
    unequal: int = 0
    worst: float = 0.0
    k3: float = 0.0  # sum over tokens
    shortest: int = 1 << 30
    longest: int = 0

    def add(self, logp: np.ndarray, behavior: np.ndarray) -> None:
        ratio = logp.astype(np.float64) - behavior
        self.tokens += len(ratio)
        self.unequal += int((logp != behavior).sum())
        self.worst = max(self.worst, float(np.abs(ratio).max()))
        self.k3 += float(k3(ratio).sum())
        self.shortest, self.longest = min(self.shortest, len(ratio)), max(self.longest, len(ratio))


def main() -> None:
    parser = options_of(__doc__, model=BUNDLED, tokens=100_000, native=10_000, threads=2, seed=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for numerics, tokens in (("native", options.native), ("invariant", options.tokens)):
        start = time.perf_counter()
        tally, rounds = walk(options.model, numerics, tokens, options.seed)
        print(
            f"{numerics}: {tally.tokens} tokens in {rounds} updates, responses of {tally.shortest} to {tally.longest}; "
            f"{tally.unequal} unequal, max |log mu - log pi_old| {tally.worst:.3g}, k3 {tally.k3 / tally.tokens:.3g} "
            f"({time.perf_counter() - start:.0f} s)"
        )


def walk(path: str, numerics: str, tokens: int, seed: int) -> tuple[Tally, int]:
    model, tokenizer = load(path, dtype=torch.float32)
    if numerics == "invariant":
        invariant.make_invariant(model)
    engine = EmbeddedEngine(model, tokenizer, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-6)
    tally, rounds, rng = Tally(), 0, np.random.default_rng(seed)
    while tally.tokens < tokens:
        prompts, samples, sampling = kind(rng, model.config.vocab_size)
        groups = engine.generate(prompts, samples, sampling, seed=rounds)
        for prompt, group in zip(prompts, groups, strict=True):
            # Of a group each response has a length of its own.
            cut = [clipped(one, int(rng.integers(1, len(one.response_ids) + 1))) for one in group[1:]]
            train(model, prompt, [group[0], *cut], sampling.temperature, rng, tally)
        optimizer.step()
        optimizer.zero_grad()
        rounds += 1
        print(f"{numerics}: {tally.tokens} tokens, {tally.unequal} unequal", file=sys.stderr, flush=True)
        engine.update_weights(model.named_parameters(), rounds)
    return tally, rounds


def kind(rng: np.random.Generator, vocabulary: int) -> tuple[list[Prompt], int, SamplingParams]:
    longest = int(np.exp(rng.uniform(0, np.log(512))).round())
    lengths = rng.integers(3, 300, size=int(rng.integers(1, 13)))
    prompts = [Prompt(Problem(str(i), "", ""), "", rng.integers(3, vocabulary, size=n)) for i, n in enumerate(lengths)]
    temperature = float(rng.choice([0.7, 1.0]))
    return prompts, int(rng.integers(1, 9)), SamplingParams(temperature, max_tokens=longest, ignore_stop=True)


def clipped(one: Completion, length: int) -> Completion:
    """Its first tokens: what follows a token cannot have changed it."""
    versions = one.policy_version[:length]
    return Completion(one.response_ids[:length], one.logp_behavior[:length], versions, "length", "")


def train(
    model: torch.nn.Module,
    prompt: Prompt,
    group: list[Completion],
    temperature: float,
    rng: np.random.Generator,
    tally: Tally,
) -> None:
    most = max(1, BUDGET // (len(prompt.ids) + max(len(one.response_ids) for one in group)))
    for start in range(0, len(group), most):
        part = group[start : start + most]
        batch = TokenBatch.pack([prompt.ids], [one.response_ids for one in part], [0] * len(part), pad_id=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logp = score(model, batch, temperature=temperature).logp
        (logp * torch.from_numpy(rng.normal(size=(len(part), 1)))).sum().backward()
        for row, one in zip(logp, part, strict=True):
            tally.add(row[: len(one.response_ids)].detach().numpy(), one.logp_behavior)


if __name__ == "__main__":
    main()
