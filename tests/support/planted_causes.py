"""Mismatch planted in log-probs of a real model: responses really sampled, rescored exactly, then broken."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from trimtab.diagnosis.causes import find_causes
from trimtab.diagnosis.records import Cause, DataSummary, DriftSplit, Measured, MismatchSize
from trimtab.diagnosis.tokens import TokenTable
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import WeightQuantization, matrices
from trimtab.trainer.models.logprobs import TokenBatch, pack_kept, score
from trimtab.types import Completion, Problem, Prompt, SamplingParams


@dataclass(frozen=True, eq=False)
class Rollout:
    """Responses of one sampler, flat. `responses` holds (prompt index, completion) in order."""

    prompts: Sequence[Prompt]
    responses: list[tuple[int, Completion]]

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *(len(c.response_ids) for _, c in self.responses)])

    @property
    def behavior(self) -> np.ndarray:
        return np.concatenate([c.logp_behavior for _, c in self.responses])

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([c.response_ids for _, c in self.responses])

    @property
    def entropy(self) -> np.ndarray:
        result = [c.entropy for _, c in self.responses]
        return np.concatenate([values for values in result if values is not None])

    @property
    def group(self) -> np.ndarray:
        return np.array([prompt for prompt, _ in self.responses], dtype=np.int64)


def prompts_of(texts: Sequence[str], tokenizer: Any) -> list[Prompt]:
    return [Prompt(Problem(f"p{i}", t, ""), t, np.array(tokenizer(t)["input_ids"])) for i, t in enumerate(texts)]


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: SamplingParams,
    dtype: str = "float32",
) -> Rollout:
    out = EmbeddedEngine(model, tokenizer, getattr(torch, dtype)).generate(prompts, samples, sampling, seed=7)
    return Rollout(prompts, [(i, completion) for i, group in enumerate(out) for completion in group])


ROWS = 300  # responses scored at once


def rescore(
    model: Any, rollout: Rollout, *, temperature: float = 1.0, kept: bool = False, ids: list[np.ndarray] | None = None
) -> np.ndarray:
    """The trainer's log-probs of all response tokens, under the caller's autocast; `ids` replaces their own tokens.

    Tests ask for the same ones again and again, so they are kept: the model must not change afterwards.
    """
    if ids is not None:
        return _score(model, rollout, temperature, kept, ids)
    return _rescored(model, rollout, temperature, kept).copy()


@cache
def _rescored(model: Any, rollout: Rollout, temperature: float, kept: bool) -> np.ndarray:
    return _score(model, rollout, temperature, kept, [c.response_ids for _, c in rollout.responses])


@torch.no_grad()
def _score(model: Any, rollout: Rollout, temperature: float, kept: bool, rows: list[np.ndarray]) -> np.ndarray:
    done = []
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        index = [prompt for prompt, _ in rollout.responses[start : start + ROWS]]
        used = sorted(set(index))
        batch = TokenBatch.pack([rollout.prompts[i].ids for i in used], part, [used.index(i) for i in index], pad_id=0)
        sets = [c.sampling_mask or () for _, c in rollout.responses[start : start + ROWS]]
        packed = pack_kept(sets, batch.response_ids.shape[1]) if kept else None
        logp = score(model, batch, temperature=temperature, kept=packed).logp
        done.append(logp[batch.response_mask].float().numpy())
    return np.concatenate(done)


def rounded(model: Any, bits: int) -> Any:
    """A copy with every matrix inside the decoder rounded to `bits`."""
    other, rounding = copy.deepcopy(model), WeightQuantization(bits=bits)
    parameters = dict(other.named_parameters())
    with torch.no_grad():
        for name in matrices(other):
            parameters[name].copy_(rounding.apply(name, parameters[name], 0))
    return other


def improved(model: Any, rollout: Rollout, advantage: np.ndarray, *, updates: int, lr: float) -> Any:
    """A copy trained by policy gradient on the rollout's responses, split over the updates."""
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    for part in np.array_split(np.arange(len(rollout.responses)), updates):
        index = [rollout.responses[i][0] for i in part]
        used = sorted(set(index))
        rows = [rollout.responses[i][1].response_ids for i in part]
        batch = TokenBatch.pack([rollout.prompts[i].ids for i in used], rows, [used.index(i) for i in index], pad_id=0)
        logp = score(other, batch).logp
        weight = torch.tensor(advantage[part, None], dtype=torch.float32) * batch.response_mask
        (-(logp - logp.detach()).exp() * weight).sum().div(batch.response_mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return other


def table(rollout: Rollout, trainer: np.ndarray, behavior: np.ndarray | None = None, **columns: Any) -> TokenTable:
    behavior = rollout.behavior if behavior is None else behavior
    all_columns = {"mask": np.ones(len(behavior), dtype=bool), **columns}
    return TokenTable(
        starts=rollout.starts.astype(np.int64),
        behavior=behavior.astype(np.float32),
        proximal=trainer.astype(np.float32),
        **all_columns,
    )


def part(whole: TokenTable, tokens: int, seed: int = 0) -> TokenTable:
    """Whole responses of the table, at random, until there are `tokens` of them."""
    order = np.random.default_rng(seed).permutation(whole.responses)
    keep = np.zeros(whole.responses, dtype=bool)
    keep[order[: int(np.searchsorted(np.cumsum(whole.lengths[order]), tokens)) + 1]] = True
    return whole.select(keep)


def measured(sample: TokenTable, nonfinite: dict[str, int] | None = None, floor: float = 0.0) -> Measured:
    origin = DataSummary("trimtab", 1, sample.responses, sample.tokens, int(sample.mask.sum()), "proximal")
    if nonfinite:
        origin = DataSummary(
            *[getattr(origin, n) for n in ("framework", "files", "responses", "tokens", "trained", "anchor")],
            nonfinite=nonfinite,
        )
    size = MismatchSize({}, {}, floor, "", "dense")
    return Measured(origin, size, {}, DriftSplit(False, ""), np.zeros((1, 1)), sample)


def causes(sample: TokenTable, **keywords: Any) -> tuple[Cause, ...]:
    return find_causes(measured(sample, **keywords))


def names(sample: TokenTable, **keywords: Any) -> set[str]:
    return {cause.name for cause in causes(sample, **keywords)}


def shifted(starts: np.ndarray, values: np.ndarray, by: int, *, every: int = 1, since: int = 0) -> np.ndarray:
    """`values` rolled by some places, in every so many responses, from a position on."""
    values = values.copy()
    for row in range(0, len(starts) - 1, every):
        start = min(starts[row] + since, starts[row + 1])
        values[start : starts[row + 1]] = np.roll(values[start : starts[row + 1]], by)
    return values
