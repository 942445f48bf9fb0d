"""What the settings of verl, TRL and Miles share: their form, and the reason where a trainer lacks a part."""

from __future__ import annotations

from typing import NamedTuple

from trimtab.corrections import Mask, Weight
from trimtab.objectives import Objective

UNBOUNDED = 1e9
"""In place of no bound where a framework must have one: above the largest ratio, e^20."""
LEVELS = ("token", "sequence", "geometric")
"""Levels of weights and bands that other trainers have."""


class Settings(NamedTuple):
    """The settings of a part in another trainer.

    options: values as written in its configuration, empty for a flag. verl: keys of `rollout_correction` (weights,
    masks) or `actor` (surrogates); TRL: arguments of `GRPOConfig`; Miles: flags, or keys of its mismatch helper's file.
    remarks: comments on what differs there.
    """

    options: dict[str, str]
    remarks: tuple[str, ...] = ()


class Absent(Exception):
    """A framework's own losses lack a part of the objective; the message says which, and continues `: `."""


def no_term(built: Objective) -> Absent:
    return Absent(f"no term {built.surrogate.equation('r')}")


def no_weight(weight: Weight) -> Absent:
    return Absent(f"no weight {weight.equation()}{', w = π/μ' if weight.over == 'current' else ''}")


def no_mask(rule: Mask) -> Absent:
    return Absent(f"no mask that keeps where {rule.equation()}")


def unset_remarks(built: Objective, name: str) -> list[str]:
    """Returns remarks on what no line carries."""
    remarks = []
    if built.kl.coef > 0 or built.entropy_coef > 0:
        remarks.append(f"# differs: kl_coef and entropy_coef are left out: set {name}'s own")
    if built.aggregation.denominator == "kept" and (built.weight is not None or (built.masks and name != "verl")):
        remarks.append(f"# differs: {name} counts rejected tokens and sequences in its denominators as it does")
    if built.centering:
        raise Absent("no centered scores")
    return remarks
