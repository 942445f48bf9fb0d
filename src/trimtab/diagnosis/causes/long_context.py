"""Detects `long-context`: the mismatch grows with the depth of a token in its context.

Attention over more keys accumulates other rounding errors in other kernels, and rotary embeddings lose precision at
large positions, so that trainer and sampler drift apart with depth. Depth is the prompt's length, where it is known,
plus the position in the response.

Later tokens may also be less certain, of other weights, or in other responses. So the log size of the logit shift is
measured against the mean of tokens of about the same probability and the same age, and followed within each response.
It must grow with the logarithm of the depth, by `GROWTH_Z` standard errors over responses, and sizes must grow
`MIN_GROWTH` times from the shallowest to the deepest fifth, through the fifths between. The size of rounding differs
between texts by up to 2.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.detector import (
    LEAST_K3,
    LEAST_RMS,
    CauseMatch,
    Context,
    LogprobPairs,
    Residual,
    centered,
    confidence,
    log_size,
    rms_of,
    slope_of,
)

MIN_SPAN = 1024  # smallest difference in depth, in tokens: over less, the form of an answer decides
MIN_TOKENS = 500  # fewest undecided tokens
MIN_RESPONSES = 20  # fewest responses that span so much
MIN_GROWTH = 2.0  # least growth of sizes from the shallowest fifth of depths to the deepest [texts differ by up to 2]
MIN_GROWTH_LOW = 1.5  # least lower end of the interval of that growth
GROWTH_Z = 6.0  # standard errors of the trend over depth
MAX_BASE = 0.35  # share of the deepest sizes that may be there at depth 0 and counts as part of the growth

OFFSET = 256.0  # tokens added to depths, so that their logarithm does not stretch the first ones
FIFTHS, SURPRISE_BINS, LARGEST = 5, 20, 10.0


def find_depth_growth(tokens: LogprobPairs, context: Context) -> list[CauseMatch]:
    """Detects growth with depth, and leaves the shallowest tokens."""
    if context.direction:  # log-ratios follow the shape of distributions, which may change along a response
        return []
    is_from_prompt = bool((tokens.depth > tokens.position).any())
    chosen = tokens.undecided & _spans_enough(tokens)
    is_within = chosen.sum() >= MIN_TOKENS
    is_within = is_within and len(np.unique(tokens.row[chosen])) >= MIN_RESPONSES
    if not is_within:  # short responses to prompts of very different lengths
        chosen = tokens.undecided
        few = chosen.sum() < MIN_TOKENS
        if not is_from_prompt or few or np.ptp(tokens.depth[chosen]) < MIN_SPAN:
            return []
    part = tokens.select(chosen)
    size = _among_similar(part)
    group = part.row if is_within else np.zeros(len(part))
    _, z = slope_of(centered(size, group), centered(np.log(part.depth + OFFSET), group), cluster=part.row)
    edges = np.quantile(part.depth, np.arange(1, FIFTHS) / FIFTHS)
    fifth = np.searchsorted(edges, part.depth, side="left")
    count = np.bincount(fifth, minlength=FIFTHS)
    if z < GROWTH_Z or count.min() < MIN_TOKENS / FIFTHS / 2:
        return []
    sizes = np.exp(np.bincount(fifth, size) / count)
    times = float(sizes[-1] / sizes[0])
    low, high = (times ** (1 + side * 1.96 / z) for side in (-1, 1))
    is_clear = times > MIN_GROWTH and low > MIN_GROWTH_LOW
    if not is_clear or (sizes[1:] < 0.9 * sizes[:-1]).any():
        return []
    shallowest, deepest = (part.select(fifth == at) for at in (0, FIFTHS - 1))
    k3 = Residual.of(deepest).k3
    is_above_floor = k3 >= max(LEAST_K3, 3 * context.floor)
    if not is_above_floor or rms_of(np.clip(deepest.shift, -LARGEST, LARGEST)) < LEAST_RMS:
        return []
    first, last = (float(np.abs(end.log_ratio).mean()) for end in (shallowest, deepest))
    evidence = (
        f"log-ratios grow {times:.1f} times ({low:.1f} to {high:.1f}) with depth for tokens of the same probability: "
        f"|log π/μ| is {first:.2g} up to token {edges[0]:,.0f} and {last:.2g} from token {edges[-1]:,.0f} of the "
        f"{'context' if is_from_prompt else 'response'}{'' if is_within else ', compared between responses'} "
        f"(z = {z:.1f}; {len(np.unique(part.row))} responses, k3 there {k3:.1e})"
    )
    # The part of the deepest shifts that, extrapolated to depth 0, is there without growth.
    _, start = np.polyfit(np.bincount(fifth, part.depth) / count, sizes, 1)
    is_all = bool(start / sizes[-1] <= MAX_BASE)
    shallow = tokens.select(tokens.depth <= edges[0])
    moved, sure = len(tokens) - len(shallow), confidence(z, GROWTH_Z)
    return [CauseMatch("long-context", evidence, shallow, moved, sure, is_final=is_all)]


def _spans_enough(tokens: LogprobPairs) -> np.ndarray:
    """Returns the tokens of responses whose depths, which ascend, differ enough."""
    first = np.flatnonzero(np.diff(tokens.row, prepend=-1))
    lengths = np.diff(first, append=len(tokens))
    return np.repeat(tokens.depth[first + lengths - 1] - tokens.depth[first] >= MIN_SPAN, lengths)


def _among_similar(tokens: LogprobPairs) -> np.ndarray:
    """Returns each log size minus the mean of tokens of similar log-prob and one age."""
    edges = np.quantile(tokens.behavior, np.arange(1, SURPRISE_BINS) / SURPRISE_BINS)
    similar = np.searchsorted(edges, tokens.behavior)
    if tokens.age is not None:
        similar = similar + SURPRISE_BINS * tokens.age
    return centered(log_size(tokens.shift), similar)
