"""For all output: makes text that others wrote (names of files, output of models) safe to print and to show."""

from __future__ import annotations

import re

# Control characters other than newline and tab, which could rewrite a terminal; those that change the direction of the
# text after them, which could show it in another order; and halves of surrogate pairs, which cannot be encoded.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_|[]#~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def clean(text: str) -> str:
    """Returns the text with control characters escaped."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def without_credentials(text: str) -> str:
    """Returns text without user names and passwords in its addresses, each of which ends at the next white space."""
    return re.sub(r"://\S*@", "://***@", text)


def markdown_text(text: str) -> str:
    """Returns one line that Markdown shows as it is, also in the cell of a table."""
    return _one_line(text).translate(_MARKS)


def code_span(text: str, *, in_table: bool = False) -> str:
    """Returns one line as code in Markdown, between more backticks than it has in a row.

    in_table: in the cell of a table, which a | would end, in code too.
    """
    line = _one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line[:1] in ("`", " ") or line[-1:] in ("`", " ") else ""
    return f"{fence}{pad}{line.replace('|', chr(92) + '|') if in_table else line}{pad}{fence}" if line else ""


def _one_line(text: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in text)
