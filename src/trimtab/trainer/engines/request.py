"""What every engine knows of its model, and the validation of generate requests and of their prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.stopping import StopChecker, eos_ids, generation_config
from trimtab.trainer.models.routing import RouterInfo, require_known_experts
from trimtab.types import Completion, Prompt, SamplingParams

NO_WEIGHTS = "the engine has no weights yet: call update_weights first"
Prefixes = Sequence[Sequence[Completion]]  # by prompt and sample

# Temperatures at which vLLM samples. It silently raises lower temperatures to the minimum, which changes the
# distribution, and refuses temperatures above the maximum.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What an engine knows of its model."""

    tokenizer: Any
    eos_ids: frozenset[int]
    vocabulary: int  # number of token ids
    context: int | None  # largest number of positions; None for no limit

    @classmethod
    def read(cls, folder: Path | str, tokenizer: Any) -> EngineModel:
        """Returns what the config files of a model folder say."""
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        context = getattr(config, "max_position_embeddings", None)
        return cls(tokenizer, eos_ids(tokenizer, config, generation_config(folder)), config.vocab_size, context)


def request_seed(seed: int, *key: int) -> int:
    """Returns the 63-bit seed of one request, from the seed of the call and the request's key."""
    return int(np.random.SeedSequence(entropy=seed, spawn_key=key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def validate_request(
    model: EngineModel, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams, seed: int
) -> None:
    """Validates the arguments of `Engine.generate` before anything is sampled."""
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
        if np.min(prompt.ids) < 0 or np.max(prompt.ids) >= model.vocabulary:
            raise TrimtabError(
                f"prompt {prompt.problem.id!r} has token ids outside the model's vocabulary of {model.vocabulary}; "
                "encode it with the model's own tokenizer"
            )
        if model.context is not None and length + sampling.max_tokens > model.context:
            raise TrimtabError(
                f"prompt {prompt.problem.id!r} has {length} tokens and max_tokens is {sampling.max_tokens}, "
                f"but the model's context holds {model.context}; shorten the prompt or lower max_tokens"
            )


def validate_vllm_temperature(sampling: SamplingParams) -> None:
    """Raises `TrimtabError` if vLLM (in this process or on a server) does not sample at exactly this temperature."""
    if 0 < sampling.temperature < MIN_TEMPERATURE or sampling.temperature > MAX_TEMPERATURE:
        raise TrimtabError(
            f"temperature = {sampling.temperature}: vLLM samples at {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, or greedily"
        )


def validate_prefixes(
    prefixes: Prefixes | None, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams
) -> None:
    """Validates that prefixes fit the prompts, the number of samples and the sampling parameters."""
    if prefixes is None:
        return
    if len(prefixes) != len(prompts) or any(len(group) != samples for group in prefixes):
        raise TrimtabError(
            f"prefixes for {len(prefixes)} prompts with {sorted({len(group) for group in prefixes})} samples do not "
            f"fit {len(prompts)} prompts with {samples}: give one prefix, possibly empty, for each response"
        )
    for name, prompt, prefix in _distinct_prefixes(prefixes, prompts):
        length = len(prefix.response_ids)
        fields = (prefix.logp_behavior, prefix.policy_version, prefix.entropy, prefix.sampling_mask, prefix.top)
        if any(len(values) != length for values in fields if values is not None):
            raise TrimtabError(
                f"{name}: its log-probs, versions, entropies, sampling masks or most probable ids are not {length} "
                "like its ids"
            )
        if length > sampling.max_tokens:
            raise TrimtabError(
                f"{name} has {length} tokens, max_tokens for the whole response is {sampling.max_tokens}: "
                "cut the prefix or raise max_tokens"
            )
        if sampling.truncated != (prefix.sampling_mask is not None):
            raise TrimtabError(
                f"{name} must have sampling masks where top_p or top_k truncates the sampling, and only there: draw it "
                "under the same top_p and top_k"
            )
        if (prefix.top is None) == (sampling.top_logprobs > 0):
            raise TrimtabError(
                f"{name} must have most probable ids where top_logprobs asks for them, and only there: draw it under "
                "the same top_logprobs"
            )
        run = len(prompt.ids) + length - 1
        if prefix.routed_experts is not None and len(prefix.routed_experts) != run:
            raise TrimtabError(
                f"{name}: its experts are recorded for {len(prefix.routed_experts)} tokens, but {run} were run"
            )


def validate_tokens(
    prefixes: Prefixes | None, prompts: Sequence[Prompt], stop: StopChecker, vocabulary: int, *, multi_turn: bool
) -> None:
    """Raises `TrimtabError` for ids outside the vocabulary, and for a stop in an unfinished single-turn prefix."""
    for name, _, prefix in _distinct_prefixes(prefixes, prompts):
        ids = prefix.response_ids
        if np.min(ids) < 0 or np.max(ids) >= vocabulary:
            raise TrimtabError(f"{name} has token ids outside the model's vocabulary of {vocabulary}")
        if not multi_turn and prefix.finish_reason != "stop" and stop.end(ids.tolist()) is not None:
            raise TrimtabError(f"{name} contains a stop, so it is already complete: cut it before its last token")


def validate_routes(prefixes: Prefixes | None, prompts: Sequence[Prompt], routers: RouterInfo) -> None:
    """Raises `TrimtabError` for prefixes whose routed experts do not exist in this model."""
    for name, _, prefix in _distinct_prefixes(prefixes, prompts):
        if prefix.routed_experts is not None:
            require_known_experts(prefix.routed_experts, routers, name)


def _distinct_prefixes(
    prefixes: Prefixes | None, prompts: Sequence[Prompt]
) -> Iterator[tuple[str, Prompt, Completion]]:
    """Yields each non-empty prefix object once, as (name for error messages, prompt, prefix)."""
    seen: set[int] = set()
    for prompt, group in zip(prompts, prefixes, strict=True) if prefixes else ():
        for sample, prefix in enumerate(group):
            if id(prefix) not in seen and len(prefix.response_ids):
                seen.add(id(prefix))
                yield f"prefix of prompt {prompt.problem.id!r}, sample {sample},", prompt, prefix
