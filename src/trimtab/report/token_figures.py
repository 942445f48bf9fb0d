"""The figures of the report's token section."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trimtab.diagnosis.tokens import DECILES
from trimtab.pages.charts import draw
from trimtab.pages.numbers import short
from trimtab.pages.svg import BLUE, INK, ORANGE, SKY, VERMILLION, log_ticks, percent
from trimtab.report.token_statistics import Envelope, Shift

# Color, fill and line style of the first and of the last step shown.
_ENDS = ((VERMILLION, ORANGE, "--"), (BLUE, SKY, "-"))


def envelope_svg(envelopes: Mapping[int, Envelope]) -> Markup:
    """Percentiles of log π − log μ over the behavior probability, for one or two steps."""

    def paint(axes: Axes) -> None:
        for (step, envelope), (color, fill, style) in zip(envelopes.items(), _ENDS[-len(envelopes) :], strict=True):
            marker = "o" if len(envelope.probability) < 4 else None
            axes.fill_between(envelope.probability, envelope.low, envelope.high, color=fill, alpha=0.25, linewidth=0)
            if marker:  # a filled band over fewer than four bins is hardly visible
                axes.vlines(envelope.probability, envelope.low, envelope.high, color=color, linewidth=0.7)
            for edge in (envelope.low, envelope.high):
                axes.plot(envelope.probability, edge, color=color, linewidth=0.7, marker=marker, markersize=2)
            axes.plot(
                envelope.probability,
                envelope.median,
                color=color,
                linestyle=style,
                marker=marker,
                markersize=4,
                label=f"step {step}",
            )
        axes.axhline(0.0, color=INK, linewidth=0.6, linestyle=":")
        axes.set_xscale("log")
        axes.set_xlim(min(envelope.probability.min() for envelope in envelopes.values()) / 2, 1.0)
        log_ticks(axes.xaxis)
        axes.set_xlabel("behavior probability")
        axes.set_ylabel("log π − log μ, nats")

    return draw("Log-ratio envelope", paint, legend=True)


def shift_svg(histogram: Shift) -> Markup:
    """Histogram of |p_perturbed − p_clean| with its 75th percentile."""

    def paint(axes: Axes) -> None:
        axes.stairs(histogram.count, histogram.edges, fill=True, color=SKY, alpha=0.6, label="tokens")
        axes.stairs(histogram.count, histogram.edges, color=BLUE, linewidth=1.0)
        if histogram.upper_quartile > 0:
            label = f"75th percentile {short(histogram.upper_quartile)}"
            axes.axvline(histogram.upper_quartile, color=VERMILLION, linestyle="--", label=label)
        axes.set_axisbelow(True)
        axes.set_xscale("log")
        log_ticks(axes.xaxis)
        axes.set_xlabel("|p with noise − p without|")
        axes.set_ylabel("tokens")

    return draw("Change of probability", paint, legend=True)


def entropy_svg(entropies: Mapping[int, np.ndarray]) -> Markup:
    """Returns the mean entropy (10,) of each tenth of the response, for one or two steps."""

    def paint(axes: Axes) -> None:
        for (step, values), (color, _, style) in zip(entropies.items(), _ENDS[-len(entropies) :], strict=True):
            valid = np.isfinite(values)
            axes.plot(
                _decile_centers()[valid],
                values[valid],
                color=color,
                linestyle=style,
                marker="o",
                markersize=3,
                label=f"step {step}",
            )
        axes.set_ylim(bottom=0)
        axes.set_ylabel("entropy, nats")
        _position_axis(axes)

    return draw("Entropy by position", paint, legend=True)


def clipped_svg(shares: Mapping[str, np.ndarray]) -> Markup:
    """Stacked fractions (10,) of clipped tokens in each tenth of the response, by label; at most two."""

    def paint(axes: Axes) -> None:
        axes.set_axisbelow(True)  # no grid across the bars
        total = np.zeros(DECILES)
        for (label, share), color in zip(shares.items(), (ORANGE, BLUE), strict=False):
            axes.bar(_decile_centers(), np.nan_to_num(share), width=8, bottom=total, color=color, label=label)
            total = total + np.nan_to_num(share)
        highest = float(total.max())
        axes.set_ylim(0, 1.08 * highest if highest > 0 else 0.01)
        percent(axes.yaxis)
        axes.set_ylabel("clipped tokens")
        _position_axis(axes)

    return draw("Clipped tokens by position", paint, legend=len(shares) > 1)


def _decile_centers() -> np.ndarray:
    """Returns the center (10,) of each tenth in percent of the response."""
    return 100.0 * (np.arange(DECILES) + 0.5) / DECILES


def _position_axis(axes: Axes) -> None:
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
    axes.set_xlabel("position in the response")
