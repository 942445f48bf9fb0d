"""No sentence of a page is too long to be understood when it is read once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")})
MOST = 39  # words
ABBREVIATIONS = frozenset({"e.g", "i.e", "cf", "vs", "al", "Eq", "eq", "Eqs", "Fig", "fig", "Sec", "Dr", "approx"})
NOT_PROSE = re.compile(r"^ *(```|~~~)[^\n]*\n.*?^ *\1 *$|<!--.*?-->", flags=re.DOTALL | re.MULTILINE)
ITEM = re.compile(r" *(?:[-*+]|\d+\.) +|#+ +")
END = re.compile(r"[.!?][\"'”’)\]]*\s+")
REFERENCES = re.compile(r"\bSources?: .*")


def units(page: str) -> Iterator[str]:
    """Paragraphs, headings and list items, each on one line; without code blocks, tables and comments."""
    unit: list[str] = []
    for line in [*NOT_PROSE.sub("\n", page).splitlines(), ""]:
        text, item, code = line.lstrip(" >"), ITEM.match(line), not unit and line.startswith("    ")
        if unit and (not text or text[0] == "|" or item or unit[0][:1] == "#"):
            yield " ".join(unit)
            unit = []
        if text and text[0] != "|" and not code:
            unit.append(line[item.end() :] if item and line[0] != "#" else text)


def sentences(page: str) -> Iterator[str]:
    """Inline code is one word, a link its text, an image nothing.

    References are left out: what follows "Source:" or "Sources:", up to the end of its paragraph.
    """
    for unit in units(page):
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", re.sub(r"(`+)(.+?)\1", "CODE", unit))
        text = REFERENCES.sub("", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", ""))
        start = 0
        for end in END.finditer(f"{text}! "):
            before = text[start : end.start()].rpartition(" ")[2].lstrip("(\"'[")
            if text[end.start() : end.start() + 1] != "." or not (before in ABBREVIATIONS or before.endswith("..")):
                yield text[start : end.end()].strip()
                start = end.end()


def too_long(page: str) -> list[str]:
    counts = {one: sum(bool(re.search(r"\w", word)) for word in one.split()) for one in sentences(page)}
    return [f"{count} words: {one}" for one, count in counts.items() if count > MOST]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_sentence_of_a_page_is_short(page: Path) -> None:
    """Make two sentences of it, or a list or table. There is no list of exceptions."""
    assert too_long(page.read_text(encoding="utf-8")) == []


L20, L39, L40, L60 = (" ".join(["One", *["more"] * (count - 1)]) for count in (20, 39, 40, 60))
FORMS = ["{}.", "Short. {}! Short.", "- short\n- {}\n- short", "Short:\n\n1. {}\n", "> {}.", "## Heading\n{}.\n"]
FORMS += [
    "| a |\n|---|\n| b |\n{}.",
    "A.\n\n```text\ncode\n```\n{}.",
    "(See above.) {}.",
    "I (**see.**) {}",
    "{}...",
]


@pytest.mark.parametrize("page", FORMS)
def test_a_sentence_of_forty_words_is_found(page: str) -> None:
    assert len(too_long(page.format(L40))) == 1
    assert len(too_long(page.format(f"{L20}\n  {L20}"))) == 1
    assert too_long(page.format(L39)) == []


NO_ENDS = ["e.g.", "i.e.", "Eq. 3", "(cf. Eq. 3)", "0.81", "arXiv 2510.18855", "Dr. GRPO", "Liu et al.", "...", "v2.1"]


@pytest.mark.parametrize("end", NO_ENDS)
def test_what_looks_like_an_end_is_none(end: str) -> None:
    assert len(list(sentences(f"It holds, {end} and so on."))) == 1
    assert len(too_long(f"{L20} {end} {L20}.")) == 1


NO_PROSE = ["```text\n{}\n```", "Text:\n\n    {}\n    {}\n", "| {} | {} |", "<!-- {}\n{} -->", "Text `{}` and text."]
NO_PROSE += ["[Text]({}) and text.", "![{}](image.png)", "Text. Source: {}.", "Sources: {}"]


@pytest.mark.parametrize("page", NO_PROSE)
def test_what_is_no_prose_is_not_counted(page: str) -> None:
    assert too_long(page.replace("{}", L60)) == []
