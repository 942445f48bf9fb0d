"""Finds bounds of weights and masks from the ratios of one batch (`objective.calibrate = true`).

Published sequence bounds were tuned on responses of thousands of tokens; on short ones they reject most of a healthy
batch. A bound here is a quantile of what was seen, held inside the range that published bounds span (docs/math.md says
what every bound means, docs/recommendations.md why these shares and ranges).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections import divergences
from trimtab.corrections.masks import OPSM, Band, Divergence
from trimtab.corrections.ratios import Ratios, log_ratio
from trimtab.corrections.reduce import Sequences
from trimtab.errors import TrimtabError
from trimtab.objectives.lookup import is_own, keywords_of, objective
from trimtab.objectives.objective import Objective

SAMPLES_MIN = 20
"""Fewer tokens or responses than this say nothing about a tail."""

TAIL_SAMPLES = 5
"""A quantile is read off directly when at least this many samples lie beyond it, otherwise extrapolated."""


@dataclass(frozen=True)
class Range:
    """How one kind of bound is found. `share` of the samples may lie beyond it, on each bounded side.

    tightest, loosest: its distance from "no difference", in nats of the log-ratio (of the divergence for a divergence).
    """

    share: float
    tightest: float
    loosest: float


WEIGHT = {"token": Range(0.001, math.log(1.5), math.log(5)), "sequence": Range(0.01, math.log(2), math.log(10))}
"""Truncated and clipped weights: nothing is lost beyond the bound, so it stays in verl's 1.5..5 (token), 2..10."""

MASK = {
    "token": Range(0.001, math.log(1.05), math.log(10)),
    "sequence": Range(0.01, math.log(1.05), math.log(10)),
    "geometric": Range(0.01, 1e-3, 0.5),
}
"""Masks. Token: IcePop masks 1 to 2 tokens in 1000. Geometric: verl's 0.999..1.001 is the tightest in use."""

DIVERGENCE = Range(0.01, 1e-5, 0.1)
"""Mean k3 of a response: published dense mismatch starts at 1e-5, MoE mismatch ends at 1e-1."""

DELTA = Range(0.01, 1e-3, 0.5)
"""OPSM's delta: the 95th to 99th percentile of the drift; TRL's 0.5 is the loosest in use."""


@dataclass(frozen=True, eq=False)
class Observed:
    """What bounds are taken from. Parts of a batch are joined with `+`; float64, on the CPU.

    token: (tokens,) log proximal/behavior of trained tokens. sequence, geometric, k3: (sequences,) its sum, its mean
    and the mean k3 of each response with a trained token.
    """

    token: Float[Tensor, "tokens"]
    sequence: Float[Tensor, "sequences"]
    geometric: Float[Tensor, "sequences"]
    k3: Float[Tensor, "sequences"]

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        proximal: Float[Tensor, "batch time"],
        behavior: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"],
        sequence_ids: Int[Tensor, "batch time"] | None = None,
    ) -> Observed:
        sequences = Sequences(mask, sequence_ids)
        ratios = Ratios(log_ratio(proximal, behavior, mask), sequences)
        parts = (ratios.log_sequence, ratios.log_geometric, sequences.mean(divergences.per_token("k3", ratios)))
        per_sequence = (part[sequences.trained].double().cpu() for part in parts)
        return cls(ratios.log[mask].double().cpu(), *per_sequence)

    def __add__(self, other: Observed) -> Observed:
        return Observed(
            torch.cat([self.token, other.token]),
            torch.cat([self.sequence, other.sequence]),
            torch.cat([self.geometric, other.geometric]),
            torch.cat([self.k3, other.k3]),
        )


@dataclass(frozen=True)
class _Bound:
    """One keyword of a preset: which samples decide it, and how."""

    keyword: str
    samples: str
    range: Range
    find: Callable[[Tensor, Range], float]


def bounds_of(preset: str) -> tuple[str, ...]:
    """The keywords of a preset that can be calibrated; none for methods without weights and masks, or of one's own.

    A side the preset leaves open (`weight_min = 0`) stays open. The clip range is not among them: it says how far one
    batch may move the policy, not how far the sampler is away.
    """
    return () if is_own(preset) else tuple(bound.keyword for bound in _bounds(preset))


def calibrated(preset: str, observed: Observed) -> dict[str, float]:
    """The preset's bounds from this data, by keyword, to six digits, rounded towards keeping.

    Raises `TrimtabError` when the preset has no such bounds, when there are too few samples, or one that is not finite.
    """
    bounds = list(_bounds(preset))
    if not bounds:
        raise TrimtabError(f"objective {preset!r} has no bound that calibrate can find: leave calibrate out")
    found = {}
    for bound in bounds:
        samples = getattr(observed, bound.samples)
        if len(samples) < SAMPLES_MIN:
            unit = "trained tokens" if bound.samples == "token" else "responses"
            raise TrimtabError(
                f"calibrate: {len(samples)} {unit} are too few for {bound.keyword}, it needs {SAMPLES_MIN}: use a "
                "larger batch or write the bounds down"
            )
        if not bool(samples.isfinite().all()):
            raise TrimtabError("calibrate: log-probs of the batch are not finite, so it says nothing about bounds")
        found[bound.keyword] = bound.find(samples, bound.range)
    return found


def from_section(section: Mapping[str, Any], bounds: Mapping[str, float] | None = None) -> Objective:
    """The objective an `[objective]` section describes: `name`, `calibrate` and the preset's (or function's) keywords.

    With `calibrate`, `bounds` are those found at step 0; until then the published ones stand, and the equation says so.
    Raises `TrimtabError` for what `objective` refuses, for a preset that has nothing to calibrate, and for bounds that
    are given although they are to be found.
    """
    given = {key: value for key, value in section.items() if key not in ("name", "calibrate", "code", "equation")}
    name, wanted = section["name"], section.get("calibrate", False)
    if section.get("code") is not None:
        raise TrimtabError(
            f"objective {name!r} was given in code (objective.code): pass it again, trimtab.train(..., objective=...)"
        )
    if not isinstance(wanted, bool):
        raise TrimtabError(f"objective.calibrate = {wanted!r} has the wrong type: use true or false")
    if not wanted:
        return objective(name, **given)
    own = bounds_of(name)
    if not own:
        raise TrimtabError(f"objective {name!r} has no bound that calibrate can find: leave calibrate out")
    twice = [key for key in own if key in given]
    if twice:
        raise TrimtabError(
            f"objective.calibrate finds {', '.join(own)} at step 0: leave {', '.join(twice)} out, or calibrate"
        )
    built = objective(name, **given, **(bounds or {}))
    state = "calibrated at step 0" if bounds else "to be calibrated at step 0; the published values stand here"
    return replace(built, notes=(*built.notes, f"{', '.join(own)}: {state}"))


def _bounds(preset: str) -> Iterator[_Bound]:
    built, keywords = objective(preset), keywords_of(preset)
    if built.weight is not None:
        level = built.weight.level
        rule = (MASK if built.weight.bound == "mask" else WEIGHT)[level]
        if keywords.get("weight_min"):
            yield _Bound("weight_min", level, rule, _low)
        yield _Bound("weight_max", level, rule, _high)
    for mask in built.masks:
        if isinstance(mask, Band):
            yield _Bound("keep_min", mask.level, MASK[mask.level], _low)
            yield _Bound("keep_max", mask.level, MASK[mask.level], _high)
        elif isinstance(mask, Divergence):
            yield _Bound("divergence_max", "k3", DIVERGENCE, _divergence)
        elif isinstance(mask, OPSM):
            yield _Bound("delta", "geometric", DELTA, _delta)


def _high(log: Tensor, rule: Range) -> float:
    return _rounded(math.exp(_held(_tail(log, rule.share), rule)), up=True)


def _low(log: Tensor, rule: Range) -> float:
    return _rounded(math.exp(-_held(_tail(-log, rule.share), rule)), up=False)


def _delta(log: Tensor, rule: Range) -> float:
    """Drift is mean(log mu - log pi), the log-ratio with its sign turned."""
    return _rounded(_held(_tail(-log, rule.share), rule), up=True)


def _divergence(values: Tensor, rule: Range) -> float:
    """Extrapolated as a logarithm: a mean of squares has a tail on one side."""
    log = values.clamp(min=rule.tightest * 1e-3).log()
    return _rounded(_held(math.exp(_tail(log, rule.share)), rule), up=True)


def _held(distance: float, rule: Range) -> float:
    return min(max(distance, rule.tightest), rule.loosest)


def _tail(values: Tensor, share: float) -> float:
    """The value that at most `share` of the samples exceed.

    Where fewer than `TAIL_SAMPLES` samples lie beyond it, it rests on one or two of them and may be too close; then a
    quantile that enough samples support is carried outwards as if the tail were normal, and the farther one counts.
    """
    found, supported = _quantile(values, share), TAIL_SAMPLES / len(values)
    if supported <= share:
        return found
    normal, center = NormalDist(), float(values.median())
    factor = normal.inv_cdf(share) / normal.inv_cdf(supported)
    return max(found, center + (_quantile(values, supported) - center) * factor)


def _quantile(values: Tensor, share: float) -> float:
    return float(values.kthvalue(len(values) - int(len(values) * share)).values)


def _rounded(value: float, *, up: bool) -> float:
    """Six digits, so that the equation shows the very number that is used."""
    step = 10.0 ** (math.floor(math.log10(value)) - 5)
    steps = round(value / step, 6)
    return float(f"{(math.ceil if up else math.floor)(steps) * step:.6g}")
