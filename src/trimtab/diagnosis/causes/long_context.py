"""Detects `long-context`: the mismatch grows with the depth of a token in its context.

Attention over more keys accumulates other rounding errors in other kernels, and rotary embeddings lose precision at
large positions, so that trainer and sampler drift apart with depth. Depth is the prompt's length, where it is known,
plus the position in the response.

Later tokens may also be less certain, of other weights, or in other responses. So the log size of the logit shift is
measured against the mean of tokens of about the same probability and the same age, and followed within each response.
It must grow with the logarithm of the depth, by `depth-z` standard errors over responses, and sizes must grow
`depth-growth` times from the shallowest to the deepest fifth, through the fifths between. The size of rounding differs
between texts by up to 2.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, confidence
from trimtab.diagnosis.causes.noise_groups import log_size, rms_of
from trimtab.diagnosis.causes.what_is_left import Context, Finding, Left
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

OFFSET = 256.0  # tokens added to depths, so that their logarithm does not stretch the first ones
FIFTHS, SURPRISE_BINS, LARGEST = 5, 20, 10.0
FIX = (
    'Compute attention alike on both sides: the same kernel or invariant numerics (numerics = "invariant" in '
    "Trimtab), rotary angles and positions in float32 with the same rope scaling, and no other split of long "
    "sequences (context parallelism, chunked prefill) than the sampler's. Until then, a mask that bounds the ratio of "
    "each token keeps the deepest ones out."
)


def find_depth_growth(tokens: LogprobPairs, context: Context) -> list[Finding]:
    """Detects growth with depth, and leaves the shallowest tokens."""
    if context.against:  # log-ratios follow the shape of distributions, which may change along a response
        return []
    is_from_prompt = bool((tokens.depth > tokens.position).any())
    chosen = tokens.middle & _spans_enough(tokens)
    is_within = chosen.sum() >= LIMITS["depth-tokens"]
    is_within = is_within and len(np.unique(tokens.row[chosen])) >= LIMITS["depth-responses"]
    if not is_within:  # short responses to prompts of very different lengths
        chosen = tokens.middle
        few = chosen.sum() < LIMITS["depth-tokens"]
        if not is_from_prompt or few or np.ptp(tokens.depth[chosen]) < LIMITS["depth-span"]:
            return []
    part = tokens.select(chosen)
    relative = _among_similar(part)
    z = _trend(np.log(part.depth + OFFSET), relative, part.row, is_within=is_within)
    edges = np.quantile(part.depth, np.arange(1, FIFTHS) / FIFTHS)
    fifth = np.searchsorted(edges, part.depth, side="left")
    count = np.bincount(fifth, minlength=FIFTHS)
    if z < LIMITS["depth-z"] or count.min() < LIMITS["depth-tokens"] / FIFTHS / 2:
        return []
    sizes = np.exp(np.bincount(fifth, relative) / count)
    times = float(sizes[-1] / sizes[0])
    low, high = (times ** (1 + side * 1.96 / z) for side in (-1, 1))
    is_clear = times > LIMITS["depth-growth"] and low > LIMITS["depth-growth-low"]
    if not is_clear or (sizes[1:] < 0.9 * sizes[:-1]).any():
        return []
    ends = part.select(fifth == 0), part.select(fifth == FIFTHS - 1)
    k3 = Left.of(ends[1]).k3
    if rms_of(np.clip(ends[1].shift, -LARGEST, LARGEST)) < LIMITS["least-rms"]:
        return []
    if k3 < max(LIMITS["least-k3"], 3 * context.floor):
        return []
    first, last = (float(np.abs(end.log_ratio).mean()) for end in ends)
    where = f"of the {'context' if is_from_prompt else 'response'}{'' if is_within else ', compared between responses'}"
    evidence = (
        f"log-ratios grow with depth, {times:.1f} times ({low:.1f} to {high:.1f}) for tokens of the same probability: "
        f"|log π/μ| is {first:.2g} up to token {edges[0]:,.0f} and {last:.2g} from token {edges[-1]:,.0f} {where} "
        f"(z = {z:.1f}; {len(np.unique(part.row))} responses, k3 there {k3:.1e})"
    )
    # The part of the deepest shifts that, extrapolated to depth 0, is there without growth.
    _, start = np.polyfit(np.bincount(fifth, part.depth) / count, sizes, 1)
    grown = start / sizes[-1] <= LIMITS["depth-base"]
    shallow = tokens.select(tokens.depth <= edges[0])
    moved, sure = len(tokens) - len(shallow), confidence(z, LIMITS["depth-z"])
    return [Finding("long-context", evidence, FIX, shallow, moved, sure, is_final=bool(grown))]


def _spans_enough(tokens: LogprobPairs) -> np.ndarray:
    """Returns the tokens of responses whose depths differ enough."""
    lowest = np.full(tokens.table.responses, np.inf)
    highest = np.full(tokens.table.responses, -np.inf)
    np.minimum.at(lowest, tokens.row, tokens.depth)
    np.maximum.at(highest, tokens.row, tokens.depth)
    return (highest - lowest >= LIMITS["depth-span"])[tokens.row]


def _among_similar(tokens: LogprobPairs) -> np.ndarray:
    """Returns each log size minus the mean of tokens of similar log-prob and one age."""
    edges = np.quantile(tokens.behavior, np.arange(1, SURPRISE_BINS) / SURPRISE_BINS)
    similar = np.searchsorted(edges, tokens.behavior)
    if tokens.age is not None:
        similar = similar + SURPRISE_BINS * tokens.age
    _, similar = np.unique(similar, return_inverse=True)
    size = log_size(tokens.shift)
    return size - (np.bincount(similar, size) / np.bincount(similar))[similar]


def _trend(x: np.ndarray, y: np.ndarray, row: np.ndarray, *, is_within: bool) -> float:
    """Returns the z of the slope of y over x with responses as clusters; `is_within`: inside of responses only."""
    _, row = np.unique(row, return_inverse=True)
    if is_within:
        count = np.bincount(row)
        x, y = (values - (np.bincount(row, values) / count)[row] for values in (x, y))
    else:
        x, y = x - x.mean(), y - y.mean()
    power = float(x @ x)
    if power <= 0:
        return 0.0
    slope = float(x @ y) / power
    error = np.sqrt(np.square(np.bincount(row, x * (y - slope * x))).sum()) / power
    return slope / max(float(error), 1e-12)
