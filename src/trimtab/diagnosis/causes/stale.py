"""Detects `stale`: the sampler used older weights.

With versions, the shift of logits must grow with age (a ratio of at least `MIN_GROWTH` and `MIN_GROWTH_Z` standard
errors of the mean log size). Without them there are three indications. Updates raise the probability of what had
positive advantage, so that a response's log-ratio correlates with its advantage beyond what its log-prob explains;
rounding is independent of the reward. Lag varies between steps; rounding does not. Drift shifts a token the same way in
every context; rounding errors are nearly independent between contexts (tested for vocabularies of words, not of
characters).
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, confidence
from trimtab.diagnosis.causes.precision import ID_BONUS, Noise, noise_of
from trimtab.diagnosis.causes.steps import MIN_GROWTH_Z, MIN_RMS, MIN_TOKENS, drift_between_steps, growth_of, rms_of
from trimtab.diagnosis.causes.what_is_left import Context, Finding, Left
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

MIN_GROWTH = 1.15
MIN_CORRELATION, MIN_CORRELATION_Z, STRONG_CORRELATION, STRONG_CORRELATION_Z, MIN_CORRELATION_AT_AGE_0 = (
    0.15,
    5.0,
    0.3,
    3.5,
    0.3,
)
MAX_FINE_COARSENESS = -0.8
FIX = (
    "Refresh the sampler's weights more often or bound the lag (max_lag); otherwise correct with weights of "
    "proximal over behavior and log versions to separate lag from rounding."
)

FIX_UNDELIVERED = (
    "Compare the sampler's weights with the trainer's after a publication (a checksum of each tensor, or the log-probs "
    "of one fixed text on both sides); with LoRA, whether the adapter's name and version change with each one."
)


def find_drift(tokens: LogprobPairs, context: Context) -> list[Finding]:
    """Detects old weights, and leaves the tokens of age 0, or those of the step with the least drift."""
    noise = noise_of(tokens, context)
    correlation = None if context.against or noise.rms < MIN_RMS else _reward_correlation(tokens)
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
        return [_all(tokens, evidence, confidence(z, MIN_CORRELATION_Z))]
    if tokens.age is not None or context.against:
        return []
    if (steps := drift_between_steps(tokens)) is not None:
        return [_all(tokens, steps.text + ": the size of rounding does not vary, that of lag does", 0.6)]
    fine = noise.rms >= MIN_RMS and noise.coarseness < MAX_FINE_COARSENESS + ID_BONUS
    if noise.depends_on_ids and fine:
        evidence = (
            f"{noise.persistent:.0%} of the shift of logits depends on the token id, unlike rounding, and is too "
            f"small for quantized weights (rms {noise.rms:.2g})"
        )
        return [_all(tokens, evidence, 0.6)]
    return []


def _all(tokens: LogprobPairs, evidence: str, sure: float) -> Finding:
    """Returns a finding that concerns all tokens, so that nothing is left to examine."""
    return Finding("stale", evidence, FIX, tokens, len(tokens), sure, is_final=True)


def find_undelivered(tokens: LogprobPairs, context: Context) -> list[Finding]:
    """Detects weights that never reach the sampler: age 0 at every step, and a difference that grows with the steps."""
    if context.against or tokens.age is None or tokens.age.any():
        return []
    if (steps := drift_between_steps(tokens)) is None or steps.order < LIMITS["undelivered-order"]:
        return []
    step = tokens.of_response(tokens.table.step)
    assert step is not None
    first = tokens.select(step == steps.steps[0])
    k3 = [Left.of(tokens.select(step == number)).k3 for number in (steps.steps[0], steps.steps[-1])]
    evidence = (
        f"every token is of age 0 by its versions, but k3 grows from {k3[0]:.1e} at step {steps.steps[0]} to "
        f"{k3[1]:.1e} at step {steps.steps[-1]} ({k3[1] / max(k3[0], 1e-12):.0f} times), in the order of the steps: "
        "the trainer moves away from weights that the sampler keeps"
    )
    return [Finding("undelivered", evidence, FIX_UNDELIVERED, first, len(tokens) - len(first), 0.95)]


def _drift_by_age(tokens: LogprobPairs, noise: Noise, correlation: tuple[float, float] | None) -> list[Finding]:
    age = tokens.age
    assert age is not None
    middle = tokens.middle
    ages = [int(a) for a in np.unique(age) if (middle & (age == a)).sum() >= MIN_TOKENS]
    corr, z = correlation or (0.0, 0.0)
    correlated = f"; log-ratios correlate with advantage (correlation {corr:.2f}, z = {z:.1f})" if z > 4 else ""
    if len(ages) >= 2:
        young, old = middle & (age == ages[0]), middle & (age > ages[0])
        growth, growth_z = growth_of(tokens.shift[old], tokens.shift[young])
        if growth > MIN_GROWTH and growth_z > MIN_GROWTH_Z and rms_of(tokens.shift[old]) > MIN_RMS:
            times = f"{growth:.2f} times" if growth < 100 else "over 100 times"
            evidence = (
                f"logits of tokens older than {ages[0]} updates moved {times} as far as at age {ages[0]} "
                f"(z = {growth_z:.1f}; {int(old.sum())} and {int(young.sum())} tokens){correlated}"
            )
            fresh = tokens.select(age == 0)
            sure = confidence(growth_z, MIN_GROWTH_Z)
            return [Finding("stale", evidence, FIX, fresh, int((age > 0).sum()), sure, is_final=0 not in ages)]
        if 0 in ages and not correlated:
            return []
    if noise.rms < MIN_RMS:
        return []
    certainty = confidence(z, 4.0) if correlated else 0.6 if noise.coarseness > 0 or noise.depends_on_ids else 0.5
    size = f"logits move by {noise.rms:.2g}, " + ("more than" if noise.coarseness > 0 else "within")
    evidence = (
        f"tokens are {float(age.mean()):.1f} updates old and {size} what 16-bit rounding gives{correlated}; no tokens "
        "of another age are available to distinguish lag from rounding"
    )
    is_final = noise.coarseness > 0 or bool(correlated)
    return [Finding("stale", evidence, FIX, tokens, len(tokens), certainty, is_final=is_final)]


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
