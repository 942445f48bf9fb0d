"""Samples tokens from logits with exact log-probs of the truncated distribution, one uniform number per token.

The processed distribution is the softmax of `logits / temperature`, restricted to the `top_k` most likely tokens,
then to the smallest set of them whose mass reaches `top_p`, and renormalised. Every number returned here comes from
the same float32 scores that chose the token, so `exp(logp)` is the probability with which it was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.errors import DivergedError
from trimtab.types import Sampling

# Scores of a few rows at a time stay in a core's cache through the half dozen passes over them.
BLOCK_BYTES = 1 << 20
# Inverse-CDF search first over sums of this many tokens, then inside one such chunk: no vocabulary-wide cumsum.
CHUNK = 128
# Without top-k, top-p first looks at this many tokens and sorts the vocabulary only for rows that need more.
TOP_P_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row: `ids` int64, `logp` and `entropy` (nats) float32, all (rows,); `kept` one id array per row."""

    ids: Tensor
    logp: Tensor
    entropy: Tensor
    kept: list[NDArray[np.int64]] | None


def uniforms(seed: int, prompt: int, sample: int, count: int) -> NDArray[np.float64]:
    """The numbers in [0, 1) that decide one completion, by token position.

    They depend on these identities alone, never on the batch, so a row draws the same numbers whichever rows share the
    batch, and a longer `count` only appends.
    """
    key = np.random.SeedSequence(entropy=seed, spawn_key=(prompt, sample))
    return np.random.Generator(np.random.Philox(key)).random(count)


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> SampledTokens:
    """Sample one token per row.

    Args:
        logits: (rows, vocabulary), any float dtype.
        uniform: (rows,) float64 in [0, 1), the inverse-CDF positions.

    Raises:
        TrimtabError: the logits are not finite, so there is no distribution to sample from.
    """
    if sampling.temperature == 0:
        return _greedy(logits, sampling)
    rows = max(1, BLOCK_BYTES // (logits.shape[1] * 4)) if logits.is_cpu else len(logits)
    one = _draw_truncated if sampling.truncated else _draw_full
    parts = [
        one(_scores(part, sampling.temperature), u, sampling)
        for part, u in zip(logits.split(rows), uniform.split(rows), strict=True)
    ]
    drawn = SampledTokens(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.logp for part in parts]).float(),
        torch.cat([part.entropy for part in parts]).float(),
        [ids for part in parts for ids in part.kept or ()] if sampling.truncated else None,
    )
    _require_finite(drawn.entropy)
    return drawn


def _greedy(logits: Tensor, sampling: Sampling) -> SampledTokens:
    """Temperature 0 puts all mass on one token: log-prob and entropy are 0 by definition, not the model's own."""
    top, ids = logits.max(-1)
    _require_finite(top)
    zero = torch.zeros(len(ids), device=ids.device)
    return SampledTokens(ids, zero, zero, [np.array([i]) for i in ids.tolist()] if sampling.truncated else None)


def _require_finite(numbers: Tensor) -> None:
    if not bool(torch.isfinite(numbers).all()):
        raise DivergedError("the model's logits are not finite: its weights have diverged; publish finite weights")


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """Float32 scores with the row's largest at 0."""
    scores = logits.float()
    peak = scores.amax(-1, keepdim=True)
    _require_finite(peak)
    scores = scores - peak if scores is logits else scores.sub_(peak)
    return scores if temperature == 1 else scores.div_(temperature)


def _draw_full(scores: Tensor, uniform: Tensor, _sampling: Sampling) -> SampledTokens:
    rows, vocabulary = scores.shape
    mass = scores.exp()
    whole = vocabulary // CHUNK * CHUNK
    sums = mass[:, :whole].view(rows, -1, CHUNK).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, mass[:, whole:].sum(-1, keepdim=True)], -1)
    bounds = sums.double().cumsum(-1)
    total = bounds[:, -1:]
    chunk, rest = _locate(bounds, uniform.unsqueeze(-1) * total)
    # The last chunk may be short: its missing places carry no mass.
    places = chunk * CHUNK + torch.arange(CHUNK, device=scores.device)
    inside = mass.gather(-1, places.clamp(max=vocabulary - 1)).double().masked_fill_(places >= vocabulary, 0.0)
    place, _ = _locate(inside.cumsum(-1), rest)
    ids = chunk * CHUNK + place
    log_total = total.log()
    mean_score = torch.linalg.vecdot(mass, scores).unsqueeze(-1) / total
    logp = scores.gather(-1, ids) - log_total
    return SampledTokens(ids.squeeze(-1), logp.squeeze(-1), (log_total - mean_score).squeeze(-1), None)


def _locate(bounds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First place whose cumulative mass exceeds `target`, and what of `target` is left there; both (rows, 1).

    A place without mass is never the first to exceed anything. `target` may reach the last bound only by rounding;
    it is then moved back below it.
    """
    target = torch.minimum(target, torch.nextafter(bounds[:, -1:], torch.zeros_like(bounds[:, -1:])))
    place = torch.searchsorted(bounds, target, right=True)
    below = bounds.gather(-1, (place - 1).clamp(min=0)).masked_fill_(place == 0, 0.0)
    return place, target - below


def _draw_truncated(scores: Tensor, uniform: Tensor, sampling: Sampling) -> SampledTokens:
    vocabulary = scores.shape[1]
    count = min(sampling.top_k or TOP_P_CANDIDATES, vocabulary)
    values, ids = scores.topk(count, -1)
    mass = values.double().exp()
    # Top-p counts mass after top-k has renormalised it, as every engine applies the two in this order.
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
    place, _ = _locate(bounds, uniform.unsqueeze(-1) * total)
    log_total = total.log()
    mean_score = (mass * values.masked_fill(~kept, 0.0)).sum(-1, keepdim=True) / total
    sets = [np.sort(row[:size]) for row, size in zip(ids.cpu().numpy(), kept.sum(-1).tolist(), strict=True)]
    return SampledTokens(
        ids.gather(-1, place).squeeze(-1),
        (values.gather(-1, place) - log_total).squeeze(-1),
        (log_total - mean_score).squeeze(-1),
        sets,
    )
