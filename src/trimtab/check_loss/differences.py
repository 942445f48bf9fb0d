"""What differs between a loss and an objective, in words: the cause first, each in one sentence with what to change."""

from __future__ import annotations

import importlib.resources
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from trimtab.check_loss.bounds import differing_bounds
from trimtab.check_loss.probes import DRIFT, DRIFT_ALL, MISMATCH, PROBES, UP, Batch, Probe, Update, of_rows
from trimtab.check_loss.readings import FAR, RANDOM, REJECTED, SHIFTS, SIGNS, SPREADS, TO_REFERENCE, UNKNOWN, Readings

TEXTS = tomllib.loads((importlib.resources.files("trimtab.check_loss") / "differences.toml").read_text("utf-8"))
KINDS = tuple(TEXTS["kinds"])
"""Kinds of differences, most harmful first, as far as one does not hide another."""
NOTES = ("exponent",)
"""Kinds that a right loss may have."""
OF_RATIO = ("dual-clip", "min-max", "clip-side", "clip", "policy", "level", "kink", "shape", "log-ratio")
"""Kinds that hide how far exponents are bounded."""
NAMES = {"current": "π", "proximal": "π_old", "behavior": "μ"}


@dataclass(frozen=True)
class Difference:
    """kind: one of `KINDS`. text: a sentence with figures and what to change."""

    kind: str
    text: str


@dataclass
class Comparison:
    """What differs in `mine` from the objective `theirs`, and the name of that."""

    mine: Readings
    theirs: Readings
    name: str
    found: list[Difference] = field(default_factory=list)

    def differences(self) -> list[Difference]:
        """Returns what differs; nothing if no probe and no random batch does."""
        if self.mine.rounded and not self.theirs.rounded:
            self._add("rounding", "digits")
            return self.found
        self._neutral()
        normalized = self._has("normalized-advantage")
        unread = self._has("no-gradient", "dropped", "alignment", "log-ratio")
        hidden = unread or self._has("live-weight")
        if not normalized:
            self._without_advantage()
        if not hidden:
            if not normalized and not self._others() and not self._ratio():
                for kind, key, bounds in differing_bounds(self.mine, self.theirs, self.name):
                    self._add(kind, key, bounds=bounds)
                if not self.found:
                    self._curves("shape", "apart", PROBES, SHIFTS)
            self._zero_advantage()
        self._padding()
        if not unread:
            self._denominator()
            self._defaults()
        for rest in (self._inputs, self._random, self._of_tokens):
            if all(one.kind == "micro-batches" for one in self.found):
                rest()
        if not hidden and not self._has(*OF_RATIO, "normalized-advantage", "batch-statistics"):
            self._curves("exponent", "reach", (DRIFT,), FAR)
        for policy, change in list(self.mine.padding["nan"].items())[:1]:
            self._add("nan", "both" if math.isnan(change) else "gradient", policy=policy)
        return sorted(self.found, key=lambda one: one.kind == "value")

    @property
    def both(self) -> tuple[Readings, Readings]:
        return self.mine, self.theirs

    def _add(self, kind: str, key: str, **values: Any) -> None:
        """Adds a sentence of differences.toml."""
        texts = TEXTS["kinds"]["clip"] | TEXTS["kinds"][kind]
        self.found.append(Difference(kind, texts[key].format(name=self.name, **values)))

    def _has(self, *kinds: str) -> bool:
        return any(one.kind in kinds for one in self.found)

    def _neutral(self) -> None:
        """What shows where all policies are equal."""
        (batch, own), (_, other) = (one.neutral["plain"] for one in self.both)
        mask = batch["mask"]
        gradient, flat = (own / other)[mask], (self.mine.flat / self.theirs.flat)[mask]
        lengths = mask.sum(1, keepdim=True).expand_as(mask)[mask].double()
        same_value = _gap(self.mine.by_advantage / self.theirs.by_advantage, 1.0) < 1e-9
        for factor in (3, 100):
            times, expected = (one.homogeneity(factor) for one in self.both)
            if abs(times - expected) > 1e-6 * factor and not self._has("normalized-advantage"):
                self._add("normalized-advantage", "times", factor=factor, own=times, other=expected)
        linear = not self._has("normalized-advantage")
        if linear and not same_value and _gap(gradient, flat) > 1e-6:
            self._add("alignment", "shifted", times=_range(gradient / flat))
        elif linear and self._dropped(own, other, batch):
            return
        elif linear and _gap(self.mine.of_others, 1.0) > 1e-6:
            self._add("batch-statistics", "advantage", times=_range(self.mine.of_others))
        elif same_value and _gap(gradient, -1.0) < 1e-6:
            self._add("sign", "ratio")
        elif same_value and min(_gap(gradient, times) for times in (1.0, lengths, 1 / lengths)) > 1e-6:
            # A product in place of a geometric mean has the gradient times the length: `_ratio` names it.
            self._add("live-weight", "gradient", times=_range(gradient))
        elif not same_value and bool((gradient < 0).all()):
            self._add("sign", "rises")
        elif not same_value and torch.equal(gradient < 0, (batch["advantage"] < 0).expand_as(mask)[mask]):
            self._add("sign", "lost")

    def _dropped(self, own: Tensor, other: Tensor, batch: Batch) -> bool:
        """Which tokens get no gradient where all policies are equal, though the objective gives them one."""
        trained = other.abs() > 1e-12
        gone = trained & ~(own.abs() > 1e-12)
        if not bool(gone.any()):
            return False
        place, advantage = torch.arange(own.shape[1]).expand_as(own), batch["advantage"]
        apart = {**batch, **{name: batch[name] - low for low, name in enumerate(NAMES, 2)}}
        sets = {
            "tokens with A < 0 get": trained & (advantage < 0),
            "tokens with A > 0 get": trained & (advantage > 0),
            "the last trained token of a response gets": trained & (place == trained.sum(1, keepdim=True) - 1),
            "the first trained token of a response gets": trained & (place == 0),
        }
        who = next((words for words, tokens in sets.items() if torch.equal(gone, tokens)), "some tokens get")
        if bool(own.isnan().any()):
            self._add("no-gradient", "nan")
        elif bool((self.mine.loss.policy_gradient(apart).abs() > 1e-12)[gone].any()):
            self._add("log-ratio", "equal", who=who)
        elif torch.equal(gone, trained):
            self._add("no-gradient", "detached")
        else:
            self._add("dropped", "tokens", who=who)
        return True

    def _without_advantage(self) -> None:
        """Whether responses with A = 0 are left out of the denominator: one of three, and none of three."""
        times = []
        for middle in (UP, 0.0):
            batch = {**of_rows(3, UP), "advantage": torch.tensor([[UP], [middle], [UP]]).double()}
            own, other = (one.loss.read(batch).gradient[::2, :-2] for one in self.both)
            times.append(own / other)
        if _gap(times[1] / times[0], 1.5) <= 1e-6:
            self._add("denominator", "zero")

    def _others(self) -> bool:
        """Whether a response changes the gradient of others, and why."""
        near, (*moved, padded) = self.mine.split
        if self._has("batch-statistics"):
            return True
        if any(float(part.max() - part.min()) > 1e-6 for part in near):
            self._add("batch-statistics", "part", times=_range(torch.cat(near)))
            return True
        for key, own in self.mine.neighbors.items():
            (x, _, probe), other = key, self.theirs.neighbors[key]
            where = f"where {self.theirs.label(probe).partition(' ')[0]} is {math.exp(x):.3g}"
            if _counts_kept(own, other, torch.ones_like(own, dtype=torch.bool)):
                self._add("denominator", "rejected", where=where, times=float(own.max()))
                return True
            others, expected = own[[0, 2]], other[[0, 2]]
            if not _gap(others, expected) <= 1e-6:
                by_mean = bool(own.all()) and abs(float(own.mean()) - 1) < 1e-6
                values = {"times": _range(others), "where": where, "expected": _range(expected)}
                self._add("batch-statistics", "mean" if by_mean else "axis", **values)
                return True
        if _gap(torch.cat(moved), 1.0) > 1e-6:
            self._add("batch-statistics", "part", times=_range(torch.cat(moved)))
            return True
        if _gap(padded, 1.0) > 1e-6:
            self._add("denominator", "padding", times=_range(padded))
            return True
        return False

    def _defaults(self) -> None:
        """Whether the default of a count is that of the batch."""
        found: list[tuple[str, str]] = []
        for batch in (*REJECTED, *RANDOM):
            parts = (Update(batch, counted=False), None)
            own, other = (self.mine.loss.read(batch, update).gradient for update in parts)
            if _gap(own.nan_to_num(), other.nan_to_num()) > 1e-9 * float(other.nan_to_num().abs().max()):
                found.append(("kept" if _counts_kept(own, other, batch["mask"]) else "count", _range(own / other)))
        for key, times in sorted(found, key=lambda one: one[0] != "kept")[:1]:
            self._add("default", key, times=times)

    def _ratio(self) -> bool:
        """Whether other policies are compared, or at another level, by the local exponents."""
        mine, theirs = self.both
        for probe, positive in product((DRIFT, MISMATCH), SIGNS):
            slopes = [one.exponent(positive, probe.policy) for one in self.both]
            straight = abs(mine.curvature(probe, positive)) < 1e-3 < 0.01 < theirs.curvature(probe, positive)
            if straight and abs(slopes[0] - slopes[1]) < 2e-3:
                self._add("log-ratio", "straight", probe=theirs.label(probe))
                return True
        differing = [key for key, value in theirs.exponents.items() if not abs(mine.exponents[key] - value) < 2e-3]
        if not differing:
            return False
        positive, policy, place, _ = key = differing[0]
        changes = f"{NAMES[policy]} of a token changes the weight of a token {place} it"
        own, other = ({name: one.exponent(positive, name) for name in NAMES} for one in self.both)
        used, expected = ({name for name, power in one.items() if abs(power) > 1e-3} for one in (own, other))
        proportional = used == expected and len({round(own[name] / other[name], 3) for name in expected}) <= 1
        levels, weighted = ([one.level(positive, who) for one in self.both] for who in ("current", "behavior"))
        kinked = [name for name in NAMES if mine.kink(positive, name) > 1e-2 > theirs.kink(positive, name)]
        doubled = {name: other[name] * (1 + (proportional or name == "behavior")) for name in expected}
        unused = [probe for probe in (DRIFT, MISMATCH) if probe.policy in expected - used]
        firsts = [(probe.policy, side[0]) for probe in unused for side in mine.bends(probe).values() if side]
        inside = [(name, bend.x) for name, bend in firsts if bend.kind == "jump"]
        wholes = [replace(probe, span="response") for probe in unused]
        shift, advantage = torch.tensor([0.1]).double(), SIGNS[positive]
        elsewhere = [one.policy for one in wholes if _gap(mine.weights(one, shift, advantage), 1.0) > 1e-6]
        if math.isnan(mine.exponents[key]):
            self._add("level", "unread", changes=changes)
        elif inside:
            name, x = inside[0]
            self._add("clip" if name == "current" else "weight", "inside", policy=NAMES[name], ratio=math.exp(x))
        elif not used and expected and any(any(mine.bends(probe).values()) for probe in (DRIFT, DRIFT_ALL)):
            self._add("log-ratio", "constant")
        elif elsewhere:
            self._add("level", "elsewhere", policy=NAMES[elsewhere[0]])
        elif all(abs(own[name] + other[name]) < 2e-3 for name in NAMES):
            self._add("inverse", "ratio", own=_powers(own), other=_powers(other))
        elif kinked:
            below, above = (abs(mine.exponents[positive, kinked[0], "own", side]) for side in (-1, 1))
            self._add("kink", "powers", below=below, above=above)
        elif levels[0] != levels[1] and proportional:
            self._add("level", "ratio", own=TEXTS["levels"][levels[0]], other=TEXTS["levels"][levels[1]])
        elif "behavior" in used & expected and levels[0] == levels[1] and weighted[0] != weighted[1]:
            self._add("level", "weight", own=TEXTS["levels"][weighted[0]], other=TEXTS["levels"][weighted[1]])
        elif all(abs(own[name] - other[name]) < 2e-3 for name in NAMES):
            self._add("level", "tokens", changes=changes, own=mine.exponents[key], other=theirs.exponents[key])
        else:
            twice = used and all(abs(own[name] - power) < 2e-3 for name, power in doubled.items())
            powers = {"own": _powers(own), "other": _powers(other)}
            self._add("shape" if proportional else "policy", "twice" if twice else "powers", **powers)
        return True

    def _curves(self, kind: str, key: str, probes: Sequence[Probe], shifts: Tensor) -> None:
        """The largest difference of the weights of a probe at these shifts, and up to which shift there is none."""
        for probe, (positive, advantage) in product(probes, SIGNS.items()):
            reached = shifts.clamp(max=probe.highest)
            own, other = (one.weights(probe, reached, advantage) for one in self.both)
            gap = ((own - other).abs() / (1 + other.abs())).nan_to_num(math.inf)
            if float(gap.max()) > 1e-6:
                worst, reach = int(gap.argmax()), math.floor(float(reached.abs()[gap > 1e-6].min()))
                where = f"for A {'>' if positive else '<'} 0 and a log-ratio of {float(reached[worst]):.4g}"
                values = {"own": float(own[worst]), "other": float(other[worst]) + 0}
                self._add(kind, key, probe=self.theirs.label(probe), where=where, reach=reach, **values)
                return

    def _zero_advantage(self) -> None:
        """KL, entropy and regression: what is left where advantages are 0."""
        mine, theirs = self.both
        read = slice(len(TO_REFERENCE) if theirs.kl_form[0] == "none" else None)  # of no KL nothing is weighted
        if _gap(mine.kl_curve[read], theirs.kl_curve[read]) > 1e-7:
            self._add("kl", "term", own=_kl_words(mine), other=_kl_words(theirs))
        gap = (mine.pull - theirs.pull).abs()
        if not float(gap.max()) <= 1e-7 and not self.found:
            worst = int(gap.argmax())
            moved = {"who": "policy" if worst < 4 else "sampler", "nats": (-1, -0.5, 0.5, 1)[worst % 4]}
            kind = "policy" if float(gap[:4].max()) <= 1e-7 else "zero-advantage"
            self._add(kind, "zero", own=float(mine.pull[worst]), other=float(theirs.pull[worst]), **moved)

    def _padding(self) -> None:
        counted = self.mine.padding["number"]
        for policy in sorted(counted, key=lambda name: name != "reference")[:1]:
            kind = "kl-padding" if policy == "reference" else "padding"
            self._add(kind, "number", policy=policy, change=counted[policy])

    def _denominator(self) -> None:
        (own, factor), (other, expected) = (one.aggregation for one in self.both)
        if self._has("normalized-advantage", "live-weight"):
            pass
        elif own != other and not self._has("denominator"):
            self._add("denominator", "other", own=own, other=other)
        elif own != UNKNOWN and abs(factor / expected - 1) > 1e-6 and not self._has("sign"):
            self._add("scale", "times", times=factor / expected)
        mine, theirs = (torch.cat(one.split[0]) for one in self.both)
        if not _gap(mine, theirs) <= 1e-6 and not self._has("batch-statistics"):
            self._add("micro-batches", "times", times=_range(mine))

    def _inputs(self) -> None:
        for name, expected in self.theirs.inputs.items():
            if _gap(own := self.mine.inputs[name], expected) > 1e-7:
                self._add("input", "effect", field=name, effect="another" if bool(own.count_nonzero()) else "no")
                return

    def _random(self) -> None:
        for spread, own, other in zip(SPREADS, self.mine.random, self.theirs.random, strict=True):
            gap = _gap(own.gradient, other.gradient) / max(float(other.gradient.abs().max()), 1e-12)
            if not gap <= 1e-6:
                self._add("unexplained", "gap", spread=spread, gap=gap)
                return
            if not abs(own.loss - other.loss) <= 1e-6 * max(1.0, abs(other.loss)) and not self._has("value"):
                self._add("value", "value", own=own.loss, other=other.loss, spread=spread)

    def _of_tokens(self) -> None:
        """Whether advantages that differ within a response are taken as the objective takes them."""
        for packed in (False, True):
            for (mask, own), (_, other) in zip(*(one.of_tokens(packed) for one in self.both), strict=False):
                counts = _counts_kept(own, other, mask)
                if (counts or not packed) and not _gap(own, other) <= 1e-6 * float(other.abs().max()):
                    self._add("denominator", "differing" if counts else "one-for-all", times=_range(own / other))
                    return


def _counts_kept(own: Tensor, other: Tensor, mask: Tensor) -> bool:
    """Whether gradients are larger by as much as there are fewer tokens with one, in all or in the same response."""
    kept, times = (other != 0) & mask, own / other
    if not torch.equal(own[mask] != 0, kept[mask]) or not _gap(times[kept], 1.0) > 1e-6:
        return False
    shares = kept.sum() / mask.sum(), kept.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return any(_gap((times * share)[kept], 1.0) < 1e-6 for share in shares)


def _kl_words(readings: Readings) -> str:
    kind, coefficient = readings.kl_form
    if kind == "none":
        return "none"
    weights = zip(("μ", "π_old"), readings.kl_weights.tolist(), strict=True)
    weighted = [f", {times:.4g} times where {who} is 0.5 nats away" for who, times in weights if abs(times - 1) > 1e-9]
    if kind == "k1" and coefficient < 0:
        kind, coefficient = "k1 of the reverse direction", -coefficient
    form = "of no known form" if kind == "other" else f"{kind} with the coefficient {coefficient:.4g}"
    return "".join([form, *weighted])


def _powers(powers: dict[str, float]) -> str:
    return " ".join(f"{NAMES[name]}^{power:.3g}" for name, power in powers.items() if abs(power) > 1e-3) or "no policy"


def _gap(a: Tensor, b: Tensor | float) -> float:
    return float((a - b).abs().max())


def _range(values: Tensor) -> str:
    """Returns the smallest and the largest; NaN is 0 / 0, a gradient that is 0 on both sides."""
    values = values[values.isfinite()] + 0.0  # no -0
    if not len(values):
        return "an unknown number of"
    low, high = float(values.min()), float(values.max())
    return f"{low:.3g}" if high - low < 1e-6 else f"{low:.3g} to {high:.3g}"
