"""The template of all pages: every part shows text of others as text, and a page loads and runs nothing."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from markupsafe import Markup
from tests.support.html_reader import Reader

from trimtab.errors import Finding
from trimtab.pages.page import (
    Card,
    Cell,
    Chart,
    Charts,
    Fold,
    Note,
    Page,
    Part,
    Section,
    Table,
    Tiles,
    Verdict,
    findings_table,
)
from trimtab.text import UNPRINTABLE

EVIL = '"><script>alert(1)</script>&<img src=x onerror=alert(2)>'
PARTS: list[Part] = [
    Note(EVIL),
    Note(EVIL, EVIL),
    Note(EVIL, EVIL, "warn"),
    Tiles([(EVIL, EVIL, EVIL)]),
    Charts([Chart(EVIL, Markup("<svg></svg>"), [Note(EVIL)], EVIL)]),
    Charts([], [EVIL]),
    Table([EVIL], [[EVIL]], EVIL, EVIL, numeric=[0], best=0),
    Table([], [[Cell(EVIL, EVIL, hint=EVIL, shade="red", mark=EVIL, strong=True)]], mono=[0]),
    Table([], [[Cell(EVIL, tone="good"), Cell(EVIL, share=0.5), Cell(EVIL, link=f"./{EVIL}")]]),
    findings_table([Finding("fail", EVIL, EVIL, EVIL)]),
    Card(EVIL, [Note(EVIL)], EVIL, EVIL, EVIL),
    Fold(EVIL, [Card(EVIL, [Table([EVIL], [[EVIL]])])], open=True),
    Verdict("good", [(EVIL, EVIL)]),
]


def test_a_column_may_be_numeric_and_of_a_fixed_width_and_an_unknown_part_is_refused() -> None:
    assert '<td class="num mono">' in Page("", "", [Section("", [Table([], [["1"]], numeric=[0], mono=[0])])]).html()
    with pytest.raises(TypeError, match="Chart"):
        Page("", "", [Section("", [Chart("", Markup(""))])]).html()  # type: ignore[list-item]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_every_part_shows_text_of_others_as_text(part: Part) -> None:
    html = Page(EVIL, EVIL, [Section(EVIL, [part])], [(EVIL, EVIL)], [EVIL]).html()
    reader = Reader(html)
    assert (reader.open, reader.active) == ([], [])
    # In the head and the header six times: <title>, kind, h1, description, and both of a fact; and the heading.
    assert reader.text.count(EVIL) > 7
    assert not re.search(r"url\((?!#)|@import", html)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_no_control_character_is_in_the_source(part: Part) -> None:
    """A source that is printed in a terminal rewrites nothing."""
    controls = "\x00\x07\x0b\x0c\x1b[2J\x7f\x85\x9b1m\u202e\u2066\ud800"

    def planted(value: Any) -> Any:
        if isinstance(value, str):
            return type(value)(controls if value == EVIL else value)
        if isinstance(value, list | tuple):
            return type(value)(map(planted, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(value, **{name: planted(inner) for name, inner in vars(value).items()})
        return value

    html = Page(controls, controls, [Section(controls, [planted(part), Markup(f"<svg>{controls}</svg>")])]).html()
    assert not [sign for sign in html if sign not in "\n\t" and UNPRINTABLE.match(sign)]
    assert html.encode().decode().count("\\x1b[2J") > 4


def test_a_section_without_parts_is_left_out() -> None:
    assert "<section>" not in Page("kind", "title", [Section("empty", [])]).html()
