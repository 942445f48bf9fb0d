"""Counts of rows read and dropped, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class ReadCounts:
    """Filled while files are read.

    `file` is the one being read; `first` knows the first row left out for each reason. `groups` numbers prompt groups
    over all files; `seen` knows the file of each response, by its id or its content.
    """

    responses: int = 0
    tokens: int = 0
    trained: int = 0
    no_rows: int = 0
    empty_files: int = 0
    skipped_files: int = 0
    equal: int = 0
    zero: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    nonfinite: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    positive: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    file: Path | None = None
    first: dict[str, str] = field(default_factory=dict)
    several_versions: bool = False
    damaged: int = 0
    groups: dict[Hashable, int] = field(default_factory=dict)
    seen: dict[Hashable, int] = field(default_factory=dict)

    def drop(self, reason: str, count: int = 1, row: int | None = None) -> None:
        """Count responses that are left out; `row` is the number of the first of them in the file being read."""
        if count:
            self.dropped[reason] += count
            if row is not None and self.file is not None:
                self.first.setdefault(reason, f"row {row} of {self.file.name}")

    def reasons(self, most: int) -> str:
        """The commonest reasons, each with the first row it was against."""
        found = [
            f"{count} x {reason}" + (f" (first: {self.first[reason]})" if reason in self.first else "")
            for reason, count in self.dropped.most_common(most)
        ]
        return "; ".join(found)

    def group(self, key: Hashable) -> int:
        """The number of a prompt group, given out in the order of first sight."""
        return self.groups.setdefault(key, len(self.groups))

    def above_zero(self, name: str, count: int, largest: float) -> None:
        self.positive[name] += count
        self.largest[name] = max(largest, self.largest.get(name, largest))

    def no_logps(self) -> str | None:
        """A column that cannot be what it is taken for: most of its values are above 0."""
        return next((name for name, count in self.positive.items() if 2 * count > self.trained), None)

    def findings(self, anchor: str) -> list[str]:
        """What is odd about the data as a whole, a sentence each."""
        found = []
        for name, count in self.positive.items():
            found.append(
                f"{count} of {self.trained} values of {name} are above 0 (largest {self.largest[name]:.4g}): a "
                f"log-probability cannot be; check that the column holds natural logarithms"
            )
        for name, count in self.unknown.items():
            if count:
                found.append(f"{name} is not a finite number in {count} of {self.responses} responses")
        if self.damaged:
            found.append(
                f"{_count(self.damaged, 'response')} with values at trained tokens that are not finite: those tokens "
                f"are left out here, a trainer has to drop the responses"
            )
        if self.trained and self.equal == self.trained:
            found.append(
                f"{anchor} equals logp_behavior bit for bit at all {self.trained} trained tokens: either the numerics "
                f"are identical or one is a copy of the other (a bypass mode that takes the sampler's log-probs)"
            )
        if self.trained and self.zero == self.trained:
            found.append("logp_behavior is 0 at every trained token: the sampler reported no log-probs")
        if self.no_rows:
            found.append(f"{_count(self.no_rows, 'file')} without rows")
        if self.empty_files:
            found.append(f"{_count(self.empty_files, 'empty file')}")
        if self.skipped_files:
            found.append(
                f"{_count(self.skipped_files, 'file')} without the trainer's log-probs left out (ranks of earlier "
                f"pipeline stages hold none)"
            )
        if self.several_versions:
            found.append("some responses were written by several versions of the weights; each counts as of its oldest")
        return found + [f"left out: {reason}, first in {place}" for reason, place in self.first.items()]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
