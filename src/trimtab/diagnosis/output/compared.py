"""A comparison of two diagnoses in sentences and tables, which the terminal, Markdown, the page and JSON print."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.diagnosis.against import TAIL, Comparison, Place, beyond_chance
from trimtab.diagnosis.answer import Diagnosis
from trimtab.diagnosis.figures import figure, format_number, format_percent, with_interval
from trimtab.diagnosis.output import as_json
from trimtab.intervals import Interval

_AGREE = ("exact", "rounding")
"""Verdicts of a size without a mismatch."""
HEADS = ("", "A", "B", "A against B")


def verdict_lines(first: Diagnosis, comparison: Comparison) -> list[str]:
    """Returns whether A differs from B, by how much, the first cause of each, and what to repair first."""
    sizes = {"A": first.measured.size, "B": comparison.baseline.measured.size}
    if agree := [name for name, size in sizes.items() if size.verdict in _AGREE]:
        k3 = ", ".join(f"{figure(size, 'k3')} in {name}" for name, size in sizes.items())
        lines = [f"Trainer and sampler agree up to rounding in {' and in '.join(agree)} (k3 {k3})."]
    else:
        lines = [f"k3 in A relative to B: {_change_text(comparison.k3, 1.0, _factor)}."]
    for name, side in (("A", first), ("B", comparison.baseline)):
        lines.append(f"{name}: {side.answer.cause}.")
        lines += [f"First, in {name}: {fix}" for fix in side.answer.faults.values()][:1]
    return lines


def rows(first: Diagnosis, comparison: Comparison) -> list[tuple[str, str]]:
    """Returns label and text of each line, as `text.rows` does."""
    sides = first, comparison.baseline
    lines = [("" if index else "verdict", text) for index, text in enumerate(verdict_lines(first, comparison))]
    for name, of, side in zip("AB", comparison.names, sides, strict=True):
        lines.append((name, f"{of and f'{of}: '}{side.answer.read}"))
    changes = figures(first, comparison)[:3]
    lines += [(name, f"{one} in A, {two} in B: {change}") for name, one, two, change in changes]
    lines += [(f"by {name}", _range_text(places)) for name, places in comparison.places.items()]
    return [*lines, ("paired", paired_text(comparison))]


def figures(first: Diagnosis, comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns rows of the table of `HEADS`: each figure of A and of B, and what changed."""
    sides = first, comparison.baseline
    sizes = [side.measured.size for side in sides]
    return [
        ("k3", *(with_interval(size, "k3") for size in sizes), _change_text(comparison.k3, 1.0, _factor)),
        (
            "mean ratio",
            *(with_interval(size, "ratio_mean") for size in sizes),
            _change_text(comparison.ratio_mean, 1.0, "{:.5g}".format),
        ),
        (
            "tail",
            *(f"{format_percent(share)} of k3 in {TAIL:.0%} of the tokens" for share in comparison.tails),
            _change_text(comparison.tail, 0.0, lambda share: f"{100 * share:+.1f}".replace("-", "−"), "points"),
        ),
        ("ESS of tokens", *(figure(size, "ess_token") for size in sizes), ""),
        ("Pearson", *(figure(size, "pearson") for size in sizes), ""),
        ("first cause", *(side.answer.cause for side in sides), ""),
    ]


def place_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns k3 at each place that both sides have, as rows of the table of `HEADS`."""
    return [
        (f"k3 at {name} {place.label}", format_number(place.first), format_number(place.second), _times(place))
        for name, places in comparison.places.items()
        for place in places
    ]


def paired_text(comparison: Comparison) -> str:
    if not comparison.paired:
        return "neither prompts nor responses are known to occur in both: the intervals compare independent samples"
    what = f"the same {comparison.pairs:,} {comparison.paired}s"
    return f"{what} occur in both, and the intervals compare each with itself"


def as_dict(first: Diagnosis, comparison: Comparison) -> dict[str, Any]:
    """Returns the value of the key `against`."""
    result = {
        "verdict": verdict_lines(first, comparison),
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


def _times(place: Place) -> str:
    return f"{_factor(place.first / place.second)} times" if place.second > 0 else "–"


def _range_text(places: Sequence[Place]) -> str:
    positive = [place for place in places if place.second > 0 and place.first > 0]
    if not positive:
        return "not comparable: k3 is 0 on one side"
    ordered = sorted(positive, key=lambda place: place.first / place.second)
    least, most = ordered[0], ordered[-1]
    return f"k3 of A is between {_times(least)} that of B ({least.label}) and {_times(most)} ({most.label})"
