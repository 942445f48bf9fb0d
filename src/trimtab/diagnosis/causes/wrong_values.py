"""Detects values that are not log-probs of these tokens: `log-base`, `wrong-token`, `copied`, `placeholder`, ...

`placeholder`, `non-finite` and values above 0 are found without a repair of tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from trimtab.diagnosis.causes.detector import CauseMatch, Context, LogprobPairs, Residual, share
from trimtab.diagnosis.measure.placeholders import MIN_CONTRADICTED
from trimtab.diagnosis.records import Cause, DataSummary, Measured, Placeholder
from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP, TokenTable

MAX_BASE_ERROR = 0.03  # largest error of the log of the median ratio of the two log-probs
MAX_BASE_SPREAD = 0.3  # largest median deviation of the log of that ratio
MAX_BASE_LEFT = 0.5  # share of the mean |log-ratio| that the conversion may leave
MIN_NOISE = 0.02  # nats: least size of noise
MAX_NOISE = 0.5  # nats: most noise in which the most likely token is told from others
MIN_FAR = 20  # fewest tokens that are not the most likely one
MAX_ABOVE = 0.05  # most tokens far above the sampler's log-prob, relative to those far below
UNLIKELY = -2.5  # nats below which a most likely token is seldom [bases: 12% of them]
MAX_IMPOSSIBLE = 0.1  # largest share of far tokens whose probabilities are impossible; of unlikely ones, half
MAX_SURPRISING = 3.0  # times as many far tokens as expected where the most likely one is almost certain
MAX_BETWEEN = 2.5  # largest ratio of tokens between noise and far to far ones [temperature: 1.9]
MIN_MISSED = 0.3  # least ratio of far tokens to those that were not the most likely [other ids: .18]
MAX_MISSED = 2.0  # largest ratio of far tokens to those that were not the most likely [11 tokens: 1.5]


def find_log_base(tokens: LogprobPairs, _context: Context) -> list[CauseMatch]:
    """Detects a side that is the other side times 1 / ln 2 or 1 / ln 10 at every token."""
    use = np.minimum(tokens.behavior, tokens.trainer) < -0.05
    use &= np.maximum(tokens.behavior, tokens.trainer) < -1e-3
    if use.sum() < 30:
        return []
    # The median is the factor, and the spread around it is noise: log p moves by (1 - p) of a logit.
    ratio = np.log(tokens.trainer[use] / tokens.behavior[use])
    middle, spread = float(np.median(ratio)), float(np.median(np.abs(ratio - np.median(ratio))))
    if spread > MAX_BASE_SPREAD:
        return []
    for column, side, sign in (("behavior", "sampler", 1), ("trainer", "trainer", -1)):
        for base in (2, 10):
            if abs(middle - sign * math.log(math.log(base))) > MAX_BASE_ERROR + spread / 10:
                continue
            rest = replace(tokens, **{column: getattr(tokens, column) * math.log(base)})
            if np.abs(rest.log_ratio[use]).mean() > MAX_BASE_LEFT * np.abs(tokens.log_ratio[use]).mean():
                continue
            evidence = (
                f"the trainer's log-prob is {math.exp(middle):.3f} times the sampler's at every token (median): the "
                f"{side}'s are logarithms of base {base}"
            )
            return [CauseMatch("log-base", evidence, rest, len(tokens))]
    return []


def find_wrong_token(tokens: LogprobPairs, _context: Context) -> list[CauseMatch]:
    """Detects a sampler that reports the most likely token's log-prob: at or far above the trainer's, never below.

    The two then disagree as often as another token was sampled: at a share of 1 - exp(log-prob) of the tokens.
    """
    log_ratio = tokens.log_ratio
    noise = max(float(np.quantile(np.abs(log_ratio), 0.3)) * 6, MIN_NOISE)
    noise = max(noise, 0.4 * float(np.quantile(log_ratio, 0.99)))
    gap = max(3 * noise, 0.1)
    far, above = log_ratio < -gap, log_ratio > gap
    if noise > MAX_NOISE or far.sum() < MIN_FAR:
        return []
    residual = Residual.of(tokens)  # other weights also make few tokens far less likely, but leave the mean ratio at 1
    if residual.mean_is_one != "no" or residual.ratio_mean > 1:
        return []
    # Impossible: the probabilities of two tokens, the most likely one and the sampled one, have a sum above 1.
    certain = share(np.exp(tokens.behavior[far]) + np.exp(tokens.trainer[far]) > 1 + 3 * noise)
    between = share((np.abs(log_ratio) > noise) & ~far)  # another temperature moves tokens by any amount
    affected = np.isin(tokens.row, tokens.row[far])
    # Far tokens, relative to how many sampled tokens were not the most likely one by these probabilities.
    missed = far.sum() / max(float((1 - np.exp(tokens.behavior[affected])).sum()), 1e-12)
    unlikely = share(tokens.behavior[far] < UNLIKELY)  # the most likely token is hardly ever that unlikely
    one_sided = share(above) <= 0.01 + MAX_ABOVE * share(far)
    # If the most likely token is almost certain, another token is hardly ever sampled.
    sure = affected & (tokens.behavior > -0.1)
    expected = float((1 - np.exp(tokens.behavior[sure])).sum())
    surprising = (far & sure).sum() > 5 + MAX_SURPRISING * expected
    possible = max(certain, unlikely / 2) <= MAX_IMPOSSIBLE and not surprising
    if not (one_sided and possible) or between > MAX_BETWEEN * share(far) or not MIN_MISSED < missed < MAX_MISSED:
        return []
    evidence = (
        f"the sampler's log-prob equals the trainer's at {share(~far):.0%} of the tokens and is far above it, never "
        f"below, at the others ({-float(np.median(log_ratio[far])):.1f} nats, median): that of the most likely token"
    )
    return [CauseMatch("wrong-token", evidence, tokens.select(~far), int(far.sum()), max_confidence=0.9, is_final=True)]


def find_copied(tokens: LogprobPairs, context: Context) -> list[CauseMatch]:
    """Detects equal columns, except in runs of this package, whose trainer computes its own log-probs."""
    is_own = context.numerics is not None and context.numerics.is_recorded
    if is_own or (tokens.behavior != tokens.trainer).any() or len(np.unique(tokens.behavior)) < 10:
        return []
    evidence = (
        f"trainer and sampler have the same value at all {len(tokens)} tokens, to the last digit: one column is a copy "
        "of the other (a bypass mode), unless both sides compute bit for bit alike"
    )
    return [CauseMatch("copied", evidence, tokens, len(tokens), 0.9)]


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
    """Returns `unexplained` if varying values are above 0, which no logarithm of a probability is."""
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
