"""The charts of the diagnosis page with their captions."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from trimtab.diagnosis.output import diagnose_figures as figures
from trimtab.diagnosis.output.hotspots import FEWEST, shares
from trimtab.diagnosis.output.words import figure, format_number, format_percent, format_signed, range_text
from trimtab.diagnosis.records import Measured, View
from trimtab.pages import charts
from trimtab.pages.numbers import short_exponent
from trimtab.pages.page import Chart, Note

TAILS = ("ratio_q01", "ratio_q05", "ratio_q50", "ratio_q95", "ratio_q99")
VIEWS = {
    "probability": (
        *("Log-ratio by probability", "sampler probability"),
        "A band that opens to the left: rare tokens mismatch most, as with numerical noise. A median off 0 is a bias.",
    ),
    "position": (
        *("k3 by position", "position in the response"),
        "Rising bars: errors add up along the response. One high first or last bar: a prompt border or end token.",
    ),
    "length": (
        *("k3 by length of the response", "length of the response, tokens"),
        "Per token, length should not matter; more at the right means that mismatch adds up along a response.",
    ),
    "turn": (
        *("k3 around the borders of turns", "tokens from the border of a turn"),
        "A jump at 0, the first token after a border: text was tokenized again before the trainer scored it.",
    ),
    "turn-number": (
        *("k3 by turn", "turn"),
        "Growth from turn to turn: outputs of tools lead to contexts in which trainer and sampler differ more.",
    ),
    "observation": (
        *("k3 after observations", "tokens since the last observation"),
        "High bars at the left: the first tokens after the output of a tool, where the model is least certain.",
    ),
    "version": (
        *("k3 by age of the weights", "age of the weights, optimizer updates"),
        "Age 0 is numerical mismatch alone; what grows with age is staleness, and a smaller lag removes it.",
    ),
    "entropy": (
        *("Log-ratio by entropy", "entropy of the policy, nats"),
        "A median that moves away from 0 as entropy grows: temperature, or log-probs of another distribution.",
    ),
}
"""Title, axis and how to read the chart of each view."""


def _panel(title: str, now: str, svg: Markup, reading: str, result: str) -> Chart:
    """Returns one chart. now: its main number. reading: how to read it. result: what it shows for this data."""
    return Chart(title, svg, (Note(reading), Note(result, "Here")), now)


def size_panels(measured: Measured) -> tuple[list[Chart], list[str]]:
    """Returns k3 against published ranges, the scatter plot, and the curves over steps."""
    size, counts = measured.size, measured.scatter
    k3, total = figure(size, "k3"), int(counts.sum())
    row, column = np.indices(counts.shape)
    far = np.abs(row - column) > max(1, len(counts) // 20)
    off = float(counts[far].sum() / total) if total else math.nan
    shown = [
        _panel(
            *("Against published ranges", f"k3 {k3}", figures.range_svg(size)),
            "The diamond is k3, the thick line its 95% interval, the colored bands what others report.",
            f"{range_text(size)}. Rounding of the stored log-probs alone causes {format_number(size.floor)}.",
        ),
        _panel(
            *("Trainer against sampler", f"Pearson r {figure(size, 'pearson')}", charts.scatter_svg(counts)),
            "Off the dotted line trainer and sampler disagree about a token; healthy is r above 0.95.",
            f"{total:,} tokens, {format_percent(off)} of them more than 0.05 away from the line.",
        ),
    ]
    if len(size.by_step) < 2:
        why = "the files have one step" if size.by_step else "the files do not say which step a response is of"
        return shown, [f"curves over steps ({why})"]
    return [*shown, *_over_steps(measured)], []


def _over_steps(measured: Measured) -> list[Chart]:
    rows = measured.size.by_step

    def column(key: str) -> np.ndarray:
        return np.array([row.get(key, math.nan) for row in rows], dtype=np.float64)

    steps, k3, panels = column("step"), column("k3"), []
    if np.isfinite(k3).any():
        svg, highest = figures.k3_steps_svg(steps, k3, measured.size.floor), int(np.nanargmax(k3))
        part = max(len(k3) // 4, 1)
        reading = "A mismatch that grows during training comes before a collapse; a jump is a changed setting."
        first, last = (format_number(float(np.nanmedian(quarter))) for quarter in (k3[:part], k3[-part:]))
        peak = f"{format_number(k3[highest])} at step {steps[highest]:.0f}"
        result = f"Median of the first quarter {first}, of the last {last}; highest {peak}."
        now = f"{format_number(k3[0])} → {format_number(k3[-1])}"
        panels.append(_panel("k3 over steps", now, svg, reading, result))
    curves = {name: column(key) for key, name in (("ess_token", "token weights"), ("ess_seq", "sequence weights"))}
    curves = {name: values for name, values in curves.items() if np.isfinite(values).any()}
    if curves:
        reading = "Share of the data that counts under unbounded importance weights; near 0, those weights are noise."
        ends = [
            f"{name} {format_number(of[0])} at first, {format_number(of[-1])} at last" for name, of in curves.items()
        ]
        now = f"lowest {format_number(min(float(np.nanmin(values)) for values in curves.values()))}"
        svg = figures.ess_steps_svg(steps, curves)
        panels.append(_panel("ESS over steps", now, svg, reading, f"{'; '.join(ends)}."))
    tails = [column(key) for key in TAILS]
    if all(np.isfinite(values).all() for values in tails):
        low, high = tails[0], tails[-1]
        worst = int(np.argmax(high / low))
        reading = (
            "Bands that widen during training: the tail of the ratio grows, and fixed bounds reject more and more."
        )
        result = (
            f"Widest at step {steps[worst]:.0f}: 1% of the ratios below {low[worst]:.3g}, 1% above {high[worst]:.3g}."
        )
        svg = figures.tails_svg(steps, tails)
        panels.append(_panel("Ratio tails over steps", f"99%: {high[-1]:.3g}", svg, reading, result))
    return panels


def view_panels(measured: Measured) -> tuple[list[Chart], list[str]]:
    """Returns one chart for each view of the data, and one of the responses that rules would reject by length."""
    shown: list[Chart] = []
    absent: list[str] = []
    for name, (title, axis, reading) in VIEWS.items():
        view = measured.views.get(name)
        if view is None:
            absent.append(axis)
        elif len(view.labels) < 2:
            absent.append(f"{axis} (only {view.labels[0] if view.labels else 'nothing'} in this data)")
        elif view.count.sum() > 0:
            shown += [*_rejected(view), _chart(view, measured, title, axis, reading)]
    return shown, absent


def _chart(view: View, measured: Measured, title: str, axis: str, reading: str) -> Chart:
    """Returns the log-ratios of views by probability and entropy, and k3 of the others."""
    tokens, k3 = shares(view, measured.size)
    filled = (view.count > 0) & np.isfinite(view.k3)
    solid = filled & (tokens >= FEWEST)
    bins = np.flatnonzero(solid if solid.any() else filled)
    if view.edges is not None and view.name in ("probability", "entropy"):
        svg = figures.envelope_svg(view, "log-ratio, nats", axis, log=view.name == "probability")
        width = view.high - view.low
        widest = int(np.argmax(np.where(figures.thick(view), width, -np.inf)))
        now = f"widest {format_number(width[widest])} nats"
        result = (
            f"Widest at {short_exponent(view.labels[widest])} ({format_number(width[widest])} nats, "
            f"{format_percent(tokens[widest])} of the tokens, {format_percent(k3[widest])} of the mismatch); "
            f"{_ends(view, width, bins)}."
        )
    else:
        svg = figures.bins_svg(title, view.labels, view.k3, measured.size.mismatch["k3"], axis)
        best = bins[int(np.argmax(view.k3[bins]))] if len(bins) else 0
        now = f"highest {format_number(view.k3[best])}"
        result = f"k3 {_ends(view, view.k3, bins)}; highest {format_number(view.k3[best])} at {view.labels[best]}."
    return _panel(title, now, svg, reading, f"{result} Mean log-ratio {_ends(view, view.log_ratio_mean, bins)}.")


def _ends(view: View, values: np.ndarray, bins: np.ndarray) -> str:
    """Returns the values of the first and the last of the bins."""
    ends = (bins[0], bins[-1]) if len(bins) else (0, len(view.labels) - 1)
    return ", ".join(f"{format_signed(values[end])} at {view.labels[end]}" for end in ends)


def _rejected(view: View) -> list[Chart]:
    """Returns the chart of the responses that sequence rules would reject, by length; empty for other views."""
    rules = {
        name.removeprefix("rejected/"): share
        for name, share in view.columns.items()
        if name.startswith("rejected/") and (np.isfinite(share) & (view.count > 0)).any()
    }
    if not rules:
        return []
    ends = {rule: share[(view.count > 0) & np.isfinite(share)][[0, -1]] for rule, share in rules.items()}
    worst = max(ends, key=lambda rule: abs(ends[rule][1] - ends[rule][0]))
    shortest, longest = map(format_percent, ends[worst])
    reading = "A line that climbs to the right: the rule rejects long responses because they are long (length bias)."
    result = f"{worst} rejects {shortest} of the shortest responses and {longest} of the longest."
    return [_panel("Rejected by length", "", figures.rejected_svg(view, rules), reading, result)]
