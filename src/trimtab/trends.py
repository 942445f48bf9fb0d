"""Trends over steps that both the report of a run and `trimtab.Monitor` judge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trimtab.findings import Finding

WINDOW = 20
"""Steps whose median is compared with that of the steps before them."""
NORM_FALL = 0.35
"""Share of its median before that the gradient norm must fall to. Miles reports .07 to .02 before a collapse."""
NORM_RISE = 10.0
"""How many times its median in the first steps the gradient norm must reach to have exploded."""
LEAST_BEFORE = 3
"""Steps before the last ones that such a median needs."""
COLLAPSED_SHARE = 0.5
"""Share of the best reward of a phase below which the last one has collapsed."""
MIN_STANDARD_ERRORS = 3.0


def gradient_norm_falls(norms: Sequence[float], rewards: Sequence[float] = ()) -> Finding | None:
    """Returns a note where the gradient norm fell within the last steps and the reward did not rise.

    Miles saw it before a collapse. Both are in order, one value a step, of which the last `2 * WINDOW` are read. A
    gradient also gets smaller where prompts are learned, because groups of equal rewards have none: the reward then
    rises. Rewards that are missing or not finite do not decide; a norm that is not finite is not a fall.
    """
    before, after = _last_windows(norms)
    if len(before) < WINDOW or not np.median(after) < NORM_FALL * np.median(before):
        return None
    earlier, later = _last_windows(rewards)
    if len(earlier) == WINDOW and clearly_above(later, earlier):
        return None
    detail = (
        f"the gradient norm fell from {np.median(before):.2g} to {np.median(after):.2g}, medians of {WINDOW} steps each"
    )
    return Finding("note", "gradient-norm", detail, "look at reward and entropy: this came before collapses")


def gradient_norm_rises(norms: Sequence[float], rewards: Sequence[float] = ()) -> Finding | None:
    """Returns a note where the gradient norm of the last steps is ten times that of the first, and no reward rose.

    Both are in order, one value a step. A norm that is missing decides nothing; where a reward is, the note says so.
    """
    before, after = _first_and_last(norms)
    if len(before) < LEAST_BEFORE or not 0 < NORM_RISE * np.median(before) <= np.median(after):
        return None
    earlier, later = _first_and_last(rewards)
    known = len(earlier) == len(before) and bool(np.isfinite([*earlier, *later]).all())
    if known and clearly_above(later, earlier):
        return None
    detail = (
        f"the gradient norm rose from {np.median(before):.2g} to {np.median(after):.2g}, medians of the first "
        f"{len(before)} and the last {WINDOW} steps{'' if known else '; whether the reward rose is not known'}"
    )
    advice = "look at reward and entropy, lower the learning rate, or go back to a checkpoint before the rise"
    return Finding("note", "gradient-explosion", detail, advice)


def reward_collapse(
    rewards: np.ndarray, parts: Sequence[np.ndarray], *, alone: bool = False
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the best earlier part and the last one where the reward collapsed: below half, by three standard errors.

    parts: the indices of the phases, in order. alone: any last part that is so clearly below the first one counts too.
    """
    *earlier, last = parts
    if not earlier:
        return None
    best = max(earlier, key=lambda part: rewards[part].mean())
    collapsed = rewards[best].mean() > 0 and rewards[last].mean() < COLLAPSED_SHARE * rewards[best].mean()
    if alone and not collapsed:
        best = earlier[0]
    return (best, last) if (collapsed or alone) and clearly_above(rewards[best], rewards[last]) else None


def clearly_above(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the mean of one series is above that of the other by more than three standard errors."""
    standard_error = math.hypot(*(float(values.std(ddof=1)) / math.sqrt(len(values)) for values in (one, other)))
    return float(one.mean() - other.mean()) > MIN_STANDARD_ERRORS * standard_error


def _first_and_last(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    every = np.asarray(values, dtype=np.float64)
    return every[:-WINDOW][:WINDOW], every[-WINDOW:]


def _last_windows(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    last = np.asarray(values[-2 * WINDOW :], dtype=np.float64)
    return last[:-WINDOW], last[-WINDOW:]
