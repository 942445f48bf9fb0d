"""Validation of generate requests, shared by all engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.types import Prompt, Sampling

# vLLM raises lower temperatures to the first, and so would sample another distribution than it was asked for, and
# refuses any above the second.
VLLM_COLDEST, VLLM_HOTTEST = 0.01, 2.0


def validate_request(
    prompts: Sequence[Prompt], samples: int, sampling: Sampling, seed: int, *, vocabulary: int, context: int | None
) -> None:
    """Refuse what cannot be sampled, before anything is.

    Raises:
        TrimtabError: a number out of range; "raw" log-probs; a prompt that is empty, holds ids outside the vocabulary,
            or does not fit the context with `max_tokens`.
    """
    if samples < 1 or sampling.max_tokens < 1:
        raise TrimtabError(f"samples = {samples}, max_tokens = {sampling.max_tokens}: both must be at least 1")
    if seed < 0:
        raise TrimtabError(f"seed = {seed}: it must not be negative")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        values = f"temperature = {sampling.temperature}, top_p = {sampling.top_p}, top_k = {sampling.top_k}"
        raise TrimtabError(f"{values}: need temperature >= 0, 0 < top_p <= 1, top_k >= 0")
    if sampling.logprobs != "processed":
        raise TrimtabError('this engine returns "processed" log-probs only: those of the distribution it samples from')
    for prompt in prompts:
        length = len(prompt.ids)
        if length == 0:
            raise TrimtabError(f"prompt {prompt.problem.id!r} has no tokens; there is nothing to continue")
        if np.min(prompt.ids) < 0 or np.max(prompt.ids) >= vocabulary:
            raise TrimtabError(
                f"prompt {prompt.problem.id!r} has token ids outside the model's vocabulary of {vocabulary}; "
                "encode it with the model's own tokenizer"
            )
        if context is not None and length + sampling.max_tokens > context:
            raise TrimtabError(
                f"prompt {prompt.problem.id!r} has {length} tokens and max_tokens is {sampling.max_tokens}, "
                f"but the model's context holds {context}; shorten the prompt or lower max_tokens"
            )


def check_vllm_temperature(sampling: Sampling) -> None:
    """Refuse a temperature at which vLLM, in this process or a server, would not sample."""
    if 0 < sampling.temperature < VLLM_COLDEST or sampling.temperature > VLLM_HOTTEST:
        raise TrimtabError(
            f"temperature = {sampling.temperature}: vLLM samples at {VLLM_COLDEST} to {VLLM_HOTTEST}, or greedily"
        )
