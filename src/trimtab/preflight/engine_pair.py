"""A sampler and a trainer of one model, and responses with the log-probs of both.

The trainer scores given responses through Trimtab's packed pass, or as a plain padded batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.diagnosis.tokens import TokenTable, k3
from trimtab.errors import Finding, Status
from trimtab.trainer.models.logprobs import TokenBatch, pack_kept, score
from trimtab.trainer.models.lora import named_weights
from trimtab.types import Completion, Engine, IntArray, Prompt, SamplingParams

SEED = 0
EXACT = 1e-8
"""k3 up to which two float32 computations agree."""
MARGIN = 4.0
"""A mismatch may be this many times that of the same pair in its usual state (weights unchanged, nothing cached)."""
MAX_LOGITS = 1 << 27
"""Logits of one forward: half a GiB in float32."""


class Outcome(NamedTuple):
    """What a check found: `Check` without its name."""

    status: Status
    detail: str
    next_step: str = ""
    figures: dict[str, float] | None = None


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


class Scores(NamedTuple):
    """Log-probs (batch, time) of the responses, and of further ids (batch, time, k) where they were asked for."""

    logp: Tensor
    further: Tensor | None


Forward = Callable[[Any, TokenBatch, float, Tensor | None, Tensor | None], Scores]
"""Takes a model, a batch, the temperature, the ids that each token was drawn from, and further ids to score."""


def packed_forward(
    model: Any, batch: TokenBatch, temperature: float, kept: Tensor | None, further: Tensor | None
) -> Scores:
    """Scores without padding, as Trimtab trains."""
    scores = score(model, batch, temperature=temperature, kept=kept, head=further)
    return Scores(scores.logp, scores.head)


def padded_forward(
    model: Any, batch: TokenBatch, temperature: float, kept: Tensor | None, further: Tensor | None
) -> Scores:
    """Scores a padded batch with the model's own forward, as most frameworks do."""
    ids = torch.cat([batch.prompt_ids[batch.prompt_index], batch.response_ids], 1)
    mask = torch.cat([batch.prompt_mask[batch.prompt_index], batch.response_mask], 1)
    output = model(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=batch.response_ids.shape[1] + 1,
    )
    scores = output.logits[:, :-1].float() / temperature
    if kept is not None:
        drawn_from = torch.where(kept < 0, kept[..., :1], kept).clamp(min=0)
        allowed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, drawn_from, True)
        scores = scores.masked_fill(~allowed, -torch.inf)
    logps = scores.log_softmax(-1)
    others = None
    if further is not None:
        others = logps.gather(-1, further.clamp(min=0)).masked_fill(further < 0, -torch.inf)
    return Scores(logps.gather(-1, batch.response_ids[..., None])[..., 0], others)


FORWARDS: dict[str, Forward] = {"trimtab": packed_forward, "transformers": padded_forward}
ATTENTION = "sdpa"
"""transformers' attention for `padded_forward`."""


@dataclass(frozen=True, eq=False)
class Trainer:
    """The trained model. precision: the autocast context of its forward. pad_id: any id of the vocabulary."""

    model: Any
    forward: Forward
    pad_id: int
    vocabulary: int
    precision: Callable[[], AbstractContextManager[Any]]

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        temperature: float,
        *,
        kept: bool = False,
        further: Sequence[IntArray] | None = None,
    ) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Returns the log-probs (tokens,) of each response, and those (tokens, k) of further ids at its tokens.

        kept: whether the distribution is restricted to the ids that the sampler drew each token from.
        """
        rows = []
        longest = max(len(one.response_ids) for one in completions)
        size = max(1, MAX_LOGITS // (self.vocabulary * longest))
        for start in range(0, len(completions), size):
            part = slice(start, start + size)
            ids = None if further is None else pack_kept([list(row) for row in further[part]], longest)
            logp, others = self.logps(prompts[part], completions[part], temperature, kept=kept, further=ids)
            for row, one in enumerate(completions[part]):
                tokens = len(one.response_ids)
                values = None if others is None else others[row, :tokens].float().cpu().numpy()
                rows.append((logp[row, :tokens].float().cpu().numpy(), values))
        return rows

    def logps(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        temperature: float,
        *,
        kept: bool = False,
        further: Tensor | None = None,
    ) -> Scores:
        """Scores one micro-batch, with gradient where it is enabled; padded."""
        batch = TokenBatch.pack(
            [prompt.ids for prompt in prompts],
            [one.response_ids for one in completions],
            range(len(prompts)),
            pad_id=self.pad_id,
        )
        device = next(self.model.parameters()).device
        batch = batch.to(device)
        time = batch.response_ids.shape[1]
        sets = pack_kept([one.sampling_mask or () for one in completions], time).to(device) if kept else None
        others = None if further is None else further[:, :time].to(device)
        with self.precision():
            return self.forward(self.model, batch, temperature, sets, others)


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
