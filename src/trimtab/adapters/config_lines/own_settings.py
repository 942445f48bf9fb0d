"""What the settings of verl, TRL and Miles share: their form, and the reason where a trainer lacks a part."""

from __future__ import annotations

from typing import NamedTuple

from trimtab.corrections import OPSM, TURN_LEVELS, Band, Divergence, Mask, Veto, Weight
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


def no_weight(weight: Weight, name: str) -> Absent:
    if weight.over == "current":
        return Absent(f"{name} has no weight on π/μ")
    if weight.level not in LEVELS:
        return Absent(f"{name} has no weight for each {_unit(weight.level)}")
    return Absent(f"{name} has no {weight.level} weight")


def no_mask(rule: Mask, name: str) -> Absent:
    """Returns why a trainer cannot have a rejection rule, which it may have in another form."""
    if isinstance(rule, Band | Divergence) and rule.over == "current":
        return Absent(f"{name} has no mask on π/μ")
    if isinstance(rule, Band):
        if rule.level not in LEVELS:
            return Absent(f"{name} has no mask for each {_unit(rule.level)}")
        return Absent(f"{name} has no {rule.level} mask [{rule.min:g}, {rule.max:g}]")
    if isinstance(rule, Divergence):
        of = f"{rule.kind} of a token" if rule.reduce == "token" else f"{rule.reduce} {rule.kind} of a response"
        return Absent(f"{name} has no mask on the {of} ({rule.max:g})")
    if isinstance(rule, Veto) and (rule.of, rule.over) != ("ratio", "proximal"):
        policy = "π_old" if rule.over == "proximal" else "π"
        return Absent(f"{name} has no veto on {policy}{'/μ' if rule.of == 'ratio' else ''}")
    if isinstance(rule, OPSM):
        sign = "" if rule.sign == "negative" else f" of A {'>' if rule.sign == 'positive' else '≠'} 0"
        return Absent(f"{name} has no OPSM{sign}")
    return Absent(f"no mask: keep where {rule.equation()}")


def _unit(level: str) -> str:
    return "turn" if level in TURN_LEVELS else "prefix"


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
