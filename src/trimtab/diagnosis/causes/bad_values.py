"""Names the causes that need no repair of tokens, since reading left the values out: values that are not log-probs."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.measure.placeholders import MIN_CONTRADICTED
from trimtab.diagnosis.records import Cause, DataSummary, Measured, Placeholder
from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP, TokenTable

CONFIDENCE_ABOVE_ZERO = 0.9  # confidence of unexplained where values are above 0

_PLACES = {
    "last": "at the last token",
    "end": "at the end",
    "start": "at the start",
    "stretch": "in stretches",
    "single": "at single tokens",
}
_SIDES = {"behavior": "the sampler's log-prob is", "trainer": "the trainer's log-prob is", "both": "both log-probs are"}


def find_placeholder(measured: Measured) -> Cause | None:
    """Names the constants that `measure.placeholders` found."""
    found = sorted(measured.placeholders, key=lambda placeholder: -placeholder.tokens)
    if not found:
        return None
    trained, size = measured.origin.trained, measured.size.mismatch
    if not measured.cleaned:
        evidence = (
            f"{_SIDES[found[0].column]} {found[0].value:.1f} at every token: the values never arrived, or decoding was "
            "greedy (temperature 0)"
        )
        tokens = min(sum(placeholder.tokens for placeholder in found), trained)
        return Cause("placeholder", 0.97, evidence, tokens=tokens)
    tokens, before = measured.removed, measured.k3_before
    evidence = f"{'; '.join(map(_sentence, found[:4]))}. These {tokens} tokens are left out of every figure here"
    share = float(np.clip(1 - size["k3"] * trained / (before * (trained + tokens)), 0, 1)) if before > 0 else None
    repaired = {"k3": size["k3"], "ratio_mean": size["ratio_mean"]}
    return Cause("placeholder", 0.97, evidence, share_of_k3=share, tokens=tokens, repaired=repaired)


def _sentence(found: Placeholder) -> str:
    where = f"{_PLACES[found.place]} of {found.responses} responses"
    certain = ", the other side is far from certain" if found.column != "both" and found.value == 0 else ""
    return f"{_SIDES[found.column]} {found.value:.1f} at {found.tokens} tokens {where}{certain}"


def find_nonfinite(origin: DataSummary) -> Cause | None:
    """Names infinite and missing values, which reading counted and left out."""
    if not any(origin.nonfinite.values()):
        return None
    counts = ", ".join(f"{count} {name}" for name, count in origin.nonfinite.items() if count)
    evidence = f"values that are not finite at trained tokens: {counts}"
    return Cause("non-finite", 0.99, evidence, tokens=sum(origin.nonfinite.values()))


def find_above_zero(table: TokenTable) -> Cause | None:
    """Says `unexplained` of values above 0 that vary, which no logarithm of a probability is."""
    largest = np.maximum(table.behavior, table.trainer)[table.mask]
    count = int((largest > MAX_ROUNDED_LOGP).sum())
    if count < MIN_CONTRADICTED:
        return None
    evidence = (
        f"values are above 0 at {count} of {int(table.mask.sum())} tokens, up to {float(np.nanmax(largest)):.3g}: they "
        "are not natural logarithms of probabilities, but perhaps probabilities, negated log-probs or sums of several "
        "tokens"
    )
    return Cause("unexplained", CONFIDENCE_ABOVE_ZERO, evidence, tokens=count)
