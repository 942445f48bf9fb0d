"""Presets with another shape of the ratio: prefix levels, bounds by age, smooth weights, centered scores."""

from __future__ import annotations

from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.presets.registry import SEQUENCE_MEAN, preset
from trimtab.objectives.ratio_bounds import AgedClip, Banded, GrowingClip
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip, QuadraticPenalty, SoftGate
from trimtab.objectives.surrogates import Reinforce


@preset
def ctpo(
    *, clip_low: float = 0.025, clip_high: float = 0.05, clip_dual: float | None = 0.05, power: float = 0.5
) -> Objective:
    """Clips the product of current/proximal over the tokens up to each token, with bounds that grow with its position.

    Use it for many updates a batch on long responses: later tokens add no variance to the weight of earlier ones.
    Causal trajectory policy optimization, arXiv 2605.07331; bounds and dual clip are on log r and times n^power.
    """
    surrogate = GrowingClip(clip_low, clip_high, clip_dual, power)
    return Objective("ctpo", Ratio("prefix"), surrogate, aggregation=SEQUENCE_MEAN)


@preset
def pnpo(*, clip_low: float = 0.2, clip_high: float = 0.2) -> Objective:
    """Weighs each token by the geometric mean of current/proximal up to it, and drops it outside the band.

    Use it as `gspo` for many updates a batch: a token is not judged by those after it.
    Prefix normalization, arXiv 2608.01418; the paper's bounds are not known, these are GRPO's.
    """
    return Objective("pnpo", Ratio("prefix_geometric"), Banded(clip_low, clip_high), aggregation=SEQUENCE_MEAN)


@preset
def a3po(*, clip_low: float = 0.2, clip_high: float = 0.2) -> Objective:
    """Clips current/behavior with bounds that widen with the age of each token.

    Use it for asynchronous rollouts instead of a decoupled loss: it needs no proximal forward.
    A-3PO, arXiv 2512.06547; AReaL's `loglinear`. At age 8 the bounds are .17 and 4.3.
    """
    return Objective("a3po", Ratio("token", "behavior"), AgedClip(clip_low, clip_high))


@preset
def sapo(*, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Objective:
    """Damps the token ratio by a sigmoid instead of clipping it.

    Use it where clipping wastes tokens, as with MoE models; it ignores the mismatch like `grpo`.
    Soft adaptive policy optimization, arXiv 2511.20347; TRL, verl.
    """
    return Objective("sapo", Ratio(), SoftGate(tau_positive, tau_negative), aggregation=SEQUENCE_MEAN)


@preset
def vespo(
    *, k1_positive: float = 2.0, k2_positive: float = 3.0, k1_negative: float = 3.0, k2_negative: float = 2.0
) -> Objective:
    """Weighs each response by a smooth function of its product ratio current/behavior that vanishes far from 1.

    Use it for very stale rollouts of short or moderate length: the product is not normalized by length.
    Variational sequence-level soft policy optimization, arXiv 2602.10693; TRL.
    """
    surrogate = GammaWeight(k1_positive, k2_positive, k1_negative, k2_negative)
    return Objective("vespo", Ratio("sequence", "behavior"), surrogate)


@preset
def gmpo(*, clip_low: float = 0.4, clip_high: float = 0.4) -> Objective:
    """The geometric mean of the token ratios, each clipped in log space first.

    Use it where single outliers dominate the arithmetic mean; it ignores the mismatch like `grpo`.
    Geometric-mean policy optimization, arXiv 2507.20673; verl's `geo_mean`. The bounds are on log r.
    """
    return Objective("gmpo", Ratio(), GeometricClip(clip_low, clip_high), aggregation=SEQUENCE_MEAN)


@preset
def drpo(*, epsilon: float = 0.15) -> Objective:
    """A quadratic penalty on current/behavior in place of a mask: the gradient turns where |pi - mu| passes epsilon.

    Use it as `dppo`, where a hard mask makes training unsteady.
    Divergence-regularized policy optimization, arXiv 2606.09821; epsilon on DPPO's scale.
    """
    return Objective("drpo", Ratio("token", "behavior"), QuadraticPenalty(epsilon))


@preset
def score_centering(*, ceiling: float = 2.0) -> Objective:
    """Token weights current/behavior up to `ceiling`, minus the expected score under the sampler.

    Use it with samplers that return their most probable ids (`[sampling] top_logprobs`), quantized ones first.
    Score centering, arXiv 2609.20807; advantages are centered and not divided by the group's std.
    """
    ratio = Ratio("token", "behavior")
    return Objective("score-centering", ratio, Reinforce(ceiling), centering=True, advantage="dr-grpo")
