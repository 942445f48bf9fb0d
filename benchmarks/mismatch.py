"""How far the samplers of the laboratory's regimes are from the trainer, before any training.

    python benchmarks/mismatch.py [--models laboratory laboratory-moe] [--prompts 256] [--samples 8]

Each sampler draws responses at temperature 1 and reports its own log-probs; the trainer (float32) scores them. Printed
per token: k3, the largest |log pi - log mu|, Pearson's r, the effective sample size of pi/mu.

For a mixture of experts also the share of tokens (prompt tokens included) that the sampler sends to other experts than
the trainer in at least one layer, and k3 once the sampler is made to use the trainer's experts: what is left is not
routing. Both come from full forwards with the sampler's weights in the sampler's dtype.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab import tasks
from trimtab.models.load import BUNDLED, LABORATORY, MIXTURE, load
from trimtab.models.logprobs import TokenBatch, score
from trimtab.rollout.embedded import EmbeddedEngine
from trimtab.rollout.rounding import EXACT, Rounding, matrices
from trimtab.training.sft import laboratory_folder
from trimtab.types import Sampling

SAMPLERS: dict[str, tuple[str, Rounding]] = {
    "float32": ("float32", EXACT),
    "bfloat16": ("bfloat16", EXACT),
    "int8": ("float32", Rounding(bits=8)),
    "int4": ("float32", Rounding(bits=4)),
    "int3": ("float32", Rounding(bits=3)),
    "noise 0.02": ("float32", Rounding(noise=0.02)),
    "noise 0.05": ("float32", Rounding(noise=0.05)),
    "noise 0.1": ("float32", Rounding(noise=0.1)),
    "noise 0.2": ("float32", Rounding(noise=0.2)),
}


@dataclass
class Routes:
    """The experts of every token, one tensor a layer: recorded in one forward, imposed in another."""

    chosen: list[Tensor] = field(default_factory=list)

    @contextmanager
    def recorded(self, model: Any) -> Iterator[None]:
        with self._hooks(model, lambda _layer, out: self.chosen.append(out[2])):
            yield

    @contextmanager
    def imposed(self, model: Any) -> Iterator[None]:
        """The router's own probabilities, of the recorded experts."""

        def replace(layer: int, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            weights = out[0].softmax(-1, dtype=torch.float32).gather(-1, self.chosen[layer])
            return out[0], (weights / weights.sum(-1, keepdim=True)).to(out[1].dtype), self.chosen[layer]

        with self._hooks(model, replace):
            yield

    @contextmanager
    def _hooks(self, model: Any, look: Any) -> Iterator[None]:
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _gate, _given, out, i=i: look(i, out))
            for i, layer in enumerate(model.model.layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def elsewhere(self, other: Routes) -> float:
        """Share of tokens whose set of experts differs in at least one layer."""
        pairs = zip(self.chosen, other.chosen, strict=True)
        different = [(a.sort(-1).values != b.sort(-1).values).any(-1) for a, b in pairs]
        return float(torch.stack(different).any(0).double().mean())


@dataclass
class Sampled:
    """Responses of one sampler with its log-probs, as one micro-batch."""

    batch: TokenBatch
    logp: Tensor


def sample(engine: EmbeddedEngine, task: Any, tokenizer: Any, prompts: int, samples: int) -> Sampled:
    asked = [tasks.encode(task, problem, tokenizer) for problem in task.train[:prompts]]
    sampling = Sampling(max_tokens=min(task.max_tokens, 32), stop=task.stop)
    groups = engine.generate(asked, samples, sampling, seed=0)
    answers = [(index, answer) for index, group in enumerate(groups) for answer in group]
    batch = TokenBatch.pack(
        [one.ids for one in asked],
        [answer.response_ids for _, answer in answers],
        [index for index, _ in answers],
        pad_id=int(tokenizer.pad_token_id),
    )
    return Sampled(batch, torch.from_numpy(np.concatenate([answer.logp_behavior for _, answer in answers])))


@torch.inference_mode()
def log_probs(model: Any, batch: TokenBatch) -> Tensor:
    return score(model, batch).logp[batch.response_mask].double()


def figures(trainer: Tensor, sampler: Tensor) -> list[str]:
    log = trainer - sampler.double()
    ratio = log.exp()
    probabilities = torch.stack([trainer.exp(), sampler.double().exp()])
    return [
        f"{float((ratio - 1 - log).mean()):.1e}",
        f"{float(log.abs().max()):.2g}",
        f"{float(torch.corrcoef(probabilities)[0, 1]):.5f}",
        f"{float(ratio.mean().square() / ratio.square().mean()):.3f}",
    ]


def rounded_copy(model: Any, dtype: str, rounding: Rounding) -> Any:
    """The sampler's weights in the trainer's own architecture."""
    own = copy.deepcopy(model).to(getattr(torch, dtype))
    names = matrices(own) if rounding.active else ()
    with torch.no_grad():
        for name in names:
            weight = own.get_parameter(name)
            weight.copy_(rounding.apply(name, weight, 0))
    return own


def routing(model: Any, sampler: Any, batch: TokenBatch) -> list[str]:
    """Tokens sent elsewhere; k3 of the two full forwards, each with its own experts and with the trainer's."""
    here, there = Routes(), Routes()
    with here.recorded(model):
        trainer = log_probs(model, batch)
    with there.recorded(sampler):
        own = log_probs(sampler, batch)
    with here.imposed(sampler):
        replayed = log_probs(sampler, batch)
    return [f"{here.elsewhere(there):.2%}", *(figures(trainer, other)[0] for other in (own, replayed))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[LABORATORY, MIXTURE], help=f"{BUNDLED} also works")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    print("| model | sampler | k3 | max | r | ESS | sent elsewhere | k3, full forward | k3, same experts |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.models:
        laboratory = name in (LABORATORY, MIXTURE)
        loaded = load(str(laboratory_folder(name)) if laboratory else name, dtype=torch.float32)
        task = tasks.build("sort" if laboratory else "arithmetic")
        for label, (dtype, rounding) in SAMPLERS.items():
            engine = EmbeddedEngine(loaded.model, loaded.tokenizer, dtype, rounding=rounding)
            drawn = sample(engine, task, loaded.tokenizer, given.prompts, given.samples)
            row = figures(log_probs(loaded.model, drawn.batch), drawn.logp)
            if name == MIXTURE:
                row += routing(loaded.model, rounded_copy(loaded.model, dtype, rounding), drawn.batch)
            else:
                row += ["-"] * 3
            print(f"| {name} | {label} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
