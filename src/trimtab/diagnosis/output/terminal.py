"""Renders a diagnosis for the terminal, as about ten labeled lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.diagnosis.output.words import (
    chosen,
    contract,
    effect_text,
    faults,
    format_digits,
    format_number,
    format_with_interval,
    known_lines,
    masked_text,
    method_text,
    opening,
    outside_text,
    read_text,
    size_text,
    split_text,
    where_text,
)
from trimtab.diagnosis.records import Diagnosis
from trimtab.pages.render import number

LABEL = 10
MISSING = 3
"""Largest number of absent columns for which the verdict explains each."""


def verdict(diagnosis: Diagnosis, page: Path | str | None = None, width: int | None = None) -> str:
    """Returns the whole verdict; `width`: columns at which lines are wrapped, None for no wrapping."""
    return folded(rows(diagnosis, page), width)


def folded(lines: Sequence[tuple[str, str]], width: int | None) -> str:
    """Returns labeled lines as text."""
    label_width = max(LABEL, *(len(label) + 2 for label, _ in lines))
    return "\n".join(line for label, text in lines for line in _folded(f"{label:<{label_width}}", text, width))


def rows(diagnosis: Diagnosis, page: Path | str | None = None) -> list[tuple[str, str]]:
    """Returns label and text of each line; an empty label continues the line above."""
    measured, origin = diagnosis.measured, diagnosis.measured.origin
    lines = [("verdict" if index == 0 else "", line) for index, line in enumerate(opening(diagnosis))]
    lines.append(("read", read_text(origin)))
    lines += [("", finding.text) for finding in origin.findings]
    if origin.missing:
        lines.append(("missing", _missing(origin.missing)))
    lines += _size(diagnosis)
    check = contract(measured.size)
    lines.append(("contract", check.text))
    lines.append(("where", where_text(measured, diagnosis.texts)))
    if split := split_text(measured):
        lines.append(("split", split))
    lines += _causes(diagnosis)
    lines += _advice(diagnosis)
    if page is not None:
        lines.append(("page", str(page)))
    return lines


def _missing(columns: Mapping[str, str]) -> str:
    """Lists the absent columns, up to `MISSING` with the analysis that each would allow."""
    if len(columns) <= MISSING:
        return "; ".join(f"{column} ({cost})" for column, cost in columns.items())
    return f"{', '.join(columns)}; the page says what each costs"


def _size(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    size = diagnosis.measured.size
    values = size.mismatch
    k1, k2, chi2, floor = map(format_number, (values["k1"], values["k2"], values["chi2_token"], size.floor))
    figures = (
        f"k1 {k1}, k2 {k2}, chi2 {chi2} per token; "
        f"ESS {number(values['ess_token'])} of tokens, {number(values['ess_seq'])} of sequences; "
        f"Pearson {format_digits(values['pearson'], '.5f')}, "
        f"perplexity ratio {format_digits(values['ppl_ratio'], '.5g')}"
    )
    k3 = format_with_interval(size, "k3")
    return [
        ("size", f"k3 {k3} nats per token: {size_text(size)}; rounding alone makes {floor}"),
        ("", figures),
        ("", outside_text(size)),
        *([("", masked)] if (masked := masked_text(diagnosis.measured.origin)) else ()),
    ]


def _causes(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    if not diagnosis.causes:
        return [("causes", "none stands out above the noise floor")]
    named = []
    for cause in diagnosis.causes:
        named.append(f"{cause.name} (confidence {cause.confidence:.2f}): {cause.evidence} ({cause.page})")
        named += [match.text for match in known_lines(diagnosis, cause)]
    return [("causes" if index == 0 else "", text) for index, text in enumerate(named)]


def _advice(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    recommended, texts = diagnosis.recommendation, []
    for cause in diagnosis.causes:
        if cause.name in faults(diagnosis) and cause.fix:
            texts.append(f"first repair {cause.name}: {cause.fix}")
    texts.append(f"{method_text(recommended.preset, recommended.overrides)}: {recommended.why}")
    outcome = chosen(diagnosis)
    if outcome is not None:
        texts.append(f"on this data it {effect_text(outcome)}")
    return [("do" if index == 0 else "", text) for index, text in enumerate(texts)]


def _folded(head: str, text: str, width: int | None) -> list[str]:
    # Text from files (column names, findings) may contain control characters.
    plain = "".join(sign if sign.isprintable() else " " for sign in text)
    if width is None:
        return [head + plain]
    return textwrap.wrap(
        plain, max(width, 40), initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )
