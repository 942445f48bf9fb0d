"""The rows of a decoding batch: prefixes, tokens sampled so far, and the validation of prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.engines.embedded.sampling import SampledTokens, uniform_draws
from trimtab.engines.stopping import StopChecker
from trimtab.errors import TrimtabError
from trimtab.models.routing import RouterInfo
from trimtab.types import Completion, FinishReason, Prompt, SamplingParams

Prefixes = Sequence[Sequence[Completion]]


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
    """One response during decoding; `ids`, `logp`, `entropy` and `kept` begin with those of `prefix`.

    `routes` holds the routed experts of prompt and response, where they are recorded, from the first step on.
    """

    prompt: int
    sample: int
    uniform_draws: NDArray[np.float64]
    prefix: Completion | None = None
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    kept: list[NDArray[np.int64]] = field(default_factory=list)
    routes: list[NDArray[np.int16]] = field(default_factory=list)  # each (tokens, layers, k), to be concatenated
    finish: FinishReason = "length"
    complete: bool = False  # nothing is left to sample

    @property
    def prefix_length(self) -> int:
        """The number of tokens of the prefix."""
        return 0 if self.prefix is None else len(self.prefix.response_ids)

    def completion(self, version: int, stop: StopChecker) -> Completion:
        """Returns the whole response; tokens after the prefix carry `version`.

        Without entropies of the prefix there are none of the whole.
        """
        old = () if self.prefix is None else self.prefix.policy_version
        new = np.full(len(self.ids) - self.prefix_length, version, dtype=np.int64)
        no_entropy = self.prefix is not None and self.prefix.entropy is None
        routes = np.concatenate(self.routes) if self.routes else None
        if self.prefix is not None and len(new) == 0:
            routes = self.prefix.routed_experts
        return Completion(
            response_ids=np.array(self.ids, dtype=np.int64),
            logp_behavior=np.array(self.logp, dtype=np.float32),
            policy_version=np.concatenate([np.asarray(old, dtype=np.int64), new]),
            finish_reason=self.finish,
            text=stop.text(self.ids),
            entropy=None if no_entropy else np.array(self.entropy, dtype=np.float32),
            sampling_mask=tuple(self.kept) if self.kept else None,
            routed_experts=routes,
        )


def is_complete(prefix: Completion, max_tokens: int) -> bool:
    """Returns whether this prefix is a whole response, as an aborted call returns those that had already ended."""
    n = len(prefix.response_ids)
    return n > 0 and (prefix.finish_reason == "stop" or n == max_tokens)


def build_rows(
    count: int, samples: int, sampling: SamplingParams, seed: int, prefixes: Prefixes | None
) -> list[DecodingRow]:
    """Returns `samples` rows for each of `count` prompts, prompt by prompt."""
    rows = [
        DecodingRow(p, s, uniform_draws(seed, p, s, sampling.max_tokens)) for p in range(count) for s in range(samples)
    ]
    if prefixes is None:
        return rows
    for row in rows:
        prefix = prefixes[row.prompt][row.sample]
        if len(prefix.response_ids) == 0:
            continue
        row.prefix = prefix
        row.complete = is_complete(prefix, sampling.max_tokens)
        row.finish = "stop" if row.complete and prefix.finish_reason == "stop" else "length"
        row.ids, row.logp = prefix.response_ids.tolist(), prefix.logp_behavior.tolist()
        row.entropy = [] if prefix.entropy is None else prefix.entropy.tolist()
        row.kept = list(prefix.sampling_mask or ())
    return rows


def append_sampled(rows: list[DecodingRow], live: list[int], sampled: SampledTokens) -> None:
    """Appends the sampled tokens to the rows of the indices `live`."""
    ids, logp, entropy = sampled.ids.tolist(), sampled.logp.tolist(), sampled.entropy.tolist()
    for i in live:
        row = rows[i]
        row.ids.append(ids[i])
        row.logp.append(logp[i])
        row.entropy.append(entropy[i])
        if sampled.kept is not None:
            row.kept.append(sampled.kept[i])


def mark_aborted(rows: Iterable[DecodingRow]) -> None:
    """Marks rows as aborted; they keep the tokens sampled so far."""
    for row in rows:
        row.finish = "abort"


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
        fields = (prefix.logp_behavior, prefix.policy_version, prefix.entropy, prefix.sampling_mask)
        if any(len(values) != length for values in fields if values is not None):
            raise TrimtabError(
                f"{name}: its log-probs, versions, entropies or sampling masks are not {length} like its ids"
            )
        if length > sampling.max_tokens:
            raise TrimtabError(
                f"{name} has {length} tokens, max_tokens for the whole response is {sampling.max_tokens}: "
                "cut the prefix or raise max_tokens"
            )
        if sampling.truncated != (prefix.sampling_mask is not None):
            raise TrimtabError(
                f"{name} {'has no' if sampling.truncated else 'has'} sampling masks, but the sampling is "
                f"{'' if sampling.truncated else 'not '}truncated: draw the prefix under the same top_p and top_k"
            )
        run = len(prompt.ids) + length - 1
        if prefix.routed_experts is not None and len(prefix.routed_experts) != run:
            raise TrimtabError(
                f"{name}: its experts are recorded for {len(prefix.routed_experts)} tokens, but {run} were run"
            )


def validate_tokens(prefixes: Prefixes | None, prompts: Sequence[Prompt], stop: StopChecker, vocabulary: int) -> None:
    """Validates that prefixes hold ids of the vocabulary only, and no stop unless they are marked as finished.

    Raises:
        TrimtabError: an id outside the vocabulary; a stop id or stop string, unless `finish` is "stop".
    """
    if prefixes is None:
        return
    for name, _, prefix in _distinct_prefixes(prefixes, prompts):
        ids = prefix.response_ids
        if np.min(ids) < 0 or np.max(ids) >= vocabulary:
            raise TrimtabError(f"{name} has token ids outside the model's vocabulary of {vocabulary}")
        if prefix.finish_reason != "stop" and stop.contains_stop(ids.tolist()):
            raise TrimtabError(f"{name} contains a stop, so it is already complete: cut it before its last token")


def validate_routes(prefixes: Prefixes | None, prompts: Sequence[Prompt], routers: RouterInfo) -> None:
    """Raises `TrimtabError` for prefixes whose routed experts do not exist in this model."""
    for name, _, prefix in _distinct_prefixes(prefixes or [], prompts if prefixes else []):
        routes = prefix.routed_experts
        if routes is None or not routes.size:
            continue
        if routes.shape[1:] != (routers.layers, routers.chosen) or routes.min() < 0 or routes.max() >= routers.experts:
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
