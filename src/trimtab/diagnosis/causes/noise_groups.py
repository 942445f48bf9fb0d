"""Compares the size and the direction of noise between groups of tokens.

Rounding, quantized weights and routing move logits up and down by about one size, whatever the step, the age of the
weights, the prompt or the depth in the context, and on average not at all, whatever the probability of the token. What
moves tokens of one group further, or tokens of one probability all one way, is something else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs
from trimtab.diagnosis.measure.grouped import explained
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

PARTS = 8
"""Number of parts, with equally many tokens, that depths and probabilities are split into."""


def rms_of(shift: np.ndarray) -> float:
    return float(np.sqrt(np.square(shift).mean()))


def log_size(shift: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the size of each shift; sizes below 1e-6 count as that."""
    return np.log(np.abs(shift) + 1e-6)


def growth_of(old: np.ndarray, young: np.ndarray) -> tuple[float, float]:
    """Returns the ratio of the geometric mean sizes, and the z of its logarithm."""
    left, right = log_size(old), log_size(young)
    difference = float(left.mean() - right.mean())
    error = np.sqrt(left.var() / len(left) + right.var() / len(right))
    return float(np.exp(difference)), difference / max(float(error), 1e-12)


def parts_of(values: np.ndarray) -> np.ndarray:
    """Returns the part, from 0, that each value is in: `PARTS` parts with equally many values."""
    return np.searchsorted(np.quantile(values, np.arange(1, PARTS) / PARTS), values, side="left")


def direction(tokens: LogprobPairs) -> float:
    """Returns the share of the variance of shifts that the token's probability explains: near 0 for noise."""
    middle = tokens.middle
    if middle.sum() < LIMITS["group-tokens"]:
        return 0.0
    shift = tokens.shift[middle]
    scale = 1.48 * float(np.median(np.abs(shift)))
    mean = 0.5 * (tokens.behavior + tokens.trainer)[middle]
    return explained(np.clip(shift, -5 * scale, 5 * scale), parts_of(mean))


def uneven_by(tokens: LogprobPairs) -> dict[str, float]:
    """Returns the share of the variance of log sizes that steps, ages, prompts and depths explain, by their name."""
    tokens = tokens.distinct
    table, middle = tokens.table, tokens.middle
    if middle.sum() < 2 * LIMITS["group-tokens"]:
        return {}
    columns = {"step": tokens.of_response(table.step), "age of the weights": tokens.age}
    columns["prompt"] = tokens.of_response(table.prompt)
    columns["depth"] = parts_of(tokens.depth)
    size = log_size(tokens.shift[middle])
    found = {}
    for name, group in columns.items():
        if group is None:
            continue
        least, groups = ("prompt-tokens", "prompts") if name == "prompt" else ("group-tokens", "groups")
        count = np.unique(group[middle], return_counts=True)[1]
        if (count >= LIMITS[least]).sum() >= LIMITS[groups]:
            found[name] = explained(size, group[middle], int(LIMITS[least]))
    return found


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
    sizes = {s: v for s, v in sizes.items() if len(v) >= LIMITS["group-tokens"]}
    if len(sizes) < 2:
        return None
    means = {s: float(log_size(values).mean()) for s, values in sizes.items()}
    order = sorted(means, key=lambda s: means[s])
    growth, growth_z = growth_of(sizes[order[-1]], sizes[order[0]])
    if growth < LIMITS["step-growth"] or growth_z < LIMITS["step-growth-z"]:
        return None
    if rms_of(sizes[order[-1]]) < LIMITS["least-rms"]:
        return None
    text = f"logits move {growth:.1f} times as far at step {order[-1]} as at step {order[0]} (z = {growth_z:.1f})"
    return Steps(list(means), list(means.values()), text)
