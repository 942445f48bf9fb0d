"""The page of a preflight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from trimtab.diagnosis.tokens import k3
from trimtab.pages.charts import CYCLE, STYLES, VERMILLION, draw, log_scale, scatter_svg
from trimtab.pages.page import STATUS_TONES, Card, Cell, Chart, Charts, Note, Page, Section, Table, Verdict
from trimtab.preflight.checklist import CHECKS, Preflight, measured_of
from trimtab.runs.atomic import write_output
from trimtab.text import short

WORDS = (
    ("sampler", "the inference engine that writes responses and reports the log-prob of each token."),
    ("trainer", "the model that is trained. Here it only scores what the sampler wrote; nothing is trained."),
    (
        "ratio",
        "probability of a token under the trainer over that under the sampler. It is 1 if both compute the same; its "
        "mean over tokens that the sampler drew is 1 in any case, unless reported log-probs are wrong.",
    ),
    (
        "k3",
        "mean of ratio - 1 - log ratio: the distance of the two policies in nats per token, never negative. About "
        "1e-13 in float32; 1e-5 to 1e-3 is published for large dense models in 16 bits, up to 1e-1 for quantized ones.",
    ),
)
CODES = "The exit code is 1 where a check fails."
PLACES = 10


def write_page(result: Preflight, path: Path, command: str) -> Path:
    """Writes the page and returns its path. Raises `TrimtabError` if it cannot be written.

    command: the command line, printed on the page.
    """
    steps, checks = [], []
    for check in result.checks:
        question = Cell(check.name, note=CHECKS[check.name].question)
        checks.append([Cell(check.status, tone=STATUS_TONES[check.status]), question, check.detail])
        steps += [(check.name, check.next_step)] if check.status == "fail" and check.next_step else []
    page = Page(
        kind="Trimtab preflight",
        title=f"Is this pair fit to train: {result.facts['model']}",
        facts=[*result.facts.items(), ("bound", f"k3 {short(result.bound)} nats per token")],
        sections=[
            Section("", [Verdict("good" if result.ok else "warn", [("verdict", result.verdict), *steps])]),
            Section("Checks", [Table(("status", "check", "what was found"), checks)]),
            Section("Size of the mismatch", [Charts(_charts(result))] if result.samples else []),
            Section("Words", [Note(text, label=word) for word, text in WORDS]),
            Section("Again, and in continuous integration", [Note(CODES), Card(code=command)]),
        ],
    )
    return write_output(path, page.html().encode())


def _charts(result: Preflight) -> list[Chart]:
    """Returns k3 by position in the response, and the probabilities of both sides."""
    return [
        Chart(
            "Mismatch along the response",
            draw("k3 by position", lambda axes: _paint_positions(axes, result), legend=True),
            [Note("It should be flat. A rise towards the end points to long contexts (attention, rotary angles).")],
        ),
        Chart(
            "Each token on both sides",
            scatter_svg(measured_of(*result.samples.values()).scatter),
            [Note("All tokens should lie on the diagonal.")],
        ),
    ]


def _paint_positions(axes: Axes, result: Preflight) -> None:
    for number, (length, one) in enumerate(result.samples.items()):
        table = one.table()
        place = PLACES * table.position // length
        sums = np.bincount(place, weights=k3(table.trainer.astype(np.float64) - table.behavior), minlength=PLACES)
        means = np.maximum(sums / np.maximum(np.bincount(place, minlength=PLACES), 1), 1e-16)
        style = {"color": CYCLE[number % 6], "linestyle": STYLES[number % 6], "marker": "o", "markersize": 3}
        axes.plot((np.arange(PLACES) + 0.5) / PLACES, means, label=f"{length} tokens", **style)
    if result.bound > 0:
        axes.axhline(result.bound, color=VERMILLION, linewidth=0.8, linestyle=":", label="bound")
    log_scale(axes)
    axes.set(xlabel="place in the response", ylabel="k3, nats per token", xlim=(0, 1))
