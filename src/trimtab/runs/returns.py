"""The returns of a run to an earlier policy (`[guard]`), read from its metrics: which of its steps were discarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

EVENT, RETURNS = "guard/event", "guard/returns"
CONTINUES_FROM = "guard/continues_from"
"""Metric of the first step after a return: the step whose policy it went on from. Steps between are discarded."""


class Return(NamedTuple):
    """A return: `step` was the first one after it, and went on from the policy of `start`."""

    step: int
    start: int


def returns_of(rows: Sequence[Mapping[str, Any]]) -> list[Return]:
    return [Return(row["step"], row[CONTINUES_FROM]) for row in rows if row.get(CONTINUES_FROM) is not None]


def discarded_spans(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Returns the first and the last step of each part of the run that was discarded."""
    kept = {row["step"] for row in kept_rows(rows)}
    parts = groupby((row["step"] for row in rows), key=lambda step: step in kept)
    return [(steps[0], steps[-1]) for is_kept, part in parts if not is_kept for steps in [list(part)]]


def kept_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the metrics of the steps that were not discarded, in order.

    What was measured before training is in the first row: if that was discarded, the first one that is kept has it.
    """
    kept: list[dict[str, Any]] = []
    for row in rows:
        if (start := row.get(CONTINUES_FROM)) is not None:
            kept = [one for one in kept if one["step"] <= start]
        kept.append(row)
    if kept and kept[0] is not rows[0]:
        kept[0] = {key: value for key, value in rows[0].items() if key.endswith("/before")} | kept[0]
    return kept
