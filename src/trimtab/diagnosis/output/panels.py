"""The figures of a diagnosis with their words: what to look for, and what this data shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from trimtab.diagnosis.output import diagnose_figures as figures
from trimtab.diagnosis.output.words import brief, percent, size_text
from trimtab.diagnosis.records import Measured

TAILS = ("ratio_q01", "ratio_q05", "ratio_q50", "ratio_q95", "ratio_q99")


@dataclass(frozen=True)
class Panel:
    """One figure for the template. look: what to look for; here: what this data shows."""

    title: str
    now: str
    svg: Markup
    look: str
    here: str


@dataclass(frozen=True)
class Panels:
    """The figures there are, and in a few words each what there is not."""

    shown: list[Panel]
    absent: list[str]


def how_large(measured: Measured) -> Panels:
    """Scatter, and the curves over steps."""
    rows = measured.size.by_step
    shown = [_range(measured), _scatter(measured)]
    if len(rows) < 2:
        why = "the files hold one step" if rows else "the files do not say which step a response is of"
        return Panels(shown, [f"curves over steps ({why})"])
    return Panels([*shown, *_over_steps(measured)], [])


def at(values: np.ndarray, index: int) -> str:
    return brief(float(values[index]))


def share_at(values: np.ndarray, index: int) -> str:
    return percent(float(values[index]))


def signed_at(values: np.ndarray, index: int) -> str:
    text = at(values, index)
    return f"+{text}" if values[index] > 0 else text.replace("-", "−", 1) if values[index] < 0 else text


def panel(title: str, now: str, svg: str, look: str, here: str) -> Panel:
    return Panel(title, now, Markup(svg), look, here)


def _range(measured: Measured) -> Panel:
    size = measured.size
    look = "The diamond is k3, the thick line its 95% interval, the colored bands what others report."
    here = f"{size_text(size)}. Rounding of the stored log-probs alone makes {brief(size.floor)}."
    return panel("Against published ranges", f"k3 {brief(size.mismatch['k3'])}", figures.range_svg(size), look, here)


def _scatter(measured: Measured) -> Panel:
    counts, r = measured.scatter, measured.size.mismatch.get("pearson", math.nan)
    total = int(counts.sum())
    bins = len(counts)
    row, column = np.indices(counts.shape)
    off = float(counts[np.abs(row - column) > max(1, bins // 20)].sum() / total) if total else math.nan
    now = f"r = {r:.5f}" if math.isfinite(r) else "r not defined"
    look = "Off the dotted line trainer and sampler disagree about a token; healthy is r above 0.99."
    here = f"{total:,} tokens, {percent(off)} of them more than 0.05 away from the line."
    return panel("Trainer against sampler", now, figures.scatter_svg(counts), look, here)


def _over_steps(measured: Measured) -> list[Panel]:
    rows, floor = measured.size.by_step, measured.size.floor
    steps = _column(rows, "step")
    panels = []
    k3 = _column(rows, "k3")
    if np.isfinite(k3).any():
        now = f"{brief(k3[0])} → {brief(k3[-1])}"
        look = "A mismatch that grows while training goes on comes before a collapse; a jump is a changed setting."
        panels.append(panel("k3 over steps", now, figures.k3_steps_svg(steps, k3, floor), look, _trend(steps, k3)))
    names = {"ess_token": "token weights", "ess_seq": "sequence weights"}
    curves = {
        name: values for key, name in names.items() for values in [_column(rows, key)] if np.isfinite(values).any()
    }
    if curves:
        look = "Share of the data that counts under unbounded importance weights; near 0, those weights are noise."
        here = "; ".join(
            f"{name} {at(values, 0)} at first, {at(values, -1)} at last" for name, values in curves.items()
        )
        now = f"lowest {brief(min(float(np.nanmin(values)) for values in curves.values()))}"
        panels.append(panel("ESS over steps", now, figures.ess_steps_svg(steps, curves), look, f"{here}."))
    tails = [_column(rows, key) for key in TAILS]
    if all(np.isfinite(values).all() for values in tails):
        low, high = tails[0], tails[-1]
        worst = int(np.argmax(high / low))
        look = "Bands that widen with training: the tail of the ratio blows up, and fixed bounds reject ever more."
        here = (
            f"Widest at step {steps[worst]:.0f}: 1% of the ratios below {low[worst]:.3g}, 1% above {high[worst]:.3g}."
        )
        svg = figures.tails_svg(steps, tails)
        panels.append(panel("Ratio tails over steps", f"99%: {high[-1]:.3g}", svg, look, here))
    return panels


def _trend(steps: np.ndarray, k3: np.ndarray) -> str:
    highest = int(np.nanargmax(k3))
    part = max(len(k3) // 4, 1)
    early, late = float(np.nanmedian(k3[:part])), float(np.nanmedian(k3[-part:]))
    peak = f"highest at step {steps[highest]:.0f} ({at(k3, highest)})"
    if not early > 0:
        return f"{peak[0].upper()}{peak[1:]}."
    change = late / early
    if 0.67 < change < 1.5:
        return f"Steady; {peak}."
    how = f"Grows {change:.2g}-fold" if change > 1 else f"Falls to {percent(change)}"
    return f"{how} from the first quarter to the last; {peak}."


def _column(rows: tuple[Mapping[str, float], ...], key: str) -> np.ndarray:
    return np.array([row.get(key, math.nan) for row in rows], dtype=np.float64)
