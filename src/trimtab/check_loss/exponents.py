"""Names the cause if, near a ratio of 1, a loss follows other ratios than the objective: `CAUSES` lists them in order.

An exponent is d log weight / d log-prob of one policy, where all policies are equal: the ratio π/μ has π^1 μ^-1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from trimtab.check_loss.probes import DRIFT, DRIFT_ALL, MISMATCH, Probe
from trimtab.check_loss.readings import ADVANTAGES, Readings

SYMBOLS = {"current": "π", "proximal": "π_old", "behavior": "μ"}
LEVELS = {
    "token": "ratio of the token",
    "sequence": "product over the response",
    "geometric": "mean over the response",
    "prefix": "product over the tokens up to it",
    "prefix_geometric": "geometric mean over the tokens up to it",
}
TOLERANCE = 2e-3  # of an exponent
Figures = dict[str, Any]
"""What a sentence of differences.toml is filled with."""


def differing_exponents(actual: Readings, expected: Readings) -> list[tuple[str, str, Figures]]:
    """Returns the cause of differing exponents: kind, key in differences.toml, figures. Empty if none differs."""
    # A weight that grows with the log-ratio has the expected exponent at 1, and no curvature.
    for probe, positive in product((DRIFT, MISMATCH), ADVANTAGES):
        slopes = [side.exponent(positive, probe.policy) for side in (actual, expected)]
        straight = abs(actual.curvature(probe, positive)) < 1e-3 < 0.01 < expected.curvature(probe, positive)
        if straight and abs(slopes[0] - slopes[1]) < TOLERANCE:
            return [("log-ratio", "straight", {"probe": expected.label(probe)})]
    for place, exponent in expected.exponents.items():
        if not abs(actual.exponents[place] - exponent) < TOLERANCE:  # also true for NaN
            pair = Exponents(actual, expected, place)
            found = ((kind, key, figures(pair)) for kind, key, figures in CAUSES)
            return [next((kind, key, figures) for kind, key, figures in found if figures is not None)]
    return []


class Exponents:
    """The exponents of a loss and of an objective, of which some differ: what the causes are told by."""

    def __init__(self, actual: Readings, expected: Readings, first: tuple[bool, str, str, int]) -> None:
        """first: the key in `Readings.exponents` of the first exponent that differs."""
        self._actual, self._expected, (self._positive, policy, place, _) = actual, expected, first
        # Exponents at the moved token, and policies whose exponent is not 0: first of the loss, then of the objective.
        sides = [{name: side.exponent(self._positive, name) for name in SYMBOLS} for side in (actual, expected)]
        powers, wanted = sides
        used, needed = ({name for name in SYMBOLS if abs(side[name]) > 1e-3} for side in sides)
        factors = {round(powers[name] / wanted[name], 3) for name in used & needed}
        ratio_twice = {name: 2 * wanted[name] for name in needed}
        weight_twice = {name: wanted[name] * (2 if name == "behavior" else 1) for name in needed}

        # Figures: of the exponent that differs first, of all exponents at the moved token, and of the tokens over which
        # the ratio to a policy is taken, None if over those of the objective.
        self.first: Figures = {"actual": actual.exponents[first], "expected": expected.exponents[first]}
        whose = "its weight" if place == "own" else f"the weight of a token {place} it"
        self.first["changes"] = f"{SYMBOLS[policy]} of a token changes {whose}"
        self.powers: Figures = {"actual": _product(powers), "expected": _product(wanted)}
        self.other_level, self.other_level_of_weight = (self._other_level(name) for name in ("current", "behavior"))

        # Conditions.
        self.unreadable = math.isnan(actual.exponents[first])  # the gradient is 0 or NaN where all policies are equal
        self.unused = [probe for probe in (DRIFT, MISMATCH) if probe.policy in needed - used]
        self.constant = bool(needed) and not used
        self.weighted = "behavior" in used & needed  # both use the sampler
        self.equal = _close(powers, wanted)
        self.upside_down = bool(needed) and _close(powers, {name: -power for name, power in wanted.items()})
        self.proportional = used == needed and len(factors) <= 1
        self.ratio_twice = self.proportional and bool(used) and _close(powers, ratio_twice)
        self.weight_twice = bool(used) and _close(powers, weight_twice)

    def _other_level(self, policy: str) -> Figures | None:
        actual, expected = (LEVELS[side.level(self._positive, policy)] for side in (self._actual, self._expected))
        return None if actual == expected else {"actual": actual, "expected": expected}

    def bound_inside(self, probe: Probe) -> Figures | None:
        """Returns the ratio beyond which the weight follows a policy that it ignores near 1."""
        nearest = [bends[0] for bends in self._actual.bends(probe).values() if bends] if probe in self.unused else []
        jumps = [bend.x for bend in nearest if bend.kind == "jump"]
        return {"policy": SYMBOLS[probe.policy], "ratio": math.exp(jumps[0])} if jumps else None

    def bounded(self) -> bool:
        """Returns whether the weight changes beyond a ratio, of a token or of a response."""
        return any(any(self._actual.bends(probe).values()) for probe in (DRIFT, DRIFT_ALL))

    def of_other_tokens(self) -> Figures | None:
        """Returns the policy if the weight ignores its log-prob of the token, and follows that of the response."""
        for probe in (replace(probe, span="response") for probe in self.unused):
            weight = self._actual.weights(probe, torch.tensor([0.1]).double(), ADVANTAGES[self._positive])
            if abs(float(weight) - 1) > 1e-6:
                return {"policy": SYMBOLS[probe.policy]}
        return None

    def bent_at_one(self) -> Figures | None:
        """Returns the exponents below and above 1, if they differ in the loss and not in the objective."""
        for policy in SYMBOLS:
            if self._actual.kink(self._positive, policy) > 1e-2 > self._expected.kink(self._positive, policy):
                below, above = (abs(self._actual.exponents[self._positive, policy, "own", side]) for side in (-1, 1))
                return {"below": below, "above": above}
        return None


CAUSES: tuple[tuple[str, str, Callable[[Exponents], Figures | None]], ...] = (
    ("level", "unread", lambda pair: pair.first if pair.unreadable else None),
    ("clip", "inside", lambda pair: pair.bound_inside(DRIFT)),
    ("weight", "inside", lambda pair: pair.bound_inside(MISMATCH)),
    ("log-ratio", "constant", lambda pair: {} if pair.constant and pair.bounded() else None),
    ("level", "elsewhere", lambda pair: pair.of_other_tokens()),
    ("inverse", "ratio", lambda pair: pair.powers if pair.upside_down else None),
    ("kink", "powers", lambda pair: pair.bent_at_one()),
    ("level", "ratio", lambda pair: pair.other_level if pair.proportional else None),
    ("level", "weight", lambda pair: pair.other_level_of_weight if pair.weighted and not pair.other_level else None),
    ("level", "tokens", lambda pair: pair.first if pair.equal else None),
    ("shape", "twice", lambda pair: pair.powers if pair.ratio_twice else None),
    ("shape", "powers", lambda pair: pair.powers if pair.proportional else None),
    ("policy", "twice", lambda pair: pair.powers if pair.weight_twice else None),
    ("policy", "powers", lambda pair: pair.powers),  # always
)
"""Causes: kind, key of the sentence in differences.toml, and the figures of the sentence, None if it does not apply.

The first that applies is named. To add a cause, put its row before all rows that would apply as well.
"""


def _close(powers: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Returns whether exponents of policies are equal to these others."""
    return all(abs(powers[policy] - power) < TOLERANCE for policy, power in others.items())


def _product(powers: Mapping[str, float]) -> str:
    """Returns exponents of policies in words: "π^1 μ^-1"."""
    words = [f"{SYMBOLS[name]}^{power:.3g}" for name, power in powers.items() if abs(power) > 1e-3]
    return " ".join(words) or "no policy"
