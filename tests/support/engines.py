"""Tiny models and tokenizers the rollout tests share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trimtab.types import Completion, Problem, Prompt, SamplingParams

PIECES = ["?", "<eos>", "\n", "a", "b", "c", "ab", "x\ny", "\n\n", " end", "é", *[f"w{i} " for i in range(86)]]
EOS = 1
SIZE = len(PIECES)

COMMON: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # sharp, uneven distributions: a wrong attention is far off
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama3-rope": lambda: LlamaConfig(
        **COMMON,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]
    ),
    "mistral": lambda: MistralConfig(**COMMON, head_dim=8, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**COMMON, head_dim=8, sliding_window=12),
    "gpt2": lambda: GPT2Config(
        vocab_size=SIZE,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        bos_token_id=EOS,
        eos_token_id=EOS,
    ),
}


def tiny(name: str = "llama", seed: int = 0) -> Any:
    """A model that the test may change."""
    return copy.deepcopy(_built(name, seed))


@functools.cache
def _built(name: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
        for key, value in model.named_parameters():
            if "bias" in key or "norm" in key:  # so that leaving one out changes results
                value.data += 0.2 * torch.randn_like(value)
    return model


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="?"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="?")


class After:
    """An interruption that is set after `checks` checks: at the same place of the work every time.

    `then` is called by the first check that finds it set.
    """

    def __init__(self, checks: int, then: Callable[[], None] = lambda: None) -> None:
        self.left, self.then = checks, then

    def is_set(self) -> bool:
        self.left -= 1
        if self.left == -1:
            self.then()
        return self.left < 0


def interrupted(generate: Callable[[After], list[list[Completion]]]) -> list[list[Completion]]:
    """The result of `generate`, interrupted once some response has begun (later in another process)."""
    for checks in range(200):
        groups = generate(After(checks))
        assert any(one.finish_reason == "abort" for group in groups for one in group), "it was over before it had begun"
        if any(len(one.response_ids) for group in groups for one in group):
            return groups
    raise AssertionError("interrupted 200 times, none had begun")


def prompt(ids: Sequence[int], name: str = "p") -> Prompt:
    return Prompt(Problem(name, "", ""), "", np.array(ids, dtype=np.int64))


def prompts(lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [prompt(rng.integers(2, SIZE, size=n).tolist(), f"p{i}") for i, n in enumerate(lengths)]


@torch.no_grad()
def processed(model: Any, request: Prompt, completion: Completion, sampling: SamplingParams) -> torch.Tensor:
    """Log-probs of the sampled distribution at every response position, (tokens, vocabulary), by one full forward."""
    ids = torch.tensor(np.concatenate([request.ids, completion.response_ids]))[None]
    scores = model(ids).logits[0, len(request.ids) - 1 : -1].double() / sampling.temperature
    if completion.sampling_mask is not None:
        outside = torch.ones_like(scores, dtype=torch.bool)
        for t, kept in enumerate(completion.sampling_mask):
            outside[t, torch.from_numpy(kept)] = False
        scores = scores.masked_fill(outside, float("-inf"))
    return scores.log_softmax(-1)


def tokens(completions: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.response_ids.tolist() for completion in group] for group in completions]


def assert_same(actual: list[list[Completion]], expected: list[list[Completion]], *, atol: float | None = None) -> None:
    """The responses are equal: to the bit, or with log-probs and entropies within `atol`."""
    assert [len(group) for group in actual] == [len(group) for group in expected]
    for one, other in zip(chain(*actual), chain(*expected), strict=True):
        assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
        for name in ("response_ids", "policy_version", "sampled", "logp_behavior", "entropy"):
            a, b = getattr(one, name), getattr(other, name)
            if a is None or b is None:
                assert a is b, name
                continue
            assert a.dtype == b.dtype
            if atol is None or a.dtype != np.float32:
                assert a.tobytes() == b.tobytes(), name
            else:
                np.testing.assert_allclose(a, b, atol=atol)
        assert (one.sampling_mask is None) == (other.sampling_mask is None)
        for a, b in zip(one.sampling_mask or (), other.sampling_mask or (), strict=True):
            assert a.tolist() == b.tolist()


@torch.no_grad()
def forward_logps(model: Any, asked: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> list[np.ndarray]:
    """The log-probs of each response under one plain forward pass of the model over prompt and response."""
    found = []
    for prompt, group in zip(asked, groups, strict=True):
        for one in group:
            ids = torch.from_numpy(np.concatenate([prompt.ids, one.response_ids]))[None]
            logps = model(ids).logits[0, :-1].double().log_softmax(-1)
            found.append(logps.gather(1, ids[0, 1:, None])[len(prompt.ids) - 1 :, 0].numpy())
    return found
