"""Renders a diagnosis, or a comparison of two, as Markdown for an issue: sentences, a table, and versions."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence

import numpy as np

from trimtab.diagnosis.against import Comparison
from trimtab.diagnosis.output import compared, words
from trimtab.diagnosis.records import Diagnosis
from trimtab.diagnosis.tokens import TokenTable
from trimtab.pages.render import number
from trimtab.runs.metric_ranges import band_text

PACKAGES = ("trimtab", "torch", "numpy", "pyarrow")
FIGURES = {
    "k3": "k3, KL divergence per token in nats",
    "ratio_mean": "mean ratio trainer / sampler",
    "ess_token": "effective sample size, tokens",
    "ess_seq": "effective sample size, responses",
    "pearson": "Pearson r of the probabilities",
}
_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_|[]#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def markdown(diagnosis: Diagnosis, comparison: Comparison | None = None, command: str = "") -> str:
    """Returns the text to paste. command: the command line that made it, if one did."""
    if comparison is None:
        lines, table = words.opening(diagnosis), _table(diagnosis)
        method = words.method_text(diagnosis.recommendation.preset, diagnosis.recommendation.overrides)
        items = [(f"why {cause.name}", cause.evidence) for cause in diagnosis.causes[:1]]
        items += [("where", words.where_text(diagnosis.measured, diagnosis.texts)), ("correction", method)]
        items += _data(diagnosis)
    else:
        lines = compared.verdict(diagnosis, comparison)
        table = [compared.HEADS, *compared.figures(diagnosis, comparison)]
        items = [("paired", compared.paired_text(comparison))]
        for name, file, side in zip("AB", comparison.names, (diagnosis, comparison.baseline), strict=True):
            items += [(name, file)] if file else []
            items += [(f"{name}, {what}", text) for what, text in _data(side)]
    items.append(("versions", versions()))
    first, *others = map(_escaped, lines)
    listed = "\n".join(f"- {name}: {_escaped(text)}" for name, text in items)
    text = "\n\n".join([f"**{first}**", *others, _rendered(table), listed])
    # A fence longer than any inside, so that a command cannot end it.
    return f"{text}\n- command: `` {command.replace('``', '` `')} ``" if command else text


def versions() -> str:
    """Returns the versions on which the last digits of figures depend."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return f"{packages}, Python {platform.python_version()} on {platform.system()} {platform.machine()}"


def _table(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    size = diagnosis.measured.size
    rows = [("figure", "value", "95% interval", "healthy")]
    for key, name in FIGURES.items():
        form = (lambda value: words.format_digits(value, ".5f")) if key in ("ratio_mean", "pearson") else number
        interval = size.intervals.get(key)
        ends = f"{form(interval.low)} to {form(interval.high)}" if interval and words.known(interval) else "–"
        rows.append((name, form(size.mismatch[key]), ends, band_text(f"mismatch/{key}") or "–"))
    return rows


def _data(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Returns what was read, what is odd about it, and how it was sampled."""
    measured, origin = diagnosis.measured, diagnosis.measured.origin
    return [
        ("read", f"{words.read_text(origin)}; trainer's log-probs of the {origin.anchor} policy"),
        *(("remark", finding.text) for finding in origin.findings),
        ("sampling in the files", _sampling(measured.sample)),
        ("run's recipe beside the files", str(origin.settings or "none")),
    ]


def _rendered(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(map(_escaped, row))} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def _escaped(text: str) -> str:
    """Returns one line without marks of Markdown or HTML, since text may come from files."""
    return "".join(sign if sign.isprintable() else " " for sign in text).translate(_MARKS)


def _sampling(sample: TokenTable) -> str:
    """Returns the sampler's settings, each with all values that occur in the sample of the data."""
    columns = {"temperature": sample.temperature, "top_p": sample.top_p, "top_k": sample.top_k}
    known = {name: np.unique(values[np.isfinite(values)]) for name, values in columns.items() if values is not None}
    parts = [
        f"{name} {' or '.join(f'{value:g}' for value in values[:4])}" for name, values in known.items() if len(values)
    ]
    if sample.raw is not None:
        parts.append("log-probs before temperature and truncation" if sample.raw.any() else "processed log-probs")
    return ", ".join(parts) or "not in the files"
