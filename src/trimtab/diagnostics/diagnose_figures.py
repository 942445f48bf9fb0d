"""Figures of a diagnosis as SVG, in the visual language of the other pages. Each takes arrays and says nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from trimtab.diagnostics.diagnose_words import DENSE, MOE
from trimtab.diagnostics.diagnosis import Size, View
from trimtab.diagnostics.plots import (
    BLUE,
    CYCLE,
    GREEN,
    INK,
    ORANGE,
    RC,
    SKY,
    STYLES,
    VERMILLION,
    log_scale,
    short_power,
    to_svg,
)

_SHADES = 5
_TICKS = 8  # labels below a chart of bins, before they run into each other
_FAR = 30.0  # largest over smallest value from which an axis is logarithmic


def range_svg(size: Size) -> str:
    """k3 with its interval on a logarithmic strip, beside the published ranges and the rounding floor."""
    k3, interval = size.mismatch["k3"], size.intervals.get("k3")
    marks = [value for value in (k3, size.floor) if value > 0 and math.isfinite(value)]
    low, high = min([1e-7, *(value / 4 for value in marks)]), max([1.0, *(value * 4 for value in marks)])

    def paint(axes: Axes) -> None:
        for (start, end), color, name in ((DENSE, GREEN, "dense models"), (MOE, ORANGE, "mixture of experts")):
            axes.axvspan(start, end, ymax=0.62, color=color, alpha=0.25, linewidth=0)
            axes.text(math.sqrt(start * end), 0.31, name, ha="center", va="center", fontsize=8.5)
        if size.floor > 0:
            axes.plot([size.floor] * 2, [0, 0.62], color=INK, linestyle=":", linewidth=1)
            axes.text(size.floor, 0.66, "rounding", ha="center", va="bottom", fontsize=8.5)
        if k3 > 0:
            ends = (interval.low, interval.high) if interval is not None else (k3, k3)
            axes.plot(ends, [0.31, 0.31], color=VERMILLION, linewidth=3)
            axes.plot([k3], [0.31], color=VERMILLION, marker="D", markersize=7)
            axes.text(k3, 0.66, "this data", ha="center", va="bottom", fontsize=9.5, fontweight="bold")
        axes.set(xscale="log", xlim=(low, high), ylim=(0, 1), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
        _log_labels(axes)
        axes.set_xlabel("k3, nats per token")

    return _draw("Size of the mismatch", paint, height=1.25)


def scatter_svg(counts: np.ndarray) -> str:
    """Trainer probability (rows) over sampler probability (columns), counts (bins, bins) of the unit square; shades are
    logarithmic in the count."""
    bins, most = len(counts), max(int(counts.max()), 1)
    level = np.ceil(np.log1p(counts) / math.log1p(most) * _SHADES).astype(np.int64)

    def paint(axes: Axes) -> None:
        handles = []
        for shade in range(1, _SHADES + 1):
            color = to_rgba(BLUE, alpha=shade / _SHADES)
            rows, columns = np.nonzero(level == shade)
            squares = [np.array([(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)]) / bins for y, x in zip(rows, columns)]
            axes.add_collection(PolyCollection(squares, facecolors=color, linewidths=0))
            handles.append(Patch(facecolor=color, label=f"≤ {_count(math.expm1(shade / _SHADES * math.log1p(most)))}"))
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.6, linestyle=":")
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="sampler probability", ylabel="trainer probability")
        axes.legend(
            handles=handles, title="tokens", title_fontsize=9, loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8.5
        )

    return _draw("Trainer against sampler probability", paint, height=3.0)


def envelope_svg(view: View, unit: str, xlabel: str, *, log: bool) -> str:
    """Median and 2nd to 98th percentile of the log-ratio over the bins of a view with edges."""
    assert view.edges is not None
    there = (view.count > 0) & np.isfinite(view.median)
    centers = _centers(view.edges, log=log)[there]
    low, median, high = view.low[there], view.median[there], view.high[there]

    def paint(axes: Axes) -> None:
        axes.fill_between(centers, low, high, color=SKY, alpha=0.3, linewidth=0, label="2nd to 98th percentile")
        for edge in (low, high):
            axes.plot(centers, edge, color=BLUE, linewidth=0.8, marker="o", markersize=2)
        axes.plot(centers, median, color=VERMILLION, marker="o", markersize=3.5, label="median")
        axes.axhline(0.0, color=INK, linewidth=0.6, linestyle=":")
        if log:
            axes.set_xscale("log")
            _log_labels(axes)
        axes.set(xlabel=xlabel, ylabel=unit)

    return _draw(f"Log-ratio by {view.name}", paint, legend=True)


def bins_svg(view: View, values: np.ndarray, overall: float, xlabel: str, ylabel: str = "k3, nats") -> str:
    """One value for each bin of a view as points, the mean of all tokens as a line."""
    there = (view.count > 0) & np.isfinite(values)
    places = np.flatnonzero(there)

    def paint(axes: Axes) -> None:
        shown = values[there]
        positive = shown[shown > 0]
        if len(positive) and positive.max() > _FAR * positive.min():
            axes.plot(places, shown, color=BLUE, linewidth=0.8, marker="o", markersize=6)
            log_scale(axes)
        else:
            axes.set_axisbelow(True)
            axes.bar(places, shown, width=0.75, color=BLUE)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        if overall > 0:
            axes.axhline(overall, color=VERMILLION, linestyle="--", linewidth=1.2, label="all tokens")
            axes.legend(loc="best", fontsize=8.5)
        _name_bins(axes, view.labels)
        axes.set(xlabel=xlabel, ylabel=ylabel)

    return _draw(f"{ylabel} by {view.name}", paint)


def rejected_svg(view: View, rules: Mapping[str, np.ndarray]) -> str:
    """Share of responses that each sequence rule rejects, over bins of response length."""

    def paint(axes: Axes) -> None:
        places = np.arange(len(view.labels))
        for index, (rule, share) in enumerate(rules.items()):
            axes.plot(
                places,
                share,
                color=CYCLE[index % len(CYCLE)],
                linestyle=STYLES[index % len(STYLES)],
                marker="osD^vP"[index % 6],
                markersize=4,
                label=rule,
            )
        highest = max(float(np.nanmax(share, initial=0.0)) for share in rules.values())
        axes.set_ylim(-0.03 * (highest or 1), 1.08 * (highest or 1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
        _name_bins(axes, view.labels)
        axes.set(xlabel="length of the response, tokens", ylabel="responses rejected")

    return _draw("Rejected responses by length", paint, legend=True)


def k3_steps_svg(steps: np.ndarray, k3: np.ndarray, floor: float) -> str:
    """k3 of each step on a logarithmic axis, published ranges shaded."""

    def paint(axes: Axes) -> None:
        axes.plot(steps, k3, color=BLUE, marker="o" if len(steps) < 40 else None, markersize=3, label="k3")
        if not (k3 > 0).any():
            return
        log_scale(axes)
        bottom, top = axes.get_ylim()
        for (start, end), color, name in ((DENSE, GREEN, "dense range"), (MOE, ORANGE, "MoE range")):
            if end > bottom and start < top:
                axes.axhspan(max(start, bottom), min(end, top), color=color, alpha=0.15, linewidth=0, label=name)
        if bottom < floor < top:
            axes.axhline(floor, color=INK, linestyle=":", linewidth=1, label="rounding")
        axes.set_ylim(bottom, top)

    return _over_steps("k3 over steps", paint, "k3, nats")


def ess_steps_svg(steps: np.ndarray, token: np.ndarray, sequence: np.ndarray) -> str:
    """Effective sample size of token and sequence weights over steps."""

    def paint(axes: Axes) -> None:
        marker = "o" if len(steps) < 40 else None
        axes.plot(steps, token, color=BLUE, marker=marker, markersize=3, label="token weights")
        axes.plot(
            steps, sequence, color=VERMILLION, linestyle="--", marker=marker, markersize=3, label="sequence weights"
        )
        axes.set_ylim(0, 1.05)

    return _over_steps("Effective sample size over steps", paint, "share of the samples")


def tails_svg(steps: np.ndarray, quantiles: Sequence[np.ndarray]) -> str:
    """Quantiles 1, 5, 50, 95, 99 of the ratio over steps; 1 is neutral."""
    first, fifth, median, ninety, last = quantiles

    def paint(axes: Axes) -> None:
        axes.fill_between(steps, first, last, color=SKY, alpha=0.35, linewidth=0, label="1 to 99%")
        axes.fill_between(steps, fifth, ninety, color=BLUE, alpha=0.4, linewidth=0, label="5 to 95%")
        axes.plot(steps, median, color=VERMILLION, label="median")
        axes.axhline(1.0, color=INK, linewidth=0.6, linestyle=":")
        if first.min() > 0 and last.max() / first.min() > 10:
            log_scale(axes)

    return _over_steps("Ratio tails over steps", paint, "trainer / sampler")


def _over_steps(name: str, paint: Callable[[Axes], None], ylabel: str) -> str:
    def whole(axes: Axes) -> None:
        paint(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.set(xlabel="step", ylabel=ylabel)

    return _draw(name, whole, legend=True)


def _centers(edges: np.ndarray, *, log: bool) -> np.ndarray:
    """Middles of the bins; an open end (0 or infinite) stands one bin width beyond its neighbor."""
    edges = edges.astype(np.float64).copy()
    if log:
        if edges[0] <= 0:
            edges[0] = edges[1] ** 2 / edges[2] if len(edges) > 2 else edges[1] / 10
        return np.sqrt(edges[:-1] * edges[1:])
    if not np.isfinite(edges[-1]):
        edges[-1] = 2 * edges[-2] - edges[-3] if len(edges) > 2 else edges[-2] + 1
    return (edges[:-1] + edges[1:]) / 2


def _name_bins(axes: Axes, labels: Sequence[str]) -> None:
    """A label below each bin, or below every second or third where they would run into each other."""
    width = max((len(label) for label in labels), default=1)
    every = max(math.ceil(len(labels) / _TICKS), math.ceil(len(labels) * width / 60))
    axes.set_xticks(range(0, len(labels), every), [labels[index] for index in range(0, len(labels), every)], fontsize=8)
    axes.grid(visible=False, axis="x")


def _log_labels(axes: Axes) -> None:
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,), numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _tick(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}".replace("e-0", "e-")


def _count(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2g}{unit}" if value < 100 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"


def _draw(name: str, paint: Callable[[Axes], None], *, legend: bool = False, height: float = 2.7) -> str:
    with mpl.rc_context(RC):
        figure = Figure(figsize=(4.2, height), layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        if legend and len(axes.get_legend_handles_labels()[1]) > 1:
            figure.legend(loc="outside upper left", ncols=2, columnspacing=1.2)
        return to_svg(figure, name)
