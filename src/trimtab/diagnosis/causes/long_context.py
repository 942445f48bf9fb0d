"""Detects `long-context`: the mismatch grows with the depth of a token in its context.

Attention over more keys accumulates other rounding errors in other kernels, and rotary embeddings lose precision at
large positions, so that trainer and sampler drift apart with depth. Depth is the prompt's length, where it is known,
plus the position in the response.

Later tokens may also be less certain, of other weights, or in other responses. So the shift of logits is ranked among
tokens of about the same probability and the same age, and followed within each response. The rank must grow with the
logarithm of the depth, by `MIN_Z` standard errors over responses, and shifts must grow `MIN_GROWTH` times from the
shallowest to the deepest fifth, through the fifths between. The size of rounding differs between texts by up to 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, confidence
from trimtab.diagnosis.causes.what_is_left import Context, Finding
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

SPAN = 1024
"""Smallest difference in depth, in tokens, that counts: over less, the form of an answer has a larger effect."""
OFFSET = 256.0  # tokens added to depths, so that their logarithm does not stretch the first ones
FIFTHS, MIN_GROWTH, MIN_LOWER_GROWTH, MIN_Z = 5, 2.0, 1.5, 6.0
MIN_TOKENS, MIN_RESPONSES, SURPRISE_BINS, LARGEST = 500, 20, 20, 10.0
MAX_BASE = 0.35
"""Largest part of the deepest shifts that, extrapolated to depth 0, counts as part of the growth."""
SAMPLES = 400
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
    depth, is_from_prompt = tokens.depth, bool((tokens.depth > tokens.position).any())
    chosen = tokens.middle & _spans_enough(tokens, depth)
    is_within = chosen.sum() >= MIN_TOKENS and len(np.unique(tokens.row[chosen])) >= MIN_RESPONSES
    if not is_within:  # short responses to prompts of very different lengths
        chosen = tokens.middle
        if not is_from_prompt or chosen.sum() < MIN_TOKENS or np.ptp(depth[chosen]) < SPAN:
            return []
    growth = _measure(tokens.select(chosen), depth[chosen], is_within=is_within)
    if growth is None or not growth.is_clear or not growth.is_above(context.floor):
        return []
    where = "of the context" if is_from_prompt else "of the response"
    where += "" if is_within else ", compared between responses"
    evidence = (
        f"log-ratios grow with depth, {growth.times:.1f} times ({growth.low:.1f} to {growth.high:.1f}) for tokens of "
        f"the same probability: |log π/μ| is {growth.first:.2g} up to token {growth.shallow:,.0f} and "
        f"{growth.last:.2g} from token {growth.deep:,.0f} {where} (z = {growth.z:.1f}; "
        f"{growth.responses} responses, k3 there {growth.k3:.1e})"
    )
    shallow = tokens.select(depth <= growth.shallow)
    sure = confidence(growth.z, MIN_Z)
    return [
        Finding(
            "long-context", evidence, FIX, shallow, len(tokens) - len(shallow), sure, is_final=growth.base <= MAX_BASE
        )
    ]


@dataclass(frozen=True)
class _Growth:
    """How shifts grow from the shallowest to the deepest fifth.

    times, low, high: their ratio at equal probability, with its 95% interval. z: of the trend of ranks. is_monotonic:
    whether no fifth is below the one before by more than a tenth. first, last: mean |log-ratio| of both. shallow, deep:
    depths where they end and begin. rms, k3: of the deepest. base: the part of its shifts that is there at depth 0.
    """

    times: float
    low: float
    high: float
    z: float
    is_monotonic: bool
    first: float
    last: float
    shallow: float
    deep: float
    rms: float
    k3: float
    base: float
    responses: int

    @property
    def is_clear(self) -> bool:
        return self.z > MIN_Z and self.times > MIN_GROWTH and self.low > MIN_LOWER_GROWTH and self.is_monotonic

    def is_above(self, floor: float) -> bool:
        return self.rms > LIMITS["least-rms"] and self.k3 > max(LIMITS["least-k3"], 3 * floor)


def _spans_enough(tokens: LogprobPairs, depth: np.ndarray) -> np.ndarray:
    """Returns the tokens of responses that span at least `SPAN` tokens of depth."""
    lowest = np.full(tokens.table.responses, np.inf)
    highest = np.full(tokens.table.responses, -np.inf)
    np.minimum.at(lowest, tokens.row, depth)
    np.maximum.at(highest, tokens.row, depth)
    return (highest - lowest >= SPAN)[tokens.row]


def _measure(tokens: LogprobPairs, depth: np.ndarray, *, is_within: bool) -> _Growth | None:
    shift, (_, row) = np.abs(tokens.shift), np.unique(tokens.row, return_inverse=True)
    rank, relative = _among_similar(tokens, shift)
    x = np.log(depth + OFFSET)
    z = _trend(x, rank, row, is_within=is_within)
    edges = np.quantile(depth, np.arange(1, FIFTHS) / FIFTHS)
    fifth = np.searchsorted(edges, depth, side="left")
    count = np.bincount(fifth, minlength=FIFTHS)
    if count.min() < MIN_TOKENS / FIFTHS / 2:
        return None
    sizes = np.bincount(fifth, relative, FIFTHS) / count
    if sizes[-1] <= 0:  # no difference at all
        return None
    times, low, high = _ratio(relative, fifth, row)
    mean_depth = np.bincount(fifth, depth, FIFTHS) / count
    _, start = np.polyfit(mean_depth, sizes, 1)
    log_ratio, deepest = tokens.log_ratio, fifth == FIFTHS - 1
    near = np.clip(log_ratio[deepest], -20, 20)
    return _Growth(
        times=times,
        low=low,
        high=high,
        z=z,
        is_monotonic=bool((sizes[1:] > 0.9 * sizes[:-1]).all()),
        first=float(np.abs(log_ratio[fifth == 0]).mean()),
        last=float(np.abs(log_ratio[deepest]).mean()),
        shallow=float(edges[0]),
        deep=float(edges[-1]),
        rms=float(np.sqrt(np.square(np.minimum(shift[deepest], LARGEST)).mean())),
        k3=float((np.expm1(near) - near).mean()),
        base=float(start / sizes[-1]),
        responses=int(row.max()) + 1,
    )


def _among_similar(tokens: LogprobPairs, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each shift's rank, 0 to 1, and its ratio to the mean, among tokens of similar log-prob and one age."""
    edges = np.quantile(tokens.behavior, np.arange(1, SURPRISE_BINS) / SURPRISE_BINS)
    similar = np.searchsorted(edges, tokens.behavior)
    if tokens.age is not None:
        similar = similar + SURPRISE_BINS * tokens.age
    _, similar = np.unique(similar, return_inverse=True)
    count = np.bincount(similar)
    order = np.lexsort((shift, similar))
    rank = np.empty(len(shift))
    rank[order] = np.arange(len(shift)) - (np.cumsum(count) - count)[similar[order]]
    mean = np.bincount(similar, shift) / count
    ratio = np.minimum(shift / np.maximum(mean, 1e-12)[similar], LARGEST)
    return (rank + 0.5) / count[similar], ratio


def _trend(x: np.ndarray, y: np.ndarray, row: np.ndarray, *, is_within: bool) -> float:
    """Returns the z of the slope of y over x with responses as clusters; `is_within`: inside of responses only."""
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


def _ratio(relative: np.ndarray, fifth: np.ndarray, row: np.ndarray) -> tuple[float, float, float]:
    """Returns the ratio of mean shifts in the last fifth to the first, with its 95% interval over responses."""
    first, last = fifth == 0, fifth == FIFTHS - 1
    responses = int(row.max()) + 1
    sums = np.column_stack(
        [np.bincount(row, values, responses) for values in (relative * last, last, relative * first, first)]
    )
    drawn = np.random.default_rng(0).multinomial(responses, np.full(responses, 1 / responses), SAMPLES) @ sums

    def ratio(total: np.ndarray) -> np.ndarray:
        last_sum, last_count, first_sum, first_count = np.maximum(total, 1e-12).T
        return (last_sum / last_count) / (first_sum / first_count)

    low, high = np.quantile(ratio(drawn), (0.025, 0.975))
    return float(ratio(sums.sum(0))), float(low), float(high)
