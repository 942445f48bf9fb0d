"""Renders a comparison of two diagnoses: lines for the terminal, a table for pages and Markdown, and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.diagnosis.against import TAIL, Comparison, Place, beyond_chance
from trimtab.diagnosis.output import as_json
from trimtab.diagnosis.output.words import (
    PLAIN,
    certainty,
    faults,
    format_digits,
    format_number,
    format_percent,
    format_with_interval,
    known,
    read_text,
)
from trimtab.diagnosis.records import Diagnosis, MismatchSize
from trimtab.intervals import Interval

_AGREE = ("exact", "rounding")
"""Verdicts of a size that is no mismatch."""
HEADS = ("", "A", "B", "A against B")
_PAIRED = {
    "response": "the same {n:,} responses occur in both, and the intervals compare each with itself",
    "prompt": "the same {n:,} prompts occur in both, and the intervals compare each with itself",
    "": "neither prompts nor responses are known to occur in both: the intervals compare independent samples",
}


def verdict(first: Diagnosis, comparison: Comparison) -> list[str]:
    """Returns whether A differs from B, by how much, and the first cause of each, in sentences."""
    sides = first, comparison.baseline
    causes = [_cause(side) for side in sides]
    if causes[0] == causes[1]:
        second = f"Both have the same first cause: {causes[0]}."
    else:
        second = f"First cause in A: {causes[0]}; in B: {causes[1]}."
    lines = [_size_sentence(first, comparison), second]
    fixes = [next((cause.fix for cause in side.causes if cause.name in faults(side)), "") for side in sides]
    if fixes[0] == fixes[1]:
        return [*lines, f"First, in both: {fixes[0]}"] if fixes[0] else lines
    return lines + [f"First, in {name}: {fix}" for name, fix in zip("AB", fixes, strict=True) if fix]


def rows(first: Diagnosis, comparison: Comparison, page: Path | str | None = None) -> list[tuple[str, str]]:
    """Returns label and text of each line, as `terminal.rows` does."""
    sides = first, comparison.baseline
    lines = [("verdict" if not index else "", line) for index, line in enumerate(verdict(first, comparison))]
    for name, of, side in zip("AB", comparison.names, sides, strict=True):
        lines.append((name, f"{of and f'{of}: '}{read_text(side.measured.origin)}"))
    changes = figures(first, comparison)[:3]
    lines += [(name, f"{one} in A, {two} in B: {change}") for name, one, two, change in changes]
    lines += [(f"by {name}", _range_text(places)) for name, places in comparison.places.items()]
    lines.append(("paired", paired_text(comparison)))
    return lines if page is None else [*lines, ("page", str(page))]


def figures(first: Diagnosis, comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns rows of the table of `HEADS`: each figure of A and of B, and what changed."""
    sizes = first.measured.size, comparison.baseline.measured.size
    causes = first, comparison.baseline
    return [
        ("k3", *(format_with_interval(size, "k3") for size in sizes), _change_text(comparison.k3, 1.0, _factor)),
        ("mean ratio", *map(_mean_text, sizes), _change_text(comparison.ratio_mean, 1.0, "{:.5g}".format)),
        (
            "tail",
            *(f"{format_percent(share)} of k3 in {TAIL:.0%} of the tokens" for share in comparison.tails),
            _change_text(comparison.tail, 0.0, _points, "points"),
        ),
        ("ESS of tokens", *(_four(size, "ess_token") for size in sizes), ""),
        ("Pearson", *(_four(size, "pearson") for size in sizes), ""),
        ("first cause", *map(_cause, causes), ""),
    ]


def place_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns k3 at each place that both sides have, as rows of the table of `HEADS`."""
    return [
        (f"k3 at {name} {place.label}", format_number(place.first), format_number(place.second), _times(place))
        for name, places in comparison.places.items()
        for place in places
    ]


def paired_text(comparison: Comparison) -> str:
    return _PAIRED[comparison.paired].format(n=comparison.pairs)


def as_dict(first: Diagnosis, comparison: Comparison) -> dict[str, Any]:
    """Returns the value of the key `against`."""
    result = {
        "verdict": verdict(first, comparison),
        "changes": {
            name: change._asdict() | {"beyond_chance": beyond_chance(change, equal)}
            for name, change, equal in (
                ("k3", comparison.k3, 1.0),
                ("ratio_mean", comparison.ratio_mean, 1.0),
                ("tail", comparison.tail, 0.0),
            )
        },
        "tails": list(comparison.tails),
        "paired": {"by": comparison.paired, "count": comparison.pairs},
        "places": {
            name: [{"label": place.label, "a": place.first, "b": place.second} for place in places]
            for name, places in comparison.places.items()
        },
        "diagnosis": as_json.as_dict(comparison.baseline),
    }
    return as_json.plain(result)


def _change_text(change: Interval, equal: float, form: Callable[[float], str], unit: str = "times") -> str:
    """Returns a change with its interval, and whether it is more than chance; `equal` is the value of no change."""
    if not math.isfinite(change.value):
        return "not defined"
    text, chance = f"{form(change.value)} {unit}", beyond_chance(change, equal)
    if chance is None:
        return f"{text}; too few responses for an interval"
    sure = "more than chance" if chance else "within chance"
    return f"{text} ({form(change.low)} to {form(change.high)}), {sure}"


def _factor(value: float) -> str:
    """Formats a factor: 0.46, 2.2, 74, 270; very small and very large ones as powers of ten."""
    return f"{value:,.0f}" if 10 <= value < 1e5 else format_number(value)


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def _size_sentence(first: Diagnosis, comparison: Comparison) -> str:
    sizes = [side.measured.size for side in (first, comparison.baseline)]
    agree = [size.verdict in _AGREE for size in sizes]
    if all(agree):
        return "Trainer and sampler agree up to rounding in A and in B."
    if any(agree):
        one, other = "AB" if agree[0] else "BA"
        k3 = ", ".join(
            f"{format_number(size.mismatch['k3'])} in {name}" for name, size in zip("AB", sizes, strict=True)
        )
        return f"Trainer and sampler agree up to rounding in {one} and not in {other} (k3 {k3})."
    change, size = comparison.k3, f"{_factor(comparison.k3.value)} times as large in A as in B"
    interval = f"95% interval {_factor(change.low)} to {_factor(change.high)} times"
    if comparison.differs is None:
        return f"The mismatch of trainer and sampler is {size}; too few responses to say whether that is chance."
    if comparison.differs:
        return f"The mismatch of trainer and sampler is {size}, which is more than chance ({interval})."
    return f"No difference beyond chance: the mismatch of trainer and sampler is {size} ({interval})."


def _cause(diagnosis: Diagnosis) -> str:
    if not diagnosis.causes:
        return "none above the noise floor"
    first = diagnosis.causes[0]
    text = PLAIN[first.name]
    return f"{text[0].lower()}{text[1:]} ({first.name}, {certainty(first)})"


def _mean_text(size: MismatchSize) -> str:
    mean, interval = size.mismatch["ratio_mean"], size.intervals.get("ratio_mean")
    ends = f" ({interval.low:.5g} to {interval.high:.5g})" if interval is not None and known(interval) else ""
    return f"{format_digits(mean, '.5g')}{ends}"


def _four(size: MismatchSize, key: str) -> str:
    return format_digits(size.mismatch[key], ".4g")


def _times(place: Place) -> str:
    return f"{_factor(place.first / place.second)} times" if place.second > 0 else "–"


def _range_text(places: Sequence[Place]) -> str:
    positive = [place for place in places if place.second > 0 and place.first > 0]
    if not positive:
        return "not comparable: k3 is 0 on one side"
    ordered = sorted(positive, key=lambda place: place.first / place.second)
    least, most = ordered[0], ordered[-1]
    return f"k3 of A is between {_times(least)} that of B ({least.label}) and {_times(most)} ({most.label})"
