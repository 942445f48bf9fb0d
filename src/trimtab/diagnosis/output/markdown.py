"""Renders a diagnosis, or a comparison of two, as Markdown for an issue: sentences, a table, and versions."""

from __future__ import annotations

import importlib.metadata
import platform

import numpy as np

from trimtab.diagnosis.against import Comparison
from trimtab.diagnosis.output import compared, words
from trimtab.diagnosis.records import Diagnosis
from trimtab.diagnosis.tokens import TokenTable
from trimtab.runs.metric_catalog import band_text
from trimtab.safe_text import code_span, markdown_text

PACKAGES = ("trimtab", "torch", "numpy", "pyarrow")
MAIN = 5
"""Number of figures in the table, the first of `words.FIGURES`."""


def markdown(diagnosis: Diagnosis, comparison: Comparison | None = None, command: str = "") -> str:
    """Returns the text to paste. command: the command line that made it, if one did."""
    if comparison is None:
        size = diagnosis.measured.size
        lines = [f"{label}: {text}" if label else text for label, text in words.verdict_lines(diagnosis)]
        figures = [
            (name, words.figure(size, key), words.interval_of(size, key) or "–", band_text(f"mismatch/{key}"))
            for key, (name, _) in [*words.FIGURES.items()][:MAIN]
        ]
        table = [("figure", "value", "95% interval", "healthy"), *figures]
        items = [(f"why {cause.name}", cause.evidence) for cause in diagnosis.causes[:1]]
        items += [("where", words.where_text(diagnosis)), *_data(diagnosis)]
    else:
        lines = compared.verdict_lines(diagnosis, comparison)
        table = [compared.HEADS, *compared.figures(diagnosis, comparison)]
        items = [("paired", compared.paired_text(comparison))]
        for name, file, side in zip("AB", comparison.names, (diagnosis, comparison.baseline), strict=True):
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
    """Returns what was read, what is odd about it, and how it was sampled."""
    measured, origin = diagnosis.measured, diagnosis.measured.origin
    return [
        ("read", f"{words.read_text(origin)}; trainer's log-probs of the {origin.anchor} policy"),
        *(("remark", finding.text) for finding in origin.findings),
        ("sampling in the files", _sampling(measured.sample)),
        ("run's recipe beside the files", str(origin.settings or "none")),
    ]


def _sampling(sample: TokenTable) -> str:
    """Returns the sampler's settings, each with the values that occur in the sample of the data."""
    columns = {"temperature": sample.temperature, "top_p": sample.top_p, "top_k": sample.top_k}
    known = {name: np.unique(values[np.isfinite(values)]) for name, values in columns.items() if values is not None}
    parts = [
        f"{name} {' or '.join(f'{value:g}' for value in found[:4])}" for name, found in known.items() if len(found)
    ]
    if sample.raw is not None:
        parts.append("log-probs before temperature and truncation" if sample.raw.any() else "processed log-probs")
    return ", ".join(parts) or "not in the files"
