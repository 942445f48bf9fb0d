"""Finds the log-ratios at which the weight of a loss stops following exp(slope * log-ratio): its clip bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Curve = Callable[[Tensor], Tensor]
"""Log-ratios (points,) -> weights, relative to the weight at 0."""

MAX_BENDS = 4  # of a curve
TOLERANCE = 1e-5  # relative; the weights are exact to 1e-12


@dataclass(frozen=True)
class Bend:
    """A log-ratio at which a curve stops following its exponential."""

    kind: str  # beyond it: "zero", "constant", another exponential ("jump"), none ("smooth"), or "nan"
    x: float  # nats
    value: float = 0.0  # the weight just beyond it

    def __str__(self) -> str:
        words = {"zero": "is 0 beyond", "constant": f"is {self.value:.4g} beyond", "nan": "is NaN at"}
        ratio = f"{math.exp(self.x):.5g}" if self.x < 709 else f"exp({self.x:.5g})"  # math.exp overflows
        return f"{words.get(self.kind, 'bends from' if self.kind == 'smooth' else 'jumps at')} {ratio}"

    def same(self, other: Bend) -> bool:
        if self.kind != other.kind:
            return False
        return self.kind == "smooth" or abs(self.x - other.x) <= 1e-4 * max(abs(other.x), 1e-3) + 1e-7


Bends = tuple[Bend, ...]


def same(first: Bends, second: Bends) -> bool:
    return len(first) == len(second) and all(a.same(b) for a, b in zip(first, second, strict=True))


def describe(bends: Bends) -> str:
    return ", then ".join(map(str, bends)) or "is unbounded"


def find_bends(curve: Curve, points: Tensor) -> Bends:
    """Returns the bends of a curve in one direction from 0, nearest first, each bisected to 1e-8 nats.

    points: log-ratios of one sign, nearest to 0 first. The weight at the first one gives the exponent at 0.
    """
    weights = curve(points)
    start, level, near = 0.0, 1.0, float(weights[0])
    slope = (math.log(near) if near > 0 else near - 1) / float(points[0])
    found: list[Bend] = []
    while len(found) < MAX_BENDS:
        beyond = points.abs() > abs(start)
        bad = beyond & _off(weights, points, start, level, slope)
        if not bool(bad.any()):
            break
        first = int(bad.nonzero()[0])
        low = start if first == 0 or not bool(beyond[first - 1]) else float(points[first - 1])
        x = _bisected(curve, low, float(points[first]), (start, level, slope))
        bend, slope_after = _classified(curve, x, (start, level, slope))
        found.append(bend)
        if bend.kind in ("smooth", "nan"):
            break
        start, level, slope = x, bend.value, slope_after
    return tuple(found)


def _off(weights: Tensor, points: Tensor, start: float, level: float, slope: float) -> Tensor:
    """Returns for each point x whether its weight is not level * exp(slope * (x - start))."""
    expected = level * torch.exp(slope * (points - start))
    allowed = TOLERANCE * (1 + (points - start).abs()) * expected.abs().clamp(min=1e-6)
    return ~((weights - expected).abs() <= allowed)  # also true for NaN


def _bisected(curve: Curve, low: float, high: float, form: tuple[float, float, float]) -> float:
    for _ in range(3):
        grid = torch.linspace(low, high, 201).double()[1:]
        bad = _off(curve(grid), grid, *form)
        if not bool(bad.any()):
            break
        first = int(bad.nonzero()[0])
        low, high = (low if first == 0 else float(grid[first - 1])), float(grid[first])
    return high


def _classified(curve: Curve, x: float, form: tuple[float, float, float]) -> tuple[Bend, float]:
    """Returns the bend at x, and the slope of the exponential beyond it."""
    start, level, slope = form
    step = math.copysign(2e-3 * max(abs(x), 0.05), x)
    near = curve(torch.tensor([x + 0.02 * step, x + step, x + 2 * step], dtype=torch.float64))
    if bool(near.isnan().any()):
        return Bend("nan", x), 0.0
    if float(near.abs().max()) < 1e-9:
        return Bend("zero", x), 0.0
    first, middle, last = map(float, near)
    if min(first * last, middle * last) <= 0:
        return Bend("smooth", x), 0.0
    before, after = math.log(middle / first) / (0.98 * step), math.log(last / middle) / step
    expected = level * math.exp(min(slope * (x - start), 700))
    jump = abs(first / expected - 1) if expected > 0 else 1.0
    if abs(before - after) > 1e-4 or (jump < 1e-3 and abs(after - slope) < 0.05):
        return Bend("smooth", x), 0.0
    if abs(after) < 1e-5:
        if abs(slope) > 1e-6 and level > 0 and middle > 0:
            meets = start + math.log(middle / level) / slope  # exactly, if the curve does not jump
            x = meets if abs(meets - x) < 1e-3 * max(abs(x), 0.05) else x
        return Bend("constant", x, middle), 0.0
    return Bend("jump", x, middle * math.exp(-after * step)), after
