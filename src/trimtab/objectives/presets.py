"""The named objectives: one constructor each, with the defaults of its paper.

Keywords that all of them share (aggregation, denominator, length_max, kl, kl_coef, entropy_coef) are applied by
`lookup.objective`. Sources and choices: docs/papers.md; recommendations: docs/recommendations.md.
"""

from __future__ import annotations

from collections.abc import Callable

from trimtab.corrections.masks import OPSM, Band, Divergence
from trimtab.corrections.weights import Weight
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, SecondMoment, Shaped

LENGTH_MAX = 1024
"""Response budget of `dr-grpo` and `luffy` in tokens; a recipe may set another `length_max`."""

SEQUENCE_MEAN = Aggregation("seq-mean-token-mean")
FIXED_LENGTH = Aggregation("constant", length_max=LENGTH_MAX)

Preset = Callable[..., Objective]
PRESETS: dict[str, Preset] = {}


def _preset(function: Preset) -> Preset:
    """Registers a constructor under its name with hyphens."""
    PRESETS[function.__name__.replace("_", "-")] = function
    return function


# The GRPO family: the ratio current/proximal; the mismatch proximal/behavior is ignored.


@_preset
def grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> Objective:
    """Clips the token ratio current/proximal; advantages are centered and divided by the group's std.

    Use it where sampler and trainer agree: it never reads what the sampler reported.
    DeepSeekMath, arXiv 2402.03300.
    """
    return Objective("grpo", Ratio(), Clipped(clip_low, clip_high, clip_dual), aggregation=SEQUENCE_MEAN)


@_preset
def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = None) -> Objective:
    """GRPO with a higher upper clip bound and a mean over all tokens of the update.

    Use it as `grpo`, where the upper clip bound keeps improbable tokens from becoming more probable.
    DAPO, arXiv 2503.14476; its dynamic sampling is a trainer option, its overlong reward a reward option.
    """
    return Objective("dapo", Ratio(), Clipped(clip_low, clip_high, clip_dual))


@_preset
def dr_grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> Objective:
    """GRPO without division by the group's std and with the constant denominator N * length_max.

    Use it as `grpo`, where neither length nor difficulty may change the weight of a token.
    Dr. GRPO, arXiv 2503.20783.
    """
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("dr-grpo", Ratio(), surrogate, aggregation=FIXED_LENGTH, advantage="dr-grpo")


@_preset
def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, clip_dual: float | None = None) -> Objective:
    """Clips the geometric ratio of the whole response; each token keeps its own gradient (GSPO-token).

    Use it where token ratios are noisy, as with MoE models; it ignores the mismatch like `grpo`.
    GSPO, arXiv 2507.18071.
    """
    return Objective("gspo", Ratio("geometric"), Clipped(clip_low, clip_high, clip_dual), aggregation=SEQUENCE_MEAN)


@_preset
def cispo(*, ceiling: float = 5.0) -> Objective:
    """REINFORCE with the detached token ratio, capped at `ceiling`, as weight.

    Use it where no token may lose its gradient to clipping; it ignores the mismatch like `grpo`.
    MiniMax-M1, arXiv 2506.13585, with the absolute ceiling of ScaleRL, arXiv 2510.13786.
    """
    return Objective("cispo", Ratio(), Reinforce(ceiling))


@_preset
def reinforce() -> Objective:
    """The policy gradient A log pi, without a ratio and without clipping.

    Use it on-policy, or as the baseline that ignores that a batch was sampled by another policy.
    Williams 1992.
    """
    return Objective("reinforce", Ratio(), LogProb())


# Bypass: the ratio current/behavior, without a proximal policy.


@_preset
def token_bypass(*, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> Objective:
    """PPO with the token ratio current/behavior; the first update already clips the mismatch.

    Use it to save the forward of the proximal policy while ratios per token stay close to 1.
    Bypass mode of verl and Miles; baseline of arXiv 2603.19470.
    """
    return Objective("token-bypass", Ratio("token", "behavior"), Clipped(clip_low, clip_high, clip_dual))


@_preset
def seq_bypass(*, clip_low: float = 0.5, clip_high: float = 3.0, clip_dual: float | None = 10.0) -> Objective:
    """PPO with the product ratio current/behavior of the response, clipped to [0.5, 4].

    Use it for stale rollouts as long as the clip range still holds most responses.
    Baseline of arXiv 2603.19470; bypass mode of verl and Miles.
    """
    return Objective("seq-bypass", Ratio("sequence", "behavior"), Clipped(clip_low, clip_high, clip_dual))


# Decoupled: current/proximal is clipped, proximal/behavior corrected by a weight or a mask.


@_preset
def token_tis(
    *,
    weight_max: float = 2.0,
    normalize: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on current/proximal, times the token weight min(proximal/behavior, weight_max).

    Use it first for a small mismatch without a heavy tail.
    Truncated importance sampling: Yao et al. 2025; verl, Miles.
    """
    weight = Weight("token", "truncate", max=weight_max, normalize=normalize)
    return Objective("token-tis", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight)


@_preset
def seq_tis(
    *,
    weight_max: float = 2.0,
    normalize: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on current/proximal, times the truncated product of proximal/behavior over the response.

    Use it on short responses, where the bias of token weights matters and the product stays bounded.
    Truncated importance sampling: Yao et al. 2025; verl, Miles.
    """
    weight = Weight("sequence", "truncate", max=weight_max, normalize=normalize)
    return Objective("seq-tis", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight)


@_preset
def turn_tis(
    *,
    weight_max: float = 2.0,
    normalize: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on current/proximal, times the truncated product of proximal/behavior over each model turn.

    Use it on multi-turn responses, where the product over the whole response is far from 1.
    `seq-tis` with one weight for each turn; the product over long episodes vanishes (NeMo-RL issue 2269).
    """
    weight = Weight("turn_product", "truncate", max=weight_max, normalize=normalize)
    return Objective("turn-tis", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight)


@_preset
def token_mis(
    *,
    weight_min: float = 0.0,
    weight_max: float = 2.0,
    normalize: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on the token ratio, times the product weight, zeroed outside [weight_min, weight_max].

    Use it to drop whole responses whose product weight is too large, instead of truncating it.
    Liu, Li et al. 2025, "When Speed Kills Stability"; named as in arXiv 2603.19470 Table 1.
    """
    weight = Weight("sequence", "mask", weight_min, weight_max, normalize)
    note = "token-MIS after ALP Table 1: the weight is per sequence; other sources call icepop 'token MIS'"
    return Objective("token-mis", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight, notes=(note,))


@_preset
def seq_mis(
    *,
    weight_min: float = 0.0,
    weight_max: float = 2.0,
    normalize: bool = False,
    clip_low: float = 0.5,
    clip_high: float = 3.0,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on the product ratio, times the product weight, zeroed outside [weight_min, weight_max].

    Use it as `token-mis`, where clipping too should decide about whole responses.
    Liu, Li et al. 2025, "When Speed Kills Stability"; arXiv 2603.19470 Table 1.
    """
    weight = Weight("sequence", "mask", weight_min, weight_max, normalize)
    return Objective("seq-mis", Ratio("sequence"), Clipped(clip_low, clip_high, clip_dual), weight)


@_preset
def icepop(
    *,
    weight_min: float = 0.5,
    weight_max: float = 5.0,
    normalize: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on current/proximal, times the token weight, zeroed outside [weight_min, weight_max].

    Use it for MoE models and quantized samplers: it rejects the same share of tokens at any length.
    IcePop: Ring-1T, arXiv 2510.18855.
    """
    weight = Weight("token", "mask", weight_min, weight_max, normalize)
    return Objective("icepop", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight, aggregation=SEQUENCE_MEAN)


@_preset
def geo_mask(
    *,
    keep_min: float = 0.99,
    keep_max: float = 1.01,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on current/proximal; drops responses whose geometric mean ratio is outside the band.

    Use it to reject mismatched responses of any length: the mean has no length bias, the product has.
    Miles' mismatch report; SkyRL.
    """
    masks = (Band("geometric", keep_min, keep_max),)
    return Objective("geo-mask", Ratio(), Clipped(clip_low, clip_high, clip_dual), masks=masks)


@_preset
def geo_mask_token_tis(
    *,
    keep_min: float = 0.99,
    keep_max: float = 1.01,
    weight_min: float = 0.5,
    weight_max: float = 2.0,
    normalize: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """`geo-mask` with a token weight clipped to [weight_min, weight_max].

    Use it for a large mismatch without a known cause, such as that of MoE routing.
    Miles' masked importance sampling (its mismatch helper).
    """
    weight = Weight("token", "clip", weight_min, weight_max, normalize)
    masks = (Band("geometric", keep_min, keep_max),)
    return Objective("geo-mask-token-tis", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight, masks)


@_preset
def k3_mask(
    *,
    divergence_max: float = 0.01,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on current/proximal; drops responses whose mean k3 of proximal/behavior exceeds the bound.

    Use it where drift in both directions must count: k3 never cancels over a response.
    Trust-region masking, arXiv 2512.23075; verl's `seq_mean_k3`.
    """
    masks = (Divergence("k3", "mean", divergence_max),)
    return Objective("k3-mask", Ratio(), Clipped(clip_low, clip_high, clip_dual), masks=masks)


@_preset
def opsm(
    *, delta: float = 0.05, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None
) -> Objective:
    """GRPO that drops responses with A < 0 and mean(log mu - log pi) above `delta`.

    Use it for stale rollouts and many updates per batch; drift and mismatch both count.
    DeepSeek-V3.2, arXiv 2512.02556.
    """
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("opsm", Ratio(), surrogate, masks=(OPSM(delta),), aggregation=SEQUENCE_MEAN)


# Methods with data or models of their own: perturbation, spliced policies, regression, second moment, demonstrations.


@_preset
def token_alp(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = 10.0) -> Objective:
    """`token-bypass` with the perturbed policy in the numerator.

    Use it with `[perturbation]`, which adds layerwise noise; without noise it equals bypass.
    Adaptive layerwise perturbation, arXiv 2603.19470 eq. 2.
    """
    return _alp("token-alp", Ratio("token", "behavior"), Clipped(clip_low, clip_high, clip_dual))


@_preset
def seq_alp(*, clip_low: float = 0.5, clip_high: float = 3.0, clip_dual: float | None = 10.0) -> Objective:
    """`seq-bypass` with the perturbed policy in the numerator.

    Use it with `[perturbation]`, which adds layerwise noise; without noise it equals bypass.
    Adaptive layerwise perturbation, arXiv 2603.19470 eq. 3.
    """
    return _alp("seq-alp", Ratio("sequence", "behavior"), Clipped(clip_low, clip_high, clip_dual))


def _alp(name: str, ratio: Ratio, surrogate: Clipped) -> Objective:
    return Objective(name, ratio, surrogate, notes=("π is the perturbed policy; without noise this equals bypass",))


@_preset
def soup(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = None) -> Objective:
    """PPO on current/behavior, where `behavior` is spliced per token from two policies.

    Use it with `[prefix]`: an older policy begins a response and the current one completes it.
    Single-sample mix-policy (SOUP), arXiv 2601.21476.
    """
    note = "μ is spliced per token: the historical policy on the prefix, the sampler's on the rest"
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("soup", Ratio("token", "behavior"), surrogate, notes=(note,))


@_preset
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


@_preset
def m2po(*, tau: float = 0.04, form: str = "cap") -> Objective:
    """Bounds the second moment of log current/behavior over the update by `tau`.

    Use it for very stale rollouts, where the product over a response has drifted too far.
    M2PO, arXiv 2510.01161: form="cap" is its official code, form="mask" the rule of the paper.
    """
    return Objective("m2po", Ratio("token", "behavior"), SecondMoment(tau, form))


@_preset
def luffy(*, gamma: float = 0.1) -> Objective:
    """r A on sampled tokens, unclipped, and pi / (pi + gamma) A on tokens of external traces.

    Use it with `[demonstrations]`, which adds demonstrations to the groups.
    LUFFY, arXiv 2504.14945.
    """
    return Objective("luffy", Ratio(), Shaped(gamma), aggregation=FIXED_LENGTH, advantage="dr-grpo")
