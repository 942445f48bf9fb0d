"""Detects values of another meaning: a logarithm of base 2 or 10, the most likely token's log-prob, a copy."""

from __future__ import annotations

import math

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, share
from trimtab.diagnosis.causes.what_is_left import Context, Finding, Left
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

BASES = (2, 10)
SIDES = {"sampler": "behavior", "trainer": "trainer"}


def find_log_base(tokens: LogprobPairs, _context: Context) -> list[Finding]:
    """One side is the other times a constant at every token: 1 / ln 2 or 1 / ln 10."""
    use = np.minimum(tokens.behavior, tokens.trainer) < -0.05
    use &= np.maximum(tokens.behavior, tokens.trainer) < -1e-3
    if use.sum() < 30:
        return []
    # The median is that of the data, and the spread around it is noise: log p moves by (1 - p) of a logit.
    ratio = np.log(tokens.trainer[use] / tokens.behavior[use])
    middle, spread = float(np.median(ratio)), float(np.median(np.abs(ratio - np.median(ratio))))
    for side, column in SIDES.items():
        for base in BASES:
            expected = math.log(math.log(base)) * (1 if side == "sampler" else -1)
            if abs(middle - expected) > LIMITS["log-base-error"] + spread / 10 or spread > LIMITS["log-base-spread"]:
                continue
            fixed = {name: getattr(tokens, name) for name in SIDES.values()}
            fixed[column] = fixed[column] * math.log(base)
            rest = LogprobPairs(tokens.table, tokens.index, fixed["behavior"], fixed["trainer"])
            near = np.abs(rest.log_ratio[use]).mean()
            if near > LIMITS["log-base-left"] * np.abs(tokens.log_ratio[use]).mean():
                continue
            evidence = (
                f"the {side}'s log-probs are 1/ln {base} times the other side's at every token (median ratio "
                f"{math.exp(middle):.3f}): they are logarithms of base {base}"
            )
            fix = f"Multiply the {side}'s log-probs by ln {base} = {math.log(base):.4f}, or take natural logarithms."
            return [Finding("log-base", evidence, fix, rest, len(tokens))]
    return []


def find_wrong_token(tokens: LogprobPairs, _context: Context) -> list[Finding]:
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
    left = Left.of(tokens)  # other weights also make few tokens far less likely, but leave the mean ratio at 1
    if left.contract != "outside" or left.ratio_mean > 1:
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
        f"the sampler's log-prob is the trainer's at {share(~far):.0%} of the tokens and far above it at the others "
        f"(median {-float(np.median(log_ratio[far])):.1f} nats), never below: that is the most likely token's"
    )
    fix = (
        "Take the log-prob of the token that was sampled, not the first of the list of most likely ones (vLLM: "
        "logprobs[position][token_id])."
    )
    return [Finding("wrong-token", evidence, fix, tokens.select(~far), int(far.sum()), at_most=0.9, is_final=True)]


def find_copied(tokens: LogprobPairs, context: Context) -> list[Finding]:
    """Both columns hold the same numbers, and not of a run of this package, whose trainer computes its own."""
    is_own = context.settings is not None
    if is_own or (tokens.behavior != tokens.trainer).any() or len(np.unique(tokens.behavior)) < 10:
        return []
    evidence = (
        f"trainer and sampler have the same value at all {len(tokens)} tokens, to the last digit: one column is a copy "
        "of the other (a bypass mode), unless both sides compute bit for bit alike"
    )
    fix = (
        "Write the log-probs that the trainer computes itself (verl: rollout_correction.bypass_mode=False for a step), "
        "then run diagnose again: this data says nothing about the mismatch."
    )
    return [Finding("copied", evidence, fix, tokens, len(tokens), 0.9)]
