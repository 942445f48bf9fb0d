"""Presets with data or models of their own: ALP, SOUP, OAPL, M2PO, LUFFY."""

from __future__ import annotations

from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.presets.registry import FIXED_LENGTH, preset
from trimtab.objectives.second_moment import SecondMoment
from trimtab.objectives.surrogates import Clipped, Regression, Shaped


@preset
def token_alp(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = 10.0) -> Objective:
    """`token-bypass` with the perturbed policy in the numerator.

    Use it with `[perturbation]`, which adds layerwise noise; without noise it equals bypass.
    Adaptive layerwise perturbation, arXiv 2603.19470 eq. 2.
    """
    return _alp("token-alp", Ratio("token", "behavior"), Clipped(clip_low, clip_high, clip_dual))


@preset
def seq_alp(*, clip_low: float = 0.5, clip_high: float = 3.0, clip_dual: float | None = 10.0) -> Objective:
    """`seq-bypass` with the perturbed policy in the numerator.

    Use it with `[perturbation]`, which adds layerwise noise; without noise it equals bypass.
    Adaptive layerwise perturbation, arXiv 2603.19470 eq. 3.
    """
    return _alp("seq-alp", Ratio("sequence", "behavior"), Clipped(clip_low, clip_high, clip_dual))


def _alp(name: str, ratio: Ratio, surrogate: Clipped) -> Objective:
    return Objective(name, ratio, surrogate, notes=("π is the perturbed policy; without noise this equals bypass",))


@preset
def soup(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = None) -> Objective:
    """PPO on current/behavior, where `behavior` is spliced per token from two policies.

    Use it with `[prefix]`: an older policy begins a response and the current one completes it.
    Single-sample mix-policy (SOUP), arXiv 2601.21476.
    """
    note = "μ is spliced per token: the historical policy on the prefix, the sampler's on the rest"
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("soup", Ratio("token", "behavior"), surrogate, notes=(note,))


@preset
def oapl(*, beta: float = 1e-3) -> Objective:
    """Regresses beta times the log-ratio of the whole response to mu on r - V.

    Use it where a batch is reused for many updates; one policy must have sampled each response.
    OAPL, arXiv 2602.19362 eq. 3.
    """
    return Objective(
        "oapl",
        Ratio("sequence", "behavior"),
        Regression(beta),
        aggregation=Aggregation("trained-mean-token-sum"),
        advantage="optimal",
    )


@preset
def m2po(*, tau: float = 0.04, form: str = "cap") -> Objective:
    """Bounds the second moment of log current/behavior over the update by `tau`.

    Use it for very stale rollouts, where the product over a response has drifted too far.
    M2PO, arXiv 2510.01161: form="cap" is its official code, form="mask" the rule of the paper.
    """
    return Objective("m2po", Ratio("token", "behavior"), SecondMoment(tau, form))


@preset
def luffy(*, gamma: float = 0.1) -> Objective:
    """r A on sampled tokens, unclipped, and pi / (pi + gamma) A on tokens of external traces.

    Use it with `[demonstrations]`, which adds demonstrations to the groups.
    LUFFY, arXiv 2504.14945.
    """
    return Objective("luffy", Ratio(), Shaped(gamma), aggregation=FIXED_LENGTH, advantage="dr-grpo")
