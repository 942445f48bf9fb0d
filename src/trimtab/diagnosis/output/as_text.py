"""Renders a diagnosis, or a comparison of two, as labeled lines for the terminal and as Markdown for an issue."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trimtab.diagnosis import against
from trimtab.diagnosis.against import DiagnosisComparison
from trimtab.diagnosis.answer import FIGURES, Answer, Diagnosis
from trimtab.diagnosis.tokens import TokenTable
from trimtab.text import code_span, fold, format_percent, markdown_text, short

MISSING = 3  # largest number of absent columns for which the terminal explains each
MAIN = 5  # number of figures in the table of Markdown, the first of `FIGURES`
PACKAGES = ("trimtab", "torch", "numpy", "pyarrow")


def terminal_text(
    diagnosis: Diagnosis,
    page: Path | str | None = None,
    width: int | None = None,
    comparison: DiagnosisComparison | None = None,
) -> str:
    """Returns all lines as text; `width`: columns at which lines are wrapped, None for no wrapping."""
    lines = terminal_rows(diagnosis) if comparison is None else against.terminal_rows(comparison)
    return fold([*lines, *([] if page is None else [("page", str(page))])], width)


def terminal_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Returns the label and text of each line; a line with an empty label continues the line above."""
    origin, answer = diagnosis.measured.origin, diagnosis.answer
    causes = [
        text
        for cause in diagnosis.causes
        for text in (
            f"{cause.name} (confidence {cause.confidence:.2f}): {cause.evidence} ({cause.page})",
            *(fault.text for fault in answer.known[cause.name]),
        )
    ]
    parts = {
        "verdict": [f"{label}: {text}" if label else text for label, text in answer.verdict],
        "read": [answer.read, *(finding.text for finding in origin.findings)],
        "missing": _missing(origin.missing),
        "size": [answer.size, *_figures(answer), *filter(None, [answer.masked])],
        "ratio": [answer.mean_ratio[1]],
        "where": [answer.where],
        "split": [] if origin.assumes_current else [answer.split],  # `read` says what is assumed
        "causes": causes or ["none stands out above the noise floor"],
        "do": _advice(diagnosis),
    }
    return [("" if index else label, text) for label, texts in parts.items() for index, text in enumerate(texts)]


def _missing(columns: Mapping[str, str]) -> list[str]:
    if len(columns) <= MISSING:
        return ["; ".join(f"{column} ({cost})" for column, cost in columns.items())] if columns else []
    return [f"{', '.join(columns)}; the page lists what each one would allow"]


def _figures(answer: Answer) -> list[str]:
    figures = (
        "k1 {k1.value}, k2 {k2.value}, chi2 {chi2_token.value} per token; ESS {ess_token.value} of tokens, "
        "{ess_seq.value} of sequences; Pearson {pearson.value}, perplexity ratio {ppl_ratio.value}"
    ).format(**answer.figures)
    items = [f"{key} {answer.figures[key].value} ({healthy})" for key, healthy in answer.outside.items()]
    if not items:
        return [figures, "every figure is within its healthy range"]
    return [figures, f"outside their healthy ranges: {', '.join(items)}"]


def _advice(diagnosis: Diagnosis) -> list[str]:
    answer = diagnosis.answer
    texts = [f"repair {name}: {fix}" for name, fix in answer.faults.items() if fix]
    texts.append(f"{answer.method}: {diagnosis.recommendation.why}")
    if (outcome := answer.outcome) is not None:
        texts.append(
            f"on this data it keeps {format_percent(outcome.kept)} of the tokens, changes "
            f"{format_percent(outcome.changed)} of the weights, leaves ESS {short(outcome.ess)}"
        )
    return texts


def markdown(diagnosis: Diagnosis, comparison: DiagnosisComparison | None = None, command: str = "") -> str:
    """Returns the text to paste into an issue. command: the command line that made it, if any."""
    if comparison is None:
        answer = diagnosis.answer
        lines = [f"{label}: {text}" if label else text for label, text in answer.verdict]
        main = [answer.figures[key] for key in [*FIGURES][:MAIN]]
        figures = [(one.name, one.value, one.interval or "–", one.healthy) for one in main]
        table = [("figure", "value", "95% interval", "healthy"), *figures]
        items = [(f"why {cause.name}", cause.evidence) for cause in diagnosis.causes[:1]]
        items += [("where", answer.where), *_data(diagnosis)]
    else:
        lines = against.verdict_lines(comparison)
        table = [against.HEADS, *against.figure_rows(comparison)]
        items = [("paired", against.paired_text(comparison))]
        for name, file, side in comparison.sides:
            items += [(name, file)] if file else []
            items += [(f"{name}, {what}", text) for what, text in _data(side)]
    first, *others = map(markdown_text, lines)
    head, *body = [f"| {' | '.join(map(markdown_text, row))} |" for row in table]
    rows = "\n".join([head, "|" + "---|" * len(table[0]), *body])
    listed = "\n".join(f"- {name}: {markdown_text(text)}" for name, text in [*items, ("versions", versions())])
    text = "\n\n".join([f"**{first}**", *others, rows, listed])
    return f"{text}\n- command: {code_span(command)}" if command else text


def versions() -> str:
    """Returns the versions on which the last digits of figures depend."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return f"{packages}, Python {platform.python_version()} on {platform.system()} {platform.machine()}"


def _data(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    measured, origin = diagnosis.measured, diagnosis.measured.origin
    return [
        ("read", f"{diagnosis.answer.read}; trainer's log-probs of the {origin.anchor} policy"),
        *(("remark", finding.text) for finding in origin.findings),
        ("sampling in the files", _sampling(measured.sample)),
        ("run's recipe beside the files", str(origin.numerics or "none")),
    ]


def _sampling(sample: TokenTable) -> str:
    """Returns the sampler's settings, each with the values that occur in the sample of the data."""
    known = {name: np.unique(values)[:4] for name, values in sample.sampling.items()}
    parts = [f"{name} {' or '.join(f'{value:g}' for value in values)}" for name, values in known.items()]
    if sample.raw is not None:
        parts.append("log-probs before temperature and truncation" if sample.raw.any() else "processed log-probs")
    return ", ".join(parts) or "not in the files"
