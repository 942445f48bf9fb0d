"""Presets that clip current/proximal and correct proximal/behavior by a weight or a mask."""

from __future__ import annotations

from trimtab.corrections.masks import OPSM, Band, Divergence
from trimtab.corrections.weights import Weight
from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.presets.registry import SEQUENCE_MEAN, preset
from trimtab.objectives.surrogates import Clipped


@preset
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


@preset
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


@preset
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
    weight = Weight("turn", "truncate", max=weight_max, normalize=normalize)
    return Objective("turn-tis", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight)


@preset
def token_mis(
    *,
    weight_min: float = 0.0,
    weight_max: float = 2.0,
    normalize: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on current/proximal, times the product of proximal/behavior over the response, 0 outside a band.

    The band is [weight_min, weight_max]; "token" is the level of the clipped ratio.
    Use it to drop whole responses whose weight is too large, instead of truncating it.
    Liu, Li et al. 2025, "When Speed Kills Stability"; named as in arXiv 2603.19470 Table 1. Other sources call
    `icepop`, whose weight is that of a token, "token MIS".
    """
    weight = Weight("sequence", "mask", weight_min, weight_max, normalize)
    return Objective("token-mis", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight)


@preset
def seq_mis(
    *,
    weight_min: float = 0.0,
    weight_max: float = 2.0,
    normalize: bool = False,
    clip_low: float = 0.5,
    clip_high: float = 3.0,
    clip_dual: float | None = None,
) -> Objective:
    """PPO on the product of current/proximal, times that of proximal/behavior over the response, 0 outside a band.

    The band is [weight_min, weight_max].
    Use it as `token-mis`, where clipping too should decide about whole responses.
    Liu, Li et al. 2025, "When Speed Kills Stability"; arXiv 2603.19470 Table 1.
    """
    weight = Weight("sequence", "mask", weight_min, weight_max, normalize)
    return Objective("seq-mis", Ratio("sequence"), Clipped(clip_low, clip_high, clip_dual), weight)


@preset
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


@preset
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


@preset
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


@preset
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


@preset
def opsm(
    *, delta: float = 0.05, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None
) -> Objective:
    """GRPO that drops responses with A < 0 and mean(log mu - log pi) above `delta`.

    Use it for stale rollouts and many updates per batch; drift and mismatch both count.
    DeepSeek-V3.2, arXiv 2512.02556.
    """
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("opsm", Ratio(), surrogate, masks=(OPSM(delta),), aggregation=SEQUENCE_MEAN)
