"""How far a healthy vLLM engine leans: the canary's two numbers over a long walk of real updates, nothing planted.

    .venv-vllm/bin/python benchmarks/canary.py [--looks 100] [--lr 1e-5] [--seed 0]

SmolLM2 in float32 under bfloat16 autocast, vLLM in bfloat16. Between two looks the whole model makes an AdamW step on
the log-probs of a few sampled responses with random advantages, as a run without any signal would. An alarm ends the
walk, and would be a false one. Target: none; the pull (units of the first look's noise) stays well below the limit.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from generation import make_prompts
from shared import options_of
from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine
from trimtab.trainer.models.load import load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.models.sharding import named_weights
from trimtab.trainer.rollout.canary import UNMOVED_SIGMAS, Canary
from trimtab.types import Prompt, SamplingParams


def main() -> None:
    options = options_of(__doc__, looks=100, lr=1e-5, seed=0).parse_args()
    config = load_config("quickstart-vllm")
    model, tokenizer = load(config.model.path, dtype=torch.float32)
    canary = Canary.build(config, tokenizer, model)
    assert canary is not None
    with tempfile.TemporaryDirectory() as folder:
        save_model_files(model, tokenizer, Path(folder))
        engine = VllmEngine(folder, tokenizer, config.engine)
        pulls = walk(canary, engine, model, make_prompts(tokenizer, 4), options)
        engine.close()
    high, low = max(pulls), min(pulls)
    print(
        f"{len(pulls)} looks without an alarm; pull {low:.1f} to {high:.1f}, 99% below {np.quantile(pulls, 0.99):.1f} "
        f"(limit {UNMOVED_SIGMAS:g}), standard deviation {np.std(pulls):.1f}"
    )


def walk(
    canary: Canary, engine: VllmEngine, model: torch.nn.Module, prompts: list[Prompt], options: argparse.Namespace
) -> list[float]:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=options.lr, betas=(0.9, 0.95))
    rng, pulls = np.random.default_rng(options.seed), []
    for version in range(options.looks):
        engine.update_weights(named_weights(model), version)
        expected = canary.predict(model, version)
        assert expected is not None
        difference = canary.check(engine, expected)
        if (pull := canary.metrics().get("canary/pull")) is not None:
            pulls.append(pull)
            print(f"look {version}: difference {difference:.4f}, pull {pull:.1f}", flush=True)
        for prompt in prompts:
            [group] = engine.generate([prompt], 2, SamplingParams(max_tokens=16, ignore_stop=True), seed=options.seed)
            batch = TokenBatch.pack([prompt.ids], [one.response_ids for one in group], [0] * len(group), pad_id=0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logp = score(model, batch).logp
            (logp * torch.from_numpy(rng.normal(size=(len(group), 1)))).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return pulls


if __name__ == "__main__":
    main()
