"""Says `unexplained` of a mismatch that no cause accounts for, with what is known about it."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.causes.detector import LEAST_K3, Residual
from trimtab.diagnosis.causes.evidence import correlation
from trimtab.diagnosis.causes.logprob_pairs import LogprobPairs
from trimtab.diagnosis.causes.noise_groups import objection
from trimtab.diagnosis.records import Cause

CONFIDENCE = 0.65  # confidence of unexplained [share right in the zoo]
MIN_GROUP_PART = 0.05  # smallest share of the tokens that a group pointed out may have
MIN_GROUP_LIFT = 2.0  # least ratio of a group's share of k3 to its share of the tokens


def find_unexplained(tokens: LogprobPairs, left: Residual, floor: float, *, is_rest: bool) -> Cause | None:
    """Returns the cause, None within the noise floor; `is_rest`: whether other causes were found and undone."""
    if left.contract == "inside" and left.k3 < max(LEAST_K3, 3 * floor):
        return None
    related = correlation(np.exp(tokens.behavior), np.exp(tokens.trainer))
    evidence = "after the causes above are undone, " if is_rest else ""
    evidence += f"k3 {left.k3:.2g}, {left.text}, correlation of the probabilities {related:.2f}"
    if reason := objection(tokens, left):
        evidence += f": {reason}"
    return Cause("unexplained", CONFIDENCE, evidence + _where(tokens), share_of_k3=1.0, tokens=left.tokens)


def _where(tokens: LogprobPairs) -> str:
    """Points at the group of tokens (a turn, a step, a stretch of responses) with far more k3 than the others."""
    k3 = tokens.k3
    groups = {"turn": tokens.turn + 1, "tenth of the response": tokens.table.decile[tokens.index] + 1}
    if tokens.step is not None:
        groups["step"] = tokens.step
    best, text = MIN_GROUP_LIFT, ""
    for name, group in groups.items():
        for value in np.unique(group)[:1000]:
            inside = group == value
            part, mass = inside.mean(), k3[inside].sum() / max(k3.sum(), 1e-300)
            if MIN_GROUP_PART < part < 0.9 and mass > best * part:
                best, text = mass / part, f"; {name} {value} holds {mass:.0%} of k3 with {part:.0%} of the tokens"
    return text
