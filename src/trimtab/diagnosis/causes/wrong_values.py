"""Detects values of another meaning: a logarithm of base 2 or 10, the most likely token's log-prob, a copy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from trimtab.diagnosis.causes.detector import CauseMatch, Context, Residual
from trimtab.diagnosis.causes.evidence import share
from trimtab.diagnosis.causes.logprob_pairs import LogprobPairs
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS


def find_log_base(tokens: LogprobPairs, _context: Context) -> list[CauseMatch]:
    """One side is the other times a constant at every token: 1 / ln 2 or 1 / ln 10."""
    use = np.minimum(tokens.behavior, tokens.trainer) < -0.05
    use &= np.maximum(tokens.behavior, tokens.trainer) < -1e-3
    if use.sum() < 30:
        return []
    # The median is that of the data, and the spread around it is noise: log p moves by (1 - p) of a logit.
    ratio = np.log(tokens.trainer[use] / tokens.behavior[use])
    middle, spread = float(np.median(ratio)), float(np.median(np.abs(ratio - np.median(ratio))))
    if spread > LIMITS["log-base-spread"]:
        return []
    for column, side, sign in (("behavior", "sampler", 1), ("trainer", "trainer", -1)):
        for base in (2, 10):
            if abs(middle - sign * math.log(math.log(base))) > LIMITS["log-base-error"] + spread / 10:
                continue
            rest = replace(tokens, **{column: getattr(tokens, column) * math.log(base)})
            if np.abs(rest.log_ratio[use]).mean() > LIMITS["log-base-left"] * np.abs(tokens.log_ratio[use]).mean():
                continue
            evidence = (
                f"the trainer's log-prob is {math.exp(middle):.3f} times the sampler's at every token (median): the "
                f"{side}'s are logarithms of base {base}"
            )
            return [CauseMatch("log-base", evidence, rest, len(tokens))]
    return []


def find_wrong_token(tokens: LogprobPairs, _context: Context) -> list[CauseMatch]:
    """The sampler reports the most likely token's log-prob: equal or far above the trainer's, never below it.

    Where it does, the two disagree as often as another token was sampled: at a share of 1 - exp(log-prob) of all.
    """
    log_ratio = tokens.log_ratio
    noise = max(float(np.quantile(np.abs(log_ratio), 0.3)) * 6, LIMITS["wrong-token-noise"])
    noise = max(noise, 0.4 * float(np.quantile(log_ratio, 0.99)))
    gap = max(3 * noise, 0.1)
    far, above = log_ratio < -gap, log_ratio > gap
    if noise > LIMITS["wrong-token-most-noise"] or far.sum() < LIMITS["wrong-token-far"]:
        return []
    residual = Residual.of(tokens)  # other weights also make few tokens far less likely, but leave the mean ratio at 1
    if residual.contract != "outside" or residual.ratio_mean > 1:
        return []
    # The most likely of many tokens has at least the probability that the sampled one has by the trainer.
    certain = share(np.exp(tokens.behavior[far]) + np.exp(tokens.trainer[far]) > 1 + 3 * noise)
    between = share((np.abs(log_ratio) > noise) & ~far)  # another temperature moves tokens by any amount
    affected = np.isin(tokens.row, tokens.row[far])
    # As many tokens as were not the most likely one by these probabilities.
    missed = far.sum() / max(float((1 - np.exp(tokens.behavior[affected])).sum()), 1e-12)
    unlikely = share(tokens.behavior[far] < LIMITS["wrong-token-unlikely"])  # the most likely token hardly ever is
    one_sided = share(above) <= 0.01 + LIMITS["wrong-token-above"] * share(far)
    # Where the most likely token is almost certain, another one is hardly ever sampled.
    sure = affected & (tokens.behavior > -0.1)
    expected = float((1 - np.exp(tokens.behavior[sure])).sum())
    surprising = (far & sure).sum() > 5 + LIMITS["wrong-token-surprising"] * expected
    possible = max(certain, unlikely / 2) <= LIMITS["wrong-token-impossible"] and not surprising
    if (
        not (one_sided and possible)
        or between > LIMITS["wrong-token-between"] * share(far)
        or not LIMITS["wrong-token-least-missed"] < missed < LIMITS["wrong-token-most-missed"]
    ):
        return []
    evidence = (
        f"the sampler's log-prob equals the trainer's at {share(~far):.0%} of the tokens and is far above it, never "
        f"below, at the others ({-float(np.median(log_ratio[far])):.1f} nats, median): that of the most likely token"
    )
    return [CauseMatch("wrong-token", evidence, tokens.select(~far), int(far.sum()), max_confidence=0.9, is_final=True)]


def find_copied(tokens: LogprobPairs, context: Context) -> list[CauseMatch]:
    """Both columns hold the same numbers, and not of a run of this package, whose trainer computes its own."""
    is_own = context.settings is not None
    if is_own or (tokens.behavior != tokens.trainer).any() or len(np.unique(tokens.behavior)) < 10:
        return []
    evidence = (
        f"trainer and sampler have the same value at all {len(tokens)} tokens, to the last digit: one column is a copy "
        "of the other (a bypass mode), unless both sides compute bit for bit alike"
    )
    return [CauseMatch("copied", evidence, tokens, len(tokens), 0.9)]
