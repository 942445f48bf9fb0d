"""The rows of a decoding batch: prefixes, tokens sampled so far, and the validation of prefixes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.embedded.sampling import SampledTokens
from trimtab.trainer.engines.stopping import StopChecker
from trimtab.trainer.models.routing import RouterInfo
from trimtab.types import (
    EXTERNAL_VERSION,
    Completion,
    FinishReason,
    Prompt,
    SamplingParams,
    TopTokens,
    TurnResult,
)

Prefixes = Sequence[Sequence[Completion]]
TopRow = tuple[NDArray[np.int64], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPlan:
    """What a batch runs through the model before sampling: distinct pairs of a prompt and a response prefix ("starts").

    `prompt` (starts,) holds the index of the prompt of each start, `row` (rows,) the index of the start of each row.
    Rows of one prompt are adjacent. A prefix may be empty.
    """

    prompts: list[Tensor]
    prefixes: list[Tensor]
    prompt: Tensor
    row: Tensor


@dataclass(slots=True)
class DecodingRow:
    """One response during decoding; `ids`, `logp`, `entropy`, `kept` and `sampled` begin with those of `prefix`.

    `routes` holds the routed experts of prompt and response, where they are recorded, from the first step on. In a
    multi-turn response, `turn_start` is the length before its last turn, and `observation` has the tokens that an
    engine without a separate prefill appends one by one, in place of sampled ones.
    """

    prompt: int
    sample: int
    uniform_draws: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # one for each token
    prefix: Completion | None = None
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    kept: list[NDArray[np.int64]] = field(default_factory=list)
    top: list[TopRow] = field(default_factory=list)  # ids and log-probs of the most probable ids of each token
    routes: list[NDArray[np.int16]] = field(default_factory=list)  # each (tokens, layers, k), to be concatenated
    finish: FinishReason = "length"
    complete: bool = False  # nothing is left to sample
    sampled: list[bool] = field(default_factory=list)
    turn_start: int = 0
    observation: deque[int] = field(default_factory=deque)
    waiting: bool = False  # for the result of its last turn

    @property
    def prefix_length(self) -> int:
        """The number of tokens of the prefix."""
        return 0 if self.prefix is None else len(self.prefix.response_ids)

    @property
    def active(self) -> bool:
        """Whether the row is to be decoded."""
        return not self.complete and not self.waiting

    @property
    def turn_ids(self) -> list[int]:
        """The tokens of the last turn."""
        return self.ids[self.turn_start :] if self.turn_start else self.ids

    def is_full(self, max_tokens: int, max_turn_tokens: int | None) -> bool:
        """Whether the response, or its last turn, has as many tokens as it may have."""
        full = max_turn_tokens is not None and len(self.ids) - self.turn_start >= max_turn_tokens
        return full or len(self.ids) >= max_tokens

    def completion(self, version: int, stop: StopChecker) -> Completion:
        """Returns the whole response; tokens after the prefix carry `version`.

        Without entropies of the prefix there are none of the whole.
        """
        old = () if self.prefix is None else self.prefix.policy_version
        sampled = np.array(self.sampled, dtype=np.bool_)
        new = np.where(sampled[self.prefix_length :], version, EXTERNAL_VERSION)
        no_entropy = self.prefix is not None and self.prefix.entropy is None
        routes = np.concatenate(self.routes) if self.routes else None
        if self.prefix is not None and len(new) == 0:
            routes = self.prefix.routed_experts
        return Completion(
            response_ids=np.array(self.ids, dtype=np.int64),
            logp_behavior=np.array(self.logp, dtype=np.float32),
            policy_version=np.concatenate([np.asarray(old, dtype=np.int64), new]),
            finish_reason=self.finish,
            text=stop.text(self.turn_ids),
            entropy=None if no_entropy else np.array(self.entropy, dtype=np.float32),
            sampling_mask=tuple(self.kept) if self.kept else None,
            routed_experts=routes,
            loss_mask=None if sampled.all() else sampled,
            top=TopTokens(*(np.stack(values) for values in zip(*self.top, strict=True))) if self.top else None,
        )

    def append(
        self, token: int, logp: float, entropy: float, kept: NDArray[np.int64] | None, top: TopRow | None = None
    ) -> None:
        """Appends a sampled token, or the next one of the observation in its place."""
        observed = bool(self.observation)
        if observed:
            token, logp, entropy = self.observation.popleft(), math.nan, math.nan
            kept = None if kept is None else np.array([token])
            top = None if top is None else (np.full_like(top[0], -1), np.full_like(top[1], -np.inf))
        self.ids.append(token)
        self.logp.append(logp)
        self.entropy.append(entropy)
        self.sampled.append(not observed)
        if kept is not None:
            self.kept.append(kept)
        if top is not None:
            self.top.append(top)
        if observed:
            self.turn_start = len(self.ids)

    def append_observation(self, *, truncated: bool) -> None:
        """Appends the whole observation. `truncated`: whether tokens have sampling masks."""
        top = self.top[-1] if self.top else None
        while self.observation:
            self.append(0, math.nan, math.nan, np.empty(0, np.int64) if truncated else None, top)

    def drop_partial_observation(self) -> None:
        """Removes the tokens of an observation that is not appended completely; its turn is then handled again."""
        if not self.observation:
            return
        while not self.sampled[-1]:
            for values in (self.ids, self.logp, self.entropy, self.kept, self.top, self.sampled, self.routes):
                if values:
                    values.pop()
        self.observation.clear()

    def end_turn(self, result: TurnResult, max_tokens: int) -> None:
        """Applies what follows the last turn: the row has an observation to append, or is complete.

        Raises:
            ValueError: the observation is empty, or leaves no token of `max_tokens` to sample.
        """
        if result.finish_reason is not None:
            self.finish, self.complete = result.finish_reason, True
            return
        if not 0 < len(result.ids) < max_tokens - len(self.ids):
            raise ValueError(f"an observation of {len(result.ids)} tokens after {len(self.ids)} of {max_tokens}")
        self.observation.extend(result.ids.tolist())


def is_complete(prefix: Completion, max_tokens: int, *, multi_turn: bool = False) -> bool:
    """Returns whether this prefix is a whole response, as an aborted call returns those that had already ended."""
    n, reason = len(prefix.response_ids), prefix.finish_reason
    if multi_turn:
        return n > 0 and reason != "abort"
    return n > 0 and (reason == "stop" or n == max_tokens)


def build_rows(
    count: int,
    samples: int,
    sampling: SamplingParams,
    prefixes: Prefixes | None,
    *,
    multi_turn: bool = False,
) -> list[DecodingRow]:
    """Returns `samples` rows for each of `count` prompts, prompt by prompt."""
    rows = [DecodingRow(p, s) for p in range(count) for s in range(samples)]
    if prefixes is None:
        return rows
    for row in rows:
        prefix = prefixes[row.prompt][row.sample]
        if len(prefix.response_ids) == 0:
            continue
        row.prefix = prefix
        row.complete = is_complete(prefix, sampling.max_tokens, multi_turn=multi_turn)
        row.finish = "stop" if row.complete and prefix.finish_reason == "stop" else "length"
        row.ids, row.logp = prefix.response_ids.tolist(), prefix.logp_behavior.tolist()
        row.entropy = [] if prefix.entropy is None else prefix.entropy.tolist()
        row.kept = list(prefix.sampling_mask or ())
        row.top = [] if prefix.top is None else list(zip(prefix.top.ids, prefix.top.logps, strict=True))
        row.sampled = prefix.sampled.tolist()
        observed = np.flatnonzero(~prefix.sampled)
        row.turn_start = int(observed[-1]) + 1 if len(observed) else 0
    return rows


def append_sampled(rows: list[DecodingRow], live: list[int], sampled: SampledTokens) -> None:
    """Appends the sampled tokens to the rows of the indices `live`."""
    ids, logp, entropy = sampled.to_lists()
    top = None if sampled.top is None else tuple(part.cpu().numpy() for part in sampled.top)
    for i in live:
        best = None if top is None else (top[0][i], top[1][i])
        rows[i].append(ids[i], logp[i], entropy[i], None if sampled.kept is None else sampled.kept[i], best)


def mark_aborted(rows: Iterable[DecodingRow]) -> None:
    """Marks rows as aborted; they keep the tokens sampled so far."""
    for row in rows:
        row.finish = "abort"
        row.drop_partial_observation()


def plan_prefill(rows: Sequence[DecodingRow], prompts: Sequence[Prompt], device: torch.device) -> PrefillPlan:
    """Returns the distinct pairs of prompt and prefix among rows before their first step.

    Rows of one prompt must be adjacent.
    """
    used = {p: i for i, p in enumerate(dict.fromkeys(row.prompt for row in rows))}
    starts: dict[tuple[int, tuple[int, ...]], int] = {}
    start_of_row = [starts.setdefault((used[row.prompt], tuple(row.ids)), len(starts)) for row in rows]
    return PrefillPlan(
        prompts=[torch.as_tensor(prompts[p].ids, dtype=torch.int64, device=device) for p in used],
        prefixes=[torch.tensor(ids, dtype=torch.int64, device=device) for _, ids in starts],
        prompt=torch.tensor([prompt for prompt, _ in starts], device=device),
        row=torch.tensor(start_of_row, device=device),
    )


def validate_prefixes(
    prefixes: Prefixes | None, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams
) -> None:
    """Validates that prefixes fit the prompts, the number of samples and the sampling parameters.

    Raises:
        TrimtabError: not one prefix for each sample of each prompt; per-token fields of another length than the ids;
            longer than `max_tokens`; sampling masks missing, or given where the sampling is not truncated; experts
            recorded for another number of tokens.
    """
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
    prefixes: Prefixes | None,
    prompts: Sequence[Prompt],
    stop: StopChecker,
    vocabulary: int,
    *,
    multi_turn: bool = False,
) -> None:
    """Validates that prefixes hold ids of the vocabulary only, and no stop unless they are finished or multi-turn.

    Raises:
        TrimtabError: an id outside the vocabulary; a stop id or stop string, unless the finish reason is "stop".
    """
    if prefixes is None:
        return
    for name, _, prefix in _distinct_prefixes(prefixes, prompts):
        ids = prefix.response_ids
        if np.min(ids) < 0 or np.max(ids) >= vocabulary:
            raise TrimtabError(f"{name} has token ids outside the model's vocabulary of {vocabulary}")
        if not multi_turn and prefix.finish_reason != "stop" and stop.contains_stop(ids.tolist()):
            raise TrimtabError(f"{name} contains a stop, so it is already complete: cut it before its last token")


def validate_routes(prefixes: Prefixes | None, prompts: Sequence[Prompt], routers: RouterInfo) -> None:
    """Raises `TrimtabError` for prefixes whose routed experts do not exist in this model."""
    for name, _, prefix in _distinct_prefixes(prefixes or [], prompts if prefixes else []):
        routes = prefix.routed_experts
        if routes is None or not routes.size:
            continue
        experts = routes[..., : routers.chosen]
        foreign = experts.min() < 0 or experts.max() >= routers.experts
        if foreign or routes.shape[1:] != (routers.layers, routers.columns):
            raise TrimtabError(
                f"{name} records experts that this model does not have: it has {routers.layers} mixture layers of "
                f"{routers.experts} experts, {routers.chosen} for a token"
            )


def _distinct_prefixes(prefixes: Prefixes, prompts: Sequence[Prompt]) -> Iterator[tuple[str, Prompt, Completion]]:
    """Yields each prefix object that is not empty once, as (name for error messages, prompt, prefix)."""
    seen: set[int] = set()
    for prompt, group in zip(prompts, prefixes, strict=True):
        for sample, prefix in enumerate(group):
            if id(prefix) not in seen and len(prefix.response_ids):
                seen.add(id(prefix))
                yield f"prefix of prompt {prompt.problem.id!r}, sample {sample},", prompt, prefix
