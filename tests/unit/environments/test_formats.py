"""Calls and results as text."""

from __future__ import annotations

import pytest

from trimtab.environments.formats import Call, Fence, Tag, build_format
from trimtab.errors import TrimtabError


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (" <python>6 * 7</python>", Call("python", "6 * 7")),
        ("<python>a\nb</python>", Call("python", "a\nb")),
        ("<search>x</search> and <python>1</python>", Call("python", "1")),
        ("<python>1</search>", None),
        ("<python>1", None),
        ("no call: 1 < 2", None),
        ("<python></python>", Call("python", "")),
    ],
)
def test_tag(text: str, call: Call | None) -> None:
    form = Tag(("python", "search"))
    assert form.parse(text) == call
    assert form.stop == ("</python>", "</search>")
    assert form.render("42") == "<output>42</output>"


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("Let us see.\n```python\nprint(1)\n```\n", Call(None, "print(1)")),
        ("```python\na = 1\nb = 2\n```", Call(None, "a = 1\nb = 2")),
        ("```python\nprint('''```''')\n```\n", Call(None, "print('''```''')")),
        ("```\nprint(1)\n```\n", None),
        ("```python\nprint(1)", None),
    ],
)
def test_fence(text: str, call: Call | None) -> None:
    assert Fence().parse(text) == call
    assert Fence().render("1") == "```output\n1\n```\n"


def test_the_opening_line_of_a_block_is_no_stop() -> None:
    [stop] = Fence().stop
    assert stop not in "Text\n```python\nx"
    assert stop in "Text\n```python\nx\n```\n"


def test_unknown_formats_are_one_line() -> None:
    with pytest.raises(TrimtabError, match=r"unknown format 'tags'.*'tag'"):
        build_format("tags", ("python",))
    with pytest.raises(TrimtabError, match="does not name the tool, and there are 2"):
        build_format("fence", ("a", "b"))
    with pytest.raises(TrimtabError, match="has no 'render'"):
        build_format("tests.unit.environments.test_formats:NoRender", ())


class NoRender:
    stop = ()

    def parse(self, text: str) -> Call | None:
        del text
        return None
