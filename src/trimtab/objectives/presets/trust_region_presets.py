"""Presets that reject by the divergence of the current policy from the sampler, without a proximal forward."""

from __future__ import annotations

import math

from trimtab.corrections.masks import Divergence
from trimtab.corrections.prefix_budget import PrefixBudget
from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.presets.registry import SEQUENCE_MEAN, preset
from trimtab.objectives.surrogates import Reinforce, Unclipped

SAMPLER = Ratio("token", "behavior")


@preset
def dppo(*, divergence_max: float = 0.15, ceiling: float = 20.0) -> Objective:
    """Drops tokens that move away from the sampler where |pi - mu| exceeds the bound.

    Use it in place of a ratio clip, which stops rare tokens too early and frequent ones too late.
    Divergence PPO, binary total variation, arXiv 2602.04879; verl's `dppo_tv`, with its cap on the weight.
    """
    masks = (Divergence("binary_tv", "token", divergence_max, "current", outward=True),)
    return Objective("dppo", SAMPLER, Reinforce(ceiling), masks=masks)


@preset
def dppo_kl(*, divergence_max: float = 0.05, ceiling: float = 20.0) -> Objective:
    """`dppo` with the KL divergence of the two-point distributions {sampled token, rest}.

    Use it as `dppo`, where frequent tokens need a tighter bound than rare ones.
    Divergence PPO, binary KL, arXiv 2602.04879; verl's `dppo_kl`.
    """
    masks = (Divergence("binary_kl", "token", divergence_max, "current", outward=True),)
    return Objective("dppo-kl", SAMPLER, Reinforce(ceiling), masks=masks)


@preset
def ipo(*, divergence_max: float = 0.3) -> Objective:
    """Drops tokens where |pi - mu| exceeds the bound, in either direction; no clip.

    Use it as `dppo`, where tokens far from the sampler should not be trained at all.
    The loss type `ipo` of prime-rl (not its default, which is nearer to `dppo`), without its squared log-ratio.
    """
    masks = (Divergence("binary_tv", "token", divergence_max, "current"),)
    return Objective("ipo", SAMPLER, Unclipped(), masks=masks)


@preset
def flash_reinforce(*, divergence_max: float = 3e-3) -> Objective:
    """REINFORCE with exact token weights; drops responses whose mean binary KL from the sampler exceeds the bound.

    Use it with one response for each prompt: the advantage is relative to the whole batch.
    FlashREINFORCE (NVIDIA); OpenRLHF 0.11.2, slime, Miles.
    """
    masks = (Divergence("binary_kl", "mean", divergence_max, "current"),)
    surrogate = Reinforce(math.inf)
    return Objective(
        "flash-reinforce", SAMPLER, surrogate, masks=masks, aggregation=SEQUENCE_MEAN, advantage="batch-mean"
    )


@preset
def trm(*, k2_max: float = 0.05, k3_max: float = 1e-3) -> Objective:
    """Drops responses whose largest k2 or mean k3 of current/behavior exceeds its bound; no clip.

    Use it where a bound on the change of the whole policy matters more than the number of responses used.
    Trust-region masking, arXiv 2512.23075, on the ratio of the paper; `k3-mask` is verl's form on proximal/behavior.
    """
    masks = (Divergence("k2", "max", k2_max, "current"), Divergence("k3", "mean", k3_max, "current"))
    return Objective("trm", SAMPLER, Unclipped(), masks=masks, aggregation=SEQUENCE_MEAN)


@preset
def cppo(
    *, divergence_max: float = 0.15, budget: float = 0.02, quantile: float = 0.9, weight_min: float = 0.8
) -> Objective:
    """`dppo` with a budget of divergence for each response, which early tokens spend for later ones.

    Use it for long responses, where an early change decides about everything that follows.
    Cumulative prefix divergence, arXiv 2606.10968.
    """
    masks = (PrefixBudget(divergence_max, budget, quantile, weight_min),)
    return Objective("cppo", SAMPLER, Unclipped(), masks=masks)
