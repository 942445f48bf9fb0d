"""Names the cause `placeholder` of the constants that `measure.placeholders` found."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.records import Cause, Measured, Placeholder

_WHERE = {
    "last": "at the last token",
    "end": "at the end",
    "start": "at the start",
    "stretch": "in stretches",
    "single": "at single tokens",
}
_NAMES = {"behavior": "the sampler's log-prob", "trainer": "the trainer's log-prob", "both": "both log-probs"}


def placeholder_cause(measured: Measured) -> Cause | None:
    """Returns the cause, if there are any placeholders."""
    found = measured.placeholders
    if not found:
        return None
    trained = measured.origin.trained
    tokens = measured.removed if measured.cleaned else min(sum(one.tokens for one in found), trained)
    largest = max(found, key=lambda one: one.tokens)
    everywhere = not measured.cleaned
    value = f"{largest.value:.1f}"
    if everywhere:
        evidence = (
            f"{_NAMES[largest.column]} is {value} at every token: the values never arrived, or decoding was greedy"
        )
    else:
        evidence = "; ".join(_sentence(one) for one in sorted(found, key=lambda one: -one.tokens)[:4])
        evidence += f". These {tokens} tokens are left out of every figure here"
    fix = _fix(largest, everywhere=everywhere)
    size = measured.size.mismatch
    left = {} if everywhere else {"k3": size["k3"], "ratio_mean": size["ratio_mean"]}
    before = measured.k3_before
    share = None if everywhere or not before > 0 else 1 - size["k3"] * trained / (before * (trained + tokens))
    return Cause(
        "placeholder", 0.97, evidence, fix, None if share is None else float(np.clip(share, 0, 1)), tokens, left
    )


def _sentence(one: Placeholder) -> str:
    where = f"{_WHERE[one.place]} of {one.responses} responses"
    certain = ", the other side is far from certain" if one.column != "both" and one.value == 0 else ""
    name, verb = _NAMES[one.column], "are" if one.column == "both" else "is"
    return f"{name} {verb} {one.value:.1f} at {one.tokens} tokens {where}{certain}"


def _fix(one: Placeholder, *, everywhere: bool) -> str:
    if everywhere:
        return (
            "Sample with a temperature above 0, and ask the engine for the log-probs of sampled tokens (vLLM: "
            "logprobs=0, SGLang: return_logprob)."
        )
    if one.column == "both":
        return "Write a mask beside padded lists (loss_mask, response_mask), or lists without padding."
    if one.value == 0 and one.place == "stretch":
        return "These are tokens that the model did not sample (tool output): set the loss mask to 0 there."
    return (
        "No log-prob was there and a constant was written in its place: set the loss mask to 0 at these tokens (an end "
        "token that was appended, padding, tokens the engine gives no log-prob for), or drop their responses."
    )
