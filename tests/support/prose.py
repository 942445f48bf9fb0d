"""Sentences of Markdown pages, without what is not read as prose."""

from __future__ import annotations

import re
from collections.abc import Iterator

ABBREVIATIONS = frozenset({"e.g", "i.e", "cf", "vs", "al", "Eq", "eq", "Eqs", "Fig", "fig", "Sec", "Dr", "approx"})
BLOCK = re.compile(r"^ *(```|~~~)[^\n]*\n.*?^ *\1 *$|<!--.*?-->", flags=re.DOTALL | re.MULTILINE)
ITEM = re.compile(r" *(?:[-*+]|\d+\.) +")
HEADING = re.compile(r"#+ +")
END = re.compile(r"[.!?][\"'”’)\]]*\s+")
REFERENCES = re.compile(r"\bSources?: .*")


def units(markdown: str) -> Iterator[str]:
    """Paragraphs, headings and list items, each on one line; without code blocks, tables and comments."""
    unit: list[str] = []
    for line in [*BLOCK.sub("\n", markdown).splitlines(), ""]:
        text, item, heading = line.lstrip(" >"), ITEM.match(line), HEADING.match(line)
        code = not unit and line.startswith("    ")
        if unit and (not text or text.startswith("|") or item or heading):
            yield " ".join(unit)
            unit = []
        if heading:
            yield line[heading.end() :]
        elif text and not text.startswith("|") and not code:
            unit.append(line[item.end() :] if item else text)


def sentences(markdown: str) -> Iterator[str]:
    """The sentences of a page: inline code is one word, a link its text, an image nothing.

    References are left out: what follows "Source:" or "Sources:", up to the end of its paragraph.
    """
    for unit in units(markdown):
        text = re.sub(r"(`+)(.+?)\1", "CODE", unit)
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        text = REFERENCES.sub("", text.replace("**", ""))
        start = 0
        for end in END.finditer(text):
            before = text[start : end.start()].rpartition(" ")[2].lstrip("(\"'[")
            if text[end.start()] == "." and (before in ABBREVIATIONS or before.endswith("..")):
                continue
            yield text[start : end.end()].strip()
            start = end.end()
        if text[start:].strip():
            yield text[start:].strip()


def words(sentence: str) -> int:
    """What has a letter or a digit and stands between spaces is a word."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())
