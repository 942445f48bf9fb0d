"""The consoles of tables and progress bars: texts are printed as they are, with control characters escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from trimtab.safe_text import clean

PACE_SECONDS = 3600.0  # the remaining time follows the pace of the last hour


class PlainTextConsole(Console):
    """A rich console that interprets nothing in a text: no markup, emoji codes or escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments are those of rich itself, which move the cursor of a live display.
            yield segment if segment.control else Segment(clean(segment.text), segment.style)


def progress_bar(console: PlainTextConsole) -> Progress:
    """Returns a bar with the share that is done and the remaining time; it is only drawn on a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    is_hidden = not console.is_terminal
    return Progress(*columns, console=console, disable=is_hidden, transient=True, speed_estimate_period=PACE_SECONDS)
