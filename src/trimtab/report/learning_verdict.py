"""Judges whether a run learns: whether its reward fell, rose, or leaves nothing to learn from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.pages.render import number, short
from trimtab.runs.metric_catalog import judge
from trimtab.runs.reader import Run

MAX_PHASES, MIN_PHASE_STEPS = 4, 5
COLLAPSED_SHARE, MIN_STANDARD_ERRORS = 0.5, 3.0


def equal_parts(count: int) -> list[np.ndarray]:
    """Returns the indices of up to four equal parts of a run, each of at least five steps."""
    return np.array_split(np.arange(count), min(MAX_PHASES, max(count // MIN_PHASE_STEPS, 1)))


def collapse(run: Run) -> Iterator[str]:
    """Yields a reward collapse: the last phase has less than half the mean reward of the best earlier phase.

    The difference must also exceed three standard errors.
    """
    steps, rewards = run.series("reward/mean")
    parts = equal_parts(len(rewards))
    if len(parts) < 2:
        return
    means, last = [float(rewards[part].mean()) for part in parts], parts[-1]
    best = int(np.argmax(means[:-1]))
    fallen = means[best] > 0 and means[-1] < COLLAPSED_SHARE * means[best]
    if fallen and _clearly_above(rewards[parts[best]], rewards[last]):
        top = parts[best]
        yield (
            f"the reward fell from {short(means[best])} (steps {steps[top[0]]:.0f} to {steps[top[-1]]:.0f}) to "
            f"{short(means[-1])} (steps {steps[last[0]]:.0f} to {steps[last[-1]]:.0f})"
        )


def _clearly_above(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the mean of one series is above that of the other by more than three standard errors."""
    standard_error = math.hypot(*(float(values.std(ddof=1)) / math.sqrt(len(values)) for values in (one, other)))
    return float(one.mean() - other.mean()) > MIN_STANDARD_ERRORS * standard_error


def reward_rose(run: Run) -> bool:
    """Whether the reward of the last phase is clearly above that of the first: groups are then alike by learning."""
    _, rewards = run.series("reward/mean")
    parts = equal_parts(len(rewards))
    return len(parts) > 1 and _clearly_above(rewards[parts[-1]], rewards[parts[0]])


def nothing_learned(run: Run) -> Iterator[str]:
    """Yields why a run learns nothing: in more than half of its last phase every advantage was 0.

    A policy that solves all of its prompts has learned them: steps without signal then have the higher reward.
    """
    idle = np.array([_without_signal(row) for row in run.rows])
    if idle[equal_parts(len(idle))[-1]].mean() <= 0.5:
        return
    rows, others = ([run.rows[index] for index in np.flatnonzero(which)] for which in (idle, ~idle))
    if others and _mean_reward(rows) > _mean_reward(others):
        return
    rewards = {row.get("reward/mean") for row in rows if row.get("reward/std") == 0}
    if len(rewards) == 1 and all(row.get("reward/std") == 0 for row in rows):
        why = f"every response got reward {number(rewards.pop())}"
    else:
        why = "the rewards of every group were equal"
    cut = [row["length/truncated"] for row in rows if row.get("length/truncated") is not None]
    share = float(np.median(cut)) if cut else 0.0
    if judge("length/truncated", share) == "outside":
        why += f", and {share:.0%} of the responses were cut by the length limit"
    yield f"nothing was learned in {len(rows)} of {len(idle)} steps: {why}"


def _mean_reward(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(np.mean([row.get("reward/mean") or 0.0 for row in rows]))


def _without_signal(row: Mapping[str, Any]) -> bool:
    """Whether all rewards that a step compares were equal; where it compares the whole batch, no group is counted."""
    sampled, equal = row.get("groups/sampled") or 0, row.get("groups/no_signal") or 0
    return equal >= sampled > 0 or (row.get("reward/std") == 0 and not row.get("expert/traces"))
