"""The charts of the diagnosis page with their captions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from trimtab.diagnosis.answer import Figure, range_text
from trimtab.diagnosis.measure.trained_tokens import FEWEST_IN_GROUP
from trimtab.diagnosis.measure.views import FEWEST_SHARE, shares
from trimtab.diagnosis.records import Measured, MismatchSize, View, read_table
from trimtab.pages import charts
from trimtab.pages.page import Chart, Note
from trimtab.runs.metric_catalog import k3_ranges
from trimtab.text import format_percent, format_signed, short, short_exponent

_TICKS = 8  # labels below a chart of bins, before they run into each other
_SHORT = {"newer than the trainer": "newer"}
_LEAST = 1e-8  # a k3 up to this is what float32 on both sides gives
_FAR = 30.0  # largest / smallest value from which on an axis is logarithmic
TEXTS = read_table("texts.toml")
"""Title of each chart, and how to read it; of those of views also the axis."""


def _panel(texts: Mapping[str, str], now: str, svg: Markup, result: str) -> Chart:
    """Returns one chart. texts: a row of `TEXTS`. now: its main number. result: what it shows for this data."""
    return Chart(texts["title"], svg, (Note(texts["reading"]), Note(result, "Here")), now)


def size_panels(measured: Measured) -> tuple[list[Chart], list[str]]:
    """Returns k3 against published ranges, the scatter plot, and the curves over steps."""
    size, steps = measured.size, measured.size.by_step
    shown = [_ranges(size), _scatter(measured)]
    if len(steps) < 2:
        why = "the files have one step" if steps else "the files do not say which step a response is of"
        return shown, [f"curves over steps ({why})"]

    def column(key: str) -> np.ndarray:
        return np.array([row.get(key, math.nan) for row in steps], dtype=np.float64)

    step, k3 = column("step"), column("k3")
    curves = {name: column(key) for key, name in (("ess_token", "token weights"), ("ess_seq", "sequence weights"))}
    curves = {name: values for name, values in curves.items() if np.isfinite(values).any()}
    shown += [_k3_over_steps(step, k3, size.floor)] if np.isfinite(k3).any() else []
    shown += [_ess_over_steps(step, curves)] if curves else []
    return shown, []


def _ranges(size: MismatchSize) -> Chart:
    """Draws k3 with its interval on a logarithmic strip, with the published ranges and the rounding floor.

    The strip begins at 1e-8; smaller values stand at its left end.
    """
    k3, interval = size.mismatch["k3"], size.intervals.get("k3")
    low, high = _LEAST, max(1.0, 4 * k3) if math.isfinite(k3) else 1.0

    def paint(axes: Axes) -> None:
        for start, end, color, name in _k3_bands():
            axes.axvspan(start, end, ymax=0.5, color=color, alpha=0.3, linewidth=0)
            axes.text(math.sqrt(start * end), 0.05, name.replace(" ", "\n"), ha="center", va="bottom", fontsize=8)
        if size.floor > 0:
            _mark(axes, size.floor, "rounding", color=charts.INK, marker="|", height=0.55)
        if k3 > 0 and math.isfinite(k3):
            if interval is not None and np.isfinite(interval).all():
                ends = np.clip([interval.low, interval.high], low, high)
                axes.plot(ends, [0.36, 0.36], color=charts.VERMILLION, linewidth=3)
            _mark(axes, k3, "this data", color=charts.VERMILLION, marker="D", height=0.8)
        axes.set(xscale="log", xlim=(low, high), ylim=(0, 1), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
        charts.log_ticks(axes.xaxis)
        axes.set_xlabel("k3, nats per token")

    return _panel(
        TEXTS["charts"]["ranges"],
        f"k3 {Figure.of(size, 'k3').value}",
        charts.draw("Size of the mismatch", paint, size=(charts.WIDTH, 1.9)),
        f"{range_text(size)}. Rounding of the stored log-probs alone causes {short(size.floor)}.",
    )


def _k3_bands() -> list[tuple[float, float, str, str]]:
    """Returns start, end, color and name of the ranges published for working setups."""
    dense, small, moe = (k3_ranges()[name] for name in ("dense", "small-dense", "moe"))
    return [
        (dense.low, dense.high, charts.GREEN, "dense"),
        (dense.high, small.high, charts.SKY, "small dense"),
        (small.high, moe.high, charts.ORANGE, "MoE"),
    ]


def _mark(axes: Axes, value: float, name: str, *, color: str, marker: str, height: float) -> None:
    """Draws a point on the strip with its name above it, at one of two heights so that names do not overlap."""
    place = max(value, _LEAST)
    axes.plot([place, place], [0.36, height], color=color, linewidth=0.8, linestyle=":")
    axes.plot([place], [0.36], color=color, marker=marker, markersize=8, clip_on=False)
    text = f"{name} {short(value)}{' (further left)' if value < _LEAST else ''}"
    axes.text(place, height, text, ha="left" if place < 1e-6 else "right" if place > 0.05 else "center", va="bottom")


def _scatter(measured: Measured) -> Chart:
    counts = measured.scatter
    row, column = np.indices(counts.shape)
    far, total = np.abs(row - column) > max(1, len(counts) // 20), int(counts.sum())
    off = float(counts[far].sum() / total) if total else math.nan
    return _panel(
        TEXTS["charts"]["scatter"],
        f"Pearson r {Figure.of(measured.size, 'pearson').value}",
        charts.scatter_svg(counts),
        f"{total:,} tokens, {format_percent(off)} of them more than 0.05 away from the line.",
    )


def _k3_over_steps(steps: np.ndarray, k3: np.ndarray, floor: float) -> Chart:
    """Draws k3 of each step, on a logarithmic axis if it varies much, with published ranges shaded."""

    def paint(axes: Axes) -> None:
        axes.set_ylabel("k3, nats")
        shown = np.maximum(k3, _LEAST)
        axes.plot(steps, shown, color=charts.BLUE, marker="o" if len(steps) < 40 else None, markersize=3, label="k3")
        if not (k3 > _LEAST).any():
            return
        _log_k3(axes)
        bottom, top = axes.get_ylim()
        for start, end, color, name in _k3_bands():
            if end > bottom and start < top:
                axes.axhspan(max(start, bottom), min(end, top), color=color, alpha=0.15, linewidth=0, label=name)
        if bottom < floor < top:
            axes.axhline(floor, color=charts.INK, linestyle=":", linewidth=1, label="rounding")
        axes.set_ylim(bottom, top)

    part, highest = max(len(k3) // 4, 1), int(np.nanargmax(k3))
    first, last = (short(float(np.nanmedian(quarter))) for quarter in (k3[:part], k3[-part:]))
    peak = f"{short(k3[highest])} at step {steps[highest]:.0f}"
    return _panel(
        TEXTS["charts"]["k3"],
        f"{short(k3[0])} → {short(k3[-1])}",
        charts.draw("k3 over steps", paint, legend=True, steps=True),
        f"Median of the first quarter {first}, of the last {last}; highest {peak}.",
    )


def _ess_over_steps(steps: np.ndarray, curves: Mapping[str, np.ndarray]) -> Chart:

    def paint(axes: Axes) -> None:
        for index, (name, values) in enumerate(curves.items()):
            marker = "os"[index] if len(steps) < 40 else None
            color, style = charts.CYCLE[index], charts.STYLES[index]
            axes.plot(steps, values, color=color, linestyle=style, marker=marker, markersize=4, label=name)
        axes.set(ylim=(0, 1.05), ylabel="share of the samples")

    ends = [f"{name} {short(values[0])} at first, {short(values[-1])} at last" for name, values in curves.items()]
    return _panel(
        TEXTS["charts"]["ess"],
        f"lowest {short(min(float(np.nanmin(values)) for values in curves.values()))}",
        charts.draw("Effective sample size over steps", paint, legend=True, steps=True),
        f"{'; '.join(ends)}.",
    )


def view_panels(measured: Measured) -> tuple[list[Chart], list[str]]:
    """Returns one chart for each view of the data, and the axes of missing views."""
    shown: list[Chart] = []
    absent: list[str] = []
    for name, texts in TEXTS["views"].items():
        view, axis = measured.views.get(name), texts["axis"]
        if view is None:
            absent.append(axis)
        elif len(view.labels) < 2:
            absent.append(f"{axis} (only {view.labels[0] if view.labels else 'nothing'} in this data)")
        elif view.count.sum() > 0:
            shown.append(_chart(view, measured, texts))
    return shown, absent


def _chart(view: View, measured: Measured, texts: Mapping[str, str]) -> Chart:
    """Returns the log-ratios of views by probability and entropy, and k3 of the others."""
    tokens, k3 = shares(view, measured.size)
    filled = (view.count > 0) & np.isfinite(view.k3)
    solid = filled & (tokens >= FEWEST_SHARE)
    bins = np.flatnonzero(solid if solid.any() else filled)
    if view.edges is not None and view.name in ("probability", "entropy"):
        svg, width = _envelope(view, texts["axis"]), view.high - view.low
        widest = int(np.argmax(np.where(_thick(view), width, -np.inf)))
        now = f"widest {short(width[widest])} nats"
        result = (
            f"Widest at {short_exponent(view.labels[widest])} ({short(width[widest])} nats, "
            f"{format_percent(tokens[widest])} of the tokens, {format_percent(k3[widest])} of the mismatch); "
            f"{_ends(view, width, bins)}."
        )
    else:
        svg = _bars(view, measured.size.mismatch["k3"], texts)
        best = bins[int(np.argmax(view.k3[bins]))] if len(bins) else 0
        now = f"highest {short(view.k3[best])}"
        result = f"k3 {_ends(view, view.k3, bins)}; highest {short(view.k3[best])} at {view.labels[best]}."
    return _panel(texts, now, svg, f"{result} Mean log-ratio {_ends(view, view.log_ratio_mean, bins)}.")


def _ends(view: View, values: np.ndarray, bins: np.ndarray) -> str:
    ends = (bins[0], bins[-1]) if len(bins) else (0, len(view.labels) - 1)
    return ", ".join(f"{format_signed(values[end])} at {view.labels[end]}" for end in ends)


def _envelope(view: View, axis: str) -> Markup:
    """Draws median and 2nd to 98th percentile of the log-ratio over bins with edges and enough tokens."""
    assert view.edges is not None
    drawn, log = _thick(view), view.name == "probability"
    left, right = view.edges[:-1].astype(np.float64), view.edges[1:].astype(np.float64)
    centers = (np.sqrt(left * right) if log else (left + right) / 2)[drawn]
    low, median, high = view.low[drawn], view.median[drawn], view.high[drawn]

    def paint(axes: Axes) -> None:
        axes.fill_between(centers, low, high, color=charts.SKY, alpha=0.3, linewidth=0, label="2nd to 98th percentile")
        for edge in (low, high):
            axes.plot(centers, edge, color=charts.BLUE, linewidth=0.8, marker="o", markersize=2)
        axes.plot(centers, median, color=charts.VERMILLION, marker="o", markersize=3.5, label="median")
        axes.axhline(0.0, color=charts.INK, linewidth=0.6, linestyle=":")
        if log:
            axes.set_xscale("log")
            charts.log_ticks(axes.xaxis)
        axes.set(xlabel=axis, ylabel="log-ratio, nats")

    return charts.draw(f"Log-ratio by {view.name}", paint, legend=True)


def _thick(view: View) -> np.ndarray:
    """Returns (bins,) bool: bins with enough tokens for percentiles, or all nonempty bins if at most one has."""
    drawn = np.isfinite(view.median) & (view.count > 0)
    enough = drawn & (view.count >= FEWEST_IN_GROUP)
    return enough if enough.sum() > 1 else drawn


def _bars(view: View, overall: float, texts: Mapping[str, str]) -> Markup:
    """Draws k3 of each bin, as bars or, over a wide range, points on a log axis; a line shows k3 of all tokens."""
    drawn = np.isfinite(view.k3)
    bins, shown = np.flatnonzero(drawn), view.k3[drawn]

    def paint(axes: Axes) -> None:
        if shown.max(initial=0.0) > _FAR * max(shown.min(initial=np.inf), _LEAST):
            axes.plot(bins, np.maximum(shown, _LEAST), color=charts.BLUE, linewidth=0.8, marker="o", markersize=6)
            _log_k3(axes)
        else:
            axes.set_axisbelow(True)
            axes.bar(bins, shown, width=0.75, color=charts.BLUE)
            charts.digits(axes.yaxis, 3)
        if overall > 0:
            label = f"all tokens: {short(overall)}"
            axes.axhline(overall, color=charts.VERMILLION, linestyle="--", linewidth=1.2, label=label)
        _name_bins(axes, view.labels)
        axes.set(xlabel=texts["axis"], ylabel="k3, nats")

    return charts.draw(texts["title"], paint, legend=True)


def _log_k3(axes: Axes) -> None:
    """Sets a logarithmic axis whose lowest position represents everything up to `_LEAST`: no mismatch."""
    charts.digits(axes.yaxis, 3)
    if axes.dataLim.y1 >= 4 * axes.dataLim.y0:  # wide enough for labels at powers
        charts.log_scale(axes)
        least = f"≤{charts.short_power(_LEAST)}"
        label = FuncFormatter(lambda value, _: least if value <= 1.01 * _LEAST else charts.short_power(value))
        axes.yaxis.set_major_formatter(label)


def _name_bins(axes: Axes, labels: Sequence[str]) -> None:
    """Labels every bin, or every second or third bin if labels would overlap."""
    labels = [_SHORT.get(label, label).replace(" and more", "+") for label in labels]
    width = max((len(label) for label in labels), default=1)
    every = max(math.ceil(len(labels) / _TICKS), math.ceil(len(labels) * width / 60))
    axes.set_xticks(range(0, len(labels), every), [labels[index] for index in range(0, len(labels), every)], fontsize=8)
    axes.grid(visible=False, axis="x")
