"""Renders a diagnosis as one self-contained HTML file: answers, then sections of notes, charts, cards and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trimtab.diagnosis.against import Comparison
from trimtab.diagnosis.output import compared, words
from trimtab.diagnosis.output.hotspots import shares
from trimtab.diagnosis.output.markdown import markdown
from trimtab.diagnosis.output.panels import Panels, size_panels, view_panels
from trimtab.diagnosis.output.words import format_number, format_percent, format_signed
from trimtab.diagnosis.records import Cause, Diagnosis
from trimtab.diagnosis.token_texts import VISIBLE_WHITESPACE
from trimtab.pages.render import render
from trimtab.runs.atomic import write_output
from trimtab.runs.metric_catalog import band_text, judge

ANSWERS = {"": "What was found", "Also": "Also found", "First": "What to do first"}
TILES = 4
MOST_TOKENS = 15
LINES = {"trimtab": "Trimtab", "verl": "verl", "trl": "TRL", "miles": "Miles"}
TONES = {"healthy": "good", "outside": "warn", "": ""}
OUTCOMES = (
    "Kept: tokens whose loss is not masked out. Changed: weights that a bound changes. ESS: share of the samples that "
    "counts. Bias: mean distance of the applied weight from the ratio; its bar is relative to the largest. Bounds "
    "marked “data” are quantiles of this data, the others are the published ones."
)


class Note(NamedTuple):
    """A paragraph. label: before the text, as a tag in the color of tone (good, warn, plain) if there is one."""

    text: str
    label: str = ""
    tone: str = ""


class Card(NamedTuple):
    """A titled box. now: a number beside the title. tag: a warning beside it. code: text to copy."""

    title: str
    notes: Sequence[Note] = ()
    now: str = ""
    tag: str = ""
    code: str = ""


class Cell(NamedTuple):
    """A cell of a table with a bar of `width` percent, or in the color of its tone."""

    text: str
    width: str = ""
    tone: str = ""


class Table(NamedTuple):
    """A table; `best` is the index of a row that stands out."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    note: str = ""
    best: int | None = None


class Section(NamedTuple):
    """A part of the page; whatever is empty is not shown."""

    title: str
    notes: Sequence[Note] = ()
    tiles: Sequence[Sequence[str | Cell]] = ()
    charts: Panels | None = None
    cards: Sequence[Card] = ()
    tables: Sequence[Table] = ()


def write_page(diagnosis: Diagnosis, path: Path, command: str = "", comparison: Comparison | None = None) -> Path:
    """Writes the page to `path` and returns the path. Raises `TrimtabError` if it cannot be written.

    command: the command line, for a reader who was not there.
    """
    return write_output(path, page(diagnosis, command, comparison).encode())


def page(diagnosis: Diagnosis, command: str = "", comparison: Comparison | None = None) -> str:
    """Returns the HTML. All text is escaped, since it comes from files."""
    origin, steps = diagnosis.measured.origin, diagnosis.measured.size.by_step
    compare = None
    if comparison is not None:
        compare = {
            "verdict": compared.verdict(diagnosis, comparison),
            "tone": {None: "plain", True: "warn", False: "good"}[comparison.differs],
            "tables": _against(diagnosis, comparison),
        }
    return render(
        "diagnose.html.j2",
        {
            "title": f"Diagnosis of {origin.tokens:,} tokens",
            "facts": {
                "format": origin.framework,
                "files": f"{origin.files:,}",
                "responses": f"{origin.responses:,}",
                "trained tokens": f"{origin.trained:,}",
                "steps": f"{len(steps):,}" if steps else "not known",
                "dropped": f"{sum(origin.dropped.values()):,}",
            },
            "answers": answers(diagnosis),
            "tone": words.tone(diagnosis),
            "against": compare,
            "sections": [_size(diagnosis), _where(diagnosis), _kind(diagnosis), _advice(diagnosis), _read(diagnosis)],
            "issue": markdown(diagnosis, comparison, command),
        },
    )


def answers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Returns what is wrong, how sure that is, what to do first, how large and where it is, and why, with labels."""
    lines = [
        *((ANSWERS[label], text) for label, text in words.verdict(diagnosis)),
        ("How large it is", words.size_text(diagnosis.measured)),
        *([("", masked)] if (masked := words.masked_text(diagnosis.measured.origin)) else []),
        ("Where it is", words.where_text(diagnosis)),
        *(("Why this answer", cause.evidence) for cause in diagnosis.causes[:1]),
    ]
    # A hyphen at which lines do not break, in 1e-3.
    return [(label, re.sub(r"(\de)-(\d)", "\\1\u2011\\2", text)) for label, text in lines]


def _size(diagnosis: Diagnosis) -> Section:
    size = diagnosis.measured.size
    rows: list[Sequence[str | Cell]] = []
    for key, (name, meaning) in words.FIGURES.items():
        if key in size.mismatch:
            tone = TONES[judge(f"mismatch/{key}", size.mismatch[key])]
            healthy = Cell(band_text(f"mismatch/{key}"), tone=tone)
            interval = words.interval_of(size, key) or "no interval"
            rows.append([name, words.figure(size, key), interval, healthy, meaning])
    tone, text = words.contract(size)
    notes = [Note(f"{text}.", "contract", tone), Note(f"{words.outside_text(size)}.", "Figures")]
    notes += [Note(f"{size.floor_note}.", "Storage")] if size.floor_note else []
    table = Table("All figures", ("figure", "value", "95% interval", "healthy", "meaning"), rows)
    return Section("How large it is", notes, rows[:TILES], size_panels(diagnosis.measured), tables=[table])


def _where(diagnosis: Diagnosis) -> Section:
    measured = diagnosis.measured
    views = [view for name, view in measured.views.items() if view.note and name != "token"]
    notes = [Note(f"{words.where_text(diagnosis)}.", "Mismatch"), Note(f"{words.split_text(measured)}.", "Drift")]
    notes += [Note(view.note, view.name) for view in views]
    charts, rows = view_panels(measured), top_tokens(diagnosis)
    if not rows:
        charts.absent.append("tokens with the largest share of k3 (the files have no token ids)")
    table = Table(
        "Tokens with the largest share of k3",
        ("token", "text", "count", "of tokens", "of k3", "k3, nats", "mean log-ratio"),
        rows,
        "One token far above its share of the text is a special or end token that both sides treat differently; a long "
        "even list is noise.",
    )
    return Section("Where it is", notes, charts=charts, tables=[table] if rows else [])


def top_tokens(diagnosis: Diagnosis) -> list[Sequence[str | Cell]]:
    """Returns the tokens with the largest share of k3; empty without ids."""
    if (view := diagnosis.measured.views.get("token")) is None:
        return []
    tokens, k3 = shares(view, diagnosis.measured.size)
    ids = view.columns.get("id", np.full(len(view.labels), -1))
    rows: list[Sequence[str | Cell]] = []
    ranked: list[int] = [index for index in np.argsort(-k3, kind="stable").tolist() if view.count[index] > 0]
    for index in ranked[:MOST_TOKENS]:
        label, text = view.labels[index].translate(VISIBLE_WHITESPACE), diagnosis.texts.get(int(ids[index]), "")
        share = _bar(format_percent(k3[index]), k3[index])
        numbers = format_number(view.k3[index]), format_signed(view.log_ratio_mean[index])
        rows.append([label, text, f"{int(view.count[index]):,}", format_percent(tokens[index]), share, *numbers])
    return rows


def _bar(text: str, share: float) -> Cell:
    return Cell(text, f"{100 * min(max(share, 0.0), 1.0):.1f}" if math.isfinite(share) else "0")


def _kind(diagnosis: Diagnosis) -> Section:
    def card(cause: Cause) -> Card:
        notes = [Note(cause.evidence), *([Note(cause.fix, "Fix")] if cause.fix else [])]
        notes += [
            Note(
                f"{match.text} ({match.fault.date})", *(("known", "warn") if match.certain else ("may apply", "plain"))
            )
            for match in words.known_lines(diagnosis, cause)
        ]
        tag = "repair this" if cause.name in words.faults(diagnosis) else ""
        return Card(cause.name, [*notes, Note(cause.page, "More")], f"confidence {cause.confidence:.2f}", tag)

    none = [] if diagnosis.causes else [Note("No cause stands out above the noise floor.")]
    return Section("What kind it is", none, cards=[card(cause) for cause in diagnosis.causes])


def _advice(diagnosis: Diagnosis) -> Section:
    wrong, recommended = words.faults(diagnosis), diagnosis.recommendation
    repair = f"Repair {' and '.join(wrong)}; " if wrong else ""
    lines = [Card(LINES.get(name, name), code=text) for name, text in recommended.lines.items()]
    most = max((outcome.bias for outcome in diagnosis.outcomes if math.isfinite(outcome.bias)), default=0.0) or 1.0
    best = words.chosen(diagnosis)
    rows: list[Sequence[str | Cell]] = []
    for outcome in diagnosis.outcomes:
        bounds = f"{words.overrides_text(outcome.overrides) or 'published'}{' (data)' if outcome.calibrated else ''}"
        effects = [_bar(format_percent(share), share) for share in (outcome.kept, outcome.changed)]
        effects += [
            _bar(format_number(value), value / top) for value, top in ((outcome.ess, 1.0), (outcome.bias, most))
        ]
        note = Cell("recommended", tone="good") if outcome is best else outcome.note
        rows.append([outcome.preset, bounds, *effects, note])
    heads = ("preset", "bounds", "kept", "changed", "ESS", "bias", "")
    marked = None if best is None else diagnosis.outcomes.index(best)
    table = Table("What each preset would do to this data", heads, rows, OUTCOMES, marked)
    summary = Card(f"{repair}{words.method_text(diagnosis)}", [Note(recommended.why)])
    return Section("What to do", cards=[summary, *lines], tables=[table] if rows else [])


def _read(diagnosis: Diagnosis) -> Section:
    origin = diagnosis.measured.origin
    notes = [
        Note(f"{words.read_text(origin)}; the trainer's log-probs are those of the {origin.anchor} policy.", "Data")
    ]
    notes += [Note(finding.text, finding.name, "plain") for finding in origin.findings]
    tables = [
        Table(title, heads, [[name, f"{value:,}" if isinstance(value, int) else value] for name, value in of.items()])
        for title, heads, of in (
            ("Responses left out", ("reason", "responses"), origin.dropped),
            ("Not finite, in trained tokens", ("column", "tokens"), origin.nonfinite),
            ("Columns that are missing", ("column", "what it would allow"), origin.missing),
        )
        if of
    ]
    return Section("What was read", notes, tables=tables)


def _against(diagnosis: Diagnosis, comparison: Comparison) -> list[Table]:
    """Returns the table of both diagnoses, and k3 at the places that both have."""
    names = f"A: {comparison.names[0]}; B: {comparison.names[1]}. " if comparison.names[0] else ""
    figures = compared.figures(diagnosis, comparison)[:-1]  # the first cause of each is said above the table
    places = compared.place_rows(comparison)
    tables = [Table("", compared.HEADS, figures, f"{names}Intervals: {compared.paired_text(comparison)}.")]
    return [*tables, Table("k3 by position, length and step", compared.HEADS, places)] if places else tables
