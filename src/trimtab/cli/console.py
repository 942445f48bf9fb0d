"""The consoles of tables and progress displays: texts are printed as they are, with control characters escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trimtab.sandbox.code_result import clean


class PlainTextConsole(Console):
    """A rich console that interprets nothing in a text: no markup, emoji codes or escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments are those of rich itself, which move the cursor of a live display.
            yield segment if segment.control else Segment(clean(segment.text), segment.style)
