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


def clearly_above(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the mean of one series is above that of the other by more than three standard errors."""
    standard_error = math.hypot(*(float(values.std(ddof=1)) / math.sqrt(len(values)) for values in (one, other)))
    return float(one.mean() - other.mean()) > MIN_STANDARD_ERRORS * standard_error


def _last_windows(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    last = np.asarray(values[-2 * WINDOW :], dtype=np.float64)
    return last[:-WINDOW], last[-WINDOW:]
