"""Overrides as text: `section.key=value`, and several of them in one word of a command line."""

from __future__ import annotations

import re
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.files import parse_toml

_SHORT_NUMBER = re.compile(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?")
"""A number as Python writes it and TOML does not."""


def parse_override(override: str) -> tuple[str, Any]:
    """Returns the dotted key and the value of `section.key=value`.

    A value that is no TOML is text, so that names need no quotes, but for numbers such as `.1`.
    """
    key, equals, raw = override.partition("=")
    if not equals or not key.strip():
        raise TrimtabError(f"--set {override!r}: write it as section.key=value")
    try:
        value = parse_toml(f"value = {raw}")["value"]
    except ValueError:
        value = float(raw) if _SHORT_NUMBER.fullmatch(raw) else raw
    if value == raw and raw[:1] in ("'", '"'):
        raise TrimtabError(
            f"{override}: the value is not a TOML string; between single quotes everything stands for itself, between "
            'double quotes a backslash is written \\\\ and a quote \\"'
        )
    return key.strip(), value


def split_overrides(text: str, where: str) -> list[str]:
    """Splits `a=1,b=[2,3]` into `a=1` and `b=[2,3]`: commas inside brackets or quotes belong to the value.

    Raises `TrimtabError`, which begins with `where`, for a bracket or quote without partner and a part without `=`.
    """
    parts, depth, quote, escaped = [""], 0, "", False
    for character in text:
        if escaped:
            escaped = False
        elif quote:
            escaped = (quote, character) == ('"', "\\")
            quote = "" if character == quote else quote
        elif character in "\"'" and parts[-1].endswith("="):
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if quote or depth:
        what = f"the quote {quote}" if quote else "a bracket"
        raise TrimtabError(
            f"{where}: {what} in {parts[-1]!r} has no partner; put a value with brackets in single quotes"
        )
    options = [part for part in parts if part]
    bad = next((part for part in options if "=" not in part), None)
    if bad is not None:
        raise TrimtabError(f"{where}: {bad!r} is not KEY=VALUE; put a value that holds a comma in quotes")
    return options
