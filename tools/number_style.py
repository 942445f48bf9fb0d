"""Writes the numbers of the documents in one style, that of the program's output: 0.81 and 95%, never .81 or 95 %.

    python tools/number_style.py            # rewrites the pages in which something is to change, and names them
    python tools/number_style.py FILE...

Code (blocks, indented lines and `inline`), links and the history (CHANGELOG, docs/decisions.md) stay as they are. Lines
that become longer than 120 characters are wrapped anew with the rest of their paragraph.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
DECIMAL = r"(?<![\w.\\])\.(?=\d)"
PERCENT = r"(?<=\d)[ \u00a0]%"
KEPT = r"`[^`]+`|\]\([^)\s]*\)"
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ")


def pages() -> Iterator[Path]:
    """The documents, but for the history."""
    for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*/README.md"))]:
        if path.name not in ("CHANGELOG.md", "decisions.md"):
            yield path


def styled(text: str) -> str:
    """A page with the numbers of its prose and tables in one style."""
    paragraphs: list[tuple[bool, list[str]]] = []  # whether it is code, and its lines
    fenced = False
    for line in text.split("\n"):
        after_code = bool(paragraphs) and paragraphs[-1][0]
        blank = not paragraphs or not paragraphs[-1][1][-1].strip()
        code = fenced or line.startswith("```") or (line.startswith("    ") and (blank or after_code))
        fenced ^= line.startswith("```")
        if paragraphs and paragraphs[-1][0] == code and line.strip() and not blank:
            paragraphs[-1][1].append(line)
        else:
            paragraphs.append((code, [line]))
    return "\n".join("\n".join(lines) if code else _prose("\n".join(lines)) for code, lines in paragraphs)


def _prose(text: str) -> str:
    def change(found: re.Match[str]) -> str:
        return found[0] if found["kept"] else "0." if found["point"] else "%"

    new = re.sub(f"(?P<kept>{KEPT})|(?P<point>{DECIMAL})|{PERCENT}", change, text)
    if any(len(line) > WIDTH for line in text.split("\n")) or new.startswith(("|", "#", "<", "!")):
        return new  # what is not wrapped stays so
    return "\n".join(wrapped for item in _items(new.split("\n")) for wrapped in _wrapped(item))


def _items(lines: list[str]) -> Iterator[list[str]]:
    """The items of a list, or the paragraph as one."""
    item: list[str] = []
    for line in lines:
        if item and ITEM.match(line):
            yield item
            item = []
        item.append(line)
    yield item


def _wrapped(lines: list[str]) -> list[str]:
    if all(len(line) <= WIDTH for line in lines):
        return lines
    lead = ITEM.match(lines[0])
    indent = " " * (len(lead[0]) if lead else len(lines[0]) - len(lines[0].lstrip()))
    text = " ".join(line.strip() for line in lines)
    first = indent if lead is None else " " * (len(lines[0]) - len(lines[0].lstrip()))
    wrapper = textwrap.TextWrapper(WIDTH, first, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else pages():
        before = path.read_text(encoding="utf-8")
        if (after := styled(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(path)
