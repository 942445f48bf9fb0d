"""Samples tokens from logits with exact log-probs of the truncated distribution, one uniform number per token.

The processed distribution is the softmax of `logits / temperature`, restricted to the `top_k` most likely tokens,
then to the smallest set of them whose mass reaches `top_p`, and renormalized. Every number returned here comes from
the same float32 scores that chose the token, so `exp(logp)` is the probability with which it was sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from trimtab.errors import DivergedError
from trimtab.types import SamplingParams

# On a CPU, rows are processed in blocks of this size, which stay in a core's cache through several passes.
BLOCK_BYTES = 1 << 20
# The inverse-CDF search runs over sums of this many tokens, then inside one such chunk: no vocabulary-wide cumsum.
CHUNK = 128
# Without top-k, top-p first considers at least this many tokens; the vocabulary is sorted only if a row needs more.
TOP_P_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sampled token for each row."""

    ids: Tensor  # (rows,), int64
    logp: Tensor  # (rows,), float32
    entropy: Tensor  # (rows,), float32, in nats
    kept: list[NDArray[np.int64]] | None  # sampling mask of each row: the ids that truncation kept
    top: tuple[Tensor, Tensor] | None = None  # ids and log-probs of the most probable ids, both (rows, k): `TopTokens`

    def to_lists(self) -> tuple[list[int], list[float], list[float]]:
        """Copies ids, log-probs and entropies to the CPU; raises `DivergedError` if they are not finite."""
        numbers = torch.stack([self.ids.double(), self.logp.double(), self.entropy.double()])
        ids, logp, entropy = numbers.tolist()  # float64 holds all three exactly
        if not all(map(math.isfinite, entropy)):
            raise DivergedError("the model's logits are not finite: its weights have diverged; publish finite weights")
        return list(map(int, ids)), logp, entropy


def uniform_draws(seed: int, prompt: int, sample: int, count: int) -> NDArray[np.float64]:
    """Returns `count` uniform numbers in [0, 1), one per token position of a completion, as float64.

    The numbers depend on the arguments alone, not on the batch. A larger `count` only appends numbers.
    """
    key = np.random.SeedSequence(entropy=seed, spawn_key=(prompt, sample))
    return np.random.Generator(np.random.Philox(key)).random(count)


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> SampledTokens:
    """Samples one token per row.

    logits: (rows, vocabulary), any float dtype. uniform: (rows,) float64 in [0, 1), the inverse-CDF positions.

    If the logits of a row are not finite, its entropy is NaN, and `SampledTokens.to_lists` raises `DivergedError`.
    """
    if sampling.temperature == 0:
        return _greedy(logits, sampling)
    rows = max(1, BLOCK_BYTES // (logits.shape[1] * 4)) if logits.is_cpu else len(logits)
    sample = _sample_truncated if sampling.truncated else _sample_full
    parts = [
        sample(_scores(part, sampling.temperature), u, sampling)
        for part, u in zip(logits.split(rows), uniform.split(rows), strict=True)
    ]
    tops = [part.top for part in parts if part.top is not None]
    return SampledTokens(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.logp for part in parts]).float(),
        torch.cat([part.entropy for part in parts]).float(),
        [ids for part in parts for ids in part.kept or ()] if sampling.truncated else None,
        (torch.cat([ids for ids, _ in tops]), torch.cat([logp for _, logp in tops]).float()) if tops else None,
    )


def _greedy(logits: Tensor, sampling: SamplingParams) -> SampledTokens:
    """Returns the most likely tokens. At temperature 0 log-prob and entropy are 0 by definition."""
    top, ids = logits.max(-1)
    zero = torch.where(top.isfinite(), 0.0, torch.nan).float()
    kept = [np.array([i]) for i in ids.tolist()] if sampling.truncated else None
    others = (0, min(sampling.top_logprobs, logits.shape[-1]) - 1)  # no other id is possible
    best = (pad(ids[:, None], others, value=-1), pad(zero[:, None], others, value=-torch.inf))
    return SampledTokens(ids, zero, zero, kept, best if sampling.top_logprobs else None)


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """Returns logits / temperature in float32, shifted so that the largest of each row is 0."""
    scores = logits.float()
    peak = scores.amax(-1, keepdim=True)
    scores = scores - peak if scores is logits else scores.sub_(peak)
    return scores if temperature == 1 else scores.div_(temperature)


def _sample_full(scores: Tensor, uniform: Tensor, sampling: SamplingParams) -> SampledTokens:
    rows, vocabulary = scores.shape
    mass = scores.exp()
    covered = vocabulary // CHUNK * CHUNK
    sums = mass[:, :covered].view(rows, -1, CHUNK).sum(-1)
    if covered < vocabulary:
        sums = torch.cat([sums, mass[:, covered:].sum(-1, keepdim=True)], -1)
    bounds = sums.double().cumsum(-1)
    total = bounds[:, -1:]
    chunk, rest = _locate(bounds, uniform.unsqueeze(-1) * total)
    # The last chunk may be shorter: positions beyond the vocabulary get no mass.
    indices = chunk * CHUNK + torch.arange(CHUNK, device=scores.device)
    inside = mass.gather(-1, indices.clamp(max=vocabulary - 1)).double().masked_fill_(indices >= vocabulary, 0.0)
    index, _ = _locate(inside.cumsum(-1), rest)
    ids = (chunk * CHUNK + index).clamp_(max=vocabulary - 1)  # as in `_locate`
    log_total = total.log()
    mean_score = torch.linalg.vecdot(mass, scores).unsqueeze(-1) / total
    logp = scores.gather(-1, ids) - log_total
    top = None
    if sampling.top_logprobs:
        values, top_ids = scores.topk(min(sampling.top_logprobs, vocabulary), -1)
        top = top_ids, values - log_total
    return SampledTokens(ids.squeeze(-1), logp.squeeze(-1), (log_total - mean_score).squeeze(-1), None, top)


def _locate(bounds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first index whose cumulative mass exceeds `target`, and `target` minus the mass before it.

    Both are (rows, 1). An index without mass is never returned. If rounding moves `target` up to the last bound, it is
    set to the next smaller number.
    """
    target = torch.minimum(target, torch.nextafter(bounds[:, -1:], torch.zeros_like(bounds[:, -1:])))
    # Clamped in case the bounds are NaN: a device cannot raise here; `SampledTokens.to_lists` raises later.
    index = torch.searchsorted(bounds, target, right=True).clamp_(max=bounds.shape[-1] - 1)
    below = bounds.gather(-1, (index - 1).clamp(min=0)).masked_fill_(index == 0, 0.0)
    return index, target - below


def _sample_truncated(scores: Tensor, uniform: Tensor, sampling: SamplingParams) -> SampledTokens:
    vocabulary = scores.shape[1]
    count = min(sampling.top_k or max(TOP_P_CANDIDATES, sampling.top_logprobs), vocabulary)
    values, ids = scores.topk(count, -1)
    mass = values.double().exp()
    # Top-p applies to the mass that top-k has renormalized: every engine applies the two in this order.
    total = mass.sum(-1, keepdim=True) if sampling.top_k else scores.double().exp_().sum(-1, keepdim=True)
    before = mass.cumsum(-1) - mass
    if not sampling.top_k and count < vocabulary and bool((mass.sum(-1, keepdim=True) < sampling.top_p * total).any()):
        values, ids = scores.sort(-1, descending=True)
        mass = values.double().exp()
        before = mass.cumsum(-1) - mass
    kept = before < sampling.top_p * total
    kept[:, 0] = True
    mass = mass.masked_fill(~kept, 0.0)
    bounds = mass.cumsum(-1)
    total = bounds[:, -1:]
    index, _ = _locate(bounds, uniform.unsqueeze(-1) * total)
    log_total = total.log()
    mean_score = (mass * values.masked_fill(~kept, 0.0)).sum(-1, keepdim=True) / total
    top = None
    if sampling.top_logprobs:
        allowed, best = kept[:, : sampling.top_logprobs], slice(0, sampling.top_logprobs)
        logps = (values[:, best] - log_total).masked_fill(~allowed, -torch.inf)
        top = (ids[:, best].masked_fill(~allowed, -1), logps)
    masks = [np.sort(row[:size]) for row, size in zip(ids.cpu().numpy(), kept.sum(-1).tolist(), strict=True)]
    return SampledTokens(
        ids.gather(-1, index).squeeze(-1),
        (values.gather(-1, index) - log_total).squeeze(-1),
        (log_total - mean_score).squeeze(-1),
        masks,
        top,
    )
