"""Renders a diagnosis for the terminal, as labeled lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.diagnosis.output import words
from trimtab.diagnosis.output.words import figure, format_number, format_percent
from trimtab.diagnosis.records import Cause, Diagnosis, Measured

LABEL = 10
NONE = "none stands out above the noise floor"
MISSING = 3
"""Largest number of absent columns for which the terminal explains each."""


def terminal_text(diagnosis: Diagnosis, page: Path | str | None = None, width: int | None = None) -> str:
    """Returns all lines as text; `width`: columns at which lines are wrapped, None for no wrapping."""
    return folded(rows(diagnosis, page), width)


def folded(lines: Sequence[tuple[str, str]], width: int | None) -> str:
    """Returns labeled lines as text."""
    label_width = max(LABEL, *(len(label) + 2 for label, _ in lines))
    result = []
    for label, text in lines:
        # Text from files (column names, findings) may contain control characters.
        plain = "".join(sign if sign.isprintable() else " " for sign in text)
        head = f"{label:<{label_width}}"
        result += (
            [head + plain]
            if width is None
            else textwrap.wrap(
                plain, max(width, 40), initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
            )
        )
    return "\n".join(result)


def labeled(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Returns lines of which the first has the label; an empty label continues the line above."""
    return [("" if index else label, text) for index, text in enumerate(texts)]


def rows(diagnosis: Diagnosis, page: Path | str | None = None) -> list[tuple[str, str]]:
    """Returns label and text of each line."""
    measured, origin = diagnosis.measured, diagnosis.measured.origin
    return [
        *labeled("verdict", [f"{label}: {text}" if label else text for label, text in words.verdict_lines(diagnosis)]),
        *labeled("read", [words.read_text(origin), *(finding.text for finding in origin.findings)]),
        *([("missing", _missing(origin.missing))] if origin.missing else []),
        *labeled("size", _size(measured)),
        ("ratio", words.contract(measured.size)[1]),
        ("where", words.where_text(diagnosis)),
        *([] if origin.assumes_current else [("split", words.split_text(measured))]),  # `read` says what is assumed
        *labeled("causes", [text for cause in diagnosis.causes for text in _cause(diagnosis, cause)] or [NONE]),
        *labeled("do", _advice(diagnosis)),
        *([] if page is None else [("page", str(page))]),
    ]


def _missing(columns: Mapping[str, str]) -> str:
    if len(columns) <= MISSING:
        return "; ".join(f"{column} ({cost})" for column, cost in columns.items())
    return f"{', '.join(columns)}; the page lists what each one would allow"


def _size(measured: Measured) -> list[str]:
    size = measured.size
    k1, k2, chi2, ess_token, ess_seq, pearson, ppl_ratio = (
        figure(size, key) for key in ("k1", "k2", "chi2_token", "ess_token", "ess_seq", "pearson", "ppl_ratio")
    )
    figures = (
        f"k1 {k1}, k2 {k2}, chi2 {chi2} per token; ESS {ess_token} of tokens, {ess_seq} of sequences; "
        f"Pearson {pearson}, perplexity ratio {ppl_ratio}"
    )
    masked = words.masked_text(measured.origin)
    return [words.size_text(measured), figures, *words.outside_lines(size), *([masked] if masked else [])]


def _cause(diagnosis: Diagnosis, cause: Cause) -> list[str]:
    text = f"{cause.name} (confidence {cause.confidence:.2f}): {cause.evidence} ({cause.page})"
    return [text, *(match.text for match in words.known_faults_of(diagnosis, cause))]


def _advice(diagnosis: Diagnosis) -> list[str]:
    outcome = words.recommended_outcome(diagnosis)
    texts = [f"repair {name}: {fix}" for name, fix in words.faults(diagnosis).items() if fix]
    texts.append(f"{words.advice_text(diagnosis)}: {diagnosis.recommendation.why}")
    if outcome is not None:
        texts.append(
            f"on this data it keeps {format_percent(outcome.kept)} of the tokens, changes "
            f"{format_percent(outcome.changed)} of the weights, leaves ESS {format_number(outcome.ess)}"
        )
    return texts
