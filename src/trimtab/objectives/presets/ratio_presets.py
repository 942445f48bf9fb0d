"""Presets that optimize one ratio without a weight or a mask: the GRPO family and bypass."""

from __future__ import annotations

from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.presets.registry import FIXED_LENGTH, SEQUENCE_MEAN, preset
from trimtab.objectives.surrogates import Clipped, LogProb, Reinforce

# The GRPO family: the ratio current/proximal; the mismatch proximal/behavior is ignored.


@preset
def grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> Objective:
    """Clips the token ratio current/proximal; advantages are centered and divided by the group's std.

    Use it where sampler and trainer agree: it never reads what the sampler reported.
    DeepSeekMath, arXiv 2402.03300.
    """
    return Objective("grpo", Ratio(), Clipped(clip_low, clip_high, clip_dual), aggregation=SEQUENCE_MEAN)


@preset
def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = None) -> Objective:
    """GRPO with a higher upper clip bound and a mean over all tokens of the update.

    Use it as `grpo`, where the upper clip bound keeps improbable tokens from becoming more probable.
    DAPO, arXiv 2503.14476; its dynamic sampling is a trainer option, its overlong reward a reward option.
    """
    return Objective("dapo", Ratio(), Clipped(clip_low, clip_high, clip_dual))


@preset
def dr_grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> Objective:
    """GRPO without division by the group's std and with the constant denominator N * length_max.

    Use it as `grpo`, where neither length nor difficulty may change the weight of a token.
    Dr. GRPO, arXiv 2503.20783.
    """
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("dr-grpo", Ratio(), surrogate, aggregation=FIXED_LENGTH, advantage="dr-grpo")


@preset
def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, clip_dual: float | None = None) -> Objective:
    """Clips the geometric ratio of the whole response; each token keeps its own gradient (GSPO-token).

    Use it where token ratios are noisy, as with MoE models; it ignores the mismatch like `grpo`.
    GSPO, arXiv 2507.18071.
    """
    return Objective("gspo", Ratio("geometric"), Clipped(clip_low, clip_high, clip_dual), aggregation=SEQUENCE_MEAN)


@preset
def cispo(*, ceiling: float = 5.0) -> Objective:
    """REINFORCE with the detached token ratio, capped at `ceiling`, as weight.

    Use it where no token may lose its gradient to clipping; it ignores the mismatch like `grpo`.
    MiniMax-M1, arXiv 2506.13585, with the absolute ceiling of ScaleRL, arXiv 2510.13786.
    """
    return Objective("cispo", Ratio(), Reinforce(ceiling))


@preset
def reinforce() -> Objective:
    """The policy gradient A log pi, without a ratio and without clipping.

    Use it on-policy, or as the baseline that ignores that a batch was sampled by another policy.
    Williams 1992.
    """
    return Objective("reinforce", Ratio(), LogProb())


# Bypass: the ratio current/behavior, without a proximal policy.


@preset
def token_bypass(*, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> Objective:
    """PPO with the token ratio current/behavior; the first update already clips the mismatch.

    Use it to save the forward of the proximal policy while ratios per token stay close to 1.
    Bypass mode of verl and Miles; baseline of arXiv 2603.19470.
    """
    return Objective("token-bypass", Ratio("token", "behavior"), Clipped(clip_low, clip_high, clip_dual))


@preset
def seq_bypass(*, clip_low: float = 0.5, clip_high: float = 3.0, clip_dual: float | None = 10.0) -> Objective:
    """PPO with the product ratio current/behavior of the response, clipped to [0.5, 4].

    Use it for stale rollouts as long as the clip range still holds most responses.
    Baseline of arXiv 2603.19470; bypass mode of verl and Miles.
    """
    return Objective("seq-bypass", Ratio("sequence", "behavior"), Clipped(clip_low, clip_high, clip_dual))


@preset
def token_alp_bypass(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = 10.0) -> Objective:
    """`token-bypass` with the clip bounds of `token-alp`: the same loss without noise.

    Use it as the baseline of `token-alp`, which differs from it by its perturbation only.
    Baseline of arXiv 2603.19470.
    """
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("token-alp-bypass", Ratio("token", "behavior"), surrogate)
