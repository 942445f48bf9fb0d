"""The embedded engine on the bundled model: exact in float32, honestly different in bfloat16, prefixes included."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import forward_logps

from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models.load import BUNDLED, LoadedModel, load
from trimtab.types import Completion, Problem, Prompt, SamplingParams

pytestmark = pytest.mark.slow  # the bundled model, half a minute

TEXTS = ("Question: What is 31 + 48?\nAnswer:", "Once upon a time", "The three primary colors are")
SAMPLING = SamplingParams(max_tokens=24, ignore_stop=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(BUNDLED, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[Prompt]:
    return [Prompt(Problem(text, text, ""), text, np.array(loaded.tokenizer(text)["input_ids"])) for text in TEXTS]


def continued(loaded: LoadedModel, prompts: list[Prompt], dtype: torch.dtype) -> tuple[list[list[Completion]], Any]:
    """Responses that begin with 0, 5, 5 (the same) and 11 tokens of others, and their exact log-probs."""
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, dtype)
    source = engine.generate(prompts, 4, SAMPLING, seed=0)
    prefixes = [[g[0].truncated(0), g[1].truncated(5), g[1].truncated(5), g[3].truncated(11)] for g in source]
    before = engine.prefilled_tokens
    out = engine.generate(prompts, 4, SAMPLING, seed=1, prefixes=prefixes)
    assert engine.prefilled_tokens - before == sum(len(one.ids) for one in prompts) + 3 * (5 + 11)
    return out, forward_logps(loaded.model, prompts, out)


def test_float32_continuations_equal_a_full_forward(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    out, exact = continued(loaded, prompts, torch.float32)
    for completion, logp in zip(chain(*out), exact, strict=True):
        np.testing.assert_allclose(completion.logp_behavior, logp, atol=1e-4)
    for group in out:
        assert group[1].response_ids[:5].tolist() == group[2].response_ids[:5].tolist()
        assert len({tuple(completion.response_ids) for completion in group}) == 4


def test_bfloat16_continuations_differ_as_much_as_their_precision(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    out, exact = continued(loaded, prompts, torch.bfloat16)
    log_ratio = np.concatenate([logp - c.logp_behavior for c, logp in zip(chain(*out), exact, strict=True)])
    suffix = np.concatenate([np.arange(24) >= k for _ in prompts for k in (0, 5, 5, 11)])
    k3 = [np.mean(np.expm1(part) - part) for part in (log_ratio[suffix], log_ratio[~suffix])]
    assert all(1e-6 < value < 1e-2 for value in k3)
    assert abs(log_ratio.mean()) < 0.02  # noise, not a bias
