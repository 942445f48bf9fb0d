"""A sampler and a trainer of one model, and responses with the log-probs of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from trimtab.diagnosis.tokens import TokenTable, k3
from trimtab.errors import Finding
from trimtab.preflight.trainer import Trainer
from trimtab.trainer.models.lora import named_weights
from trimtab.types import Completion, Engine, Prompt, SamplingParams

SEED = 0
EXACT = 1e-8
"""k3 up to which two float32 computations agree."""
MARGIN = 4.0
"""How many times its usual size a mismatch may have."""


@dataclass(frozen=True)
class Check(Finding):
    """A finding with its numbers. figures: by name."""

    figures: dict[str, float] | None = None


@dataclass(frozen=True, eq=False)
class ScoredResponses:
    """Responses of the sampler, and the trainer's log-probs (tokens,) of each."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    logp_trainer: Sequence[np.ndarray]
    temperature: float

    @cached_property
    def by_response(self) -> list[np.ndarray]:
        """The logarithm of trainer / sampler at the tokens of each response, (tokens,)."""
        pairs = zip(self.logp_trainer, self.completions, strict=True)
        return [logp - one.logp_behavior for logp, one in pairs]

    @property
    def log_ratio(self) -> np.ndarray:
        """That of all responses, (tokens,)."""
        return np.concatenate(self.by_response)

    @property
    def logp_behavior(self) -> np.ndarray:
        return np.concatenate([one.logp_behavior for one in self.completions])

    @property
    def k3(self) -> float:
        return float(k3(self.log_ratio).mean())

    def table(self) -> TokenTable:
        """Returns the tokens as `trimtab.diagnosis` reads them from a file."""
        lengths = [len(one.response_ids) for one in self.completions]
        prompts = {prompt.problem.id: number for number, prompt in enumerate(self.prompts)}
        responses = len(lengths)
        return TokenTable(
            starts=np.append(0, np.cumsum(lengths)),
            mask=np.ones(sum(lengths), dtype=bool),
            behavior=self.logp_behavior.astype(np.float32),
            proximal=np.concatenate(self.logp_trainer).astype(np.float32),
            ids=np.concatenate([one.response_ids for one in self.completions]),
            prompt=np.array([prompts[prompt.problem.id] for prompt in self.prompts]),
            prompt_length=np.array([float(len(prompt.ids)) for prompt in self.prompts]),
            temperature=np.full(responses, self.temperature),
            top_p=np.ones(responses),
            top_k=np.zeros(responses, dtype=np.int64),
            raw=np.zeros(responses, dtype=bool),
        )


@dataclass(eq=False)
class EnginePair:
    """What is checked.

    prompts: at least 64. sampling: as configured. bound: largest k3 in nats per token. top_logprobs: the number of ids
    whose log-probs the sampler can return at a token. stop_ids: where its responses end. lora: whether adapters are
    trained. weights_in_use: whether `named_weights` of the sampler are the tensors in use, as they were published. vLLM
    and servers return what was published last; their own tensors are fused, sharded or quantized.
    """

    engine: Engine
    trainer: Trainer
    tokenizer: Any
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    context: int | None
    bound: float
    top_logprobs: int
    stop_ids: frozenset[int]
    lora: bool = False
    weights_in_use: bool = False
    version: int = 0

    def publish(self) -> None:
        """Gives the sampler the trainer's weights, as a training run does."""
        self.version += 1
        self.engine.update_weights(named_weights(self.trainer.model), self.version)

    def sample(
        self, prompts: Sequence[Prompt], tokens: int, prefixes: Sequence[Completion] | None = None, **changes: Any
    ) -> list[Completion]:
        """Returns one response to each prompt of `tokens` tokens, at the configured temperature without truncation.

        changes: further fields of `SamplingParams`.
        """
        values = {"top_p": 1.0, "top_k": 0, "ignore_stop": True, "max_tokens": self.room(prompts, tokens)} | changes
        groups = self.engine.generate(
            prompts,
            1,
            replace(self.sampling, **values),
            seed=SEED,
            prefixes=None if prefixes is None else [[prefix] for prefix in prefixes],
        )
        return [group[0] for group in groups]

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], temperature: float | None = None
    ) -> ScoredResponses:
        """Scores responses with the trainer, by default at the configured temperature."""
        temperature = self.sampling.temperature if temperature is None else temperature
        rows = self.trainer.score(prompts, completions, temperature)
        return ScoredResponses(prompts, completions, [logp for logp, _ in rows], temperature)

    def compare(self, prompts: Sequence[Prompt], tokens: int, **changes: Any) -> ScoredResponses:
        return self.score(prompts, self.sample(prompts, tokens, **changes), changes.get("temperature"))

    def room(self, prompts: Sequence[Prompt], tokens: int) -> int:
        """Returns `tokens`, or what the context leaves after the longest prompt."""
        longest = max(len(prompt.ids) for prompt in prompts)
        return tokens if self.context is None else max(1, min(tokens, self.context - longest))


def common_log_ratio(a: Sequence[Completion], b: Sequence[Completion]) -> np.ndarray:
    """Returns log(b / a) at the first tokens that two lists of responses have in common, response by response.

    The token at which two responses part is not compared, since the two log-probs are of different tokens.
    """
    parts = []
    for one, other in zip(a, b, strict=True):
        tokens = min(len(one.response_ids), len(other.response_ids))
        same = np.cumprod(one.response_ids[:tokens] == other.response_ids[:tokens]).astype(bool)
        parts.append((other.logp_behavior[:tokens] - one.logp_behavior[:tokens])[same])
    return np.concatenate(parts)
