"""What figures show, by numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trimtab.pages import charts
from trimtab.report import run_charts
from trimtab.report.run_charts import chart_sections
from trimtab.report.step_curves import Curve, draw_curves
from trimtab.runs.metric_catalog import Metric
from trimtab.runs.reader import Run
from trimtab.text import number, short


def _draw(axes: Axes, values: list[float], *, log: bool = False, top: float | None = None) -> None:
    draw_curves(axes, [Curve("a", [(np.arange(1, len(values) + 1, dtype=float), np.array(values))])], log=log, top=top)


def test_returns_are_marked_without_changing_the_axis() -> None:
    axes = Figure().add_subplot()
    _draw(axes, [0.2] * 40)
    limits = axes.get_ylim()
    starts = {21: 10, 26: 10, 36: 28}
    rows = [
        {"step": step} | ({"guard/continues_from": starts[step]} if step in starts else {}) for step in range(1, 41)
    ]
    run_charts._mark_returns(axes, Run(Path("run"), {}, rows))
    assert axes.get_ylim() == limits
    spans = [patch.get_extents().transformed(axes.transData.inverted()).intervalx for patch in axes.patches]
    assert [list(span) for span in spans] == [pytest.approx([10.5, 25.5]), pytest.approx([28.5, 35.5])]
    assert [float(np.asarray(line.get_xdata())[0]) for line in axes.lines[1:]] == [21, 26, 36]
    assert axes.get_legend_handles_labels()[1] == ["a", "returned to earlier steps"]


def test_a_curve_lying_on_zero_is_seen() -> None:
    axes = Figure().add_subplot()
    _draw(axes, [0.0, 0.0, 0.0], log=True, top=0.2)
    low, high = axes.get_ylim()
    assert low < 0 < high == pytest.approx(0.216)
    assert axes.get_yscale() == "linear", "a logarithmic axis has no place for zeros"


def test_healthy_band_is_drawn_inside_the_axis_only() -> None:
    axes = Figure().add_subplot()
    axes.set_ylim(0.5, 1.2)
    run_charts._shade_healthy(axes, Metric("k", "", "", "", "", "", low=0.95, high=2.0))
    (band,) = axes.patches
    assert band.get_extents().transformed(axes.transData.inverted()).intervaly == pytest.approx([0.95, 1.2])
    assert axes.get_ylim() == (0.5, 1.2)


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (charts.short_power, 0.001, "1e-3"),
        (charts.short_power, 2e-13, "2e-13"),
        (charts.short_power, 0.05, "0.05"),
        (charts.short_power, 20.0, "20"),
        (charts.short_power, 1000.0, "1e3"),
        (charts.short_power, -0.001, "\N{MINUS SIGN}1e-3"),
        (number, None, "–"),
        (number, float("nan"), "–"),
        (number, 0.0, "0"),
        (number, 4_800_000_000, "4,800,000,000"),
        (number, 12345.6, "12,346"),
        (number, 0.123456, "0.1235"),
        (number, 0.000123456, "1.23e-4"),
        (number, -2.5e-10, "-2.50e-10"),
        (number, "current", "current"),
        (short, 0.2567, "0.26"),
        (short, 0.00187, "1.9e-3"),
    ],
)
def test_numbers(form: Callable[[Any], str], value: float | str | None, text: str) -> None:
    assert form(value) == text


def test_a_negative_estimate_is_drawn_below_zero() -> None:
    """chi2 of a few tokens may be negative; the page showed its magnitude."""
    axes = Figure().add_subplot()
    values = [1e-3, -2e-4, 30.0, -1e-2, 0.0]
    _draw(axes, values, log=True)
    (line,) = axes.lines
    assert np.asarray(line.get_ydata()).tolist() == values
    assert axes.get_yscale() == "symlog"
    low, high = axes.get_ylim()
    assert low < -1e-2
    assert high > 30
    heights = [axes.transData.transform((1, value))[1] for value in (-1e-2, -2e-4, 0.0, 1e-3, 30.0)]
    assert heights == sorted(heights)
    assert all(low <= tick <= high for tick in axes.get_yticks())
    assert "0" in [label.get_text() for label in axes.get_yticklabels()]


def test_the_bound_of_the_gradient_norm_is_drawn() -> None:
    axes = Figure().add_subplot()
    axes.set_ylim(1.9, 6.5)
    run_charts._draw_bound(axes, "optim.grad_clip", Run(Path("run"), {"optim": {"grad_clip": 1.0}}, []))
    (line,) = axes.lines
    assert set(np.asarray(line.get_ydata())) == {1.0}
    assert axes.get_ylim()[0] < 1.0, "norms of 1.9 to 6.5 are seen to be above it"


@pytest.mark.parametrize("values", [[0.0, 0.3], [0.2, 0.0, 0.4], [-0.3], [-0.4, 0.1]])
def test_an_axis_of_both_signs_shows_every_point_and_zero(values: list[float]) -> None:
    axes = Figure().add_subplot()
    axes.plot(range(len(values)), values)
    charts.log_scale_of_any_sign(axes)
    bottom, top = axes.get_ylim()
    assert bottom < min(*values, 0.0)
    assert top > max(*values, 0.0)


def test_curves_of_one_title_share_a_chart_and_a_total_of_one_part_is_drawn_once() -> None:
    values = {"reward/mean": 0.1, "reward/exact": 0.1, "reward/std": 0.5, "length/mean": 9.0, "length/max": 20.0}
    values |= {"mismatch/k3": 1e-3, "weight/q01": 0.9, "lag/mean": 0.0}
    found = chart_sections(Run(Path("run"), {}, [{"step": step, **values} for step in range(1, 4)]))
    assert (found[0].title, found[-1].title) == ("Reward and length", "Progress and age")
    shown = {chart.title: chart for part in found for chart in part.parts[0].shown}  # type: ignore[union-attr]
    assert shown.keys() == {"Reward", "Response length", "KL estimates", "Weight after its bound", "Age of the tokens"}
    assert [note.label for note in shown["Response length"].notes] == ["mean", "longest"]
    # One curve: the only part repeats the total, and reward/std is none of the parts.
    assert [note.label for note in shown["Reward"].notes] == ["", "Healthy"]
