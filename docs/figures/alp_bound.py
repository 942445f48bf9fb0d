"""Adaptive Layerwise Perturbation's bound on the KL divergence between trainer and sampler, in numbers.

The paper's model of mismatch (arXiv 2603.19470, Theorem 3): the sampler is the trainer evaluated at x + zeta.

    mu(a|x)       = pi(a|x + zeta),            zeta ~ N(0, s^2 I)         sampler
    pi~(a|x)      = E pi(a|x + delta),         delta ~ N(0, sigma^2 I)    perturbed trainer
    Condition 1     |E[delta | a, x]|^2 <= C d sigma^2   <=>   sigma^2 |grad ln pi~(a|x)|^2 <= C d     (Lemma 2)
    Condition 2     alpha pi~(a|x) <= pi(a|x)
    claim           E KL(pi~ || mu) <= -ln(alpha) + C d E|zeta|^2 / (2 sigma^2)

Two policies over four actions with d = 2, for which all of it can be computed without sampling: a linear softmax on the
plane, and a rough softmax on the torus (smooth signal plus fine ripples in the logits). C and alpha are the tightest
constants. Where the conditions must hold is the question: the statement says for prompts x, its proof uses x + zeta.

    python docs/figures/alp_bound.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from canvas import BLUE, GREEN, IMAGES, ORANGE, PALE, RC, VERMILLION, label, save, table
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
ACTIONS, DIMENSION = 4, 2
RATIOS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)


class Terms(NamedTuple):
    """Nats, averaged over prompts. `steepest` is C d / sigma^2, the supremum of |grad ln pi~|^2."""

    kl: float
    minus_ln_alpha: float
    steepest: float
    noise: float  # E |zeta|^2

    @property
    def bound(self) -> float:
        return self.minus_ln_alpha + self.steepest * self.noise / 2


@dataclass(frozen=True, eq=False)
class Linear:
    """pi(a|x) = softmax(W x + b), prompts x (prompts, 2) on the plane; expectations by Gauss-Hermite quadrature."""

    weight: Array
    bias: Array
    prompts: Array
    nodes: int = 48

    @classmethod
    def random(cls, seed: int) -> Linear:
        rng = np.random.default_rng(seed)
        return cls(2 * rng.standard_normal((ACTIONS, DIMENSION)), rng.standard_normal(ACTIONS),
                   1.5 * rng.standard_normal((256, DIMENSION)))  # fmt: skip

    def log_policy(self, x: Array) -> Array:
        return log_softmax(x @ self.weight.T + self.bias)

    def perturbed(self, x: Array, sigma: float) -> Array:
        """pi~(.|x), shape (prompts, actions)."""
        points, mass = self._gauss(sigma)
        return np.einsum("n,xna->xa", mass, np.exp(self.log_policy(x[:, None] + points)))

    def terms(self, sigma: float, s: float) -> Terms:
        """The left side, and the tightest constants that hold for every x of the plane."""
        points, mass = self._gauss(s)
        expected_log = np.einsum("n,xna->xa", mass, self.log_policy(self.prompts[:, None] + points))
        kl = divergence(self.perturbed(self.prompts, sigma), expected_log).mean()
        # Far out, where one action dominates, grad ln pi~(a) -> w_a - w_b and pi~/pi -> exp(sigma^2 |w_a - w_b|^2 / 2);
        # Jensen's inequality shows that nothing exceeds the largest of these.
        widest = max(float(((p - q) ** 2).sum()) for p, q in combinations(self.weight, 2))
        return Terms(float(kl), sigma**2 * widest / 2, widest, DIMENSION * s**2)

    def _gauss(self, sigma: float) -> tuple[Array, Array]:
        node, mass = np.polynomial.hermite_e.hermegauss(self.nodes)
        grid = np.stack(np.meshgrid(node, node, indexing="ij"), -1).reshape(-1, DIMENSION)
        return sigma * grid, np.outer(mass, mass).ravel() / mass.sum() ** 2


@dataclass(frozen=True, eq=False)
class Rough:
    """Logits sum_k A_ak cos(2 pi m_k x) on the unit torus, x uniform; expectations are Fourier multipliers, so exact.

    All phases are zero: at x = 0 every gradient vanishes, a crest.
    """

    amplitude: Array  # (actions, waves)
    wave: NDArray[np.int64]  # (waves, 2), cycles per unit
    size: int = 192

    @classmethod
    def random(cls, seed: int, ripple: float) -> Rough:
        rng = np.random.default_rng(seed)
        wave = np.array([[1, 0], [0, 1], [1, 1], [9, 2], [2, -9], [7, 6], [-6, 7]])
        scale = np.array([1.0, 1.0, 1.0, *[ripple] * 4])
        return cls(scale * rng.standard_normal((ACTIONS, len(wave))), wave)

    def log_policy(self, x: Array) -> Array:
        return log_softmax(np.cos(2 * np.pi * x @ self.wave.T) @ self.amplitude.T)

    def terms(self, sigma: float, s: float) -> Terms:
        """The left side, and the tightest constants that hold for every x of the torus."""
        log_policy = self.log_policy(self._grid())
        tilde, slope = self._perturbed(log_policy, sigma)
        kl = divergence(tilde, self._average(log_policy, s)).mean()
        alpha = float((np.exp(log_policy) / tilde).min())
        return Terms(float(kl), float(-np.log(alpha)), float(slope.max()), DIMENSION * s**2)

    def at_crest(self, sigma: float, s: float) -> Terms:
        """The same with a single prompt, x = 0, and the conditions asked of that prompt alone."""
        log_policy = self.log_policy(self._grid())
        tilde, slope = self._perturbed(log_policy, sigma)
        kl = divergence(tilde, self._average(log_policy, s))[0, 0]
        alpha = float((np.exp(log_policy) / tilde)[0, 0].min())
        return Terms(float(kl), float(-np.log(alpha)), float(slope[0, 0].max()), DIMENSION * s**2)

    def _grid(self) -> Array:
        axis = np.arange(self.size) / self.size
        return np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)

    def _perturbed(self, log_policy: Array, sigma: float) -> tuple[Array, Array]:
        """pi~ on the grid, (size, size, actions), and |grad ln pi~|^2 of every action."""
        tilde = self._average(np.exp(log_policy), sigma)
        spectrum = np.fft.fftn(tilde, axes=(0, 1))
        angular = 2j * np.pi * self._frequencies()
        partial = [np.fft.ifftn(angular[..., i, None] * spectrum, axes=(0, 1)).real for i in range(DIMENSION)]
        return tilde, (np.stack(partial) ** 2).sum(0) / tilde**2

    def _average(self, values: Array, sigma: float) -> Array:
        """E values(x + sigma eps) on the grid: every wave exp(2 pi i m x) is damped by exp(-(2 pi sigma |m|)^2 / 2)."""
        if sigma == 0:
            return values
        damping = np.exp(-((2 * np.pi * sigma) ** 2) * (self._frequencies() ** 2).sum(-1) / 2)
        return np.fft.ifftn(damping[..., None] * np.fft.fftn(values, axes=(0, 1)), axes=(0, 1)).real

    def _frequencies(self) -> Array:
        cycles = np.fft.fftfreq(self.size, 1 / self.size)
        return np.stack(np.meshgrid(cycles, cycles, indexing="ij"), -1)


def log_softmax(logits: Array) -> Array:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def divergence(tilde: Array, expected_log: Array) -> Array:
    """E KL(pi~ || mu) for every x: pi~ does not depend on zeta, so the expectation goes inside the logarithm of mu."""
    return (tilde * (np.log(tilde) - expected_log)).sum(-1)


def by_sampling(policy: Linear | Rough, x: Array, sigma: float, s: float, draws: int, seed: int) -> float:
    """E KL(pi~ || mu) at one x (2,), everything by Monte Carlo."""
    rng = np.random.default_rng(seed)
    delta, zeta = rng.standard_normal((2, draws, DIMENSION))
    tilde = np.exp(policy.log_policy(x + sigma * delta)).mean(0)
    return float((tilde * (np.log(tilde) - policy.log_policy(x + s * zeta))).sum(-1).mean())


def rows(name: str, policy: Linear | Rough, scales: list[float]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for s in scales:
        clean = policy.terms(0.0, s)
        found += [_row(name, s, ratio, policy.terms(ratio * s, s), clean) for ratio in RATIOS]
    return found


def _row(name: str, s: float, ratio: float, now: Terms, clean: Terms) -> list[Any]:
    constant = (ratio * s) ** 2 * now.steepest / DIMENSION
    verdict = "yes" if now.kl <= now.bound else "**no**"
    return [name, f"{s:g}", f"{ratio:g}", now.kl, f"{now.kl / clean.kl:.2f}", constant,
            now.minus_ln_alpha, now.steepest * now.noise / 2, now.bound, verdict]  # fmt: skip


def draw(linear: Linear, rough: Rough, s_linear: float, s_rough: float, out: Path) -> None:
    ratio = np.geomspace(0.1, 10, 41)
    panels = [
        (f"Linear softmax, s = {s_linear:g}: noise never helps", linear.terms, s_linear),
        (f"Rough softmax, s = {s_rough:g}: noise of the size of s helps", rough.terms, s_rough),
        ("Conditions asked of the prompt alone: no bound", rough.at_crest, s_rough),
    ]
    with plt.rc_context(RC):
        figure, axes = plt.subplots(1, 3, figsize=(12.5, 4.0), sharey=True, constrained_layout=True)
        for place, (title, terms, s) in zip(axes, panels, strict=True):
            _panel(place, ratio, [terms(r * s, s) for r in ratio], terms(0.0, s).kl)
            place.set_title(title)
        axes[0].set_ylabel("nats, mean over prompts and ζ")
        _words(axes)
        save(figure, out)


def _panel(axes: Axes, ratio: Array, terms: list[Terms], clean: float) -> None:
    axes.plot(ratio, [t.minus_ln_alpha for t in terms], color=ORANGE, linestyle=":")
    axes.plot(ratio, [t.steepest * t.noise / 2 for t in terms], color=GREEN, linestyle="--")
    axes.plot(ratio, [t.bound for t in terms], color=VERMILLION)
    axes.plot(ratio, [t.kl for t in terms], color=BLUE, linewidth=2.6)
    axes.axhline(clean, color=PALE, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="σ / s: trainer's noise over sampler's", xlim=(ratio[0], ratio[-1]))
    axes.set_ylim(5e-3, 300)


def _words(axes: Sequence[Axes]) -> None:
    label(axes[0], 0.12, 5.0, "bound", VERMILLION)
    label(axes[0], 0.12, 2.2, "C d E‖ζ‖² / 2σ²", GREEN)
    label(axes[0], 0.45, 0.45, "-ln α", ORANGE, ha="right")
    label(axes[0], 3.4, 0.26, "E KL(π̃‖μ)", BLUE)
    label(axes[0], 9.5, 0.085, "without noise, E KL(π‖μ)", PALE, ha="right")
    label(axes[2], 0.11, 0.16, "violated", BLUE)
    label(axes[2], 0.11, 2.0, "“bound” = -ln α, as C = 0", VERMILLION)


def main() -> None:
    parser = argparse.ArgumentParser(description="Numerical check of the KL bound of layerwise perturbation.")
    parser.add_argument("--seed", type=int, default=0, help="of both policies and of the Monte Carlo check")
    parser.add_argument("--ripple", type=float, default=0.7, help="size of the fine waves in the rough policy's logits")
    parser.add_argument("--linear-scales", type=float, nargs="+", default=[0.5], help="s for the linear policy")
    parser.add_argument("--rough-scales", type=float, nargs="+", default=[0.005, 0.02], help="s for the rough policy")
    parser.add_argument("--out", type=Path, default=IMAGES / "alp-bound.png")
    args = parser.parse_args()
    linear, rough = Linear.random(args.seed), Rough.random(args.seed, args.ripple)
    found = rows("linear", linear, args.linear_scales) + rows("rough", rough, args.rough_scales)
    s = args.rough_scales[-1]
    found += [_row("rough, x = 0 only", s, r, rough.at_crest(r * s, s), rough.at_crest(0.0, s)) for r in RATIOS]
    print(table(["policy", "s", "σ / s", "E KL(π̃‖μ)", "relative to σ = 0", "C", "-ln α", "C d E‖ζ‖² / 2σ²",
                 "bound", "holds"], found))  # fmt: skip
    drawn, exact = by_sampling(rough, np.zeros(2), s, s, 400_000, args.seed), rough.at_crest(s, s).kl
    print(
        f"\nMonte Carlo (400000 draws of δ and ζ) of the KL at x = 0, σ = s = {s:g}: {drawn:.4f}; exactly {exact:.4f}."
    )
    draw(linear, rough, args.linear_scales[-1], s, args.out)


if __name__ == "__main__":
    main()
