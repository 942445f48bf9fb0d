"""Says what differs between a loss and an objective: the cause first, in sentences that say what to change."""

from __future__ import annotations

import importlib.resources
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from trimtab.check_loss import readings
from trimtab.check_loss.bounds import differing_bounds
from trimtab.check_loss.exponents import differing_exponents
from trimtab.check_loss.probes import DRIFT, POLICIES, POSITIVE, PROBES, Batch, Probe, Update, of_rows
from trimtab.check_loss.readings import ADVANTAGES, SPREADS, TO_REFERENCE, UNKNOWN, Readings

TEXTS = tomllib.loads((importlib.resources.files("trimtab.check_loss") / "differences.toml").read_text("utf-8"))
KINDS = tuple(TEXTS)
"""Kinds of differences, most harmful first; a kind that hides another comes before it."""
NOTES = ("exponent",)
"""Kinds that a right loss may have."""
HIDES_EXPONENT = ("dual-clip", "min-max", "clip-side", "clip", "policy", "level", "kink", "shape", "log-ratio")
HIDES_EXPONENT += ("normalized-advantage", "batch-statistics")
"""Kinds that hide "exponent": at which log-ratio a loss clamps."""
CLAMP = 10
"""Losses clamp log-ratios here or farther from 0, before exp; what is nearer is a bound of the objective."""


@dataclass(frozen=True)
class Difference:
    """A difference of one of the `KINDS`, and a sentence with its figures and what to change."""

    kind: str
    text: str


@dataclass
class Comparison:
    """Compares the readings of a loss, `actual`, with those of an objective, `expected`, which has this `name`."""

    actual: Readings
    expected: Readings
    name: str
    found: list[Difference] = field(default_factory=list)

    def differences(self) -> list[Difference]:
        """Returns what differs: an empty list if all probes and all random batches agree."""
        if self.actual.rounded and not self.expected.rounded:
            self._add("rounding", "digits")
            return self.found
        self._equal_policies()
        normalized = self._has("normalized-advantage")
        # Weights are relative to the gradient if all policies are equal: if that one is wrong, they say nothing.
        unread = self._has("no-gradient", "dropped", "alignment", "log-ratio")
        hidden = unread or self._has("live-weight")
        if not normalized:
            self._without_advantage()
        if not hidden:
            if not normalized and not self._other_responses():
                causes = differing_exponents(*self._sides) or differing_bounds(*self._sides, self.name)
                for kind, key, figures in causes:
                    self._add(kind, key, **figures)
                if not self.found:
                    self._weights("shape", "apart", PROBES, readings.SHIFTS)
            self._zero_advantage()
        self._padding()
        if not unread:
            self._denominator()
            self._default_counts()
        for remaining in (self._inputs, self._random, self._advantages_of_tokens):
            if all(difference.kind == "micro-batches" for difference in self.found):
                remaining()
        if not hidden and not self._has(*HIDES_EXPONENT):
            self._weights("exponent", "reach", (DRIFT,), readings.FAR_SHIFTS)
        for policy, change in list(self.actual.padding["nan"].items())[:1]:
            self._add("nan", "both" if math.isnan(change) else "gradient", policy=policy)
        return sorted(self.found, key=lambda difference: difference.kind == "value")

    @property
    def _sides(self) -> tuple[Readings, Readings]:
        """The loss and the objective."""
        return self.actual, self.expected

    def _add(self, kind: str, key: str, **figures: Any) -> None:
        """Adds the sentence that differences.toml has for this kind and key. Every kind may use those of `clip`."""
        texts = TEXTS["clip"] | TEXTS[kind]
        self.found.append(Difference(kind, texts[key].format(name=self.name, **figures)))

    def _has(self, *kinds: str) -> bool:
        return any(difference.kind in kinds for difference in self.found)

    def _equal_policies(self) -> None:
        """Compares gradients where all policies are equal."""
        (batch, gradients), (_, expected_gradients) = (side.neutral["plain"] for side in self._sides)
        mask = batch["mask"]
        gradient = (gradients / expected_gradients)[mask]
        if_logps_equal = (self.actual.gradient_if_logps_equal / self.expected.gradient_if_logps_equal)[mask]
        lengths = mask.sum(1, keepdim=True).expand_as(mask)[mask].double()
        same_value = _gap(self.actual.by_advantage / self.expected.by_advantage, 1.0) < 1e-9
        for factor in (3, 100):
            actual, expected = (side.homogeneity(factor) for side in self._sides)
            if abs(actual - expected) > 1e-6 * factor and not self._has("normalized-advantage"):
                self._add("normalized-advantage", "times", factor=factor, actual=actual + 0.0, expected=expected)
        linear = not self._has("normalized-advantage")
        if linear and not same_value and _gap(gradient, if_logps_equal) > 1e-6:
            self._add("alignment", "shifted", times=_range(gradient / if_logps_equal))
        elif linear and self._dropped(gradients, expected_gradients, batch):
            return
        elif linear and _gap(self.actual.effect_of_other_advantages, 1.0) > 1e-6:
            self._add("batch-statistics", "advantage", times=_range(self.actual.effect_of_other_advantages))
        elif same_value and _gap(gradient, -1.0) < 1e-6:
            self._add("sign", "ratio")
        elif same_value and min(_gap(gradient, times) for times in (1.0, lengths, 1 / lengths)) > 1e-6:
            # A product in place of a geometric mean has the gradient times the length: `differing_exponents` names it.
            self._add("live-weight", "gradient", times=_range(gradient))
        elif not same_value and bool((gradient < 0).all()):
            self._add("sign", "rises")
        elif not same_value and torch.equal(gradient < 0, (batch["advantage"] < 0).expand_as(mask)[mask]):
            self._add("sign", "lost")

    def _dropped(self, actual: Tensor, expected: Tensor, batch: Batch) -> bool:
        """Returns whether tokens that the objective trains get no gradient where all policies are equal; adds which."""
        trained = expected.abs() > 1e-12
        gone = trained & ~(actual.abs() > 1e-12)
        if not bool(gone.any()):
            return False
        place, advantage = torch.arange(actual.shape[1]).expand_as(actual), batch["advantage"]
        apart = {**batch, **{name: batch[name] - low for low, name in enumerate(POLICIES, 2)}}
        sets = {
            "tokens with A < 0 get": trained & (advantage < 0),
            "tokens with A > 0 get": trained & (advantage > 0),
            "the last trained token of a response gets": trained & (place == trained.sum(1, keepdim=True) - 1),
            "the first trained token of a response gets": trained & (place == 0),
        }
        who = next((words for words, tokens in sets.items() if torch.equal(gone, tokens)), "some tokens get")
        if bool(actual.isnan().any()):
            self._add("no-gradient", "nan")
        elif bool((self.actual.loss.policy_gradient(apart).abs() > 1e-12)[gone].any()):
            self._add("log-ratio", "equal", who=who)
        elif torch.equal(gone, trained):
            self._add("no-gradient", "detached")
        else:
            self._add("dropped", "tokens", who=who)
        return True

    def _without_advantage(self) -> None:
        """Compares gradients if one of three responses has A = 0, and if none has: are all three in the denominator?"""
        times = []
        for middle in (POSITIVE, 0.0):
            batch = {**of_rows(3, POSITIVE), "advantage": torch.tensor([[POSITIVE], [middle], [POSITIVE]]).double()}
            actual, expected = (side.loss.read(batch).gradient[::2, :-2] for side in self._sides)
            times.append(actual / expected)
        if _gap(times[1] / times[0], 1.5) <= 1e-6:
            self._add("denominator", "zero")

    def _other_responses(self) -> bool:
        """Returns whether a response changes the gradient of other responses; adds why."""
        near, (*moved, padded) = self.actual.micro_batch_ratios
        if self._has("batch-statistics"):
            return True
        if any(float(part.max() - part.min()) > 1e-6 for part in near):
            self._add("batch-statistics", "part", times=_range(torch.cat(near)))
            return True
        for key, actual in self.actual.neighbors.items():
            (x, _, probe), expected = key, self.expected.neighbors[key]
            where = f"where {self.expected.label(probe).partition(' ')[0]} is {math.exp(x):.3g}"
            if _counts_kept(actual, expected, torch.ones_like(actual, dtype=torch.bool)):
                self._add("denominator", "rejected", where=where, times=float(actual.max()))
                return True
            unmoved, expected_unmoved = actual[[0, 2]], expected[[0, 2]]
            if not _gap(unmoved, expected_unmoved) <= 1e-6:
                by_mean = bool(actual.all()) and abs(float(actual.mean()) - 1) < 1e-6
                values = {"times": _range(unmoved), "where": where, "expected": _range(expected_unmoved)}
                self._add("batch-statistics", "mean" if by_mean else "axis", **values)
                return True
        if _gap(torch.cat(moved), 1.0) > 1e-6:
            self._add("batch-statistics", "part", times=_range(torch.cat(moved)))
            return True
        if _gap(padded, 1.0) > 1e-6:
            self._add("denominator", "padding", times=_range(padded))
            return True
        return False

    def _default_counts(self) -> None:
        """Checks that a count of the update, if it is left at its default, is the count of the batch."""
        found: list[tuple[str, str]] = []
        for batch in (*readings.REJECTED_BATCHES, *readings.RANDOM_BATCHES):
            updates = (Update(batch, counted=False), None)
            default, given = (self.actual.loss.read(batch, update).gradient for update in updates)
            if _gap(default.nan_to_num(), given.nan_to_num()) > 1e-9 * float(given.nan_to_num().abs().max()):
                key = "kept" if _counts_kept(default, given, batch["mask"]) else "count"
                found.append((key, _range(default / given)))
        for key, times in sorted(found, key=lambda item: item[0] != "kept")[:1]:
            self._add("default", key, times=times)

    def _weights(self, kind: str, key: str, probes: Sequence[Probe], shifts: Tensor) -> None:
        """Adds where the weights of a probe differ most at these shifts, and up to which shift they are equal."""
        for probe, (positive, advantage) in product(probes, ADVANTAGES.items()):
            reached = shifts.clamp(max=probe.highest)
            actual, expected = (side.weights(probe, reached, advantage) for side in self._sides)
            gap = ((actual - expected).abs() / (1 + expected.abs())).nan_to_num(math.inf)
            if float(gap.max()) > 1e-6:
                worst, reach = int(gap.argmax()), math.floor(float(reached.abs()[gap > 1e-6].min()))
                where = f"for A {'>' if positive else '<'} 0 and a log-ratio of {float(reached[worst]):.4g}"
                values = {"actual": float(actual[worst]) + 0.0, "expected": float(expected[worst]) + 0.0}
                if kind == "exponent" and reach < CLAMP:
                    kind, key = "clip", "far"
                self._add(kind, key, probe=self.expected.label(probe), where=where, reach=reach, **values)
                return

    def _zero_advantage(self) -> None:
        """Compares the gradients that are left if advantages are 0: of KL, entropy and regression."""
        actual, expected = self._sides
        read = slice(len(TO_REFERENCE) if expected.kl_form[0] == "none" else None)  # no KL, no weights of it
        if _gap(actual.kl_curve[read], expected.kl_curve[read]) > 1e-7:
            self._add("kl", "term", actual=_kl_words(actual), expected=_kl_words(expected))
        change, expected_change = (side.gradient_change_at_zero_advantage for side in self._sides)
        gap = (change - expected_change).abs()
        if not float(gap.max()) <= 1e-7 and not self.found:
            worst = int(gap.argmax())
            moved = {"who": "policy" if worst < 4 else "sampler", "nats": (-1, -0.5, 0.5, 1)[worst % 4]}
            kind = "policy" if float(gap[:4].max()) <= 1e-7 else "zero-advantage"
            self._add(kind, "zero", actual=float(change[worst]), expected=float(expected_change[worst]), **moved)

    def _padding(self) -> None:
        """Checks that log-probs at padding do not change the loss."""
        counted = self.actual.padding["number"]
        for policy in sorted(counted, key=lambda name: name != "reference")[:1]:
            kind = "kl-padding" if policy == "reference" else "padding"
            self._add(kind, "number", policy=policy, change=counted[policy])

    def _denominator(self) -> None:
        """Compares the denominators, then the sum of two micro-batches with the whole."""
        (actual, factor), (expected, expected_factor) = (side.aggregation for side in self._sides)
        if self._has("normalized-advantage", "live-weight"):
            pass
        elif actual != expected and not self._has("denominator"):
            self._add("denominator", "other", actual=actual, expected=expected)
        elif actual != UNKNOWN and abs(factor / expected_factor - 1) > 1e-6 and not self._has("sign"):
            self._add("scale", "times", times=factor / expected_factor)
        parts, expected_parts = (torch.cat(side.micro_batch_ratios[0]) for side in self._sides)
        if not _gap(parts, expected_parts) <= 1e-6 and not self._has("batch-statistics"):
            self._add("micro-batches", "times", times=_range(parts))

    def _inputs(self) -> None:
        """Compares the effects of the inputs that few losses read."""
        for name, expected in self.expected.inputs.items():
            if _gap(actual := self.actual.inputs[name], expected) > 1e-7:
                self._add("input", "effect", field=name, effect="another" if bool(actual.count_nonzero()) else "no")
                return

    def _random(self) -> None:
        """Compares gradients and values on random batches."""
        for spread, actual, expected in zip(SPREADS, self.actual.random, self.expected.random, strict=True):
            gap = _gap(actual.gradient, expected.gradient) / max(float(expected.gradient.abs().max()), 1e-12)
            if not gap <= 1e-6:
                self._add("unexplained", "gap", spread=spread, gap=gap)
                return
            if not abs(actual.loss - expected.loss) <= 1e-6 * max(1.0, abs(expected.loss)) and not self._has("value"):
                self._add("value", "value", actual=actual.loss, expected=expected.loss, spread=spread)

    def _advantages_of_tokens(self) -> None:
        """Compares gradients if advantages differ within a response."""
        for packed in (False, True):
            for (mask, actual), (_, expected) in zip(*(side.of_tokens(packed) for side in self._sides), strict=False):
                counts = _counts_kept(actual, expected, mask)
                if (counts or not packed) and not _gap(actual, expected) <= 1e-6 * float(expected.abs().max()):
                    self._add("denominator", "differing" if counts else "one-for-all", times=_range(actual / expected))
                    return


def _counts_kept(actual: Tensor, expected: Tensor, mask: Tensor) -> bool:
    """Returns whether a loss divides by the tokens that get a gradient, in place of all, of a batch or a response."""
    kept, times = (expected != 0) & mask, actual / expected
    if not torch.equal(actual[mask] != 0, kept[mask]) or not _gap(times[kept], 1.0) > 1e-6:
        return False
    shares = kept.sum() / mask.sum(), kept.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return any(_gap((times * share)[kept], 1.0) < 1e-6 for share in shares)


def _kl_words(side: Readings) -> str:
    kind, coefficient = side.kl_form
    if kind == "none":
        return "none"
    weights = zip(("μ", "π_old"), side.kl_weights.tolist(), strict=True)
    weighted = [f", {times:.4g} times where {who} is 0.5 nats away" for who, times in weights if abs(times - 1) > 1e-9]
    if kind == "k1" and coefficient < 0:
        kind, coefficient = "k1 of the reverse direction", -coefficient
    form = "of no known form" if kind == "other" else f"{kind} with the coefficient {coefficient:.4g}"
    return "".join([form, *weighted])


def _gap(a: Tensor, b: Tensor | float) -> float:
    return float((a - b).abs().max())


def _range(values: Tensor) -> str:
    """Returns the smallest and the largest ratio of two gradients. NaN is left out: both gradients are 0."""
    values = values[values.isfinite()] + 0.0  # no -0
    if not len(values):
        return "an unknown number of"
    low, high = float(values.min()), float(values.max())
    return f"{low:.3g}" if high - low < 1e-6 else f"{low:.3g} to {high:.3g}"
