"""Detects `stale`: the sampler used older weights.

With versions, the shift of logits must grow with age (a ratio of at least `MIN_GROWTH` and `MIN_GROWTH_Z` standard
errors of the mean log size). Without them there are three indications. Updates raise the probability of what had
positive advantage, so that a response's log-ratio correlates with its advantage beyond what its log-prob explains;
rounding is independent of the reward. Lag varies between steps; rounding does not. Drift shifts a token the same way in
every context; rounding errors are nearly independent between contexts (tested for vocabularies of words, not of
characters).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, confidence
from trimtab.diagnosis.causes.precision import ID_BONUS, MIN_RMS, Noise
from trimtab.diagnosis.records import Cause

MIN_GROWTH, MIN_GROWTH_Z = 1.15, 5.0
MIN_CORRELATION, MIN_CORRELATION_Z, STRONG_CORRELATION, STRONG_CORRELATION_Z, MIN_CORRELATION_AT_AGE_0 = (
    0.15,
    5.0,
    0.3,
    3.5,
    0.3,
)
MAX_FINE_COARSENESS = -0.8
MIN_STEP_GROWTH = 1.8
MIN_TOKENS = 40
FIX = (
    "Refresh the sampler's weights more often or bound the lag (max_lag); otherwise correct with weights of "
    "proximal over behavior and log versions to separate lag from rounding."
)


@dataclass(frozen=True)
class DriftResult:
    """The result of `find_drift`.

    cause: `stale`, if detected. undrifted: tokens whose difference is not drift, those of age 0 if known, or None.
    """

    cause: Cause | None
    undrifted: LogprobPairs | None


def find_drift(tokens: LogprobPairs, noise: Noise, *, systematic: bool) -> DriftResult:
    """Detects staleness. `noise` is that of all tokens; `systematic`: whether other causes distort it."""
    correlation = None if systematic or noise.rms < MIN_RMS else _reward_correlation(tokens)
    if tokens.age is not None and tokens.age.any():
        return _drift_by_age(tokens, noise, correlation)
    corr, z = correlation or (0.0, 0.0)
    threshold = MIN_CORRELATION if tokens.age is None else MIN_CORRELATION_AT_AGE_0
    if corr > threshold and z > (
        STRONG_CORRELATION_Z if corr > STRONG_CORRELATION and noise.coarseness > 0 else MIN_CORRELATION_Z
    ):
        despite = "" if tokens.age is None else " although the file says age 0"
        evidence = (
            f"log-ratios of responses correlate with their advantage{despite}: correlation {corr:.2f}, z = {z:.1f}"
        )
        return DriftResult(Cause("stale", confidence(z, MIN_CORRELATION_Z), evidence, FIX), None)
    if tokens.age is None and not systematic and (evidence := _drift_between_steps(tokens)) is not None:
        return DriftResult(Cause("stale", 0.6, evidence, FIX), None)
    fine = noise.rms >= MIN_RMS and noise.coarseness < MAX_FINE_COARSENESS + ID_BONUS
    if tokens.age is None and not systematic and noise.depends_on_ids and fine:
        evidence = (
            f"{noise.persistent:.0%} of the shift of logits depends on the token id, unlike rounding, and is too "
            f"small for quantized weights (rms {noise.rms:.2g})"
        )
        return DriftResult(Cause("stale", 0.6, evidence, FIX), None)
    return DriftResult(None, tokens)


def _drift_by_age(tokens: LogprobPairs, noise: Noise, correlation: tuple[float, float] | None) -> DriftResult:
    age = tokens.age
    assert age is not None
    middle = tokens.middle
    ages = [int(a) for a in np.unique(age) if (middle & (age == a)).sum() >= MIN_TOKENS]
    fresh = tokens.select(age == 0) if 0 in ages else None
    corr, z = correlation or (0.0, 0.0)
    correlated = f"; log-ratios correlate with advantage (correlation {corr:.2f}, z = {z:.1f})" if z > 4 else ""
    if len(ages) >= 2:
        young, old = middle & (age == ages[0]), middle & (age > ages[0])
        growth, growth_z = _growth(tokens.shift[old], tokens.shift[young])
        if growth > MIN_GROWTH and growth_z > MIN_GROWTH_Z and _rms(tokens.shift[old]) > MIN_RMS:
            times = f"{growth:.2f} times" if growth < 100 else "over 100 times"
            evidence = (
                f"logits of tokens older than {ages[0]} updates moved {times} as far as at age {ages[0]} "
                f"(z = {growth_z:.1f}; {int(old.sum())} and {int(young.sum())} tokens){correlated}"
            )
            return DriftResult(Cause("stale", confidence(growth_z, MIN_GROWTH_Z), evidence, FIX), fresh)
        if fresh is not None and not correlated:
            return DriftResult(None, tokens)
    if noise.rms < MIN_RMS:
        return DriftResult(None, tokens)
    certainty = confidence(z, 4.0) if correlated else 0.6 if noise.coarseness > 0 or noise.depends_on_ids else 0.5
    size = f"logits move by {noise.rms:.2g}, " + ("more than" if noise.coarseness > 0 else "within")
    evidence = (
        f"tokens are {float(age.mean()):.1f} updates old and {size} what 16-bit rounding gives{correlated}; no tokens "
        "of another age are available to distinguish lag from rounding"
    )
    return DriftResult(
        Cause("stale", certainty, evidence, FIX), tokens if noise.coarseness <= 0 and not correlated else None
    )


def _rms(shift: np.ndarray) -> float:
    return float(np.sqrt(np.square(shift).mean()))


def _growth(old: np.ndarray, young: np.ndarray) -> tuple[float, float]:
    """Returns the ratio of the geometric mean sizes, and the z of its logarithm."""
    left, right = np.log(np.abs(old) + 1e-6), np.log(np.abs(young) + 1e-6)
    difference = float(left.mean() - right.mean())
    error = np.sqrt(left.var() / len(left) + right.var() / len(right))
    return float(np.exp(difference)), difference / max(float(error), 1e-12)


def _reward_correlation(tokens: LogprobPairs) -> tuple[float, float] | None:
    """Returns the partial correlation of log-ratio and advantage of responses, given log-prob and length, and its z."""
    advantage = _advantage(tokens)
    if advantage is None:
        return None
    rows, index = np.unique(tokens.row, return_inverse=True)
    total = np.bincount(index, np.clip(tokens.log_ratio, -3, 3))
    others = np.stack([np.ones(len(rows)), np.bincount(index, tokens.behavior), np.bincount(index)], 1)
    value = advantage[rows]
    use = np.isfinite(value) & (value != 0)
    if use.sum() < 30:
        return None
    left, right = (_residual(v[use], others[use]) for v in (total, value))
    if left.std() < 1e-9 or right.std() < 1e-9:
        return None
    product = left * right / (left.std() * right.std())
    corr = float(product.mean())
    return corr, corr / max(float(product.std()) / np.sqrt(len(product)), 1e-12)


def _residual(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    return values - others @ np.linalg.lstsq(others, values, rcond=None)[0]


def _advantage(tokens: LogprobPairs) -> np.ndarray | None:
    """Returns advantages, or rewards minus their group's mean; None without either."""
    table = tokens.table
    if table.advantage is not None:
        return table.advantage
    if table.reward is None:
        return None
    if table.group is None:
        return table.reward - np.nanmean(table.reward)
    keys = (
        table.group if table.step is None else table.group + (table.step - table.step.min()) * (table.group.max() + 1)
    )
    _, index = np.unique(keys, return_inverse=True)
    known = np.isfinite(table.reward)
    total = np.bincount(index, np.where(known, table.reward, 0.0))
    return table.reward - (total / np.maximum(np.bincount(index, known), 1))[index]


def _drift_between_steps(tokens: LogprobPairs) -> str | None:
    """Returns evidence of noise whose size differs between steps, or None."""
    step = tokens.of_response(tokens.table.step)
    if step is None:
        return None
    middle, shift = tokens.middle, tokens.shift
    sizes = {int(s): shift[middle & (step == s)] for s in np.unique(step)}
    sizes = {s: v for s, v in sizes.items() if len(v) >= MIN_TOKENS}
    if len(sizes) < 2:
        return None
    order = sorted(sizes, key=lambda s: float(np.log(np.abs(sizes[s]) + 1e-6).mean()))
    growth, growth_z = _growth(sizes[order[-1]], sizes[order[0]])
    if growth < MIN_STEP_GROWTH or growth_z < MIN_GROWTH_Z + 1 or _rms(sizes[order[-1]]) < MIN_RMS:
        return None
    return (
        f"logits move {growth:.1f} times as far at step {order[-1]} as at step {order[0]} (z = {growth_z:.1f}): the "
        "size of rounding does not vary, that of lag does"
    )
