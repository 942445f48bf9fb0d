"""The figures of the diagnosis page with their captions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from trimtab.diagnosis.output import diagnose_figures as figures
from trimtab.diagnosis.output.hotspots import FEWEST, shares
from trimtab.diagnosis.output.words import format_number, format_percent, size_text
from trimtab.diagnosis.records import Measured, View
from trimtab.diagnosis.token_texts import VISIBLE_WHITESPACE
from trimtab.pages import charts
from trimtab.pages.render import number, short_exponent

TAILS = ("ratio_q01", "ratio_q05", "ratio_q50", "ratio_q95", "ratio_q99")


@dataclass(frozen=True)
class Panel:
    """One figure of the template. reading: how to read it. result: what it shows for this data."""

    title: str
    now: str
    svg: Markup
    reading: str
    result: str


@dataclass(frozen=True)
class Panels:
    """The figures of a section, and short descriptions of those that the data does not allow."""

    shown: list[Panel]
    absent: list[str]


def size_panels(measured: Measured) -> Panels:
    """Returns the scatter plot and the curves over steps."""
    rows = measured.size.by_step
    shown = [_range(measured), _scatter(measured)]
    if len(rows) < 2:
        why = "the files hold one step" if rows else "the files do not say which step a response is of"
        return Panels(shown, [f"curves over steps ({why})"])
    return Panels([*shown, *_over_steps(measured)], [])


def number_at(values: np.ndarray, index: int) -> str:
    return format_number(float(values[index]))


def share_at(values: np.ndarray, index: int) -> str:
    return format_percent(float(values[index]))


def signed_at(values: np.ndarray, index: int) -> str:
    text = number_at(values, index)
    return f"+{text}" if values[index] > 0 else text.replace("-", "−", 1) if values[index] < 0 else text


def panel(title: str, now: str, svg: str, reading: str, result: str) -> Panel:
    return Panel(title, now, Markup(svg), reading, result)


def _range(measured: Measured) -> Panel:
    size = measured.size
    reading = "The diamond is k3, the thick line its 95% interval, the colored bands what others report."
    result = f"{size_text(size)}. Rounding of the stored log-probs alone makes {format_number(size.floor)}."
    return panel(
        "Against published ranges",
        f"k3 {format_number(size.mismatch['k3'])}",
        figures.range_svg(size),
        reading,
        result,
    )


def _scatter(measured: Measured) -> Panel:
    counts, r = measured.scatter, measured.size.mismatch.get("pearson", math.nan)
    total = int(counts.sum())
    bins = len(counts)
    row, column = np.indices(counts.shape)
    off = float(counts[np.abs(row - column) > max(1, bins // 20)].sum() / total) if total else math.nan
    now = f"r = {r:.5f}" if math.isfinite(r) else "r not defined"
    reading = "Off the dotted line trainer and sampler disagree about a token; healthy is r above 0.95."
    result = f"{total:,} tokens, {format_percent(off)} of them more than 0.05 away from the line."
    return panel("Trainer against sampler", now, charts.scatter_svg(counts), reading, result)


def _over_steps(measured: Measured) -> list[Panel]:
    rows, floor = measured.size.by_step, measured.size.floor
    steps = _column(rows, "step")
    panels = []
    k3 = _column(rows, "k3")
    if np.isfinite(k3).any():
        now = f"{format_number(k3[0])} → {format_number(k3[-1])}"
        reading = "A mismatch that grows while training goes on comes before a collapse; a jump is a changed setting."
        panels.append(panel("k3 over steps", now, figures.k3_steps_svg(steps, k3, floor), reading, _trend(steps, k3)))
    names = {"ess_token": "token weights", "ess_seq": "sequence weights"}
    curves = {
        name: values for key, name in names.items() for values in [_column(rows, key)] if np.isfinite(values).any()
    }
    if curves:
        reading = "Share of the data that counts under unbounded importance weights; near 0, those weights are noise."
        result = "; ".join(
            f"{name} {number_at(values, 0)} at first, {number_at(values, -1)} at last"
            for name, values in curves.items()
        )
        now = f"lowest {format_number(min(float(np.nanmin(values)) for values in curves.values()))}"
        panels.append(panel("ESS over steps", now, figures.ess_steps_svg(steps, curves), reading, f"{result}."))
    tails = [_column(rows, key) for key in TAILS]
    if all(np.isfinite(values).all() for values in tails):
        low, high = tails[0], tails[-1]
        worst = int(np.argmax(high / low))
        reading = "Bands that widen with training: the tail of the ratio blows up, and fixed bounds reject ever more."
        result = (
            f"Widest at step {steps[worst]:.0f}: 1% of the ratios below {low[worst]:.3g}, 1% above {high[worst]:.3g}."
        )
        svg = figures.tails_svg(steps, tails)
        panels.append(panel("Ratio tails over steps", f"99%: {high[-1]:.3g}", svg, reading, result))
    return panels


def _trend(steps: np.ndarray, k3: np.ndarray) -> str:
    highest = int(np.nanargmax(k3))
    part = max(len(k3) // 4, 1)
    first_median, last_median = float(np.nanmedian(k3[:part])), float(np.nanmedian(k3[-part:]))
    peak = f"highest at step {steps[highest]:.0f} ({number_at(k3, highest)})"
    if not first_median > 0:
        return f"{peak[0].upper()}{peak[1:]}."
    change = last_median / first_median
    if 0.67 < change < 1.5:
        return f"Steady; {peak}."
    trend = f"Grows {number(float(f'{change:.2g}'))}-fold" if change > 1 else f"Falls to {format_percent(change)}"
    return f"{trend} from the first quarter to the last; {peak}."


def _column(rows: tuple[Mapping[str, float], ...], key: str) -> np.ndarray:
    return np.array([row.get(key, math.nan) for row in rows], dtype=np.float64)


def view_panels(measured: Measured) -> Panels:
    """Returns one figure for each view of the data."""
    panel_functions = {
        "probability": (_envelope, "log-ratio by sampler probability"),
        "position": (_position, "position in the response"),
        "length": (_length, "response length"),
        "turn": (_turn, "borders of turns"),
        "turn-number": (_turn_number, "turns"),
        "observation": (_observation, "tokens since an observation"),
        "version": (_age, "age of the weights"),
        "entropy": (_entropy, "entropy"),
    }
    shown: list[Panel] = []
    absent: list[str] = []
    for name, (make, what) in panel_functions.items():
        view = measured.views.get(name)
        if view is None:
            absent.append(what)
        elif len(view.labels) < 2:
            absent.append(f"{what} (only {view.labels[0] if view.labels else 'nothing'} in this data)")
        elif view.count.sum() > 0:
            shown += make(view, measured)
    return Panels(shown, absent)


def top_tokens(measured: Measured, texts: Mapping[int, str], most: int = 15) -> list[dict[str, str]]:
    """Returns table rows of the tokens with the largest share of k3; empty without ids. `texts`: by id, where known."""
    view = measured.views.get("token")
    if view is None:
        return []
    tokens, k3 = shares(view, measured.size)
    ids = view.columns.get("id", np.full(len(view.labels), -1))
    ranked = sorted(range(len(view.labels)), key=lambda index: -k3[index])[:most]
    return [
        {
            "label": view.labels[index].translate(VISIBLE_WHITESPACE),
            "text": texts.get(int(ids[index]), ""),
            "count": f"{int(view.count[index]):,}",
            "tokens": share_at(tokens, index),
            "share": share_at(k3, index),
            "width": f"{100 * float(k3[index]):.1f}",
            "k3": number_at(view.k3, index),
            "log_ratio": signed_at(view.log_ratio_mean, index),
        }
        for index in ranked
        if view.count[index] > 0
    ]


def _envelope(view: View, measured: Measured) -> list[Panel]:
    width = view.high - view.low
    widest, likeliest = int(np.argmax(np.where(figures.thick(view), width, -np.inf))), _most_likely(view)
    tokens, k3 = shares(view, measured.size)
    reading = (
        "A band that opens to the left: rare tokens mismatch most, as numerical noise does. A median off 0 is a bias."
    )
    result = (
        f"Widest at probability {short_exponent(view.labels[widest])} ({number_at(width, widest)} nats, "
        f"{share_at(tokens, widest)} of the tokens, {share_at(k3, widest)} of the mismatch); "
        f"{number_at(width, likeliest)} nats at {short_exponent(view.labels[likeliest])}."
    )
    svg = figures.envelope_svg(view, "log-ratio, nats", "sampler probability", log=True)
    return [panel("Log-ratio envelope", f"widest {number_at(width, widest)} nats", svg, reading, result)]


def _most_likely(view: View) -> int:
    """Returns the nonempty bin of the highest probability."""
    assert view.edges is not None
    nonempty = np.flatnonzero(figures.thick(view))
    return int(nonempty[np.argmax(view.edges[nonempty])])


def _position(view: View, measured: Measured) -> list[Panel]:
    reading = "Rising bars: errors add up along the response. One high first or last bar: a prompt border or end token."
    first, last = _end_bins(view, measured)
    ends = f"{number_at(view.k3, first)} in the first part, {number_at(view.k3, last)} in the last"
    result = f"{ends}; {_highest(view, measured)}."
    return [_bins("k3 by position", view, measured, "position in the response", reading, result)]


def _turn(view: View, measured: Measured) -> list[Panel]:
    reading = (
        "A jump at 0, the first token after a border, says that text was tokenized again on its way to the trainer."
    )
    result = f"{_highest(view, measured)[0].upper()}{_highest(view, measured)[1:]}."
    return [_bins("k3 around the borders of turns", view, measured, "tokens from the border", reading, result)]


def _turn_number(view: View, measured: Measured) -> list[Panel]:
    reading = "Growth from turn to turn: what tools answered leads the model where trainer and sampler differ more."
    (shown,) = _growth("k3 by turn", view, measured, "turn", reading, "in turn")
    return [replace(shown, result=f"{shown.result} {_log_ratios(view, measured)}")]


def _log_ratios(view: View, measured: Measured) -> str:
    """Says the mean log-ratio of an ordered view by its two ends."""
    first, last = (
        f"{signed_at(view.log_ratio_mean, bin_)} at {view.labels[bin_]}" for bin_ in _end_bins(view, measured)
    )
    return f"Mean log-ratio {first}, {last}."


def _observation(view: View, measured: Measured) -> list[Panel]:
    reading = "High bars at the left: the first tokens after the output of a tool, where the model is least sure."
    result = f"{_highest(view, measured)[0].upper()}{_highest(view, measured)[1:]}. {_log_ratios(view, measured)}"
    return [_bins("k3 after observations", view, measured, "tokens since the last observation", reading, result)]


def _age(view: View, measured: Measured) -> list[Panel]:
    reading = "Age 0 is numerical mismatch alone; what grows with age is staleness, and a smaller lag removes it."
    return _growth("k3 by age of the weights", view, measured, "age, optimizer updates", reading, "at age")


def _growth(title: str, view: View, measured: Measured, axis: str, reading: str, where: str) -> list[Panel]:
    """Returns the bars of an ordered view, described by its first and last bin."""
    first, last = (f"{number_at(view.k3, bin_)} {where} {view.labels[bin_]}" for bin_ in _end_bins(view, measured))
    return [_bins(title, view, measured, axis, reading, f"{first}, {last}.")]


def _entropy(view: View, measured: Measured) -> list[Panel]:
    reading = "A median that moves away from 0 as entropy grows: temperature, or log-probs of another distribution."
    first, last = _end_bins(view, measured)
    result = (
        f"Mean log-ratio {signed_at(view.log_ratio_mean, first)} at entropy {view.labels[first]}, "
        f"{signed_at(view.log_ratio_mean, last)} at {view.labels[last]}."
    )
    if view.edges is None:
        return [_bins("Log-ratio by entropy", view, measured, "entropy, nats", reading, result)]
    svg = figures.envelope_svg(view, "log-ratio, nats", "entropy of the policy, nats", log=False)
    return [panel("Log-ratio by entropy", "", svg, reading, result)]


def _length(view: View, measured: Measured) -> list[Panel]:
    panels = []
    rules = {
        name.partition("/")[2]: values
        for name, values in view.columns.items()
        if name.startswith("rejected/") and np.isfinite(values).any()
    }
    if rules:
        reading = (
            "A line that climbs to the right: the rule rejects long responses because they are long (length bias)."
        )
        gaps = {rule: _end_shares(view, share) for rule, share in rules.items()}
        worst = max(gaps, key=lambda rule: abs(gaps[rule][1] - gaps[rule][0]))
        least, most = (format_percent(share) for share in gaps[worst])
        result = f"{worst} rejects {least} of the shortest responses and {most} of the longest."
        panels.append(panel("Rejected by length", "", figures.rejected_svg(view, rules), reading, result))
    reading = "Per token, length should not matter; more at the right means that mismatch adds up along a response."
    first, last = _end_bins(view, measured)
    result = f"{number_at(view.k3, first)} in the shortest responses, {number_at(view.k3, last)} in the longest."
    return [
        *panels,
        _bins("k3 by length of the response", view, measured, "length of the response, tokens", reading, result),
    ]


def _end_shares(view: View, share: np.ndarray) -> tuple[float, float]:
    nonempty = np.flatnonzero((view.count > 0) & np.isfinite(share))
    return (float(share[nonempty[0]]), float(share[nonempty[-1]])) if len(nonempty) else (math.nan, math.nan)


def _bins(title: str, view: View, measured: Measured, xlabel: str, reading: str, result: str) -> Panel:
    svg = figures.bins_svg(title, view.labels, view.k3, measured.size.mismatch["k3"], xlabel)
    solid = _reliable_bins(view, measured)
    now = f"highest {format_number(float(view.k3[solid].max()))}" if len(solid) else ""
    return panel(title, now, svg, reading, result)


def _reliable_bins(view: View, measured: Measured) -> np.ndarray:
    """Returns the bins with enough tokens, or all nonempty bins if none has."""
    tokens, _ = shares(view, measured.size)
    nonempty = (view.count > 0) & np.isfinite(view.k3)
    solid = nonempty & (tokens >= FEWEST)
    return np.flatnonzero(solid if solid.any() else nonempty)


def _highest(view: View, measured: Measured) -> str:
    solid = _reliable_bins(view, measured)
    if not len(solid):
        return "no bin holds enough tokens"
    best = solid[int(np.argmax(view.k3[solid]))]
    return f"highest at {view.labels[best]} ({number_at(view.k3, best)})"


def _end_bins(view: View, measured: Measured) -> tuple[int, int]:
    nonempty = _reliable_bins(view, measured)
    return (int(nonempty[0]), int(nonempty[-1])) if len(nonempty) else (0, len(view.labels) - 1)
