"""Infers the causes of a mismatch from the log-probs of sampled tokens, with evidence.

The rules follow from three facts about tokens y drawn from mu and a trainer pi:

    E[pi/mu] = 1        if the reported log-probs are those of the sampling distribution and pi has no larger support
    logit pi = a logit mu + (a - 1) h      if both are one model at two temperatures (a > 0; h >= 0 is a Renyi entropy
                                           of the context's tokens that were not sampled)
    noise moves logits   bfloat16, quantized weights and old weights shift logits up and down: the ratio keeps mean 1

`find_causes` applies them in this order: wrongly paired tokens (`misaligned`, `swapped`, `retokenized`) are repaired or
removed, then systematic shapes are found (`sampling_faults`), then size and origin of the remaining noise
(`long_context`, `stale`, `precision`).
"""

from __future__ import annotations

from trimtab.diagnosis.causes.evidence import LogprobPairs
from trimtab.diagnosis.causes.long_context import find_depth_growth
from trimtab.diagnosis.causes.misaligned import find_shifts
from trimtab.diagnosis.causes.precision import measure_noise, noise_cause, noise_lower_bound
from trimtab.diagnosis.causes.retokenized import find_retokenized
from trimtab.diagnosis.causes.sampling_faults import find_sampling_faults
from trimtab.diagnosis.causes.stale import find_drift
from trimtab.diagnosis.causes.swapped import find_swapped_responses
from trimtab.diagnosis.records import Cause, DataSummary, Measured, Settings

MIN_TOKENS = 100
"""Fewest trained tokens for which causes other than `non-finite` are inferred."""


def find_causes(measured: Measured) -> tuple[Cause, ...]:
    """Returns the causes of the mismatch, most confident first; empty when it is within the noise floor.

    Uses `measured.sample`, `measured.origin` (values that are not finite, the run's settings) and the floor in
    `measured.size`. Rules, and the columns that each needs: docs/causes.md.
    """
    causes = [cause] if (cause := _non_finite(measured.origin)) else []
    tokens = LogprobPairs.of(measured.sample)
    if len(tokens) >= MIN_TOKENS:
        causes += _infer_causes(tokens, measured.size.floor, measured.origin.settings)
    return tuple(sorted(causes, key=lambda cause: -cause.confidence))


def _infer_causes(tokens: LogprobPairs, floor: float, settings: Settings | None) -> list[Cause]:
    causes: list[Cause] = []
    for search in (find_shifts, find_swapped_responses, find_retokenized):
        cause, tokens = search(tokens)
        # The edges of a shift that starts at a turn also look like jumps: the same cause is reported once.
        if cause is not None and cause.name not in (known.name for known in causes):
            causes.append(cause)
    if len(tokens) < MIN_TOKENS // 2:
        return causes
    faults, fit, truncation = find_sampling_faults(tokens, repaired=bool(causes))
    causes += faults
    systematic = fit is not None or truncation is not None
    sampler_cut = any(cause.name == "truncated-sampling" for cause in faults)
    if not systematic:  # else log-ratios follow the shape of distributions, which may change along a response
        growth = find_depth_growth(tokens, floor)
        if growth.cause is not None:
            causes.append(growth.cause)
        if growth.rest is None or len(growth.rest) < MIN_TOKENS:
            return causes
        tokens = growth.rest
    noise = noise_lower_bound(tokens, fit, sampler_cut=sampler_cut) if systematic else measure_noise(tokens)
    drift = find_drift(tokens, noise, systematic=systematic)
    if drift.cause is not None:
        causes.append(drift.cause)
    if drift.undrifted is not None:
        remaining_noise = measure_noise(drift.undrifted) if not systematic else noise
        if (cause := noise_cause(remaining_noise, floor, settings)) is not None:
            causes.append(cause)
    return causes


def _non_finite(origin: DataSummary) -> Cause | None:
    if not any(origin.nonfinite.values()):
        return None
    counts = ", ".join(f"{count} {name}" for name, count in origin.nonfinite.items() if count)
    fix = (
        "An infinite log-prob is a token outside the kept set of top-k, top-p or a vocabulary mask; NaN is an "
        "overflow. Score sampled tokens with the same masks, and compute the log-softmax in float32."
    )
    return Cause("non-finite", 0.99, f"values that are not finite at trained tokens: {counts}", fix)
