"""Derives bounds of weights and masks from the ratios of one batch (`objective.calibrate = true`).

Published sequence bounds were tuned on responses of thousands of tokens; on short responses they reject most of a
healthy batch. Here a bound is a quantile of the observed values, clamped to the range of published bounds. Shares
and ranges: docs/reference-choosing.md, "Bounds from the data".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections import divergences
from trimtab.corrections.masks import OPSM, Band, Divergence
from trimtab.corrections.ratios import Ratios, log_ratio
from trimtab.corrections.reduce import Sequences
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError
from trimtab.objectives.keywords import UNSET, parse_parts, value_at
from trimtab.objectives.presets import COMPOSED, get_preset, is_custom

SAMPLES_MIN = 20
"""Fewest tokens or responses from which a bound is estimated."""

TAIL_SAMPLES = 5
"""A quantile with at least this many samples beyond it is empirical; with fewer it is extrapolated."""


@dataclass(frozen=True)
class Range:
    """How one kind of bound is estimated.

    share: fraction of the samples that may lie beyond the bound, on each bounded side.
    tightest, loosest: smallest and largest distance of the bound from equal policies, in nats of the log-ratio (of the
        divergence for a divergence).
    """

    share: float
    tightest: float
    loosest: float


WEIGHT = {
    "token": Range(0.001, math.log(1.5), math.log(5)),
    "sequence": Range(0.01, math.log(2), math.log(10)),
    "turn": Range(0.01, math.log(2), math.log(10)),
}
"""Truncated and clipped weights reject nothing: the range is verl's, 1.5..5 (token) and 2..10 (sequence)."""

MASK = {
    "token": Range(0.001, math.log(1.05), math.log(10)),
    "sequence": Range(0.01, math.log(1.05), math.log(10)),
    "geometric": Range(0.01, 1e-3, 0.5),
}
"""Masks. Token: IcePop masks 1 to 2 tokens in 1000. Geometric: the tightest published band is verl's 0.999..1.001."""

DIVERGENCE = Range(0.01, 1e-5, 0.1)
"""Mean k3 of a response: published dense mismatch starts at 1e-5, MoE mismatch ends at 1e-1."""

DELTA = Range(0.01, 1e-3, 0.5)
"""OPSM's delta: the 95th to 99th percentile of the drift; the loosest published value is TRL's 0.5."""


@dataclass(frozen=True, eq=False)
class Observed:
    """The samples that bounds are estimated from, float64 on the CPU. `+` concatenates the samples of two batches.

    Sequences and turns without a trained token are left out.
    """

    token: Float[Tensor, "tokens"]  # log proximal/behavior of the trained tokens
    sequence: Float[Tensor, "sequences"]  # sum of `token` over each sequence
    geometric: Float[Tensor, "sequences"]  # mean of `token` over each sequence
    k3: Float[Tensor, "sequences"]  # mean k3 over each sequence
    turn: Float[Tensor, "turns"] | None = None  # sum of `token` over each turn; None if turns are not known

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        proximal: Float[Tensor, "batch time"],
        behavior: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"],
        sequence_ids: Int[Tensor, "batch time"] | None = None,
        turn: Int[Tensor, "batch time"] | None = None,
    ) -> Observed:
        sequences = Sequences(mask, sequence_ids, turn=turn)
        ratios = Ratios(log_ratio(proximal, behavior, mask), sequences)
        values = (ratios.log_sequence, ratios.log_geometric, sequences.mean(divergences.k3(ratios.log)))
        by_sequence, by_mean, k3 = (value[sequences.trained].double().cpu() for value in values)
        by_turn = None
        if turn is not None:
            by_turn = ratios.log_at("turn")[sequences.turns.trained].double().cpu()
        return cls(ratios.log[mask].double().cpu(), by_sequence, by_mean, k3, by_turn)

    def __add__(self, other: Observed) -> Observed:
        own, added = vars(self), vars(other)
        shared = [name for name in own if own[name] is not None and added[name] is not None]
        return Observed(**{name: torch.cat([own[name], added[name]]) for name in shared})


class _Bound(NamedTuple):
    """A keyword of a preset that can be calibrated: the field of `Observed` it depends on, and its estimator."""

    keyword: str
    samples: str
    range: Range
    estimate: Callable[[Tensor, Range], float]


def bounds_of(name: str) -> tuple[str, ...]:
    """Returns the keywords that can be calibrated: none without weight and masks, or for a custom function.

    A side that the preset leaves open (`weight_min = 0`) stays open. The clip range is not included: it limits how far
    one batch may move the policy and does not depend on the mismatch.
    """
    return tuple(bound.keyword for bound in _bounds(name))


def calibrated(preset: str, observed: Observed) -> dict[str, Any]:
    """Returns the preset's bounds for these samples, by keyword, rounded to six digits towards the looser side.

    Raises `TrimtabError` if the preset has no such bounds, or the samples are too few or not finite.
    """
    values = {}
    for bound in _required_bounds(preset):
        samples = getattr(observed, bound.samples)
        if samples is None:
            raise TrimtabError(f"calibrate: {bound.keyword} is a bound on turns, which are not known here")
        if len(samples) < SAMPLES_MIN:
            unit = {"token": "trained tokens", "turn": "turns"}.get(bound.samples, "responses")
            raise TrimtabError(
                f"calibrate: {len(samples)} {unit} are too few for {bound.keyword}, it needs {SAMPLES_MIN}: use a "
                "larger batch or write the bounds down"
            )
        if not bool(samples.isfinite().all()):
            raise TrimtabError(
                "calibrate: log-probs of the batch are not finite: look for the cause with `trimtab preflight`"
            )
        values[bound.keyword] = bound.estimate(samples, bound.range)
    return values


def check_calibration(name: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the keywords of an objective to calibrate, after checking them against the given keywords and parts.

    Raises `TrimtabError` if the objective has no bound to calibrate, if such a bound is also given, or if a given part
    replaces the part with the bound or bounds the same ratio.
    """
    keywords = tuple(bound.keyword for bound in _required_bounds(name))
    conflicts = [key for key in keywords if key in given]
    if conflicts:
        raise TrimtabError(
            f"objective.calibrate finds {', '.join(keywords)} at step 0: leave {', '.join(conflicts)} "
            f"out{UNSET}, or calibrate"
        )
    if "weight" in given and "weight_max" in keywords:
        raise TrimtabError(
            f"objective.calibrate finds the bounds of the weight of {name!r}, which the given weight replaces: leave "
            "one of them out"
        )
    own = {(mask.rule, mask.reads) for mask in get_preset(name).objective.masks}
    for added in parse_parts(COMPOSED.objective, {"mask": given.get("mask", ())})["masks"]:
        if (added.rule, added.reads) in own:
            raise TrimtabError(
                f"objective.calibrate finds the bounds of {added.rule}, and a mask gives others: leave one of them out"
            )
    return keywords


def _required_bounds(name: str) -> tuple[_Bound, ...]:
    """Returns the bounds to calibrate. Raises `TrimtabError` if there are none."""
    if not (bounds := tuple(_bounds(name))):
        raise TrimtabError(f"objective {name!r} has no bound that calibrate can find: leave calibrate out")
    return bounds


def _bounds(name: str) -> Iterator[_Bound]:
    if is_custom(name):
        return
    preset = get_preset(name)
    for keyword, path in sorted(preset.paths.items(), key=lambda item: not item[1].startswith("weight")):
        place, _, side = path.rpartition(".")
        part, edge = value_at(preset.objective, place), _low if side == "min" else _high
        if isinstance(part, Weight) and side != "normalize" and preset.defaults[keyword] > 0:
            yield _Bound(keyword, part.level, (MASK if part.rejects else WEIGHT)[part.level], edge)
        elif isinstance(part, Band) and part.over == "proximal":
            yield _Bound(keyword, part.level, MASK[part.level], edge)
        elif isinstance(part, Divergence) and (part.kind, part.reduce, part.over) == ("k3", "mean", "proximal"):
            yield _Bound(keyword, "k3", DIVERGENCE, _divergence)
        elif isinstance(part, OPSM):
            yield _Bound(keyword, "geometric", DELTA, _delta)


def _high(log: Tensor, limits: Range) -> float:
    return _round(math.exp(_clamp(_tail(log, limits.share), limits)), up=True)


def _low(log: Tensor, limits: Range) -> float:
    return _round(math.exp(-_clamp(_tail(-log, limits.share), limits)), up=False)


def _delta(log: Tensor, limits: Range) -> float:
    """Returns OPSM's delta. The drift is mean(log mu - log pi), the negative log-ratio."""
    return _round(_clamp(_tail(-log, limits.share), limits), up=True)


def _divergence(values: Tensor, limits: Range) -> float:
    """Returns the bound of k3, extrapolated in log space: the distribution of a mean of squares is skewed."""
    log = values.clamp(min=limits.tightest * 1e-3).log()
    return _round(_clamp(math.exp(_tail(log, limits.share)), limits), up=True)


def _clamp(distance: float, limits: Range) -> float:
    return min(max(distance, limits.tightest), limits.loosest)


def _tail(values: Tensor, share: float) -> float:
    """Returns the value that at most `share` of the samples exceed.

    With fewer than `TAIL_SAMPLES` samples beyond it, the empirical quantile depends on one or two samples and may be
    too small. Then a quantile with enough samples is extrapolated by a normal tail, and the larger value is returned.
    """
    empirical = _quantile(values, beyond := int(len(values) * share))
    if beyond >= TAIL_SAMPLES:
        return empirical
    normal, center = NormalDist(), float(values.median())
    factor = normal.inv_cdf(share) / normal.inv_cdf(TAIL_SAMPLES / len(values))
    return max(empirical, center + (_quantile(values, TAIL_SAMPLES) - center) * factor)


def _quantile(values: Tensor, beyond: int) -> float:
    return float(values.kthvalue(len(values) - beyond).values)


def _round(value: float, *, up: bool) -> float:
    """Rounds up or down to six digits, as many as the equation prints."""
    step = 10.0 ** (math.floor(math.log10(value)) - 5)
    steps = round(value / step, 6)
    return float(f"{(math.ceil if up else math.floor)(steps) * step:.6g}")
