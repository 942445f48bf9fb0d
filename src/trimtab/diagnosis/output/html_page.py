"""Renders a diagnosis as one self-contained HTML file: the verdict, then sections of notes, charts and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trimtab.diagnosis import against
from trimtab.diagnosis.against import DiagnosisComparison
from trimtab.diagnosis.answer import FIGURES, Diagnosis, overrides_text
from trimtab.diagnosis.measure.views import shares
from trimtab.diagnosis.output.as_text import markdown
from trimtab.diagnosis.output.panels import size_panels, view_panels
from trimtab.diagnosis.records import Cause, read_table
from trimtab.pages.page import Card, Cell, Charts, Note, Page, Part, Section, Table, Tiles, Verdict, findings_table
from trimtab.runs.atomic import write_output
from trimtab.text import format_percent, format_signed, short

ANSWERS = {"": "What was found", "Also": "Also found", "First": "What to do first"}
TILES = 4
MOST_TOKENS = 15
LINES = {"trimtab": "Trimtab", "verl": "verl", "trl": "TRL", "miles": "Miles"}
TONES = {"healthy": "good", "outside": "warn", "": ""}
NOTES = read_table("texts.toml")["page"]


def write_page(
    diagnosis: Diagnosis, path: Path, command: str = "", comparison: DiagnosisComparison | None = None
) -> Path:
    """Writes the page, which shows `command`, and returns its path. Raises `TrimtabError` if it cannot be written."""
    return write_output(path, page(diagnosis, command, comparison).encode())


def page(diagnosis: Diagnosis, command: str = "", comparison: DiagnosisComparison | None = None) -> str:
    """Returns the HTML. All text is escaped, since it comes from files."""
    origin, steps = diagnosis.measured.origin, diagnosis.measured.size.by_step
    compared = [] if comparison is None else [Section("", _against(comparison))]
    sections = (_size(diagnosis), _where(diagnosis), _kind(diagnosis), _advice(diagnosis), _read(diagnosis))
    numbered = [Section(f"{index}. {part.title}", part.parts) for index, part in enumerate(sections, start=1)]
    return Page(
        kind="Trimtab diagnosis",
        title=f"Diagnosis of {origin.tokens:,} tokens",
        facts=[
            ("format", origin.framework),
            ("files", f"{origin.files:,}"),
            ("responses", f"{origin.responses:,}"),
            ("trained tokens", f"{origin.trained:,}"),
            ("steps", f"{len(steps):,}" if steps else "not known"),
            ("dropped", f"{sum(origin.dropped.values()):,}"),
        ],
        sections=[
            *compared,
            Section("", [Verdict(diagnosis.answer.severity, answers(diagnosis)), *_candidates(diagnosis)]),
            *numbered,
            Section("For an issue", [Note(NOTES["issue"]), Card(code=markdown(diagnosis, comparison, command))]),
        ],
    ).html()


def answers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Returns labels and texts: what is wrong, how certain, what to do first, how large and where it is, and why."""
    answer = diagnosis.answer
    lines = [
        *((ANSWERS[label], text) for label, text in answer.verdict if label in ANSWERS),
        ("How large it is", answer.size),
        *([("", answer.masked)] if answer.masked else []),
        ("Where it is", answer.where),
        *(("Why this answer", cause.evidence) for cause in diagnosis.causes[:1]),
    ]
    # A hyphen without a line break, in 1e-3.
    return [(label, re.sub(r"(\de)-(\d)", "\\1\u2011\\2", text)) for label, text in lines]


def _candidates(diagnosis: Diagnosis) -> list[Part]:
    cards: list[Part] = []
    for place, family in enumerate(diagnosis.answer.families, start=1):
        notes = []
        for one in family.likely:
            lines = (("", one.plain), ("For it", one.speaks_for), ("Against it", one.speaks_against))
            notes += [Note(f"{text}.", name or one.name * (len(family.likely) > 1)) for name, text in lines if text]
        names = " or ".join(one.name for one in family.likely)
        cards.append(Card(f"Candidate {place}: {names}", [*notes, Note(f"{family.test}.", "Test")]))
    return cards


def _size(diagnosis: Diagnosis) -> Section:
    size, beyond = diagnosis.measured.size, diagnosis.answer.outside
    rows: list[tuple[Cell, str, str, Cell]] = []
    for key in dict.fromkeys((*FIGURES, *beyond)):
        if (one := diagnosis.answer.figures.get(key)) is not None:
            healthy = Cell(one.healthy, tone=TONES[one.judged])
            rows.append((Cell(one.name, note=one.meaning), one.value, one.interval or "no interval", healthy))
    marked = f"{len(beyond)} are outside their healthy ranges, marked in the table" if beyond else "all are healthy"
    tone, text = diagnosis.answer.mean_ratio
    parts: list[Part] = [
        Tiles([(cell.text, value, f"95%: {interval}; {cell.note}") for cell, value, interval, _ in rows[:TILES]]),
        Note(f"{text}.", "Mean ratio", tone),
        Note(f"{marked}.", "Figures"),
        *([Note(f"{size.floor_note}.", "Storage")] if size.floor_note else []),
        Charts(*size_panels(diagnosis.measured)),
        Table(("figure", "value", "95% interval", "healthy"), rows, "All figures"),
    ]
    return Section("How large it is", parts)


def _where(diagnosis: Diagnosis) -> Section:
    measured = diagnosis.measured
    views = [view for name, view in measured.views.items() if view.note and name != "token"]
    shown, absent = view_panels(measured)
    tokens = top_tokens(diagnosis)
    if not tokens:
        absent.append("tokens with the largest share of k3 (the files have no token ids)")
    table = Table(
        ("token", "text", "count", "of tokens", "of k3", "k3, nats", "mean log-ratio"),
        tokens,
        "Tokens with the largest share of k3",
        NOTES["tokens"],
    )
    parts: list[Part] = [
        Note(f"{diagnosis.answer.where}.", "Mismatch"),
        Note(f"{diagnosis.answer.split}.", "Drift"),
        *(Note(view.note, view.name) for view in views),
        Charts(shown, absent),
        *([table] if tokens else []),
    ]
    return Section("Where it is", parts)


def top_tokens(diagnosis: Diagnosis) -> list[Sequence[str | Cell]]:
    """Returns the tokens with the largest share of k3; empty without ids."""
    if (view := diagnosis.measured.views.get("token")) is None:
        return []
    tokens, k3 = shares(view, diagnosis.measured.size)
    ids = view.columns.get("id", np.full(len(view.labels), -1))
    ranked: list[int] = [index for index in np.argsort(-k3, kind="stable").tolist() if view.count[index] > 0]
    return [
        (
            view.labels[index],
            diagnosis.texts.get(int(ids[index]), ""),
            f"{int(view.count[index]):,}",
            format_percent(tokens[index]),
            _bar(k3[index]),
            short(view.k3[index]),
            format_signed(view.log_ratio_mean[index]),
        )
        for index in ranked[:MOST_TOKENS]
    ]


def _bar(value: float, form: Callable[[float], str] = format_percent, most: float = 1.0) -> Cell:
    """Returns a number with a bar, which is full where the number is `most`."""
    return Cell(form(value), share=min(max(value / most, 0.0), 1.0) if math.isfinite(value) else 0.0)


def _kind(diagnosis: Diagnosis) -> Section:
    def card(cause: Cause) -> Card:
        known = [
            Note(f"{fault.text} ({fault.date})", *(("known", "warn") if fault.certain else ("may apply", "plain")))
            for fault in diagnosis.answer.known[cause.name]
        ]
        fix = [Note(cause.fix, "Fix")] if cause.fix else []
        tag = "repair this" if cause.name in diagnosis.answer.faults else ""
        notes = [Note(cause.evidence), *fix, *known, Note(cause.page, "More")]
        return Card(cause.name, notes, f"confidence {cause.confidence:.2f}", tag)

    cards = [card(cause) for cause in diagnosis.causes]
    return Section("What kind it is", cards or [Note("No cause stands out above the noise floor.")])


def _advice(diagnosis: Diagnosis) -> Section:
    wrong, recommended = diagnosis.answer.faults, diagnosis.recommendation
    repair = f"Repair {' and '.join(wrong)}; " if wrong else ""
    most = max((outcome.bias for outcome in diagnosis.outcomes if math.isfinite(outcome.bias)), default=0.0) or 1.0
    best = diagnosis.answer.outcome
    rows = [
        (
            outcome.preset,
            f"{overrides_text(outcome.overrides) or 'published'}{' (data)' if outcome.calibrated else ''}",
            _bar(outcome.kept),
            _bar(outcome.changed),
            _bar(outcome.ess, short),
            _bar(outcome.bias, short, most),
            Cell("recommended", tone="good") if outcome is best else outcome.note,
        )
        for outcome in diagnosis.outcomes
    ]
    table = Table(
        ("preset", "bounds", "kept", "changed", "ESS", "bias", ""),
        rows,
        "What each preset would do to this data",
        NOTES["outcomes"],
        best=None if best is None else diagnosis.outcomes.index(best),
    )
    parts: list[Part] = [
        Card(f"{repair}{diagnosis.answer.method}", [Note(recommended.why)]),
        *(Card(LINES.get(name, name), code=text) for name, text in recommended.lines.items()),
        *([table] if rows else []),
    ]
    return Section("What to do", parts)


def _read(diagnosis: Diagnosis) -> Section:
    origin = diagnosis.measured.origin
    tables = [
        Table(heads, [[name, f"{value:,}" if isinstance(value, int) else value] for name, value in of.items()], title)
        for title, heads, of in (
            ("Responses left out", ("reason", "responses"), origin.dropped),
            ("Not finite, in trained tokens", ("column", "tokens"), origin.nonfinite),
            ("Columns that are missing", ("column", "what it would allow"), origin.missing),
        )
        if of
    ]
    data = f"{diagnosis.answer.read}; the trainer's log-probs are those of the {origin.anchor} policy."
    findings = [findings_table(origin.findings)] if origin.findings else []
    return Section("What was read", [Note(data, "Data"), *findings, *tables])


def _against(comparison: DiagnosisComparison) -> list[Part]:
    names = f"A: {comparison.names[0]}; B: {comparison.names[1]}. " if comparison.names[0] else ""
    note = f"{names}Intervals: {against.paired_text(comparison)}."
    figures = against.figure_rows(comparison)[:-1]  # the first cause of each is in the verdict
    return [
        Verdict(
            {None: "plain", True: "warn", False: "good"}[comparison.differs],
            [("", line) for line in against.verdict_lines(comparison)],
        ),
        Table(against.HEADS, figures, note=note),
        Note("All that follows is about A."),
    ]
