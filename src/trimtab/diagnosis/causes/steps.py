"""Compares the size of noise between training steps: that of rounding does not vary, that of drift does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs

MIN_RMS = 4e-4
"""Smallest shift of logits that is not that of two float32 forwards, or the rounding of the file."""
MIN_STEP_GROWTH, MIN_GROWTH_Z, MIN_TOKENS = 1.8, 5.0, 40


def rms_of(shift: np.ndarray) -> float:
    return float(np.sqrt(np.square(shift).mean()))


def growth_of(old: np.ndarray, young: np.ndarray) -> tuple[float, float]:
    """Returns the ratio of the geometric mean sizes, and the z of its logarithm."""
    left, right = np.log(np.abs(old) + 1e-6), np.log(np.abs(young) + 1e-6)
    difference = float(left.mean() - right.mean())
    error = np.sqrt(left.var() / len(left) + right.var() / len(right))
    return float(np.exp(difference)), difference / max(float(error), 1e-12)


@dataclass(frozen=True)
class Steps:
    """Steps with enough tokens, ascending; sizes: geometric mean shift of each. order: rank correlation of the two."""

    steps: list[int]
    sizes: list[float]
    text: str

    @property
    def order(self) -> float:
        ranks = np.argsort(np.argsort(self.sizes))
        return float(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1])


def drift_between_steps(tokens: LogprobPairs) -> Steps | None:
    """Returns the sizes of noise by step if they differ, or None."""
    step = tokens.of_response(tokens.table.step)
    if step is None:
        return None
    middle, shift = tokens.middle, tokens.shift
    sizes = {int(s): shift[middle & (step == s)] for s in np.unique(step)}
    sizes = {s: v for s, v in sizes.items() if len(v) >= MIN_TOKENS}
    if len(sizes) < 2:
        return None
    means = {s: float(np.log(np.abs(values) + 1e-6).mean()) for s, values in sizes.items()}
    order = sorted(means, key=lambda s: means[s])
    growth, growth_z = growth_of(sizes[order[-1]], sizes[order[0]])
    if growth < MIN_STEP_GROWTH or growth_z < MIN_GROWTH_Z + 1 or rms_of(sizes[order[-1]]) < MIN_RMS:
        return None
    text = f"logits move {growth:.1f} times as far at step {order[-1]} as at step {order[0]} (z = {growth_z:.1f})"
    return Steps(list(means), list(means.values()), text)
