"""Every named method: a short constructor over parts. Its keywords are the method's own, with complete defaults.

What all methods share (aggregation, denominator, length_max, kl, kl_coef, entropy_coef) is set by `objective`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from trimtab.corrections.masks import OPSM, Band, Divergence
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError, nearest
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.objective import Objective, Ratio
from trimtab.objectives.regularizers import KL
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, SecondMoment, Shaped

LENGTH_MAX = 1024
"""Tokens; the response budget of `dr-grpo` and `luffy` until a recipe sets `length_max` to its own."""

BY_SEQUENCE = Aggregation("seq-mean-token-mean")
BUDGET = Aggregation("constant", length_max=LENGTH_MAX)

Preset = Callable[..., Objective]
_PRESETS: dict[str, Preset] = {}


def _preset(function: Preset) -> Preset:
    """Register a constructor under its name, hyphenated."""
    _PRESETS[function.__name__.replace("_", "-")] = function
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


def objectives() -> list[str]:
    """Names of all methods."""
    return list(_PRESETS)


def keywords_of(name: str) -> dict[str, Any]:
    """Every keyword a method takes, its own and the shared ones, with its default. `TrimtabError` if unknown."""
    if name not in _PRESETS:
        raise TrimtabError(f"unknown objective {name!r}{nearest(name, _PRESETS)}")
    own = {key: part.default for key, part in inspect.signature(_PRESETS[name]).parameters.items()}
    base = _PRESETS[name]()
    shared = {"denominator": "original", "kl": base.kl.kind, "kl_coef": 0.0, "entropy_coef": 0.0}
    if name == "oapl":
        return own | shared
    return own | {"aggregation": base.aggregation.kind, "length_max": base.aggregation.length_max} | shared


def objective(name: str, **overrides: Any) -> Objective:
    """A named method with some of its keywords changed.

    Every method has its own keywords (its constructor in this file) and shares `aggregation`, `length_max`,
    `denominator`, `kl`, `kl_coef`, `entropy_coef`; `oapl` has its own aggregation. Raises `TrimtabError` for an unknown
    name, an unknown keyword, one of a wrong type, and one that would have no effect.
    """
    known = keywords_of(name)
    for key in overrides:
        if key not in known:
            raise TrimtabError(f"objective {name!r} has no keyword {key!r}{nearest(key, known)}")
    given = {key: _checked(name, key, value, known[key]) for key, value in overrides.items()}
    own = inspect.signature(_PRESETS[name]).parameters
    try:
        base = _PRESETS[name](**{key: value for key, value in given.items() if key in own})
        return _with_shared(base, {key: value for key, value in given.items() if key not in own})
    except ValueError as error:
        raise TrimtabError(f"objective {name!r}: {error}") from None


def _with_shared(base: Objective, given: dict[str, Any]) -> Objective:
    if "kl" in given and "kl_coef" not in given:
        raise TrimtabError(f"kl = {given['kl']!r} has no effect without kl_coef")
    kind = given.get("aggregation", base.aggregation.kind)
    budget = base.aggregation.length_max if kind == base.aggregation.kind else None
    return replace(
        base,
        aggregation=Aggregation(kind, given.get("denominator", "original"), given.get("length_max", budget)),
        kl=KL(given.get("kl", "k3"), given.get("kl_coef", 0.0)),
        entropy_coef=given.get("entropy_coef", 0.0),
    )


def _checked(name: str, key: str, value: Any, default: Any) -> Any:
    """The value in the type of its default, numbers as float; None only where it switches something off."""
    if isinstance(default, bool | str):
        right = isinstance(value, type(default))
    elif key == "length_max":
        right = isinstance(value, Integral) and not isinstance(value, bool)
    elif value is None:
        right = key == "clip_dual"
    else:
        right = isinstance(value, Real) and not isinstance(value, bool)
        value = float(value) if right else value
    if not right:
        raise TrimtabError(f"objective {name!r}: {key} = {value!r} has the wrong type")
    return value
