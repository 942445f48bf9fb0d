"""Counts of rows read and dropped, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.errors import Finding

EXTERNAL_TRACE, NOT_FINITE = "external trace (off_policy)", "no finite log-prob at any trained token"
OUT_OF_LOSS = "no part of the loss (sample_mask 0)"
NO_LIST, ONE_NUMBER = "is not a list of numbers", "not a list of numbers but one number"
UNEQUAL = "lists of different lengths"
"""Reasons to drop a response."""


@dataclass(eq=False)
class ReadCounts:
    """Counts that are updated while files are read.

    k3_sum: of the trained tokens. file: the one being read. first: the first row dropped for each reason. groups,
    prompts: their numbers over all files, in the order of first occurrence; those of prompts may be shared with other
    data. quotes: whether messages name files and quote their cells. seen: the file of each response, by its id or a
    hash of its content.
    """

    responses: int = 0
    tokens: int = 0
    trained: int = 0
    no_rows: int = 0
    empty_files: int = 0
    skipped_files: int = 0
    equal: int = 0
    zero: int = 0
    zero_trainer: int = 0
    k3_sum: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    nonfinite: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    positive: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    file: Path | None = None
    first: dict[str, str] = field(default_factory=dict)
    quotes: bool = True
    several_versions: bool = False
    damaged: int = 0
    groups: dict[Hashable, int] = field(default_factory=dict)
    prompts: dict[Hashable, int] = field(default_factory=dict)
    seen: dict[Hashable, int] = field(default_factory=dict)

    def fresh(self) -> ReadCounts:
        """Returns the counts before any row was read."""
        return ReadCounts(empty_files=self.empty_files, quotes=self.quotes, prompts=self.prompts)

    def drop(self, reason: str, count: int = 1, row: int | None = None, detail: str = "") -> None:
        """Counts dropped responses; `row`, `detail`: number of the first one in the current file, and its values."""
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

    def above_zero(self, name: str, count: int, largest: float) -> None:
        self.positive[name] += count
        self.largest[name] = max(largest, self.largest.get(name, largest))

    def no_logps(self) -> str | None:
        """Returns a column that cannot hold log-probs, since most of its values are above 0, or None."""
        return next((name for name, count in self.positive.items() if 2 * count > self.trained), None)

    def findings(self, anchor: str) -> list[Finding]:
        """Returns anomalies of the data."""
        anomalies: list[Finding] = []

        def note(name: str, detail: str, next_step: str = "") -> None:
            anomalies.append(Finding("note", name, detail, next_step))

        for name, count in self.positive.items():
            text = f"{count} of {self.trained} values of {name} are above 0 (largest {self.largest[name]:.4g})"
            note("above 0", f"{text}: a log-probability cannot be", "check that the column holds natural logarithms")
        for name, count in self.unknown.items():
            if count:
                note("not a number", f"{name} is not a finite number in {count} of {self.responses} responses")
        if self.damaged:
            text = f"responses with values at trained tokens that are not finite: {self.damaged}"
            note("not finite", f"{text}; those tokens are left out here, a trainer has to drop the responses")
        if self.trained and self.equal == self.trained:
            note(
                "equal columns",
                f"{anchor} equals logp_behavior bit for bit at all {self.trained} trained tokens: either the numerics "
                f"are identical or one is a copy of the other (a bypass mode that takes the sampler's log-probs)",
            )
        if self.trained and self.zero == self.trained:
            note("zeros", "logp_behavior is 0 at every trained token: the sampler reported no log-probs")
        files = {
            "without rows": self.no_rows,
            "empty": self.empty_files,
            "without the trainer's log-probs, as ranks of earlier pipeline stages write them": self.skipped_files,
        }
        for kind, count in files.items():
            if count:
                note("files", f"files left out: {count} {kind}")
        if self.several_versions:
            note("versions", "some responses are of several versions of the weights; each counts as of its oldest")
        for reason, place in self.first.items():
            note("left out", f"left out: {reason}, first in {place}")
        return anomalies
