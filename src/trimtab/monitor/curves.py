"""The curves of known scalars: what a framework logs under which name (`scalars.csv`), and its values in a run."""

from __future__ import annotations

import csv
import importlib.resources
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from trimtab.monitor.alarms import WINDOW

Row = Mapping[str, float]


@dataclass(frozen=True)
class Scalar:
    """A row of `scalars.csv`: what a framework logs under a name; prefixes before it are ignored.

    quantity: the common name, one of `K3` and `METRICS` or ratio_mean, ratio_max, prob_difference, entropy, other.
    formula: with p and q, the log-probs of trainer and sampler, and d = p - q. note: what else a reader of the number
    must know. source: the file that computes it.
    """

    framework: str
    name: str
    quantity: str
    formula: str
    source: str
    note: str = ""


# `value * value`, since `value**2` raises an error where it is too large.
K3: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "k3": ("", lambda value: value),
    "k1": ("the same expectation as k3, with more noise", abs),
    "k2": ("about k3 without a tail", lambda value: value),
    "abs_difference": ("k3 is about half of its square, and more with a tail", lambda value: value * value / 2),
    "mult_prob_error": (
        "k3 is about half of the square of its distance from 1",
        lambda value: (value - 1) * (value - 1) / 2,
    ),
}
"""Quantities that measure the mismatch, the best first: what k3 is in relation to it, and k3 itself for small d."""


_EVALUATION = {"eval", "val", "validation", "test"}


@dataclass(frozen=True)
class Curve:
    """A scalar over the steps that have it.

    values: the finite ones. not_finite: the number of others. ends_not_finite: whether the last of all is one of them.
    """

    scalar: Scalar
    logged_as: str
    values: tuple[float, ...]
    not_finite: int
    ends_not_finite: bool

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
    """Returns the framework that most names of a mismatch belong to, and the curves of all scalars it logs.

    Without a mismatch it is the framework with most characters in the names: long ones belong to one framework. Of
    equals it is then the later one, because a `grad_norm` alone is that of transformers and not of `Monitor`.
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
    """Returns the curve that k3 follows from best."""
    order = list(K3)
    measuring = (curve for curve in curves if curve.scalar.quantity in K3)
    return min(measuring, key=lambda curve: order.index(curve.scalar.quantity), default=None)


def _curve(scalar: Scalar, name: str, values: Sequence[float]) -> Curve:
    finite = tuple(value for value in values if math.isfinite(value))
    return Curve(scalar, name, finite, len(values) - len(finite), not math.isfinite(values[-1]))


def _is(scalar: Scalar, logged: str) -> bool:
    """Returns whether a logged name is that of the scalar; loggers, users and the CSV files of W&B add prefixes.

    A prefix of an evaluation, as in `eval/completions/mean_length`, makes it another scalar.
    """
    if logged == scalar.name:
        return True
    prefix = logged.removesuffix(scalar.name)
    parts = prefix.rpartition(" - ")[2].split("/")
    return prefix != logged and prefix.endswith(("/", " - ")) and not _EVALUATION & set(parts)
