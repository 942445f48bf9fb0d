"""Renders a diagnosis as one self-contained HTML file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trimtab.diagnosis.against import Comparison
from trimtab.diagnosis.output import compared, panels, words
from trimtab.diagnosis.output.markdown import markdown
from trimtab.diagnosis.records import Diagnosis, MismatchSize
from trimtab.pages.render import beside, number, render
from trimtab.runs.atomic import write_output
from trimtab.runs.metric_ranges import band_text, bounds, judge

# Key, name, what it says; in reading order.
FIGURES = (
    ("k3", "k3", "KL divergence of sampler and trainer per token, nats; look here first"),
    ("k1", "k1", "the same from log-ratios alone; may be negative"),
    ("k2", "k2", "half the mean squared log-ratio"),
    ("chi2_token", "χ², token", "variance of token importance weights"),
    ("chi2_seq", "χ², sequence", "variance of sequence importance weights"),
    ("ess_token", "ESS, token", "share of the tokens that count under importance weights"),
    ("ess_seq", "ESS, sequence", "share of the responses that count under importance weights"),
    ("ratio_mean", "mean ratio", "1 for correct log-probs of untruncated sampling"),
    ("ppl_ratio", "perplexity ratio", "trainer over sampler, mean over responses"),
    ("ppl_train", "perplexity", "of the trainer, mean over responses"),
    ("pearson", "Pearson r", "of the two probabilities of each token"),
    ("abs_diff_mean", "mean |log-ratio|", "nats per token"),
    ("abs_diff_max", "largest |log-ratio|", "nats"),
)
LINES = {"trimtab": "Trimtab", "verl": "verl", "trl": "TRL", "miles": "Miles"}


def write_page(diagnosis: Diagnosis, path: Path, command: str = "", comparison: Comparison | None = None) -> Path:
    """Writes the page to `path` and returns the path. Raises `TrimtabError` if it cannot be written.

    command: the command line, for a reader who was not there.
    """
    return write_output(path, page(diagnosis, command, comparison).encode())


def page(diagnosis: Diagnosis, command: str = "", comparison: Comparison | None = None) -> str:
    """Returns the HTML. All text is escaped, since it comes from files."""
    measured = diagnosis.measured
    size, origin = measured.size, measured.origin
    return render(
        "diagnose.html.j2",
        {
            "title": f"Diagnosis of {origin.tokens:,} tokens",
            "facts": _facts(diagnosis),
            "headline": words.headline(diagnosis),
            "tone": words.tone(diagnosis),
            "tiles": _tiles(size),
            "floor": size.floor_note,
            "contract": words.contract(size),
            "figures": _figures(size),
            "outside": "; ".join(filter(None, (words.outside_text(size), words.masked_text(origin)))),
            "large": panels.size_panels(measured),
            "where": words.where_text(measured, diagnosis.texts),
            "split": words.split_text(measured),
            "cuts": panels.view_panels(measured),
            "notes": [(view.name, view.note) for view in measured.views.values() if view.note and view.name != "token"],
            "tokens": panels.top_tokens(measured, diagnosis.texts),
            "causes": [(cause, words.known_lines(diagnosis, cause)) for cause in diagnosis.causes],
            "faults": words.faults(diagnosis),
            "method": words.method_text(diagnosis.recommendation.preset, diagnosis.recommendation.overrides),
            "recommendation": diagnosis.recommendation,
            "lines": [(LINES.get(name, name), text) for name, text in diagnosis.recommendation.lines.items()],
            "outcomes": _outcomes(diagnosis),
            "origin": origin,
            "read": words.read_text(origin),
            "issue": markdown(diagnosis, comparison, command),
            "against": None if comparison is None else _against(diagnosis, comparison),
        },
    )


def _against(diagnosis: Diagnosis, comparison: Comparison) -> dict[str, Any]:
    differs = comparison.differs
    return {
        "verdict": compared.verdict(diagnosis, comparison),
        "tone": "plain" if differs is None else "warn" if differs else "good",
        "names": comparison.names,
        "heads": compared.HEADS,
        "rows": compared.figures(diagnosis, comparison)[:-1],  # the first cause of each is said above the table
        "places": compared.place_rows(comparison),
        "paired": compared.paired_text(comparison),
    }


def _facts(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    origin, steps = diagnosis.measured.origin, diagnosis.measured.size.by_step
    return [
        ("format", origin.framework),
        ("files", f"{origin.files:,}"),
        ("responses", f"{origin.responses:,}"),
        ("trained tokens", f"{origin.trained:,}"),
        ("steps", f"{len(steps):,}" if steps else "not known"),
        ("dropped", f"{sum(origin.dropped.values()):,}"),
    ]


def _tiles(size: MismatchSize) -> list[dict[str, str]]:
    """Returns the four main statistics."""
    shown = {
        "k3": ("k3, per token", "distance of trainer and sampler, 0 where they agree"),
        "ratio_mean": ("Mean ratio", "trainer over sampler; 1 where log-probs are right, however large k3 is"),
        "ess_token": ("Effective sample size", "share of the tokens that still counts once each is weighted"),
        "pearson": ("Pearson r", "correlation of the two probabilities, 1 at best"),
    }
    return [
        {"name": name, "value": _value(size, key), "note": f"95%: {_interval(size, key)}", "what": what}
        for key, (name, what) in shown.items()
    ]


def _value(size: MismatchSize, key: str) -> str:
    value = size.mismatch.get(key, math.nan)
    if key in ("ratio_mean", "pearson", "ppl_ratio") and math.isfinite(value):
        return f"{value:.5f}"
    return beside(value, bounds(f"mismatch/{key}"), words.format_number if key == "k3" else number)


def _interval(size: MismatchSize, key: str) -> str:
    interval = size.intervals.get(key)
    if interval is None or not words.known(interval):
        return "no interval"
    form = "{:.5f}".format if key in ("ratio_mean", "pearson", "ppl_ratio") else number
    form = words.format_number if key == "k3" else form
    return f"{form(interval.low)} to {form(interval.high)}"


def _figures(size: MismatchSize) -> list[dict[str, str]]:
    return [
        {
            "key": key,
            "name": name,
            "what": what,
            "value": _value(size, key),
            "interval": _interval(size, key),
            "healthy": band_text(f"mismatch/{key}"),
            "tone": {"healthy": "good", "outside": "warn"}.get(judge(f"mismatch/{key}", size.mismatch[key]), ""),
        }
        for key, name, what in FIGURES
        if key in size.mismatch
    ]


def _outcomes(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Returns the rows of the table of presets, the recommended one marked; bias bars relative to the largest."""
    most = max((outcome.bias for outcome in diagnosis.outcomes if math.isfinite(outcome.bias)), default=0.0)
    best = words.chosen(diagnosis)
    return [
        {
            "preset": outcome.preset,
            "bounds": words.overrides_text(outcome.overrides) or "published",
            "calibrated": outcome.calibrated,
            "best": outcome is best,
            "note": outcome.note,
            "cells": [
                (words.format_percent(outcome.kept), _width(outcome.kept)),
                (words.format_percent(outcome.changed), _width(outcome.changed)),
                (words.format_number(outcome.ess), _width(outcome.ess)),
                (words.format_number(outcome.bias), _width(outcome.bias / most if most > 0 else 0.0)),
            ],
        }
        for outcome in diagnosis.outcomes
    ]


def _width(share: float) -> str:
    """Returns the width of a bar in percent."""
    return f"{100 * min(max(share, 0.0), 1.0):.1f}" if math.isfinite(share) else "0"
