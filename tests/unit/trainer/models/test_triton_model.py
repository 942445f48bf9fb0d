"""A whole model through interpreted kernels: the trainer computes the log-probs of the engine, which has a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.triton_support import INTERPRETED, REASON, tile_products  # noqa: F401
from torch import Tensor

from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models import invariant
from trimtab.trainer.models.load import load
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.types import Problem, Prompt, SamplingParams

if not INTERPRETED:
    pytest.skip(REASON, allow_module_level=True)

TEMPERATURE = 0.7
PROMPTS = [np.arange(5) % 14, np.arange(0, 60, 3) % 14]


@pytest.fixture(scope="module")
def laboratory() -> Any:
    loaded = load("laboratory", dtype=torch.bfloat16)
    invariant.make_invariant(loaded.model)
    return loaded


def sampled(loaded: Any) -> tuple[TokenBatch, Tensor]:
    """Three tokens to each prompt, twice, and the sampler's log-probs."""
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16)
    prompts = [Prompt(Problem(str(i), "", ""), "", ids) for i, ids in enumerate(PROMPTS)]
    contract = SamplingParams(max_tokens=3, temperature=TEMPERATURE, ignore_stop=True)
    result = [c for group in engine.generate(prompts, 2, contract, seed=0) for c in group]
    batch = TokenBatch.pack(PROMPTS, [c.response_ids for c in result], [0, 0, 1, 1], pad_id=0)
    return batch, torch.from_numpy(np.stack([c.logp_behavior for c in result]))


def test_the_trainer_finds_the_sampler_s_bits(laboratory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, behavior = sampled(laboratory)
    with torch.enable_grad():
        current = score(laboratory.model, batch, temperature=TEMPERATURE).logp
    assert torch.equal(current, behavior)
    one = TokenBatch.pack(PROMPTS[1:], [batch.response_ids[3].numpy()], [0], pad_id=0)
    assert torch.equal(score(laboratory.model, one, temperature=TEMPERATURE).logp[0], behavior[3])

    current.sum().backward()
    result = {name: p.grad.float() for name, p in laboratory.model.named_parameters()}
    laboratory.model.zero_grad(set_to_none=True)
    native = load("laboratory", dtype=torch.bfloat16).model
    score(native, batch, temperature=TEMPERATURE).logp.sum().backward()
    for name, parameter in native.named_parameters():
        gap = (result[name] - parameter.grad.float()).norm() / parameter.grad.float().norm()
        assert gap < 0.05, f"{name}: {gap}"

    monkeypatch.delenv("TRITON_INTERPRET")  # the trainer without the kernels
    with torch.no_grad():
        fault = score(laboratory.model, batch, temperature=TEMPERATURE).logp
    torch.testing.assert_close(fault, current.detach(), rtol=0, atol=0.1)
    assert not torch.equal(fault, behavior)
