"""Counts of what is read from files and of what is left out, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trimtab.diagnosis.records import finding
from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP
from trimtab.errors import Finding

EXTERNAL_TRACE, NOT_FINITE = "external trace (off_policy)", "no finite log-prob at any trained token"
OUT_OF_LOSS = "no part of the loss (sample_mask 0)"
NO_LIST, ONE_NUMBER = "is not a list of numbers", "not a list of numbers but one number"
UNEQUAL = "lists of different lengths"
"""Reasons to drop a response."""
_ENOUGH = 100  # from this many trained tokens on, log-probs without a single fraction count as rounded
ODD_FILES = ("no-rows", "empty", "no-trainer", "several-versions")


@dataclass(eq=False)
class ValueCounts:
    """Counts of one column's log-probs at trained tokens: values above 0, values with a fraction, and the range."""

    above: int = 0
    fractions: int = 0
    lowest: float = np.inf
    highest: float = -np.inf

    def add(self, values: np.ndarray) -> None:
        """Adds finite values (tokens,), at least one."""
        self.above += int((values > MAX_ROUNDED_LOGP).sum())
        self.fractions += int((values != np.rint(values)).sum())
        self.lowest = min(self.lowest, float(values.min()))
        self.highest = max(self.highest, float(values.max()))


@dataclass(eq=False)
class ReadCounts:
    """Counts that are updated while files are read."""

    responses: int = 0
    tokens: int = 0
    trained: int = 0  # trained tokens
    equal: int = 0  # trained tokens with equal log-probs on both sides
    zero: int = 0  # trained tokens with a sampler's log-prob of 0
    zero_trainer: int = 0  # trained tokens with a trainer's log-prob of 0
    k3_sum: float = 0.0  # over the trained tokens
    dropped: Counter[str] = field(default_factory=Counter)  # responses, by reason
    odd: Counter[str] = field(default_factory=Counter)  # files and responses, by key of findings.toml
    nonfinite: Counter[str] = field(default_factory=Counter)  # trained tokens, by column and kind
    unknown: Counter[str] = field(default_factory=Counter)  # responses without a finite reward or advantage
    values: dict[str, ValueCounts] = field(default_factory=dict)  # by column of log-probs
    file: Path | None = None  # the file being read
    first: dict[str, str] = field(default_factory=dict)  # the first row dropped for each reason
    quotes: bool = True  # whether messages name files and quote their cells
    groups: dict[Hashable, int] = field(default_factory=dict)  # numbers over all files, in order of first occurrence
    prompts: dict[Hashable, int] = field(default_factory=dict)  # as `groups`; may be shared with other data
    seen: dict[Hashable, int] = field(default_factory=dict)  # file of each response, by its id or a hash of its content

    def fresh(self) -> ReadCounts:
        """Returns the counts before any row was read."""
        return ReadCounts(odd=Counter({"empty": self.odd["empty"]}), quotes=self.quotes, prompts=self.prompts)

    def drop(self, reason: str, count: int = 1, row: int | None = None, detail: str = "") -> None:
        """Counts dropped responses. row, detail: number of the first one in the current file, and its values."""
        if count:
            self.dropped[reason] += count
            if row is not None and self.file is not None:
                quoted = f" of {self.file.name}{detail and f': {detail}'}" if self.quotes else ""
                self.first.setdefault(reason, f"row {row}{quoted}")

    def reasons(self, most: int) -> str:
        """Lists the most common reasons, each with the first row dropped for it."""
        items = [
            f"{count} x {reason}" + (f" (first: {self.first[reason]})" if reason in self.first else "")
            for reason, count in self.dropped.most_common(most)
        ]
        return "; ".join(items)

    def findings(self, anchor: str) -> list[Finding]:
        """Returns anomalies of the data."""
        all_equal, all_zero = (self.trained and count == self.trained for count in (self.equal, self.zero))
        whole = [column for column, values in self.values.items() if not values.fractions and self.trained >= _ENOUGH]
        return [
            *(
                finding("above-0", column=column, count=values.above, trained=self.trained, largest=values.highest)
                for column, values in self.values.items()
                if values.above
            ),
            *([finding("whole-numbers", columns=" and ".join(whole))] if whole and not all_zero else []),
            *(
                finding("not-a-number", column=column, count=count, responses=self.responses)
                for column, count in self.unknown.items()
                if count
            ),
            *([finding("not-finite", count=self.odd["not-finite"])] if self.odd["not-finite"] else []),
            *([finding("equal-columns", anchor=anchor, trained=self.trained)] if all_equal else []),
            *([finding("zeros")] if all_zero else []),
            *(finding(key, count=self.odd[key]) for key in ODD_FILES if self.odd[key]),
            *(finding("dropped", reason=reason, place=place) for reason, place in self.first.items()),
        ]
