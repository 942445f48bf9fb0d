"""What only Gemma has: capped attention scores, which SDPA would omit, and windows with separate rotary angles."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models.laboratory import build
from trimtab.types import Completion, Problem, Prompt, SamplingParams

_, TOKENIZER = build(0)
PROMPTS = [Prompt(Problem(str(i), "", ""), "", np.arange(1, 4 + 6 * i) % 10) for i in range(3)]
SIZE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "pad_token_id": TOKENIZER.pad_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
    "bos_token_id": None,
}


def sampled(model: Any) -> list[list[Completion]]:
    engine = EmbeddedEngine(model, TOKENIZER, torch.float32)
    return engine.generate(PROMPTS, 2, SamplingParams(max_tokens=12, ignore_stop=True), seed=0)


@torch.no_grad()
def largest_gap(model: Any, answers: list[list[Completion]]) -> float:
    """Between the log-probs of the answers and those of one forward pass of the model for each."""
    gaps = []
    for prompt, row in zip(PROMPTS, answers, strict=True):
        for answer in row:
            ids = torch.from_numpy(np.concatenate([prompt.ids, answer.response_ids]))[None]
            logp = model(ids).logits.log_softmax(-1)[0, len(prompt.ids) - 1 : -1]
            chosen = logp.gather(1, torch.from_numpy(answer.response_ids)[:, None])[:, 0]
            gaps.append(float((chosen - torch.from_numpy(answer.logp_behavior)).abs().max()))
    return max(gaps)


def test_log_probs_are_those_of_the_capped_model() -> None:
    torch.manual_seed(0)
    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0}
    model = Gemma2ForCausalLM(Gemma2Config(**SIZE, **caps, num_hidden_layers=2, sliding_window=8)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)  # scores large enough for the cap to bite
    answers = sampled(model)
    model.set_attn_implementation("eager")
    assert largest_gap(model, answers) < 1e-4
    model.set_attn_implementation("sdpa")
    assert largest_gap(model, answers) > 1e-2  # the cap matters in this model: the comparison above can fail


def test_log_probs_are_those_of_the_model_beyond_its_window() -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SIZE, num_hidden_layers=4, sliding_window=6, sliding_window_pattern=2, initializer_range=0.4
    )
    model = Gemma3ForCausalLM(config).eval()
    answers = sampled(model)
    assert largest_gap(model, answers) < 1e-4
    config.sliding_window = 64
    unwindowed = Gemma3ForCausalLM(config).eval()
    unwindowed.load_state_dict(model.state_dict())
    assert largest_gap(unwindowed, answers) > 1e-2  # the window matters in this model
