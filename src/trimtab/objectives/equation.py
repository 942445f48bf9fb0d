"""An objective as an equation a person can check, with its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.corrections.masks import OPSM, Band, Divergence, Mask, Veto
from trimtab.corrections.weights import Weight
from trimtab.objectives.surrogates import (
    Clipped,
    LogProb,
    Regression,
    Reinforce,
    SecondMoment,
    Shaped,
    Surrogate,
    Unclipped,
)

if TYPE_CHECKING:
    from trimtab.objectives.objective import Objective

_POLICY = {"proximal": "π_old", "behavior": "μ"}
_SYMBOL = {"token": "{0}_t", "sequence": "{0}", "geometric": "{0}_geo"}


def render(objective: Objective) -> str:
    """One line for the loss, then what its symbols are."""
    ratio = _SYMBOL[objective.ratio.level].format("r")
    factors = ["m", *(["keep"] if objective.masks else []), *([_weight(objective.weight)] if objective.weight else [])]
    loss = f"loss = −1/D Σ {'·'.join(factors)}·{_surrogate(objective.surrogate, ratio)}"
    if objective.kl.coef > 0:
        loss += f" + {objective.kl.coef:g}·KL"
    if objective.entropy_coef > 0:
        loss += f" − {objective.entropy_coef:g}·H"
    lines = [loss, f"  {_ratio('r', objective.ratio.level, 'π', _POLICY[objective.ratio.over])}"]
    if objective.weight is not None:
        lines.append(f"  {_ratio('ρ', objective.weight.level, 'π_old', 'μ')}{_normalized(objective.weight)}")
    lines += [f"  keep where {_mask(rule)}" for rule in objective.masks]
    lines += [f"  {line}" for line in _surrogate_notes(objective.surrogate)]
    lines.append(f"  D: {_denominator(objective)}")
    lines.append(f"  A: {objective.advantage} advantage")
    if objective.kl.coef > 0:
        lines.append(f"  KL: {_kl(objective)}, over m")
    if objective.entropy_coef > 0:
        lines.append("  H: entropy of π, over m")
    lines += [f"  note: {note}" for note in objective.notes]
    return "\n".join(lines)


def _ratio(symbol: str, level: str, numerator: str, denominator: str) -> str:
    name = _SYMBOL[level].format(symbol)
    fraction = f"{numerator}(y_t)/{denominator}(y_t)"
    if level == "token":
        return f"{name} = {fraction}"
    if level == "sequence":
        return f"{name} = Π_t {fraction}"
    return f"{name} = (Π_t {fraction})^(1/T)"


def _weight(weight: Weight) -> str:
    name = _SYMBOL[weight.level].format("ρ")
    if weight.bound == "truncate":
        bounded = f"min({name}, {weight.high:g})"
    elif weight.bound == "clip":
        bounded = f"clip({name}, {weight.low:g}, {weight.high:g})"
    else:
        bounded = f"{name}·1[{weight.low:g} ≤ {name} ≤ {weight.high:g}]"
    return f"sg[{bounded}]" + ("/w̄" if weight.normalize else "")


def _normalized(weight: Weight) -> str:
    of = "tokens" if weight.level == "token" else "sequences"
    return f", w̄ = mean of the bounded weight over the update's {of}" if weight.normalize else ""


def _surrogate(surrogate: Surrogate, ratio: str) -> str:
    if isinstance(surrogate, Clipped):
        clipped = f"min({ratio} A, clip({ratio}, {1 - surrogate.low:g}, {1 + surrogate.high:g}) A)"
        return clipped if surrogate.dual is None else f"max[A<0]({clipped}, {surrogate.dual:g} A)"
    if isinstance(surrogate, Reinforce):
        return f"sg[min({ratio}, {surrogate.ceiling:g})] A log π"
    if isinstance(surrogate, LogProb):
        return "A log π"
    if isinstance(surrogate, Regression):
        return f"−({surrogate.beta:g}·log {ratio} − A)²/T"
    if isinstance(surrogate, Shaped):
        return f"({ratio} A on-policy, π/(π + {surrogate.gamma:g}) A off-policy)"
    if isinstance(surrogate, SecondMoment):
        capped = f"min({ratio} A, clip({ratio}, e^−c, e^c) A)"
        return capped if surrogate.form == "cap" else f"1[|log {ratio}| ≤ c]·{ratio} A"
    return f"{ratio} A" if isinstance(surrogate, Unclipped) else f"{surrogate}"


def _surrogate_notes(surrogate: Surrogate) -> list[str]:
    if isinstance(surrogate, SecondMoment) and surrogate.form == "mask":
        return [
            f"c: largest |log r| of the update up to which the mean of log² r is at most {surrogate.tau:g}; "
            "what is beyond stays in D"
        ]
    if isinstance(surrogate, SecondMoment):
        return [f"c: largest harmful |log r| whose capped second moment stays below {surrogate.tau:g}; ∞ within it"]
    if isinstance(surrogate, Clipped) and surrogate.dual is not None and surrogate.dual <= 1 + surrogate.high:
        return [f"note: clip_dual = {surrogate.dual:g} lies inside the clip range, it acts before the upper clip could"]
    return []


def _mask(rule: Mask) -> str:
    if isinstance(rule, Band):
        name = _SYMBOL[rule.level].format("ρ")
        return f"{rule.min:g} ≤ {name} ≤ {rule.max:g}, {_ratio('ρ', rule.level, 'π_old', 'μ')}"
    if isinstance(rule, Divergence):
        over = "" if rule.reduce == "token" else f"{rule.reduce}_t "
        return f"{over}{rule.kind}(π_old/μ) ≤ {rule.max:g}"
    if isinstance(rule, Veto):
        return f"every ρ_t ≥ {rule.min:g}, ρ_t = π_old(y_t)/μ(y_t)"
    return f"not (A < 0 and mean_t(log μ − log π) > {rule.delta:g})" if isinstance(rule, OPSM) else rule.rule


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
    return f"{text}; what is rejected stays {rejected}" if _can_reject(objective) else text


def _can_reject(objective: Objective) -> bool:
    return bool(objective.masks) or (objective.weight is not None and objective.weight.bound == "mask")


def _kl(objective: Objective) -> str:
    k3 = "π_ref/π − log(π_ref/π) − 1"
    external = " (1 at off-policy tokens, which have no μ)" if "off_policy" in objective.needs else ""
    return {
        "k1": "log(π/π_ref), whose gradient averages to 0 on-policy: a monitor",
        "k2": "½ log²(π_ref/π)",
        "k3": k3,
        "unbiased": f"π/μ{external}·({k3}), gradient through both",
    }[objective.kl.kind]
