"""The parts of a page: sections of notes, tables, charts and boxes. One template renders them all.

Every text is escaped unless it is `Markup`, and no page has control characters: pages show model output, names of files
and other text of others.
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
    """A paragraph. label: before the text; a tag in the color of `tone` (good, warn or plain) if there is one."""

    text: str
    label: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure. notes: how to read it and what it shows. now: its main number."""

    title: str
    svg: Markup
    notes: Sequence[Note] = ()
    now: str = ""


@dataclass(frozen=True)
class Charts:
    """Figures in a grid."""

    shown: Sequence[Chart]


@dataclass(frozen=True)
class Tiles:
    """Large numbers side by side: name, value and what to know about it."""

    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    note: a second line. tone: good, warn or plain, which makes the text a tag. share: the length of a bar, in [0, 1].
    shade: a CSS color behind the text. hint: shown under the pointer. link: where the text leads. mark: before the
    text. strong: whether it stands out.
    """

    text: str
    note: str = ""
    tone: str = ""
    share: float | None = None
    shade: str = ""
    hint: str = ""
    link: str = ""
    mark: Markup | str = ""
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table. numeric, mono: indices of the columns aligned to the right or in a fixed-width font.

    best: the index of a row that stands out.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    note: str = ""
    numeric: Sequence[int] = ()
    mono: Sequence[int] = ()
    best: int | None = None


@dataclass(frozen=True)
class Card:
    """A titled box. now: a number beside the title. tag: a warning beside it. code: text to copy."""

    title: str = ""
    parts: Sequence[Part] = ()
    now: str = ""
    tag: str = ""
    code: str = ""


@dataclass(frozen=True)
class Fold:
    """Parts that are hidden until the reader opens them, unless `open`."""

    title: str
    parts: Sequence[Part]
    open: bool = False


@dataclass(frozen=True)
class Verdict:
    """The answer of a page: labeled lines, of which the first stands out. tone: good, mixed, warn or plain."""

    tone: str
    rows: Sequence[tuple[str, str]]


Part = Union[Note, Charts, Tiles, Table, Card, Fold, Verdict, Markup]  # noqa: UP007, a forward reference


@dataclass(frozen=True)
class Section:
    """A titled part of a page; without a title its parts follow the section before."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A whole page. kind: in small letters above the title. facts: names and values below it."""

    kind: str
    title: str
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = ()
    description: Sequence[str] = ()

    def html(self) -> str:
        """Returns the page as one HTML file that loads nothing."""
        environment = Environment(
            loader=PackageLoader("trimtab.pages"),
            # For every file name: the pages contain model output, which is untrusted.
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.globals["refuse"] = _refuse
        template = environment.get_template("page.html.j2")
        # Escaped here, once: figures have text of others too.
        return clean(template.render(page=self, version=importlib.metadata.version("trimtab")))


def _refuse(part: object) -> None:
    raise TypeError(f"a page has no part of type {type(part).__name__}: add it to `Part` and to page.html.j2")


def charts(shown: Sequence[Chart], absent: Sequence[str]) -> list[Part]:
    """Returns figures in a grid and a note that names those which the data does not allow."""
    return [*([Charts(shown)] if shown else []), *([Note(f"Not shown: {'; '.join(absent)}.")] if absent else [])]


STATUS_TONES = {"fail": "warn", "note": "plain", "ok": "good"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """Returns one row per check: its status, its name, what was found and what to do."""
    rows = [[Cell(item.status, tone=STATUS_TONES[item.status]), item.name, item.text] for item in findings]
    return Table(("status", "check", "what was found"), rows)
