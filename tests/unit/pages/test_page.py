"""The template of all pages: every part shows text of others as text, and a page loads and runs nothing."""

from __future__ import annotations

import re

import pytest
from markupsafe import Markup
from tests.support.html_reader import Reader

from trimtab.findings import Finding
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
    charts,
    findings_table,
)

EVIL = '"><script>alert(1)</script>&<img src=x onerror=alert(2)>'
PARTS: list[Part] = [
    Note(EVIL),
    Note(EVIL, EVIL),
    Note(EVIL, EVIL, "warn"),
    Tiles([(EVIL, EVIL, EVIL)]),
    Charts([Chart(EVIL, Markup("<svg></svg>"), [Note(EVIL)], EVIL)], narrow=True),
    *charts([], [EVIL]),
    Table([EVIL], [[EVIL]], EVIL, EVIL, numeric=[0], best=0),
    Table([], [[Cell(EVIL, EVIL, hint=EVIL, shade="red", mark=EVIL, strong=True)]], mono=[0]),
    Table([], [[Cell(EVIL, tone="good"), Cell(EVIL, share=0.5), Cell(EVIL, link=f"./{EVIL}")]]),
    findings_table([Finding("fail", EVIL, EVIL, EVIL)]),
    Card(EVIL, [Note(EVIL)], EVIL, EVIL, EVIL),
    Fold(EVIL, [Card(EVIL, [Table([EVIL], [[EVIL]])])], open=True),
    Verdict("good", [(EVIL, EVIL)]),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_every_part_shows_text_of_others_as_text(part: Part) -> None:
    html = Page(EVIL, EVIL, [Section(EVIL, [part])], [(EVIL, EVIL)], [EVIL]).html()
    reader = Reader(html)
    assert (reader.open, reader.active) == ([], [])
    # In the head and the header six times: <title>, kind, h1, description, and both of a fact; and the heading.
    assert reader.text.count(EVIL) > 7
    assert not re.search(r"url\((?!#)|@import", html)


def test_a_section_without_parts_is_left_out() -> None:
    assert "<section>" not in Page("kind", "title", [Section("empty", [])]).html()
