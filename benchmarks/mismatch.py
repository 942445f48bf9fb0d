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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from routing import elsewhere
from trimtab.corrections.divergences import k3
from trimtab.trainer import tasks
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import NO_QUANTIZATION, WeightQuantization, matrices
from trimtab.trainer.models.laboratory import NAMES
from trimtab.trainer.models.load import BUNDLED, LABORATORY, MIXTURE, load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.models.routing import router_info
from trimtab.trainer.sft import laboratory_folder
from trimtab.types import SamplingParams

SAMPLERS: dict[str, tuple[str, WeightQuantization]] = {
    "float32": ("float32", NO_QUANTIZATION),
    "bfloat16": ("bfloat16", NO_QUANTIZATION),
    "int8": ("float32", WeightQuantization(bits=8)),
    "int4": ("float32", WeightQuantization(bits=4)),
    "int3": ("float32", WeightQuantization(bits=3)),
    "noise 0.02": ("float32", WeightQuantization(noise=0.02)),
    "noise 0.05": ("float32", WeightQuantization(noise=0.05)),
    "noise 0.1": ("float32", WeightQuantization(noise=0.1)),
    "noise 0.2": ("float32", WeightQuantization(noise=0.2)),
}


@dataclass
class Sampled:
    """Responses of one sampler with its log-probs, as one micro-batch."""

    batch: TokenBatch
    logp: Tensor


def sample(engine: EmbeddedEngine, task: Any, tokenizer: Any, prompts: int, samples: int) -> Sampled:
    asked = [tasks.encode(task, problem, tokenizer) for problem in task.train[:prompts]]
    sampling = SamplingParams(max_tokens=min(task.max_tokens, 32), stop=task.stop)
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
        f"{float(k3(log).mean()):.1e}",
        f"{float(log.abs().max()):.2g}",
        f"{float(torch.corrcoef(probabilities)[0, 1]):.5f}",
        f"{float(ratio.mean().square() / ratio.square().mean()):.3f}",
    ]


def rounded_copy(model: Any, dtype: str, rounding: WeightQuantization) -> Any:
    """The sampler's weights in the trainer's own architecture."""
    own = copy.deepcopy(model).to(getattr(torch, dtype))
    names = matrices(own) if rounding.active else ()
    with torch.no_grad():
        for name in names:
            weight = own.get_parameter(name)
            weight.copy_(rounding.apply(name, weight, 0))
    return own


@torch.inference_mode()
def routing(model: Any, sampler: Any, batch: TokenBatch) -> list[str]:
    """Tokens sent elsewhere; k3 of the two full forwards, each with its own experts and with the trainer's."""
    here, there = score(model, batch, record=True), score(sampler, batch, record=True)
    imposed = score(sampler, batch, routes=here.routes)
    assert here.routes is not None
    assert there.routes is not None
    real = batch.response_mask
    k3 = [figures(here.logp[real].double(), other.logp[real].double())[0] for other in (there, imposed)]
    return [f"{elsewhere(here.routes, there.routes):.2%}", *k3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[LABORATORY, MIXTURE], help=f"{BUNDLED} also works")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    print("| model | sampler | k3 | max | r | ESS | sent elsewhere | k3, full forward | k3, same experts |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.models:
        laboratory = name in NAMES
        loaded = load(str(laboratory_folder(name)) if laboratory else name, dtype=torch.float32)
        task = tasks.build("sort" if laboratory else "arithmetic")
        for label, (dtype, rounding) in SAMPLERS.items():
            engine = EmbeddedEngine(loaded.model, loaded.tokenizer, dtype, quantization=rounding)
            drawn = sample(engine, task, loaded.tokenizer, given.prompts, given.samples)
            row = figures(log_probs(loaded.model, drawn.batch), drawn.logp)
            if router_info(loaded.model).layers:
                row += routing(loaded.model, rounded_copy(loaded.model, dtype, rounding), drawn.batch)
            else:
                row += ["-"] * 3
            print(f"| {name} | {label} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
