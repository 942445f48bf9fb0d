"""The parts of an HTML page: sections of notes, tables, charts and boxes. One template renders all pages.

Pages show untrusted text, such as model output and file names. All text that is not `Markup` is therefore escaped, and
so are control characters everywhere.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trimtab.errors import Finding
from trimtab.text import clean


@dataclass(frozen=True)
class Note:
    """A paragraph."""

    text: str
    label: str = ""  # before the text
    tone: str = ""  # good, warn or plain: makes the label a colored tag


@dataclass(frozen=True)
class Chart:
    """A figure."""

    title: str
    svg: Markup
    notes: Sequence[Note] = ()
    now: str = ""  # the main number of the figure


@dataclass(frozen=True)
class Charts:
    """Figures in a grid, and a note that names the figures for which data is missing."""

    shown: Sequence[Chart]
    absent: Sequence[str] = ()


@dataclass(frozen=True)
class Tiles:
    """Large numbers side by side: name, value, and a note on the value."""

    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    note: str = ""  # a second line
    tone: str = ""  # good, warn or plain: makes the text a colored tag
    share: float | None = None  # the length of a bar, in [0, 1]
    shade: str = ""  # a CSS color behind the text
    hint: str = ""  # tooltip
    link: str = ""  # URL
    mark: Markup | str = ""  # before the text
    strong: bool = False  # bold


@dataclass(frozen=True)
class Table:
    """A table."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    note: str = ""
    numeric: Sequence[int] = ()  # indices of columns that are aligned to the right
    mono: Sequence[int] = ()  # indices of columns in a fixed-width font
    best: int | None = None  # index of the row that is highlighted


@dataclass(frozen=True)
class Card:
    """A titled box."""

    title: str = ""
    parts: Sequence[Part] = ()
    now: str = ""  # a number beside the title
    tag: str = ""  # a warning beside the title
    code: str = ""  # text to copy


@dataclass(frozen=True)
class Fold:
    """Parts that the reader can open and close; closed at first unless `open` is set."""

    title: str
    parts: Sequence[Part]
    open: bool = False


@dataclass(frozen=True)
class Verdict:
    """The main result of a page: labeled lines, the first of which is large."""

    tone: str  # good, mixed, warn or plain
    rows: Sequence[tuple[str, str]]  # (label, text)


Part = Union[Note, Charts, Tiles, Table, Card, Fold, Verdict, Markup]  # noqa: UP007, a forward reference


@dataclass(frozen=True)
class Section:
    """A titled part of a page; without a title, its parts continue the section before."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A whole page."""

    kind: str  # in small letters above the title
    title: str
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = ()  # names and values below the title
    description: Sequence[str] = ()

    def html(self) -> str:
        """Returns the page as a self-contained HTML file, which loads no other files."""
        environment = Environment(
            loader=PackageLoader("trimtab.pages"),
            # For all templates, whatever their suffix: pages contain untrusted model output.
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.globals["refuse"] = _refuse
        template = environment.get_template("page.html.j2")
        # Escape control characters last: figures contain untrusted text too.
        return clean(template.render(page=self, version=importlib.metadata.version("trimtab")))


def _refuse(part: object) -> None:
    raise TypeError(f"a page has no part of type {type(part).__name__}: add it to `Part` and to page.html.j2")


STATUS_TONES = {"fail": "warn", "note": "plain", "ok": "good"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """Returns a table with one row per check: its status, its name, what was found and what to do."""
    rows = [[Cell(item.status, tone=STATUS_TONES[item.status]), item.name, item.text] for item in findings]
    return Table(("status", "check", "what was found"), rows)
