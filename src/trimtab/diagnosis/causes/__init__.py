"""Names the causes of a mismatch from the log-probs of sampled tokens, with evidence.

Everything rests on three facts about tokens y drawn from mu and a trainer pi:

    E[pi/mu] = 1        if the log-probs reported are those of the distribution really sampled, and pi covers no more
    logit pi = a logit mu + (a - 1) h      if both are one model at two temperatures (a > 0, h >= 0 mean a context's
                                           Renyi entropy of the tokens not sampled)
    noise moves logits   bfloat16, quantised weights and old weights shift logits up and down: the ratio keeps mean 1

`find_causes` applies them in order: what pairs wrong tokens (`misaligned`, `swapped`, `retokenized`) is repaired or set
aside first, then what is systematic (`sampling_faults`), then the size and origin of the noise that is left
(`precision`, `stale`).
"""

from __future__ import annotations

from trimtab.diagnosis.causes.evidence import Tokens
from trimtab.diagnosis.causes.misaligned import find_shifts
from trimtab.diagnosis.causes.precision import name_noise, noise_beside, noise_of
from trimtab.diagnosis.causes.retokenized import find_retokenized
from trimtab.diagnosis.causes.sampling_faults import find_broken
from trimtab.diagnosis.causes.stale import find_drift
from trimtab.diagnosis.causes.swapped import find_swapped_responses
from trimtab.diagnosis.records import Cause, Measured, Origin, Settings

FEWEST = 100
"""Trained tokens below which nothing but non-finite values is named."""


def find_causes(measured: Measured) -> tuple[Cause, ...]:
    """What kind of mismatch the data shows, most confident first; empty when nothing is beyond the noise floor.

    Read from `measured.sample`, `measured.origin` (values that are not finite, the run's settings) and the floor in
    `measured.size`. Rules and what is identifiable from which columns: docs/causes.md.
    """
    found = [cause] if (cause := _non_finite(measured.origin)) else []
    tokens = Tokens.of(measured.sample)
    if len(tokens) >= FEWEST:
        found += _of_tokens(tokens, measured.size.floor, measured.origin.settings)
    return tuple(sorted(found, key=lambda cause: -cause.confidence))


def _of_tokens(tokens: Tokens, floor: float, settings: Settings | None) -> list[Cause]:
    found: list[Cause] = []
    for search in (find_shifts, find_swapped_responses, find_retokenized):
        cause, tokens = search(tokens)
        # Edges of a shift from a turn on also look like jumps there: one cause, said once.
        if cause is not None and cause.name not in (one.name for one in found):
            found.append(cause)
    if len(tokens) < FEWEST // 2:
        return found
    broken, line, cut = find_broken(tokens, repaired=bool(found))
    found += broken
    systematic = line is not None or cut is not None
    sampler_cut = any(cause.name == "truncated-sampling" for cause in broken)
    rest = noise_beside(tokens, line, sampler_cut=sampler_cut) if systematic else noise_of(tokens)
    drift = find_drift(tokens, rest, systematic=systematic)
    if drift.cause is not None:
        found.append(drift.cause)
    if drift.fresh is not None:
        fresh = noise_of(drift.fresh) if not systematic else rest
        if (cause := name_noise(fresh, floor, settings)) is not None:
            found.append(cause)
    return found


def _non_finite(origin: Origin) -> Cause | None:
    if not any(origin.nonfinite.values()):
        return None
    counts = ", ".join(f"{count} {name}" for name, count in origin.nonfinite.items() if count)
    fix = (
        "An infinite log-prob is a token outside the kept set of top-k, top-p or a vocabulary mask; NaN is an "
        "overflow. Score sampled tokens with the same masks, and compute the log-softmax in float32."
    )
    return Cause("non-finite", 0.99, f"values that are not finite at trained tokens: {counts}", fix)
