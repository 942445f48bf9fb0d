"""Finds the known scalars of a run by the names that frameworks log (`scalars.csv`), and contradictory means.

Some logged means contradict each other: no log-probs can have both, so one of them is not what its name says.

With d = log-prob of the trainer - log-prob of the sampler, r = mean exp(d), a = mean |d|, k1 = -mean d,
k2 = mean d^2 / 2 and k3 = mean (exp(d) - 1 - d), all over the same tokens with the same weights, Jensen's inequality
gives

    mean d <= ln r      so  k3 >= r - 1 - ln r  and  a >= -ln r         (exp is convex; |d| >= -d)
    exp(-k1) <= r       so  k3 >= exp(-k1) - 1 + k1,  k2 >= k1^2 / 2,  a >= |k1|
    mean exp(|d|) >= max(r, 1 / r)   and   mean exp(|d|) >= 1 + k3      (exp(|d|) >= exp(d) - d for every d)

The bounds from r also hold if r is a mean of weights truncated at c >= 1. With d' = min(d, ln c), r = mean exp(d'), and
exp(d) - 1 - d >= exp(d') - 1 - d', |d| >= -d' and exp(|d|) >= max(exp(d'), exp(-d')) for every token.
"""

from __future__ import annotations

import csv
import importlib.resources
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import NamedTuple

from trimtab.monitor.alarms import WINDOW

Row = Mapping[str, float]


@dataclass(frozen=True)
class Scalar:
    """A row of `scalars.csv`: what a framework logs under a name.

    quantity: the common name, a key of `K3` or `METRICS`, or ratio_mean, ratio_max, prob_difference, entropy, other.
    over: "tokens" or "responses" if it is a mean that can be compared with other means over the same; empty if other
    tokens or weights may be in it.
    """

    framework: str
    name: str  # without the prefixes that loggers add
    quantity: str
    formula: str  # p and q are the log-probs of trainer and sampler, d = p - q
    source: str  # the file that computes it
    over: str = ""
    note: str = ""  # what else a reader of the number must know


# `value * value`, since `value**2` raises an error if it is too large.
K3: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "k3": ("", lambda value: value),
    "k1": ("the same expectation as k3, with more noise", abs),
    "k2": ("about k3 without a tail", lambda value: value),
    "abs_difference": ("k3 is about half of its square, and more with a tail", lambda value: value * value / 2),
    "mult_prob_error": ("k3 is about half of (its value - 1)^2", lambda value: (value - 1) * (value - 1) / 2),
}
"""Quantity that measures the mismatch, the best first -> (its relation to k3, k3 computed from it for small d)."""

_EVALUATION = {"eval", "val", "validation", "test"}
ROUNDING, FACTOR = 5e-3, 2.0
"""Tolerance, absolute and relative, for values logged with two decimals and for sums in another precision."""


@dataclass(frozen=True)
class Curve:
    """A scalar over the steps that have it."""

    scalar: Scalar
    logged_as: str
    values: tuple[float, ...]  # only the finite values
    not_finite: int  # number of the other values
    ends_not_finite: bool  # whether the last value is not finite

    @property
    def first(self) -> float:
        """Median of the first steps."""
        return median(self.values[:WINDOW]) if self.values else math.nan

    @property
    def last(self) -> float:
        """Median of the last steps."""
        return median(self.values[-WINDOW:]) if self.values else math.nan


@cache
def known_scalars() -> tuple[Scalar, ...]:
    """Returns the rows of `scalars.csv`."""
    text = importlib.resources.files("trimtab.monitor").joinpath("scalars.csv").read_text(encoding="utf-8")
    return tuple(Scalar(**row) for row in csv.DictReader(text.splitlines()))


def curves_of(rows: Sequence[Row]) -> tuple[str, tuple[Curve, ...]]:
    """Returns the framework that most logged names of a mismatch belong to, and the curves of all its scalars.

    Without a mismatch, it is the framework whose logged names have the most characters, because a long name belongs to
    one framework only. A tie then goes to the later framework: a `grad_norm` alone is from transformers, not `Monitor`.
    """
    logged = list(dict.fromkeys(name for row in rows for name in row))
    found: Counter[str] = Counter()
    named: Counter[str] = Counter()
    for scalar in known_scalars():
        count = sum(_is(scalar, name) for name in logged)
        found[scalar.framework] += count * (scalar.quantity in K3)
        named[scalar.framework] += count * len(scalar.name)
    equals = list(found) if any(found.values()) else list(reversed(found))
    framework = max(equals, key=lambda name: (found[name], 0 if found[name] else named[name]))
    curves = (
        _curve(scalar, name, [row[name] for row in rows if name in row])
        for scalar in known_scalars()
        for name in logged
        if scalar.framework == framework and _is(scalar, name)
    )
    return framework, tuple(curves)


def best_mismatch(curves: Iterable[Curve]) -> Curve | None:
    """Returns the curve from which k3 can be computed best, or None."""
    order = list(K3)
    measuring = (curve for curve in curves if curve.scalar.quantity in K3)
    return min(measuring, key=lambda curve: order.index(curve.scalar.quantity), default=None)


def _curve(scalar: Scalar, name: str, values: Sequence[float]) -> Curve:
    finite = tuple(value for value in values if math.isfinite(value))
    return Curve(scalar, name, finite, len(values) - len(finite), not math.isfinite(values[-1]))


def _is(scalar: Scalar, logged: str) -> bool:
    """Returns whether a logged name is the scalar's, with or without a prefix from loggers, users or W&B's CSV files.

    With a prefix of an evaluation, as in `eval/completions/mean_length`, it is another scalar.
    """
    if logged == scalar.name:
        return True
    prefix = logged.removesuffix(scalar.name)
    parts = prefix.rpartition(" - ")[2].split("/")
    return prefix != logged and prefix.endswith(("/", " - ")) and not _EVALUATION & set(parts)


class Inequality(NamedTuple):
    """`figure` is at least `least(other)`, in words `text`."""

    figure: str
    other: str
    least: Callable[[float], float]
    text: str


INEQUALITIES = (
    Inequality("k3", "ratio_mean", lambda r: r - 1 - math.log(r), "k3 >= r - 1 - ln r, r the mean ratio"),
    Inequality("abs_difference", "ratio_mean", lambda r: -math.log(r), "mean |d| >= -ln r, r the mean ratio"),
    Inequality(
        "mult_prob_error", "ratio_mean", lambda r: max(r, 1 / r), "mean exp|d| >= max(r, 1 / r), r the mean ratio"
    ),
    Inequality("mult_prob_error", "k3", lambda k3: 1 + k3, "mean exp|d| >= 1 + k3"),
    # exp(709) still fits a float, and is less than exp(-k1) where it takes its place.
    Inequality("k3", "k1", lambda k1: math.exp(min(-k1, 709.0)) - 1 + k1, "k3 >= exp(-k1) - 1 + k1"),
    Inequality("k2", "k1", lambda k1: k1 * k1 / 2, "k2 >= k1^2 / 2"),
    Inequality("abs_difference", "k1", abs, "mean |d| >= |k1|"),
)


@dataclass(frozen=True)
class Contradiction:
    """Two logged means, `figure` and `other`, that contradict each other at `count` steps, first at `step`.

    At that step `other` is `other_value`, so `figure` must be at least `least` (`inequality`), but it is `value`.
    """

    figure: str
    value: float
    other: str
    other_value: float
    least: float
    inequality: str
    step: int
    count: int

    @property
    def text(self) -> str:
        return (
            f"{self.figure} {self.value:.3g} and {self.other} {self.other_value:.3g} exclude each other at step "
            f"{self.step} ({self.count} steps in all): over the same tokens {self.inequality}, here at least "
            f"{self.least:.2g}. One of the two counts other tokens, as padding or masked ones as 0, or is not what its "
            f"name says: look up how both are computed, and believe neither until then"
        )


def contradictions(rows: Sequence[Row], curves: Sequence[Curve]) -> Iterator[Contradiction]:
    """Yields the pairs of curves that contradict each other. Only means over the same tokens are compared (`over`)."""
    for rule in INEQUALITIES:
        pairs = (
            (one.logged_as, two.logged_as)
            for one in curves
            for two in curves
            if (one.scalar.quantity, two.scalar.quantity) == (rule.figure, rule.other)
            if one.scalar.over and one.scalar.over == two.scalar.over
        )
        for figure, other in pairs:
            broken = [row for row in rows if _is_broken(row, figure, other, rule)]
            if broken:
                value, other_value, step = broken[0][figure], broken[0][other], int(broken[0]["step"])
                least = rule.least(other_value)
                yield Contradiction(figure, value, other, other_value, least, rule.text, step, len(broken))


def _is_broken(row: Row, figure: str, other: str, rule: Inequality) -> bool:
    value, other_value = (row.get(name, math.nan) for name in (figure, other))
    if not (math.isfinite(value) and math.isfinite(other_value)) or (rule.other == "ratio_mean" and other_value <= 0):
        return False
    base = 1.0 if rule.figure == "mult_prob_error" else 0.0  # the value of `figure` for equal log-probs
    return rule.least(other_value) - base > FACTOR * max(value - base, 0.0) + ROUNDING
