"""Differences between recipes: keys and values, and an aligned comparison of their equations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from trimtab.report.groups import Group

# Symbols of an equation in display order; unknown ones come after them, notes last.
_ORDER = ("loss", "r", "ρ", "keep where", "c", "D", "A", "KL", "H")
_WORD = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?|\w+|\s+|[^\w\s]")


@dataclass(frozen=True)
class Reading:
    """One variant of a line of the equations: the names that have it, and its text in pieces.

    A piece is a text with whether it differs from some other variant.
    """

    names: tuple[str, ...]
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class EquationPart:
    """One line of the equations: its symbol, all variants, and the names without such a line."""

    symbol: str
    readings: tuple[Reading, ...]
    without: tuple[str, ...]


def differing_keys(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Returns the dotted keys whose values differ between groups, with one value per group; None for an absent key."""
    keys = dict.fromkeys(key for group in groups for key in group.config)
    values = {key: [group.config.get(key) for group in groups] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def align(equations: Mapping[str, str]) -> list[EquationPart]:
    """Returns the equations of all names aligned by symbol; equal lines appear once."""
    lines = {name: _lines(equation) for name, equation in equations.items()}
    symbols = sorted(dict.fromkeys(symbol for by_symbol in lines.values() for symbol in by_symbol), key=_order)
    return [_part(symbol, {name: by_symbol.get(symbol) for name, by_symbol in lines.items()}) for symbol in symbols]


def _lines(equation: str) -> dict[str, str]:
    """Returns the lines by symbol; a second line of one symbol, such as another mask, is numbered."""
    lines: dict[str, str] = {}
    for line in filter(None, map(str.strip, equation.splitlines())):
        # Without its index: `ρ` for `ρ_t = ...` and for `ρ = ...`.
        match = re.match(r"(keep where)|([^\W_]+)(?:_\w+)?(?= =|:)", line)
        symbol, number = (match[1] or match[2]) if match else "", 1
        while (key := symbol if number == 1 else f"{symbol} {number}") in lines:
            number += 1
        lines[key] = line
    return lines


def _order(symbol: str) -> tuple[int, str]:
    head = re.sub(r" \d+$", "", symbol)
    if head in _ORDER:
        return _ORDER.index(head), symbol
    return len(_ORDER) + (head == "note"), ""


def _part(symbol: str, lines: Mapping[str, str | None]) -> EquationPart:
    texts = list(dict.fromkeys(text for text in lines.values() if text is not None))
    words = [_WORD.findall(text) for text in texts]
    readings = tuple(
        Reading(tuple(name for name, line in lines.items() if line == text), _mark_differences(text_words, words))
        for text, text_words in zip(texts, words, strict=True)
    )
    return EquationPart(symbol, readings, tuple(name for name, line in lines.items() if line is None))


def _mark_differences(words: Sequence[str], all_words: Sequence[Sequence[str]]) -> tuple[tuple[str, bool], ...]:
    """Returns the text in pieces, each with whether some other variant of the line lacks it at this position."""
    common = [True] * len(words)
    for other in all_words:
        matched = [False] * len(words)
        for block in SequenceMatcher(None, words, other, autojunk=False).get_matching_blocks():
            matched[block.a : block.a + block.size] = [True] * block.size
        common = [before and now for before, now in zip(common, matched, strict=True)]
    pieces: list[tuple[str, bool]] = []
    for word, shared in zip(words, common, strict=True):
        if pieces and pieces[-1][1] != shared:
            pieces[-1] = (pieces[-1][0] + word, not shared)
        else:
            pieces.append((word, not shared))
    return tuple(pieces)


def equation_of(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Returns the resolved equation of a run's objective, or the reason why it cannot be built.

    The equation of an objective that is not a preset is read from the run's config.toml: a report never runs code
    named by a run. `metrics` are those of any step; calibrated bounds are logged at every step.
    """
    from trimtab.objectives.calibrate import bounds_of  # imported here: needs torch
    from trimtab.objectives.lookup import from_section
    from trimtab.objectives.presets import is_custom

    section = config.get("objective", {})
    if "equation" in section:
        return str(section["equation"])
    try:
        if is_custom(section["name"]):
            raise ValueError(f"its config.toml has no equation of {section['name']!r}")
        keys = {name: f"calibrate/{name}" for name in bounds_of(section["name"])}
        bounds = {name: float(metrics[key]) for name, key in keys.items() if key in metrics}
        return from_section(section, bounds).equation(config.get("advantage", {}).get("kind"))
    except (KeyError, ValueError) as error:
        return f"not known to this version of trimtab: {error}"
