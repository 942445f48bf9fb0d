"""The embedded engine on the bundled model: exact in float32, honestly different in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models.load import BUNDLED, load
from trimtab.types import Problem, Prompt, SamplingParams

pytestmark = pytest.mark.slow

SHOTS = "Question: What is 12 + 35?\nAnswer: 47\n\nQuestion: What is 81 + 11?\nAnswer: 92\n\n"


@pytest.fixture(scope="module")
def loaded():
    return load(BUNDLED, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(loaded) -> list[Prompt]:
    texts = [SHOTS + f"Question: What is {a} + {b}?\nAnswer:" for a, b in [(31, 48), (7, 5), (90, 9)]]
    texts += ["Once upon a time", SHOTS * 3 + "Question: What is 4 + 4?\nAnswer:"]
    return [
        Prompt(Problem(f"p{i}", text, ""), text, np.array(loaded.tokenizer(text)["input_ids"]))
        for i, text in enumerate(texts)
    ]


def exact_logp(model, prompt: Prompt, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor(np.concatenate([prompt.ids, ids]))[None]).logits[0, len(prompt.ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(ids)[:, None])[:, 0].numpy()


def test_float32_log_probs_equal_a_full_forward(loaded, prompts) -> None:
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.float32)
    out = engine.generate(prompts, 3, SamplingParams(max_tokens=24, stop=("\n",)), seed=0)
    lengths = set()
    for prompt, group in zip(prompts, out, strict=True):
        for completion in group:
            exact = exact_logp(loaded.model, prompt, completion.response_ids)
            np.testing.assert_allclose(completion.logp_behavior, exact, atol=1e-4)
            assert (completion.finish_reason == "stop") == (
                len(completion.response_ids) < 24 or completion.text.count("\n")
            )
            assert "\n" not in completion.text
            lengths.add(len(completion.response_ids))
    assert len(lengths) > 3


def test_bfloat16_differs_from_the_trainer_as_much_as_its_precision(loaded, prompts) -> None:
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.bfloat16)
    out = engine.generate(prompts, 3, SamplingParams(max_tokens=24), seed=0)
    log_ratio = np.concatenate(
        [
            exact_logp(loaded.model, prompt, completion.response_ids) - completion.logp_behavior
            for prompt, group in zip(prompts, out, strict=True)
            for completion in group
        ]
    )
    k3 = np.mean(np.expm1(log_ratio) - log_ratio)
    assert 1e-4 < k3 < 1e-2
    assert abs(log_ratio.mean()) < 0.02  # noise, not a bias


def test_published_weights_are_the_ones_that_sample(loaded, prompts) -> None:
    """A fixed probe scored by trainer and engine after publication: the check every weight transfer needs."""
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, torch.float32)
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: p.detach() + 0.02 * p.detach().std() * torch.randn(p.shape, generator=generator)
        for name, p in loaded.model.named_parameters()
    }
    engine.update_weights(noisy.items(), version=3)
    original = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    [group] = engine.generate(prompts[:1], 4, SamplingParams(max_tokens=16, ignore_stop=True), seed=0)
    before = [exact_logp(loaded.model, prompts[0], c.response_ids) for c in group]
    try:
        loaded.model.load_state_dict(noisy, strict=False)
        for completion, old in zip(group, before, strict=True):
            exact = exact_logp(loaded.model, prompts[0], completion.response_ids)
            np.testing.assert_allclose(completion.logp_behavior, exact, atol=1e-4)
            assert np.abs(completion.logp_behavior - old).max() > 1e-2
            assert set(completion.policy_version.tolist()) == {3}
    finally:
        loaded.model.load_state_dict(original, strict=False)
