"""The presets: each a short constructor over parts, with the defaults of its paper.

What all methods share (aggregation, denominator, length_max, kl, kl_coef, entropy_coef) is set by `lookup.objective`.
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
"""Tokens; the response budget of `dr-grpo` and `luffy` until a recipe sets `length_max` to its own."""

BY_SEQUENCE = Aggregation("seq-mean-token-mean")
BUDGET = Aggregation("constant", length_max=LENGTH_MAX)

Preset = Callable[..., Objective]
PRESETS: dict[str, Preset] = {}


def _preset(function: Preset) -> Preset:
    """Register a constructor under its name, hyphenated."""
    PRESETS[function.__name__.replace("_", "-")] = function
    return function


# The GRPO family: current against proximal, mismatch ignored.


@_preset
def grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> Objective:
    """DeepSeekMath, arXiv 2402.03300."""
    return Objective("grpo", Ratio(), Clipped(clip_low, clip_high, clip_dual), aggregation=BY_SEQUENCE)


@_preset
def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = None) -> Objective:
    """arXiv 2503.14476."""
    return Objective("dapo", Ratio(), Clipped(clip_low, clip_high, clip_dual))


@_preset
def dr_grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> Objective:
    """arXiv 2503.20783: no std, a constant denominator."""
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("dr-grpo", Ratio(), surrogate, aggregation=BUDGET, advantage="dr-grpo")


@_preset
def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, clip_dual: float | None = None) -> Objective:
    """arXiv 2507.18071, in its token form."""
    return Objective("gspo", Ratio("geometric"), Clipped(clip_low, clip_high, clip_dual), aggregation=BY_SEQUENCE)


@_preset
def cispo(*, ceiling: float = 5.0) -> Objective:
    """arXiv 2506.13585, with the absolute ceiling of arXiv 2510.13786."""
    return Objective("cispo", Ratio(), Reinforce(ceiling))


@_preset
def reinforce() -> Objective:
    """Williams 1992: no ratio at all. What becomes of a batch that is used many times, when nothing says it is old."""
    return Objective("reinforce", Ratio(), LogProb())


# Bypass: current against behavior, no proximal policy.


@_preset
def token_bypass(*, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None) -> Objective:
    """PPO against the sampler itself; on the first update clipping already acts on the mismatch."""
    return Objective("token-bypass", Ratio("token", "behavior"), Clipped(clip_low, clip_high, clip_dual))


@_preset
def seq_bypass(*, clip_low: float = 0.5, clip_high: float = 3.0, clip_dual: float | None = 10.0) -> Objective:
    """Baseline of arXiv 2603.19470: the product ratio, clipped to [0.5, 4]."""
    return Objective("seq-bypass", Ratio("sequence", "behavior"), Clipped(clip_low, clip_high, clip_dual))


# Decoupled: clip current against proximal, correct proximal against behavior.


@_preset
def token_tis(
    *,
    weight_max: float = 2.0,
    normalize: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """Truncated importance sampling per token."""
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
    """Truncated importance sampling with the product over the sequence."""
    weight = Weight("sequence", "truncate", max=weight_max, normalize=normalize)
    return Objective("seq-tis", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight)


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
    """Masked importance sampling as arXiv 2603.19470 Table 1 names it: token ratio, sequence mask."""
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
    """Masked importance sampling, sequence ratio and sequence mask (arXiv 2603.19470 Table 1)."""
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
    """Ring-1T, arXiv 2510.18855: the token weight, zeroed outside its band."""
    weight = Weight("token", "mask", weight_min, weight_max, normalize)
    return Objective("icepop", Ratio(), Clipped(clip_low, clip_high, clip_dual), weight, aggregation=BY_SEQUENCE)


@_preset
def geo_mask(
    *,
    keep_min: float = 0.99,
    keep_max: float = 1.01,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> Objective:
    """Geometric sequence mask: free of the product's length bias."""
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
    """Miles' MIS: geometric mask and clipped token weight."""
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
    """Sequences whose mean k3 is small: trust-region masking (arXiv 2512.23075) on proximal/behavior."""
    masks = (Divergence("k3", "mean", divergence_max),)
    return Objective("k3-mask", Ratio(), Clipped(clip_low, clip_high, clip_dual), masks=masks)


@_preset
def opsm(
    *, delta: float = 0.05, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None
) -> Objective:
    """DeepSeek-V3.2, arXiv 2512.02556: drop bad sequences that have become unlikely."""
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("opsm", Ratio(), surrogate, masks=(OPSM(delta),), aggregation=BY_SEQUENCE)


# The five systems: perturbed, mixed, regression, second moment, external traces.


@_preset
def token_alp(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = 10.0) -> Objective:
    """Adaptive layerwise perturbation, arXiv 2603.19470 eq. 2; `current` comes from the perturbed model."""
    return _alp("token-alp", Ratio("token", "behavior"), Clipped(clip_low, clip_high, clip_dual))


@_preset
def seq_alp(*, clip_low: float = 0.5, clip_high: float = 3.0, clip_dual: float | None = 10.0) -> Objective:
    """arXiv 2603.19470 eq. 3: the product ratio."""
    return _alp("seq-alp", Ratio("sequence", "behavior"), Clipped(clip_low, clip_high, clip_dual))


def _alp(name: str, ratio: Ratio, surrogate: Clipped) -> Objective:
    return Objective(name, ratio, surrogate, notes=("π is the perturbed policy; without noise this equals bypass",))


@_preset
def soup(*, clip_low: float = 0.2, clip_high: float = 0.28, clip_dual: float | None = None) -> Objective:
    """Single-sample mix-policy, arXiv 2601.21476; `behavior` is spliced per token."""
    note = "μ is spliced per token: the historical policy on the prefix, the sampler's on the rest"
    surrogate = Clipped(clip_low, clip_high, clip_dual)
    return Objective("soup", Ratio("token", "behavior"), surrogate, notes=(note,))


@_preset
def oapl(*, beta: float = 1e-3) -> Objective:
    """arXiv 2602.19362 eq. 3: regression of the sequence log-ratio on r - V."""
    return Objective(
        "oapl",
        Ratio("sequence", "behavior"),
        Regression(beta),
        aggregation=Aggregation("trained-mean-token-sum"),
        advantage="optimal",
    )


@_preset
def m2po(*, tau: float = 0.04, form: str = "cap") -> Objective:
    """arXiv 2510.01161: `form="cap"` is its official code, `form="mask"` the rule of the paper."""
    return Objective("m2po", Ratio("token", "behavior"), SecondMoment(tau, form))


@_preset
def luffy(*, gamma: float = 0.1) -> Objective:
    """arXiv 2504.14945: external traces, shaped."""
    return Objective("luffy", Ratio(), Shaped(gamma), aggregation=BUDGET, advantage="dr-grpo")
