"""Says `unexplained` of a mismatch that no cause accounts for, with what is known about it."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs
from trimtab.diagnosis.causes.precision import objection
from trimtab.diagnosis.causes.turns import turn_numbers
from trimtab.diagnosis.causes.what_is_left import Left
from trimtab.diagnosis.records import Cause
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS
from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP, TokenTable

FIX = (
    "Look for it before you choose a correction: score one response of this data again with the trainer and with the "
    "engine, and compare token by token (the same ids, the same weights, the same template, logarithms of base e)."
)


def unexplained(tokens: LogprobPairs, left: Left, floor: float, rest_only: bool) -> Cause | None:
    """Returns the cause, None within the noise floor; `rest_only`: whether other causes were found and undone."""
    if left.contract == "inside" and left.k3 < max(LIMITS["least-k3"], 3 * floor):
        return None
    correlation = float(np.corrcoef(np.exp(tokens.behavior), np.exp(tokens.trainer))[0, 1])
    evidence = f"k3 {left.k3:.2g}, {left.text}, correlation of the probabilities {correlation:.2f}"
    if reason := objection(tokens, left):
        evidence += f": {reason}"
    evidence += _where(tokens)
    tokens_text = "after the causes above are undone, " if rest_only else ""
    return Cause("unexplained", LIMITS["confidence-unexplained"], tokens_text + evidence, FIX, 1.0, left.tokens)


def above_zero(table: TokenTable) -> Cause | None:
    """Returns `unexplained` for values above 0 that vary, which no logarithm of a probability is."""
    largest = np.maximum(table.behavior, table.trainer)[table.mask]
    count = int((largest > MAX_ROUNDED_LOGP).sum())
    if count < LIMITS["placeholder-tokens"]:
        return None
    evidence = (
        f"values are above 0 at {count} of {int(table.mask.sum())} tokens, up to {float(np.nanmax(largest)):.3g}: they "
        "are not natural logarithms of probabilities"
    )
    fix = (
        "Check what the column holds (probabilities, negated log-probs, sums over several tokens) and write log-probs."
    )
    return Cause("unexplained", LIMITS["confidence-above-zero"], evidence, fix, tokens=count)


def _where(tokens: LogprobPairs) -> str:
    """Points at the group of tokens (a turn, a step, a stretch of responses) with far more k3 than the others."""
    log_ratio = np.clip(tokens.log_ratio, -20, 20)
    k3 = np.expm1(log_ratio) - log_ratio
    step = tokens.of_response(tokens.table.step)
    groups = {"turn": turn_numbers(tokens), "tenth of the response": tokens.table.decile[tokens.index] + 1}
    if step is not None:
        groups["step"] = step
    best, text = LIMITS["group-lift"], ""
    for name, group in groups.items():
        for value in np.unique(group)[:1000]:
            inside = group == value
            part, mass = inside.mean(), k3[inside].sum() / max(k3.sum(), 1e-300)
            if LIMITS["group-part"] < part < 0.9 and mass > best * part:
                best, text = mass / part, f"; {name} {value} holds {mass:.0%} of k3 with {part:.0%} of the tokens"
    return text
