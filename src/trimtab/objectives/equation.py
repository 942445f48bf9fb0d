"""Text rendering of an objective: the loss as an equation with its numbers, and what its symbols mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.corrections.protocols import definition, symbol
from trimtab.objectives.centering import centering_ceiling, centering_equation

if TYPE_CHECKING:
    from trimtab.objectives.objective import Objective

_POLICY = {"proximal": "π_old", "behavior": "μ"}


def render(objective: Objective, advantage: str | None = None) -> str:
    """Returns one line for the loss, then one for each symbol and note.

    advantage: the kind of a recipe's `[advantage]`; by default that which the objective expects.
    """
    ratio, weight = objective.ratio, objective.weight
    factors = ["m", *(["keep"] if objective.masks else []), *([] if weight is None else [weight.equation()])]
    loss = f"loss = −1/D Σ {'·'.join(factors)}·{objective.surrogate.equation(symbol('r', ratio.level))}"
    if objective.kl.coef > 0:
        loss += f" + {objective.kl.coef:g}·KL"
    if objective.centering:
        loss += " + 1/D Σ m·A·C"
    if objective.entropy_coef > 0:
        loss += f" − {objective.entropy_coef:g}·H"
    lines = [loss, f"  {definition('r', ratio.level, 'π', _POLICY[ratio.over])}"]
    if weight is not None:
        lines.append(f"  {weight.definition()}")
    lines += [f"  keep where {rule.equation()}" for rule in objective.masks]
    lines += [f"  {line}" for line in objective.surrogate.notes()]
    if objective.centering:
        ceiling = centering_ceiling(objective.ratio, objective.surrogate, corrected=False)
        lines.append(f"  {centering_equation(ceiling)}")
    lines.append(f"  D: {_denominator(objective)}")
    lines.append(f"  A: {advantage or objective.advantage} advantage")
    if objective.kl.coef > 0:
        lines.append(f"  KL: {_kl(objective)}, over m")
    if objective.entropy_coef > 0:
        lines.append("  H: entropy of π, over m")
    lines += [f"  note: {note}" for note in objective.notes]
    return "\n".join(lines)


def _denominator(objective: Objective) -> str:
    aggregation = objective.aggregation
    text = {
        "token-mean": "Σ T, trained tokens of the update (token-mean)",
        "seq-mean-token-mean": "N·T, sequences of the update times tokens of each (seq-mean-token-mean)",
        "seq-mean-token-sum": "N, sequences of the update (seq-mean-token-sum)",
        "constant": f"N·{aggregation.length_max}, sequences of the update times length_max (constant)",
        "trained-mean-token-sum": "sequences of the update with a trained token",
    }[aggregation.kind]
    rejected = "counted" if aggregation.denominator == "original" else "not counted"
    return f"{text}; what is rejected is {rejected}" if objective.rejects else text


def _kl(objective: Objective) -> str:
    k3 = "π_ref/π − log(π_ref/π) − 1"
    external = " (1 at off-policy tokens, which have no μ)" if "off_policy" in objective.needs else ""
    return {
        "k1": "log(π/π_ref), whose gradient averages to 0 on-policy: a monitor",
        "k2": "½ log²(π_ref/π)",
        "k3": k3,
        "unbiased": f"π/μ{external}·({k3}), gradient through both",
    }[objective.kl.kind]
