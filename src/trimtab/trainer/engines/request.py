"""Validation of generate requests, shared by all engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.types import Prompt, SamplingParams

# vLLM's range. It silently raises lower temperatures to the minimum, and so samples another distribution than
# requested; it refuses temperatures above the maximum.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0


def validate_request(
    prompts: Sequence[Prompt],
    samples: int,
    sampling: SamplingParams,
    seed: int,
    *,
    vocabulary: int,
    context: int | None,
) -> None:
    """Validates the arguments of `Engine.generate` before anything is sampled.

    Args:
        vocabulary: the number of token ids of the model.
        context: the largest number of positions of the model; None where it has no limit.

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


def validate_vllm_temperature(sampling: SamplingParams) -> None:
    """Raises `TrimtabError` for a temperature at which vLLM, in this process or on a server, would not sample."""
    if 0 < sampling.temperature < MIN_TEMPERATURE or sampling.temperature > MAX_TEMPERATURE:
        raise TrimtabError(
            f"temperature = {sampling.temperature}: vLLM samples at {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, or greedily"
        )
