"""Logged means that exclude each other: no log-probs have both, so that one is not what its name says.

With d = log-prob of the trainer - that of the sampler, r = mean exp(d), a = mean |d|, k1 = -mean d, k2 = mean d^2 / 2
and k3 = mean (exp(d) - 1 - d), all over the same tokens with the same weights, Jensen's inequality gives

    mean d <= ln r      so  k3 >= r - 1 - ln r  and  a >= -ln r         (exp is convex; |d| >= -d)
    exp(-k1) <= r       so  k3 >= exp(-k1) - 1 + k1,  k2 >= k1^2 / 2,  a >= |k1|
    mean exp(|d|) >= max(r, 1 / r)   and   mean exp(|d|) >= 1 + k3      (exp(|d|) >= exp(d) - d for every d)

Those from r also hold where r is a mean of weights truncated at c >= 1: with d' = min(d, ln c), whose mean weight r is,
exp(d) - 1 - d >= exp(d') - 1 - d', |d| >= -d' and exp(|d|) >= max(exp(d'), exp(-d')) for every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trimtab.monitor.curves import Curve, Row

ROUNDING, FACTOR = 5e-3, 2.0
"""Room for values that were logged with two decimals, and for sums of other precision."""


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
    Inequality("k3", "k1", lambda k1: math.exp(-k1) - 1 + k1, "k3 >= exp(-k1) - 1 + k1"),
    Inequality("k2", "k1", lambda k1: k1 * k1 / 2, "k2 >= k1^2 / 2"),
    Inequality("abs_difference", "k1", abs, "mean |d| >= |k1|"),
)


@dataclass(frozen=True)
class Contradiction:
    """Two logged figures that exclude each other at `count` steps, first at `step`, where `figure` has `value`.

    It would have to be `least` by `inequality`, since `other` has `other_value`.
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
    """Yields the pairs of curves that exclude each other. Only means over the same tokens are compared (`over`)."""
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
                value, of = broken[0][figure], broken[0][other]
                step = int(broken[0]["step"])
                yield Contradiction(figure, value, other, of, rule.least(of), rule.text, step, len(broken))


def _is_broken(row: Row, figure: str, other: str, rule: Inequality) -> bool:
    value, of = (row.get(name, math.nan) for name in (figure, other))
    if not (math.isfinite(value) and math.isfinite(of)) or (rule.other == "ratio_mean" and of <= 0):
        return False
    base = 1.0 if rule.figure == "mult_prob_error" else 0.0  # its value for equal log-probs
    try:
        least = rule.least(of)
    except OverflowError:
        return True
    return least - base > FACTOR * max(value - base, 0.0) + ROUNDING
