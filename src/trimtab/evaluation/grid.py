"""A text table, as Markdown or for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.evaluation.pass_estimates import Estimate


@dataclass(frozen=True)
class Grid:
    """Cells of text under a heading; the first `labels` columns name the row, the others hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1

    def markdown(self) -> str:
        marks = ["---"] * self.labels + ["---:"] * (len(self.columns) - self.labels)
        lines = [self.columns, marks, *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"**{self.title}**\n\n{body}\n"

    def table(self) -> Any:
        """The same for a terminal, as something rich prints."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(self.columns):
            table.add_column(Text(name), justify="left" if number < self.labels else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return Group(Text(self.title, style="bold"), table)


def percent(estimate: Estimate) -> str:
    """`37.9 [33.1, 42.6]`, as the papers write accuracies."""
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def points(estimate: Estimate) -> str:
    """A difference in percentage points, `+2.8 [-0.5, 6.1]`."""
    return f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"
