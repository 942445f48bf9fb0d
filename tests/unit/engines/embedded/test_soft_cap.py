"""Gemma 2 caps its attention scores, which SDPA cannot do: the engine must sample from the model that was trained."""

from __future__ import annotations

import numpy as np
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from trimtab.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.models.laboratory import build
from trimtab.types import Problem, Prompt, SamplingParams

_, TOKENIZER = build(0)


def gemma2() -> Gemma2ForCausalLM:
    config = Gemma2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=8,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)  # scores large enough for the cap to bite
    return model


@torch.no_grad()
def test_log_probs_are_those_of_the_capped_model() -> None:
    model = gemma2()
    prompts = [Prompt(Problem(str(i), "", ""), "", np.arange(1, 4 + 3 * i) % 10) for i in range(2)]
    sampling = SamplingParams(max_tokens=12, ignore_stop=True)
    answers = EmbeddedEngine(model, TOKENIZER, torch.float32).generate(prompts, 2, sampling, seed=0)
    differences = {}
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        gaps = []
        for prompt, row in zip(prompts, answers, strict=True):
            for answer in row:
                ids = torch.from_numpy(np.concatenate([prompt.ids, answer.response_ids]))[None]
                logp = model(ids).logits.log_softmax(-1)[0, len(prompt.ids) - 1 : -1]
                chosen = logp.gather(1, torch.from_numpy(answer.response_ids)[:, None])[:, 0]
                gaps.append(float((chosen - torch.from_numpy(answer.logp_behavior)).abs().max()))
        differences[attention] = max(gaps)
    assert differences["eager"] < 1e-4
    assert differences["sdpa"] > 1e-2  # the cap matters in this model: the comparison above can fail
