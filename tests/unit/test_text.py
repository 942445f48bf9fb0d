"""Text of others in Markdown, read by a real parser."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from trimtab.text import code_span, duration, format_signed, join_names, markdown_text, number

HOSTILE = (
    *("`", "``", "a```b``c", " `a` ", "a\nb", "a\r\n\r\n# b", "| a \\| b |", "<script>&amp;", "[a](b) ![c](d)"),
    *("*a* _b_ ~~c~~", "\\`a\\`", "plain", "\x1b]0;x\x07\u202e"),
)
MARKDOWN = MarkdownIt().enable(["table", "strikethrough"])


def one_line(text: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in text)


@pytest.mark.parametrize("text", HOSTILE)
def test_code_and_text_are_shown_as_they_are(text: str) -> None:
    (inline,) = [one for one in MARKDOWN.parse(f"- x: {code_span(text)} end {markdown_text(text)}.") if one.children]
    before, code, *after = inline.children or []
    assert (before.content, code.type, code.content) == ("x: ", "code_inline", one_line(text))
    assert {token.type for token in after} <= {"text", "text_special"}
    assert "".join(token.content for token in after) == f" end {one_line(text)}."


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_stays_a_cell(text: str) -> None:
    row = f"| {code_span(text, in_table=True)} | {markdown_text(text)} |"
    inner = [token for token in MARKDOWN.parse(f"| a | b |\n|---|---|\n{row}") if token.type == "inline"]
    assert len(inner) == 4
    assert [token.content for token in inner[2].children or ()] == [one_line(text)]
    assert "".join(token.content for token in inner[3].children or ()) == one_line(text).strip()


def test_many_names_are_counted() -> None:
    assert join_names(["a", "b", "c", "d"]) == "a, b, c, d"
    assert join_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


@pytest.mark.parametrize(("seconds", "text"), [(41.7, "42 s"), (187, "3 min 07 s"), (7500, "2 h 05 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.256, "0.26"), (2e-3, "2.0e-3"), (99.4, "99"), (99.6, "100"), (-150, "−150"), (999.8, "1.0e3"), (1500, "1.5e3")],
)
def test_numbers_have_two_digits_and_integers_up_to_a_thousand_three(value: float, text: str) -> None:
    assert format_signed(value) == text


def test_separators_begin_where_a_number_is_written_as_a_thousand() -> None:
    assert [number(value) for value in (999.94, 999.96, -1000.4)] == ["999.9", "1,000", "-1,000"]
