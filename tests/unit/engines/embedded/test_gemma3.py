"""Gemma 3 has sliding windows with rotary angles of their own; the engine must sample from the trained model."""

from __future__ import annotations

import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from trimtab.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.models.laboratory import build
from trimtab.types import Problem, Prompt, SamplingParams

_, TOKENIZER = build(0)


@torch.no_grad()
def test_log_probs_are_those_of_the_model_beyond_its_window() -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        sliding_window_pattern=2,
        query_pre_attn_scalar=8,
        initializer_range=0.4,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
    )
    model = Gemma3ForCausalLM(config).eval()
    prompts = [Prompt(Problem(str(i), "", ""), "", np.arange(1, 4 + 6 * i) % 10) for i in range(3)]
    sampling = SamplingParams(max_tokens=12, ignore_stop=True)
    answers = EmbeddedEngine(model, TOKENIZER, torch.float32).generate(prompts, 2, sampling, seed=0)
    gaps, unwindowed = [], []
    for window, found in ((6, gaps), (64, unwindowed)):
        config.sliding_window = window
        plain = Gemma3ForCausalLM(config).eval()
        plain.load_state_dict(model.state_dict())
        for prompt, row in zip(prompts, answers, strict=True):
            for answer in row:
                ids = torch.from_numpy(np.concatenate([prompt.ids, answer.response_ids]))[None]
                logp = plain(ids).logits.log_softmax(-1)[0, len(prompt.ids) - 1 : -1]
                chosen = logp.gather(1, torch.from_numpy(answer.response_ids)[:, None])[:, 0]
                found.append(float((chosen - torch.from_numpy(answer.logp_behavior)).abs().max()))
    assert max(gaps) < 1e-4
    assert max(unwindowed) > 1e-2  # the window matters in this model: the comparison above can fail
