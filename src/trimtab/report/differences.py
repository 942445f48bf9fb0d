"""Differences between recipes: keys, values, and the parts of their equations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from trimtab.report.groups import Group

# The parts of an equation in the order they are read; what no one knows comes after, the notes last.
_ORDER = ("loss", "r", "ρ", "keep where", "c", "D", "A", "KL", "H")
_WORD = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?|\w+|\s+|[^\w\s]")


@dataclass(frozen=True)
class Reading:
    """One form of a part of the equation: who has it, and its text in pieces, each with whether others lack it."""

    names: tuple[str, ...]
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Part:
    """One line of the equations: its symbol, every form it takes, and who has no such line."""

    symbol: str
    readings: tuple[Reading, ...]
    without: tuple[str, ...]


def differing_keys(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Dotted keys whose values are not equal in all groups, each with one value for each group; None: absent."""
    keys = dict.fromkeys(key for group in groups for key in group.config)
    values = {key: [group.config.get(key) for group in groups] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def align(equations: Mapping[str, str]) -> list[Part]:
    """The equations of all names, line by line: lines that mean the same thing together, equal ones once."""
    lines = {name: _lines(equation) for name, equation in equations.items()}
    symbols = sorted(dict.fromkeys(symbol for found in lines.values() for symbol in found), key=_place)
    return [_part(symbol, {name: found.get(symbol) for name, found in lines.items()}) for symbol in symbols]


def _lines(equation: str) -> dict[str, str]:
    """Lines by symbol; a second line of one symbol, such as another mask, is numbered."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, equation.splitlines())):
        symbol, number = _symbol(line), 1
        while (key := symbol if number == 1 else f"{symbol} {number}") in found:
            number += 1
        found[key] = line
    return found


def _symbol(line: str) -> str:
    """`ρ` of `ρ_t = ...` and of `ρ = ...`: what is compared is the role, its level is part of the text."""
    match = re.match(r"(keep where)|([^\W_]+)(?:_\w+)?(?= =|:)", line)
    return (match[1] or match[2]) if match else ""


def _place(symbol: str) -> tuple[int, str]:
    head = re.sub(r" \d+$", "", symbol)
    if head in _ORDER:
        return _ORDER.index(head), symbol
    return len(_ORDER) + (head == "note"), ""


def _part(symbol: str, lines: Mapping[str, str | None]) -> Part:
    texts = list(dict.fromkeys(text for text in lines.values() if text is not None))
    words = [_WORD.findall(text) for text in texts]
    readings = tuple(
        Reading(tuple(name for name, line in lines.items() if line == text), _marked(own, words))
        for text, own in zip(texts, words, strict=True)
    )
    return Part(symbol, readings, tuple(name for name, line in lines.items() if line is None))


def _marked(own: Sequence[str], all_words: Sequence[Sequence[str]]) -> tuple[tuple[str, bool], ...]:
    """The text in pieces; True for one that some other form of the line does not have in this place."""
    common = [True] * len(own)
    for other in all_words:
        matched = [False] * len(own)
        for block in SequenceMatcher(None, own, other, autojunk=False).get_matching_blocks():
            matched[block.a : block.a + block.size] = [True] * block.size
        common = [one and two for one, two in zip(common, matched, strict=True)]
    pieces: list[tuple[str, bool]] = []
    for word, shared in zip(own, common, strict=True):
        if pieces and pieces[-1][1] != shared:
            pieces[-1] = (pieces[-1][0] + word, not shared)
        else:
            pieces.append((word, not shared))
    return tuple(pieces)


def equation_of(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """The resolved equation of a run's objective, or in its place why this installation cannot say it.

    An objective that is no preset has its equation in the run's config.toml: a report runs no code that a run names.

    `metrics`: those of any step; a run that calibrated its bounds logs them with every one.
    """
    from trimtab.objectives.calibrate import bounds_of, from_section  # the only part of a report that needs torch
    from trimtab.objectives.lookup import is_own

    section = config.get("objective", {})
    if "equation" in section:
        return str(section["equation"])
    try:
        if is_own(section["name"]):
            raise ValueError(f"its config.toml has no equation of {section['name']!r}")
        keys = {name: f"calibrate/{name}" for name in bounds_of(section["name"])}
        bounds = {name: float(metrics[key]) for name, key in keys.items() if key in metrics}
        return from_section(section, bounds).equation()
    except (KeyError, ValueError) as error:
        return f"not known to this version of trimtab: {error}"
