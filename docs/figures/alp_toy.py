"""A spiky objective and what noise makes of it: the toy picture behind Adaptive Layerwise Perturbation (ALP).

    J(x)         = a broad hill + narrow spikes and dents, all Gaussian bumps
    J_sigma(x)   = E J(x + sigma eps),  eps ~ N(0, 1)

Smoothing turns a bump of width w, height h into one of width v = sqrt(w^2 + sigma^2), height h w / v, so J_sigma
has a closed form; it is drawn from quadrature, which is checked against the closed form and against Monte Carlo.
Gradient ascent then starts from the same points on J, on J_sigma, and on J with one draw of noise per step (as in ALP).

    python docs/figures/alp_toy.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from canvas import BLUE, GREEN, IMAGES, RC, VERMILLION, label, save, table
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray

Array = NDArray[np.float64]
LOW, HIGH = -2.5, 2.5
WIDTH, TRAP = 0.05, -1.4
SIGMAS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0)
SHIFT = 0.05  # how far off the sampler is, in the units of x: as much as a spike is wide


@dataclass(frozen=True, eq=False)
class Bumps:
    """A sum of Gaussian bumps on the line; all arrays (bumps,)."""

    center: Array
    height: Array
    width: Array

    def __call__(self, x: Array) -> Array:
        return self._parts(x)[1].sum(-1)

    def gradient(self, x: Array) -> Array:
        z, parts = self._parts(x)
        return (-z / self.width * parts).sum(-1)

    def curvature(self, x: Array) -> Array:
        z, parts = self._parts(x)
        return ((z**2 - 1) / self.width**2 * parts).sum(-1)

    def smoothed(self, sigma: float) -> Bumps:
        """E J(x + sigma eps), exactly: a Gaussian convolved with a Gaussian."""
        width = np.hypot(self.width, sigma)
        return Bumps(self.center, self.height * self.width / width, width)

    def _parts(self, x: Array) -> tuple[Array, Array]:
        z = (x[..., None] - self.center) / self.width
        return z, self.height * np.exp(-(z**2) / 2)


def objective(seed: int, spikes: int) -> Bumps:
    """A hill of height 1 and width 1.2, spikes and dents a 24th as wide, and one tall spike where the hill is low."""
    rng = np.random.default_rng(seed)
    gap = (HIGH - LOW) / spikes
    center = LOW + gap * (np.arange(spikes) + rng.uniform(0.2, 0.8, spikes))
    height = rng.uniform(0.1, 0.3, spikes) * rng.choice([-1.0, 1.0], spikes)
    height[np.argmin(np.abs(center - TRAP))] = 0.9
    return Bumps(np.r_[0.4, center], np.r_[1.0, height], np.r_[1.2, np.full(spikes, WIDTH)])


def expectation(function: Callable[[Array], Array], x: Array, sigma: float, nodes: int = 2001) -> Array:
    """E function(x + sigma eps) for every x, by the trapezoid rule over +-8 standard deviations.

    For a smooth integrand that vanishes at both ends, as this one does, the rule converges faster than any power.
    """
    eps = np.linspace(-8.0, 8.0, nodes)
    weight = np.exp(-(eps**2) / 2)
    weight /= weight.sum()
    return np.array([weight @ function(point + sigma * eps) for point in x])


def sampled(function: Callable[[Array], Array], x: Array, sigma: float, draws: int, seed: int) -> Array:
    """E function(x + sigma eps) for every x by Monte Carlo, fresh draws for every point."""
    rng = np.random.default_rng(seed)
    return np.array([function(point + sigma * rng.standard_normal(draws)).mean() for point in x])


def ascend(gradient: Callable[[Array], Array], start: Array, steps: int, rate: float) -> Array:
    x = start.copy()
    for _ in range(steps):
        x = x + rate * gradient(x)
    return x


def one_draw(bumps: Bumps, sigma: float, seed: int) -> Callable[[Array], Array]:
    """The gradient at x + sigma eps with a fresh eps for every step and start."""
    rng = np.random.default_rng(seed)
    return lambda x: bumps.gradient(x + sigma * rng.standard_normal(x.shape))


def measure(seeds: range, args: argparse.Namespace) -> NDArray[np.float64]:
    """(landscapes, sigmas, 5): mean J at the end and after a shift, both ways of ascending, and sup |J''|."""
    start, wide = np.linspace(LOW, HIGH, args.starts), np.linspace(LOW - 1, HIGH + 1, 8001)
    found = np.empty((len(seeds), 1 + len(SIGMAS), 5))
    for row, seed in enumerate(seeds):
        bumps = objective(seed, args.spikes)
        shifted = bumps.smoothed(SHIFT)
        for column, sigma in enumerate((0.0, *SIGMAS)):
            smooth = bumps.smoothed(sigma)
            exact = ascend(smooth.gradient, start, args.steps, args.rate)
            drawn = ascend(one_draw(bumps, sigma, seed), start, args.steps, args.rate) if sigma else exact
            ends = [f(x).mean() for x in (exact, drawn) for f in (bumps, shifted)]
            found[row, column] = [*ends, np.abs(smooth.curvature(wide)).max()]
    return found


def rows_of(found: NDArray[np.float64]) -> list[list[Any]]:
    """One line per sigma: means over landscapes, and in how many of them the ascent ends higher than without noise."""
    mean, count = found.mean(0), len(found)
    wins = [(found[:, :, k] > found[:, :1, k]).sum(0) for k in range(4)]
    return [
        [f"{sigma:g}", mean[i, 0], _of(wins[0][i], count), mean[i, 1], _of(wins[1][i], count),
         mean[i, 2], _of(wins[2][i], count), mean[i, 4]]
        if sigma else ["0 (J itself)", mean[i, 0], "", mean[i, 1], "", mean[i, 2], "", mean[i, 4]]
        for i, sigma in enumerate((0.0, *SIGMAS))
    ]  # fmt: skip


def _of(wins: int, count: int) -> str:
    return f"{wins} of {count}"


def draw(found: NDArray[np.float64], args: argparse.Namespace) -> None:
    with plt.rc_context(RC):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.0), width_ratios=[1.9, 1], constrained_layout=True)
        _landscape(left, objective(args.seed, args.spikes), args)
        _sweep(right, found)
        save(figure, args.out)


def _landscape(axes: Axes, bumps: Bumps, args: argparse.Namespace) -> None:
    x, sigma = np.linspace(LOW - 0.1, HIGH + 0.1, 1601), args.sigma
    start, smooth = np.linspace(LOW, HIGH, args.starts), bumps.smoothed(args.sigma)
    raw = ascend(bumps.gradient, start, args.steps, args.rate)
    broad = ascend(smooth.gradient, start, args.steps, args.rate)
    axes.plot(x, bumps(x), color=VERMILLION, linewidth=1.1, alpha=0.8)
    axes.plot(x, expectation(bumps, x, sigma), color=BLUE, linewidth=2.4)
    axes.plot(raw, bumps(raw), "o", color=VERMILLION, markersize=5.5, markeredgecolor="white", markeredgewidth=0.7)
    axes.plot(broad, smooth(broad), "D", color=BLUE, markersize=7)
    slope = np.sign(smooth.gradient(x))
    peaks = int(((slope[:-1] > 0) & (slope[1:] < 0)).sum())
    trapped = len(np.unique(raw.round(2)))
    label(axes, 0.02, 0.95, f"ascent on J: {args.starts} starts end on {trapped} peaks (dots)", VERMILLION,
          transform=axes.transAxes)  # fmt: skip
    label(axes, 0.02, 0.885, f"ascent on J smoothed by noise, σ = {sigma:g}: {peaks} peak (diamond)", BLUE,
          transform=axes.transAxes)  # fmt: skip
    axes.set(xlabel="x, moved by gradient ascent", ylabel="objective J(x)", xlim=(x[0], x[-1]), ylim=(-0.05, 1.65))
    axes.set_title("Noise turns spikes into one slope")


def _sweep(axes: Axes, found: NDArray[np.float64]) -> None:
    sigma, mean = np.array(SIGMAS), found.mean(0)
    axes.axhline(mean[0, 0], color=VERMILLION, linewidth=1.4)
    axes.plot(sigma, mean[1:, 0], "-o", color=BLUE, markersize=4.5)
    axes.plot(sigma, mean[1:, 2], "--s", color=GREEN, markersize=4.5)
    axes.axvline(WIDTH, color="#bbbbbb", linewidth=1, linestyle=":")
    label(axes, WIDTH * 1.1, 0.66, "width of a spike", "#777777")
    label(axes, 0.97, mean[0, 0] - 0.028, "without noise", VERMILLION, ha="right",
          transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set(
        xscale="log",
        xlabel="standard deviation σ of the noise",
        ylabel="J(x) where ascent ends, mean",
        ylim=(0.64, 1.1),
    )
    label(axes, 0.03, 0.95, "exact expectation", BLUE, transform=axes.transAxes)
    label(axes, 0.03, 0.885, "one draw per step", GREEN, transform=axes.transAxes)
    axes.set_title(f"σ must cover the spikes ({len(found)} landscapes)")


def main() -> None:
    parser = argparse.ArgumentParser(description="A spiky objective smoothed by noise: picture and numbers.")
    parser.add_argument("--seed", type=int, default=0, help="landscape of the left panel, and the first measured one")
    parser.add_argument("--landscapes", type=int, default=12, help="how many are measured, seeds counting up")
    parser.add_argument("--spikes", type=int, default=30, help="spikes and dents of a landscape")
    parser.add_argument("--sigma", type=float, default=0.4, help="noise of the left panel")
    parser.add_argument("--starts", type=int, default=31, help="starting points, evenly spaced")
    parser.add_argument("--steps", type=int, default=3000, help="gradient steps of every ascent")
    parser.add_argument("--rate", type=float, default=5e-3, help="step size")
    parser.add_argument("--out", type=Path, default=IMAGES / "alp-toy.png")
    args = parser.parse_args()

    bumps, x = objective(args.seed, args.spikes), np.linspace(LOW, HIGH, 121)
    exact = bumps.smoothed(args.sigma)(x)
    errors = [
        float(np.abs(estimate - exact).max())
        for estimate in (expectation(bumps, x, args.sigma), sampled(bumps, x, args.sigma, 100_000, args.seed))
    ]
    print(f"E J(x + {args.sigma:g} ε) at {len(x)} points, largest difference from the closed form: "
          f"quadrature below {10 ** np.ceil(np.log10(errors[0])):.0e}, "
          f"Monte Carlo (100000 draws) {errors[1]:.0e}.\n")  # fmt: skip
    found = measure(range(args.seed, args.seed + args.landscapes), args)
    head = ["σ", "J at the end", "higher in", f"mean J after a shift N(0, {SHIFT:g}²)", "higher in",
            "one draw per step: J", "higher in", "sup of curvature"]  # fmt: skip
    print(table(head, rows_of(found)))
    draw(found, args)


if __name__ == "__main__":
    main()
