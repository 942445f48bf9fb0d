"""The figures of a diagnosis as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from trimtab.diagnosis.measure.bins import FEWEST
from trimtab.diagnosis.records import MismatchSize, View
from trimtab.pages.charts import WIDTH, draw, quantile_bands
from trimtab.pages.numbers import short
from trimtab.pages.svg import (
    BLUE,
    CYCLE,
    GREEN,
    INK,
    ORANGE,
    SKY,
    STYLES,
    VERMILLION,
    digits,
    log_scale,
    log_ticks,
    percent,
    short_power,
)
from trimtab.runs.metric_catalog import k3_ranges

_TICKS = 8  # labels below a chart of bins, before they run into each other
_SHORT = {"newer than the trainer": "newer"}
_LEAST = 1e-8  # a k3 up to here is float32 on both sides
_FAR = 30.0  # largest over smallest value from which an axis is logarithmic


def range_svg(size: MismatchSize) -> Markup:
    """Draws k3 with its interval on a logarithmic strip, with the published ranges and the rounding floor.

    The strip begins at 1e-8: what lies below stands at its left end.
    """
    k3, interval = size.mismatch["k3"], size.intervals.get("k3")
    low, high = _LEAST, max(1.0, 4 * k3) if math.isfinite(k3) else 1.0

    def paint(axes: Axes) -> None:
        for start, end, color, name in _k3_bands():
            axes.axvspan(start, end, ymax=0.5, color=color, alpha=0.3, linewidth=0)
            axes.text(math.sqrt(start * end), 0.05, name.replace(" ", "\n"), ha="center", va="bottom", fontsize=8)
        if size.floor > 0:
            _mark(axes, size.floor, "rounding", color=INK, marker="|", height=0.55)
        if k3 > 0 and math.isfinite(k3):
            if interval is not None and np.isfinite(interval).all():
                ends = np.clip([interval.low, interval.high], low, high)
                axes.plot(ends, [0.36, 0.36], color=VERMILLION, linewidth=3)
            _mark(axes, k3, "this data", color=VERMILLION, marker="D", height=0.8)
        axes.set(xscale="log", xlim=(low, high), ylim=(0, 1), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
        log_ticks(axes.xaxis)
        axes.set_xlabel("k3, nats per token")

    return draw("Size of the mismatch", paint, size=(WIDTH, 1.9))


def _k3_bands() -> list[tuple[float, float, str, str]]:
    """Returns start, end, color and name of the ranges published for working setups."""
    dense, small, moe = (k3_ranges()[name] for name in ("dense", "small-dense", "moe"))
    return [
        (dense.low or 0.0, dense.high, GREEN, "dense"),
        (dense.high, small.high, SKY, "small dense"),
        (small.high, moe.high, ORANGE, "MoE"),
    ]


def _mark(axes: Axes, value: float, name: str, *, color: str, marker: str, height: float) -> None:
    """Draws a point on the strip with its name above it, at one of two heights so that names do not overlap."""
    place = max(value, _LEAST)
    axes.plot([place, place], [0.36, height], color=color, linewidth=0.8, linestyle=":")
    axes.plot([place], [0.36], color=color, marker=marker, markersize=8, clip_on=False)
    text = f"{name} {short(value)}{' (further left)' if value < _LEAST else ''}"
    axes.text(place, height, text, ha="left" if place < 1e-6 else "right" if place > 0.05 else "center", va="bottom")


def envelope_svg(view: View, unit: str, xlabel: str, *, log: bool) -> Markup:
    """Draws median and 2nd to 98th percentile of the log-ratio over the bins of a view with edges.

    Bins with too few tokens for percentiles are omitted.
    """
    assert view.edges is not None
    drawn = thick(view)
    left, right = view.edges[:-1].astype(np.float64), view.edges[1:].astype(np.float64)
    centers = (np.sqrt(left * right) if log else (left + right) / 2)[drawn]
    low, median, high = view.low[drawn], view.median[drawn], view.high[drawn]

    def paint(axes: Axes) -> None:
        axes.fill_between(centers, low, high, color=SKY, alpha=0.3, linewidth=0, label="2nd to 98th percentile")
        for edge in (low, high):
            axes.plot(centers, edge, color=BLUE, linewidth=0.8, marker="o", markersize=2)
        axes.plot(centers, median, color=VERMILLION, marker="o", markersize=3.5, label="median")
        axes.axhline(0.0, color=INK, linewidth=0.6, linestyle=":")
        if log:
            axes.set_xscale("log")
            log_ticks(axes.xaxis)
        axes.set(xlabel=xlabel, ylabel=unit)

    return draw(f"Log-ratio by {view.name}", paint, legend=True)


def thick(view: View) -> np.ndarray:
    """Returns (bins,) bool: bins with enough tokens for percentiles, or all nonempty ones if hardly one has."""
    drawn = np.isfinite(view.median) & (view.count > 0)
    enough = drawn & (view.count >= FEWEST)
    return enough if enough.sum() > 1 else drawn


def bins_svg(name: str, labels: Sequence[str], values: np.ndarray, overall: float, xlabel: str) -> Markup:
    """Draws k3 of each bin, as bars or, over a wide range, points on a log axis; that of all tokens as a line."""
    drawn = np.isfinite(values)
    bins = np.flatnonzero(drawn)

    def paint(axes: Axes) -> None:
        shown = values[drawn]
        if shown.max(initial=0.0) > _FAR * max(shown.min(initial=np.inf), _LEAST):
            axes.plot(bins, np.maximum(shown, _LEAST), color=BLUE, linewidth=0.8, marker="o", markersize=6)
            _log_k3(axes)
        else:
            axes.set_axisbelow(True)
            axes.bar(bins, shown, width=0.75, color=BLUE)
            digits(axes.yaxis, 3)
        if overall > 0:
            label = f"all tokens: {short(overall)}"
            axes.axhline(overall, color=VERMILLION, linestyle="--", linewidth=1.2, label=label)
        _name_bins(axes, labels)
        axes.set(xlabel=xlabel, ylabel="k3, nats")

    return draw(name, paint, legend=True)


def rejected_svg(view: View, rules: Mapping[str, np.ndarray]) -> Markup:
    """Draws the share of responses that each sequence rule rejects, over bins of response length."""

    def paint(axes: Axes) -> None:
        _curves(axes, np.arange(len(view.labels)), rules, markers=True)
        highest = max(float(np.nanmax(share, initial=0.0)) for share in rules.values()) or 1
        axes.set_ylim(-0.03 * highest, 1.08 * highest)
        percent(axes.yaxis)
        _name_bins(axes, view.labels)
        axes.set(xlabel="length of the response, tokens", ylabel="responses rejected")

    return draw("Rejected responses by length", paint, legend=True)


def _curves(axes: Axes, x: np.ndarray, curves: Mapping[str, np.ndarray], *, markers: bool) -> None:
    for index, (name, values) in enumerate(curves.items()):
        color, style = CYCLE[index % len(CYCLE)], STYLES[index % len(STYLES)]
        marker = "osD^vP"[index % 6] if markers else None
        axes.plot(x, values, color=color, linestyle=style, marker=marker, markersize=4, label=name)


def k3_steps_svg(steps: np.ndarray, k3: np.ndarray, floor: float) -> Markup:
    """Draws k3 of each step, on a logarithmic axis if it varies much, with published ranges shaded."""

    def paint(axes: Axes) -> None:
        axes.set_ylabel("k3, nats")
        shown = np.maximum(k3, _LEAST)
        axes.plot(steps, shown, color=BLUE, marker="o" if len(steps) < 40 else None, markersize=3, label="k3")
        if not (k3 > _LEAST).any():
            return
        _log_k3(axes)
        bottom, top = axes.get_ylim()
        for start, end, color, name in _k3_bands():
            if end > bottom and start < top:
                axes.axhspan(max(start, bottom), min(end, top), color=color, alpha=0.15, linewidth=0, label=name)
        if bottom < floor < top:
            axes.axhline(floor, color=INK, linestyle=":", linewidth=1, label="rounding")
        axes.set_ylim(bottom, top)

    return draw("k3 over steps", paint, legend=True, steps=True)


def ess_steps_svg(steps: np.ndarray, curves: Mapping[str, np.ndarray]) -> Markup:
    """Draws the effective sample size over steps, one curve per kind of weight."""

    def paint(axes: Axes) -> None:
        _curves(axes, steps, curves, markers=len(steps) < 40)
        axes.set(ylim=(0, 1.05), ylabel="share of the samples")

    return draw("Effective sample size over steps", paint, legend=True, steps=True)


def tails_svg(steps: np.ndarray, quantiles: Sequence[np.ndarray]) -> Markup:
    """Draws the 1, 5, 50, 95 and 99% quantiles of the ratio over steps."""

    def paint(axes: Axes) -> None:
        quantile_bands(axes, steps, quantiles)
        axes.set_ylabel("trainer / sampler")

    return draw("Ratio tails over steps", paint, steps=True)


def _log_k3(axes: Axes) -> None:
    """Sets a logarithmic axis whose lowest position represents everything up to `_LEAST`: no mismatch."""
    digits(axes.yaxis, 3)
    if axes.dataLim.y1 >= 4 * axes.dataLim.y0:  # wide enough for labels at powers
        log_scale(axes)
        least = f"≤{short_power(_LEAST)}"
        label = FuncFormatter(lambda value, _: least if value <= 1.01 * _LEAST else short_power(value))
        axes.yaxis.set_major_formatter(label)


def _name_bins(axes: Axes, labels: Sequence[str]) -> None:
    """Labels every bin, or every second or third where labels would overlap."""
    labels = [_SHORT.get(label, label).replace(" and more", "+").replace(" and later", "+") for label in labels]
    width = max((len(label) for label in labels), default=1)
    every = max(math.ceil(len(labels) / _TICKS), math.ceil(len(labels) * width / 60))
    axes.set_xticks(range(0, len(labels), every), [labels[index] for index in range(0, len(labels), every)], fontsize=8)
    axes.grid(visible=False, axis="x")
